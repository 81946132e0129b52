"""Reductions of questions over all rows of some data: window by window, journalled, on one device or several.

Data is cut into windows of rows, windows into batches. A worker turns a window into partial results, batch by batch;
the progress folds them in an order that depends on nothing but their numbers. What is done is journalled, so that a run
that is killed goes on, and processes or machines of one kind that share the windows give the bits that one would have
given.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from interp.core.kinds import Device
from interp.core.stats import Partial, Rows
from interp.data.pairs import Pairs
from interp.data.sources import Data, Rejected
from interp.data.stream import (
    DataSource,
    GivenBatches,
    PromptBatches,
    Stream,
    about,
    data_source,
    windows_of,
)
from interp.model.config import Json
from interp.model.transformer import Transformer
from interp.passes.edited import of_columns
from interp.passes.observe import Subject
from interp.passes.question import ByRow, NotFiniteError, Questions
from interp.passes.together import one_after_another, smallest_over_processes
from interp.runs.memory import MOST_ON_HOST, memory_plan
from interp.runs.progress import BatchDone, Progress, Tally, progress_bar
from interp.runs.work_folder import WORK, Shard, check_comparable, opened, work_of
from interp.runs.workers import Worker, all_devices, done_by_processes

WorkDevices = Literal["all"] | Sequence[Device]
SAMPLE = 4
"""Rows on which memory is measured."""
MOST_NAMED = 4
"""Questions that a progress bar names."""
AHEAD = 2
"""Windows that are tokenised while the model works on another."""


@dataclass(frozen=True)
class WorkPlace:
    """Where the work is done, and where it is kept, if it is."""

    folder: Path | None = None
    resume: bool = False
    shard: str | Shard | None = None
    devices: WorkDevices | None = None
    engine: Literal["ray"] | None = None

    def __post_init__(self) -> None:
        if self.folder is None and (self.resume or self.shard is not None):
            raise ValueError("resume and shard require a folder (out=) where the work is kept")
        if self.devices is not None and not self.devices:
            raise ValueError("devices must be at least one, got none")

    def inside(self, name: str) -> WorkPlace:
        """Where a later stage of the work is kept: a folder in this one, which an earlier process may have begun."""
        if self.folder is None:
            return self
        return replace(self, folder=self.folder / name, resume=True)


@dataclass(frozen=True, eq=False)
class KeptPartials:
    """The reductions of several questions over all rows, and which rows those were."""

    partials: Mapping[str, Partial] | None
    """Reductions by name of the question; None while other jobs of an array have to do the first row."""
    tally: Tally
    complete: bool
    """Whether all of the data is in, or as much as the questions ask for: False where shards are missing."""


def kept_of(
    questions: Sequence[ByRow], subject: Subject, data: DataSource | Data | Pairs, place: WorkPlace
) -> KeptPartials:
    """The reductions of questions with distinct names over all rows of data of any size.

    Raises:
        ValueError: a number of rows that a question does not fit, for no usable row, and for the folder of other
            work.
    """
    network, folder = subject.transformer, place.folder
    shared = Questions.of(questions, network.config)
    before = None if folder is None else WORK.begun(folder, resume=place.resume or place.shard is not None)
    smallest_over_processes(
        network, 0
    )  # before the first of several processes makes the folder that the others look for
    source = _sized(data, shared, subject, before)
    for each in questions:
        if each.prompts is not None and source.rows not in (None, each.prompts):
            raise ValueError(
                f"{each.name} holds {each.held} for {each.prompts} prompts, got {source.rows} rows of data"
            )
    work = _Work(shared, network, source, place)
    if folder is not None:
        return _journalled(
            work, folder, partial(_sized, data, shared, subject), has_progress=before is not None
        )
    progress = Progress()
    work.go(progress.due, progress, progress.add)
    return work.kept(progress)


def reduced_over(question: ByRow, model: Subject, source: DataSource) -> Partial:
    """The reduction of a question over all rows, unlabelled, for code that goes on computing with it.

    Raises:
        NotFiniteError: (a ValueError) for rows on which the model gives NaN or infinity.
    """
    return all_reduced_over([question], model, source)[question.name]


def all_reduced_over(questions: Sequence[ByRow], model: Subject, source: DataSource) -> Mapping[str, Partial]:
    """The reductions of several questions over all rows, by their names, from shared passes.

    Raises:
        ValueError: as `reduced_over`.
    """
    shared, progress = Questions.of(questions, model.transformer.config), Progress()
    work = _Work(shared, model.transformer, source, WorkPlace())
    work.go(progress.due, progress, progress.add)
    found = work.kept(progress)
    if rejected := found.tally.rejected:
        first = min(rejected, key=lambda each: each.row)
        raise NotFiniteError(f"{questions[0].name}: row {first.row}: {first.reason}")
    assert found.partials is not None, "prompts in memory are at least one row"
    return found.partials


@dataclass(frozen=True, eq=False)
class _Work:
    """The work of a run: questions, model, data, and what they run with."""

    questions: Questions
    model: Transformer
    source: DataSource
    place: WorkPlace

    def __post_init__(self) -> None:
        if isinstance(self.source, PromptBatches):
            object.__setattr__(self, "source", self._cut(self.source))
        if self._several and self.source.windows is None:
            raise ValueError("several processes require data that can be read again, got an iterator")

    def _cut(self, prompts: PromptBatches) -> GivenBatches:
        """Prompts as batches for this work: by length, unless edits or questions know them in the order given."""
        if of_columns(self.model):
            return prompts.as_given()
        return prompts.in_order() if any(each.enough for each in self.questions.every) else prompts

    @property
    def share(self) -> Shard | None:
        """Which of the windows are this job's; None = all."""
        return None if self.place.shard is None else Shard.of(self.place.shard)

    @property
    def _several(self) -> bool:
        place = self.place
        return place.shard is not None or place.devices is not None or place.engine is not None

    def go(
        self, due: Callable[[int], int | None], progress: Progress, take: Callable[[BatchDone], None]
    ) -> None:
        """Do every window that is due, or as many as are enough, and hand over each batch's part."""
        if self.enough(progress):
            return
        names = [each.name for each in self.questions.every]
        title = f"{len(names)} questions" if len(names) > MOST_NAMED else ", ".join(names)
        with progress_bar(title, self.source.rows, progress) as bar:
            for done in self._done(self._windows(due), due):
                take(done)
                bar(done)
                if done.last and self.enough(progress):
                    return

    def enough(self, progress: Progress) -> bool:
        """Whether the first windows answer everything, however many they are: looked at where one process does all.

        Several would stop wherever each of them happens to be, so they do all windows.
        """
        tree = progress.tree
        if self._several or not all(each.enough for each in self.questions.every):
            return False
        return all(w in tree for w in range(len(tree))) and self.questions.enough(progress.total())

    def kept(self, progress: Progress) -> KeptPartials:
        """The reductions of all finished work. ValueError if no row of the whole data can be used."""
        total, tally, source = progress.total(), progress.finished, self.source
        rejected = tuple(sorted(tally.rejected, key=lambda each: each.row))
        complete = self.enough(progress) or source.windows is None or len(progress.tree) == source.windows
        if total is None and complete:
            raise ValueError(_nothing_usable(rejected))
        if total is not None and isinstance(source, Stream | PromptBatches):
            # rows in the order of the data, where batches were made of rows of like lengths
            total = {name: part.ordered() if isinstance(part, Rows) else part for name, part in total.items()}
        return KeptPartials(total, replace(tally, rejected=rejected), complete)

    def _done(self, windows: Iterable[int], due: Callable[[int], int | None]) -> Iterator[BatchDone]:
        if self.place.engine == "ray":
            from interp.runs.ray_engine import done_by_ray

            return done_by_ray(self.questions, self.model, self.source, windows, due)
        if self.place.devices is None:
            return self._done_here(windows, due)
        given = self.place.devices
        devices = all_devices() if given == "all" else [torch.device(d) for d in given]
        return done_by_processes(self.questions, self.model, self.source, windows, due, devices)

    def _done_here(self, windows: Iterable[int], due: Callable[[int], int | None]) -> Iterator[BatchDone]:
        worker, pin = Worker(self.questions, self.model), self.model.device.type == "cuda"
        for number, window in windows_of(self.source, windows, ahead=AHEAD, pin=pin):
            yield from worker.answers(number, window, due(number) or 0)

    def _windows(self, due: Callable[[int], int | None]) -> Iterable[int]:
        count, share = self.source.windows, self.share
        if count is None:
            return itertools.count()
        mine = range(count) if share is None else share.windows(count)
        return (w for w in mine if due(w) is not None)


