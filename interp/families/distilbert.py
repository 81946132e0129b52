"""DistilBERT: BERT without token types. Its positions are a table even where they began as sinusoids."""

from interp.families.activations import activation
from interp.families.encoder import BUFFERS, UNUSED, head_rules, with_head
from interp.families.spec import Family, Settings, TensorRule
from interp.families.table import modules
from interp.model.config import MLP, LayerNorm, Learned, ModelConfig

EPS = 1e-12
"""Eps of every norm; the config has no key for it."""
LAYER: dict[str, str | tuple[str, ...]] = {
    "attn.qkv": ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    "attn.out": "attention.out_lin",
    "ln1": "sa_layer_norm",
    "mlp.into": "ffn.lin1",
    "mlp.out": "ffn.lin2",
    "ln2": "output_layer_norm",
}
"""This package's modules of a block -> the checkpoint's."""


def config(settings: Settings) -> ModelConfig:
    """Our config of a DistilBERT checkpoint."""
    settings.present(("qa_dropout", "seq_classif_dropout", "sinusoidal_pos_embds"))
    act = activation(settings, "activation", "gelu")
    body = ModelConfig(
        n_layers=settings.count("n_layers", 6),
        d_model=settings.count("dim", 768),
        n_heads=settings.count("n_heads", 12),
        n_ctx=settings.count("max_position_embeddings", 512),
        d_vocab=settings.count("vocab_size"),
        mlp=MLP(settings.count("hidden_dim", 3072), act),
        position=Learned(),
        norm=LayerNorm(EPS),
        norm_place="post",
        embed_norm=True,
        final_norm=False,
        causal=False,
        unembed=False,
    )
    return with_head(body, settings, act)


def rules(config: ModelConfig) -> tuple[TensorRule, ...]:
    """The weight table."""
    base = "distilbert."
    return (
        TensorRule("embed.weight", (f"{base}embeddings.word_embeddings.weight",)),
        TensorRule("pos_embed.weight", (f"{base}embeddings.position_embeddings.weight",)),
        *modules({"ln_embed": f"{base}embeddings.LayerNorm"}),
        *modules(LAYER, ours="blocks.{l}.", theirs=f"{base}transformer.layer.{{l}}."),
        *head_rules(config, "vocab_transform", "vocab_layer_norm", "vocab_projector"),
    )


def duplicates(config: ModelConfig) -> dict[str, str]:
    """A tied head may be stored again."""
    return {"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"} if config.tied else {}


FAMILY = Family(
    name="DistilBERT",
    model_types=("distilbert",),
    config=config,
    rules=rules,
    prefix="distilbert.",
    buffers=BUFFERS,
    unused=UNUSED,
    outside=("vocab_", "classifier.", "pre_classifier.", "qa_outputs."),
    duplicates=duplicates,
)
