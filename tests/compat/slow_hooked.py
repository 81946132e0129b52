"""A HookedTransformer written out slowly from TransformerLens' definitions: one query and one head at a time, float64.

Independent of `interp`: names and shapes of weights stand here a second time.
"""

import math

import torch
from torch import Tensor

Fields = dict[str, object]
BASE: Fields = {
    "n_layers": 2, "d_model": 24, "n_ctx": 16, "d_head": 10, "n_heads": 4, "d_vocab": 31, "d_mlp": 20,
    "act_fn": "gelu_new",
}  # fmt: skip
RMS: Fields = BASE | {
    "normalization_type": "RMS", "positional_embedding_type": "rotary", "act_fn": "silu", "gated_mlp": True,
}  # fmt: skip
LOCAL: Fields = {"use_local_attn": True, "window_size": 3, "attn_types": ["local", "global"]}
CASES: dict[str, Fields] = {
    "layer-norm": BASE,
    "folded": BASE | {"normalization_type": "LNPre", "act_fn": "gelu"},
    "no-norm-relu": BASE | {"normalization_type": None, "act_fn": "relu", "attn_scale": 7.3},
    "gelu-fast": BASE | {"act_fn": "gelu_fast", "use_attn_scale": False},
    "rms-gated": RMS,
    "rms-folded": RMS | {"normalization_type": "RMSPre", "d_mlp": None},
    "grouped": RMS | {"n_key_value_heads": 2},
    "grouped-alone": RMS | {"n_key_value_heads": 4},
    "partial-pairs-parallel": BASE
    | {"positional_embedding_type": "rotary", "rotary_dim": 4, "rotary_adjacent_pairs": True}
    | {"parallel_attn_mlp": True},
    "partial-halves": BASE | {"positional_embedding_type": "rotary", "rotary_dim": 6, "rotary_base": 50},
    "alibi": BASE | {"positional_embedding_type": "alibi", "post_embedding_ln": True},
    "local": BASE | LOCAL,
    "local-rotary": RMS
    | LOCAL
    | {"rotary_base_local": 100, "rotary_base": 1000, "rotary_scaling_factor": 8.0},
    "attention-only": BASE | {"attn_only": True, "act_fn": None, "d_mlp": None},
    "classifier": BASE | {"attn_only": True, "act_fn": None, "d_mlp": None, "d_vocab_out": 5},
    "soft-caps": RMS | {"attn_scores_soft_cap": 2.0, "output_logits_soft_cap": 3.0},
    "sandwich": RMS | {"use_normalization_before_and_after": True, "use_qk_norm": True},
    "scale-by-layer": BASE | {"scale_attn_by_inverse_layer_idx": True},
    "bidirectional": BASE | {"attention_dir": "bidirectional"},
    "gated-layer-norm": BASE | {"gated_mlp": True},
    "sinks": RMS | {"use_attention_sinks": True},
    "output-normed": RMS | {"original_architecture": "Olmo2ForCausalLM", "d_head": 6, "n_key_value_heads": 2},
    "wide-qk-norm": RMS | {"original_architecture": "OlmoeForCausalLM", "d_head": 6},
    "experts": RMS | {"num_experts": 4, "experts_per_token": 2, "norm_topk_prob": True},
    "experts-of-all": RMS | {"num_experts": 4, "experts_per_token": 2, "norm_topk_prob": False},
}


