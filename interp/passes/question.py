"""Questions about a model as records, and their form once bound to a model: values of each row, and how rows combine.

`Question.bind` turns the record into a `ByRow` (asked of rows of data), a `Staged` (asked of several data sets, one
stage after the other) or `WithoutData` (asked of the weights). `Questions` answers several of them for one batch;
`runs` drives that over all data.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from interp.core.boundary import check_fields
from interp.core.stats import Partial, Reduction, Rows
from interp.core.transfers import Checks, to_host
from interp.data.answers import AnswerTokens
from interp.data.batch import Batch
from interp.data.pairs import Pairs
from interp.data.sources import Data
from interp.data.stream import ROWS, DataSource
from interp.model import sites
from interp.model.config import ModelConfig
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer
from interp.passes.edited import check_tokens, of_columns
from interp.passes.needs import Steps, recorded
from interp.passes.observe import Model, Subject
from interp.passes.schedule import answer_together

if TYPE_CHECKING:
    import xarray as xr

T = TypeVar("T")

Values = Mapping[str, Tensor]
"""Results of a question for a batch: tensors whose first axis is the row (in packed rows: the text, in the order of
`Batch.identities`).
"""
Compute = Callable[[Trace, Batch, Transformer], Values]
"""A function from the records of a batch to the values of its rows."""


class NotFiniteError(ValueError):
    """A model's numbers are NaN or infinite on some row; a stream sets that row aside."""


@runtime_checkable
class Askable(Protocol):
    """Protocol of what `run` can answer: a `Question`, or a `ByRow` (a question bound to a model)."""

    @property
    def name(self) -> str:
        """The name of its result."""
        ...

    def bind(self, model: Subject) -> ByRow | Staged | WithoutData:
        """The computation that answers it for this model."""
        ...


@dataclass(frozen=True)
class Question:
    """A question about a model as data: a frozen record with its parameters as fields.

    `bind` checks the fields against one model and says how it is answered: by a `ByRow` of rows of data, in stages
    (`Staged`), or `WithoutData`, of weights. `interp.run` asks any number of questions in shared passes, over data of
    any size; the function of the same name asks one.

    Example:
        >>> @dataclass(frozen=True)
        ... class StreamNorm(Question):
        ...     site: str = "blocks.0.hook_resid_post"
        ...
        ...     def bind(self, model):
        ...         from interp.core.stats import Rows
        ...         read = Read(self.site, via=lambda stream: stream.norm(dim=-1))
        ...         rows = Reading([read], lambda trace, batch, network: {"norm": trace[read]})
        ...         label = lambda kept: labelled(self.name, {"norm": (("prompt", "pos"), kept.rows["norm"])})
        ...         return ByRow(self.name, rows, Rows, label)
        >>> from interp.core.results import labelled
        >>> interp.run([StreamNorm()], model, ["The cat sat"])["stream_norm"].norm.dims
        ('prompt', 'pos')
    """

    of_weights: ClassVar[bool] = False
    """Whether the question is about weights only, so that edits of activations do not concern it."""
    of_layers: ClassVar[bool] = True
    """Whether the question is about layers, so that a model without any is refused."""
    rows_together: ClassVar[int] = ROWS
    """The most prompts of a pass, where its function is given prompts in memory."""

    def __post_init__(self) -> None:
        """ValueError, by its name, for a field of the wrong kind."""
        check_fields(self)

    @property
    def name(self) -> str:
        """The name of its result: the record's name in the spelling of functions."""
        return function_name(type(self))

    def with_data(
        self, model: Model, data: DataSource | Data | Pairs
    ) -> tuple[Question, DataSource | Data | Pairs]:
        """The question and the data as the function of its name runs them.

        Themselves, unless prompts in memory say more than a stream could, such as what means are taken over.
        """
        return self, data

    def bind(self, model: Subject) -> ByRow | Staged | WithoutData:
        """The computation that answers the question for this model.

        Raises:
            ValueError, KeyError, IndexError: fields that do not fit the model.
        """
        raise NotImplementedError(f"{type(self).__name__} must say how it is answered: define bind(model)")


def function_name(kind: type[Question]) -> str:
    """The name of the function of a question, and of its result."""
    return re.sub(r"(?<!^)(?=[A-Z][a-z])", "_", kind.__name__).lower()


