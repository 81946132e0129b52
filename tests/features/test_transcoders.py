"""Kinds of dictionaries by numbers worked out by hand, and dictionaries that write elsewhere than they read."""

import copy

import numpy as np
import pytest
import torch
from torch import Tensor

import interp
from interp import Edit, HookedTransformer, Read
from interp.edits import PerRow, Set
from interp.features import (
    AbsTopK,
    Dictionary,
    Gated,
    GroupMax,
    JumpReLU,
    ReLU,
    TopK,
    dictionary_quality,
    reconstruction_quality,
)
from interp.features.activations import DictionaryKind
from interp.model.norm import Normalize
from interp.passes import observe
from tests.configs import build
from tests.tolerances import assert_close

READS, WRITES = "blocks.1.ln2.hook_normalized", "blocks.1.hook_mlp_out"
ROWS = [[3, 1, 4, 1, 5, 9], [2, 7, 1, 8]]


def with_pre_activations(kind: DictionaryKind, z: list[float], **more: list[float]) -> list[float]:
    """The features of a dictionary whose pre-activations are these, for an input of 0."""
    s = len(z)
    weights = {
        "W_enc": torch.zeros(3, s).double(), "b_enc": torch.tensor(z, dtype=torch.float64),
        "W_dec": torch.ones(s, 3).double(), "b_dec": torch.zeros(3).double(),
        **{name: torch.tensor(value, dtype=torch.float64) for name, value in more.items()},
    }  # fmt: skip
    return Dictionary(kind, weights).encode(torch.zeros(1, 3).double())[0].tolist()


@pytest.mark.parametrize(
    ("kind", "z", "more", "features"),
    [
        (ReLU(), [2, -3, 0.5, 0.25], {}, [2, 0, 0.5, 0.25]),
        (JumpReLU(), [2, -3, 0.5, 0.25], {"threshold": [0.5] * 4}, [2, 0, 0, 0]),
        (JumpReLU(), [2, -3, -0.2, 0.25], {"threshold": [-1.0] * 4}, [2, 0, 0, 0.25]),
        (JumpReLU(relu=False), [2, -3, -0.2, 0.25], {"threshold": [-1.0] * 4}, [2, 0, -0.2, 0.25]),
        (TopK(3), [2, -3, -0.2, -0.5], {}, [2, 0, 0, 0]),
        (TopK(3, relu=False), [2, -3, -0.2, -0.5], {}, [2, 0, -0.2, -0.5]),
        (AbsTopK(2), [2, -3, 0.5, 0.25], {}, [2, -3, 0, 0]),
        (GroupMax(2), [2, -3, 0.5, 0.25], {}, [2, 0, 0.5, 0]),
        (GroupMax(2), [-2, -3, 0.5, 0.25], {}, [0, 0, 0.5, 0]),
    ],
)
def test_kinds_give_the_features_that_were_worked_out_by_hand(
    kind: DictionaryKind, z: list[float], more: dict[str, list[float]], features: list[float]
) -> None:
    assert with_pre_activations(kind, z, **more) == features


def test_gated_features_are_those_of_two_affine_maps() -> None:
    rng = np.random.default_rng(0)
    w = {"W_enc": rng.normal(size=(5, 7)), "W_dec": rng.normal(size=(7, 5)), "b_dec": rng.normal(size=5)}
    w |= {name: rng.normal(size=7) for name in ("b_gate", "b_mag", "r_mag")}
    x = rng.normal(size=(40, 5))
    centred = x - w["b_dec"]
    on = centred @ w["W_enc"] + w["b_gate"] > 0
    size = centred @ (w["W_enc"] * np.exp(w["r_mag"])) + w["b_mag"]
    features = np.where(on, np.maximum(size, 0), 0)
    assert (on & (size < 0)).any() and (~on & (size > 0)).any()
    gated = Dictionary(Gated(), {name: torch.from_numpy(value) for name, value in w.items()})
    assert_close(gated.encode(torch.from_numpy(x)), torch.from_numpy(features))
    assert_close(gated(torch.from_numpy(x)), torch.from_numpy(features @ w["W_dec"] + w["b_dec"]))


