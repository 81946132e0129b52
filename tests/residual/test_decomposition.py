"""The residual stream taken apart: every decomposition sums, on every config, and says so when it does not."""

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from torch import Tensor
from torch.autograd.profiler import profile

from interp import HookedTransformer, Part
from interp.model import MLP, MoE
from interp.residual import ActivationCache, IncompleteSumError, decomposition as residual
from tests.configs import CONFIGS, build, perturbed, some_tokens
from tests.loops import over
from tests.model.observed import everything
from tests.residual import slow_parts
from tests.tolerances import assert_close

WITH_NEURONS = [name for name, config in CONFIGS.items() if isinstance(config.mlp, MLP)]


@functools.cache
def cached(name: str, dtype: torch.dtype = torch.float64) -> ActivationCache:
    return HookedTransformer(build(name, dtype)).run_with_cache(some_tokens())[1]


def tampered(cache: ActivationCache, site: str) -> ActivationCache:
    return ActivationCache({**cache, site: cache[site] * 1.01}, cache.model)


@over("name", CONFIGS)
@over("depth", [0, 1, 2])
def test_sublayers_sum_to_the_stream_at_every_depth(name: str, depth: int) -> None:
    cache = cached(name)
    parts = cache.decompose_resid(depth)
    assert_close(parts.values.sum(0), residual.stream(cache, cache.model, depth))
    assert parts.complete == (depth == 2)


@over("name", CONFIGS)
@over("depth", [1, 2])
def test_every_part_of_the_stream_equals_its_formula(name: str, depth: int) -> None:
    """Each pushed through the norms behind it one by one, at the statistics of the stream that stood there."""
    parts, expected = cached(name).decompose_resid(depth), slow_parts.sublayers(name, depth)
    assert set(parts.parts) == set(expected)
    for label, value in expected.items():
        assert_close(parts[label], value)


@over("name", CONFIGS)
@over("depth", [1, 2])
def test_heads_and_remainder_sum_to_the_stream(name: str, depth: int) -> None:
    cache = cached(name)
    parts = cache.stack_head_results(depth)
    assert parts.parts == (*(f"L{i}H{h}" for i in range(depth) for h in range(4)), "remainder")
    assert_close(parts.values.sum(0), residual.stream(cache, cache.model, depth))


