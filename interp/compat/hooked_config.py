"""A HookedTransformerConfig of TransformerLens as a `ModelConfig`: every field is read, idle, or refused."""

from collections.abc import Mapping
from typing import Literal

from interp.families.spec import Settings
from interp.model.config import (
    MLP,
    Activation,
    Alibi,
    LayerNorm,
    Learned,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    MoE,
    NoNorm,
    Norm,
    NormPlace,
    Position,
    RMSNorm,
    Rotary,
    RotaryScaling,
    YarnScaling,
)

ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_new",
    "gelu_fast": "gelu_new",
    "gelu_pytorch_tanh": "gelu_new",
    "relu": "relu",
    "silu": "silu",
}
"""Their names of activations; `gelu_fast` is `gelu_new` with the constant cut at ten digits."""

OUTPUT_NORMED = ("Olmo2ForCausalLM", "Olmo3ForCausalLM")
"""Architectures with blocks that norm what a sublayer adds: recognised by name, there is no field for it."""
WIDE_QK_NORM = ("OlmoeForCausalLM", *OUTPUT_NORMED)
"""Architectures that norm all heads of a query or key as one vector: likewise."""
FOLDED = ("LNPre", "RMSPre")
"""Norms whose gamma and beta were folded into the weights that read them."""

NOT_ARITHMETIC = (
    "device", "n_devices", "dtype", "seed", "model_name", "tokenizer_name", "tokenizer_prepends_bos",
    "tokenizer_appends_eos", "default_prepend_bos", "default_padding_side", "trust_remote_code", "n_params",
    "from_checkpoint", "checkpoint_index", "checkpoint_label_type", "checkpoint_value", "init_mode", "init_weights",
    "initializer_range", "use_attn_result", "use_split_qkv_input", "use_hook_mlp_in", "use_attn_in",
    "use_hook_tokens", "ungroup_grouped_query_attention", "uses_rms_norm", "layer_norm_folding",
    "quantization_method", "tie_word_embeddings", "decoder_start_token_id", "relative_attention_max_distance",
    "relative_attention_num_buckets", "train_seq_length",
)  # fmt: skip
"""Fields that change no logit of a HookedTransformer with its weights given (a tied unembedding is stored twice)."""


def values_of(config: object) -> dict[str, object]:
    """The fields of a config given as a mapping, or as an object with `to_dict` or attributes.

    Raises:
        ValueError: anything else.
    """
    if isinstance(config, Mapping):
        return {str(key): value for key, value in config.items()}
    found = config.to_dict() if hasattr(config, "to_dict") else getattr(config, "__dict__", None)
    if not isinstance(found, Mapping):
        raise ValueError(
            f"a HookedTransformerConfig or its dict is required, got {type(config).__name__}; "
            "`model.cfg.to_dict()` gives one"
        )
    return values_of(found)


def normalization(values: Mapping[str, object]) -> str | None:
    """The `normalization_type`, "LN" where it is not given; ValueError for one that does not exist."""
    kind = values.get("normalization_type", "LN")
    if kind not in ("LN", "LNPre", "RMS", "RMSPre", None):
        raise ValueError(
            f"TransformerLens: config asks for normalization_type={kind!r}, supported: LN, LNPre, RMS, RMSPre, None"
        )
    return None if kind is None else str(kind)


def to_config(values: Mapping[str, object]) -> ModelConfig:
    """Our config of a HookedTransformerConfig's fields; a field that is missing has TransformerLens' default.

    Raises:
        ValueError: naming a field that is unknown, or asks for something that is not supported.
    """
    settings = Settings(values, "TransformerLens")
    _refuse(settings)
    d_head, d_model = settings.integer("d_head"), settings.integer("d_model")
    n_heads = settings.integer("n_heads", -1)
    n_heads = d_model // d_head if n_heads == -1 else n_heads
    norm, place, causal = _norm(settings, values), _norm_place(settings, values), _causal(settings)
    window, local_layers = _window(settings, causal)
    position, local = _positions(settings, d_head, n_heads, causal)
    config = ModelConfig(
        n_layers=settings.integer("n_layers"), d_model=d_model, n_heads=n_heads, d_head=d_head,
        n_ctx=settings.integer("n_ctx"), d_vocab=settings.integer("d_vocab"), d_vocab_out=_outputs(settings),
        n_kv_heads=settings.integer("n_key_value_heads", n_heads),
        mlp=_mlp(settings, d_model), position=position, norm=norm, norm_place=place,
        embed_norm=_embed_norm(settings, norm, position),
        parallel=settings.flag("parallel_attn_mlp", False), causal=causal,
        window=window, local_layers=local_layers,
        local_position=None if window is None or local == position else local,
        attn_scale=_scale(settings, d_head),
        scale_by_layer=settings.flag("scale_attn_by_inverse_layer_idx", False),
        attn_softcap=_cap(settings, "attn_scores_soft_cap"), sinks=settings.flag("use_attention_sinks", False),
        qk_norm=_qk_norm(settings, norm), unembed_bias=True,
        logit_softcap=_cap(settings, "output_logits_soft_cap"),
    )  # fmt: skip
    settings.present(NOT_ARITHMETIC)
    settings.finish()
    return config


