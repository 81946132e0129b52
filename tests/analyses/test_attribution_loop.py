"""Every component of an attribution, again, from the formulas: one prompt, one component at a time.

c . ((x - mean x) / sigma * gamma), sigma that of the whole final residual, c the difference of two unembedding columns.
"""

import functools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import interp
from interp import ActivationCache, HookedTransformer
from interp.model import LayerNorm, NoNorm
from tests.configs import CONFIGS, build, perturbed, some_tokens
from tests.tolerances import assert_close

ANSWER, WRONG, ROW = 14, 1, 1
MODELS = ("gpt2", "llama-gqa", "attention-only", "parallel", "no-norm", "no-final-norm", "rms-plain")
EVERY = pytest.mark.parametrize("name", MODELS)


@functools.cache
def cached(name: str) -> ActivationCache:
    return HookedTransformer(build(name)).run_with_cache(some_tokens()[ROW])[1]


@functools.cache
def model(name: str) -> HookedTransformer:
    return HookedTransformer(build(name))


def contribution(name: str, part: Tensor) -> float:
    """The formula above, for one vector `[d]`."""
    config, weights = CONFIGS[name], model(name)
    column = weights.W_U[:, ANSWER] - weights.W_U[:, WRONG]
    whole = cached(name)["resid_post", 1][0, -1]
    if isinstance(config.norm, NoNorm) or not config.final_norm:
        return float(part @ column)
    if isinstance(config.norm, LayerNorm):
        part, whole = part - part.mean(), whole - whole.mean()
    sigma = math.sqrt(float(whole.square().mean()) + config.norm.eps)
    return float((part / sigma * weights.transformer.ln_final.weight) @ column)


def last(name: str, site: str, layer: int) -> Tensor:
    return cached(name)[site, layer][0, -1]


def heads_of(name: str, layer: int) -> dict[str, Tensor]:
    z, weights = last(name, "z", layer), model(name)
    parts = {f"L{layer}H{h}": z[h] @ weights.W_O[layer, h] for h in range(4)}
    return {**parts, f"{layer}_attn_bias": weights.b_O[layer]}


def sublayers_of(name: str, layer: int) -> dict[str, Tensor]:
    parts = {f"{layer}_attn_out": last(name, "attn_out", layer)}
    return parts | ({f"{layer}_mlp_out": last(name, "mlp_out", layer)} if CONFIGS[name].mlp else {})


def with_heads(name: str, layer: int) -> dict[str, Tensor]:
    return heads_of(name, layer) | {k: v for k, v in sublayers_of(name, layer).items() if "mlp" in k}


def with_neurons(name: str, layer: int) -> dict[str, Tensor]:
    post, weights = last(name, "post", layer), model(name)
    neurons = {f"L{layer}N{u}": post[u] * weights.W_out[layer, u] for u in range(len(post))}
    return {
        f"{layer}_attn_out": last(name, "attn_out", layer),
        **neurons,
        f"{layer}_mlp_bias": weights.b_out[layer],
    }


def whole_layer(name: str, layer: int) -> dict[str, Tensor]:
    return {f"{layer}_block": torch.stack(list(sublayers_of(name, layer).values())).sum(0)}


GRAINS: dict[str, Callable[[str, int], dict[str, Tensor]]] = {
    "layer": whole_layer,
    "sublayer": sublayers_of,
    "head": with_heads,
    "source": with_heads,
    "neuron": with_neurons,
}


@EVERY
@pytest.mark.parametrize("by", GRAINS)
def test_every_component_equals_its_formula(name: str, by: str) -> None:
    if by == "neuron" and CONFIGS[name].mlp is None:
        return
    result = interp.attribute(model(name), some_tokens()[ROW], ANSWER, WRONG, by=by)  # type: ignore[arg-type]
    parts = {"embed": cached(name)["hook_embed"][0, -1]}
    if "hook_pos_embed" in cached(name):
        parts["pos_embed"] = cached(name)["hook_pos_embed"][0, -1]
    for layer in range(2):
        parts |= GRAINS[by](name, layer)
    expected = {label: contribution(name, part) for label, part in parts.items()}
    found = dict(zip(result.component.values.tolist(), result.logits.values[0].tolist(), strict=True))
    constant = found.pop("final_bias")
    assert found == pytest.approx(expected, abs=1e-10)
    weights, beta = model(name), model(name).transformer.ln_final.bias
    column = weights.W_U[:, ANSWER] - weights.W_U[:, WRONG]
    bias = float(weights.b_U[ANSWER] - weights.b_U[WRONG]) + (0.0 if beta is None else float(beta @ column))
    assert constant == pytest.approx(bias, abs=1e-12)


@EVERY
def test_every_source_of_every_head_equals_its_formula(name: str) -> None:
    """a_j (v_j W_O), pushed through the same frozen norm."""
    result = interp.attribute(model(name), some_tokens()[ROW], ANSWER, WRONG, by="source")
    group = CONFIGS[name].n_heads // CONFIGS[name].kv_heads
    for layer in range(2):
        pattern, v = cached(name)["pattern", layer][0, :, -1], cached(name)["v", layer][0]
        for head in range(4):
            for source in range(9):
                part = pattern[head, source] * (v[source, head // group] @ model(name).W_O[layer, head])
                got = float(result.by_source.values[0, layer, head, source])
                assert got == pytest.approx(contribution(name, part), abs=1e-10)


def test_a_common_part_of_both_logits_raises_no_false_alarm() -> None:
    """Two unembedding columns that nearly agree: large logits, a small difference, float32 rounding of the large."""
    torch.manual_seed(0)
    network = perturbed(CONFIGS["gpt2"], torch.float32)
    network.ln_final.bias.fill_(1.0)
    network.unembed.weight[[ANSWER, WRONG]] += 1000.0
    subject = HookedTransformer(network)
    result = interp.attribute(subject, some_tokens(), ANSWER, WRONG)
    assert float(abs(result.logits).max()) < 50
    assert float(network(some_tokens())[:, -1, ANSWER].abs().min()) > 1e4
    cache = subject.run_with_cache(some_tokens())[1]
    answer, wrong = torch.full((3,), ANSWER), torch.full((3,), WRONG)
    parts = cache.logit_attrs(cache.decompose_resid(), answer, wrong)
    assert_close(parts.values.mT, torch.tensor(result.logits.values))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_caches_attribution_of_a_half_precision_model_is_that_of_the_door(dtype: torch.dtype) -> None:
    subject = HookedTransformer(build("gpt2", dtype))
    fused = ["*embed", "blocks.*.hook_attn_out", "blocks.*.hook_mlp_out", "blocks.*.hook_resid_post"]
    cache = subject.run_with_cache(some_tokens(), fused)[1]
    found = cache.logit_attrs(cache.decompose_resid(), torch.full((3,), ANSWER), torch.full((3,), WRONG))
    assert found.values.dtype == torch.float32
    door = interp.attribute(subject, some_tokens(), ANSWER, WRONG)
    assert_close(found.values.mT, torch.tensor(door.logits.values))
