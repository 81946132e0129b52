"""Tiny GGUF files of a transformers model, laid out as llama.cpp's own converter lays them out.

Written from what the converter does (llama.cpp, conversion/*.py), not from what a reader expects: names by `gguf`'s
table, the keys that the converter writes for each architecture, and its changes of layout.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from einops import rearrange
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

Keys = Mapping[str, object]
Named = tuple[str, Tensor]
ALIGNED = 32
"""Numbers of a block of the smaller types."""


def same(name: str, x: Tensor, c: PreTrainedConfig) -> Iterator[Named]:
    """Every tensor as it is."""
    yield name, x


@dataclass(frozen=True)
class Layout:
    """What the converter does for one architecture."""

    arch: gguf.MODEL_ARCH
    keys: Callable[[PreTrainedConfig], Keys]
    tensors: Callable[[str, Tensor, PreTrainedConfig], Iterator[Named]] = same


# --- keys ---------------------------------------------------------------------------------------------------------


def shared(c: PreTrainedConfig) -> dict[str, object]:
    """The keys that the converter writes of any config (`TextModel.set_gguf_parameters`)."""
    rope = getattr(c, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    found = {
        "block_count": c.num_hidden_layers,
        "context_length": getattr(c, "max_position_embeddings", None),
        "embedding_length": c.hidden_size,
        "feed_forward_length": getattr(c, "intermediate_size", None),
        "attention.head_count": getattr(c, "num_attention_heads", None),
        "attention.head_count_kv": getattr(c, "num_key_value_heads", None),
        "rope.freq_base": rope.get("rope_theta"),
        "attention.layer_norm_rms_epsilon": getattr(c, "rms_norm_eps", None),
        "attention.layer_norm_epsilon": getattr(c, "layer_norm_eps", getattr(c, "layer_norm_epsilon", None)),
        "expert_count": getattr(c, "num_local_experts", getattr(c, "num_experts", None)),
        "expert_used_count": getattr(c, "num_experts_per_tok", None),
    }
    if "head_dim" in c.to_dict() and c.head_dim is not None:
        found |= {"attention.key_length": c.head_dim, "attention.value_length": c.head_dim}
    if rope.get("rope_type") in ("linear", "yarn"):
        found |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope.get("rope_type") == "yarn":
        names = {
            "original_max_position_embeddings": "original_context_length",
            "attention_factor": "yarn_attn_factor",
            "beta_fast": "yarn_beta_fast",
            "beta_slow": "yarn_beta_slow",
        }
        found |= {f"rope.scaling.{gguf_name}": rope.get(name) for name, gguf_name in names.items()}
    return found


def heads(c: PreTrainedConfig) -> int:
    """How wide a head is."""
    return getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads


def share(c: PreTrainedConfig) -> float:
    """How much of a head is rotated."""
    return (c.rope_parameters or {}).get("partial_rotary_factor", 1.0)


def llama_keys(c: PreTrainedConfig) -> Keys:
    """Llama and Mistral."""
    return {**shared(c), "vocab_size": c.vocab_size, "rope.dimension_count": heads(c)}


def experts_keys(c: PreTrainedConfig) -> Keys:
    """Qwen's mixtures of experts."""
    shared_width = getattr(c, "shared_expert_intermediate_size", None)
    widths = {
        "expert_feed_forward_length": c.moe_intermediate_size,
        "expert_shared_feed_forward_length": shared_width,
    }
    return {**shared(c), **widths}


def falcon_keys(c: PreTrainedConfig) -> Keys:
    """Falcon, whose config has no context."""
    return {
        "context_length": 2048, "tensor_data_layout": "jploski", "embedding_length": c.hidden_size,
        "feed_forward_length": 4 * c.hidden_size, "block_count": c.num_hidden_layers,
        "attention.head_count": c.num_attention_heads, "attention.head_count_kv": falcon_groups(c),
        "attention.layer_norm_epsilon": c.layer_norm_epsilon,
    }  # fmt: skip


