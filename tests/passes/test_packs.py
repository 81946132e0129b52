"""Packs: no cut of the columns is cheaper than the one that is planned, by trying all of them."""

import itertools

import pytest
import torch

from interp.passes.packs import HOST_FIXED, Start, block_products, fixed_cost, planned
from tests.configs import CONFIGS

CONFIG = CONFIGS["gpt2"]
EXAMPLES, COLUMNS, PLENTY = 3, 7, 10**9


def starts() -> list[Start]:
    """Of variants that leave at any block and column."""
    generator = torch.Generator().manual_seed(0)
    layers = torch.randint(CONFIG.n_layers, (12,), generator=generator).tolist()
    return [Start(layer, column % COLUMNS) for column, layer in enumerate(layers)]


def cost(groups: list[list[Start]], fixed: float) -> float:
    """Tokens of one block, and what every block of a pass costs beside them."""
    total = 0.0
    for group in groups:
        blocks = [CONFIG.n_layers - start.layer for start in group]
        total += sum(blocks) * (COLUMNS - min(start.column for start in group)) * EXAMPLES + fixed * max(
            blocks
        )
    return total


@pytest.mark.parametrize("fixed", [0.0, float(HOST_FIXED), 200.0, 1e6])
def test_no_cut_is_cheaper(fixed: float) -> None:
    found = starts()
    plan = planned(found, CONFIG, EXAMPLES, COLUMNS, tokens=PLENTY, everywhere=False, fixed=fixed)
    mine = [[found[i] for i in pack.variants] for pack in plan.packs]
    by_column = [[s for s in found if s.column == column] for column in range(COLUMNS)]
    least = float("inf")
    for cuts in itertools.product((False, True), repeat=COLUMNS - 1):
        groups = [list(by_column[0])]
        for column, cut in enumerate(cuts, 1):
            groups += [list(by_column[column])] if cut else []
            groups[-1] += [] if cut else by_column[column]
        least = min(least, cost(groups, fixed))
    assert cost(mine, fixed) == least


def test_an_accelerator_gets_fewer_and_larger_packs() -> None:
    host, card = (fixed_cost(CONFIG, torch.device(name)) for name in ("cpu", "cuda"))
    assert host == HOST_FIXED
    assert card > host
    plans = [
        planned(starts(), CONFIG, EXAMPLES, COLUMNS, tokens=PLENTY, everywhere=False, fixed=x)
        for x in (0.0, card)
    ]
    assert [len(plan.packs) for plan in plans] == [COLUMNS, 1]


def test_launches_count_less_where_blocks_are_wide() -> None:
    narrow, wide = CONFIG, CONFIGS["llama-gqa"]
    card = torch.device("cuda")
    order = block_products(narrow) < block_products(wide)
    assert (fixed_cost(narrow, card) > fixed_cost(wide, card)) == order
