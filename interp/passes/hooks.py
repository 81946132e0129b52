"""Hook functions as TransformerLens' users write them, `fn(tensor, hook)`, turned into edits of one pass."""

import fnmatch
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from interp.core.shapes import nearest
from interp.model import sites
from interp.model.config import ModelConfig
from interp.model.edits import Edit
from interp.passes.observe import deepest

Names = str | Sequence[str] | Callable[[str], bool] | re.Pattern[str] | None
"""What selects sites: a name, several, a glob, a regular expression, a predicate; None = all not on demand."""
Direction = Literal["fwd", "bwd"]


@dataclass
class HookPoint:
    """What a hook function is told about where it is: the site's name, and a dict of its own for one pass."""

    name: str
    ctx: dict[str, object] = field(default_factory=dict)

    def layer(self) -> int:
        """The block this site is in; ValueError outside the blocks."""
        found = re.match(r"blocks\.(\d+)\.", self.name)
        if found is None:
            raise ValueError(f"{self.name!r} is not inside a block")
        return int(found[1])


HookFunction = Callable[[Tensor, HookPoint], Tensor | None]
Hook = tuple[Names, HookFunction]


def matching(names: Names, config: ModelConfig, stop: int | None = None) -> list[str]:
    """Sites that a filter selects among those a pass up to block `stop` visits; KeyError if it selects none."""
    every = sites.names(config, on_demand=True)
    if names is None:
        found = [n for n in sites.names(config) if _within(n, config, stop)]
    elif isinstance(names, str) and not set(names) & set("*?["):
        sites.find(names, config)
        found = [names]
    elif isinstance(names, str | re.Pattern) or callable(names):
        accept = _predicate(names)
        found = [n for n in every if accept(n) and _within(n, config, stop)]
    else:
        found = [match for each in names for match in matching(each, config, stop)]
    if not found:
        hint = nearest(names, every) if isinstance(names, str) else f"sites are named like {every[3]}"
        raise KeyError(f"{names!r} matches no site of this model; {hint}")
    return list(dict.fromkeys(found))


def as_edits(hooks: Sequence[tuple[Hook, Direction]], config: ModelConfig) -> list[Edit]:
    """The edits that these hooks amount to, at every site of the model that their names select."""
    return [
        Edit(name, Hooked(function, direction))
        for (names, function), direction in hooks
        for name in matching(names, config)
    ]


@dataclass(frozen=True, eq=False)
class Hooked:
    """A hook function as the change of an edit: it is told where it is, and has a dict of its own for one pass.

    Backward hooks get the gradient when the pass is differentiated, and may return another one. Errors: ValueError for
    a backward hook in a pass that keeps no gradients.
    """

    function: HookFunction
    direction: Direction = "fwd"

    def at_site(self, site: str, memory: dict[str, object]) -> Callable[[Tensor], Tensor]:
        """The change of one site in one pass."""
        point = memory.setdefault(site, HookPoint(site))
        assert isinstance(point, HookPoint)
        if self.direction == "fwd":
            return _forward_change(self.function, point)
        if not torch.is_grad_enabled():
            raise ValueError(
                f"the backward hook at {site} requires a pass that keeps gradients; this one runs without"
            )
        return _backward_change(self.function, point)


@dataclass(frozen=True, eq=False)
class Standing:
    """Edits that hold for every pass of one model inside a `with`."""

    model: object
    edits: tuple[Edit, ...]


_STANDING: ContextVar[tuple[Standing, ...]] = ContextVar("interp_standing_edits", default=())


@contextmanager
def standing(model: object, edits: Sequence[Edit]) -> Iterator[None]:
    """Let these edits hold for every pass of this model, in this thread or task only, until the `with` is left.

    Blocks may overlap and be left in any order: each takes away what it brought. Nothing is kept on the model.
    """
    mine = Standing(model, tuple(edits))
    _STANDING.set((*_STANDING.get(), mine))
    try:
        yield
    finally:
        _STANDING.set(tuple(each for each in _STANDING.get() if each is not mine))


def standing_edits(model: object) -> list[Edit]:
    """The edits that hold for this model here and now, those of the outermost `with` first."""
    return [edit for each in _STANDING.get() if each.model is model for edit in each.edits]


def position_filter(
    name: str, config: ModelConfig, pos_slice: slice | int | None
) -> Callable[[Tensor], Tensor] | None:
    """The `via` that keeps some positions of a site: axis 1, or the query axis of scores and patterns."""
    if pos_slice is None:
        return None
    keep = slice(pos_slice, pos_slice + 1 or None) if isinstance(pos_slice, int) else pos_slice
    site, _ = sites.find(name, config)
    axis = 2 if site.axes.startswith("b h q") else 1

    def kept(value: Tensor) -> Tensor:
        part = value[(slice(None),) * axis + (keep,)]
        if part.shape[axis] == 0:
            raise ValueError(f"pos_slice {pos_slice} keeps none of the {value.shape[axis]} positions")
        return part

    return kept


def _forward_change(function: HookFunction, point: HookPoint) -> Callable[[Tensor], Tensor]:
    def change(value: Tensor) -> Tensor:
        new = function(value, point)
        return value if new is None else new

    return change


def _backward_change(function: HookFunction, point: HookPoint) -> Callable[[Tensor], Tensor]:
    def change(value: Tensor) -> Tensor:
        value = value if value.requires_grad else value.detach().requires_grad_()
        value.register_hook(lambda grad: function(grad, point))
        return value

    return change


def _predicate(names: str | re.Pattern[str] | Callable[[str], bool]) -> Callable[[str], bool]:
    if isinstance(names, str):
        pattern = names
        return lambda name: fnmatch.fnmatchcase(name, pattern)
    if isinstance(names, re.Pattern):
        regex = names
        return lambda name: regex.fullmatch(name) is not None
    return names


def _within(name: str, config: ModelConfig, stop: int | None) -> bool:
    if stop is None:
        return True
    need = deepest([name], config)
    return need is not None and need <= stop
