"""Attention knockout: cut what some positions read from others, and watch the answer.

A score of -inf before the softmax removes an edge query -> key; what it had is spread over the keys that are left, so
rows still sum to 1 (Geva et al. 2023, "Dissecting Recall of Factual Associations", arXiv:2304.14767, section 4; windows
of layers, because one layer's loss is made good by its neighbours).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from interp.causal.ablation_effects import Effects, alike, chosen, chosen_layers, effects
from interp.causal.effects import check_one_length
from interp.core.shapes import nearest, shape_text
from interp.data.batch import Batch
from interp.data.text import Prompts
from interp.model.config import ModelConfig
from interp.model.edits import Edit, Set
from interp.model.tap import Read
from interp.model.transformer import Transformer
from interp.passes.metrics import Metric, logit_difference
from interp.passes.observe import Subject, observe
from interp.passes.variants import Variant

if TYPE_CHECKING:
    import xarray as xr

T = TypeVar("T")
Columns = Sequence[int] | Bool[Tensor, "b p"]
"""The same columns in every prompt, or a mask that says which in each."""


def knock_out(
    model: Subject,
    prompts: Prompts,
    queries: Columns,
    keys: Columns,
    *,
    metric: Metric | None = None,
    by: Sequence[str] = ("layer",),
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    window: int = 1,
    prepend_bos: bool = True,
    batch_size: int = 32,
) -> "xr.Dataset":
    """How far the metric moves when `queries` cannot attend to `keys`: Dataset over the dims `by`.

    score[q, k] = -inf before the softmax, for every q of `queries` and k of `keys`, so that each row still sums to 1.
    Variables as in `ablate`, in the metric's unit: `effect` with its interval, `each`, `base`, and `changed` (False
    where no such edge exists, as in a causal model from an earlier query to a later key).
    queries, keys: columns, alike in all prompts (from the end if negative), or masks `[prompt, pos]` of their own
    columns, such as the spans of `interp.zoo.pairs`.
    by: which cuts are made one at a time, of `layer`, `head`, `query` and `key` (the last two for columns alike in all
    prompts); along dims that are not named all are cut at once.
    layers, heads: those concerned; None = all. window: with `layer`, how many layers are cut at once, those around the
    layer that labels the cell (from layer - window // 2, as many as there are).
    Errors: ValueError for a query that would be left without any key, negative columns of prompts that differ in
    length, or masks with `query` or `key` in `by`; IndexError for a column, layer or head that does not exist;
    KeyError for an unknown dim.

    Example:
        >>> answer = interp.logit_difference(" Mary", " John")
        >>> knock_out(model, prompt, [-1], [1, 2], metric=answer, by=("layer", "key")).effect.dims
        ('layer', 'key')
    """
    metric = logit_difference() if metric is None else metric
    network = model.transformer
    batch = metric.posed(model.text.batch(prompts, prepend_bos=prepend_bos), model.text)
    config = network.config
    cuts = Cuts(
        tuple(by),
        tuple(chosen_layers(layers, config.n_layers)),
        tuple(range(config.n_heads) if heads is None else chosen(heads, config.n_heads, "head")),
        window,
        config,
    )
    masks = [_mask(columns, batch, what) for columns, what in ((queries, "query"), (keys, "key"))]
    if {"query", "key"} & set(by) and any(isinstance(x, Tensor) for x in (queries, keys)):
        raise ValueError("cuts by query or key require columns that are alike in all prompts, got a mask")
    check_sight(network, batch, cuts, *masks, batch_size=batch_size)
    found = _by_layout(network, batch, metric, cuts, masks, batch_size)
    edges = [mask[0].nonzero()[:, 0].tolist() for mask in masks]
    attrs: dict[str, str | int] = {"intervention": "attention scores = -inf", "window": window}
    return found.table("knock_out", cuts.coords(*edges), metric, attrs)


@dataclass(frozen=True)
class Cuts:
    """Which edges are cut together, and in which layers and heads."""

    by: tuple[str, ...]
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    window: int
    config: ModelConfig

    def __post_init__(self) -> None:
        dims = ("layer", "head", "query", "key")
        for dim in self.by:
            if dim not in dims:
                raise KeyError(f"the dims here are {', '.join(dims)}, not {dim!r}; {nearest(dim, dims)}")
        if self.window < 1 or (self.window > 1 and "layer" not in self.by):
            raise ValueError(
                f"a window of 1 or more layers is required, with 'layer' in `by`, got {self.window}"
            )

    @property
    def groups(self) -> list[list[int]]:
        """The layers that are cut at once, for every cell."""
        if "layer" not in self.by:
            return [list(self.layers)]
        starts = [layer - self.window // 2 for layer in self.layers]
        return [list(range(max(0, s), min(self.config.n_layers, s + self.window))) for s in starts]

    def coords(self, queries: Sequence[int], keys: Sequence[int]) -> dict[str, Sequence[int]]:
        """The dims of a result with their labels."""
        possible = {"layer": self.layers, "head": self.heads, "query": queries, "key": keys}
        return {dim: list(labels) for dim, labels in possible.items() if dim in self.by}

    def variants(self, queries: Sequence[int], keys: Sequence[int], columns: int) -> list[Variant]:
        """One variant per cell, in the order of the dims."""
        hidden = Set(-torch.inf)
        singly = "head" in self.by or len(self.heads) < self.config.n_heads
        heads: list[dict[str, int]] = [{"head": h} for h in self.heads] if singly else [{}]
        cells = product(
            self.groups,
            _split(heads, "head" in self.by),
            _split(queries, "query" in self.by),
            _split(keys, "key" in self.by),
        )
        return [
            Variant(
                [
                    Edit(f"blocks.{layer}.attn.hook_attn_scores", hidden, {"query": q, "key": k, **head})
                    for layer, head, q, k in product(layers, some, starts, ends)
                ]
            )
            for layers, some, starts, ends in cells
        ]


def _split(items: Sequence[T], singly: bool) -> list[Sequence[T]]:
    """Each item for itself, or all together."""
    return [[item] for item in items] if singly else [items]


def check_sight(
    model: Transformer,
    batch: Batch,
    cuts: Cuts,
    queries: Bool[Tensor, "b p"],
    keys: Bool[Tensor, "b p"],
    *,
    batch_size: int = 32,
) -> None:
    """ValueError for a query to which a cut would leave no key; in models with sinks the sink takes what is left."""
    if model.config.sinks:
        return
    layers = sorted({layer for group in cuts.groups for layer in group})
    reads = [Read(f"blocks.{layer}.attn.hook_attn_scores", via=_finite) for layer in layers]
    parts = zip(*(x.split(batch_size) for x in (queries, keys)), batch.split(batch_size), strict=True)
    for some, cut, rows in parts:
        trace = observe(model, rows, reads, answers_only=True).trace
        for layer, read in zip(layers, reads, strict=True):
            seen = trace[read].cpu() & some[:, :, None]
            hit = seen & cut[:, None, :]
            blind = hit.any(-1) & (seen.sum(-1) == (1 if "key" in cuts.by else hit.sum(-1)))
            if bool(blind.any()):
                raise ValueError(
                    f"every query must keep a key, but query {int(blind.nonzero()[0, 1])} of layer {layer} sees none "
                    f"besides those that are to be cut"
                )


def _finite(scores: Float[Tensor, "b h q k"]) -> Bool[Tensor, "b q k"]:
    """Which keys a query sees: the same for all heads."""
    return scores[:, 0].isfinite()


def _by_layout(
    model: Transformer,
    batch: Batch,
    metric: Metric,
    cuts: Cuts,
    masks: Sequence[Bool[Tensor, "b p"]],
    batch_size: int,
) -> Effects:
    """The effects in every prompt; those with the same columns share a sweep."""
    layouts, which = torch.cat(list(masks), 1).unique(dim=0, return_inverse=True)
    columns, parts, order = batch.tokens.shape[1], [], []
    for i, layout in enumerate(layouts):
        rows = (which == i).nonzero()[:, 0]
        starts, ends = (mask.nonzero()[:, 0].tolist() for mask in layout.split(columns))
        planned = alike(cuts.variants(starts, ends, columns))
        order.append(rows)
        parts.append(effects(model, batch.rows(rows), metric, planned, batch_size=batch_size))
    return Effects.joined(parts).rows(torch.cat(order).argsort())


def _mask(columns: Columns, batch: Batch, what: str) -> Bool[Tensor, "b p"]:
    """The columns of each prompt as a mask."""
    shape = batch.tokens.shape
    if not isinstance(columns, Tensor):
        if any(i < 0 for i in columns):
            check_one_length(batch, "columns counted from the end")
        wanted = torch.tensor(chosen(columns, shape[1], what))
        mask = torch.zeros(shape, dtype=torch.bool)
        mask[:, wanted] = True
    elif columns.dtype != torch.bool or columns.shape != shape:
        raise ValueError(
            f"a mask of the {what} columns must be boolean of shape {shape_text(shape)}, got {columns.dtype} of shape "
            f"{shape_text(columns.shape)}"
        )
    else:
        mask = columns.cpu()
    if bool((mask & ~batch.real.cpu()).any()):
        raise ValueError(f"{what} columns must be tokens of every prompt, got padding")
    return mask
