"""The config of a Transformer as data: one frozen record, whose alternatives are small records of their own."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from interp.core.boundary import public
from interp.model.block import MLP, Activation, UsualBlock
from interp.model.delta import GatedDelta
from interp.model.experts import MoE, Router
from interp.model.latent import Latent
from interp.model.mamba2 import Mamba2
from interp.model.mounted import FeatureSites
from interp.model.norm import LayerNorm, NoNorm, Norm, NormedHeads, NormPlace, RMSNorm
from interp.model.position import (
    Alibi,
    Buckets,
    DynamicScaling,
    Learned,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    NoPosition,
    Position,
    Rotary,
    RotaryScaling,
    Sinusoidal,
    YarnScaling,
)
from interp.model.records import (
    AnyMLP,
    ConfigRecord,
    FullSoftmax,
    Json,
    Mixer,
    Output,
    fields_as_json,
    from_json,
    positive,
    requires,
)
from interp.model.short_conv import ShortConv
from interp.model.softmax import Softmax

__all__ = [
    "MLP",
    "MLPS",
    "WITH_HEADS",
    "Activation",
    "Alibi",
    "AnyConfig",
    "Buckets",
    "DynamicScaling",
    "EncoderDecoderConfig",
    "FullSoftmax",
    "GatedDelta",
    "Json",
    "Latent",
    "LayerNorm",
    "Learned",
    "LinearScaling",
    "Llama3Scaling",
    "LongScaling",
    "Mamba2",
    "Mixer",
    "MoE",
    "ModelConfig",
    "NoNorm",
    "NoPosition",
    "Norm",
    "NormPlace",
    "Position",
    "RMSNorm",
    "Rotary",
    "RotaryScaling",
    "Router",
    "ShortConv",
    "Sinusoidal",
    "Softmax",
    "UsualBlock",
    "YarnScaling",
]  # fmt: skip

MLPS = ("mlp_before_out", "mlp_out")
"""The sublayers of a block (`ModelConfig.sublayers`) that are MLPs."""
WITH_HEADS = ("attn_out", "cross_attn_out")
"""Sublayers that are sums over heads."""
MOST_LAYERS = 10_000
"""Layers beyond which a number of layers is taken for a mistake; the deepest published Transformers have a thousand."""


@dataclass(frozen=True)
class ModelConfig(ConfigRecord):
    """Everything that decides the arithmetic of a Transformer; no device, no dtype, no tokenizer."""

    n_layers: int
    d_model: int
    n_heads: int
    n_ctx: int
    d_vocab: int
    d_head: int | None = None
    """Width of one head (of its values and of z, where its queries and keys have another); None = d_model / n_heads."""
    n_kv_heads: int | None = None
    """Key/value heads (grouped-query attention); None = n_heads. Query head h reads h // (n_heads / n_kv_heads)."""
    mlp: AnyMLP | None = None
    """The MLP of the blocks; None: attention only."""
    mixer: Mixer | tuple[Mixer, ...] = Softmax()
    """The mixer of positions. Several take turns: layer l has the l-th of them, counted round."""
    position: Position = Learned()
    norm: Norm = LayerNorm()
    norm_place: NormPlace = "pre"
    """Where each block norms: what a sublayer reads, what it adds, the sum, or two of them."""
    embed_norm: bool = False
    """Whether a norm of this kind stands after the embeddings (BLOOM, BERT)."""
    final_norm: bool = True
    """Whether a norm of this kind stands before the unembedding."""
    block: UsualBlock = UsualBlock()
    """The form of a block: what else it has, or does in another order (`interp.lab.Macaron`)."""
    shared_blocks: bool = False
    """Whether all blocks have the weights of the first, whose gradient is then the sum over layers (ALBERT, Lan et al.
    2020; the Universal Transformer).
    """
    parallel: bool = False
    """Whether attention and MLP of a block read the same residual and are added together (NeoX)."""
    shared_norm: bool = False
    """Whether attention and MLP of a parallel block read through one norm, ln1 (GPT-J, Phi)."""
    causal: bool = True
    """Whether a position sees only those before it and itself; False: every position sees every other (encoders)."""
    window: int | None = None
    """Width of the sliding window: a query sees itself and the `window - 1` positions before it; None: all."""
    local_layers: tuple[int, ...] | None = None
    """Layers with the window; None: all of them."""
    local_position: Rotary | None = None
    """Rotary positions of the layers with the window, where they differ (Gemma 3)."""
    attn_scale: float | None = None
    """Factor on the scores; None = 1/sqrt(width of queries and keys), which is d_head but in `Latent`."""
    scale_by_layer: bool = False
    """Whether the scores of layer l are additionally divided by l + 1 (a GPT-2 option)."""
    attn_softcap: float | None = None
    """Soft cap of the scores, which become cap tanh(score / cap), before the mask (Gemma 2)."""
    sinks: bool = False
    """Whether each head has a trained score that takes part in the softmax and belongs to no token (GPT-OSS)."""
    qk_norm: NormedHeads | None = None
    """Whether and how queries and keys are normed before rotation: each head for itself (`head`: Qwen3; `each`, by a
    gamma of its own: Cohere), or all heads as one vector (`width`: OLMo-2).
    """
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
    """Whether there is an unembedding; False: the model ends in its residual stream, without logits."""
    output: Output = FullSoftmax()
    """The output layer, in a model with `unembed`."""
    d_vocab_out: int | None = None
    """Number of outputs of a position, where they are not the tokens (a classifier); None: a logit for each token."""
    unembed_bias: bool = False
    tied: bool = False
    """Whether the unembedding is the embedding matrix itself."""
    mlm_head: Activation | None = None
    """Activation of a dense layer, followed by a norm, before the unembedding (BERT); None: there is no such layer.
    """
    logit_scale: float = 1.0
    """Factor on the logits."""
    logit_softcap: float | None = None
    """Soft cap of the logits, which become cap tanh(logit / cap) (Gemma 2)."""
    features: FeatureSites | None = None
    """The dictionaries that stand in the blocks (`Transformer.with_dictionaries`); no part of the arithmetic, and not
    written to files.
    """

    EARLIER = ("macaron",)
    """Fields of earlier versions, which files may still have."""

    def __post_init__(self) -> None:
        super().__post_init__()
        requires(self._mixer_choices, f"a mixer or several, got {self.mixer!r}")
        if self.d_head is None:
            requires(self.n_heads >= 1, f"n_heads >= 1, got {self.n_heads}")
            requires(
                self.d_model % self.n_heads == 0,
                f"n_heads to divide d_model when d_head is not given, got {self.n_heads} and {self.d_model}",
            )
            object.__setattr__(self, "d_head", self.d_model // self.n_heads)
        if self.n_kv_heads is None:
            object.__setattr__(self, "n_kv_heads", self.n_heads)
        if self.d_vocab_out == self.d_vocab:
            object.__setattr__(self, "d_vocab_out", None)
        for name in ("d_model", "n_heads", "n_ctx", "d_vocab", "d_head", "n_kv_heads"):
            requires(getattr(self, name) >= 1, f"{name} >= 1, got {getattr(self, name)}")
        requires(0 <= self.n_layers <= MOST_LAYERS, f"n_layers in [0, {MOST_LAYERS}], got {self.n_layers}")
        positive(
            self,
            "attn_scale",
            "attn_softcap",
            "embed_scale",
            "residual_scale",
            "logit_scale",
            "logit_softcap",
        )
        fits = self.n_heads % self.kv_heads == 0
        requires(fits, f"n_kv_heads to divide n_heads, got {self.kv_heads} and {self.n_heads}")
        requires(self.window is None or self.window >= 1, f"window >= 1, got {self.window}")
        most = max(mixer.query_width(self) for mixer in self._mixer_choices)
        for rotary in (self.position, self.local_position):
            if isinstance(rotary, Rotary):
                rotated = self.head_width if rotary.dim is None else rotary.dim
                requires(
                    rotated % 2 == 0 and 0 < rotated <= most,
                    f"an even rotary dim in [2, {most}], got {rotated}",
                )
                dynamic = isinstance(rotary.scaling, DynamicScaling)
                requires(
                    rotated > 2 or not dynamic, f"a rotary dim above 2 for DynamicScaling, got {rotated}"
                )
                pairs = len(rotary.scaling.short) if isinstance(rotary.scaling, LongScaling) else rotated // 2
                requires(
                    pairs == rotated // 2,
                    f"a divisor of LongScaling for each of {rotated // 2} pairs, got {pairs}",
                )
        for mixer in self._mixer_choices:
            self._check_mixer(mixer)
        self._check_combinations()

    def _check_combinations(self) -> None:
        if self.local_layers is not None:
            requires(self.window is not None, f"a window for local_layers, got {self.local_layers}")
            bad = [layer for layer in self.local_layers if not 0 <= layer < self.n_layers]
            requires(not bad, f"local_layers in [0, {self.n_layers - 1}], got {bad[:1]}")
        rounded = isinstance(self.position, Alibi) and self.position.rounded
        requires(self.causal or not rounded, f"a causal model for {self.position}")
        requires(self.local_position is None or self.window is not None, "a window for local_position")
        plain = self.norm_place == "pre" and self.mlp is not None and not self.cross_attention
        requires(not self.parallel or plain, "norm_place 'pre', an MLP and no cross-attention for parallel")
        requires(not self.shared_norm or self.parallel, "parallel blocks for shared_norm")
        special = self.cross_attention and (self.sinks or self.qk_norm or self.attn_softcap is not None)
        requires(not special, "no sinks, qk_norm, attn_softcap for cross_attention")
        if self.shared_blocks:
            parts = {
                (mixer, self.mlp and self.mlp.at_layer(layer)) for layer, mixer in enumerate(self.mixers)
            }
            requires(len(parts) <= 1, "one mixer and one MLP in all layers for shared_blocks")
        requires(self.n_token_types >= 0, f"n_token_types >= 0, got {self.n_token_types}")
        head = self.tied or self.unembed_bias or self.mlm_head or self.logit_softcap
        requires(self.unembed or not head, "unembed for tied, unembed_bias, mlm_head or logit_softcap")
        if self.d_vocab_out is not None:
            requires(self.d_vocab_out >= 1, f"d_vocab_out >= 1, got {self.d_vocab_out}")
            plain = self.unembed and not self.tied and self.output == FullSoftmax()
            requires(
                plain, "an unembedding of its own, not tied and without another output layer, for d_vocab_out"
            )
        for record in (self.position, *self.records):
            record.check(self)
        if isinstance(self.mixer, Mixer):  # of layers that take turns each option is for those that have it
            kind, traits = type(self.mixer).__name__, self.mixer.traits
            scaled = self.attn_scale is not None or self.scale_by_layer
            requires(
                traits.scaled or not scaled,
                f"no attn_scale and no scale_by_layer under {kind}: it has no scale",
            )
            turned = isinstance(self.position, Rotary) and traits.queries and not traits.rotated
            requires(not turned, f"no rotary positions under {kind} in every layer, which does not rotate")

    def _check_mixer(self, mixer: Mixer) -> None:
        """Refuse options that a mixer does not have."""
        name, traits = type(mixer).__name__, mixer.traits
        if not traits.softmax:
            plain = self.window is None
            requires(plain, f"no window under {name}: a window is an option of softmax attention")
            plain = not self.sinks and self.attn_softcap is None
            requires(plain, f"no sinks and no attn_softcap under {name}")
        biased, place = isinstance(self.position, Alibi | Buckets), type(self.position).__name__
        requires(traits.scored or not biased, f"positions other than {place} under {name}")
        placed = traits.queries or traits.rotated or not isinstance(self.position, Rotary)
        requires(  # of layers that take turns those with queries have them
            isinstance(self.mixer, tuple) or (placed and (traits.queries or self.qk_norm is None)),
            f"no qk_norm and no rotary positions under {name}, which has no queries and keys",
        )
        fits = traits.grouped or self.kv_heads == self.n_heads
        requires(fits, f"as many value heads as heads under {name}")
        requires(self.causal or not traits.ordered, f"a causal model under {name}")

    @property
    def _mixer_choices(self) -> tuple[Mixer, ...]:
        return self.mixer if isinstance(self.mixer, tuple) else (self.mixer,)

    @property
    def records(self) -> tuple[ConfigRecord, ...]:
        """The records that say something of a block or the output: its form, its mixers, its MLP, the output layer."""
        more = [record for record in (self.mlp, self.features) if record is not None]
        return (self.block, *self._mixer_choices, *more, self.output)

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """The mixer of every layer."""
        return tuple(self._mixer_choices[layer % len(self._mixer_choices)] for layer in range(self.n_layers))

    @property
    def qk_norms(self) -> frozenset[NormedHeads]:
        """The kinds of norm of queries and keys, of the layers that have them."""
        norms = [mixer.qk_norm(self) for mixer in self.mixers]
        return frozenset(norm[1] for norm in norms if norm is not None and not isinstance(norm[0], NoNorm))

    def at_layer(self, layer: int) -> ModelConfig:
        """This config with the mixer and the MLP of one layer in all layers; itself where they do not differ."""
        mlp = None if self.mlp is None else self.mlp.at_layer(layer)
        if isinstance(self.mixer, Mixer) and mlp is self.mlp and self.features is None:
            return self
        features = None if self.features is None else self.features.at_layer(layer)
        return dataclasses.replace(self, mixer=(self.mixers[layer],), mlp=mlp, features=features)

    @property
    def stateful(self) -> bool:
        """Whether any layer keeps a state, so that a pass cannot go on from an arbitrary column of an earlier one."""
        return not self.pointwise or any(mixer.traits.stateful for mixer in self._mixer_choices)

    @property
    def branching(self) -> bool:
        """Whether several continuations of a text can stand in one row, none seeing the others."""
        masked = all(mixer.traits.masked for mixer in self._mixer_choices)
        plain = self.block.unusual is None and not self.cross_attention
        return self.causal and self.pointwise and masked and plain

    @property
    def pointwise(self) -> bool:
        """Whether no MLP sees other tokens than the one that it maps."""
        return self.mlp is None or self.mlp.pointwise

    @property
    def normed(self) -> bool:
        """Whether there are norms."""
        return not isinstance(self.norm, NoNorm)

    @property
    def norms_input(self) -> bool:
        """Whether a norm stands between the stream and what a sublayer reads."""
        return self.norm_place in ("pre", "sandwich")

    @property
    def norms_output(self) -> bool:
        """Whether what a sublayer adds to the stream is normed."""
        return self.norm_place in ("sandwich", "output", "output_post")

    @property
    def norms_sum(self) -> bool:
        """Whether the stream is normed after every sublayer (post-norm blocks)."""
        return self.norm_place in ("post", "output_post")

    @property
    def mlp_width(self) -> int:
        """Columns that the matrices of one token's MLP have together; 0 without MLP."""
        return 0 if self.mlp is None else self.mlp.width

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
    def n_outputs(self) -> int:
        """Number of logits of a position: `d_vocab_out`, or one for each token."""
        return self.d_vocab if self.d_vocab_out is None else self.d_vocab_out

    def require_tokens(self, what: str) -> None:
        """ValueError for `what` unless the outputs are the tokens, so that a logit says what comes next."""
        if self.d_vocab_out is not None:
            raise ValueError(
                f"{what} requires a model that predicts tokens; this one has {self.d_vocab_out} outputs of its own "
                f"beside {self.d_vocab} tokens"
            )

    def require_next_token(self, what: str) -> None:
        """ValueError for `what` unless the model has logits, and they say what comes next."""
        if not self.unembed:
            raise ValueError(
                f"{what} requires logits, this model ends in its residual stream (it has no unembedding)"
            )
        self.require_tokens(what)

    @property
    def rotary_dim(self) -> int:
        """Number of leading dimensions of a head that are rotated; 0 without rotary positions."""
        if not isinstance(self.position, Rotary):
            return 0
        return self.head_width if self.position.dim is None else self.position.dim

    @property
    def sublayers(self) -> tuple[str, ...]:
        """Sublayers that add to the stream in each block, in order.

        `mlp_before_out`, `attn_out`, `cross_attn_out`, `mlp_out`, as far as the block has them.
        """
        return tuple(self.block.sublayers(self))

    @property
    def mlps(self) -> tuple[str, ...]:
        """The MLPs of a block, in order: `mlp_before`, `mlp`."""
        return tuple(name.removesuffix("_out") for name in self.sublayers if name in MLPS)

    def stream_after(self, sublayer: str) -> str:
        """The site of the stream after a sublayer was added, before any norm of the sum."""
        return self.block.sublayers(self)[sublayer]

    def factor(self, sublayer: str) -> float:
        """Factor on the output of a sublayer (`attn_out`, ...) before it is added to the stream."""
        return self.block.factor(sublayer, self)

    @property
    def mlp_in_words(self) -> str:
        """The kind of MLP of the blocks, as errors name it."""
        return "attention-only" if self.mlp is None else self.mlp.words

    @property
    def position_embedded(self) -> bool:
        """Whether positions are vectors added to the embedding."""
        return isinstance(self.position, Learned | Sinusoidal)

    def is_local(self, layer: int) -> bool:
        """Whether attention of `layer` has the sliding window."""
        return self.window is not None and (self.local_layers is None or layer in self.local_layers)

    def score_scale(self, layer: int) -> float:
        """The factor between q . k and the attention score of `layer`."""
        width = self.mixers[layer].query_width(self)
        scale = width**-0.5 if self.attn_scale is None else self.attn_scale
        return scale / (layer + 1) if self.scale_by_layer else scale

    def to_dict(self) -> Json:
        """A JSON-ready dict; nested records carry their class name under `kind`."""
        return {name: value for name, value in fields_as_json(self).items() if name != "features"}

    @classmethod
    @public(unchecked=("values",))
    def from_dict(cls, values: Json) -> ModelConfig:
        """The config that `to_dict` described; ValueError for any key this version does not know."""
        return from_json(cls, values)

    @classmethod
    def today(cls, values: Json) -> Json:
        """The fields of a file of an earlier version: `macaron` is a form of block now."""
        now = {name: value for name, value in values.items() if name not in cls.EARLIER}
        return now | ({"block": {"kind": "Macaron"}} if values.get("macaron") else {})


@dataclass(frozen=True)
class EncoderDecoderConfig(ConfigRecord):
    """Config of two Transformers: an encoder, and a decoder that also attends to the encoder's final states."""

    encoder: ModelConfig
    decoder: ModelConfig
    start_token: int = 0
    """The token that every target begins with."""
    shared_embedding: bool = True
    """Whether both sides read the same embedding matrix."""

    def __post_init__(self) -> None:
        super().__post_init__()
        encodes = not self.encoder.causal and not self.encoder.unembed
        requires(encodes, "an encoder: not causal, no unembedding")
        attends = self.decoder.causal and self.decoder.cross_attention
        requires(attends, "a causal decoder with cross-attention")
        depths = (self.encoder.n_layers, self.decoder.n_layers)
        requires(min(depths) >= 1, f"n_layers >= 1 on both sides, got {depths[0]} and {depths[1]}")
        widths = (self.encoder.d_model, self.decoder.d_model)
        requires(widths[0] == widths[1], f"one d_model on both sides, got {widths[0]} and {widths[1]}")
        vocabularies = (self.encoder.d_vocab, self.decoder.d_vocab)
        same = vocabularies[0] == vocabularies[1]
        requires(same or not self.shared_embedding, f"one vocabulary to share, got {vocabularies}")

    def to_dict(self) -> Json:
        """A JSON-ready dict."""
        return fields_as_json(self)

    @classmethod
    @public(unchecked=("values",))
    def from_dict(cls, values: Json) -> EncoderDecoderConfig:
        """The config that `to_dict` described; ValueError for any key this version does not know."""
        return from_json(cls, values)


AnyConfig = ModelConfig | EncoderDecoderConfig
