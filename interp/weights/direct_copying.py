"""Copying as behaviour: how much of what a head's output raises, when it attends to a token, is that token itself.

Olsson et al. 2022, "Copying" among the head activation evaluators. The weights' own answer is the eigenvalue score.
"""

import math
from collections.abc import Sequence

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from interp.core.precision import wide
from interp.model.parts import Part
from interp.model.transformer import Transformer
from interp.model.weights import Weights
from interp.passes.frozen import final_norm
from interp.weights.head_circuits import HeadCircuits

STEPS = 4096
"""Points of the integral that gives the chance level; its error is below 1e-6."""


def copying_scores(
    values: Sequence[Float[Tensor, "b s g e"]], tokens: Int[Tensor, "b s"], model: Transformer
) -> Float[Tensor, "b l h"]:
    """The copying score of each row and head: 1 for a head that raises only what it attends to, -1 if never that.

    values: of each layer, at each of the distinct tokens of a sample. Direct path: value W_O, the final norm's linear
    part, W_U, minus the mean over the vocabulary, ReLU. With a the rise of the attended token and S that of the whole
    sample (a included), r = a / (a + S) lies in [0, 1/2]; the score is 4 r - 1, averaged over the sample's tokens.
    0 is not chance: `chance_copying` is. A token at which nothing in the sample is raised counts as chance.
    The norm's scale cancels, and so does every other positive factor on what a head writes.
    """
    weights, circuits = Weights(model), HeadCircuits(model, folded=True)
    direction = unembedding_rows(model, tokens)
    chance = chance_copying(tokens.shape[1])
    layers = []
    for layer, value_bsge in enumerate(values):
        folded = einsum(wide(circuits.ov(Part("attn", layer)).B), direction, "h e d, b t d -> b h e t")
        value_bshe = wide(value_bsge[:, :, weights.kv_head()])
        logits = einsum(value_bshe, folded, "b s h e, b h e t -> b h s t")
        layers.append(raised_share(logits, chance).mean(-1))
    return torch.stack(layers, 1)


def unembedding_rows(model: Transformer, tokens: Int[Tensor, "*b"]) -> Float[Tensor, "*b d"]:
    """What each token's logit reads of the final stream: W_U after the norm at scale 1, less its vocabulary mean."""
    weights = Weights(model)
    columns = wide(weights.W_U.mT[tokens])
    columns = columns - weights.W_U.mean(1, dtype=columns.dtype)
    return wide(final_norm(model).back(columns))


def raised_share(logits: Float[Tensor, "*b s s"], chance: float) -> Float[Tensor, "*b s"]:
    """4 a / (a + S) - 1 of every row of logits: a the positive part of the diagonal entry, S of the whole row."""
    raised = logits.relu()
    own, total = raised.diagonal(dim1=-2, dim2=-1), raised.sum(-1)
    return torch.where(total > 0, 4 * own / (own + total) - 1, chance)


def chance_copying(n: int) -> float:
    """The expected copying score of a random head on samples of n tokens (about -0.86 for 25).

    Its logits are independent Gaussians. With a and X the positive parts of one and of the n - 1 others,
    E[a / (2 a + X)] = integral over t >= 0 of E[a exp(-2 t a)] E[exp(-t X)], both known through erfcx.
    """
    u = (torch.arange(STEPS, dtype=torch.float64) + 0.5) / STEPS
    t = u / (1 - u)
    own = 1 / math.sqrt(2 * math.pi) - t * torch.special.erfcx(math.sqrt(2) * t)
    other = 0.5 + 0.5 * torch.special.erfcx(t / math.sqrt(2))
    ratio = (own * other ** (n - 1) / (1 - u).square()).mean()
    return float(4 * ratio / (1 - 0.5**n) - 1)
