"""What a graph says that removing nodes does, one at a time or in groups, beside what removing them does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from interp.causal.effects import spearman
from interp.circuits.attribution_graph import Effects, Goals, check_prompt, nodes_of, one_prompt
from interp.circuits.graph_files import AttributionGraph
from interp.circuits.graph_influence import check_graph, in_order
from interp.circuits.local_model import LocalModel, local_model, node_sites
from interp.core.boundary import public
from interp.core.kinds import Finite
from interp.core.results import labelled
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
from interp.passes.rules import rounding_of
from interp.passes.sweep import Sweep
from interp.passes.variants import Variant
from interp.runs.provenance import with_origin

if TYPE_CHECKING:
    import xarray as xr

PATTERN = "attn.hook_pattern"
SAME = 0.01
"""How far effects of a graph may be from those of the model, as a share of the largest: devices round unlike."""


@public()
def graph_interventions(
    model: Model,
    prompt: Prompts,
    graph: xr.Dataset,
    *,
    nodes: Sequence[str] | Mapping[str, Sequence[str]] | AttributionGraph | None = None,
    factor: Finite = 0.0,
    edits: Sequence[Edit] = (),
    prepend_bos: bool | None = None,
) -> xr.Dataset:
    """Multiplies nodes of a graph, one at a time or in groups, and compares the logits with what the graph predicts.

    The graph predicts (factor - 1) x effect, which holds exactly where norm scales, attention patterns and the slopes
    of neurons stay as they were. Measured is the model as it is, and the model with its attention patterns held.

    The nodes of a group are multiplied at once. Where one of them leads to another, effects do not add up: a path that
    passes k members changes by factor^k - 1. So of a group the graph predicts (factor - 1) x the sum of the effects
    that its members have when every slope through a member is multiplied by the factor too. Such paths lead through
    nodes that the graph leaves out as well, so these effects are measured anew.

    Args:
        model: the model of the graph.
        prompt: the prompt of the graph.
        graph: what `attribution_graph` or `prune_graph` returned.
        nodes: names of nodes of the graph between embeddings and logits, such as `L12N345@7`; or groups of them, lists
            of names by the name of the group, or the supernodes of an `AttributionGraph` that was made of this graph;
            None: all nodes one at a time.
        factor: what their values are multiplied by; 0 removes them.
        edits, prepend_bos: as for the graph.

    Returns:
        Dataset over `part`, the names of the nodes or groups, in logits (of several logits the mean weighted by
        probability):

        - `value`: change of the logits in the model as it is.
        - `held`: the same with every attention pattern held as it was.
        - `predicted`: what the graph says.

        Attributes `rank_correlation` (Spearman's) and `same_sign` compare `value` with `predicted` over the parts,
        `held_rank_correlation` and `held_same_sign` compare `held`; NaN for fewer than three parts.

    Raises:
        ValueError: another result, another model, prompt or edits than the graph's, nodes that it lacks, a node twice,
            or no groups.

    Caveats:
        The logits are those after a soft cap, where the model has one; the graph's are those before it. Errors of
        dictionaries are predicted to stay as they were when other nodes change, and follow them in the model.

    Cost:
        Two passes for each node or group, and a backward pass for each group of several nodes and one more.

    See Also:
        `interp.ablate`: parts over many prompts, with intervals.

    Example:
        >>> graph = interp.circuits.attribution_graph(model, "one two three", most=8)
        >>> found = interp.circuits.graph_interventions(model, "one two three", graph)
        >>> found.sizes["part"]
        8
        >>> first, second, *_ = found.part.values.tolist()
        >>> groups = {"both": [first, second]}
        >>> found = interp.circuits.graph_interventions(model, "one two three", graph, nodes=groups)
        >>> found.part.values.tolist()
        ['both']
    """
    needs = ("effect", "probability", "kind", "layer", "pos", "index")
    check_graph("graph", graph, needs)
    subject = as_model(model, edits)
    network = subject.transformer
    batch = one_prompt(subject.text.batch(prompt, prepend_bos=prepend_bos)).to(network.device)
    check_prompt(batch, graph)
    groups = _groups(graph, nodes)
    variants = [Variant([member.scaled(factor) for member in group]) for group in groups.values()]
    goals = Goals.of_graph(graph)
    predicted = _predicted(network, batch, graph, goals, list(groups.values()), factor)
    metric = of_logits(partial(_explained, goals=goals), name="explained logits")
    held = Variant([Edit(name, Set(value)) for name, value in _patterns(network, batch).items()])
    changes = []
    for common in (Variant(), held):
        swept = Sweep(network, batch, variants, common).run(metric)
        changes.append(upcast(swept.values[:, 0] - swept.base[0]).double())
    on_host = to_host(dict(zip(("value", "held"), changes, strict=True)))
    if not all(bool(x.isfinite().all()) for x in on_host.values()):
        raise NotFiniteError("finite logits are required, got NaN or infinity")
    result = labelled(
        "graph_interventions",
        {name: (("part",), x) for name, x in {**on_host, "predicted": predicted}.items()},
        coords={"part": list(groups)},
        units="logits",
        attrs={
            "factor": factor,
            **_agreement(on_host["value"], predicted, ""),
            **_agreement(on_host["held"], predicted, "held_"),
        },
    )
    return with_origin(result, network)


@dataclass(frozen=True)
class Member:
    """A node that is multiplied."""

    name: str
    kind: str
    layer: int
    pos: int
    index: int
    """-1 where a position has one such node."""
    effect: float

    def scaled(self, factor: float) -> Edit:
        """The edit that multiplies it."""
        return Edit(self.name.partition("@")[0], Scale(factor), {"pos": self.pos})


def _groups(
    graph: xr.Dataset, nodes: Sequence[str] | Mapping[str, Sequence[str]] | AttributionGraph | None
) -> dict[str, list[Member]]:
    """The nodes that are multiplied at once, by the name of each group; a node by itself is a group of its name."""
    known = _members(graph)
    if isinstance(nodes, AttributionGraph):
        listed = _supernodes(graph, nodes)
    elif isinstance(nodes, Mapping):
        listed = {str(name): list(group) for name, group in nodes.items()}
    else:
        names = list(known if nodes is None else nodes)
        if twice := [name for name, n in Counter(names).items() if n > 1]:
            raise ValueError(f"nodes must be named once each, {twice[0]!r} comes twice")
        listed = {name: [name] for name in names}
    for name, group in listed.items():
        if not group or max(Counter(group).values()) > 1:
            raise ValueError(
                f"group {name!r} must have nodes, each of them once, got {', '.join(group) or 'none'}"
            )
        if missing := [member for member in group if member not in known]:
            raise ValueError(
                f"nodes of the graph between embeddings and logits are required, it has no {missing[0]!r}"
            )
    if not listed:
        raise ValueError(
            "at least one node between embeddings and logits, or a group of them, is required, got none"
        )
    return {name: [known[member] for member in group] for name, group in listed.items()}


def _members(graph: xr.Dataset) -> dict[str, Member]:
    """The nodes of a graph between embeddings and logits, by name."""
    inner = graph.isel(node=~np.isin(graph["kind"].to_numpy(), ("embedding", "logit")))
    fields = (inner[name].to_numpy().tolist() for name in ("node", "kind", "layer", "pos", "index", "effect"))
    return {str(name): Member(str(name), *rest) for name, *rest in zip(*fields, strict=True)}


def _supernodes(graph: xr.Dataset, drawn: AttributionGraph) -> dict[str, list[str]]:
    """The groups that a user made, with the names of nodes in the graph for those in the file."""
    if twice := [
        name for name, n in Counter(group[0] for group in drawn.supernodes if group).items() if n > 1
    ]:
        raise ValueError(f"every supernode requires a name of its own, {twice[0]!r} comes twice")
    own = AttributionGraph.of_result(graph)
    names = {
        node.name: str(name) for node, name in zip(own.nodes, in_order(graph)["node"].to_numpy(), strict=True)
    }
    return {group[0]: [names.get(name, name) for name in group[1:]] for group in drawn.supernodes if group}


@torch.enable_grad()
def _predicted(
    network: Transformer,
    batch: Batch,
    graph: xr.Dataset,
    goals: Goals,
    groups: Sequence[Sequence[Member]],
    factor: float,
) -> Float[Tensor, "g"]:
    """What the local model says that multiplying each group does to the logits."""
    local = local_model(network, batch, node_sites(network, nodes_of(graph)), through=True)
    _check_effects([member for group in groups for member in group], local, goals)
    each = [
        group[0].effect if len(group) == 1 else _effect_of(group, local, goals, factor) for group in groups
    ]
    return (factor - 1) * torch.tensor(each, dtype=torch.float64)


def _check_effects(members: Sequence[Member], local: LocalModel, goals: Goals) -> None:
    """ValueError for a graph of another model, of other edits, or of more logits than it has now."""
    effects = Effects.of(local, goals).of_nodes
    own = effects[[local.number(each.kind, each.layer, each.pos, each.index) for each in members]]
    missed = np.abs(own - [each.effect for each in members])
    if not (missed <= max(SAME, rounding_of(local.model.dtype)) * np.abs(effects).max()).all():
        worst = members[int(missed.argmax())]
        raise ValueError(
            f"the model, the edits and all logits of the graph are required: {worst.name} has an effect of "
            f"{worst.effect:.3g} in it, and of {own[missed.argmax()]:.3g} in this model"
        )


def _effect_of(group: Sequence[Member], local: LocalModel, goals: Goals, factor: float) -> float:
    """The sum of the effects of a group's members, with every slope through a member multiplied by the factor.

    With v the members' values, T the slopes between them along paths that pass no other member, and d those into the
    logits, the change of the values is x = (factor - 1) v + factor T x, and that of the logits d x.
    """
    nodes = np.array([local.number(each.kind, each.layer, each.pos, each.index) for each in group])
    of_site = local.site_of(nodes)
    hooks = [
        _multiplied(local, int(number), nodes[of_site == number], factor)
        for number in np.unique(of_site)
        if not local.sites[number].is_source
    ]
    effects = Effects.of(local, goals).of_nodes
    for hook in hooks:
        hook.remove()
    return float(effects[nodes].sum())


def _multiplied(
    local: LocalModel, number: int, nodes: Int[np.ndarray, "n"], factor: float
) -> RemovableHandle:
    """Until it is removed, slopes through some nodes of a site are multiplied."""
    site = local.sites[number]
    value, leaf = local.computed[site.name], local.leaves[site.name]
    mask = torch.ones(leaf.shape[1] * site.per_position(leaf), dtype=leaf.dtype, device=leaf.device)
    mask[(nodes - local.offsets[number]).tolist()] = factor
    mask = mask.view(1, leaf.shape[1], -1)
    mask = mask[..., None] if leaf.ndim > mask.ndim else mask  # of heads
    return value.register_hook(lambda slope: slope * mask)


def _explained(logits: Float[Tensor, "r n v"], goals: Goals) -> Float[Tensor, "r"]:
    """What the graph explains: each logit minus the mean or the wrong answer's, weighted by probability."""
    last = logits[:, -1]
    beside = last.mean(-1) if goals.against is None else last[:, goals.against]
    return (last[:, list(goals.tokens)] - beside[:, None]) @ goals.weights.to(last)


@torch.no_grad()
def _patterns(network: Transformer, batch: Batch) -> dict[str, Tensor]:
    """The attention patterns of the prompt, by site."""
    if PATTERN not in {name.partition(".")[2].partition(".")[2] for name in sites.names(network.config)}:
        return {}
    reads = [Read(name) for name in sites.of_layers(PATTERN, network.config)]
    trace = observe(network, batch, reads).trace
    return {read.site: trace[read] for read in reads}


def _agreement(measured: Float[Tensor, "n"], predicted: Float[Tensor, "n"], prefix: str) -> dict[str, float]:
    """Rank correlation (NaN where all are equal) and share of equal signs; of fewer than three nodes NaN."""
    if len(measured) < 3:
        return {f"{prefix}rank_correlation": float("nan"), f"{prefix}same_sign": float("nan")}
    same = (measured.sign() == predicted.sign()).double().mean()
    return {
        f"{prefix}rank_correlation": float(spearman(measured, predicted)),
        f"{prefix}same_sign": float(same),
    }
