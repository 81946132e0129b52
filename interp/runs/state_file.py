"""The state of a training run as one file, replaced in one rename: a killed run goes on from whole steps, to the bit.

Tensors lie in safetensors, what is no tensor in its metadata as JSON, with a checksum of both.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from interp.core.files import write_atomically
from interp.model.config import Json
from interp.runs.provenance import bytes_of

ADAM = "adam"
"""What the names of an optimiser's tensors begin with."""


def write_state(path: Path, tensors: Mapping[str, Tensor], told: Json) -> None:
    """Write tensors and the entries `told` to a file in one step."""
    from safetensors.torch import save_file

    whole = {name: each.detach().cpu().contiguous() for name, each in tensors.items()}
    run = json.dumps({**told, "sha256": checksum(whole, told)})
    write_atomically(path, lambda file: save_file(whole, file, metadata={"run": run}))


def read_state(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `write_state` wrote to a file: the tensors, on the CPU, and the entries.

    Raises:
        ValueError: a file whose bytes are not those that were written.
    """
    from safetensors import SafetensorError, safe_open

    damaged = f"{path} is damaged, its bytes are not those that were written: train in a new folder"
    try:
        with safe_open(path, framework="pt") as file:
            told = json.loads(file.metadata()["run"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as cause:
        raise ValueError(damaged) from cause
    if told.pop("sha256", None) != checksum(tensors, told):
        raise ValueError(damaged)
    return tensors, told


def optimiser_tensors(optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The moments and counts of an optimiser, named by the number of their parameter."""
    state = optimiser.state_dict()["state"]
    return {
        f"{ADAM}.{number}.{name}": each for number, moments in state.items() for name, each in moments.items()
    }


def restore_optimiser(optimiser: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Put what `optimiser_tensors` gave into an optimiser of the same parameters; other names are left alone."""
    moments: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        kind, _, rest = name.partition(".")
        if kind == ADAM:
            number, _, moment = rest.partition(".")
            moments.setdefault(int(number), {})[moment] = value.clone()
    optimiser.load_state_dict({"state": moments, "param_groups": optimiser.state_dict()["param_groups"]})


def checksum(tensors: Mapping[str, Tensor], told: Json) -> str:
    """SHA-256 of the tensors, by name, and of the entries stored with them."""
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode())
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        digest.update(bytes_of(value))
    return digest.hexdigest()
