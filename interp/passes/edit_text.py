"""Edits as JSON and as Python: the form in which results, pages and files keep them, and back without loss."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from interp.core.boundary import public
from interp.core.wording import nearest
from interp.model.edits import (
    Add,
    Change,
    Closed,
    Detach,
    Edit,
    Mean,
    PositionIndex,
    Project,
    Resample,
    Scale,
    Set,
    Swap,
    Zero,
)
from interp.model.layout import ByRole, PerRow

CHANGES: Final[Mapping[str, type[Closed]]] = {
    "set": Set, "zero": Zero, "mean": Mean, "resample": Resample, "add": Add, "scale": Scale, "project": Project,
    "swap": Swap, "detach": Detach,
}  # fmt: skip
"""The closed changes by the name they have in JSON."""
SHORT = 64
"""Numbers that Python text writes out; longer tensors are written as their bytes."""


def change_to_json(change: Change) -> dict[str, object]:
    """A closed change as JSON, tensors as bytes. ValueError for a function, which only Python knows.

    Example:
        >>> change_to_json(Scale(0.5))
        {'change': 'scale', 'factor': 0.5}
    """
    name = next((name for name, kind in CHANGES.items() if type(change) is kind), None)
    if name is None:
        raise ValueError(f"only closed changes ({', '.join(CHANGES)}) can be written down, got {change!r}")
    return {"change": name, **{field: _to_json(value) for field, value in _fields(change).items()}}


def change_from_json(entry: object) -> Change:
    """The change that `change_to_json` wrote. ValueError for anything else, by what is wrong."""
    if not isinstance(entry, Mapping) or not isinstance(entry.get("change"), str):
        raise ValueError(f"a change as JSON is required, an object with the key 'change', got {entry!r:.200}")
    name = str(entry["change"])
    if name not in CHANGES:
        raise ValueError(f"a change is one of {', '.join(CHANGES)}, got {name!r}; {nearest(name, CHANGES)}")
    kind = CHANGES[name]
    known = [field.name for field in fields(kind)]
    values = {key: value for key, value in entry.items() if key != "change"}
    if unknown := [key for key in values if key not in known]:
        raise ValueError(f"{name!r} has the fields {', '.join(known) or 'none'}, not {unknown[0]!r}")
    try:
        return kind(**{key: _from_json(value) for key, value in values.items()})  # type: ignore[arg-type]
    except TypeError as cause:
        raise ValueError(
            f"{name!r} requires the fields {', '.join(known)}, got {', '.join(values)}"
        ) from cause


@public()
def edit_to_json(edit: Edit) -> dict[str, object]:
    """An edit as JSON: the place, the change, and `at` and `rows` where they restrict it.

    Args:
        edit: the edit.

    Returns:
        Object with `where`, `change` and the fields of the change, and where they are set `at` (an index by dim) and
        `rows`.

    See Also:
        `edit_from_json`: the way back. `edit_to_python`: as code.

    Example:
        >>> edit_to_json(Edit((3, 5), Zero(), at={"pos": 2}))
        {'where': 'L3H5', 'change': 'zero', 'at': {'pos': 2}}
    """
    at: dict[str, object] = {dim: _index_to_json(i) for dim, i in edit.at.items()}
    return {
        "where": edit.name,
        **change_to_json(edit.change),
        **({"at": at} if at else {}),
        **({"rows": list(edit.rows)} if edit.rows is not None else {}),
    }


@public()
def edit_from_json(entry: object) -> Edit:
    """The edit that `edit_to_json` wrote.

    Args:
        entry: the JSON object, as read.

    Returns:
        The `Edit`.

    Raises:
        ValueError, KeyError: an object that is not an edit; the message names what is wrong.
    """
    if not isinstance(entry, Mapping) or not isinstance(entry.get("where"), str):
        raise ValueError(f"an edit as JSON is required, an object with the key 'where', got {entry!r:.200}")
    at, rows = entry.get("at", {}), entry.get("rows")
    if not isinstance(at, Mapping):
        raise ValueError(f"'at' holds an index by dim, got {at!r}")
    at = {
        dim: PerRow(i["per_row"]) if isinstance(i, Mapping) and set(i) == {"per_row"} else i
        for dim, i in at.items()
    }
    change = change_from_json(
        {key: value for key, value in entry.items() if key not in ("where", "at", "rows")}
    )
    if rows is not None and not (isinstance(rows, Sequence) and all(isinstance(i, int) for i in rows)):
        raise ValueError(f"'rows' holds row numbers, got {rows!r}")
    return Edit(str(entry["where"]), change, dict(at), None if rows is None else tuple(rows))


@public()
def edit_to_python(edit: Edit) -> str:
    """An edit as a Python expression, which makes the same edit where `interp` and `torch` are imported.

    Args:
        edit: the edit.

    Returns:
        The expression.

    Example:
        >>> edit_to_python(Edit("L3.mlp", Scale(0.5), at={"pos": (0, 1)}))
        "interp.Edit('L3.mlp', interp.edits.Scale(0.5), at={'pos': (0, 1)})"
    """
    at = ", ".join(
        f"{dim!r}: {'interp.edits.' if isinstance(i, PerRow) else ''}{i!r}" for dim, i in edit.at.items()
    )
    ends = [f", at={{{at}}}"] if edit.at else []
    ends += [f", rows={edit.rows!r}"] if edit.rows is not None else []
    return f"interp.Edit({edit.name!r}, {change_to_python(edit.change)}{''.join(ends)})"


def _index_to_json(index: PositionIndex) -> object:
    """An index as JSON: a number, a list, "new", or one for each row as an object."""
    if isinstance(index, ByRole):
        return {"role": index.role} if index.turn is None else {"role": index.role, "turn": index.turn}
    if isinstance(index, PerRow):
        return {"per_row": list(index.places)}
    return list(index) if isinstance(index, tuple) else index


def change_to_python(change: Change) -> str:
    """A closed change as Python, fields at their defaults left out. ValueError for a function."""
    change_to_json(change)
    arguments: list[str] = []
    for place, (name, value) in enumerate(_fields(change).items()):
        first = place == 0 and not arguments and name == next(iter(_every_field(change)))
        arguments.append(_python(value) if first else f"{name}={_python(value)}")
    return f"interp.edits.{type(change).__name__}({', '.join(arguments)})"


def _fields(change: Change) -> dict[str, object]:
    """The fields that differ from their defaults, and every field without one."""
    with_defaults = {name: (getattr(change, name), usual) for name, usual in _every_field(change).items()}
    return {
        name: value
        for name, (value, usual) in with_defaults.items()
        if isinstance(value, Tensor) or value != usual
    }


def _every_field(change: Change) -> dict[str, object]:
    """The fields of a closed change with their defaults."""
    assert is_dataclass(change) and not isinstance(change, type)
    return {field.name: field.default for field in fields(change)}


def _to_json(value: object) -> object:
    if isinstance(value, Tensor):
        host = value.detach().cpu().contiguous()
        raw = host.flatten().view(torch.uint8).numpy().tobytes() if host.numel() else b""
        name = str(host.dtype).removeprefix("torch.")
        return {"dtype": name, "shape": list(host.shape), "bytes": base64.b64encode(raw).decode()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    assert isinstance(value, bool | int | float | str)
    return value


def _from_json(value: object) -> object:
    if isinstance(value, Mapping):
        if set(value) != {"dtype", "shape", "bytes"}:
            raise ValueError(f"a tensor as JSON has dtype, shape and bytes, got {sorted(value)}")
        dtype = getattr(torch, str(value["dtype"]), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"unknown dtype {value['dtype']!r}")
        raw = np.frombuffer(base64.b64decode(str(value["bytes"])), dtype=np.uint8).copy()
        return torch.from_numpy(raw).view(dtype).reshape(value["shape"])
    if value in ("inf", "-inf", "nan"):
        return float(str(value))
    if isinstance(value, list):
        return torch.tensor(value, dtype=torch.float32, device="cpu")
    return value


def _python(value: object) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    if not isinstance(value, Tensor):
        return repr(value)
    plain = value.dtype in (torch.float32, torch.float64) and bool(value.isfinite().all())
    if value.numel() <= SHORT and plain:
        ending = ", dtype=torch.float64" if value.dtype == torch.float64 else ""
        return f"torch.tensor({value.tolist()}{ending})"
    return f"interp.passes.edit_text.tensor_from_json({_to_json(value)!r})"


def tensor_from_json(value: object) -> Tensor:
    """The tensor that JSON stores as dtype, shape and bytes. ValueError for anything else."""
    tensor = _from_json(value)
    if not isinstance(tensor, Tensor):
        raise ValueError(f"a tensor as JSON is required, got {value!r:.200}")
    return tensor
