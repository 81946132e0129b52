"""Pruning of heads: which ones a model's loss needs least, and the model without them.

Michel et al. 2019, "Are Sixteen Heads Really Better than One?", section 4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from interp.core.boundary import public
from interp.core.kinds import PositiveCount
from interp.lab.training.losses import logits
from interp.model.edits import Edit, Zero
from interp.model.loss import next_token_loss
from interp.model.parts import Part
from interp.model.transformer import Transformer
from interp.tasks.examples import Examples


@dataclass(frozen=True, eq=False, repr=False)
class Pruned:
    """A model without some of its heads."""

    model: Transformer
    """The model of the same parameters in which these heads write 0."""
    heads: tuple[str, ...]
    """Their names, in the order in which they were taken away."""

    def __repr__(self) -> str:
        return f"Pruned(without {', '.join(self.heads)})"


@public()
@torch.enable_grad()
def head_importance(model: Transformer, examples: Examples) -> Float[Tensor, "l h"]:
    """How much the loss of a row changes per share of a head that is taken away, by the gradient.

    |d loss / d xi| at xi = 1, xi a factor on what the head writes before W_O, the loss of a row the sum over its
    predicted tokens; the mean over rows of the absolute value, which a sum over rows would cancel.

    Args:
        model: the network.
        examples: the rows.

    Returns:
        [l, h], in nats per row, 0 or more.

    Raises:
        ValueError: rows of an encoder-decoder.

    Caveats:
        A first order says little of a head whose removal another one makes up for.

    Source:
        Michel et al. 2019, equation 2.

    Example:
        >>> rows = interp.tasks.RepeatedSequences(20, 12, 4, 5).batch(interp.tasks.Place(0, 0), 2)
        >>> list(head_importance(model.transformer, rows).shape) == [model.cfg.n_layers, model.cfg.n_heads]
        True
    """
    examples = examples.to(model.device)
    config, batch, rows = model.config, examples.batch, len(examples.batch)
    kept = torch.ones(config.n_layers, rows, config.n_heads, dtype=model.dtype, device=model.device)
    kept.requires_grad_()
    edits = [Edit(f"blocks.{layer}.attn.hook_z", _times(share)) for layer, share in enumerate(kept)]
    found = logits(model, examples, edits)
    loss = next_token_loss(found, batch.tokens, batch.keep, batch.documents).sum()
    (gradient,) = torch.autograd.grad(loss, kept)
    return gradient.abs().mean(1)


@public()
def prune_heads(
    model: Transformer, examples: Examples, count: PositiveCount, *, at_once: PositiveCount = 1
) -> Pruned:
    """The model without the heads that its loss needs least, taken away one after another.

    After every `at_once` of them the importance of the others is measured again.

    Args:
        model: the network, which stays as it is.
        examples: the rows that importance is measured on.
        count: how many heads go.
        at_once: how many go between two measurements; `count`: all by the first (Michel et al. 2019).

    Returns:
        The model in which these heads write 0, and their names.

    Raises:
        ValueError: as many heads as the model has, or more.

    See Also:
        `interp.ablate`: the effect of each head on a metric, without an approximation.

    Example:
        >>> rows = interp.tasks.RepeatedSequences(20, 12, 4, 5).batch(interp.tasks.Place(0, 0), 2)
        >>> len(prune_heads(model.transformer, rows, 2).heads)
        2
    """
    total, n_heads = model.config.n_layers * model.config.n_heads, model.config.n_heads
    if count >= total:
        raise ValueError(f"fewer heads than the model's {total} are required, got {count}")
    gone: list[int] = []  # layer * n_heads + head
    names: tuple[str, ...] = ()
    pruned = model
    while len(gone) < count:
        importance = head_importance(pruned, examples).flatten()
        importance[gone] = torch.inf
        gone += importance.argsort(stable=True)[: min(at_once, count - len(gone))].tolist()
        names = tuple(str(Part("head", *divmod(place, n_heads))) for place in gone)
        pruned = model.edited([Edit(name, Zero()) for name in names])
    return Pruned(pruned, names)


def _times(share: Float[Tensor, "b h"]) -> Callable[[Tensor], Tensor]:
    return lambda z: z * share[:, None, :, None]
