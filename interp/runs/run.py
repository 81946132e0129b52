"""Many analyses over data of any size in shared passes: resumable, on one device or several, with the same numbers.

Data is cut into windows of rows, windows into batches. A worker turns a window into partial results, batch by batch;
the progress folds them in an order that depends on nothing but their numbers. What is done is journalled, so a run that
is killed goes on, and processes or machines of one kind that share the windows give the bits that one would have given.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch.nn.utils import get_total_norm

from interp.core.boundary import Count, Device, public, shown
from interp.core.notes import note
from interp.core.results import with_notes
from interp.core.stats import Bootstrap, Means, Partial, Rows
from interp.core.viewer import Shown, notes_of
from interp.data.pairs import Pairs
from interp.data.sources import Data, Rejected
from interp.data.stream import (
    DataSource,
    GivenBatches,
    PromptBatches,
    Stream,
    about,
    data_source,
    prompt_source,
    windows_of,
)
from interp.model.config import Json
from interp.model.edits import Edit
from interp.model.transformer import Transformer
from interp.passes.edited import of_columns
from interp.passes.observe import Model, Studied, Subject, as_model, as_network, text_of
from interp.passes.question import Alone, Askable, ByRow, NotFiniteError, Question, Questions, function_name
from interp.passes.together import least, one_after_another
from interp.runs.kept import looked_at, once
from interp.runs.memory import MOST_ON_HOST, memory_plan
from interp.runs.progress import Done, Progress, progress_bar
from interp.runs.provenance import versions
from interp.runs.work_folder import WORK, Shard, check_comparable, opened, work_of, write_results
from interp.runs.workers import Worker, all_devices, done_by_processes

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

    Named = Mapping[str, xr.Dataset]
else:
    Named = Mapping  # xarray is imported where the first result is made

Asked = Askable | Sequence[Askable] | Mapping[str, Askable]
"""One question, several of different names, or several by names of one's own."""
Devices = Literal["all"] | Sequence[Device]
SAMPLE = 4
"""Rows on which memory is measured."""
MOST_NAMED = 4
"""Questions that a progress bar names."""
AHEAD = 2
"""Windows that are tokenised while the model works on another."""


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
    """Whether all of the data is in, or as much as the questions ask for: False where shards are missing."""
    rejected: pd.DataFrame
    """Rows set aside: `row`, `reason`, `excerpt`."""

    def __getitem__(self, name: str) -> xr.Dataset:
        return self.datasets[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.datasets)

    def __len__(self) -> int:
        return len(self.datasets)

    def __repr__(self) -> str:
        counts = (
            f"{self.rows} rows, {self.tokens} tokens, {len(self.rejected)} rows set aside, {self.cut} cut"
        )
        lines = [f"Results of {counts}"]
        for name, value in self.items():
            lines += [f"  {name}: {dict(value.sizes)}", *(f"    note: {text}" for text in notes_of(value))]
        return "\n".join(lines)


