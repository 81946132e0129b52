"""TransformerLens' factories: the MLP and the activation function of a config."""

from torch import nn

from interp.compat.transformer_lens.activations import SUPPORTED_ACTIVATIONS, ActivationFunction
from interp.compat.transformer_lens.components import mlp_of
from interp.compat.transformer_lens.config import HookedTransformerConfig

__path__: list[str] = []
"""To the import system a package: `factories.mlp_factory` is this module too (`install.ALIASES`)."""


class MLPFactory:
    """Makes MLPs."""

    @staticmethod
    def create_mlp(cfg: HookedTransformerConfig) -> nn.Module:
        """`MLP`, `GatedMLP` or `MoE`, weights not initialised."""
        return mlp_of(cfg)


class ActivationFunctionFactory:
    """Finds activation functions."""

    @staticmethod
    def pick_activation_function(cfg: HookedTransformerConfig) -> ActivationFunction:
        """The function called `cfg.act_fn`; ValueError for none or an unknown name."""
        if cfg.act_fn is None:
            raise ValueError("act_fn not set when trying to select Activation Function")
        if cfg.act_fn not in SUPPORTED_ACTIVATIONS:
            raise ValueError(
                f"Invalid activation function name: {cfg.act_fn}; one of {', '.join(SUPPORTED_ACTIVATIONS)}"
            )
        return SUPPORTED_ACTIVATIONS[cfg.act_fn]
