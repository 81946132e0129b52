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
    """Counts over some batches: rows, tokens, and rows set aside."""

    rows: int = 0
    """Rows that count, those set aside not among them."""
    tokens: int = 0
    cut: int = 0
    """Rows that were truncated or split."""
    rejected: tuple[Rejected, ...] = ()
    notes: tuple[tuple[str, str], ...] = ()
    """Sentences about the rows for single results, each after the name of its question; sorted."""

    def notes_of(self, question: str) -> list[str]:
        """The sentences for the result of this question: its own, and that rows were set aside."""
        return [*self._set_aside(), *(text for name, text in self.notes if name == question)]

    def _set_aside(self) -> list[str]:
        if not self.rejected:
            return []
        first, count = min(self.rejected, key=lambda each: each.row), len(self.rejected)
        several = "1 row was set aside" if count == 1 else f"{count} rows were set aside, the first of them"
        return [f"{several}: row {first.row}, {first.reason}"]

    @classmethod
    def of(cls, parts: Sequence["Tally"]) -> "Tally":
        """The sum of the counts of all parts, the rows set aside in their order."""
        rejected = tuple(row for part in parts for row in part.rejected)
        notes = tuple(sorted({each for part in parts for each in part.notes}))
        rows, tokens = sum(p.rows for p in parts), sum(p.tokens for p in parts)
        return cls(rows, tokens, sum(p.cut for p in parts), rejected, notes)


@dataclass(frozen=True)
class BatchDone:
    """One batch's part of the work; a window without a good row has a single part, without partials."""

    window: int
    batch: int
    last: bool
    """Whether it is the last one of its window."""
    partials: Partials | None
    tally: Tally


@dataclass(frozen=True)
class OpenWindow:
    """A window of which some batches are in."""

    batches: int = 0
    folded: Partials | None = None
    tally: Tally = Tally()


@dataclass
class Progress:
    """Everything done so far. Which batches are in decides every bit of it; when and where they ran does not."""

    tree: MergeTree[Partials] = field(default_factory=lambda: MergeTree(merged))
    tallies: list[Tally] = field(default_factory=list)
    """Counts of the finished windows, in the order in which they came; added up only where the sum is needed."""
    open: dict[int, OpenWindow] = field(default_factory=dict)

    def due(self, window: int) -> int | None:
        """The first batch of a window that is still to do; None if the window is done."""
        return None if window in self.tree else self.open.get(window, OpenWindow()).batches

    def add(self, done: BatchDone) -> None:
        """Take one batch in; ValueError unless it is the next of its window."""
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
        """Take in the windows that another process has finished; ValueError for one that is in already."""
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
        """Every folded tensor; with `account` the whole of it."""
        found: ValueGroups = {}
        for (level, index), value in self.tree.nodes.items():
            found |= named(f"node {level} {index}", value)
        for window, started in self.open.items():
            found |= named(f"open {window}", started.folded)
        return found

    def account(self) -> Json:
        """The state besides the tensors."""
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
        found = cls(tallies=[tally_of(account["finished"])])
        for level, index in account["nodes"]:
            found.tree.nodes[level, index] = parts.get(f"node {level} {index}")
        for window, batches, tally in account["open"]:
            found.open[window] = OpenWindow(batches, parts.get(f"open {window}"), tally_of(tally))
        return found


def tally_of(values: Mapping[str, Any]) -> Tally:
    """A tally from its JSON."""
    rejected = tuple(Rejected(**each) for each in values["rejected"])
    notes = tuple((name, text) for name, text in values.get("notes", ()))
    return Tally(values["rows"], values["tokens"], values["cut"], rejected, notes)


def named(place: str, partials: Partials | None) -> ValueGroups:
    """The tensors of every analysis under a place of their own."""
    if partials is None:
        return {}
    return {
        f"{place}\n{analysis}\n{name}": value
        for analysis, partial in partials.items()
        for name, value in partial.tensors().items()
    }


def loaded(groups: Mapping[str, Tensor], reductions: Reductions) -> dict[str, Partials]:
    """The partials that `named` took apart, by place."""
    found: dict[str, dict[str, ValueGroups]] = {}
    for path, value in groups.items():
        place, analysis, name = path.split("\n")
        found.setdefault(place, {}).setdefault(analysis, {})[name] = value
    return {
        place: {analysis: reductions[analysis].load(tensors) for analysis, tensors in part.items()}
        for place, part in found.items()
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
    """For every analysis that keeps means, how well they are known."""
    found = []
    for name, partial in (progress.total() or {}).items():
        if isinstance(partial, Means) and partial.moments:
            low, high = next(iter(partial.moments.values())).interval()
            found.append(f"{name} ±{float((high - low).nanmedian() / 2):.2g}")
    return found
