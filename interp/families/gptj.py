"""GPT-J: attention and MLP side by side after one norm, rotation of neighbouring pairs, a bias on the unembedding."""

from interp.families.activations import activation
from interp.families.spec import Family, Settings, TensorRule
from interp.families.table import modules, tied_to, unembedding
from interp.model.config import MLP, LayerNorm, ModelConfig, Rotary


def config(settings: Settings) -> ModelConfig:
    """Our config of a GPT-J checkpoint."""
    d_model, n_ctx = settings.count("n_embd"), settings.count("n_positions", 2048)
    return ModelConfig(
        n_layers=settings.count("n_layer"),
        d_model=d_model,
        n_heads=settings.count("n_head"),
        n_ctx=n_ctx,
        d_vocab=settings.count("vocab_size"),
        mlp=MLP(
            settings.count("n_inner", 4 * d_model), activation(settings, "activation_function", "gelu_new")
        ),
        position=Rotary(dim=settings.count("rotary_dim", 64), interleaved=True),
        norm=LayerNorm(settings.real("layer_norm_epsilon", 1e-5)),
        parallel=True,
        shared_norm=True,
        qkv_bias=False,
        out_bias=False,
        unembed_bias=True,
        tied=settings.flag("tie_word_embeddings", False),
    )


def rules(config: ModelConfig) -> tuple[TensorRule, ...]:
    """The weight table."""
    qkv = {"attn.qkv": tuple(f"attn.{part}_proj" for part in "qkv")}
    return (
        *outside_qkv(config),
        *modules(qkv, ours="blocks.{l}.", theirs="transformer.h.{l}.", bias=False),
    )


def outside_qkv(config: ModelConfig) -> tuple[TensorRule, ...]:
    """The weight table without queries, keys and values."""
    ours, theirs = "blocks.{l}.", "transformer.h.{l}."
    inner = {"ln1": "ln_1", "mlp.into": "mlp.fc_in", "mlp.out": "mlp.fc_out"}
    return (
        *modules({"embed": "transformer.wte"}, bias=False),
        *modules({"ln_final": "transformer.ln_f"}),
        *modules(inner, ours=ours, theirs=theirs),
        *modules({"attn.out": "attn.out_proj"}, ours=ours, theirs=theirs, bias=False),
        *unembedding(config),
    )


FAMILY = Family(
    name="GPT-J",
    model_types=("gptj",),
    config=config,
    rules=rules,
    prefix="transformer.",
    duplicates=tied_to("transformer.wte.weight"),
    buffers=(r".*\.attn\.bias", r".*\.attn\.masked_bias", r".*\.attn\.embed_positions"),
)
