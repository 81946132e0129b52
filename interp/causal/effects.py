"""The change of a metric under interventions: the table that every causal question returns, and comparison of two.

An effect is metric(with the intervention) - metric(the same run without it), always: negative where what was taken
away held the metric up, positive where what was put in raised it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.causal.graph import EdgeGraph
from interp.core.axes import shape_text
from interp.core.boundary import public
from interp.core.kinds import PositiveCount, Probability
from interp.core.results import labelled
from interp.core.stats import (
    ACCEPTED_MISS,
    MaskedMeans,
    MaskedMoments,
    Means,
    Moments,
    Partial,
    Rows,
    finite,
    over,
    ranks,
)
from interp.core.transfers import check, to_device
from interp.core.wording import nearest
from interp.data.batch import Batch
from interp.data.text import Text
from interp.model.config import ModelConfig
from interp.model.edits import PositionIndex
from interp.model.layout import each_position
from interp.model.parts import KINDS, Part, PartName, axis_size, is_part
from interp.model.sites import DIMS, axes_of
from interp.model.transformer import Transformer
from interp.passes import needs
from interp.passes.metrics import Metric
from interp.passes.needs import Steps
from interp.passes.observe import Subject
from interp.passes.question import ByRow, NotFiniteError, Values
from interp.passes.sweep import Swept
from interp.passes.variants import Variant

if TYPE_CHECKING:
    import xarray as xr

SIGN = "metric with the intervention minus metric of the same run without it"
EDGE_DIMS = ("sender", "receiver")
MISSED, MOVED = "missed by the integral", "size of the integral"
TOTAL = "clean - corrupt"
"""Name of metric(clean) - metric(corrupt) of each prompt, repeated at every cell, NaN beyond the prompt's end."""
COLUMN_DIMS = {"pos", "query", "key", "source"}
"""The dims that run over token positions, of the prompt or (`source`) of an encoder's text."""


@dataclass(frozen=True, eq=False)
class MeasuredEffects:
    """Effects of all interventions of a question on the metric, in every prompt of a batch."""

    effect: Float[Tensor, "b ..."]
    """metric(with the intervention) - metric(without), per prompt and cell."""
    changed: Bool[Tensor, "b ..."]
    """Whether the intervention changed anything that can reach the metric."""
    runs: Mapping[str, Float[Tensor, "b"]]
    """The metric of the runs without an intervention, by name."""
    quality: Mapping[str, Float[Tensor, "b"]] = field(default_factory=dict)
    """Numbers about the quality of estimates.

    Fisher's z of their agreement with effects, by coefficient (NaN for prompts where that is not known);
    `completeness_error`; of an integral, |sum of its scores - change of the metric| (`MISSED`) and |change| (`MOVED`).
    """

    @classmethod
    def of(
        cls, sweep: Swept, shape: Sequence[int], runs: Mapping[str, Float[Tensor, "b"]]
    ) -> MeasuredEffects:
        """The effects in a sweep, its variants as cells of this shape; `runs`: the metric without interventions."""
        effect, changed = (  # [variant b] -> [b *shape]
            x.mT.unflatten(1, shape) if shape else x[0] for x in (sweep.values - sweep.base, sweep.changed)
        )
        return cls(effect, changed, runs)

    @classmethod
    def joined(
        cls, parts: Sequence[MeasuredEffects], order: Int[Tensor, "b"] | None = None
    ) -> MeasuredEffects:
        """The measurements of several groups of prompts together, in this order of their rows."""

        def rows(values: Iterable[Tensor]) -> Tensor:
            stacked = torch.cat(list(values))
            return stacked if order is None else stacked[to_device(order, stacked.device)]

        runs = {name: rows(part.runs[name] for part in parts) for name in parts[0].runs}
        quality = {name: rows(part.quality[name] for part in parts) for name in parts[0].quality}
        return cls(rows(part.effect for part in parts), rows(part.changed for part in parts), runs, quality)


InterventionMeasure = Callable[[Transformer, Batch], Steps[MeasuredEffects]]
"""Measurement of the effects on some prompts, step by step, so that passes are shared with other questions.

The prompts bring their corrupted ones where the question compares two runs.
"""


