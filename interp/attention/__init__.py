"""What attention heads do: scores against chance, labels, entropy and dispersion."""

from interp.attention.attention_rows import AttentionEntropy, Dispersion, attention_entropy, dispersion
from interp.attention.heads import AttentionKernel, Heads, attention_kernel, heads

__all__ = [
    "AttentionEntropy",
    "AttentionKernel",
    "Dispersion",
    "Heads",
    "attention_entropy",
    "attention_kernel",
    "dispersion",
    "heads",
]
