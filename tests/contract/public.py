"""Public names and signatures as the last release had them, and what a change asks of version and CHANGELOG.

    python -m tests.contract.public            # what changed since the last release, and what is still to be said of it
    python -m tests.contract.public --write    # at a release: the names of today become those of the release

`public.json` has a line per name: the parameters of a function, of a class (its fields, if it is a record), of a public
method or of a command (its options), `*` before those by keyword; one word for anything else. Of two names of one
object the second says which the first is.
"""

import dataclasses
import functools
import hashlib
import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path, PurePath
from types import ModuleType
from typing import Literal, NamedTuple

from packaging.version import Version

import interp
from interp.cli import COMMANDS, command

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_suffix(".json")
HEADINGS = ("Breaking", "Added", "Changed", "Fixed", "Speed")
NOT_STABLE = ("interp.lab",)
"""Names of these may change in any release: `docs/stability.md`."""
KEYWORD, VARIABLE = (
    inspect.Parameter.KEYWORD_ONLY,
    (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD),
)
Signature = list[str] | str
"""Parameters in their order, or a word."""


class Change(NamedTuple):
    """One difference between two lists of public names."""

    name: str
    kind: Literal["breaking", "added"]
    says: str


# what is public


def public() -> dict[str, Signature]:
    """Every public name of today with its signature."""
    exported = [(name, value) for name, value in _exported() if not isinstance(value, ModuleType)]
    classes = {value for _, value in exported if inspect.isclass(value)}
    found: dict[str, Signature] = {}
    seen: dict[int, str] = {}
    for name, value in exported:
        first = seen.setdefault(id(value), name) if callable(value) else name
        found |= dict(_entries(name, value, classes)) if first == name else {name: f"is {first}"}
    for name in COMMANDS:
        found[f"interp {name}"] = ["*", *(each for each in _parameters(command(name)) if each != "*")]
    return dict(sorted(found.items()))


def _exported() -> Iterator[tuple[str, object]]:
    """Names of a first day, then those of the rooms and of the modules that these list."""
    yield from ((f"interp.{name}", getattr(interp, name)) for name in interp.HOMES)
    for room in (*interp.ROOMS, "zoo.planted", "zoo.shown"):
        module = importlib.import_module(f"interp.{room}")
        yield from ((f"interp.{room}.{name}", getattr(module, name)) for name in module.__all__)


def _entries(name: str, value: object, classes: Set[type]) -> Iterator[tuple[str, Signature]]:
    """A name, and of a class the public members that our code defines, unless one of the public classes lists them."""
    if not inspect.isclass(value):
        yield name, _parameters(value) if callable(value) else "value"
        return
    made_here = any("__init__" in vars(kind) or "__new__" in vars(kind) for kind in _ours(value))
    yield name, _parameters(value) if made_here or dataclasses.is_dataclass(value) else "class"
    fields = inspect.signature(value).parameters if made_here else {}
    members = {member for kind in _ours(value) for member in _names(kind)}
    listed = {member for kind in _ours(value)[1:] if kind in classes for member in _names(kind)}
    for member in sorted(members - listed - {*fields}):
        if not member.startswith("_") or member == "__call__":
            yield f"{name}.{member}", _member(value, member)


def _ours(kind: type) -> list[type]:
    """A class and those of our code that it inherits from."""
    return [each for each in kind.__mro__ if each.__module__.startswith("interp.")]


def _names(kind: type) -> Iterator[str]:
    """The names that a class defines or annotates."""
    yield from (*vars(kind), *inspect.get_annotations(kind))


def _member(kind: type, name: str) -> Signature:
    found = inspect.getattr_static(kind, name, None)
    if isinstance(found, staticmethod | classmethod):
        return _parameters(getattr(kind, name))
    if not inspect.isfunction(found):
        return "attribute"
    return _parameters(found)[1:]


def _parameters(of: object) -> list[str]:
    """Parameters of what is called, as `a`, `b=1`, `*args` or `**kwargs`, with `*` before those by keyword."""
    said: list[str] = []
    for each in inspect.signature(of).parameters.values():  # type: ignore[arg-type]
        if each.kind is KEYWORD and not any(one.startswith("*") for one in said):
            said.append("*")
        stars = {VARIABLE[0]: "*", VARIABLE[1]: "**"}.get(each.kind, "")
        said.append(
            f"{stars}{each.name}{'' if each.default is each.empty else f'={_short(_default(each.default))}'}"
        )
    return said


def _short(said: str) -> str:
    """A text, of a long one its beginning and a digest of the whole."""
    return said if len(said) <= 100 else f"{said[:60]}... ({hashlib.sha256(said.encode()).hexdigest()[:8]})"


