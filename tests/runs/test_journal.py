"""Progress on disk: every reduction comes back bit for bit; torn or damaged entries cost themselves only."""

import errno
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from torch import Tensor

import interp
from interp.core.contexts import TopInContext
from interp.core.covariance import Covariances
from interp.core.extremes import TopRows
from interp.core.named import Only, Several
from interp.core.sketches import Histograms, quantiles
from interp.core.stats import Bootstrap, MaskedMeans, Means, Partial, Reduction, Rows
from interp.data.sources import Rejected
from interp.features.dictionary_metrics import Fit
from interp.runs import journal as journals
from interp.runs.journal import Journal, numbers_in, packed_done, unpacked_done
from interp.runs.progress import BatchDone, Progress, Tally, ValueGroups
from tests.loops import over
from tests.runs.killing import Failing, model, stream
from tests.runs.running import Norms

REDUCTIONS: dict[str, tuple[Reduction, tuple[str, ...]]] = {
    "means": (Means, ("x", "cell")),
    "masked means": (MaskedMeans, ("gaps", "narrow")),
    "rows": (Rows, ("x", "narrow", "tokens", "yes")),
    "bootstrap": (Bootstrap(Means, 20), ("x",)),
    "masked bootstrap": (Bootstrap(MaskedMeans, 20, seed=3), ("gaps",)),
    "histogram": (Histograms("x", (-1.0, 0.0, 1.0), cells=1), ("x",)),
    "quantiles": (quantiles("gaps", relative_error=0.2), ("gaps",)),
    "top": (TopRows(2, "f", context="tokens", before=1, after=1), ("f", "tokens")),
    "examples": (TopInContext(TopRows(2, "f", before=1, after=1), ("tokens", "f")), ("f", "tokens")),
    "covariance": (Covariances("x", "other"), ("x", "other")),
    "several": (Several({"top": TopRows(1, "x"), "mean": Only(("x",), Means)}), ("x",)),
    "fit": (Fit, ("vectors", "mean", "spread", "error", "active")),
}
"""Every reduction there is, and which of the values below it takes."""


