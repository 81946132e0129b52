"""Heads as nodes of attribution graphs, edges split by head, and attention scores split by pairs of nodes."""

import functools
import re

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor

from interp import Edit, HookedTransformer, Read
from interp.circuits import attribution_graph, edge_heads, graph_interventions, prune_graph, qk_attribution
from interp.edits import Zero
from interp.model import MLP, ModelConfig, MoE, NoNorm, Weights
from interp.model.tap import Tap
from interp.passes import observe
from interp.passes.rules import LINEAR, under_rules
from interp.zoo import planted
from interp.zoo.groundtruth import INDUCTION, PREVIOUS
from tests.circuits.test_attribution_graph import NEURONS, PROMPT, model, places, with_features
from tests.configs import CAUSAL, build, perturbed
from tests.loops import over
from tests.tolerances import assert_close

VECTORS = ("head", "mlp", "resid")
P = len(PROMPT)


@functools.cache
def relu() -> HookedTransformer:
    """Three layers of ReLU without norms: every path is a product of matrices."""
    config = ModelConfig(
        n_layers=3, d_model=8, n_heads=2, n_ctx=16, d_vocab=13, mlp=MLP(10, act="relu"), norm=NoNorm()
    )
    return HookedTransformer(perturbed(config))


def seen(subject: HookedTransformer, *sites: str) -> list[Tensor]:
    """What sites hold, by block: [l p ...]."""
    layers = range(subject.cfg.n_layers)
    reads = {site: [Read(f"blocks.{layer}.{site}") for layer in layers] for site in sites}
    trace = observe(
        subject.transformer, subject.to_batch([PROMPT]), [read for each in reads.values() for read in each]
    ).trace
    return [torch.stack([trace[read][0] for read in reads[site]]) for site in sites]


def vectors_sum(graph: xr.Dataset) -> None:
    """What enters a node that is a vector makes up its effect."""
    assert graph.attrs["completeness_error"] < 1e-12
    for kind in ("head", "expert", "mlp", "resid"):
        known = graph.isel(node=(graph["size"].values > 0) & (graph.kind.values == kind))
        np.testing.assert_allclose(known.incoming + known.bias, known.effect, rtol=1e-9, atol=1e-11)


@over("name", NEURONS)
def test_what_enters_heads_mlps_and_the_stream_is_their_effect(name: str) -> None:
    for nodes in (("head", "neuron"), ("mlp", "resid")):
        graph = attribution_graph(model(name), PROMPT, [2, 7], most=12, nodes=nodes)  # type: ignore[arg-type]
        assert set(graph.kind.values) - {"embedding", "logit"} <= {*nodes}
        vectors_sum(graph)


@over("name", [name for name in CAUSAL if name not in NEURONS])
def test_heads_are_nodes_of_models_without_neurons(name: str) -> None:
    nodes = None if "attention-only" in name else "head"
    graph = attribution_graph(model(name), PROMPT, 2, 7, most=12, nodes=nodes)  # type: ignore[arg-type]
    assert "head" in graph.kind.values
    vectors_sum(graph)


MIXTURES = [name for name in CAUSAL if isinstance(build(name).config.mlp, MoE)]


@over("name", MIXTURES)
def test_experts_are_nodes_with_exact_sums(name: str) -> None:
    graph = attribution_graph(model(name), PROMPT, [2, 7], nodes=["expert", "resid"], most=500, links=500)
    assert {"expert", "resid"} <= {*graph.kind.values}
    vectors_sum(graph)
    leaving = np.bincount(places(graph, "source"), graph.value, graph.sizes["node"])
    inner = graph.kind.values != "logit"
    np.testing.assert_allclose(leaving[inner], graph.effect[inner], rtol=1e-9, atol=1e-12)


