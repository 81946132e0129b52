"""Feature cards: the numbers of a slow loop over texts, whatever batches carry them; planted features are found."""

import json
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
import torch
import xarray as xr
from scipy.stats import ks_2samp
from torch import Tensor

import interp
from interp import HookedTransformer
from interp.core.stats import uniforms
from interp.data.sources import open_source
from interp.data.stream import RowLayout, Stream
from interp.features import (
    AbsTopK,
    Dictionary,
    ReLU,
    TopK,
    feature_cards,
    neuronpedia_json,
    train_dictionary,
)
from interp.features.activations import DictionaryKind, MatchingPursuit
from interp.features.dictionary import Normalisation
from interp.features.feature_cards import BINS, GROUPS, LISTED
from interp.model import Read
from interp.model.loss import next_token_loss
from tests.configs import CONFIGS, perturbed
from tests.features.dictionary_cases import random_weights
from tests.tiny import hooked

TEXTS = [
    f"{'bdfghjklmnprst'[i]} The cat sat on the mat and the dog sat on Mary."[: 4 + 7 * i % 26]
    for i in range(14)
]
CHOSEN, DEAD = [3, 0, 17], 17
TOP, PER_GROUP, BEFORE, AFTER = 4, 2, 3, 2
RELU = ReLU()
RESID, Z, POST = "blocks.1.hook_resid_post", "blocks.1.attn.hook_z", "blocks.1.mlp.hook_post"


def model() -> HookedTransformer:
    return hooked("gpt2")


@cache
def dictionary(kind: DictionaryKind = RELU, site: str = RESID) -> Dictionary:
    width = model().cfg.mlp.d_mlp if site == POST else model().cfg.d_model
    weights = random_weights(kind, width, 40)
    weights["b_enc"] = weights["b_enc"] - 0.4
    return Dictionary(kind, weights, reads=site)


def stream(tokens: int = 64, window: int = 5, layout: RowLayout = "padded") -> Stream:
    return Stream(
        open_source(TEXTS), model().text, tokens_per_batch=tokens, rows_per_window=window, layout=layout
    )


@cache
def texts(site: str = RESID) -> list[tuple[list[int], Tensor]]:
    """Token ids and vectors [p d] of every text, each alone in its pass."""
    found = []
    for text in TEXTS:
        batch, read = model().text.batch(text), Read(site)
        value = interp.observe(model().transformer, batch, [read]).trace[read][0]
        found.append((batch.tokens[0].tolist(), value.flatten(1)))
    return found


@cache
def cards(site: str = RESID, kind: DictionaryKind = RELU) -> xr.Dataset:
    return asked(dictionary(kind, site))


def asked(of: Dictionary, data: object = None, **options: object) -> xr.Dataset:
    settings = {"features": CHOSEN, "top": TOP, "per_group": PER_GROUP, "context": (BEFORE, AFTER)} | options
    return feature_cards(model(), stream() if data is None else data, of, **settings)  # type: ignore[arg-type]


def curves(found: xr.Dataset, of: Dictionary, site: str = RESID) -> list[np.ndarray]:
    """By text the activations [p source feature] of every token but BOS, with those of random directions by hand."""
    r = torch.tensor(found.vector.sel(source="random").values)
    r = r / r.norm(dim=1, keepdim=True)
    every = [x[1:] - of.b_dec for _, x in texts(site)]
    scale = torch.cat(every).norm(dim=1).mean()
    cosine = [x @ r.mT / x.norm(dim=1, keepdim=True) for x in every]
    threshold = torch.cat(cosine).amax(0) - torch.tensor(found.null.sel(score="max").values) / scale
    own = [of.encode(x[1:])[:, CHOSEN] for _, x in texts(site)]
    both = zip(own, cosine, strict=True)
    return [torch.stack((f, (c - threshold).clamp_min(0) * scale), 1).detach().numpy() for f, c in both]


