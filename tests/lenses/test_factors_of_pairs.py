"""The factors of an encoder-decoder's weight gradients: those of its decoder, its cross-attention and its encoder."""

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from interp import Batch, Edit, HookedEncoderDecoder
from interp.edits import Scale
from interp.lenses import GradientFactors, backward_lens, gradient_cosines, gradient_factors, gradient_rank
from interp.lenses.factors import encoder_factors
from interp.model import EncoderDecoder, EncoderDecoderConfig, ModelConfig, NoNorm
from interp.weights.matrices import matrix_place, side_by_side
from tests.batches import in_batches
from tests.configs import CONFIGS
from tests.loops import over
from tests.tolerances import assert_close

KINDS = ("gpt2", "post-norm", "llama-gqa", "gemma2", "olmo2", "macaron-encoder", "no-norm", "t5")
ANSWERS = torch.tensor([3, 14])
SOURCES, TARGETS = [[5, 1, 4, 1, 5, 9], [2, 6, 5]], [[0, 3, 5], [0, 8, 9, 7, 9]]


def sides(kind: str) -> tuple[ModelConfig, ModelConfig]:
    name = {"macaron-encoder": "gpt2", "no-norm": "gpt2"}.get(kind, kind)
    base = CONFIGS[name]
    base = replace(base, norm=NoNorm()) if kind == "no-norm" else base
    plain = {"gemma2": {"attn_softcap": None}, "olmo2": {"qk_norm": None}}.get(kind, {})
    encoder = CONFIGS["macaron"] if kind == "macaron-encoder" else base
    return (
        replace(encoder, causal=False, unembed=False, logit_softcap=None, tied=False),
        replace(base, cross_attention=True, **plain),  # type: ignore[arg-type]
    )


@cache
def pair(kind: str) -> EncoderDecoder:
    encoder, decoder = sides(kind)
    encoder = replace(encoder, d_model=decoder.d_model)
    torch.manual_seed(0)
    model = EncoderDecoder(EncoderDecoderConfig(encoder, decoder, start_token=0, shared_embedding=False))
    model = model.double().eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter += 0.1 * torch.randn_like(parameter)
    return model


def inputs(side: str = "right") -> tuple[Batch, Batch]:
    source, target = (Batch.of(rows, side=side) for rows in (SOURCES, TARGETS))  # type: ignore[arg-type]
    return source, target


def of_decoder(
    kind: str, source: Batch, target: Batch, answers: Tensor = ANSWERS, **more: int
) -> GradientFactors:
    model = HookedEncoderDecoder(pair(kind))
    return gradient_factors(model.model.decoder, model.given(source, target), answers.tolist(), **more)  # type: ignore[arg-type]


def of_encoder(kind: str, source: Batch, target: Batch, answers: Tensor = ANSWERS) -> GradientFactors:
    return encoder_factors(pair(kind), source, target.with_answers(answers, None))


@cache
def gradients(kind: str) -> dict[str, Tensor]:
    """What backward() leaves on every parameter of a copy, from all logits at once."""
    model = EncoderDecoder(pair(kind).config).double()
    model.load_state_dict(pair(kind).state_dict())
    source, target = inputs()
    logits = model(source.tokens, target.tokens, source_keep=source.keep, target_keep=target.keep)
    loss = F.cross_entropy(logits[torch.arange(2), target.last()], ANSWERS, reduction="sum")
    loss.backward()  # type: ignore[no-untyped-call]
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def cross_gradients(kind: str, layer: int) -> dict[str, Tensor]:
    """Those of cross-attention `[i, o]`, cut out by hand."""
    config, grads = pair(kind).config.decoder, gradients(kind)
    at = f"decoder.blocks.{layer}.cross_attn"
    keys, values = grads[f"{at}.kv.weight"].split(config.kv_heads * config.head_width)
    every = {"W_Q": grads[f"{at}.q.weight"], "W_K": keys, "W_V": values, "W_O": grads[f"{at}.out.weight"]}
    return {name: w.T for name, w in every.items()}


