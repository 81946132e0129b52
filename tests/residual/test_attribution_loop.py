"""Every part of an attribution, again, from the formulas: one prompt, one part at a time.

c . ((x - mean x) / sigma * gamma), sigma that of the whole final residual, c the difference of two unembedding columns
times the factor on the logits; x is the part as it stands at the end of the stream (`slow_parts`).
"""

import functools
from collections.abc import Callable

import pytest
import torch
import xarray as xr
from torch import Tensor

import interp
from interp import HookedTransformer
from interp.model import MLP
from tests.configs import CONFIGS, build, perturbed, some_tokens
from tests.loops import over
from tests.model.observed import everything
from tests.residual import slow_parts
from tests.residual.slow_parts import bias_of, pushed, written
from tests.tolerances import assert_close

ANSWER, WRONG, ROW = 14, 1, 1
MODELS = (
    "gpt2", "llama-gqa", "attention-only", "parallel", "no-norm", "no-final-norm", "rms-plain", "gemma2", "gemma3",
    "olmo2", "post-norm", "bloom", "t5", "gpt-oss", "granite-moe", "macaron",
)  # fmt: skip
EVERY = pytest.mark.parametrize("name", MODELS)
Columns = dict[str, Tensor]


@functools.cache
def model(name: str) -> HookedTransformer:
    return HookedTransformer(build(name))


@functools.cache
def column(name: str) -> Tensor:
    """The direction of the logit difference after the final norm."""
    return (model(name).W_U[:, ANSWER] - model(name).W_U[:, WRONG]) * CONFIGS[name].logit_scale


@functools.cache
def end_of_stream(name: str) -> Tensor:
    return build(name)(some_tokens(), stop=2)[ROW]


def contribution(name: str, part: Tensor, direction: Tensor | None = None, pos: int = -1) -> float:
    """The formula above, for a part `[row, pos, d]` of the stream at its end; or another direction after the norm."""
    norm = model(name).transformer.ln_final
    part = slow_parts.frozen(norm, part[ROW, pos], end_of_stream(name)[pos])
    return float(part @ (column(name) if direction is None else direction))


def beta_of(name: str, layer: int, sublayer: str) -> Columns:
    """The beta of the norm of the sum after a sublayer, where there is one."""
    label = f"L{layer}.{'ln1' if sublayer == 'attn_out' else 'ln2'}_bias"
    betas = slow_parts.betas(name)
    return {label: betas[label]} if label in betas else {}


def sublayers_of(name: str, layer: int) -> Columns:
    parts: Columns = {}
    for sublayer in CONFIGS[name].sublayers:
        label = f"L{layer}.{sublayer.removesuffix('_out')}"
        parts |= {label: slow_parts.sublayers(name)[label]} | beta_of(name, layer, sublayer)
    return parts


def split(name: str, layer: int, sublayer: str, pieces: Columns) -> Columns:
    """Pieces of a sublayer's bare output, and its bias, at the end of the stream."""
    place = (layer, slow_parts.SUBLAYERS[sublayer])
    bias = f"L{layer}.{sublayer.removesuffix('_out')}_bias"
    pieces = pieces | {bias: bias_of(name, layer, sublayer).expand(3, 9, -1)}
    return {
        label: pushed(name, written(name, layer, sublayer, piece), place) for label, piece in pieces.items()
    }


def with_heads(name: str, layer: int) -> Columns:
    z, W_O = everything(name)[f"blocks.{layer}.attn.hook_z"], model(name).W_O[layer]
    heads = split(name, layer, "attn_out", {f"L{layer}H{h}": z[:, :, h] @ W_O[h] for h in range(4)})
    whole = {k: v for k, v in sublayers_of(name, layer).items() if not k.endswith(".attn")}
    return heads | whole


def with_neurons(name: str, layer: int) -> Columns:
    parts = {k: v for k, v in sublayers_of(name, layer).items() if ".mlp" not in k}
    for sublayer, letter in (("mlp_out", "N"), ("mlp_before_out", "B")):
        if sublayer in CONFIGS[name].sublayers:
            mlp = sublayer.removesuffix("_out")
            post = everything(name)[f"blocks.{layer}.{mlp}.hook_post"]
            W_out = getattr(build(name).block(layer), mlp).out.weight.T
            pieces = {f"L{layer}{letter}{u}": post[:, :, u, None] * W_out[u] for u in range(post.shape[-1])}
            parts |= split(name, layer, sublayer, pieces)
    return parts


def whole_layer(name: str, layer: int) -> Columns:
    return {f"L{layer}": torch.stack(list(sublayers_of(name, layer).values())).sum(0)}


GRAINS: dict[str, Callable[[str, int], Columns]] = {
    "layer": whole_layer,
    "sublayer": sublayers_of,
    "head": with_heads,
    "source": with_heads,
    "neuron": with_neurons,
}


