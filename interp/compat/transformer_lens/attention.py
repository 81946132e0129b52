"""Attention as a module with TransformerLens' parameters and hook points; the numbers are the native ones."""

import math
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from interp.compat.hooked_config import WIDE_QK_NORM
from interp.compat.transformer_lens.cache import CachedPast, Device, TransformerLensKeyValueCacheEntry
from interp.compat.transformer_lens.config import HookedTransformerConfig
from interp.compat.transformer_lens.engine import Setting
from interp.compat.transformer_lens.factored_matrix import FactoredMatrix
from interp.compat.transformer_lens.hook_points import HookPoint
from interp.compat.transformer_lens.layers import Config, RMSNorm
from interp.compat.transformer_lens.native import (
    LensAttention,
    LensBias,
    alibi_multipliers,
    blueprint,
    filled,
    projected,
)
from interp.compat.transformer_lens.rotary import RotaryTables
from interp.model.attend import hidden_scores
from interp.model.attention import Pass, View
from interp.model.config import ModelConfig
from interp.model.mask import Layout, Mask, attention_mask
from interp.model.tap import Scope

NO_STREAM = (None, None)
"""What a part that runs by itself has for split inputs."""


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
        elif c.original_architecture in WIDE_QK_NORM:
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
        return alibi_multipliers(n_heads, device)

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
        entry = past_kv_cache_entry
        shared = self.shared_pass(
            query_input, entry, attention_mask, (additive_attention_mask, position_bias)
        )
        inputs = (query_input, key_input, value_input)
        return self.computed(
            lambda native, scope: native(inputs, NO_STREAM, shared, scope), query_input, Setting(entry)
        )

    def calculate_qkv_matrices(
        self, query_input: Tensor, key_input: Tensor, value_input: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values `[b p h e]`, normed where the config says so."""
        inputs = (query_input, key_input, value_input)
        found: list[Tensor] = []

        def project(native: LensAttention, scope: Scope) -> Tensor:
            found.extend(native.heads_of(inputs, scope))
            return found[0]

        self.computed(project, query_input)
        q, k, v = found
        return q, k, v

    def shared_pass(
        self,
        x: Tensor,
        entry: TransformerLensKeyValueCacheEntry | None,
        real: Tensor | None,
        added: tuple[Tensor | None, ...] = (),
    ) -> Pass:
        """What blocks share in a pass of `x` alone, after what a cache entry holds."""
        n, past = x.shape[1], 0 if entry is None else entry.past_keys.shape[1]
        layout = Layout(None if real is None else real.to(x.device).bool())
        places = layout.positions(n, past, x.device)
        mask, bias = self._mask(n, past, layout, x.device), [part for part in added if part is not None]
        if self.cfg.positional_embedding_type == "alibi":
            every = layout.positions(past + n, 0, x.device)
            bias.append(LensBias(self.cfg.n_heads)(places, every, x.dtype))
        if bias:
            rows = 1 if mask.allowed is None else len(mask.allowed)
            summed = torch.stack(torch.broadcast_tensors(*(part.to(x) for part in bias))).sum(0)
            mask = mask.with_bias(summed.expand(max(rows, len(summed)), -1, n, past + n))
        rotary = self.cfg.positional_embedding_type == "rotary"
        view = View(mask, self.rotation_for(places, past + n) if rotary else None)
        cache = None if entry is None else CachedPast(lambda layer: entry)
        return Pass(view, view, cache, layout=layout, positions=places)

    def _mask(self, n: int, past: int, layout: Layout, device: torch.device) -> Mask:
        """Who sees whom."""
        local = self.attn_type == "local" and self.cfg.attention_dir == "causal"
        window = self.cfg.window_size if local else None
        config = replace(blueprint(self.cfg).config, window=window, local_layers=None, local_position=None)
        return attention_mask(config, n, past, layout, device, local=local)

    def _own_path(self) -> str:
        return "blocks.0.attn"

    def _native(self, device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, ModelConfig]:
        grouped = self._parameters.get("_W_K")  # by the class; the config may say otherwise
        n_kv_heads = len(self.W_Q if grouped is None else grouped)
        config = replace(blueprint(self.cfg).config, n_kv_heads=n_kv_heads)
        with torch.device("meta"):
            native = LensAttention(config, self.layer_id or 0, self.cfg)
        return filled(native, self.cfg, device, dtype), config

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
        layout = Layout(None if attention_mask is None else attention_mask.to(attn_scores.device).bool())
        return hidden_scores(attn_scores.clone(), self._mask(n, total - n, layout, attn_scores.device))

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


def _repeated(name: str) -> property:
    """The grouped parameter `_name` once per query head; assigning sets the grouped one."""

    def get(self: GroupedQueryAttention) -> Tensor:
        return getattr(self, f"_{name}").repeat_interleave(self.repeat_kv_heads, 0)

    def put(self: GroupedQueryAttention, value: Any) -> None:
        setattr(self, f"_{name}", value)

    return property(get, put, doc=f"`_{name}`, once for each query head.")


for _name in ("W_K", "W_V", "b_K", "b_V"):
    setattr(GroupedQueryAttention, _name, _repeated(_name))


def simple_attn_linear(input: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """`[b p h e]` from one input for all heads, `[b p d]`, and `w` `[h d e]`, `b` `[h e]`."""
    return projected(input, w.mT, b)


def complex_attn_linear(input: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """The same from one input for each head, `[b p h d]`."""
    return projected(input, w.mT, b)
