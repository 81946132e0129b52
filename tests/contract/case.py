"""One question as the contract sees it: the record, the rows it is asked about, and what its result declares."""

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
import xarray as xr

from interp.core.stats import Partial
from interp.data.batch import Batch
from interp.features import Dictionary
from interp.model import Transformer
from interp.passes.observe import Model, as_model
from interp.passes.question import Ask, Askable, ByRow, Question, Questions, Staged, WithoutData, merged
from interp.tasks import RepeatedTokens
from tests.configs import CONFIGS, D_VOCAB, build, some_tokens
from tests.edited import without_head

WINGS = (
    "attention", "weights", "residual", "tokens", "lenses", "causal", "circuits", "features", "editing", "dynamics",
    "findings", "lab.depth",
)  # fmt: skip
MODELS = ("gpt2", "llama-gqa", "attention-only-rotary")
DATA = RepeatedTokens(period=5, repeats=3, rows=5)
ROWS = 5
IN_ORDER = tuple(range(ROWS))
Dims = dict[str, tuple[str, ...]]
Maker = Callable[[str, Sequence[int]], Askable]
"""From the name of a model, and which of the rows are asked about in which order, to the question."""


@dataclass(frozen=True, eq=False)
class Case:
    """One question, the rows it is asked about, and what its result declares."""

    question: Askable | Maker
    dims: Dims
    padding: tuple[str, ...] = ("left", "right")
    """Sides on which rows may be padded; none means that padding is refused."""
    needs_mlp: bool = False
    needs_no_mlp: bool = False
    only: str | None = None
    """The one model that must do for what takes long."""
    rows: Callable[[Transformer], Batch] | None = None
    """The rows for a model, where they are not the usual ones."""
    drawn_apart: Callable[[xr.Dataset], xr.Dataset] = lambda result: result
    """What is left of a result without the numbers for which something is drawn by the place of a row."""
    undrawn: str | None = None
    """What its picture says of a result that it cannot show whole."""
    refuses: str | None = None
    """What it says of an edited head; None = it gives the numbers of the edited model."""
    of_others: Callable[[xr.Dataset, str], xr.Dataset] = lambda result, head: result
    """What is left of a result without the numbers about an edited head itself, which its copy still has."""
    silent: Callable[[str, int, int], Transformer] = without_head
    """A copy of the model with a head that adds nothing."""

    @property
    def row_dim(self) -> str | None:
        """The dim with one entry per row, where the result keeps the rows."""
        return "prompt" if any("prompt" in dims for dims in self.dims.values()) else None

    @property
    def models(self) -> list[str]:
        """The models that the question can be asked about."""
        able = [name for name in MODELS if not (self.needs_no_mlp if CONFIGS[name].mlp else self.needs_mlp)]
        return able if self.only is None else [self.only]

    def question_for(self, model: str, order: Sequence[int] = IN_ORDER) -> Askable:
        """The question about these rows in this order."""
        return self.question if isinstance(self.question, Askable) else self.question(model, order)

    def record(self, model: str) -> Question:
        """The question where it is a record of the package."""
        found = self.question_for(model)
        assert isinstance(found, Question)
        return found

    @property
    def alone(self) -> bool:
        """Whether it needs no rows of the user's."""
        (model, *_) = self.models
        bound = self.question_for(model).bind(as_model(build(model)))
        return isinstance(bound, WithoutData) or (isinstance(bound, Staged) and bound.data == "none")

    def batch(self, model: str, network: Transformer | None = None) -> Batch:
        """The rows it is asked about."""
        batch = some_rows() if self.rows is None else self.rows(build(model) if network is None else network)
        return batch if compares_runs(self.question_for(model)) else replace(batch, corrupt=None)

    def result(
        self, model: str, *batches: Batch, order: Sequence[int] = IN_ORDER, network: Transformer | None = None
    ) -> xr.Dataset:
        """The answer from these batches, by the plain loop."""
        network = build(model) if network is None else network
        return by_hand(self.question_for(model, order), network, [batch.numbered() for batch in batches])


Kept = Callable[[ByRow, Transformer, Iterable[Batch]], Partial]


def kept_by_hand(asked: ByRow, network: Transformer, batches: Iterable[Batch]) -> Partial:
    """What a question keeps of these batches, by the plain loop."""
    questions, total = Questions.of([asked], network.config), None
    for batch in batches:
        part = questions.reduced(questions.values(network, batch), batch.identities())
        total = merged(total, part)
    assert total is not None
    return total[asked.name]


def by_hand(
    question: Askable, network: Transformer, batches: Iterable[Batch], kept_of: Kept = kept_by_hand
) -> xr.Dataset:
    """The answer to a question by the loop that it defines: pass, compute, reduce, merge, label; stage by stage."""
    asked, given = question.bind(as_model(network)), list(batches)
    if isinstance(asked, WithoutData):
        return asked.answer()
    if isinstance(asked, ByRow):
        return asked.result(kept_of(asked, network, given))
    stages, kept = asked.stages(bool(given)), None
    while True:
        try:
            asks = stages.send(kept)
        except StopIteration as end:
            return end.value
        kept = [
            kept_of(ask.question, (ask.model or as_model(network)).transformer, _batches_of(ask, given))
            for ask in asks
        ]


