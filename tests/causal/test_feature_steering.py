"""Steering by features against loops of edited passes, closed forms and a planted feature; nulls against chance."""

import copy
import functools
import math

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

import interp
from interp import Edit, HookedTransformer, Read
from interp.causal import Subspace, feature_edits, steering_curve
from interp.data.batch import Batch
from interp.edits import Set
from interp.features import Dictionary, ReLU
from interp.passes.observe import observe
from tests.configs import build, some_tokens
from tests.loops import over
from tests.tiny import hooked
from tests.tolerances import assert_close, student95

READS, WRITES, STREAM = "blocks.1.hook_mlp_in", "blocks.1.hook_mlp_out", "blocks.0.hook_resid_post"
HEADS = "blocks.1.attn.hook_z"
ROWS = [[3, 1, 4, 1, 5, 9], [2, 7, 1, 8], [9, 2, 6]]
TEXTS = some_tokens(6, 8, seed=3)
METRIC = interp.logit_difference(3, 4)
MODES = ("add", "clamp", "cap", "orthogonal")
S = 30


def dictionary(reads: str, writes: str, seed: int, d: int = 24, out: int = 24) -> Dictionary:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weights = {"W_enc": normal(d, S) / d**0.5, "b_enc": normal(S) - 0.5, "W_dec": normal(S, out) / out**0.5,
               "b_dec": normal(out)}  # fmt: skip
    return Dictionary(ReLU(), weights, reads=reads, writes=writes, apply_b_dec_to_input=False)


@functools.cache
def plain() -> HookedTransformer:
    return HookedTransformer(copy.deepcopy(build("llama-gqa")).to(torch.float64))


@functools.cache
def coders() -> dict[str, Dictionary]:
    """An SAE of the stream after block 0, and a transcoder of the MLP of block 1."""
    return {"L0": dictionary(STREAM, STREAM, 1), "L1": dictionary(READS, WRITES, 2)}


@functools.cache
def split() -> HookedTransformer:
    return plain().with_dictionaries(list(coders().values()))


def value(site: str, rows: list[list[int]], subject: HookedTransformer | None = None) -> Tensor:
    subject = split() if subject is None else subject
    return observe(subject.transformer, subject.to_batch(rows), [Read(site)]).trace[Read(site)]


def pushed(h: Tensor, f: Tensor, v: Tensor, amount: float, mode: str) -> Tensor:
    """What the formulas of `feature_edits` say of a site `[b p d]`, with f the activations `[b p]`."""
    along = (h @ v / (v @ v))[..., None]
    return {
        "add": h + amount * v,
        "clamp": h + (amount - f)[..., None] * v,
        "cap": h + (along.clamp(max=amount) - along) * v,
        "orthogonal": h + (amount - 1) * along * v,
    }[mode]


def last_logits(subject: HookedTransformer, rows: list[list[int]], edits: list[Edit]) -> Tensor:
    return torch.stack([subject.edited(edits)(torch.tensor([row]))[0, -1] for row in rows])


@over("mode", MODES)
@pytest.mark.parametrize("part", ["L0F7", "L1F12"])
def test_edits_of_a_feature_are_its_formula(part: str, mode: str) -> None:
    site, index = {"L0": STREAM, "L1": WRITES}[part[:2]], int(part[3:])
    coder, batch = coders()[part[:2]], split().to_batch(ROWS)
    real = batch.host().real
    for at in ({}, {"pos": -1}):
        h, f = value(site, ROWS), value(f"blocks.{part[1]}.hook_features", ROWS)[..., index]
        columns = real if not at else last_real(real)
        wanted = torch.where(columns[..., None], pushed(h, f, coder.W_dec[index], 1.7, mode), h)
        by_hand = observe(
            plain().transformer, batch, [Read("unembed.hook_out")], edits=[Edit(site, Set(wanted))]
        )
        ours = observe(
            split().transformer,
            batch,
            [Read("unembed.hook_out")],
            edits=feature_edits(split(), part, 1.7, mode, at=at),  # type: ignore[arg-type]
        )
        one, other = (x.trace[Read("unembed.hook_out")][real] for x in (by_hand, ours))
        assert_close(other, one)


def last_real(real: Tensor) -> Tensor:
    """A mask of each row's last token."""
    return real & (real.flip(1).int().cumsum(1).flip(1) == 1)


