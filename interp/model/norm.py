"""LayerNorm, RMSNorm and the identity, with the scale they divide by as a site."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from interp.model.config import LayerNorm, NoNorm, Norm
from interp.model.tap import Scope, at


class Normalize(nn.Module):
    """One norm of the model. Fused, unless its scale is edited or differentiated.

    Formula: LayerNorm `(x - mean x) / sqrt(var x + eps) * gamma + beta` (biased variance, eps inside the root);
    RMSNorm `x / sqrt(mean x^2 + eps) * gamma`. Statistics are computed in float32 for half precision inputs.
    """

    def __init__(self, norm: Norm, d_model: int, name: str) -> None:
        super().__init__()
        self.kind = norm
        self.name = name
        self.weight = None if isinstance(norm, NoNorm) else nn.Parameter(torch.ones(d_model))
        self.bias = nn.Parameter(torch.zeros(d_model)) if isinstance(norm, LayerNorm) else None

    def forward(self, x: Float[Tensor, "*b d"], tap: Scope | None = None) -> Float[Tensor, "*b d"]:
        """The normalised input; sites `<name>.hook_scale` and `<name>.hook_normalized`."""
        if isinstance(self.kind, NoNorm):
            return x
        scale_site = f"{self.name}.hook_scale"
        if tap is not None and tap.alters(scale_site):
            scale = at(tap, scale_site, self.scale(x))
            normed = self.linear(x, scale)
        else:
            if tap is not None and tap.wants(scale_site):
                at(tap, scale_site, self._observed_scale(x))
            normed = self._fused(x)
        return at(tap, f"{self.name}.hook_normalized", normed)

    def _fused(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        assert self.weight is not None and not isinstance(self.kind, NoNorm)
        if isinstance(self.kind, LayerNorm):
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.kind.eps)
        return F.rms_norm(x, self.weight.shape, self.weight, self.kind.eps)

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
        """What the norm divides by: the root of variance (or mean square) plus eps."""
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
        return normed if self.bias is None else normed + self.bias

    def frozen(self, x: Float[Tensor, "*b d"], scale: Float[Tensor, "*#b 1"]) -> Float[Tensor, "*b d"]:
        """The linear part of the norm at a frozen scale, without beta: what one part of a sum becomes.

        Applied to the parts of a residual stream it gives parts that sum to `linear(whole) - beta`.
        """
        if self.weight is None:
            return x
        return self.centred(x) / scale * self.weight

    def pull_back(
        self, direction: Float[Tensor, "*b d"], scale: Float[Tensor, "*b 1"]
    ) -> Float[Tensor, "*b d"]:
        """The transpose of `frozen`: `part . pull_back(u)` equals `frozen(part) . u`."""
        if self.weight is None:
            return direction
        return self.centred(direction * self.weight) / scale
