"""The keys of a GGUF file as a config of transformers; every key is used, checked or refused.

transformers has a table of keys. It lacks some keys, stores others under names that its config ignores, and does not
look at which tensors a file has. `MORE` and `READ_OFF` correct that; a key that is not read is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from interp.core.wording import nearest, value_text
from interp.model.config import AnyConfig, ModelConfig, Rotary

if TYPE_CHECKING:
    import gguf
    from transformers import PreTrainedConfig

KINDS = {
    "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss", "minimax-m2": "minimax_m2",
}  # fmt: skip
"""llama.cpp's name of an architecture -> transformers' name, where they differ."""
TYPES = {"gemma3": "gemma3_text", "gemma4": "gemma4_text"}
"""Architecture -> `model_type` of its text model, where that is another type."""
UNPROVEN = ("minimax-m2", "gemma4", "deci", "umt5", "mistral")
"""Architectures in transformers' table that were not tested with a file, or that no file uses."""
ROPE_FACTORS = "rope_freqs.weight"
"""Name of the tensor of divisors of the rotary frequencies (Llama 3.1)."""
LONG_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
"""Names of the tensors of divisors for texts beyond, and within, the original context (Phi-3)."""

# --- which key is which ---------------------------------------------------------------------------------------------

_EXPERTS = {"expert_feed_forward_length": "moe_intermediate_size", "expert_weights_norm": "norm_topk_prob"}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_FINAL_CAP = {"final_logit_softcapping": "final_logit_softcapping"}
MORE: Mapping[str, Mapping[str, str | None]] = {
    "llama": {"attention.key_length": "head_dim"},
    "qwen3": {"attention.key_length": "head_dim"},
    "qwen2moe": {**_EXPERTS, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
    "qwen3moe": _EXPERTS,
    "gpt-oss": {**_WINDOW, "attention.key_length": "head_dim", "expert_feed_forward_length": "intermediate_size"},
    "falcon": {
        "attention.head_count_kv": "num_kv_heads", "feed_forward_length": "ffn_hidden_size",
        "attention.layer_norm_rms_epsilon": None, "attention.layer_norm_epsilon": "layer_norm_epsilon",
    },
    "phi3": {**_WINDOW, "rope.scaling.original_context_length": "original_max_position_embeddings"},
    "t5": {"decoder_block_count": "num_decoder_layers", "attention.head_count_kv": None},
    "stablelm": {"rope.freq_base": "rope_theta"},
    "gpt2": {"context_length": "n_positions", "feed_forward_length": "n_inner", "vocab_size": "vocab_size"},
    "gemma2": {**_FINAL_CAP, "attn_logit_softcapping": "attn_logit_softcapping"},
    "gemma3": {**_FINAL_CAP, "rope.freq_base_swa": "rope_local_base_freq"},
    "lfm2": {"attention.layer_norm_rms_epsilon": "norm_eps"},
    "starcoder2": {"rope.freq_base": "rope_theta", "vocab_size": "vocab_size"},
    "nemotron": {"attention.layer_norm_rms_epsilon": None, "attention.layer_norm_epsilon": "norm_eps"},
}  # fmt: skip
"""Keys of an architecture -> the config's, where transformers does not read them, or reads them into another key."""
INERT = (
    "context_length", "tensor_data_layout", "pooling_type", "decoder_start_token_id",
    "use_parallel_residual",
)  # fmt: skip
"""Keys that change nothing in the decoders read here. Whether StableLM's sublayers are parallel follows from its norms,
since converters have written true for all files.
"""
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "attention.causal": (True,), "ssm.dt_b_c_rms": (False,), "expert_count": (0,), "expert_used_count": (0,),
    "expert_group_count": (0, 1), "expert_group_used_count": (0, 1), "expert_shared_count": (0,),
    "expert_gating_func": (1,), "expert_weights_scale": (0, 1), "leading_dense_block_count": (0,),
    "interleave_moe_layer_step": (1,), "nextn_predict_layers": (0,), "rope.scaling.yarn_ext_factor": (-1, 1),
    "feed_forward_length": (0,), "attention.head_count": (0,), "full_attention_interval": (1,),
    "rope.scale_linear": (0, 1),
}  # fmt: skip
"""Keys that are not read, and the values at which they change nothing."""


