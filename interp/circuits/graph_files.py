"""Attribution graphs on disk, in the JSON that Neuronpedia's viewer and circuit-tracer share (`metadata`, `qParams`,
`nodes`, `links`; Ameisen et al. 2025, "Circuit Tracing").

A result of `attribution_graph` has what the format has: nodes at one position each, signed weights, errors, tokens and
logits (`AttributionGraph.of_result`). A `Circuit` does not: its nodes are heads and MLPs over all positions. So files
of circuits say that all nodes stand at the last token only because the format requires a place, name kinds of nodes of
their own, and put `null` where the format wants the number of a feature; a graph that is read keeps every node by its
name, and becomes a `Circuit` only if its nodes are those of an edge graph.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jaxtyping import Float

from interp.causal.graph import INPUT, LOGITS
from interp.circuits.edge_circuit import Circuit, CircuitProtocol, graph_of, protocol_of
from interp.circuits.graph_attention import BIAS, OTHERS
from interp.circuits.graph_influence import check_graph, ends, in_order
from interp.circuits.graph_qk import QKTracing, read_tracing, tracing_of, tracing_record
from interp.core.boundary import check_fields, public
from interp.core.files import json_object, write_atomically
from interp.core.kinds import Finite, Probability
from interp.core.results import check_result
from interp.core.viewer import Brief
from interp.core.wording import value_text
from interp.model.parts import Edge, Part
from interp.runs.folder import built

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

TOOL, FORMAT = "interp", 2
"""Name that marks a file of ours, and the version of what we add to the format. Version 1, which spelled parts
otherwise, is read too.
"""
WEIGHT = {
    "denoise": "the estimated change of the corrupted prompt's metric when the edge carries the clean prompt's value",
    "noise": "minus the estimated change of the metric when the edge carries the corrupted prompt's value",
}
"""Meaning of a weight, by the direction of the scores: positive weights speak for the answer in both."""
WEIGHTS = {
    "weight": "what the source adds to the target, in the target's unit",
    "value": "how much of the explained logits passes along the link, in logits",
}
"""Meaning of a weight in the graph of a result, by the variable that it is."""
PLACES = "all positions together; every node stands at the last token because the format requires a place"
GROUP = re.compile(r"L(\d+)G(\d+)")
"""Pattern of the node for keys and values of a group of heads: the name that its inputs have in common."""


@public()
@dataclass(frozen=True)
class GraphPrompt:
    """The prompt of a graph, which the file format requires besides the circuit."""

    prompt: str
    tokens: tuple[str, ...]
    answer: str
    probability: Probability
    """Probability of the answer as next token."""
    wrong: str | None = None


@public()
@dataclass(frozen=True)
class GraphNode:
    """One node of a file: a token, a feature, an error, a logit; in our files a head, an MLP, input or logits."""

    name: str
    kind: str
    """The format's `feature_type`."""
    layer: str
    """The layer as the file says it: a number, or E for embeddings."""
    position: int
    label: str
    feature: int | None = None
    influence: Finite | None = None
    """The share of influence of the nodes with as much or more, as viewers have it."""
    activation: Finite | None = None
    effect: Finite | None = None
    """What the node adds to the logits along all paths; only files of `attribution_graph` say it."""


