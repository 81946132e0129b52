"""How an edit is carried out on the value of a site: the cells that a pass computes, their indices, the new values.

Positions are found by the layout of the pass; where every row has them in one column, a cell is a plain index.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import torch
from jaxtyping import Int
from torch import Tensor

from interp.core.axes import describe, shape_text
from interp.core.transfers import to_device
from interp.model import sites
from interp.model.edits import (
    COLUMNS,
    POSITIONS,
    Edit,
    Mean,
    PositionIndex,
    Ready,
    Resample,
    Set,
    SiteAware,
    own_name,
)
from interp.model.layout import NEW, ByRole, Layout, PerRow, Places, PositionError, TextTokens, several


@dataclass(frozen=True)
class Span:
    """The columns that a pass computes, which follow `past` cached ones, and the layout of tokens in them."""

    past: int = 0
    layout: Layout = field(default_factory=Layout, compare=False)
    """Layout of all columns, those before the pass included."""
    source: Layout = field(default_factory=Layout, compare=False)
    """Layout of the rows that cross-attention reads."""
    only: Int[Tensor, "b n"] | None = field(default=None, compare=False)
    """Columns of each row at which sites after the blocks are computed; None = all."""
    width: int = 0
    """Number of columns, those before the pass included."""
    memory: dict[str, object] = field(default_factory=dict, compare=False)
    """Values that functions keep from one site of this pass to another."""


def edited(edit: Edit, value: Tensor, span: Span) -> Tensor:
    """The value of a site after an edit; the given tensor is left alone.

    Raises:
        IndexError: cells or rows that the value does not have.
        PositionError: tokens that a row lacks.
        ValueError: a change that returns another shape, or stands for values that were not looked up.
        RuntimeError: from whatever a function raises.
    """
    if _columns_differ_by_row(edit, span):
        return _edited_tokens(edit, value, span)
    index = index_of(edit, value.shape, span)
    if index is None:
        return value
    rows = None if edit.rows is None else _row_index(edit, value)
    new_value = value.clone() if rows is None else value.index_select(0, rows)
    for cell in index:
        new_value = _write_cells(edit, new_value, cell, span)
    new_value = new_value.to(value.dtype)
    return new_value if rows is None else value.index_copy(0, rows, new_value)


def _columns_differ_by_row(edit: Edit, span: Span) -> bool:
    """Whether the cells' columns may differ by row, or some cells may not be in this pass."""
    named = [axis for axis in POSITIONS if axis in edit.cells]
    if not named:
        return False
    layout = span.source if named == ["s"] else span.layout
    per_row = any(isinstance(edit.cells[axis], PerRow | ByRole | str) for axis in named)
    trimmed = span.only is not None and sites.is_late(edit.site)
    return per_row or trimmed or not layout.uniform or layout.ends_early


def _write_cells(edit: Edit, new_value: Tensor, index: CellIndex, span: Span) -> Tensor:
    """`new_value`, a private copy of the site's value, with the cells at `index` changed in place."""
    all_cells = len(index) == 1
    cells = new_value if all_cells else new_value[index].clone()
    values = own_values(edit, new_value.shape, index, span)
    new = _changed_cells(edit, cells, values, span)
    if all_cells:
        return new.clone() if isinstance(edit.change, Set) else new
    new_value[index] = new.to(new_value.dtype)
    return new_value


def _changed_cells(edit: Edit, cells: Tensor, values: Tensor | None, span: Span) -> Tensor:
    """The new values of some cells; `values` are those that the change brings for these cells, if any."""
    change = edit.change
    if isinstance(change, Ready):
        _check_sizes(edit, values, cells)
        return _checked_values(edit, lambda: change(cells, values), cells)
    if isinstance(change, Mean | Resample):
        raise ValueError(
            f"{type(change).__name__}() at {edit.name} stands for values that only a model and reference prompts give: "
            "hand it to model.edited(...) or an analysis, which look them up"
        )
    function = change.at_site(edit.site, span.memory) if isinstance(change, SiteAware) else change
    return _checked_values(edit, lambda: function(cells), cells)


