"""LayerNorm, RMSNorm and the identity, with the scale they divide by as a site."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from interp.model.records import ConfigRecord, not_negative
from interp.model.rules import NO_RULES, kept
from interp.model.tap import Scope, at

TrainedNorm = Literal["gamma and beta", "gamma", "nothing"]


@dataclass(frozen=True)
class LayerNorm(ConfigRecord):
    """LayerNorm: mean removed, divided by the biased standard deviation, scaled by gamma, shifted by beta."""

    eps: float = 1e-5
    trained: TrainedNorm = "gamma and beta"
    """Vectors that the norm has: Cohere and MPT have no beta, OLMo-1 has neither."""
    unit_offset: bool = False
    """True: what is stored is gamma - 1 (Nemotron)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        not_negative(self, "eps")


@dataclass(frozen=True)
class RMSNorm(ConfigRecord):
    """RMSNorm: divided by the root mean square, scaled by gamma; no mean, no shift."""

    eps: float = 1e-6
    unit_offset: bool = False
    """True: what is stored is gamma - 1 (Gemma)."""
    trained: Literal["gamma", "nothing"] = "gamma"
    """Whether the norm has its vector: queries and keys of Llama 4 are normed by none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        not_negative(self, "eps")


@dataclass(frozen=True)
class NoNorm(ConfigRecord):
    """No norm: blocks read the residual stream as it is."""


Norm = LayerNorm | RMSNorm | NoNorm
NormPlace = Literal["pre", "post", "sandwich", "output", "output_post"]
"""`pre` norms what a sublayer reads, `output` what it adds, `sandwich` both; `post` norms the sum (BERT), `output_post`
what a sublayer adds and the sum (nGPT).
"""


class Normalize(nn.Module):
    """One norm of the model. Fused, unless its scale is edited or differentiated.

    Under the norm rule it has the derivative of `linear` at its scale.

    Formula: LayerNorm `(x - mean x) / sqrt(var x + eps) * gamma + beta` (biased variance, eps inside the root);
    RMSNorm `x / sqrt(mean x^2 + eps) * gamma`. Statistics are computed in float32 for half precision inputs; an input
    in float32 at weights of half precision is normed in float32.
    """

    rules = NO_RULES

    def __init__(self, norm: Norm, d_model: int, name: str, heads: int | None = None) -> None:
        """A norm of vectors of this width.

        Args:
            heads: number of heads, each with a gamma of its own, one after another in `weight`; None: one gamma for
                all.
        """
        super().__init__()
        self.kind = norm
        self.name = name
        self.width, self.heads = d_model, heads
        trained = "nothing" if isinstance(norm, NoNorm) else norm.trained
        plain = trained == "nothing"
        self.unit_offset = not isinstance(norm, NoNorm) and norm.unit_offset
        size = d_model * (heads or 1)
        stored = torch.zeros(size) if self.unit_offset else torch.ones(size)
        self.weight = None if plain else nn.Parameter(stored)
        self.bias = nn.Parameter(torch.zeros(d_model)) if trained == "gamma and beta" else None

    def forward(self, x: Float[Tensor, "*b d"], tap: Scope | None = None) -> Float[Tensor, "*b d"]:
        """The normalised input; sites `<name>.hook_scale` and `<name>.hook_normalized`."""
        if isinstance(self.kind, NoNorm):
            return x
        return at(tap, f"{self.name}.hook_normalized", self.divided(x, tap))

    def divided(self, x: Float[Tensor, "*b d"], tap: Scope | None) -> Float[Tensor, "*b d"]:
        """The normalised input; of its two sites only `hook_scale` is visited here."""
        if tap is None:
            return self._fused(x)
        scale_site = f"{self.name}.hook_scale"
        if tap.alters(scale_site):
            scale = self.scale(x)
            return self.linear(x, at(tap, scale_site, scale.detach() if "norm" in self.rules else scale))
        if tap.wants(scale_site):
            at(tap, scale_site, self._observed_scale(x))
        return self._fused(x)

    @property
    def gamma(self) -> Float[Tensor, "*h d"] | None:
        """The factor on the normed input, in float32 at least where it is stored as gamma - 1; None: 1."""
        stored = self.weight
        if stored is None:
            return None
        stored = stored if self.heads is None else rearrange(stored, "(h e) -> h e", h=self.heads)
        return 1 + stored.to(torch.promote_types(stored.dtype, torch.float32)) if self.unit_offset else stored

    def _fused(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        normed = self._kernel(x)
        if "norm" not in self.rules or not x.requires_grad:
            return normed
        return kept(normed, self.linear(x, self.scale(x).detach()))

    def _kernel(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        assert not isinstance(self.kind, NoNorm)
        gamma, per_head = self.gamma, self.heads is not None
        fused = None if per_head else gamma  # the kernel takes one gamma for all heads
        if isinstance(self.kind, LayerNorm):
            fused, beta = (None if vector is None else vector.to(x.dtype) for vector in (fused, self.bias))
            normed = F.layer_norm(x, (self.width,), fused, beta, self.kind.eps)
        else:
            wide = x if gamma is None else x.to(torch.promote_types(x.dtype, gamma.dtype))
            fused = None if fused is None else fused.to(wide.dtype)
            normed = F.rms_norm(wide, (self.width,), fused, self.kind.eps)
        return (normed * gamma if per_head and gamma is not None else normed).to(x.dtype)

    @torch.no_grad()
    def _observed_scale(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b 1"]:
        """`scale` for a reader only: the fused kernel's own statistic, a tenth of the time of a variance, no gradient.

        Recording everything on GPT-2 small's shape drops by 4 % (`experiments/bench/cache.py`).
        """
        if not isinstance(self.kind, LayerNorm):
            return self.scale(x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        inverse = torch.native_layer_norm(wide, wide.shape[-1:], None, None, self.kind.eps)[2]
        return inverse.reciprocal().to(x.dtype)

    def scale(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b 1"]:
        """The divisor of the norm: the root of variance (or mean square) plus eps."""
        if isinstance(self.kind, NoNorm):
            return torch.ones_like(x[..., :1])
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        square = self.centred(wide).square().mean(-1, keepdim=True)  # torch.var takes six times as long
        return (square + self.kind.eps).sqrt().to(x.dtype)

    def centred(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        """`x` minus its mean for LayerNorm, `x` itself otherwise."""
        return x - x.mean(-1, keepdim=True) if isinstance(self.kind, LayerNorm) else x

    def linear(self, x: Float[Tensor, "*b d"], scale: Float[Tensor, "*b 1"]) -> Float[Tensor, "*b d"]:
        """The norm with its scale given: an affine map of `x`."""
        normed = self.frozen(x, scale)
        return normed if self.bias is None else normed + self.bias.to(normed.device)

    def frozen(self, x: Float[Tensor, "*b d"], scale: Float[Tensor, "*#b 1"]) -> Float[Tensor, "*b d"]:
        """The linear part of the norm at a frozen scale, without beta, for one part of a sum.

        Applied to the parts of a residual stream it gives parts that sum to `linear(whole) - beta`.
        """
        if isinstance(self.kind, NoNorm):
            return x
        divided, gamma = self.centred(x) / scale, self.gamma
        return (divided if gamma is None else divided * gamma.to(x.device)).to(x.dtype)

    def pull_back(
        self, direction: Float[Tensor, "*b d"], scale: Float[Tensor, "*#b 1"]
    ) -> Float[Tensor, "*b d"]:
        """The transpose of `frozen`: `part . pull_back(u)` equals `frozen(part) . u`."""
        if isinstance(self.kind, NoNorm):
            return direction
        gamma = self.gamma
        return self.centred(direction if gamma is None else direction * gamma.to(direction.device)) / scale

    @torch.no_grad()
    def gradient(self, gradient: Float[Tensor, "*n d"], x: Float[Tensor, "*#n d"]) -> Float[Tensor, "*n d"]:
        """The gradient at the input x, given the one at the output: the scale moves with x, unlike in `pull_back`.

        (C(gamma g) - n (n . gamma g) / d) / scale, n = C(x) / scale, C the centring of LayerNorm: a norm's Jacobian is
        symmetric but for gamma. Under the norm rule (`interp.passes.rules`) the scale is a constant, as in `pull_back`.
        """
        if isinstance(self.kind, NoNorm):
            return gradient
        scale, gamma = self.scale(x), self.gamma
        if "norm" in self.rules:
            return self.pull_back(gradient, scale)
        unit = self.centred(x) / scale
        scaled_gradient = gradient if gamma is None else gradient * gamma.to(gradient)
        along = (scaled_gradient * unit).mean(-1, keepdim=True)
        return self.centred(scaled_gradient).addcmul_(along, unit, value=-1).div_(scale)


NormedHeads = Literal["head", "each", "width"]
"""How queries and keys are normed: each head with one gamma, each with a gamma of its own, or all as one vector."""


class HeadNorm(nn.Module):
    """The norm of queries or keys before rotation: of each head, or of all heads as one vector.

    Where each head has a gamma of its own, `[head, d_head]`, there is no beta (StableLM, Cohere).
    """

    def __init__(self, norm: Norm, n_heads: int, d_head: int, name: str, kind: NormedHeads) -> None:
        super().__init__()
        self.whole, self.d_head, self.name = kind == "width", d_head, name
        if kind == "each" and isinstance(norm, LayerNorm):
            norm = replace(norm, trained="gamma")
        rows = n_heads if kind == "each" else None
        self.norm = Normalize(norm, n_heads * d_head if self.whole else d_head, name, rows)

    def forward(self, x: Float[Tensor, "b p h e"], tap: Scope | None = None) -> Float[Tensor, "b p h e"]:
        """The normed heads; sites `<name>.hook_scale` (one per head, or one for all) and `<name>.hook_normalized`."""
        if self.whole:
            flat = rearrange(x, "b p h e -> b p 1 (h e)")
            normed = rearrange(self.norm.divided(flat, tap), "b p 1 (h e) -> b p h e", e=self.d_head)
        else:
            normed = self.norm.divided(x, tap)
        return at(tap, f"{self.name}.hook_normalized", normed)
