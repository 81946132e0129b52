"""Ablation, the faithfulness curve and the exchanged graph: tables are the functions', the page is the tables."""

import json
import re
from html import unescape
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import interp
from interp.causal import EdgeGraph
from interp.causal.stand_ins import StandIn
from interp.circuits import circuit_curve, edge_attribution, interchange
from interp.pages import Report, view_ablation, view_faithfulness
from interp.pages.corrupted import SIZES
from interp.pages.folder import GRAPH
from interp.views import writing
from interp.views.maps import UNCHANGED
from tests.pages.reports import ANSWER, CORRUPTED, PROMPT, WRONG, compared, page_of, report
from tests.pages.test_corrupted import VARIANTS
from tests.pages.test_sections import section
from tests.tiny import hooked

METRIC = interp.logit_difference(ANSWER, WRONG)


def replaced(found: Report, change: str) -> pd.DataFrame:
    table = found.tables["ablation"]
    return table[table.change == change].reset_index(drop=True)


# --- ablation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("change", ["zero", "resample"])
def test_total_effects_are_those_of_the_function(name: str, change: str) -> None:
    how: StandIn = {"zero": interp.edits.Zero(), "resample": interp.edits.Resample()}[change]
    table = replaced(compared(name), change)
    for kind in ("head", "mlp"):
        rows = table[table.kind == kind]
        given = {"change": how, "metric": METRIC, "reference": CORRUPTED if change == "resample" else None}
        expected = interp.ablate(hooked(name), PROMPT, kind, **given)
        # All questions of the page share packs of rows, which rounds otherwise.
        np.testing.assert_allclose(rows.value, expected.value.values.ravel(), rtol=1e-12, atol=1e-12)
        assert rows.part.tolist() == expected.part.values.ravel().tolist()
        assert rows.changed.tolist() == expected.changed.values.ravel().tolist()
        assert rows.layer.tolist() == sorted(rows.layer)
    assert table[table.kind == "mlp"]["head"].isna().all()


def test_the_effect_of_a_zeroed_head_is_that_of_a_run_with_hooks() -> None:
    model, table = hooked("gpt2"), replaced(compared("gpt2"), "zero").set_index(["layer", "head"])

    def silent(z: torch.Tensor, hook: object) -> torch.Tensor:
        z = z.clone()
        z[:, :, 2] = 0
        return z

    right, wrong = (model.to_single_token(text) for text in (ANSWER, WRONG))
    runs = (model(PROMPT), model.run_with_hooks(PROMPT, fwd_hooks=[("blocks.1.attn.hook_z", silent)]))
    before, after = (float(logits[0, -1, right] - logits[0, -1, wrong]) for logits in runs)
    assert table.value[1, 2] == pytest.approx(after - before, rel=1e-9)


@pytest.mark.parametrize("name", VARIANTS)
def test_direct_effects_are_those_of_attribution_and_of_prompt_differences(name: str) -> None:
    model, found = hooked(name), compared(name)
    here, there = (
        interp.attribute(model, text, ANSWER, WRONG, parts="head").isel(prompt=0)
        for text in (PROMPT, CORRUPTED)
    )
    for change, expected in (("zero", -here.value), ("resample", there.value - here.value)):
        rows = replaced(found, change)
        np.testing.assert_allclose(rows.direct, expected.sel(part=rows.part.tolist()), rtol=1e-9, atol=1e-12)
    known = found.tables["attribution"].query("kind in ('head', 'mlp')").set_index("part").value
    assert set(known.index) == set(replaced(found, "zero").part)


