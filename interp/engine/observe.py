"""One pass with its questions: forward to the deepest layer anybody asks about, then gradients if any are wanted."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.engine.batch import Batch
from interp.engine.text import Text
from interp.model.config import ModelConfig
from interp.model.sites import EMBEDDING_SITES, find
from interp.model.tap import Edit, Read, Tap, Trace, compact
from interp.model.transformer import Transformer

Objective = Callable[[Tensor], Float[Tensor, ""]]
"""From the logits `[b p v]` (or those asked for) to one number to differentiate."""


@runtime_checkable
class Subject(Protocol):
    """A model under study: the network and its text; `HookedTransformer` is one."""

    transformer: Transformer
    text: Text


@dataclass(frozen=True)
class Observation:
    """What one pass gave: its output (logits, or the residual stream where it stopped) and the answers."""

    output: Tensor
    trace: Trace


def deepest(sites: Iterable[str], config: ModelConfig) -> int | None:
    """The `stop` that answers all these sites and runs no block more; None if the logits are needed."""
    stop = 0
    for name in sites:
        _, layer = find(name, config)
        if layer is None and name not in EMBEDDING_SITES:
            return None
        stop = max(stop, 0 if layer is None else layer + 1)
    return stop


def observe(
    model: Transformer,
    batch: Batch,
    reads: Sequence[Read] = (),
    edits: Sequence[Edit] = (),
    *,
    stop: int | None = None,
    logits_at: Int[Tensor, "b n"] | None = None,
    metric: Objective | None = None,
    answers_only: bool = False,
) -> Observation:
    """Run the model on a batch and answer `reads` under `edits`.

    With `metric`, reads with `grad=True` are answered by d metric / d value; parameters receive no gradient, and
    nobody's `.grad` is written. Without it the pass runs under `no_grad`. With `answers_only` it ends as soon as every
    read is answered, inside the last block if need be, and `output` has no meaning.
    Errors: ValueError for a gradient read without a metric, and everything `Transformer` refuses.
    """
    wants_grad = any(read.grad for read in reads)
    if wants_grad and metric is None:
        raise ValueError("Read(grad=True) requires a metric to differentiate")
    tap = Tap(reads, edits, answers_only=answers_only) if reads or edits else None
    batch = batch.to(model.device)
    with torch.set_grad_enabled(metric is not None):
        output = model(
            batch.tokens, tap, stop=stop, logits_at=logits_at, keep=batch.keep, documents=batch.documents,
            types=batch.types, memory=batch.memory,
        )  # fmt: skip
        if tap is None:
            return Observation(output, Trace({}))
        answers = dict(tap.values)
        if metric is not None and wants_grad:
            answers |= _gradients(metric(output), tap)
        tap.close()
    return Observation(output.detach(), Trace(answers))


def _gradients(value: Float[Tensor, ""], tap: Tap) -> dict[Read, Tensor]:
    if value.numel() != 1:
        raise ValueError(f"the metric must return one number, got shape {list(value.shape)}")
    if not value.requires_grad:
        raise ValueError("the metric does not depend on any site that is read with grad=True")
    found = torch.autograd.grad(value.reshape(()), list(tap.live.values()), allow_unused=True)
    answers = {}
    for (read, live), grad in zip(tap.live.items(), found, strict=True):
        grad = torch.zeros_like(live) if grad is None else grad
        answers[read] = compact(grad if read.via is None else read.via(grad))
    return answers
