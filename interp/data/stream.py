"""Batches of rows, one window of consecutive rows at a time; a window depends on its index alone.

A window of a `Stream` is tokenised, sorted by length and cut into batches (or packed), so that a batch wastes little
on padding, and every process gets the same batches in any order. Batches that the user gives are one window each.
Workers and shards take windows; journals count batches.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, fields, replace
from functools import cached_property
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from interp.core.boundary import public
from interp.data.batch import Batch, counted, is_prompts
from interp.data.chats import is_chats
from interp.data.pairs import Pairs
from interp.data.sources import Data, Example, Plain, Rejected, Source, SourceRow, open_source
from interp.data.text import Text
from interp.model.config import Json

TooLong = Literal["set_aside", "truncate", "split"]
RowLayout = Literal["padded", "packed"]
Numbered = tuple[int, list[int]]
"""The index of a source row, and its token ids."""
TOKENS = 2**12
"""Default number of tokens per batch of a stream."""
ROWS = 32
"""Default maximum of rows per batch of prompts in memory."""
PASS = 64
"""Cost of one more batch, in cells (rows times columns): `max(PASS, budget // PASS)`."""


@dataclass(frozen=True, eq=False)
class Window:
    """Consecutive rows of a source as batches."""

    batches: tuple[Batch, ...]
    rejected: tuple[Rejected, ...]
    rows: int
    """Number of rows of the source, rejected rows included; 0: the source has ended."""
    tokens: int
    """Number of tokens of the batches, padding not counted."""
    cut: int
    """Number of rows that were truncated or split."""


@runtime_checkable
class DataSource(Protocol):
    """Data as batches, window by window: a `Stream` of rows, or batches that the user gave."""

    @property
    def windows(self) -> int | None:
        """Number of windows; None if it is known only at the end."""
        ...

    @property
    def rows(self) -> int | None:
        """Number of rows of all windows together; None if it is known only at the end."""
        ...

    def window(self, w: int) -> Window:
        """The batches of one window; after the end of an iterator a window without rows."""
        ...


@public()
@dataclass(frozen=True)
class Stream:
    """The rows of a source as batches for one model, for data that do not fit in memory.

    Rows are read, tokenised and batched as they are needed.

    Every row is in the batches of one window, or in its `rejected`: rows that the source rejects, ids outside the
    vocabulary, texts without a token, and texts over the context length if `too_long` is "set_aside". `Batch.row` is
    the index of a row in the source; the pieces of a split text share it.

    Padded layout: longest first (rows of equal length in the order of the source), as many rows as fit; padding on
    the right, and `keep` is None where all rows are equally long. Packed layout: `Batch.packed`, texts numbered from
    left to right and row by row. Texts are tokenised by `Text.ids`. Token ids stay as they are: no BOS is added, and
    `Batch.bos` is False.

    Raises:
        ValueError: an option out of range.

    Example:
        >>> from interp.data.sources import open_source
        >>> source = open_source(["Paris", "The cat sat on the mat", "The dog"])
        >>> stream = Stream(source, model.text, tokens_per_batch=8)
        >>> [batch.row.tolist() for batch in stream.window(0).batches]
        [[1], [0, 2]]
    """

    source: Source
    text: Text
    _: KW_ONLY
    tokens_per_batch: int
    """Maximum of columns times rows of a batch; a single longer row still makes a batch."""
    rows_per_window: int = 256
    too_long: TooLong = "set_aside"
    """Treatment of a text over the context length: rejected, truncated, or split with BOS on each piece."""
    layout: RowLayout = "padded"
    prepend_bos: bool | None = None
    """Whether texts begin with BOS; None: as the model does by default."""
    max_rows: int | None = None
    """Number of rows of the source to take, from its first; None: all."""

    def __post_init__(self) -> None:
        for name in ("tokens_per_batch", "rows_per_window", "max_rows"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.prepend_bos is None:
            object.__setattr__(self, "prepend_bos", self.text.prepend_bos)

    @property
    def rows(self) -> int | None:
        """Number of rows of all windows together; None where it is known only at the end."""
        count = self.source.count
        return count if count is None or self.max_rows is None else min(count, self.max_rows)

    @property
    def windows(self) -> int | None:
        """Number of windows; None where it is known only at the end."""
        return None if self.rows is None else -(-self.rows // self.rows_per_window)

    @public()
    def window(self, w: int) -> Window:
        """Window w, which begins at row `w * rows_per_window`; after the end of an iterator a window without rows.

        Raises:
            ValueError: an index that is out of range, or a window that an iterator has already passed.
        """
        if w < 0 or (self.windows is not None and w >= self.windows):
            raise ValueError(f"windows are numbered from 0, and there are {self.windows or 'some'}: got {w}")
        start = w * self.rows_per_window
        stop = start + self.rows_per_window
        stop = stop if self.max_rows is None else min(stop, self.max_rows)
        source_rows = list(self.source.rows(start, stop)) if start < stop else []
        texts = [text for row in source_rows for text in _prompt_texts(row)]
        encoded = iter(self.text.many(texts, prepend_bos=self.prepend_bos) if texts else ())
        numbered: list[Numbered] = []
        rejected: list[Rejected] = []
        pairs: dict[int, Paired] = {}
        cut = 0
        for number, row in enumerate(source_rows, start):
            if isinstance(row, Rejected):
                rejected.append(row)
                continue
            first = row.clean if isinstance(row, Example) else row
            ids = next(encoded) if isinstance(first, str) else first
            pieces = self._pieces(number, first, ids)
            if isinstance(row, Example):
                corrupt = next(encoded) if isinstance(row.corrupt, str) else row.corrupt
                paired = self._pair_ids(number, row, ids, corrupt)
                if isinstance(paired, Rejected):
                    pieces = pieces if isinstance(pieces, Rejected) else paired
                else:
                    pairs[number] = paired
            if isinstance(pieces, Rejected):
                rejected.append(pieces)
                continue
            numbered += [(number, piece) for piece in pieces]
            cut += len(ids) > self.text.n_ctx
        tokens = sum(len(ids) for _, ids in numbered)
        batches = tuple(_with_pairs(batch, pairs) for batch in self._batches(numbered, bool(texts)))
        return Window(batches, tuple(rejected), len(source_rows), tokens, cut)

    def _pair_ids(self, number: int, row: Example, clean: list[int], corrupt: list[int]) -> Paired | Rejected:
        """The corrupted prompt and answers of a clean prompt, as ids, or the reason why the row is rejected."""
        if self.layout == "packed" or len(clean) > self.text.n_ctx:
            why = (
                "rows are packed"
                if self.layout == "packed"
                else f"its context holds {self.text.n_ctx} tokens"
            )
            return Rejected.of(number, f"a pair is never packed or cut, and {why}", row.clean)
        if len(clean) != len(corrupt):
            why = f"the clean prompt has {len(clean)} tokens, the corrupted one {len(corrupt)}"
            return Rejected.of(number, f"{why}: they must be equally long", row.clean)
        if clean == corrupt or not 0 <= min(corrupt) <= max(corrupt) < self.text.d_vocab:
            same = clean == corrupt
            why = "both prompts are the same" if same else f"ids must be in [0, {self.text.d_vocab - 1}]"
            return Rejected.of(number, why, row.clean)
        try:
            answers = [
                None if answer is None else self._answer_id(answer) for answer in (row.answer, row.wrong)
            ]
        except ValueError as cause:
            return Rejected.of(number, str(cause), row.clean)
        if answers[0] is not None and answers[0] == answers[1]:
            piece = self.text.of_outputs.pieces([answers[0]])[0]
            why = f"the answer and the wrong answer are one token, {piece!r}"
            return Rejected.of(number, why, row.clean)
        return Paired(corrupt, *answers)

    def _answer_id(self, answer: Plain) -> int:
        """The id of an answer. ValueError for a text of several tokens, or an id outside the vocabulary."""
        outputs = self.text.of_outputs
        ids = answer if isinstance(answer, list) else [outputs.single(answer)]
        if len(ids) != 1 or not 0 <= ids[0] < outputs.d_vocab:
            raise ValueError(f"an answer is one token of the vocabulary, got {answer!r}")
        return ids[0]

    def _pieces(self, number: int, row: Plain, ids: list[int]) -> list[list[int]] | Rejected:
        """The ids of a row that go to the model: all of them, or pieces of the context length (`too_long`)."""
        text = self.text
        if not ids:
            return Rejected.of(number, "the text has no tokens", row)
        if min(ids) < 0 or max(ids) >= text.d_vocab:
            bad = next(i for i in ids if not 0 <= i < text.d_vocab)
            return Rejected.of(number, text.outside(bad), row)
        if len(ids) <= text.n_ctx:
            return [ids]
        if self.too_long == "set_aside":
            return Rejected.of(number, f"{len(ids)} tokens, the model's context holds {text.n_ctx}", row)
        framed = self._special_and_inner(row, ids)
        if framed is None:
            return Rejected.of(number, "it cannot be cut: special tokens stand within it", row)
        before, inner, after = framed
        room = text.n_ctx - len(before) - len(after)
        if room < 1:
            return Rejected.of(number, f"the special tokens alone fill the context of {text.n_ctx}", row)
        pieces = [before + inner[i : i + room] + after for i in range(0, len(inner), room)]
        return pieces if self.too_long == "split" else pieces[:1]

    def _special_and_inner(self, row: Plain, ids: list[int]) -> tuple[list[int], list[int], list[int]] | None:
        """Special tokens before a text, its own tokens, and special tokens after it; None if they are interleaved."""
        if not isinstance(row, str) or not self.prepend_bos:
            return [], ids, []
        inner = self.text.ids(row, prepend_bos=False)
        if inner == ids and ids[0] == self.text.bos_id:  # a text that spells its BOS itself
            return ids[:1], ids[1:], []
        n = len(inner)
        first = next((i for i in range(len(ids) - n + 1) if ids[i : i + n] == inner), None)
        return None if first is None else (ids[:first], inner, ids[first + n :])

    def _batches(self, rows: Sequence[Numbered], texts: bool) -> Iterator[Batch]:
        """The batches of the rows of one window; `texts`: whether some rows were texts."""
        pad_id = self.text.pad_id if texts else 0
        if not rows:
            return
        if self.layout == "packed":
            longest = max(len(ids) for _, ids in rows)
            width = min(self.text.n_ctx, max(self.tokens_per_batch, longest))
            yield from packed(rows, self.tokens_per_batch, width, pad_id)
            return
        bos = texts and bool(self.prepend_bos) and all(ids[0] == self.text.bos_id for _, ids in rows)
        for batch in padded(rows, self.tokens_per_batch, pad_id):
            yield replace(batch, bos=bos)


# --- pairs --------------------------------------------------------------------------------------------------------


class Paired(NamedTuple):
    """The corrupted prompt and answers of a clean prompt, as ids."""

    corrupt: list[int]
    answer: int | None
    wrong: int | None


def _prompt_texts(row: SourceRow | Rejected) -> list[str]:
    """The texts of a row that have to be tokenised as prompts."""
    prompts = [row.clean, row.corrupt] if isinstance(row, Example) else [row]
    return [prompt for prompt in prompts if isinstance(prompt, str)]


def _with_pairs(batch: Batch, pairs: Mapping[int, Paired]) -> Batch:
    """The batch with the corrupted prompts and answers that `pairs` has for its rows, by row index."""
    if not pairs:
        return batch
    assert batch.row is not None
    mine = [pairs[number] for number in batch.row.tolist()]
    corrupt = batch.tokens.clone()
    corrupt[batch.real] = torch.tensor([token for pair in mine for token in pair.corrupt], device="cpu")
    answer, wrong = (
        None if None in column else torch.tensor(column, device="cpu")
        for column in ([pair.answer for pair in mine], [pair.wrong for pair in mine])
    )
    return replace(batch, corrupt=corrupt, answer=answer, wrong=wrong)


# --- batches ------------------------------------------------------------------------------------------------------


def padded(rows: Sequence[Numbered], budget: int, pad_id: int) -> Iterator[Batch]:
    """Batches of rows of about the same length, longest first; rows times columns <= budget, or a single row."""
    for places in of_like_lengths([len(ids) for _, ids in rows], budget):
        batch_rows = [rows[i] for i in places]
        batch = Batch.of([ids for _, ids in batch_rows], pad_id=pad_id)
        yield replace(batch, row=torch.tensor([number for number, _ in batch_rows], device="cpu"))


def of_like_lengths(lengths: Sequence[int], budget: int, most: int | None = None) -> Iterator[list[int]]:
    """Indices of the rows of each batch, longest first (rows of equal length in their order).

    A batch has as many rows as `budget` (rows times columns) and `most` (rows) allow, and at least one. It ends earlier
    where the padding that this saves costs more than one more batch (`PASS`).
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    start = 0
    for stop in _ends([lengths[i] for i in order], budget, most):
        while start < stop:
            size = max(1, min(budget // lengths[order[start]], most or stop))
            yield order[start : min(start + size, stop)]
            start = min(start + size, stop)


def _ends(lengths: Sequence[int], budget: int, most: int | None) -> list[int]:
    """The ends of runs of rows (`lengths` is sorted, longest first) that minimise the total cost of their batches.

    A run costs its rows times its greatest length, plus `max(PASS, budget // PASS)` for each batch it needs. Dynamic
    programming from the shortest rows finds the minimum over all partitions.
    """
    widths, counts = (each[::-1] for each in np.unique(np.array(lengths, np.int64), return_counts=True))
    ends = counts.cumsum()
    rows = ends - (ends - counts)[:, None]  # [i, j] = number of rows with widths i to j
    sizes = np.maximum(np.minimum(budget // widths, most or len(lengths)), 1)
    batches = -(-rows // sizes[:, None])
    cost = widths[:, None] * rows + max(PASS, budget // PASS) * batches
    least, after = np.zeros(len(widths) + 1, np.int64), []
    for i in reversed(range(len(widths))):
        every = cost[i, i:] + least[i + 1 :]
        after.append(i + 1 + int(every.argmin()))
        least[i] = every.min()
    after, chosen, i = after[::-1], [], 0
    while i < len(widths):
        i = after[i]
        chosen.append(int(ends[i - 1]))
    return chosen


def packed(rows: Sequence[Numbered], budget: int, width: int, pad_id: int) -> Iterator[Batch]:
    """Batches of packed rows of `width` columns, as many as fit the budget and at least one."""
    numbers = torch.tensor([number for number, _ in rows], device="cpu")
    together = Batch.packed([ids for _, ids in rows], width, pad_id=pad_id, row=numbers)
    for batch in together.split(max(1, budget // width)):
        yield _with_renumbered_texts(batch)


def _with_renumbered_texts(batch: Batch) -> Batch:
    """A part of a packed batch with its texts renumbered 0, 1, ... in order, and `row` cut to these texts."""
    assert batch.documents is not None and batch.row is not None
    places = batch.documents
    standing = list(dict.fromkeys(places[places >= 0].tolist()))
    fresh = torch.full(
        (len(batch.row) + 1,), -1, device="cpu"
    )  # the last place stands for padding, which is -1
    fresh[standing] = torch.arange(len(standing), device="cpu")
    return replace(batch, documents=fresh[places], row=batch.row[standing]).trimmed()


# --- any data ----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class GivenBatches:
    """Batches that the user gave, each a window of its own; an iterator gives each batch once and in order."""

    batches: Iterable[Batch]

    @staticmethod
    def cut(rows: Batch, most: int) -> GivenBatches:
        """Consecutive batches of at most `most` rows each, with the columns unchanged."""
        return GivenBatches(list(rows.split(most)))

    @property
    def windows(self) -> int | None:
        """Number of batches; None for an iterator."""
        return None if self._listed is None else len(self._listed)

    @property
    def rows(self) -> int | None:
        """Number of rows of all batches; None for an iterator."""
        return None if self._listed is None else sum(map(_row_count, self._listed))

    def window(self, w: int) -> Window:
        """Batch w; of an iterator the next one, or a window without rows after its end."""
        batch = next(self._iterator, None) if self._listed is None else self._listed[w]
        if batch is None:
            return Window((), (), 0, 0, 0)
        return Window((batch,), (), _row_count(batch), int(batch.lengths.sum()), 0)

    @cached_property
    def _listed(self) -> list[Batch] | None:
        return list(counted(self.batches)) if isinstance(self.batches, Sequence) else None

    @cached_property
    def _iterator(self) -> Iterator[Batch]:
        return iter(counted(self.batches))


@dataclass(eq=False)
class PromptBatches(GivenBatches):
    """Prompts in memory as batches of rows of about the same length, so that a pass computes little padding.

    Rows are numbered by their order in `prompts`, so that results can be put back into that order.
    """

    prompts: Batch
    most: int
    """Maximum number of rows of a batch."""

    @classmethod
    def of(cls, prompts: Batch, most: int) -> PromptBatches:
        """Batches of at most `most` rows and `TOKENS` columns times rows; a single longer row is a batch too."""
        aligned = prompts.host().right_aligned()
        runs = of_like_lengths(aligned.lengths.tolist(), TOKENS, most)
        return cls(
            [aligned.rows(torch.tensor(places, device="cpu")).trimmed() for places in runs], prompts, most
        )

    def as_given(self) -> GivenBatches:
        """Batches with the rows in their order and the columns unchanged, for edits that differ between rows."""
        return GivenBatches.cut(self.prompts, self.most)

    def in_order(self) -> GivenBatches:
        """Batches with the rows in their order, as many per batch as `TOKENS` and `most` allow, for saved values."""
        aligned = self.prompts.host().right_aligned()
        batches, start, longest = [], 0, 0
        for i, n in enumerate([*aligned.lengths.tolist(), TOKENS]):
            rows, longest = i - start, max(longest, n)
            if rows and (i == len(aligned) or rows == self.most or (rows + 1) * longest > TOKENS):
                batches.append(aligned.rows(torch.arange(start, i, device="cpu")).trimmed())
                start, longest = i, n
        return GivenBatches(batches)


def data_source(data: DataSource | Data | Pairs, text: Text, tokens_per_batch: int) -> DataSource:
    """The data source of any data: batches as they are, everything else as a padded `Stream` with default options.

    Raises:
        ValueError: texts without a tokenizer, and data that `open_source` refuses.
    """
    if isinstance(data, Stream | GivenBatches):
        return data
    if is_chats(data):
        return prompt_source(data, text)
    if isinstance(data, Batch):
        return GivenBatches([data if _has_pieces(data) else by_place(data)])
    if isinstance(data, Pairs):
        return Stream(data.source(), text, tokens_per_batch=tokens_per_batch, prepend_bos=data.prepend_bos)
    if isinstance(data, DataSource):
        raise ValueError(f"a Stream or batches are required, got {type(data).__name__}")
    if isinstance(data, Iterator):
        first = next(data, None)
        if first is None:
            raise ValueError("at least one row is required, got an iterator at its end")
        data = itertools.chain([first], data)
        if isinstance(first, Batch):
            return GivenBatches(data)  # type: ignore[arg-type]
    elif isinstance(data, Sequence) and len(data) and all(isinstance(item, Batch) for item in data):
        return GivenBatches(data)  # type: ignore[arg-type]
    return Stream(open_source(data), text, tokens_per_batch=tokens_per_batch)


def prompt_source(
    data: DataSource | Data | Pairs,
    text: Text,
    *,
    prepend_bos: bool | None = None,
    batch_size: int = ROWS,
) -> DataSource:
    """Prompts in batches of about the same length, of at most `batch_size` rows; other data as a stream.

    Args:
        prepend_bos: whether texts begin with BOS; None: as the model does by default, or as `Pairs` say.
        batch_size: maximum number of rows of a batch.

    Raises:
        ValueError: prompts that do not fit the model, or a batch size below 1.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be a number of rows, at least 1, got {batch_size!r}")
    if is_prompts(data):
        batch = by_place(text.batch(data, prepend_bos=prepend_bos))
        if batch.documents is None:
            return PromptBatches.of(batch, batch_size)
        return GivenBatches.cut(batch, batch_size)
    source = data_source(data, text, TOKENS)
    return (
        replace(source, prepend_bos=prepend_bos)
        if isinstance(source, Stream) and source is not data and prepend_bos is not None
        else source
    )


def by_place(batch: Batch) -> Batch:
    """The batch with its rows numbered 0, 1, ..., even if they had other numbers in another batch (`Batch.rows`).

    Answers, masks and groups of each prompt are found by this number. Packed texts keep their numbers.
    """
    return batch if batch.documents is not None else replace(batch, row=None).numbered()


def _has_pieces(batch: Batch) -> bool:
    """Whether some rows share a number, as pieces of one text do, which a bootstrap must draw together."""
    return batch.row is not None and len(batch.row.unique()) < len(batch.row)


def about(source: DataSource) -> Json:
    """Fingerprint of a data source's rows and batches: two sources with equal fingerprints give the same numbers.

    Raises:
        ValueError: an iterator, which can be read only once.
    """
    known: Json
    if isinstance(source, Stream):
        options = {
            f.name: getattr(source, f.name) for f in fields(source) if f.name not in ("source", "text", "_")
        }
        known = {"source": source.source.name, "fingerprint": source.source.fingerprint(), **options}
    else:
        print_ = (
            None if source.windows is None else _windows_hash(source.window(w) for w in range(source.windows))
        )
        known = {"source": "batches", "fingerprint": print_}
    if known["fingerprint"] is None:
        raise ValueError("a run in a folder requires data that can be read again, got an iterator")
    first = _windows_hash(source.window(w) for w in range(min(1, source.windows or 0)))
    return known | {"rows": source.rows, "windows": source.windows, "first_window": first}


def _windows_hash(windows: Iterable[Window]) -> str:
    """A hash of the token ids, lengths, corrupted prompts and answers of all batches in these windows."""
    digest = hashlib.sha256()
    for batch in (batch for window in windows for batch in window.batches):
        digest.update(
            repr((tuple(batch.tokens.shape), batch.tokens.tolist(), batch.lengths.tolist())).encode()
        )
        pair_values = [None if x is None else x.tolist() for x in (batch.corrupt, batch.answer, batch.wrong)]
        if any(values is not None for values in pair_values):
            digest.update(repr(pair_values).encode())
    return digest.hexdigest()


def _row_count(batch: Batch) -> int:
    """Number of prompts of a batch: its rows, or the texts of packed rows."""
    rows = batch.identities()
    return len(batch) if rows is None else len(rows)


# --- one after the other ------------------------------------------------------------------------------------------


def windows_of(
    source: DataSource, numbers: Iterable[int] | None = None, *, ahead: int = 0, pin: bool = False
) -> Iterator[tuple[int, Window]]:
    """Windows with their numbers, up to `ahead` of them prepared in a thread while the model works on another.

    An exception in a window is raised here, at its turn; the thread ends with the generator.

    Args:
        numbers: indices of the windows, in this order; None: all. An iterator ends with its first window without rows.
        pin: whether batches are put into pinned memory, from which they can be copied to a GPU while it computes.
    """
    if numbers is None:
        numbers = itertools.count() if source.windows is None else range(source.windows)
    order = iter(numbers)
    waiting: deque[tuple[int, Future[Window]]] = deque()
    pool = ThreadPoolExecutor(1, "interp-windows")
    try:
        while True:
            while len(waiting) <= ahead and (w := next(order, None)) is not None:
                waiting.append((w, pool.submit(_prepared_window, source, w, pin)))
            if not waiting:
                return
            w, future = waiting.popleft()
            window = future.result()
            if window.rows == 0:
                return
            yield w, window
    finally:
        pool.shutdown(cancel_futures=True)


def _prepared_window(source: DataSource, w: int, pin: bool) -> Window:
    """Window `w` of the source, with its batches in pinned memory if `pin`."""
    window = source.window(w)
    return replace(window, batches=tuple(batch.pinned() for batch in window.batches)) if pin else window
