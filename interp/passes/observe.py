"""One forward pass to the deepest layer that is read, with edits, then a backward pass if gradients are read.

Hook functions as TransformerLens' users write them, `fn(tensor, hook)`, are turned into edits of one pass here too.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from interp.core.answered import yes_or_no
from interp.core.axes import shape_text
from interp.core.boundary import public
from interp.core.hints import Required
from interp.core.transfers import to_device
from interp.core.viewer import Brief
from interp.core.wording import nearest
from interp.data.batch import Batch, Prompts
from interp.data.text import Text
from interp.model import sites
from interp.model.config import ModelConfig
from interp.model.edits import Edit
from interp.model.sites import EMBEDDING_SITES, find, is_late
from interp.model.tap import Read, Tap, Trace
from interp.model.transformer import Transformer
from interp.passes.edited import read_in_batch, with_edits_in_batch
from interp.passes.memory import check_recorded

Objective = Callable[[Tensor], Float[Tensor, ""]]
"""A function of the logits `[b p v]` (or of those computed) that returns the number to differentiate."""


@runtime_checkable
class Subject(Protocol):
    """A model under study: the network and its text; `HookedTransformer` is one."""

    @property
    def transformer(self) -> Transformer:
        """The network, under the interventions of all enclosing `with` blocks."""
        ...

    @property
    def text(self) -> Text:
        """The tokenisation of its texts."""
        ...


@dataclass(frozen=True, eq=False)
class Studied:
    """A network with its text, as analyses see it."""

    transformer: Transformer
    text: Text


def _no_model(model: object) -> str | None:
    """None for a model of this package; else a hint for what was given instead."""
    if isinstance(model, Transformer):
        return None
    if not isinstance(model, type) and isinstance(model, Subject):
        return None if isinstance(model.transformer, Transformer) else ""
    if isinstance(model, str | Path):
        return f": load it with HookedTransformer.from_pretrained({str(model)!r})"
    if isinstance(model, type):
        return ""
    if hasattr(model, "encoder") and hasattr(model, "decoder"):
        return ": an encoder-decoder has two; ask for one, such as model.decoder with its batch, model.given(...)"
    if hasattr(model, "config") and hasattr(model, "forward"):
        return ": wrap it with HookedTransformer.from_pretrained(model)"
    return ""


Model = Annotated[Subject | Transformer, Required("a HookedTransformer or a Transformer", _no_model)]
"""The `model` argument of analyses: a `HookedTransformer`, or a bare network for token ids."""


def as_model(model: Model, edits: Sequence[Edit] = ()) -> Subject:
    """The model under study: the network under the interventions that hold at the call, and its text.

    Args:
        edits: interventions of this question alone, after those.

    Raises:
        ValueError: as `as_network`, or for edits that act after the last block, where analyses read the logits off the
            stream themselves.
        KeyError, IndexError: parts that the model lacks.
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
    """The network of a model, under the interventions that hold here and now.

    Raises:
        ValueError: anything that is no decoder or encoder of ours; parameters on the device meta or of several dtypes.
    """
    instead = _no_model(model)
    if instead is not None:
        raise ValueError(
            f"a model is required, a HookedTransformer or a Transformer, got {type(model).__name__}{instead}"
        )
    network = model if isinstance(model, Transformer) else model.transformer
    _check_parameters(network)
    return network


def _check_parameters(network: Transformer) -> None:
    """ValueError for parameters without numbers, or of another dtype than the embedding, which no pass can have."""
    if _is_of_one_kind(network):
        return
    for name, value in network.named_parameters():
        if value.is_meta:
            raise ValueError(f"model must hold its numbers, got {name} on the device meta: load it to 'cpu'")
        if value.is_floating_point() and value.dtype != network.dtype:
            raise ValueError(
                f"model must be of one dtype, got {name} of {value.dtype} where the embedding is of {network.dtype}: "
                "model.to(dtype) casts all of it"
            )


