"""Single queries and keys change a pattern as one softmax for each of them says, however saturated it is."""

import pytest
import torch
from torch import Tensor

from interp.causal.softmax_change import column_change, row_change
from tests.loops import over
from tests.tolerances import assert_close


def pattern(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """The softmax with the sinks as one more key; zeros for a query that sees nothing."""
    if sinks is not None:
        scores = torch.cat((scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)), -1)
    shares = scores.softmax(-1).nan_to_num(0.0)
    return shares if sinks is None else shares[..., :-1]


def drawn(scale: float, *, sinks: bool, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Causal scores of two runs, the first row of which is padded on the left, a gradient, and sinks."""
    generator = torch.Generator().manual_seed(seed)
    own, other, gradient = torch.randn(3, 2, 3, 6, 6, generator=generator, dtype=torch.float64)
    hidden = torch.ones(6, 6).triu(1).bool().expand(2, 1, 6, 6).clone()
    hidden[0, ..., :2] = True
    own, other = ((scale * x).masked_fill(hidden, -torch.inf) for x in (own, other))
    return own, other, gradient, torch.randn(3, generator=generator).double() * scale if sinks else None


SCALES = (1.0, 30.0, 300.0, 3000.0)


@over("scale", SCALES)
@over("sinks", [False, True])
def test_every_key_is_one_softmax_with_that_key_alone_replaced(scale: float, sinks: bool) -> None:
    """Scores up to thousands apart, where a key has all of a row to the last bit."""
    own, other, gradient, extra = drawn(scale, sinks=sinks)
    found, before = column_change(own, other, gradient, extra), pattern(own, extra)
    for key in range(6):
        scores = own.clone()
        scores[..., key] = other[..., key]
        expected = ((pattern(scores, extra) - before) * gradient).sum((-1, -2))
        assert_close(found[..., key], expected, torch.float64)
    assert scale > 30 or float(found.abs().max()) > 0.1


@over("scale", SCALES)
@over("sinks", [False, True])
def test_every_query_is_one_softmax_of_its_new_scores(scale: float, sinks: bool) -> None:
    own, other, gradient, extra = drawn(scale, sinks=sinks)
    expected = ((pattern(other, extra) - pattern(own, extra)) * gradient).sum(-1)
    assert_close(row_change(own, other, gradient, extra), expected, torch.float64)


def test_a_key_that_is_alike_in_both_runs_or_seen_alone_moves_exactly_nothing() -> None:
    own, other, gradient, _ = drawn(30.0, sinks=False)
    assert float(column_change(own, own, gradient).abs().max()) == 0
    first = column_change(own[:, :, :1], other[:, :, :1], gradient[:, :, :1])
    assert float(first.abs().max()) == 0, "query 0 sees key 0 alone"


@pytest.mark.parametrize("gap", [20.0, 50.0, 120.0])
def test_single_precision_keeps_a_key_that_has_the_whole_row(gap: float) -> None:
    """1 - a is below the rounding of a (gap 20), and below the smallest float32 (gap 120)."""
    own = torch.tensor([gap, 1.0, 0.0], dtype=torch.float64)[None, None, None]
    other = torch.tensor([-3.0, 1.0, 0.0], dtype=torch.float64)[None, None, None]
    gradient = torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64)[None, None, None]
    wide = column_change(own, other, gradient)
    narrow = column_change(own.float(), other.float(), gradient.float())
    assert_close(narrow.double(), wide, torch.float32)
    assert float(wide[0, 0, 0].abs()) > 2
