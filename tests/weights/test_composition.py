"""Composition of heads against the dense products, TransformerLens, random heads and planted circuits."""

import functools
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor

import interp
from interp.model import ModelConfig, NoNorm, Rotary, Transformer
from interp.model.weights import LayerWeights, Weights
from interp.runs.memory import LiveBytes
from interp.weights import (
    Composition,
    HeadCircuits,
    composition,
    composition_directions,
    composition_scores,
    virtual_heads,
)
from interp.weights.composition import CompositionKind, relative_scores
from tests.configs import CONFIGS, build, perturbed
from tests.families.oracle import hf_model, new_hf_model
from tests.loops import over
from tests.tiny import gpt2_tokenizer, hooked
from tests.tolerances import assert_close

KINDS: tuple[CompositionKind, ...] = ("Q", "K", "V")
SRC, DST = (0, 1), (1, 2)
LINEAR = ModelConfig(
    2, 48, 4, 8, 11, d_head=8, norm=NoNorm(), final_norm=False, qkv_bias=False, out_bias=False
)
"""Nothing but heads: what is planted in the weights is the circuit."""


def dense(
    circuits: HeadCircuits, kind: CompositionKind, src: tuple[int, int], dst: tuple[int, int]
) -> Tensor:
    """The two multiplied-out matrices of one pair, side by side."""
    first = circuits.ov(src).AB
    second = {"Q": circuits.qk(dst).AB, "K": circuits.qk(dst).AB.mT, "V": circuits.ov(dst).AB}[kind]
    return torch.stack((first, second))


def slow_scores(circuits: HeadCircuits, kind: CompositionKind) -> Tensor:
    """Pair by pair, every matrix multiplied out."""
    n_layers, n_heads = circuits.config.n_layers, circuits.config.n_heads
    found = torch.full((n_layers, n_heads) * 2, torch.nan, dtype=circuits.network.dtype)
    written = circuits.ov().AB
    read = {"Q": circuits.qk().AB, "K": circuits.qk().AB.mT, "V": written}[kind]
    heads = list(itertools.product(range(n_layers), range(n_heads)))
    for src, dst in itertools.product(heads, heads):
        if src[0] < dst[0]:
            first, second = written[src], read[dst]
            found[src + dst] = (first @ second).norm() / (first.norm() * second.norm())
    return found


