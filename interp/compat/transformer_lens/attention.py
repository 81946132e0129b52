"""Attention as a module with TransformerLens' parameters and hook points; the kernel is the native one."""

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from torch import Tensor, nn

from interp.compat.transformer_lens.cache import Device, TransformerLensKeyValueCacheEntry
from interp.compat.transformer_lens.config import HookedTransformerConfig
from interp.compat.transformer_lens.factored_matrix import FactoredMatrix
from interp.compat.transformer_lens.hook_points import HookPoint
from interp.compat.transformer_lens.hook_tap import is_active, scope_of
from interp.compat.transformer_lens.layers import Config, RMSNorm
from interp.compat.transformer_lens.rotary import RotaryTables
from interp.model.attention import Mask, attend

WIDE_NORM = ("OlmoeForCausalLM", "Olmo2ForCausalLM", "Olmo3ForCausalLM")
"""Architectures that norm all heads of queries and keys as one vector."""


class Attention(RotaryTables):
    """One attention layer: `W_Q`, `W_K`, `W_V` `[h d e]`, `W_O` `[h e d]` and their biases."""

    W_K: Tensor
    W_V: Tensor
    b_K: Tensor
    b_V: Tensor
    hook_q: HookPoint
    hook_k: HookPoint
    hook_v: HookPoint
    hook_z: HookPoint
    hook_attn_scores: HookPoint
    hook_pattern: HookPoint
    hook_result: HookPoint
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    mask: Tensor

    def __init__(self, cfg: Config, attn_type: str = "global", layer_id: int | None = None) -> None:
        super().__init__()
        self.cfg = cfg = HookedTransformerConfig.unwrap(cfg)
        if attn_type not in ("global", "local"):
            raise ValueError(f"Invalid attention type: {attn_type}")
        if attn_type == "local" and not isinstance(cfg.window_size, int):
            raise ValueError("Window size must be an integer for local attention")
        if cfg.scale_attn_by_inverse_layer_idx and layer_id is None:
            raise ValueError("Layer ID must be provided to scale attention scores")
        self.attn_type, self.layer_id = attn_type, layer_id
        self.attn_scale = float(cfg.attn_scale) if cfg.use_attn_scale else 1.0
        if cfg.scale_attn_by_inverse_layer_idx:
            self.attn_scale *= cast(int, layer_id) + 1
        self._build_queries()
        self._build_norms()
        self.register_buffer("mask", torch.empty((0, 0), dtype=torch.bool))
        self.register_buffer("IGNORE", torch.tensor(-torch.inf))
        if cfg.use_attention_sinks:
            self.sinks = nn.Parameter(torch.zeros(cfg.n_heads, dtype=cfg.dtype))
        for name in ("k", "q", "v", "z", "attn_scores", "pattern", "result"):
            setattr(self, f"hook_{name}", HookPoint())
        if cfg.positional_embedding_type == "shortformer":
            self.hook_attn_input = HookPoint()
        elif cfg.positional_embedding_type == "rotary":
            self.hook_rot_k, self.hook_rot_q = HookPoint(), HookPoint()
            self._build_tables()
        self._build_keys()

    def _build_queries(self) -> None:
        c = self.cfg
        self.W_Q = nn.Parameter(torch.empty(c.n_heads, c.d_model, c.d_head, dtype=c.dtype))
        self.W_O = nn.Parameter(torch.empty(c.n_heads, c.d_head, c.d_model, dtype=c.dtype))
        self.b_Q = nn.Parameter(torch.zeros(c.n_heads, c.d_head, dtype=c.dtype))
        self.b_O = nn.Parameter(torch.zeros(c.d_model, dtype=c.dtype))

    def _build_keys(self, n_heads: int | None = None, prefix: str = "") -> None:
        c = self.cfg
        n_heads = c.n_heads if n_heads is None else n_heads
        for name in ("W_K", "W_V"):
            weight = torch.empty(n_heads, c.d_model, c.d_head, dtype=c.dtype)
            self.register_parameter(prefix + name, nn.Parameter(weight))
        for name in ("b_K", "b_V"):
            self.register_parameter(
                prefix + name, nn.Parameter(torch.zeros(n_heads, c.d_head, dtype=c.dtype))
            )

    def _build_norms(self) -> None:
        c, widths = self.cfg, None
        if c.use_qk_norm:
            widths = (c.d_head, c.d_head)
        elif c.original_architecture in WIDE_NORM:
            widths = (c.d_model, c.d_model if c.n_key_value_heads is None else c.d_head * c.n_key_value_heads)
        norms = [None if widths is None else RMSNorm(c, widths[i]) for i in range(2)]
        self.q_norm, self.k_norm = norms

    @staticmethod
    def create_alibi_slope(n_ctx: int, device: Device = None) -> Tensor:
        """ALiBi's distances min(k - q, 0), `[q k]` (Press et al. 2022)."""
        place = torch.arange(n_ctx, device=device, dtype=torch.get_default_dtype())
        return (place - place[:, None]).clamp_max(0)

    @staticmethod
    def create_alibi_multipliers(n_heads: int, device: Device = None) -> Tensor:
        """What each head multiplies distances with: 2^(-8 i / h) for i = 1 ... h."""
        return 2.0 ** (-8 / n_heads * torch.arange(1, n_heads + 1, device=device))

    @staticmethod
    def create_alibi_bias(n_heads: int, n_ctx: int, device: Device = None) -> Tensor:
        """What ALiBi adds to the scores, `[h q k]`."""
        slope, multipliers = Attention.create_alibi_slope, Attention.create_alibi_multipliers
        return slope(n_ctx, device) * multipliers(n_heads, device)[:, None, None]

    @property
    def OV(self) -> FactoredMatrix:
        """W_V W_O of every head, factored."""
        return FactoredMatrix(self.W_V, self.W_O)

    @property
    def QK(self) -> FactoredMatrix:
        """W_Q W_K^T of every head, factored."""
        return FactoredMatrix(self.W_Q, self.W_K.transpose(-2, -1))

    def forward(
        self,
        query_input: Tensor,
        key_input: Tensor,
        value_input: Tensor,
        past_kv_cache_entry: TransformerLensKeyValueCacheEntry | None = None,
        additive_attention_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_bias: Tensor | None = None,
    ) -> Tensor:
        """The layer's output `[b p d]` from normed inputs `[b p d]`, or `[b p h d]` with one for each head.

        attention_mask: 1 at real tokens, those of the cache included. The other masks are added to the scores.
        """
        q, k, v = self.calculate_qkv_matrices(query_input, key_input, value_input)
        if self.cfg.clip_qkv is not None:
            q, k, v = (x.clamp(-self.cfg.clip_qkv, self.cfg.clip_qkv) for x in (q, k, v))
        past = 0 if past_kv_cache_entry is None else past_kv_cache_entry.past_keys.shape[1]
        if (
            self.cfg.use_dynamic_ntk_rope and past_kv_cache_entry is not None
        ):  # the rotation of what is kept changes
            k, v = past_kv_cache_entry.append(k, v)
            past_kv_cache_entry = None
        if self.cfg.positional_embedding_type == "rotary":
            q = self.hook_rot_q(self.apply_rotary(q, past, attention_mask))
            k = self.hook_rot_k(self.apply_rotary(k, past + q.shape[1] - k.shape[1], attention_mask))
        if self.cfg.use_logn_attn and not self.training:
            q = self._apply_logn_scaling(q, past)
        if past_kv_cache_entry is not None:
            k, v = past_kv_cache_entry.append(k, v)
        mask = self._mask(q.shape[1], k.shape[1], attention_mask, q, (additive_attention_mask, position_bias))
        cap = self.cfg.attn_scores_soft_cap
        scope = scope_of({f"attn.{n}": getattr(self, n) for n in ("hook_attn_scores", "hook_pattern")})
        z = attend(
            q, k, v, mask, 1 / self.attn_scale, scope, softcap=cap if cap > 0 else None,
            sinks=self.sinks if self.cfg.use_attention_sinks else None,
        )  # fmt: skip
        return self._written(self.hook_z(z))

    def calculate_qkv_matrices(
        self, query_input: Tensor, key_input: Tensor, value_input: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values `[b p h e]`, normed where the config says so."""
        (w_k, b_k), (w_v, b_v) = self._key_weights()
        q = self.hook_q(projected(query_input, self.W_Q, self.b_Q))
        k = self.hook_k(projected(key_input, w_k, b_k))
        v = self.hook_v(projected(value_input, w_v, b_v))
        if self.q_norm is None or self.k_norm is None:
            return q, k, v
        each = self.cfg.use_qk_norm
        q, k = (_normed(x, norm, each) for x, norm in ((q, self.q_norm), (k, self.k_norm)))
        return q, k, v

    def _key_weights(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        return (self.W_K, self.b_K), (self.W_V, self.b_V)

    def _apply_logn_scaling(self, q: Tensor, kv_cache_pos_offset: int) -> Tensor:
        """Queries at position i (from 1) beyond the training length T times log_T(i), so that attention stays sharp."""
        length = self.cfg.train_seq_length or self.cfg.n_ctx
        place = torch.arange(1, q.shape[1] + 1, device=q.device, dtype=torch.float32) + kv_cache_pos_offset
        scale = (place.log() / math.log(length)).clamp_min(1).to(q.dtype)
        return q * scale[:, None, None]

    def apply_causal_mask(
        self, attn_scores: Tensor, past_kv_pos_offset: int = 0, attention_mask: Tensor | None = None
    ) -> Tensor:
        """Scores `[b h q k]`, -inf where a query may not look: ahead, past the layer's window, at padding."""
        n, total = attn_scores.shape[-2:]
        if n + past_kv_pos_offset != total:
            raise ValueError(
                f"{n} queries after {past_kv_pos_offset} positions require as many keys, got {total}"
            )
        _, allowed = self._allowed(n, total, attention_mask, attn_scores.device)
        return attn_scores.masked_fill(~allowed, -torch.inf)

    def _allowed(
        self, n: int, total: int, real: Tensor | None, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """How far each of the last `n` queries is behind each key, and whom it sees `[b 1 q k]`."""
        key, query = (torch.arange(i, total, device=device) for i in (0, total - n))
        distance = query[:, None] - key
        allowed = torch.ones_like(distance, dtype=torch.bool)
        if self.cfg.attention_dir == "causal":
            allowed = distance >= 0
            if self.attn_type == "local":
                allowed = allowed & (distance < cast(int, self.cfg.window_size))
        allowed = allowed[None, None]
        if real is not None:
            allowed = allowed & real.to(device).bool()[:, None, None, :]
        return distance, allowed

    def _mask(
        self, n: int, total: int, real: Tensor | None, like: Tensor, added: tuple[Tensor | None, ...]
    ) -> Mask:
        """Who sees whom, and what is added to the scores."""
        distance, allowed = self._allowed(n, total, real, like.device)
        bias = [part.to(like.dtype) for part in added if part is not None]
        if self.cfg.positional_embedding_type == "alibi":
            slopes = self.create_alibi_multipliers(self.cfg.n_heads, like.device)
            bias.append((-distance.clamp_min(0) * slopes[:, None, None]).to(like.dtype)[None])
        plain = Mask(causal=False, allowed=allowed)
        return plain.with_bias(cast(Tensor, sum(bias)).expand(len(allowed), -1, n, total)) if bias else plain

    def _written(self, z: Tensor) -> Tensor:
        if self.cfg.use_attn_result or is_active(self.hook_result):
            result = self.hook_result(einsum(z, self.W_O, "b p h e, h e d -> b p h d"))
            return result.sum(2) + self.b_O
        return F.linear(z.flatten(2), rearrange(self.W_O, "h e d -> d (h e)"), self.b_O)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **options: Any) -> None:
        """Tables of another length in a state dict are left aside: they follow from the config."""
        own = {f"{prefix}{name}": buffer for name, buffer in self.named_buffers(recurse=False)}
        for name, buffer in own.items():
            if name in state_dict and state_dict[name].shape != buffer.shape:
                state_dict[name] = buffer
        super()._load_from_state_dict(state_dict, prefix, *args, **options)


class GroupedQueryAttention(Attention):
    """Attention with fewer heads of keys and values, stored as `_W_K [g d e]`, ...; `W_K` repeats them `[h d e]`."""

    def _build_keys(self, n_heads: int | None = None, prefix: str = "") -> None:
        assert self.cfg.n_key_value_heads is not None, "n_key_value_heads required for grouped attention"
        self.repeat_kv_heads = self.cfg.n_heads // self.cfg.n_key_value_heads
        super()._build_keys(self.cfg.n_key_value_heads, "_")

    def _key_weights(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        if self.cfg.ungroup_grouped_query_attention:
            return super()._key_weights()
        return (self._W_K, self._b_K), (self._W_V, self._b_V)  # type: ignore[return-value]


def _repeated(name: str) -> property:
    """The grouped parameter `_name` once per query head; assigning sets the grouped one."""

    def get(self: GroupedQueryAttention) -> Tensor:
        return getattr(self, f"_{name}").repeat_interleave(self.repeat_kv_heads, 0)

    def put(self: GroupedQueryAttention, value: Any) -> None:
        setattr(self, f"_{name}", value)

    return property(get, put, doc=f"`_{name}`, once for each query head.")


for _name in ("W_K", "W_V", "b_K", "b_V"):
    setattr(GroupedQueryAttention, _name, _repeated(_name))


def projected(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`[b p h e]` from one input for all heads, `[b p d]`, or one for each, `[b p h d]`."""
    if x.ndim == 4:
        return einsum(x, weight, "b p h d, h d e -> b p h e") + bias
    flat = F.linear(x, rearrange(weight, "h d e -> (h e) d"), bias.flatten())
    return rearrange(flat, "b p (h e) -> b p h e", h=len(weight))


simple_attn_linear = complex_attn_linear = projected
"""TransformerLens' names for the two kinds of input."""


def _normed(x: Tensor, norm: nn.Module, each: bool) -> Tensor:
    """Heads normed each alone, as rows `[(b p h) e]`, or all as one vector."""
    return norm(x.flatten(0, 2) if each else x.flatten(2)).view(x.shape)
