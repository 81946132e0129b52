"""A run of 10 000 shards, simulated: whatever fails and whoever comes first, the bits are those of one process.

The state machine of a run (`Progress`) is driven as workers, restarts and job arrays drive it, with sums in place of
tensors. `docs/scaling.md` says what a real run costs.
"""

import itertools
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

from interp.runs.progress import BatchDone, Progress, Tally
from interp.runs.work_folder import Shard

SHARDS, WINDOWS = 10_000, 11_000
WORKERS, THEIRS = 64, 3_000
"""Processes of one run, and how many of the windows they have."""
DEATHS = 0.02
"""The chance that a batch takes its worker with it."""


@dataclass(frozen=True)
class Sum:
    """A partial result whose bits depend on the order of merging."""

    value: float

    def merge(self, other: "Sum") -> "Sum":
        return Sum(self.value + other.value)

    def tensors(self) -> dict[str, Tensor]:
        return {"value": torch.tensor(self.value, dtype=torch.float64)}


class Sums:
    """The reduction that makes sums."""

    def of(self, values: Mapping[str, Tensor], rows: Tensor | None = None) -> Sum:
        return Sum(float(values["x"].sum()))

    def load(self, tensors: Mapping[str, Tensor]) -> Sum:
        return Sum(float(tensors["value"]))


def batches(window: int) -> int:
    return 2 if window % 4 == 0 else 1


@cache
def done(window: int, batch: int) -> BatchDone:
    """Numbers of very different size; now and then a window without any good row."""
    generator = random.Random(3 * window + batch)
    value = generator.gauss(0, 1) * 10 ** generator.uniform(-8, 8)
    partials = None if window % 97 == 0 else {"sum": Sum(value)}
    return BatchDone(window, batch, batch == batches(window) - 1, partials, Tally(1, 10 + batch))


def alone(windows: range, progress: Progress | None = None) -> Progress:
    """The windows one after the other, from where the progress is."""
    progress = progress or Progress()
    for window in windows:
        first = progress.due(window)
        for batch in range(batches(window) if first is None else first, batches(window)):
            progress.add(done(window, batch))
    return progress


def bits(progress: Progress) -> tuple[str, Tally]:
    total = progress.total()
    assert total is not None and isinstance(total["sum"], Sum)
    return total["sum"].value.hex(), progress.finished


def restored(progress: Progress) -> Progress:
    """What a run finds that begins again from what the last one wrote."""
    return Progress.restored(progress.account(), progress.groups(), {"sum": Sums()})


def window_sum(window: int) -> float | None:
    """The batches of a window, added from the left."""
    parts = [done(window, batch).partials for batch in range(batches(window))]
    values = [part["sum"].value for part in parts if part is not None and isinstance(part["sum"], Sum)]
    return sum(values[1:], values[0]) if values else None


def by_recursion(values: Sequence[float | None]) -> float | None:
    """The largest power of two of the parts first, halves within halves; what is left over after it."""
    if len(values) == 1:
        return values[0]
    half = 1 << (len(values) - 1).bit_length() - 1
    one, other = by_recursion(values[:half]), by_recursion(values[half:])
    if one is None or other is None:
        return other if one is None else one
    return one + other


def expected(windows: int) -> tuple[str, Tally]:
    """What one process gives, without any of the code that is tested."""
    total = by_recursion([window_sum(window) for window in range(windows)])
    assert total is not None
    tallies = [done(w, b).tally for w in range(windows) for b in range(batches(w))]
    return total.hex(), Tally(sum(t.rows for t in tallies), sum(t.tokens for t in tallies))


@pytest.mark.slow
def test_shards_in_any_order_and_attempts_give_the_bits_of_one_process() -> None:
    generator, together = random.Random(0), Progress()
    order = list(range(SHARDS))
    generator.shuffle(order)
    for i in order:
        windows = Shard(i, SHARDS).windows(WINDOWS)
        shard = Progress()
        if generator.random() < 0.2:  # killed somewhere, begun again from its journal
            for each in itertools.islice(_all(windows), generator.randint(0, 2)):
                shard.add(each)
            shard = restored(shard)
        together.include(alone(windows, shard))
    assert bits(together) == expected(WINDOWS)
    assert together.finished.rows == sum(map(batches, range(WINDOWS)))
    assert len(together.tree.nodes) == bin(WINDOWS).count("1")


def _all(windows: range) -> "itertools.chain[Done]":
    return itertools.chain.from_iterable(
        (done(window, batch) for batch in range(batches(window))) for window in windows
    )


def test_dying_workers_and_runs_begun_again_give_the_bits_of_one_process() -> None:
    """64 workers finish their batches in random order; 2 % of the batches kill one, twice the whole run is killed."""
    generator, progress, computed = random.Random(1), Progress(), 0
    waiting, busy, again = deque(range(THEIRS)), [], []
    deaths = 0
    while waiting or busy:
        while waiting and len(busy) < WORKERS:
            busy.append(waiting.popleft())
        at = generator.randrange(len(busy))
        window, computed = busy[at], computed + 1
        if generator.random() < DEATHS:
            deaths += 1
            waiting.appendleft(busy.pop(at))
            continue
        batch = progress.due(window)
        assert batch is not None
        progress.add(done(window, batch))
        if progress.due(window) is None:
            busy.pop(at)
        if len(progress.tree) in (1_000, 2_000) and len(progress.tree) not in again:
            again.append(len(progress.tree))
            progress = restored(progress)
            waiting = deque(w for w in range(THEIRS) if progress.due(w) is not None)
            busy = []
    assert bits(progress) == expected(THEIRS)
    assert deaths > 40 and len(again) == 2
    assert computed == deaths + sum(map(batches, range(THEIRS))), "a death costs a batch and nothing else"


def test_the_order_of_arrival_would_change_the_bits_without_the_tree() -> None:
    """The simulation can fail: the same numbers added as they come give another sum."""
    values = [each.partials["sum"] for each in _all(range(WINDOWS)) if each.partials is not None]
    generator = random.Random(0)
    generator.shuffle(values)
    total = sum(each.value for each in values if isinstance(each, Sum))
    known, _ = expected(WINDOWS)
    assert total.hex() != known
    assert total == pytest.approx(float.fromhex(known), rel=1e-9)


@pytest.mark.parametrize("arrived", [lambda: alone(range(4, 8)), lambda: alone(range(5, 6))])
def test_what_two_shards_have_both_done_is_refused(arrived: Callable[[], Progress]) -> None:
    """Else it would be counted twice: a whole node over parts of it, and parts under a node."""
    for one, other in ((alone(range(8)), arrived()), (arrived(), alone(range(8)))):
        with pytest.raises(ValueError, match=r"part [45] was merged already|part 0 was merged already"):
            one.include(other)
