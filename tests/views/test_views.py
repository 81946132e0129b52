"""One spec per result: a number has one colour, one text and one name on the page, in a figure and in the live page."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import xarray as xr
from matplotlib import colormaps, pyplot as plt
from matplotlib.axes import Axes

import interp
from interp import plot
from interp.core.results import frame
from interp.pages import tables, view_ablation, view_attribution, view_lens, view_patching, views
from interp.pages.view_patching import DIRECTIONS
from interp.pages.views import CellRows
from interp.plot.canvas import COLOURS, ON_CELL
from interp.views.attribution import largest
from interp.views.heads import score_map
from interp.views.lenses import depth_labels, shown_depths, telling_layers, word_of
from interp.views.maps import MOST_IN_FIGURE, UNCHANGED, CellMap
from interp.views.scale import ColourScale

PROMPT = "When Mary and John went to the store, John gave a drink to"
CORRUPT = "When Mary and John went to the store, Mary gave a drink to"
METRIC = interp.metrics.logit_difference(" Mary", " John")
VALUES = np.array([-3.0, -0.5, 0.0, 0.2, 1.0, 2.5])


@pytest.fixture(scope="module")
def model() -> interp.HookedTransformer:
    return interp.HookedTransformer.from_pretrained("demo-4l")


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    plt.close("all")


@pytest.mark.parametrize(
    "scale",
    [
        ColourScale.signed(VALUES, "x"), ColourScale.removal(VALUES, "x"), ColourScale.removal(VALUES, "x", intact=1.0),
        ColourScale.around(0.3, VALUES, "x"), ColourScale.signed(1.0, "x"), ColourScale.mass("x", 2.5),
    ],
)  # fmt: skip
def test_a_level_is_the_place_on_the_colour_map(scale: ColourScale) -> None:
    _, ax = plt.subplots()
    image = ax.imshow(VALUES[None], cmap=COLOURS[scale.kind], vmin=scale.low, vmax=scale.high)
    levels = scale.levels(VALUES)
    shades = colormaps["Blues"](levels) if scale.kind == "mass" else colormaps["RdBu"]((levels + 1) / 2)
    inside = (scale.low <= VALUES) & (scale.high >= VALUES) | (scale.kind != "mass")
    assert np.abs(image.to_rgba(VALUES) - shades)[inside].max() < 3 / 256  # a step of a map of 256 colours
    assert scale.levels(np.array([scale.neutral, np.nan])).tolist() == [0.0, 0.0]
    assert scale.levels(np.array(scale.ends)).tolist() == [0.0 if scale.kind == "mass" else -1.0, 1.0]


def test_a_removed_part_that_speaks_for_the_metric_is_blue() -> None:
    assert ColourScale.removal(VALUES, "x").levels(np.array([-3.0]))[0] == 1.0
    assert ColourScale.signed(VALUES, "x").levels(np.array([-3.0]))[0] == -1.0


def drawn(ax: Axes) -> tuple[list[str], np.ndarray]:
    """Texts on the cells, row by row, and their colours."""
    image = ax.images[0]
    values = np.ma.filled(image.get_array().astype(float), np.nan)
    written = {text.get_position(): text.get_text() for text in ax.texts if text.get_gid() == ON_CELL}
    texts = [written[column, row] for row, column in np.ndindex(values.shape)]
    return texts, np.where(np.isnan(values)[..., None], 1.0, image.to_rgba(values)[..., :3]).reshape(-1, 3)


def agree(ax: Axes, page: CellRows) -> None:
    """The figure has the texts of the page, and every cell its colour."""
    cells = [cell for row in page for cell in row]
    texts, colours = drawn(ax)
    assert [text.replace("\n", " ") for text in texts] == [cell.text for cell in cells]
    levels = np.array([0.0 if cell.idle else cell.level for cell in cells])
    mass = ax.images[0].get_cmap().name == COLOURS["mass"]
    shades = colormaps["Blues"](levels) if mass else colormaps["RdBu"]((levels + 1) / 2)
    known = ~np.array([cell.idle for cell in cells])
    assert np.abs(colours - shades[:, :3])[known].max() < 3 / 256
    assert (colours[~known] == 1.0).all()
    assert len({cell.text for cell in cells}) > 3, "an empty map proves nothing"


def test_scores_of_heads(model: interp.HookedTransformer) -> None:
    found = interp.heads(model)
    for score in ("induction", "previous_token", "first_token"):
        agree(plot.heads(found, score), views.head_map(tables.heads(found), score))


def test_scores_of_weights(model: interp.HookedTransformer) -> None:
    previous = interp.heads(model).value.sel(score="previous_token")
    found = interp.copying(model, ranks=False, previous=previous)
    for score in ("eigenvalue", "matching"):
        agree(plot.copying_map(found, score), views.circuit_map(frame(found), score))


def test_attribution(model: interp.HookedTransformer) -> None:
    found = interp.attribute(model, PROMPT, " Mary", " John", parts="head")
    page = view_attribution.attribution(tables.attribution(found))
    ax = plot.attribution_map(found)
    heads = [row[: model.cfg.n_heads] for row in page.cells]
    texts, _ = drawn(ax)
    assert texts == [cell.text for row in heads for cell in row]
    bars = plot.attribution(found)
    names = [label.get_text() for label in bars.get_yticklabels()]
    shown = {step.part for band in page.waterfalls["part"].bands for step in band.steps}
    assert shown == set(names)
    assert [bar.added.part for bar in page.bars][: len(names) - 1] == names[:-1]


@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_patching(model: interp.HookedTransformer, direction: str) -> None:
    found = {
        site: interp.patch(model, PROMPT, CORRUPT, site, metric=METRIC, direction=direction)
        for site in ("resid_pre", "z")
    }
    both = {
        f"{site} {way}": one.assign_attrs(direction=way) for way in DIRECTIONS for site, one in found.items()
    }
    table = tables.patching(both, model.text.pieces(model.text.batch(PROMPT).tokens[0]))
    page = view_patching.patching(table)[direction]
    agree(plot.patching(found["resid_pre"]), page.maps["resid_pre"])
    heads = plot.patching(found["z"])
    agree(heads, page.heads)
    low, high = (float(end.replace("−", "-")) for end in page.ends)
    intact = float(direction == "noise")
    assert heads.images[0].get_clim() == (min(low, high) + intact, max(low, high) + intact)


def test_ablation(model: interp.HookedTransformer) -> None:
    found = interp.ablate(model, PROMPT, change=interp.edits.Zero(), metric=METRIC)
    rows = frame(found)
    rows = rows.assign(change="zero", direct=rows.value, head=rows["head"])
    agree(plot.ablation(found), view_ablation.ablation(rows)["zero"].total)


def test_lenses(model: interp.HookedTransformer) -> None:
    found = interp.logit_lens(model, PROMPT, answer=" Mary")
    page = view_lens.lens(tables.logit_lens(interp.logit_lens(model, PROMPT), found), " Mary")
    ax = plot.logit_lens(found)
    agree(ax, [depth.cells for depth in page])
    assert [label.get_text() for label in ax.get_yticklabels()] == [depth.label for depth in page]
    back = interp.backward_lens(model, PROMPT, " Mary", matrices=["W_in", "W_out", "W_O", "W_V"])
    panels = view_lens.backward_lens(tables.backward_lens(back), " Mary", model.cfg.d_vocab)
    assert {panel.matrix for panel in panels} <= set(map(str, back.matrix.values)) and panels
    for panel in panels:
        ax = plot.backward_lens(back, matrix=panel.matrix)
        agree(ax, [depth.cells for depth in panel.rows])
        framed = {(int(p.get_y() + 0.5), int(p.get_x() + 0.5)) for p in ax.patches}
        marks = [[cell.marked for cell in depth.cells] for depth in panel.rows]
        assert framed == {(int(row), int(column)) for row, column in np.argwhere(marks)}


# --- the rules by which they are cut and named ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("depths", "labels"),
    [
        (["L0.resid", "L1.resid", "L1.resid_post"], ["embedding", "after layer 0", "output"]),
        (["L0.resid", "L7.resid"], ["embedding", "after layer 6"]),
        (["L0.resid_post", "L1.resid_post"], ["after layer 0", "after layer 1"]),
        (["L0.resid_mid", "L1.resid_mid"], ["L0.resid_mid", "L1.resid_mid"]),
        (["blocks.0.hook_resid_pre", "blocks.0.hook_resid_post"], ["embedding", "output"]),
        (["L4.resid_post"], ["output"]),
    ],
)
def test_depths_in_words(depths: list[str], labels: list[str]) -> None:
    assert depth_labels(depths) == labels


def test_shown_depths_stand_evenly_apart() -> None:
    assert shown_depths(16) == [*range(16)] and shown_depths(3) == [0, 1, 2]
    many = shown_depths(81)
    assert len(many) == 16 and many[0] == 0 and many[-1] == 80 and set(np.diff(many)) <= {5, 6}


def test_layers_that_tell_are_the_largest_and_those_that_name_the_answer_by_turns() -> None:
    delta = np.array([[1.0, 0], [4.0, 0], [3.0, 0], [2.0, 0]])
    marked = np.array([[True, False], [False, False], [False, False], [True, False]])
    assert telling_layers(delta, marked) == [1, 3, 2, 0]


def test_the_largest_parts_and_the_others() -> None:
    assert largest([1.0, -3.0, 2.0, 0.5], 2) == ([1, 2], [0, 3])
    assert largest([1.0, -3.0, 2.0], 2) == ([1, 2, 0], []), "a single other is shown by itself"


def test_a_word_is_preferred_to_a_piece() -> None:
    assert word_of(["ing", " a", " drink"]) == " drink" and word_of(["ing", " a"]) == "ing"


def test_what_a_map_writes() -> None:
    view = CellMap(
        np.array([[1.0, -0.001], [np.nan, 12.3]]), ColourScale.signed(1.0, "x"), sign=True, wide=10.0,
        idle=np.array([[True, False], [False, False]]),
    )  # fmt: skip
    assert view.texts == [[UNCHANGED, "0.00"], ["", "+12"]]
    assert view.levels.tolist() == [[0.0, -0.001], [0.0, 1.0]]
    assert view.names == (["0", "1"], ["0", "1"])


@pytest.mark.parametrize("make", [lambda n: score_map("induction", np.zeros((n, 10)), "attention mass", 0.0)])
def test_a_figure_has_texts_while_they_fit(make: Callable[[int], CellMap]) -> None:
    few = plot.canvas.draw(None, make(MOST_IN_FIGURE // 10), cell=(0.5, 0.4))
    many = plot.canvas.draw(None, make(MOST_IN_FIGURE // 10 + 1), cell=(0.5, 0.4))
    assert len(few.texts) == MOST_IN_FIGURE and not many.texts


def test_the_live_page_names_depths_as_the_report(model: interp.HookedTransformer) -> None:
    from threading import Event

    from interp.serve import answers, asks
    from interp.serve.session import Session

    session, ask = Session(model), asks.Look(prompt="When Mary and", tab="tab")
    shown = answers.look(session, ask, session.pair(ask, Event()), Event())
    lens = shown["lens"]
    assert isinstance(lens, list)
    depths = interp.logit_lens(model, "When Mary and").depth.values
    assert [row["depth"] for row in lens] == depth_labels([str(depth) for depth in depths])


def test_a_result_of_no_name_keeps_its_tokens(model: interp.HookedTransformer) -> None:
    found = interp.logit_lens(model, "When Mary and", sites="resid_post")
    bare: xr.Dataset = found.drop_vars("token")
    ax = plot.logit_lens(bare, most=2)
    assert ax.get_xlabel() == "position" and len(ax.get_yticklabels()) == 2


def test_fewer_than_two_depths_are_refused(model: interp.HookedTransformer) -> None:
    with pytest.raises(ValueError, match="most must be 2 or more depths, got 1"):
        plot.logit_lens(interp.logit_lens(model, "When Mary and"), most=1)
