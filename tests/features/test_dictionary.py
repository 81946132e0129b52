"""Sparse autoencoders compute what a slow loop does, differentiate by the published formula, and act as sites."""

import pickle
import re

import pytest
import torch
from torch import Tensor

from interp import Batch, Edit, HookedTransformer, Read
from interp.edits import Add, Project, Swap
from interp.features import Dictionary, JumpReLU, ReLU, TopK
from interp.features.activations import DictionaryKind, jump_relu, step
from interp.features.dictionary import Normalisation
from interp.passes.observe import observe
from tests.configs import build, some_tokens
from tests.features.dictionary_cases import KINDS, arrays, random_sae, random_weights, slow_forward
from tests.loops import over
from tests.tolerances import assert_close

EVERY = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: type(kind).__name__)
STREAM, HEADS = "blocks.1.hook_resid_pre", "blocks.1.attn.hook_z"
BATCH = Batch(some_tokens())


def vectors(n: int = 6, d: int = 24) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(5), dtype=torch.float64) + 0.5


def value(site: str, *edits: Edit, model: str = "gpt2") -> Tensor:
    return observe(build(model), BATCH, [Read(site)], list(edits)).trace[site]


@EVERY
@over("normalize", ["none", "layer_norm", "constant_norm_rescale"])
@over("centred", [True, False])
def test_features_and_reconstruction_are_those_of_the_slow_loop(
    kind: DictionaryKind, normalize: Normalisation, centred: bool
) -> None:
    weights, x = random_weights(kind, 24, 40), vectors()
    sae = Dictionary(kind, weights, apply_b_dec_to_input=centred, normalize_activations=normalize)
    features, output = slow_forward(arrays(weights), x.numpy(), kind, centred=centred, normalize=normalize)
    assert_close(sae.encode(x), torch.from_numpy(features))
    assert_close(sae(x), torch.from_numpy(output))
    assert 0 < int((sae.encode(x) > 0).sum()) < features.size


def test_no_more_than_k_features_are_active() -> None:
    sae = Dictionary(TopK(7), random_weights(TopK(7), 24, 40))
    active = (sae.encode(vectors(200)) > 0).sum(1)
    assert int(active.max()) == 7
    down = Dictionary(
        TopK(7), random_weights(TopK(7), 24, 40) | {"b_enc": torch.full((40,), -100.0).double()}
    )
    assert not bool(down.encode(vectors()).any())


def test_a_threshold_below_zero_counts_as_zero() -> None:
    weights = random_weights(JumpReLU(), 24, 40)
    low = Dictionary(JumpReLU(), weights | {"threshold": -weights["threshold"]})
    plain = Dictionary(ReLU(), {name: weight for name, weight in weights.items() if name != "threshold"})
    assert torch.equal(low.encode(vectors()), plain.encode(vectors()))


def test_the_jump_and_the_step_have_the_published_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    z = torch.rand(4, 3, 5, generator=generator, dtype=torch.float64).requires_grad_()
    threshold = torch.rand(5, generator=generator, dtype=torch.float64).requires_grad_()
    grad = torch.randn(4, 3, 5, generator=generator, dtype=torch.float64)
    width = 0.4
    near = torch.zeros(5, dtype=torch.float64)
    for j in range(5):
        for a in range(4):
            for b in range(3):
                if abs(z[a, b, j].item() - threshold[j].item()) < width / 2:
                    near[j] += grad[a, b, j]
    assert int((near != 0).sum()) >= 4
    of_z, of_threshold = torch.autograd.grad(jump_relu(z, threshold, width), (z, threshold), grad)
    assert_close(of_z, torch.where(z > threshold, grad, 0.0))
    assert_close(of_threshold, -threshold.detach() / width * near)
    of_z, of_threshold = torch.autograd.grad(
        step(z, threshold, width), (z, threshold), grad, allow_unused=True
    )
    assert of_z is None
    assert_close(of_threshold, -near / width)


@pytest.mark.parametrize("at", [0.3, 0.6])
def test_on_uniform_inputs_the_estimator_is_the_true_derivative(at: float) -> None:
    z = ((torch.arange(20_000) + 0.5) / 20_000).double()[:, None]
    threshold = torch.tensor([at], dtype=torch.float64, requires_grad=True)
    (jump,) = torch.autograd.grad(jump_relu(z, threshold, 0.1).mean(), threshold)
    (rise,) = torch.autograd.grad(step(z, threshold, 0.1).mean(), threshold)
    # P(z > t) = 1 - t and E[z; z > t] = (1 - t^2) / 2
    assert float(rise) == pytest.approx(-1, abs=1e-9)
    assert float(jump) == pytest.approx(-at, abs=1e-9)


