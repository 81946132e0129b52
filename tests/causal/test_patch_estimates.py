"""AtP*: an exact softmax behind queries and keys, and gradients with one layer's contribution dropped at a time."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor

from interp import Edit, HookedEncoderDecoder, HookedTransformer, Read, observe
from interp.causal import attribution_patch, patch
from interp.causal.contrast import Direction, site_names
from interp.data.batch import Batch
from interp.edits import Detach, Set
from interp.model import (
    Alibi,
    Latent,
    ModelConfig,
    NoNorm,
    NoPosition,
    RMSNorm,
    Rotary,
    Softmax,
    Transformer,
)
from interp.model.softmax import LogSteps
from interp.passes.metrics import kl_divergence, logit_difference
from tests.causal.slow_edges import ANSWER, WRONG, difference
from tests.circuits.test_edge_attribution import CLEAN, CORRUPT, padded
from tests.configs import CONFIGS, build, perturbed
from tests.lenses.test_factors_of_pairs import pair
from tests.loops import over
from tests.tolerances import assert_close

METRIC = logit_difference(ANSWER, WRONG)
ALONE = ModelConfig(2, 24, 4, 24, 31, d_head=8, mlp=None, final_norm=False)
"""Attention alone and a metric that is linear in what the last layer writes."""
LINEAR_BEHIND = {
    "plain": ALONE,
    "grouped and rotated": replace(ALONE, n_kv_heads=2, position=Rotary(), norm=RMSNorm()),
    "sinks and a window": replace(ALONE, sinks=True, window=4, position=Rotary()),
    "soft cap": replace(ALONE, attn_softcap=2.0, position=NoPosition()),
    "bias": replace(ALONE, position=Alibi()),
    "normed queries and keys": replace(ALONE, qk_norm="head", position=Rotary(dim=4)),
    "temperature and clip": replace(ALONE, mixer=Softmax(temperature=LogSteps(2, 0.7), clip=0.8)),
    "cosine": replace(ALONE, mixer=Softmax(score="cosine")),
    "latent": replace(ALONE, mixer=Latent(rank=6, content=5), position=Rotary(dim=4)),
    "both ways": replace(ALONE, causal=False),
    "parallel": replace(CONFIGS["parallel"], final_norm=False),
}


def asked(model: Transformer, site: str, **how: object) -> xr.Dataset:
    how = {"metric": METRIC, "agreement": 0, **how}
    return attribution_patch(HookedTransformer(model), CLEAN, CORRUPT, site, **how)  # type: ignore[arg-type]


def each(found: xr.Dataset) -> Tensor:
    return torch.from_numpy(found["each"].values)


def head_dim(site: str) -> str:
    return "kv_head" if site.endswith("k") else "head"


# the QK fix


@pytest.mark.parametrize("name", LINEAR_BEHIND)
@over("site, direction", [("q", "denoise"), ("k", "noise"), ("k", "denoise")])
def test_behind_the_last_attention_the_fix_is_exact_patching(
    name: str, site: str, direction: Direction
) -> None:
    """The last layer's queries and keys, one by one and of a head's positions together; what follows is linear."""
    model = perturbed(LINEAR_BEHIND[name])
    head, hooked = head_dim(site), HookedTransformer(model)
    for by in (("layer", "pos", head), ("layer", head), ("layer", "pos")):
        exact = patch(hooked, CLEAN, CORRUPT, site, metric=METRIC, by=by, direction=direction)
        found = asked(model, site, by=by, direction=direction, qk_fix=True)
        assert_close(each(found)[:, 1], each(exact)[:, 1], torch.float64)
        assert float(abs(exact.value[1]).max()) > 1e-3
    assert not np.allclose(asked(model, site).value[1], asked(model, site, qk_fix=True).value[1], rtol=0.01)


def by_hand(model: Transformer, own: Batch, other: Batch, name: str, cell: tuple[int, int]) -> Tensor:
    """The change of the patterns of a layer as one query or key is replaced there, times their gradient."""
    pattern = f"{name.rpartition('.')[0]}.hook_pattern"
    value = observe(model, other, [Read(name)]).trace[name]
    at = {"pos": cell[0], "kv_head" if name.endswith("k") else "head": cell[1]}
    new = observe(model, own, [Read(pattern)], [Edit(name, Set(value), at)]).trace[pattern]
    seen = observe(model, own, [Read(pattern), Read(pattern, grad=True)], metric=total).trace
    return ((new - seen[Read(pattern)]) * seen[Read(pattern, grad=True)]).sum((1, 2, 3))


def total(logits: Tensor) -> Tensor:
    """The metric summed over prompts, each of which has its own gradient."""
    return difference(logits).sum()


@pytest.mark.parametrize(
    "name",
    ["gpt2", "llama-gqa", "mqa", "gemma2", "gemma3", "masked-lm", "bloom", "gpt-oss", "cohere2", "macaron"],
)
@over("site", ["q", "k"])
def test_a_cell_is_the_pattern_s_change_under_an_ordinary_edit_times_its_gradient(
    name: str, site: str
) -> None:
    model = build(name)
    found = each(asked(model, site, qk_fix=True))
    for layer, cell in ((0, (2, 0)), (0, (5, found.shape[3] - 1)), (1, (6, 0)), (1, (3, 0))):
        full = site_names(site, model.config)[layer]
        assert_close(
            found[:, layer, cell[0], cell[1]],
            by_hand(model, Batch(CORRUPT), Batch(CLEAN), full, cell),
            torch.float64,
        )
    assert float(found.abs().max()) > 1e-3


def test_queries_of_cross_attention_are_recomputed_as_well() -> None:
    network = pair("llama-gqa")
    given, sources = HookedEncoderDecoder(network).given, Batch.of([[5, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])
    clean, corrupt = (
        given(sources, Batch.of(x)) for x in ([[0, 3, 5, 7], [0, 8, 9, 7]], [[0, 3, 6, 7], [0, 8, 2, 7]])
    )
    site = "cross_attn.hook_q"
    found = attribution_patch(network.decoder, clean, corrupt, site, metric=METRIC, qk_fix=True, agreement=0)
    for layer, cell in ((0, (2, 1)), (1, (3, 2))):
        expected = by_hand(network.decoder, corrupt, clean, f"blocks.{layer}.{site}", cell)
        assert_close(each(found)[:, layer, cell[0], cell[1]], expected, torch.float64)
    assert float(each(found).abs().max()) > 1e-3


def saturated(gap: float) -> Transformer:
    """Attention whose second layer, in the corrupted run, gives one key of every row a score `gap` above all others."""
    model = perturbed(replace(ALONE, position=NoPosition()))
    scores = observe(model, Batch(CORRUPT), [Read("blocks.1.attn.hook_attn_scores")]).trace
    best = scores["blocks.1.attn.hook_attn_scores"][:, :, 1:].topk(2, -1).values
    nearest = (best[..., 0] - best[..., 1]).min()
    attention = model.blocks[1].attn
    queries = 4 * attention.d_head
    attention.qkv.weight[:queries] *= gap / nearest
    attention.qkv.bias[:queries] *= gap / nearest
    return model


@over("site", ["q", "k"])
def test_a_saturated_softmax_is_no_blind_spot(site: str) -> None:
    """Scores 20 apart or more: first order sees almost nothing of what a patch does, the fix all of it."""
    model = saturated(20.0)
    by = ("layer", "pos", "head" if site == "q" else "kv_head")
    exact = patch(HookedTransformer(model), CLEAN, CORRUPT, site, metric=METRIC, by=by).value[1]
    with_fix, without = (asked(model, site, qk_fix=fix).value[1] for fix in (True, False))
    assert_close(torch.from_numpy(with_fix.values), torch.from_numpy(exact.values), torch.float64)
    largest = np.abs(exact.values).ravel().argsort()[-3:]
    assert np.abs(exact.values).ravel()[largest].min() > 0.1
    assert np.abs(without.values).ravel()[largest].max() < 1e-3 * np.abs(exact.values).ravel()[largest].min()


@over("site", ["q", "k"])
@over("side", ["left", "right"])
def test_padding_and_prompts_of_other_lengths_change_no_number(site: str, side: str) -> None:
    model = HookedTransformer(build("llama-gqa"))
    ask = partial(attribution_patch, model, metric=METRIC, qk_fix=True, grad_drop=True)
    plain = ask(CLEAN, CORRUPT, site)
    wide = ask(padded(CLEAN, side), padded(CORRUPT, side), site)
    np.testing.assert_allclose(wide["each"][:, :, :7], plain["each"], atol=1e-9)
    np.testing.assert_allclose(wide["size"][:, :7], plain["size"], atol=1e-9)
    assert bool(wide["each"][:, :, 7:].isnull().all()) and bool(wide["size"][:, 7:].isnull().all())
    keep = torch.ones(3, 7, dtype=torch.bool)
    keep[1, 5:] = False
    mixed = ask(Batch(CLEAN, keep), Batch(CORRUPT, keep), site)["each"][1]
    short = ask(CLEAN[1:2, :5], CORRUPT[1:2, :5], site)["each"][0]
    np.testing.assert_allclose(mixed[:, :5], short, atol=1e-9)
    assert bool(mixed[:, 5:].isnull().all())


def test_before_the_first_other_token_nothing_is_estimated() -> None:
    clean = CLEAN.clone()
    clean[:, :3] = CORRUPT[:, :3]
    for dtype in (torch.float64, torch.float32):
        model = HookedTransformer(build("llama-gqa", dtype))
        for site in ("q", "k"):
            found = attribution_patch(model, clean, CORRUPT, site, metric=METRIC, qk_fix=True)
            assert float(abs(found["each"][:, :, :3]).max()) == 0 < float(abs(found["each"]).max())


@over("site", ["q", "k", "z"])
@over("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_agrees_with_double(site: str, dtype: torch.dtype) -> None:
    how = {"qk_fix": site != "z", "grad_drop": True}
    wide, narrow = (asked(build("gpt2", d), site, **how) for d in (torch.float64, dtype))
    for name in ("each", "size"):
        ours, theirs = (torch.from_numpy(found[name].values).double() for found in (narrow, wide))
        assert_close(ours, theirs, dtype)


# GradDrop


def dropped_by_hand(model: Transformer, site: str, *, drop: int) -> list[Tensor]:
    """First-order estimates of every layer from a whole backward pass, a layer's contribution cut out of it."""
    names, outs = site_names(site, model.config), [f"blocks.{drop}.hook_{x}" for x in model.config.sublayers]
    other = observe(model, Batch(CLEAN), [Read(name) for name in names]).trace
    reads = [Read(name, grad=grad) for name in names for grad in (False, True)]
    own = observe(model, Batch(CORRUPT), reads, [Edit(out, Detach()) for out in outs], metric=total).trace
    return [((other[n] - own[Read(n)]) * own[Read(n, grad=True)]).sum(-1) for n in names]


