"""Tables of sines and cosines for rotary positions, in the precision that TransformerLens computes them in.

`RotaryTables` is the part of an attention layer that keeps them, lengthens them, and widens their base for contexts
beyond the training length (dynamic NTK, as Qwen 1 defines it).
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from interp.compat.transformer_lens.config import HookedTransformerConfig
from interp.compat.transformer_lens.engine import Part
from interp.model.config import Llama3Scaling, Rotary, Scaling, YarnScaling
from interp.model.mask import Layout
from interp.model.position import Rotation, inverse_frequencies

ROWS = 2048
"""Positions that a table begins with, if the context is longer."""


def rotary_table(
    cfg: HookedTransformerConfig, attn_type: str, rows: int | None = None, base: float | None = None
) -> tuple[Float[Tensor, "n rotated"], Float[Tensor, "n rotated"]]:
    """Sine and cosine of every position and rotated dimension; angles are float64 for a float64 model, else float32.

    base: instead of the config's. ValueError without a `rotary_dim`.
    """
    if cfg.rotary_dim is None:
        raise ValueError("Rotary dim must be provided for rotary positional embeddings")
    wide = torch.float64 if cfg.dtype == torch.float64 else torch.float32
    place = torch.arange(min(cfg.n_ctx, ROWS) if rows is None else rows, dtype=wide)
    local = attn_type == "local"
    base = _base(cfg, local) if base is None else base
    rule = _scaling(cfg, local)
    if rule is None:
        pair = torch.arange(cfg.rotary_dim // 2, dtype=wide)
        divisor = cfg.rotary_scaling_factor if not local else 1.0
        period = base ** (pair / (cfg.rotary_dim / 2)) * divisor
    else:
        rotary = Rotary(base, scaling=rule)
        precise = wide if isinstance(rule, YarnScaling) else torch.float32
        frequency = inverse_frequencies(rotary, cfg.rotary_dim, place.device, dtype=precise)[0]
        period = 1 / frequency.to(wide)
    period = period.repeat_interleave(2) if cfg.rotary_adjacent_pairs else period.repeat(2)
    angle = place[:, None] / period
    factor = rule.attention_factor if isinstance(rule, YarnScaling) else 1.0
    return angle.sin().to(cfg.dtype) * factor, angle.cos().to(cfg.dtype) * factor


def _base(cfg: HookedTransformerConfig, local: bool) -> float:
    return float(cfg.rotary_base_local if local and cfg.rotary_base_local is not None else cfg.rotary_base)


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


class RotaryTables(Part):
    """The tables of one attention layer, which begin with `ROWS` positions at most and grow as they are needed."""

    cfg: HookedTransformerConfig
    attn_type: str
    rotary_sin: Tensor
    rotary_cos: Tensor
    _widening = 1.0

    def _build_tables(self) -> None:
        sin, cos = rotary_table(self.cfg, self.attn_type)
        self.register_buffer("rotary_sin", sin)
        self.register_buffer("rotary_cos", cos)

    def calculate_sin_cos_rotary(
        self, rotary_dim: int, n_ctx: int, base: float | int = 10000, dtype: torch.dtype = torch.float32
    ) -> tuple[Float[Tensor, "n rotated"], Float[Tensor, "n rotated"]]:
        """Sine and cosine of `n_ctx` positions, by the config's rule for long contexts; nothing is stored."""
        cfg = HookedTransformerConfig.from_dict(
            self.cfg.to_dict() | {"rotary_dim": rotary_dim, "dtype": dtype, "device": "cpu"}
        )
        return rotary_table(cfg, self.attn_type, n_ctx, float(base))

    def apply_rotary(
        self, x: Tensor, past_kv_pos_offset: int = 0, attention_mask: Tensor | None = None
    ) -> Tensor:
        """Queries or keys after `past_kv_pos_offset` rotated to their positions, which count real tokens."""
        n = x.shape[1]
        layout = Layout(None if attention_mask is None else attention_mask.bool())
        places = layout.positions(n, past_kv_pos_offset, x.device)
        return self.rotation_for(places, past_kv_pos_offset + n).apply(x)

    def rotation_for(self, places: Tensor, total: int) -> Rotation:
        """The rotation of these positions in a text of `total` tokens, from tables that suit it."""
        if self.cfg.use_dynamic_ntk_rope and not self.training:
            self._rescale_rotary_for_ntk(total)
        self.reach(total)
        return self.rotation(places)

    def rotation(self, places: Tensor) -> Rotation:
        """The rotation of these positions `[b p]`, from the layer's table."""
        pairs, half = self.cfg.rotary_adjacent_pairs, self.rotary_cos.shape[1] // 2
        keep = slice(None, None, 2) if pairs else slice(half)
        cos, sin = (table[:, keep][places][:, :, None] for table in (self.rotary_cos, self.rotary_sin))
        return Rotation(cos, sin, pairs)

    def reach(self, total: int) -> None:
        """Have at least `total` positions in the tables, and room for more; not beyond the context."""
        rows = self.rotary_cos.shape[0]
        if rows < min(self.cfg.n_ctx, total):
            self._extend_rotary_embeddings(min(self.cfg.n_ctx, max(total, 2 * rows)))

    def _extend_rotary_embeddings(self, new_size: int) -> None:
        base = _base(self.cfg, self.attn_type == "local")
        if self._widening > 1:
            base = self._widened(base)
        self._store(*rotary_table(self.cfg, self.attn_type, new_size, base))

    def _store(self, sin: Tensor, cos: Tensor) -> None:
        self.rotary_sin, self.rotary_cos = sin.to(self.rotary_sin.device), cos.to(self.rotary_cos.device)

    def _ntk_alpha(self, key_length: int, train_length: int) -> float:
        """What dynamic NTK widens the base by: 1 up to the training length, then 3, 7, 15, ... at each doubling."""
        if key_length <= train_length:
            return 1.0
        return 2.0 ** math.ceil(math.log2(key_length / train_length) + 1) - 1

    def _rescale_rotary_for_ntk(self, key_length: int) -> None:
        """Have the tables of a context of this length."""
        alpha = self._ntk_alpha(key_length, self.cfg.train_seq_length or self.cfg.n_ctx)
        if alpha != self._widening:
            self._widening = alpha
            self._extend_rotary_embeddings(max(key_length, self.rotary_cos.shape[0]))

    def _widened(self, base: float) -> float:
        """base * alpha^(d / (d - 2)) for d rotated dimensions."""
        assert self.cfg.rotary_dim is not None
        return base * self._widening ** (self.cfg.rotary_dim / (self.cfg.rotary_dim - 2))