def every_part(name: str, grain: str) -> Columns:
    """All components but the final bias, at the end of the stream."""
    parts = slow_parts.sublayers(name)
    parts = {
        label: part for label, part in parts.items() if label.partition("_")[0] in ("embed", "pos", "type")
    }
    for layer in range(2):
        parts |= GRAINS[grain](name, layer)
    return parts


def columns(result: xr.Dataset) -> dict[str, float]:
    """The only prompt's value of every component; the formulas have no rounding."""
    found = dict(zip(result.part.values.tolist(), result.value.values[0].tolist(), strict=True))
    assert abs(found.pop("rounding")) < 1e-10
    return found


@EVERY
@over("parts", GRAINS)
def test_every_component_equals_its_formula(name: str, parts: str) -> None:
    if parts == "neuron" and not isinstance(CONFIGS[name].mlp, MLP):
        return
    result = interp.attribute(model(name), some_tokens()[ROW], ANSWER, WRONG, parts=parts)  # type: ignore[arg-type]
    expected = {label: contribution(name, part) for label, part in every_part(name, parts).items()}
    found = columns(result)
    constant = found.pop("final_bias")
    assert found == pytest.approx(expected, abs=1e-10)
    weights, beta = model(name), model(name).transformer.ln_final.bias
    bias = float(weights.b_U[ANSWER] - weights.b_U[WRONG]) * CONFIGS[name].logit_scale
    assert constant == pytest.approx(bias + (0.0 if beta is None else float(beta @ column(name))), abs=1e-12)


@EVERY
@over("parts, pos", [("layer", -4), ("head", 5), ("neuron", 0), ("sublayer", -1)])
def test_on_any_direction_and_at_any_position_too(name: str, parts: str, pos: int) -> None:
    """Of the whole prompt's activations, the tokens after the position included; gamma and beta as in the formula."""
    if parts == "neuron" and not isinstance(CONFIGS[name].mlp, MLP):
        return
    direction = torch.randn(24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    result = interp.attribute(model(name), some_tokens()[ROW], direction, parts=parts, pos=pos)  # type: ignore[arg-type]
    every = every_part(name, parts)
    expected = {label: contribution(name, part, direction, pos) for label, part in every.items()}
    beta = model(name).transformer.ln_final.bias
    expected["final_bias"] = 0.0 if beta is None else float(beta @ direction)
    assert columns(result) == pytest.approx(expected, abs=1e-10)
    assert float(result.total[0]) == pytest.approx(sum(expected.values()), abs=1e-10)


@EVERY
def test_every_source_of_every_head_equals_its_formula(name: str) -> None:
    """a_j (v_j W_O), pushed through the same frozen norms."""
    result = interp.attribute(model(name), some_tokens()[ROW], ANSWER, WRONG, parts="source")
    group = CONFIGS[name].n_heads // CONFIGS[name].kv_heads
    for layer in range(2):
        pattern, v = (everything(name)[f"blocks.{layer}.attn.hook_{part}"] for part in ("pattern", "v"))
        W_O = model(name).W_O[layer]
        for head in range(4):
            moved = v[:, :, head // group] @ W_O[head]
            for source in range(9):
                piece = pattern[:, head, :, source, None] * moved[:, source, None]
                part = pushed(name, written(name, layer, "attn_out", piece), (layer, 0))
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
    assert float(abs(result.value).max()) < 50
    assert float(network(some_tokens())[:, -1, ANSWER].abs().min()) > 1e4
    cache = subject.run_with_cache(some_tokens())[1]
    answer, wrong = torch.full((3,), ANSWER), torch.full((3,), WRONG)
    parts = cache.logit_attrs(cache.decompose_resid(), answer, wrong)
    assert_close(parts.values.mT, torch.tensor(result.value.values[:, :-1]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_caches_attribution_in_half_precision_is_that_of_the_function(dtype: torch.dtype) -> None:
    subject = HookedTransformer(build("gpt2", dtype))
    fused = ["*embed", "blocks.*.hook_attn_out", "blocks.*.hook_mlp_out", "blocks.*.hook_resid_post"]
    cache = subject.run_with_cache(some_tokens(), fused)[1]
    found = cache.logit_attrs(cache.decompose_resid(), torch.full((3,), ANSWER), torch.full((3,), WRONG))
    assert found.values.dtype == torch.float32
    given = interp.attribute(subject, some_tokens(), ANSWER, WRONG)
    assert_close(found.values.mT, torch.tensor(given.value.values[:, :-1]))
    assert found.rounding is not None and given.part.values[-1] == "rounding"
    assert_close(found.rounding, torch.tensor(given.value.values[:, -1]))
