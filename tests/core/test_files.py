"""Files: whole or not at all, never in the place of what is no regular file, with the permissions that were there."""

import errno
import os
import re
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from interp.core.files import (
    explained,
    is_file,
    is_folder,
    json_contents,
    json_object,
    named_path,
    write_atomically,
)
from tests.forking import forked
from tests.loops import over


def test_writing_puts_the_content_under_the_name(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a.txt", lambda p: p.write_text("new"))
    assert (tmp_path / "a.txt").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]
    assert (tmp_path / "a.txt").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("before", [None, "old"])
def test_a_failure_while_writing_leaves_what_was_there_and_nothing_else(
    before: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "a.txt"
    if before is not None:
        path.write_text(before)

    def fail(temporary: Path) -> None:
        temporary.write_text("half")
        assert temporary.parent == tmp_path, "a rename within one file system is atomic"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, fail)
    assert [p.name for p in tmp_path.iterdir()] == ([] if before is None else ["a.txt"])
    assert before is None or path.read_text() == before


def test_the_name_never_bears_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")

    def slow(temporary: Path) -> None:
        temporary.write_text("ne")
        assert path.read_text() == "old"
        temporary.write_text("new")

    write_atomically(path, slow)
    assert path.read_text() == "new"


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        write_atomically(tmp_path / "nowhere" / "a.txt", lambda p: p.write_text("x"))


# --- what is there ----------------------------------------------------------------------------------------------------


def text(content: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(content)


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@over("mask", [0o000, 0o022, 0o027, 0o077])
def test_a_new_file_has_the_permissions_of_new_files(mask: int, tmp_path: Path) -> None:
    with umask(mask):
        write_atomically(tmp_path / f"{mask}", text("new"))
    assert (tmp_path / f"{mask}").stat().st_mode & 0o777 == 0o666 & ~mask


@over("mode", [0o600, 0o640, 0o644, 0o664, 0o755])
def test_existing_file_keeps_its_permissions_and_is_not_read_meanwhile(mode: int, tmp_path: Path) -> None:
    path, meanwhile = tmp_path / f"{mode}", list[int]()
    path.write_text("old")
    path.chmod(mode)

    def write(temporary: Path) -> None:
        meanwhile.append(temporary.stat().st_mode & 0o777)
        temporary.write_text("new")

    with umask(0):
        write_atomically(path, write)
    assert path.read_text() == "new"
    assert [path.stat().st_mode & 0o777, *meanwhile] == [mode, mode]


def test_links_pipes_devices_and_folders_are_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "broken").symlink_to("nowhere")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    before = sorted(path.name for path in tmp_path.iterdir())
    what = {"link": "a symbolic link to file", "broken": "a symbolic link to nowhere", "pipe": "a pipe",
            "folder": "a folder", "/dev/null": "a device"}  # fmt: skip
    for name, said in what.items():
        mode = (tmp_path / name).lstat().st_mode
        message = (
            f"a new or a regular file is required to write to, {re.escape(str(tmp_path / name))} is {said}"
        )
        with pytest.raises(ValueError, match=message):
            write_atomically(tmp_path / name, text("new"))
        assert (tmp_path / name).lstat().st_mode == mode
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert (tmp_path / "file").read_text() == "old"


def test_a_read_only_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may be allowed everything, so the answer to the question is given here."""
    (tmp_path / "a.txt").write_text("old")
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    with pytest.raises(
        PermissionError, match=r"it is read-only: give a place that may be written to.*a\.txt"
    ):
        write_atomically(tmp_path / "a.txt", text("new"))
    assert (tmp_path / "a.txt").read_text() == "old"


# --- no room, no right ------------------------------------------------------------------------------------------------


@over("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_a_system_that_refuses_is_quoted_with_the_file_and_what_to_do(number: int, tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        raise OSError(number, os.strerror(number))

    todo = "make room" if number in (errno.ENOSPC, errno.EDQUOT) else "give a place that may be written to"
    with pytest.raises(OSError, match=f"{os.strerror(number)}: {todo}.*a.txt") as found:
        write_atomically(tmp_path / "a.txt", fail)
    assert found.value.errno == number and found.value.filename == str(tmp_path / "a.txt")
    assert list(tmp_path.iterdir()) == []


def small(write: Callable[[Path], object], path: Path) -> tuple[int | None, str]:
    """What is said where no file may grow beyond 100 bytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
    try:
        write_atomically(path, write)
    except OSError as error:
        return error.errno, str(error)
    return None, ""


def of_python(path: Path) -> object:
    return path.write_bytes(b"x" * 1000)


def of_safetensors(path: Path) -> object:
    return save_file({"x": torch.zeros(1000)}, path)


@pytest.mark.parametrize(
    "said",
    ["I/O error: No space left (os error 28)", "IoError(Os { code: 28, kind: StorageFull, message: ... })"],
)
def test_what_a_system_error_is_in_words_is_understood(said: str) -> None:
    """As safetensors words it since 0.6, and before."""
    found = explained(RuntimeError(said), Path("a.safetensors"))
    assert found is not None and (found.errno, found.filename) == (errno.ENOSPC, "a.safetensors")
    assert explained(RuntimeError("error 28"), Path("a.safetensors")) is None


@pytest.mark.parametrize("write", [of_python, of_safetensors])
def test_a_disk_without_room_is_said_whoever_writes(write: Callable[[Path], object], tmp_path: Path) -> None:
    number, said = forked(partial(small, write, tmp_path / "a.txt"))
    assert number == errno.EFBIG and "make room" in said and "a.txt" in said
    assert list(tmp_path.iterdir()) == []


def test_a_loop_of_links_is_the_name_of_no_file(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(ValueError, match="loop/out is the name of no file"):
        named_path(tmp_path / "loop" / "out")


BAD_JSON = {
    "no JSON": b'{"a": ',
    "no UTF-8": b'{"a": "\xff"}',
    "nested": b"[" * 200_000,
    "a number of too many digits": b"[" + b"1" * 5000 + b"]",
}


@pytest.mark.parametrize("content", BAD_JSON.values(), ids=BAD_JSON)
def test_what_is_no_json_is_said_in_the_same_words_by_both_readers(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "it.json"
    file.write_bytes(content)
    said = []
    for read in (json_object, json_contents):
        with pytest.raises(ValueError, match=r"it\.json is not readable JSON: ") as refused:
            read(file)
        said.append(str(refused.value))
    assert said[0] == said[1]


def test_a_line_of_json_ends_at_a_line_break_and_nowhere_else(tmp_path: Path) -> None:
    file = tmp_path / "it.jsonl"
    file.write_text('\ufeff"a\u2028b"\r\n\n{"c": "\x85"}\n', encoding="utf-8")
    assert json_contents(file) == ["a\u2028b", {"c": "\x85"}]
    file.write_text("1\n[\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"it\.jsonl: row 1 is not readable JSON"):
        json_contents(file)


@pytest.mark.parametrize("name", ["x" * 300, "tests/" + "x" * 300, "a\0b", "\ud800", "", "no/where"])
def test_a_text_that_names_nothing_is_no_file_and_no_folder(name: str) -> None:
    assert not is_file(name) and is_folder(name) == (name == "")
    assert is_file(__file__) and is_folder(Path(__file__).parent)