@pytest.mark.parametrize("site", [RESID, Z, POST])
@pytest.mark.parametrize("kind", [ReLU(), TopK(6), AbsTopK(6)])
def test_scores_histograms_and_lists_are_those_of_a_slow_loop(site: str, kind: DictionaryKind) -> None:
    of = dictionary(kind, site)
    found = cards(site, kind)
    activation = curves(found, of, site)
    flat = np.concatenate(activation)
    for s, source in enumerate(("dictionary", "random")):
        for i, feature in enumerate(CHOSEN):
            one, a = found.sel(source=source, feature=feature), flat[:, s, i]
            scores = one["value" if s == 0 else "null"]
            active = (a != 0) if s == 0 else a > 1e-12
            assert float(scores.sel(score="density")) == pytest.approx(active.mean(), abs=1e-12)
            assert float(scores.sel(score="mean")) == pytest.approx(a.mean(), rel=1e-9)
            low, high = min(a.min(), 0.0), max(a.max(), 0.0)
            assert float(scores.sel(score="max")) == pytest.approx(high, rel=1e-9)
            np.testing.assert_allclose(one["edges"], np.linspace(low, high, BINS + 1), rtol=1e-9, atol=1e-12)
            share = np.clip((a[active] - low) / (high - low), 0, 1)
            assert one.counts.values.tolist() == np.histogram(share, BINS, (0, 1))[0].tolist()
            check_lists(one, [x[:, s, i] for x in activation], low, high)


def check_lists(one: xr.Dataset, activation: list[np.ndarray], low: float, high: float) -> None:
    """The lists against sorting every active token, and every token of each group by its draw."""
    every = [
        (x, row, pos + 1) for row, run in enumerate(activation) for pos, x in enumerate(run) if abs(x) > 1e-12
    ]
    expected = once_per_row([(-x, row, pos) for x, row, pos in every])[:TOP]
    got = list(zip(one.row.values.tolist(), one.pos.values.tolist(), strict=True))
    assert got == [(row, pos) for _, row, pos in expected] + [(-1, -1)] * (TOP - len(expected))
    for rank, (negative, row, pos) in enumerate(expected):
        assert float(one.peak[rank]) == pytest.approx(-negative, rel=1e-9)
        for at, token, value in zip(
            one.offset.values, one.tokens[rank].values, one.activation[rank].values, strict=True
        ):
            ids, place = texts()[row][0], pos + at
            assert token == (ids[place] if 0 <= place < len(ids) else -1)
            if 1 <= place < len(ids):
                assert value == pytest.approx(activation[row][place - 1], rel=1e-9, abs=1e-12)
            else:
                assert np.isnan(value)
    draws = uniforms(torch.arange(len(TEXTS)), 40, seed=0).numpy()
    group = [min(int(GROUPS * (x - low) / (high - low)), GROUPS - 1) for x, _, _ in every]
    for g in range(GROUPS):
        mine = [(-draws[pos, row], row, pos) for k, (_, row, pos) in zip(group, every, strict=True) if k == g]
        chosen = [(row, pos) for _, row, pos in once_per_row(mine)[:PER_GROUP]]
        listed = one.isel(group=g)
        got = list(zip(listed.group_row.values.tolist(), listed.group_pos.values.tolist(), strict=True))
        assert got == chosen + [(-1, -1)] * (PER_GROUP - len(chosen))


def once_per_row(scored: list[tuple[float, int, int]]) -> list[tuple[float, int, int]]:
    kept: list[tuple[float, int, int]] = []
    for entry in sorted(scored):
        if entry[1] not in [row for _, row, _ in kept]:
            kept.append(entry)
    return kept


def test_a_random_direction_is_active_as_often_as_its_feature() -> None:
    found = cards()
    density = found.sel(score="density")
    tokens = found.attrs["tokens_counted"]
    assert np.abs(density.value - density.null).max() * tokens <= 1 + 1e-9, (
        "the histogram parts all but neighbours"
    )
    norms = np.linalg.norm(found.vector, axis=-1)
    np.testing.assert_allclose(norms[0], norms[1], rtol=1e-12)


def test_random_directions_are_not_those_that_training_with_the_same_seed_begins_with() -> None:
    x = torch.cat([x[1:] for _, x in texts()])
    trained, _ = train_dictionary(x, TopK(2), 20, steps=1, batch_size=16, seed=0, dtype=torch.float64)
    found = feature_cards(model(), stream(), trained, RESID, features=range(20), seed=0)
    random = found.vector.sel(source="random").values
    alike = [cosine(a, b) for a, b in zip(random, trained.W_dec.numpy(), strict=True)]
    assert np.abs(alike).max() < 0.8 and abs(np.mean(alike)) < 4 / (20 * random.shape[1]) ** 0.5


