"""Words of a command line that name a file which is not there, and files that hold no text."""

from pathlib import Path

import pytest

from interp.cli import main
from interp.cli.asking import read_data

EXPERIMENT = """
from dataclasses import dataclass
from interp.runs import Record

@dataclass
class Nothing: ...

def main(job: Nothing, record: Record) -> None: ...
"""


@pytest.mark.parametrize("text", ["nofile.txt", "facts.csv", "out/talk.json", "shards.jsonl"])
def test_a_file_that_is_not_there_is_no_prompt(text: str) -> None:
    with pytest.raises(ValueError, match=f"there is no file {text}"):
        read_data((text,))


@pytest.mark.parametrize("text", ["Open nofile.txt", "Mary.", "a.b", "3.5", "txt"])
def test_other_words_are_prompts(text: str) -> None:
    assert read_data((text,)) == text


@pytest.mark.parametrize(
    "argv",
    [
        ("steering", "--positive", "latin.txt", "--negative", "a"),
        ("probe-neurons", "a", "b", "--labels", "latin.txt"),
        ("linear-relation", "--pairs", "latin.csv"),
        ("findings", "groundtruth-induction", "--texts", "latin.txt"),
        ("run", "it.py", "--config", "latin.toml"),
    ],
)
def test_a_file_that_is_no_text_is_refused_by_its_name(
    argv: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (name,) = (word for word in argv if word.startswith("latin."))
    Path(name).write_bytes("d\xe9j\xe0 vu".encode("latin-1"))
    Path("it.py").write_text(EXPERIMENT)
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert f"{name} must be UTF-8: " in error