@dataclass(frozen=True, eq=False, repr=False)
class AttributionGraph(Brief):
    """An attribution graph as files have it: every node by name, every link with its weight.

    Raises:
        ValueError: a field of another kind, two nodes of one name, links to a node that is not there or without a
            finite weight, other parts than links, or metadata that say what fields do.
    """

    slug: str
    model: str
    prompt: str
    tokens: tuple[str, ...]
    nodes: tuple[GraphNode, ...]
    links: pd.DataFrame
    """source, target, weight; in the order of the file."""
    supernodes: tuple[tuple[str, ...], ...] = ()
    """Groups that a user made: a label, then names of nodes."""
    pinned: tuple[str, ...] = ()
    """Names of the nodes that a user chose: those of the sub-graph."""
    metadata: Mapping[str, object] = field(default_factory=dict)
    """What the file says of itself besides slug, model, prompt and tokens."""
    parts: tuple[Mapping[str, float], ...] = ()
    """For each link of our files, its weight by the input that it enters.

    `q`, `k`, `v`, or nothing for MLPs and logits.
    """
    qk: Mapping[str, QKTracing] = field(default_factory=dict)
    """By the name of a node that attends, which nodes make its score."""
    qk_nodes: tuple[GraphNode, ...] = ()
    """The nodes that scores have and the graph has not."""

    def __post_init__(self) -> None:
        check_fields(self)
        names = Counter(node.name for node in self.nodes)
        if twice := [name for name, n in names.items() if n > 1]:
            raise ValueError(f"every node requires a name of its own, {twice[0]!r} comes twice")
        if missing := [name for name in ("source", "target", "weight") if name not in self.links]:
            raise ValueError(f"links must have source, target and weight, got none of {missing[0]}")
        if lost := {*self.links.source, *self.links.target} - names.keys():
            raise ValueError(f"links must join nodes of the graph, {min(map(str, lost))!r} is none")
        if not np.isfinite(self.links.weight.to_numpy(float)).all():
            raise ValueError("every link requires a finite weight, got NaN or infinity")
        if self.parts and len(self.parts) != len(self.links):
            raise ValueError(f"parts of {len(self.links)} links are required, got those of {len(self.parts)}")
        if given := [name for name in ABOUT if name in self.metadata]:
            raise ValueError(f"metadata must not have {given[0]}, which is a field of the graph")

    @property
    def ours(self) -> Mapping[str, object] | None:
        """Notes of `write_attribution_graph`; None in files of other tools."""
        note = self.metadata.get("generation_settings")
        return note if isinstance(note, Mapping) and note.get("tool") == TOOL else None

    @property
    def description(self) -> str:
        """What a weight is, in words, in graphs of `of_result`; empty where the file does not say."""
        info = self.metadata.get("info")
        if not isinstance(info, Mapping) or info.get("generator") != {"name": TOOL}:
            return ""
        return "" if "generation_settings" in self.metadata else str(info.get("description") or "")

    @classmethod
    @public()
    def of_result(
        cls,
        result: xr.Dataset,
        slug: str = "prompt",
        *,
        model: str = "model",
        by: Literal["weight", "value"] | None = None,
        qk: xr.Dataset | Sequence[xr.Dataset] = (),
    ) -> AttributionGraph:
        """The graph that `attribution_graph` or `prune_graph` found, with the names that Neuronpedia's viewer knows.

        Features are `layer_index_position` of kind "cross layer transcoder", as circuit-tracer names those of every
        transcoder; tokens `E_token_position`; logits `layer_token_position`. Errors are `layer_error_position`, where
        circuit-tracer's name is also that of a feature. Neurons, heads, MLPs and the stream have kinds of their own,
        and names such as `L3N17_5`.

        Args:
            result: the graph.
            slug: name of the graph in the viewer.
            model: name of the model there, such as "gemma-2-2b".
            by: what links weigh: "weight", what the source adds to the target, as circuit-tracer has it; or "value",
                how much of the logits passes along, which can be compared between targets. None: "weight" of
                features; "value" of neurons, whose activations differ by thousands.
            qk: one or several results of `qk_attribution` for heads that are nodes of the graph, one for each: their
                terms stand where Neuronpedia has those of attention features (`qk_tracing_results`).

        Raises:
            ValueError: another result; scores of another prompt, of heads that are no nodes, or two of one node.

        Example:
            >>> found = interp.circuits.attribution_graph(model, "one two three", most=4)
            >>> interp.circuits.AttributionGraph.of_result(found).nodes[0].kind
            'embedding'
        """
        import pandas as pd

        needs = (
            "weight",
            "source",
            "target",
            "kind",
            "pos",
            "token",
            "influence",
            "activation",
            "effect",
            "number",
        )
        check_graph("result", result, needs)
        result = in_order(result)
        source, target = ends(result)
        table = result[
            ["kind", "layer", "pos", "index", "token", "influence", "activation", "effect", "probability"]
        ]
        rows = table.to_dataframe().reset_index()
        last = int(result.attrs["n_layers"]) + 1
        nodes = tuple(
            replace(_named(row, last), influence=share, activation=activation, effect=effect)
            for row, share, activation, effect in zip(
                rows.itertuples(),
                cumulative(rows.influence.to_numpy()).tolist(),
                rows.activation.tolist(),
                rows.effect.tolist(),
                strict=True,
            )
        )
        names = [node.name for node in nodes]
        by = by or ("weight" if result.attrs["nodes"] == "feature" else "value")
        links = pd.DataFrame(
            {
                "source": pd.Series([names[i] for i in source], dtype=object),
                "target": pd.Series([names[i] for i in target], dtype=object),
                "weight": result[by].to_numpy(),
            }
        )
        pieces = rows[rows.kind == "embedding"].sort_values("pos").token
        prompt = str(result.attrs["prompt"])
        about = {"schema_version": 1, "info": {"description": WEIGHTS[by], "generator": {"name": TOOL}}}
        scores = qk if isinstance(qk, Sequence) else [qk]
        traced, beside = _tracings(scores, result, dict(zip(rows.node, names, strict=True)))
        return cls(
            slug, model, prompt, tuple(pieces), nodes, links, metadata=about, qk=traced, qk_nodes=beside
        )

    @public()
    def write(self, path: str | Path) -> None:
        """Write the graph as JSON for Neuronpedia's viewer or `read_attribution_graph`, pins and groups included."""
        _write(graph_record(self), path)

    def table(self) -> pd.DataFrame:
        """The links with the labels of their ends, the largest absolute weight first."""
        labels = {node.name: node.label or node.name for node in self.nodes}
        named = self.links.assign(
            source_label=self.links.source.map(labels), target_label=self.links.target.map(labels)
        )
        order = (-named.weight.abs()).argsort(kind="stable")
        return named.iloc[order].reset_index(drop=True)

    def circuit(self) -> Circuit:
        """The circuit that `write_attribution_graph` wrote, bit for bit.

        Raises:
            ValueError: a graph of another tool: transcoder features, errors and tokens are no nodes of an edge graph,
                and their weights no changes of a metric.
        """
        if self.ours is None:
            kinds = Counter(node.kind for node in self.nodes)
            counts = ", ".join(f"{n} x {kind!r}" for kind, n in kinds.most_common())
            raise ValueError(
                f"a circuit of heads and MLPs requires a graph written by {TOOL}, {self.slug!r} has nodes of other "
                f"kinds: {counts}"
            )
        note = self.ours
        protocol = protocol_of(note["protocol"], note["format"])
        graph, older = graph_of(note["graph"]), note["format"] == 1
        sign = _sign(protocol) if protocol is not None or not older else -1.0
        scores = {
            f"{source}->{_receiver(target, part, older=older)}": sign * weight
            for source, target, parts in zip(self.links.source, self.links.target, self.parts, strict=True)
            for part, weight in parts.items()
        }
        return Circuit(graph, scores, self.model, str(note["task"]), protocol)


