"""The change of a pass that leaves a model some of its edges: all others carry their senders' values of another run.

The input of a head, an MLP or the logits is a sum over earlier senders. In a circuit it is the sum of what the kept
senders say in THIS run, in which they themselves hear the circuit only, and of what the dropped ones said in the run
that replaces them (the evaluation of EAP-IG, Hanna et al. 2024, and of the MIB benchmark, Mueller et al. 2025,
arXiv:2504.13151). That is the ordinary pass with sum over dropped u of (replaced_u - current_u) added to each input.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from types import MappingProxyType
from typing import NamedTuple

from einops import einsum, rearrange
from jaxtyping import Bool, Float
from torch import Tensor, cat

from interp.causal.graph import EdgeGraph
from interp.circuits.edge_scores import START, Change
from interp.circuits.sender_outputs import Outputs, Values, head_matrices, head_outputs, mlp_output
from interp.core.precision import wide
from interp.model.edits import ANSWERS, Edit, Function
from interp.model.sites import final_stream
from interp.model.tap import Read
from interp.model.transformer import Transformer

_HELD = "corrections of a layer"
"""Where the memory of a pass keeps the corrections of a layer's queries, keys and values until the last is visited."""


class Input(NamedTuple):
    """Receivers whose inputs are one site."""

    site: str
    receivers: slice
    heads: bool
    """Whether the site has an axis of heads."""
    block: slice
    """The receivers that see the same senders: their corrections are computed together, at the first of their sites."""


def inputs(model: Transformer, graph: EdgeGraph) -> Iterator[Input]:
    """Every input site, in the order of the pass."""
    for layer in range(graph.n_layers):
        block, first = graph.inputs(layer), graph.inputs(layer).start
        for letter, count in zip("qkv", (graph.n_heads, graph.n_kv_heads, graph.n_kv_heads), strict=True):
            yield Input(f"blocks.{layer}.hook_{letter}_input", slice(first, first + count), True, block)
            first += count
        if graph.mlp:
            mlp = slice(first, first + 1)
            yield Input(f"blocks.{layer}.hook_mlp_in", mlp, False, mlp)
    end = slice(len(graph.receivers) - 1, len(graph.receivers))
    yield Input(final_stream(model.config), end, False, end)


@dataclass(frozen=True, eq=False)
class DroppedEdges:
    """A change of one pass over rows `circuit, pair`, at every input that some circuit drops an edge into.

    The pass must answer `DroppedEdges.reads`: what senders say in it is what it has answered so far.
    """

    model: Transformer
    graph: EdgeGraph
    dropped: Float[Tensor, "c sender receiver"]
    """1 at the edges that each circuit drops."""
    replaced: Outputs
    """What those carry instead, of every pair, or of all alike."""

    @property
    def reads(self) -> tuple[Read, ...]:
        """What the pass has to answer."""
        return Change.reads(self.model)

    @property
    def edits(self) -> tuple[Edit, ...]:
        """The interventions of the pass."""
        return tuple(Edit(site, self) for site in self._inputs)

    def at_site(self, site: str, memory: dict[str, object]) -> Function:
        """What adds to one input, in this pass."""
        said = memory[ANSWERS]
        assert isinstance(said, Mapping)
        return partial(self._corrected, where=self._inputs[site], said=said, memory=memory)

    @cached_property
    def _inputs(self) -> Mapping[str, Input]:
        """The inputs that differ from the ordinary pass's in some circuit."""
        every = inputs(self.model, self.graph)
        return MappingProxyType({each.site: each for each in every if bool(self._any[:, each.block].any())})

    @cached_property
    def _any(self) -> Bool[Tensor, "sender receiver"]:
        """Which edges any of the circuits drops."""
        return self.dropped.any(0)

    def _corrected(self, x: Tensor, where: Input, said: Values, memory: dict[str, object]) -> Tensor:
        """What these inputs are in the circuits."""
        if where.receivers.start == where.block.start:
            memory[_HELD] = self._correction(where.block, said)
        held, first = memory[_HELD], where.block.start
        assert isinstance(held, Tensor)
        added = held[:, where.receivers.start - first : where.receivers.stop - first].to(x.device)
        return x + rearrange(added, "c v b p d -> (c b) p v d" if where.heads else "c 1 b p d -> (c b) p d")

    def _correction(self, receivers: slice, said: Values) -> Float[Tensor, "c v b p d"]:
        """The sum over dropped senders of (replaced - current), one layer of senders at a time."""
        seen = int(self.graph.visible[receivers.start])
        start = self._change(wide(said[Read(START)]), self.replaced.start)
        total = einsum(start, self.dropped[:, 0, receivers], "c b p d, c v -> c v b p d")
        for layer in range(self.graph.n_layers):
            heads = self.graph.heads(layer)
            if heads.start >= seen:
                break
            if bool(self._any[heads, receivers].any()):
                total += self._from_heads(layer, receivers, said)
            mlp = heads.stop
            if self.graph.mlp and mlp < seen and bool(self._any[mlp, receivers].any()):
                change = self._change(mlp_output(said, layer), self.replaced.mlp[layer])
                total += einsum(change, self.dropped[:, mlp, receivers], "c b p d, c v -> c v b p d")
        return total

    def _from_heads(self, layer: int, receivers: slice, said: Values) -> Float[Tensor, "c v b p d"]:
        """The part of the heads of one layer; a bias after their norm is replaced where all of them are."""
        dropped, replaced = self.dropped[:, self.graph.heads(layer), receivers], self.replaced.heads[layer]
        count = replaced.shape[2]
        if count > dropped.shape[1]:
            dropped = cat((dropped, dropped.amin(1, keepdim=True)), 1)
        change = self._change(head_outputs(self.model, said, layer)[:, :, :count], replaced)
        out = head_matrices(self.model, layer)[:count].to(change)
        added = einsum(change, out, "c b p h e, h e d -> h c b p d")
        return einsum(dropped, added, "c h v, h c b p d -> c v b p d")

    def _change(self, current: Float[Tensor, "r p ..."], replaced: Float[Tensor, "#n #p ..."]) -> Tensor:
        """replaced - current, `[c b p ...]`."""
        return replaced - current.unflatten(0, (len(self.dropped), -1))
