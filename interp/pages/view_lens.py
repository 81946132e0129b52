"""The lenses made ready for the template: what the stream says at each depth, and what a training step would write."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import attrgetter

import pandas as pd

from interp.core.visible import visible
from interp.lenses.backward_lens import NO_UPDATE, THRESHOLD
from interp.lenses.factors import WRITERS, why_not
from interp.model.config import ModelConfig
from interp.model.parts import Part
from interp.pages.views import MapCell, array, cells, records
from interp.views.lenses import (
    MOST_DEPTHS,
    backward_map,
    depth_labels,
    lens_map,
    shown_depths,
    telling_layers,
    word_of,
)
from interp.views.maps import CellMap
from interp.views.writing import number, probability

FEW_LAYERS = 6
"""Layers that the backward lens opens on, of models with more than `MANY_LAYERS`; the others are shown on demand."""
MANY_LAYERS = 8
IDLE = f"at most {100 * THRESHOLD:g} % of the largest update"
"""When a cell shows `NO_UPDATE`, in words."""
LISTED = 5
"""Top tokens in the explanation of a cell of the logit lens."""
MATRICES = {
    "mlp_before.W_out": "writes what the neurons of the MLP before attention found to the stream",
    "mlp_before.W_in": "reads the stream for the neurons of the MLP before attention",
    "W_out": "writes what the MLP's neurons found to the stream",
    "W_in": "reads the stream for the MLP's neurons",
    "W_O": "writes what heads moved to the stream",
    "W_V": "reads from the stream what heads move",
}
"""The matrices of the backward lens and what each does."""


@dataclass(frozen=True)
class Depth:
    """One row of a lens."""

    name: str
    label: str
    cells: list[MapCell]
    folded: bool = False
    """Whether the row is shown on demand."""


@dataclass(frozen=True)
class LensRow:
    """One row of the lens table: a top token at one depth and position, and what is known of that place."""

    depth: str
    pos: int
    token: str
    """The token at which the stream is read."""
    word: str
    """The word of the lens."""
    top_prob: float
    entropy: float
    kl: float
    next_rank: int
    next_prob: float
    answer_rank: int
    answer_prob: float


@dataclass(frozen=True)
class FittedRow(LensRow):
    """One row of the table of fitted lenses: how sure the word is, too."""

    lens: str
    low: float
    high: float
    stays: float


@dataclass(frozen=True)
class BackwardRow:
    """One row of the backward lens' table: the n-th most and least probable token of one layer and position."""

    layer: int
    pos: int
    token: str
    x: float
    delta: float
    relative_update: float
    answer_rank: int
    top_word: str
    """Empty, as `bottom_word`, where nothing would be written."""
    bottom_word: str


@dataclass(frozen=True)
class LensPanel:
    """The backward lens of one matrix: rows of layers, and what to see in them."""

    matrix: str
    meaning: str
    rows: list[Depth]
    largest: float
    """Largest norm of delta, where the colour is full; 0 if nothing would be written anywhere."""
    summary: str
    """Where the step is largest and how many cells name the answer; empty if nothing would be written."""


def lens(table: pd.DataFrame, answer: str) -> list[Depth]:
    """The lens by depth, the embedding first; every cell explains its top tokens and the ranks of what came next."""
    return _depths(records(LensRow, table), answer)


def fitted(table: pd.DataFrame, answer: str) -> dict[str, list[Depth]]:
    """The view of every fitted lens, by its name."""
    groups = table.groupby("lens", sort=False)
    return {str(name): _depths(records(FittedRow, part), answer) for name, part in groups}


def _depths(ranked: Sequence[LensRow], answer: str) -> list[Depth]:
    """The rows of a lens, all but `MOST_DEPTHS` folded."""
    places: dict[str, list[list[LensRow]]] = {}
    for (depth, _), rows in groupby(ranked, key=attrgetter("depth", "pos")):
        places.setdefault(depth, []).append(list(rows))
    best = [[cell[0] for cell in row] for row in places.values()]
    labels, shown = depth_labels(list(places)), shown_depths(len(places))
    words, tokens = [[cell.word for cell in row] for row in best], [cell.token for cell in best[0]]
    view = lens_map(words, array(best, "top_prob"), labels, tokens)
    every = cells(view, list(places.values()), partial(_tip, answer=answer))
    return [
        Depth(name, labels[i], row, folded=i not in shown)
        for i, (name, row) in enumerate(zip(places, every, strict=True))
    ]


def _tip(ranked: Sequence[LensRow], answer: str) -> str:
    """The explanation of one depth and position, from the rows of its top tokens, best first."""
    first = ranked[0]
    lines = [
        *(f"{probability(row.top_prob):>6}  {visible(row.word)}{_sure(row)}" for row in ranked[:LISTED]),
        f"entropy {first.entropy:.2f} nats, KL(final ‖ depth) {first.kl:.2f} nats",
    ]
    if first.next_rank >= 0:
        lines.append(f"next in the prompt: rank {first.next_rank + 1}, {probability(first.next_prob)}")
    lines.append(
        f"the answer {visible(answer)}: rank {first.answer_rank + 1}, {probability(first.answer_prob)}"
    )
    return "\n".join(lines)


