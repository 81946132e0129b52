"""Finished results: tensors with named dimensions become xarray, and xarray becomes tidy tables on disk."""

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

Coords = Mapping[str, Sequence[str] | Sequence[int]]


def labelled(
    analysis: str,
    values: Mapping[str, tuple[Sequence[str], Tensor]],
    *,
    coords: Coords | None = None,
    attrs: Mapping[str, str | float | int] | None = None,
) -> "xr.Dataset":
    """A Dataset from `{name: (dims, tensor)}`; half precision is widened to float32, tensors move to the host.

    analysis: what gave it, kept as `attrs["interp_analysis"]`: by it a result finds its plot, `result.view.plot()`.
    """
    import xarray as xr

    from interp.core import accessor

    def host(value: Tensor) -> object:
        value = value.detach()
        if value.is_floating_point() and value.dtype not in (torch.float32, torch.float64):
            value = value.float()
        return value.cpu().numpy()

    variables = {name: (tuple(dims), host(value)) for name, (dims, value) in values.items()}
    return xr.Dataset(
        variables,
        coords={k: list(v) for k, v in (coords or {}).items()},
        attrs={accessor.ANALYSIS: analysis, **(attrs or {})},
    )


def frame(result: "xr.Dataset") -> "pd.DataFrame":
    """The tidy table of a result: one row per cell, its coordinates as columns."""
    return result.to_dataframe().reset_index()


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `path`, then rename it: nothing half-written ever bears the name."""
    path = Path(path)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_tables(tables: Mapping[str, "pd.DataFrame"], folder: Path) -> list[Path]:
    """Write each table as `<name>.csv` and `<name>.parquet` into `folder`; returns the paths."""
    paths = []
    for name, table in tables.items():
        csv, parquet = folder / f"{name}.csv", folder / f"{name}.parquet"
        write_atomically(csv, partial(table.to_csv, index=False))
        write_atomically(parquet, partial(table.to_parquet, index=False))
        paths += [csv, parquet]
    return paths
