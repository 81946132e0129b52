"""Cross-layer transcoders read no more than they need and sum what they say; crosscoders compare their sources."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from interp import HookedTransformer, Read, observe
from interp.features import (
    Crosscoder,
    CrossLayerTranscoder,
    Gated,
    JumpReLU,
    LayerWeights,
    NormTopK,
    ReLU,
    cross_layer,
    load,
)
from interp.features.formats import files
from tests.configs import build
from tests.features.formats.written import (
    LAYERS,
    D,
    N,
    S,
    circuit_tracer_clt,
    gemma_scope_2_layers,
    llamascopium_clt,
)
from tests.tolerances import assert_close


def opened(folder: Path, make: object = circuit_tracer_clt) -> tuple[CrossLayerTranscoder, dict[int, Tensor]]:
    answer = make(folder)  # type: ignore[operator]
    found = load(folder)
    assert isinstance(found, CrossLayerTranscoder)
    return found, dict(enumerate(torch.from_numpy(answer.x)))


@pytest.mark.parametrize("make", [circuit_tracer_clt, llamascopium_clt, gemma_scope_2_layers])
def test_decoding_reads_the_directions_of_active_features_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: object
) -> None:
    clt, x = opened(tmp_path, make)
    asked: list[tuple[str, object]] = []
    get = files.Tensors.get

    def watched(self: files.Tensors, name: str, index: files.Index = ()) -> Tensor:
        asked.append((name, index))
        return get(self, name, index)

    monkeypatch.setattr(files.Tensors, "get", watched)
    features = torch.zeros(N, S).double()
    features[2, 7] = features[5, 3] = 1.5
    clt.decode({1: features}, x)
    decoders = [(name, index) for name, index in asked if "dec" in name.lower() or "W_D" in name]
    assert decoders and all([3, 7] in list(index) for name, index in decoders)
    assert not any("enc" in name.lower() or "W_E" in name for name, _ in asked)
    asked.clear()
    clt.decode({1: torch.zeros(N, S).double()}, x)
    assert not any("dec" in name.lower() or "W_D" in name for name, _ in asked)


def test_what_features_say_is_the_sum_of_what_each_says(tmp_path: Path) -> None:
    clt, x = opened(tmp_path)
    features = {layer: clt.encode(layer, given) for layer, given in x.items()}
    whole, nothing = clt.decode(features), clt.decode({0: torch.zeros(N, S).double()})
    alone = [clt.decode({layer: given}) for layer, given in features.items()]
    for j in range(LAYERS):
        assert_close(nothing[j], clt.b_dec[j].expand(N, -1))
        assert_close(whole[j], sum(each[j] - nothing[j] for each in alone) + nothing[j])
    assert_close(alone[2][1], nothing[1])  # a later layer says nothing about an earlier one
    assert all(torch.equal(clt(x)[j], whole[j]) for j in range(LAYERS))


def test_directions_are_those_that_decoding_adds(tmp_path: Path) -> None:
    clt, _ = opened(tmp_path)
    one = torch.zeros(1, S).double()
    one[0, 4] = 2.0
    directions = clt.directions(1, [4, 0])
    assert directions.shape == (2, 2, D) and clt.later(1) == [1, 2]
    for place, j in enumerate(clt.later(1)):
        assert_close(clt.decode({1: one})[j][0], clt.b_dec[j] + 2 * directions[0, place])


@pytest.mark.parametrize("at_once", [1, 3, 1024])
def test_the_number_of_features_read_at_once_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    clt, x = opened(tmp_path)
    expected = clt(x)
    monkeypatch.setattr(cross_layer, "AT_ONCE", at_once)
    for j, value in clt(x).items():
        assert_close(value, expected[j])


def test_leading_axes_are_those_of_the_vectors(tmp_path: Path) -> None:
    clt, x = opened(tmp_path)
    folded = {layer: given[:6].reshape(2, 3, -1) for layer, given in x.items()}
    for j, value in clt(folded).items():
        assert_close(value.reshape(6, -1), clt({layer: given[:6] for layer, given in x.items()})[j])
    assert clt.encode(1, x[1][0]).shape == (S,)


def test_weights_are_used_in_the_dtype_asked_for(tmp_path: Path) -> None:
    _, x = opened(tmp_path)
    low = load(tmp_path, dtype=torch.bfloat16)
    assert isinstance(low, CrossLayerTranscoder)
    assert low.encode(0, x[0]).dtype == low(x)[2].dtype == torch.bfloat16


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    clt, x = opened(tmp_path)
    for call, message in (
        (lambda: clt.encode(3, x[0]), "layer must be one of [0, 1, 2], got 3"),
        (lambda: clt.encode(0, x[0][:, :4]), "x of layer 0 must be a tensor of shape [..., 6]"),
        (lambda: clt.directions(0, [S]), "features of layer 0 are 0 to 9, got [10]"),
        (lambda: clt.decode({1: x[0]}), "features of layer 1 must be a tensor of shape [..., 10]"),
        (lambda: clt.decode({}), "features of one layer at least are required"),
        (lambda: CrossLayerTranscoder(Gated(), clt.layers, clt.b_dec), "a kind of one pre-activation"),
        (lambda: CrossLayerTranscoder(ReLU(), clt.layers, {}), "b_dec of the layers [0, 1, 2] is required, got []"),
        (lambda: CrossLayerTranscoder(ReLU(), clt.layers, clt.b_dec, {0: "hook_embed"}), "sites of the layers"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=re.escape(message)):
            call()
    skipping, given = opened(
        tmp_path / "skip" if (tmp_path / "skip").mkdir() is None else tmp_path, gemma_scope_2_layers
    )
    with pytest.raises(ValueError, match="a skip requires what layer 0 reads"):
        skipping.decode({1: skipping.encode(1, given[1])}, {1: given[1]})


def test_one_planted_in_a_model_says_what_its_mlps_write(tmp_path: Path) -> None:
    """MLPs without a nonlinearity, as features of both signs: their output is rebuilt at every layer."""
    subject = HookedTransformer(build("gpt2")).to(torch.float64)
    d, n = subject.cfg.d_model, subject.cfg.n_layers
    maps = torch.randn(n, d, d, generator=torch.Generator().manual_seed(0)).double()

    def layer(i: int) -> LayerWeights:
        W_enc = torch.cat([torch.eye(d), -torch.eye(d)], 1).double()
        to = torch.cat([maps[i], -maps[i]])[:, None].expand(-1, n - i, -1)
        return LayerWeights(
            (d, 2 * d, d),
            lambda: {"W_enc": W_enc, "b_enc": torch.zeros(2 * d).double()},
            lambda rows: to[rows],
        )

    sites = {
        end: {i: f"blocks.{i}.{hook}" for i in range(n)}
        for end, hook in (("in", "hook_mlp_in"), ("out", "hook_mlp_out"))
    }
    zero = {i: torch.zeros(d).double() for i in range(n)}
    clt = CrossLayerTranscoder(ReLU(), {i: layer(i) for i in range(n)}, zero, sites["in"], sites["out"])
    clt.fitted_to(subject)
    batch = subject.to_batch([[3, 1, 4, 1, 5]])
    reads = {i: Read(site) for i, site in clt.reads.items()}
    trace = observe(subject, batch, [*reads.values()]).trace
    x = {i: trace[read] for i, read in reads.items()}
    for j, y in clt(x).items():
        assert_close(y, sum(x[i] @ maps[i] for i in range(j + 1)))
    other = HookedTransformer(build("llama-gqa"))
    if other.cfg.d_model != d:
        with pytest.raises(ValueError, match="a dictionary of width"):
            clt.fitted_to(other)
    with pytest.raises(ValueError, match="do not say which sites it reads"):
        CrossLayerTranscoder(ReLU(), clt.layers, zero).fitted_to(subject)


def weights(n: int = 2, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"W_enc": (n, D, S), "b_enc": (S,), "W_dec": (n, S, D), "b_dec": (n, D)}
    return {
        name: torch.randn(*shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()
    }


def test_relative_norms_say_whose_a_feature_is() -> None:
    w = weights()
    w["W_dec"][1, 0], w["W_dec"][0, 1], w["W_dec"][1, 2] = 0, 0, 3 * w["W_dec"][0, 2]
    w["W_dec"][:, 3] = 0
    both = Crosscoder(ReLU(), w)
    found = both.relative_decoder_norm(0, 1)
    assert found[:4].tolist() == pytest.approx([0, 1, 0.75, 0.5])
    assert_close(found + both.relative_decoder_norm(1, 0), torch.ones(S).double())
    lengths = np.linalg.norm(w["W_dec"].numpy(), axis=-1)
    assert_close(found[4:], torch.from_numpy(lengths[1, 4:] / lengths[:, 4:].sum(0)))
    assert both.decoder_cosine(0, 1)[[0, 2]].tolist() == pytest.approx([0, 1])
    with pytest.raises(ValueError, match="a source is 0 to 1, got 2"):
        both.relative_decoder_norm(0, 2)


def test_two_models_that_are_one_have_no_feature_of_their_own() -> None:
    w = weights()
    w["W_dec"] = w["W_dec"][:1].expand(2, -1, -1)
    both = Crosscoder(ReLU(), w)
    assert_close(both.relative_decoder_norm(0, 1), torch.full((S,), 0.5).double())
    assert_close(both.decoder_cosine(0, 1), torch.ones(S).double())


def test_norms_of_the_own_directions_choose_the_features_of_each_source() -> None:
    w = weights(3)
    found, x = Crosscoder(NormTopK(2), w), torch.randn(5, 3, D, dtype=torch.float64)
    z = torch.einsum("bld,lds->bs", x, w["W_enc"]) + w["b_enc"]
    features = found.encode(x)
    for row in range(5):
        for source in range(3):
            best = sorted(range(S), key=lambda j: -z[row, j] * w["W_dec"][source, j].norm())[:2]
            wanted = [float(z[row, j].relu()) if j in best else 0.0 for j in range(S)]
            assert features[row, source].tolist() == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"b_enc": torch.zeros(3)}, "b_enc must have shape [10], got [3]"),
        ({"threshold": torch.zeros(S)}, "requires the weights"),
        ({"scale": torch.ones(2)}, "requires the weights"),
        ({"W_enc": torch.zeros(3, 4)}, "the weights must hold W_enc [sources, d, s], got [3, 4]"),
        ({"b_dec": torch.full((2, D), torch.nan)}, "b_dec holds NaN or infinite numbers"),
    ],
)
def test_weights_that_do_not_fit_a_crosscoder_are_refused(change: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Crosscoder(ReLU(), weights() | change)


def test_a_crosscoder_knows_its_sites_or_says_that_it_does_not() -> None:
    subject = HookedTransformer(build("gpt2"))
    d = subject.cfg.d_model
    shapes = {"W_enc": (2, d, S), "b_enc": (S,), "W_dec": (2, S, d), "b_dec": (2, d), "threshold": (2, S)}
    w = {name: torch.ones(*shape) for name, shape in shapes.items()}
    found = Crosscoder(JumpReLU(), w, reads=("blocks.0.hook_resid_post", "blocks.1.hook_resid_post"))
    assert found.fitted_to(subject) is found and found.by_source
    with pytest.raises(ValueError, match="do not say which sites it reads"):
        Crosscoder(JumpReLU(), w).fitted_to(subject)
    with pytest.raises(ValueError, match="reads must name 2 sites, one per source, got 1"):
        Crosscoder(JumpReLU(), w, reads=("blocks.0.hook_resid_post",))
    with pytest.raises(ValueError, match=re.escape(f"x must be a tensor of shape [..., 2, {d}]")):
        found.encode(torch.zeros(1, 3, d))
    with pytest.raises(ValueError, match=re.escape(f"features must be a tensor of shape [..., 2, {S}]")):
        found.decode(torch.zeros(1, S))
    assert "n_sources=2" in str(found)
