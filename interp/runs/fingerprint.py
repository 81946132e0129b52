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
"""The key whose value is the reason why an object has no fingerprint."""
_INSTALLED = tuple(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib"))


def fingerprint(value: object) -> object:
    """A value as JSON, the same in every process."""
    return _Walk().of(value)


def incomparable(found: object, place: str = "") -> Iterator[str]:
    """The dotted path of every object in a fingerprint that has none of its own, with the reason in parentheses."""
    if isinstance(found, Mapping):
        if MARK in found:
            yield f"{place} ({found[MARK]})"
        for name, inner in found.items():
            yield from incomparable(inner, f"{place}.{name}" if place else str(name))
    elif isinstance(found, list):
        for i, inner in enumerate(found):
            yield from incomparable(inner, f"{place}.{i}" if place else str(i))


@dataclass(eq=False)
class _Walk:
    """One traversal of a value; a function or class that occurs several times is described at its first occurrence."""

    described: set[int] = field(default_factory=set)
    """The identities of functions and classes that are described already."""
    containers: list[object] = field(default_factory=list)
    """The objects that contain the current one."""

    def of(self, value: object) -> object:
        """The fingerprint of a value, as JSON."""
        if value is None or isinstance(value, str | int | float):
            return value
        if any(container is value for container in self.containers):
            return f"{type(value).__qualname__} that holds this"
        self.containers.append(value)
        try:
            return self._description(value)
        finally:
            self.containers.pop()

    def _description(self, value: object) -> object:
        """The fingerprint of a value that is no plain number or text, by its type."""
        if (array_hash := self._array_hash(value)) is not None:
            return array_hash
        if isinstance(value, functools.partial):
            return {"of": self.of(value.func), "args": self.of(value.args), **self.by_name(value.keywords)}
        if is_dataclass(value) and not isinstance(value, type):
            return self._record_description(value)
        if isinstance(value, Mapping | list | tuple | set | frozenset):
            return self._container_description(value)
        if isinstance(value, nn.Module):
            return {
                **self._class_entry(type(value)),
                "shown": repr(value),
                **self.by_name(value.state_dict()),
            }
        if isinstance(value, type):
            return self._class_description(value)
        if isinstance(value, FunctionType | MethodType | BuiltinFunctionType | ModuleType):
            return self._function_description(value)
        if isinstance(value, weakref.ReferenceType):
            return "weakref"
        wrapped = getattr(value, "__wrapped__", None)  # of functools.cache, say
        return self._object_description(value) if wrapped is None else self.of(wrapped)

    def _record_description(self, value: "DataclassInstance") -> object:
        values = {f.name: getattr(value, f.name) for f in fields(value)}
        if isinstance(value, ByRow):
            # `result` labels the numbers, it does not decide them
            return self.by_name({name: inner for name, inner in values.items() if name != "result"})
        return self._class_entry(type(value)) | self.by_name(values)

    def _container_description(self, value: Mapping[str, object] | Iterable[object]) -> object:
        if isinstance(value, Mapping):
            return self.by_name(value)
        items = [self.of(item) for item in value]
        return sorted(items, key=repr) if isinstance(value, set | frozenset) else items

    def _array_hash(self, value: object) -> str | None:
        """The dtype, shape and hash of an array, the hash of bytes; None for any other value."""
        if isinstance(value, torch.Generator):
            value = value.get_state()
        if isinstance(value, Tensor):
            return f"tensor {value.dtype} {list(value.shape)} {_hash(bytes_of(value))}"
        if isinstance(value, np.ndarray) and value.dtype != object:
            return f"array {value.dtype} {list(value.shape)} {_hash(value.tobytes())}"
        return _hash(value) if isinstance(value, bytes | bytearray) else None

    def by_name(self, values: Mapping[str, object]) -> dict[str, object]:
        """The fingerprint of each value, by its name."""
        return {str(name): self.of(value) for name, value in values.items()}

    def _function_description(
        self, value: FunctionType | MethodType | BuiltinFunctionType | ModuleType
    ) -> object:
        """The fingerprint of a function: the name of an installed one, for a user's also its code and its values."""
        if isinstance(value, ModuleType):
            return value.__name__
        name = f"{value.__module__}.{value.__qualname__}"
        if isinstance(value, MethodType):
            return {"of": self.of(value.__func__), "self": self.of(value.__self__)}
        if isinstance(value, BuiltinFunctionType):
            return name
        if id(value) in self.described or (_is_installed(value.__module__) and "<" not in name):
            return name
        self.described.add(id(value))
        return {
            "of": name,
            "code": _hash(repr(_code_parts(value.__code__)).encode()),
            **self._function_values(value),
        }

    def _function_values(self, function: FunctionType) -> dict[str, object]:
        """Fingerprints of a function's closure cells, defaults and the globals that it names, by name."""
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        closed = {name: _cell_contents(cell) for name, cell in cells}
        named = set(_names(function.__code__))
        globals_ = {name: function.__globals__[name] for name in sorted(named & function.__globals__.keys())}
        for module, inner in list(globals_.items()):
            if isinstance(inner, ModuleType):
                del globals_[module]
                if not _is_installed(inner.__name__):
                    globals_ |= {f"{module}.{n}": vars(inner)[n] for n in sorted(named & vars(inner).keys())}
        defaults = {"defaults": function.__defaults__, "keyword_defaults": function.__kwdefaults__}
        return self.by_name(
            {**globals_, **closed, **{name: inner for name, inner in defaults.items() if inner}}
        )

    def _class_description(self, kind: type) -> object:
        """The fingerprint of a class: the name of an installed class, for a user's class also its methods."""
        entry = self._class_entry(kind)
        return entry["of"] if len(entry) == 1 else entry

    def _class_entry(self, kind: type) -> dict[str, object]:
        """The name of a class, and for a user's class the first time its methods, constants and bases."""
        name = kind.__qualname__
        if id(kind) in self.described or _is_installed(kind.__module__):
            return {"of": name}
        self.described.add(id(kind))
        members: dict[str, object] = {
            n: member for n, member in vars(kind).items() if isinstance(member, _FUNCTIONS)
        }
        members |= {
            n: x for n, x in vars(kind).items() if isinstance(x, _CONSTANTS) and not n.startswith("__")
        }
        opened = {n: _member_function(member) for n, member in members.items()}
        bases = [
            self._class_description(base) for base in kind.__bases__ if not _is_installed(base.__module__)
        ]
        methods = {n: member for n, member in opened.items() if not _is_generated(member)}
        return {"of": name, "class": self.by_name(methods), **({"bases": bases} if bases else {})}

    def _object_description(self, value: object) -> object:
        """The fingerprint of an object: that of its class, and of the state that pickle would store."""
        try:
            known = copyreg.dispatch_table.get(type(value))
            state = value.__reduce_ex__(4) if known is None else known(value)
        except Exception as cause:
            reason = " ".join(str(cause).split()) or type(cause).__name__
            return {"of": type(value).__qualname__, MARK: reason}
        if isinstance(state, str):
            return state
        parts = [list(part) if isinstance(part, Iterator) else part for part in state[1:]]
        return {
            **self._class_entry(type(value)),
            "kept": [self.of(part) for part in parts if part is not None],
        }


_FUNCTIONS = (FunctionType, staticmethod, classmethod, property)
_CONSTANTS = (str, int, float, tuple, list, dict, Tensor)
"""Attributes of a user's class that decide what its methods compute."""


def _is_generated(function: object) -> bool:
    """Whether a decorator such as `dataclass` wrote the method, so that the fields say all about it."""
    return isinstance(function, FunctionType) and function.__code__.co_filename.startswith("<string>")


def _member_function(member: object) -> object:
    """The function behind a class member: that of a property, static method or class method."""
    if isinstance(member, property):
        return member.fget
    return member.__func__ if isinstance(member, staticmethod | classmethod) else member


def _cell_contents(cell: object) -> object:
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


def _code_parts(code: CodeType) -> list[object]:
    """The bytecode, names and constants of a function, including those of functions nested in it."""
    parts: list[object] = [code.co_code, *code.co_names, *code.co_varnames]
    for constant in code.co_consts:
        parts.append(_code_parts(constant) if isinstance(constant, CodeType) else constant)
        if isinstance(constant, frozenset):  # its order differs between processes
            parts[-1] = sorted(map(repr, constant))
    return parts


def _names(code: CodeType) -> Iterator[str]:
    """The global and attribute names that a function and the functions nested in it look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _hash(data: bytes | bytearray) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
