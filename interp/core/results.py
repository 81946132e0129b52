"""Finished results: tensors with named dimensions become xarray, and xarray becomes tidy tables on disk.

Every result has one shape. Its dims and coordinates are words (`prompt`, `layer`, `pos`, `head`, `part`, ...); a result
that estimates something holds it as `value`, with the ends `low` and `high` of its 95 % interval, its chance level
`null` and the number of rows `n`, all over the same dims; several quantities of one kind stand along the dim `score`;
`each` holds the same per prompt. Every variable of numbers has a `unit`.

Parts that arrive in any order are merged along one fixed binary tree (`MergeTree`), so that the order changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from interp.core import late, viewer
from interp.core.boundary import public
from interp.core.damaged import IDENTIFIED, REAL, WHOLE, label_flaw
from interp.core.files import write_atomically
from interp.core.notes import note
from interp.core.stats import ANYWHERE, FEWEST, Moments
from interp.core.transfers import to_device, to_host
from interp.core.visible import harmless

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

    Labelled = TypeVar("Labelled", xr.Dataset, xr.DataArray)
else:
    Labelled = TypeVar("Labelled")


T = TypeVar("T")
PLACE_OF: dict[str, Callable[[object], tuple[int | None, int | None, str | None]]] = {}
"""Under "part", the function from a part's name to its layer, head and kind; `interp.model.parts` registers it."""


class MergeTree(Generic[T]):
    """A merge of parts 0, 1, 2, ... in any order of arrival, which keeps only the roots of complete subtrees.

    A node of level n is the merge of parts `i 2^n ... (i + 1) 2^n - 1`, computed when both halves have arrived, always
    as merge(left, right). So float sums are the same bits whether the parts come from one process or many, with or
    without a restart. For n parts in order the tree has about log2(n) nodes, and rounding errors grow as log2(n). A
    part may be None: nothing to add.
    """

    def __init__(self, merge: Callable[[T, T], T]) -> None:
        self._merge = merge
        self.nodes: dict[tuple[int, int], T | None] = {}
        """(level, index) -> merged parts."""

    def __contains__(self, part: int) -> bool:
        return any((level, part >> level) in self.nodes for level in range(64))

    def __len__(self) -> int:
        """Number of parts that have arrived."""
        return sum(1 << level for level, _ in self.nodes)

    def add(self, part: int, value: T | None) -> None:
        """Adds one part; ValueError if it was added before."""
        self.put_node(0, part, value)

    def put_node(self, level: int, index: int, value: T | None) -> None:
        """Adds a complete node that was merged elsewhere; ValueError if any of its parts was added before."""
        first = index << level
        merged_before = [first] if first in self else []
        if level:
            merged_before += [
                i << low for low, i in self.nodes if low < level and i >> (level - low) == index
            ]
        if merged_before:
            raise ValueError(f"part {min(merged_before)} was merged already")
        while (sibling := (level, index ^ 1)) in self.nodes:
            neighbour = self.nodes.pop(sibling)
            value = self._merged(neighbour, value) if index & 1 else self._merged(value, neighbour)
            level, index = level + 1, index >> 1
        self.nodes[level, index] = value

    def total(self) -> T | None:
        """The merge of all parts so far, in their order, from the last node to the first."""
        total: T | None = None
        for _, value in reversed(list(self._in_order())):
            total = self._merged(value, total)
        return total

    def _in_order(self) -> Iterator[tuple[int, T | None]]:
        """First part and value of every node, left to right."""
        starts = {index << level: value for (level, index), value in self.nodes.items()}
        yield from sorted(starts.items(), key=lambda entry: entry[0])

    def _merged(self, left: T | None, right: T | None) -> T | None:
        if left is None:
            return right
        return left if right is None else self._merge(left, right)


Coords = Mapping[str, object]
"""Labels by dim; or `(dims, values)` for a coordinate over other dims."""
Variables = Mapping[str, tuple[Sequence[str], Tensor]]
ESTIMATE = ("value", "low", "high", "null", "null_sd", "n")
"""The variables of an estimate, in the order of a table."""
NOTES = "notes"
"""The attribute that lists, in sentences, how a result differs from the request."""
ORIGIN = ("dtype", "device", "threads", "versions")
"""Attributes that say in what precision, where and by what a result was computed."""


