"""The page about a real model says what its blocks print."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.real, pytest.mark.slow]


def test_what_stands_under_each_block_is_what_it_prints(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    from real_model import PAGE, with_outputs

    page = PAGE.read_text(encoding="utf-8")
    assert with_outputs(page, folder) == page
    assert "real_model" in sys.modules and page.count("```text") >= 6
