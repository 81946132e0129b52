"""Patching and edges on the page: tables are those of the functions, cells and lines those of the tables."""

import functools
import re
from html import unescape

import numpy as np
import pandas as pd
import pytest
import torch

import interp
from interp.causal import EdgeGraph
from interp.circuits import edge_attribution
from interp.cli.commands import ReportCommand as Command
from interp.pages import About, Report, ReportQuestion, absent, page, report_of, view_circuit, view_patching
from interp.views import writing
from tests.pages.conftest import PLANTED
from tests.pages.reports import ANSWER, CORRUPTED, PROMPT, WRONG, compared, page_of, report
from tests.pages.test_sections import model_of, section
from tests.tiny import hooked

SITES = ("resid_pre", "attn_out", "mlp_out", "z")
VARIANTS = ("gpt2", "llama-gqa", "parallel")


@functools.cache
def patches(found: Report, direction: str, site: str) -> pd.DataFrame:
    table = found.tables["patching"]
    return table[(table.direction == direction) & (table.site == site)].reset_index(drop=True)


# --- the tables against the functions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_patching_is_that_of_the_function_in_both_directions(name: str) -> None:
    found, metric = compared(name), interp.logit_difference(ANSWER, WRONG)
    assert found.tables["patching"][["direction", "site"]].drop_duplicates().to_numpy().tolist() == [
        [direction, site] for direction in ("denoise", "noise") for site in SITES
    ]
    for direction in ("denoise", "noise"):
        for site in SITES:
            table = patches(found, direction, site)
            expected = interp.patch(hooked(name), PROMPT, CORRUPTED, site, metric=metric, direction=direction)
            second = expected.value.dims[1]
            assert table.layer.tolist() == expected.value.layer.values.repeat(expected.sizes[second]).tolist()
            whole = np.broadcast_to(
                expected.part.values.reshape(expected.sizes["layer"], -1), expected.value.shape
            )
            assert table.part.tolist() == whole.ravel().tolist()
            assert table[second].tolist() == list(range(expected.sizes[second])) * expected.sizes["layer"]
            assert table[{"pos": "head", "head": "pos"}[second]].isna().all()
            for number in (
                "value",
                "normalised",
            ):  # to rounding: all questions of the page share packs of rows
                wanted = expected[number].values.ravel()
                np.testing.assert_allclose(table[number], wanted, rtol=1e-12, atol=1e-12)
            assert table.changed.tolist() == expected.changed.values.ravel().tolist()


def test_the_largest_head_is_that_of_a_run_with_hooks() -> None:
    model, table = hooked("gpt2"), patches(compared("gpt2"), "denoise", "z")
    best = table.loc[table.value.abs().idxmax()]
    _, cache = model.run_with_cache(PROMPT, f"blocks.{best.layer}.attn.hook_z")

    def patched(z: torch.Tensor, hook: object) -> torch.Tensor:
        z = z.clone()
        z[:, :, best["head"]] = cache["z", int(best.layer)][:, :, best["head"]]
        return z

    right, wrong = (model.to_single_token(text) for text in (ANSWER, WRONG))
    runs = [
        model(CORRUPTED),
        model.run_with_hooks(CORRUPTED, fwd_hooks=[(f"blocks.{best.layer}.attn.hook_z", patched)]),
    ]
    before, after = (float(logits[0, -1, right] - logits[0, -1, wrong]) for logits in runs)
    assert best.value == pytest.approx(after - before, rel=1e-9)


@pytest.mark.parametrize("name", VARIANTS)
def test_edges_are_those_of_the_function_and_the_largest_come_first(name: str) -> None:
    table = compared(name).tables["edges"]
    metric = interp.logit_difference(ANSWER, WRONG)
    expected = edge_attribution(hooked(name), PROMPT, CORRUPTED, metric=metric, method="eap-ig-inputs")
    assert len(table) == len(EdgeGraph.of(hooked(name).cfg))
    places = tuple(expected[dim].to_index().get_indexer(table[dim]) for dim in ("sender", "receiver"))
    np.testing.assert_array_equal(table.value, expected.value.values[places])
    assert (table.sender + "->" + table.receiver).tolist() == table.edge.tolist()
    assert not table.duplicated(["sender", "receiver"]).any()
    assert (np.diff(table.value.abs()) <= 0).all()