@over("name", [name for name in MIXTURES if not build(name).config.mlp.shared])  # type: ignore[union-attr]
def test_the_chosen_experts_share_the_effect_of_their_mixture(name: str) -> None:
    subject = model(name)
    config = subject.cfg.mlp
    assert isinstance(config, MoE)
    parts, whole = (
        attribution_graph(subject, PROMPT, 2, 7, nodes=kind, most=500) for kind in ("expert", "mlp")
    )
    experts = parts.isel(node=parts.kind.values == "expert")
    mixtures = whole.isel(node=whole.kind.values == "mlp")
    assert experts.sizes["node"] == config.top_k * mixtures.sizes["node"] > 0
    for node in mixtures.node:
        chosen = (experts.layer.values == int(node.layer)) & (experts.pos.values == int(node.pos))
        expected = float(mixtures.effect.sel(node=node))
        assert float(experts.effect[chosen].sum()) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    names = experts.node.values.tolist()[:4]
    found, tokens = graph_interventions(subject, PROMPT, parts, nodes=names), torch.tensor([PROMPT])
    plain = subject.transformer(tokens)[0, -1]
    for label in names:
        part, pos = label.split("@")
        left = subject.edited(Edit(part, Zero(), {"pos": int(pos)})).transformer(tokens)[0, -1]
        change = (left[2] - left[7]) - (plain[2] - plain[7])
        assert float(found.value.sel(part=label)) == pytest.approx(change.item(), rel=1e-9, abs=1e-12)


def test_neurons_inside_experts_are_refused_in_words() -> None:
    with pytest.raises(
        KeyError, match="no neurons but those inside experts, which are no nodes: nodes='expert'"
    ):
        attribution_graph(model("granite-moe"), PROMPT, 2, nodes="neuron")


def test_heads_neurons_and_features_are_nodes_of_one_graph() -> None:
    graph = attribution_graph(
        with_features(), PROMPT, 2, 7, nodes=["feature", "head", "neuron"], most=10_000, links=10_000
    )
    kinds = ("embedding", "neuron", "feature", "error", "head", "logit")
    assert {*graph.kind.values} == {*kinds} and abs(graph.attrs["covered"] - 1) < 1e-12
    vectors_sum(graph)
    leaving = np.bincount(places(graph, "source"), graph.value, graph.sizes["node"])
    inner = graph.kind.values != "logit"
    np.testing.assert_allclose(leaving[inner], graph.effect[inner], rtol=1e-9, atol=1e-12)
    small = prune_graph(graph, nodes=0.5)
    assert small.sizes["node"] < graph.sizes["node"]


def test_effects_of_vectors_are_gradients() -> None:
    subject = model("gemma2")
    graph = attribution_graph(subject, PROMPT, 2, 7, most=500, nodes=VECTORS)
    ruled, batch = under_rules(subject.transformer, LINEAR), subject.to_batch([PROMPT])
    sites = {"head": "attn.hook_z", "mlp": "hook_mlp_out", "resid": "hook_resid_pre"}
    reads = {
        (kind, layer): Read(f"blocks.{layer}.{site}", grad=True)
        for kind, site in sites.items()
        for layer in range(subject.cfg.n_layers)
    }
    tap = Tap(list(reads.values()))
    with torch.enable_grad():
        logits = ruled.uncapped(ruled(batch.tokens, tap, stop=ruled.config.n_layers)[0, -1])
    live = [tap.live[read] for read in reads.values()]
    slopes = torch.autograd.grad(logits[2] - logits[7], live)
    terms = {key: (x.detach() * slope)[0].sum(-1) for key, x, slope in zip(reads, live, slopes, strict=True)}
    checked = 0
    for node in graph.node[np.isin(graph.kind.values, VECTORS)]:
        found = terms[str(node.kind.values), int(node.layer)][int(node.pos)]
        expected = found[int(node["index"])] if node.kind == "head" else found
        assert_close(torch.tensor(float(graph.effect.sel(node=node)), dtype=torch.float64), expected)
        checked += 1
    assert checked > 20


