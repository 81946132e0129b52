"""How well estimates of influence rank what leaving rows out really does: the linear datamodeling score."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from interp.core.boundary import public
from interp.core.results import check_finite, check_result, labelled, numbers, origin
from interp.core.stats import t95

if TYPE_CHECKING:
    import xarray as xr


@public()
def lds(exact: xr.Dataset, estimate: xr.Dataset) -> xr.Dataset:
    """Linear datamodeling score: how well estimates of influence rank what leaving rows out really does.

    The predicted effect of a group is the sum of its rows' estimates; per query, Spearman's correlation of predicted
    and exact effects over the groups; then the mean over queries.

    Args:
        exact: what `interp.lab.training.leave_out` gave, or some groups of it.
        estimate: what `influence` gave for the same rows and queries.

    Returns:
        Dataset:

        - `value`: the score. 1: the estimate orders the groups as training without them does; 0 (`null`): no relation.
        - `low`, `high`: 95 % interval of the score over infinitely many queries and groups of the same kind. Its centre
          is the jackknife's estimate (ranks of few groups correlate less); its variance adds that over queries and that
          over groups (their common part counts twice, so it is a little wide), with Student's t of the smaller number.
          NaN below 3 queries or groups.
        - `n`: number of queries.
        - `each` [query]: the correlation of every query.
        - `predicted`, `exact` [group, query]: both effects, which `plot.influence` draws.

    Raises:
        ValueError: results of other functions, other rows or queries, fewer than 3 groups; a query whose exact or
            predicted effects are all equal has no correlation and is an error.

    Caveat:
        It knows nothing of other seeds of training. A score of ranks does not see the scale of an estimate.

    Source:
        Park et al. 2023, "TRAK", equation 4.

    See Also:
        `influence`: the estimates.

    Example:
        >>> task = interp.tasks.RepeatedSequences(8, 12, 3, 4)
        >>> rows, queries = (task.batch(interp.tasks.Place(0, step), 4) for step in (0, 1))
        >>> config, plan = interp.lab.training.attention_only(1, 8, 12), interp.lab.training.Training(steps=2, rows=2)
        >>> exact = interp.lab.training.leave_out(config, rows, queries, training=plan)
        >>> trained = interp.lab.training.train(config, interp.lab.training.FixedRows(rows, rows), plan).model
        >>> -1 <= float(lds(exact, interp.dynamics.influence(trained, rows, queries)).value) <= 1
        True
    """
    predicted, truth = _effects(exact, estimate)
    correlation, without = correlations(predicted.T, truth.T)
    if bool(correlation.isnan().any()):
        where = correlation.isnan().nonzero()[0].item()
        raise ValueError(
            f"effects that differ from group to group are required, those of query {where} do not"
        )
    low, high = interval(correlation, without)
    names = ("value", "low", "high", "null", "n")
    scores = (correlation.mean(), low, high, torch.tensor(0.0), torch.tensor(len(correlation)))
    return labelled(
        "lds",
        {
            **{name: ((), score) for name, score in zip(names, scores, strict=True)},
            "each": (("query",), correlation),
            "predicted": (("group", "query"), predicted),
            "exact": (("group", "query"), truth),
        },
        coords={"group": exact.group.to_numpy(), "query": exact["query"].to_numpy()},
        units={
            **dict.fromkeys((*names, "each"), "Spearman's correlation"),
            "predicted": str(estimate.value.attrs["unit"]),
            "exact": str(exact.value.attrs["unit"]),
        },
        attrs={
            "groups": len(truth),
            "method": str(estimate.attrs.get("method", "estimate")),
            **origin(estimate),
        },
    )


def _effects(exact: xr.Dataset, estimate: xr.Dataset) -> tuple[Tensor, Tensor]:
    """Predicted and exact effects of the groups, `[group, query]`, whose rows and queries meet by their labels.

    Raises:
        ValueError: as `lds`.
    """
    check_result("exact", exact, ("left_out", "value", "group", "query"), "leave_out")
    check_result("estimate", estimate, ("value", "row", "query"), "influence")
    for name, result in (("exact", exact), ("estimate", estimate)):
        check_finite(f"value of {name}", result["value"])
    for dim in ("row", "query"):
        if exact.sizes[dim] != estimate.sizes[dim]:
            raise ValueError(
                f"the same rows and queries are required, got {dict(exact.sizes)} and {dict(estimate.sizes)}"
            )
    groups, rows, queries = ({dim: exact[dim].to_numpy()} for dim in ("group", "row", "query"))
    left_out = numbers("left_out of exact", exact["left_out"], groups | rows).double()
    each_row = numbers("estimate", estimate["value"], rows | queries).double()
    return left_out @ each_row, numbers("value of exact", exact["value"], groups | queries).double()


def correlations(
    x: Float[Tensor, "c g"], y: Float[Tensor, "c g"]
) -> tuple[Float[Tensor, "c"], Float[Tensor, "c g"]]:
    """Spearman's correlation of each row of x with that of y, over all columns and without each of them.

    Args:
        x, y: [c g], queries and groups.

    Returns:
        [c] of all columns, and [c g] without each column. Equal values share the mean of their ranks; NaN where a side
        is constant.

    Raises:
        ValueError: fewer than 3 columns.
    """
    if x.shape[1] < 3:
        raise ValueError(f"at least 3 groups are required to rank, got {x.shape[1]}")
    # [c g] -> [c g g]: signs of all differences, whose sums over an axis are ranks (centred, times 2)
    ours, theirs = ((side[:, :, None] - side[:, None]).sign() for side in (x, y))
    all_groups = torch.ones(1, 1, x.shape[1], dtype=torch.bool, device=x.device)
    of_all = _correlation(ours.sum(2)[:, None], theirs.sum(2)[:, None], all_groups)[:, 0]
    others = ~torch.eye(x.shape[1], dtype=torch.bool, device=x.device)[None]
    ranks = [signs.sum(2)[:, None] - signs.mT for signs in (ours, theirs)]
    return of_all, _correlation(ranks[0], ranks[1], others)


def _correlation(
    x: Float[Tensor, "c k g"], y: Float[Tensor, "c k g"], columns: Bool[Tensor, "1 k g"]
) -> Float[Tensor, "c k"]:
    """Pearson's correlation over the columns kept; NaN for a constant side, whose ranks by signs are exactly 0."""
    count = columns.sum(2, keepdim=True)
    x, y = ((side - (side * columns).sum(2, keepdim=True) / count) * columns for side in (x, y))
    sizes = (x.square().sum(2) * y.square().sum(2)).sqrt()
    return torch.where(sizes > 0, (x * y).sum(2) / sizes, torch.nan)


def interval(
    correlation: Float[Tensor, "c"], without: Float[Tensor, "c g"]
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """95 % interval of the mean correlation over queries and groups, by a jackknife over groups.

    Its middle is the jackknife's estimate, because the mean over few groups is biased towards 0.

    Args:
        correlation: [c], of every query.
        without: [c g], of every query without each group.

    Returns:
        Its two ends, within -1 and 1.
    """
    queries, groups = without.shape
    of_groups = without.mean(0).var(correction=0) * (groups - 1)
    of_queries = correlation.var() / queries
    half = t95(min(queries, groups)) * (of_groups + of_queries).sqrt()
    middle = groups * correlation.mean() - (groups - 1) * without.mean()
    return (middle - half).clamp(-1, 1), (middle + half).clamp(-1, 1)
