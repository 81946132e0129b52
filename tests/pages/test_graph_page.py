"""The page of an attribution graph: what matters is drawn and listed, names are escaped, pins and groups are saved."""

import base64
import json
import re
import zlib
from dataclasses import replace
from html import unescape
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
import xarray as xr

import interp
from interp.circuits import AttributionGraph, read_attribution_graph
from interp.cli import main
from interp.pages import graph_page
from tests.circuits.test_graph_files import circuit, foreign, saved, written
from tests.pages.looks import SCHEMES, WIDTHS, faults
from tests.pages.visits import NARROW, WIDE, Visit, needs_browser, numbers, visit

if TYPE_CHECKING:
    from playwright import sync_api

EVIL = '<script>alert("x")</script>\u202e'
PROMPT = "When Mary and John went to the shop, John gave a drink to"


@pytest.fixture
def others(tmp_path: Path) -> AttributionGraph:
    return read_attribution_graph(saved(foreign(), tmp_path))


@pytest.fixture(scope="module")
def result() -> xr.Dataset:
    model = interp.HookedTransformer.from_pretrained("demo-4l")
    return interp.circuits.attribution_graph(model, PROMPT, " Mary", " John", most=60)


def payload(text: str) -> dict[str, Any]:
    """What the script of a page draws from."""
    packed = re.search(r'id="data">([^<]+)<', text)
    assert packed is not None
    found: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(packed[1])))
    return found


def test_nodes_have_their_layers_upwards_and_links_their_ends(others: AttributionGraph) -> None:
    held = payload(graph_page(others))
    assert held["levels"] == ["tokens", "L0", "L3", "logits"]
    labels = [(label, brief, shape, level) for label, brief, shape, level in held["nodes"]]
    assert labels == [
        ("the digit 1 (L0F6200)", "the digit 1", "round", 1),
        ("L3F373", "L3F373", "round", 2),
        ("error of layer 3", "error", "dashed", 2),
        ("1", "1", "square", 0),
        ('Output "4" (p=0.229)', '"4"', "square", 3),
    ]
    assert (held["source"], held["target"], held["weight"]) == ([3, 0, 2], [0, 1, 4], [24.5, -27.5, 3.0])
    assert held["names"] == ["<bos>", "1"]


def test_no_link_leads_down_and_heads_stand_below_the_neurons_of_their_layer() -> None:
    model = interp.HookedTransformer.from_pretrained("demo-4l")
    found = interp.circuits.attribution_graph(model, PROMPT, nodes=["resid", "head", "neuron"], most=80)
    held = payload(graph_page(found))
    level = {i: node[3] for i, node in enumerate(held["nodes"])}
    down = {(s, t) for s, t in zip(held["source"], held["target"], strict=True) if level[s] > level[t]}
    assert not down and {"L1 in", "L1 attn", "L1"} <= set(held["levels"])


def test_influence_that_the_file_does_not_say_is_that_of_its_links(others: AttributionGraph) -> None:
    """Only the error leads to the logit."""
    words, ranked, carried = payload(graph_page(others))["rankings"]["influence"]
    assert (words, ranked[0], carried[0]) == ("influence", 2, 1.0)


def test_what_leads_to_a_logit_without_probability_has_no_influence(others: AttributionGraph) -> None:
    """A probability that is said to be 0 counted as one that is not said, which is 1."""
    rare = replace(others.nodes[-1], name="27_9_1", label='Output "9" (p=0.000)')
    more = others.links.iloc[[0]].assign(source=others.nodes[3].name, target=rare.name, weight=5.0)
    graph = replace(others, nodes=(*others.nodes, rare), links=pd.concat((others.links, more)))
    _, ranked, carried = payload(graph_page(graph))["rankings"]["influence"]
    assert (ranked[0], carried[0]) == (2, 1.0)


def test_nodes_are_ranked_by_the_influence_and_the_effects_of_the_result(result: xr.Dataset) -> None:
    rankings = payload(graph_page(result))["rankings"]
    inner = result.kind.values != "logit"
    for by, sizes in (("influence", result.influence.values), ("effect", np.abs(result.effect.values))):
        _, ranked, carried = rankings[by]
        given = sizes[inner]
        np.testing.assert_allclose(sizes[ranked], np.sort(given)[::-1], rtol=1e-12)
        np.testing.assert_allclose(carried, np.sort(given)[::-1].cumsum() / given.sum(), rtol=1e-12)


