"""A text file gives the rows that its lines say, from any row on, in little memory, or is refused by name."""

import json
import re
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from interp.data import sources
from interp.data.sources import Rejected, open_source
from tests.data.test_sources import reasons, rows, written

# --- rows ---------------------------------------------------------------------------------------------------------

SPACE = rb"[ \t\r\n\x0b\x0c]"
PARTS = [b"a", b"bc", b" ", b"\t", b"\n", b"\r", b"\n\n", "é".encode(), b"\xff", b"\x01"]
CONTENTS = st.lists(st.sampled_from(PARTS), max_size=60).map(b"".join)


def slow_rows(content: bytes, unit: str) -> list[bytes]:
    """The rows by the whole file's lines at once."""
    found: list[bytes] = []
    gap = True
    for line in re.findall(rb"[^\n]*\n|[^\n]+", content):
        blank = re.fullmatch(SPACE + b"+", line) is not None
        if not blank:
            joins = unit == "paragraph" and not gap
            found = [*found[:-1], found[-1] + line] if joins else [*found, line]
        gap = blank
    ends = (re.fullmatch(rb"(?s)(.*?)(\r?\n)?", row) for row in found)
    return [end[1] for end in ends if end]


@given(CONTENTS, st.sampled_from(["line", "paragraph"]), st.integers(1, 9), st.integers(1, 4))
def test_rows_of_a_text_file_are_those_of_its_lines(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, unit: str, block: int, stride: int
) -> None:
    path = tmp_path_factory.mktemp("text") / "x.txt"
    path.write_bytes(content)
    expected = slow_rows(content, unit)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "BLOCK", block)
        patch.setattr(sources, "STRIDE", stride)
        if not expected:
            with pytest.raises(ValueError, match=r"x\.txt has no rows"):
                open_source(path, rows=unit)
            return
        source = open_source(path, rows=unit)
        assert source.count == len(expected)
        for i, raw in enumerate(expected):  # each on its own, so that every remembered place is used
            (row,) = source.rows(i, i + 1)
            if b"\xff" in raw:
                at = raw.index(b"\xff")
                assert isinstance(row, Rejected) and row.row == i
                assert row.reason == f"byte 0xff at {at} is not utf-8"
            else:
                assert row == raw.decode()
        assert rows(source) == [r for i in range(len(expected)) for r in source.rows(i, i + 1)]


def test_a_whole_file_can_be_one_row(tmp_path: Path) -> None:
    content = "\n two\r\n\r\nparagraphs \n"
    (tmp_path / "x.txt").write_bytes(content.encode())
    assert rows(open_source(tmp_path, rows="file")) == [content]


def test_a_file_of_many_blocks_is_read_from_any_row(tmp_path: Path) -> None:
    texts = [f"{i}:" + "x" * (i * 7919 % 997) for i in range(3000)]
    source = open_source(written(tmp_path, "x.txt", texts))
    assert (tmp_path / "x.txt").stat().st_size > 4 * sources.BLOCK
    assert rows(source) == texts
    for start in (0, 255, 256, 257, 1000, 2815, 2999):
        assert list(source.rows(start, start + 300)) == texts[start : start + 300]


def test_a_mark_of_utf8_is_skipped_and_other_encodings_are_said(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes("one\nzwölf\n".encode("utf-8-sig"))
    (tmp_path / "y.txt").write_bytes("one\nzwölf\n".encode("latin-1"))
    assert rows(open_source(tmp_path / "x.txt")) == ["one", "zwölf"]
    assert rows(open_source(tmp_path / "x.txt", rows="file")) == ["one\nzwölf\n"]
    assert rows(open_source(tmp_path / "y.txt", encoding="latin-1")) == ["one", "zwölf"]
    assert reasons(open_source(tmp_path / "y.txt")) == {1: "byte 0xf6 at 2 is not utf-8"}
    with pytest.raises(ValueError, match="begins with the mark of utf-8, not latin-1"):
        open_source(tmp_path / "x.txt", encoding="latin-1")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"x\.txt has no rows: it is empty, or blank"),
        (b" \n\r\n\t", "x.txt has no rows"),
        ("text".encode("utf-16"), r"x\.txt begins with the mark of utf-16, not utf-8; .*iconv -f utf-16"),
        (b"\xff\xfe\0\0" + "text".encode("utf-32-le"), "the mark of utf-32"),
        ("text".encode("utf-16-le"), "x.txt has NUL bytes"),
    ],
)
def test_files_that_are_not_text_are_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.txt").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        open_source(tmp_path)


def test_a_file_that_grew_is_not_read_on(tmp_path: Path) -> None:
    path = written(tmp_path, "x.txt", ["one", "two"])
    source = open_source(path)
    path.write_text("one more\ntwo")
    with pytest.raises(ValueError, match=r"x\.txt has changed since it was opened, from 8 bytes to 12"):
        rows(source)


def test_ways_of_reading_that_are_none_are_refused() -> None:
    for wrong, message in (
        ({"encoding": "utf-16"}, "one byte is required, such as utf-8 or latin-1, got 'utf-16'"),
        ({"encoding": "klingon"}, "unknown encoding 'klingon'"),
    ):
        with pytest.raises(ValueError, match=message):
            open_source(["a"], **wrong)  # type: ignore[arg-type]


# --- cost -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def heap() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.parametrize("name", ["x.txt", "x.jsonl"])
@pytest.mark.usefixtures("heap")
def test_a_large_file_is_read_in_little_memory(tmp_path: Path, name: str) -> None:
    line = json.dumps({"text": "all work and no play " * 600}).encode() + b"\n"
    with (tmp_path / name).open("wb") as file:
        for _ in range(30_000_000 // len(line) // 10 + 1):
            file.write(line * 10)
    tracemalloc.reset_peak()
    source = open_source(tmp_path / name)
    assert source.count is not None and source.count * len(line) >= 30_000_000
    assert (
        sum(1 for start in range(0, source.count, 256) for _ in source.rows(start, start + 256))
        == source.count
    )
    assert tracemalloc.get_traced_memory()[1] < 5_000_000
