"""The bound on effects of cells that nobody patched holds as often as it says, over random subsets."""

from functools import partial

import numpy as np
import pytest
import scipy.stats
import torch
import xarray as xr
from torch import Tensor

from interp import HookedTransformer
from interp.causal import missed_effects, patch
from interp.causal.missed_effects import Subsets, Welch
from interp.data.batch import Batch
from interp.features import Dictionary
from interp.model import Tap, Transformer
from interp.model.edits import Edit
from interp.model.mounted import Mountable
from interp.passes.metrics import kl_divergence, logit_difference
from tests.causal.slow_edges import ANSWER, WRONG, difference
from tests.causal.test_attribution_patching import recorded
from tests.circuits.test_edge_attribution import CLEAN, CORRUPT, linear, padded
from tests.circuits.test_feature_circuit import linear as linear_in_features
from tests.configs import SPLIT, build, some_tokens
from tests.loops import over

METRIC = logit_difference(ANSWER, WRONG)


def bounded(model: Transformer, site: str = "z", **how: object) -> xr.Dataset:
    how = {"metric": METRIC, "subsets": 40, **how}
    return missed_effects(HookedTransformer(model), CLEAN, CORRUPT, site, **how)  # type: ignore[arg-type]


def drawn(dims: tuple[str, ...], **how: object) -> Subsets:
    given = {"sizes": {"layer": 2, "head": 4}, "known": None, "count": 40, "share": 0.2, "seed": 0, **how}
    return Subsets(dims, **given)  # type: ignore[arg-type]


def subset_effect(model: Transformer, inside: Tensor) -> Tensor:
    """The metric's change in every prompt as all cells [layer, pos, head] of a subset have the clean run's values."""
    edits = []
    for layer in range(2):
        site = f"blocks.{layer}.attn.hook_z"
        value = recorded(model, CLEAN, site)
        mask = inside[layer][None, :, :, None]
        edits.append(Edit(site, lambda x, value=value, mask=mask: torch.where(mask, value, x)))
    return difference(model(CORRUPT, Tap(edits=edits))) - difference(model(CORRUPT))


def test_values_and_ends_are_welch_s_over_subsets_patched_one_by_one() -> None:
    model = build("llama-gqa")
    found = bounded(model)
    inside = drawn(("layer", "pos", "head"), share=0.1).over(7)
    effect = torch.stack([subset_effect(model, chosen).mean() for chosen in inside]).numpy()
    for layer, pos, head in ((0, 0, 1), (1, 6, 3), (0, 6, 2)):
        chosen = inside[:, layer, pos, head].numpy()
        welch = scipy.stats.ttest_ind(effect[chosen], effect[~chosen], equal_var=False)
        cell = {"layer": layer, "pos": pos, "head": head}
        d = effect[chosen].mean() - effect[~chosen].mean()
        interval = welch.confidence_interval(0.95)
        np.testing.assert_allclose(found.value.sel(cell), d, rtol=1e-9)
        np.testing.assert_allclose((found.low.sel(cell), found.high.sel(cell)), interval, rtol=1e-9)
        # the size against which a one-sided test is just significant
        error = d / welch.statistic
        p = scipy.stats.t.sf((float(found.upper.sel(cell)) - abs(d)) / error, welch.df)
        np.testing.assert_allclose(p, 0.05, rtol=1e-6)
    np.testing.assert_allclose(found.bound, found.upper.max())
    assert bool((found.n == 4).all())


LAYER_0 = "blocks.0.attn.hook_z"


def of_linear(by: tuple[str, ...], **how: object) -> tuple[xr.Dataset, Welch]:
    """What is found in one layer of a linear model, and the same from the exact effects of single cells.

    Cells of one layer do not see each other, so that a subset has the sum of its cells' effects.
    """
    model = linear()
    found = bounded(model, LAYER_0, by=by, **how)
    exact = patch(HookedTransformer(model), CLEAN, CORRUPT, LAYER_0, metric=METRIC, by=by)
    sizes = {dim: size for dim, size in {"layer": 1, "head": 4}.items() if dim in by}
    inside = drawn(by, sizes=sizes, share=0.1, count=int(found.attrs["subsets"])).over(7)
    effect = (inside.double() * torch.from_numpy(exact.value.values)).flatten(1).sum(1)
    return found, Welch.of(effect.view(-1, *[1] * len(by)), inside)