def apart(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_outer_products_sum_to_what_backward_leaves_on_either_side(kind: str) -> None:
    grads = gradients(kind)
    found = {"decoder": of_decoder(kind, *inputs()), "encoder": of_encoder(kind, *inputs())}
    for side, factors in found.items():
        model = getattr(pair(kind), side)
        for name in factors:
            where = matrix_place(model, name)
            expected = side_by_side(where.view(grads[f"{side}.{where.parameter}"]), name)
            assert apart(factors.reconstruct(name), expected) < 1e-10, (side, name)
            assert factors.error(name) < 1e-10
    for layer in range(pair(kind).config.decoder.n_layers):
        for matrix, expected in cross_gradients(kind, layer).items():
            ours = found["decoder"].reconstruct(f"blocks.{layer}.cross_attn.{matrix}")
            assert apart(ours, expected) < 1e-10, (layer, matrix)
    parts = {name.split(".")[2] for name in found["encoder"]}
    assert parts == {"attn", "mlp"} | ({"mlp_before"} if kind == "macaron-encoder" else set())


@over("kind", ["gpt2", "post-norm", "t5"])
@over("side", ["left", "right"])
def test_padding_of_either_text_changes_no_factor(kind: str, side: str) -> None:
    source, target = inputs(side)
    for of, at in ((of_decoder, target), (of_encoder, source)):
        found = of(kind, source, target)
        for row in (0, 1):
            one = of(
                kind,
                Batch.of(SOURCES[row : row + 1]),
                Batch.of(TARGETS[row : row + 1]),
                ANSWERS[row : row + 1],
            )
            for name in found:
                crossed = name.endswith(("cross_attn.W_K", "cross_attn.W_V"))
                real = (source if crossed else at).real[row]
                if of is of_decoder and not crossed:  # whose tokens stand at their positions
                    real = real.sort(descending=True).values
                for together, alone in zip(found[name], one[name], strict=True):
                    assert_close(together[row, real], alone[0])
                assert not found[name][1][row, ~real].any()


def test_the_size_of_batches_changes_nothing() -> None:
    whole, split = (of_decoder("gpt2", *inputs(), batch_size=n) for n in (32, 1))
    for name in whole:
        for ours, theirs in zip(split[name], whole[name], strict=True):
            assert_close(ours, theirs)
    source, target = inputs()
    given = HookedEncoderDecoder(pair("gpt2")).given(source, target)
    one, two = (
        backward_lens(pair("gpt2").decoder, in_batches(pair("gpt2").decoder, given, n), ANSWERS.tolist())
        for n in (1, 2)
    )
    ours, theirs = (torch.tensor(found.delta.values) for found in (one, two))
    assert bool((ours.isnan() == theirs.isnan()).all())
    assert_close(ours.nan_to_num(), theirs.nan_to_num())
    assert (one.word == two.word).all()


def test_keys_and_values_of_cross_attention_read_the_encoders_states() -> None:
    source, target = inputs()
    memory = pair("gpt2").encode(source.tokens, keep=source.keep)
    found = of_decoder("gpt2", source, target)
    for matrix in ("W_K", "W_V"):
        x, delta = found[f"blocks.1.cross_attn.{matrix}"]
        assert_close(x, memory.states)
        assert delta.shape[:2] == source.tokens.shape
    assert found["blocks.1.cross_attn.W_Q"][0].shape[:2] == target.tokens.shape


def test_the_lens_is_of_what_lives_in_the_decoders_stream() -> None:
    model, answers = HookedEncoderDecoder(pair("gpt2")), ANSWERS.tolist()
    decoder, given = model.model.decoder, model.given(*inputs())
    found = backward_lens(decoder, given, answers, top=1)
    cross = ["cross_attn.W_Q", "cross_attn.W_O"]
    assert found.matrix.values.tolist() == ["W_in", "W_out", "W_Q", "W_K", "W_V", "W_O", *cross]
    assert found.part.sel(matrix="cross_attn.W_O", layer=1) == "L1.cross_attn"
    factors = gradient_factors(decoder, given, answers)
    delta = factors["blocks.0.cross_attn.W_O"][1][0, 2]
    logits = decoder.read_out((delta / delta.norm())[None])[0]
    assert decoder.unembed is not None
    cell = found.sel(matrix="cross_attn.W_O", layer=0).isel(prompt=0, pos=2)
    assert int(cell.bottom_token[0]) == int(logits.argmin())
    assert int(cell.target_rank) == int((logits > logits[answers[0]]).sum())
    assert gradient_cosines(decoder, given, answers).matrix.values.tolist() == found.matrix.values.tolist()
    ranks = gradient_rank(decoder, given, answers)
    for matrix in ("W_K", "W_V", "W_O"):
        x, delta = factors[f"blocks.0.cross_attn.{matrix}"]
        expected = torch.linalg.matrix_rank(torch.einsum("bpi,bpo->bio", x, delta)).tolist()
        assert ranks.value.sel(matrix=f"cross_attn.{matrix}", layer=0).values.tolist() == expected


def test_what_has_no_words_or_no_memory_is_refused() -> None:
    model, answers = HookedEncoderDecoder(pair("gpt2")), ANSWERS.tolist()
    decoder, given = model.model.decoder, model.given(*inputs())
    for question in (backward_lens, gradient_cosines):
        with pytest.raises(ValueError, match=r"cross_attn\.W_V reads the encoder's stream"):
            question(decoder, given, answers, matrices=["cross_attn.W_V"])
    source, target = inputs()
    edit = Edit("blocks.0.hook_cross_attn_out", Scale(0.5))
    with pytest.raises(ValueError, match="memory"):
        gradient_factors(decoder, target, answers)
    with pytest.raises(ValueError, match="one target per source is required, got 1 targets of 2 sources"):
        of_encoder("gpt2", source, Batch.of(TARGETS[:1]), ANSWERS[:1])
    with pytest.raises(ValueError, match=r"no factors of cross_attn\.W_Q: this model has no cross-attention"):
        encoder_factors(pair("gpt2"), source, target.with_answers(ANSWERS, None), ["cross_attn.W_Q"])
    with pytest.raises(ValueError, match=r"the factors of cross_attn\.W_O in layer 0 require what it gives"):
        backward_lens(decoder.edited(edit), given, answers, matrices=["cross_attn.W_O"])
