"""A circuit: some edges of a model's graph with their scores, and a record of how they were found; kept in JSON."""

from __future__ import annotations

import functools
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from interp.causal.contrast import Direction
from interp.causal.graph import LOGITS, EdgeGraph
from interp.core.axes import shape_text
from interp.core.boundary import public
from interp.core.files import json_object, write_atomically
from interp.core.kinds import Finite, PositiveCount
from interp.core.results import numbers
from interp.core.viewer import Viewable, fitted, notes_of
from interp.runs.folder import built

if TYPE_CHECKING:
    import xarray as xr

SHOWN = 5
"""Number of largest edges that a circuit's text names."""
FORMAT = 3
"""Version of the file. Version 1, which spelled parts otherwise and scored in the other direction, and version 2, which
had neither faithfulness nor notes, are read too."""


@public()
@dataclass(frozen=True)
class CircuitProtocol:
    """Record of how a circuit was found, enough to find it again."""

    metric: str
    unit: str
    method: str
    """How edges were scored: a method of edge attribution, "exact", or a word of your own."""
    search: str
    """How edges were picked by their scores."""
    replacement: str
    """Values of the edges outside: "resample", "mean" or "zero"."""
    n: PositiveCount
    """Number of pairs of prompts."""
    seed: int | None = None
    """Seed that the prompts were drawn with; None: not said."""
    direction: Direction = "denoise"
    """Run that a score is an effect in.

    "denoise", the clean edge in the corrupted run; "noise", the corrupted edge in the clean run.
    """
    faithfulness: Finite | None = None
    """The share of the metric's difference between the whole model and no edge that the circuit keeps on those pairs;
    None where no circuit was run."""