@dataclass(frozen=True, eq=False)
class Reading:
    """Rows of a question that needs one pass: what is read in it, and what is computed from that.

    All questions of a run get what they read from one pass over each batch.
    """

    reads: Sequence[Read]
    compute: Compute
    last_only: bool = False
    """Whether sites after the blocks (final norm, logits) are needed at the last real token only."""
    ends_aligned: bool = False
    """Whether `compute` wants every row to end in the last column, padding on the left."""

    def __call__(self, model: Transformer, batch: Batch) -> Steps[Values]:
        """The pass, and the values of the batch's rows."""
        batch = batch.left_aligned() if self.ends_aligned else batch
        seen = yield from recorded(batch, self.reads, last_only=self.last_only)
        return self.compute(seen.trace, batch, model)


@dataclass(frozen=True, eq=False)
class ReadingThen:
    """Rows of a question that reads one pass and then needs others, which depend on what it read."""

    reads: Sequence[Read]
    steps: Callable[[Trace, Batch, Transformer], Steps[Values]]
    """Generator of the further passes, made from the recorded values; it returns the values of the rows."""
    ends_aligned: bool = False
    """Whether `steps` wants every row to end in the last column, padding on the left."""
    last_only: ClassVar[bool] = False

    def __call__(self, model: Transformer, batch: Batch) -> Steps[Values]:
        """The pass, then the others, and the values of the batch's rows."""
        batch = batch.left_aligned() if self.ends_aligned else batch
        seen = yield from recorded(batch, self.reads)
        return (yield from self.steps(seen.trace, batch, model))


@dataclass(frozen=True, eq=False)
class Unshared:
    """Rows of a question that runs its passes itself, so that no other question shares them."""

    compute: Callable[[Transformer, Batch], Values]

    def __call__(self, model: Transformer, batch: Batch) -> Steps[Values]:
        """The values of the batch's rows."""
        yield from ()
        return self.compute(model, batch)


def _unlabelled(kept: Partial) -> xr.Dataset:
    raise AssertionError(
        "this question has no result of its own: somebody goes on computing with what it keeps"
    )


@dataclass(frozen=True)
class ByRow:
    """A question bound to a model: what is computed of every row, how rows combine, how the result is labelled.

    `rows` knows neither device nor batch size, so that splitting the data changes no number.
    """

    name: str
    rows: Callable[[Transformer, Batch], Steps[Values]]
    """The values of a batch's rows, step by step: what the model is needed for is yielded, and shared (`schedule`)."""
    keep: Reduction
    """The reduction over rows: every one (`Rows`), their moments (`Means`), or another one of `core`."""
    result: Callable[[Partial], xr.Dataset] = _unlabelled
    """Labels the reduced values of all rows; without it the question is for `reduced_over` alone."""
    answers: AnswerTokens | None = None
    """The answers that the question brings; None where it takes those of the data, or needs none."""
    pairs: bool = False
    """Whether every row must come with a corrupted prompt."""
    prompts: int | None = None
    """Number of rows that the data must have, where the question brings something for each, such as its answers."""
    held: str = "answers or labels"
    """Name of what the question brings for each row."""
    enough: Callable[[Partial], bool] | None = None
    """Whether the reduced values of the first windows answer the question already; None: all rows are needed."""

    def __post_init__(self) -> None:
        answers = None if self.answers is None else self.answers.prompts
        if None not in (self.prompts, answers) and self.prompts != answers:
            raise ValueError(
                f"one of each is required for every prompt, or one for all, got {answers} answers and {self.prompts} "
                "positions"
            )
        object.__setattr__(self, "prompts", answers if self.prompts is None else self.prompts)

    def bind(self, model: Subject) -> ByRow:
        """The question itself, which is bound already."""
        return self

    def stages(self, has_data: bool) -> Stages[xr.Dataset]:
        """The only stage of the question: itself, over the data of the run."""
        (reduction,) = yield [Ask(self, whole=False)]
        return self.finished(reduction)

    def finished(self, kept: Partial) -> xr.Dataset:
        """The result, with the number of every row as coordinate `prompt` (`row` of examples) where rows are kept."""
        result = self.result(kept)
        if isinstance(kept, Rows) and kept.ids is not None:
            ids = kept.ids.cpu().numpy()
            if result.sizes.get("prompt") == len(ids) and "prompt" not in result.coords:
                return result.assign_coords(prompt=ids)
            if result.sizes.get("example") == len(ids) and "row" not in result.coords:
                return result.assign_coords(row=("example", ids))
        return result


