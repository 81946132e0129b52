"""Models in bfloat16 and float16: every question answers, and no number of its answer is rounded but by the pass.

A model in half precision computes its pass so; what is computed from the pass is in float32 at least. Two tests say it.
Operator by operator (`Watch`): outside of the pass none has a result in half precision but those that move numbers.
And by the numbers: the same weights in float64 give the same result, up to what the rounding of the pass explains. How
much that is is measured, for every variable of every question: a pass in float64 whose modules are off by eight times
the rounding of the dtype (`rounded`). Where nothing is read from a pass, it is nothing.
"""

import copy
import inspect
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

from interp.model import Transformer
from interp.passes.question import Question
from interp.residual.decomposition import EPS
from interp.runs.kept import forget
from tests.contract import cases
from tests.contract.calls import NOT_RUN, REFUSES, called, public_names, valid
from tests.contract.case import by_hand, discovered, function_of, with_saes
from tests.contract.cases import CASES
from tests.contract.half import DTYPES, Watch, narrow, narrowed, rounded, same_in_every_dtype
from tests.contract.test_nan import ELSEWHERE as NO_MODELS
from tests.tolerances import TOLERANCES, UNIT

TIMES = 8
"""How much coarser than the dtype the pass is that says what its rounding explains."""
DRAWS = 6
ANOTHER = 1
"""The seed of the model that questions about two models compare with."""


def result(
    case: str, network: Transformer, other: Transformer, monkeypatch: pytest.MonkeyPatch
) -> xr.Dataset:
    """The answer of a model about the rows that its exact weights are asked about."""
    forget()  # a rounded pass has the weights of the exact one
    monkeypatch.setattr(cases, "tuned", lambda model: other)
    asked, model = CASES[case], CASES[case].models[0]
    batches = [] if asked.alone else [asked.batch(model, same_in_every_dtype(model))]
    question = with_saes(asked.question_for(model), lambda sae: copy.deepcopy(sae).to(network.device))
    with warnings.catch_warnings(action="ignore"):
        return by_hand(question, network, [each.numbered() for each in batches])


def widths(found: object) -> set[str]:
    """The dtypes of the numbers of a result that are no float32 or float64."""
    each = found.data_vars.values() if isinstance(found, xr.Dataset) else ()
    return {f"{x.name}: {x.dtype}" for x in each if x.dtype.kind == "f" and x.dtype.itemsize < 4}


@pytest.mark.parametrize("case", CASES)
def test_outside_of_the_pass_nothing_is_computed_in_half_precision(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = CASES[case].models[0]
    network, other = (narrow(model, torch.bfloat16, seed) for seed in (None, ANOTHER))
    with Watch() as watch:
        found = result(case, network, other, monkeypatch)
    assert watch.seen == set()
    assert widths(found) == set()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_float64_gives_the_same_up_to_the_rounding_of_the_pass(
    case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, unit = CASES[case].models[0], TIMES * UNIT[dtype]

    def of(network: Callable[..., Transformer], *args: object) -> xr.Dataset:
        return result(case, *(network(model, *args, seed=seed) for seed in (None, ANOTHER)), monkeypatch)

    exact, found = of(same_in_every_dtype), of(narrow, dtype)
    monkeypatch.setitem(EPS, torch.float64, 1.0)  # a rounded pass is no sum of its parts
    explained = [of(rounded, unit, draw) for draw in range(DRAWS)]
    far = [message for name in exact.data_vars if (message := apart(name, found, exact, explained))]
    assert far == []


def apart(name: object, found: xr.Dataset, exact: xr.Dataset, explained: list[xr.Dataset]) -> str | None:
    """What is wrong with a variable; None if rounding explains it.

    Whole numbers, words and gaps (ranks, tokens, places in an order) are compared where the coarser passes agree on
    them: elsewhere two values are nearer to each other than the rounding.
    """
    mine, own = found[name].values, exact[name].values
    others = [each[name].values for each in explained]
    if own.dtype.kind != "f" or _whole(own):
        settled = np.all([_same(x, own) for x in others], axis=0)
        return None if _same(mine, own)[settled].all() else f"{name}: {mine} instead of {own}"
    settled = np.all([np.isnan(x) == np.isnan(own) for x in others], axis=0)
    if (np.isnan(mine) != np.isnan(own))[settled].any():
        return f"{name}: numbers where there are none, or none where there are some"
    known = ~np.isnan(own) & ~np.isnan(mine)
    if not known.any():
        return None
    rtol, atol = TOLERANCES[torch.float32]
    noise = max(np.nanmax(np.abs(x - own), initial=0.0, where=known & ~np.isnan(x)) for x in others)
    allowed = noise + atol + rtol * np.abs(own[known]).max()
    error = np.abs(mine - own)[known].max()
    return None if error <= allowed else f"{name}: off by {error:.1e}, rounding explains {allowed:.1e}"


def _whole(values: np.ndarray) -> bool:
    known = values[np.isfinite(values)]
    return bool((known == known.round()).all())


def _same(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    gaps = (one != one) & (other != other)
    return (one == other) | gaps


QUESTIONS = {function_of(question) for question in discovered()}
FUNCTIONS = {
    name: function
    for name, function in public_names()
    if {"model", "circuits"} & set(inspect.signature(function).parameters)
    and function not in QUESTIONS
    and not (isinstance(function, type) and issubclass(function, Question))
    and not name.startswith(NO_MODELS)
    and name not in {*NOT_RUN, *REFUSES}
}
"""What takes a model and is no question."""


@pytest.mark.parametrize("dtype", DTYPES[::2])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_take_models_in_half_precision(
    name: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {key: narrowed(value, dtype) for key, value in valid(name, FUNCTIONS[name]).items()}
    with warnings.catch_warnings(action="ignore"), Watch() as watch:
        found = called(name, FUNCTIONS[name], given)
    assert watch.seen == set()
    assert widths(found) == set()
    if isinstance(found, xr.Dataset):
        name = str(dtype).removeprefix("torch.")
        assert found.attrs["dtype"] == name and f"values ({name}): " in str(found.view)