@public()
@dataclass(frozen=True, repr=False)
class Circuit(Viewable):
    """A circuit: edges of a model with their scores, in the order of the graph, by name in any spelling.

    Raises:
        KeyError: an edge that the graph does not have.
        ValueError: a score that is no finite number, or an edge that comes twice.

    Example:
        >>> graph = EdgeGraph.of(model.cfg)
        >>> circuit = Circuit(graph, {"L0.mlp->logits": 2.0, "L0.resid->L0.mlp": 1.5, "L0.resid->L1.mlp": 0.1})
        >>> circuit.pruned().edges
        ('L0.resid->L0.mlp', 'L0.mlp->logits')
    """

    graph: EdgeGraph
    scores: Mapping[str, float]
    """Every edge by name, with its score."""
    model: str = ""
    task: str = ""
    protocol: CircuitProtocol | None = None
    notes: tuple[str, ...] = ()
    """Sentences about how the circuit differs from what was requested: edges pruned, a size that was chosen, ..."""
    _known: Bool[Tensor, "sender receiver"] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if bad := [edge for edge, score in self.scores.items() if not abs(score) <= sys.float_info.max]:
            raise ValueError(f"a score that is a finite number is required for every edge, {bad[0]} has none")
        places = {edge: self.graph.index(edge) for edge in self.scores}
        order = sorted(places, key=lambda edge: places[edge])
        for first, second in itertools.pairwise(order):
            if places[first] == places[second]:
                raise ValueError(f"{self.graph.name(*places[first])} comes twice, as {first} and {second}")
        scores = {self.graph.name(*places[edge]): self.scores[edge] for edge in order}
        object.__setattr__(self, "scores", MappingProxyType(scores))
        object.__setattr__(self, "_known", self.graph.chosen(scores))

    @classmethod
    @public()
    def of(
        cls,
        graph: EdgeGraph,
        kept: Bool[Tensor, "sender receiver"],
        scores: Float[Tensor, "sender receiver"],
        *,
        model: str = "",
        task: str = "",
        protocol: CircuitProtocol | None = None,
        notes: Sequence[str] = (),
    ) -> Circuit:
        """The circuit of a mask over the graph's edges; cells that are no edges are not looked at.

        Raises:
            ValueError: a mask or scores of another shape than the graph's senders by receivers.
        """
        if not kept.shape == scores.shape == graph.exists.shape:
            raise ValueError(
                f"kept and scores must be {shape_text(graph.exists.shape)} of this graph's edges, got "
                f"{shape_text(kept.shape)} and {shape_text(scores.shape)}"
            )
        values = scores[graph.exists & kept].tolist()
        named = dict(zip(graph.names(kept), values, strict=True))
        return cls(graph, named, model, task, protocol, tuple(notes))

    @classmethod
    @public()
    def of_result(cls, result: xr.Dataset, *, model: str = "") -> Circuit:
        """The circuit in the result of `FindCircuit`. ValueError for another result."""
        if "kept" not in result or "circuit" not in result.attrs:
            raise ValueError("the result of FindCircuit is required, with the edges that it kept")
        record = json.loads(result.attrs["circuit"])
        protocol = CircuitProtocol(**record["protocol"])
        graph, notes = EdgeGraph(**record["graph"]), notes_of(result)
        kept, scores = (numbers(name, result[name], graph.labels) for name in ("kept", "value"))
        return cls.of(graph, kept, scores, model=model, task=record["task"], protocol=protocol, notes=notes)

    def __reduce__(self) -> tuple[type[Circuit], tuple[object, ...]]:
        """Arguments that make the circuit again in another process: its read-only scores cannot be pickled."""
        return type(self), (
            self.graph,
            dict(self.scores),
            self.model,
            self.task,
            self.protocol,
            self.notes,
        )

    def __repr__(self) -> str:
        size = f"{len(self.scores)} of {len(self.graph)} edges, {len(self.nodes)} nodes"
        return f"Circuit({size}, model={self.model!r}, task={self.task!r})"

    def __str__(self) -> str:
        size = f"{len(self.scores)} of {len(self.graph)} edges ({self.share:.2%}), {len(self.nodes)} nodes"
        of = " ".join(x for x in (self.model, self.task) if x)
        lines = [f"Circuit{f' of {of}' if of else ''}: {size}"]
        lines += [f"  note: {text}" for text in self.notes]
        if how := self.protocol:
            kept = "" if how.faithfulness is None else f"; faithfulness there {how.faithfulness:.2f}"
            lines.append(f"  {how.metric} ({how.unit}) by {how.method}, {how.search}; n = {how.n}{kept}")
        largest = sorted(self.scores.items(), key=lambda pair: -abs(pair[1]))
        lines += [f"  {edge:<24} {score:+.4g}" for edge, score in largest[:SHOWN]]
        n_more = len(largest) - SHOWN
        return fitted([*lines, *([f"  ... and {n_more} more"] if n_more > 0 else [])])

    @property
    def edges(self) -> tuple[str, ...]:
        """The names of the edges."""
        return tuple(self.scores)

    def mask(self) -> Bool[Tensor, "sender receiver"]:
        """True at the edges of the circuit."""
        return self._known.clone()

    @property
    def share(self) -> float:
        """The share of all edges of the model that the circuit has."""
        return len(self.scores) / len(self.graph)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Every node at an end of an edge, in the order of the forward pass.

        A head that only shares the keys or values of its group with others counts if it sends anything.
        """
        ends = {self.graph.senders[i] for i in self._known.any(1).nonzero()[:, 0].tolist()}
        for receiver in self._known.any(0).nonzero()[:, 0].tolist():
            nodes = self.graph.nodes_of(receiver)
            ends |= set(nodes) if len(nodes) == 1 else set()
        return tuple(node for node in (*self.graph.senders, LOGITS) if node in ends)

    def pruned(self) -> Circuit:
        """The circuit without the edges that are on no path from the input to the logits."""
        kept = connected(self.graph, self._known)
        scores = {edge: self.scores[edge] for edge in self.graph.names(kept)}
        return Circuit(self.graph, scores, self.model, self.task, self.protocol, self.notes)

    @public()
    def save(self, path: str | Path) -> None:
        """Write the circuit to a JSON file."""
        record = {
            "format": FORMAT, "model": self.model, "task": self.task, "graph": asdict(self.graph),
            "protocol": None if self.protocol is None else asdict(self.protocol), "edges": dict(self.scores),
            "notes": list(self.notes),
        }  # fmt: skip
        text = json.dumps(record, indent=1, allow_nan=False)
        write_atomically(Path(path), lambda where: where.write_text(text, encoding="utf-8"))

    @classmethod
    @public()
    def load(cls, path: str | Path) -> Circuit:
        """The circuit in a JSON file, in any version of the format.

        Raises:
            ValueError: a file that holds something else, or another version.
            KeyError: edges that its own graph does not have.
        """
        try:
            record = json_object(path)
        except ValueError as cause:
            raise ValueError(f"a circuit in JSON is required, {path} is none: {cause}") from cause
        keys = {"format", "model", "task", "graph", "protocol", "edges"}
        notes = record.pop("notes", [])
        if set(record) != keys or record["format"] not in range(1, FORMAT + 1):
            raise ValueError(f"a circuit of format {FORMAT} with {sorted(keys)} is required, got {path}")
        try:
            protocol, graph = protocol_of(record["protocol"], record["format"]), graph_of(record["graph"])
            listed = tuple(map(str, notes)) if isinstance(notes, list) else ()
            return cls(graph, record["edges"], record["model"], record["task"], protocol, listed)  # type: ignore[arg-type]
        except ValueError as cause:
            raise ValueError(f"{path} holds no circuit: {cause}") from cause


def protocol_of(record: object, version: object) -> CircuitProtocol | None:
    """The protocol from the record in a file; None for null. ValueError for a record that is not a protocol.

    Protocols of version 1 were always scored by what corrupting an edge changes; before version 3 no circuit was run.
    """
    if record is None:
        return None
    later = {1: {"direction": "noise", "faithfulness": None}, 2: {"faithfulness": None}}.get(version, {})  # type: ignore[call-overload]
    return built(CircuitProtocol, {**later, **record} if isinstance(record, Mapping) else record)  # type: ignore[arg-type]


def graph_of(record: object) -> EdgeGraph:
    """The edge graph from the record in a file. ValueError for a record that is not an edge graph."""
    return built(EdgeGraph, record)  # type: ignore[arg-type]


def connected(
    graph: EdgeGraph, kept: Bool[Tensor, "*c sender receiver"]
) -> Bool[Tensor, "*c sender receiver"]:
    """Mask of the edges that are on a path from the input to the logits inside the given edges.

    A node stays if it reads from any kept edge and writes to any kept edge. The output of another node does not depend
    on the input, or is not read: with resampled replacements, dropping its edges changes no number, unless a norm of
    the sum of a layer's heads (sandwich and output norms) reads them all.
    """
    computes, kept = computing(graph), kept & graph.exists
    while True:
        reads = (computes & kept.any(-2)[..., None]).any(-2)  # [sender]: an edge enters an input of the node
        reads[..., 0] = True
        alive = reads & kept.any(-1)  # [sender]: and an edge leaves the node
        heard = (computes & alive[..., None, :]).any(-1)  # [receiver]: an input of such a node
        heard[..., -1] = True
        remaining = kept & alive[..., None] & heard[..., None, :]
        if torch.equal(remaining, kept):
            return kept
        kept = remaining


@functools.cache
def computing(graph: EdgeGraph) -> Bool[Tensor, "receiver sender"]:
    """Mask of the senders that each receiver is an input of: one, or the heads that share it; none for the logits."""
    mask = torch.zeros(len(graph.receivers), len(graph.senders), dtype=torch.bool)
    places = {name: i for i, name in enumerate(graph.senders)}
    for receiver in range(len(graph.receivers) - 1):
        mask[receiver, [places[node] for node in graph.nodes_of(receiver)]] = True
    return mask
