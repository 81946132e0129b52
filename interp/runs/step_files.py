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
"""Global attribute of our netCDF files: dtypes and attributes as JSON, where netCDF itself would bend them."""


@dataclass(frozen=True)
class Encoded:
    """A result as files: what follows the name of the step -> bytes, the exact file first."""

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
        kind, files = "dataset", {".nc": _netcdf(value)} | _tidy(value)
    elif isinstance(value, pd.DataFrame):
        kind, files = "frame", {".parquet": _parquet(value)}
    elif isinstance(value, dict) and all(isinstance(each, Tensor) for each in value.values()):
        kind, files = "tensors", {".safetensors": _safetensors(value)}
    else:
        raise TypeError(
            f"a step gives an xarray Dataset, a pandas DataFrame or a dict of tensors, got {type(value).__name__}"
        )
    found = Encoded(kind, files)  # type: ignore[arg-type]
    if odd := _difference(value, decoded(found.kind, next(iter(files.values())))):
        raise ValueError(f"the result cannot be stored exactly: {odd}")
    return found


def decoded(kind: ResultKind, data: bytes) -> object:
    """The value that `encoded` gave these bytes for; tensors are on the CPU."""
    import pandas as pd

    if kind == "dataset":
        return _dataset(data)
    if kind == "frame":
        return pd.read_parquet(io.BytesIO(data))
    from safetensors.torch import load

    return load(data)


def _netcdf(value: "xr.Dataset") -> bytes:
    """netCDF bytes; attributes that netCDF knows are written as such too, for other readers."""
    dtypes = {str(name): each.dtype.str for name, each in value.variables.items() if each.dtype.kind in "OU"}
    exact: Json = {
        "dtypes": dtypes,
        "attrs": {str(name): _plain_attrs(each.attrs) for name, each in value.variables.items()},
        "dataset": _plain_attrs(value.attrs),
    }
    texts = [name for name in dtypes if any(NUL in str(text) for text in value[name].values.flat)]
    exact["escaped"] = list(texts)
    bare = value.copy()
    for name in texts:  # netCDF ends a text at NUL, which is a token of byte vocabularies
        bare[name] = bare[name].copy(data=_each(_escaped, bare[name].values))
    bare.attrs = _native(bare.attrs)
    for variable in bare.variables.values():
        variable.attrs, variable.encoding = _native(variable.attrs), {}
    bare.attrs[EXACT] = json.dumps(exact)
    try:
        return bytes(bare.to_netcdf(engine="h5netcdf"))
    except (TypeError, ValueError, OverflowError) as cause:
        raise ValueError(f"the result cannot be stored as netCDF: {cause}") from cause


def _dataset(data: bytes) -> "xr.Dataset":
    import xarray as xr

    found = xr.load_dataset(io.BytesIO(data), engine="h5netcdf")
    exact = json.loads(found.attrs.pop(EXACT))
    for name in exact.get("escaped", ()):
        found[name] = found[name].copy(data=_each(_plain, found[name].values))
    for name, dtype in exact["dtypes"].items():
        if found[name].dtype.str != dtype:
            found = (
                found.assign_coords({name: found[name].astype(dtype)})
                if name in found.coords
                else found.assign({name: found[name].astype(dtype)})
            )
    for name, attrs in exact["attrs"].items():
        found[name].attrs = attrs
    found.attrs = exact["dataset"]
    return found


def _each(change: Callable[[str], str], texts: "NDArray[np.object_]") -> "NDArray[np.object_]":
    """The value with its texts changed, and all else left as it is."""
    import numpy as np

    made = np.empty(texts.shape, dtype=object)
    for place, text in np.ndenumerate(texts):
        made[place] = change(str(text)) if isinstance(text, str) else text
    return made


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace(NUL, "\\0")


def _plain(text: str) -> str:
    return re.sub(r"\\(.)", lambda found: NUL if found[1] == "0" else found[1], text, flags=re.DOTALL)


def _native(attrs: Mapping[object, object]) -> Json:
    return {str(name): each for name, each in attrs.items() if type(each) in (str, int, float)}


def _plain_attrs(attrs: Mapping[object, object]) -> Json:
    """Attributes as JSON: numpy's numbers become Python's; ValueError for what JSON would change."""
    import numpy as np

    found: Json = {
        str(name): each.item() if isinstance(each, np.generic) else each for name, each in attrs.items()
    }
    for name, each in found.items():
        try:
            same = json.dumps(json.loads(json.dumps(each))) == json.dumps(each) and not isinstance(
                each, tuple
            )
        except TypeError:
            same = False
        if not same:
            raise ValueError(f"attribute {name!r} must be text, a number, or a list of these, got {each!r}")
    return found


def _tidy(value: "xr.Dataset") -> dict[str, bytes]:
    """Tables by dims: a table of all variables together would be as large as the product of all dims."""
    import pandas as pd

    groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, each in value.data_vars.items():
        groups[tuple(sorted(map(str, each.dims)))].append(str(name))
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

    return save({name: each.detach().cpu().contiguous().clone() for name, each in tensors.items()})


def _difference(value: object, back: object) -> str | None:
    """The first thing that did not come back, or None."""
    import pandas as pd
    import xarray as xr

    if isinstance(value, xr.Dataset) and isinstance(back, xr.Dataset):
        wide = [str(n) for n, each in value.variables.items() if each.dtype != back[n].dtype]
        if wide:
            return f"dtypes of {wide}"
        return None if back.identical(value) else "values, coordinates or attributes"
    if isinstance(value, pd.DataFrame) and isinstance(back, pd.DataFrame):
        try:
            pd.testing.assert_frame_equal(value, back, check_exact=True)
        except AssertionError as cause:
            return " ".join(str(cause).split())
        return None if value.attrs == back.attrs else "attrs"
    assert isinstance(value, dict) and isinstance(back, dict)
    odd = [n for n, each in value.items() if _identity(each) != _identity(back[n])]
    return f"tensors {odd}" if odd else None


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
    except Exception as cause:  # of many kinds, and of none in particular: the file may be damaged anywhere
        raise ValueError(f"{path} is damaged, it cannot be read: {cause}") from cause
