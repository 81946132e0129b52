"""An encoder and a decoder in one model: one tap over both, edits, gradients across the memory, caches, circuits."""

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from einops import einsum, rearrange
from torch import Tensor

from interp.data.batch import Batch
from interp.families.load import any_from_folder, from_folder, save
from interp.model import (
    MLP,
    Buckets,
    Edit,
    EncoderDecoder,
    EncoderDecoderConfig,
    KVCache,
    ModelConfig,
    Read,
    RMSNorm,
    Tap,
    Weights,
    build,
)
from interp.model.encoder_decoder import names
from interp.passes.generate import decode, encoded, joined, stream
from interp.passes.observe import observe
from tests.configs import D_VOCAB, N_CTX, SPREAD, some_tokens
from tests.tolerances import assert_close

_PRE = ModelConfig(
    2, 24, 4, N_CTX, D_VOCAB, d_head=10, n_kv_heads=2, mlp=MLP(36), causal=False, unembed=False
)
_T5 = replace(_PRE, position=Buckets(8, 16), norm=RMSNorm(), qkv_bias=False, out_bias=False, attn_scale=0.5)
_POST = replace(_PRE, norm_place="post", embed_norm=True, final_norm=False, n_kv_heads=1)


def pair(encoder: ModelConfig, **changes: object) -> EncoderDecoderConfig:
    decoder = replace(encoder, n_layers=3, causal=True, cross_attention=True, unembed=True, tied=True)
    return EncoderDecoderConfig(encoder, decoder, start_token=2, **changes)  # type: ignore[arg-type]


CONFIGS = {
    "pre-norm": pair(_PRE),
    "t5": pair(_T5),
    "post-norm": pair(_POST),
    "apart": replace(pair(_POST, shared_embedding=False), encoder=replace(_POST, d_vocab=17)),
    "no-mlp": pair(replace(_POST, mlp=None)),
}
EVERY = pytest.mark.parametrize("name", CONFIGS)
SOURCE = some_tokens(n=7) % 17
TARGET = some_tokens(n=9, seed=1)
KEEP = torch.arange(7) < torch.tensor([[7], [4], [2]])


@functools.cache
def model(name: str) -> EncoderDecoder:
    torch.manual_seed(0)
    made = build(CONFIGS[name]).double()
    assert isinstance(made, EncoderDecoder)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += SPREAD * torch.randn(parameter.shape, dtype=torch.float64)
    return made.eval().requires_grad_(False)


@EVERY
def test_every_site_of_both_sides_is_read_in_one_pass_and_changes_nothing(name: str) -> None:
    reads = [Read(site) for site in names(CONFIGS[name], on_demand=True)]
    assert {read.site.partition(".")[0] for read in reads} == {"encoder", "decoder"}
    tap = Tap(reads)
    assert_close(
        model(name)(SOURCE, TARGET, tap, source_keep=KEEP), model(name)(SOURCE, TARGET, source_keep=KEEP)
    )
    assert set(tap.values) == set(reads)


@EVERY
def test_edit_to_the_same_value_changes_nothing_and_another_the_logits(name: str) -> None:
    plain = model(name)(SOURCE, TARGET)
    for site in ("encoder.blocks.1.attn.hook_z", "decoder.blocks.0.cross_attn.hook_pattern"):
        same = model(name)(SOURCE, TARGET, Tap(edits=[Edit(site, lambda x: x)]))
        assert_close(same, plain)
        other = model(name)(SOURCE, TARGET, Tap(edits=[Edit(site, lambda x: x.flip(-1))]))
        assert float((other - plain).abs().max()) > 1e-3


@EVERY
def test_an_edit_of_the_encoder_acts_through_the_memory_alone(name: str) -> None:
    edit = Edit("encoder.blocks.1.hook_attn_out", lambda x: 2 * x)
    inner = Edit("blocks.1.hook_attn_out", edit.change)
    memory = model(name).encode(SOURCE, Tap(edits=[inner]))
    assert_close(model(name)(SOURCE, TARGET, Tap(edits=[edit])), model(name).decode(TARGET, memory))