def test_what_tokens_move_through_a_head_is_a_product_of_matrices() -> None:
    """Of the first layer of a model without norms: pattern x (embedding W_V W_O) . slope."""
    subject = relu()
    graph = attribution_graph(subject, PROMPT, 2, 7, most=500, nodes=["head", "mlp"])
    own = Weights(subject.transformer).layer(0)
    (pattern,) = seen(subject, "attn.hook_pattern")
    embed, positions = (
        observe(subject.transformer, subject.to_batch([PROMPT]), [Read(site)]).trace[Read(site)][0]
        for site in ("hook_embed", "hook_pos_embed")
    )
    ruled, batch = under_rules(subject.transformer, LINEAR), subject.to_batch([PROMPT])
    read = Read("blocks.0.hook_attn_out", grad=True)
    tap = Tap([read])
    with torch.enable_grad():
        logits = ruled.uncapped(ruled(batch.tokens, tap, stop=ruled.config.n_layers)[0, -1])
    (slope,) = torch.autograd.grad(logits[2] - logits[7], tap.live[read])
    moved = torch.einsum("hqk, kd, hde, hef, qf -> qhk", pattern[0], embed, own.W_V, own.W_O, slope[0])
    moved_positions = torch.einsum(
        "hqk, kd, hde, hef, qf -> qh", pattern[0], positions, own.W_V, own.W_O, slope[0]
    )
    biases = torch.einsum("he, hef, qf -> qh", own.b_V, own.W_O, slope[0])
    checked = 0
    for edge in graph.edge[[str(name).startswith("L0H") for name in graph.target.values]]:
        source, target = (graph.sel(node=str(edge[end].values)) for end in ("source", "target"))
        assert_close(
            torch.tensor(float(graph.weight.sel(edge=edge)), dtype=torch.float64),
            moved[int(target.pos), int(target["index"]), int(source.pos)],
        )
        checked += 1
    assert checked == 2 * P * (P + 1) // 2
    for node in graph.node[(graph.kind.values == "head") & (graph.layer.values == 0)]:
        at = int(node.pos), int(node["index"])
        assert_close(
            torch.tensor(float(graph.bias.sel(node=node)), dtype=torch.float64),
            (moved_positions + biases)[at],
        )


def test_a_head_is_taken_out_as_the_graph_says_where_all_is_linear() -> None:
    subject = model("attention-only")
    graph = attribution_graph(subject, PROMPT, 2, 7, most=500)
    found = graph_interventions(subject, PROMPT, graph)
    assert found.sizes["part"] == (graph.kind.values == "head").sum() > 10
    last = [name for name in found.part.values if name.startswith(f"L{subject.cfg.n_layers - 1}H")]
    assert found.attrs["held_rank_correlation"] > 0.5  # norms are not held
    plain = HookedTransformer(perturbed(ModelConfig(
        n_layers=2, d_model=8, n_heads=2, n_ctx=16, d_vocab=13, mlp=None, norm=NoNorm()
    )))  # fmt: skip
    graph = attribution_graph(plain, PROMPT, 2, 7, most=500)
    found = graph_interventions(plain, PROMPT, graph)
    np.testing.assert_allclose(found.held, found.predicted, rtol=1e-9, atol=1e-11)
    assert last and not np.allclose(found.value, found.predicted, rtol=1e-3)


# --- edges by head --------------------------------------------------------------------------------------------------


@over("name", NEURONS)
def test_heads_and_the_direct_path_sum_to_every_edge(name: str) -> None:
    subject = model(name)
    for nodes in ("neuron", "resid") if name in ("gpt2", "bloom", "gemma2") else ("neuron",):
        graph = attribution_graph(subject, PROMPT, [2, 7], most=12, nodes=nodes)  # type: ignore[arg-type]
        split = edge_heads(subject, PROMPT, graph, most=200)
        expected = graph.weight.sel(edge=split.edge)
        np.testing.assert_allclose(split.value.sum("part") + split.direct, expected, rtol=1e-9, atol=1e-11)
        apart = (
            graph.pos.sel(node=split.source.values).values != graph.pos.sel(node=split.target.values).values
        )
        assert not split.direct.values[apart].any() and split.direct.values[~apart].any()


