"""Direct path patching under TransformerLens' names: what one head says to another head, and to no other part.

The sweep is planned like every ready sweep (`patching`): all destinations of a source are variants of one run.
Natively: `interp.path_patch`, which recomputes the norm instead of freezing its scale.
"""

import warnings
from collections.abc import Callable
from typing import Literal

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from interp.compat.transformer_lens.hooked_transformer import HookedTransformer
from interp.compat.transformer_lens.patching import (
    Cache,
    generic_activation_patch,
    layer_head_vector_patch_setter,
)

__path__: list[str] = []
"""To the import system a package: `tools.analysis.direct_path_patching` is this module (`install.ALIASES`)."""
Component = Literal["q", "k", "v"]


def get_act_patch_direct_path(
    model: HookedTransformer,
    corrupted_tokens: Int[Tensor, "b p"],
    clean_cache: Cache,
    corrupted_cache: Cache,
    patching_metric: Callable[[Tensor], Tensor],
    src_layer: int,
    src_head: int,
    component: Component = "q",
    verbose: bool = True,
) -> Float[Tensor, "l h"]:
    """The metric of the corrupted run when a head's change reaches only q, k or v of one later head.

    One number per later head: x_h += (z_clean - z_corrupted) W_O / scale W_h at the destination, x its q, k or v,
    with the norm's scale frozen at the corrupted run's. Layers up to the source's stay 0. The caches need
    `attn.hook_z` of the source (clean and corrupted) and the destinations' `ln1.hook_scale` (corrupted). verbose is
    accepted and shows nothing. UserWarning where `ln1.w` is not folded: it is left out of the path.

    Raises:
        ValueError: k or v that heads share, or another component.

    Source:
        Wang et al. 2022, section 3.1: the direct path.
    """
    _check_fold_ln(model)
    name = _point(model, component)
    n_layers, n_heads = model.cfg.n_layers, model.cfg.n_heads
    found = torch.zeros(n_layers, n_heads, device=model.cfg.device)
    later = range(src_layer + 1, n_layers)
    if len(later) == 0:
        return found
    with torch.no_grad():
        clean, corrupted = (
            cache[f"blocks.{src_layer}.attn.hook_z"] for cache in (clean_cache, corrupted_cache)
        )
        change = (clean - corrupted)[:, :, src_head] @ model.blocks[src_layer].attn.W_O[src_head]
        names = [name.format(layer) for layer in later]
        _, own = model.run_with_cache(corrupted_tokens, names_filter=names, return_cache_object=False)
        donors = {}
        for layer, at in zip(later, names, strict=True):
            read = change / corrupted_cache[f"blocks.{layer}.ln1.hook_scale"]
            weight = getattr(model.blocks[layer].attn, f"W_{component.upper()}")
            donors[at] = own[at] + torch.einsum("bpd,hde->bphe", read, weight)
    cells = pd.DataFrame(
        [(layer, head) for layer in later for head in range(n_heads)], columns=["layer", "head"]
    )
    values = generic_activation_patch(
        model, corrupted_tokens, donors, patching_metric, layer_head_vector_patch_setter, component, index_df=cells
    )  # fmt: skip
    assert isinstance(values, Tensor)
    found[src_layer + 1 :] = values.view(-1, n_heads)
    return found


def get_act_patch_direct_path_all_sources(
    model: HookedTransformer,
    corrupted_tokens: Int[Tensor, "b p"],
    clean_cache: Cache,
    corrupted_cache: Cache,
    patching_metric: Callable[[Tensor], Tensor],
    component: Component = "q",
    verbose: bool = True,
) -> Float[Tensor, "l h l h"]:
    """`get_act_patch_direct_path` from every head, [source layer, source head, layer, head]."""
    heads = range(model.cfg.n_heads)
    rows = [
        get_act_patch_direct_path(
            model, corrupted_tokens, clean_cache, corrupted_cache, patching_metric, layer, head, component, verbose
        )
        for layer in range(model.cfg.n_layers)
        for head in heads
    ]  # fmt: skip
    return torch.stack(rows).unflatten(0, (-1, len(heads)))


def _point(model: HookedTransformer, component: str) -> str:
    """The destination's hook name, for any layer."""
    if component not in ("q", "k", "v"):
        raise ValueError(f"component must be q, k or v, got {component!r}")
    cfg = model.cfg
    shared = cfg.n_key_value_heads not in (None, cfg.n_heads) and not cfg.ungroup_grouped_query_attention
    if component != "q" and shared:
        raise ValueError(
            f"one {component} serves {cfg.n_heads // (cfg.n_key_value_heads or 1)} heads here: call "
            "set_ungroup_grouped_query_attention(True) before, or patch q"
        )
    return f"blocks.{{}}.attn.hook_{component}"


def _check_fold_ln(model: object) -> None:
    """UserWarning where a norm before attention still has a weight of its own that does something."""
    weights = dict(model.named_parameters()) if isinstance(model, nn.Module) else {}
    for name, weight in weights.items():
        if name.endswith("ln1.w") and not torch.allclose(weight, torch.ones_like(weight), atol=1e-3):
            warnings.warn(
                f"{name} is not folded and is left out of direct paths: load with fold_ln=True or call "
                "process_weights_() first",
                UserWarning,
                stacklevel=3,
            )
            return
