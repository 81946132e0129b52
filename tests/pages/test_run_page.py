"""The page of a run: everything it shows is what the folder holds, nothing is fetched, nothing breaks out."""

import base64
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import pandas as pd
import pytest
import xarray as xr

from interp.pages.run_page import SHOWN_ROWS, run_page
from interp.runs.record import Record
from tests.pages.looks import faults
from tests.pages.visits import needs_browser, visit

if TYPE_CHECKING:
    from playwright import sync_api

EVIL = "<script>alert(1)</script>\u202e"


@dataclass(frozen=True)
class Job:
    steps: int = 3
    words: str = "plain"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    file = root / "trial.py"
    file.write_text(f'"""Why {EVIL}?\n\nBecause of {"x" * 300}."""\n')
    figure, ax = plt.subplots(figsize=(14, 3))
    ax.plot([1, 2])
    with Record.create(root, "trial", Job(words=EVIL), command="interp run trial.py", file=file) as record:
        scores = xr.Dataset(
            {"s": ("head", [0.5, -0.75]), "s_low": ("head", [0, -1]), "s_high": ("head", [1, 0])}
        )
        record.step("scores", lambda: scores)
        record.table("rows", pd.DataFrame({f"column_{i}": range(30) for i in range(30)} | {"text": EVIL}))
        record.figure("lines", figure)
        record.say(EVIL)
    plt.close(figure)
    (record.folder / "index.html").write_text(run_page(Record.open(record.folder)), encoding="utf-8")
    return record.folder


def test_the_page_holds_the_figure_itself_and_links_every_file(folder: Path) -> None:
    page = (folder / "index.html").read_text()
    (png,) = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert base64.b64decode(png) == (folder / "figures/lines.png").read_bytes()
    links = re.findall(r'href="([^"#]+)"', page)
    assert {
        "results/scores.nc",
        "results/scores.parquet",
        "tables/rows.csv",
        "figures/lines.png",
        "log.txt",
    } <= set(links)
    assert [link for link in links if not (folder / link).is_file()] == []


def test_the_page_says_what_came_out_and_how_to_repeat_it(folder: Path) -> None:
    page = (folder / "index.html").read_text()
    assert "largest -0.75 [-1, 0] at head 1; mean -0.125 of 2" in page
    assert f"The first {SHOWN_ROWS} of 30 rows" in page
    assert "The same again: <code>interp run trial.py</code>" in page
    assert page.count("<small>not the default</small>") == 1
    assert "<dd>finished</dd>" in page


def test_nothing_that_an_experiment_says_becomes_markup(folder: Path) -> None:
    page = (folder / "index.html").read_text()
    assert "<script" not in page and "\u202e" not in page
    assert page.count("&lt;script&gt;alert(1)") >= 5


def test_a_run_that_failed_says_why_and_how_to_go_on(tmp_path: Path) -> None:
    record = Record.create(tmp_path, "trial", Job(), command="x")
    with pytest.raises(ArithmeticError), record:
        raise ArithmeticError("mine")
    page = run_page(record)
    assert "ArithmeticError: mine" in page
    assert f"To go on: <code>interp run FILE --resume {record.folder}</code>" in page


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400, 2000])
def test_the_page_fits_its_window_and_fetches_nothing(
    width: int, scheme: str, folder: Path, browser: "sync_api.Browser"
) -> None:
    seen = visit(browser, folder, width, color_scheme=scheme)
    overflow = seen.page.evaluate(
        "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    )
    drawn = seen.page.evaluate("document.querySelector('figure img').naturalWidth")
    assert faults(seen.page) == []
    seen.page.close()
    assert overflow <= 0
    assert drawn > 1000
    assert seen.complaints == []
    assert all(url.startswith(("file://", "data:")) for url in seen.requests)
