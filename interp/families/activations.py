"""The names that Hugging Face configs give to non-linearities."""

from interp.families.spec import Settings
from interp.model.config import Activation

ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_new",
    "gelu_fast": "gelu_new",
    "gelu_accurate": "gelu_new",
    "gelu_pytorch_tanh": "gelu_new",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
"""Hugging Face's name -> this package's; the four tanh approximations of GELU there differ in rounding only."""


def activation(settings: Settings, key: str, default: str) -> Activation:
    """The non-linearity that a config names under `key`; ValueError for one that this package lacks."""
    settings.require(key, *ACTIVATIONS, None)
    return ACTIVATIONS[settings.text(key, default)]
