"""The sample by which a fitted file knows its model: of parameters of any size, and of all of them."""

from fractions import Fraction

import pytest
import torch

from interp.model.fitted_file import SAMPLED, _spread, is_of, sample_of
from interp.model.transformer import Transformer
from tests.configs import CONFIGS


@pytest.mark.parametrize(
    "n", [1, 2, 15, 16, 17, 1000, 2**24 - 1, 2**24 + 1, 49_152 * 576, 2**31 + 7, 2**53 + 1]
)
def test_the_indices_are_the_exact_ones_whatever_the_size(n: int) -> None:
    exact = [int(Fraction(i * (n - 1), SAMPLED - 1)) for i in range(SAMPLED)]
    assert _spread(n).tolist() == exact and exact[0] == 0 and exact[-1] == n - 1


def test_parameter_too_large_for_float32_indices_is_sampled_to_its_end() -> None:
    model = Transformer(CONFIGS["gpt2"]).to(torch.bfloat16).requires_grad_(False)
    n = 2**24 + 3
    model.embed.weight = torch.nn.Parameter(torch.zeros(n, 1, dtype=torch.bfloat16), requires_grad=False)
    before = sample_of(model)
    assert is_of(model, before)
    model.embed.weight[n - 1] = 1.0
    assert not is_of(model, before)
