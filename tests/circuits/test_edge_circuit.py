"""The record of a circuit keeps what it is given, and pruning keeps exactly the edges on a path."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import networkx as nx  # type: ignore[import-untyped]
import pytest
import torch
from torch import Tensor

from interp import HookedTransformer
from interp.causal.graph import EdgeGraph
from interp.circuits.edge_circuit import Circuit, CircuitProtocol, connected
from interp.circuits.interchange import Interchange
from interp.passes.metrics import logit_difference
from tests.configs import CONFIGS, build, some_tokens
from tests.tolerances import assert_close

GRAPH = EdgeGraph.of(CONFIGS["gpt2"])
GROUPED = EdgeGraph.of(CONFIGS["llama-gqa"])
HOW = CircuitProtocol("logit difference", "logits", "eap", "top_n", "resample", 8, seed=3)


def some_mask(graph: EdgeGraph, seed: int, share: float) -> Tensor:
    dice = torch.Generator().manual_seed(seed)
    return (torch.rand(graph.exists.shape, generator=dice) < share) & graph.exists


def on_a_path(graph: EdgeGraph, kept: Tensor) -> set[str]:
    """The edges on a path, by a graph library: an edge into shared keys leads to every head that shares them."""
    drawn = nx.DiGraph()
    for edge in graph.names(kept):
        s, r = graph.index(edge)
        drawn.add_edges_from((graph.senders[s], node) for node in graph.nodes_of(r))
    drawn.add_nodes_from(["L0.resid", "logits"])
    alive = (nx.descendants(drawn, "L0.resid") | {"L0.resid"}) & (nx.ancestors(drawn, "logits") | {"logits"})
    found = set()
    for edge in graph.names(kept):
        s, r = graph.index(edge)
        if graph.senders[s] in alive and alive & set(graph.nodes_of(r)):
            found.add(edge)
    return found


@pytest.mark.parametrize("graph", [GRAPH, GROUPED, EdgeGraph.of(CONFIGS["parallel"])])
def test_pruning_keeps_the_edges_on_a_path_from_the_input_to_the_logits(graph: EdgeGraph) -> None:
    lost = 0
    for seed, share in itertools.product(range(5), (0.02, 0.05, 0.1)):
        kept = some_mask(graph, seed, share)
        left = connected(graph, kept)
        assert set(graph.names(left)) == on_a_path(graph, kept)
        lost += int(kept.sum() - left.sum())
    assert lost > 0
    assert torch.equal(connected(graph, graph.exists), graph.exists)


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "parallel"])
def test_pruning_changes_no_number_of_a_resampled_circuit(name: str) -> None:
    model, clean, corrupt = HookedTransformer(build(name)), some_tokens(2, 6), some_tokens(2, 6, seed=1)
    task = Interchange.of(model, clean, corrupt, metric=logit_difference(3, 4))
    masks = [some_mask(task.graph, seed, 0.08) for seed in range(4)]
    pruned = [connected(task.graph, kept) for kept in masks]
    assert any(not torch.equal(a, b) for a, b in zip(masks, pruned, strict=True))
    assert_close(task.run(torch.stack(pruned)), task.run(torch.stack(masks)))


def test_a_circuit_knows_its_edges_nodes_share_and_mask() -> None:
    scores = {"L1H2->logits": 2.0, "L0.resid->L0H1.v": -1.0, "L0H1->L1H2.k": 0.5, "L0.resid->L1.mlp": 0.1}
    circuit = Circuit(GRAPH, scores)
    assert circuit.edges == ("L0.resid->L0H1.v", "L0.resid->L1.mlp", "L0H1->L1H2.k", "L1H2->logits")
    assert circuit.scores == scores and circuit.share == 4 / len(GRAPH)
    assert circuit.nodes == ("L0.resid", "L0H1", "L1H2", "L1.mlp", "logits")
    assert set(GRAPH.names(circuit.mask())) == set(scores)
    assert circuit.pruned().nodes == ("L0.resid", "L0H1", "L1H2", "logits")
    mask = circuit.mask()
    mask[:] = False
    assert circuit.mask().sum() == 4, "nobody can change a circuit"


def test_a_head_that_only_shares_keys_is_no_node() -> None:
    circuit = Circuit(GROUPED, {"L0.resid->L1G1.k": 1.0, "L1H3->logits": 1.0, "L0.resid->L1H3.q": 1.0})
    assert circuit.nodes == ("L0.resid", "L1H3", "logits") and circuit.pruned() == circuit


@pytest.mark.parametrize("graph", [GRAPH, GROUPED])
def test_a_circuit_survives_its_file(graph: EdgeGraph, tmp_path: Path) -> None:
    kept = some_mask(graph, 0, 0.2)
    scores = torch.randn(graph.exists.shape, dtype=torch.float64)
    circuit = Circuit.of(graph, kept, scores, model="small", task="nothing", protocol=HOW)
    circuit.save(tmp_path / "c.json")
    again = Circuit.load(tmp_path / "c.json")
    assert again == circuit and torch.equal(again.mask(), kept)
    assert [again.scores[e] for e in graph.names(kept)] == scores[kept].tolist()
    bare = replace(circuit, protocol=None)
    bare.save(tmp_path / "bare.json")
    assert Circuit.load(tmp_path / "bare.json") == bare


def test_files_of_something_else_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    Circuit(GRAPH, {"L0.resid->L0.mlp": 1.0}).save(path)
    held = json.loads(path.read_text())
    for other in (held | {"format": 2}, held | {"more": 1}, [1]):
        path.write_text(json.dumps(other))
        with pytest.raises(ValueError, match=r"a circuit of format 1 .* is required"):
            Circuit.load(path)
    path.write_text(json.dumps(held | {"edges": {"L0.mlp->input": 1.0}}))
    with pytest.raises(KeyError, match="no receiver 'input'"):
        Circuit.load(path)


def test_what_is_no_edge_or_no_number_is_refused() -> None:
    with pytest.raises(KeyError, match="leads forwards"):
        Circuit(GRAPH, {"L1.mlp->L0.mlp": 1.0})
    with pytest.raises(ValueError, match="finite number is required for every edge, L0.resid->m0 has none"):
        Circuit(GRAPH, {"L0.resid->L0.mlp": float("nan")})
