"""The pictures of predicted and exact effects, and of the chains of a learning coefficient."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
import xarray as xr

from interp import plot
from interp.dynamics import Langevin, lds, learning_coefficient_of


def scored(unit: str) -> xr.Dataset:
    draw = np.random.default_rng(0)
    exact = xr.Dataset(
        {
            "value": (("group", "query"), draw.random((6, 3)), {"unit": "nats"}),
            "left_out": (("group", "row"), np.eye(6) > 0),
        },
        {"group": range(6), "row": range(6), "query": range(3)},
    )
    guess = {"value": (("row", "query"), draw.random((6, 3)), {"unit": unit})}
    return lds(exact, xr.Dataset(guess, {"row": range(6), "query": range(3)}))


@pytest.mark.parametrize(("unit", "diagonals"), [("nats", 1), ("nats per step of length 1", 0)])
def test_groups_and_queries_are_dots_with_a_diagonal_where_units_agree(unit: str, diagonals: int) -> None:
    found = scored(unit)
    ax = plot.influence(found)
    dots = np.asarray(ax.collections[0].get_offsets())
    np.testing.assert_allclose(
        dots, np.stack([found.predicted.values.ravel(), found.exact.values.ravel()], 1)
    )
    assert len(ax.lines) == 2 + diagonals
    assert unit in ax.get_xlabel() and f"{float(found.value):.2f}" in ax.get_title()
    plt.close("all")


def test_every_chain_is_a_line_of_its_losses() -> None:
    at, sampler = {"w": torch.zeros(3)}, Langevin(chains=2, steps=20, burn_in=5)
    found = learning_coefficient_of(lambda point: point["w"].square().sum(), at, 100, sampler)
    ax = plot.learning_coefficient(found)
    for line, losses in zip(ax.lines, found.loss.values, strict=False):
        np.testing.assert_array_equal(line.get_ydata(), losses)
    assert len(ax.lines) == 3 and f"{float(found.value):.1f}" in ax.get_title()
    plt.close("all")


def test_another_result_is_refused() -> None:
    with pytest.raises(ValueError, match="lds"):
        plot.influence(xr.Dataset({"value": 1.0}))
    with pytest.raises(ValueError, match="learning_coefficient"):
        plot.learning_coefficient(xr.Dataset({"value": 1.0}))
