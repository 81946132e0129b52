"""Rotary frequencies that depend on the length of the text: each row its own; a cache does not survive a change."""

import functools
from dataclasses import replace

import pytest
import torch

from interp.model import DynamicScaling, LongScaling, Read, Rotary, Tap, Transformer
from tests.configs import CONFIGS, empty_cache, perturbed, some_tokens
from tests.loops import over
from tests.model.slow import slow_forward
from tests.tolerances import assert_close

ORIGINAL = 6
RULES = {
    "dynamic": Rotary(100.0, scaling=DynamicScaling(4.0, ORIGINAL)),
    "long": Rotary(
        100.0, scaling=LongScaling((1.0, 1.1, 1.3, 1.4, 1.5), (1.0, 2.0, 4.0, 8.0, 9.0), ORIGINAL, 1.2)
    ),
}
EVERY = over("rule", RULES)
LENGTHS = [9, ORIGINAL + 1, ORIGINAL, 3]


@functools.cache
def model(rule: str) -> Transformer:
    return perturbed(replace(CONFIGS["llama-gqa"], position=RULES[rule]), seed=3)


@EVERY
@pytest.mark.parametrize("n", LENGTHS)
def test_logits_equal_the_slow_forward_within_and_beyond_the_context(rule: str, n: int) -> None:
    tokens = some_tokens(rows=1, n=n)
    assert_close(model(rule)(tokens)[0], slow_forward(model(rule), tokens[0])[0], torch.float32)


@EVERY
@pytest.mark.parametrize("side", ["left", "right"])
def test_each_padded_row_has_the_frequencies_of_its_own_length(rule: str, side: str) -> None:
    """Rows on both sides of the original context in one batch, each equal to the row alone."""
    tokens, columns = some_tokens(rows=4), torch.arange(9)
    keep = torch.stack([columns < n if side == "right" else columns >= 9 - n for n in LENGTHS])
    together = Tap([Read("blocks.1.attn.hook_rot_k")])
    logits = model(rule)(tokens, together, keep=keep)
    for row, real in enumerate(keep):
        tap = Tap(together.reads)
        assert_close(logits[row, real], model(rule)(tokens[row, real][None], tap)[0])
        assert_close(together.values[tap.reads[0]][row, real], tap.values[tap.reads[0]][0])


@EVERY
def test_the_same_tokens_are_rotated_otherwise_in_a_longer_text(rule: str) -> None:
    """Otherwise the tests above would compare one regime with itself."""
    tokens = some_tokens(rows=1)
    keys = []
    for n in (3, ORIGINAL, ORIGINAL + 1, 9):
        tap = Tap([Read("blocks.0.attn.hook_rot_k", via=lambda k: k[:, :3])])
        model(rule)(tokens[:, :n], tap)
        keys.append(tap.values[tap.reads[0]])
    assert_close(keys[0], keys[1])
    assert (keys[2] - keys[1]).abs().max() > 1e-3
    assert bool((keys[3] - keys[2]).abs().max() > 1e-3) is (rule == "dynamic")


@EVERY
def test_cache_serves_within_the_original_context_and_not_across_its_end(rule: str) -> None:
    tokens, cache = some_tokens(rows=2), empty_cache(model(rule), 2)
    steps = [model(rule)(part, cache=cache) for part in tokens[:, :ORIGINAL].split(2, 1)]
    assert_close(torch.cat(steps, 1), model(rule)(tokens[:, :ORIGINAL]))
    with pytest.raises(
        ValueError,
        match=r"beyond 6 tokens the rotary frequencies .* the 6 cached keys do not fit: run without a cache",
    ):
        model(rule)(tokens[:, ORIGINAL : ORIGINAL + 1], cache=cache)
    assert cache.length == ORIGINAL


@EVERY
def test_one_long_pass_may_fill_a_cache_but_nothing_may_follow(rule: str) -> None:
    tokens, cache = some_tokens(rows=2), empty_cache(model(rule), 2)
    assert_close(model(rule)(tokens, cache=cache), model(rule)(tokens))
    with pytest.raises(ValueError, match="run without a cache"):
        model(rule)(tokens[:, :1], cache=cache)


@EVERY
def test_packed_rows_beyond_the_original_context_are_refused(
    rule: str,
) -> None:
    """A row has one set of frequencies: those of its longest text would be wrong for the others."""
    texts = [some_tokens(rows=1, n=4)[0], some_tokens(rows=1, n=2, seed=1)[0]]
    documents = torch.tensor([[0] * 4 + [1] * 2])
    logits = model(rule)(torch.cat(texts)[None], documents=documents)[0]
    for found, text in zip(logits.split([4, 2]), texts, strict=True):
        assert_close(found, model(rule)(text[None])[0])
    with pytest.raises(
        ValueError,
        match=r"packed rows of 9 tokens .* depend on the length beyond 6 tokens: run its texts unpacked",
    ):
        model(rule)(some_tokens(), documents=torch.arange(9).expand(3, -1) // 5)