@public(unchecked=("questions",))
def run(
    questions: Asked,
    model: Model,
    data: DataSource | Data | Pairs | None = None,
    *,
    edits: Sequence[Edit] = (),
    out: Path | str | None = None,
    resume: bool = False,
    bootstrap: Count = 0,
    seed: int = 0,
    devices: Devices | None = None,
    engine: Literal["ray"] | None = None,
    shard: str | Shard | None = None,
) -> Results:
    """The answer to every question over all of the data; what they read of a model comes from one pass per batch.

    For corpora: data of any size, many questions at once, several devices, and on again after an interruption.
    questions: records such as `interp.lenses.LogitLens(top=5)` or `interp.causal.Patch(...)`, in a list, or a mapping
    that names them. The shared pass stops at the deepest block anybody reads; questions that intervene share their
    sweeps where they change the same run and watch the same metric; those about weights alone need no data.
    data: texts, token ids, files, a folder, a data set, an iterator; `Pairs` of them for questions that compare two
    runs; a `Stream`; or batches as they are. There are as many tokens per batch as fit (predicted from the reads,
    measured on some rows, halved if memory runs out all the same). Unusable rows are set aside, in `rejected`.
    edits: interventions under which everything is asked: the model under study is the edited one.
    Means over rows carry 95 % intervals by Student's t (none below 3 rows); with `bootstrap` replicates rows of one
    identity, such as pieces of a text, count as one (`stats.Bootstrap`).
    out: a folder for progress and results. A run that was killed goes on with `resume=True` where it was, if nothing
    has changed that decides a number, the code of your functions and all that they hold among it; else it is refused,
    and the message says what. A function that holds what cannot be compared, such as an open file, cannot go on.
    devices: one worker process per device ("all" = every GPU, or every core), on windows of their own. engine="ray":
    one actor per device of a Ray cluster. shard="2/8": only the third eighth of the windows, for job arrays that share
    `out`; the call without `shard` takes in what they did, and does the rest. A share may be empty: where no job has
    done a row yet, there are no data sets in what is returned. However many processes a host has, it has the weights
    once; those of a file are sent as its path. An iterator's rows are for one process.
    One process alone ends at the window after which all questions know enough (`ByRow.enough`); several do all.
    No number depends on batch size beyond rounding, no bit on restarts, engine, shards or the number of devices, at as
    many threads and on the same kind of hardware.
    Errors: ValueError for no questions, two of one name, no rows, no usable row, or a folder of another run;
    MemoryError if a single row does not fit; OSError if `out` cannot be written (nothing is lost: resume).

    Example:
        >>> from interp.lenses import LogitLens
        >>> texts = ["When Mary and John went to the store", "The cat sat on the mat"]
        >>> found = interp.run([LogitLens(top=5)], model, texts)
        >>> found.rows, found["logit_lens"].sizes["prompt"]
        (2, 2)
    """
    subject = _subject(questions, model, edits)
    if devices is not None and not devices:
        raise ValueError("devices must be at least one, got none")
    place = _Place(None if out is None else Path(out), resume, shard)
    return _found(questions, subject, data, place, devices, engine, bootstrap, seed)


def _found(
    questions: Asked,
    subject: Subject,
    data: DataSource | Data | Pairs | None,
    place: _Place,
    devices: Devices | None = None,
    engine: Literal["ray"] | None = None,
    bootstrap: int = 0,
    seed: int = 0,
) -> Results:
    """What `run` returns, about a model that is fit to be asked."""
    asked, alone = _asked(questions, subject, bootstrap, seed)
    if asked and data is None:
        raise ValueError(
            f"{', '.join(a.name for a in asked)} must be asked about rows: data is required, got none"
        )
    if not asked and (data is not None or place.folder is not None):
        raise ValueError(
            f"{', '.join(alone)} need no data and leave nothing to resume: call run without data and out"
        )
    given = _by_name(questions)
    if of_weights := [each.name for each in asked if getattr(given[each.name], "of_weights", False)]:
        _check_finite(subject.transformer, ", ".join(of_weights))
    found = (
        Results({}, 0, 0, 0, True, _rejected_table([]))
        if data is None
        else _over_data(asked, subject, data, place, devices, engine)
    )
    answered = {name: _alone(subject, given[name], each) for name, each in alone.items()}
    return replace(found, datasets={**found.datasets, **answered})


def _with_origin(result: xr.Dataset, network: Transformer) -> xr.Dataset:
    """The result with attributes that say in what precision, where and by what it was computed."""
    installed = versions()
    origin = {
        "dtype": str(network.dtype).removeprefix("torch."),
        "device": str(network.device),
        "threads": torch.get_num_threads(),
        "versions": ", ".join(f"{name} {installed[name]}" for name in ("interp", "torch", "transformers")),
    }
    return result.assign_attrs({**origin, **result.attrs})


def _alone(model: Subject, question: Askable, asked: Alone) -> xr.Dataset:
    """The answer of a question without rows; one about weights is made once for the same weights."""
    if not getattr(question, "of_weights", False):
        return _with_origin(asked.answer(), model.transformer)

    def made() -> xr.Dataset:
        _check_finite(model.transformer, asked.name)
        return _with_origin(asked.answer(), model.transformer)

    return once(model, question, made).copy(deep=True)


def _check_finite(network: Transformer, asked: str) -> None:
    """NotFiniteError for weights that are NaN or infinite."""
    weights = {name: value for name, value in network.named_parameters() if value.numel()}

    def finite() -> bool:  # one wait for all of them
        return bool(get_total_norm([x.detach() for x in weights.values()], torch.inf).isfinite())

    if not looked_at(network, "finite", finite):
        name = next(name for name, value in weights.items() if not bool(value.isfinite().all()))
        raise NotFiniteError(f"{asked}: finite weights are required, {name} holds NaN or infinity")


