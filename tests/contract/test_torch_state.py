"""No number depends on what torch is set to: default dtype and device, autocast, inference mode, no gradients."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
import xarray as xr

import interp
from interp.core import torch_state
from interp.core.boundary import public
from interp.passes.question import Question
from tests.configs import build
from tests.contract.cases import CASES
from tests.loops import over

RECORDS = [name for name, case in CASES.items() if isinstance(case.question_for(case.models[0]), Question)]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


STATES: Mapping[str, Callable[[], AbstractContextManager[object]]] = {
    "default dtype": lambda: default_dtype(torch.float64),
    "default device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference mode": torch.inference_mode,
    "no gradients": torch.no_grad,
}


@pytest.mark.slow
@over("case", RECORDS)
def test_a_question_gets_the_same_bits_whatever_torch_is_set_to(case: str) -> None:
    made, model = CASES[case], CASES[case].models[0]
    network, question = build(model), made.record(model)
    data = None if made.alone else made.batch(model).numbered()
    plain = interp.run([question], network, data)[question.name]
    for name, state in STATES.items():
        with state():
            found = interp.run([question], network, data)[question.name]
        xr.testing.assert_identical(found, plain)
        assert torch_state.untouched(), name


@pytest.mark.parametrize("name", ["demo-4l", "groundtruth-induction"])
def test_a_model_opens_with_the_same_weights_whatever_torch_is_set_to(name: str) -> None:
    plain = dict(interp.HookedTransformer.from_pretrained(name).transformer.state_dict())
    for what, state in STATES.items():
        with state():
            found = dict(interp.HookedTransformer.from_pretrained(name).transformer.state_dict())
        assert all(torch.equal(found[key], x) and found[key].dtype == x.dtype for key, x in plain.items()), (
            what
        )
        assert not any(x.is_inference() for x in found.values())


def test_a_pass_of_the_users_own_runs_as_torch_is_set() -> None:
    model = interp.HookedTransformer.from_pretrained("demo-4l")
    with torch.autocast("cpu", torch.bfloat16):
        _, cache = model.run_with_cache("The cat sat", names_filter="blocks.0.hook_mlp_out")
    assert cache["blocks.0.hook_mlp_out"].dtype == torch.bfloat16


def test_what_was_set_is_set_again_after_an_error() -> None:
    @public()
    def failing(value: int) -> int:
        assert torch_state.untouched()
        raise KeyError(value)

    with torch.autocast("cpu", torch.bfloat16), default_dtype(torch.float64), torch.inference_mode():
        with pytest.raises(KeyError):
            failing(3)
        assert torch.is_autocast_enabled("cpu") and torch.is_inference_mode_enabled()
        assert torch.get_default_dtype() == torch.float64