@dataclass(frozen=True)
class WithoutData:
    """A question about the weights alone, bound to a model: no rows are needed to answer it."""

    name: str
    answer: Callable[[], xr.Dataset]


@dataclass(frozen=True, eq=False)
class Ask:
    """One need of a stage of a question: the reduction of a question of rows, over which data and for which model."""

    question: ByRow
    data: DataSource | None = None
    """Data of the question; None: the data of the run."""
    model: Subject | None = None
    """Model of the question; None: the model of the run."""
    whole: bool = True
    """Whether the reduction is of use only over all rows, so that jobs that share the rows must be merged first."""


Stages = Generator[Sequence[Ask], Sequence[Partial], T]
"""A generator over whole data sets: it yields the `Ask`s of a stage, is sent their reductions, and returns its result.

The `Ask`s of one stage about the same rows share passes. An error of rows that the generator made itself is raised at
its `yield`.
"""


@dataclass(frozen=True)
class Staged:
    """A question bound to a model that needs several data sets, or the same one several times.

    What it needs beside the data of the run (means of a reference, sentences, random heads) is asked once a run, and
    what is asked of the data of the run streams, is journalled and resumed like any question of rows.
    """

    name: str
    stages: Callable[[bool], Stages[xr.Dataset]]
    """The stages, of a run that has data or not."""
    data: Literal["none", "optional", "required"] = "required"
    """Whether the question is about the data of the run."""
    of_model: object = None
    """All that decides the answer apart from weights and tokenizer, where there is no data: the key under which it is
    cached. None: other things decide too.
    """
    again: str = ""
    """How to avoid going through the data several times, in words, for a question that does."""

    @classmethod
    def after(cls, name: str, first: Ask, then: Callable[[Partial], ByRow], again: str = "") -> Staged:
        """A question in two stages: `then` makes the `ByRow` about the run's data from the reduction of `first`."""

        def stages(has_data: bool) -> Stages[xr.Dataset]:
            (reduction,) = yield [first]
            return (yield from then(reduction).stages(has_data))

        return cls(name, stages, again=again)


BatchValues = Mapping[str, Values]
"""Results of every question for a batch, by its name."""


