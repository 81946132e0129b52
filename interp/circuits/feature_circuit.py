"""Sparse feature circuits: which features of a model's dictionaries make a metric, and through which others.

Nodes are features and errors of the dictionaries that stand in a model's blocks, kept by their effect on the metric;
edges are the direct paths between them. The circuit is then run: everything outside it, or inside, gets other values
(Marks et al. 2024, "Sparse Feature Circuits", arXiv:2403.19647).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.causal.contrast import Direction
from interp.causal.effects import ENDS, SIGN
from interp.causal.graph import LOGITS
from interp.causal.missed_effects import PutInCells, positions_of
from interp.causal.stand_ins import StandIns, recorded
from interp.circuits.edge_attribution import GradientLine, LineRule
from interp.circuits.feature_edges import edge_weights
from interp.circuits.feature_nodes import (
    Contrasted,
    FeatureNode,
    FeatureSpace,
    node_effects,
    nodes_by_layer,
    sites_of,
)
from interp.circuits.interchange import STAND_INS, Replacement, check_reference
from interp.core.kinds import Count, NotNegative, PositiveCount, Seed
from interp.core.results import labelled
from interp.core.stats import FEWEST, MaskedMeans, Means, Moments, Rows, over, poisson_weights
from interp.core.transfers import to_device
from interp.core.viewer import Brief
from interp.data.batch import Batch, Prompts, is_prompts
from interp.data.pairs import Pairs
from interp.data.sources import Data
from interp.data.stream import DataSource
from interp.data.text import Text
from interp.model.edits import Edit
from interp.model.mounted import of_one_block
from interp.model.transformer import Transformer
from interp.passes.metrics import LogitFunction, Metric, as_metric, followed
from interp.passes.needs import Steps, swept
from interp.passes.observe import Model, Subject, text_of
from interp.passes.question import Ask, ByRow, Question, Staged, Stages, Values
from interp.passes.variants import Variant
from interp.runs.functions import of_pairs_or_rows

if TYPE_CHECKING:
    import xarray as xr

NodeMethod = Literal["attribution", "integrated"]
RESAMPLES = 2000
"""Bootstrap resamples of the prompts, for the intervals of faithfulness."""
POOR = 0.5
"""Share of the summed size of all effects from which a note says that the errors carry it."""
CIRCUITS = ("found", "random", "complement", "no feature", "every feature")
"""The features that stay as they are in each run of the result."""
ERRORS = ("circuit", "kept", "replaced")
"""Which errors stay as they are: those that the circuit has (of its complement: has not), all, none."""
SHARE = "share of the metric's difference between the whole model and every feature and error replaced"


@dataclass(frozen=True, eq=False, repr=False)
class FeatureCircuit(Brief, Question):
    """Circuit of the features and errors of a model's dictionaries: nodes, edges, and what it keeps of the metric.

    The model has dictionaries in its blocks, `model.with_dictionaries([...])`: one in a block, of a sublayer or of the
    stream. A node is a feature, or the error of a dictionary, which is what it leaves unexplained. Its effect is that
    of giving it another value (of the corrupted prompt, a mean, zero), to first order: change times gradient, summed
    over positions and averaged over prompts. Nodes of an effect of at least `node_threshold` are kept.

    An edge u -> d is the gradient of the metric at d times the gradient of d with respect to u times the change of u,
    while what all dictionaries between them write is held; `logits` stands for the metric, whose edges hold what every
    other dictionary writes. So at one point ("attribution") the edges out of a node into all nodes after it sum to its
    effect, and what is missing runs through nodes that were not kept.

    Then the circuit is run on the clean prompts, with all features and errors outside it replaced:
    (m(C) - m(nothing kept)) / (m(M) - m(nothing kept)).

    Args:
        clean, corrupt: prompts; each pair has the same number of tokens, aligned one by one. Files and streams are
            paired row by row. Without corrupted ones `replacement` is "zero" or "mean".
        metric: a `Metric`, or a function of the logits [b, v] at the last token; None is the logit difference of the
            answers that come with the prompts.
        method: where the gradient of an effect is taken: "attribution", in the run that is intervened on;
            "integrated", its mean over runs in which all features and the error of one dictionary move to their other
            values together. Use the second for numbers that you report: it sees what saturates.
        steps: number of runs for each dictionary of the integrated method.
        rule: how these lie, as in `edge_attribution`: "released" begins at the run that is intervened on and leaves the
            other end out, as the paper's code does in "noise"; "midpoint" and "gauss" have a smaller error.
        node_threshold: least size of the effect of a node that is kept, in the metric's unit.
        edge_threshold: least size of the weight of an edge that is kept, in the metric's unit.
        most: most nodes that are kept, those of the largest effects; a note says so where there are more.
        by_position: whether a feature at each position is a node of its own, for prompts that are alike word by word;
            otherwise effects are summed over positions.
        nodes: the circuit's nodes by name, `found.node.values` of other prompts or a circuit of your own; None: those
            of the largest effects on these prompts.
        direction: "noise" puts the other values into the clean run, as the paper does, so that a useful node has a
            negative effect; "denoise" puts clean ones into the corrupted run, of pairs alone.
        replacement: other value of a node, for effects and in the runs of the circuit: "resample", in the corrupted
            prompt of the same pair, "mean", over the `reference` prompts, position by position, or "zero".
        reference: prompts that means are taken over; None: the corrupted ones of the data, or the prompts themselves.
        draws: number of random circuits for the null (0: none), with as many features of every dictionary, drawn from
            those of an effect other than 0, and with the circuit's errors.
        seed: seed of the random circuits and of the resamples.

    Returns:
        Dataset over `node`, with the coordinates `part`, `layer`, `feature` (-1 for errors) and `pos` (-1 for all):

        - `value`: effect of a node, in the metric's unit, mean over prompts, with `low`, `high` and `n`.
        - `edge_value` [sender, receiver]: weight of an edge, mean over prompts, and `edge_ends` [sender, receiver,
          end], the ends low and high of its interval; NaN where there is none or it is below `edge_threshold`.
          Receivers are the nodes and `logits`.
        - `outside` [node]: effect minus all edges into kept nodes and the metric, before `edge_threshold`: what runs
          through nodes that were not kept. With the integrated method gradients of other runs are in it too.
        - `faithfulness` [circuit, errors], with `faithfulness_ends` [..., end], the ends low and high of its 95 %
          interval, a bootstrap over prompts, and `faithfulness_null`, that of the random circuits. Circuits: "found",
          "random", "complement" (0 says that the circuit is complete), "no feature" and "every feature"; `errors` says
          which errors stay: "circuit", those that are nodes of the circuit (of the complement: that are not), "kept",
          all, or "replaced", none.
        - `each` [prompt, circuit, errors]: the metric; `full`, `empty` [prompt]: of the whole model, and with every
          feature and error replaced.
        - `error_share` [layer]: share of the errors in the summed size of all effects in a layer, kept or not;
          `attrs["errors"]` is that of all layers. A circuit of features cannot explain what the errors carry.

    Raises:
        ValueError: a model without dictionaries or with a cross-layer transcoder, no node of so large an effect, a
            metric that is the same with every feature and error replaced, a direction or metric that the replacement
            does not allow, and features that do not fit into memory.
        KeyError, IndexError: a node that the model lacks.

    Caveats:
        A gradient misses what saturates, and effects of one sign in some prompts and another in others cancel. An error
        is one number over all its directions and positions, in which effects cancel too, so its share is at least the
        one given. Nodes are chosen on the same prompts on which the circuit is run: `nodes=` of other prompts judges it
        without that advantage.

    Memory:
        About 8 times the features of a prompt (dictionaries x tokens x features) in a pass, 16 bytes for each feature
        (and position, `by_position`), and nodes x nodes edges; never features x features.

    Cost:
        Of each prompt 4 forward and 2 backward passes, or for the integrated method `steps` times the number of
        dictionaries of both, twice; then, for the edges, a forward pass for each dictionary and, to its block, a
        backward pass for each kept node; and 3 (4 + draws) runs of circuits. The data are read twice.

    Source:
        Marks et al. 2024, "Sparse Feature Circuits", arXiv:2403.19647; which paths its code holds:
        github.com/saprmarks/feature-circuits, circuit.py. There each block has three dictionaries.

    See Also:
        `attribution_patch`: the effects of all features without a circuit. `find_circuit`: of heads and MLPs.

    Example:
        >>> eye, zero = torch.eye(24), torch.zeros(24)
        >>> weights = {"W_enc": eye, "b_enc": zero, "W_dec": eye, "b_dec": zero}
        >>> saes = [
        ...     interp.features.Dictionary(interp.features.ReLU(), weights, reads=f"blocks.{i}.hook_resid_post")
        ...     for i in (0, 1)
        ... ]
        >>> pairs = torch.tensor([[5, 6, 7], [5, 6, 8]]), torch.tensor([[5, 9, 7], [5, 9, 8]])
        >>> asked = {"metric": interp.logit_difference(3, 4), "node_threshold": 0.0, "most": 8, "draws": 1}
        >>> found = feature_circuit(model.with_dictionaries(saes), *pairs, **asked)
        >>> found.edge_value.shape, float(found.faithfulness.sel(circuit="every feature", errors="kept"))
        ((8, 9), 1.0)
    """

    _: KW_ONLY
    metric: Metric | LogitFunction | None = None
    method: NodeMethod = "attribution"
    steps: PositiveCount = 10
    rule: LineRule = "released"
    node_threshold: NotNegative = 0.1
    edge_threshold: NotNegative = 0.01
    most: PositiveCount = 100
    by_position: bool = False
    nodes: Sequence[str] | None = None
    direction: Direction = "noise"
    replacement: Replacement = "resample"
    reference: Prompts | None = None
    draws: Count = 5
    seed: Seed = 0

    def with_data(
        self, model: Model, data: DataSource | Data | Pairs
    ) -> tuple[Question, DataSource | Data | Pairs]:
        """The question with its reference prompts (by default those of the data, if in memory), and the data."""
        check_reference(self.replacement, self.reference)
        if self.reference is not None or self.replacement != "mean":
            return self, data
        batch = _prompts_in_memory(data, text_of(model))
        reference = None if batch is None else followed(batch, self.metric, text_of(model))
        return replace(self, reference=reference), data

    def bind(self, model: Subject) -> Staged:
        """Two stages over the data: effects of all nodes, then edges and runs of the nodes that are kept."""
        network, metric = model.transformer, as_metric(self.metric, model.text)
        space = FeatureSpace.of(network.config)
        of_one_block(network.dictionaries, "a circuit of features")
        if self.draws < 0:
            raise ValueError(f"draws must be a number, at least 0, got {self.draws}")
        if self.direction == "denoise" and self.replacement != "resample":
            raise ValueError(f"direction='denoise' requires replacement='resample', got {self.replacement!r}")
        if self.direction == "noise" and metric.compares:
            raise ValueError(
                f"{metric.name} compares with the clean run, where its gradient is 0: use direction='denoise'"
            )
        if self.nodes is not None:
            _chosen_by_name(self.nodes, space, by_position=self.by_position)
        reference = None if self.reference is None else model.text.batch(self.reference)
        names = space.sites
        fill = StandIns.of(STAND_INS[self.replacement], network, partial(recorded, names=names), reference)
        line = GradientLine(
            "eap" if self.method == "attribution" else "eap-ig-activations", self.steps, self.rule
        )
        how = Contrasted(space, metric, line, self.direction, self.replacement, fill, self.by_position)
        return Staged(
            self.name,
            partial(_stages, model, self, how),
            again="prompts in memory, files or a stream that starts anew",
        )


feature_circuit = of_pairs_or_rows(FeatureCircuit)


def _prompts_in_memory(data: DataSource | Data | Pairs, text: Text) -> Batch | None:
    """The corrupted prompts of data in memory, the prompts themselves where there are none; None for other data."""
    if not is_prompts(data):
        return None
    batch = text.batch(data)
    return batch if batch.corrupt is None else batch.pair()[1]


def _stages(model: Subject, asked: FeatureCircuit, how: Contrasted, has_data: bool) -> Stages[xr.Dataset]:
    """Effects of all nodes, then edges between those that are kept, and the runs of the circuit."""
    make = partial(ByRow, answers=how.metric.answers(model.text), pairs=how.replacement == "resample")
    keep = MaskedMeans if how.by_position else Means
    (effects,) = yield [Ask(make("feature effects", partial(node_effects, how=how), keep))]
    assert isinstance(effects, Means)
    chosen = _chosen(effects.moments["effect"], asked, how)
    kept = nodes_by_layer(chosen.nodes, by_position=how.by_position)
    runs = _runs_of(chosen.nodes, effects.moments["effect"].mean, asked, how.space)
    edges, metrics = yield [
        Ask(make("feature edges", partial(edge_weights, how=how, kept=kept), Means)),
        Ask(make("feature runs", partial(_metrics_of_runs, how=how, runs=runs), Rows)),
    ]
    assert isinstance(edges, Means) and isinstance(metrics, Rows)
    return _table(asked, how, chosen, effects.moments["effect"], edges.moments["edge"], metrics)


# which nodes


@dataclass(frozen=True, eq=False)
class Chosen:
    """The nodes of a circuit, in order, and sentences about how they were chosen."""

    nodes: tuple[FeatureNode, ...]
    notes: tuple[str, ...] = ()


def _chosen(effect: Moments, asked: FeatureCircuit, how: Contrasted) -> Chosen:
    """The nodes of the largest effects, or those that were named."""
    if asked.nodes is not None:
        return Chosen(_chosen_by_name(asked.nodes, how.space, by_position=how.by_position))
    size = effect.mean.abs().nan_to_num(nan=0.0).flatten()
    passing = int(((size >= asked.node_threshold) & (size > 0)).sum())
    best = size.argsort(descending=True, stable=True)[: min(passing, asked.most)].tolist()
    columns = effect.mean.shape[-1]
    nodes = [how.space.node(i % columns, i // columns if how.by_position else -1) for i in best]
    if not nodes:
        place = int(size.argmax())
        raise ValueError(
            f"node_threshold: no node has an effect of {asked.node_threshold} {how.metric.unit}, the largest is that "
            f"of {how.space.node(place % columns)}, {float(size[place]):.3g}"
        )
    cut = f"{passing} nodes pass node_threshold={asked.node_threshold}; most={asked.most} of the largest are kept"
    return Chosen(tuple(sorted(nodes)), (cut,) if passing > asked.most else ())


def _chosen_by_name(
    names: Sequence[str], space: FeatureSpace, *, by_position: bool
) -> tuple[FeatureNode, ...]:
    """The nodes of these names, in order. ValueError for none, one twice, or one with a position too many or few."""
    nodes = [FeatureNode.of(name) for name in names]
    for node in nodes:
        space.place(node)
        if by_position != (node.pos >= 0):
            how = "with its position, L5F123@7" if by_position else "without a position"
            raise ValueError(f"nodes: by_position={by_position} requires every node {how}, got {str(node)!r}")
    if not nodes or len(set(nodes)) < len(nodes):
        raise ValueError(f"nodes: at least one node, and none twice, is required, got {list(names)}")
    return tuple(sorted(nodes))


# runs of the circuit


@dataclass(frozen=True, eq=False)
class CircuitRun:
    """The features and errors that one run replaces, by layer."""

    features: Mapping[int, Bool[Tensor, "*p s"]]
    errors: Mapping[int, Bool[Tensor, "*p"]]

    def edits(
        self, replaced: Mapping[str, Tensor], where: Int[Tensor, "b p"], *, by_position: bool
    ) -> list[Edit]:
        """The edits of the run. replaced: other values, by site; where: the position of every column."""
        edits, place = [], ("pos",) if by_position else ()
        for layer, mask in self.features.items():
            features, error = sites_of(layer)
            for site, chosen, dims in (
                (features, mask, (*place, "feature")),
                (error, self.errors[layer], place),
            ):
                if bool(chosen.any()):
                    put = PutInCells(replaced[site], to_device(chosen, where.device), where, dims)
                    edits.append(Edit(site, put))
        return edits


def _runs_of(
    nodes: Sequence[FeatureNode], effect: Float[Tensor, "*p node"], asked: FeatureCircuit, space: FeatureSpace
) -> list[CircuitRun]:
    """The runs of a circuit: of each of `CIRCUITS`, with every draw of "random", those of `ERRORS`.

    Args:
        effect: of every feature and error; those of which it is 0 are drawn into no random circuit.
    """
    inside = torch.zeros(effect.shape, dtype=torch.bool)
    for node in nodes:
        inside[(node.pos, space.place(node)) if node.pos >= 0 else space.place(node)] = True
    generator = np.random.default_rng(asked.seed)
    drawn = [_random_like(inside, effect, space, generator) for _ in range(asked.draws)]
    none, every = torch.zeros_like(inside), torch.ones_like(inside)
    of_errors = (
        [(inside, every, none)] * (1 + len(drawn)) + [(~inside, every, none)] + [(inside, every, none)] * 2
    )
    runs = []
    for kept, choices in zip((inside, *drawn, ~inside, none, every), of_errors, strict=True):
        for errors in choices:
            parts = space.parts
            runs.append(
                CircuitRun(
                    {layer: ~kept[..., part][..., :-1] for layer, part in parts.items()},
                    {layer: ~errors[..., part.stop - 1] for layer, part in parts.items()},
                )
            )
    return runs


def _random_like(
    inside: Bool[Tensor, "*p node"],
    effect: Float[Tensor, "*p node"],
    space: FeatureSpace,
    generator: np.random.Generator,
) -> Bool[Tensor, "*p node"]:
    """As many random features of every dictionary, among those that have an effect."""
    drawn, possible = torch.zeros_like(inside), effect.nan_to_num(nan=0.0) != 0
    for part in space.parts.values():
        features = slice(part.start, part.stop - 1)
        cells = possible[..., features].nonzero()
        n = min(int(inside[..., features].sum()), len(cells))
        picked = cells[torch.from_numpy(generator.choice(len(cells), n, replace=False)) if n else []]
        drawn[..., features][tuple(picked.T)] = True
    return drawn


def _metrics_of_runs(
    model: Transformer, batch: Batch, how: Contrasted, runs: Sequence[CircuitRun]
) -> Steps[Values]:
    """The metric of every prompt in the whole model, and in every run."""
    replaced = yield from how.replaced(batch)
    clean = batch if batch.corrupt is None else batch.pair()[0]
    where = to_device(positions_of(clean.host()), model.device)
    variants = [Variant(run.edits(replaced, where, by_position=how.by_position)) for run in runs]
    sweep = yield from swept(clean, variants, how.metric)
    return {"value": sweep.values.mT, "full": sweep.base}


# the result


def _table(
    asked: FeatureCircuit,
    how: Contrasted,
    chosen: Chosen,
    effect: Moments,
    edges: Moments,
    metrics: Rows,
) -> xr.Dataset:
    """The labelled result."""
    nodes, unit, fewest = chosen.nodes, how.metric.unit, how.metric.fewest
    exists = _possible_edges(nodes)
    weight = edges.mean.masked_fill(~exists, torch.nan)
    kept = exists & (weight.abs() >= asked.edge_threshold) & (weight != 0)
    low, high = edges.interval(fewest=fewest)
    share, errors, size = _error_share(effect.mean, how.space)
    places = torch.tensor([how.space.place(node) for node in nodes])
    index = (torch.tensor([node.pos for node in nodes]), places) if how.by_position else (places,)
    of_nodes = {
        name: (("node",), x[index]) for name, (_, x) in effect.estimate(("node",), fewest=fewest).items()
    }
    names, (values, faithful) = list(map(str, nodes)), _faithfulness(metrics, asked, fewest)
    ends, runs = ("sender", "receiver"), ("circuit", "errors")
    edge_ends = torch.stack((low, high), -1).masked_fill(~kept[..., None], torch.nan)
    return labelled(
        asked.name,
        {
            **of_nodes,
            "outside": (("node",), of_nodes["value"][1] - edges.mean.where(exists, 0.0).sum(1)),
            "edge_value": (ends, weight.masked_fill(~kept, torch.nan)),
            "edge_ends": ((*ends, "end"), edge_ends),
            **{name: ((*runs, "end") if x.ndim == 3 else runs, x) for name, x in faithful.items()},
            **{name: (("prompt", *runs) if x.ndim == 3 else ("prompt",), x) for name, x in values.items()},
            "error_share": (("layer",), share),
        },
        coords={
            "node": names, "sender": names, "receiver": [*names, LOGITS], "circuit": _circuits(asked),
            "errors": list(ERRORS), "end": list(ENDS), "prompt": _rows_of(metrics).tolist(),
            "layer": list(how.space.layers), "edge": (ends, kept.numpy()),
            "part": ("node", [node.part for node in nodes]),
            "feature": ("node", [-1 if node.is_error else node.feature for node in nodes]),
            "pos": ("node", [node.pos for node in nodes]),
        },
        units={
            **dict.fromkeys((*of_nodes, "outside", "edge_value", "edge_ends", *values), unit),
            **dict.fromkeys(faithful, SHARE), "error_share": "share of the summed size of all effects",
        },
        attrs=_attrs(asked, how, kept, errors, size, len(metrics.rows["full"])),
        notes=[*chosen.notes, *_error_notes(errors)],
    )  # fmt: skip


def _possible_edges(nodes: Sequence[FeatureNode]) -> Bool[Tensor, "node receiver"]:
    """Whether a path may lead from a node to each node, and to the metric: to later layers, never to earlier tokens."""
    layer, pos = (torch.tensor([getattr(node, name) for node in nodes]) for name in ("layer", "pos"))
    later = (layer[:, None] < layer) & (pos[:, None] <= pos)
    return torch.cat((later, torch.ones(len(nodes), 1, dtype=torch.bool)), 1)


def _error_share(
    effect: Float[Tensor, "*p node"], space: FeatureSpace
) -> tuple[Float[Tensor, "layer"], float, float]:
    """Share of the errors in the summed size of all effects, by layer and in all, and that sum."""
    size = effect.abs().nan_to_num(nan=0.0)
    size = size.sum(0) if size.ndim == 2 else size
    of_errors = torch.stack([size[part.stop - 1] for part in space.parts.values()])
    totals = torch.stack([size[part].sum() for part in space.parts.values()])
    return of_errors / totals, float(of_errors.sum() / totals.sum()), float(totals.sum())


def _faithfulness(
    metrics: Rows, asked: FeatureCircuit, fewest: int
) -> tuple[dict[str, Tensor], dict[str, Float[Tensor, "circuit errors *end"]]]:
    """The metric of every prompt, and faithfulness with interval and null. ValueError where nothing is explained."""
    value, full = metrics.rows["value"].cpu().double(), metrics.rows["full"].cpu().double()
    found, drawn, others = value.unflatten(1, (-1, len(ERRORS))).split([1, asked.draws, 3], 1)
    random, circuits = drawn.mean(1, keepdim=True) if asked.draws else drawn, _circuits(asked)
    value = torch.cat((found, random, others), 1)  # [prompt circuit errors]
    empty = value[:, circuits.index("no feature"), ERRORS.index("replaced")]
    moved = torch.cat((value.flatten(1) - empty[:, None], (full - empty)[:, None]), 1)
    if not bool(moved[:, -1].mean().abs() > 1e-9 * full.mean().abs()):
        raise ValueError(
            f"the metric is {float(full.mean()):.4g} in the whole model and with every feature and error replaced "
            "alike: nothing to explain"
        )
    resampled = poisson_weights(_rows_of(metrics), RESAMPLES, asked.seed) @ moved
    ratios = (resampled[:, :-1] / resampled[:, -1:]).nan_to_num(nan=0.0)
    ends = torch.full((2, value[0].numel()), torch.nan, dtype=value.dtype)
    if len(full) >= max(FEWEST, fewest):
        ends = ratios.quantile(torch.tensor([0.025, 0.975], dtype=ratios.dtype), 0)
    mean = moved.mean(0)
    faithful = (mean[:-1] / mean[-1]).view(value.shape[1:])
    null = torch.full_like(faithful, torch.nan)
    if asked.draws:
        null[circuits.index("found")] = faithful[circuits.index("random")]
    numbers = {"": faithful, "_ends": ends.mT.reshape(*value.shape[1:], 2), "_null": null}
    return {"each": value, "full": full, "empty": empty}, {f"faithfulness{k}": x for k, x in numbers.items()}


def _circuits(asked: FeatureCircuit) -> list[str]:
    """The circuits of the result: "random" where some were drawn."""
    return [name for name in CIRCUITS if asked.draws or name != "random"]


def _rows_of(metrics: Rows) -> Int[Tensor, "prompt"]:
    """The number of every prompt in its data."""
    return torch.arange(len(metrics.rows["full"])) if metrics.ids is None else metrics.ids.cpu()


def _attrs(
    asked: FeatureCircuit,
    how: Contrasted,
    kept: Bool[Tensor, "node receiver"],
    errors: float,
    size: float,
    prompts: int,
) -> dict[str, str | float | int]:
    integrated = (
        {"steps": len(how.line.points()[0]), "rule": asked.rule} if asked.method == "integrated" else {}
    )
    runs = f"{over('prompts', how.metric.fewest)} (faithfulness: bootstrap)"
    return {
        "metric": how.metric.name, "unit": how.metric.unit, "effect": SIGN, "method": asked.method, **integrated,
        "direction": asked.direction, "replacement": asked.replacement, "node_threshold": asked.node_threshold,
        "edge_threshold": asked.edge_threshold, "edges": int(kept.sum()), "dictionaries": len(how.space.layers),
        "features": sum(how.space.counts), "draws": asked.draws, "seed": asked.seed, "prompts": prompts,
        "interval": runs,
        "null": "as many random active features, the circuit's errors",
        "errors": f"carry {errors:.0%} of the summed size of all effects, {size:.3g} {how.metric.unit}",
    }  # fmt: skip


def _error_notes(errors: float) -> list[str]:
    """Note about errors that carry more than the features."""
    if errors < POOR:
        return []
    return [f"errors carry {errors:.0%} of all effects: most of this is in no feature"]
