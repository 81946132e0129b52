"""The dictionary part of ActivationCache: names and shorthand, moving, slicing and dropping the batch dimension."""

import copy

import pytest
import torch

from interp.compat.transformer_lens.activation_cache import ActivationCache
from interp.compat.transformer_lens.tensors import Slice
from tests.compat.transformer_lens.cache_oracle import cache_of, oracle, stand_in


def test_it_is_a_dictionary_with_shorthand() -> None:
    cache = cache_of("layer-norm")
    names = list(oracle()["layer-norm"]["cache"])
    assert list(cache) == list(cache.keys()) == [name for name, _ in cache.items()] == names
    assert len(cache) == len(list(cache.values())) == len(names)
    assert repr(cache) == f"ActivationCache with keys {names}"
    assert "blocks.0.attn.hook_k" in cache and "k0" not in cache
    full = cache["blocks.1.attn.hook_k"]
    assert (
        full is cache["k", 1] is cache["k1"] is cache["k", -1] is cache["k", 1, "attn"] is cache["k", 1, None]
    )
    assert cache["scale", 1, "ln1"] is cache["blocks.1.ln1.hook_scale"]
    assert cache["embed"] is cache["hook_embed"] is cache["embed", None]
    assert cache["scale"] is cache["ln_final.hook_scale"]
    assert cache.has_embed and cache.has_pos_embed and not cache_of("grouped").has_pos_embed


def test_an_activation_that_is_not_cached_is_named_with_the_nearest_one() -> None:
    with pytest.raises(KeyError, match=r"blocks\.9\.attn\.hook_k was not cached; the nearest that was is"):
        cache_of("layer-norm")["k", 9]


def test_to_moves_the_tensors_and_the_model_if_asked() -> None:
    cache = cache_of("layer-norm")
    assert cache.to("meta") is cache
    assert all(value.device.type == "meta" for value in cache.values())
    moved: list[str] = []
    cache.model.to = moved.append
    with pytest.warns(DeprecationWarning, match="move_model"):
        cache.to("meta", move_model=True)
    assert moved == ["meta"]


def test_toggle_autodiff_switches_gradients(caplog: pytest.LogCaptureFixture) -> None:
    try:
        cache_of("layer-norm").toggle_autodiff()
        assert not torch.is_grad_enabled() and "global state" in caplog.text
    finally:
        torch.set_grad_enabled(True)


def test_rows_are_sliced_and_what_the_batch_shares_is_kept() -> None:
    model = stand_in("layer-norm")
    tensors = {
        "a": torch.randn(3, 4),
        "b": torch.randn(3, 2),
        "shared": torch.randn(1, 4),
        "scalar": torch.tensor(1.0),
    }
    cache = ActivationCache(dict(tensors), model)
    for given, rows in (([0, 2], [0, 2]), ((1, 3), [1, 2]), (Slice((2,)), [0, 1]), (None, [0, 1, 2])):
        some = cache.apply_slice_to_batch_dim(given)
        assert some.has_batch_dim and some is not cache and some.model is model
        assert torch.equal(some["a"], tensors["a"][rows])
        assert torch.equal(some["shared"], tensors["shared"])
    with pytest.raises(AssertionError, match="without a batch dim"):
        cache.apply_slice_to_batch_dim(0).apply_slice_to_batch_dim(0)


def test_the_batch_dimension_goes_once(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(AssertionError, match="batch size 2"):
        cache_of("layer-norm").remove_batch_dim()
    cache = cache_of("layer-norm").apply_slice_to_batch_dim([1])
    assert cache["q", 0].shape == (1, 4, 2, 3)
    assert cache.remove_batch_dim() is cache and not cache.has_batch_dim
    assert cache["q", 0].shape == (4, 2, 3)
    cache.remove_batch_dim()
    assert "already having removed" in caplog.text and cache["q", 0].shape == (4, 2, 3)


def test_a_copy_is_a_cache() -> None:
    cache = ActivationCache({"a": torch.ones(2)}, None)
    assert torch.equal(copy.deepcopy(cache)["a"], cache["a"])
