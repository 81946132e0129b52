"""`HookedTransformer` against TransformerLens 3.9: logits, hooks, gradients; its modules against its native model."""

import pytest
import torch
from torch import Tensor

from interp.compat.transformer_lens.cache import TransformerLensKeyValueCache
from interp.compat.transformer_lens.hook_points import HookPoint
from interp.compat.transformer_lens.hooked_transformer import HookedTransformer, Output
from tests.compat.transformer_lens.lens_fixture import CASES, Oracle, oracle
from tests.loops import over

HARMLESS = HookPoint.forward


@pytest.fixture(params=CASES)
def theirs(request: pytest.FixtureRequest) -> Oracle:
    return oracle(request.param)


def equal(ours: Tensor, theirs: Tensor, what: str, close: dict[str, float]) -> None:
    torch.testing.assert_close(ours.detach().to(theirs.dtype), theirs, **close, msg=lambda m: f"{what}: {m}")


def by_modules(model: HookedTransformer) -> HookedTransformer:
    """The same model, its passes run module by module: each is called in the place of the native model's part."""
    called = []
    for name, module in model.named_modules():
        if name and not isinstance(module, HookPoint | torch.nn.ModuleList):
            module.register_forward_hook(lambda module, args, output: called.append(module))
    assert model.engine.active() is None
    with torch.no_grad():
        model(torch.zeros(1, 2, dtype=torch.long))
    assert {type(module) for module in called} >= {type(model.blocks[0]), type(model.blocks[0].attn)}
    return model


@pytest.mark.parametrize("path", ["native", "modules"])
@torch.no_grad()
def test_passes_equal_theirs(theirs: Oracle, path: str) -> None:
    model = theirs.shared if path == "native" else by_modules(theirs.model())
    tokens, mask = theirs["tokens"], theirs["mask"]
    for what, got in {
        "logits": model(tokens),
        "masked": model(tokens, attention_mask=mask),
        "masked_loss": model(tokens, return_type="loss", attention_mask=mask),
        "per_token": model(tokens, return_type="loss", loss_per_token=True),
        "late": model(theirs["middle"], start_at_layer=1),
    }.items():
        equal(got, theirs[what], what, theirs.close)


@torch.no_grad()
def test_a_cache_continues_a_padded_prompt_as_theirs(theirs: Oracle) -> None:
    model, tokens, mask = theirs.shared, theirs["tokens"], theirs["mask"]
    if model.cfg.ungroup_grouped_query_attention:
        pytest.skip("their cache cannot")
    past = TransformerLensKeyValueCache.init_cache(model.cfg, "cpu", len(tokens))
    model(tokens[:, :3], past_kv_cache=past, attention_mask=mask[:, :3])
    later = model(tokens[:, 3:], past_kv_cache=past, attention_mask=mask[:, 3:])
    equal(later, theirs["later"], "later", theirs.close)


@pytest.mark.parametrize("path", ["native", "modules"])
def test_every_hook_holds_what_theirs_holds(theirs: Oracle, path: str) -> None:
    model = theirs.shared if path == "native" else by_modules(theirs.model())
    _, cache = model.run_with_cache(theirs["tokens"], return_type="loss", return_cache_object=False)
    found, order = theirs.group("cache"), [n for n in theirs.said["order"] if not n.endswith("_grad")]
    assert list(cache) == order
    for name, value in cache.items():
        assert value.shape == found[name].shape, name
        equal(value, found[name], name, theirs.close)


def test_gradients_of_parameters_and_activations_equal_theirs(theirs: Oracle) -> None:
    """Without split inputs they norm one input three times and keep ln1's gradient by queries; ours is the whole."""
    model = theirs.shared
    model.zero_grad()
    _, cache = model.run_with_cache(theirs["tokens"], return_type="loss", incl_bwd=True)
    split = model.cfg.use_split_qkv_input or model.cfg.use_attn_in
    wanted = {n: g for n, g in theirs.group("cache").items() if n.endswith("_grad")}
    wanted = {n: g for n, g in wanted.items() if split or ".ln1.hook" not in n}
    for name, grad in wanted.items():
        equal(cache[name], grad, name, theirs.close)
    grads = theirs.group("grads")
    for name, p in model.named_parameters():
        assert (p.grad is None) == (name not in grads), name
        if p.grad is not None:
            equal(p.grad, grads[name], name, theirs.close)