def random_transcoder(d: int, s: int = 40, *, skip: bool = True, **more: object) -> Dictionary:
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weights = {
        "W_enc": normal(d, s) / d**0.5,
        "b_enc": normal(s),
        "W_dec": normal(s, d) / s**0.5,
        "b_dec": normal(d),
    }
    weights |= {"W_skip": normal(d, d) / d**0.5} if skip else {}
    return Dictionary(ReLU(), weights, reads=READS, writes=WRITES, **more)  # type: ignore[arg-type]


def model() -> HookedTransformer:
    return HookedTransformer(copy.deepcopy(build("llama-gqa")).to(torch.float64))


def test_a_skip_adds_the_input_times_its_matrix_untransposed() -> None:
    weights = {
        "W_enc": torch.zeros(2, 3), "b_enc": torch.zeros(3), "W_dec": torch.zeros(3, 2), "b_dec": torch.zeros(2),
        "W_skip": torch.tensor([[0.0, 1.0], [0.0, 0.0]]),
    }  # fmt: skip
    coder = Dictionary(ReLU(), weights, reads=READS, writes=WRITES)
    assert coder(torch.tensor([[3.0, 5.0]])).tolist() == [[0.0, 3.0]]
    with pytest.raises(ValueError, match="the skip"):
        coder.decode(torch.zeros(1, 3))


def test_a_transcoder_that_changes_nothing_changes_no_bit() -> None:
    subject = model()
    edits = random_transcoder(subject.cfg.d_model).edits(lambda features: features)
    assert torch.equal(subject.edited(edits)(ROWS[0]), subject(ROWS[0]))


@pytest.mark.parametrize("pos", [None, 1, -1, (0, 2), PerRow([1, 3]), PerRow([(0, 2), (3,)])], ids=str)
@pytest.mark.parametrize("error", [True, False])
def test_a_changed_feature_changes_what_the_transcoder_writes_at_these_tokens(
    pos: object, error: bool
) -> None:
    """Against a loop over rows and tokens that sets the output of the MLP by hand."""
    subject = model()
    coder = random_transcoder(subject.cfg.d_model)
    batch = subject.to_batch(ROWS)

    def doubled(features: Tensor) -> Tensor:
        features[..., 7] = 2 * features[..., 7] + 1
        return features

    at = {} if pos is None else {"pos": pos}
    edits = coder.edits(doubled, error=error, at=at)
    found = observe(subject.transformer, batch, [Read(WRITES)], edits=edits)
    clean = observe(subject.transformer, batch, [Read(READS), Read(WRITES)]).trace
    expected = clean[Read(WRITES)].clone()
    for row, ids in enumerate(ROWS):
        shift = int(batch.host().real[row].int().argmax())
        chosen = range(len(ids)) if pos is None else tokens_of(pos, row, len(ids))
        for token in chosen:
            x = clean[Read(READS)][row, shift + token]
            f = (x @ coder.W_enc + coder.b_enc).relu()
            g = f.clone()
            g[7] = 2 * g[7] + 1
            before = f @ coder.W_dec + coder.b_dec + x @ coder.get_parameter("W_skip")
            after = g @ coder.W_dec + coder.b_dec + x @ coder.get_parameter("W_skip")
            old = expected[row, shift + token]
            expected[row, shift + token] = old + after - before if error else after
    real = batch.host().real
    assert_close(found.trace[Read(WRITES)][real], expected[real])


def tokens_of(pos: object, row: int, length: int) -> list[int]:
    given = pos.places[row] if isinstance(pos, PerRow) else pos  # type: ignore[attr-defined]
    several = given if isinstance(given, tuple) else (given,)
    return [token % length for token in several]  # type: ignore[operator]


def test_cached_generation_under_an_edited_transcoder_equals_uncached() -> None:
    subject = model()
    edits = random_transcoder(subject.cfg.d_model).edits(lambda features: 1.5 * features)
    edited = subject.edited(edits)
    row = list(ROWS[0])
    for _ in range(5):
        row.append(int(edited(row)[0, -1].argmax()))
    found = edited.generate([ROWS[0]], max_new_tokens=5)
    assert found.tokens[0].tolist()[-5:] == row[-5:]


def test_a_site_that_comes_later_than_the_one_that_is_written_is_refused() -> None:
    subject = model()
    coder = random_transcoder(subject.cfg.d_model, skip=False)
    wrong = Dictionary(
        coder.kind, dict(coder.named_parameters()), reads="blocks.1.hook_resid_post", writes=WRITES
    )
    with pytest.raises(RuntimeError, match="to come before its own"):
        subject.edited(wrong.edits(lambda features: features))(ROWS[0])


