"""GPT-2: learned positions, LayerNorm, Conv1D matrices stored `[in, out]`, tied unembedding."""

from dataclasses import replace

from torch import Tensor

from interp.families.activations import activation
from interp.families.spec import Family, Settings, TensorLayout, TensorRule, transposed
from interp.families.table import modules, tied_to, unembedding
from interp.model.config import MLP, LayerNorm, Learned, ModelConfig


def config(settings: Settings) -> ModelConfig:
    """Our config of a GPT-2 checkpoint."""
    settings.get("reorder_and_upcast_attn")  # in which precision scores are computed
    return replace(body(settings), scale_by_layer=settings.flag("scale_attn_by_inverse_layer_idx", False))


def body(settings: Settings) -> ModelConfig:
    """Config fields that GPT-2 and GPT-BigCode share."""
    d_model, n_heads = settings.count("n_embd"), settings.count("n_head")
    act = activation(settings, "activation_function", "gelu_new")
    settings.require("add_cross_attention", False)
    return ModelConfig(
        n_layers=settings.count("n_layer"),
        d_model=d_model,
        n_heads=n_heads,
        n_ctx=settings.count("n_positions", 1024),
        d_vocab=settings.count("vocab_size"),
        mlp=MLP(settings.count("n_inner", 4 * d_model), act),
        position=Learned(),
        norm=LayerNorm(settings.real("layer_norm_epsilon", 1e-5)),
        attn_scale=None if settings.flag("scale_attn_weights", True) else 1.0,
        tied=settings.flag("tie_word_embeddings", True),
    )


def conv1d(tensor: Tensor, config: ModelConfig) -> Tensor:
    """Weights transposed, biases as they are."""
    return transposed(tensor, config) if tensor.ndim > 1 else tensor


def rules(
    config: ModelConfig, qkv: TensorLayout = conv1d, layout: TensorLayout = conv1d
) -> tuple[TensorRule, ...]:
    """The weight table; `qkv` and `layout` are the layouts of queries, keys, values, and of all other matrices."""
    ours, theirs = "blocks.{l}.", "transformer.h.{l}."
    norms = {"ln1": "ln_1", "ln2": "ln_2"}
    matrices = {"attn.out": "attn.c_proj", "mlp.into": "mlp.c_fc", "mlp.out": "mlp.c_proj"}
    return (
        *modules({"embed": "transformer.wte", "pos_embed": "transformer.wpe"}, bias=False),
        *modules({"ln_final": "transformer.ln_f"}),
        *modules(norms, ours=ours, theirs=theirs),
        *modules({"attn.qkv": "attn.c_attn"}, ours=ours, theirs=theirs, layout=qkv),
        *modules(matrices, ours=ours, theirs=theirs, layout=layout),
        *unembedding(config),
    )


FAMILY = Family(
    name="GPT-2",
    model_types=("gpt2",),
    config=config,
    rules=rules,
    prefix="transformer.",
    duplicates=tied_to("transformer.wte.weight"),
    buffers=(r".*\.attn\.bias", r".*\.attn\.masked_bias"),
)
