"""Activation patching against a loop of hooked passes, and what must hold at its ends."""

import pytest
import torch
from torch import Tensor

import interp
from interp import HookedTransformer
from interp.causal import PRESETS, patch, patch_preset
from interp.passes.metrics import Metric, choice_difference, kl_divergence, logit_difference
from tests.batches import in_batches
from tests.configs import build, some_tokens
from tests.loops import over
from tests.tolerances import assert_close

CLEAN, CORRUPT = some_tokens(), some_tokens(seed=1)
CORRUPT[:, :2], CORRUPT[:, 5] = CLEAN[:, :2], CLEAN[:, 5]
ANSWER, WRONG = [3, 4, 5], [6, 7, 8]
METRIC = logit_difference(ANSWER, WRONG)
MODELS = ("gpt2", "llama-gqa", "window", "bidirectional", "gemma2")


def subject(name: str) -> HookedTransformer:
    """One of the small models; it has no tokenizer."""
    return HookedTransformer(build(name), None, name=name)


def difference(logits: Tensor) -> Tensor:
    """The logit difference of every row, read off all logits."""
    rows = torch.arange(3)
    return logits[rows, -1, torch.tensor(ANSWER)] - logits[rows, -1, torch.tensor(WRONG)]


def by_hooks(model: HookedTransformer, site: str, index: tuple, direction: str) -> Tensor:
    """The effect of one cell `[prompt]`, from three whole passes."""
    own, other = (CORRUPT, CLEAN) if direction == "denoise" else (CLEAN, CORRUPT)
    _, cache = model.run_with_cache(other, names_filter=site)
    given = cache[site]

    def put(value: Tensor, hook: interp.passes.HookPoint) -> Tensor:
        value[(slice(None), *index)] = given[(slice(None), *index)]
        return value

    return difference(model.run_with_hooks(own, fwd_hooks=[(site, put)])) - difference(model(own))


CASES = {
    "resid_pre": ("hook_resid_pre", None, lambda p: (p,), 9),
    "mlp_out": ("hook_mlp_out", ("layer", "pos"), lambda p: (p,), 9),
    "z": ("attn.hook_z", None, lambda h: (slice(None), h), 4),
    "pattern": ("attn.hook_pattern", ("layer", "query"), lambda q: (slice(None), q), 9),
    "mlp.hook_post": ("mlp.hook_post", ("layer", "neuron"), lambda m: (slice(None), m), 36),
}


@over("direction", ["denoise", "noise"])
@over("site", CASES)
@pytest.mark.parametrize("name", MODELS)
def test_every_cell_is_what_hooks_give(name: str, site: str, direction: str) -> None:
    model, (full, by, index, n) = subject(name), CASES[site]
    found = patch(model, CLEAN, CORRUPT, site, metric=METRIC, by=by, direction=direction)  # type: ignore[arg-type]
    for layer in range(2):
        for cell in range(0, n, 5):
            expected = by_hooks(model, f"blocks.{layer}.{full}", index(cell), direction)
            each = torch.from_numpy(found.each.values)[:, layer, cell]
            assert_close(each, expected)
            assert_close(torch.tensor(found.value.values[layer, cell]), expected.mean())


def test_two_dims_at_once_and_layers_together() -> None:
    model = subject("llama-gqa")
    both = patch(model, CLEAN, CORRUPT, "k", metric=METRIC, by=("layer", "pos", "kv_head"))
    assert both.value.dims == ("layer", "pos", "kv_head")
    expected = by_hooks(model, "blocks.1.attn.hook_k", (4, 1), "denoise")
    assert_close(torch.from_numpy(both.each.values)[:, 1, 4, 1], expected)
    whole = patch(model, CLEAN, CORRUPT, "resid_pre", metric=METRIC, by=("pos",))
    assert whole.value.dims == ("pos",)


@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_the_whole_input_brings_everything_back(direction: str) -> None:
    model = subject("gpt2")
    found = patch(model, CLEAN, CORRUPT, "resid_pre", metric=METRIC, by=("layer",), direction=direction)  # type: ignore[arg-type]
    assert_close(
        torch.from_numpy(found.normalised.values), torch.full((2,), float(direction == "denoise")).double()
    )
    assert_close(torch.from_numpy(found.clean.values), difference(model(CLEAN)))
    assert_close(torch.from_numpy(found.corrupt.values), difference(model(CORRUPT)))


