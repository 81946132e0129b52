"""What a model recites, against a loop over prompts, layers and tokens, and against what it writes by itself."""

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from torch import Tensor

import interp
from interp import Edit, HookedTransformer, observe
from interp.causal import MEASURES, Recall, continuations, identity, recall
from interp.data.batch import Batch
from interp.passes.generate import generate
from tests.batches import in_batches
from tests.configs import build, some_tokens
from tests.tiny import hooked
from tests.tolerances import student95

LENGTHS, STARTS = (9, 7, 9, 6), (4, 5, 8, 1)
ENTRIES = [0, 1, range(2)]
PARTS = {"none": [], "L0.attn": [0], "L1.attn": [1], "L0.attn+L1.attn": [0, 1]}


def rewire(layers: list[int]) -> list[Edit]:
    return [Edit(f"L{layer}.pattern", identity) for layer in layers]


def prompts() -> tuple[Batch, Tensor]:
    """Rows of several lengths whose end, from some column on, is the continuation."""
    tokens = some_tokens(rows=4)
    batch = Batch.of([row[:n].tolist() for row, n in zip(tokens, LENGTHS, strict=True)])
    column = torch.arange(9)
    span = torch.stack([(column >= s) & (column < n) for s, n in zip(STARTS, LENGTHS, strict=True)])
    return batch, span


def slowly(name: str, row: int, layers: list[int]) -> dict[str, float]:
    """The measures of one prompt, token by token."""
    batch, _ = prompts()
    tokens = batch.tokens[row, : LENGTHS[row]]
    logits = observe(build(name), Batch(tokens[None]), edits=rewire(layers)).output[0]
    hits, losses, entropies = [], [], []
    for column in range(STARTS[row], LENGTHS[row]):
        p = (logits[column - 1].exp() / logits[column - 1].exp().sum()).tolist()
        token = int(tokens[column])
        hits.append(float(p[token] == max(p)))
        losses.append(-np.log(p[token]))
        entropies.append(-sum(x * np.log(x) for x in p))
    return {
        "exact_match": float(all(hits)), "token_accuracy": float(np.mean(hits)), "loss": float(np.mean(losses)),
        "entropy": float(np.mean(entropies)),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa"])
def test_every_measure_is_that_of_a_loop_over_tokens(name: str) -> None:
    batch, span = prompts()
    found = recall(
        HookedTransformer(build(name), None),
        in_batches(HookedTransformer(build(name), None), batch, 3),
        span,
        ENTRIES,
    )
    assert found.part.values.tolist() == list(PARTS)
    for row in range(4):
        for part, layers in PARTS.items():
            for measure, value in slowly(name, row, layers).items():
                each = found["each"].sel(part=part, score=measure).values[row]
                np.testing.assert_allclose(each, value, rtol=1e-9, atol=1e-9)


def test_values_and_changes_are_means_over_prompts_with_intervals() -> None:
    batch, span = prompts()
    found = recall(HookedTransformer(build("gpt2"), None), batch, span, ENTRIES)
    for name in MEASURES:
        mine, moved = found.sel(score=name), found.sel(score=f"{name}_change")
        each = mine["each"].values
        np.testing.assert_allclose(mine.value, each.mean(0))
        change = each - each[:, :1]
        np.testing.assert_allclose(moved["each"], change, atol=1e-12)
        np.testing.assert_allclose(moved.value, change.mean(0), atol=1e-12)
        half = student95(4) * change.std(0, ddof=1) / 2
        np.testing.assert_allclose(moved.high, change.mean(0) + half, atol=1e-9)
        np.testing.assert_allclose(moved.low, change.mean(0) - half, atol=1e-9)
        assert str(mine.unit.values) == str(moved.unit.values) == MEASURES[name].unit
    for part in PARTS:
        exact = found.sel(score="exact_match", part=part)
        known = binomtest(int(exact["each"].sum()), 4).proportion_ci(method="exact")
        np.testing.assert_allclose((exact.low, exact.high), (known.low, known.high), atol=1e-9)
    assert (found.n == 4).all() and interp.frame(found).shape == (4 * 8, 11)


@pytest.mark.parametrize("layers", [[], [1]])
def test_an_exact_match_is_what_greedy_decoding_writes(layers: list[int]) -> None:
    """What the model writes itself, whole or short-circuited, it recites exactly in that state."""
    model = build("gpt2")
    start = Batch(some_tokens(rows=6)[:, :3])
    written = generate(model, start, 5, edits=rewire(layers)).tokens
    other = written.clone()
    other[:, -1] = (other[:, -1] + 1) % 31
    span = torch.zeros(6, 8, dtype=torch.bool)
    span[:, 3:] = True
    part = "L1.attn" if layers else "none"
    for tokens, match, accuracy in ((written, 1.0, 1.0), (other, 0.0, 0.8)):
        found = recall(HookedTransformer(model, None), tokens, span, [1])["each"].sel(part=part)
        assert (found.sel(score="exact_match") == match).all()
        np.testing.assert_allclose(found.sel(score="token_accuracy"), accuracy)


def test_continuations_follow_their_prompts() -> None:
    model = hooked()
    pairs = [("The cat sat", " on the mat"), ("The capital of France is", " Paris.")]
    batch, span = continuations(model, pairs)
    for row, (prompt, more) in enumerate(pairs):
        ids = batch.tokens[row]
        assert ids[0] == model.text.bos_id
        assert model.to_string(ids[span[row]]) == more
        assert model.to_string(ids[1 : int(span[row].int().argmax())]) == prompt
    assert not (span & ~batch.real).any()


def test_spans_without_meaning_are_refused() -> None:
    model, (batch, span) = HookedTransformer(build("gpt2"), None), prompts()
    first, empty, beyond = (span.clone() for _ in range(3))
    first[0, 0], empty[1], beyond[1, 8] = True, False, True
    for bad in (first, empty):
        with pytest.raises(ValueError, match="at least one token in every prompt"):
            recall(model, batch, bad)
    with pytest.raises(ValueError, match="span must be tokens of every prompt, got padding"):
        recall(model, batch, beyond)
    with pytest.raises(ValueError, match=r"mask of the span must be boolean of shape \["):
        recall(model, batch, span[:, :8])
    with pytest.raises(ValueError, match="with a continuation is required"):
        continuations(hooked(), [("The cat", "")])


def test_a_stream_of_any_size_keeps_the_moments() -> None:
    model, (batch, span) = HookedTransformer(build("gpt2"), None), prompts()
    rows = [row[:n].tolist() for row, n in zip(batch.tokens, LENGTHS, strict=True)]
    whole = recall(model, batch, span, ENTRIES)
    stream = interp.Stream(interp.data.open_source(rows), model.text, tokens_per_batch=18)
    kept = interp.run([Recall(span, ENTRIES)], model, stream)["recall"]
    np.testing.assert_allclose(kept.sortby("prompt")["each"], whole["each"], rtol=1e-9, atol=1e-9)
    small = interp.run([Recall(span, ENTRIES, each=False)], model, stream)["recall"]
    for name in ("value", "low", "high", "n"):
        np.testing.assert_allclose(small[name], whole[name], rtol=1e-9, atol=1e-9)
    assert "each" not in small
