"""One signature, many methods: what rows sum to, which position is asked about, and what is refused."""

import copy
import functools
from typing import get_args

import numpy as np
import pytest
import torch
import xarray as xr

import interp
from interp import Batch, Edit, HookedTransformer
from interp.core.viewer import notes_of
from interp.data.stream import prompt_source
from interp.edits import Add, Resample, Scale, Set, Zero
from interp.tokens import (
    METHODS,
    AltiLogit,
    GradientTimesInput,
    IntegratedGradients,
    LayerMixing,
    Mixing,
    TokenAttribution,
    layer_mixing,
    token_attribution,
)
from interp.tokens.mixing import Kernel, rollout, with_residual
from interp.tokens.token_attribution import TokenMethod, columns
from tests.configs import CONFIGS, build, some_tokens
from tests.loops import over
from tests.tiny import hooked
from tests.tokens.edited import without
from tests.tolerances import assert_close

KERNELS = get_args(Kernel)
SHARES = tuple(name for name, how in METHODS.items() if isinstance(how, Mixing))
ROWS = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9], [7, 9, 2]]
ANSWER, WRONG = [3, 14, 7], [5, 1, 30]
FEW_STEPS: dict[str, TokenMethod] = {**METHODS, "integrated_gradients": IntegratedGradients(steps=3)}


def model(name: str = "gpt2") -> HookedTransformer:
    return HookedTransformer(build(name))


def tokens_for(method: str) -> torch.Tensor:
    """Three rows of nine; for flow, which takes 0.2 s for those, two of six."""
    return some_tokens(2, 6) if method == "flow" else some_tokens()


