"""Directions against closed forms and planted ones; curves against a loop of edited passes; the null against itself."""

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
import torch.nn.functional as F
import xarray as xr
from torch import Tensor

import interp
from interp import HookedTransformer
from interp.causal import Subspace, steering, steering_curve
from interp.causal.steering import band
from interp.data.batch import Batch
from interp.edits import Add, Edit
from interp.features import Dictionary, TopK, probe
from interp.features.probing import held_out, logistic, standard
from interp.metrics import next_token_loss
from interp.model.tap import Read
from interp.passes.observe import observe
from tests.batches import in_batches
from tests.configs import build, some_tokens
from tests.loops import over
from tests.tiny import hooked
from tests.tolerances import assert_close, student95

POSITIVE, NEGATIVE = some_tokens(8, 7), some_tokens(5, 7, seed=1)
LAYERS = (0, 1)
SITES = [f"blocks.{layer}.hook_resid_post" for layer in LAYERS]
METRIC = interp.logit_difference(3, 4)
D = 24


def model(name: str = "gpt2") -> HookedTransformer:
    """One of the small models; it has no tokenizer."""
    return HookedTransformer(build(name), None, name=name)


def states(tokens: Tensor, pos: int = -1) -> Tensor:
    """The stream after every layer at one token `[n, l, d]`, by plain passes."""
    trace = observe(build("gpt2"), tokens, [Read(site) for site in SITES]).trace
    return torch.stack([trace[Read(site)][:, pos] for site in SITES], 1)


