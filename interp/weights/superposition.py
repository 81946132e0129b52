"""Signs of superposition in an MLP's weights: large input weights with negative biases, layer by layer.

A neuron that many sparse features share can silence their interference by reading them with large weights and a
negative bias (Elhage et al. 2022, toy models). Gurnee et al. 2023 ("Finding neurons in a haystack", arXiv:2305.01610)
look for that in Pythia's first layers: the norm of a neuron's input weights against its bias, and their product.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from interp.core.results import Score, scored
from interp.core.stats import upcast
from interp.model.config import MLP
from interp.model.transformer import Transformer
from interp.model.weights import Weights
from interp.passes.frozen import input_norm
from interp.passes.observe import Subject
from interp.passes.question import Question, WithoutData
from interp.runs.functions import of_weights

if TYPE_CHECKING:
    import xarray as xr

SCORES = {
    "norm": "norm", "bias": "activation", "negative_bias": "share of neurons",
    "norm_times_bias": "norm times activation", "correlation": "correlation",
}  # fmt: skip
"""Scores of a layer's neurons, with units."""


@dataclass(frozen=True)
class Superposition(Question):
    """Signs of superposition in the weights of every layer's neurons: large input weights with negative biases.

    Args:
        folded: whether the norm before the MLP is part of the weights. Its gain scales the rows of W_in (a LayerNorm's
            centring takes their mean away), its bias adds to b_in.

    Returns:
        Dataset[layer, score], exact numbers of the weights (`low` and `high` are `value`, `n` is 0):

        - `value`: over the layer's neurons u, with w_u = W_in[:, u]: `norm`, the mean |w_u|; `bias`, the mean b_u;
          `negative_bias`, the share of neurons with b_u < 0; `norm_times_bias`, the mean |w_u| b_u; `correlation`,
          Pearson's of |w_u| and b_u (NaN where one does not vary).
        - `neuron_norm`, `neuron_bias` [layer, neuron]: |w_u| and b_u of every neuron.

    Raises:
        ValueError: gated MLPs, mixtures and MLPs without biases.

    Caveat:
        A sign, not a count: the same numbers come about without any superposition.

    Source:
        Gurnee et al. 2023 (arXiv:2305.01610), after Elhage et al. 2022: many features in few neurons need large input
        weights and negative biases, which they find in the first layers.

    Example:
        >>> superposition(model).value.sel(score="negative_bias").sizes["layer"]
        3
    """

    _: KW_ONLY
    folded: bool = True
    of_weights: ClassVar[bool] = True

    def bind(self, model: Subject) -> WithoutData:
        """Norms of the columns of W_in, no pass."""
        mlp = model.transformer.config.mlp
        if not isinstance(mlp, MLP) or mlp.gated or not mlp.bias:
            raise ValueError(
                "superposition requires a plain MLP with biases, act(x W_in + b_in); got "
                f"{mlp if isinstance(mlp, MLP) else model.transformer.config.mlp_in_words}"
            )
        return WithoutData(self.name, partial(_superposition, model.transformer.unedited, self))


superposition = of_weights(Superposition)


@torch.no_grad()
def _superposition(network: Transformer, question: Superposition) -> xr.Dataset:
    weights, config = Weights(network), network.config
    by_layer = [
        _norms_and_biases(network, weights, layer, folded=question.folded) for layer in range(config.n_layers)
    ]
    norm, bias = (torch.stack(values).cpu() for values in zip(*by_layer, strict=True))
    scores = {
        "norm": norm.mean(1),
        "bias": bias.mean(1),
        "negative_bias": (bias < 0).to(norm).mean(1),
        "norm_times_bias": (norm * bias).mean(1),
        "correlation": _correlation(norm, bias),
    }
    return scored(
        question.name,
        {score: Score.exact(scores[score], unit) for score, unit in SCORES.items()},
        ("layer",),
        coords={"layer": range(config.n_layers)},
        others={"neuron_norm": (("layer", "neuron"), norm), "neuron_bias": (("layer", "neuron"), bias)},
        units={"neuron_norm": "norm", "neuron_bias": "activation"},
        attrs={"folded": int(question.folded), "null": "none: weights only"},
    )


def _norms_and_biases(
    network: Transformer, weights: Weights, layer: int, *, folded: bool
) -> tuple[Float[Tensor, "m"], Float[Tensor, "m"]]:
    """The norm of its column of W_in, and its bias, for every neuron of a layer."""
    layer_weights = weights.layer(layer)
    assert layer_weights.W_in is not None and layer_weights.b_in is not None
    matrix, bias = upcast(layer_weights.W_in), upcast(layer_weights.b_in)
    if folded:
        norm = input_norm(network, layer, "mlp_out")
        if norm.beta is not None:
            bias = bias + norm.beta.to(matrix) @ matrix
        matrix = norm.reading(matrix)
    return matrix.norm(dim=0), bias


def _correlation(x: Float[Tensor, "l m"], y: Float[Tensor, "l m"]) -> Float[Tensor, "l"]:
    x, y = x - x.mean(1, keepdim=True), y - y.mean(1, keepdim=True)
    size = x.norm(dim=1) * y.norm(dim=1)
    return ((x * y).sum(1) / size).where(size > 0, torch.nan)
