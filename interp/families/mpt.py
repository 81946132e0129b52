"""MPT: ALiBi, norms without beta, no biases, queries, keys and values clipped in some models."""

from interp.families.spec import Family, Settings, TensorRule
from interp.families.table import modules, norm_rules, tied_to, unembedding
from interp.model.config import MLP, Alibi, LayerNorm, ModelConfig, Softmax


def config(settings: Settings) -> ModelConfig:
    """Our config of an MPT checkpoint: one with ALiBi and without biases, whatever else it says, as in transformers."""
    attention = settings.inside("attn_config", settings.table("attn_config"))
    clip = attention.real("clip_qkv", 0.0)
    d_model = settings.integer("d_model")
    return ModelConfig(
        n_layers=settings.integer("n_layers"),
        d_model=d_model,
        n_heads=settings.integer("n_heads"),
        n_ctx=settings.integer("max_seq_len", 2048),
        d_vocab=settings.integer("vocab_size"),
        mlp=MLP(4 * d_model, "gelu", bias=False),
        mixer=Softmax(clip=clip or None),
        position=Alibi(),
        norm=LayerNorm(settings.real("layer_norm_epsilon", 1e-5), trained="gamma"),
        attn_scale=attention.optional("softmax_scale", None),
        qkv_bias=False,
        out_bias=False,
        tied=settings.flag("tie_word_embeddings", True),
    )


def rules(config: ModelConfig) -> tuple[TensorRule, ...]:
    """The weight table."""
    ours, theirs = "blocks.{l}.", "transformer.blocks.{l}."
    matrices = {
        "attn.qkv": "attn.Wqkv",
        "attn.out": "attn.out_proj",
        "mlp.into": "ffn.up_proj",
        "mlp.out": "ffn.down_proj",
    }
    return (
        *modules({"embed": "transformer.wte"}, bias=False),
        *norm_rules({"ln_final": "transformer.norm_f"}, config.norm),
        *norm_rules({"ln1": "norm_1", "ln2": "norm_2"}, config.norm, ours=ours, theirs=theirs),
        *modules(matrices, ours=ours, theirs=theirs, bias=False),
        *unembedding(config),
    )


FAMILY = Family(
    name="MPT",
    model_types=("mpt",),
    config=config,
    rules=rules,
    prefix="transformer.",
    duplicates=tied_to("transformer.wte.weight"),
)
