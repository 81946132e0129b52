"""Every public function that a model goes into, once on SmolLM2: it answers, its numbers are numbers, its memory is bounded.

The calls are those of `tests/real/calls.py`; `experiments/bench/real.py` prints what they cost.
"""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

from tests.contract.calls import called
from tests.real import calls
from tests.real.memory import OwnMemory

MIB = 2**20


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """The fixture of the real folder skips where the package index gives none."""
    monkeypatch.chdir(tmp_path)


def test_every_public_function_is_called_or_takes_no_real_model() -> None:
    assert set(calls.CALLS) - set(calls.FUNCTIONS) == set()
    assert set(calls.MISSING) | set(calls.LARGER) <= set(calls.CALLED)
    assert len(calls.CALLED) > 130


@pytest.mark.real
@pytest.mark.parametrize("name", calls.CALLED)
def test_the_call_answers_in_bounded_memory(name: str) -> None:
    given = calls.given(name)
    with warnings.catch_warnings(action="ignore"), OwnMemory() as memory:
        found = called(name, calls.function_of(name), given)
    assert memory.peak < calls.LARGER.get(name, calls.MOST) * MIB
    assert not_numbers(found) == calls.MISSING.get(name, frozenset())


def not_numbers(found: object) -> set[str]:
    """The variables of a result with NaN or infinite numbers where none is meant.

    An interval of one prompt is NaN, and so are chance and p where there are none.
    """
    if isinstance(found, torch.Tensor):
        return set() if bool(found.float().isfinite().all()) else {"the tensor"}
    if not isinstance(found, xr.Dataset):
        return set()
    numbers = {str(name): x for name, x in found.data_vars.items() if x.dtype.kind == "f"}
    return {name for name, x in numbers.items() if name not in MAY_BE_NONE and not np.isfinite(x).all()}


MAY_BE_NONE = {"low", "high", "null", "p"}