@public()
def write_attribution_graph(circuit: Circuit | xr.Dataset, prompt: GraphPrompt, path: str | Path) -> None:
    """Write a circuit of one prompt as an attribution graph for Neuronpedia's viewer or `read_attribution_graph`.

    Of heads and MLPs, or of features (the result of `feature_circuit`), whose nodes bear the format's own kinds and
    numbers; those of all positions together stand at the last token.

    A link is an edge, its weight the score with the sign by which it speaks for the answer (`WEIGHT`); the three edges
    into a head's query, key and value are one link, whose weight is their sum, as first-order estimates add up (each
    is kept in `parts`). Keys and values that heads share enter a node of their own (`L1G0`), from which no link goes
    on. The node `logits` stands for the metric.

    Args:
        circuit: the circuit, or the result of `feature_circuit`, of one prompt or pair of prompts.
        prompt: the prompt, its tokens, and its answer with its probability.
        path: JSON file to write.

    Raises:
        ValueError: a circuit that was scored on more than one pair of prompts, a prompt without tokens, or without
            those at which nodes stand.

    Caveats:
        Weights are changes of the metric, not, as theirs, direct effects on the node they enter. Their viewer requires
        a layer above 0, so a model of one layer cannot be shown there.

    Source:
        Ameisen et al. 2025, "Circuit Tracing".

    Example:
        >>> scores = {"L0.resid->L0.mlp": 1.5, "L0.mlp->L1H0.q": -0.25, "L0.mlp->logits": 2.0}
        >>> circuit = Circuit(interp.causal.EdgeGraph(2, 1, 1), scores)
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "graph.json"
        >>> write_attribution_graph(circuit, GraphPrompt("a b", ("a", " b"), " c", 0.5), path)
        >>> read_attribution_graph(path).circuit() == circuit
        True
    """
    n = _prompts_of(circuit)
    if n != 1:
        raise ValueError(f"an attribution graph is about one prompt, this circuit was scored on {n} pairs")
    if not prompt.tokens:
        raise ValueError("a prompt of at least one token is required, got none")
    slug = Path(path).stem
    record = (
        _graph_record(circuit, prompt, slug)
        if isinstance(circuit, Circuit)
        else _feature_record(circuit, prompt, slug)
    )
    _write(record, path)


