"""What one sees while a run goes on: rows, tokens per second, the time left, and how well the means are known."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

from interp.core.stats import Means
from interp.runs.progress import Done, Progress

PAUSE = 2.0
"""Seconds between two looks at the statistics."""


@contextmanager
def progress_bar(title: str, rows: int | None, progress: Progress) -> Iterator[Callable[[Done], None]]:
    """Shows up after a second; what is yielded is told of every batch.

    `heads +-0.012` = the median, over all its numbers, of half the width of the 95 % interval so far.
    """
    start = shown = time.monotonic()
    before = progress.so_far()
    initial = before.rows + len(before.rejected)
    with tqdm(desc=title, total=rows, initial=initial, unit="row", delay=1, leave=False) as bar:

        def tell(done: Done) -> None:
            nonlocal shown
            bar.update(done.tally.rows + len(done.tally.rejected))
            now = time.monotonic()
            if bar.disable or now - shown < PAUSE:
                return
            shown = now
            speed = (progress.so_far().tokens - before.tokens) / (now - start)
            bar.set_postfix_str(", ".join([f"{speed:.0f} tokens/s", *precision(progress)]))

        yield tell


def precision(progress: Progress) -> list[str]:
    """For every analysis that keeps means, how well they are known."""
    found = []
    for name, partial in (progress.total() or {}).items():
        if isinstance(partial, Means) and partial.moments:
            low, high = next(iter(partial.moments.values())).interval()
            found.append(f"{name} ±{float((high - low).nanmedian() / 2):.2g}")
    return found
