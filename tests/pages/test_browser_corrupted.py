"""Patching and the circuit in a real browser: switches, explanations, and choices that the rest of the page follows."""

import re
from itertools import combinations

import pandas as pd
import pytest

from interp.core.visible import visible
from interp.views.writing import number
from tests.loops import every, over
from tests.pages.visits import Visit, needs_browser, numbers

pytestmark = needs_browser

EVERY = "#circuit .graph[data-together='part']"
SHOWN = "#circuit .graph:not([hidden])"
BOXES = """nodes => nodes.map((node) => node.querySelector("rect").getBoundingClientRect())
  .map((box) => [box.x, box.y, box.right, box.bottom])"""


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
    assert set(seen.page.eval_on_selector_all(f"{EVERY} .node", pale)) == touched | (
        {"L0.resid", "logits"} & touched
    )


def test_line_explains_itself_to_the_pointer_and_to_the_keyboard(seen: Visit) -> None:
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
    node = seen.page.locator(f"{EVERY} .node[data-part='{head}']")
    node.click()
    assert seen.texts("#head-name") == [head]
    lit = "lines => lines.map((line) => line.classList.contains('lit'))"
    for selector, edges in (("#circuit .edge", linked), ("#edges tbody tr", strongest)):
        expected = [head in edge for edge in edges(seen, 100)]
        assert True in expected and False in expected
        assert seen.page.eval_on_selector_all(selector, lit) == expected
    assert node.get_attribute("aria-pressed") == "true"
    focused = seen.page.locator("#circuit .focused:visible")
    assert focused.count() == 1
    node.focus()
    seen.page.keyboard.press("Enter")
    assert focused.count() == 0
    seen.page.keyboard.press(" ")
    assert focused.count() == 1


def test_part_without_heads_is_chosen_in_the_table_and_leaves_the_head(seen: Visit) -> None:
    before = seen.texts("#head-name")
    seen.page.locator("#circuit .switch").get_by_text("top 100").click()
    seen.page.locator("#edges .link:visible", has_text="logits").first.click()
    assert seen.texts("#head-name") == before
    assert seen.page.locator(f"{EVERY} .node.picked").get_attribute("data-part") == "logits"


def test_a_head_chosen_elsewhere_is_picked_in_the_circuit(seen: Visit) -> None:
    seen.page.locator("#circuit .switch").get_by_text("top 100").click()
    head = seen.table("edges").query("sender.str.contains('H')").sender.iloc[0]
    layer, place = head[1:].split("H")
    seen.page.click(f".thumb[data-layer='{layer}'][data-head='{place}']")
    assert seen.page.locator(f"{EVERY} .node.picked").get_attribute("data-part") == head


def heads_drawn(seen: Visit, count: int) -> list[str]:
    """Heads at a line, the strongest first."""
    ends = (end for edge in linked(seen, count) for end in edge)
    return [end for end in dict.fromkeys(ends) if "H" in end]


def together(seen: Visit, how: str) -> None:
    seen.page.locator("#circuit .switch").get_by_text(how, exact=True).click()


def test_pinned_parts_keep_their_lines_until_they_are_let_go(seen: Visit) -> None:
    seen.page.locator("#circuit .switch").get_by_text("top 100").click()
    first, second, third = heads_drawn(seen, 100)[:3]
    lit = "lines => lines.map((line) => line.classList.contains('lit'))"

    def lit_are(*parts: str) -> None:
        expected = [bool({*parts} & {*edge}) for edge in linked(seen, 100)]
        assert True in expected and False in expected
        shown = f"{EVERY} .edge:not([hidden])"
        assert seen.page.eval_on_selector_all(shown, lit) == expected

    node = {part: seen.page.locator(f"{EVERY} .node[data-part='{part}']") for part in (first, second)}
    node[first].click()
    assert seen.page.locator(f"{EVERY} .pin:visible").count() == 1
    node[second].focus()
    seen.page.keyboard.press("Enter")
    lit_are(first, second)
    layer, place = third[1:].split("H")
    seen.page.click(f".thumb[data-layer='{layer}'][data-head='{place}']")
    lit_are(first, second, third)
    node[first].click()
    lit_are(second)
    assert [each.get_attribute("aria-pressed") for each in node.values()] == ["false", "true"]
    seen.page.click("#unpin")
    assert seen.page.locator("#circuit .focused").count() == 0
    assert seen.page.locator("#unpin").is_hidden()


