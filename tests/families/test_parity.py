"""Our decoders against the Hugging Face models they came from: logits, padding, loss, generation, round trips."""

import copy
import inspect
from pathlib import Path

import pytest
import torch

from interp import Batch, HookedTransformer, families
from interp.families.load import reading_of
from interp.model import Alibi, KVCache, mean_next_token_loss
from tests.families.oracle import NAMES, hf_config, hf_logits, hf_model, new_hf_model, some_tokens
from tests.families.pair import BASES, largest, network, ours, padded
from tests.loops import over
from tests.tolerances import assert_close

EVERY = pytest.mark.parametrize("name", NAMES)
FAMILY = pytest.mark.parametrize("name", BASES)
WINDOWS = ("mistral-window", "qwen2-window", "gemma3-ropes", "phi3-window")
SOME = pytest.mark.parametrize(
    "name", [*BASES, "gpt2-inverse-layer", "llama-llama3-rope", "opt-post-norm", *WINDOWS]
)


def within(expected: torch.Tensor, exact: torch.Tensor) -> float:
    """How far two float32 passes may be apart: both are about as far from the pass in float64.

    Recurrent mixers carry a rounding on from token to token, so that it differs much by family.
    """
    return 1e-4 + 4 * largest(expected.double(), exact)


@EVERY
def test_logits_equal_hugging_faces_in_float32(name: str) -> None:
    expected = hf_logits(hf_model(name), some_tokens())
    assert expected.std() > 0.3
    exact = hf_logits(hf_model(name, torch.float64), some_tokens())
    assert largest(network(name)(some_tokens()), expected) <= within(expected, exact)


@EVERY
def test_logits_equal_hugging_faces_in_float64(name: str) -> None:
    expected = hf_logits(hf_model(name, torch.float64), some_tokens())
    assert largest(network(name, torch.float64)(some_tokens()), expected) <= 1e-9


def test_falcons_alibi_is_rounded_as_hugging_faces_far_into_a_text() -> None:
    """Against "sdpa", the default there; "eager" adds the bias a second time (`oracle` takes that out)."""
    tokens = some_tokens(rows=1, n=310)
    expected = hf_logits(hf_model("falcon-rw", torch.float64, "sdpa"), tokens)
    model = network("falcon-rw", torch.float64)
    assert largest(model(tokens), expected) <= 1e-9
    exact = copy.deepcopy(model)
    assert exact.score_bias is not None
    exact.score_bias.kind = Alibi(scaled=True)
    assert largest(exact(tokens), expected) > 1e-2, "rounding matters"


# --- padding, loss, generation ------------------------------------------------------------------------------------


@SOME
@over("side", ["left", "right"])
def test_padded_rows_give_hugging_faces_logits_under_mask_and_position_ids(name: str, side: str) -> None:
    tokens, keep = padded(side)
    positions = (keep.cumsum(1) - 1).clamp_min(0)
    inputs = {"attention_mask": keep.long(), "position_ids": positions}
    theirs = hf_model(name)
    if "position_ids" not in inspect.signature(theirs.forward).parameters:  # BLOOM counts its mask
        del inputs["position_ids"]
    expected = hf_logits(theirs, tokens, **inputs)
    exact = hf_logits(hf_model(name, torch.float64), tokens, **inputs)
    assert largest(network(name)(tokens, keep=keep)[keep], expected[keep]) <= within(
        expected[keep], exact[keep]
    )


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama-dynamic-rope-beyond", "llama-long-rope-beyond"])
def test_padded_rows_have_their_own_rotation_where_it_depends_on_length(name: str, side: str) -> None:
    """Hugging Face takes the longest row's for all of a batch, so its numbers of each row alone are the oracle."""
    tokens, keep = padded(side)
    mine = network(name)(tokens, keep=keep)
    for row, real in enumerate(keep):
        alone = hf_logits(new_hf_model(name), tokens[row, real][None])[0]
        assert largest(mine[row, real], alone) <= 1e-4