@EVERY
def test_decoder_metrics_gradients_at_the_encoder_are_finite_differences(name: str) -> None:
    site = "encoder.blocks.0.hook_resid_pre"
    tap = Tap([Read(site, grad=True), Read("decoder.blocks.1.cross_attn.hook_k", grad=True)])
    logit = model(name)(SOURCE, TARGET, tap, source_keep=KEEP)[0, -1, 5]
    for found in torch.autograd.grad(logit, list(tap.live.values())):
        assert float(found.abs().max()) > 1e-6
    tap = Tap([Read(site, grad=True)])
    logit = model(name)(SOURCE, TARGET, tap, source_keep=KEEP)[0, -1, 5]
    (gradient,) = torch.autograd.grad(logit, list(tap.live.values()))
    step = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 1e-6

    def moved(sign: int) -> Tensor:
        edit = Edit(site, lambda x: x + sign * step)
        return model(name)(SOURCE, TARGET, Tap(edits=[edit]), source_keep=KEEP)[0, -1, 5]

    slope = (moved(1) - moved(-1)) / 2
    torch.testing.assert_close((gradient * step).sum(), slope, rtol=1e-5, atol=1e-13)
    assert float(gradient[1].abs().max()) == 0, "another row's source has no part in this logit"


@EVERY
def test_padding_of_the_source_gets_no_attention_and_no_gradient(name: str) -> None:
    reads = [Read("decoder.blocks.2.cross_attn.hook_pattern"), Read("encoder.hook_embed", grad=True)]
    tap = Tap(reads)
    logits = model(name)(SOURCE, TARGET, tap, source_keep=KEEP)
    assert float(tap.values[reads[0]].masked_select(~KEEP[:, None, None, :]).abs().max()) == 0
    (gradient,) = torch.autograd.grad(logits.square().sum(), list(tap.live.values()))
    assert float(gradient[~KEEP].abs().max()) == 0 and float(gradient[KEEP].abs().min()) > 0


@EVERY
def test_cached_steps_equal_the_full_pass_with_the_memorys_keys_once(name: str) -> None:
    whole = model(name)(SOURCE, TARGET, source_keep=KEEP)
    memory = model(name).encode(SOURCE, keep=KEEP)
    cache = KVCache(CONFIGS[name].decoder, 3, 9, device=whole.device, dtype=whole.dtype)
    steps = [model(name).decode(part, memory, cache=cache) for part in TARGET.split([4, 1, 4], 1)]
    assert_close(torch.cat(steps, 1), whole)
    assert set(cache.crossed) == {0, 1, 2}


@EVERY
def test_cross_attention_patterns_follow_from_weights_stream_and_memory(name: str) -> None:
    config, w = CONFIGS[name].decoder, Weights(model(name).decoder).layer(1, cross=True)
    memory = model(name).encode(SOURCE)
    post = config.norms_sum
    stream_site = "blocks.1.ln1.hook_normalized" if post else "blocks.1.ln_cross.hook_normalized"
    reads = [
        Read(stream_site),
        Read("blocks.1.cross_attn.hook_pattern"),
        Read("blocks.1.hook_cross_attn_out"),
    ]
    tap = Tap(reads)
    model(name).decode(TARGET, memory, tap)
    x, pattern, out = (tap.values[read] for read in reads)
    group = config.n_heads // config.kv_heads
    wide = {n: getattr(w, n).repeat_interleave(group, 0) for n in ("W_K", "W_V", "b_K", "b_V")}
    q = einsum(x, w.W_Q, "b q d, h d e -> b q h e") + w.b_Q
    k = einsum(memory.states, wide["W_K"], "b s d, h d e -> b s h e") + wide["b_K"]
    v = einsum(memory.states, wide["W_V"], "b s d, h d e -> b s h e") + wide["b_V"]
    scores = einsum(q, k, "b q h e, b s h e -> b h q s") * config.score_scale(1)
    assert_close(pattern, scores.softmax(-1))
    assert_close(out, einsum(pattern, v, w.W_O, "b h q s, b s h e, h e d -> b q d") + w.b_O)


@EVERY
def test_the_target_is_causal_and_the_source_is_not(name: str) -> None:
    later = TARGET.clone()
    later[:, 5:] = (later[:, 5:] + 1) % D_VOCAB
    plain = model(name)(SOURCE, TARGET)
    assert_close(model(name)(SOURCE, later)[:, :5], plain[:, :5])
    source = SOURCE.clone()
    source[:, -1] = (source[:, -1] + 1) % 17
    assert float((model(name)(source, TARGET) - plain)[:, 0].abs().max()) > 1e-6


