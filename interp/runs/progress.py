"""The progress of a run: batches folded into windows in order, windows folded along one fixed tree."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor
from tqdm import tqdm

from interp.core.results import MergeTree
from interp.core.stats import Means, Partial, Reduction
from interp.data.sources import Rejected
from interp.model.config import Json
from interp.passes.question import merged

Partials = Mapping[str, Partial]
"""The partial result of every analysis, by its name."""
Reductions = Mapping[str, Reduction]
ValueGroups = dict[str, Tensor]
"""Tensors named `place\\nanalysis\\nname`: names of this package have no line break."""
PAUSE = 2.0
"""Seconds between two looks at the statistics."""


@dataclass(frozen=True)
class Tally:
    """Counts over some batches: rows, tokens, truncated rows, and the rows that were set aside."""

    rows: int = 0
    """Rows that count, without those set aside."""
    tokens: int = 0
    cut: int = 0
    """Rows that were truncated or split."""
    rejected: tuple[Rejected, ...] = ()
    notes: tuple[tuple[str, str], ...] = ()
    """Pairs (name of a question, sentence about the rows for its result), sorted."""

    def notes_of(self, question: str) -> list[str]:
        """The sentences for the result of a question: one about rows set aside, and those of the question itself."""
        return [*self._set_aside_notes(), *(text for name, text in self.notes if name == question)]

    def _set_aside_notes(self) -> list[str]:
        if not self.rejected:
            return []
        first, count = min(self.rejected, key=lambda row: row.row), len(self.rejected)
        several = "1 row was set aside" if count == 1 else f"{count} rows were set aside, the first of them"
        return [f"{several}: row {first.row}, {first.reason}"]

    @classmethod
    def of(cls, parts: Sequence["Tally"]) -> "Tally":
        """The sum of several tallies; the rows set aside keep their order."""
        rejected = tuple(row for tally in parts for row in tally.rejected)
        notes = tuple(sorted({note for tally in parts for note in tally.notes}))
        rows, tokens = sum(p.rows for p in parts), sum(p.tokens for p in parts)
        return cls(rows, tokens, sum(p.cut for p in parts), rejected, notes)


@dataclass(frozen=True)
class BatchDone:
    """The result of one batch; a window without a usable row has a single one, without partials."""

    window: int
    batch: int
    last: bool
    """Whether the batch is the last one of its window."""
    partials: Partials | None
    tally: Tally


@dataclass(frozen=True)
class OpenWindow:
    """An unfinished window: the number of its batches done, and their folded results."""

    batches: int = 0
    folded: Partials | None = None
    tally: Tally = Tally()


@dataclass
class Progress:
    """Everything done so far; its bits depend only on which batches are in, not on when and where they ran."""

    tree: MergeTree[Partials] = field(default_factory=lambda: MergeTree(merged))
    tallies: list[Tally] = field(default_factory=list)
    """Counts of the finished windows, in the order in which they came; added up only where the sum is needed."""
    open: dict[int, OpenWindow] = field(default_factory=dict)

    def due(self, window: int) -> int | None:
        """The first batch of a window that is still to do; None if the window is done."""
        return None if window in self.tree else self.open.get(window, OpenWindow()).batches

    def add(self, done: BatchDone) -> None:
        """Add the result of one batch; raises ValueError unless it is the next batch of its window."""
        due = self.due(done.window)
        if due != done.batch:
            raise ValueError(f"batch {due} of window {done.window} is due, got batch {done.batch}")
        before = self.open.pop(done.window, OpenWindow())
        folded = before.folded if done.partials is None else merged(before.folded, done.partials)
        tally = Tally.of((before.tally, done.tally))
        if done.last:
            self.tree.add(done.window, folded)
            self.tallies.append(tally)
        else:
            self.open[done.window] = OpenWindow(done.batch + 1, folded, tally)

    def include(self, other: "Progress") -> None:
        """Add the windows that another process has finished; raises ValueError for a window that is in already."""
        for (level, index), value in other.tree.nodes.items():
            self.tree.put_node(level, index, value)
        self.tallies += other.tallies

    @property
    def finished(self) -> Tally:
        """Counts of all finished windows together."""
        return Tally.of(self.tallies)

    def so_far(self) -> Tally:
        """Counts of all batches, those of unfinished windows included."""
        return Tally.of([*self.tallies, *(started.tally for started in self.open.values())])

    def total(self) -> Partials | None:
        """The partial results over all finished windows."""
        return self.tree.total()

    def groups(self) -> ValueGroups:
        """Every folded tensor by its path; together with `account` this is the whole state."""
        tensors: ValueGroups = {}
        for (level, index), value in self.tree.nodes.items():
            tensors |= named(f"node {level} {index}", value)
        for window, started in self.open.items():
            tensors |= named(f"open {window}", started.folded)
        return tensors

    def account(self) -> Json:
        """The state besides the tensors, as JSON."""
        return {
            "nodes": list(self.tree.nodes),
            "finished": asdict(self.finished),
            "open": [(w, started.batches, asdict(started.tally)) for w, started in self.open.items()],
        }

    @classmethod
    def restored(
        cls, account: Mapping[str, Any], groups: Mapping[str, Tensor], reductions: Reductions
    ) -> "Progress":
        """The progress that was saved as this account and these groups."""
        parts = loaded(groups, reductions)
        progress = cls(tallies=[tally_of(account["finished"])])
        for level, index in account["nodes"]:
            progress.tree.nodes[level, index] = parts.get(f"node {level} {index}")
        for window, batches, tally in account["open"]:
            progress.open[window] = OpenWindow(batches, parts.get(f"open {window}"), tally_of(tally))
        return progress


def tally_of(values: Mapping[str, Any]) -> Tally:
    """A tally from its JSON."""
    rejected = tuple(Rejected(**row) for row in values["rejected"])
    notes = tuple((name, text) for name, text in values.get("notes", ()))
    return Tally(values["rows"], values["tokens"], values["cut"], rejected, notes)


def named(place: str, partials: Partials | None) -> ValueGroups:
    """The tensors of every analysis by their path: place, analysis and name, one on each line."""
    if partials is None:
        return {}
    return {
        f"{place}\n{analysis}\n{name}": value
        for analysis, partial in partials.items()
        for name, value in partial.tensors().items()
    }


def loaded(groups: Mapping[str, Tensor], reductions: Reductions) -> dict[str, Partials]:
    """The partial results by place, from the tensors by path that `named` returned."""
    by_place: dict[str, dict[str, ValueGroups]] = {}
    for path, value in groups.items():
        place, analysis, name = path.split("\n")
        by_place.setdefault(place, {}).setdefault(analysis, {})[name] = value
    return {
        place: {analysis: reductions[analysis].load(tensors) for analysis, tensors in by_analysis.items()}
        for place, by_analysis in by_place.items()
    }


# --- what one sees of it ------------------------------------------------------------


@contextmanager
def progress_bar(title: str, rows: int | None, progress: Progress) -> Iterator[Callable[[BatchDone], None]]:
    """A bar that appears after a second; the yielded function takes every batch.

    `heads +-0.012` = the median, over all its numbers, of half the width of the 95 % interval so far.
    """
    start = shown = time.monotonic()
    before = progress.so_far()
    initial = before.rows + len(before.rejected)
    with tqdm(desc=title, total=rows, initial=initial, unit="row", delay=1, leave=False) as bar:

        def tell(done: BatchDone) -> None:
            nonlocal shown
            bar.update(done.tally.rows + len(done.tally.rejected))
            now = time.monotonic()
            if bar.disable or now - shown < PAUSE:
                return
            shown = now
            speed = (progress.so_far().tokens - before.tokens) / (now - start)
            bar.set_postfix_str(", ".join([f"{speed:.0f} tokens/s", *precision(progress)]))

        yield tell


def precision(progress: Progress) -> list[str]:
    """For every analysis that keeps means, its name and the median half-width of the 95 % intervals so far."""
    texts = []
    for name, partial in (progress.total() or {}).items():
        if isinstance(partial, Means) and partial.moments:
            low, high = next(iter(partial.moments.values())).interval()
            texts.append(f"{name} ±{float((high - low).nanmedian() / 2):.2g}")
    return texts