def _batches_of(ask: Ask, given: Sequence[Batch]) -> Sequence[Batch]:
    """The rows that an ask is about: those given, or its own."""
    if ask.data is None:
        return given
    windows = ask.data.windows
    assert windows is not None
    return [batch for window in range(windows) for batch in ask.data.window(window).batches]


def with_saes(question: Askable, change: Callable[[Dictionary], Dictionary]) -> Askable:
    """The question with its autoencoders changed, such as put on another device."""
    if not isinstance(question, Question):
        return question
    saes = {f.name: x for f in fields(question) if isinstance(x := getattr(question, f.name), Dictionary)}
    return replace(question, **{name: change(sae) for name, sae in saes.items()})


# --- what the package has -----------------------------------------------------------------------------------------


@functools.cache
def discovered() -> tuple[type[Question], ...]:
    """Every question of the package."""
    return tuple(question for wing in WINGS for question in _of_wing(wing))


def _of_wing(wing: str) -> Iterator[type[Question]]:
    face = importlib.import_module(f"interp.{wing}")
    for info in pkgutil.walk_packages(face.__path__, f"{face.__name__}."):
        for name, value in vars(importlib.import_module(info.name)).items():
            its_own = inspect.isclass(value) and value.__module__ == info.name and not name.startswith("_")
            if its_own and issubclass(value, Question):
                yield value


def face_of(question: type[Question]) -> str:
    """The wing that a question is imported from."""
    return question.__module__.rpartition(".")[0]


@functools.cache
def function_of(question: type[Question]) -> Callable[..., xr.Dataset]:
    """The public function of the record's name."""
    found = getattr(importlib.import_module(face_of(question)), snake(question.__name__))
    assert callable(found)
    return found  # type: ignore[no-any-return]


def snake(name: str) -> str:
    """The name of a record in the spelling of functions."""
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).removeprefix("_")


def compares_runs(question: Askable) -> bool:
    """Whether its function takes clean and corrupted prompts."""
    return (
        isinstance(question, Question)
        and "clean" in inspect.signature(function_of(type(question))).parameters
    )


def called(question: Question, model: Model, batch: Batch | None, rows: int | None = None) -> xr.Dataset:
    """What the function of a record's name gives for its fields; rows: of each of several batches."""
    function = function_of(type(question))
    taken = inspect.signature(function).parameters
    given = {f.name: getattr(question, f.name) for f in fields(question) if f.name in taken}
    data = () if batch is None else (batch,) if batch.corrupt is None else batch.pair()
    return function(
        model, *(data if rows is None else map(list, (each.split(rows) for each in data))), **given
    )


# --- rows ---------------------------------------------------------------------------------------------------------


def some_rows() -> Batch:
    """Rows with their corrupted ones and with answers."""
    answer, wrong = torch.tensor([3, 14, 7, 1, 9]), torch.tensor([5, 1, 30, 2, 8])
    tokens, corrupt = some_tokens(ROWS, 9), some_tokens(ROWS, 9, seed=1)
    return Batch(tokens, bos=True, corrupt=corrupt).with_answers(answer, wrong)


def with_names(_: Transformer) -> Batch:
    """Rows that hold both of their answers, as sentences about two people do."""
    batch = some_rows()
    assert batch.answer is not None and batch.wrong is not None
    batch.tokens[:, 2], batch.tokens[:, 4], batch.tokens[:, 7] = batch.answer, batch.wrong, batch.wrong
    return batch


def repeats(_: Transformer) -> Batch:
    """Rows of repeated tokens."""
    return Batch(DATA.tokens(D_VOCAB, 0), bos=True)


def known(network: Transformer) -> Batch:
    """Rows whose answer is what the model says; "llama-gqa" says it so surely that coarser passes say it too."""
    many = some_tokens(8 * ROWS, 9, seed=2)
    first, second = build("llama-gqa")(many)[:, -1].topk(2).values.unbind(-1)
    batch = Batch(many[(first - second).topk(ROWS).indices], bos=True)
    return batch.with_answers(network(batch.tokens)[:, -1].argmax(-1), None)


# --- results ------------------------------------------------------------------------------------------------------


def agree(one: xr.Dataset, other: xr.Dataset, tolerance: float = 1e-9) -> None:
    """AssertionError unless both have the same numbers."""
    assert one.data_vars.keys() == other.data_vars.keys()
    for name in one.data_vars:
        if one[name].dtype.kind in "OU":
            assert (one[name].values == other[name].values).all(), name
            continue
        np.testing.assert_allclose(
            one[name].values, other[name].values, rtol=tolerance, atol=tolerance, err_msg=str(name)
        )
