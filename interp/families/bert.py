"""BERT: post-norm encoder, learned positions, token types; with its masked-LM head, or ending in the residual stream.

Not modelled: the pooler and the next-sentence head (dense layers on the first token), and classifiers. BERT as a
decoder is refused.
"""

from interp.families.activations import activation
from interp.families.encoder import BUFFERS, UNUSED, head_rules, with_head
from interp.families.spec import Family, Settings, TensorRule
from interp.families.table import modules
from interp.model.config import MLP, LayerNorm, Learned, ModelConfig

LAYER: dict[str, str | tuple[str, ...]] = {
    "attn.qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attn.out": "attention.output.dense",
    "ln1": "attention.output.LayerNorm",
    "mlp.into": "intermediate.dense",
    "mlp.out": "output.dense",
    "ln2": "output.LayerNorm",
}
"""This package's modules of a block -> the checkpoint's."""


def config(settings: Settings) -> ModelConfig:
    """Our config of a BERT checkpoint."""
    act = activation(settings, "hidden_act", "gelu")
    return with_head(body(settings, Learned()), settings, act)


def body(settings: Settings, position: Learned) -> ModelConfig:
    """The encoder without a head; a table of positions that begins with unused rows takes fewer tokens."""
    settings.require("is_decoder", False)
    settings.require("add_cross_attention", False)
    d_mlp, act = settings.count("intermediate_size"), activation(settings, "hidden_act", "gelu")
    return ModelConfig(
        n_layers=settings.count("num_hidden_layers"),
        d_model=settings.count("hidden_size"),
        n_heads=settings.count("num_attention_heads"),
        n_ctx=settings.count("max_position_embeddings", 512) - position.offset,
        d_vocab=settings.count("vocab_size"),
        mlp=MLP(d_mlp, act),
        position=position,
        norm=LayerNorm(settings.real("layer_norm_eps", 1e-12)),
        norm_place="post",
        embed_norm=True,
        final_norm=False,
        causal=False,
        n_token_types=settings.count("type_vocab_size", 2),
        unembed=False,
    )


def body_rules(base: str) -> tuple[TensorRule, ...]:
    """The weight table of the encoder; `base` stands before its names."""
    embeddings = {
        "embed.weight": "word_embeddings.weight",
        "pos_embed.weight": "position_embeddings.weight",
        "type_embed.weight": "token_type_embeddings.weight",
        "ln_embed.weight": "LayerNorm.weight",
        "ln_embed.bias": "LayerNorm.bias",
    }
    table = [TensorRule(ours, (f"{base}embeddings.{theirs}",)) for ours, theirs in embeddings.items()]
    return (*table, *modules(LAYER, ours="blocks.{l}.", theirs=f"{base}encoder.layer.{{l}}."))


def rules(config: ModelConfig) -> tuple[TensorRule, ...]:
    """The weight table."""
    head = "cls.predictions."
    names = (f"{head}transform.dense", f"{head}transform.LayerNorm", f"{head}decoder", f"{head}bias")
    return (*body_rules("bert."), *head_rules(config, *names))


def duplicates(config: ModelConfig) -> dict[str, str]:
    """A tied head may be stored again, and so may its bias."""
    if not config.tied:
        return {}
    return {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }


def rename(name: str) -> str:
    """TensorFlow's names of the norms' parameters, which the first checkpoints have, as today's."""
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


FAMILY = Family(
    name="BERT",
    model_types=("bert",),
    config=config,
    rules=rules,
    prefix="bert.",
    buffers=BUFFERS,
    unused=(*UNUSED, r"cls\.seq_relationship\..*", r"cls\.predictions\.bias"),
    outside=("cls.", "classifier.", "qa_outputs."),
    duplicates=duplicates,
    rename=rename,
)