@over("mode", MODES)
def test_features_of_heads_are_steered_side_by_side(mode: str) -> None:
    width = plain().cfg.n_heads * plain().cfg.head_width
    subject = plain().with_dictionaries([dictionary(HEADS, HEADS, 3, width, width)])
    z = value(HEADS, ROWS, plain())
    coder = subject.transformer.dictionaries[1]
    assert isinstance(coder, Dictionary)
    f = value("blocks.1.hook_features", ROWS, subject)[..., 5]
    wanted = pushed(z.flatten(2), f, coder.W_dec[5], 1.7, mode).view_as(z)
    real = subject.to_batch(ROWS).host().real
    read = Read("unembed.hook_out")
    one = observe(plain().transformer, plain().to_batch(ROWS), [read], edits=[Edit(HEADS, Set(wanted))])
    other = observe(
        subject.transformer,
        subject.to_batch(ROWS),
        [read],
        edits=feature_edits(subject, "L1F5", 1.7, mode),  # type: ignore[arg-type]
    )
    assert_close(other.trace[read][real], one.trace[read][real])


def test_what_should_change_nothing_changes_nothing_and_a_cap_holds() -> None:
    f = value("blocks.1.hook_features", ROWS)[..., 12]
    before = value(WRITES, ROWS, plain())
    read, batch = Read(WRITES), split().to_batch(ROWS)

    def after(edits: list[Edit]) -> Tensor:
        return observe(split().transformer, batch, [read], edits=edits).trace[read]

    v = coders()["L1"].W_dec[12]
    assert_close(after(feature_edits(split(), "L1F12", 1.0, "orthogonal")), before)
    assert_close(after(feature_edits(split(), "L1F12", 0.0, "orthogonal")) @ v, torch.zeros_like(f))
    assert_close(after(feature_edits(split(), "L1F12", 0.0, "add")), before)
    capped = after(feature_edits(split(), "L1F12", 0.3, "cap")) @ v / (v @ v)
    assert float(capped.max()) <= 0.3 + 1e-12 and float((before @ v / (v @ v)).max()) > 0.3
    own = Edit("L1F12", Set(f[..., None].expand(*f.shape, S)))
    assert_close(after([own]), before)  # clamped to its own value


@over("mode", MODES)
@over("at", [{}, {"pos": "new"}])
def test_cached_generation_equals_uncached(mode: str, at: dict[str, str]) -> None:
    edits = feature_edits(split(), "L1F12", 3.0, mode, at=at) + feature_edits(
        split(), "L0F7", 2.0, mode, at=at
    )  # type: ignore[arg-type]
    row = list(ROWS[0])
    prompt = len(row)
    for _ in range(5):
        new = {"pos": tuple(range(prompt, len(row)))} if at else {}
        here = (
            [Edit(edit.where, edit.change, {**edit.at, **new}) for edit in edits]
            if len(row) > prompt or not at
            else []
        )
        steered = split().edited(here)
        row.append(int(steered(torch.tensor([row]))[0, -1].argmax()))
    found = split().edited(edits).generate([ROWS[0]], max_new_tokens=5, stop_at_eos=False)
    assert found.tokens[0].tolist()[-5:] == row[-5:]


# --- the curve ------------------------------------------------------------------------------------------------------


def units(part: str, texts: Tensor) -> tuple[float, float, Tensor]:
    """The largest activation of a feature, its mean where it is active, and which features are ever active."""
    f = value(f"blocks.{part[1]}.hook_features", texts.tolist())
    one = f[..., int(part[3:])]
    return float(one.max()), float(one[one > 0].mean()), f.flatten(0, 1).any(0)


