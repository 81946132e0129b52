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
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, cast, get_args, get_origin

import tyro

from interp.cli.given import GIVEN, check_no_missing_file, mounted
from interp.cli.opening import ModelCommand, Printing
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
    "data": "Texts, or one file of texts (a text a line), chats (.json) or facts (.json, .jsonl, .csv).",
    "clean": "Prompt with the right answer, or a file of such prompts.",
    "corrupt": "The same, token for token, but for what changes the answer.",
}

FROM_THE_LAST = (
    "positions are listed from the last, after which the model says what comes next: --pos -1 is it alone"
)


@dataclass(frozen=True, kw_only=True)
class Asking(ModelCommand, Printing):
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
    dictionaries: tuple[str, ...] = ()
    """Files or folders of dictionaries (SAEs, transcoders), one a block: their features are parts, such as L5F123."""

    def run(self) -> None:
        """Answer the question, print the table and how to read it, and write it whole if a file is given."""
        from interp.cli import tables
        from interp.cli.as_json import result_of
        from interp.core.files import check_replaceable, write_atomically
        from interp.core.results import frame

        self.require_some("most")
        self._require_data()
        if self.out is not None:
            check_replaceable(self.out)
        if self.checkpoints:
            self.refuse("revision", why="--checkpoints names the revisions")
            result = self._results_by_step()
            lines = tables.over_steps(result, self.scores)
        else:
            result = self.answer_of(self.opened())
            lines = tables.lines(result, scores=self.scores, sort=self.sort, most=self.most)
        if "rank" in result.sizes and result.sizes.get("pos", 1) > 1 and getattr(self, "pos", 0) is None:
            lines = chain(lines, [FROM_THE_LAST])
        self.tell(lines, lambda: {"question": function_name(self.question), **result_of(result)})
        if self.out is not None:
            table = frame(result)
            write_atomically(self.out, lambda path: table.to_csv(path, index=False))
            self.wrote(self.out)

    def refuse(self, *names: str, why: str) -> None:
        """Raise ValueError for an option among `names` that was given, because it would do nothing."""
        if useless := [name for name in names if getattr(self, name)]:
            raise ValueError(f"{why}: leave --{useless[0]} out")

    def _require_data(self) -> None:
        """ValueError where a prompt is missing: an empty list of words is one that tyro takes."""
        missing = [name for name in data_of(self.question) if getattr(self, name, None) == ()]
        if missing and needs_data(self.question):
            raise ValueError(
                f"{function_name(self.question)} requires a prompt, a text or a file of texts, got none"
            )

    def answer_of(self, model: "HookedTransformer") -> "xr.Dataset":
        """The result of the question's function, such as `interp.patch`, for this model and the options."""
        function = function_of(self.question)
        values = [getattr(self, name) for name in data_of(self.question)]
        data = [read_data(value) for value in values if value != ()]
        fields = self.fields()
        given = [name for name in GIVEN if fields.get(name) is not None]
        return function(
            model, *data, **fields | {name: GIVEN[name].read(self, model, fields[name]) for name in given}
        )

    def opened(self, revision: str | None = None) -> "HookedTransformer":
        """The model, with the dictionaries that it is given."""
        model = super().opened(revision)
        return mounted(self, model, self.dictionaries) if self.dictionaries else model

    def fields(self) -> dict[str, object]:
        """The question's fields and their values, from the options."""
        hints = _hints(self.question)
        fields = {
            field.name: getattr(self, field.name)
            if field.name in GIVEN
            else _field_value(getattr(self, field.name), hints[field.name])
            for field in dataclasses.fields(self.question)
            if hasattr(self, field.name) and field.name != "metric"
        }
        if "metric" in hints and hasattr(self, "metric"):
            metric, usual = self._metric("answer" in hints), _metric_default(self.question)
            fields |= {"metric": metric} if metric is not None or usual is None else {}
        return fields

    def _metric(self, has_answer: bool) -> "Metric | None":
        """The metric of --metric with --answer and --wrong, unless the question has these; None if none is given."""
        name, answers = getattr(self, "metric"), {}  # noqa: B009
        if not has_answer:
            answers = {key: _unwrapped(getattr(self, key)) for key in ("answer", "wrong")}
        answers = {key: answer for key, answer in answers.items() if answer is not None}
        if name is None and not answers:
            return None
        make = getattr(metrics, name or "logit_difference")
        if unused := [key for key in answers if key not in inspect.signature(make).parameters]:
            raise ValueError(f"{name} asks for no {unused[0]}: leave --{unused[0]} out")
        return cast("Metric", make(**answers))

    def _results_by_step(self) -> "xr.Dataset":
        """The results at all checkpoints, along `step`."""
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
    """The dataclass of the command that asks a question, with one option for each of the question's fields.

    Args:
        base: dataclass with the command's other options.
        says: the command's help; None = the first line of the record or of the base.
        usual: defaults of options that differ from those of the record and the base.
    """
    docs, positional = field_docs(kind), data_of(kind) if base is Asking else []
    options: list[tuple[str, object, object]] = []
    for name in positional:
        hint = tuple[str, ...] if name == "data" else str
        default: object = dataclasses.MISSING if needs_data(kind) else ()
        options.append(_option(name, hint, DATA[name], default, positional=True))
    hints, field_names = _hints(kind), {field.name for field in dataclasses.fields(base)}
    for field in dataclasses.fields(kind):
        if field.name in field_names and base is not Asking:
            continue
        if field.name == "metric":
            options += _metric_options("answer" in hints, _metric_default(kind)) if positional else []
        elif field.name in GIVEN:
            given, required = GIVEN[field.name], field.default is dataclasses.MISSING
            given_hint = given.option if required else typing.Union[given.option, None]  # noqa: UP007
            options.append(_option(field.name, given_hint, given.says, field.default if required else None))
        elif field.name in hints and (option := option_of(hints[field.name])) is not None:
            default = _option_default(usual.get(field.name, field.default), option)
            options.append(_option(field.name, option, docs.get(field.name, ""), default))
    known = {name for name, _, _ in options}
    for field in dataclasses.fields(base):
        if field.name in usual and field.name not in known:
            options.append(
                _option(field.name, _hints(base)[field.name], field_docs(base)[field.name], usual[field.name])
            )
    first_line = (inspect.getdoc(kind) or "").partition("\n")[0]
    command = dataclasses.make_dataclass(
        kind.__name__, options, bases=(base,), frozen=True, kw_only=True,
        namespace={"question": kind, "__doc__": says or (first_line if base is Asking else base.__doc__)},
    )  # fmt: skip
    return cast("type[Asking]", command)