def test_names_and_sizes_equal_theirs(theirs: Oracle) -> None:
    model = theirs.shared
    assert list(model.hook_dict) == theirs.said["hooks"]
    assert list(model.mod_dict) == theirs.said["modules"]
    assert list(model.state_dict()) == theirs.said["keys"]
    assert model.cfg.n_params == theirs.said["n_params"]
    assert float(model.cfg.attn_scale) == pytest.approx(theirs.said["scale"])


def test_equal_seeds_give_equal_weights(theirs: Oracle) -> None:
    weights = dict(theirs.fresh().named_parameters())
    for name, weight in theirs.group("first").items():
        equal(weights[name], weight, name, theirs.close)


# hooks


@over("edited", ["ln1.hook_normalized", "ln1.hook_scale"])
@pytest.mark.parametrize("path", ["native", "modules"])
@pytest.mark.parametrize("flag", ["use_split_qkv_input", "use_attn_in"])
def test_norms_of_split_inputs_are_of_their_own(flag: str, path: str, edited: str) -> None:
    """Each is called for queries, keys and values in turn; an edit of the keys' alone is one of `hook_k` too."""
    model = oracle("ln").model(**{flag: True})
    model = model if path == "native" else by_modules(model)
    tokens, seen, keys = oracle("ln")["tokens"], [], []

    def second(value: Tensor, hook: HookPoint) -> Tensor:
        seen.append(value.shape)
        return value * 2 if len(seen) == 2 else value

    def kept(value: Tensor, hook: HookPoint) -> None:
        keys.append(value)

    point, key = f"blocks.1.{edited}", "blocks.1.attn.hook_k"
    got = model.run_with_hooks(tokens, fwd_hooks=[(point, second), (key, kept)])
    assert seen == [(*tokens.shape, 2, 4 if edited.endswith("normalized") else 1)] * 3
    wanted = model.run_with_hooks(tokens, fwd_hooks=[(key, lambda value, hook: keys[0])])
    torch.testing.assert_close(got, wanted)
    assert not torch.allclose(got, model(tokens))


def scaled(tensor: Tensor, hook: HookPoint) -> Tensor:
    """An edit that no norm undoes; what the mask hides stays hidden."""
    hidden = tensor.isinf()
    new = tensor.masked_fill(hidden, 0) * torch.linspace(0.5, 1.5, tensor.shape[-1], dtype=tensor.dtype)
    return new.masked_fill(hidden, -torch.inf)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["neox", "gemma"])
@torch.no_grad()
def test_edit_at_any_point_does_the_same_in_native_model_and_modules(name: str) -> None:
    native, modules = oracle(name).model(), by_modules(oracle(name).model())
    plain, tokens = native(oracle(name)["tokens"]), oracle(name)["tokens"]
    for point in native.hook_dict:
        if point.startswith("blocks.0") or ("attn_in" in point and native.cfg.n_key_value_heads is not None):
            continue
        got, wanted = (m.run_with_hooks(tokens, fwd_hooks=[(point, scaled)]) for m in (native, modules))
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9, msg=lambda m, p=point: f"{p}: {m}")
        if not (name == "bloom" and "pos_embed" in point):
            assert not torch.allclose(got, plain), point
    assert not native.list_hooks()


def test_no_hook_point_is_silent_without_its_flag() -> None:
    model, tokens = oracle("ln").model(), oracle("ln")["tokens"]
    _, cache = model.run_with_cache(
        tokens, names_filter=["blocks.0.attn.hook_result", "blocks.1.hook_q_input"]
    )
    z, w = model.run_with_cache(tokens)[1]["blocks.0.attn.hook_z"], model.W_O[0]
    torch.testing.assert_close(cache["blocks.0.attn.hook_result"], torch.einsum("bphe,hed->bphd", z, w))
    assert cache["blocks.1.hook_q_input"].shape == (*tokens.shape, 2, 4)