@pytest.mark.parametrize("mode", MODES)
def test_a_curve_and_its_nulls_are_loops_of_edited_passes(mode: str) -> None:
    parts, strengths, r = ["L0F7", "L1F12"], [-1.0, 0.5, 2.0], 3
    found = steering_curve(
        split(), ROWS, parts, strengths=strengths, mode=mode, metric=METRIC, unit_on=TEXTS, loss_on=TEXTS[:3],  # type: ignore[arg-type]
        random=r, seed=5,
    )  # fmt: skip
    assert found.feature.values.tolist() == parts and found.layer.values.tolist() == [0, 1]
    base = last_logits(plain(), ROWS, [])
    draw = torch.Generator().manual_seed(5)
    for layer, part in enumerate(parts):
        coder, site, index = coders()[part[:2]], [STREAM, WRITES][layer], int(part[3:])
        unit, _, active = units(part, TEXTS)
        assert float(found.activation.sel(layer=layer)) == pytest.approx(unit)
        others = [i for i in active.nonzero()[:, 0].tolist() if i != index]
        chosen = [others[i] for i in torch.randperm(len(others), generator=draw)[:r]]
        noise = torch.randn(r, 24, generator=draw, dtype=torch.float64)
        noise *= coder.W_dec[index].norm() / noise.norm(dim=-1, keepdim=True)
        assert float(found.norm.sel(layer=layer)) == pytest.approx(unit * float(coder.W_dec[index].norm()))
        h, f = value(site, ROWS), value(f"blocks.{layer}.hook_features", ROWS)
        for strength in strengths:
            amount = strength if mode == "orthogonal" else strength * unit
            cell = found.sel(layer=layer, strength=strength, score="effect")
            for beside, draws in (("random features", [(i, coder.W_dec[i]) for i in chosen]),
                                  ("random directions", [(index, v) for v in noise])):  # fmt: skip
                effects = [changed(site, pushed(h, f[..., i], v, amount, mode), base) for i, v in draws]
                np.testing.assert_allclose(
                    cell.draws.sel(beside=beside), [float(x.mean()) for x in effects], rtol=1e-7, atol=1e-9
                )
                assert float(cell.nulls.sel(beside=beside)) == pytest.approx(
                    float(torch.stack(effects).mean())
                )
            own = changed(site, pushed(h, f[..., index], coder.W_dec[index], amount, mode), base)
            assert float(cell.value) == pytest.approx(float(own.mean()), rel=1e-7, abs=1e-9)
            half = student95(3) * float(own.std()) / math.sqrt(3)
            assert float(cell.high) - float(cell.value) == pytest.approx(half, rel=1e-6, abs=1e-9)
            assert float(cell.nulls.sel(beside="plain prompt")) == 0
    np.testing.assert_allclose(found.null, found.nulls.sel(beside="random features"))
    np.testing.assert_allclose(found.band, found.bands.sel(beside="random features"))
    np.testing.assert_allclose(found.p, found.p_values.sel(beside="random features"))
    level = (base[:, 3] - base[:, 4]).mean()
    assert float(found.plain.sel(score="effect")) == pytest.approx(float(level))
    logs = plain()(TEXTS[:3]).log_softmax(-1)[:, :-1].gather(2, TEXTS[:3, 1:, None])
    assert float(found.plain.sel(score="loss")) == pytest.approx(-float(logs.mean()))


def changed(site: str, new: Tensor, base: Tensor) -> Tensor:
    """The change of the metric of every row where a site of all rows has other values."""
    read, batch = Read("unembed.hook_out"), plain().to_batch(ROWS)
    logits = observe(plain().transformer, batch, [read], edits=[Edit(site, Set(new))]).trace[read]
    last = logits[last_real(batch.host().real)]
    return (last - base)[:, 3] - (last - base)[:, 4]


def test_units_are_those_of_the_texts_in_any_batch_and_with_bos_left_out() -> None:
    largest, mean, _ = units("L1F12", TEXTS)
    for unit, wanted in (("max", largest), ("mean", mean), (2.5, 2.5)):
        for data in (TEXTS, Batch.of(TEXTS.tolist(), side="left")):
            found = steering_curve(
                split(),
                ROWS,
                "L1F12",
                strengths=[1.0],
                unit=unit,
                unit_on=data,
                metric=METRIC,
                random=2,  # type: ignore[arg-type]
            )
            assert found.activation.item() == pytest.approx(wanted)
    own = steering_curve(split(), TEXTS, "L1F12", strengths=[1.0], metric=METRIC, random=2)
    assert own.activation.item() == pytest.approx(largest)  # without unit_on those of the prompts
    f = value("blocks.1.hook_features", TEXTS.tolist())[..., 12]
    bos = steering_curve(
        split(),
        ROWS,
        "L1F12",
        strengths=[1.0],
        unit_on=Batch.of(TEXTS.tolist(), bos=True),
        metric=METRIC,
        random=2,
    )
    assert bos.activation.item() == pytest.approx(float(f[:, 1:].max()))


