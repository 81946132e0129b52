"""The growth of a process' own memory, which the bounds of the calls on real models are about."""

import time
from pathlib import Path

import numpy as np

from tests.real.memory import OwnMemory

MIB = 2**20


def test_new_memory_is_counted_while_it_is_held_and_pages_of_files_are_not(tmp_path: Path) -> None:
    np.ones(64 * MIB, np.uint8).tofile(tmp_path / "numbers")
    with OwnMemory() as own:
        made = np.ones(64 * MIB, np.uint8)
        time.sleep(0.05)
        del made
    with OwnMemory() as mapped:
        total = int(np.memmap(tmp_path / "numbers", np.uint8).sum(dtype=np.int64))
        time.sleep(0.05)
    assert total == 64 * MIB
    assert mapped.peak < 16 * MIB < 63 * MIB < own.peak < 80 * MIB
