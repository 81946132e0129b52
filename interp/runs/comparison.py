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
"""Permutations times values beyond which no test is made: about ten seconds on one core."""


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
    """One cell of a result in two runs."""

    variable: str
    where: str
    first: Estimate
    second: Estimate
    p: float = float("nan")
    """Paired permutation test over rows; NaN if there was none: rows not kept or not the same, NaN, too many values."""
    p_adjusted: float = float("nan")
    """The p-value with all cells of the variable tested at once (largest statistic, Westfall and Young)."""

    @property
    def change(self) -> float:
        """Second minus first."""
        return self.second.value - self.first.value


@dataclass(frozen=True)
class Comparison:
    """The largest differences of two results, and in words what could not be compared."""

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
    """Names of the variables that are no interval, null, error or count of another one."""
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
    What only one has, or in another shape or with other labels, is named in the notes.
    """
    found, notes = [], []
    ours, theirs = main_variables(first), main_variables(second)
    for name in dict.fromkeys([*ours, *theirs]):
        if (name in ours) != (name in theirs):
            notes.append(f"{name}: only in one of the runs")
    for name in (name for name in ours if name in theirs):
        one, other = first[name], second[name]
        if reason := _incomparable(one, other):
            notes.append(f"{name}: {reason}")
            continue
        if one.dtype.kind not in "iufb" or other.dtype.kind not in "iufb":
            notes += _text_note(name, one, other)
            continue
        notes += _hole_note(name, one, other)
        if (rows := _row_dim(one, other)) is not None:
            found += _paired(name, one, other, rows, largest=largest, permutations=permutations, seed=seed)
        else:
            change = np.asarray(abs(other.to_numpy().astype(float) - one.to_numpy().astype(float)))
            found += [
                Difference(name, _where(one, at), _estimate(first, name, at), _estimate(second, name, at))
                for at in _places(change, largest)
            ]
    return Comparison(found, notes)


def _incomparable(one: "xr.DataArray", other: "xr.DataArray") -> str | None:
    if one.dims != other.dims or one.shape != other.shape:
        return f"{dict(one.sizes)} and {dict(other.sizes)} cannot be compared"
    for dim in one.dims:
        if (dim in one.coords) != (dim in other.coords):
            return f"only one of the runs labels {dim}"
        if dim in one.coords and not one.indexes[dim].equals(other.indexes[dim]):
            return f"the labels of {dim} differ"
    return None


def _row_dim(one: "xr.DataArray", other: "xr.DataArray") -> str | None:
    """The dim of rows, if it is labelled; `_incomparable` has seen that the labels are the same."""
    return next((str(d) for d in one.dims if d in ROWS and d in one.coords and d in other.coords), None)


def _paired(
    name: str,
    one: "xr.DataArray",
    other: "xr.DataArray",
    rows: str,
    *,
    largest: int,
    permutations: int,
    seed: int,
) -> list[Difference]:
    from interp.core.permutation import permutation_test

    ours, theirs = (torch.from_numpy(each.transpose(rows, ...).to_numpy()).double() for each in (one, other))
    p = p_adjusted = torch.full(ours.shape[1:], float("nan"))
    if bool((theirs - ours).isfinite().all()) and ours.numel() * permutations <= MOST_WORK:
        tested = permutation_test(theirs, ours, paired=True, permutations=permutations, seed=seed)
        p, p_adjusted = tested.p, tested.p_adjusted
    first, second = ours.mean(0), theirs.mean(0)
    cells = one.isel({rows: 0}, drop=True)
    mean = f"mean of {one.sizes[rows]} {rows}s"
    return [
        Difference(
            name,
            ", ".join(filter(None, (_where(cells, at), mean))),
            Estimate(float(first[at])),
            Estimate(float(second[at])),
            float(p[at]),
            float(p_adjusted[at]),
        )
        for at in _places((second - first).abs().numpy(), largest)
    ]


def _text_note(name: str, one: "xr.DataArray", other: "xr.DataArray") -> list[str]:
    differ = np.asarray(one.to_numpy().astype(str) != other.to_numpy().astype(str))
    if not differ.any():
        return []
    at = _places(np.asarray(differ, float), 1)[0]
    example = f"{one.to_numpy()[at]} and {other.to_numpy()[at]}" + (
        f" at {_where(one, at)}" if one.ndim else ""
    )
    return [f"{name}: {int(differ.sum())} of {differ.size} differ, such as {example}"]


def _hole_note(name: str, one: "xr.DataArray", other: "xr.DataArray") -> list[str]:
    """A number that only one run has is in no difference, so it is counted here."""
    holes = int(np.sum(np.isnan(one.to_numpy().astype(float)) != np.isnan(other.to_numpy().astype(float))))
    return (
        [f"{name}: {holes} of {one.size} are numbers in one of the runs and NaN in the other"]
        if holes
        else []
    )


def _places(size: Float[np.ndarray, "..."], count: int) -> list[tuple[int, ...]]:
    """Where the largest non-zero cells are; NaN counts as nothing, and the first of equals comes first."""
    flat = np.nan_to_num(size, nan=0.0).ravel()
    order = np.argsort(-flat, kind="stable")[:count]
    return [
        tuple(int(i) for i in np.unravel_index(k, size.shape)) for k in order if flat[k] > 0 or count == 1
    ]


def _variable_of(name: str, what: str) -> str:
    """The variable that accompanies another one under a suffix."""
    return what if name == "value" else f"{name}_{what}"


def _estimate(result: "xr.Dataset", name: str, at: tuple[int, ...]) -> Estimate:
    value = float(result[name].to_numpy()[at])
    ends = [result.get(_variable_of(name, end)) for end in ("low", "high")]
    low, high = (
        float("nan") if each is None or each.dims != result[name].dims else float(each.to_numpy()[at])
        for each in ends
    )
    return Estimate(value, low, high)


def _where(values: "xr.DataArray", at: tuple[int, ...]) -> str:
    """`layer 1, head 4`: labels where there are some, else numbers."""
    words = []
    for dim, i in zip(values.dims, at, strict=True):
        label = values[dim].to_numpy()[i] if dim in values.coords else i
        words.append(f"{dim} {label}")
    return ", ".join(words)
