"""Activation functions under the names that TransformerLens configs use."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

ActivationFunction = Callable[[Tensor], Tensor]
SOFTCAP_DISABLED = -1.0
"""Value of a soft cap in a config where nothing is capped."""


def gelu_new(input: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """GELU by its tanh approximation, as in GPT-2."""
    return F.gelu(input, approximate="tanh")


def gelu_pytorch_tanh(input: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """`gelu_new` under the name in Gemma's configs."""
    return gelu_new(input)


def gelu_fast(input: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """The tanh approximation with sqrt(2 / pi) written to ten digits."""
    return 0.5 * input * (1 + torch.tanh(0.7978845608 * input * (1 + 0.044715 * input * input)))


def solu(input: Float[Tensor, "... m"]) -> Float[Tensor, "... m"]:
    """x softmax(x) over the last axis (Elhage et al. 2022, "Softmax linear units"); the norm after it is the MLP's."""
    return input * input.softmax(-1)


def relu2(input: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """relu(x)^2."""
    return F.relu(input) ** 2


def softcap_enabled(cap: float | int | None) -> bool:
    """Whether a config's soft cap caps anything: it is a positive number."""
    return cap is not None and cap > 0


def apply_softcap(x: Float[Tensor, "..."], cap: float | int | None) -> Float[Tensor, "..."]:
    """c tanh(x / c), or x where the cap is disabled."""
    return x if cap is None or cap <= 0 else cap * torch.tanh(x / cap)


SUPPORTED_ACTIVATIONS: Mapping[str, ActivationFunction] = MappingProxyType(
    {
        "solu": solu,
        "solu_ln": solu,
        "gelu_new": gelu_new,
        "gelu_fast": gelu_fast,
        "silu": F.silu,
        "relu": F.relu,
        "gelu": F.gelu,
        "gelu_pytorch_tanh": gelu_pytorch_tanh,
        "relu2": relu2,
    }
)
"""Activation functions by the name in `act_fn`."""
