"""Fingerprints of runs: everything that decides a number, as JSON that is equal in every process.

Two runs with equal fingerprints compute equal numbers.

A function of this package or of an installed one is known by its name. One of the user's is known by its code and by
all that it holds: defaults, what it closes over, the globals and other functions that it names. Objects are known by
what pickling would keep of them. What even that cannot say, such as an open file, is marked with the reason: a run may
begin with it, but none can be gone on with (`incomparable`).
"""

import copyreg
import functools
import hashlib
import sys
import sysconfig
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from interp.passes.question import ByRow
from interp.runs.provenance import bytes_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MARK = "cannot be compared"
"""The key under which a fingerprint says why a value has none."""
_INSTALLED = tuple(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib"))


def fingerprint(value: object) -> object:
    """A value as JSON, the same in every process."""
    return _Walk().of(value)


def incomparable(found: object, place: str = "") -> Iterator[str]:
    """The things in a fingerprint that cannot be compared with an earlier state, with the reason."""
    if isinstance(found, Mapping):
        if MARK in found:
            yield f"{place} ({found[MARK]})"
        for name, each in found.items():
            yield from incomparable(each, f"{place}.{name}" if place else str(name))
    elif isinstance(found, list):
        for i, each in enumerate(found):
            yield from incomparable(each, f"{place}.{i}" if place else str(i))


@dataclass(eq=False)
class _Walk:
    """One walk through a value: a function or class that several places name is described at the first of them."""

    told: set[int] = field(default_factory=set)
    above: list[object] = field(default_factory=list)
    """The objects that contain the current one."""

    def of(self, value: object) -> object:
        """A value as JSON."""
        if value is None or isinstance(value, str | int | float):
            return value
        if any(each is value for each in self.above):
            return f"{type(value).__qualname__} that holds this"
        self.above.append(value)
        try:
            return self._of(value)
        finally:
            self.above.pop()

    def _of(self, value: object) -> object:
        if (found := self._of_numbers(value)) is not None:
            return found
        if isinstance(value, functools.partial):
            return {"of": self.of(value.func), "args": self.of(value.args), **self.each(value.keywords)}
        if is_dataclass(value) and not isinstance(value, type):
            return self._record(value)
        if isinstance(value, Mapping | list | tuple | set | frozenset):
            return self._container(value)
        if isinstance(value, nn.Module):
            return {**self._kind(type(value)), "shown": repr(value), **self.each(value.state_dict())}
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, FunctionType | MethodType | BuiltinFunctionType | ModuleType):
            return self._called(value)
        if isinstance(value, weakref.ReferenceType):
            return "weakref"
        wrapped = getattr(value, "__wrapped__", None)  # of functools.cache, say
        return self._object(value) if wrapped is None else self.of(wrapped)

    def _record(self, value: "DataclassInstance") -> object:
        values = {f.name: getattr(value, f.name) for f in fields(value)}
        if isinstance(value, ByRow):
            return self.each(
                {name: each for name, each in values.items() if name != "result"}
            )  # labels no number
        return self._kind(type(value)) | self.each(values)

    def _container(self, value: Mapping[str, object] | Iterable[object]) -> object:
        if isinstance(value, Mapping):
            return self.each(value)
        found = [self.of(each) for each in value]
        return sorted(found, key=repr) if isinstance(value, set | frozenset) else found

    def _of_numbers(self, value: object) -> str | None:
        """Arrays by their hash; None for anything else."""
        if isinstance(value, torch.Generator):
            value = value.get_state()
        if isinstance(value, Tensor):
            return f"tensor {value.dtype} {list(value.shape)} {_hash(bytes_of(value))}"
        if isinstance(value, np.ndarray) and value.dtype != object:
            return f"array {value.dtype} {list(value.shape)} {_hash(value.tobytes())}"
        return _hash(value) if isinstance(value, bytes | bytearray) else None

    def each(self, values: Mapping[str, object]) -> dict[str, object]:
        """Values by name."""
        return {str(name): self.of(value) for name, value in values.items()}

    def _called(self, value: FunctionType | MethodType | BuiltinFunctionType | ModuleType) -> object:
        if isinstance(value, ModuleType):
            return value.__name__
        name = f"{value.__module__}.{value.__qualname__}"
        if isinstance(value, MethodType):
            return {"of": self.of(value.__func__), "self": self.of(value.__self__)}
        if isinstance(value, BuiltinFunctionType):
            return name
        if id(value) in self.told or (_is_installed(value.__module__) and "<" not in name):
            return name
        self.told.add(id(value))
        return {"of": name, "code": _hash(repr(_code(value.__code__)).encode()), **self._held(value)}

    def _held(self, function: FunctionType) -> dict[str, object]:
        """The values that a function carries besides its code, by name: closure, defaults and globals."""
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        closed = {name: _contents(cell) for name, cell in cells}
        named = set(_names(function.__code__))
        globals_ = {name: function.__globals__[name] for name in sorted(named & function.__globals__.keys())}
        for module, each in list(globals_.items()):
            if isinstance(each, ModuleType):
                del globals_[module]
                if not _is_installed(each.__name__):
                    globals_ |= {f"{module}.{n}": vars(each)[n] for n in sorted(named & vars(each).keys())}
        given = {"defaults": function.__defaults__, "keyword_defaults": function.__kwdefaults__}
        return self.each({**globals_, **closed, **{name: each for name, each in given.items() if each}})

    def _class(self, kind: type) -> object:
        """A class: by its name, the user's also by its methods."""
        found = self._kind(kind)
        return found["of"] if len(found) == 1 else found

    def _kind(self, kind: type) -> dict[str, object]:
        name = kind.__qualname__
        if id(kind) in self.told or _is_installed(kind.__module__):
            return {"of": name}
        self.told.add(id(kind))
        members: dict[str, object] = {
            n: each for n, each in vars(kind).items() if isinstance(each, _FUNCTIONS)
        }
        members |= {
            n: x for n, x in vars(kind).items() if isinstance(x, _CONSTANTS) and not n.startswith("__")
        }
        opened = {n: _function(each) for n, each in members.items()}
        bases = [self._class(base) for base in kind.__bases__ if not _is_installed(base.__module__)]
        methods = {n: each for n, each in opened.items() if not _generated(each)}
        return {"of": name, "class": self.each(methods), **({"bases": bases} if bases else {})}

    def _object(self, value: object) -> object:
        """An object by what pickling would keep of it."""
        try:
            known = copyreg.dispatch_table.get(type(value))
            kept = value.__reduce_ex__(4) if known is None else known(value)
        except Exception as cause:
            reason = " ".join(str(cause).split()) or type(cause).__name__
            return {"of": type(value).__qualname__, MARK: reason}
        if isinstance(kept, str):
            return kept
        parts = [list(each) if isinstance(each, Iterator) else each for each in kept[1:]]
        return {**self._kind(type(value)), "kept": [self.of(each) for each in parts if each is not None]}