def test_a_page_says_the_models_logits_and_splits_those_before_its_cap() -> None:
    """Of a model with a soft cap: totals after it; parts, direct and total effects before it, from whole passes."""
    found, model = compared("gemma2"), hooked("gemma2")
    right, wrong = (model.to_single_token(text) for text in (ANSWER, WRONG))
    cap = found.config.logit_softcap
    assert cap is not None

    def difference(logits: torch.Tensor) -> tuple[float, float]:
        """After the cap, and before it."""
        last = logits[0, -1, [right, wrong]]
        return tuple(float(x[0] - x[1]) for x in (last, cap * torch.atanh(last / cap)))

    (after, before), (other, _) = difference(model(PROMPT)), difference(model(CORRUPTED))
    assert found.contrast is not None and found.corrupted is not None
    assert (found.contrast.total, found.contrast.explained) == pytest.approx((after, before), rel=1e-9)
    assert found.corrupted.total == pytest.approx(other, rel=1e-9)
    assert found.tables["attribution"].value.sum() == pytest.approx(before, rel=1e-9)
    silent = [("blocks.1.hook_mlp_out", lambda x, hook: torch.zeros_like(x))]
    _, without = difference(model.run_with_hooks(PROMPT, fwd_hooks=silent))
    row = replaced(found, "zero").set_index("part").loc["L1.mlp"]
    assert row.value == pytest.approx(without - before, rel=1e-8)
    text = page_of(found)
    assert f"attribution and ablation are before it ({writing.number(before, 2, sign=True)})" in text
    assert f"difference before its soft cap is {writing.number(before, 3, sign=True)}" in text


def test_last_mlp_without_a_norm_has_no_effect_but_its_direct_one() -> None:
    """Nothing comes after it, and no norm rescales the stream: total and direct are one number."""
    table = replaced(compared("no-norm"), "zero")
    last = table[(table.kind == "mlp") & (table.layer == table.layer.max())].iloc[0]
    assert last.value == pytest.approx(last.direct, rel=1e-9)


def test_without_a_corrupted_prompt_parts_are_zeroed_only() -> None:
    found = report("gpt2")
    assert set(found.tables["ablation"].change) == {"zero"}
    text = section(page_of(found), "ablation")
    assert 'name="ablation"' not in text and "resampl" not in text
    assert "n = 1" in text


def test_a_model_without_mlps_is_mapped_without_them() -> None:
    found = compared("attention-only")
    assert set(found.tables["ablation"].kind) == {"head"}
    assert "MLP</th>" not in section(page_of(found), "ablation")


@pytest.mark.slow
@pytest.mark.parametrize("change", ["zero", "resample"])
def test_both_maps_show_the_rows_of_the_table_in_common_colours(planted: Report, change: str) -> None:
    text = unescape(section(page_of(planted), "ablation")).split('data-ablation="')
    part = next(each for each in text if each.startswith(change))
    shown = re.findall(r'class="cell ([^"]*)" style="--v:([\d.]+)" title="[^"]*">([^<]*)<', part)
    rows = replaced(planted, change)
    both = planted.tables["ablation"]  # one scale for both changes, between which a reader switches
    reach = max(both.direct.abs().max(), both.value.abs().max())
    values = [*rows.direct, *rows.value]
    known = [True] * len(rows) + rows.changed.tolist()
    assert len(shown) == len(values)
    for (classes, level, cell), value, there in zip(shown, values, known, strict=True):
        assert cell == (writing.number(value, 2, sign=True) if there else UNCHANGED)
        assert float(level) == pytest.approx(abs(value) / reach if there else 0, abs=6e-4)
        assert ("neg" in classes.split()) == (there and value > 0)  # blue is for the answer


def test_a_dot_stands_at_its_direct_and_total_effect() -> None:
    table = compared("gpt2").tables["ablation"]
    drawn = view_ablation.ablation(table)["zero"]
    side = view_ablation.SIDE
    for dot in drawn.dots:
        scale = 2 * drawn.reach / side
        assert dot.x * scale - drawn.reach == pytest.approx(dot.part.direct, abs=1e-9)
        assert drawn.reach - dot.y * scale == pytest.approx(dot.part.value, abs=1e-9)
        assert dot.part.rest == pytest.approx(dot.part.value - dot.part.direct)
    assert len(drawn.dots) == len(replaced(compared("gpt2"), "zero"))


def test_the_planted_head_is_what_the_answer_loses(planted: Report) -> None:
    table = replaced(planted, "resample").set_index(["layer", "head"])
    assert table.value.idxmin() == (1, 2)
    assert table.value[1, 2] == pytest.approx(planted.corrupted.total - planted.contrast.total, rel=1e-3)


