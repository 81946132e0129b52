"""GPT-Neo: GPT-2 with unscaled scores, a window in every other layer, and no biases on queries, keys and values."""

from collections.abc import Sequence
from typing import cast

from interp.families.activations import activation
from interp.families.spec import Family, Settings, TensorRule
from interp.families.table import modules, tied_to, unembedding
from interp.model.config import MLP, LayerNorm, Learned, ModelConfig


def config(settings: Settings) -> ModelConfig:
    """Our config of a GPT-Neo checkpoint."""
    d_model, n_layers = settings.count("hidden_size"), settings.count("num_layers")
    local = local_layers(settings, n_layers)
    window = settings.count("window_size", 256)
    width = settings.count("intermediate_size", 4 * d_model)
    return ModelConfig(
        n_layers=n_layers,
        d_model=d_model,
        n_heads=settings.count("num_heads"),
        n_ctx=settings.count("max_position_embeddings", 2048),
        d_vocab=settings.count("vocab_size"),
        mlp=MLP(width, activation(settings, "activation_function", "gelu_new")),
        position=Learned(),
        norm=LayerNorm(settings.real("layer_norm_epsilon", 1e-5)),
        window=window if local else None,
        local_layers=local or None,
        attn_scale=1.0,
        qkv_bias=False,
        tied=settings.flag("tie_word_embeddings", True),
    )


def local_layers(settings: Settings, n_layers: int) -> tuple[int, ...]:
    """The layers with the window: `attention_types`, such as [[["global", "local"], 12]], written out."""
    types = settings.get("attention_types") or [[["global", "local"], 12]]
    listed = settings.get("attention_layers")  # the same, written out by newer configs
    kinds = _kinds_of_layers(types, n_layers)
    if (
        len(kinds) != n_layers
        or any(kind not in ("global", "local") for kind in kinds)
        or listed not in (None, kinds)
    ):
        raise ValueError(
            f"GPT-Neo: config requires attention_types of {n_layers} layers, global or local, got {types!r} and "
            f"attention_layers={listed!r}"
        )
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "local")


def _kinds_of_layers(types: object, most: int) -> list[str]:
    """The kind of each layer, from pairs (pattern of kinds, repeats); each is repeated at most `most` + 1 times."""
    try:
        patterns = cast(Sequence[tuple[Sequence[str], int]], types)
        return [kind for pattern, times in patterns for _ in range(min(times, most + 1)) for kind in pattern]
    except (TypeError, ValueError) as cause:
        raise ValueError(
            f"GPT-Neo: attention_types requires pairs of kinds and a number, got {types!r}"
        ) from cause


def rules(config: ModelConfig) -> tuple[TensorRule, ...]:
    """The weight table."""
    ours, theirs = "blocks.{l}.", "transformer.h.{l}."
    inner = {
        "ln1": "ln_1",
        "ln2": "ln_2",
        "attn.out": "attn.attention.out_proj",
        "mlp.into": "mlp.c_fc",
        "mlp.out": "mlp.c_proj",
    }
    qkv = {"attn.qkv": tuple(f"attn.attention.{part}_proj" for part in "qkv")}
    return (
        *modules({"embed": "transformer.wte", "pos_embed": "transformer.wpe"}, bias=False),
        *modules({"ln_final": "transformer.ln_f"}),
        *modules(inner, ours=ours, theirs=theirs),
        *modules(qkv, ours=ours, theirs=theirs, bias=False),
        *unembedding(config),
    )


FAMILY = Family(
    name="GPT-Neo",
    model_types=("gpt_neo",),
    config=config,
    rules=rules,
    prefix="transformer.",
    duplicates=tied_to("transformer.wte.weight"),
    buffers=(r".*\.attn\.attention\.bias", r".*\.attn\.attention\.masked_bias"),
)
