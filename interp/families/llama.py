"""Llama 1 to 3.x: rotary positions (half-split), RMSNorm, SwiGLU, grouped key/value heads."""

from interp.families.spec import Family, Rule, Settings, rotary
from interp.model.config import MLP, ModelConfig, RMSNorm


def config(settings: Settings) -> ModelConfig:
    """Our config of a Llama checkpoint."""
    n_heads = settings.integer("num_attention_heads")
    d_model = settings.integer("hidden_size")
    bias = settings.flag("attention_bias", False)
    settings.require("hidden_act", "silu", "swish")
    settings.require("mlp_bias", False, True, None)
    settings.get("pretraining_tp")  # a way to split the matrix products; the numbers are the same
    return ModelConfig(
        n_layers=settings.integer("num_hidden_layers"),
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=settings.integer("num_key_value_heads", n_heads),
        d_head=settings.integer("head_dim", d_model // n_heads),
        n_ctx=settings.integer("max_position_embeddings", 2048),
        d_vocab=settings.integer("vocab_size"),
        mlp=MLP(
            settings.integer("intermediate_size"), "silu", gated=True, bias=settings.flag("mlp_bias", False)
        ),
        position=rotary(settings),
        norm=RMSNorm(settings.real("rms_norm_eps", 1e-6)),
        qkv_bias=bias,
        out_bias=bias,
        tied=settings.flag("tie_word_embeddings", False),
    )


def rules(config: ModelConfig) -> tuple[Rule, ...]:
    """The weight table; q, k, v and gate, up are joined into one matrix each."""
    ours, theirs = "blocks.{l}.", "model.layers.{l}."
    assert config.mlp is not None
    joined = {
        "attn.qkv": (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), config.qkv_bias),
        "attn.out": (("self_attn.o_proj",), config.out_bias),
        "mlp.into": (("mlp.gate_proj", "mlp.up_proj"), config.mlp.bias),
        "mlp.out": (("mlp.down_proj",), config.mlp.bias),
    }
    table = [
        Rule("embed.weight", ("model.embed_tokens.weight",)),
        Rule("ln_final.weight", ("model.norm.weight",)),
        Rule(f"{ours}ln1.weight", (f"{theirs}input_layernorm.weight",)),
        Rule(f"{ours}ln2.weight", (f"{theirs}post_attention_layernorm.weight",)),
    ]
    for mine, (parts, bias) in joined.items():
        for kind in ("weight", "bias") if bias else ("weight",):
            table.append(Rule(f"{ours}{mine}.{kind}", tuple(f"{theirs}{p}.{kind}" for p in parts)))
    if not config.tied:
        table.append(Rule("unembed.weight", ("lm_head.weight",)))
    return tuple(table)


FAMILY = Family(
    name="Llama",
    model_types=("llama",),
    config=config,
    rules=rules,
    prefix="model.",
    buffers=(r".*\.rotary_emb\.inv_freq",),
)
