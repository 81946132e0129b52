"""What a command prints as one JSON value: every digit, NaN and infinite numbers as null."""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr


LARGEST = 10_000
"""Most values of a variable that is printed beside the table of a result."""


@runtime_checkable
class HasToList(Protocol):
    """Protocol of arrays and numbers of NumPy, which need not be imported for this."""

    def tolist(self) -> object:
        """The values in lists."""
        ...


def text_of(value: object) -> str:
    """A value as JSON text: records as objects, arrays as lists, paths as text; TypeError for anything else."""
    return json.dumps(_plain(value), indent=2, ensure_ascii=False, allow_nan=False)


def rows_of(table: "pd.DataFrame") -> list[dict[str, object]]:
    """The rows of a table by column, <NA> as None."""
    holes = table.astype(object).where(table.notna(), None)
    return [{str(name): value for name, value in row.items()} for row in holes.to_dict("records")]


def result_of(result: "xr.Dataset") -> dict[str, object]:
    """A labelled result: units, attributes, every row of its tidy table (`interp.frame`), and tables of the rest.

    The rest are variables over other dims, such as the numbers of every prompt: a table for each under `others`, or
    its name and sizes under `larger`, where it has more than `LARGEST` values.
    """
    from interp.core.results import beside_cells, frame

    rest = beside_cells(result)
    others = [name for name in rest if result[name].size <= LARGEST]

    return {
        "units": {
            str(name): values.attrs["unit"]
            for name, values in result.data_vars.items()
            if "unit" in values.attrs
        },
        "attributes": dict(result.attrs),
        "table": rows_of(frame(result)),
        "others": {name: rows_of(frame(result, name)) for name in others},
        "larger": {name: dict(result[name].sizes) for name in rest if name not in others},
    }


def _plain(value: object) -> object:
    """A value in the types that JSON has."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, PurePath):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, HasToList):
        return _plain(value.tolist())
    raise TypeError(f"numbers, texts, records and arrays can be printed as JSON, got {type(value).__name__}")
