"""A graph forecasts interventions on nodes and on groups of them: exactly where the model is linear."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import xarray as xr
from scipy.stats import spearmanr

from interp import Edit, HookedTransformer
from interp.circuits import AttributionGraph, attribution_graph, edge_heads, graph_interventions, prune_graph
from interp.circuits.local_model import NodeName
from interp.edits import Scale, Zero
from interp.model import MLP, ModelConfig, NoNorm
from tests.circuits.test_attribution_graph import PROMPT, with_features
from tests.configs import perturbed
from tests.loops import over
from tests.tolerances import assert_close


def test_small_changes_are_predicted_exactly_where_only_patterns_could_move() -> None:
    """Without norms, and with ReLUs whose signs stay, held patterns leave nothing that is not linear."""
    config = ModelConfig(
        n_layers=2, d_model=8, n_heads=2, n_ctx=16, d_vocab=13, mlp=MLP(20, act="relu"), norm=NoNorm()
    )
    subject = HookedTransformer(perturbed(config))
    graph = attribution_graph(subject, PROMPT, [2, 5], most=30)
    found = graph_interventions(subject, PROMPT, graph, factor=1 + 1e-6)
    assert found.sizes["part"] == 30 and float(abs(found.predicted).max()) > 1e-8
    np.testing.assert_allclose(found.held, found.predicted, rtol=1e-6, atol=1e-14)
    assert float(abs(found.value - found.predicted).max()) > 1e-9  # patterns of the second layer move


def test_a_removed_node_is_an_edit_of_its_cell() -> None:
    subject = with_features()
    graph = attribution_graph(subject, PROMPT, 2, 7)
    names = [str(name) for name in graph.node.values[np.isin(graph.kind.values, ("feature", "error"))]][:6]
    found = graph_interventions(subject, PROMPT, graph, nodes=names)
    plain = subject(torch.tensor([PROMPT]))[0, -1]
    for name in names:
        part, pos = name.split("@")
        edited = subject.edited(Edit(part, Zero(), {"pos": int(pos)}))(torch.tensor([PROMPT]))[0, -1]
        change = (edited[2] - edited[7]) - (plain[2] - plain[7])
        assert_close(torch.tensor(float(found.value.sel(part=name)), dtype=torch.float64), change.detach())
    with pytest.raises(ValueError, match="the prompt of the graph is required"):
        graph_interventions(subject, PROMPT[:-1], graph)
    with pytest.raises(ValueError, match="it has no 'L0N1@2'"):
        graph_interventions(subject, PROMPT, graph, nodes=["L0N1@2"])


def linear(layers: int = 4) -> HookedTransformer:
    """Without norms, and with ReLUs whose inputs are far above 0: linear where patterns are held."""
    config = ModelConfig(
        n_layers=layers, d_model=8, n_heads=2, n_ctx=16, d_vocab=13, mlp=MLP(6, act="relu"), norm=NoNorm()
    )
    network = perturbed(config)
    with torch.no_grad():
        for block in network.blocks:
            block.mlp.into.bias += 1000.0
            block.mlp.out.weight *= 1e-2
    return HookedTransformer(network)


def groups_of(graph: xr.Dataset, count: int) -> dict[str, list[str]]:
    """Groups whose members lead to one another, through blocks and from earlier tokens to later ones."""
    names = [str(x) for x in graph.node.values[~np.isin(graph.kind.values, ("embedding", "logit"))]]
    return {f"group {i}": names[i::count] for i in range(count)}


@over("kinds", [["neuron"], ["head", "mlp"], ["resid", "head", "neuron"]])
@over("factor", [0.0, 2.0, -1.5])
def test_changes_of_groups_are_predicted_exactly_where_the_model_is_linear(
    factor: float, kinds: list[NodeName]
) -> None:
    subject = linear()
    graph = attribution_graph(subject, PROMPT, [2, 5], nodes=kinds, most=60)
    groups = groups_of(graph, 3)
    found = graph_interventions(subject, PROMPT, graph, nodes=groups, factor=factor)
    assert found.part.values.tolist() == list(groups)
    np.testing.assert_allclose(found.held, found.predicted, rtol=1e-10, atol=1e-10)
    effects = graph.effect.to_series()
    summed = [(factor - 1) * effects[names].sum() for names in groups.values()]
    assert np.abs(found.predicted.values - summed).min() > 1e-3  # paths through several members count once


def test_the_prediction_does_not_depend_on_what_was_pruned() -> None:
    subject = linear()
    graph = attribution_graph(subject, PROMPT, 2, most=60)
    small = prune_graph(graph, nodes=0.7, edges=0.5)
    groups = groups_of(small, 2)
    both = [graph_interventions(subject, PROMPT, each, nodes=groups).predicted for each in (graph, small)]
    np.testing.assert_allclose(both[0], both[1], rtol=1e-12)


@over("factor", [0.0, 3.0])
def test_the_prediction_is_that_of_changes_carried_along_every_edge(factor: float) -> None:
    """Node after node in a graph that has all edges, members multiplied where they are reached."""
    subject = linear(3)
    graph = attribution_graph(subject, PROMPT, 2, most=10_000, links=10_000)
    group = groups_of(graph, 5)["group 1"]
    names, start = graph.node.values.tolist(), dict.fromkeys(graph.node.values.tolist(), 0.0)
    value = graph.activation.to_series()
    for name in names:
        into = graph.target.values == name
        weights, sources = graph.weight.values[into], graph.source.values[into]
        added = sum(w * start[s] for w, s in zip(weights, sources, strict=True)) / value[name]
        # relative to its value
        start[name] = factor * (1 + added) - 1 if name in group else added
    (logit,) = graph.node.values[graph.kind.values == "logit"]
    expected = start[logit] * value[logit]
    found = graph_interventions(subject, PROMPT, graph, nodes={"group": group}, factor=factor)
    assert float(found.predicted[0]) == pytest.approx(expected, rel=1e-9)


def test_groups_are_multiplied_at_once_and_those_of_one_node_are_that_node() -> None:
    subject = with_features()
    graph = attribution_graph(subject, PROMPT, 2, 7)
    names = [str(name) for name in graph.node.values[np.isin(graph.kind.values, ("feature", "error"))]][::9]
    found = graph_interventions(subject, PROMPT, graph, nodes={"all": names, "first": names[:1]}, factor=0.5)
    edits = [Edit(name.split("@")[0], Scale(0.5), {"pos": int(name.split("@")[1])}) for name in names]
    plain, edited = (each(torch.tensor([PROMPT]))[0, -1] for each in (subject, subject.edited(edits)))
    change = (edited[2] - edited[7]) - (plain[2] - plain[7])
    assert_close(torch.tensor(float(found.value[0]), dtype=torch.float64), change.detach())
    single = graph_interventions(subject, PROMPT, graph, nodes=names[:1], factor=0.5)
    for variable in ("value", "held", "predicted"):
        assert float(found[variable][1]) == pytest.approx(float(single[variable][0]), rel=1e-9)


def test_small_changes_of_groups_add_up() -> None:
    subject = with_features()
    graph = attribution_graph(subject, PROMPT, 2, 7)
    inner = graph.node.values[np.isin(graph.kind.values, ("feature", "error"))].tolist()
    found = graph_interventions(subject, PROMPT, graph, nodes={"all": inner}, factor=1 + 1e-7)
    assert float(found.predicted[0]) == pytest.approx(
        1e-7 * float(graph.effect.sel(node=inner).sum()), rel=1e-5
    )


def test_the_supernodes_of_a_drawn_graph_are_groups() -> None:
    subject = linear(2)
    graph = attribution_graph(subject, PROMPT, 2, most=20)
    drawn = AttributionGraph.of_result(graph)
    neurons = np.flatnonzero(graph.kind.values == "neuron")
    groups = {"one": neurons[:3], "two": neurons[2:9]}
    made = [(label, *(drawn.nodes[i].name for i in places)) for label, places in groups.items()]
    by_file = graph_interventions(
        subject, PROMPT, graph, nodes=AttributionGraph(
            drawn.slug, drawn.model, drawn.prompt, drawn.tokens, drawn.nodes, drawn.links, tuple(made)
        )
    )  # fmt: skip
    by_name = {label: [str(graph.node.values[i]) for i in places] for label, places in groups.items()}
    assert by_file.identical(graph_interventions(subject, PROMPT, graph, nodes=by_name))


def test_groups_that_cannot_be_multiplied_are_refused_in_words() -> None:
    subject = linear(1)
    graph = attribution_graph(subject, PROMPT, 2, most=4)
    name = str(graph.node.values[graph.kind.values == "neuron"][0])
    drawn = AttributionGraph.of_result(graph)
    for nodes, match in (
        ({"none": []}, "group 'none' must have nodes, each of them once, got none"),
        ({"twice": [name, name]}, "each of them once, got"),
        ({"tokens": ["embed@0"]}, "it has no 'embed@0'"),
        ({}, "at least one node between embeddings and logits, or a group"),
        (drawn, "or a group of them"),
        ([name, name], "nodes must be named once each"),
    ):
        with pytest.raises(ValueError, match=match):
            graph_interventions(subject, PROMPT, graph, nodes=nodes)  # type: ignore[arg-type]


def test_graphs_of_other_models_edits_and_logits_are_refused() -> None:
    """Changes of one model beside predictions of another were compared without a word."""
    config = ModelConfig(n_layers=2, d_model=8, n_heads=2, n_ctx=16, d_vocab=13, mlp=MLP(20, act="relu"))
    subject, other = (HookedTransformer(perturbed(config, seed=seed)) for seed in (0, 1))
    graph = attribution_graph(subject, PROMPT, [2, 5], most=9)
    edits = [Edit("blocks.0.attn.hook_z", Zero())]
    same = "the model, the edits and all logits of the graph are required"
    logits = graph.kind.values == "logit"
    for model, given, match in (
        (other, graph, same),
        (subject, attribution_graph(subject, PROMPT, [2, 5], edits=edits, most=9), same),
        (subject, graph.isel(node=slice(0, -1)), same),
        (subject, graph.isel(node=~logits), "a graph with logits is required"),
        (subject, graph.assign(effect=graph.effect * np.nan), "finite numbers"),
        (HookedTransformer(perturbed(replace(config, n_layers=1))), graph, "this one has no neuron"),
        (HookedTransformer(perturbed(replace(config, mlp=MLP(2)))), graph, "this one has no neuron"),
    ):
        with pytest.raises(ValueError, match=match):
            graph_interventions(model, PROMPT, given)
    with pytest.raises(ValueError, match="this one has no neuron"):
        edge_heads(HookedTransformer(perturbed(replace(config, n_layers=1))), PROMPT, graph)


def test_the_correlation_of_ranks_is_spearmans() -> None:
    """Equal changes share a rank, and changes that are all equal have no correlation."""
    subject = linear(1)
    graph = attribution_graph(subject, PROMPT, 2, most=12)
    found = graph_interventions(subject, PROMPT, graph, factor=1.0)
    assert np.isnan(found.attrs["rank_correlation"]) and np.isnan(found.attrs["held_rank_correlation"])
    found = graph_interventions(subject, PROMPT, graph)
    expected = spearmanr(found.value, found.predicted).statistic
    assert found.attrs["rank_correlation"] == pytest.approx(expected, rel=1e-12)
