"""Faithfulness, CPR, CMD, completeness and minimality are their formulas; planted circuits have them all."""

import functools
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor

import interp
from interp import HookedTransformer
from interp.causal import EdgeGraph
from interp.circuits import (
    Circuit,
    circuit_curve,
    evaluate_circuit,
    interchange,
    score_edges,
)
from interp.circuits.circuit_evaluation import MIB_FRACTIONS, area, effect_shares
from interp.circuits.edge_circuit import connected
from interp.circuits.edge_rankings import largest, worth
from interp.circuits.interchange import (
    CircuitPasses,
    DroppedEdges,
    KnownSenders,
    ReadValues,
    Replacement,
    inputs,
)
from interp.core.stats import Moments
from interp.data.batch import Batch
from interp.data.pairs import paired
from interp.passes.metrics import Metric, logit_difference, of_logits
from interp.passes.schedule import run_steps
from interp.passes.sweep import MetricOfVariants
from interp.zoo.planted import PLANTED, Planted
from tests.configs import CONFIGS, build, some_tokens
from tests.tolerances import assert_close

CLEAN, CORRUPT = some_tokens(4, 6), some_tokens(4, 6, seed=1)
METRIC = logit_difference(3, 4)


@dataclass(frozen=True, eq=False)
class Task:
    """A model, pairs of prompts and a metric: what circuits are judged on."""

    model: HookedTransformer
    clean: Tensor
    corrupt: Tensor
    metric: Metric

    @property
    def graph(self) -> EdgeGraph:
        return EdgeGraph.of(self.model.cfg)

    def evaluated(self, circuit: Circuit, **how: object) -> xr.Dataset:
        return evaluate_circuit(self.model, self.clean, self.corrupt, circuit, metric=self.metric, **how)  # type: ignore[arg-type]

    def curve(self, scores: xr.Dataset, **how: object) -> xr.Dataset:
        return circuit_curve(self.model, self.clean, self.corrupt, scores, metric=self.metric, **how)  # type: ignore[arg-type]

    def scored(self, method: str) -> xr.Dataset:
        return score_edges(self.model, self.clean, self.corrupt, metric=self.metric, method=method)  # type: ignore[arg-type]

    def run(self, masks: Tensor) -> Tensor:
        """The metric `[circuit, prompt]`."""
        found = interchange(self.model, self.clean, self.corrupt, masks, metric=self.metric)
        return torch.from_numpy(found["each"].values.T)


@functools.cache
def planted(name: str) -> Planted:
    return PLANTED[name](0, 4)


@functools.cache
def task_of(name: str) -> Task:
    c = planted(name)
    return Task(HookedTransformer(c.model), c.clean, c.corrupt, logit_difference(c.answer, c.wrong))


@functools.cache
def small() -> tuple[Task, xr.Dataset]:
    """A random model, and scores of its edges on its own prompts."""
    task = Task(HookedTransformer(build("llama-gqa")), CLEAN, CORRUPT, METRIC)
    return task, task.scored("eap")


def shares(task: Task, masks: Tensor) -> Tensor:
    """f by the formula."""
    whole = task.graph.exists
    ends = torch.stack((whole, torch.zeros_like(whole)))
    full, empty, *found = task.run(torch.cat((ends, masks))).mean(1)
    return (torch.stack(found) - empty) / (full - empty)


def subsets(result: xr.Dataset) -> list[str]:
    """The circuits without random subsets of their nodes."""
    return [name for name in result.circuit.values.tolist() if name.startswith("without K")]


# planted


@pytest.mark.parametrize("name", PLANTED)
def test_planted_circuit_is_faithful_complete_minimal_and_random_ones_not(name: str) -> None:
    task, edges = task_of(name), planted(name).edges
    circuit = Circuit(task.graph, dict.fromkeys(edges, 1.0))
    result = task.evaluated(circuit, subsets=12, draws=3, deeper=True)
    faithful = result.sel(score="faithfulness")
    found, random = faithful.value.sel(circuit=["found", "random"]).values
    assert abs(found - 1) < 0.05 and abs(random) < 0.05
    assert float(faithful.null.sel(circuit="found")) == random
    assert float(result.value.sel(score="incompleteness").max()) < 0.05
    nodes = planted(name).nodes - {"L0.resid", "logits"}
    assert set(result.part.values.tolist()) == nodes
    assert float(result.needed.min()) > 0.25, "every node of it does something, once its stand-in is gone"


