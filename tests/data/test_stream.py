"""Every row is in one batch of one window, once and with its number, however the stream is asked for it."""

import pickle
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations, count, pairwise
from pathlib import Path
from typing import Literal, get_args

import pytest
import torch
from hypothesis import given, settings, strategies as st
from jaxtyping import TypeCheckError
from transformers import BertTokenizer

from interp.data import stream as stream_module
from interp.data.batch import Batch
from interp.data.sources import Rejected, SourceRow, open_source
from interp.data.stream import (
    TOKENS,
    PromptBatches,
    RowLayout,
    Stream,
    TooLong,
    Window,
    prompt_source,
    windows_of,
)
from interp.data.text import Text
from interp.families.tokenizer import HuggingFaceTokenizer
from tests.data.test_sources import TEXTS, forms
from tests.tiny import CORPUS, END, backend, gpt2_tokenizer

N_CTX = 12
TEXT = Text(HuggingFaceTokenizer(gpt2_tokenizer()), N_CTX, backend().get_vocab_size())
BOS = TEXT.bos_id
LAYOUTS, TOO_LONG = get_args(RowLayout), get_args(TooLong)
WORDS = st.text("ab cé", max_size=30)
DATA = st.lists(WORDS | st.lists(st.integers(-1, TEXT.d_vocab), max_size=20), min_size=1, max_size=12)


def read_back(batch: Batch) -> list[tuple[int, list[int]]]:
    """The real tokens of each text of a batch with the row they are numbered."""
    assert batch.row is not None
    if batch.documents is None:
        texts = [ids[keep].tolist() for ids, keep in zip(batch.tokens, batch.real, strict=True)]
    else:
        texts = [ids.tolist() for ids in batch.unpack(batch.tokens)]
    return list(zip(batch.row.tolist(), texts, strict=True))


def windows(stream: Stream) -> list[Window]:
    assert stream.windows is not None
    return [stream.window(w) for w in range(stream.windows)]


def pieces_by_row(all_windows: list[Window]) -> dict[int, list[list[int]]]:
    found: dict[int, list[list[int]]] = defaultdict(list)
    for window in all_windows:
        for batch in window.batches:
            for row, ids in read_back(batch):
                found[row].append(ids)
    return dict(found)


def expected_pieces(row: SourceRow, too_long: TooLong) -> list[list[int]] | None:
    """What the model should see of a row, said slowly; None for a row that is set aside."""
    if not row:
        return None
    ids = TEXT.ids(row) if isinstance(row, str) else row
    if not all(0 <= i < TEXT.d_vocab for i in ids):
        return None
    if len(ids) <= N_CTX:
        return [ids]
    if too_long == "set_aside":
        return None
    pieces, rest = [], ids
    while rest:
        pieces.append(rest[:N_CTX])
        rest = rest[N_CTX:]
        if rest and isinstance(row, str):
            rest = [BOS, *rest]
    return pieces[:1] if too_long == "truncate" else pieces


# --- the property -----------------------------------------------------------------------------------------------


@given(DATA, st.integers(1, 40), st.integers(1, 13), st.sampled_from(LAYOUTS), st.sampled_from(TOO_LONG))
def test_every_row_is_in_one_window_once_or_rejected(
    data: list[SourceRow], budget: int, size: int, layout: RowLayout, too_long: TooLong
) -> None:
    stream = Stream(
        open_source(data),
        TEXT,
        tokens_per_batch=budget,
        rows_per_window=size,
        too_long=too_long,
        layout=layout,
    )
    found = windows(stream)
    expected = {i: expected_pieces(row, too_long) for i, row in enumerate(data)}
    kept = {i: sorted(pieces) for i, pieces in expected.items() if pieces is not None}
    assert {i: sorted(pieces) for i, pieces in pieces_by_row(found).items()} == kept
    assert [r.row for window in found for r in window.rejected] == [i for i in expected if i not in kept]
    assert [window.rows for window in found] == [len(data[i : i + size]) for i in range(0, len(data), size)]
    for w, window in enumerate(found):
        inside = range(w * size, (w + 1) * size)
        assert window.tokens == sum(len(p) for i in inside for p in kept.get(i, []))
        assert {r for batch in window.batches for r, _ in read_back(batch)} <= set(inside)
        for batch in window.batches:
            assert batch.tokens.numel() <= budget or len(batch) == 1
            assert batch.tokens.shape[1] <= N_CTX
            assert batch.keep is None or not batch.keep.all(), (
                "padding is said where there is some, only there"
            )
            assert batch.real.any(0).all(), "no column is padding alone"


