"""Sums of parts are checked at 80 layers in every dtype without a false alarm, and a part that is missing is found."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from interp import HookedTransformer
from interp.attention.score_parts import every_score, score_reads
from interp.data.batch import Batch
from interp.model import MLP, ModelConfig, RMSNorm, Transformer
from interp.model.tap import Read, Trace
from interp.passes.observe import observe
from interp.residual import ActivationCache, IncompleteSumError, decomposition as residual
from interp.residual.attribution import Grain, attribution
from interp.residual.decomposition import Missed, bound
from interp.residual.paths import Frozen, frozen_reads, order_logits
from interp.tokens.alti_logit import credited
from interp.tokens.mixing import layers_read
from tests.configs import perturbed

DEPTH, MIDDLE = 80, 40
CONFIG = ModelConfig(DEPTH, 32, 4, n_ctx=16, d_vocab=31, mlp=MLP(48), norm=RMSNorm())
BARE = replace(CONFIG, mlp=None)
TOKENS = torch.randint(0, 31, (2, 9), generator=torch.Generator().manual_seed(0))
ANSWER = torch.tensor([3, 14])
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
GRAINS: tuple[Grain, ...] = ("layer", "sublayer", "head", "source", "neuron")
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@functools.cache
def deep(dtype: torch.dtype, config: ModelConfig = CONFIG) -> Transformer:
    """80 layers, with a massive activation: a number of the stream that is hundreds of times the others."""
    torch.manual_seed(0)
    model = perturbed(config, torch.float64)
    model.embed.weight[:, 5] += 300.0
    return model.to(dtype)


@functools.cache
def cached(dtype: torch.dtype) -> ActivationCache:
    return HookedTransformer(deep(dtype)).run_with_cache(TOKENS)[1]


def without(
    cache: Mapping[str, Tensor], model: Transformer, site: str, at: tuple[object, ...]
) -> ActivationCache:
    """The same with some numbers of a site gone."""
    value = cache[site].clone()
    value[at] = 0
    return ActivationCache({**cache, site: value}, model)


def batch() -> Batch:
    return Batch(TOKENS, answer=ANSWER)


def lost(trace: Trace, site: str, at: tuple[object, ...]) -> Trace:
    """The same recording with some numbers of every read of a site gone."""
    values = dict(trace.items())
    assert any(read.site == site for read in values)
    for read in [read for read in values if read.site == site]:
        values[read] = values[read].clone()
        values[read][at] = 0
    return Trace(values)


def within(missed: Missed | None) -> float:
    assert missed is not None and float(missed.error) <= float(missed.allowed)
    return float(missed.allowed)


ALL = (Ellipsis,)
PARTS: dict[str, tuple[Callable[[ActivationCache], object], str, tuple[object, ...]]] = {
    "a sublayer of the stream": (lambda c: c.decompose_resid(), f"blocks.{MIDDLE}.hook_mlp_out", ALL),
    "attention of the stream": (lambda c: c.decompose_resid(), f"blocks.{MIDDLE}.hook_attn_out", ALL),
    "an embedding": (lambda c: c.decompose_resid(), "hook_pos_embed", ALL),
    "a head": (lambda c: c.stack_head_results(), f"blocks.{MIDDLE}.attn.hook_z", (..., 2, slice(None))),
    "a source": (lambda c: c.head_source_results(MIDDLE), f"blocks.{MIDDLE}.attn.hook_pattern", (..., 4)),
    "a neuron": (
        lambda c: c.stack_neuron_results(MIDDLE),
        f"blocks.{MIDDLE}.mlp.hook_post",
        (..., slice(4, 9)),
    ),
}
"""By what is missing: the sum, and where in the recording it was."""


@each_dtype
def test_80_layers_sum_to_their_stream_at_every_grain_in_every_dtype(dtype: torch.dtype) -> None:
    cache = cached(dtype)
    for found in (cache.decompose_resid(), cache.stack_head_results(), cache.stack_neuron_results(MIDDLE)):
        within(found.missed)
        whole = cache["resid_post", DEPTH - 1] if found.complete else cache["mlp_out", MIDDLE][:, -1]
        assert found.rounding is not None
        torch.testing.assert_close(
            found.values.sum(0) + found.rounding, residual.upcast(whole), rtol=1e-5, atol=1e-3
        )
    cache.head_source_results(MIDDLE)


@each_dtype
@pytest.mark.parametrize("what", PARTS)
def test_a_missing_part_of_80_layers_is_found_in_every_dtype(what: str, dtype: torch.dtype) -> None:
    summed, site, at = PARTS[what]
    with pytest.raises(IncompleteSumError, match="parts miss the whole"):
        summed(without(cached(dtype), deep(dtype), site, at))


@each_dtype
def test_half_precision_loses_no_sharpness_where_the_stream_is_added_up(dtype: torch.dtype) -> None:
    """The bound on a sum of 161 parts in bfloat16 would be above 1; one rounding of the largest number is allowed."""
    cache = cached(dtype)
    allowed = within(cache.decompose_resid().missed)
    assert allowed <= max(2 * torch.finfo(dtype).eps, 100 * torch.finfo(dtype).eps * (dtype in residual.WIDE))
    if dtype == torch.bfloat16:
        assert float(bound(2 * DEPTH + 2, torch.tensor(1.0), dtype)) > 0.15


@each_dtype
@pytest.mark.parametrize("parts", GRAINS)
def test_attribution_of_80_layers_sums_and_finds_what_is_missing(parts: Grain, dtype: torch.dtype) -> None:
    model = deep(dtype)
    analysis = attribution(CONFIG, parts)
    trace = observe(model, batch(), analysis.reads, answers_only=True).trace
    found = analysis.compute(trace, batch(), model)
    torch.testing.assert_close(found["logits"].sum(1), found["total"], rtol=1e-4, atol=1e-4)
    with pytest.raises(IncompleteSumError):
        analysis.compute(lost(trace, f"blocks.{MIDDLE}.hook_mlp_out", ALL), batch(), model)
    inner = {"head": "attn.hook_z", "source": "attn.hook_pattern", "neuron": "mlp.hook_post"}.get(parts)
    if inner is not None:
        with pytest.raises(IncompleteSumError):
            analysis.compute(lost(trace, f"blocks.{MIDDLE}.{inner}", ALL), batch(), model)


@each_dtype
def test_scores_after_80_layers_sum_and_find_what_is_missing(dtype: torch.dtype) -> None:
    model, one = deep(dtype), Batch(TOKENS[:1])
    trace = observe(model, one, score_reads(model, [DEPTH - 1]), answers_only=True).trace
    for _, _, found in every_score(model, one, [DEPTH - 1], trace):
        every = found.pairs.sum((1, 2)) + found.position + found.rounding
        torch.testing.assert_close(every, found.total, rtol=1e-4, atol=1e-4)
    missing = {
        f"blocks.{MIDDLE}.hook_mlp_out": ALL,
        f"blocks.{MIDDLE}.attn.hook_z": (..., 2, slice(None)),
        f"blocks.{DEPTH - 1}.attn.hook_attn_scores": ALL,
    }
    for site, at in missing.items():
        with pytest.raises(IncompleteSumError):
            list(every_score(model, one, [DEPTH - 1], lost(trace, site, at)))


@each_dtype
def test_alti_logit_of_80_layers_sums_and_finds_what_is_missing(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, by_source = deep(dtype), attribution(CONFIG, "source")
    reads = (*by_source.reads, *layers_read(model, "alti", range(DEPTH - 1)))
    trace = observe(model, batch(), reads, answers_only=True).trace
    found = credited(model, batch(), trace, by_source)
    assert bool(found["error"].isfinite().all())
    with pytest.raises(IncompleteSumError):
        credited(model, batch(), lost(trace, f"blocks.{MIDDLE}.hook_mlp_out", ALL), by_source)
    monkeypatch.setattr("interp.tokens.alti_logit._groups", lambda config: {"initial": torch.zeros(0).long()})
    with pytest.raises(IncompleteSumError, match="ALTI-Logit: the parts miss the logits"):
        credited(model, batch(), trace, by_source)


@each_dtype
def test_orders_of_80_layers_sum_and_find_what_is_missing(dtype: torch.dtype) -> None:
    model = deep(dtype, BARE)
    trace = observe(model, Batch(TOKENS), frozen_reads(BARE)).trace
    parts, _ = order_logits(Frozen(model, trace))
    assert len(parts) == DEPTH + 1
    frozen = Frozen(model, trace)
    frozen.orders[1].zero_()  # cached: a term that is missing
    with pytest.raises(IncompleteSumError, match="logits by order"):
        order_logits(frozen)
    if dtype in residual.WIDE:
        with pytest.raises(IncompleteSumError, match="logits by order"):
            order_logits(Frozen(model, lost(trace, f"blocks.{MIDDLE}.attn.hook_pattern", ALL)))


def test_orders_of_cancelling_heads_are_bounded_by_their_rounding() -> None:
    """Two heads that write 3 000 times what is left of them, as trained ones do in part: nothing is refused for it."""
    config = replace(BARE, n_layers=3)
    model = perturbed(config, torch.float32)
    with torch.no_grad():
        for layer in range(config.n_layers):
            attn, e = model.block(layer).attn, config.d_head
            for rows in attn.qkv.weight.unflatten(0, (3, config.n_heads, e)):
                rows[1] = rows[0]
            for bias in [] if attn.qkv.bias is None else attn.qkv.bias.unflatten(0, (3, config.n_heads, e)):
                bias[1] = bias[0]
            attn.out.weight[:, :e] *= 3000
            attn.out.weight[:, e : 2 * e] = -attn.out.weight[:, :e] * (1 - 1 / 3000)
    trace = observe(model, Batch(TOKENS), frozen_reads(config)).trace
    frozen = Frozen(model, trace)
    parts, _ = order_logits(frozen)
    widest = frozen.orders.abs().amax(-1).sum(0)
    missed = (frozen.orders.sum(0) - frozen.again).abs().amax(-1)
    assert bool((missed > bound(len(parts), widest, torch.float32)).any()), "their sum alone says too little"
    frozen.orders[1].zero_()
    with pytest.raises(IncompleteSumError, match="logits by order"):
        order_logits(frozen)


def test_the_bound_holds_of_sums_of_any_length_in_any_order() -> None:
    """Of 400 sums each of 10 to 10 000 terms of one sign, where roundings are largest, added one after the other."""
    generator = torch.Generator().manual_seed(0)
    for n in (10, 100, 1000, 10_000):
        terms = torch.rand(n, 400, generator=generator)
        added = torch.zeros(400)
        for term in terms:
            added = added + term
        miss = (added.double() - terms.double().sum(0)).abs()
        assert bool((miss <= bound(n, terms.sum(0), torch.float32)).all())


def test_every_reading_of_one_recording_is_lost_with_it() -> None:
    read = Read("hook_embed")
    assert not lost(Trace({read: torch.ones(2)}), "hook_embed", ALL)[read].any()