@pytest.mark.parametrize(
    "name", ["gpt2", "llama-gqa", "gemma2", "olmo2", "masked-lm", "gptj", "macaron", "gpt-oss"]
)
@over("site", ["z", "v"])
def test_sizes_are_those_of_whole_backward_passes_with_a_layer_cut_out(name: str, site: str) -> None:
    """Three layers: below a cell, its own and above."""
    model = perturbed(replace(CONFIGS[name], n_layers=3))
    found = torch.from_numpy(asked(model, site, grad_drop=True)["size"].values)
    summed = torch.zeros_like(found)
    for drop in range(3):
        every = dropped_by_hand(model, site, drop=drop)
        assert float(every[drop].abs().max()) == 0, "its own layer gives 0"
        summed += torch.stack([x.abs() for x in every], 1).mean(0)
    assert_close(found, summed / 2, torch.float64)
    assert float(found.min()) >= 0 and float(found.max()) > 1e-3


def cancelling(weight: float = 1.0) -> Transformer:
    """A model whose layer 1 writes -weight times the stream it reads, so that layer 0 reaches the logits as 1 - weight.

    Queries and keys of layer 1 are 0 and it sees one token, so that its attention is a linear map.
    """
    config = replace(ALONE, norm=NoNorm(), position=NoPosition(), window=1, n_heads=3, n_kv_heads=3, d_head=8)
    model = perturbed(config)
    attention = model.blocks[1].attn
    attention.qkv.weight.zero_()
    attention.qkv.weight[2 * 24 :] = torch.eye(24)
    attention.qkv.bias.zero_()
    attention.out.weight[:] = -weight * torch.eye(24)
    return model