def random_state(fields: Fields, dtype: torch.dtype = torch.float64, seed: int = 0) -> dict[str, Tensor]:
    """Every weight of a HookedTransformer of these fields, random; buffers included."""
    f = Get(fields)
    d, e, h, m, v = f.d_model, f.d_head, f.n_heads, f.d_mlp or 4 * f.d_model, f.d_vocab
    out = v if f.d_vocab_out == -1 else f.d_vocab_out
    shapes = {"embed.W_E": (v, d), "unembed.W_U": (d, out), "unembed.b_U": (out,)}
    if f.positional_embedding_type != "rotary":
        shapes["pos_embed.W_pos"] = (f.n_ctx, d)
    parts = {"LN": "wb", "RMS": "w"}.get(f.normalization_type, "")
    shapes |= {f"ln_final.{p}": (d,) for p in parts}
    if f.post_embedding_ln:
        shapes |= {"embed.ln.w": (d,), "embed.ln.b": (d,)}
    g, mark = (h, "") if f.n_key_value_heads is None else (f.n_key_value_heads, "_")
    for layer in range(f.n_layers):
        attn = {"W_Q": (h, d, e), "b_Q": (h, e), "W_O": (h, e, d), "b_O": (d,)}
        attn |= {f"{mark}{w}_{x}": s for x in "KV" for w, s in (("W", (g, d, e)), ("b", (g, e)))}
        if f.use_attention_sinks:
            attn["sinks"] = (h,)
        if f.use_qk_norm:
            attn |= {"q_norm.w": (e,), "k_norm.w": (e,)}
        elif f.original_architecture:
            attn |= {"q_norm.w": (h * e,), "k_norm.w": (g * e,)}
        block = {f"attn.{name}": s for name, s in attn.items()}
        block |= {f"ln1.{p}": (d,) for p in parts}
        if f.use_normalization_before_and_after:
            block |= {"ln1_post.w": (d,), "ln2_post.w": (d,)}
        if f.num_experts:
            block["mlp.W_gate.weight"] = (f.num_experts, d)
            for x in range(f.num_experts):
                block |= {f"mlp.experts.{x}.{n}.weight": (m, d) for n in ("W_in", "W_gate")}
                block[f"mlp.experts.{x}.W_out.weight"] = (d, m)
        elif not f.attn_only:
            block |= {"mlp.W_in": (d, m), "mlp.W_out": (m, d), "mlp.b_in": (m,), "mlp.b_out": (d,)}
            block |= {"mlp.W_gate": (d, m)} if f.gated_mlp else {}
        if not f.attn_only:
            block |= {f"ln2.{p}": (d,) for p in parts}
        shapes |= {f"blocks.{layer}.{name}": s for name, s in block.items()}
    generator = torch.Generator().manual_seed(seed)
    state = {n: torch.randn(s, generator=generator, dtype=torch.float64) / 3 for n, s in shapes.items()}
    state = {n: w + 1 if n.endswith(".w") else w for n, w in state.items()}
    for layer in range(f.n_layers):
        state[f"blocks.{layer}.attn.mask"] = torch.zeros(0, 0)
        state[f"blocks.{layer}.attn.IGNORE"] = torch.tensor(-torch.inf)
    return {n: w.to(dtype) for n, w in state.items()}


DEFAULTS: Fields = {
    "d_mlp": None, "positional_embedding_type": "standard", "normalization_type": "LN", "eps": 1e-5,
    "n_key_value_heads": None, "use_attn_scale": True, "attn_scale": -1.0, "attention_dir": "causal",
    "attn_scores_soft_cap": -1.0, "output_logits_soft_cap": -1.0, "rotary_base": 10_000, "rotary_dim": None,
    "rotary_base_local": None, "rotary_scaling_factor": 1.0, "d_vocab_out": -1,
}  # fmt: skip
"""Those of a HookedTransformerConfig; a field that is not here is off."""


class Get:
    """Fields as attributes."""

    def __init__(self, fields: Fields) -> None:
        self.fields = DEFAULTS | fields

    def __getattr__(self, name: str):  # type: ignore[no-untyped-def]
        return self.fields.get(name)