def _is_of_one_kind(network: Transformer) -> bool:
    """Whether all parameters hold numbers of one dtype: every pass asks, and their names take eight times as long."""
    modules: list[nn.Module] = [network]
    while modules:
        module = modules.pop()
        for value in module._parameters.values():
            if value is not None and (value.is_meta or value.dtype != network.dtype):
                return False
        modules += [child for child in module._modules.values() if child is not None]
    return True


def text_of(model: Model) -> Text:
    """The tokenisation of a model; a bare network takes token ids only. ValueError for what is no model."""
    if isinstance(model, Transformer):
        config = model.config
        return Text(None, config.n_ctx, config.d_vocab, d_vocab_out=config.d_vocab_out)
    as_network(model)
    return model.text


@dataclass(frozen=True, repr=False)
class Observation(Brief):
    """The results of one pass: its output (logits, or the residual stream where it stopped) and the answers."""

    output: Tensor
    trace: Trace


def deepest(sites: Iterable[str], config: ModelConfig) -> int | None:
    """The lowest `stop` of a pass that visits all these sites; None if a site is after the last block."""
    stop = 0
    for name in sites:
        _, layer = find(name, config)
        if layer is None and name not in EMBEDDING_SITES:
            return None
        stop = max(stop, 0 if layer is None else layer + 1)
    return stop


def _check_columns(columns: Int[Tensor, "b n"], shape: torch.Size) -> None:
    """ValueError unless `columns` has one row per batch row, with indices in [-width, width)."""
    if len(columns) != shape[0] or bool(((columns >= shape[1]) | (columns < -shape[1])).any()):
        raise ValueError(
            f"logits_at must name columns of {shape[0]} rows, each from {-shape[1]} to {shape[1] - 1}, got "
            f"{shape_text(columns.shape)} with {sorted(set(columns.flatten().tolist()))[:4]}"
        )


@public(plain_pass=True)
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
    each: bool = False,
) -> Observation:
    """Values at chosen sites of one pass of the model, under interventions.

    Every analysis is built on it: name what to look at and what to change, and get the values.

    With `metric`, reads with `grad=True` are answered by d metric / d value; parameters receive no gradient, and no
    `.grad` is written. Without it the pass runs under `no_grad`.

    Args:
        model: the network, or a model with its tokenizer.
        batch: a batch, or prompts as the model tokenises them.
        reads: which values to record, gradients included (`Read(grad=True)`).
        edits: interventions of this pass.
        stop: number of the block before which the pass ends, so that its output is the residual stream entering that
            block; None: the whole model.
        logits_at: [b, n], the columns of each row at which logits are computed; None: all.
        metric: function of the pass's output that is differentiated for reads of gradients.
        answers_only: end as soon as every read is answered, inside the last block if need be; `output` has no meaning
            then.
        each: whether the metric returns several numbers, [k]: gradients have them along a first axis. Their backward
            passes share the forward pass.

    Returns:
        `Observation`: `output`, the logits [b, p, v] or the stream [b, p, d], and `trace`, the value of each read.

    Raises:
        ValueError: a gradient read without a metric, and everything that `Transformer` refuses.
    """
    network = model if isinstance(model, Transformer) else as_network(model)
    batch = batch if isinstance(batch, Batch) else text_of(model).batch(batch)
    wants_grad = any(read.grad for read in reads)
    if wants_grad and metric is None:
        raise ValueError("Read(grad=True) requires a metric to differentiate")
    if logits_at is not None:
        _check_columns(logits_at, batch.tokens.shape)  # before it is moved, so that no device is waited for
        logits_at = to_device(logits_at.long(), network.device)
    kept_whole = [read.site for read in reads if read.via is None and read.pos is None]
    check_recorded(kept_whole, network, *batch.tokens.shape, logits=stop is None and logits_at is None)
    batch = batch.to(network.device)
    network, edits = with_edits_in_batch(network, batch, edits)
    placed_reads = {read: read_in_batch(read, batch) for read in reads}
    follows = batch.forced is not None
    tap = (
        Tap(list(placed_reads.values()), edits, answers_only=answers_only, forced=batch.forced)
        if reads or edits or follows
        else None
    )
    try:
        with torch.set_grad_enabled(metric is not None):
            output = network(batch.tokens, tap, stop=stop, logits_at=logits_at, **batch.inputs)
            if tap is None:
                return Observation(output, Trace({}))
            answers = dict(tap.values)
            if metric is not None and wants_grad:
                answers |= _gradients(metric(output), tap, each=each)
    finally:
        if tap is not None:  # of a pass that failed too: what it recorded may be most of the memory
            tap.close()
    return Observation(
        output.detach(), Trace({read: answers[placed] for read, placed in placed_reads.items()})
    )


