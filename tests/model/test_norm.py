"""The norms against their formulas, and the linear map that attribution uses in their place."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from interp.lab import NGPT
from interp.model import LayerNorm, NoNorm, RMSNorm, sites
from interp.model.norm import HeadNorm, Normalize
from tests.configs import CONFIGS, build
from tests.loops import over
from tests.model.observed import everything
from tests.tolerances import assert_close

NORMS = {
    "layer": LayerNorm(1e-2), "layer-gamma": LayerNorm(1e-2, trained="gamma"),
    "layer-nothing": LayerNorm(1e-2, trained="nothing"), "layer-offset": LayerNorm(1e-2, unit_offset=True),
    "rms": RMSNorm(1e-2),
    "rms-offset": RMSNorm(1e-2, unit_offset=True), "none": NoNorm(),
}  # fmt: skip
EACH = pytest.mark.parametrize("kind", NORMS.values(), ids=NORMS)


def norm_of(kind: LayerNorm | RMSNorm | NoNorm, d: int = 12) -> Normalize:
    norm = Normalize(kind, d, "ln1").double().requires_grad_(False)
    for parameter in norm.parameters():
        parameter.normal_()
    return norm


def stream(*shape: int) -> Tensor:
    return torch.randn(*shape, 12, dtype=torch.float64) * 3 + 1


def slow_scale(kind: LayerNorm | RMSNorm | NoNorm, row: Tensor) -> float:
    if isinstance(kind, NoNorm):
        return 1.0
    mean = sum(row.tolist()) / len(row) if isinstance(kind, LayerNorm) else 0.0
    return math.sqrt(sum((x - mean) ** 2 for x in row.tolist()) / len(row) + kind.eps)


def slow_gamma(norm: Normalize) -> Tensor | float:
    """What is stored, plus 1 where that is gamma - 1; 1 where nothing is."""
    offset = not isinstance(norm.kind, NoNorm) and norm.kind.unit_offset
    if norm.weight is None:
        return 1.0
    return offset + (norm.weight if norm.heads is None else torch.stack(norm.weight.split(norm.width)))


def norms_of_the_configs() -> Iterator[tuple[str, str]]:
    """Every config with each of its norms, of the layers block 1's; nGPT's blocks have formulas of their own."""
    for name, config in CONFIGS.items():
        for site in sites.names(config):
            prefix = site.removesuffix(".hook_scale")
            own = isinstance(config.block, NGPT) and ".ln" in prefix
            if prefix != site and not own and not prefix.startswith("blocks.0"):
                yield name, prefix


def read_by(name: str, prefix: str) -> Tensor:
    """What a norm reads, from the definition of its place."""
    model, config, seen, block = build(name), CONFIGS[name], everything(name), "blocks.1"
    part = prefix.removeprefix(f"{block}.")
    if part in ("ln_embed", "ln_final"):
        embeddings = [v for k, v in seen.items() if k in ("hook_embed", "hook_pos_embed", "hook_type_embed")]
        return torch.stack(embeddings).sum(0) if part == "ln_embed" else seen[f"{block}.hook_resid_post"]
    if part in ("attn.q_norm", "attn.k_norm"):
        heads = seen[f"{block}.attn.hook_{part[5]}"]
        return heads.flatten(2)[:, :, None] if config.qk_norm == "width" else heads
    if part == "ln1_post":
        return model.blocks[1].attn.out(seen[f"{block}.attn.hook_z"].flatten(2))
    if part == "ln2_post":
        return model.blocks[1].mlp.out(seen[f"{block}.mlp.hook_post"])
    sums = {"ln1": "hook_resid_mid" if config.mlp else "hook_resid_post", "ln2": "hook_resid_post"}
    plain = {"ln0": "hook_resid_pre", "ln1": "hook_resid_pre", "ln2": "hook_mlp_in"}
    if "mlp_before" in config.mlps:
        plain["ln1"] = "hook_resid_pre_attn"
    return seen[f"{block}.{(sums if config.norms_sum else plain)[part]}"]


@EACH
def test_the_norm_equals_its_formula(kind: LayerNorm | RMSNorm | NoNorm) -> None:
    norm, x = norm_of(kind), stream(5)
    for row, actual, scale in zip(x, norm(x), norm.scale(x), strict=True):
        assert scale.item() == pytest.approx(slow_scale(kind, row), rel=1e-12)
        if isinstance(kind, NoNorm):
            expected = row
        else:
            mean = row.mean() if isinstance(kind, LayerNorm) else 0.0
            gamma = slow_gamma(norm)
            expected = (row - mean) / slow_scale(kind, row) * gamma
            expected = expected if norm.bias is None else expected + norm.bias
        assert_close(actual, expected)


@EACH
def test_with_its_own_scale_the_affine_map_is_the_norm(kind: LayerNorm | RMSNorm | NoNorm) -> None:
    norm, x = norm_of(kind), stream(2, 5)
    assert_close(norm.linear(x, norm.scale(x)), norm(x))


@EACH
def test_frozen_parts_sum_to_the_whole_without_beta(kind: LayerNorm | RMSNorm | NoNorm) -> None:
    norm, parts = norm_of(kind), stream(4, 2, 5)
    whole = parts.sum(0)
    scale = norm.scale(whole)
    beta = 0.0 if norm.bias is None else norm.bias
    assert_close(norm.frozen(parts, scale).sum(0), norm(whole) - beta)


@EACH
def test_pull_back_is_the_transpose_of_frozen(kind: LayerNorm | RMSNorm | NoNorm) -> None:
    norm, part, direction = norm_of(kind), stream(2, 5), stream(2, 5)
    scale = norm.scale(stream(2, 5))
    there = (norm.frozen(part, scale) * direction).sum(-1)
    assert_close((part * norm.pull_back(direction, scale)).sum(-1), there)


@pytest.mark.parametrize("kind", [kind for kind in NORMS.values() if kind != NoNorm()], ids=repr)
def test_statistics_of_half_precision_streams_are_computed_in_float32(kind: LayerNorm | RMSNorm) -> None:
    """A mean of squares of 4096 ones stops growing at 256 when it is summed in bfloat16."""
    x = torch.ones(1, 4096, dtype=torch.bfloat16)
    x[:, ::2] = -1
    norm = Normalize(kind, 4096, "ln1").to(torch.bfloat16)
    assert norm.scale(x).dtype == torch.bfloat16
    assert norm.scale(x).item() == pytest.approx(1.0, rel=1e-2)
    assert_close(norm(x), x)


@over("name, prefix", list(norms_of_the_configs()))
def test_the_sites_of_a_norm_are_the_formula_on_what_stands_at_its_place(name: str, prefix: str) -> None:
    """hook_scale row by row, and hook_normalized = centred / scale * gamma + beta."""
    read, kind = read_by(name, prefix), CONFIGS[name].norm
    norm = build(name).get_submodule(prefix)
    norm = norm.norm if isinstance(norm, HeadNorm) else norm
    scale, normalized = (everything(name)[f"{prefix}.hook_{site}"] for site in ("scale", "normalized"))
    by_row = torch.tensor([slow_scale(kind, row) for row in read.flatten(0, -2)], dtype=torch.float64)
    assert_close(scale.flatten(), by_row)
    mean = read.mean(-1, keepdim=True) if isinstance(kind, LayerNorm) else 0.0
    gamma = slow_gamma(norm)
    expected = (read - mean) / scale * gamma + (0.0 if norm.bias is None else norm.bias)
    assert_close(normalized, expected.view_as(normalized))