CellIndex = tuple[slice | int | Tensor, ...]
"""An index into a value of a site; its first entry is the slice of batch rows."""


def index_of(edit: Edit, shape: Sequence[int], span: Span) -> list[CellIndex] | None:
    """Indices into a value of this shape, one per combination of several indices; None if no cell is in this pass.

    Raises:
        IndexError: an index outside the site.
    """
    letters = _letters(edit, shape)
    indices: list[list[int] | None] = []
    for axis, size in zip(letters, shape[1:], strict=True):
        if axis not in edit.cells:
            indices.append(None)
            continue
        present = _indices_in_pass(edit, axis, size, span)
        if not present:
            return None
        indices.append(present)
    if sum(axis_indices is not None and len(axis_indices) > 1 for axis_indices in indices) > 1:
        named = [axis_indices if axis_indices is not None else [None] for axis_indices in indices]
        return [(slice(None), *(slice(None) if i is None else i for i in cell)) for cell in product(*named)]
    return (
        [(slice(None), *(_axis_index(axis_indices) for axis_indices in indices))]
        if any(indices)
        else [(slice(None),)]
    )


def _letters(edit: Edit, shape: Sequence[int]) -> list[str]:
    """The axis letters of the site after the batch row. ValueError for a value with another number of axes."""
    letters = sites.axes_of(own_name(edit.site)).split()[1:]
    if len(shape) != len(letters) + 1:
        raise ValueError(f"{edit.name} holds {describe(' '.join(('b', *letters)))}, got {shape_text(shape)}")
    return letters


def _axis_index(indices: list[int] | None) -> slice | int | Tensor:
    if indices is None:
        return slice(None)
    return indices[0] if len(indices) == 1 else torch.tensor(indices, device="cpu")


def _indices_in_pass(edit: Edit, axis: str, size: int, span: Span) -> list[int]:
    """The indices along an axis that this pass computes, counted from its first column; equal for all rows."""
    named = edit.cells[axis]
    assert not isinstance(named, PerRow | ByRole | str)
    every = (named,) if isinstance(named, int) else named
    past = span.past if axis in COLUMNS else 0
    total, present = past + size, []
    for i in every:
        place = i + total if i < 0 else i
        if not 0 <= place < total:
            what = f"{edit.name} has {total} along {sites.WORDS[axis]!r}, got index {i}"
            raise (
                PositionError(f"{what}: row 0 has {total} tokens") if axis in POSITIONS else IndexError(what)
            )
        if place >= past:
            present.append(place - past)
    return present


# --- cells that stand in other columns of every row ------------------------------------------------------------------


@dataclass(frozen=True)
class _Cells:
    """Cells of every text, by their indices along each axis of the site; at most one axis has several indices."""

    rows: Tensor
    """The row of each text, `[t]`."""
    columns: tuple[Tensor | None, ...]
    """Per axis, the cells' indices `[t or 1, n]` in the value of this pass; None: the whole axis."""
    batch_columns: tuple[Tensor | None, ...]
    """Per axis, the cells' indices in a value of all columns of the batch."""
    places: tuple[Tensor | None, ...]
    """Per axis, the cells' indices in a value of a single row without padding: the number of tokens before."""
    kept: tuple[int, ...]
    """Axes that the cells keep even with a single index along them."""
    present: Tensor
    """True where a cell is in this pass, `[t, n or 1]`."""

    def mesh(
        self, columns: Sequence[Tensor | None], rows: Tensor, shape: Sequence[int]
    ) -> tuple[Tensor, ...]:
        """Index tensors that broadcast to `[t, *axes]`, up to the last axis with an index."""
        last = max(i for i, axis_columns in enumerate(columns) if axis_columns is not None)
        index = [rows.view(-1, *[1] * (last + 1))]
        for i, axis_columns in enumerate(columns[: last + 1]):
            where = (
                torch.arange(shape[i + 1], device=rows.device)[None]
                if axis_columns is None
                else axis_columns.to(rows.device)
            )
            index.append(where.view(len(where), *[1] * i, -1, *[1] * (last - i)))
        return tuple(index)

    @property
    def squeezed(self) -> tuple[int, ...]:
        """The axes of length 1 that are squeezed before the change sees the cells."""
        return tuple(
            i + 1
            for i, axis_columns in enumerate(self.columns)
            if axis_columns is not None and axis_columns.shape[1] == 1 and i not in self.kept
        )


