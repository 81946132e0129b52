"""The experiments that `test_record_killed.py` kills: processes of their own import them from here."""

import os
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import h5netcdf
import numpy as np
import pandas as pd
import pyarrow.parquet
import safetensors.torch
import torch
import xarray as xr

from interp.runs.record import Record

PRELOADED = (h5netcdf, pyarrow.parquet, safetensors.torch)
"""Imported here, so that no killed process spends its time on it."""
NAMES = ("a", "b", "c", "d", "e")
LARGE = 300_000


@dataclass(frozen=True)
class Job:
    seed: int = 7


def expected(i: int) -> np.ndarray:
    """The value of step i in closed form: each doubles the one before and adds its number."""
    return np.arange(4.0) * 2**i + (2 ** (i + 1) - 2 - i)


def value_of(result: object) -> np.ndarray:
    if isinstance(result, xr.Dataset):
        return result.x.to_numpy()
    if isinstance(result, pd.DataFrame):
        return result.x.to_numpy()
    assert isinstance(result, dict)
    return result["x"].numpy()


def five_steps(root: Path) -> None:
    """Go on with the run in `root`, or start it; every computation leaves a line behind."""
    torch.set_num_threads(1)  # a forked process has no other threads to share the work with
    folders = [path.parent for path in root.glob("*/run.json")]
    record = Record.resume(folders[0], Job()) if folders else Record.create(root, "trial", Job(), command="x")

    def computed(i: int, name: str, before: np.ndarray) -> object:
        with (root / "computed.txt").open("a") as file:
            file.write(f"{name}\n")
        time.sleep(0.004)
        x = before * 2 + i
        kinds = (
            lambda: xr.Dataset({"x": ("i", x)}),
            lambda: pd.DataFrame({"x": x}),
            lambda: {"x": torch.from_numpy(x)},
        )
        return kinds[i % 3]()

    with record:
        now = np.arange(4.0) / 2
        for i, name in enumerate(NAMES):
            now = value_of(record.step(name, partial(computed, i, name, now)))


def killed_at(root: Path, number: int) -> None:
    """Do the five steps, and die by SIGKILL when the n-th finished file is about to take its name."""
    die_at_rename(number)
    five_steps(root)


def die_at_rename(number: int) -> None:
    """From now on: SIGKILL when the n-th finished file is about to take its name."""
    count = 0

    def counted(name: Callable[..., object], *files: object, **options: object) -> None:
        nonlocal count
        count += 1
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)
        name(*files, **options)

    for how in ("replace", "link"):
        setattr(os, how, partial(counted, getattr(os, how)))


def with_room(limit: int, root: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    large_step(root)


def large_step(root: Path) -> None:
    torch.set_num_threads(1)  # a forked process has no other threads to share the work with
    folders = [path.parent for path in root.glob("*/run.json")]
    record = Record.resume(folders[0], Job()) if folders else Record.create(root, "trial", Job(), command="x")

    def computed(name: str, size: int) -> dict[str, torch.Tensor]:
        with (root / "computed.txt").open("a") as file:
            file.write(f"{name}\n")
        return {"x": torch.arange(size, dtype=torch.float32)}

    with record:
        record.step("small", lambda: computed("small", 4))
        record.step("large", lambda: computed("large", LARGE))