def test_the_planted_circuit_is_what_the_page_finds(planted: Report) -> None:
    """The corrupted prompt goes on with another letter: the induction head moves it, and nothing else matters."""
    found = planted.tables["edges"]
    strongest = set(zip(found.sender[:2], found.receiver[:2], strict=True))
    assert strongest == {("L0.resid", "L1H2.v"), ("L1H2", "logits")}
    assert found.value[2:].abs().max() < 1e-3 * found.value[:2].abs().min()
    assert (found.value[:2] > 0).all(), "bringing them back raises the answer"
    heads = patches(planted, "denoise", "z").set_index(["layer", "head"]).normalised
    assert heads[1, 2] == pytest.approx(1, abs=1e-3)
    assert heads.drop((1, 2)).abs().max() < 1e-3


@pytest.mark.parametrize("wrong", [WRONG, None])
def test_corrupted_prompt_says_what_the_model_makes_of_the_answers(wrong: str | None) -> None:
    found, model = report("gpt2", CORRUPTED, wrong), hooked("gpt2")
    logits = model(CORRUPTED)[0, -1]
    right = model.to_single_token(ANSWER)
    total = logits[right] - (0 if wrong is None else logits[model.to_single_token(wrong)])
    other = found.corrupted
    assert other is not None
    assert other.total == pytest.approx(float(total), rel=1e-5)
    assert other.answer.prob == pytest.approx(float(logits.softmax(-1)[right]), rel=1e-5)
    assert other.answer.rank == int((logits > logits[right]).sum())
    assert other.changes == ((2, " cat", " dog"),)
    shown = unescape(section(page_of(found), "patching"))
    assert f"<dd>{writing.number(other.total, 2, sign=True)}</dd>" in shown
    assert f'<p class="prompt">{CORRUPTED}</p>' in shown


# --- the page against the tables ----------------------------------------------------------------------------------


def test_every_cell_of_every_map_shows_its_row(planted: Report) -> None:
    text = unescape(section(page_of(planted), "patching"))
    for direction in ("denoise", "noise"):
        part = text.split(f'data-patching="{direction}"')[1].split('data-patching="noise"')[0]
        found = re.findall(r'class="cell([^"]*)" (?:style="--v:([\d.]+)" )?title="([^"]*)">([^<]*)<', part)
        shown = [(classes.split(), float(level or 0), tip, cell) for classes, level, tip, cell in found]
        rows = [
            row
            for site in ("resid_pre", "attn_out", "z")
            for row in patches(planted, direction, site).itertuples()
        ]
        assert len(shown) == len(rows) > 0
        for (classes, level, tip, cell), row in zip(shown, rows, strict=True):
            # The script names a cell by token from its row and column; a head names itself.
            place = f"L{row.layer}H{row.head}\n" if row.site == "z" else ""
            assert tip.startswith(place)
            assert ("idle" in classes) == (not row.changed)
            if not row.changed:
                assert (cell, tip) == ("–", f"{place}nothing was changed here")
                continue
            told = row.normalised if direction == "denoise" else 1 - row.normalised  # for the answer
            assert cell == writing.number(row.normalised)
            assert f"{writing.number(row.value, 3, sign=True)} logits\n" in tip
            assert f"normalised {writing.number(row.normalised, 3)}" in tip
            assert level == pytest.approx(min(1, abs(told)), abs=6e-4)
            assert ("neg" in classes) == (told < 0)


def test_where_both_runs_agree_the_map_says_that_nothing_was_changed() -> None:
    """A causal model reads the same tokens up to the first that differs."""
    shown = view_patching.patching(compared("gpt2").tables["patching"])["denoise"]
    differs = 2
    for rows in shown.maps.values():
        for row in rows:
            assert [cell.idle for cell in row[:differs]] == [True] * differs
    assert not shown.maps["resid_pre"][0][differs].idle
    assert all(cell.idle for cell in shown.maps["resid_pre"][0][differs + 1 :])
    assert all(patch.changed for patch in shown.largest)


def test_the_largest_effects_are_listed_largest_first() -> None:
    found = compared("gpt2")
    for direction, shown in view_patching.patching(found.tables["patching"]).items():
        table = found.tables["patching"]
        table = table[table.direction == direction]
        sizes = table.value.abs().sort_values(ascending=False)[: len(shown.largest)]
        assert len(shown.largest) == view_patching.LARGEST
        np.testing.assert_array_equal([abs(patch.value) for patch in shown.largest], sizes)