def values(seed: int, rows: int, width: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, f = (torch.randn(rows, *shape, generator=generator) for shape in ((3,), (width, 3)))
    x[0, 0] = -0.0
    return {
        "x": x, "cell": x[:, 0].double(), "gaps": f[..., 0].masked_fill(f[..., 1] < 0, torch.nan), "f": f,
        "narrow": f[..., 2].half(), "tokens": f[..., 0].long(), "yes": f[..., 0] > 0, "other": f[:, 0, :2],
        "vectors": torch.full((rows,), width), "mean": f.double().mean(1), "spread": f.double().var(1).sum(1),
        "error": x[:, 1].double().square(), "active": (f > 0).sum(1),
    }  # fmt: skip


def part(name: str, batch: int) -> Partial:
    """Each batch of another size and width."""
    reduction, names = REDUCTIONS[name]
    found = values(batch, rows := 3 + batch, 4 + batch)
    return reduction.of({n: found[n] for n in names}, torch.arange(rows) + 10 * batch)


def bits(groups: Mapping[str, Tensor]) -> dict[str, tuple[str, list[int], bytes]]:
    """Everything that can differ."""
    return {
        n: (str(t.dtype), list(t.shape), t.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        for n, t in groups.items()
    }


@over("name", REDUCTIONS)
def test_every_reduction_comes_back_bit_for_bit_and_merges_as_before(name: str) -> None:
    one, other = part(name, 0), part(name, 1)
    reductions = {name: REDUCTIONS[name][0]}

    def travelled(partial: Partial) -> Partial:
        found = unpacked_done(
            packed_done(BatchDone(0, 0, True, {name: partial}, Tally())), reductions
        ).partials
        assert found is not None and type(found[name]) is type(partial)
        return found[name]

    assert bits(travelled(one).tensors()) == bits(one.tensors())
    assert bits(travelled(one).merge(travelled(other)).tensors()) == bits(one.merge(other).tensors())


# --- files that are torn or damaged ---------------------------------------------------------------------------------

NAMES = ("means", "rows")
KNOWN = {name: REDUCTIONS[name][0] for name in NAMES}


def done(window: int, batch: int, last: bool = True) -> BatchDone:
    seed = 2 * window + batch
    aside = Rejected(100 + seed, "the row is empty", "«»")
    return BatchDone(window, batch, last, {n: part(n, seed) for n in NAMES}, Tally(3 + seed, 7, 1, (aside,)))


WORK = [(3, 0, False), (0, 0, True), (3, 1, True), (2, 0, False)]
"""Windows in another order than their numbers, one done in two batches and one begun."""


def progress_of(count: int) -> Progress:
    found = Progress()
    for each in WORK[:count]:
        found.add(done(*each))
    return found


def state(progress: Progress) -> tuple[object, object]:
    account = progress.account()
    return bits(_ordered(progress.groups())), {**account, "nodes": sorted(progress.tree.nodes)}


def _ordered(groups: ValueGroups) -> ValueGroups:
    return dict(sorted(groups.items()))


def written(folder: Path, count: int = len(WORK)) -> Journal:
    journal = Journal.open(folder, "main", KNOWN)
    for each in WORK[:count]:
        journal.write(done(*each))
    return journal


def ends(folder: Path) -> list[int]:
    """The size of the journal after each entry."""
    sizes = []
    for count in range(1, len(WORK) + 1):
        (place := folder / str(count)).mkdir(parents=True)
        written(place, count)
        sizes.append((place / "main.0.journal").stat().st_size)
    return sizes


@pytest.mark.parametrize("least", [2**24, 1])
def test_what_was_written_is_there_again(least: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """least=1: every entry is folded into a snapshot."""
    monkeypatch.setattr(journals, "_LEAST", least)
    for count in range(len(WORK) + 1):
        (folder := tmp_path / str(count)).mkdir()
        written(folder, count)
        assert state(Journal.open(folder, "main", KNOWN).progress) == state(progress_of(count))
        assert state(Journal.open(folder, "main", KNOWN, read_only=True).progress) == state(
            progress_of(count)
        )


@pytest.mark.slow
def test_an_entry_torn_or_damaged_anywhere_costs_itself_and_what_follows(tmp_path: Path) -> None:
    sizes = ends(tmp_path / "sizes")
    (folder := tmp_path / "run").mkdir()
    written(folder)
    path, data = folder / "main.0.journal", (folder / "main.0.journal").read_bytes()
    accounts = [progress_of(count).account() for count in range(len(WORK) + 1)]
    for at in range(0, len(data), 17):
        whole = sum(size <= at for size in sizes)
        flipped = data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :]
        for damaged in (data[:at], flipped):
            path.write_bytes(damaged)
            assert Journal.open(folder, "main", KNOWN, read_only=True).progress.account() == accounts[whole]
            assert path.read_bytes() == damaged, "who only reads cuts nothing off"
            assert Journal.open(folder, "main", KNOWN).progress.account() == accounts[whole]
            assert path.stat().st_size == (sizes[whole - 1] if whole else 0)


@pytest.mark.parametrize("lost", range(1, len(WORK) + 1))
def test_after_a_torn_entry_the_run_goes_on_to_the_same_bits(lost: int, tmp_path: Path) -> None:
    written(tmp_path)
    path = tmp_path / "main.0.journal"
    os.truncate(path, ends(tmp_path / "sizes")[-lost] - 3)
    journal = Journal.open(tmp_path, "main", KNOWN)
    for each in WORK[-lost:]:
        assert journal.progress.due(each[0]) == each[1], "it is due again"
        journal.write(done(*each))
    assert state(Journal.open(tmp_path, "main", KNOWN).progress) == state(progress_of(len(WORK)))


def test_a_damaged_snapshot_is_refused(tmp_path: Path) -> None:
    written(tmp_path).fold()
    path = tmp_path / "main.1.snapshot"
    data = path.read_bytes()
    for at in range(0, len(data), 41):
        for damaged in (data[:at], data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], data + b"x"):
            path.write_bytes(damaged)
            with pytest.raises(ValueError, match=r"main\.1\.snapshot is damaged"):
                Journal.open(tmp_path, "main", KNOWN)


# --- a disk that fails, and others who read -------------------------------------------------------------------------


def test_a_batch_that_cannot_be_written_was_never_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = written(tmp_path, 2)

    def halfway(file: int, data: bytes) -> None:
        os.write(file, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(journals, "_write_all", halfway)
        with pytest.raises(OSError, match=r"No space left on device \(no progress is lost.*main\.0\.journal"):
            journal.write(done(*WORK[2]))
    assert state(journal.progress) == state(progress_of(2))
    for each in WORK[2:]:
        journal.write(done(*each))
    assert state(Journal.open(tmp_path, "main", KNOWN).progress) == state(progress_of(len(WORK)))


def test_a_snapshot_that_cannot_be_written_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = written(tmp_path, 2)

    def full(path: Path, write: Callable[[Path], object]) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(journals, "write_atomically", full)
        with pytest.raises(OSError, match="No space left"):
            journal.fold()
    for each in WORK[2:]:
        journal.write(done(*each))
    assert state(Journal.open(tmp_path, "main", KNOWN).progress) == state(progress_of(len(WORK)))


def test_who_reads_while_the_writer_folds_sees_the_next_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, newest = written(tmp_path, 3), journals._newest_number
    folds = iter([True, True])

    def looked(folder: Path, name: str) -> int:
        found = newest(folder, name)
        if next(folds, False):
            writer.fold()  # at once after the reader has looked
        return found

    monkeypatch.setattr(journals, "_newest_number", looked)
    assert state(Journal.open(tmp_path, "main", KNOWN, read_only=True).progress) == state(progress_of(3))


def test_a_number_that_is_out_of_date_is_looked_up_again(tmp_path: Path) -> None:
    writer, known = written(tmp_path, 3), numbers_in(tmp_path)
    writer.fold()
    writer.write(done(*WORK[3]))
    found = Journal.open(tmp_path, "main", KNOWN, read_only=True, number=known["main"])
    assert state(found.progress) == state(progress_of(4))


def test_leftovers_of_a_process_killed_while_folding_are_removed(
    tmp_path: Path,
) -> None:
    written(tmp_path).fold()
    (tmp_path / ".main.2.snapshot.k3x9.snapshot").write_bytes(b"half of it")
    (tmp_path / "main.0.journal").write_bytes(b"of before")
    assert numbers_in(tmp_path) == {"main": 1}
    assert state(Journal.open(tmp_path, "main", KNOWN).progress) == state(progress_of(len(WORK)))
    assert [path.name for path in tmp_path.iterdir()] == ["main.1.snapshot"]


# --- one folder, several processes ----------------------------------------------------------------------------------


def test_a_failed_run_goes_on_while_its_error_is_still_at_hand(tmp_path: Path) -> None:
    """As in a notebook, which keeps the last traceback and every frame in it."""
    asked = [Failing(30)]
    go_on = partial(interp.run, asked, model(), stream(), out=tmp_path / "run")
    with pytest.raises(ArithmeticError) as kept:
        go_on()
    with pytest.raises(ArithmeticError):  # and not: another process is working on this run
        go_on(resume=True)
    assert kept.traceback


@pytest.mark.parametrize(
    ("there", "shard"), [("shard-1-of-2", None), ("main", "0/2"), ("shard-1-of-3", "0/2")]
)
def test_no_two_processes_can_be_at_the_same_windows(there: str, shard: str | None, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    interp.run([Norms()], model(), stream(), out=folder, shard="1/4")
    with FileLock(folder / f".{there}.lock"), pytest.raises(ValueError, match="another process is working"):
        interp.run([Norms()], model(), stream(), out=folder, shard=shard, resume=True)


def test_jobs_of_one_array_work_side_by_side(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    interp.run([Norms()], model(), stream(), out=folder, shard="1/4")
    with FileLock(folder / ".shard-3-of-4.lock"):
        interp.run([Norms()], model(), stream(), out=folder, shard="0/4")