def test_a_part_that_is_dragged_stays_where_it_was_put_with_its_lines(seen: Visit) -> None:
    seen.page.locator("#circuit .switch").get_by_text("top 50").click()
    layer = heads_drawn(seen, 50)[0].split("H")[0]
    node = seen.page.locator(f"{EVERY} .node[data-part='{layer}.mlp']")
    node.scroll_into_view_if_needed()
    start = node.locator("rect").bounding_box()
    assert start is not None
    x, y = start["x"] + start["width"] / 2, start["y"] + start["height"] / 2
    seen.page.mouse.move(x, y)
    seen.page.mouse.down()
    for step in (10, 30, 60):
        seen.page.mouse.move(x - step, y - step / 10)
    seen.page.mouse.up()
    moved = node.locator("rect").bounding_box()
    assert moved is not None
    assert (moved["x"] - start["x"], moved["y"] - start["y"]) == pytest.approx((-60, -6), abs=1.5)
    assert seen.page.locator("#circuit .focused").count() == 0  # a drag is no click
    ends = r"""lines => lines.flatMap((line) => {
      const [source, ...targets] = line.dataset.ends.split(" ").map((end) =>
        [...document.querySelectorAll(".graph[data-together='part'] .node")].find((node) => node.dataset.part === end));
      const at = (node) => [node.transform.baseVal[0].matrix.e, node.transform.baseVal[0].matrix.f];
      return line.lastElementChild.getAttribute("d").split("M").slice(1).map((way, i) => {
        const n = way.match(/-?[\d.]+/g).map(Number), [a, b] = at(source), [c, d] = at(targets[i]);
        const [across, up] = [Math.abs(n.at(-2) - c) - 15.1, Math.abs(n.at(-1) - d - 10)];
        return Math.max(Math.abs(n[0] - a), Math.abs(n[1] - b + 10), Math.max(0, across), up); });
    })"""
    off = seen.page.eval_on_selector_all(f"{EVERY} .edge:not([hidden])", ends)
    assert max(off) < 0.11
    put = node.get_attribute("transform")
    together(seen, "layers")
    together(seen, "parts")
    seen.page.locator("#circuit .switch").get_by_text("top 25").click()
    assert node.get_attribute("transform") == put
    seen.page.click("#unmove")
    home = [float(node.get_attribute(f"data-{name}") or "nan") for name in "xy"]
    assert node.get_attribute("transform") == f"translate({home[0]:.1f} {home[1]:.1f})"
    assert seen.page.locator("#unmove").is_hidden()


def test_part_is_moved_by_keyboard_and_never_onto_another_or_out_of_sight(seen: Visit) -> None:
    seen.page.locator("#circuit .switch").get_by_text("top 100").click()
    node = seen.page.locator(f"{EVERY} .node[data-part='{heads_drawn(seen, 100)[0]}']")
    node.focus()
    seen.page.keyboard.press("Shift+ArrowRight")
    assert node.evaluate("node => document.activeElement === node")
    assert node.evaluate("node => node.transform.baseVal[0].matrix.e - node.dataset.x") >= 12
    for key in ("ArrowRight", "ArrowUp", "ArrowLeft", "ArrowDown"):
        for _ in range(40):
            seen.page.keyboard.press(f"Shift+{key}")
        boxes = seen.page.eval_on_selector_all(f"{EVERY} .node", BOXES)
        for (a, b, c, d), (e, f, g, h) in combinations(boxes, 2):
            assert a >= g or e >= c or b >= h or f >= d
        frame = seen.page.locator(EVERY).bounding_box()
        labels = seen.page.eval_on_selector_all(
            f"{EVERY} .layer", "texts => Math.max(...texts.map((text) => text.getBoundingClientRect().right))"
        )
        assert frame is not None
        for a, b, c, d in boxes:
            assert a > labels and b >= frame["y"]
            assert c <= frame["x"] + frame["width"] and d <= frame["y"] + frame["height"]