@dataclass(frozen=True)
class Compared:
    """Number of cells and prompts in which effects are also measured by patching, to compare estimates with."""

    cells: int
    """Cells of each prompt."""
    prompts: int | None
    """Number of prompts, the first ones; None: all."""

    def __str__(self) -> str:
        where = "each prompt" if self.prompts is None else f"each of the first {self.prompts} prompts"
        return f"{self.cells} cells patched in {where}, half of them those of the largest estimates"


@dataclass(frozen=True, eq=False)
class EffectTable:
    """Names and labels of the result about one question's effects."""

    name: str
    dims: tuple[str, ...]
    """The dims that tell the cells apart, in the order of the effects' axes."""
    coords: Mapping[str, object]
    """Labels by dim, as far as they are known beforehand; positions are counted."""
    metric: Metric
    text: Text
    attrs: Mapping[str, str | int | float] = field(default_factory=dict)
    first_order: bool = False
    """Whether effects are estimates by a gradient, which must not be zero everywhere."""
    known: Bool[Tensor, "sender receiver"] | None = None
    """The edges of the graph that were measured; None: the cells are no edges."""
    compared: Compared | None = None
    """How the estimates are compared with effects; None: not at all."""

    @classmethod
    def of_edges(
        cls,
        name: str,
        graph: EdgeGraph,
        metric: Metric,
        text: Text,
        attrs: Mapping[str, str | int | float],
        known: Bool[Tensor, "sender receiver"] | None = None,
    ) -> EffectTable:
        """The table of the edges of a graph, whose effects are 0 where there is no edge; exact, or by a gradient.

        Args:
            attrs: how they were measured, `method` and `direction` among it.
            known: the edges that were measured; None: all.
        """
        coords = {"sender": graph.senders, "receiver": graph.receivers}
        known = graph.exists if known is None else known
        about, estimated = {**attrs, "edges": int(known.sum())}, attrs["method"] != "exact"
        return cls(name, EDGE_DIMS, coords, metric, text, about, first_order=estimated, known=known)

    @property
    def columns(self) -> list[str]:
        """The dims that number the tokens of every prompt: cells beyond a prompt's end are NaN in it."""
        return [dim for dim in self.dims if dim in COLUMN_DIMS and dim not in self.coords]

    def within_rows(self, values: Float[Tensor, "b ..."], batch: Batch) -> Float[Tensor, "b ..."]:
        """Values of cells, with NaN at the positions that a prompt does not have."""
        for axis, dim in enumerate(self.dims, 1):
            if dim not in self.columns:
                continue
            lengths = batch.lengths
            if dim == "source" and batch.memory is not None:
                keep, states = batch.memory.keep, batch.memory.states
                lengths = torch.full_like(lengths, states.shape[1]) if keep is None else keep.sum(1)
            place = torch.arange(values.shape[axis], device=values.device)
            beyond = place >= lengths.to(values.device)[:, None]
            beyond = beyond.view(
                len(beyond), *[1] * (axis - 1), -1, *[1] * (values.ndim - axis - 1)
            )  # [b 1.. p 1..]
            values = values.masked_fill(beyond, torch.nan)
        return values


def causal(
    model: Subject,
    table: EffectTable,
    measure: InterventionMeasure,
    *,
    each: bool = True,
    pairs: bool = False,
) -> ByRow:
    """The analysis of a causal question: `measure` on every batch, and one table of the effects over all batches.

    Args:
        each: keep every prompt's effects; otherwise only their moments, for data of any size.
    """
    return ByRow(
        table.name,
        partial(_rows, measure=measure, table=table, each=each),
        Rows if each else MaskedMeans if table.columns or table.compared else Means,
        partial(_finish, table=table),
        answers=table.metric.answers(model.text),
        pairs=pairs,
    )


def swept(
    batch: Batch,
    metric: Metric,
    variants: Sequence[Variant],
    shape: Sequence[int] = (-1,),
    common: Variant | None = None,
) -> Steps[MeasuredEffects]:
    """Effects of one sweep's variants on the metric, [prompt, *shape] with one cell per variant.

    A metric that compares (KL) compares with the run without interventions. Corrupted prompts of the batch are not
    used.
    """
    batch = batch if batch.corrupt is None else batch.pair()[0]
    sweep = yield from needs.swept(batch, variants, metric, common=common)
    return MeasuredEffects.of(sweep, shape, {"base": sweep.base})