def labelled(
    analysis: str,
    values: Variables,
    *,
    coords: Coords | None = None,
    units: str | Mapping[str, str] | None = None,
    attrs: Mapping[str, str | float | int] | None = None,
    notes: Sequence[str] = (),
) -> xr.Dataset:
    """A Dataset from `{name: (dims, tensor)}`; half precision is widened to float32, tensors move to the host.

    Args:
        analysis: name of the analysis, stored as `attrs["interp_analysis"]`, by which `result.view.plot()` finds the
            plot.
        coords: labels by dim; a dim without labels is counted from 0 (prompts are numbered by the run).
        units: unit of every variable of real numbers, or units by name; a variable without one has unit "1".
        attrs: other attributes; control characters in their texts, which xarray prints raw, become signs (`⟨U+202E⟩`).
        notes: as for `noted`.
    """
    import xarray as xr

    from interp.core import accessor  # noqa: F401 - gives every result its `.view`

    def host(value: Tensor) -> object:
        if value.is_floating_point() and value.dtype not in (torch.float32, torch.float64):
            value = value.float()
        return value.numpy()

    def unit_of(name: str, value: Tensor) -> dict[str, str]:
        if not value.is_floating_point():
            return {}
        return {"unit": units if isinstance(units, str) else (units or {}).get(name, "1")}

    on_host = to_host({name: value for name, (_, value) in values.items()})
    variables = {
        name: (tuple(dims), host(on_host[name]), unit_of(name, value))
        for name, (dims, value) in values.items()
    }
    labels = {name: _coordinate(value) for name, value in (coords or {}).items()}
    sizes = {
        dim: size for dims, value in values.values() for dim, size in zip(dims, value.shape, strict=True)
    }
    counted = {dim: range(size) for dim, size in sizes.items() if dim not in IDENTIFIED}
    about = {name: harmless(x) if isinstance(x, str) else x for name, x in (attrs or {}).items()}
    about[viewer.ANALYSIS] = analysis
    return noted(xr.Dataset(variables, coords={**counted, **labels}, attrs=about), *notes)


def origin(*results: xr.Dataset) -> dict[str, str]:
    """The attributes of `ORIGIN` that results have and agree on: those of a result that is computed from them."""
    first, *others = (result.attrs for result in results)
    return {
        name: first[name]
        for name in ORIGIN
        if name in first and all(each.get(name) == first[name] for each in others)
    }


def noted(result: xr.Dataset, *notes: str) -> xr.Dataset:
    """The result with these sentences added to `attrs["notes"]`, with a warning for each.

    Each is also given as an `interp.Note`, a warning, once per process. A sentence that is there already is not added.
    """
    if not notes:
        return result
    for text in notes:
        note(f"{viewer.named(result)}: {text}")
    return with_notes(result, notes)


def with_notes(result: xr.Dataset, notes: Sequence[str]) -> xr.Dataset:
    """The result with these sentences added to `attrs["notes"]`, without a warning: several results may share them."""
    if not notes:
        return result
    return result.assign_attrs(
        {NOTES: list(dict.fromkeys([*viewer.notes_of(result), *map(harmless, notes)]))}
    )


def check_result(what: str, result: xr.Dataset, needs: Sequence[str], giver: str) -> None:
    """Raises a ValueError that names `what`, unless it has these variables, coordinates or dims, as `giver` returns."""
    if missing := [name for name in needs if name not in result.variables and name not in result.sizes]:
        variables = ", ".join(map(str, result.variables)) or "nothing"
        raise ValueError(
            f"{what} must be a result of {giver}, which has {', '.join(missing)}, got one with {variables}"
        )


def in_order(what: str, result: Labelled, labels: Mapping[str, Iterable[object] | None]) -> Labelled:
    """The result with these dims first, in this order, and along each of them its labels in the order needed.

    A function that takes a result back reads it through this or `numbers`, so that a result which was transposed,
    sorted or reversed on its way is read as what it names, and its rows meet those of another result by name.

    Args:
        what: the name of the result in an error message.
        labels: by dim, the labels that it must have, all of them and no other, in the order needed; None: those that
            it has, ascending (of a dim without labels the order stays).

    Raises:
        ValueError: a dim that is missing, has no labels or the same one twice, or has other labels than needed.
    """
    for dim in labels:
        if dim not in result.dims:
            raise ValueError(
                WHOLE.format(what, f"without {dim!r}; it has {', '.join(map(str, result.dims))}")
            )
        unordered = (
            labels[dim] is None and dim not in result.indexes
        )  # as it is: there are no labels to go by
        if not unordered and (flaw := label_flaw(result, dim)):
            raise ValueError(WHOLE.format(what, flaw))
    known = {dim: needed for dim, needed in labels.items() if dim in result.indexes}
    places = {dim: _places(what, result.indexes[dim], dim, needed) for dim, needed in known.items()}
    moved = {dim: place for dim, place in places.items() if not np.array_equal(place, np.arange(len(place)))}
    return result.isel(moved).transpose(*labels, ...)


