"""`result.view`: the plot, the tidy table and a few lines of text of a labelled result, and its card in a notebook.

xarray is slow to import, so this is imported with the first result (or with `interp.plot`), not with `interp`. In a
running IPython it also says how a Dataset is shown: ours with a picture on top, all others as xarray shows them.
"""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from interp.core import results, viewer
from interp.core.viewer import named

if TYPE_CHECKING:
    import pandas as pd

LARGEST = 5
"""Number of values that the text of a result lists."""
FIRST_NAMES, MOST_NAMES = 6, 16
"""Of more variables than `MOST_NAMES` the text of a result names the first ones only."""
NAMES = ("part", "edge", "src", "dst", "token", "word", "score", "depth", "prompt_text")
"""Coordinates that name the object of a value, shown first in the text of a result."""
COUNTED = ("layer", "head")
"""Dims that are not shown next to a name, since names such as L1H2 contain them."""
AFTER_EACH = ("depth", "pos", "rank")
"""Dims of lens results, which list the predicted next words at each depth and position."""
BY_DEPTH = ("top_prob", "target_prob", "target_rank", "entropy", "kl")
"""Variables of lens results that are shown by depth."""
FACTS = ("metric", "unit", "n", "rows", "prompts", "interval", "null", "agreement", "errors", "dtype")
"""Attributes that say how to read the numbers, in the order in which they are shown."""