@dataclass(frozen=True)
class GgufContents:
    """The keys and the tensors of a GGUF file."""

    path: Path
    fields: Mapping[str, object]
    tensors: Mapping[str, gguf.ReaderTensor]

    @property
    def architecture(self) -> str:
        """llama.cpp's name of this kind of model."""
        return str(self.fields.get("general.architecture"))

    def key(self, name: str) -> object:
        """The value of a key of the architecture, such as "rope.freq_base"; None if the file lacks it."""
        return self.fields.get(f"{self.architecture}.{name}")

    def number(self, name: str, default: int | float | None = None) -> int | float:
        """The value of a key of the architecture that must be a number; `default` where the file lacks it."""
        value = self.key(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(
                f"{self.path}: {self.architecture}.{name} must be a number, got {value_text(value)}"
            )
        return value

    def count(self, name: str) -> int:
        """The value of a key of the architecture that must be a whole number, at least 1."""
        value = self.number(name)
        if value < 1 or value != int(value):
            raise ValueError(
                f"{self.path}: {self.architecture}.{name} must be a count, got {value_text(value)}"
            )
        return int(value)

    def has(self, end: str) -> bool:
        """Whether some layer has a tensor of this name, such as "attn_q.bias"."""
        return any(name.endswith(f".{end}") for name in self.tensors)


def values_of(contents: GgufContents) -> dict[str, object]:
    """The values of transformers' config for the file, with its `model_type`.

    Raises:
        ValueError: transformers does not read the architecture, or the file asks for something that is not read.
    """
    from transformers.integrations.ggml import GGUF_CONFIG_DEFAULTS_MAPPING

    architecture = contents.architecture
    kind = KINDS.get(architecture, architecture)
    values: dict[str, object] = {
        "model_type": TYPES.get(kind, kind),
        **GGUF_CONFIG_DEFAULTS_MAPPING.get(kind, {}),
    }
    for key, name in table(contents).items():
        if name is not None and (stated := contents.key(key)) is not None:
            values[name] = _shared_value(contents, key, stated)
    if "num_attention_heads" in values:
        values.setdefault("num_key_value_heads", values["num_attention_heads"])
    if (embedding := contents.tensors.get("token_embd.weight")) is not None:
        values.setdefault("vocab_size", int(embedding.shape[-1]))
    values["tie_word_embeddings"] = "output.weight" not in contents.tensors
    values |= READ_OFF.get(architecture, _nothing)(contents)
    values |= _rope(contents, values)
    _check_keys(contents)
    return {name: value for name, value in values.items() if name not in _SURPLUS.get(architecture, ())}


_SURPLUS = {"falcon": ("num_key_value_heads",), "t5": ("num_key_value_heads",)}
"""Config keys that are set above for every architecture, and that these architectures' configs do not have."""


def table(contents: GgufContents) -> dict[str, str | None]:
    """The file's key -> the config's key, for the file's architecture; None for a key that is not used."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    tables: Mapping[str, Mapping[str, str | None]] = GGUF_CONFIG_MAPPING  # type: ignore[assignment]
    kind = KINDS.get(contents.architecture, contents.architecture)
    back = {theirs: ours for ours, theirs in KINDS.items()}
    known = sorted({back.get(name, name) for name in tables} - {"general", "tokenizer", *UNPROVEN})
    if contents.architecture not in known:
        raise ValueError(
            f"{contents.path}: architecture {contents.architecture!r} is not read from GGUF; read are "
            f"{', '.join(known)} ({nearest(contents.architecture, known)}); open the checkpoint that the file was "
            "converted from"
        )
    return {**tables[kind], **MORE.get(contents.architecture, {})}


def _shared_value(contents: GgufContents, key: str, value: object) -> object:
    """The value that all layers share, of a number or a list with one value for each layer."""
    if not isinstance(value, list):
        return value
    if contents.architecture == "lfm2" and key == "attention.head_count_kv":
        return max(value, default=0)  # 0 in the layers without attention
    if not value or any(entry != value[0] for entry in value):
        raise ValueError(
            f"{contents.path}: {contents.architecture}.{key} differs between layers, which is not read: "
            f"{value_text(value)}"
        )
    return value[0]


# --- what the tensors say, or a rule of llama.cpp's -----------------------------------------------------------------


def _nothing(contents: GgufContents) -> dict[str, object]:
    return {}


def _llama(contents: GgufContents) -> dict[str, object]:
    return {"attention_bias": contents.has("attn_q.bias"), "mlp_bias": contents.has("ffn_down.bias")}


def _qwen(contents: GgufContents) -> dict[str, object]:
    return {"attention_bias": contents.has("attn_q.bias")}


def _falcon(contents: GgufContents) -> dict[str, object]:
    """Falcon's form of block: the new one (40B) where there are several key/value heads or two norms."""
    groups, norms = (
        contents.number("attention.head_count_kv", 1),
        2 if contents.has("attn_norm_2.weight") else 1,
    )
    new = groups > 1 or norms == 2
    form = {"new_decoder_architecture": new, "num_ln_in_parallel_attn": norms if new else None}
    return {**form, "bias": contents.has("attn_qkv.bias"), **_tied(contents)}


def _tied(contents: GgufContents) -> dict[str, object]:
    """Whether the unembedding equals the embedding, where converters store both."""
    first, second = (contents.tensors.get(name) for name in ("token_embd.weight", "output.weight"))
    if first is None or second is None:
        return {}
    return {
        "tie_word_embeddings": first.tensor_type == second.tensor_type
        and np.array_equal(first.data, second.data)
    }


def _t5(contents: GgufContents) -> dict[str, object]:
    return {"feed_forward_proj": "gated-gelu" if contents.has("ffn_gate.weight") else "relu"}


def _stablelm(contents: GgufContents) -> dict[str, object]:
    return {
        **_rotated_share(contents),
        "use_qkv_bias": contents.has("attn_q.bias"),
        "use_parallel_residual": not contents.has("ffn_norm.weight"),
        "qk_layernorm": contents.has("attn_q_norm.weight"),
    }


def _rotated_share(contents: GgufContents) -> dict[str, object]:
    """The share of a head's dimensions that are rotated, as `partial_rotary_factor`."""
    if contents.key("rope.dimension_count") is None:
        return {}
    width = contents.number(
        "attention.key_length", contents.count("embedding_length") // contents.count("attention.head_count")
    )
    rotated = contents.count("rope.dimension_count")
    share = rotated / max(width, 1)
    return {"partial_rotary_factor": share if int(width * share) == rotated else math.nextafter(share, 2)}


def _phi3(contents: GgufContents) -> dict[str, object]:
    window = contents.number("attention.sliding_window", 0)
    return {**_rotated_share(contents), "sliding_window": int(window) or None}


def _gemma(largest: int) -> Callable[[GgufContents], dict[str, object]]:
    """The divisor of Gemma's scores, which no key of the file says.

    It is the root of a head's width; in the largest model (of so many layers) that of d_model / heads (llama.cpp,
    models/gemma2.cpp and gemma3.cpp).
    """

    def read_off(contents: GgufContents) -> dict[str, object]:
        scale = contents.number("attention.key_length", 256)
        if contents.number("block_count") == largest:
            scale = contents.count("embedding_length") // contents.count("attention.head_count")
        full = {"layer_types": ["full_attention"] * contents.count("block_count")}
        windowless = contents.architecture == "gemma3" and contents.key("attention.sliding_window") is None
        return {"query_pre_attn_scalar": int(scale), **(full if windowless else _layer_types(contents))}

    return read_off


def _layer_types(contents: GgufContents) -> dict[str, object]:
    """`layer_types`: which layers have a sliding window, if the file has a pattern; else empty."""
    layers, pattern = contents.count("block_count"), contents.key("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        return {
            "layer_types": ["sliding_attention" if is_local else "full_attention" for is_local in pattern]
        }
    every = 0 if pattern is None else contents.count("attention.sliding_window_pattern")
    kinds = [
        "sliding_attention" if (layer + 1) % every else "full_attention"
        for layer in range(layers * bool(every))
    ]
    return {"layer_types": kinds} if every else {}


def _lfm2(contents: GgufContents) -> dict[str, object]:
    heads = contents.key("attention.head_count_kv")
    counts = heads if isinstance(heads, list) else [heads] * contents.count("block_count")
    kinds = ["full_attention" if count else "conv" for count in counts]
    bias = contents.has("shortconv.conv.bias")
    return {"layer_types": kinds, "block_auto_adjust_ff_dim": False, "conv_bias": bias}


def _starcoder2(contents: GgufContents) -> dict[str, object]:
    return {"use_bias": contents.has("attn_q.bias")}


READ_OFF: Mapping[str, Callable[[GgufContents], dict[str, object]]] = {
    "llama": _llama, "qwen3": _qwen, "qwen3moe": _qwen, "falcon": _falcon, "t5": _t5, "stablelm": _stablelm,
    "phi3": _phi3, "nemotron": _rotated_share, "gemma2": _gemma(46), "gemma3": _gemma(62), "lfm2": _lfm2,
    "starcoder2": _starcoder2, "bloom": _tied,
}  # fmt: skip
"""By architecture: the function for config fields that follow from the tensors in the file, or from several keys."""
READ_OFF_KEYS = {
    "stablelm": ("rope.dimension_count",), "phi3": ("rope.dimension_count",), "nemotron": ("rope.dimension_count",),
    "gemma2": ("attention.sliding_window_pattern",), "gemma3": ("attention.sliding_window_pattern",),
    "t5": ("attention.layer_norm_rms_epsilon", "attention.head_count_kv", "attention.value_length"),
    "bloom": ("attention.head_count_kv", "feed_forward_length"),
}  # fmt: skip


# --- rotary scaling -----------------------------------------------------------------------------------------------

YARN = {
    "original_context_length": "original_max_position_embeddings", "yarn_attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow",
}  # fmt: skip
SCALING = ("type", "factor", "finetuned", "attn_factor", *YARN)
"""Keys of a file about rotary scaling, after "rope.scaling."."""


def _rope(contents: GgufContents, values: Mapping[str, object]) -> dict[str, object]:
    """The config's keys of rotary scaling: linear, YaRN, or a factor for each frequency."""
    stretched = contents.number("rope.scaling.factor", 1.0) not in (0, 1)
    kind = contents.key("rope.scaling.type") or ("linear" if stretched else "none")  # llama.cpp's default
    rule: dict[str, object] = {}
    if factors := rope_tensors(contents):
        if ROPE_FACTORS in factors and kind != "none":
            raise ValueError(f"{contents.path}: {ROPE_FACTORS} beside rope.scaling.type {kind!r} is not read")
        rule = _longrope(contents)
    elif contents.number("rope.scaling.attn_factor", 1.0) != 1:
        raise ValueError(
            f"{contents.path}: {contents.architecture}.rope.scaling.attn_factor is "
            f"{contents.key('rope.scaling.attn_factor')!r}, which is read beside factors of frequencies alone"
        )
    elif kind == "linear":
        rule = {"rope_type": "linear", "factor": float(contents.number("rope.scaling.factor"))}
    elif kind == "yarn":
        rule = {"rope_type": "yarn", "factor": float(contents.number("rope.scaling.factor"))}
        rule |= {
            theirs: contents.number(f"rope.scaling.{ours}")
            for ours, theirs in YARN.items()
            if contents.key(f"rope.scaling.{ours}") is not None
        }
        if contents.architecture == "gpt-oss":
            rule["truncate"] = False  # which no key says
    elif kind != "none":
        raise ValueError(
            f"{contents.path}: {contents.architecture}.rope.scaling.type is {kind!r}; read are none, linear and yarn"
        )
    elif contents.architecture == "gpt-oss":
        rule = {"rope_type": "default"}  # its config's own default is a scaling
    if not rule:
        return {}
    inside = {name: values[name] for name in ("rope_theta", "partial_rotary_factor") if name in values}
    rope_table = {**rule, **inside}
    return {
        "rope_parameters": {"full_attention": rope_table} if contents.architecture == "gemma3" else rope_table
    }


def rope_tensors(contents: GgufContents) -> tuple[str, ...]:
    """Names of the file's tensors that hold factors of rotary frequencies and no weights."""
    if all(name in contents.tensors for name in LONG_FACTORS):
        return LONG_FACTORS
    return (ROPE_FACTORS,) if ROPE_FACTORS in contents.tensors else ()


def _longrope(contents: GgufContents) -> dict[str, object]:
    """The LongRoPE rule, which divides each frequency by its own factor; Llama 3.1 has one list for all lengths."""
    import gguf

    names = LONG_FACTORS if LONG_FACTORS[0] in rope_tensors(contents) else (ROPE_FACTORS, ROPE_FACTORS)
    long, short = (
        [float(x) for x in gguf.dequantize(contents.tensors[name].data, contents.tensors[name].tensor_type)]
        for name in names
    )
    if (
        all(factor == 1 for factor in (*long, *short))
        and contents.number("rope.scaling.attn_factor", 1.0) == 1
    ):
        return {}
    original = contents.key("rope.scaling.original_context_length") if names == LONG_FACTORS else None
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "attention_factor": float(contents.number("rope.scaling.attn_factor", 1.0)),
        "original_max_position_embeddings": contents.count("context_length")
        if original is None
        else original,
    }