@over("how, held", [("heads together", "heads"), ("layers", "layer")])
def test_line_between_boxes_carries_the_sum_of_the_edges_between_them(
    seen: Visit, how: str, held: str
) -> None:
    seen.page.locator("#circuit .switch").get_by_text("top 50").click()
    together(seen, how)
    assert seen.page.locator(SHOWN).get_attribute("data-together") == held
    assert "A line carries the sum of the lines that it stands for" in seen.texts("#carried")[0]

    def box(part: str) -> str:
        if part in ("L0.resid", "logits") or (held == "heads" and "H" not in part):
            return part
        layer = re.split(r"[H.]", part)[0]
        return layer if held == "layer" else f"{layer}.attn"

    table = seen.table("edges").head(50)
    table = table.assign(receiver=table.receiver.str.replace(r"\.[qkv]$", "", regex=True))
    on_path = set(linked(seen, 50))
    sums: dict[tuple[str, str], float] = {}
    for sender, receiver, value in zip(table.sender, table.receiver, table.value, strict=True):
        pair = box(sender), box(receiver)
        if (sender, receiver) in on_path and pair[0] != pair[1]:
            sums[pair] = sums.get(pair, 0.0) + float(value)
    lines = seen.page.eval_on_selector_all(
        f"{SHOWN} .bundle:not([hidden])",
        "lines => lines.map((line) => [line.dataset.ends, line.dataset.tip])",
    )
    told = {tuple(ends.split()): numbers([tip.split("\n")[1].split(" logits")[0]])[0] for ends, tip in lines}
    assert told == {pair: pytest.approx(value, abs=6e-4) for pair, value in sums.items()}
    inside = [a for a, b in on_path if box(a) == box(b)]
    words = """nodes => nodes.filter((node) => node.dataset.tip.includes("inside, not drawn"))
      .map((node) => node.dataset.part)"""
    assert set(seen.page.eval_on_selector_all(f"{SHOWN} .node", words)) == {box(part) for part in inside}


def test_a_box_can_be_pinned_and_lights_the_rows_of_all_its_parts(seen: Visit) -> None:
    seen.page.locator("#circuit .switch").get_by_text("top 100").click()
    together(seen, "layers")
    node = seen.page.locator(f"{SHOWN} .node[data-part='L1']")
    node.focus()
    seen.page.keyboard.press("Enter")
    rows = "rows => rows.map((row) => row.classList.contains('lit'))"
    members = set((node.get_attribute("data-members") or "").split())
    assert len(members) > 1
    expected = [bool(members & {*edge}) for edge in strongest(seen, 100)]
    assert seen.page.eval_on_selector_all("#edges tbody tr", rows) == expected
    lit = seen.page.locator(f"{SHOWN} .bundle.lit:not([hidden])")
    assert lit.count() == seen.page.locator(f"{SHOWN} .bundle[data-ends~='L1']:not([hidden])").count() > 0


def test_circuit_labels_are_at_least_11_pixels_and_never_overlap(seen: Visit) -> None:
    sized = """texts => texts.map((text) => { const scale = text.getScreenCTM().a;
      const box = text.getBoundingClientRect();
      return [parseFloat(getComputedStyle(text).fontSize) * scale, box.x, box.y, box.right, box.bottom]; })"""
    seen.page.locator("#circuit .switch").get_by_text("top 100").click()
    for how in ("parts", "heads together", "layers"):
        together(seen, how)
        for drawing in (SHOWN, "#circuit .curve"):
            texts = seen.page.eval_on_selector_all(f"{drawing} text", sized)
            assert min(size for size, *_ in texts) >= 10.99
            for (_, a, b, c, d), (_, e, f, g, h) in combinations(texts, 2):
                assert a >= g or e >= c or b >= h - 2 or f >= d - 2


def test_circuit_of_a_method_that_sums_over_positions_has_no_tokens(seen: Visit) -> None:
    tips = seen.page.eval_on_selector_all(
        "#circuit .edge, #circuit .bundle", "lines => lines.map((line) => line.dataset.tip)"
    )
    assert len(tips) > 50
    tokens = {visible(token) for token in seen.table("tokens").token}
    assert not any(f"{token} (" in tip for tip in tips for token in tokens)
    assert seen.texts("#edges thead th") == ["from", "to", "score, logits"]