def falcon_groups(c: PreTrainedConfig) -> int:
    """Heads of keys and values, which the older form's config leaves at the number of heads."""
    return c.num_kv_heads if c.new_decoder_architecture else 1


def phi3_keys(c: PreTrainedConfig) -> Keys:
    """Phi-3, its window 0 where there is none."""
    original = c.rope_parameters.get("original_max_position_embeddings", c.max_position_embeddings)
    return {
        **{k: v for k, v in shared(c).items() if not k.startswith("rope.scaling")},
        "rope.scaling.original_context_length": original,
        "rope.dimension_count": int(share(c) * c.hidden_size) // c.num_attention_heads,
        "attention.sliding_window": c.sliding_window or 0,
        "rope.scaling.attn_factor": long_factor(c),
    }


def long_factor(c: PreTrainedConfig) -> float | None:
    """What the converter says LongRoPE multiplies queries and keys by, where there is LongRoPE."""
    if c.rope_parameters["rope_type"] != "longrope":
        return None
    original = c.rope_parameters["original_max_position_embeddings"]
    stretch = c.max_position_embeddings / original
    return math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0


def bloom_keys(c: PreTrainedConfig) -> Keys:
    """BLOOM."""
    return {
        "context_length": c.hidden_size, "embedding_length": c.hidden_size, "block_count": c.n_layer,
        "feed_forward_length": 4 * c.hidden_size, "attention.head_count": c.n_head,
        "attention.head_count_kv": c.n_head, "attention.layer_norm_epsilon": c.layer_norm_epsilon,
    }  # fmt: skip


def t5_keys(c: PreTrainedConfig) -> Keys:
    """T5; it does not say whether its MLP is gated."""
    return {
        "context_length": 512, "embedding_length": c.d_model, "feed_forward_length": c.d_ff,
        "block_count": c.num_layers, "decoder_block_count": c.num_decoder_layers,
        "attention.head_count": c.num_heads, "attention.key_length": c.d_kv, "attention.value_length": c.d_kv,
        "attention.layer_norm_epsilon": c.layer_norm_epsilon,
        "attention.layer_norm_rms_epsilon": c.layer_norm_epsilon,
        "attention.relative_buckets_count": c.relative_attention_num_buckets,
        "decoder_start_token_id": c.decoder_start_token_id,
    }  # fmt: skip


def stablelm_keys(c: PreTrainedConfig) -> Keys:
    """StableLM, which says no base of its rotation."""
    rotated = int(share(c) * heads(c))
    found = {"rope.dimension_count": rotated, "use_parallel_residual": c.use_parallel_residual}
    return {**{k: v for k, v in shared(c).items() if k != "rope.freq_base"}, **found}


def gpt2_keys(c: PreTrainedConfig) -> Keys:
    """GPT-2."""
    return {
        "block_count": c.n_layer, "context_length": c.n_positions, "embedding_length": c.n_embd,
        "feed_forward_length": c.n_inner or 4 * c.n_embd, "attention.head_count": c.n_head,
        "attention.layer_norm_epsilon": c.layer_norm_epsilon,
    }  # fmt: skip


def gemma_keys(c: PreTrainedConfig) -> Keys:
    """Gemma 2 and 3."""
    near = (c.rope_parameters or {}).get("sliding_attention") or {}
    return {
        **shared(c),
        "attention.sliding_window": c.sliding_window,
        "attn_logit_softcapping": getattr(c, "attn_logit_softcapping", None),
        "final_logit_softcapping": c.final_logit_softcapping,
        "rope.freq_base_swa": near.get("rope_theta"),
    }


