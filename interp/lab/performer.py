"""Performer: softmax attention estimated by positive random features, at a cost linear in the length.

Choromanski et al. 2021, "Rethinking Attention with Performers" (FAVOR+): equation 7 and lemma 1 (the features),
section 2.4 and theorem 2 (orthogonal directions).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from interp.core.kinds import NotNegative
from interp.lab.linear import LinearMixer, OfSums, sums_flops
from interp.model.attention import Attention
from interp.model.config import ModelConfig
from interp.model.records import Traits, at_least_one, maps_flops


@dataclass(frozen=True)
class Performer(OfSums):
    """Performer (FAVOR+): softmax attention estimated by positive random features (Choromanski et al. 2021)."""

    n_features: int = 256
    """Number of random directions, which all heads of a layer share."""
    eps: NotNegative = 1e-12
    """Constant added to the sum that the weights are divided by, as a share of the query's largest feature."""
    chunk: int = 64
    """Positions computed at once by the fused form."""

    traits = Traits(distribution=True, keyed=False, stateful=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(self, "n_features")

    def flops(self, config: ModelConfig, layer: int, n: int) -> int:
        """Four maps, features of queries and keys, and sums in chunks, the values with a column of ones."""
        e, heads = config.head_width, config.n_heads
        features = 2 * n * e * self.n_features * (heads + config.kv_heads)
        sums = sums_flops(n, self.chunk, self.n_features, e + 1, causal=config.causal)
        return maps_flops(config, n) + features + heads * sums

    def build(self, config: ModelConfig, layer: int) -> Attention:
        """The module of a layer."""
        return PerformerMixer(config, layer)


class PerformerMixer(LinearMixer):
    """Linear attention with phi(x)_r = exp(w_r . x - |x|^2 / 2), x a query or key times the root of the score's scale.

    Over random w_r the mean of phi(q)_r phi(k)_r is exp(scale q . k) (lemma 1), so that the pattern is an estimate of
    softmax attention's, with shares that are never negative. The variance of one weight, divided by its square, is at
    most (exp(|q + k|^2) - 1) / n_features, q and k scaled (lemma 2): long queries and keys need many features.

    The directions are drawn when the module is built, stored with the weights and not trained: blocks of as many
    orthogonal ones as a head is wide, with the lengths of Gaussian vectors. The paper also draws them anew while it
    trains. Features stand after the rotation of a rotary model.

    The features of a query are divided by the largest of them, which cancels. Those of keys are not, as the released
    code does by the largest of the text: later tokens would move what earlier ones get. So in float32 a key with
    |x|^2 / 2 beyond about 80 weighs nothing.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        kind = config.mixers[layer]
        assert isinstance(kind, Performer)
        drawn = orthogonal_directions(kind.n_features, self.d_head)
        self.directions = nn.Parameter(
            drawn, requires_grad=False
        )  # a buffer would not be stored with the weights

    def _feature(self, x: Float[Tensor, "b h p e"]) -> Float[Tensor, "b h p r"]:
        return self._exponents(x).exp()

    def _query_feature(self, q: Float[Tensor, "b h p e"]) -> Float[Tensor, "b h p r"]:
        exponents = self._exponents(q)
        return (exponents - exponents.detach().amax(-1, keepdim=True)).exp()

    def _exponents(self, x: Float[Tensor, "b h p e"]) -> Float[Tensor, "b h p r"]:
        x = x * self.scale**0.5
        return x @ self.directions.to(x.dtype).mT - x.square().sum(-1, keepdim=True) / 2


def orthogonal_directions(n_directions: int, width: int) -> Float[Tensor, "n_directions width"]:
    """Random directions, each a standard Gaussian vector, orthogonal to those of its block of `width`.

    Choromanski et al. 2021, section 2.4: estimates of a kernel vary less than with independent directions. Draws from
    torch's global generator.
    """
    blocks = [nn.init.orthogonal_(torch.empty(width, width)) for _ in range(-(-n_directions // width))]
    lengths = torch.randn(n_directions, width).norm(dim=1, keepdim=True)
    return torch.cat(blocks)[:n_directions] * lengths
