"""What a Transformer is, as data: one frozen record, its alternatives as unions of small records."""

import dataclasses
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from interp.core.shapes import nearest

T = TypeVar("T")
Json = dict[str, object]
"""A JSON object, as `to_dict` writes it and `from_dict` reads it."""

Activation = Literal["gelu", "gelu_new", "relu", "silu"]


@dataclass(frozen=True)
class Learned:
    """A trained vector per position, added to the embedding (GPT-2)."""


@dataclass(frozen=True)
class NoPosition:
    """No position information at all beyond what the mask gives."""


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation: every rotary frequency divided by `factor` (Chen et al. 2023)."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's rule: low frequencies divided by `factor`, high ones kept, a ramp in between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_n_ctx: int


@dataclass(frozen=True)
class Rotary:
    """Queries and keys rotated by an angle that grows with the position (Su et al. 2021)."""

    base: float = 10_000.0
    dim: int | None = None
    """Leading dimensions of each head that are rotated; None = all of them."""
    interleaved: bool = False
    """True pairs (0, 1), (2, 3), ... (GPT-J); False pairs i with i + dim/2 (NeoX, Llama)."""
    scaling: LinearScaling | Llama3Scaling | None = None


@dataclass(frozen=True)
class LayerNorm:
    """Mean removed, divided by the biased standard deviation, scaled by gamma, shifted by beta."""

    eps: float = 1e-5


@dataclass(frozen=True)
class RMSNorm:
    """Divided by the root mean square, scaled by gamma; no mean, no shift."""

    eps: float = 1e-6


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
        if self.d_mlp < 1:
            raise ValueError(f"MLP requires d_mlp >= 1, got {self.d_mlp}")
        if self.act not in get_args(Activation):
            raise ValueError(f"MLP has no activation {self.act!r}; known: {', '.join(get_args(Activation))}")


Position = Learned | Rotary | NoPosition
Norm = LayerNorm | RMSNorm | NoNorm
_RECORDS = {
    record.__name__: record
    for record in (
        Learned, NoPosition, LinearScaling, Llama3Scaling, Rotary, LayerNorm, RMSNorm, NoNorm, MLP,
    )
}  # fmt: skip


@dataclass(frozen=True)
class ModelConfig:
    """Everything that decides the arithmetic of a Transformer; no device, no dtype, no tokenizer."""

    n_layers: int
    d_model: int
    n_heads: int
    n_ctx: int
    d_vocab: int
    d_head: int | None = None
    """Width of one head; None = d_model / n_heads."""
    n_kv_heads: int | None = None
    """Key/value heads (grouped-query attention); None = n_heads. Query head h reads h // (n_heads / n_kv_heads)."""
    mlp: MLP | None = None
    """None = attention-only."""
    position: Position = Learned()
    norm: Norm = LayerNorm()
    final_norm: bool = True
    """Whether the same norm stands before the unembedding."""
    parallel: bool = False
    """True: attention and MLP of a block read the same residual and are added together (NeoX)."""
    causal: bool = True
    """False: every position sees every other (encoders)."""
    window: int | None = None
    """Sliding window: a query sees itself and the `window - 1` positions before it."""
    attn_scale: float | None = None
    """Factor on the scores; None = 1/sqrt(d_head)."""
    scale_by_layer: bool = False
    """Additionally divide the scores of layer l by l + 1 (a GPT-2 option)."""
    qkv_bias: bool = True
    out_bias: bool = True
    unembed_bias: bool = False
    tied: bool = False
    """Whether the unembedding is the embedding matrix itself."""

    def __post_init__(self) -> None:
        for name, kinds in (("position", Position), ("norm", Norm), ("mlp", MLP | None)):
            value = getattr(self, name)
            _require(isinstance(value, kinds), f"{name} to be one of {kinds}, got {value!r}")
        for name in ("n_layers", "d_model", "n_heads", "n_ctx", "d_vocab"):
            _require(
                isinstance(getattr(self, name), int),
                f"a whole number for {name}, got {getattr(self, name)!r}",
            )
        if self.d_head is None:
            _require(
                self.d_model % self.n_heads == 0,
                f"n_heads to divide d_model when d_head is not given, got {self.n_heads} and {self.d_model}",
            )
            object.__setattr__(self, "d_head", self.d_model // self.n_heads)
        if self.n_kv_heads is None:
            object.__setattr__(self, "n_kv_heads", self.n_heads)
        for name in ("n_layers", "d_model", "n_heads", "n_ctx", "d_vocab", "d_head", "n_kv_heads"):
            _require(getattr(self, name) >= 1, f"{name} >= 1, got {getattr(self, name)}")
        _require(
            self.n_heads % self.kv_heads == 0,
            f"n_kv_heads to divide n_heads, got {self.kv_heads} and {self.n_heads}",
        )
        _require(self.window is None or self.window >= 1, f"window >= 1, got {self.window}")
        if isinstance(self.position, Rotary):
            rotated = self.rotary_dim
            _require(
                rotated % 2 == 0 and 0 < rotated <= self.head_width,
                f"an even rotary dim in [2, {self.head_width}], got {rotated}",
            )

    @property
    def head_width(self) -> int:
        """d_head as a plain int."""
        assert self.d_head is not None
        return self.d_head

    @property
    def kv_heads(self) -> int:
        """n_kv_heads as a plain int."""
        assert self.n_kv_heads is not None
        return self.n_kv_heads

    @property
    def rotary_dim(self) -> int:
        """How many leading dimensions of a head are rotated; 0 without rotary positions."""
        if not isinstance(self.position, Rotary):
            return 0
        return self.head_width if self.position.dim is None else self.position.dim

    def score_scale(self, layer: int) -> float:
        """The factor between q . k and the attention score of `layer`."""
        scale = self.head_width**-0.5 if self.attn_scale is None else self.attn_scale
        return scale / (layer + 1) if self.scale_by_layer else scale

    def to_dict(self) -> Json:
        """A JSON-ready dict; nested records carry their class name under `kind`."""
        return {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, values: Json) -> "ModelConfig":
        """The config that `to_dict` described; ValueError for any key this version does not know."""
        return _build(cls, values)


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(f"ModelConfig requires {what}")


def _plain(value: object) -> object:
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    fields = {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return {"kind": type(value).__name__, **fields}


def _build(cls: type[T], values: Json) -> T:
    known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    if unknown := set(values) - known:
        name = sorted(unknown)[0]
        raise ValueError(f"{cls.__name__} has no field {name!r}; {nearest(name, known)}")
    needed = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]  # type: ignore[arg-type]
    if missing := [name for name in needed if name not in values]:
        raise ValueError(f"{cls.__name__} requires {', '.join(missing)}")
    return cls(**{name: _record(value) for name, value in values.items()})


def _record(value: object) -> object:
    if not isinstance(value, dict):
        return value
    kind = value.get("kind")
    if kind not in _RECORDS:
        raise ValueError(f"unknown record {kind!r}; {nearest(str(kind), _RECORDS)}")
    return _build(_RECORDS[kind], {k: v for k, v in value.items() if k != "kind"})