def test_greedy_decoding_is_the_argmax_loop_and_ends_at_a_stop_token() -> None:
    mine = model("t5")
    row = [2]
    for _ in range(6):
        row.append(int(mine(SOURCE[:1], torch.tensor([row]))[0, -1].argmax()))
    found = decode(mine, Batch(SOURCE[:1]), 6)
    assert found.tokens.tolist() == [row]
    stop = row[3]
    ended = decode(mine, Batch(SOURCE[:1]), 6, stop_tokens=[stop]).tokens[0].tolist()
    assert ended == row[: row.index(stop, 1) + 1]


def test_what_takes_a_transformer_takes_the_decoder_with_an_encoded_source() -> None:
    mine, source = model("pre-norm"), Batch(SOURCE, KEEP)
    site = "blocks.1.cross_attn.hook_pattern"
    tap = Tap([Read(f"decoder.{site}")])
    mine(SOURCE, TARGET, tap, source_keep=KEEP)
    seen = observe(mine.decoder, encoded(mine, source, Batch(TARGET)), [Read(site)])
    assert_close(seen.trace[site], tap.values[tap.reads[0]])
    steps = list(stream(mine.decoder, encoded(mine, source), 5, reads=[Read(site)]))
    patterns = joined([step.trace for step in steps], site, mine.decoder.config)
    tokens = decode(mine, source, 5).tokens[:, :-1]
    whole = observe(mine.decoder, encoded(mine, source, Batch(tokens)), [Read(site)])
    assert_close(patterns, whole.trace[site])


@EVERY
def test_a_saved_model_comes_back_whole(name: str, tmp_path: Path) -> None:
    save(model(name), tmp_path)
    found = any_from_folder(tmp_path)
    assert isinstance(found, EncoderDecoder) and found.config == CONFIGS[name]
    assert torch.equal(found(SOURCE, TARGET), model(name)(SOURCE, TARGET))
    assert (found.encoder.embed.weight is found.decoder.embed.weight) == CONFIGS[name].shared_embedding
    with pytest.raises(ValueError, match="encoder-decoder"):
        from_folder(tmp_path)


def test_a_config_of_two_stacks_survives_its_dict() -> None:
    for config in CONFIGS.values():
        assert EncoderDecoderConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("encoder", "decoder", "message"),
    [
        ({"causal": True}, {}, "not causal"),
        ({"unembed": True}, {}, "no unembedding"),
        ({}, {"cross_attention": False}, "cross-attention"),
        ({"d_model": 12}, {}, "one d_model"),
        ({"d_vocab": 17}, {}, "one vocabulary"),
    ],
)
def test_stacks_that_do_not_fit_are_refused(
    encoder: dict[str, object], decoder: dict[str, object], message: str
) -> None:
    whole = CONFIGS["pre-norm"]
    with pytest.raises(ValueError, match=message):
        EncoderDecoderConfig(replace(whole.encoder, **encoder), replace(whole.decoder, **decoder))  # type: ignore[arg-type]


def test_sites_without_a_side_and_memories_that_do_not_fit_are_refused() -> None:
    mine = model("pre-norm")
    with pytest.raises(KeyError, match=r"begin with encoder\. or decoder\., got 'blocks\.0"):
        mine(SOURCE, TARGET, Tap([Read("blocks.0.hook_resid_pre")]))
    with pytest.raises(ValueError, match="requires a memory"):
        mine.decoder(TARGET)
    with pytest.raises(ValueError, match="memory"):
        mine.decode(TARGET[:2], mine.encode(SOURCE))
    with pytest.raises(ValueError, match="no cross-attention"):
        Weights(mine.encoder).layer(0, cross=True)


def test_heads_of_cross_attention_sum_to_what_it_adds() -> None:
    mine = model("t5")
    reads = [Read(f"decoder.blocks.0.{site}") for site in ("cross_attn.hook_result", "hook_cross_attn_out")]
    tap = Tap(reads)
    mine(SOURCE, TARGET, tap)
    result, out = (tap.values[read] for read in reads)
    assert_close(rearrange(result, "b p h d -> h b p d").sum(0), out)
