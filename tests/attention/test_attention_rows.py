"""Entropy and dispersion of attention: against a slow loop, closed forms, and the bounds that hold for every row."""

import copy
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from interp import Batch, Edit, HookedTransformer
from interp.attention import attention_entropy, dispersion
from interp.attention.attention_rows import row_numbers
from interp.core.temperature import log_n_factor
from interp.edits import Set, Zero
from interp.model import Transformer
from interp.model.tap import Read, Tap
from tests.configs import CONFIGS, build, perturbed, some_tokens
from tests.loops import over
from tests.mixers import build_mixed
from tests.tolerances import student95

ROWS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7, 1, 8], [1, 4, 1, 4, 2, 1, 3, 5, 6]]


def slow_rows(
    model: Transformer, row: list[int], m: int | None
) -> dict[tuple[int, int], list[tuple[float, ...]]]:
    """Of every layer and head, for every query: number of keys, largest weight, entropy, gap."""
    reads = [Read(f"blocks.{layer}.attn.hook_attn_scores") for layer in range(model.config.n_layers)]
    tap = Tap(reads)
    found: dict[tuple[int, int], list[tuple[float, ...]]] = {}
    model(torch.tensor([row]), tap)
    for layer, read in enumerate(reads):
        for head in range(model.config.n_heads):
            found[layer, head] = []
            for scores in tap.values[read][0, head].tolist():
                seen = [s for s in scores if s > -math.inf]
                factor = 1.0 if m is None else math.log(len(seen)) / math.log(m)
                powers = [math.exp(factor * s) for s in seen]
                weights = [p / sum(powers) for p in powers]
                spread = -sum(w * math.log(w) for w in weights if w > 0)
                gap = factor * (max(seen) - min(seen))
                found[layer, head].append((len(seen), max(weights), spread, gap))
    return found


@over("m", [None, 5])
@pytest.mark.parametrize("name", CONFIGS)
def test_means_by_head_and_by_number_of_keys_are_those_of_a_slow_loop(name: str, m: int | None) -> None:
    network = build(name)
    model, rows = HookedTransformer(network), Batch.of(ROWS)
    by_head = attention_entropy(model, rows, train_length=m)
    by_keys = dispersion(model, rows, train_length=m)
    slow = [slow_rows(network, row, m) for row in ROWS]
    for layer, head in itertools.product(range(network.config.n_layers), range(network.config.n_heads)):
        texts = [each[layer, head] for each in slow]
        expected = {
            "entropy": np.mean([np.mean([h for _, _, h, _ in t]) for t in texts]),
            "max_weight": np.mean([np.mean([w for _, w, _, _ in t]) for t in texts]),
            "relative": np.mean([np.mean([h / math.log(n) for n, _, h, _ in t if n > 1]) for t in texts]),
        }
        for key, value in expected.items():
            found = float(by_head.value.sel(layer=layer, head=head, score=key))
            assert found == pytest.approx(value, rel=1e-8, abs=1e-9), key
        for n in by_keys["n_keys"].values:
            some = [[x for x in t if x[0] == n] for t in texts]
            some = [t for t in some if t]
            here = by_keys.value.sel(layer=layer, head=head, n_keys=n)
            if not some:
                assert np.isnan(here.sel(score="max_weight"))
                continue
            for key, i in (("max_weight", 1), ("entropy", 2), ("gap", 3)):
                value = np.mean([np.mean([x[i] for x in t]) for t in some])
                assert float(here.sel(score=key)) == pytest.approx(value, rel=1e-8, abs=1e-9), key
            upper = np.mean([np.mean([min(1, math.exp(x[3]) / n) for x in t]) for t in some])
            assert float(here.sel(score="upper")) == pytest.approx(upper, rel=1e-8)


def test_keys_are_counted_where_the_mask_is_a_window_or_nothing() -> None:
    windowed = dispersion(HookedTransformer(build("window")), some_tokens())
    assert windowed["n_keys"].values.tolist() == [1, 2, 3, 4]
    everybody = dispersion(HookedTransformer(build("bidirectional")), some_tokens(n=7))
    assert np.flatnonzero(everybody.n.max(("layer", "head", "score"))).tolist() == [6]
    causal = dispersion(HookedTransformer(build("gpt2")), Batch.of(ROWS))
    assert (causal.n == causal.n[0, 0, :, 0]).all()
    assert causal.n[0, 0, :, 0].values.tolist() == [3] * 4 + [2] * 5


