"""The page of the board: its numbers are those of the result, nothing is fetched, nothing breaks out of its place."""

import re
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import xarray as xr

from experiments.board import METHODS, MODES, SCORES, benchmark, board_page
from experiments.board.__main__ import main
from tests.pages.looks import faults
from tests.pages.visits import needs_browser, visit

if TYPE_CHECKING:
    from playwright import sync_api

EVIL = "<script>alert(1)</script>\u202e"


@pytest.fixture(scope="module")
def result() -> xr.Dataset:
    methods = {name: METHODS[name] for name in ("eap", "random")} | {EVIL: METHODS["eap"]}
    return benchmark(["two_hop", "either"], methods=methods, seeds=2, pairs=4)


def rows(page: str, section: str) -> list[list[str]]:
    """The cells of all rows of a section's tables, names first, intervals after a bar."""
    part = page[page.index(f'<section id="{section}">') :]
    part = part[: part.index("</section>")]
    found = []
    for row in re.findall(r"<tr>(.*?)</tr>", part, re.DOTALL):
        cells = [
            cell.replace("<small>", "|").replace("</small>", "")
            for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)
        ]
        found.append([unescape(cell) for cell in cells])
    return found


@pytest.mark.slow
def test_the_tables_hold_the_numbers_of_the_result_best_method_first(result: xr.Dataset) -> None:
    page = board_page(result)
    head, *board = rows(page, "board")
    assert head == ["method", *SCORES]
    best = [float(result.value.sel(attribution=name, score="auroc")) for name in result.attribution.values]
    assert [float(row[1].partition("|")[0]) for row in board] == pytest.approx(
        sorted(best, reverse=True), abs=0.006
    )
    by_name = {row[0]: row[1:] for row in board}
    for name in ("eap", "random"):
        for score, text in zip(SCORES, by_name[name], strict=True):
            mine = result.sel(attribution=name, score=score)
            value, _, interval = text.partition("|")
            assert float(value.replace("−", "-")) == pytest.approx(float(mine.value), abs=0.006, rel=0.06)
            if np.isnan(float(mine.low)):
                assert interval == ""
            else:
                ends = [float(end) for end in interval.split(" to ")]
                assert ends == pytest.approx([float(mine.low), float(mine.high)], abs=0.006)


@pytest.mark.slow
def test_kinds_of_edges_and_programs_have_a_row_each(result: xr.Dataset) -> None:
    page = board_page(result)
    head, *kinds = rows(page, "modes")
    assert [row[0].split("|")[0] for row in kinds] == list(MODES)
    for row, mode in zip(kinds, MODES, strict=True):
        assert MODES[mode] in row[0]
        share = float(result.found.sel(attribution="eap", mode=mode))
        text = row[head.index("eap")]
        assert (text == "–") if np.isnan(share) else float(text) == pytest.approx(share, abs=0.006)
    head, *programs = rows(page, "programs")[:3]
    assert [row[0] for row in programs] == ["either", "two_hop"]
    for name, row in zip(("either", "two_hop"), programs, strict=True):
        each = result.each.sel(score="auroc", attribution="eap").values[result.program.values == name]
        assert float(row[head.index("eap")]) == pytest.approx(each.mean(), abs=0.006)


@pytest.mark.slow
def test_method_with_a_script_for_a_name_stays_text_and_fetches_nothing(result: xr.Dataset) -> None:
    page = board_page(result)
    assert "<script" not in page and "&lt;script&gt;" in page and "\u202e" not in page
    assert not re.search(r'(?:src|href)="(?!#)', page)


def test_what_is_no_board_is_refused() -> None:
    with pytest.raises(ValueError, match=r"result must be one of experiments\.board\.benchmark"):
        board_page(xr.Dataset({"value": 1.0}))


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "board.html"
    assert main(["two_hop", "--methods", "eap", "--seeds", "1", "--pairs", "4", "--html", str(file)]) == 0
    assert str(file) in capsys.readouterr().out
    assert rows(file.read_text(encoding="utf-8"), "board")[1][0] == "eap"


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.slow
def test_it_fits_its_window_and_fetches_nothing(
    width: int, scheme: str, result: xr.Dataset, tmp_path: Path, browser: "sync_api.Browser"
) -> None:
    (tmp_path / "index.html").write_text(board_page(result), encoding="utf-8")
    seen = visit(browser, tmp_path, width, color_scheme=scheme)
    wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    overflow, shown = seen.page.evaluate(wide), seen.page.locator("#board tbody tr").count()
    assert faults(seen.page) == []
    seen.page.close()
    assert overflow <= 0 and shown == 3
    assert seen.complaints == []
    assert all(url.startswith(("file://", "data:")) for url in seen.requests)
