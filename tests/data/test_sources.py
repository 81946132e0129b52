"""Rows are numbered the same however the data arrives, and a bad one says why and harms no other."""

import json
import pickle
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from interp import Edit
from interp.data.batch import Batch
from interp.data.sources import Data, Rejected, Source, SourceRow, TableFile, open_source
from tests.tiny import CORPUS

TEXTS = [*CORPUS, "Ünïcödé \u2028 in one line", " leading and trailing ", "x" * 300, "\ufeffmark", '{"a": 1}']


class Columns:
    """A data set of Hugging Face's kind, as far as a source can tell."""

    _fingerprint = "f00d"

    def __init__(self, **columns: list[object]) -> None:
        self.columns = columns

    @property
    def features(self) -> Mapping[str, object]:
        return dict.fromkeys(self.columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, rows: slice) -> Mapping[str, list[object]]:
        return {name: values[rows] for name, values in self.columns.items()}


def rows(source: Source) -> list[SourceRow | Rejected]:
    assert source.count is not None
    return list(source.rows(0, source.count))


def reasons(source: Source) -> dict[int, str]:
    return {row.row: row.reason for row in rows(source) if isinstance(row, Rejected)}


def written(folder: Path, name: str, records: list[dict[str, object]] | list[str]) -> Path:
    """The records as a file of the kind that its name says."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path, row_group_size=3)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    else:
        path.write_text("".join(f"{r}\n" for r in records), encoding="utf-8", newline="")
    return path


# --- every form of the same rows ------------------------------------------------------------------------------------


def forms(folder: Path, texts: list[str]) -> dict[str, Data]:
    records = [{"n": i, "text": text} for i, text in enumerate(texts)]
    return {
        "list": texts,
        "tuple": tuple(texts),
        "txt": written(folder, "a.txt", texts),
        "jsonl": written(folder, "a.jsonl", records),
        "parquet": str(written(folder, "a.parquet", records)),
        "data set": Columns(n=list(range(len(texts))), text=list(texts)),
        "records": records,
    }


def test_all_forms_of_the_same_texts_have_the_same_rows(tmp_path: Path) -> None:
    for form, data in forms(tmp_path, TEXTS).items():
        source = open_source(data)
        assert source.count == len(TEXTS), form
        assert rows(source) == TEXTS, form
        assert [r for i in range(9) for r in source.rows(i, i + 1)] == TEXTS[:9], form
        assert list(source.rows(3, 5)) + list(source.rows(0, 2)) == TEXTS[3:5] + TEXTS[:2], form
        assert list(source.rows(len(TEXTS), len(TEXTS) + 5)) == [], form
    assert list(open_source(iter(TEXTS)).rows(0, 99)) == TEXTS
    assert list(open_source({"text": t} for t in TEXTS).rows(0, 99)) == TEXTS


def test_a_real_hugging_face_data_set_gives_its_column() -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"text": [*TEXTS, None], "ids": [[1, 2]] * (len(TEXTS) + 1)})
    source = open_source(data)
    assert rows(source)[:-1] == TEXTS and reasons(source) == {len(TEXTS): "field 'text' is null"}
    assert rows(open_source(data, field="ids"))[0] == [1, 2]
    assert rows(open_source(data.with_format("torch"), field="ids"))[0] == [1, 2]
    assert open_source(data).fingerprint() == source.fingerprint() is not None
    assert open_source(data, field="ids").fingerprint() != source.fingerprint()
    streamed = open_source(data.to_iterable_dataset())
    assert streamed.count is None and list(streamed.rows(0, len(TEXTS))) == TEXTS
    with pytest.raises(ValueError, match="several by name: choose one of 'train'"):
        open_source(datasets.DatasetDict({"train": data}))


def test_a_folder_is_its_files_one_after_the_other_by_relative_name(tmp_path: Path) -> None:
    written(tmp_path, "b/1.txt", ["b1", "b2"])
    written(tmp_path, "a.jsonl", [{"text": "a1"}, {"text": None}])
    written(tmp_path, "c.parquet", [{"text": "c1"}, {"text": "c2"}, {"text": None}])
    written(tmp_path, ".hidden.txt", ["no"])
    written(tmp_path, ".cache/x.txt", ["no"])
    whole = open_source(tmp_path)
    apart = [open_source(tmp_path / name) for name in ("a.jsonl", "b/1.txt", "c.parquet")]
    assert [r for r in rows(whole) if isinstance(r, str)] == ["a1", "b1", "b2", "c1", "c2"]
    assert list(reasons(whole)) == [1, 6], "rows are numbered in the folder"
    assert whole.count == sum(source.count or 0 for source in apart) == 7
    for start in range(8):
        assert list(whole.rows(start, start + 3)) == rows(whole)[start : start + 3]
    listed = open_source([tmp_path / name for name in ("a.jsonl", "b/1.txt", "c.parquet")])
    assert rows(listed) == rows(whole) and listed.fingerprint() == whole.fingerprint()
    assert whole.name == "a.jsonl and 2 more"


def test_token_ids_come_as_they_are() -> None:
    ids = [[1, 2, 3], [4, 5, 6]]
    ragged = Batch(
        torch.tensor([[1, 2, 0], [0, 3, 4]]), torch.tensor([[True, True, False], [False, True, True]])
    )
    packed = Batch(torch.tensor([[1, 2, 3, 0]]), documents=torch.tensor([[1, 0, 0, -1]]))
    assert rows(open_source(torch.tensor(ids))) == rows(open_source(ids)) == ids
    assert rows(open_source(torch.tensor(ids[0]))) == rows(open_source([torch.tensor(ids[0])])) == ids[:1]
    assert rows(open_source(ragged)) == [[1, 2], [3, 4]]
    assert rows(open_source(packed)) == [[2, 3], [1]]
    assert rows(open_source([ragged, packed])) == [[1, 2], [3, 4], [2, 3], [1]]
    assert list(open_source(iter([ragged, Batch(torch.tensor(ids))])).rows(1, 4)) == [[3, 4], *ids]


@pytest.mark.parametrize(
    ("data", "is_path"),
    [
        ("corpus.txt", True), ("/no/such", True), ("./x", True), (["a.jsonl", "b.parquet"], True), ("tests/", True),
        ("One sentence.", False), ("and/or", False), (["a.txt", "a text"], False), ("two\nlines.txt", False),
        ("tests", False),
    ],
)  # fmt: skip
def test_a_string_is_a_path_if_it_looks_like_one(
    data: str | list[str], is_path: bool, tmp_path: Path
) -> None:
    if is_path:
        with pytest.raises((FileNotFoundError, ValueError), match=r"does not exist|must be one of"):
            open_source(data)
    else:
        assert rows(open_source(data)) == ([data] if isinstance(data, str) else data)


# --- bad rows and bad files -----------------------------------------------------------------------------------------


def test_every_bad_record_says_why_and_the_others_stay(tmp_path: Path) -> None:
    lines = [
        '{"text": "good"}', '{"text": "half', "[1]", '{"other": 1}', '{"text": null}', '{"text": 3}', '{"text": ""}',
        '{"text": "a\\ud800"}', '{"text": [1, 2]}', '{"text": [1, true]}', "", '{"text": [0.5]}', '{"text": []}', "{}",
        "[" * 100_000, '{"text": "last"}',
    ]  # fmt: skip
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    source = open_source(tmp_path / "x.jsonl")
    found = reasons(source)
    assert source.count == 15, "a blank line is no row"
    assert [r for r in rows(source) if not isinstance(r, Rejected)] == ["good", [1, 2], "last"]
    assert found[1].startswith("malformed JSON: Unterminated string")
    assert found[13].startswith("malformed JSON")
    assert {i: found[i] for i in (2, 3, 4, 5, 6, 7, 9, 10, 11, 12)} == {
        2: "a JSON object is required, got list",
        3: "no field 'text'; it has 'other'",
        4: "field 'text' is null",
        5: "field 'text' is int, neither a text nor a list of ids",
        6: "field 'text' is empty",
        7: "field 'text' has half of a surrogate pair at 1",
        9: "field 'text' is list, neither a text nor a list of ids",
        10: "field 'text' is list, neither a text nor a list of ids",
        11: "field 'text' is empty",
        12: "no field 'text'; it has none",
    }
    excerpts = {row.row: row.excerpt for row in rows(source) if isinstance(row, Rejected)}
    assert excerpts[7] == "a\\ud800" and excerpts[13] == "[" * 80 and excerpts[3] == lines[3]


def test_bad_rows_of_lists_iterators_and_tables_say_why(tmp_path: Path) -> None:
    bad: list[object] = ["good", "", None, [], 2.5, {"no": 1}, {"text": "fine"}]
    expected = {
        1: "the row is empty",
        2: "the row is null",
        3: "the row is empty",
        4: "the row is float, neither a text nor a list of ids",
        5: "no field 'text'; it has 'no'",
    }
    assert reasons(open_source(bad)) == expected
    streamed = list(open_source(iter(bad)).rows(0, 9))
    assert {r.row: r.reason for r in streamed if isinstance(r, Rejected)} == expected
    raw = pa.array([b"good", b"b\xffd", None, b""], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": raw}), tmp_path / "x.parquet")
    assert reasons(open_source(tmp_path / "x.parquet")) == {
        1: "column 'text' is not utf-8: invalid start byte at 1",
        2: "column 'text' is null",
        3: "column 'text' is empty",
    }


def test_what_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(b"PAR1 nothing")
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x.csv").write_text("a,b")
    table = written(tmp_path, "t.parquet", [{"content": "x", "n": 1}])
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "none.parquet")
    for data, message in (
        (tmp_path / "x.parquet", r"x\.parquet is not a Parquet file"),
        (tmp_path / "none.parquet", r"none\.parquet has no rows"),
        (table, r"t\.parquet has no column 'text'; nearest: content; it has content, n"),
        (tmp_path / "empty", "empty is a folder without files"),
        (tmp_path / "other", r"x\.csv must be one of .txt, .jsonl, .parquet"),
        (Columns(content=["x"]), "the data set has no column 'text'; nearest: content"),
        (Columns(text=[]), "at least one row is required, the data set has none"),
        ([], "at least one row is required, got none"),
        (torch.zeros(2, 3), r"token ids \[row, pos\] are required, got torch.float32 of shape \[2, 3\]"),
        (Batch(torch.ones(1, 2).long(), answer=torch.tensor([1])), "a batch of tokens alone .* with answer"),
    ):
        with pytest.raises(ValueError, match=message):
            open_source(data)
    with pytest.raises(FileNotFoundError, match=r"missing\.txt does not exist"):
        open_source(tmp_path / "missing.txt")


# --- identity -------------------------------------------------------------------------------------------------------


def test_a_fingerprint_tells_contents_and_options_apart_and_nothing_else(tmp_path: Path) -> None:
    one, two = forms(tmp_path / "one", TEXTS), forms(tmp_path / "two", TEXTS)
    other = forms(tmp_path / "other", [*TEXTS[:-1], TEXTS[-1] + "."])
    for form in one:
        known = open_source(one[form]).fingerprint()
        assert known and known == open_source(two[form]).fingerprint(), form
        if form != "data set":  # these have their own
            assert known != open_source(other[form]).fingerprint(), form
    text = written(tmp_path, "x.txt", ["a", "b"])
    by_unit = {open_source(text, rows=unit).fingerprint() for unit in ("line", "paragraph", "file")}
    assert len(by_unit) == 3
    record = written(tmp_path, "x.jsonl", [{"a": "x", "b": "x"}])
    assert open_source(record, field="a").fingerprint() != open_source(record, field="b").fingerprint()
    ids = torch.tensor([[1, 2], [3, 4]])
    assert open_source(ids).fingerprint() == open_source(ids.tolist()).fingerprint()
    assert open_source(ids).fingerprint() != open_source(ids.flatten()).fingerprint()
    assert open_source(iter(TEXTS)).fingerprint() is None


def test_a_source_can_be_sent_to_another_process(tmp_path: Path) -> None:
    for form, data in forms(tmp_path, TEXTS).items():
        source = open_source(data)
        list(source.rows(0, 2))
        assert rows(pickle.loads(pickle.dumps(source))) == TEXTS, form


def test_an_iterator_gives_every_row_once_and_in_order() -> None:
    source = open_source(text for text in TEXTS)
    assert list(source.rows(0, 2)) == TEXTS[:2]
    assert list(source.rows(3, 5)) == TEXTS[3:5], "row 2 is passed over"
    with pytest.raises(
        ValueError, match=r"row 2 of an iterator is asked for after row 4: .* pass a list, files or"
    ):
        list(source.rows(2, 3))
    assert list(source.rows(6, 99)) == TEXTS[6:]
    assert list(source.rows(99, 120)) == []


# --- tables -------------------------------------------------------------------------------------------------------


def test_a_table_is_decoded_once_when_read_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"row {i}" for i in range(2000)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "x.parquet", row_group_size=1500)
    opened: list[int] = []
    values = TableFile._values
    monkeypatch.setattr(
        TableFile, "_values", lambda self, group: (opened.append(group), values(self, group))[1]
    )
    source = open_source(tmp_path / "x.parquet")
    assert [r for start in range(0, 2000, 100) for r in source.rows(start, start + 100)] == texts
    assert opened == [0]
    assert list(source.rows(1600, 1602)) == texts[1600:1602] and opened == [0, 1], (
        "the group before is skipped"
    )
    assert list(source.rows(10, 12)) == texts[10:12] and opened == [0, 1, 0]


@pytest.mark.parametrize("hole", [slice(-60, -30), slice(-200, -100), slice(-8, -4)])
def test_a_damaged_footer_of_parquet_is_named(hole: slice, tmp_path: Path) -> None:
    path = written(tmp_path, "a.parquet", [{"text": f"row {i}"} for i in range(50)])
    raw = bytearray(path.read_bytes())
    raw[hole] = bytes(len(raw[hole]))
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=r"a\.parquet is not a Parquet file: "):
        open_source(path)


def test_a_damaged_page_of_parquet_is_named_with_its_row(tmp_path: Path) -> None:
    path = written(tmp_path, "a.parquet", [{"text": f"row {i}"} for i in range(50)])
    raw = bytearray(path.read_bytes())
    raw[4:40] = bytes(36)  # the first page, behind the magic number
    path.write_bytes(raw)
    with pytest.raises(OSError, match=r"a\.parquet cannot be read as Parquet from row 0 on: "):
        list(open_source(path).rows(0, 50))


def test_a_row_nested_deeper_than_python_can_show_is_set_aside() -> None:
    deep: list[object] = []
    for _ in range(3000):
        deep = [deep]
    (row,) = rows(open_source([deep]))
    assert isinstance(row, Rejected)
    assert row.excerpt.startswith("[[[[") and len(row.excerpt) <= 80
    with pytest.raises(ValueError, match=r"a change is required.*got \[\[\[.*\(list\)"):
        Edit("L0.mlp", deep)  # type: ignore[arg-type]
