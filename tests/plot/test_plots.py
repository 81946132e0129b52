"""Plots show the numbers they were given, centre signed colours on 0, name their units and change no global state."""

from collections.abc import Callable

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

import interp
from interp import plot
from interp.plot.canvas import annotate, heat_map
from interp.views.scale import ColourScale

PROMPT = "abcdefabcdefabc"


@pytest.fixture(scope="module")
def model() -> interp.HookedTransformer:
    return interp.HookedTransformer.from_pretrained("groundtruth-induction")


@pytest.fixture(scope="module")
def by_head(model: interp.HookedTransformer) -> xr.Dataset:
    return interp.attribute(model, PROMPT, "d", "e", parts="head")


@pytest.fixture(scope="module")
def pictures(model: interp.HookedTransformer, by_head: xr.Dataset) -> dict[str, Callable[..., Axes]]:
    """Every plot with its arguments; `ax` is left open."""
    heads, lens = interp.heads(model), interp.logit_lens(model, PROMPT)
    _, cache = model.run_with_cache(PROMPT, "blocks.1.attn.hook_pattern")
    names = model.to_str_tokens(PROMPT)
    return {
        "heads": lambda ax=None: plot.heads(heads, ax=ax),
        "attention": lambda ax=None: plot.attention(cache["pattern", 1][0, 2], names, ax=ax),
        "attribution": lambda ax=None: plot.attribution(by_head, ax=ax),
        "attribution_map": lambda ax=None: plot.attribution_map(by_head, ax=ax),
        "logit_lens": lambda ax=None: plot.logit_lens(lens, model.text.pieces, tokens=names, ax=ax),
    }


NAMES = ("heads", "attention", "attribution", "attribution_map", "logit_lens")


def texts(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.texts]


@pytest.mark.parametrize("name", NAMES)
def test_a_plot_draws_on_the_axes_it_is_given_and_names_them(
    pictures: dict[str, Callable[..., Axes]], name: str
) -> None:
    figure, ax = plt.subplots()
    assert pictures[name](ax=ax) is ax
    assert ax.get_xlabel()
    assert ax.get_ylabel()
    assert ax.get_title()
    figure.canvas.draw()


@pytest.mark.parametrize("name", NAMES)
def test_a_plot_makes_its_own_figure_and_changes_no_global_state(
    pictures: dict[str, Callable[..., Axes]], name: str
) -> None:
    before = dict(mpl.rcParams)
    ax = pictures[name]()
    assert ax.figure in map(plt.figure, plt.get_fignums())
    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("heads", "attention mass"), ("attention", "attention (rows sum to 1)"),
        ("attribution_map", "contribution (logits)"), ("logit_lens", "probability of the top token"),
    ],
)  # fmt: skip
def test_the_colour_bar_names_the_number_and_its_unit(
    pictures: dict[str, Callable[..., Axes]], name: str, unit: str
) -> None:
    ax = pictures[name]()
    bar = ax.images[0].colorbar
    assert bar is not None
    assert bar.ax.get_ylabel() == unit


def test_heads_are_annotated_with_their_scores(model: interp.HookedTransformer) -> None:
    result = interp.heads(model)
    ax = plot.heads(result, "previous_token")
    np.testing.assert_array_equal(
        np.asarray(ax.images[0].get_array()), result.value.sel(score="previous_token")
    )
    assert texts(ax) == [f"{v:.2f}" for v in result.value.sel(score="previous_token").values.ravel()]
    assert ax.images[0].get_clim() == (0, 1)


def test_signed_maps_are_centred_on_zero(by_head: xr.Dataset) -> None:
    ax = plot.attribution_map(by_head)
    low, high = ax.images[0].get_clim()
    values = np.asarray(ax.images[0].get_array())
    assert low == -high == -np.abs(values).max()
    assert values[1, 2] == float(by_head.value.sel(part="L1H2")[0])


def test_the_waterfall_ends_at_the_total(by_head: xr.Dataset) -> None:
    ax = plot.attribution(by_head, top=4)
    last = ax.patches[-1]
    assert len(ax.patches) == 5
    assert last.get_x() + last.get_width() == pytest.approx(float(by_head.total[0]), rel=1e-5)
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels[0] == "L1H2"
    assert labels[-1] == f"{by_head.sizes['part'] - 4} others"