@functools.cache
def alone(i: int, method: str) -> np.ndarray:
    """The values of one of the rows, asked about by itself."""
    how = FEW_STEPS[method]
    return token_attribution(model(), torch.tensor(ROWS[i]), ANSWER[i], WRONG[i], method=how).value.values[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_shares_are_positive_and_sum_to_one_for_every_position(name: str) -> None:
    for method in SHARES:
        for pos in (3,) if method == "flow" else (-1, 3):
            tokens = tokens_for(method)
            score = token_attribution(model(name), tokens, method=method, pos=pos).value.values
            if method == "attention" and CONFIGS[name].sinks:
                assert (score.sum(1) < 1).all()
            else:
                np.testing.assert_allclose(score.sum(1), 1, rtol=1e-9)
            assert (score >= 0).all()
            assert not CONFIGS[name].causal or (score[:, columns(Batch(tokens), pos)[0] + 1 :] == 0).all()


@pytest.mark.slow
@over("method", METHODS)
@over("side", ["left", "right"])
def test_padding_changes_no_number(method: str, side: str) -> None:
    padded, how = Batch.of(ROWS, side=side), FEW_STEPS[method]  # type: ignore[arg-type]
    result = token_attribution(model(), padded, ANSWER, WRONG, method=how)
    for i in range(len(ROWS)):
        n = int(padded.keep[i].sum())  # type: ignore[index]
        np.testing.assert_allclose(result.value.values[i, :n], alone(i, method), rtol=1e-9, atol=1e-9)
        assert np.isnan(result.value.values[i, n:]).all()


@over("method", METHODS)
@pytest.mark.parametrize("name", ["gpt2", "gemma2", "post-norm"])
def test_a_position_of_a_causal_model_is_the_end_of_the_prompt_cut_there(name: str, method: str) -> None:
    tokens = some_tokens()
    for pos, cut in ((0, 1), (-3, 7)):
        whole = token_attribution(model(name), tokens, ANSWER, WRONG, method=FEW_STEPS[method], pos=pos)
        short = token_attribution(model(name), tokens[:, :cut], ANSWER, WRONG, method=FEW_STEPS[method])
        np.testing.assert_allclose(whole.value.values[:, :cut], short.value.values, rtol=1e-9, atol=1e-9)
        assert (whole.value.values[:, cut:] == 0).all()


@pytest.mark.parametrize("name", ["llama-gqa", "parallel", "bidirectional"])
def test_a_layer_and_a_rollout_are_those_of_the_recorded_patterns(name: str) -> None:
    cache = model(name).run_with_cache(some_tokens())[1]
    patterns = [cache[f"blocks.{i}.attn.hook_pattern"].mean(1) for i in range(2)]
    for layer in (0, 1, -1):
        found = token_attribution(model(name), some_tokens(), method=Mixing("attention", layer))
        assert_close(torch.tensor(found.value.values), patterns[layer][:, -1])
    found = token_attribution(model(name), some_tokens(), method="rollout")
    rolled = rollout([with_residual(pattern) for pattern in patterns])
    assert_close(torch.tensor(found.value.values), rolled[:, -1])


@pytest.mark.parametrize("kernel", ["attn_res_norms", "norms", "alti"])
def test_chained_kernels_are_the_product_of_the_layers(kernel: str) -> None:
    layers = layer_mixing(model("post-norm"), some_tokens(), kernel=kernel).value.values  # type: ignore[arg-type]
    found = token_attribution(model("post-norm"), some_tokens(), method=Mixing(kernel))  # type: ignore[arg-type]
    np.testing.assert_allclose(found.value, (layers[:, 1] @ layers[:, 0])[:, -1], rtol=1e-9)


def test_the_mixing_of_layers_leaves_padding_out() -> None:
    result = layer_mixing(model(), Batch.of(ROWS), kernel="norms")
    assert dict(result.sizes) == {"prompt": 3, "layer": 2, "query": 8, "key": 8, "pos": 8}
    for i, row in enumerate(ROWS):
        alone, n = layer_mixing(model(), torch.tensor(row), kernel="norms"), len(row)
        found = result.isel(prompt=i)
        np.testing.assert_allclose(found.value[:, :n, :n], alone.value[0], rtol=1e-9)
        np.testing.assert_allclose(found.mixing_ratio[:, :n], alone.mixing_ratio[0], rtol=1e-9, atol=1e-9)
        assert found.value[:, n:].isnull().all() and found.value[:, :, n:].isnull().all()
        assert found.mixing_ratio[:, n:].isnull().all()


def test_results_name_their_tokens_and_say_what_they_sum_to() -> None:
    prompt = "The capital of France is"
    result = token_attribution(hooked(), prompt)
    assert "".join(result.token.values[0]) == "<|endoftext|>" + prompt
    said = {"unit": "share", "sums_to": "1", "method": "alti", "pos": -1}
    assert result.attrs.items() >= {"interp_analysis": "token_attribution", **said}.items()
    complete = token_attribution(hooked(), prompt, 5, method="integrated_gradients")
    assert "total" in complete and "error" in complete and "total" in complete.attrs["sums_to"]
    assert complete.attrs["completeness_error"] == float(complete.error.max())
    sink = token_attribution(model("gpt-oss"), some_tokens(), method="attention")
    assert sink.attrs["sums_to"] == "1, less what the sink takes"


def test_methods_about_an_answer_require_one_and_others_say_it_is_unused() -> None:
    for method, how in METHODS.items():
        if isinstance(how, Mixing):
            one, other = (token_attribution(model(), some_tokens(), a, method=method) for a in (None, 3))
            assert one.equals(other) and not one.attrs.get("notes")
            assert other.attrs["notes"] == [
                f"method={method!r} is about the tokens that a position is made of, whatever follows: answer changed "
                "nothing; 'alti_logit' and 'gradient_x_input' attribute an answer"
            ]
        else:
            found = token_attribution(model(), some_tokens(), 3, 5, method=FEW_STEPS[method])
            assert not [text for text in notes_of(found) if "changed nothing" in text]
            with pytest.raises(ValueError, match=f"{method} .* an answer is required, got None"):
                token_attribution(model(), some_tokens(), method=method)
    records = (AltiLogit(), IntegratedGradients(steps=3))
    for record in records:
        assert token_attribution(model(), some_tokens(), 3, method=record).attrs["method"] == repr(record)


def test_what_has_no_meaning_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"unknown method 'altis'.*alti"):
        token_attribution(model(), some_tokens(), method="altis")
    with pytest.raises(
        ValueError, match="rollout over layers requires a kernel that counts the residual, got 'values'"
    ):
        Mixing("values")
    with pytest.raises(IndexError, match="layers are -2 to 1, got 2"):
        token_attribution(model(), some_tokens(), method=Mixing("attention", 2))
    with pytest.raises(IndexError, match="position 3 is required of every row, but row"):
        token_attribution(model(), Batch.of(ROWS), pos=3)
    with pytest.raises(IndexError, match="position -4 is required of every row, but row"):
        token_attribution(model(), Batch.of(ROWS), pos=-4)
    with pytest.raises(ValueError, match="ALTI-Logit requires the last position in a bidirectional model"):
        token_attribution(model("bidirectional"), some_tokens(), 3, method="alti_logit", pos=2)
    with pytest.raises(ValueError, match="one text per row"):
        token_attribution(model(), Batch.packed([[1, 2], [3]], 4))
    long = HookedTransformer(interp.model.Transformer(interp.model.ModelConfig(1, 8, 2, 70, 5)))
    with pytest.raises(ValueError, match="attention flow requires at most 64 tokens, got 70"):
        token_attribution(long, torch.zeros(1, 70, dtype=torch.long), method="flow")


