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

from interp.core.kinds import Device, require_device
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
"""Most questions that a progress bar names; for more it shows their number."""
AHEAD = 2
"""Windows that are tokenised while the model works on another."""


@dataclass(frozen=True)
class WorkPlace:
    """Where a run computes (devices, engine, shard) and the folder where its progress is stored, if any."""

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
        if self.devices is not None and self.devices != "all":
            for device in self.devices:
                require_device(device)

    def inside(self, name: str) -> WorkPlace:
        """The place of a later stage of the run, in a subfolder, which an earlier process may have begun."""
        if self.folder is None:
            return self
        return replace(self, folder=self.folder / name, resume=True)


@dataclass(frozen=True, eq=False)
class KeptPartials:
    """The reductions of several questions over all rows, and the counts of these rows."""

    partials: Mapping[str, Partial] | None
    """Reductions by name of the question; None as long as no row is done (other jobs of an array have them)."""
    tally: Tally
    complete: bool
    """Whether all rows are done, or as many as the questions need; False while shards are missing."""


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
    manifest = None if folder is None else WORK.begun(folder, resume=place.resume or place.shard is not None)
    # a barrier: all processes have looked for the folder before one of them makes it
    smallest_over_processes(network, 0)
    source = _sized_source(data, shared, subject, manifest)
    for question in questions:
        if question.prompts is not None and source.rows not in (None, question.prompts):
            raise ValueError(
                f"{question.name} holds {question.held} for {question.prompts} prompts, got {source.rows} rows of data"
            )
    work = _Work(shared, network, source, place)
    if folder is not None:
        return _kept_in_folder(
            work, folder, partial(_sized_source, data, shared, subject), has_progress=manifest is not None
        )
    progress = Progress()
    work.go(progress.due, progress, progress.add)
    return work.kept(progress)


def reduced_over(question: ByRow, model: Subject, source: DataSource) -> Partial:
    """The reduction of a question over all rows, as tensors for further computation instead of a labelled Dataset.

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
    kept = work.kept(progress)
    if rejected := kept.tally.rejected:
        first = min(rejected, key=lambda row: row.row)
        raise NotFiniteError(f"{questions[0].name}: row {first.row}: {first.reason}")
    assert kept.partials is not None, "prompts in memory are at least one row"
    return kept.partials


@dataclass(frozen=True, eq=False)
class _Work:
    """The work of a run: its questions, model and data, and where they run."""

    questions: Questions
    model: Transformer
    source: DataSource
    place: WorkPlace

    def __post_init__(self) -> None:
        if isinstance(self.source, PromptBatches):
            object.__setattr__(self, "source", self._work_batches(self.source))
        if self._several_processes and self.source.windows is None:
            raise ValueError("several processes require data that can be read again, got an iterator")

    def _work_batches(self, prompts: PromptBatches) -> GivenBatches:
        """The prompts in batches of similar length, or in the given order where edits or questions depend on it."""
        if of_columns(self.model):
            return prompts.as_given()
        return prompts.in_order() if any(question.enough for question in self.questions.every) else prompts

    @property
    def share(self) -> Shard | None:
        """The shard of the windows that this job does; None: all windows."""
        return None if self.place.shard is None else Shard.of(self.place.shard)

    @property
    def _several_processes(self) -> bool:
        place = self.place
        return place.shard is not None or place.devices is not None or place.engine is not None

    def go(
        self, due: Callable[[int], int | None], progress: Progress, take: Callable[[BatchDone], None]
    ) -> None:
        """Compute every window that is due, until all questions have enough; `take` gets the result of each batch."""
        if self.enough(progress):
            return
        names = [question.name for question in self.questions.every]
        title = f"{len(names)} questions" if len(names) > MOST_NAMED else ", ".join(names)
        with progress_bar(title, self.source.rows, progress) as bar:
            for done in self._batch_results(self._due_windows(due), due):
                take(done)
                bar(done)
                if done.last and self.enough(progress):
                    return

    def enough(self, progress: Progress) -> bool:
        """Whether the finished windows, without gaps, suffice for every question that can stop early (`ByRow.enough`).

        False where several processes share the windows: each would stop at another window, so they do all of them.
        """
        tree = progress.tree
        if self._several_processes or not all(question.enough for question in self.questions.every):
            return False
        return all(w in tree for w in range(len(tree))) and self.questions.enough(progress.total())

    def kept(self, progress: Progress) -> KeptPartials:
        """The reductions over all finished windows; raises ValueError if no row of the whole data can be used."""
        total, tally, source = progress.total(), progress.finished, self.source
        rejected = tuple(sorted(tally.rejected, key=lambda row: row.row))
        complete = self.enough(progress) or source.windows is None or len(progress.tree) == source.windows
        if total is None and complete:
            raise ValueError(_nothing_usable_message(rejected))
        if total is not None and isinstance(source, Stream | PromptBatches):
            # batches hold rows of similar length: put rows back into the order of the data
            total = {
                name: reduction.ordered() if isinstance(reduction, Rows) else reduction
                for name, reduction in total.items()
            }
        return KeptPartials(total, replace(tally, rejected=rejected), complete)

    def _batch_results(self, windows: Iterable[int], due: Callable[[int], int | None]) -> Iterator[BatchDone]:
        """The results of all batches, computed by Ray, by worker processes or in this process."""
        if self.place.engine == "ray":
            from interp.runs.ray_engine import done_by_ray

            return done_by_ray(self.questions, self.model, self.source, windows, due)
        if self.place.devices is None:
            return self._local_results(windows, due)
        names = self.place.devices
        devices = all_devices() if names == "all" else [torch.device(d) for d in names]
        return done_by_processes(self.questions, self.model, self.source, windows, due, devices)

    def _local_results(self, windows: Iterable[int], due: Callable[[int], int | None]) -> Iterator[BatchDone]:
        worker, pin = Worker(self.questions, self.model), self.model.device.type == "cuda"
        for number, window in windows_of(self.source, windows, ahead=AHEAD, pin=pin):
            yield from worker.answers(number, window, due(number) or 0)

    def _due_windows(self, due: Callable[[int], int | None]) -> Iterable[int]:
        """The numbers of this job's windows that are not done yet."""
        count, share = self.source.windows, self.share
        if count is None:
            return itertools.count()
        own = range(count) if share is None else share.windows(count)
        return (w for w in own if due(w) is not None)


