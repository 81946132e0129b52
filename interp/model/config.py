"""What a Transformer is, as data: one frozen record, its alternatives as unions of small records (`variants`)."""

import dataclasses
from dataclasses import dataclass
from typing import Literal, get_args

from interp.model.config_json import Json, fields_as_json, from_json
from interp.model.mixer_variants import (
    MIXER_RECORDS,
    Differential,
    DualChunk,
    Lightning,
    Linear,
    Linformer,
    LongTermMemory,
    Mixer,
    Polar,
    Pool,
    Reformer,
    Softmax,
    Synthesizer,
)
from interp.model.variants import (
    MLP,
    MLPS,
    RECORDS,
    Activation,
    AdaptiveSoftmax,
    Alibi,
    Buckets,
    ConvMLP,
    DynamicScaling,
    FullSoftmax,
    LayerNorm,
    Learned,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    MoE,
    NoNorm,
    NoPosition,
    Norm,
    NormPlace,
    Output,
    Position,
    RMSNorm,
    Rotary,
    Scaling,
    Sinusoidal,
    YarnScaling,
)

__all__ = [
    "MLP", "MLPS", "Activation", "Alibi", "AnyConfig", "Buckets", "ConvMLP", "DynamicScaling", "EncoderDecoderConfig",
    "Json", "LayerNorm", "Learned", "LinearScaling", "Llama3Scaling", "LongScaling", "Mixer", "MoE", "ModelConfig",
    "NoNorm", "NoPosition", "Norm", "NormPlace", "Position", "RMSNorm", "Rotary", "Scaling", "Sinusoidal", "Softmax",
    "YarnScaling",
]  # fmt: skip


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
    mlp: MLP | MoE | ConvMLP | None = None
    """None = attention-only."""
    mixer: Mixer | tuple[Mixer, ...] = Softmax()
    """What mixes positions. Several take turns: layer l has the l-th of them, counted round."""
    position: Position = Learned()
    norm: Norm = LayerNorm()
    norm_place: NormPlace = "pre"
    """Where each block norms: what a sublayer reads, what it adds, both, or the sum."""
    embed_norm: bool = False
    """Whether the same norm stands after the embeddings (BLOOM, BERT)."""
    final_norm: bool = True
    """Whether the same norm stands before the unembedding."""
    macaron: bool = False
    """True: half an MLP, attention, half an MLP. A second MLP before attention, each adds half of its output (Lu et al.
    2019, "Understanding and Improving Transformer From a Multi-Particle Dynamic System Point of View")."""
    parallel: bool = False
    """True: attention and MLP of a block read the same residual and are added together (NeoX)."""
    shared_norm: bool = False
    """True: attention and MLP of a parallel block read through one norm, ln1 (GPT-J, Phi)."""
    causal: bool = True
    """False: every position sees every other (encoders)."""
    window: int | None = None
    """Sliding window: a query sees itself and the `window - 1` positions before it."""
    local_layers: tuple[int, ...] | None = None
    """The layers that have the window; None = all of them."""
    local_position: Rotary | None = None
    """Rotary positions of the layers with the window, where they differ (Gemma 3)."""
    attn_scale: float | None = None
    """Factor on the scores; None = 1/sqrt(d_head)."""
    scale_by_layer: bool = False
    """Additionally divide the scores of layer l by l + 1 (a GPT-2 option)."""
    attn_softcap: float | None = None
    """Scores become cap tanh(score / cap), before the mask (Gemma 2)."""
    sinks: bool = False
    """A trained score per head that takes part in the softmax and belongs to no token (GPT-OSS)."""
    qk_norm: Literal["head", "width"] | None = None
    """Queries and keys normed before rotation: each head alone (Qwen3), or all heads as one vector (OLMo-2)."""
    qkv_bias: bool = True
    out_bias: bool = True
    cross_attention: bool = False
    """Whether every block also attends to a memory, the states of an encoder."""
    embed_scale: float = 1.0
    """Factor on the token embeddings (Gemma: sqrt(d_model))."""
    residual_scale: float = 1.0
    """Factor on what every sublayer adds (Granite)."""
    n_token_types: int = 0
    """Rows of a table of token types added to the embedding (BERT)."""
    unembed: bool = True
    """False: the model ends in its residual stream, without logits."""
    output: Output = FullSoftmax()
    """How the final stream becomes probabilities, in a model with `unembed`."""
    unembed_bias: bool = False
    tied: bool = False
    """Whether the unembedding is the embedding matrix itself."""
    mlm_head: Activation | None = None
    """A dense layer, this activation and a norm before the unembedding (BERT)."""
    logit_scale: float = 1.0
    """Factor on the logits."""
    logit_softcap: float | None = None
    """Logits become cap tanh(logit / cap) (Gemma 2)."""

    def __post_init__(self) -> None:
        self._check_kinds()
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
        fits = self.n_heads % self.kv_heads == 0
        _require(fits, f"n_kv_heads to divide n_heads, got {self.kv_heads} and {self.n_heads}")
        _require(self.window is None or self.window >= 1, f"window >= 1, got {self.window}")
        for rotary in (self.position, self.local_position):
            if isinstance(rotary, Rotary):
                rotated = self.head_width if rotary.dim is None else rotary.dim
                _require(
                    rotated % 2 == 0 and 0 < rotated <= self.head_width,
                    f"an even rotary dim in [2, {self.head_width}], got {rotated}",
                )
        self._check_combinations()
        for mixer in self._given:
            self._check_mixer(mixer)

    def _check_kinds(self) -> None:
        good = all(isinstance(mixer, Mixer) for mixer in self._given)
        _require(self._given and good, f"a mixer or several, got {self.mixer!r}")
        kinds = {
            "position": Position, "norm": Norm, "mlp": MLP | MoE | ConvMLP | None, "local_position": Rotary | None,
            "local_layers": tuple | None, "output": Output,
        }  # fmt: skip
        for name, kind in kinds.items():
            value = getattr(self, name)
            _require(isinstance(value, kind), f"{name} to be one of {kind}, got {value!r}")
        for name, allowed in {
            "norm_place": get_args(NormPlace), "qk_norm": ("head", "width", None),
            "mlm_head": (*get_args(Activation), None),
        }.items():  # fmt: skip
            value = getattr(self, name)
            _require(value in allowed, f"{name} to be one of {allowed}, got {value!r}")
        for name in ("n_layers", "d_model", "n_heads", "n_ctx", "d_vocab"):
            value = getattr(self, name)
            _require(isinstance(value, int), f"a whole number for {name}, got {value!r}")

    def _check_combinations(self) -> None:
        if self.local_layers is not None:
            _require(self.window is not None, f"a window for local_layers, got {self.local_layers}")
            bad = [layer for layer in self.local_layers if not 0 <= layer < self.n_layers]
            _require(not bad, f"local_layers in [0, {self.n_layers - 1}], got {bad[:1]}")
        _require(self.local_position is None or self.window is not None, "a window for local_position")
        plain = self.norm_place == "pre" and self.mlp is not None and not self.cross_attention
        _require(not self.parallel or plain, "norm_place 'pre', an MLP and no cross-attention for parallel")
        _require(not self.shared_norm or self.parallel, "parallel blocks for shared_norm")
        fits = plain and not self.parallel and not isinstance(self.mlp, ConvMLP)
        _require(
            not self.macaron or fits,
            "norm_place 'pre', an MLP of single positions, no parallel and no cross-attention for macaron",
        )
        special = self.cross_attention and (self.sinks or self.qk_norm or self.attn_softcap is not None)
        _require(not special, "no sinks, qk_norm, attn_softcap for cross_attention")
        _require(self.n_token_types >= 0, f"n_token_types >= 0, got {self.n_token_types}")
        head = self.tied or self.unembed_bias or self.mlm_head or self.logit_softcap
        _require(self.unembed or not head, "unembed for tied, unembed_bias, mlm_head or logit_softcap")
        full = isinstance(self.output, FullSoftmax)
        linear = self.tied or self.mlm_head or self.logit_softcap or self.logit_scale != 1 or not self.unembed
        fits = full or not linear
        _require(fits, f"unembed, no tied, mlm_head, logit_softcap and logit_scale under {self.output}")
        _require(full or self.d_vocab > 1, f"d_vocab >= 2 under {self.output}")
        if isinstance(self.output, AdaptiveSoftmax):
            last = self.output.cutoffs[-1]
            _require(last < self.d_vocab, f"cutoffs below d_vocab, got {last} and {self.d_vocab}")
            narrowest = self.d_model // self.output.div_value ** len(self.output.cutoffs)
            _require(narrowest >= 1, f"d_model >= div_value^{len(self.output.cutoffs)} under {self.output}")
        _require(self.causal or not isinstance(self.mlp, ConvMLP), "a causal model for ConvMLP")
        alone = self.mixer
        if isinstance(alone, tuple):  # layers take turns, each option is for those that have it
            return
        kind, scaled = type(alone).__name__, self.attn_scale is not None or self.scale_by_layer
        scoreless = isinstance(alone, Linear | Lightning | Polar | Synthesizer)
        scoreless = scoreless or (isinstance(alone, Softmax) and alone.score != "dot")
        _require(
            not (scoreless and scaled), f"no attn_scale and no scale_by_layer under {kind}: it has no scale"
        )
        turned = isinstance(self.position, Rotary) and alone.traits.queries and not alone.traits.rotated
        _require(not turned, f"no rotary positions under {kind} in every layer, which does not rotate")

    def _check_mixer(self, mixer: Mixer) -> None:
        """Refuse what contradicts itself: a mixer with an option of another one."""
        name, traits = type(mixer).__name__, mixer.traits
        if isinstance(mixer, Softmax):
            bounded = mixer.score != "dot" or mixer.refinement is not None or mixer.temperature is not None
            _require(not (bounded and self.sinks), f"no sinks beside the {mixer}")
            return
        _require(self.window is None, f"no window under {name}: a window is an option of softmax attention")
        _require(not self.sinks and self.attn_softcap is None, f"no sinks and no attn_softcap under {name}")
        biased = isinstance(self.position, Alibi | Buckets)
        place = type(self.position).__name__
        _require(traits.scored or not biased, f"positions other than {place} under {name}")
        if not traits.queries:
            _require(
                self.qk_norm is None and not isinstance(self.position, Rotary),
                f"no qk_norm and no rotary positions under {name}, which has no queries and keys",
            )
        if isinstance(mixer, DualChunk):
            rotary = self.position if isinstance(self.position, Rotary) else None
            _require(rotary, f"rotary positions for DualChunk, got {self.position}")
            scaling = None if rotary is None else rotary.scaling
            moving = isinstance(scaling, DynamicScaling | LongScaling)
            _require(self.causal, "a causal model under DualChunk")
            _require(not moving, "rotary frequencies that do not depend on the length under DualChunk")
            _require(mixer.chunk <= self.n_ctx, f"a chunk <= n_ctx, got {mixer.chunk} > {self.n_ctx}")
        if isinstance(mixer, Linformer):
            _require(not self.causal, "causal=False under Linformer, which mixes later keys into earlier")
            _require(mixer.rank <= self.n_ctx, f"Linformer's rank <= n_ctx, got {mixer.rank} > {self.n_ctx}")
        if isinstance(mixer, Polar | Differential):
            _require(self.head_width % 2 == 0, f"an even d_head under {name}, got {self.head_width}")
        if isinstance(mixer, Differential):
            _require(self.qk_norm is None, "no qk_norm under Differential, whose heads are two halves")
            half, turned = self.head_width // 2, self.position
            whole = half % 2 == 0
            fits = not isinstance(turned, Rotary) or (whole if turned.dim is None else turned.dim <= half)
            _require(fits, f"rotations that fit half a head under Differential, {half} wide, got {turned}")
        if isinstance(mixer, Reformer):
            _require(self.qk_norm is None, "no qk_norm under Reformer, whose keys are its normalised queries")
        if isinstance(mixer, Synthesizer | Pool | Reformer | LongTermMemory):
            _require(self.kv_heads == self.n_heads, f"as many value heads as heads under {name}")
        if isinstance(mixer, Pool):
            _require(self.n_heads * self.head_width == self.d_model, "n_heads * d_head = d_model under Pool")
        _require(not traits.stateful or self.causal, f"a causal model under {name}")

    @property
    def _given(self) -> tuple[Mixer, ...]:
        return self.mixer if isinstance(self.mixer, tuple) else (self.mixer,)

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """The mixer of every layer."""
        return tuple(self._given[layer % len(self._given)] for layer in range(self.n_layers))

    def at_layer(self, layer: int) -> "ModelConfig":
        """The same with the mixer of one layer in all of them; itself where they do not differ."""
        return (
            dataclasses.replace(self, mixer=(self.mixers[layer],)) if isinstance(self.mixer, tuple) else self
        )

    @property
    def stateful(self) -> bool:
        """Whether any layer keeps a state, so that a pass cannot go on from an arbitrary column of an earlier one."""
        return isinstance(self.mlp, ConvMLP) or any(mixer.traits.stateful for mixer in self._given)

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

    @property
    def sublayers(self) -> tuple[str, ...]:
        """What each block adds to the stream, in order: `mlp_before_out`, `attn_out`, `cross_attn_out`, `mlp_out`."""
        has = {
            "mlp_before_out": self.macaron, "attn_out": True, "cross_attn_out": self.cross_attention,
            "mlp_out": self.mlp is not None,
        }  # fmt: skip
        return tuple(name for name, present in has.items() if present)

    def factor(self, sublayer: str) -> float:
        """What the output of a sublayer (`attn_out`, ...) is multiplied by before it is added to the stream."""
        halved = self.macaron and sublayer in MLPS
        return self.residual_scale * (0.5 if halved else 1.0)

    @property
    def mlp_in_words(self) -> str:
        """What kind of MLP the blocks have, as errors name it."""
        words = {
            MoE: "a mixture of experts",
            ConvMLP: "an MLP with a convolution",
            MLP: "a plain or gated MLP",
        }
        return words.get(type(self.mlp), "attention-only")

    @property
    def position_embedded(self) -> bool:
        """Whether positions are vectors added to the embedding."""
        return isinstance(self.position, Learned | Sinusoidal)

    def is_local(self, layer: int) -> bool:
        """Whether attention of `layer` has the sliding window."""
        return self.window is not None and (self.local_layers is None or layer in self.local_layers)

    def score_scale(self, layer: int) -> float:
        """The factor between q . k and the attention score of `layer`."""
        scale = self.head_width**-0.5 if self.attn_scale is None else self.attn_scale
        return scale / (layer + 1) if self.scale_by_layer else scale

    def to_dict(self) -> Json:
        """A JSON-ready dict; nested records carry their class name under `kind`."""
        return fields_as_json(self)

    @classmethod
    def from_dict(cls, values: Json) -> "ModelConfig":
        """The config that `to_dict` described; ValueError for any key this version does not know."""
        return from_json(cls, values, _KINDS)


