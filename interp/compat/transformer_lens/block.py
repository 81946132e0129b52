"""A block as a module with TransformerLens' parts and hook points, which can run by itself."""

from typing import Any, cast

import torch
from torch import Tensor, nn

from interp.compat.transformer_lens.attention import Attention, GroupedQueryAttention
from interp.compat.transformer_lens.cache import TransformerLensKeyValueCacheEntry
from interp.compat.transformer_lens.config import HookedTransformerConfig
from interp.compat.transformer_lens.engine import Part, Setting
from interp.compat.transformer_lens.hook_points import HookPoint
from interp.compat.transformer_lens.layers import Config, RMSNorm, norm_of
from interp.compat.transformer_lens.mlps import mlp_of
from interp.compat.transformer_lens.native import blueprint, filled, native_block
from interp.model.attention import Pass, View
from interp.model.config import ModelConfig
from interp.model.mask import Mask
from interp.model.tap import Scope


class TransformerBlock(Part):
    """Attention and MLP that read the residual stream and add to it."""

    ln1: nn.Module
    ln2: nn.Module

    def __init__(self, cfg: Config, block_index: int) -> None:
        super().__init__()
        self.cfg = cfg = HookedTransformerConfig.unwrap(cfg)
        self.normalization_type, self.layer = cfg.normalization_type, block_index
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
        x, entry = resid_pre, past_kv_cache_entry
        if isinstance(self.attn, Attention):
            shared = self.attn.shared_pass(x, entry, attention_mask)
        else:
            view = View(Mask(causal=False, allowed=None), None)
            shared = Pass(view, view, None)
        shared.once("place", lambda: shortformer_pos_embed)
        return self.computed(
            lambda native, scope: native(x, shared, scope), x, Setting(entry, attention_mask)
        )

    def apply_mlp(self, normalized_resid: Tensor) -> Tensor:
        """What the MLP adds to the stream, from its normed input."""

        def added(native: Any, scope: Scope) -> Tensor:
            return cast(Tensor, native._added("mlp_out", native.mlp(normalized_resid, scope), scope))

        return self.computed(added, normalized_resid)

    def _own_path(self) -> str:
        return "blocks.0"

    def _native(self, device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, ModelConfig]:
        plan = blueprint(self.cfg)
        with torch.device("meta"):
            native = native_block(self.cfg, plan, self.layer)
        return filled(native, self.cfg, device, dtype), plan.config
