"""The random weights that a new `HookedTransformer` starts from, by `cfg.init_mode`, from the same seeds the same."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from interp.compat.transformer_lens.config import HookedTransformerConfig
from interp.compat.transformer_lens.initialisation import (
    calc_fan_in_and_fan_out,
    init_kaiming_normal_,
    init_kaiming_uniform_,
    init_xavier_normal_,
    init_xavier_uniform_,
)

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
