"""Ablation: what the answer loses without a head, an MLP, a neuron, a whole layer, or several of them together.

The classic question of necessity. Two cautions come with it: redundant parts show nothing one by one (McGrath et al.
2023, "The Hydra Effect"; hence sets of parts), and the number depends on what stands in for the part (hence the
protocol, a record that the result carries). Every cell is a variant of one planned sweep.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, get_args

from torch import Tensor

from interp.analyses.ablation_effects import Planned, chosen_layers, effects
from interp.analyses.ablation_protocols import Data, Mean, Protocol, Resample, Zero, as_json, clean_patterns
from interp.analyses.contrast import check_one_length
from interp.core.shapes import nearest
from interp.engine.batch import Batch
from interp.engine.metrics import Metric, logit_difference
from interp.engine.observe import Subject
from interp.engine.text import Prompts
from interp.engine.variants import Put, Variant
from interp.model import sites
from interp.model.config import MLP, ConvMLP, ModelConfig
from interp.model.transformer import Transformer

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["Mean", "Part", "Resample", "Zero", "ablate", "part_named"]

Kind = Literal["head", "mlp", "mlp_before", "attention", "neuron", "neuron_before", "residual"]
_SITES: Mapping[str, tuple[str, str | None]] = MappingProxyType(
    {
        "head": ("attn.hook_z", "h"),
        "mlp": ("hook_mlp_out", None),
        "mlp_before": ("hook_mlp_before_out", None),
        "attention": ("hook_attn_out", None),
        "neuron": ("mlp.hook_post", "m"),
        "neuron_before": ("mlp_before.hook_post", "m"),
        "residual": ("hook_resid_pre", None),
    }
)
"""Kind of part -> the site that holds its value, and the axis that tells its members apart."""
_LETTERS = {
    ("a", "h"): "head", ("a", None): "attention", ("m", None): "mlp", ("m", "n"): "neuron", ("r", None): "residual",
    ("b", None): "mlp_before", ("b", "n"): "neuron_before",
}  # fmt: skip
_NAME = re.compile(r"([ambr])(\d+)(?:\.([hn])(\d+))?")


@dataclass(frozen=True)
class Part:
    """A piece of a model: a site, and the index along one of its axes where it is not the whole."""

    site: str
    at: tuple[tuple[str, int], ...] = ()

    def put(self, donor: Tensor, pos: int | None) -> Put:
        """The donor in place of this part, at one column or all."""
        return Put(self.site, donor, {**dict(self.at), **({} if pos is None else {"p": pos})})


def part_named(name: str) -> Part:
    """The part with this name, as in edge graphs: `a0.h1` a head, `m2` an MLP, `input` the embeddings.

    And `a0` the whole attention of a layer, `m2.n17` a neuron, `b2` and `b2.n17` the MLP before attention and a neuron
    of it (Macaron blocks), `r3` the residual stream that enters a layer.
    Errors: KeyError for any other name.

    Example:
        >>> part_named("a0.h1")
        Part(site='blocks.0.attn.hook_z', at=(('h', 1),))
    """
    match = _NAME.fullmatch("r0" if name == "input" else name)
    kind = _LETTERS.get((match[1], match[3])) if match else None
    if match is None or kind is None:
        raise KeyError(f"no part {name!r}: parts are named a0.h1, a0, m0, m0.n17, b0, b0.n17, r0 or input")
    site, axis = _SITES[kind]
    return Part(f"blocks.{int(match[2])}.{site}", () if axis is None else ((axis, int(match[4])),))


def ablate(
    model: Subject,
    prompts: Prompts,
    what: Kind | Sequence[Sequence[str]] = "head",
    *,
    protocol: Protocol,
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
    effect is 0 because nothing was done). `attrs["protocol"]` is the protocol as JSON.

    what: every "head" (its z; the bias of the layer's output stays), "mlp", "attention" (what the whole sublayer adds,
    biases and norm included), "neuron" (after the non-linearity) or "residual" (the stream that enters a layer); of the
    MLP before attention, which Macaron blocks have besides the other, "mlp_before" and "neuron_before"; or
    sets of parts by name, `[["a0.h1", "a1.h2"], ["m0"]]` (see `part_named`), each ablated as one: dim `set`.
    protocol: what stands in for the part, `Zero()`, `Mean(...)` or `Resample(...)`.
    metric: None is the logit difference of the answers that the prompts carry. One that compares (KL divergence)
    compares with the run without ablation.
    by: which cells: of `layer`, `pos` and `head` or `neuron` (sets: `set`, `pos`); along dims that are not named
    everything is ablated at once. None: all but `pos`.
    layers: the layers concerned; None = all. Not for sets, which name theirs.
    reference: the prompts that means are taken over (None: the prompts themselves), or the corrupted twin of each
    prompt for `Resample` (None: each takes another prompt of its group). groups: the template of each prompt.
    Caveats: an effect near 0 does not show that a part is unused: another may stand in for it.
    Errors: ValueError for a protocol without the data it requires, cells by position although lengths differ; KeyError
    for an unknown part or dim; IndexError for a layer, head or neuron that does not exist.

    Example:
        >>> found = ablate(model, prompt, "head", protocol=Zero(), metric=interp.logit_difference(" Mary", " John"))
        >>> found.effect.dims
        ('layer', 'head')
    """
    metric = logit_difference() if metric is None else metric
    batch = metric.posed(model.text.batch(prompts, prepend_bos=prepend_bos), model.text)
    given = None if reference is None else model.text.batch(reference, prepend_bos=prepend_bos)
    cells, coords = _asked(what, model.transformer.config, layers, by, batch)
    planned = _planned(model.transformer, Data(protocol, batch, given, groups), cells, batch_size)
    found = effects(model.transformer, batch, metric, planned, batch_size=batch_size)
    attrs = {
        "what": what if isinstance(what, str) else "sets",
        "protocol": as_json(protocol),
        "reference": "the prompts themselves" if given is None else f"{len(given)} prompts given",
    }
    return found.table("ablate", coords, metric, attrs)


