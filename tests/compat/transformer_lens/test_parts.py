"""Parts that run by themselves or stand in for others, and text continued token by token."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from interp.compat.transformer_lens.components import (
    MLP,
    Attention,
    CanBeUsedAsMLP,
    GatedMLP,
    GroupedQueryAttention,
    MoE,
    complex_attn_linear,
    simple_attn_linear,
)
from interp.compat.transformer_lens.config import HookedTransformerConfig
from interp.compat.transformer_lens.conversions import BaseTensorConversion
from interp.compat.transformer_lens.factories import ActivationFunctionFactory, MLPFactory
from interp.compat.transformer_lens.hook_points import HookPoint
from tests.compat.transformer_lens.lens_fixture import oracle


@pytest.mark.parametrize("name", ["ln", "llama", "gemma", "neox"])
@torch.no_grad()
def test_parts_run_by_themselves(name: str) -> None:
    model, tokens = oracle(name).model(), oracle(name)["tokens"]
    resid, same, place, mask = model.input_to_embed(tokens)
    assert torch.equal(same, tokens) and place is None and mask is None
    for layer, block in enumerate(model.blocks):
        torch.testing.assert_close(resid, model(tokens, stop_at_layer=layer))
        resid = block(resid)
    _, cache = model.run_with_cache(tokens)
    torch.testing.assert_close(model.unembed(model.ln_final(resid)), cache["unembed.hook_out"])
    normed = model.blocks[0].ln1(cache["blocks.0.hook_resid_pre"])
    attn = model.blocks[0].attn(normed, normed, normed)
    if name != "gemma":
        torch.testing.assert_close(attn, cache["blocks.0.hook_attn_out"])
        read = cache["blocks.0.hook_resid_pre" if name == "neox" else "blocks.0.hook_resid_mid"]
        torch.testing.assert_close(
            model.blocks[0].mlp(model.blocks[0].ln2(read)), cache["blocks.0.hook_mlp_out"]
        )


def test_gated_mlp_alone_is_the_formula_whatever_the_config_says() -> None:
    cfg = HookedTransformerConfig.from_dict({**SHAPE, "act_fn": "silu", "dtype": torch.float64})
    mlp, x = GatedMLP(cfg), torch.randn(2, 3, 8, dtype=torch.float64)
    for weight in mlp.parameters():
        nn.init.normal_(weight)
    post = nn.functional.silu(x @ mlp.W_gate) * (x @ mlp.W_in) + mlp.b_in
    torch.testing.assert_close(mlp(x), post @ mlp.W_out + mlp.b_out)
    mlp(x).sum().backward()
    assert all(weight.grad is not None for weight in mlp.parameters())


def test_grouped_attention_alone_is_whole_attention_with_repeated_weights() -> None:
    fields = {**SHAPE, "n_key_value_heads": 1, "dtype": torch.float64, "positional_embedding_type": "rotary"}
    cfg = HookedTransformerConfig.from_dict(fields)
    grouped, whole = GroupedQueryAttention(cfg), Attention(cfg)
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    for weight in grouped.parameters():
        nn.init.normal_(weight)
    state = {name.lstrip("_"): getattr(grouped, name.lstrip("_")) for name, _ in grouped.named_parameters()}
    whole.load_state_dict(state, strict=False)
    torch.testing.assert_close(whole(x, x, x), grouped(x, x, x))
    each = x[:, :, None].expand(-1, -1, 2, -1)
    torch.testing.assert_close(whole(each, x, each), grouped(x, x, x))
    for linear, given in ((simple_attn_linear, x), (complex_attn_linear, each)):
        want = torch.einsum("bpd,hde->bphe", x, whole.W_Q) + whole.b_Q
        torch.testing.assert_close(linear(given, whole.W_Q, whole.b_Q), want)


def test_hooks_of_torch_on_a_part_are_called() -> None:
    model, tokens, seen = oracle("ln").model(), oracle("ln")["tokens"], []
    plain = model(tokens)
    handle = model.blocks[0].mlp.register_forward_hook(lambda module, args, out: seen.append(out) or out * 0)
    assert not torch.allclose(model(tokens), plain) and len(seen) == 1
    handle.remove()
    assert torch.equal(model(tokens), plain)


def test_hooks_on_a_part_that_no_pass_calls_are_refused() -> None:
    model = oracle("none").fresh(use_normalization_before_and_after=True)
    tokens = oracle("none")["tokens"]
    handle = model.blocks[1].ln1_post.register_forward_hook(lambda module, args, out: out * 0)
    with pytest.raises(ValueError, match=r"blocks\.1\.ln1_post was replaced or has hooks, and no pass"):
        model(tokens)
    handle.remove()
    assert model(tokens).isfinite().all()


class Wrapped(nn.Module):
    """Another module around an MLP, with a hook point of its own."""

    def __init__(self, old: nn.Module) -> None:
        super().__init__()
        self.old, self.hook_out = old, HookPoint()

    def forward(self, x: Tensor) -> Tensor:
        return self.hook_out(self.old(x))


def test_a_replaced_part_is_run_and_its_points_are_known() -> None:
    model, tokens = oracle("ln").model(), oracle("ln")["tokens"]
    plain = model(tokens)
    model.blocks[1].mlp = Wrapped(model.blocks[1].mlp)
    model.setup()
    torch.testing.assert_close(model(tokens), plain)
    _, cache = model.run_with_cache(tokens)
    torch.testing.assert_close(cache["blocks.1.mlp.hook_out"], cache["blocks.1.hook_mlp_out"])
    assert "blocks.1.mlp.old.hook_pre" in cache
    out = model.run_with_hooks(tokens, fwd_hooks=[("blocks.1.mlp.hook_out", lambda t, hook: t * 0)])
    assert not torch.allclose(out, plain)


class Splice(nn.Module):
    """What stands at a hook point's place, as a sparse autoencoder does."""

    def __init__(self) -> None:
        super().__init__()
        self.hook_inner = HookPoint()

    def forward(self, x: Tensor) -> Tensor:
        return self.hook_inner(x * 0.5)


