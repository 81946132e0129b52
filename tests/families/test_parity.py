"""Our models against the Hugging Face models they were loaded from: logits, sites, padding, loss, generation."""

import functools
from collections.abc import Iterator

import pytest
import torch
import transformers.models.llama.modeling_llama as hf_llama
from einops import rearrange
from torch import Tensor

from interp import Batch, HookedTransformer
from interp.model import KVCache, Read, Tap, Transformer, mean_next_token_loss, sites
from tests.families.oracle import GPT2S, NAMES, Recorder, hf_logits, hf_model, some_tokens
from tests.tolerances import assert_close

EVERY = pytest.mark.parametrize("name", NAMES)
SOME = pytest.mark.parametrize("name", ["gpt2", "gpt2-inverse-layer", "llama", "llama-llama3-rope"])
ATTENTION = {torch.float32: "eager", torch.float64: "sdpa"}
"""Llama's eager attention takes its softmax in float32 whatever the dtype, its fused one does not."""
ONE_EACH = pytest.mark.parametrize("name", ["gpt2-inverse-layer", "llama-llama3-rope"])
NOT_EXPOSED = ("hook_attn_scores", "hook_scale")
"""Sites that Hugging Face computes inside an expression; tests/model checks them against the formulas."""


@functools.cache
def ours(name: str, dtype: torch.dtype = torch.float32) -> HookedTransformer:
    return HookedTransformer.from_pretrained(hf_model(name, dtype, ATTENTION[dtype]))


def network(name: str, dtype: torch.dtype = torch.float32) -> Transformer:
    return ours(name, dtype).transformer


