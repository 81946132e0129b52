"""The runs of a sweep: which cells of which sites are changed in each, and how a thousand such edits become a few.

Edits whose change is data (`Edit.planned`) say what they touch, so those of many variants at one site are a handful of
index assignments. A function of the cells runs on the rows of its own variant.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from interp.core.axes import describe, shape_text
from interp.core.boundary import public
from interp.core.transfers import to_device
from interp.data.batch import Batch
from interp.model import sites
from interp.model.config import ModelConfig
from interp.model.edits import (
    COLUMNS,
    POSITIONS,
    Add,
    Change,
    Edit,
    Mean,
    PositionIndex,
    Ready,
    Resample,
    Set,
    Swap,
)
from interp.model.layout import Layout, PerRow, PositionError
from interp.model.parts import Part
from interp.passes.edited import in_batch, names_tokens


@public(renamed={"puts": "edits"})
@dataclass(frozen=True, eq=False)
class Variant:
    """One run of a sweep: some edits, carried out in this order, and a name for it."""

    edits: Sequence[Edit] = ()
    label: str = ""


class PlacedEdit(NamedTuple):
    """An edit of one cell (per axis that it names), checked: what a sweep computes with."""

    site: str
    at: Mapping[str, int | tuple[int, ...]]
    """Index by axis letter, counted from the front; of an axis of positions the column, one for each example where they
    differ, -1 where an example has no such token.
    """
    change: Change
    named: Mapping[str, PositionIndex]
    """The indices as the edit names them: positions of tokens."""

    @property
    def planned(self) -> bool:
        """Whether the change is data, and its cells stand in one column of every example."""
        return isinstance(self.change, Ready) and len(self.at) == len(self.named)

    def as_edit(self, rows: tuple[int, ...] | None = None) -> Edit:
        """This edit as an `Edit` of a pass, of these rows only."""
        return Edit(self.site, self.change, {sites.WORDS[axis]: i for axis, i in self.named.items()}, rows)

    def columns(self, axis: str, examples: int) -> np.ndarray:
        """The index of each example along this axis, `[example]`."""
        return np.broadcast_to(np.array(self.at[axis]), (examples,))


def placed(variant: Variant, config: ModelConfig, batch: Batch) -> tuple[PlacedEdit, ...]:
    """The edits of a variant, checked; a residual that leaves a block enters the next.

    Raises:
        KeyError: an unknown site.
        ValueError: a site after the last block, values that do not fit or were not looked up, or an edit of some
            rows only.
        IndexError: an index outside the site.
        PositionError: a position that an example lacks.
    """
    placed_edits: list[PlacedEdit] = []
    layout = batch.layout
    for edit in in_batch(variant.edits, batch):
        if edit.rows is not None:
            raise ValueError(f"an edit of a variant concerns all its rows; that of {edit.name} names some")
        if isinstance(edit.change, Mean | Resample):
            raise ValueError(
                f"{type(edit.change).__name__}() at {edit.name} stands for values that have to be looked up first: "
                "`ablate` does, and so does model.edited(...)"
            )
        name = canonical(edit.site, config)
        if isinstance(edit.where, Part):
            edit.where.within(config)
        sizes = _axis_sizes(edit, config, *batch.tokens.shape)
        singles = [edit] if layout.documents is not None and names_tokens(edit) else edit.singly()
        placed_edits += _without_repeats(
            [
                PlacedEdit(
                    name, _indices_by_axis(single, sizes, layout, len(batch)), single.change, single.cells
                )
                for single in singles
            ],
            len(batch),
        )
    return tuple(placed_edits)


def _without_repeats(edits: Sequence[PlacedEdit], examples: int) -> list[PlacedEdit]:
    """The edits without those that name a cell twice: in a row of three tokens 1 and -2 are the same position."""
    if not any(isinstance(i, int) and i < 0 for edit in edits for i in edit.named.values()):
        return list(edits)
    distinct, seen = [], set()
    for edit in edits:
        axis = next((axis for axis in POSITIONS if axis in edit.at), None)
        if axis is None:
            distinct.append(edit)
            continue
        cells = [tuple(edit.columns(a, examples)[row] for a in edit.at) for row in range(examples)]
        repeated = [(row, cell) in seen for row, cell in enumerate(cells)]
        seen |= set(enumerate(cells))
        if not any(repeated):
            distinct.append(edit)
        elif not all(repeated):
            columns = np.where(repeated, -1, edit.columns(axis, examples))
            distinct.append(edit._replace(at={**edit.at, axis: tuple(columns.tolist())}))
    return distinct


def layer_of(name: str, config: ModelConfig) -> int:
    """The block during which a site is visited, the first for embeddings.

    Raises:
        KeyError: an unknown site.
        ValueError: a site after the last block.
    """
    _, layer = sites.find(name, config)
    if layer is None and name not in sites.EMBEDDING_SITES:
        raise ValueError(f"a sweep works before and inside the blocks; {name!r} is after them")
    return 0 if layer is None else layer


def canonical(name: str, config: ModelConfig) -> str:
    """The stream that leaves a block under the name of the stream that enters the next, where there is one."""
    layer = layer_of(name, config)
    leaves = name.endswith(".hook_resid_post") and not config.norms_sum
    return f"blocks.{layer + 1}.hook_resid_pre" if leaves and layer + 1 < config.n_layers else name


def _axis_sizes(edit: Edit, config: ModelConfig, examples: int, columns: int) -> dict[str, int | None]:
    """The length of every axis of the site, None where unknown; ValueError for values that do not fit."""
    letters = sites.axes_of(edit.site).split()[1:]
    known: dict[str, int | None] = {
        **dict.fromkeys(letters),
        **{axis: columns for axis in (*COLUMNS, "k") if axis in letters},
    }
    values = getattr(edit.change, "values", None)
    if isinstance(values, Tensor) and values.ndim > len(letters):
        rows, first = len(values), getattr(edit.change, "first", 0)
        sizes = dict(zip(letters, values.shape[1:], strict=False))
        fits = values.ndim == len(letters) + 1 and (rows == 1 or 0 <= first <= rows - examples)
        if not fits or any(sizes[axis] != columns for axis in COLUMNS if axis in sizes):
            raise ValueError(
                f"values for {edit.name} must be {describe(sites.axes_of(edit.site))} of 1 or {examples} rows and "
                f"{columns} columns, got {shape_text(values.shape)}"
            )
        known |= sizes
    for axis, count in (
        ("h", config.n_heads),
        ("g", config.kv_heads),
        ("m", getattr(config.mlp, "d_mlp", None)),
    ):
        if axis in known and known[axis] is None:
            known[axis] = count
    return known


def _indices_by_axis(
    edit: Edit, sizes: Mapping[str, int | None], layout: Layout, examples: int
) -> dict[str, int | tuple[int, ...]]:
    """The indices of an edit by axis, positions as columns, negative ones counted from the end.

    Axes with several indices are left out, and so are positions in packed rows, where one position lies in another
    column of each document.
    """
    indices: dict[str, int | tuple[int, ...]] = {}
    for axis, i in edit.cells.items():
        size = sizes[axis]
        plain = layout.uniform and not layout.ends_early and not isinstance(i, PerRow | str)
        if size is not None and axis in POSITIONS and not plain:
            if layout.documents is None:
                indices[axis] = _column_of_examples(edit, i, layout, (examples, size))
            continue
        if not isinstance(i, int):
            continue
        if size is not None and not -size <= i < size:
            what = f"{edit.name} has {size} along {sites.WORDS[axis]!r}, got index {i}"
            raise PositionError(f"{what}: row 0 has {size} tokens") if axis in POSITIONS else IndexError(what)
        indices[axis] = i if size is None else i % size
    return indices


def _column_of_examples(
    edit: Edit, pos: PositionIndex, layout: Layout, shape: tuple[int, int]
) -> int | tuple[int, ...]:
    """The column of the edit's position in each example, -1 if missing; one number if all columns are equal."""
    try:
        tokens = layout.find(pos, shape)
    except PositionError as cause:
        raise PositionError(f"the edit of {edit.name}: {cause}") from cause
    columns = tokens.columns if tokens.present is None else tokens.columns.masked_fill(~tokens.present, -1)
    by_example = tuple(columns[:, 0].tolist())
    return by_example[0] if len(set(by_example)) == 1 and by_example[0] >= 0 else by_example


