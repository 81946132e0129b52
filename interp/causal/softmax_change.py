"""The exact change of attention patterns when single queries or keys change, summed against a gradient of the patterns.

A query decides one row of the pattern, so that all queries are recomputed at once from their new scores. A key decides
one column of the scores; the softmax renormalises every row that sees it. With a the weight of the key in a row and p
its new weight, the row changes by (p - a) (e_key - shares of the others). With m the mean of the row's gradient over
the others, by these shares, that moves the metric by (p - a) (g_key - m): no key needs a softmax of its own (Kramár et
al. 2024, arXiv:2403.00745, equations 7 to 10).
"""

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor


def row_change(
    own: Float[Tensor, "b h q k"],
    other: Float[Tensor, "b h q k"],
    gradient: Float[Tensor, "b h q k"],
    sinks: Float[Tensor, "h"] | None = None,
) -> Float[Tensor, "b h q"]:
    """What the change of every row of the pattern moves, as its scores go from `own` to `other`.

    Args:
        own, other: scores as they enter the softmax, -inf where a query does not see a key.
        gradient: d metric / d pattern.
        sinks: a further score per head whose value is zero.

    Source:
        Kramár et al. 2024, arXiv:2403.00745, equation 7.
    """
    change = _log_shares(other, sinks).exp() - _log_shares(own, sinks).exp()
    return (change * gradient).sum(-1)


def column_change(
    own: Float[Tensor, "b h q k"],
    other: Float[Tensor, "b h q k"],
    gradient: Float[Tensor, "b h q k"],
    sinks: Float[Tensor, "h"] | None = None,
) -> Float[Tensor, "b h k"]:
    """What the pattern's change moves as the scores of one key alone go from `own` to `other`, for every key.

    In one expression for all keys. The weight 1 - a of the others is summed without the key where a may be near 1, and
    all weights enter by their logarithms: a saturated softmax loses no digits, and a query that sees one key gives 0.

    Args:
        own, other, gradient, sinks: as in `row_change`.

    Source:
        Kramár et al. 2024, arXiv:2403.00745, equations 8 to 10.
    """
    hidden = own == -torch.inf
    log_a = _log_shares(own, sinks)
    a = log_a.exp()
    largest = log_a.argmax(-1, keepdim=True)  # the only key of a row whose weight may be above 1/2
    others = log_a.scatter(-1, largest, -torch.inf)
    log_rest = _log_sum(others, _log_sink_share(own, sinks))
    log_left = torch.log1p(-a).scatter(-1, largest, log_rest)  # log(1 - a)
    # mean of the gradient over the other keys, by their weights; that of a sink's zero value is 0
    mean = ((a * gradient).sum(-1, keepdim=True) - a * gradient) / (1 - a)
    shares = torch.where(others == -torch.inf, 0.0, (others - log_rest).exp())
    mean = mean.scatter(-1, largest, (shares * gradient).sum(-1, keepdim=True))
    change = _weight_change(log_a, log_left, (other - own).masked_fill(hidden, 0.0))
    return (change * (gradient - mean)).masked_fill(hidden, 0.0).sum(-2)


def _weight_change(
    log_a: Float[Tensor, "*n"], log_left: Float[Tensor, "*n"], step: Float[Tensor, "*n"]
) -> Float[Tensor, "*n"]:
    """p - a, where a key's score moves by `step` and its weight from a to p; exactly 0 where the step is 0.

    p - a = a (1 - a) (e^step - 1) / (1 - a + a e^step), with e^step or e^-step, whichever is below 1.
    """
    odds = log_a - log_left
    down = log_a.exp() * torch.expm1(step.clamp_max(0.0)) * torch.sigmoid(-odds - step)
    up = log_left.exp() * -torch.expm1(-step.clamp_min(0.0)) * torch.sigmoid(odds + step)
    return torch.where(step > 0, up, down)


def _log_total(
    scores: Float[Tensor, "b h q k"], sinks: Float[Tensor, "h"] | None
) -> Float[Tensor, "b h q 1"]:
    """Log of the softmax's denominator; 0 for a query that sees nothing."""
    total = scores.logsumexp(-1, keepdim=True)
    if sinks is not None:
        total = torch.logaddexp(total, rearrange(sinks, "h -> 1 h 1 1").to(total))
    return total.masked_fill(total == -torch.inf, 0.0)


def _log_shares(
    scores: Float[Tensor, "b h q k"], sinks: Float[Tensor, "h"] | None
) -> Float[Tensor, "b h q k"]:
    """The logarithm of the pattern."""
    return scores - _log_total(scores, sinks)


def _log_sink_share(
    scores: Float[Tensor, "b h q k"], sinks: Float[Tensor, "h"] | None
) -> Float[Tensor, "b h q 1"] | None:
    """The logarithm of what the sink takes of every row."""
    if sinks is None:
        return None
    return rearrange(sinks, "h -> 1 h 1 1").to(scores) - _log_total(scores, sinks)


def _log_sum(
    logs: Float[Tensor, "b h q k"], more: Float[Tensor, "b h q 1"] | None
) -> Float[Tensor, "b h q 1"]:
    """log of the sum of a row's weights, and of one more."""
    total = logs.logsumexp(-1, keepdim=True)
    return total if more is None else torch.logaddexp(total, more)
