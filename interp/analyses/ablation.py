"""Ablation: what the answer loses without a head, an MLP, a neuron, a whole layer, or several of them together.

The classic question of necessity. Two cautions come with it: redundant parts show nothing one by one (McGrath et al.
2023, "The Hydra Effect"; hence sets of parts), and the number depends on what stands in for the part (hence the
protocol, a record that the result carries). Every cell is a variant of one planned sweep.
"""

import json
from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Literal, get_args

from interp.analyses.ablation_effects import Planned, chosen_layers, effects
from interp.analyses.ablation_protocols import Data, StandIn, clean_patterns
from interp.analyses.contrast import check_one_length
from interp.core.shapes import nearest
from interp.engine.batch import Batch
from interp.engine.edit_text import change_to_json
from interp.engine.metrics import Metric, logit_difference
from interp.engine.observe import Subject
from interp.engine.text import Prompts
from interp.engine.variants import Variant
from interp.model import sites
from interp.model.config import ModelConfig
from interp.model.edits import Edit, Set
from interp.model.parts import KINDS, Named, Part, as_part, axis_size, is_part
from interp.model.transformer import Transformer

if TYPE_CHECKING:
    import xarray as xr

Kind = Literal["head", "cross_head", "mlp", "mlp_before", "attn", "neuron", "neuron_before", "resid"]
"""What can be ablated one by one, in every layer; names of `model.parts.KINDS`."""


def ablate(
    model: Subject,
    prompts: Prompts,
    parts: Kind | Sequence[Named | Sequence[Named]] = "head",
    *,
    change: StandIn,
    freeze_patterns: bool = False,
    metric: Metric | None = None,
    by: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    reference: Prompts | None = None,
    groups: Sequence[str] | None = None,
    prepend_bos: bool = True,
    batch_size: int = 32,
) -> "xr.Dataset":
    """How far the metric moves without each part: Dataset over the dims `by`, in the metric's unit.

    Variables: `effect`, metric(ablated) - metric(base), negative where the part holds the metric up; the mean over
    prompts, with the ends `_low` and `_high` of its 95 % interval; `each` [prompt, ...]; `base` [prompt], the metric of
    the whole model; `changed`, whether the part's value changes in any prompt and can reach the metric (where not, the
    effect is 0 because nothing was done). `attrs["change"]` says what stood in for the parts, as JSON.

    parts: every "head" (its z; the bias of the layer's output stays), "mlp", "attn" (what the whole sublayer adds,
    biases and norm included), "neuron" (after the non-linearity) or "resid" (the stream that enters a layer); of the
    MLP before attention, which Macaron blocks have besides the other, "mlp_before" and "neuron_before"; or parts by
    name, `["L0H1", "L2.mlp", ["L0H1", "L1H2"]]`, those of an inner list ablated together: dim `part`.
    change: what stands in for the part, `Zero()`, `Mean(...)` or `Resample(...)`.
    freeze_patterns: whether all attention patterns stay those of the run without the ablation, so that only values
    travel.
    metric: None is the logit difference of the answers that the prompts carry. One that compares (KL divergence)
    compares with the run without ablation.
    by: which cells: of `layer`, `pos` and `head` or `neuron` (named parts: `part`, `pos`); along dims that are not
    named everything is ablated at once. None: all but `pos`.
    layers: the layers concerned; None = all. Not for named parts.
    reference: the prompts that means are taken over (None: the prompts themselves), or the corrupted prompt of each
    prompt for `Resample` (None: each takes another prompt of its group). groups: the template of each prompt.
    Caveats: an effect near 0 does not show that a part is unused: another may stand in for it.
    Errors: ValueError for a change without the data it requires, cells by position although lengths differ; KeyError
    for an unknown part or dim; IndexError for a layer, head or neuron that does not exist.

    Example:
        >>> found = ablate(model, prompt, "head", change=Zero(), metric=interp.logit_difference(" Mary", " John"))
        >>> found.effect.dims
        ('layer', 'head')
    """
    if not isinstance(change, StandIn):
        raise ValueError(f"what stands in for a part is Zero(), Mean(...) or Resample(...), got {change!r}")
    metric = logit_difference() if metric is None else metric
    batch = metric.posed(model.text.batch(prompts, prepend_bos=prepend_bos), model.text)
    given = None if reference is None else model.text.batch(reference, prepend_bos=prepend_bos)
    cells, coords = _asked(parts, model.transformer.config, layers, by, batch)
    planned = _planned(
        model.transformer, Data(change, batch, given, groups), cells, freeze_patterns, batch_size
    )
    found = effects(model.transformer, batch, metric, planned, batch_size=batch_size)
    attrs: dict[str, str | int] = {
        "parts": parts if isinstance(parts, str) else "named",
        "change": json.dumps(change_to_json(change)),
        "freeze_patterns": int(freeze_patterns),
        "reference": "the prompts themselves" if given is None else f"{len(given)} prompts given",
    }
    return found.table("ablate", coords, metric, attrs)