def test_edges_between_features_and_errors_are_split() -> None:
    graph = attribution_graph(with_features(), PROMPT, 2, 7)
    split = edge_heads(with_features(), PROMPT, graph, most=10_000)
    assert split.sizes["edge"] == graph.sizes["edge"] and abs(split.value).max() > 1e-3
    np.testing.assert_allclose(split.value.sum("part") + split.direct, graph.weight, rtol=1e-9, atol=1e-11)


def test_a_path_counts_for_its_last_head() -> None:
    """From a neuron of block 0 to one of block 2: heads of block 1, or of block 2, of what those of 1 moved too."""
    subject = relu()
    graph = attribution_graph(subject, PROMPT, 2, most=500, links=500)
    split = edge_heads(subject, PROMPT, graph, most=10_000)
    posts, pattern = seen(subject, "mlp.hook_post", "attn.hook_pattern")
    own = [Weights(subject.transformer).layer(layer) for layer in range(3)]
    written = torch.einsum("kn, nd -> knd", posts[0], own[0].W_out)  # by source
    by_head = {
        layer: torch.einsum("hqk, hde, hef -> hqkdf", pattern[layer], own[layer].W_V, own[layer].W_O)
        for layer in (1, 2)
    }
    first = torch.einsum("knd, hqkdf -> knhqf", written, by_head[1])
    after = first.sum(2) + torch.einsum("knd, qk -> knqd", written, torch.eye(P, dtype=torch.float64))
    second = torch.einsum("knpd, hqpdf -> knhqf", after, by_head[2])
    into = torch.einsum("df, qf -> qdf", own[2].W_in, (posts[2] > 0).double())
    loads = torch.cat([torch.einsum("knhqd, qdm -> knqmh", x, into) for x in (first, second)], -1)
    checked, heads = 0, [f"L{layer}H{h}" for layer in (1, 2) for h in range(2)]
    for edge in split.edge:
        source, target = (graph.sel(node=str(edge[end].values)) for end in ("source", "target"))
        if (source.kind, target.kind, int(source.layer), int(target.layer)) == ("neuron", "neuron", 0, 2):
            at = int(source.pos), int(source["index"]), int(target.pos), int(target["index"])
            found = split.value.sel(edge=edge)
            assert_close(torch.from_numpy(found.sel(part=heads).values), loads[at])
            assert not found.sel(part=["L0H0", "L0H1"]).any()
            checked += 1
    assert checked > 50


def test_gradients_that_a_user_has_switched_off_change_nothing() -> None:
    """It was an error of PyTorch, as notebooks begin with torch.set_grad_enabled(False)."""

    def found() -> list[xr.Dataset]:
        graph = attribution_graph(model(), PROMPT, [2, 7], most=9)
        names = [str(name) for name in graph.node.values[graph.kind.values == "neuron"][:3]]
        groups = {"some": names, "one": names[:1]}
        return [
            graph, attribution_graph(model(), PROMPT, nodes="resid", by="influence", most=4),
            edge_heads(model(), PROMPT, graph, most=9), qk_attribution(model(), PROMPT, "L1H0", key=1, against=2),
            graph_interventions(model(), PROMPT, graph, nodes=groups),
        ]  # fmt: skip

    with torch.no_grad():
        without = found()
    for one, other in zip(without, found(), strict=True):
        xr.testing.assert_identical(one, other)


def test_edges_of_heads_and_of_other_prompts_are_refused() -> None:
    subject = model()
    graph = attribution_graph(subject, PROMPT, 2, most=5)
    assert edge_heads(subject, PROMPT, graph, edges=[str(graph.edge.values[3])]).sizes["edge"] == 1
    for prompt, how, match in (
        (PROMPT, {"edges": ["embed@0 -> L9N1@1"]}, "it has no 'embed@0 -> L9N1@1'"),
        (PROMPT, {"edges": []}, "at least one edge is required"),
        ([1, 2, 3], {}, "the prompt of the graph is required"),
    ):
        with pytest.raises(ValueError, match=match):
            edge_heads(subject, prompt, graph, **how)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="whose nodes are no heads"):
        edge_heads(subject, PROMPT, attribution_graph(subject, PROMPT, 2, nodes="head"))
    wrong = graph.assign(weight=graph.weight + 1e-3)
    with pytest.raises(ArithmeticError, match="heads should sum to"):
        edge_heads(subject, PROMPT, wrong)


