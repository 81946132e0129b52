"""Ablation, the faithfulness curve and cells by token in a real browser: one choice moves every view."""

import pytest

from interp.pages.findings import enough
from interp.views.writing import number
from tests.pages.visits import Visit, needs_browser, numbers

pytestmark = needs_browser


def test_switch_of_changes_shows_its_maps_and_their_heads_are_chosen(
    seen: Visit,
) -> None:
    table = seen.table("ablation")
    for change in ("resample", "zero"):
        seen.page.locator("#ablation .switch").get_by_text(change, exact=True).click()
        rows = table[table.change == change]
        total = seen.page.locator("#ablation .map:visible").nth(1).locator(".cell").all_inner_texts()
        assert [text != "–" for text in total] == rows.changed.tolist()
        assert numbers(total) == pytest.approx(rows.value[rows.changed].tolist(), abs=6e-3)
    seen.page.locator("#ablation .cell[data-layer='2'][data-head='3']:visible").first.click()
    assert seen.texts("#head-name") == ["L2H3"]
    assert seen.page.locator("#ablation .cell.chosen:visible").count() == 2
    assert seen.page.locator("#ablation .dot.chosen:visible").get_attribute("data-part") == "L2H3"


def test_a_dot_explains_itself_and_chooses_its_head(seen: Visit) -> None:
    row = seen.table("ablation").query("change == 'zero' and part == 'L3H6'").iloc[0]
    dot = seen.page.locator("#ablation .dot[data-part='L3H6']:visible")
    dot.focus()
    seen.page.keyboard.press("Enter")
    assert seen.texts("#head-name") == ["L3H6"]
    seen.page.mouse.move(1, 1)
    dot.dispatch_event("pointerenter")
    tip = seen.texts("#tip")[0]
    assert tip.startswith(f"L3H6\ndirect {number(float(row.direct), 3, sign=True)} logits")
    assert f"total {number(float(row.value), 3, sign=True)}" in tip


def test_the_curve_follows_the_number_of_edges_and_chooses_it(seen: Visit) -> None:
    marked = seen.page.locator("#circuit .dot.chosen")
    table = seen.table("faithfulness")
    assert marked.get_attribute("data-edges") == str(min(max(enough(table), 10), 100))
    seen.page.locator("#circuit .switch").get_by_text("top 50", exact=True).click()
    assert marked.get_attribute("data-edges") == "50"
    assert seen.page.locator("#circuit tr.chosen[data-edges]").get_attribute("data-edges") == "50"
    seen.page.locator("#circuit .link[data-edges='25']").click()
    assert marked.get_attribute("data-edges") == "25"
    on_a_path = table.set_index("edges").connected
    assert seen.page.locator("#circuit .edge:not([hidden])").count() == on_a_path[25]
    (carried,) = seen.texts("#carried")
    assert carried == f"Alone they carry {number(table.set_index('edges').value[25])} of the answer."
    seen.page.locator("#circuit .dot[data-edges='200']").click()
    assert marked.get_attribute("data-edges") == "25"  # the graph draws no 200
    assert numbers(seen.texts("#circuit tr[data-edges] td:nth-child(3)")) == pytest.approx(
        table.value.tolist(), abs=6e-4
    )


def test_a_cell_of_a_lens_chooses_its_token_by_mouse_and_keyboard(seen: Visit) -> None:
    cell = seen.page.locator("#lens tbody tr").nth(1).locator("td").nth(3)
    cell.click()
    assert seen.texts("#next-pos") == ["3"]
    seen.page.keyboard.press("ArrowRight")
    seen.page.keyboard.press("Enter")
    assert seen.texts("#next-pos") == ["4"]