def function_of(kind: type[Question]) -> "Callable[..., xr.Dataset]":
    """The function of the same name as a question, in its wing."""
    module = importlib.import_module(kind.__module__)
    return cast("Callable[..., xr.Dataset]", getattr(module, function_name(kind)))


def data_of(kind: type[Question]) -> list[str]:
    """The data that the function of a question takes: `data`, `clean` and `corrupt`, or none."""
    fields = {field.name for field in dataclasses.fields(kind)}
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
    """The annotation of the option for a field with annotation `hint`; None if a command line cannot give its value.

    Sequences become tuples. Of several possible types text is preferred. A change such as `Zero()` is given by its
    name, with the default parameters.
    """
    members = _members(hint)
    kinds = [member for member in members if member is not type(None)]
    if kinds and all(member in CHANGES.values() for member in kinds):
        return Literal[tuple(name for name, kind in CHANGES.items() if kind in kinds)]
    lists = [item for member in kinds if get_origin(member) is not None for item in _items(member)]
    simple = [member for member in kinds if member in SCALARS or get_origin(member) is Literal]
    records = [member for member in kinds if dataclasses.is_dataclass(member) and _has_only_options(member)]
    annotation: object
    if len(records) == 1 and not (lists or simple):
        return records[0]
    if lists:
        annotation = tuple[str if str in (*lists, *simple) else lists[0], ...]  # type: ignore[misc]
    elif str in simple:
        annotation = str
    elif simple:
        annotation = typing.Union[tuple(simple)]  # noqa: UP007
    else:
        return None
    return typing.Union[annotation, None] if type(None) in members else annotation  # noqa: UP007


def _hints(owner: object) -> Mapping[str, object]:
    """The annotations of the fields of a class, without importing packages that are slow to load (pandas, xarray)."""
    return hints_of(owner, imported=False)


def _members(hint: object) -> list[object]:
    """The members of a union annotation; any other annotation alone."""
    if get_origin(hint) is Annotated:
        return _members(get_args(hint)[0])
    if get_origin(hint) in (typing.Union, types.UnionType):
        return [member for arg in get_args(hint) for member in _members(arg)]
    return [hint]


