"""Patching and the circuit in a real browser: switches, explanations, and choices that the rest of the page follows."""

import pandas as pd
import pytest

from interp.pages.wording import number, visible
from tests.loops import every, over
from tests.pages.visits import Visit, needs_browser, numbers

pytestmark = needs_browser


def patches(seen: Visit, direction: str) -> pd.DataFrame:
    table = seen.table("patching")
    return table[table.direction == direction].reset_index(drop=True)


def drawn(seen: Visit) -> list[tuple[str, str]]:
    """The visible lines: sender and receiving node."""
    ends = "lines => lines.map((line) => line.dataset.ends)"
    return [
        tuple(text.split()) for text in seen.page.eval_on_selector_all("#circuit .edge:not([hidden])", ends)
    ]


def strongest(seen: Visit, count: int) -> list[tuple[str, str]]:
    table = seen.table("edges").head(count)
    return list(zip(table.sender, table.receiver.str.replace(r"\.[qkv]$", "", regex=True), strict=True))


def linked(seen: Visit, count: int) -> list[tuple[str, str]]:
    """Those of them on a path from the embedding to the logits."""
    left = strongest(seen, count)
    while True:
        sent, received = {sender for sender, _ in left}, {receiver for _, receiver in left}
        kept = [
            (a, b) for a, b in left if (a in received or a == "L0.resid") and (b in sent or b == "logits")
        ]
        if kept == left:
            return kept
        left = kept


@over("direction", ["denoise", "noise"])
def test_the_patching_switch_shows_that_direction_alone(seen: Visit, direction: str) -> None:
    seen.page.locator("#patching .switch").get_by_text(direction, exact=True).click()
    table = patches(seen, direction)
    shown = seen.texts("#patching .cell:visible")
    assert [text != "–" for text in shown] == table.changed.tolist()
    assert numbers(shown) == pytest.approx(table.normalised[table.changed].tolist(), abs=6e-3)


def test_a_cell_of_a_map_explains_itself_and_chooses_its_token(seen: Visit) -> None:
    table = patches(seen, "denoise")
    at = table.query("site == 'mlp_out' and layer == 2 and pos == 11").index[0]
    row, cell = table.loc[at], seen.page.locator("#patching .cell:visible").nth(int(at))
    cell.hover()
    tip = f"layer 2 at {visible(row.token)} (11)\n{number(row.value, 3, sign=True)} logits"
    assert seen.texts("#tip")[0].startswith(tip)
    cell.click()
    assert seen.texts("#next-pos") == ["11"]
    assert seen.page.locator("#patching thead th.chosen:visible").count() == 3
    seen.page.mouse.move(1, 1)
    seen.page.locator("#patching .cell:visible").first.focus()
    seen.page.keyboard.press("ArrowRight")
    assert seen.texts("#tip")[0].endswith("nothing was changed here")


def test_a_head_of_the_map_is_chosen_everywhere(seen: Visit) -> None:
    seen.page.locator("#patching .cell[data-layer='2'][data-head='3']:visible").click()
    assert seen.texts("#head-name") == ["L2H3"]
    assert seen.page.locator("#attribution .cell.chosen[data-layer='2'][data-head='3']").count() == 1


def test_the_number_of_edges_can_be_chosen(seen: Visit) -> None:
    with every() as case:
        for count in (50, 10, 100):
            with case(count):
                choose_edges(seen, count)


def choose_edges(seen: Visit, count: int) -> None:
    """Choose as many and see them, their scores and the parts at their ends."""
    seen.page.locator("#circuit .switch").get_by_text(f"top {count}", exact=True).click()
    assert drawn(seen) == linked(seen, count)
    scores = seen.table("edges").value[:count]
    assert numbers(seen.texts("#edges tr:visible td:nth-child(3)")) == pytest.approx(
        scores.tolist(), abs=6e-4
    )
    pale = (
        "nodes => nodes.filter((node) => !node.classList.contains('apart')).map((node) => node.dataset.part)"
    )
    touched = {end for edge in linked(seen, count) for end in edge}
    assert set(seen.page.eval_on_selector_all("#circuit .node", pale)) == touched | (
        {"L0.resid", "logits"} & touched
    )


def test_a_line_explains_itself_where_it_is_pointed_at_and_with_the_keyboard(seen: Visit) -> None:
    table = seen.table("edges")
    seen.page.focus("#circuit .edge")
    for rank in (0, 1):
        score = number(table.value[rank], 3, sign=True)
        assert f"{score} logits" in seen.texts("#tip")[0]
        seen.page.keyboard.press("ArrowRight")
    seen.page.keyboard.press("Escape")
    line = seen.page.locator("#circuit .edge").first
    line.scroll_into_view_if_needed()
    frames = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
    seen.page.evaluate(frames)  # the browser tells of a scroll at the next frame, and that hides explanations
    middle = """line => { const path = line.querySelector("path");
      const at = path.getPointAtLength(path.getTotalLength() / 2);
      const place = at.matrixTransform(path.getScreenCTM()); return [place.x, place.y]; }"""
    x, y = line.evaluate(middle)
    seen.page.mouse.move(x, y)
    tip = seen.page.locator("#tip").bounding_box()
    assert tip is not None
    assert min(abs(tip["y"] - y), abs(tip["y"] + tip["height"] - y)) < 10


def test_choosing_a_part_shows_its_edges_and_once_more_shows_all(seen: Visit) -> None:
    seen.page.locator("#circuit .switch").get_by_text("top 100").click()
    head = seen.table("edges").query("sender.str.contains('H')").sender.iloc[0]
    node = seen.page.locator(f"#circuit .node[data-part='{head}']")
    node.click()
    assert seen.texts("#head-name") == [head]
    lit = "lines => lines.map((line) => line.classList.contains('lit'))"
    for selector, edges in (("#circuit .edge", linked), ("#edges tbody tr", strongest)):
        expected = [head in edge for edge in edges(seen, 100)]
        assert True in expected and False in expected
        assert seen.page.eval_on_selector_all(selector, lit) == expected
    assert node.get_attribute("aria-pressed") == "true"
    focused = seen.page.locator("#circuit .focused")
    assert focused.count() == 1
    node.focus()
    seen.page.keyboard.press("Enter")
    assert focused.count() == 0
    seen.page.keyboard.press(" ")
    assert focused.count() == 1


def test_a_part_without_heads_can_be_chosen_in_the_table_and_leaves_the_head_alone(seen: Visit) -> None:
    before = seen.texts("#head-name")
    seen.page.locator("#circuit .switch").get_by_text("top 100").click()
    seen.page.locator("#edges .link:visible", has_text="logits").first.click()
    assert seen.texts("#head-name") == before
    assert seen.page.locator("#circuit .node.picked").get_attribute("data-part") == "logits"


def test_a_head_chosen_elsewhere_is_picked_in_the_circuit(seen: Visit) -> None:
    seen.page.locator("#circuit .switch").get_by_text("top 100").click()
    head = seen.table("edges").query("sender.str.contains('H')").sender.iloc[0]
    layer, place = head[1:].split("H")
    seen.page.click(f".thumb[data-layer='{layer}'][data-head='{place}']")
    assert seen.page.locator("#circuit .node.picked").get_attribute("data-part") == head
