"""Edges of attribution graphs sum to what they enter, equal loops and closed forms, and predict interventions."""

import copy
import functools
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor

from interp import Batch, Edit, HookedTransformer, Read
from interp.circuits import (
    AttributionGraph,
    attribution_graph,
    graph_interventions,
    prune_graph,
    qk_attribution,
    read_attribution_graph,
)
from interp.circuits.local_model import local_model, node_sites
from interp.edits import Scale, Set, Zero
from interp.features import AbsTopK, Dictionary, Gated, GroupMax, JumpReLU, MatchingPursuit, ReLU, TopK
from interp.model import MLP, ModelConfig, NoNorm, Weights, sites
from interp.model.edits import Detach
from interp.model.tap import Tap
from interp.pages import graph_page
from interp.passes import observe
from interp.passes.rules import LINEAR, under_rules
from tests.configs import CAUSAL, CONFIGS, build, perturbed
from tests.loops import over
from tests.tolerances import assert_close

PROMPT = [3, 1, 4, 1, 5, 9]
NEURONS = [name for name in CAUSAL if "blocks.0.mlp.hook_post" in sites.names(build(name).config)]
READS, WRITES, STREAM = "blocks.1.ln2.hook_normalized", "blocks.1.hook_mlp_out", "blocks.0.hook_resid_post"
S = 12


def model(name: str = "llama-gqa") -> HookedTransformer:
    return HookedTransformer(copy.deepcopy(build(name)))


def weights(d: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        "W_enc": normal(d, S) / d**0.5, "b_enc": normal(S), "W_dec": normal(S, d) / S**0.5, "b_dec": normal(d),
    }  # fmt: skip


@functools.cache
def with_features() -> HookedTransformer:
    """An SAE of the stream after block 0, and a transcoder with a skip of the MLP of block 1."""
    plain = model()
    d = plain.cfg.d_model
    skip = torch.randn(d, d, generator=torch.Generator().manual_seed(5), dtype=torch.float64) / d
    return plain.with_dictionaries(
        [
            Dictionary(ReLU(), weights(d, 1), reads=STREAM, apply_b_dec_to_input=True),
            Dictionary(
                TopK(5), {**weights(d, 2), "W_skip": skip}, reads=READS, writes=WRITES,
                apply_b_dec_to_input=False,
            ),
        ]
    )  # fmt: skip


def places(graph: xr.Dataset, end: str) -> np.ndarray:
    """The places of the sources or targets of all edges."""
    names = graph.node.values.tolist()
    return np.array([names.index(name) for name in graph[end].values])


def sums(graph: xr.Dataset) -> None:
    """Every target is the sum of its edges and biases."""
    known = graph.isel(node=graph["size"].values > 0)
    assert known.sizes["node"] > 1 and graph.attrs["completeness_error"] < 1e-12
    np.testing.assert_allclose(known.incoming + known.bias, known.activation, rtol=1e-10, atol=1e-12)
    inside = np.bincount(places(graph, "target"), graph.weight, graph.sizes["node"])
    np.testing.assert_allclose(
        (graph.others + inside)[graph["size"].values > 0], known.incoming, rtol=1e-10, atol=1e-12
    )


@over("name", NEURONS)
def test_edges_and_biases_sum_to_every_target_in_every_family(name: str) -> None:
    sums(attribution_graph(model(name), PROMPT, [2, 7], most=12))


@over("by", ["effect", "influence"])
def test_edges_between_features_errors_and_logits_sum(by: str) -> None:
    graph = attribution_graph(with_features(), PROMPT, 2, 7, by=by)  # type: ignore[arg-type]
    sums(graph)
    assert set(graph.kind.values) == {"embedding", "feature", "error", "logit"}
    assert abs(graph.attrs["covered"] - 1) < 1e-12


KINDS = [JumpReLU(), AbsTopK(4), GroupMax(3), Gated(), JumpReLU(relu=False), TopK(3, relu=False)]


@over("kind", KINDS)
def test_edges_into_features_of_every_linear_kind_sum(kind: object) -> None:
    plain, more = model(), {}
    generator = torch.Generator().manual_seed(4)
    if isinstance(kind, JumpReLU):
        more = {"threshold": torch.randn(S, generator=generator, dtype=torch.float64) / 4}
    if isinstance(kind, Gated):
        names = ("r_mag", "b_mag", "b_gate")
        more = {name: torch.randn(S, generator=generator, dtype=torch.float64) for name in names}
    given = weights(plain.cfg.d_model, 3) | more
    if isinstance(kind, Gated):
        del given["b_enc"]
    coder = Dictionary(kind, given, reads=STREAM, apply_b_dec_to_input=True)  # type: ignore[arg-type]
    sums(attribution_graph(plain.with_dictionaries([coder]), PROMPT, 2))