def _items(hint: object) -> list[object]:
    """The simple types that the items of a sequence annotation may have; empty for other annotations."""
    if get_origin(hint) not in (tuple, list, Sequence):
        return []
    inner = [member for arg in get_args(hint) if arg is not Ellipsis for member in _members(arg)]
    return [arg for arg in inner if arg in SCALARS or get_origin(arg) is Literal]


def _has_only_options(record: object) -> bool:
    """Whether every field of a record can be given as an option."""
    assert isinstance(record, type)
    hints = _hints(record)
    return all(
        option_of(hints.get(field.name)) is not None for field in dataclasses.fields(record) if field.init
    )


def _option(
    name: str, hint: object, doc: str, default: object, positional: bool = False
) -> tuple[str, object, object]:
    """One option as a dataclass field for tyro: name, annotation with its help, default."""
    marks = (tyro.conf.arg(help=doc), *([tyro.conf.Positional] if positional else []))
    return name, Annotated[hint, *marks], dataclasses.field(default=default)


def _metric_default(kind: type[Question]) -> "Metric | None":
    """The metric of a question where none is given; None: the logit difference of the answers."""
    (field,) = (field for field in dataclasses.fields(kind) if field.name == "metric")
    made = field.default_factory
    return cast("Metric | None", field.default if made is dataclasses.MISSING else made())


def _metric_options(has_answer: bool, usual: "Metric | None") -> list[tuple[str, object, object]]:
    """The options for a metric: its name, and its answers unless the question has them as fields."""
    many = tuple[str, ...] | None
    answers = [] if has_answer else [_option(name, many, ANSWERS[name], None) for name in ("answer", "wrong")]
    says = (
        ANSWERS["metric"] if usual is None else f"What is watched; without it and an answer the {usual.name}."
    )
    return [*answers, _option("metric", MetricName | None, says, None)]


def _option_default(default: object, option: object) -> object:
    """The default of an option, from the default of its field: a name for a change, a tuple for a single value."""
    if default is dataclasses.MISSING:
        return default
    if default is None and isinstance(option, type) and dataclasses.is_dataclass(option):
        return cast("Callable[[], object]", option)()
    if isinstance(default, Closed):
        return next(name for name, kind in CHANGES.items() if type(default) is kind)
    lists = any(get_origin(member) is tuple for member in _members(option))
    return (default,) if lists and default is not None and not isinstance(default, tuple | list) else default


def _field_value(value: object, hint: object) -> object:
    """The value of a field from that of its option: a single item for a list of one, where the field takes both.

    An optional record whose options all have their defaults is None.
    """
    members = _members(hint)
    left_out = type(None) in members and dataclasses.is_dataclass(value) and not isinstance(value, type)
    if left_out and value == cast("Callable[[], object]", type(value))():
        return None
    if isinstance(value, str) and any(member in CHANGES.values() for member in members):
        return cast("type[Zero | Mean | Resample | Detach]", CHANGES[value])()
    takes_one = any(member in SCALARS or get_origin(member) is Literal for member in members)
    return _unwrapped(value) if takes_one else value


def _unwrapped(value: object) -> object:
    return value[0] if isinstance(value, tuple) and len(value) == 1 else value


def read_data(given: str | tuple[str, ...]) -> object:
    """The data of command-line words: texts, or the path of a file of texts; raises ValueError for a folder."""
    text = _unwrapped(given)
    from interp.core.files import is_file, is_folder

    if isinstance(text, str) and os.sep in text and is_folder(text):
        raise ValueError(
            f"a text or a file of texts is required, {text} is a folder; a model is --model {text}"
        )
    if isinstance(text, str) and is_file(text):
        return read_file(Path(text))
    if isinstance(text, str):
        check_no_missing_file(text)
    return text if isinstance(text, str) else list(given)


def read_file(path: Path) -> object:
    """The data in a file: chats or facts of JSON or a table, or the path itself of a file of texts."""
    suffix = path.suffix.lower()
    if suffix not in (".json", ".jsonl", ".csv"):
        return path
    from interp.core.files import json_contents
    from interp.data.chats import contents_as_chats, read_chats
    from interp.tasks import read_facts

    if suffix == ".csv":
        return read_facts(path)
    contents = json_contents(path)
    if contents_as_chats(contents) is not None:
        return read_chats(path)
    is_texts = isinstance(contents, list) and all(
        isinstance(row, dict) and "text" in row for row in contents[:1]
    )
    return path if suffix == ".jsonl" and is_texts else read_facts(path)


def _revisions(model: str, checkpoints: Sequence[str]) -> list[str]:
    """The named checkpoints; `all` means those shipped with the demo model, ValueError if it has none."""
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
