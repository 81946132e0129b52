"""TaskPairs of prompts that differ in known columns only: the type, and how pairs of rows become one.

A causal experiment copies activations from one run into another column by column, so both runs must have the same
tokens at the same places except where the question is. A pair that is not aligned is refused, never padded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from interp.core.shapes import nearest
from interp.zoo.pair_tokens import Row


@dataclass(frozen=True, eq=False, repr=False)
class TaskPairs:
    """Clean and corrupted prompts, aligned column by column, with the answers and the columns of their words.

    Rows of one group have the same length and the same columns for every role, so that means over a group, per
    position, mean something. Errors: ValueError if a pair differs nowhere, or outside the roles in `changes`, or if the
    rows of a group are not aligned.

    Example:
        >>> tokenizer = interp.zoo.load("demo-4l")[1]
        >>> pairs = interp.zoo.pairs.indirect_objects(tokenizer, 4)
        >>> pairs
        TaskPairs('indirect_objects', 4 pairs, differing at S2; roles: IO, S1, S1+1, S2, end)
        >>> bool((pairs.clean_tokens[range(4), pairs.columns("IO")] == pairs.answer).all())
        True
    """

    task: str
    """Key of `pairs.TASKS`."""
    clean: tuple[str, ...]
    """The prompts that have the answer, without BOS; tokenising them gives `clean_tokens`."""
    corrupt: tuple[str, ...]
    """The same prompts with the decisive words exchanged."""
    clean_tokens: Int[Tensor, "n p"]
    """Token ids, BOS first if the tokenizer has one, padded on the right."""
    corrupt_tokens: Int[Tensor, "n p"]
    """The same for the corrupted prompts; equal to the clean ones outside the roles of `changes`."""
    keep: Bool[Tensor, "n p"] | None
    """True at real tokens, in both; None = no padding anywhere."""
    answer: Int[Tensor, "n"]
    """The token that follows the clean prompt."""
    wrong: Int[Tensor, "n"]
    """The token it is contrasted with; each task says which."""
    spans: Mapping[str, Bool[Tensor, "n p"]]
    """Role -> True at its columns; "end" is the last real token."""
    changes: tuple[str, ...]
    """The roles at which clean and corrupted prompts differ."""
    groups: tuple[str, ...]
    """The template of each row, and whatever else moves columns."""
    options: Int[Tensor, "c"] | None = None
    """Where the answer is a set: every token that is right or wrong for some row."""
    right: Bool[Tensor, "n c"] | None = None
    """Which of the options are right after each clean prompt; the others are wrong."""

    def __post_init__(self) -> None:
        allowed = torch.stack([self.spans[role] for role in self.changes]).any(0)
        for row in torch.nonzero((self.changed & ~allowed).any(1) | ~self.changed.any(1)).flatten().tolist():
            raise ValueError(
                f"a pair of {self.task} must differ, and only at {', '.join(self.changes)}, got "
                f"{self.clean[row]!r} and {self.corrupt[row]!r}"
            )
        layouts = torch.stack(list(self.spans.values()), 1)
        for group in dict.fromkeys(self.groups):
            first, *others = (row for row, name in enumerate(self.groups) if name == group)
            if not bool((layouts[others] == layouts[first]).all()):
                raise ValueError(f"rows of one group must have every role at the same columns, got {group!r}")

    @cached_property
    def changed(self) -> Bool[Tensor, "n p"]:
        """True where the clean and the corrupted token differ."""
        return self.clean_tokens != self.corrupt_tokens

    def columns(self, role: str) -> Int[Tensor, "n"]:
        """The one column of a role in each row.

        Errors: KeyError for an unknown role; ValueError for one of several tokens, whose columns are in `spans`.
        """
        if role not in self.spans:
            raise KeyError(f"{self.task} has no role {role!r}; {nearest(role, self.spans)}")
        mask = self.spans[role]
        if bool((mask.sum(1) != 1).any()):
            raise ValueError(
                f"{role!r} is {int(mask.sum(1).min())} to {int(mask.sum(1).max())} tokens long, "
                "one column per row is required: use spans"
            )
        return mask.int().argmax(1)

    def __len__(self) -> int:
        return len(self.clean)

    def __repr__(self) -> str:
        return (
            f"TaskPairs({self.task!r}, {len(self)} pairs, differing at {', '.join(self.changes)}; "
            f"roles: {', '.join(self.spans)})"
        )


@dataclass(frozen=True)
class Pair:
    """One clean and one corrupted row, before they are padded to their neighbours."""

    clean: Row
    """The prompt that has the answer."""
    corrupt: Row
    """The same with the decisive words exchanged, as long."""
    answer: int
    """The token that follows the clean prompt."""
    wrong: int
    """The token it is contrasted with."""
    roles: Mapping[str, range]
    """Role -> columns, in both rows; "end" is added."""
    group: str
    """What all rows of these columns have in common."""


def pairs_of(task: str, pairs: Sequence[Pair], *, changes: tuple[str, ...]) -> TaskPairs:
    """Rows of any lengths as one `TaskPairs`, padded on the right.

    Errors: ValueError for no pair, and for one whose rows differ in length or in the columns of their words.
    """
    if not pairs:
        raise ValueError(f"{task} requires n of at least 1, got 0 pairs")
    for pair in pairs:
        if len(pair.clean.ids) != len(pair.corrupt.ids) or pair.clean.columns != pair.corrupt.columns:
            raise ValueError(
                f"a pair of {task} must have the same tokens at the same columns, got {len(pair.clean.ids)} for "
                f"{pair.clean.text!r} and {len(pair.corrupt.ids)} for {pair.corrupt.text!r}"
            )
    lengths = torch.tensor([len(pair.clean.ids) for pair in pairs])
    keep = torch.arange(int(lengths.max())) < lengths[:, None]
    fill = pairs[0].clean.ids[
        0
    ]  # any id of the vocabulary will do, the same in both: `keep` says what is real
    ends = [{**pair.roles, "end": range(len(pair.clean.ids) - 1, len(pair.clean.ids))} for pair in pairs]
    return TaskPairs(
        task=task,
        clean=tuple(pair.clean.text for pair in pairs),
        corrupt=tuple(pair.corrupt.text for pair in pairs),
        clean_tokens=_padded([pair.clean.ids for pair in pairs], keep, fill),
        corrupt_tokens=_padded([pair.corrupt.ids for pair in pairs], keep, fill),
        keep=None if bool(keep.all()) else keep,
        answer=torch.tensor([pair.answer for pair in pairs]),
        wrong=torch.tensor([pair.wrong for pair in pairs]),
        spans=MappingProxyType({role: _mask([row[role] for row in ends], keep) for role in ends[0]}),
        changes=changes,
        groups=tuple(pair.group for pair in pairs),
    )


def _padded(rows: Sequence[tuple[int, ...]], keep: Bool[Tensor, "n p"], fill: int) -> Int[Tensor, "n p"]:
    width = keep.shape[1]
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows])


def _mask(columns: Sequence[range], keep: Bool[Tensor, "n p"]) -> Bool[Tensor, "n p"]:
    start, stop = (torch.tensor([getattr(c, end) for c in columns])[:, None] for end in ("start", "stop"))
    column = torch.arange(keep.shape[1])
    return (column >= start) & (column < stop)