@pytest.mark.parametrize("name", VARIANTS)
def test_drawing_has_the_strongest_edges_from_sender_up_to_receivers(name: str) -> None:
    found = compared(name)
    table, graph = found.tables["edges"], EdgeGraph.of(found.config)
    drawn = view_circuit.drawing(table, found.tables["faithfulness"], found.config)
    nodes = {node.part: node for node in drawn.nodes}
    assert drawn.total == len(table)
    assert drawn.steps == [step for step in (10, 25, 50) if step < len(table)] + [min(100, len(table))]
    assert len(drawn.edges) == min(100, len(table))
    strongest = table.value.abs().max()
    for edge, row in zip(drawn.edges, table.itertuples(), strict=False):
        receivers = graph.nodes_of(graph.receivers.index(row.receiver))
        assert edge.score == row.value
        assert edge.ends.split() == [row.sender, *receivers]
        assert edge.width == pytest.approx(0.7 + 7.3 * abs(row.value) / strongest)
        lines = [[float(x) for x in re.findall(r"-?[\d.]+", line)] for line in edge.path.split("M")[1:]]
        assert len(lines) == (0 if edge.drawn is None else len(receivers))
        if edge.drawn is None:
            continue
        for line, receiver in zip(lines, receivers, strict=True):
            start, end = nodes[row.sender], nodes[receiver]
            part = row.receiver[-2:]
            offset = {".q": -15, ".k": 0, ".v": 15}.get(part, 0)
            assert line[:2] == pytest.approx([start.x, start.y - 10], abs=0.06)
            assert line[-2:] == pytest.approx([end.x + offset, end.y + 10], abs=0.06)
            assert line[-1] < line[1]
        assert f"{writing.number(row.value, 3, sign=True)} logits" in edge.tip
        assert edge.tip.startswith(f"{row.sender} → {row.receiver}")
        assert (edge.source.part, edge.target.part) == (
            row.sender,
            receivers[0] if len(receivers) == 1 else None,
        )


@pytest.mark.parametrize("name", VARIANTS)
def test_drawn_are_the_edges_on_a_path_and_as_many_as_the_curve_counts(name: str) -> None:
    found = compared(name)
    curve = found.tables["faithfulness"]
    drawn = view_circuit.drawing(found.tables["edges"], curve, found.config)
    connected = dict(zip(curve.edges, curve.connected, strict=True))
    for step in drawn.steps:
        shown = [edge for edge in drawn.edges[:step] if edge.drawn is not None and edge.drawn <= step]
        assert len(shown) == connected[step]
    known = dict(zip(curve.edges, curve.value, strict=True))
    enough = [step for step in drawn.steps if all(known[n] >= 0.9 for n in curve.edges if n >= step)]
    assert drawn.opens == (enough or drawn.steps)[0 if enough else -1]
    assert (
        drawn.carried[drawn.opens] == f"Alone they carry {writing.number(known[drawn.opens])} of the answer."
    )


def test_lines_pass_beside_the_nodes_of_the_rows_between(planted: Report) -> None:
    drawn = view_circuit.drawing(planted.tables["edges"], planted.tables["faithfulness"], planted.config)
    boxes = [(node.x, node.y) for node in drawn.nodes]
    passed = 0
    for edge in drawn.edges:
        for x, top in re.findall(r"([\d.]+) [\d.]+V([\d.]+)", edge.path):
            near = [abs(float(x) - at) for at, y in boxes if abs(y - 10 - float(top)) < 0.06]
            assert min(near) > view_circuit.SIDE
            passed += 1
    assert passed > 10


def test_rows_of_the_drawing_go_up_layer_by_layer_heads_before_their_mlp() -> None:
    found = compared("gpt2")
    drawn = view_circuit.drawing(found.tables["edges"], found.tables["faithfulness"], found.config)
    nodes = {node.part: node for node in drawn.nodes}
    order = ["L0.resid", "L0H0", "L0.mlp", "L1H0", "L1.mlp", "logits"]
    heights = [nodes[name].y for name in order]
    assert heights == sorted(heights, reverse=True) and len(set(heights)) == len(order)
    assert len({nodes[f"L1H{head}"].y for head in range(4)}) == 1
    across = [nodes[f"L1H{head}"].x for head in range(4)]
    assert np.diff(across).min() >= 2 * view_circuit.SIDE


@pytest.mark.parametrize("name", VARIANTS)
def test_groups_hold_drawn_parts_once_and_edges_between_or_inside_them(name: str) -> None:
    found = compared(name)
    drawn = view_circuit.drawing(found.tables["edges"], found.tables["faithfulness"], found.config)
    assert list(drawn.grouped) == ["heads", "layer"]
    for how, grouped in drawn.grouped.items():
        holds = {node.part: node.members.split() for node in grouped.nodes}
        assert sorted(part for parts in holds.values() for part in parts) == sorted(
            node.part for node in drawn.nodes
        )
        for box, parts in holds.items():
            layers = {node.layer for node in drawn.nodes if node.part in parts}
            assert len(layers) == 1, box
            assert parts == [box] or how == "layer" or all("H" in part for part in parts), box
        box_of = {part: box for box, parts in holds.items() for part in parts}
        joined = {
            rank: bundle.ends.split() for bundle in grouped.bundles for rank in map(int, bundle.ranks.split())
        }
        joined |= {int(rank): [node.part] * 2 for node in grouped.nodes for rank in node.inside.split()}
        expected = {
            edge.rank: [box_of[end] for end in edge.ends.split()[:2]]
            for edge in drawn.edges
            if edge.drawn is not None
        }
        assert joined == expected
        assert all(a != b for a, b in (bundle.ends.split() for bundle in grouped.bundles))