def test_a_backup_is_not_minimal_alone_and_an_or_neither() -> None:
    """What the notes of the planted models say of ablating one part."""
    for name, idle in (
        ("backup", {"L0H3": 0.0, "L1H2": 0.0, "L1H1": -1 / 3}),
        ("either", {"L0H1": 0.0, "L1H3": 0.0}),
    ):
        task = task_of(name)
        circuit = Circuit(task.graph, dict.fromkeys(planted(name).edges, 1.0))
        result = task.evaluated(circuit, subsets=1, draws=1)
        for node, expected in idle.items():
            lost = result.value.sel(score="minimality", circuit=f"without {node}")
            assert float(lost) == pytest.approx(expected, abs=0.05)


def test_half_a_circuit_is_incomplete() -> None:
    """One branch of an OR is faithful, but the model does without it and the branch does not."""
    task, branch = task_of("either"), {e: 1.0 for e in planted("either").edges if "L1H3" not in e}
    result = task.evaluated(Circuit(task.graph, branch), subsets=4, draws=1)
    removed = result.removed.sel(circuit=subsets(result)).values.tolist()
    assert removed == [[False, False], [True, False], [False, True], [True, True]]
    assert abs(float(result.value.sel(score="faithfulness", circuit="found")) - 1) < 0.05
    assert float(result.value.sel(score="incompleteness").max()) > 0.9


@pytest.mark.parametrize("name", ["fact_memory", "two_hop"])
def test_the_curve_of_a_planted_circuit_jumps_to_1_at_its_size(name: str) -> None:
    task, c = task_of(name), planted(name)
    scores = task.scored("exact")
    n, total = len(c.edges), len(task.graph)
    fractions = ((n - 1 + 0.5) / total, (n + 0.5) / total, 1.0)
    curve = task.curve(scores, fractions=fractions, draws=2)
    faithful = curve.sel(score="faithfulness")
    before, at, whole = faithful.value.sel(circuit="found").values
    assert before < 0.6 and abs(at - 1) < 0.05 and whole == pytest.approx(1)
    assert abs(float(faithful.value.sel(circuit="random")[1])) < 0.05
    np.testing.assert_array_equal(faithful.null.sel(circuit="found"), faithful.value.sel(circuit="random"))
    assert curve.edges.values.tolist()[1:] == [n, total]


# formulas


def test_the_curve_is_the_formula_at_every_fraction() -> None:
    task, scores = small()
    curve = task.curve(scores, draws=0, rank="helpful", fractions=MIB_FRACTIONS)
    sizes = [int(f * len(task.graph)) for f in MIB_FRACTIONS]
    masks = [connected(task.graph, largest(worth(scores, "helpful"), n)) for n in sizes]
    expected = shares(task, torch.stack(masks))
    found = curve.value.sel(circuit="found")
    np.testing.assert_allclose(found.sel(score="faithfulness"), expected, atol=1e-9)
    assert curve.edges.values.tolist() == [int(m.sum()) for m in masks]
    steps = list(
        zip(MIB_FRACTIONS, MIB_FRACTIONS[1:], expected.tolist(), expected.tolist()[1:], strict=False)
    )
    cpr = sum((b - a) * (f + g) / 2 for a, b, f, g in steps)
    cmd = sum((b - a) * (abs(1 - f) + abs(1 - g)) / 2 for a, b, f, g in steps)
    areas = found.sel(score=["cpr", "cmd"])
    assert areas.isel(fraction=-1).values.tolist() == pytest.approx([cpr, cmd])
    assert areas.isel(fraction=0).values.tolist() == [0, 0]
    (start, end), (f, g) = MIB_FRACTIONS[3:5], expected[3:5].tolist()
    step = areas.sel(score="cpr").isel(fraction=4) - areas.sel(score="cpr").isel(fraction=3)
    assert float(step) == pytest.approx((end - start) * (f + g) / 2)
    assert curve.circuit.values.tolist() == ["found"] and bool(curve.null.isnull().all())


