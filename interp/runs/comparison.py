"""A stored result in a line, and where two runs of an experiment differ most."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from interp.core.results import ESTIMATE, labelled

if TYPE_CHECKING:
    import xarray as xr

BESIDE = (*ESTIMATE[1:], "se", "p")
"""Variables that accompany an estimate: under these names next to `value`, as `x_low` next to any other variable `x`.
"""
ROWS = ("row", "prompt", "example")
"""Dims with labels that say which row of the data a value belongs to."""

MOST_WORK = 2 * 10**10
"""Most permutations times values for which the permutation test is run: about ten seconds on one core."""


@dataclass(frozen=True)
class Estimate:
    """A value and the ends of its interval; NaN where there is none."""

    value: float
    low: float = float("nan")
    high: float = float("nan")

    def __str__(self) -> str:
        if np.isnan([self.low, self.high]).all():
            return f"{self.value:.4g}"
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


@dataclass(frozen=True)
class Difference:
    """The value of one cell of a result in each of two runs."""

    variable: str
    where: str
    first: Estimate
    second: Estimate
    p: float = float("nan")
    """p of a paired permutation test over rows; NaN without a test: no equal rows, NaN values, or too many values."""
    p_adjusted: float = float("nan")
    """The p-value with all cells of the variable tested at once (largest statistic, Westfall and Young)."""

    @property
    def change(self) -> float:
        """Second minus first."""
        return self.second.value - self.first.value


@dataclass(frozen=True)
class Comparison:
    """The largest differences of two results, and sentences about what could not be compared."""

    largest: list[Difference]
    notes: list[str]


def as_dataset(value: object) -> "xr.Dataset":
    """A stored result as a Dataset: a table has one dim, its index; a tensor's dims are numbered."""
    import pandas as pd
    import xarray as xr

    if isinstance(value, xr.Dataset):
        return value
    if isinstance(value, pd.DataFrame):
        return xr.Dataset.from_dataframe(value.rename_axis(str(value.index.name or "index")))
    tensors = cast("dict[str, Tensor]", value)
    return labelled(
        "tensors", {name: ([f"{name}_{i}" for i in range(t.ndim)], t) for name, t in tensors.items()}
    )


def main_variables(result: "xr.Dataset") -> list[str]:
    """Names of the variables that are not the interval, null, error or count of another variable."""
    names = [str(name) for name in result.data_vars]
    secondary = {_variable_of(name, what) for name in names for what in BESIDE}
    return [name for name in names if name not in secondary]


def headline(result: "xr.Dataset", name: str) -> str:
    """The largest value of a variable (by size) with its interval and place, its mean and how many there are.

    Example:
        >>> import xarray as xr
        >>> headline(xr.Dataset({"score": ("head", [0.25, 0.75])}), "score")
        'largest 0.75 at head 1; mean 0.5 of 2'
    """
    values = result[name]
    if not values.size:
        return "empty"
    if values.dtype.kind == "b":
        return f"true in {int(values.sum())} of {values.size}"
    if values.dtype.kind not in "iuf":
        words, counts = np.unique(values.to_numpy().astype(str), return_counts=True)
        return f"{len(words)} different, most often {str(words[counts.argmax()])!r} ({counts.max()} of {values.size})"
    numbers = values.to_numpy().astype(float)
    if np.isnan(numbers).all():
        return f"no number in {values.size}"
    at = _places(np.asarray(np.abs(numbers)), 1)[0]
    if values.ndim == 0:
        return str(_estimate(result, name, at))
    mean, count = float(np.nanmean(numbers)), int((~np.isnan(numbers)).sum())
    return f"largest {_estimate(result, name, at)} at {_where(values, at)}; mean {mean:.4g} of {count}"


def compared(
    first: "xr.Dataset", second: "xr.Dataset", *, largest: int = 3, permutations: int = 2_000, seed: int = 0
) -> Comparison:
    """The cells of every shared variable where two results differ most, second minus first.

    A variable that kept its rows (a dim called row, prompt or example, with the same labels in both) is compared by its
    means over them, and with a paired permutation test: p for the cell alone, p_adjusted with all cells tested at once,
    which is the one to believe of a cell that was picked for being the largest. Intervals are each run's own; two that
    overlap do not show that the runs agree.
    The notes name variables that only one result has, or that differ in shape or labels.
    """
    differences, notes = [], []
    ours, theirs = main_variables(first), main_variables(second)
    for name in dict.fromkeys([*ours, *theirs]):
        if (name in ours) != (name in theirs):
            notes.append(f"{name}: only in one of the runs")
    for name in (name for name in ours if name in theirs):
        first_values, second_values = first[name], second[name]
        if reason := _incomparable(first_values, second_values):
            notes.append(f"{name}: {reason}")
            continue
        if first_values.dtype.kind not in "iufb" or second_values.dtype.kind not in "iufb":
            notes += _text_note(name, first_values, second_values)
            continue
        notes += _hole_note(name, first_values, second_values)
        if (rows := _row_dim(first_values, second_values)) is not None:
            differences += _paired_differences(
                name, first_values, second_values, rows, largest=largest, permutations=permutations, seed=seed
            )
        else:
            change = np.asarray(
                abs(second_values.to_numpy().astype(float) - first_values.to_numpy().astype(float))
            )
            differences += [
                Difference(
                    name, _where(first_values, at), _estimate(first, name, at), _estimate(second, name, at)
                )
                for at in _places(change, largest)
            ]
    return Comparison(differences, notes)


