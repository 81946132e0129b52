"""nanoGPT: the `ckpt.pt` that its `train.py` saves, a state dict with the options of the model.

It is GPT-2 with plain matrices.
"""

from collections.abc import Mapping

from interp.families.spec import Family, Settings, TensorRule
from interp.families.table import modules, norm_rules, tied_to, unembedding
from interp.model.config import MLP, LayerNorm, Learned, ModelConfig

MODEL_TYPE = "nanogpt"
OPTIONS = "model_args"
"""Where `ckpt.pt` keeps the options of the model."""


def values(saved: Mapping[str, object]) -> dict[str, object] | None:
    """The config of what `train.py` saved; None for what another program did."""
    options = saved.get(OPTIONS)
    return (
        {"model_type": MODEL_TYPE, **options}
        if isinstance(options, Mapping) and "block_size" in options
        else None
    )


def config(settings: Settings) -> ModelConfig:
    """The config of a nanoGPT checkpoint.

    Its non-linearity is the exact GELU, as in every version since February 2023.
    """
    d_model, bias = settings.count("n_embd"), settings.flag("bias", True)
    return ModelConfig(
        n_layers=settings.count("n_layer"),
        d_model=d_model,
        n_heads=settings.count("n_head"),
        n_ctx=settings.count("block_size"),
        d_vocab=settings.count("vocab_size"),
        mlp=MLP(4 * d_model, "gelu", bias=bias),
        position=Learned(),
        norm=LayerNorm(1e-5, trained="gamma and beta" if bias else "gamma"),
        qkv_bias=bias,
        out_bias=bias,
        tied=True,
    )


def rules(config: ModelConfig) -> tuple[TensorRule, ...]:
    """The weight table."""
    ours, theirs = "blocks.{l}.", "transformer.h.{l}."
    matrices = {
        "attn.qkv": "attn.c_attn",
        "attn.out": "attn.c_proj",
        "mlp.into": "mlp.c_fc",
        "mlp.out": "mlp.c_proj",
    }
    return (
        *modules({"embed": "transformer.wte", "pos_embed": "transformer.wpe"}, bias=False),
        *norm_rules({"ln_final": "transformer.ln_f"}, config.norm),
        *norm_rules({"ln1": "ln_1", "ln2": "ln_2"}, config.norm, ours=ours, theirs=theirs),
        *modules(matrices, ours=ours, theirs=theirs, bias=config.qkv_bias),
        *unembedding(config),
    )


FAMILY = Family(
    name="nanoGPT",
    model_types=(MODEL_TYPE,),
    config=config,
    rules=rules,
    prefix="transformer.",
    duplicates=tied_to("transformer.wte.weight"),
    buffers=(r".*\.attn\.bias",),
)