@pytest.mark.parametrize("name", ["llama-gqa", "gpt2", "gemma2"])
def test_the_gain_of_a_norm_is_folded_into_the_weights(name: str) -> None:
    """x before the gain is what the norm divides by its scale; the dictionary of it is a loop over no gain at all."""
    subject = HookedTransformer(copy.deepcopy(build(name)).to(torch.float64))
    norm = subject.transformer.get_submodule("blocks.1.ln2")
    assert isinstance(norm, Normalize)
    for vector in (norm.weight, norm.bias):
        if vector is not None:
            torch.nn.init.normal_(vector, generator=torch.Generator().manual_seed(1))
    coder = random_transcoder(subject.cfg.d_model, before_gain=True)
    batch = subject.to_batch(ROWS[:1])
    trace = observe(
        subject.transformer,
        batch,
        [Read(READS), Read("blocks.1.hook_mlp_in"), Read("blocks.1.ln2.hook_scale")],
    ).trace
    stream = trace[Read("blocks.1.hook_mlp_in")]
    bare = norm.centred(stream) / trace[Read("blocks.1.ln2.hook_scale")]
    z = bare @ coder.W_enc + coder.b_enc
    fitted = coder.fitted_to(subject)
    assert_close(fitted.before(trace[Read(READS)]), z)
    assert_close(
        fitted(trace[Read(READS)]),
        z.relu() @ coder.W_dec + coder.b_dec + bare @ coder.get_parameter("W_skip"),
    )
    assert fitted.fitted_to(subject) is fitted
    with pytest.raises(ValueError, match=r"dictionary\.fitted_to\(model\)"):
        coder.features(trace[Read(READS)])


