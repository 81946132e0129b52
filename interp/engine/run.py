"""Many analyses over data of any size in shared passes: resumable, on one device or several, with the same numbers.

Data is cut into windows of rows, windows into batches. A worker turns a window into partial results, batch by batch;
the progress folds them in an order that depends on nothing but their numbers. What is done is journalled, so a run that
is killed goes on, and processes or machines that share the windows give the bits that one would have given.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from interp.core.stats import Bootstrap, MaskedMoments, Means, Rows
from interp.core.viewer import Shown
from interp.engine.analysis import Analysis, NotFiniteError, Questions
from interp.engine.feed import Feed, about, feed_of
from interp.engine.memory import MOST_ON_HOST, memory_plan
from interp.engine.observe import Subject
from interp.engine.progress import Done, Progress
from interp.engine.progress_bar import progress_bar
from interp.engine.sources import Data
from interp.engine.stream import Stream, prefetched
from interp.engine.together import least, one_after_another
from interp.engine.work import Worker
from interp.engine.work_folder import Shard, begun, claimed, opened, work_of, write_results
from interp.engine.workers import all_devices, done_by_processes
from interp.model.config import Json, ModelConfig
from interp.model.transformer import Transformer

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

    Named = Mapping[str, xr.Dataset]
else:
    Named = Mapping  # xarray is imported where the first result is made

Asked = Analysis | Callable[[ModelConfig], Analysis]
"""An analysis, or what makes one for a model's config."""
Devices = Literal["all"] | Sequence[str | torch.device]
SAMPLE = 4
"""Rows on which memory is measured."""


@dataclass(frozen=True, eq=False)
class Results(Shown, Named):
    """The result of every analysis by name, and what they were made from."""

    datasets: Named
    rows: int
    """Rows that count, those set aside not among them."""
    tokens: int
    cut: int
    """Rows that were truncated or split."""
    complete: bool
    """Whether all of the data is in: False where shards are missing."""
    rejected: "pd.DataFrame"
    """Rows set aside: `row`, `reason`, `excerpt`."""

    def __getitem__(self, name: str) -> "xr.Dataset":
        return self.datasets[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.datasets)

    def __len__(self) -> int:
        return len(self.datasets)

    def __repr__(self) -> str:
        counts = (
            f"{self.rows} rows, {self.tokens} tokens, {len(self.rejected)} rows set aside, {self.cut} cut"
        )
        sizes = "\n".join(f"  {name}: {dict(value.sizes)}" for name, value in self.items())
        return f"Results of {counts}\n{sizes}"


