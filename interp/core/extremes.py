"""The k largest or smallest values of every cell, with their rows and positions: maximum-activating examples.

Entries are ordered by value, then row, then position, so the list is the same bit for bit for every split of the rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from interp.core.axes import shape_text
from interp.core.memory import check_memory
from interp.core.named import named
from interp.core.transfers import to_device

if TYPE_CHECKING:
    import xarray as xr


PADDED = 1000
"""Length up to which lists have k places, some of them empty; longer ones end with what there is."""


@dataclass(frozen=True)
class TopRows:
    """A reduction: the k largest values of `value` `[n *cells]` or `[n p *cells]`, with their rows and positions.

    The last `cells` axes are kept apart. By default a row is listed once, at its best position, as is usual for
    maximum-activating examples. Ties go to the smaller row, then to the smaller position. Absent: NaN, and the infinity
    that can never be on the list. Positions are columns: let texts begin in column 0, or they depend on the batch.
    Memory of the list: 24 bytes per cell and entry, and 8 per token of context.

    Raises:
        ValueError: without row identities, for k < 1, a value that is missing or has another number of axes.

    Example:
        >>> top = TopRows(2, "neuron")
        >>> top.of({"neuron": torch.tensor([[1.0], [5.0], [3.0]])}, rows=torch.tensor([7, 8, 9])).rows.tolist()
        [[8, 9]]
    """

    k: int
    value: str
    cells: int = 1
    largest: bool = True
    once_per_row: bool = True
    context: str | None = None
    """Name of the value `[n p]` with the tokens; -1 at padding."""
    before: int = 10
    """Number of tokens of context before the entry."""
    after: int = 3
    """Number of tokens of context after the entry."""

    def __post_init__(self) -> None:
        if self.k < 1 or min(self.cells, self.before, self.after) < 0:
            raise ValueError(f"k >= 1, cells >= 0, before >= 0 and after >= 0 are required, got {self}")

    def of(self, values: Mapping[str, Tensor], rows: Int[Tensor, "n"] | None = None) -> "Extremes":
        """The list of one batch."""
        value, tokens = self._value_and_tokens(values)
        if rows is None:
            raise ValueError("a list of rows requires rows with identities: number the batch (`Batch.row`)")
        cells = value.shape[2:]
        self._check_memory(cells, len(rows) * (1 if self.once_per_row else value.shape[1]), value.device)
        if len(rows) == 0:
            return self._empty_list(cells, value.device)
        rows = to_device(rows, value.device).long()
        scores, at = self._candidates(self._scores(value), rows)
        place, position = at // value.shape[1], at % value.shape[1]
        best, scores = _best_entries(scores, rows[place], position, self)
        place, position = place.gather(1, best), position.gather(1, best)
        lists = {"scores": scores, "rows": rows[place], "positions": position}
        if tokens is not None:
            lists["context"] = self._windows(tokens.long(), place, position)
        return self.load(
            {name: x.view(*cells, *x.shape[1:]) for name, x in lists.items()}
        )._with_empty_places()

    def load(self, tensors: Mapping[str, Tensor]) -> "Extremes":
        """The list that was saved as these `tensors`."""
        return Extremes(
            self, tensors["scores"], tensors["rows"], tensors["positions"], tensors.get("context")
        )

    def _value_and_tokens(self, values: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """The value with an axis of positions, and the tokens; ValueError if their shapes do not fit."""
        value = named(values, self.value)
        tokens = None if self.context is None else named(values, self.context)
        axes = value.ndim - self.cells
        if axes not in (1, 2) or (tokens is not None and tokens.shape != value.shape[:axes]):
            tokens_text = "" if tokens is None else f" beside tokens of shape {shape_text(tokens.shape)}"
            raise ValueError(
                f"{self.value} requires an axis of rows, perhaps one of positions, and {self.cells} of cells, "
                f"got shape {shape_text(value.shape)}{tokens_text}"
            )
        return value if axes == 2 else value[:, None], tokens

    def _scores(self, value: Shaped[Tensor, "n p *cells"]) -> Float[Tensor, "c n p"]:
        """The scores that the list ranks; -inf where there is nothing."""
        score = value if value.is_floating_point() else value.double()
        score_cnp = rearrange(score if self.largest else -score, "n p ... -> (...) n p")
        return score_cnp.masked_fill(score_cnp.isnan(), -torch.inf)

    def _candidates(self, score_cnp: Float[Tensor, "c n p"], rows: Int[Tensor, "n"]) -> tuple[Tensor, Tensor]:
        """Scores `[c m]`, m >= k, that include the list's, and their flat index: each row's best, or the k best."""
        _, n, p = score_cnp.shape
        if self.once_per_row:
            scores, at = score_cnp.max(2)  # the first of equal ones, as torch documents
            at = at + p * torch.arange(n, device=at.device)
        else:
            order = rows.argsort(stable=True)
            at = _first_largest(score_cnp[:, order].flatten(1), min(self.k, n * p))
            at = order[at // p] * p + at % p
            scores = score_cnp.flatten(1).gather(1, at)
        # Adding 0 turns -0 into 0, so that all sorts order equal numbers alike.
        missing = (0, max(0, self._length(at.shape[1]) - at.shape[1]))
        return F.pad(scores.double() + 0.0, missing, value=-torch.inf), F.pad(at, missing)

    def _length(self, there: int) -> int:
        """Length of the lists where so many entries may be: k, or of long lists what there is."""
        return self.k if self.k <= PADDED else min(self.k, there)

    def _check_memory(self, cells: torch.Size, there: int, device: torch.device) -> None:
        """ValueError unless lists of so many entries fit into what is free."""
        length, numbers = (
            self._length(there),
            3 + (0 if self.context is None else self.before + self.after + 1),
        )
        check_memory(
            f"lists of {length} entries (top) of each of {cells.numel()} cells", 8 * cells.numel() * length * numbers,
            device, "a smaller top and fewer cells take less",
        )  # fmt: skip

    def _empty_list(self, cells: torch.Size, device: torch.device) -> "Extremes":
        """The list of no rows."""
        empty = torch.full((*cells, self._length(0)), -1, device=device)
        width = self.before + self.after + 1
        context = None if self.context is None else empty[..., None].expand(*empty.shape, width)
        return Extremes(self, torch.full_like(empty, -torch.inf, dtype=torch.float64), empty, empty, context)

    def _windows(
        self, tokens: Int[Tensor, "n p"], place: Int[Tensor, "c k"], position: Int[Tensor, "c k"]
    ) -> Int[Tensor, "c k w"]:
        """The tokens around a position of a row; -1 beyond its ends."""
        padded = F.pad(tokens, (self.before, self.after), value=-1)
        offset = torch.arange(self.before + self.after + 1, device=tokens.device)
        return padded[place[..., None], position[..., None] + offset]


@dataclass(frozen=True, eq=False)
class Extremes:
    """The list of every cell, best first; with fewer entries than k, rows and positions end in -1 (long lists end)."""

    rule: TopRows
    scores: Float[Tensor, "*cells k"]
    """The values, negated if the list is of the smallest ones; -inf at empty places."""
    rows: Int[Tensor, "*cells k"]
    positions: Int[Tensor, "*cells k"]
    """Index along the axis of positions, 0 for values without one."""
    context: Int[Tensor, "*cells k w"] | None
    """Tokens around each entry; -1 beyond the ends of its row."""

    @property
    def values(self) -> Float[Tensor, "*cells k"]:
        """The k largest (or smallest) values in float64; NaN at empty places."""
        signed = self.scores if self.rule.largest else -self.scores
        return signed.masked_fill(self.rows < 0, torch.nan)

    def notes(self) -> tuple[str, ...]:
        """A sentence where some list has fewer places than requested; otherwise nothing."""
        fewest = int((self.rows >= 0).sum(-1).min())
        if fewest == self.rule.k:
            return ()
        others = "the others are NaN" if self.rule.k <= PADDED else "the lists end there"
        why = (
            "a text is listed at its best token alone (once_per_row)"
            if self.rule.once_per_row
            else "no more tokens count"
        )
        return (f"{fewest} places where {self.rule.k} were asked for: {why}; {others}",)

    def merge(self, other: "Extremes") -> "Extremes":
        """The list over both parts; ValueError if they were made by different rules."""
        if self.rule != other.rule:
            raise ValueError(f"lists made by one rule are required, got {self.rule} and {other.rule}")
        there = self.rows.shape[-1] + other.rows.shape[-1]
        self.rule._check_memory(self.rows.shape[:-1], there, self.rows.device)
        mine, theirs = self.tensors(), other.tensors()
        candidates = {name: torch.cat((x, theirs[name]), self.rows.ndim - 1) for name, x in mine.items()}
        best, scores = _best_entries(
            candidates["scores"], candidates["rows"], candidates["positions"], self.rule
        )
        merged = {"scores": scores} | {
            name: candidates[name].gather(-1, best) for name in ("rows", "positions")
        }
        if self.context is not None:
            best_windows = best[..., None].expand(*best.shape, self.context.shape[-1])
            merged["context"] = candidates["context"].gather(-2, best_windows)
        return self.rule.load(merged)._with_empty_places()

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the lists, by name."""
        tensors = {"scores": self.scores, "rows": self.rows, "positions": self.positions}
        return tensors if self.context is None else tensors | {"context": self.context}

    def _with_empty_places(self) -> "Extremes":
        """The lists with rows, positions and context set to -1 at empty places."""
        empty = self.scores == -torch.inf
        context = None if self.context is None else self.context.masked_fill(empty[..., None], -1)
        rows, positions = (x.masked_fill(empty, -1) for x in (self.rows, self.positions))
        return Extremes(self.rule, self.scores, rows, positions, context)


