"""Attribution patching is the slope of the metric as a site moves from its own run to the other, at every site."""

from functools import partial

import numpy as np
import pytest
import scipy.stats
import torch
import xarray as xr
from torch import Tensor

from interp import Edit, HookedTransformer, Read, observe
from interp.causal import attribution_patch, patch
from interp.causal.attribution_patching import _cells_to_patch
from interp.causal.contrast import site_names
from interp.causal.effects import fisher_z
from interp.data.batch import Batch
from interp.model import Tap, Transformer
from interp.model.sites import DIMS, EMBEDDING_SITES, block_rows, names
from interp.passes.metrics import kl_divergence, logit_difference, next_token_loss, of_logits
from tests.batches import in_batches
from tests.causal.slow_edges import ANSWER, WRONG, difference
from tests.circuits.test_edge_attribution import CLEAN, CORRUPT, linear, padded
from tests.configs import CONFIGS, build, some_tokens
from tests.loops import over
from tests.tiny import hooked
from tests.tolerances import assert_close, student95

METRIC = logit_difference(ANSWER, WRONG)
STEP = 1e-5


def patched(model: Transformer, site: str = "z", **how: object) -> xr.Dataset:
    return attribution_patch(HookedTransformer(model), CLEAN, CORRUPT, site, metric=METRIC, **how)  # type: ignore[arg-type]


def before_the_end(name: str) -> list[str]:
    """Every site of layer 1 and of the embeddings."""
    every = names(CONFIGS[name], on_demand=True)
    return [s for s in every if s.startswith("blocks.1.") or s in EMBEDDING_SITES]


def recorded(model: Transformer, tokens: Tensor, site: str) -> Tensor:
    return observe(model, Batch(tokens), [Read(site)]).trace[site]


def slope(model: Transformer, own: Tensor, site: str, towards: Tensor) -> Tensor:
    """d metric / d t of every row while the site is `own + t towards`, by a central difference."""

    def at(t: float) -> Tensor:
        edit = Edit(site, lambda x: torch.where(towards == 0, x, x + t * towards))
        with torch.no_grad():
            return difference(model(own, Tap(edits=[edit])))

    return (at(STEP) - at(-STEP)) / (2 * STEP)


def change(model: Transformer, own: Tensor, other: Tensor, site: str) -> Tensor:
    here, there = (recorded(model, x, site) for x in (own, other))
    return torch.where(here == there, 0.0, there - here)


@pytest.mark.parametrize(
    ("name", "direction"),
    [
        ("gpt2", "denoise"),
        ("gemma2", "noise"),
        ("gptj", "denoise"),
        ("gpt-oss", "denoise"),
        ("masked-lm", "noise"),
    ],
)
def test_every_site_s_sum_is_the_slope_of_the_metric(name: str, direction: str) -> None:
    """Everything summed: moving the whole site. Among them `hook_mlp_in`, the MLP's own copy of the stream."""
    model = build(name)
    own, other = (CORRUPT, CLEAN) if direction == "denoise" else (CLEAN, CORRUPT)
    for site in before_the_end(name)[:: 1 if name == "gpt2" else 2]:
        short = site.removeprefix("blocks.1.")
        towards = change(model, own, other, site)
        expected = slope(model, own, site, towards)
        if not bool(expected.any()):
            continue  # positions and token types are the same in both runs
        layered = ("layer",) if site.startswith("blocks.") else ()
        found = patched(model, short, direction=direction, by=layered)
        each = torch.from_numpy(found["each"].values)
        each = each[:, 1] if "layer" in found["each"].dims else each
        assert (each - expected).abs().max() < 1e-5 * max(1.0, float(expected.abs().max())), site


@pytest.mark.parametrize(
    ("site", "cell"),
    [
        ("z", (6, 3)), ("v", (4, 1)), ("resid_pre", (3,)), ("pattern", (1, 6, 2)), ("mlp.hook_post", (6, 17)),
        ("attn_scores", (2, 6, 1)), ("mlp_out", (6,)), ("k", (0, 1)),
    ],
)  # fmt: skip
def test_a_cell_is_the_slope_as_that_cell_alone_moves(site: str, cell: tuple[int, ...]) -> None:
    model = build("llama-gqa")
    full = site_names(site, model.config)[1]
    towards = change(model, CORRUPT, CLEAN, full)
    alone = torch.zeros_like(towards)
    alone.movedim(0, -1)[cell] = towards.movedim(0, -1)[cell]
    each = torch.from_numpy(patched(model, site)["each"].values)
    found = each[:, 1].movedim(0, -1)[cell]
    expected = slope(model, CORRUPT, full, alone)
    assert (found - expected).abs().max() < 1e-6
    assert expected.abs().max() > 1e-5


