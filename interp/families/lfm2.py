"""LFM2: short convolutions between gates, and in some layers attention with normed queries and keys."""

from dataclasses import replace

from einops import rearrange
from torch import Tensor

from interp.families import llama_like
from interp.families.spec import Family, Settings, TensorRule, in_layers
from interp.families.table import modules, norm_rules, unembedding
from interp.families.windows import full_layers
from interp.model.config import MLP, ModelConfig, RMSNorm, ShortConv, Softmax

DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "intermediate_size": 12_288,
}
KINDS = ("full_attention", "conv")
OURS, THEIRS = "blocks.{l}.", "model.layers.{l}."


def config(settings: Settings) -> ModelConfig:
    """Our config of an LFM2 checkpoint."""
    norm = RMSNorm(settings.real("norm_eps", 1e-5))
    defaults = dict(DEFAULTS)
    tied, width = settings.get("tie_embedding"), settings.get("block_ff_dim")
    if tied is not None:
        settings.require("tie_word_embeddings", tied if isinstance(tied, bool) else None, None)
        defaults["tie_word_embeddings"] = settings.flag("tie_embedding", True)
    if width is not None:
        settings.require("intermediate_size", settings.count("block_ff_dim"), None)
        defaults["intermediate_size"] = settings.count("block_ff_dim")
    body = llama_like.decoder(settings, defaults, act=None, norm=norm, biases=())
    assert isinstance(body.mlp, MLP)
    conv = ShortConv(settings.count("conv_L_cache", 3), settings.flag("conv_bias", False))
    kinds = [Softmax() if attends else conv for attends in _attention(settings, body.n_layers)]
    d_mlp = _width(settings, body.mlp.d_mlp)
    body = replace(body, mlp=replace(body.mlp, d_mlp=d_mlp), qk_norm="head")
    return llama_like.mixed(body, kinds)


def _attention(settings: Settings, n_layers: int) -> list[bool]:
    """Whether each layer attends: `layer_types`, or else `full_attn_idxs`, or else all do."""
    indices = settings.get("full_attn_idxs")
    if indices is not None and not isinstance(indices, list | tuple):
        raise ValueError(f"LFM2: config requires a list for full_attn_idxs, got {indices!r}")
    return full_layers(settings, n_layers, lambda layer: indices is None or layer in indices, KINDS)


def _width(settings: Settings, width: int) -> int:
    """Width of the MLP: two thirds of the config's number, times a factor, rounded up to a multiple."""
    several = settings.count("block_multiple_of", 256)
    factor = settings.optional("block_ffn_dim_multiplier", 1.0)
    if not settings.flag("block_auto_adjust_ff_dim", True):
        return width
    width = int(2 * width / 3)
    return width if factor is None else -(-int(factor * width) // several) * several


def rules(config: ModelConfig) -> tuple[TensorRule, ...]:
    """The weight table."""
    bias = next((mixer.bias for mixer in config.mixers if isinstance(mixer, ShortConv)), False)
    conv, attention = f"{THEIRS}conv.", f"{THEIRS}self_attn."
    ours, heads = f"{OURS}attn.", tuple(f"{part}_proj" for part in "qkv")
    names: dict[str, str | tuple[str, ...]] = {"qkv": heads, "out": "out_proj"}
    names |= {f"{part}_norm.norm": f"{part}_layernorm" for part in "qk"}
    places = {
        ShortConv: (
            TensorRule(f"{ours}kernel", (f"{conv}conv.weight",), _kernel),
            *([TensorRule(f"{ours}bias", (f"{conv}conv.bias",))] if bias else []),
            *modules({"into": "in_proj", "out": "out_proj"}, ours=ours, theirs=conv, bias=bias),
        ),
        Softmax: modules(names, ours=ours, theirs=attention, bias=False),
    }
    mlp: dict[str, str | tuple[str, ...]] = {
        "mlp.into": ("feed_forward.w1", "feed_forward.w3"),
        "mlp.out": "feed_forward.w2",
    }
    table: tuple[TensorRule, ...] = (
        *modules({"embed": "model.embed_tokens", "ln_final": "model.embedding_norm"}, bias=False),
        *norm_rules({"ln1": "operator_norm", "ln2": "ffn_norm"}, config.norm, ours=OURS, theirs=THEIRS),
        *modules(mlp, ours=OURS, theirs=THEIRS, bias=False),
        *unembedding(config),
    )
    for kind, some in places.items():
        table += in_layers(some, [i for i, mixer in enumerate(config.mixers) if isinstance(mixer, kind)])
    return table


def _kernel(tensor: Tensor, config: ModelConfig) -> Tensor:
    return rearrange(tensor, "f 1 t -> t f")


FAMILY = Family(
    name="LFM2",
    model_types=("lfm2",),
    config=config,
    rules=rules,
    prefix="model.",
    duplicates=llama_like.duplicates,
    buffers=llama_like.BUFFERS,
)