def lfm2_keys(c: PreTrainedConfig) -> Keys:
    """LFM2, which has heads of keys and values in some layers only."""
    width = c.intermediate_size
    if c.block_auto_adjust_ff_dim:
        width = int(c.block_ffn_dim_multiplier * int(2 * width / 3))
        width = -(-width // c.block_multiple_of) * c.block_multiple_of
    return {
        **shared(c), "vocab_size": c.vocab_size, "shortconv.l_cache": c.conv_L_cache,
        "attention.layer_norm_rms_epsilon": c.norm_eps, "feed_forward_length": width,
        "attention.head_count_kv": [c.num_key_value_heads * (kind != "conv") for kind in c.layer_types],
    }  # fmt: skip


def oss_keys(c: PreTrainedConfig) -> Keys:
    """GPT-OSS."""
    mine = {
        "attention.sliding_window": c.sliding_window,
        "expert_feed_forward_length": c.intermediate_size,
    }
    return {**shared(c), **mine}


def nemotron_keys(c: PreTrainedConfig) -> Keys:
    """Nemotron."""
    found = {"rope.dimension_count": int(share(c) * heads(c)), "attention.layer_norm_epsilon": c.norm_eps}
    return {**shared(c), **found, "vocab_size": c.vocab_size}


def starcoder2_keys(c: PreTrainedConfig) -> Keys:
    """StarCoder 2."""
    return {**shared(c), "attention.layer_norm_epsilon": c.norm_epsilon}


def mamba_keys(c: PreTrainedConfig) -> Keys:
    """Mamba, which has no attention."""
    return {
        "context_length": 2**20, "embedding_length": c.hidden_size, "feed_forward_length": 0,
        "attention.head_count": 0, "block_count": c.num_hidden_layers, "ssm.conv_kernel": c.conv_kernel,
        "ssm.inner_size": c.intermediate_size, "ssm.state_size": c.state_size,
        "ssm.time_step_rank": c.time_step_rank, "attention.layer_norm_rms_epsilon": c.layer_norm_epsilon,
        "ssm.dt_b_c_rms": False,
    }  # fmt: skip


# --- tensors ------------------------------------------------------------------------------------------------------


def permuted(name: str, x: Tensor, c: PreTrainedConfig) -> Iterator[Named]:
    """Llama: the two halves that rotate together are put beside each other, in queries and keys."""
    for part, n in (("q_proj", c.num_attention_heads), ("k_proj", c.num_key_value_heads)):
        if f".{part}." in name:
            x = rearrange(x, "(h two e) ... -> (h e two) ...", h=n, two=2)
    yield name, x


def norms_plus_one(name: str, x: Tensor, c: PreTrainedConfig) -> Iterator[Named]:
    """Gemma and Nemotron: a norm's gamma is what it is, not what is added to one."""
    yield name, x + 1 if name.endswith("norm.weight") else x


def falcon_tensors(name: str, x: Tensor, c: PreTrainedConfig) -> Iterator[Named]:
    """Falcon: all queries, then all keys, then all values (the layout "jploski")."""
    if "query_key_value" in name:
        g = falcon_groups(c)
        groups = rearrange(x, "(g n e) ... -> g n e ...", g=g, n=c.num_attention_heads // g + 2)
        parts = (groups[:, :-2], groups[:, -2:-1], groups[:, -1:])
        x = torch.cat([part.flatten(0, 2) for part in parts])
    yield name, x


def bloom_tensors(name: str, x: Tensor, c: PreTrainedConfig) -> Iterator[Named]:
    """BLOOM: all queries, then all keys, then all values."""
    if "query_key_value" in name:
        x = rearrange(x, "(h three e) ... -> (three h e) ...", h=c.n_head, three=3)
    yield name.removeprefix("transformer."), x


def gpt2_tensors(name: str, x: Tensor, c: PreTrainedConfig) -> Iterator[Named]:
    """GPT-2: `[out, in]`."""
    yield name, x.T if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")) else x


def experts_tensors(name: str, x: Tensor, c: PreTrainedConfig) -> Iterator[Named]:
    """Qwen's experts: gate, up and down, each a stack; transformers joins the first two."""
    if name.endswith("experts.gate_up_proj"):
        gate, up = x.chunk(2, dim=1)
        yield name.replace("gate_up_proj", "gate_proj.weight"), gate
        yield name.replace("gate_up_proj", "up_proj.weight"), up
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", x
    else:
        yield name, x


def oss_tensors(name: str, x: Tensor, c: PreTrainedConfig) -> Iterator[Named]:
    """GPT-OSS: stacks `[expert, out, in]`, gate and up apart; sinks as a weight."""
    if name.endswith("sinks"):
        yield f"{name}.weight", x
    elif "experts.gate_up_proj" in name:
        stem, end = name.partition("gate_up_proj")[0], "bias" if name.endswith("bias") else "weight"
        x = x if end == "bias" else x.mT
        yield f"{stem}gate_proj.{end}", x[:, ::2]
        yield f"{stem}up_proj.{end}", x[:, 1::2]
    elif "experts.down_proj" in name:
        end = "bias" if name.endswith("bias") else "weight"
        yield f"{name.removesuffix('_bias')}.{end}", x if end == "bias" else x.mT
    else:
        yield name, x


def lfm2_tensors(name: str, x: Tensor, c: PreTrainedConfig) -> Iterator[Named]:
    """LFM2: the kernel as a matrix."""
    yield name, x.squeeze(1) if "conv.conv.weight" in name else x


def t5_tensors(name: str, x: Tensor, c: PreTrainedConfig) -> Iterator[Named]:
    """T5: one embedding."""
    if "embed_tokens" not in name:
        yield name, x


def stablelm_tensors(name: str, x: Tensor, c: PreTrainedConfig) -> Iterator[Named]:
    """StableLM 2 12B: the norms of all heads as one matrix (stacked by `write`)."""
    yield name, x


def mamba_tensors(name: str, x: Tensor, c: PreTrainedConfig) -> Iterator[Named]:
    """Mamba: A, not its logarithm; the kernel as a matrix."""
    if name.endswith(".A_log"):
        x = -x.exp()
    yield name, x.squeeze(1) if "conv1d.weight" in name else x


ARCH = gguf.MODEL_ARCH
LAYOUTS: dict[str, Layout] = {
    "llama": Layout(ARCH.LLAMA, llama_keys, permuted),
    "mistral": Layout(ARCH.LLAMA, llama_keys, permuted),
    "qwen2": Layout(ARCH.QWEN2, shared),
    "qwen3": Layout(ARCH.QWEN3, shared),
    "qwen2_moe": Layout(ARCH.QWEN2MOE, experts_keys, experts_tensors),
    "qwen3_moe": Layout(ARCH.QWEN3MOE, experts_keys, experts_tensors),
    "falcon": Layout(ARCH.FALCON, falcon_keys, falcon_tensors),
    "phi3": Layout(ARCH.PHI3, phi3_keys),
    "bloom": Layout(ARCH.BLOOM, bloom_keys, bloom_tensors),
    "t5": Layout(ARCH.T5, t5_keys, t5_tensors),
    "umt5": Layout(ARCH.T5, t5_keys, t5_tensors),
    "stablelm": Layout(ARCH.STABLELM, stablelm_keys, stablelm_tensors),
    "gpt2": Layout(ARCH.GPT2, gpt2_keys, gpt2_tensors),
    "gemma2": Layout(ARCH.GEMMA2, gemma_keys, norms_plus_one),
    "gemma3_text": Layout(ARCH.GEMMA3, gemma_keys, norms_plus_one),
    "lfm2": Layout(ARCH.LFM2, lfm2_keys, lfm2_tensors),
    "gpt_oss": Layout(ARCH.GPT_OSS, oss_keys, oss_tensors),
    "starcoder2": Layout(ARCH.STARCODER2, starcoder2_keys),
    "nemotron": Layout(ARCH.NEMOTRON, nemotron_keys, norms_plus_one),
    "mamba": Layout(ARCH.MAMBA, mamba_keys, mamba_tensors),
}
"""By the config's `model_type`."""


# --- files --------------------------------------------------------------------------------------------------------


def tensors_of(model: PreTrainedModel) -> dict[str, np.ndarray]:
    """A model's tensors under the names and in the layout of a GGUF file."""
    config, layout = model.config, LAYOUTS[model.config.model_type]
    table = gguf.get_tensor_name_map(
        layout.arch, max(config.num_hidden_layers, getattr(config, "num_decoder_layers", 0))
    )
    state = stacked(model.state_dict())
    if getattr(config, "scale_decoder_outputs", config.tie_word_embeddings):
        state.pop("lm_head.weight", None)
    found: dict[str, np.ndarray] = {}
    for name, x in state.items():
        for new, value in layout.tensors(name, x.detach().float(), config):
            stem, dot, end = new.rpartition(".")
            stem, end = (stem, dot + end) if end in ("weight", "bias") else (new, "")
            known = table.get_name(stem)
            assert known is not None, f"gguf has no name for {new}"
            found[known + end] = value.contiguous().numpy()
    return found


def stacked(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict with the norms of StableLM's heads, a module each, as matrices."""
    found: dict[str, Tensor] = {}
    for name, x in state.items():
        stem, norms, _ = name.partition(".norms.")
        key = f"{stem}.weight" if norms else name
        found[key] = torch.cat([found[key], x[None]]) if key in found else x[None] if norms else x
    return found


def long_factors(config: PreTrainedConfig) -> dict[str, np.ndarray]:
    """The tensors of LongRoPE."""
    return {
        f"rope_factors_{kind}.weight": np.array(config.rope_parameters[f"{kind}_factor"], dtype=np.float32)
        for kind in ("long", "short")
    }


def rope_freqs(model: PreTrainedModel) -> np.ndarray:
    """What each frequency of Llama 3.1 is divided by, as the converter stores it."""
    rope, d_head = model.config.rope_parameters, heads(model.config)
    plain = rope["rope_theta"] ** -(torch.arange(0, d_head, 2).float() / d_head)
    return (plain / model.model.rotary_emb.inv_freq).numpy()


def write(
    path: Path,
    model: PreTrainedModel,
    *,
    name: str = "tiny",
    types: Mapping[str, gguf.GGMLQuantizationType] | gguf.GGMLQuantizationType | None = None,
    keys: Keys | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
) -> Path:
    """A GGUF file of a model.

    types: how matrices are stored, all or by name; F32 without one. keys: other values of keys of the architecture,
    or of any that has its whole name; None leaves a key out. tensors: others by their names, None leaves one out.
    """
    layout = LAYOUTS[model.config.model_type]
    arch = gguf.MODEL_ARCH_NAMES[layout.arch]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name(name)
    written = {f"{arch}.{key}": value for key, value in layout.keys(model.config).items()}
    written |= {k if is_whole(k) else f"{arch}.{k}": value for k, value in (keys or {}).items()}
    if model.config.vocab_size:
        written = {"tokenizer.ggml.tokens": [f"t{i}" for i in range(model.config.vocab_size)], **written}
    for key, value in written.items():
        if value is not None:
            add(writer, key, value)
    stored = {**tensors_of(model), **(tensors or {})}
    if (getattr(model.config, "rope_parameters", None) or {}).get("rope_type") == "longrope":
        stored = {**long_factors(model.config), **stored}
    for key, x in stored.items():
        if x is None:
            continue
        kind = types.get(key) if isinstance(types, Mapping) else types
        if kind is None or x.ndim < 2 or x.dtype == np.uint8:
            raw = kind if x.dtype == np.uint8 else None
            writer.add_tensor(key, x, raw_dtype=raw)
        else:
            writer.add_tensor(key, gguf.quantize(x, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def is_whole(key: str) -> bool:
    """Whether a key is written as it is, and not after the architecture's name."""
    return key.startswith(("general.", "split.", "tokenizer.", "other."))


def add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    """One key, in the type that the converter gives it."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        assert isinstance(value, list)
        writer.add_array(key, value)
