"""The exact effect of corrupting every edge of a small model, one at a time: what edge attribution estimates."""

from typing import TYPE_CHECKING

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from interp.causal.contrast import Contrast, Watched
from interp.causal.graph import EdgeGraph
from interp.circuits.edge_scores import Change
from interp.circuits.interchange import places
from interp.core.precision import wide
from interp.core.results import labelled
from interp.core.stats import Moments
from interp.data.text import Prompts
from interp.model.edits import Edit, Set
from interp.model.tap import Read
from interp.model.transformer import Transformer
from interp.passes.metrics import Metric, logit_difference
from interp.passes.observe import Subject
from interp.passes.sweep import Sweep
from interp.passes.variants import Variant

if TYPE_CHECKING:
    import xarray as xr


def edge_effects(
    model: Subject,
    clean: Prompts,
    corrupt: Prompts,
    *,
    metric: Metric | None = None,
    each: bool = False,
    prepend_bos: bool = True,
    batch_size: int = 32,
) -> "xr.Dataset":
    """The exact change of the metric when one edge carries the corrupted run's value, for every edge.

    Edge u -> v: v reads u's output of the corrupted run, all else as in the clean run, and everything behind v is
    recomputed (path patching of a single edge: Goldowsky-Dill et al. 2023, arXiv:2304.05969).
    Returns what `edge_attribution` returns, which estimates it: `score`, `score_low`, `score_high` [sender, receiver],
    NaN where there is no edge; `clean`, `corrupt` [prompt]; with `each`, `each` [prompt, sender, receiver]. Positive:
    corrupting the edge raises the metric.
    metric: None is the logit difference of the answers that the clean batch carries; one that compares (KL divergence)
    compares with the clean run.
    Cost: one planned sweep per input site; every variant starts at its receiver's block. For small models: with
    GPT-2 small's 32 491 edges it takes as many partial passes. Memory: what every sender says in d_model.
    Errors: ValueError for pairs that do not align, and models whose stream is no sum (`EdgeGraph.of`).

    Example:
        >>> pairs = torch.tensor([[5, 6, 7]]), torch.tensor([[5, 9, 7]])
        >>> edge_effects(model, *pairs, metric=logit_difference(3, 4)).score.dims
        ('sender', 'receiver')
    """
    metric = logit_difference() if metric is None else metric
    graph = EdgeGraph.of(model.transformer.config)
    pair = Contrast.of(model, clean, corrupt, metric, prepend_bos=prepend_bos)
    found = [_effects(model.transformer, graph, some, metric) for some in pair.split(batch_size)]
    effects, before, after = (torch.cat(part) for part in zip(*found, strict=True))
    missing, dims = ~graph.exists.to(effects.device), ("sender", "receiver")
    cells = Moments.of(effects).cells("score", dims)
    cells |= {"each": (("prompt", *dims), effects)} if each else {}
    return labelled(
        "edge_effects",
        {
            **{name: (axes, x.masked_fill(missing, torch.nan)) for name, (axes, x) in cells.items()},
            "clean": (("prompt",), before),
            "corrupt": (("prompt",), after),
        },
        coords={"sender": graph.senders, "receiver": graph.receivers},
        attrs={
            "method": "exact", "metric": metric.name, "unit": metric.unit, "edges": len(graph),
            "positive": "corrupting the edge raises the metric",
        },
    )  # fmt: skip


@torch.no_grad()
def _effects(
    model: Transformer, graph: EdgeGraph, pair: Contrast, metric: Metric
) -> tuple[Float[Tensor, "b s r"], Float[Tensor, "b"], Float[Tensor, "b"]]:
    """The effects of some pairs, and the metric of their clean and corrupted runs."""
    watched, reads = Watched(model, metric), Change.reads(model)
    inputs = tuple(Read(_read(site)) for site, *_ in places(model, graph))
    here = watched.recorded(pair.clean, tuple(dict.fromkeys((*reads, *inputs))))
    there = watched.recorded(pair.corrupt, reads)
    if metric.compares:
        watched = Watched(model, metric, watched.columns(here.output, pair.clean))
    b, p = pair.clean.tokens.shape
    change = Change.between(model, here.trace, there.trace).vectors(graph, slice(0, b), slice(0, p))
    values = [watched.value(run.output, batch) for run, batch in ((here, pair.clean), (there, pair.corrupt))]
    found = change.new_zeros(b, *graph.exists.shape)
    for site, receivers, heads in places(model, graph):
        seen = int(graph.visible[receivers.start])
        stream = wide(here.trace[Read(_read(site))])[:, None] + change[:, :seen]
        variants = _variants(site, stream, receivers.stop - receivers.start if heads else 0)
        swept = Sweep(model, pair.clean, variants).run(metric)
        cells = rearrange(swept.values - swept.base, "(s v) b -> b s v", s=seen)
        found[:, :seen, receivers] = cells.to(found)
    return found, wide(values[0]), wide(values[1])


def _read(site: str) -> str:
    """Where the stream that an input reads can be recorded once, without a copy for every head."""
    block, _, name = site.rpartition(".")
    return f"{block}.hook_resid_pre" if name.startswith(("hook_q", "hook_k", "hook_v")) else site


def _variants(site: str, stream: Float[Tensor, "b s p d"], heads: int) -> list[Variant]:
    """One per sender and input: the input reads the stream with that sender corrupted; 0 heads: it has no head axis."""
    found = []
    for donor in stream.unbind(1):
        copies = donor[:, :, None].expand(-1, -1, heads, -1) if heads else donor
        dim, put = "head" if "hook_q" in site else "kv_head", Set(copies)
        found += [Variant([Edit(site, put, {dim: h} if heads else {})]) for h in range(max(1, heads))]
    return found