def random_directions(n: int = 2, seed: int = 0, length: float = 1.0) -> list[Subspace]:
    """A random direction after each of the first layers."""
    rows = torch.randn(n, 1, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows *= length / rows.norm(dim=-1, keepdim=True)
    return [Subspace(site, row) for site, row in zip(SITES, rows, strict=False)]


def difference(logits: Tensor) -> Tensor:
    return logits[:, -1, 3] - logits[:, -1, 4]


# --- directions ---------------------------------------------------------------------------------------------------


@over("pos", [-1, 2, -3])
def test_a_mean_difference_is_that_of_the_states(pos: int) -> None:
    found = steering(model(), POSITIVE, NEGATIVE, test_share=0.0, pos=pos)
    wanted = states(POSITIVE, pos).mean(0) - states(NEGATIVE, pos).mean(0)
    np.testing.assert_allclose(found.directions.values[:, 0], wanted.numpy(), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(found.norm, wanted.norm(dim=-1), rtol=1e-9)
    every = torch.cat((states(POSITIVE, pos), states(NEGATIVE, pos)))
    np.testing.assert_allclose(found.stream, every.norm(dim=-1).mean(0), rtol=1e-9)
    assert list(found.site.values) == SITES and found.part.values.tolist() == [
        "L0.resid_post",
        "L1.resid_post",
    ]
    assert bool(found.value.isnull().all()) and found.n.values.tolist() == [0, 0]


def test_the_mean_over_tokens_leaves_out_padding_and_bos() -> None:
    one = Batch.of([[1, 5, 6, 7], [1, 8, 9]], bos=True)
    found = steering(model(), one, NEGATIVE, pos="mean", test_share=0.0)
    each = [torch.stack([states(row[None], p)[0] for p in range(1, n)]).mean(0)
            for row, n in ((one.tokens[0], 4), (one.tokens[1, :3], 3))]  # fmt: skip
    other = torch.stack([states(NEGATIVE, p) for p in range(7)]).mean(0).mean(0)
    wanted = torch.stack(each).mean(0) - other
    np.testing.assert_allclose(found.directions.values[:, 0], wanted.numpy(), rtol=1e-9, atol=1e-9)


def test_principal_component_is_that_of_the_covariance_about_the_midpoint() -> None:
    found = steering(model(), POSITIVE, NEGATIVE, method="pca", test_share=0.0)
    for layer in LAYERS:
        one, other = states(POSITIVE)[:, layer].numpy(), states(NEGATIVE)[:, layer].numpy()
        middle, d = (one.mean(0) + other.mean(0)) / 2, one.mean(0) - other.mean(0)
        covariance = sum((x - middle).T @ (x - middle) / len(x) for x in (one, other)) / 2
        u = np.linalg.eigh(covariance)[1][:, -1]
        np.testing.assert_allclose(found.directions.values[layer, 0], (d @ u) * u, rtol=1e-7, atol=1e-9)
        assert found.directions.values[layer, 0] @ d > 0


def test_probes_normal_is_the_gradient_of_its_log_odds() -> None:
    found = steering(model(), POSITIVE, NEGATIVE, method="probe", test_share=0.0)
    labels = torch.arange(13) < 8
    for layer in LAYERS:
        x = torch.cat((states(POSITIVE), states(NEGATIVE)))[:, layer]
        normal = by_newton(x, labels)
        d = x[labels].mean(0) - x[~labels].mean(0)
        ours = torch.from_numpy(found.directions.values[layer, 0])
        assert float(F.cosine_similarity(ours, normal, dim=0)) > 1 - 1e-6
        assert_close(ours @ ours, ours @ d)  # its length is the difference along it
        mean, spread = standard(x)
        weights, _ = logistic((x - mean) / spread, labels)
        listed = probe(x, labels, sizes=(D,), test_share=0.2, shuffles=0)
        assert (
            listed.weight.shape == (1, D)
            and float(F.cosine_similarity(ours, weights / spread, dim=0)) > 1 - 1e-9
        )


def by_newton(x: Tensor, labels: Tensor) -> Tensor:
    """The normal of the balanced logistic regression with penalty |w|^2 / 2, in raw units, by Newton's method."""
    z = (x - x.mean(0)) / x.std(0, correction=0)
    z = torch.cat((z, torch.ones(len(z), 1, dtype=z.dtype)), 1)
    y, n = labels.double(), len(labels)
    weight = torch.where(labels, n / (2 * y.sum()), n / (2 * (1 - y).sum()))
    penalty = torch.ones(z.shape[1], dtype=z.dtype)
    penalty[-1] = 0.0
    w = torch.zeros(z.shape[1], dtype=z.dtype)
    for _ in range(50):
        p = (z @ w).sigmoid()
        gradient = z.T @ (weight * (p - y)) + penalty * w
        hessian = (z.T * (weight * p * (1 - p))) @ z + penalty.diag()
        w = w - torch.linalg.solve(hessian, gradient)
    return w[:-1] / x.std(0, correction=0)


def test_autoencoders_direction_is_the_row_of_the_most_differing_feature() -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = {"W_enc": (D, 40), "b_enc": (40,), "W_dec": (40, D), "b_dec": (D,)}
    sae = Dictionary(
        TopK(3), {n: torch.randn(s, generator=draw, dtype=torch.float64) for n, s in shapes.items()}
    )
    found = steering(
        model(), POSITIVE, NEGATIVE, site=SITES[1], method="dictionary", dictionary=sae, test_share=0.0
    )
    gaps = (sae.encode(states(POSITIVE)[:, 1]).mean(0) - sae.encode(states(NEGATIVE)[:, 1]).mean(0)).detach()
    feature = int(gaps.abs().argmax())
    assert found.attrs["feature"] == feature and found.layer.values.tolist() == [1]
    wanted = gaps[feature] * sae.W_dec[feature].detach()
    np.testing.assert_allclose(found.directions.values[0, 0], wanted.numpy(), rtol=1e-9)


@over("method", ["mean difference", "pca", "probe"])
def test_a_planted_direction_is_found_and_tells_held_out_prompts_apart(method: str) -> None:
    """One token of a prompt is 7 or 8, whose embeddings differ by it alone; all other tokens are random."""
    planted = 30 * torch.randn(D, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    network = copy.deepcopy(build("gpt2"))
    network.embed.weight[7] = network.embed.weight[8] + planted
    tokens = some_tokens(60, 6, seed=5) % 7
    tokens[:30, 2], tokens[30:, 2] = 7, 8
    found = steering(
        HookedTransformer(network), tokens[:30], tokens[30:], site="resid_pre", pos="mean", method=method
    )  # type: ignore[arg-type]
    ours = torch.from_numpy(found.directions.values[0, 0])
    if (
        method == "probe"
    ):  # which points where classes are far apart in standard deviations, not where they lie
        assert float(ours @ planted) > 0
    else:
        assert float(F.cosine_similarity(ours, planted, dim=0)) > 0.95
        assert (
            abs(float(ours @ planted / planted.square().sum()) - 1 / 6) < 0.03
        )  # a sixth of the tokens has it
    assert (
        float(found.value[0]) == 1 and found.n.values.tolist() == [18, 18] and 0.5 < float(found.low[0]) < 1
    )


def test_score_is_that_of_the_midpoint_on_prompts_not_seen() -> None:
    found = steering(model(), POSITIVE, NEGATIVE, test_share=0.4, seed=2)
    labels = torch.arange(13) < 8
    test = held_out(labels, 0.4, 2)
    x = torch.cat((states(POSITIVE), states(NEGATIVE)))
    for layer in LAYERS:
        one, other = (x[~test & kind, layer].mean(0) for kind in (labels, ~labels))
        side = (x[test, layer] - (one + other) / 2) @ (one - other) > 0
        right = side == labels[test]
        wanted = float((right[labels[test]].double().mean() + right[~labels[test]].double().mean()) / 2)
        assert float(found.value[layer]) == pytest.approx(wanted)
    assert found.attrs["train"] == 8 and set(found.n.values) == {5} and set(found.null.values) == {0.5}


@over("method", ["mean difference", "pca", "probe"])
def test_shuffled_directions_are_those_of_the_same_prompts_in_other_kinds(method: str) -> None:
    how: dict[str, object] = {"method": method, "test_share": 0.4, "seed": 2}
    found = steering(model(), POSITIVE, NEGATIVE, shuffles=3, **how)  # type: ignore[arg-type]
    labels, draw = torch.arange(13) < 8, torch.Generator().manual_seed(2)
    train = (~held_out(labels, 0.4, 2)).nonzero()[:, 0]
    tokens = torch.cat((POSITIVE, NEGATIVE))[train]
    for i in range(3):
        order = labels[train][torch.randperm(len(train), generator=draw)]
        again = steering(model(), tokens[order], tokens[~order], method=method, test_share=0.0)  # type: ignore[arg-type]
        np.testing.assert_allclose(
            found.shuffled.sel(draw=i), again.directions.sel(direction=0), rtol=1e-7, atol=1e-9
        )
    plain = steering(model(), POSITIVE, NEGATIVE, **how)  # type: ignore[arg-type]
    np.testing.assert_array_equal(found.directions, plain.directions)  # the same, whatever stands beside


def test_prompts_of_one_kind_alone_have_no_direction() -> None:
    found = steering(model(), POSITIVE, POSITIVE.flip(0), method="probe", test_share=0.3, seed=1)
    assert found.norm.shape == (2,) and bool(np.isfinite(found.directions).all())
    same = steering(model(), POSITIVE[:4, :3].repeat(2, 1), POSITIVE[:4, :3], test_share=0.0)
    np.testing.assert_allclose(same.directions, 0, atol=1e-12)


REFUSED = {
    "of one site": {"method": "dictionary", "dictionary": "dictionary"},
    "goes with method='dictionary'": {"dictionary": "dictionary"},
    "a dictionary": {"method": "dictionary"},
    "at one token": {"method": "dictionary", "dictionary": "dictionary", "site": SITES[0], "pos": "mean"},
    "not normalised": {"method": "dictionary", "dictionary": "narrow", "site": SITES[0]},
    "one vector of the stream's width": {"site": "post"},
    "unknown site shorthand": {"site": "resid"},
    "both classes must have examples": {"test_share": 0.01},
    "test_share must be 0, or between": {"test_share": 1.0},
}


@over("message", REFUSED)
def test_what_has_no_meaning_is_refused(message: str) -> None:
    def sae(width: int) -> Dictionary:
        shapes = {"W_enc": (width, 4), "b_enc": (4,), "W_dec": (4, width), "b_dec": (width,)}
        return Dictionary(TopK(1), {name: torch.ones(shape) for name, shape in shapes.items()})

    how = {**REFUSED[message]}
    if "dictionary" in how:
        how["dictionary"] = sae(D if how["dictionary"] == "dictionary" else 6)  # type: ignore[assignment]
    with pytest.raises((ValueError, KeyError), match=message):
        steering(model(), POSITIVE, NEGATIVE, **how)  # type: ignore[arg-type]


def test_a_direction_comes_back_from_its_file_and_knows_its_model(tmp_path: Path) -> None:
    found = Subspace.of_result(steering(model(), POSITIVE, NEGATIVE), layer=1)
    assert found.site == SITES[1] and found.about["method"] == "mean difference"
    found.save(tmp_path / "a.safetensors", model())
    back = Subspace.load(tmp_path / "a.safetensors", model())
    assert torch.equal(back.directions, found.directions) and back.directions.dtype == torch.float64
    assert (back.site, back.at, back.about) == (found.site, found.at, found.about)
    Subspace(SITES[0], found.directions, {"pos": (2, 3)}).save(tmp_path / "b.safetensors", model())
    assert Subspace.load(tmp_path / "b.safetensors", model()).at == {"pos": (2, 3)}
    with pytest.raises(ValueError, match="of another model"):
        Subspace.load(tmp_path / "a.safetensors", model("tied"))
    (tmp_path / "c.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes()[:300])
    with pytest.raises(ValueError, match="not a readable subspace"):
        Subspace.load(tmp_path / "c.safetensors", model())


def test_generation_is_steered_at_prompt_and_new_tokens_alike() -> None:
    """As if every pass of greedy decoding ran whole and without a cache."""
    subject = hooked("gpt2")
    edit = random_directions(1, seed=4, length=6.0)[0].add(4.0)
    tokens = subject.to_tokens("The cat sat")
    wanted = tokens
    for _ in range(4):
        step = subject.edited([edit])(wanted)[:, -1].argmax(-1)
        wanted = torch.cat((wanted, step[:, None]), 1)
    plain = subject.generate("The cat sat", 4, stop_at_eos=False)
    steered = subject.generate("The cat sat", 4, stop_at_eos=False, edits=[edit])
    assert steered.tokens.tolist() == wanted.tolist() != plain.tokens.tolist()


# --- curves -------------------------------------------------------------------------------------------------------

STRENGTHS = (-1.0, 0.0, 0.5, 2.0)


def loop(subject: HookedTransformer, edits: list[Edit], tokens: Tensor) -> dict[str, Tensor]:
    """Effect, KL divergence and change of loss of every row, from two whole passes."""
    plain, steered = subject(tokens), subject.edited(edits)(tokens)
    logs = [x.log_softmax(-1) for x in (plain, steered)]
    losses = [-x[:, :-1].gather(2, tokens[:, 1:, None])[..., 0].mean(1) for x in logs]
    kl = (logs[0][:, -1].exp() * (logs[0][:, -1] - logs[1][:, -1])).sum(-1)
    return {"effect": difference(steered) - difference(plain), "kl": kl, "loss": losses[1] - losses[0]}


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "bidirectional"])
def test_a_curve_is_a_loop_of_edited_passes(name: str) -> None:
    subject, each = model(name), random_directions(length=3.0)
    prompts, texts = some_tokens(4, 7, seed=2), some_tokens(3, 6, seed=3)
    found = steering_curve(
        subject,
        in_batches(subject, prompts, 3),
        each,
        strengths=STRENGTHS,
        metric=METRIC,
        loss_on=texts,
        random=2,
    )
    for layer in LAYERS:
        for strength in STRENGTHS:
            edit = [Edit(SITES[layer], Add(each[layer].directions[0], strength))]
            here = loop(subject, edit, prompts) | {"loss": loop(subject, edit, texts)["loss"]}
            for score, rows in here.items():
                cell = found.sel(layer=layer, strength=strength, score=score)
                assert float(cell.value) == pytest.approx(float(rows.mean()), rel=1e-8, abs=1e-10)
                assert int(cell.n) == len(rows)
                if score != "kl":
                    half = student95(len(rows)) * float(rows.std()) / math.sqrt(len(rows))
                    ends = [float(rows.mean()) - half, float(rows.mean()) + half]
                    assert [float(cell.low), float(cell.high)] == pytest.approx(ends, rel=1e-7, abs=1e-9)
    assert bool(found.low.sel(score="kl").isnull().all())  # four rows do not hold the mean of a divergence


def test_the_null_is_of_directions_of_the_same_length_at_the_same_cell() -> None:
    subject, each = model(), random_directions(length=3.0)
    found = steering_curve(subject, POSITIVE, each, strengths=[0.0, 2.0], metric=METRIC, random=3, seed=7)
    noise = torch.randn(2, 3, D, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    noise *= 3.0 / noise.norm(dim=-1, keepdim=True)
    for layer in LAYERS:
        for draw in range(3):
            rows = loop(subject, [Edit(SITES[layer], Add(noise[layer, draw], 2.0))], POSITIVE)
            for score in ("effect", "kl"):
                cell = found.random.sel(layer=layer, strength=2.0, score=score, draw=draw)
                assert float(cell) == pytest.approx(float(rows[score].mean()), rel=1e-8)
    np.testing.assert_allclose(found.norm, 3.0)
    np.testing.assert_allclose(found.null, found.random.mean("draw"))
    assert float(found.p.sel(strength=0.0).min()) == 1 and float(found.value.sel(strength=0.0).max()) == 0


def test_directions_of_ones_own_stand_beside_at_the_length_of_each() -> None:
    each = random_directions(length=3.0)
    others = [
        torch.randn(4, D, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in (0, 1)
    ]
    found = steering_curve(model(), POSITIVE, each, strengths=[2.0], metric=METRIC, beside=others)
    for layer in LAYERS:
        scaled = [Subspace(SITES[layer], 3 * row[None] / row.norm()) for row in others[layer]]
        for draw, direction in enumerate(scaled):
            alone = steering_curve(model(), POSITIVE, [direction], strengths=[2.0], metric=METRIC, random=0)
            np.testing.assert_allclose(
                found.random.sel(layer=layer, draw=draw), alone.value.sel(layer=layer), rtol=1e-9
            )
    assert "given" in found.attrs["null"] and found.sizes["draw"] == 4
    for bad in (others[:1], [others[0], others[1][:2]], [x[:, :5] for x in others]):
        with pytest.raises(
            ValueError, match="beside each of 2 directions as many of 24 numbers are required"
        ):
            steering_curve(model(), POSITIVE, each, metric=METRIC, beside=bad)
    with pytest.raises(ValueError, match="must have a length"):
        steering_curve(model(), POSITIVE, each, metric=METRIC, beside=[x * 0 for x in others])


def test_effect_is_proportional_to_the_strength_where_all_is_linear() -> None:
    """After the last block of a model without norms nothing but the unembedding is left."""
    subject, each = model("no-norm"), random_directions()[1:]
    doses = [-2.0, 0.5, 1.0, 3.0]
    found = steering_curve(subject, POSITIVE, each, strengths=doses, metric=METRIC, random=0)
    effect = found.value.sel(layer=1, score="effect")
    slope = each[0].directions[0] @ (subject.W_U[:, 3] - subject.W_U[:, 4])
    np.testing.assert_allclose(effect, np.array(doses) * float(slope), rtol=1e-9)
    assert bool(found.p.isnull().all()) and bool(found.band.isnull().all())


def test_a_direction_at_one_position_is_added_there_whatever_the_padding() -> None:
    subject, row = model(), random_directions(1, length=3.0)[0].directions
    keep = torch.ones(8, 9, dtype=torch.bool)
    keep[:, :2] = False
    padded = Batch(torch.cat((POSITIVE[:, :2], POSITIVE), 1), keep)
    for pos in (2, -1, (1, -2)):
        each = [Subspace(SITES[0], row, {"pos": pos})]
        for data in (POSITIVE, padded):
            found = steering_curve(subject, data, each, strengths=[2.0], metric=METRIC, random=0)
            rows = loop(subject, [Edit(SITES[0], Add(row[0], 2.0), {"pos": pos})], POSITIVE)["effect"]
            assert found.value.sel(score="effect").item() == pytest.approx(float(rows.mean()), rel=1e-8)
    with pytest.raises(ValueError, match="got index 9: row 0 has 7 tokens"):
        steering_curve(subject, POSITIVE, [Subspace(SITES[0], row, {"pos": 9})], metric=METRIC)


CURVES = {
    "one direction in each layer is required, got 2": lambda: [Subspace(SITES[0], torch.eye(D)[:2])],
    "inside the blocks are required, 'hook_embed'": lambda: [Subspace("hook_embed", torch.eye(D)[:1])],
    "directions of different layers": lambda: [*random_directions(1), *random_directions(1)],
    "of some length is required, all are 0": lambda: [Subspace(SITES[0], torch.zeros(1, D))],
    "different layers are required, got those of layers \\[\\]": list,
}


@over("message", CURVES)
def test_directions_that_make_no_curve_are_refused(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        steering_curve(model(), POSITIVE, CURVES[message](), metric=METRIC)


def test_strengths_that_come_twice_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one finite strength, and none twice"):
        steering_curve(model(), POSITIVE, random_directions(), strengths=[1.0, 1.0], metric=METRIC)


def test_the_loss_of_the_prompts_themselves_is_a_metric_like_others() -> None:
    each, texts = random_directions(length=3.0), some_tokens(3, 6, seed=3)
    one = steering_curve(model(), POSITIVE, each, metric=METRIC, loss_on=texts, random=2)
    other = steering_curve(model(), texts, each, metric=next_token_loss(), random=2)
    for name in ("value", "low", "high", "null", "p", "band"):
        np.testing.assert_allclose(one[name].sel(score="loss"), other[name].sel(score="effect"), rtol=1e-9)


# --- the null against itself --------------------------------------------------------------------------------------


def test_a_band_leaves_out_two_of_forty_of_its_own_kind() -> None:
    """Exactly so for 39 and 79 draws, whatever they are drawn from; below 39 it is smaller, 2 of r + 1 outside."""
    draw = np.random.default_rng(0)
    for r, outside in ((39, 2 / 40), (79, 2 / 40), (60, 2 / 40), (9, 2 / 10)):
        x = torch.from_numpy(draw.exponential(size=(20000, r + 1)))
        ends = band(x[:, 1:])
        share = float(((x[:, 0] < ends[:, 0]) | (x[:, 0] > ends[:, 1])).double().mean())
        assert abs(share - outside) < 4 * math.sqrt(outside / 20000), (r, share)


def lies_beyond(found: xr.Dataset) -> int:
    """How many effects lie outside of the band, where p is at most 0.05 and nowhere else."""
    low, high = found.band.transpose("end", ...)
    beyond = (found.value < low) | (found.value > high)
    assert bool(((found.p <= 0.05) == beyond).all())
    return int(beyond.sel(score="effect").sum())


def is_a_twentieth(outside: int, tried: int) -> None:
    low, high = scipy.stats.binom.ppf([0.0005, 0.9995], tried, 0.05)
    assert low <= outside <= high, (outside, tried)


@pytest.mark.slow
def test_five_of_a_hundred_random_directions_lie_outside_of_the_band() -> None:
    outside = 0
    for seed in range(150):
        each = random_directions(seed=10**6 + seed, length=3.0)
        outside += lies_beyond(
            steering_curve(model(), POSITIVE[:3], each, strengths=[1.0], metric=METRIC, seed=seed)
        )
    is_a_twentieth(outside, 300)


@pytest.mark.slow
def test_so_do_those_of_prompts_of_one_kind_among_their_shuffles() -> None:
    outside = 0
    for seed in range(150):
        tokens = some_tokens(20, 7, seed=1000 + seed)
        found = steering(model(), tokens[:10], tokens[10:], test_share=0.0, shuffles=39, seed=seed)
        each = [Subspace.of_result(found, layer=layer) for layer in LAYERS]
        beside = [torch.from_numpy(found.shuffled.sel(layer=layer).values) for layer in LAYERS]
        outside += lies_beyond(
            steering_curve(model(), POSITIVE[:3], each, strengths=[1.0], metric=METRIC, beside=beside)
        )
    is_a_twentieth(outside, 300)