def _nothing_usable(rejected: Sequence[Rejected]) -> str:
    first = f": row {rejected[0].row}: {rejected[0].reason}" if rejected else ""
    return f"some rows that can be used are required, got {len(rejected)} rows, all set aside{first}"


def _journalled(
    work: _Work, folder: Path, sized: Callable[[Json], DataSource], *, has_progress: bool
) -> KeptPartials:
    """The reductions, with the progress in a folder; `sized` gives the data as the run there cuts them.

    Args:
        has_progress: whether the folder holds progress already.
    """
    questions, model = work.questions, work.model
    about_work = work_of(questions, model, about(work.source))
    if has_progress or work.share is not None:
        check_comparable(about_work)
    with one_after_another(model):
        stored = WORK.claim(folder, about_work)
    if stored != about_work:  # of shards that start together one decides on the batches
        work = replace(work, source=sized(stored))
        about_work = {**about_work, "data": about(work.source)}
    WORK.agree(folder, stored, about_work)
    with opened(folder, questions, model, work.share) as session:
        work.go(session.due, session.journal.progress, session.take)
        return work.kept(session.together())


def _sized(
    data: DataSource | Data | Pairs, questions: Questions, model: Subject, before: Json | None
) -> DataSource:
    """The data with as many tokens per batch as fit, or as the run in the folder had."""
    source = data_source(data, model.text, MOST_ON_HOST)
    if source is data or not isinstance(source, Stream):
        return source
    if before is not None:
        kept = before.get("data")
        size = kept.get("tokens_per_batch") if isinstance(kept, dict) else None
        if not isinstance(size, int) or isinstance(size, bool):
            raise ValueError(f"{WORK.manifest} must say the tokens_per_batch of its data, got data={kept!r}")
        return replace(source, tokens_per_batch=size)
    network = model.transformer
    width, sample = network.config.n_ctx, None
    if source.windows and (batches := source.window(0).batches):
        sample = next(batches[0].split(SAMPLE))
        width = sample.tokens.shape[1]
        if source.windows == len(batches) == 1 and len(sample) == len(batches[0]):
            return source  # the rows that a plan would try out are all there are
    try:
        plan = memory_plan(questions, network, width, sample)
    except NotFiniteError:  # the run will set that row aside
        plan = memory_plan(questions, network, width)
    return replace(source, tokens_per_batch=plan.tokens_per_batch)
