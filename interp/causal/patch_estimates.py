"""How the effect of a patch is estimated from gradients: to first order, through an exact softmax, with layers dropped.

The first-order estimate has two blind spots. A saturated softmax has no gradient, however much a new query or key
changes it: there the pattern's change is computed exactly, and only what follows the pattern is linear (the QK fix). A
cell whose direct effect is cancelled by a later layer has an estimate near 0, which small errors decide: there the
gradient is taken again with each layer's contribution to the stream held constant, so that one term of the cancelling
sum is missing at a time (GradDrop). Both are of Kramár et al. 2024, "AtP*", arXiv:2403.00745.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from interp.causal.softmax_change import column_change, row_change
from interp.core.stats import upcast
from interp.model import sites
from interp.model.attention import SPLIT_INPUTS
from interp.model.config import ModelConfig
from interp.model.edits import Detach, Edit, Set
from interp.model.sites import DIMS
from interp.model.tap import Read, Trace
from interp.passes.needs import Recorded, Steps, TowardStream, recorded
from interp.passes.rules import Rules
from interp.passes.variants import layer_of

Estimate = Callable[[str, Tensor], Float[Tensor, "b ..."]]
"""The estimated effect of a site's cells, from the site's name and the gradient at its slope (`slope_of`)."""

_QUERIES = ("attn.hook_q", "attn.hook_rot_q", "cross_attn.hook_q")
_KEYS = ("attn.hook_k", "attn.hook_rot_k", "cross_attn.hook_k")
_COPIES = (*SPLIT_INPUTS.values(), "hook_mlp_in")
"""The streams that a sublayer reads, as copies of its own."""


# the QK fix


def check_recomputed(names: Sequence[str], dims: Sequence[str], config: ModelConfig) -> None:
    """ValueError unless these sites are queries or keys whose softmax can be computed again from their scores."""
    inner = sites.find(names[0], config)[0].name
    if inner not in (*_QUERIES, *_KEYS):
        raise ValueError(
            f"qk_fix recomputes the softmax of queries and keys: site q, k, rot_q or rot_k is required, got {inner!r}"
        )
    for name in names:
        sites.find(_scores(name), config)
        mixer = config.mixers[layer_of(name, config)]
        if not (inner.startswith("cross_attn.") or mixer.traits.softmax_of_pairs):
            raise ValueError(
                f"qk_fix requires a pattern that is the softmax of scores of one query and one key each, layer "
                f"{layer_of(name, config)} has {mixer}"
            )
        normed = mixer.qk_norm(config)
        before = inner in ("attn.hook_q", "attn.hook_k") and normed is not None and normed[1] == "width"
        if before and {"head", "kv_head"} & set(dims):
            raise ValueError(
                f"qk_fix by head requires that heads do not share a norm, which {inner} enters here: ask for the site "
                "after it (rot_q, rot_k), or leave the head out of by"
            )


def slope_of(name: str, *, qk_fix: bool) -> Read:
    """The gradient that a site's estimate needs: at the site itself, or at the pattern that its softmax makes."""
    return Read(_beside(name, "hook_pattern") if qk_fix else name, grad=True)


def reads_of_softmax(names: Sequence[str], config: ModelConfig) -> list[Read]:
    """What the run that is patched must record, so that the softmax of these sites can be computed again."""
    scores = [Read(_scores(name)) for name in names]
    return [*scores, *(Read(name) for name in _streams_read(config))]


def on_the_same_path(names: Sequence[str]) -> list[Read]:
    """Reads that make another run compute attention as one whose scores are read, so that equal values agree in bits.

    They record next to nothing.
    """
    return [Read(_scores(name), via=_first_score) for name in names]


def recomputed(
    own_run: Recorded, other_trace: Trace, names: Sequence[str], dims: Sequence[str], rules: Rules
) -> Steps[Estimate]:
    """The estimate with the softmax computed again, from one more forward pass.

    In that pass every block reads the stream of the run that is patched, and its queries (or keys) are the other run's:
    so it has the scores of all patches in all layers at once.
    """
    config = own_run.model.config
    put = [*_streams_read(config), *names]
    values = {name: own_run.trace[Read(name)] for name in _streams_read(config)}
    values |= {name: other_trace[Read(name)] for name in names}
    edits = [Edit(name, Set(values[name])) for name in put]
    held = yield from recorded(
        own_run.batch, [Read(_scores(name)) for name in names], edits=edits, rules=rules
    )
    return partial(_recomputed_effect, own=own_run, other_scores=held.trace, dims=tuple(dims))


