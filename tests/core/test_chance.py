"""How often chance is as far out: exact on draws that are exchangeable, ties against the value, NaN left out."""

import itertools

import pytest
import torch
from torch import Tensor

from interp.core.stats import two_sided_p, upper_p

NAN = float("nan")


def of(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("value", "chance", "upper", "both"),
    [
        (3.0, (0.0, 1.0, 2.0), 1 / 4, 2 / 4),
        (-1.0, (0.0, 1.0, 2.0), 4 / 4, 2 / 4),
        (1.5, (0.0, 1.0, 2.0), 2 / 4, 1.0),
        (1.0, (1.0, 1.0, 1.0), 1.0, 1.0),
        (2.0, (0.0, 2.0, 1.0), 2 / 4, 1.0),
        (3.0, (0.0, NAN, 2.0), 1 / 3, 2 / 3),
        (NAN, (0.0, 1.0), NAN, NAN),
        (1.0, (NAN, NAN), NAN, NAN),
        (1.0, (), NAN, NAN),
    ],
)
def test_it_is_the_share_of_the_draws_and_the_value_itself(
    value: float, chance: tuple[float, ...], upper: float, both: float
) -> None:
    assert float(upper_p(of(value)[0], of(*chance))) == pytest.approx(upper, nan_ok=True)
    assert float(two_sided_p(of(value)[0], of(*chance))) == pytest.approx(both, nan_ok=True)


def test_exchangeable_draws_are_exactly_uniform_and_with_ties_never_small() -> None:
    """All 120 orders of five numbers, the first of which is the value: p <= a in a share a of them."""
    orders = torch.tensor(list(itertools.permutations([0.0, 1.0, 2.0, 3.0, 4.0])))
    p = upper_p(orders[:, 0], orders[:, 1:])
    for rank in range(1, 6):
        assert int((p <= rank / 5 + 1e-12).sum()) == 24 * rank
    both = two_sided_p(orders[:, 0], orders[:, 1:])
    assert [int((both <= a + 1e-12).sum()) for a in (0.2, 0.4, 0.8, 1.0)] == [0, 48, 96, 120]
    tied = orders.clamp(max=3)
    p = upper_p(tied[:, 0], tied[:, 1:])
    assert all(int((p <= rank / 5 + 1e-12).sum()) <= 24 * rank for rank in range(1, 6))


def test_rows_of_values_may_share_their_draws() -> None:
    values, chance = torch.randn(3, 4).double(), torch.randn(3, 1, 9).double()
    found = two_sided_p(values, chance)
    for i, j in itertools.product(range(3), range(4)):
        assert float(found[i, j]) == float(two_sided_p(values[i, j], chance[i, 0]))
