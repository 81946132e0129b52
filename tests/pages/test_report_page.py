"""`interp.report(...)`: the page as an object, in a notebook and on disk."""

import html
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import pytest

import interp
from interp.pages import About, Report, ReportPage, ReportQuestion, page, report_of
from tests.pages.conftest import CORRUPTED, PLANTED
from tests.pages.reports import ANSWER, PROMPT, WRONG
from tests.pages.visits import Visit, needs_browser, visit
from tests.tiny import hooked

if TYPE_CHECKING:
    from playwright import sync_api

EVIL = '"></iframe><script>alert(1)</script>'


@pytest.fixture(scope="module")
def shown(planted: Report) -> ReportPage:
    return ReportPage(planted)


@pytest.mark.slow
def test_the_function_gives_the_page_of_the_question(planted_model: interp.HookedTransformer) -> None:
    found = interp.report(planted_model, PLANTED, "d", "e", CORRUPTED, seed=3)
    assert found.report.question.corrupt == CORRUPTED and found.report.provenance["seed"] == 3
    assert found.report.about == About("groundtruth-induction")
    assert {"attribution", "patching", "heads"} <= set(found.tables)
    assert found.html == page(found.report)
    assert repr(found).startswith("ReportPage('groundtruth-induction', 'abcdef")


def test_what_a_question_refuses_the_function_refuses(planted_model: interp.HookedTransformer) -> None:
    with pytest.raises(ValueError, match="requires an answer"):
        interp.report(planted_model, PLANTED, wrong="e")


def test_a_saved_page_is_the_folder_of_a_report(shown: ReportPage, tmp_path: Path) -> None:
    path = shown.save(tmp_path / "out")
    assert path.read_text(encoding="utf-8") == shown.html
    assert {f"{name}.parquet" for name in shown.tables} <= {each.name for each in path.parent.iterdir()}
    (path.parent / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"not ours \(mine\.txt\)"):
        shown.save(tmp_path / "out")


def test_the_frame_holds_the_whole_page_escaped(shown: ReportPage) -> None:
    frame = shown._repr_html_()
    held = re.fullmatch(r'<iframe sandbox="allow-scripts" srcdoc="([^"]*)" [^<>]*></iframe>', frame)
    assert held is not None
    assert html.unescape(held[1]).replace('<base href="about:srcdoc">', "", 1) == shown.html


@pytest.mark.slow
def test_a_script_typed_as_a_prompt_stays_in_the_frame() -> None:
    model = interp.HookedTransformer.from_pretrained("demo-4l")
    frame = interp.report(model, f"When Mary {EVIL}")._repr_html_()
    assert frame.count("<iframe") == frame.count("</iframe>") == 1 and "<script" not in frame


@needs_browser
def test_the_page_works_inside_a_notebooks_frame(
    shown: ReportPage, browser: "sync_api.Browser", tmp_path: Path
) -> None:
    """Its script runs, its links lead into itself, and the page around it cannot be reached from it."""
    around = "<!doctype html><title>notebook</title><p id=mine>a notebook</p>"
    (tmp_path / "index.html").write_text(f"{around}{shown._repr_html_()}", encoding="utf-8")
    seen: Visit = visit(browser, tmp_path)
    frame = seen.page.frame_locator("iframe")
    frame.locator(".thumb[data-layer='1'][data-head='0']").click()
    assert frame.locator("#head-name").inner_text() == "L1H0"
    frame.locator("nav a[href='#provenance']").click()
    assert frame.locator("#provenance").count() == 1 and frame.locator("#mine").count() == 0
    inner = seen.page.frames[1]
    assert inner.url == "about:srcdoc#provenance"
    reach = "() => { try { return parent.document.title } catch (e) { return e.name } }"
    assert inner.evaluate(reach) == "SecurityError"
    assert seen.complaints == []
    assert [url for url in seen.requests if url.startswith("http")] == []
    seen.page.close()


def test_edit_that_an_analysis_cannot_follow_is_named_in_its_section() -> None:
    edited = hooked("gpt2").edited(interp.Edit("L0.mlp", interp.edits.Zero()))
    shown = interp.report(edited, PROMPT, ANSWER, WRONG)
    why = "the edit of L0.mlp (Zero) changes that"
    assert any(why in note for note in shown.report.notes) and why in shown.html
    assert "attribution" in shown.tables


@pytest.mark.slow
def test_ids_are_a_prompt_and_the_page_is_that_of_their_text(planted: Report) -> None:
    model = interp.HookedTransformer.from_pretrained("groundtruth-induction")
    prompt, corrupt = (model.text.batch(text).tokens for text in (PLANTED, CORRUPTED))
    found = report_of(model, ReportQuestion.of(model.text, prompt, "d", "e", corrupt), planted.about, seed=3)
    assert found.tables.keys() == planted.tables.keys()
    for name, table in planted.tables.items():
        pd.testing.assert_frame_equal(found.tables[name], table)
    assert found.question.ids == tuple(prompt[0].tolist()) and PLANTED in found.question.prompt


def test_a_conversation_is_a_prompt_of_the_page() -> None:
    model = hooked("gpt2")
    said = model.chat([{"role": "user", "content": "When Mary"}])
    shown = interp.report(model, said)
    assert list(shown.tables["tokens"].token) == model.text.pieces(said[0].tolist())
    assert model.to_string(said) in html.unescape(shown.html)
    with pytest.raises(ValueError, match="a report is about one prompt, got 2"):
        interp.report(model, said.repeat(2, 1))