# --- what is left -------------------------------------------------------------------------------------------------


def _check_keys(contents: GgufContents) -> None:
    """ValueError naming a key of the architecture that is not read and may change the output."""
    known, prefix = {*_read_keys(contents), *CHECKED, *INERT}, f"{contents.architecture}."
    for name in (key.removeprefix(prefix) for key in contents.fields if key.startswith(prefix)):
        value = contents.key(name)
        if name not in known and value not in NEUTRAL.get(name, ()):
            raise ValueError(f"{contents.path}: key {prefix}{name} = {value_text(value)} is not understood")


def _read_keys(contents: GgufContents) -> set[str]:
    """The keys of the file that were read into the config."""
    told = {name for name, theirs in table(contents).items() if theirs is not None}
    return {
        *told,
        *READ_OFF_KEYS.get(contents.architecture, ()),
        *(f"rope.scaling.{name}" for name in SCALING),
    }


def _rotated_dims(config: ModelConfig) -> int | float | None:
    if not isinstance(config.position, Rotary):
        return None
    return config.head_width if config.position.dim is None else config.position.dim


def _rope_base(config: ModelConfig) -> int | float | None:
    return config.position.base if isinstance(config.position, Rotary) else None


CHECKED: Mapping[str, Callable[[ModelConfig], float | None]] = {
    "attention.key_length": lambda c: c.head_width,
    "attention.value_length": lambda c: c.head_width,
    "attention.head_count": lambda c: c.n_heads,
    "attention.head_count_kv": lambda c: c.kv_heads,
    "attention.scale": lambda c: c.head_width**-0.5 if c.attn_scale is None else c.attn_scale,
    "rope.dimension_count": _rotated_dims,
    "rope.freq_base": _rope_base,
    "attention.sliding_window": lambda c: c.window,
    "attn_logit_softcapping": lambda c: c.attn_softcap,
    "final_logit_softcapping": lambda c: c.logit_softcap,
    "embedding_length": lambda c: c.d_model,
    "block_count": lambda c: c.n_layers,
    "vocab_size": lambda c: c.d_vocab,
    "logit_scale": lambda c: c.logit_scale,
    "attention.layer_norm_rms_epsilon": lambda c: getattr(c.norm, "eps", None),
    "attention.layer_norm_epsilon": lambda c: getattr(c.norm, "eps", None),
}
"""Key of the file -> the number in our config that it must equal (`check_agreement`)."""


