"""Two runs beside each other: the planted differences come first, with exact p-values, and nothing is left unsaid."""

from itertools import product

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr

from interp.runs.comparison import (
    as_dataset,
    compared,
    compared_to_first,
    headline,
    holm_over_families,
    main_variables,
    over_seeds,
)

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


def rejected(families: list[np.ndarray], alpha: float) -> list[set[int]]:
    """The sequential rule itself, a slow loop: with k families not yet whole, all p <= alpha / k are rejected."""
    done: list[set[int]] = [set() for _ in families]
    while left := sum(len(each) < p.size for each, p in zip(done, families, strict=True)):
        now = [{i for i, value in enumerate(p) if value <= alpha / left} for p in families]
        if all(new <= old for new, old in zip(now, done, strict=True)):
            return done
        done = [old | new for old, new in zip(done, now, strict=True)]
    return done


def test_corrected_p_is_the_least_level_at_which_the_rule_rejects() -> None:
    generator = np.random.default_rng(0)
    for sizes in ((1,), (4,), (1, 1, 1), (2, 3), (3, 1, 2)):
        families = [np.round(generator.uniform(0, 0.3, size=n) ** 2, 4) for n in sizes]
        found = holm_over_families(families)
        for alpha in {float(p * k) for each in families for p in each for k in range(1, 4)} | {0.0, 0.02}:
            for level in (alpha * (1 - 1e-9), alpha * (1 + 1e-9)):
                if level < 1:
                    assert rejected(families, level) == [set(np.flatnonzero(p <= level)) for p in found]


def test_of_single_tests_the_correction_is_holms() -> None:
    """The textbook: the j-th smallest of m times m - j + 1, made ascending."""
    p = np.random.default_rng(1).uniform(0, 0.4, size=7)
    order = np.argsort(p)
    holm = np.minimum(1, np.maximum.accumulate(p[order] * np.arange(7, 0, -1)))
    np.testing.assert_allclose(
        np.array(holm_over_families([np.array(x) for x in p]))[order], holm, rtol=1e-15
    )
    (alone,) = holm_over_families([p.reshape(7, 1)])
    assert np.array_equal(alone, p.reshape(7, 1)) and holm_over_families([]) == []


def many(
    generator: np.random.Generator, effects: tuple[float, ...], cells: int, skewed: bool
) -> list[xr.Dataset]:
    """Runs on the same 8 rows: what rows have in common, noise, and the run's effect on the first cell."""
    draw = generator.exponential if skewed else generator.normal
    common, coords = 3 * generator.normal(size=(8, 1)), {"prompt": np.arange(8)}
    runs = [common + draw(size=(8, cells)) + effect * (np.arange(cells) == 0) for effect in effects]
    return [xr.Dataset({"s": (("prompt", "head"), run)}, coords=coords) for run in runs]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("effects", "cells", "skewed"),
    [
        ((0.0, 0.0), 3, True),
        ((0.0, 0.0, 0.0, 0.0), 1, False),
        ((0.0, 0.0, 0.0, 0.0), 3, True),
        ((0.0, 6.0, 0.0, 0.0), 3, False),
    ],
)
def test_one_false_difference_or_more_is_called_in_at_most_five_percent(
    effects: tuple[float, ...], cells: int, skewed: bool
) -> None:
    """The first cell of a run with an effect differs; every other difference that is called is false."""
    generator, times = np.random.default_rng(0), 250
    wrong = alone = 0
    for _ in range(times):
        found = compared_to_first(many(generator, effects, cells, skewed), largest=cells)
        p = [(k, each) for k, one in enumerate(found, 1) for each in one.largest]
        false = [each for k, each in p if not (effects[k] and each.where.startswith("head 0"))]
        wrong += any(each.p_adjusted <= 0.05 for each in false)
        alone += any(each.p <= 0.05 for each in false)
    spread = 3 * np.sqrt(0.05 * 0.95 / times)
    assert wrong / times <= 0.05 + spread
    if len(effects) > 2 and cells > 1:
        assert alone / times > 0.1, "uncorrected, many more would be called"


def test_a_true_difference_is_found_beside_others() -> None:
    found = compared_to_first(many(np.random.default_rng(0), (0.0, 6.0, 0.0), 2, False))
    assert found[0].largest[0].where == "head 0, mean of 8 prompts" and found[0].largest[0].p_adjusted < 0.05
    assert min(each.p_adjusted for each in found[1].largest) > 0.05


def test_repeated_runs_are_one_result_along_their_seeds() -> None:
    generator = np.random.default_rng(0)
    runs = [
        xr.Dataset(
            {"s": (("prompt", "head"), generator.normal(size=(4, 2))), "s_low": ("head", [0.0, 0.0]), "t": float(i),
             "w": ("head", ["a", "b"]), **({"u": 1.0} if i else {}), "v": (("i",), np.ones(1 + i))},
            coords={"prompt": range(4), "head": [3, 5]},
        )
        for i in range(2)
    ]  # fmt: skip
    found, notes = over_seeds(runs, [7, 9])
    assert set(found.data_vars) == {"s", "t"} and found.seed.values.tolist() == [7, 9]
    assert found.s.dims == ("seed", "head") and found["head"].values.tolist() == [3, 5]
    np.testing.assert_allclose(found.s.values, [run.s.values.mean(0) for run in runs], rtol=1e-15)
    assert found.t.values.tolist() == [0.0, 1.0]
    assert notes == [
        "w: texts have no mean over seeds", "v: over seeds, {'i': 1} and {'i': 2} cannot be compared",
        "u: not with every seed",
    ]  # fmt: skip


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
    found = compared(first, second)
    assert found.notes == ["s: 1 of 2 are numbers in one of the runs and NaN in the other"]


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


def test_rows_without_labels_are_not_paired_and_that_is_said() -> None:
    rows = [xr.Dataset({"value": ("row", np.arange(20.0) + shift)}) for shift in (0, 1)]
    assert compared(*rows).untested == {"value": "the labels of row are not stored, by which rows are paired"}
    labelled_rows = [each.assign_coords(row=np.arange(20)) for each in rows]
    found = compared(*labelled_rows)
    assert found.untested == {} and found.largest[0].p < 0.01
