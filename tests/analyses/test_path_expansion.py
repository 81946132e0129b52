"""A two-layer attention-only model with frozen patterns is a sum of paths (Elhage et al. 2021): the framework, checked.

Row convention: a head is A x OV, and the logits are the direct path, every head alone, and every pair of heads.
"""

import functools

import pytest
import torch
from torch import Tensor

from interp import Edit, FactoredMatrix, HookedTransformer, Read, observe
from interp.engine.batch import Batch
from interp.model import ModelConfig, NoNorm
from tests.configs import perturbed, some_tokens
from tests.tolerances import assert_close

H = 12
CONFIG = ModelConfig(
    2,
    24,
    H,
    16,
    31,
    d_head=6,
    norm=NoNorm(),
    final_norm=False,
    qkv_bias=False,
    out_bias=False,
    attn_scale=0.3,
)
PATTERNS = tuple(f"blocks.{layer}.attn.hook_pattern" for layer in range(2))
BATCH = Batch(some_tokens(rows=2, n=8))


@functools.cache
def model() -> HookedTransformer:
    torch.manual_seed(0)
    return HookedTransformer(perturbed(CONFIG))


@functools.cache
def patterns() -> tuple[Tensor, Tensor]:
    """What every head attends to in the plain run, `[b h q k]` for each layer."""
    cache = model().run_with_cache(BATCH, PATTERNS)[1]
    return cache[PATTERNS[0]], cache[PATTERNS[1]]


@functools.cache
def embedding() -> Tensor:
    cache = model().run_with_cache(BATCH, ["hook_embed", "hook_pos_embed"])[1]
    return cache["hook_embed"] + cache["hook_pos_embed"]


def moved(layer: int, head: int, x: Tensor) -> Tensor:
    """What one head writes when it reads `x`: A x W_V W_O, through the factors."""
    circuit = model().OV[layer, head]
    return patterns()[layer][:, head] @ (x @ circuit.A @ circuit.B)


def to_logits(x: Tensor) -> Tensor:
    return x @ model().W_U


def direct() -> Tensor:
    return to_logits(embedding())


def single() -> Tensor:
    """The sum of all terms with one head."""
    return to_logits(sum(moved(layer, h, embedding()) for layer in range(2) for h in range(H)))  # type: ignore[arg-type]


def virtual() -> Tensor:
    """The sum of all terms with two heads: pattern A1 A0, matrix OV0 OV1."""
    total = torch.zeros_like(embedding())
    for first in range(H):
        for second in range(H):
            pattern = patterns()[1][:, second] @ patterns()[0][:, first]
            circuit = model().OV[0, first] @ model().OV[1, second]
            assert isinstance(circuit, FactoredMatrix)
            total = total + pattern @ (embedding() @ circuit.A @ circuit.B)
    return to_logits(total)


def test_the_direct_path_the_heads_and_the_virtual_heads_sum_to_the_logits() -> None:
    """1 + 24 + 144 terms, below 1e-10 in float64."""
    logits = model()(BATCH)
    assert (direct() + single() + virtual() - logits).abs().max() < 1e-10
    for part in (direct(), single(), virtual()):
        assert part.abs().max() > 1e-2, "no order is negligible in a random model"


def rerun(writes: list[Tensor] | None) -> tuple[Tensor, list[Tensor]]:
    """Logits with frozen patterns and each attention's addition replaced (None: by 0), and what it would have been."""
    froze = [Edit(site, lambda x, kept=kept: kept) for site, kept in zip(PATTERNS, patterns(), strict=True)]
    added = [
        Edit(f"blocks.{i}.hook_attn_out", lambda x, i=i: torch.zeros_like(x) if writes is None else writes[i])
        for i in range(2)
    ]
    results = [Read(f"blocks.{i}.attn.hook_result", lambda x: x.sum(2)) for i in range(2)]
    seen = observe(model().transformer, BATCH, results, [*froze, *added])
    return seen.output, [seen.trace[read] for read in results]


def test_reruns_limited_in_order_add_one_order_each() -> None:
    """Each rerun adds what the heads computed in the one before: order 0, 1, and at 2 the model itself."""
    order_0, writes = rerun(None)
    order_1, writes = rerun(writes)
    order_2, _ = rerun(writes)
    assert (order_0 - direct()).abs().max() < 1e-10
    assert (order_1 - direct() - single()).abs().max() < 1e-10
    assert (order_2 - model()(BATCH)).abs().max() < 1e-10


def test_with_frozen_patterns_the_logits_are_linear_in_the_embedding() -> None:
    froze = [(site, lambda x, hook, kept=kept: kept) for site, kept in zip(PATTERNS, patterns(), strict=True)]

    def scaled(by: float, hooks: list[object]) -> Tensor:
        scale = [(name, lambda x, hook: by * x) for name in ("hook_embed", "hook_pos_embed")]
        return model().run_with_hooks(BATCH, [*scale, *hooks])

    assert_close(scaled(3.0, froze), 3 * model()(BATCH))
    assert not torch.allclose(scaled(3.0, []), 3 * model()(BATCH))


@pytest.mark.parametrize("layer", [0, 1])
def test_scores_are_the_bilinear_form_of_the_query_key_circuit(layer: int) -> None:
    cache = model().run_with_cache(BATCH)[1]
    x, scores = cache["resid_pre", layer], cache["attn_scores", layer]
    for head in range(H):
        circuit = model().QK[layer, head]
        expected = 0.3 * (x @ circuit.A) @ (circuit.B @ x.mT)
        seen = torch.ones(8, 8, dtype=torch.bool).tril().expand(2, -1, -1)
        assert_close(scores[:, head][seen], expected[seen])
