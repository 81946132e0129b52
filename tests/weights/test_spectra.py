"""Spectra: those of dense products, closed forms of ranks, every matrix of every family once."""

import math

import numpy as np
import pytest
import torch

import interp
from interp import HookedTransformer
from interp.core.factored import FactoredMatrix
from interp.model import MoE
from interp.model.weights import Weights
from interp.weights import spectra
from interp.weights.spectra import _matrices, all_singular_values, singular_values, summary
from tests.configs import CONFIGS, build
from tests.loops import over
from tests.tolerances import assert_close


@over("name", CONFIGS)
def test_every_matrix_is_there_once_and_norms_add_up_to_the_parameters(name: str) -> None:
    network = build(name)
    table = spectra(HookedTransformer(network))
    plain = table.isel(matrix=~np.isin(table.kind, ("OV", "QK")))
    unused = 0 if network.pos_embed is None else network.pos_embed.weight[: network.config.position.offset]  # type: ignore[union-attr]
    parameters = {id(p): p for n, p in network.named_parameters() if p.ndim > 1 and "bias" not in n}
    square = sum(float(p.square().sum()) for p in parameters.values())
    square -= 0 if isinstance(unused, int) else float(unused.square().sum())
    assert float((plain.norm**2).sum()) == pytest.approx(square, rel=1e-9)
    assert len(set(table.matrix.values)) == table.sizes["matrix"]


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "mqa"])
def test_products_of_a_head_have_the_singular_values_of_the_dense_matrix(name: str) -> None:
    network = build(name)
    table, weights = spectra(HookedTransformer(network)), Weights(network)
    for kind in ("OV", "QK"):
        dense = torch.linalg.svdvals(getattr(weights, kind).AB)
        for layer in range(network.config.n_layers):
            for head in range(network.config.n_heads):
                found = table.singular.sel(matrix=f"blocks.{layer}.attn.{kind}.{head}").dropna("index")
                assert found.size == network.config.head_width
                np.testing.assert_allclose(found, dense[layer, head, : found.size], rtol=1e-9)
                place = table.sel(matrix=f"blocks.{layer}.attn.{kind}.{head}")
                assert (int(place.layer), str(place.part.values)) == (layer, f"L{layer}H{head}")
                assert str(place.kind.values) == kind


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "granite-moe", "mqa"])
def test_matrices_decomposed_together_have_the_values_of_each_alone(name: str) -> None:
    matrices = [each.matrix for each in _matrices(build(name))]
    together, apart, alone = (
        all_singular_values(matrices), all_singular_values(matrices, at_once=1), [singular_values(m) for m in matrices]
    )  # fmt: skip
    for matrix, *found in zip(matrices, together, apart, alone, strict=True):
        assert_close(found[0], found[1])
        assert_close(found[0], found[2])
        dense = matrix.AB if isinstance(matrix, FactoredMatrix) else matrix
        expected = torch.linalg.svdvals(dense.detach())[..., : found[0].shape[-1]]
        assert_close(found[0], expected)


def test_the_dense_product_is_never_formed() -> None:
    wide = 60_000  # a dense product would take 27 GiB
    g = torch.Generator().manual_seed(0)
    found = singular_values(
        FactoredMatrix(torch.randn(wide, 4, generator=g), torch.randn(4, wide, generator=g))
    )
    assert found.shape == (4,) and abs(float(found.mean()) / wide - 1) < 0.1


def test_ranks_are_those_of_closed_forms() -> None:
    flat, single = torch.full((8,), 3.0), torch.tensor([5.0] + [0.0] * 7)
    half = torch.tensor([2.0, 1.0, 1.0, torch.nan, torch.nan, torch.nan, torch.nan, torch.nan])
    found = summary(torch.stack((flat, single, half, torch.zeros(8))).double(), 2)
    assert found["stable_rank"].tolist() == pytest.approx([8, 1, 1.5, 0])
    assert found["effective_rank"].tolist() == pytest.approx([8, 1, math.exp(1.5 * math.log(2)), 0])
    assert found["top_share"].tolist() == pytest.approx([0.25, 1, 5 / 6, 0])
    assert found["norm"].tolist() == pytest.approx([math.sqrt(72), 5, math.sqrt(6), 0])
    assert found["size"].tolist() == [8, 8, 3, 8]


def test_experts_are_listed_one_by_one_and_tied_embeddings_once() -> None:
    network, tied = build("granite-moe"), spectra(HookedTransformer(build("tied")))
    table, moe = spectra(HookedTransformer(network)), network.config.mlp
    assert isinstance(moe, MoE)
    gates = table.isel(matrix=(table.kind == "W_gate") & (table.layer == 1))
    assert gates.part.values.tolist() == [f"L1E{expert}" for expert in range(moe.n_experts)]
    stack = network.block(1).mlp.into[2, : moe.d_mlp]  # type: ignore[union-attr, index]
    expected = torch.linalg.svdvals(stack)
    np.testing.assert_allclose(table.singular.sel(matrix="blocks.1.mlp.W_gate.2").dropna("index"), expected)
    assert "embed.W_E" in tied.matrix and "unembed.W_U" not in tied.matrix


def test_half_precision_is_widened_and_top_must_be_positive() -> None:
    table = spectra(HookedTransformer(build("gpt2", torch.bfloat16)))
    exact = spectra(HookedTransformer(build("gpt2")))
    assert table.singular.dtype == np.float32
    np.testing.assert_allclose(table.norm, exact.norm, rtol=1e-2)
    with pytest.raises(ValueError, match="top >= 1 is required, got 0"):
        spectra(HookedTransformer(build("gpt2")), top=0)


def test_every_matrix_names_its_part() -> None:
    table = spectra(build("macaron"))
    named = dict(zip(table.matrix.values.tolist(), table.part.values.tolist(), strict=True))
    assert named["embed.W_E"] == "embed" and named["unembed.W_U"] == "logits"
    assert named["blocks.1.attn.W_Q"] == "L1.attn" and named["blocks.0.attn.OV.3"] == "L0H3"
    assert named["blocks.0.mlp_before.W_in"] == "L0.mlp_before" and named["blocks.1.mlp.W_out"] == "L1.mlp"
    assert table.layer.sel(matrix="embed.W_E") == -1


def test_the_table_is_by_matrix() -> None:
    found = spectra(build("llama-gqa"), top=3)
    table = interp.frame(found)
    assert len(table) == found.sizes["matrix"] and "stable_rank" in table and "singular" not in table
