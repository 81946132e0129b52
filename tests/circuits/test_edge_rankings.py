"""Rankings of edges against planted circuits, and against themselves on other prompts."""

import functools
import itertools
import math

import numpy as np
import pytest
import torch
import xarray as xr

from interp import HookedTransformer, frame
from interp.causal import EdgeGraph
from interp.circuits import edge_stability, recovery, score_edges
from interp.circuits.edge_rankings import edge_auroc, resampled
from interp.passes.metrics import logit_difference
from interp.zoo.planted import PLANTED
from tests.configs import CONFIGS

GRAPH = EdgeGraph.of(CONFIGS["gpt2"])
METHODS = ("exact", "eap", "eap-ig-inputs", "clean-corrupted")


def table_of(each: np.ndarray) -> xr.Dataset:
    """Scores of every prompt as a table."""
    each = np.where(GRAPH.exists.numpy(), each, np.nan)
    dims = ("sender", "receiver")
    return xr.Dataset(
        {
            "value": (dims, each.mean(0)), "each": (("prompt", *dims), each),
            "clean": ("prompt", np.ones(len(each))), "corrupt": ("prompt", np.zeros(len(each))),
        },
        coords={
            "sender": list(GRAPH.senders), "receiver": list(GRAPH.receivers), "edge": (dims, GRAPH.exists.numpy()),
        },
        attrs={"edges": len(GRAPH), "method": "made up"},
    )  # fmt: skip


def some_scores(rows: int = 1, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, *GRAPH.exists.shape))


@pytest.mark.parametrize("seed", range(3))
def test_auroc_is_the_share_of_pairs_in_the_right_order(seed: int) -> None:
    scores = np.round(some_scores(seed=seed), 1)
    table, planted = table_of(scores), list(GRAPH.names())[::9]
    size = {e: abs(float(scores[0][GRAPH.index(e)])) for e in GRAPH.names()}
    pairs = list(itertools.product(planted, set(size) - set(planted)))
    right = sum((size[a] > size[b]) + (size[a] == size[b]) / 2 for a, b in pairs)
    assert any(size[a] == size[b] for a, b in pairs)
    assert edge_auroc(table, planted) == pytest.approx(right / len(pairs))


def test_auroc_has_its_ends() -> None:
    planted = list(GRAPH.names())[::9]
    here = GRAPH.chosen(planted).numpy()[None].astype(float)
    assert edge_auroc(table_of(-here), planted) == 1 and edge_auroc(table_of(here - 1), planted) == 0
    assert edge_auroc(table_of(0 * here), planted) == 0.5
    with pytest.raises(ValueError, match="planted edges among others are required, got 0"):
        edge_auroc(table_of(here), [])
    with pytest.raises(ValueError, match="planted edges among others"):
        edge_auroc(table_of(here), ["L1.mlp->L0.mlp"])
    with pytest.raises(KeyError, match="nobody"):
        edge_auroc(table_of(here), ["nobody->L0.mlp"])


@pytest.mark.parametrize("name", PLANTED)
def test_methods_recover_what_is_planted_except_where_the_notes_say_so(name: str) -> None:
    c = PLANTED[name](0, 4)
    model, metric = HookedTransformer(c.model), logit_difference(c.answer, c.wrong)
    ask = functools.partial(score_edges, model, c.clean, c.corrupt, metric=metric)
    tables = [ask(method=m, direction="noise") for m in METHODS]  # type: ignore[arg-type]
    result = recovery(tables, c.edges)
    auroc = result.value.sel(score="auroc").to_series()
    shown = recovery(tables[:1], c.edges - c.hidden)
    assert list(auroc.index) == list(METHODS)
    assert float(shown.value.sel(score="auroc")[0]) == 1 or name in ("backup", "either")
    assert auroc["exact"] > (0.95 if name != "either" else 0.8)
    if name in ("fact_memory", "two_hop"):
        assert (auroc == 1).all()
        assert (result.value.sel(score="recall") == 1).all()
    if name == "induction":  # gradients at a saturated softmax are 0; along the line they are not
        assert auroc["eap"] < 0.8 < auroc["eap-ig-inputs"] < auroc["exact"] == 1
    if name == "either":  # no single edge of a branch shows at the clean prompt, and all do half way
        assert auroc["exact"] < 1 == auroc["eap-ig-inputs"]
    restored = recovery([ask(method="exact")], c.edges).value.sel(score="auroc")
    spare = {"backup": 0.7, "either": 0.8}  # where one way to the answer is enough, the other shows less
    assert float(restored[0]) > spare.get(name, 0.95)


def test_recovery_has_its_chance_levels_and_reads_every_spelling() -> None:
    planted = ["input->m0", "a0.h1->a1.h2<k>"]
    table = table_of(GRAPH.chosen(planted).numpy()[None].astype(float))
    result = recovery([table], planted)
    assert result.value.values.tolist() == [[1, 1]]
    assert result.null.values.tolist() == [[0.5, 2 / len(GRAPH)]] and (result.n == 0).all()
    assert len(frame(result).columns) <= 12
    pairs = math.comb(len(GRAPH), 2)
    assert float(result.p.sel(score="recall")[0]) == pytest.approx(1 / pairs)
    xr.testing.assert_identical(result, recovery([table], ["L0.resid->L0.mlp", "L0H1->L1H2.k"]))


