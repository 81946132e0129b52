"""Direct paths between heads: against one hooked pass for each destination, and what cannot be patched is refused."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from interp.compat.transformer_lens.config import HookedTransformerConfig
from interp.compat.transformer_lens.direct_path_patching import (
    get_act_patch_direct_path,
    get_act_patch_direct_path_all_sources,
)
from interp.compat.transformer_lens.hooked_transformer import HookedTransformer

CLEAN, CORRUPTED = (
    torch.tensor([[3, 1, 4, 1, 5], [2, 7, 1, 8, 2]]),
    torch.tensor([[3, 6, 4, 1, 5], [9, 7, 1, 8, 2]]),
)


def build(**fields: Any) -> HookedTransformer:
    shape = {
        "n_layers": 3,
        "d_model": 16,
        "d_head": 4,
        "n_heads": 4,
        "d_mlp": 8,
        "d_vocab": 11,
        "n_ctx": 8,
        "act_fn": "gelu",
        "seed": 0,
    }
    cfg = HookedTransformerConfig.from_dict(
        {**shape, "dtype": torch.float64, "initializer_range": 0.5, **fields}
    )
    model = HookedTransformer(cfg)
    model.process_weights_()
    return model


def metric(logits: Tensor) -> Tensor:
    return (logits[:, -1, 3] - logits[:, -1, 7]).mean()


def one_by_one(
    model: HookedTransformer, clean: Any, corrupted: Any, source: tuple[int, int], kind: str
) -> Tensor:
    """The norm's scale frozen, the head's change read by one head at a time."""
    layer, head = source
    found = torch.zeros(model.cfg.n_layers, model.cfg.n_heads)
    z = clean[f"blocks.{layer}.attn.hook_z"] - corrupted[f"blocks.{layer}.attn.hook_z"]
    change = z[:, :, head] @ model.blocks[layer].attn.W_O[head]
    for to_layer in range(layer + 1, model.cfg.n_layers):
        weight = getattr(model.blocks[to_layer].attn, f"W_{kind.upper()}")
        for to_head in range(model.cfg.n_heads):

            def add(
                value: Tensor, hook: Any, at: int = to_head, by: int = to_layer, w: Tensor = weight
            ) -> Tensor:
                read = change / corrupted[f"blocks.{by}.ln1.hook_scale"]
                value = value.clone()
                value[:, :, at] += read @ w[at]
                return value

            name = f"blocks.{to_layer}.attn.hook_{kind}"
            found[to_layer, to_head] = metric(model.run_with_hooks(CORRUPTED, fwd_hooks=[(name, add)])).item()
    return found


@pytest.mark.parametrize("kind", ["q", "k", "v"])
@torch.no_grad()
def test_the_sweep_is_what_one_hooked_pass_per_destination_gives(kind: Any) -> None:
    model = build()
    clean, corrupted = (model.run_with_cache(tokens)[1] for tokens in (CLEAN, CORRUPTED))
    got = get_act_patch_direct_path(model, CORRUPTED, clean, corrupted, metric, 0, 2, kind)
    want = one_by_one(model, clean, corrupted, (0, 2), kind)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert got[1:].std() > 1e-3 and bool((got[0] == 0).all())
    every = get_act_patch_direct_path_all_sources(model, CORRUPTED, clean, corrupted, metric, kind)
    torch.testing.assert_close(every[0, 2], got)
    assert every.shape == (3, 4, 3, 4) and bool((every[2] == 0).all())


@torch.no_grad()
def test_keys_that_heads_share_are_refused() -> None:
    model = build(n_key_value_heads=2)
    _, cache = model.run_with_cache(CLEAN)
    with pytest.raises(ValueError, match="one k serves 2 heads"):
        get_act_patch_direct_path(model, CORRUPTED, cache, cache, metric, 0, 0, "k")
    same = get_act_patch_direct_path(model, CLEAN, cache, cache, metric, 0, 0, "q")
    torch.testing.assert_close(same[1:], torch.full_like(same[1:], metric(model(CLEAN)).item()))


@torch.no_grad()
def test_a_norm_that_is_not_folded_is_said() -> None:
    model = HookedTransformer(build().cfg.__class__(**{**build().cfg.to_dict(), "normalization_type": "LN"}))
    _, cache = model.run_with_cache(CLEAN)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        get_act_patch_direct_path(model, CORRUPTED, cache, cache, metric, 1, 0)
    model.blocks[1].ln1.w.fill_(2.0)
    with pytest.warns(UserWarning, match=r"blocks\.1\.ln1\.w is not folded"):
        get_act_patch_direct_path(model, CORRUPTED, cache, cache, metric, 1, 0)
