"""Recognition of token ids: numbers of Python, NumPy or torch, results of a tokenizer of transformers, answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from interp.core.wording import nearest, value_text

IDS = "input_ids"
MASK = "attention_mask"
TYPES = "token_type_ids"
IdRows = Sequence[Sequence[int]]


def no_ids(value: Tensor | np.ndarray, axes: Sequence[int]) -> str | None:
    """None for an array of whole numbers of so many axes; else advice on how to write what was meant."""
    whole = (
        np.issubdtype(value.dtype, np.integer)
        if isinstance(value, np.ndarray)
        else not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
    )
    return None if whole and value.ndim in axes else ""


def is_id(value: object) -> TypeGuard[int | np.integer | Tensor]:
    """Whether a value is one token id: a whole number of Python's, of NumPy's, or in a tensor without axes."""
    if isinstance(value, Tensor):
        return no_ids(value, (0,)) is None
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_row(value: object) -> TypeGuard[Iterable[int | np.integer | Tensor]]:
    """Whether a value is the ids of one prompt."""
    if isinstance(value, Tensor | np.ndarray):
        return no_ids(value, (1,)) is None
    return isinstance(value, list | tuple) and all(map(is_id, value))


def described(value: object) -> str:
    """Short text about a value that was not expected."""
    kind = type(value).__name__
    if isinstance(value, list | tuple):
        kinds = sorted({type(each).__name__ for each in value})
        return f"a {kind} of {', '.join(kinds)}" if kinds else f"an empty {kind}"
    return kind


def check_contrast(
    answer: Int[Tensor, "a"],
    wrong: Int[Tensor, "w"],
    numbers: Int[Tensor, "n"] | None = None,
    pieces: Callable[[list[int]], list[str]] | None = None,
) -> None:
    """ValueError where an answer is its own wrong answer, so that their difference is 0 whatever the model does.

    Args:
        answer, wrong: token ids on the host, one for all prompts or one for each.
        numbers: numbers of the prompts, for the message; None: counted from 0.
        pieces: function that gives the texts of tokens (`Text.pieces`).
    """
    same = (answer == wrong).nonzero().flatten().tolist()
    if not same:
        return
    count, first = max(len(answer), len(wrong)), same[0]
    token = int(answer[first if len(answer) > 1 else 0])
    number = first if numbers is None or len(numbers) <= first else int(numbers[first])
    word = f"token {token}" if pieces is None else f"{pieces([token])[0]!r} (token {token})"
    where = f" for prompt {number}" if count > 1 else ""
    more = f", and for {len(same) - 1} more of {count} prompts" if len(same) > 1 else ""
    raise ValueError(
        f"the answer and the wrong answer must be two tokens, got {word} for both{where}{more}: their difference is 0 "
        "whatever the model does"
    )


@dataclass(frozen=True)
class Encoding:
    """Numbers that a tokenizer of transformers returned (`BatchEncoding`, or a dict of its keys)."""

    ids: IdRows
    """Token ids, row by row, padding included."""
    mask: IdRows
    """1 at real tokens, which stand side by side, and 0 at padding."""
    types: IdRows | None
    """Token types; None where they are 0 everywhere."""

    @classmethod
    def read(cls, given: Mapping[str, object]) -> Encoding:
        """The rows of a mapping; ValueError, by the key's name, for anything else (`data.batch.encoded`)."""
        if unknown := [name for name in given if name not in (IDS, MASK, TYPES)]:
            raise ValueError(
                f"of what a tokenizer returns, {IDS}, {MASK} and {TYPES} are prompts, got {unknown[0]!r} too; "
                f"{nearest(str(unknown[0]), (IDS, MASK, TYPES))}"
            )
        if given.get(IDS) is None:
            raise ValueError(
                f"{IDS} is required of what a tokenizer returns, got {', '.join(given) or 'nothing'}"
            )
        ids = _rows(IDS, given[IDS])
        other = {name: _rows(name, given[name]) for name in (MASK, TYPES) if given.get(name) is not None}
        lengths = [len(row) for row in ids]
        for name, rows in other.items():
            if (found := [len(row) for row in rows]) != lengths:
                raise ValueError(
                    f"{name} must have the shape of {IDS}, rows of {lengths[:8]}, got {found[:8]}"
                )
        mask = other.get(MASK) or [[1] * n for n in lengths]
        for number, row in enumerate(mask):
            _check_mask(number, row)
        types = other.get(TYPES)
        return cls(ids, mask, types if types and any(map(any, types)) else None)

    def real(self) -> Encoding:
        """The rows without their padding."""
        ids, mask, types = (
            None if rows is None else [_real(*both) for both in zip(rows, self.mask, strict=True)]
            for rows in (self.ids, self.mask, self.types)
        )
        assert ids is not None and mask is not None
        return Encoding(ids, mask, types)


def _real(row: Sequence[int], mask: Sequence[int]) -> list[int]:
    """Values at the real tokens of a row."""
    return [each for each, real in zip(row, mask, strict=True) if real]


def _rows(name: str, value: object) -> list[list[int]]:
    """The whole numbers of an encoding, row by row; ValueError, by their name, for anything else."""
    if _truths(value):  # a mask may be of booleans
        value = value.int() if isinstance(value, Tensor) else np.asarray(value).astype(int)
    if isinstance(value, Tensor | np.ndarray) and no_ids(value, (1, 2)) is None:
        value = value.tolist()
    if isinstance(value, list | tuple) and len(value):
        one = is_id(value[0]) or isinstance(value[0], bool)
        rows = [_listed(row) for row in ([value] if one else value)]
        if all(rows):
            return rows
    raise ValueError(
        f"{name} must be whole numbers [pos] or [prompt, pos], at least one in each row, got {value_text(value)}"
    )


def _listed(row: object) -> list[int]:
    """The numbers of a row; none where it is something else."""
    if isinstance(row, list | tuple) and all(isinstance(each, bool) for each in row):
        return [int(each) for each in row]
    if _truths(row):
        return [int(each) for each in row]
    return [int(each) for each in row] if is_row(row) else []


def _truths(value: object) -> TypeGuard[Tensor | np.ndarray]:
    """Whether a value is an array of booleans."""
    return isinstance(value, Tensor | np.ndarray) and value.dtype in (torch.bool, np.bool_)


def _check_mask(number: int, mask: Sequence[int]) -> None:
    """ValueError for a row without real tokens, with other numbers than 0 and 1, or with padding between tokens."""
    if odd := set(mask) - {0, 1}:
        raise ValueError(f"{MASK} must be of 0 and 1, got {odd.pop()} in row {number}")
    if 1 not in mask:
        raise ValueError(f"every prompt requires at least one token, {MASK} has none in row {number}")
    start = mask.index(1)
    if 0 in (between := mask[start : start + sum(mask)]):
        raise ValueError(
            f"{MASK} must have padding before or after the tokens of a row, not between them, got 0 in row {number} at "
            f"position {start + between.index(0)}"
        )


def sorted_out(prompts: object) -> tuple[list[str], list[list[int]]]:
    """Texts, or rows of ids; ValueError for neither."""
    given = [prompts] if isinstance(prompts, str) else prompts
    assert isinstance(given, list | tuple)
    if not given:
        raise ValueError("at least one prompt is required, got none")
    if isinstance(given[0], str):
        return [str(each) for each in given], []
    rows = [given] if is_id(given[0]) else given
    return [], [[int(token) for token in row] for row in rows]
