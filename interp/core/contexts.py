"""Lists of the top values of each cell with their context: tokens and the cell's values before and after each entry.

`TopRows` finds the entries. Their context is taken from the batch, and is merged together with its entry.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from interp.core.extremes import Extremes, TopRows
from interp.core.named import named
from interp.core.stats import joined, parted

_PLACE = "place in the batch"


@dataclass(frozen=True)
class TopInContext:
    """A reduction: the lists of `top`, and the values `along` around each entry.

    Args:
        along, at: names of values `[n p]` or `[n p c]`, where c are the cells of `top` (which must have one axis of
            cells). `along` values are kept for the whole context, `at` values for the entry only. Missing ones are NaN,
            or -1 for integers.

    Raises:
        ValueError: as `TopRows`.

    Example:
        >>> rule = TopInContext(TopRows(1, "neuron", before=1, after=1), ("tokens", "neuron"))
        >>> values = {"neuron": torch.tensor([[[1.0], [5.0], [3.0]]]), "tokens": torch.tensor([[7, 8, 9]])}
        >>> rule.of(values, rows=torch.tensor([4])).along["tokens"].tolist()
        [[[7, 8, 9]]]
    """

    top: TopRows
    along: tuple[str, ...]
    at: tuple[str, ...] = ()

    def of(self, values: Mapping[str, Tensor], rows: Int[Tensor, "n"] | None = None) -> "ContextExamples":
        """The lists of one batch."""
        n, p = named(values, self.top.value).shape[:2]
        place = torch.arange(n * p, device=values[self.top.value].device).view(n, p)
        top = self._place_rule.of({**values, _PLACE: place}, rows)
        assert top.context is not None
        around, entry = top.context, top.context[..., self.top.before : self.top.before + 1]
        along = {name: _values_at(named(values, name), around) for name in self.along}
        along |= {name: _values_at(named(values, name), entry) for name in self.at}
        return ContextExamples(replace(top, context=None), along)

    def load(self, tensors: Mapping[str, Tensor]) -> "ContextExamples":
        """The lists that were saved as these `tensors`."""
        parts = parted(tensors)
        return ContextExamples(self._place_rule.load(parts["top"]), parts["along"])

    @property
    def _place_rule(self) -> TopRows:
        """The rule `top`, with each token's flat index in the batch as context, to look up all other values by."""
        return replace(self.top, context=_PLACE)


@dataclass(frozen=True, eq=False)
class ContextExamples:
    """The lists of every cell, and the values around each entry."""

    top: Extremes
    along: Mapping[str, Shaped[Tensor, "c k w"]]

    def merge(self, other: "ContextExamples") -> "ContextExamples":
        """The lists over both parts."""
        lists = (self.top.rows, other.top.rows)
        number = torch.arange(sum(x.shape[-1] for x in lists), device=self.top.rows.device)
        first, second = (
            x.expand_as(rows)[..., None]
            for x, rows in zip(number.split([rows.shape[-1] for rows in lists]), lists, strict=True)
        )
        top = replace(self.top, context=first).merge(replace(other.top, context=second))
        assert top.context is not None
        candidates = {name: torch.cat((x, other.along[name]), 1) for name, x in self.along.items()}
        along = {
            name: x.gather(1, top.context.clamp_min(0).expand(-1, -1, x.shape[2])).masked_fill(
                top.context < 0, absent(x)
            )
            for name, x in candidates.items()
        }
        return ContextExamples(replace(top, context=None), along)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the lists, by name."""
        return joined({"top": self.top.tensors(), "along": self.along})


def _values_at(value: Shaped[Tensor, "n p ..."], place: Int[Tensor, "c k w"]) -> Shaped[Tensor, "c k w"]:
    """The values at flat indices `place` of a batch, for each cell its own; NaN (integers: -1) where `place` is -1."""
    flat = value.flatten(0, 1) if value.numel() else value.new_zeros(1, *value.shape[2:])
    at = place.clamp_min(0)
    cell = torch.arange(len(place), device=place.device)[:, None, None]
    return (flat[at] if flat.ndim == 1 else flat[at, cell]).masked_fill(place < 0, absent(flat))


def absent(value: Tensor) -> float | int:
    """The filler of missing entries: NaN, or -1 among integers."""
    return torch.nan if value.is_floating_point() else -1
