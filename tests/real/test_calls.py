"""Every public function that a model goes into, once on SmolLM2: an answer of numbers in bounded memory, or a sentence.

The calls are those of `tests/real/calls.py`; `experiments/bench/real.py` prints what they cost.
"""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

import interp
from tests.contract.calls import signature
from tests.loops import over
from tests.real import calls
from tests.real.memory import OwnMemory

MIB = 2**20
MAY_BE_NONE = {"low", "high", "null", "p"}
"""An interval of one prompt is NaN, and so are chance and p where there are none."""
ANSWER = [name for name in calls.called_names() if name not in calls.REFUSED]


def test_every_line_of_the_tables_is_a_call() -> None:
    names = set(calls.called_names())
    assert {*calls.CALLS, *calls.REFUSED, *calls.MISSING, *calls.LARGER} <= names
    assert set(calls.OF_NO_SUCH_MODEL) <= set(calls.functions())
    assert len(names) > 140


@over("name", ANSWER)
def test_every_required_argument_has_a_value(name: str) -> None:
    """A function that is new lacks its line here, without a real model at hand."""
    owner, _, method = name.rpartition(".")
    of_model = owner == "HookedTransformer"
    function = getattr(interp.HookedTransformer, method) if of_model else calls.functions()[name]
    required = {
        each.name
        for each in signature(function).parameters.values()
        if each.default is each.empty and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
    }
    assert required - {"self"} <= {*calls.CALLS.get(name, {}), *calls.WORDS}


@pytest.fixture
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """A folder of its own to write into; skipped, with the reason, where the package index gives no model."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.real
@pytest.mark.usefixtures("_place")
@pytest.mark.parametrize("name", ANSWER)
def test_the_answer_has_numbers_and_takes_bounded_memory(name: str) -> None:
    given = calls.given(name)
    with warnings.catch_warnings(action="ignore"), OwnMemory() as memory:
        found = calls.answer(name, given)
    assert memory.peak < calls.LARGER.get(name, calls.MOST) * MIB
    assert not_numbers(found) == calls.MISSING.get(name, set())


def not_numbers(found: object) -> set[str]:
    """The variables of a result that have NaN or infinite numbers; "tensor" of what has no variables."""
    if isinstance(found, torch.Tensor):
        return set() if bool(found.isfinite().all()) else {"tensor"}
    if not isinstance(found, xr.Dataset):
        return set()
    numbers = {str(name): x for name, x in found.data_vars.items() if x.dtype.kind == "f"}
    return {name for name, x in numbers.items() if name not in MAY_BE_NONE and not np.isfinite(x).all()}


@pytest.mark.real
@pytest.mark.usefixtures("_place")
@pytest.mark.parametrize("name", calls.REFUSED)
def test_what_a_model_like_this_cannot_be_asked_is_said_in_a_sentence(name: str) -> None:
    given = calls.given(name)
    with pytest.raises(ValueError, match=calls.REFUSED[name]):
        calls.answer(name, given)
