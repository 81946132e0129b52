"""The lattice and the large head in a real browser: the numbers of the tables, and each view follows the others."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import pytest

from interp import HookedTransformer
from interp.core.visible import visible
from interp.model.parts import Part
from interp.pages import About, ReportQuestion, report_of, write_report
from interp.pages.view_lattice import OPENS, STEPS, STRONGEST
from interp.tokens import flow_routes, routes
from tests.pages.conftest import SENTENCE
from tests.pages.reports import PROMPT
from tests.pages.test_sections import model_of
from tests.pages.visits import Visit, needs_browser, numbers, visit

if TYPE_CHECKING:
    import xarray as xr
    from playwright import sync_api

pytestmark = needs_browser

LAYERS = 4


@pytest.fixture(scope="module")
def shares(random_model: Path) -> "xr.Dataset":
    return flow_routes(HookedTransformer.from_pretrained(str(random_model)), SENTENCE)


@pytest.fixture(scope="module")
def opened(browser: "sync_api.Browser", asked: Path) -> Iterator[Visit]:
    """One wide visit for tests that put back what they change; nothing is fetched, nothing complains."""
    fresh = visit(browser, asked)
    yield fresh
    assert len(fresh.requests) == 1 and fresh.complaints == []
    fresh.page.close()


def knot(seen: Visit, pos: int, depth: int) -> "sync_api.Locator":
    return seen.page.locator(f".knot[data-pos='{pos}'][data-depth='{depth}']")


def last(seen: Visit) -> int:
    return len(seen.table("tokens")) - 1


def slide(seen: Visit, least: float) -> None:
    seen.page.locator("#threshold").fill(str(STEPS.index(least)))


def test_every_node_says_what_the_lens_reads_there(opened: Visit) -> None:
    table = opened.table("logit_lens").query("rank == 0")
    n = last(opened) + 1
    shown = opened.page.eval_on_selector_all(
        ".knot", "knots => knots.map((k) => [+k.dataset.depth, +k.dataset.pos, k.textContent])"
    )
    expected = [
        [depth, pos, visible(table.word.iloc[depth * n + pos])]
        for depth in reversed(range(LAYERS + 1))
        for pos in range(n)
    ]
    assert shown == expected
    levels = opened.page.eval_on_selector_all(
        ".knot", "knots => knots.map((k) => +k.style.getPropertyValue('--v'))"
    )
    order = np.arange((LAYERS + 1) * n).reshape(-1, n)[::-1].ravel()
    assert levels == pytest.approx(table.top_prob.to_numpy()[order].tolist(), abs=6e-4)
    opened.page.locator(".rulers").get_by_text("the answer", exact=True).click()
    levels = opened.page.eval_on_selector_all(
        ".knot", "knots => knots.map((k) => +k.style.getPropertyValue('--v'))"
    )
    assert levels == pytest.approx(table.answer_prob.to_numpy()[order].tolist(), abs=6e-4)
    opened.page.click("text=colour: its own token")


def drawn(seen: Visit) -> set[tuple[int, int, int, int]]:
    """Layer, head, query and key of every strong line of a head."""
    found = seen.page.eval_on_selector_all(
        ".wire",
        "wires => wires.flatMap((w) => (w.moves ?? []).map((m) => [m.layer, m.head, m.query, m.key]))",
    )
    return {tuple(each) for each in found}  # type: ignore[misc]


def moves(found: pd.DataFrame) -> set[tuple[int, int, int, int]]:
    """Layer, head, query and key of every move of a head among some routes."""
    heads = found[found.part.str.contains("H")]
    return {(row.layer, Part.of(row.part).index, row.query, row.key) for row in heads.itertuples()}  # type: ignore[misc]


def carried(shares: "xr.Dataset", least: float) -> float:
    """What of the answer's stream comes from the embeddings over shares of at least `least`, step by step forwards."""
    one = shares.isel(prompt=0)
    kept = {name: np.where(one[name] >= least, one[name], 0.0) for name in ("resid", "resid_mid", "mlp")}
    moved = np.where(one.value >= least, one.value, 0.0)
    stream = np.ones(one.sizes["pos"])
    for layer in range(one.sizes["layer"]):
        middle = kept["resid"][layer] * stream + np.einsum("hqk,k->q", moved[layer], stream)
        stream = (kept["resid_mid"][layer] + kept["mlp"][layer]) * middle
    return float(stream[-1])


@pytest.mark.parametrize("least", [0.01, OPENS, 0.05, 0.5])
def test_strong_lines_are_the_routes_to_the_answer_above_the_threshold(
    opened: Visit, shares: "xr.Dataset", least: float
) -> None:
    slide(opened, least)
    expected = routes(shares, threshold=least)
    assert drawn(opened) == moves(expected)
    for kind in ("mlp", "resid", "resid_mid"):
        assert opened.page.locator(f".wire.{kind}").count() == expected.part.str.endswith(f".{kind}").sum()
    assert opened.texts("#least") == [f"{100 * least:.1f} %"]
    assert abs(int(opened.texts("#carried-share")[0][:-2]) - 100 * carried(shares, least)) < 0.51
    slide(opened, OPENS)


