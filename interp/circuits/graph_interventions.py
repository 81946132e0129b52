"""What a graph says that removing a node does, beside what removing it does."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from interp.circuits.attribution_graph import one_prompt
from interp.core.boundary import public
from interp.core.kinds import Finite
from interp.core.results import check_result, labelled
from interp.core.stats import upcast
from interp.core.transfers import to_host
from interp.data.batch import Batch, Prompts
from interp.model import sites
from interp.model.edits import Edit, Scale, Set
from interp.model.tap import Read
from interp.model.transformer import Transformer
from interp.passes.metrics import of_logits
from interp.passes.observe import Model, as_model, observe
from interp.passes.question import NotFiniteError
from interp.passes.sweep import Sweep
from interp.passes.variants import Variant
from interp.runs.provenance import with_origin

if TYPE_CHECKING:
    import xarray as xr

PATTERN = "attn.hook_pattern"


@public()
def graph_interventions(
    model: Model,
    prompt: Prompts,
    graph: xr.Dataset,
    *,
    nodes: Sequence[str] | None = None,
    factor: Finite = 0.0,
    edits: Sequence[Edit] = (),
    prepend_bos: bool | None = None,
) -> xr.Dataset:
    """Multiplies nodes of an attribution graph one at a time, and compares the logits with what the graph predicts.

    The graph predicts (factor - 1) x effect, which holds exactly where norm scales, attention patterns and the slopes
    of neurons stay as they were. Measured is the model as it is, and the model with its attention patterns held.

    Args:
        model: the model of the graph.
        prompt: the prompt of the graph.
        graph: what `attribution_graph` or `prune_graph` returned.
        nodes: names of nodes of the graph between embeddings and logits, such as `L12N345@7`; None: all.
        factor: what their values are multiplied by; 0 removes them.
        edits, prepend_bos: as for the graph.

    Returns:
        Dataset over `part`, the names of the nodes, in logits (of several logits the mean weighted by probability):

        - `value`: change of the logits in the model as it is.
        - `held`: the same with every attention pattern held as it was.
        - `predicted`: what the graph says.

        Attributes `rank_correlation` (Spearman's) and `same_sign` compare `value` with `predicted` over the nodes,
        `held_rank_correlation` and `held_same_sign` compare `held`; NaN for fewer than three nodes.

    Raises:
        ValueError: another result, another prompt than the graph's, or nodes that it lacks.

    Caveats:
        The logits are those after a soft cap, where the model has one; the graph's are those before it.

    See Also:
        `interp.ablate`: parts over many prompts, with intervals.

    Example:
        >>> graph = interp.circuits.attribution_graph(model, "one two three", most=8)
        >>> found = interp.circuits.graph_interventions(model, "one two three", graph)
        >>> found.sizes["part"]
        8
    """
    needs = ("effect", "probability", "kind", "pos", "index")
    check_result("graph", graph, needs, "attribution_graph")
    subject = as_model(model, edits)
    network = subject.transformer
    batch = one_prompt(subject.text.batch(prompt, prepend_bos=prepend_bos)).to(network.device)
    _check_prompt(batch, graph)
    chosen = _chosen(graph, nodes)
    names, pos = chosen["node"].to_numpy(), chosen["pos"].to_numpy()
    variants = [
        Variant([Edit(str(name).partition("@")[0], Scale(factor), {"pos": int(at)})])
        for name, at in zip(names, pos, strict=True)
    ]
    goals = graph.isel(node=graph["kind"].to_numpy() == "logit")
    share = goals["probability"].to_numpy() / goals["probability"].to_numpy().sum()
    explained = partial(
        _explained,
        tokens=goals["index"].to_numpy().tolist(),
        weights=share.tolist(),
        against=int(graph.attrs["against"]),
    )
    metric = of_logits(explained, name="explained logits")
    held = Variant([Edit(name, Set(value)) for name, value in _patterns(network, batch).items()])
    changes = []
    for common in (Variant(), held):
        swept = Sweep(network, batch, variants, common).run(metric)
        changes.append(upcast(swept.values[:, 0] - swept.base[0]).double())
    on_host = to_host(dict(zip(("value", "held"), changes, strict=True)))
    if not all(bool(x.isfinite().all()) for x in on_host.values()):
        raise NotFiniteError("finite logits are required, got NaN or infinity")
    predicted = torch.from_numpy((factor - 1) * chosen["effect"].to_numpy())
    result = labelled(
        "graph_interventions",
        {name: (("part",), x) for name, x in {**on_host, "predicted": predicted}.items()},
        coords={"part": list(names)},
        units="logits",
        attrs={
            "factor": factor,
            **_agreement(on_host["value"], predicted, ""),
            **_agreement(on_host["held"], predicted, "held_"),
        },
    )
    return with_origin(result, network)


def _check_prompt(batch: Batch, graph: xr.Dataset) -> None:
    tokens = graph.isel(node=graph["kind"].to_numpy() == "embedding").sortby("pos")["index"].to_numpy()
    if batch.tokens.cpu().tolist() != [tokens.tolist()]:
        raise ValueError(f"the prompt of the graph is required, {graph.attrs.get('prompt')!r}")


def _chosen(graph: xr.Dataset, nodes: Sequence[str] | None) -> xr.Dataset:
    """The named nodes between embeddings and logits, or all of them."""
    table = graph[["effect", "pos", "kind"]]
    inner = table.isel(node=~np.isin(table["kind"].to_numpy(), ("embedding", "logit")))
    if nodes is None:
        chosen = inner
    else:
        known = set(inner["node"].to_numpy())
        if missing := [name for name in nodes if name not in known]:
            raise ValueError(
                f"nodes of the graph between embeddings and logits are required, it has no {missing[0]!r}"
            )
        chosen = inner.sel(node=list(nodes))
    if not chosen.sizes["node"]:
        raise ValueError("at least one node between embeddings and logits is required, the graph has none")
    return chosen


def _explained(
    logits: Float[Tensor, "r n v"], tokens: list[int], weights: list[float], against: int
) -> Float[Tensor, "r"]:
    """What the graph explains: each logit minus the mean or the wrong answer's, weighted by probability."""
    last = logits[:, -1]
    beside = last.mean(-1) if against < 0 else last[:, against]
    return (last[:, tokens] - beside[:, None]) @ torch.tensor(weights).to(last)


@torch.no_grad()
def _patterns(network: Transformer, batch: Batch) -> dict[str, Tensor]:
    """The attention patterns of the prompt, by site."""
    if PATTERN not in {name.partition(".")[2].partition(".")[2] for name in sites.names(network.config)}:
        return {}
    reads = [Read(name) for name in sites.of_layers(PATTERN, network.config)]
    trace = observe(network, batch, reads).trace
    return {read.site: trace[read] for read in reads}


def _agreement(measured: Float[Tensor, "n"], predicted: Float[Tensor, "n"], prefix: str) -> dict[str, float]:
    """Rank correlation and share of equal signs; of fewer than three nodes NaN."""
    if len(measured) < 3:
        return {f"{prefix}rank_correlation": float("nan"), f"{prefix}same_sign": float("nan")}
    ranks = torch.stack([x.argsort(stable=True).argsort().double() for x in (measured, predicted)])
    same = (measured.sign() == predicted.sign()).double().mean()
    return {
        f"{prefix}rank_correlation": float(torch.corrcoef(ranks)[0, 1]),
        f"{prefix}same_sign": float(same),
    }