def test_the_area_between_random_circuits_and_1_is_averaged_over_the_draws() -> None:
    """The mean of |1 - f| over random circuits, not |1 - mean f|: they may lie on both sides."""
    task, scores = small()
    asked = {"fractions": (0.2, 0.5)}
    many = task.curve(scores, draws=4, seed=9, **asked).value.sel(circuit="random")
    expected = np.abs(1 - many.sel(score="faithfulness")).values
    mean = (expected[0] + expected[1]) / 2 * 0.3
    assert float(many.sel(score="cmd")[1]) >= mean - 1e-12
    one = task.curve(scores, draws=1, **asked).value.sel(circuit="random")
    expected = np.abs(1 - one.sel(score="faithfulness")).values
    assert float(one.sel(score="cmd")[1]) == pytest.approx((expected[0] + expected[1]) / 2 * 0.3)


def test_every_prompt_s_metric_is_kept() -> None:
    task, scores = small()
    asked = {"fractions": (0.1, 0.5), "draws": 0}
    curve = task.curve(scores, **asked)
    masks = [connected(task.graph, largest(worth(scores), int(f * len(task.graph)))) for f in (0.1, 0.5)]
    whole = task.graph.exists
    full, empty, *found = task.run(torch.stack((whole, whole & False, *masks)))
    np.testing.assert_allclose(curve["each"][:, 0].T, torch.stack(found), atol=1e-9)
    np.testing.assert_allclose(curve.full, full, atol=1e-9)
    np.testing.assert_allclose(curve.empty, empty, atol=1e-9)
    assert curve["each"].attrs["unit"] == "logits" and bool((curve.n == 4).all())
    circuit = Circuit.of(task.graph, masks[1], torch.from_numpy(scores.value.values))
    result = task.evaluated(circuit, subsets=2, draws=1)
    np.testing.assert_allclose(result["each"].sel(circuit="found"), found[1], atol=1e-9)
    mean, ends = result["each"].mean("prompt"), (result.full.mean(), result.empty.mean())
    shares = (mean - ends[1]) / (ends[0] - ends[1])
    np.testing.assert_allclose(result.value.sel(score="faithfulness"), shares, atol=1e-9)


def test_a_perfect_circuit_has_a_cpr_of_one_less_what_is_not_integrated() -> None:
    assert float(area(torch.ones(10).double(), MIB_FRACTIONS)[-1]) == pytest.approx(0.999)
    assert float(area(torch.tensor(MIB_FRACTIONS).double(), MIB_FRACTIONS)[-1]) == pytest.approx(
        (1 - 1e-6) / 2
    )


def test_the_interval_is_that_of_a_ratio_of_means() -> None:
    """Where the model's own effect does not vary it is Student's t; elsewhere a jackknife finds the same width."""
    generator = torch.Generator().manual_seed(0)
    circuit = 0.5 + 0.2 * torch.randn(400, 1, generator=generator).double()
    full = 8 + torch.randn(400, 1, generator=generator).double()
    plain = Moments.of(effect_shares(torch.cat((torch.ones(400, 1), torch.zeros(400, 1), circuit), 1)))
    assert_close(torch.stack(plain.interval()), torch.stack(Moments.of(circuit).interval()))
    values = torch.cat((full, torch.zeros(400, 1), full * circuit), 1)
    left_out = torch.tensor(
        [float((values.sum(0) - row)[2] / (values.sum(0) - row)[0]) for row in values], dtype=torch.float64
    )
    error = ((left_out - left_out.mean()).square().sum() * 399 / 400).sqrt()
    assert float(Moments.of(effect_shares(values)).standard_error()) == pytest.approx(float(error), rel=0.01)


