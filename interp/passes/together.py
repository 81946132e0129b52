"""Coordination of the processes that share one model (`tensor_parallel`): least memory, one writer, turns."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from interp.model.transformer import Transformer


def smallest_over_processes(model: Transformer, value: int) -> int:
    """The smallest of the processes' values; the value itself for a model in one process."""
    group = _group(model)
    if group is None:
        return value
    smallest = torch.tensor(value, device=model.device)
    dist.all_reduce(smallest, dist.ReduceOp.MIN, group=group)
    return int(smallest)


def writes(model: Transformer) -> bool:
    """Whether this process is the one that writes files: the first of those that share the model."""
    group = _group(model)
    return group is None or dist.get_rank(group) == 0


@contextmanager
def one_after_another(model: Transformer) -> Iterator[None]:
    """Run the body in the first process before the others; no process leaves before all have run it."""
    group = _group(model)
    if group is None:
        yield
        return
    if not writes(model):
        smallest_over_processes(model, 0)
    yield
    if writes(model):
        smallest_over_processes(model, 0)
    smallest_over_processes(model, 0)


def _group(model: Transformer) -> dist.ProcessGroup | None:
    team = getattr(model.blocks[0].attn, "team", None) if len(model.blocks) else None
    return None if team is None else team.mesh.get_group()
