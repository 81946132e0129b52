"""The board: its scores against slow and foreign ones, methods that know everything or nothing, the adversary."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score
from torch import Tensor

from experiments.board import METHODS, MODES, PROGRAMS, as_result, benchmark, cases, judged, measured
from experiments.board.__main__ import main
from experiments.board.judge import ROUNDS, _Bench, average_precision, expected_among, restored
from interp.causal.graph import EdgeGraph
from interp.circuits import circuit_curve, recovery, score_edges
from interp.hooked import HookedTransformer
from interp.lab.rasp.compiler import compile
from interp.lab.rasp.programs import PROGRAMS as WRITTEN
from interp.passes.metrics import Metric, logit_difference
from interp.zoo.planted import PLANTED


def test_average_precision_is_that_of_scikit_learn_with_equal_scores_too() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        values = torch.randint(6, (30,), generator=generator).double()
        truth = torch.rand(30, generator=generator) < 0.3
        truth[0] = True
        assert average_precision(values, truth) == pytest.approx(
            average_precision_score(truth, values), abs=1e-12
        )


def test_equal_scores_are_drawn_by_lot() -> None:
    values = torch.tensor([[3.0, 1.0, 1.0], [1.0, 0.0, -torch.inf]])
    flat = values.flatten()[:5]
    counts, orders = torch.zeros(5), 0
    for order in itertools.permutations(range(5)):
        if all(flat[a] >= flat[b] for a, b in itertools.pairwise(order)):
            orders += 1
            counts[list(order[:2])] += 1
    expected = torch.cat((counts / orders, torch.zeros(1))).reshape(2, 3).double()
    torch.testing.assert_close(expected_among(values, 2), expected)


def test_the_adversary_takes_the_worst_edge_again_and_again() -> None:
    harm = torch.tensor([[0.0, 0.1, -0.3], [0.05, 0.2, 0.4]])
    kept = torch.tensor([[True, False, False], [False, False, False]])

    def ask(masks: Tensor) -> Tensor:
        return 1 - (masks * harm).sum((1, 2)).double()

    assert ROUNDS == 3
    assert restored(ask, torch.ones_like(kept), kept) == pytest.approx(1 - 0.4 - 0.2 - 0.1)
    assert restored(ask, kept, kept) == pytest.approx(1.0)
    assert restored(lambda masks: 1 + masks.sum((1, 2)).double(), torch.ones_like(kept), kept) == 2.0


@pytest.mark.parametrize("program", ["two_hop", "backup", "planted either"])
def test_a_method_that_knows_the_circuit_has_the_best_of_every_score(program: str) -> None:
    (case,) = cases([program], seeds=1, pairs=4)
    bench = _Bench.of(case)

    def oracle(model: HookedTransformer, clean: Tensor, corrupt: Tensor, metric: Metric) -> Tensor:
        return -bench.truth.double()

    found = judged(case, {"oracle": oracle, "random": METHODS["random"]})
    best = found.value.sel(attribution="oracle")
    assert [float(best.sel(score=name)) for name in ("auroc", "ap", "recall")] == [1.0, 1.0, 1.0]
    shares = found.found.sel(attribution="oracle").values
    assert (shares[found.edges.values > 0] == 1).all()
    assert np.isnan(shares[found.edges.values == 0]).all()
    assert float(best.sel(score="faithfulness")) > 0.9
    assert float(best.sel(score="accuracy")) == 1.0
    assert float(best.sel(score="passes")) == 0.0
    assert int(found.edges.sum()) == len(case.planted.edges)


def test_scores_are_those_of_recovery_and_of_circuit_curve() -> None:
    (case,) = cases(["two_hop"], seeds=1, pairs=4)
    bench = _Bench.of(case)
    ours = judged(case, {"exact": METHODS["exact"]}).value.sel(attribution="exact")
    table = score_edges(
        bench.model, bench.clean, bench.corrupt, metric=bench.metric, method="exact", direction="noise"
    )
    theirs = recovery([table], case.planted.edges).value.sel(attribution="exact")
    assert float(ours.sel(score="auroc")) == float(theirs.sel(score="auroc"))
    assert float(ours.sel(score="recall")) == pytest.approx(float(theirs.sel(score="recall")))
    count = len(bench.graph)
    fractions = [min(1.0, (n + 0.5) / count) for n in range(1, count + 1)]
    for score, rank in (("cpr", "helpful"), ("cmd", "magnitude")):
        curve = circuit_curve(
            bench.model, bench.other_clean, bench.other_corrupt, table, metric=bench.other_metric, rank=rank,  # type: ignore[arg-type]
            fractions=fractions, draws=0,
        )  # fmt: skip
        f = np.concatenate(([0.0], curve.value.sel(circuit="found", score="faithfulness").values))
        f = f if score == "cpr" else abs(f - 1)
        assert float(ours.sel(score=score)) == pytest.approx(np.trapezoid(f, dx=1 / count), abs=1e-5)
        if score == "cmd":
            assert float(ours.sel(score="faithfulness")) == pytest.approx(
                1 - f[len(case.planted.edges)], abs=1e-5
            ) or (
                float(ours.sel(score="faithfulness"))
                == pytest.approx(1 + f[len(case.planted.edges)], abs=1e-5)
            )


@pytest.mark.parametrize("name", ["backup", "either"])
def test_redundant_edges_are_the_hidden_ones_of_the_planted_models(name: str) -> None:
    (case,) = cases([f"planted {name}"], seeds=1, pairs=8)
    bench = _Bench.of(case)
    redundant = (bench.kinds == list(MODES).index("redundancy")).nonzero().tolist()
    names = {f"{bench.graph.senders[s]}->{bench.graph.receivers[r]}" for s, r in redundant}
    assert names == {str(edge) for edge in case.planted.hidden}


def test_the_kinds_of_edges_follow_their_definitions_one_by_one() -> None:
    (case,) = cases(["suppression"], seeds=1, pairs=8)
    bench = _Bench.of(case)
    gradient = METHODS["eap"](bench.model, bench.clean, bench.corrupt, bench.metric)
    whole = (bench.exact.corrupt - bench.exact.clean).values
    for s, sender in enumerate(bench.graph.senders):
        for r, receiver in enumerate(bench.graph.receivers):
            kind = int(bench.kinds[s, r])
            if f"{sender}->{receiver}" not in case.planted.edges:
                assert kind == -1
                continue
            each = bench.exact["each"].values[:, s, r]
            mean, size = each.mean(), abs(each).mean()
            if (abs(each / whole) < 0.05).all():
                assert list(MODES)[kind] == "redundancy"
            elif abs(mean) <= size / 4:
                assert list(MODES)[kind] == "cancellation"
            elif mean * whole.mean() < 0:
                assert list(MODES)[kind] == "suppression"
            elif abs(float(gradient.value[s, r])) < abs(mean) / 10:
                assert list(MODES)[kind] == "saturation"
            else:
                assert list(MODES)[kind] == "plain"


def test_cost_is_counted_in_passes() -> None:
    def three(model: HookedTransformer, clean: Tensor, corrupt: Tensor, metric: Metric) -> Tensor:
        for _ in range(3):
            model.transformer(clean)
        return torch.ones(EdgeGraph.of(model.cfg).exists.shape)

    found = judged(next(cases(["two_hop"], pairs=4)), {"three": three})
    assert float(found.value.sel(score="passes")[0]) == 3.0


def test_scores_of_the_wrong_shape_or_without_a_number_are_refused() -> None:
    case = next(cases(["two_hop"], pairs=4))
    shape = EdgeGraph.of(case.planted.model.config).exists.shape
    with pytest.raises(ValueError, match="mine gave"):
        judged(case, {"mine": lambda *_: torch.ones(2, 2)})
    with pytest.raises(ValueError, match="finite"):
        judged(case, {"mine": lambda *_: torch.full(shape, torch.nan)})
    with pytest.raises(ValueError, match="at least one of methods"):
        judged(case, {})


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_model_of_the_board_answers_its_pairs(program: str) -> None:
    planted = next(cases([program], pairs=4)).planted
    metric = logit_difference(planted.answer, planted.wrong)
    model = HookedTransformer(planted.model)
    table = score_edges(model, planted.clean, planted.corrupt, metric=metric, method="eap")
    assert float(table.clean.min()) > 0
    assert 0 < len(planted.edges) < table.attrs["edges"]


@pytest.mark.parametrize("program", ["sort", "addition", "brackets"])
def test_random_heads_spill_and_leave_the_answers(program: str) -> None:
    for seed in range(3):
        exact, planted = compile(WRITTEN[program]()), PROGRAMS[program](seed, 4)
        noisy = replace(exact, model=planted.model)
        found = noisy.check(500)
        assert found.wrong == 0
        assert 0 < 0.7 * exact.check(500).margin < found.margin
        assert planted.model.config.n_heads == exact.model.config.n_heads + 2


@pytest.mark.slow
def test_means_are_over_programs_of_means_over_seeds() -> None:
    names = list(PLANTED)[:1]
    found = list(
        measured([f"planted {names[0]}", "two_hop"], methods={"eap": METHODS["eap"]}, seeds=2, pairs=4)
    )
    result = as_result(found)
    auroc = [float(each.value.sel(score="auroc")[0]) for each in found]
    expected = (sum(auroc[:2]) / 2 + sum(auroc[2:]) / 2) / 2
    assert float(result.value.sel(score="auroc")[0]) == pytest.approx(expected)
    assert np.isnan(result.low.sel(score=["accuracy", "passes", "seconds"]).values).all()
    assert not np.isnan(result.low.sel(score="restoration").values).any()
    assert np.isnan(as_result(found[:1]).low.values).all()
    assert np.isnan(as_result(found[:3]).low.values).all()


def test_the_interval_is_students_t_over_seeds() -> None:
    from scipy import stats

    one = judged(next(cases(["two_hop"], pairs=4)), {"random": METHODS["random"]})

    def ends(rows: np.ndarray) -> tuple[float, float, float]:
        several = []
        for name, row in zip("abcdefghi", rows, strict=False):
            for value in row:
                several.append(one.copy(deep=True).assign_attrs(program=name))
                several[-1].value.values[:] = value
        found = as_result(several).sel(score="ap", attribution="random")
        return float(found.value), float(found.low), float(found.high)

    alone = np.random.default_rng(0).uniform(size=(1, 9))
    low, high = stats.t.interval(0.95, 8, alone.mean(), stats.sem(alone[0]))
    assert ends(alone) == pytest.approx((alone.mean(), low, high))
    two = np.random.default_rng(1).uniform(
        size=(2, 5)
    )  # the mean of two: Welch's interval of a difference, halved
    welch = stats.ttest_ind(two[0], -two[1], equal_var=False).confidence_interval(0.95)
    assert ends(two) == pytest.approx((two.mean(), welch.low / 2, welch.high / 2))
    assert ends(np.full((3, 2), 0.5)) == (0.5, 0.5, 0.5)


@pytest.mark.slow
def test_an_interrupted_board_goes_on(tmp_path: Path) -> None:
    calls = []

    def mine(model: HookedTransformer, clean: Tensor, corrupt: Tensor, metric: Metric) -> Tensor:
        calls.append(1)
        return METHODS["random"](model, clean, corrupt, metric)  # type: ignore[return-value]

    first = benchmark(["two_hop", "max"], methods={"mine": mine}, seeds=1, pairs=4, folder=tmp_path)
    next(tmp_path.glob("max*")).unlink()
    again = benchmark(["two_hop", "max"], methods={"mine": mine}, seeds=1, pairs=4, folder=tmp_path)
    assert len(calls) == 3
    scores = [name for name in first.score.values if name != "seconds"]
    np.testing.assert_array_equal(first.value.sel(score=scores), again.value.sel(score=scores))
    file = next(tmp_path.glob("max*"))
    whole = file.read_text()
    for text, said in (("{", "JSON"), (whole.replace('"edges"', '"edge"'), "no result of this board")):
        file.write_text(text)
        with pytest.raises(ValueError, match=said):
            benchmark(["max"], methods={"mine": mine}, seeds=1, pairs=4, folder=tmp_path)


def test_the_command_prints_both_tables_and_writes_every_score(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "board.csv"
    asked = [
        "two_hop",
        "--seeds",
        "1",
        "--pairs",
        "4",
        "--methods",
        "eap",
        "random",
        "--csv",
        str(file),
    ]
    assert main(asked) == 0
    said = capsys.readouterr().out
    assert "two_hop, seed 0: AUROC eap" in said
    assert "auroc" in said
    assert "redundancy (0 programs)" in said
    assert len(file.read_text().splitlines()) == 1 + 2 * 10
    assert main(["two_hops"]) == 2
    assert main(["two_hop", "--methods", "magic"]) == 2