@public()
def read_attribution_graph(path: str | Path) -> AttributionGraph:
    """The graph in a JSON file of Neuronpedia, circuit-tracer or `write_attribution_graph`; nothing is left out.

    Args:
        path: the file.

    Returns:
        The graph with all its nodes and links.

    Raises:
        ValueError: a file that is no such graph: a required key missing, two nodes of one name, a link to a node that
            is not there or without a finite weight, parts that do not sum to their link, another version of ours.
        FileNotFoundError: no file.

    See Also:
        `AttributionGraph.circuit`: the circuit of a file that `write_attribution_graph` wrote.
    """
    required = f"an attribution graph in JSON is required, {path} is"
    try:
        record: dict[str, Any] = json_object(path)
    except FileNotFoundError as cause:
        raise FileNotFoundError(f"{required} no file") from cause
    except ValueError as cause:
        raise ValueError(f"{required} none: {cause}") from cause
    _check_kinds(record, {"metadata": dict, "nodes": list, "links": list}, path)
    _check_keys(record, ("metadata", "nodes", "links"), path)
    about, links = record["metadata"], record["links"]
    _check_keys(about, ABOUT, f"metadata of {path}")
    nodes = tuple(_read_node(node, path) for node in record["nodes"])
    _check_links(links, nodes, path)
    qk, beside = _read_tracings(record, nodes, path)
    n_tokens = len(about["prompt_tokens"]) if isinstance(about["prompt_tokens"], Sequence) else 0
    if beyond := [node.name for node in (*nodes, *beside) if not 0 <= node.position < max(n_tokens, 1)]:
        raise ValueError(
            f"nodes of {path} must stand at one of its {n_tokens} prompt_tokens (ctx_idx), {beyond[0]!r} does not"
        )
    parts = tuple(_read_parts(link, path) for link in links) if _is_ours(about, path) else ()
    pinned, groups = _chosen_nodes(record.get("qParams"), path)
    return AttributionGraph(
        str(about["slug"]), str(about["scan"]), str(about["prompt"]),
        _words(about["prompt_tokens"], "prompt_tokens", path), nodes, _link_table(links), groups, pinned,
        {key: value for key, value in about.items() if key not in ABOUT}, parts, qk, beside,
    )  # fmt: skip


def graph_record(graph: AttributionGraph) -> dict[str, Any]:
    """The JSON object of a graph's file: metadata, settings of the viewer with pins and groups, nodes, links."""
    links: list[Any] = graph.links[["source", "target", "weight"]].to_dict("records")
    if graph.parts:
        links = [{**link, "parts": parts} for link, parts in zip(links, graph.parts, strict=True)]
    about = {
        "slug": graph.slug,
        "scan": graph.model,
        "prompt_tokens": list(graph.tokens),
        "prompt": graph.prompt,
    }
    nodes = [_node_record(node, i) for i, node in enumerate(graph.nodes)]
    for logit in [node for node in nodes if node["feature_type"] == "logit"][:1]:
        logit["is_target_logit"] = True  # the first alone, as circuit-tracer has it
    for node in nodes:
        if (tracing := graph.qk.get(str(node["node_id"]))) is not None:
            node["qk_tracing_results"] = tracing_record(tracing)
    found = {
        "metadata": {**about, **graph.metadata},
        "qParams": _viewer(graph.pinned, graph.supernodes),
        "nodes": nodes,
        "links": links,
    }
    beside = {node.name: _node_record(node, i) for i, node in enumerate(graph.qk_nodes, len(nodes))}
    return {**found, "qk_only_nodes": beside} if beside else found


ABOUT = ("slug", "scan", "prompt_tokens", "prompt")
"""What the format requires of metadata."""
FEATURE = "cross layer transcoder"
"""The format's name for the kind of features, of transcoders of one layer too."""
ERROR = "mlp reconstruction error"


def _viewer(pinned: Sequence[str] = (), supernodes: Sequence[Sequence[str]] = ()) -> dict[str, object]:
    """The settings of the viewer (`qParams`) that the format requires."""
    groups = [list(group) for group in supernodes]
    return {
        "linkType": "both",
        "pinnedIds": list(pinned),
        "supernodes": groups,
        "clickedId": "",
        "sg_pos": "",
    }


def _write(record: Mapping[str, object], path: str | Path) -> None:
    """Write a graph as JSON. ValueError for metadata that JSON has no words for."""
    try:
        text = json.dumps({"qParams": _viewer(), **record}, indent=1, allow_nan=False)
    except (TypeError, ValueError) as cause:
        raise ValueError(
            f"metadata must hold what JSON can, texts, finite numbers and lists: {cause}"
        ) from cause
    write_atomically(Path(path), lambda where: where.write_text(text, encoding="utf-8"))


def cumulative(influence: Float[np.ndarray, "n"]) -> Float[np.ndarray, "n"]:
    """For each node the share of influence of those with as much or more, which viewers compare with a threshold."""
    order = np.argsort(-influence, kind="stable")
    shares = np.empty(len(order))
    shares[order] = influence[order].cumsum() / max(influence.sum(), np.finfo(float).tiny)
    return shares


@dataclass(frozen=True)
class _Row:
    """A node by the coordinates that it has in a result."""

    node: str
    kind: str
    layer: int
    pos: int
    index: int
    token: str = ""
    probability: float = 0.0


