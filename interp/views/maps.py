"""A map of coloured cells: the spec that figures and pages draw from."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float

from interp.views.scale import ColourScale
from interp.views.writing import numbers

UNCHANGED = "–"
"""Stands on cells in which nothing was changed or measured."""
MOST_ON_PAGE = 200
"""Cells of a map of a page up to which each shows its number; a larger one is painted: colours, numbers on hover."""
MOST_IN_FIGURE = 1_000
"""Cells of a map of a figure up to which each bears its text: 31 depths of 32 tokens."""


@dataclass(frozen=True, eq=False)
class CellMap:
    """What a map shows: numbers as colours, with a text on each cell."""

    values: Float[np.ndarray, "rows columns"]
    """The numbers; NaN where there is none."""
    scale: ColourScale
    title: str = ""
    rows: Sequence[str] = ()
    """Names of the rows; empty: their numbers."""
    columns: Sequence[str] = ()
    axes: tuple[str, str] = ("layer", "head")
    """What rows and columns are."""
    words: Sequence[Sequence[str]] | None = None
    """Texts of the cells; None: their numbers."""
    sign: bool = False
    """Whether positive numbers are written with a plus."""
    idle: Bool[np.ndarray, "rows columns"] | None = None
    """Where nothing was changed or measured, so that a number would mislead."""
    marked: Bool[np.ndarray, "rows columns"] | None = None
    """The cells that stand out."""
    wide: float = np.inf
    """From this size on a number is written without decimals."""

    @cached_property
    def texts(self) -> list[list[str]]:
        """What stands on every cell: its word or number, `UNCHANGED` where it is idle, "" where there is no number."""
        if self.words is None:
            found = numbers(self.values, sign=self.sign, wide=self.wide)
        else:
            found = [list(row) for row in self.words]
        if self.idle is not None:
            for row, column in np.argwhere(self.idle):
                found[row][column] = UNCHANGED
        return found

    @property
    def levels(self) -> Float[np.ndarray, "rows columns"]:
        """The strength of each cell's colour, as `ColourScale.levels`; 0 where nothing was changed."""
        levels = self.scale.levels(self.values)
        return levels if self.idle is None else np.where(self.idle, 0.0, levels)

    @property
    def names(self) -> tuple[list[str], list[str]]:
        """Names of the rows and of the columns."""
        rows, columns = self.values.shape
        return list(self.rows) or [*map(str, range(rows))], list(self.columns) or [*map(str, range(columns))]
