"""The page of a steering curve: effect and cost of each dose, layer by layer, next to random directions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from interp.core.boundary import public
from interp.core.results import check_result
from interp.core.viewer import notes_of
from interp.pages.templates import environment, own
from interp.views.writing import number, short

if TYPE_CHECKING:
    import xarray as xr

WIDTH: Final = 230
HEIGHT: Final = 150
SAYS: Final = {
    "effect": "Effect on the metric",
    "kl": "How far the next-token distribution moves (KL divergence)",
    "loss": "Price: change of the loss on other texts",
}
"""Names of the scores."""
NEEDED: Final = ("value", "low", "high", "null", "band", "p", "norm", "strength")


@dataclass(frozen=True)
class CurvePanel:
    """One layer's curve: points of SVG lines in a box of `WIDTH` by `HEIGHT`."""

    layer: str
    line: str
    band: str
    dots: list[tuple[float, float, float, float]]
    """x, y, and the ends of the interval."""


@dataclass(frozen=True)
class SteeringRow:
    """The numbers of one layer and strength."""

    layer: str
    strength: str
    value: str
    interval: str
    chance: str
    p: str
    more: tuple[str, ...]
    """Of a feature, beside random features: the band of random directions, and its p."""
    outside: bool
    """Whether the value lies outside of what directions that know nothing do."""


@dataclass(frozen=True)
class SteeringScore:
    """One score: its panels on one scale, and every number of them."""

    name: str
    title: str
    unit: str
    low: str
    high: str
    zero: float
    panels: list[CurvePanel]
    rows: list[SteeringRow]


@public()
def steering_page(result: xr.Dataset) -> str:
    """The page of `interp.causal.steering_curve`: dose curves by layer with their chance bands, and every number.

    One HTML file without script that opens from disk and fetches nothing. The panels of one score share their scale.

    Raises:
        ValueError: another result.

    Example:
        >>> each = [interp.causal.Subspace("blocks.0.hook_resid_post", torch.eye(model.cfg.d_model)[:1])]
        >>> metric = interp.logit_difference(" Mary", " John")
        >>> found = interp.causal.steering_curve(model, prompt, each, metric=metric, random=2)
        >>> steering_page(found).startswith("<!doctype html>")
        True
    """
    check_result("result", result, NEEDED, "interp.causal.steering_curve")
    some = result.sortby("strength").sel(end=["low", "high"])
    names = [str(name) for name in some.score.values]
    strengths = some.strength.to_numpy().astype(float)
    return environment().get_template("steering.html").render(
        notes=notes_of(result),
        css=own("report.css"),
        facts=[
            ("layers", str(some.sizes["layer"])),
            ("rows", str(int(some.n.max()))),
            (f"{'features' if 'feature' in some.coords else 'directions'} beside", str(some.sizes["draw"])),
        ],
        null=str(result.attrs["null"]),
        effect=str(result.attrs["effect"]),
        metric=str(result.attrs.get("metric", "the metric")),
        norms=[(_name(some, i), short(float(norm))) for i, norm in enumerate(some.norm.values)],
        lede=_lede(result),
        more="feature" in some.coords,
        ends=(short(float(strengths[0])), short(float(strengths[-1]))),
        size=(WIDTH, HEIGHT),
        scores=[_score(some, name, strengths) for name in names],
    )  # fmt: skip


def _lede(result: xr.Dataset) -> str:
    """What a dose is, in a sentence."""
    if "feature" not in result.coords:
        return "A direction is added to the stream of a layer, so many times its length."
    unit = result.attrs["strength_unit"]
    times = f"its {unit} activation" if isinstance(unit, str) else f"an activation of {short(float(unit))}"
    return f"A feature of a dictionary is moved ({result.attrs['mode']}); strength 1 is {times}."


def _name(some: xr.Dataset, i: int) -> str:
    """What a curve is called: its feature, or its layer."""
    return str(some.feature.values[i]) if "feature" in some.coords else f"layer {some.layer.values[i]}"


def _score(some: xr.Dataset, name: str, strengths: np.ndarray) -> SteeringScore:
    mine = some.sel(score=name)
    every = np.concatenate([mine[each].to_numpy().ravel() for each in ("value", "low", "high", "band")])
    low, high = min(0.0, float(np.nanmin(every))), max(0.0, float(np.nanmax(every)))
    span = (high - low) or 1.0
    along = (strengths - strengths[0]) / ((strengths[-1] - strengths[0]) or 1.0) * WIDTH

    def up(values: np.ndarray) -> np.ndarray:
        return HEIGHT * (1 - (values - low) / span)

    panels, rows = [], []
    for place, layer in enumerate(mine.layer.values):
        one = mine.sel(layer=layer)
        value = one.value.to_numpy()
        band = one.band.transpose("end", "strength").to_numpy()
        ends = [np.where(np.isnan(one[end]), value, one[end]) for end in ("low", "high")]
        outline = [*zip(along, up(band[0]), strict=True), *zip(along[::-1], up(band[1])[::-1], strict=True)]
        dots = np.stack((along, up(value), *map(up, ends)), 1).round(1).tolist()
        panels.append(
            CurvePanel(
                _name(mine, place),
                _points(list(zip(along, up(value), strict=True))),
                "" if np.isnan(band).any() else _points(outline),
                [(d[0], d[1], d[2], d[3]) for d in dots],
            )
        )
        called = str(one.feature.values) if "feature" in one.coords else str(layer)
        rows += [_row(called, one.isel(strength=i)) for i in range(len(strengths))]
    unit, title = str(mine["unit"].item()), SAYS.get(name, name)
    return SteeringScore(name, title, unit, short(low), short(high), float(up(np.zeros(1))[0]), panels, rows)


def _points(points: list[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _row(layer: str, one: xr.Dataset) -> SteeringRow:
    """A line of the table; what lies outside of the band is marked."""
    value, low, high = (float(one[name]) for name in ("value", "low", "high"))
    band = one.band.to_numpy().astype(float)
    return SteeringRow(
        layer,
        short(float(one.strength)),
        number(value, 3),
        "–" if np.isnan(low) else f"{number(low, 3)} to {number(high, 3)}",
        _ends(band),
        number(float(one.p), 3),
        _directions(one) if "feature" in one.coords else (),
        bool((value < band[0]) | (value > band[1])),
    )


def _ends(band: np.ndarray) -> str:
    return "–" if np.isnan(band).any() else f"{number(band[0], 3)} to {number(band[1], 3)}"


def _directions(one: xr.Dataset) -> tuple[str, str]:
    """The band of random directions beside a feature, and its p."""
    beside = one.sel(beside="random directions")
    return _ends(beside.bands.to_numpy().astype(float)), number(float(beside.p_values), 3)