def test_adding_a_feature_is_adding_its_direction() -> None:
    unit = units("L1F12", TEXTS)[0]
    found = steering_curve(
        split(), ROWS, "L1F12", strengths=[1.0, 2.0], unit_on=TEXTS, metric=METRIC, random=2
    )
    direction = Subspace(WRITES, unit * coders()["L1"].W_dec[12:13])
    other = steering_curve(plain(), ROWS, [direction], strengths=[1.0, 2.0], metric=METRIC, random=2)
    for name in ("value", "low", "high", "n", "norm", "plain"):
        np.testing.assert_allclose(found[name], other[name], rtol=1e-9)


def test_where_few_features_are_active_fewer_stand_beside_and_a_note_says_so() -> None:
    active = int(units("L1F12", TEXTS[:1, :2])[2].sum())
    found = steering_curve(
        split(), ROWS, "L1F12", strengths=[1.0], unit=1.0, unit_on=TEXTS[:1, :2], metric=METRIC, random=1000
    )
    own = bool(units("L1F12", TEXTS[:1, :2])[2][12])
    assert found.sizes["draw"] == active - own
    assert any("1000 random features" in note for note in found.attrs["notes"])


def test_its_picture_and_page_name_the_feature_and_show_both_bands() -> None:
    found = steering_curve(
        split(), ROWS, ["L0F7", "L1F12"], strengths=[0.0, 1.0, 2.0], unit_on=TEXTS, metric=METRIC, random=3
    )
    ax = interp.plot.steering_curve(found)
    legend = ax.get_legend()
    assert legend is not None and [text.get_text() for text in legend.get_texts()] == ["L0F7", "L1F12"]
    drawn = np.concatenate([line.get_ydata() for line in ax.lines if line.get_linestyle() == "--"])  # type: ignore[arg-type]
    ends = found.bands.sel(beside="random directions", score="effect").values
    assert sorted(drawn.tolist()) == sorted(ends.ravel().tolist())
    assert "features, dashed: directions" in ax.get_title() and "max activation" in ax.get_xlabel()
    page = interp.pages.steering_page(found)
    assert "random features of the dictionary" in page and "A feature of a dictionary is moved (add)" in page
    assert page.count("<figcaption>L1F12</figcaption>") == 2 and ">random directions</th>" in page


# --- planted --------------------------------------------------------------------------------------------------------


def test_a_planted_feature_raises_the_token_that_it_writes_and_its_nulls_do_not() -> None:
    """Feature 7 writes along the unembedding of token 9 and is active; all others are random."""
    coder = dictionary(READS, WRITES, 2)
    W_U = plain().W_U
    with torch.no_grad():
        target = W_U[:, 9] - W_U.mean(1)
        coder.W_dec[7] = target / target.norm()
    subject = plain().with_dictionaries([coder])
    metric = interp.metrics.answer_log_probability(9)
    for mode in ("add", "clamp"):
        found = steering_curve(
            subject, some_tokens(8, 7, seed=11), "L1F7", strengths=[2.0], mode=mode, metric=metric, unit=3.0,  # type: ignore[arg-type]
            random=19,
        ).sel(score="effect").squeeze()  # fmt: skip
        assert float(found.value) > 0.5
        for beside in ("random features", "random directions"):
            assert float(found.value) > float(found.draws.sel(beside=beside).max())
            assert float(found.p_values.sel(beside=beside)) == pytest.approx(2 / 20)


@pytest.mark.slow
@over("mode", ["add", "clamp"])
def test_a_feature_like_all_others_lies_outside_of_their_band_one_time_in_twenty(mode: str) -> None:
    """Dictionaries whose features are drawn alike: p against random features is at most 0.05 in 5 % of them."""
    outside = tried = 0
    for seed in range(60):
        each = [dictionary(STREAM, STREAM, 1000 + seed), dictionary(READS, WRITES, 5000 + seed)]
        wide = [of_many_features(one, 100) for one in each]
        subject = plain().with_dictionaries(wide)
        found = steering_curve(
            subject, some_tokens(3, 6, seed=seed), ["L0F3", "L1F4"], strengths=[1.0], unit=1.0, metric=METRIC,
            mode=mode, random=39, seed=seed,  # type: ignore[arg-type]
        )  # fmt: skip
        assert found.sizes["draw"] == 39
        p = found.p_values.sel(score="effect", strength=1.0, beside="random features")
        outside, tried = outside + int((p <= 0.05).sum()), tried + 2
    low, high = scipy.stats.binom.ppf([0.0005, 0.9995], tried, 0.05)
    assert low <= outside <= high, (outside, tried)