@EVERY
def test_a_read_gives_the_features_of_the_site(kind: DictionaryKind) -> None:
    sae = random_sae(kind)
    read = sae.read(STREAM)
    found = observe(build("gpt2"), BATCH, [read, sae.read(STREAM)]).trace
    assert len(found) == 1
    assert_close(found[read], sae.encode(value(STREAM)))


def test_heads_are_read_side_by_side_or_one_by_one() -> None:
    z = value(HEADS, model="mqa")
    assert z.shape[2:] == (4, 10)
    together, alone = random_sae(ReLU(), 40, 50), random_sae(ReLU(), 10, 12)
    trace = observe(build("mqa"), BATCH, [together.read(HEADS), alone.read(HEADS)]).trace
    flat = torch.cat([z[:, :, head] for head in range(4)], -1)
    assert_close(trace[together.read(HEADS)], together.encode(flat))
    assert_close(trace[alone.read(HEADS)][:, :, 2], alone.encode(z[:, :, 2]))
    spliced = value(HEADS, Edit(HEADS, together.reconstruct), model="mqa")
    assert_close(spliced, torch.stack(together(flat).split(10, -1), 2))


@EVERY
@pytest.mark.parametrize("site", [STREAM, HEADS])
def test_a_change_of_nothing_gives_the_original_bit_for_bit(kind: DictionaryKind, site: str) -> None:
    sae = random_sae(kind, normalize="layer_norm")
    edit = Edit(site, sae.on_features(lambda features: features))
    assert torch.equal(value(site, edit), value(site))
    plain, edited = (observe(build("gpt2"), BATCH, edits=edits).output for edits in ([], [edit]))
    assert torch.equal(plain, edited)


@EVERY
def test_silencing_a_feature_takes_away_its_direction_and_nothing_else(kind: DictionaryKind) -> None:
    sae = random_sae(kind)
    original = value(STREAM)
    features = sae.encode(original)
    loudest = int(features.sum((0, 1)).argmax())

    def silence(x: Tensor) -> Tensor:
        x[..., loudest] = 0.0
        return x

    taken = features[..., loudest, None] * sae.W_dec[loudest]
    assert float(taken.abs().max()) > 0.1
    assert_close(value(STREAM, Edit(STREAM, sae.on_features(silence))), original - taken)
    assert_close(value(STREAM, Edit(STREAM, sae.on_features(silence, error=False))), sae(original) - taken)


@EVERY
def test_without_the_error_a_change_of_nothing_is_the_reconstruction(kind: DictionaryKind) -> None:
    sae, original = random_sae(kind), value(STREAM)
    replaced = value(STREAM, Edit(STREAM, sae.reconstruct))
    assert_close(replaced, sae(original))
    assert_close(value(STREAM, Edit(STREAM, sae.on_features(lambda f: f, error=False))), replaced)
    assert float((replaced - original).abs().max()) > 0.1


@EVERY
def test_features_of_one_position_are_changed_at_that_position(kind: DictionaryKind) -> None:
    sae, original = random_sae(kind), value(STREAM)
    doubled = Edit(STREAM, sae.on_features(lambda features: 2 * features), at={"pos": 4})
    expected = original.clone()
    expected[:, 4] += sae.encode(original[:, 4]) @ sae.W_dec
    assert_close(value(STREAM, doubled), expected)
    there = Edit(STREAM, sae.reconstruct, at={"pos": (0, 4)})
    expected = original.clone()
    expected[:, [0, 4]] = sae(original[:, [0, 4]])
    assert_close(value(STREAM, there), expected)


def test_closed_changes_along_decoder_directions_need_no_encoder() -> None:
    sae, original = random_sae(ReLU()), value(STREAM)
    along = sae.W_dec[7].detach()
    assert_close(value(STREAM, Edit(STREAM, Add(along, scale=3.0))), original + 3 * along)
    unit = along / along.norm()
    without = original - (original @ unit)[..., None] * unit
    assert_close(value(STREAM, Edit(STREAM, Project(along))), without)
    other = original.flip(0)
    swapped = value(STREAM, Edit(STREAM, Swap(along, other)))
    assert_close(swapped, without + (other @ unit)[..., None] * unit)