def test_the_table_lists_the_nodes_of_most_influence_and_what_they_carry(result: xr.Dataset) -> None:
    text = unescape(graph_page(result, most=7))
    inner = np.sort(result.influence.values[result.kind.values != "logit"])[::-1]
    share = f"{100 * inner[:7].sum() / inner.sum():.1f}"
    assert f"The 7 of {len(inner)} nodes with most influence; they carry {share} % of it." in text
    nodes = text[text.index('<section id="nodes">') :]
    assert nodes.count('<tr><th scope="row">') == 7
    with pytest.raises(ValueError, match="most must be"):
        graph_page(result, most=0)
    with pytest.raises(ValueError, match="must be a result of attribution_graph"):
        graph_page(xr.Dataset())


def test_it_begins_with_the_notes_of_its_result_and_shows_the_same_of_a_turned_one(
    result: xr.Dataset,
) -> None:
    page = graph_page(result.assign_attrs(notes=["a planted <sentence>"]))
    before, _, after = page.partition("a planted &lt;sentence&gt;")
    assert after and "<section" not in before
    turned = result.isel(node=slice(None, None, -1), edge=slice(None, None, -1))
    pages = [graph_page(each) for each in (result, turned)]
    assert payload(pages[0])["nodes"] == payload(pages[1])["nodes"]
    tables = [page[page.index('<section id="nodes">') : page.index('id="data"')] for page in pages]
    assert tables[0] == tables[1]


def test_transcoder_features_are_shown_by_name_with_what_the_file_knows(others: AttributionGraph) -> None:
    text = unescape(graph_page(others))
    assert "cross layer transcoder, layer 0, at 1 (1)\nactivation 21.875" in text
    assert "this toolkit has not measured them" in text
    assert re.search(r"<dt>numbers</dt><dd>the digit 1 \(L0F6200\), L3F373</dd>", text)
    weights = re.findall(r"<td>([+−][\d.]+)</td><td class=\"bar", text)
    assert weights == ["−27.5000", "+24.5000", "+3.0000"]


def test_links_say_their_tokens_where_the_method_has_positions(
    others: AttributionGraph, tmp_path: Path
) -> None:
    text = unescape(graph_page(others))
    assert text.count('<td class="tok">1 (1) → 1 (1)</td>') == 3
    written(circuit(), tmp_path)
    ours = unescape(graph_page(read_attribution_graph(tmp_path / "graph.json")))
    assert "<table" in ours and ">tokens</th>" not in ours
    assert not re.search(r"\(\d+\) → ", ours)


def test_names_that_are_markup_are_shown_and_never_obeyed(tmp_path: Path) -> None:
    held = foreign()
    held["metadata"] |= {"slug": EVIL, "scan": EVIL, "prompt": EVIL, "prompt_tokens": [EVIL, EVIL]}
    held["nodes"][0] |= {"clerp": EVIL, "feature_type": EVIL, "layer": EVIL}
    held["nodes"][1]["node_id"] = held["links"][1]["target"] = held["links"][1]["target"] + EVIL
    held["qParams"]["supernodes"] = [[EVIL, EVIL], []]
    text = graph_page(read_attribution_graph(saved(held, tmp_path)))
    assert "<script>alert" not in text and "\u202e" not in text
    assert "⟨U+202E⟩" in text
    assert "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'" in text
    shown = payload(text)
    assert all("\u202e" not in word for node in shown["nodes"] for word in node[:2])
    assert "\u202e" not in "".join(shown["names"] + shown["levels"])


def test_a_graph_of_ours_says_what_its_weights_and_places_mean(tmp_path: Path) -> None:
    written(circuit(), tmp_path)
    text = unescape(graph_page(read_attribution_graph(tmp_path / "graph.json")))
    assert "positive weights speak for the answer" in text and "because the format requires a place" in text
    assert "attention head, layer 1" in text and ">head 1.1</td>" in text