def _subject(questions: Asked, model: Model, edits: Sequence[Edit]) -> Subject:
    """The model under study; for questions about the weights alone, the one without edits of activations.

    Errors: those of `as_model`; for questions about weights, ValueError for edits, which would change nothing.
    """
    asked = _by_name(questions)
    if not all(getattr(each, "of_weights", False) for each in asked.values()):
        return as_model(model, edits)
    if edits:
        raise ValueError(
            f"{', '.join(asked)} ask about the weights, which edits of activations leave as they are"
        )
    network = as_network(model).unedited
    network.check_files()
    return Studied(network, text_of(model))


@dataclass(frozen=True)
class _Place:
    """Where the work is kept, if it is."""

    folder: Path | None
    resume: bool
    shard: str | Shard | None

    def __post_init__(self) -> None:
        if self.folder is None and (self.resume or self.shard is not None):
            raise ValueError("resume and shard require a folder (out=) where the work is kept")


def _over_data(
    asked: Sequence[ByRow],
    subject: Subject,
    data: DataSource | Data | Pairs,
    place: _Place,
    devices: Devices | None,
    engine: Literal["ray"] | None,
) -> Results:
    """The answers to what is asked about rows of data."""
    network, folder = subject.transformer, place.folder
    shared = Questions.of(asked, network.config)
    before = None if folder is None else WORK.begun(folder, resume=place.resume or place.shard is not None)
    least(network, 0)  # before the first of several processes makes the folder that the others look for
    source = _sized(data, shared, subject, before)
    for each in asked:
        if each.prompts is not None and source.rows not in (None, each.prompts):
            raise ValueError(
                f"{each.name} holds {each.held} for {each.prompts} prompts, got {source.rows} rows of data"
            )
    share = None if place.shard is None else Shard.of(place.shard)
    work = _Work(shared, network, source, share, devices, engine)
    if folder is not None:
        return _kept(work, folder, partial(_sized, data, shared, subject), begun=before is not None)
    progress = Progress()
    work.go(progress.due, progress, progress.add)
    return _results(shared, source, progress, network, stopped=work.enough(progress))


@public()
def answered(
    question: Askable,
    model: Model,
    data: DataSource | Data | Pairs | None = None,
    *,
    edits: Sequence[Edit] = (),
    prepend_bos: bool = True,
    batch_size: int = 32,
) -> xr.Dataset:
    """The answer to one question: what the function of the same name returns.

    data: as `run` takes them (None: a question that needs none), with the difference that prompts (texts, ids, a batch)
    must all be usable. Rows of like lengths share a pass of at most `batch_size` of them; results have the order given.
    Errors: those of the question; NotFiniteError (a ValueError) for prompts on which the model gives NaN or infinity.
    """
    subject = _subject([question], model, edits)
    here = _Place(None, resume=False, shard=None)
    if data is None:
        return _found([question], subject, None, here)[question.name]
    source = prompt_source(data, subject.text, prepend_bos=prepend_bos, batch_size=batch_size)
    found = _found([question], subject, source, here)
    if isinstance(source, GivenBatches) and len(found.rejected):
        bad = found.rejected.iloc[0]
        raise NotFiniteError(f"{question.name}: prompt {bad.row}: {bad.reason}")
    return found[question.name]


def reduced_over(question: ByRow, model: Subject, source: DataSource) -> Partial:
    """What a question keeps of all rows, unlabelled: for others that go on computing with it.

    Errors: NotFiniteError (a ValueError) for rows on which the model gives NaN or infinity.
    """
    return all_reduced_over([question], model, source)[question.name]


def all_reduced_over(asked: Sequence[ByRow], model: Subject, source: DataSource) -> Mapping[str, Partial]:
    """What several questions keep of all rows, by their names, from shared passes. Errors: as `reduced_over`."""
    progress = Progress()
    questions = Questions.of(asked, model.transformer.config)
    _Work(questions, model.transformer, source, None, None, None).go(progress.due, progress, progress.add)
    if rejected := progress.finished.rejected:
        first = min(rejected, key=lambda each: each.row)
        raise NotFiniteError(f"{asked[0].name}: row {first.row}: {first.reason}")
    total = progress.total()
    assert total is not None, "prompts in memory are at least one row"
    return _in_order(total, source)