@dataclass(frozen=True, eq=False)
class Questions:
    """Several questions that are answered batch by batch, from shared passes."""

    every: tuple[ByRow, ...]

    @classmethod
    def of(cls, questions: Sequence[ByRow], config: ModelConfig) -> Questions:
        """Questions of distinct names about a model of this configuration.

        Raises:
            ValueError: none, or two of one name.
            KeyError: a site that the model does not have.
        """
        names = [question.name for question in questions]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"questions of distinct names are required, got {names}")
        result = cls(tuple(questions))
        for site in dict.fromkeys(read.site for question in result.readings for read in question.reads):
            sites.find(site, config)
        return result

    @property
    def readings(self) -> list[Reading | ReadingThen]:
        """The questions that begin with one pass; its memory can be predicted."""
        return [question.rows for question in self.every if isinstance(question.rows, Reading | ReadingThen)]

    def values(self, model: Transformer, batch: Batch) -> BatchValues:
        """The values of every question for a batch.

        Padding is moved to the right, so that every token stands in the column of its position, whatever the batch.
        Hooks that tell columns apart keep those given.
        """
        home = batch.host()
        if not of_columns(model):
            home = home.right_aligned()
        check_tokens(model, home)
        batch = home.to(model.device)
        if lonely := [question.name for question in self.every if question.pairs and batch.corrupt is None]:
            raise ValueError(
                f"{lonely[0]} compares two runs: clean and corrupted prompts are required, Pairs(clean, corrupt), "
                "got prompts alone"
            )
        answered = zip(self.every, self._with_answers(model, home, batch), strict=True)
        return answer_together(
            model, {question.name: question.rows(model, rows) for question, rows in answered}
        )

    def _with_answers(self, model: Transformer, home: Batch, batch: Batch) -> Iterator[Batch]:
        """The batch of each question; questions with equal answers get one batch.

        Args:
            home: the batch on the host, where answers are looked up.
        """
        known: list[tuple[Batch, Batch]] = [(home, batch)]
        for question in self.every:
            on_host = home if question.answers is None else question.answers.on(home)
            if on_host.forced is not None:
                check_followed(model.config, on_host)
            on_device = next(
                (moved for known_batch, moved in known if _same_answers(known_batch, on_host)), None
            )
            if on_device is None:
                on_device = on_host.to(batch.tokens.device)
                known.append((on_host, on_device))
            yield on_device

    def notes(self, batch: Batch) -> tuple[tuple[str, str], ...]:
        """(question name, note) for every note on the answers of a batch that belongs into a result."""
        answered = (
            (question.name, question.answers) for question in self.every if question.answers is not None
        )
        return tuple((name, text) for name, answers in answered for text in answers.notes(batch))

    def reduced(self, values: BatchValues, rows: Int[Tensor, "n"] | None) -> dict[str, Partial]:
        """The reductions of every question over these rows: on the host, fetched in one copy."""
        reductions = self.reduced_if(torch.tensor(True), values, rows)
        assert reductions is not None
        return reductions

    def reduced_if(
        self,
        fine: Bool[Tensor, ""],
        values: BatchValues,
        rows: Int[Tensor, "n"] | None,
        checks: Checks | None = None,
    ) -> dict[str, Partial] | None:
        """The reductions of every question over these rows, or None if `fine` is False.

        The flag and the reductions are fetched from a device together.

        Args:
            checks: checks made on the way to the values, which are settled now and raise their errors.
        """
        checks = Checks() if checks is None else checks
        if fine.is_cpu and not bool(fine):
            checks.settle(to_host(checks.flags))
            return None
        reductions = {question.name: question.keep.of(values[question.name], rows) for question in self.every}
        flat = {
            (name, key): x for name, reduction in reductions.items() for key, x in reduction.tensors().items()
        }
        flags = {("", str(i)): flag for i, flag in checks.flags.items()}
        on_host = to_host({**flat, ("", "fine"): fine, **flags})
        checks.settle({i: on_host.pop(("", str(i))) for i in checks.flags})
        if not bool(on_host.pop(("", "fine"))):
            return None
        if all(x.is_cpu for x in flat.values()):
            return reductions
        by_question = {
            name: {key: x for (whose, key), x in on_host.items() if whose == name} for name in reductions
        }
        return {question.name: question.keep.load(by_question[question.name]) for question in self.every}

    def enough(self, partial: Mapping[str, Partial] | None) -> bool:
        """Whether no question needs more rows than these."""
        if partial is None:
            return False
        return all(
            question.enough is not None and question.enough(partial[question.name]) for question in self.every
        )


def check_followed(config: ModelConfig, batch: Batch) -> None:
    """ValueError where a model cannot predict answers of several tokens after these prompts."""
    config.require_next_token("an answer of several tokens")
    if not config.causal:
        raise ValueError(
            "an answer of several tokens requires a causal model: in this one every token sees those that follow it"
        )
    if batch.branches is not None and not config.branching:
        raise ValueError(
            "several answers of several tokens after one prompt require causal softmax attention in every layer, whose "
            "mask keeps them apart: this model has other layers, or is wrapped, so ask for answer_log_probability of "
            "each answer in a call of its own"
        )
    if batch.tokens.shape[1] > config.n_ctx:
        raise ValueError(
            f"prompts and the first tokens of their answers must fit into the context of {config.n_ctx} tokens, got "
            f"{batch.tokens.shape[1]}"
        )


def _same_answers(first: Batch, second: Batch) -> bool:
    """Whether two batches of the same rows on the host have the same answers."""
    if first.choices is not second.choices:  # made by each question for itself
        return False
    pairs = ((first.answer, second.answer), (first.wrong, second.wrong), (first.forced, second.forced))
    return all(x is y or (x is not None and y is not None and torch.equal(x, y)) for x, y in pairs)


def merged(one: Mapping[str, Partial] | None, other: Mapping[str, Partial]) -> Mapping[str, Partial]:
    """The reduction of each question over two parts of the data together."""
    if one is None:
        return other
    return {name: partial.merge(other[name]) for name, partial in one.items()}
