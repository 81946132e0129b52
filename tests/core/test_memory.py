"""Memory that is known before it is used: what is not free is refused, what is much is said, the rest costs nothing."""

import resource
import warnings

import pytest
import torch

from interp import Note
from interp.core import memory
from interp.core.memory import check_memory, free_memory
from interp.core.notes import note

CPU = torch.device("cpu")


def test_more_than_is_free_is_refused_and_much_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    note.cache_clear()
    monkeypatch.setattr(memory, "free_memory", lambda device: 8 * 10**9)
    with pytest.raises(
        ValueError, match=r"^1000 rows \(rows\): 12 GB of memory are required, 8 GB are free; take less$"
    ):
        check_memory("1000 rows (rows)", 1.2e10, CPU, "take less")
    with pytest.warns(Note, match=r"^500 rows \(rows\): 6 GB of memory; take less$"):
        check_memory("500 rows (rows)", 6e9, CPU, "take less")
    with warnings.catch_warnings():
        warnings.simplefilter("error", Note)
        check_memory("200 rows (rows)", 2e9, CPU, "take less")


def test_what_is_little_asks_the_system_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: pytest.fail("asked"))
    check_memory("a row", 10**9, CPU, "take less")


def test_a_limit_of_the_process_counts_as_no_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    before = free_memory(CPU)
    assert 0 < before < 10**15
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (10**6, 10**6))
    assert free_memory(CPU) == 0
