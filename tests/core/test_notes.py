"""Notes: once per process and text, at the user's own line, and off where they are not wanted."""

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import interp
from interp.core.notes import note


@pytest.fixture(autouse=True)
def _nothing_said_yet() -> Iterator[None]:
    note.cache_clear()
    yield
    note.cache_clear()


def test_a_note_is_given_once_for_each_text() -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for text in ("one", "another", "one"):
            note(text)
    assert [str(each.message) for each in found] == ["one", "another"]


def test_a_note_is_a_users_warning_and_can_be_switched_off() -> None:
    assert issubclass(interp.Note, UserWarning)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("ignore", interp.Note)
        note("one")
    assert found == []


def test_a_note_names_the_line_that_called_into_the_package() -> None:
    names = {"__name__": "interp.somewhere", "note": note}
    exec(
        compile("def inner():\n    note('deep')\ndef outer(back):\n    back(inner)", "somewhere.py", "exec"),
        names,
    )
    with pytest.warns(interp.Note, match="deep") as found:
        names["outer"](lambda inner: inner())  # type: ignore[operator]
    assert Path(found[0].filename) == Path(__file__)
    assert "outer" in Path(__file__).read_text().splitlines()[found[0].lineno - 1]
