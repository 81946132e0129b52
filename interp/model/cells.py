"""How an edit is carried out on the value of a site: which cells are in a pass, where, and what is written there.

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
from interp.model.edits import COLUMNS, POSITIONS, Edit, Mean, Ready, Resample, Set, SiteAware, own_name
from interp.model.layout import NEW, Layout, PerRow, Places, PositionError, TextTokens, several


@dataclass(frozen=True)
class Span:
    """The columns that a pass computes, and the tokens in them: `past` before it are known."""

    past: int = 0
    layout: Layout = field(default_factory=Layout, compare=False)
    """Layout of all columns, those before the pass included."""
    source: Layout = field(default_factory=Layout, compare=False)
    """Layout of the rows that cross-attention reads."""
    only: Int[Tensor, "b n"] | None = field(default=None, compare=False)
    """The columns of the pass that sites after the blocks hold; None = all."""
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
    if _differs_by_row(edit, span):
        return _edited_tokens(edit, value, span)
    index = index_of(edit, value.shape, span)
    if index is None:
        return value
    rows = None if edit.rows is None else _row_index(edit, value)
    part = value.clone() if rows is None else value.index_select(0, rows)
    for cell in index:
        part = _written(edit, part, cell, span)
    part = part.to(value.dtype)
    return part if rows is None else value.index_copy(0, rows, part)


def _differs_by_row(edit: Edit, span: Span) -> bool:
    """Whether the cells may stand in other columns of every row, or some of them in no column of this pass."""
    named = [axis for axis in POSITIONS if axis in edit.cells]
    if not named:
        return False
    layout = span.source if named == ["s"] else span.layout
    per_row = any(isinstance(edit.cells[axis], PerRow | str) for axis in named)
    trimmed = span.only is not None and sites.is_late(edit.site)
    return per_row or trimmed or not layout.uniform or layout.ends_early


def _written(edit: Edit, part: Tensor, index: CellIndex, span: Span) -> Tensor:
    """The private copy with some of its cells changed."""
    whole = len(index) == 1
    cells = part if whole else part[index].clone()
    values = own_values(edit, part.shape, index, span)
    new = _changed(edit, cells, values, span)
    if whole:
        return new.clone() if isinstance(edit.change, Set) else new
    part[index] = new.to(part.dtype)
    return part


def _changed(edit: Edit, cells: Tensor, values: Tensor | None, span: Span) -> Tensor:
    """The new values of some cells, as the change makes them; values: those that it brings for them."""
    change = edit.change
    if isinstance(change, Ready):
        return _fitting(edit, lambda: change(cells, values), cells)
    if isinstance(change, Mean | Resample):
        raise ValueError(
            f"{type(change).__name__}() at {edit.name} stands for values that only a model and reference prompts give: "
            "hand it to model.edited(...) or an analysis, which look them up"
        )
    function = change.at_site(edit.site, span.memory) if isinstance(change, SiteAware) else change
    return _fitting(edit, lambda: function(cells), cells)


CellIndex = tuple[slice | int | Tensor, ...]
"""An index into a value of a site, the rows' slice first."""


def index_of(edit: Edit, shape: Sequence[int], span: Span) -> list[CellIndex] | None:
    """Indices into a value of this shape, one per combination of several indices; None if no cell is in this pass.

    Raises:
        IndexError: an index outside the site.
    """
    letters = _letters(edit, shape)
    found: list[list[int] | None] = []
    for axis, size in zip(letters, shape[1:], strict=True):
        if axis not in edit.cells:
            found.append(None)
            continue
        kept = _present(edit, axis, size, span)
        if not kept:
            return None
        found.append(kept)
    if sum(each is not None and len(each) > 1 for each in found) > 1:
        named = [each if each is not None else [None] for each in found]
        return [(slice(None), *(slice(None) if i is None else i for i in cell)) for cell in product(*named)]
    return [(slice(None), *(_entry(each) for each in found))] if any(found) else [(slice(None),)]


def _letters(edit: Edit, shape: Sequence[int]) -> list[str]:
    """The axes of the site but the rows'. ValueError for a value of another shape."""
    letters = sites.axes_of(own_name(edit.site)).split()[1:]
    if len(shape) != len(letters) + 1:
        raise ValueError(f"{edit.name} holds {describe(' '.join(('b', *letters)))}, got {shape_text(shape)}")
    return letters


def _entry(indices: list[int] | None) -> slice | int | Tensor:
    if indices is None:
        return slice(None)
    return indices[0] if len(indices) == 1 else torch.tensor(indices)


