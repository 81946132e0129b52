"""A question as data: what it reads or runs, how rows combine, how the result is labelled; many share one pass.

The answers that it asks for are tokens, handed to every batch by the number of its rows (`Posed`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from interp.core.boundary import check_fields
from interp.core.stats import Partial, Reduction
from interp.core.transfers import Checks, fetched
from interp.data.batch import Answers, Batch, Text
from interp.data.spellings import Spellings
from interp.model.config import ModelConfig
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer
from interp.passes.edited import check_tokens, of_columns
from interp.passes.observe import Subject, deepest, observe
from interp.passes.steps import Steps, done_together

if TYPE_CHECKING:
    import xarray as xr


@dataclass(frozen=True, eq=False)
class Posed:
    """The right next token of each prompt, and the one it is contrasted with: one for all, or one per prompt."""

    answer: Int[Tensor, "n"]
    wrong: Int[Tensor, "n"] | None = None
    spellings: Spellings | None = field(default=None, compare=False, repr=False)
    """Of answers given as texts, the single tokens that they are with or without their leading space."""

    @classmethod
    def of(cls, text: Text, answer: Answers | None, wrong: Answers | None = None) -> "Posed | None":
        """The answers as ids; None where a question brings none, so that the data must.

        Errors: ValueError for texts of several tokens, ids outside the vocabulary, or answers and wrong ones of
        different numbers.
        """
        if answer is None:
            if wrong is not None:
                raise ValueError(
                    "a wrong answer is contrasted with a right one: `answer` is required, got none"
                )
            return None
        first = text.outputs(answer)
        second = None if wrong is None else text.outputs(wrong)
        if second is not None and len(first) != len(second) and 1 not in (len(first), len(second)):
            raise ValueError(
                f"as many wrong answers as answers are required, got {len(second)} for {len(first)}"
            )
        return cls(first, second, Spellings.of(text, answer, wrong))

    @property
    def rows(self) -> int | None:
        """How many prompts the answers are for; None for any number."""
        count = max(len(self.answer), 1 if self.wrong is None else len(self.wrong))
        return None if count == 1 else count

    def __call__(self, batch: Batch) -> Batch:
        """The batch with the answers of its rows. ValueError for a row that has none."""
        answer, wrong = (None if x is None else _of_rows(x, batch) for x in (self.answer, self.wrong))
        assert answer is not None
        if self.spellings is not None:
            self.spellings.check(batch)
        return batch.with_answers(answer, wrong)


def _of_rows(tokens: Int[Tensor, "n"], batch: Batch) -> Int[Tensor, "b"]:
    """The token of each row of a batch."""
    device = batch.tokens.device
    if len(tokens) == 1:
        return tokens.to(device).expand(len(batch))
    rows = torch.arange(len(batch)) if batch.row is None else batch.row.cpu()
    if int(rows.max()) >= len(tokens):
        raise ValueError(f"one answer per prompt is required, got {len(tokens)} for prompt {int(rows.max())}")
    return tokens[rows].to(device)


Values = Mapping[str, Mapping[str, Tensor]]
"""What every analysis computed, by its name: one entry per row in the first axis of each tensor."""


class NotFiniteError(ValueError):
    """A model's numbers are NaN or infinite on some row; a stream sets that row aside."""


@runtime_checkable
class Askable(Protocol):
    """What can be asked of a model: a `Question`, or the `Analysis` that one was turned into."""

    @property
    def name(self) -> str:
        """The name of its result."""
        ...

    def asked(self, model: Subject) -> Analysis | Alone:
        """What to do to answer it for this model."""
        ...


@dataclass(frozen=True)
class Question:
    """A question about a model as data: a frozen record whose fields are its parameters.

    It is asked of one model with `asked`, which checks the fields against that model and says what to do: an `Analysis`
    of rows of data, or `Alone`, what needs none. `interp.run` asks any number of questions in shared passes, over data
    of any size; the function of the same name asks one.

    Example:
        >>> @dataclass(frozen=True)
        ... class StreamNorm(Question):
        ...     site: str = "blocks.0.hook_resid_post"
        ...
        ...     def asked(self, model):
        ...         from interp.core.stats import Rows
        ...         read = Read(self.site, via=lambda stream: stream.norm(dim=-1))
        ...         label = lambda part: labelled(self.name, {"norm": (("prompt", "pos"), part.rows["norm"])})
        ...         return Analysis(self.name, lambda trace, batch, net: {"norm": trace[read]}, Rows, label, [read])
        >>> from interp.core.results import labelled
        >>> interp.run([StreamNorm()], model, ["The cat sat"])["stream_norm"].norm.dims
        ('prompt', 'pos')
    """

    of_weights: ClassVar[bool] = False
    """Whether it asks about the weights alone, which edits of activations do not concern."""
    of_layers: ClassVar[bool] = True
    """Whether it asks about layers, so that a model without any is refused."""

    def __post_init__(self) -> None:
        """ValueError, by its name, for a field of the wrong kind."""
        check_fields(self)

    @property
    def name(self) -> str:
        """The name of its result: that of the record, in the spelling of functions."""
        return function_name(type(self))

    def asked(self, model: Subject) -> Analysis | Alone:
        """What to do to answer it for this model. Errors: everything the fields may have wrong for this model."""
        raise NotImplementedError(f"{type(self).__name__} must say how it is answered: define asked(model)")