def run(
    analyses: Sequence[Asked],
    model: Subject | Transformer,
    data: Feed | Data,
    *,
    out: Path | str | None = None,
    resume: bool = False,
    bootstrap: int = 0,
    seed: int = 0,
    devices: Devices | None = None,
    engine: Literal["ray"] | None = None,
    shard: str | Shard | None = None,
) -> Results:
    """The result of every analysis over all of the data, all answered by one forward pass per batch.

    analyses: `Analysis` records or functions that make one from a config, such as `interp.analyses.lens.lens`; the
    pass stops at the deepest block anybody reads. data: batches as they are; or a `Stream`; or anything `open_source`
    takes, with as many tokens per batch as fit (predicted from the reads, measured on some rows, halved if memory runs
    out all the same). Rows that cannot be used are set aside and counted, in `rejected`.
    Means over rows carry their standard error, the number of rows (`score_se`, `score_n`) and 95 % intervals: normal
    ones, or with `bootstrap` replicates percentiles (`stats.Bootstrap`).
    out: a folder for progress and results. A run that was killed goes on with `resume=True` where it was, if nothing
    has changed that decides a number; else it is refused, and the message says what.
    devices: one worker process per device ("all" = every GPU, or every core), on windows of their own. engine="ray":
    one actor per device of a Ray cluster. shard="2/8": only the third eighth of the windows, for job arrays that share
    `out`; the call without `shard` takes in what they did, and does the rest.
    No number depends on batch size beyond rounding, and with as many threads per process no bit on restarts, devices,
    engine or shards.
    Errors: ValueError for no analyses, two of one name, no rows, no usable row, or a folder of another run;
    MemoryError if a single row does not fit; OSError if `out` cannot be written (nothing is lost: resume).

    Example:
        >>> from interp.analyses.lens import lens
        >>> from interp.analyses.in_context import position_losses
        >>> texts = ["When Mary and John went to the store", "The cat sat on the mat"]
        >>> found = interp.run([lens, lambda config: position_losses(config, early=1, late=4)], model, texts)
        >>> found.rows, found["in_context"].loss.sizes["index"] >= 4
        (2, True)
    """
    network = model if isinstance(model, Transformer) else model.transformer
    questions = _questions(analyses, network.config, bootstrap, seed)
    folder = None if out is None else Path(out)
    if folder is None and (resume or shard is not None):
        raise ValueError("resume and shard require a folder (out=) where the work is kept")
    before = None if folder is None else begun(folder, resume or shard is not None)
    least(network, 0)  # before the first of several processes makes the folder that the others look for
    feed = _sized(data, questions, model, before)
    share = None if shard is None else Shard.of(shard)
    work = _Work(questions, network, feed, share, devices, engine)
    if folder is not None:
        return _kept(work, folder, partial(_sized, data, questions, model))
    progress = Progress()
    work.go(progress.due, progress, progress.add)
    return _results(questions, feed, progress)


@dataclass(frozen=True, eq=False)
class _Work:
    """What there is to do, and with what."""

    questions: Questions
    model: Transformer
    feed: Feed
    share: Shard | None
    devices: Devices | None
    engine: Literal["ray"] | None

    def go(self, due: Callable[[int], int | None], progress: Progress, take: Callable[[Done], None]) -> None:
        """Do every window that is due, and hand over each batch's part."""
        title = ", ".join(a.name for a in self.questions.analyses)
        with progress_bar(title, self.feed.rows, progress) as bar:
            for done in self._done(self._windows(due), due):
                take(done)
                bar(done)

    def _done(self, windows: Iterable[int], due: Callable[[int], int | None]) -> Iterator[Done]:
        if self.engine == "ray":
            from interp.engine.shard import done_by_ray

            return done_by_ray(self.questions, self.model, self.feed, windows, due)
        if self.devices is None:
            return self._done_here(windows, due)
        devices = all_devices() if self.devices == "all" else [torch.device(d) for d in self.devices]
        return done_by_processes(self.questions, self.model, self.feed, windows, due, devices)

    def _done_here(self, windows: Iterable[int], due: Callable[[int], int | None]) -> Iterator[Done]:
        worker, pin = Worker(self.questions, self.model), self.model.device.type == "cuda"
        for number, window in prefetched(self.feed, windows, pin=pin):
            yield from worker.answers(number, window, due(number) or 0)

    def _windows(self, due: Callable[[int], int | None]) -> Iterable[int]:
        count = self.feed.windows
        if count is None:
            if self.share is not None:
                raise ValueError("shards require data that can be read again, got an iterator")
            return itertools.count()
        mine = range(count) if self.share is None else self.share.windows(count)
        return (w for w in mine if due(w) is not None)


def _kept(work: _Work, folder: Path, sized: Callable[[Json], Feed]) -> Results:
    """The results of the work, with its progress in a folder; `sized` gives the feed of the run that is there."""
    questions, model = work.questions, work.model
    asked = work_of(questions, model, about(work.feed))
    with one_after_another(model):
        stored = claimed(folder, asked)
    if stored != asked:  # of shards that start together one decides on the batches
        work = replace(work, feed=sized(stored))
        asked = {**asked, "feed": about(work.feed)}
    with opened(folder, asked, questions, model, work.share) as place:
        work.go(place.due, place.journal.progress, place.take)
        results = _results(questions, work.feed, place.together())
        if results.complete and place.writes:
            write_results(folder, results, results.rejected)
    return results