@over("by", [("layer", "pos", "head"), ("pos", "head"), ("layer", "head"), ("head",), ("pos",)])
def test_in_a_linear_layer_differences_come_from_the_effects_of_single_cells(by: tuple[str, ...]) -> None:
    """Along the dims that are left out a cell is patched whole."""
    found, expected = of_linear(by)
    np.testing.assert_allclose(found.value, expected.difference, atol=1e-9)
    np.testing.assert_allclose(found.upper, expected.upper(0.95), atol=1e-9)
    assert found.upper.dims == by and float(abs(found.value).max()) > 1e-2


@pytest.mark.parametrize("confidence", [0.8, 0.95])
@over("kind", ["additive", "interacting", "one large"])
def test_the_bound_holds_as_often_as_it_says(confidence: float, kind: str) -> None:
    """400 draws of the subsets of 30 cells; the truth is the mean over all backgrounds of the same share."""
    generator = np.random.default_rng(3)
    alone, pairs = generator.normal(size=30), np.triu(generator.normal(size=(30, 30)), 1)
    pairs *= 0.0 if kind == "additive" else 0.5
    if kind == "one large":
        alone[0] = 8.0
    share, held = 0.2, 0
    truth = np.abs(alone + share * (pairs + pairs.T).sum(0)).max()
    for seed in range(400):
        subsets = Subsets(("head",), {"head": 30}, None, 60, share, seed)
        inside = subsets.over(1)
        x = inside.double().numpy()
        effect = torch.from_numpy(x @ alone + np.einsum("si,ij,sj->s", x, pairs, x))
        held += bool(Welch.of(effect[:, None], inside).upper(confidence).max() >= truth)
    assert held >= scipy.stats.binom.ppf(1e-3, 400, confidence)


def test_a_planted_cell_that_is_left_out_of_the_known_ones_lifts_the_bound() -> None:
    """With the three largest effects known the bound falls to what is left; with all but the largest it does not."""
    model = linear()
    exact = patch(HookedTransformer(model), CLEAN, CORRUPT, "z", metric=METRIC, by=("layer", "pos", "head"))
    sizes = torch.from_numpy(abs(exact.value.values))
    order = sizes.flatten().argsort(descending=True)
    most = torch.zeros(sizes.numel(), dtype=torch.bool)
    most[order[:20]] = True
    rest, but_largest = most.view(sizes.shape), most.clone()
    but_largest[order[0]] = False
    ask = partial(bounded, model, subsets=200)
    low, high = (ask(known=known) for known in (rest, but_largest.view(sizes.shape)))
    left = float(sizes.flatten()[order[20]])
    assert left <= float(low.bound) < float(sizes.max()) <= float(high.bound)
    assert bool(low.upper.isnull().values[rest.numpy()].all()) and int(low.upper.isnull().sum()) == 20
    assert int(np.nanargmax(high.upper.values)) == int(order[0]), "the one that is missing is named"


def test_the_chance_level_is_what_shuffled_effects_leave() -> None:
    found = bounded(linear(), subsets=200)
    assert 0 < float(found.null) < float(found.bound)
    none = bounded(
        linear(), "z", subsets=200, known=torch.arange(56).view(2, 7, 4) == int(np.argmax(found.upper.values))
    )
    assert float(none.null) < float(none.bound) < float(found.bound)


@over("side", ["left", "right"])
def test_padding_and_batches_change_no_number(side: str) -> None:
    model = build("llama-gqa")
    ask = partial(missed_effects, HookedTransformer(model), metric=METRIC, subsets=40)
    plain, wide = ask(CLEAN, CORRUPT), ask(padded(CLEAN, side), padded(CORRUPT, side))
    split = ask(Batch(CLEAN).split(2), Batch(CORRUPT).split(2))
    for name in ("value", "upper", "bound", "null"):
        np.testing.assert_allclose(split[name], plain[name], atol=1e-9)
        np.testing.assert_allclose(wide[name], plain[name], atol=1e-9)