# --- scores by pairs of nodes ---------------------------------------------------------------------------------------


@over("name", CAUSAL)
def test_pairs_of_nodes_sum_to_the_score_in_every_family(name: str) -> None:
    subject = model(name)
    nodes = ["head", "neuron"] if name in NEURONS else ["head"]
    for head in ("L1H0", "L1H1"):
        found = qk_attribution(subject, PROMPT, head, query=4, key=2, nodes=nodes, most=6)  # type: ignore[arg-type]
        assert float(found.value.sum()) == pytest.approx(found.attrs["content"], rel=1e-9, abs=1e-12)
        cap = subject.cfg.attn_softcap
        content = found.attrs["content"]
        capped = content if cap is None else cap * np.tanh(content / cap)
        assert capped + found.attrs["position"] == pytest.approx(found.attrs["score"], rel=1e-9, abs=1e-12)
        pattern = subject.run_with_cache(torch.tensor([PROMPT]))[1]["blocks.1.attn.hook_pattern"]
        assert found.attrs["key_pattern"] == pytest.approx(float(pattern[0, int(head[-1]), 4, 2]), rel=1e-9)


def test_a_pair_is_a_product_of_matrices() -> None:
    subject = relu()
    found = qk_attribution(subject, PROMPT, "L1H1", query=-1, key=2, nodes=["head", "mlp"], most=100)
    z, mlp = seen(subject, "attn.hook_z", "hook_mlp_out")
    own = [Weights(subject.transformer).layer(layer) for layer in range(2)]
    writes = {"L0H0": z[0, :, 0] @ own[0].W_O[0], "L0H1": z[0, :, 1] @ own[0].W_O[1], "L0.mlp": mlp[0]}
    checked = 0
    for query in found.query_part.values:
        for key in found.key_part.values:
            (one, at), (other, to) = (str(name).partition("@")[::2] for name in (query, key))
            if one in writes and other in writes:
                q, k = writes[one][int(at)] @ own[1].W_Q[1], writes[other][int(to)] @ own[1].W_K[1]
                term = float(found.value.sel(query_part=query, key_part=key))
                assert term == pytest.approx(float(q @ k) / 2, rel=1e-9, abs=1e-12)
                checked += 1
    assert checked == 9
    np.testing.assert_allclose(found.value.sel(query_part="others"), 0, atol=1e-15)
    assert found.value.sel(key_part="bias").any()


