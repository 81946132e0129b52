"""A pass gives the same numbers, to the last bit, whatever is watched in it; some names of TransformerLens besides."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from interp.compat.transformer_lens.cache import TransformerLensKeyValueCache, get_pos_offset
from interp.compat.transformer_lens.config import HookedTransformerConfig
from interp.compat.transformer_lens.hook_points import HookPoint
from interp.compat.transformer_lens.hooked_transformer import HookedTransformer
from interp.compat.transformer_lens.processing import ProcessWeights
from interp.compat.transformer_lens.tensors import TypedModuleList

TOKENS = torch.arange(30).reshape(2, 15) ** 2 % 50


def small() -> HookedTransformer:
    return HookedTransformer(
        HookedTransformerConfig(
            n_layers=3, d_model=16, d_head=4, n_heads=4, n_ctx=64, d_vocab=50, d_mlp=24, act_fn="gelu",
            normalization_type="LN", device="cpu", seed=1,
        )
    )  # fmt: skip


def watched(model: HookedTransformer, seen: list[str]) -> Tensor:
    def note(value: Tensor, hook: HookPoint) -> None:
        seen.append(str(hook.name))

    names = ("hook_embed", "blocks.0.attn.hook_k", "blocks.2.ln2.hook_normalized", "ln_final.hook_scale")
    out = model.run_with_hooks(TOKENS, fwd_hooks=[(name, note) for name in names])
    assert seen == list(names)
    return out


def in_two(model: HookedTransformer, layer: int) -> Tensor:
    stream = model(TOKENS, stop_at_layer=layer)
    return model(stream, start_at_layer=layer)


WAYS: dict[str, Callable[[HookedTransformer], Tensor]] = {
    "with a cache": lambda model: model.run_with_cache(TOKENS)[0],
    "with hooks elsewhere": lambda model: watched(model, []),
    "with one activation kept": lambda model: model.run_with_cache(TOKENS, names_filter="hook_embed")[0],
    "cut before block 1": lambda model: in_two(model, 1),
    "cut before the last block": lambda model: in_two(model, -1),
}


@pytest.mark.parametrize("way", WAYS)
def test_logits_do_not_depend_on_what_is_watched(way: str) -> None:
    model = small()
    with torch.no_grad():
        assert torch.equal(WAYS[way](model), model(TOKENS))


def test_a_long_plain_pass_keeps_the_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls, kernel = small(), [0], torch.nn.functional.scaled_dot_product_attention

    def counted(*args: object, **options: object) -> Tensor:
        calls[0] += 1
        return kernel(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    for tokens, want in ((TOKENS, 0), (TOKENS.repeat(2, 1), 3)):
        calls[0] = 0
        model(tokens)
        assert calls[0] == want
    calls[0] = 0
    model.run_with_cache(TOKENS.repeat(2, 1), names_filter="hook_embed")
    assert calls[0] == 0


def test_the_parts_of_folding_the_first_norm_are_the_whole() -> None:
    model = small()
    for weight in model.parameters():
        weight.data += torch.randn_like(weight)
    state = model.state_dict()
    found = ProcessWeights.extract_attention_tensors_for_folding(state, model.cfg, 1)
    weights = [found[f"w{x}"] for x in "qkv"]
    q, k, v = weights
    biases = ProcessWeights.fold_layer_norm_biases(
        q, k, v, found["bq"], found["bk"], found["bv"], found["ln1_b"]
    )
    scaled = ProcessWeights.fold_layer_norm_weights(q, k, v, found["ln1_w"])
    centred = ProcessWeights.center_attention_weights(*scaled)
    want = ProcessWeights.fold_layer_norm(state, model.cfg)
    for x, bias, matrix in zip("QKV", biases, centred, strict=True):
        torch.testing.assert_close(bias, want[found["keys"][f"b_{x}"]])
        torch.testing.assert_close(matrix, want[found["keys"][f"W_{x}"]])
    with pytest.raises(ValueError, match="adapters"):
        ProcessWeights.extract_attention_tensors_for_folding(state, model.cfg, 1, object())


def test_the_offset_of_a_cache_is_what_it_holds() -> None:
    model = small()
    cache = TransformerLensKeyValueCache.init_cache(model.cfg, "cpu", 2)
    assert get_pos_offset(None, 2) == get_pos_offset(cache, 2) == 0
    model(TOKENS[:, :5], past_kv_cache=cache, attention_mask=torch.ones(2, 5, dtype=torch.long))
    assert get_pos_offset(cache, 2) == 5


def test_a_slice_of_a_typed_list_is_one() -> None:
    parts: TypedModuleList[torch.nn.Linear] = TypedModuleList([torch.nn.Linear(2, 2) for _ in range(3)])
    assert type(parts[1:]) is TypedModuleList and list(parts[1:]) == list(parts)[1:]
