"""One signature, many methods: what rows sum to, which position is asked about, and what is refused."""

import numpy as np
import pytest
import torch

import interp
from interp import Batch, HookedTransformer
from interp.tokens.mixing import rollout, with_residual
from interp.tokens.token_attribution import (
    METHODS,
    AltiLogit,
    GradientTimesInput,
    IntegratedGradients,
    Method,
    Mixed,
    columns,
    layer_mixing,
    token_attribution,
)
from tests.configs import CONFIGS, build, some_tokens
from tests.loops import over
from tests.tiny import hooked
from tests.tolerances import assert_close

SHARES = tuple(name for name, how in METHODS.items() if isinstance(how, Mixed))
ROWS = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9], [7, 9, 2]]
ANSWER, WRONG = [3, 14, 7], [5, 1, 30]
FEW_STEPS: dict[str, Method] = {**METHODS, "integrated_gradients": IntegratedGradients(steps=3)}


def model(name: str = "gpt2") -> HookedTransformer:
    return HookedTransformer(build(name))


@pytest.mark.parametrize("name", CONFIGS)
def test_shares_are_positive_and_sum_to_one_for_every_position(name: str) -> None:
    for method in SHARES:
        for pos in (3,) if method == "flow" else (-1, 3):
            score = token_attribution(model(name), some_tokens(), method=method, pos=pos).score.values
            if method == "attention" and CONFIGS[name].sinks:
                assert (score.sum(1) < 1).all()
            else:
                np.testing.assert_allclose(score.sum(1), 1, rtol=1e-9)
            assert (score >= 0).all()
            assert (
                not CONFIGS[name].causal or (score[:, columns(Batch(some_tokens()), pos)[0] + 1 :] == 0).all()
            )


@over("method", METHODS)
@over("side", ["left", "right"])
def test_padding_and_batches_change_no_number(method: str, side: str) -> None:
    padded, how = Batch.of(ROWS, side=side), FEW_STEPS[method]  # type: ignore[arg-type]
    for batch_size in (1, 32):
        result = token_attribution(model(), padded, ANSWER, WRONG, method=how, batch_size=batch_size)
        for i, row in enumerate(ROWS):
            alone = token_attribution(model(), torch.tensor(row), ANSWER[i], WRONG[i], method=how)
            real = padded.keep[i].numpy()  # type: ignore[index]
            np.testing.assert_allclose(
                result.score.values[i, real], alone.score.values[0], rtol=1e-9, atol=1e-9
            )
            assert np.isnan(result.score.values[i, ~real]).all()


@over("method", METHODS)
@pytest.mark.parametrize("name", ["gpt2", "gemma2", "post-norm"])
def test_a_position_of_a_causal_model_is_the_end_of_the_prompt_cut_there(name: str, method: str) -> None:
    tokens = some_tokens()
    for pos, cut in ((0, 1), (-3, 7)):
        whole = token_attribution(model(name), tokens, ANSWER, WRONG, method=FEW_STEPS[method], pos=pos)
        short = token_attribution(model(name), tokens[:, :cut], ANSWER, WRONG, method=FEW_STEPS[method])
        np.testing.assert_allclose(whole.score.values[:, :cut], short.score.values, rtol=1e-9, atol=1e-9)
        assert (whole.score.values[:, cut:] == 0).all()


@pytest.mark.parametrize("name", ["llama-gqa", "parallel", "bidirectional"])
def test_a_layer_and_a_rollout_are_those_of_the_recorded_patterns(name: str) -> None:
    cache = model(name).run_with_cache(some_tokens())[1]
    patterns = [cache[f"blocks.{i}.attn.hook_pattern"].mean(1) for i in range(2)]
    for layer in (0, 1, -1):
        found = token_attribution(model(name), some_tokens(), method=Mixed("attention", layer))
        assert_close(torch.tensor(found.score.values), patterns[layer][:, -1])
    found = token_attribution(model(name), some_tokens(), method="rollout")
    rolled = rollout([with_residual(pattern) for pattern in patterns])
    assert_close(torch.tensor(found.score.values), rolled[:, -1])


@pytest.mark.parametrize("kernel", ["attn_res_norms", "norms", "alti"])
def test_chained_kernels_are_the_product_of_the_layers(kernel: str) -> None:
    layers = layer_mixing(model("post-norm"), some_tokens(), kernel=kernel).contribution.values  # type: ignore[arg-type]
    found = token_attribution(model("post-norm"), some_tokens(), method=Mixed(kernel))  # type: ignore[arg-type]
    np.testing.assert_allclose(found.score, (layers[:, 1] @ layers[:, 0])[:, -1], rtol=1e-9)