def test_a_decoder_that_attends_to_a_memory_is_refused() -> None:
    config = interp.model.ModelConfig(1, 8, 2, 8, 5, cross_attention=True)
    decoder = HookedTransformer(interp.model.Transformer(config))
    for method in METHODS:
        with pytest.raises(ValueError, match="also attends to the memory of an encoder"):
            token_attribution(decoder, torch.tensor([1, 2]), 3, method=method)


def test_the_columns_of_positions_count_kept_tokens() -> None:
    for side, expected in (("left", [[7, 7, 7], [4, 1, 6]]), ("right", [[4, 7, 2], [1, 1, 1]])):
        batch = Batch.of(ROWS, side=side)  # type: ignore[arg-type]
        assert [columns(batch, pos).tolist() for pos in (-1, 1)] == expected


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_are_taken_in_every_model_of_the_table(name: str) -> None:
    for method in (GradientTimesInput(), IntegratedGradients(steps=3)):
        found = token_attribution(model(name), some_tokens(2, 5), 3, 5, method=method).value.values
        assert np.isfinite(found).all() and found.any(1).all()


# --- questions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_the_function_is_its_question_in_a_run(method: str) -> None:
    question = TokenAttribution(ANSWER, WRONG, method=FEW_STEPS[method])
    found = token_attribution(model(), Batch.of(ROWS), ANSWER, WRONG, method=FEW_STEPS[method])
    batches = prompt_source(Batch.of(ROWS), model().text)
    assert found.identical(interp.run(question, model(), batches)["token_attribution"])
    both = interp.run([question, LayerMixing(kernel="norms")], model(), batches)
    xr.testing.assert_allclose(found, both["token_attribution"], rtol=1e-12)  # attention by another kernel
    assert len(interp.frame(found).columns) <= 12 and all(found[name].attrs["unit"] for name in found)


def test_the_answers_that_the_data_bring_are_those_attributed() -> None:
    answered = Batch.of(ROWS).with_answers(torch.tensor(ANSWER), torch.tensor(WRONG))
    for method in ("alti_logit", "gradient_x_input"):
        found = token_attribution(model(), answered, method=method)
        assert found.identical(token_attribution(model(), Batch.of(ROWS), ANSWER, WRONG, method=method))


def test_a_stream_of_texts_gives_what_the_prompts_give() -> None:
    texts = ["The capital of France is", "The cat sat on", "When Mary and John went"]
    found = token_attribution(hooked(), iter(texts))
    for i, text in enumerate(texts):
        alone = token_attribution(hooked(), text)
        n = alone.sizes["pos"]
        np.testing.assert_allclose(found.value[i, :n], alone.value[0], rtol=1e-9, atol=1e-12)
        assert found.token.values[i, :n].tolist() == alone.token.values[0].tolist()
        assert found.value[i, n:].isnull().all()


# --- edited models ---------------------------------------------------------------------------------------------------

CHANGED = ("gpt2", "llama-gqa", "gemma2", "olmo2", "parallel", "post-norm", "bloom")


def agree(found: xr.Dataset, expected: xr.Dataset) -> None:
    for name in expected:
        if name not in ("error", "completeness_error"):
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-9, atol=1e-11, err_msg=str(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGED)
@over("part, method", [(part, m) for part in ("L0.mlp", "L0.attn", "L0H1", "L1H2") for m in METHODS])
def test_an_edited_model_is_the_model_with_those_weights(name: str, part: str, method: str) -> None:
    if (part, method) in (("L0.attn", "alti_logit"), ("L1H2", "values")):
        return  # refused; and values are what heads move before their output weights, as the next test has it
    edits, how = [Edit(part, Zero())], FEW_STEPS[method]
    tokens = tokens_for(method)
    asked = (tokens, ANSWER[: len(tokens)], WRONG[: len(tokens)])
    found = token_attribution(model(name).edited(edits), *asked, method=how)
    agree(found, token_attribution(without(name, part), *asked, method=how))
    if part == "L0H1":
        with (m := model(name)).hooks(edits=edits):
            assert token_attribution(m, *asked, method=how).identical(found)
        assert token_attribution(m.edited(edits), *asked, method=how).identical(found)
    if part == "L0.mlp":
        assert not np.allclose(found.value, token_attribution(model(name), *asked, method=how).value)