def _gradients(value: Float[Tensor, "*k"], tap: Tap, *, each: bool = False) -> dict[Read, Tensor]:
    """d value / d site for every read with `grad=True`; zeros where the value does not depend on the site.

    With `each` the value is `[k]`, and the gradients of its numbers stand along a first axis.
    """
    if not each and value.numel() != 1:
        raise ValueError(f"the metric must return one number, got shape {list(value.shape)}")
    if not value.requires_grad:
        raise ValueError("the metric does not depend on any site that is read with grad=True")
    edges = [get_gradient_edge(live) for live in tap.live.values()]
    like = {
        read: partial(torch.zeros, x.shape, dtype=x.dtype, device=x.device) for read, x in tap.live.items()
    }
    tap.live.clear()  # edges hold no values: each is freed once the backward pass is past it
    answers: dict[Read, list[Tensor]] = {read: [] for read in like}
    numbers = value.reshape(-1).unbind()
    for i, number in enumerate(numbers, 1):
        gradients = torch.autograd.grad(number, edges, allow_unused=True, retain_graph=i < len(numbers))
        for (read, zeros), grad in zip(like.items(), gradients, strict=True):
            answers[read].append(tap.kept(read, zeros() if grad is None else grad))
    return {read: torch.stack(found) if each else found[0] for read, found in answers.items()}


Names = str | Sequence[str] | Callable[[str], bool] | re.Pattern[str] | None
"""Selection of sites: a name, several, a glob, a regular expression, a predicate; None: all that are not on demand.
"""
HookDirection = Literal["fwd", "bwd"]


@dataclass
class HookPoint:
    """The place where a hook function runs: the site's name, and a dict of its own for one pass."""

    name: str
    ctx: dict[str, object] = field(default_factory=dict)

    def layer(self) -> int:
        """The block this site is in; ValueError outside the blocks."""
        match = re.match(r"(?:encoder\.|decoder\.)?blocks\.(\d+)\.", self.name)
        if match is None:
            raise ValueError(f"{self.name!r} is not inside a block")
        return int(match[1])


HookFunction = Callable[[Tensor, HookPoint], Tensor | None]
Hook = tuple[Names, HookFunction]


def matching(names: Names, config: ModelConfig, stop: int | None = None) -> list[str]:
    """Sites that a filter selects among those a pass up to block `stop` visits; KeyError if it selects none."""
    every = sites.names(config, on_demand=True)
    if names is None:
        selected = [n for n in sites.names(config) if _within(n, config, stop)]
    elif isinstance(names, str) and not set(names) & set("*?["):
        sites.find(names, config)
        selected = [names]
    elif isinstance(names, str | re.Pattern) or callable(names):
        accept = predicate(names)
        selected = [n for n in every if accept(n) and _within(n, config, stop)]
    else:
        selected = [site for name in names for site in matching(name, config, stop)]
    if not selected:
        hint = nearest(names, every) if isinstance(names, str) else f"sites are named like {every[3]}"
        raise KeyError(f"{names!r} matches no site of this model; {hint}")
    return list(dict.fromkeys(selected))


def as_edits(hooks: Sequence[tuple[Hook, HookDirection]], config: ModelConfig) -> list[Edit]:
    """One edit for each hook and each site that its names select."""
    return [
        Edit(name, Hooked(function, direction))
        for (names, function), direction in hooks
        for name in matching(names, config)
    ]