def slow_logits(fields: Fields, state: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Logits `[pos, vocab]` of one row of tokens."""
    f, w = Get(fields), {name.replace("._", "."): x.double() for name, x in state.items()}
    x = w["embed.W_E"][tokens]
    if f.post_embedding_ln:
        x = _normed(x, w, "embed.ln", "LN", f.eps)
    if f.positional_embedding_type == "standard":
        x = x + w["pos_embed.W_pos"][: len(tokens)]
    after = f.original_architecture == "Olmo2ForCausalLM"
    for layer in range(f.n_layers):

        def sublayer(resid: Tensor, norm: str, part, at: str = f"blocks.{layer}."):  # type: ignore[no-untyped-def]
            kind = f.normalization_type
            read = resid if after else _normed(resid, w, at + norm, kind, f.eps)
            out = part(read)
            if f.use_normalization_before_and_after:
                out = _normed(out, w, f"{at}{norm}_post", "RMS", f.eps)
            return _normed(out, w, at + norm, kind, f.eps) if after else out

        before = x
        x = x + sublayer(x, "ln1", lambda y, layer=layer: _attention(y, w, layer, f))
        if not f.attn_only:
            read = before if f.parallel_attn_mlp else x
            x = x + sublayer(read, "ln2", lambda y, layer=layer: _mlp(y, w, f"blocks.{layer}.mlp.", f))
    logits = _normed(x, w, "ln_final", f.normalization_type, f.eps) @ w["unembed.W_U"] + w["unembed.b_U"]
    cap = f.output_logits_soft_cap
    return cap * torch.tanh(logits / cap) if cap > 0 else logits


def _normed(x: Tensor, w: dict[str, Tensor], name: str, kind: str | None, eps: float) -> Tensor:
    if kind is None:
        return x
    if kind.startswith("LN"):
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    if not kind.endswith("Pre"):
        x = x * w[f"{name}.w"]
    return x + w[f"{name}.b"] if kind == "LN" else x


def _act(x: Tensor, name: str) -> Tensor:
    if name == "gelu":
        return x * (1 + torch.erf(x / math.sqrt(2))) / 2
    if name.startswith("gelu"):
        return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x.clamp_min(0) if name == "relu" else x / (1 + torch.exp(-x))


def _mlp(x: Tensor, w: dict[str, Tensor], at: str, f: Get) -> Tensor:
    if f.num_experts:
        return torch.stack([_experts(row, w, at, f) for row in x])
    if not f.gated_mlp:
        return _act(x @ w[f"{at}W_in"] + w[f"{at}b_in"], f.act_fn) @ w[f"{at}W_out"] + w[f"{at}b_out"]
    post = _act(x @ w[f"{at}W_gate"], f.act_fn) * (x @ w[f"{at}W_in"]) + w[f"{at}b_in"]
    return post @ w[f"{at}W_out"] + w[f"{at}b_out"]


def _experts(x: Tensor, w: dict[str, Tensor], at: str, f: Get) -> Tensor:
    shares = torch.softmax(w[f"{at}W_gate.weight"] @ x, 0)
    chosen = shares.argsort(descending=True)[: f.experts_per_token].tolist()
    total = sum(shares[i] for i in chosen) if f.norm_topk_prob else 1
    out = torch.zeros_like(x)
    for i in chosen:
        w_in, w_gate, w_out = (w[f"{at}experts.{i}.{n}.weight"] for n in ("W_in", "W_gate", "W_out"))
        out = out + shares[i] / total * (w_out @ (_act(w_gate @ x, f.act_fn) * (w_in @ x)))
    return out


def _attention(x: Tensor, w: dict[str, Tensor], layer: int, f: Get) -> Tensor:
    at, n = f"blocks.{layer}.attn.", len(x)
    local = bool(f.use_local_attn) and f.attn_types[layer] == "local"
    q, k, v = (torch.einsum("pd,hde->phe", x, w[f"{at}W_{i}"]) + w[f"{at}b_{i}"] for i in "QKV")
    if f.use_qk_norm:
        q, k = (_normed(y, w, f"{at}{i}_norm", "RMS", f.eps) for i, y in (("q", q), ("k", k)))
    elif f.original_architecture:
        q, k = (
            _normed(y.flatten(1), w, f"{at}{i}_norm", "RMS", f.eps).view_as(y)
            for i, y in (("q", q), ("k", k))
        )
    if f.positional_embedding_type == "rotary":
        q, k = _rotated(q, f, local), _rotated(k, f, local)
    divisor = f.attn_scale if f.attn_scale > 0 else math.sqrt(f.d_head)
    divisor = divisor if f.use_attn_scale else 1.0
    divisor *= layer + 1 if f.scale_attn_by_inverse_layer_idx else 1
    out = w[f"{at}b_O"].repeat(n, 1)
    for h in range(f.n_heads):
        shared = h // (f.n_heads // k.shape[1])
        for i in range(n):
            keys = [j for j in range(n) if j <= i or f.attention_dir == "bidirectional"]
            keys = [j for j in keys if not local or j > i - f.window_size]
            scores = torch.stack([q[i, h] @ k[j, shared] for j in keys]) / divisor
            cap = f.attn_scores_soft_cap
            scores = cap * torch.tanh(scores / cap) if cap > 0 else scores
            if f.positional_embedding_type == "alibi":
                scores = scores - torch.tensor([(i - j) * 2 ** (-8 * (h + 1) / f.n_heads) for j in keys])
            if f.use_attention_sinks:
                scores = torch.cat((scores, w[f"{at}sinks"][h : h + 1]))
            pattern = torch.softmax(scores, 0)
            z = sum(p * v[j, shared] for p, j in zip(pattern, keys, strict=False))
            out[i] += z @ w[f"{at}W_O"][h]
    return out


def _rotated(x: Tensor, f: Get, local: bool) -> Tensor:
    dim, base, stretch = f.rotary_dim or f.d_head, f.rotary_base, f.rotary_scaling_factor
    if local:
        base, stretch = f.rotary_base_local or base, 1.0
    out = x.clone()
    for position in range(len(x)):
        for i in range(dim // 2):
            a, b = (2 * i, 2 * i + 1) if f.rotary_adjacent_pairs else (i, i + dim // 2)
            angle = position / (base ** (2 * i / dim) * stretch)
            cos, sin = math.cos(angle), math.sin(angle)
            out[position, :, a] = x[position, :, a] * cos - x[position, :, b] * sin
            out[position, :, b] = x[position, :, b] * cos + x[position, :, a] * sin
    return out
