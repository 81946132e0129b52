"""The parts of a `HookedTransformer`, under the names that TransformerLens' `components` has."""

from interp.compat.transformer_lens.attention import Attention, GroupedQueryAttention
from interp.compat.transformer_lens.block import TransformerBlock
from interp.compat.transformer_lens.layers import (
    Embed,
    LayerNorm,
    LayerNormPre,
    PosEmbed,
    RMSNorm,
    RMSNormPre,
    Unembed,
)
from interp.compat.transformer_lens.mlps import MLP, CanBeUsedAsMLP, GatedMLP, MoE

__path__: list[str] = []
"""To the import system a package: `components.mlps.mlp` is this module too (`install.ALIASES`)."""
AbstractAttention = Attention
"""What every attention is."""

__all__ = [
    "MLP", "AbstractAttention", "Attention", "CanBeUsedAsMLP", "Embed", "GatedMLP", "GroupedQueryAttention",
    "LayerNorm", "LayerNormPre", "MoE", "PosEmbed", "RMSNorm", "RMSNormPre", "TransformerBlock", "Unembed",
]  # fmt: skip