def _edited_tokens(edit: Edit, value: Tensor, span: Span) -> Tensor:
    """The value after an edit at positions whose columns differ by row."""
    new_value = value.clone()
    for cells in _token_cells(edit, value.shape, span):
        if bool(cells.present.any()):
            new_value = _write_tokens(edit, new_value, cells, span)
    return new_value.to(value.dtype)


def _write_tokens(edit: Edit, new_value: Tensor, cells: _Cells, span: Span) -> Tensor:
    """`new_value`, a private copy, with these cells changed in place where they are present."""
    device = new_value.device
    index = cells.mesh(cells.columns, to_device(cells.rows, device), new_value.shape)
    block = new_value[index]
    values = _values_of_tokens(edit, new_value.shape, cells, span)
    new = (
        _changed_cells(edit, block.squeeze(cells.squeezed), values, span)
        .to(new_value.dtype)
        .reshape(block.shape)
    )
    if bool(cells.present.all()):
        new_value[index] = new
        return new_value
    axis = next(
        (
            i + 1
            for i, axis_columns in enumerate(cells.columns)
            if axis_columns is not None and axis_columns.shape[1] > 1
        ),
        None,
    )
    for j in range(
        cells.present.shape[1]
    ):  # one position at a time: those that are not there share a column with others
        texts = to_device(cells.present[:, j].nonzero()[:, 0], device)
        if not len(texts):
            continue
        position = slice(None) if cells.present.shape[1] == 1 or axis is None else slice(j, j + 1)
        cell = tuple(
            x[texts if len(x) > 1 else slice(None)][_position_index(axis, position, x)] for x in index
        )
        new_value[cell] = new[texts][_position_index(axis, position, new)]
    return new_value


def _position_index(axis: int | None, position: slice, x: Tensor) -> tuple[slice, ...]:
    """Index that takes a slice of positions along `axis`; all, where the tensor has length 1 there."""
    if axis is None or x.shape[axis] == 1:
        return (slice(None),)
    return (*[slice(None)] * axis, position)


def _values_of_tokens(edit: Edit, shape: Sequence[int], cells: _Cells, span: Span) -> Tensor | None:
    """The values of a change such as `Set`, cut to these cells; None for a change without values."""
    values = getattr(edit.change, "values", None)
    if values is None:
        return None
    if not isinstance(values, Tensor):
        return torch.tensor(values, device="cpu")
    letters = _letters(edit, shape)
    if values.ndim < len(shape):
        return values
    columns, rows = (
        (cells.places if len(values) == 1 else cells.batch_columns),
        _value_rows(edit, values, shape[0])[cells.rows],
    )
    named = [axis_columns is not None for axis_columns in columns]
    sizes = zip(letters, values.shape[1:], shape[1:], named, strict=True)
    beyond = [
        axis_columns is not None
        and bool((axis_columns.expand(cells.present.shape)[cells.present] >= size).any())
        for axis_columns, size in zip(columns, values.shape[1:], strict=True)
    ]
    wide = [
        size >= span.past * (axis in COLUMNS) + n
        for axis, size, n, known in sizes
        if not known and axis in POSITIONS
    ]
    same = all(
        size == n
        for axis, size, n in zip(letters, values.shape[1:], shape[1:], strict=True)
        if axis not in POSITIONS
    )
    if any(beyond) or not all(wide) or not same:
        raise ValueError(
            f"values for {edit.name} must be a whole {describe(sites.axes_of(own_name(edit.site)))} of shape "
            f"{shape_text(shape)} (or one row of it) or broadcast against its cells, got {shape_text(values.shape)}"
        )
    filled = [
        torch.arange(n, device="cpu")[None] + span.past * (axis in COLUMNS)
        if axis_columns is None
        else axis_columns.clamp_max(size - 1)
        for axis, axis_columns, n, size in zip(letters, columns, shape[1:], values.shape[1:], strict=True)
    ]
    last = max(i for i, known in enumerate(named) if known)
    mesh_columns = [
        axis_columns if i <= last or axis in POSITIONS else None
        for i, (axis, axis_columns) in enumerate(zip(letters, filled, strict=True))
    ]
    return values[cells.mesh(mesh_columns, to_device(rows, values.device), values.shape)].squeeze(
        cells.squeezed
    )