def test_an_edge_is_the_gradient_in_a_pass_of_its_own() -> None:
    """One edge after another, by cutting the gradient at all other nodes with edits."""
    subject = model("gpt2")
    graph = attribution_graph(subject, PROMPT, 2, 7, most=10)
    ruled, batch = under_rules(subject.transformer, LINEAR), subject.to_batch([PROMPT])
    names = [site.name for site in node_sites(subject.transformer, ["neuron"])]
    rng = np.random.default_rng(0)
    for number in rng.choice(graph.sizes["edge"], 12, replace=False):
        edge = graph.isel(edge=number)
        source, target = (graph.sel(node=str(edge[end].values)) for end in ("source", "target"))
        site = "hook_embed" if source.kind == "embedding" else f"blocks.{int(source.layer)}.mlp.hook_post"
        seen = {}
        into = f"blocks.{int(target.layer)}.mlp.hook_post" if target.kind == "neuron" else None
        if into is not None:
            seen[into] = Read(into, grad=True)
        read = Read(site, grad=True)
        tap = Tap(
            [read, *seen.values()], [Edit(name, Detach()) for name in names if name not in (site, into)]
        )
        with torch.enable_grad():
            stream = ruled(batch.tokens, tap, stop=ruled.config.n_layers)
            logits = ruled.uncapped(stream[0, -1])
        x = tap.live[read]
        y = (
            logits[2] - logits[7]
            if into is None
            else tap.live[seen[into]][0, int(target.pos), int(target["index"])]
        )
        (slope,) = torch.autograd.grad(y, x)
        term = (slope * x.detach())[0, int(source.pos)]
        expected = term.sum() if source.kind == "embedding" else term[int(source["index"])]
        assert_close(torch.tensor(float(edge.weight), dtype=torch.float64), expected.cpu())


def test_edges_of_a_relu_model_without_norms_are_products_along_paths() -> None:
    config = ModelConfig(
        n_layers=2, d_model=8, n_heads=2, n_ctx=16, d_vocab=13, mlp=MLP(20, act="relu"), norm=NoNorm()
    )
    subject = HookedTransformer(perturbed(config))
    graph = attribution_graph(subject, PROMPT, 2, most=1000, links=1000)
    reads = [Read(f"blocks.{layer}.mlp.hook_post") for layer in range(2)] + [
        Read("blocks.1.attn.hook_pattern")
    ]
    seen = observe(subject.transformer, subject.to_batch([PROMPT]), reads).trace
    first, second, pattern = (seen[read][0] for read in reads)
    own = Weights(subject.transformer).layer(1)
    w_out, w_in = Weights(subject.transformer).layer(0).W_out, own.W_in
    through_heads = torch.einsum("hdz, hze, hqk -> qkde", own.W_V, own.W_O, pattern)
    same = torch.eye(len(PROMPT), dtype=torch.float64)[..., None, None] * torch.eye(8, dtype=torch.float64)
    paths = torch.einsum("kn, nd, qkde, em -> knqm", first, w_out, through_heads + same, w_in) * (second > 0)
    checked = 0
    for number in range(graph.sizes["edge"]):
        edge = graph.isel(edge=number)
        source, target = (graph.sel(node=str(edge[end].values)) for end in ("source", "target"))
        if (source.layer, target.layer) == (0, 1):
            at = int(source.pos), int(source["index"]), int(target.pos), int(target["index"])
            assert_close(torch.tensor(float(edge.weight), dtype=torch.float64), paths[at])
            checked += 1
    assert checked > 50


def whole() -> xr.Dataset:
    return attribution_graph(with_features(), PROMPT, [2, 7, 9], links=10_000)


def test_what_leaves_a_node_is_its_effect() -> None:
    """All paths of a node begin with one of its edges; effects of tokens, errors and biases make up the logits."""
    graph = whole()
    leaving = np.bincount(places(graph, "source"), graph.value, graph.sizes["node"])
    inner = graph.kind.values != "logit"
    np.testing.assert_allclose(leaving[inner], graph.effect[inner], rtol=1e-9, atol=1e-12)


