"""The page from the articles to the tool: every call that it names is there, with the field in its brackets."""

import inspect
import re
import sys
from operator import attrgetter
from pathlib import Path

import pytest

import interp
from interp.core.fitting import fits

PAGE = Path(__file__).parents[2] / "docs" / "articles.md"
ROWS = [line.split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
CALLS = sorted({call for row in ROWS if len(row) == 3 for call in re.findall(r"`([^`]+)`", row[2])})


def test_the_page_has_rows() -> None:
    assert len(ROWS) > 80 and len(CALLS) > 80


@pytest.mark.parametrize("call", CALLS)
def test_each_call_exists(call: str) -> None:
    name, field, value = re.fullmatch(r"([\w.]+)(?:\((\w+)(?:=\"(\w+)\")?\))?", call).groups()
    called = attrgetter(name)(interp)
    assert callable(called)
    if field is not None:
        hint = inspect.signature(called).parameters[field].annotation
        hint = eval(hint, vars(sys.modules[called.__module__])) if isinstance(hint, str) else hint
        assert value is None or fits(value, hint)