def test_rows_of_their_own_do_not_change_the_sums() -> None:
    few, many = (
        qk_attribution(with_features(), PROMPT, "L1H0", key=1, most=most).value for most in (2, 10_000)
    )
    for part in few.query_part.values[:-2]:
        kept = many.sel(query_part=part)
        np.testing.assert_allclose(few.sel(query_part=part).sum(), kept.sum(), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(few.sum(), many.sum(), rtol=1e-9)
    np.testing.assert_allclose(few.sel(query_part="bias").sum(), many.sel(query_part="bias").sum(), rtol=1e-9)


def test_against_another_key_is_the_difference() -> None:
    subject = model("bloom")
    one, other, both = (
        qk_attribution(subject, PROMPT, "L1H0", query=5, key=key, against=against, most=500)
        for key, against in ((1, None), (3, None), (1, 3))
    )
    for name in ("content", "position", "score"):
        expected = one.attrs[name] - other.attrs[name]
        assert both.attrs[name] == pytest.approx(expected, rel=1e-9, abs=1e-12)
    same = both.value.sel(key_part=[name for name in one.key_part.values if name.startswith("L0H0@")])
    mine = one.value.reindex(query_part=same.query_part, key_part=same.key_part, fill_value=0.0)
    theirs = other.value.reindex(query_part=same.query_part, key_part=same.key_part, fill_value=0.0)
    np.testing.assert_allclose(same, mine - theirs, rtol=1e-8, atol=1e-11)
    assert both.attrs["against_pattern"] == other.attrs["key_pattern"]


def test_the_planted_induction_head_sees_what_the_previous_token_head_wrote_at_the_key() -> None:
    task = planted.induction(n=1)
    subject = HookedTransformer(task.model)
    (ids,) = task.clean.tolist()
    layer, head = INDUCTION
    patterns = subject.run_with_cache(task.clean)[1][f"blocks.{layer}.attn.hook_pattern"]
    query = len(ids) - 1
    key = int(patterns[0, head, query].argmax())
    assert ids[key - 1] == ids[query]
    found = qk_attribution(subject, ids, INDUCTION, key=key, nodes="head")
    query_part, key_part = (found[name][i] for name, i in zip(
        found.value.dims, np.unravel_index(abs(found.value).argmax().item(), found.value.shape), strict=True
    ))  # fmt: skip
    assert (str(query_part.values), str(key_part.values)) == (
        f"embed@{query}", f"L{PREVIOUS[0]}H{PREVIOUS[1]}@{key}",
    )  # fmt: skip
    assert float(abs(found.value).max()) > 0.9 * found.attrs["content"]
    graph = attribution_graph(subject, ids, int(task.answer[0]), int(task.wrong[0]), most=10)
    heads = graph.isel(node=graph.kind.values == "head")
    best = heads.node[abs(heads.effect).argmax()]
    assert str(best.values) == f"L{layer}H{head}@{query}"
    into = graph.isel(edge=graph.target.values == str(best.values))
    assert str(into.source.values[abs(into.weight).argmax()]) == f"embed@{key}"


def test_numbers_of_a_query_some_at_a_time_are_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = qk_attribution(model(), PROMPT, "L1H2", key=2, most=7)
    monkeypatch.setattr("interp.circuits.graph_attention.at_once", lambda local: 3)
    found = qk_attribution(model(), PROMPT, "L1H2", key=2, most=7)
    assert found.query_part.values.tolist() == plain.query_part.values.tolist()
    np.testing.assert_allclose(found.value, plain.value, rtol=1e-9, atol=1e-14)


def test_zeroed_sites_have_no_pairs_and_no_heads() -> None:
    """Nothing depends on what such a site held; it was an error of PyTorch."""
    for site in ("blocks.1.attn.hook_q", "blocks.1.hook_resid_pre"):
        found = qk_attribution(model(), PROMPT, "L1H0", key=1, edits=[Edit(site, Zero())])
        assert found.attrs["score"] == 0 and not found.value.any()
    edits = [Edit(f"blocks.{layer}.attn.hook_z", Zero()) for layer in range(2)]
    graph = attribution_graph(model(), PROMPT, 2, most=9, edits=edits)
    split = edge_heads(model(), PROMPT, graph, edits=edits)
    assert not split.value.any()
    np.testing.assert_allclose(split.direct, split.weight, rtol=1e-9)


def test_what_has_no_pairs_is_refused_in_words() -> None:
    subject = model()
    for how, match in (
        ({"query": 2, "key": 4}, "does not see position 4"),
        ({"query": 4, "key": 1, "against": 5}, "does not see position 5"),
        ({"key": 1, "nodes": []}, "at least one of neuron"),
        ({"key": 1, "against": 1}, "against must be another position than key, got 1"),
        ({"key": 1, "most": -1}, "most must be a whole number from 0"),
        ({"key": 1, "nodes": "feature"}, "require a model with dictionaries"),
    ):
        with pytest.raises(ValueError, match=match):
            qk_attribution(subject, PROMPT, "L1H0", **how)  # type: ignore[arg-type]
    with pytest.raises(IndexError, match="9"):
        qk_attribution(subject, PROMPT, "L1H0", key=9)
    with pytest.raises(ValueError, match=re.escape("a head of self-attention is required")):
        qk_attribution(subject, PROMPT, "L1.mlp", key=1)
