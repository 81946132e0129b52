"""Who may look at whom, and at which position everybody stands: built from explicit masks, never from tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from interp.model.records import Record

if TYPE_CHECKING:
    from interp.model.config import ModelConfig


def picked(x: Shaped[Tensor, "b p *rest"], columns: Int[Tensor, "b n"]) -> Shaped[Tensor, "b n *rest"]:
    """These columns of each row."""
    return x[torch.arange(len(x), device=x.device)[:, None], columns]


@dataclass(frozen=True)
class Layout:
    """How the rows of a pass are laid out: which columns are real, and which document each belongs to."""

    keep: Bool[Tensor, "b k"] | None = None
    """True at real tokens; None = no padding."""
    documents: Int[Tensor, "b k"] | None = None
    """An id per column; neighbours with the same id are one text, which sees nothing of the others. None = one text."""

    def to(self, device: torch.device) -> "Layout":
        """The same on another device."""
        moved = (None if x is None else x.to(device) for x in (self.keep, self.documents))
        return Layout(*moved)

    def positions(self, n: int, past: int, device: torch.device) -> Int[Tensor, "b n"]:
        """Position of the last `n` tokens: the column, or the count of kept tokens of its text before it."""
        if self.keep is None and self.documents is None:
            return torch.arange(past, past + n, device=device)[None]
        if self.documents is None:
            assert self.keep is not None
            return (self.keep.cumsum(1) - 1).clamp_min(0)[:, past:]
        kept = torch.ones_like(self.documents) if self.keep is None else self.keep.int()
        before = kept.cumsum(1) - kept
        starts = torch.ones_like(self.documents, dtype=torch.bool)
        starts[:, 1:] = self.documents[:, 1:] != self.documents[:, :-1]
        return (before - before.masked_fill(~starts, 0).cummax(1).values)[:, past:]


@dataclass(frozen=True)
class Mask:
    """What each query may see, in the cheapest form that says it, and what is added to its scores."""

    causal: bool
    """The plain triangle, which the fused kernel knows without a matrix; then `allowed` is None."""
    allowed: Bool[Tensor, "b 1 q k"] | None
    """The joined mask (causal, window, padding); None with `causal=False` means everybody sees everything."""
    bias: Float[Tensor, "b h q k"] | None = None
    """Added to the scores (ALiBi, T5)."""

    def matrix(self, n_query: int, n_key: int, device: torch.device) -> Bool[Tensor, "b 1 q k"] | None:
        """`allowed`, written out also for the plain triangle; None if nothing is hidden."""
        if not self.causal:
            return self.allowed
        return torch.ones(n_query, n_key, dtype=torch.bool, device=device).tril()[None, None]

    @cached_property
    def blind(self) -> Bool[Tensor, "b 1 q 1"] | None:
        """Queries that may see nothing, whose attention is 0; None where there cannot be any."""
        return None if self.allowed is None else ~self.allowed.any(-1, keepdim=True)

    def with_bias(self, bias: Float[Tensor, "b h q k"]) -> "Mask":
        """The same with an addition to the scores, as one matrix that hides what the mask hides.

        Blind queries keep finite scores (their attention is set to 0 afterwards), for the sake of the gradients.
        """
        allowed = self.matrix(bias.shape[-2], bias.shape[-1], bias.device)
        if allowed is not None:
            bias = bias.masked_fill(~allowed & allowed.any(-1, keepdim=True), -torch.inf)
        return Mask(causal=False, allowed=allowed, bias=bias)

    def queries(self, columns: Int[Tensor, "b n"], n_query: int, n_key: int) -> "Mask":
        """The same for these queries of each row only."""
        rows = columns[:, None, :, None]
        given = (self.matrix(n_query, n_key, columns.device), self.bias)
        allowed, bias = (
            None if x is None else x.expand(len(columns), -1, -1, -1).take_along_dim(rows, 2) for x in given
        )
        return Mask(causal=False, allowed=allowed, bias=bias)

    def to(self, device: torch.device) -> "Mask":
        """The same on another device."""
        moved = [None if x is None else x.to(device) for x in (self.allowed, self.bias)]
        return Mask(self.causal, moved[0], moved[1])


def attention_mask(
    config: ModelConfig, n: int, past: int, layout: Layout, device: torch.device, *, local: bool
) -> Mask:
    """The mask for the last `n` of `past + n` positions, for layers with the window (`local`) or without.

    Padding hides keys, so a padded query row may see nothing. The window counts kept positions, so a padded row sees
    what the unpadded one would.
    """
    total, keep, documents = past + n, layout.keep, layout.documents
    window = total if config.window is None or not local else min(config.window, total)
    windowed = window < total
    if keep is None and documents is None and not windowed:
        if not config.causal or n == 1:
            return Mask(causal=False, allowed=None)
        if past == 0:
            return Mask(causal=True, allowed=None)
    columns = torch.arange(total, device=device)
    allowed = torch.ones(1, n, total, dtype=torch.bool, device=device)
    if config.causal:
        allowed = allowed & (columns[None, None, :] <= columns[None, past:, None])
    if windowed:
        place = layout.positions(total, 0, device)
        distance = place[:, past:, None] - place[:, None, :]
        allowed = allowed & (distance.abs() < window)
    if documents is not None:
        allowed = allowed & (documents[:, past:, None] == documents[:, None, :])
    if keep is not None:
        allowed = allowed & keep[:, None, :]
    return Mask(causal=False, allowed=allowed[:, None])


class Sparsity(Record):
    """Which keys a query sees under a fixed pattern, as a question about their positions.

    Positions count the kept tokens of a text, so that a padded row sees what the unpadded one does. A definition
    reaches both ways; a causal model sees the part of it up to the query. The question is asked of a run of queries: of
    a run of one it is the mask itself, of a block of queries it says which keys to gather.
    """

    def run_sees(
        self, first: Int[Tensor, "..."], last: Int[Tensor, "..."], key: Int[Tensor, "..."]
    ) -> Bool[Tensor, "..."]:
        """Whether one of the queries at positions `first` to `last` sees the key, causality aside; shapes broadcast."""
        raise NotImplementedError


def visible(kind: Sparsity, query: Int[Tensor, "#b q"], key: Int[Tensor, "#b k"]) -> Bool[Tensor, "#b q k"]:
    """Whether the query at a position sees the key at a position, causality aside."""
    each = query[..., None]
    return kind.run_sees(each, each, key[:, None])


@dataclass(frozen=True)
class Piece:
    """A run of queries, the keys that one of them sees, and who sees which."""

    queries: slice
    keys: Int[Tensor, "k"]
    allowed: Bool[Tensor, "q k"]


def pieces(
    kind: Sparsity, n_query: int, n_key: int, device: torch.device, *, causal: bool, run: int = 64
) -> tuple[Piece, ...]:
    """The pattern of the last `n_query` of `n_key` positions, one text without padding, as runs of queries.

    Its size follows the number of keys that runs see; a matrix `[n_query, n_key]` is never made.
    """
    key = torch.arange(n_key, device=device)
    found = []
    for start in range(n_key - n_query, n_key, run):
        query = key[start : start + run]
        before = key[: start + run] if causal else key
        keys = before[kind.run_sees(query[0], query[-1], before)]
        allowed = visible(kind, query[None], keys[None])[0]
        if causal:
            allowed &= keys <= query[:, None]
        begin = start - n_key + n_query
        found.append(Piece(slice(begin, begin + len(query)), keys, allowed))
    return tuple(found)
