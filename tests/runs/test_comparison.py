"""Two runs beside each other: the planted differences come first, with exact p-values, and nothing is left unsaid."""

from itertools import product

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr

from interp.runs.comparison import as_dataset, compared, headline, main_variables

NUMBERS = [[1.0, 2.0], [3.0, 4.0]]


def scores(values: list[list[float]], **more: object) -> xr.Dataset:
    coords = {"layer": [2, 3], "head": [0, 5]}
    return xr.Dataset({"score": (("layer", "head"), np.array(values)), **more}, coords=coords)  # type: ignore[dict-item]


def with_interval(values: list[list[float]], half: float) -> xr.Dataset:
    x = np.array(values)
    found = scores(values)
    return found.assign(
        {f"score{end}": (("layer", "head"), x + s * half) for end, s in (("_low", -1), ("_high", 1))}
    )


def test_the_largest_differences_come_first_with_both_intervals() -> None:
    first, second = (
        with_interval([[0.0, 0.5], [0.25, 1.0]], 0.125),
        with_interval([[0.0, 0.75], [-0.25, 1.0]], 0.25),
    )
    found = compared(first, second)
    assert [(each.variable, each.where, each.change) for each in found.largest] == [
        ("score", "layer 3, head 0", -0.5),
        ("score", "layer 2, head 5", 0.25),
    ]
    assert str(found.largest[0].first) == "0.25 [0.125, 0.375]"
    assert str(found.largest[0].second) == "-0.25 [-0.5, 0]"
    assert found.notes == []
    assert compared(first, first).largest == []
    assert len(compared(first, second, largest=1).largest) == 1


def test_rows_of_the_same_identity_are_tested_in_pairs() -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(7, 2))
    y = x + np.array([1.0, 0.0]) + 0.1 * generator.normal(size=(7, 2))
    coords = {"prompt": np.arange(10, 17)}
    first, second = (xr.Dataset({"s": (("prompt", "head"), v)}, coords=coords) for v in (x, y))
    best = compared(first, second).largest[0]
    change = y - x
    flips = np.array(list(product((-1, 1), repeat=7)))
    means = np.abs(flips @ change[:, 0])
    exact = (means >= np.abs(change[:, 0].sum()) - 1e-12).mean()
    assert best.where == "head 0, mean of 7 prompts"
    assert best.change == pytest.approx(change[:, 0].mean())
    assert best.p == pytest.approx(exact) == pytest.approx(2 / 128)
    assert best.p_adjusted >= best.p


@pytest.mark.parametrize(
    ("first", "second", "note"),
    [
        (scores(NUMBERS), scores(NUMBERS).isel(head=[0]), "cannot be compared"),
        (scores(NUMBERS), scores(NUMBERS).assign_coords(head=[0, 6]), "labels of head differ"),
        (scores(NUMBERS), scores(NUMBERS).drop_vars("head"), "only one of the runs labels head"),
        (scores(NUMBERS), xr.Dataset(), "score: only in one of the runs"),
        (scores(NUMBERS), scores([[1, 2], [3, np.nan]]), "1 of 4 are numbers in one of the runs and NaN"),
        (
            xr.Dataset({"w": ("i", ["a", "b"])}),
            xr.Dataset({"w": ("i", ["a", "c"])}),
            "w: 1 of 2 differ, such as b and c at i 1",
        ),
    ],
)
def test_what_cannot_be_compared_is_said(first: xr.Dataset, second: xr.Dataset, note: str) -> None:
    found = compared(first, second)
    assert found.largest == []
    (line,) = found.notes
    assert note in line


def test_rows_with_holes_get_no_p() -> None:
    coords = {"row": [0, 1]}
    first, second = (xr.Dataset({"s": ("row", [x, 1.0])}, coords=coords) for x in (np.nan, 2.0))
    assert compared(first, second).notes == ["s: 1 of 2 are numbers in one of the runs and NaN in the other"]


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (np.array([[0.5, -2.0], [np.nan, 0.0]]), "largest -2 at layer 2, head 5; mean -0.5 of 3"),
        (np.full((2, 2), np.nan), "no number in 4"),
        (np.array([[True, False], [True, True]]), "true in 3 of 4"),
        (np.array([["a", "b"], ["b", "b"]]), "2 different, most often 'b' (3 of 4)"),
    ],
)
def test_a_headline_says_the_largest_value_and_where_it_is(values: np.ndarray, line: str) -> None:
    result = xr.Dataset({"x": (("layer", "head"), values)}, coords={"layer": [2, 3], "head": [0, 5]})
    assert headline(result, "x") == line


def test_intervals_and_nulls_are_no_results_of_their_own() -> None:
    result = xr.Dataset(dict.fromkeys(("x", "x_low", "x_high", "x_null", "y_low", "x_null_sd"), 1.0))
    assert main_variables(result) == ["x", "y_low"]
    assert headline(result, "x") == "1 [1, 1]"
    result = xr.Dataset(
        {"value": 1.0, "low": 0.5, "high": 2.0, "null": 0.0, "null_sd": 1.0, "n": 3, "rank": 1}
    )
    assert main_variables(result) == ["value", "rank"]
    assert headline(result, "value") == "1 [0.5, 2]"
    assert headline(xr.Dataset({"e": ("i", np.zeros(0))}), "e") == "empty"


def test_tables_and_tensors_are_compared_as_datasets() -> None:
    table = as_dataset(pd.DataFrame({"x": [1.0, 2.0]}))
    assert table.sizes == {"index": 2}
    tensors = as_dataset({"w": torch.ones(2, 3, dtype=torch.bfloat16)})
    assert tensors.w.dtype == np.float32 and tensors.w.shape == (2, 3)