def test_random_circuits_have_a_small_p_as_rarely_as_it_says() -> None:
    """Scores of noise: of 150 circuits drawn at random, p of both scores is the share that does as well."""
    generator, names = np.random.default_rng(0), np.array(list(GRAPH.names()))
    table = table_of(generator.normal(size=(1, *GRAPH.exists.shape)))
    drawn = [recovery([table], list(generator.choice(names, 8, replace=False))) for _ in range(150)]
    values, p = (np.stack([each[name].values[0] for each in drawn]) for name in ("value", "p"))
    for score in range(2):
        share = (values[None, :, score] >= values[:, None, score]).mean(1)
        assert np.abs(share - p[:, score]).max() < 4 * 0.5 / 150**0.5
    assert (p <= 0.05).mean(0).max() < 0.05 + 4 * (0.05 * 0.95 / 150) ** 0.5


def test_edges_that_prompts_agree_on_are_stable_and_those_of_noise_are_not() -> None:
    noise = np.random.default_rng(0).normal(size=(40, *GRAPH.exists.shape))
    strong = 50.0 * GRAPH.chosen(list(GRAPH.names())[:10]).numpy()
    sure, blind = (
        edge_stability(table_of(x), 10, resamples=50) for x in (noise + strong, noise - noise.mean(0))
    )
    assert float(sure.value) == 1 and float(sure.kept.max()) == 1 and float(sure.kept.sum()) == 10
    assert abs(float(blind.value) - float(blind.null)) < 0.05
    assert (np.isnan(sure.kept.values) == ~GRAPH.exists.numpy()).all()
    rows = frame(sure, "kept")
    assert rows.edge.tolist() == list(GRAPH.names())
    assert set(rows.edge[rows.kept == 1]) == set(list(GRAPH.names())[:10])


def test_jaccard_is_the_mean_over_pairs_of_resamples() -> None:
    table = table_of(some_scores(6, seed=2))
    found = edge_stability(table, 12, resamples=8, seed=5)
    weights = resampled(6, 8, np.random.default_rng(5))[1:].numpy()
    sets = []
    for w in weights:
        mean = np.einsum("b,bsr->sr", w, table["each"].values)
        order = np.argsort(-np.nan_to_num(np.abs(mean), nan=-1), axis=None, kind="stable")[:12]
        sets.append(set(order.tolist()))
    pairs = [len(a & b) / len(a | b) for a, b in itertools.combinations(sets, 2)]
    assert float(found.value) == pytest.approx(np.mean(pairs))


def test_resamples_draw_as_many_prompts_as_there_are() -> None:
    weights = resampled(7, 50, np.random.default_rng(0))
    assert torch.allclose(weights.sum(1), torch.ones(51).double())
    assert torch.allclose(weights[0], torch.full((7,), 1 / 7).double())
    counts = weights[1:] * 7
    assert torch.allclose(counts, counts.round()) and float(counts.std()) > 0.5
    assert resampled(1, 3, np.random.default_rng(0))[1:].isnan().all()


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_scores_that_are_no_numbers_rank_nothing(wrong: float) -> None:
    each = some_scores(3)
    for some in (np.full_like(each, wrong), np.where(GRAPH.chosen(list(GRAPH.names())[:1]), wrong, each)):
        table, rest = table_of(some), rf"must have {len(GRAPH)} finite numbers, got \d+"
        with pytest.raises(ValueError, match=f"value of scores {rest}"):
            edge_stability(table, 5, resamples=2)
        with pytest.raises(ValueError, match=f"value of every one of tables {rest}"):
            recovery([table_of(each), table], list(GRAPH.names())[1:9])
    good = table_of(each)
    with pytest.raises(ValueError, match=rf"each of scores must have {3 * len(GRAPH)} finite numbers"):
        edge_stability(good.assign(each=good.each * wrong), 5, resamples=2)
    with pytest.raises(ValueError, match="scores must have finite metrics, clean and corrupt"):
        edge_stability(good.assign(clean=good.clean * wrong), 5, rank="helpful", resamples=2)


def test_what_has_no_meaning_is_refused_by_name() -> None:
    table = table_of(some_scores(3))
    with pytest.raises(ValueError, match="each=True"):
        edge_stability(table.drop_vars("each"), 5)
    with pytest.raises(ValueError, match=f"top must be 1 to {len(GRAPH)} edges, got 0"):
        edge_stability(table, 0)


def test_more_resamples_than_the_memory_holds_are_refused_before_they_are_drawn() -> None:
    words = r"10000000 resamples \(edge_stability: resamples\).*GB of memory are required"
    with pytest.raises(ValueError, match=words):
        edge_stability(table_of(some_scores(6, seed=2)), 5, resamples=10**7)