def test_relatives_are_those_of_all_pairs_by_hand() -> None:
    of, found = dictionary(), cards()
    flat = torch.cat([of.encode(x[1:]) for _, x in texts()]).numpy()
    random = np.concatenate(curves(found, of))[:, 1]
    W_dec = of.W_dec.numpy()
    for i, feature in enumerate(CHOSEN):
        one = found.sel(source="dictionary", feature=feature)
        if feature == DEAD:
            assert not flat[:, feature].any() and one.correlation.isnull().all()
            continue
        others = [j for j in range(of.d_sae) if j != feature and flat[:, j].std() > 0]
        r = {j: np.corrcoef(flat[:, feature], flat[:, j])[0, 1] for j in others}
        best = sorted(r, key=lambda j: -r[j])[:LISTED]
        assert one.partner.values.tolist() == best
        np.testing.assert_allclose(one.correlation, [r[j] for j in best], rtol=1e-9)
        alike = [cosine(flat[:, feature], flat[:, j]) for j in best]
        np.testing.assert_allclose(one.partner_cosine, alike, rtol=1e-9)
        near = {j: cosine(W_dec[feature], W_dec[j]) for j in range(of.d_sae) if j != feature}
        best = sorted(near, key=lambda j: -near[j])[:LISTED]
        assert one.neighbour.values.tolist() == best
        np.testing.assert_allclose(one.cosine, [near[j] for j in best], rtol=1e-9)
        beside = found.sel(source="random", feature=feature)
        strongest = max(
            np.corrcoef(random[:, i], flat[:, j])[0, 1] for j in range(of.d_sae) if flat[:, j].std() > 0
        )
        assert float(beside.correlation[0]) == pytest.approx(strongest, rel=1e-9)
        nearest = max(cosine(beside.vector.values, row) for row in W_dec)
        assert float(beside.cosine[0]) == pytest.approx(nearest, rel=1e-9)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


@pytest.mark.parametrize("site", [RESID, Z, POST])
def test_logits_are_what_the_final_norm_and_the_unembedding_make_of_a_small_step(site: str) -> None:
    found, network = cards(site), model().transformer
    rows = torch.tensor(found.vector.values).flatten(0, 1)
    block = network.block(1)
    if site == Z:
        rows = rows @ model().W_O[1].flatten(0, 1)
    if site == POST:
        rows = rows @ model().W_out[1]
    assert block is not None
    gamma = network.ln_final.gamma
    centred = rows - rows.mean(-1, keepdim=True)
    logits = (centred if gamma is None else centred * gamma) @ model().W_U
    logits = (logits - logits.mean(-1, keepdim=True)).detach().numpy()
    flat = found.stack(both=("source", "feature"))
    for i, row in enumerate(logits):
        one, order = flat.isel(both=i), np.argsort(row)
        assert one.logit_token.sel(end="top").values.tolist() == order[::-1][:LISTED].tolist()
        assert one.logit_token.sel(end="bottom").values.tolist() == order[:LISTED].tolist()
        np.testing.assert_allclose(one.logit.sel(end="top"), np.sort(row)[::-1][:LISTED], rtol=1e-9)
        np.testing.assert_allclose(one.logit_edges, np.linspace(row.min(), row.max(), BINS + 1), rtol=1e-9)
        share = (row - row.min()) / (row.max() - row.min())
        assert one.logit_counts.values.tolist() == np.histogram(share, BINS, (0, 1))[0].tolist()
    kurtosis = found.value.sel(score="logit_kurtosis").values
    fourth = (logits**4).mean(1) / (logits**2).mean(1) ** 2 - 3
    np.testing.assert_allclose(kurtosis, fourth[: len(CHOSEN)], rtol=1e-9)


def test_neurons_and_heads_are_those_whose_weights_lie_along_the_decoder_row() -> None:
    rows = cards().vector.sel(source="dictionary").values
    written = model().W_out[1].detach().numpy()
    for row, one in zip(rows, (cards().sel(source="dictionary", feature=i) for i in CHOSEN), strict=True):
        alike = [cosine(row, neuron) for neuron in written]
        order = np.argsort(alike)[::-1][:LISTED]
        assert one.neuron.values.tolist() == order.tolist() and cards().attrs["neuron_layer"] == 1
        np.testing.assert_allclose(one.alignment, np.array(alike)[order], rtol=1e-9)
    neurons = cards(POST).sel(source="dictionary", feature=3)
    row = neurons.vector.values
    assert neurons.neuron.values.tolist() == np.argsort(row)[::-1][:LISTED].tolist()
    heads = cards(Z).sel(source="dictionary", feature=3)
    norms = np.linalg.norm(heads.vector.values.reshape(model().cfg.n_heads, -1), axis=1)
    np.testing.assert_allclose(heads.head_share, norms / norms.sum(), rtol=1e-12)
    assert "head_share" not in cards() and "neuron" not in cards(Z)


