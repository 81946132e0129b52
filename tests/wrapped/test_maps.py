"""Matrices of heads in wrapped networks: those of our own code's twin, and of what is no linear map none."""

import pytest
import torch
from torch import Tensor, nn

import interp
from interp import HookedTransformer
from interp.model.weights import Weights
from interp.weights import HeadCircuits
from interp.wrapped.maps import matched
from tests.tiny import gpt2_tokenizer
from tests.wrapped.wrapping import spoken, wrapped

PACKED = ("llama", "gpt2", "gpt_neox", "phi3", "opt", "gemma2", "qwen2", "cohere", "gpt_bigcode")
"""Three maps, one for all in three ways, scaled queries, norms with offset, biases, parallel blocks, one key head."""


def twins(kind: str) -> tuple[HookedTransformer, HookedTransformer]:
    """A network wrapped, and in our own code."""
    theirs = spoken(kind).transformer.wrapped  # type: ignore[attr-defined]
    return spoken(kind), HookedTransformer.from_pretrained(theirs, tokenizer=gpt2_tokenizer(), wrapped=False)


def near(found: Tensor, expected: Tensor) -> None:
    """Equal to rounding of float32, relative to the largest number."""
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= 2e-5 * float(expected.abs().max())


@pytest.mark.parametrize("kind", PACKED)
def test_circuits_are_those_of_our_own_code(kind: str) -> None:
    ours, native = twins(kind)
    found, expected = (Weights(model.transformer) for model in (ours, native))
    near(found.W_V, expected.W_V)
    near(found.b_V, expected.b_V)
    for folded in (False, True):
        both = [HeadCircuits(m, folded=folded, scaled=True, biases=folded) for m in (ours, native)]
        for circuit in ("qk", "ov"):
            mine, theirs = (getattr(one, circuit)() for one in both)
            near(mine.AB, theirs.AB)
    effective = [HeadCircuits(m, folded=True, embedding="effective").embedded for m in (ours, native)]
    near(*effective)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_analyses_of_weights_are_those_of_our_own_code(kind: str) -> None:
    ours, native = twins(kind)
    for question in (interp.copying, interp.composition, interp.heads):
        found, expected = (question(model).value for model in (ours, native))
        shared = expected.sel(score=found.score) if "score" in found.dims else expected
        torch.testing.assert_close(
            torch.tensor(found.values), torch.tensor(shared.values), rtol=1e-3, atol=2e-4, equal_nan=True
        )
    assert {"copying", "copying_weights"} <= set(interp.heads(ours).score.values)


@pytest.mark.slow
def test_what_is_no_linear_map_of_the_normed_stream_is_refused_by_name() -> None:
    normed = wrapped("qwen3")  # queries and keys pass a norm by head
    assert all(m.traits.moves and not m.traits.bilinear for m in normed.config.mixers)
    assert Weights(normed).W_V.shape[0] == normed.config.n_layers
    with pytest.raises(AttributeError, match="layer 0 has no QK circuit"):
        HeadCircuits(normed).qk()
    latent = wrapped("deepseek_v3")  # a norm stands between two matrices
    assert not any(m.traits.moves or m.traits.bilinear for m in latent.config.mixers)
    assert "not found among linear maps" in latent.config.block.why_not("blocks.0.attn.W_V")
    hybrid = wrapped("jamba")
    assert [m.traits.moves for m in hybrid.config.mixers] == [False, True, False, True]
    with pytest.raises(AttributeError, match="layer 0 has no OV circuit"):
        HeadCircuits(hybrid).ov()
    assert HeadCircuits(hybrid).ov("L1H0").A.shape[0] == hybrid.config.d_model


def test_columns_are_matched_wherever_they_stand_and_never_twice() -> None:
    x = nn.init.normal_(torch.empty(12, 6), generator=torch.Generator().manual_seed(0))
    order = torch.tensor([4, 0, 5])
    found = matched(x, 0.5 * x[:, order])
    assert found is not None and torch.equal(found[0], order) and found[1] == pytest.approx(0.5)
    assert matched(torch.cat((x, x[:, 4:5]), 1), x[:, order]) is None  # one column stands there twice
    assert matched(x, x[:, order] * torch.tensor([1.0, 2.0, 1.0])) is None  # not one factor
    assert matched(x, x[:, order] + 1e-3) is None
    assert matched(x[:, :2], x) is None
