"""Where a result comes from: what ran, on which model, with which versions and seeds, and how to run it again."""

import ast
import datetime
import hashlib
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from interp.core.results import ORIGIN
from interp.core.torch_state import products
from interp.core.transfers import to_host
from interp.core.version import VERSION
from interp.model.config import Json
from interp.model.transformer import Transformer

if TYPE_CHECKING:
    import xarray as xr

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pandas", "xarray")
TOGETHER = 2**28
"""Bytes of weights that are fetched from a device in one copy."""


def model_hash(model: Transformer) -> str:
    """SHA-256 over the names and bytes of all parameters, in order: the same weights give the same hash."""
    return tensors_hash(model.state_dict())


def tensors_hash(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over the names, dtypes, shapes and bytes of some tensors, in order; 2 GB take a second of a CPU."""
    digest = hashlib.sha256()
    for group in _copy_groups(tensors):
        for name, tensor in to_host(group).items():
            digest.update(f"{name}:{tensor.dtype}:{list(tensor.shape)}".encode())
            digest.update(in_memory(tensor))
    return digest.hexdigest()


def _copy_groups(state: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The tensors in order, in groups of about `TOGETHER` bytes that are copied to the host together."""
    group: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if group and sum(x.nbytes for x in group.values()) + tensor.nbytes > TOGETHER:
            yield group
            group = {}
        group[name] = tensor
    yield group


def bytes_of(tensor: Tensor) -> bytes:
    """The bytes of a tensor, row by row, as it lies in memory."""
    return in_memory(tensor).tobytes()


def in_memory(tensor: Tensor) -> memoryview:
    """The bytes of a tensor without a copy; a copy of them for a tensor on a GPU or a strided one."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


@cache
def versions() -> Mapping[str, str]:
    """Version of Python and of every package that can move a number; "absent" where one is not installed."""
    by_package = {"python": platform.python_version(), "interp": VERSION}
    for name in PACKAGES:
        try:
            by_package[name] = version(name)
        except PackageNotFoundError:
            by_package[name] = "absent"
    return by_package


def git_revision(folder: Path | None = None) -> str | None:
    """The commit of a folder (default: the working directory), or None outside a repository."""
    return _git("rev-parse", "HEAD", folder=folder)


def git_dirty(folder: Path | None = None) -> bool | None:
    """Whether tracked files differ from the commit of a folder; None outside a repository."""
    changed = _git("status", "--porcelain", "--untracked-files=no", folder=folder)
    return None if changed is None else bool(changed)


def provenance(
    model: Transformer, name: str, *, seed: int | None, parameters: Json, digest: str | None = None
) -> Json:
    """Everything needed to repeat a run, as a JSON object; `digest` is the model's hash, None: computed here."""
    return {
        "model": name,
        "model_sha256": digest or model_hash(model),
        "config": model.config.to_dict(),
        "dtype": str(model.dtype),
        "opened": list(model.opened),
        "device": str(model.device),
        "parameters": parameters,
        "seed": seed,
        "command": shlex.join(sys.argv),
        "versions": versions(),
        "git_revision": git_revision(),
        "platform": platform.platform(),
        "written": now(),
    }


def with_origin(result: "xr.Dataset", network: Transformer) -> "xr.Dataset":
    """The result with attributes that say in what precision, where and by what it was computed."""
    installed, dtype = versions(), str(network.dtype).removeprefix("torch.")
    rounded = products(torch.device(network.device)) if network.dtype == torch.float32 else None
    values = (
        f"{dtype}, products in {rounded}" if rounded else dtype,
        str(network.device),
        torch.get_num_threads(),
        ", ".join(f"{name} {installed[name]}" for name in ("interp", "torch", "transformers")),
    )
    return result.assign_attrs({**dict(zip(ORIGIN, values, strict=True)), **result.attrs})


def question_of(file: Path) -> str:
    """The docstring of a Python file, read without running it; "" if it has none or is no Python."""
    try:
        return ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    except (SyntaxError, ValueError):
        return ""


def now() -> str:
    """The time in UTC to the millisecond, by which runs are ordered, as ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def _git(*words: str, folder: Path | None) -> str | None:
    try:
        out = subprocess.run(
            ["git", *words], capture_output=True, text=True, timeout=5, check=True, cwd=folder
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return out.stdout.strip()
