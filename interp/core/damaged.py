"""What a labelled result lacks, in words, where a function that was given it ends in an error that nobody raised.

A result may have lost a variable, an attribute or a dim on its way (`drop_vars`, `isel(layer=0)`, a file). What then
fails deep inside is a lookup of xarray or numpy; `boundary.public` asks here what the user's result has not.
"""

import dis
import re
import sys
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import xarray as xr

IDENTIFIED = ("prompt", "example")
"""Dims over rows of the data, whose labels the run adds."""
REAL = "biuf"
"""The kinds of numpy's dtypes that are real numbers."""
WHOLE = "{} must be a whole result, got one {}"
"""How an error says what a result lacks: the result's name, and what it is without."""
ESTIMATED = ("value", "low", "high", "null", "n")
"""Variables that are numbers in every result."""
OF_THE_MACHINE = (OSError, MemoryError)
"""Errors that say nothing about a result, whatever it is like."""
BELOW = ("xarray", "pandas", "numpy", "matplotlib")
"""What reads and draws results."""
_LOOKED_UP = re.compile(
    r"(?:No variable named|Data\w+' object has no attribute|Dimensions \{|found in index)\s*'(\w+)'|^'(\w+)'$"
    r"|'(\w+)' (?:is not a valid dimension|not found in array dim)"
)
"""How xarray and Python say which name was looked up and is not there."""


def check_whole(function: str, error: Exception, given: Mapping[str, object]) -> None:
    """Raises a ValueError that names the damaged result among the arguments of a function, and what it lacks.

    Nothing where no result is damaged, and for an error that was raised on purpose, which says it itself.
    """
    if flaw := _flaw(error, given):
        raise ValueError(f"{function}: {flaw}") from error


def _flaw(error: Exception, given: Mapping[str, object]) -> str | None:
    if isinstance(error, OF_THE_MACHINE) or not _by_chance(error.__traceback__):
        return None
    given = {argument: value for argument, value in given.items() if argument != "self"}
    found = [(argument, result) for argument, value in given.items() for result in _results(value)]
    if not found:
        return None
    said = f"{error.args[0]}" if isinstance(error, KeyError) and error.args else ""  # str() quotes it
    groups = (each for text in (str(error), said) for each in _LOOKED_UP.findall(text))
    name = next((found for each in groups for found in each if found), "")
    whole = WHOLE.format
    for argument, result in found:
        if name and name not in {*result.variables, *result.sizes, *result.attrs}:
            return whole(
                argument, f"without {name!r}; it has {', '.join(map(str, result.variables)) or 'nothing'}"
            )
    flaws = (whole(argument, flaw) for argument, result in found for flaw in _flaws(result))
    lost = (
        whole(found[0][0], f"without the attribute, or some labels, of the name {name!r}") if name else None
    )
    return next(flaws, lost)


def _results(value: object) -> "list[xr.Dataset]":
    """The labelled results among a value and what it holds."""
    inside = (
        value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    )
    xarray = sys.modules.get("xarray")
    return [] if xarray is None else [each for each in (value, *inside) if isinstance(each, xarray.Dataset)]


def _by_chance(trace: TracebackType | None) -> bool:
    """Whether an error arose in this package or below it: in no `raise` of ours, in no function of the user."""
    assert trace is not None
    while trace.tb_next is not None:
        trace = trace.tb_next
    package = trace.tb_frame.f_globals.get("__name__", "").partition(".")[0]
    raised = dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"
    return package in BELOW or (package == "interp" and not raised)


def _flaws(result: "xr.Dataset") -> Iterator[str]:
    """What may keep a result from being read: dims that are empty or were selected away, no finite number."""
    yield from (f"without entries along {dim}" for dim, size in result.sizes.items() if not size)
    named = [str(dim) for dim in result.sizes if dim not in IDENTIFIED or dim in result.coords]
    yield from filter(None, (label_flaw(result, dim) for dim in named))
    selected = [str(name) for name, values in result.coords.items() if not values.dims]
    yield from (f"with one {name} and without that dim: keep it, isel({name}=[0])" for name in selected)
    estimated = [str(name) for name in ESTIMATED if name in result and result[name].dtype.kind not in REAL]
    yield from (f"without real numbers in {name}, but {result[name].dtype}" for name in estimated)
    numbers = [each for each in result.values() if each.dtype.kind == "f"]
    if numbers and not any(np.isfinite(each).any() for each in numbers):
        yield "without a finite number: all are NaN"


def label_flaw(result: "xr.Dataset | xr.DataArray", dim: str) -> str | None:
    """What keeps the labels of a dim from telling its entries apart, in words; None where nothing does."""
    if dim not in result.indexes:
        return f"without the labels of {dim}"
    twice = result.indexes[dim][result.indexes[dim].duplicated()]
    return f"with {dim} {twice[0]} twice" if len(twice) else None
