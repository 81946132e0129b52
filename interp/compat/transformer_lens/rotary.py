"""Tables of sines and cosines for rotary positions, in the precision that TransformerLens computes them in."""

import torch
from jaxtyping import Float
from torch import Tensor

from interp.compat.transformer_lens.config import HookedTransformerConfig
from interp.model.config import Llama3Scaling, Rotary, Scaling, YarnScaling
from interp.model.position import inverse_frequencies

ROWS = 2048
"""Positions that a table begins with, if the context is longer."""


def rotary_table(
    cfg: HookedTransformerConfig, attn_type: str, rows: int | None = None
) -> tuple[Float[Tensor, "n rotated"], Float[Tensor, "n rotated"]]:
    """Sine and cosine of every position and rotated dimension; angles are float64 for a float64 model, else float32.

    ValueError without a `rotary_dim`.
    """
    if cfg.rotary_dim is None:
        raise ValueError("Rotary dim must be provided for rotary positional embeddings")
    wide = torch.float64 if cfg.dtype == torch.float64 else torch.float32
    place = torch.arange(min(cfg.n_ctx, ROWS) if rows is None else rows, dtype=wide)
    local = attn_type == "local"
    base = cfg.rotary_base_local if local and cfg.rotary_base_local is not None else cfg.rotary_base
    rule = _scaling(cfg, local)
    if rule is None:
        pair = torch.arange(cfg.rotary_dim // 2, dtype=wide)
        divisor = cfg.rotary_scaling_factor if not local else 1.0
        period = base ** (pair / (cfg.rotary_dim / 2)) * divisor
    else:
        rotary = Rotary(float(base), scaling=rule)
        period = 1 / inverse_frequencies(rotary, cfg.rotary_dim, place.device)[0].to(wide)
    period = period.repeat_interleave(2) if cfg.rotary_adjacent_pairs else period.repeat(2)
    angle = place[:, None] / period
    factor = rule.attention_factor if isinstance(rule, YarnScaling) else 1.0
    return angle.sin().to(cfg.dtype) * factor, angle.cos().to(cfg.dtype) * factor


def _scaling(cfg: HookedTransformerConfig, local: bool) -> Scaling | None:
    """The rule that bends the frequencies; None for those that a factor divides."""
    if cfg.use_NTK_by_parts_rope:
        return Llama3Scaling(
            cfg.NTK_by_parts_factor, cfg.NTK_by_parts_low_freq_factor, cfg.NTK_by_parts_high_freq_factor,
            cfg.NTK_original_ctx_len,
        )  # fmt: skip
    if cfg.use_yarn_rope and not (local and cfg.yarn_global_attn_only):
        return YarnScaling(
            cfg.yarn_factor, cfg.yarn_original_max_position_embeddings, cfg.yarn_attention_factor,
            cfg.yarn_beta_fast, cfg.yarn_beta_slow, cfg.yarn_truncate,
        )  # fmt: skip
    return None
