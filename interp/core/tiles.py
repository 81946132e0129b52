"""Questions about the entries of `a @ b` that never hold more than one tile of it, and of narrow weights, widened.

a: `[rows mid]`, b: `[mid columns]`. Tiles are computed in float32 at least, one after the other in the same memory; the
answers carry no gradient, but for those of `wide_product`.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import FunctionCtx

from interp.core.axes import shape_text
from interp.core.stats import upcast

TILE = 2**24
"""Entries of a run of whole rows, and of a square block on an accelerator: 64 MiB in float32."""
CACHED = 1024
"""Side of a square block on a CPU: 4 MiB in float32, so that it is read again while it is still in the cache.

At a vocabulary of 50 257 and heads 64 wide that halves the time of the products (`experiments/bench/copying.py`).
"""
WIDENED = 2**20
"""Entries of narrow weights that are widened together on a CPU: 4 MiB in float32, still in the cache for the product.

Of 3 and 48 rows with SmolLM2's unembedding that takes 21 and 42 ms where tiles of 64 MiB took 68 and 102.
"""


@torch.no_grad()
def row_tiles(
    a: Float[Tensor, "n mid"], b: Float[Tensor, "mid v"]
) -> Iterator[tuple[int, Float[Tensor, "_ v"]]]:
    """The product in runs of whole rows: the index of the first row, and the rows, overwritten by the next run."""
    a, b = upcast(a), upcast(b)
    step = max(1, TILE // max(1, b.shape[1]))
    memory = a.new_empty(min(step, len(a)), b.shape[1])
    for first in range(0, len(a), step):
        some = a[first : first + step]
        yield first, torch.mm(some, b, out=memory[: len(some)])


@torch.no_grad()
def blocks(
    a: Float[Tensor, "n mid"], b: Float[Tensor, "mid v"]
) -> Iterator[tuple[int, int, Float[Tensor, "_ _"]]]:
    """The product in square blocks: first row, first column, entries, overwritten by the next block.

    Row by row of blocks; the block that begins on the diagonal comes first in its row, the others from left to right.
    """
    a, b = upcast(a), upcast(b)
    side = CACHED if a.device.type == "cpu" else int(TILE**0.5)
    memory = a.new_empty(min(side, len(a)), min(side, b.shape[1]))
    for row in range(0, len(a), side):
        some = a[row : row + side]
        for column in sorted(range(0, b.shape[1], side), key=lambda at: at != row):
            others = b[:, column : column + side]
            yield row, column, torch.mm(some, others, out=memory[: len(some), : others.shape[1]])


@torch.no_grad()
def entry_ranks(
    a: Float[Tensor, "n mid"], b: Float[Tensor, "mid v"], columns: Int[Tensor, "n"]
) -> Int[Tensor, "n"]:
    """How many entries of each row of `a @ b` are larger than its entry in one column; 0 = none is."""
    columns, found = columns.to(a.device), []
    for first, rows in row_tiles(a, b):
        entries = rows.gather(1, columns[first : first + len(rows), None])
        found.append((rows > entries).sum(1))
    return torch.cat(found)


@torch.no_grad()
def top_entries(
    a: Float[Tensor, "n mid"], b: Float[Tensor, "mid v"], k: int, *, largest: bool = True
) -> tuple[Float[Tensor, "k"], Int[Tensor, "k"], Int[Tensor, "k"]]:
    """The k largest (or smallest) entries in order, with their rows and columns; equal entries in any order.

    Only rows of a block whose extreme beats the k-th entry found so far are looked at again.
    """
    k, sign = _count(k, a.shape[0] * b.shape[1]), 1 if largest else -1
    values = a.new_empty(0, dtype=upcast(a).dtype)
    places = torch.empty(2, 0, dtype=torch.int64, device=a.device)
    for row, column, block in blocks(a * sign, b):
        bound = values[-1] if len(values) == k else -torch.inf
        hot = (block.amax(1) > bound).nonzero()[:, 0]
        if len(hot) == 0:
            continue
        width = block.shape[1]
        found, flat = block[hot].flatten().topk(min(k, len(hot) * width))
        new_places = torch.stack((hot[flat // width] + row, flat % width + column))
        values, order = torch.cat((values, found)).topk(min(k, len(values) + len(found)))
        places = torch.cat((places, new_places), 1)[:, order]
    return values * sign, places[0], places[1]


@torch.no_grad()
def row_top(
    a: Float[Tensor, "n mid"], b: Float[Tensor, "mid v"], k: int, *, largest: bool = True
) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
    """The k largest (or smallest) entries of every row in order, and their columns; equal entries in any order."""
    k = _count(k, b.shape[1])
    values = a.new_empty(len(a), k, dtype=upcast(a).dtype)
    columns = torch.empty(len(a), k, dtype=torch.int64, device=a.device)
    for first, tile in row_tiles(a, b):
        found = tile.topk(k, -1, largest)
        tile_rows = slice(first, first + len(tile))
        values[tile_rows], columns[tile_rows] = found.values, found.indices
    return values, columns


@torch.no_grad()
def diagonal_ranks(a: Float[Tensor, "n mid"], b: Float[Tensor, "mid v"]) -> Int[Tensor, "n"]:
    """How many entries of row i are larger than entry (i, i): 0 where none is, so equal ones share the better rank."""
    if a.shape[0] > b.shape[1]:
        raise ValueError(
            f"a diagonal entry in every row is required, got a product of shape "
            f"{shape_text((a.shape[0], b.shape[1]))}"
        )
    ranks = torch.zeros(len(a), dtype=torch.int64, device=a.device)
    diagonal = upcast(a).new_empty(0, 1)
    for row, column, block in blocks(a, b):
        if column == row:
            diagonal = block.diagonal()[: len(block), None].clone()
        # Ones and zeros in the block's own memory and dtype: 1.1x the products alone (`experiments/bench/copying.py`);
        # booleans and their sum take nearly as long as the products themselves.
        larger = block.gt_(diagonal).sum(-1)
        ranks[row : row + len(block)] += larger.long()
    return ranks


def _count(k: int, most: int) -> int:
    if not 1 <= k <= most:
        raise ValueError(f"1 to {most} entries are required, got {k}")
    return k


def wide_product(x: Float[Tensor, "*n d"], weight: Float[Tensor, "m d"]) -> Float[Tensor, "*n m"]:
    """x W^T in the dtype of x, for weights in a narrower one: a block of their rows is widened at a time.

    In half precision the product itself would be rounded; so it is exact to the dtype of x, and neither the pass nor
    its gradient keeps a widened copy of the weights. The weights get a gradient only where they require one.

    Example:
        >>> float(wide_product(torch.ones(1, 3), torch.tensor([[20.0, 0.0625, 0.0]]).bfloat16()))
        20.0625
    """
    if torch.is_grad_enabled() and weight.requires_grad:
        return x @ weight.to(x.dtype).mT
    return _WideProduct.apply(x, weight)  # type: ignore[no-untyped-call]


class _WideProduct(torch.autograd.Function):
    """Product with weights in half precision; the backward pass widens them again instead of keeping a copy."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        rows, found = x.reshape(-1, x.shape[-1]), x.new_empty(*x.shape[:-1], len(weight))
        for part in _blocks_of_rows(weight):
            torch.mm(rows, weight[part].to(x.dtype).mT, out=found.view(-1, len(weight))[:, part])
        return found

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors  # type: ignore[attr-defined]
        found = grad.new_zeros(*grad.shape[:-1], weight.shape[1])
        for part in _blocks_of_rows(weight):
            found += grad[..., part] @ weight[part].to(grad.dtype)
        return found, None


def _blocks_of_rows(weight: Tensor) -> list[slice]:
    step = max(1, (WIDENED if weight.device.type == "cpu" else TILE) // max(1, weight.shape[1]))
    return [slice(first, first + step) for first in range(0, len(weight), step)]
