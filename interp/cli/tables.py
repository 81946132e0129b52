"""Results in the terminal: tidy tables with the names of parts, and a line on how to read them."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

INDEX = ("layer", "head", "depth")
"""Coordinates that are not printed beside `part`, whose name contains them."""
TEXTS = ("token", "word", "source", "output")
"""Columns that hold texts of tokens, printed with quotes."""
WITH_INTERVALS = 4
"""Most scores side by side that are printed with their intervals."""


def lines(
    result: "xr.Dataset", *, scores: Sequence[str] = (), sort: str | None = None, most: int = 40
) -> Iterator[str]:
    """The first lines of a result's table, largest first, and lines that say what the numbers are.

    Raises:
        KeyError: scores or a column that there is not.
    """
    single = _without_single_prompt(result)
    table = (
        _table_by_score(single, _scores(single, scores))
        if _has_scores(single) and single.value.ndim > 1
        else _tidy_table(single.sel(score=_scores(single, scores)) if _has_scores(single) else single, sort)
    )
    yield _table_text(table.head(most))
    yield from _about_lines(single, scores, ends=_has_ends(table))
    if rest := _not_shown(single):
        yield f"not in this table, but with --json: {', '.join(rest)}"
    if len(table) > most:
        yield f"the first {most} of {len(table)} lines: --most prints more, --out writes all"


def over_steps(result: "xr.Dataset", scores: Sequence[str] = ()) -> Iterator[str]:
    """A line per checkpoint with the largest cell of every score, and one on where the last's best rose fastest."""
    import pandas as pd

    from interp.dynamics.checkpoints import phase_change

    single = _without_single_prompt(result)
    if "value" not in single:
        raise ValueError(
            f"checkpoints are compared by `value`, this result has {', '.join(map(str, single.data_vars))}"
        )
    names = _scores(single, scores) if _has_scores(single) else ["value"]
    rows: list[dict[str, object]] = []
    for step in single.step.values:
        row: dict[str, object] = {"step": int(step)}
        for name in names:
            values = _score_estimates(single, name).sel(step=step)
            best = values.isel(values.value.argmax(...))
            row[name] = f"{_cell_name(best)} {_cell_text(best)}"
        rows.append(row)
    yield pd.DataFrame(rows).to_string(index=False)
    if single.sizes["step"] > 1:
        series = _score_estimates(single, names[0]).value
        change = phase_change(series).isel(series.isel(step=-1).argmax(...))
        yield (
            f"{names[0]} of {_cell_name(change)}, the best at the end, rises fastest between steps "
            f"{int(change.before)} and {int(change.after)}: {float(change.rise):+.2f}"
        )
    yield from _about_lines(single, scores)


def _has_ends(table: "pd.DataFrame") -> bool:
    """Whether a printed table has ends of intervals, in columns of their own or beside the value."""
    return "low" in table or any(
        table[name].astype(str).str.contains(" [", regex=False).any() for name in table
    )


def _not_shown(result: "xr.Dataset") -> list[str]:
    """The variables over other dims than the table's, but the numbers of each prompt."""
    from interp.core.results import beside_cells

    return [name for name in beside_cells(result) if result[name].ndim and name != "each"]


def _without_single_prompt(result: "xr.Dataset") -> "xr.Dataset":
    """The result without a `prompt` dim of size 1, and then without `each`, the effects by prompt."""
    if result.sizes.get("prompt") != 1:
        return result
    single = result.isel(prompt=0).drop_vars("prompt", errors="ignore")
    return single.drop_vars("each") if "each" in single and "value" in single else single


def _has_scores(result: "xr.Dataset") -> bool:
    return "value" in result and "score" in result.value.dims


def _scores(result: "xr.Dataset", names: Sequence[str]) -> list[str]:
    """The scores to print, by default all; raises KeyError for one that the result does not have."""
    from interp.core.wording import nearest

    known = [str(name) for name in result.score.values]
    for name in names:
        if name not in known:
            raise KeyError(
                f"this result has no score {name!r}; {nearest(name, known)}; it has {', '.join(known)}"
            )
    return list(names) or known


def _score_estimates(result: "xr.Dataset", name: str) -> "xr.Dataset":
    """The variables `value`, `low` and `high` of one score."""
    estimates = result[[end for end in ("value", "low", "high") if end in result]]
    return estimates.sel(score=name) if "score" in estimates.dims else estimates


def _table_by_score(result: "xr.Dataset", names: Sequence[str]) -> "pd.DataFrame":
    """One line per cell and one column per score, the largest of the first score first."""
    import pandas as pd

    from interp.core.results import frame

    table = frame(result)
    dims = [str(dim) for dim in result.value.dims if dim != "score"]
    others = [str(name) for name, value in result.data_vars.items() if set(value.dims) == set(dims)]
    first = table.drop_duplicates(dims).set_index(dims)
    labels = [name for name in first.columns if name in result.coords and name not in ("score", "unit")]
    columns = first[labels + [name for name in others if name in first]].copy()
    by_cell = table.pivot(
        index=dims, columns="score", values=[c for c in ("value", "low", "high") if c in table]
    )
    for name in names:
        cells = by_cell.xs(name, axis=1, level="score").loc[columns.index]
        bare = len(names) > WITH_INTERVALS or "low" not in cells
        numbers = ([float(x) for x in row] for row in cells.to_numpy())
        ends = [dict(zip(cells.columns, row, strict=True)) for row in numbers]
        columns[name] = [_number(estimate["value"]) if bare else _interval(**estimate) for estimate in ends]
    order = by_cell["value"][names[0]].sort_values(ascending=False, kind="stable").index
    columns = columns.loc[order].reset_index()
    return pd.DataFrame(columns[[c for c in columns if not ("part" in columns and c in INDEX)]])


