"""Interventions as data: what is changed where, in one record that every pass understands.

An `Edit` names cells (a part or site, and indices along its axes) and a change. The closed changes below say what they
touch and what they need, so a thousand of them can be planned as one sweep, written to JSON, shown on a page and
printed as Python. Any function of the cells is a change too; it cannot be planned, so it runs where it is put.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from types import MappingProxyType
from typing import Literal, Protocol, get_args, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from interp.core.axes import shape_text
from interp.core.boundary import public
from interp.core.kinds import Finite, Values
from interp.core.stats import upcast
from interp.core.torch_state import depth
from interp.core.transfers import to_device
from interp.core.viewer import Brief
from interp.core.wording import nearest, value_text
from interp.model import sites
from interp.model.layout import NEW, ByRole, New, PerRow
from interp.model.parts import Part

Over = Literal["position", "template", "reference"]
PositionIndex = int | tuple[int, ...] | PerRow | ByRole | New
RowChoice = tuple[int, ...]
COLUMNS = ("p", "q")
"""The axes of a site that run over the columns of a pass."""
POSITIONS = (*COLUMNS, "k", "s")
"""The axes along which an index is a position: a token of its own row, and not a column."""
SCORES = "hook_attn_scores"
"""The site whose cells may be -inf: a query does not see that key."""
ANSWERS = "answers"
"""Key of a pass's memory for the values read so far, a dict by `Read`."""


@public()
@dataclass(frozen=True, eq=False, repr=False)
class Set(Brief):
    """Put given values in place of the cells.

    Args:
        values: a number, or a tensor that broadcasts against the cells; or a whole value of the site, `[1 or example,
            *axes]`, of which the same cells are taken. Up to 1e30 in size; attention scores may be set to -inf.
        first: the row of `values` that belongs to the first example, where it holds several values per example.
    """

    values: Values
    first: int = 0

    def __call__(self, cells: Tensor, own: Tensor | None) -> Tensor:
        """The values."""
        assert own is not None
        return own.to(cells).expand(cells.shape)


@dataclass(frozen=True)
class Zero:
    """Put 0 in place of the cells, which removes the part's mean too (of a whole sublayer also its bias)."""

    def __call__(self, cells: Tensor, own: Tensor | None) -> Tensor:
        """Zeros."""
        return torch.zeros_like(cells)


@public(renamed={"freeze_patterns": "freeze_patterns, an argument of ablate"})
@dataclass(frozen=True)
class Mean:
    """Put the mean of the part over the reference prompts, or over the prompts of the experiment, in its place.

    Args:
        over: "position" takes the mean at each column apart; "template" also for each group of prompts apart;
            "reference" one mean over all columns (BOS included) of reference prompts that must be given.
    """

    over: Over = "position"

    def __post_init__(self) -> None:
        if self.over not in get_args(Over):
            raise ValueError(f"over must be one of {', '.join(get_args(Over))}, got {self.over!r}")


@public(renamed={"freeze_patterns": "freeze_patterns, an argument of ablate"})
@dataclass(frozen=True)
class Resample:
    """Put the part's value on another prompt in its place: the reference prompt, or another row of its group.

    All parts of one row take their values from the same other prompt.

    Args:
        seed: seed of the draw of the other row, where no reference is given.
    """

    seed: int = 0


@public()
@dataclass(frozen=True, eq=False, repr=False)
class Add(Brief):
    """Add `scale` times a vector to the cells: steering, for one.

    Args:
        values: a number, or a tensor that broadcasts against the cells.
        scale: factor on the values.
    """

    values: Values
    scale: Finite = 1.0

    def __call__(self, cells: Tensor, own: Tensor | None) -> Tensor:
        """The cells with the values added."""
        assert own is not None
        return cells + self.scale * to_device(own, cells.device).to(cells)


@public()
@dataclass(frozen=True)
class Scale:
    """Multiply by a factor."""

    factor: Finite

    def __call__(self, cells: Tensor, own: Tensor | None) -> Tensor:
        """The cells times the factor."""
        return cells * self.factor


@public()
@dataclass(frozen=True, eq=False, repr=False)
class Project(Brief):
    """Remove what lies along some directions (rows `[k, d]`, or one vector), or with `keep` everything else.

    x - x Q^T Q, or x Q^T Q, for an orthonormal basis Q of the directions' span.
    """

    directions: Float[Tensor, "*k d"]
    keep: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "_basis", orthonormal(self.directions))

    def __call__(self, cells: Tensor, own: Tensor | None) -> Tensor:
        """The projected cells."""
        along = onto(cells, self._basis)  # type: ignore[attr-defined]
        return along if self.keep else cells - along


@public()
@dataclass(frozen=True, eq=False, repr=False)
class Swap(Brief):
    """Put given values inside a subspace, and leave the rest: x + (values - x) Q^T Q (an interchange intervention).

    Args:
        directions: rows that span the subspace.
        values, first: as in `Set`.
    """

    directions: Float[Tensor, "*k d"]
    values: Values
    first: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "_basis", orthonormal(self.directions))

    def __call__(self, cells: Tensor, own: Tensor | None) -> Tensor:
        """cells + (values - cells) Q^T Q."""
        assert own is not None
        return cells + onto(own.to(cells) - cells, self._basis)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Detach:
    """Leave the value and cut its gradient."""

    def __call__(self, cells: Tensor, own: Tensor | None) -> Tensor:
        """The values without their gradient."""
        return cells.detach()