def _refuse(settings: Settings) -> None:
    """ValueError for a field that no `Transformer` can express."""
    settings.require("clip_qkv", None)
    for name in ("use_logn_attn", "use_dynamic_ntk_rope", "load_in_4bit"):
        settings.require(name, False, None)


def _outputs(settings: Settings) -> int | None:
    """The outputs of each position, None for a logit per token; there -1 says the same."""
    outputs = settings.integer("d_vocab_out", -1)
    return None if outputs == -1 else outputs


def _norm(settings: Settings, values: Mapping[str, object]) -> Norm:
    kind, eps = normalization(values), settings.real("eps", 1e-5)
    settings.get("normalization_type")
    if kind in ("LN", "LNPre"):
        settings.require("final_rms", False, None)
        return LayerNorm(eps)
    settings.get("final_rms")
    return NoNorm() if kind is None else RMSNorm(eps)


def _norm_place(settings: Settings, values: Mapping[str, object]) -> NormPlace:
    """Sandwich norms exist in TransformerLens for RMS only; without norms the place says nothing."""
    kind = normalization(values)
    both = settings.flag("use_normalization_before_and_after", False)
    output = settings.text("original_architecture", "") in OUTPUT_NORMED
    if both and output:
        raise ValueError(
            "TransformerLens: use_normalization_before_and_after does not go with Olmo2 or Olmo3"
        )
    if kind is None:
        return "pre"
    if both and kind.startswith("LN"):
        raise ValueError("TransformerLens: use_normalization_before_and_after requires RMS norms, got LN")
    return "sandwich" if both else "output" if output else "pre"


def _embed_norm(settings: Settings, norm: Norm, position: Position) -> bool:
    """Whether there is a norm after the embeddings; ValueError unless the two definitions agree.

    TransformerLens norms the token embedding alone, and always by LayerNorm; a `Transformer` norms the sum, by the
    model's norm.
    """
    if not settings.flag("post_embedding_ln", False):
        return False
    if not isinstance(norm, LayerNorm) or isinstance(position, Learned):
        raise ValueError(
            "TransformerLens: post_embedding_ln requires LayerNorm and positions that are not embedded, "
            f"got {norm} and {position}"
        )
    return True


def _causal(settings: Settings) -> bool:
    settings.require("attention_dir", "causal", "bidirectional")
    return settings.text("attention_dir", "causal") == "causal"


def _window(settings: Settings, causal: bool) -> tuple[int | None, tuple[int, ...] | None]:
    """The window and the layers that have it."""
    settings.present(("window_size", "attn_types"))
    if not settings.flag("use_local_attn", False):
        return None, None
    if not causal:
        raise ValueError(
            "TransformerLens: use_local_attn has no effect there with attention_dir='bidirectional'"
        )
    n_layers, kinds = settings.integer("n_layers"), settings.get("attn_types")
    if not isinstance(kinds, list | tuple) or len(kinds) < n_layers or set(kinds) - {"global", "local"}:
        raise ValueError(
            f"TransformerLens: use_local_attn requires attn_types, 'global' or 'local' for {n_layers} layers, "
            f"got {kinds!r}"
        )
    layers = tuple(layer for layer in range(n_layers) if kinds[layer] == "local")
    if not layers:
        return None, None
    return settings.integer("window_size"), None if len(layers) == n_layers else layers


def _positions(settings: Settings, d_head: int, n_heads: int, causal: bool) -> tuple[Position, Rotary | None]:
    """Positions of the layers without the window, and of those with it."""
    rotary, local = _rotary(settings, d_head)
    settings.require("positional_embedding_type", "standard", "rotary", "alibi")
    kind = settings.text("positional_embedding_type", "standard")
    if kind == "rotary":
        return rotary, local
    if kind == "standard":
        return Learned(), None
    if n_heads & (n_heads - 1) or not causal:
        raise ValueError(
            "TransformerLens: alibi requires a power of two of heads (its slopes differ from the paper's otherwise) "
            f"and causal attention, got {n_heads} heads"
        )
    return Alibi(), None


