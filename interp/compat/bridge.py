"""A live `TransformerBridge` of TransformerLens (4, with weights as they are stored also 3) becomes a model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version

import torch
from torch import Tensor, nn

from interp.compat import hooked_layout
from interp.compat.hooked_state import from_layout
from interp.core.boundary import public
from interp.families.convert import to_model
from interp.families.load import config_of
from interp.families.stored import LiveTensors
from interp.families.tokenizer import HuggingFaceTokenizer, TransformersTokenizer
from interp.hooked import HookedTransformer
from interp.model.config import MLP, AnyConfig, ModelConfig
from interp.model.transformer import Transformer

WRAPPED = "._original_component"
"""Insertions of a bridge into the names of the Hugging Face model that it wraps."""
NAMES_WEIGHTS = 4
"""The first major version with bridges that name all their weights as TransformerLens 3 does."""
TOLERANCE = 1e-3
"""Largest accepted difference of logits from a processed bridge's, relative to the largest."""


@public()
def from_bridge(bridge: nn.Module) -> HookedTransformer:
    """The model of a live `TransformerBridge` with its tokenizer; the bridge is not touched and shares no memory.

    A bridge that still has its checkpoint's weights is read through the Hugging Face model inside it. One whose
    weights were processed (`enable_compatibility_mode()`: folded norms, centred weights) is read as it now is, and
    the logits on a few tokens are compared with its own: `from_bridge(TransformerBridge.boot_transformers("gpt2"))`.

    Args:
        bridge: the bridge.

    Returns:
        `HookedTransformer` with the bridge's tokenizer.

    Raises:
        ValueError: an object that is no bridge, a family that is not supported, or processed weights that cannot be
            taken over.
        ImportError: processed weights where transformer-lens is older than 4, whose bridges do not name them all.
    """
    _require_bridge(bridge)
    hf_model = bridge.original_model
    assert isinstance(hf_model, nn.Module)
    family, config = config_of(_values(hf_model))
    if getattr(bridge, "_weights_processed", False):
        model = _processed(bridge, config)
    else:
        tensors = LiveTensors(_unwrapped(hf_model))
        made = to_model(family, config, tensors, dtype=None, devices=(torch.device("cpu"),))
        if not isinstance(made, Transformer):
            raise ValueError(
                f"{type(hf_model).__name__} is no single Transformer: use the Hugging Face model itself"
            )
        model = made
    tokenizer = getattr(bridge, "tokenizer", None)
    adapted = HuggingFaceTokenizer(tokenizer) if isinstance(tokenizer, TransformersTokenizer) else None
    return HookedTransformer(model, adapted, name=str(getattr(bridge.cfg, "model_name", "custom")))


def _require_bridge(bridge: object) -> None:
    theirs = sys.modules.get("transformer_lens.model_bridge")  # imported by whoever made a bridge
    if theirs is None or not isinstance(bridge, theirs.TransformerBridge):
        said = "" if theirs is not None else "; the package transformer-lens, which has them, is not imported"
        raise ValueError(f"a TransformerBridge is required, got {type(bridge).__name__}{said}")
    if not hasattr(getattr(bridge.original_model, "config", None), "to_dict"):
        raise ValueError(
            "a TransformerBridge around a Hugging Face model is required; this one wraps another model"
        )


def _values(hf_model: nn.Module) -> dict[str, object]:
    """The config of a Hugging Face model, as a dict."""
    return hf_model.config.to_dict()  # type: ignore[union-attr, operator]


def _unwrapped(hf_model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a wrapped Hugging Face model under the names they have in an unwrapped one of its class."""
    with torch.device("meta"):
        names = type(hf_model)(hf_model.config).state_dict()
    wrapped = {name.replace(WRAPPED, ""): tensor for name, tensor in hf_model.state_dict().items()}
    return {name: wrapped[name] for name in names if name in wrapped}


def _processed(bridge: nn.Module, config: AnyConfig) -> Transformer:
    """The model with the weights that the bridge now computes with."""
    if int((found := version("transformer-lens")).partition(".")[0]) < NAMES_WEIGHTS:
        raise ImportError(
            f"the processed weights of a bridge require transformer-lens >= {NAMES_WEIGHTS}, got {found}: "
            "pip install 'transformer-lens>=4.3', or boot the bridge again without processing"
        )
    plain = isinstance(config, ModelConfig) and config.norm_place == "pre" and isinstance(config.mlp, MLP)
    if not plain or config.qk_norm or config.sinks or config.shared_norm:  # type: ignore[union-attr]
        raise ValueError(
            "the weights of this bridge were processed (enable_compatibility_mode()), which we can take over only for "
            "plain pre-norm models: boot it again without processing"
        )
    assert isinstance(config, ModelConfig) and isinstance(config.mlp, MLP)
    ours = replace(
        config, tied=False, unembed_bias=True, qkv_bias=True, out_bias=True, embed_scale=1.0,
        mlp=replace(config.mlp, bias=True),
    )  # fmt: skip
    model = from_layout(dict(_layout(bridge, ours)), ours)
    _compare(model, bridge)
    return model


def _layout(bridge: nn.Module, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """The bridge's weights under the names of TransformerLens 3."""
    state = bridge.state_dict()
    names = {name: _stored(name) for name in hooked_layout.shapes(config)}
    stacks: dict[str, Tensor | None] = {}
    for name, (stack, layer) in names.items():
        if stack is None:
            if name_in := _norm_name(name, state):
                yield name, state[name_in].detach()
            continue
        if stack not in stacks:
            stacks[stack] = _stack(bridge, stack)
        found = stacks[stack]
        if found is not None:
            yield name, found if layer is None else found[layer]
        elif stack.startswith("b_"):
            yield name, torch.zeros(hooked_layout.shapes(config)[name], dtype=state["embed.weight"].dtype)


def _stored(name: str) -> tuple[str | None, int | None]:
    """The bridge's stack of a weight and its layer in it; None for norms, which have no stack."""
    parts = name.split(".")
    if parts[-1] in ("w", "b"):
        return None, None
    return parts[-1], int(parts[1]) if parts[0] == "blocks" else None


def _norm_name(name: str, state: dict[str, Tensor]) -> str | None:
    where, _, part = name.rpartition(".")
    found = f"{where}.{'weight' if part == 'w' else 'bias'}"
    return found if found in state else None


def _stack(bridge: nn.Module, name: str) -> Tensor | None:
    try:
        found = getattr(bridge, name)
    except AttributeError:  # a bias that this architecture does not have
        return None
    return found.detach() if isinstance(found, Tensor) else None


@torch.no_grad()
def _compare(model: Transformer, bridge: nn.Module) -> None:
    """ValueError unless both give the same logits on a few tokens."""
    tokens = torch.arange(min(8, model.config.n_ctx, model.config.d_vocab))[None]
    theirs = bridge(tokens.to(next(bridge.parameters()).device)).cpu()
    off = float((model(tokens) - theirs).abs().max() / theirs.abs().max())
    if not off <= TOLERANCE:
        raise ValueError(
            f"the processed weights of this bridge give other logits in our model (by {off:.1e} of the largest): "
            "boot it again without processing"
        )
