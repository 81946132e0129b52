"""Random heads: the spectra of the model's own in other directions, on streams that stay bit for bit what they are."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import interp
from interp import Edit, HookedTransformer
from interp.edits import Zero
from interp.model import Transformer
from interp.model.weights import Weights
from interp.tasks import RepeatedTokens
from interp.weights.random_heads import random_heads, with_random_heads
from tests.configs import CAUSAL, CONFIGS, build, some_tokens
from tests.loops import over
from tests.mixers import MIXERS, build_mixed
from tests.tolerances import assert_close

TURNED = [name for name, config in MIXERS.items()
          if all(mixer.traits.queries and mixer.traits.reads_by_qkv for mixer in config.mixers)]  # fmt: skip


ROWS = RepeatedTokens(period=6, repeats=2, rows=2)


def network(name: str) -> Transformer:
    return build_mixed(name) if name in MIXERS else build(name)


def seen(model: Transformer, pattern: str) -> dict[str, Tensor]:
    """What a pass shows at the sites of a pattern."""
    cache = HookedTransformer(model).run_with_cache(some_tokens(), pattern)[1]
    return {str(name): cache[name] for name in cache}


@pytest.mark.slow
@over("name", [*CAUSAL, *TURNED])
def test_streams_and_logits_are_the_models_own_and_what_heads_give_is_not(name: str) -> None:
    model = network(name)
    random = with_random_heads(model, 0)
    for site in ("blocks.*.hook_resid_post", "blocks.*.hook_attn_out"):
        ours, theirs = seen(model, site), seen(random, site)
        assert ours and all(torch.equal(ours[each], theirs[each]) for each in ours)
    assert torch.equal(model(some_tokens()), random(some_tokens()))
    ours, theirs = seen(model, "blocks.*.attn.hook_z"), seen(random, "blocks.*.attn.hook_z")
    assert not any(torch.allclose(ours[each], theirs[each], rtol=0.1) for each in ours)


@over("name", ["gpt2", "llama-gqa", "gemma2", "gpt-oss"])
def test_a_random_head_has_the_spectra_and_biases_of_the_heads_own(name: str) -> None:
    model = network(name)
    random = with_random_heads(model, 3)
    for layer in range(2):
        ours, theirs = (Weights(each).layer(layer) for each in (model, random))
        for matrix in ("W_Q", "W_K", "W_V", "W_O"):
            mine, other = getattr(ours, matrix), getattr(theirs, matrix)
            torch.testing.assert_close(
                torch.linalg.svdvals(mine), torch.linalg.svdvals(other), rtol=1e-5, atol=1e-6
            )
            assert not torch.allclose(mine, other, rtol=0.1)
        for bias in ("b_Q", "b_K", "b_V", "b_O"):
            assert torch.equal(getattr(ours, bias), getattr(theirs, bias))
    assert random.embed.weight is model.embed.weight
    assert not torch.allclose(Weights(random).W_Q, Weights(with_random_heads(model, 4)).W_Q, rtol=0.1)


def test_patterns_are_those_of_the_turned_weights_on_the_models_own_stream() -> None:
    """Oracle: softmax of q . k from the normed stream of the model, by hand."""
    model = build("gpt2")
    random = with_random_heads(model, 1)
    for layer in range(2):
        stream = f"blocks.{layer}.hook_resid_pre"
        x = model.block(layer).ln1(seen(model, stream)[stream])
        w = Weights(random).layer(layer)
        assert w.W_Q is not None and w.W_K is not None and w.b_Q is not None and w.b_K is not None
        q, k = (
            torch.einsum("bpd, hde -> bhpe", x, weight) + bias[:, None]
            for weight, bias in ((w.W_Q, w.b_Q), (w.W_K, w.b_K))
        )
        scores = q @ k.mT / w.W_Q.shape[-1] ** 0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        site = f"blocks.{layer}.attn.hook_pattern"
        assert_close(seen(random, site)[site], scores.masked_fill(hidden, -torch.inf).softmax(-1))


def test_what_they_cannot_stand_beside_is_refused_by_name() -> None:
    model = HookedTransformer(build("gpt2"))
    with pytest.raises(ValueError, match=r"must be in \[0, 1000000\], got -1"):
        random_heads(model.transformer, -1)
    with pytest.raises(ValueError, match="random heads stand beside a model without edits"):
        interp.heads(model.edited(Edit("L0H1", Zero())), repeats=ROWS, sentences=None, random=2)
    with pytest.raises(ValueError, match="this model has Pool: leave random at 0"):
        random_heads(build_mixed("pool"), 1)
    assert not list(random_heads(build_mixed("pool"), 0))


def test_heads_that_nobody_trained_are_exchangeable_with_theirs() -> None:
    """p is uniform: of 128 heads of eight models, about half are below .5 and a fifth below .2 (six deviations)."""
    config = replace(CONFIGS["gpt2"], n_heads=8, d_head=3, n_ctx=32, d_vocab=40)
    p = []
    for seed in range(8):
        torch.manual_seed(seed)
        table = interp.heads(Transformer(config), repeats=replace(ROWS, seed=seed), sentences=None, random=5)
        p.append(torch.from_numpy(table.p.sel(score=["previous_token", "induction", "entropy"]).values))
    found = torch.stack(p).flatten(0, 2)
    for a in (0.2, 0.5):
        share = (found <= a).double().mean(0)
        assert bool(((share - a).abs() < 6 * (a * (1 - a) / len(found)) ** 0.5).all())
