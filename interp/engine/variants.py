"""Interventions that a sweep can pack: which cells of which sites take whose values, said as data.

An `Edit` is any function, so nobody can know which positions it touches. A `Put` says so, and a thousand of them at one
site become a handful of index assignments.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
from jaxtyping import Shaped
from torch import Tensor

from interp.core.shapes import describe, shape_text
from interp.model import sites
from interp.model.config import ModelConfig
from interp.model.tap import Edit

POSITION_AXES = ("p", "q")
"""The axes of a site that run over the pass's own columns."""


@dataclass(frozen=True, eq=False)
class Put:
    """Replace cells of a site by a donor's cells at the same place.

    The donor holds a whole value of the site for every example, `[example, *axes]`; with one row it serves them all (an
    expanded scalar costs nothing). Where it holds several values per example, `first` is its row for example 0.
    """

    site: str
    donor: Shaped[Tensor, "n ..."]
    at: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Index by axis letter, `{"p": 3, "h": 1}`; every cell along the axes that are not named."""
    first: int = 0


@dataclass(frozen=True, eq=False)
class Variant:
    """One run of a sweep: what is put, in this order, and edits that no `Put` can say (they run after the puts)."""

    puts: Sequence[Put] = ()
    edits: Sequence[Edit] = ()


def checked(variant: Variant, config: ModelConfig, examples: int, columns: int) -> Variant:
    """The same with every put checked, see there.

    Errors: ValueError for a free edit of some rows only, or behind the last block; KeyError for its unknown site.
    """
    for edit in variant.edits:
        layer_of(edit.site, config)
        if edit.rows is not None:
            raise ValueError(f"an edit of a variant concerns all its rows; that of {edit.site!r} names some")
    return Variant([_checked(put, config, examples, columns) for put in variant.puts], tuple(variant.edits))


def layer_of(name: str, config: ModelConfig) -> int:
    """The block during which a site is visited, the first for embeddings.

    Errors: KeyError for an unknown site; ValueError for a site behind the last block.
    """
    _, layer = sites.find(name, config)
    if layer is None and name not in sites.EMBEDDING_SITES:
        raise ValueError(f"a sweep works before and inside the blocks; {name!r} is behind them")
    return 0 if layer is None else layer


def _checked(put: Put, config: ModelConfig, examples: int, columns: int) -> Put:
    """The put, its negative indices counted from the end; a residual that leaves a block enters the next.

    Errors: KeyError for an unknown site or axis; ValueError for a site behind the last block, or a donor that does not
    fit; IndexError for an index outside the site.
    """
    name = canonical(put.site, config)
    site, _ = sites.find(put.site, config)
    letters = site.axes.split()[1:]
    if unknown := [axis for axis in put.at if axis not in letters]:
        raise KeyError(f"{put.site!r} has the axes {describe(site.axes)}, none is {unknown[0]!r}")
    sizes = dict(zip(letters, put.donor.shape[1:], strict=False))
    rows = put.donor.shape[0]
    fits = put.donor.ndim == len(letters) + 1 and (rows == 1 or 0 <= put.first <= rows - examples)
    if not fits or any(sizes[axis] != columns for axis in POSITION_AXES if axis in sizes):
        raise ValueError(
            f"a donor for {put.site!r} requires {describe(site.axes)} of 1 or {examples} rows and {columns} columns, "
            f"got {shape_text(put.donor.shape)}"
        )
    at = {axis: _index(put.site, axis, i, sizes[axis]) for axis, i in put.at.items()}
    return replace(put, site=name, at=at)


def canonical(name: str, config: ModelConfig) -> str:
    """The stream that leaves a block under the name of the stream that enters the next, where there is one."""
    layer = layer_of(name, config)
    leaves = name.endswith(".hook_resid_post") and config.norm_place != "post"
    return f"blocks.{layer + 1}.hook_resid_pre" if leaves and layer + 1 < config.n_layers else name


def _index(site: str, axis: str, i: int, size: int) -> int:
    if not -size <= i < size:
        raise IndexError(f"{site!r} has {size} along {axis!r}, got index {i}")
    return i % size


@dataclass(frozen=True, eq=False)
class _Wave:
    """Puts of the same shape, one for each of some variants."""

    slots: list[int]
    indices: list[list[int]]
    """Per named axis, the index of every slot."""
    firsts: list[int]
    axes: tuple[str, ...]
    donor: Tensor


def changes(puts: Sequence[tuple[int, Put]], copies: int, examples: int, start: int) -> list[Edit]:
    """The edits that carry out these `(slot, put)`s in a pass of `copies` x `examples` rows, from column `start` on.

    Puts of one slot at one site are carried out in their order; those before the first column change nothing here.
    """
    by_site: dict[str, list[tuple[int, Put]]] = defaultdict(list)
    for slot, put in puts:
        if all(put.at.get(axis, start) >= start for axis in POSITION_AXES):
            by_site[put.site].append((slot, put))
    return [
        Edit(site, _written(_waves(each), sites.axes_of(site).split()[1:], copies, examples, start))
        for site, each in by_site.items()
    ]


def _waves(puts: Sequence[tuple[int, Put]]) -> list[_Wave]:
    """The n-th put of every slot belongs to wave n; within one, puts with the same axes and donor go together."""
    seen: dict[int, int] = defaultdict(int)
    waves: dict[tuple[int, tuple[str, ...], int], _Wave] = {}
    for slot, put in puts:
        axes = tuple(put.at)
        key = (seen[slot], axes, id(put.donor))
        seen[slot] += 1
        if key not in waves:
            waves[key] = _Wave([], [[] for _ in axes], [], axes, put.donor)
        wave = waves[key]
        wave.slots.append(slot)
        wave.firsts.append(put.first)
        for indices, axis in zip(wave.indices, axes, strict=True):
            indices.append(put.at[axis])
    return [waves[key] for key in sorted(waves, key=lambda key: key[0])]


def _written(
    waves: Sequence[_Wave], letters: Sequence[str], copies: int, examples: int, start: int
) -> Callable[[Tensor], Tensor]:
    def change(value: Tensor) -> Tensor:
        cells = value.unflatten(0, (copies, examples))
        for wave in waves:
            _write(cells, wave, letters, start)
        return value

    return change


def _write(
    cells: Shaped[Tensor, "copies examples ..."], wave: _Wave, letters: Sequence[str], start: int
) -> None:
    """One index assignment; slices keep whole axes, positions count from `start`."""
    device, examples = cells.device, cells.shape[1]
    each = torch.arange(examples, device=device)

    def column(values: list[int]) -> Tensor:
        return torch.tensor(values, device=device)[:, None]

    many = wave.donor.shape[0] > 1
    rows = (
        column(wave.firsts) + each
        if many
        else torch.zeros(len(wave.slots), 1, dtype=torch.long, device=device)
    )
    into: list[Tensor | slice] = [column(wave.slots), each]
    out_of: list[Tensor | slice] = [rows.to(wave.donor.device)]
    for letter in letters:
        skipped = start if letter in POSITION_AXES else 0
        if letter in wave.axes:
            index = column(wave.indices[wave.axes.index(letter)])
            into.append(index - skipped)
            out_of.append(index.to(wave.donor.device))
        else:
            into.append(slice(None))
            out_of.append(slice(skipped, None))
    cells[tuple(into)] = wave.donor[tuple(out_of)].to(cells)
