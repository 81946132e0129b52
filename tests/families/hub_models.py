"""Small models of the configs of public repositories: a folder as it lies on the hub, and transformers' model of it.

`hub_configs.json` holds 106 configs, written from memory of public repositories: facts about files, of which no text
was copied. Their sizes are shrunk here, and every other key stays.
"""

import copy
import functools
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from tests.families.oracle import SPREAD, trained

Values = dict[str, object]
LAYERS, HEADS, WIDTH, N_CTX, WINDOW, D_VOCAB, SHORT = 4, 4, 64, 64, 6, 256, 16
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
OF_MPT: Mapping[str, int] = {"d_model": WIDTH, "n_heads": HEADS, "n_layers": LAYERS, "max_seq_len": N_CTX}
WRITTEN_SMALL = ("mamba2", "t5", "bart", "marian", "distilbert", "gemma3")
"""Types whose own sizes are small in the file; of Gemma 3 those of its text model are not."""
TABLES = ("text_config", "rope_scaling", "rope_parameters", "attn_config")
"""Keys that hold a table of keys."""
ORIGINAL = "original_max_position_embeddings"


@functools.cache
def configs() -> dict[str, Values]:
    """The 106 configs by repository, shrunk."""
    found = json.loads(Path(__file__).with_name("hub_configs.json").read_text(encoding="utf-8"))
    return {name: shrunk(values) for name, values in found.items()}


def kinds() -> dict[str, str]:
    """The first of them of each `model_type`."""
    return {str(values["model_type"]): name for name, values in reversed(configs().items())}


def shrunk(values: Mapping[str, object]) -> Values:
    """The same config at a size that a test can afford; no key is added or left out."""
    small = copy.deepcopy(dict(values))
    kind = small["model_type"]
    if isinstance(text := small.get("text_config"), dict):
        small["text_config"] = shrunk(text)
    if kind in WRITTEN_SMALL:
        return small
    sizes = {**SIZES, **(OF_MPT if kind == "mpt" else {})}
    if small.get("head_dim") == _head(small):
        sizes["head_dim"] = WIDTH // HEADS
    if small.get("word_embed_proj_dim") == small.get("hidden_size"):
        sizes["word_embed_proj_dim"] = WIDTH
    groups, apart = small.get("num_key_value_heads"), small.get("num_attention_heads")
    if (stretched := _shrink_context(small)) is not None:
        sizes["max_position_embeddings"] = stretched
    small |= {
        key: min(value, sizes[key]) for key, value in small.items() if key in sizes and type(value) is int
    }
    if isinstance(groups, int):  # DeepSeek's latents are every head's
        small["num_key_value_heads"] = HEADS if groups == apart or kind == "deepseek_v3" else min(groups, 2)
    _shrink_lists(small)
    return small | {key: value % D_VOCAB for key, value in small.items() if _is_token(key, value)}


def _head(values: Mapping[str, object]) -> object:
    """The width of a head that follows from the others."""
    width, heads = values.get("hidden_size"), values.get("num_attention_heads")
    return width // heads if isinstance(width, int) and isinstance(heads, int) else None


def _is_token(key: str, value: object) -> bool:
    return key.endswith("_token_id") and isinstance(value, int) and value >= D_VOCAB


def _shrink_context(small: Values) -> int | None:
    """The context of a config that stretches it, which stays stretched as much; None for others."""
    inside = small.get("rope_scaling")
    scaling = inside if isinstance(inside, dict) else {}
    original, whole = scaling.get(ORIGINAL, small.get(ORIGINAL)), small.get("max_position_embeddings")
    if isinstance(original, int) and isinstance(whole, int) and original < whole:
        for table in (small, scaling):
            if ORIGINAL in table:
                table[ORIGINAL] = SHORT
        return int(whole / original * SHORT)
    return None


def _shrink_lists(small: Values) -> None:
    """Lists with an entry for each layer, and the first layers that differ."""
    for key in ("layer_types", "no_rope_layers", "attention_layers"):
        if isinstance(listed := small.get(key), list):
            small[key] = listed[:LAYERS]
            small |= {
                count: len(listed[:LAYERS]) for count in ("num_hidden_layers", "num_layers") if count in small
            }
    if "attention_types" in small:
        small["attention_types"] = [[["global", "local"], LAYERS // 2]]
    if isinstance(first := small.get("max_window_layers"), int):
        small["max_window_layers"] = min(first, LAYERS // 2)


def paths(values: Mapping[str, object]) -> Iterator[tuple[str, ...]]:
    """Every key but the type, and every key of the tables."""
    for key, value in values.items():
        if key not in ("model_type", "architectures"):
            yield (key,)
        if key in TABLES and isinstance(value, dict):
            yield from ((key, *inner) for inner in paths(value))


def lacking(values: Mapping[str, object], path: tuple[str, ...]) -> Values:
    """The same config without the key at a path."""
    first, *rest = path
    if rest:
        inner = values[first]
        assert isinstance(inner, dict)
        return {**values, first: lacking(inner, tuple(rest))}
    return {key: value for key, value in values.items() if key != first}


def their_config(values: Mapping[str, object]) -> PreTrainedConfig:
    """transformers' configuration of a `config.json`."""
    config = CONFIG_MAPPING[str(values["model_type"])].from_dict(copy.deepcopy(dict(values)))
    # Falcon's "eager" adds its ALiBi twice
    config._attn_implementation = "sdpa" if values["model_type"] == "falcon" else "eager"
    config._experts_implementation = "eager"
    return config


def new_model(values: Mapping[str, object]) -> PreTrainedModel:
    """transformers' model of a config, of the class that the config names."""
    named = values.get("architectures")
    name = named[0] if isinstance(named, list) else ""
    config = their_config(values)
    if hasattr(transformers, str(name)):
        return getattr(transformers, str(name))(config).eval()
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def reference(values: Mapping[str, object], seed: int = 0) -> PreTrainedModel:
    """transformers' model of a config, every parameter perturbed."""
    torch.manual_seed(zlib.crc32(json.dumps(values, sort_keys=True).encode()) + seed)
    model = new_model(values)
    with torch.no_grad():
        for weight in trained(model):
            weight += SPREAD * torch.randn(weight.shape)
    return model


def write(model: PreTrainedModel, values: Mapping[str, object], folder: Path) -> None:
    """A checkpoint as it lies on the hub: the weights, and the config word for word."""
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(values))


def tokens_of(values: Mapping[str, object]) -> Tensor:
    """Two rows of 20 random tokens of a config's vocabulary, none of them among the first, which may pad."""
    text = values.get("text_config")
    size = (text if isinstance(text, dict) else values).get("vocab_size")
    most = min(size, D_VOCAB - 10) if isinstance(size, int) else D_VOCAB - 10
    return torch.randint(3, most, (2, 20), generator=torch.Generator().manual_seed(0))


def their_numbers(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """What transformers says of tokens: logits, or the last residual stream of an encoder without a head."""
    more = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        found = model(tokens, **more)
    return found.logits if hasattr(found, "logits") else found.last_hidden_state
