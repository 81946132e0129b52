"""Faithfulness, CPR, CMD, completeness and minimality are their formulas; planted circuits have them all."""

import functools

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor

from interp import HookedTransformer
from interp.causal.graph import EdgeGraph
from interp.circuits.circuit_evaluation import (
    FRACTIONS,
    area,
    evaluate_circuit,
    faithfulness,
    faithfulness_curve,
)
from interp.circuits.discovery import largest, score_edges, worth
from interp.circuits.edge_circuit import Circuit, connected
from interp.circuits.interchange import Interchange
from interp.passes.metrics import logit_difference, of_logits
from interp.zoo.planted import PLANTED, Planted
from tests.configs import CONFIGS, build, some_tokens

CLEAN, CORRUPT = some_tokens(4, 6), some_tokens(4, 6, seed=1)
METRIC = logit_difference(3, 4)


@functools.cache
def planted(name: str) -> Planted:
    return PLANTED[name](0, 4)


@functools.cache
def task_of(name: str) -> Interchange:
    c = planted(name)
    model = HookedTransformer(c.model)
    return Interchange.of(model, c.clean, c.corrupt, metric=logit_difference(c.answer, c.wrong))


@functools.cache
def small() -> tuple[Interchange, xr.Dataset]:
    """A random model, and scores of its edges on its own prompts."""
    model = HookedTransformer(build("llama-gqa"))
    scores = score_edges(model, CLEAN, CORRUPT, metric=METRIC, method="eap")
    return Interchange.of(model, CLEAN, CORRUPT, metric=METRIC), scores


def shares(task: Interchange, masks: Tensor) -> Tensor:
    """f by the formula."""
    whole = task.graph.exists
    ends = torch.stack((whole, torch.zeros_like(whole)))
    full, empty, *found = task.run(torch.cat((ends, masks))).mean(1)
    return (torch.stack(found) - empty) / (full - empty)


# planted


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_circuit_is_faithful_complete_and_minimal_and_random_ones_are_not(name: str) -> None:
    task, edges = task_of(name), planted(name).edges
    result = evaluate_circuit(
        task, Circuit(task.graph, dict.fromkeys(edges, 1.0)), subsets=12, draws=3, resamples=50
    )
    found, random, _ = result.faithfulness.values
    assert abs(found - 1) < 0.05 and abs(random) < 0.05
    assert float(result.completeness.max()) < 0.05
    nodes = planted(name).nodes - {"L0.resid", "logits"}
    assert set(result.node.values.tolist()) == nodes
    assert float(result.needed.min()) > 0.25, "every node of it does something, once its stand-in is gone"


def test_a_backup_is_not_minimal_alone_and_an_or_neither() -> None:
    """What the notes of the planted models say of ablating one part."""
    for name, idle in (
        ("backup", {"L0H3": 0.0, "L1H2": 0.0, "L1H1": -1 / 3}),
        ("either", {"L0H1": 0.0, "L1H3": 0.0}),
    ):
        task = task_of(name)
        circuit = Circuit(task.graph, dict.fromkeys(planted(name).edges, 1.0))
        result = evaluate_circuit(task, circuit, subsets=1, draws=1, resamples=20)
        for node, expected in idle.items():
            assert float(result.minimality.sel(node=node)) == pytest.approx(expected, abs=0.05)


def test_half_a_circuit_is_incomplete() -> None:
    """One branch of an OR is faithful, but the model does without it and the branch does not."""
    task, branch = task_of("either"), {e: 1.0 for e in planted("either").edges if "L1H3" not in e}
    result = evaluate_circuit(task, Circuit(task.graph, branch), draws=1, resamples=20)
    assert result.removed.values.tolist() == [[False, False], [True, False], [False, True], [True, True]]
    assert abs(float(result.faithfulness[0]) - 1) < 0.05
    assert float(result.completeness.max()) > 0.9


@pytest.mark.parametrize("name", ["fact_memory", "two_hop"])
def test_the_curve_of_a_planted_circuit_jumps_to_1_at_its_size(name: str) -> None:
    task, c = task_of(name), planted(name)
    scores = score_edges(HookedTransformer(c.model), c.clean, c.corrupt, metric=task.metric, method="exact")
    n, total = len(c.edges), len(task.graph)
    fractions = ((n - 1 + 0.5) / total, (n + 0.5) / total, 1.0)
    curve = faithfulness_curve(task, scores, fractions=fractions, draws=2, resamples=50)
    before, at, whole = curve.faithfulness.sel(kind="found").values
    assert before < 0.6 and abs(at - 1) < 0.05 and whole == pytest.approx(1)
    assert abs(float(curve.faithfulness.sel(kind="random")[1])) < 0.05
    assert curve.edges.values.tolist()[1:] == [n, total]


# formulas


def test_the_curve_is_the_formula_at_every_fraction() -> None:
    task, scores = small()
    curve = faithfulness_curve(task, scores, draws=0, resamples=10, rank="helpful")
    sizes = [int(f * len(task.graph)) for f in FRACTIONS]
    masks = [connected(task.graph, largest(worth(scores, "helpful"), n)) for n in sizes]
    expected = shares(task, torch.stack(masks))
    np.testing.assert_allclose(curve.faithfulness[0], expected, atol=1e-9)
    assert curve.edges.values.tolist() == [int(m.sum()) for m in masks]
    steps = list(zip(FRACTIONS, FRACTIONS[1:], expected.tolist(), expected.tolist()[1:], strict=False))
    cpr = sum((b - a) * (f + g) / 2 for a, b, f, g in steps)
    cmd = sum((b - a) * (abs(1 - f) + abs(1 - g)) / 2 for a, b, f, g in steps)
    assert float(curve.cpr[0]) == pytest.approx(cpr) and float(curve.cmd[0]) == pytest.approx(cmd)
    assert curve.kind.values.tolist() == ["found"]


