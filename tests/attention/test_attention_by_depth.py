"""Attention by depth: against a slow loop and numpy's singular values, closed forms, and what must not matter."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from interp import Batch, Edit, HookedTransformer
from interp.attention import attention_by_depth
from interp.attention.attention_by_depth import SCORES, SHARES, pattern_numbers
from interp.attention.attention_rows import weights_of
from interp.edits import Set, Zero
from interp.lab import Longformer, Segments, Strided
from interp.model import Softmax, Transformer
from interp.model.sparsity import Sparsity
from interp.model.tap import Read, Tap
from tests.configs import CONFIGS, build, perturbed, some_tokens
from tests.mixers import build_mixed
from tests.tolerances import student95
from tests.wrapped.wrapping import wrapped

ROWS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7, 1, 8], [1, 4, 1, 4, 2, 1, 3, 5, 6]]
KINDS = ("linear", "polar", "differential", "lightning", "pool", "linear-bidirectional")
RECENT, ENERGY = 2, 0.8


def slow_patterns(model: Transformer, row: list[int]) -> dict[tuple[int, int], np.ndarray]:
    """The pattern `[q k]` of every layer and head on one text alone, its rows as shares of the sizes they sum."""
    kinds, found = weights_of(model.config), {}
    for layer, kind in enumerate(kinds):
        read = Read(f"blocks.{layer}.attn.hook_{'polar_' if kind == 'halves' else ''}pattern")
        tap = Tap([read])
        model(torch.tensor([row]), tap)
        for head in range(model.config.n_heads):
            value = tap.values[read][0].double().numpy()
            parts = value[:, head] if kind == "halves" else value[None, head]
            shares = []
            for part in parts:
                sizes = [sum(abs(a) for a in query) for query in part]
                shares.append([[a / (s or 1) for a in query] for query, s in zip(part, sizes, strict=True)])
            found[layer, head] = np.mean(shares, 0)
    return found


def slow_numbers(pattern: np.ndarray, *, causal: bool) -> list[float]:
    """The numbers of one pattern, key by key."""
    n, queries = len(pattern), []
    for q in range(n):
        totals, kinds = dict.fromkeys(SHARES, 0.0), set()
        for k in range(q + 1 if causal else n):
            kind = "first" if k == 0 else "recent" if abs(q - k) < RECENT else "between"
            kinds.add(kind)
            totals[kind] += abs(pattern[q, k])
        if kinds == set(SHARES) and q >= RECENT and sum(totals.values()) > 0:
            queries.append([totals[kind] for kind in SHARES])
    shares = [float(x) for x in np.mean(queries, 0)] if queries else [math.nan] * 3
    squares = np.linalg.svd(pattern, compute_uv=False) ** 2
    rank = next(r for r in range(1, n + 1) if squares[:r].sum() >= ENERGY * squares.sum() * (1 - 1e-12))
    return [*shares, rank, rank / n]


@pytest.mark.parametrize("name", [*CONFIGS, *KINDS])
def test_numbers_are_those_of_a_slow_loop_over_texts_of_other_lengths(name: str) -> None:
    network = build_mixed(name) if name in KINDS else build(name)
    found = attention_by_depth(network, Batch.of(ROWS), recent=RECENT, energy=ENERGY)
    patterns = [slow_patterns(network, row) for row in ROWS]
    slow = np.array([
        [[slow_numbers(text[layer, head], causal=network.config.causal) for head in found["head"].values]
         for layer in found.layer.values] for text in patterns
    ])  # fmt: skip
    np.testing.assert_allclose(found.value, np.nanmean(slow, 0), rtol=1e-6, atol=1e-9)
    np.testing.assert_array_equal(found.n, (~np.isnan(slow)).sum(0))
    np.testing.assert_allclose(
        found.by_layer.sel(end="value"), np.nanmean(slow.mean(2), 0), rtol=1e-6, atol=1e-9
    )
    np.testing.assert_allclose(found.value.sel(score=list(SHARES)).sum("score"), 1, rtol=1e-12)


@pytest.mark.parametrize("name", ["gpt2", "window", "bidirectional", "gpt-oss"])
def test_the_null_is_a_model_that_attends_evenly(name: str) -> None:
    network = perturbed(replace(CONFIGS[name], moe=None) if hasattr(CONFIGS[name], "moe") else CONFIGS[name])
    edits = [Edit(f"blocks.{i}.attn.hook_q", Zero()) for i in range(network.config.n_layers)]
    found = attention_by_depth(network.edited(edits), Batch.of(ROWS), recent=RECENT)
    np.testing.assert_allclose(found.value, found.null, rtol=1e-9)


def numbers(pattern: torch.Tensor, **settings: float) -> dict[str, float]:
    """The numbers of one pattern of float64."""
    n = len(pattern)
    real, place = torch.ones(1, n, dtype=torch.bool), torch.arange(n)[None]
    values = pattern_numbers(pattern.double()[None, None], real, place, **settings)[0, 0]  # type: ignore[arg-type]
    return dict(zip(SCORES, values.tolist(), strict=True))


def test_patterns_of_known_rank_have_it() -> None:
    n = 40
    first = torch.zeros(n, n)
    first[:, 0] = 1
    one = numbers(first)
    assert (one["rank"], one["relative_rank"], one["first"]) == (1, 1 / n, 1.0)
    own = numbers(torch.eye(n))
    assert (own["rank"], own["recent"], own["between"]) == (36, 1.0, 0.0), "nine of ten equal values"
    assert numbers(torch.eye(n), energy=0.91)["rank"] == math.ceil(0.91 * n)
    assert numbers(torch.eye(n), energy=1.0)["rank"] == n
    assert numbers(torch.full((n, n), 1 / n), causal=False)["rank"] == 1


def test_even_causal_attention_is_of_low_rank_and_its_shares_are_harmonic() -> None:
    n, recent = 200, 5
    even = torch.ones(n, n).tril()
    found = numbers(even / even.sum(-1, keepdim=True), recent=recent)
    queries = range(recent + 1, n)
    assert found["first"] == pytest.approx(np.mean([1 / (q + 1) for q in queries]), rel=1e-12)
    assert found["recent"] == pytest.approx(np.mean([recent / (q + 1) for q in queries]), rel=1e-12)
    squares = np.linalg.svd((even / even.sum(-1, keepdim=True)).double().numpy(), compute_uv=False) ** 2
    assert found["rank"] == 1 + int((squares.cumsum() < 0.9 * squares.sum()).sum()) < 0.05 * n


def test_an_interval_is_students_over_texts_and_that_of_a_layer_is_over_means_of_its_heads() -> None:
    model, tokens = HookedTransformer(build("gpt2")), some_tokens(rows=64)
    found = attention_by_depth(model, tokens, recent=RECENT)
    alone = np.stack([attention_by_depth(model, row[None], recent=RECENT).value.values for row in tokens])
    rank = SCORES.index("rank")
    half = student95(64) * alone[..., rank].std(0, ddof=1) / math.sqrt(64)
    np.testing.assert_allclose((found.high - found.value).sel(score="rank"), half, rtol=1e-9)
    layers = alone.mean(2)[..., rank]
    half = student95(64) * layers.std(0, ddof=1) / math.sqrt(64)
    np.testing.assert_allclose(
        (found.by_layer.sel(end="high") - found.by_layer.sel(end="value")).sel(score="rank"), half, rtol=1e-9
    )
    few = attention_by_depth(model, tokens[:63], recent=RECENT)
    assert bool(few.low.sel(score="rank").isnull().all()) and not bool(
        few.low.drop_sel(score="rank").isnull().any()
    )
    shares = found.sel(score=list(SHARES))
    assert bool((shares.low <= shares.value).all()) and bool((shares.value <= shares.high).all())
    assert bool((shares.low >= 0).all()) and bool((shares.high <= 1).all())


def test_untrained_models_are_those_that_torch_makes_of_the_config_with_the_seeds() -> None:
    network = build("llama-gqa")
    before = torch.random.get_rng_state()
    found = attention_by_depth(network, Batch.of(ROWS), recent=RECENT, random=2)
    assert torch.equal(before, torch.random.get_rng_state())
    others = []
    for seed in range(2):
        torch.manual_seed(seed)
        fresh = Transformer(network.config).to(torch.float64)
        others.append(attention_by_depth(fresh, Batch.of(ROWS), recent=RECENT).value)
    heads = np.concatenate([other.values for other in others], 1)
    np.testing.assert_allclose(found.untrained.sel(range="mean"), heads.mean(1), rtol=1e-12)
    np.testing.assert_array_equal(found.untrained.sel(range="least"), heads.min(1))
    np.testing.assert_array_equal(found.untrained.sel(range="most"), heads.max(1))
    own = attention_by_depth(network, Batch.of(ROWS), recent=RECENT)
    np.testing.assert_array_equal(found.value, own.value)
    assert bool(own.untrained.isnull().all())


def test_layers_without_a_pattern_are_nan() -> None:
    found = attention_by_depth(build_mixed("memory-context-deep"), Batch.of(ROWS), recent=RECENT)
    assert bool(found.value.sel(layer=0).isnull().all()) and not bool(found.value.sel(layer=1).isnull().any())


def test_short_texts_have_a_rank_beside_longer_ones_and_are_refused_alone() -> None:
    found = attention_by_depth(build("gpt2"), Batch.of(ROWS), recent=3)
    assert set(found.n.sel(score="rank").values.ravel()) == {3}
    assert set(found.n.sel(score=list(SHARES)).values.ravel()) == {2}
    with pytest.raises(ValueError, match="recent=3 require a text of 5 tokens"):
        attention_by_depth(build("gpt2"), some_tokens(n=4), recent=3)
    assert not bool(attention_by_depth(build("gpt2"), some_tokens(n=5), recent=3).value.isnull().any())


def test_an_edited_pattern_counts() -> None:
    edit = Edit("blocks.1.attn.hook_pattern", Set(1.0))
    found = attention_by_depth(build("gpt2").edited([edit]), some_tokens()).value.sel(layer=1)
    np.testing.assert_array_equal(found.sel(score="rank"), 1)


def test_bfloat16_is_close_to_float32() -> None:
    exact, rounded = (
        attention_by_depth(build("gpt2", dtype), Batch.of(ROWS), recent=RECENT)
        for dtype in (torch.float32, torch.bfloat16)
    )
    shares = list(SHARES)
    np.testing.assert_allclose(rounded.value.sel(score=shares), exact.value.sel(score=shares), atol=0.05)
    np.testing.assert_allclose(rounded.value.sel(score=shares).sum("score"), 1, rtol=1e-6)
    assert float(abs(rounded.value - exact.value).sel(score="rank").max()) <= 1


def test_what_has_no_meaning_is_refused() -> None:
    model = build("gpt2")
    with pytest.raises(ValueError, match="one text per row"):
        attention_by_depth(model, Batch.packed([[1, 2, 3], [4, 5]], 5))
    with pytest.raises(ValueError, match="recent, a number of tokens, must be at least 1, got 0"):
        attention_by_depth(model, some_tokens(), recent=0)
    for energy in (0.0, 1.1, math.nan):
        with pytest.raises(ValueError, match=r"energy, a share of the squares, must be in \(0, 1\], got"):
            attention_by_depth(model, some_tokens(), energy=energy)
    with pytest.raises(ValueError, match=r"random, a number of models, must be in \[0, 1000\], got -1"):
        attention_by_depth(model, some_tokens(), random=-1)
    with pytest.raises(ValueError, match="untrained models stand beside a model without edits"):
        attention_by_depth(model.edited([Edit("L0.mlp", Zero())]), some_tokens(), random=1)
    with pytest.raises(ValueError, match="requires an attention pattern; this model mixes by LongTerm"):
        attention_by_depth(build_mixed("memory-gate"), some_tokens())


@pytest.mark.parametrize("sparsity", [Segments(4, 0), Segments(4, 4), Longformer(2), Strided(3)], ids=str)
def test_the_null_of_a_sparse_pattern_is_even_over_what_it_shows(sparsity: Sparsity) -> None:
    network = perturbed(replace(CONFIGS["gpt2"], mixer=Softmax(sparsity=sparsity)))
    edits = [Edit(f"blocks.{i}.attn.hook_q", Zero()) for i in range(network.config.n_layers)]
    found = attention_by_depth(network.edited(edits), Batch.of(ROWS), recent=RECENT)
    np.testing.assert_allclose(found.value, found.null, rtol=1e-9)


def test_a_wrapped_network_is_not_built_anew() -> None:
    with pytest.raises(ValueError, match="this is a wrapped network: leave random at 0"):
        attention_by_depth(wrapped("mistral"), Batch.of(ROWS), random=1)