Cells = list[tuple[list[Part], int | None]]
"""The parts of every variant, and the column concerned (None: all)."""
Coords = dict[str, list[int] | list[str]]


def _asked(
    what: Kind | Sequence[Sequence[str]],
    config: ModelConfig,
    layers: Sequence[int] | None,
    by: Sequence[str] | None,
    batch: Batch,
) -> tuple[Cells, Coords]:
    """The variants that `ablate` was asked for, in the order of the coords."""
    return _grid(what, config, layers, by, batch) if isinstance(what, str) else _sets(what, layers, by, batch)


def _planned(model: Transformer, data: Data, cells: Cells, batch_size: int) -> Planned:
    """Every cell with what stands in for it, and the patterns that stay, if they are to."""
    names = list(dict.fromkeys(part.site for parts, _ in cells for part in parts))
    fill = data.fill(model, names, batch_size=batch_size)

    def planned(some: Batch, rows: slice) -> tuple[list[Variant], Variant]:
        donors = fill(rows)
        variants = [Variant([part.put(donors[part.site], pos) for part in parts]) for parts, pos in cells]
        frozen = clean_patterns(model, some) if data.protocol.freeze_patterns else {}
        return variants, Variant([Put(site, pattern) for site, pattern in frozen.items()])

    return planned


def _grid(
    kind: str, config: ModelConfig, layers: Sequence[int] | None, by: Sequence[str] | None, batch: Batch
) -> tuple[Cells, Coords]:
    """One variant per cell of a kind of part, dims in the order of its site's axes."""
    if kind not in get_args(Kind):
        raise KeyError(
            f"what must be one of {', '.join(get_args(Kind))}, got {kind!r}; {nearest(kind, get_args(Kind))}"
        )
    site, axis = _SITES[kind]
    which = chosen_layers(layers, config.n_layers)
    sites.find(f"blocks.{which[0]}.{site}", config)
    d_mlp = config.mlp.d_mlp if isinstance(config.mlp, MLP | ConvMLP) else 0
    sizes: Coords = {"layer": which, "pos": list(range(batch.tokens.shape[1]))}
    unit = kind.removesuffix("_before")
    if axis is not None:
        sizes[unit] = list(range(config.n_heads if axis == "h" else d_mlp))
    coords = _kept(sizes, by, batch)
    cells: Cells = []
    for index in product(*(range(len(labels)) for labels in coords.values())):
        at = dict(zip(coords, index, strict=True))
        inner = ((axis, at[unit]),) if axis is not None and unit in at else ()
        mine = [which[at["layer"]]] if "layer" in at else which
        cells.append(([Part(f"blocks.{layer}.{site}", inner) for layer in mine], at.get("pos")))
    return cells, coords


def _sets(
    sets: Sequence[Sequence[str]], layers: Sequence[int] | None, by: Sequence[str] | None, batch: Batch
) -> tuple[Cells, Coords]:
    """One variant per set of named parts (and column)."""
    if layers is not None:
        raise ValueError(f"sets name their layers themselves: layers={list(layers)} has no meaning")
    if not sets or not all(sets) or any(isinstance(names, str) for names in sets):
        raise ValueError(f"sets of at least one name each are required, [['a0.h1', 'm0'], ...], got {sets!r}")
    parts = {"+".join(names): [part_named(name) for name in names] for names in sets}
    if len(parts) < len(sets):
        raise ValueError(f"every set is required once, got {[list(names) for names in sets]}")
    coords = _kept({"set": list(parts), "pos": list(range(batch.tokens.shape[1]))}, by, batch)
    if "set" not in coords:
        raise KeyError("sets are told apart in every result: 'set' is required in `by`")
    cells: Cells = [
        (some, pos)
        for some in parts.values()
        for pos in (range(len(coords["pos"])) if "pos" in coords else [None])
    ]
    return cells, coords


def _kept(possible: Coords, by: Sequence[str] | None, batch: Batch) -> Coords:
    """The dims of the result with their labels."""
    for dim in by or ():
        if dim not in possible:
            raise KeyError(f"the dims here are {', '.join(possible)}, not {dim!r}; {nearest(dim, possible)}")
    kept = {dim: x for dim, x in possible.items() if (dim != "pos" if by is None else dim in by)}
    if "pos" in kept:
        check_one_length(batch, "cells by pos")
    return kept
