"""The edge graph has exactly the edges of the definition, under the names everybody uses."""

from dataclasses import replace

import pytest
import torch

from interp.causal import EdgeGraph
from interp.causal.graph import in_pass_order
from interp.model.config import MLP, ModelConfig
from interp.model.parts import Edge
from tests.causal.slow_edges import edges
from tests.configs import CONFIGS
from tests.loops import over

SUMS = [name for name, config in CONFIGS.items() if not config.norms_sum]


def test_gpt2_small_has_32491_edges() -> None:
    config = ModelConfig(12, 768, 12, 1024, 50257, mlp=MLP(3072))
    graph = EdgeGraph.of(config)
    assert len(graph) == int(graph.exists.sum()) == 32491
    assert (len(graph.senders), len(graph.receivers)) == (157, 445)


@over("name", SUMS)
def test_the_edges_are_those_of_the_definition(name: str) -> None:
    config = replace(CONFIGS[name], n_layers=3)
    graph = EdgeGraph.of(config)
    assert sorted(graph.names()) == sorted(edges(config))
    assert len(set(graph.names())) == len(graph)
    at = [graph.index(edge) for edge in graph.names()]
    assert at == [tuple(place) for place in graph.exists.nonzero().tolist()]


def test_shared_keys_and_values_are_one_input_per_group() -> None:
    graph = EdgeGraph.of(CONFIGS["llama-gqa"])
    found = {graph.receivers[i]: graph.nodes_of(i) for i in range(len(graph.receivers))}
    assert found["L1G1.k"] == found["L1G1.v"] == ("L1H2", "L1H3")
    assert found["L0H3.q"] == ("L0H3",) and found["L1.mlp"] == ("L1.mlp",) and found["logits"] == ("logits",)
    plain = EdgeGraph.of(CONFIGS["gpt2"])
    assert plain.nodes_of(plain.receivers.index("L1H3.v")) == ("L1H3",)


def test_a_mask_is_made_of_names_and_names_of_a_mask() -> None:
    graph = EdgeGraph.of(CONFIGS["gpt2"])
    some = ["L0.resid->L0.mlp", "L0H1->L1H2.q", "L1.mlp->logits"]
    mask = graph.chosen(some)
    assert int(mask.sum()) == 3 and list(graph.names(mask)) == some
    assert list(graph.names(torch.ones_like(mask))) == list(graph.names()), "only edges that exist have names"


def test_edges_are_read_in_the_spellings_of_the_first_edition() -> None:
    graph = EdgeGraph.of(CONFIGS["llama-gqa"])
    older = ["input->m0", "a0.h1->a1.h2<q>", "m0->a1.g1<k>"]
    assert list(graph.names(graph.chosen(older))) == ["L0.resid->L0.mlp", "L0H1->L1H2.q", "L0.mlp->L1G1.k"]


def test_parts_of_a_layer_are_where_the_names_say() -> None:
    graph = EdgeGraph.of(CONFIGS["mqa"])
    assert graph.senders[graph.heads(1)] == ("L1H0", "L1H1", "L1H2", "L1H3")
    assert graph.senders[graph.mlp_sender(1)] == graph.receivers[graph.mlp_receiver(1)] == "L1.mlp"
    assert graph.receivers[graph.inputs(1)][-2:] == ("L1G0.k", "L1G0.v")


def test_an_mlp_before_attention_is_a_node_of_its_own() -> None:
    config = CONFIGS["macaron"]
    graph = EdgeGraph.of(config)
    h, g, layers = config.n_heads, config.kv_heads, range(config.n_layers)
    assert graph.senders[:2] == ("L0.resid", "L0.mlp_before")
    for layer in layers:
        before = 1 + (h + 2) * layer
        assert graph.senders[graph.mlp_sender(layer, "mlp_before")] == f"L{layer}.mlp_before"
        assert graph.receivers[graph.mlp_receiver(layer, "mlp_before")] == f"L{layer}.mlp_before"
        assert graph.senders[graph.heads(layer)] == tuple(f"L{layer}H{i}" for i in range(h))
        assert graph.receivers[graph.inputs(layer)][0] == f"L{layer}H0.q"
        assert int(graph.visible[graph.mlp_receiver(layer, "mlp_before")]) == before
    by_layer = sum(
        (1 + (h + 2) * i) + (h + 2 * g) * (2 + (h + 2) * i) + (2 + (h + 2) * i + h) for i in layers
    )
    assert len(graph) == by_layer + 1 + (h + 2) * len(layers)
    edge = "L0.mlp_before->L1.mlp_before"
    assert graph.name(*graph.index("L0.mlp_before->b1")) == str(Edge.of("b0->b1")) == edge
    assert Edge.of(edge).receiver.site == "blocks.1.hook_mlp_before_in"
    with pytest.raises(KeyError, match="no edge"):
        graph.index("L0.mlp->L0.mlp_before")
    assert in_pass_order(reversed(graph.senders)) == list(graph.senders)
    assert in_pass_order(reversed(graph.receivers)) == list(graph.receivers)


def test_edges_that_do_not_exist_are_refused() -> None:
    graph = EdgeGraph.of(CONFIGS["gpt2"])
    for edge in ("L1H2->L0.mlp", "L0H1->L0H2.q", "L1.mlp", "logits->L1.mlp"):
        with pytest.raises(KeyError, match=r"no (edge|sender)"):
            graph.index(edge)
    with pytest.raises(KeyError, match=r"no receiver 'L1H2'.*nearest: L1H2"):
        graph.index("L0H1->L1H2")
    with pytest.raises(IndexError, match="receiver must be in"):
        graph.name(0, len(graph.receivers))


def test_edges_are_found_in_every_spelling() -> None:
    graph, grouped = EdgeGraph.of(CONFIGS["gpt2"]), EdgeGraph.of(CONFIGS["llama-gqa"])
    for older, edge in (
        ("input->m0", "L0.resid->L0.mlp"), ("a0.h1->a1.h2<k>", "L0H1->L1H2.k"), ("m0->logits", "L0.mlp->logits"),
    ):  # fmt: skip
        place = graph.index(edge)
        assert graph.index(older) == graph.index(Edge.of(older)) == graph.index(Edge.of(edge)) == place
        assert graph.name(*place) == edge
    assert grouped.name(*grouped.index("m0->a1.g1<v>")) == "L0.mlp->L1G1.v"


@pytest.mark.parametrize(
    ("change", "what"),
    [({"norm_place": "post"}, "norms the sum itself"), ({"cross_attention": True}, "memory of an encoder")],
)
def test_streams_that_are_no_sums_are_refused_by_name(change: dict[str, object], what: str) -> None:
    with pytest.raises(ValueError, match=f"residual stream that is a sum.*{what}"):
        EdgeGraph.of(replace(CONFIGS["gpt2"], **change))  # type: ignore[arg-type]
