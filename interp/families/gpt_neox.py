"""GPT-NeoX and Pythia: attention and MLP side by side, each after its norm, a quarter of every head rotated."""

from interp.families.activations import activation
from interp.families.rope import Wording, context, rotary
from interp.families.spec import Family, Settings, TensorRule
from interp.families.table import heads_apart, modules, tied_to, unembedding
from interp.model.config import MLP, LayerNorm, ModelConfig

WORDING = Wording(theta="rotary_emb_base", share="rotary_pct")


def config(settings: Settings) -> ModelConfig:
    """Our config of a GPT-NeoX checkpoint."""
    d_model, n_heads = settings.count("hidden_size"), settings.count("num_attention_heads")
    bias = settings.flag("attention_bias", True)
    n_ctx = settings.count("max_position_embeddings", 2048)
    position = rotary(settings, d_model // n_heads, n_ctx, partial=0.25, wording=WORDING)
    return ModelConfig(
        n_layers=settings.count("num_hidden_layers"),
        d_model=d_model,
        n_heads=n_heads,
        n_ctx=context(n_ctx, position),
        d_vocab=settings.count("vocab_size"),
        mlp=MLP(settings.count("intermediate_size"), activation(settings, "hidden_act", "gelu")),
        position=position,
        norm=LayerNorm(settings.real("layer_norm_eps", 1e-5)),
        parallel=settings.flag("use_parallel_residual", True),
        qkv_bias=bias,
        out_bias=bias,
        tied=settings.flag("tie_word_embeddings", False),
    )


def rules(config: ModelConfig) -> tuple[TensorRule, ...]:
    """The weight table; queries, keys and values are stored head by head."""
    ours, theirs = "blocks.{l}.", "gpt_neox.layers.{l}."
    inner = {
        "ln1": "input_layernorm",
        "ln2": "post_attention_layernorm",
        "mlp.into": "mlp.dense_h_to_4h",
        "mlp.out": "mlp.dense_4h_to_h",
    }
    qkv = {"attn.qkv": "attention.query_key_value"}
    return (
        *modules({"embed": "gpt_neox.embed_in"}, bias=False),
        *modules({"ln_final": "gpt_neox.final_layer_norm"}),
        *modules(inner, ours=ours, theirs=theirs),
        *modules(qkv, ours=ours, theirs=theirs, bias=config.qkv_bias, layout=heads_apart),
        *modules({"attn.out": "attention.dense"}, ours=ours, theirs=theirs, bias=config.out_bias),
        *unembedding(config),
    )


def renamed(name: str) -> str:
    """Files call the unembedding `embed_out`, the newest library `lm_head`."""
    return name.replace("embed_out.", "lm_head.") if name.startswith("embed_out.") else name


FAMILY = Family(
    name="GPT-NeoX",
    model_types=("gpt_neox",),
    config=config,
    rules=rules,
    prefix="gpt_neox.",
    duplicates=tied_to("gpt_neox.embed_in.weight"),
    rename=renamed,
    buffers=(
        r".*\.attention\.bias",
        r".*\.attention\.masked_bias",
        r".*\.attention\.rotary_emb\.(inv_freq|cos_cached|sin_cached)",
    ),
)
