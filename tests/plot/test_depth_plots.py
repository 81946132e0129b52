"""Plots of the depth diagnostics: they show the numbers they were given, name axes and units, and stop at the floor."""

from collections.abc import Callable, Iterator

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
import xarray as xr
from matplotlib.axes import Axes

from interp import HookedTransformer, plot
from interp.attention import attention_by_depth, attention_rows as rows
from interp.lab.depth import consensus, rank_collapse, refinement, splitting, trajectories
from interp.lab.depth.rank_collapse import LINES
from interp.lenses import late_layers
from interp.plot import attention_rows, depth
from interp.plot.particles import WORDS, _surface
from interp.plot.spectra import singular_values, spectra_map
from interp.weights import spectra
from tests.configs import build, some_tokens


@pytest.fixture(autouse=True)
def _no_figures_left() -> Iterator[None]:
    mpl.use("agg")
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer(build("llama-gqa"))


@pytest.fixture(scope="module")
def results(model: HookedTransformer) -> dict[str, xr.Dataset]:
    tokens = some_tokens(rows=4)
    return {
        "collapse": rank_collapse(model, tokens),
        "consensus": consensus(model, tokens, repeats=3),
        "by_depth": attention_by_depth(model, tokens, recent=2, random=1),
        "even": attention_by_depth(model, tokens, recent=2),
        "entropy": rows.attention_entropy(model, tokens),
        "dispersion": rows.dispersion(model, tokens),
        "refinement": refinement(model, tokens, times=(1, 2)),
        "splitting": splitting(model, tokens, 1, steps=(1, 2), fine=4),
        "trajectories": trajectories(torch.eye(3), qk=torch.eye(3), ov=torch.eye(3), steps=40),
        "spectra": spectra(model, top=3),
    }


PLOTS: dict[str, Callable[[dict[str, xr.Dataset], Axes | None], Axes]] = {
    "rank_collapse": lambda r, ax: depth.rank_collapse(r["collapse"], ax=ax),
    "consensus": lambda r, ax: depth.consensus(r["consensus"], label="x", ax=ax),
    "attention_by_depth": lambda r, ax: plot.attention_by_depth(r["by_depth"], ax=ax),
    "attention_by_depth_rank": lambda r, ax: plot.attention_by_depth(r["by_depth"], "rank", ax=ax),
    "attention_entropy": lambda r, ax: attention_rows.attention_entropy(r["entropy"], ax=ax),
    "dispersion": lambda r, ax: attention_rows.dispersion(r["dispersion"], heads=["L1H2"], ax=ax),
    "refinement": lambda r, ax: plot.refinement(r["refinement"], label="x", ax=ax),
    "splitting": lambda r, ax: plot.splitting(r["splitting"], ax=ax),
    "trajectories": lambda r, ax: plot.trajectories(r["trajectories"], label="x", ax=ax),
    "singular_values": lambda r, ax: singular_values(r["spectra"], "OV", ax=ax),
    "spectra_map": lambda r, ax: spectra_map(r["spectra"], ax=ax),
    "spectra_heads": lambda r, ax: spectra_map(r["spectra"], "top_share", kind="QK", ax=ax),
}


@pytest.mark.parametrize("name", PLOTS)
def test_plot_draws_where_told_names_its_axes_and_leaves_global_state(
    name: str, results: dict[str, xr.Dataset]
) -> None:
    before = dict(mpl.rcParams)
    _, mine = plt.subplots()
    assert PLOTS[name](results, mine) is mine
    own = PLOTS[name](results, None)
    assert own is not mine and own.get_xlabel() and own.get_title()
    assert own.get_ylabel() or name == "spectra_map"
    assert dict(mpl.rcParams) == before


def lines(ax: Axes) -> dict[str, np.ndarray]:
    return {str(line.get_label()): np.asarray(line.get_ydata()) for line in ax.lines}


