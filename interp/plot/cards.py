"""Cards: what a notebook shows of a result, a small picture of it above a few words and numbers.

HTML without script or style sheet, so that it survives every notebook, mail and converter; text is escaped.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from typing import cast

import xarray as xr
from markupsafe import Markup
from matplotlib.axes import Axes

from interp.core import viewer
from interp.core.accessor import Result
from interp.core.boundary import public
from interp.core.factored import FactoredMatrix
from interp.core.visible import harmless
from interp.plot.canvas import Sheet
from interp.runs.run import Results

WIDEST, HIGHEST = 760, 420
"""Largest picture of a card, in pixels of the page."""
DPI = 72
SHARP = 2
"""Pixels of the picture for each of the page."""

LARGE = 20_000_000
"""Numbers in the factors of a product above which its spectrum is not computed unasked."""

BOX = Markup('<div style="margin:.2em 0 .6em;font-size:90%;max-width:60em">{}</div>')
MUTED = Markup('<div style="opacity:.75">{}</div>')
NOTE = Markup('<div style="border-left:3px solid #c77700;padding-left:.5em">Note: {}</div>')
TITLE = Markup("<div><b>{}</b></div>")
PLAIN = Markup('<pre style="margin:.2em 0;white-space:pre-wrap">{}</pre>')


@public()
def drawn(
    result: object, *args: object, style: viewer.Style = "screen", width: float = 3.3, **options: object
) -> Axes:
    """The picture of a result, by the function that suits it, which takes the options (`ax` among them).

    With `style="paper"` and a `width` in inches it is made fit to be printed, as by `paper`.

    Raises:
        ValueError: what has no picture, naming what has one; and those of the function.

    Example:
        >>> ax = drawn(interp.heads(model), "previous_token")
    """
    return cast(Axes, viewer.drawn(result, *args, style=style, width=width, **options))


def png(draw: Callable[[Axes], object], *, dpi: float = DPI) -> tuple[bytes, int]:
    """A drawing as a PNG file and its width in pixels of the page; pyplot's figures are left alone."""
    sheet = Sheet(layout="constrained")
    draw(sheet.add_subplot())
    width, height = sheet.get_size_inches()
    shown = min(dpi, WIDEST / width, HIGHEST / height)
    buffer = io.BytesIO()
    sheet.savefig(buffer, format="png", dpi=shown * SHARP)
    return buffer.getvalue(), round(width * shown)


def picture(result: object) -> Markup:
    """The small picture of a result; the reason where drawing failed, nothing where there is no plot for it."""
    if viewer.PICTURES.of(result) is None:
        return Markup("")
    if isinstance(result, FactoredMatrix) and result.A.numel() + result.B.numel() > LARGE:
        return MUTED.format("no picture unasked, the factors are large: .plot()")
    try:
        data, width = png(lambda ax: viewer.drawn(result, ax=ax))
    except Exception as error:  # a display must not end in a traceback: it says why there is no picture
        return MUTED.format(harmless(f"no picture: {type(error).__name__}: {error}"))
    image = Markup('<img src="data:image/png;base64,{}" width="{}" alt="{}" style="max-width:100%">')
    return image.format(base64.b64encode(data).decode(), width, viewer.described(result))


def card(result: object) -> str:
    """The HTML of any result of this package: its picture, its name and how to read it."""
    return str(BOX.format(picture(result) + words(result)))


def words(result: object) -> Markup:
    """A result in words: how to read the numbers of a Dataset, or the text of an object."""
    if isinstance(result, xr.Dataset):
        return dataset_line(result)
    text = PLAIN.format(harmless(str(result)))
    if not isinstance(result, Results):
        return text
    return text + Markup("").join(BOX.format(picture(each) + dataset_line(each)) for each in result.values())


def dataset_line(result: xr.Dataset) -> Markup:
    """The analysis, its dims, and how to read its numbers."""
    sizes = " × ".join(f"{dim} {size}" for dim, size in result.sizes.items())
    facts = harmless(" · ".join(f"{name}: {text}" for name, text in Result(result).facts.items()))
    notes = Markup("").join(NOTE.format(harmless(text)) for text in viewer.notes_of(result))
    return TITLE.format(harmless(f"{viewer.named(result)} ({sizes})")) + notes + MUTED.format(facts)
