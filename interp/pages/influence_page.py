"""The page of influence: which training rows helped each query most, and which harmed it, as texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from interp.core.boundary import public
from interp.core.kinds import PositiveCount
from interp.core.results import check_result, numbers
from interp.core.viewer import notes_of
from interp.core.visible import harmless
from interp.data.batch import Batch
from interp.data.text import Text
from interp.pages.templates import environment, own
from interp.passes.observe import Model, text_of
from interp.tasks.examples import Examples
from interp.views.writing import count, number, short

if TYPE_CHECKING:
    import xarray as xr


@dataclass(frozen=True)
class TrainingLine:
    """A training row: its text, its effect as it is written, and the share of the largest one drawn as a bar."""

    number: int
    text: str
    value: str
    share: float


@dataclass(frozen=True)
class QueryRows:
    """A query and the rows at both ends."""

    number: int
    text: str
    helped: list[TrainingLine]
    harmed: list[TrainingLine]
    unlike: str
    """The share of rows that helped."""


@public()
def influence_page(
    result: xr.Dataset,
    model: Model,
    rows: Examples,
    queries: Examples,
    *,
    top: PositiveCount = 5,
    most: PositiveCount = 50,
) -> str:
    """The rows that helped and harmed each query most, by `interp.dynamics.influence`, as one HTML file without script.

    Args:
        model: whose tokens rows and queries are.
        top: how many rows at either end;
        most: how many queries are drawn, the first ones. Effects are the measure without the row minus with it, in
            the unit of the result; the bars of one query are relative to its largest effect. A row that is no help
            and no harm stands at neither end.

    Raises:
        ValueError: another result, or one of so many other rows or queries.

    Example:
        >>> task = interp.tasks.RepeatedSequences(8, 12, 3, 4)
        >>> rows, queries = (task.batch(interp.tasks.Place(0, step), 4) for step in (0, 1))
        >>> found = interp.dynamics.influence(model, rows, queries, method="dot")
        >>> influence_page(found, model, rows, queries).startswith("<!doctype html>")
        True
    """
    check_result("result", result, ("value",), "interp.dynamics.influence")
    if set(result["value"].dims) != {"row", "query"}:
        raise ValueError(f"result must have values over row and query, got {result['value'].dims}")
    sizes = (len(rows.batch), len(queries.batch))
    if (got := (result.sizes["row"], result.sizes["query"])) != sizes:
        raise ValueError(f"values of {sizes} rows and queries are required, got {got}")
    text = text_of(model)
    values = numbers("value of result", result["value"], dict.fromkeys(("row", "query"))).numpy()
    texts = _texts(rows.batch, text)
    shown = [
        _query_rows(i, query, values[:, i], texts, top)
        for i, query in enumerate(_texts(queries.batch, text)[:most])
    ]
    return environment().get_template("influence.html").render(
        notes=notes_of(result),
        css=own("report.css"),
        facts=[
            ("rows", count(sizes[0])),
            ("queries", count(sizes[1])),
            ("method", str(result.attrs.get("method", "exact"))),
        ],
        asked=shown,
        left_out=sizes[1] - len(shown),
        unit=harmless(str(result.attrs.get("unit", result.value.attrs.get("unit", "")))),
        exact="method" not in result.attrs,
    )  # fmt: skip


def _texts(batch: Batch, text: Text) -> list[str]:
    """Every row as running text, without padding."""
    kept = [tokens[keep].tolist() for tokens, keep in zip(batch.tokens, batch.real, strict=True)]
    words = text.tokenizer.decode if text.has_tokenizer else lambda ids: "".join(text.pieces(ids))
    return [harmless(words(ids)) for ids in kept]


def _query_rows(i: int, text: str, values: np.ndarray, texts: Sequence[str], top: int) -> QueryRows:
    order = np.argsort(-values, kind="stable")
    largest = float(np.abs(values).max()) or 1.0

    def line(row: int) -> TrainingLine:
        value = float(values[row])
        return TrainingLine(row, texts[row], short(value), abs(value) / largest)

    helped = [line(int(row)) for row in order[:top] if values[row] > 0]
    harmed = [line(int(row)) for row in order[::-1][:top] if values[row] < 0]
    return QueryRows(i, text, helped, harmed, number(float((values > 0).mean())))