def _incomparable(first: "xr.DataArray", second: "xr.DataArray") -> str | None:
    """The reason why two variables cannot be compared cell by cell; None if they can."""
    if first.dims != second.dims or first.shape != second.shape:
        return f"{dict(first.sizes)} and {dict(second.sizes)} cannot be compared"
    for dim in first.dims:
        if (dim in first.coords) != (dim in second.coords):
            return f"only one of the runs labels {dim}"
        if dim in first.coords and not first.indexes[dim].equals(second.indexes[dim]):
            return f"the labels of {dim} differ"
    return None


def _row_dim(first: "xr.DataArray", second: "xr.DataArray") -> str | None:
    """The dim of the rows if both variables label it, else None; `_incomparable` checks that the labels are equal."""
    return next((str(d) for d in first.dims if d in ROWS and d in first.coords and d in second.coords), None)


def _paired_differences(
    name: str,
    first: "xr.DataArray",
    second: "xr.DataArray",
    rows: str,
    *,
    largest: int,
    permutations: int,
    seed: int,
) -> list[Difference]:
    """The largest differences of the means over `rows`, with p of a paired permutation test over these rows."""
    from interp.core.permutation import permutation_test

    ours, theirs = (
        torch.from_numpy(values.transpose(rows, ...).to_numpy()).double() for values in (first, second)
    )
    p = p_adjusted = torch.full(ours.shape[1:], float("nan"))
    if bool((theirs - ours).isfinite().all()) and ours.numel() * permutations <= MOST_WORK:
        tested = permutation_test(theirs, ours, paired=True, permutations=permutations, seed=seed)
        p, p_adjusted = tested.p, tested.p_adjusted
    first_mean, second_mean = ours.mean(0), theirs.mean(0)
    cells = first.isel({rows: 0}, drop=True)
    mean = f"mean of {first.sizes[rows]} {rows}s"
    return [
        Difference(
            name,
            ", ".join(filter(None, (_where(cells, at), mean))),
            Estimate(float(first_mean[at])),
            Estimate(float(second_mean[at])),
            float(p[at]),
            float(p_adjusted[at]),
        )
        for at in _places((second_mean - first_mean).abs().numpy(), largest)
    ]


def _text_note(name: str, first: "xr.DataArray", second: "xr.DataArray") -> list[str]:
    """A note on how many cells of a variable of texts differ, with the first of them; no note if none does."""
    differ = np.asarray(first.to_numpy().astype(str) != second.to_numpy().astype(str))
    if not differ.any():
        return []
    at = _places(np.asarray(differ, float), 1)[0]
    example = f"{first.to_numpy()[at]} and {second.to_numpy()[at]}" + (
        f" at {_where(first, at)}" if first.ndim else ""
    )
    return [f"{name}: {int(differ.sum())} of {differ.size} differ, such as {example}"]


def _hole_note(name: str, first: "xr.DataArray", second: "xr.DataArray") -> list[str]:
    """A note on how many cells are NaN in only one of the runs, since no difference includes them."""
    holes = int(np.sum(np.isnan(first.to_numpy().astype(float)) != np.isnan(second.to_numpy().astype(float))))
    return (
        [f"{name}: {holes} of {first.size} are numbers in one of the runs and NaN in the other"]
        if holes
        else []
    )


def _places(size: Float[np.ndarray, "..."], count: int) -> list[tuple[int, ...]]:
    """Indices of the `count` largest cells above 0, NaN taken as 0, ties in order; count=1 also takes a cell of 0."""
    flat = np.nan_to_num(size, nan=0.0).ravel()
    order = np.argsort(-flat, kind="stable")[:count]
    return [
        tuple(int(i) for i in np.unravel_index(k, size.shape)) for k in order if flat[k] > 0 or count == 1
    ]


def _variable_of(name: str, what: str) -> str:
    """The name of a variable's companion `what`, such as "low": "low" beside "value", "x_low" beside "x"."""
    return what if name == "value" else f"{name}_{what}"


def _estimate(result: "xr.Dataset", name: str, at: tuple[int, ...]) -> Estimate:
    """The value of one cell of a variable, with the ends of its interval where the result has them."""
    value = float(result[name].to_numpy()[at])
    ends = [result.get(_variable_of(name, end)) for end in ("low", "high")]
    low, high = (
        float("nan") if limit is None or limit.dims != result[name].dims else float(limit.to_numpy()[at])
        for limit in ends
    )
    return Estimate(value, low, high)


def _where(values: "xr.DataArray", at: tuple[int, ...]) -> str:
    """The cell in words, such as `layer 1, head 4`: labels of the dims that have some, else indices."""
    words = []
    for dim, i in zip(values.dims, at, strict=True):
        label = values[dim].to_numpy()[i] if dim in values.coords else i
        words.append(f"{dim} {label}")
    return ", ".join(words)
