"""Scores, temperatures and refinements of softmax attention against loops over heads and tokens."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from interp.data.batch import Batch
from interp.lab import AdaptiveTemperature, LogN, Longformer, Strided
from interp.model import Chunks, LogSteps, ModelConfig, Softmax, Transformer, softmax as softmax_module
from interp.model.attention import Mask
from interp.model.softmax import ScoreRefinement, SoftmaxAttention
from tests.configs import perturbed, some_tokens
from tests.lab.test_differential import recorded
from tests.loops import over
from tests.mixers import MIXERS, build_mixed
from tests.model.slow_position import rotated, score_bias
from tests.tolerances import assert_close

NAMES = [
    "cosine", "cosine-adaptive", "additive", "additive-log-n", "log-n", "log-n-sparse", "log-n-bidirectional",
    "adaptive", "chunks", "log-steps", "refined-simple", "refined-value", "refined-stochastic", "refined-alibi",
]  # fmt: skip
POLYNOMIAL = (-0.037, 0.481, -2.3, 4.917, -1.791)


def sees(config: ModelConfig, i: int, j: int) -> bool:
    """Whether i sees j in an unpadded text."""
    kind = config.mixers[0]
    assert isinstance(kind, Softmax)
    stride = kind.sparsity.stride if isinstance(kind.sparsity, Strided) else 1
    near = abs(i - j) < stride or (i - j) % stride == 0
    if isinstance(kind.sparsity, Chunks):
        near = i // kind.sparsity.size == j // kind.sparsity.size
    return near and (j <= i or not config.causal) and (config.window is None or abs(i - j) < config.window)


def slow_row(model: Transformer, q: Tensor, k: Tensor, h: int, i: int) -> Tensor:
    """The weights of head h's query i, `[p]`, from rotated queries and keys `[p e]` of the head."""
    config, p = model.config, dict[str, Tensor](model.named_parameters())
    kind = config.mixers[0]
    assert isinstance(kind, Softmax)
    seen = [j for j in range(len(q)) if sees(config, i, j)]
    factor = 1.0
    if isinstance(kind.temperature, LogN):
        factor = math.log(len(seen)) / math.log(kind.temperature.train_length)
        factor = factor if kind.temperature.floor is None else max(factor, kind.temperature.floor)
    if isinstance(kind.temperature, LogSteps):
        steps = torch.tensor(float(len(seen) // kind.temperature.step))  # in float32, as the record says
        factor = float(1 + kind.temperature.weight * steps.log1p())
    row = []
    for j in seen:
        if kind.score == "dot":
            score = q[i] @ k[j] * (config.attn_scale or config.head_width**-0.5)
        elif kind.score == "cosine":
            score = p["blocks.0.attn.sharpness"][h] * (q[i] @ k[j]) / q[i].norm() / k[j].norm()
        else:
            score = p["blocks.0.attn.score"][h] @ (q[i] + k[j]).tanh()
        score, cap = score * factor, config.attn_softcap
        score = score if cap is None else cap * (score / cap).tanh()
        row.append(score + score_bias(p, config, h, i, j))
    logits = torch.stack(row)
    weights = logits.exp() / logits.exp().sum()
    if isinstance(kind.temperature, AdaptiveTemperature):
        entropy = float(-(weights * weights.log()).sum())
        beta = sum(c * entropy**power for c, power in zip(POLYNOMIAL, (4, 3, 2, 1, 0), strict=True))
        logits = logits * (max(beta, 1.0) if entropy > 0.5 else 1.0)
        weights = logits.exp() / logits.exp().sum()
    return torch.zeros(len(q), dtype=q.dtype).index_copy(0, torch.tensor(seen), weights)


def slow_refined(model: Transformer, first: Tensor, h: int) -> Tensor:
    """The refined pattern `[p p]` of a head, row by row."""
    p, kind = dict(model.named_parameters()), model.config.mixers[0]
    assert isinstance(kind, Softmax)
    u, w = (p[f"blocks.0.attn.refinement.{part}"][h] for part in ("query", "key"))
    out = []
    n = len(first)
    for i in range(n):
        seen = i + 1 if model.config.causal else n
        a = first[i, :seen] @ u[:seen]
        b = [first[r, :seen] @ w[:seen] for r in range(seen)]
        if kind.refinement == "stochastic":
            means = [first[r, :seen] @ u[:seen] for r in range(seen)]
            spreads = [torch.where(row > 0, row + 1, row.exp()).sqrt() for row in b]
            far = [
                (means[i] - m).square().sum() + (spreads[i] - s).square().sum()
                for m, s in zip(means, spreads, strict=True)
            ]
            logits = -torch.stack(far) / math.sqrt(model.config.head_width)
        else:
            logits = torch.stack([a @ row for row in b]) / math.sqrt(model.config.head_width)
        weights = logits.exp() / logits.exp().sum()
        row = torch.cat((weights, torch.zeros(n - seen, dtype=first.dtype)))
        if kind.refinement == "value":
            row = torch.stack([weights[r] * first[r] for r in range(seen)]).sum(0)
        out.append((row + first[i]) / 2 if kind.refinement == "additive" else row)
    return torch.stack(out)


@pytest.mark.parametrize("name", NAMES)
@over("n", [1, 2, 9])
def test_pattern_and_z_are_those_of_a_loop(name: str, n: int) -> None:
    agrees_with_the_loop(build_mixed(name), n)


@pytest.mark.parametrize("kind", ["simple", "value", "additive", "stochastic"])
def test_a_refined_pattern_that_sees_both_ways_is_that_of_the_loop(kind: ScoreRefinement) -> None:
    config = replace(MIXERS["refined-simple"], mixer=Softmax(refinement=kind), causal=False)
    for n in (1, 9):
        agrees_with_the_loop(perturbed(config), n)
    pattern = recorded(perturbed(config), some_tokens(), "hook_pattern")["hook_pattern"]
    assert float(pattern.triu(1).max()) > 0.1


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_refined_pattern_that_sees_both_ways(side: str) -> None:
    model = perturbed(replace(MIXERS["refined-simple"], mixer=Softmax(refinement="value"), causal=False))
    rows = [row[:n].tolist() for row, n in zip(some_tokens(), (9, 6, 4), strict=True)]
    batch = Batch.of(rows, side=side)
    found = model(batch.tokens, keep=batch.keep)
    for i, row in enumerate(rows):
        assert_close(found[i][batch.real[i]], model(torch.tensor([row]))[0])


def agrees_with_the_loop(model: Transformer, n: int) -> None:
    config, kind = model.config, model.config.mixers[0]
    assert isinstance(kind, Softmax)
    seen = recorded(model, some_tokens(1, n), "hook_q", "hook_k", "hook_v", "hook_pattern", "hook_z")
    q, k, v = (seen[f"hook_{x}"][0] for x in "qkv")
    for h in range(config.n_heads):
        g = h // (config.n_heads // config.kv_heads)
        mine, theirs = rotated(config, 0, q[:, h]), rotated(config, 0, k[:, g])
        if kind.head_norm is not None:
            mine, theirs = (
                x / (x.square().mean(-1, keepdim=True) + kind.head_norm).sqrt() for x in (mine, theirs)
            )
        pattern = torch.stack([slow_row(model, mine, theirs, h, i) for i in range(n)])
        if kind.refinement is not None:
            pattern = slow_refined(model, pattern, h)
        assert_close(seen["hook_pattern"][0, h], pattern)
        assert_close(seen["hook_z"][0, :, h], pattern @ v[:, g])


@pytest.mark.parametrize("name", [n for n in MIXERS if n.startswith("refined")])
def test_rows_of_a_refined_pattern_sum_to_one_and_see_nothing_later(name: str) -> None:
    seen = recorded(build_mixed(name), some_tokens(), "hook_first_pattern", "hook_pattern")
    for pattern in seen.values():
        assert_close(pattern.sum(-1), torch.ones_like(pattern[..., 0]))
        assert bool((pattern.triu(1) == 0).all()) and bool((pattern >= 0).all())
    assert not torch.allclose(seen["hook_first_pattern"], seen["hook_pattern"])


def test_additive_refinement_is_the_mean_with_the_first_pattern() -> None:
    found = []
    for kind in ("simple", "additive"):
        torch.manual_seed(0)
        config = replace(MIXERS["refined-simple"], mixer=Softmax(refinement=kind))
        found.append(recorded(perturbed(config), some_tokens(), "hook_first_pattern", "hook_pattern"))
    assert_close(found[1]["hook_pattern"], (found[0]["hook_pattern"] + found[0]["hook_first_pattern"]) / 2)


def needle(gap: float, n: int, kind: Softmax) -> Tensor:
    """The last query's weight of one key ahead of n - 1 equal ones by the gap (scale 1)."""
    config = ModelConfig(1, 1, 1, 1024, 3, d_head=1, mixer=kind, attn_scale=1.0)
    attn = Transformer(config).double().block(0).attn
    q, k = torch.full((1, 1, 1, 1), gap, dtype=torch.float64), torch.zeros(1, n, 1, 1, dtype=torch.float64)
    k[:, 0] = 1.0
    v = k.clone()
    mask = Mask(causal=False, allowed=None)
    return attn._attended(q, k, v, mask, None)[0, 0, 0, 0].detach()


@pytest.mark.parametrize("n", [16, 64, 1024])
def test_under_log_n_a_needle_log_m_ahead_keeps_half_the_weight(n: int) -> None:
    m = 16
    kept, lost = (float(needle(math.log(m), n, Softmax(temperature=t))) for t in (LogN(m), None))
    assert kept == pytest.approx(n / (2 * n - 1), rel=1e-9)
    assert lost == pytest.approx(1 / (1 + (n - 1) / m), rel=1e-9)
    assert float(needle(2 * math.log(m), n, Softmax(temperature=LogN(m)))) > 0.9
    assert float(needle(0.5 * math.log(m), n, Softmax(temperature=LogN(m)))) < 0.25


@pytest.mark.parametrize(
    ("entropy", "beta"), [(1, 1.270), (2, 2.099), (3, 2.250), (4, 2.389), (5, 2.294), (6, 1)]
)
def test_rows_of_known_entropy_are_sharpened_by_the_papers_factors(entropy: int, beta: float) -> None:
    """Two levels of scores, their gap such that the row's entropy is what is asked."""
    n, low, high = 900, 0.0, 60.0
    for _ in range(200):
        gap = (low + high) / 2
        row = torch.zeros(1, 1, 1, n, dtype=torch.float64)
        row[..., 0] = gap
        low, high = (low, gap) if float(torch.special.entr(row.softmax(-1)).sum()) < entropy else (gap, high)
    mask = Mask(causal=False, allowed=None)
    sharper = AdaptiveTemperature().sharpened(row, mask)
    assert float(sharper[..., 0] / gap) == pytest.approx(beta, abs=6e-4)


def test_blocks_of_queries_give_the_same_additive_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[Tensor, ...]] = []
    model = perturbed(MIXERS["additive"], seed=1).requires_grad_(True)
    for block in (1 << 24, 1, 700):
        monkeypatch.setattr(softmax_module, "BLOCK", block)
        loss = model(some_tokens()).square().sum()
        found.append((loss, *torch.autograd.grad(loss, list(model.parameters()))))
    for other in found[1:]:
        for a, b in zip(other, found[0], strict=True):
            assert_close(a, b)


@pytest.mark.parametrize("floor", [None, 0.7])
def test_log_n_counts_the_keys_of_a_sparse_pattern_when_gathered_too(
    floor: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(MIXERS["log-n"], mixer=Softmax(temperature=LogN(5, floor), sparsity=Longformer(3, 2, 1)))
    model = perturbed(config)
    tokens = some_tokens(2, 24)
    dense = model(tokens)
    monkeypatch.setattr(softmax_module, "PIECES_FROM", 1)
    assert_close(model(tokens), dense)


def test_cosine_scores_do_not_depend_on_the_length_of_queries() -> None:
    config = replace(MIXERS["cosine-adaptive"], mixer=Softmax("cosine"))
    attn = Transformer(config).block(0).attn
    assert isinstance(attn, SoftmaxAttention) and attn.sharpness is not None
    assert attn.sharpness.tolist() == pytest.approx([config.head_width**0.5] * config.n_heads)
    torch.manual_seed(0)
    model = perturbed(config)
    plain = recorded(model, some_tokens(), "hook_pattern")["hook_pattern"]
    rows = model.block(0).attn.qkv.weight[: config.n_heads * config.head_width], model.block(0).attn.qkv.bias
    rows[0].mul_(3.0), rows[1][: config.n_heads * config.head_width].mul_(3.0)
    assert_close(recorded(model, some_tokens(), "hook_pattern")["hook_pattern"], plain)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixer": Softmax("cosine"), "attn_scale": 0.5}, "no attn_scale"),
        ({"mixer": Softmax("additive"), "scale_by_layer": True}, "no attn_scale"),
        ({"mixer": Softmax(refinement="value"), "sinks": True}, "no sinks"),
    ],
)
def test_configs_that_contradict_themselves_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(MIXERS["cosine"], **changes)  # type: ignore[arg-type]