def test_the_command_draws_a_file_and_refuses_what_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given, out = saved(foreign(), tmp_path), tmp_path / "page.html"
    assert main(["graph", str(given), "--out", str(out), "--nodes", "2"]) == 0
    text = out.read_text()
    assert text.startswith("<!doctype html>") and payload(text)["opens"] == 2
    given.write_text(json.dumps({"nodes": []}))
    assert main(["graph", str(given), "--out", str(out)]) == 2
    assert "lacks metadata" in capsys.readouterr().err


def test_a_graph_without_links_says_so(tmp_path: Path) -> None:
    held = foreign() | {"links": []}
    text = graph_page(read_attribution_graph(saved(held, tmp_path)))
    assert "This graph has no links." in text and 'id="data"' not in text


# --- in a browser


def opened(
    browser: "sync_api.Browser",
    graph: AttributionGraph | xr.Dataset,
    folder: Path,
    width: int = WIDE,
    **options: object,
) -> Visit:
    folder.mkdir(exist_ok=True)
    (folder / "index.html").write_text(graph_page(graph), encoding="utf-8")
    return visit(browser, folder, width, accept_downloads=True, **options)


def closed(seen: Visit) -> None:
    """Nothing was fetched, nothing logged, and the page is no wider than its window."""
    assert all(url.startswith(("file://", "blob:")) for url in seen.requests), seen.requests
    assert seen.complaints == []
    wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert seen.page.evaluate(wide) <= 0
    seen.page.close()


def boxes(seen: Visit) -> dict[str, tuple[float, float]]:
    """The middle of every box of the drawing, by its label."""
    found = seen.page.locator("#net .spot").evaluate_all(
        "all => all.map((one) => { const box = one.getBoundingClientRect();"
        " return [one.getAttribute('aria-label'), box.left + box.width / 2, box.top + box.height / 2]; })"
    )
    return {label: (x, y) for label, x, y in found}


@needs_browser
@pytest.mark.parametrize("width", [NARROW, WIDE])
def test_what_matters_stands_by_token_and_layer(
    width: int, result: xr.Dataset, tmp_path: Path, browser: "sync_api.Browser"
) -> None:
    seen = opened(browser, result, tmp_path / "page", width)
    at = boxes(seen)
    assert len(at) == 61  # and the logit
    tokens = [str(token) for token in interp.circuits.AttributionGraph.of_result(result).tokens]
    by_layer: dict[int, list[float]] = {}
    by_pos: dict[int, list[float]] = {}
    for label, (x, y) in at.items():
        if match := re.fullmatch(r"L(\d+)N\d+ @ .+ \((\d+)\)", label):
            by_layer.setdefault(int(match[1]), []).append(y)
            by_pos.setdefault(int(match[2]), []).append(x)
        elif match := re.fullmatch(r"Emb: '(.+)' \((\d+)\)", label):
            assert tokens[int(match[2])] == match[1]
            by_layer.setdefault(-1, []).append(y)
            by_pos.setdefault(int(match[2]), []).append(x)
    layers = sorted(by_layer)
    assert layers == [-1, 0, 1, 2, 3]
    assert all(min(by_layer[low]) > max(by_layer[high]) for low, high in pairwise(layers))
    columns = sorted(by_pos)
    assert all(max(by_pos[a]) < min(by_pos[b]) for a, b in pairwise(columns))
    inner = np.sort(result.influence.values[result.kind.values != "logit"])[::-1]
    (carried,) = seen.texts("#carried")
    assert carried.startswith(
        f"These 60 of {len(inner)} nodes carry {100 * inner[:60].sum() / inner.sum():.1f} % of the influence. "
    )
    closed(seen)


@needs_browser
def test_the_slider_and_the_switch_choose_which_nodes_are_drawn(
    result: xr.Dataset, tmp_path: Path, browser: "sync_api.Browser"
) -> None:
    seen = opened(browser, result, tmp_path / "page")
    seen.page.locator("#node-slider").fill("12")
    assert len(boxes(seen)) == 13 and seen.texts("#node-count") == ["12"]
    seen.page.locator("input[value=effect]").check(force=True)
    order = np.argsort(-np.abs(result.effect.values) * (result.kind.values != "logit"), kind="stable")[:12]
    drawn = AttributionGraph.of_result(result)
    labels = [drawn.nodes[i].label for i in order]
    assert sorted(
        re.sub(r"( @ .+)? \(\d+\)$", "", label) for label in boxes(seen) if "Output" not in label
    ) == sorted(labels)
    size = np.abs(result.effect.values)
    share = size[order].sum() / size[result.kind.values != "logit"].sum()
    assert f"carry {100 * share:.1f} % of the sizes of all effects" in seen.texts("#carried")[0]
    closed(seen)