def test_a_position_counts_in_the_prompts_that_have_it() -> None:
    """The last two tokens of the longer prompts: as if the shorter prompt were not there."""
    model, keep = HookedTransformer(build("llama-gqa")), torch.ones(3, 7, dtype=torch.bool)
    keep[1, 5:] = False
    ask = partial(missed_effects, model, metric=METRIC, subsets=40)
    mixed = ask(Batch(CLEAN, keep), Batch(CORRUPT, keep))
    others = ask(CLEAN[[0, 2]], CORRUPT[[0, 2]])
    np.testing.assert_allclose(mixed.value[:, 5:], others.value[:, 5:], atol=1e-9)
    assert not np.allclose(mixed.value[:, :5], others.value[:, :5], atol=1e-3)


def test_keys_and_values_are_cells_of_their_own_heads() -> None:
    found = bounded(build("llama-gqa"), "v", by=("layer", "pos", "kv_head"))
    assert found.upper.shape == (2, 7, 2) and bool(found.upper.notnull().all())


@over("direction", ["denoise", "noise"])
def test_directions_metrics_and_precisions(direction: str) -> None:
    wide, narrow = (bounded(build("gpt2", d), direction=direction) for d in (torch.float64, torch.float32))
    np.testing.assert_allclose(narrow.value, wide.value, atol=1e-4)
    assert wide.bound.attrs["unit"] == "logits" and wide.value.dtype == np.float64
    if direction == "denoise":
        assert float(bounded(build("gpt2"), metric=kl_divergence()).bound) > 0


def test_every_cell_is_in_its_share_of_the_subsets_and_known_ones_in_none() -> None:
    known = torch.zeros(2, 4, dtype=torch.bool)
    known[1, 2] = True
    inside = drawn(("layer", "head"), known=known).over(1)
    counts = inside.sum(0)
    assert bool((counts[~known] == 8).all()) and int(counts[1, 2]) == 0
    by_position = drawn(("layer", "pos", "head"))
    assert bool((by_position.over(9)[:, :, :5] == by_position.over(5)).all()), (
        "whatever the longest prompt is"
    )
    assert not bool((by_position.over(2)[:, :, 0] == by_position.over(2)[:, :, 1]).all())


def test_what_cannot_be_bounded_is_refused_by_name() -> None:
    model = build("gpt2")
    with pytest.raises(
        ValueError, match="cells at one position each are required, got the dims layer, head, query, key"
    ):
        bounded(model, "pattern")
    with pytest.raises(
        ValueError, match="at least two subsets with every cell and two without it are required, got 1"
    ):
        bounded(model, subsets=10)
    with pytest.raises(
        ValueError, match=r"known requires a value for every cell of \[layer 2, pos, head 4\]"
    ):
        bounded(model, known=torch.zeros(2, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="at least one cell must be left"):
        bounded(model, by=("layer", "head"), known=torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"confidence above 0\.5 and below 1 is required, got 1\.0"):
        bounded(model, confidence=1.0)


def test_features_are_compared_like_any_other_cells_where_effects_add_up() -> None:
    model, _ = linear_in_features()
    tokens, others = some_tokens(4, 5), some_tokens(4, 5, seed=1)
    site, by = "blocks.1.hook_features", ("feature",)
    exact = patch(model, tokens, others, site, metric=METRIC, by=by).value
    found = missed_effects(model, tokens, others, site, metric=METRIC, by=by, subsets=400)
    inside = (found.low <= exact) & (exact <= found.high)
    assert float(inside.mean()) >= 0.9 and float(found.bound) >= float(abs(exact).max())


def test_features_of_one_layer_are_as_many_as_its_dictionary_has() -> None:
    model = HookedTransformer(build(SPLIT)).with_dictionaries(unequal())
    tokens, others = some_tokens(2, 5), some_tokens(2, 5, seed=1)
    ask = partial(missed_effects, model, tokens, others, metric=METRIC, by=("feature",), subsets=40)
    assert ask("blocks.1.hook_features").sizes["feature"] == 3
    with pytest.raises(ValueError, match="as many features in every layer are required"):
        ask("features")


def unequal() -> list[Mountable]:
    first, second = build(SPLIT).dictionaries.values()
    assert isinstance(second, Dictionary)
    return [first, second.prefix(3)]