def test_curves_are_the_numbers_of_the_results(results: dict[str, xr.Dataset]) -> None:
    found = lines(PLOTS["rank_collapse"](results, None))
    for name in LINES:
        np.testing.assert_array_equal(found[name], results["collapse"].value.sel(line=name))
    assert "rounding floor" not in found
    for score in depth.LABELS:
        drawn = lines(depth.consensus(results["consensus"], score, label="x"))
        np.testing.assert_array_equal(drawn["x"], results["consensus"].value.sel(score=score))
    for score in ("kl", "distance"):
        drawn = lines(plot.refinement(results["refinement"], score, label="x"))
        np.testing.assert_array_equal(drawn["x"], results["refinement"].value.sel(score=score))
    found = lines(plot.splitting(results["splitting"]))
    for scheme in results["splitting"].scheme.values:
        np.testing.assert_array_equal(found[scheme], results["splitting"].value.sel(scheme=scheme))
    for score in WORDS:
        drawn = lines(plot.trajectories(results["trajectories"], score, label="x"))
        np.testing.assert_array_equal(drawn["x"], results["trajectories"].value.sel(score=score))
    found = lines(PLOTS["dispersion"](results, None))
    wanted = results["dispersion"].value.sel(layer=1, head=2, score="max_weight")
    np.testing.assert_array_equal(found["L1H2"], wanted)
    np.testing.assert_allclose(found["even attention"], 1 / np.arange(1, 10))
    assert len(found) == 2 + 7  # even attention, one named head, all others in grey


def test_particles_are_drawn_from_where_they_begin_to_where_they_end() -> None:
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    for width in (2, 3):
        one = torch.eye(width)
        way = trajectories(x[:, :width], qk=one, ov=one, ellipsoid=3 * one, steps=40)
        ax = plot.particles(way)
        paths = [line for line in ax.lines if len(np.asarray(line.get_data()[0])) == way.sizes["time"]]
        drawn = [line.get_data_3d() if width == 3 else line.get_data() for line in paths]  # type: ignore[attr-defined]
        np.testing.assert_allclose(
            np.stack(drawn), way.position.transpose("token", "axis", "time"), rtol=1e-6
        )
        surface = _surface((3 * one).numpy())
        np.testing.assert_allclose(3 * (surface**2).sum(0), 1, rtol=1e-6)
    _, flat = plt.subplots()
    with pytest.raises(ValueError, match='projection="3d" is required'):
        plot.particles(way, ax=flat)
    with pytest.raises(ValueError, match="two or three dimensions are required, got 4"):
        plot.particles(trajectories(torch.eye(4), qk=torch.eye(4), ov=torch.eye(4), steps=2))


def test_the_last_layer_is_drawn_part_by_part_with_intervals(model: HookedTransformer) -> None:
    found = late_layers(model, some_tokens(rows=33), 5, frequencies=torch.arange(1.0, 32))
    for score, name in depth.LATE.items():
        ax = plot.late_layers(found, score)
        cells = found.sel(score=score).dropna("part", subset=["value"])
        drawn = ax.containers[0].lines[0]  # type: ignore[attr-defined]
        np.testing.assert_array_equal(drawn.get_xdata(), cells.value)
        assert [text.get_text() for text in ax.get_yticklabels()] == cells.part.values.tolist()
        assert name in ax.get_xlabel()
    with pytest.raises(KeyError, match="no score 'log_prob_chang'"):
        plot.late_layers(found, "log_prob_chang")


def test_a_collapsing_line_ends_at_the_rounding_floor() -> None:
    residual = np.array([[1.0, 1e-3, 1e-9, 3e-15, 2e-15], [1.0, 0.9, 0.8, 0.7, 0.6]])
    values = dict.fromkeys(("value", "low", "high"), (("line", "depth"), residual))
    result = xr.Dataset(values, {"line": ["SAN", "SAN+skip"], "depth": range(5)}, {"floor": 1e-14})
    found = lines(depth.rank_collapse(result))
    np.testing.assert_array_equal(found["SAN"], [1.0, 1e-3, 1e-9, 1e-14])
    np.testing.assert_array_equal(found["SAN+skip"], residual[1])
    assert set(found["rounding floor"].tolist()) == {1e-14}