def test_a_change_of_features_travels_to_other_processes() -> None:
    sae = random_sae(TopK(3))
    for change in (sae.on_features(torch.zeros_like), sae.reconstruct):
        there = pickle.loads(pickle.dumps(change))
        assert_close(there(value(STREAM)), change(value(STREAM)))


def test_an_edit_may_concern_some_rows_only() -> None:
    edit = Edit(STREAM, random_sae(ReLU()).reconstruct, rows=(1,))
    same = (value(STREAM, edit) == value(STREAM)).flatten(1).all(1)
    assert same.tolist() == [True, False, True]


def test_a_half_precision_site_keeps_its_dtype() -> None:
    network = build("gpt2", torch.bfloat16)
    sae = random_sae(ReLU()).float()
    edits = [Edit(STREAM, sae.on_features(lambda features: features * 1.0))]
    plain, edited = (observe(network, BATCH, edits=e).output for e in ([], edits))
    assert edited.dtype == torch.bfloat16 and torch.equal(plain, edited)


def test_it_is_frozen_and_says_what_it_is() -> None:
    sae = random_sae(TopK(3))
    assert not any(p.requires_grad for p in sae.parameters())
    assert "TopK(k=3, relu=True), d_in=24, d_sae=40" in repr(sae)


def refusals() -> list[tuple[DictionaryKind, dict[str, Tensor], str]]:
    good = random_weights(ReLU(), 4, 6)
    nan = torch.full((6,), torch.nan).double()
    return [
        (ReLU(), {k: v for k, v in good.items() if k != "b_dec"}, "requires the weights"),
        (JumpReLU(), good, "'threshold'"),
        (ReLU(), good | {"W_dec": good["W_enc"]}, "W_dec must have shape [6, 4]"),
        (ReLU(), good | {"b_enc": nan}, "b_enc holds NaN"),
        (ReLU(), good | {"W_enc": nan}, "the weights must hold W_enc [d_in, d_sae]"),
        (TopK(7), good, "at most d_sae = 6"),
    ]


@pytest.mark.parametrize(("kind", "weights", "message"), refusals())
def test_weights_that_do_not_fit_are_refused(
    kind: DictionaryKind, weights: dict[str, Tensor], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Dictionary(kind, weights)


def test_kinds_refuse_what_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="k must be a whole number from 1"):
        TopK(0)
    with pytest.raises(ValueError, match=r"bandwidth must be a number above 0, .* got 0\.0"):
        JumpReLU(0.0)


def test_a_site_or_a_change_that_does_not_fit_is_named() -> None:
    sae = random_sae(ReLU(), 7, 9)
    with pytest.raises(ValueError, match=r"reads 7 numbers per position, the site has shape \[3, 9, 24\]"):
        observe(build("gpt2"), BATCH, [sae.read(STREAM)])
    edit = Edit(STREAM, random_sae(ReLU()).on_features(lambda features: features[..., :3]))
    with pytest.raises(RuntimeError, match=r"features of shape \[3, 9, 40\], got .* shape \[3, 9, 3\]"):
        value(STREAM, edit)


def test_decoding_after_a_normalisation_requires_the_input() -> None:
    sae = random_sae(ReLU(), normalize="layer_norm")
    with pytest.raises(ValueError, match="'layer_norm' requires the input"):
        sae.decode(sae.encode(vectors()))


def test_an_input_on_another_device_is_named() -> None:
    sae, elsewhere = random_sae(ReLU()), torch.zeros(2, 24, device="meta")
    for call in (sae.encode, sae, lambda x: sae.decode(torch.zeros(2, sae.d_sae, device=x.device))):
        with pytest.raises(
            ValueError, match=re.escape("meta, is required; this one is on cpu: dictionary.to('meta')")
        ):
            call(elsewhere)


def test_it_works_from_the_front_door() -> None:
    model, sae = HookedTransformer(build("gpt2")), random_sae(ReLU())
    logits = model.run_with_hooks(BATCH, [(STREAM, lambda x, hook: sae.reconstruct(x))])
    assert isinstance(logits, Tensor)
    assert_close(logits, observe(build("gpt2"), BATCH, edits=[Edit(STREAM, sae.reconstruct)]).output)