def _named(row: Any, last: int) -> GraphNode:
    """A node as the format names it, from its coordinates."""
    block, place = str(row.layer), f"{row.layer}_{row.index}_{row.pos}"
    number = 0 if row.layer < 0 else _cantor(row.layer, row.index)
    said = f"Output {row.token} (p={row.probability:.3f})"
    names = {
        "embedding": (f"E_{row.index}_{row.pos}", "embedding", "E", f"Emb: {row.token!r}", row.pos),
        "logit": (f"{last}_{row.index}_{row.pos}", "logit", str(last), said, row.index),
        "error": (f"{row.layer}_error_{row.pos}", ERROR, block, f"Err: block {row.layer}", -1),
        "feature": (place, FEATURE, block, "", number),
    }
    part = row.node.partition("@")[0]
    inner = (f"{part}_{row.pos}", row.kind, block, part, number if row.index >= 0 else -1)
    name, kind, layer, label, feature = names.get(row.kind, inner)
    return GraphNode(name, kind, layer, row.pos, label, feature)


def _tracings(
    scores: Sequence[xr.Dataset], graph: xr.Dataset, names: Mapping[str, str]
) -> tuple[dict[str, QKTracing], tuple[GraphNode, ...]]:
    """Results of `qk_attribution` by the node whose score they split, and the nodes that only they have.

    Args:
        names: name in the file of each node of the graph.
    """
    found, beside = dict[str, QKTracing](), dict[str, GraphNode]()
    last = int(graph.attrs["n_layers"]) + 1
    for one in scores:
        check_result("qk", one, ("value", "query_part", "key_part"), "qk_attribution")
        if lost := [name for name in ("prompt", "head", "query", "key") if name not in one.attrs]:
            raise ValueError(f"qk must have the attributes of qk_attribution, it lacks {lost[0]!r}")
        head, prompt = str(one.attrs["head"]), str(one.attrs["prompt"])
        node = f"{head}@{one.attrs['query']}"
        if prompt != graph.attrs["prompt"]:
            raise ValueError(
                f"qk must be of the prompt of the graph, {graph.attrs['prompt']!r}, got {prompt!r}"
            )
        if node not in names:
            raise ValueError(
                f"qk must be of heads that are nodes of the graph (nodes='head'), {node} is none"
            )
        if names[node] in found:
            raise ValueError(f"qk must have one score for each head and query, {node} has several")
        sides = []
        for side in ("query", "key"):
            parts = one[f"{side}_part"].to_numpy().tolist()
            own = [part for part in parts if part not in names]
            only = {part: _beside(part, head, side, int(one.attrs[side]), last) for part in own}
            beside |= {each.name: each for each in only.values()}
            sides.append([names[part] if part in names else only[part].name for part in parts])
        value = one["value"].transpose("query_part", "key_part").to_numpy()
        about = {name: one.attrs[name] for name in SAID_OF_SCORES if name in one.attrs}
        found[names[node]] = tracing_of(sides[0], sides[1], value, about)
    mentioned = {name for tracing in found.values() for name in tracing.names}
    return found, tuple(node for node in beside.values() if node.name in mentioned)


SAID_OF_SCORES = (
    "head", "query", "key", "against", "content", "position", "score", "key_pattern", "against_pattern",
)  # fmt: skip
"""Attributes of `qk_attribution` that files keep."""


def _beside(part: str, head: str, side: str, pos: int, last: int) -> GraphNode:
    """A node that the query or the key of a head has and the graph has not, or a sum of such nodes."""
    sums = {OTHERS: ("unknown", "other nodes"), BIAS: ("bias", "biases")}
    if part in sums:
        layer, (kind, label) = Part.of(head).layer, sums[part]
        name = f"{layer}_{part}_{head}.{side}_{pos}"
        return GraphNode(name, kind, str(layer), pos, f"{label}, {side} of {head}")
    name, _, place = part.rpartition("@")
    own = Part.of(name)
    assert own.layer is not None
    return _named(_Row(part, own.kind, own.layer, int(place), -1 if own.index is None else own.index), last)


def _read_tracings(
    record: Mapping[str, Any], nodes: Sequence[GraphNode], path: object
) -> tuple[dict[str, QKTracing], tuple[GraphNode, ...]]:
    """The scores of a file by the node that attends, and the nodes that only they have.

    Raises:
        ValueError: what is no such score, or terms of nodes that the file lacks.
    """
    given = record.get("qk_only_nodes") or {}
    _check_kinds({"qk_only_nodes": given}, {"qk_only_nodes": dict}, path)
    beside = tuple(_read_node(node, path) for node in given.values())
    known, found = {node.name for node in (*nodes, *beside)}, {}
    for node, own in zip(nodes, record["nodes"], strict=True):
        if own.get("qk_tracing_results") is not None:
            found[node.name] = read_tracing(own["qk_tracing_results"], f"{node.name} of {path}")
            if lost := sorted(found[node.name].names - known):
                raise ValueError(
                    f"qk_tracing_results of {path} must be about its nodes, {lost[0]!r} of {node.name} is none"
                )
    return found, beside


