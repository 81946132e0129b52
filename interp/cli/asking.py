"""Commands that ask a question: their options are the fields of the question's record, with its defaults and words.

`asking(Patch)` is a dataclass for tyro: the data that the function of the same name takes are positional, every field
that a command line can give is an option (the sentence under the field is its help), and `run` calls the function.
"""

import dataclasses
import importlib
import inspect
import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, cast, get_args, get_origin

import tyro

from interp.cli.opening import ModelCommand
from interp.core.hints import hints_of
from interp.model.edits import Closed, Detach, Mean, Resample, Zero
from interp.passes import metrics
from interp.passes.edit_text import CHANGES
from interp.passes.question import Question, function_name
from interp.runs.experiment import field_docs

if TYPE_CHECKING:
    import xarray as xr

    from interp import HookedTransformer
    from interp.passes.metrics import Metric

SCALARS = (str, int, float, bool)
MetricName = Literal[
    "logit_difference",
    "answer_probability",
    "answer_log_probability",
    "answer_loss",
    "kl_divergence",
    "next_token_loss",
]
ANSWERS: Mapping[str, str] = {
    "answer": "The right answer, leading space included, of one token or several; one for all prompts or one for each.",
    "wrong": "The answer it is contrasted with.",
    "metric": "What is watched; without it the logit difference of answer and wrong.",
}
DATA: Mapping[str, str] = {
    "data": "Texts, or one file of them, a text a line.",
    "clean": "Prompt with the right answer, or a file of such prompts.",
    "corrupt": "The same, token for token, but for what changes the answer.",
}


@dataclass(frozen=True, kw_only=True)
class Asking(ModelCommand):
    """Options of every command of a question, besides the fields of the question."""

    question: ClassVar[type[Question]]

    checkpoints: tuple[str, ...] = ()
    """Training checkpoints to compare, such as `step1200 step2850`, or `all` that a demo model ships."""
    scores: tuple[str, ...] = ()
    """Scores to print, where there are several; the lines are ordered by the first of them."""
    sort: str | None = None
    """Column by which the lines are ordered, largest size first; without it `value`."""
    most: int = 40
    """The most lines to print."""
    out: Path | None = None
    """CSV file for the whole table."""

    def run(self) -> None:
        """Answer the question, print the table and how to read it, and write it whole if a file is given."""
        from interp.cli import tables
        from interp.core.files import check_replaceable, write_atomically
        from interp.core.results import frame

        if self.out is not None:
            check_replaceable(self.out)
        if self.checkpoints:
            self.refuse("revision", why="--checkpoints names the revisions")
            found = self._over_training()
            lines = tables.over_steps(found, self.scores)
        else:
            found = self.answer_of(self.opened())
            lines = tables.lines(found, scores=self.scores, sort=self.sort, most=self.most)
        for line in lines:
            print(line)
        if "rank" in found.sizes and found.sizes.get("pos", 1) > 1 and getattr(self, "pos", 0) is None:
            print(
                "positions are listed from the last, after which the model says what comes next: --pos -1 is it alone"
            )
        if self.out is not None:
            table = frame(found)
            write_atomically(self.out, lambda path: table.to_csv(path, index=False))
            print(self.out)

    def refuse(self, *names: str, why: str) -> None:
        """ValueError for an option that was given and would do nothing."""
        if odd := [name for name in names if getattr(self, name)]:
            raise ValueError(f"{why}: leave --{odd[0]} out")

    def answer_of(self, model: "HookedTransformer") -> "xr.Dataset":
        """The answer of the function of the same name."""
        function = function_of(self.question)
        given = [getattr(self, name) for name in data_of(self.question)]
        data = [read_data(each) for each in given if each != ()]
        return function(model, *data, **self.fields())

    def fields(self) -> dict[str, object]:
        """The fields of the question as the options say."""
        hints = _hints(self.question)
        found = {
            each.name: _given(getattr(self, each.name), hints[each.name])
            for each in dataclasses.fields(self.question)
            if hasattr(self, each.name) and each.name != "metric"
        }
        if "metric" in hints and hasattr(self, "metric"):
            found["metric"] = self._metric("answer" in hints)
        return found

    def _metric(self, has_answer: bool) -> "Metric | None":
        """The metric that is watched, with its answers unless the question has them itself."""
        name, answers = getattr(self, "metric"), {}  # noqa: B009
        if not has_answer:
            answers = {key: _alone(getattr(self, key)) for key in ("answer", "wrong")}
        answers = {key: each for key, each in answers.items() if each is not None}
        if name is None and not answers:
            return None
        make = getattr(metrics, name or "logit_difference")
        if odd := [key for key in answers if key not in inspect.signature(make).parameters]:
            raise ValueError(f"{name} asks for no {odd[0]}: leave --{odd[0]} out")
        return cast("Metric", make(**answers))

    def _over_training(self) -> "xr.Dataset":
        """The answers at every checkpoint."""
        from interp.dynamics.checkpoints import over_checkpoints

        revisions = _revisions(self.model, self.checkpoints)
        return over_checkpoints(
            self.opened,
            revisions,
            lambda model: self.answer_of(cast("HookedTransformer", model)),
        )