Ready = Set | Zero | Add | Scale | Project | Swap | Detach
"""Changes that need nothing else to be carried out."""
Closed = Ready | Mean | Resample
"""Changes that are data; a mean and a resampled value have to be looked up in a model first."""
Function = Callable[[Tensor], Tensor]


@runtime_checkable
class SiteAware(Protocol):
    """A function as a change that receives the site where it acts, and a memory for the rest of one pass."""

    def at_site(self, site: str, memory: dict[str, object]) -> Function:
        """The function for this site in this pass.

        `memory` is the pass's own, empty at its beginning but for the answers to its reads so far (`ANSWERS`).
        """
        ...


Change = Closed | Function | SiteAware


@dataclass(frozen=True, eq=False)
class Remember:
    """A change that leaves the cells as they are and keeps them to the end of the pass, for an edit of a later site."""

    def at_site(self, site: str, memory: dict[str, object]) -> Function:
        """The change in one pass."""

        def remember(cells: Tensor) -> Tensor:
            memory[self._name] = cells
            return cells

        return remember

    def value(self, memory: Mapping[str, object]) -> Tensor:
        """The cells in this pass; ValueError where the site has not run before the one that asks."""
        kept = memory.get(self._name)
        if not isinstance(kept, Tensor):
            raise ValueError(
                "an edit that reads another site requires that site to come before its own in the pass"
            )
        return kept

    @property
    def _name(self) -> str:
        """The key in the memory of a pass, different for every edit."""
        return f"remembered by {id(self)}"


@public(renamed={"site": "where"}, unchecked=("where", "change", "at", "rows"))
@dataclass(frozen=True, eq=False, repr=False)
class Edit(Brief):
    """Change some cells of a part or site in a pass.

    The one way to say an intervention: silence a head, steer the stream, put a value in place.

    Args:
        where: a part (`"L3H5"`, `"L2.mlp"`, `(3, 5)`) or the full name of a site.
        change: a closed change, such as `Zero()`, `Add(vector)` or `Set(values)`; or a function that gets a private
            copy of the cells (it may write into it) and returns the same shape.
        at: indices along the site's other axes, by dim: `{"pos": 3}`, `{"pos": (3, 4), "head": 1}`, `{"query": -1,
            "key": 0}`; all cells along what is not named. Positions are tokens of their own row: 0 is its first, -1
            its last, whatever padding, batch and cache; in packed rows they are each text's own. `{"pos": PerRow([3,
            4])}` is one for every row that is concerned, `PerRow([(2, 3), (4,)])` several of each. In chats `{"pos":
            {"role": "user"}}` names the tokens of what a role says, and `{"role": "user", "turn": -1}` those of one of
            its messages (`Batch.positions`). While text is generated, negative ones count from the end of each row's
            prompt, and `{"pos": "new"}` names every generated token. Other negative indices count from the end of
            their axis.
        rows: the batch rows concerned; None = all.

    Raises:
        KeyError: a part, dim or site that does not exist; where it is used.
        IndexError: an index outside, and for a position that a row lacks an error that is a ValueError too.

    Example:
        >>> edit = Edit("L1H2", Zero(), at={"pos": -1})
        >>> steered = model.edited([edit, Edit("L2.resid", Add(torch.ones(24), scale=2.0))])
        >>> steered(tokens).shape == model(tokens).shape
        True
    """

    where: Part | str
    change: Change
    at: Mapping[str, PositionIndex] = field(default_factory=lambda: MappingProxyType({}))
    rows: RowChoice | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.where, str) and "hook_" in self.where):
            object.__setattr__(self, "where", Part.of(self.where))
        known = isinstance(self.change, Closed | SiteAware) or callable(self.change)
        if isinstance(self.change, type) or not known:
            raise ValueError(
                f"a change is required, such as Zero(), Set(values), Add(vector) or a function of the cells, "
                f"got {value_text(self.change)}"
            )
        if not isinstance(self.at, Mapping) or not all(isinstance(dim, str) for dim in self.at):
            raise ValueError(f"at must be indices by dim, such as {{'pos': 3}}, got {value_text(self.at)}")
        if self.rows is not None and not (isinstance(self.rows, tuple) and all(map(_is_index, self.rows))):
            raise ValueError(
                f"rows must be a tuple of the rows' numbers or None, got {value_text(self.rows)}"
            )
        object.__setattr__(self, "_cells", self._named_cells())
        hides = isinstance(self.change, Set | Add) and self.site.endswith(SCORES)
        given = depth() == 1 and isinstance(
            self.change, Set | Add | Swap
        )  # by a user, and not by an analysis
        if given and not hides and _lowest(self.change) == -math.inf:
            raise ValueError(
                f"values for {self.name} must be finite, got -inf, which only scores may be set to"
            )

    def __reduce__(self) -> tuple[type[Edit], tuple[object, ...]]:
        """Pickling for other processes: the view of an empty `at` cannot be pickled."""
        return type(self), (self.where, self.change, dict(self.at), self.rows)

    @property
    def site(self) -> str:
        """The full name of the site."""
        return self.where.site if isinstance(self.where, Part) else self.where

    @property
    def name(self) -> str:
        """The part that is changed, in its one spelling; a site that is no part by its own name."""
        return str(self.where)

    @property
    def cells(self) -> Mapping[str, PositionIndex]:
        """The indices by axis letter, the part's own included."""
        indices: Mapping[str, PositionIndex] = self._cells  # type: ignore[attr-defined]
        return indices

    @property
    def planned(self) -> bool:
        """Whether the change is data, so that a sweep knows what it touches."""
        return isinstance(self.change, Ready)

    @property
    def of_rows(self) -> bool:
        """Whether the edit names rows, or one position per row, so that it applies to one batch only."""
        return self.rows is not None or any(isinstance(i, PerRow) for i in self.cells.values())

    def singly(self) -> list[Edit]:
        """This edit as several edits, each of which names one index per axis (or one position per row)."""
        many: dict[str, Sequence[PositionIndex]] = {
            dim: i.apart() if isinstance(i, PerRow) else i
            for dim, i in self.at.items()
            if isinstance(i, tuple) or (isinstance(i, PerRow) and i.several)
        }
        if not many:
            return [self]
        cells: Iterable[tuple[PositionIndex, ...]] = product(*many.values())
        return [replace(self, at={**self.at, **dict(zip(many, cell, strict=True))}) for cell in cells]

    def _named_cells(self) -> dict[str, PositionIndex]:
        """The indices by axis letter, checked as far as possible without a model."""
        of_part = dict(self.where.at) if isinstance(self.where, Part) else {}
        indices: dict[str, PositionIndex] = dict(of_part)
        if not self.at:
            return indices
        axes = sites.axes_of(own_name(self.site)).split()[1:]
        possible = {sites.WORDS[axis]: axis for axis in axes if axis in sites.WORDS}
        for dim, index in self.at.items():
            if dim not in possible or possible[dim] in of_part:
                free_dims = [word for word, axis in possible.items() if axis not in of_part]
                raise KeyError(
                    f"{self.name} has the dims {', '.join(free_dims)}, not {dim!r}; {nearest(dim, free_dims)}"
                )
            indices[possible[dim]] = _checked_index(dim, index)
        object.__setattr__(self, "at", {dim: indices[possible[dim]] for dim in self.at})
        return indices


