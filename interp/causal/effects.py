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
from interp.core.shapes import nearest
from interp.core.stats import Means, Moments, Partial, Rows
from interp.data.batch import Batch
from interp.data.text import Text
from interp.model.config import ModelConfig
from interp.model.parts import KINDS, Named, Part, axis_size, is_part
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
"""The dims that run over columns."""
OTHERWISE = ": name other dims in `by`"
"""What to do where prompts of several lengths have no cells by column."""


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

    @property
    def columns(self) -> list[str]:
        """The dims that number the columns of every prompt, so that they require prompts of one length."""
        return [dim for dim in self.dims if dim in COLUMN_DIMS and dim not in self.coords]


def causal(
    model: Subject, table: Table, measure: Measure, *, each: bool = True, pairs: bool = False
) -> Analysis:
    """The analysis of a causal question: sweeps per batch, and the one table of effects.

    each: keep every prompt's effects; otherwise only their moments, for data of any size.
    """
    posed = Posed.of(model.text, table.metric.answer, table.metric.wrong)
    return Analysis(
        table.name,
        partial(_compute, measure=measure, table=table, each=each),
        Rows if each else Means,
        partial(_finish, table=table),
        pose=posed,
        pairs=pairs,
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
    trace: Trace, batch: Batch, model: Transformer, measure: Measure, table: Table, each: bool
) -> Mapping[str, Tensor]:
    if table.columns:
        check_one_length(batch, f"effects by {', '.join(table.columns)}", OTHERWISE)
    found = measure(model, batch)
    for name, value in found.runs.items():
        if not bool(value.isfinite().all()):
            raise NotFiniteError(f"{table.metric.name} is NaN or infinite in the {name} run of some prompt")
    rows = {
        "effect": found.effect, "changed": found.changed.double(), "length": batch.lengths.double(), **found.runs,
    }  # fmt: skip
    if each:  # of rows of several widths there are no moments
        rows["token"] = batch.token_ids.to(found.effect.device)
    return rows


