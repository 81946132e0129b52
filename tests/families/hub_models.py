"""Small models of the configs of public repositories: a folder as it lies on the hub, and what transformers makes of it.

`hub_configs.json` holds 106 configs, written from memory of public repositories; they are facts about files, and no part
of any of them was copied. Their sizes are shrunk here, and every other key stays.
"""

import copy
import functools
import json
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from tests.families.oracle import SPREAD, _trained, quiet

Values = dict[str, object]
LAYERS, HEADS, WIDTH, N_CTX, WINDOW, D_VOCAB = 4, 4, 64, 64, 6, 256
SIZES: Mapping[str, int] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), HEADS),
    **dict.fromkeys(("hidden_size", "n_embd", "n_embed"), WIDTH),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "moe_intermediate_size"), 96),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), N_CTX),
    **dict.fromkeys(("sliding_window", "window_size"), WINDOW),
    "vocab_size": D_VOCAB, "rotary_dim": 8, "head_dim": 24,
}  # fmt: skip
"""Sizes that are shrunk where a config says more."""
ALREADY = ("mamba2", "t5", "bart", "marian", "distilbert")
"""Types whose configs are written small."""
OF_MPT: Mapping[str, int] = {"d_model": WIDTH, "n_heads": HEADS, "n_layers": LAYERS, "max_seq_len": N_CTX}
DISTINCT = 0.3
"""Standard deviation that a model's logits have at least, so that an error would be seen."""


@functools.cache
def configs() -> dict[str, Values]:
    """The 106 configs by repository."""
    return json.loads(Path(__file__).with_name("hub_configs.json").read_text(encoding="utf-8"))


def shrunk(values: Mapping[str, object]) -> Values:
    """The same config at a size that a test can afford; no key is added or left out."""
    small = copy.deepcopy(dict(values))
    kind = small["model_type"]
    if isinstance(text := small.get("text_config"), dict):
        small["text_config"] = shrunk(text)
    small |= {key: _less(small[key], size) for key, size in OF_MPT.items() if kind == "mpt" and key in small}
    if kind in (*ALREADY, "gemma3"):
        return small
    heads, groups = small.get("num_attention_heads"), small.get("num_key_value_heads")
    inside = small.get("rope_scaling")
    scaling = inside if isinstance(inside, dict) else {}
    stretch = _stretch(small, scaling)
    if small.get("head_dim") is not None and small["head_dim"] == _quotient(small):
        small["head_dim"] = WIDTH // HEADS
    if small.get("word_embed_proj_dim") == small.get("hidden_size"):
        small |= {"word_embed_proj_dim": WIDTH} if "word_embed_proj_dim" in small else {}
    small |= {key: _less(small[key], size) for key, size in SIZES.items() if key in small}
    if isinstance(groups, int):
        apart = groups != heads and kind != "deepseek_v3"  # whose latents are every head's
        small["num_key_value_heads"] = min(groups, 2) if apart else HEADS
    if stretch is not None and stretch != 1:
        small["max_position_embeddings"] = int(stretch * 16)
        for table in (small, scaling):
            if "original_max_position_embeddings" in table:
                table["original_max_position_embeddings"] = 16
    for key in ("layer_types", "no_rope_layers", "attention_layers"):
        if isinstance(listed := small.get(key), list):
            small[key] = listed[:LAYERS]
            small |= {count: len(listed[:LAYERS]) for count in ("num_hidden_layers", "num_layers") if count in small}
    if "attention_types" in small:
        small["attention_types"] = [[["global", "local"], LAYERS // 2]]
    if isinstance(first := small.get("max_window_layers"), int):
        small["max_window_layers"] = min(first, LAYERS // 2)
    for key, value in small.items():
        if key.endswith("_token_id") and isinstance(value, int) and value >= D_VOCAB:
            small[key] = value % D_VOCAB
    return small


def _less(value: object, size: int) -> object:
    return min(value, size) if isinstance(value, int) else value


def _quotient(values: Mapping[str, object]) -> object:
    width, heads = values.get("hidden_size"), values.get("num_attention_heads")
    return width // heads if isinstance(width, int) and isinstance(heads, int) else None


def _stretch(values: Mapping[str, object], scaling: Mapping[str, object]) -> float | None:
    """How far a config stretches the context of its training; None where it says nothing of it."""
    key = "original_max_position_embeddings"
    original, whole = scaling.get(key, values.get(key)), values.get("max_position_embeddings")
    return whole / original if isinstance(original, int) and isinstance(whole, int) else None


def reference(values: Mapping[str, object], folder: Path) -> PreTrainedModel:
    """transformers' model of a config, every parameter perturbed, whose checkpoint then lies in the folder."""
    (folder / "config.json").write_text(json.dumps(values))
    kernel = "sdpa" if values["model_type"] == "falcon" else "eager"  # which adds Falcon's ALiBi twice
    config = AutoConfig.from_pretrained(folder, attn_implementation=kernel, trust_remote_code=False)
    if "num_local_experts" in values or "num_experts" in values or "n_routed_experts" in values:
        config._experts_implementation = "eager"
    kind = values["architectures"][0] if "architectures" in values else ""  # type: ignore[index]
    network = getattr(transformers, str(kind), transformers.AutoModelForCausalLM)
    torch.manual_seed(zlib.crc32(json.dumps(values, sort_keys=True).encode()))
    built = network(config) if hasattr(transformers, str(kind)) else network.from_config(config)
    with torch.no_grad():
        for weight in _trained(built):
            weight += SPREAD * torch.randn(weight.shape)
    built = built.eval()
    built.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(values))
    return built


def logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """What transformers says of tokens: logits, or the last residual stream of an encoder without a head."""
    more = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        found = model(tokens, use_cache=False, **more) if not _encodes(model) else model(tokens)
    return found.logits if hasattr(found, "logits") else found.last_hidden_state


def _encodes(model: PreTrainedModel) -> bool:
    return not hasattr(model.config, "use_cache")


quiet()
