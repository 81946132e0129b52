"""Results in the terminal: tidy tables with the names of parts, and a line on how to read them."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

INDEX = ("layer", "head", "depth")
"""Coordinates that the name of a part says already."""
TEXTS = ("token", "word", "source", "output")
"""Columns of texts of the vocabulary."""
WITH_INTERVALS = 4
"""Scores side by side that leave room for their intervals."""


def lines(
    result: "xr.Dataset", *, scores: Sequence[str] = (), sort: str | None = None, most: int = 40
) -> Iterator[str]:
    """The largest lines of a result's table, and what they are.

    Raises:
        KeyError: scores or a column that there is not.
    """
    one = _alone(result)
    table = _by_score(one, _scores(one, scores)) if _has_scores(one) else _tidy(one, sort)
    yield _text(table.head(most))
    yield from _about(one, scores)
    if len(table) > most:
        yield f"the first {most} of {len(table)} lines: --most prints more, --out writes all"


def over_steps(result: "xr.Dataset", scores: Sequence[str] = ()) -> Iterator[str]:
    """At every checkpoint the largest cell of every score, and where the best at the end rises fastest."""
    import pandas as pd

    from interp.dynamics.checkpoints import phase_change

    one = _alone(result)
    if "value" not in one:
        raise ValueError(
            f"checkpoints are compared by `value`, this result has {', '.join(map(str, one.data_vars))}"
        )
    names = _scores(one, scores) if _has_scores(one) else ["value"]
    rows: list[dict[str, object]] = []
    for step in one.step.values:
        row: dict[str, object] = {"step": int(step)}
        for name in names:
            values = _of_score(one, name).sel(step=step)
            best = values.isel(values.value.argmax(...))
            row[name] = f"{_place(best)} {_cell(best)}"
        rows.append(row)
    yield pd.DataFrame(rows).to_string(index=False)
    if one.sizes["step"] > 1:
        series = _of_score(one, names[0]).value
        change = phase_change(series).isel(series.isel(step=-1).argmax(...))
        yield (
            f"{names[0]} of {_place(change)}, the best at the end, rises fastest between steps "
            f"{int(change.before)} and {int(change.after)}: {float(change.rise):+.2f}"
        )
    yield from _about(one, scores)


def _alone(result: "xr.Dataset") -> "xr.Dataset":
    """The result without the dim of a single prompt, for which the effects are those of all prompts."""
    if result.sizes.get("prompt") != 1:
        return result
    one = result.isel(prompt=0).drop_vars("prompt", errors="ignore")
    return one.drop_vars("each") if "each" in one and "value" in one else one


def _has_scores(result: "xr.Dataset") -> bool:
    return "value" in result and "score" in result.value.dims


def _scores(result: "xr.Dataset", names: Sequence[str]) -> list[str]:
    """The scores to print. KeyError for one that the result does not have."""
    from interp.core.wording import nearest

    known = [str(name) for name in result.score.values]
    for name in names:
        if name not in known:
            raise KeyError(
                f"this result has no score {name!r}; {nearest(name, known)}; it has {', '.join(known)}"
            )
    return list(names) or known


def _of_score(result: "xr.Dataset", name: str) -> "xr.Dataset":
    """The estimates of one score."""
    found = result[[each for each in ("value", "low", "high") if each in result]]
    return found.sel(score=name) if "score" in found.dims else found


def _by_score(result: "xr.Dataset", names: Sequence[str]) -> "pd.DataFrame":
    """One line per cell and one column per score, the largest of the first score first."""
    import pandas as pd

    from interp.core.results import frame

    table = frame(result)
    dims = [str(dim) for dim in result.value.dims if dim != "score"]
    others = [str(name) for name, value in result.data_vars.items() if set(value.dims) == set(dims)]
    first = table.drop_duplicates(dims).set_index(dims)
    labels = [name for name in first.columns if name in result.coords and name not in ("score", "unit")]
    found = first[labels + [name for name in others if name in first]].copy()
    wide = table.pivot(
        index=dims, columns="score", values=[c for c in ("value", "low", "high") if c in table]
    )
    for name in names:
        cells = wide.xs(name, axis=1, level="score").loc[found.index]
        bare = len(names) > WITH_INTERVALS or "low" not in cells
        every = ([float(x) for x in row] for row in cells.to_numpy())
        ends = [dict(zip(cells.columns, row, strict=True)) for row in every]
        found[name] = [_number(each["value"]) if bare else _interval(**each) for each in ends]
    order = wide["value"][names[0]].sort_values(ascending=False, kind="stable").index
    found = found.loc[order].reset_index()
    return pd.DataFrame(found[[c for c in found if not ("part" in found and c in INDEX)]])


def _tidy(result: "xr.Dataset", sort: str | None) -> "pd.DataFrame":
    """The tidy table, columns without a number left out, the largest line first."""
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
    elif {"rank", "pos"} <= {*table}:  # the first words everywhere, and what comes next before all
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


def _text(table: "pd.DataFrame") -> str:
    """The table with texts quoted, so that spaces are seen, and numbers of three decimals."""
    out = table.copy()
    for name in out:
        if out[name].dtype.kind == "f":
            out[name] = [_number(value) for value in out[name]]
        elif str(name) in TEXTS:
            out[name] = out[name].map(repr)
    return str(out.to_string(index=False))


def _number(value: float) -> str:
    return "." if value != value else f"{value:.3f}"


def _interval(value: float, low: float, high: float) -> str:
    return "." if value != value else f"{value:.2f} [{low:.2f}, {high:.2f}]"


def _cell(found: "xr.Dataset") -> str:
    ends = {str(name): float(found[name]) for name in found.data_vars}
    return _interval(**ends) if "low" in ends else _number(ends["value"])


def _place(found: "xr.Dataset") -> str:
    """The name of a cell: its part, or its coordinates."""
    if "part" in found.coords and found.part.ndim == 0:
        return str(found.part.item())
    inner = {str(name): at.item() for name, at in found.coords.items() if not at.ndim}
    return ", ".join(f"{name} {at}" for name, at in inner.items() if name not in ("step", "score", "unit"))


def _agreements(result: "xr.Dataset") -> Iterator[str]:
    """Every correlation of estimates with effects, and its interval where it has one."""
    for name in result.coefficient.values:
        value, low, high = (
            float(result.agreement.sel(coefficient=name, estimate=end)) for end in ("value", "low", "high")
        )
        yield f"{name} {value:.3f}" + (f" [{low:.3f}, {high:.3f}]" if low == low else "")


def _about(result: "xr.Dataset", scores: Sequence[str]) -> Iterator[str]:
    """Lines that say which numbers these are, and of which runs."""
    attrs = result.attrs
    single = [
        f"{name} {float(x):.3f}" for name, x in result.data_vars.items() if not x.ndim and x.dtype.kind == "f"
    ]
    if single:
        yield f"{attrs.get('metric', 'metric')}: {', '.join(single)}"
    if "agreement" in result:
        yield f"agreement with patching: {', '.join(_agreements(result))}"
    unit = str(result.value.attrs.get("unit", "")) if "value" in result else ""
    if _has_scores(result):
        units = result.unit.sel(score=_scores(result, scores)).values
        unit = ", ".join(dict.fromkeys(map(str, units)))
    told = [unit, *(str(attrs[name]) for name in ("effect", "interval") if name in attrs)]
    if {"period", "repeats", "rows"} <= attrs.keys():
        told.append(f"{attrs['rows']} rows of {attrs['period']} x {attrs['repeats']} random tokens")
    if any(told):
        yield "; ".join(text for text in told if text)