def _recomputed_effect(
    name: str,
    gradient: Float[Tensor, "b h q k"],
    own: Recorded,
    other_scores: Trace,
    dims: tuple[str, ...],
) -> Float[Tensor, "b ..."]:
    """The exact change of the patterns times their gradient, by cell; keys of all positions are one patch."""
    place, head = (DIMS[axis] for axis in sites.axes_of(name).split()[1:3])
    scores = Read(_scores(name))
    before, after, slope = (upcast(x) for x in (own.trace[scores], other_scores[scores], gradient))
    of_keys = sites.find(name, own.model.config)[0].name in _KEYS
    alone = of_keys and place in dims  # keys one by one; all together they change whole rows
    moved = (column_change if alone else row_change)(before, after, slope, _sinks(name, own))  # [b h k|q]
    if of_keys:  # heads that share a key
        moved = rearrange(moved, "b (g r) p -> b g r p", g=own.trace[Read(name)].shape[2]).sum(2)
    moved = moved.transpose(1, 2) if place in dims else moved.sum(-1)  # [b h p] -> [b p h] or [b h]
    return moved if head in dims else moved.sum(-1)


def _sinks(name: str, run: Recorded) -> Float[Tensor, "h"] | None:
    """The further scores of the attention that a site belongs to."""
    block = run.model.blocks[layer_of(name, run.model.config)]
    sinks = getattr(block, "cross_attn" if ".cross_attn." in name else "attn").sinks
    return None if sinks is None else upcast(sinks.detach())


def _streams_read(config: ModelConfig) -> list[str]:
    """The stream that attention of every block reads."""
    return [sites.attention_input(config, layer) for layer in range(config.n_layers)]


def _scores(name: str) -> str:
    return _beside(name, "hook_attn_scores")


def _beside(name: str, site: str) -> str:
    """The name of another site of the same attention."""
    return f"{name.rpartition('.')[0]}.{site}"


def _first_score(scores: Float[Tensor, "b h q k"]) -> Float[Tensor, "b 1 1 1"]:
    return scores[:, :1, :1, :1]


# GradDrop


def check_dropped(names: Sequence[str], dims: Sequence[str], config: ModelConfig) -> None:
    """ValueError unless there are cells of layers, and other layers than theirs, whose contribution can be dropped."""
    if config.n_layers < 2:
        raise ValueError(
            "grad_drop leaves out one other layer at a time: it requires two layers or more, got 1"
        )
    inner = sites.find(names[0], config)[0].name if sites.find(names[0], config)[1] is not None else names[0]
    if not _is_of_sublayer(inner, config):
        raise ValueError(
            f"grad_drop leaves out a cell's own layer, so it requires a site inside attention or an MLP, got {inner!r}"
        )
    if "layer" not in dims:
        raise ValueError("grad_drop requires 'layer' in by: a cell of several layers has no layer of its own")


def _is_of_sublayer(inner: str, config: ModelConfig) -> bool:
    """Whether a block's site is part of what the block adds to the stream."""
    parts = [name.removesuffix("_out") for name in config.sublayers]
    outputs = [f"hook_{name}" for name in config.sublayers]
    return inner in (*outputs, *_COPIES) or inner.startswith(tuple(f"{part}." for part in parts))


def streams_for_dropping(config: ModelConfig) -> list[Read]:
    """The gradients from which passes with one layer dropped go on: of the stream after each layer but the first."""
    return [_stream_gradient(config, layer) for layer in range(1, config.n_layers)]


def _stream_gradient(config: ModelConfig, layer: int) -> Read:
    return Read(sites.stream_after(config, layer), grad=True)


def dropped_sizes(
    own_run: Recorded,
    names: Sequence[str],
    effects: Sequence[Float[Tensor, "b ..."]],
    estimate: Estimate,
    slopes: Sequence[Read],
    rules: Rules,
) -> Steps[Float[Tensor, "b layer ..."]]:
    """The mean size of the effects with every other layer's contribution dropped in turn: equation 11, of one pair.

    Dropping a layer leaves the gradient after it as it is. So its pass ends there, goes on from the gradient that is
    known, and a cell's own `effects` stand for all layers before it; its own layer would give 0.
    """
    config = own_run.model.config
    layers = [layer_of(name, config) for name in names]
    sizes = [layer * effect.abs() for layer, effect in zip(layers, effects, strict=True)]
    for dropped in range(min(layers) + 1, config.n_layers):
        below = [i for i, layer in enumerate(layers) if layer < dropped]
        toward = TowardStream(own_run.trace[_stream_gradient(config, dropped)], dropped + 1)
        run = yield from recorded(
            own_run.batch,
            [slopes[i] for i in below],
            edits=[Edit(f"blocks.{dropped}.hook_{name}", Detach()) for name in config.sublayers],
            toward=toward,
            rules=rules,
        )
        for i in below:
            sizes[i] = sizes[i] + estimate(names[i], run.trace[slopes[i]]).abs()
    return torch.stack(sizes, 1) / (config.n_layers - 1)
