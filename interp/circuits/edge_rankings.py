"""Quality of a ranking of edges: how well it finds a planted circuit, and how much it depends on the prompts."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from interp.causal.effects import EDGE_DIMS
from interp.causal.graph import in_pass_order
from interp.core.boundary import public
from interp.core.kinds import Count, Seed
from interp.core.memory import check_memory
from interp.core.results import Score, check_finite, check_result, in_order, labelled, numbers, origin, scored
from interp.model.parts import Edge

if TYPE_CHECKING:
    import xarray as xr


Rank = Literal["magnitude", "helpful"]


@public(renamed={"edges": "top"})
def edge_stability(
    scores: xr.Dataset, top: int, *, rank: Rank = "magnitude", resamples: Count = 200, seed: Seed = 0
) -> xr.Dataset:
    """Overlap of the best edges between bootstrap resamples of the prompts that scored them.

    Args:
        scores: table of edge scores with every prompt's, from `edge_attribution(..., each=True)`.
        top: number of best edges that are compared.
        rank: by what edges are the best: "magnitude", the absolute score, or "helpful", what helps first.
        resamples: number of bootstrap resamples of the prompts.
        seed: seed of the resamples.

    Returns:
        Dataset with

        - `value`: mean over all pairs of resamples of |A and B| / |A or B| of their best `top` edges (the Jaccard
          index; 1: always the same ones).
        - `null`: that of two random sets (of their expected overlap).
        - `kept` [sender, receiver]: share of resamples in which an edge is among the best; NaN where there is no edge.
          `interp.frame(result, "kept")` has a row for each edge.

    Raises:
        ValueError: scores without `each`, a number of edges outside 1 to all, or fewer than 2 resamples.

    Example:
        >>> from interp.circuits import edge_effects
        >>> pairs = torch.tensor([[5, 6, 7], [5, 7, 7]]), torch.tensor([[5, 9, 7], [5, 8, 7]])
        >>> scores = edge_effects(model, *pairs, metric=interp.logit_difference(3, 4), each=True)
        >>> float(edge_stability(scores, scores.attrs["edges"]).value)
        1.0
    """
    scores = checked_scores("scores", scores)
    total = scores.attrs["edges"]
    if "each" not in scores or resamples < 2:
        raise ValueError("every prompt's scores (each=True) and at least 2 resamples are required")
    check_finite("each of scores", scores["each"], total * scores.sizes["prompt"])
    if not 1 <= top <= total:
        raise ValueError(f"top must be 1 to {total} edges, got {top}")
    prompt_scores = numbers("each of scores", scores["each"], ("prompt", *EDGE_DIMS))
    sign = towards(scores)
    _price_of_resamples(prompt_scores, resamples)
    weights = resampled(len(prompt_scores), resamples, np.random.default_rng(seed))[1:].to(prompt_scores)
    resample_means = torch.einsum("wb,bsr->wsr", weights, prompt_scores)
    sets = torch.stack(
        [largest(valued(mean_scores, rank, sign), top) for mean_scores in resample_means]
    ).double()
    common = sets.flatten(1) @ sets.flatten(1).T
    pairs = common / (2 * top - common)
    mean = (pairs.sum() - pairs.trace()) / (resamples * (resamples - 1))
    missing, share = _matrix(scores).isnan(), top / total
    return labelled(
        "edge_stability",
        {
            "value": ((), mean),
            "null": ((), torch.tensor(share / (2 - share), dtype=torch.float64)),
            "kept": (EDGE_DIMS, sets.mean(0).masked_fill(missing, torch.nan)),
        },
        coords={
            name: (scores[name].dims, scores[name].values)
            for name in (*EDGE_DIMS, "edge")
            if name in scores.coords
        },
        units={
            "value": "share of edges in common",
            "null": "share of edges in common",
            "kept": "share of resamples",
        },
        attrs={"top": top, "resamples": resamples, "seed": seed, "rank": rank, **origin(scores)},
    )


def _price_of_resamples(prompt_scores: Float[Tensor, "b s r"], resamples: int) -> None:
    """ValueError for more resamples than memory holds: the means and best edges of each, and all pairs of them."""
    prompts, cells = len(prompt_scores), prompt_scores[0].numel()
    size = resamples * (16 * prompts + cells * (prompt_scores.element_size() + 8)) + 24 * resamples**2
    check_memory(
        f"{resamples} resamples (edge_stability: resamples), compared in pairs", size, torch.device("cpu"),
        "fewer resamples take less",
    )  # fmt: skip


def checked_scores(what: str, scores: xr.Dataset) -> xr.Dataset:
    """The table with its prompts by number, and its senders and receivers in the order of the forward pass.

    Raises:
        ValueError: one that is no table of edge scores, with a finite one for every edge; it names `what`.
    """
    check_result(what, scores, ("sender", "receiver", "value"), "edge_attribution or edge_effects")
    check_finite(f"value of {what}", scores["value"], scores.attrs["edges"])
    prompts = {"prompt": None} if "prompt" in scores.dims else {}
    names = {dim: in_pass_order(scores[dim].to_numpy().tolist()) for dim in EDGE_DIMS}
    return in_order(what, scores, {**prompts, **names})


def _matrix(table: xr.Dataset) -> Float[Tensor, "sender receiver"]:
    """The scores of a table in the order of its own labels."""
    return numbers("scores", table["value"], EDGE_DIMS)


def edge_auroc(scores: xr.Dataset, planted: Collection[str]) -> float:
    """The chance that a planted edge has a larger absolute score than another one, equal scores counting half.

    U / (n m), U the statistic of Mann and Whitney (1947) of the n planted edges and the m others: the area under the
    curve of true against false positives.

    Raises:
        ValueError: unless some edges are planted and some are not.
        KeyError: one that the table does not have.
    """
    return _mann_whitney(scores, planted)[0]


def _mann_whitney(scores: xr.Dataset, planted: Collection[str]) -> tuple[float, float]:
    """The area `edge_auroc`, and its p-value: how often as many random edges have an area as large."""
    from scipy.stats import mannwhitneyu

    values = _matrix(scores).abs()
    is_planted = torch.zeros(values.shape, dtype=torch.bool)
    for edge in planted:
        sender, receiver = str(Edge.of(edge)).split("->")
        is_planted[scores.indexes["sender"].get_loc(sender), scores.indexes["receiver"].get_loc(receiver)] = (
            True
        )
    known = ~values.isnan()
    n, m = int((is_planted & known).sum()), int((~is_planted & known).sum())
    if not n or not m or n < len(set(planted)):
        raise ValueError(f"planted edges among others are required, got {n} of {n + m} edges")
    test = mannwhitneyu(values[is_planted & known], values[~is_planted & known], alternative="greater")
    return float(test.statistic) / (n * m), float(test.pvalue)


@public()
def recovery(tables: Sequence[xr.Dataset], planted: Collection[str]) -> xr.Dataset:
    """How well the scores of each table find a planted circuit, with p-values against random edges.

    Args:
        tables: tables of edge scores, from `edge_attribution` or `edge_effects`.
        planted: edges of the planted circuit, in any spelling.

    Returns:
        Dataset over `attribution`, the method of each table, and `score`. (A dim called `method` could not be selected
        from: xarray's `sel` has an option of that name.)

        - `value`: `auroc`, the chance that a planted edge has a larger absolute score than another one (`edge_auroc`);
          `recall`, the share of the planted edges among as many largest absolute scores. They are no means over
          prompts: `low` and `high` are the value itself, n = 0.
        - `null`: the value of random scores.
        - `p`: one-sided, how often as many edges drawn at random are found as well. For `auroc` by Mann and Whitney;
          for `recall` by the hypergeometric law, exact (a whole number of edges, so at most a twentieth of random
          circuits have p <= .05).

    Raises:
        ValueError: no table, one without scores of edges, or planted edges that are none or all of a table's.
        KeyError: a planted edge that a table does not have.

    Example:
        >>> from interp.circuits import edge_effects
        >>> pairs = torch.tensor([[5, 6, 7]]), torch.tensor([[5, 9, 7]])
        >>> scores = edge_effects(model, *pairs, metric=interp.logit_difference(3, 4))
        >>> recovery([scores], ["L0.mlp->logits"]).attribution.values.tolist()
        ['exact']
    """
    if not tables:
        raise ValueError("at least one of tables is required, got none")
    tables = [checked_scores("every one of tables", table) for table in tables]
    numbers = torch.tensor(
        [(_mann_whitney(table, planted), _recall(table, planted)) for table in tables], dtype=torch.float64
    )  # [table, score, value or p]
    chance = torch.tensor([len(planted) / table.attrs["edges"] for table in tables], dtype=torch.float64)
    return scored(
        "recovery",
        {
            "auroc": Score.exact(numbers[:, 0, 0], "probability", 0.5),
            "recall": Score.exact(numbers[:, 1, 0], "share of the planted edges", chance),
        },
        ("attribution",),
        coords={"attribution": [table.attrs["method"] for table in tables]},
        others={"p": (("attribution", "score"), numbers[..., 1])},
        attrs={"planted": len(planted), **origin(*tables)},
    )


def _recall(table: xr.Dataset, planted: Collection[str]) -> tuple[float, float]:
    """Share of the n planted edges among the n largest scores, and its p-value against n random edges."""
    from scipy.stats import hypergeom

    best = largest(worth(table), len(planted)).nonzero().tolist()
    names = {f"{table.sender.values[s]}->{table.receiver.values[r]}" for s, r in best}
    n, hits = len(planted), len(names & {str(Edge.of(edge)) for edge in planted})
    return hits / n, float(hypergeom.sf(hits - 1, table.attrs["edges"], n, n))


def resampled(n: int, resamples: int, generator: np.random.Generator) -> Float[Tensor, "w n"]:
    """Weights of n prompts: 1 / n in the first row, then one bootstrap resample per row (NaN for a single prompt)."""
    counts = (
        generator.multinomial(n, np.full(n, 1 / n), size=resamples)
        if n > 1
        else np.full((resamples, 1), np.nan)
    )
    return torch.from_numpy(np.concatenate((np.ones((1, n)), counts)) / n)


def worth(table: xr.Dataset, rank: Rank = "magnitude") -> Float[Tensor, "sender receiver"]:
    """Value by which each edge is ranked, from a table of scores; -inf where there is no edge.

    magnitude: the absolute score. helpful: the score, signed so that an edge that moves the metric towards the run
    that values come from ranks first, and one that moves it away ranks last.
    """
    return valued(_matrix(table), rank, towards(table))


def towards(table: xr.Dataset) -> int:
    """1 if the run that values come from has the higher metric, -1 if it has the lower."""
    gain = float((table.clean - table.corrupt).mean())
    if not math.isfinite(gain):
        raise ValueError(
            f"scores must have finite metrics, clean and corrupt, got a mean difference of {gain}"
        )
    return 1 if (-gain if table.attrs.get("direction") == "noise" else gain) > 0 else -1


def valued(scores: Float[Tensor, "*n"], rank: Rank, sign: int) -> Float[Tensor, "*n"]:
    """The values of `worth` for scores, given the sign from `towards` of their table."""
    values = scores.abs() if rank == "magnitude" else scores * sign
    return values.nan_to_num(nan=-torch.inf)


def largest(
    values: Float[Tensor, "sender receiver"], n: int | Sequence[int]
) -> Bool[Tensor, "*n sender receiver"]:
    """Mask of the n largest values, or of those of each of several n; ties go to the first in the graph."""
    rank = values.flatten().argsort(descending=True, stable=True).argsort()
    chosen = rank < torch.tensor(n)[..., None]
    return chosen.unflatten(-1, values.shape) & ~values.isneginf()