@needs_browser
def test_a_node_under_the_pointer_or_in_focus_shows_its_strongest_links(
    result: xr.Dataset, tmp_path: Path, browser: "sync_api.Browser"
) -> None:
    seen = opened(browser, result, tmp_path / "page")
    names = result.node.values
    for label in [label for label in boxes(seen) if label.startswith("L2N")][:2]:
        box = seen.page.get_by_role("button", name=label, exact=True).first
        box.hover()
        assert seen.texts("#chosen-name") == [label]
        part, pos = re.sub(r" @ .+\((\d+)\)$", r"@\1", label).split("@")
        node = f"{part}@{pos}"
        assert node in names
        effect = float(result.effect.sel(node=node))
        assert f"effect {effect:+.3g} logits".replace("-", "−") in seen.texts("#chosen-note")[0]
        for head, end in (("from", "target"), ("to", "source")):
            values = np.sort(np.abs(result.value.values[result[end].values == node]))[::-1][:10]
            rows = seen.page.locator("#chosen-links table").filter(
                has=seen.page.locator(f"th:text-is('{head}')")
            )
            shown = numbers(
                [text.replace("+", "") for text in rows.locator("tbody td:nth-child(2)").all_inner_texts()]
            )
            np.testing.assert_allclose(np.abs(shown), values, rtol=6e-3)
        lit = seen.page.locator("#net .edge.lit").count()
        assert lit > 0 and seen.page.locator("#net .spot.near").count() > 1
    # A link of the panel chooses its other end, drawn or not.
    link = seen.page.locator("#chosen-links button").first
    other = link.inner_text()
    seen.page.mouse.move(1, 1)
    seen.page.locator("#net .spot").first.focus()
    seen.page.keyboard.press("ArrowUp")
    seen.page.keyboard.press("Enter")
    assert seen.page.locator("#net .spot.pinned").count() == 1
    assert seen.page.locator("#net [aria-pressed=true]").count() == 1
    seen.page.locator("#chosen-links button").first.click()
    assert seen.page.locator("#net .spot.chosen").count() == 1 and other
    closed(seen)


def pin(seen: Visit, label: str) -> None:
    seen.page.get_by_role("button", name=label, exact=True).first.click()


def save(seen: Visit, path: Path) -> AttributionGraph:
    with seen.page.expect_download() as download:
        seen.page.click("#save")
    download.value.save_as(path)
    return read_attribution_graph(path)


