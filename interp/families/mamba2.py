"""Mamba-2: blocks of a selective state space, without attention, MLPs and positions.

A config has no length of context. `residual_in_fp32` keeps the stream in float32 beside weights in half precision; here
the stream has the dtype of the weights, so that in half precision it is rounded at every block.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from functools import partial

from einops import rearrange
from torch import Tensor

from interp.families.spec import Family, Settings, TensorLayout, TensorRule, in_layers
from interp.families.table import modules, tied_to, unembedding
from interp.model.config import Mamba2, ModelConfig, NoPosition, RMSNorm

UNBOUNDED = 2**20
"""Length of the longest text of a model with a config that does not say it."""
TRAINING = ("time_step_rank", "time_step_min", "time_step_max", "time_step_floor", "rescale_prenorm_residual")
"""Keys about the weights that an untrained model begins with."""
NUMERICS = ("chunk_size", "residual_in_fp32")
"""How the sums are split, and how they are rounded in half precision."""
OURS = "blocks.{l}.attn."


def config(settings: Settings) -> ModelConfig:
    """Our config of a Mamba-2 checkpoint."""
    settings.present((*TRAINING, *NUMERICS))
    settings.require("hidden_act", "silu", "swish", None)
    d_model, heads = settings.count("hidden_size", 4096), settings.count("num_heads", 128)
    d_head, expand = settings.count("head_dim", 64), settings.count("expand", 2)
    if expand * d_model != heads * d_head:
        raise ValueError(
            f"Mamba-2: config requires expand * hidden_size = num_heads * head_dim, got {expand * d_model} and "
            f"{heads * d_head}"
        )
    low, high = step_limits(settings)
    norm = RMSNorm(settings.real("layer_norm_epsilon", 1e-5))
    mixer = Mamba2(
        key_heads=settings.count("n_groups", 8),
        value_heads=heads,
        d_key=settings.count("state_size", 128),
        d_value=d_head,
        kernel=settings.count("conv_kernel", 4),
        bias=settings.flag("use_bias", False),
        conv_bias=settings.flag("use_conv_bias", True),
        eps=norm.eps,
        step_min=low,
        step_max=high,
    )
    return ModelConfig(
        n_layers=settings.count("num_hidden_layers", 64), d_model=d_model, n_heads=heads, d_head=d_head,
        n_ctx=UNBOUNDED, d_vocab=settings.count("vocab_size", 32_768), mixer=mixer, position=NoPosition(), norm=norm,
        qkv_bias=False, out_bias=mixer.bias, tied=settings.flag("tie_word_embeddings", False),
    )  # fmt: skip


def state_space(settings: Settings, body: ModelConfig) -> Mamba2:
    """The mixer that the keys `mamba_...` of a hybrid describe; `body` the config without it."""
    assert isinstance(body.norm, RMSNorm)
    settings.present(("mamba_chunk_size",))
    heads, wide = settings.count("mamba_n_heads", 128), settings.count("mamba_expand", 2) * body.d_model
    width = settings.get("mamba_d_head")
    d_value = wide // heads if width in (None, "auto") else settings.count("mamba_d_head")
    if heads * d_value != wide:
        raise ValueError(
            f"config requires mamba_n_heads * mamba_d_head = mamba_expand * hidden_size = {wide}, got {heads * d_value}"
        )
    low, high = step_limits(settings)
    return Mamba2(
        key_heads=settings.count("mamba_n_groups", 1),
        value_heads=heads,
        d_key=settings.count("mamba_d_state", 256),
        d_value=d_value,
        kernel=settings.count("mamba_d_conv", 4),
        bias=settings.flag("mamba_proj_bias", False),
        conv_bias=settings.flag("mamba_conv_bias", True),
        eps=body.norm.eps,
        step_min=low,
        step_max=high,
    )


def step_limits(settings: Settings) -> tuple[float, float | None]:
    """The smallest step size, and the largest or None where it is infinite (`time_step_limit`)."""
    stated = settings.get("time_step_limit")
    if stated is None:
        return 0.0, None
    limits = [_number(value) for value in stated] if isinstance(stated, list | tuple) else []
    if len(limits) != 2 or not 0 <= limits[0] <= limits[1] or limits[1] == 0 or limits[0] == math.inf:
        raise ValueError(
            f"config requires two numbers from 0 on in order for time_step_limit, got {stated!r}"
        )
    return limits[0], None if limits[1] == math.inf else limits[1]


def _number(value: object) -> float:
    """A number of a config, which may write infinity as {"__float__": "Infinity"}; NaN for any other value."""
    if isinstance(value, Mapping) and value == {"__float__": "Infinity"}:
        return math.inf
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value) if abs(value) <= sys.float_info.max or isinstance(value, float) else math.nan


def rules(config: ModelConfig) -> tuple[TensorRule, ...]:
    """The weight table."""
    return (
        *modules({"embed": "backbone.embeddings", "ln_final": "backbone.norm_f"}, bias=False),
        *modules({"ln1": "norm"}, ours="blocks.{l}.", theirs="backbone.layers.{l}.", bias=False),
        *mixer_rules(config, "backbone.layers.{l}.mixer."),
        *unembedding(config),
    )


def mixer_rules(config: ModelConfig, theirs: str) -> tuple[TensorRule, ...]:
    """The rules of a Mamba-2 mixer, with names in a checkpoint that begin with `theirs`."""
    kind = state_space_of(config)
    table = [
        TensorRule(f"{OURS}{ours}.{part}", (f"{theirs}in_proj.{part}",), layout)
        for part in (("weight", "bias") if kind.bias else ("weight",))
        for ours, layout in _INTO.items()
    ]
    vectors = {"rate": "A_log", "step": "dt_bias", "skip": "D"} | (
        {"bias": "conv1d.bias"} if kind.conv_bias else {}
    )
    return (
        *table,
        TensorRule(f"{OURS}kernel", (f"{theirs}conv1d.weight",), _kernel),
        *(TensorRule(f"{OURS}{ours}", (f"{theirs}{name}",)) for ours, name in vectors.items()),
        *modules({"gated_norm": "norm"}, ours=OURS, theirs=theirs, bias=False),
        *modules({"out": "out_proj"}, ours=OURS, theirs=theirs, bias=kind.bias),
    )


def hybrid_rules(config: ModelConfig, table: Sequence[TensorRule]) -> tuple[TensorRule, ...]:
    """The rules of a model with Mamba-2 in some layers (named `mamba`) and the attention of `table` in the others."""
    attends = [layer for layer, mixer in enumerate(config.mixers) if not isinstance(mixer, Mamba2)]
    states = [layer for layer in range(config.n_layers) if layer not in attends]
    return (
        *(rule for rule in table if ".attn." not in rule.ours),
        *in_layers([rule for rule in table if ".attn." in rule.ours], attends),
        *(in_layers(mixer_rules(config, "model.layers.{l}.mamba."), states) if states else ()),
    )


def state_space_of(config: ModelConfig) -> Mamba2:
    """The Mamba-2 mixer of a model, the same in all layers that have one."""
    return next(mixer for mixer in config.mixers if isinstance(mixer, Mamba2))


def _cut(tensor: Tensor, config: ModelConfig, part: int) -> Tensor:
    """Rows of the joined input map: part 0 is the gate, 1 is x, B and C, 2 is the step sizes."""
    kind = state_space_of(config)
    values = kind.value_heads * kind.d_value
    return tensor.split([values, values + 2 * kind.key_heads * kind.d_key, kind.value_heads])[part]


_INTO: Mapping[str, TensorLayout] = {
    name: partial(_cut, part=i) for i, name in enumerate(("gate", "into", "rates"))
}


def _kernel(tensor: Tensor, config: ModelConfig) -> Tensor:
    return rearrange(tensor, "f 1 t -> t f")


def _renamed(name: str) -> str:
    """The embedding as old checkpoints call it."""
    return (
        name.replace("embedding.weight", "embeddings.weight") if name.endswith("embedding.weight") else name
    )


FAMILY = Family(
    name="Mamba-2",
    model_types=("mamba2",),
    config=config,
    rules=rules,
    prefix="backbone.",
    duplicates=tied_to("backbone.embeddings.weight"),
    rename=_renamed,
)
