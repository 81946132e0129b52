"""Embeddings, unembedding and norms as modules with TransformerLens' parameters and hook points."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from interp.compat.transformer_lens.config import HookedTransformerConfig
from interp.compat.transformer_lens.engine import Part
from interp.compat.transformer_lens.hook_points import HookPoint
from interp.compat.transformer_lens.native import LensNorm, blueprint, filled
from interp.model import config as ours
from interp.model.mask import Layout

Config = HookedTransformerConfig | dict[str, Any]


class Embed(Part):
    """Token embeddings `W_E [v d]`, normed where the config says so."""

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = HookedTransformerConfig.unwrap(cfg)
        self.W_E = nn.Parameter(torch.empty(self.cfg.d_vocab, self.cfg.d_model, dtype=self.cfg.dtype))
        if self.cfg.post_embedding_ln:
            self.ln = LayerNorm(self.cfg)

    def forward(self, tokens: Tensor) -> Tensor:
        """`[b p d]` of tokens `[b p]`."""
        vectors = self.W_E[tokens, :]
        return self.ln(vectors) if self.cfg.post_embedding_ln else vectors


class PosEmbed(Part):
    """Position embeddings `W_pos [n_ctx d]`; 0 at padding."""

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = HookedTransformerConfig.unwrap(cfg)
        self.W_pos = nn.Parameter(torch.empty(self.cfg.n_ctx, self.cfg.d_model, dtype=self.cfg.dtype))

    def forward(
        self, tokens: Tensor, past_kv_pos_offset: int = 0, attention_mask: Tensor | None = None
    ) -> Tensor:
        """`[b p d]` for the tokens after `past_kv_pos_offset`; attention_mask: of all, those before included."""
        rows, n = tokens.shape[0], tokens.shape[-1]
        if attention_mask is None:
            return self.W_pos[past_kv_pos_offset : past_kv_pos_offset + n].expand(rows, -1, -1).clone()
        places = Layout(attention_mask.bool()).positions(n, past_kv_pos_offset, tokens.device)
        padding = ~attention_mask.bool()[:, past_kv_pos_offset : past_kv_pos_offset + n, None]
        return self.W_pos[places].masked_fill(padding, 0)


class Unembed(Part):
    """Logits before their soft cap: `x W_U + b_U`, with `W_U [d v]`."""

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = HookedTransformerConfig.unwrap(cfg)
        width, dtype = self.cfg.d_vocab_out, self.cfg.dtype
        self.W_U = nn.Parameter(torch.empty(self.cfg.d_model, width, dtype=dtype))
        self.b_U = nn.Parameter(torch.zeros(width, dtype=dtype))
        self.hook_in = HookPoint()
        self.hook_out = HookPoint()

    def forward(self, residual: Tensor) -> Tensor:
        """`[b p v]` of a normed stream `[b p d]`."""
        return self.hook_out(F.linear(self.hook_in(residual), self.W_U.T, self.b_U))


class LayerNormPre(Part):
    """The mean removed, divided by the standard deviation: LayerNorm whose weights were folded away."""

    kind: type[ours.LayerNorm | ours.RMSNorm] = ours.LayerNorm

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = HookedTransformerConfig.unwrap(cfg)
        self.eps = self.cfg.eps
        self.hook_scale = HookPoint()
        self.hook_normalized = HookPoint()

    def forward(self, x: Tensor) -> Tensor:
        """The normed input, times w and plus b where there are any; half precision is normed in float32."""
        return self.computed(lambda native, scope: native(x, scope), x).to(self.cfg.dtype)

    def _own_path(self) -> str:
        return "blocks.0.ln1"

    def _native(self, device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, ours.ModelConfig]:
        with torch.device("meta"):
            width = next((len(weight) for weight in self.parameters()), self.cfg.d_model)
            native = LensNorm(self.kind(self.eps), width, "ln1")
        return filled(native, self.cfg, device, dtype), blueprint(self.cfg).config


class RMSNormPre(LayerNormPre):
    """Divided by the root mean square: RMSNorm whose weights were folded away."""

    kind = ours.RMSNorm


class LayerNorm(LayerNormPre):
    """LayerNorm with `w` and `b`; `hook_normalized` stands before them."""

    def __init__(self, cfg: Config, length: int | None = None) -> None:
        super().__init__(cfg)
        self.length = self.cfg.d_model if length is None else length
        self.w = nn.Parameter(torch.ones(self.length, dtype=self.cfg.dtype))
        self.b = nn.Parameter(torch.zeros(self.length, dtype=self.cfg.dtype))


class RMSNorm(RMSNormPre):
    """RMSNorm with `w`; `hook_normalized` stands before it."""

    def __init__(self, cfg: Config, length: int | None = None) -> None:
        super().__init__(cfg)
        self.length = self.cfg.d_model if length is None else length
        self.w = nn.Parameter(torch.ones(self.length, dtype=self.cfg.dtype))


NORMS: dict[str, type[LayerNormPre]] = {
    "LN": LayerNorm, "LNPre": LayerNormPre, "RMS": RMSNorm, "RMSPre": RMSNormPre,
}  # fmt: skip


def norm_of(cfg: HookedTransformerConfig) -> nn.Module:
    """The norm that a block reads the stream through; the identity without one.

    Errors: ValueError for a `normalization_type` that does not exist.
    """
    kind = cfg.normalization_type
    if kind is None:
        return nn.Identity()
    if kind not in NORMS:
        raise ValueError(f"Invalid normalization_type passed in: {kind}; known: {', '.join(NORMS)} and None")
    return NORMS[kind](cfg)