def test_a_perfect_circuit_has_a_cpr_of_one_less_what_is_not_integrated() -> None:
    assert float(area(torch.ones(10).double(), FRACTIONS)) == pytest.approx(0.999)
    assert float(area(torch.tensor(FRACTIONS).double(), FRACTIONS)) == pytest.approx((1 - 1e-6) / 2)


def test_the_interval_is_that_of_resampled_prompts() -> None:
    """A metric per prompt that is normal, of known spread: the bootstrap must find the error of its mean."""
    dice = np.random.default_rng(0)
    rows = 400
    circuit = torch.from_numpy(dice.normal(0.5, 0.2, rows))
    values = torch.stack((torch.ones(rows).double(), torch.zeros(rows).double(), circuit))
    found = faithfulness(values, 4000, np.random.default_rng(1))[:, 0]
    assert float(found[0]) == pytest.approx(float(circuit.mean()))
    assert float(found[1:].std()) == pytest.approx(float(circuit.std()) / rows**0.5, rel=0.05)
    assert float(found[1:].mean()) == pytest.approx(float(circuit.mean()), abs=0.002)


def test_prompts_are_resampled_together() -> None:
    """A circuit that is half of the model in every prompt is half in every resample, however the prompts differ."""
    full = torch.tensor([1.0, 5.0, 20.0])
    found = faithfulness(torch.stack((full, 0 * full, full / 2)), 50, np.random.default_rng(0))
    assert torch.allclose(found, torch.full_like(found, 0.5))


def test_one_prompt_has_no_interval() -> None:
    task = Interchange.of(HookedTransformer(build("gpt2")), CLEAN[:1], CORRUPT[:1], metric=METRIC)
    result = evaluate_circuit(
        task, Circuit(task.graph, {"L0.resid->L0.mlp": 1.0, "L0.mlp->logits": 1.0}), subsets=2, draws=1
    )
    assert np.isfinite(result.faithfulness).all() and np.isnan(result.faithfulness_low).all()


def test_completeness_and_minimality_are_knockouts_by_hand() -> None:
    task, scores = small()
    graph = task.graph
    kept = connected(graph, largest(worth(scores), 16))
    circuit = Circuit.of(graph, kept, torch.from_numpy(scores.score.values))
    result = evaluate_circuit(task, circuit, subsets=3, draws=1, resamples=10)
    nodes = result.node.values.tolist()

    def without(mask: Tensor, *names: str) -> Tensor:
        return graph.chosen(e for e in graph.names(mask) if e.partition("->")[0] not in names)

    gone = [[n for n, r in zip(nodes, removed, strict=True) if r] for removed in result.removed.values]
    some = nodes[::4]
    masks = [kept, *(without(graph.exists, *k) for k in gone), *(without(kept, *k) for k in gone)]
    masks += [without(kept, node, *k) for node in some for k in ([], *gone)]
    own, *found = shares(task, torch.stack(masks)).tolist()
    model, mine, deeper = found[: len(gone)], found[len(gone) : 2 * len(gone)], iter(found[2 * len(gone) :])
    expected = [abs(a - b) for a, b in zip(model, mine, strict=True)]
    np.testing.assert_allclose(result.completeness, expected, atol=1e-9)
    for node in some:
        steps = [here - next(deeper) for here in (own, *mine)]
        assert float(result.minimality.sel(node=node)) == pytest.approx(steps[0], abs=1e-9)
        counted = [abs(step) for step, k in zip(steps, ([], *gone), strict=True) if node not in k]
        assert float(result.needed.sel(node=node)) == pytest.approx(max(counted), abs=1e-9)


def test_the_same_seed_gives_the_same_numbers() -> None:
    task, scores = small()
    ask = functools.partial(faithfulness_curve, task, scores, draws=2, resamples=20, fractions=(0.1, 0.3))
    assert ask(seed=3).equals(ask(seed=3)) and not ask(seed=3).equals(ask(seed=4))


# refusals


def test_what_has_no_meaning_is_refused_by_name() -> None:
    task, scores = small()
    with pytest.raises(ValueError, match="fractions that rise within"):
        faithfulness_curve(task, scores, fractions=(0.5, 0.1))
    with pytest.raises(ValueError, match="scores of the task's own graph"):
        faithfulness_curve(task, scores.isel(sender=slice(1)))
    with pytest.raises(ValueError, match="a circuit of EdgeGraph"):
        evaluate_circuit(task, Circuit(EdgeGraph.of(CONFIGS["gpt2"]), {"L0.resid->L0.mlp": 1.0}))
    flat = of_logits(lambda x: 0 * x[:, 0, 0])
    constant = Interchange.of(HookedTransformer(build("llama-gqa")), CLEAN, CORRUPT, metric=flat)
    with pytest.raises(ValueError, match="nothing to explain"):
        faithfulness_curve(constant, scores, draws=0)
