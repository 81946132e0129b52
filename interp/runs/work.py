"""The work of a run, one window at a time: a pure function of the window, so any process may do it."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool
from torch import Tensor

from interp.data.batch import Batch
from interp.data.rows import Rejected
from interp.data.stream import Window
from interp.model.transformer import Transformer
from interp.passes.analysis import NotFiniteError, Questions, Values, merged
from interp.runs.progress import Done, Partials, Tally

Answer = tuple[Partials | None, tuple[Rejected, ...]]
"""Partial results over the good rows of a batch (None if there is none), and the rows set aside."""
EXCERPT = 12
"""Tokens of a row that show which one it was."""


@dataclass(eq=False)
class Worker:
    """A model with its questions: answers the batches of a window one after the other."""

    questions: Questions
    model: Transformer
    room: int | None = field(default=None, init=False)
    """Tokens that a pass may have, once memory has run out."""

    def answers(self, number: int, window: Window, first: int = 0) -> Iterator[Done]:
        """What each batch of the window contributes, from batch `first` on.

        Errors: MemoryError if a single row does not fit; everything the analyses raise but for NaN in a row.
        """
        count, aside = len(window.batches), Tally(0, 0, window.cut, window.rejected)
        if not count:
            yield Done(number, 0, True, None, aside)
        for i, batch in enumerate(window.batches[first:], first):
            partials, bad = self._answer(batch)
            tally = Tally(_texts(batch) - len(bad), int(batch.lengths.sum()), 0, bad)
            yield Done(number, i, i == count - 1, partials, tally if i else Tally.of((aside, tally)))

    def _answer(self, batch: Batch) -> Answer:
        if self.room is not None and batch.tokens.numel() > self.room and len(batch) > 1:
            return self._in_halves(batch)
        try:
            return self._reduced(batch, self.questions.values(self.model, batch))
        except torch.OutOfMemoryError as cause:
            if len(batch) == 1:
                raise MemoryError(
                    f"one row of {batch.tokens.shape[1]} tokens does not fit into the memory of {self.model.device}"
                ) from cause
            self.room = batch.tokens.numel() // 2
        except NotFiniteError as cause:
            if len(batch) == 1 and batch.documents is None:
                return None, (_rejected(batch, 0, str(cause)),)
            if batch.documents is not None:
                raise
        torch.cuda.empty_cache()
        return self._in_halves(batch)

    def _in_halves(self, batch: Batch) -> Answer:
        found: Partials | None = None
        rejected: tuple[Rejected, ...] = ()
        for half in batch.split((len(batch) + 1) // 2):
            partials, bad = self._answer(half.trimmed())
            rejected += bad
            if partials is not None:
                found = merged(found, partials)
        return found, rejected

    def _reduced(self, batch: Batch, values: Values) -> Answer:
        _check_rows(batch, values)
        rows, (good, why) = batch.identities(), self._finite(values)
        if good is None:
            return self.questions.reduced(values, rows), ()
        good = good.cpu()
        rejected = tuple(_rejected(batch, i, why) for i in (~good).nonzero()[:, 0].tolist())
        if not bool(good.any()):
            return None, rejected
        kept = {a: {k: v[good.to(v.device)] for k, v in each.items()} for a, each in values.items()}
        return self.questions.reduced(kept, None if rows is None else rows.cpu()[good]), rejected

    def _finite(self, values: Values) -> tuple[Bool[Tensor, "n"] | None, str]:
        """Which rows are finite wherever a reduction needs it (None: all are), and what is not in the others."""
        good: Tensor | None = None
        culprits = []
        for analysis in self.questions.analyses:
            if not getattr(analysis.reduction, "refuses_nan", False):
                continue
            for name, value in values[analysis.name].items():
                fine = torch.isfinite(value).reshape(len(value), -1).all(1)
                if not bool(fine.all()):
                    good = fine if good is None else good & fine
                    culprits.append(f"{analysis.name}.{name}")
        return good, f"NaN or infinite: {', '.join(culprits)}"


def _check_rows(batch: Batch, values: Values) -> None:
    """ValueError for an analysis that does not give one value per row (in packed batches: per text)."""
    for name, each in values.items():
        lengths = sorted({len(value) for value in each.values()})
        if lengths != [_texts(batch)]:
            raise ValueError(
                f"{name} requires one value per row or packed text, {_texts(batch)}, got {lengths}"
            )


def _texts(batch: Batch) -> int:
    rows = batch.identities()
    return len(batch) if rows is None else len(rows)


def _rejected(batch: Batch, i: int, reason: str) -> Rejected:
    """Row `i` (in packed rows: text `i` as they stand there) set aside."""
    rows = batch.identities()
    assert rows is not None
    row, shown = int(rows[i]), ""
    if batch.documents is None:
        shown = " ".join(str(int(t)) for t in batch.tokens[i][batch.real[i]][:EXCERPT])
    return Rejected(row, reason, f"ids {shown}" if shown else "")
