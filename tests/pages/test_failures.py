"""A section that fails costs the page that section: planted in each, one after the other, and in what they share."""

import sys
import warnings
from collections.abc import Callable
from html import unescape
from pathlib import Path

import pytest
import torch

from interp.cli import main
from interp.core.notes import Note
from interp.pages import (
    About,
    Report,
    ReportQuestion,
    findings,
    flow,
    page,
    report as report_module,
    report_of,
)
from interp.pages.absent import NEEDS
from interp.residual import IncompleteSumError
from tests.pages.reports import ANSWER, CORRUPTED, PROMPT, WRONG, compared
from tests.tiny import hooked

MODEL = "gpt2"
MISSED = "parts miss the whole by 1.10e-05 of the largest part, rounding explains 1e-06"
PLACES: dict[str, tuple[object, str]] = {
    "heads": (report_module, "heads"),
    "attention": (report_module.tables, "attention"),
    "composition": (report_module, "composition"),
    "circuits": (report_module, "copying"),
    "attribution": (report_module.tables, "attribution"),
    "attribution_sources": (report_module.tables, "attribution_sources"),
    "logit_lens": (report_module.tables, "logit_lens"),
    "backward_lens": (report_module.tables, "backward_lens"),
    "value_norms": (flow, "value_norms"),
    "head_tokens": (flow, "words_of_heads"),
    "flow_routes": (flow, "shares"),
    "flow_neurons": (flow, "neurons"),
    "ablation": (report_module, "ablation"),
    "patching": (report_module.tables, "patching"),
    "edges": (report_module.tables, "edges"),
    "faithfulness": (report_module.PromptPair, "curve"),
    "reasons": (report_module, "reasons"),
    "stages": (report_module.stages, "payload"),
}
"""By section, what makes it."""


def failing(cause: Exception) -> Callable[..., object]:
    def fails(*given: object, **how: object) -> object:
        raise cause

    return fails


def made() -> tuple[Report, list[str]]:
    """A report, and what was noted."""
    sys.modules[report_module.Absences.__module__].note.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = report_of(hooked(MODEL), ReportQuestion(PROMPT, ANSWER, WRONG, CORRUPTED), About(MODEL))
    return found, [str(each.message) for each in caught if issubclass(each.category, Note)]


def lost_with(name: str) -> set[str]:
    """A section and what needs it."""
    lost = {name}
    for other, needs in NEEDS.items():
        lost |= {other} if lost & set(needs) else set()
    return lost


@pytest.mark.parametrize("name", PLACES)
def test_a_section_that_fails_is_left_out_and_says_by_how_much(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = compared(MODEL)
    monkeypatch.setattr(*PLACES[name], failing(IncompleteSumError(f"a planted sum: {MISSED}", 1.1e-5)))
    found, noted = made()
    html, lost = page(found), lost_with(name)
    assert MISSED in found.absent[name] and MISSED in html
    assert set(found.absent) == set(whole.absent) | lost
    assert set(found.tables) == set(whole.tables) - lost
    for other, table in found.tables.items():
        if other != "ablation":
            assert table.equals(whole.tables[other]), other
    assert len(found.notes) == len(lost) and found.provenance["notes"] == list(found.notes)
    assert [text for text in noted if text.startswith("report: ")] == [f"report: {x}" for x in found.notes]
    assert all(one.section for one in findings(found))
    asked = html.partition('<section id="question"')[2].partition("</section>")[0]
    assert all(note in unescape(asked) for note in found.notes)


def test_an_attribution_whose_parts_do_not_sum_leaves_the_rest_of_the_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is asked in one run with flow routes, which then runs by itself; the total is the logits' own."""
    question = failing(IncompleteSumError(f"the final stream: {MISSED}", 1.1e-5))
    monkeypatch.setattr("interp.residual.attribution._compute", question)
    whole, (found, _) = compared(MODEL), made()
    assert "flow_routes" in found.absent and "attribution, which is left out" in found.absent["flow_routes"]
    assert MISSED in found.absent["attribution"] and "patching" in found.tables
    assert found.contrast is not None and whole.contrast is not None
    assert found.contrast.total == pytest.approx(whole.contrast.total, abs=1e-5)
    assert MISSED in page(found)


@pytest.mark.parametrize(
    "cause", [ValueError("a value"), MemoryError(), ZeroDivisionError("zero"), torch.OutOfMemoryError("full")]
)
def test_values_arithmetic_and_memory_cost_a_section(
    cause: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*PLACES["composition"], failing(cause))
    found, _ = made()
    assert (
        f"it failed ({type(cause).__name__}: {str(cause) or 'no reason given'})"
        in found.absent["composition"]
    )
    assert "circuits" in found.tables


@pytest.mark.parametrize("cause", [TypeError("a bug"), KeyError("a bug"), AssertionError("a bug")])
def test_anything_else_is_a_bug_and_ends_the_run(cause: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*PLACES["composition"], failing(cause))
    with pytest.raises(type(cause), match="a bug"):
        made()


@pytest.mark.slow
@pytest.mark.parametrize(("more", "code"), [((), 0), (("--strict",), 1)])
def test_the_command_writes_the_page_and_is_strict_where_asked(
    more: tuple[str, ...],
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fails = failing(IncompleteSumError(f"a planted sum: {MISSED}", 1.1e-5))
    monkeypatch.setattr(*PLACES["logit_lens"], fails)
    out = tmp_path / "page"
    asked = [
        "report",
        "--model",
        "groundtruth-induction",
        "--prompt",
        "abcdefabcdefabc",
        "--out",
        str(out),
        *more,
    ]
    sys.modules[report_module.Absences.__module__].note.cache_clear()
    assert main(asked) == code
    assert MISSED in (out / "index.html").read_text(encoding="utf-8")
    assert (
        f"note: report: logit_lens is left out of the page: it failed (IncompleteSumError: a planted sum: {MISSED})"
        in (capsys.readouterr().err)
    )


def test_every_section_of_a_page_is_planted_somewhere() -> None:
    base = {"tokens", "next_tokens"}
    assert set(PLACES) == set(compared(MODEL).tables) - base | {"reasons", "stages"}
