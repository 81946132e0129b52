"""The alternatives of a config, one small record each: positions, norms, and what the MLP of a block is."""

from dataclasses import dataclass
from typing import Literal, get_args

Activation = Literal["gelu", "gelu_new", "quick_gelu", "relu", "silu"]
"""`gelu` is exact (erf), `gelu_new` its tanh approximation, `quick_gelu` x sigmoid(1.702 x)."""


@dataclass(frozen=True)
class Learned:
    """A trained vector per position, added to the embedding (GPT-2)."""

    offset: int = 0
    """Rows of the table before that of position 0 (OPT, BART and RoBERTa keep 2)."""


@dataclass(frozen=True)
class Sinusoidal:
    """Fixed sines and cosines of the position, added to the embedding (Vaswani et al. 2017, section 3.5)."""

    interleaved: bool = True
    """True: sin, cos, sin, cos, ... (the paper); False: all sines, then all cosines (Marian)."""


@dataclass(frozen=True)
class Alibi:
    """Scores lowered by the distance, with a slope per head (Press et al. 2022); no position embedding."""


@dataclass(frozen=True)
class Buckets:
    """A trained score per head and bucket of the distance, the same table in every layer (T5)."""

    n_buckets: int = 32
    max_distance: int = 128
    """Distances from here on share the last bucket."""


@dataclass(frozen=True)
class NoPosition:
    """No position information at all beyond what the mask gives."""


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation: every rotary frequency divided by `factor` (Chen et al. 2023)."""

    factor: float


@dataclass(frozen=True)
class DynamicScaling:
    """Dynamic NTK: beyond the original context the base grows with the length of the pass."""

    factor: float
    original_n_ctx: int


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's rule: low frequencies divided by `factor`, high ones kept, a ramp in between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_n_ctx: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023): interpolated by wavelength, and sines and cosines multiplied by a factor."""

    factor: float
    original_n_ctx: int
    attention_factor: float
    """What sines and cosines are multiplied by; 0.1 ln(factor) + 1 in the paper."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Whether the ends of the ramp are rounded to whole dimensions."""


@dataclass(frozen=True)
class LongScaling:
    """LongRoPE (Phi-3): one divisor per frequency, a short list within the original context, a long one beyond."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_n_ctx: int
    attention_factor: float
    """What sines and cosines are multiplied by, at any length."""


Scaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongScaling


@dataclass(frozen=True)
class Rotary:
    """Queries and keys rotated by an angle that grows with the position (Su et al. 2021)."""

    base: float = 10_000.0
    dim: int | None = None
    """Leading dimensions of each head that are rotated; None = all of them."""
    interleaved: bool = False
    """True pairs (0, 1), (2, 3), ... (GPT-J); False pairs i with i + dim/2 (NeoX, Llama)."""
    scaling: Scaling | None = None


@dataclass(frozen=True)
class LayerNorm:
    """Mean removed, divided by the biased standard deviation, scaled by gamma, shifted by beta."""

    eps: float = 1e-5


@dataclass(frozen=True)
class RMSNorm:
    """Divided by the root mean square, scaled by gamma; no mean, no shift."""

    eps: float = 1e-6
    unit_offset: bool = False
    """True: what is stored is gamma - 1 (Gemma)."""


@dataclass(frozen=True)
class NoNorm:
    """The identity: blocks read the residual stream as it is."""


@dataclass(frozen=True)
class MLP:
    """Two matrices with a non-linearity between them, optionally gated by a third."""

    d_mlp: int
    act: Activation = "gelu_new"
    gated: bool = False
    bias: bool = True

    def __post_init__(self) -> None:
        _check_mlp("MLP", self.d_mlp, self.act)


@dataclass(frozen=True)
class MoE:
    """A mixture of gated experts: a router picks `top_k` of them per token and weighs their outputs."""

    n_experts: int
    top_k: int
    d_mlp: int
    """Neurons of one expert."""
    act: Activation = "silu"
    bias: bool = False
    """Whether the experts' matrices have biases."""
    router_bias: bool = False
    renormalise: bool = True
    """Whether the chosen experts' weights sum to 1; False: they keep their share of the softmax over all experts."""
    clamp: float | None = None
    """Gate values are cut at this number, linear ones at plus and minus it (GPT-OSS)."""
    linear_offset: float = 0.0
    """Added to the linear branch before it multiplies the gate (GPT-OSS: 1)."""

    def __post_init__(self) -> None:
        _check_mlp("MoE", self.d_mlp, self.act)
        if not 1 <= self.top_k <= self.n_experts:
            raise ValueError(f"MoE requires 1 <= top_k <= n_experts, got {self.top_k} and {self.n_experts}")


@dataclass(frozen=True)
class ConvMLP:
    """An MLP that also sees the tokens just before: a depthwise convolution between its matrices (Sana's Mix-FFN)."""

    d_mlp: int
    kernel: int = 3
    """Tokens that the convolution sees, the own one last."""

    def __post_init__(self) -> None:
        _check_mlp("ConvMLP", self.d_mlp, "silu")
        if self.kernel < 1:
            raise ValueError(f"ConvMLP requires kernel >= 1, got {self.kernel}")


@dataclass(frozen=True)
class FullSoftmax:
    """A logit for each token: one matrix, the unembedding."""


@dataclass(frozen=True)
class AdaptiveSoftmax:
    """Frequent tokens (those of small ids) first, rare ones in clusters of narrower matrices (Grave et al. 2017)."""

    cutoffs: tuple[int, ...]
    """The first id of each cluster, in order."""
    div_value: float = 4.0
    """Cluster i, counted from 1, has the width d_model / div_value^i."""

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip((0, *self.cutoffs), self.cutoffs, strict=False))
        if not self.cutoffs or not rising:
            raise ValueError(
                f"AdaptiveSoftmax requires rising cutoffs >= 1, at least one, got {self.cutoffs}"
            )
        if self.div_value < 1:
            raise ValueError(f"AdaptiveSoftmax requires div_value >= 1, got {self.div_value}")


@dataclass(frozen=True)
class HierarchicalSoftmax:
    """A binary tree of decisions over the tokens in the order of their ids (Morin & Bengio 2005)."""


Output = FullSoftmax | AdaptiveSoftmax | HierarchicalSoftmax
Position = Learned | Sinusoidal | Rotary | Alibi | Buckets | NoPosition
Norm = LayerNorm | RMSNorm | NoNorm
NormPlace = Literal["pre", "post", "sandwich", "output"]
"""`pre` norms what a sublayer reads, `output` what it adds, `sandwich` both; `post` norms the sum (BERT)."""

MLPS = ("mlp_before_out", "mlp_out")
"""The sublayers of a block (`ModelConfig.sublayers`) that are MLPs; the others mix positions."""
RECORDS: dict[str, type] = {
    record.__name__: record
    for record in (
        Learned, Sinusoidal, Alibi, Buckets, NoPosition, Rotary,
        LinearScaling, DynamicScaling, Llama3Scaling, YarnScaling, LongScaling,
        LayerNorm, RMSNorm, NoNorm, MLP, MoE, ConvMLP, FullSoftmax, AdaptiveSoftmax, HierarchicalSoftmax,
    )
}  # fmt: skip
"""Every record by the name under which a config file keeps it."""


def _check_mlp(kind: str, d_mlp: int, act: str) -> None:
    if d_mlp < 1:
        raise ValueError(f"{kind} requires d_mlp >= 1, got {d_mlp}")
    if act not in get_args(Activation):
        raise ValueError(f"{kind} has no activation {act!r}; known: {', '.join(get_args(Activation))}")
