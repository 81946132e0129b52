"""The drawn circuit has its nodes and edges, wide and coloured by their scores; the curve is the result's."""

from dataclasses import replace

import matplotlib as mpl
import numpy as np
import pytest
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch

from interp.causal import EdgeGraph
from interp.causal.contrast import Direction
from interp.circuits import Circuit, CircuitProtocol
from interp.plot.circuit import AGAINST, FOR, THICK, THIN, circuit, circuit_curve
from tests.configs import CONFIGS

HOW = CircuitProtocol("logit difference", "logits", "eap", "top_n", "resample", 8)
SCORES = {
    "L0.resid->L0H1.v": -1.0,
    "L0H1->L1H2.k": 0.5,
    "L1H2->logits": -2.0,
    "L0.resid->L0.mlp": 0.1,
    "L0.mlp->L1H2.k": 1.0,
}


def arrows(ax: Axes) -> list[FancyArrowPatch]:
    return [patch for patch in ax.patches if isinstance(patch, FancyArrowPatch)]


def drawn(scores: dict[str, float], config: str = "gpt2") -> Axes:
    ax = circuit(Circuit(EdgeGraph.of(CONFIGS[config]), scores, "small", "nothing", HOW))
    ax.figure.canvas.draw()
    return ax


def test_every_node_is_named_and_rows_follow_the_pass() -> None:
    ax = drawn(SCORES)
    height = {text.get_text(): text.get_position()[1] for text in ax.texts if len(text.get_text()) > 1}
    assert set(height) == {"L0.resid", "L0H1", "L0.mlp", "L1H2", "logits"}
    assert sorted(height, key=lambda name: height[name]) == ["L0.resid", "L0H1", "L0.mlp", "L1H2", "logits"]
    assert [text.get_text() for text in ax.texts if len(text.get_text()) == 1] == list("qkv") * 2
    assert "small, nothing: 5 of" in ax.get_title() and "%" in ax.get_title()


@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_edges_are_arrows_wide_as_their_score_and_blue_for_the_metric(
    direction: Direction,
) -> None:
    how = replace(HOW, direction=direction)
    made = arrows(circuit(Circuit(EdgeGraph.of(CONFIGS["gpt2"]), SCORES, protocol=how)))
    found = {(round(a.get_linewidth(), 6), mpl.colors.to_hex(a.get_edgecolor())) for a in made}
    speaks = {edge: score > 0 if direction == "denoise" else score < 0 for edge, score in SCORES.items()}
    expected = {
        (round(THIN + (THICK - THIN) * abs(s) / 2, 6), FOR if speaks[edge] else AGAINST)
        for edge, s in SCORES.items()
    }
    assert found == expected and len(made) == len(SCORES)
    red, _, blue = mpl.colors.to_rgb(FOR)
    assert blue > red


def test_heads_are_entered_by_their_queries_keys_and_values() -> None:
    ends = {
        part: arrows(drawn({f"L0.resid->L0H1.{part}": 1.0, "L0H1->logits": 1.0}))[0]._posA_posB[1]  # type: ignore[attr-defined]
        for part in "qkv"
    }
    assert ends["q"][0] < ends["k"][0] < ends["v"][0]
    ax = drawn({"L0.resid->L0H1.v": 1.0, "L0H1->logits": 1.0})
    (letter,) = (text.get_position() for text in ax.texts if text.get_text() == "v")
    assert letter[0] == pytest.approx(ends["v"][0]) and letter[1] > ends["v"][1]


def test_shared_keys_enter_each_head_that_is_there() -> None:
    scores = {"L0.resid->L1G1.k": 1.0, "L1H2->logits": 1.0, "L1H3->logits": 1.0}
    assert len(arrows(drawn(scores, "llama-gqa"))) == 4
    assert len(arrows(drawn({k: v for k, v in scores.items() if "H2" not in k}, "llama-gqa"))) == 2


def test_no_two_names_overlap() -> None:
    ax = drawn(
        {f"L0.resid->L0H{h}.q": 1.0 for h in range(4)}
        | {f"L0H{h}->L0.mlp": 1.0 for h in range(4)}
        | {"L0.mlp->logits": 1.0}
    )
    boxes = [t.get_window_extent() for t in ax.texts if len(t.get_text()) > 1]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


@pytest.mark.parametrize(("direction", "done"), [("denoise", "its clean value"), ("noise", "corrupting it")])
def test_the_legend_says_what_colours_mean_and_nothing_global_changes(
    direction: Direction, done: str
) -> None:
    before = dict(mpl.rcParams)
    how = replace(HOW, direction=direction)
    legend = circuit(Circuit(EdgeGraph.of(CONFIGS["gpt2"]), SCORES, protocol=how)).get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [
        f"{done} lowers the logit difference", f"{done} raises the logit difference",
    ]  # fmt: skip
    assert legend.get_title().get_text() == "widest: 2 logits"
    assert dict(mpl.rcParams) == before


def test_no_circuit_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one edge"):
        circuit(Circuit(EdgeGraph.of(CONFIGS["gpt2"]), {}))


def curve() -> xr.Dataset:
    circuits, fractions = ["found", "random"], [0.01, 0.1, 1.0]
    curves = np.array([[0.2, 0.9, 1.0], [0.0, 0.1, 1.0]])
    areas = [np.broadcast_to(np.array(each)[:, None], curves.shape) for each in ([0.9, 0.3], [0.1, 0.7])]
    value = np.stack([curves, *areas], -1)
    dims = ("circuit", "fraction", "score")
    return xr.Dataset(
        {"value": (dims, value), "low": (dims, value - 0.1), "high": (dims, value + 0.2)},
        coords={"circuit": circuits, "fraction": fractions, "score": ["faithfulness", "cpr", "cmd"]},
        attrs={"replacement": "resample", "metric": "logit difference"},
    )


def test_curves_and_bands_are_those_of_the_result() -> None:
    result = curve()
    ax = circuit_curve(result, label="EAP", circuits=["found", "random"])
    assert circuit_curve(result, label="EAP-IG", circuits=["found"], ax=ax) is ax
    lines = [line for line in ax.lines if len(line.get_xdata()) == 3]
    assert len(lines) == 3 and len(ax.collections) == 3
    np.testing.assert_allclose(lines[1].get_ydata(), result.value.sel(circuit="random", score="faithfulness"))
    ys = ax.collections[0].get_paths()[0].vertices[:, 1]
    assert ys.min() == pytest.approx(0.1) and ys.max() == pytest.approx(1.2)
    legend = ax.get_legend()
    assert legend is not None
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["EAP: CPR 0.90, CMD 0.10", "random", "EAP-IG: CPR 0.90, CMD 0.10"]
    assert (
        ax.get_xscale() == "log" and "resample" in ax.get_xlabel() and "logit difference" in ax.get_ylabel()
    )
