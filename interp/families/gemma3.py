"""Gemma 3 with a vision tower: its text model, without images."""

from dataclasses import replace

from interp.families import gemma3_text, llama_like
from interp.families.spec import Family, Settings
from interp.model.config import ModelConfig

IMAGES = (
    "vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index",
    "boi_token_id", "eoi_token_id", "image_token_id",
)  # fmt: skip
MOVED = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
"""Prefix of the text model's tensors in files, or in the library's memory -> prefix in a text checkpoint."""


def config(settings: Settings) -> ModelConfig:
    """Our config of the text model inside a Gemma 3 checkpoint."""
    settings.present(IMAGES)
    text = settings.inside("text_config", {"model_type": "gemma3_text", **settings.table("text_config")})
    converted = gemma3_text.config(text)
    return replace(converted, tied=settings.flag("tie_word_embeddings", True))


def renamed(name: str) -> str:
    """The name of the tensor in a checkpoint of the text model."""
    for old, new in MOVED.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


FAMILY = Family(
    name="Gemma 3 (text of image and text)",
    model_types=("gemma3",),
    config=config,
    rules=llama_like.rules,
    prefix="model.",
    duplicates=llama_like.duplicates,
    buffers=llama_like.BUFFERS,
    unused=(r"(model\.)?vision_tower\..*", r"(model\.)?multi_modal_projector\..*"),
    rename=renamed,
)