def on_device(change: Change, device: torch.device, moved: dict[int, tuple[Tensor, Tensor]]) -> Change:
    """The change with its values on the device; each tensor is copied once, however many edits share it.

    Args:
        moved: id of a tensor on the host -> its copy on the device, and the tensor itself; added to.
    """
    values = getattr(change, "values", None)
    if not isinstance(change, Set | Swap | Add) or not isinstance(values, Tensor):
        return change
    if values.device == device or values.device.type != "cpu":
        return change
    moved_values, _ = moved.setdefault(id(values), (to_device(values, device), values))
    return replace(change, values=moved_values)


@dataclass(frozen=True, eq=False)
class _Wave:
    """Planned edits of one kind, at most one for each of some variants."""

    change: Ready
    axes: tuple[str, ...]
    slots: list[int] = field(default_factory=list)
    indices: list[list[int | tuple[int, ...]]] = field(default_factory=list)
    """Per slot, the index along every named axis, or one index per example."""
    firsts: list[int] = field(default_factory=list)


def changes(edits: Sequence[tuple[int, PlacedEdit]], copies: int, examples: int, start: int) -> list[Edit]:
    """The edits that carry out these `(slot, edit)`s in a pass of `copies` x `examples` rows, from column `start` on.

    Edits of one slot at one site are carried out in their order; edits of columns before `start` are left out.
    """
    by_site: dict[str, list[tuple[int, PlacedEdit]]] = defaultdict(list)
    for slot, edit in edits:
        if all(np.max(edit.at.get(axis, start)) >= start for axis in COLUMNS):
            by_site[edit.site].append((slot, edit))
    result: list[Edit] = []
    for site, at_site in by_site.items():
        for waves, free in _edits_in_turns(at_site):
            if waves:
                letters = sites.axes_of(site).split()[1:]
                result.append(Edit(site, _change_of_waves(waves, letters, copies, examples, start)))
            result += [
                edit.as_edit(tuple(range(slot * examples, (slot + 1) * examples))) for slot, edit in free
            ]
    return result