def test_the_waterfall_of_a_selection_ends_at_the_total_too(by_head: xr.Dataset) -> None:
    some = by_head.isel(part=[0, 3, 4])
    ax = plot.attribution(some)
    total, shown = float(some.total[0]), float(some.value[0].sum())
    *_, last = [(bar.get_x(), bar.get_width()) for bar in ax.patches if isinstance(bar, Rectangle)]
    assert last == pytest.approx((shown, total - shown), rel=1e-5)
    assert [tick.get_text() for tick in ax.get_yticklabels()][-1] == "parts not in this result"
    assert "parts not in this result" not in [
        tick.get_text() for tick in plot.attribution(by_head).get_yticklabels()
    ]


def test_maps_of_a_selection_are_named_by_its_layers_and_heads(
    model: interp.HookedTransformer, by_head: xr.Dataset
) -> None:
    """In another order, and with some left out: the names and numbers are those of the selection."""
    layers, heads = [1, 0], [2, 0]
    scores = interp.heads(model).sel(layer=layers, head=heads)
    entropy = interp.attention.attention_entropy(model, PROMPT).sel(layer=layers, head=heads)
    copies = interp.copying(model).sel(layer=layers, head=heads)
    for ax in (
        plot.heads(scores, "previous_token"), plot.head_labels(scores), plot.attention_entropy(entropy),
        plot.copying_map(copies),
    ):  # fmt: skip
        assert [tick.get_text() for tick in ax.get_yticklabels()] == ["1", "0"]
        assert [tick.get_text() for tick in ax.get_xticklabels()] == ["2", "0"]
    ax = plot.attribution_map(by_head.sel(part=["L1H2", "L0H2", "L1H0"]))
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["0", "1"]
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["0", "2"]
    value = by_head.value[0]
    drawn = np.ma.filled(ax.images[0].get_array(), np.nan)
    expected = [[np.nan, value.sel(part="L0H2")], [value.sel(part="L1H0"), value.sel(part="L1H2")]]
    np.testing.assert_array_equal(drawn, np.array(expected, dtype=float))


def test_the_pattern_is_drawn_query_down_key_across(model: interp.HookedTransformer) -> None:
    pattern = torch.eye(3)[[0, 0, 1]]
    ax = plot.attention(pattern, ["a", "\n", " c"])
    np.testing.assert_array_equal(np.asarray(ax.images[0].get_array()), pattern)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "↵", "·c"]


def test_a_token_that_looks_like_a_formula_is_drawn_as_it_is() -> None:
    ax = plot.attention(torch.eye(2), ["$x^$", "\x00"])
    ax.figure.canvas.draw()
    assert [label.get_text() for label in ax.get_yticklabels()] == [r"\$x^\$", "␀"]


def test_the_lens_shows_the_top_token_of_every_cell(model: interp.HookedTransformer) -> None:
    result = interp.logit_lens(model, "abc")
    ax = plot.logit_lens(result, model.text.pieces)
    assert texts(ax) == model.text.pieces(result.top_token[0, :, :, 0].values.ravel().tolist())


def test_a_map_without_any_signal_is_still_centred() -> None:
    zeros = xr.Dataset(
        {"value": (("prompt", "part"), np.zeros((1, 2))), "total": ("prompt", [0.0])},
        coords={"part": ["L0H0", "L0H1"]},
        attrs={"parts": "head"},
    )
    low, high = plot.attribution_map(zeros).images[0].get_clim()
    assert low == -high < 0


def test_text_is_dark_on_light_and_light_on_dark() -> None:
    _, ax = plt.subplots()
    image = heat_map(ax, np.array([[0.0, 1.0]]), ColourScale.mass("x"), title="t")
    annotate(ax, image, [["a", "b"]])
    assert [text.get_color() for text in ax.texts] == ["black", "white"]


def test_errors_say_what_was_required_and_what_arrived(
    model: interp.HookedTransformer, by_head: xr.Dataset
) -> None:
    with pytest.raises(KeyError, match=r"no score 'inductoin'.*nearest: induction"):
        plot.heads(interp.heads(model), "inductoin")
    with pytest.raises(ValueError, match=r"\[query, key\] of one head is required, got shape \[2, 3, 3\]"):
        plot.attention(torch.zeros(2, 3, 3))
    with pytest.raises(ValueError, match="2 tokens do not fit"):
        plot.attention(torch.eye(3), ["a", "b"])
    with pytest.raises(ValueError, match=r"parts='head' is required.*got parts='sublayer'"):
        plot.attribution_map(interp.attribute(model, PROMPT, "d", parts="sublayer"))
    with pytest.raises(ValueError, match="one token per position"):
        plot.logit_lens(interp.logit_lens(model, "abc"), model.text.pieces, tokens=["a"])
    _, ax = plt.subplots()
    image = heat_map(ax, np.eye(2), ColourScale.mass("x"), title="t")
    with pytest.raises(ValueError, match="one text per cell"):
        annotate(ax, image, [["a", "b"]])