def _sure(row: LensRow) -> str:
    """How sure a word of a resampled lens is."""
    if not isinstance(row, FittedRow) or row.stays != row.stays:
        return ""
    return f"  rank {row.low + 1:.0f} to {row.high + 1:.0f}, listed by {100 * row.stays:.0f} %"


# --- backwards ------------------------------------------------------------------------------------------------------


def backward_lens(table: pd.DataFrame, answer: str, n_vocab: int) -> list[LensPanel]:
    """One panel per matrix: cells coloured by the norm of delta, named by the token at the end that is read."""
    panels = []
    for matrix, part in table.groupby("matrix", sort=False):
        writes = matrix in WRITERS
        ranked = records(BackwardRow, part.fillna({"top_word": "", "bottom_word": ""}))
        largest = max(row.delta for row in ranked)
        places: dict[int, list[list[BackwardRow]]] = {}
        for (layer, _), each in groupby(ranked, key=attrgetter("layer", "pos")):
            places.setdefault(layer, []).append(list(each))
        view = _view(places, writes, n_vocab)
        tip = partial(_backward_tip, answer=answer, view=view, writes=writes)
        rows = cells(view, list(places.values()), tip)
        assert view.marked is not None
        order = telling_layers(view.values, view.marked)
        opens = order[: FEW_LAYERS if len(rows) > MANY_LAYERS else MOST_DEPTHS]
        layers = list(places)
        depths = [
            Depth(str(Part("block", layers[i])), f"layer {layers[i]}", rows[i], folded=i not in opens)
            for i in sorted(order[:MOST_DEPTHS])
        ]
        summary = _largest_step(ranked, dict(zip(layers, rows, strict=True)))
        panels.append(LensPanel(str(matrix), MATRICES[str(matrix)], depths, largest, summary))
    return panels


def _view(places: Mapping[int, list[list[BackwardRow]]], writes: bool, n_vocab: int) -> CellMap:
    """The map of one matrix; cells are marked that name the answer first."""
    extreme = n_vocab - 1 if writes else 0

    def word(cell: list[BackwardRow]) -> str:
        if cell[0].answer_rank < 0:
            return NO_UPDATE
        words = [row.bottom_word if writes else row.top_word for row in cell]
        return visible(word_of(words, names_answer=cell[0].answer_rank == extreme))

    rows = list(places.values())
    first = [[cell[0] for cell in row] for row in rows]
    marked = array(first, "answer_rank", int) == extreme
    words, tokens = [[word(cell) for cell in row] for row in rows], [cell.token for cell in first[0]]
    return backward_map(words, array(first, "delta"), marked, list(places), tokens, "")


def _largest_step(ranked: list[BackwardRow], rows: dict[int, list[MapCell]]) -> str:
    """Where delta is largest, and in how many cells the answer is the extreme token."""
    most = max(ranked, key=lambda row: row.delta)
    if not most.delta:
        return ""
    names = [layer for layer, cells in rows.items() for cell in cells if cell.marked]
    spread = f", in layers {min(names)} to {max(names)}" if len({*names}) > 1 else ""
    return (
        f"The step is largest in layer {most.layer} at “{visible(most.token)}” ({most.pos}); {len(names)} of "
        f"{sum(map(len, rows.values()))} cells name the answer first{spread}."
    )


def _backward_tip(ranked: list[BackwardRow], answer: str, view: CellMap, writes: bool) -> str:
    """The explanation of one layer and position, from the rows of its tokens, the extreme ones first."""
    first = ranked[0]
    lines = [
        f"‖δ‖ {first.delta:.3g} ({number(100 * first.delta / view.scale.high, 1)} % of the largest), ‖x‖ {first.x:.3g}",
    ]
    if first.answer_rank < 0:
        return "\n".join([*lines, f"{NO_UPDATE}: {IDLE}"])
    side = "δ" if writes else "x"
    lines += [
        f"update ‖x‖‖δ‖ {number(100 * first.relative_update, 1)} % of the largest",
        f"least probable of {side}: {' '.join(visible(row.bottom_word) for row in ranked)}",
        f"most probable of {side}: {' '.join(visible(row.top_word) for row in ranked)}",
        f"the answer {visible(answer)}: rank {first.answer_rank + 1}",
    ]
    return "\n".join(lines)


def why_these(config: ModelConfig) -> str | None:
    """Why the backward lens shows the matrices of attention; None if it shows those of the MLP."""
    reason = why_not(config, "W_in")
    return None if reason is None else f"This model {reason}: shown are the matrices of attention."
