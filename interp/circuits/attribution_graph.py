"""The attribution graph of one prompt: which nodes add how much to which, with sums that are exact.

`local_model` gives the edges into some nodes. Here the nodes are chosen whose edges are worth a backward pass: first
the logits, then, again and again, those with the most influence on the logits among the nodes found so far.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.circuits.graph_influence import TINY, Shares, influence_of, scores_of, share, shares_of
from interp.circuits.local_model import Incoming, LocalModel, NodeName, local_model, node_sites
from interp.core.boundary import public
from interp.core.kinds import FromZero, PositiveCount
from interp.core.results import labelled
from interp.data.batch import Answers, Batch, Prompts
from interp.data.ids import check_contrast
from interp.data.text import Text
from interp.model import sites
from interp.model.edits import Edit
from interp.model.transformer import Transformer
from interp.passes.memory import room
from interp.passes.observe import Model, as_model
from interp.runs.provenance import with_origin

if TYPE_CHECKING:
    import xarray as xr

NEURONS = "mlp.hook_post"
MASS, MOST_LOGITS = 0.95, 10
"""Without an answer the logits are the fewest of the most probable tokens that hold this mass, at most so many."""
AT_ONCE = 32
"""The most nodes whose edges one backward pass gives."""


@public()
@torch.enable_grad()
def attribution_graph(
    model: Model,
    prompt: Prompts,
    answer: Answers | None = None,
    wrong: Answers | None = None,
    *,
    nodes: NodeName | Sequence[NodeName] | None = None,
    by: Literal["effect", "influence"] = "effect",
    most: FromZero = 256,
    links: PositiveCount = 2048,
    edits: Sequence[Edit] = (),
    prepend_bos: bool | None = None,
) -> xr.Dataset:
    """How the logits after a prompt come about: a graph whose edges sum to what they enter.

    An edge is what one node adds to another along all paths that meet no other node: (value of the source) x (gradient
    of the target). The gradient is that of the local model, in which the scales of norms, the patterns of attention
    and the slopes of neurons are constants, so that every value is the sum of its incoming edges and of biases. Gated
    neurons share a product equally between its factors. The sums are checked for every target.

    Nodes are single neurons or features at single positions, embeddings of tokens, errors of dictionaries, and logits
    minus the mean logit. Heads, experts, MLPs and the stream can be nodes too: vectors, of which the part along the
    slope of the logits counts, so that what enters such a node is in logits and sums to its effect. Of all of these
    those that matter most to the logits are in the graph, with all that enters them.

    Args:
        model: a decoder; for nodes that are features one with dictionaries (`model.with_dictionaries`). A block without
            a dictionary is a linear map of its input, as all blocks are where nodes are neurons.
        prompt: one prompt: a text, token ids or a batch of one row.
        answer: tokens after the prompt whose logits are explained, one or a list of them; None: the most probable
            tokens that together have the probability .95, ten at most.
        wrong: a token: the difference of the logits of `answer` and this one is explained.
        nodes: what may be a node, one or several of "neuron"; "feature" (and the errors of the dictionaries); "head",
            what a head moves to a position; "expert", what an expert of a mixture writes there, weighted; "mlp", what
            an MLP writes there; "resid", the stream that enters a block. None: features where the model has
            dictionaries, of a model without neurons heads, else neurons.
        by: what tells which nodes matter: "effect", the size of what they add to the logits along all paths; or
            "influence", as circuit-tracer does, the share of the sizes of edges that leads back to them among those
            found so far.
        most: how many nodes the graph has beside embeddings, errors and logits.
        links: how many edges a target keeps, the largest ones; all from embeddings and errors are kept.
        edits: interventions that the pass runs under, which may zero, scale or project; of features and errors where
            these are nodes.
        prepend_bos: whether a text begins with BOS; None: as the model does by default.

    Returns:
        Dataset over `node` and `edge`, nodes in the order of the pass and logits last.

        - `value` [edge]: how much of the logits passes along it, their mean weighted by probability: `weight` times
          what one unit of the target adds to them along all paths.
        - `weight` [edge]: what `source` adds to `target` (names of nodes), in the unit of the target: of a vector in
          logits.
        - `activation` [node]: its value (of a vector its length).
        - `effect` [node]: what it adds along all paths to the logits, their mean weighted by probability (the plain
          mean where all probabilities are 0).
        - `influence` [node]: share of the logits' probability that leads back to it (`interp.circuits.prune_graph`).
        - `incoming`, `bias` [node], of targets: the sum of all edges into it, and what biases add; together they are
          its activation, or the effect of a vector. `others` is the part of `incoming` from nodes that are not in the
          graph, and `size` the sum of the sizes of all edges. NaN for nodes without edges of their own, and `size` 0.
        - `probability` [node]: of logits, else 0.

        Coordinates of a node: its name `node` (`L12N345@7`), `kind`, `layer` (-1 outside the blocks), `pos`, `index`
        (-1 for errors; of embeddings and logits the token), `token`, the text at its position, or of the logit, and
        `number`, its place in the pass.
        Attributes: `replacement` and `completeness`, how much is explained without errors (`graph_scores`); `covered`,
        the share of the sizes of all effects of such nodes that is in the graph; `completeness_error`, by how much the
        worst sum misses.

    Raises:
        ValueError: several prompts, no logits, a model for which no linear rules are known, or edits that add.
        KeyError: a model without the neurons, heads, experts or MLPs that are asked for; neurons inside experts are
            no nodes.
        ArithmeticError: edges that do not sum to a target's value.

    Caveats:
        The graph is about the local model: patterns are taken as given (why a head looked where it did:
        `qk_attribution`), and a neuron whose slope changes is beyond it. It costs two passes, and a backward pass over
        the lower blocks for each node, 32 at a time: 256 neurons of SmolLM2-135M after 15 tokens take 10 s on one core.

    Source:
        Ameisen et al. 2025, "Circuit Tracing" (the graph and its scores); Jafari et al. 2025, arXiv 2508.21258 (the
        rules, RelP).

    See Also:
        `prune_graph`: the part that matters. `edge_heads`: edges by the head that they pass. `edge_attribution`: heads
        and MLPs over all positions, from two prompts.

    Example:
        >>> graph = interp.circuits.attribution_graph(model, "one two three", most=8)
        >>> into_logits = graph.isel(edge=graph.target.isin(graph.node[graph.kind == "logit"]))
        >>> graph.attrs["completeness_error"] < 1e-3
        True
    """
    subject = as_model(model, edits)
    batch, network = one_prompt(subject.text.batch(prompt, prepend_bos=prepend_bos)), subject.transformer
    if not network.config.unembed or not network.config.causal:
        raise ValueError("an attribution graph requires a causal model with logits")
    where = node_sites(network, as_nodes(nodes, network))
    local = local_model(network, batch, where)
    goals = Goals.of(local, subject.text, answer, wrong)
    effects = Effects.of(local_model(network, batch, where, through=True), goals)
    rows = list(_rows_of(local, local.into_logits(goals.values(local)), goals.start(local), links))
    if by == "effect":
        rows += _expanded(local, _largest(effects.of_nodes * local.inner, most), links, effects.slopes)
    else:
        rows += _by_influence(local, rows, goals.start(local), most, links, effects.slopes)
    chosen = Chosen.of(local, goals, rows, batch.tokens[0].cpu())
    graph = _result(chosen, effects.of_nodes, subject.text)
    return with_origin(graph, network)


def as_nodes(nodes: NodeName | Sequence[NodeName] | None, network: Transformer) -> Sequence[NodeName]:
    """The kinds of nodes that are asked for.

    Args:
        nodes: one kind or several; None: features, of a model without dictionaries neurons, without those heads.
        network: the model of the graph.

    Returns:
        The kinds, one at least.

    Raises:
        ValueError: no kinds.
    """
    if nodes is None:
        if network.dictionaries:
            return ["feature"]
        return ["neuron"] if any(NEURONS in name for name in sites.names(network.config)) else ["head"]
    if not nodes:
        raise ValueError(
            "nodes must be at least one of neuron, feature, head, expert, mlp and resid, got none"
        )
    return [nodes] if isinstance(nodes, str) else nodes


def one_prompt(batch: Batch) -> Batch:
    """The one prompt of a batch without its padding.

    Args:
        batch: a batch of one row.

    Returns:
        A batch of one row, all of whose tokens are real.

    Raises:
        ValueError: several prompts, packed ones too.
    """
    if len(batch) != 1 or batch.documents is not None:
        raise ValueError(f"a graph is of one prompt, got {'packed ones' if len(batch) == 1 else len(batch)}")
    real = batch.real[0]
    types = None if batch.types is None else batch.types[:, real]
    return Batch(batch.tokens[:, real], bos=batch.bos, types=types)


def check_prompt(batch: Batch, graph: xr.Dataset) -> None:
    """Check that a batch has the tokens that a graph is about.

    Args:
        batch: one prompt without padding (`one_prompt`).
        graph: a result of `attribution_graph`.

    Raises:
        ValueError: another prompt.
    """
    tokens = graph.isel(node=graph["kind"].to_numpy() == "embedding").sortby("pos")["index"].to_numpy()
    if batch.tokens.cpu().tolist() != [tokens.tolist()]:
        raise ValueError(f"the prompt of the graph is required, {graph.attrs.get('prompt')!r}")


def nodes_of(graph: xr.Dataset) -> list[NodeName]:
    """The kinds of nodes that a graph was made of.

    Args:
        graph: a result of `attribution_graph`.

    Returns:
        The kinds, none where the model had no such place.
    """
    named = str(graph.attrs["nodes"]).split(", ")
    return [kind for kind in get_args(NodeName) if kind in named]


@dataclass(frozen=True)
class Goals:
    """The logits that are explained: each minus the mean logit, or the difference of two."""

    tokens: tuple[int, ...]
    labels: tuple[str, ...]
    probabilities: tuple[float, ...]
    """Of each token; of a difference 1."""
    against: int | None = None
    """The token whose logit is subtracted; None: the mean."""

    @classmethod
    def of(cls, local: LocalModel, text: Text, answer: Answers | None, wrong: Answers | None) -> Goals:
        """The logits of the answers, or the difference from the wrong one, or the most probable ones."""
        probabilities = _probabilities(local)
        if answer is None:
            if wrong is not None:
                raise ValueError("a wrong answer is contrasted with an answer, got none")
            falling = probabilities.sort(descending=True, stable=True)
            count = int((falling.values.cumsum(0) < MASS).sum()) + 1
            ids = falling.indices[: min(count, MOST_LOGITS)]
        else:
            ids = text.outputs(answer)
        tokens = tuple(int(i) for i in ids)
        quoted = [repr(piece) for piece in text.of_outputs.pieces(tokens)]
        if len(set(tokens)) < len(tokens):
            raise ValueError(f"every answer is required once, got {', '.join(quoted)}")
        # tokens that are parts of characters read alike
        labels = tuple(
            f"{piece} {token}" if quoted.count(piece) > 1 else piece
            for piece, token in zip(quoted, tokens, strict=True)
        )
        if wrong is None:
            return cls(tokens, labels, tuple(float(probabilities[i]) for i in tokens))
        false = text.outputs(wrong)
        if len(ids) != 1 or len(false) != 1:
            raise ValueError(f"one answer and one wrong answer are required, got {len(ids)} and {len(false)}")
        check_contrast(ids, false, pieces=text.of_outputs.pieces)
        (other,) = text.of_outputs.pieces([int(false[0])])
        return cls(tokens, (f"{labels[0]} - {other!r}",), (1.0,), int(false[0]))

    @classmethod
    def of_graph(cls, graph: xr.Dataset) -> Goals:
        """What a graph explains. ValueError for a graph without logits."""
        of = graph.isel(node=graph["kind"].to_numpy() == "logit")
        tokens, labels, probabilities = (
            of[name].to_numpy().tolist() for name in ("index", "token", "probability")
        )
        if not tokens:
            raise ValueError("a graph with logits is required, got one without")
        against = int(graph.attrs["against"])
        return cls(tuple(tokens), tuple(labels), tuple(probabilities), None if against < 0 else against)

    def values(self, local: LocalModel) -> Float[Tensor, "g"]:
        """What is explained, as functions of the nodes."""
        logits = local.logits
        return logits[list(self.tokens)] - (logits.mean() if self.against is None else logits[self.against])

    @property
    def weights(self) -> Float[Tensor, "g"]:
        """The share of each in their mean: by probability, where none of them has any equal ones."""
        found = torch.tensor(self.probabilities, dtype=torch.float64)
        return found / found.sum() if bool(found.any()) else torch.full_like(found, 1 / len(found))

    def start(self, local: LocalModel) -> dict[int, float]:
        """The probability of each logit, by its number as a node: they follow all others."""
        return {local.offsets[-1] + i: p for i, p in enumerate(self.probabilities)}


@torch.no_grad()
def _probabilities(local: LocalModel) -> Float[Tensor, "v"]:
    """The probability of each next token, on the host."""
    logits, cap = local.logits.detach().double().cpu(), local.model.config.logit_softcap
    return (logits if cap is None else (logits / cap).tanh() * cap).softmax(-1)


@dataclass(frozen=True, eq=False)
class Row:
    """The edges into one target that are kept, and what all edges sum to."""

    target: int
    sources: np.ndarray
    weights: np.ndarray
    incoming: float
    bias: float
    size: float
    value: float
    error: float

    @property
    def shares(self) -> Shares:
        """The kept edges as shares of the sizes of all."""
        return Shares(self.target, self.sources, np.abs(self.weights) / max(self.size, TINY))


@dataclass(frozen=True, eq=False)
class Effects:
    """What each node adds along all paths to the logits, their mean weighted by probability."""

    of_nodes: Float[np.ndarray, "n"]
    slopes: Mapping[str, Float[Tensor, "1 p *k"]]
    """What one unit more adds, at the sites whose nodes are vectors."""

    @classmethod
    def of(cls, through: LocalModel, goals: Goals) -> Effects:
        """The effects in a local model whose gradients go through nodes."""
        values = goals.values(through)
        slopes = through.slopes((values * goals.weights.to(values)).sum())
        terms = [through.terms(site, slopes[site.name]) for site in through.sites]
        vectors = {site.name: slopes[site.name] for site in through.sites if not site.by_entry}
        return cls(torch.cat(terms).double().cpu().numpy(), vectors)


def _largest(sizes: np.ndarray, most: int) -> np.ndarray:
    """The numbers of the nodes of largest |size|, earlier ones first among equals; none of size 0."""
    best = np.argsort(-np.abs(sizes), kind="stable")[:most]
    return best[sizes[best] != 0]


def _by_influence(
    local: LocalModel,
    logits: Sequence[Row],
    start: Mapping[int, float],
    most: int,
    links: int,
    slopes: Mapping[str, Tensor],
) -> list[Row]:
    """The rows of the nodes of most influence on the logits, as far as it is known by then."""
    rows, count, left = list(logits), local.offsets[-1], local.inner.copy()
    while len(rows) < most + len(logits):
        found = influence_of((row.shares for row in rows), start, count + len(start))[:count]
        best = _largest(found * left, min(2 * AT_ONCE, most + len(logits) - len(rows)))
        if not len(best):
            break
        left[best] = False
        rows += _expanded(local, best, links, slopes)
    return rows[len(logits) :]


def _expanded(
    local: LocalModel, nodes: np.ndarray, links: int, slopes: Mapping[str, Tensor]
) -> Iterator[Row]:
    """The rows of some nodes, those of one site together."""
    numbers = local.site_of(nodes)
    for number in np.unique(numbers):
        for chunk in torch.from_numpy(np.sort(nodes[numbers == number])).split(at_once(local)):
            incoming = local.into_nodes(int(number), chunk, slopes)
            yield from _rows_of(local, incoming, chunk.tolist(), links)


def at_once(local: LocalModel) -> int:
    """How many targets one backward pass takes, by the memory that is free.

    Args:
        local: the local model, gradients of all of whose leaves, and as much again, are held for each target.

    Returns:
        One at least, 32 at most.
    """
    each = 3 * sum(leaf.numel() * max(4, leaf.element_size()) for leaf in local.leaves.values())
    return max(1, min(AT_ONCE, room(local.model) // max(each, 1)))


def _rows_of(local: LocalModel, incoming: Incoming, targets: Iterable[int], links: int) -> Iterator[Row]:
    """Each target's largest edges from inner nodes, and all from embeddings and errors."""
    errors = incoming.checked(local.model.dtype).tolist()
    edges, width = incoming.edges, incoming.edges.shape[1]
    inner = torch.from_numpy(local.inner[:width]).to(edges.device)
    largest = (edges.abs() * inner).topk(min(links, width), dim=1).indices
    given = (~inner).nonzero()[:, 0]
    for i, target in enumerate(targets):
        chosen = torch.cat((largest[i], given)).unique()
        chosen = chosen[edges[i, chosen] != 0]
        yield Row(
            target, chosen.cpu().numpy(), edges[i, chosen].double().cpu().numpy(), float(edges[i].double().sum()),
            float(incoming.bias[i]), float(edges[i].double().abs().sum()), float(incoming.values[i]), errors[i],
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Chosen:
    """The nodes of a graph: those with edges of their own, embeddings, errors and logits."""

    local: LocalModel
    goals: Goals
    nodes: Int[np.ndarray, "n"]
    """Their numbers in the local model, ascending."""
    rows: Mapping[int, Row]
    """What enters them, by these numbers."""
    tokens: Int[Tensor, "p"]
    """The prompt."""

    @classmethod
    def of(cls, local: LocalModel, goals: Goals, rows: Sequence[Row], tokens: Int[Tensor, "p"]) -> Chosen:
        """All nodes with rows, and those that nothing enters."""
        targets = {row.target: row for row in rows}
        given = np.flatnonzero(~local.inner)
        return cls(local, goals, np.union1d(given, np.array(list(targets), dtype=np.int64)), targets, tokens)

    def of_rows(self, field: Literal["incoming", "bias", "size"], missing: float) -> Float[Tensor, "n"]:
        """A number of each node's row, or what stands for it."""
        found = (self.rows.get(int(node)) for node in self.nodes)
        each = [missing if row is None else getattr(row, field) for row in found]
        return torch.tensor(each, dtype=torch.float64)

    def edges(self) -> tuple[Int[np.ndarray, "e"], Int[np.ndarray, "e"], Float[np.ndarray, "e"]]:
        """Source, target (places in `nodes`) and weight of every edge between the nodes, by target."""
        found = []
        for place, node in enumerate(self.nodes):
            if (row := self.rows.get(int(node))) is not None:
                inside = np.isin(row.sources, self.nodes)
                source = np.searchsorted(self.nodes, row.sources[inside])
                found.append((source, np.full(len(source), place), row.weights[inside]))
        source, target, weight = (np.concatenate(each) for each in zip(*found, strict=True))
        return source, target, weight

    def values(self) -> Float[Tensor, "n"]:
        """The value of each node."""
        own, count = self.local.values, len(self.local.values)
        each = [own[node] if node < count else self.rows[int(node)].value for node in self.nodes]
        return torch.tensor([float(value) for value in each], dtype=torch.float64)

    def probabilities(self) -> Float[Tensor, "n"]:
        """The probability of each logit, 0 for other nodes."""
        start = self.goals.start(self.local)
        return torch.tensor([start.get(int(node), 0.0) for node in self.nodes], dtype=torch.float64)

    def labels(self, text: Text) -> dict[str, list[object]]:
        """The coordinates of the nodes, `node` being their names."""
        pieces = text.pieces(self.tokens.tolist())
        each = [self._labels(int(node), pieces) for node in self.nodes]
        names = ("node", "kind", "layer", "pos", "index", "token")
        return {name: list(column) for name, column in zip(names, zip(*each, strict=True), strict=True)}

    def _labels(self, node: int, pieces: Sequence[str]) -> tuple[str, str, int, int, int, str]:
        """Name, kind, layer, position, index and text of a node."""
        goal = node - self.local.offsets[-1]
        if goal >= 0:
            label = self.goals.labels[goal]
            return f"logit {label}", "logit", -1, len(pieces) - 1, self.goals.tokens[goal], label
        site, pos, index = self.local.place(node)
        layer = -1 if site.layer is None else site.layer
        if site.kind == "embedding":
            index = int(self.tokens[pos])
        return self.local.name(node), site.kind, layer, pos, -1 if index is None else index, pieces[pos]


def _result(chosen: Chosen, effects: Float[np.ndarray, "n"], text: Text) -> xr.Dataset:
    """The graph of the chosen nodes."""
    local, nodes, labels = chosen.local, chosen.nodes, chosen.labels(text)
    source, target, weight = chosen.edges()
    activation, probability = chosen.values(), chosen.probabilities()
    inside = nodes < local.offsets[-1]
    of_logits = torch.zeros_like(activation)
    of_logits[torch.from_numpy(~inside)] = chosen.goals.weights
    effect = activation * of_logits
    effect[torch.from_numpy(inside)] = torch.from_numpy(effects[nodes[inside]])
    incoming, size = chosen.of_rows("incoming", float("nan")), chosen.of_rows("size", 0.0)
    shares = np.abs(weight) / np.maximum(size.numpy()[target], TINY)
    starts = {i: p for i, p in enumerate(probability.tolist()) if p}
    influence = influence_of(shares_of(source, target, shares), starts, len(nodes))
    vectors = torch.from_numpy(~np.isin(np.array(labels["kind"]), ("neuron", "feature", "logit")))
    slope = torch.where(activation == 0, 0.0, effect / activation)
    slope = torch.where(vectors, 1.0, torch.where(torch.from_numpy(inside), slope, of_logits))
    entering = torch.from_numpy(np.bincount(target, weight, len(nodes)))
    names = labels["node"]
    inner = effects * local.inner
    graph = labelled(
        "attribution_graph",
        {
            "value": (("edge",), torch.from_numpy(weight) * slope[torch.from_numpy(target)]),
            "weight": (("edge",), torch.from_numpy(weight)),
            "activation": (("node",), activation),
            "effect": (("node",), effect),
            "influence": (("node",), torch.from_numpy(influence)),
            "incoming": (("node",), incoming),
            "bias": (("node",), chosen.of_rows("bias", float("nan"))),
            "others": (("node",), incoming - entering),
            "size": (("node",), size),
            "probability": (("node",), probability),
        },
        coords={
            "edge": [f"{names[s]} -> {names[t]}" for s, t in zip(source, target, strict=True)],
            "source": ("edge", [names[s] for s in source]),
            "target": ("edge", [names[t] for t in target]),
            "number": ("node", range(len(names))),
            **{name: ("node", column) for name, column in labels.items()},
        },
        units={"value": "logits", "effect": "logits", "influence": "share", "probability": "probability"},
        attrs={
            "nodes": ", ".join(dict.fromkeys(site.kind for site in local.sites if not site.is_source)),
            "prompt": "".join(text.pieces(chosen.tokens.tolist())),
            "against": -1 if chosen.goals.against is None else chosen.goals.against,
            "n_layers": local.model.config.n_layers,
            "covered": share(float(np.abs(inner[nodes[inside]]).sum()), float(np.abs(inner).sum())),
            "completeness_error": max(row.error for row in chosen.rows.values()),
        },
    )
    return graph.assign_attrs(scores_of(graph))
