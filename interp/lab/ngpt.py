"""Blocks of nGPT: the stream stays on a sphere, and every sublayer turns it by a learned step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from interp.core.stats import upcast
from interp.model.block import Block, UsualBlock
from interp.model.config import ModelConfig
from interp.model.norm import Normalize, RMSNorm
from interp.model.records import requires


@dataclass(frozen=True)
class NGPT(UsualBlock):
    """Blocks of nGPT: every sublayer turns the stream h, which stays on a sphere, a part of the way to its output.

    h <- Norm(h + alpha (Norm(f(h)) - h)), alpha a trained rate for each coordinate. Norm is RMSNorm without a weight:
    h has the length sqrt(d_model), where the paper has 1. As the stream is a sum of what is written to it,
    the same step is written Norm((1 - alpha) (h + o)) with o = alpha / (1 - alpha) Norm(f(h)): `hook_attn_out` and
    `hook_mlp_out` hold o, and 1 - alpha is the gain of the norm of the sum, before it divides. The logit of alpha is
    what is stored, `ln1.weight` and `ln2.weight`, so that alpha stays between 0 and 1.

    What else nGPT has is a setting of the config (`embed_norm=True`, `final_norm=False`, and `qk_norm="each"`, whose
    weights are s_qk) or missing: matrices are not normed after each update, and the scales s_u, s_nu and s_z are the
    lengths of their rows.

    Caveats:
        alpha / (1 - alpha) is the exponential of what is stored, which overflows from about 88 on, in float16 from 11.

    Source:
        Loshchilov et al. 2024, "nGPT: Normalized Transformer with Representation Learning on the Hypersphere",
        equations 10 and 11.
    """

    rate: float = 0.05
    """What every alpha is before training."""

    def __post_init__(self) -> None:
        super().__post_init__()
        requires(0 < self.rate < 1, f"0 < rate < 1, got {self.rate}")

    def check(self, config: ModelConfig) -> None:
        """ValueError for other norms, norms in other places, and for cross-attention."""
        placed = isinstance(config.norm, RMSNorm) and config.norm_place == "output_post"
        requires(
            placed and not config.cross_attention,
            "norm=RMSNorm(...), norm_place='output_post' and no cross-attention for nGPT's blocks",
        )

    def build(self, config: ModelConfig, layer: int) -> Block:
        """The module of a layer."""
        return _NGPTBlock(config, layer, self.rate)


class _NGPTBlock(Block):
    def __init__(self, config: ModelConfig, layer: int, rate: float) -> None:
        super().__init__(config, layer)
        assert isinstance(config.norm, RMSNorm)
        norm = RMSNorm(config.norm.eps, trained="nothing")
        self.ln1 = _Turn(norm, config.d_model, "ln1", rate)
        self.ln1_post = _Step(norm, "ln1_post", self.ln1)
        if config.mlp is not None:
            self.ln2 = _Turn(norm, config.d_model, "ln2", rate)
            self.ln2_post = _Step(norm, "ln2_post", self.ln2)


class _Turn(Normalize):
    """x -> Norm((1 - alpha) x), alpha the sigmoid of `weight`: the gain acts before the norm divides."""

    kind: RMSNorm
    weight: nn.Parameter

    def __init__(self, norm: RMSNorm, d_model: int, name: str, rate: float) -> None:
        super().__init__(norm, d_model, name)
        self.weight = nn.Parameter(torch.full((d_model,), math.log(rate / (1 - rate))))

    @property
    def gamma(self) -> Float[Tensor, "d"]:
        """1 - alpha, in float32 at least."""
        return torch.sigmoid(-upcast(self.weight))

    def scale(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b 1"]:
        """The divisor: the root mean square of (1 - alpha) x."""
        return super().scale(upcast(x) * self.gamma.to(x.device)).to(x.dtype)

    def _kernel(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        return F.rms_norm(upcast(x) * self.gamma, (self.width,), None, self.kind.eps).to(x.dtype)

    @torch.no_grad()
    def gradient(self, gradient: Float[Tensor, "*n d"], x: Float[Tensor, "*#n d"]) -> Float[Tensor, "*n d"]:
        """The gradient at the input: gamma (g - y (y . g) / d) / scale, y the output."""
        scale = self.scale(x)
        if "norm" in self.rules:
            return self.pull_back(gradient, scale)
        out = self.frozen(x, scale)
        along = (gradient * out).mean(-1, keepdim=True)
        return self.pull_back(gradient.addcmul(along, out, value=-1), scale)


class _Step(Normalize):
    """x -> alpha / (1 - alpha) Norm(x), with the alpha of a norm of the sum."""

    def __init__(self, norm: RMSNorm, name: str, turn: _Turn) -> None:
        super().__init__(norm, turn.width, name)
        self._turn = (turn,)  # in a tuple: its weight is stored once, there

    @property
    def turn(self) -> _Turn:
        """The norm of the sum after this sublayer, which keeps alpha."""
        return self._turn[0]

    @property
    def gamma(self) -> Float[Tensor, "d"]:
        """Alpha / (1 - alpha), in float32 at least."""
        return upcast(self.turn.weight).exp()