def _cantor(layer: int, index: int) -> int:
    """The number of a feature in the format (`schema_version` 1): Cantor's pairing of layer and index."""
    return (layer + index) * (layer + index + 1) // 2 + index


def _node_record(node: GraphNode, number: int) -> dict[str, object]:
    """A node as the format has it."""
    found: dict[str, object] = {
        "node_id": node.name, "feature": node.feature, "layer": node.layer, "ctx_idx": node.position,
        "feature_type": node.kind, "jsNodeId": f"{node.name.rpartition('_')[0]}-{node.position}",
        "clerp": node.label, "influence": node.influence, "activation": node.activation, "run_idx": number,
    }  # fmt: skip
    if node.effect is not None:
        found["effect"] = node.effect
    if node.kind == "logit":
        found |= {"token_prob": stated_probability(node), "is_target_logit": False}
    return found


def stated_probability(node: GraphNode) -> float | None:
    """The probability of a logit as its label says it, which is where viewers take it from; None without one."""
    stated = re.search(r"\(p=([0-9]*\.?[0-9]+)\)", node.label)
    return float(stated[1]) if stated else None


def _prompts_of(circuit: Circuit | xr.Dataset) -> int:
    """Number of prompts, or of pairs, that a circuit is about."""
    if isinstance(circuit, Circuit):
        return 1 if circuit.protocol is None else circuit.protocol.n
    check_result("circuit", circuit, ("node", "edge_value", "full"), "feature_circuit")
    return circuit.sizes["prompt"]


def _graph_record(circuit: Circuit, prompt: GraphPrompt, slug: str) -> dict[str, object]:
    """A circuit of heads and MLPs as the format has it."""
    links = _links(circuit)
    ends = {INPUT, LOGITS, *(end for pair in links for end in pair)}
    return {
        "metadata": _metadata(circuit, prompt, slug),
        "nodes": [_node(name, circuit.graph.n_layers, prompt) for name in sorted(ends, key=_sort_key)],
        "links": [
            {"source": source, "target": target, "weight": math.fsum(parts.values()), "parts": parts}
            for (source, target), parts in links.items()
        ],
    }


def _links(circuit: Circuit) -> dict[tuple[str, str], dict[str, float]]:
    """Weights of the edges from each sender to each receiving node, by (sender, node), then by the input (`q`, ...)."""
    weights: dict[tuple[str, str], dict[str, float]] = {}
    sign = _sign(circuit.protocol)
    for edge, score in circuit.scores.items():
        joined = Edge.of(edge)
        node, part = _node_and_input(joined.receiver)
        weights.setdefault((str(joined.sender), node), {})[part] = sign * score
    return weights


def _sign(protocol: CircuitProtocol | None) -> float:
    """Sign that turns a score into a weight that speaks for the answer."""
    return -1.0 if protocol is not None and protocol.direction == "noise" else 1.0


def _node_and_input(receiver: Part) -> tuple[str, str]:
    """The node that a receiver belongs to, and the letter of the input ("q", "k", "v"; "" if the node has only one)."""
    letters = {"query": "q", "key": "k", "value": "v", "group_key": "k", "group_value": "v"}
    if receiver.kind in ("group_key", "group_value"):
        return f"L{receiver.layer}G{receiver.index}", letters[receiver.kind]
    if receiver.kind in letters:
        return str(Part("head", receiver.layer, receiver.index)), letters[receiver.kind]
    if receiver.kind in ("mlp_input", "mlp_before_input"):
        return str(Part(receiver.kind.removesuffix("_input"), receiver.layer)), ""
    return str(receiver), ""


def _receiver(node: str, part: str, *, older: bool) -> str:
    """Name of a node's input `part` ("q", "k", "v" or ""), in the spelling of the file's version."""
    return node if not part else f"{node}<{part}>" if older else f"{node}.{part}"


def _metadata(circuit: Circuit, prompt: GraphPrompt, slug: str) -> dict[str, object]:
    protocol = None if circuit.protocol is None else asdict(circuit.protocol)
    direction = "denoise" if circuit.protocol is None else circuit.protocol.direction
    weight = f"{WEIGHT[direction]}: positive weights speak for the answer"
    return {
        "slug": slug,
        "scan": circuit.model,
        "prompt_tokens": list(prompt.tokens),
        "prompt": prompt.prompt,
        "info": {
            "description": f"Heads and MLPs, {PLACES}. Weight: {weight}.",
            "generator": {"name": TOOL},
        },
        "generation_settings": {
            "tool": TOOL, "format": FORMAT, "graph": asdict(circuit.graph), "task": circuit.task, "protocol": protocol,
            "positions": PLACES, "weight": weight,
        },
    }  # fmt: skip