@dataclass(frozen=True, eq=False)
class Hooked:
    """A hook function as the change of an edit: it receives its place, and a dict of its own for one pass.

    Backward hooks get the gradient when the pass is differentiated, and may return another one.

    Raises:
        ValueError: a backward hook in a pass that keeps no gradients.
    """

    function: HookFunction
    direction: HookDirection = "fwd"
    side: str = ""
    """What the name that the function sees begins with: "encoder." or "decoder." in an encoder-decoder."""

    def at_site(self, site: str, memory: dict[str, object]) -> Callable[[Tensor], Tensor]:
        """The change of one site in one pass."""
        point = memory.setdefault(site, HookPoint(self.side + site))
        assert isinstance(point, HookPoint)
        if self.direction == "fwd":
            return _forward_change(self.function, point)
        if not torch.is_grad_enabled():
            raise ValueError(
                f"the backward hook at {site} requires a pass that keeps gradients; this one runs without"
            )
        return _backward_change(self.function, point)


@dataclass(eq=False)
class EditsInForce:
    """Edits that hold for every pass of one model inside a `with`."""

    model: object
    edits: tuple[Edit, ...]
    open: bool = True
    """True until the `with` is left: from then on the edits hold nowhere, not in a task that began inside of it
    either.
    """


_STANDING: ContextVar[tuple[EditsInForce, ...]] = ContextVar("interp_standing_edits", default=())


@contextmanager
def edits_in_force(model: object, edits: Sequence[Edit]) -> Iterator[None]:
    """Let these edits hold for every pass of this model, in this thread or task only, until the `with` is left.

    Blocks may overlap and be left in any order, and by another thread than began them: each takes away what it brought.
    Nothing is kept on the model.
    """
    mine = EditsInForce(model, tuple(edits))
    _STANDING.set((*_STANDING.get(), mine))
    try:
        yield
    finally:
        mine.open = False
        _STANDING.set(tuple(each for each in _STANDING.get() if each.open))


def standing_edits(model: object) -> list[Edit]:
    """The edits that hold for this model here and now, those of the outermost `with` first."""
    return [edit for each in _STANDING.get() if each.open and each.model is model for edit in each.edits]


def position_filter(
    name: str, config: ModelConfig, pos_slice: slice | int | None
) -> Callable[[Tensor], Tensor] | None:
    """The `via` that keeps some positions of a site: axis 1, or the query axis of scores and patterns."""
    if pos_slice is None:
        return None
    keep = slice(pos_slice, pos_slice + 1 or None) if isinstance(pos_slice, int) else pos_slice
    if keep.step is not None and keep.step < 1:
        raise ValueError(f"pos_slice must go forwards, a step of 1 or more, got {pos_slice}")
    site, _ = sites.find(name, config)
    axis = 2 if site.axes.startswith("b h q") else 1

    def kept(value: Tensor) -> Tensor:
        selected = value[(slice(None),) * axis + (keep,)]
        if selected.shape[axis] == 0:
            raise ValueError(f"pos_slice {pos_slice} keeps none of the {value.shape[axis]} positions")
        return selected

    return kept


def _forward_change(function: HookFunction, point: HookPoint) -> Callable[[Tensor], Tensor]:
    def change(value: Tensor) -> Tensor:
        new = function(value, point)
        return value if new is None else new

    return change


def _backward_change(function: HookFunction, point: HookPoint) -> Callable[[Tensor], Tensor]:
    def change(value: Tensor) -> Tensor:
        value = value if value.requires_grad else value.detach().requires_grad_()
        value.register_hook(lambda grad: function(grad, point))
        return value

    return change


def predicate(names: str | re.Pattern[str] | Callable[[str], bool]) -> Callable[[str], bool]:
    """Whether a glob, a regular expression or a function selects a name."""
    if isinstance(names, str):
        pattern = names
        return lambda name: fnmatch.fnmatchcase(name, pattern)
    if isinstance(names, re.Pattern):
        regex = names
        return lambda name: regex.fullmatch(name) is not None
    return yes_or_no(names, "names_filter: a function of a site's name")


def _within(name: str, config: ModelConfig, stop: int | None) -> bool:
    if stop is None:
        return True
    need = deepest([name], config)
    return need is not None and need <= stop
