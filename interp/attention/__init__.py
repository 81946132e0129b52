"""Attention heads: scores against chance, labels, entropy and dispersion; and the parts that make one attend."""

from interp.attention.attention_attribution import AttentionAttribution, attention_attribution
from interp.attention.attention_by_depth import AttentionByDepth, attention_by_depth
from interp.attention.attention_paths import AttentionPaths, attention_paths
from interp.attention.attention_rows import AttentionEntropy, Dispersion, attention_entropy, dispersion
from interp.attention.heads import AttentionKernel, Heads, attention_kernel, heads

__all__ = [
    "AttentionAttribution",
    "AttentionByDepth",
    "AttentionEntropy",
    "AttentionKernel",
    "AttentionPaths",
    "Dispersion",
    "Heads",
    "attention_attribution",
    "attention_by_depth",
    "attention_entropy",
    "attention_kernel",
    "attention_paths",
    "dispersion",
    "heads",
]