def without_empty_ranks(result: "xr.Dataset", rule: TopRows) -> "xr.Dataset":
    """The Dataset of the lists without the ranks of a long list that are empty in every cell."""
    if rule.k <= PADDED:
        return result
    return result.isel(rank=slice(int((result["row"] >= 0).sum("rank").max())))


def _best_entries(
    scores: Float[Tensor, "*cells m"], rows: Int[Tensor, "*cells m"], positions: Tensor, rule: TopRows
) -> tuple[Tensor, Tensor]:
    """Indices of the k best entries, in order, and their scores; with `once_per_row` a row's other entries get -inf."""
    order = positions.argsort(dim=-1, stable=True)
    order = order.gather(-1, scores.gather(-1, order).argsort(dim=-1, descending=True, stable=True))
    order = order.gather(-1, rows.gather(-1, order).argsort(dim=-1, stable=True))
    scores = scores.gather(-1, order)
    if rule.once_per_row:
        rows = rows.gather(-1, order)
        scores = scores.masked_fill(F.pad(rows[..., 1:] == rows[..., :-1], (1, 0)), -torch.inf)
    best = scores.argsort(dim=-1, descending=True, stable=True)[..., : rule.k]
    return order.gather(-1, best), scores.gather(-1, best)


def _first_largest(scores: Float[Tensor, "c m"], k: int) -> Int[Tensor, "c k"]:
    """Indices of the k largest scores, in no order; of equal scores the first ones (`topk` takes any)."""
    least = scores.topk(k).values[:, -1:]
    above, level = scores > least, scores == least
    room = k - above.sum(1, keepdim=True)
    return (above | (level & (level.cumsum(1) <= room))).nonzero()[:, 1].view(len(scores), k)