def _rotary(settings: Settings, d_head: int) -> tuple[Rotary, Rotary]:
    dim = settings.integer("rotary_dim", d_head)
    pairs = settings.flag("rotary_adjacent_pairs", False)
    base = settings.real("rotary_base", 10_000.0)
    local_base = settings.real("rotary_base_local", base)
    scaling, local_scaling = _scalings(settings)
    width = None if dim == d_head else dim
    return Rotary(base, width, pairs, scaling), Rotary(local_base, width, pairs, local_scaling)


def _scalings(settings: Settings) -> tuple[RotaryScaling | None, RotaryScaling | None]:
    """The scaling rule of the layers without the window, and of those with it."""
    parts = Llama3Scaling(
        settings.real("NTK_by_parts_factor", 8.0),
        settings.real("NTK_by_parts_low_freq_factor", 1.0),
        settings.real("NTK_by_parts_high_freq_factor", 4.0),
        settings.integer("NTK_original_ctx_len", 8192),
    )
    yarn = YarnScaling(
        factor=settings.real("yarn_factor", 1.0),
        original_n_ctx=settings.integer("yarn_original_max_position_embeddings", 4096),
        attention_factor=settings.real("yarn_attention_factor", 1.0),
        beta_fast=settings.real("yarn_beta_fast", 32.0),
        beta_slow=settings.real("yarn_beta_slow", 1.0),
        truncate=settings.flag("yarn_truncate", True),
    )
    only_global = settings.flag("yarn_global_attn_only", False)
    linear = settings.real("rotary_scaling_factor", 1.0)
    by_parts, by_yarn = (settings.flag(name, False) for name in ("use_NTK_by_parts_rope", "use_yarn_rope"))
    if by_parts:
        return parts, parts
    if by_yarn:
        return yarn, None if only_global else yarn
    return (None if linear == 1 else LinearScaling(linear)), None


def _scale(settings: Settings, d_head: int) -> float | None:
    """The factor on the scores; TransformerLens has a divisor, the root of d_head where it is -1."""
    divisor = settings.real("attn_scale", -1.0)
    if not settings.flag("use_attn_scale", True):
        return 1.0
    if divisor == -1 or divisor == d_head**0.5:
        return None
    if divisor <= 0:
        raise ValueError(f"TransformerLens: config requires attn_scale above 0, or -1, got {divisor}")
    return 1 / divisor


def _cap(settings: Settings, key: str) -> float | None:
    cap = settings.real(key, -1.0)
    return cap if cap > 0 else None


def _qk_norm(settings: Settings, norm: Norm) -> Literal["head", "width"] | None:
    wide = settings.text("original_architecture", "") in WIDE_QK_NORM
    each = settings.flag("use_qk_norm", False)
    if not wide and not each:
        return None
    if wide and each:
        raise ValueError("TransformerLens: use_qk_norm does not go with Olmo2, Olmo3 or Olmoe")
    if not isinstance(norm, RMSNorm):
        raise ValueError(f"TransformerLens: queries and keys are normed by RMS there, the model by {norm}")
    return "head" if each else "width"


def _mlp(settings: Settings, d_model: int) -> MLP | MoE | None:
    names = (
        "attn_only",
        "gated_mlp",
        "num_experts",
        "experts_per_token",
        "norm_topk_prob",
        "d_mlp",
        "act_fn",
    )
    given = settings.present(names)
    if settings.flag("attn_only", False):
        return None
    act = settings.text("act_fn", "")
    if act not in ACTIVATIONS:
        raise ValueError(
            f"TransformerLens: config asks for act_fn={given.get('act_fn')!r}, supported: {', '.join(ACTIVATIONS)}"
        )
    d_mlp = settings.integer("d_mlp", 4 * d_model)
    if not settings.integer("num_experts", 0):
        return MLP(d_mlp, ACTIVATIONS[act], gated=settings.flag("gated_mlp", False))
    architecture = settings.text("original_architecture", "")
    if architecture == "GptOssForCausalLM":
        raise ValueError(
            f"TransformerLens: the experts of original_architecture={architecture!r} are not supported"
        )
    return MoE(
        settings.integer("num_experts"), settings.integer("experts_per_token"), d_mlp, ACTIVATIONS[act],
        renormalise=settings.flag("norm_topk_prob", True),
    )  # fmt: skip
