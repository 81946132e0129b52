"""A result that lost something on its way: what shows or reads it names what is missing."""

from collections.abc import Callable, Mapping

import numpy as np
import pytest
import xarray as xr

import interp
from interp.core.boundary import public
from tests.contract.calls import called, edges, left_out, valid
from tests.fuzz.results import result_of
from tests.loops import over


def shown(name: str, change: Callable[[xr.Dataset], xr.Dataset]) -> object:
    result = result_of(name)
    assert isinstance(result, xr.Dataset)
    return change(result).view.plot()


def lds(exact: xr.Dataset) -> object:
    return called(
        "dynamics.lds", interp.dynamics.lds, valid("dynamics.lds", interp.dynamics.lds) | {"exact": exact}
    )


READ: Mapping[str, tuple[Callable[[], object], str]] = {
    "a variable": (lambda: shown("heads", lambda x: x.drop_vars("value")), 
                   "heads: result .* without 'value'; it has low,"),
    "an attribute": (lambda: shown("patch", lambda x: x.drop_attrs(deep=False).assign_attrs(
        interp_analysis="patch")), "patching: result .* without 'metric'"),
    "a dim": (lambda: shown("attention.attention_entropy", lambda x: x.isel(head=0)),
              r"result .* with one head and without that dim: keep it, isel\(head=\[0\]\)"),
    "all entries": (lambda: shown("weights.spectra", lambda x: x.isel(matrix=[])), "without entries along matrix"),
    "labels": (lambda: shown("editing.diff", lambda x: x.drop_vars("what")), "without the labels of what"),
    "some labels": (lambda: shown("circuits.circuit_curve", lambda x: x.isel(score=[0])),
                    "some labels, of the name 'score'"),
    "all numbers": (lambda: shown("causal.steering_curve", lambda x: x.where(False)), "without a finite number"),
    "attributes of scores": (lambda: interp.circuits.edge_stability(edges().drop_attrs(), top=2, resamples=2),
                             "edge_stability: scores must be a whole result, got one without 'edges'"),
    "one of several": (lambda: interp.circuits.recovery([edges(), edges().drop_attrs()], ["L0H0->logits"]),
                       "recovery: tables must be a whole result, got one without 'edges'"),
    "attributes of effects": (lambda: lds(left_out().drop_attrs()),
                              "lds: exact must be a whole result, got one without 'unit'"),
    "the prompts": (lambda: interp.tokens.routes(result_of("tokens.flow_routes").isel(prompt=0)),  # type: ignore[attr-defined]
                    "routes: shares must be a whole result, got one with one prompt and without that dim"),
}  # fmt: skip


@over("what", READ)
def test_a_result_without_something_is_named_with_what_it_lacks(what: str) -> None:
    call, message = READ[what]
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("error", [KeyError("it"), ValueError("no 'it'"), ZeroDivisionError()])
def test_errors_of_callbacks_and_our_own_stay_as_they_are(error: Exception) -> None:
    @public()
    def asked(result: xr.Dataset, function: Callable[[], object]) -> object:
        return function()

    def fails() -> object:
        raise error

    with pytest.raises(type(error)) as caught:
        asked(result_of("heads").isel(layer=[]), fails)  # type: ignore[attr-defined]
    assert caught.value is error


def test_an_error_of_the_machine_is_not_blamed_on_a_damaged_result() -> None:
    @public()
    def read(result: xr.Dataset) -> object:
        return np.load("nowhere.npy")

    with pytest.raises(FileNotFoundError, match=r"nowhere\.npy"):
        read(edges().isel(sender=0))