@pytest.mark.parametrize(
    "name", [name for name, config in CONFIGS.items() if config.kv_heads == config.n_heads]
)
@over("kernel", KERNELS)
def test_a_head_that_is_zeroed_moves_nothing(name: str, kernel: Kernel) -> None:
    """As if its values were 0, which is so for every kernel; and for all but `values` as if its output weights were."""
    part = "L1H2"
    found = layer_mixing(model(name).edited(Edit(part, Zero())), some_tokens(), kernel=kernel)
    agree(found, layer_mixing(without(name, part, values=True), some_tokens(), kernel=kernel))
    if kernel != "values":
        agree(found, layer_mixing(without(name, part), some_tokens(), kernel=kernel))
    plain = layer_mixing(model(name), some_tokens(), kernel=kernel)
    assert np.allclose(found.value, plain.value) == (kernel == "attention")


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "post-norm", "gpt-oss"])
@over("kernel", KERNELS)
def test_a_head_that_is_scaled_is_the_model_with_scaled_weights(name: str, kernel: Kernel) -> None:
    network = copy.deepcopy(build(name))
    width = network.config.head_width
    network.block(1).attn.out.weight[:, width : 2 * width] *= -0.5
    found = layer_mixing(model(name).edited(Edit("L1H1", Scale(-0.5))), some_tokens(), kernel=kernel)
    if kernel != "values":  # which come before the output weights
        agree(found, layer_mixing(network, some_tokens(), kernel=kernel))


def test_one_position_of_a_head_is_edited_alone() -> None:
    edit = Edit("L1H2", Zero(), at={"pos": 4})
    for kernel in ("norms", "alti"):
        found, plain, zeroed = (
            layer_mixing(model().edited(edits), some_tokens(), kernel=kernel).value.sel(layer=1)
            for edits in ([edit], [], [Edit("L1H2", Zero())])
        )
        np.testing.assert_allclose(found.sel(query=4), zeroed.sel(query=4), rtol=1e-12)
        others = [i for i in range(9) if i != 4]
        np.testing.assert_allclose(found.sel(query=others), plain.sel(query=others), rtol=1e-9, atol=1e-12)
        assert not np.allclose(found.sel(query=4), plain.sel(query=4))
    asked = (some_tokens(), ANSWER, WRONG)
    last = token_attribution(model().edited(Edit("L1H2", Zero(), {"pos": -1})), *asked, method="alti_logit")
    agree(last, token_attribution(model().edited(Edit("L1H2", Zero())), *asked, method="alti_logit"))


def test_patterns_and_values_count_as_they_are_edited() -> None:
    n = 9
    back = torch.eye(n, dtype=torch.float64)[[max(i - 1, 0) for i in range(n)]].expand(1, 4, n, n)
    edits = [Edit("blocks.1.attn.hook_pattern", Set(back))]
    for method in ("attention", "values"):
        found = token_attribution(model().edited(edits), some_tokens(), method=method)
        np.testing.assert_allclose(found.value.sel(pos=7), 1.0)
    silent = [Edit("blocks.1.attn.hook_v", Zero(), {"pos": 3})]
    for kernel in ("values", "norms", "alti"):
        found = token_attribution(model().edited(silent), some_tokens(), method=Mixing(kernel, -1))  # type: ignore[arg-type]
        assert (found.value.sel(pos=3) == 0).all() and (found.value.sum("pos") > 0.99).all()
    for each in (edits, silent):
        whole = token_attribution(model().edited(each), some_tokens(), ANSWER, method="alti_logit")
        logits = model().edited(each)(some_tokens())
        assert isinstance(logits, torch.Tensor)
        np.testing.assert_allclose(whole.total, logits[torch.arange(3), -1, torch.tensor(ANSWER)], rtol=1e-9)
        assert whole.attrs["completeness_error"] < 1e-11


