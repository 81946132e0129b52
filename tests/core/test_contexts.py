"""Lists in context: what stands around an entry is what stood there, whatever the split and the order of the rows."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from interp.core.contexts import ContextExamples, TopInContext
from interp.core.extremes import TopRows
from tests.core.splits import CUTS, ORDERS, merged

N, P, C, BEFORE, AFTER = 12, 5, 3, 2, 1
RULE = TopInContext(TopRows(4, "activation", before=BEFORE, after=AFTER), ("tokens", "activation"), ("key",))


def values(seed: int = 0) -> dict[str, Tensor]:
    """Few distinct values, so that there are ties; some absent, one row wholly."""
    generator = torch.Generator().manual_seed(seed)
    activation = torch.randint(-2, 3, (N, P, C), generator=generator).double()
    activation[torch.rand(N, P, C, generator=generator) < 0.2] = torch.nan
    activation[7] = torch.nan
    tokens = torch.arange(N * P).view(N, P)
    tokens[3, 3:] = -1
    return {
        "activation": activation,
        "tokens": tokens,
        "key": torch.randint(0, 99, (N, P, C), generator=generator),
    }


def slow(found: dict[str, Tensor], cell: int, rule: TopRows) -> list[tuple[float, int, int]]:
    """Value, row and position of every entry, by sorting everything."""
    curve = found["activation"][..., cell]
    sign = 1 if rule.largest else -1
    every = [
        (-sign * float(curve[n, p]), n, p) for n in range(N) for p in range(P) if curve[n, p] == curve[n, p]
    ]
    kept: list[tuple[float, int, int]] = []
    for score, n, p in sorted(every):
        if not (rule.once_per_row and n in [row for _, row, _ in kept]):
            kept.append((-sign * score, n, p))
    return kept[: rule.k]


@settings(max_examples=25)
@given(CUTS, ORDERS, st.booleans(), st.booleans(), st.integers(0, 5))
def test_any_split_gives_the_lists_and_contexts_of_a_slow_loop(
    cuts: list[int], order: list[int], largest: bool, once: bool, seed: int
) -> None:
    rule = replace(RULE, top=replace(RULE.top, largest=largest, once_per_row=once))
    given_ = values(seed)
    found = merged(rule, given_, cuts, order)
    assert isinstance(found, ContextExamples)
    for cell in range(C):
        entries = slow(given_, cell, rule.top)
        assert len(entries) == rule.top.k
        for rank, (value, n, p) in enumerate(entries):
            place = (
                found.top.rows[cell, rank],
                found.top.positions[cell, rank],
                found.top.values[cell, rank],
            )
            assert tuple(map(float, place)) == (n, p, value)
            assert int(found.along["key"][cell, rank, 0]) == int(given_["key"][n, p, cell])
            for w, q in enumerate(range(p - BEFORE, p + AFTER + 1)):
                token, run = found.along["tokens"][cell, rank, w], found.along["activation"][cell, rank, w]
                if 0 <= q < P:
                    assert int(token) == int(given_["tokens"][n, q])
                    torch.testing.assert_close(
                        run, given_["activation"][n, q, cell], equal_nan=True, rtol=0, atol=0
                    )
                else:
                    assert int(token) == -1 and bool(run.isnan())


def test_empty_places_have_no_context() -> None:
    given_ = {name: value[:2] for name, value in values().items()}
    found = RULE.of(given_, torch.tensor([5, 6])).merge(
        RULE.of({n: v[:0] for n, v in given_.items()}, torch.arange(0))
    )
    assert found.top.rows[:, 2:].unique().tolist() == [-1]
    assert found.along["tokens"][:, 2:].unique().tolist() == [-1]
    assert found.along["key"][:, 2:].unique().tolist() == [-1]
    assert bool(found.along["activation"][:, 2:].isnan().all())


def test_a_value_that_is_missing_is_named() -> None:
    given_ = values()
    del given_["key"]
    with pytest.raises(ValueError, match="a value named 'key' is required"):
        RULE.of(given_, torch.arange(N))