def test_a_cancelled_direct_effect_is_found_and_is_the_effect_without_the_other_path() -> None:
    model = cancelling()
    hooked = HookedTransformer(model)
    plain = asked(model, "z", by=("layer", "head"), grad_drop=True)
    assert float(abs(plain.value[0]).max()) < 1e-12, "the direct and the indirect path cancel"
    # with what layer 1 writes held, the direct path is all that there is
    fixed = observe(model, Batch(CORRUPT), [Read("blocks.1.hook_attn_out")]).trace["blocks.1.hook_attn_out"]
    held = hooked.edited([Edit("blocks.1.hook_attn_out", Set(fixed))])
    direct = patch(held, CLEAN, CORRUPT, "z", metric=METRIC, by=("layer", "head"))
    expected = torch.from_numpy(np.abs(direct["each"].values)[:, 0]).mean(0)
    assert_close(torch.from_numpy(plain["size"].values[0]), expected, torch.float64)
    assert float(expected.min()) > 1e-3


def test_the_mean_of_sizes_is_not_the_size_of_the_mean() -> None:
    found = asked(build("gpt2"), "z", grad_drop=True)
    assert bool((found["size"][1] >= abs(found.value[1]) - 1e-12).all())
    assert (
        bool((found["size_ends"].sel(end="low") <= found["size"]).all())
        and found["size"].attrs["unit"] == "logits"
    )
    np.testing.assert_allclose(found["size"][1], abs(found["each"][:, 1]).mean("prompt"))