def _finish(merged: Partial, table: Table) -> "xr.Dataset":
    found = _of_rows(merged.rows, table) if isinstance(merged, Rows) else _of_moments(merged, table)
    values, dims, sizes = dict(found.values), table.dims, found.moments.mean.shape
    if table.columns and not found.one_length:
        raise ValueError(f"effects by {', '.join(table.columns)} require prompts of one length{OTHERWISE}")
    if "clean" in found.means:
        values["normalised"] = (dims, _normalised(found.moments.mean, found.means, table))
    counted = {dim: range(size) for dim, size in zip(dims, sizes, strict=True)}
    given = {
        name: labels for name, labels in table.coords.items() if name in dims or isinstance(labels, tuple)
    }
    return labelled(
        table.name,
        {**found.moments.estimate(dims), **values},
        coords={**counted, **given, **found.coords},
        units={
            **dict.fromkeys(("value", "low", "high", "each", *found.means), table.metric.unit),
            "normalised": "share of the difference between the runs",
        },
        attrs={
            **table.attrs, "metric": table.metric.name, "unit": table.metric.unit, "effect": SIGN,
            "interval": "95 % over prompts",
        },
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Found:
    """What is known of all prompts."""

    moments: Moments
    """Of the effects."""
    means: Mapping[str, float]
    """The mean metric of the runs without an intervention."""
    values: Mapping[str, tuple[Sequence[str], Tensor]]
    """The other variables of the result."""
    coords: Mapping[str, object]
    one_length: bool


def _of_rows(kept: Mapping[str, Tensor], table: Table) -> _Found:
    """Every prompt's effects with their moments. ValueError for runs and gradients that leave nothing to find."""
    rows = dict(kept)
    effect, changed = rows.pop("effect"), rows.pop("changed").any(0)
    token, length = rows.pop("token"), rows.pop("length")
    if "clean" in rows and bool((rows["clean"] == rows["corrupt"]).all()):
        raise ValueError(
            f"{table.metric.name} is {float(rows['clean'][0]):.4g} for clean and corrupted runs alike in every prompt: "
            "there is nothing that an intervention could bring back"
        )
    if table.attrs.get("order") == "first" and not bool(effect.any()):
        raise ValueError(
            f"{table.metric.name}: its gradient at {table.attrs['site']} is zero in every prompt; the metric is "
            "constant or saturated there"
        )
    return _Found(
        Moments.of(effect),
        {name: float(value.double().mean()) for name, value in rows.items()},
        {
            "changed": (table.dims, changed), "each": (("prompt", *table.dims), effect),
            **{name: (("prompt",), value) for name, value in rows.items()},
        },
        {"token": table.text.token_words(token), "pos": range(token.shape[1])},
        bool((length == length[0]).all()),
    )  # fmt: skip


def _of_moments(merged: Partial, table: Table) -> _Found:
    """The moments alone."""
    assert isinstance(merged, Means)
    rows = dict(merged.moments)
    moments, changed, length = rows.pop("effect"), rows.pop("changed").mean > 0, rows.pop("length")
    return _Found(
        moments,
        {name: float(value.mean) for name, value in rows.items()},
        {"changed": (table.dims, changed), **{name: ((), value.mean) for name, value in rows.items()}},
        {},
        not bool(length.spread.any()),
    )


def _normalised(
    effect: Float[Tensor, "..."], means: Mapping[str, float], table: Table
) -> Float[Tensor, "..."]:
    """(patched - corrupt) / (clean - corrupt) of the mean metrics: 0 = like the corrupted run, 1 = like the clean."""
    total = means["clean"] - means["corrupt"]
    start = means["corrupt" if table.attrs.get("direction") == "denoise" else "clean"]
    return (effect + start - means["corrupt"]) / total if total else torch.full_like(effect, torch.nan)


def dims_asked(by: Sequence[str], possible: Sequence[str], what: str) -> tuple[str, ...]:
    """The dims of `by`, in the order of the result.

    Errors: ValueError for a single word, KeyError for an unknown dim.
    """
    if isinstance(by, str):
        raise ValueError(f"dims are required in a list, got {by!r}: write by=({by!r},)")
    for dim in by:
        if dim not in possible:
            raise KeyError(
                f"{what} has the dims {', '.join(possible)}, not {dim!r}; {nearest(dim, possible)}"
            )
    return tuple(dim for dim in possible if dim in by)


def listed(given: Named | Sequence[Named]) -> list[Named]:
    """The parts that are meant: one, or those of a list. ValueError for anything else."""
    if is_part(given):
        return [given]
    if not isinstance(given, Sequence):
        raise ValueError(f"a part or a list of parts is required, got {given!r}")
    return list(given)  # type: ignore[arg-type]


def dims_of(axes: Sequence[str]) -> list[str]:
    """The dims along which cells of a site are told apart."""
    return [DIMS[axis] for axis in axes if axis in DIMS]


def layer_coord(names: Sequence[str]) -> dict[str, object]:
    """The coordinate `layer`: that of each of these sites; nothing for a site outside the blocks."""
    layers = [int(name.split(".")[1]) for name in names if name.startswith("blocks.")]
    return {"layer": layers} if layers else {}


def part_names(names: Sequence[str], dims: Sequence[str], config: ModelConfig) -> dict[str, object]:
    """The coordinate `part` of results by layer: the whole site of each, or its heads, neurons, ... one by one.

    names: the site in each layer. Nothing where a cell is no part with a name of its own.

    Example:
        >>> part_names(["blocks.0.attn.hook_z"], ("layer", "pos", "head"), model.cfg)["part"][1][0][:2]
        ['L0H0', 'L0H1']
    """
    own = [axis for axis, dim in DIMS.items() if dim in dims and dim not in COLUMN_DIMS]
    if "layer" not in dims or len(own) > 1:
        return {}
    whole = [Part.of(name) for name in names]
    if not own:
        return {"part": (("layer",), [str(part) for part in whole])}
    inner = names[0].split(".", 2)[2]
    kinds = [name for name, row in KINDS.items() if (row.site, row.axis) == (inner, own[0])]
    if not kinds:
        return {}
    kind = kinds[-1 if config.kv_heads < config.n_heads else 0]  # keys and values that heads share: by group
    indices = range(axis_size(own[0], config))
    return {
        "part": (("layer", DIMS[own[0]]), [[str(Part(kind, p.layer, i)) for i in indices] for p in whole])
    }