def test_circuit_that_is_half_of_the_model_everywhere_is_half_for_sure() -> None:
    full = torch.tensor([1.0, 5.0, 20.0])[:, None]
    found = effect_shares(torch.cat((full, 0 * full, full / 2), 1))
    assert torch.allclose(found, torch.full_like(found, 0.5))


def test_incompleteness_is_the_size_of_a_difference_that_may_be_nothing() -> None:
    """Its interval holds the absolute value of everything that the difference's interval holds, 0 included."""
    task, scores = small()
    circuit = Circuit.of(task.graph, largest(worth(scores), 40), torch.from_numpy(scores.value.values))
    result = task.evaluated(circuit, subsets=6, draws=1)
    signed, size = (result.sel(score=name).dropna("circuit") for name in ("difference", "incompleteness"))
    assert_close(torch.tensor(size.value.values), torch.tensor(abs(signed.value).values))
    for low, high, least, most in zip(signed.low, signed.high, size.low, size.high, strict=True):
        inside = np.abs(np.linspace(float(low), float(high), 10_001))
        assert float(least) == pytest.approx(inside.min(), abs=1e-3 * float(high - low) + 1e-12)
        assert float(most) == pytest.approx(inside.max())


def test_one_prompt_has_no_interval() -> None:
    task = Task(HookedTransformer(build("gpt2")), CLEAN[:1], CORRUPT[:1], METRIC)
    circuit = Circuit(task.graph, {"L0.resid->L0.mlp": 1.0, "L0.mlp->logits": 1.0})
    result = task.evaluated(circuit, subsets=2, draws=1).sel(score="faithfulness")
    assert np.isfinite(result.value).all() and np.isnan(result.low).all() and np.isnan(result.high).all()


def test_completeness_and_minimality_are_knockouts_by_hand() -> None:
    task, scores = small()
    graph = task.graph
    kept = connected(graph, largest(worth(scores), 16))
    circuit = Circuit.of(graph, kept, torch.from_numpy(scores.value.values))
    result = task.evaluated(circuit, subsets=3, draws=1, nodes=None, deeper=True)
    nodes, some_removed = result.part.values.tolist(), result.removed.sel(circuit=subsets(result)).values
    table = result.value.to_pandas()

    def without(mask: Tensor, *names: str) -> Tensor:
        return graph.chosen(e for e in graph.names(mask) if e.partition("->")[0] not in names)

    gone = [[n for n, r in zip(nodes, removed, strict=True) if r] for removed in some_removed]
    some = nodes[::4]
    masks = [kept, *(without(graph.exists, *k) for k in gone), *(without(kept, *k) for k in gone)]
    masks += [without(kept, node, *k) for node in some for k in ([], *gone)]
    own, *found = shares(task, torch.stack(masks)).tolist()
    model, mine, deeper = found[: len(gone)], found[len(gone) : 2 * len(gone)], iter(found[2 * len(gone) :])
    expected = [abs(a - b) for a, b in zip(model, mine, strict=True)]
    np.testing.assert_allclose(table.incompleteness[subsets(result)], expected, atol=1e-9)
    np.testing.assert_allclose(table.faithfulness[subsets(result)], mine, atol=1e-9)
    np.testing.assert_allclose(table.minimality[subsets(result)], [own - f for f in mine], atol=1e-9)
    for node in some:
        steps = [here - next(deeper) for here in (own, *mine)]
        assert table.minimality[f"without {node}"] == pytest.approx(steps[0], abs=1e-9)
        assert table.faithfulness[f"without {node}"] == pytest.approx(own - steps[0], abs=1e-9)
        counted = [abs(step) for step, k in zip(steps, ([], *gone), strict=True) if node not in k]
        assert float(result.needed.sel(part=node)) == pytest.approx(max(counted), abs=1e-9)
        left = without(kept, node)
        share = float(result.overlap.sel(circuit=f"without {node}"))
        assert share == pytest.approx(int(left.sum()) / int(kept.sum()))