def _sort_key(name: str) -> tuple[int, int, int]:
    """Sort key of a node: its place in the forward pass."""
    if name in (INPUT, LOGITS):
        return (-1 if name == INPUT else 1 << 30), 0, 0
    kind, layer, index = _node_place(name)
    return layer, {"mlp_before": 0, "mlp": 2}.get(kind, 1), index or 0


def _node_place(name: str) -> tuple[str, int, int | None]:
    """Kind, layer and index of a node that is neither the input nor the logits; a group of heads is a "group"."""
    if match := GROUP.fullmatch(name):
        return "group", int(match[1]), int(match[2])
    part = Part.of(name)
    assert part.layer is not None
    return part.kind, part.layer, part.index


def _node(name: str, n_layers: int, prompt: GraphPrompt) -> dict[str, object]:
    """One node as the format has it; a head's number is its index in the layer, other nodes have null."""
    feature = None
    if name == INPUT:
        kind, label, where = "input", "embeddings", "E"
    elif name == LOGITS:
        against = "" if prompt.wrong is None else f' against "{prompt.wrong}"'
        # Their viewer takes the probability from these words.
        label = f'Output "{prompt.answer}"{against} (p={prompt.probability:.3f})'
        kind, where = "logit", str(n_layers + 1)
    else:
        node_kind, layer, index = _node_place(name)
        where = str(layer)
        if node_kind == "group":
            kind, label = "attention group", f"keys and values of group {layer}.{index}"
        elif node_kind == "head":
            kind, label, feature = "attention head", f"head {layer}.{index}", index
        else:
            kind, label = "mlp", f"MLP {layer}" if node_kind == "mlp" else f"MLP before attention {layer}"
    node: dict[str, object] = {
        "node_id": name, "feature": feature, "layer": where, "ctx_idx": len(prompt.tokens) - 1, "feature_type": kind,
        "jsNodeId": name, "clerp": label,
    }  # fmt: skip
    return node | {"token_prob": prompt.probability, "is_target_logit": True} if name == LOGITS else node


def _feature_record(circuit: xr.Dataset, prompt: GraphPrompt, slug: str) -> dict[str, Any]:
    """A circuit of features as the format has it: transcoder features and errors by its own kinds and numbers.

    An error's id has no counterpart in the format, whose own (`0_{layer}_{pos}`) is that of a feature of layer 0.
    """
    sign = -1.0 if circuit.attrs["direction"] == "noise" else 1.0
    nodes = [_feature_node(circuit.isel(node=i), prompt) for i in range(circuit.sizes["node"])]
    ids = {
        **dict(zip(circuit.node.to_numpy().tolist(), (n["node_id"] for n in nodes), strict=True)),
        LOGITS: LOGITS,
    }
    weights = circuit.edge_value.to_numpy()
    links = [
        {
            "source": ids[str(circuit.sender.to_numpy()[i])], "target": ids[str(circuit.receiver.to_numpy()[j])],
            "weight": sign * float(weights[i, j]),
        }
        for i, j in zip(*(~np.isnan(weights)).nonzero(), strict=True)
    ]  # fmt: skip
    direction = "noise" if sign < 0 else "denoise"
    about = f"Features and errors, by {circuit.attrs['method']}. Weight: {WEIGHT[direction]}: positive ones speak for"
    return {
        "metadata": {
            "slug": slug, "scan": "", "prompt_tokens": list(prompt.tokens), "prompt": prompt.prompt,
            "info": {"description": f"{about} the answer.", "generator": {"name": TOOL}},
        },
        "nodes": [*nodes, _node(LOGITS, int(circuit.layer.to_numpy().max()), prompt)],
        "links": links,
    }  # fmt: skip


def _feature_node(node: xr.Dataset, prompt: GraphPrompt) -> dict[str, Any]:
    """A feature or an error as the format has it; a feature's number pairs its layer and its index (Cantor)."""
    part, pos = Part.of(str(node.part.item())), int(node.pos.item())
    layer, place = part.layer or 0, len(prompt.tokens) - 1 if pos < 0 else pos
    if place >= len(prompt.tokens):
        raise ValueError(
            f"a prompt with a token at position {place} is required, got {len(prompt.tokens)} tokens"
        )
    if part.kind == "error":
        name, kind, number, shown = f"{layer}_error_{place}", ERROR, -1, f"{layer}_error-0"
    else:
        index = part.index or 0
        number = _cantor(layer, index)
        name, kind, shown = f"{layer}_{index}_{place}", FEATURE, f"{layer}_{index}-0"
    effect = float(node["value"].item())
    return {
        "node_id": name, "feature": number, "layer": str(layer), "ctx_idx": place, "feature_type": kind,
        "jsNodeId": shown, "clerp": f"{node.node.item()} (effect {effect:.3g})",
    }  # fmt: skip