@xr.register_dataset_accessor("view")  # type: ignore[no-untyped-call]
class Result:
    """The accessor `result.view` of a Dataset that an analysis of this package returned: plot, table and text.

    (xarray's own `Dataset.interp` interpolates, so the accessor cannot bear this package's name.)

    Example:
        >>> result = interp.attribute(model, prompt, " Mary", " John", parts="head")
        >>> result.view.analysis
        'attribute'
        >>> ax = result.view.plot(top=5)
    """

    def __init__(self, dataset: xr.Dataset) -> None:
        self._dataset = dataset

    @property
    def analysis(self) -> str:
        """The name of the analysis; ValueError for a Dataset of another origin."""
        name = named(self._dataset)
        if name is None:
            raise ValueError(
                f"a result of interp is required, this Dataset has no attribute {viewer.ANALYSIS!r}"
            )
        return name

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on how the result differs from the request: a sample, fewer edges, half precision, ..."""
        return viewer.notes_of(self._dataset)

    @property
    def facts(self) -> dict[str, str]:
        """How to read the numbers, as far as the result says it: metric, unit, n, interval, null, dtype, ..."""
        main = self._dataset["value"].attrs if "value" in self._dataset else {}
        attrs = {**{name: main[name] for name in ("unit",) if name in main}, **self._dataset.attrs}
        return {name: str(attrs[name]) for name in FACTS if name in attrs}

    def plot(
        self, *args: object, style: viewer.Style = "screen", width: float = 3.3, **options: object
    ) -> object:
        """The picture of this result, matplotlib's Axes, by the function of `interp.plot` that suits it.

        The function takes the options, `ax` among them. `style="paper", width=3.3` makes it fit for a column of a
        paper (`interp.plot.paper`).

        Raises:
            ValueError: a Dataset of others, or a result that has no picture; it lists what has one.
        """
        return viewer.drawn(self._dataset, *args, style=style, width=width, **options)

    def frame(self) -> "pd.DataFrame":
        """The tidy table, `interp.frame`: one row per cell, its coordinates as columns."""
        return results.frame(self._dataset)

    def __str__(self) -> str:
        sizes = ", ".join(f"{dim} {size}" for dim, size in self._dataset.sizes.items())
        facts = self.facts
        dtype = f" ({facts.pop('dtype')})" if "dtype" in facts else ""  # of the model, so their precision
        lines = [f"{self.analysis} [{sizes}]", *(f"  note: {text}" for text in self.notes)]
        lines += [f"  {name}: {text}" for name, text in facts.items()]
        names = [str(name) for name in self._dataset.data_vars]
        shown = [name for name in names if name == "value" or name not in results.ESTIMATE]
        more = f" and {len(shown) - FIRST_NAMES} others" if len(shown) > MOST_NAMES else ""
        lines.append(f"  values{dtype}: {', '.join(shown[: FIRST_NAMES if more else None])}{more}")
        return "\n".join([viewer.fitted(lines), *self._value_lines()])

    def _value_lines(self) -> list[str]:
        """Lines with the largest values and their coordinates; without `value`, the range of each variable."""
        if "value" not in self._dataset:
            return [*self._next_word_lines(), *self._range_lines()]
        value = self._dataset["value"].to_numpy().astype(float)
        size = np.nan_to_num(np.abs(value), nan=-1.0).ravel()
        known = int((size >= 0).sum())
        if not known:
            return ["  no values"]
        dims = [str(dim) for dim in self._dataset["value"].dims]
        if not dims:
            estimates = [
                name for name in results.ESTIMATE if name in self._dataset and not self._dataset[name].dims
            ]
            return [f"  {name}: {self._dataset[name].item():.4g}" for name in estimates]
        chosen, title = np.argsort(-size, kind="stable")[: min(LARGEST, known)], f"the largest of {known}"
        if "score" in dims and value.shape[dims.index("score")] > 1:  # scores differ in units
            chosen = _best_of_each_score(size.reshape(value.shape), dims.index("score"))
            title = "the largest of a score"
        table, estimates = self._cells_table(
            dict(zip(dims, np.unravel_index(chosen, value.shape), strict=True))
        )
        named = [name for name in table.columns if name in NAMES]
        alone = [dim for dim in dims if self._dataset.sizes[dim] == 1]
        variables = [*named, *estimates, *alone, *(COUNTED if named else ())]
        others = [dim for dim in dims if dim in table.columns and dim not in variables]
        shown = table[[*named, *others, *estimates]].dropna(axis=1, how="all")
        text = shown.to_string(index=False, float_format=lambda x: f"{x:.4g}", max_colwidth=24)
        title = title if len(chosen) < known else "all of it"
        return [f"  {title}:", *(f"    {line[: viewer.WIDTH - 4]}" for line in text.splitlines())]

    def _next_word_lines(self) -> list[str]:
        """Lines with the predicted next word at the first prompt's last token, by depth; none unless it is a lens."""
        dataset = self._dataset
        if (
            0 in dataset.sizes.values()
            or not set(AFTER_EACH) <= set(dataset.sizes)
            or not {"word", "top_prob"} <= set(dataset.data_vars)
        ):
            return []
        dataset = dataset.sortby([dim for dim in ("pos", "rank") if dim in dataset.coords])
        first = dataset.isel({dim: 0 for dim in ("prompt", "rank") if dim in dataset.dims})
        filled = np.flatnonzero(first.token.to_numpy() != "") if "token" in first else np.arange(1)
        if not filled.size:
            return []
        last = first.isel(pos=int(filled[-1]))
        known = bool(last["target_prob"].notnull().any()) if "target_prob" in last else False
        dims = [name for name in BY_DEPTH if name in last and (known or not name.startswith("target"))]
        table = last[["word", *dims]].to_dataframe()[["word", *dims]]
        table["word"] = table.word.map(repr)
        token = f" after {str(last.token.item())!r}" if "token" in last else ""
        place = f", the last of {len(filled)} positions" if len(filled) > 1 else ""
        whose = " of the first prompt" if dataset.sizes.get("prompt", 1) > 1 else ""
        text = table.to_string(float_format=lambda x: f"{x:.4g}", index_names=False)
        lines = (f"    {line[: viewer.WIDTH - 4]}" for line in text.splitlines())
        return [viewer.fitted([f"  the next word by depth{token}{place}{whose}:"]), *lines]

    def _cells_table(self, places: Mapping[str, NDArray[np.intp]]) -> "tuple[pd.DataFrame, list[str]]":
        """A table of the cells at these indices (by dim), and the names of its columns of `results.ESTIMATE`."""
        estimates = [name for name in results.ESTIMATE if name in self._dataset]
        estimates = [name for name in estimates if set(self._dataset[name].dims) <= set(places)]
        return results.cells_table(self._dataset, estimates, places), estimates

    def _range_lines(self) -> list[str]:
        lines = []
        for name, variable in list(self._dataset.data_vars.items())[:LARGEST]:
            if variable.dtype.kind != "f":
                continue
            known = variable.to_numpy()[np.isfinite(variable.to_numpy())]
            if known.size:
                unit = f" {variable.attrs['unit']}" if "unit" in variable.attrs else ""
                lines.append(f"  {name}: {known.min():.4g} to {known.max():.4g}{unit}")
        return lines

    __repr__ = __str__


def _best_of_each_score(size: NDArray[np.float64], axis: int) -> NDArray[np.intp]:
    """Flat index of the largest cell of each of the first `LARGEST` scores; scores without values are left out."""
    rows = np.moveaxis(size, axis, 0).reshape(size.shape[axis], -1)
    places = np.moveaxis(np.arange(size.size).reshape(size.shape), axis, 0).reshape(rows.shape)
    best = rows.argmax(1)
    score_ids = np.arange(len(rows))
    rows_with_place = score_ids[rows[score_ids, best] >= 0][:LARGEST]
    return places[rows_with_place, best[rows_with_place]]


def dataset_html(dataset: xr.Dataset) -> str:
    """The HTML of a Dataset in a notebook: xarray's own view, below a card for results of this package."""
    plain = dataset._repr_html_()
    return plain if named(dataset) is None else viewer.card(dataset) + plain


def _tell_notebook() -> None:
    """Let a running IPython show Datasets by `dataset_html`, unless another formatter is registered."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is not None:
        formatter = shell.display_formatter.formatters["text/html"]
        if xr.Dataset not in formatter.type_printers:
            formatter.for_type(xr.Dataset, dataset_html)


_tell_notebook()