def test_the_mixing_of_layers_leaves_padding_out() -> None:
    result = layer_mixing(model(), Batch.of(ROWS), kernel="norms")
    assert dict(result.sizes) == {"prompt": 3, "layer": 2, "query": 8, "key": 8}
    for i, row in enumerate(ROWS):
        alone, n = layer_mixing(model(), torch.tensor(row), kernel="norms"), len(row)
        found = result.isel(prompt=i)
        np.testing.assert_allclose(found.contribution[:, :n, :n], alone.contribution[0], rtol=1e-9)
        np.testing.assert_allclose(found.mixing_ratio[:, :n], alone.mixing_ratio[0], rtol=1e-9)
        assert found.contribution[:, n:].isnull().all() and found.contribution[:, :, n:].isnull().all()
        assert found.mixing_ratio[:, n:].isnull().all()


def test_results_name_their_tokens_and_say_what_they_sum_to() -> None:
    prompt = "The capital of France is"
    result = token_attribution(hooked(), prompt)
    assert "".join(result.token.values[0]) == "<|endoftext|>" + prompt
    said = {"unit": "share", "sums_to": "1", "method": "alti", "position": -1}
    assert result.attrs == {"interp_analysis": "token_attribution", **said}
    complete = token_attribution(hooked(), prompt, 5, method="integrated_gradients")
    assert "total" in complete and "error" in complete and "total" in complete.attrs["sums_to"]
    assert complete.attrs["completeness_error"] == float(complete.error.max())
    sink = token_attribution(model("gpt-oss"), some_tokens(), method="attention")
    assert sink.attrs["sums_to"] == "1, less what the sink takes"


def test_methods_about_an_answer_require_one_and_the_others_ignore_it() -> None:
    for method, how in METHODS.items():
        if isinstance(how, Mixed):
            one, other = (token_attribution(model(), some_tokens(), a, method=method) for a in (None, 3))
            assert one.identical(other)
        else:
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
        Mixed("values")
    with pytest.raises(IndexError, match="layers are -2 to 1, got 2"):
        token_attribution(model(), some_tokens(), method=Mixed("attention", 2))
    with pytest.raises(IndexError, match="pos 3 requires prompts of at least 4 tokens, got 3"):
        token_attribution(model(), Batch.of(ROWS), pos=3)
    with pytest.raises(IndexError, match="pos -4 requires prompts of at least 4 tokens, got 3"):
        token_attribution(model(), Batch.of(ROWS), pos=-4)
    with pytest.raises(ValueError, match="ALTI-Logit requires the last position in a bidirectional model"):
        token_attribution(model("bidirectional"), some_tokens(), 3, method="alti_logit", pos=2)
    with pytest.raises(ValueError, match="one text per row"):
        token_attribution(model(), Batch.packed([[1, 2], [3]], 4))
    long = HookedTransformer(interp.Transformer(interp.ModelConfig(1, 8, 2, 70, 5)))
    with pytest.raises(ValueError, match="attention flow requires at most 64 tokens, got 70"):
        token_attribution(long, torch.zeros(1, 70, dtype=torch.long), method="flow")


def test_a_decoder_that_attends_to_a_memory_is_refused() -> None:
    config = interp.ModelConfig(1, 8, 2, 8, 5, cross_attention=True)
    decoder = HookedTransformer(interp.Transformer(config))
    for method in METHODS:
        with pytest.raises(ValueError, match="also attends to the memory of an encoder"):
            token_attribution(decoder, torch.tensor([1, 2]), 3, method=method)


def test_the_columns_of_positions_count_kept_tokens() -> None:
    for side, expected in (("left", [[7, 7, 7], [4, 1, 6]]), ("right", [[4, 7, 2], [1, 1, 1]])):
        batch = Batch.of(ROWS, side=side)  # type: ignore[arg-type]
        assert [columns(batch, pos).tolist() for pos in (-1, 1)] == expected


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_are_taken_in_every_model_of_the_table(name: str) -> None:
    for method in (GradientTimesInput(), IntegratedGradients(steps=2)):
        found = token_attribution(model(name), some_tokens(2, 5), 3, 5, method=method).score.values
        assert np.isfinite(found).all() and found.any(1).all()
