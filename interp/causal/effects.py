"""How far a metric moves under interventions: the one table that every causal question returns.

An effect is metric(with the intervention) - metric(the same run without it), always: negative where what was taken away
held the metric up, positive where what was put in raised it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from interp.core.results import labelled
from interp.core.stats import Means, Moments, Partial, Rows
from interp.data.batch import Batch
from interp.data.text import Text
from interp.model.sites import DIMS
from interp.model.tap import Trace
from interp.model.transformer import Transformer
from interp.passes.analysis import Analysis, NotFiniteError
from interp.passes.answers import Posed
from interp.passes.metrics import Metric
from interp.passes.observe import Subject
from interp.passes.sweep import Sweep
from interp.passes.variants import Variant

if TYPE_CHECKING:
    import xarray as xr

SIGN = "metric with the intervention minus metric of the same run without it"
COLUMN_DIMS = {"pos", "query", "key", "source"}
"""The dims that run over columns, so that they require prompts of one length."""


@dataclass(frozen=True, eq=False)
class Measured:
    """What the interventions of a question do to the metric of some prompts."""

    effect: Float[Tensor, "b ..."]
    """Per prompt and cell."""
    changed: Bool[Tensor, "b ..."]
    """Whether the intervention changed anything that can reach the metric."""
    runs: Mapping[str, Float[Tensor, "b"]]
    """The metric of the runs without an intervention, by name."""


Measure = Callable[[Transformer, Batch], Measured]
"""From a model and some prompts (with their corrupted ones, where the question compares two runs)."""


@dataclass(frozen=True, eq=False)
class Table:
    """How the effects of one question are labelled."""

    name: str
    dims: tuple[str, ...]
    """What tells the cells apart, in the order of the effects' axes."""
    coords: Mapping[str, object]
    """Labels by dim, as far as they are known beforehand; positions are counted."""
    metric: Metric
    text: Text
    attrs: Mapping[str, str | int | float] = field(default_factory=dict)


def causal(
    model: Subject, table: Table, measure: Measure, *, each: bool = True, pairs: bool = False
) -> Analysis:
    """The analysis of a causal question: sweeps per batch, and the one table of effects.

    each: keep every prompt's effects; otherwise only their moments, for data of any size.
    """
    posed = Posed.of(model.text, table.metric.answer, table.metric.wrong)
    return Analysis(
        table.name,
        partial(_compute, measure=measure, table=table),
        Rows if each else Means,
        partial(_finish, table=table),
        pose=posed,
        pairs=pairs,
        rows=None if posed is None else posed.rows,
    )


def swept(
    model: Transformer,
    batch: Batch,
    metric: Metric,
    variants: Sequence[Variant],
    common: Variant | None = None,
) -> Measured:
    """The effects `[b v]` of the variants of one sweep; a metric that compares (KL) compares with the run without."""
    with torch.no_grad():
        found = Sweep(model, batch, variants, common or Variant()).run(metric)
    return Measured((found.values - found.base).mT, found.changed.mT, {"base": found.base})


def check_one_length(batch: Batch, what: str, otherwise: str = "") -> None:
    """ValueError unless all prompts are equally long; `otherwise` says what may be done instead."""
    lengths = batch.lengths
    if bool((lengths != lengths[0]).any()):
        found = sorted(set(lengths.tolist()))
        raise ValueError(f"{what} require prompts of one length, got lengths {found}{otherwise}")


def _compute(
    trace: Trace, batch: Batch, model: Transformer, measure: Measure, table: Table
) -> Mapping[str, Tensor]:
    columns = [dim for dim in table.dims if dim in COLUMN_DIMS]
    if columns:
        check_one_length(batch, f"effects by {', '.join(columns)}", ": name other dims in `by`")
    found = measure(model, batch)
    for name, value in found.runs.items():
        if not bool(value.isfinite().all()):
            raise NotFiniteError(f"{table.metric.name} is NaN or infinite in the {name} run of some prompt")
    tokens = batch.tokens.masked_fill(~batch.real, -1).to(found.effect.device)
    return {
        "effect": found.effect, "changed": found.changed.double(), "token": tokens, "length": batch.lengths.double(),
        **found.runs,
    }  # fmt: skip


