"""The result of a step as bytes and back, exactly: netCDF for Datasets, Parquet for tables, safetensors for tensors.

Everything is turned into bytes before a file is opened: what can go wrong while a result is encoded leaves no file, and
a disk that fills up fails in one place.
"""

import io
import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from interp.core.files import regular
from interp.core.results import frame
from interp.model.config import Json
from interp.runs.provenance import bytes_of
from interp.runs.run_file import ResultKind

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    import xarray as xr
    from numpy.typing import NDArray

NUL = "\0"
SUFFIX: Mapping[ResultKind, str] = {"dataset": ".nc", "frame": ".parquet", "tensors": ".safetensors"}
EXACT = "interp_exact"
"""Global attribute of our netCDF files: dtypes and attributes as JSON, which netCDF itself would change."""


@dataclass(frozen=True)
class Encoded:
    """A result as files: bytes by file suffix; the first file is the one from which the result is read."""

    kind: ResultKind
    files: dict[str, bytes]


def encoded(value: object) -> Encoded:
    """The files of a Dataset, a DataFrame or a dict of tensors, checked to give the same value back.

    A Dataset is a netCDF file and beside it tidy Parquet tables, one for all variables of the same dims: `.parquet` if
    there is one table, else `.layer-head.parquet` and so on.

    Raises:
        TypeError: any other kind.
        ValueError: if the value would not come back as it is, naming what differs.
    """
    import pandas as pd
    import xarray as xr

    if isinstance(value, xr.Dataset):
        kind, files = "dataset", {".nc": _netcdf(value)} | _tidy_tables(value)
    elif isinstance(value, pd.DataFrame):
        kind, files = "frame", {".parquet": _parquet(value)}
    elif isinstance(value, dict) and all(isinstance(tensor, Tensor) for tensor in value.values()):
        kind, files = "tensors", {".safetensors": _safetensors(value)}
    else:
        raise TypeError(
            f"a step gives an xarray Dataset, a pandas DataFrame or a dict of tensors, got {type(value).__name__}"
        )
    result = Encoded(kind, files)  # type: ignore[arg-type]
    if difference := _difference(value, decoded(result.kind, next(iter(files.values())))):
        raise ValueError(f"the result cannot be stored exactly: {difference}")
    return result


def decoded(kind: ResultKind, data: bytes) -> object:
    """The value that `encoded` gave these bytes for; tensors are on the CPU."""
    import pandas as pd

    if kind == "dataset":
        return _dataset_of_netcdf(data)
    if kind == "frame":
        return pd.read_parquet(io.BytesIO(data))
    from safetensors.torch import load

    return load(data)


def _netcdf(value: "xr.Dataset") -> bytes:
    """A Dataset as the bytes of a netCDF file; attributes that netCDF supports are written natively too."""
    dtypes = {str(name): x.dtype.str for name, x in value.variables.items() if x.dtype.kind in "OU"}
    exact: Json = {
        "dtypes": dtypes,
        "attrs": {str(name): _plain_attrs(each.attrs) for name, each in value.variables.items()},
        "dataset": _plain_attrs(value.attrs),
    }
    texts = [name for name in dtypes if any(NUL in str(text) for text in value[name].values.flat)]
    exact["escaped"] = list(texts)
    bare = value.copy()
    for name in texts:  # netCDF ends a text at NUL, but byte vocabularies have it as a token
        bare[name] = bare[name].copy(data=_with_texts(_escaped, bare[name].values))
    bare.attrs = _native_attrs(bare.attrs)
    for variable in bare.variables.values():
        variable.attrs, variable.encoding = _native_attrs(variable.attrs), {}
    bare.attrs[EXACT] = json.dumps(exact)
    try:
        return bytes(bare.to_netcdf(engine="h5netcdf"))
    except (TypeError, ValueError, OverflowError) as cause:
        raise ValueError(f"the result cannot be stored as netCDF: {cause}") from cause


def _dataset_of_netcdf(data: bytes) -> "xr.Dataset":
    """The Dataset of the bytes that `_netcdf` made, with its exact dtypes and attributes."""
    import xarray as xr

    dataset = xr.load_dataset(io.BytesIO(data), engine="h5netcdf")
    exact = json.loads(dataset.attrs.pop(EXACT))
    for name in exact.get("escaped", ()):
        dataset[name] = dataset[name].copy(data=_with_texts(_unescaped, dataset[name].values))
    for name, dtype in exact["dtypes"].items():
        if dataset[name].dtype.str != dtype:
            dataset = (
                dataset.assign_coords({name: dataset[name].astype(dtype)})
                if name in dataset.coords
                else dataset.assign({name: dataset[name].astype(dtype)})
            )
    for name, attrs in exact["attrs"].items():
        dataset[name].attrs = attrs
    dataset.attrs = exact["dataset"]
    return dataset


