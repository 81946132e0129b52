"""Masks and positions against slow loops; padding anywhere gives the unpadded row's numbers and never a NaN."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from interp.model import Read, Tap, sites
from interp.model.attention import attention_mask
from interp.model.layout import Layout
from tests.configs import CONFIGS, D_VOCAB, build, some_tokens
from tests.loops import over
from tests.tolerances import assert_close

EVERY = over("name", CONFIGS)
CPU = torch.device("cpu")
PADDING = {
    "left": [[1, 1, 1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1, 1, 1]],
    "right": [[1, 1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0, 0, 0, 0]],
    "inside": [[0, 1, 1, 0, 1, 1, 0, 1, 1], [1, 1, 1, 1, 1, 1, 0, 0, 1], [0, 1, 0, 1, 0, 1, 0, 1, 0]],
}


def kept(side: str) -> Tensor:
    return torch.tensor(PADDING[side], dtype=torch.bool)


# --- padding ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@EVERY
@over("side", PADDING)
@over("observed", [False, True])
def test_a_padded_row_gives_the_numbers_of_the_unpadded_row(name: str, side: str, observed: bool) -> None:
    model, tokens, keep = build(name), some_tokens(), kept(side)
    reads = [Read(f"blocks.{layer}.hook_resid_post") for layer in (0, 1)]
    reads += [Read("blocks.1.attn.hook_pattern")] if observed else []
    padded = Tap(reads)
    logits = model(tokens, padded, keep=keep)
    for row in range(3):
        alone = Tap(reads)
        real = keep[row]
        assert_close(logits[row, real], model(tokens[row, real][None], alone)[0])
        for read in reads:
            value = padded.values[read][row]
            value = value[:, real][:, :, real] if "pattern" in read.site else value[real]
            assert_close(value, alone.values[read][0])


@EVERY
def test_which_token_fills_the_padding_does_not_matter(name: str) -> None:
    model, tokens, keep = build(name), some_tokens(), kept("left")
    other = torch.where(keep, tokens, (tokens + 1) % D_VOCAB)
    assert_close(model(other, keep=keep)[keep], model(tokens, keep=keep)[keep])


@EVERY
def test_a_real_token_with_the_padding_id_is_seen(name: str) -> None:
    """The mask comes from `keep` alone, never from the ids."""
    model = build(name)
    tokens = some_tokens()
    tokens[:, 3] = tokens[:, 0]
    all_kept = torch.ones_like(tokens, dtype=torch.bool)
    assert_close(model(tokens, keep=all_kept), model(tokens))


@EVERY
def test_fully_padded_rows_give_no_nan_in_any_site(name: str) -> None:
    keep = kept("left")
    keep[2] = False
    names = sites.names(CONFIGS[name], on_demand=True)
    tap = Tap([Read(site) for site in names])
    for logits in (build(name)(some_tokens(), keep=keep), build(name)(some_tokens(), tap, keep=keep)):
        assert torch.isfinite(logits).all()
    for read, value in tap.values.items():
        assert not value.isnan().any(), read.site


@EVERY
@over("observed", [False, True])
def test_fully_padded_rows_give_no_nan_gradients_and_change_no_others(name: str, observed: bool) -> None:
    model, keep = build(name), kept("left")
    keep[2] = False
    extra = [Read("blocks.0.attn.hook_attn_scores"), Read("blocks.1.attn.hook_pattern")] if observed else []
    read = Read("hook_embed", grad=True)

    def gradient(rows: int) -> Tensor:
        tap = Tap([read, *extra])
        logits = model(some_tokens()[:rows], tap, keep=keep[:rows])
        metric = logits[keep[:rows]].square().sum() + (0 * logits).sum()
        return torch.autograd.grad(metric, tap.live[read])[0]

    padded = gradient(3)
    assert torch.isfinite(padded).all()
    assert_close(padded[:2], gradient(2))
    assert (padded[~keep] == 0).all()


@EVERY
def test_fully_padded_rows_give_no_nan_in_the_gradient_of_any_site(name: str) -> None:
    keep = kept("left")
    keep[2] = False
    for layer in (0, 1):
        names = sites.names(CONFIGS[name], on_demand=True)
        tap = Tap(
            [
                Read(site, grad=True)
                for site in names
                if f"blocks.{1 - layer}" not in site and "_input" not in site
            ]
        )
        logits = build(name)(some_tokens(), tap, keep=keep)
        gradients = torch.autograd.grad(logits[keep].square().sum(), [tap.live[read] for read in tap.reads])
        for read, gradient in zip(tap.reads, gradients, strict=True):
            assert torch.isfinite(gradient).all(), read.site


# --- masks against slow loops -------------------------------------------------------------------------------------


def slow_allowed(keep_row: list[bool], past: int, *, causal: bool, window: int | None) -> list[list[bool]]:
    """Query by query, key by key; the distance counts the kept tokens between."""
    rows = []
    for q in range(past, len(keep_row)):
        row = []
        for k in range(len(keep_row)):
            place_q, place_k = (max(sum(keep_row[: i + 1]) - 1, 0) for i in (q, k))
            near = window is None or abs(place_q - place_k) < window
            row.append(keep_row[k] and near and (k <= q or not causal))
        rows.append(row)
    return rows


@given(
    keep=st.lists(st.booleans(), min_size=1, max_size=8),
    past=st.integers(0, 7),
    window=st.none() | st.integers(1, 9),
    causal=st.booleans(),
    padded=st.booleans(),
)
def test_the_mask_equals_a_slow_loop(
    keep: list[bool], past: int, window: int | None, causal: bool, padded: bool
) -> None:
    past = min(past, len(keep) - 1) if causal else 0
    keep = keep if padded else [True] * len(keep)
    n = len(keep) - past
    config = replace(CONFIGS["gpt2"], causal=causal, window=window)
    mask = attention_mask(
        config,
        n,
        past,
        Layout(torch.tensor([keep]) if padded else None),
        CPU,
        local=config.window is not None,
    )
    matrix = mask.matrix(n, len(keep), CPU)
    expected = torch.tensor(slow_allowed(keep, past, causal=causal, window=window))
    actual = torch.ones(n, len(keep), dtype=torch.bool) if matrix is None else matrix[0, 0]
    assert torch.equal(actual, expected)


@given(keep=st.lists(st.booleans(), min_size=1, max_size=8), past=st.integers(0, 7))
def test_positions_count_the_kept_tokens_before(keep: list[bool], past: int) -> None:
    past = min(past, len(keep) - 1)
    expected = [max(sum(keep[: i + 1]) - 1, 0) for i in range(past, len(keep))]
    assert Layout(torch.tensor([keep])).positions(len(keep) - past, past, CPU).tolist() == [expected]


def test_without_padding_positions_are_columns() -> None:
    assert Layout().positions(4, 3, CPU).tolist() == [[3, 4, 5, 6]]


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "scale-by-layer"])
def test_the_plain_triangle_is_never_written_out(name: str) -> None:
    mask = attention_mask(CONFIGS[name], 9, 0, Layout(), CPU, local=False)
    assert mask.causal
    assert mask.allowed is None


def test_a_window_wider_than_the_text_changes_nothing() -> None:
    wide = build("window").config.window
    assert wide is not None
    tokens = some_tokens(n=wide)
    model = build("window")
    tap = Tap([Read("blocks.0.attn.hook_pattern")])
    model(tokens, tap)
    assert (tap.values[tap.reads[0]].tril() > 0).sum() == 3 * 4 * wide * (wide + 1) // 2


def test_a_query_sees_itself_and_window_minus_one_before() -> None:
    tap = Tap([Read("blocks.0.attn.hook_pattern")])
    build("window")(some_tokens(n=10), tap)
    visible = (tap.values[tap.reads[0]][0, 0] > 0).sum(-1)
    assert visible.tolist() == [1, 2, 3, 4, 4, 4, 4, 4, 4, 4]
