"""What decides a number, as JSON: equal where all is equal, in every process, another wherever a number may change."""

import datetime
import decimal
import functools
import json
import os
import random
import re
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

import interp
from interp.core.stats import Rows
from interp.edits import Add, Zero
from interp.runs.fingerprint import fingerprint, incomparable
from tests.loops import over
from tests.tiny import hooked

OWN = """
import functools, math
from dataclasses import dataclass, field
K = {k}
class settings: N = {n}
def inner(x):
    return x * K + settings.N
def compute(x, scale={scale}, *, kw={kw}):
    def nested(y):
        return y + {nested}
    return nested(inner(x)) * scale * kw {op} 3 if x in {{"a", "b", "c"}} else math.pi
def closing(n):
    return lambda x: x * n
class Call:
    def __init__(self, n):
        self.n = n
    def __call__(self, x):
        return x * self.n {op} 2
    def method(self, x):
        return x
@dataclass(frozen=True)
class Record:
    n: int
    def __call__(self, x):
        return x {op} self.n
@functools.cache
def cached(x):
    return compute(x)
def loop(n):
    return loop(n - 1) if n else compute(n)
closed, call, record, method = closing({closed}), Call({attribute}), Record(1), Call({attribute}).method
part = functools.partial(compute, kw={kw})
EVERY = dict(compute=compute, closed=closed, call=call, record=record, method=method, part=part)
EVERY |= dict(cached=cached, loop=loop)
"""
SAID = {"k": 1, "n": 1, "scale": 1, "kw": 1, "nested": 1, "op": "+", "closed": 1, "attribute": 1}
CHANGED: dict[str, tuple[str, ...]] = {
    "k": ("compute", "part", "cached", "loop"), "n": ("compute", "part", "cached", "loop"),
    "scale": ("compute", "part", "cached", "loop"), "kw": ("compute", "part", "cached", "loop"),
    "nested": ("compute", "part", "cached", "loop"), "closed": ("closed",), "attribute": ("call", "method"),
    "op": ("compute", "call", "record", "method", "part", "cached", "loop"),
}  # fmt: skip


def written(**changed: object) -> dict[str, object]:
    """What a user's module holds whose source is this."""
    module = types.ModuleType("users_own")
    sys.modules["users_own"] = module
    exec(compile(OWN.format(**{**SAID, **changed}), "users_own.py", "exec"), module.__dict__)
    found: dict[str, object] = module.EVERY
    return found


@over("what", list(CHANGED))
def test_functions_fingerprint_changes_with_what_it_is_or_holds_alone(
    what: str,
) -> None:
    before, after = written(), written(**{what: "-" if what == "op" else 2})
    differ = [name for name in before if fingerprint(before[name]) != fingerprint(after[name])]
    assert sorted(differ) == sorted(CHANGED[what])
    assert all(fingerprint(value) == fingerprint(written()[name]) for name, value in before.items())


@pytest.mark.slow
def test_fingerprints_are_the_same_in_every_process() -> None:
    code = "import json; from tests.runs.test_fingerprint import written; "
    code += "from interp.runs.fingerprint import fingerprint; print(json.dumps(fingerprint(written()), sort_keys=True))"
    root = Path(interp.__file__).parents[1]
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"  # of another order of sets than here
    said = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert json.loads(said) == json.loads(json.dumps(fingerprint(written())))


@dataclass
class Pair:
    """Two values."""

    one: object
    two: object


def a_loop() -> list[object]:
    found: list[object] = [1]
    found.append(found)
    return found


VALUES: dict[str, tuple[Callable[[], object], ...]] = {
    "tensors": (lambda: torch.zeros(3), lambda: torch.zeros(4), lambda: torch.ones(3), lambda: torch.zeros(3).double()),
    "long arrays": (lambda: np.arange(5000), lambda: np.arange(5000) + (np.arange(5000) == 2500)),
    "sets": (lambda: {"a", "b"}, lambda: {"a", "c"}),
    "generators": (lambda: random.Random(0), lambda: random.Random(1)),
    "torch generators": (
        lambda: torch.Generator().manual_seed(0), lambda: torch.Generator().manual_seed(1)),
    "numpy generators": (lambda: np.random.default_rng(0), lambda: np.random.default_rng(1)),
    "dates": (lambda: datetime.date(2026, 1, 1), lambda: datetime.date(2026, 1, 2)),
    "decimals": (lambda: decimal.Decimal("1.0"), lambda: decimal.Decimal("1.1")),
    "patterns": (lambda: re.compile("a"), lambda: re.compile("b")),
    "namespaces": (lambda: types.SimpleNamespace(n=1), lambda: types.SimpleNamespace(n=2)),
    "records": (lambda: Pair(1, [2]), lambda: Pair(1, [3])),
    "modules": (lambda: torch.nn.ReLU(), lambda: torch.nn.GELU()),
    "edits": (
        lambda: interp.Edit("L0H1", Zero()), lambda: interp.Edit("L0H0", Zero()),
        lambda: interp.Edit("L0H1", Zero(), at={"pos": 1}), lambda: interp.Edit("L0.mlp", Add(torch.ones(24)))),
    "library": (lambda: torch.add, lambda: torch.mul, lambda: functools.partial(torch.add, 1), lambda: Rows),
    "itself": (a_loop, lambda: [1, [1]]),
    "enumerations": (lambda: torch.float32, lambda: torch.float64, lambda: torch.device("cpu")),
}  # fmt: skip


@over("kind", list(VALUES))
def test_values_of_every_kind_are_told_apart_and_known_again(kind: str) -> None:
    texts = [json.dumps(fingerprint(make())) for make in VALUES[kind]]
    assert texts == [json.dumps(fingerprint(make())) for make in VALUES[kind]]
    assert len(set(texts)) == len(texts)
    assert not [*incomparable([json.loads(text) for text in texts])]


@pytest.mark.parametrize("value", [threading.Lock(), (i for i in "ab"), sys.stdout.buffer], ids=type)
def test_what_cannot_be_compared_is_marked_with_the_reason(value: object) -> None:
    (said,) = incomparable(fingerprint({"compute": [1, value]}))
    assert re.fullmatch(r"compute\.1 \(cannot pickle .*\)", said)


def test_a_model_and_its_text_can_be_compared() -> None:
    model = hooked()
    found = fingerprint(
        {"model": model, "text": model.text, "edited": model.edited(interp.Edit("L0H1", Zero()))}
    )
    assert not [*incomparable(found)]