@pytest.mark.parametrize(
    ("tokens", "window", "layout"), [(16, 3, "padded"), (400, 14, "padded"), (48, 7, "packed")]
)
def test_cards_do_not_depend_on_batch_split(tokens: int, window: int, layout: RowLayout) -> None:
    xr.testing.assert_allclose(
        asked(dictionary(), stream(tokens, window, layout)), cards(), rtol=1e-7, atol=1e-9
    )


def test_without_names_the_features_are_those_active_on_most_tokens() -> None:
    flat = torch.cat([dictionary().encode(x[1:]) for _, x in texts()])
    order = (flat != 0).double().mean(0).sort(descending=True, stable=True).indices[:5]
    assert asked(dictionary(), features=None, most=5).feature.values.tolist() == order.tolist()


def test_tokens_of_huge_norm_are_left_out_and_counted() -> None:
    found = asked(dictionary(), largest_norm=1.1)
    huge, flat = 0, []
    for _, x in texts():
        norm = x[1:].norm(dim=1)
        out = norm > 1.1 * norm.median()
        huge += int(out.sum())
        flat.append(dictionary().encode(x[1:][~out])[:, CHOSEN])
    assert huge > 0 and found.attrs["huge"] == huge
    assert found.attrs["tokens_counted"] == sum(map(len, flat)) and found.attrs["special"] == len(TEXTS)
    density = (torch.cat(flat) != 0).double().mean(0)
    np.testing.assert_allclose(found.value.sel(score="density"), density, rtol=1e-12)
    assert any("longer than 1.1 times the median" in note for note in found.attrs["notes"])
    assert asked(dictionary(), largest_norm=None).attrs["huge"] == 0


# --- planted features -------------------------------------------------------------------------------------------------

IDS = [[5, 6, 7, 5, 8, 9], [6, 6, 10, 7], [9, 5, 10, 11], [7, 8], [12, 13, 10, 8, 5]]
PLANTED: dict[int, dict[int, float]] = {0: {5: 1.0, 6: 0.5, 7: 0.25}, 1: {10: 2.0}, 2: {}}
"""By feature the activation at each token; 0 at all others."""
LLAMA = "blocks.0.hook_resid_pre"


def planted() -> Dictionary:
    """Features of the embedding alone that are exactly what `PLANTED` says at the tokens of `IDS`."""
    tokens = sorted({i for row in IDS for i in row})
    embedded = hooked("llama-gqa").W_E.detach()[tokens]
    values = torch.tensor([[PLANTED[f].get(t, -1.0) for f in PLANTED] for t in tokens], dtype=torch.float64)
    W_enc = torch.linalg.lstsq(embedded, values).solution
    W_dec = torch.linalg.lstsq(embedded, torch.eye(len(tokens)).double()).solution.mT[: len(PLANTED)]
    zero = torch.zeros(len(PLANTED)).double()
    weights = {
        "W_enc": W_enc,
        "b_enc": zero,
        "W_dec": W_dec,
        "b_dec": torch.zeros(embedded.shape[1]).double(),
    }
    return Dictionary(ReLU(), weights, reads=LLAMA)


def planted_cards() -> xr.Dataset:
    return feature_cards(
        hooked("llama-gqa"),
        IDS,
        planted(),
        features=[0, 1, 2],
        top=3,
        context=(1, 1),
        largest_norm=None,
        skip_bos=False,
    )


