"""Factors on scores: the published values of beta(H), and the weight that log-n scaling keeps at one half."""

import math

import pytest
import torch

from interp.core.temperature import adaptive_temperature, log_n_factor

PUBLISHED = {1.0: 1.270, 2.0: 2.099, 3.0: 2.250, 4.0: 2.389, 5.0: 2.294}
"""beta by H, to three digits (FACTS 10.3; its 1.271 at H = 1 is a slip: the coefficients add up to 1.270)."""


def test_beta_has_the_tabulated_values_and_spares_sharp_and_very_flat_rows() -> None:
    found = adaptive_temperature(torch.tensor(list(PUBLISHED), dtype=torch.float64))
    torch.testing.assert_close(found, torch.tensor(list(PUBLISHED.values())).double(), rtol=0, atol=5e-4)
    ones = adaptive_temperature(torch.tensor([0.0, 0.3, 0.5, 6.0, 8.0]))
    assert torch.equal(ones, torch.ones(5))
    assert float(adaptive_temperature(torch.tensor(0.51))) >= 1


def test_gap_of_log_m_keeps_half_of_the_weight_only_with_the_factor() -> None:
    m, n = 16, torch.tensor([2, 16, 100, 5000, 100_000])
    for gap, limit in ((0.8 * math.log(m), 0.0), (math.log(m), 0.5), (1.2 * math.log(m), 1.0)):
        weight = 1 / (1 + (n - 1) * (-gap * log_n_factor(n, m)).exp())
        assert abs(float(weight[-1]) - limit) < 0.1, gap
        if limit == 0.5:
            torch.testing.assert_close(weight, n / (2.0 * n.double() - 1))
    plain = 1 / (1 + (n - 1) * math.exp(-math.log(m)))
    assert float(plain[-1]) < 1e-3


def test_factors_follow_their_inputs_dtype_and_require_a_logarithm() -> None:
    for dtype in (torch.float32, torch.float64):
        assert log_n_factor(torch.tensor([3.0], dtype=dtype), 8).dtype == dtype
        assert adaptive_temperature(torch.tensor([3.0], dtype=dtype)).dtype == dtype
    assert float(log_n_factor(torch.tensor(1), 8)) == 0
    with pytest.raises(ValueError, match="at least 2 is required, got 1"):
        log_n_factor(torch.tensor([3]), 1)