def _present(edit: Edit, axis: str, size: int, span: Span) -> list[int]:
    """The indices along an axis that are in this pass, counted in it, where they are the same for all rows."""
    given = edit.cells[axis]
    assert not isinstance(given, PerRow | str)
    every = (given,) if isinstance(given, int) else given
    past = span.past if axis in COLUMNS else 0
    total, kept = past + size, []
    for i in every:
        place = i + total if i < 0 else i
        if not 0 <= place < total:
            what = f"{edit.name} has {total} along {sites.WORDS[axis]!r}, got index {i}"
            raise (
                PositionError(f"{what}: row 0 has {total} tokens") if axis in POSITIONS else IndexError(what)
            )
        if place >= past:
            kept.append(place - past)
    return kept


# --- cells that stand in other columns of every row ------------------------------------------------------------------


@dataclass(frozen=True)
class _Cells:
    """Some cells of every text, along each axis of the site that the edit names: at most one axis has several."""

    rows: Tensor
    """The row of each text, `[t]`."""
    columns: tuple[Tensor | None, ...]
    """Columns that are meant, by axis, `[t or 1, n]` as the pass counts them; None: all of an axis."""
    batch_columns: tuple[Tensor | None, ...]
    """Columns that are meant, as whole values of the batch count them."""
    places: tuple[Tensor | None, ...]
    """Columns that are meant, as whole values of a single row count them: by the tokens before."""
    kept: tuple[int, ...]
    """Axes that the cells keep, even where a single index is meant."""
    present: Tensor
    """True where a cell is in this pass, `[t, n or 1]`."""

    def mesh(
        self, columns: Sequence[Tensor | None], rows: Tensor, shape: Sequence[int]
    ) -> tuple[Tensor, ...]:
        """Index tensors for a tensor of this shape, up to the last axis that is named: `[t, *axes]`."""
        last = max(i for i, each in enumerate(columns) if each is not None)
        index = [rows.view(-1, *[1] * (last + 1))]
        for i, each in enumerate(columns[: last + 1]):
            where = (
                torch.arange(shape[i + 1], device=rows.device)[None] if each is None else each.to(rows.device)
            )
            index.append(where.view(len(where), *[1] * i, -1, *[1] * (last - i)))
        return tuple(index)

    @property
    def squeezed(self) -> tuple[int, ...]:
        """The axes of the block that the cells do not keep."""
        return tuple(
            i + 1
            for i, each in enumerate(self.columns)
            if each is not None and each.shape[1] == 1 and i not in self.kept
        )


def _edited_tokens(edit: Edit, value: Tensor, span: Span) -> Tensor:
    """The value after an edit of tokens, wherever they stand in their rows."""
    part = value.clone()
    for cells in _token_cells(edit, value.shape, span):
        if bool(cells.present.any()):
            part = _write_tokens(edit, part, cells, span)
    return part.to(value.dtype)


def _write_tokens(edit: Edit, part: Tensor, cells: _Cells, span: Span) -> Tensor:
    """The private copy with these cells changed, those that are not there left as they are."""
    device = part.device
    index = cells.mesh(cells.columns, to_device(cells.rows, device), part.shape)
    block = part[index]
    values = _own_of_tokens(edit, part.shape, cells, span)
    new = _changed(edit, block.squeeze(cells.squeezed), values, span).to(part.dtype).reshape(block.shape)
    if bool(cells.present.all()):
        part[index] = new
        return part
    axis = next(
        (i + 1 for i, each in enumerate(cells.columns) if each is not None and each.shape[1] > 1), None
    )
    for j in range(
        cells.present.shape[1]
    ):  # one position at a time: those that are not there share a column with others
        texts = to_device(cells.present[:, j].nonzero()[:, 0], device)
        if not len(texts):
            continue
        one = slice(None) if cells.present.shape[1] == 1 or axis is None else slice(j, j + 1)
        some = tuple(x[texts if len(x) > 1 else slice(None)][_along(axis, one, x)] for x in index)
        part[some] = new[texts][_along(axis, one, new)]
    return part


def _along(axis: int | None, one: slice, x: Tensor) -> tuple[slice, ...]:
    """Index that takes one position of a tensor with an axis of positions."""
    if axis is None or x.shape[axis] == 1:
        return (slice(None),)
    return (*[slice(None)] * axis, one)