def test_module_in_place_of_a_hook_point_is_called_by_the_native_model() -> None:
    model, tokens = oracle("ln").model(), oracle("ln")["tokens"]
    halved = model.run_with_hooks(tokens, fwd_hooks=[("blocks.0.hook_resid_post", lambda t, hook: t * 0.5)])
    model.blocks[0].hook_resid_post = Splice()
    model.setup()
    assert model.engine.active() is not None
    assert torch.equal(model(tokens), halved)
    _, cache = model.run_with_cache(tokens)
    torch.testing.assert_close(cache["blocks.0.hook_resid_post.hook_inner"], cache["blocks.1.hook_resid_pre"])


# generation


@pytest.mark.parametrize("name", ["llama", "solu", "shortformer"])
def test_greedy_generation_is_the_argmax_of_each_pass(name: str) -> None:
    model, tokens = oracle(name).model(), oracle(name)["tokens"][:, :3]
    want = tokens
    for _ in range(4):
        want = torch.cat((want, model(want)[:, -1:].argmax(-1)), 1)
    options: dict[str, Any] = {
        "max_new_tokens": 4,
        "do_sample": False,
        "stop_at_eos": False,
        "verbose": False,
    }
    for cached in (True, False):
        assert torch.equal(model.generate(tokens, use_past_kv_cache=cached, **options), want)
    pieces = list(model.generate_stream(tokens, max_tokens_per_yield=2, **options))
    assert torch.equal(torch.cat(pieces, 1), want) and pieces[0].shape[1] == 4
    vectors = model.generate(model.embed(tokens), return_type="tokens", **options)
    assert torch.equal(vectors, want[:, 3:])
    out = model.generate(tokens, output_logits=True, **options)
    assert torch.equal(out.sequences, want) and len(out.logits) == 4


def test_generation_stops_at_eos_and_applies_hooks() -> None:
    model, tokens = oracle("ln").model(), oracle("ln")["tokens"][:, :3]

    def say(two: int) -> Callable[..., Tensor]:
        return lambda logits, hook: (
            torch.nn.functional.one_hot(torch.tensor(two), 7).expand_as(logits) * 1e3 + logits
        )

    with model.hooks(fwd_hooks=[("unembed.hook_out", say(2))]):
        out = model.generate(tokens, max_new_tokens=3, eos_token_id=2)
        assert out.tolist() == [[*row, 2] for row in tokens.tolist()]
        assert model.generate(tokens, max_new_tokens=3, stop_at_eos=False)[:, 3:].tolist() == [[2] * 3] * 2
    with pytest.raises(AssertionError, match="eos_token_id"):
        model.generate(tokens, max_new_tokens=1)
    with pytest.raises(AssertionError, match="return_type must be one of"):
        model.generate(tokens, max_new_tokens=1, return_type="words")
    with pytest.raises(TypeError, match="num_beams"):
        model.generate(tokens, max_new_tokens=1, num_beams=2)