@dataclass(frozen=True)
class EncoderDecoderConfig:
    """Two Transformers: an encoder, and a decoder whose blocks also attend to the encoder's final states."""

    encoder: ModelConfig
    decoder: ModelConfig
    start_token: int = 0
    """The token that every target begins with."""
    shared_embedding: bool = True
    """Whether both sides read the same embedding matrix."""

    def __post_init__(self) -> None:
        encodes = not self.encoder.causal and not self.encoder.unembed
        _require(encodes, "an encoder: not causal, no unembedding")
        attends = self.decoder.causal and self.decoder.cross_attention
        _require(attends, "a causal decoder with cross-attention")
        widths = (self.encoder.d_model, self.decoder.d_model)
        _require(widths[0] == widths[1], f"one d_model on both sides, got {widths[0]} and {widths[1]}")
        vocabularies = (self.encoder.d_vocab, self.decoder.d_vocab)
        same = vocabularies[0] == vocabularies[1]
        _require(same or not self.shared_embedding, f"one vocabulary to share, got {vocabularies}")

    def to_dict(self) -> Json:
        """A JSON-ready dict."""
        return fields_as_json(self)

    @classmethod
    def from_dict(cls, values: Json) -> "EncoderDecoderConfig":
        """The config that `to_dict` described; ValueError for any key this version does not know."""
        return from_json(cls, values, _KINDS)


AnyConfig = ModelConfig | EncoderDecoderConfig
_KINDS: dict[str, type] = {
    **RECORDS,
    **{record.__name__: record for record in MIXER_RECORDS},
    "ModelConfig": ModelConfig,
}


def _require(condition: object, what: str) -> None:
    if not condition:
        raise ValueError(f"ModelConfig requires {what}")