def _lowest(change: Change) -> float:
    """The lowest of the values that a change brings; 0 where it brings none."""
    values = getattr(change, "values", 0.0)
    if not isinstance(values, Tensor):
        return float(values)
    return 0.0 if values.is_meta or not values.numel() else float(values.detach().amin())


def _is_index(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


SIDES = ("encoder.", "decoder.")
"""Prefixes of the sites of an encoder-decoder."""


def orthonormal(directions: Float[Tensor, "*k d"]) -> Float[Tensor, "r d"]:
    """An orthonormal basis of the directions' span, in float64. ValueError if all are 0, or not finite."""
    if not directions.numel():
        raise ValueError(
            f"directions of at least one number are required, got shape {shape_text(directions.shape)}"
        )
    rows = directions.detach().double().reshape(-1, directions.shape[-1])
    if not bool(rows.isfinite().all()) or not bool(rows.any()):
        raise ValueError("directions of finite numbers, not all 0, are required")
    _, sizes, basis = torch.linalg.svd(rows, full_matrices=False)
    return basis[sizes > sizes[0] * max(rows.shape) * torch.finfo(torch.float64).eps]


def onto(x: Float[Tensor, "... d"], basis: Float[Tensor, "r d"]) -> Float[Tensor, "... d"]:
    """The part of x in the span of an orthonormal basis, computed in float32 at least."""
    q = to_device(basis, x.device).to(upcast(x))
    return ((upcast(x) @ q.mT) @ q).to(x)


def _checked_index(dim: str, index: object) -> PositionIndex:
    of_positions = dim in [sites.WORDS[axis] for axis in POSITIONS]
    if isinstance(index, int) and not isinstance(index, bool):
        return index
    if of_positions and isinstance(index, PerRow):
        return index
    if of_positions and isinstance(index, Mapping | ByRole):
        return ByRole.of(index)
    if of_positions and isinstance(index, str) and index == NEW:
        return NEW
    if isinstance(index, Sequence | Tensor | range) and not isinstance(index, str):
        indices = tuple(int(i) for i in index)
        if indices and len(set(indices)) == len(indices):
            return indices[0] if len(indices) == 1 else indices
    more = ', PerRow([...]) with one for each row, {"role": "user"}, or "new"' if of_positions else ""
    raise ValueError(f"{dim!r} requires an index, or several that differ{more}, got {index!r}")


def own_name(site: str) -> str:
    """The name of a site without the prefix `encoder.` or `decoder.`."""
    return site.split(".", 1)[1] if site.startswith(SIDES) else site
