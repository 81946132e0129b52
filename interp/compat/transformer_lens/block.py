"""A block as a module with TransformerLens' parts and hook points, which can run by itself."""

from typing import cast

import torch
from torch import Tensor, nn

from interp.compat.transformer_lens.attention import Attention, GroupedQueryAttention
from interp.compat.transformer_lens.cache import TransformerLensKeyValueCacheEntry
from interp.compat.transformer_lens.changes import Noticing
from interp.compat.transformer_lens.config import HookedTransformerConfig
from interp.compat.transformer_lens.hook_points import HookPoint
from interp.compat.transformer_lens.hook_tap import is_active
from interp.compat.transformer_lens.layers import Config, RMSNorm, norm_of
from interp.compat.transformer_lens.mlps import mlp_of

OUTPUT_NORMED = ("Olmo2ForCausalLM", "Olmo3ForCausalLM")
"""Architectures whose `ln1` and `ln2` norm what a sublayer adds."""


class TransformerBlock(Noticing):
    """Attention and MLP that read the residual stream and add to it."""

    ln1: nn.Module
    ln2: nn.Module

    def __init__(self, cfg: Config, block_index: int) -> None:
        super().__init__()
        self.cfg = cfg = HookedTransformerConfig.unwrap(cfg)
        self.normalization_type = cfg.normalization_type
        self._build_norms()
        kind = "global" if not cfg.use_local_attn else (cfg.attn_types or ())[block_index]
        attention = Attention if cfg.n_key_value_heads is None else GroupedQueryAttention
        self.attn = attention(cfg, kind, block_index)
        if not cfg.attn_only:
            self.mlp = mlp_of(cfg)
        names = ["attn_in", "q_input", "k_input", "v_input", "mlp_in", "attn_out", "mlp_out", "resid_pre"]
        names += ["resid_mid"] * (not cfg.attn_only and not cfg.parallel_attn_mlp) + ["resid_post"]
        for name in names:
            setattr(self, f"hook_{name}", HookPoint())

    def _build_norms(self) -> None:
        cfg, both = self.cfg, self.cfg.use_normalization_before_and_after
        if both and (cfg.normalization_type or "RMS")[:3] != "RMS":
            raise ValueError(
                f"use_normalization_before_and_after requires RMS norms, got {cfg.normalization_type}"
            )
        for name in ["ln1"] if cfg.attn_only else ["ln1", "ln2"]:
            setattr(self, name, norm_of(cfg))
            if both:
                after = nn.Identity() if cfg.normalization_type is None else RMSNorm(cfg)
                setattr(self, f"{name}_post", after)

    def forward(
        self,
        resid_pre: Tensor,
        shortformer_pos_embed: Tensor | None = None,
        past_kv_cache_entry: TransformerLensKeyValueCacheEntry | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """The residual stream `[b p d]` after the block.

        shortformer_pos_embed: what queries and keys read besides the normed stream. attention_mask: 1 at real tokens.
        """
        resid_pre = self._point("resid_pre")(resid_pre)
        attn_out = self._attention(resid_pre, shortformer_pos_embed, past_kv_cache_entry, attention_mask)
        if self.cfg.attn_only:
            return self._point("resid_post")(resid_pre + attn_out)
        middle = resid_pre
        if not self.cfg.parallel_attn_mlp:
            middle = self._point("resid_mid")(resid_pre + attn_out)
        read = middle
        if self.cfg.use_hook_mlp_in or is_active(self._point("mlp_in")):
            read = self._point("mlp_in")(middle.clone())
        mlp_out = self.apply_mlp(read if self._output_normed else self.ln2(read))
        if self.cfg.parallel_attn_mlp:
            middle = middle + attn_out
        return self._point("resid_post")(middle + mlp_out)

    def apply_mlp(self, normalized_resid: Tensor) -> Tensor:
        """What the MLP adds to the stream, from its normed input."""
        return self._point("mlp_out")(self._normed_output("ln2", self.mlp(normalized_resid)))

    def _attention(
        self,
        resid: Tensor,
        place: Tensor | None,
        entry: TransformerLensKeyValueCacheEntry | None,
        attention_mask: Tensor | None,
    ) -> Tensor:
        """What attention adds to the stream."""
        inputs = self._inputs(resid)
        if not self._output_normed:
            once = inputs[0] is inputs[1] is inputs[2]
            inputs = [self.ln1(inputs[0])] * 3 if once else [self.ln1(x) for x in inputs]
        if place is not None:
            inputs[:2] = [x + (place if x.ndim == 3 else place[:, :, None]) for x in inputs[:2]]
        attn_out = self.attn(*inputs, past_kv_cache_entry=entry, attention_mask=attention_mask)
        return self._point("attn_out")(self._normed_output("ln1", attn_out))

    def _inputs(self, resid: Tensor) -> list[Tensor]:
        """What queries, keys and values read: the stream, or a copy of it for each head where those are hooked."""
        cfg, split = self.cfg, ["q_input", "k_input", "v_input"]
        read, grouped = resid, cfg.n_key_value_heads is not None and not cfg.ungroup_grouped_query_attention
        if cfg.use_attn_in or is_active(self._point("attn_in")):
            if grouped:
                raise ValueError(
                    "hook_attn_in has one input per query head; for grouped keys use hook_k_input and others"
                )
            read = self._point("attn_in")(_copies(resid, cfg.n_heads))
        if not (cfg.use_split_qkv_input or any(is_active(self._point(name)) for name in split)):
            return [read] * 3
        n_kv = cast(int, cfg.n_key_value_heads) if grouped else cfg.n_heads
        heads = (cfg.n_heads, n_kv, n_kv)
        return [
            self._point(name)(_copies(read, n) if read.ndim == 3 else read)
            for name, n in zip(split, heads, strict=True)
        ]

    @property
    def _output_normed(self) -> bool:
        return self.cfg.original_architecture in OUTPUT_NORMED

    def _normed_output(self, norm: str, out: Tensor) -> Tensor:
        if self.cfg.use_normalization_before_and_after:
            out = getattr(self, f"{norm}_post")(out)
        return getattr(self, norm)(out) if self._output_normed else out

    def _point(self, name: str) -> nn.Module:
        return cast(nn.Module, getattr(self, f"hook_{name}"))


def _copies(resid: Tensor, n_heads: int) -> Tensor:
    """`[b p h d]`, memory of its own for each head."""
    return torch.stack([resid] * n_heads, 2)
