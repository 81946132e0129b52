"""The lenses made ready for the template: what the stream says at each depth, and what a training step would write."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, zip_longest
from operator import attrgetter

import pandas as pd

from interp.core.visible import visible
from interp.lenses.backward_lens import NO_UPDATE, THRESHOLD
from interp.lenses.factors import WRITERS, why_not
from interp.model.config import ModelConfig
from interp.model.parts import Part
from interp.pages.views import MapCell, records
from interp.pages.wording import number, probability

MOST_DEPTHS = 16
"""Depths of a lens, and layers of the backward lens, that are rows of the page; of more a choice."""
FEW_LAYERS = 6
"""Layers that the backward lens opens on, of models with more than `MANY_LAYERS`; the others are shown on demand."""
MANY_LAYERS = 8
WHOLE_WORD = re.compile(r"\s[^\W\d_]{2,}")
"""A token that is a word by itself: a space and at least two letters."""
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
    ranked = records(LensRow, table)
    cells: dict[str, list[MapCell]] = {}
    for (depth, _), rows in groupby(ranked, key=attrgetter("depth", "pos")):
        cells.setdefault(depth, []).append(_lens_cell(list(rows), answer))
    inner = [f"after layer {i}" for i in range(len(cells) - 2)]
    labels = ["embedding", *inner, "output"] if len(cells) > 1 else ["output"]
    return folded([Depth(name, label, row) for (name, row), label in zip(cells.items(), labels, strict=True)])


def folded(depths: list[Depth]) -> list[Depth]:
    """The depths, all but `MOST_DEPTHS` folded: those stand evenly apart, the first and the last among them."""
    last = len(depths) - 1
    shown = {round(i * last / (MOST_DEPTHS - 1)) for i in range(MOST_DEPTHS)}
    return [replace(depth, folded=last >= MOST_DEPTHS and i not in shown) for i, depth in enumerate(depths)]


def fitted(table: pd.DataFrame, answer: str) -> dict[str, list[Depth]]:
    """The view of every fitted lens, by its name."""
    found: dict[str, list[Depth]] = {}
    for name, part in table.groupby("lens", sort=False):
        cells: dict[str, list[MapCell]] = {}
        for (depth, _), rows in groupby(records(FittedRow, part), key=attrgetter("depth", "pos")):
            cells.setdefault(depth, []).append(_lens_cell(list(rows), answer))
        last = len(cells) - 1
        found[str(name)] = folded(
            [
                Depth(depth, "output" if i == last else depth_in_words(depth), row)
                for i, (depth, row) in enumerate(cells.items())
            ]
        )
    return found


def depth_in_words(depth: str) -> str:
    """Where a state is, in words."""
    part = Part.of(depth)
    assert part.layer is not None
    before = part.kind == "resid"
    return "embedding" if before and not part.layer else f"after layer {part.layer - before}"


def _lens_cell(ranked: Sequence[LensRow], answer: str) -> MapCell:
    """One depth and position from the rows of its top tokens, best first."""
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
    return MapCell(visible(first.word), first.top_prob, "\n".join(lines))


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
        rows: dict[int, list[MapCell]] = {}
        for (layer, _), each in groupby(ranked, key=attrgetter("layer", "pos")):
            rows.setdefault(layer, []).append(_backward_cell(list(each), answer, largest, writes, n_vocab))
        order = _telling(rows)
        opens = order[: FEW_LAYERS if len(rows) > MANY_LAYERS else MOST_DEPTHS]
        depths = [
            Depth(str(Part("block", layer)), f"layer {layer}", rows[layer], folded=layer not in opens)
            for layer in sorted(order[:MOST_DEPTHS])
        ]
        summary = _largest_step(ranked, rows)
        panels.append(LensPanel(str(matrix), MATRICES[str(matrix)], depths, largest, summary))
    return panels


def _telling(rows: dict[int, list[MapCell]]) -> list[int]:
    """The layers, those that tell most first: the largest norms, and by turns layers that name the answer."""
    size = {layer: max(cell.level for cell in cells) for layer, cells in rows.items()}
    by_size = sorted(size, key=lambda layer: -size[layer])
    naming = [layer for layer in by_size if any(cell.marked for cell in rows[layer])]
    return [
        *dict.fromkeys(layer for pair in zip_longest(by_size, naming) for layer in pair if layer is not None)
    ]


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


def word_of(words: Sequence[str]) -> str:
    """The first of some tokens that is a whole word; the first one where none is."""
    return next((word for word in words if WHOLE_WORD.fullmatch(word)), words[0])


def _backward_cell(
    ranked: list[BackwardRow], answer: str, largest: float, writes: bool, n_vocab: int
) -> MapCell:
    """One layer and position from the rows of its tokens, the extreme ones first; marked if it names the answer."""
    first = ranked[0]
    level = first.delta / largest if largest else 0.0
    lines = [
        f"‖δ‖ {first.delta:.3g} ({number(100 * level, 1)} % of the largest), ‖x‖ {first.x:.3g}",
    ]
    if first.answer_rank < 0:
        return MapCell(NO_UPDATE, level, "\n".join([*lines, f"{NO_UPDATE}: {IDLE}"]))
    side = "δ" if writes else "x"
    lines += [
        f"update ‖x‖‖δ‖ {number(100 * first.relative_update, 1)} % of the largest",
        f"least probable of {side}: {' '.join(visible(row.bottom_word) for row in ranked)}",
        f"most probable of {side}: {' '.join(visible(row.top_word) for row in ranked)}",
        f"the answer {visible(answer)}: rank {first.answer_rank + 1}",
    ]
    words, extreme = (
        ([row.bottom_word for row in ranked], n_vocab - 1)
        if writes
        else ([row.top_word for row in ranked], 0)
    )
    marked = first.answer_rank == extreme
    return MapCell(visible(words[0] if marked else word_of(words)), level, "\n".join(lines), marked)


def why_these(config: ModelConfig) -> str | None:
    """Why the backward lens shows the matrices of attention; None if it shows those of the MLP."""
    reason = why_not(config, "W_in")
    return None if reason is None else f"This model {reason}: shown are the matrices of attention."
