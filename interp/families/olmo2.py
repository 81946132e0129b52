"""OLMo 2: Llama's layout with norms on what each sublayer adds, and on all queries and keys of a token."""

from dataclasses import replace

from interp.families import llama_like
from interp.families.spec import Family, Settings
from interp.model.config import ModelConfig


def config(settings: Settings) -> ModelConfig:
    """Our config of an OLMo 2 checkpoint."""
    body = llama_like.decoder(settings, {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5})
    return replace(body, norm_place="output", qk_norm="width")


FAMILY = Family(
    name="OLMo 2",
    model_types=("olmo2",),
    config=config,
    rules=llama_like.rules,
    prefix="model.",
    duplicates=llama_like.duplicates,
    buffers=llama_like.BUFFERS,
)