def _value_rows(edit: Edit, values: Tensor, rows: int) -> Tensor:
    """For every row of the pass, the row of `values` that belongs to it."""
    if len(values) == 1:
        return torch.zeros(rows, dtype=torch.long, device="cpu")
    first = getattr(edit.change, "first", 0)
    concerned = tuple(range(rows)) if edit.rows is None else edit.rows
    if edit.rows is not None and len(values) > max(edit.rows) and len(values) != len(edit.rows):
        return torch.arange(rows, device="cpu")
    if not 0 <= first <= len(values) - len(concerned):
        raise ValueError(
            f"values for {edit.name} are required for 1 or {len(concerned)} rows, got {len(values)}"
        )
    value_rows = torch.zeros(rows, dtype=torch.long, device="cpu")
    value_rows[list(concerned)] = torch.arange(first, first + len(concerned), device="cpu")
    return value_rows


def _token_cells(edit: Edit, shape: Sequence[int], span: Span) -> list[_Cells]:
    """The cells of every text; one entry per combination of indices if several axes name several."""
    letters, indices = _letters(edit, shape), dict[str, TextTokens | list[int]]()
    for axis, size in zip(letters, shape[1:], strict=True):
        if axis in edit.cells:
            indices[axis] = _token_indices(edit, axis, (shape[0], size), span)
    texts = next(index.rows for index in indices.values() if isinstance(index, TextTokens))
    chosen = _chosen_texts(edit, shape[0], texts)
    many = [axis for axis, index in indices.items() if _count(index) > 1]
    combined = product(*(range(_count(indices[axis])) for axis in many)) if len(many) > 1 else [()]
    return [
        _cells_of_texts(
            edit, letters, indices, dict(zip(many, combination, strict=False)), (texts, chosen), span
        )
        for combination in combined
    ]


def _count(index: TextTokens | list[int]) -> int:
    return index.columns.shape[1] if isinstance(index, TextTokens) else len(index)


def _cells_of_texts(
    edit: Edit,
    letters: Sequence[str],
    indices: Mapping[str, TextTokens | list[int]],
    chosen_index: Mapping[str, int],
    texts: tuple[Tensor, Tensor],
    span: Span,
) -> _Cells:
    """The cells of the chosen texts.

    Args:
        chosen_index: axis -> number of the index taken, for axes with several indices; other axes take all.
        texts: the row of each text, and the numbers of the chosen texts.
    """
    rows, chosen = texts
    kept_axes = tuple(i for i, axis in enumerate(letters) if _keeps_axis(edit.cells.get(axis)))
    all_present = torch.ones(len(chosen), 1, dtype=torch.bool, device="cpu")
    by_axis: list[
        tuple[Tensor | None, Tensor | None, Tensor | None]
    ] = []  # columns here, in the batch, and places
    for i, axis in enumerate(letters):
        index, which = (
            indices.get(axis),
            slice(chosen_index[axis], chosen_index[axis] + 1) if axis in chosen_index else slice(None),
        )
        if index is None:
            by_axis.append((None, None, None))
        elif isinstance(index, TextTokens):
            batch_columns = index.columns[chosen][:, which]
            pass_columns, present = _within_pass(edit.site, axis, batch_columns, rows[chosen], span)
            present = present if index.present is None else present & index.present[chosen][:, which]
            place = index.places[chosen][:, which]
            if i in kept_axes:  # only the tokens that this pass computes
                computed = present.any(0)
                pass_columns, batch_columns, place, present = (
                    x[:, computed] for x in (pass_columns, batch_columns, place, present)
                )
            all_present = all_present & present
            by_axis.append((pass_columns, batch_columns, place))
        else:
            same = torch.tensor(index, device="cpu")[None, which]
            by_axis.append((same, same, same))
    columns, owns, places = zip(*by_axis, strict=True)
    return _Cells(rows[chosen], columns, owns, places, kept_axes, all_present)