@pytest.mark.parametrize("name", CONFIGS)
@over("dtype", [torch.bfloat16, torch.float16])
def test_heads_of_a_half_precision_model_sum_to_its_stream(name: str, dtype: torch.dtype) -> None:
    found, cache = cached(name, dtype).stack_head_results(), cached(name, dtype)
    assert found.values.dtype == torch.float32 and found.rounding is not None
    whole = residual.stream(cache, cache.model, None).float()
    torch.testing.assert_close(found.values.sum(0) + found.rounding, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
@over("layer, pos", [(0, 8), (1, 5)])
def test_head_writes_equal_a_loop_over_heads_and_sources(name: str, layer: int, pos: int) -> None:
    """a_ij v_j W_O, through the norm and the factor of attention's output; in the whole also through later norms."""
    cache = cached(name)
    W_O = HookedTransformer(cache.model).W_O[layer]
    group = cache.model.config.n_heads // cache.model.config.kv_heads
    pattern, v = cache["pattern", layer], cache["v", layer]
    moved, whole = cache.head_source_results(layer, pos), cache.stack_head_results()
    for h in range(4):
        pieces = [pattern[:, h, pos, k, None] * (v[:, k, h // group] @ W_O[h]) for k in range(9)]
        for k, piece in enumerate(pieces):
            assert_close(moved[h, k], slow_parts.written(name, layer, "attn_out", piece, pos))
        result = everything(name)[f"blocks.{layer}.attn.hook_result"][:, :, h]
        assert_close(sum(pieces), result[:, pos])  # type: ignore[arg-type]
        written = slow_parts.written(name, layer, "attn_out", result)
        assert_close(whole[f"L{layer}H{h}"], slow_parts.pushed(name, written, (layer, 0)))


@over("name", WITH_NEURONS)
def test_neurons_and_their_bias_sum_to_the_mlp(name: str) -> None:
    cache = cached(name)
    parts = cache.stack_neuron_results(0, pos=3)
    assert parts.parts[-1] == "L0.mlp_bias" and parts.parts[7] == "L0N7"
    assert_close(parts.values.sum(0), cache["mlp_out", 0][:, 3])
    w_out = HookedTransformer(cache.model).W_out[0]
    alone = cache["post", 0][:, 3, 7, None] * w_out[7]
    assert_close(parts["L0N7"], slow_parts.written(name, 0, "mlp_out", alone, 3))


def test_neurons_of_the_first_mlp_of_a_macaron_block_sum_to_its_half() -> None:
    cache = cached("macaron")
    parts = cache.stack_neuron_results(1, pos=3, before=True)
    assert parts.parts[7] == "L1B7" and parts.parts[-1] == "L1.mlp_before_bias"
    assert_close(parts.values.sum(0), cache["mlp_before_out", 1][:, 3])
    first = cache.model.block(1).mlp_before
    post = cache["blocks.1.mlp_before.hook_post"][:, 3, 7, None]
    assert_close(parts["L1B7"], 0.7 / 2 * post * first.out.weight[:, 7])
    with pytest.raises(ValueError, match="no MLP before attention"):
        cached("gpt2").stack_neuron_results(1, before=True)


@pytest.mark.parametrize("name", ["gpt-oss", "granite-moe"])
def test_neurons_of_experts_have_no_write_of_their_own(name: str) -> None:
    assert isinstance(CONFIGS[name].mlp, MoE)
    with pytest.raises(
        KeyError, match="no neurons that write on their own: this model is a mixture of experts"
    ):
        cached(name).stack_neuron_results(0)


@over("name", CONFIGS)
@over("contrast", [False, True])
def test_logit_attributions_of_complete_parts_sum_to_the_models_logits(name: str, contrast: bool) -> None:
    cache, answer = cached(name), torch.tensor([3, 14, 7])
    wrong = torch.tensor([5, 1, 30]) if contrast else None
    if CONFIGS[name].mlm_head:
        with pytest.raises(ValueError, match="computes its logits by a non-linear masked-LM head"):
            cache.logit_attrs(cache.decompose_resid(), answer, wrong, pos=4)
        return
    cap = CONFIGS[name].logit_softcap
    logits = cache.model(some_tokens())[:, 4]
    logits = logits if cap is None else cap * (logits / cap).atanh()
    whole = logits.gather(1, answer[:, None])[:, 0]
    whole = whole if wrong is None else whole - logits.gather(1, wrong[:, None])[:, 0]
    for parts in (cache.decompose_resid(), cache.stack_head_results()):
        found = cache.logit_attrs(parts, answer, wrong, pos=4)
        assert found.parts[-1] == "final_bias"
        assert_close(found.values.sum(0), whole)


@over("name", CONFIGS)
def test_frozen_norm_of_the_parts_sums_to_the_normed_stream_without_beta(name: str) -> None:
    cache = cached(name)
    model = cache.model
    normed = cache.apply_ln_to_stack(cache.decompose_resid().values).sum(0)
    beta = torch.zeros(24) if model.ln_final.bias is None else model.ln_final.bias
    assert_close(normed + beta, model.ln_final(model(some_tokens(), stop=2)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_error_of_a_sum_is_within_the_promised_tolerance(dtype: torch.dtype) -> None:
    cache = cached("gpt2", dtype)
    error = residual.sum_error(cache.decompose_resid().values, cache["resid_post", 1])
    assert error <= {torch.float32: 1e-6, torch.float64: 1e-14}[dtype] * 2


@pytest.mark.parametrize(
    ("site", "call"),
    [
        ("blocks.0.hook_attn_out", lambda c: c.decompose_resid()),
        ("blocks.1.attn.hook_z", lambda c: c.stack_head_results()),
        ("blocks.1.attn.hook_pattern", lambda c: c.head_source_results(1)),
        ("blocks.1.mlp.hook_post", lambda c: c.stack_neuron_results(1)),
    ],
)
def test_a_changed_activation_is_caught_by_the_sum(site: str, call) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(IncompleteSumError, match="miss the whole"):
        call(tampered(cached("gpt2"), site))


def test_nan_never_passes_for_a_sum() -> None:
    parts: Tensor = torch.tensor([[1.0], [torch.nan]])
    with pytest.raises(IncompleteSumError):
        residual.check_sum(parts, torch.tensor([1.0]), "a sum")


def test_accumulated_states_are_the_cached_stream_with_and_without_middles() -> None:
    cache = cached("gpt2")
    plain, full = cache.accumulated_resid(), cache.accumulated_resid(incl_mid=True)
    assert plain.parts == ("L0.resid", "L1.resid", "L1.resid_post")
    assert full.parts == ("L0.resid", "L0.resid_mid", "L1.resid", "L1.resid_mid", "L1.resid_post")
    assert_close(full["L1.resid_mid"], cache["resid_mid", 1])
    assert cached("parallel").accumulated_resid(incl_mid=True).parts == plain.parts
    assert cached("gpt2").accumulated_resid(1).parts == ("L0.resid", "L1.resid")


def test_accessors_work_without_the_batch_axis() -> None:
    model = HookedTransformer(build("gpt2"))
    cache = model.run_with_cache(some_tokens(rows=1))[1]
    bare = cache.remove_batch_dim()
    assert bare["pattern", 0].shape == (4, 9, 9)
    assert_close(bare.decompose_resid().values, cache.decompose_resid().values)
    with pytest.raises(ValueError, match="one row only"):
        cached("gpt2").remove_batch_dim()


def test_names_that_were_not_recorded_are_refused_with_the_nearest() -> None:
    cache = HookedTransformer(build("gpt2")).run_with_cache(some_tokens(), "blocks.*.attn.hook_z")[1]
    with pytest.raises(KeyError, match=r"hook_pattern.*nearest: .*hook_z"):
        cache["pattern", 0]
    with pytest.raises(KeyError, match="layers are 0 to 1"):
        cache["z", 2]
    with pytest.raises(IndexError, match="depths between blocks are 0 to 2"):
        cached("gpt2").decompose_resid(3)
    with pytest.raises(KeyError, match="attention-only"):
        cached("attention-only").stack_neuron_results(0)


def test_a_huge_position_hides_no_error_elsewhere() -> None:
    parts = torch.ones(2, 1, 3, 4)
    parts[:, :, 0] = 1e6
    whole = parts.sum(0)
    whole[0, 2, 1] += 0.01
    assert residual.sum_error(parts, whole) == pytest.approx(0.01 / 2.01, rel=1e-3)


def test_part_is_found_under_every_spelling_and_unknown_ones_are_named() -> None:
    cache = cached("gpt2")
    heads, sublayers = cache.stack_head_results(), cache.decompose_resid()
    for spelling in ("L0H3", "a0.h3", (0, 3), Part("head", 0, 3)):
        assert torch.equal(heads[spelling], heads.values[3])
    for spelling in ("L1.mlp", "1_mlp_out", "blocks.1.hook_mlp_out"):
        assert torch.equal(sublayers[spelling], sublayers.values[-1])
    assert torch.equal(heads["remainder"], heads.values[-1])
    with pytest.raises(KeyError, match=r"no part 'L0\.mlp' here; parts: L0H0, L0H1"):
        heads["L0.mlp"]
    with pytest.raises(KeyError, match="no part 'no_part'"):
        heads["no_part"]


def test_every_name_of_a_part_is_the_canonical_one() -> None:
    for name in CONFIGS:
        cache = cached(name)
        every = [*cache.decompose_resid().parts, *cache.stack_head_results().parts[:-1]]
        every += cache.accumulated_resid(incl_mid=True).parts
        assert every == [str(Part.of(part)) for part in every]


def test_parts_are_held_once_beside_the_result() -> None:
    """Twice the parts of the stream live at once, as the allocator counts; four times when sums were of copies."""
    model = HookedTransformer(perturbed(replace(CONFIGS["llama-gqa"], n_layers=12, n_ctx=256)))
    cache = model.run_with_cache(torch.arange(256)[None] % 30)[1]
    with profile(profile_memory=True) as profiler:
        found = cache.stack_head_results()
    events = (e for e in profiler.kineto_results.events() if e.name() == "[memory]")
    changes = [change for _, change in sorted((e.start_ns(), e.nbytes()) for e in events)]
    living = max(accumulate(changes))
    of_one = found.values[0].nbytes
    parts = 1 + 12 * (CONFIGS["llama-gqa"].n_heads + 2)  # heads, their bias and the MLP of a layer
    assert len(found.parts) * of_one < living < 2.2 * parts * of_one


@pytest.mark.kinds
def test_the_methods_of_a_cache_refuse_in_words_what_the_pass_has_not() -> None:
    model = HookedTransformer.from_pretrained("demo-mlp-2l")
    cache = model.run_with_cache("When Mary and John went")[1]
    n, parts = cache["blocks.0.hook_resid_pre"].shape[1], cache.decompose_resid()
    refused: dict[str, Callable[[], object]] = {
        f"pos must be one of {n} positions, {-n} to {n - 1}, got 99": lambda: cache.stack_neuron_results(
            1, pos=99
        ),
        f"pos must be one of {n} positions, {-n} to {n - 1}, got -99": lambda: cache.head_source_results(
            1, pos=-99
        ),
        "head_source_results: pos must be int, got True": lambda: cache.head_source_results(1, pos=True),
        "answer must be one token in [0, 1023] for each of 1 rows, got Tensor": lambda: cache.logit_attrs(
            parts, torch.tensor([5, 6])
        ),
        "answer must be one token in [0, 1023] for each of 1 rows, got [1024]": lambda: cache.logit_attrs(
            parts, torch.tensor([1024])
        ),
        "wrong must be one token in [0, 1023]": lambda: cache.logit_attrs(
            parts, torch.tensor([5]), torch.tensor([5, 6])
        ),
        "logit_attrs: answer must be": lambda: cache.logit_attrs(parts, " Mary"),
        "stack must be parts of the stream": lambda: cache.apply_ln_to_stack(torch.ones(2, 1, 3, 7)),
        "decompose_resid: layer must be": lambda: cache.decompose_resid("x"),
    }
    for words, ask in refused.items():
        with pytest.raises(ValueError, match=re.escape(words)):
            ask()
    for key in (0, None, ("pattern",), ("pattern", 1.5), ("k", 3, 4), ("pattern", True)):
        with pytest.raises(KeyError, match="a site's name or its shorthand is required"):
            cache[key]
    assert 0 not in cache and ("pattern", 0) in cache