def largest(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


@EVERY
def test_logits_equal_hugging_faces_in_float32(name: str) -> None:
    expected = hf_logits(hf_model(name), some_tokens())
    assert expected.std() > 0.3
    assert largest(network(name)(some_tokens()), expected) <= 1e-4


@EVERY
def test_logits_equal_hugging_faces_in_float64(name: str) -> None:
    expected = hf_logits(hf_model(name, torch.float64, "sdpa"), some_tokens())
    assert largest(network(name, torch.float64)(some_tokens()), expected) <= 1e-9


# --- sites --------------------------------------------------------------------------------------------------------


def gpt2_sites(model: torch.nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    """Every site that the oracle's modules expose, under our names."""
    seen, out = _recorded(model, tokens)
    into, outof = seen.inputs, seen.outputs
    n_heads = model.config.n_head
    found = {"hook_embed": outof["transformer.wte"], "ln_final.hook_normalized": outof["transformer.ln_f"]}
    found["hook_pos_embed"] = outof["transformer.wpe"].expand_as(found["hook_embed"])
    for layer in range(model.config.n_layer):
        theirs, block = f"transformer.h.{layer}", f"blocks.{layer}"
        heads = outof[f"{theirs}.attn.c_attn"].chunk(3, -1)
        found |= {
            f"{block}.hook_resid_pre": into[theirs],
            f"{block}.ln1.hook_normalized": outof[f"{theirs}.ln_1"],
            **{f"{block}.attn.hook_{p}": _split(x, n_heads) for p, x in zip("qkv", heads, strict=True)},
            f"{block}.attn.hook_pattern": out.attentions[layer],
            f"{block}.attn.hook_z": _split(into[f"{theirs}.attn.c_proj"], n_heads),
            f"{block}.hook_attn_out": outof[f"{theirs}.attn.c_proj"],
            f"{block}.hook_resid_mid": into[f"{theirs}.ln_2"],
            f"{block}.ln2.hook_normalized": outof[f"{theirs}.ln_2"],
            f"{block}.mlp.hook_pre": outof[f"{theirs}.mlp.c_fc"],
            f"{block}.mlp.hook_post": into[f"{theirs}.mlp.c_proj"],
            f"{block}.hook_mlp_out": outof[f"{theirs}.mlp.c_proj"],
            f"{block}.hook_resid_post": outof[theirs],
        }
    return found


def llama_sites(
    model: torch.nn.Module, tokens: Tensor, rotated: list[tuple[Tensor, Tensor]]
) -> dict[str, Tensor]:
    """The same for Llama; `rotated` holds what its rotary function returned, layer by layer."""
    seen, out = _recorded(model, tokens)
    into, outof = seen.inputs, seen.outputs
    n_heads, n_kv = model.config.num_attention_heads, model.config.num_key_value_heads
    found = {"hook_embed": outof["model.embed_tokens"], "ln_final.hook_normalized": outof["model.norm"]}
    for layer in range(model.config.num_hidden_layers):
        theirs, block = f"model.layers.{layer}", f"blocks.{layer}"
        for part, n in {"q": n_heads, "k": n_kv, "v": n_kv}.items():
            found[f"{block}.attn.hook_{part}"] = _split(outof[f"{theirs}.self_attn.{part}_proj"], n)
        for part, x in zip("qk", rotated[layer], strict=True):
            found[f"{block}.attn.hook_rot_{part}"] = x.transpose(1, 2)
        found |= {
            f"{block}.hook_resid_pre": into[theirs],
            f"{block}.ln1.hook_normalized": outof[f"{theirs}.input_layernorm"],
            f"{block}.attn.hook_pattern": out.attentions[layer],
            f"{block}.attn.hook_z": _split(into[f"{theirs}.self_attn.o_proj"], n_heads),
            f"{block}.hook_attn_out": outof[f"{theirs}.self_attn.o_proj"],
            f"{block}.hook_resid_mid": into[f"{theirs}.post_attention_layernorm"],
            f"{block}.ln2.hook_normalized": outof[f"{theirs}.post_attention_layernorm"],
            f"{block}.mlp.hook_pre": outof[f"{theirs}.mlp.gate_proj"],
            f"{block}.mlp.hook_pre_linear": outof[f"{theirs}.mlp.up_proj"],
            f"{block}.mlp.hook_post": into[f"{theirs}.mlp.down_proj"],
            f"{block}.hook_mlp_out": outof[f"{theirs}.mlp.down_proj"],
            f"{block}.hook_resid_post": outof[theirs],
        }
    return found


def _split(x: Tensor, n: int) -> Tensor:
    return rearrange(x, "b p (h e) -> b p h e", h=n)


def _recorded(model: torch.nn.Module, tokens: Tensor) -> tuple[Recorder, object]:
    recorder = Recorder(model)
    try:
        with torch.no_grad():
            out = model(tokens, output_attentions=True, output_hidden_states=True)
    finally:
        recorder.close()
    return recorder, out


@pytest.fixture
def rotated(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """What Hugging Face's Llama gets from its rotary function, call by call."""
    calls: list[tuple[Tensor, Tensor]] = []
    original = hf_llama.apply_rotary_pos_emb

    def noting(*args: Tensor, **options: object) -> tuple[Tensor, Tensor]:
        calls.append(original(*args, **options))
        return calls[-1]

    monkeypatch.setattr(hf_llama, "apply_rotary_pos_emb", noting)
    return calls


@EVERY
def test_every_site_that_hugging_face_exposes_is_equal(
    name: str, rotated: list[tuple[Tensor, Tensor]]
) -> None:
    model, tokens = hf_model(name), some_tokens()
    expected = gpt2_sites(model, tokens) if name in GPT2S else llama_sites(model, tokens, rotated)
    mine = network(name)
    every = {n for n in sites.names(mine.config) if not n.endswith(NOT_EXPOSED)}
    assert every == expected.keys(), "the test must cover every site that is not known to be hidden"
    tap = Tap([Read(site) for site in expected])
    mine(tokens, tap)
    for read, value in tap.values.items():
        assert largest(value, expected[read.site]) <= 1e-4, read.site


@EVERY
def test_hidden_states_are_the_residual_stream_and_the_last_one_is_already_normed(name: str) -> None:
    """Trap: `hidden_states[-1]` has been through the final norm; a lens must not norm it again."""
    with torch.no_grad():
        hidden = hf_model(name)(some_tokens(), output_hidden_states=True).hidden_states
    model = network(name)
    tap = Tap(
        [Read("blocks.0.hook_resid_pre"), Read("blocks.1.hook_resid_pre"), Read("ln_final.hook_normalized")]
    )
    model(some_tokens(), tap)
    for read, expected in zip(tap.reads, hidden, strict=True):
        assert largest(tap.values[read], expected) <= 1e-4
    final = model(some_tokens(), stop=2)
    assert largest(final, hidden[-1]) > 0.1, "the state before the norm is something else"
    assert largest(model.ln_final(final), hidden[-1]) <= 1e-4


# --- padding, loss, generation ------------------------------------------------------------------------------------


def padded(side: str) -> tuple[Tensor, Tensor]:
    """Three rows of 20, 13 and 6 tokens, padded with 0 on one side, and their keep-mask."""
    tokens, keep = some_tokens(), torch.zeros(3, 20, dtype=torch.bool)
    for row, length in enumerate((20, 13, 6)):
        keep[row, :length] = True
    keep = keep if side == "right" else keep.flip(1)
    return tokens.masked_fill(~keep, 0), keep


@SOME
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_give_hugging_faces_logits_under_mask_and_position_ids(name: str, side: str) -> None:
    tokens, keep = padded(side)
    positions = (keep.cumsum(1) - 1).clamp_min(0)
    inputs = {"attention_mask": keep.long(), "position_ids": positions}
    expected = hf_logits(hf_model(name, torch.float32, "sdpa"), tokens, **inputs)
    assert largest(network(name)(tokens, keep=keep)[keep], expected[keep]) <= 1e-4


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
        expected = hf_model(name, torch.float32, "sdpa")(
            tokens, attention_mask=keep.long(), labels=labels
        ).loss
    assert_close(mean_next_token_loss(network(name)(tokens, keep=keep), tokens, keep), expected)


@ONE_EACH
def test_greedy_generation_gives_hugging_faces_tokens_with_and_without_the_cache(name: str) -> None:
    expected = hf_model(name, torch.float64, "sdpa").generate(
        some_tokens(n=6), attention_mask=torch.ones(3, 6, dtype=torch.long), max_new_tokens=12, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    for cached in (True, False):
        got = ours(name, torch.float64).generate(
            some_tokens(n=6), max_new_tokens=12, stop_at_eos=False, use_past_kv_cache=cached
        )
        assert got.keep is None
        assert torch.equal(got.tokens, expected)


@ONE_EACH
def test_greedy_generation_of_left_padded_rows_gives_hugging_faces_tokens(name: str) -> None:
    tokens, keep = padded("left")
    expected = hf_model(name, torch.float64, "sdpa").generate(
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
    assert largest(torch.cat(steps, 1), hf_logits(hf_model(name), tokens)) <= 1e-4
