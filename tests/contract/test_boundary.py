"""What arrives at any public function with the wrong kind in any argument: it works, or is refused in words of our own.

`python -m tests.contract.test_boundary` prints how many cases there are by function, and how they end.
"""

import ast
import collections
import contextlib
import functools
import inspect
import io
import math
import os
import re
import sys
import tempfile
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr

import interp
from interp.core.boundary import fits, hints_of
from tests.contract.calls import CALLS, NOT_RUN, REFUSES, called, public_methods, public_names, valid
from tests.loops import every, same_seeds

PACKAGE = Path(interp.__file__).parent
FUNCTIONS = {**dict(public_names()), **dict(public_methods())}


def _letters() -> Iterator[str]:
    yield from "ab"


WRONG: Mapping[str, Callable[[], object]] = {
    "None": lambda: None,
    "a number": lambda: 3,
    "a negative number": lambda: -1,
    "a fraction": lambda: 2.5,
    "not a number": lambda: math.nan,
    "a truth": lambda: True,
    "a word": lambda: "nonsense",
    "bytes": lambda: b"bytes",
    "a mixed list": lambda: ["a", 3, None],
    "an empty list": list,
    "a mapping": lambda: {"a": 1},
    "a set": lambda: {1, 2},
    "a class": lambda: dict,
    "a function": lambda: len,
    "a question's function": lambda: interp.heads,
    "a module": lambda: math,
    "an object": object,
    "a generator": _letters,
    "fractions of three axes": lambda: torch.ones(2, 3, 4),
    "ids of one axis": lambda: torch.arange(7),
    "an array": lambda: np.ones((2, 2)),
    "a table": lambda: pd.DataFrame({"a": [1]}),
    "another result": lambda: xr.Dataset({"a": ("b", [1.0])}),
    "a model": lambda: torch.nn.Linear(2, 2),
}
"""What is put in the place of every argument, one at a time."""

OTHER_WORDS = {
    **dict.fromkeys(("data", "clean", "corrupt", "batch", "text", "prompts"), "prompt|row|token|batch|examples"),
    **dict.fromkeys(("answer", "wrong", "sources"), "token|answers"),
    **dict.fromkeys(("estimate", "exact"), "effects"),
    **dict.fromkeys(("heads", "where"), "a part is required"),
    "reference": "prompt|row|mean prediction",
    "second": "conditions", "parts": "a neuron", "replacement": "a baseline", "held": "an edit as JSON",
    "values": "model_type", "d_model": "d_mlp", "scores": "sender", "labels": "classes", "queries": "query",
    "at": "has the dims", "matrices": "at least one matrix", "planted": "an edge", "shard_entries": "per shard",
    "end": "finish with", "pairs": "at least one prompt", "path": "is no file", "tokenizer": "is no file",
    "dtype": "is no file", "device": "is no file",
}  # fmt: skip
"""What else messages call an argument."""


def _raises(path: str, line: int) -> bool:
    """Whether a line of a file belongs to a statement that raises."""
    return any(first <= line <= last for first, last in _raising(path))


@functools.cache
def _raising(path: str) -> list[tuple[int, int]]:
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    return [(node.lineno, node.end_lineno or 0) for node in ast.walk(tree) if isinstance(node, ast.Raise)]


def raw(error: Exception, argument: str, value: object) -> str | None:
    """What is wrong with a refusal; None for one of our own, raised on purpose, that names what is wrong.

    What a function of the user's raises where it is called is his own business.
    """
    frames = traceback.extract_tb(error.__traceback__)
    last = [frame for frame in frames if Path(frame.filename).is_relative_to(PACKAGE)][-1]
    if callable(value) and {f"{argument}(", "accept("} & {*re.findall(r"\w+\(", last.line or "")}:
        return None
    if last is not frames[-1] or not _raises(last.filename, last.lineno or 0):
        return "raised from inside"
    if not isinstance(error, ValueError | KeyError | IndexError | FileNotFoundError | FileExistsError):
        return "of another kind"
    message = str(error)
    words = [argument, argument.rstrip("s"), type(value).__name__, getattr(value, "__name__", argument)]
    told = [rf"(?i)\b{re.escape(word)}" for word in words]
    told.append(rf"(?<![\w.]){re.escape(repr(value).strip().partition(chr(10))[0][:12])}")
    if isinstance(value, str):
        told.append(re.escape(value))
    told.append(OTHER_WORDS.get(argument, "^$"))
    return None if any(re.search(pattern, message) for pattern in told) else "names nothing"


def cases(name: str) -> Iterator[tuple[str, str]]:
    """Every argument of a function with everything that is put there."""
    for parameter in inspect.signature(FUNCTIONS[name]).parameters.values():
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            for wrong in WRONG:
                yield parameter.name, wrong


def outcome(name: str, argument: str, wrong: str) -> str:
    """How a call ends whose one argument is another thing: "works", "refused", or what is wrong with the refusal."""
    function = FUNCTIONS[name]
    given = {**_valid(name), argument: WRONG[wrong]()}
    value = given[argument]
    hint = hints_of(function.__init__ if isinstance(function, type) else function).get(argument)
    if name in NOT_RUN and hint is not None and fits(value, hint):
        return "works"
    same_seeds()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            called(name, function, given)
    except Exception as error:
        problem = raw(error, argument, value)
        return "refused" if problem is None else f"{problem}: {type(error).__name__}: {error}"
    return "works"


@functools.cache
def _valid(name: str) -> Mapping[str, object]:
    return types.MappingProxyType(valid(name, FUNCTIONS[name]))


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_line_of_the_table_is_a_public_name() -> None:
    assert set(CALLS) - set(FUNCTIONS) == set()
    assert len(FUNCTIONS) > 200


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in {*NOT_RUN, *REFUSES}])
def test_the_valid_call_is_valid(name: str) -> None:
    called(name, FUNCTIONS[name], _valid(name))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_wrong_kind_works_or_is_refused_by_name(name: str) -> None:
    with every() as case:
        for argument, wrong in cases(name):
            with case(argument, wrong):
                found = outcome(name, argument, wrong)
                assert found in ("works", "refused"), found


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_argument_that_is_not_there_is_refused_by_name(name: str) -> None:
    function = FUNCTIONS[name]
    kinds = {each.kind for each in inspect.signature(function).parameters.values()}
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        with pytest.raises(TypeError, match="nonsense"):
            function(**_valid(name), nonsense=1)


if __name__ == "__main__":
    total: collections.Counter[str] = collections.Counter()
    for name in FUNCTIONS:
        os.chdir(tempfile.mkdtemp())
        ends = collections.Counter()
        for argument, wrong in cases(name):
            end = outcome(name, argument, wrong)
            ends[end.partition(":")[0]] += 1
            if end not in ("works", "refused"):
                sys.stdout.write(f"  {name}({argument} = {wrong}): {end[:300]}\n")
        total += ends
        sys.stdout.write(f"{name}: {dict(ends)}\n")
    sys.stdout.write(f"{len(FUNCTIONS)} functions, {total.total()} cases: {dict(total)}\n")
