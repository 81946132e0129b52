"""OPT: GPT-2's layout with ReLU, positions from row 2 of their table, and norms after each sum in the 350m model."""

from interp.families.activations import activation
from interp.families.spec import Family, Rule, Settings
from interp.families.table import modules, tied_to, unembedding
from interp.model.config import MLP, LayerNorm, Learned, ModelConfig


def config(settings: Settings) -> ModelConfig:
    """Our config of an OPT checkpoint; embeddings of another width than the stream (350m) are refused."""
    d_model = settings.count("hidden_size")
    settings.require("word_embed_proj_dim", d_model, None)
    settings.require("layer_norm_elementwise_affine", True, None)
    before = settings.flag("do_layer_norm_before", True)
    bare = settings.flag("_remove_final_layer_norm", False)
    bias = settings.flag("enable_bias", True)
    act = activation(settings, "activation_function", "relu")
    return ModelConfig(
        n_layers=settings.count("num_hidden_layers"),
        d_model=d_model,
        n_heads=settings.count("num_attention_heads"),
        n_ctx=settings.count("max_position_embeddings", 2048),
        d_vocab=settings.count("vocab_size"),
        mlp=MLP(settings.count("ffn_dim"), act, bias=bias),
        position=Learned(offset=2),
        norm=LayerNorm(1e-5),
        norm_place="pre" if before else "post",
        final_norm=before and not bare,
        qkv_bias=bias,
        out_bias=bias,
        tied=settings.flag("tie_word_embeddings", True),
    )


def rules(config: ModelConfig) -> tuple[Rule, ...]:
    """The weight table."""
    ours, theirs = "blocks.{l}.", "model.decoder.layers.{l}."
    matrices: dict[str, str | tuple[str, ...]] = {
        "attn.qkv": tuple(f"self_attn.{part}_proj" for part in "qkv"),
        "attn.out": "self_attn.out_proj",
        "mlp.into": "fc1",
        "mlp.out": "fc2",
    }
    norms = {"ln1": "self_attn_layer_norm", "ln2": "final_layer_norm"}
    embeddings = {"embed": "model.decoder.embed_tokens", "pos_embed": "model.decoder.embed_positions"}
    last = {"ln_final": "model.decoder.final_layer_norm"} if config.final_norm else {}
    return (
        *modules(embeddings, bias=False),
        *modules(last),
        *modules(norms, ours=ours, theirs=theirs),
        *modules(matrices, ours=ours, theirs=theirs, bias=config.qkv_bias),
        *unembedding(config),
    )


FAMILY = Family(
    name="OPT",
    model_types=("opt",),
    config=config,
    rules=rules,
    prefix="model.",
    duplicates=tied_to("model.decoder.embed_tokens.weight"),
)
