"""The output lens: the words of direct logit attribution, equal to it part by part."""

from dataclasses import replace

import pytest
import torch

import interp
from interp import Batch, HookedTransformer
from interp.lenses.output_lens import output_lens
from interp.model import MLP
from interp.model.weights import Weights
from tests.configs import CONFIGS, D_VOCAB, build, perturbed, some_tokens
from tests.tolerances import assert_close

LINEAR = tuple(name for name, config in CONFIGS.items() if not config.mlm_head)


def labels(name: str) -> list[tuple[str, str]]:
    """Parts of a model and the grain of `attribute` that names them."""
    config = CONFIGS[name]
    found = [("L0H1", "head"), ("L1H3", "head"), ("0_attn_out", "sublayer")]
    if config.mlp is not None:
        found += [("0_mlp_out", "sublayer"), ("1_mlp_out", "sublayer")]
    if isinstance(config.mlp, MLP):
        found += [("L0N7", "neuron"), ("L1N35", "neuron")]
    if config.macaron:
        found += [("0_mlp_before_out", "sublayer"), ("L1B35", "neuron")]
    return found


@pytest.mark.parametrize("name", LINEAR)
def test_the_target_logit_is_the_parts_direct_attribution(name: str) -> None:
    model, tokens, answer = HookedTransformer(build(name)), some_tokens(), [3, 14, 7]
    whole = {by: interp.attribute(model, tokens, answer, by=by) for _, by in labels(name)}  # type: ignore[arg-type]
    for part, by in labels(name):
        last = output_lens(model, tokens, part, answer=answer, top=1).isel(pos=-1)
        ours = torch.from_numpy((last.target_logit + last.vocabulary_mean).values)
        assert_close(ours, torch.from_numpy(whole[by].logits.sel(component=part).values))


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "post-norm"])
def test_every_position_is_the_attribution_of_the_prompt_that_ends_there(name: str) -> None:
    model, tokens = HookedTransformer(build(name)), some_tokens(rows=1)
    for part in ("L0H2", "1_mlp_out"):
        found = output_lens(model, tokens, part, answer=5)
        by = "head" if "H" in part else "sublayer"
        for pos in range(1, tokens.shape[1]):
            alone = interp.attribute(model, tokens[:, : pos + 1], 5, by=by)  # type: ignore[arg-type]
            ours = float((found.target_logit + found.vocabulary_mean)[0, pos])
            assert ours == pytest.approx(float(alone.logits.sel(component=part)[0]), rel=1e-8, abs=1e-9)


def test_heads_mlps_and_their_words_are_those_of_a_slow_loop() -> None:
    model, tokens = HookedTransformer(build("gpt2")), some_tokens(rows=1)
    found = output_lens(model, tokens, "L1H2", top=4)
    _, cache = model.run_with_cache(tokens)
    weights = Weights(model.transformer)
    for pos in range(tokens.shape[1]):
        final = cache["blocks.1.hook_resid_post"][0, pos]
        scale = (final.var(unbiased=False) + 1e-5).sqrt()
        write = cache["blocks.1.attn.hook_z"][0, pos, 2] @ weights.W_O[1, 2]
        normed = (write - write.mean()) / scale * model.transformer.ln_final.weight  # type: ignore[operator]
        logits = normed @ weights.W_U
        logits = logits - logits.mean()
        order = logits.argsort(descending=True).tolist()
        cell = found.isel(prompt=0, pos=pos)
        assert cell.top_token.values.tolist() == order[:4]
        assert cell.bottom_token.values.tolist() == order[::-1][:4]
        assert_close(torch.from_numpy(cell.top_logit.values), logits[order[:4]])
        assert_close(torch.from_numpy(cell.bottom_logit.values), logits[order[::-1][:4]])
        assert float(cell.norm) == pytest.approx(float(normed.norm()))


def test_a_planted_neuron_says_its_word() -> None:
    network = perturbed(replace(CONFIGS["no-norm"], unembed_bias=False))
    with torch.no_grad():
        mlp = network.block(1).mlp
        assert mlp is not None and network.unembed is not None
        mlp.into.bias[11] += 5.0  # type: ignore[union-attr]
        mlp.out.weight[:, 11] = 3 * network.unembed.weight[17]  # type: ignore[union-attr]
    found = output_lens(HookedTransformer(network), some_tokens(), "L1N11", top=1)
    assert (found.top_token == 17).all()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_positions_hold_nothing_and_the_others_the_unpadded_numbers(side: str) -> None:
    rows = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9]]
    model = HookedTransformer(build("llama-gqa"))
    padded = output_lens(model, Batch.of(rows, side=side), "L1H1").isel(prompt=0)  # type: ignore[arg-type]
    alone = output_lens(model, torch.tensor(rows[0]), "L1H1").isel(prompt=0)
    real = slice(0, 5) if side == "right" else slice(3, 8)
    assert_close(torch.from_numpy(padded.top_logit.values[real]), torch.from_numpy(alone.top_logit.values))
    assert int(padded.norm.isnull().sum()) == 3 and int((padded.top_token == -1).all("rank").sum()) == 3


@pytest.mark.parametrize(
    ("name", "part", "error", "message"),
    [
        ("gpt2", "3.2", ValueError, r"a part is required, L3H2 .*got '3.2'"),
        ("gpt2", "L2H0", IndexError, "layers are 0 to 1, got 'L2H0'"),
        ("gpt2", "L1H4", IndexError, "layer 1 has units 0 to 3, got 'L1H4'"),
        ("gpt2", "L1N40", IndexError, "layer 1 has units 0 to 39, got 'L1N40'"),
        ("attention-only", "0_mlp_out", ValueError, "requires a model with mlp_out"),
        ("gpt2", "L0X1", ValueError, "requires a model with cross_attn_out"),
        ("granite-moe", "L0N1", ValueError, "neurons require a plain or gated MLP"),
        ("masked-lm", "L0H1", ValueError, "no masked-LM head"),
    ],
)
def test_parts_that_a_model_lacks_are_refused(
    name: str, part: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        output_lens(HookedTransformer(build(name)), some_tokens(), part)


def test_more_tokens_than_the_vocabulary_has_are_refused() -> None:
    with pytest.raises(ValueError, match=rf"top must be in \[1, {D_VOCAB}\], got 32"):
        output_lens(HookedTransformer(build("gpt2")), some_tokens(), "L0H1", top=32)
