"""What attention heads do: scores against chance, labels, entropy and dispersion."""

from interp.attention.attention_rows import AttentionEntropy, Dispersion, attention_entropy, dispersion
from interp.attention.heads import AttentionKernel, Heads, attention_kernel, heads
from interp.attention.repeats import RepeatedTokens
from interp.attention.sentences import IndirectObjects

__all__ = [
    "AttentionEntropy",
    "AttentionKernel",
    "Dispersion",
    "Heads",
    "IndirectObjects",
    "RepeatedTokens",
    "attention_entropy",
    "attention_kernel",
    "dispersion",
    "heads",
]
