"""Experiment files: what one must have, what its parameters are, and that loading leaves no trace."""

import sys
from pathlib import Path

import pytest

from interp.runs.experiment import BrokenExperimentError, Experiment, loaded, parameters

GOOD = '''"""Why?"""
from dataclasses import dataclass, field

from beside import NAME
from interp.runs.record import Record


@dataclass(frozen=True)
class Inner:
    scale: float = 0.5
    """How much."""


@dataclass(frozen=True)
class Job:
    texts: tuple[str, ...]
    """What to
    read."""
    name: str | None = NAME
    inner: Inner = field(default_factory=Inner)


def main(job: Job, record: Record) -> None:
    pass
'''
FORM = r"an experiment requires main\(job: Parameters, record: Record\).*"


def entered(file: Path) -> Experiment:
    with loaded(file) as experiment:
        return experiment


def test_a_file_is_loaded_with_its_neighbours_and_leaves_no_trace(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("NAME = 'x'\n")
    file = tmp_path / "my_question.py"
    file.write_text(GOOD)
    before = list(sys.path)
    with loaded(file) as experiment:
        assert sys.modules["my_question"].__file__ == str(file)
        found = parameters(experiment.kind)
    assert (experiment.question, experiment.kind.__name__) == ("Why?", "Job")
    assert [(each.name, each.default, each.doc, each.sequence) for each in found] == [
        ("texts", None, "What to read.", tuple[str, ...]),
        ("name", "'x'", "", None),
        ("inner.scale", "0.5", "How much.", None),
    ]
    assert sys.path == before and "my_question" not in sys.modules
    sys.modules.pop("beside")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", FORM + "has no function main"),
        ("main = 3\n", FORM + "has no function main"),
        ("def main(job: int) -> None: ...\n", FORM + r"has main\(job: int\) -> None"),
        (GOOD.replace("record: Record)", "record)"), FORM + r"has main\(job: .*Job, record\)"),
        (GOOD.replace("job: Job,", "job: int,"), FORM + r"has main\(job: int, record"),
        (GOOD.replace("record: Record)", "record: Record, more: int)"), FORM + "has main"),
    ],
)
def test_a_file_without_a_main_that_takes_a_record_is_refused(
    text: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "my_question.py"
    file.write_text(text.replace("from beside import NAME", "NAME = 'x'"))
    with pytest.raises(ValueError, match=message):
        entered(file)
    assert "my_question" not in sys.modules


def test_what_a_file_raises_on_import_is_kept_as_the_cause(tmp_path: Path) -> None:
    file = tmp_path / "my_question.py"
    file.write_text("raise ValueError('mine')\n")
    with pytest.raises(BrokenExperimentError, match="cannot be imported") as raised:
        entered(file)
    assert str(raised.value.__cause__) == "mine"
    assert "my_question" not in sys.modules


def test_a_file_that_would_hide_a_module_in_use_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "json.py"
    file.write_text("x = 1\n")
    with pytest.raises(ValueError, match=r"'json' is a Python module in use: rename .*json\.py"):
        entered(file)


def test_a_missing_file_and_one_that_is_no_python_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist: the path of a Python file is required"):
        entered(tmp_path / "nowhere.py")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ValueError, match=r"a Python file \(\.py\) is required"):
        entered(tmp_path / "notes.txt")
