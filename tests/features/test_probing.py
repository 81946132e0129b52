"""Sparse probes: selectors find a planted support and nothing in noise, scores are scikit-learn's, nothing leaks."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
import xarray as xr
from jaxtyping import TypeCheckError
from scipy import stats
from sklearn import metrics
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from interp import Batch, Edit, HookedTransformer, Stream
from interp.data import open_source
from interp.edits import Zero
from interp.features import probe, probe_neurons
from interp.features.probing import (
    ExampleSplit,
    ProbePosition,
    Selection,
    intervals,
    pooled,
    scores,
    selected,
)
from interp.model import Read, Tap
from interp.passes.schedule import answer_together
from interp.runs import store_activations
from tests.batches import in_batches
from tests.configs import build, some_tokens
from tests.loops import over
from tests.tiny import CORPUS, hooked
from tests.tolerances import assert_close

SELECTIONS: tuple[Selection, ...] = get_args(Selection)
INFORMED = tuple(s for s in SELECTIONS if s != "random")
SUPPORT, NEURONS, EXAMPLES = 4, 30, 400
METRICS = ("f1", "precision", "recall", "accuracy", "balanced_accuracy", "mcc")


def planted(shifts: Sequence[float], seed: int = 0) -> tuple[Tensor, Tensor, list[int]]:
    """The synthetic design of Gurnee et al. 2023: GELU (by the sigmoid) of Gaussian neurons, some shifted.

    Returns activations, labels, and the neurons shifted, one per shift (in standard deviations).
    """
    generator = torch.Generator().manual_seed(seed)
    labels = torch.rand(EXAMPLES, generator=generator) < 0.4
    support = torch.randperm(NEURONS, generator=generator)[: len(shifts)]
    noise = torch.randn(EXAMPLES, NEURONS, generator=generator)
    noise[:, support] += labels[:, None] * torch.tensor(shifts)
    return noise * torch.sigmoid(1.702 * noise), labels, support.tolist()


# -- selectors


@pytest.mark.parametrize("select", INFORMED)
def test_a_selector_recovers_a_planted_support_of_shifted_neurons(select: Selection) -> None:
    for seed in range(3):
        x, y, support = planted([1.5] * SUPPORT, seed)
        few, all_of_them = selected(x, y, [2, SUPPORT], select=select, seed=seed)
        assert set(all_of_them.tolist()) == set(support)
        assert len(few) == 2 and set(few.tolist()) < set(support)


@pytest.mark.parametrize("select", SELECTIONS)
def test_without_a_shift_a_selector_finds_the_support_as_often_as_chance(select: Selection) -> None:
    """Hits of one draw are hypergeometric; their sum over repetitions stays within four standard deviations."""
    repetitions, hits = 12, 0
    for seed in range(repetitions):
        x, y, support = planted([0.0] * SUPPORT, seed)
        hits += len(set(selected(x, y, [SUPPORT], select=select, seed=100 + seed)[0].tolist()) & set(support))
    chance = stats.hypergeom(NEURONS, SUPPORT, SUPPORT)
    assert abs(hits - repetitions * chance.mean()) < 4 * chance.std() * repetitions**0.5


@pytest.mark.parametrize("select", INFORMED)
def test_the_best_neuron_comes_first(select: Selection) -> None:
    # a machine looks at no example beyond its margin, so one neuron must not tell nearly all of them
    x, y, support = planted([0.7, 2.0, 1.3] if select == "svm" else [1.0, 4.0, 2.0])
    chosen = selected(x, y, [3], select=select)[0].tolist()
    assert chosen == [support[1], support[2], support[0]]


def test_scores_of_single_neurons_are_the_textbooks() -> None:
    x, y, _ = planted([0.3, 0.2])
    pairs = [(x[y, i].double().numpy(), x[~y, i].double().numpy()) for i in range(NEURONS)]
    difference = [abs(a.mean() - b.mean()) for a, b in pairs]
    f = [stats.f_oneway(a, b).statistic for a, b in pairs]
    for select, expected in (("mean_difference", difference), ("f_statistic", f)):
        order = sorted(range(NEURONS), key=lambda i: -expected[i])
        assert selected(x, y, [NEURONS], select=select)[0].tolist() == order


def test_mutual_information_sees_what_no_mean_shows() -> None:
    x, y, _ = planted([])
    x[:, 7] = torch.randn(EXAMPLES) * torch.where(y, 3.0, 0.3)
    x[:, 7] -= torch.where(y, x[y, 7].mean(), x[~y, 7].mean())
    assert selected(x, y, [1], select="mutual_information")[0].tolist() == [7]
    assert selected(x, y, [NEURONS], select="mean_difference")[0].tolist()[-1] == 7


@pytest.mark.parametrize(
    ("select", "expected"), [("f_statistic", {0, 1}), ("l1", {0, 2}), ("adaptive", {0, 2})]
)
def test_selectors_that_fit_neurons_together_leave_out_a_noisy_copy(
    select: Selection, expected: set[int]
) -> None:
    x, y, _ = planted([])
    noise = torch.randn(EXAMPLES, 3)
    x[:, 0] = 2.0 * y + noise[:, 0]
    x[:, 1] = x[:, 0] + 0.5 * noise[:, 1]
    x[:, 2] = 1.2 * y + noise[:, 2]
    assert set(selected(x, y, [2], select=select)[0].tolist()) == expected


@pytest.mark.parametrize("select", INFORMED)
def test_constant_neurons_are_chosen_last(select: Selection) -> None:
    x, y, support = planted([1.5])
    x[:, [i for i in range(NEURONS) if i not in (support[0], 5, 6)]] = 0.1
    x[:, 5] = y.float()
    chosen = selected(x, y, [3], select=select)[0].tolist()
    assert set(chosen[:2]) == {support[0], 5} and (chosen[2] == 6 or select == "mutual_information")


def test_shared_shift_and_scale_of_neurons_change_no_weighing_choice() -> None:
    x, y, _ = planted([0.5, 0.6, 0.8])
    scale = 2.0 ** torch.arange(NEURONS).remainder(5)
    for select in ("f_statistic", "l1", "adaptive"):
        one, other = (selected(each, y, [3], select=select)[0] for each in (x, x * scale + 3.0))
        assert torch.equal(one, other)


def test_what_cannot_be_selected_is_refused() -> None:
    x, y, _ = planted([])
    with pytest.raises(
        ValueError, match=r"sizes from 1 to 30, the neurons there are, are required, got \[1, 31\]"
    ):
        selected(x, y, [1, 31])
    with pytest.raises(ValueError, match="all labels are the same"):
        selected(x, torch.ones_like(y), [1])


# -- scores


def random_guesses() -> list[tuple[np.ndarray, np.ndarray]]:
    generator = np.random.default_rng(0)
    pairs = [(generator.random(17) < 0.4, generator.random(17) < p) for p in (0.1, 0.4, 0.9)]
    truth = pairs[0][0]
    return [*pairs, (truth, truth), (truth, ~truth), (truth, truth & False), (truth, truth | True)]


@pytest.mark.parametrize("case", range(7))
def test_scores_are_those_of_scikit_learn(case: int) -> None:
    truth, guess = random_guesses()[case]
    (tn, fp), (fn, tp) = metrics.confusion_matrix(truth, guess, labels=[False, True])
    found = scores(torch.tensor([tp, fp, fn, tn]))
    expected = {
        "f1": metrics.f1_score(truth, guess, zero_division=0),
        "precision": metrics.precision_score(truth, guess, zero_division=0),
        "recall": metrics.recall_score(truth, guess),
        "accuracy": metrics.accuracy_score(truth, guess),
        "balanced_accuracy": metrics.balanced_accuracy_score(truth, guess),
        "mcc": metrics.matthews_corrcoef(truth, guess),
    }
    assert {name: float(value) for name, value in found.items()} == pytest.approx(expected, abs=1e-12)


def test_intervals_of_scores_hold_the_true_value_nineteen_times_in_twenty() -> None:
    """Test sets drawn from a known distribution of (TP, FP, FN, TN); 600 of them, a coverage is known to +- 0.009."""
    truth = torch.tensor([30, 10, 14, 46])
    drawn = np.random.default_rng(1).multinomial(100, truth.numpy() / 100, size=600)
    low, high = intervals(torch.from_numpy(drawn), draws=400)
    for name, value in scores(truth).items():
        covered = ((low[name] <= value) & (value <= high[name])).double().mean()
        assert 0.92 <= float(covered) <= 0.98, name


@pytest.mark.slow
def test_the_bootstrap_is_that_of_resampled_examples() -> None:
    counts, generator = [12, 4, 3, 21], np.random.default_rng(0)
    truth, guess = np.repeat([1, 0, 1, 0], counts), np.repeat([1, 1, 0, 0], counts)
    picks = generator.integers(0, 40, (1000, 40))
    slow = [metrics.matthews_corrcoef(truth[pick], guess[pick]) for pick in picks]
    low, high = intervals(torch.tensor([counts]), draws=20_000)
    for end, quantile in ((low, 0.025), (high, 0.975)):
        near = np.quantile(slow, [max(quantile - 0.02, 0), min(quantile + 0.02, 1)])
        assert near[0] <= float(end["mcc"][0]) <= near[1]


def test_a_perfect_probe_of_few_examples_is_not_certain() -> None:
    low, high = intervals(torch.tensor([[8, 0, 0, 8]]))
    expected = stats.binomtest(8, 8).proportion_ci(0.95, method="wilson").low
    assert float(low["recall"][0]) == pytest.approx(expected) and float(high["recall"][0]) == 1.0
    assert float(low["f1"][0]) == pytest.approx(2 * expected / (1 + expected))
    assert float(low["balanced_accuracy"][0]) == pytest.approx(1 - 2**0.5 / 2 * (1 - expected))


# -- probes


def of(found: xr.Dataset, score: str, variable: str = "value") -> xr.DataArray:
    return found[variable].sel(score=score)


@pytest.mark.parametrize("select", SELECTIONS)
def test_a_probe_is_scikit_learns_on_the_neurons_chosen(select: Selection) -> None:
    x, y, _ = planted([0.8, 0.5, 0.4])
    found = probe(x, y, sizes=(1, 3), select=select, shuffles=0, seed=3)
    split = ExampleSplit.of(x, y, 0.3, 3)
    for k in (1, 3):
        neurons = found.neuron.sel(n_neurons=k).values[:k]
        model = make_pipeline(StandardScaler(), LogisticRegression(class_weight="balanced", max_iter=1000))
        model.fit(split.train_x[:, neurons].double().numpy(), split.train_y.numpy())
        guess = model.predict(split.test_x[:, neurons].double().numpy())
        assert float(of(found, "f1").sel(n_neurons=k)) == pytest.approx(metrics.f1_score(split.test_y, guess))
        assert float(of(found, "mcc").sel(n_neurons=k)) == pytest.approx(
            metrics.matthews_corrcoef(split.test_y, guess)
        )
        weights = model[-1].coef_[0]
        np.testing.assert_allclose(found.weight.sel(n_neurons=k).values[:k], weights, rtol=1e-4, atol=1e-4)
    assert found.neuron.sel(n_neurons=1).values[1:].tolist() == [-1, -1]
    assert np.isnan(found.weight.sel(n_neurons=1).values[1:]).all()


def test_a_split_sets_aside_a_share_of_each_class_and_loses_no_example() -> None:
    x = torch.arange(50.0)[:, None]
    y = torch.arange(50) % 5 == 0
    split = ExampleSplit.of(x, y, 0.3, 0)
    assert (int(split.test_y.sum()), len(split.test_y)) == (3, 15)
    assert sorted([*split.train_x[:, 0].tolist(), *split.test_x[:, 0].tolist()]) == list(range(50))
    assert torch.equal(split.train_x[:, 0] % 5 == 0, split.train_y)
    assert not torch.equal(ExampleSplit.of(x, y, 0.3, 1).test_x, split.test_x)


@pytest.mark.parametrize("select", SELECTIONS)
def test_test_examples_have_no_part_in_choice_or_fit(select: Selection) -> None:
    x, y, _ = planted([0.5])
    split = ExampleSplit.of(x, y, 0.3, 0)
    held_out = (x[:, None] == split.test_x[None]).all(-1).any(1)
    changed = torch.where(held_out[:, None], 5.0 * torch.randn_like(x) + 7.0 * y[:, None], x)
    one, other = (probe(each, y, sizes=(2,), select=select, shuffles=0) for each in (x, changed))
    assert int(held_out.sum()) == one.attrs["test"]
    np.testing.assert_array_equal(one.neuron, other.neuron)
    np.testing.assert_array_equal(one.weight, other.weight)
    assert float(of(one, "f1")[0]) != float(of(other, "f1")[0])


def test_random_labels_are_predicted_at_chance_despite_the_choice() -> None:
    honest, cheating = [], []
    for seed in range(20):
        x, y = torch.randn(60, 300), torch.rand(60) < 0.5
        honest.append(
            float(probe(x, y, sizes=(8,), shuffles=0, seed=seed).value.sel(score="balanced_accuracy")[0])
        )
        seen = selected(x, y, [8])[0]
        cheating.append(
            float(
                probe(x[:, seen], y, sizes=(8,), shuffles=0, seed=seed).value.sel(score="balanced_accuracy")[
                    0
                ]
            )
        )
    error = np.std(honest, ddof=1) / 20**0.5
    assert abs(np.mean(honest) - 0.5) < 3 * error
    assert np.mean(cheating) > 0.5 + 5 * error


def test_a_planted_feature_stands_clear_of_the_null_and_noise_does_not() -> None:
    x, y, support = planted([3.0, 3.0])
    found = probe(x, y, sizes=(1, 2), shuffles=8)
    assert set(found.neuron.values[1].tolist()) == set(support)
    assert float(of(found, "f1", "low").min()) > float(of(found, "f1", "null").max()) + 0.2
    assert abs(float(of(found, "balanced_accuracy", "null").mean()) - 0.5) < 0.1
    assert (found.low <= found.value).all() and (found.value <= found.high).all()
    assert (found.null_sd > 0).all() and (found.n == found.attrs["test"]).all()


def test_null_is_the_mean_of_the_procedure_on_shuffled_training_labels() -> None:
    x, y, _ = planted([1.0])
    found = probe(x, y, sizes=(1, 2), shuffles=3, seed=4)
    split, generator = ExampleSplit.of(x, y, 0.3, 4), torch.Generator().manual_seed(4)
    slow = []
    for _ in range(3):
        order = torch.randperm(len(split.train_y), generator=generator)
        chosen = selected(split.train_x, split.train_y[order], [1, 2])
        fitted = [
            make_pipeline(StandardScaler(), LogisticRegression(class_weight="balanced")).fit(
                split.train_x[:, c].double().numpy(), split.train_y[order].numpy()
            )
            for c in chosen
        ]
        guesses = [
            m.predict(split.test_x[:, c].double().numpy()) for m, c in zip(fitted, chosen, strict=True)
        ]
        slow.append([metrics.f1_score(split.test_y, guess) for guess in guesses])
    np.testing.assert_allclose(of(found, "f1", "null"), np.mean(slow, 0), atol=1e-12)
    np.testing.assert_allclose(of(found, "f1", "null_sd"), np.std(slow, 0, ddof=1), atol=1e-12)
    rare = (1 + (np.array(slow) >= of(found, "f1", "value").values).sum(0)) / 4
    np.testing.assert_allclose(of(found, "f1", "p"), rare)
    assert probe(x, y, sizes=(1,), shuffles=0).p.isnull().all()


def test_labels_that_say_nothing_have_a_small_p_as_rarely_as_it_says() -> None:
    """Exact by exchange of labels: of 60 draws of noise as many have p = .25 as a coin of a quarter gives."""
    generator = torch.Generator().manual_seed(0)
    p = []
    for seed in range(60):
        x, y = torch.randn(40, 3, generator=generator), torch.rand(40, generator=generator) < 0.5
        found = probe(x, y, sizes=(1,), shuffles=3, seed=seed, test_share=0.5)
        p.append(float(of(found, "mcc", "p")[0]))
    assert 2 <= sum(each <= 0.25 for each in p) <= 28  # four standard deviations
    assert set(p) <= {0.25, 0.5, 0.75, 1.0}


def test_bad_examples_are_refused() -> None:
    x, y, _ = planted([])
    for settings in ({"shuffles": -5}, {"sizes": (-1,)}, {"sizes": ()}):
        with pytest.raises(
            ValueError, match="shuffles of 0 or more and sizes of at least one neuron are required"
        ):
            probe(x, y, **settings)
    with pytest.raises(
        (ValueError, TypeCheckError),
        match=r"one label per example is required, got \[399\] for 400|parameters of",
    ):
        probe(x, y[1:])
    with pytest.raises(ValueError, match=r"labels must be true or false \(1 or 0\), got \[0, 1, 2\]"):
        probe(x, torch.arange(400) % 3)
    with pytest.raises(
        ValueError, match=r"1 positive and 399 negative examples with a test share of 0.3 do not suffice"
    ):
        probe(x, torch.arange(400) == 3)
    with pytest.raises(ValueError, match="finite activations are required"):
        probe(torch.where(x == x[0, 0], torch.nan, x), y)


# -- models


def vectors(model: HookedTransformer, row: list[int], site: str, pos: ProbePosition, bos: bool) -> Tensor:
    """The vector of one prompt that the model sees alone."""
    tap = Tap([Read(site)])
    model.transformer(torch.tensor([row]), tap)
    values = tap.values[tap.reads[0]][0]
    return values[int(bos) :].mean(0) if pos == "mean" else values[pos]


def all_pooled(
    model: HookedTransformer, batch: Batch, site: str, pos: ProbePosition, size: int = 32
) -> Tensor:
    """The vectors of all rows, some at a time."""
    network = model.transformer
    steps = ({"": pooled(network, part, [site], pos)} for part in batch.split(size))
    return torch.cat([answer_together(network, each)[""][site] for each in steps])


@over("pos", ["mean", -1, 0, 2, -2])
@over("bos", [True, False])
def test_the_vector_of_a_prompt_does_not_depend_on_padding_or_batches(pos: ProbePosition, bos: bool) -> None:
    model = HookedTransformer(build("gpt2"))
    rows = [[3, 1, 4, 1, 5, 9], [2, 7, 1], [1, 8, 2, 8]]
    for site in ("blocks.1.mlp.hook_post", "blocks.0.hook_resid_pre"):
        expected = torch.stack([vectors(model, row, site, pos, bos) for row in rows])
        for side in ("left", "right"):
            batch = Batch.of(rows, side=side, bos=bos)
            for size in (1, 2, 32):
                assert_close(all_pooled(model, batch, site, pos, size), expected)


def driven(model: HookedTransformer, layer: int, neuron: int) -> tuple[Tensor, list[int]]:
    """Prompts that drive a neuron most and least, labelled by that."""
    tokens = some_tokens(rows=160)
    order = all_pooled(model, Batch(tokens), f"blocks.{layer}.mlp.hook_post", "mean")[:, neuron].argsort()
    return tokens[torch.cat((order[:24], order[-24:]))], [0] * 24 + [1] * 24


def test_a_neuron_that_carries_the_feature_is_found_in_its_layer() -> None:
    """The feature is the neuron's own activity: prompts are those that drive it most and least."""
    model, layer, neuron = HookedTransformer(build("gpt2", torch.float32)), 1, 17
    prompts, labels = driven(model, layer, neuron)
    found = probe_neurons(model, prompts, labels, sizes=(1, 2), select="f_statistic", shuffles=2)
    assert found.value.dims == ("layer", "n_neurons", "score")
    assert found.neuron.dims == ("layer", "n_neurons", "rank")
    assert found.layer.values.tolist() == [0, 1] and found.attrs["site"] == "post"
    assert int(found.neuron.sel(layer=layer, n_neurons=1)[0]) == neuron
    assert found.part.sel(layer=layer, n_neurons=1).values.tolist() == ["L1N17", ""]
    assert float(of(found, "f1").sel(layer=layer, n_neurons=1)) == 1.0
    full = probe_neurons(
        model, prompts, labels, site="mlp.hook_post", sizes=(1, 2), select="f_statistic", shuffles=2
    )
    assert full.drop_attrs().identical(found.drop_attrs())