@dataclass(frozen=True, eq=False)
class _Work:
    """What there is to do, and with what."""

    questions: Questions
    model: Transformer
    source: DataSource
    share: Shard | None
    devices: Devices | None
    engine: Literal["ray"] | None

    def __post_init__(self) -> None:
        if isinstance(self.source, PromptBatches):
            object.__setattr__(self, "source", self._cut(self.source))
        if self._several and self.source.windows is None:
            raise ValueError("several processes require data that can be read again, got an iterator")

    def _cut(self, prompts: PromptBatches) -> GivenBatches:
        """Prompts as batches for this work: by length, unless edits or questions know them in the order given."""
        if of_columns(self.model):
            return prompts.as_given()
        return prompts.in_order() if any(each.enough for each in self.questions.asked) else prompts

    @property
    def _several(self) -> bool:
        return self.share is not None or self.devices is not None or self.engine is not None

    def go(self, due: Callable[[int], int | None], progress: Progress, take: Callable[[Done], None]) -> None:
        """Do every window that is due, or as many as are enough, and hand over each batch's part."""
        if self.enough(progress):
            return
        names = [each.name for each in self.questions.asked]
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
        if self._several or not all(each.enough for each in self.questions.asked):
            return False
        return all(w in tree for w in range(len(tree))) and self.questions.enough(progress.total())

    def _done(self, windows: Iterable[int], due: Callable[[int], int | None]) -> Iterator[Done]:
        if self.engine == "ray":
            from interp.runs.ray_engine import done_by_ray

            return done_by_ray(self.questions, self.model, self.source, windows, due)
        if self.devices is None:
            return self._done_here(windows, due)
        devices = all_devices() if self.devices == "all" else [torch.device(d) for d in self.devices]
        return done_by_processes(self.questions, self.model, self.source, windows, due, devices)

    def _done_here(self, windows: Iterable[int], due: Callable[[int], int | None]) -> Iterator[Done]:
        worker, pin = Worker(self.questions, self.model), self.model.device.type == "cuda"
        for number, window in windows_of(self.source, windows, ahead=AHEAD, pin=pin):
            yield from worker.answers(number, window, due(number) or 0)

    def _windows(self, due: Callable[[int], int | None]) -> Iterable[int]:
        count = self.source.windows
        if count is None:
            return itertools.count()
        mine = range(count) if self.share is None else self.share.windows(count)
        return (w for w in mine if due(w) is not None)


def _kept(work: _Work, folder: Path, sized: Callable[[Json], DataSource], *, begun: bool) -> Results:
    """The results of the work, with its progress in a folder; `sized` gives the data as the run there cuts them.

    begun: whether the folder holds progress already.
    """
    questions, model = work.questions, work.model
    asked = work_of(questions, model, about(work.source))
    if begun or work.share is not None:
        check_comparable(asked)
    with one_after_another(model):
        stored = WORK.claim(folder, asked)
    if stored != asked:  # of shards that start together one decides on the batches
        work = replace(work, source=sized(stored))
        asked = {**asked, "data": about(work.source)}
    WORK.agree(folder, stored, asked)
    with opened(folder, questions, model, work.share) as place:
        work.go(place.due, place.journal.progress, place.take)
        together = place.together()
        results = _results(questions, work.source, together, model, stopped=work.enough(together))
        if results.complete and place.writes:
            write_results(folder, results, results.rejected)
    return results


def _asked(
    questions: Asked, model: Subject, bootstrap: int, seed: int
) -> tuple[list[ByRow], dict[str, Alone]]:
    """What to do for each question over data, and for those that need none, by name."""
    given = _by_name(questions)
    for name, question in given.items():
        if not model.transformer.config.n_layers and getattr(question, "of_layers", False):
            raise ValueError(f"{name} requires a model with layers, this one has none")
    made = {name: replace(question.bind(model), name=name) for name, question in given.items()}
    by_row = [each for each in made.values() if isinstance(each, ByRow)]
    if bootstrap:
        by_row = [_resampled(each, bootstrap, seed) for each in by_row]
    return by_row, {name: each for name, each in made.items() if isinstance(each, Alone)}