def _with_texts(change: Callable[[str], str], texts: "NDArray[np.object_]") -> "NDArray[np.object_]":
    """An array of objects with `change` applied to its texts, other objects unchanged."""
    import numpy as np

    changed = np.empty(texts.shape, dtype=object)
    for place, text in np.ndenumerate(texts):
        changed[place] = change(str(text)) if isinstance(text, str) else text
    return changed


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace(NUL, "\\0")


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", lambda found: NUL if found[1] == "0" else found[1], text, flags=re.DOTALL)


def _native_attrs(attrs: Mapping[object, object]) -> Json:
    return {str(name): attr for name, attr in attrs.items() if type(attr) in (str, int, float)}


def _plain_attrs(attrs: Mapping[object, object]) -> Json:
    """Attributes as JSON: numpy's numbers become Python's; ValueError for what JSON would change."""
    import numpy as np

    plain: Json = {
        str(name): attr.item() if isinstance(attr, np.generic) else attr for name, attr in attrs.items()
    }
    for name, attr in plain.items():
        try:
            same = json.dumps(json.loads(json.dumps(attr))) == json.dumps(attr) and not isinstance(
                attr, tuple
            )
        except TypeError:
            same = False
        if not same:
            raise ValueError(f"attribute {name!r} must be text, a number, or a list of these, got {attr!r}")
    return plain


def _tidy_tables(value: "xr.Dataset") -> dict[str, bytes]:
    """Parquet files by suffix, one for all variables of the same dims (one table of all would be their product)."""
    import pandas as pd

    groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, variable in value.data_vars.items():
        groups[tuple(sorted(map(str, variable.dims)))].append(str(name))
    files = {}
    for dims, names in groups.items():
        table = frame(value[names]) if dims else pd.DataFrame({name: [value[name].item()] for name in names})
        label = "" if len(groups) == 1 else f".{'-'.join(dims) or 'scalars'}"
        files[f"{label}.parquet"] = _parquet(table)
    return files


def _parquet(table: "pd.DataFrame") -> bytes:
    import pyarrow as pa

    buffer = io.BytesIO()
    try:
        table.to_parquet(buffer)
    except (pa.ArrowException, ValueError, TypeError) as cause:
        raise ValueError(f"the table cannot be stored as Parquet: {cause}") from cause
    return buffer.getvalue()


def _safetensors(tensors: Mapping[str, Tensor]) -> bytes:
    from safetensors.torch import save

    return save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()})


def _difference(value: object, back: object) -> str | None:
    """What differs between a result and its stored copy, in words; None if they are equal."""
    import pandas as pd
    import xarray as xr

    if isinstance(value, xr.Dataset) and isinstance(back, xr.Dataset):
        changed = [str(n) for n, original in value.variables.items() if original.dtype != back[n].dtype]
        if changed:
            return f"dtypes of {changed}"
        return None if back.identical(value) else "values, coordinates or attributes"
    if isinstance(value, pd.DataFrame) and isinstance(back, pd.DataFrame):
        try:
            pd.testing.assert_frame_equal(value, back, check_exact=True)
        except AssertionError as cause:
            return " ".join(str(cause).split())
        return None if value.attrs == back.attrs else "attrs"
    assert isinstance(value, dict) and isinstance(back, dict)
    different = [n for n, original in value.items() if _identity(original) != _identity(back[n])]
    return f"tensors {different}" if different else None


def _identity(tensor: Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return tensor.dtype, tensor.shape, bytes_of(tensor)


def read(kind: ResultKind, path: Path) -> object:
    """The value in a file that a step wrote; FileNotFoundError if it was removed, ValueError for a damaged one."""
    try:
        regular(path)
    except FileNotFoundError as cause:
        raise FileNotFoundError(f"{path} is missing, though the run lists it as written") from cause
    try:
        return decoded(kind, path.read_bytes())
    except Exception as cause:  # readers raise errors of many types for a damaged file
        raise ValueError(f"{path} is damaged, it cannot be read: {cause}") from cause
