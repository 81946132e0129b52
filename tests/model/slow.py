"""The whole forward pass again, one head and one query at a time, written from the formulas and not from the code.

It shares nothing with `interp.model` but the parameters, and is the oracle of the tests in this folder. Float64 only.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from interp.lab import NGPT
from interp.model import LayerNorm, ModelConfig, MoE, NoNorm, RMSNorm, Transformer
from tests.model.slow_position import position_vector, rotated, score_bias

Sites = dict[str, Tensor]
BARE = RMSNorm(trained="nothing")


def slow_forward(
    model: Transformer, tokens: Tensor, types: Tensor | None = None, memory: Tensor | None = None
) -> tuple[Tensor, Sites]:
    """Logits `[p, v]` of one unpadded row, and the value of the main sites by name, without a batch axis.

    types: token types `[p]`; memory: what cross-attention reads, `[s, d]`.
    """
    p, config = dict(model.named_parameters()), model.config
    seen: Sites = {}
    x = _embedded(p, config, tokens, types, seen)
    for layer in range(config.n_layers):
        x = _block(p, config, layer, x, seen, memory)
    return slow_read_out(model, x, seen), seen


def slow_read_out(model: Transformer, x: Tensor, seen: Sites | None = None) -> Tensor:
    """Logits `[p, v]` of states `[p, d]`: final norm, masked-LM head, unembedding, factor and soft cap."""
    p, config = dict(model.named_parameters()), model.config
    seen = {} if seen is None else seen
    x = normed(p, "ln_final", config.norm if config.final_norm else NoNorm(), x)
    if config.mlm_head is not None:
        x = normed(
            p, "mlm_head.norm", config.norm, ACTIVATIONS[config.mlm_head](_dense(p, "mlm_head.dense", x))
        )
    unembed = p.get("unembed.weight", p["embed.weight"])
    logits = (x @ unembed.T + p.get("unembed.bias", torch.zeros(()))) * config.logit_scale
    if config.logit_softcap is not None:
        seen["unembed.hook_uncapped"] = logits
        logits = config.logit_softcap * torch.tanh(logits / config.logit_softcap)
    seen["unembed.hook_out"] = logits
    return logits


def _embedded(p: Sites, config: ModelConfig, tokens: Tensor, types: Tensor | None, seen: Sites) -> Tensor:
    x = torch.stack([p["embed.weight"][t] * config.embed_scale for t in tokens])
    seen["hook_embed"] = x
    if config.position_embedded:
        seen["hook_pos_embed"] = torch.stack([position_vector(p, config, i) for i in range(len(tokens))])
        x = x + seen["hook_pos_embed"]
    if config.n_token_types:
        kinds = torch.zeros_like(tokens) if types is None else types
        seen["hook_type_embed"] = torch.stack([p["type_embed.weight"][t] for t in kinds])
        x = x + seen["hook_type_embed"]
    return normed(p, "ln_embed", config.norm, x) if config.embed_norm else x


def _block(
    p: Sites, config: ModelConfig, layer: int, x: Tensor, seen: Sites, memory: Tensor | None
) -> Tensor:
    name = f"blocks.{layer}"
    seen[f"{name}.hook_resid_pre"] = first = x
    if "mlp_before" in config.mlps:
        added = _fed(p, config, layer, "mlp_before", _read(p, config, f"{name}.ln0", x), seen)
        seen[f"{name}.hook_resid_pre_attn"] = x = x + added
    read = _read(p, config, f"{name}.ln1", x)
    x = x + _written(p, config, layer, "attn", _attention(p, config, layer, read, seen), seen)
    if memory is not None:
        x = _after(p, config, f"{name}.ln1", x)
        crossed = _cross_attention(p, config, layer, _read(p, config, f"{name}.ln_cross", x), memory, seen)
        x = x + _written(p, config, layer, "cross_attn", crossed, seen)
    last = "ln1" if memory is None else "ln_cross"
    if config.mlp is not None:
        if config.parallel:
            read = read if config.shared_norm else _read(p, config, f"{name}.ln2", first)
        else:
            x = _after(p, config, f"{name}.{last}", x)
            read = _read(p, config, f"{name}.ln2", x)
        x, last = x + _fed(p, config, layer, "mlp", read, seen), "ln2"
    seen[f"{name}.hook_resid_post"] = x
    if config.norm_place in ("post", "output_post"):
        x = _after(p, config, f"{name}.{last}", x)
        seen[f"{name}.hook_normalized_resid_post"] = x
    return x


def _fed(p: Sites, config: ModelConfig, layer: int, part: str, read: Tensor, seen: Sites) -> Tensor:
    """What an MLP adds: all of its output; of the two MLPs of a Macaron block each half of its own."""
    mlp = _experts if isinstance(config.mlp, MoE) else _mlp
    out = mlp(p, config, f"blocks.{layer}.{part}", read, seen)
    return _written(p, config, layer, part, out / 2 if "mlp_before" in config.mlps else out, seen)


def _read(p: Sites, config: ModelConfig, name: str, x: Tensor) -> Tensor:
    """What a sublayer reads."""
    return normed(p, name, config.norm, x) if config.norm_place in ("pre", "sandwich") else x


def _after(p: Sites, config: ModelConfig, name: str, x: Tensor) -> Tensor:
    """The stream after a sublayer has been added."""
    if isinstance(config.block, NGPT):
        return normed(p, name, BARE, x * (1 - torch.sigmoid(p[f"{name}.weight"])))
    return normed(p, name, config.norm, x) if config.norm_place in ("post", "output_post") else x


def _written(p: Sites, config: ModelConfig, layer: int, part: str, out: Tensor, seen: Sites) -> Tensor:
    """What a sublayer adds."""
    if isinstance(config.block, NGPT):
        name = f"blocks.{layer}.{ {'attn': 'ln1', 'mlp': 'ln2'}[part] }"
        alpha = torch.sigmoid(p[f"{name}.weight"])
        out = normed(p, f"{name}_post", BARE, out) * alpha / (1 - alpha)
    elif config.norm_place in ("sandwich", "output", "output_post"):
        out = normed(p, f"blocks.{layer}.{ {'attn': 'ln1', 'mlp': 'ln2'}[part] }_post", config.norm, out)
    seen[f"blocks.{layer}.hook_{part}_out"] = out * config.residual_scale
    return out * config.residual_scale


def normed(p: Sites, name: str, norm: object, x: Tensor) -> Tensor:
    """Every row of `x` normed by itself, with the parameters called `name`."""
    return torch.stack([_normalised(p, name, norm, row) for row in x])


def _normalised(p: Sites, name: str, norm: object, row: Tensor) -> Tensor:
    if isinstance(norm, LayerNorm):
        row = row - row.sum() / len(row)
        row = row / math.sqrt(row @ row / len(row) + norm.eps)
        row = row if norm.trained == "nothing" else row * p[f"{name}.weight"]
        return row + p[f"{name}.bias"] if norm.trained == "gamma and beta" else row
    if isinstance(norm, RMSNorm):
        row = row / math.sqrt(row @ row / len(row) + norm.eps)
        return row * (p[f"{name}.weight"] + norm.unit_offset) if norm.trained == "gamma" else row
    return row


def _dense(p: Sites, name: str, x: Tensor) -> Tensor:
    return x @ p[f"{name}.weight"].T + p.get(f"{name}.bias", torch.zeros(()))


ACTIVATIONS = {
    "gelu": lambda t: t * 0.5 * (1 + torch.erf(t / math.sqrt(2))),
    "gelu_new": lambda t: t * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (t + 0.044715 * t**3))),
    "quick_gelu": lambda t: t / (1 + torch.exp(-1.702 * t)),
    "relu": lambda t: torch.where(t > 0, t, 0.0),
    "silu": lambda t: t / (1 + torch.exp(-t)),
}


def _mlp(p: Sites, config: ModelConfig, name: str, x: Tensor, seen: Sites) -> Tensor:
    assert config.mlp is not None and not isinstance(config.mlp, MoE)
    pre, m, act = _dense(p, f"{name}.into", x), config.mlp.d_mlp, ACTIVATIONS[config.mlp.act]
    post = act(pre[:, :m]) * pre[:, m:] if config.mlp.gated else act(pre)
    seen[f"{name}.hook_post"] = post
    return _dense(p, f"{name}.out", post)


def _experts(p: Sites, config: ModelConfig, name: str, x: Tensor, seen: Sites) -> Tensor:
    """Token by token, expert by expert."""
    moe = config.mlp
    assert isinstance(moe, MoE)
    logits = _dense(p, f"{name}.router", x)
    weights, outs = torch.zeros_like(logits), torch.zeros(*logits.shape, config.d_model).to(x)
    correction = p[f"{name}.correction"].tolist() if moe.router.correction else [0.0] * moe.n_experts
    for i, row in enumerate(logits.tolist()):
        chosen, shares = _routed(moe, row, correction)
        for e, share in zip(chosen, shares, strict=True):
            weights[i, e] = share
            read = x[i] * share if moe.router.weighs == "input" else x[i]
            outs[i, e] = slow_expert(p, name, moe, e, read) * (1.0 if moe.router.weighs == "input" else share)
    seen[f"{name}.hook_router_logits"], seen[f"{name}.hook_expert_weights"] = logits, weights
    seen[f"{name}.hook_expert_out"] = outs
    if not moe.shared:
        return outs.sum(1)
    pre = _dense(p, f"{name}.shared.into", x)
    post = ACTIVATIONS[moe.act](pre[:, : moe.shared]) * pre[:, moe.shared :]
    seen[f"{name}.shared.hook_post"] = post
    seen[f"{name}.hook_shared_out"] = _dense(p, f"{name}.shared.out", post)
    if moe.shared_gate:
        weight = seen[f"{name}.hook_shared_weight"] = _dense(p, f"{name}.shared_gate", x).sigmoid()
        seen[f"{name}.hook_shared_out"] *= weight
    return outs.sum(1) + seen[f"{name}.hook_shared_out"]


def _routed(moe: MoE, row: list[float], correction: list[float]) -> tuple[list[int], list[float]]:
    """The experts that one token's logits choose, and their weights."""
    rule, experts = moe.router, range(moe.n_experts)
    total = sum(map(math.exp, row))
    scores = [1 / (1 + math.exp(-x)) if rule.scores == "sigmoid" else math.exp(x) / total for x in row]
    rank = [score + more for score, more in zip(scores, correction, strict=True)]
    size = moe.n_experts // rule.groups

    def of_group(g: int) -> float:
        return sum(sorted(rank[g * size : (g + 1) * size])[-rule.best :])

    groups = sorted(range(rule.groups), key=of_group)[-rule.top_groups :]
    chosen = sorted((e for e in experts if e // size in groups), key=lambda e: -rank[e])[: moe.top_k]
    whole = sum(scores[e] for e in chosen) if moe.renormalise else 1.0
    return chosen, [rule.factor * scores[e] / whole for e in chosen]


def slow_expert(p: Sites, name: str, moe: MoE, e: int, x: Tensor) -> Tensor:
    """One expert's output for one token `[d]`, unweighted."""
    pre = p[f"{name}.into"][e] @ x
    pre = pre + p[f"{name}.into_bias"][e] if moe.bias else pre
    gate, linear = pre[: moe.d_mlp], pre[moe.d_mlp :]
    if moe.clamp is not None:
        gate, linear = gate.clamp(max=moe.clamp), linear.clamp(-moe.clamp, moe.clamp)
    out = p[f"{name}.out"][e] @ (ACTIVATIONS[moe.act](gate) * (linear + moe.linear_offset))
    return out + p[f"{name}.out_bias"][e] if moe.bias else out


def _attention(p: Sites, config: ModelConfig, layer: int, x: Tensor, seen: Sites) -> Tensor:
    name, e = f"blocks.{layer}.attn", config.head_width
    widths = [n * e for n in (config.n_heads, config.kv_heads, config.kv_heads)]
    parts = dict(zip("qkv", _dense(p, f"{name}.qkv", x).split(widths, 1), strict=True))
    heads = {part: list(value.split(e, 1)) for part, value in parts.items()}
    for part in "qk":
        norm = f"{name}.{part}_norm.norm"
        if config.qk_norm == "head":
            heads[part] = [normed(p, norm, config.norm, head) for head in heads[part]]
        elif config.qk_norm == "each":
            plain = replace(config.norm, trained="nothing")  # type: ignore[type-var]
            each = zip(heads[part], p[f"{norm}.weight"].split(e), strict=True)
            heads[part] = [normed(p, norm, plain, head) * gamma for head, gamma in each]
        elif config.qk_norm == "width":
            heads[part] = list(normed(p, norm, config.norm, parts[part]).split(e, 1))
        heads[part] = [rotated(config, layer, head) for head in heads[part]]
    return _mixed(p, config, layer, heads, seen, "attn")


def _cross_attention(
    p: Sites, config: ModelConfig, layer: int, x: Tensor, memory: Tensor, seen: Sites
) -> Tensor:
    name, e = f"blocks.{layer}.cross_attn", config.head_width
    keys, values = _dense(p, f"{name}.kv", memory).split(config.kv_heads * e, 1)
    heads = {"q": _dense(p, f"{name}.q", x).split(e, 1), "k": keys.split(e, 1), "v": values.split(e, 1)}
    return _mixed(p, config, layer, {k: list(v) for k, v in heads.items()}, seen, "cross_attn")


def _mixed(
    p: Sites, config: ModelConfig, layer: int, heads: dict[str, list[Tensor]], seen: Sites, part: str
) -> Tensor:
    """Query by query: exp(score) over the sum of all exp(score), a sink's included, times the values."""
    name, n, s = f"blocks.{layer}.{part}", len(heads["q"][0]), len(heads["k"][0])
    scores = torch.full((config.n_heads, n, s), -torch.inf).to(heads["q"][0])
    patterns, zs = torch.zeros_like(scores), torch.zeros(n, config.n_heads, config.head_width).to(scores)
    for h in range(config.n_heads):
        g = h * config.kv_heads // config.n_heads
        sink = torch.exp(p[f"{name}.sinks"][h]) if config.sinks else 0.0
        for i in range(n):
            visible = [j for j in range(s) if part == "cross_attn" or _sees(config, layer, i, j)]
            for j in visible:
                score = heads["q"][h][i] @ heads["k"][g][j] * slow_scale(config, layer)
                if config.attn_softcap is not None:
                    score = config.attn_softcap * torch.tanh(score / config.attn_softcap)
                scores[h, i, j] = score + (0 if part == "cross_attn" else score_bias(p, config, h, i, j))
            total = sum(torch.exp(scores[h, i, j]) for j in visible) + sink
            for j in visible:
                patterns[h, i, j] = torch.exp(scores[h, i, j]) / total
                zs[i, h] += patterns[h, i, j] * heads["v"][g][j]
    seen |= {f"{name}.hook_attn_scores": scores, f"{name}.hook_pattern": patterns, f"{name}.hook_z": zs}
    return _dense(p, f"{name}.out", zs.flatten(1))


def _sees(config: ModelConfig, layer: int, i: int, j: int) -> bool:
    local = config.local_layers is None or layer in config.local_layers
    near = config.window is None or not local or abs(i - j) < config.window
    return near and (j <= i or not config.causal)


def slow_scale(config: ModelConfig, layer: int) -> float:
    """What q . k is multiplied by."""
    scale = 1 / math.sqrt(config.head_width) if config.attn_scale is None else config.attn_scale
    return scale / (layer + 1) if config.scale_by_layer else scale
