"""A folder appears whole or not at all, and never in place of somebody else's."""

import os
import re
from pathlib import Path

import pytest

from interp.pages import folder as pages_folder
from interp.pages.folder import replacing


class WriteStoppedError(Exception):
    """Something that goes wrong in the middle."""


def fill(folder: Path, word: str = "new") -> None:
    (folder / "a.csv").write_text(word)
    (folder / "run.json").write_text('{"files": ["a.csv", "run.json"]}')


def stop_in_the_middle(target: Path) -> None:
    with replacing(target) as fresh:
        fill(fresh)
        raise WriteStoppedError


def test_a_new_folder_appears_with_its_parents(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "er" / "out"
    with replacing(target) as fresh:
        fill(fresh)
        assert not target.exists()
    assert (target / "a.csv").read_text() == "new"
    assert os.listdir(target.parent) == ["out"]
    assert target.stat().st_mode & 0o777 == 0o755


def test_a_failure_in_the_middle_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(WriteStoppedError):
        stop_in_the_middle(tmp_path / "deep" / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_earlier_report_is_replaced_whole(tmp_path: Path) -> None:
    for word in ("old", "new"):
        with replacing(tmp_path / "out") as fresh:
            fill(fresh, word)
    assert (tmp_path / "out" / "a.csv").read_text() == "new"
    assert os.listdir(tmp_path) == ["out"]


def test_a_failure_leaves_the_earlier_report_as_it_was(tmp_path: Path) -> None:
    with replacing(tmp_path / "out") as fresh:
        fill(fresh, "old")
    with pytest.raises(WriteStoppedError):
        stop_in_the_middle(tmp_path / "out")
    assert (tmp_path / "out" / "a.csv").read_text() == "old"
    assert os.listdir(tmp_path) == ["out"]


def test_a_rename_that_fails_puts_the_earlier_report_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with replacing(tmp_path / "out") as fresh:
        fill(fresh, "old")
    rename = os.replace

    def stubborn(source: Path, target: Path) -> None:
        if target.name == "out" and not source.name.endswith(".old"):
            raise OSError("the disk says no")
        rename(source, target)

    monkeypatch.setattr(pages_folder.os, "replace", stubborn)
    with pytest.raises(OSError, match="says no"), replacing(tmp_path / "out") as fresh:
        fill(fresh)
    assert (tmp_path / "out" / "a.csv").read_text() == "old"
    assert os.listdir(tmp_path) == ["out"]


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with replacing(tmp_path / "out") as fresh:
        fill(fresh)
    assert (tmp_path / "out" / "a.csv").exists()


@pytest.mark.parametrize("ours", [True, False])
def test_folder_with_a_foreign_file_is_refused_by_name_and_left_alone(tmp_path: Path, ours: bool) -> None:
    target = tmp_path / "out"
    target.mkdir()
    if ours:
        fill(target, "old")
    (target / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=re.escape("not ours (thesis.tex)")), replacing(target):
        pytest.fail("no work may be done")
    assert (target / "thesis.tex").read_text() == "years of work"
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("text", ["{", "[]", '{"files": 3}', "\xff"])
def test_a_run_file_that_is_not_ours_makes_no_folder_ours(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match="not ours"), replacing(tmp_path):
        pytest.fail("no work may be done")


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("x")
    with pytest.raises(ValueError, match="is a file"), replacing(tmp_path / "out"):
        pytest.fail("no work may be done")


def test_the_working_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="working folder"), replacing(Path()):
        pytest.fail("no work may be done")


def test_a_place_that_cannot_be_written_to_is_known_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with (
        pytest.raises(OSError, match="cannot make the folder"),
        replacing(tmp_path / "file" / "deep" / "out"),
    ):
        pytest.fail("no work may be done")
    with pytest.raises(OSError, match="cannot"), replacing(Path("/proc/interp/out")):
        pytest.fail("no work may be done")
    assert os.listdir(tmp_path) == ["file"]