def _default(value: object) -> str:
    """A default value as `repr` says it, alike on every machine; of a record the fields that are not its defaults."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        given = ((each, getattr(value, each.name)) for each in dataclasses.fields(value) if each.repr)
        said = (f"{each.name}={_default(one)}" for each, one in given if one is not each.default)
        return f"{type(value).__name__}({', '.join(said)})"
    if isinstance(value, PurePath):
        return f"Path({value.as_posix()!r})"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(_default, value))) + "}"
    if inspect.isroutine(value):
        return value.__qualname__
    return re.sub(r" at 0x\w+", "", repr(value))


# what differs


def changes(before: Mapping[str, Signature], after: Mapping[str, Signature]) -> list[Change]:
    """The differences of two lists of names, each as breaking or added; names that are not stable are left out."""
    found = [Change(name, "added", "is new") for name in after.keys() - before.keys()]
    found += [Change(name, "breaking", "is gone") for name in before.keys() - after.keys()]
    for name in before.keys() & after.keys():
        found += [Change(name, *each) for each in _changed(before[name], after[name])]
    return sorted(each for each in found if not each.name.startswith(NOT_STABLE))


def _changed(before: Signature, after: Signature) -> Iterator[tuple[Literal["breaking", "added"], str]]:
    if isinstance(before, str) or isinstance(after, str):
        if before != after:
            yield "breaking", f"is {_whole(after)}, was {_whole(before)}"
        return
    old, new = _read(before), _read(after)
    for name, (place, default) in old.items():
        if name not in new:
            yield "breaking", f"has no parameter {name!r} any more"
            continue
        where, value = new[name]
        if place is not None and where != place:
            yield "breaking", f"{name!r} is {_place(where)}, was {_place(place)}"
        elif where != place:
            yield "added", f"{name!r} may be given by position"
        if default is None and value is not None:
            yield "added", f"{name!r} may be left out"
        elif default != value:
            yield "breaking", f"{name}={value} was {name}={default}" if value else f"{name!r} is required"
    for name in new.keys() - old.keys():
        optional = new[name][1] is not None or name.startswith("*")
        yield ("added" if optional else "breaking"), f"has the new parameter {name!r}"


def _whole(said: Signature) -> str:
    return said if isinstance(said, str) else f"({', '.join(said)})"


def _read(parameters: Sequence[str]) -> dict[str, tuple[int | None, str | None]]:
    """Each parameter's place (None: by keyword, or any number of them) and its default."""
    found: dict[str, tuple[int | None, str | None]] = {}
    by_keyword = False
    for place, said in enumerate(parameters):
        name, equals, default = said.partition("=")
        by_keyword |= name.startswith("*")
        if name != "*":
            found[name] = (None if by_keyword else place, default if equals else None)
    return found


def _place(place: int | None) -> str:
    return "given by keyword" if place is None else f"parameter {place + 1}"


# what a difference asks


def sections(changelog: str) -> dict[str, dict[str, str]]:
    """The text of a CHANGELOG by version and heading, newest first."""
    versions = re.split(r"^## \[?([\w.]+)\]?.*\n", changelog, flags=re.MULTILINE)[1:]
    return {
        version: dict(zip(*[iter(re.split(r"^### (.+)\n", text, flags=re.MULTILINE)[1:])] * 2, strict=True))
        for version, text in zip(versions[::2], versions[1::2], strict=True)
    }


def unsaid(found: Sequence[Change], released: str, version: str, changelog: str) -> list[str]:
    """What version and CHANGELOG do not say yet of changes since a release, in a sentence each.

    While the first number of the version is 0, a breaking change and an added name raise the second; from 1.0 on a
    breaking change raises the first. Each name that breaks stands under Breaking of a version since the release.
    """
    old, new = Version(released), Version(version)
    news = {each: text for each, text in sections(changelog).items() if Version(each).release > old.release}
    said = "\n".join(text.get("Breaking", "") for text in news.values())
    missing = []
    for name, kind, says in found:
        raised = (
            (new.major,) > (old.major,)
            if kind == "breaking" and old.major
            else new.release[:2] > old.release[:2]
        )
        wanted = [] if raised else [f"a higher version than {version} (interp/core/version.py)"]
        if kind == "breaking" and not re.search(rf"\b{re.escape(name.split('.')[-1])}\b", said):
            wanted.append("a line under Breaking of CHANGELOG.md that names it")
        if wanted:
            missing.append(f"{kind}: {name} {says}; required: {' and '.join(wanted)}")
    return missing


def recorded() -> tuple[str, dict[str, Signature]]:
    """The version of the last release and its names."""
    stored = json.loads(FILE.read_text(encoding="utf-8"))
    return stored["version"], stored["names"]


@functools.cache
def today() -> tuple[list[Change], list[str]]:
    """The changes since the last release, and what is not said of them yet."""
    version, names = recorded()
    found = changes(names, public())
    return found, unsaid(
        found, version, interp.__version__, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    )


def write() -> None:
    """Make the names of today those of the last release."""
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(said)}" for name, said in public().items())
    text = f'{{\n "version": {json.dumps(interp.__version__)},\n "names": {{\n{lines}\n }}\n}}\n'
    FILE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write()
    else:
        found, missing = today()
        said = [f"{kind}: {name} {says}" for name, kind, says in found] or ["no change"]
        sys.stdout.write("\n".join([*said, "", *missing]) + "\n")
        sys.exit(bool(missing))
