"""OLMo 3: OLMo 2 with a sliding window in three of four layers, which no rule for longer texts rotates otherwise."""

from dataclasses import replace

from interp.families import llama_like
from interp.families.rope import Wording, rotary
from interp.families.spec import Family, Settings
from interp.families.windows import local_layers, window_size
from interp.model.config import ModelConfig

THETA = 500_000.0
DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": THETA}


def config(settings: Settings) -> ModelConfig:
    """Our config of an OLMo 3 checkpoint."""
    body = llama_like.decoder(settings, DEFAULTS, wording=Wording(part="full_attention"))
    n_ctx = settings.count("max_position_embeddings", 2048)
    near = rotary(settings, body.head_width, n_ctx, base=THETA, wording=Wording(part="sliding_attention"))
    size = window_size(settings, 4096)
    window, layers = local_layers(settings, body.n_layers, size, lambda layer: (layer + 1) % 4 != 0)
    return replace(
        body,
        norm_place="output",
        qk_norm="width",
        window=window,
        local_layers=layers,
        local_position=None if layers is None or near == body.position else near,
    )


FAMILY = Family(
    name="OLMo 3",
    model_types=("olmo3",),
    config=config,
    rules=llama_like.rules,
    prefix="model.",
    duplicates=llama_like.duplicates,
    buffers=llama_like.BUFFERS,
)
