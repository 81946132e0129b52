"""Sparse patterns against their definitions in loops; blocks of gathered keys against the dense mask."""

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from interp.lab import AdaptiveTemperature, BigBird, Dilated, FixedBlocks, Longformer, Segments, Strided
from interp.lab.sparsity import drawn_blocks
from interp.model import Alibi, ModelConfig, Read, Softmax, Tap, softmax
from interp.model.attention import Mask, attend
from interp.model.sparsity import Sparsity, attend_pieces, pieces, visible
from tests.configs import some_tokens
from tests.loops import over
from tests.mixers import MIXERS, build_mixed
from tests.tolerances import assert_close

CPU = torch.device("cpu")
KINDS = [
    Dilated(1), Dilated(3, 1), Dilated(2, 5), Strided(1), Strided(4), FixedBlocks(1), FixedBlocks(5, 2),
    Longformer(3, 2, 2), Longformer(2, n_global=0), BigBird(3), BigBird(2, 1, 2, 0, seed=7), BigBird(4, 5, 0, 2),
    Segments(4, 3), Segments(1, 0), Segments(3, 9),
]  # fmt: skip
EVERY = pytest.mark.parametrize("kind", KINDS, ids=str)
SPARSE = [name for name, config in MIXERS.items() if getattr(config.mixers[0], "sparsity", None)]


def places(n: int) -> Tensor:
    return torch.arange(n)[None]


