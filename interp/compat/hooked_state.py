"""Conversion of a HookedTransformer's state dict and config to a model, and back.

Tutorials and papers saved theirs until TransformerLens 3; version 4 has no such class. Numbers are copied and
transposed, with two exceptions, which TransformerLens' arithmetic asks for: norms whose gamma and beta were folded away
(`LNPre`, `RMSPre`) get gamma 1 and beta 0, and the bias that its gated MLP adds after the gate, b_in, is added to b_out
as b_in W_out. Biases of a kind that no layer of a file has (b_U of some old files, all of a small model that was
trained without) are none in our model, or zero where others of the same matrix are there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from interp.compat import hooked_config, hooked_layout
from interp.compat.llama2c_tokenizer import Llama2cTokenizer
from interp.core.boundary import public
from interp.core.kinds import Device
from interp.core.wording import nearest
from interp.families.convert import to_model
from interp.families.stored import LiveTensors
from interp.families.tokenizer import FileTokenizer, HuggingFaceTokenizer, TransformersTokenizer
from interp.hooked import HookedTransformer
from interp.model.config import MLP, LayerNorm, ModelConfig
from interp.model.transformer import Transformer

AnyTokenizer = TransformersTokenizer | HuggingFaceTokenizer | FileTokenizer | Llama2cTokenizer


@public()
def from_hooked_transformer(
    state: Mapping[str, Tensor],
    config: object,
    *,
    tokenizer: AnyTokenizer | None = None,
    dtype: torch.dtype | None = None,
    device: Device = "cpu",
) -> HookedTransformer:
    """The model that a HookedTransformer's state dict and config describe.

    `from_hooked_transformer(theirs.state_dict(), theirs.cfg)` of a live one, or
    `from_hooked_transformer(torch.load("weights.pt"), {"n_layers": 2, "d_model": 512, "n_ctx": 1024, "d_head": 64,
    "d_vocab": 50278, "attn_only": True})`. Folded and centred weights are taken as they are; a bias that no layer has
    is none.

    Args:
        state: the state dict.
        config: a HookedTransformerConfig, or its dict; missing fields have TransformerLens' defaults.
        tokenizer: the model's tokenizer, a bare transformers tokenizer too; None: the model takes ids.
        dtype: dtype of the weights; None: the state dict's.
        device: where the weights go.

    Returns:
        `HookedTransformer`, which shares no memory with the state dict.

    Raises:
        ValueError: a field that asks for something that this package does not compute, or a tensor that is missing,
            left over, of another shape or not finite; the message names it.
    """
    values = hooked_config.values_of(config)
    ours = hooked_config.to_config(values)
    folded = hooked_config.normalization(values) in hooked_config.FOLDED
    model = from_layout(state, ours, folded=folded, dtype=dtype, device=device)
    adapted = HuggingFaceTokenizer(tokenizer) if isinstance(tokenizer, TransformersTokenizer) else tokenizer
    return HookedTransformer(model, adapted, name=str(values.get("model_name") or "custom"))


def from_layout(
    state: Mapping[str, Tensor],
    config: ModelConfig,
    *,
    folded: bool = False,
    dtype: torch.dtype | None = None,
    device: Device = "cpu",
) -> Transformer:
    """The model of a config with weights in TransformerLens' layout; `folded` norms have no parameters in it."""
    hooked_layout.check_shapes(state, config)
    state, config = _with_biases(state, config)
    added = dict(_unit_norms(state, config)) if folded else {}
    added |= _gate_biases(state, config)
    if clash := sorted(set(added) & set(state)):
        raise ValueError(
            f"TransformerLens: {clash[0]} does not go with this config, which has no such weight"
        )
    family = hooked_layout.family(config)
    tensors = LiveTensors({**state, **added, **_moved_biases(state, config)})
    model = to_model(family, config, tensors, dtype=dtype, devices=(torch.device(device),))
    assert isinstance(model, Transformer)
    return model


def _with_biases(
    state: Mapping[str, Tensor], config: ModelConfig
) -> tuple[Mapping[str, Tensor], ModelConfig]:
    """The state dict and the config that agree on which biases there are.

    A bias that some layers have and others lack is left missing, to be named.
    """
    stored = {hooked_layout.plain_name(name).rpartition(".")[2] for name in state}
    mlp = config.mlp
    if isinstance(mlp, MLP):
        mlp = replace(mlp, bias=not stored.isdisjoint(("b_in", "b_out")))
    config = replace(
        config, unembed_bias="b_U" in stored, out_bias="b_O" in stored, mlp=mlp,
        qkv_bias=not stored.isdisjoint(("b_Q", "b_K", "b_V")),
    )  # fmt: skip
    joined = ("b_Q", "b_K", "b_V") * config.qkv_bias
    if isinstance(mlp, MLP) and mlp.bias:
        joined += ("b_in", "b_out")
    dtype = state["embed.W_E"].dtype if "embed.W_E" in state else None
    zeros = {
        name: torch.zeros(shape, dtype=dtype)
        for name, shape in hooked_layout.shapes(config).items()
        if (kind := name.rpartition(".")[2]) in joined and kind not in stored
    }
    return {**state, **zeros}, config


def _unit_norms(state: Mapping[str, Tensor], config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Gamma 1 and beta 0 for the norms that read the stream, if their own were folded."""
    embedding = state.get("embed.W_E")
    dtype = None if embedding is None else embedding.dtype
    for norm in hooked_layout.norms(config):
        if re.search(r"(ln1|ln2|ln_final)$", norm):
            yield f"{norm}.w", torch.ones(config.d_model, dtype=dtype)
            if isinstance(config.norm, LayerNorm):
                yield f"{norm}.b", torch.zeros(config.d_model, dtype=dtype)


def _gate_biases(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The bias of the gate, which TransformerLens does not have."""
    if not isinstance(config.mlp, MLP) or not config.mlp.gated:
        return {}
    biases = {f"blocks.{layer}.mlp.": f"blocks.{layer}.mlp.b_in" for layer in range(config.n_layers)}
    return {f"{at}b_gate": torch.zeros_like(state[name]) for at, name in biases.items() if name in state}


def _moved_biases(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """b_in of a gated MLP, which TransformerLens adds to what W_out reads, as part of b_out; computed in float64."""
    moved: dict[str, Tensor] = {}
    if not isinstance(config.mlp, MLP) or not config.mlp.gated:
        return moved
    for layer in range(config.n_layers):
        names = [f"blocks.{layer}.mlp.{name}" for name in ("b_in", "W_out", "b_out")]
        if all(name in state for name in names) and bool(state[names[0]].any()):
            b_in, w_out, b_out = (state[name].detach() for name in names)
            moved[names[0]] = torch.zeros_like(b_in)
            moved[names[2]] = (b_out.double() + b_in.double() @ w_out.double()).to(b_out.dtype)
    return moved


def read_state(found: Mapping[str, object], what: str) -> dict[str, Tensor]:
    """A dict of tensors only, as a state dict; ValueError naming anything else in it."""
    for name, value in found.items():
        if not isinstance(value, Tensor):
            hint = nearest(str(name), ("embed.W_E", "unembed.W_U"))
            raise ValueError(
                f"{what}: a state dict holds tensors, {name!r} is {type(value).__name__}; {hint}"
            )
    return {str(name): value for name, value in found.items() if isinstance(value, Tensor)}
