"""A stored result in a line, and where runs of an experiment differ most from the first of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

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
SEED = "seed"
ROWS = ("row", "prompt", "example", SEED)
"""Dims with labels that say which row of the data a value belongs to."""

NO_ROWS = "it has no rows (row, prompt, example), and these are not several settings with the same seeds"
"""Why most single numbers have no p-value."""

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
    """The p-value with all cells of the variable tested at once, in all comparisons with the first run."""

    @property
    def change(self) -> float:
        """Second minus first."""
        return self.second.value - self.first.value


@dataclass(frozen=True)
class Comparison:
    """The largest differences of two results, and sentences about what could not be compared or tested."""

    largest: list[Difference]
    notes: list[str]
    untested: dict[str, str]
    """Variables that differ and have no p-value, and the reason."""


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
    found, values = summary(result, name), result[name]
    if not values.size:
        return "empty"
    if "true" in found:
        return f"true in {found['true']} of {values.size}"
    if "words" in found:
        return f"{found['words']} different, most often {found['word']!r} ({found['times']} of {values.size})"
    if found["largest"] is None:
        return f"no number in {values.size}"
    if values.ndim == 0:
        return str(found["largest"])
    return f"largest {found['largest']} at {found['where']}; mean {found['mean']:.4g} of {found['count']}"


def summary(result: "xr.Dataset", name: str) -> dict[str, Any]:
    """What `headline` says of a variable, by name.

    Returns:
        `size`; of numbers `largest` (an Estimate, None if none is a number), `where`, `mean` and `count`; of truth
        values how many are `true`; of texts how many `words` differ, and the most frequent `word` with its `times`.
    """
    values = result[name]
    size = {"size": values.size}
    if not values.size:
        return size
    if values.dtype.kind == "b":
        return {**size, "true": int(values.sum())}
    if values.dtype.kind not in "iuf":
        words, counts = np.unique(values.to_numpy().astype(str), return_counts=True)
        most = int(counts.argmax())
        return {**size, "words": len(words), "word": str(words[most]), "times": int(counts[most])}
    numbers = values.to_numpy().astype(float)
    count = int((~np.isnan(numbers)).sum())
    if not count:
        return {**size, "largest": None, "count": 0}
    at = _places(np.asarray(np.abs(numbers)), 1)[0]
    place = {"largest": _estimate(result, name, at), "where": _where(values, at)}
    return {**size, **place, "mean": float(np.nanmean(numbers)), "count": count}


def compared(
    first: "xr.Dataset", second: "xr.Dataset", *, largest: int = 3, permutations: int = 2_000, seed: int = 0
) -> Comparison:
    """The cells of every shared variable where two results differ most, second minus first.

    A variable that kept its rows (a dim called row, prompt, example or seed, with the same labels in both) is compared
    by its means over them, and with a paired permutation test: p for the cell alone, p_adjusted with all cells tested
    at once, which is the one to believe of a cell that was picked for being the largest. Intervals are each run's own;
    two that overlap do not show that the runs agree.
    The notes name variables that only one result has, or that differ in shape or labels.
    """
    (found,) = compared_to_first([first, second], largest=largest, permutations=permutations, seed=seed)
    return found


def compared_to_first(
    results: "Sequence[xr.Dataset]", *, largest: int = 3, permutations: int = 2_000, seed: int = 0
) -> list[Comparison]:
    """The comparison of every later result with the first, as `compared`, with p-values corrected for their number.

    Within one comparison p_adjusted is that of the largest statistic of any cell (Westfall and Young 1993). Over the
    comparisons it is corrected by `holm_over_families`: calling every cell of a variable with p_adjusted <= 0.05
    different, in whichever run, calls one or more wrongly in at most 5 % of all cases. Other variables are not
    corrected for.

    Returns:
        A comparison for each result after the first.
    """
    first, *others = results
    found = [Comparison([], [], {}) for _ in others]
    names = main_variables(first)
    for other, comparison in zip(others, found, strict=True):
        theirs = main_variables(other)
        missing = [name for name in dict.fromkeys([*names, *theirs]) if (name in names) != (name in theirs)]
        comparison.notes.extend(f"{name}: only in one of the runs" for name in missing)
    for name in names:
        cells = {
            i: _cells(name, first, other, permutations=permutations, seed=seed)
            for i, other in enumerate(others)
            if name in main_variables(other) and _are_comparable(name, first, other, found[i].notes)
        }
        tested = [i for i, each in cells.items() if each.untested is None]
        corrected = dict(zip(tested, holm_over_families([cells[i].p_adjusted for i in tested]), strict=True))
        for i, each in cells.items():
            differences = each.differences(name, corrected.get(i, each.p_adjusted), largest)
            found[i].largest.extend(differences)
            if differences and each.untested is not None:
                found[i].untested[name] = each.untested
    return found


def holm_over_families(families: Sequence[Float[np.ndarray, "..."]]) -> list[Float[np.ndarray, "..."]]:
    """P-values corrected for the number of families that they come from, those of each adjusted within it.

    In ascending order each is multiplied by the number of families that smaller ones have not exhausted. Of families
    of one value this is Holm's correction; of a single family nothing changes.

    Source:
        Holm, "A simple sequentially rejective multiple test procedure" (1979); for families: Goeman and Solari, "The
        sequential rejection principle of familywise error control" (2010).

    Example:
        >>> import numpy as np
        >>> [round(float(p), 2) for p in holm_over_families([np.array(0.01), np.array(0.04), np.array(0.03)])]
        [0.03, 0.06, 0.06]
    """
    if not families:
        return []
    sizes = [p.size for p in families]
    flat, family = np.concatenate([p.ravel() for p in families]), np.repeat(np.arange(len(sizes)), sizes)
    left, corrected, largest = np.array(sizes), np.empty_like(flat), 0.0
    for at in np.argsort(flat, kind="stable"):
        largest = corrected[at] = min(1.0, max(largest, flat[at] * np.count_nonzero(left)))
        left[family[at]] -= 1
    parts = np.split(corrected, np.cumsum(sizes)[:-1])
    return [part.reshape(p.shape) for part, p in zip(parts, families, strict=True)]


def over_seeds(results: "Sequence[xr.Dataset]", seeds: Sequence[int]) -> "tuple[xr.Dataset, list[str]]":
    """The result of runs that differ in their seed alone: numbers along `seed`, means over rows; and notes.

    The notes name the variables that are left out: texts, and what has not the same shape and labels with every seed.
    Intervals are left out too, since each is about one seed.
    """
    import xarray as xr

    notes: list[str] = []
    stacked: dict[str, xr.DataArray] = {}
    for name in dict.fromkeys(name for result in results for name in main_variables(result)):
        values = [result[name] for result in results if name in result]
        reasons = [reason for each in values[1:] if (reason := _incomparable(values[0], each)) is not None]
        if len(values) < len(results):
            notes.append(f"{name}: not with every seed")
        elif any(each.dtype.kind not in "iufb" for each in values):
            notes.append(f"{name}: texts have no mean over seeds")
        elif reasons:
            notes.append(f"{name}: over seeds, {reasons[0]}")
        else:
            means = [
                each.astype(float).mean([d for d in each.dims if d in ROWS], skipna=False) for each in values
            ]
            bare = [each.drop_vars([c for c in each.coords if c not in each.dims]) for each in means]
            stacked[name] = xr.concat(bare, xr.Variable(SEED, [*seeds]))
    return xr.Dataset(stacked), notes


@dataclass(frozen=True)
class _Cells:
    """One variable of two results, its rows averaged, and p-values of the differences."""

    first: "xr.Dataset"
    second: "xr.Dataset"
    mean: str
    """What the numbers are means of; empty: they are no means."""
    p: Float[np.ndarray, "..."]
    p_adjusted: Float[np.ndarray, "..."]
    untested: str | None
    """Why there are no p-values; None: there are."""

    def differences(self, name: str, p_adjusted: Float[np.ndarray, "..."], largest: int) -> list[Difference]:
        """The largest differences, each with its p-values."""
        ours, theirs = (run[name].to_numpy().astype(float) for run in (self.first, self.second))
        return [
            Difference(
                name,
                ", ".join(filter(None, (_where(self.first[name], at), self.mean))),
                _estimate(self.first, name, at),
                _estimate(self.second, name, at),
                float(self.p[at]),
                float(p_adjusted[at]),
            )
            for at in _places(np.asarray(np.abs(theirs - ours)), largest)
        ]


def _cells(name: str, first: "xr.Dataset", second: "xr.Dataset", *, permutations: int, seed: int) -> _Cells:
    """The cells of a variable of two results, tested over the rows that it kept in both."""
    from interp.core.permutation import permutation_test

    rows = _row_dim(first[name], second[name])
    if rows is None:
        none = np.full(first[name].shape, np.nan)
        unlabelled = [str(dim) for dim in first[name].dims if dim in ROWS]
        why = (
            f"the labels of {unlabelled[0]} are not stored, by which rows are paired"
            if unlabelled
            else NO_ROWS
        )
        return _Cells(first, second, "", none, none, why)
    ours, theirs = (
        torch.from_numpy(values.transpose(rows, ...).to_numpy()).double()
        for values in (first[name], second[name])
    )
    means = (
        first[[name]].astype(float).mean(rows, skipna=False),
        second[[name]].astype(float).mean(rows, skipna=False),
    )
    mean = f"mean of {len(ours)} {rows}s"
    none = np.full(ours.shape[1:], np.nan)
    if not ours.numel() or not bool((theirs - ours).isfinite().all()):
        return _Cells(*means, mean, none, none, "not every row has a number")
    if ours.numel() * permutations > MOST_WORK:
        return _Cells(*means, mean, none, none, "too many numbers for a permutation test")
    tested = permutation_test(theirs, ours, paired=True, permutations=permutations, seed=seed)
    return _Cells(*means, mean, tested.p.numpy(), tested.p_adjusted.numpy(), None)


def _are_comparable(name: str, first: "xr.Dataset", second: "xr.Dataset", notes: list[str]) -> bool:
    """Whether both results have numbers in the same cells; `notes` gets a line on what differs in another way."""
    ours, theirs = first[name], second[name]
    if reason := _incomparable(ours, theirs):
        notes.append(f"{name}: {reason}")
        return False
    if ours.dtype.kind not in "iufb" or theirs.dtype.kind not in "iufb":
        notes += _text_note(name, ours, theirs)
        return False
    notes += _hole_note(name, ours, theirs)
    return True


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