def check_one_length(batch: Batch, what: str, otherwise: str = "") -> None:
    """ValueError unless all prompts are equally long; `otherwise` says what may be done instead."""
    if batch.keep is None:
        return
    lengths = batch.lengths
    if bool((lengths != lengths[0]).any()):
        different = sorted(set(lengths.tolist()))
        raise ValueError(f"{what} require prompts of one length, got lengths {different}{otherwise}")


def check_first_column(batch: Batch, what: str) -> None:
    """ValueError for prompts padded on the left, as they stay where hooks may tell columns apart."""
    if not bool(batch.host().real[:, 0].all()):
        raise ValueError(
            f"{what} require prompts that begin in the first column where hooks may tell columns apart: pad them on "
            "the right"
        )


def cells_along(dim: str, batch: Batch, size: int) -> Sequence[PositionIndex]:
    """The index of each of `size` cells along a dim, as an edit takes it; at a position, shorter rows are left out."""
    if dim not in COLUMN_DIMS:
        return range(size)
    if dim != "source":
        return each_position(batch.host().lengths, size)
    memory = batch.memory
    return range(size) if memory is None or memory.keep is None else each_position(memory.keep.sum(1), size)


def moments_of(merged: Partial, kind: type[Moments] = Moments) -> Mapping[str, Moments]:
    """The moments over prompts of every floating-point value that was merged, kept row by row (`Rows`) or summed."""
    if isinstance(merged, Rows):
        return {name: kind.of(x) for name, x in merged.rows.items() if x.is_floating_point()}
    assert isinstance(merged, Means)
    return merged.moments


def _rows(
    model: Transformer, batch: Batch, measure: InterventionMeasure, table: EffectTable, each: bool
) -> Steps[Values]:
    """The effects of every row, the metric of its runs, and its tokens."""
    if table.columns:
        check_first_column(batch, f"effects by {', '.join(table.columns)}")
    measured = yield from measure(model, batch)
    check(finite(measured.runs.values()), partial(_not_finite_error, measured.runs, table.metric))
    effect, changed = (table.within_rows(x, batch) for x in (measured.effect, measured.changed.double()))
    rows = {"effect": effect, "changed": changed, **measured.runs, **measured.quality}
    if table.columns and "clean" in rows:
        total = rows["clean"] - rows["corrupt"]
        rows[TOTAL] = total.view(-1, *[1] * (effect.ndim - 1)).where(~effect.isnan(), torch.nan)
    if each:  # token ids are only kept row by row: batches differ in width
        rows["token"] = batch.token_ids.to(measured.effect.device)
    return rows


def _not_finite_error(runs: Mapping[str, Tensor], metric: Metric) -> NotFiniteError | None:
    for name, value in runs.items():
        if not bool(value.isfinite().all()):
            return NotFiniteError(f"{metric.name} is NaN or infinite in the {name} run of some prompt")
    return None


def _finish(merged: Partial, table: EffectTable) -> xr.Dataset:
    moments = dict(moments_of(merged, MaskedMoments if table.columns else Moments))
    effect, changed = (moments.pop(name) for name in ("effect", "changed"))
    total = moments.pop(TOTAL, None)
    error = {name: float(moments.pop(name).mean) for name in ("completeness_error",) if name in moments}
    notes = []
    if MISSED in moments:
        error["integral_error"] = float(moments.pop(MISSED).mean / moments.pop(MOVED).mean.clamp_min(TINY))
        notes += _convergence_notes(error["integral_error"], table)
    agreed = [_coefficients(merged, moments.pop(name), name) for name in COEFFICIENTS if name in moments]
    dims, counted = table.dims, dict(zip(table.dims, map(range, effect.mean.shape), strict=True))
    values: dict[str, tuple[Sequence[str], Tensor]] = {"changed": (dims, changed.mean > 0)}
    coords: dict[str, object] = {}
    if isinstance(merged, Rows):
        _check_differing(merged.rows, table)
        token = merged.rows["token"]
        coords = {"token": table.text.token_words(token), "pos": range(token.shape[1])}
        values["each"] = (("prompt", *dims), merged.rows["effect"])
        values |= {name: (("prompt",), merged.rows[name]) for name in moments}
    else:
        values |= {name: ((), run.mean) for name, run in moments.items()}
    if table.first_order and not bool(values["changed"][1].any()):
        where = f" at {table.attrs['site']}" if "site" in table.attrs else ""
        rules = f", or the rules {table.attrs['rules']} leave none" if table.attrs.get("rules") else ""
        raise ValueError(
            f"{table.metric.name}: its gradient{where} is zero in every prompt; the metric is constant or saturated "
            f"there{rules}"
        )
    attrs = {}
    if table.compared is not None:
        coords |= {"coefficient": list(COEFFICIENTS), "estimate": ["value", "low", "high"]}
        values["agreement"] = (("coefficient", "estimate"), _agreement_table(agreed))
        attrs = {"agreement": _coefficients_text(values["agreement"][1][:, 0], table.compared)}
        notes += _agreement_notes(agreed[0], table.compared)
    if "clean" in moments:
        values["normalised"] = (dims, _normalised_effect(effect.mean, moments, table, total))
    table_coords = {
        name: labels for name, labels in table.coords.items() if name in dims or isinstance(labels, tuple)
    }
    result = labelled(
        table.name,
        {**effect.estimate(dims, fewest=table.metric.fewest), **values},
        coords={**counted, **table_coords, **coords},
        units={
            **dict.fromkeys(("value", "low", "high", "each", *moments), table.metric.unit),
            "normalised": "share of the difference between the runs",
        },
        attrs={
            **table.attrs, **error, "metric": table.metric.name, "unit": table.metric.unit, "effect": SIGN,
            "interval": over("prompts", table.metric.fewest),
            **attrs,
        },
        notes=notes,
    )  # fmt: skip
    return result if table.known is None else _at_known_edges(result, table.known)