def function_name(kind: type[Question]) -> str:
    """The name of the function that asks a question, and of its result."""
    return re.sub(r"(?<!^)(?=[A-Z][a-z])", "_", kind.__name__).lower()


def _unlabelled(merged: Partial) -> xr.Dataset:
    raise AssertionError(
        "this analysis has no result of its own: somebody goes on computing with what it keeps"
    )


@dataclass(frozen=True)
class Analysis:
    """What to read or run, what to compute per row, how rows combine, and how the result is labelled.

    `compute` returns tensors whose first axis is the batch row (in packed rows: the text, in the order of
    `Batch.identities`); it knows neither device nor batch size, so splitting the data changes no number. It gets the
    answers to `reads`, which all questions of a run get from one pass; a question that intervenes reads nothing there
    and runs planned sweeps, which it shares with others if it names its `steps`. `reduction` keeps every row (`Rows`),
    only their moments (`Means`), or what else `core` has.
    """

    name: str
    compute: Callable[[Trace, Batch, Transformer], Mapping[str, Tensor]]
    reduction: Reduction
    finish: Callable[[Partial], xr.Dataset] = _unlabelled
    """Labels what is left of all rows; without it the analysis is for `reduced_over` alone."""
    reads: Sequence[Read] = ()
    last_only: bool = False
    """Whether sites after the blocks (final norm, logits) are needed at the last real token only."""
    pose: Callable[[Batch], Batch] | None = None
    """What the question adds to a batch, such as the answers that it asks for."""
    left: bool = False
    """Whether every row must end in the last column: the shared pass then has its padding on the left."""
    pairs: bool = False
    """Whether every row must come with a corrupted prompt."""
    rows: int | None = None
    """How many rows the data must have, where the question holds something for each, such as its answers."""
    held: str = "answers or labels"
    """What it holds for each."""
    enough: Callable[[Partial], bool] | None = None
    """Whether what was kept of the first windows answers the question already; None = all rows are asked."""
    steps: Callable[[Batch, Transformer], Steps[Mapping[str, Tensor]]] | None = None
    """What `compute` does, step by step, so that questions that intervene share their passes; None = in one go."""

    def __post_init__(self) -> None:
        posed = self.pose.rows if isinstance(self.pose, Posed) else None
        if None not in (self.rows, posed) and self.rows != posed:
            raise ValueError(
                f"one of each is required for every prompt, or one for all, got {posed} answers and {self.rows} "
                "positions"
            )
        object.__setattr__(self, "rows", posed if self.rows is None else self.rows)

    def asked(self, model: Subject) -> Analysis:
        """Itself: it has been asked already."""
        return self


@dataclass(frozen=True)
class Alone:
    """A question that needs no rows of the user's: about weights, or about rows that it makes itself."""

    name: str
    answer: Callable[[], xr.Dataset]