def test_routes_to_the_chosen_node_start_there(opened: Visit, shares: "xr.Dataset") -> None:
    knot(opened, 6, 2).click()
    opened.page.click("text=to the chosen node")
    slide(opened, 0.01)
    below = shares.isel(layer=slice(0, 2))
    expected = routes(below, threshold=0.01, pos=6)
    assert drawn(opened) == moves(expected)
    assert opened.page.locator(".knot:not(.off)[data-depth='3']").count() == 0
    opened.page.click("text=routes to the answer")
    slide(opened, OPENS)


def test_a_node_shows_its_parts_and_they_sum_to_one(opened: Visit) -> None:
    pos = last(opened)
    knot(opened, pos, 3).click()
    rows = opened.page.eval_on_selector_all(
        "#made tbody tr:not(:has(.group), .inner)",
        "rows => rows.map((row) => [...row.children].map((c) => c.textContent))",
    )
    flows = opened.table("flow_routes").query(f"layer == 2 and query == {pos}")
    said = numbers([share.removesuffix(" %") for _, _, share, _ in rows])
    assert sum(said[:2]) == pytest.approx(100, abs=0.11)
    assert sum(said[2:]) == pytest.approx(100, abs=0.6)
    inner = opened.texts("#made tbody .inner")
    neurons = opened.table("flow_neurons").query(f"layer == 2 and query == {pos}")
    assert [line.split("\t")[0] for line in inner] == neurons.part.tolist()
    shares = numbers([line.split("\t")[2].removesuffix(" %") for line in inner])
    assert shares == pytest.approx((100 * neurons.value).tolist(), abs=0.06)
    own = flows.set_index("kind").value
    assert said[:3] == pytest.approx((100 * own[["mlp", "resid_mid", "resid"]]).tolist(), abs=0.06)
    heads = flows.query("kind == 'head'").sort_values("value", ascending=False).head(8)
    named = [row for row in rows if row[0].startswith("L2H")]
    assert [row[0] for row in named] == heads.part.tolist()
    assert numbers([row[3].replace("+", "") for row in named]) == pytest.approx(
        heads.attribution.tolist(), abs=6e-4
    )
    assert numbers([rows[0][3]]) == pytest.approx(flows[flows.kind == "mlp"].attribution.tolist(), abs=6e-4)


def test_a_node_chooses_its_token_and_layer_in_every_view(seen: Visit) -> None:
    knot(seen, 4, 2).click()
    assert seen.texts("#next-pos") == ["4"]
    assert seen.texts("#head-name")[0].startswith("L1H")
    assert seen.page.locator("#losses .chosen").get_attribute("data-pos") == "4"
    assert seen.texts(".read.chosen") == seen.texts("#losses .chosen bdi")
    assert "(4) after layer 1" in seen.texts("#made-of")[0]


def test_lattice_follows_the_chosen_token_and_a_head_lights_its_lines(opened: Visit) -> None:
    slide(opened, 0.01)
    opened.page.click("#losses [data-pos='3']")
    assert opened.page.locator(".knot.chosen").get_attribute("data-pos") == "3"
    layer, head = max(drawn(opened))[:2]
    opened.page.click(f".thumb[data-layer='{layer}'][data-head='{head}']")
    lit = opened.page.eval_on_selector_all(
        ".wire.lit", "wires => wires.flatMap((w) => w.moves.map((m) => [m.layer, m.head]))"
    )
    assert [layer, head] in lit
    assert all(
        [layer, head] in pairs
        for pairs in opened.page.eval_on_selector_all(
            ".wire.lit", "wires => wires.map((w) => w.moves.map((m) => [m.layer, m.head]))"
        )
    )
    slide(opened, OPENS)


def test_a_line_explains_itself_and_chooses_its_head(opened: Visit) -> None:
    opened.page.mouse.move(1, 1)
    slide(opened, 0.01)
    index, move = opened.page.evaluate(
        """() => { const wires = [...document.querySelectorAll('.wire')];
        const i = wires.findIndex((w) => w.moves?.length === 1);
        return [i, wires[i].moves[0]]; }"""
    )
    wire = opened.page.locator(".wire").nth(index)
    wire.dispatch_event("pointerenter", {"clientX": 300, "clientY": 300})
    tip = opened.texts("#tip")[0]
    flows = opened.table("flow_routes").query("kind == 'head'").set_index(["layer", "head", "query", "key"])
    row = flows.loc[(move["layer"], move["head"], move["query"], move["key"])]
    assert f"{row.part}: {100 * row.value:.1f} %" in tip
    if move["query"] == last(opened):
        assert f"{row.attribution:+.3f}".replace("-", "−") in tip
    else:
        assert "through later parts alone" in tip
    wire.dispatch_event("click")
    assert opened.texts("#head-name") == [row.part]
    assert opened.texts("#next-pos") == [str(move["query"])]
    slide(opened, OPENS)