def test_everything_and_predicates_leave_out_points_whose_flag_is_off() -> None:
    model, tokens = oracle("ln").model(), oracle("ln")["tokens"]
    for names in (None, lambda name: True):
        assert not any(n.endswith("hook_result") for n in model.run_with_cache(tokens, names_filter=names)[1])
    only = model.run_with_cache(tokens, names_filter=lambda n: n.endswith("hook_result"))[1]
    assert list(only) == ["blocks.0.attn.hook_result", "blocks.1.attn.hook_result"]
    model.set_use_attn_result(True)
    assert "blocks.0.attn.hook_result" in model.run_with_cache(tokens)[1]


def test_add_hook_asks_for_flags_as_theirs() -> None:
    model = oracle("ln").model()
    for point, switch in {
        "attn.hook_result": model.set_use_attn_result, "hook_q_input": model.set_use_split_qkv_input,
        "hook_mlp_in": model.set_use_hook_mlp_in, "hook_attn_in": model.set_use_attn_in,
    }.items():  # fmt: skip
        with pytest.raises(AssertionError, match=f"Cannot add hook blocks.0.{point}"):
            model.add_hook(f"blocks.0.{point}", scaled)
        switch(True)
        model.add_hook(f"blocks.0.{point}", scaled)
    with pytest.raises(AssertionError, match="attn_only"):
        oracle("attn_only").model().set_use_hook_mlp_in(True)
    with pytest.raises(AssertionError, match="GroupedQueryAttention"):
        oracle("llama").model().set_use_attn_in(True)


def test_hooks_that_raise_raise_their_own_error_and_leave_nothing() -> None:
    model, tokens = oracle("ln").model(), oracle("ln")["tokens"]

    def fail(tensor: Tensor, hook: HookPoint) -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        model.run_with_hooks(tokens, fwd_hooks=[("blocks.0.hook_resid_pre", fail)])
    assert not model.list_hooks()


def test_writing_in_place_changes_the_pass_and_nothing_cached_before() -> None:
    model, tokens = oracle("ln").model(), oracle("ln")["tokens"]
    clean, cache = model.run_with_cache(tokens)

    def wipe(tensor: Tensor, hook: HookPoint) -> None:
        tensor[:] = 0

    with model.hooks(fwd_hooks=[("blocks.1.hook_resid_pre", wipe)]):
        out, edited = model.run_with_cache(tokens)
    assert not torch.allclose(out, clean) and not edited["blocks.1.hook_resid_pre"].any()
    assert torch.equal(edited["blocks.0.hook_resid_post"], cache["blocks.0.hook_resid_post"])


def test_a_backward_hook_may_stop_a_gradient() -> None:
    model, tokens = oracle("ln").model(), oracle("ln")["tokens"]
    with model.hooks(bwd_hooks=[("blocks.1.hook_resid_pre", lambda grad, hook: torch.zeros_like(grad))]):
        model(tokens, return_type="loss").backward()
    assert not model.blocks[0].attn.W_V.grad.any() and model.blocks[1].attn.W_V.grad.any()


def test_cached_activations_carry_no_graph_and_hooked_ones_do() -> None:
    model, tokens, kept = oracle("ln").model(), oracle("ln")["tokens"], []
    assert not model.run_with_cache(tokens)[1]["blocks.0.hook_resid_post"].requires_grad
    model.run_with_hooks(tokens, fwd_hooks=[("blocks.0.hook_resid_post", lambda t, hook: kept.append(t))])
    assert kept[0].requires_grad


def test_a_layer_that_does_not_run_calls_no_hook() -> None:
    model, tokens = oracle("ln").model(), oracle("ln")["tokens"]
    _, cache = model.run_with_cache(tokens, stop_at_layer=1)
    assert not any(name.startswith(("blocks.1", "ln_final", "unembed")) for name in cache)
    _, cache = model.run_with_cache(cache["blocks.0.hook_resid_post"], start_at_layer=1, return_type="logits")
    assert next(iter(cache)) == "blocks.1.hook_resid_pre"


def test_tokens_are_a_hook_point_if_the_config_says_so() -> None:
    model, tokens = oracle("ln").model(use_hook_tokens=True), oracle("ln")["tokens"]
    out, cache = model.run_with_cache(tokens)
    assert torch.equal(cache["hook_tokens"], tokens) and "blocks.1.hook_resid_post" in cache
    changed = model.run_with_hooks(tokens, fwd_hooks=[("hook_tokens", lambda t, hook: t.flip(0))])
    torch.testing.assert_close(changed, out.flip(0))