def _own_of_tokens(edit: Edit, shape: Sequence[int], cells: _Cells, span: Span) -> Tensor | None:
    """The values that a change brings for these cells; None for one that brings none."""
    values = getattr(edit.change, "values", None)
    if values is None:
        return None
    if not isinstance(values, Tensor):
        return torch.tensor(values)
    letters = _letters(edit, shape)
    if values.ndim < len(shape):
        return values
    columns, rows = (
        (cells.places if len(values) == 1 else cells.batch_columns),
        _value_rows(edit, values, shape[0])[cells.rows],
    )
    named = [each is not None for each in columns]
    sizes = zip(letters, values.shape[1:], shape[1:], named, strict=True)
    beyond = [
        each is not None and bool((each.expand(cells.present.shape)[cells.present] >= size).any())
        for each, size in zip(columns, values.shape[1:], strict=True)
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
        torch.arange(n)[None] + span.past * (axis in COLUMNS) if each is None else each.clamp_max(size - 1)
        for axis, each, n, size in zip(letters, columns, shape[1:], values.shape[1:], strict=True)
    ]
    last = max(i for i, known in enumerate(named) if known)
    kept = [
        each if i <= last or axis in POSITIONS else None
        for i, (axis, each) in enumerate(zip(letters, filled, strict=True))
    ]
    return values[cells.mesh(kept, to_device(rows, values.device), values.shape)].squeeze(cells.squeezed)


def _value_rows(edit: Edit, values: Tensor, rows: int) -> Tensor:
    """The row of a whole value for every row of the pass."""
    if len(values) == 1:
        return torch.zeros(rows, dtype=torch.long)
    first = getattr(edit.change, "first", 0)
    concerned = tuple(range(rows)) if edit.rows is None else edit.rows
    if edit.rows is not None and len(values) > max(edit.rows) and len(values) != len(edit.rows):
        return torch.arange(rows)
    if not 0 <= first <= len(values) - len(concerned):
        raise ValueError(
            f"values for {edit.name} are required for 1 or {len(concerned)} rows, got {len(values)}"
        )
    found = torch.zeros(rows, dtype=torch.long)
    found[list(concerned)] = torch.arange(first, first + len(concerned))
    return found


def _token_cells(edit: Edit, shape: Sequence[int], span: Span) -> list[_Cells]:
    """The cells of every text, one entry per combination where several axes name several."""
    letters, found = _letters(edit, shape), dict[str, TextTokens | list[int]]()
    for axis, size in zip(letters, shape[1:], strict=True):
        if axis in edit.cells:
            found[axis] = _tokens(edit, axis, (shape[0], size), span)
    texts = next(each.rows for each in found.values() if isinstance(each, TextTokens))
    chosen = _texts(edit, shape[0], texts)
    many = [axis for axis, each in found.items() if _count(each) > 1]
    combined = product(*(range(_count(found[axis])) for axis in many)) if len(many) > 1 else [()]
    return [
        _cells(edit, letters, found, dict(zip(many, combination, strict=False)), (texts, chosen), span)
        for combination in combined
    ]


def _count(index: TextTokens | list[int]) -> int:
    return index.columns.shape[1] if isinstance(index, TextTokens) else len(index)


def _cells(
    edit: Edit,
    letters: Sequence[str],
    found: Mapping[str, TextTokens | list[int]],
    one: Mapping[str, int],
    texts: tuple[Tensor, Tensor],
    span: Span,
) -> _Cells:
    """The cells of some texts; one: which of several are meant, by axis."""
    rows, chosen = texts
    kept = tuple(i for i, axis in enumerate(letters) if edit.cells.get(axis) == NEW)
    all_present = torch.ones(len(chosen), 1, dtype=torch.bool)
    each: list[
        tuple[Tensor | None, Tensor | None, Tensor | None]
    ] = []  # columns here, in the batch, and places
    for i, axis in enumerate(letters):
        index, which = found.get(axis), slice(one[axis], one[axis] + 1) if axis in one else slice(None)
        if index is None:
            each.append((None, None, None))
        elif isinstance(index, TextTokens):
            batch_columns = index.columns[chosen][:, which]
            pass_columns, present = _within_pass(edit.site, axis, batch_columns, rows[chosen], span)
            present = present if index.present is None else present & index.present[chosen][:, which]
            place = index.places[chosen][:, which]
            if i in kept:  # of the tokens that are generated, those that this pass computes
                mine = present.any(0)
                pass_columns, batch_columns, place, present = (
                    x[:, mine] for x in (pass_columns, batch_columns, place, present)
                )
            all_present = all_present & present
            each.append((pass_columns, batch_columns, place))
        else:
            same = torch.tensor(index)[None, which]
            each.append((same, same, same))
    columns, owns, places = zip(*each, strict=True)
    return _Cells(rows[chosen], columns, owns, places, kept, all_present)