def test_planted_features_are_found_on_their_card() -> None:
    found = planted_cards()
    flat = [i for row in IDS for i in row]
    own = found.sel(source="dictionary")
    density = found.value.sel(score="density").values
    np.testing.assert_allclose(density, [10 / 21, 3 / 21, 0.0], atol=1e-12)
    assert found.value.sel(score="max").values == pytest.approx([1.0, 2.0, 0.0], abs=1e-9)
    counts = own.counts.values
    # of feature 0: four tokens at 1, three at 1/2 and three at 1/4 of the range
    assert counts[0].sum() == sum(flat.count(t) for t in (5, 6, 7)) and counts[0, -1] == flat.count(5)
    assert counts[0, 24:26].sum() == flat.count(6) and counts[0, 11:13].sum() == flat.count(7)
    assert counts[1].tolist() == [0] * 49 + [3] and not counts[2].any()
    assert own.tokens.sel(feature=0, offset=0).values.tolist() == [5, 5, 5]
    # equal activations come in an order that rounding decides
    rows = own.row.sel(feature=0).values.tolist()
    assert sorted(rows) == [0, 2, 4]
    assert sorted(own.row.sel(feature=1).values.tolist()) == [1, 2, 4]
    assert own.row.sel(feature=2).values.tolist() == [-1] * 3
    first = own.sel(feature=0, rank=rows.index(0))  # token 5, before 6 or before 8
    after = {0: 0.5, 3: 0.0}[int(first.pos)]
    np.testing.assert_allclose(first.activation.sel(offset=[0, 1]), [1.0, after], atol=1e-9)
    assert set(own.group_tokens.sel(feature=0, group=9, offset=0).values.tolist()) == {5, -1}
    assert found.value.sel(score="purity").values.tolist()[:2] == [1.0, 1.0]
    assert np.isnan(found.value.sel(score="purity").values[2])
    assert found.null.sel(score="density").values[2] == 0.0, "what is never active has a null that never is"


def test_the_decoder_of_a_planted_feature_names_its_token() -> None:
    """A decoder row along the unembedding of a token raises that token most, a random direction does not."""
    m = hooked("llama-gqa")
    W_U = m.W_U.detach()
    rows = (W_U / W_U.norm(dim=0)).mT[[20, 30]]
    if (gamma := m.transformer.ln_final.gamma) is not None:
        rows = rows / gamma.detach()
    d = rows.shape[1]
    weights = {
        "W_enc": rows.mT,
        "b_enc": torch.zeros(2).double(),
        "W_dec": rows,
        "b_dec": torch.zeros(d).double(),
    }
    found = feature_cards(m, IDS, Dictionary(ReLU(), weights, reads=LLAMA), features=[0, 1], skip_bos=False)
    assert found.logit_token.sel(source="dictionary", end="top", logit_rank=0).values.tolist() == [20, 30]


def test_a_random_dictionary_looks_like_its_random_directions() -> None:
    m, draw = model(), torch.Generator().manual_seed(7)
    rows = torch.nn.functional.normalize(
        torch.randn(60, m.cfg.d_model, generator=draw, dtype=torch.float64), dim=1
    )
    x = torch.cat([x[1:] for _, x in texts()])
    bias = -(x @ rows.mT).quantile(0.9, dim=0)
    weights = {"W_enc": rows.mT, "b_enc": bias, "W_dec": rows, "b_dec": torch.zeros(m.cfg.d_model).double()}
    found = asked(Dictionary(ReLU(), weights, reads=RESID), features=range(60), top=10)
    for score in ("purity", "logit_kurtosis"):
        one = found.sel(score=score)
        assert ks_2samp(one.value, one.null).pvalue > 0.001, score
    for variable in ("cosine", "alignment"):
        first = found[variable].isel({found[variable].dims[-1]: 0})
        assert ks_2samp(first.sel(source="dictionary"), first.sel(source="random")).pvalue > 0.001, variable


# --- sources and effects of the top examples --------------------------------------------------------------------------


@cache
def with_effects(site: str, kind: DictionaryKind = RELU) -> xr.Dataset:
    return asked(dictionary(kind, site), dfa=site == Z, loss_effect=True)


def entries(found: xr.Dataset) -> list[tuple[xr.Dataset, int, int, str, int]]:
    """Every entry of the top lists: its part of the result, text, position, source and index of the feature."""
    each = [
        (found.isel(source=s, feature=i, rank=r), source, i)
        for s, source in enumerate(("dictionary", "random")) for i in range(len(CHOSEN)) for r in range(TOP)
    ]  # fmt: skip
    return [(one, int(one.row), int(one.pos), source, i) for one, source, i in each if int(one.row) >= 0]