VECTOR = torch.arange(24).double()


@over("where", ["L1H2", "L1.attn", "blocks.1.attn.hook_result"])
def test_what_comes_from_no_source_is_refused_by_name(where: str) -> None:
    width = 6 if where == "L1H2" else 24
    edits = [Edit(where, Add(VECTOR[:width]))]
    for kernel in ("attn_norms", "attn_res_norms", "norms", "alti"):
        with pytest.raises(ValueError, match=f"the edits of {where} write comes from no source"):
            layer_mixing(model().edited(edits), some_tokens(), kernel=kernel)  # type: ignore[arg-type]
    layer_mixing(model().edited(edits), some_tokens(), kernel="attention")
    message = "comes from no source" if where == "L1H2" else f"the edit of {where} changes it afterwards"
    with pytest.raises(ValueError, match=message):
        token_attribution(model().edited(edits), some_tokens(), ANSWER, method="alti_logit")
    for method in ("gradient_x_input", IntegratedGradients(steps=3)):
        token_attribution(model().edited(edits), some_tokens(), ANSWER, method=method)


def test_replaced_stream_breaks_the_chain_over_layers_and_nothing_else() -> None:
    put = [Edit("L1.resid", Set(VECTOR), {"pos": 2})]
    for method in ("rollout", "flow", "norm_rollout", "alti", "alti_logit"):
        with pytest.raises(ValueError, match=r"requires a stream .* the edit of L1\.resid puts"):
            token_attribution(model().edited(put), some_tokens(), ANSWER, method=method)
    for method in ("attention", "values", "norms"):
        token_attribution(model().edited(put), some_tokens(), method=method)
    layer_mixing(model().edited(put), some_tokens())
    steered = [Edit("L1.resid", Add(VECTOR))]
    found = token_attribution(model().edited(steered), some_tokens(), method="alti").value
    layers = layer_mixing(model().edited(steered), some_tokens(), kernel="alti").value.values
    np.testing.assert_allclose(found, (layers[:, 1] @ layers[:, 0])[:, -1], rtol=1e-9)
    with pytest.raises(ValueError, match=r"ALTI-Logit requires a stream .* L1\.resid"):
        token_attribution(model().edited(steered), some_tokens(), ANSWER, method="alti_logit")


def test_alti_logit_does_not_move_the_columns_that_edits_name() -> None:
    edits = [Edit("L0H1", Zero(), {"pos": 2})]
    refused = pytest.raises(ValueError, match="away from the positions of the edit of L0H1")
    with refused:
        token_attribution(model().edited(edits), Batch.of(ROWS), ANSWER, method="alti_logit")
    with refused:
        token_attribution(model().edited(edits), some_tokens(), ANSWER, method="alti_logit", pos=5)
    token_attribution(model().edited(edits), some_tokens(), ANSWER, method="alti_logit")
    everywhere = [Edit("L0H1", Zero())]
    found = token_attribution(model().edited(everywhere), Batch.of(ROWS), ANSWER, method="alti_logit")
    agree(found, token_attribution(without("gpt2", "L0H1"), Batch.of(ROWS), ANSWER, method="alti_logit"))


def test_values_that_nobody_looked_up_are_refused() -> None:
    with pytest.raises(ValueError, match="stands for values"):
        token_attribution(model().edited(Edit("L0H1", Resample())), some_tokens())


def test_first_token_with_nearly_all_shares_is_said_with_its_prompts() -> None:
    """Patterns are set to look at the first token alone: each of two blocks moves half of what is left there."""
    rows, first = some_tokens(), torch.zeros(9, 9, dtype=torch.float64)
    first[:, 0] = 1
    sink = [
        Edit(f"blocks.{i}.attn.hook_pattern", lambda x: first.to(x).expand_as(x).clone()) for i in range(2)
    ]
    found = interp.token_attribution(model().edited(sink), rows, method="attention")
    assert float(found.value[:, 0].min()) == 1.0
    n = len(rows)
    (note,) = found.attrs["notes"]
    assert note.startswith(f"in {n} of {n} prompts the first token has more than 0.9 of all shares")
    half = interp.token_attribution(model().edited(sink), rows, method="rollout")
    np.testing.assert_allclose(half.value[:, 0], 0.75)
    assert "notes" not in half.attrs
