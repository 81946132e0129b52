"""Stage by stage: what several questions ask of whole data sets, answered together where the rows are the same.

A question that is bound to a model is a generator of stages (`question.Stages`). In every round each question that is
not done has said what it asks. What is asked of the data of the run goes through them once for every model, what is
asked of other rows through those, and the questions go on with what was found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from interp.core.stats import Partial
from interp.data.pairs import Pairs
from interp.data.sources import Data
from interp.data.stream import DataSource
from interp.passes.observe import Subject
from interp.passes.question import Ask, ByRow, Staged
from interp.runs.over_data import WorkPlace, all_reduced_over, kept_of
from interp.runs.progress import Tally

if TYPE_CHECKING:
    import xarray as xr

RoundResult = Sequence[Partial] | Exception
"""The answers to the asks of a question, in their order, or the reason why there are none."""


@dataclass(frozen=True, eq=False)
class _Asked:
    """One ask of a round."""

    asker: str
    number: int
    """Among those of its asker."""
    ask: Ask

    @property
    def question(self) -> ByRow:
        """The question, with a name that no other asker's has."""
        inner = self.ask.question
        return replace(inner, name=f"{self.asker}.{inner.name}" if self.ask.whole else self.asker)


@dataclass(eq=False)
class Rounds:
    """Questions about one model and the data of one run, and what became of the rows."""

    subject: Subject
    data: DataSource | Data | Pairs | None
    place: WorkPlace
    tally: Tally = field(default_factory=Tally)
    """Counts of the rows of the run's data."""
    complete: bool = True
    """Whether all of the data is in: False where jobs of an array have rows to do."""
    askers: set[str] = field(default_factory=set)
    """The questions that use the run's data."""
    times: int = 0
    """How often the run's data were gone through."""

    def answered(self, questions: Iterable[ByRow | Staged]) -> dict[str, xr.Dataset]:
        """The results by name of the question; without those that wait for rows which other jobs have to do."""
        live = {each.name: each.stages(self.data is not None) for each in questions}
        asks: dict[str, Sequence[Ask]] = {}
        done: dict[str, xr.Dataset] = {}

        def go_on(name: str, found: RoundResult | None) -> None:
            stages = live[name]
            try:
                if isinstance(found, Exception):
                    asks[name] = stages.throw(found)
                else:
                    asks[name] = next(stages) if found is None else stages.send(found)
            except StopIteration as end:
                asks.pop(name, None)
                done[name] = end.value

        for name in live:
            go_on(name, None)
        while asks:
            found = self._round(asks)
            for name in list(asks):
                if name in found:
                    go_on(name, found[name])
                else:
                    del asks[name]
        return {name: done[name] for name in live if name in done}

    def _round(self, asks: Mapping[str, Sequence[Ask]]) -> dict[str, RoundResult]:
        """The answers to every question of a round; nothing if rows are missing that it cannot do without."""
        answers: dict[str, dict[int, Partial]] = {name: {} for name in asks}
        failed: dict[str, RoundResult] = {}
        every = [_Asked(name, i, ask) for name, some in asks.items() for i, ask in enumerate(some)]
        for group in self._alike(every):
            ask = group[0].ask
            if ask.data is None:
                partials = self._over_data(group, ask.model or self.subject)
            else:
                try:
                    questions = [each.question for each in group]
                    partials = all_reduced_over(questions, ask.model or self.subject, ask.data)
                except Exception as cause:
                    failed |= dict.fromkeys([each.asker for each in group], cause)
                    continue
            for each in group:
                if each.question.name in partials:
                    answers[each.asker][each.number] = partials[each.question.name]
        whole = {
            name: [found[i] for i in range(len(asks[name]))]
            for name, found in answers.items()
            if len(found) == len(asks[name])
        }
        return {**whole, **failed}

    def _alike(self, questions: Sequence[_Asked]) -> Iterator[Sequence[_Asked]]:
        """The asks in groups, each about equal rows and one model."""
        groups: dict[tuple[int, int], list[_Asked]] = {}
        for each in questions:
            model = each.ask.model or self.subject
            groups.setdefault((id(model.transformer), id(each.ask.data)), []).append(each)
        yield from groups.values()

    def _over_data(self, group: Sequence[_Asked], model: Subject) -> Mapping[str, Partial]:
        """The reductions over the run's data; without those that cannot be used before all rows are in."""
        assert self.data is not None, "a question said to need no data asks about them"
        self.times += 1
        first, askers = self.times == 1, {each.question.name: each.asker for each in group}
        self.askers |= set(askers.values())
        place = (
            self.place
            if first
            else self.place.inside(f"{self.times}-{'-'.join(dict.fromkeys(askers.values()))}")
        )
        kept = kept_of([each.question for each in group], model, self.data, place)
        self.tally = _joined(kept.tally if first else self.tally, kept.tally, askers)
        self.complete = self.complete and kept.complete
        usable = [each.question.name for each in group if kept.complete or not each.ask.whole]
        return {} if kept.partials is None else {name: kept.partials[name] for name in usable}


def _joined(tally: Tally, more: Tally, askers: Mapping[str, str]) -> Tally:
    """The counts of the first, with the rows set aside and the sentences of both, these after the name of the asker."""
    rejected = {each.row: each for each in (*tally.rejected, *more.rejected)}
    rows = tuple(rejected[row] for row in sorted(rejected))
    notes = {(askers.get(name, name), text) for name, text in (*tally.notes, *more.notes)}
    return replace(tally, rejected=rows, notes=tuple(sorted(notes)))