def test_even_attention_is_the_null_of_every_score() -> None:
    found = dispersion(HookedTransformer(build("gpt2")), some_tokens())
    n = found["n_keys"].values
    nulls = {"max_weight": 1 / n, "entropy": np.log(n), "gap": 0 * n, "upper": 1 / n, "lower": 1 / n}
    for score, null in nulls.items():
        np.testing.assert_allclose(found.null.sel(score=score)[1, 2], null)
        assert found.low.sel(score=score).notnull().any() == (score in ("gap", "max_weight")), (
            "few texts hold the mean of the gap and of a share"
        )
    many = dispersion(HookedTransformer(build("gpt2")), some_tokens(rows=64))
    held = many.low.notnull().any(("layer", "head", "n_keys"))
    assert set(many.score.values[held.values]) == {"max_weight", "entropy", "gap"}, "bounds never"
    entropy = attention_entropy(HookedTransformer(build("gpt2")), some_tokens())
    assert bool((entropy.null.sel(score="relative") == 1).all())


@over("name", CONFIGS)
def test_weights_lie_between_their_bounds_and_entropy_is_near_log_n(name: str) -> None:
    network = build(name)
    reads = [Read(f"blocks.{i}.attn.hook_attn_scores") for i in range(network.config.n_layers)]
    tap = Tap(reads)
    network(some_tokens(n=20), tap)
    for read in reads:
        scores = tap.values[read]
        top, entropy, gap, n = row_numbers(scores).unbind(-1)
        weights = scores.softmax(-1).masked_fill(scores == -torch.inf, torch.nan)
        assert bool((top <= gap.exp() / n + 1e-12).all()) and bool((top >= 1 / n - 1e-12).all())
        assert bool((weights.nan_to_num(9.0).amin(-1) >= (-gap).exp() / n - 1e-12).all())
        assert bool((n.log() - entropy <= gap + 1e-12).all()) and bool((entropy <= n.log() + 1e-12).all())
        assert float(gap.max()) > 0.5


def test_bounded_scores_spread_and_a_needle_needs_the_factor() -> None:
    m = 16
    for n in (16, 256, 4096):
        scores = torch.zeros(1, 1, 1, n, dtype=torch.float64)
        scores[..., 0] = math.log(m)
        plain, scaled = (float(row_numbers(scores, length)[..., 0]) for length in (None, m))
        assert plain == pytest.approx(m / (m + n - 1)) and scaled == pytest.approx(n / (2 * n - 1))
        assert float(log_n_factor(torch.tensor(n), m)) == pytest.approx(math.log(n, m))


@pytest.mark.parametrize(("spread", "error"), [(0.5, 0.001), (1.0, 0.014), (1.5, 0.024)])
def test_gaussian_scores_have_the_entropy_log_n_minus_half_their_variance(
    spread: float, error: float
) -> None:
    n, g = 20_000, torch.Generator().manual_seed(0)
    scores = spread * torch.randn(40, 1, 1, n, generator=g, dtype=torch.float64)
    found = float(row_numbers(scores)[..., 1].mean())
    assert abs(found - (math.log(n) - spread**2 / 2)) < error + 0.005


def test_sinks_are_left_out_and_a_row_of_one_key_has_entropy_zero() -> None:
    network = perturbed(replace(CONFIGS["gpt-oss"], window=None, local_layers=None))
    with_sinks = attention_entropy(HookedTransformer(network), some_tokens())
    network.block(0).attn.sinks.fill_(50.0)  # type: ignore[union-attr]  # all but a trace goes there
    drowned = attention_entropy(HookedTransformer(network), some_tokens())
    relative = [found.value.sel(layer=0, score="relative") for found in (drowned, with_sinks)]
    np.testing.assert_allclose(*relative, rtol=1e-9)
    first = dispersion(HookedTransformer(network), some_tokens()).value.sel(n_keys=1)
    assert bool((first.sel(score="entropy") == 0).all()) and bool((first.sel(score="max_weight") == 1).all())


def test_even_attention_is_one_and_intervals_are_over_texts() -> None:
    network = perturbed(CONFIGS["gpt2"])
    network.block(0).attn.qkv.weight[: network.config.d_model] = 0
    network.block(0).attn.qkv.bias[: network.config.d_model] = 0
    found = attention_entropy(HookedTransformer(network), some_tokens(rows=4))
    np.testing.assert_allclose(found.value.sel(layer=0, score="relative"), 1.0, rtol=1e-12)
    alone = [attention_entropy(HookedTransformer(network), row[None]) for row in some_tokens(rows=4)]
    each = np.stack([one.value.sel(layer=1, score="entropy") for one in alone])
    half = student95(4) * each.std(0, ddof=1) / 2
    entropy = found.sel(layer=1, score="entropy")
    np.testing.assert_allclose(entropy.high - entropy.value, half, rtol=1e-8)
    assert found.part.values.tolist()[1][2] == "L1H2" and set(found.n.values.flatten()) == {4}
    assert dict(zip(found.score.values, found.unit.values, strict=True)) == {
        "entropy": "nats", "relative": "share of log n", "max_weight": "attention mass",
    }  # fmt: skip


