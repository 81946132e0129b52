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
class _NumberedAsk:
    """One ask of a round, with the question that it belongs to."""

    asker: str
    number: int
    """The index of the ask among those of its asker."""
    ask: Ask

    @property
    def question(self) -> ByRow:
        """The question to reduce, under a name that is unique in the round."""
        inner = self.ask.question
        return replace(inner, name=f"{self.asker}.{inner.name}" if self.ask.whole else self.asker)


@dataclass(eq=False)
class Rounds:
    """Answers questions about one model and the data of one run in rounds, and counts the rows."""

    subject: Subject
    data: DataSource | Data | Pairs | None
    place: WorkPlace
    tally: Tally = field(default_factory=Tally)
    """Counts of the rows of the run's data."""
    complete: bool = True
    """Whether all rows are done; False while other jobs of an array have rows to do."""
    askers: set[str] = field(default_factory=set)
    """The names of the questions that use the run's data."""
    times: int = 0
    """How many passes over the run's data were begun."""

    def answered(self, questions: Iterable[ByRow | Staged]) -> dict[str, xr.Dataset]:
        """The results by name of the question, without questions that need rows which other jobs have to do."""
        live = {question.name: question.stages(self.data is not None) for question in questions}
        asks: dict[str, Sequence[Ask]] = {}
        done: dict[str, xr.Dataset] = {}

        def go_on(name: str, results: RoundResult | None) -> None:
            stages = live[name]
            try:
                if isinstance(results, Exception):
                    asks[name] = stages.throw(results)
                else:
                    asks[name] = next(stages) if results is None else stages.send(results)
            except StopIteration as end:
                asks.pop(name, None)
                done[name] = end.value

        for name in live:
            go_on(name, None)
        while asks:
            results = self._round_results(asks)
            for name in list(asks):
                if name in results:
                    go_on(name, results[name])
                else:
                    del asks[name]
        return {name: done[name] for name in live if name in done}

    def _round_results(self, asks: Mapping[str, Sequence[Ask]]) -> dict[str, RoundResult]:
        """The answers of one round by question; questions whose rows are not all done have none."""
        answers: dict[str, dict[int, Partial]] = {name: {} for name in asks}
        failed: dict[str, RoundResult] = {}
        numbered = [
            _NumberedAsk(name, i, ask)
            for name, question_asks in asks.items()
            for i, ask in enumerate(question_asks)
        ]
        for group in self._groups(numbered):
            ask = group[0].ask
            if ask.data is None:
                partials = self._over_data(group, ask.model or self.subject)
            else:
                try:
                    questions = [asked.question for asked in group]
                    partials = all_reduced_over(questions, ask.model or self.subject, ask.data)
                except Exception as cause:
                    failed |= dict.fromkeys([asked.asker for asked in group], cause)
                    continue
            for asked in group:
                if asked.question.name in partials:
                    answers[asked.asker][asked.number] = partials[asked.question.name]
        complete = {
            name: [partials_by_number[i] for i in range(len(asks[name]))]
            for name, partials_by_number in answers.items()
            if len(partials_by_number) == len(asks[name])
        }
        return {**complete, **failed}

    def _groups(self, asks: Sequence[_NumberedAsk]) -> Iterator[Sequence[_NumberedAsk]]:
        """The asks in groups, each about the same rows and the same model."""
        groups: dict[tuple[int, int], list[_NumberedAsk]] = {}
        for asked in asks:
            model = asked.ask.model or self.subject
            groups.setdefault((id(model.transformer), id(asked.ask.data)), []).append(asked)
        yield from groups.values()

    def _over_data(self, group: Sequence[_NumberedAsk], model: Subject) -> Mapping[str, Partial]:
        """The reductions over the run's data, by name; without those that need all rows while rows are missing."""
        assert self.data is not None, "a question said to need no data asks about them"
        self.times += 1
        first, askers = self.times == 1, {asked.question.name: asked.asker for asked in group}
        self.askers |= set(askers.values())
        place = (
            self.place
            if first
            else self.place.inside(f"{self.times}-{'-'.join(dict.fromkeys(askers.values()))}")
        )
        kept = kept_of([asked.question for asked in group], model, self.data, place)
        self.tally = _joint_tally(kept.tally if first else self.tally, kept.tally, askers)
        self.complete = self.complete and kept.complete
        usable = [asked.question.name for asked in group if kept.complete or not asked.ask.whole]
        return {} if kept.partials is None else {name: kept.partials[name] for name in usable}


def _joint_tally(tally: Tally, more: Tally, askers: Mapping[str, str]) -> Tally:
    """The counts of `tally`, with the rows set aside and the sentences of both, these under the asker's name."""
    rejected = {entry.row: entry for entry in (*tally.rejected, *more.rejected)}
    rows = tuple(rejected[row] for row in sorted(rejected))
    notes = {(askers.get(name, name), text) for name, text in (*tally.notes, *more.notes)}
    return replace(tally, rejected=rows, notes=tuple(sorted(notes)))