def _keeps_axis(index: PositionIndex | None) -> bool:
    """Whether cells keep the axis of these positions even for one of them, since their number may differ by batch."""
    return index == NEW or (isinstance(index, PerRow) and index.several)


def _token_indices(edit: Edit, axis: str, shape: tuple[int, int], span: Span) -> TextTokens | list[int]:
    """The indices of an edit along one axis: tokens of each text, or a list that is equal for all rows."""
    pos, past = edit.cells[axis], span.past if axis in COLUMNS else 0
    layout = span.source if axis == "s" else span.layout
    width = past + shape[1]
    if axis in COLUMNS and span.only is not None and sites.is_late(edit.site):
        width = span.width
    if axis not in POSITIONS or (axis == "k" and layout.keep is not None and layout.keep.shape[1] != width):
        return _indices_in_pass(edit, axis, shape[1], span)
    if isinstance(pos, PerRow) and edit.rows is not None:
        by_row: list[int | Sequence[int] | None] = [None] * shape[0]
        if len(pos) != len(edit.rows):
            raise ValueError(f"one position for each of {len(edit.rows)} rows is required, got {len(pos)}")
        for row, place in zip(edit.rows, pos.places, strict=True):
            by_row[row] = place
        pos = PerRow(by_row)
    try:
        return layout.find(pos, (shape[0], width))
    except PositionError as cause:
        raise PositionError(f"the edit of {edit.name}: {cause}") from cause


def _chosen_texts(edit: Edit, rows: int, texts: Tensor) -> Tensor:
    """Numbers of the texts in the rows of the edit, in the order of its `rows`."""
    if edit.rows is None:
        return torch.arange(len(texts), device="cpu")
    _check_rows(edit, rows)
    return torch.cat([(texts == row).nonzero()[:, 0] for row in edit.rows])


def _within_pass(site: str, axis: str, columns: Tensor, rows: Tensor, span: Span) -> tuple[Tensor, Tensor]:
    """Columns as indices into this pass's value of the site, and True where it computes them (else any valid index)."""
    if axis not in COLUMNS:
        return columns, torch.ones_like(columns, dtype=torch.bool)
    if span.only is None or not sites.is_late(site):
        return (columns - span.past).clamp_min(0), columns >= span.past
    only = span.only.cpu()[rows] % (span.width - span.past) + span.past
    same = columns[:, :, None] == only[:, None]
    return same.int().argmax(-1), same.any(-1)


def tokens_of(site: str, value: Tensor, pos: Places, span: Span) -> Tensor:
    """A site's value at the positions `pos` of every text, `[t n ...]`, or `[t h n k]` for scores and patterns.

    Raises:
        PositionError: tokens that a row lacks.
        ValueError: a position that this pass does not compute.
    """
    axes = sites.axes_of(own_name(site)).split()
    axis = next(i for i, letter in enumerate(axes) if letter in COLUMNS)
    trimmed = span.only is not None and sites.is_late(site)
    width = span.width if trimmed else span.past + value.shape[axis]
    tokens = span.layout.find(several(pos), (len(value), width))
    columns, present = _within_pass(site, axes[axis], tokens.columns, tokens.rows, span)
    if tokens.present is not None or not bool(present.all()):
        more = ": a read requires as many of every row" if isinstance(pos, PerRow) and pos.several else ""
        raise ValueError(f"this pass does not compute {site} at every one of the positions {pos}{more}")
    index = [to_device(tokens.rows, value.device).view(-1, *[1] * axis)]
    index += [
        torch.arange(n, device=value.device).view(*[1] * i, -1, *[1] * (axis - i))
        for i, n in enumerate(value.shape[1:axis], 1)
    ]
    index.append(to_device(columns, value.device).view(len(columns), *[1] * (axis - 1), -1))
    return value[tuple(index)]