def _questions(asked: Sequence[Asked], config: ModelConfig, bootstrap: int, seed: int) -> Questions:
    made = [each if isinstance(each, Analysis) else each(config) for each in asked]
    if bootstrap:
        made = [_resampled(analysis, bootstrap, seed) for analysis in made]
    return Questions.of(made, config)


def _resampled(analysis: Analysis, replicates: int, seed: int) -> Analysis:
    kind = analysis.reduction
    if not (isinstance(kind, type) and issubclass(kind, Means)):
        return analysis
    return replace(analysis, reduction=Bootstrap(kind, replicates, seed))


def _sized(
    data: Feed | Data, questions: Questions, model: Subject | Transformer, before: Json | None
) -> Feed:
    """The feed with as many tokens per batch as fit, or as the run in the folder had."""
    text = None if isinstance(model, Transformer) else model.text
    feed = feed_of(data, text, MOST_ON_HOST)
    if feed is data or not isinstance(feed, Stream):
        return feed
    if before is not None:
        kept = before["feed"]
        assert isinstance(kept, dict)
        return replace(feed, tokens_per_batch=int(kept["tokens_per_batch"]))
    network = model if isinstance(model, Transformer) else model.transformer
    width, sample = network.config.n_ctx, None
    if feed.windows and (batches := feed.window(0).batches):
        sample = next(batches[0].split(SAMPLE))
        width = sample.tokens.shape[1]
    try:
        plan = memory_plan(questions, network, width, sample)
    except NotFiniteError:  # the run will set that row aside
        plan = memory_plan(questions, network, width)
    return replace(feed, tokens_per_batch=plan.tokens_per_batch)


def _results(questions: Questions, feed: Feed, progress: Progress) -> Results:
    import pandas as pd

    total, tally = progress.total(), progress.finished
    rejected = sorted(tally.rejected, key=lambda each: each.row)
    if total is None:
        first = f": row {rejected[0].row}: {rejected[0].reason}" if rejected else ""
        raise ValueError(
            f"some rows that can be used are required, got {len(rejected)} rows, all set aside{first}"
        )
    if isinstance(feed, Stream):
        total = {name: p.ordered() if isinstance(p, Rows) else p for name, p in total.items()}
    finished = questions.finished(total)
    datasets = {
        name: with_errors(_numbered(value, total[name]), total[name]) for name, value in finished.items()
    }
    table = pd.DataFrame([vars(each) for each in rejected], columns=["row", "reason", "excerpt"])
    complete = feed.windows is None or len(progress.tree) == feed.windows
    return Results(datasets, tally.rows, tally.tokens, tally.cut, complete, table)


def with_errors(found: "xr.Dataset", partial: object) -> "xr.Dataset":
    """The result with the standard error and the number of rows of every mean in it, as `score_se` and `score_n`.

    A result may show fewer entries of an axis than were averaged: its first ones.
    """
    if not isinstance(partial, Means):
        return found
    for name, moments in partial.moments.items():
        if name not in found or found[name].ndim != moments.mean.ndim:
            continue
        counts = (
            moments.counts if isinstance(moments, MaskedMoments) else torch.full_like(moments.mean, moments.n)
        )
        shown = tuple(slice(0, n) for n in found[name].shape)
        error, count = (x.cpu()[shown].numpy() for x in (moments.standard_error(), counts.long()))
        if error.shape == found[name].shape:
            dims = found[name].dims
            found = found.assign({f"{name}_se": (dims, error), f"{name}_n": (dims, count)})
    return found


def _numbered(found: "xr.Dataset", partial: object) -> "xr.Dataset":
    """The result with the identity of every row as coordinate `row`, where it keeps rows."""
    if isinstance(partial, Rows) and partial.ids is not None:
        for dim in ("prompt", "example"):
            if found.sizes.get(dim) == len(partial.ids) and "row" not in found.coords:
                return found.assign_coords(row=(dim, partial.ids.cpu().numpy()))
    return found
