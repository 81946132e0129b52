"""Top entries and ranks of a product `a @ b`, and products with half-precision weights, with one tile in memory.

a: `[rows mid]`, b: `[mid columns]`. Tiles are computed in float32 at least, one after the other in the same memory.
Only `wide_product` has gradients.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import FunctionCtx

from interp.core.axes import shape_text
from interp.core.stats import upcast

TILE = 2**24
"""Entries of a tile of whole rows, and of a square block on a GPU: 64 MiB in float32."""
CACHED = 1024
"""Side of a square block on a CPU: 4 MiB in float32, so that the block stays in the cache until it is read.

With a vocabulary of 50 257 and heads of width 64 that halves the time of the products (`experiments/bench/copying.py`).
"""
WIDENED = 2**20
"""Entries of half-precision weights converted to float32 at a time on a CPU: 4 MiB, which stay in the cache.

With 3 and 48 rows and SmolLM2's unembedding the product takes 21 and 42 ms; with tiles of 64 MiB it took 68 and 102.
"""


@torch.no_grad()
def row_tiles(
    a: Float[Tensor, "n mid"], b: Float[Tensor, "mid v"]
) -> Iterator[tuple[int, Float[Tensor, "_ v"]]]:
    """Yields the product in tiles of whole rows: index of the first row, and rows, which the next tile overwrites."""
    a, b = upcast(a), upcast(b)
    step = max(1, TILE // max(1, b.shape[1]))
    memory = a.new_empty(min(step, len(a)), b.shape[1])
    for first in range(0, len(a), step):
        chunk = a[first : first + step]
        yield first, torch.mm(chunk, b, out=memory[: len(chunk)])


@torch.no_grad()
def blocks(
    a: Float[Tensor, "n mid"], b: Float[Tensor, "mid v"]
) -> Iterator[tuple[int, int, Float[Tensor, "_ _"]]]:
    """Yields the product in square blocks: first row, first column, and the entries, which the next block overwrites.

    In each row of blocks, the block that begins on the diagonal comes first, then the others from left to right.
    """
    a, b = upcast(a), upcast(b)
    side = CACHED if a.device.type == "cpu" else int(TILE**0.5)
    memory = a.new_empty(min(side, len(a)), min(side, b.shape[1]))
    for row in range(0, len(a), side):
        row_chunk = a[row : row + side]
        for column in sorted(range(0, b.shape[1], side), key=lambda at: at != row):
            others = b[:, column : column + side]
            yield row, column, torch.mm(row_chunk, others, out=memory[: len(row_chunk), : others.shape[1]])


@torch.no_grad()
def entry_ranks(
    a: Float[Tensor, "n mid"], b: Float[Tensor, "mid v"], columns: Int[Tensor, "n"]
) -> Int[Tensor, "n"]:
    """For each row of `a @ b`, the number of entries that are larger than its entry in the row's `columns`."""
    columns, ranks = columns.to(a.device), []
    for first, rows in row_tiles(a, b):
        entries = rows.gather(1, columns[first : first + len(rows), None])
        ranks.append((rows > entries).sum(1))
    return torch.cat(ranks)


@torch.no_grad()
def top_entries(
    a: Float[Tensor, "n mid"], b: Float[Tensor, "mid v"], k: int, *, largest: bool = True
) -> tuple[Float[Tensor, "k"], Int[Tensor, "k"], Int[Tensor, "k"]]:
    """The k largest (or smallest) entries in order, with their rows and columns; equal entries in any order.

    Only rows of a block whose largest entry exceeds the k-th entry so far are sorted.
    """
    k, sign = _checked_count(k, a.shape[0] * b.shape[1]), 1 if largest else -1
    values = a.new_empty(0, dtype=upcast(a).dtype)
    places = torch.empty(2, 0, dtype=torch.int64, device=a.device)
    for row, column, block in blocks(a * sign, b):
        bound = values[-1] if len(values) == k else -torch.inf
        hot = (block.amax(1) > bound).nonzero()[:, 0]
        if len(hot) == 0:
            continue
        width = block.shape[1]
        block_values, flat = block[hot].flatten().topk(min(k, len(hot) * width))
        new_places = torch.stack((hot[flat // width] + row, flat % width + column))
        values, order = torch.cat((values, block_values)).topk(min(k, len(values) + len(block_values)))
        places = torch.cat((places, new_places), 1)[:, order]
    return values * sign, places[0], places[1]


@torch.no_grad()
def row_top(
    a: Float[Tensor, "n mid"], b: Float[Tensor, "mid v"], k: int, *, largest: bool = True
) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
    """The k largest (or smallest) entries of every row in order, and their columns; equal entries in any order."""
    k = _checked_count(k, b.shape[1])
    values = a.new_empty(len(a), k, dtype=upcast(a).dtype)
    columns = torch.empty(len(a), k, dtype=torch.int64, device=a.device)
    for first, tile in row_tiles(a, b):
        top = tile.topk(k, -1, largest)
        tile_rows = slice(first, first + len(tile))
        values[tile_rows], columns[tile_rows] = top.values, top.indices
    return values, columns


@torch.no_grad()
def diagonal_ranks(a: Float[Tensor, "n mid"], b: Float[Tensor, "mid v"]) -> Int[Tensor, "n"]:
    """For each row i, the number of entries that are larger than entry (i, i); equal entries do not count."""
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


def _checked_count(k: int, most: int) -> int:
    if not 1 <= k <= most:
        raise ValueError(f"1 to {most} entries are required, got {k}")
    return k


def wide_product(x: Float[Tensor, "*n d"], weight: Float[Tensor, "m d"]) -> Float[Tensor, "*n m"]:
    """x W^T in the dtype of x, for weights in a narrower dtype, of which a block of rows is converted at a time.

    So the product is not rounded to half precision, and neither the pass nor its gradient keeps a converted copy of the
    weights. The weights get a gradient only if they require one.

    Example:
        >>> float(wide_product(torch.ones(1, 3), torch.tensor([[20.0, 0.0625, 0.0]]).bfloat16()))
        20.0625
    """
    if torch.is_grad_enabled() and weight.requires_grad:
        return x @ weight.to(x.dtype).mT
    return _WideProduct.apply(x, weight)  # type: ignore[no-untyped-call]


class _WideProduct(torch.autograd.Function):
    """Product with half-precision weights; the backward pass converts them again instead of keeping a copy."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        rows, product = x.reshape(-1, x.shape[-1]), x.new_empty(*x.shape[:-1], len(weight))
        for rows_of_weight in _row_slices(weight):
            torch.mm(
                rows,
                weight[rows_of_weight].to(x.dtype).mT,
                out=product.view(-1, len(weight))[:, rows_of_weight],
            )
        return product

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors  # type: ignore[attr-defined]
        input_grad = grad.new_zeros(*grad.shape[:-1], weight.shape[1])
        for rows_of_weight in _row_slices(weight):
            input_grad += grad[..., rows_of_weight] @ weight[rows_of_weight].to(grad.dtype)
        return input_grad, None


def _row_slices(weight: Tensor) -> list[slice]:
    step = max(1, (WIDENED if weight.device.type == "cpu" else TILE) // max(1, weight.shape[1]))
    return [slice(first, first + step) for first in range(0, len(weight), step)]
