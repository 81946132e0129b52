"""`result.view`: the plot, the tidy table and a few lines of text of a labelled result, and its card in a notebook.

xarray is slow to import, so this is imported with the first result (or with `interp.plot`), not with `interp`. In a
running IPython it also says how a Dataset is shown: ours with a picture on top, all others as xarray shows them.
"""

import sys
from typing import TYPE_CHECKING

import xarray as xr

from interp.core import results, viewer
from interp.core.viewer import named

if TYPE_CHECKING:
    import pandas as pd

FACTS = ("metric", "unit", "n", "rows", "prompts", "interval", "null")
"""Attributes that say how to read the numbers, in the order in which they are told."""


@xr.register_dataset_accessor("view")  # type: ignore[no-untyped-call]
class Result:
    """What `interp` knows of a Dataset that one of its analyses gave: `result.view`.

    (xarray's own `Dataset.interp` interpolates, so the accessor cannot bear this package's name.)

    Example:
        >>> found = interp.attribute(model, prompt, " Mary", " John", parts="head")
        >>> found.view.analysis
        'attribute'
        >>> ax = found.view.plot(top=5)
    """

    def __init__(self, dataset: xr.Dataset) -> None:
        self._dataset = dataset

    @property
    def analysis(self) -> str:
        """What gave the result; ValueError for a Dataset that is not ours."""
        name = named(self._dataset)
        if name is None:
            raise ValueError(
                f"a result of interp is required, this Dataset has no attribute {viewer.ANALYSIS!r}"
            )
        return name

    @property
    def facts(self) -> dict[str, str]:
        """How to read the numbers, as far as the result says it: metric, unit, n, interval, null, ..."""
        main = self._dataset["value"].attrs if "value" in self._dataset else {}
        said = {**{name: main[name] for name in ("unit",) if name in main}, **self._dataset.attrs}
        return {name: str(said[name]) for name in FACTS if name in said}

    def plot(self, *args: object, **options: object) -> object:
        """The picture of this result, matplotlib's Axes, by the function of `interp.plot` that suits it.

        The function takes the options, `ax` among them.

        Errors: ValueError for a Dataset of others, or a result that has no picture; it lists what has one.
        """
        return viewer.drawn(self._dataset, *args, **options)

    def frame(self) -> "pd.DataFrame":
        """The tidy table, `interp.frame`: one row per cell, its coordinates as columns."""
        return results.frame(self._dataset)

    def __str__(self) -> str:
        sizes = ", ".join(f"{dim} {size}" for dim, size in self._dataset.sizes.items())
        lines = [f"{self.analysis} [{sizes}]", *(f"  {name}: {text}" for name, text in self.facts.items())]
        names = [str(name) for name in self._dataset.data_vars]
        own = [name for name in names if name == "value" or name not in results.ESTIMATE]
        lines.append(f"  values: {', '.join(own)}")
        return viewer.fitted(lines)

    __repr__ = __str__


def shown(dataset: xr.Dataset) -> str:
    """A Dataset in a notebook: xarray's own view, below a card if the result is ours."""
    own = dataset._repr_html_()
    return own if named(dataset) is None else viewer.card(dataset) + own


def _tell_notebook() -> None:
    """In a running IPython, Datasets are shown by `shown` from now on, unless somebody said otherwise before."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is not None:
        formatter = shell.display_formatter.formatters["text/html"]
        if xr.Dataset not in formatter.type_printers:
            formatter.for_type(xr.Dataset, shown)


_tell_notebook()