def _coefficients(merged: Partial, moments: Moments, name: str) -> Moments:
    """The moments of Fisher's z of a correlation coefficient, over the prompts that have one."""
    return MaskedMoments.of(merged.rows[name]) if isinstance(merged, Rows) else moments


def _agreement_table(rows: Sequence[Moments]) -> Float[Tensor, "coefficient 3"]:
    """Mean of every coefficient with the ends of its interval, via Fisher's z: correlations near 1 are skewed."""
    estimates = [moments.estimate((), fewest=FEWEST_CORRELATIONS) for moments in rows]
    z = torch.stack(
        [torch.stack([estimate[number][1] for number in ("value", "low", "high")]) for estimate in estimates]
    )
    counted = torch.stack([moments.count() > 0 for moments in rows])
    return z.tanh().masked_fill(~counted[:, None], torch.nan)


def _coefficients_text(means: Float[Tensor, "coefficient"], compared: Compared) -> str:
    named = zip(COEFFICIENTS, means.tolist(), strict=True)
    return f"{', '.join(f'{name} {value:.3f}' for name, value in named)}, {compared}"


TINY = torch.finfo(torch.float64).tiny


def _convergence_notes(error: float, table: EffectTable) -> list[str]:
    """Notes about scores that do not sum to what they integrate."""
    if error <= ACCEPTED_MISS:
        return []
    return [
        f"the integral did not converge: in {table.attrs['steps']} steps it misses the metric's change by {error:.2g} "
        f"of it ({ACCEPTED_MISS} is accepted); try more steps, or rule='gauss'"
    ]


LEAST_AGREEMENT = 0.5
"""Pearson's correlation below which estimates explain less than a quarter of what patching the same cells gives."""


def _agreement_notes(pearson: Moments, compared: Compared) -> list[str]:
    """Notes about estimates that disagree with the effects, or that were not compared with effects."""
    if not int(pearson.count()):
        where = "prompt" if compared.prompts is None else f"prompt of the first {compared.prompts}"
        return [
            f"how well these estimates agree with patching is not known: no {where} has two cells that differ in "
            "estimate and effect"
        ]
    correlation = float(pearson.mean.tanh())
    if correlation >= LEAST_AGREEMENT:
        return []
    return [
        "the estimates agree badly with patching: their correlation over the cells that were patched is "
        f"{correlation:.2f}; use interp.patch for what you report"
    ]


def _check_differing(rows: Mapping[str, Tensor], table: EffectTable) -> None:
    """ValueError for two runs that are alike in every prompt."""
    if "clean" in rows and bool((rows["clean"] == rows["corrupt"]).all()):
        raise ValueError(
            f"{table.metric.name} is {float(rows['clean'][0]):.4g} for clean and corrupted runs alike in every prompt: "
            "there is nothing that an intervention could bring back"
        )


