"""Prompts that are scripts, reorder text, hide, or break characters into bytes: shown on the page, never obeyed."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import interp
from interp.core.visible import visible
from interp.pages import About, Report, ReportQuestion, page, replacing, report_of, write_report
from tests.pages.test_report import payload
from tests.pages.visits import NARROW, needs_browser, visit

if TYPE_CHECKING:
    from playwright import sync_api

SCRIPT = "<script>window.obeyed=1</script>"
EVENT = '"><img src=x onerror=obeyed=1>'
TEMPLATE = "{{ 7*7 }}${7*7}"
HIDING = "a\u202eb\u200bc\x00\x07\x9f"
SCRIPTS = "שלום 😀"
PROMPT = f"{SCRIPT}{EVENT}{TEMPLATE}{HIDING}{SCRIPTS}"
HIDDEN = "\u202e\u200b\x00\x07\x9f"


@pytest.fixture(scope="module")
def model(random_model: Path) -> interp.HookedTransformer:
    """A byte-pair tokenizer: all that is rare comes as single bytes."""
    return interp.HookedTransformer.from_pretrained(random_model)


@pytest.fixture(scope="module")
def bad(model: interp.HookedTransformer) -> Report:
    return report_of(model, ReportQuestion(PROMPT), About(SCRIPT, EVENT))


@pytest.fixture(scope="module")
def folder(bad: Report, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bad") / "report"
    with replacing(out) as fresh:
        write_report(bad, fresh)
    return out


@pytest.mark.slow
def test_nothing_of_the_prompt_is_markup_and_nothing_hides(bad: Report) -> None:
    text = page(bad)
    assert text.count("<script") == 2 and text.count("</script>") == 2
    assert "<img" not in text and "7*7 }}" in text
    assert not set(HIDDEN) & set(text)
    for sign in ("⟨U+202E⟩", "⟨U+200B⟩", "␀", "␇", "⟨U+009F⟩"):
        assert sign in text


def test_every_token_is_there_and_half_characters_are_shown_as_such(bad: Report) -> None:
    pieces = bad.tables["tokens"].token.tolist()
    assert payload(page(bad))["names"] == [visible(piece) for piece in pieces]
    assert pieces[-4:] == ["\ufffd"] * 4, "an emoji is four tokens of one byte each"
    assert all(visible(piece).strip() for piece in pieces)


@needs_browser
@pytest.mark.parametrize("scripted", [True, False])
def test_a_browser_shows_the_prompt_and_obeys_none_of_it(
    browser: "sync_api.Browser", folder: Path, bad: Report, scripted: bool
) -> None:
    seen = visit(browser, folder, NARROW, java_script_enabled=scripted)
    names = [visible(piece) for piece in bad.tables["tokens"].token]
    assert seen.page.locator("#losses .chip bdi").all_text_contents() == names
    assert seen.page.locator("#lens thead th bdi").all_text_contents() == names
    assert SCRIPT in seen.page.locator("#question .prompt").inner_text()
    assert seen.page.locator("#parts tbody tr:visible").count() == len(bad.tables["attribution"])
    assert seen.page.locator("#ablation .cell:visible").count() == 2 * 4 * 9
    assert seen.page.locator("img").count() == 0
    if scripted:
        assert seen.page.evaluate("window.obeyed") is None
        seen.page.click("#losses .chip >> nth=3")
        assert seen.texts("#next-pos") == ["3"]
    assert seen.complaints == [] and len(seen.requests) == 1
    seen.page.close()


def test_prompts_that_are_too_long_or_no_text_are_refused_before_any_work(
    model: interp.HookedTransformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("interp.pages.report._pass", lambda *_: pytest.fail("worked"))
    with pytest.raises(ValueError, match="128"):
        report_of(model, ReportQuestion("x" * 500), About("x"))
    with pytest.raises(ValueError, match="half of a surrogate pair at 13"):
        report_of(model, ReportQuestion("half a pair: \ud83d"), About("x"))
