"""BLOOM: ALiBi in place of position embeddings, a norm after the embedding, tanh-GELU, tied unembedding."""

from interp.families.spec import Family, Settings, TensorRule, UnsupportedError
from interp.families.table import heads_apart, modules, tied_to, unembedding
from interp.model.config import MLP, Alibi, LayerNorm, ModelConfig

NUMERICS = ("pretraining_tp", "slow_but_exact")
"""Keys about how sums are split and rounded; they do not change the result."""


def config(settings: Settings) -> ModelConfig:
    """Our config of a BLOOM checkpoint; the residual taken after the norm is refused."""
    settings.present(NUMERICS)
    settings.require("apply_residual_connection_post_layernorm", False, None)
    d_model = _count_of_either(settings, "hidden_size", "n_embed")
    return ModelConfig(
        n_layers=_count_of_either(settings, "n_layer", "num_hidden_layers"),
        d_model=d_model,
        n_heads=_count_of_either(settings, "n_head", "num_attention_heads"),
        n_ctx=settings.count("seq_length", 2048),
        d_vocab=settings.count("vocab_size"),
        mlp=MLP(4 * d_model, "gelu_new"),
        position=Alibi(),
        norm=LayerNorm(settings.real("layer_norm_epsilon", 1e-5)),
        embed_norm=True,
        tied=settings.flag("tie_word_embeddings", True),
    )


def _count_of_either(settings: Settings, key: str, other_key: str) -> int:
    """The count stored under `key` or `other_key`; UnsupportedError if both are there and differ."""
    if settings.get(other_key) is None:
        return settings.count(key)
    value = settings.count(other_key)
    if settings.get(key) not in (None, value):
        raise UnsupportedError(f"BLOOM: config asks for {key}={settings.get(key)!r} and {other_key}={value}")
    return value


def rules(config: ModelConfig) -> tuple[TensorRule, ...]:
    """The weight table; queries, keys and values are stored head by head."""
    ours, theirs = "blocks.{l}.", "transformer.h.{l}."
    inner = {
        "ln1": "input_layernorm",
        "ln2": "post_attention_layernorm",
        "attn.out": "self_attention.dense",
        "mlp.into": "mlp.dense_h_to_4h",
        "mlp.out": "mlp.dense_4h_to_h",
    }
    qkv = {"attn.qkv": "self_attention.query_key_value"}
    return (
        *modules({"embed": "transformer.word_embeddings"}, bias=False),
        *modules({"ln_embed": "transformer.word_embeddings_layernorm", "ln_final": "transformer.ln_f"}),
        *modules(inner, ours=ours, theirs=theirs),
        *modules(qkv, ours=ours, theirs=theirs, layout=heads_apart),
        *unembedding(config),
    )


FAMILY = Family(
    name="BLOOM",
    model_types=("bloom",),
    config=config,
    rules=rules,
    prefix="transformer.",
    duplicates=tied_to("transformer.word_embeddings.weight"),
)