def test_what_heads_bring_from_tokens_sums_to_the_pre_activation() -> None:
    """pattern x (v . W_enc) by hand, in a loop over heads and tokens; with the biases it is the activation itself."""
    found, of, names = with_effects(Z), dictionary(RELU, Z), ("pattern", "v")
    reads = [Read(f"blocks.1.attn.hook_{name}") for name in names]
    W_enc = of.W_enc.unflatten(0, (model().cfg.n_heads, -1))
    own = 0
    for one, row, pos, source, i in entries(found):
        total = float(one.dfa.sum() + one.dfa_outside.sum() + one.dfa_bias)
        assert total == pytest.approx(float(one.peak), rel=1e-9)
        if source == "random":
            continue
        own += 1
        batch = model().text.batch(TEXTS[row])
        pattern, v = (interp.observe(model().transformer, batch, reads).trace[read][0] for read in reads)
        byhand = [
            [float(pattern[h, pos, k] * (v[k, h] @ W_enc[h, :, CHOSEN[i]])) for h in range(len(W_enc))]
            for k in range(len(v))
        ]
        near = [k for k in range(len(v)) if -BEFORE <= k - pos <= AFTER]
        kept = one.dfa.sel(offset=[k - pos for k in near])
        np.testing.assert_allclose(kept, [byhand[k] for k in near], rtol=1e-9, atol=1e-12)
        assert one.dfa.sel(offset=[o for o in one.offset.values if pos + o not in near]).isnull().all()
        beyond = np.sum([byhand[k] for k in range(len(v)) if k not in near], 0)
        np.testing.assert_allclose(one.dfa_outside, beyond + np.zeros(len(W_enc)), rtol=1e-9, atol=1e-12)
    assert own > TOP
    assert float(found.attrs["dfa"].split()[-5]) < 1e-14


@pytest.mark.parametrize("normalize", ["layer_norm", "constant_norm_rescale"])
def test_sources_of_a_dictionary_that_normalises_are_at_the_scale_of_its_input(
    normalize: Normalisation,
) -> None:
    weights = random_weights(RELU, model().cfg.d_model, 40)
    weights["b_enc"] = weights["b_enc"] - 0.4
    of = Dictionary(RELU, weights, reads=Z, normalize_activations=normalize)
    found = asked(of, dfa=True, loss_effect=True)
    total = found.dfa.sum(("offset", "head")) + found.dfa_outside.sum("head") + found.dfa_bias
    there = found.row >= 0
    np.testing.assert_allclose(total.where(there), found.peak, rtol=1e-9)
    check_losses(found, of, Z)


@pytest.mark.parametrize("site", [RESID, Z, POST])
@pytest.mark.parametrize("kind", [ReLU(), TopK(6)])
def test_effects_on_the_loss_are_the_difference_of_two_runs_by_hand(site: str, kind: DictionaryKind) -> None:
    check_losses(with_effects(site, kind), dictionary(kind, site), site)


def check_losses(found: xr.Dataset, of: Dictionary, site: str) -> None:
    """A run of the text alone, and one in which the feature is set to 0 at every token but BOS, for every entry."""
    random = dict(zip(CHOSEN, found.vector.sel(source="random").values, strict=True))
    activation = curves(found, of, site)
    seen = 0
    for one, row, pos, source, i in entries(found):
        batch = model().text.batch(TEXTS[row])
        at = {"pos": tuple(range(1, batch.tokens.shape[1]))}
        if source == "dictionary":
            change = of.edits(partial(without, CHOSEN[i]), at=at)
        else:
            written = torch.tensor(activation[row][:, 1, i])[:, None] * torch.tensor(random[CHOSEN[i]])
            change = [interp.Edit(site, lambda value, w=written: value - w.view_as(value[0]), at=at)]
        clean, without_it = (
            next_token_loss(m(batch.tokens), batch.tokens)[0].detach()
            for m in (model(), model().edited(change))
        )
        effect = (without_it - clean).tolist()
        for offset, value in zip(one.offset.values, one.loss_change.values, strict=True):
            if 0 <= pos + offset < len(effect):
                assert value == pytest.approx(effect[pos + offset], abs=1e-10)
            else:
                assert np.isnan(value)
        later = np.mean(effect[pos:]) if pos < len(effect) else np.nan
        assert float(one.loss_effect) == pytest.approx(later, abs=1e-10, nan_ok=True)
        seen += abs(later) > 1e-6
    assert seen > TOP
    each = found.loss_effect.mean("rank").values
    scores = found.sel(score="loss_effect")
    np.testing.assert_allclose(np.stack((scores.value, scores.null)), each, rtol=1e-9)


def without(feature: int, features: Tensor) -> Tensor:
    features[..., feature] = 0.0
    return features


@pytest.mark.parametrize(
    ("tokens", "window", "layout"), [(16, 3, "padded"), (400, 14, "padded"), (48, 7, "packed")]
)
def test_sources_and_effects_do_not_depend_on_batch_split(
    tokens: int, window: int, layout: RowLayout
) -> None:
    found = asked(dictionary(RELU, Z), stream(tokens, window, layout), dfa=True, loss_effect=True)
    xr.testing.assert_allclose(found, with_effects(Z), rtol=1e-7, atol=1e-9)


