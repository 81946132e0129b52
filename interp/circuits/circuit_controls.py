"""Circuits that nobody searched for: as many edges at random, or edges with the same degrees."""

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from interp.causal.graph import EdgeGraph

SWAPS = 10
"""Attempted swaps per edge; a few already forget the circuit they started from."""


def random_circuit(
    graph: EdgeGraph, n: int, generator: np.random.Generator
) -> Bool[Tensor, "sender receiver"]:
    """n edges of the graph, every set of n equally likely. ValueError for more than there are."""
    if not 0 <= n <= len(graph):
        raise ValueError(f"0 to {len(graph)} edges are required, got {n}")
    cells = graph.exists.nonzero()[generator.permutation(len(graph))[:n]]
    found = torch.zeros_like(graph.exists)
    found[cells[:, 0], cells[:, 1]] = True
    return found


def degree_matched(
    graph: EdgeGraph, kept: Bool[Tensor, "sender receiver"], generator: np.random.Generator
) -> Bool[Tensor, "sender receiver"]:
    """Random edges with the degrees of these: heads of every layer trade places, then edges are switched.

    As many edges leave the input and every MLP, and enter every MLP and the logits, as before; the same numbers leave
    the heads of a layer, and enter their queries, keys and values, though not the same heads'. (Degrees that each head
    keeps leave hardly anything to chance in circuits of a few dozen edges.)
    """
    senders, receivers = heads_shuffled(graph, generator)
    moved = torch.zeros_like(graph.exists)
    moved[senders[:, None], receivers] = graph.exists & kept
    return switched(graph, moved, generator)


def heads_shuffled(
    graph: EdgeGraph, generator: np.random.Generator
) -> tuple[Int[Tensor, "sender"], Int[Tensor, "receiver"]]:
    """The new place of every sender and receiver when the heads of each layer trade places.

    Heads that share keys and values stay together.
    """
    senders, receivers = torch.arange(len(graph.senders)), torch.arange(len(graph.receivers))
    size = graph.n_heads // graph.n_kv_heads
    for layer in range(graph.n_layers):
        groups = generator.permutation(graph.n_kv_heads)
        heads = [group * size + generator.permutation(size) for group in groups]
        head, group = torch.from_numpy(np.concatenate(heads)), torch.from_numpy(groups)
        first = graph.inputs(layer).start
        senders[graph.heads(layer)] = graph.heads(layer).start + head
        places = (head, graph.n_heads + group, graph.n_heads + graph.n_kv_heads + group)
        receivers[graph.inputs(layer)] = first + torch.cat(places)
    return senders, receivers


def switched(
    graph: EdgeGraph, kept: Bool[Tensor, "sender receiver"], generator: np.random.Generator
) -> Bool[Tensor, "sender receiver"]:
    """Random edges with as many out of every sender, and into every receiver, as these.

    Pairs of edges u -> v, x -> y become u -> y, x -> v wherever both are edges of the graph and not there yet, ten
    attempts per edge (the switching chain of Milo et al. 2003, arXiv:cond-mat/0312028). A circuit in which no switch is
    possible (all edges of one node, say) stays as it is.
    """
    exists, found = graph.exists.numpy(), (graph.exists & kept).numpy().copy()
    edges = np.argwhere(found)
    for i, j in generator.integers(max(1, len(edges)), size=(SWAPS * len(edges), 2)).tolist():
        (u, v), (x, y) = edges[i].tolist(), edges[j].tolist()
        if exists[u, y] and exists[x, v] and not found[u, y] and not found[x, v]:
            found[u, v] = found[x, y] = False
            found[u, y] = found[x, v] = True
            edges[i, 1], edges[j, 1] = y, v
    return torch.from_numpy(found)
