"""The record of a circuit keeps what it is given, and pruning keeps exactly the edges on a path."""

import itertools
import json
from dataclasses import asdict, replace
from pathlib import Path

import networkx as nx  # type: ignore[import-untyped]
import pytest
import torch
from torch import Tensor

from interp import HookedTransformer
from interp.causal import EdgeGraph
from interp.circuits import Circuit, CircuitProtocol, interchange
from interp.circuits.edge_circuit import connected
from interp.passes.metrics import logit_difference
from tests.configs import CONFIGS, build, some_tokens
from tests.tolerances import assert_close

GRAPH = EdgeGraph.of(CONFIGS["gpt2"])
GROUPED = EdgeGraph.of(CONFIGS["llama-gqa"])
HOW = CircuitProtocol("logit difference", "logits", "eap", "top_n", "resample", 8, seed=3)


def some_mask(graph: EdgeGraph, seed: int, share: float) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(graph.exists.shape, generator=generator) < share) & graph.exists


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
    lost, several = 0, list(itertools.product(range(5), (0.02, 0.05, 0.1)))
    together = connected(graph, torch.stack([some_mask(graph, *which) for which in several]))
    for (seed, share), also in zip(several, together, strict=True):
        kept = some_mask(graph, seed, share)
        left = connected(graph, kept)
        assert torch.equal(left, also)
        assert set(graph.names(left)) == on_a_path(graph, kept)
        lost += int(kept.sum() - left.sum())
    assert lost > 0
    assert torch.equal(connected(graph, graph.exists), graph.exists)


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "parallel"])
def test_pruning_changes_no_number_of_a_resampled_circuit(name: str) -> None:
    model, clean, corrupt = HookedTransformer(build(name)), some_tokens(2, 6), some_tokens(2, 6, seed=1)
    graph = EdgeGraph.of(model.cfg)
    masks = [some_mask(graph, seed, 0.08) for seed in range(4)]
    pruned = [connected(graph, kept) for kept in masks]
    assert any(not torch.equal(a, b) for a, b in zip(masks, pruned, strict=True))
    found, expected = (
        interchange(model, clean, corrupt, torch.stack(some), metric=logit_difference(3, 4))["each"].values
        for some in (pruned, masks)
    )
    assert_close(torch.from_numpy(found), torch.from_numpy(expected))


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


def test_older_spellings_name_the_same_edges() -> None:
    older = Circuit(
        GRAPH, {"a1.h2->logits": 2.0, "input->a0.h1<v>": -1.0, "a0.h1->a1.h2<k>": 0.5, "input->m1": 0.1}
    )
    assert older.edges == ("L0.resid->L0H1.v", "L0.resid->L1.mlp", "L0H1->L1H2.k", "L1H2->logits")
    assert older.scores["L0H1->L1H2.k"] == 0.5
    with pytest.raises(ValueError, match=r"L0.resid->L0.mlp comes twice, as .*input->m0"):
        Circuit(GRAPH, {"L0.resid->L0.mlp": 1.0, "input->m0": 2.0})


def test_files_of_the_first_edition_are_read(tmp_path: Path) -> None:
    """Its names are old, and its scores were changes by the corrupted value."""
    held = {
        "format": 1, "model": "small", "task": "nothing", "graph": asdict(GROUPED),
        "protocol": {
            "metric": "logit difference", "unit": "logits", "method": "eap", "search": "top_n",
            "replacement": "resample", "n": 8, "seed": 3,
        },
        "edges": {"input->m0": -1.0, "a0.h1->a1.g1<k>": 0.5, "a1.h3->logits": 2.0},
    }  # fmt: skip
    path = tmp_path / "old.json"
    path.write_text(json.dumps(held))
    found = Circuit.load(path)
    assert dict(found.scores) == {"L0.resid->L0.mlp": -1.0, "L0H1->L1G1.k": 0.5, "L1H3->logits": 2.0}
    assert found.protocol == replace(HOW, direction="noise") and found.graph == GROUPED
    found.save(path)
    written = json.loads(path.read_text())
    assert written["format"] == 3 and list(written["edges"]) == list(found.edges)
    assert Circuit.load(path) == found
    path.write_text(json.dumps(held | {"protocol": None}))
    assert Circuit.load(path).protocol is None


def test_files_of_something_else_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    Circuit(GRAPH, {"L0.resid->L0.mlp": 1.0}).save(path)
    held = json.loads(path.read_text())
    for other in (held | {"format": 4}, held | {"more": 1}):
        path.write_text(json.dumps(other))
        with pytest.raises(ValueError, match=r"a circuit of format 3 .* is required"):
            Circuit.load(path)
    path.write_text(json.dumps(held | {"edges": {"L0.mlp->L0.resid": 1.0}}))
    with pytest.raises(KeyError, match=r"no receiver 'L0\.resid'"):
        Circuit.load(path)


def test_what_is_no_edge_or_no_number_is_refused() -> None:
    with pytest.raises(KeyError, match="leads forwards"):
        Circuit(GRAPH, {"L1.mlp->L0.mlp": 1.0})
    with pytest.raises(
        ValueError, match=r"finite number is required for every edge, L0\.resid->L0\.mlp has none"
    ):
        Circuit(GRAPH, {"L0.resid->L0.mlp": float("nan")})
