"""Exact effect of changing edges one at a time, all of a small model's or some: what edge attribution estimates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm import tqdm

from interp.causal.contrast import Contrast, Direction
from interp.causal.effects import EffectTable, MeasuredEffects, causal
from interp.causal.graph import EdgeGraph
from interp.circuits.edge_attribution import EdgeAttribution, EdgeMethod
from interp.circuits.edge_rankings import largest, worth
from interp.circuits.edge_scores import SenderChange, check_edits
from interp.circuits.interchange import inputs
from interp.core.boundary import public
from interp.core.kinds import Count
from interp.core.notes import note
from interp.core.results import noted
from interp.core.stats import upcast
from interp.core.transfers import to_device
from interp.data.batch import Batch, Prompts
from interp.data.pairs import paired
from interp.data.sources import Data
from interp.model.edits import Edit, Set
from interp.model.tap import Read
from interp.model.transformer import Transformer
from interp.passes.metrics import LogitFunction, Metric, as_metric
from interp.passes.needs import Steps, recorded, swept
from interp.passes.observe import Model, Subject, as_network, text_of
from interp.passes.question import ByRow, Question
from interp.passes.variants import Variant
from interp.runs.run import answered

if TYPE_CHECKING:
    import xarray as xr


MANY = 5_000
"""Edges from which a call notes beforehand that there are so many."""
PRESELECTING: EdgeMethod = "eap-ig-inputs"
"""The estimate that finds the largest edges: it sees effects that a saturated softmax hides from one gradient."""


@dataclass(frozen=True, eq=False)
class EdgeEffects(Question):
    """Exact effect of each edge on the metric when it carries the other run's value, for pairs of prompts.

    Args:
        metric: a `Metric`, or a function of the logits [b, v] at the last token; None is the logit difference of the
            answers that come with the clean prompts.
        direction: "denoise" puts clean values into the corrupted run, "noise" the other way round.
        each: whether every prompt's effects are kept.
        edges: edges that are changed, by name; None: all.

    Returns:
        The Dataset of `edge_effects`.

    Raises:
        ValueError: models (or edits) whose stream is no sum.
        KeyError: an edge that the model does not have.

    See Also:
        `edge_effects`: the function, which also takes a number of edges.
    """

    metric: Metric | LogitFunction | None = None
    direction: Direction = "denoise"
    each: bool = False
    edges: Sequence[str] | None = None

    def bind(self, model: Subject) -> ByRow:
        """One planned sweep per input site and batch of pairs."""
        metric, graph = as_metric(self.metric, model.text), EdgeGraph.of(model.transformer.config)
        check_edits(model.transformer)
        attrs = {"method": "exact", "direction": self.direction}
        if self.edges is not None and not self.edges:
            raise ValueError("edges must name at least one edge, or be None for all, got none")
        changed = graph.exists if self.edges is None else graph.chosen(self.edges)
        table = EffectTable.of_edges(self.name, graph, metric, model.text, attrs, changed)
        measure = partial(_effects, graph=graph, measured=changed, metric=metric, direction=self.direction)
        return causal(model, table, measure, each=self.each, pairs=True)


@public()
def edge_effects(
    model: Model,
    clean: Prompts | Data,
    corrupt: Prompts | Data,
    *,
    metric: Metric | LogitFunction | None = None,
    direction: Direction = "denoise",
    each: bool = False,
    edges: Count | Sequence[str] | None = None,
) -> xr.Dataset:
    """Exact effect of each edge, or of some, on the metric when it carries the other run's value.

    Edge u -> v: v reads u's output of the other run, all else as in the own run, and everything after v is recomputed
    (path patching of a single edge).

    Args:
        clean, corrupt: prompts; each pair has the same number of tokens, aligned one by one. Files and streams are
            paired row by row.
        metric: a `Metric`, or a function of the logits [b, v] at the last token; None is the logit difference of the
            answers that come with the clean prompts. A metric that compares, such as the KL divergence, compares with
            the clean run.
        direction: "denoise" puts the clean run's values into the corrupted run, so that the effect is positive where
            the clean edge raises the metric; "noise" the other way round.
        each: whether every prompt's effects are kept.
        edges: which edges are changed: by name ("L0.mlp->L3H1.q"), or how many, those of the largest estimates by
            `edge_attribution` (method "eap-ig-inputs") on the same pairs; None: all. An edge that the estimate takes
            for small is then not measured, and a note says how many were not.

    Returns:
        Dataset over `sender` and `receiver`, in the metric's unit, as from `edge_attribution`, which estimates it. The
        coordinate `edge` is true where an edge was changed; `interp.frame` has its name in the column `edge`.

        - `value`: effect, mean over prompts, with the ends `low` and `high` of its 95 % interval (NaN where there is
          no edge, or none that was changed) and `n`.
        - `normalised`: `value` as a share of the difference between the runs.
        - `changed`: whether the edge carries anything else in any prompt.
        - `clean`, `corrupt`: metric of both runs. `each` [prompt, sender, receiver], with `each`: every prompt's
          effects.

    Raises:
        ValueError: pairs that do not align, models (or edits) whose stream is no sum (`EdgeGraph.of`), and a number of
            edges outside 1 to all.
        KeyError: an edge that the model does not have.

    Memory:
        What every sender adds, in d_model.

    Cost:
        One planned sweep per input site; an edge is a pass from its receiver's block on, half a pass on the average.
        All 32 491 of GPT-2 small are for patient people; a note says so, and a bar how long it will be.

    Source:
        Goldowsky-Dill et al. 2023, arXiv:2304.05969.

    See Also:
        `edge_attribution`: estimates of all edges from one backward pass.

    Example:
        >>> pairs = torch.tensor([[5, 6, 7]]), torch.tensor([[5, 9, 7]])
        >>> found = edge_effects(model, *pairs, metric=interp.logit_difference(3, 4))
        >>> interp.frame(found).edge[0]
        'L0.resid->L0H0.q'
    """
    data = paired(text_of(model), clean, corrupt)
    answer = partial(answered, model=model, data=data)
    graph = EdgeGraph.of(as_network(model).config)
    if isinstance(edges, int):
        if not 1 <= edges <= len(graph):
            raise ValueError(f"edges must be 1 to {len(graph)}, their names, or None for all, got {edges}")
        estimate = answer(EdgeAttribution(metric=metric, method=PRESELECTING, direction=direction))
        edges = tuple(graph.names(largest(worth(estimate), edges)))
    elif edges is None and len(graph) > MANY:
        note(
            f"edge_effects: each of {len(graph):,} edges is changed in every pair, about {len(graph) // 2:,} passes of "
            "each; edges=n changes those of the n largest estimates alone"
        )
    result = answer(EdgeEffects(metric, direction, each, edges))
    if edges is None or len(edges) == len(graph):
        return result
    return noted(result, f"{len(set(edges))} of {len(graph)} edges were changed; the others are NaN")


@torch.no_grad()
def _effects(
    model: Transformer,
    batch: Batch,
    graph: EdgeGraph,
    measured: Bool[Tensor, "sender receiver"],
    metric: Metric,
    direction: Direction,
) -> Steps[MeasuredEffects]:
    """The effect of every `measured` edge in some pairs (0 for other edges), and the metric of both runs."""
    pair, reads = Contrast.of(batch, direction), SenderChange.reads(model)
    edited = {edit.site for edit in model.edits}
    stream_site = {
        receiver_input.site: _recordable_site(model, receiver_input.site, edited)
        for receiver_input in inputs(model, graph)
    }
    own_reads = list(dict.fromkeys((*reads, *map(Read, stream_site.values()))))
    own_run = yield from recorded(pair.own, own_reads, final=True, exact=True)
    other_run = yield from recorded(pair.other, reads, final=True, exact=True)
    reference = pair.runs(own_run, other_run)["clean"].reference(metric)
    b, p = batch.tokens.shape
    change = SenderChange.between(model, own_run.trace, other_run.trace).vectors(
        graph, slice(0, b), slice(0, p)
    )
    effects = change.new_zeros(b, *graph.exists.shape)
    changed = torch.zeros_like(effects, dtype=torch.bool)
    with tqdm(total=int(measured.sum()), desc="edges", delay=1, leave=False) as bar:
        for site, receivers, heads, _ in inputs(model, graph):
            cells = measured[:, receivers].nonzero()
            if not len(cells):
                continue
            stream = upcast(own_run.trace[Read(stream_site[site])])
            variants = _variants(
                site, stream, change, cells, receivers.stop - receivers.start if heads else 0
            )
            sweep = yield from swept(pair.own, variants, metric, reference=reference)
            place = to_device(cells, effects.device)
            effects[:, place[:, 0], receivers.start + place[:, 1]] = (sweep.values - sweep.base).mT.to(
                effects
            )
            changed[:, place[:, 0], receivers.start + place[:, 1]] = sweep.changed.mT.to(changed)
            bar.update(len(cells))
    runs = pair.runs(*(run.value(metric, reference) for run in (own_run, other_run)))
    return MeasuredEffects(effects, changed, runs)


def _recordable_site(model: Transformer, site: str, edited: set[str]) -> str:
    """Site where the stream that an input reads is recorded: once for all heads, if no edit changes their copies."""
    block, _, name = site.rpartition(".")
    at_site = not name.startswith(("hook_q", "hook_k", "hook_v")) or site in edited
    return site if at_site else f"{block}.{model.config.block.attention_reads}"


def _variants(
    site: str,
    stream: Float[Tensor, "b p *h d"],
    change: Float[Tensor, "b s p d"],
    cells: Int[Tensor, "n 2"],
    heads: int,
) -> list[Variant]:
    """One variant per sender and input, which reads the stream with that sender's change.

    Args:
        cells: index of the sender, and of the input within the site, of every edge.
        heads: length of the site's head axis; 0: it has none.
    """
    variants, dim = [], "head" if "hook_q" in site else "kv_head"
    for sender, of_sender in groupby(cells.tolist(), key=itemgetter(0)):
        moved = change[:, sender]
        if stream.ndim > moved.ndim:  # every head reads a stream of its own
            copies = stream + moved[:, :, None]
        else:
            copies = stream + moved
            copies = copies[:, :, None].expand(-1, -1, heads, -1) if heads else copies
        put = Set(copies)
        variants += [Variant([Edit(site, put, {dim: h} if heads else {})]) for _, h in of_sender]
    return variants