def _finish(merged: Partial, table: Table) -> "xr.Dataset":
    values: dict[str, tuple[Sequence[str], Tensor]] = {}
    coords, dims = dict(table.coords), table.dims
    if isinstance(merged, Rows):
        rows = dict(merged.rows)
        effect, token, length = rows.pop("effect"), rows.pop("token"), rows.pop("length")
        changed = rows.pop("changed").any(0)
        if set(dims) & COLUMN_DIMS and bool((length != length[0]).any()):
            raise ValueError(
                f"effects by {', '.join(sorted(set(dims) & COLUMN_DIMS))} require prompts of one length, got lengths "
                f"{sorted(set(length.long().tolist()))}: name other dims in `by`"
            )
        coords["token"] = (("prompt", "pos"), table.text.words(token.cpu().numpy()).astype(str))
        moments = Moments.of(effect)
        runs: dict[str, tuple[Sequence[str], Tensor]] = {name: (("prompt",), x) for name, x in rows.items()}
        values |= {"changed": (dims, changed), "each": (("prompt", *dims), effect)}
        means = {name: float(value.double().mean()) for name, value in rows.items()}
        if "clean" in rows and bool((rows["clean"] == rows["corrupt"]).all()):
            raise ValueError(
                f"{table.metric.name} is {means['clean']:.4g} for clean and corrupted runs alike in every prompt: "
                "there is nothing that an intervention could bring back"
            )
        if table.attrs.get("order") == "first" and not bool(effect.any()):
            raise ValueError(
                f"{table.metric.name}: its gradient at {table.attrs['site']} is zero in every prompt; the metric is "
                "constant or saturated there"
            )
    else:
        assert isinstance(merged, Means)
        found = dict(merged.moments)
        moments = found.pop("effect")
        values["changed"] = (dims, found.pop("changed").mean > 0)
        del found["token"], found["length"]
        runs = {name: ((), value.mean) for name, value in found.items()}
        means = {name: float(value.mean) for name, value in found.items()}
    for dim in COLUMN_DIMS & set(dims) - set(coords):
        coords[dim] = range(moments.mean.shape[dims.index(dim)])
    if "clean" in means:
        values["normalised"] = (dims, _normalised(moments.mean, means, table))
    return labelled(
        table.name,
        {**moments.estimate(dims), **values, **runs},
        coords={name: value for name, value in coords.items() if _fits(name, value, dims)},
        units={
            **dict.fromkeys(("value", "low", "high", "each", *means), table.metric.unit),
            "normalised": "share of the difference between the runs",
        },
        attrs={
            **table.attrs, "metric": table.metric.name, "unit": table.metric.unit, "effect": SIGN,
            "interval": "95 % over prompts",
        },
    )  # fmt: skip


def _normalised(
    effect: Float[Tensor, "..."], means: Mapping[str, float], table: Table
) -> Float[Tensor, "..."]:
    """(patched - corrupt) / (clean - corrupt) of the mean metrics: 0 = like the corrupted run, 1 = like the clean."""
    total = means["clean"] - means["corrupt"]
    start = means["corrupt" if table.attrs.get("direction") == "denoise" else "clean"]
    return (effect + start - means["corrupt"]) / total if total else torch.full_like(effect, torch.nan)


def _fits(name: str, value: object, dims: Sequence[str]) -> bool:
    """Whether a coordinate belongs to this result."""
    return name in dims or isinstance(value, tuple)


def dims_of(axes: Sequence[str]) -> list[str]:
    """The dims along which cells of a site are told apart."""
    return [DIMS[axis] for axis in axes if axis in DIMS]
