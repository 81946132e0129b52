"""Records to JSON and back: nested ones carry their class name under `kind`, and unknown keys are refused."""

import dataclasses
from collections.abc import Mapping
from typing import TypeVar

from interp.core.shapes import nearest

T = TypeVar("T")
Json = dict[str, object]
"""A JSON object, as `to_dict` writes it and `from_dict` reads it."""


def fields_as_json(record: object) -> Json:
    """The fields of a record, ready for JSON."""
    return {f.name: _plain(getattr(record, f.name)) for f in dataclasses.fields(record)}  # type: ignore[arg-type]


def from_json(cls: type[T], values: Json, kinds: Mapping[str, type]) -> T:
    """The record that `fields_as_json` described.

    kinds: every record that may stand in it, by name. Errors: ValueError for a key that the record has not, for one
    that is missing, and for an unknown record.
    """
    known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    if unknown := set(values) - known:
        name = sorted(unknown)[0]
        raise ValueError(f"{cls.__name__} has no field {name!r}; {nearest(name, known)}")
    needed = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]  # type: ignore[arg-type]
    if missing := [name for name in needed if name not in values]:
        raise ValueError(f"{cls.__name__} requires {', '.join(missing)}")
    return cls(**{name: _record(value, kinds) for name, value in values.items()})


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    return {"kind": type(value).__name__, **fields_as_json(value)}


def _record(value: object, kinds: Mapping[str, type]) -> object:
    if isinstance(value, list):
        return tuple(_record(item, kinds) for item in value)
    if not isinstance(value, dict):
        return value
    kind = value.get("kind")
    if kind not in kinds:
        raise ValueError(f"unknown record {kind!r}; {nearest(str(kind), kinds)}")
    return from_json(kinds[str(kind)], {k: v for k, v in value.items() if k != "kind"}, kinds)