def numbers(
    what: str, values: xr.DataArray, dims: Sequence[str] | Mapping[str, Iterable[object] | None]
) -> Tensor:
    """The real numbers of one variable of a result, its axes in the order of these dims; whole ones in float64.

    Args:
        what: the name of the variable in an error message.
        dims: all its dims, with the labels needed along each as for `in_order`; names alone leave the entries in the
            order they have, for a function whose own result bears the same labels.

    Raises:
        ValueError: as `in_order`; other dims, or values that are no real numbers.
    """
    if set(values.dims) != set(dims):
        got = ", ".join(map(str, values.dims)) or "none"
        raise ValueError(f"{what} must be over {', '.join(dims)}, got {got}")
    if values.dtype.kind not in REAL:
        raise ValueError(f"{what} must have real numbers, got {values.dtype}")
    ordered = in_order(what, values, dims) if isinstance(dims, Mapping) else values.transpose(*dims)
    whole = (
        values.dtype.kind in "iu"
    )  # ranks, counts, or what was rounded: to be computed with like any others
    return torch.from_numpy(
        np.array(ordered.to_numpy(), dtype=np.float64 if whole else values.dtype, order="C")
    )  # copied: a reversed array has negative strides


def _places(what: str, index: pd.Index, dim: str, needed: Iterable[object] | None) -> np.ndarray:
    """The place of every label that is needed; ValueError unless the index has them, each once, and no other."""
    import pandas as pd

    if needed is None:
        try:
            return index.argsort()
        except TypeError as error:
            kinds = ", ".join(sorted({type(label).__name__ for label in index}))
            raise ValueError(f"{what} must have labels of one kind along {dim}, got {kinds}") from error
    wanted = pd.Index(list(needed))
    if len(missing := wanted.difference(index, sort=False)):
        raise ValueError(WHOLE.format(what, f"without {dim} {missing[0]}"))
    if len(foreign := index.difference(wanted, sort=False)):
        raise ValueError(
            f"{what} must have no {dim} but the {len(wanted)} it is read for, got {dim} {foreign[0]}"
        )
    return index.get_indexer(wanted)


def check_finite(what: str, values: xr.DataArray, required: int | None = None) -> None:
    """Raises a ValueError that names `what`, unless so many numbers of a result are finite; None: all."""
    if values.dtype.kind not in REAL:
        raise ValueError(f"{what} must have real numbers, got {values.dtype}")
    finite, required = int(np.isfinite(values).sum()), values.size if required is None else required
    if finite != required:
        raise ValueError(
            f"{what} must have {required} finite numbers, got {finite}: the others are NaN or infinite"
        )


def _coordinate(value: object) -> object:
    """Labels as a list; `(dims, values)` as it is."""
    if (
        isinstance(value, tuple)
        and len(value) == 2
        and isinstance(value[0], str | tuple)
        and not isinstance(value[1], str)
    ):
        return value
    assert isinstance(value, Iterable)
    return list(value)


class Score(NamedTuple):
    """One of several quantities that a result estimates over the same dims, with interval, count and chance level."""

    value: Tensor
    low: Tensor
    high: Tensor
    n: Tensor
    null: Tensor
    unit: str

    @classmethod
    def of(
        cls,
        moments: Moments,
        unit: str,
        null: Tensor | float = float("nan"),
        *,
        share: bool = False,
        fewest: int = FEWEST,
        within: tuple[float, float] = ANYWHERE,
    ) -> Score:
        """From the moments over rows; null: the chance level, NaN where there is none; others: as for `interval`."""
        low, high = moments.interval(share=share, fewest=fewest, within=within)
        chance = to_device(torch.as_tensor(null, dtype=moments.mean.dtype), moments.mean.device)
        return cls(moments.mean, low, high, moments.count(), chance.expand_as(moments.mean), unit)

    @classmethod
    def exact(cls, value: Tensor, unit: str, null: Tensor | float = float("nan")) -> Score:
        """A score that is not a mean over rows: both ends of its interval are the value, and n = 0."""
        chance, count = torch.as_tensor(null, dtype=value.dtype), torch.zeros_like(value, dtype=torch.long)
        return cls(value, value, value, count, to_device(chance, value.device).expand_as(value), unit)


