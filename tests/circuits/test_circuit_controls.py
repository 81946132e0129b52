"""Random circuits have what they are said to share with the circuit, and nothing else."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from interp.causal import EdgeGraph
from interp.circuits.circuit_evaluation import degree_matched, heads_shuffled, random_circuit, switched
from interp.model.parts import Part
from tests.configs import CONFIGS

GRAPHS = [EdgeGraph.of(CONFIGS[name]) for name in ("gpt2", "llama-gqa", "parallel", "attention-only")]


def some_mask(graph: EdgeGraph, seed: int = 0, share: float = 0.3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(graph.exists.shape, generator=generator) < share) & graph.exists


def drawn_with(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("graph", GRAPHS)
def test_random_circuits_are_n_edges_and_reach_all(graph: EdgeGraph) -> None:
    drawn = torch.stack([random_circuit(graph, 20, drawn_with(seed)) for seed in range(120)])
    assert (drawn.sum((1, 2)) == 20).all() and not (drawn & ~graph.exists).any()
    assert torch.equal(drawn.any(0), graph.exists)
    assert torch.equal(random_circuit(graph, len(graph), drawn_with()), graph.exists)
    with pytest.raises(ValueError, match=f"0 to {len(graph)} edges are required"):
        random_circuit(graph, len(graph) + 1, drawn_with())


@pytest.mark.parametrize("graph", GRAPHS)
def test_switching_keeps_every_degree_and_moves_edges(graph: EdgeGraph) -> None:
    kept = some_mask(graph)
    moved = switched(graph, kept, drawn_with())
    assert torch.equal(moved.sum(0), kept.sum(0)) and torch.equal(moved.sum(1), kept.sum(1))
    assert not (moved & ~graph.exists).any() and int((moved & ~kept).sum()) > 5


def test_switching_reaches_every_circuit_of_these_degrees_equally_often() -> None:
    """Three edges, whose ends can be switched in every order."""
    graph = EdgeGraph.of(CONFIGS["gpt2"])
    kept = graph.chosen(["L0.resid->L0.mlp", "L0H0->L1.mlp", "L0H1->logits"])
    heads, ends = ("L0.resid", "L0H0", "L0H1"), ("L0.mlp", "L1.mlp", "logits")
    possible = {
        frozenset(f"{s}->{e}" for s, e in zip(heads, order, strict=True))
        for order in itertools.permutations(ends)
    }
    drawn = [frozenset(graph.names(switched(graph, kept, drawn_with(seed)))) for seed in range(600)]
    counts = {one: drawn.count(one) for one in set(drawn)}
    assert set(counts) == possible
    assert all(abs(count / 600 - 1 / len(possible)) < 0.07 for count in counts.values())


@pytest.mark.parametrize("graph", GRAPHS)
def test_matched_circuits_keep_the_degrees_of_every_layer(graph: EdgeGraph) -> None:
    kept = some_mask(graph)
    moved = degree_matched(graph, kept, drawn_with(3))
    out, into = (sorted_by_layer(graph, x) for x in (kept, moved))
    assert out == into and not (moved & ~graph.exists).any() and not torch.equal(moved, kept)


def sorted_by_layer(graph: EdgeGraph, kept: Tensor) -> list[list[int]]:
    """Degrees of the heads of each layer, out, and into queries, keys and values, sorted; of the others in order."""
    out, into = kept.sum(1).tolist(), kept.sum(0).tolist()
    found, h, g = [], graph.n_heads, graph.n_kv_heads
    for layer in range(graph.n_layers):
        first = graph.inputs(layer).start
        found += [sorted(out[graph.heads(layer)]), sorted(into[first : first + h])]
        found += [sorted(into[first + h : first + h + g]), sorted(into[first + h + g : first + h + 2 * g])]
        if graph.mlp:
            found.append([out[graph.mlp_sender(layer)], into[graph.mlp_receiver(layer)]])
    return [*found, [out[0], into[-1]]]


@pytest.mark.parametrize("graph", GRAPHS)
def test_shuffled_heads_stay_in_their_layer_and_with_their_group(graph: EdgeGraph) -> None:
    senders, receivers = heads_shuffled(graph, drawn_with(1))
    assert sorted(senders.tolist()) == list(range(len(graph.senders)))
    assert sorted(receivers.tolist()) == list(range(len(graph.receivers)))
    for old, new in enumerate(receivers.tolist()):
        assert Part.of(graph.receivers[old]).layer == Part.of(graph.receivers[new]).layer
        names = [graph.senders[senders[graph.senders.index(n)]] for n in graph.nodes_of(old) if n != "logits"]
        assert sorted(names) == sorted(n for n in graph.nodes_of(new) if n != "logits")
    assert (senders != torch.arange(len(senders))).any()
