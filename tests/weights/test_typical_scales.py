"""What weights-only numbers are worth in a pass: by hand from the scales that a pass records, and on direct effects."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from interp import HookedTransformer
from interp.model import NoNorm
from interp.weights import HeadCircuits, directions, head_tokens, skip_trigrams, top_pairs
from interp.weights.typical_scales import TOKENS, typical_factors
from tests.configs import CONFIGS, D_VOCAB, build, perturbed


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "gemma2"])
def test_factors_are_medians_of_one_over_the_scales_of_a_pass(name: str) -> None:
    model = HookedTransformer(build(name))
    found = typical_factors(HeadCircuits(model, folded=True))
    rows = min(TOKENS, model.cfg.n_ctx)
    tokens = torch.randint(D_VOCAB, (1, rows), generator=torch.Generator().manual_seed(0))
    cache = model.run_with_cache(tokens, "*hook_scale")[1]

    def typical(site: str) -> float:
        seen = cache[site][0, 1:].flatten().double().sort().values
        return 1 / float(seen[(len(seen) - 1) // 2])

    last = typical("ln_final.hook_scale")
    for layer in range(2):
        read = typical(f"blocks.{layer}.ln1.hook_scale")
        added = typical(f"blocks.{layer}.ln1_post.hook_scale") if name == "gemma2" else 1.0
        assert float(found.moved[layer]) == pytest.approx(read * added * last, rel=1e-12)
        assert float(found.sought[layer]) == pytest.approx(read**2, rel=1e-12)
    assert found.written == pytest.approx(last, rel=1e-12)


def test_entry_by_its_passes_scales_is_what_the_head_adds_to_a_logit() -> None:
    """Known answer: the first layer's heads read bare embeddings, so the entry is exact at the scales of a token."""
    model = HookedTransformer(build("llama-gqa"))
    tokens = torch.tensor([[3, 9, 17, 4]])
    cache = model.run_with_cache(tokens)[1]
    circuits = HeadCircuits(model, folded=True, embedding="token")
    full = circuits.full_ov("L0H1")
    entry = (full.A @ full.B)[tokens[0, 1]]
    read, last = (float(cache[f"{x}.hook_scale"][0, at]) for x, at in (("blocks.0.ln1", 1), ("ln_final", 3)))
    moved = cache["v", 0][0, 1, 0] @ model.W_O[0, 1]  # the key and value group of head 1
    expected = (moved * model.transformer.ln_final.gamma / last) @ model.W_U
    torch.testing.assert_close(entry / (read * last), expected.to(entry), rtol=1e-5, atol=1e-7)


def test_units_say_what_stands_between_an_entry_and_a_logit() -> None:
    model = HookedTransformer(build("llama-gqa"))
    pairs = top_pairs(model, ["L0H1", "L1H0"], top=3)
    assert pairs.value.attrs["unit"] == pairs.attrs["unit"] == "logits before the final norm"
    np.testing.assert_array_equal(pairs.factor, typical_factors(HeadCircuits(model, folded=True)).moved)
    listed = head_tokens(model, [3, 4], top=2)
    assert listed.unit.values.tolist() == [
        *["logits before the final norm"] * 2,
        "attention scores before the norms",
    ]
    assert listed.factor.dims == ("layer", "list")
    trigrams = skip_trigrams(model, "L1H0", top=2)
    assert (
        trigrams.ov.attrs["unit"] == "logits before the final norm" and float(trigrams.ov_factor.item()) > 0
    )
    written = directions(model, torch.eye(model.cfg.d_model)[:1])
    assert written.value.attrs["unit"] == "logits before the final norm"
    assert written.attrs["written_factor"] == typical_factors(HeadCircuits(model, folded=True)).written


def test_without_norms_entries_are_logits_and_unfolded_ones_have_no_factor() -> None:
    plain = HookedTransformer(perturbed(replace(CONFIGS["gpt2"], norm=NoNorm())))
    found = top_pairs(plain, "L0H1", top=3)
    assert found.value.attrs["unit"] == "logits" and found.factor.values.tolist() == [1.0]
    bare = typical_factors(HeadCircuits(HookedTransformer(build("gpt2")), folded=False))
    assert bool(bare.moved.isnan().all()) and math.isnan(bare.written)
