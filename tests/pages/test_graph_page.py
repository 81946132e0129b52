"""The page of an attribution graph: it draws the strongest links where they belong, escapes names, needs no script."""

import json
import re
from html import unescape
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import interp
from interp.cli import main
from interp.pages import graph_page
from interp.pages.graph_page import ROW, drawing
from tests.circuits.test_graph_files import circuit, foreign, saved, written
from tests.pages.looks import SCHEMES, WIDTHS, faults
from tests.pages.visits import needs_browser, visit

if TYPE_CHECKING:
    from playwright import sync_api

EVIL = '<script>alert("x")</script>\u202e'


@pytest.fixture
def others(tmp_path: Path) -> interp.circuits.AttributionGraph:
    return interp.circuits.read_attribution_graph(saved(foreign(), tmp_path))


def test_nodes_stand_by_token_and_layer_and_links_join_them(others: interp.circuits.AttributionGraph) -> None:
    drawn = drawing(others)
    spots = {spot.node.name: spot for spot in drawn.spots}
    assert [name for name, _ in drawn.layers] == ["E", "0", "3", "out"]
    assert drawn.tokens == [("1", pytest.approx(spots["E_235274_1"].x))]
    heights = [spots[name].y for name in ("E_235274_1", "0_6200_1", "3_373_1", "27_235310_1")]
    assert [a - b for a, b in pairwise(heights)] == pytest.approx([ROW] * 3)
    assert spots["3_373_1"].y == spots["3_-1_1"].y and spots["3_373_1"].x != spots["3_-1_1"].x
    assert [(line.source.node.name, line.target.node.name, line.weight) for line in drawn.lines] == [
        ("0_6200_1", "3_373_1", -27.5), ("E_235274_1", "0_6200_1", 24.5), ("3_-1_1", "27_235310_1", 3.0),
    ]  # fmt: skip
    assert [line.bar for line in drawn.lines] == pytest.approx([100, 100 * 24.5 / 27.5, 100 * 3 / 27.5])


def test_only_the_strongest_links_and_their_ends_are_drawn(others: interp.circuits.AttributionGraph) -> None:
    drawn = drawing(others, 1)
    assert {spot.node.name for spot in drawn.spots} == {"0_6200_1", "3_373_1"}
    text = graph_page(others, most=1)
    assert "Drawn are the 1 links" in text and text.count("<line") == 1
    with pytest.raises(ValueError, match="at least one link is required, got 0"):
        graph_page(others, most=0)


def test_transcoder_features_are_shown_by_name_with_what_the_file_knows(
    others: interp.circuits.AttributionGraph,
) -> None:
    text = unescape(graph_page(others))
    assert "the digit 1\ncross layer transcoder, layer 0, at 1 (1)\nactivation 21.875" in text
    assert "this toolkit has not measured them" in text
    assert re.search(r"<dt>numbers</dt><dd>the digit 1, 3_373_1</dd>", text)
    weights = re.findall(r"<td>([+−][\d.]+)</td><td class=\"bar", text)
    assert weights == ["−27.5000", "+24.5000", "+3.0000"]


def test_links_say_their_tokens_where_the_method_has_positions(
    others: interp.circuits.AttributionGraph, tmp_path: Path
) -> None:
    text = unescape(graph_page(others))
    assert re.search(r"<title>[^<\n]+\n1 \(1\) → 1 \(1\)\nweight −27\.5000</title>", text)
    assert text.count('<td class="tok">1 (1) → 1 (1)</td>') == 3
    written(circuit(), tmp_path)
    ours = unescape(graph_page(interp.circuits.read_attribution_graph(tmp_path / "graph.json")))
    assert "<table" in ours and ">tokens</th>" not in ours and '<td class="tok">' not in ours
    assert not re.search(r"\(\d+\) → ", ours)


def test_names_that_are_markup_are_shown_and_never_obeyed(tmp_path: Path) -> None:
    held = foreign()
    held["metadata"] |= {"slug": EVIL, "scan": EVIL, "prompt": EVIL, "prompt_tokens": [EVIL, EVIL]}
    held["nodes"][0] |= {"clerp": EVIL, "feature_type": EVIL, "layer": EVIL}
    held["nodes"][1]["node_id"] = held["links"][1]["target"] = held["links"][1]["target"] + EVIL
    held["qParams"]["supernodes"] = [[EVIL, EVIL]]
    text = graph_page(interp.circuits.read_attribution_graph(saved(held, tmp_path)))
    assert "<script" not in text and "\u202e" not in text
    assert "⟨U+202E⟩" in text
    assert "default-src 'none'; style-src 'unsafe-inline'" in text


def test_a_graph_of_ours_says_what_its_weights_and_places_mean(tmp_path: Path) -> None:
    written(circuit(), tmp_path)
    text = unescape(graph_page(interp.circuits.read_attribution_graph(tmp_path / "graph.json")))
    assert "positive weights speak for the answer" in text and "because the format requires a place" in text
    assert "head 1.1\nattention head, layer 1" in text


def test_the_command_draws_a_file_and_refuses_what_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given, out = saved(foreign(), tmp_path), tmp_path / "page.html"
    assert main(["graph", str(given), "--out", str(out)]) == 0
    assert out.read_text().startswith("<!doctype html>")
    given.write_text(json.dumps({"nodes": []}))
    assert main(["graph", str(given), "--out", str(out)]) == 2
    assert "lacks metadata" in capsys.readouterr().err


def test_a_graph_without_links_says_so(tmp_path: Path) -> None:
    held = foreign() | {"links": []}
    text = graph_page(interp.circuits.read_attribution_graph(saved(held, tmp_path)))
    assert "This graph has no links." in text and "<svg" not in text


@needs_browser
@pytest.mark.browser
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_it_has_no_fault(
    width: int,
    scheme: str,
    others: interp.circuits.AttributionGraph,
    tmp_path: Path,
    browser: "sync_api.Browser",
) -> None:
    folder = tmp_path / "page"
    folder.mkdir()
    (folder / "index.html").write_text(graph_page(others), encoding="utf-8")
    seen = visit(browser, folder, width, color_scheme=scheme)
    assert faults(seen.page) == []
    seen.page.close()
