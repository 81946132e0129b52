"""Cards: what a notebook shows of a result, a small picture of it above a few words and numbers.

HTML without script or style sheet, so that it survives every notebook, mail and converter; text is escaped.
"""

import base64
import io
from collections.abc import Callable, Iterable

import xarray as xr
from markupsafe import Markup
from matplotlib.axes import Axes

from interp.analyses.backward_lens import BackwardLens
from interp.analyses.edge_circuit import Circuit
from interp.analyses.verify import Contract
from interp.core.accessor import Result, named
from interp.plot import choice
from interp.plot.canvas import Sheet

WIDEST, HIGHEST = 560, 400
"""Largest picture of a card, in pixels of the page."""
DPI = 72
SHARP = 2
"""Pixels of the picture for each of the page."""
ROWS = 8
"""Rows of a card's table; more are counted."""

BOX = Markup('<div style="margin:.2em 0 .6em;font-size:90%;max-width:60em">{}</div>')
MUTED = Markup('<div style="opacity:.75">{}</div>')
CELL = Markup('<td style="text-align:left;padding:.1em .8em .1em 0">{}</td>')


def png(draw: Callable[[Axes], object], *, dpi: float = DPI) -> tuple[bytes, int]:
    """What `draw` draws as a PNG file and its width in pixels of the page; pyplot's figures are left alone."""
    sheet = Sheet(layout="constrained")
    draw(sheet.add_subplot())
    width, height = sheet.get_size_inches()
    shown = min(dpi, WIDEST / width, HIGHEST / height)
    held = io.BytesIO()
    sheet.savefig(held, format="png", dpi=shown * SHARP)
    return held.getvalue(), round(width * shown)


def picture(result: object) -> Markup:
    """The small picture of a result; the reason where drawing failed, nothing where there is no plot for it."""
    if choice.draw_of(result) is None:
        return Markup("")
    try:
        data, width = png(lambda ax: choice.drawn(result, ax=ax))
    except Exception as error:  # a display must not end in a traceback: it says why there is no picture
        return MUTED.format(f"no picture: {type(error).__name__}: {error}")
    image = Markup('<img src="data:image/png;base64,{}" width="{}" alt="{}" style="max-width:100%">')
    return image.format(base64.b64encode(data).decode(), width, choice.described(result))


def card(result: object) -> str:
    """The HTML of any result of ours: its picture, its name and how to read it."""
    return BOX.format(picture(result) + words(result))


def words(result: object) -> Markup:
    """What a result is: in a line for a Dataset, with its rows for an object that is a table."""
    if isinstance(result, xr.Dataset):
        return dataset_line(result)
    if isinstance(result, Contract):
        rows = [(_mark(x.passed), x.claim, _error(x.error, x.allowed), x.note) for x in result.lines]
        head = f"{result.model}: {'every line holds' if result.passed else 'BROKEN'}"
        return titled(head, table(rows, most=len(rows)))
    if isinstance(result, Circuit):
        first, *facts = str(result).splitlines()
        largest = sorted(result.scores.items(), key=lambda pair: -abs(pair[1]))
        note = facts[0].strip() if result.protocol else ""
        return titled(first, note, table([(edge, f"{score:+.4g}") for edge, score in largest]))
    if isinstance(result, BackwardLens):
        return titled(repr(result), "one step towards the target, read through the vocabulary: .table()")
    return titled(repr(result))


def dataset_line(result: xr.Dataset) -> Markup:
    """The analysis, its dims, and how to read its numbers."""
    sizes = " × ".join(f"{dim} {size}" for dim, size in result.sizes.items())
    facts = " · ".join(f"{name}: {text}" for name, text in Result(result).facts.items())
    return titled(f"{named(result)} ({sizes})", facts)


def titled(title: str, *parts: str) -> Markup:
    """A title with what belongs to it below."""
    return Markup("<div><b>{}</b></div>").format(title) + Markup("").join(
        part if isinstance(part, Markup) else MUTED.format(part) for part in parts if part
    )


def table(rows: Iterable[Iterable[object]], *, most: int = ROWS) -> Markup:
    """A small table of text; rows after the first `most` are counted."""
    every = [Markup("<tr>{}</tr>").format(Markup("").join(CELL.format(cell) for cell in row)) for row in rows]
    body = Markup('<table style="margin:.2em 0">{}</table>').format(Markup("").join(every[:most]))
    return body + (MUTED.format(f"... and {len(every) - most} more") if len(every) > most else "")


def _mark(passed: bool | None) -> str:
    return {True: "ok", False: "RED", None: "–"}[passed]


def _error(error: float | None, allowed: float) -> str:
    return "" if error is None else f"{error:.1e} ≤ {allowed:.0e}" if error <= allowed else f"{error:.1e} > {allowed:.0e}"