def test_sources_and_effects_change_no_other_number() -> None:
    """They come from a third pass, so that nothing else of the card may differ."""
    more, plain = with_effects(Z), cards(Z)
    same = more[list(plain)].sel(score=plain.score.values)
    assert same.drop_attrs().identical(plain.drop_attrs())


def test_neurons_that_are_active_together_are_those_of_all_correlations_by_hand() -> None:
    found, of = cards(), dictionary()
    read = Read(POST)
    neurons = [
        interp.observe(model().transformer, model().text.batch(text), [read]).trace[read][0, 1:]
        for text in TEXTS
    ]
    both = np.concatenate(curves(found, of))
    activity = torch.cat(neurons).detach().numpy()
    for s, source in enumerate(("dictionary", "random")):
        for i, feature in enumerate(CHOSEN):
            one = found.sel(source=source, feature=feature)
            if not both[:, s, i].any():
                assert one.neuron_correlation.isnull().all()
                continue
            r = np.corrcoef(both[:, s, i], activity.T)[0, 1:]
            best = np.argsort(-r)[:LISTED]
            assert one.active_neuron.values.tolist() == best.tolist()
            np.testing.assert_allclose(one.neuron_correlation, r[best], rtol=1e-9)
            alike = [cosine(both[:, s, i], activity[:, j]) for j in best]
            np.testing.assert_allclose(one.neuron_cosine, alike, rtol=1e-9)
    assert "active_neuron" not in cards(Z) and "active_neuron" in cards(POST)


def test_a_feature_that_writes_nothing_has_no_effect_on_the_loss() -> None:
    weights = {name: weight.clone() for name, weight in dictionary(RELU, Z).named_parameters()}
    weights["W_dec"][CHOSEN[0]] = 0.0
    found = asked(Dictionary(RELU, weights, reads=Z), features=CHOSEN[:1], loss_effect=True)
    scores = found.sel(score="loss_effect", feature=CHOSEN[0])
    assert float(scores.value) == pytest.approx(0.0, abs=1e-14)
    assert float(scores.null) == pytest.approx(0.0, abs=1e-14)


