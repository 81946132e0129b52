"""Many analyses over data of any size in shared passes: resumable, on one device or several, with the same numbers.

Each question is bound to the model, and is then a generator of stages: what it asks of whole data sets. Stage by stage
the questions that ask about the same rows are answered together (`over_data`), and what is about the weights alone is
answered at once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch.nn.utils import get_total_norm

from interp.core.boundary import place_of, public
from interp.core.kinds import Count
from interp.core.notes import note
from interp.core.results import with_notes
from interp.core.stats import Bootstrap, Means
from interp.core.viewer import Shown, notes_of
from interp.core.wording import value_text
from interp.data.pairs import Pairs
from interp.data.sources import Data, Rejected
from interp.data.stream import ROWS, DataSource, GivenBatches, prompt_source
from interp.model.edits import Edit
from interp.model.transformer import Transformer
from interp.passes.observe import Model, Studied, Subject, as_model, as_network, text_of
from interp.passes.question import (
    Askable,
    ByRow,
    NotFiniteError,
    Question,
    Staged,
    WithoutData,
    function_name,
)
from interp.passes.together import writes
from interp.runs.chat_roles import chat_rows, with_roles
from interp.runs.fact_rows import about_facts
from interp.runs.kept import cached_for_model, looked_at
from interp.runs.over_data import WorkDevices, WorkPlace
from interp.runs.provenance import with_origin
from interp.runs.rounds import Rounds
from interp.runs.work_folder import Shard, write_results
from interp.tasks.fact_files import GivenFacts

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

    Named = Mapping[str, xr.Dataset]
else:
    Named = Mapping  # xarray is imported where the first result is made

SomeQuestions = Askable | Sequence[Askable] | Mapping[str, Askable]
"""One question, several of different names, or several by names of one's own."""


@dataclass(frozen=True, eq=False)
class Results(Shown, Named):
    """The results of a run: the data set of each question by name, and counts of the rows they were made from."""

    datasets: Named
    rows: int
    """Number of rows that count, without those set aside."""
    tokens: int
    cut: int
    """Number of rows that were truncated or split."""
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
    questions: SomeQuestions,
    model: Model,
    data: DataSource | Data | Pairs | None = None,
    *,
    edits: Sequence[Edit] = (),
    out: Path | str | None = None,
    resume: bool = False,
    bootstrap: Count = 0,
    seed: int = 0,
    devices: WorkDevices | None = None,
    engine: Literal["ray"] | None = None,
    shard: str | Shard | None = None,
) -> Results:
    """The answers to any number of questions over all of the data, from shared passes of one model.

    For corpora: data of any size, many questions at once, several devices, and on again after an interruption.

    What all questions read of the model comes from one pass per batch.

    Args:
        questions: records such as `interp.lenses.LogitLens(top=5)` or `interp.causal.Patch(...)`, one or several in a
            list, or a mapping that names them. The shared pass stops at the deepest block that any of them reads;
            questions that intervene share their sweeps where they change the same run and watch the same metric;
            those about weights need no data.
        model: the model.
        data: texts, token ids, files, a folder, a data set, an iterator; `Pairs` of them for questions that compare
            two runs; a `Stream`; or batches, which stay as they are; None: for questions that need none. There are as
            many tokens per batch as fit (predicted from the reads, measured on some rows, halved if memory runs out
            all the same). Unusable rows are set aside, in `rejected`.
        edits: interventions that every pass runs under: the model under study is the edited one.
        out: a folder for progress and results; None: nothing is written.
        resume: go on with the run in `out`, if nothing has changed that decides a number, the code of your functions
            and all that they hold among it; else the run is refused, and the message says why. A function that holds
            what cannot be compared, such as an open file, cannot go on.
        bootstrap: number of bootstrap replicates, in which rows of one identity, such as pieces of a text, count as
            one (`stats.Bootstrap`); 0: means over rows carry 95 % intervals by Student's t (none below 3 rows).
        seed: seed of the bootstrap.
        devices: one worker process per device ("all": every GPU, or every core), each on windows of its own; None:
            this process. However many processes a host has, it has the weights once; those of a file are sent as its
            path. An iterator's rows are for one process. One process ends at the window after which all questions
            know enough (`ByRow.enough`); several do all.
        engine: "ray": one actor per device of a Ray cluster; None: processes of this machine.
        shard: share of the windows, "2/8" for the third eighth, for job arrays that share `out`; the call without
            `shard` takes in what they did, and does the rest. A share may be empty: where no job has done a row yet,
            there are no data sets in what is returned.

    Returns:
        `Results`: the data set of each question by its name, and what was run: `rows`, `rejected` and the provenance.
        No number depends on batch size beyond rounding, and no bit on restarts, engine, shards or the number of
        devices, at as many threads and on the same kind of hardware.

    Raises:
        ValueError: no questions, two of one name, no rows, no usable row, or a folder of another run.
        MemoryError: a single row that does not fit.
        OSError: `out` cannot be written (nothing is lost: resume).

    See Also:
        `answered`: one question over prompts at hand, of which none may be set aside.

    Example:
        >>> from interp.lenses import LogitLens
        >>> texts = [prompt, "The cat sat on the mat"]
        >>> found = interp.run([LogitLens(top=5)], model, texts)
        >>> found.rows, found["logit_lens"].sizes["prompt"]
        (2, 2)
    """
    subject = _subject(questions, model, edits)
    if isinstance(data, GivenFacts):
        asked = data.asked(subject.text)
        data = asked.batch
        questions = {name: about_facts(each, asked, subject) for name, each in _by_name(questions).items()}
    place = WorkPlace(None if out is None else Path(out), resume, shard, devices, engine)
    return _results(questions, subject, data, place, bootstrap, seed)


