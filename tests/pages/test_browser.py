"""The page in a real browser: what a click or a hover shows are the numbers of the tables; nothing is fetched."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import pytest

from interp import HookedTransformer
from interp.attention import attention_attribution
from interp.pages.view_attribution import MOST_STEPS
from interp.pages.wording import visible
from tests.loops import over
from tests.pages.conftest import SENTENCE
from tests.pages.visits import Visit, needs_browser, numbers, visit

if TYPE_CHECKING:
    from playwright import sync_api

pytestmark = needs_browser


def shown_attention(seen: Visit) -> list[float]:
    return numbers(seen.texts("#attended small"))


def expected_attention(seen: Visit, layer: int, head: int, query: int) -> list[float]:
    return (
        seen.table("attention")
        .query(f"layer == {layer} and head == {head} and query == {query}")
        .value.tolist()
    )


def choose(seen: Visit, layer: int, head: int) -> None:
    seen.page.click(f".thumb[data-layer='{layer}'][data-head='{head}']")


def test_the_page_opens_on_the_head_that_adds_most_and_the_last_token(seen: Visit) -> None:
    heads = seen.table("attribution").query("kind == 'head'")
    best = heads.sort_values("value", ascending=False, kind="stable").iloc[0]
    assert seen.texts("#head-name") == [best.part]
    assert seen.texts("#losses .chosen bdi") == ["·to"]
    last = len(seen.table("tokens")) - 1
    assert shown_attention(seen) == pytest.approx(
        expected_attention(seen, int(best.layer), int(best["head"]), last), abs=6e-4
    )


def test_the_steps_of_a_head_are_scores_pattern_and_values_of_the_pass(
    seen: Visit, random_model: Path
) -> None:
    model = HookedTransformer.from_pretrained(str(random_model))
    _, cache = model.run_with_cache(SENTENCE)
    last = len(seen.table("tokens")) - 1
    for layer, head, query in ((2, 3, last), (0, 7, 5)):
        choose(seen, layer, head)
        seen.page.click(f"#attended .chip[data-pos='{query}']")
        q, k, v = (cache[name, layer][0] for name in "qkv")
        z = cache["z", layer][0, query, head]
        expected = [
            q[query, head] @ k[:, head].T,
            q[query, head] @ k[:, head].T * model.cfg.score_scale(layer),
            cache["attn_scores", layer][0, head, query],
            cache["pattern", layer][0, head, query],
            cache["pattern", layer][0, head, query] * (v[:, head] @ z) / z.norm(),
        ]
        assert f"L{layer}H{head} step by step" in seen.texts("#stages-name")[0]
        for column, values in enumerate(expected):
            texts = seen.texts(f"#stages-table tbody td:nth-child({column + 2})")
            rows = last + 1 if column < 2 else query + 1
            assert numbers(texts[:rows]) == pytest.approx(values[:rows].tolist(), abs=6e-3)
            assert set(texts[rows:]) <= ({"−∞"} if column == 2 else {"–"})
        sums = seen.texts("#stages-table tfoot td")
        assert numbers(sums[-2:]) == pytest.approx([1.0, float(z.norm())], abs=6e-3)


def test_a_click_on_a_thumbnail_shows_that_head_everywhere(seen: Visit) -> None:
    last = len(seen.table("tokens")) - 1
    for layer, head in ((2, 3), (0, 7)):
        choose(seen, layer, head)
        assert seen.texts("#head-name") == [f"L{layer}H{head}"]
        assert shown_attention(seen) == pytest.approx(expected_attention(seen, layer, head, last), abs=6e-4)
        moved = seen.table("attribution_sources").query(f"layer == {layer} and head == {head}").value
        assert numbers(seen.texts("#moved small")) == pytest.approx(moved.tolist(), abs=6e-4)
        assert (
            seen.page.locator(f"#attribution .cell.chosen[data-layer='{layer}'][data-head='{head}']").count()
            == 1
        )
        score = (
            seen.table("heads")
            .query(f"score == 'induction' and layer == {layer} and head == {head}")
            .value.item()
        )
        assert f"induction {score:.2f}" in seen.texts("#head-profile")[0]


def test_hovering_a_token_shows_where_it_looks_and_leaving_goes_back(seen: Visit) -> None:
    choose(seen, 1, 4)
    last = len(seen.table("tokens")) - 1
    for query in (3, 6):
        seen.page.hover(f"#attended [data-pos='{query}']")
        assert shown_attention(seen) == pytest.approx(expected_attention(seen, 1, 4, query), abs=6e-4)
        assert f"({query}) looks most at" in seen.texts("#readout")[0]
    seen.page.mouse.move(1, 1)
    assert shown_attention(seen) == pytest.approx(expected_attention(seen, 1, 4, last), abs=6e-4)


def test_the_other_direction_shows_who_looks_at_a_token(seen: Visit) -> None:
    choose(seen, 3, 1)
    seen.page.click("text=who looks at it")
    seen.page.hover("#attended [data-pos='4']")
    looking = seen.table("attention").query("layer == 3 and head == 1 and key == 4").value
    assert shown_attention(seen) == pytest.approx(looking.tolist(), abs=6e-4)


def test_large_pattern_shows_one_weight_and_a_click_keeps_the_token(seen: Visit) -> None:
    choose(seen, 2, 2)
    canvas = seen.page.locator("#pattern")
    margin, top, cell = (
        float(canvas.get_attribute(f"data-{name}") or 0) for name in ("margin", "top", "cell")
    )
    key, query = 2, 5
    place = {"x": margin + (key + 0.5) * cell, "y": top + (query + 0.5) * cell}
    canvas.hover(position=place)
    weight = expected_attention(seen, 2, 2, query)[key]
    names = [visible(token) for token in seen.table("tokens").token]
    assert seen.texts("#readout") == [f"{names[query]} ({query}) looks at {names[key]} ({key}): {weight:.4f}"]
    canvas.click(position=place)
    assert seen.page.locator("#losses .chosen").get_attribute("data-pos") == str(query)


def test_choosing_a_token_shows_what_the_model_expected_next(seen: Visit) -> None:
    seen.page.click("#losses [data-pos='2']")
    expected = seen.table("next_tokens").query("pos == 2")
    assert seen.texts("#next-pos") == ["2"]
    follows = seen.table("tokens").iloc[3]
    name = visible(follows.token)
    assert seen.texts("#next-actual") == [f"The prompt goes on with {name}, rank {follows['rank'] + 1}."]
    assert seen.texts("#next .tok") == [visible(token) for token in expected.token]
    assert numbers(seen.texts("#next td:nth-child(4)")) == pytest.approx(expected.prob.tolist(), abs=6e-4)
    assert numbers(seen.texts("#next td:nth-child(3)")) == pytest.approx(expected.logit.tolist(), abs=6e-3)


@over("kind", "QKV")
def test_the_composition_switch_shows_the_strongest_pairs_alone(seen: Visit, kind: str) -> None:
    seen.page.locator("#circuits .switch").get_by_text(f"{kind}-composition").click()
    best = seen.table("composition").query("kind == @kind").sort_values("excess", ascending=False).head(8)
    shown = seen.texts("#circuits tbody tr:visible:has(.bar)")
    pairs = [f"{x.src} {x.dst}" for x in best.itertuples()]
    assert [" ".join(row.split()[:2]) for row in shown] == pairs
    assert numbers(seen.texts("#circuits .numbers:visible td:nth-child(5)")) == pytest.approx(
        best.relative.tolist(), abs=0.051
    )


@over("score, name", [("eigenvalue", "copying"), ("matching", "matching")])
def test_the_circuit_switch_shows_that_score_alone(seen: Visit, score: str, name: str) -> None:
    seen.page.locator("#circuits .switch").get_by_text(name, exact=True).click()
    shown = seen.texts("#circuits .cell:visible")
    known = [text != "–" for text in shown]
    expected = seen.table("circuits").query("score == @score").value
    assert known == expected.notna().tolist()
    assert numbers([text for text in shown if text != "–"]) == pytest.approx(
        expected.dropna().tolist(), abs=6e-3
    )


@over("score", ["induction", "previous_token", "duplicate_token", "first_token", "local"])
def test_the_score_switch_shows_that_score_alone(seen: Visit, score: str) -> None:
    seen.page.locator("#heads .switch").get_by_text(score.replace("_", " "), exact=True).click()
    shown = numbers(seen.texts("#heads .cell:visible"))
    table = seen.table("heads").query("score == @score").reset_index(drop=True)
    assert shown == pytest.approx(table.value.tolist(), abs=6e-3)
    seen.page.locator("#heads .cell:visible").nth(9).hover()
    low, high = table.low[9], table.high[9]
    tip = seen.texts("#tip")[0]
    assert tip.startswith("L1H1\n")
    assert f"{low:.3f} – {high:.3f}" in tip
    assert f"null {table.null[0]:.3f}" in tip


def test_parts_ordered_by_depth_have_bars_that_end_at_the_total(seen: Visit) -> None:
    table = seen.table("attribution")
    rows = "#parts tbody tr"
    by_size = table.iloc[(-table.value.abs()).argsort(kind="stable")]
    assert numbers(seen.texts(f"{rows} td:nth-child(2)")) == pytest.approx(by_size.value.tolist(), abs=6e-4)
    seen.page.click("text=by depth")
    assert numbers(seen.texts(f"{rows} td:nth-child(2)")) == pytest.approx(table.value.tolist(), abs=6e-4)
    assert numbers(seen.texts("#parts tfoot td:nth-child(2)")) == pytest.approx([table.value.sum()], abs=6e-4)
    ends = """rows => { const cell = rows.at(-1).querySelector(".fall"), bar = cell.querySelector("i");
      const said = [cell.style.getPropertyValue("--goal"), bar.style.left, bar.style.width];
      const [goal, left, width] = said.map(parseFloat);
      return Math.min(Math.abs(left - goal), Math.abs(left + width - goal)); }"""
    assert seen.page.eval_on_selector_all(rows, ends) < 0.01


def test_a_lens_cell_explains_itself(seen: Visit) -> None:
    table = seen.table("logit_lens").query("depth == 'L2.resid' and pos == 3")
    cell = seen.page.locator("#lens tbody tr").nth(2).locator("td[data-pos='3']")
    assert cell.inner_text() == visible(table.word.iloc[0])
    cell.hover()
    tip, first = seen.texts("#tip")[0], table.iloc[0]
    assert tip.startswith(f"after layer 1 at {visible(first.token)} (3)\n")
    assert f"entropy {first.entropy:.2f} nats, KL(final ‖ depth) {first.kl:.2f} nats" in tip
    assert f"next in the prompt: rank {first.next_rank + 1}," in tip
    assert f": rank {first.answer_rank + 1}," in tip
    for word in table.word[:5]:
        assert visible(word) in tip


def test_heads_and_tokens_can_be_chosen_with_the_keyboard(seen: Visit) -> None:
    choose(seen, 1, 1)
    for key in ("ArrowRight", "ArrowDown", "Enter"):
        seen.page.keyboard.press(key)
    assert seen.texts("#head-name") == ["L2H2"]
    assert "L2H2" in seen.texts("#tip")[0]
    seen.page.keyboard.press("Escape")
    assert seen.page.locator("#tip").is_hidden()
    stops = "[...document.querySelectorAll('.thumb')].filter((thumb) => thumb.tabIndex === 0).length"
    assert seen.page.evaluate(stops) == 1
    seen.page.focus("#losses [data-pos='0']")
    for key in ("End", "ArrowLeft", "Enter"):
        seen.page.keyboard.press(key)
    assert seen.texts("#next-pos") == [str(len(seen.table("tokens")) - 2)]


def test_light_and_dark_have_colours_of_their_own_and_pictures_follow(
    browser: "sync_api.Browser", asked: Path
) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    picture = "document.querySelector('.thumb canvas').toDataURL()"
    seen = visit(browser, asked, color_scheme="light")
    light = [seen.page.evaluate(look) for look in (paper, picture)]
    seen.page.emulate_media(color_scheme="dark")
    for look, before in zip((paper, picture), light, strict=True):
        seen.page.wait_for_function(f"{look} !== '{before}'", timeout=5000)
    assert seen.complaints == []
    seen.page.close()


def test_a_print_shows_every_part_and_no_controls(browser: "sync_api.Browser", asked: Path) -> None:
    seen = visit(browser, asked)
    seen.page.emulate_media(media="print")
    assert seen.page.locator("nav").is_hidden()
    assert seen.page.locator("#heads .switch").is_hidden()
    box = "element => element.scrollHeight - element.clientHeight"
    assert seen.page.eval_on_selector(".tall", box) <= 1
    seen.page.close()


def test_without_javascript_every_table_is_still_there(browser: "sync_api.Browser", asked: Path) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto((asked / "index.html").as_uri())
    assert page.locator("#heads .map:visible").count() == 6
    assert page.locator("#circuits .map:visible").count() == 2
    assert page.locator("#circuits .numbers:visible").count() == 3
    assert page.locator("#parts tbody tr:visible").count() == 3 + 4 * 8 + 4 + 4 + 1  # ... and rounding
    n = len(pd.read_parquet(asked / "tokens.parquet"))
    assert page.locator("#lens td[title]:visible").count() == 5 * n
    assert page.locator("#backward td[title]:visible").count() == 2 * 4 * n
    assert page.locator(".step:visible").count() == (2 + 2 * 4 + 1 + 1 + 1) + (MOST_STEPS + 1 + 1)
    assert page.locator("#patching .cell:visible").count() == 2 * 4 * (3 * n + 8)
    on_a_path = pd.read_parquet(asked / "faithfulness.parquet").set_index("edges").connected
    assert page.locator("#circuit .edge:not([hidden])").count() >= on_a_path[100]
    assert page.locator("#edges tbody tr:visible").count() == 100
    assert page.locator("#unscripted").is_visible()
    context.close()


def test_waterfall_step_explains_itself_and_its_head_can_be_chosen(seen: Visit) -> None:
    table = seen.table("attribution")
    assert seen.page.locator("[data-grain]:visible").count() == 1
    seen.page.locator("#attribution .switch").get_by_text("by part").click()
    steps = seen.page.locator("[data-grain=part] .step")
    assert steps.count() == MOST_STEPS + 2  # all others, and the sum
    order = table.value.abs().sort_values(ascending=False).index[:MOST_STEPS].sort_values()
    shown = table.loc[order]
    at = shown.index.get_loc(shown.index[shown.kind == "head"][0])
    named = shown.iloc[at]
    steps.nth(at).click()
    assert seen.texts("#head-name") == [named.part]
    seen.page.keyboard.press("ArrowRight")
    before, after = (f"{sum:+.3f}".replace("-", "−") for sum in shown.value.cumsum().iloc[at : at + 2])
    assert seen.texts("#tip")[0].startswith(shown.iloc[at + 1].part)
    assert f"sum so far {before} → {after}" in seen.texts("#tip")[0]
    seen.page.keyboard.press("End")
    total = f"{table.value.sum():+.3f}".replace("-", "−")
    assert seen.texts("#tip")[0] == f"total\n{total} logits, the sum of {MOST_STEPS + 1} steps"


def test_bars_of_the_waterfall_touch_end_to_start(seen: Visit) -> None:
    """Measured in pixels: the drawing itself adds up to the total."""
    edges = """steps => steps.map((step) => { const box = step.querySelector("i").getBoundingClientRect();
      return step.classList.contains("neg") ? [box.top, box.bottom] : [box.bottom, box.top]; })"""
    places = seen.page.eval_on_selector_all("[data-grain=sublayer] .step", edges)
    *steps, total = places
    for (_, end), (start, _) in pairwise(steps):
        assert abs(end - start) <= 2.1  # a bar is at least two pixels high
    assert abs(steps[-1][1] - total[1]) <= 2.1


@over("matrix", ["W_out", "W_in"])
def test_the_matrix_switch_shows_that_backward_lens_and_a_cell_its_numbers(seen: Visit, matrix: str) -> None:
    seen.page.locator("#backward .switch").get_by_text(matrix).click()
    table = seen.table("backward_lens").query(f"matrix == '{matrix}'")
    cells = seen.page.locator("#backward td:visible")
    end, extreme = ("bottom_word", 1023) if matrix == "W_out" else ("top_word", 0)
    groups = [(rows[end].tolist(), rows.answer_rank.iloc[0]) for _, rows in table.groupby(["layer", "pos"])]
    words = [[word for word in some if re.fullmatch(r" [A-Za-z]{2,}", str(word))] for some, _ in groups]
    names = pd.Series(
        [
            some[0] if rank == extreme or not whole else whole[0]
            for (some, rank), whole in zip(groups, words, strict=True)
        ]
    )
    assert cells.count() == len(names)
    n = len(seen.table("tokens"))
    place = 2 * n + n - 1
    seen.page.locator("#backward .lens:visible td").first.focus()
    for key in (*["ArrowDown"] * 2, *["ArrowRight"] * (n - 1)):
        seen.page.keyboard.press(key)
    rows = table.query(f"layer == 2 and pos == {n - 1}")
    first, tip = rows.iloc[0], seen.texts("#tip")[0]
    assert f"‖δ‖ {first.delta:.3g}" in tip and f"‖x‖ {first.x:.3g}" in tip
    assert f": rank {first.answer_rank + 1}" in tip
    assert cells.nth(place).inner_text() == visible(names.iloc[place])
    assert "no update" in cells.nth(3 * n).inner_text().replace("\n", " ")


def shown_reasons(seen: Visit) -> tuple[float, dict[str, dict[str, float]]]:
    """The score of the chosen cell, and its parts by side."""
    (score,) = seen.texts("#why-score")
    sides = {}
    for side in ("query", "key", "pair"):
        names = seen.texts(f"#why-{side} bdi")
        sides[side] = dict(zip(names, numbers(seen.texts(f"#why-{side} small")), strict=True))
    return numbers([score.split()[1].rstrip(",")])[0], sides


def test_parts_of_a_score_and_its_steps_have_one_colour_scale(seen: Visit) -> None:
    """Full colour is one number for queries, keys and pairs, and one for the score before and after the mask."""
    shades = """cells => cells.map((cell) => [parseFloat((cell.querySelector("small") ?? cell).textContent
      .replace("\u2212", "-")), parseFloat(cell.style.getPropertyValue("--v"))])"""
    choose(seen, 1, 5)
    for selector in (
        "#why-query .chip, #why-key .chip, #why-pair .chip",
        "#stages-table tbody td:nth-child(3), #stages-table tbody tr:not(.masked) td:nth-child(4)",
    ):
        cells = [(abs(x), v) for x, v in seen.page.eval_on_selector_all(selector, shades) if 0.02 < v < 1]
        assert len(cells) > 10
        full = max((x / v for x, v in cells if v > 0.3), default=0.0)
        for x, v in cells:
            assert v * full == pytest.approx(x, abs=0.006 + 0.02 * full)


def test_a_click_on_a_cell_says_why_the_head_looks_there(seen: Visit) -> None:
    """Its parts are those of `attention_attribution`, and with all others they sum to the score."""
    run = json.loads((seen.folder / "run.json").read_text(encoding="utf-8"))
    model, prompt = HookedTransformer.from_pretrained(run["model"]), run["parameters"]["prompt"]
    choose(seen, 1, 5)
    for query, key in ((11, 6), (9, 4)):
        seen.page.locator("#pattern").scroll_into_view_if_needed()
        at = seen.page.eval_on_selector("#pattern", "canvas => ({ ...canvas.dataset })")
        margin, top, cell = (float(at[name]) for name in ("margin", "top", "cell"))
        seen.page.click(
            "#pattern", position={"x": margin + (key + 0.5) * cell, "y": top + (query + 0.5) * cell}
        )
        found = attention_attribution(model, prompt, "L1H5", query=query, key=key, by="head").isel(prompt=0)
        score, sides = shown_reasons(seen)
        assert score == pytest.approx(float(found.total), abs=6e-3)
        assert f"({query}) to" in seen.texts("#why-name")[0]
        for side, other in (("query", "key_part"), ("key", "query_part")):
            values = found.value.sum(other)
            rest = sides[side].pop("all others")
            for name, value in sides[side].items():
                assert value == pytest.approx(float(values.sel({f"{side}_part": name})), abs=6e-3)
            assert rest + sum(sides[side].values()) == pytest.approx(float(found.total), abs=0.03)
    seen.page.select_option("#why-other", "2")
    found = attention_attribution(model, prompt, "L1H5", query=9, key=2, by="head")
    assert shown_reasons(seen)[0] == pytest.approx(float(found.total[0]), abs=6e-3)
    seen.page.focus("#pattern")
    for key in ("ArrowRight", "ArrowUp", "ArrowDown", "ArrowLeft"):
        seen.page.keyboard.press(key)
        assert "(9) to" in seen.texts("#why-name")[0] or (
            key == "ArrowUp" and "(8) to" in seen.texts("#why-name")[0]
        )
    assert shown_reasons(seen)[0] == pytest.approx(float(found.total[0]), abs=6e-3)
    seen.page.select_option("#why-other", "12")
    assert seen.texts("#why-score") == ["It does not see that token: there is no score."]
    assert seen.complaints == []


def test_maps_that_do_not_fit_begin_at_the_last_token_and_keep_row_names(seen: Visit) -> None:
    for table in ("#patching [data-patching=denoise] .map[data-cells]", "#lens .lens[data-cells]"):
        row = seen.page.locator(f"{table} tbody tr").first
        row.scroll_into_view_if_needed()
        name, last = row.locator("> :first-child"), row.locator("> :last-child")
        width = seen.page.viewport_size["width"]
        for cell in (name, last):
            box = cell.bounding_box()
            assert box is not None and box["x"] >= -3 and box["x"] + box["width"] <= width