def test_every_layer_is_probed_as_its_activations_are() -> None:
    model = HookedTransformer(build("gpt2"))
    tokens, labels = some_tokens(rows=40), torch.arange(40) % 2
    found = probe_neurons(model, tokens, labels, site="resid_pre", pos=-1, sizes=(1, 3), shuffles=2, seed=1)
    for layer in range(2):
        x = all_pooled(model, Batch(tokens), f"blocks.{layer}.hook_resid_pre", -1)
        alone = probe(x, labels, sizes=(1, 3), shuffles=2, seed=1)
        for name in alone.data_vars:
            np.testing.assert_array_equal(found[name].sel(layer=layer), alone[name], err_msg=str(name))


def test_rows_keep_their_labels_in_a_stream() -> None:
    model = HookedTransformer(build("gpt2"))
    tokens, labels = some_tokens(rows=40), torch.arange(40) % 2 == 0
    options = {"sizes": (1, 2), "shuffles": 1}
    found = probe_neurons(model, in_batches(model, tokens, 8), labels, **options)  # type: ignore[arg-type]
    source = Stream(open_source(tokens), model.text, tokens_per_batch=45, rows_per_window=7)
    streamed = probe_neurons(model, source, labels, **options)  # type: ignore[arg-type]
    xr.testing.assert_allclose(streamed, found)
    edited = probe_neurons(model.edited(Edit("L1.post", Zero())), tokens, labels, **options)  # type: ignore[arg-type]
    assert (edited.weight.sel(layer=1).fillna(0) == 0).all()
    with pytest.raises(ValueError, match="probe_neurons holds answers or labels for 40 prompts, got 39 rows"):
        probe_neurons(model, tokens[1:], labels)