def _check_keys(record: object, keys: Sequence[str], where: object) -> None:
    missing = (
        [key for key in keys if key not in record] if isinstance(record, Mapping) else ["an object in braces"]
    )
    if missing:
        raise ValueError(f"an attribution graph requires {', '.join(keys)}; {where} lacks {missing[0]}")


def _check_kinds(record: Mapping[str, object], kinds: Mapping[str, type], where: object) -> None:
    """ValueError for an entry of another kind; whether it has to be there is checked by `_check_keys`."""
    for key, kind in kinds.items():
        if key in record and not isinstance(record[key], kind):
            raise ValueError(f"{key} of {where} must be {kind.__name__}, got {value_text(record[key])}")


def _finite(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and abs(value) <= sys.float_info.max  # type: ignore[arg-type]


def _words(record: object, what: str, path: object) -> tuple[str, ...]:
    if not isinstance(record, list) or not all(isinstance(word, str) for word in record):
        raise ValueError(f"{what} of {path} must be a list of texts, got {value_text(record)}")
    return tuple(record)


def _chosen_nodes(record: object, path: object) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Nodes that a user pinned in the viewer, and groups of them; none if the file has no settings of the viewer."""
    settings = {} if record is None else record
    _check_kinds({"qParams": settings}, {"qParams": dict}, path)
    assert isinstance(settings, dict)
    listed = settings.get("supernodes", [])
    _check_kinds({"supernodes": listed}, {"supernodes": list}, path)
    pinned = _words(settings.get("pinnedIds", []), "pinnedIds", path)
    return pinned, tuple(_words(group, "supernodes", path) for group in listed)


def _read_node(record: Mapping[str, object], path: object) -> GraphNode:
    _check_keys(record, ("node_id", "layer", "ctx_idx", "feature_type"), f"a node of {path}")
    words = {"name": "node_id", "kind": "feature_type", "layer": "layer"}
    values = {field: str(record[key]) for field, key in words.items()} | {
        "label": str(record.get("clerp") or "")
    }
    optional = {key: record.get(key) for key in ("feature", "influence", "activation", "effect")}
    try:
        return built(GraphNode, values | {"position": record["ctx_idx"]} | optional)
    except ValueError as cause:
        raise ValueError(f"a node of {path} cannot be read: {cause}") from cause


def _check_links(links: Sequence[Mapping[str, object]], nodes: Sequence[GraphNode], path: str | Path) -> None:
    names = Counter(node.name for node in nodes)
    if twice := [name for name, n in names.items() if n > 1]:
        raise ValueError(f"every node of {path} requires a name of its own, {twice[0]!r} comes twice")
    for link in links:
        _check_keys(link, ("source", "target", "weight"), f"a link of {path}")
        if lost := [end for end in (link["source"], link["target"]) if str(end) not in names]:
            raise ValueError(f"links of {path} must join its nodes, {lost[0]!r} is none")
        weight = link["weight"]
        if not _finite(weight):
            raise ValueError(
                f"every link of {path} requires a finite weight, {link['source']!r} to {link['target']!r} has "
                f"{weight!r}"
            )


def _is_ours(about: Mapping[str, object], path: object) -> bool:
    """Whether `write_attribution_graph` wrote a file of a circuit; ValueError if it does not hold one."""
    note = about.get("generation_settings")
    if not isinstance(note, Mapping) or note.get("tool") != TOOL:
        return False
    if note.get("format") not in (1, FORMAT):
        raise ValueError(f"graphs of {TOOL} in format {FORMAT} are read, {path} has {note.get('format')!r}")
    _check_keys(note, ("graph", "task", "protocol"), f"generation_settings of {path}")
    try:
        graph_of(note["graph"]), protocol_of(note["protocol"], note["format"])
    except ValueError as cause:
        raise ValueError(f"{path} holds no circuit: {cause}") from cause
    return True


def _read_parts(link: Mapping[str, object], path: object) -> Mapping[str, float]:
    parts = link.get("parts")
    weight = link["weight"]
    assert isinstance(weight, int | float)  # checked with all links
    finite = isinstance(parts, Mapping) and all(map(_finite, parts.values()))
    if (
        not isinstance(parts, Mapping)
        or not finite
        or not math.isclose(math.fsum(parts.values()), weight, rel_tol=1e-9)
    ):
        raise ValueError(
            f"parts that sum to the weight are required in graphs of {TOOL}; in {path} the link {link['source']!r} to "
            f"{link['target']!r} has {parts!r} for {link['weight']!r}"
        )
    return parts


def _link_table(links: Sequence[Mapping[str, object]]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(
        {
            "source": pd.Series([str(link["source"]) for link in links], dtype=object),
            "target": pd.Series([str(link["target"]) for link in links], dtype=object),
            "weight": pd.Series([link["weight"] for link in links], dtype=float),
        }
    )