def _results(
    questions: SomeQuestions,
    subject: Subject,
    data: DataSource | Data | Pairs | None,
    place: WorkPlace,
    bootstrap: int = 0,
    seed: int = 0,
) -> Results:
    """The results of `run`, for a checked model."""
    network, named = subject.transformer, _by_name(questions)
    bound = _bound_questions(named, subject, bootstrap, seed)
    _check_data(bound, data, place)
    for name, question in named.items():
        if getattr(question, "of_weights", False):
            _check_finite(network, name)
    rounds = Rounds(subject, data, place)
    cache_keys = {name: _cache_key(each, named[name], data) for name, each in bound.items()}
    over_rows = {
        name: each
        for name, each in bound.items()
        if cache_keys[name] is None and not isinstance(each, WithoutData)
    }
    of_rows = rounds.answered(over_rows.values())
    tally, rejected = rounds.tally, _rejected_table(rounds.tally.rejected)
    for name in rounds.askers & of_rows.keys():
        if tally.rejected:  # a function gives its result alone, and rows must not get lost unseen
            of_rows[name] = of_rows[name].assign_attrs(rejected=len(rejected))
        of_rows[name] = _with_row_notes(of_rows[name], tally.notes_of(name))
    of_model = {
        name: cached_for_model(subject, cache_keys[name], partial(_answer_without_data, each, subject)).copy(
            deep=True
        )
        for name, each in bound.items()
        if name not in over_rows
    }
    chats = chat_rows(data, subject.text)
    results = {**{name: with_roles(result, chats) for name, result in of_rows.items()}, **of_model}
    datasets = {name: with_origin(results[name], network) for name in bound if name in results}
    if place.folder is not None and rounds.complete and writes(network):
        write_results(place.folder, datasets, rejected)
    return Results(datasets, tally.rows, tally.tokens, tally.cut, rounds.complete, rejected)


def _cache_key(bound: ByRow | Staged | WithoutData, question: Askable, data: object) -> object:
    """All that decides the answer besides weights and tokenizer, as the cache's key; None if the data decide it too."""
    if isinstance(bound, Staged):
        return bound.of_model if data is None or bound.data == "none" else None
    return question if isinstance(bound, WithoutData) else None


def _answer_without_data(question: ByRow | Staged | WithoutData, subject: Subject) -> xr.Dataset:
    """The answer of a question that needs no data."""
    if isinstance(question, WithoutData):
        return question.answer()
    return Rounds(subject, None, WorkPlace()).answered([question])[question.name]


def _check_finite(network: Transformer, names: str) -> None:
    """NotFiniteError for weights that are NaN or infinite."""
    weights = {name: value for name, value in network.named_parameters() if value.numel()}

    def finite() -> bool:  # one synchronisation for all weights
        return bool(get_total_norm([x.detach() for x in weights.values()], torch.inf).isfinite())

    if not looked_at(network, "finite", finite):
        name = next(name for name, value in weights.items() if not bool(value.isfinite().all()))
        raise NotFiniteError(f"{names}: finite weights are required, {name} holds NaN or infinity")


def _subject(questions: SomeQuestions, model: Model, edits: Sequence[Edit]) -> Subject:
    """The model under study; for questions about the weights alone, the one without edits of activations.

    Raises:
        ValueError: as `as_model`; for questions about weights; edits, which would change nothing.
    """
    by_name = _by_name(questions)
    if not all(getattr(question, "of_weights", False) for question in by_name.values()):
        return as_model(model, edits)
    if edits:
        raise ValueError(
            f"{', '.join(by_name)} ask about the weights, which edits of activations leave as they are"
        )
    network = as_network(model).unedited
    network.check_files()
    return Studied(network, text_of(model))


@public()
def answered(
    question: Askable,
    model: Model,
    data: DataSource | Data | Pairs | None = None,
) -> xr.Dataset:
    """The answer to one question, as the function of the same name returns it.

    Args:
        question: a record such as `interp.lenses.LogitLens(top=5)`.
        model: the model.
        data: as `run` takes them (None: a question that needs none), except that prompts (texts, ids, a batch) must
            all be usable. Rows of like lengths share a pass of at most `Question.rows_together` of them (32 for most)
            and 4 096 tokens; results have the order given. Batches (`model.to_batch(texts).split(8)`) stay as they
            are.

    Returns:
        Dataset that the question describes.

    Raises:
        ValueError: everything that the question refuses.
        NotFiniteError: (a ValueError) prompts on which the model gives NaN or infinity.
    """
    return answer_of(question, model, data)


