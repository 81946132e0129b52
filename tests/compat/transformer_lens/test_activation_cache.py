"""ActivationCache: every answer of TransformerLens 3.9, sums, projections against the slow way, and what is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compat.oracle.make_activation_cache import (
    MODELS,
    PLAIN,
    STACKED,
    STACKS,
    Call,
    ask,
    filled,
    inputs,
    name_of,
)
from tests.compat.transformer_lens.cache_oracle import cache_of, oracle, stand_in
from tests.loops import over


def same(got: dict[str, Any], expected: dict[str, Any]) -> None:
    if (
        expected.get("error") == "AttributeError"
    ):  # no MLP, noticed at the module; we notice at the activation
        expected = {"error": "KeyError"}
    assert got.get("error") == expected.get("error")
    if "error" not in expected:
        torch.testing.assert_close(got["value"], expected["value"], rtol=1e-10, atol=1e-10)
        assert got["labels"] == expected["labels"]


def theirs_fails(name: str, call: Call) -> bool:
    """Where TransformerLens raises and we answer: all parts without an MLP, and a norm that is not there, projected."""
    method, given = call
    projected = given.get("apply_ln") and "project_output_onto" in given
    without_mlp = name == "attention-only" and method.startswith("get_full") and "mlp_input" not in given
    return without_mlp or (name == "no-norm" and bool(projected))


@over("call", STACKS)
@pytest.mark.parametrize("name", MODELS)
def test_stacks_and_labels_are_those_of_transformer_lens(name: str, call: Call) -> None:
    expected = oracle()[name]["answers"][name_of(call)]
    got = ask(cache_of(name), call, return_labels=True)
    if "error" in expected and theirs_fails(name, call):
        assert "error" not in got
    else:
        same(got, expected)


@over("call", STACKS)
def test_without_a_batch_dimension_stacks_are_those_of_transformer_lens(call: Call) -> None:
    row = cache_of("layer-norm").apply_slice_to_batch_dim(1)
    assert not row.has_batch_dim
    same(ask(row, call, return_labels=True), oracle()["layer-norm"]["row"][name_of(call)])


@over("call", PLAIN)
@pytest.mark.parametrize("name", MODELS)
def test_activations_and_neurons_are_those_of_transformer_lens(name: str, call: Call) -> None:
    same(ask(cache_of(name), call), oracle()[name]["answers"][name_of(call)])


@over("first, then", STACKED)
@pytest.mark.parametrize("name", [*MODELS, "layer-norm, one row"])
def test_norms_and_logits_of_stacks_are_those_of_transformer_lens(name: str, first: Call, then: Call) -> None:
    model, _, one_row = name.partition(", ")
    cache = cache_of(model)
    if one_row:
        cache = cache.apply_slice_to_batch_dim(1)
    expected = oracle()[model]["row" if one_row else "answers"][name_of(first, then)]
    same(ask(cache, then, ask(cache, first)["value"]), expected)


def test_the_stand_in_has_the_biases_of_transformer_lens() -> None:
    model = stand_in("layer-norm")
    expected = oracle()["layer-norm"]["bias"]
    torch.testing.assert_close(model.accumulated_bias(1), expected[0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(model.accumulated_bias(1, mlp_input=True), expected[1], rtol=1e-10, atol=1e-10)


@over("expand", [True, False])
@over("layer, mlp_input", [(0, False), (0, True), (1, False), (1, True), (None, False)])
@pytest.mark.parametrize("name", MODELS)
def test_parts_sum_to_the_residual_stream(
    name: str, layer: int | None, mlp_input: bool, expand: bool
) -> None:
    cache = cache_of(name)
    key = ("resid_mid", layer) if mlp_input else ("resid_post", 1) if layer is None else ("resid_pre", layer)
    if mlp_input and name in {"parallel", "attention-only"}:
        expected = cache["resid_pre", layer] + cache["attn_out", layer]
    else:
        expected = cache[key]
    stack, labels = cache.get_full_resid_decomposition(layer, mlp_input, expand, return_labels=True)
    assert len(labels) == len(stack) == len(set(labels))
    torch.testing.assert_close(stack.sum(0), expected, rtol=1e-10, atol=1e-10)
    if not mlp_input or expand:
        parts = cache.decompose_resid(layer, mlp_input).sum(0)
        torch.testing.assert_close(parts, expected, rtol=1e-10, atol=1e-10)


@over("expand", [True, False])
@over("layer, mlp_input", [(1, False), (1, True), (None, False)])
@pytest.mark.parametrize("name", MODELS)
def test_a_projection_is_the_projected_stack(
    name: str, layer: int | None, mlp_input: bool, expand: bool
) -> None:
    if name == "attention-only" and mlp_input:
        return  # no ln2
    cache, two = cache_of(name), inputs()["two"]
    given = {
        "layer": layer,
        "mlp_input": mlp_input,
        "expand_neurons": expand,
        "apply_ln": True,
        "pos_slice": (1, 4),
    }
    whole = cache.get_full_resid_decomposition(**given)
    read = cache.get_full_resid_decomposition(**given, project_output_onto=two)
    torch.testing.assert_close(read, whole @ two, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        cache.get_full_resid_decomposition(**given, project_output_onto=two[:, 0]), read[..., 0]
    )


def test_with_a_projection_nothing_of_neurons_times_model_size_is_formed() -> None:
    sizes = []

    class Sizes(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                sizes.append(out.numel())
            return out

    cache = cache_of("layer-norm")
    with Sizes():
        stack = cache.get_full_resid_decomposition(apply_ln=True, project_output_onto=inputs()["one"])
    assert max(sizes) <= stack.numel() < 2 * 4 * 4 * 6  # batch x position x neurons x d_model


@pytest.mark.parametrize("name", MODELS)
def test_head_results_are_those_of_a_loop(name: str) -> None:
    cache = cache_of(name)
    for at in range(2):
        cache.cache_dict.pop(f"blocks.{at}.attn.hook_result", None)
    stack = cache.stack_head_results()
    assert "blocks.0.attn.hook_result" not in cache.cache_dict
    assert cache.compute_head_results() is None
    heads = MODELS[name]["n_heads"]
    for at in range(2):
        for head in range(heads):
            expected = cache["z", at][:, :, head] @ cache.model.blocks[at].attn.W_O[head]
            torch.testing.assert_close(cache["result", at][:, :, head], expected)
            torch.testing.assert_close(stack[at * heads + head], expected)


def test_cached_head_results_are_used_and_never_aliased(caplog: pytest.LogCaptureFixture) -> None:
    cache = cache_of("layer-norm")
    edited = cache["result", 0].clone().zero_()
    cache.cache_dict["blocks.0.attn.hook_result"] = edited
    stack = cache.stack_head_results(1)
    assert not stack.any()
    stack += 1
    assert not cache["result", 0].any()
    cache.compute_head_results()
    assert "already cached" in caplog.text and not cache["result", 0].any()


def test_stale_head_results_without_a_head_dimension_are_replaced() -> None:
    cache = cache_of("layer-norm")
    right = cache["result", 1]
    cache.cache_dict["blocks.1.attn.hook_result"] = cache["attn_out", 1]
    cache.compute_head_results()
    torch.testing.assert_close(cache["result", 1], right)


def test_remainder_before_the_first_layer_is_the_final_stream() -> None:
    cache = cache_of("layer-norm")
    for stack, labels in (
        cache.stack_head_results(0, incl_remainder=True, return_labels=True),
        cache.stack_neuron_results(0, incl_remainder=True, return_labels=True),
    ):
        assert labels == ["remainder"]
        assert torch.equal(stack[0], cache["resid_post", -1])


def test_one_neuron_as_a_number_is_a_stack_of_one_per_layer() -> None:
    cache = cache_of("layer-norm")
    stack, labels = cache.stack_neuron_results(2, neuron_slice=3, return_labels=True)
    assert labels == ["L0N3", "L1N3"]
    torch.testing.assert_close(stack[1], cache.get_neuron_results(1, 3))


@pytest.mark.parametrize("name", ["layer-norm", "folded"])
def test_gradients_reach_the_weights_and_the_directions(name: str) -> None:
    cache, direction = cache_of(name), inputs()["one"].requires_grad_()
    w_out = cache.model.blocks[0].mlp.W_out = cache.model.blocks[0].mlp.W_out.clone().requires_grad_()
    read = cache.get_full_resid_decomposition(apply_ln=True, project_output_onto=direction)
    whole = cache.get_full_resid_decomposition(apply_ln=True) @ direction
    for got, expected in zip(
        torch.autograd.grad(read.pow(2).sum(), (w_out, direction)),
        torch.autograd.grad(whole.pow(2).sum(), (w_out, direction)),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def test_folded_attributions_sum_to_the_logit() -> None:
    cache = cache_of("folded")
    attributions = cache.logit_attrs(cache.get_full_resid_decomposition(), 4).sum(0)
    logit = cache["ln_final.hook_normalized"] @ cache.model.W_U[:, 4]
    torch.testing.assert_close(attributions, logit, rtol=1e-10, atol=1e-10)


def test_half_precision_is_read_in_the_float32_of_its_scale() -> None:
    wide, half = cache_of("folded"), cache_of("folded")
    for cache, dtype in ((wide, torch.float64), (half, torch.bfloat16)):
        for name, value in cache.items():
            rounded = value.bfloat16()
            cache.cache_dict[name] = value.float() if name.endswith("scale") else rounded.to(dtype)
        for block in cache.model.blocks:
            block.attn.W_O, block.mlp.W_out = (
                w.bfloat16().to(dtype) for w in (block.attn.W_O, block.mlp.W_out)
            )
        cache.model.W_U = cache.model.W_U.bfloat16().to(dtype)
    for given in ({}, {"project_output_onto": inputs()["two"].float()}):
        got = half.get_full_resid_decomposition(apply_ln=True, **given)
        given = {key: value.double() for key, value in given.items()}
        expected = wide.get_full_resid_decomposition(apply_ln=True, **given)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got[:-1].double(), expected[:-1], rtol=1e-5, atol=1e-5)
    stack = half.decompose_resid()
    torch.testing.assert_close(
        half.logit_attrs(stack, 3).double(), wide.logit_attrs(stack.double(), 3), rtol=1e-5, atol=1e-5
    )


def test_what_cannot_be_answered_is_refused() -> None:
    cache = cache_of("layer-norm")
    with pytest.raises(AttributeError, match="state-space layers, which our models do not have"):
        cache.compute_ssm_state()
    assert not hasattr(cache, "logit_lense")
    with pytest.raises(ValueError, match=r"layer must be in \[0, 2\], -1 or None, got -2"):
        cache.accumulated_resid(-2)
    with pytest.raises(KeyError, match=r"blocks\.3\.hook_resid_pre"):
        cache.accumulated_resid(3)
    with pytest.raises(Exception, match=r"mode"):
        cache.decompose_resid(mode="heads")
    with pytest.raises(ValueError, match="same shape"):
        cache.logit_attrs(
            cache.decompose_resid(), **filled({"tokens": "row", "incorrect_tokens": "each"}, inputs())
        )
    del cache.cache_dict["ln_final.hook_scale"]
    with pytest.raises(KeyError, match=r"LN scale not found at 'ln_final\.hook_scale'"):
        cache.decompose_resid(apply_ln=True)


def test_tokens_as_strings_are_left_to_the_model() -> None:
    cache, seen = cache_of("layer-norm"), []
    directions = cache.model.tokens_to_residual_directions
    cache.model.tokens_to_residual_directions = lambda token: (seen.append(token), directions(int(token)))[1]
    stack = cache.decompose_resid()
    got = cache.logit_attrs(stack, "3", "1")
    assert seen == ["3", "1"]
    torch.testing.assert_close(got, cache.logit_attrs(stack, 3) - cache.logit_attrs(stack, 1))
