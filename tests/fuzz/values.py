"""What is put in the place of an argument: things of a wrong kind, and things of the right kind that cannot be
meant."""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import xarray as xr

import interp


def _letters() -> Iterator[str]:
    yield from "ab"


Made = Callable[[], object]
WRONG: Mapping[str, Made] = {
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
    "a complex number": lambda: 1j,
}
"""Of a wrong kind nearly everywhere."""
DOUBTFUL: Mapping[str, Made] = {
    **{
        str(number): lambda number=number: number
        for number in (0, 1, 10**9, 10**18, 2**70, -(10**9), 0.0, -0.5, 1e-300, 1e300, math.inf, -math.inf)
    },
    "a numpy number": lambda: np.int64(3),
    **{
        repr(word): lambda word=word: word
        for word in ("", " ", "\x00", "L9H9", "L0H99", "blocks.9.hook_z", "blocks.0.hook_resid_pst", "~", "../x")
    },
    "a lone surrogate": lambda: "\ud800",
    "a long word": lambda: "ab " * 20_000,
    **{
        f"the list {each!r}": lambda each=each: each
        for each in (
            [0], [-1], [10**9], [10**18], [2**70], [-(10**9)], [1.5], [math.nan], [True], [""], [[]], [[], []], [[1, 2],
            [3]], [[[1]]],
            [[10**9]], [["a"]], [None], [0, 0], ["a"], ["a", "a"], ["L0H1", "L0H1"], ["L9H9"],
        )
    },
    "an empty tuple": tuple,
    "an empty mapping": dict,
    "a range": lambda: range(3),
    "an empty range": lambda: range(0),
    "many numbers": lambda: list(range(5000)),
    "a number in a tensor": lambda: torch.tensor(3),
    "ids of three axes": lambda: torch.ones(2, 3, 4, dtype=torch.long),
    "ids beyond the vocabulary": lambda: torch.tensor([[5, 10**9]]),
    "negative ids": lambda: torch.tensor([[5, -1]]),
    "no rows": lambda: torch.empty(0, 9, dtype=torch.long),
    "empty rows": lambda: torch.empty(2, 0, dtype=torch.long),
    "one id": lambda: torch.tensor([[5]]),
    "truths": lambda: torch.ones(2, 9, dtype=torch.bool),
    "NaN in a tensor": lambda: torch.full((2, 9), math.nan),
    "no numbers": lambda: torch.empty(0),
    "complex numbers": lambda: torch.ones(2, 9, dtype=torch.complex64),
    "small whole numbers": lambda: torch.ones(2, 9, dtype=torch.uint8),
    "ids of 32 bits": lambda: torch.ones(2, 9, dtype=torch.int32),
    "sparse ids": lambda: torch.ones(2, 9, dtype=torch.long).to_sparse(),
    "an array of ids": lambda: np.ones((2, 9), dtype=np.int64),
    "an array of objects": lambda: np.array([None, "a"], dtype=object),
    "an array of words": lambda: np.array(["a", "b"]),
    "a folder": lambda: Path("."),
    "a path to nothing": lambda: Path("nowhere") / "at all",
    "an empty table": lambda: pd.DataFrame(),
    "an empty result": xr.Dataset,
}  # fmt: skip
"""What could be meant somewhere, and at most places cannot."""


def near(usual: object) -> Iterator[tuple[str, Made]]:
    """What is close to the value of a valid call and is not it."""
    if isinstance(usual, str):
        yield "in capitals", lambda: usual.upper()
        yield "with a letter more", lambda: f"{usual}x"
        yield "without its last letter", lambda: usual[:-1]
    elif isinstance(usual, bool):
        yield "as a number", lambda: int(usual)
    elif isinstance(usual, int | float):
        yield "negative", lambda: -usual
        yield "a half more", lambda: usual + 0.5
    elif isinstance(usual, torch.Tensor):
        yield from _near_tensor(usual)
    elif isinstance(usual, list | tuple):
        yield "twice as long", lambda: type(usual)([*usual, *usual])
        yield "one short", lambda: type(usual)(usual[:-1])
        yield "nested", lambda: [usual]
    elif isinstance(usual, Mapping):
        yield "with a key more", lambda: {**usual, "nonsense": 1}
        yield "without its first key", lambda: dict(list(usual.items())[1:])
        for key in list(usual)[:6]:
            yield f"None for {key}", lambda key=key: {**usual, key: None}
    elif isinstance(usual, xr.Dataset):
        for what, _, make in damaged(usual):
            yield what, make


def damaged(result: xr.Dataset) -> Iterator[tuple[str, str, Made]]:
    """A result that something was done to, in words, the name of what it was done to, and how it is made."""
    yield "of NaN", "value", lambda: result.where(False) if result.data_vars else result
    yield "of one entry", "", lambda: result.isel({dim: [0] for dim in result.dims})
    yield "without attributes", "attribute", lambda: result.drop_attrs()
    for name in map(str, result.variables):
        yield f"without {name}", name, lambda name=name: result.drop_vars(name)
    for name in map(str, result.data_vars):
        yield f"{name} renamed", name, lambda name=name: result.rename({name: f"{name}_2"})
    for name in map(str, result.attrs):
        yield f"without the attribute {name}", name, lambda name=name: _without(result, name)
    for dim in map(str, result.dims):
        yield f"the first {dim}", dim, lambda dim=dim: result.isel({dim: 0})
        yield f"no {dim}", dim, lambda dim=dim: result.isel({dim: []})


def _without(result: xr.Dataset, attribute: str) -> xr.Dataset:
    return result.drop_attrs(deep=False).assign_attrs(
        {k: v for k, v in result.attrs.items() if k != attribute}
    )


def _near_tensor(usual: torch.Tensor) -> Iterator[tuple[str, Made]]:
    yield "as truths", lambda: usual.bool()
    yield "in half precision", lambda: usual.half()
    yield "as whole numbers", lambda: usual.long()
    yield "as an array", lambda: usual.detach().numpy()
    yield "as a list", lambda: usual.tolist()
    yield "one row less", lambda: usual[:-1]
    yield "no row", lambda: usual[:0]
    yield "one column less", lambda: usual[..., :-1]
    yield "in one more axis", lambda: usual[None]
    yield "turned", lambda: usual.mT if usual.ndim > 1 else usual[:, None]
    yield "without memory", lambda: usual.to("meta")
    yield "sparse", lambda: usual.to_sparse()
    if usual.is_floating_point():
        yield "with NaN", lambda: usual * math.nan
        yield "infinite", lambda: usual * math.inf
        yield "zero", lambda: usual * 0