@over("direction", ["denoise", "noise"])
@over("site", ["z", "resid_pre", "mlp_out", "v", "hook_mlp_in", "mlp.hook_post"])
def test_in_a_linear_network_it_is_exact_patching(site: str, direction: str) -> None:
    model = linear()
    own, other = (CORRUPT, CLEAN) if direction == "denoise" else (CLEAN, CORRUPT)
    each = torch.from_numpy(patched(model, site, direction=direction, by=("layer", "pos"))["each"].values)
    for layer, full in enumerate(site_names(site, model.config)):
        given = recorded(model, other, full)
        for pos in (1, 6):

            def replaced(x: Tensor, given: Tensor = given, pos: int = pos) -> Tensor:
                x[:, pos] = given[:, pos]
                return x

            exact = difference(model(own, Tap(edits=[Edit(full, replaced)]))) - difference(model(own))
            assert_close(each[:, layer, pos], exact, torch.float64)
        assert exact.abs().max() > 1e-3, "the last position, at least, counts"


def test_results_are_labelled_by_the_site_s_axes() -> None:
    model = build("llama-gqa")
    table = patched(model, "pattern")
    assert table.value.dims == ("layer", "head", "query", "key")
    assert table["each"].dims == ("prompt", "layer", "head", "query", "key")
    assert patched(model, "k").value.dims == ("layer", "pos", "kv_head")
    assert patched(model, "embed").value.dims == ("pos",)
    assert patched(model, "blocks.1.attn.hook_z").value.dims == ("layer", "pos", "head")
    assert patched(model, "blocks.1.attn.hook_z").layer.values.tolist() == [1]
    assert table.attrs["unit"] == "logits" and table.attrs["direction"] == "denoise"
    for site in block_rows():
        # Summed over: the batch, widths, channels, and the columns c of what only some mixers have.
        assert set(site.axes.split()) - set("bdevfruw1c") <= set(DIMS), site.name


def test_dims_left_out_are_summed_over() -> None:
    model = build("gpt2")
    whole = patched(model)["each"]
    np.testing.assert_allclose(patched(model, by=("head", "layer"))["each"], whole.sum("pos"), atol=1e-12)
    np.testing.assert_allclose(patched(model, by=("layer",))["each"], whole.sum(("pos", "head")), atol=1e-12)
    np.testing.assert_allclose(patched(model, by=("head",))["each"], whole.sum(("pos", "layer")), atol=1e-12)
    np.testing.assert_allclose(patched(model, by=())["each"], whole.sum(("pos", "layer", "head")), atol=1e-12)


def test_the_mean_comes_with_its_interval_and_the_metric_of_both_runs() -> None:
    model = build("gpt2")
    for direction in ("denoise", "noise"):
        table = patched(model, direction=direction)
        each = table["each"].values
        half = student95(3) * each.std(0, ddof=1) / np.sqrt(3)
        np.testing.assert_allclose(table.value, each.mean(0), atol=1e-12)
        np.testing.assert_allclose(table.high - table.value, half, atol=1e-12)
        np.testing.assert_allclose(table.clean, difference(model(CLEAN)), atol=1e-12)
        np.testing.assert_allclose(table.corrupt, difference(model(CORRUPT)), atol=1e-12)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_number_and_has_none(side: str) -> None:
    model = HookedTransformer(build("llama-gqa"))
    plain = attribution_patch(model, CLEAN, CORRUPT, metric=METRIC)["each"]
    wide = attribution_patch(model, padded(CLEAN, side), padded(CORRUPT, side), metric=METRIC)["each"]
    np.testing.assert_allclose(wide[:, :, :7], plain, atol=1e-9)
    assert bool(wide[:, :, 7:].isnull().all()), "nothing at the padding"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_agrees_with_double(dtype: torch.dtype) -> None:
    wide, narrow = (patched(build("gpt2", d))["each"].values for d in (torch.float64, dtype))
    assert_close(torch.from_numpy(narrow).double(), torch.from_numpy(wide), dtype)
    assert narrow.dtype == np.float32