def test_maps_hold_every_matrix_in_its_place(results: dict[str, xr.Dataset]) -> None:
    ax = spectra_map(results["spectra"], "norm")
    (image,) = ax.images
    kinds = [text.get_text() for text in ax.get_yticklabels()]
    for r, kind in enumerate(kinds):
        for layer in range(2):
            part = "mlp" if kind in ("W_gate", "W_in", "W_out") else "attn"
            expected = float(results["spectra"].norm.sel(matrix=f"blocks.{layer}.{part}.{kind}"))
            assert float(np.asarray(image.get_array())[r, layer]) == expected
    assert kinds == ["W_Q", "W_K", "W_V", "W_O", "W_gate", "W_in", "W_out"]
    (heads,) = spectra_map(results["spectra"], kind="QK").images
    expected = float(results["spectra"].stable_rank.sel(matrix="blocks.1.attn.QK.3"))
    assert float(np.asarray(heads.get_array())[1, 3]) == expected
    (entropy,) = PLOTS["attention_entropy"](results, None).images
    np.testing.assert_array_equal(
        np.asarray(entropy.get_array()), results["entropy"].value.sel(score="relative")
    )


def test_two_results_share_axes_with_one_line_for_even_attention(results: dict[str, xr.Dataset]) -> None:
    ax = attention_rows.dispersion(results["dispersion"], "entropy", heads=["L0H1"])
    some = results["dispersion"].sel(layer=[0], head=[1])
    attention_rows.dispersion(some, "entropy", heads=["L0H1"], label=", log n", ax=ax)
    labels = [str(line.get_label()) for line in ax.lines]
    assert labels.count("even attention") == 1 and "L0H1, log n" in labels


def test_what_a_result_does_not_hold_is_refused_by_name(results: dict[str, xr.Dataset]) -> None:
    with pytest.raises(KeyError, match="no score 'min_cosin' in this result; nearest: min_cosine"):
        depth.consensus(results["consensus"], "min_cosin")
    with pytest.raises(KeyError, match="no score 'label'"):
        attention_rows.attention_entropy(results["entropy"], "label")
    with pytest.raises(KeyError, match="no score 'upper'"):
        attention_rows.dispersion(results["dispersion"], "upper")
    with pytest.raises(KeyError, match=r"no head L2H0 in this result; it has L0H0, "):
        attention_rows.dispersion(results["dispersion"], heads=["L2H0"])
    with pytest.raises(KeyError, match="no matrix of kind 'W_ou' in this result; nearest: "):
        singular_values(results["spectra"], "W_ou")
    with pytest.raises(KeyError, match="not by head"):
        spectra_map(results["spectra"], kind="W_in")
    with pytest.raises(KeyError, match="no value 'rank'"):
        spectra_map(results["spectra"], "rank")


def test_attention_by_depth_draws_means_over_heads_beside_untrained_models_or_even_attention(
    results: dict[str, xr.Dataset],
) -> None:
    labels = {"first": "first token", "between": "between", "recent": "last 2 tokens"}
    for name, level in (("by_depth", "untrained models"), ("even", "even attention")):
        result = results[name]
        ax = plot.attention_by_depth(result)
        found = lines(ax)
        for i, (score, label) in enumerate(labels.items()):
            one = result.sel(score=score)
            np.testing.assert_array_equal(found[label], one.by_layer.sel(end="value"))
            chance = one.untrained.sel(range="mean") if name == "by_depth" else one["null"].isel(head=0)
            np.testing.assert_array_equal(np.asarray(ax.lines[2 * i + 1].get_ydata()), chance)
        assert level in found and ax.get_ylim() == (0, 1.15)
    for score in ("rank", "relative_rank"):
        one = results["by_depth"].sel(score=score)
        ax = plot.attention_by_depth(results["by_depth"], score)
        found = lines(ax)
        np.testing.assert_array_equal(found["mean over heads"], one.by_layer.sel(end="value"))
        np.testing.assert_array_equal(found["heads"], one.value.values.ravel())
        np.testing.assert_array_equal(found["even attention"], one["null"].isel(head=0))
        band = ax.collections[0].get_paths()[0].vertices
        assert (
            band[:, 1].max() == one.untrained.sel(range="most").max()
            and band[:, 1].min() == one.untrained.sel(range="least").min()
        )
        assert ax.get_ylim()[1] > float(one.value.max())
    assert len(plot.attention_by_depth(results["even"], "rank").collections) == 1, (
        "no band of untrained models"
    )
    with pytest.raises(KeyError, match="no score 'first' to draw"):
        plot.attention_by_depth(results["by_depth"], "first")
