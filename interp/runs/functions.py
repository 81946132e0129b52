"""The public function of a question, made from its record: `patch = of_pairs(Patch)`.

A record's fields are the parameters of its function, with the same defaults, after the model and the data. What a
reader of `help(interp.patch)`, an editor or the command line sees of the function is what the record says.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ParamSpec, Protocol, Union, cast, runtime_checkable

from interp.core.boundary import NOTHING, public
from interp.data.batch import Prompts
from interp.data.pairs import Pairs, paired
from interp.data.sources import Data
from interp.data.stream import DataSource
from interp.passes.observe import Model, as_model, text_of
from interp.passes.question import Question, function_name
from interp.runs.fact_rows import about_facts
from interp.runs.run import answer_of
from interp.tasks.fact_files import GivenFacts

if TYPE_CHECKING:
    import xarray as xr

P = ParamSpec("P")


# The methods below have no docstring, so that an editor shows that of the record.


@runtime_checkable
class OfData(Protocol[P]):
    """The function of a question about rows of data."""

    def __call__(  # noqa: D102
        self, model: Model, data: DataSource | Data | Pairs, *args: P.args, **kwargs: P.kwargs
    ) -> xr.Dataset: ...


@runtime_checkable
class OfPairs(Protocol[P]):
    """The function of a question that compares two runs, of clean and of corrupted prompts."""

    def __call__(  # noqa: D102
        self,
        model: Model,
        clean: Prompts | Data,
        corrupt: Prompts | Data,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> xr.Dataset: ...


@runtime_checkable
class OfPairsOrRows(Protocol[P]):
    """The function of a question that compares two runs, or one run with values that need no other."""

    def __call__(  # noqa: D102
        self,
        model: Model,
        clean: Prompts | Data,
        corrupt: Prompts | Data | None = None,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> xr.Dataset: ...


@runtime_checkable
class OfOwnRows(Protocol[P]):
    """The function of a question that makes rows of its own, unless it is given data."""

    def __call__(  # noqa: D102
        self,
        model: Model,
        data: DataSource | Data | Pairs | None = None,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> xr.Dataset: ...


@runtime_checkable
class OfWeights(Protocol[P]):
    """The function of a question that needs no data."""

    def __call__(self, model: Model, *args: P.args, **kwargs: P.kwargs) -> xr.Dataset: ...  # noqa: D102


def of_data(record: Callable[P, Question], renamed: Mapping[str, str] = NOTHING) -> OfData[P]:
    """The function of a question about rows of data.

    Args:
        renamed: what arguments were once called, as in `public`.
    """

    def function(
        model: Model, data: DataSource | Data | Pairs, *args: P.args, **kwargs: P.kwargs
    ) -> xr.Dataset:
        asked, data = _filled(_question_of(record, *args, **kwargs), model, data)
        question, rows = asked.with_data(model, data)
        return answer_of(question, model, rows)

    return cast("OfData[P]", _public_function(function, record, renamed))


def of_pairs(record: Callable[P, Question], renamed: Mapping[str, str] = NOTHING) -> OfPairs[P]:
    """The function of a question about pairs of prompts. renamed: as in `of_data`."""

    def function(
        model: Model,
        clean: Prompts | Data,
        corrupt: Prompts | Data,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> xr.Dataset:
        pairs = paired(text_of(model), clean, corrupt)
        question, rows = _question_of(record, *args, **kwargs).with_data(model, pairs)
        return answer_of(question, model, rows)

    return cast("OfPairs[P]", _public_function(function, record, renamed))


def of_pairs_or_rows(record: Callable[P, Question], renamed: Mapping[str, str] = NOTHING) -> OfPairsOrRows[P]:
    """The function of a question about pairs of prompts, or about prompts alone. renamed: as in `of_data`."""

    def function(
        model: Model,
        clean: Prompts | Data,
        corrupt: Prompts | Data | None = None,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> xr.Dataset:
        data = clean if corrupt is None else paired(text_of(model), clean, corrupt)
        question, rows = _question_of(record, *args, **kwargs).with_data(model, data)
        return answer_of(question, model, rows)

    return cast("OfPairsOrRows[P]", _public_function(function, record, renamed))


def of_own_rows(record: Callable[P, Question], renamed: Mapping[str, str] = NOTHING) -> OfOwnRows[P]:
    """The function of a question about data, or about rows of its own. renamed: as in `of_data`."""

    def function(
        model: Model, data: DataSource | Data | Pairs | None = None, *args: P.args, **kwargs: P.kwargs
    ) -> xr.Dataset:
        return answer_of(_question_of(record, *args, **kwargs), model, data)

    return cast("OfOwnRows[P]", _public_function(function, record, renamed))


def of_weights(record: Callable[P, Question], renamed: Mapping[str, str] = NOTHING) -> OfWeights[P]:
    """The function of a question about a model without data. renamed: as in `of_data`."""

    def function(model: Model, *args: P.args, **kwargs: P.kwargs) -> xr.Dataset:
        return answer_of(_question_of(record, *args, **kwargs), model)

    return cast("OfWeights[P]", _public_function(function, record, renamed))


LEADING: Mapping[str, object] = {
    "model": Model,
    "data": Union[DataSource, Data, Pairs],  # noqa: UP007 - made, not written
    "clean": Union[Prompts, Data],  # noqa: UP007
    "corrupt": Union[Prompts, Data],  # noqa: UP007
}
"""Parameters that may stand before the fields of a record, and their types."""


def _question_of(record: Callable[P, Question], *args: P.args, **kwargs: P.kwargs) -> Question:
    """The question of these fields; a TypeError about missing or unknown fields names the function, not the record."""
    try:
        return record(*args, **kwargs)
    except TypeError as cause:
        assert isinstance(record, type)
        call, message = f"{record.__name__}.__init__()", str(cause)
        if not message.startswith(call):
            raise
        raise TypeError(message.replace(call, f"{function_name(record)}()")) from None


def _filled(
    question: Question, model: Model, data: DataSource | Data | Pairs
) -> tuple[Question, DataSource | Data | Pairs]:
    """Facts of a file as a batch with answers, and the question with their subjects where it asks for some."""
    if not isinstance(data, GivenFacts):
        return question, data
    asked = data.asked(text_of(model))
    return about_facts(question, asked, as_model(model)), asked.batch


def _public_function(
    function: Callable[..., xr.Dataset], record: object, renamed: Mapping[str, str]
) -> Callable[..., xr.Dataset]:
    """The function with the name, module, parameters and docstring of its record, checked at its boundary."""
    assert isinstance(record, type) and issubclass(record, Question)
    parameters = inspect.signature(function).parameters
    first = [parameter for name, parameter in parameters.items() if name not in ("args", "kwargs")]
    fields = _field_parameters(record)
    name = function.__name__ = function.__qualname__ = function_name(record)
    function.__code__ = function.__code__.replace(co_name=name, co_qualname=name)  # the name in a traceback
    function.__module__, function.__doc__ = record.__module__, record.__doc__
    leading = {parameter.name: LEADING[parameter.name] for parameter in first}
    leading |= {p.name: Union[LEADING[p.name], None] for p in first if p.default is None}  # noqa: UP007
    function.__annotations__ = (
        leading | {parameter.name: parameter.annotation for parameter in fields} | {"return": "xr.Dataset"}
    )
    function.__dict__["__signature__"] = inspect.Signature([*first, *fields], return_annotation="xr.Dataset")
    return public(renamed=renamed)(function)


def _field_parameters(record: type[Question]) -> list[inspect.Parameter]:
    """The fields of a record as parameters; a default factory is called once for the default that is shown."""
    factories = {field.name: field.default_factory for field in dataclasses.fields(record)}
    parameters = []
    for parameter in inspect.signature(record).parameters.values():
        make = factories[parameter.name]
        parameters.append(parameter if make is dataclasses.MISSING else parameter.replace(default=make()))
    return parameters