def test_what_has_no_meaning_is_refused() -> None:
    model = HookedTransformer(build("gpt2"))
    for function in (attention_entropy, dispersion):
        with pytest.raises(ValueError, match="one text per row"):
            function(model, Batch.packed([[1, 2, 3], [4, 5]], 5))
        with pytest.raises(ValueError, match="at least two tokens"):
            function(model, some_tokens(n=1))
        with pytest.raises(ValueError, match="train_length of at least 2 is required, got 1"):
            function(model, some_tokens(), train_length=1)
        with pytest.raises(ValueError, match=r"which the edit of blocks\.1\.attn\.hook_pattern comes"):
            function(model.edited(Edit("blocks.1.attn.hook_pattern", Zero())), some_tokens())


def test_an_edited_model_is_the_model_with_those_weights() -> None:
    network = perturbed(CONFIGS["gpt2"])
    other = copy.deepcopy(network)
    other.block(0).mlp.out.weight.zero_()
    other.block(0).mlp.out.bias.zero_()
    for function in (attention_entropy, dispersion):
        edited = function(network.edited([Edit("L0.mlp", Zero())]), some_tokens())
        expected, plain = function(other, some_tokens()), function(network, some_tokens())
        np.testing.assert_allclose(edited.value, expected.value, rtol=1e-12)
        assert float(abs(edited.value - plain.value).max()) > 1e-3


# --- mixers without a softmax of scores ---------------------------------------------------------------------------

KINDS = {"linear": "shares", "polar": "halves", "differential": "signed", "linformer": "signed", "lightning": "signed",
         "pool": "signed", "spatial-gating": "signed", "linear-bidirectional": "shares"}  # fmt: skip


def slow_weights(
    model: Transformer, row: list[int], layer: int, kind: str
) -> list[list[tuple[float, float]]]:
    """Largest weight and entropy of every query of every head, from the pattern of one text alone."""
    read = Read(f"blocks.{layer}.attn.hook_{'polar_' if kind == 'halves' else ''}pattern")
    tap = Tap([read])
    model(torch.tensor([row]), tap)
    pattern = tap.values[read][0]
    found = []
    for head in range(model.config.n_heads):
        rows = []
        for query in range(len(row)):
            parts = pattern[:, head, query] if kind == "halves" else pattern[None, head, query]
            each = [[abs(float(a)) for a in part] for part in parts]
            if not sum(map(sum, each)):  # it weighs nothing at all
                rows.append((math.nan, math.nan))
                continue
            shares = [sum(part[j] / sum(part) for part in each) / len(each) for j in range(len(row))]
            rows.append((max(shares), -sum(a * math.log(a) for a in shares if a > 0)))
        found.append(rows)
    return found


@pytest.mark.parametrize("name", KINDS)
def test_weights_without_scores_are_read_as_shares_of_their_sizes(name: str) -> None:
    network, layer = build_mixed(name), 0
    found = attention_entropy(HookedTransformer(network), Batch.of(ROWS))
    by_keys = dispersion(HookedTransformer(network), Batch.of(ROWS))
    assert found.weights.values.tolist()[0] == KINDS[name]
    slow = [slow_weights(network, row, layer, KINDS[name]) for row in ROWS]
    causal = network.config.causal
    counts = [[q + 1 if causal else len(row) for q in range(len(row))] for row in ROWS]
    for head in range(network.config.n_heads):
        here = found.value.sel(layer=layer, head=head)
        seen = [[h for h in text[head] if not math.isnan(h[0])] for text in slow]
        assert float(here.sel(score="max_weight")) == pytest.approx(
            np.mean([np.mean([w for w, _ in t]) for t in seen])
        )
        assert float(here.sel(score="entropy")) == pytest.approx(
            np.mean([np.mean([h for _, h in t]) for t in seen])
        )
        relative = [
            [h / math.log(n) for (_, h), n in zip(t[head], ns, strict=True) if n > 1]
            for t, ns in zip(slow, counts, strict=True)
        ]
        assert float(here.sel(score="relative")) == pytest.approx(np.mean([np.mean(t) for t in relative]))
        n = 4 if causal else 9
        some = [
            [w for (w, _), count in zip(t[head], ns, strict=True) if count == n]
            for t, ns in zip(slow, counts, strict=True)
        ]
        wanted = np.mean([np.mean(t) for t in some if t])
        cell = by_keys.value.sel(layer=layer, head=head, n_keys=n)
        assert float(cell.sel(score="max_weight")) == pytest.approx(wanted)
        assert np.isnan(cell.sel(score="gap")) and np.isnan(cell.sel(score="upper"))


