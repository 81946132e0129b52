"""Reductions of some of the named values, and several reductions of the same values at once."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar

from jaxtyping import Int, Shaped
from torch import Tensor

from interp.core.axes import shape_text
from interp.core.stats import Partial, Reduction, joined
from interp.core.wording import nearest

Value = TypeVar("Value")


@dataclass(frozen=True)
class Several:
    """A reduction: several at once, each under its own name, of the same values.

    Raises:
        ValueError: none, or a name that is empty or holds "/".

    Example:
        >>> from interp.core.extremes import TopRows
        >>> from interp.core.sketches import quantiles
        >>> both = Several({"top": TopRows(3, "norm", cells=0), "spread": quantiles("norm")})
        >>> sorted(both.of({"norm": torch.rand(5)}, rows=torch.arange(5)).parts)
        ['spread', 'top']
    """

    reductions: Mapping[str, Reduction]

    def __post_init__(self) -> None:
        if not self.reductions or any(not name or "/" in name for name in self.reductions):
            raise ValueError(f'reductions with names without "/" are required, got {list(self.reductions)}')

    def of(self, values: Mapping[str, Tensor], rows: Int[Tensor, "n"] | None = None) -> "Parts":
        """The partial results of one batch."""
        return Parts({name: reduction.of(values, rows) for name, reduction in self.reductions.items()})

    def load(self, tensors: Mapping[str, Tensor]) -> "Parts":
        """The partial results that were saved as these `tensors`."""
        by_name: dict[str, dict[str, Tensor]] = {name: {} for name in self.reductions}
        for path, value in tensors.items():
            name, _, inner_name = path.partition("/")
            named(by_name, name)[inner_name] = value
        return Parts({name: reduction.load(by_name[name]) for name, reduction in self.reductions.items()})


@dataclass(frozen=True)
class Parts:
    """The partial results of several reductions, by name."""

    parts: Mapping[str, Partial]

    def merge(self, other: "Parts") -> "Parts":
        """Both together, each reduction's partial result merged with the other's."""
        return Parts({name: part.merge(other.parts[name]) for name, part in self.parts.items()})

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the parts, as `name/...`."""
        return joined({name: part.tensors() for name, part in self.parts.items()})


@dataclass(frozen=True)
class Only:
    """A reduction: another one, of some of the values only; `Only(("loss",), Means)` averages the loss, not tokens.

    Example:
        >>> from interp.core.stats import Means
        >>> list(Only(("loss",), Means).of({"loss": torch.rand(5), "tokens": torch.arange(5)}).moments)
        ['loss']
    """

    names: Collection[str]
    reduction: Reduction

    def of(self, values: Mapping[str, Tensor], rows: Int[Tensor, "n"] | None = None) -> Partial:
        """The partial result of one batch; ValueError if one of the values is missing."""
        return self.reduction.of({name: named(values, name) for name in self.names}, rows)

    def load(self, tensors: Mapping[str, Tensor]) -> Partial:
        """The partial result that was saved as these `tensors`."""
        return self.reduction.load(tensors)


def named(values: Mapping[str, Value], name: str) -> Value:
    """The value of this name; ValueError if there is none."""
    if name not in values:
        raise ValueError(f"a value named {name!r} is required, {nearest(name, values)}; got {sorted(values)}")
    return values[name]


def pooled(values: Mapping[str, Tensor], name: str, cells: int) -> Shaped[Tensor, "n *cells"]:
    """One named value with every axis but the last `cells` made one axis of observations.

    Raises:
        ValueError: if there is no such value, or if it has no axis besides its cells.
    """
    value = named(values, name)
    if not 0 <= cells < value.ndim:
        raise ValueError(
            f"{name} requires rows and {cells} axes of cells after them, got shape {shape_text(value.shape)}"
        )
    return value.flatten(0, value.ndim - cells - 1)