def _by_name(questions: Asked) -> dict[str, Askable]:
    """The questions with the names of their results. ValueError for none, two of one name, or what is no question."""
    if isinstance(questions, Mapping):
        pairs = list(questions.items())
    else:
        several = isinstance(questions, Iterable) and not isinstance(questions, type | str | bytes | Askable)
        every: list[Askable] = list(questions) if several else [questions]  # type: ignore[arg-type,list-item]
        pairs = [(getattr(each, "name", ""), each) for each in every]
    for _, each in pairs:
        if isinstance(each, type) or not callable(getattr(each, "bind", None)):
            raise ValueError(
                f"questions are records, such as interp.lenses.LogitLens(top=5), got {shown(each)}{_record_of(each)}"
            )
    names = [name for name, _ in pairs]
    if not names or len(set(names)) < len(names):
        raise ValueError(
            f"questions of distinct names are required, got {names}: name them yourself, run({{'mine': ...}}, ...)"
        )
    return dict(pairs)


def _record_of(given: object) -> str:
    """What to write instead of something that is no question: of a function of the package its record."""
    if isinstance(given, type):
        return f": call it, {given.__name__}(...)"
    module, name = sys.modules.get(getattr(given, "__module__", "")), getattr(given, "__name__", None)
    for record in vars(module).values() if module else ():
        known = isinstance(record, type) and issubclass(record, Question) and record is not Question
        if known and function_name(record) == name:
            wing = record.__module__.split(".")[1]
            return f": write interp.{wing}.{record.__name__}(...)"
    return ""


def _resampled(question: ByRow, replicates: int, seed: int) -> ByRow:
    kind = question.keep
    if not (isinstance(kind, type) and issubclass(kind, Means)):
        return question
    return replace(question, keep=Bootstrap(kind, replicates, seed))


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


def _results(
    questions: Questions, source: DataSource, progress: Progress, network: Transformer, *, stopped: bool
) -> Results:
    total, tally = progress.total(), progress.finished
    rejected = sorted(tally.rejected, key=lambda each: each.row)
    complete = stopped or source.windows is None or len(progress.tree) == source.windows
    if (
        total is None and not complete
    ):  # a job of an array whose share has no rows, before the others are done
        return Results({}, 0, tally.tokens, tally.cut, False, _rejected_table(rejected))
    if total is None:
        first = f": row {rejected[0].row}: {rejected[0].reason}" if rejected else ""
        raise ValueError(
            f"some rows that can be used are required, got {len(rejected)} rows, all set aside{first}"
        )
    total = _in_order(total, source)
    finished = questions.finished(total)
    datasets = {
        name: _with_origin(_numbered(value, total[name]), network) for name, value in finished.items()
    }
    if rejected:  # a function gives its result alone, and rows must not get lost unseen
        datasets = {name: each.assign_attrs(rejected=len(rejected)) for name, each in datasets.items()}
    datasets = {name: _noted(each, tally.notes_of(name)) for name, each in datasets.items()}
    return Results(datasets, tally.rows, tally.tokens, tally.cut, complete, _rejected_table(rejected))


def _in_order(total: Mapping[str, Partial], source: DataSource) -> Mapping[str, Partial]:
    """Kept rows in the order of the data, where batches were made of rows of like lengths."""
    if not isinstance(source, Stream | PromptBatches):
        return total
    return {name: part.ordered() if isinstance(part, Rows) else part for name, part in total.items()}


def _noted(result: xr.Dataset, notes: Sequence[str]) -> xr.Dataset:
    """The result with these sentences about its rows, each said once however many results have it."""
    for text in notes:
        note(text)
    return with_notes(result, notes)


def _rejected_table(rejected: Sequence[Rejected]) -> pd.DataFrame:
    """The rows set aside."""
    import pandas as pd

    return pd.DataFrame([vars(each) for each in rejected], columns=["row", "reason", "excerpt"])


def _numbered(found: xr.Dataset, partial: object) -> xr.Dataset:
    """The result with the identity of every row as coordinate `prompt` (`row` of examples), where it keeps rows."""
    if isinstance(partial, Rows) and partial.ids is not None:
        ids = partial.ids.cpu().numpy()
        if found.sizes.get("prompt") == len(ids) and "prompt" not in found.coords:
            return found.assign_coords(prompt=ids)
        if found.sizes.get("example") == len(ids) and "row" not in found.coords:
            return found.assign_coords(row=("example", ids))
    return found
