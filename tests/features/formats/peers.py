"""Dictionaries that other tools wrote, with what these tools compute, and the comparison with what is read of them."""

from pathlib import Path

import numpy as np
import torch

from interp.features import Dictionary

PEERS = Path(__file__).parent / "peers"
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5}
"""How far two orders of the same sums may differ, relative to the largest entry."""


def written_by(peer: str) -> list[Path]:
    """The folders that a tool wrote."""
    return sorted(found.parent for found in (PEERS / peer).rglob("expected.npz"))


def assert_agrees(found: Dictionary, folder: Path) -> None:
    """Features and output of the vectors beside are those of the tool that wrote the folder."""
    with np.load(folder / "expected.npz") as arrays:
        expected = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    tolerance = TOLERANCES[expected["features"].dtype]
    assert (expected["features"] != 0).any()
    for name, value in (("features", found.encode(expected["x"])), ("output", found(expected["x"]))):
        worst = (value - expected[name]).abs().max() / expected[name].abs().max()
        assert worst <= tolerance, f"{folder.name}: {name} differ by {worst:.1e}"