# arguments


@over("start", [None, 0, 2, -1])
@over("stop", [None, 0, 1, -1])
@torch.no_grad()
def test_layers_are_counted_as_slices_count(start: int | None, stop: int | None) -> None:
    model, tokens = oracle("ln").shared, oracle("ln")["tokens"]
    states = [model(tokens, stop_at_layer=layer) for layer in (0, 1, 2)]
    first, end, _ = slice(start, stop).indices(2)
    out = model(tokens if start is None else states[first], start_at_layer=start, stop_at_layer=stop)
    torch.testing.assert_close(out, model(tokens) if stop is None else states[max(first, end)])


def test_return_types() -> None:
    model, tokens = oracle("ln").model(), oracle("ln")["tokens"]
    both = model(tokens, return_type="both")
    assert isinstance(both, Output) and torch.equal(both.logits, model(tokens))
    assert torch.equal(both.loss, model(tokens, return_type="loss"))
    assert model(tokens, return_type=None) is None
    out, cache = model.run_with_cache(tokens, return_type=None)
    assert out is None and "ln_final.hook_normalized" in cache and "unembed.hook_out" not in cache
    with pytest.raises(AssertionError, match="tokens must be passed"):
        model(model(tokens, stop_at_layer=1), start_at_layer=1, return_type="loss")


def test_one_row_of_tokens_is_a_batch() -> None:
    model, tokens = oracle("ln").model(), oracle("ln")["tokens"]
    assert torch.equal(model(tokens[0]), model(tokens[:1]))


def test_a_cache_needs_a_mask_or_a_tokenizer() -> None:
    model = oracle("ln").model()
    past = TransformerLensKeyValueCache.init_cache(model.cfg, "cpu", 2)
    with pytest.raises(ValueError, match="without a tokenizer"):
        model(oracle("ln")["tokens"], past_kv_cache=past)
    with pytest.raises(AssertionError, match="Attention mask shape"):
        model(oracle("ln")["tokens"], attention_mask=torch.ones(2, 2))


def test_a_frozen_cache_is_read_and_not_written() -> None:
    model, tokens = oracle("llama").model(), oracle("llama")["tokens"]
    past = TransformerLensKeyValueCache.init_cache(model.cfg, "cpu", 2)
    ones = torch.ones_like(tokens)
    model(tokens[:, :2], past_kv_cache=past, attention_mask=ones[:, :2])
    past.freeze()
    first, second = (model(tokens[:, 2:], past_kv_cache=past, attention_mask=ones[:, 2:]) for _ in range(2))
    assert torch.equal(first, second) and past[0].past_keys.shape == (2, 2, 2, 2) and past.frozen
    torch.testing.assert_close(first, model(tokens)[:, 2:])
    past.unfreeze()
    model(tokens[:, 2:], past_kv_cache=past, attention_mask=ones[:, 2:])
    assert past[1].past_keys.shape[1] == 5 and past.previous_attention_mask.shape == (2, 5)


def test_caches_take_positions_rows_and_devices() -> None:
    model, tokens = oracle("llama").model(), oracle("llama")["tokens"]
    _, full = model.run_with_cache(tokens)
    _, cache = model.run_with_cache(tokens, pos_slice=-1, device="cpu")
    assert torch.equal(cache["blocks.0.attn.hook_rot_q"], full["blocks.0.attn.hook_rot_q"][:, -1:])
    assert torch.equal(cache["blocks.0.attn.hook_pattern"], full["blocks.0.attn.hook_pattern"][:, :, -1:])
    _, one = model.run_with_cache(tokens[:1], remove_batch_dim=True)
    assert not one.has_batch_dim and one["blocks.1.hook_resid_post"].shape == (5, 4)
    out, plain = model.run_with_cache(tokens, return_cache_object=False)
    assert type(plain) is dict
    torch.testing.assert_close(out, model(tokens))


def test_one_input_per_query_head_is_refused_where_keys_are_grouped() -> None:
    model, tokens = oracle("llama").model(), oracle("llama")["tokens"]
    with pytest.raises(ValueError, match="hook_k_input"):
        model.run_with_hooks(tokens, fwd_hooks=[("blocks.0.hook_attn_in", scaled)])