def test_an_effect_is_the_gradient_of_the_model_whose_mlps_are_lines() -> None:
    subject = model("gemma2")
    graph = attribution_graph(subject, PROMPT, 2, 7, most=8)
    ruled, batch = under_rules(subject.transformer, LINEAR), subject.to_batch([PROMPT])
    reads = {
        name: Read(name, grad=True)
        for name in map("blocks.{}.mlp.hook_post".format, range(subject.cfg.n_layers))
    }
    tap = Tap(list(reads.values()))
    with torch.enable_grad():
        logits = ruled.uncapped(ruled(batch.tokens, tap, stop=ruled.config.n_layers)[0, -1])
    live = [tap.live[read] for read in reads.values()]
    slopes = torch.autograd.grad(logits[2] - logits[7], live)
    for node in graph.node[graph.kind.values == "neuron"]:
        at = 0, int(node.pos), int(node["index"])
        expected = (slopes[int(node.layer)] * live[int(node.layer)].detach())[at]
        assert_close(torch.tensor(float(graph.effect.sel(node=node)), dtype=torch.float64), expected)


def dense(graph: xr.Dataset) -> np.ndarray:
    """A[t, s] = |edge| / sum of the sizes of edges into t."""
    a = np.zeros((graph.sizes["node"],) * 2)
    a[places(graph, "target"), places(graph, "source")] = np.abs(graph.weight.values)
    return a / np.maximum(a.sum(1, keepdims=True), 1e-30)


def influence(a: np.ndarray, p: np.ndarray) -> np.ndarray:
    found, step = np.zeros(len(p)), p
    while (step := step @ a).any():
        found = found + step
    return found


def test_influence_and_scores_are_those_of_the_dense_matrix() -> None:
    graph = whole()
    a, p, kind = dense(graph), graph.probability.values, graph.kind.values
    found = influence(a, p)
    np.testing.assert_allclose(graph.influence, found, rtol=1e-10, atol=1e-14)
    tokens, errors = (found[kind == name].sum() for name in ("embedding", "error"))
    weight = found + p
    complete = ((1 - a[:, kind == "error"].sum(1)) * weight).sum() / weight.sum()
    assert graph.attrs["replacement"] == pytest.approx(tokens / (tokens + errors), rel=1e-10)
    assert graph.attrs["completeness"] == pytest.approx(complete, rel=1e-10)
    assert 0 < graph.attrs["replacement"] < 1 and 0 < graph.attrs["completeness"] < 1


def most_of(score: np.ndarray, share: float) -> np.ndarray:
    order = np.argsort(-score)
    last = np.searchsorted(score[order].cumsum() / score.sum(), share)
    return score >= score[order[min(last, len(score) - 1)]]


@over("shares", [(0.8, 0.98), (0.4, 0.7), (1.0, 1.0)])
def test_pruning_is_that_of_the_dense_matrix(shares: tuple[float, float]) -> None:
    graph = whole()
    a, p, kind = dense(graph), graph.probability.values, graph.kind.values
    keep = most_of(influence(a, p), shares[0]) | np.isin(kind, ("embedding", "logit"))
    a = np.where(keep[:, None] & keep, a, 0.0)
    a = a / np.maximum(a.sum(1, keepdims=True), 1e-30)
    score = a * (influence(a, p) + p)[:, None]
    edges = (most_of(score.flatten(), shares[1]).reshape(score.shape)) & (score > 0)
    while True:
        alone = np.isin(kind, ("feature",)) & ~(edges.any(0) & edges.any(1)) | (kind == "error") & ~edges.any(
            0
        )
        if not (alone & keep).any():
            break
        keep = keep & ~alone
        edges &= keep[:, None] & keep
    small = prune_graph(graph, nodes=shares[0], edges=shares[1])
    assert list(small.node.values) == list(graph.node.values[keep])
    names = graph.node.values
    expected = {f"{names[s]} -> {names[t]}" for t, s in np.argwhere(edges)}
    assert set(small.edge.values) == expected
    sizes = [np.abs(g.effect.values[g.kind.values == "feature"]).sum() for g in (small, graph)]
    assert small.attrs["covered"] == pytest.approx(sizes[0] / sizes[1])


