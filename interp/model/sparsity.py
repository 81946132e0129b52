"""Attention under a fixed sparse pattern: which keys a query sees, and the same attention by runs of queries.

A pattern is a function of positions (`Sparsity`). `pieces` cuts it into runs of queries with the keys that one of
them sees, and `attend_pieces` attends run by run, so that time and memory follow what is seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.model.records import ConfigRecord


class Sparsity(ConfigRecord):
    """Which keys a query sees under a fixed pattern, as a function of query and key positions.

    Positions count the kept tokens of a text, so that a padded row sees what the unpadded one does. A definition
    may include later keys; a causal model hides them. `run_sees` takes a run of queries: for a run of one it is the
    mask itself, for a block of queries it says which keys to gather.
    """

    def run_sees(
        self, first: Int[Tensor, "..."], last: Int[Tensor, "..."], key: Int[Tensor, "..."]
    ) -> Bool[Tensor, "..."]:
        """Whether any query at positions `first` to `last` sees the key, without the causal mask; shapes broadcast."""
        raise NotImplementedError


def visible(kind: Sparsity, query: Int[Tensor, "#b q"], key: Int[Tensor, "#b k"]) -> Bool[Tensor, "#b q k"]:
    """True where a query position sees a key position, apart from the causal mask."""
    position = query[..., None]
    return kind.run_sees(position, position, key[:, None])


@dataclass(frozen=True)
class QueryPiece:
    """A run of queries, the keys that any of them sees, and which query sees which key."""

    queries: slice
    keys: Int[Tensor, "k"]
    allowed: Bool[Tensor, "q k"]


def pieces(
    kind: Sparsity, n_query: int, n_key: int, device: torch.device, *, causal: bool, run: int = 64
) -> tuple[QueryPiece, ...]:
    """The pattern of the last `n_query` of `n_key` positions, one text without padding, as runs of queries.

    Its size follows the number of keys that runs see; a matrix `[n_query, n_key]` is never made.
    """
    key = torch.arange(n_key, device=device)
    query_pieces = []
    for start in range(n_key - n_query, n_key, run):
        query = key[start : start + run]
        before = key[: start + run] if causal else key
        keys = before[kind.run_sees(query[0], query[-1], before)]
        allowed = visible(kind, query[None], keys[None])[0]
        if causal:
            allowed &= keys <= query[:, None]
        begin = start - n_key + n_query
        query_pieces.append(QueryPiece(slice(begin, begin + len(query)), keys, allowed))
    return tuple(query_pieces)


def attend_pieces(
    q: Float[Tensor, "b q h e"],
    k: Float[Tensor, "b k g e"],
    v: Float[Tensor, "b k g e"],
    pieces: Iterable[QueryPiece],
    scale: float,
) -> Float[Tensor, "b q h e"]:
    """`attention.attend` under a sparse mask: each run of queries against the keys that one of them sees, gathered.

    Time and memory follow the share of (run, key) pairs that are seen (experiments/bench/sparse_attention.py). Not
    torch's flex_attention: on a CPU (torch 2.13, 8 heads of 64, a window of 256 in 8 192 tokens) it takes 0.21 s for
    this function's 0.11 s, 15 to 60 s to compile and 0.8 s to make its mask, whose cost is quadratic, and has no
    backward pass.
    """
    outputs = []
    for piece in pieces:
        # [b k g e] -> [b g k e], the keys of this run alone
        keys, values = (x.index_select(1, piece.keys).transpose(1, 2) for x in (k, v))
        outputs.append(
            F.scaled_dot_product_attention(
                q[:, piece.queries].transpose(1, 2), keys, values,
                attn_mask=piece.allowed, scale=scale, enable_gqa=q.shape[2] != k.shape[2],
            ).transpose(1, 2)
        )  # fmt: skip
    return torch.cat(outputs, 1)
