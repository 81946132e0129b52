"""The page of a model with 30 layers of 9 heads: maps are painted, lists short, and it stays light on every screen."""

import base64
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import pytest
import xarray as xr

import interp
from interp.pages import tables, views
from interp.pages.folder import is_cut
from interp.pages.view_attribution import MOST_LISTED, MOST_STEPS, attribution
from tests.configs import build
from tests.pages.conftest import HEADS, LAYERS
from tests.pages.reports import payload
from tests.pages.visits import NARROW, WIDE, Visit, needs_browser, visit

if TYPE_CHECKING:
    from playwright import sync_api


@pytest.fixture(params=[NARROW, WIDE])
def seen(request: pytest.FixtureRequest, browser: "sync_api.Browser", deep: Path) -> Iterator[Visit]:
    fresh = visit(browser, deep, request.param)
    yield fresh
    assert fresh.complaints == []
    root = "document.documentElement"
    assert fresh.page.evaluate(f"{root}.scrollWidth - {root}.clientWidth") <= 0
    fresh.page.close()


def test_what_is_painted_is_every_cell_of_the_map() -> None:
    cells = [
        [views.MapCell("", x / 10, "", marked=x == 7, idle=x == 3, value=x / 4) for x in range(row, row + 5)]
        for row in range(0, 50, 5)
    ]
    assert not views.is_painted(cells) and views.is_painted(cells * 5)
    packed = views.painted(cells)
    levels = np.frombuffer(base64.b64decode(packed["levels"]), np.int8)
    values = np.frombuffer(base64.b64decode(packed["values"]), "<i2")
    full = [min(127, round(12.7 * x)) for x in range(50)]
    assert levels.tolist() == [-128 if x == 3 else full[x] for x in range(50)]
    np.testing.assert_array_equal(values, np.arange(50) * 250)
    assert packed["marked"] == "7" and packed["bytes"] == "2"
    wide = [views.MapCell("", 1.0, "", value=x) for x in (-32.767, 0.0004996, math.nan)]
    packed = views.painted([wide])
    assert np.frombuffer(base64.b64decode(packed["values"]), "<i4").tolist() == [-32767, 0, -(2**31)]
    assert packed["bytes"] == "4"


@pytest.mark.parametrize("parts", [5, 90])
def test_parts_without_a_bar_of_their_own_are_one_bar_and_the_sum_stays(parts: int) -> None:
    values = np.random.default_rng(0).normal(size=parts)
    table = pd.DataFrame(
        {
            "part": [f"L0H{i}" for i in range(parts)],
            "kind": "head",
            "layer": 0,
            "head": range(parts),
            "value": values,
            "share": values / values.sum(),
        }
    )
    found = attribution(table)
    steps = [step for band in found.waterfalls["part"].bands for step in band.steps]
    assert len(steps) == min(parts, MOST_STEPS + 1) and len(found.bars) == min(parts, MOST_LISTED + 1)
    assert sum(step.value for step in steps) == pytest.approx(values.sum())
    assert sum(bar.added.value for bar in found.bars) == pytest.approx(values.sum())
    largest = {f"L0H{i}" for i in np.argsort(-np.abs(values))[:MOST_STEPS]}
    assert largest == {step.part for step in steps[:MOST_STEPS]}
    assert found.count == parts