def asking(
    kind: type[Question], base: type[Asking] = Asking, *, says: str | None = None, **usual: object
) -> type[Asking]:
    """The command of a question.

    Args:
        base: what the command has besides the fields.
        says: its help; None = the first line of the record or of the base.
        usual: other defaults than those of the record and the base.
    """
    docs, positional = field_docs(kind), data_of(kind) if base is Asking else []
    every: list[tuple[str, object, object]] = []
    for name in positional:
        hint = tuple[str, ...] if name == "data" else str
        default: object = dataclasses.MISSING if needs_data(kind) else ()
        every.append(_field(name, hint, DATA[name], default, positional=True))
    hints, field_names = _hints(kind), {each.name for each in dataclasses.fields(base)}
    for each in dataclasses.fields(kind):
        if each.name in field_names and base is not Asking:
            continue
        if each.name == "metric":
            every += _of_metric("answer" in hints) if positional else []
        elif each.name in hints and (option := option_of(hints[each.name])) is not None:
            default = _as_option(usual.get(each.name, each.default), option)
            every.append(_field(each.name, option, docs.get(each.name, ""), default))
    known = {name for name, _, _ in every}
    for each in dataclasses.fields(base):
        if each.name in usual and each.name not in known:
            every.append(
                _field(each.name, _hints(base)[each.name], field_docs(base)[each.name], usual[each.name])
            )
    first_line = (inspect.getdoc(kind) or "").partition("\n")[0]
    made = dataclasses.make_dataclass(
        kind.__name__, every, bases=(base,), frozen=True, kw_only=True,
        namespace={"question": kind, "__doc__": says or (first_line if base is Asking else base.__doc__)},
    )  # fmt: skip
    return cast("type[Asking]", made)


def function_of(kind: type[Question]) -> "Callable[..., xr.Dataset]":
    """The function of the same name as a question, in its wing."""
    module = importlib.import_module(kind.__module__)
    return cast("Callable[..., xr.Dataset]", getattr(module, function_name(kind)))


def data_of(kind: type[Question]) -> list[str]:
    """The data that the function of a question takes: `data`, `clean` and `corrupt`, or none."""
    fields = {each.name for each in dataclasses.fields(kind)}
    return [
        name
        for name in inspect.signature(function_of(kind)).parameters
        if name in DATA and name not in fields
    ]


def needs_data(kind: type[Question]) -> bool:
    """Whether the function of a question must be given the data that it takes."""
    taken = inspect.signature(function_of(kind)).parameters
    return any(taken[name].default is inspect.Parameter.empty for name in data_of(kind))


def option_of(hint: object) -> object | None:
    """The kind of option that a field of this annotation is; None if a command line cannot give it.

    A list is a list; of several possible kinds texts come first. A closed change is named; its own parameters are the
    usual ones.
    """
    members = _members(hint)
    kinds = [each for each in members if each is not type(None)]
    if kinds and all(each in CHANGES.values() for each in kinds):
        return Literal[tuple(name for name, kind in CHANGES.items() if kind in kinds)]
    lists = [item for each in kinds if get_origin(each) is not None for item in _items(each)]
    simple = [each for each in kinds if each in SCALARS or get_origin(each) is Literal]
    records = [each for each in kinds if dataclasses.is_dataclass(each) and _can_be_said(each)]
    found: object
    if len(records) == 1 and not (lists or simple):
        return records[0]
    if lists:
        found = tuple[str if str in (*lists, *simple) else lists[0], ...]  # type: ignore[misc]
    elif str in simple:
        found = str
    elif simple:
        found = typing.Union[tuple(simple)]  # noqa: UP007
    else:
        return None
    return typing.Union[found, None] if type(None) in members else found  # noqa: UP007