def slowly(kind: Sparsity, i: int, j: int) -> bool:
    """Whether the token at i sees the one at j, from the words of the papers."""
    match kind:
        case Dilated(width, dilation):
            return j in {i + sign * step * dilation for step in range(width) for sign in (1, -1)}
        case Strided(stride):
            return abs(i - j) < stride or abs(i - j) % stride == 0
        case FixedBlocks(block, summary):
            return i // block == j // block or j % block in range(block - summary, block)
        case Segments(size, memory):
            return j in range(i // size * size - memory, (i // size + 1) * size)
        case Longformer(width, dilation, n_global):
            return min(i, j) < n_global or slowly(Dilated(width, dilation), i, j)
        case BigBird(block, n_window, _, n_global):
            a, b = sorted((i // block, j // block))
            return b - a <= n_window // 2 or a < n_global or bool(drawn_blocks(kind, b + 1, CPU)[b, a])


@EVERY
def test_who_sees_whom_is_what_the_paper_says(kind: Sparsity) -> None:
    n = 23
    expected = torch.tensor([[slowly(kind, i, j) for j in range(n)] for i in range(n)])
    assert torch.equal(visible(kind, places(n), places(n))[0], expected)


@EVERY
def test_seeing_is_mutual_but_for_summaries_and_memories_and_everybody_sees_itself(kind: Sparsity) -> None:
    seen = visible(kind, places(40), places(40))[0]
    assert seen.diagonal().all()
    assert torch.equal(seen, seen.T) or isinstance(kind, FixedBlocks | Segments)


@EVERY
@given(first=st.integers(0, 30), extra=st.integers(0, 12))
def test_a_run_sees_what_one_of_its_queries_sees(kind: Sparsity, first: int, extra: int) -> None:
    each = visible(kind, places(50), places(50))[0, first : first + extra + 1]
    run = kind.run_sees(torch.tensor([first]), torch.tensor([first + extra]), torch.arange(50))
    assert torch.equal(run, each.any(0))


@EVERY
def test_a_longer_text_changes_nothing_of_a_shorter_one(kind: Sparsity) -> None:
    long, short = (visible(kind, places(n), places(n))[0] for n in (61, 17))
    assert torch.equal(long[:17, :17], short)


def test_drawn_blocks_are_distinct_free_and_depend_on_the_seed() -> None:
    kind = BigBird(8, 3, 2, 1, seed=3)
    drawn = drawn_blocks(kind, 200, CPU)
    free = torch.tensor(
        [max(0, i - 1 - 1) for i in range(200)]
    )  # neither global (1) nor in the window (1 before)
    assert torch.equal(drawn.sum(-1), free.clamp_max(2))
    assert not drawn[:, 0].any() and not drawn.triu(-1).any()
    assert not torch.equal(drawn, drawn_blocks(BigBird(8, 3, 2, 1, seed=4), 200, CPU))


def test_drawn_blocks_are_spread_evenly() -> None:
    """Oracle: the mean of a uniform draw among the free blocks is their middle, give or take its standard error."""
    drawn = drawn_blocks(BigBird(8, 1, 1, 0), 2000, CPU).float()
    place = drawn[1:].argmax(-1) / torch.arange(1, 2000)
    assert abs(float(place.mean()) - 0.5) < 4 * (1 / 12 / 1999) ** 0.5


def dense(kind: Sparsity, n: int, causal: bool) -> Tensor:
    seen = visible(kind, places(n), places(n))[:, None]
    return seen.tril() if causal else seen


@EVERY
@over("causal", [True, False])
@over("n", [1, 7, 8, 9, 40])
def test_gathered_keys_give_what_the_dense_mask_gives(kind: Sparsity, causal: bool, n: int) -> None:
    torch.manual_seed(n)
    q = torch.randn(2, n, 4, 6, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, n, 2, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    runs = pieces(kind, n, n, CPU, causal=causal, run=8)
    expected = attend(q, k, v, Mask(causal=False, allowed=dense(kind, n, causal)), 0.3, None)
    found = attend_pieces(q, k, v, runs, 0.3)
    assert_close(found, expected)
    weight = torch.randn_like(found)
    for ours, theirs in zip(
        *(torch.autograd.grad((z * weight).sum(), (q, k, v)) for z in (found, expected)), strict=True
    ):
        assert_close(ours, theirs)
    assert sum(int(piece.allowed.sum()) for piece in runs) == int(dense(kind, n, causal).sum())
    assert all(piece.allowed.any(0).all() for piece in runs)


@EVERY
def test_the_last_queries_of_a_text_have_the_runs_of_their_own(kind: Sparsity) -> None:
    runs = pieces(kind, 11, 40, CPU, causal=True, run=4)
    rebuilt = torch.zeros(11, 40, dtype=torch.bool)
    for piece in runs:
        rebuilt[piece.queries.start : piece.queries.stop, piece.keys] = piece.allowed
    assert torch.equal(rebuilt, dense(kind, 40, True)[0, 0, 29:])


@pytest.mark.parametrize("kind", [Dilated(64, 1), Longformer(64), BigBird(64)], ids=str)
def test_what_is_stored_of_a_long_mask_is_linear_in_its_length(kind: Sparsity) -> None:
    sizes = [
        sum(piece.allowed.numel() for piece in pieces(kind, n, n, CPU, causal=True)) for n in (4096, 8192)
    ]
    assert 1.9 < sizes[1] / sizes[0] < 2.1


def fits(config: ModelConfig) -> bool:
    """Whether anything of the model needs scores or a mask as a matrix."""
    mixer = config.mixers[0]
    assert isinstance(mixer, Softmax)
    plain = (
        mixer.score != "additive" and mixer.refinement is None and mixer.temperature != AdaptiveTemperature()
    )
    return plain and config.window is None and not config.sinks and not isinstance(config.position, Alibi)


@pytest.mark.parametrize("name", SPARSE)
def test_a_model_in_pieces_is_the_model_under_the_dense_mask(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = build_mixed(name), some_tokens(n=24)
    model_in_pieces = []
    monkeypatch.setattr(
        softmax, "pieces", lambda *a, **k: model_in_pieces.append(1) or pieces(*a, **k, run=5)
    )
    expected = model(tokens)
    assert not model_in_pieces
    monkeypatch.setattr(softmax, "PIECES_FROM", 1)
    if fits(model.config):  # and then no mask of all pairs is made
        monkeypatch.delattr(Mask, "matrix")
        monkeypatch.delattr(softmax, "_joined")
    assert_close(model(tokens), expected)
    assert len(model_in_pieces) == int(fits(model.config))


def test_the_pattern_is_zero_where_the_sparse_mask_hides() -> None:
    model, read = build_mixed("longformer"), Read("blocks.1.attn.hook_pattern")
    tap = Tap([read])
    model(some_tokens(), tap)
    hidden = ~dense(Longformer(2, 2, 1), 9, True)[0, 0]
    assert (tap.values[read][..., hidden] == 0).all()
    assert (tap.values[read][..., ~hidden] > 0).all()