@pytest.mark.parametrize("most", [1, 7, 40, 500])
@pytest.mark.parametrize("ties", [False, True])
def test_of_many_pairs_the_strongest_become_rows_in_their_order(
    most: int, ties: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.random.default_rng(1).normal(size=(20, 15))
    values = values.round(1) if ties else values
    exists = np.random.default_rng(2).random(values.shape) < 0.6
    names = {"sender": [f"L0H{i}" for i in range(20)], "receiver": [f"L1H{i}.q" for i in range(15)]}
    result = xr.Dataset(
        {"value": (tuple(names), np.where(exists, values, np.nan)), "corrupt": ((), 1.0)},
        coords={**names, "edge": (tuple(names), exists)},
    )
    whole = interp.frame(result)
    order = (-whole.value.abs()).argsort(kind="stable")
    monkeypatch.setattr(tables, "MOST_PAIRS", most)
    kept = tables.edges(result)
    pd.testing.assert_frame_equal(
        kept, whole.iloc[order[:most]][["edge", "sender", "receiver", "value"]].reset_index(drop=True)
    )
    assert kept.attrs["of"] == len(whole) == exists.sum() and is_cut(kept) == (most < len(whole))


def test_of_each_kind_of_composition_the_pairs_furthest_from_the_null_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build("llama-gqa")
    every = {kind: interp.weights.composition(model, kind) for kind in ("Q", "K", "V")}
    whole = tables.composition(every)
    monkeypatch.setattr(tables, "MOST_PAIRS", 6)
    kept = tables.composition(every)
    for kind, rows in whole.groupby("kind"):
        best = rows.iloc[(-rows.excess.abs()).argsort(kind="stable")[:2]].sort_index()
        pd.testing.assert_frame_equal(
            kept[kept.kind == kind].reset_index(drop=True), best.reset_index(drop=True)
        )
    assert kept.attrs["of"] == len(whole) == whole.attrs["of"] and is_cut(kept) and not is_cut(whole)


@pytest.mark.browser
@needs_browser
def test_the_page_is_light(deep: Path, seen: Visit) -> None:
    assert seen.page.evaluate("document.querySelectorAll('*').length") <= 12_000
    assert (deep / "index.html").stat().st_size <= 2_000_000
    assert sum(file.stat().st_size for file in deep.iterdir()) <= 5_000_000
    assert seen.page.locator("h1").inner_text() == "deep-30l"


@pytest.mark.browser
@needs_browser
def test_a_painted_cell_says_its_number_and_chooses_its_head(seen: Visit) -> None:
    page, table = seen.page, seen.table("ablation")
    table = table[table.change == "zero"].set_index("part")
    canvas = page.locator("#ablation canvas.painted").nth(1)
    canvas.scroll_into_view_if_needed()
    frame = {
        name: float(canvas.get_attribute(f"data-{name}") or "nan")
        for name in ("left", "top", "width", "height")
    }
    for layer, head in [(0, 0), (17, 4), (29, 8)]:
        place = {
            "x": frame["left"] + (head + 0.5) * frame["width"],
            "y": frame["top"] + (layer + 0.5) * frame["height"],
        }
        canvas.hover(position=place)
        shown = page.locator("#tip").inner_text().split("\n")
        assert shown[0] == f"L{layer}H{head}"
        assert float(shown[1].split()[0].replace("−", "-")) == pytest.approx(
            table.value[f"L{layer}H{head}"], abs=6e-4
        )
        canvas.click(position=place)
        assert page.locator("#head-name").inner_text() == f"L{layer}H{head}"


@pytest.mark.browser
@needs_browser
def test_arrow_keys_go_from_cell_to_cell_and_enter_chooses(seen: Visit) -> None:
    page = seen.page
    canvas = page.locator("#patterns")
    start = page.locator("#head-name").inner_text()
    canvas.focus()
    page.keyboard.press("ArrowDown")  # the cursor stands at the chosen head first
    assert page.locator("#tip").inner_text().startswith(start)
    for key in (
        ["ArrowUp"] * LAYERS + ["ArrowLeft"] * HEADS + ["ArrowRight", "ArrowDown", "ArrowDown", "Enter"]
    ):
        page.keyboard.press(key)
    assert page.locator("#head-name").inner_text() == "L2H1"


@pytest.mark.browser
@needs_browser
def test_folded_depths_of_the_lens_come_up_on_demand(seen: Visit) -> None:
    rows = seen.page.locator("#lens tbody tr")
    assert rows.count() == LAYERS + 1
    assert seen.page.locator("#lens tbody tr:visible").count() == 16
    seen.page.locator("#lens label", has_text="all").click()
    assert seen.page.locator("#lens tbody tr:visible").count() == LAYERS + 1


@pytest.mark.browser
@needs_browser
def test_walk_marks_the_cells_of_each_finding_by_keyboard_alone(seen: Visit) -> None:
    page = seen.page
    sentences = page.locator(".findings li")
    read = payload((seen.folder / "index.html").read_text(encoding="utf-8"))
    page.locator("#walk-start").focus()
    page.keyboard.press("Enter")
    for i in range(sentences.count()):
        words = sentences.nth(i).evaluate(
            "li => [...li.childNodes].filter((x) => !x.matches?.('a')).map((x) => x.textContent).join('')"
        )
        assert page.locator("#walk-words").inner_text().split() == words.split()
        assert "spoken" in (sentences.nth(i).get_attribute("class") or "")
        places = read["findings"][i]["places"]
        for view, row, column in places:
            marked = page.evaluate(
                """([view, row, column]) => {
                  const map = document.querySelector(`[data-view="${view}"]`);
                  const shown = map.getBoundingClientRect().height > 0;
                  if (map.matches("canvas")) return shown && map.dataset.spoken.split(" ").includes(`${row},${column}`);
                  return shown && map.tBodies[0].rows[row].cells[column + 1].classList.contains("spoken");
                }""",
                [view, row, column],
            )
            assert marked
        page.keyboard.press("ArrowRight")
    page.keyboard.press("Escape")
    assert not page.locator("#walk").is_visible()
    assert page.evaluate("document.activeElement.id") == "walk-start"
    assert page.locator(".spoken, canvas[data-spoken]").count() == 0