@settings(max_examples=20)  # a tokenizer is slow to send
@given(st.lists(WORDS, min_size=2, max_size=12), st.sampled_from(LAYOUTS), st.randoms(use_true_random=False))
def test_a_window_is_the_same_in_any_order_and_process(
    texts: list[str], layout: RowLayout, random: object
) -> None:
    stream = Stream(open_source(texts), TEXT, tokens_per_batch=20, rows_per_window=2, layout=layout)
    other: Stream = pickle.loads(pickle.dumps(stream))
    order = list(range(stream.windows or 0))
    random.shuffle(order)
    first = windows(stream)
    for w in order:
        again = other.window(w)
        assert again.rejected == first[w].rejected
        for one, two in zip(again.batches, first[w].batches, strict=True):
            assert torch.equal(one.tokens, two.tokens) and torch.equal(one.row, two.row)
            assert torch.equal(one.real, two.real)
            if layout == "packed":
                assert torch.equal(one.documents, two.documents)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_lists_and_data_sets_of_the_same_texts_give_the_same_batches(
    tmp_path: Path, layout: RowLayout
) -> None:
    expected = None
    for form, data in forms(tmp_path, TEXTS).items():
        stream = Stream(
            open_source(data), TEXT, tokens_per_batch=30, rows_per_window=3, too_long="split", layout=layout
        )
        batches = [batch for window in windows(stream) for batch in window.batches]
        got = [
            (b.tokens.tolist(), b.real.tolist(), b.row.tolist(), b.bos) for b in batches if b.row is not None
        ]
        expected = expected or got
        assert got == expected and len(got) == len(batches) > 3, form


# --- padded and packed --------------------------------------------------------------------------------------------


def test_padded_rows_are_sorted_longest_first_and_equal_ones_stay_in_order() -> None:
    lengths = [2, 5, 2, 3, 5, 2, 1]
    stream = Stream(open_source([[7] * n for n in lengths]), TEXT, tokens_per_batch=10)
    batches = stream.window(0).batches
    assert [batch.row.tolist() for batch in batches if batch.row is not None] == [[1, 4], [3], [0, 2, 5, 6]]
    assert [list(batch.tokens.shape) for batch in batches] == [[2, 5], [1, 3], [4, 2]]
    assert batches[0].keep is None, "equally long rows have no padding"
    assert batches[2].keep is not None and batches[2].keep.tolist()[3] == [True, False]


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=14),
    st.integers(1, 60),
    st.integers(1, 20),
    st.none() | st.integers(1, 6),
)
def test_no_other_cuts_between_lengths_cost_less(
    lengths: list[int], budget: int, price: int, most: int | None
) -> None:
    """Cells, padding among them, and `price` for each batch: against every way to part the lengths into runs."""
    ordered = sorted(lengths, reverse=True)
    places = [i for i in range(1, len(ordered)) if ordered[i] != ordered[i - 1]]

    def cost(ends: Sequence[int]) -> int:
        total = 0
        for start, stop in pairwise((0, *ends)):
            rows, width = stop - start, ordered[start]
            total += rows * width + max(price, budget // price) * -(
                -rows // max(1, min(budget // width, most or rows))
            )
        return total

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_module, "PASS", price)
        found = stream_module._ends(ordered, budget, most)
    every = [(*cuts, len(ordered)) for n in range(len(places) + 1) for cuts in combinations(places, n)]
    assert cost(found) == min(map(cost, every))


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=30),
    st.integers(1, 7),
    st.sampled_from(["left", "right"]),
)
def test_prompts_are_batched_once_each_with_their_own_tokens(
    lengths: list[int], most: int, side: Literal["left", "right"]
) -> None:
    """Whatever the padding they came with: at most so many rows and tokens, longest first, numbered by their places."""
    rows = [[1 + (i + k) % 7 for k in range(n)] for i, n in enumerate(lengths)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_module, "TOKENS", 24)
        source = prompt_source(Batch.of(rows, side=side), TEXT, batch_size=most)
        assert isinstance(source, PromptBatches) and source.windows is not None and source.rows == len(rows)
        in_order = list(source.in_order().batches)
    batches = [batch for w in range(source.windows) for batch in source.window(w).batches]
    found = {}
    for batch in batches:
        assert (
            batch.row is not None and len(batch) <= most and (batch.tokens.numel() <= 24 or len(batch) == 1)
        )
        assert bool(batch.real.any(0).all()), "no column is padding in every row"
        found |= {
            n: t[k].tolist() for n, t, k in zip(batch.row.tolist(), batch.tokens, batch.real, strict=True)
        }
    assert [found[i] for i in range(len(rows))] == rows and sum(map(len, batches)) == len(rows)
    widths = [batch.tokens.shape[1] for batch in batches]
    assert widths == sorted(widths, reverse=True)
    assert all(len(batch) <= most and (batch.tokens.numel() <= 24 or len(batch) == 1) for batch in in_order)
    assert [t[k].tolist() for b in in_order for t, k in zip(b.tokens, b.real, strict=True)] == rows
    given = source.as_given().batches
    assert torch.equal(torch.cat([batch.tokens for batch in given]), Batch.of(rows, side=side).tokens)


