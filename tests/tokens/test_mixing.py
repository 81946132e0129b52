"""Layer kernels equal a loop over queries, sources and heads; rows sum; rollout and flow equal their definitions."""

import functools
import itertools

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor

from interp.data.batch import Batch
from interp.model import Read, Trace
from interp.model.sites import names
from interp.model.weights import Weights
from interp.passes.observe import observe
from interp.tokens import mixing
from interp.tokens.mixing import (
    SourceSplit,
    contributions,
    flow,
    layers_read,
    rolled_row,
    rollout,
    shares,
    with_residual,
)
from tests.configs import CONFIGS, build, some_tokens
from tests.loops import over
from tests.tolerances import assert_close

SAME_MIXING = ("llama3-scaled", "tied", "scale-by-layer", "t5")
"""Models that differ from others of the table in what mixing does not see."""
NAMES = tuple(name for name in CONFIGS if name not in SAME_MIXING)
N = 5
KERNELS = ("attention", "values", "attn_norms", "attn_res_norms", "norms", "alti")


@functools.cache
def seen(name: str) -> Trace:
    """Two short rows with everything recorded."""
    model = build(name)
    sites = ["hook_resid_pre", "hook_resid_pre_attn", "attn.hook_pattern", "attn.hook_v", "hook_attn_out"]
    sites += ["ln1.hook_normalized", "ln1.hook_scale", "ln1_post.hook_scale", "hook_resid_post"]
    reads = [Read(f"blocks.1.{s}") for s in sites if f"blocks.1.{s}" in names(CONFIGS[name])]
    return observe(model, Batch(some_tokens(2, N)), reads).trace