def answer_of(question: Askable, model: Model, data: DataSource | Data | Pairs | None = None) -> xr.Dataset:
    """The answer as `answered` gives it, without checking the kinds of the arguments again."""
    subject = _subject([question], model, ())
    work_place = WorkPlace()
    if data is None:
        return _results([question], subject, None, work_place)[question.name]
    rows = getattr(question, "rows_together", ROWS)
    source = prompt_source(data, subject.text, batch_size=rows)
    results = _results([question], subject, source, work_place)
    if isinstance(source, GivenBatches) and len(results.rejected):
        bad = results.rejected.iloc[0]
        raise NotFiniteError(f"{question.name}: prompt {bad.row}: {bad.reason}")
    return results[question.name]


def _bound_questions(
    questions: Mapping[str, Askable], model: Subject, bootstrap: int, seed: int
) -> dict[str, ByRow | Staged | WithoutData]:
    """Every question bound to the model, by name; raises the errors about a question's fields."""
    by_name: dict[str, ByRow | Staged | WithoutData] = {}
    for name, question in questions.items():
        if not model.transformer.config.n_layers and getattr(question, "of_layers", False):
            raise ValueError(f"{name} requires a model with layers, this one has none")
        bound = replace(question.bind(model), name=name)
        by_name[name] = (
            _with_bootstrap(bound, bootstrap, seed) if bootstrap and isinstance(bound, ByRow) else bound
        )
    return by_name


def _check_data(
    bound: Mapping[str, ByRow | Staged | WithoutData],
    data: DataSource | Data | Pairs | None,
    place: WorkPlace,
) -> None:
    """Raise ValueError for data or a folder that no question uses, and for missing data that a question requires."""
    staged = [question for question in bound.values() if isinstance(question, Staged)]
    required = [question.name for question in bound.values() if isinstance(question, ByRow)]
    required += [question.name for question in staged if question.data == "required"]
    if required and data is None:
        raise ValueError(f"{', '.join(required)} must be asked about rows: data is required, got none")
    optional = any(question.data == "optional" for question in staged)
    if (
        not required
        and not (optional and data is not None)
        and (data is not None or place.folder is not None)
    ):
        raise ValueError(
            f"{', '.join(bound)} need no data and leave nothing to resume: call run without data and out"
        )
    again = [question for question in staged if question.again]
    if again and (isinstance(data, Iterator) or getattr(data, "windows", 0) is None):
        raise ValueError(
            f"{again[0].name} goes through the data twice: data that can be read again are required, got an iterator; "
            f"or say {again[0].again}"
        )


def _by_name(questions: SomeQuestions) -> dict[str, Askable]:
    """The questions by the names of their results; raises ValueError for none, equal names, or other values."""
    if isinstance(questions, Mapping):
        pairs = list(questions.items())
    else:
        single = isinstance(questions, type | str | bytes | Askable) or getattr(questions, "ndim", 1) == 0
        several = isinstance(questions, Iterable) and not single
        listed: list[Askable] = list(questions) if several else [questions]  # type: ignore[arg-type,list-item]
        pairs = [(getattr(question, "name", ""), question) for question in listed]
    for _, question in pairs:
        if isinstance(question, type) or not callable(getattr(question, "bind", None)):
            raise ValueError(
                f"questions are records, such as interp.lenses.LogitLens(top=5), "
                f"got {value_text(question)}{_record_hint(question)}"
            )
    names = [name for name, _ in pairs]
    if not names or len(set(names)) < len(names):
        raise ValueError(
            f"questions of distinct names are required, got {names}: name them yourself, run({{'mine': ...}}, ...)"
        )
    return dict(pairs)


def _record_hint(value: object) -> str:
    """A hint for a value that is no question: how to write the record of a class or of a function of the package."""
    if isinstance(value, type):
        return f": call it, {value.__name__}(...)"
    module, name = sys.modules.get(getattr(value, "__module__", "")), getattr(value, "__name__", None)
    for record in vars(module).values() if module else ():
        known = isinstance(record, type) and issubclass(record, Question) and record is not Question
        if known and function_name(record) == name:
            return f": write {place_of(record)}(...)"
    return ""


def _with_bootstrap(question: ByRow, replicates: int, seed: int) -> ByRow:
    """The question with bootstrap replicates of its means; the question itself if it reduces to no means."""
    kind = question.keep
    if not (isinstance(kind, type) and issubclass(kind, Means)):
        return question
    return replace(question, keep=Bootstrap(kind, replicates, seed))


def _with_row_notes(result: xr.Dataset, notes: Sequence[str]) -> xr.Dataset:
    """The result with sentences about its rows; a sentence that several results have is printed once."""
    for text in notes:
        note(text)
    return with_notes(result, notes)


def _rejected_table(rejected: Sequence[Rejected]) -> pd.DataFrame:
    """A table of the rows that were set aside, with the reason and an excerpt."""
    import pandas as pd

    return pd.DataFrame([vars(row) for row in rejected], columns=["row", "reason", "excerpt"])
