"""Divergence token by token: the plain formula on the logits, whatever the padding, and the list of its largest."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import interp
from interp import Batch, Edit
from interp.editing import changed_tokens
from interp.edits import Zero
from tests.batches import in_batches
from tests.configs import CONFIGS, build, perturbed, some_tokens
from tests.editing.test_difference import other, ragged
from tests.loops import over
from tests.tiny import hooked

LENGTHS = (9, 6, 4)


@functools.cache
def by_hand(name: str) -> list[dict[str, np.ndarray]]:
    """KL(tuned || base) after every token and both losses of the next one, row by row."""
    found = []
    for row, n in zip(ragged().tokens, LENGTHS, strict=True):
        tokens = row[None, :n]
        base, tuned = (network(tokens)[0].log_softmax(-1) for network in (build(name), other(name)))
        losses = [F.nll_loss(x[:-1], tokens[0, 1:], reduction="none").numpy() for x in (base, tuned)]
        found.append(
            {"kl": (tuned.exp() * (tuned - base)).sum(-1).numpy(), "loss": losses[0], "tuned_loss": losses[1]}
        )
    return found


@over("name", ["gpt2", "llama-gqa", "gemma2"])
def test_means_and_places_are_those_of_the_logits_row_by_row(name: str) -> None:
    found = changed_tokens(build(name), ragged(), other(name), top=5, context=(2, 1), once_per_row=False)
    rows = by_hand(name)
    for score in ("kl", "loss", "tuned_loss"):
        every = np.concatenate([row[score] for row in rows])
        np.testing.assert_allclose(found.value.sel(score=score), every.mean(), rtol=1e-9)
    change = found.value.sel(score="tuned_loss") - found.value.sel(score="loss")
    np.testing.assert_allclose(found.value.sel(score="loss_change"), change, rtol=1e-9)
    places = sorted(
        ((row["kl"][i], r, i) for r, row in enumerate(rows) for i in range(LENGTHS[r])), reverse=True
    )[:5]
    np.testing.assert_allclose(found.peak, [kl for kl, _, _ in places], rtol=1e-9)
    assert list(zip(found.row.values, found.pos.values, strict=True)) == [(r, i) for _, r, i in places]
    for rank, (_, r, i) in enumerate(places):
        for offset in (-2, -1, 0, 1):
            cell, at = found.sel(rank=rank, offset=offset), i + offset
            there, followed = 0 <= at < LENGTHS[r], 0 <= at < LENGTHS[r] - 1
            assert int(cell.tokens) == (int(ragged().tokens[r, at]) if there else -1)
            for score, known in (("kl", there), ("loss", followed), ("tuned_loss", followed)):
                expected = rows[r][score][at] if known else np.nan
                np.testing.assert_allclose(cell[score], expected, rtol=1e-9)


def test_intervals_are_those_of_ratios_over_texts_from_256_on() -> None:
    tokens = some_tokens(256, 3)
    found = changed_tokens(build("gpt2"), in_batches(build("gpt2"), tokens, 100), other("gpt2"))
    base, tuned = (network(tokens).log_softmax(-1) for network in (build("gpt2"), other("gpt2")))
    each = (tuned.exp() * (tuned - base)).sum(-1).mean(1).numpy()  # all texts are equally long
    half = 1.969310 * each.std(ddof=1) / 16  # Student's t of 255 degrees of freedom
    cell = found.sel(score="kl")
    np.testing.assert_allclose([cell.value, cell.high - cell.value], [each.mean(), half], rtol=1e-5)
    few = changed_tokens(build("gpt2"), in_batches(build("gpt2"), tokens[:255], 100), other("gpt2"))
    assert bool(few.low.isnull().all()) and int(few.n[0]) == 255


def test_packed_texts_give_the_numbers_of_each_alone() -> None:
    texts = [row[:n].tolist() for row, n in zip(ragged().tokens, LENGTHS, strict=True)]
    packed = Batch.packed(texts, 12)
    found = interp.run(
        [interp.editing.ChangedTokens(other("gpt2"), top=3)], build("gpt2"), [packed.numbered()]
    )
    plain = changed_tokens(build("gpt2"), ragged(), other("gpt2"), top=3)
    np.testing.assert_allclose(found["changed_tokens"].value, plain.value, rtol=1e-9)
    np.testing.assert_allclose(found["changed_tokens"].peak, plain.peak, rtol=1e-9)


def test_a_model_may_be_compared_with_itself_edited() -> None:
    model = hooked()
    found = changed_tokens(model, "The cat sat on the mat", model.edited(Edit("L1.mlp", Zero())), top=1)
    assert float(found.peak[0]) > 0 and "cat" in "".join(found.piece.values[0])
    both = changed_tokens(
        model.edited(Edit("L1.mlp", Zero())), "The cat sat", model.edited(Edit("L1.mlp", Zero()))
    )
    assert float(both.value.sel(score="kl")) == 0
    given = changed_tokens(model.edited(Edit("L1.mlp", Zero())), "The cat sat on the mat", model)
    assert float(given.value.sel(score="loss_change")) == -float(found.value.sel(score="loss_change"))


def test_what_has_no_distributions_or_lists_nothing_is_refused() -> None:
    endless = perturbed(replace(CONFIGS["gpt2"], unembed=False))
    with pytest.raises(ValueError, match="ends in its residual stream"):
        changed_tokens(endless, some_tokens(), endless)
    for given in ({"top": 0}, {"context": (1,)}):
        with pytest.raises(ValueError, match=r"top|context"):
            changed_tokens(build("gpt2"), some_tokens(), other("gpt2"), **given)  # type: ignore[arg-type]
    alone = changed_tokens(build("gpt2"), torch.tensor([[3]]), other("gpt2"), top=1)
    assert float(alone.value.sel(score="kl")) > 0 and bool(alone.value.sel(score="loss").isnull())
