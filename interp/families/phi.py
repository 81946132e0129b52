"""Phi-1, Phi-1.5 and Phi-2: attention and MLP side by side after one norm, part of every head rotated, biases."""

from interp.families.activations import activation
from interp.families.rope import context, rotary
from interp.families.spec import Family, Settings, TensorRule
from interp.families.table import modules, tied_to, unembedding
from interp.model.config import MLP, LayerNorm, ModelConfig


def config(settings: Settings) -> ModelConfig:
    """Our config of a Phi checkpoint."""
    d_model, n_heads = settings.count("hidden_size"), settings.count("num_attention_heads")
    d_head = settings.count("head_dim", d_model // n_heads)
    n_ctx = settings.count("max_position_embeddings", 2048)
    position = rotary(settings, d_head, n_ctx, partial=0.5)
    return ModelConfig(
        n_layers=settings.count("num_hidden_layers"),
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=settings.count("num_key_value_heads", n_heads),
        d_head=d_head,
        n_ctx=context(n_ctx, position),
        d_vocab=settings.count("vocab_size"),
        mlp=MLP(settings.count("intermediate_size"), activation(settings, "hidden_act", "gelu_new")),
        position=position,
        norm=LayerNorm(settings.real("layer_norm_eps", 1e-5)),
        parallel=True,
        shared_norm=True,
        qk_norm="head" if settings.flag("qk_layernorm", False) else None,
        unembed_bias=True,
        tied=settings.flag("tie_word_embeddings", False),
    )


def rules(config: ModelConfig) -> tuple[TensorRule, ...]:
    """The weight table."""
    inner: dict[str, str | tuple[str, ...]] = {
        "ln1": "input_layernorm",
        "attn.qkv": tuple(f"self_attn.{part}_proj" for part in "qkv"),
        "attn.out": "self_attn.dense",
        "mlp.into": "mlp.fc1",
        "mlp.out": "mlp.fc2",
    }
    if config.qk_norm is not None:
        inner |= {f"attn.{part}_norm.norm": f"self_attn.{part}_layernorm" for part in "qk"}
    return (
        *modules({"embed": "model.embed_tokens"}, bias=False),
        *modules({"ln_final": "model.final_layernorm"}),
        *modules(inner, ours="blocks.{l}.", theirs="model.layers.{l}."),
        *unembedding(config),
    )


FAMILY = Family(
    name="Phi",
    model_types=("phi",),
    config=config,
    rules=rules,
    prefix="model.",
    duplicates=tied_to("model.embed_tokens.weight"),
    buffers=(r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)",),
)