_FUNCTIONS = (FunctionType, staticmethod, classmethod, property)
_CONSTANTS = (str, int, float, tuple, list, dict, Tensor)
"""Attributes of a user's class that decide what its methods compute."""


def _generated(function: object) -> bool:
    """Whether a method was made by a decorator such as `dataclass`: it says nothing that the fields do not."""
    return isinstance(function, FunctionType) and function.__code__.co_filename.startswith("<string>")


def _function(member: object) -> object:
    """The function in a member of a class."""
    if isinstance(member, property):
        return member.fget
    return member.__func__ if isinstance(member, staticmethod | classmethod) else member


def _contents(cell: object) -> object:
    try:
        return cell.cell_contents  # type: ignore[attr-defined]
    except ValueError:  # not set yet
        return None


def _is_installed(module: str) -> bool:
    """Whether a module is of this package, of Python or of an installed one, rather than the user's."""
    root = module.partition(".")[0]
    if root == "interp" or root in sys.builtin_module_names:
        return True
    file = getattr(sys.modules.get(root), "__file__", None)
    return file is not None and any(Path(file).is_relative_to(place) for place in _INSTALLED)


def _code(code: CodeType) -> list[object]:
    """A function's instructions, names and constants, those of functions in it included."""
    found: list[object] = [code.co_code, *code.co_names, *code.co_varnames]
    for each in code.co_consts:
        found.append(_code(each) if isinstance(each, CodeType) else each)
        if isinstance(each, frozenset):  # whose order is another one in every process
            found[-1] = sorted(map(repr, each))
    return found


def _names(code: CodeType) -> Iterator[str]:
    """The names that a function and those in it look up."""
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names(each)


def _hash(data: bytes | bytearray) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