def test_nodes_can_be_walked_and_chosen_with_the_keyboard(seen: Visit) -> None:
    assert (
        seen.page.eval_on_selector_all(".knot", "knots => knots.filter((k) => k.tabIndex === 0).length") == 1
    )
    knot(seen, 5, 3).focus()
    for key in ("ArrowDown", "ArrowLeft", "Enter"):
        seen.page.keyboard.press(key)
    assert "(4) after layer 1" in seen.texts("#made-of")[0]
    assert "after layer 1 at" in seen.texts("#tip")[0]
    seen.page.locator("#threshold").focus()
    before = seen.texts("#least")
    seen.page.keyboard.press("ArrowRight")
    assert seen.texts("#least") != before


def test_without_javascript_the_strongest_edges_stand_there(browser: "sync_api.Browser", asked: Path) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto((asked / "index.html").as_uri())
    flows = pd.read_parquet(asked / "flow_routes.parquet")
    best = flows[flows.kind.isin(("head", "mlp"))].nlargest(STRONGEST, "value")
    shown = page.locator("#flows tbody tr:visible td:nth-child(4)").all_inner_texts()
    assert numbers([text.removesuffix(" %") for text in shown]) == pytest.approx(
        (100 * best.value).tolist(), abs=0.051
    )
    assert page.locator(".latticed").is_hidden()
    context.close()


@pytest.mark.parametrize(
    "changes",
    [{"parallel": True}, {"mlp": None}, {"norm_place": "post", "final_norm": False}, {"unembed": False}],
)
def test_every_kind_of_block_is_drawn_by_its_routes_or_left_out_in_silence(
    browser: "sync_api.Browser", tmp_path: Path, changes: dict[str, object]
) -> None:
    model = model_of(changes)
    write_report(report_of(model, ReportQuestion(PROMPT), About("kind")), tmp_path)
    seen = visit(browser, tmp_path)
    if changes.keys() & {"parallel", "mlp"}:
        slide(seen, 0.03)
        expected = routes(flow_routes(model, PROMPT), threshold=0.03)
        assert drawn(seen) == moves(expected)
        assert seen.page.locator(".wire.mlp").count() == expected.part.str.endswith(".mlp").sum()
        shown = numbers(
            [text.removesuffix(" %") for text in seen.texts("#made tr:not(.inner) td:nth-child(3)")]
        )
        assert sum(shown) == pytest.approx(100, abs=1)
    else:
        assert seen.page.locator(".knot").count() == 0
    seen.page.click(".thumb[data-layer='1'][data-head='2']")
    assert seen.texts("#head-name") == ["L1H2"]
    assert seen.complaints == []
    seen.page.close()


def test_the_value_weighted_switch_multiplies_by_the_length_of_the_value(opened: Visit) -> None:
    opened.page.click(".thumb[data-layer='2'][data-head='1']")
    opened.page.click("text=value-weighted")
    at = last(opened)
    opened.page.click(f"#losses [data-pos='{at}']")
    weights = opened.table("attention").query(f"layer == 2 and head == 1 and query == {at}").value.to_numpy()
    norms = opened.table("value_norms").query("layer == 2 and head == 1").value.to_numpy()
    expected = weights * norms
    assert numbers(opened.texts("#attended small")) == pytest.approx(expected.tolist(), abs=1e-3, rel=1e-3)
    best = int(expected.argmax())
    assert (
        f"takes most from {visible(opened.table('tokens').token[best])} ({best})"
        in opened.texts("#readout")[0]
    )
    assert "‖value·W_O‖" in opened.texts("#ramp em")[0]
    opened.page.locator("#attention .switch").get_by_text("attention", exact=True).click()
    assert numbers(opened.texts("#attended small")) == pytest.approx(weights.tolist(), abs=6e-4)


def test_what_a_head_reads_and_writes_follows_head_and_token(opened: Visit) -> None:
    table, tokens = opened.table("head_tokens"), opened.table("tokens")
    for layer, head, pos in ((3, 2, 5), (0, 6, 1)):
        opened.page.click(f".thumb[data-layer='{layer}'][data-head='{head}']")
        opened.page.click(f"#losses [data-pos='{pos}']")
        mine = table.query(f"layer == {layer} and head == {head} and token_id == {tokens.token_id[pos]}")
        for name, rows in mine.sort_values("rank").groupby("list"):
            body = f"[data-list={name}] tbody"
            assert opened.texts(f"{body} td.tok") == [visible(word) for word in rows.word]
            scores = [text.replace("+", "") for text in opened.texts(f"{body} td:last-child")]
            assert numbers(scores) == pytest.approx(rows.value.tolist(), abs=2e-3)
        assert opened.texts("#reading-head") == [f"L{layer}H{head}"]