@dataclass(frozen=True, eq=False)
class Questions:
    """Several analyses and the one pass that answers them all: the union of their reads, the deepest block."""

    analyses: tuple[Analysis, ...]
    reads: tuple[Read, ...]
    stop: int | None
    """The block before which the pass ends; None if the logits are needed."""
    last_only: bool

    @classmethod
    def of(cls, analyses: Sequence[Analysis], config: ModelConfig) -> Questions:
        """The shared pass of these analyses.

        Errors: ValueError for none, or two of one name; KeyError for a site the model does not have.
        """
        names = [a.name for a in analyses]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"analyses with distinct names are required, got {names}")
        union = tuple(dict.fromkeys(read for a in analyses for read in a.reads))
        stop = deepest((read.site for read in union), config)
        return cls(tuple(analyses), union, stop, all(a.last_only for a in analyses if a.reads))

    def values(self, model: Transformer, batch: Batch) -> Values:
        """What every analysis computes from one shared pass over the batch, and from passes of its own.

        Padding is moved to the right, so that every token stands in the column of its position, whatever the batch;
        analyses that read the last column share a pass of their own. Hooks that tell columns apart keep those given.
        """
        if len({a.left for a in self.analyses}) > 1 and batch.keep is not None:
            sides = ([a for a in self.analyses if a.left is left] for left in (False, True))
            found = [Questions.of(some, model.config).values(model, batch) for some in sides]
            return {a.name: next(each[a.name] for each in found if a.name in each) for a in self.analyses}
        home = batch.host()
        if self.analyses[0].left:
            home = home.left_aligned()
        elif not of_columns(model):
            home = home.right_aligned()
        check_tokens(model, home)
        batch = home.to(model.device)
        if lonely := [a.name for a in self.analyses if a.pairs and batch.corrupt is None]:
            raise ValueError(
                f"{lonely[0]} compares two runs: clean and corrupted prompts are required, Pairs(clean, corrupt), "
                "got prompts alone"
            )
        trace = Trace({})
        if self.reads:
            where = home.last()[:, None] if self.last_only and self.stop is None else None
            trace = observe(
                model, batch, self.reads, stop=self.stop, logits_at=where, answers_only=True
            ).trace
        asked = {a.name: posed for a, posed in zip(self.analyses, self._posed(home, batch), strict=True)}
        stepwise = {a.name: a.steps(asked[a.name], model) for a in self.analyses if a.steps is not None}
        done = done_together(model, stepwise)
        return {
            a.name: done[a.name] if a.name in done else a.compute(trace, asked[a.name], model)
            for a in self.analyses
        }

    def _posed(self, home: Batch, batch: Batch) -> Iterator[Batch]:
        """The batch as each analysis asks about it; those that ask for the same answers get the same one.

        home: the batch on the host, where answers are looked up.
        """
        known: list[tuple[Batch, Batch]] = [(home, batch)]
        for each in self.analyses:
            here = home if each.pose is None else each.pose(home)
            there = next((moved for own, moved in known if _same_answers(own, here)), None)
            if there is None:
                there = here.to(batch.tokens.device)
                known.append((here, there))
            yield there

    def reduced(self, values: Values, rows: Int[Tensor, "n"] | None) -> dict[str, Partial]:
        """The partial result of every analysis, from the values of these rows: on the host, fetched in one copy."""
        found = self.reduced_if(torch.tensor(True), values, rows)
        assert found is not None
        return found

    def reduced_if(
        self,
        fine: Bool[Tensor, ""],
        values: Values,
        rows: Int[Tensor, "n"] | None,
        checks: Checks | None = None,
    ) -> dict[str, Partial] | None:
        """The same, unless what says whether the values are fine says no: a device is asked for both at once.

        checks: what was checked on the way to the values, and is looked at now. Errors: what those raise.
        """
        checks = Checks() if checks is None else checks
        if fine.is_cpu and not bool(fine):
            checks.settle(fetched(checks.flags))
            return None
        made = {a.name: a.reduction.of(values[a.name], rows) for a in self.analyses}
        flat = {(name, key): x for name, part in made.items() for key, x in part.tensors().items()}
        flags = {("", str(i)): flag for i, flag in checks.flags.items()}
        here = fetched({**flat, ("", "fine"): fine, **flags})
        checks.settle({i: here.pop(("", str(i))) for i in checks.flags})
        if not bool(here.pop(("", "fine"))):
            return None
        if all(x.is_cpu for x in flat.values()):
            return made
        own = {name: {key: x for (whose, key), x in here.items() if whose == name} for name in made}
        return {a.name: a.reduction.load(own[a.name]) for a in self.analyses}

    def enough(self, partial: Mapping[str, Partial] | None) -> bool:
        """Whether no analysis asks for more rows than these."""
        if partial is None:
            return False
        return all(a.enough is not None and a.enough(partial[a.name]) for a in self.analyses)

    def finished(self, partial: Mapping[str, Partial]) -> dict[str, xr.Dataset]:
        """The labelled result of every analysis."""
        return {a.name: a.finish(partial[a.name]) for a in self.analyses}


def _same_answers(one: Batch, other: Batch) -> bool:
    """Whether two batches of the same rows on the host have the same answers."""
    pairs = ((one.answer, other.answer), (one.wrong, other.wrong))
    return all(x is y or (x is not None and y is not None and torch.equal(x, y)) for x, y in pairs)


def merged(one: Mapping[str, Partial] | None, other: Mapping[str, Partial]) -> Mapping[str, Partial]:
    """The partial results of two parts of the data together, analysis by analysis."""
    if one is None:
        return other
    return {name: partial.merge(other[name]) for name, partial in one.items()}