def of_many_features(one: Dictionary, n: int) -> Dictionary:
    """A random dictionary of n features whose decoder rows have one length, at the sites of another."""
    seed = int(one.W_enc[0, 0].abs() * 1e6)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(n, one.d_out, generator=generator, dtype=torch.float64)
    weights = {
        "W_enc": torch.randn(one.d_in, n, generator=generator, dtype=torch.float64) / one.d_in**0.5,
        "b_enc": torch.zeros(n, dtype=torch.float64), "W_dec": rows / rows.norm(dim=1, keepdim=True),
        "b_dec": one.b_dec,
    }  # fmt: skip
    return Dictionary(ReLU(), weights, reads=one.reads, writes=one.writes, apply_b_dec_to_input=False)


# --- refused --------------------------------------------------------------------------------------------------------


def test_what_has_no_meaning_is_refused() -> None:
    how = {"metric": METRIC, "random": 2}
    refused: dict[str, object] = {
        "a feature is required, such as L5F123, got L1.mlp": lambda: steering_curve(
            split(), ROWS, "L1.mlp", **how
        ),
        "index of a feature is 0 to 29": lambda: steering_curve(split(), ROWS, "L1F30", **how),
        "hook_features": lambda: steering_curve(plain(), ROWS, "L1F3", **how),
        "got both": lambda: steering_curve(
            split(), ROWS, ["L1F3", Subspace(STREAM, torch.eye(24)[:1])], **how
        ),
        "different layers are required": lambda: steering_curve(split(), ROWS, ["L1F3", "L1F4"], **how),
        "beside stands beside directions": lambda: steering_curve(
            split(), ROWS, "L1F3", metric=METRIC, beside=[torch.ones(2, 24)]
        ),
        "unit_on and at go with features": lambda: steering_curve(
            split(), ROWS, [Subspace(STREAM, torch.eye(24)[:1])], mode="clamp", **how
        ),
        "a number that is not 0": lambda: steering_curve(split(), ROWS, "L1F3", unit=0.0, **how),
        "active on no token": lambda: steering_curve(dead(), ROWS, "L1F3", **how),
        "mode must be one of": lambda: feature_edits(split(), "L1F3", 1.0, "push"),  # type: ignore[arg-type]
        "does not normalise": lambda: feature_edits(normalising(), "L0F3", 1.0),
    }
    for message, call in refused.items():
        with pytest.raises((ValueError, KeyError, IndexError), match=message):
            call()  # type: ignore[operator]


def dead() -> HookedTransformer:
    """A model with a dictionary whose feature 3 is never active."""
    coder = dictionary(READS, WRITES, 2)
    with torch.no_grad():
        coder.b_enc[3] = -1e6
    return plain().with_dictionaries([coder])


def normalising() -> HookedTransformer:
    one = coders()["L0"]
    return plain().with_dictionaries(
        [Dictionary(ReLU(), dict(one.named_parameters()), reads=STREAM, normalize_activations="layer_norm")]
    )


def test_a_dead_feature_can_be_steered_by_a_given_activation() -> None:
    found = steering_curve(dead(), ROWS, "L1F3", strengths=[1.0], unit=2.0, metric=METRIC, random=5)
    assert found.activation.item() == 2.0 and bool(np.isfinite(found.value).all())


def test_text_is_steered_by_generation_with_any_tokenizer() -> None:
    subject = hooked("gpt2")
    d = subject.cfg.d_model
    coder = dictionary("blocks.1.hook_mlp_in", "blocks.1.hook_mlp_out", 2, d, d).to(torch.float32)
    subject = subject.with_dictionaries([coder])
    edits = feature_edits(subject, "L1F3", 30.0, at={"pos": "new"})
    plain_text = subject.generate("The cat sat", 6, stop_at_eos=False)
    steered = subject.generate("The cat sat", 6, stop_at_eos=False, edits=edits)
    assert steered.tokens[0, : -6 + 1].tolist() == plain_text.tokens[0, : -6 + 1].tolist()
    assert steered.tokens.tolist() != plain_text.tokens.tolist()