def test_the_circuit_of_the_page_lists_the_edges_it_draws_and_counts_all(planted: Report) -> None:
    text = unescape(section(page_of(planted), "circuit"))
    table = planted.tables["edges"]
    assert f"strongest of {writing.count(len(table))} edges" in text
    assert "first-order estimate" in text and "not a proof" in text
    scores = re.findall(r"<td>([+−]?[\d.]+)</td><td class=\"bar", text)
    assert scores == [writing.number(score, 3, sign=True) for score in table.value[:100]]
    linked = re.findall(r"data-rank=\"\d+\" data-drawn=\"\d+\"", text)
    assert len(re.findall(r'<g class="edge', text)) == len(linked) > 0


# --- what is missing, and what is refused -------------------------------------------------------------------------


def test_without_a_corrupted_prompt_both_sections_say_how_to_get_them() -> None:
    found = report("gpt2")
    assert found.corrupted is None
    assert not {"patching", "edges"} & set(found.tables)
    text = page_of(found)
    for name in ("patching", "circuit"):
        assert absent.NO_CORRUPTED in section(text, name)
        assert "<table" not in section(text, name)


def test_a_model_without_an_edge_graph_says_why_and_is_still_patched() -> None:
    found = compared("post-norm")
    assert "edges" not in found.tables
    with pytest.raises(ValueError, match="norms the sum itself") as refused:
        EdgeGraph.of(found.config)
    text = page_of(found)
    assert f"Left out: {refused.value}." in section(text, "circuit")
    assert "<svg" not in section(text, "circuit")
    assert 'data-patching="noise"' in section(text, "patching")


def test_a_model_without_mlps_has_no_map_of_them_and_says_so() -> None:
    found = compared("attention-only")
    assert set(found.tables["patching"].site) == {"resid_pre", "attn_out", "z"}
    assert "This model has no MLP" in section(page_of(found), "patching")
    assert "This model has no MLP" not in section(page_of(compared("gpt2")), "patching")
    assert ".mlp" not in section(page_of(found), "circuit")


def test_a_model_without_logits_has_no_corrupted_prompt() -> None:
    with pytest.raises(ValueError, match=r"a corrupted prompt \('b'\) requires a model with logits"):
        report_of(model_of({"unembed": False}), ReportQuestion("a", corrupt="b"), About("x"))


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (PLANTED + "a", r"same length, token for token: got \[16\] and \[17\] tokens"),
        (PLANTED, "must differ from its clean one"),
        ("", "empty"),
    ],
)
def test_a_corrupted_prompt_that_is_none_is_refused_before_any_work(
    planted_model: interp.HookedTransformer, monkeypatch: pytest.MonkeyPatch, corrupt: str, message: str
) -> None:
    monkeypatch.setattr("interp.pages.report._pass", lambda *_: pytest.fail("worked"))
    with pytest.raises(ValueError, match=message):
        report_of(planted_model, ReportQuestion(PLANTED, "d", "e", corrupt), About("x"))


@pytest.mark.slow
def test_a_corrupted_prompt_with_markup_in_it_is_shown_and_never_obeyed() -> None:
    prompt, corrupt = "<b>x</b>", "<i>x</i>"
    text = page(report_of(hooked("gpt2"), ReportQuestion(prompt, corrupt=corrupt), About("x")))
    assert "<i>x" not in text and "&lt;i&gt;x" in text


def test_a_corrupted_prompt_that_is_answered_alike_is_refused() -> None:
    with pytest.raises(ValueError, match="for clean and corrupted runs alike"):
        report_of(model_of({}, unembedding=0.0), ReportQuestion(PROMPT, ANSWER, WRONG, CORRUPTED), About("x"))


def test_command_brings_a_corrupted_prompt_or_takes_one_for_yours() -> None:
    own = Command().question()
    assert own.corrupt == own.prompt.replace(", John", ", Mary")
    assert Command(prompt=PROMPT).question().corrupt is None
    assert Command(prompt=PROMPT, corrupt=CORRUPTED).question() == ReportQuestion(PROMPT, corrupt=CORRUPTED)
    with pytest.raises(ValueError, match=r"\(--corrupt\) requires a prompt of your own"):
        Command(corrupt=CORRUPTED).question()
