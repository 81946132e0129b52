"""Folders that can be gone on with: of those that begin one at once a single one decides, and nothing is mixed."""

import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from interp.runs.folder import FolderKind, clear, write_json

KIND = FolderKind("pile", "pile.json", "pile, 1")


def test_of_many_that_begin_a_folder_at_once_one_decides_what_it_is(tmp_path: Path) -> None:
    for trial in range(20):
        folder = tmp_path / str(trial)
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda i, at=folder: KIND.claim(at, {"by": i}), range(8)))  # type: ignore[misc]
        assert len({each["by"] for each in found}) == 1 and KIND.read(folder) == found[0]
        assert [path.name for path in folder.iterdir()] == ["pile.json"]


def test_first_manifest_stays_too_where_there_are_no_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    write_json(tmp_path / "pile.json", {"by": 1}, new=True)
    with pytest.raises(FileExistsError):
        write_json(tmp_path / "pile.json", {"by": 2}, new=True)
    assert json.loads((tmp_path / "pile.json").read_text()) == {"by": 1}


def test_a_manifest_of_before_formats_is_read_where_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "pile.json").write_text(json.dumps({"by": 3}))
    assert replace(KIND, unmarked=True).claim(tmp_path, {"by": 4}) == {"by": 3}
    with pytest.raises(ValueError, match="must be of the format 'pile, 1', got None"):
        KIND.claim(tmp_path, {"by": 4})


def test_leftovers_of_killed_processes_go_and_locks_and_other_files_stay(tmp_path: Path) -> None:
    names = {".a.json.x1.json", ".b-1.x2.bin", ".b-1.lock", ".lock", "a.json", ".hidden"}
    for name in names:
        (tmp_path / name).touch()
    clear(tmp_path, "b-*")
    assert {path.name for path in tmp_path.iterdir()} == names - {".b-1.x2.bin"}
    clear(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == names - {".b-1.x2.bin", ".a.json.x1.json"}
