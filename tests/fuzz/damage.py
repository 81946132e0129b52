"""Files that are damaged: cut, flipped, of other kinds, with other values in every field, or not files at all."""

import copy
import json
import os
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

Change = Callable[[Path], object]


@dataclass(frozen=True)
class Damage:
    """What is done to a file, in words, and what a refusal may call it besides the file's own name."""

    what: str
    done: Change
    names: tuple[str, ...] = ()


_ODD: tuple[object, ...] = (
    None, True, 0, -1, 3, 1.5, 10**9, 10**18, 10**400, float("nan"), float("inf"), "", "x", "X" * 10_000,
    "\x00", [], [1], ["x", None],
    [[]], {}, {"a": 1},
)  # fmt: skip
ODD = tuple((repr(each)[:20], each) for each in _ODD)
"""What is put in the place of every entry of a JSON file, and how it is shown."""


def damages(file: Path, draw: random.Random) -> Iterator[Damage]:
    """Every kind of damage to a file, with those that depend on its content."""
    content = file.read_bytes()
    yield from _of_any(content, draw)
    if file.suffix == ".json":
        yield from _of_json(json.loads(content))
    if file.suffix == ".safetensors":
        yield from _of_safetensors(content)


def _of_any(content: bytes, draw: random.Random) -> Iterator[Damage]:
    size = max(len(content), 1)
    for place in sorted({0, 1, 7, 8, 9, size // 2, size - 1, *(draw.randrange(size) for _ in range(6))}):
        yield Damage(f"cut at {place} of {size}", _writes(content[:place]))
    for place in sorted({0, 8, *(draw.randrange(size) for _ in range(10))}):
        flipped = bytearray(content or b"\0")
        flipped[min(place, len(flipped) - 1)] ^= 1 << draw.randrange(8)
        yield Damage(f"a bit flipped at {place} of {size}", _writes(bytes(flipped)))
    yield Damage("written twice", _writes(content * 2))
    yield Damage("all zero", _writes(bytes(size)))
    yield Damage("noise", _writes(draw.randbytes(min(size, 4096))))
    yield Damage("not UTF-8", _writes(b"\xff\xfe\x00{" + content[:100]))
    yield Damage("gone", lambda file: file.unlink())
    yield Damage("a folder", _instead(lambda file: file.mkdir()))
    yield Damage("a pipe", _instead(os.mkfifo))
    yield Damage("a link to nothing", _instead(lambda file: file.symlink_to("nowhere")))
    yield Damage("a link to itself", _instead(lambda file: file.symlink_to(file.name)))


def _of_json(held: object) -> Iterator[Damage]:
    for what, text in {
        "nested": "[" * 100_000, "nested objects": '{"a":' * 100_000, "empty": "", "a list": "[]",
        "a number": "3", "null": "null",
        "NaN": "NaN", "a text": '"text"', "an empty object": "{}",
        "with a byte order mark": "\ufeff" + json.dumps(held),
        "a long number": '{"a": ' + "9" * 5000 + "}",
    }.items():  # fmt: skip
        yield Damage(what, _writes(text.encode()))
    if isinstance(held, dict) and held:
        key = next(iter(held))
        text = json.dumps(held)
        yield Damage(f"{key} twice", _writes((text[:-1] + f', "{key}": null}}').encode()), (key,))
        yield Damage("one key more", _writes(json.dumps({**held, "nonsense": 1}).encode()), ("nonsense",))
    for path in paths(held):
        names = tuple(str(each) for each in path if isinstance(each, str))
        where = ".".join(map(str, path))
        yield Damage(f"without {where}", _of(held, path), names)
        for shown, odd in ODD:
            yield Damage(f"{where} = {shown}", _of(held, path, odd), names)


def _of_safetensors(content: bytes) -> Iterator[Damage]:
    (length,) = struct.unpack("<Q", content[:8])
    header, rest = json.loads(content[8 : 8 + length]), content[8 + length :]
    for claimed in (0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1):
        yield Damage(f"a header of {claimed} bytes", _writes(struct.pack("<Q", claimed) + content[8:]))
    yield Damage("a nested header", _writes(struct.pack("<Q", 50_000) + b"[" * 50_000 + rest))
    for path in paths(header):
        names, where = tuple(str(each) for each in path if isinstance(each, str)), ".".join(map(str, path))
        yield Damage(f"header without {where}", partial(_header, header, rest, path, ()), names)
        for shown, odd in ODD:
            done = partial(_header, header, rest, path, (odd,))
            yield Damage(f"header {where} = {shown}", done, names)


def _header(
    header: object, rest: bytes, path: tuple[str | int, ...], new: tuple[object, ...], file: Path
) -> None:
    """Write a safetensors file with another entry in its header, or without it; made when it is needed."""
    text = json.dumps(changed(header, path, *new)).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + rest)


def paths(value: object, above: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """The way to everything in a JSON value; of a long list to its first entries."""
    inside: list[tuple[str | int, object]] = []
    if isinstance(value, dict):
        inside = list(value.items())[:200]
    elif isinstance(value, list):
        inside = list(enumerate(value))[:3]
    return [path for key, each in inside for path in [(*above, key), *paths(each, (*above, key))]]


def changed(value: object, path: tuple[str | int, ...], *new: object) -> object:
    """The value with another one at the end of this way, or without that entry."""
    copied = copy.copy(value)
    assert isinstance(copied, dict | list)
    if len(path) > 1:
        copied[path[0]] = changed(copied[path[0]], path[1:], *new)  # type: ignore[index]
    elif new:
        copied[path[0]] = new[0]  # type: ignore[index]
    else:
        del copied[path[0]]  # type: ignore[arg-type]
    return copied


def _of(held: object, path: tuple[str | int, ...], *new: object) -> Change:
    return lambda file: file.write_text(json.dumps(changed(held, path, *new)), encoding="utf-8")


def _writes(content: bytes) -> Change:
    return lambda file: file.write_bytes(content)


def _instead(make: Change) -> Change:
    def done(file: Path) -> None:
        file.unlink()
        make(file)

    return done
