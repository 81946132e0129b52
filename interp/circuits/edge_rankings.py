"""What a ranking of edges is worth: how well it knows a planted circuit, and how much it depends on the prompts."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from interp.causal.agreement import ranks
from interp.circuits.discovery import Rank, direction, largest, valued, worth
from interp.core.results import labelled

if TYPE_CHECKING:
    import xarray as xr


def edge_stability(
    scores: "xr.Dataset", edges: int, *, rank: Rank = "magnitude", resamples: int = 200, seed: int = 0
) -> "xr.Dataset":
    """How much the best edges depend on the prompts that scored them.

    Returns Dataset with `jaccard`, the mean over all pairs of bootstrap resamples of |A and B| / |A or B| of their best
    `edges` edges (1: always the same ones), `chance`, that of two random sets (of their expected overlap), and `kept`
    [sender, receiver], the share of resamples in which an edge is among the best; NaN where there is no edge.
    scores: with every prompt's, `edge_attribution(..., each=True)`.
    Errors: ValueError for scores without `each`, a number of edges outside 1 to all, or fewer than 2 resamples.

    Example:
        >>> from interp.circuits.edge_effects import edge_effects
        >>> pairs = torch.tensor([[5, 6, 7], [5, 7, 7]]), torch.tensor([[5, 9, 7], [5, 8, 7]])
        >>> scores = edge_effects(model, *pairs, metric=interp.logit_difference(3, 4), each=True)
        >>> float(edge_stability(scores, scores.attrs["edges"]).jaccard)
        1.0
    """
    total = scores.attrs["edges"]
    if "each" not in scores or resamples < 2:
        raise ValueError("every prompt's scores (each=True) and at least 2 resamples are required")
    if not 1 <= edges <= total:
        raise ValueError(f"1 to {total} edges are required, got {edges}")
    each, sign = torch.from_numpy(scores["each"].values), direction(scores)
    weights = resampled(len(each), resamples, np.random.default_rng(seed))[1:].to(each)
    means = torch.einsum("wb,bsr->wsr", weights, each)
    sets = torch.stack([largest(valued(one, rank, sign), edges) for one in means]).double()
    common = sets.flatten(1) @ sets.flatten(1).T
    pairs = common / (2 * edges - common)
    mean = (pairs.sum() - pairs.trace()) / (resamples * (resamples - 1))
    missing, share = torch.from_numpy(scores.score.isnull().values), edges / total
    return labelled(
        "edge_stability",
        {
            "jaccard": ((), mean),
            "chance": ((), torch.tensor(share / (2 - share))),
            "kept": (("sender", "receiver"), sets.mean(0).masked_fill(missing, torch.nan)),
        },
        coords={"sender": scores.sender.values.tolist(), "receiver": scores.receiver.values.tolist()},
        attrs={"edges": edges, "resamples": resamples, "seed": seed, "rank": rank},
    )


def edge_auroc(scores: "xr.Dataset", planted: Collection[str]) -> float:
    """The chance that a planted edge has a larger absolute score than another one, equal scores counting half.

    (R - n (n + 1) / 2) / (n m), R the sum of the n planted edges' ranks among all n + m from 1 upwards (Mann and
    Whitney 1947): the area under the curve of true against false positives.
    Errors: ValueError unless some edges are planted and some are not; KeyError for one that the table does not have.
    """
    values = torch.from_numpy(abs(scores.score).values)
    here = torch.zeros(values.shape, dtype=torch.bool)
    for edge in planted:
        sender, _, receiver = edge.partition("->")
        here[scores.indexes["sender"].get_loc(sender), scores.indexes["receiver"].get_loc(receiver)] = True
    known = ~values.isnan()
    n, m = int((here & known).sum()), int((~here & known).sum())
    if not n or not m or n < len(set(planted)):
        raise ValueError(f"planted edges among others are required, got {n} of {n + m} edges")
    total = float((ranks(values[known]) + 1)[here[known]].sum())
    return (total - n * (n + 1) / 2) / (n * m)


def recovery(tables: Sequence["xr.Dataset"], planted: Collection[str]) -> "xr.Dataset":
    """How well each table of scores knows a planted circuit: `auroc` and `top` [attribution].

    auroc: see `edge_auroc`. top: the share of the planted edges among as many largest absolute scores.
    (A dim called `method` could not be selected from: xarray's `sel` has an option of that name.)

    Example:
        >>> from interp.circuits.edge_effects import edge_effects
        >>> pairs = torch.tensor([[5, 6, 7]]), torch.tensor([[5, 9, 7]])
        >>> scores = edge_effects(model, *pairs, metric=interp.logit_difference(3, 4))
        >>> recovery([scores], ["m0->logits"]).attribution.values.tolist()
        ['exact']
    """
    found = [(edge_auroc(table, planted), _top(table, planted)) for table in tables]
    auroc, top = torch.tensor(found).T
    return labelled(
        "recovery",
        {"auroc": (("attribution",), auroc), "top": (("attribution",), top)},
        coords={"attribution": [table.attrs["method"] for table in tables]},
        attrs={"planted": len(planted)},
    )


def _top(table: "xr.Dataset", planted: Collection[str]) -> float:
    best = largest(worth(table), len(planted)).nonzero().tolist()
    names = {f"{table.sender.values[s]}->{table.receiver.values[r]}" for s, r in best}
    return len(names & set(planted)) / len(planted)


def resampled(n: int, resamples: int, dice: np.random.Generator) -> Float[Tensor, "w n"]:
    """The weight of each of n prompts: all alike, then that of bootstrap resamples; NaN for a single prompt."""
    counts = (
        dice.multinomial(n, np.full(n, 1 / n), size=resamples) if n > 1 else np.full((resamples, 1), np.nan)
    )
    return torch.from_numpy(np.concatenate((np.ones((1, n)), counts)) / n)