def test_gradient_pass_carries_what_a_sender_says_to_the_stream_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And once more where its slope is weighed: not for each receiver, each of which would keep, in half precision, a
    copy of the matrices of all layers before it.
    """
    plain, seen = DroppedEdges._sender_changes, Counter[int]()

    def watched(self: DroppedEdges, each: KnownSenders, said: ReadValues) -> Tensor:
        seen[each.rows.start] += 1
        return plain(self, each, said)

    monkeypatch.setattr(DroppedEdges, "_sender_changes", watched)
    model = HookedTransformer(build("llama-gqa"))
    task = Task(model, CLEAN[:1], CORRUPT[:1], METRIC)
    kept = connected(task.graph, largest(worth(task.scored("eap")), 16))
    passes = CircuitPasses.of(model, METRIC, "zero", None)
    batch = replace(
        paired(model.text, CLEAN[:1], CORRUPT[:1]), answer=torch.tensor([3]), wrong=torch.tensor([4])
    )
    assert isinstance(batch, Batch)
    run_steps(model.transformer, passes.first_order(model.transformer, batch, kept))
    assert len(seen) > model.cfg.n_layers and set(seen.values()) == {2}


@pytest.mark.parametrize("name", ["llama-gqa", "gpt2", "gemma2"])
@pytest.mark.parametrize("replacement", ["resample", "zero"])
def test_the_estimate_of_a_node_is_the_slope_of_its_knockout(name: str, replacement: Replacement) -> None:
    """Against central differences of runs in which the node's edges carry a little of what replaces them."""
    model = HookedTransformer(build(name).double())
    task = Task(model, CLEAN, CORRUPT, METRIC)
    kept = connected(task.graph, largest(worth(task.scored("eap")), 16))
    circuit = Circuit.of(task.graph, kept, torch.ones(kept.shape))
    result = task.evaluated(circuit, nodes=2, draws=0, replacement=replacement)
    clean = replace(paired(model.text, CLEAN, CORRUPT), answer=torch.full((4,), 3), wrong=torch.full((4,), 4))
    assert isinstance(clean, Batch)
    passes = CircuitPasses.of(model, METRIC, replacement, None)
    replaced = run_steps(model.transformer, passes._replacement_values(model.transformer, clean))

    def metric_at(node: str, share: float) -> float:
        change = DroppedEdges(model.transformer, task.graph, (task.graph.exists & ~kept)[None], replaced)
        shares, sender = change._dropped_by_row.clone(), task.graph.senders.index(node)
        row = next(
            s.rows.start + sender - s.senders.start
            for s in change._known_senders
            if sender in _range(s.senders)
        )
        shares[0, row] += share * kept[sender]
        vars(change)["_dropped_by_row"] = shares
        vars(change)["_inputs"] = {each.site: each for each in inputs(model.transformer, task.graph)}
        vars(change)["_drops_out_of"] = [True] * len(task.graph.senders)
        n = model.cfg.n_layers
        own = clean.pair()[0]
        stream = interp.observe(model, own, change.reads, change.edits, stop=n).output
        judge = MetricOfVariants(METRIC, own, model.transformer, None)
        return float(judge.value(METRIC.sees(stream, own), 1).mean())

    effect, step = float((result.full - result.empty).mean()), 1e-5
    assert result.view.notes and len(result.part) > 4
    for node in result.part.values.tolist():
        slope = (metric_at(node, step) - metric_at(node, -step)) / (2 * step)
        assert float(result.estimate.sel(part=node)) == pytest.approx(-slope / effect, rel=1e-5, abs=1e-8)


def _range(places: slice) -> range:
    return range(places.start, places.stop)