def test_prompts_of_many_lengths_are_computed_with_little_padding() -> None:
    """60 texts of 12 to 2 250 tokens: 5.3 times the cells of their tokens when each 32 were padded to the longest."""
    lengths = [round(12 * (2250 / 12) ** (i / 59)) for i in range(60)]
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0)).tolist()
    batch = Batch.of([[1] * lengths[i] for i in order])
    source = prompt_source(batch, Text(None, 4096, 50), batch_size=32)
    assert isinstance(source, PromptBatches)
    cells = sum(each.tokens.numel() for each in source.batches)
    assert sum(lengths) <= cells < 1.05 * sum(lengths) and batch.tokens.numel() > 5 * sum(lengths)
    assert max(each.tokens.numel() for each in source.batches) <= TOKENS


def test_short_lines_are_computed_with_little_padding() -> None:
    lengths = [3 + (7 * i) % 40 for i in range(512)]
    stream = Stream(open_source([[1] * n for n in lengths]), Text(None, 128, 50), tokens_per_batch=4096)
    cells = sum(batch.tokens.numel() for window in windows(stream) for batch in window.batches)
    assert sum(lengths) <= cells < 1.08 * sum(lengths)  # 1.45 when batches ended at their budget alone


def test_a_batch_of_texts_is_the_one_that_text_makes() -> None:
    texts = ["The cat sat", "on", "the mat"]
    (batch,) = Stream(open_source(texts), TEXT, tokens_per_batch=99).window(0).batches
    assert batch.row is not None
    alone = TEXT.batch([texts[i] for i in batch.row.tolist()])
    assert torch.equal(batch.tokens, alone.tokens) and torch.equal(batch.real, alone.real)
    assert batch.bos and alone.bos
    (bare,) = Stream(open_source(texts), TEXT, tokens_per_batch=99, prepend_bos=False).window(0).batches
    assert torch.equal(
        bare.tokens, TEXT.batch([texts[i] for i in batch.row.tolist()], prepend_bos=False).tokens
    )
    assert not bare.bos


def test_token_ids_go_through_untouched_and_need_no_tokenizer() -> None:
    ids = torch.randint(50, (5, N_CTX))
    ids[:, 0] = BOS
    stream = Stream(open_source(ids), Text(None, N_CTX, 50), tokens_per_batch=3 * N_CTX)
    first, second = stream.window(0).batches
    assert torch.equal(torch.cat((first.tokens, second.tokens)), ids)
    assert first.keep is second.keep is None and not first.bos
    assert torch.equal(first.row, torch.arange(3)) and torch.equal(second.row, torch.arange(3, 5))


def test_packed_batches_number_their_texts_as_they_stand() -> None:
    texts = [[i] * n for i, n in enumerate([3, 12, 5, 9, 7, 2, 1, 1], 1)]
    stream = Stream(open_source(texts), TEXT, tokens_per_batch=2 * N_CTX, layout="packed")
    batches = stream.window(0).batches
    assert [list(batch.tokens.shape) for batch in batches] == [[2, 12], [2, 12]], (
        "40 tokens in four rows of 12"
    )
    for batch in batches:
        assert batch.row is not None and batch.documents is not None
        standing = [d for d in dict.fromkeys(batch.documents.flatten().tolist()) if d >= 0]
        assert standing == list(range(len(batch.row)))
        assert torch.equal(batch.tokens[batch.real], batch.row[batch.documents[batch.real]] + 1)


def test_packed_rows_are_no_wider_than_the_budget_unless_a_text_is() -> None:
    stream = Stream(open_source([[1] * 3, [2] * 2, [3] * 4]), TEXT, tokens_per_batch=5, layout="packed")
    assert sorted(tuple(batch.tokens.shape) for batch in stream.window(0).batches) == [(1, 4), (1, 5)]
    wide = Stream(open_source([[1] * 9, [2] * 2]), TEXT, tokens_per_batch=5, layout="packed")
    assert [tuple(batch.tokens.shape) for batch in wide.window(0).batches] == [(1, 9), (1, 2)]