def _edits_in_turns(
    edits: Sequence[tuple[int, PlacedEdit]],
) -> Iterator[tuple[list[_Wave], list[tuple[int, PlacedEdit]]]]:
    """Waves of planned edits, each with the function edits that follow them, in the order of execution."""
    seen: dict[int, int] = defaultdict(int)
    steps: dict[int, list[tuple[int, PlacedEdit]]] = defaultdict(list)
    for slot, edit in edits:
        steps[seen[slot]].append((slot, edit))
        seen[slot] += 1
    waves: list[_Wave] = []
    for step in sorted(steps):
        waves += _waves([(slot, edit) for slot, edit in steps[step] if edit.planned])
        if free := [(slot, edit) for slot, edit in steps[step] if not edit.planned]:
            yield waves, free
            waves = []
    if waves:
        yield waves, []


def _waves(edits: Sequence[tuple[int, PlacedEdit]]) -> list[_Wave]:
    """The edits in waves: edits that name the same axes and share their values make one wave."""
    waves: dict[tuple[object, ...], _Wave] = {}
    for slot, edit in edits:
        change, axes = edit.change, tuple(edit.at)
        assert isinstance(change, Ready)
        same: object = (type(change), id(change.values)) if isinstance(change, Set) else change
        wave = waves.setdefault((axes, same), _Wave(change, axes))
        wave.slots.append(slot)
        wave.indices.append(list(edit.at.values()))
        wave.firsts.append(change.first if isinstance(change, Set | Swap) else 0)
    return list(waves.values())


