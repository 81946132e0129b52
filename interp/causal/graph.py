"""The edge graph of a model: which part's output enters which part's input through the residual stream.

A residual stream is a sum, so the input of every head, every MLP and the logits has one term per earlier part: an edge.
(Syed et al. 2023, "Attribution Patching Outperforms Automated Circuit Discovery"; Hanna et al. 2024, "Have Faith in
Faithfulness".) Names are those of parts and edges (`interp.model.parts`):

    nodes   `L0.resid` (the embeddings, "input" in the literature), `L3H7`, `L3.mlp`, `logits`
    edges   `L0H1->L2.mlp`, `L0.mlp->logits`, and into a head by what it carries: `L0H1->L1H2.q`, `.k`, `.v`

Heads that share keys and values (grouped-query attention) have one key and one value input per group: `L1G0.k` and
`L1G0.v`, group g serving the query heads h with h // (n_heads / n_kv_heads) = g. Without groups it is `L1H0.k`.
The MLP before attention of a Macaron block is a node of its own, `L3.mlp_before`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from interp.core.axes import shape_text
from interp.core.boundary import public
from interp.core.wording import nearest
from interp.model.config import ModelConfig
from interp.model.parts import Edge, Part

INPUT, LOGITS = "L0.resid", "logits"
MLP_BEFORE = "mlp_before_out"
"""The sublayer that is an MLP before attention, of Macaron blocks."""
MOST_HEADS = 100_000
"""Most heads of a graph, whose edge matrix is that many squared; the largest published models have some 20 000."""


_KINDS = ("resid", "mlp_before", "head", "query", "key", "group_key", "value", "group_value", "mlp")
"""Kinds of senders and receivers in the order of a layer."""


def in_pass_order(names: Iterable[str]) -> list[str]:
    """Names of senders or receivers in the order of `EdgeGraph`. KeyError for one that no part has."""

    def place(name: str) -> tuple[bool, int, int, int]:
        part = Part.of(name)
        kind = _KINDS.index(part.kind) if part.kind in _KINDS else len(_KINDS)
        return part.layer is None, part.layer or 0, kind, part.index or 0

    return sorted(names, key=place)


def _has_other_sublayers(config: ModelConfig) -> bool:
    """Whether blocks are made of something else than heads, the MLP after them and the MLP before them."""
    return config.block.unusual is not None and MLP_BEFORE not in config.sublayers


def reads_by_qkv(config: ModelConfig) -> bool:
    """Whether heads read the stream as queries, keys and values only: no gate, no memory, no other scores."""
    return all(mixer.traits.reads_by_qkv for mixer in config.mixers)


@public()
@dataclass(frozen=True)
class EdgeGraph:
    """All edges of one shape of model, as one matrix `[sender, receiver]`.

    Senders and receivers are in the order of the forward pass (per layer: an MLP before attention, heads, MLP; and the
    former, queries, keys, values, MLP), so that a receiver reads exactly the first `visible[receiver]` senders: one
    number per receiver is the whole graph.
    Names of edges are made only when they are needed.

    Example:
        >>> len(EdgeGraph(n_layers=12, n_heads=12, n_kv_heads=12))
        32491
        >>> EdgeGraph.of(model.cfg).senders[:2]
        ('L0.resid', 'L0H0')
    """

    n_layers: int
    n_heads: int
    n_kv_heads: int
    mlp: bool = True
    parallel: bool = False
    """Whether an MLP reads what the heads of its own layer read, instead of their sum."""
    mlp_before: bool = False
    """Whether each layer has another MLP before its heads, which read what it adds (Macaron)."""

    def __post_init__(self) -> None:
        """ValueError for sizes below 1, groups that do not divide the heads, and more than `MOST_HEADS` heads."""
        sizes = (self.n_layers, self.n_heads, self.n_kv_heads)
        if min(sizes) < 1 or self.n_layers * self.n_heads > MOST_HEADS or self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"EdgeGraph requires at least 1 and at most {MOST_HEADS} heads in all layers together, n_kv_heads "
                f"dividing n_heads; got n_layers={sizes[0]}, n_heads={sizes[1]}, n_kv_heads={sizes[2]}"
            )

    @classmethod
    @public()
    def of(cls, config: ModelConfig) -> EdgeGraph:
        """The graph of a config. ValueError where the inputs are no sums over earlier parts."""
        problem = {
            "norms the sum itself (post-norm blocks)": config.norms_sum,
            "also attends to the memory of an encoder": config.cross_attention,
            f"{config.block.unusual}": _has_other_sublayers(config),
            "has heads that read the stream otherwise than as queries, keys and values linear in it": not reads_by_qkv(
                config
            ),
        }
        if reasons := [what for what, is_so in problem.items() if is_so]:
            raise ValueError(
                f"an edge graph requires a residual stream that is a sum of what its parts add; this model {reasons[0]}"
            )
        return cls.of_shape(config)

    @classmethod
    def of_shape(cls, config: ModelConfig) -> EdgeGraph:
        """The senders and receivers of a config, whether or not its inputs are sums.

        ValueError for blocks of other sublayers than heads and MLPs.
        """
        if _has_other_sublayers(config):
            raise ValueError(
                f"heads and MLPs are required as parts of a block; this model {config.block.unusual}"
            )
        return cls(
            config.n_layers, config.n_heads, config.kv_heads, config.mlp is not None, config.parallel,
            MLP_BEFORE in config.sublayers,
        )  # fmt: skip

    @cached_property
    def senders(self) -> tuple[str, ...]:
        """Names of all nodes that write to the stream."""
        names = [INPUT]
        for layer in range(self.n_layers):
            names += [str(Part("mlp_before", layer))] * self.mlp_before
            names += [str(Part("head", layer, h)) for h in range(self.n_heads)]
            names += [str(Part("mlp", layer))] * self.mlp
        return tuple(names)

    @cached_property
    def receivers(self) -> tuple[str, ...]:
        """Names of all inputs that read from the stream."""
        group = "group_" if self.n_kv_heads < self.n_heads else ""
        names: list[str] = []
        for layer in range(self.n_layers):
            names += [str(Part("mlp_before", layer))] * self.mlp_before
            names += [str(Part("query", layer, h)) for h in range(self.n_heads)]
            for kind in ("key", "value"):
                names += [str(Part(group + kind, layer, g)) for g in range(self.n_kv_heads)]
            names += [str(Part("mlp", layer))] * self.mlp
        return (*names, LOGITS)

    @property
    def labels(self) -> dict[str, tuple[str, ...]]:
        """The labels of a table of all edges, by dim, in the order of the graph."""
        return {"sender": self.senders, "receiver": self.receivers}

    @cached_property
    def visible(self) -> Int[Tensor, "receiver"]:
        """Number of senders that each receiver reads, which are the first ones in the order of `senders`."""
        counts: list[int] = []
        for layer in range(self.n_layers):
            before = self.heads(layer).start
            counts += [before - 1] * self.mlp_before
            counts += [before] * self._inputs
            counts += [before if self.parallel else before + self.n_heads] * self.mlp
        return torch.tensor([*counts, len(self.senders)])

    @cached_property
    def exists(self) -> Bool[Tensor, "sender receiver"]:
        """True at the edges of the graph."""
        return torch.arange(len(self.senders))[:, None] < self.visible

    def __len__(self) -> int:
        """The number of edges: sum_l 3H(1 + (H+1)l) + sum_l (1 + (H+1)l + H) + 1 + (H+1)L, without groups.

        With an MLP before the heads: sum_l (1 + (H+2)l) + 3H(2 + (H+2)l) + (2 + (H+2)l + H), and 1 + (H+2)L.
        """
        return int(self.visible.sum())

    def heads(self, layer: int) -> slice:
        """The slice of the senders that are the heads of a layer."""
        first = 1 + layer * (self.n_heads + self.mlp + self.mlp_before) + self.mlp_before
        return slice(first, first + self.n_heads)

    @property
    def mlps(self) -> tuple[str, ...]:
        """The MLPs of a layer, by the kind of their parts, in the order of the pass."""
        return ("mlp_before",) * self.mlp_before + ("mlp",) * self.mlp

    def mlp_sender(self, layer: int, mlp: str = "mlp") -> int:
        """Index of the sender that is an MLP of a layer (of `mlps`), if there is one."""
        return self.heads(layer).stop if mlp == "mlp" else self.heads(layer).start - 1

    def inputs(self, layer: int) -> slice:
        """The slice of the receivers that are queries, keys and values of a layer's heads."""
        first = layer * (self._inputs + self.mlp + self.mlp_before) + self.mlp_before
        return slice(first, first + self._inputs)

    def mlp_receiver(self, layer: int, mlp: str = "mlp") -> int:
        """Index of the receiver that is an MLP of a layer (of `mlps`), if there is one."""
        return self.inputs(layer).stop if mlp == "mlp" else self.inputs(layer).start - 1

    @public()
    def name(self, sender: int, receiver: int) -> str:
        """Name of one edge. IndexError for an index that no sender or no receiver has."""
        _check_index("sender", sender, self.senders)
        _check_index("receiver", receiver, self.receivers)
        return f"{self.senders[sender]}->{self.receivers[receiver]}"

    @public()
    def names(self, chosen: Bool[Tensor, "sender receiver"] | None = None) -> Iterator[str]:
        """Names of the chosen edges (None: of all), sender by sender."""
        if chosen is not None and chosen.shape != self.exists.shape:
            raise ValueError(
                f"chosen must have one truth per pair of nodes, {shape_text(self.exists.shape)}, got "
                f"{shape_text(chosen.shape)}"
            )
        which = self.exists if chosen is None else self.exists & chosen.cpu()
        return (self.name(s, r) for s, r in which.nonzero().tolist())

    @public()
    def index(self, edge: str | Edge) -> tuple[int, int]:
        """Indices of the sender and receiver of an edge, named in any spelling. KeyError for one not in the graph."""
        source, arrow, target = str(edge).partition("->")
        sender = _node_index(source, self._sender_places, "sender")
        receiver = _node_index(target, self._receiver_places, "receiver") if arrow else -1
        if not arrow or not bool(self.exists[sender, receiver]):
            raise KeyError(
                f"no edge {str(edge)!r}: an edge `sender->receiver` leads forwards, to an input that reads the sender"
            )
        return sender, receiver

    @public()
    def chosen(self, edges: Iterable[str | Edge]) -> Bool[Tensor, "sender receiver"]:
        """Mask that is True at the named edges. KeyError for one not in the graph."""
        mask = torch.zeros_like(self.exists)
        for edge in edges:
            mask[self.index(edge)] = True
        return mask

    @public()
    def nodes_of(self, receiver: int) -> tuple[str, ...]:
        """Names of the nodes that compute with this input: one, or, for shared keys and values, the group's heads.

        IndexError for an index that no receiver has.
        """
        _check_index("receiver", receiver, self.receivers)
        part = Part.of(self.receivers[receiver])
        assert part.layer is not None or part.kind == LOGITS
        if part.kind in ("query", "key", "value"):
            return (str(Part("head", part.layer, part.index)),)
        if part.index is None:
            return (str(part),)
        size = self.n_heads // self.n_kv_heads
        return tuple(
            str(Part("head", part.layer, h)) for h in range(part.index * size, (part.index + 1) * size)
        )

    @property
    def _inputs(self) -> int:
        return self.n_heads + 2 * self.n_kv_heads

    @cached_property
    def _sender_places(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.senders)}

    @cached_property
    def _receiver_places(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.receivers)}


def _check_index(what: str, index: int, nodes: Sequence[str]) -> None:
    if not 0 <= index < len(nodes):
        raise IndexError(f"{what} must be in [0, {len(nodes) - 1}], got {index}")


def _node_index(name: str, places: dict[str, int], what: str) -> int:
    """Index of a node in `places`, by its name in any spelling. KeyError for a node that the graph does not have."""
    if name in places:
        return places[name]
    try:
        canonical = str(Part.of(name))
    except (KeyError, ValueError):
        canonical = name
    if canonical not in places:
        raise KeyError(f"no {what} {name!r} in this graph; {nearest(name, places)}")
    return places[canonical]
