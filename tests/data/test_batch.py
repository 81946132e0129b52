"""Rows of tokens and their padding: which tokens are real, where a row ends, how a batch is cut and aligned."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import interp
from interp.data.batch import Batch, counted
from tests.configs import some_tokens
from tests.loops import over
from tests.tiny import hooked

ROWS = [[5, 6, 7, 8], [9], [3, 0, 4]]
SIDES = pytest.mark.parametrize("side", ["left", "right"])


def kept(batch: Batch) -> list[list[int]]:
    """The real tokens of each row, by a loop."""
    keep = torch.ones_like(batch.tokens).bool() if batch.keep is None else batch.keep
    return [
        [int(t) for t, k in zip(row, mask, strict=True) if k]
        for row, mask in zip(batch.tokens, keep, strict=True)
    ]


@SIDES
def test_padding_is_on_the_side_asked_for_and_is_not_kept(side: str) -> None:
    batch = Batch.of(ROWS, pad_id=2, side=side)
    assert batch.tokens.shape == (3, 4)
    assert kept(batch) == ROWS
    assert batch.tokens[1].tolist() == ([9, 2, 2, 2] if side == "right" else [2, 2, 2, 9])


def test_rows_of_one_length_need_no_mask() -> None:
    assert Batch.of([[1, 2], [3, 4]]).keep is None


@SIDES
def test_a_token_equal_to_the_padding_is_kept(side: str) -> None:
    """Trap: the mask comes from the lengths, never from the ids."""
    batch = Batch.of([[0, 0, 0], [0]], pad_id=0, side=side)
    assert kept(batch) == [[0, 0, 0], [0]]


@SIDES
def test_length_and_last_column_of_each_row(side: str) -> None:
    batch = Batch.of(ROWS, side=side)
    assert batch.lengths.tolist() == [4, 1, 3]
    assert [int(row[last]) for row, last in zip(batch.tokens, batch.last(), strict=True)] == [8, 9, 4]
    whole = Batch(torch.tensor([[1, 2], [3, 4]]))
    assert (whole.lengths.tolist(), whole.last().tolist()) == ([2, 2], [1, 1])


def test_left_alignment_ends_every_row_in_the_last_column() -> None:
    batch = Batch.of(ROWS, side="right").with_answers(torch.tensor([1, 2, 3]), None)
    aligned = batch.left_aligned()
    assert kept(aligned) == ROWS
    assert aligned.last().tolist() == [3, 3, 3]
    assert aligned.answer is not None and aligned.answer.tolist() == [1, 2, 3]
    assert torch.equal(aligned.left_aligned().tokens, aligned.tokens)
    whole = Batch(torch.tensor([[1, 2]]))
    assert whole.left_aligned() is whole


def test_left_alignment_closes_holes_and_keeps_the_order() -> None:
    batch = Batch(torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[True, False, True, True, False]]))
    assert batch.left_aligned().tokens[0, 2:].tolist() == [1, 3, 4]
    assert kept(batch.left_aligned()) == [[1, 3, 4]]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_parts_together_are_the_whole(size: int) -> None:
    batch = Batch.of(ROWS, bos=True).with_answers(torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6]))
    parts = list(batch.split(size))
    assert [len(p) for p in parts] == [min(size, 3 - i) for i in range(0, 3, size)]
    for name in ("tokens", "keep", "answer", "wrong"):
        assert torch.equal(torch.cat([getattr(p, name) for p in parts]), getattr(batch, name))
    assert all(p.bos for p in parts)


def test_parts_of_an_unpadded_batch_are_unpadded() -> None:
    assert all(p.keep is None and p.answer is None for p in Batch(torch.tensor([[1], [2]])).split(1))


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.zeros(3, dtype=torch.long), "of shape [3]"),
        (torch.zeros(0, 3, dtype=torch.long), "of shape [0, 3]"),
        (torch.zeros(3, 0, dtype=torch.long), "of shape [3, 0]"),
        (torch.zeros(1, 3), "got torch.float32"),
    ],
)
def test_tokens_of_another_shape_are_refused(tokens: Tensor, message: str) -> None:
    with pytest.raises(Exception, match=re.escape(message) + "|Type-check"):
        Batch(tokens)


def test_ids_of_any_whole_kind_become_what_embeddings_and_losses_take() -> None:
    ids = torch.tensor([[3, 5]])
    for kind in (torch.uint8, torch.uint16, torch.uint32):
        assert torch.equal(Batch(ids.to(kind)).tokens, ids)
    for kind in (torch.int8, torch.int16, torch.int32):
        narrow = ids.to(kind)
        batch = Batch(narrow, answer=narrow[:, 0], wrong=narrow[:, 1], row=narrow[0, :1], corrupt=narrow)
        every = (batch.tokens, batch.answer, batch.wrong, batch.row, batch.corrupt)
        assert {each.dtype for each in every if each is not None} == {torch.int64}
        assert torch.equal(batch.tokens, ids)
    with pytest.raises(ValueError, match="token ids are required, got a mask of booleans"):
        Batch(torch.tensor([[True, False]]))


def test_ids_that_no_whole_number_of_64_bits_holds_are_refused() -> None:
    for token in (2**70, -(2**70)):
        with pytest.raises(ValueError, match=f"token ids must be in \\[0, .*\\], got {token}"):
            interp.logit_lens(hooked("gpt2"), [[5, token]])


def test_a_side_that_is_none_and_a_size_that_is_none_are_refused() -> None:
    with pytest.raises(ValueError, match="side must be 'left' or 'right', got 'LEFT'"):
        Batch.of([[1, 2], [3]], side="LEFT")  # type: ignore[arg-type]
    for size in (0, -1):
        with pytest.raises(ValueError, match=f"parts of at least one row are required, got {size}"):
            list(Batch(torch.tensor([[1]])).split(size))


def test_a_mask_of_another_shape_is_refused() -> None:
    with pytest.raises(Exception, match=r"keep must have the tokens' shape|Type-check"):
        Batch(torch.zeros(1, 3, dtype=torch.long), torch.ones(1, 2, dtype=torch.bool))


@pytest.mark.parametrize("rows", [[], [[1], []]])
def test_rows_without_tokens_are_refused_with_their_lengths(rows: list[list[int]]) -> None:
    with pytest.raises(
        ValueError, match=re.escape(f"at least one token, got lengths {[len(r) for r in rows]}")
    ):
        Batch.of(rows)


def test_trimmed_rows_lose_the_columns_that_pad_all_of_them() -> None:
    batch = Batch.of([[1, 2, 3, 4], [5, 6], [7, 8]])
    some = batch.rows(torch.tensor([1, 2]))
    assert some.trimmed().tokens.tolist() == [[5, 6], [7, 8]]
    assert some.trimmed().keep is None
    assert batch.trimmed().tokens.tolist() == batch.tokens.tolist()
    left = Batch.of([[1, 2, 3, 4], [5, 6]], side="left").rows(torch.tensor([1]))
    assert left.trimmed().tokens.shape == (1, 4), "columns keep their places"


def test_rows_know_which_prompt_they_are() -> None:
    batch = Batch.of([[1, 2], [3, 4], [5, 6]]).numbered()
    assert [part.row.tolist() for part in batch.split(2) if part.row is not None] == [[0, 1], [2]]
    again = batch.rows(torch.tensor([2, 0, 2])).row
    assert again is not None and again.tolist() == [2, 0, 2]


def test_values_by_text_begin_in_column_0_in_the_order_of_identities() -> None:
    """Left padding and holes close up; packed texts come in the order in which they stand."""
    keep = torch.ones(2, 6, dtype=torch.bool)
    keep[0, [0, 3]] = False
    values = torch.arange(12.0).view(2, 6)
    found = Batch(torch.zeros(2, 6, dtype=torch.long), keep).by_text(values, keep & (values != 2), -1.0)
    assert found.tolist() == [[1, -1, 4, 5, -1, -1], [6, 7, 8, 9, 10, 11]]
    packed = Batch.packed([[1, 2], [3, 4, 5], [6]], 4).numbered()
    found = packed.by_text(packed.tokens, packed.real, -1)
    assert packed.identities().tolist() == [1, 2, 0]  # type: ignore[union-attr]
    assert found.tolist() == [[3, 4, 5], [6, -1, -1], [1, 2, -1]]
    assert packed.text_numbers.tolist() == [[0, 0, 0, 1], [2, 2, -1, -1]]


def made(*lengths: int) -> list[Batch]:
    """Batches made separately, as `model.to_batch` makes them, of so many rows each."""
    return [Batch(torch.ones(n, 3, dtype=torch.int64)).numbered() for n in lengths]


SIX = Batch(torch.ones(6, 3, dtype=torch.int64)).numbered()
GIVEN: dict[str, tuple[list[Batch], list[list[int]]]] = {
    "made separately": (made(2, 1, 3), [[0, 1], [2], [3, 4, 5]]),
    "one twice": (made(2) * 2, [[0, 1], [2, 3]]),
    "parts of one": (list(SIX.split(4)), [[0, 1, 2, 3], [4, 5]]),
    "parts in another order": (list(SIX.split(4))[::-1], [[4, 5], [0, 1, 2, 3]]),
    "rows drawn again": ([SIX.rows(torch.tensor(x)) for x in ([0, 4], [4, 0])], [[0, 4], [4, 0]]),
    "unnumbered": ([replace(x, row=None) for x in made(2, 2)], [[0, 1], [2, 3]]),
    "packed": (list(Batch.packed([[1, 2], [3, 4, 5], [6]], 4).numbered().split(1)), [[0, 1, 2]] * 2),
}


@over("how", GIVEN)
def test_rows_of_separate_batches_are_counted_on(how: str) -> None:
    batches, numbers = GIVEN[how]
    rows = [batch.row for batch in counted(batches)]
    assert [row.tolist() for row in rows if row is not None] == numbers


def test_separate_batches_have_the_answers_of_their_own_prompts() -> None:
    model = hooked()
    rows = some_tokens(2, 6)
    ids, answers, wrong = rows.tolist(), [3, 5], [4, 8]
    together = interp.attribute(model, rows, answers, wrong)
    separate = interp.attribute(model, [model.to_batch([row]) for row in ids], answers, wrong)
    arriving = interp.attribute(model, (model.to_batch([row]) for row in ids), answers, wrong)
    for found in (separate, arriving):
        assert found.prompt.values.tolist() == [0, 1]
        np.testing.assert_allclose(found.value.values, together.value.values, atol=1e-12)


def test_complex_token_ids_are_refused_and_not_cut_to_their_real_parts() -> None:
    with pytest.raises(ValueError, match=r"at least one token id, shape \[batch, pos\], got torch.complex64"):
        Batch(torch.ones(2, 8, dtype=torch.complex64) + 3j)


NO_IDS = {
    "fractions": [[1.5, 2.0]],
    "truths": [[True, False]],
    "texts": ["12", "3"],
    "digits": [["1", "3"]],
    "an array of fractions": [np.array([1.0, 2.0])],
    "a tensor of truths": [torch.tensor([True, False])],
    "mappings": [{1: 2}],
    "a number": [3],
}


@pytest.mark.kinds
@pytest.mark.parametrize("rows", NO_IDS.values(), ids=NO_IDS)
def test_rows_that_are_no_ids_are_refused_and_not_rounded(rows: list[list[int]]) -> None:
    for make in (Batch.of, lambda rows: Batch.packed(rows, 4)):
        with pytest.raises(ValueError, match="rows must be a sequence of sequences of token ids"):
            make(rows)


@pytest.mark.kinds  # of arrays as rows: `Sequence[int]` is said for readers, a tensor or an array is one here
@pytest.mark.parametrize("kind", ["uint8", "int16", "uint32", "uint64"])
def test_rows_of_any_whole_numbers_are_ids(kind: str) -> None:
    rows = [np.array(row, dtype=kind) for row in ROWS]
    mixed = [(5, np.int16(6), torch.tensor(7), 8), [np.uint8(9)], range(3, 6)]
    assert kept(Batch.of(rows)) == ROWS
    assert kept(Batch.of(mixed)) == [[5, 6, 7, 8], [9], [3, 4, 5]]  # type: ignore[arg-type, list-item]
    assert sorted(map(sorted, kept(Batch.packed(rows, 4)))) == [[0, 3, 4, 9], [5, 6, 7, 8]]


@pytest.mark.kinds
def test_rows_and_values_that_a_batch_has_not_are_refused() -> None:
    batch = Batch.of(ROWS)
    for index in ([3], [-4], [0, 9]):
        with pytest.raises(IndexError, match="index must be rows from 0 to 2, got"):
            batch.rows(torch.tensor(index))
    assert kept(batch.rows(torch.tensor([-1, 0]))) == [ROWS[2], ROWS[0]]
    for values, real, what in (
        (torch.ones(3, 3), batch.real, "values"),
        (batch.tokens, batch.real[:2], "real"),
    ):
        with pytest.raises(
            ValueError, match=rf"{what} must be .* begins with the tokens' shape \[3, 4\], got"
        ):
            batch.by_text(values, real, 0)
    with pytest.raises(ValueError, match=r"begins with the tokens' shape \[2, 4\], got .* \[2, 3\]"):
        Batch.packed(ROWS, 4).unpack(torch.ones(2, 3))
