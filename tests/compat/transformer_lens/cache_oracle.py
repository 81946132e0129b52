"""Caches of TransformerLens 3.9 with its answers about them, on objects that stand in for the models."""

from functools import cache as once
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from interp.compat.transformer_lens.activation_cache import ActivationCache
from tests.compat.oracle.make_activation_cache import FILE, MODELS


@once
def oracle() -> dict[str, Any]:
    return torch.load(FILE)


def stand_in(name: str) -> SimpleNamespace:
    """An object with just what an ActivationCache asks of a model, from the oracle's weights."""
    fields, weights = (
        {"normalization_type": "LN", "attn_only": False} | MODELS[name],
        oracle()[name]["weights"],
    )

    def block(at: int) -> SimpleNamespace:
        parts = {
            kind: weights.get(f"blocks.{at}.{kind}")
            for kind in ("attn.W_O", "attn.b_O", "mlp.W_out", "mlp.b_out")
        }
        attn = SimpleNamespace(W_O=parts["attn.W_O"], b_O=parts["attn.b_O"])
        if fields["attn_only"]:
            return SimpleNamespace(attn=attn)
        return SimpleNamespace(
            attn=attn, mlp=SimpleNamespace(W_out=parts["mlp.W_out"], b_out=parts["mlp.b_out"])
        )

    model = SimpleNamespace(
        cfg=SimpleNamespace(**fields), blocks=[block(at) for at in range(2)], W_U=weights["unembed.W_U"]
    )

    def bias(layer: int, mlp_input: bool = False, include_mlp_biases: bool = True) -> Tensor:
        total = sum(
            (b.attn.b_O for b in model.blocks[: layer + mlp_input]), torch.zeros(6, dtype=torch.float64)
        )
        return total + sum(b.mlp.b_out for b in model.blocks[:layer]) if include_mlp_biases else total

    def directions(tokens: int | Tensor) -> Tensor:
        return model.W_U[:, tokens].movedim(0, -1)

    def final_norm(x: Tensor) -> Tensor:
        kind = fields["normalization_type"]
        x = x if kind.startswith("RMS") else x - x.mean(-1, keepdim=True)
        x = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        x = x if kind.endswith("Pre") else x * weights["ln_final.w"]
        return x + weights["ln_final.b"] if kind == "LN" else x

    model.accumulated_bias, model.tokens_to_residual_directions, model.ln_final = bias, directions, final_norm
    return model


def cache_of(name: str) -> ActivationCache:
    return ActivationCache(dict(oracle()[name]["cache"]), stand_in(name))
