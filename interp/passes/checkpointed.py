"""Gradients at the embeddings in bounded memory: blocks are differentiated in runs, the last first.

What a backward pass keeps of its forward pass grows with the rows, their length and the blocks. Where a whole pass
would keep too much, each run of blocks is computed once more from the stream that entered it: a second forward pass for
bounded memory (gradient checkpointing, Chen et al. 2016, arXiv:1604.06174).
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from interp.core.stats import upcast
from interp.data.batch import Batch
from interp.model.edits import Edit
from interp.model.sites import EMBEDDING_SITES, final_stream
from interp.model.tap import Read, Tap, Trace
from interp.model.transformer import Transformer
from interp.passes.observe import observe

ROOM = 256 * 2**20
"""About how many bytes of activations a forward pass may store for its backward pass."""
KEPT = 20
"""Numbers that a block stores per token for its backward pass, in units of d_model; 19 in a Llama."""


def kept_bytes(model: Transformer, batch: Batch) -> int:
    """About how many bytes a block stores of one row for its backward pass."""
    config, width = model.config, batch.tokens.shape[1]
    return width * (KEPT * config.d_model + config.n_heads * width) * model.dtype.itemsize


def rows_at_once(model: Transformer, batch: Batch, most: int) -> int:
    """Number of rows of a differentiated pass: as many as fit into `ROOM`, at most `most`, at least one."""
    return max(1, min(most, ROOM // max(1, model.config.n_layers * kept_bytes(model, batch))))


def runs_of_blocks(model: Transformer, batch: Batch) -> list[range]:
    """All blocks, cut into runs whose activations fit into `ROOM`; one run if a pass cannot start at a later block."""
    n = model.config.n_layers
    room = max(1, ROOM // max(1, len(batch) * kept_bytes(model, batch)))
    if not model.restarts or room >= n:
        return [range(n)]
    return [range(i, min(i + room, n)) for i in range(0, n, room)]


def differentiated_in_runs(
    model: Transformer,
    batch: Batch,
    reads: Sequence[Read],
    edits: Sequence[Edit],
    number: Callable[[Tensor], Float[Tensor, ""]],
    runs: Sequence[range],
) -> tuple[Trace, Float[Tensor, "b p d"]]:
    """Values and gradients at the embeddings in a pass that is differentiated in runs of blocks, and its final stream.

    Args:
        reads: at the embeddings, and the gradient of the final stream.
        edits: of the embeddings.
        number: function of the final stream `[b p d]` that is differentiated.
        runs: all blocks, in at least two parts.
    """
    end = Read(final_stream(model.config), grad=True)
    site_reads = [read for read in reads if read != end]
    trace, final, slopes = _in_runs(
        model, batch, site_reads, edits, lambda stream: number(stream)[None], runs
    )
    values = {read: value[0] if read.grad else value for read, value in trace.items()}
    return Trace({**values, end: slopes[0]}), final


def differentiated_each(
    model: Transformer,
    batch: Batch,
    reads: Sequence[Read],
    numbers: Callable[[Tensor], Float[Tensor, "k"]],
) -> Trace:
    """Values and gradients at the embeddings of several numbers, from one forward pass and a backward pass for each.

    Blocks are differentiated in runs where a whole pass would keep too much, each run computed once more for all.

    Args:
        reads: at the embeddings; gradients are answered `[k ...]`.
        numbers: function of the final stream `[b p d]` that is differentiated.
    """
    runs = runs_of_blocks(model, batch)
    if len(runs) == 1:
        return observe(model, batch, reads, stop=model.config.n_layers, metric=numbers, each=True).trace
    return _in_runs(model, batch, reads, (), numbers, runs)[0]


def _in_runs(
    model: Transformer,
    batch: Batch,
    site_reads: Sequence[Read],
    edits: Sequence[Edit],
    numbers: Callable[[Tensor], Float[Tensor, "k"]],
    runs: Sequence[range],
) -> tuple[Trace, Float[Tensor, "b p d"], list[Tensor]]:
    """The trace with gradients `[k ...]`, the final stream, and the gradient of each number there."""
    batch = batch.to(model.device)
    places = {*(read.site for read in site_reads), *(edit.site for edit in edits)}
    assert places <= set(EMBEDDING_SITES), "only the first run has reads and edits"
    first, *later = runs
    # forward: keep only the stream that enters each later run
    entering = [observe(model, batch, (), edits, stop=first.stop).output]
    with torch.no_grad():
        for run in later:
            entering.append(_stream_after(model, batch, entering[-1], run))
    final = entering.pop().detach().requires_grad_()
    with torch.enable_grad():
        values = numbers(final).unbind()
    slopes = gradients = _each_gradient(values, final)
    # backward, last run first: recompute each run from its entering stream
    for run in reversed(later):
        with torch.enable_grad():
            entered = entering.pop().requires_grad_()
            left = _stream_after(model, batch, entered, run)
            gradients = _each_gradient([left] * len(gradients), entered, gradients)

    def along(stream: Tensor) -> Float[Tensor, "k"]:
        return torch.stack([(upcast(stream) * upcast(gradient)).sum() for gradient in gradients])

    trace = observe(model, batch, site_reads, edits, stop=first.stop, metric=along, each=True).trace
    return trace, final.detach(), slopes


def _each_gradient(
    values: Sequence[Tensor], at: Tensor, along: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """The gradient of each value, along a direction where it is no number; the graph is freed after the last."""
    found: list[Tensor] = []
    for i, value in enumerate(values):
        direction = None if along is None else along[i]
        found += torch.autograd.grad(value, at, direction, retain_graph=i + 1 < len(values))
    return found


def _stream_after(
    model: Transformer, batch: Batch, stream: Float[Tensor, "b p d"], blocks: range
) -> Float[Tensor, "b p d"]:
    """The stream `[b p d]` after these blocks, from the stream that enters the first of them."""
    tap = Tap(forced=batch.forced) if batch.forced is not None and model.edits else None
    return model(stream, tap, start=blocks.start, stop=blocks.stop, **batch.inputs)