def test_a_doubled_feature_moves_a_later_one_by_its_edge() -> None:
    """Patterns, norm scales, other features and errors are held where they were."""
    subject, graph = with_features(), whole()
    network, batch = subject.transformer, subject.to_batch([PROMPT])
    held = [
        f"blocks.{layer}.{name}"
        for layer in range(subject.cfg.n_layers)
        for name in ("ln1.hook_scale", "attn.hook_pattern", "ln2.hook_scale")
    ]
    held += [f"blocks.{layer}.hook_{what}" for layer in range(2) for what in ("features", "error")]
    clean = observe(network, batch, [*map(Read, held), Read(READS)]).trace
    coder = network.dictionaries[1]
    checked = 0
    for number in range(graph.sizes["edge"]):
        edge = graph.isel(edge=number)
        source, target = (graph.sel(node=str(edge[end].values)) for end in ("source", "target"))
        if (str(source.kind.values), str(target.kind.values)) != ("feature", "feature") or checked == 8:
            continue
        values = {name: clean[name].clone() for name in held}
        values["blocks.0.hook_features"][0, int(source.pos), int(source["index"])] *= 2
        moved = observe(
            network, batch, [Read(READS)], [Edit(name, Set(x)) for name, x in values.items()]
        ).trace
        assert isinstance(coder, Dictionary)
        change = (coder.before(moved[READS]) - coder.before(clean[READS]))[
            0, int(target.pos), int(target["index"])
        ]
        assert_close(change, torch.tensor(float(edge.weight), dtype=torch.float64))
        checked += 1
    assert checked == 8


def test_without_an_answer_the_most_probable_tokens_are_explained() -> None:
    subject = model()
    graph = attribution_graph(subject, PROMPT, most=0)
    p = subject(torch.tensor([PROMPT]))[0, -1].softmax(-1)
    logits = graph.isel(node=graph.kind.values == "logit")
    assert logits["index"].values.tolist() == p.topk(logits.sizes["node"]).indices.tolist()
    assert_close(torch.tensor(logits.probability.values), p.topk(logits.sizes["node"]).values)
    assert logits.sizes["node"] == 10 or logits.probability.sum() >= 0.95 > logits.probability[:-1].sum()


def test_a_head_that_is_zeroed_leaves_exact_sums_and_added_values_are_refused() -> None:
    subject = model()
    graph = attribution_graph(subject, PROMPT, 2, most=6, edits=[Edit("L0H1", Zero())])
    sums(graph)
    with pytest.raises(ValueError, match="exact sums require edits that zero, scale or project"):
        attribution_graph(subject, PROMPT, 2, edits=[Edit("L0H1", Set(1.0))])


def test_padding_is_no_token() -> None:
    subject = model()
    keep = torch.tensor([[False, False, *[True] * len(PROMPT), False]])
    padded = Batch(torch.tensor([[7, 7, *PROMPT, 7]]), keep)
    plain = attribution_graph(subject, PROMPT, 2, most=5)
    xr.testing.assert_identical(attribution_graph(subject, padded, 2, most=5), plain)
    found = (graph_interventions(subject, prompt, plain) for prompt in (padded, PROMPT))
    xr.testing.assert_identical(*found)
    with pytest.raises(ValueError, match="a graph is of one prompt, got packed ones"):
        attribution_graph(subject, Batch.packed([[3, 1], [4, 1]], 4), 2)


def test_what_has_no_graph_is_refused_in_words() -> None:
    subject = model()
    for prompt, how, match in (
        ([PROMPT, PROMPT], {}, "a graph is of one prompt, got 2"),
        (PROMPT, {"wrong": 3}, "a wrong answer is contrasted with an answer"),
        (PROMPT, {"answer": [3, 4], "wrong": 5}, "one answer and one wrong answer are required, got 2 and 1"),
        (PROMPT, {"answer": [3, 3]}, "every answer is required once"),
        (PROMPT, {"nodes": "feature"}, "require a model with dictionaries"),
        (PROMPT, {"most": -1}, "most must be a whole number from 0"),
    ):
        with pytest.raises(ValueError, match=match):
            attribution_graph(subject, prompt, **how)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="causal model with logits"):
        attribution_graph(model("bidirectional"), PROMPT, 2)
    pursuit = {name: x for name, x in weights(subject.cfg.d_model, 1).items() if name in ("W_dec", "b_dec")}
    pursuit |= {"W_enc": pursuit["W_dec"].mT.clone()}
    odd = Dictionary(MatchingPursuit(), pursuit, reads=STREAM, apply_b_dec_to_input=True)
    with pytest.raises(ValueError, match="this one has matching pursuit"):
        attribution_graph(subject.with_dictionaries([odd]), PROMPT, 2)
    with pytest.raises(ValueError, match="must be a result of attribution_graph"):
        prune_graph(xr.Dataset({"value": ("edge", [1.0])}))


