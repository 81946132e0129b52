"""The key/value cache: steps of any length give the full pass, padding and windows included."""

import pytest
import torch
from torch import Tensor

from interp.model import Edit, Read, Rotary, Tap, Transformer
from tests.configs import CAUSAL, CONFIGS, build, empty_cache, some_tokens
from tests.loops import over
from tests.model.test_mask import kept
from tests.tolerances import assert_close

EVERY = over("name", CAUSAL)


def in_steps(model: Transformer, tokens: Tensor, sizes: list[int], keep: Tensor | None = None) -> Tensor:
    """The logits of all tokens, fed `sizes` at a time."""
    cache, end, logits = empty_cache(model, tokens.shape[0], tokens.shape[1]), 0, []
    for size in sizes:
        part = slice(end, end + size)
        logits.append(model(tokens[:, part], keep=None if keep is None else keep[:, part], cache=cache))
        end += size
    assert cache.length == end == tokens.shape[1]
    return torch.cat(logits, 1)


@EVERY
@over("sizes", [[1] * 9, [9], [4, 5], [6, 1, 2]])
def test_steps_equal_the_full_pass(name: str, sizes: list[int]) -> None:
    model, tokens = build(name), some_tokens()
    assert_close(in_steps(model, tokens, sizes), model(tokens))


@pytest.mark.slow
@EVERY
@over("side", ["left", "right", "inside"])
@over("sizes", [[1] * 9, [6, 3]])
def test_padded_steps_equal_the_full_pass(name: str, side: str, sizes: list[int]) -> None:
    model, tokens, keep = build(name), some_tokens(), kept(side)
    assert_close(in_steps(model, tokens, sizes, keep)[keep], model(tokens, keep=keep)[keep])


@EVERY
def test_a_padded_prompt_continues_without_a_mask(name: str) -> None:
    """What is generated is never padding: later steps need no keep-mask of their own."""
    model, tokens = build(name), some_tokens()
    for side in ("left", "right"):
        keep = kept(side)
        keep[:, 6:] = True
        cache = empty_cache(model, 3)
        model(tokens[:, :6], keep=keep[:, :6], cache=cache)
        steps = [model(tokens[:, i : i + 1], cache=cache) for i in range(6, 9)]
        assert_close(torch.cat(steps, 1), model(tokens, keep=keep)[:, 6:])


@EVERY
def test_padding_may_begin_after_an_unpadded_start(name: str) -> None:
    model, tokens = build(name), some_tokens()
    keep = torch.ones(3, 9, dtype=torch.bool)
    keep[1, 5:7] = False
    cache = empty_cache(model, 3)
    first = model(tokens[:, :4], cache=cache)
    second = model(tokens[:, 4:], keep=keep[:, 4:], cache=cache)
    assert_close(torch.cat((first, second), 1)[keep], model(tokens, keep=keep)[keep])


@EVERY
def test_a_tap_reads_the_new_queries_against_all_keys(name: str) -> None:
    model, tokens = build(name), some_tokens()
    pattern, z = Read("blocks.1.attn.hook_pattern"), Read("blocks.1.attn.hook_z")
    whole, step, cache = Tap([pattern, z]), Tap([pattern, z]), empty_cache(model, 3)
    model(tokens, whole)
    model(tokens[:, :7], cache=cache)
    model(tokens[:, 7:], step, cache=cache)
    assert_close(step.values[pattern], whole.values[pattern][:, :, 7:])
    assert_close(step.values[z], whole.values[z][:, 7:])


@EVERY
def test_the_cache_holds_rotated_keys_and_values(name: str) -> None:
    model, cache = build(name), empty_cache(build(name), 3)
    rot = "rot_" if isinstance(CONFIGS[name].position, Rotary) else ""
    tap = Tap([Read(f"blocks.1.attn.hook_{rot}k"), Read("blocks.1.attn.hook_v")])
    model(some_tokens(), tap, cache=cache)
    keys, values = (tap.values[read] for read in tap.reads)
    assert torch.equal(cache.keys[1][:, :9], keys)
    assert torch.equal(cache.values[1][:, :9], values)


def test_a_pass_that_fails_can_be_repeated() -> None:
    model, tokens, cache = build("gpt2"), some_tokens(), empty_cache(build("gpt2"), 3)
    model(tokens[:, :5], cache=cache)
    with pytest.raises(RuntimeError, match="the edit of"):
        model(tokens[:, 5:], Tap(edits=[Edit("blocks.1.attn.hook_z", lambda z: z @ z[0, 0])]), cache=cache)
    assert cache.length == 5
    assert_close(model(tokens[:, 5:], cache=cache), model(tokens)[:, 5:])


def test_the_context_counts_what_the_cache_holds() -> None:
    model = build("gpt2")
    cache = empty_cache(model, 1, n_max=100)
    model(some_tokens(1, 20), cache=cache)
    with pytest.raises(ValueError, match="the context holds 24 tokens, got 25"):
        model(some_tokens(1, 5), cache=cache)


def test_a_model_whose_tokens_see_later_ones_gets_no_cache() -> None:
    with pytest.raises(ValueError, match="requires a causal model"):
        empty_cache(build("bidirectional"), 1)