def _change_of_waves(
    waves: Sequence[_Wave], letters: Sequence[str], copies: int, examples: int, start: int
) -> Callable[[Tensor], Tensor]:
    """A function that carries out the waves in place on a site's value `[(copies examples) ...]`."""

    def change(value: Tensor) -> Tensor:
        cells = value.unflatten(0, (copies, examples))
        for wave in waves:
            _write_wave(cells, wave, letters, start)
        return value

    return change


def _write_wave(
    cells: Shaped[Tensor, "copies examples ..."], wave: _Wave, letters: Sequence[str], start: int
) -> None:
    """Carry out one wave on `cells` by one index assignment; column 0 of `cells` is column `start` of the examples."""
    device, n = cells.device, cells.shape[1]
    # both [n 1]: the variant that each edit belongs to, and its first row in the values
    slots, firsts = to_device([list(pair) for pair in zip(wave.slots, wave.firsts, strict=True)], device).mT[
        ..., None
    ]
    examples = torch.arange(n, device=device)
    into: list[Tensor | slice] = [slots, examples]
    covered: Tensor | None = None
    for letter in letters:
        if letter not in wave.axes:
            into.append(slice(None))
            continue
        named = [indices[wave.axes.index(letter)] for indices in wave.indices]
        single = all(isinstance(i, int) for i in named)
        place = to_device([[i] if single else np.broadcast_to(i, n).tolist() for i in named], device)
        first = start if letter in COLUMNS else 0
        if not single:
            reached = place >= first
            covered = reached if covered is None else covered & reached
        into.append(place - first)
    # `into` indexes cells [copies examples *axes] -> [n examples *cells]
    new_values = _values_of_wave(wave, letters, start, into[2:], firsts, examples)
    if covered is not None and not bool(covered.all()):
        _write_where_present(cells, wave, into, new_values, covered)
    elif isinstance(wave.change, Set):
        assert new_values is not None
        cells[tuple(into)] = to_device(new_values, device).to(cells.dtype)
    else:
        cells[tuple(into)] = wave.change(cells[tuple(into)], new_values).to(cells.dtype)


def _write_where_present(
    cells: Shaped[Tensor, "copies examples ..."],
    wave: _Wave,
    into: Sequence[Tensor | slice],
    new_values: Tensor | None,
    covered: Shaped[Tensor, "n examples"],
) -> None:
    """Carry out one wave on the examples that have the tokens: `covered` is True there."""
    spread = [i if isinstance(i, slice) else i.expand(covered.shape) for i in into]
    index = tuple(i if isinstance(i, slice) else i[covered] for i in spread)
    if new_values is not None:
        shape = cells[tuple(i if isinstance(i, slice) else i.clamp_min(0) for i in spread)].shape
        new_values = to_device(new_values, cells.device).expand(shape)[covered]
    old = cells[index]
    new = new_values if isinstance(wave.change, Set) else wave.change(old, new_values)
    assert new is not None
    cells[index] = new.to(cells.dtype)


def _values_of_wave(
    wave: _Wave,
    letters: Sequence[str],
    start: int,
    places: Sequence[Tensor | slice],
    firsts: Int[Tensor, "n 1"],
    examples: Int[Tensor, "examples"],
) -> Tensor | None:
    """The values that a wave writes into its cells; None for a change without values."""
    values = getattr(wave.change, "values", None)
    if values is None:
        return None
    if not isinstance(values, Tensor):
        return torch.tensor(values)
    if values.ndim <= len(letters):
        return values
    where = values.device
    rows = firsts + examples if len(values) > 1 else torch.zeros_like(firsts)
    out_of: list[Tensor | slice] = [to_device(rows, where)]
    for letter, place in zip(letters, places, strict=True):
        skipped = start if letter in COLUMNS else 0
        if isinstance(place, slice):
            out_of.append(slice(skipped, None))
        else:
            column = place + skipped if skipped else place
            out_of.append(
                to_device(
                    column.clamp_min(0) if len(place.shape) == 2 and place.shape[1] > 1 else column, where
                )
            )
    return values[tuple(out_of)]
