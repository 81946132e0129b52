"""Attribution graphs of cross-layer transcoders: a feature's edges go through what it writes to every later layer."""

import numpy as np
import torch

from interp import HookedTransformer, Read
from interp.circuits import attribution_graph, edge_heads, graph_interventions, graph_scores
from interp.model import MLP, ModelConfig, NoNorm, Weights
from interp.passes import observe
from tests.circuits.test_attribution_graph import PROMPT, places, sums
from tests.configs import perturbed
from tests.features.test_cross_layer_sites import MODELS, Weights as Transcoder, pair
from tests.loops import over
from tests.tolerances import assert_close

P, N = len(PROMPT), 3


@over("name", MODELS)
def test_edges_between_features_errors_and_logits_sum_in_every_family(name: str) -> None:
    for layers, skip in (((0, 1, 2), True), ((0, 2), False)):
        _, subject, _ = pair(name, layers=layers, skip=skip)
        graph = attribution_graph(subject, PROMPT, 2, 7, most=2000, links=2000)
        sums(graph)
        leaving = np.bincount(places(graph, "source"), graph.value, graph.sizes["node"])
        inner = graph.kind.values != "logit"
        np.testing.assert_allclose(leaving[inner], graph.effect[inner], rtol=1e-9, atol=1e-11)
        split = edge_heads(subject, PROMPT, graph, most=50)
        expected = graph.weight.sel(edge=split.edge)
        np.testing.assert_allclose(split.value.sum("part") + split.direct, expected, rtol=1e-9, atol=1e-11)


def test_edges_are_products_along_all_layers_that_a_feature_writes_to() -> None:
    config = ModelConfig(
        n_layers=N, d_model=8, n_heads=2, n_ctx=16, d_vocab=13, mlp=MLP(10, act="relu"), norm=NoNorm()
    )
    plain = HookedTransformer(perturbed(config))
    weights = Transcoder(8, range(N), reads="hook_resid_mid")
    subject = plain.with_dictionaries([weights.transcoder()])
    graph = attribution_graph(subject, PROMPT, 2, most=2000, links=2000)
    reads = [Read(f"blocks.{i}.{site}") for i in range(N) for site in ("hook_features", "attn.hook_pattern")]
    trace = observe(subject, subject.to_batch([PROMPT]), reads).trace
    features, pattern = ([trace[read][0] for read in reads[i::2]] for i in range(2))
    same = torch.einsum(
        "qk, de -> qkde", torch.eye(P, dtype=torch.float64), torch.eye(8, dtype=torch.float64)
    )
    moved = {}
    for layer in (1, 2):
        own = Weights(subject.transformer).layer(layer)
        moved[layer] = same + torch.einsum("hqk, hde, hef -> qkdf", pattern[layer], own.W_V, own.W_O)
    source = features[0][:, :, None]  # at each position
    first = torch.einsum("ksd, mkde, qmef -> ksqf", source * weights.into(0, 0), moved[1], moved[2])
    second = torch.einsum("ksd, qkdf -> ksqf", source * weights.into(0, 1), moved[2])
    into = weights.W_enc[2][None] * (features[2] > 0)[:, None]  # [q d s]
    expected = torch.einsum("ksqf, qft -> ksqt", first + second, into)
    checked = 0
    for number in np.flatnonzero([
        str(s).startswith("L0F") and str(t).startswith("L2F")
        for s, t in zip(graph.source.values, graph.target.values, strict=True)
    ]):  # fmt: skip
        edge = graph.isel(edge=number)
        one, other = (graph.sel(node=str(edge[end].values)) for end in ("source", "target"))
        at = int(one.pos), int(one["index"]), int(other.pos), int(other["index"])
        assert_close(torch.tensor(float(edge.weight), dtype=torch.float64), expected[at])
        checked += 1
    assert checked > 100


def test_a_feature_that_is_taken_out_takes_all_that_it_wrote() -> None:
    """In the last layer and with patterns held nothing but the final norm answers it."""
    _, subject, _ = pair("llama-gqa")
    graph = attribution_graph(subject, PROMPT, 2, 7, most=2000)
    found = graph_interventions(subject, PROMPT, graph, nodes=[
        str(n) for n in graph.node.values if str(n).startswith("L2F")
    ])  # fmt: skip
    assert found.attrs["held_rank_correlation"] > 0.9 and found.attrs["held_same_sign"] > 0.8
    scores = graph_scores(subject, [PROMPT, PROMPT[:4]], most=50)
    assert ((scores.value > 0) & (scores.value < 1)).all()