def test_metrics_of_every_kind_are_differentiated() -> None:
    model = HookedTransformer(build("gpt2"))
    answers = Batch(CLEAN).with_answers(torch.full((3,), ANSWER), torch.full((3,), WRONG))
    carried = attribution_patch(model, answers, CORRUPT)
    np.testing.assert_allclose(carried["each"], patched(build("gpt2"))["each"], atol=1e-12)
    own = of_logits(lambda x: x[:, -1, ANSWER] - x[:, -1, WRONG])
    mine = attribution_patch(model, CLEAN, CORRUPT, metric=own)
    np.testing.assert_allclose(mine["each"], carried["each"], atol=1e-12)
    loss = attribution_patch(model, CLEAN, CORRUPT, "resid_pre", metric=next_token_loss())
    assert_close(torch.from_numpy(loss.clean.values), losses(build("gpt2"), CLEAN))
    diverged = attribution_patch(model, CLEAN, CORRUPT, "resid_pre", metric=kl_divergence())
    assert float(abs(diverged.clean).max()) < 1e-12 < float(diverged.corrupt.min())


def losses(model: Transformer, tokens: Tensor) -> Tensor:
    picked = model(tokens)[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
    return -picked.mean(1)


def test_texts_are_prompts_too() -> None:
    model = hooked("gpt2")
    pair = "When Mary and John went to the shop, Mary gave", "When Mary and John went to the shop, John gave"
    lengths = [model.text.batch(text).tokens.shape[1] for text in pair]
    assert lengths[0] == lengths[1]
    table = attribution_patch(model, *pair, metric=logit_difference(3, 4))
    assert table.value.shape == (2, lengths[0], 4)
    differing = model.text.batch(pair[0]).tokens[0] != model.text.batch(pair[1]).tokens[0]
    first = int(differing.int().argmax())
    assert float(abs(table.value[:, :first]).max()) == 0, "nothing differs before the first other token"


# refusals


def test_pairs_that_do_not_align_are_refused() -> None:
    model = HookedTransformer(build("gpt2"))
    for corrupt, what in {
        CORRUPT[:2]: "one corrupted prompt per clean prompt is required, got 2 for 3",
        CORRUPT[:, :5]: r"must have the same length, token for token: got \[7, 7, 7\] and \[5, 5, 5\] tokens",
        torch.cat((CORRUPT[:1], CLEAN[1:2], CORRUPT[2:])): r"must differ from its clean one, .* rows \[1\]",
    }.items():
        with pytest.raises(ValueError, match=what):
            attribution_patch(model, CLEAN, corrupt, metric=METRIC)
    said = (
        r"requires an answer for every prompt, got none: metric=.*, which is watched where no metric is given"
    )
    with pytest.raises(ValueError, match=said):
        attribution_patch(model, CLEAN, CORRUPT)


def test_prompts_of_different_lengths_have_the_estimates_of_each_alone() -> None:
    model, keep = HookedTransformer(build("gpt2")), torch.ones(3, 7, dtype=torch.bool)
    keep[1, 5:] = False
    pair = Batch(CLEAN, keep), Batch(CORRUPT, keep)
    by_pos = attribution_patch(model, *pair, metric=METRIC)["each"][1].transpose("pos", ...)
    short = attribution_patch(model, CLEAN[1:2, :5], CORRUPT[1:2, :5], metric=METRIC)["each"][0]
    np.testing.assert_allclose(by_pos[:5], short.transpose("pos", ...), rtol=1e-9, atol=1e-12)
    assert bool(by_pos[5:].isnull().all())
    summed = attribution_patch(model, *pair, metric=METRIC, by=("layer", "head"))["each"][1]
    alone = attribution_patch(model, CLEAN[1:2, :5], CORRUPT[1:2, :5], metric=METRIC, by=("layer", "head"))[
        "each"
    ][0]
    np.testing.assert_allclose(summed, alone, atol=1e-12)


def test_what_cannot_be_estimated_is_refused_by_name() -> None:
    model = HookedTransformer(build("gpt2"))
    with pytest.raises(
        ValueError, match="KL divergence compares with the clean run, where its gradient is 0"
    ):
        attribution_patch(model, CLEAN, CORRUPT, metric=kl_divergence(), direction="noise")
    with pytest.raises(ValueError, match="its gradient at z is zero in every prompt"):
        attribution_patch(
            model, CLEAN, CORRUPT, metric=of_logits(lambda x: x[:, 0].argmax(-1) + 0 * x[:, 0, 0])
        )
    with pytest.raises(ValueError, match="is 0 for clean and corrupted runs alike in every prompt"):
        attribution_patch(model, CLEAN, CORRUPT, metric=of_logits(lambda x: 0 * x[:, 0, 0]))
    with pytest.raises(
        ValueError, match=r"before the final norm is required, 'unembed.hook_out' comes after"
    ):
        patched(build("gpt2"), "unembed.hook_out")
    with pytest.raises(KeyError, match="z has the dims layer, pos, head, not 'heads'; nearest: head"):
        patched(build("gpt2"), by=("heads",))
    with pytest.raises(KeyError, match="unknown site shorthand 'zz'"):
        patched(build("gpt2"), "zz")
    with pytest.raises(KeyError, match=r"this model has no 'blocks.0.mlp.hook_post'"):
        patched(build("attention-only"), "mlp.hook_post")


# agreement with exact patching


def test_agreement_is_the_mean_fisher_z_of_patches_one_by_one() -> None:
    """Every cell is drawn, so that the correlations are those of both whole maps, prompt by prompt."""
    model = build("gpt2")
    clean, corrupt = some_tokens(17, 6), some_tokens(17, 6, seed=1)
    corrupt[:, :2] = clean[:, :2]  # cells that are alike in both runs, which do not count
    both = {"metric": METRIC, "by": ("layer", "pos"), "each": True}
    every = {"agreement": 1000, "agreement_prompts": None, **both}
    found = attribution_patch(HookedTransformer(model), clean, corrupt, "z", **every)  # type: ignore[arg-type]
    exact = patch(HookedTransformer(model), clean, corrupt, "z", **both)  # type: ignore[arg-type]
    counts = exact.changed.values.copy()  # not layer 1 before the last position, which reaches nothing
    assert counts.sum() == 5 and not counts[:, :2].any()
    ours, theirs = (x["each"].values[:, counts] for x in (found, exact))
    pearson = np.arctanh([np.corrcoef(x, y)[0, 1] for x, y in zip(ours, theirs, strict=True)])
    ranked = np.array([scipy.stats.spearmanr(x, y)[0] for x, y in zip(ours, theirs, strict=True)])
    assert ranked.max() > 0.99, "the cut is tried"
    spearman = np.arctanh(ranked.clip(-1 + 6 / 120, 1 - 6 / 120))
    for z, name in ((pearson, "pearson"), (spearman, "spearman")):
        half = student95(17) * z.std(ddof=1) / 17**0.5
        given = found.sel(coefficient=name)
        ends = np.tanh([z.mean(), z.mean() - half, z.mean() + half])
        np.testing.assert_allclose(given.agreement, ends, rtol=1e-6)  # float32, in passes of other shapes


@pytest.mark.parametrize("prompts", [4, None])
def test_cells_are_drawn_alike_whatever_the_batch_is(prompts: int | None) -> None:
    model, clean, corrupt = (
        HookedTransformer(build("llama-gqa")),
        some_tokens(9, 6),
        some_tokens(9, 6, seed=1),
    )

    def ask(agreement: int, size: int, each: bool) -> xr.Dataset:
        pair = in_batches(model, clean, size), in_batches(model, corrupt, size)
        return attribution_patch(
            model, *pair, metric=METRIC, agreement=agreement, agreement_prompts=prompts, each=each
        )

    one, other, kept = (ask(5, size, each) for size, each in ((9, False), (2, False), (4, True)))
    first, *others = (found.agreement.sel(estimate="value") for found in (one, other, kept))
    for each in others:
        np.testing.assert_allclose(first, each, rtol=1e-6)  # float32, in passes of other shapes
    assert bool(one.agreement.sel(estimate=["low", "high"]).isnull().all()), "9 prompts are too few"
    assert not np.allclose(first, ask(6 * 8, 9, False).agreement.sel(estimate="value"), rtol=1e-3)


def test_half_of_the_cells_are_those_of_the_largest_estimates() -> None:
    model, pair = HookedTransformer(build("gpt2")), (CLEAN[:1], CORRUPT[:1])
    estimate = attribution_patch(model, *pair, metric=METRIC)["each"].values[0]
    exact = patch(model, *pair, "z", metric=METRIC, by=("layer", "pos", "head"))["each"].values[0]
    drawn = _cells_to_patch(
        torch.tensor(estimate.ravel()), torch.ones(estimate.size, dtype=torch.bool), 6, 0
    ).tolist()
    assert len(set(drawn)) == 6 and set(np.abs(estimate).ravel().argsort()[-3:]) <= set(drawn)
    found = attribution_patch(model, *pair, metric=METRIC, agreement=6).agreement.sel(estimate="value")
    moved = np.abs(exact.ravel()[drawn]) > 0
    x, y = (values.ravel()[drawn][moved] for values in (estimate, exact))
    np.testing.assert_allclose(found.sel(coefficient="pearson"), np.corrcoef(x, y)[0, 1], rtol=1e-6)


def test_first_prompts_say_by_default_how_far_to_trust_the_estimates() -> None:
    model = HookedTransformer(build("gpt2"))
    found = attribution_patch(model, CLEAN, CORRUPT, metric=METRIC)
    values = found.agreement.sel(estimate="value")
    pearson, spearman = values.values
    said = f"pearson {pearson:.3f}, spearman {spearman:.3f}, 16 cells patched in each of the first 4 prompts"
    assert found.view.facts["agreement"].startswith(said) and "notes" not in found.attrs
    wild = of_logits(
        lambda logits: torch.sin(900 * logits[:, -1, 3])
    )  # as good as random, and so is its slope
    (said,) = attribution_patch(model, CLEAN, CORRUPT, metric=wild).attrs["notes"]
    assert said.startswith("the estimates agree badly with patching")
    assert "agreement" not in attribution_patch(model, CLEAN, CORRUPT, metric=METRIC, agreement=0)


def test_where_the_model_is_linear_estimates_are_the_effects() -> None:
    found = attribution_patch(
        HookedTransformer(linear()), CLEAN, CORRUPT, "z", metric=METRIC, by=("layer", "head"), agreement=8
    )
    agreement, n = found.agreement.sel(estimate="value"), 8
    np.testing.assert_allclose(agreement.sel(coefficient="pearson"), 1, atol=2e-9)
    np.testing.assert_allclose(agreement.sel(coefficient="spearman"), 1 - 6 / (n * (n * n - 1)))


@pytest.mark.parametrize("each", [True, False])
def test_a_prompt_without_two_cells_that_differ_has_no_part_in_it(each: bool) -> None:
    model, clean, corrupt = HookedTransformer(build("gpt2")), some_tokens(3, 6), some_tokens(3, 6, seed=1)
    corrupt[0, :5] = clean[0, :5]  # its first prompt differs at the last token alone: one cell of a layer
    ask = partial(attribution_patch, model, metric=METRIC, by=("pos",), agreement=12, each=each)
    whole, rest = ask(clean, corrupt, "resid_pre"), ask(clean[1:], corrupt[1:], "resid_pre")
    np.testing.assert_allclose(whole.agreement, rest.agreement, rtol=1e-6)
    none = ask(clean[:1], corrupt[:1], "resid_pre")
    assert bool(none.agreement.isnull().all())
    (said,) = none.attrs["notes"]
    assert "not known: no prompt of the first 4 has two cells that differ" in said


@pytest.mark.parametrize("cells", [1, -3])
def test_a_correlation_takes_two(cells: int) -> None:
    with pytest.raises(ValueError, match=f"two cells or more, or 0 for none, got {cells}"):
        patched(build("gpt2"), agreement=cells)


def test_a_correlation_of_constants_is_not_a_number() -> None:
    one, two = torch.ones(3), torch.tensor([1.0, 2.0, 3.0])
    assert all(np.isnan(z) for z in (*fisher_z(one, two), *fisher_z(two, one), *fisher_z(two[:1], two[:1])))