# --- bad and long rows ----------------------------------------------------------------------------------------------


def test_rejected_rows_say_why() -> None:
    data: list[object] = ["short", CORPUS[0], [0, TEXT.d_vocab], [-1], "", list(range(13))]
    window = Stream(open_source(data), TEXT, tokens_per_batch=99).window(0)
    n = len(TEXT.ids(CORPUS[0]))
    assert [(r.row, r.reason) for r in window.rejected] == [
        (1, f"{n} tokens, the model's context holds 12"),
        (2, f"token ids must be in [0, {TEXT.d_vocab - 1}], got {TEXT.d_vocab}"),
        (3, f"token ids must be in [0, {TEXT.d_vocab - 1}], got -1"),
        (4, "the row is empty"),
        (5, "13 tokens, the model's context holds 12"),
    ]
    assert window.rejected[0].excerpt == CORPUS[0][:80]
    assert (window.rows, window.cut) == (6, 0)


def test_a_text_of_nothing_the_tokenizer_knows_is_rejected() -> None:
    class Deaf(HuggingFaceTokenizer):
        def encode(self, text: str) -> list[int]:
            return []

        def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
            return [[] for _ in texts]

    text = Text(Deaf(gpt2_tokenizer()), N_CTX, TEXT.d_vocab)
    window = Stream(open_source(["x"]), text, tokens_per_batch=9, prepend_bos=False).window(0)
    assert window.batches == () and window.rejected == (Rejected(0, "the text has no tokens", "x"),)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_long_rows_are_cut_as_asked_and_counted(layout: RowLayout) -> None:
    ids = TEXT.ids(CORPUS[0])
    source = open_source([CORPUS[0], "x", END + CORPUS[0]])
    split = Stream(source, TEXT, tokens_per_batch=N_CTX, too_long="split", layout=layout).window(0)
    pieces = pieces_by_row([split])
    assert split.cut == 2 and all(piece[0] == BOS for piece in pieces[0] + pieces[2])
    assert sorted(i for piece in pieces[0] for i in piece[1:]) == sorted(ids[1:])
    assert pieces[2] == pieces[0], "BOS is not doubled where the text begins with it"
    truncated = Stream(source, TEXT, tokens_per_batch=99, too_long="truncate", layout=layout).window(0)
    assert truncated.cut == 2 and pieces_by_row([truncated])[0] == [ids[:N_CTX]]


def test_pieces_of_an_encoders_text_each_have_its_special_tokens(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\nc\n")
    tokenizer = HuggingFaceTokenizer(BertTokenizer(str(tmp_path / "vocab.txt")))
    text = Text(tokenizer, 5, 8, special=True)
    source = open_source(["a b c a b c a", "b"])
    window = Stream(source, text, tokens_per_batch=5, too_long="split").window(0)
    cls, sep, a, b, c = 2, 3, 5, 6, 7
    assert pieces_by_row([window]) == {
        0: [[cls, a, b, c, sep], [cls, a, b, c, sep], [cls, a, sep]],
        1: [[cls, b, sep]],
    }
    tight = Stream(source, Text(tokenizer, 2, 8, special=True), tokens_per_batch=5, too_long="split").window(
        0
    )
    assert [r.reason for r in tight.rejected] == ["the special tokens alone fill the context of 2"] * 2


# --- options --------------------------------------------------------------------------------------------------------


def test_max_rows_takes_the_first() -> None:
    stream = Stream(open_source(["a"] * 10), TEXT, tokens_per_batch=99, rows_per_window=3, max_rows=7)
    assert (stream.rows, stream.windows) == (7, 3)
    assert [window.rows for window in windows(stream)] == [3, 3, 1]
    more = Stream(open_source(["a"] * 10), TEXT, tokens_per_batch=99, max_rows=70)
    assert more.rows == 10
    endless = Stream(
        open_source("a" for _ in count()), TEXT, tokens_per_batch=99, rows_per_window=3, max_rows=7
    )
    assert [window.rows for _, window in windows_of(endless)] == [3, 3, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens_per_batch": 0}, "tokens_per_batch must be at least 1, got 0"),
        ({"rows_per_window": 0}, "rows_per_window must be at least 1, got 0"),
        ({"max_rows": 0}, "max_rows must be at least 1, got 0"),
        ({"too_long": "drop"}, "(?s)too_long.*(set_aside.*drop|drop.*set_aside)"),
        ({"layout": "ragged"}, "(?s)layout.*(padded.*ragged|ragged.*padded)"),
    ],
)
def test_options_are_checked(options: dict[str, object], message: str) -> None:
    with pytest.raises((ValueError, TypeCheckError), match=message):
        Stream(open_source(["a"]), TEXT, **{"tokens_per_batch": 9, **options})