@SOME
def test_mean_loss_equals_hugging_faces(name: str) -> None:
    tokens = some_tokens()
    with torch.no_grad():
        expected = hf_model(name)(tokens, labels=tokens).loss
    assert_close(mean_next_token_loss(network(name)(tokens), tokens), expected)


@SOME
def test_mean_loss_of_padded_rows_equals_hugging_faces_with_ignored_labels(name: str) -> None:
    tokens, keep = padded("right")
    with torch.no_grad():
        labels = tokens.masked_fill(~keep, -100)
        expected = hf_model(name)(tokens, attention_mask=keep.long(), labels=labels).loss
    assert_close(mean_next_token_loss(network(name)(tokens, keep=keep), tokens, keep), expected)


@FAMILY
def test_greedy_generation_gives_hugging_faces_tokens_with_any_cache(name: str) -> None:
    expected = hf_model(name, torch.float64).generate(
        some_tokens(n=6), attention_mask=torch.ones(3, 6, dtype=torch.long), max_new_tokens=12, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    for cached in (True, False):
        got = ours(name, torch.float64).generate(
            some_tokens(n=6), max_new_tokens=12, stop_at_eos=False, use_past_kv_cache=cached
        )
        assert got.keep is None
        assert torch.equal(got.tokens, expected)


@FAMILY
def test_greedy_generation_of_left_padded_rows_gives_hugging_faces_tokens(name: str) -> None:
    tokens, keep = padded("left")
    expected = hf_model(name, torch.float64).generate(
        tokens,
        attention_mask=keep.long(),
        max_new_tokens=8,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    got = ours(name, torch.float64).generate(Batch(tokens, keep), max_new_tokens=8, stop_at_eos=False)
    assert torch.equal(got.tokens, expected)


@SOME
def test_a_cache_filled_in_two_steps_gives_hugging_faces_logits(name: str) -> None:
    tokens, model = some_tokens(), network(name)
    cache = KVCache(model.config, 3, 20, device=model.device, dtype=model.dtype)
    steps = [model(part, cache=cache) for part in tokens.split([7, 13], 1)]
    theirs = hf_logits(hf_model(name), tokens)
    rounding = largest(theirs, ours(name, torch.float64).transformer(tokens))
    assert largest(torch.cat(steps, 1), theirs) <= max(1e-4, 2 * rounding)


# --- round trips --------------------------------------------------------------------------------------------------


@EVERY
def test_a_saved_checkpoint_loads_as_the_live_model_does(name: str, tmp_path: Path) -> None:
    hf_model(name).save_pretrained(tmp_path)
    again, live = HookedTransformer.from_pretrained(tmp_path).transformer, network(name)
    assert again.config == live.config
    assert_equal_weights(again, live)


@pytest.mark.parametrize("name", [name for name in BASES if hf_config(name).tie_word_embeddings])
def test_a_base_model_without_prefix_and_head_loads_where_the_head_is_tied(name: str) -> None:
    base = HookedTransformer.from_pretrained(hf_model(name).base_model).transformer
    assert_equal_weights(base, network(name))


@EVERY
def test_our_own_format_gives_back_every_bit(name: str, tmp_path: Path) -> None:
    families.save(network(name), tmp_path)
    again = HookedTransformer.from_pretrained(tmp_path).transformer
    assert again.config == network(name).config
    assert_equal_weights(again, network(name))
    assert torch.equal(again(some_tokens()), network(name)(some_tokens()))


@FAMILY
def test_a_key_that_nobody_reads_is_listed_in_every_family(name: str) -> None:
    assert "surprise" in reading_of(hf_config(name).to_dict() | {"surprise": 1}).inert


def assert_equal_weights(a: torch.nn.Module, b: torch.nn.Module) -> None:
    mine, theirs = a.state_dict(), b.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[key]) for key, value in mine.items())
