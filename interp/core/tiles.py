"""Questions about the entries of `a @ b` that never hold more than one tile of it.

a: `[rows mid]`, b: `[mid columns]`. Tiles are runs of whole rows of about `TILE` entries, computed in float32 at least.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.core.shapes import shape_text

TILE = 2**24
"""Entries of one tile: 64 MiB in float32."""


def row_tiles(
    a: Float[Tensor, "n mid"], b: Float[Tensor, "mid v"]
) -> Iterator[tuple[int, Float[Tensor, "_ v"]]]:
    """The product in runs of rows: the index of the first row, and the rows."""
    a, b = wide(a), wide(b)
    step = max(1, TILE // b.shape[-1])
    for first in range(0, len(a), step):
        yield first, a[first : first + step] @ b


def top_entries(
    a: Float[Tensor, "n mid"], b: Float[Tensor, "mid v"], k: int, *, largest: bool = True
) -> tuple[Float[Tensor, "k"], Int[Tensor, "k"], Int[Tensor, "k"]]:
    """The k largest (or smallest) entries in order, with their rows and columns.

    Only rows whose extreme beats the k-th entry found so far are looked at again.
    """
    k, sign = _count(k, a.shape[0] * b.shape[1]), 1 if largest else -1
    values = a.new_full((0,), 0, dtype=wide(a).dtype)
    places = torch.empty(0, 2, dtype=torch.int64, device=a.device)
    for first, tile in row_tiles(a * sign, b):
        bound = values[-1] if len(values) == k else -torch.inf
        rows = (tile.amax(1) > bound).nonzero()[:, 0]
        if len(rows) == 0:
            continue
        found, flat = tile[rows].flatten().topk(min(k, len(rows) * tile.shape[1]))
        here = torch.stack((rows[flat // tile.shape[1]] + first, flat % tile.shape[1]), 1)
        values, order = torch.cat((values, found)).sort(descending=True, stable=True)
        values, places = values[:k], torch.cat((places, here))[order[:k]]
    return values * sign, places[:, 0], places[:, 1]


def row_top(
    a: Float[Tensor, "n mid"], b: Float[Tensor, "mid v"], k: int, *, largest: bool = True
) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
    """The k largest (or smallest) entries of every row in order, and their columns."""
    parts = [tile.topk(_count(k, b.shape[1]), -1, largest) for _, tile in row_tiles(a, b)]
    return torch.cat([p.values for p in parts]), torch.cat([p.indices for p in parts])


def diagonal_ranks(a: Float[Tensor, "n mid"], b: Float[Tensor, "mid v"]) -> Int[Tensor, "n"]:
    """How many entries of row i are larger than entry (i, i): 0 where the diagonal is the largest."""
    if a.shape[0] > b.shape[1]:
        raise ValueError(
            f"a diagonal entry in every row is required, got a product of shape "
            f"{shape_text((a.shape[0], b.shape[1]))}"
        )
    ranks = []
    for first, tile in row_tiles(a, b):
        own = tile.diagonal(first)[:, None]
        ranks.append((tile > own).sum(-1))
    return torch.cat(ranks)


def wide(x: Tensor) -> Tensor:
    """The tensor in float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _count(k: int, most: int) -> int:
    if not 1 <= k <= most:
        raise ValueError(f"1 to {most} entries are required, got {k}")
    return k