Cells = list[tuple[list[Part], int | None]]
"""The parts of every variant, and the column concerned (None: all)."""
Coords = dict[str, list[int] | list[str]]


def _asked(
    parts: Kind | Sequence[Named | Sequence[Named]],
    config: ModelConfig,
    layers: Sequence[int] | None,
    by: Sequence[str] | None,
    batch: Batch,
) -> tuple[Cells, Coords]:
    """The variants that `ablate` was asked for, in the order of the coords."""
    if isinstance(parts, str):
        return _grid(parts, config, layers, by, batch)
    return _sets(parts, config, layers, by, batch)


def _planned(model: Transformer, data: Data, cells: Cells, freeze_patterns: bool, batch_size: int) -> Planned:
    """Every cell with what stands in for it, and the patterns that stay, if they are to."""
    names = list(dict.fromkeys(part.site for parts, _ in cells for part in parts))
    fill = data.fill(model, names, batch_size=batch_size)

    def planned(some: Batch, rows: slice) -> tuple[list[Variant], Variant]:
        put = fill(rows)
        variants = [
            Variant([Edit(part, put[part.site], {} if pos is None else {"pos": pos}) for part in parts])
            for parts, pos in cells
        ]
        frozen = clean_patterns(model, some) if freeze_patterns else {}
        return variants, Variant([Edit(site, Set(pattern)) for site, pattern in frozen.items()])

    return planned


def _grid(
    kind: str, config: ModelConfig, layers: Sequence[int] | None, by: Sequence[str] | None, batch: Batch
) -> tuple[Cells, Coords]:
    """One variant per cell of a kind of part, dims in the order of its site's axes."""
    if kind not in get_args(Kind):
        raise KeyError(
            f"parts must be one of {', '.join(get_args(Kind))}, or a list of parts, got {kind!r}; "
            f"{nearest(kind, get_args(Kind))}"
        )
    site, axis = KINDS[kind].site, KINDS[kind].axis
    which = chosen_layers(layers, config.n_layers)
    sites.find(f"blocks.{which[0]}.{site}", config)
    sizes: Coords = {"layer": which, "pos": list(range(batch.tokens.shape[1]))}
    unit = kind.removesuffix("_before").removeprefix("cross_")
    if axis is not None:
        sizes[unit] = list(range(axis_size(axis, config)))
    coords = _kept(sizes, by, batch)
    cells: Cells = []
    for index in product(*(range(len(labels)) for labels in coords.values())):
        at = dict(zip(coords, index, strict=True))
        mine = [which[at["layer"]]] if "layer" in at else which
        cells.append(([_part(kind, layer, at.get(unit)) for layer in mine], at.get("pos")))
    return cells, coords


def _part(kind: str, layer: int, index: int | None) -> Part:
    """One part of a kind, or, without an index, all of a layer: the whole site."""
    if index is None and KINDS[kind].axis is not None:
        return Part.of(f"blocks.{layer}.{KINDS[kind].site}")
    return Part(kind, layer, index)


def _sets(
    given: Sequence[Named | Sequence[Named]],
    config: ModelConfig,
    layers: Sequence[int] | None,
    by: Sequence[str] | None,
    batch: Batch,
) -> tuple[Cells, Coords]:
    """One variant per named part, or per list of them (and column)."""
    if layers is not None:
        raise ValueError(f"parts name their layers themselves: layers={list(layers)} has no meaning")
    sets = [_together(each) for each in given]
    if not sets or not all(sets):
        raise ValueError(
            f"parts by name, or lists of at least one that go together, are required, ['L0H1', ['L0H1', 'L2.mlp']], "
            f"got {given!r}"
        )
    named = [[as_part(each, config) for each in some] for some in sets]
    parts = {"+".join(map(str, some)): some for some in named}
    if len(parts) < len(sets):
        raise ValueError(f"every set of parts is required once, got {['+'.join(map(str, s)) for s in named]}")
    coords = _kept({"part": list(parts), "pos": list(range(batch.tokens.shape[1]))}, by, batch)
    if "part" not in coords:
        raise KeyError("named parts are told apart in every result: 'part' is required in `by`")
    cells: Cells = [
        (some, pos)
        for some in parts.values()
        for pos in (range(len(coords["pos"])) if "pos" in coords else [None])
    ]
    return cells, coords


def _together(given: Named | Sequence[Named]) -> list[Named]:
    """Parts that are ablated together: one, or those of a list."""
    if is_part(given):
        return [given]
    if not isinstance(given, Sequence):
        raise ValueError(f"a part or a list of parts is required, got {given!r}")
    return list(given)  # type: ignore[arg-type]


def _kept(possible: Coords, by: Sequence[str] | None, batch: Batch) -> Coords:
    """The dims of the result with their labels."""
    for dim in by or ():
        if dim not in possible:
            raise KeyError(f"the dims here are {', '.join(possible)}, not {dim!r}; {nearest(dim, possible)}")
    kept = {dim: x for dim, x in possible.items() if (dim != "pos" if by is None else dim in by)}
    if "pos" in kept:
        check_one_length(batch, "cells by pos")
    return kept