@over("each", [True, False])
def test_sizes_do_not_depend_on_batches(each: bool) -> None:
    model = HookedTransformer(build("llama-gqa"))
    how = {"metric": METRIC, "qk_fix": True, "grad_drop": True, "agreement": 0, "each": each}
    whole = attribution_patch(model, CLEAN, CORRUPT, "k", **how)  # type: ignore[arg-type]
    split = attribution_patch(model, Batch(CLEAN).split(2), Batch(CORRUPT).split(2), "k", **how)  # type: ignore[arg-type]
    for name in ("value", "size", "size_ends"):
        np.testing.assert_allclose(split[name], whole[name], atol=1e-12)


def test_both_repairs_are_one_estimate_with_a_layer_cut_out() -> None:
    """In layer 0 of two layers: the size is that of the exact pattern change times the gradient without layer 1."""
    model, name = build("llama-gqa"), "blocks.0.attn.hook_q"
    pattern = "blocks.0.attn.hook_pattern"
    value = observe(model, Batch(CLEAN), [Read(name)]).trace[name]
    new = observe(model, Batch(CORRUPT), [Read(pattern)], [Edit(name, Set(value))]).trace[pattern]
    cut = [Edit(f"blocks.1.hook_{out}", Detach()) for out in model.config.sublayers]
    seen = observe(model, Batch(CORRUPT), [Read(pattern), Read(pattern, grad=True)], cut, metric=total).trace
    expected = ((new - seen[Read(pattern)]) * seen[Read(pattern, grad=True)]).sum(3).abs().mean(0).mT
    found = asked(model, "q", qk_fix=True, grad_drop=True)["size"].values[0]
    assert_close(torch.from_numpy(found), expected, torch.float64)


def test_neurons_and_comparing_metrics_have_sizes_too() -> None:
    found = asked(build("gpt2"), "mlp.hook_post", by=("layer", "neuron"), grad_drop=True)
    assert found["size"].dims == ("layer", "neuron") and float(found["size"].max()) > 0
    model = HookedTransformer(build("gpt2"))
    diverged = attribution_patch(
        model, CLEAN, CORRUPT, "q", metric=kl_divergence(), qk_fix=True, grad_drop=True
    )
    assert float(diverged["size"].max()) > 0


# refusals


def test_what_the_repairs_are_not_defined_for_is_refused_by_name() -> None:
    model = build("gpt2")
    with pytest.raises(
        ValueError, match="qk_fix recomputes the softmax of queries and keys: site q, k, rot_q or rot_k"
    ):
        asked(model, "z", qk_fix=True)
    with pytest.raises(
        ValueError, match="softmax of scores of one query and one key each, layer 0 has Softmax"
    ):
        asked(perturbed(replace(ALONE, mixer=Softmax(smeared_keys=True))), "k", qk_fix=True)
    with pytest.raises(
        ValueError, match=r"requires that heads do not share a norm, which attn\.hook_q enters"
    ):
        asked(build("olmo2"), "q", qk_fix=True)
    with pytest.raises(ValueError, match="requires two layers or more, got 1"):
        asked(perturbed(replace(ALONE, n_layers=1)), "z", grad_drop=True)
    with pytest.raises(ValueError, match="requires a site inside attention or an MLP, got 'hook_resid_pre'"):
        asked(model, "resid_pre", grad_drop=True)
    with pytest.raises(ValueError, match="requires a site inside attention or an MLP, got 'hook_embed'"):
        asked(model, "embed", grad_drop=True)
    with pytest.raises(ValueError, match="grad_drop requires 'layer' in by"):
        asked(model, "z", by=("head",), grad_drop=True)