def _tokens(edit: Edit, axis: str, shape: tuple[int, int], span: Span) -> TextTokens | list[int]:
    """The indices along one axis: tokens of every text, or the same for all."""
    given, past = edit.cells[axis], span.past if axis in COLUMNS else 0
    layout = span.source if axis == "s" else span.layout
    width = past + shape[1]
    if axis in COLUMNS and span.only is not None and sites.is_late(edit.site):
        width = span.width
    if axis not in POSITIONS or (axis == "k" and layout.keep is not None and layout.keep.shape[1] != width):
        return _present(edit, axis, shape[1], span)
    if isinstance(given, PerRow) and edit.rows is not None:
        by_row: list[int | None] = [None] * shape[0]
        if len(given) != len(edit.rows):
            raise ValueError(f"one position for each of {len(edit.rows)} rows is required, got {len(given)}")
        for row, place in zip(edit.rows, given.places, strict=True):
            by_row[row] = place
        given = PerRow(by_row)
    try:
        return layout.find(given, (shape[0], width))
    except PositionError as cause:
        raise PositionError(f"the edit of {edit.name}: {cause}") from cause


def _texts(edit: Edit, rows: int, texts: Tensor) -> Tensor:
    """The texts concerned, in the order in which the edit names their rows."""
    if edit.rows is None:
        return torch.arange(len(texts))
    _check_rows(edit, rows)
    return torch.cat([(texts == row).nonzero()[:, 0] for row in edit.rows])


def _within_pass(site: str, axis: str, columns: Tensor, rows: Tensor, span: Span) -> tuple[Tensor, Tensor]:
    """Columns as this pass counts them at the site, and which it computes; some column stands for the others."""
    if axis not in COLUMNS:
        return columns, torch.ones_like(columns, dtype=torch.bool)
    if span.only is None or not sites.is_late(site):
        return (columns - span.past).clamp_min(0), columns >= span.past
    only = span.only.cpu()[rows] % (span.width - span.past) + span.past
    same = columns[:, :, None] == only[:, None]
    return same.int().argmax(-1), same.any(-1)


def tokens_of(site: str, value: Tensor, pos: Places, span: Span) -> Tensor:
    """A site's value at some tokens of every text, in place of its columns: `[t n ...]`, or `[t h n k]`.

    Raises:
        PositionError: tokens that a row lacks.
        ValueError: those that this pass does not compute.
    """
    axes = sites.axes_of(own_name(site)).split()
    axis = next(i for i, letter in enumerate(axes) if letter in COLUMNS)
    trimmed = span.only is not None and sites.is_late(site)
    width = span.width if trimmed else span.past + value.shape[axis]
    found = span.layout.find(several(pos), (len(value), width))
    columns, present = _within_pass(site, axes[axis], found.columns, found.rows, span)
    if found.present is not None or not bool(present.all()):
        raise ValueError(f"this pass does not compute {site} at every one of the positions {pos}")
    index = [to_device(found.rows, value.device).view(-1, *[1] * axis)]
    index += [
        torch.arange(n, device=value.device).view(*[1] * i, -1, *[1] * (axis - i))
        for i, n in enumerate(value.shape[1:axis], 1)
    ]
    index.append(to_device(columns, value.device).view(len(columns), *[1] * (axis - 1), -1))
    return value[tuple(index)]


def own_values(edit: Edit, shape: Sequence[int], index: CellIndex, span: Span) -> Tensor | None:
    """The values that a change brings for these cells; None for one that brings none."""
    values = getattr(edit.change, "values", None)
    if values is None:
        return None
    if not isinstance(values, Tensor):
        return torch.tensor(values)
    if values.ndim < len(shape):
        return values
    values = _rows_of(edit, values, shape[0])
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


def _rows_of(edit: Edit, values: Tensor, rows: int) -> Tensor:
    if len(values) == 1:
        return values.expand(rows, *values.shape[1:])
    first = getattr(edit.change, "first", 0)
    if edit.rows is not None and len(values) != rows:
        return values[list(edit.rows)]
    if not 0 <= first <= len(values) - rows:
        raise ValueError(f"values for {edit.name} are required for 1 or {rows} rows, got {len(values)}")
    return values[first : first + rows]


def _fitting(edit: Edit, make: Callable[[], Tensor], cells: Tensor) -> Tensor:
    """The values that a change makes of the cells, checked to have their shape."""
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
    return new


def _row_index(edit: Edit, value: Tensor) -> Tensor:
    assert edit.rows is not None
    _check_rows(edit, value.shape[0])
    return to_device(edit.rows, value.device)


def _check_rows(edit: Edit, n: int) -> None:
    rows = edit.rows or ()
    if not rows or min(rows) < 0 or max(rows) >= n or len(set(rows)) < len(rows):
        raise ValueError(f"the edit of {edit.name} names rows {edit.rows}, the batch has rows 0 to {n - 1}")