def test_terms_that_cancel_within_a_node_are_no_missed_sums() -> None:
    """A neuron that nearly cancels is rounded by what it is read from, and so is a small difference of large logits."""
    for name, seed in (("llama-gqa", 0), ("t5", 5), ("olmo2", 4)):
        subject = HookedTransformer(perturbed(CONFIGS[name], seed=seed))
        sums(attribution_graph(subject, [5], [2, 7], nodes="neuron", most=10_000))
    large = perturbed(CONFIGS["llama-gqa"])
    large.get_parameter("unembed.weight").add_(1e5)
    graph = attribution_graph(HookedTransformer(large), PROMPT, 2, 7, most=4)
    assert graph.attrs["completeness_error"] < 1e-13


def test_a_difference_of_logits_that_is_0_has_the_values_of_its_edges() -> None:
    """The token writes one direction and a neuron another, each worth one logit: +1 and -1 pass along."""
    config = ModelConfig(
        n_layers=1,
        d_model=2,
        n_heads=1,
        n_ctx=4,
        d_vocab=3,
        mlp=MLP(1, act="relu", bias=False),
        norm=NoNorm(),
    )
    planted = perturbed(config)
    for parameter in planted.parameters():
        parameter.zero_()
    for name, at in (
        ("embed.weight", (1, 0)), ("blocks.0.mlp.into.weight", (0, 0)), ("blocks.0.mlp.out.weight", (1, 0)),
        ("unembed.weight", (1, 0)), ("unembed.weight", (2, 1)),
    ):  # fmt: skip
        planted.get_parameter(name)[at] = 1.0
    graph = attribution_graph(HookedTransformer(planted), [1], 1, 2)
    assert float(graph.activation.sel(node="logit '<1>' - '<2>'")) == 0
    by_source = dict(zip(graph.source.values.tolist(), graph.value.values.tolist(), strict=True))
    assert by_source == {"embed@0": 1.0, "L0N0@0": -1.0} or by_source == {"embed@0": -1.0, "L0N0@0": -1.0}


def test_answers_without_any_probability_count_alike() -> None:
    peaked = perturbed(CONFIGS["llama-gqa"])
    peaked.get_parameter("unembed.weight").mul_(1e4)
    subject = HookedTransformer(peaked)
    graph, each = (attribution_graph(subject, PROMPT, answer, most=2000) for answer in ([2, 7], 2))
    assert not graph.probability.any() and np.isfinite(graph.value).all()
    other = attribution_graph(subject, PROMPT, 7, most=2000)
    tokens = [f"embed@{i}" for i in range(len(PROMPT))]
    mean = (each.effect + other.effect).sel(node=tokens) / 2
    np.testing.assert_allclose(graph.effect.sel(node=tokens), mean, rtol=1e-9)


@over("change", [Scale(2.0), Scale(-0.5), Zero()])
@over("where", ["L0F3", "blocks.0.hook_features", "L1.error", "L1F3"])
def test_features_that_are_scaled_have_their_constants_scaled(where: str, change: Scale | Zero) -> None:
    edits = [Edit(where, change)]
    graph = attribution_graph(with_features(), PROMPT, 2, 7, edits=edits)
    sums(graph)
    found = graph_interventions(with_features(), PROMPT, graph, edits=edits, factor=1.0)
    assert not found.predicted.any()
    qk_attribution(with_features(), PROMPT, "L0H1", key=2, edits=edits)
    with pytest.raises(ValueError, match="edits of features and errors require them as nodes"):
        attribution_graph(with_features(), PROMPT, 2, nodes="neuron", edits=edits)


def test_sites_that_are_zeroed_are_nodes_without_edges() -> None:
    """Nothing depends on what such a site held; it was an error of PyTorch."""
    for site, nodes in (("blocks.1.mlp.hook_post", "neuron"), ("blocks.1.attn.hook_z", "head")):
        graph = attribution_graph(model(), PROMPT, 2, nodes=nodes, edits=[Edit(site, Zero())])  # type: ignore[arg-type]
        assert graph.attrs["completeness_error"] < 1e-12 and not graph.effect.sel(node=graph.layer == 1).any()
    gone = attribution_graph(model(), PROMPT, 2, edits=[Edit("blocks.1.hook_resid_post", Zero())])
    assert not gone.effect.any() and not gone.sizes["edge"]


