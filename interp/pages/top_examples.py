"""The page of maximum-activating examples: contexts coloured by how a cell runs along them, one block per cell."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from interp.core.boundary import public
from interp.core.kinds import PositiveCount
from interp.core.results import in_order
from interp.core.viewer import notes_of
from interp.core.visible import harmless, visible
from interp.pages.templates import environment, own
from interp.views.writing import count, short

if TYPE_CHECKING:
    import xarray as xr

UNCOUNTED = "does not count"


@dataclass(frozen=True)
class TokenMark:
    """A token as it is written, its share of the cell's largest size in [-1, 1], and what pointing at it says."""

    text: str
    level: float
    tip: str
    chosen: bool


@dataclass(frozen=True)
class TopEntry:
    """One place of a list: its value, where it is, its context, and the key that a head attends to there."""

    value: str
    place: str
    tokens: list[TokenMark]
    key: str


@dataclass(frozen=True)
class TopCell:
    """One neuron, head or feature: its list, and the distribution that the list is the end of."""

    name: str
    facts: list[tuple[str, str]]
    entries: list[TopEntry]
    largest: str
    """The largest size of its activation in these contexts: a full shade."""


@public()
def top_examples_page(result: xr.Dataset, *, most: PositiveCount = 100) -> str:
    """A result of `interp.features.top_examples` as one HTML page that opens from disk, fetching nothing.

    Tokens are shaded by the activation of their cell, up to the largest size among the cell's own contexts: shades of
    different cells do not compare. Red is below 0. The token that made the list is underlined; pointing at a token
    gives its number. most: how many cells are drawn, the first ones; the page says how many there are.

    Raises:
        ValueError: another result.

    Example:
        >>> found = interp.features.top_examples(model, [prompt], "L1.post", cells=[3], top=1)
        >>> "neuron 3" in top_examples_page(found)
        True
    """
    if "piece" not in result:
        raise ValueError("the result of top_examples is required, got one without `piece`")
    dim = next(str(dim) for dim in result.peak.dims if dim != "rank")
    result = in_order("result", result, {dim: None, "rank": None, "offset": None, "q": None})
    shown = result.isel({dim: slice(most)})
    template = environment().get_template("top_examples.html")
    return template.render(
        css=own("report.css"),
        notes=notes_of(result),
        site=harmless(str(result.attrs["site"])),
        dim=dim.replace("_", " "),
        total=count(result.sizes[dim]),
        cells=[_cell(shown.isel({dim: i}), dim) for i in range(shown.sizes[dim])],
        all_shown=shown.sizes[dim] == result.sizes[dim],
        signed=bool((shown.activation < 0).any()),
        facts=_facts(result),
        uncounted=UNCOUNTED,
        bos=result.attrs["bos"],
        order=result.attrs["order"],
    )


def _facts(result: xr.Dataset) -> list[tuple[str, str]]:
    known = {"texts": "texts", "tokens_counted": "tokens", "rejected": "rows set aside"}
    return [(word, count(int(result.attrs[name]))) for name, word in known.items() if name in result.attrs]


def _cell(one: xr.Dataset, dim: str) -> TopCell:
    activation = one.activation.to_numpy()
    largest = float(np.nanmax(np.abs(activation), initial=0.0))
    entries = [_entry(one.isel(rank=i), largest) for i in range(one.sizes["rank"]) if int(one.row[i]) >= 0]
    value = dict(zip(one.score.values.tolist(), one.value.values.tolist(), strict=True))
    end = "max" if "max" in value else "min"
    facts = [
        ("active on", f"{100 * value['density']:.3g} % of tokens"),
        ("mean", short(value["mean"])),
    ]
    facts += [(f"{100 * float(q):g} % up to", short(float(one["quantiles"].sel(q=q)))) for q in one.q]
    facts.append((end, short(value[end])))
    return TopCell(f"{dim} {int(one[dim])}".replace("_", " "), facts, entries, short(largest))


def _entry(one: xr.Dataset, largest: float) -> TopEntry:
    key = f"attends to {visible(str(one.key_piece.item()))} at {int(one.key)}" if "key_piece" in one else ""
    return TopEntry(
        short(float(one.peak)), f"row {int(one.row)}, pos {int(one.pos)}", marked(one, largest), key
    )


def marked(one: xr.Dataset, largest: float, prefix: str = "") -> list[TokenMark]:
    """The tokens of the context of one entry, shaded up to `largest`; prefix: of the names of its variables."""
    named = (one[f"{prefix}{name}"] for name in ("piece", "activation", "tokens"))
    columns = (x.to_numpy().tolist() for x in (*named, one.offset))
    return [
        _token(piece, value, largest, offset == 0)
        for piece, value, token, offset in zip(*columns, strict=True)
        if token >= 0
    ]


def _token(piece: str, value: float, largest: float, chosen: bool) -> TokenMark:
    if math.isnan(value):
        return TokenMark(running(piece), 0.0, UNCOUNTED, chosen)
    return TokenMark(running(piece), value / largest if largest else 0.0, short(value), chosen)


def running(piece: str) -> str:
    """A token as part of a text: spaces stay spaces, line ends and what would hide become signs."""
    return "".join(c if c == " " else visible(c) for c in piece)