def cells(result: xr.Dataset, name: str = "value") -> np.ndarray:
    """A variable by source layer and head, destination layer and head, whatever the order of the pairs."""
    layers, heads = len(set(result.src_layer.values)), len(set(map(str, result.src.values)))
    every = [f"L{layer}H{head}" for layer in range(layers) for head in range(heads // layers)]
    return result[name].sel(src=every, dst=every).values.reshape((layers, heads // layers) * 2)


def equal(found: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> None:
    """Equal, and NaN in the same places."""
    assert torch.equal(found.isnan(), expected.isnan())
    assert_close(found.nan_to_num(), expected.nan_to_num(), dtype)


def gaussian_model(config: ModelConfig, seed: int = 0) -> Transformer:
    """Every matrix of every head Gaussian."""
    model = Transformer(config).double().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def planted() -> tuple[Transformer, LayerWeights, LayerWeights, Tensor]:
    """A random model, the weights of its two layers, and an orthonormal basis `[d e]` to plant a circuit on."""
    model = gaussian_model(LINEAR)
    weights = Weights(model)
    basis = torch.linalg.qr(torch.randn(48, 8).double()).Q
    w = weights.layer(0)
    w.W_V[SRC[1]].copy_(basis)
    w.W_O[SRC[1]].copy_(basis.mT)  # OV = P, the projector
    return model, w, weights.layer(1), basis


# --- the scores -----------------------------------------------------------------------------------------------------


@over("folded", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_scores_are_those_of_the_dense_products(name: str, folded: bool) -> None:
    circuits = HeadCircuits(build(name), folded=folded)
    for kind in KINDS:
        equal(composition_scores(circuits, kind), slow_scores(circuits, kind))


def test_scores_of_three_layers_skip_none() -> None:
    circuits = HeadCircuits(perturbed(replace(CONFIGS["llama-gqa"], n_layers=3)), folded=True)
    for kind in KINDS:
        equal(composition_scores(circuits, kind), slow_scores(circuits, kind))


@pytest.mark.parametrize("name", ["llama-gqa", "attention-only-rotary", "gemma3"])
def test_an_offset_is_that_of_the_destination_s_qk(name: str) -> None:
    circuits = HeadCircuits(build(name), folded=True)
    ov, qk = circuits.ov(SRC).AB, circuits.qk(DST, offset=3).AB
    for kind, second in (("Q", qk), ("K", qk.mT)):
        found = composition_scores(circuits, kind, offset=3)
        assert_close(found[SRC + DST], (ov @ second).norm() / (ov.norm() * second.norm()))
        assert (found - composition_scores(circuits, kind)).nan_to_num().abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_have_the_scores_of_their_exact_products(dtype: torch.dtype) -> None:
    half = perturbed(CONFIGS["llama-gqa"], dtype)
    exact = Transformer(half.config).double()
    exact.load_state_dict(half.state_dict())
    found = composition_scores(HeadCircuits(half), "V")
    assert found.dtype == torch.float32
    equal(found.double(), composition_scores(HeadCircuits(exact), "V"), torch.float32)


def test_reparametrised_heads_have_the_same_scores() -> None:
    model = perturbed(CONFIGS["gpt2"])
    before = [composition_scores(HeadCircuits(model), kind) for kind in KINDS]
    mix = torch.randn(6, 6).double() + 3 * torch.eye(6).double()
    for layer in (0, 1):
        w = Weights(model).layer(layer)
        for into, out in ((w.W_V[1], w.W_O[1]), (w.W_Q[1], w.W_K[1].mT)):
            into.copy_(into @ mix)
            out.copy_(torch.linalg.inv(mix) @ out)
    for kind, expected in zip(KINDS, before, strict=True):
        equal(composition_scores(HeadCircuits(model), kind), expected)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_raw_ratios_are_those_of_transformer_lens(family: str) -> None:
    bridges = pytest.importorskip("transformer_lens.model_bridge", reason="transformer-lens is not installed")
    theirs = bridges.TransformerBridge.boot_transformers(
        family,
        hf_model=new_hf_model(family, torch.float64),
        tokenizer=gpt2_tokenizer(),
        dtype=torch.float64,
        device="cpu",
    )
    ours = interp.HookedTransformer.from_pretrained(hf_model(family, torch.float64))
    for kind in KINDS:
        found = torch.from_numpy(cells(composition(ours, kind, folded=False)))
        expected = theirs.all_composition_scores(kind).scores.detach()
        exists = ~found.isnan()
        assert_close(found[exists], expected[exists])
        assert (expected[~exists] == 0).all()


# --- against chance -------------------------------------------------------------------------------------------------


@functools.cache
def gaussian_heads() -> HeadCircuits:
    return HeadCircuits(gaussian_model(replace(LINEAR, n_layers=3, d_model=128, n_heads=8, d_head=16)))


@pytest.mark.parametrize("kind", KINDS)
def test_gaussian_heads_have_one_over_the_root_of_the_width(kind: CompositionKind) -> None:
    found = composition_scores(gaussian_heads(), kind)
    assert float(found.nanmean()) == pytest.approx(1 / math.sqrt(128), rel=0.02)


def test_the_null_is_the_root_mean_square_of_heads_in_random_directions() -> None:
    """192 pairs of each kind, 1/128 on average; their squares have a variance of at most 2 (1/16 + 2/128)^2 / 128^2."""
    model = gaussian_heads().network
    for kind in KINDS:
        result = composition(model, kind)
        squares = result.value.values[np.isfinite(result.value.values)] ** 2
        assert len(squares) == 3 * 64
        error = (
            math.sqrt(2) * (1 / 16 + 2 / 128) / 128 / math.sqrt(3 * 8)
        )  # heads are shared: 24 of a side count
        assert abs(squares.mean() - float(result.null.max()) ** 2) < 4 * error
        np.testing.assert_allclose(result.excess, result.value - result.null)


def test_relative_is_a_slow_walk_over_the_heads_of_two_layers() -> None:
    model = gaussian_heads().network
    result = composition(model, "Q")
    value, names = result.value.to_pandas(), result.src.values
    for source, target in (("L0H1", "L1H2"), ("L0H7", "L2H0"), ("L1H3", "L2H5")):
        rows, columns = ([x for x in names if x[:2] == head[:2]] for head in (source, target))
        block = np.log(value.loc[rows, columns])
        layers = (np.median(np.median(block, 1)) + np.median(np.median(block, 0))) / 2
        expected = np.median(block.loc[source]) + np.median(block[target]) - layers
        found = float(result.relative.sel(src=source, dst=target))
        assert math.log(found) == pytest.approx(block.loc[source, target] - expected, rel=1e-9)


def test_what_all_heads_of_a_layer_share_is_not_in_relative() -> None:
    """Dimensions of other scales, and any factors of rows and columns, lift every pair above the null alike."""
    draw = torch.Generator().manual_seed(0)
    rows, columns = torch.rand(2, 8, generator=draw, dtype=torch.float64) + 0.5
    assert_close(relative_scores((rows[:, None] * columns)[None, :, None]), torch.ones(1, 8, 1, 8).double())
    model = gaussian_model(replace(LINEAR, n_layers=2, d_model=128, n_heads=8, d_head=16))
    for layer in (Weights(model).layer(i) for i in range(2)):
        for matrix in (layer.W_Q, layer.W_K, layer.W_V):
            matrix[:, :6] *= 12
        layer.W_O[..., :6] *= 12
    result = composition(model, "K")
    known = result.relative.values[np.isfinite(result.relative.values)]
    assert float((result.value / result.null).min()) > 2.5, "all of 64 pairs far above the null"
    assert known.min() > 0.6 and known.max() < 1.6 and np.median(known) == pytest.approx(1, abs=0.02)


def test_the_planted_induction_circuit_stands_out_and_nothing_else_does() -> None:
    model = interp.HookedTransformer.from_pretrained("groundtruth-induction")
    result = composition(model, "K")
    where = {"src": "L0H1", "dst": "L1H2"}
    for name, least, others in (("value", 0.12, 0.07), ("relative", 1.9, 1.1)):
        cells_ = result[name].values[np.isfinite(result[name].values)]
        assert float(result[name].sel(where)) == cells_.max() > least
        assert np.sort(cells_)[-2] < others


def test_planted_pair_scores_in_its_kind_only_and_transposed_keys_move_it() -> None:
    model, _, w, basis = planted()
    w.W_K[DST[1]].copy_(basis)  # QK is supported on P on the key's side
    circuits = HeadCircuits(model)
    assert float(composition_scores(circuits, "K")[SRC + DST]) == pytest.approx(1 / math.sqrt(8), rel=1e-12)
    before = {kind: composition_scores(model, kind)[SRC + DST] for kind in KINDS}
    factor = {kind: cells(composition(model, kind), "relative")[SRC + DST] for kind in KINDS}
    assert factor["K"] > 1.5 > 1.3 > max(factor["Q"], factor["V"])
    key, query = w.W_K[DST[1]].clone(), w.W_Q[DST[1]].clone()
    w.W_K[DST[1]].copy_(query)
    w.W_Q[DST[1]].copy_(key)
    swapped = {kind: composition_scores(model, kind)[SRC + DST] for kind in KINDS}
    assert float(swapped["Q"]) == pytest.approx(float(before["K"]), rel=1e-9)
    assert float(swapped["K"]) == pytest.approx(float(before["Q"]), rel=1e-9)
    w.W_V[DST[1]].copy_(basis)
    assert cells(composition(model, "V"), "relative")[SRC + DST] > 1.5


def test_head_of_zeros_has_no_number_and_an_orthogonal_one_that_of_chance() -> None:
    model = gaussian_model(replace(LINEAR, d_model=8, d_head=8))
    first, second = Weights(model).layer(0), Weights(model).layer(1)
    first.W_O[1].zero_()
    for matrix in (second.W_V[3], second.W_O[3]):
        matrix.copy_(torch.linalg.qr(matrix).Q * 2)
    result = composition(model, "V")
    result = result.isel(src=result.src_layer == 0, dst=result.dst_layer == 1)
    for name, value in result.items():
        assert bool(value.sel(src="L0H1").isnull().all()), name
    others = ["L0H0", "L0H2", "L0H3"]
    alike = result.sel(dst="L1H3", src=others)
    np.testing.assert_allclose(alike.value, 1 / math.sqrt(8))
    assert bool(result.sel(src=others).notnull().to_dataarray().all())


def test_the_result_says_what_it_is() -> None:
    result = composition(hooked("llama-gqa"), "K", offset=2)
    assert result.value.dims == ("src", "dst")
    assert set(result) == {"value", "null", "excess", "relative"}
    assert all(each.attrs["unit"] for each in result.values())
    assert list(interp.frame(result)) == [
        "src", "dst", "src_layer", "dst_layer", "value", "null", "excess", "relative",
    ]  # fmt: skip
    assert result.attrs["kind"] == "K"
    assert result.attrs["offset"] == 2
    assert result.attrs["null"] == "1 / sqrt(d_model): heads in random directions"
    assert "offset" not in composition(hooked("llama-gqa"), "V").attrs
    assert "offset" not in composition(hooked("gpt2"), "K").attrs
    exists = result.src_layer < result.dst_layer
    for value in result.values():
        assert bool((value.notnull() == exists).all())


def test_hooks_of_activations_do_not_concern_the_weights() -> None:
    model = hooked()
    expected = composition(model, "K")
    for site in ("blocks.0.attn.hook_z", "ln_final.hook_normalized"):
        with model.hooks([(site, lambda x, hook: 0 * x)]):
            xr.testing.assert_identical(composition(model, "K"), expected)
            xr.testing.assert_identical(interp.run([Composition()], model)["composition"], expected)
    with pytest.raises(
        ValueError, match="composition ask about the weights, which edits of activations leave"
    ):
        interp.run([Composition()], model, edits=[interp.Edit("L0H1", interp.edits.Zero())])


# --- one pair -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "gemma2"])
def test_a_virtual_head_is_the_product_of_two(name: str) -> None:
    circuits = HeadCircuits(build(name), folded=True)
    assert_close(virtual_heads(circuits, "L0H1", DST).AB, circuits.ov(SRC).AB @ circuits.ov(DST).AB)
    assert_close(virtual_heads(build(name), SRC, DST).AB, virtual_heads(circuits, SRC, DST).AB)


@pytest.mark.parametrize("kind", KINDS)
def test_directions_are_the_singular_triples_of_the_dense_product(kind: CompositionKind) -> None:
    circuits = HeadCircuits(build("llama-gqa"), folded=True)
    first, second = dense(circuits, kind, SRC, DST)
    found = composition_directions(circuits, kind, SRC, DST, top=10)
    s = torch.linalg.svdvals(first @ second)[:10]
    assert_close(found.share, s.square() / s.square().sum())
    assert_close(found.share.sum(), torch.tensor(1.0).double())
    assert_close(found.left @ first @ second, s[:, None] * found.right)
    written = found.left @ first
    assert_close(found.between * written.norm(dim=-1, keepdim=True), written)
    for directions in (found.left, found.between, found.right):
        assert_close(directions.norm(dim=-1), torch.ones(10).double())
    few = composition_directions(circuits, kind, SRC, DST, top=2)
    assert_close(few.share, found.share[:2])


def test_one_shared_direction_carries_a_composition_through_it_alone() -> None:
    """The source writes 8 directions, the destination's keys read the first of them and 7 that nobody writes."""
    model, _, w, basis = planted()
    outside = torch.linalg.qr(torch.cat((basis, torch.randn(48, 7).double()), 1)).Q[:, 8:]
    w.W_K[DST[1]].copy_(torch.cat((basis[:, :1], outside), 1))
    found = composition_directions(HeadCircuits(model), "K", SRC, DST, top=1)
    assert_close(found.share, torch.ones(1).double())
    for direction in (found.left, found.between):
        assert_close((direction[0] @ basis[:, 0]).abs(), torch.tensor(1.0).double())


# --- errors ---------------------------------------------------------------------------------------------------------


def test_what_does_not_compose_is_refused_by_name() -> None:
    gpt2, llama = HeadCircuits(build("gpt2")), HeadCircuits(build("llama-gqa"))
    for src, dst in ((DST, SRC), (SRC, (0, 2)), (DST, DST)):
        with pytest.raises(
            ValueError, match=r"in an earlier layer than the destination is required, got L\dH\d -> L"
        ):
            virtual_heads(gpt2, src, dst)
    with pytest.raises(IndexError, match="L2H0: layers are 0 to 1 in this model"):
        virtual_heads(gpt2, SRC, "L2H0")
    with pytest.raises(IndexError, match="L0H4: the index of a head is 0 to 3 in this model"):
        composition_directions(gpt2, "K", (0, 4), DST)
    with pytest.raises(ValueError, match=r"top must be in \[1, 6\] directions, got 7"):
        composition_directions(gpt2, "K", SRC, DST, top=7)
    with pytest.raises(ValueError, match=r"a head of self-attention is required, such as L1H2, got L1.mlp"):
        virtual_heads(gpt2, SRC, "L1.mlp")
    with pytest.raises(ValueError, match="an offset requires rotary positions: under Learned"):
        composition(hooked("gpt2"), "K", offset=1)
    with pytest.raises(ValueError, match=r"offsets \(query minus key\) of 0 to 23 are required, got 24"):
        composition_scores(llama, "K", offset=24)
    with pytest.raises(ValueError, match="V-composition does not depend on an offset, got 1"):
        composition(hooked("llama-gqa"), "V", offset=1)
    with pytest.raises(ValueError, match="requires circuits without biases"):
        composition_scores(HeadCircuits(build("gpt2"), biases=True), "Q")
    with pytest.raises(ValueError, match="at least two layers, got 1"):
        composition(Transformer(replace(LINEAR, n_layers=1)), "Q")


@pytest.mark.kinds
def test_an_encoder_decoder_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"model must be a HookedTransformer or a Transformer, got .*HookedEncoderDecoder",
    ):
        composition(interp.HookedEncoderDecoder.__new__(interp.HookedEncoderDecoder), "K")


def test_a_rotary_model_is_scored_at_offset_zero_by_default() -> None:
    assert isinstance(CONFIGS["llama-gqa"].position, Rotary)
    result, zero = (composition(hooked("llama-gqa"), "Q", offset=offset) for offset in (None, 0))
    assert result.identical(zero)


def test_what_is_held_is_half_a_head_of_every_source_and_destination() -> None:
    """Nothing else grows with the layers: no second copy of the halves, no circuits that have been read."""
    circuits = HeadCircuits(Transformer(replace(LINEAR, n_layers=24)))
    halves = 2 * 24 * LINEAR.n_heads * LINEAR.head_width * LINEAR.d_model * 4
    with LiveBytes() as live:
        composition_scores(circuits, "Q")
    assert live.peak < 1.4 * halves  # with the halves stacked: 2.0
