"""OPT: GPT-2's layout with ReLU, positions from row 2 of their table, and norms after each sum in the 350m model."""

from torch import Tensor

from interp.families.activations import activation
from interp.families.spec import Family, Settings, TensorRule
from interp.families.table import modules, tied_to
from interp.model.config import MLP, LayerNorm, Learned, ModelConfig

EMBEDDING, HEAD = "model.decoder.embed_tokens.weight", "lm_head.weight"
NARROW = ("model.decoder.project_in.weight", "model.decoder.project_out.weight")
"""The maps of narrow embeddings into the stream and out of it."""


def _into(project_dw: Tensor, embed_vw: Tensor) -> Tensor:
    """The embedding matrix `[v, d]`: a narrow embedding `[v, w]` times its projection into the stream."""
    return embed_vw @ project_dw.T


def _out_of(project_wd: Tensor, unembed_vw: Tensor) -> Tensor:
    """The unembedding matrix `[v, d]`: a narrow unembedding `[v, w]` times the projection out of the stream."""
    return unembed_vw @ project_wd


INTO = TensorRule(
    "embed.weight",
    (EMBEDDING,),
    otherwise=TensorRule("embed.weight", (NARROW[0], EMBEDDING), product=_into),
)
OUT_OF = TensorRule(
    "unembed.weight",
    (HEAD,),
    otherwise=TensorRule(
        "unembed.weight",
        (NARROW[1], HEAD),
        product=_out_of,
        otherwise=TensorRule("unembed.weight", (NARROW[1], EMBEDDING), product=_out_of),  # tied
    ),
)


def config(settings: Settings) -> ModelConfig:
    """Our config of an OPT checkpoint.

    Where embeddings have another width than the stream (350m), what maps them into it and out of it is multiplied into
    the embedding and the unembedding, which then are two matrices.
    """
    d_model = settings.count("hidden_size")
    narrow = settings.count("word_embed_proj_dim", d_model) != d_model
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
        tied=settings.flag("tie_word_embeddings", True) and not narrow,
    )


def rules(config: ModelConfig) -> tuple[TensorRule, ...]:
    """The weight table."""
    ours, theirs = "blocks.{l}.", "model.decoder.layers.{l}."
    matrices: dict[str, str | tuple[str, ...]] = {
        "attn.qkv": tuple(f"self_attn.{part}_proj" for part in "qkv"),
        "attn.out": "self_attn.out_proj",
        "mlp.into": "fc1",
        "mlp.out": "fc2",
    }
    norms = {"ln1": "self_attn_layer_norm", "ln2": "final_layer_norm"}
    last = {"ln_final": "model.decoder.final_layer_norm"} if config.final_norm else {}
    return (
        *modules({"pos_embed": "model.decoder.embed_positions"}, bias=False),
        INTO,
        *modules(last),
        *modules(norms, ours=ours, theirs=theirs),
        *modules(matrices, ours=ours, theirs=theirs, bias=config.qkv_bias),
        *(() if config.tied else (OUT_OF,)),
    )


FAMILY = Family(
    name="OPT",
    model_types=("opt",),
    config=config,
    rules=rules,
    prefix="model.",
    duplicates=tied_to("model.decoder.embed_tokens.weight"),
)