def check_agreement(contents: GgufContents, config: AnyConfig) -> None:
    """Check that the numbers in the file's header are those of the config made of it.

    Raises:
        ValueError: they differ, naming the key.
    """
    if not isinstance(config, ModelConfig):
        return
    for name, ours in CHECKED.items():
        value, our_value = contents.key(name), ours(config)
        if isinstance(value, bool | int | float) and (
            our_value is None or abs(float(value) - float(our_value)) > 1e-6 * abs(value)
        ):
            no_window = value == 0 or (our_value is None and value >= config.n_ctx)
            if name == "attention.sliding_window" and no_window:
                continue  # a window as long as the context changes nothing
            raise ValueError(
                f"{contents.path}: {contents.architecture}.{name} is {value!r}, and the config made of this file "
                f"says {our_value!r}"
            )


def check_agreement_with_theirs(contents: GgufContents, config: PreTrainedConfig) -> None:
    """ValueError naming a key that is not read, for a wrapped network, unless its value is the config's default."""
    heads = getattr(config, "num_attention_heads", None) or 1
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    plain = {"attention.key_length": width, "attention.value_length": width, "rope.dimension_count": width}
    for name in CHECKED.keys() - _read_keys(contents):
        value = contents.key(name)
        if value is not None and value not in (*NEUTRAL.get(name, ()), plain.get(name)):
            raise ValueError(
                f"{contents.path}: key {contents.architecture}.{name} = {value_text(value)} is not understood"
            )