def _hints(owner: object) -> Mapping[str, object]:
    """The annotations of fields that a command line can give a value for.

    Tables are left out: their package is slow to load.
    """
    return hints_of(owner, imported=False)


def _members(hint: object) -> list[object]:
    """The kinds that a union allows."""
    if get_origin(hint) is Annotated:
        return _members(get_args(hint)[0])
    if get_origin(hint) in (typing.Union, types.UnionType):
        return [member for each in get_args(hint) for member in _members(each)]
    return [hint]


def _items(hint: object) -> list[object]:
    """The type of a list's items, where they are simple."""
    if get_origin(hint) not in (tuple, list, Sequence):
        return []
    inner = [member for each in get_args(hint) if each is not Ellipsis for member in _members(each)]
    return [each for each in inner if each in SCALARS or get_origin(each) is Literal]


def _can_be_said(record: object) -> bool:
    """Whether all fields of a record are options."""
    assert isinstance(record, type)
    hints = _hints(record)
    return all(
        option_of(hints.get(each.name)) is not None for each in dataclasses.fields(record) if each.init
    )


def _field(
    name: str, hint: object, doc: str, default: object, positional: bool = False
) -> tuple[str, object, object]:
    """One option for tyro."""
    marks = (tyro.conf.arg(help=doc), *([tyro.conf.Positional] if positional else []))
    return name, Annotated[hint, *marks], dataclasses.field(default=default)


def _of_metric(has_answer: bool) -> list[tuple[str, object, object]]:
    """The metric of a name, with its answers unless the question has them itself."""
    many = tuple[str, ...] | None
    answers = [] if has_answer else [_field(name, many, ANSWERS[name], None) for name in ("answer", "wrong")]
    return [*answers, _field("metric", MetricName | None, ANSWERS["metric"], None)]


def _as_option(default: object, option: object) -> object:
    """The default of a field as its option has it."""
    if default is dataclasses.MISSING:
        return default
    if default is None and isinstance(option, type) and dataclasses.is_dataclass(option):
        return cast("Callable[[], object]", option)()
    if isinstance(default, Closed):
        return next(name for name, kind in CHANGES.items() if type(default) is kind)
    lists = any(get_origin(each) is tuple for each in _members(option))
    return (default,) if lists and default is not None and not isinstance(default, tuple | list) else default


def _given(value: object, hint: object) -> object:
    """The value of a field from its option: one thing instead of a list of it where the field takes both.

    A record that may be left out is left out where every one of its options was.
    """
    members = _members(hint)
    left_out = type(None) in members and dataclasses.is_dataclass(value) and not isinstance(value, type)
    if left_out and value == cast("Callable[[], object]", type(value))():
        return None
    if isinstance(value, str) and any(each in CHANGES.values() for each in members):
        return cast("type[Zero | Mean | Resample | Detach]", CHANGES[value])()
    both = any(each in SCALARS or get_origin(each) is Literal for each in members)
    return _alone(value) if both else value


def _alone(value: object) -> object:
    return value[0] if isinstance(value, tuple) and len(value) == 1 else value


def read_data(given: str | tuple[str, ...]) -> object:
    """Data as typed: texts, or the file that has them. ValueError for the path of a folder, which is no text."""
    text = _alone(given)
    if isinstance(text, str) and os.sep in text and len(text) < 256 and Path(text).is_dir():
        raise ValueError(
            f"a text or a file of texts is required, {text} is a folder; a model is --model {text}"
        )
    if isinstance(text, str) and len(text) < 256 and "\n" not in text and Path(text).is_file():
        return Path(text)
    return text if isinstance(text, str) else list(given)


def _revisions(model: str, checkpoints: Sequence[str]) -> list[str]:
    """The checkpoints that are named; `all` are those that come with the package, ValueError if there are none."""
    from interp import zoo

    if tuple(checkpoints) != ("all",):
        return list(checkpoints)
    shipped = zoo.revisions(model) if model in zoo.DEMOS else []
    if not shipped:
        having = [name for name in zoo.DEMOS if zoo.revisions(name)]
        raise ValueError(
            f"--checkpoints all requires a demo model with checkpoints ({', '.join(having)}), got {model!r}"
        )
    return shipped