# --- refusals and the export ------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused() -> None:
    for options, match in (
        ({"features": [1, 1]}, "distinct"), ({"features": [40]}, "features are 0 to 39"),
        ({"features": []}, "distinct"),
        ({"context": (1,)}, "context must be"), ({"largest_norm": 0.0}, "largest_norm must be"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=match):
            asked(dictionary(), **options)
    with pytest.raises(ValueError, match="data that can be read again"):
        asked(dictionary(), iter(TEXTS))
    with pytest.raises(ValueError, match="a token that counts"):
        asked(dictionary(), [[model().text.bos_id]])
    per_head = Dictionary(ReLU(), random_weights(ReLU(), model().cfg.d_head, 9), reads=Z)
    with pytest.raises(ValueError, match="head by head"):
        asked(per_head, features=[3])
    with pytest.raises(ValueError, match=r"reads attn\.hook_z, got one of blocks\.1\.hook_resid_post"):
        asked(dictionary(), dfa=True)
    pursuit = Dictionary(MatchingPursuit(2), pursued(), reads=Z)
    with pytest.raises(ValueError, match="matching pursuit has none"):
        asked(pursuit, dfa=True)
    network = HookedTransformer(perturbed(replace(CONFIGS["gpt2"], unembed=False), torch.float64))
    with pytest.raises(ValueError, match="loss_effect=True requires logits"):
        feature_cards(network, IDS, dictionary(), features=CHOSEN, loss_effect=True)


def pursued() -> dict[str, Tensor]:
    """Weights of a dictionary of matching pursuit."""
    weights = random_weights(RELU, model().cfg.d_model, 40)
    return {"W_dec": weights["W_dec"], "W_enc": weights["W_dec"].mT, "b_dec": weights["b_dec"]}


KEYS = """
    feature_index neuron_alignment_indices neuron_alignment_values neuron_alignment_l1 correlated_neurons_indices
    correlated_neurons_pearson correlated_neurons_l1 correlated_features_indices correlated_features_pearson
    correlated_features_l1 neg_str neg_values pos_str pos_values frac_nonzero freq_hist_data_bar_heights
    freq_hist_data_bar_values logits_hist_data_bar_heights logits_hist_data_bar_values n_prompts_total
    n_tokens_in_prompt dataset decoder_weights_dist vector activations
"""
"""The keys of Neuronpedia's JSON."""
OF_EXAMPLES = """
    bin_min bin_max bin_contains tokens values qualifying_token_index dfa_values dfa_targetIndex dfa_maxValue
"""


@pytest.mark.parametrize("site", [RESID, Z, POST])
def test_the_json_of_neuronpedia_holds_the_numbers_of_the_result(site: str) -> None:
    found = cards(site)
    written = json.loads(json.dumps(neuronpedia_json(found, dataset="here"), allow_nan=False))
    assert [each["feature_index"] for each in written] == CHOSEN
    for each in written:
        assert sorted(each) == sorted(KEYS.split()) and each["dataset"] == "here"
        one = found.sel(source="dictionary", feature=each["feature_index"])
        same = {
            "frac_nonzero": float(one.value.sel(score="density")), "vector": one.vector.values.tolist(),
            "pos_values": one.logit.sel(end="top").values.tolist(),
            "neg_str": one.logit_word.sel(end="bottom").values.tolist(),
            "freq_hist_data_bar_heights": one.counts.values.tolist(), "n_prompts_total": len(TEXTS),
            "correlated_features_indices": one.partner.values.tolist(),
            "decoder_weights_dist": one.head_share.values.tolist() if site == Z else [],
            "neuron_alignment_indices": [] if site == Z else one.neuron.values.tolist(),
            "correlated_neurons_indices": [] if site == Z else one.active_neuron.values.tolist(),
            "correlated_neurons_l1": [] if site == Z else plain(one.neuron_cosine),
            "correlated_neurons_pearson": [] if site == Z else plain(one.neuron_correlation),
        }  # fmt: skip
        assert {name: each[name] for name in same} == same
        check_examples(each["activations"], one)


def plain(values: xr.DataArray) -> list[float | None]:
    """Numbers as JSON has them, which knows no NaN."""
    return [None if np.isnan(x) else x for x in values.values.tolist()]


def test_the_json_of_neuronpedia_holds_the_sources_of_top_examples() -> None:
    found = with_effects(Z)
    for each in json.loads(json.dumps(neuronpedia_json(found), allow_nan=False)):
        one = found.sel(source="dictionary", feature=each["feature_index"])
        top = int((one.row >= 0).sum())
        for rank, entry in enumerate(each["activations"][:top]):
            inside = one.tokens[rank].values >= 0
            sources = one.dfa[rank].sum("head").values[inside]
            np.testing.assert_allclose(entry["dfa_values"], sources, rtol=1e-12)
            assert entry["dfa_targetIndex"] == entry["qualifying_token_index"]
            assert entry["dfa_maxValue"] == max(entry["dfa_values"])
        for entry in each["activations"][top:]:
            assert (entry["dfa_values"], entry["dfa_targetIndex"], entry["dfa_maxValue"]) == ([], None, None)


def check_examples(activations: list[dict[str, object]], one: xr.Dataset) -> None:
    """The top examples, then those of the groups from the largest down, token by token."""
    top = int((one.row >= 0).sum())
    assert len(activations) == top + int((one.group_row >= 0).sum())
    for rank, entry in enumerate(activations[:top]):
        assert sorted(entry) == sorted(OF_EXAMPLES.split())
        inside = one.tokens[rank].values >= 0
        assert entry["tokens"] == one.piece[rank].values[inside].tolist()
        assert entry["values"] == np.nan_to_num(one.activation[rank].values[inside]).tolist()
        assert entry["values"][entry["qualifying_token_index"]] == pytest.approx(float(one.peak[rank]))  # type: ignore[index]
    total = 0.0
    seen = set()
    for entry in activations[top:]:
        value = entry["values"][entry["qualifying_token_index"]]  # type: ignore[index]
        assert entry["bin_min"] - 1e-9 <= value <= entry["bin_max"] + 1e-9  # type: ignore[operator]
        if entry["bin_min"] not in seen:
            seen.add(entry["bin_min"])
            total += float(entry["bin_contains"])  # type: ignore[arg-type]
    assert total == pytest.approx(float(bool(activations)))


def test_the_json_of_a_transposed_result_is_the_same_and_another_result_is_refused() -> None:
    found = cards()
    turned = found.isel(source=[1, 0]).transpose(..., "source", "feature")
    assert neuronpedia_json(turned) == neuronpedia_json(found)
    with pytest.raises(ValueError, match=r"result must be a result of interp\.features\.feature_cards"):
        neuronpedia_json(found.drop_vars("partner"))