def _normalised_effect(
    effect: Float[Tensor, "..."], runs: Mapping[str, Moments], table: EffectTable, differences: Moments | None
) -> Float[Tensor, "..."]:
    """(patched - corrupt) / (clean - corrupt) of the mean metrics: 0 = like the corrupted run, 1 = like the clean.

    Args:
        differences: clean - corrupt over the prompts that have each cell; None: all prompts have all cells.
    """
    if differences is not None and bool((differences.count() < runs["clean"].count()).any()):
        share = (effect / differences.mean).masked_fill(differences.mean == 0, torch.nan)
        return share if table.attrs.get("direction") == "denoise" else share + 1
    clean, corrupt = float(runs["clean"].mean), float(runs["corrupt"].mean)
    start = corrupt if table.attrs.get("direction") == "denoise" else clean
    total = clean - corrupt
    return (effect + start - corrupt) / total if total else torch.full_like(effect, torch.nan)


def _at_known_edges(result: xr.Dataset, known: Bool[Tensor, "sender receiver"]) -> xr.Dataset:
    """The result over senders and receivers with numbers at the known edges only; `edge` is true there."""
    import xarray as xr

    exists = xr.DataArray(known.numpy(), dims=EDGE_DIMS)
    changed = {
        name: value.where(exists, np.array(np.nan if value.dtype.kind == "f" else 0, value.dtype))
        for name, value in result.data_vars.items()
        if set(EDGE_DIMS) <= set(value.dims)
    }
    return result.assign(changed).assign_coords(edge=exists)


def dims_asked(by: Sequence[str], possible: Sequence[str], what: str) -> tuple[str, ...]:
    """The dims of `by`, in the order of the result. KeyError for an unknown dim."""
    for dim in by:
        if dim not in possible:
            raise KeyError(
                f"{what} has the dims {', '.join(possible)}, not {dim!r}; {nearest(dim, possible)}"
            )
    return tuple(dim for dim in possible if dim in by)


def listed(names: PartName | Sequence[PartName]) -> list[PartName]:
    """The parts of an argument as a list, also where it is a single part."""
    return [names] if is_part(names) else list(names)  # type: ignore[arg-type]


def site_dims(names: Sequence[str]) -> list[str]:
    """The dims that tell the cells of a site apart, given its name in every layer."""
    inner_dims = [DIMS[axis] for axis in axes_of(names[0]).split()[1:] if axis in DIMS]
    return ["layer"] * names[0].startswith("blocks.") + inner_dims


def site_coords(names: Sequence[str], dims: Sequence[str], config: ModelConfig) -> dict[str, object]:
    """The coordinates `layer` and `part` of results about a site, where it has them."""
    layers = [int(name.split(".")[1]) for name in names if name.startswith("blocks.")]
    return ({"layer": layers} if layers else {}) | part_names(names, dims, config)


def part_names(names: Sequence[str], dims: Sequence[str], config: ModelConfig) -> dict[str, object]:
    """The coordinate `part` of results by layer: the whole site of each, or its heads, neurons, ... one by one.

    Empty where a cell is not a part with a name of its own.

    Args:
        names: the site in each layer.

    Example:
        >>> part_names(["blocks.0.attn.hook_z"], ("layer", "pos", "head"), model.cfg)["part"][1][0][:2]
        ['L0H0', 'L0H1']
    """
    part_axes = [axis for axis, dim in DIMS.items() if dim in dims and dim not in COLUMN_DIMS]
    if "layer" not in dims or len(part_axes) > 1:
        return {}
    site_parts = [Part.of(name) for name in names]
    if not part_axes:
        return {"part": (("layer",), [str(part) for part in site_parts])}
    inner = names[0].split(".", 2)[2]
    kinds = [name for name, row in KINDS.items() if (row.site, row.axis) == (inner, part_axes[0])]
    if not kinds:
        return {}
    kind = kinds[-1 if config.kv_heads < config.n_heads else 0]  # keys and values that heads share: by group
    sizes = {
        axis_size(part_axes[0], config if p.layer is None else config.at_layer(p.layer)) for p in site_parts
    }
    if len(sizes) > 1:
        raise ValueError(
            f"as many {DIMS[part_axes[0]]}s in every layer are required, got {sorted(sizes)}: name the site of one "
            f"layer, {names[0]!r}"
        )
    indices = range(*sizes)
    return {
        "part": (
            ("layer", DIMS[part_axes[0]]),
            [[str(Part(kind, p.layer, i)) for i in indices] for p in site_parts],
        )
    }


