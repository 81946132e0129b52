"""Loading of a user's state dict into a model of a given config, by a map of parameter names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch
from einops import EinopsError, rearrange
from torch import Tensor

from interp.core.axes import shape_text
from interp.core.boundary import public
from interp.core.kinds import Device
from interp.core.wording import nearest
from interp.families.convert import to_model
from interp.families.spec import Family, Settings, TensorRule, same
from interp.families.stored import LiveTensors
from interp.model.config import ModelConfig
from interp.model.transformer import Transformer

AS_OURS: Mapping[str, str] = MappingProxyType({})
"""No name differs."""


@public()
def load_state(
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    rename: Mapping[str, str | Sequence[str]] = AS_OURS,
    *,
    ignore: Sequence[str] = (),
    dtype: torch.dtype | None = None,
    device: Device = "cpu",
) -> Transformer:
    """The model of a config with the values of a state dict: frozen, in eval mode, sharing no memory with it.

    Args:
        rename: our name of a parameter -> the state dict's. `{l}` stands for the layer, on both sides. Several names
            are joined along the first axis (`qkv`: queries, then keys, then values; a gated `into`: the gate, then
            the other). After a name may stand how its axes are to be moved, as einops writes it: `"embed.W_E: v d ->
            v d"`. A parameter that is not in the map is looked for under our own name. Every matrix of ours is `[out,
            in]`, as `torch.nn.Linear` has it.
        ignore: regular expressions of tensors that hold no weights (masks, tables).
        dtype: None = the state dict's. Our names are those of `Transformer(config).state_dict()`;
            `docs/howto/own_model.md` lists them.

    Raises:
        ValueError: naming a parameter that the model lacks, and a tensor that is missing, left over, of another
            shape, or not finite. A tied unembedding may be stored a second time, and must then be the embedding.

    Example:
        >>> config = interp.model.ModelConfig(n_layers=1, d_model=8, n_heads=2, n_ctx=4, d_vocab=5)
        >>> state = interp.model.Transformer(config).state_dict()
        >>> state["wte"] = state.pop("embed.weight")
        >>> load_state(config, state, {"embed.weight": "wte"}).config == config
        True
    """
    with torch.device("meta"):
        axes = {name: parameter.ndim for name, parameter in Transformer(config).named_parameters()}
    ours = dict.fromkeys((*axes, *map(_of_any_layer, axes)))
    if unknown := [name for name in rename if name not in ours]:
        raise ValueError(f"the model has no parameter {unknown[0]!r}; {nearest(unknown[0], ours)}")
    family = Family(
        name="load_state", model_types=(), config=_no_config,
        rules=lambda config: tuple(_rule(name, rename, ndim) for name, ndim in axes.items()), prefix="",
        buffers=tuple(ignore),
        duplicates=lambda config: {"unembed.weight": _rule("embed.weight", rename, 2).theirs[0]} if config.tied else {},
    )  # fmt: skip
    model = to_model(family, config, LiveTensors(tensors), dtype=dtype, devices=(torch.device(device),))
    assert isinstance(model, Transformer)
    return model


def _of_any_layer(name: str) -> str:
    return re.sub(r"^blocks\.\d+\.", "blocks.{l}.", name)


def _rule(name: str, rename: Mapping[str, str | Sequence[str]], ndim: int) -> TensorRule:
    """The rule of one parameter: its entry in `rename`, the entry with `{l}` for its layer, or its own name.

    Axes that a pattern has before the parameter's own `ndim` are flattened.
    """
    source = rename.get(name, rename.get(_of_any_layer(name), name))
    layer = re.match(r"blocks\.(\d+)\.", name)
    parts, patterns = [], []
    for part in [source] if isinstance(source, str) else source:
        theirs, _, pattern = part.partition(":")
        parts.append(theirs.strip().replace("{l}", layer[1]) if layer else theirs.strip())
        patterns.append(pattern.strip())
    if len(set(patterns)) > 1:
        raise ValueError(f"{name}: one order of axes for all its parts is required, got {patterns}")
    layout = partial(_rearranged, name=name, pattern=patterns[0], ndim=ndim) if patterns[0] else same
    return TensorRule(name, tuple(parts), layout)


def _rearranged(tensor: Tensor, config: ModelConfig, *, name: str, pattern: str, ndim: int) -> Tensor:
    """The tensor with its axes rearranged by an einops pattern; ValueError for a pattern that does not fit it."""
    try:
        laid = rearrange(tensor, pattern)
    except EinopsError as cause:
        raise ValueError(
            f"{name}: a tensor of shape {shape_text(tensor.shape)} cannot be laid out as {pattern!r}: {cause}"
        ) from cause
    return laid.flatten(0, laid.ndim - ndim) if laid.ndim > ndim else laid


def _no_config(settings: Settings) -> ModelConfig:
    raise AssertionError("the config of a state dict is given")
