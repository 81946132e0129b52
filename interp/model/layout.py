"""Which columns of a batch hold which tokens, and the conversion of positions to columns.

A position is a token of its own row: 0 is the first real one, -1 the last, whatever padding, batch and cache; in packed
rows it is the text's own. `Layout` says how the rows of a pass are laid out, and finds the columns of positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal, NoReturn, TypeGuard

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from interp.core.boundary import public
from interp.core.hints import Required
from interp.core.wording import odd_value, value_text

New = Literal["new"]
NEW: New = "new"
"""The position that names every generated token."""


class PositionError(IndexError, ValueError):
    """A row has no token at a position."""


@public(unchecked=("places",))
@dataclass(frozen=True, repr=False)
class PerRow:
    """Positions of each row: `PerRow([3, 4])` is token 3 of the first row and token 4 of the second.

    `PerRow([(2, 3), (4,)])` is tokens 2 and 3 of the first row and token 4 of the second: several, as many as each row
    has (`Batch.positions`: the tokens of a chat's user). Several that are the same for every row are a plain sequence,
    `(3, 4)`. Analyses of data take one entry for each prompt, in the order in which the prompts are given, however
    they are batched.

    Args:
        places: token numbers of the rows, negative ones from a row's end; None = no token of that row. Where one row
            has a sequence of them, all may.

    Caveats:
        Where rows have unequally many, a function as a change sees a row's first token in place of those that it
        lacks, and what it makes of them is dropped.

    Example:
        >>> rows = torch.tensor([[5, 6, 7], [8, 9, 10]])
        >>> interp.logit_lens(model, rows, pos=interp.edits.PerRow([1, -1])).position.values.tolist()
        [[1], [2]]
        >>> interp.logit_lens(model, rows, pos=interp.edits.PerRow([(0, 1), (2,)])).position.values.tolist()
        [[0, 1], [2, -1]]
    """

    places: Annotated[
        Sequence[int | Sequence[int] | None],
        Required("one position for every row, or several", lambda value: None if _row_entries(value) else ""),
    ]

    def __post_init__(self) -> None:
        entries = _row_entries(self.places)
        if not entries:
            raise ValueError(
                "one position for every row is required, such as [3, 4], or several that differ and are counted from "
                f"one end, [(2, 3), (4,)], got {value_text(self.places)}"
            )
        if any(isinstance(entry, tuple) for entry in entries):
            entries = [
                entry if isinstance(entry, tuple) else () if entry is None else (entry,) for entry in entries
            ]
        object.__setattr__(self, "places", tuple(entries))

    def __len__(self) -> int:
        return len(self.places)

    @property
    def several(self) -> bool:
        """Whether rows may have several positions each, so that their axis stays."""
        return isinstance(self.places[0], tuple)

    def apart(self) -> tuple[PerRow, ...]:
        """The positions one by one: the first of every row, then the second, with None for rows that have fewer."""
        if not self.several:
            return (self,)
        rows: list[tuple[int, ...]] = list(self.places)  # type: ignore[arg-type]
        count = max(1, max(map(len, rows)))
        return tuple(PerRow([row[i] if i < len(row) else None for row in rows]) for i in range(count))

    def table(self) -> tuple[Int[Tensor, "t n"], Bool[Tensor, "t n"]]:
        """The positions of each row side by side, 0 where a row has fewer, and a mask of those that it has."""
        columns = [one.places for one in self.apart()]
        named = torch.tensor([[place or 0 for place in column] for column in columns], device="cpu")
        present = torch.tensor([[place is not None for place in column] for column in columns], device="cpu")
        return named.T, present.T

    def __repr__(self) -> str:
        return f"PerRow({list(self.places)})"

    @public()
    def of(self, rows: Iterable[int]) -> PerRow:
        """The positions of some rows. ValueError for a row without one."""
        numbers = list(rows)
        if not numbers or any(type(row) is not int for row in numbers):
            raise ValueError(f"rows must be numbers of prompts, one at least, got {value_text(numbers)}")
        if bad := [row for row in numbers if not 0 <= row < len(self.places)]:
            raise ValueError(f"rows must be among the {len(self)} prompts that have a position, got {bad[0]}")
        return PerRow([self.places[row] for row in numbers])


@dataclass(frozen=True, repr=False)
class ByRole:
    """The tokens of what a role says in chats, as `{"role": "user", "turn": -1}` names them."""

    role: str
    turn: int | None = None
    """Which of the role's messages, from 0, negative from the last; None: all."""

    @classmethod
    def of(cls, given: Mapping[str, object] | ByRole) -> ByRole:
        """The tokens that a mapping names. ValueError for other keys than role and turn, or other values."""
        if isinstance(given, ByRole):
            return given
        role, turn = given.get("role"), given.get("turn")
        if (
            not set(given) <= {"role", "turn"}
            or not isinstance(role, str)
            or not (turn is None or _is_place(turn))
        ):
            raise ValueError(
                "the tokens of a role are named by {'role': 'user'}, or one of its messages by {'role': 'user', "
                f"'turn': -1}}, got {value_text(given)}"
            )
        return cls(role, None if turn is None else int(turn))

    def __repr__(self) -> str:
        return str({"role": self.role} if self.turn is None else {"role": self.role, "turn": self.turn})


Places = int | Sequence[int] | PerRow | ByRole | Mapping[str, str | int]
"""Positions of tokens in every row: one, several, each row's own, or in chats those of a role."""


def _is_place(value: object) -> TypeGuard[int | np.integer]:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and abs(int(value)) < 2**63


def _row_entries(places: object) -> list[int | tuple[int, ...] | None]:
    """The entries of `PerRow` in plain numbers; empty where one is no position, None, or several as they may be."""
    if isinstance(places, Tensor | np.ndarray) and odd_value(places) is None:
        places = places.tolist()
    if not isinstance(places, Sequence) or isinstance(places, str | bytes):
        return []
    entries: list[int | tuple[int, ...] | None] = []
    for entry in places:
        several = (
            entry.tolist() if isinstance(entry, Tensor | np.ndarray) and odd_value(entry) is None else entry
        )
        if several is None or _is_place(several):
            entries.append(None if several is None else int(several))
        elif isinstance(several, list | tuple | range) and _are_places(several):
            entries.append(tuple(map(int, several)))
        else:
            return []
    return entries


def _are_places(values: Sequence[object]) -> bool:
    """Whether values are positions of one row that differ, and are all counted from one end."""
    places = [int(value) for value in values if _is_place(value)]
    one_end = len({place < 0 for place in places}) < 2
    return len(places) == len(values) == len(set(places)) and one_end


def several(pos: Places) -> tuple[int, ...] | PerRow | ByRole:
    """Positions as a tuple; a `PerRow` unchanged, the tokens of a role as `ByRole`.

    Raises:
        ValueError: no position, or one given twice.
    """
    if isinstance(pos, PerRow):
        return pos
    if isinstance(pos, Mapping | ByRole):
        return ByRole.of(pos)
    is_one = not isinstance(pos, Iterable) or getattr(pos, "ndim", 1) == 0
    positions: tuple[int, ...] = (pos,) if is_one else tuple(pos)  # type: ignore[assignment, arg-type]
    if not positions or not all(map(_is_place, positions)) or len(set(positions)) < len(positions):
        raise ValueError(
            "a position, several that differ, or PerRow([...]) with one for each row is required, "
            f"got {value_text(pos)}"
        )
    return tuple(map(int, positions))


def one_position(pos: object, name: str = "pos") -> None:
    """ValueError for what is not one position of every row: a number, or one for each row."""
    if not (_is_place(pos) or (isinstance(pos, PerRow) and not pos.several)):
        raise ValueError(
            f"{name} is one position of every prompt, a number, or PerRow([3, 4]) with one for each, "
            f"got {value_text(pos)}"
        )


def each_position(lengths: Int[Tensor, "b"], width: int) -> list[int | PerRow]:
    """Positions 0 to width - 1, as `PerRow` with None for rows that are shorter."""
    counts = lengths.tolist()
    return [p if p < min(counts) else PerRow([p if p < n else None for n in counts]) for p in range(width)]


@dataclass(frozen=True)
class TextTokens:
    """Some tokens of every text of a batch: of every row, or in packed rows of every text in them."""

    rows: Int[Tensor, "t"]
    """The row of each text."""
    columns: Int[Tensor, "t n"]
    """The column of each token; where a token does not exist, any column of the row."""
    places: Int[Tensor, "t n"]
    """The position of each token: the number of tokens of its text before it."""
    present: Bool[Tensor, "t n"] | None = None
    """True where the token exists; None: all do."""


@dataclass(frozen=True, eq=False)
class Layout:
    """Layout of the rows of a pass: which columns are real, and which document each belongs to."""

    keep: Bool[Tensor, "b k"] | None = None
    """True at real tokens; None = no padding."""
    documents: Int[Tensor, "b k"] | None = None
    """An id per column; neighbours with equal ids are one text, which sees nothing of the others. None: one text."""
    prompt: int | None = None
    """Number of columns of the prompts, while text is generated; None: all tokens are there."""
    numbers: Int[Tensor, "t"] | None = None
    """Number of the prompt that each text is, for errors; None: texts are prompts 0, 1, 2, ..."""
    forced: Int[Tensor, "t"] | None = None
    """How many of each text's last tokens belong to its answer; negative positions are counted from the prompt's end.
    None: 0.
    """
    branches: Int[Tensor, "b k"] | None = None
    """Continuation of its row that each column belongs to: 1, 2, ..., each seeing itself and the columns of 0 before
    all of them, on which every continuation follows. None: rows are plain texts.
    """

    def to(self, device: torch.device) -> Layout:
        """This layout on another device."""
        keep, documents, branches = (
            None if x is None else x.to(device) for x in (self.keep, self.documents, self.branches)
        )
        return Layout(keep, documents, self.prompt, self.numbers, self.forced, branches)

    @property
    def ends_early(self) -> bool:
        """Whether negative positions are counted from the prompt's end instead of the last real column."""
        return self.prompt is not None or self.forced is not None

    @property
    def uniform(self) -> bool:
        """Whether every column holds the same position in all rows."""
        return self.keep is None and self.documents is None

    def positions(self, n: int, past: int, device: torch.device) -> Int[Tensor, "b n"]:
        """Position of the last `n` columns: the number of real tokens of the same text before each.

        Tokens of other continuations of a row (`branches`) do not count.
        """
        if self.branches is not None:
            return self._positions_in_branches(self.branches)[:, past:]
        if self.keep is None and self.documents is None:
            return torch.arange(past, past + n, device=device)[None]
        if self.documents is None:
            assert self.keep is not None
            return (self.keep.cumsum(1) - 1).clamp_min(0)[:, past:]
        real = torch.ones_like(self.documents) if self.keep is None else self.keep.int()
        before = real.cumsum(1) - real
        starts = torch.ones_like(self.documents, dtype=torch.bool)
        starts[:, 1:] = self.documents[:, 1:] != self.documents[:, :-1]
        return (before - before.masked_fill(~starts, 0).cummax(1).values)[:, past:]

    def _positions_in_branches(self, branches: Int[Tensor, "b k"]) -> Int[Tensor, "b k"]:
        """Position of every column where rows have several continuations: each goes on after the shared tokens."""
        real = torch.ones_like(branches) if self.keep is None else self.keep.int()
        before = real.cumsum(1) - real
        starts = F.pad(branches[:, 1:] != branches[:, :-1], (1, 0))
        since_start = before - before.masked_fill(~starts, 0).cummax(1).values
        shared = (real * (branches == 0)).sum(1, keepdim=True)
        return torch.where(branches > 0, shared + since_start, before)

    def texts(self, real: Bool[Tensor, "b k"]) -> Int[Tensor, "b k"]:
        """Number of the text that each column belongs to, counted over all rows; -1 at padding."""
        if self.documents is None:
            number = torch.arange(len(real), device=real.device)[:, None].expand_as(real)
        else:
            starts = torch.ones_like(real)
            starts[:, 1:] = self.documents[:, 1:] != self.documents[:, :-1]
            number = (starts & real).flatten().cumsum(0).view_as(real) - 1
        return number.masked_fill(~real, -1)

    def find(self, pos: int | tuple[int, ...] | PerRow | ByRole | New, shape: tuple[int, int]) -> TextTokens:
        """The tokens of every row (packed: of every text) at these positions of `[rows, columns]`; on the host.

        Raises:
            PositionError: (a ValueError and IndexError) a row that is too short; the message names it, its length and
                the position. While text is generated a later position is one that is not there yet.
            ValueError: another number of positions than rows, or "new" where nothing is generated.
        """
        if isinstance(pos, ByRole):
            raise ValueError(
                f"{pos} names tokens of a chat, which this pass cannot tell apart: give the chat, or the batch that "
                "model.to_batch(chat=...) made of it, to a function that takes prompts, not its token ids"
            )
        rows, lengths, starts, flat = self._text_spans(shape)
        ends = self._counting_ends(shape, lengths)
        if pos == NEW:
            return self._generated_tokens(shape)
        if isinstance(pos, PerRow):
            if len(pos) != len(rows):
                raise ValueError(f"one position per row is required, got {len(pos)} for {len(rows)} rows")
            named, present = pos.table()
        else:
            named = torch.tensor([pos] if isinstance(pos, int) else pos, device="cpu").expand(len(rows), -1)
            present = torch.ones(named.shape, dtype=torch.bool, device="cpu")
        places = torch.where(named < 0, ends[:, None] + named, named)
        short = places >= lengths[:, None]
        wrong = present & ((places < 0) | (short if self.prompt is None else torch.zeros_like(short)))
        if bool(wrong.any()):
            _raise_missing(wrong, named, ends, self.numbers)
        present = present & ~short
        places = places.clamp_min(0).minimum((lengths[:, None] - 1).clamp_min(0))
        columns = flat[(starts[:, None] + places).clamp_max(len(flat) - 1)] % shape[1]
        return TextTokens(rows, columns, places, None if bool(present.all()) else present)

    def _generated_tokens(self, shape: tuple[int, int]) -> TextTokens:
        """The generated tokens."""
        if self.prompt is None:
            raise ValueError(
                'the position "new" names tokens that are generated, and this pass generates none'
            )
        columns = torch.arange(self.prompt, shape[1], device="cpu").expand(shape[0], -1)
        keep = (
            torch.ones(shape, dtype=torch.bool, device="cpu")
            if self._on_host[0] is None
            else self._on_host[0]
        )
        present, places = keep[:, self.prompt :], keep.cumsum(1)[:, self.prompt :] - 1
        return TextTokens(
            torch.arange(shape[0], device="cpu"), columns, places, None if bool(present.all()) else present
        )

    def _text_spans(self, shape: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Row and length of each text, its first index into `flat`, and `flat`: row * width + column of real tokens."""
        keep, documents = self._on_host
        real = torch.ones(shape, dtype=torch.bool, device="cpu") if keep is None else keep
        flat = real.flatten().nonzero()[:, 0]
        if documents is None:
            rows, lengths = torch.arange(shape[0], device="cpu"), real.sum(1)
        else:
            lengths = Layout(keep, documents).texts(real).flatten()[flat].bincount()
            rows = flat[lengths.cumsum(0) - lengths] // shape[1]
        return rows, lengths, lengths.cumsum(0) - lengths, flat

    def _counting_ends(self, shape: tuple[int, int], lengths: Int[Tensor, "t"]) -> Int[Tensor, "t"]:
        """Number of tokens of each text from whose end negative positions are counted: those of its prompt."""
        if self.prompt is None:
            return lengths if self.forced is None else lengths - self.forced.cpu()
        keep = self._on_host[0]
        if keep is None:
            return torch.full_like(lengths, self.prompt)
        return keep[:, : self.prompt].sum(1) + max(0, self.prompt - shape[1])

    @cached_property
    def _on_host(self) -> tuple[Tensor | None, Tensor | None]:
        """`keep` and `documents`, copied to the host."""
        keep, documents = (None if x is None else x.cpu() for x in (self.keep, self.documents))
        return keep, documents


def _raise_missing(
    wrong: Bool[Tensor, "t n"],
    places: Int[Tensor, "t n"],
    ends: Int[Tensor, "t"],
    numbers: Int[Tensor, "t"] | None,
) -> NoReturn:
    """Raise the error that names the row and the position that it lacks."""
    row, which = wrong.nonzero()[0].tolist()
    length, number = int(ends[row]), row if numbers is None else int(numbers[row])
    raise PositionError(
        f"position {int(places[row, which])} is required of every row, but row {number} has {length} tokens, positions "
        f"0 to {length - 1} (or {-length} to -1)"
    )
