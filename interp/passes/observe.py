"""One pass with its questions: forward to the deepest layer anybody asks about, then gradients if any are wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.core.boundary import Required, public
from interp.data.batch import Batch
from interp.data.text import Prompts, Text
from interp.model.config import ModelConfig
from interp.model.edits import Edit
from interp.model.sites import EMBEDDING_SITES, find, is_late
from interp.model.tap import Read, Tap, Trace, compact
from interp.model.transformer import Transformer

Objective = Callable[[Tensor], Float[Tensor, ""]]
"""From the logits `[b p v]` (or those asked for) to one number to differentiate."""


@runtime_checkable
class Subject(Protocol):
    """A model under study: the network and its text; `HookedTransformer` is one."""

    @property
    def transformer(self) -> Transformer:
        """The network, under the interventions that hold here and now."""
        ...

    @property
    def text(self) -> Text:
        """How it tokenises."""
        ...


@dataclass(frozen=True, eq=False)
class Studied:
    """A network with its text, as analyses see it."""

    transformer: Transformer
    text: Text


def _no_model(model: object) -> str | None:
    """None for a model of ours; else what to do with what arrived."""
    if isinstance(model, Transformer):
        return None
    if not isinstance(model, type) and isinstance(model, Subject):
        return None if isinstance(model.transformer, Transformer) else ""
    if isinstance(model, str | Path):
        return f": load it with HookedTransformer.from_pretrained({str(model)!r})"
    if isinstance(model, type):
        return ""
    if hasattr(model, "encoder") and hasattr(model, "decoder"):
        return ": an encoder-decoder has two; ask for one of them, such as model.model.decoder"
    if hasattr(model, "config") and hasattr(model, "forward"):
        return ": wrap it with HookedTransformer.from_pretrained(model)"
    return ""


Model = Annotated[Subject | Transformer, Required("a HookedTransformer or a Transformer", _no_model)]
"""What analyses take: a `HookedTransformer`, or a bare network for token ids."""


def as_model(model: Model, edits: Sequence[Edit] = ()) -> Subject:
    """The model under study: the network under all interventions that hold here and now, and its text.

    edits: interventions of this question alone, after those.
    Errors: ValueError for anything that is no decoder or encoder of ours, or for edits that act after
    the last block, where analyses read the logits off the stream themselves; KeyError or IndexError for parts that the
    model lacks.
    """
    network, text = as_network(model), text_of(model)
    network = network.edited(edits) if edits else network
    if late := [edit.name for edit in network.edits if is_late(edit.site)]:
        raise ValueError(
            "analyses read the logits off the residual stream, so an edit after the last block "
            f"({', '.join(late)}) would be missed: edit inside the blocks"
        )
    return Studied(network, text)


def as_network(model: Model) -> Transformer:
    """The network of a model, under the interventions that hold here and now. ValueError for anything else."""
    instead = _no_model(model)
    if instead is not None:
        raise ValueError(
            f"a model is required, a HookedTransformer or a Transformer, got {type(model).__name__}{instead}"
        )
    return model if isinstance(model, Transformer) else model.transformer


def text_of(model: Model) -> Text:
    """How a model tokenises; a bare network takes token ids only. ValueError for what is no model."""
    if isinstance(model, Transformer):
        return Text(None, model.config.n_ctx, model.config.d_vocab)
    as_network(model)
    return model.text


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


@public()
def observe(
    model: Model,
    batch: Batch | Prompts,
    reads: Sequence[Read] = (),
    edits: Sequence[Edit] = (),
    *,
    stop: int | None = None,
    logits_at: Int[Tensor, "b n"] | None = None,
    metric: Objective | None = None,
    answers_only: bool = False,
) -> Observation:
    """Run the model on a batch (or on prompts, as the model tokenises them) and answer `reads` under `edits`.

    With `metric`, reads with `grad=True` are answered by d metric / d value; parameters receive no gradient, and
    nobody's `.grad` is written. Without it the pass runs under `no_grad`. With `answers_only` it ends as soon as every
    read is answered, inside the last block if need be, and `output` has no meaning.
    Errors: ValueError for a gradient read without a metric, and everything `Transformer` refuses.
    """
    network = model if isinstance(model, Transformer) else as_network(model)
    batch = batch if isinstance(batch, Batch) else text_of(model).batch(batch)
    wants_grad = any(read.grad for read in reads)
    if wants_grad and metric is None:
        raise ValueError("Read(grad=True) requires a metric to differentiate")
    tap = Tap(reads, edits, answers_only=answers_only) if reads or edits else None
    batch = batch.to(network.device)
    with torch.set_grad_enabled(metric is not None):
        output = network(
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