@public()
@dataclass(frozen=True)
class RankAgreement:
    """Agreement of an estimated with an exact ranking of the same things."""

    rank_correlation: float
    """Spearman's correlation: of the signed effects' ranks, equal ones sharing theirs; NaN if one is constant."""
    overlap: Probability
    """Share of the `top` largest exact effects (by absolute value) that are among the `top` largest estimates."""
    same_sign: Probability
    """Share of the `top` largest exact effects whose estimates have their sign; the overlap ignores signs."""
    top: PositiveCount
    n: PositiveCount
    """Number of things compared."""

    @property
    def chance(self) -> float:
        """The overlap expected of a random ranking."""
        return self.top / self.n


@public()
def agreement(estimate: Float[Tensor, "..."], exact: Float[Tensor, "..."], *, top: int) -> RankAgreement:
    """Agreement of estimated with exact effects: rank correlation, and overlap and signs of the largest.

    Args:
        estimate: effects as estimated, of any shape. Cells that are NaN in both do not count.
        exact: effects as measured, of the same shape.
        top: how many of the largest effects, by absolute value, are compared.

    Returns:
        A `RankAgreement`.

    Raises:
        ValueError: different shapes, cells that only one of the two has, or a `top` outside 1 to n.

    Example:
        >>> agreement(torch.tensor([3.0, -2.0, 0.1]), torch.tensor([30.0, -20.0, 0.2]), top=2).overlap
        1.0
    """
    if estimate.shape != exact.shape:
        raise ValueError(
            f"effects of the same things are required, got shapes {shape_text(estimate.shape)} and "
            f"{shape_text(exact.shape)}"
        )
    known = ~exact.isnan()
    if bool((known == estimate.isnan()).any()):
        raise ValueError("effects of the same things are required, got cells that only one of the two has")
    estimated, measured = estimate[known].double(), exact[known].double()
    n = len(estimated)
    if not 1 <= top <= n:
        raise ValueError(f"top in [1, {n}] is required, got {top}")
    tops = [set(x.abs().topk(top).indices.tolist()) for x in (estimated, measured)]
    correlation = float(spearman(estimated, measured)) if n > 1 else float("nan")
    largest = torch.tensor(sorted(tops[1]))
    same = float((estimated[largest].sign() == measured[largest].sign()).double().mean())
    return RankAgreement(correlation, len(tops[0] & tops[1]) / top, same, top, n)


FEWEST_CORRELATIONS = 16
"""Fewest prompts from which the mean of their Fisher z gets an interval: below, those of 1 weigh too much."""
COEFFICIENTS = ("pearson", "spearman")
"""The correlations of estimates with effects, in the order of `fisher_z`."""


def fisher_z(estimate: Float[Tensor, "n"], exact: Float[Tensor, "n"]) -> tuple[float, float]:
    """artanh of Pearson's and of Spearman's correlation; NaN for fewer than two things, or where one is constant.

    The artanh of 1 is infinite: Pearson's is cut at 1 - 1e-9, Spearman's half way from the ranks with one pair of
    neighbours exchanged to those that agree, at 1 - 6 / (n (n^2 - 1)).

    Example:
        >>> [round(z, 3) for z in fisher_z(torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([1.0, 2.0, 4.0, 8.0]))]
        [10.708, 1.472]
    """
    estimated, measured, n = estimate.double(), exact.double(), len(exact)
    if n < 2 or not bool((estimated != estimated[0]).any()) or not bool((measured != measured[0]).any()):
        return float("nan"), float("nan")
    by_value = float(pearson(estimated, measured).clamp(-(1 - 1e-9), 1 - 1e-9).atanh())
    most = 1 - 6 / (n * (n * n - 1))
    return by_value, float(spearman(estimated, measured).clamp(-most, most).atanh())


def pearson(ours: Float[Tensor, "n"], theirs: Float[Tensor, "n"]) -> Float[Tensor, ""]:
    """The correlation of two or more pairs of numbers; NaN if one side is constant."""
    return torch.corrcoef(torch.stack((ours, theirs)))[0, 1]


def spearman(ours: Float[Tensor, "n"], theirs: Float[Tensor, "n"]) -> Float[Tensor, ""]:
    """The correlation of the ranks of two or more pairs of numbers; NaN if one side is constant."""
    return pearson(ranks(ours), ranks(theirs))