def scored(
    analysis: str,
    scores: Mapping[str, Score],
    dims: Sequence[str],
    *,
    coords: Coords | None = None,
    attrs: Mapping[str, str | float | int] | None = None,
    others: Variables | None = None,
    units: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
) -> xr.Dataset:
    """A Dataset of several quantities: `value`, `low`, `high`, `null`, `n` over the dims and `score`, and their `unit`.

    Args:
        others: further variables, such as labels or indices.
        units: of those that are not over `score`.
        notes: as for `noted`.
    """
    where = (*dims, "score")
    parts = ("value", "low", "high", "null", "n")
    on_host = to_host({(name, part): getattr(s, part) for name, s in scores.items() for part in parts})
    values = {
        part: (where, torch.stack([on_host[name, part].double() for name in scores], -1))
        for part in parts[:-1]
    }
    counts = torch.stack([on_host[name, "n"] for name in scores], -1)
    listed = ("score", [score.unit for score in scores.values()])
    variables = {**values, "n": (where, counts), **(others or {})}
    of_scores = {name: "see the coordinate unit" for name, (its, _) in variables.items() if "score" in its}
    return labelled(
        analysis,
        variables,
        coords={**(coords or {}), "score": list(scores), "unit": listed},
        units={**of_scores, **(units or {})},
        attrs=attrs,
        notes=notes,
    )


def main_variable(result: xr.Dataset) -> str:
    """The variable whose cells are the rows of a result's tidy table: `value`, or the first where there is none."""
    return "value" if "value" in result else str(next(iter(result.data_vars)))


def beside_cells(result: xr.Dataset) -> list[str]:
    """The variables that are not over the cells of the main one, which its tidy table leaves out."""
    cells = set(result[main_variable(result)].dims)
    return [str(name) for name, values in result.data_vars.items() if not set(values.dims) <= cells]


@public()
def frame(result: xr.Dataset | xr.DataArray, variable: str | None = None) -> pd.DataFrame:
    """The tidy table of a result: one row per cell, its coordinates as columns, then what it estimates.

    For pandas: to sort, to filter, to join, to write as CSV.

    Next to a column `part` stand `layer` and `head` (integers, <NA> for a part in no layer or no head) and `kind`
    ("head", "mlp", "neuron", "embed", ...), so that no name has to be taken apart; columns that the result has of
    these names stay. Of parts that were changed together, `L0H1+L0H3`, the kind is "set", and the layer the one that
    they share.

    Args:
        result: a data set or one of its variables.
        variable: the variable to tabulate, such as "each" for the numbers per prompt; None: `value` (the first
            variable, where there is none) with all others over its cells, so that numbers per prompt are left out.

    Returns:
        DataFrame, a row per cell. Where cells are edges (coordinate `edge`), those that do not exist are left out, and
        the column `edge` has the others' names.

    Raises:
        KeyError: a variable that the result lacks.
        ValueError: a result without variables.

    Example:
        >>> zero, metric = interp.edits.Zero(), interp.metrics.kl_divergence()
        >>> list(frame(interp.ablate(model, prompt, "mlp", change=zero, metric=metric)))[:4]
        ['layer', 'part', 'head', 'kind']
    """
    import pandas as pd
    import xarray as xr

    if isinstance(result, xr.DataArray):
        result = result.to_dataset(name=result.name or "value")
    if variable is not None and variable not in result:
        known = ", ".join(map(str, result.data_vars))
        raise KeyError(f"this result has no variable {variable!r}; it has {known}")
    if not result.data_vars:
        raise ValueError("a result with variables is required, this one has none")
    main = variable or main_variable(result)
    cells = set(result[main].dims)
    beside = beside_cells(result)
    shown = [main] if variable else [str(name) for name in result.data_vars if name not in beside]
    first = [name for name in ESTIMATE if name in shown]
    order = [*first, *(name for name in shown if name not in first)]
    if cells:
        table = result[order].to_dataframe(dim_order=[str(dim) for dim in result[main].dims]).reset_index()
    else:  # one number
        table = pd.DataFrame({name: [result[name].item()] for name in (*result[order].coords, *order)})
    table = _with_part_columns(table, order)
    labels = [name for name in table.columns if name not in order]
    return (with_edge_names(table) if "edge" in labels else table)[[*labels, *order]]


