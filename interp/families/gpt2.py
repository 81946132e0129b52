"""GPT-2: learned positions, LayerNorm, Conv1D matrices stored `[in, out]`, tied unembedding."""

from interp.families.spec import Family, Rule, Settings
from interp.model.config import MLP, Activation, LayerNorm, Learned, ModelConfig

ACTIVATIONS: dict[str, Activation] = {
    "gelu_new": "gelu_new",
    "gelu_pytorch_tanh": "gelu_new",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


def config(settings: Settings) -> ModelConfig:
    """Our config of a GPT-2 checkpoint."""
    d_model, n_heads = settings.integer("n_embd"), settings.integer("n_head")
    act = settings.text("activation_function", "gelu_new")
    settings.require("activation_function", *ACTIVATIONS)
    settings.require("add_cross_attention", False)
    settings.get("reorder_and_upcast_attn")
    n_ctx = settings.integer("n_positions", 1024)
    settings.require("n_ctx", n_ctx)
    return ModelConfig(
        n_layers=settings.integer("n_layer"),
        d_model=d_model,
        n_heads=n_heads,
        n_ctx=n_ctx,
        d_vocab=settings.integer("vocab_size"),
        mlp=MLP(settings.integer("n_inner", 4 * d_model), ACTIVATIONS[act]),
        position=Learned(),
        norm=LayerNorm(settings.real("layer_norm_epsilon", 1e-5)),
        attn_scale=None if settings.flag("scale_attn_weights", True) else 1.0,
        scale_by_layer=settings.flag("scale_attn_by_inverse_layer_idx", False),
        tied=settings.flag("tie_word_embeddings", True),
    )


def rules(config: ModelConfig) -> tuple[Rule, ...]:
    """The weight table."""
    ours, theirs = "blocks.{l}.", "transformer.h.{l}."
    table = [
        Rule("embed.weight", ("transformer.wte.weight",)),
        Rule("pos_embed.weight", ("transformer.wpe.weight",)),
        Rule("ln_final.weight", ("transformer.ln_f.weight",)),
        Rule("ln_final.bias", ("transformer.ln_f.bias",)),
    ]
    for name, his in (("ln1", "ln_1"), ("ln2", "ln_2")):
        table += [Rule(f"{ours}{name}.{p}", (f"{theirs}{his}.{p}",)) for p in ("weight", "bias")]
    matrices = {
        "attn.qkv": "attn.c_attn",
        "attn.out": "attn.c_proj",
        "mlp.into": "mlp.c_fc",
        "mlp.out": "mlp.c_proj",
    }
    for mine, his in matrices.items():
        table.append(Rule(f"{ours}{mine}.weight", (f"{theirs}{his}.weight",), "transposed"))
        table.append(Rule(f"{ours}{mine}.bias", (f"{theirs}{his}.bias",)))
    if not config.tied:
        table.append(Rule("unembed.weight", ("lm_head.weight",)))
    return tuple(table)


FAMILY = Family(
    name="GPT-2",
    model_types=("gpt2",),
    config=config,
    rules=rules,
    prefix="transformer.",
    buffers=(r".*\.attn\.bias", r".*\.attn\.masked_bias"),
)