def test_a_window_that_is_none_is_refused() -> None:
    stream = Stream(open_source(["a", "b"]), TEXT, tokens_per_batch=9, rows_per_window=1)
    for w in (-1, 2):
        with pytest.raises(ValueError, match=rf"windows are numbered from 0, and there are 2: got {w}"):
            stream.window(w)


# --- prefetching ----------------------------------------------------------------------------------------------------


class Watched:
    """A source that remembers who asked it for what, and breaks at a row."""

    name, count = "watched", 20

    def __init__(self, breaks_at: int | None = None) -> None:
        self.asked: list[tuple[int, str]] = []
        self.breaks_at = breaks_at
        self.fresh = threading.Semaphore(0)

    def fingerprint(self) -> str | None:
        return None

    def rows(self, start: int, stop: int) -> Iterator[SourceRow | Rejected]:
        self.asked.append((start, threading.current_thread().name))
        self.fresh.release()
        if start == self.breaks_at:
            raise OSError("the disk is gone")
        yield from [[start + 1]] * (stop - start)


def stream_of(source: Watched) -> Stream:
    return Stream(source, TEXT, tokens_per_batch=99, rows_per_window=1)


def preparing() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("interp-windows")]


def test_windows_are_the_windows_asked_for() -> None:
    source = Watched()
    stream = stream_of(source)
    found = list(windows_of(stream, [3, 0, 19, 3], ahead=2))
    assert [w for w, _ in found] == [3, 0, 19, 3]
    assert [window.batches[0].tokens.tolist() for _, window in found] == [[[4]], [[1]], [[20]], [[4]]]
    assert [start for start, _ in source.asked] == [3, 0, 19, 3]
    assert all(name.startswith("interp-windows") for _, name in source.asked) and preparing() == []


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_as_many_windows_as_asked_for_are_prepared_ahead(depth: int) -> None:
    source = Watched()
    ahead = windows_of(stream_of(source), range(20), ahead=depth)
    for taken in range(1, 4):
        next(ahead)
        if taken == 1:
            assert source.fresh.acquire(timeout=5)
            for _ in range(depth):  # they are prepared although nobody asks for them
                assert source.fresh.acquire(timeout=5)
        assert len(source.asked) <= taken + depth
    ahead.close()
    assert preparing() == [] and len(source.asked) <= 3 + depth


def test_what_a_window_raises_is_raised_at_its_turn() -> None:
    source = Watched(breaks_at=2)
    ahead = windows_of(stream_of(source), range(20), ahead=4)
    assert [next(ahead)[0], next(ahead)[0]] == [0, 1]
    with pytest.raises(OSError, match="the disk is gone"):
        next(ahead)
    assert preparing() == []


def test_an_iterator_ends_its_windows_itself() -> None:
    stream = Stream(open_source(iter(["a"] * 5)), TEXT, tokens_per_batch=99, rows_per_window=2)
    assert stream.rows is None and stream.windows is None
    assert [(w, window.rows) for w, window in windows_of(stream)] == [(0, 2), (1, 2), (2, 1)]
    with pytest.raises(ValueError, match="it gives every row once and in order"):
        stream.window(0)
    half = Stream(open_source(iter(["a"] * 5)), TEXT, tokens_per_batch=99, rows_per_window=1)
    assert [w for w, _ in windows_of(half, range(1, 99, 2))] == [1, 3], (
        "a shard passes over the others' windows"
    )


def test_pinned_batches_are_equal_and_need_an_accelerator() -> None:
    (batch,) = Stream(open_source(["a b", "a"]), TEXT, tokens_per_batch=99).window(0).batches
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="accelerator"):
            batch.pinned()
        return
    fast = batch.pinned()
    assert fast.tokens.is_pinned() and fast.keep is not None and fast.keep.is_pinned()
    assert torch.equal(fast.tokens, batch.tokens) and torch.equal(fast.real, batch.real)
    stream = Stream(open_source(["a b", "a"]), TEXT, tokens_per_batch=99)
    assert all(b.tokens.is_pinned() for _, w in windows_of(stream, [0], pin=True) for b in w.batches)