def test_cells_that_are_alike_in_both_runs_are_said_to_be_unchanged() -> None:
    found = patch(subject("gpt2"), CLEAN, CORRUPT, "resid_pre", metric=METRIC)
    alike = torch.tensor([True, True, False, False, False, True, False, False, False])
    assert torch.equal(~torch.from_numpy(found.changed.values)[0], alike)
    assert (found.value.values[0][alike.numpy()] == 0).all()
    assert (found.value.values[0][~alike.numpy()] != 0).all()


@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_divergences_are_from_the_clean_run(direction: str) -> None:
    model = subject("gpt2")
    found = patch(model, CLEAN, CORRUPT, "resid_pre", metric=kl_divergence(), direction=direction)  # type: ignore[arg-type]
    assert (found.clean.values == 0).all()
    clean, corrupt = (model(t)[:, -1].log_softmax(-1) for t in (CLEAN, CORRUPT))
    assert_close(torch.from_numpy(found.corrupt.values), (clean.exp() * (clean - corrupt)).sum(-1))


@over("preset", PRESETS)
@pytest.mark.parametrize("name", ["gpt2", "llama-gqa"])
def test_presets_have_the_dims_of_their_names(name: str, preset: str) -> None:
    found = patch_preset(subject(name), CLEAN, CORRUPT, preset, metric=METRIC)
    for site, table in found.items():
        own = site in ("k", "v")
        wanted = [("kv_head" if own and dim == "head" else dim) for dim in dict(PRESETS[preset])[site]]
        assert set(table.value.dims) == set(wanted)


def test_eighteen_presets() -> None:
    assert len(PRESETS) == 18


def test_what_has_no_meaning_is_refused() -> None:
    model = subject("gpt2")
    with pytest.raises(ValueError, match="same length"):
        patch(model, CLEAN, CORRUPT[:, :-1], metric=METRIC)
    with pytest.raises(KeyError, match="'head'"):
        patch(model, CLEAN, CORRUPT, "resid_pre", metric=METRIC, by=("head",))
    with pytest.raises(KeyError, match="resid_pree"):
        patch(model, CLEAN, CORRUPT, "resid_pree", metric=METRIC)
    with pytest.raises(KeyError, match="block_evry"):
        patch_preset(model, CLEAN, CORRUPT, "block_evry", metric=METRIC)
    with pytest.raises(ValueError, match="requires an answer"):
        patch(model, CLEAN, CORRUPT)
    constant = Metric("constant", "", lambda outcome: outcome.stream.new_ones(len(outcome.stream)))
    with pytest.raises(ValueError, match="nothing that an intervention could bring back"):
        patch(model, CLEAN, CORRUPT, metric=constant)


def test_prompts_of_several_lengths_have_the_numbers_of_each_alone() -> None:
    rows = [row[:n].tolist() for row, n in zip(CLEAN, (9, 7, 8), strict=True)]
    others = [row[:n].tolist() for row, n in zip(CORRUPT, (9, 7, 8), strict=True)]
    clean, corrupt = interp.Batch.of(rows), interp.Batch.of(others)
    by_pos = patch(subject("gpt2"), clean, corrupt, metric=METRIC)
    assert by_pos.n.isel(layer=0).values.tolist() == [3] * 7 + [2, 1]
    found = patch(subject("gpt2"), clean, corrupt, "z", metric=METRIC)
    alone = patch(
        subject("gpt2"),
        torch.tensor(rows[1:2]),
        torch.tensor(others[1:2]),
        "z",
        metric=logit_difference(4, 7),
    )
    assert_close(torch.from_numpy(found.each.values)[1], torch.from_numpy(alone.each.values)[0])


def test_metric_with_data_by_prompt_finds_its_prompt_in_any_batches() -> None:
    options = torch.tensor([3, 6, 9, 12])
    right = torch.tensor([[True, False, False, False], [False, True, True, False], [True, True, True, False]])
    model, metric = subject("gpt2"), choice_difference(options, right)
    share = model(CLEAN)[:, -1].softmax(-1)[:, options]
    by_hand = torch.stack(
        [row[mine].sum() - row[~mine].sum() for row, mine in zip(share, right, strict=True)]
    )
    for size in (1, 2, 32):
        found = patch(
            model,
            in_batches(model, CLEAN, size),
            in_batches(model, CORRUPT, size),
            "resid_pre",
            metric=metric,
            by=("layer",),
        )
        assert_close(torch.from_numpy(found.clean.values), by_hand)
        assert_close(
            torch.from_numpy(found.each.values)[:, 0], torch.from_numpy((found.clean - found.corrupt).values)
        )
