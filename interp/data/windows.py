"""Where a run's windows come from: a stream over a source, or batches that somebody made."""

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Protocol, runtime_checkable

from interp.data.batch import Batch, counted
from interp.data.pairs import Pairs
from interp.data.sources import Data, open_source
from interp.data.stream import Stream, Window
from interp.data.text import Text, is_prompts
from interp.model.config import Json

TOKENS = 2**12
"""Tokens per batch of a stream, where nobody says another number."""


@runtime_checkable
class Feed(Protocol):
    """Batches by window."""

    @property
    def windows(self) -> int | None:
        """How many there are; None if only the end will tell."""
        ...

    @property
    def rows(self) -> int | None:
        """How many rows all windows have together; None if only the end will tell."""
        ...

    def window(self, w: int) -> Window:
        """The batches of one window; behind the end of an iterator one of no rows."""
        ...


@dataclass(eq=False)
class GivenBatches:
    """Batches as they are, each a window of its own; those of an iterator only once and in order."""

    batches: Iterable[Batch]

    @property
    def windows(self) -> int | None:
        """How many batches there are; None for an iterator."""
        return None if self._listed is None else len(self._listed)

    @property
    def rows(self) -> int | None:
        """How many rows they have together; None for an iterator."""
        return None if self._listed is None else sum(map(_rows, self._listed))

    def window(self, w: int) -> Window:
        """Batch w; of an iterator the next one, or a window without rows behind its end."""
        batch = next(self._iterator, None) if self._listed is None else self._listed[w]
        if batch is None:
            return Window((), (), 0, 0, 0)
        return Window((batch,), (), _rows(batch), int(batch.lengths.sum()), 0)

    @cached_property
    def _listed(self) -> list[Batch] | None:
        return list(counted(self.batches)) if isinstance(self.batches, Sequence) else None

    @cached_property
    def _iterator(self) -> Iterator[Batch]:
        return iter(counted(self.batches))


def feed_of(data: Feed | Data | Pairs, text: Text, tokens_per_batch: int) -> Feed:
    """Any data as batches by window: batches as they are, everything else as a padded stream with the usual options.

    Errors: ValueError for texts where there is no tokenizer, and what `open_source` refuses.
    """
    if isinstance(data, Stream | GivenBatches):
        return data
    if isinstance(data, Batch):
        return GivenBatches([data if _has_pieces(data) else by_place(data)])
    if isinstance(data, Pairs):
        return Stream(data.source(), text, tokens_per_batch=tokens_per_batch)
    if isinstance(data, Feed):
        raise ValueError(f"a Stream or batches are required, got {type(data).__name__}")
    if isinstance(data, Iterator):
        first = next(data, None)
        if first is None:
            raise ValueError("at least one row is required, got an iterator at its end")
        data = itertools.chain([first], data)
        if isinstance(first, Batch):
            return GivenBatches(data)  # type: ignore[arg-type]
    elif isinstance(data, Sequence) and len(data) and all(isinstance(each, Batch) for each in data):
        return GivenBatches(data)  # type: ignore[arg-type]
    return Stream(open_source(data), text, tokens_per_batch=tokens_per_batch)


def prompts_feed(data: Feed | Data | Pairs, text: Text, *, prepend_bos: bool, batch_size: int) -> Feed:
    """Prompts in their order, `batch_size` rows at a time; other data as a stream.

    Errors: ValueError for prompts that do not fit the model, or a batch size below 1.
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size must be a number of rows, at least 1, got {batch_size!r}")
    if is_prompts(data):
        batch = by_place(text.batch(data, prepend_bos=prepend_bos))
        return GivenBatches(list(batch.split(batch_size)))
    feed = feed_of(data, text, TOKENS)
    return replace(feed, prepend_bos=prepend_bos) if isinstance(feed, Stream) and feed is not data else feed


def windows_of(feed: Feed) -> Iterator[Window]:
    """All windows in their order; those of an iterator until one has no rows."""
    for w in itertools.count() if feed.windows is None else range(feed.windows):
        window = feed.window(w)
        if not window.rows and feed.windows is None:
            return
        yield window


def by_place(batch: Batch) -> Batch:
    """The batch with its rows numbered by their places, whatever batch they were taken from (`Batch.rows`).

    What a question holds for each prompt (answers, masks, groups) is found by this number. Packed texts keep theirs.
    """
    return batch if batch.documents is not None else replace(batch, row=None).numbered()


def _has_pieces(batch: Batch) -> bool:
    """Whether rows share a number, as pieces of one text do, which a bootstrap draws together."""
    return batch.row is not None and len(batch.row.unique()) < len(batch.row)


def about(feed: Feed) -> Json:
    """What decides the rows and batches of a feed: two feeds that agree in it give the same numbers.

    Errors: ValueError for an iterator, which nobody can compare with another.
    """
    known: Json
    if isinstance(feed, Stream):
        options = {
            f.name: getattr(feed, f.name) for f in fields(feed) if f.name not in ("source", "text", "_")
        }
        known = {"source": feed.source.name, "fingerprint": feed.source.fingerprint(), **options}
    else:
        print_ = None if feed.windows is None else _hash(feed.window(w) for w in range(feed.windows))
        known = {"source": "batches", "fingerprint": print_}
    if known["fingerprint"] is None:
        raise ValueError("a run in a folder requires data that can be read again, got an iterator")
    first = _hash(feed.window(w) for w in range(min(1, feed.windows or 0)))
    return known | {"rows": feed.rows, "windows": feed.windows, "first_window": first}


def _hash(windows: Iterable[Window]) -> str:
    """A hash of all tokens as they stand in their batches; another tokenizer gives another one."""
    digest = hashlib.sha256()
    for batch in (batch for window in windows for batch in window.batches):
        digest.update(
            repr((tuple(batch.tokens.shape), batch.tokens.tolist(), batch.lengths.tolist())).encode()
        )
        more = [None if x is None else x.tolist() for x in (batch.corrupt, batch.answer, batch.wrong)]
        if any(each is not None for each in more):
            digest.update(repr(more).encode())
    return digest.hexdigest()


def _rows(batch: Batch) -> int:
    rows = batch.identities()
    return len(batch) if rows is None else len(rows)