def _nothing_usable_message(rejected: Sequence[Rejected]) -> str:
    first = f": row {rejected[0].row}: {rejected[0].reason}" if rejected else ""
    return f"some rows that can be used are required, got {len(rejected)} rows, all set aside{first}"


def _kept_in_folder(
    work: _Work, folder: Path, sized: Callable[[Json], DataSource], *, has_progress: bool
) -> KeptPartials:
    """The reductions, with the progress stored in a folder.

    Args:
        sized: function from the folder's manifest to the data, in batches of the size that the manifest says.
        has_progress: whether the folder holds progress already.
    """
    questions, model = work.questions, work.model
    about_work = work_of(questions, model, about(work.source))
    if has_progress or work.share is not None:
        check_comparable(about_work)
    with one_after_another(model):
        stored = WORK.claim(folder, about_work)
    if stored != about_work:  # shards started together: the first to write decides the batch size
        work = replace(work, source=sized(stored))
        about_work = {**about_work, "data": about(work.source)}
    WORK.agree(folder, stored, about_work)
    with opened(folder, questions, model, work.share) as session:
        work.go(session.due, session.journal.progress, session.take)
        return work.kept(session.together())


def _sized_source(
    data: DataSource | Data | Pairs, questions: Questions, model: Subject, manifest: Json | None
) -> DataSource:
    """The data with as many tokens per batch as fit into memory, or as the manifest `before` says."""
    source = data_source(data, model.text, MOST_ON_HOST)
    if source is data or not isinstance(source, Stream):
        return source
    if manifest is not None:
        data_entry = manifest.get("data")
        size = data_entry.get("tokens_per_batch") if isinstance(data_entry, dict) else None
        if not isinstance(size, int) or isinstance(size, bool):
            raise ValueError(
                f"{WORK.manifest} must say the tokens_per_batch of its data, got data={data_entry!r}"
            )
        return replace(source, tokens_per_batch=size)
    network = model.transformer
    width, sample = network.config.n_ctx, None
    if source.windows and (batches := source.window(0).batches):
        sample = next(batches[0].split(SAMPLE))
        width = sample.tokens.shape[1]
        if source.windows == len(batches) == 1 and len(sample) == len(batches[0]):
            return source  # so few rows that measuring them would be the whole run
    try:
        plan = memory_plan(questions, network, width, sample)
    except NotFiniteError:  # a sample row gives NaN: the run will set it aside, the plan is predicted
        plan = memory_plan(questions, network, width)
    return replace(source, tokens_per_batch=plan.tokens_per_batch)
