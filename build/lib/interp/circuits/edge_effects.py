"""The exact effect of changing every edge of a small model, one at a time: what edge attribution estimates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from interp.causal.contrast import Contrast, Direction, Watched, paired
from interp.causal.effects import Measured, Table, causal
from interp.causal.graph import EdgeGraph
from interp.circuits.edge_scores import Change, check_edits
from interp.circuits.interchange import inputs
from interp.core.boundary import public
from interp.core.stats import wide
from interp.data.batch import Batch, Prompts
from interp.data.sources import Data
from interp.model.edits import Edit, Set
from interp.model.tap import Read
from interp.model.transformer import Transformer
from interp.passes.analysis import Analysis, Question
from interp.passes.metrics import LogitFunction, Metric, as_metric
from interp.passes.observe import Model, Subject, text_of
from interp.passes.sweep import Sweep
from interp.passes.variants import Variant
from interp.runs.run import answered

if TYPE_CHECKING:
    import xarray as xr


@dataclass(frozen=True, eq=False)
class EdgeEffects(Question):
    """The exact effect of every edge; `edge_effects` describes the result. Asked of pairs of prompts."""

    metric: Metric | LogitFunction | None = None
    """None = the logit difference of the answers that the data bring."""
    direction: Direction = "denoise"
    """denoise: clean values into the corrupted run; noise: the other way round."""
    each: bool = False
    """Whether every prompt's effects are kept."""

    def asked(self, model: Subject) -> Analysis:
        """One planned sweep per input site and batch of pairs."""
        metric, graph = as_metric(self.metric), EdgeGraph.of(model.transformer.config)
        check_edits(model.transformer)
        how = {"method": "exact", "direction": self.direction}
        table = Table.of_edges(self.name, graph, metric, model.text, how)
        measure = partial(_measured, graph=graph, metric=metric, direction=self.direction)
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
    edits: Sequence[Edit] = (),
    prepend_bos: bool = True,
    batch_size: int = 32,
) -> xr.Dataset:
    """The exact change of the metric when one edge carries the other run's value, for every edge.

    Edge u -> v: v reads u's output of the other run, all else as in the own run, and everything after v is recomputed
    (path patching of a single edge: Goldowsky-Dill et al. 2023, arXiv:2304.05969). denoise: the clean run's values into
    the corrupted run, positive where the clean edge raises the metric; noise: the other way round.
    Returns what `edge_attribution` returns, which estimates it: Dataset[sender, receiver] with `value`, `low`, `high`
    (NaN where there is no edge) and `n`, `normalised`, `changed` (whether the edge carries anything else in any
    prompt), `clean` and `corrupt`, the coordinate `edge`; with `each`, every prompt's effects.
    metric: a `Metric` or a function of the logits at the last token; None is the logit difference of the answers that
    the clean prompts bring; one that compares (KL divergence) compares with the clean run.
    Cost: one planned sweep per input site; every variant starts at its receiver's block. For small models: with
    GPT-2 small's 32 491 edges it takes as many partial passes. Memory: what every sender says in d_model.
    Errors: ValueError for pairs that do not align, and models (or edits) whose stream is no sum (`EdgeGraph.of`).

    Example:
        >>> pairs = torch.tensor([[5, 6, 7]]), torch.tensor([[5, 9, 7]])
        >>> found = edge_effects(model, *pairs, metric=interp.logit_difference(3, 4))
        >>> interp.frame(found).edge[0]
        'L0.resid->L0H0.q'
    """
    data = paired(text_of(model), clean, corrupt, prepend_bos=prepend_bos)
    question = EdgeEffects(metric, direction, each)
    return answered(question, model, data, edits=edits, prepend_bos=prepend_bos, batch_size=batch_size)


@torch.no_grad()
def _measured(
    model: Transformer, batch: Batch, graph: EdgeGraph, metric: Metric, direction: Direction
) -> Measured:
    """The effects in some pairs, and the metric of their clean and corrupted runs."""
    pair, watched, reads = Contrast.of(batch, direction), Watched(model, metric), Change.reads(model)
    edited = {edit.site for edit in model.edits}
    read = {each.site: _read(each.site, edited) for each in inputs(model, graph)}
    here = watched.recorded(pair.own, tuple(dict.fromkeys((*reads, *map(Read, read.values())))))
    there = watched.recorded(pair.other, reads)
    watched = watched.beside(pair.runs(here.output, there.output)["clean"], pair.own)
    b, p = batch.tokens.shape
    change = Change.between(model, here.trace, there.trace).vectors(graph, slice(0, b), slice(0, p))
    found = change.new_zeros(b, *graph.exists.shape)
    changed = torch.zeros_like(found, dtype=torch.bool)
    for site, receivers, heads, _ in inputs(model, graph):
        seen_by = int(graph.visible[receivers.start])
        stream = wide(here.trace[Read(read[site])])
        variants = _variants(
            site, stream, change[:, :seen_by], receivers.stop - receivers.start if heads else 0
        )
        swept = Sweep(model, pair.own, variants).run(metric, watched.reference)
        cells, moved = (
            rearrange(x, "(s v) b -> b s v", s=seen_by) for x in (swept.values - swept.base, swept.changed)
        )
        found[:, :seen_by, receivers], changed[:, :seen_by, receivers] = cells.to(found), moved.to(changed)
    runs = pair.runs(*(wide(watched.value(run.output, pair.own)) for run in (here, there)))
    return Measured(found, changed, runs)


def _read(site: str, edited: set[str]) -> str:
    """Where the stream that an input reads can be recorded once, without a copy for every head."""
    block, _, name = site.rpartition(".")
    own = not name.startswith(("hook_q", "hook_k", "hook_v")) or site in edited
    return site if own else f"{block}.hook_resid_pre"


def _variants(
    site: str, stream: Float[Tensor, "b p *h d"], change: Float[Tensor, "b s p d"], heads: int
) -> list[Variant]:
    """One per sender and input, which reads the stream with that sender's change; 0 heads: it has no head axis."""
    found = []
    for moved in change.unbind(1):
        if stream.ndim > moved.ndim:  # every head reads a stream of its own
            copies = stream + moved[:, :, None]
        else:
            copies = stream + moved
            copies = copies[:, :, None].expand(-1, -1, heads, -1) if heads else copies
        dim, put = "head" if "hook_q" in site else "kv_head", Set(copies)
        found += [Variant([Edit(site, put, {dim: h} if heads else {})]) for h in range(max(1, heads))]
    return found