@pytest.mark.parametrize("name", ["polar", "polar-rotary", "polar-bidirectional"])
def test_either_half_of_polar_attention_has_its_entropy_and_both_their_mean(name: str) -> None:
    """Against a slow loop; and by concavity H of the mean pattern is between the mean of H and that plus log 2."""
    network, layer = build_mixed(name), 0
    found = attention_entropy(HookedTransformer(network), Batch.of(ROWS))
    read = Read(f"blocks.{layer}.attn.hook_polar_pattern")
    by_text: list[list[list[float]]] = []
    both_everywhere = True
    for row in ROWS:
        tap = Tap([read])
        network(torch.tensor([row]), tap)
        of_text = []
        for half, head in itertools.product(range(2), range(network.config.n_heads)):
            entropies = []
            for weights in tap.values[read][0, half, head].tolist():
                if not sum(weights):
                    both_everywhere = False
                    continue
                shares = [w / sum(weights) for w in weights]
                entropies.append(-sum(w * math.log(w) for w in shares if w > 0))
            of_text.append(entropies)
        by_text.append(of_text)
    for head in range(network.config.n_heads):
        here = found.value.sel(layer=layer, head=head)
        halves = []
        for half, score in enumerate(("entropy_same", "entropy_opposite")):
            texts = [np.mean(of_text[half * network.config.n_heads + head]) for of_text in by_text]
            assert float(here.sel(score=score)) == pytest.approx(np.mean(texts))
            halves.append(np.mean(texts))
        mean, whole = float(here.sel(score="entropy_halves")), float(here.sel(score="entropy"))
        assert mean == pytest.approx(np.mean(halves))
        if both_everywhere:
            assert mean - 1e-9 <= whole <= mean + math.log(2) + 1e-9
    assert abs(found.value.sel(score="entropy_same") - found.value.sel(score="entropy_opposite")).max() > 1e-2
    scores = list(found.score.values)
    assert found.unit.values[scores.index("entropy_same")] == "nats"
    assert not {"entropy_same"} & set(
        attention_entropy(HookedTransformer(build("gpt2")), Batch.of(ROWS)).score.values
    )


def test_a_layer_of_softmax_beside_a_polar_one_has_no_halves() -> None:
    config = build_mixed("polar-rotary").config
    kinds = attention_entropy(HookedTransformer(build_mixed("polar-rotary")), Batch.of(ROWS))
    for layer, mixer in enumerate(config.mixers):
        here = kinds.value.sel(layer=layer, score="entropy_halves")
        assert bool(here.isnull().all()) == (not mixer.traits.halves)
    assert {bool(mixer.traits.halves) for mixer in config.mixers} == {True, False}


def test_linear_attention_of_equal_keys_is_even() -> None:
    edit = Edit("blocks.0.attn.hook_k", Set(1.0))
    found = attention_entropy(HookedTransformer(build_mixed("linear")).edited(edit), Batch.of(ROWS))
    np.testing.assert_allclose(found.value.sel(layer=0, score="relative"), 1.0, rtol=1e-5)


def test_layers_of_both_kinds_share_a_table_with_nan_for_no_pattern() -> None:
    found = attention_entropy(HookedTransformer(build_mixed("memory-context-deep")), Batch.of(ROWS))
    assert found.weights.values.tolist() == ["none", "softmax"]
    assert bool(found.value.sel(layer=0).isnull().all()) and not bool(found.value.sel(layer=1).isnull().any())
    both = attention_entropy(HookedTransformer(build_mixed("linear-softmax")), Batch.of(ROWS))
    assert both.weights.values.tolist() == ["shares", "softmax"]


def test_padding_changes_no_number_of_weights_without_scores() -> None:
    model = HookedTransformer(build_mixed("differential"))
    whole = attention_entropy(model, Batch.of(ROWS))
    alone = [attention_entropy(model, torch.tensor([row])).value.values for row in ROWS]
    np.testing.assert_allclose(whole.value.values, np.mean(alone, 0), rtol=1e-9)


def test_an_edited_pattern_counts_where_the_numbers_are_of_the_pattern() -> None:
    model, edit = (
        HookedTransformer(build_mixed("linear")),
        Edit("blocks.0.attn.hook_pattern", torch.ones_like),
    )
    found = attention_entropy(model.edited(edit), torch.tensor([ROWS[0]]))
    np.testing.assert_allclose(found.value.sel(layer=0, score="max_weight"), 1 / 9, rtol=1e-9)


def test_what_weights_without_scores_cannot_say_is_refused() -> None:
    with pytest.raises(
        ValueError, match="attention rows require an attention pattern; this model mixes by LongTerm"
    ):
        attention_entropy(HookedTransformer(build_mixed("memory-gate")), some_tokens())
    with pytest.raises(ValueError, match="this model has layers of signed weights"):
        dispersion(HookedTransformer(build_mixed("differential")), some_tokens(), train_length=5)