def test_texts_are_prompts_and_a_store_gives_the_same_activations(tmp_path: Path) -> None:
    model, site = hooked("gpt2"), "blocks.0.mlp.hook_post"
    texts = [*CORPUS, "The capital of Italy"]
    batch = model.text.batch(texts)
    store = store_activations(model, texts, [site], tmp_path, dtype=torch.float32, pos="last", batch_size=2)
    assert store.read("row").tolist() == [0, 1, 2, 3]
    assert_close(store.read(site), all_pooled(model, batch, site, -1).float())


def test_prompts_that_cannot_be_probed_are_refused() -> None:
    model = HookedTransformer(build("gpt2"))
    batch, labels = Batch.of([[3, 1, 4], [2, 7]] * 4), [0, 1] * 4
    for wanted in (2, -3):
        with pytest.raises(
            IndexError, match=f"position {wanted} is required of every row, but row 1 has 2 tokens"
        ):
            probe_neurons(model, batch, labels, pos=wanted)
    with pytest.raises(ValueError, match="one text per row, this batch is packed"):
        probe_neurons(model, Batch.packed([[3, 1], [2]] * 4, 4), labels)
    with pytest.raises(ValueError, match="a token besides BOS is required"):
        probe_neurons(model, replace(Batch.of([[3], [2]] * 4), bos=True), labels)
    with pytest.raises(ValueError, match=r"'blocks.0.attn.hook_z' is \[batch row, position, query head"):
        probe_neurons(model, batch, labels, site="z")
    with pytest.raises(ValueError, match=r"sizes from 1 to 40, the neurons there are, are required"):
        probe_neurons(model, batch, labels, sizes=(1, 41))
    with pytest.raises(KeyError, match=r"has no 'blocks.0.mlp.hook_post'"):
        probe_neurons(HookedTransformer(build("attention-only")), batch, labels)
