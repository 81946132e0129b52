"""Cohere 2 (Command R7B, Command A): Cohere with a window and rotation in three of four layers."""

from dataclasses import replace

from interp.families import cohere, llama_like
from interp.families.spec import Family, Settings
from interp.families.windows import local_layers, window_size
from interp.model.config import ModelConfig

THETA = 10_000.0


def config(settings: Settings) -> ModelConfig:
    """Our config of a Cohere 2 checkpoint."""
    body = cohere.body(settings, THETA)
    every = settings.count("sliding_window_pattern", 4)
    size = window_size(settings, 4096)
    window, layers = local_layers(settings, body.n_layers, size, lambda layer: (layer + 1) % every != 0)
    converted = replace(body, window=window, local_layers=layers)
    return llama_like.rotated(converted, [converted.is_local(layer) for layer in range(converted.n_layers)])


FAMILY = Family(
    name="Cohere 2",
    model_types=("cohere2",),
    config=config,
    rules=llama_like.rules,
    prefix="model.",
    duplicates=llama_like.duplicates,
    buffers=llama_like.BUFFERS,
)
