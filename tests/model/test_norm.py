"""The norms against their formulas, and the linear map that attribution uses in their place."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from interp.model import LayerNorm, NoNorm, Read, RMSNorm, Tap
from interp.model.norm import Normalize
from tests.configs import CONFIGS, build, some_tokens
from tests.tolerances import assert_close

NORMS = [LayerNorm(1e-2), RMSNorm(1e-2), NoNorm()]
EACH = pytest.mark.parametrize("kind", NORMS, ids=lambda kind: type(kind).__name__)


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


def norms_of_the_configs() -> Iterator[tuple[str, str]]:
    """Every config with each of its norms."""
    for name, config in CONFIGS.items():
        if not isinstance(config.norm, NoNorm):
            yield name, "ln1"
            if config.mlp is not None:
                yield name, "ln2"
            if config.final_norm:
                yield name, "ln_final"


@EACH
def test_the_norm_equals_its_formula(kind: LayerNorm | RMSNorm | NoNorm) -> None:
    norm, x = norm_of(kind), stream(5)
    for row, actual, scale in zip(x, norm(x), norm.scale(x), strict=True):
        assert scale.item() == pytest.approx(slow_scale(kind, row), rel=1e-12)
        if isinstance(kind, NoNorm):
            expected = row
        else:
            mean = row.mean() if isinstance(kind, LayerNorm) else 0.0
            expected = (row - mean) / slow_scale(kind, row) * norm.weight
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


@pytest.mark.parametrize("kind", NORMS[:2], ids=lambda kind: type(kind).__name__)
def test_statistics_of_half_precision_streams_are_computed_in_float32(kind: LayerNorm | RMSNorm) -> None:
    """A mean of squares of 4096 ones stops growing at 256 when it is summed in bfloat16."""
    x = torch.ones(1, 4096, dtype=torch.bfloat16)
    x[:, ::2] = -1
    norm = Normalize(kind, 4096, "ln1").to(torch.bfloat16)
    assert norm.scale(x).dtype == torch.bfloat16
    assert norm.scale(x).item() == pytest.approx(1.0, rel=1e-2)
    assert_close(norm(x), x)


@pytest.mark.parametrize(("name", "part"), list(norms_of_the_configs()))
def test_the_sites_of_a_norm_fit_together(name: str, part: str) -> None:
    """hook_normalized = the affine map of what the norm read, at hook_scale; eps, gamma and beta included."""
    model = build(name)
    prefix = part if part == "ln_final" else f"blocks.1.{part}"
    source = {
        "ln1": "blocks.1.hook_resid_pre",
        "ln2": "blocks.1.hook_mlp_in",
        "ln_final": "blocks.1.hook_resid_post",
    }
    tap = Tap([Read(source[part]), Read(f"{prefix}.hook_scale"), Read(f"{prefix}.hook_normalized")])
    model(some_tokens(), tap)
    read, scale, normalized = (tap.values[r] for r in tap.reads)
    norm = model.get_submodule(prefix)
    assert_close(scale, norm.scale(read))
    assert_close(normalized, norm.linear(read, scale))
