"""The output lens: the words of direct logit attribution, equal to it part by part."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import xarray as xr

import interp
from interp import Batch, Edit, HookedTransformer, Part
from interp.edits import Add, Zero
from interp.lenses import output_lens
from interp.model import MLP
from interp.model.weights import Weights
from tests.configs import CONFIGS, D_VOCAB, build, perturbed, some_tokens
from tests.edited import without_head
from tests.tolerances import assert_close

LINEAR = tuple(name for name, config in CONFIGS.items() if not config.mlm_head)


def writers(name: str) -> list[tuple[str, str]]:
    """Parts of a model and the grain of `attribute` that names them."""
    config = CONFIGS[name]
    found = [("L0H1", "head"), ("L1H3", "head"), ("L0.attn", "sublayer")]
    if config.mlp is not None:
        found += [("L0.mlp", "sublayer"), ("L1.mlp", "sublayer")]
    if isinstance(config.mlp, MLP):
        found += [("L0N7", "neuron"), ("L1N35", "neuron")]
    if "mlp_before" in config.mlps:
        found += [("L0.mlp_before", "sublayer"), ("L1B35", "neuron")]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", LINEAR)
def test_the_target_logit_is_the_parts_direct_attribution(name: str) -> None:
    model, tokens, answer = HookedTransformer(build(name)), some_tokens(), [3, 14, 7]
    whole = {grain: interp.attribute(model, tokens, answer, parts=grain) for _, grain in writers(name)}  # type: ignore[arg-type]
    for part, grain in writers(name):
        last = output_lens(model, tokens, part, answer=answer, top=1).isel(pos=-1)
        ours = torch.from_numpy((last.target_logit + last.vocabulary_mean).values)
        assert_close(ours, torch.from_numpy(whole[grain].value.sel(part=part).values))


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "post-norm"])
def test_every_position_is_the_attribution_of_the_prompt_that_ends_there(name: str) -> None:
    model, tokens = HookedTransformer(build(name)), some_tokens(rows=1)
    for part in ("L0H2", "L1.mlp"):
        found = output_lens(model, tokens, part, answer=5)
        grain = "head" if "H" in part else "sublayer"
        for pos in range(1, tokens.shape[1]):
            alone = interp.attribute(model, tokens[:, : pos + 1], 5, parts=grain)  # type: ignore[arg-type]
            ours = float((found.target_logit + found.vocabulary_mean)[0, pos])
            assert ours == pytest.approx(float(alone.value.sel(part=part)[0]), rel=1e-8, abs=1e-9)


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


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "gemma2", "post-norm"])
def test_what_a_head_moved_from_each_token_sums_to_what_it_wrote(name: str) -> None:
    model, rows = HookedTransformer(build(name)), Batch.of([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9]])
    whole = output_lens(model, rows, "L1H2", answer=[7, 2], top=1)
    each = [output_lens(model, rows, "L1H2", answer=[7, 2], top=1, source=s) for s in range(5)]
    for score in ("target_logit", "vocabulary_mean"):
        ours = sum(found[score].sel(prompt=0).dropna("pos").values for found in each)
        assert len(ours) == 5
        assert_close(torch.tensor(ours), torch.tensor(whole[score].sel(prompt=0).dropna("pos").values))
    _, cache = model.run_with_cache(torch.tensor([[9, 2, 6, 5, 3, 5, 8, 9]]))
    group = int(Weights(model.transformer).kv_head()[2])
    moved = cache["blocks.1.attn.hook_pattern"][0, 2, :, 1, None] * cache["blocks.1.attn.hook_v"][0, 1, group]
    last = each[1].isel(prompt=1)
    assert float(last.norm[0]) == 0.0 and float(last.norm[-1]) > 0
    if name == "gpt2":  # no norm between the head and the stream
        final = cache["blocks.1.hook_resid_post"][0]
        scale = (final.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
        write = moved @ Weights(model.transformer).W_O[1, 2]
        normed = (write - write.mean(-1, keepdim=True)) / scale * model.transformer.ln_final.weight  # type: ignore[operator]
        logits = (normed @ Weights(model.transformer).W_U)[-1]
        assert int(last.top_token[-1, 0]) == int(logits.argmax())
        assert float(last.target_logit[-1] + last.vocabulary_mean[-1]) == pytest.approx(float(logits[2]))


def test_a_source_is_a_token_and_a_head_has_one() -> None:
    model = HookedTransformer(build("gpt2"))
    first = output_lens(model, some_tokens(), "L1H2", source=-9)
    xr.testing.assert_equal(first, output_lens(model, some_tokens(), "L1H2", source=0))
    assert first.attrs["source"] == -9
    with pytest.raises(IndexError, match="the shortest has 9 tokens; got 9"):
        output_lens(model, some_tokens(), "L1H2", source=9)
    with pytest.raises(ValueError, match=r"a source requires a head, .* got L1\.mlp"):
        output_lens(model, some_tokens(), "L1.mlp", source=0)


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
    real = slice(0, 5)
    assert_close(torch.from_numpy(padded.top_logit.values[real]), torch.from_numpy(alone.top_logit.values))
    assert int(padded.norm.isnull().sum()) == 3 and int((padded.top_token == -1).all("rank").sum()) == 3


@pytest.mark.parametrize(
    ("name", "part", "error", "message"),
    [
        ("gpt2", "head 3", KeyError, "no part 'head 3': parts are written L3H5"),
        ("gpt2", "L2H0", IndexError, "L2H0: layers are 0 to 1"),
        ("gpt2", "L1H4", IndexError, "L1H4: the index of a head is 0 to 3"),
        ("gpt2", "L1N40", IndexError, "L1N40: the index of a neuron is 0 to 39"),
        ("attention-only", "L0.mlp", KeyError, r"has no 'blocks\.0\.hook_mlp_out'"),
        ("gpt2", "L0X1", KeyError, r"has no 'blocks\.0\.cross_attn\.hook_z'"),
        ("granite-moe", "L0N1", KeyError, r"has no 'blocks\.0\.mlp\.hook_post'"),
        ("gpt2", "L0.resid", ValueError, r"writes to the stream is required, L3H2 .*got L0\.resid"),
        ("gpt2", "embed", ValueError, "writes to the stream is required.*got embed"),
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


def test_part_is_named_in_every_spelling_and_results_bring_words_along() -> None:
    model = HookedTransformer(build("gpt2"))
    found = output_lens(model, some_tokens(), "L1.mlp", top=2)
    for spelling in ("m1", "1_mlp_out", "blocks.1.hook_mlp_out", Part("mlp", 1)):
        xr.testing.assert_identical(output_lens(model, some_tokens(), spelling, top=2), found)
    assert found.attrs["part"] == "L1.mlp"
    assert found.token.values[0].tolist() == [f"<{i}>" for i in some_tokens()[0]]
    for side in ("top", "bottom"):
        words = [f"<{i}>" for i in found[f"{side}_token"].values.flatten()]
        assert found[f"{side}_word"].values.flatten().tolist() == words


@pytest.mark.slow
@pytest.mark.parametrize("name", LINEAR)
def test_a_zeroed_head_gives_the_words_of_the_model_without_its_output(name: str) -> None:
    model, copy = HookedTransformer(build(name)), HookedTransformer(without_head(name))
    for part, _ in [*writers(name), ("L1H2", "")]:
        found = output_lens(model.edited(Edit("L1H2", Zero())), some_tokens(), part)
        expected = output_lens(copy, some_tokens(), part)
        for value in ("target_logit", "norm", "vocabulary_mean", "top_logit", "bottom_logit"):
            np.testing.assert_allclose(found[value], expected[value], rtol=1e-8, atol=1e-9, err_msg=part)
        assert bool(found.norm.any()) == (part != "L1H2")


@pytest.mark.parametrize("name", LINEAR)
def test_under_an_edit_the_words_are_the_attribution_of_the_edited_model(name: str) -> None:
    model, edits = HookedTransformer(build(name)), [Edit("L0.attn", Zero())]
    whole = interp.attribute(model.edited(edits), some_tokens(), 5)
    for part, grain in [*writers(name), ("L0.attn", "sublayer")]:
        if grain == "sublayer":
            last = output_lens(model.edited(edits), some_tokens(), part, answer=5).isel(pos=-1)
            np.testing.assert_allclose(
                last.target_logit + last.vocabulary_mean, whole.value.sel(part=part), rtol=1e-8, atol=1e-9
            )


def test_write_changed_on_its_way_has_no_words_and_additions_keep_them() -> None:
    def asked(name: str, part: str, edit: Edit) -> object:
        return output_lens(HookedTransformer(build(name)).edited(edit), some_tokens(), part)

    for name, part, where in (
        ("gpt2", "L0H1", "L0.attn"), ("gpt2", "L0H1", "L1.resid"), ("gpt2", "L0N1", "L0.mlp"),
        ("gpt2", "L0.attn", "L0.resid_mid"), ("gemma2", "L0H1", "blocks.0.ln1_post.hook_normalized"),
        ("post-norm", "L1H1", "blocks.1.ln1.hook_normalized"), ("macaron", "L1B3", "L1.resid_pre_attn"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"what {part} wrote is changed on its way .* edit of {where}"):
            asked(name, part, Edit(where, Zero()))
    for name, part, where in (
        ("gpt2", "L0.attn", "L0.attn"), ("gpt2", "L1H1", "L1.resid"), ("gpt2", "L1.mlp", "L1.resid_mid"),
        ("gpt2", "L1H1", "L1.mlp"), ("post-norm", "L1.mlp", "blocks.1.ln1.hook_normalized"),
        ("macaron", "L1H1", "L1.resid_pre_attn"),
    ):  # fmt: skip
        asked(name, part, Edit(where, Zero()))
    asked("gpt2", "L0H1", Edit("L1.resid", Add(1.0)))