# --- the faithfulness curve ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_the_curve_is_that_of_the_function_at_the_sizes_of_the_page(name: str) -> None:
    model, table = hooked(name), compared(name).tables["faithfulness"]
    count = len(EdgeGraph.of(model.cfg))
    assert table.edges.tolist() == [*(size for size in SIZES if size < count), count]
    scores = edge_attribution(model, PROMPT, CORRUPTED, metric=METRIC, method="eap-ig-inputs")
    graph = EdgeGraph.of(model.cfg)
    kept = torch.zeros(len(table), *graph.exists.shape, dtype=torch.bool)
    strongest = compared(name).tables["edges"]
    for mask, size in zip(kept, table.edges, strict=True):
        top = strongest.head(size)
        for edge in top.edge:
            mask[graph.index(edge)] = True
    ends = torch.stack((graph.exists, torch.zeros_like(graph.exists)))
    found = interchange(model, PROMPT, CORRUPTED, torch.cat((ends, kept)), metric=METRIC)
    full, empty, *values = found["each"].isel(prompt=0).values.tolist()
    expected = [(value - empty) / (full - empty) for value in values]
    np.testing.assert_allclose(table.value, expected, rtol=1e-6, atol=1e-8)
    whole = circuit_curve(model, PROMPT, CORRUPTED, scores, metric=METRIC, fractions=(1.0,), draws=0)
    whole = whole.value.sel(circuit="found", score="faithfulness")
    assert table.value.iloc[-1] == pytest.approx(float(whole[0]), rel=1e-9) == 1
    assert (table.connected <= table.edges).all()


def test_two_edges_are_the_whole_planted_circuit(planted: Report) -> None:
    table = planted.tables["faithfulness"].set_index("edges")
    assert table.value[1] == pytest.approx(0, abs=1e-6)
    assert table.value[2] == pytest.approx(1, abs=2e-3)
    assert table.connected[2] == 2


def test_points_of_the_curve_stand_where_their_numbers_are() -> None:
    table = pd.DataFrame({"edges": [1, 10, 100], "connected": [0, 7, 100], "value": [0.0, -0.5, 1.0]})
    drawn = view_faithfulness.curve(table, total=4.0, corrupted=-6.0)
    assert [point.logits for point in drawn.points] == [-6.0, -11.0, 4.0]
    assert [point.x for point in drawn.points] == pytest.approx([0, 210, 420])
    assert [point.y for point in drawn.points] == pytest.approx([190 / 1.5, 190, 0])
    assert dict(drawn.up) == pytest.approx({"0": 190 / 1.5, "1": 0, "−0.50": 190})
    assert [text for text, _ in drawn.across] == ["1", "10", "100"]


def test_the_page_lists_every_point_and_says_what_it_is(planted: Report) -> None:
    text = unescape(section(page_of(planted), "circuit"))
    rows = re.findall(r"<td>([−\d.]+)</td><td>([+−\d.]+)</td></tr>", text)
    table = planted.tables["faithfulness"]
    span = planted.contrast.total - planted.corrupted.total
    logits = planted.corrupted.total + table.value * span
    expected = [
        (writing.number(f, 3), writing.number(x, 3, sign=True))
        for f, x in zip(table.value, logits, strict=True)
    ]
    assert rows == expected
    assert "n = 1: no interval" in text


def test_model_without_an_edge_graph_has_no_curve_and_no_exchange(tmp_path: Path) -> None:
    found = compared("post-norm")
    assert "faithfulness" not in found.tables
    interp.pages.write_report(found, tmp_path)
    assert not (tmp_path / GRAPH).exists()
    assert GRAPH not in (tmp_path / "index.html").read_text()


# --- the exchanged graph ------------------------------------------------------------------------------------------


def test_the_graph_beside_the_page_is_what_the_page_draws(planted: Report, planted_folder: Path) -> None:
    found = interp.circuits.read_attribution_graph(planted_folder / GRAPH)
    assert found.prompt == planted.question.prompt
    assert found.tokens == tuple(planted.tables["tokens"].token)
    shown = planted.tables["edges"].head(100)
    expected = dict(zip(shown.edge, shown.value, strict=True))
    circuit = found.circuit()
    assert dict(circuit.scores) == expected
    assert circuit.protocol is not None and circuit.protocol.metric == "logit difference"
    assert GRAPH in json.loads((planted_folder / "run.json").read_text())["files"]
    assert f'href="{GRAPH}"' in (planted_folder / "index.html").read_text()
    logits = next(node for node in found.nodes if node.kind == "logit")
    assert logits.label == f'Output "d" against "e" (p={planted.contrast.answer.prob:.3f})'