def test_nodes_of_most_influence_do_not_depend_on_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = attribution_graph(model(), PROMPT, 2, by="influence", most=80)
    monkeypatch.setattr(sys.modules[attribution_graph.__module__], "at_once", lambda local: 1)
    found = attribution_graph(model(), PROMPT, 2, by="influence", most=80)
    assert found.node.values.tolist() == plain.node.values.tolist()
    np.testing.assert_allclose(found.weight, plain.weight, rtol=1e-9, atol=1e-12)


@over("given", [prune_graph, AttributionGraph.of_result])
def test_damaged_graphs_are_refused_in_words(given: Callable[[xr.Dataset], object]) -> None:
    graph = attribution_graph(model(), PROMPT, 2, most=5)
    for damaged, match in (
        (
            graph.assign(weight=graph.weight.where(graph.weight != graph.weight[3])),
            "must have .* finite numbers",
        ),
        (graph.assign(effect=graph.effect * np.nan), "must have .* finite numbers"),
        (graph.isel(node=[*range(graph.sizes["node"]), 0]), "with node embed@0 twice"),
        (graph.isel(node=slice(1, None)), "edges must join nodes of the graph .*'embed@0 -> "),
    ):
        with pytest.raises(ValueError, match=match):
            given(damaged)


def test_a_missed_sum_is_an_error() -> None:
    subject = model()
    local = local_model(
        subject.transformer, subject.to_batch([PROMPT]), node_sites(subject.transformer, ["neuron"])
    )
    found = local.into_logits(local.logits[:2])
    found.checked(torch.float64)
    with pytest.raises(ArithmeticError, match="edges and biases should sum to"):
        replace(found, bias=found.bias + 1e-3).checked(torch.float64)


def test_a_graph_is_written_as_neuronpedia_reads_it(tmp_path: Path) -> None:
    graph = prune_graph(whole())
    made = AttributionGraph.of_result(graph, "features")
    carried = AttributionGraph.of_result(graph, by="value")
    assert made.links.weight.tolist() == graph.weight.values.tolist()
    assert carried.links.weight.tolist() == graph.value.values.tolist()
    assert "in logits" in graph_page(carried) and "in logits" not in graph_page(made)
    made.write(tmp_path / "graph.json")
    read = read_attribution_graph(tmp_path / "graph.json")
    assert read.description == made.description
    assert read.nodes == made.nodes and read.links.equals(made.links) and read.tokens == made.tokens
    assert len({node.name for node in read.nodes}) == graph.sizes["node"]
    record = json.loads((tmp_path / "graph.json").read_text())
    by_kind = {node["feature_type"]: node for node in record["nodes"]}
    feature, error = by_kind["cross layer transcoder"], by_kind["mlp reconstruction error"]
    layer, index, pos = map(int, feature["node_id"].split("_"))
    assert (
        feature["feature"] == (layer + index) * (layer + index + 1) / 2 + index and feature["ctx_idx"] == pos
    )
    assert error["feature"] == -1 and "_error_" in error["node_id"]
    assert record["metadata"]["prompt_tokens"] == [f"<{i}>" for i in PROMPT]
    logits = [node for node in record["nodes"] if node["feature_type"] == "logit"]
    p = graph.probability.values[graph.kind.values == "logit"]
    assert [node["token_prob"] for node in logits] == [round(float(x), 3) for x in p]
    assert [node["is_target_logit"] for node in logits] == [True, *[False] * (len(logits) - 1)]
    most, least = graph.influence.argmax().item(), graph.influence.argmin().item()
    total = float(graph.influence.sum())
    assert record["nodes"][most]["influence"] == pytest.approx(float(graph.influence[most]) / total)
    assert record["nodes"][least]["influence"] == pytest.approx(1.0)
    assert '<td class="left">' in graph_page(read)
    with pytest.raises(ValueError, match="must be a result of attribution_graph"):
        AttributionGraph.of_result(xr.Dataset())


def test_logits_that_read_alike_have_names_of_their_own() -> None:
    subject = HookedTransformer.from_pretrained("demo-attn-2l")
    pieces = subject.text.pieces(range(subject.cfg.d_vocab))
    alike = [i for i, piece in enumerate(pieces) if piece == "\ufffd"][:2]
    other = next(i for i, piece in enumerate(pieces) if pieces.count(piece) == 1)
    graph = attribution_graph(subject, "one two", [*alike, other], most=3)
    names = graph.node[graph.kind.values == "logit"].values.tolist()
    assert names == [f"logit '\ufffd' {i}" for i in alike] + [f"logit {pieces[other]!r}"]
    assert len({*graph.edge.values}) == graph.sizes["edge"]