@functools.cache
def loop(name: str) -> dict[str, Tensor]:
    """Layer 1 by definition: T_i(x_j) vector by vector, from the block's input and its weights alone."""
    model, trace = build(name), seen(name)
    block, w, config = model.block(1), Weights(model).layer(1), CONFIGS[name]
    x = trace[f"blocks.1.{config.block.attention_reads}"]
    pattern = trace["blocks.1.attn.hook_pattern"]
    normed = block.reading(block.ln1)(x)
    group = config.n_heads // config.kv_heads
    scales = {s: trace[f"blocks.1.{s}.hook_scale"] for s in ("ln1", "ln1_post") if _has(trace, s)}

    def through(norm, vector: Tensor, scale: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        if norm is None:
            return vector
        centred = vector - vector.mean() if norm.bias is not None else vector
        return centred / scale * norm.gamma

    found = {k: torch.zeros(2, 4, N, N, dtype=torch.float64) for k in ("value_norms", "head_norms")}
    attn = torch.zeros(2, N, N, config.d_model, dtype=torch.float64)
    res, whole = attn.clone(), attn.clone()
    for b, i, j in itertools.product(range(2), range(N), range(N)):
        for h in range(4):
            v = normed[b, j] @ w.W_V[h // group] + w.b_V[h // group]
            moved = pattern[b, h, i, j] * (v @ w.W_O[h])
            if block.ln1_post is not None:
                moved = through(block.ln1_post, moved, scales["ln1_post"][b, i])
            moved = moved * config.residual_scale
            found["value_norms"][b, h, i, j] = (pattern[b, h, i, j] * v).norm()
            found["head_norms"][b, h, i, j] = moved.norm()
            attn[b, i, j] += moved
        res[b, i, j] = attn[b, i, j] + (x[b, i] if i == j else 0)
        norm = block.ln1 if config.norms_sum else None
        whole[b, i, j] = res[b, i, j] if norm is None else through(norm, res[b, i, j], scales["ln1"][b, i])
    y = x + trace["blocks.1.hook_attn_out"]
    if config.norms_sum:
        y = trace["blocks.1.ln1.hook_normalized"]
    closer = [[[(y[b, i].abs().sum() - (y[b, i] - whole[b, i, j]).abs().sum()).clamp_min(0) for j in range(N)]
               for i in range(N)] for b in range(2)]  # fmt: skip
    return {**found, "attn": attn, "res": res, "block": whole, "y": y, "alti": torch.tensor(closer)}


def _has(trace: Trace, norm: str) -> bool:
    return f"blocks.1.{norm}.hook_scale" in {read.site for read in trace}


@pytest.mark.parametrize("name", NAMES)
def test_parts_sum_to_what_the_block_made_of_the_stream(name: str) -> None:
    assert_close(SourceSplit.of(build(name), 1, seen(name)).output, loop(name)["y"])


@over("name", NAMES)
def test_norms_of_every_level_equal_the_loop(name: str) -> None:
    for level in ("attn", "res", "block"):
        found = SourceSplit.of(build(name), 1, seen(name), level)  # type: ignore[arg-type]
        assert_close(found.norms(), loop(name)[level].norm(dim=-1))


def head_norms(split: SourceSplit) -> Tensor:
    """||a_ij f(x_j)|| of every head alone."""
    return split.pattern.abs() * split.lengths().mT[:, :, None] / split.scale[:, None]


@over("name", NAMES)
def test_norms_of_single_heads_equal_the_loop(name: str) -> None:
    found = SourceSplit.of(build(name), 1, seen(name), "attn")
    assert_close(found.value_norms(), loop(name)["value_norms"])
    assert_close(head_norms(found), loop(name)["head_norms"])


@pytest.mark.parametrize("name", NAMES)
def test_alti_equals_the_loop_whatever_the_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = SourceSplit.of(build(name), 1, seen(name))
    assert_close(found.alti(), loop(name)["alti"])
    monkeypatch.setattr(mixing, "CHUNK", 2 * N * CONFIGS[name].d_model * 2)
    assert len(list(found._source_chunks())) == 3, "two sources at a time, of five"
    assert_close(found.alti(), loop(name)["alti"])
    assert_close(found.norms(), loop(name)["block"].norm(dim=-1))


@over("name", NAMES)
def test_mixing_ratios_equal_the_loop(name: str) -> None:
    for level in ("attn", "res", "block"):
        parts = loop(name)[level]
        own = parts.diagonal(dim1=1, dim2=2).mT
        others, kept = (parts.sum(2) - own).norm(dim=-1), own.norm(dim=-1)
        found = SourceSplit.of(build(name), 1, seen(name), level).ratio()  # type: ignore[arg-type]
        assert_close(found, others / (others + kept))


@over("name", NAMES)
def test_rows_of_every_kernel_sum_to_one_and_masked_sources_have_nothing(name: str) -> None:
    model, trace = build(name), seen(name)
    hidden = (trace["blocks.1.attn.hook_pattern"] == 0).all(1)
    means = Trace({**trace, **_head_means(trace)})
    assert bool(hidden.any()) == CONFIGS[name].causal
    for kernel in KERNELS:
        found, ratio = contributions(model, 1, means if kernel == "attention" else trace, kernel)  # type: ignore[arg-type]
        total = (
            trace["blocks.1.attn.hook_pattern"].sum(-1).mean(1) if kernel == "attention" else torch.ones(2, N)
        )
        assert_close(found.sum(-1), total.double())
        assert bool((found[hidden] == 0).all()) and bool((found >= 0).all())
        assert bool(((ratio >= -1e-12) & (ratio <= 1)).all())


def test_a_position_that_nobody_brings_closer_keeps_all_of_itself() -> None:
    found = mixing.own_if_nobody(torch.tensor([[[2.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [1.0, 3.0]]]))
    assert found.tolist() == [[[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.25, 0.75]]]


def _head_means(trace: Trace) -> dict[Read, Tensor]:
    read = mixing.mixing_reads(CONFIGS["gpt2"], 1, "attention")[0]
    return {read: mixing.head_mean(trace["blocks.1.attn.hook_pattern"])}


def hand(pattern: Tensor, value: Tensor, out: Tensor, stream: Tensor) -> SourceSplit:
    """Parts written down by hand, in float64, without norms or biases."""
    one = torch.ones(*stream.shape[:2], 1, dtype=torch.float64)
    parts = [x.double() for x in (pattern, value, out, one, stream, torch.zeros_like(stream))]
    return SourceSplit(*parts)


def test_heads_that_cancel_have_no_norm_together_and_one_each_alone() -> None:
    """Two heads with the same pattern and value and opposite outputs."""
    out = torch.tensor([[[1.0, 0.0, 2.0]], [[-1.0, 0.0, -2.0]]])
    found = hand(torch.full((1, 2, 2, 2), 0.5), torch.ones(1, 2, 2, 1), out, torch.zeros(1, 2, 3))
    assert_close(found.norms(), torch.zeros(1, 2, 2, dtype=torch.float64))
    assert_close(head_norms(found).sum(1), torch.full((1, 2, 2), 5**0.5, dtype=torch.float64))


def test_attention_to_oneself_alone_mixes_nothing() -> None:
    eye = torch.eye(4).double()
    found = hand(eye.expand(1, 3, 4, 4), torch.randn(1, 4, 3, 2), torch.randn(3, 2, 6), torch.randn(1, 4, 6))
    for matrix in (shares(found.norms()), shares(found.alti()), with_residual(eye[None])):
        assert_close(matrix, eye[None])
    assert_close(found.ratio(), torch.zeros(1, 4, dtype=torch.float64))
    assert_close(rollout([with_residual(eye[None])] * 3), eye[None])
    for i in range(4):
        assert_close(flow(eye.expand(3, 4, 4), i), eye[i])


def test_an_output_from_a_single_source_gives_it_all_the_weight() -> None:
    """Everybody looks at everybody, but only position 2 has anything to give."""
    value = torch.zeros(1, 4, 3, 2)
    value[:, 2] = torch.randn(3, 2)
    pattern = torch.rand(1, 3, 4, 4).softmax(-1)
    found = hand(pattern, value, torch.randn(3, 2, 6), torch.zeros(1, 4, 6))
    expected = torch.zeros(1, 4, 4, dtype=torch.float64)
    expected[..., 2] = 1
    assert_close(shares(found.norms()), expected)
    assert_close(shares(found.alti()), expected)


def test_half_precision_is_widened_before_anything_is_summed() -> None:
    trace = Trace({read: value.bfloat16() for read, value in seen("gpt2").items()})
    found, _ = contributions(build("gpt2", torch.bfloat16), 1, trace, "alti")
    assert found.dtype == torch.float32
    assert_close(found.double(), shares(loop("gpt2")["alti"]), torch.bfloat16)


def random_layers(rows: int, depth: int, n: int) -> list[Tensor]:
    return [shares(torch.rand(rows, n, n).double().tril() + torch.eye(n)) for _ in range(depth)]


def test_rollout_sums_over_every_way_through_the_layers() -> None:
    layers = random_layers(1, 3, 4)
    expected = torch.zeros(4, 4, dtype=torch.float64)
    for end, a, b, start in itertools.product(range(4), repeat=4):
        expected[end, start] += layers[2][0, end, a] * layers[1][0, a, b] * layers[0][0, b, start]
    assert_close(rollout(layers)[0], expected)
    assert_close(rollout(layers).sum(-1), torch.ones(1, 4, dtype=torch.float64))
    assert bool((rollout(layers).triu(1) == 0).all()), "causal layers stay causal"


def test_a_rolled_row_is_a_row_of_the_rollout() -> None:
    layers, at = random_layers(3, 4, 5), torch.tensor([4, 0, 2])
    assert_close(rolled_row(layers, at), rollout(layers)[torch.arange(3), at])


def smallest_cut(layers: Tensor, at: int, token: int) -> float:
    """The least capacity of a set of edges that separates output `at` from a token: by trying every set of nodes."""
    depth, n = layers.shape[:2]
    nodes = [(level, i) for level in range(depth + 1) for i in range(n)]
    free = [node for node in nodes if node not in ((depth, at), (0, token))]
    best = float("inf")
    for side in itertools.product((True, False), repeat=len(free)):
        upper = dict(zip(free, side, strict=True)) | {(depth, at): True, (0, token): False}
        cut = sum(
            float(layers[level, i, j])
            for level, i, j in itertools.product(range(depth), range(n), range(n))
            if upper[level + 1, i] and not upper[level, j]
        )
        best = min(best, cut)
    return best


def test_flow_equals_the_smallest_cut() -> None:
    layers = torch.cat(random_layers(1, 2, 3))
    expected = [smallest_cut(layers, 2, token) for token in range(3)]
    assert_close(flow(layers, 2), torch.tensor(expected, dtype=torch.float64))


def test_flow_refuses_long_prompts_and_layers_refuse_what_they_do_not_know() -> None:
    with pytest.raises(ValueError, match="requires at most 64 tokens, got 65"):
        flow(torch.eye(65)[None], 0)
    with pytest.raises((ValueError, TypeCheckError), match="kernel"):
        layers_read(build("gpt2"), "norm", [0])  # type: ignore[arg-type]
