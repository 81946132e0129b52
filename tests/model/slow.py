"""The whole forward pass again, one head and one query at a time, written from the formulas and not from the code.

It shares nothing with `interp.model` but the parameters, and is the oracle of the tests in this folder. Float64 only.
"""

import math

import torch
from torch import Tensor

from interp.model import (
    LayerNorm,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    NoNorm,
    RMSNorm,
    Rotary,
    Transformer,
)

Sites = dict[str, Tensor]


def slow_forward(model: Transformer, tokens: Tensor) -> tuple[Tensor, Sites]:
    """Logits `[p, v]` of one unpadded row, and the value of the main sites by name, without a batch axis."""
    p, config, seen = dict(model.named_parameters()), model.config, {}
    x = torch.stack([p["embed.weight"][t] for t in tokens])
    if "pos_embed.weight" in p:
        x = x + p["pos_embed.weight"][: len(tokens)]
    for layer in range(config.n_layers):
        x = _block(p, config, layer, x, seen)
    final = config.norm if config.final_norm else NoNorm()
    x = torch.stack([_normalised(p, "ln_final", final, row) for row in x])
    unembed = p.get("unembed.weight", p["embed.weight"])
    return x @ unembed.T + p.get("unembed.bias", torch.zeros(())), seen


def _block(p: Sites, config: ModelConfig, layer: int, x: Tensor, seen: Sites) -> Tensor:
    name = f"blocks.{layer}"
    seen[f"{name}.hook_resid_pre"] = x
    read = torch.stack([_normalised(p, f"{name}.ln1", config.norm, row) for row in x])
    attn_out = _attention(p, config, layer, read, seen)
    seen[f"{name}.hook_attn_out"] = attn_out
    if config.mlp is not None:
        stream = x if config.parallel else x + attn_out
        read = torch.stack([_normalised(p, f"{name}.ln2", config.norm, row) for row in stream])
        mlp_out = _mlp(p, config, name, read)
        seen[f"{name}.hook_mlp_out"] = mlp_out
        attn_out = attn_out + mlp_out
    seen[f"{name}.hook_resid_post"] = x + attn_out
    return x + attn_out


def _normalised(p: Sites, name: str, norm: object, row: Tensor) -> Tensor:
    if isinstance(norm, LayerNorm):
        row = row - row.sum() / len(row)
        return row / math.sqrt(row @ row / len(row) + norm.eps) * p[f"{name}.weight"] + p[f"{name}.bias"]
    if isinstance(norm, RMSNorm):
        return row / math.sqrt(row @ row / len(row) + norm.eps) * p[f"{name}.weight"]
    return row


def _mlp(p: Sites, config: ModelConfig, block: str, x: Tensor) -> Tensor:
    assert config.mlp is not None
    act = {
        "gelu": lambda t: t * 0.5 * (1 + torch.erf(t / math.sqrt(2))),
        "gelu_new": lambda t: t * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (t + 0.044715 * t**3))),
        "relu": lambda t: torch.where(t > 0, t, 0.0),
        "silu": lambda t: t / (1 + torch.exp(-t)),
    }[config.mlp.act]
    pre = x @ p[f"{block}.mlp.into.weight"].T + p.get(f"{block}.mlp.into.bias", torch.zeros(()))
    m = config.mlp.d_mlp
    post = act(pre[:, :m]) * pre[:, m:] if config.mlp.gated else act(pre)
    return post @ p[f"{block}.mlp.out.weight"].T + p.get(f"{block}.mlp.out.bias", torch.zeros(()))


def _attention(p: Sites, config: ModelConfig, layer: int, x: Tensor, seen: Sites) -> Tensor:
    name, e, n = f"blocks.{layer}.attn", config.head_width, len(x)
    qkv = x @ p[f"{name}.qkv.weight"].T + p.get(f"{name}.qkv.bias", torch.zeros(()))
    first_key, first_value = config.n_heads * e, (config.n_heads + config.kv_heads) * e
    patterns, zs = torch.zeros(config.n_heads, n, n).to(x), torch.zeros(n, config.n_heads, e).to(x)
    for h in range(config.n_heads):
        g = h * config.kv_heads // config.n_heads
        q = rotated(config, qkv[:, h * e : (h + 1) * e])
        k = rotated(config, qkv[:, first_key + g * e : first_key + (g + 1) * e])
        v = qkv[:, first_value + g * e : first_value + (g + 1) * e]
        for i in range(n):
            visible = [j for j in range(n) if _sees(config, i, j)]
            weights = torch.stack([torch.exp(q[i] @ k[j] * slow_scale(config, layer)) for j in visible])
            for j, weight in zip(visible, weights / weights.sum(), strict=True):
                patterns[h, i, j] = weight
                zs[i, h] += weight * v[j]
    seen[f"{name}.hook_pattern"], seen[f"{name}.hook_z"] = patterns, zs
    return zs.flatten(1) @ p[f"{name}.out.weight"].T + p.get(f"{name}.out.bias", torch.zeros(()))


def _sees(config: ModelConfig, i: int, j: int) -> bool:
    near = config.window is None or abs(i - j) < config.window
    return near and (j <= i or not config.causal)


def slow_scale(config: ModelConfig, layer: int) -> float:
    """What q . k is multiplied by."""
    scale = 1 / math.sqrt(config.head_width) if config.attn_scale is None else config.attn_scale
    return scale / (layer + 1) if config.scale_by_layer else scale


def rotated(config: ModelConfig, x: Tensor) -> Tensor:
    """Rows of `x` turned by their index, pair after pair; angles in float32, as all checkpoints were trained."""
    rotary = config.position
    if not isinstance(rotary, Rotary):
        return x
    dim = rotary.dim or config.head_width
    out = x.clone()
    for pair in range(dim // 2):
        a, b = (2 * pair, 2 * pair + 1) if rotary.interleaved else (pair, pair + dim // 2)
        frequency = torch.tensor(slow_frequency(rotary, 2 * pair / dim), dtype=torch.float32)
        for position in range(len(x)):
            angle = position * frequency
            cos, sin = angle.cos().to(x), angle.sin().to(x)
            out[position, a] = x[position, a] * cos - x[position, b] * sin
            out[position, b] = x[position, b] * cos + x[position, a] * sin
    return out


def slow_frequency(rotary: Rotary, exponent: float) -> float:
    """Angle per position of the pair at `exponent` = 2i / dim, by the case analysis of the Llama 3.1 release."""
    frequency = rotary.base**-exponent
    rule = rotary.scaling
    if isinstance(rule, LinearScaling):
        return frequency / rule.factor
    if not isinstance(rule, Llama3Scaling):
        return frequency
    wavelength = 2 * math.pi / frequency
    if wavelength < rule.original_n_ctx / rule.high_freq_factor:
        return frequency
    if wavelength > rule.original_n_ctx / rule.low_freq_factor:
        return frequency / rule.factor
    smooth = (rule.original_n_ctx / wavelength - rule.low_freq_factor) / (
        rule.high_freq_factor - rule.low_freq_factor
    )
    return (1 - smooth) * frequency / rule.factor + smooth * frequency
