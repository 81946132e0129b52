"""SmolLM3: Llama's layout in which every fourth layer has no positions."""

from dataclasses import replace

from interp.families import llama_like
from interp.families.spec import Family, Settings
from interp.families.windows import local_layers, window_size
from interp.model.config import ModelConfig

DEFAULTS = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "rope_theta": 2e6,
    "tie_word_embeddings": True,
}


def config(settings: Settings) -> ModelConfig:
    """Our config of a SmolLM3 checkpoint."""
    settings.get("pretraining_tp")  # a way to split the matrix products; the numbers are the same
    settings.get(
        "max_window_layers"
    )  # of the Qwen models: here `layer_types` says which layers have the window
    body = llama_like.decoder(settings, DEFAULTS)
    turned = _rotated(settings, body.n_layers)
    size = window_size(settings, None)
    windowed = settings.flag("use_sliding_window", False)
    window, layers = local_layers(
        settings,
        body.n_layers,
        size if windowed else None,
        lambda layer: windowed and size is not None and not turned[layer],
    )
    return llama_like.rotated(replace(body, window=window, local_layers=layers), turned)


def _rotated(settings: Settings, n_layers: int) -> list[bool]:
    """Whether each layer is rotated: `no_rope_layers` (1 means yes), or all but every `no_rope_layer_interval`-th."""
    every = settings.integer("no_rope_layer_interval", 4)
    given = settings.get("no_rope_layers")
    if given is None:
        return [(layer + 1) % every != 0 for layer in range(n_layers)]
    if not isinstance(given, list | tuple) or len(given) < n_layers or not set(given) <= {0, 1}:
        raise ValueError(
            f"SmolLM3: no_rope_layers requires 0 or 1 for each of {n_layers} layers, got {given!r}"
        )
    return [flag == 1 for flag in given[:n_layers]]


FAMILY = Family(
    name="SmolLM3",
    model_types=("smollm3",),
    config=config,
    rules=llama_like.rules,
    prefix="model.",
    duplicates=llama_like.duplicates,
    buffers=llama_like.BUFFERS,
)
