"""Llama 4, text: rotary layers that attend within chunks, full-attention layers without positions, experts in some.

Rotated queries and keys are normed after the rotation. In layers without positions, scores are scaled by a factor that
grows with the position. The position counts kept tokens here, but columns in Hugging Face's code, so rows padded on the
left differ from theirs from `floor_scale` tokens on.
"""

from dataclasses import replace

from interp.families import experts, llama_like
from interp.families.spec import Family, Settings, TensorRule, transposed
from interp.families.table import modules
from interp.model.config import MLP, MOST_LAYERS, ModelConfig, MoE, Rotary, Router
from interp.model.softmax import Chunks, LogSteps, Softmax

DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
}
KINDS = ("chunked_attention", "full_attention")
ROUTER = Router("sigmoid", weighs="input")


def config(settings: Settings) -> ModelConfig:
    """Our config of a Llama 4 text checkpoint."""
    layers = settings.count("num_hidden_layers", 48)
    if layers > MOST_LAYERS:
        raise ValueError(f"Llama 4: config requires num_hidden_layers in [1, {MOST_LAYERS}], got {layers}")
    moe = MoE(
        n_experts=settings.count("num_local_experts", 16),
        top_k=settings.count("num_experts_per_tok", 1),
        d_mlp=settings.count("intermediate_size", 8192),
        renormalise=False,
        router=ROUTER,
        shared=settings.count("intermediate_size", 8192),
    )
    routed = _routed(settings, layers)
    dense = tuple(layer for layer in range(layers) if layer not in routed)
    body = experts.decoder(settings, moe, DEFAULTS, dense)
    assert isinstance(body.position, Rotary) and isinstance(body.mlp, MoE)
    wide = MLP(settings.count("intermediate_size_mlp", 16_384), body.mlp.act, gated=True, bias=False)
    body = replace(
        body,
        position=replace(body.position, interleaved=True),
        mlp=replace(body.mlp, dense=wide if dense else None),
    )
    return llama_like.mixed(body, _mixers(settings, body))


def _routed(settings: Settings, n_layers: int) -> list[int]:
    """The layers with experts: `moe_layers`, or every `interleave_moe_layer_step`-th."""
    step = settings.count("interleave_moe_layer_step", 1)
    given = settings.get("moe_layers")
    if given is None:
        return list(range(step - 1, n_layers, step))
    if not isinstance(given, list | tuple) or any(layer not in range(n_layers) for layer in given):
        raise ValueError(f"Llama 4: moe_layers requires layers in [0, {n_layers - 1}], got {given!r}")
    return list(given)


def _mixers(settings: Settings, body: ModelConfig) -> list[Softmax]:
    """The mixer of every layer."""
    turned = llama_like.rotated_layers(settings, body.n_layers)
    kinds = settings.get("layer_types")
    if kinds is None:
        kinds = [KINDS[not is_rotated] for is_rotated in turned]
    if (
        not isinstance(kinds, list | tuple)
        or len(kinds) != body.n_layers
        or any(kind not in KINDS for kind in kinds)
    ):
        raise ValueError(f"layer_types requires {body.n_layers} of {' and '.join(KINDS)}, got {kinds!r}")
    size = settings.optional_integer("attention_chunk_size", 8192)
    if KINDS[0] in kinds and size is None:
        raise ValueError("layers see chunks of attention, but attention_chunk_size is None")
    eps = settings.positive("rms_norm_eps", DEFAULTS["rms_norm_eps"])
    normed = settings.flag("use_qk_norm", True)
    steps = LogSteps(settings.count("floor_scale", 8192), settings.real("attn_scale", 0.1))
    tuned = settings.get("attn_temperature_tuning") not in (False, 0)  # a number in the first configs
    mixers = []
    for is_rotated, kind in zip(turned, kinds, strict=True):
        if tuned and not is_rotated and kind == KINDS[0]:
            raise ValueError(
                "Llama 4: layers without positions require full attention where their scores are tuned"
            )
        chunks = Chunks(size) if kind == KINDS[0] and size is not None else None
        heads, growth = eps if normed and is_rotated else None, steps if tuned and not is_rotated else None
        mixers.append(Softmax(sparsity=chunks, temperature=growth, rotated=is_rotated, head_norm=heads))
    return mixers


def rules(config: ModelConfig) -> tuple[TensorRule, ...]:
    """The weight table."""
    at = f"{experts.BLOCK}feed_forward."
    mixture = (
        *modules({"mlp.router": "router"}, ours="blocks.{l}.", theirs=at, bias=False),
        TensorRule("blocks.{l}.mlp.into", (f"{at}experts.gate_up_proj",), transposed),
        TensorRule("blocks.{l}.mlp.out", (f"{at}experts.down_proj",), transposed),
        *experts.gated_rules("mlp.shared", "feed_forward.shared_expert."),
    )
    dense = experts.gated_rules("mlp", "feed_forward.")
    return (*llama_like.attention_rules(config), *experts.some_dense(config, mixture, dense))


FAMILY = Family(
    name="Llama 4",
    model_types=("llama4_text",),
    config=config,
    rules=rules,
    prefix="model.",
    duplicates=llama_like.duplicates,
    buffers=llama_like.BUFFERS,
)
