"""The page about a real model says what its blocks print."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.real, pytest.mark.slow]


def test_what_stands_under_each_block_is_what_it_prints(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    from real_model import PAGE, PICTURES, with_outputs

    page = PAGE.read_text(encoding="utf-8")
    again, pictures = with_outputs(page, folder)
    assert again == page
    assert page.count("```text") >= 6
    assert pictures and all((PICTURES / name).is_file() for name in pictures)
