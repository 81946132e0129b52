"""Results on disk: what is read back is what was written, to the bit, the dtype and the attribute."""

import io
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from torch import Tensor

from interp.core.results import frame
from interp.runs.step_files import EXACT, decoded, encoded, read

DATASETS = {
    "floats": xr.Dataset({"x": (("layer", "head"), np.array([[np.nan, -0.0], [np.inf, 1e-310]]))}),
    "narrow": xr.Dataset({"h": ("a", np.array([1, 2.5], np.float16)), "f": ("a", np.array([0.1, np.nan], np.float32))}),
    "integers": xr.Dataset(
        {"i": ("a", np.array([-1, 2**62])), "u": ((), np.uint8(255)), "s": ("a", np.array([1, 2], np.int16))}
    ),
    "truth": xr.Dataset({"b": ("a", np.array([True, False])), "one": ((), True)}),
    "words": xr.Dataset(
        {"w": (("a", "b"), np.array([["", " Mary"], ["ü\n", "∅"]])), "o": ("a", np.array(["q", "long"], object))}
    ),
    "labelled": xr.Dataset(
        {"v": (("layer", "token"), np.arange(4.0).reshape(2, 2), {"unit": "logits", "signed": True})},
        coords={"layer": [3, 7], "token": [" a", " bcd"], "pos": ("token", [5, 6]), "model": "demo", "depth": 2.5},
        attrs={"unit": "nats", "rows": 12, "low": 0.5, "kept": False, "sites": ["a", "b"], "none": None},
    ),
    "tokens of bytes": xr.Dataset(
        {"w": (("a", "b"), np.array([["a\0b", "\\0"], ["plain", "\0"]], object)), "x": (("a", "b"), np.eye(2))},
        coords={"a": np.array(["x\0y", "z"], object), "text": ("b", np.array(["q", "\\\0r"], object))},
    ),
    "empty": xr.Dataset(
        {"x": ("row", np.zeros(0)), "w": ("row", np.zeros(0, "<U3"))}, coords={"row": np.zeros(0, int)}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DATASETS)
def test_a_dataset_comes_back_with_its_dtypes_labels_and_attributes(name: str) -> None:
    value = DATASETS[name]
    before = value.copy(deep=True)
    found = encoded(value)
    back = decoded(found.kind, found.files[".nc"])
    assert isinstance(back, xr.Dataset)
    xr.testing.assert_identical(back, before)
    assert {n: v.dtype for n, v in back.variables.items()} == {
        n: v.dtype for n, v in before.variables.items()
    }
    assert {n: v.dims for n, v in back.variables.items()} == {n: v.dims for n, v in before.variables.items()}
    for key, attr in before.attrs.items():
        assert type(back.attrs[key]) is type(attr)
    xr.testing.assert_identical(value, before)


def test_the_sign_of_zero_and_numbers_below_the_normal_range_survive() -> None:
    found = encoded(DATASETS["floats"])
    back = decoded("dataset", found.files[".nc"])
    assert isinstance(back, xr.Dataset)
    assert back.x.to_numpy().tobytes() == DATASETS["floats"].x.to_numpy().tobytes()


def test_other_readers_of_netcdf_find_the_plain_attributes_too() -> None:
    found = xr.load_dataset(io.BytesIO(encoded(DATASETS["labelled"]).files[".nc"]), engine="h5netcdf")
    assert {"unit", "rows", "low", EXACT} == set(found.attrs)
    assert (found.attrs["unit"], found.attrs["rows"], found.v.attrs["unit"]) == ("nats", 12, "logits")


def test_variables_of_the_same_dims_share_a_tidy_table() -> None:
    value = xr.Dataset(
        {
            "a": (("x", "y"), np.ones((2, 3))),
            "b": (("y", "x"), np.zeros((3, 2))),
            "c": ("z", [1.0, 2.0]),
            "d": 3.0,
        }
    )
    files = encoded(value).files
    assert list(files) == [".nc", ".x-y.parquet", ".z.parquet", ".scalars.parquet"]
    tables = {name: pd.read_parquet(io.BytesIO(data)) for name, data in files.items() if name != ".nc"}
    pd.testing.assert_frame_equal(tables[".x-y.parquet"], frame(value[["a", "b"]]))
    assert [len(table) for table in tables.values()] == [6, 2, 1]
    assert list(encoded(value[["a", "b"]]).files) == [".nc", ".parquet"]


FRAMES = {
    "mixed": pd.DataFrame({"n": [1, 2], "x": [np.nan, -0.0], "w": ["a", None], "b": [True, False]}),
    "indexed": pd.DataFrame({"x": np.array([1, 2], np.int8)}, index=pd.Index([5, 3], name="row")),
    "categories": pd.DataFrame({"c": pd.Categorical(["u", "v"], categories=["v", "u"])}),
    "empty": pd.DataFrame({"x": np.zeros(0, np.float32)}),
}


@pytest.mark.parametrize("name", FRAMES)
def test_a_table_comes_back_with_its_dtypes_and_index(name: str) -> None:
    value = FRAMES[name].copy()
    value.attrs = {"unit": "nats"}
    found = encoded(value)
    back = decoded(found.kind, found.files[".parquet"])
    assert isinstance(back, pd.DataFrame)
    pd.testing.assert_frame_equal(back, value, check_exact=True)
    assert back.attrs == value.attrs


TENSORS = {
    "half": torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
    "scalar": torch.tensor(3),
    "empty": torch.zeros(0, 4),
    "truth": torch.tensor([[True], [False]]),
    "turned": torch.arange(6.0).view(2, 3).T,
}


def test_tensors_come_back_to_the_bit_whatever_their_strides() -> None:
    found = encoded(TENSORS)
    back = decoded(found.kind, found.files[".safetensors"])
    assert isinstance(back, dict) and back.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert back[name].dtype == tensor.dtype
        torch.testing.assert_close(back[name], tensor, rtol=0, atol=0, equal_nan=True)


def test_tensors_that_share_memory_are_stored_each_whole() -> None:
    whole = torch.arange(4.0)
    back = decoded("tensors", encoded({"a": whole, "b": whole[1:]}).files[".safetensors"])
    assert isinstance(back, dict)
    assert torch.equal(back["b"], torch.tensor([1.0, 2.0, 3.0])) and torch.equal(back["a"], whole)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (xr.DataArray([1.0]), "an xarray Dataset, a pandas DataFrame or a dict of tensors, got DataArray"),
        ({"x": 1.0}, "got dict"),
        (None, "got NoneType"),
    ],
)
def test_another_kind_of_result_is_refused(value: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        encoded(value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (xr.Dataset(attrs={"shape": (2, 3)}), r"attribute 'shape' must be text, a number, or a list"),
        (xr.Dataset({"x": ("a", [1.0], {"f": Tensor})}), "attribute 'f' must be text"),
        (xr.Dataset({"x": ("a", np.array([{}], object))}), "cannot be stored as netCDF"),
        (xr.Dataset({"x": ("a", np.array([1j]))}), "cannot be stored as Parquet"),
        (pd.DataFrame({"x": [1, "a"]}), "cannot be stored as Parquet"),
        (pd.DataFrame({"x": [(1, 2)]}), "the result cannot be stored exactly"),
    ],
)
def test_what_would_come_back_changed_is_refused_before_it_is_written(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encoded(value)


def test_a_file_that_somebody_removed_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"gone\.nc is missing, though the run lists it"):
        read("dataset", tmp_path / "gone.nc")
