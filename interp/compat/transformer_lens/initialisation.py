"""Random weights in TransformerLens' layout, `[d_in, d_out]` and `[head, d_in, d_out]`, in place, and a new model's."""

import math
from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from interp.compat.transformer_lens.config import HookedTransformerConfig

NonlinearityType = Literal[
    "linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "sigmoid",
    "tanh", "relu", "leaky_relu", "selu",
]  # fmt: skip


def calc_fan_in_and_fan_out(tensor: Float[Tensor, "..."]) -> tuple[int, int]:
    """How many inputs and outputs a weight has; all heads together count as one output.

    Raises:
        ValueError: a scalar or more than three axes.
    """
    shape = tuple(tensor.shape)
    if len(shape) == 0:
        raise ValueError("Fan in and fan out can not be computed for scalars.")
    if len(shape) > 3:
        raise ValueError(f"Fan in and fan out can not be computed for shape {tensor.shape} tensors.")
    if len(shape) == 1:
        return 1, shape[0]
    return (shape[0], shape[1]) if len(shape) == 2 else (shape[1], shape[0] * shape[2])


def init_xavier_uniform_(param: Float[Tensor, "..."], gain: float | int = 1.0) -> Float[Tensor, "..."]:
    """Uniform within gain sqrt(6 / (fan in + fan out)) (Glorot & Bengio 2010)."""
    bound = gain * math.sqrt(6 / sum(calc_fan_in_and_fan_out(param)))
    return nn.init.uniform_(param, -bound, bound)


def init_xavier_normal_(param: Float[Tensor, "..."], gain: float | int = 1.0) -> Float[Tensor, "..."]:
    """Normal with standard deviation gain sqrt(2 / (fan in + fan out))."""
    return nn.init.normal_(param, std=gain * math.sqrt(2 / sum(calc_fan_in_and_fan_out(param))))


def init_kaiming_uniform_(
    param: Float[Tensor, "..."],
    a: float | int = 0,
    nonlinearity: NonlinearityType = "relu",
    gain: float | int = 1.0,
    mode: str = "fan_in",
) -> Float[Tensor, "..."]:
    """Uniform with standard deviation gain g / sqrt(fan), g by the nonlinearity before it (He et al. 2015)."""
    bound = math.sqrt(3) * _kaiming(param, a, nonlinearity, gain, mode)
    return nn.init.uniform_(param, -bound, bound)


def init_kaiming_normal_(
    param: Float[Tensor, "..."],
    a: float | int = 0,
    nonlinearity: NonlinearityType = "relu",
    gain: float | int = 1.0,
    mode: str = "fan_in",
) -> Float[Tensor, "..."]:
    """Normal with standard deviation gain g / sqrt(fan), g by the nonlinearity before it."""
    return nn.init.normal_(param, std=_kaiming(param, a, nonlinearity, gain, mode))


def _kaiming(
    param: Float[Tensor, "..."], a: float | int, nonlinearity: NonlinearityType, gain: float | int, mode: str
) -> float:
    fan_in, fan_out = calc_fan_in_and_fan_out(param)
    fan = fan_in if mode == "fan_in" else fan_out
    return gain * nn.init.calculate_gain(nonlinearity, a) / math.sqrt(fan)


SCHEMES: dict[str, Callable[..., Tensor]] = {
    "xavier_uniform": init_xavier_uniform_,
    "xavier_normal": init_xavier_normal_,
    "kaiming_uniform": init_kaiming_uniform_,
    "kaiming_normal": init_kaiming_normal_,
}
MODES = ("gpt2", *SCHEMES, "muP")


@torch.no_grad()
def initialise(model: nn.Module, cfg: HookedTransformerConfig) -> None:
    """Fill every weight matrix (`W_...`); biases and norms stay as they are.

    gpt2: normal with `initializer_range`. xavier, kaiming: with it as gain. muP: normal with standard deviation
    1/sqrt(fan in), 1 for embeddings. ValueError for another mode.
    """
    if cfg.init_mode not in MODES:
        raise ValueError(f"init_mode must be one of {', '.join(MODES)}, got {cfg.init_mode!r}")
    if cfg.seed is not None:
        torch.manual_seed(cfg.seed)
    for name, weight in model.named_parameters():
        if "W_" in name:  # into memory of its own: views would be filled in another order
            weight.copy_(
                _filled(torch.empty(weight.shape, dtype=weight.dtype, device=weight.device), name, cfg)
            )


def _filled(weight: Tensor, name: str, cfg: HookedTransformerConfig) -> Tensor:
    if cfg.init_mode == "gpt2":
        return nn.init.normal_(weight, std=float(cfg.initializer_range))
    if cfg.init_mode == "muP":
        embeds = "embed" in name  # the unembedding too, as in TransformerLens
        return nn.init.normal_(weight, std=1.0 if embeds else calc_fan_in_and_fan_out(weight)[0] ** -0.5)
    return SCHEMES[cfg.init_mode](weight, gain=cfg.initializer_range)
