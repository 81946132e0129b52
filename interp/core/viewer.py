"""The one place where a result reaches the code that draws it, which stands to the right of everything here.

Results are made everywhere, so what they share (`.plot()`, a card in a notebook) must be known to `core`; drawing needs
matplotlib and `interp.plot`, which `core` knows nothing of. They are imported when somebody looks, not before.
"""

import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes  # also for the accessor

WIDTH = 80
"""Columns of a plain text form."""


class Shown:
    """Something of our own that a notebook shows as a card: its text, below a picture if there is one."""

    def _repr_html_(self) -> str:
        return card(self)


class Viewable(Shown):
    """A result of our own, not xarray's, that has a picture: `.plot()` draws it."""

    def plot(self, *args: object, **options: object) -> "Axes":
        """The picture of this result, by the function of `interp.plot` that suits it, which takes the options."""
        return drawn(self, *args, **options)


def fitted(lines: Iterable[str]) -> str:
    """The lines as one text of at most 80 columns, what does not fit on the next line."""
    return "\n".join(textwrap.fill(line, WIDTH, subsequent_indent="    ") for line in lines)


def drawn(result: object, *args: object, **options: object) -> "Axes":
    """The plot of a result; ValueError naming what can be drawn, for one that has none."""
    from interp.plot import choice

    return choice.drawn(result, *args, **options)


def card(result: object) -> str:
    """HTML: a small picture of a result, what it is, and its numbers."""
    from interp.plot import cards

    return cards.card(result)
