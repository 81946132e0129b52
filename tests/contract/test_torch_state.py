"""No number depends on what torch is set to: default dtype and device, autocast, inference mode, no gradients."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import interp
from interp.core import torch_state
from interp.core.boundary import public
from interp.passes.question import Question
from interp.runs.kept import forget
from tests.configs import build
from tests.contract.calls import NOT_RUN, REFUSES, called, public_methods, public_names, valid
from tests.contract.cases import CASES
from tests.contract.half import narrowed
from tests.loops import over, same_seeds

RECORDS = [name for name, case in CASES.items() if isinstance(case.question_for(case.models[0]), Question)]
AS_ITS_USER_SAYS = {
    **dict.fromkeys(
        ("model.Transformer", "model.EncoderDecoder"), "a module is made in torch's default dtype"
    ),
    "model.KVCache": "its memory holds no numbers yet",
}
FUNCTIONS = {
    name: function
    for name, function in (*public_names(), *public_methods())
    if name not in {*NOT_RUN, *REFUSES, *AS_ITS_USER_SAYS}
    and not (isinstance(function, type) and issubclass(function, Question))
}
"""What a user calls; a question is asked by its function, and by `run` in a test of its own."""
PLAIN = {"observe", *(name for name, _ in public_methods() if name.startswith("Hooked"))}
"""Plain passes, which run as the user set torch: in bfloat16 under autocast."""
IN_FLOAT64 = {"model.next_token_loss_of"}
"""What is given a stream of the model's dtype."""


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


STATES: Mapping[str, Callable[[], AbstractContextManager[object]]] = {
    "default dtype": lambda: default_dtype(torch.float64),
    "half by default": lambda: default_dtype(torch.float16),
    "default device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference mode": torch.inference_mode,
    "no gradients": torch.no_grad,
    "deterministic": deterministic,
}


def differing(one: object, other: object, at: str = "it") -> Iterator[str]:
    """Where two values that functions give differ, in any bit."""
    if type(one) is not type(other):
        yield f"{at}: {type(one).__name__}, {type(other).__name__}"
    elif isinstance(one, xr.Dataset | xr.DataArray):
        timed = [name for name in ("seconds",) if isinstance(one, xr.Dataset) and name in one]
        if not one.drop_vars(timed).identical(other.drop_vars(timed)):  # type: ignore[attr-defined, arg-type]
            yield f"{at}: {one}, {other}"
    elif isinstance(one, Tensor):
        assert isinstance(other, Tensor)
        yield from differing(str(one.dtype), str(other.dtype), at)
        yield from differing(one.detach().resolve_conj().numpy(), other.detach().resolve_conj().numpy(), at)
    elif isinstance(one, np.ndarray):
        if one.dtype != other.dtype or not np.array_equal(one, other, equal_nan=one.dtype.kind == "f"):  # type: ignore[attr-defined, arg-type]
            yield f"{at}: other numbers"
    elif isinstance(one, Mapping):
        yield from differing(list(one), list(other), f"{at}, keys")  # type: ignore[call-overload]
        for key in one:
            yield from differing(one[key], other[key], f"{at}[{key!r}]")  # type: ignore[index]
    elif isinstance(one, list | tuple):
        yield from differing(len(one), len(other), f"{at}, length")  # type: ignore[arg-type]
        for i, pair in enumerate(zip(one, other, strict=False)):  # type: ignore[call-overload]
            yield from differing(*pair, f"{at}[{i}]")
    elif isinstance(one, torch.nn.Module):
        yield from differing(dict(one.state_dict()), dict(other.state_dict()), at)  # type: ignore[attr-defined]
    elif isinstance(one, str | int | float | torch.dtype | torch.device):
        if one != other and one == one:
            yield f"{at}: {one}, {other}"
    elif hasattr(one, "__dict__") and not callable(one):
        yield from differing(vars(one), vars(other), f"{at}, {type(one).__name__}")


def inference_tensors(found: object) -> list[Tensor]:
    """Tensors of an answer that no gradient may be taken of, because inference mode made them."""
    values = (
        found.values() if isinstance(found, dict) else found if isinstance(found, list | tuple) else [found]
    )
    return [each for each in values if isinstance(each, Tensor) and each.is_inference()]


@pytest.fixture
def fresh_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_folder")
@pytest.mark.filterwarnings("ignore")
@over("name", FUNCTIONS)
def test_a_function_gives_the_same_bits_whatever_torch_is_set_to(name: str) -> None:
    function, dtype = FUNCTIONS[name], torch.float64 if name in IN_FLOAT64 else torch.float32

    def answer(state: Callable[[], AbstractContextManager[object]]) -> object:
        forget()
        given = {key: narrowed(value, dtype) for key, value in valid(name, function).items()}
        same_seeds()
        with state():
            return called(name, function, given)

    plain = answer(nullcontext)
    for what, state in STATES.items():
        found = answer(state)
        assert torch_state.untouched(), what
        if not (name in PLAIN and what == "autocast"):
            assert list(differing(plain, found)) == [], what
        assert name in PLAIN or name.startswith("model.") or not inference_tensors(found), what


@pytest.mark.slow
@over("case", RECORDS)
def test_a_question_gets_the_same_bits_whatever_torch_is_set_to(case: str) -> None:
    made, model = CASES[case], CASES[case].models[0]
    network, question = build(model, torch.float32), made.record(model)
    data = None if made.alone else made.batch(model).numbered()
    plain = interp.run([question], network, data)[question.name]
    for name, state in STATES.items():
        forget()  # what is kept of weights
        with state():
            found = interp.run([question], network, data)[question.name]
        xr.testing.assert_identical(found, plain)
        assert torch_state.untouched(), name
    assert plain.attrs["dtype"] == "float32" and "values (float32): " in str(plain.view)


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


def set_for_all(precision: str) -> None:
    torch.set_float32_matmul_precision({"none": "highest", "bf16": "medium"}[precision])


def set_for_the_cpu(precision: str) -> None:
    torch.backends.mkldnn.matmul.fp32_precision = precision  # type: ignore[attr-defined]


@pytest.mark.parametrize("rounded_to", [set_for_all, set_for_the_cpu])
def test_rounded_products_are_said_in_every_result(rounded_to: Callable[[str], None]) -> None:
    def opened(model: str | torch.nn.Module, dtype: torch.dtype) -> interp.HookedTransformer:
        return interp.HookedTransformer.from_pretrained(model, dtype=dtype)

    rounded_to("bf16")
    try:
        for dtype, said in ((torch.float32, "float32, products in bf16"), (torch.float64, "float64")):
            model = opened("demo-4l", dtype)
            assert interp.attribute(model, "The cat sat", " on").attrs["dtype"] == said
        # the copy of a live network is compared with it
        opened(GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=50)), torch.float32)
    finally:
        rounded_to("none")
    assert interp.attribute(opened("demo-4l", torch.float32), "The", " on").attrs["dtype"] == "float32"
