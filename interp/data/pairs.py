"""Pairs of prompts as data: a clean prompt, its corrupted one, and their answers, row by row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeGuard

import torch

from interp.core.boundary import public
from interp.data.batch import Batch, Prompts, counted, is_prompts
from interp.data.sources import Data, Example, Rejected, Source, SourceRow, digest_of, open_source
from interp.data.text import Text


@public()
@dataclass(frozen=True, eq=False)
class Pairs:
    """Clean and corrupted prompts for questions that compare two runs, over data of any size.

    Args:
        clean, corrupt: anything `open_source` takes, with as many rows; a pair must be equally long, token for token.
        answer: the right next token of each clean prompt, as a text of a single token or as an id; None: the metric
            names it.
        wrong: the token that the answer is contrasted with, given like `answer`.
        prepend_bos: whether texts begin with BOS; None: as the model does by default.

    Example:
        >>> data = Pairs(["The cat sat", "A cat sat"], ["The dog sat", "A dog sat"])
        >>> interp.run([interp.causal.Patch("resid_pre", metric=interp.logit_difference(5, 6))], model, data).rows
        2
    """

    clean: Data
    corrupt: Data
    answer: Data | None = None
    wrong: Data | None = None
    prepend_bos: bool | None = None

    def source(self) -> PairedSource:
        """The rows of all parts, side by side.

        Raises:
            ValueError: parts of different lengths, and as in `open_source`.
        """
        parts = {name: getattr(self, name) for name in ("clean", "corrupt", "answer", "wrong")}
        return PairedSource(
            {name: _part_source(name, part) for name, part in parts.items() if part is not None}
        )

    @classmethod
    @public()
    def of(cls, clean: Batch, corrupt: Batch) -> Batch:
        """The clean batch with `corrupt` set to the tokens of the corrupted batch."""
        return replace(clean, corrupt=corrupt.tokens)


def paired(text: Text, clean: Prompts | Data, corrupt: Prompts | Data) -> Batch | list[Batch] | Pairs:
    """Clean and corrupted prompts as data: one batch that holds both, or several, or `Pairs` of files.

    Raises:
        ValueError: unequal numbers of clean and corrupted prompts, a pair with different lengths or padding, or a pair
            of equal prompts, in which no intervention could change anything.
    """
    if is_prompts(clean) and is_prompts(corrupt):
        return _pair_batch(text, clean, corrupt)
    if not (_are_batches(clean) and _are_batches(corrupt)):
        return Pairs(clean, corrupt)
    if len(clean) != len(corrupt):
        raise ValueError(
            f"as many batches of clean as of corrupted prompts are required, got {len(clean)} and {len(corrupt)}"
        )
    return [_pair_batch(text, *pair) for pair in zip(counted(clean), counted(corrupt), strict=True)]


def _are_batches(data: object) -> TypeGuard[Sequence[Batch]]:
    return isinstance(data, list | tuple) and all(isinstance(item, Batch) for item in data)


def _pair_batch(text: Text, clean: Prompts, corrupt: Prompts) -> Batch:
    """One batch with the clean prompts as `tokens` and the corrupted ones as `corrupt`; errors as in `paired`."""
    first, second = text.batch(clean), text.batch(corrupt)
    if len(first) != len(second):
        raise ValueError(
            f"one corrupted prompt per clean prompt is required, got {len(second)} for {len(first)}"
        )
    if first.tokens.shape != second.tokens.shape or not torch.equal(first.real, second.real):
        raise ValueError(
            "clean and corrupted prompts must have the same length, token for token: got "
            f"{first.lengths.tolist()[:8]} and {second.lengths.tolist()[:8]} tokens"
        )
    same = ((first.tokens == second.tokens) | ~first.real).all(1).nonzero().flatten().tolist()
    if same and first.memory is None:
        raise ValueError(
            f"a corrupted prompt must differ from its clean one, got the same in rows {same[:8]}"
        )
    return replace(first, corrupt=second.tokens)


@dataclass(frozen=True, eq=False)
class PairedSource:
    """Several sources read in parallel: row i of each part makes example i."""

    parts: Mapping[str, Source]

    def __post_init__(self) -> None:
        counts = {name: source.count for name, source in self.parts.items()}
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{count} of {name}" for name, count in counts.items())
            raise ValueError(f"as many rows are required of each part of a pair, got {listed}")

    @property
    def name(self) -> str:
        """Name for messages and results."""
        return "pairs of " + " and ".join(dict.fromkeys(source.name for source in self.parts.values()))

    @property
    def count(self) -> int | None:
        """Number of rows; None where it is known only at the end."""
        return next(iter(self.parts.values())).count

    @cached_property
    def _digest(self) -> str | None:
        prints = {name: source.fingerprint() for name, source in self.parts.items()}
        known = [f"{name} {print_}" for name, print_ in prints.items() if print_ is not None]
        return digest_of("pairs", *known) if len(known) == len(prints) else None

    def fingerprint(self) -> str | None:
        """A hash of all rows; None where rows cannot be read twice."""
        return self._digest

    def rows(self, start: int, stop: int) -> Iterator[SourceRow | Rejected]:
        """Examples `start` to `stop - 1`, or fewer at the end; an example is `Rejected` if a row of any part is."""
        columns = (source.rows(start, stop) for source in self.parts.values())
        for row in zip(*columns, strict=False):
            rejected = next((value for value in row if isinstance(value, Rejected)), None)
            if rejected is not None:
                yield rejected
            else:
                yield Example(**dict(zip(self.parts, row, strict=True)))


def _part_source(name: str, data: Data) -> Source:
    """The source of one part of the pairs; answers may be given as single ids."""
    if name in ("answer", "wrong") and not isinstance(data, str | Batch):
        if hasattr(data, "tolist"):
            data = data.tolist()
        if isinstance(data, list | tuple):
            data = [[item] if isinstance(item, int) else item for item in data]
    return open_source(data)