def test_sampling_follows_the_seed_and_penalties_change_it() -> None:
    model, tokens = oracle("ln").model(), oracle("ln")["tokens"][:, :3]
    drawn = []
    for options in ({}, {}, {"top_k": 1}, {"temperature": 0.0}, {"freq_penalty": 1e6, "top_k": 1}):
        torch.manual_seed(0)
        drawn.append(model.generate(tokens, max_new_tokens=4, stop_at_eos=False, **options))
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[2], drawn[3])
    assert all(len(set(row.tolist()) - {5}) >= 6 or len(set(row.tolist())) >= 6 for row in drawn[4])


SHAPE = {"d_model": 8, "d_head": 4, "n_layers": 1, "n_ctx": 4, "act_fn": "solu_ln"}


@pytest.mark.parametrize(
    ("fields", "kind"),
    [({}, MLP), ({"gated_mlp": True}, GatedMLP), ({"num_experts": 2, "experts_per_token": 1}, MoE)],
)
def test_factories_make_what_the_config_asks_for(fields: dict[str, Any], kind: type) -> None:
    made = MLPFactory.create_mlp(HookedTransformerConfig.from_dict({**SHAPE, **fields}))
    assert type(made) is kind and isinstance(made, CanBeUsedAsMLP)


def test_an_activation_function_is_found_by_its_name() -> None:
    cfg = HookedTransformerConfig.from_dict({**SHAPE, "act_fn": "relu"})
    assert ActivationFunctionFactory.pick_activation_function(cfg) is torch.nn.functional.relu
    for name, message in (("rleu", "Invalid activation function name: rleu"), (None, "act_fn not set")):
        cfg.act_fn = name
        with pytest.raises(ValueError, match=message):
            ActivationFunctionFactory.pick_activation_function(cfg)


def test_an_mlp_of_ones_own_gets_the_activation_and_its_norm() -> None:
    mlp = CanBeUsedAsMLP(HookedTransformerConfig.from_dict(SHAPE))
    mlp.select_activation_function()
    assert isinstance(mlp.hook_mid, HookPoint) and tuple(mlp.ln.w.shape) == (32,)


def test_alibi_punishes_distance_by_head() -> None:
    bias = Attention.create_alibi_bias(2, 3)
    for head, slope in enumerate((2.0**-4, 2.0**-8)):
        for q in range(3):
            for k in range(3):
                assert float(bias[head, q, k]) == slope * min(k - q, 0)


def test_a_conversion_shows_hooks_another_shape() -> None:
    class Flat(BaseTensorConversion):
        def handle_conversion(self, input_value: Tensor, *full_context: Any) -> Tensor:
            return input_value.flatten(1)

        def revert(self, input_value: Tensor, *full_context: Any) -> Tensor:
            return input_value.unflatten(1, (2, 3))

    point, seen = HookPoint(), []
    point.enable_reshape(Flat(output_filter=lambda x: x * 2))
    point.add_hook(lambda x, hook: seen.append(x.shape) or x)
    x = torch.arange(6.0).view(1, 2, 3)
    assert torch.equal(point(x), 2 * x) and seen == [(1, 6)]
    with pytest.raises(NotImplementedError, match="handle_conversion"):
        BaseTensorConversion().convert(x)


def test_the_old_place_of_the_root_module_says_the_new_one() -> None:
    from interp.compat.transformer_lens import HookedRootModule, hook_points

    with pytest.warns(DeprecationWarning, match=r"transformer_lens\.HookedRootModule"):
        assert hook_points.HookedRootModule is HookedRootModule
    with pytest.raises(AttributeError, match="no attribute 'HookedRoot'"):
        hook_points.HookedRoot  # noqa: B018
