"""Gemma 3, text: Gemma 2's norms, normed queries and keys, and windows in five of six layers.

Layers with a window have a rotation of their own. Models with a vision tower are refused by their model type,
`gemma3`.
"""

from dataclasses import replace

from interp.families import gemma, llama_like
from interp.families.rope import Wording, rotary
from interp.families.spec import Family, Settings
from interp.families.windows import local_layers, window_size
from interp.model.config import ModelConfig

DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "rope_theta": 1e6,
}
NEAR = Wording(theta="rope_local_base_freq", part="sliding_attention")


def config(settings: Settings) -> ModelConfig:
    """Our config of a Gemma 3 text checkpoint."""
    body = gemma.body(settings, DEFAULTS, act="hidden_activation", wording=Wording(part="full_attention"))
    settings.require("attn_logit_softcapping", None)
    every = settings.count("sliding_window_pattern", settings.count("_sliding_window_pattern", 6))
    size = window_size(settings, 4096)
    window, layers = local_layers(settings, body.n_layers, size, lambda layer: (layer + 1) % every != 0)
    n_ctx = settings.count("max_position_embeddings", int(DEFAULTS["max_position_embeddings"]))
    near = rotary(settings, body.head_width, n_ctx, base=1e4, wording=NEAR)
    return replace(
        body,
        norm_place="sandwich",
        qk_norm="head",
        attn_scale=settings.positive("query_pre_attn_scalar", 256.0) ** -0.5,
        logit_softcap=settings.optional("final_logit_softcapping", None),
        window=window,
        local_layers=layers,
        local_position=None if layers is None else near,
    )


FAMILY = Family(
    name="Gemma 3",
    model_types=("gemma3_text",),
    config=config,
    rules=llama_like.rules,
    prefix="model.",
    duplicates=llama_like.duplicates,
    buffers=llama_like.BUFFERS,
)