def test_nodes_taken_out_one_by_one_are_evenly_spaced_by_their_scores() -> None:
    task, scores = small()
    kept = connected(task.graph, largest(worth(scores), 16))
    circuit = Circuit.of(task.graph, kept, torch.from_numpy(scores.value.values))
    few, every = (task.evaluated(circuit, nodes=n, draws=0, subsets=1) for n in (3, None))
    size = {
        node: sum(abs(s) for e, s in circuit.scores.items() if e.startswith(f"{node}->"))
        for node in every.part.values.tolist()
    }
    order = sorted(size, key=lambda node: size[node])
    expected = {order[0], order[(len(order) - 1) // 2], order[-1]}
    known = {str(node) for node in few.part.values if not np.isnan(float(few.needed.sel(part=node)))}
    assert known == expected
    for node in expected:
        name = f"without {node}"
        same = (each.value.sel(circuit=name).values for each in (few, every))  # in sweeps of other shapes
        np.testing.assert_allclose(*same, rtol=1e-9, atol=1e-9)
    assert bool(every.estimate.isnull().all()) and not every.view.notes
    assert not bool(few.estimate.isnull().any())


def test_the_same_seed_gives_the_same_numbers() -> None:
    task, scores = small()
    ask = functools.partial(task.curve, scores, draws=2, fractions=(0.1, 0.3))
    assert ask(seed=3).equals(ask(seed=3)) and not ask(seed=3).equals(ask(seed=4))


def test_scores_of_either_direction_rank_alike() -> None:
    task, _ = small()
    for rank in ("magnitude", "helpful"):
        curves = []
        for way in ("denoise", "noise"):
            asked = {"metric": METRIC, "method": "eap-ig-inputs", "direction": way}
            scores = score_edges(task.model, CLEAN, CORRUPT, **asked)  # type: ignore[arg-type]
            curves.append(task.curve(scores, rank=rank, draws=0))
        xr.testing.assert_equal(*curves)


# the one shape, and the questions


def test_tables_are_tidy_and_every_number_has_a_unit() -> None:
    task, scores = small()
    circuit = Circuit(task.graph, {"L0.resid->L0.mlp": 1.0, "L0.mlp->logits": 1.0})
    curve = task.curve(scores, draws=1, fractions=(0.1, 0.5))
    checks = task.evaluated(circuit, subsets=2, draws=1)
    for result in (curve, checks):
        rows = interp.frame(result)
        assert len(rows.columns) <= 12 and {"circuit", "score", "value", "low", "high", "null", "n"} <= {
            *rows.columns
        }
        numbers = [v for v in result.data_vars.values() if v.dtype.kind == "f"]
        assert all(v.attrs.get("unit") for v in numbers)
    assert interp.frame(checks, "needed").part.tolist() == ["L0.mlp"]
    without = task.evaluated(circuit, subsets=1, draws=0)
    assert without.circuit.values.tolist()[:2] == ["found", "without L0.mlp"] and bool(
        without.null.isnull().all()
    )


# refusals


def test_what_has_no_meaning_is_refused_by_name() -> None:
    task, scores = small()
    with pytest.raises(ValueError, match="fractions that rise within"):
        task.curve(scores, fractions=(0.5, 0.1))
    with pytest.raises(ValueError, match="scores of the model's own graph"):
        task.curve(scores.isel(sender=slice(1)))
    with pytest.raises(
        ValueError, match=rf"value of scores must have {len(task.graph)} finite numbers, got 0"
    ):
        task.curve(scores.assign(value=scores.value * np.nan))
    with pytest.raises(ValueError, match="a circuit of EdgeGraph"):
        task.evaluated(Circuit(EdgeGraph.of(CONFIGS["gpt2"]), {"L0.resid->L0.mlp": 1.0}))
    with pytest.raises(ValueError, match="draws must be a number, at least 0, got -1"):
        task.curve(scores, draws=-1)
    with pytest.raises(ValueError, match="subsets must be a number, at least 1, got 0"):
        task.evaluated(Circuit(task.graph, {"L0.resid->L0.mlp": 1.0}), subsets=0)
    constant = replace(task, metric=of_logits(lambda x: 0 * x[:, 0, 0]))
    with pytest.raises(ValueError, match="nothing to explain"):
        constant.curve(scores, draws=0)
