"""Labelled results and their tables: nothing is lost on the way to disk, nothing half-written stays there."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr

import interp
from interp.core.notes import note
from interp.core.results import frame, labelled, noted, numbers, write_tables
from interp.plot.cards import card


def test_values_keep_their_dims_coords_and_attributes() -> None:
    result = labelled(
        "made_up",
        {"score": (("layer", "head"), torch.arange(6.0).reshape(2, 3)), "null": ((), torch.tensor(0.5))},
        coords={"layer": range(2), "head": ["a", "b", "c"]},
        attrs={"unit": "attention mass", "rows": 4},
    )
    assert result.score.dims == ("layer", "head")
    assert float(result.score.sel(layer=1, head="b")) == 4
    assert float(result.null) == 0.5
    assert result.attrs == {"interp_analysis": "made_up", "unit": "attention mass", "rows": 4}


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [(torch.bfloat16, "float32"), (torch.float16, "float32"), (torch.float32, "float32"),
     (torch.float64, "float64"), (torch.int64, "int64"), (torch.bool, "bool")],
)  # fmt: skip
def test_half_precision_is_widened_and_everything_else_kept(dtype: torch.dtype, stored: str) -> None:
    result = labelled("made_up", {"x": (("row",), torch.tensor([0, 1]).to(dtype))})
    assert result.x.dtype == np.dtype(stored)
    assert result.x.values.tolist() == [0, 1]


def test_values_that_carry_a_graph_are_detached() -> None:
    assert labelled("made_up", {"x": ((), torch.tensor(2.0, requires_grad=True))}).x == 2


def test_a_frame_of_one_number_has_one_row() -> None:
    found = frame(xr.Dataset({"value": 2.5, "n": 3, "each": ("prompt", [1.0, 4.0])}, {"depth": 7}))
    assert found.to_dict("records") == [{"depth": 7, "value": 2.5, "n": 3}]


def test_a_result_without_variables_has_no_frame() -> None:
    with pytest.raises(ValueError, match="a result with variables is required"):
        frame(xr.Dataset())


def test_a_frame_has_one_row_per_cell_with_its_coordinates_as_columns() -> None:
    result = labelled(
        "made_up", {"s": (("layer", "head"), torch.arange(4).reshape(2, 2))}, coords={"head": ["a", "b"]}
    )
    table = frame(result)
    assert list(table.columns) == ["layer", "head", "s"]
    assert [tuple(row) for row in table.itertuples(index=False)] == [
        (0, "a", 0), (0, "b", 1), (1, "a", 2), (1, "b", 3),
    ]  # fmt: skip


def test_tables_round_trip_through_both_formats(tmp_path: Path) -> None:
    table = pd.DataFrame(
        {
            "layer": [0, 1],
            "token": [" the", 'a,"b"\n'],
            "score": [0.1 + 0.2, float("nan")],
            "hit": [True, False],
        }
    )
    paths = write_tables({"scores": table, "more": table[["layer"]]}, tmp_path)
    assert [p.name for p in paths] == ["scores.csv", "scores.parquet", "more.csv", "more.parquet"]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(p.name for p in paths)
    pd.testing.assert_frame_equal(pd.read_parquet(paths[1]), table, check_dtype=False)
    pd.testing.assert_frame_equal(pd.read_csv(paths[0]), table, check_dtype=False)


def test_a_table_that_cannot_be_written_leaves_no_part_of_it(tmp_path: Path) -> None:
    mixed = pd.DataFrame({"x": [1, object()]})  # CSV takes it, Parquet does not
    with pytest.raises(Exception, match="x"):
        write_tables({"bad": mixed}, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} <= {"bad.csv"}


# --- notes --------------------------------------------------------------------------------------------------------


def test_a_note_stands_in_the_result_in_its_text_and_in_a_warning() -> None:
    note.cache_clear()
    with pytest.warns(interp.Note, match="made_up: a sample of 4"):
        result = labelled("made_up", {"value": ((), torch.tensor(1.0))}, notes=["a sample of 4"])
    assert result.attrs["notes"] == ["a sample of 4"] and result.view.notes == ("a sample of 4",)
    assert str(result.view).splitlines()[1] == "  note: a sample of 4"
    assert "Note: a sample of 4" in card(result)


def test_notes_are_added_once_and_survive_a_file(tmp_path: Path) -> None:
    result = labelled("made_up", {"value": ((), torch.tensor(1.0))}, notes=["one"])
    several = noted(result, "one", "two")
    assert several.attrs["notes"] == ["one", "two"] and result.attrs["notes"] == ["one"]
    for each in (result, several):
        each.to_netcdf(tmp_path / "result.nc")
        with xr.open_dataset(tmp_path / "result.nc") as read:
            assert read.view.notes == each.view.notes


def test_a_result_without_notes_has_no_such_attribute() -> None:
    assert "notes" not in labelled("made_up", {"value": ((), torch.tensor(1.0))}).attrs


@pytest.mark.parametrize("kind", ["int8", "uint8", "int64", "uint16", "bool"])
def test_whole_numbers_of_a_result_are_computed_with_as_others_are(kind: str) -> None:
    values = xr.DataArray(np.array([[3, 0, 5], [1, 2, 4]], dtype=kind), dims=("a", "b"))
    found = numbers("it", values, ("b", "a"))
    assert found.dtype == (torch.bool if kind == "bool" else torch.float64)
    assert found.tolist() == values.T.to_numpy().tolist()
