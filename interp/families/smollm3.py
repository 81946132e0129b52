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
    body = llama_like.decoder(settings, DEFAULTS, biases=llama_like.BOTH)
    turned = llama_like.rotated_layers(settings, body.n_layers)
    size = window_size(settings, None)
    windowed = settings.flag("use_sliding_window", False)
    window, layers = local_layers(
        settings,
        body.n_layers,
        size if windowed else None,
        lambda layer: windowed and size is not None and not turned[layer],
    )
    return llama_like.rotated(replace(body, window=window, local_layers=layers), turned)


FAMILY = Family(
    name="SmolLM3",
    model_types=("smollm3",),
    config=config,
    rules=llama_like.rules,
    prefix="model.",
    duplicates=llama_like.duplicates,
    buffers=llama_like.BUFFERS,
)