def _tidy_table(result: "xr.Dataset", sort: str | None) -> "pd.DataFrame":
    """The result as a tidy table without empty columns, sorted by `sort` or `value`, the largest line first."""
    from interp.core.results import frame
    from interp.core.wording import nearest

    table = frame(result)
    if sort is not None and sort not in table:
        columns = [str(name) for name in table]
        raise KeyError(
            f"this table has no column {sort!r}; {nearest(sort, columns)}; it has {', '.join(columns)}"
        )
    by = sort or ("value" if "value" in table else None)
    if by is not None:
        table = table.iloc[(-table[by].abs()).argsort(kind="stable")]
    elif {"rank", "pos"} <= {*table}:
        # top tokens of all positions first, the last position before the others
        first = [name for name in ("prompt", "rank", "pos") if name in table]
        table = table.sort_values(first, ascending=[name != "pos" for name in first], kind="stable")
        table = table[table.token != ""] if "token" in table else table
    known = [str(name) for name, value in result.data_vars.items() if not value.ndim]
    known += [str(name) for name in table if table[name].dtype.kind == "b" and table[name].all()]
    table = table.drop(columns=known, errors="ignore").dropna(axis=1, how="all")
    if "n" in table and (table.n <= 1).all():
        table = table.drop(columns=["n", "low", "high"], errors="ignore")
    index = INDEX if "kind" in result.coords else (*INDEX, "kind")
    return table[[name for name in table if not ("part" in table and name in index)]]


def _table_text(table: "pd.DataFrame") -> str:
    """The table as text: token texts in quotes, so that spaces show, three decimals, a point where nothing is."""
    out = table.copy()
    for name in out:
        if out[name].dtype.kind == "f":
            out[name] = [_number(value) for value in out[name]]
        elif str(name) in TEXTS:
            out[name] = out[name].map(repr)
        elif str(name).endswith("rank") and out[name].dtype.kind == "i":  # -1: of no token
            out[name] = ["." if rank < 0 else str(rank) for rank in out[name]]
    return str(out.to_string(index=False))


def _number(value: float) -> str:
    return "." if value != value else f"{value:.3f}"


def _interval(value: float, low: float, high: float) -> str:
    if value != value or low != low:
        return _number(value)
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"


def _cell_text(cell: "xr.Dataset") -> str:
    ends = {str(name): float(cell[name]) for name in cell.data_vars}
    return _interval(**ends) if "low" in ends else _number(ends["value"])


def _cell_name(cell: "xr.Dataset") -> str:
    """The name of a cell: its part, or its coordinates."""
    if "part" in cell.coords and cell.part.ndim == 0:
        return str(cell.part.item())
    inner = {str(name): at.item() for name, at in cell.coords.items() if not at.ndim}
    return ", ".join(f"{name} {at}" for name, at in inner.items() if name not in ("step", "score", "unit"))


def _agreement_texts(result: "xr.Dataset") -> Iterator[str]:
    """Every correlation of estimates with effects, and its interval where it has one."""
    for name in result.coefficient.values:
        value, low, high = (
            float(result.agreement.sel(coefficient=name, estimate=end)) for end in ("value", "low", "high")
        )
        yield f"{name} {value:.3f}" + (f" [{low:.3f}, {high:.3f}]" if low == low else "")


def _faithfulness_texts(result: "xr.Dataset") -> Iterator[str]:
    """What a circuit of features keeps of the metric, beside random ones, for every treatment of the errors."""
    for errors in result.errors.values:
        kept = result.sel(errors=errors, circuit="found")
        low, high = (float(end) for end in kept.faithfulness_ends.values)
        text = _interval(float(kept.faithfulness), low, high)
        yield f"faithfulness, errors {errors}: {text}, random features {_number(float(kept.faithfulness_null))}"


def _about_lines(result: "xr.Dataset", scores: Sequence[str], *, ends: bool = True) -> Iterator[str]:
    """Lines that say what the printed numbers are: metric values, unit, effect and, of printed `ends`, the interval."""
    attrs = result.attrs
    single = [
        f"{name} {float(x):.3f}" for name, x in result.data_vars.items() if not x.ndim and x.dtype.kind == "f"
    ]
    if single:
        yield f"{attrs.get('metric', 'metric')}: {', '.join(single)}"
    if "agreement" in result:
        yield f"agreement with patching: {', '.join(_agreement_texts(result))}"
    if "faithfulness" in result and "circuit" in result.faithfulness.dims:
        yield from _faithfulness_texts(result)
    unit = str(result.value.attrs.get("unit", "")) if "value" in result else ""
    if _has_scores(result):
        units = result.unit.sel(score=_scores(result, scores)).values
        unit = ", ".join(dict.fromkeys(map(str, units)))
    texts = [unit, *(str(attrs[name]) for name in ("effect", *["interval"] * ends) if name in attrs)]
    if {"period", "repeats", "rows"} <= attrs.keys():
        texts.append(f"{attrs['rows']} rows of {attrs['period']} x {attrs['repeats']} random tokens")
    if any(texts):
        yield "; ".join(text for text in texts if text)