def with_edge_names(table: pd.DataFrame) -> pd.DataFrame:
    """The table with the names of edges in its column `edge`, where that is a mask of the cells that are edges.

    Only these cells stay. A mask that was joined with another model's has no value at cells which only that one has:
    they are no edges. Any other column of this name stays, and so does a mask without senders and receivers.
    """
    named = {"sender", "receiver"} <= set(table)
    joined = named and "edge" in table and bool(table.edge.dropna().isin((True, False)).all())
    if "edge" not in table or not (table.edge.dtype == bool or joined):
        return table
    table = table[table.edge.eq(True)].reset_index(drop=True)
    if not named:
        return table
    return table.assign(edge=table.sender.astype(str) + "->" + table.receiver.astype(str))


def cells_table(result: xr.Dataset, names: Sequence[str], places: Mapping[str, np.ndarray]) -> pd.DataFrame:
    """A row per cell at these indices (by dim), with its coordinates and the variables of these names."""
    import xarray as xr

    points = {dim: xr.DataArray(place, dims="listed") for dim, place in places.items()}
    return with_edge_names(result[list(names)].isel(points).to_dataframe().reset_index(drop=True))


def strongest(result: xr.Dataset, by: str, most: int) -> pd.DataFrame:
    """The rows of `frame` at the cells where a variable is largest in size, in the order of `frame`.

    The other cells never become rows, so that a result of millions of pairs of parts costs no table of all of them.

    Args:
        by: a variable over the same dims as `value`; cells where it is NaN are left out.
        most: the number of cells; of equally large ones the first are taken.

    Returns:
        DataFrame, a row per cell; the attribute `of` counts all cells with a number.
    """
    dims = [str(dim) for dim in result[by].dims]
    size = np.abs(result[by].to_numpy()).ravel()
    chosen = np.flatnonzero(~np.isnan(size))
    known = len(chosen)
    if known > most:
        least = np.partition(size[chosen], known - most)[known - most]
        above = chosen[size[chosen] > least]
        equal = chosen[size[chosen] == least][: most - len(above)]
        chosen = np.sort(np.concatenate((above, equal)))
    places = dict(zip(dims, np.unravel_index(chosen, result[by].shape), strict=True))
    names = [str(name) for name in result.data_vars if set(result[name].dims) <= set(dims)]
    table = cells_table(result, names, places)
    table.attrs["of"] = known
    return table


def _with_part_columns(table: pd.DataFrame, values: Sequence[str]) -> pd.DataFrame:
    """The table with columns layer, head and kind after the column `part`, unless it has them already."""
    import pandas as pd

    if "part" not in table or "part" in values:
        return table
    late.fill("parts")
    place_of = {name: PLACE_OF["part"](name) for name in table.part.unique()}
    places = [place_of[name] for name in table.part]
    at = list(table.columns).index("part")
    for i, (column, dtype) in enumerate((("layer", "Int64"), ("head", "Int64"), ("kind", "str"))):
        if column not in table:
            at += 1
            table.insert(at, column, pd.Series([place[i] for place in places], table.index, dtype))
    return table


def write_tables(tables: Mapping[str, pd.DataFrame], folder: Path, *, csv: bool = True) -> list[Path]:
    """Write each table as `<name>.parquet` and, unless told otherwise, `<name>.csv` into a folder; their paths."""
    paths = []
    for name, table in tables.items():
        if csv:
            paths.append(folder / f"{name}.csv")
            write_atomically(paths[-1], partial(table.to_csv, index=False))
        paths.append(folder / f"{name}.parquet")
        # bytes of equal weight of all numbers stand together, which deflates them by a third more
        numbers = [str(column) for column in table if table[column].dtype in (np.float32, np.float64)]
        others = [str(column) for column in table if str(column) not in numbers]
        columns = {"use_dictionary": others, "use_byte_stream_split": numbers}
        write = partial(table.to_parquet, index=False, compression="zstd", compression_level=9, **columns)
        write_atomically(paths[-1], write)
    return paths
