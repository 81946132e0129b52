"""Recognition of token ids: Python, NumPy or torch integers, and the results of a transformers tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from interp.core.wording import nearest, odd_value, value_text

IDS = "input_ids"
MASK = "attention_mask"
TYPES = "token_type_ids"
IdRows = Sequence[Sequence[int]]


def no_ids(value: Tensor | np.ndarray, axes: Sequence[int]) -> str | None:
    """None for an array of integers with one of these numbers of axes; else advice on how to write what was meant."""
    is_integer = (
        np.issubdtype(value.dtype, np.integer)
        if isinstance(value, np.ndarray)
        else not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
    )
    return None if is_integer and value.ndim in axes and odd_value(value) is None else ""


def is_id(value: object) -> TypeGuard[int | np.integer | Tensor]:
    """Whether a value is one token id: a Python or NumPy integer, or an integer tensor without axes."""
    if isinstance(value, Tensor):
        return no_ids(value, (0,)) is None
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_row(value: object) -> TypeGuard[Iterable[int | np.integer | Tensor]]:
    """Whether a value is the token ids of one prompt."""
    if isinstance(value, Tensor | np.ndarray):
        return no_ids(value, (1,)) is None
    if not isinstance(value, list | tuple):
        return False
    return set(map(type, value)) == {int} or all(map(is_id, value))  # the usual, three times as fast


def described(value: object) -> str:
    """The type of an unexpected value in words, such as "a list of float", for an error message."""
    kind = type(value).__name__
    if isinstance(value, list | tuple):
        kinds = sorted({type(item).__name__ for item in value})
        return f"a {kind} of {', '.join(kinds)}" if kinds else f"an empty {kind}"
    return kind


class OneTokenError(ValueError):
    """An answer of several tokens where one is required."""


def check_count(answers: int | None, prompts: int) -> None:
    """ValueError for another number of answers than of prompts; None is one answer for all prompts."""
    if answers not in (None, prompts):
        raise ValueError(
            f"one answer for all prompts, or one for each, is required, got {answers} answers for {prompts} prompts"
        )


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
    """The result of a transformers tokenizer (`BatchEncoding`, or a dict with its keys), as lists of rows."""

    ids: IdRows
    """Token ids, row by row, padding included."""
    mask: IdRows
    """1 at real tokens, which are consecutive, and 0 at padding."""
    types: IdRows | None
    """Token types; None where they are 0 everywhere."""

    @classmethod
    def read(cls, given: Mapping[str, object]) -> Encoding:
        """The rows of `given`, a tokenizer's result; ValueError with the key that is wrong (`data.batch.encoded`)."""
        if unknown := [name for name in given if name not in (IDS, MASK, TYPES)]:
            raise ValueError(
                f"of what a tokenizer returns, {IDS}, {MASK} and {TYPES} are prompts, got {unknown[0]!r} too; "
                f"{nearest(str(unknown[0]), (IDS, MASK, TYPES))}"
            )
        if given.get(IDS) is None:
            raise ValueError(
                f"{IDS} is required of what a tokenizer returns, got {', '.join(given) or 'nothing'}"
            )
        ids = _id_rows(IDS, given[IDS])
        optional = {
            name: _id_rows(name, given[name]) for name in (MASK, TYPES) if given.get(name) is not None
        }
        lengths = [len(row) for row in ids]
        for name, rows in optional.items():
            if (row_lengths := [len(row) for row in rows]) != lengths:
                raise ValueError(
                    f"{name} must have the shape of {IDS}, rows of {lengths[:8]}, got {row_lengths[:8]}"
                )
        mask = optional.get(MASK) or [[1] * n for n in lengths]
        for number, row in enumerate(mask):
            _check_mask(number, row)
        types = optional.get(TYPES)
        return cls(ids, mask, types if types and any(map(any, types)) else None)

    def real(self) -> Encoding:
        """The rows without their padding."""
        ids, mask, types = (
            None
            if rows is None
            else [_real_values(row, mask) for row, mask in zip(rows, self.mask, strict=True)]
            for rows in (self.ids, self.mask, self.types)
        )
        assert ids is not None and mask is not None
        return Encoding(ids, mask, types)


def _real_values(row: Sequence[int], mask: Sequence[int]) -> list[int]:
    """The values of one row where `mask` is 1."""
    return [value for value, is_real in zip(row, mask, strict=True) if is_real]


def _id_rows(name: str, value: object) -> list[list[int]]:
    """The integers of one entry of an encoding, row by row; ValueError with the entry's name for anything else."""
    if _is_bool_array(value):  # a mask may be of booleans
        value = value.int() if isinstance(value, Tensor) else np.asarray(value).astype(int)
    if isinstance(value, Tensor | np.ndarray) and no_ids(value, (1, 2)) is None:
        value = value.tolist()
    if isinstance(value, list | tuple) and len(value):
        is_one_row = is_id(value[0]) or isinstance(value[0], bool)
        rows = [_row_numbers(row) for row in ([value] if is_one_row else value)]
        if all(rows):
            return rows
    raise ValueError(
        f"{name} must be whole numbers [pos] or [prompt, pos], at least one in each row, got {value_text(value)}"
    )


def _row_numbers(row: object) -> list[int]:
    """The integers of a row, booleans as 0 and 1; an empty list for anything else."""
    if isinstance(row, list | tuple) and all(isinstance(number, bool) for number in row):
        return [int(number) for number in row]
    if _is_bool_array(row):
        return [int(number) for number in row]
    return [int(number) for number in row] if is_row(row) else []


def _is_bool_array(value: object) -> TypeGuard[Tensor | np.ndarray]:
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
    """The prompts as (texts, []) or ([], rows of ids); ValueError for no prompts."""
    items = [prompts] if isinstance(prompts, str) else prompts
    assert isinstance(items, list | tuple)
    if not items:
        raise ValueError("at least one prompt is required, got none")
    if isinstance(items[0], str):
        return [str(text) for text in items], []
    rows = [items] if is_id(items[0]) else items
    return [], [[int(token) for token in row] for row in rows]