def test_the_gain_of_a_norm_is_folded_into_both_affine_maps_of_a_gated_dictionary() -> None:
    subject = HookedTransformer(copy.deepcopy(build("gpt2"))).to(torch.float64)
    norm = subject.transformer.get_submodule("blocks.1.ln2")
    assert isinstance(norm, Normalize)
    for vector in (norm.weight, norm.bias):
        assert vector is not None
        torch.nn.init.normal_(vector, generator=torch.Generator().manual_seed(1))
    weights = {
        name: weight.detach()
        for name, weight in random_transcoder(subject.cfg.d_model, skip=False).named_parameters()
    }
    bias = weights.pop("b_enc")
    weights |= {"b_gate": bias, "b_mag": bias - 0.5, "r_mag": bias / 2}
    coder = Dictionary(Gated(), weights, reads=READS, writes=WRITES, before_gain=True)
    x = torch.randn(40, subject.cfg.d_model, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    z = x @ coder.W_enc
    features = ((bias / 2).exp() * z + bias - 0.5).relu() * (z + bias > 0)
    assert ((z + bias > 0) & (features == 0)).any() and (features > 0).any()
    assert_close(coder.fitted_to(subject).encode(x * norm.gamma + norm.bias), features)


def test_a_dictionary_of_another_width_or_site_is_refused_by_the_model() -> None:
    subject = model()
    with pytest.raises(ValueError, match=r"a dictionary of width \d+ is required at 'blocks\.1\.ln2"):
        random_transcoder(subject.cfg.d_model + 1).fitted_to(subject)
    weights = dict(random_transcoder(subject.cfg.d_model, skip=False).named_parameters())
    with pytest.raises(KeyError, match="layers are 0 to"):
        Dictionary(ReLU(), weights, reads="blocks.99.hook_resid_pre").fitted_to(subject)
    with pytest.raises(ValueError, match="does not know its site"):
        Dictionary(ReLU(), weights).fitted_to(subject)


def test_a_prefix_is_the_dictionary_of_the_first_features() -> None:
    coder = random_transcoder(6, 10)
    x = torch.randn(4, 6, dtype=torch.float64)
    first = coder.prefix(4)
    f = (x @ coder.W_enc[:, :4] + coder.b_enc[:4]).relu()
    assert_close(first.encode(x), f)
    assert_close(first(x), f @ coder.W_dec[:4] + coder.b_dec + x @ coder.get_parameter("W_skip"))
    with pytest.raises(ValueError, match="n must be from 1 to 10"):
        coder.prefix(11)


def test_a_transcoder_neither_normalises_nor_subtracts_its_bias() -> None:
    weights = dict(random_transcoder(6, skip=False).named_parameters())
    for more in ({"apply_b_dec_to_input": True}, {"normalize_activations": "layer_norm"}):
        with pytest.raises(ValueError, match="belong to an SAE"):
            Dictionary(ReLU(), weights, reads=READS, writes=WRITES, **more)  # type: ignore[arg-type]
    coder = Dictionary(ReLU(), weights, reads=READS, writes=WRITES)
    for call in (
        lambda: coder.reconstruct(torch.zeros(1, 6).double()),
        lambda: coder.on_features(torch.relu),
    ):
        with pytest.raises(ValueError, match="requires an SAE"):
            call()


def test_the_quality_of_a_transcoder_is_that_of_a_loop_over_texts() -> None:
    """What it says of the MLP's output, and the loss of the model that runs on it; zero and mean at what it writes."""
    subject = model()
    coder = random_transcoder(subject.cfg.d_model)
    found = dictionary_quality(subject, ROWS, coder, skip_bos=False)
    inputs, outputs = [], []
    loss: dict[str, float] = {"clean": 0.0, "dictionary": 0.0, "zero": 0.0, "mean": 0.0}
    for ids in ROWS:
        trace = observe(subject.transformer, subject.to_batch([ids]), [Read(READS), Read(WRITES)]).trace
        inputs.append(trace[Read(READS)][0])
        outputs.append(trace[Read(WRITES)][0])
    x, y = torch.cat(inputs), torch.cat(outputs)
    given = coder(x)
    spread = (y - y.mean(0)).square().sum()
    for i, ids in enumerate(ROWS):
        swaps = {"clean": outputs[i], "dictionary": coder(inputs[i]), "zero": 0 * outputs[i],
                 "mean": y.mean(0).expand_as(outputs[i])}  # fmt: skip
        for name, value in swaps.items():
            logits = subject.edited(Edit(WRITES, Set(value[None])))(ids)[0]
            loss[name] -= float(logits.log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]].sum())
    value = {str(name): float(found.value.sel(score=name)) for name in found.score.values}
    n = sum(len(ids) - 1 for ids in ROWS)
    assert value["explained_variance"] == pytest.approx(
        float(1 - (y - given).square().sum() / spread), rel=1e-9
    )
    assert value["mse"] == pytest.approx(float((y - given).square().mean()), rel=1e-9)
    assert value["l0"] == pytest.approx(float((coder.encode(x) != 0).double().sum(1).mean()), rel=1e-12)
    for name, summed in loss.items():
        assert value[f"ce_{name}"] == pytest.approx(summed / n, rel=1e-9), name
    assert_close(torch.from_numpy(found["mean"].values), y.mean(0))
    alone = reconstruction_quality(coder, (x, y)).value
    whole = interp.features.reconstruction(subject, ROWS, coder, skip_bos=False).value
    for name in ("l0", "mse", "explained_variance"):
        assert float(alone.sel(score=name)) == pytest.approx(value[name], rel=1e-9)
        assert float(whole.sel(score=name)) == pytest.approx(value[name], rel=1e-12)
    with pytest.raises(ValueError, match="requires an SAE"):
        dictionary_quality(subject, ROWS, coder, "L1.resid")
    with pytest.raises(ValueError, match=r"pairs of vectors \[n, 24\] and \[n, 24\]"):
        reconstruction_quality(coder, x)


def test_an_sae_at_its_own_site_is_edited_as_at_a_named_one() -> None:
    subject = model()
    weights = dict(random_transcoder(subject.cfg.d_model, skip=False).named_parameters())
    sae = Dictionary(ReLU(), weights, reads="blocks.1.hook_resid_post")
    own = subject.edited(sae.edits(lambda features: 2 * features))(ROWS[0])
    named = subject.edited(Edit("blocks.1.hook_resid_post", sae.on_features(lambda features: 2 * features)))(
        ROWS[0]
    )
    assert torch.equal(own, named)
    read = sae.read()
    assert observe(subject.transformer, subject.to_batch(ROWS), [read]).trace[read].shape[-1] == sae.d_sae
    assert interp.features.Dictionary is Dictionary