@needs_browser
@pytest.mark.parametrize("width", [NARROW, WIDE])
def test_groups_that_were_made_are_saved_and_shown_again(
    width: int, result: xr.Dataset, tmp_path: Path, browser: "sync_api.Browser"
) -> None:
    drawn = AttributionGraph.of_result(result, "who gets it")
    seen = opened(browser, drawn, tmp_path / "page", width)
    ids = {}
    for node in drawn.nodes:
        shown = f"{node.label} @ {drawn.tokens[node.position].replace(' ', '·')} ({node.position})"
        ids[shown] = node.name
    shown_ids = {ids[label]: label for label in boxes(seen) if label.startswith("L")}
    inside = drawn.links[drawn.links.source.isin(shown_ids) & drawn.links.target.isin(shown_ids)]
    strongest = inside.reindex(inside.weight.abs().sort_values(ascending=False).index)
    ends = list(dict.fromkeys([*strongest.source[:3], *strongest.target[:3]]))
    chosen = [shown_ids[name] for name in ends[:5]]
    assert len(chosen) == 5
    for label in chosen:
        pin(seen, label)
    assert seen.texts("#pin-count") == ["5 pinned nodes, 0 groups."]
    for label in chosen[:3]:
        seen.page.get_by_role("checkbox", name=label, exact=True).check()
    seen.page.fill("#group-name", "people")
    seen.page.click("#grouping button")
    assert seen.texts("#pin-count") == ["5 pinned nodes, 1 group."]
    # The links of a group are the sums of those of its members.
    members, rest = {ids[label] for label in chosen[:3]}, [ids[label] for label in chosen[3:]]
    units = {"people": members, **{label: {ids[label]} for label in chosen[3:]}}
    expected = {}
    for a, sources in units.items():
        for b, targets in units.items():
            here = drawn.links[drawn.links.source.isin(sources) & drawn.links.target.isin(targets)]
            if a != b and len(here):
                expected[a, b] = float(here.weight.sum())
    assert any("people" in ends for ends in expected)
    rows = [row.split("\t") for row in seen.texts("#sub-links tbody tr")]
    found = {(row[0], row[1]): float(row[2].replace("−", "-")) for row in rows}
    assert found == pytest.approx(expected, rel=6e-3)
    renamed = seen.page.locator(".supernode input")
    renamed.fill("givers")
    renamed.press("Enter")
    read = save(seen, tmp_path / "saved.json")
    assert read.supernodes == (("givers", *(ids[label] for label in chosen[:3])),)
    assert read.pinned == tuple(ids[label] for label in chosen)
    assert (read.nodes, read.tokens, read.metadata) == (drawn.nodes, drawn.tokens, drawn.metadata)
    assert read.links.equals(drawn.links)
    closed(seen)
    again = opened(browser, read, tmp_path / "again", width)
    assert again.texts("#pin-count") == ["5 pinned nodes, 1 group."]
    assert again.page.locator(".supernode input").input_value() == "givers"
    assert [row.split("\t")[2] for row in again.texts("#sub-links tbody tr")] == [row[2] for row in rows]
    again.page.get_by_role("button", name="Ungroup givers").click()
    assert again.texts("#pin-count") == ["5 pinned nodes, 0 groups."]
    again.page.get_by_role("button", name=f"Unpin {chosen[3]}").click()
    left = save(again, tmp_path / "left.json")
    assert left.supernodes == () and set(left.pinned) == members | {rest[1]}
    closed(again)


@needs_browser
def test_what_the_page_cannot_show_is_saved_all_the_same(tmp_path: Path, browser: "sync_api.Browser") -> None:
    """Groups of nodes that are not in the file, its metadata, and the parts of weights in graphs of ours."""
    held = foreign()
    held["qParams"] |= {
        "pinnedIds": ["9_9_9"],
        "supernodes": [["gone", "9_9_8"], ["numbers", "0_6200_1", "9_9_7"]],
    }
    given = read_attribution_graph(saved(held, tmp_path))
    seen = opened(browser, given, tmp_path / "page")
    found = save(seen, tmp_path / "saved.json")
    assert found.supernodes == given.supernodes and set(found.pinned) >= {"9_9_9", "0_6200_1"}
    assert (
        found.metadata
        == given.metadata
        == {
            key: value
            for key, value in held["metadata"].items()
            if key not in ("slug", "scan", "prompt_tokens", "prompt")
        }
    )
    closed(seen)
    written(circuit(), tmp_path)
    ours = opened(browser, read_attribution_graph(tmp_path / "graph.json"), tmp_path / "ours")
    assert save(ours, tmp_path / "saved.json").circuit() == circuit()
    closed(ours)


@needs_browser
def test_groups_of_one_name_get_names_of_their_own(
    tmp_path: Path, browser: "sync_api.Browser", others: AttributionGraph
) -> None:
    seen = opened(
        browser, replace(others, supernodes=(("", "0_6200_1"), ("a", "3_373_1"))), tmp_path / "page"
    )
    first = seen.page.locator(".supernode input").first
    first.fill("a")
    first.press("Enter")
    assert [group[0] for group in save(seen, tmp_path / "saved.json").supernodes] == ["a 2", "a"]
    closed(seen)


@needs_browser
@pytest.mark.browser
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_it_has_no_fault(
    width: int, scheme: str, result: xr.Dataset, tmp_path: Path, browser: "sync_api.Browser"
) -> None:
    seen = opened(browser, result, tmp_path / "page", width, color_scheme=scheme)
    assert faults(seen.page) == []
    for label in [label for label in boxes(seen) if label.startswith("L1N")][:4]:
        pin(seen, label)
    for tick in seen.page.locator("#pins input").all()[:2]:
        tick.check()
    seen.page.click("#grouping button")
    assert faults(seen.page) == []
    closed(seen)