def own_values(edit: Edit, shape: Sequence[int], index: CellIndex, span: Span) -> Tensor | None:
    """The values of a change such as `Set`, cut to these cells; None for a change without values."""
    values = getattr(edit.change, "values", None)
    if values is None:
        return None
    if not isinstance(values, Tensor):
        return torch.tensor(values, device="cpu")
    if values.ndim < len(shape):
        return values
    values = _values_of_rows(edit, values, shape[0])
    letters = sites.axes_of(own_name(edit.site)).split()[1:]
    for place, axis in enumerate(letters, 1):
        if axis in COLUMNS and span.past:
            values = values.narrow(place, span.past, values.shape[place] - span.past)
        if values.shape[place] > shape[place] and axis in (*COLUMNS, "k"):
            values = values.narrow(place, 0, shape[place])
    if values.shape[1:] != tuple(shape[1:]):
        raise ValueError(
            f"values for {edit.name} must be a whole {describe(sites.axes_of(own_name(edit.site)))} of shape "
            f"{shape_text(shape)} (or one row of it) or broadcast against its cells, got {shape_text(values.shape)}"
        )
    return values[tuple(i.to(values.device) if isinstance(i, Tensor) else i for i in index)]


def _values_of_rows(edit: Edit, values: Tensor, rows: int) -> Tensor:
    if len(values) == 1:
        return values.expand(rows, *values.shape[1:])
    first = getattr(edit.change, "first", 0)
    if edit.rows is not None and len(values) != rows:
        return values[list(edit.rows)]
    if not 0 <= first <= len(values) - rows:
        raise ValueError(f"values for {edit.name} are required for 1 or {rows} rows, got {len(values)}")
    return values[first : first + rows]


def _check_sizes(edit: Edit, values: Tensor | None, cells: Tensor) -> None:
    """ValueError for values that do not broadcast against the cells, or directions of another width."""
    width, directions = cells.shape[-1:], getattr(edit.change, "directions", None)
    for name, given, own in (("values", values, cells.shape), ("directions", directions, width)):
        if given is None or _broadcasts(given.shape if name == "values" else given.shape[-1:], own):
            continue
        raise ValueError(
            f"{name} for {edit.name} must fit its cells, {describe(sites.axes_of(own_name(edit.site)))} of shape "
            f"{shape_text(cells.shape)}, got {shape_text(given.shape)}"
        )


def _broadcasts(given: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether torch computes with tensors of these two shapes."""
    return all(
        1 in pair or pair[0] == pair[1] for pair in zip(reversed(given), reversed(shape), strict=False)
    )


def _checked_values(edit: Edit, make: Callable[[], Tensor], cells: Tensor) -> Tensor:
    """The result of `make`, checked to have the shape of the cells."""
    try:
        new = make()
    except Exception as cause:
        raise RuntimeError(
            f"the edit of {edit.name} failed on shape {shape_text(cells.shape)}: {cause}"
        ) from cause
    if not isinstance(new, Tensor) or new.shape != cells.shape:
        got = shape_text(new.shape) if isinstance(new, Tensor) else type(new).__name__
        axes = describe(sites.axes_of(own_name(edit.site)))
        raise ValueError(
            f"the edit of {edit.name} must return shape {shape_text(cells.shape)}, cells of {axes}, got {got}"
        )
    if new.is_complex():
        raise ValueError(f"the edit of {edit.name} must return real numbers, got {new.dtype}")
    return new


def _row_index(edit: Edit, value: Tensor) -> Tensor:
    assert edit.rows is not None
    _check_rows(edit, value.shape[0])
    return to_device(edit.rows, value.device)


def _check_rows(edit: Edit, n: int) -> None:
    rows = edit.rows or ()
    if not rows or min(rows) < 0 or max(rows) >= n or len(set(rows)) < len(rows):
        raise ValueError(f"the edit of {edit.name} names rows {edit.rows}, the batch has rows 0 to {n - 1}")
