"""Attention knockout: cut what some positions read from others, and watch the answer.

A score of -inf before the softmax removes an edge query -> key; the softmax spreads its probability over the remaining
keys, so that rows still sum to 1 (Geva et al. 2023, "Dissecting Recall of Factual Associations", arXiv:2304.14767,
section 4; windows of layers, because neighbouring layers make up for the loss of one).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from interp.causal.ablation import chosen, chosen_layers, layers_with
from interp.causal.effects import EffectTable, MeasuredEffects, causal, check_first_column, dims_asked, swept
from interp.causal.spans import rows_of_mask
from interp.core.transfers import to_host
from interp.data.batch import Batch
from interp.model.config import ModelConfig
from interp.model.edits import Edit, Set
from interp.model.parts import Part
from interp.model.tap import Read
from interp.model.transformer import Transformer
from interp.passes.metrics import LogitFunction, Metric, as_metric
from interp.passes.needs import Ahead, Steps, recorded
from interp.passes.observe import Subject
from interp.passes.question import ByRow, Question
from interp.passes.variants import Variant
from interp.runs.functions import of_data

if TYPE_CHECKING:
    pass

T = TypeVar("T")
ColumnChoice = Sequence[int] | Bool[Tensor, "prompt p"]
"""Token indices in every prompt, negative ones from its end, or a mask [prompt, p] over the columns of each prompt."""
SightLayout = tuple[tuple[int, ...], tuple[int, ...]]
"""The columns of the queries and of the keys in one prompt."""
DIMS = ("layer", "head", "query", "key")
SCORES = "attn.hook_attn_scores"
SCORED = ("Softmax", "Latent", "DualChunk", "Reformer", "Synthesizer")
"""Mixers with attention scores before a softmax, for the message where a layer has another."""


@dataclass(frozen=True, eq=False)
class KnockOut(Question):
    """Effect of attention knockout: how far the metric moves when some queries cannot attend to some keys.

    score[q, k] = -inf before the softmax, for every q of `queries` and k of `keys`, so that each row still sums to 1.

    Args:
        data: prompts, token ids, a batch, files or a stream of any size.
        queries: tokens of each prompt that lose sight of `keys`, negative from its end (BOS counts), or a mask
            [prompt, pos] of each prompt's own columns, such as the spans of `interp.tasks`.
        keys: tokens of each prompt that they lose sight of, given like `queries`.
        metric: a `Metric`, or a function of the logits [b, v] at the last token; None is the logit difference of the
            data's answers. A metric that compares, such as the KL divergence, compares with the run without the cut.
        by: dims along which cuts are made one at a time: any of `layer`, `head`, `query` and `key` (the last two for
            tokens that are alike in all prompts, labelled as given). Along the other dims all are cut at once.
        layers: layers in which attention is cut; None: all that have attention scores.
        heads: heads whose attention is cut; None: all.
        window: with `layer` in `by`, how many layers are cut at once, those around the layer that labels the cell
            (from layer - window // 2, as many as there are).
        each: False keeps no values of single prompts, which data of any size requires.

    Returns:
        Dataset over the dims `by`, with the variables of `ablate`, in the metric's unit:

        - `value`: metric(cut) - metric(base), mean over prompts, with the ends `low` and `high` of its 95 % interval
          and the number of prompts `n`.
        - `each` [prompt, ...]: effect in every prompt. `base` [prompt]: metric without the cut.
        - `changed`: False where no such edge exists, as in a causal model from an earlier query to a later key.

    Raises:
        ValueError: a query that would be left without any key, padding, or masks with `query` or `key` in `by`.
        IndexError: a token, layer or head that does not exist.
        KeyError: an unknown dim, or a layer without attention scores.

    Source:
        Geva et al. 2023, "Dissecting Recall of Factual Associations" (arXiv:2304.14767), section 4; windows of layers,
        because neighbouring layers make up for the loss of one.

    See Also:
        `short_circuit`: every token attends to itself alone.

    Example:
        >>> answer = interp.logit_difference(" Mary", " John")
        >>> knock_out(model, prompt, [-1], [1, 2], metric=answer, by=("layer", "key")).value.dims
        ('layer', 'key')
    """

    queries: ColumnChoice
    keys: ColumnChoice
    _: KW_ONLY
    metric: Metric | LogitFunction | None = None
    by: Sequence[str] = ("layer",)
    layers: Sequence[int] | None = None
    heads: Sequence[int] | None = None
    window: int = 1
    each: bool = True

    def bind(self, model: Subject) -> ByRow:
        """A planned sweep for the prompts of each layout in a batch."""
        config, metric = model.transformer.config, as_metric(self.metric, model.text)
        cuts = Cuts(
            dims_asked(self.by, DIMS, "a knock-out"),
            tuple(layers_with_scores(config, self.layers)),
            tuple(
                range(config.n_heads) if self.heads is None else chosen(self.heads, config.n_heads, "head")
            ),
            self.window,
            config,
        )
        masks = [len(columns) for columns in (self.queries, self.keys) if isinstance(columns, Tensor)]
        if masks and {"query", "key"} & set(cuts.by):
            raise ValueError("cuts by query or key require columns that are alike in all prompts, got a mask")
        table = EffectTable(
            self.name, cuts.by, cuts.coords(self.queries, self.keys), metric, model.text,
            {"intervention": "attention scores = -inf", "window": self.window},
        )  # fmt: skip
        measure = partial(_effects, cuts=cuts, queries=self.queries, keys=self.keys, metric=metric)
        analysis = causal(model, table, measure, each=self.each)
        counts = {*masks, *([] if analysis.prompts is None else [analysis.prompts])}
        if len(counts) > 1:
            raise ValueError(
                f"masks and answers for the same prompts are required, got {sorted(counts)} of them"
            )
        return replace(analysis, prompts=next(iter(counts), None))


knock_out = of_data(KnockOut)


def layers_with_scores(config: ModelConfig, layers: Sequence[int] | None) -> list[int]:
    """The layers of an argument, None for all that have attention scores; KeyError where a layer has none."""
    wanted = chosen_layers(layers, config.n_layers)
    without = [i for i in wanted if not config.mixers[i].traits.scored]
    if config.block.proven or not without or (layers is None and len(without) < len(wanted)):
        return layers_with(SCORES, config, layers)
    first, scored = without[0], [i for i, mixer in enumerate(config.mixers) if mixer.traits.scored]
    here = f"in this model layers {scored} have them" if scored else "no layer of this model has them"
    instead = f"edit blocks.{first}.hook_attn_out or heads (interp.ablate)"
    if config.mixers[first].traits.patterned:
        instead = (
            f"Edit('blocks.{first}.attn.hook_pattern', interp.edits.Zero(), {{'query': q, 'key': k}}) takes a weight "
            "out, without spreading it over the other keys"
        )
    raise KeyError(
        f"a knock-out sets attention scores to -inf before a softmax: layer {first} mixes positions by "
        f"{type(config.mixers[first]).__name__}, which has no scores; {here}. Mixers with scores: "
        f"{', '.join(SCORED)}. Instead, {instead}"
    )


@dataclass(frozen=True)
class Cuts:
    """The layers and heads in which a knock-out cuts attention, and the dims along which it cuts one at a time."""

    by: tuple[str, ...]
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    window: int
    config: ModelConfig

    def __post_init__(self) -> None:
        if self.window < 1 or (self.window > 1 and "layer" not in self.by):
            raise ValueError(
                f"a window of 1 or more layers is required, with 'layer' in `by`, got {self.window}"
            )

    @property
    def groups(self) -> list[list[int]]:
        """The layers that are cut at once, for every cell along `layer`."""
        if "layer" not in self.by:
            return [list(self.layers)]
        possible = layers_with_scores(self.config, None)
        starts = [layer - self.window // 2 for layer in self.layers]
        return [[layer for layer in possible if s <= layer < s + self.window] for s in starts]

    def coords(self, queries: ColumnChoice, keys: ColumnChoice) -> dict[str, object]:
        """The labels of every dim, and the names `part` (`L0H1`) of heads if each cell cuts one head in one layer."""
        possible = {"layer": self.layers, "head": self.heads, "query": queries, "key": keys}
        labels: dict[str, object] = {dim: list(possible[dim]) for dim in self.by}
        if self.window == 1 and self.by[:2] == ("layer", "head"):
            names = [[str(Part("head", layer, h)) for h in self.heads] for layer in self.layers]
            labels["part"] = (("layer", "head"), names)
        return labels

    def variants(self, queries: Sequence[int], keys: Sequence[int]) -> list[Variant]:
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
                    Edit(f"blocks.{layer}.{SCORES}", hidden, {"query": q, "key": k, **head})
                    for layer, head, q, k in product(layers, cell_heads, starts, ends)
                ]
            )
            for layers, cell_heads, starts, ends in cells
        ]


def _split(items: Sequence[T], singly: bool) -> list[Sequence[T]]:
    """Groups of items that are cut at once: one item each if `singly`, else all items in one group."""
    return [[item] for item in items] if singly else [items]


def _effects(
    model: Transformer, batch: Batch, cuts: Cuts, queries: ColumnChoice, keys: ColumnChoice, metric: Metric
) -> Steps[MeasuredEffects]:
    """Effects of the cuts in every prompt; prompts whose queries and keys are in the same columns share a sweep."""
    check_first_column(batch, "queries and keys")
    columns = (_columns(queries, batch, "query"), _columns(keys, batch, "key"))
    layouts: list[SightLayout] = list(zip(*columns, strict=True))
    yield from check_sight(model, batch, cuts, layouts)
    rows = {
        distinct: [i for i, layout in enumerate(layouts) if layout == distinct]
        for distinct in dict.fromkeys(layouts)
    }
    counts = {
        "layer": len(cuts.layers),
        "head": len(cuts.heads),
        "query": len(columns[0][0]),
        "key": len(columns[1][0]),
    }
    shape = [counts[dim] for dim in cuts.by]
    parts = []
    for layout, numbers in rows.items():
        some_rows = batch if len(rows) == 1 else batch.rows(torch.tensor(numbers))
        parts.append((yield from swept(some_rows, metric, cuts.variants(*layout), shape)))
    return MeasuredEffects.joined(
        parts, torch.tensor([i for numbers in rows.values() for i in numbers]).argsort()
    )


def check_sight(model: Transformer, batch: Batch, cuts: Cuts, layouts: Sequence[SightLayout]) -> Steps[None]:
    """ValueError for a query that a cut would leave without any key; never in models with attention sinks.

    Where all prompts are cut in the same columns, the keys that a query sees are read in the base run of the sweep.
    """
    if model.config.sinks:
        return
    queries, keys = torch.zeros(2, *batch.tokens.shape, dtype=torch.bool)
    for row, (starts, ends) in enumerate(layouts):
        queries[row, list(starts)] = True
        keys[row, list(ends)] = True
    layers = sorted({layer for group in cuts.groups for layer in group})
    reads = [Read(f"blocks.{layer}.{SCORES}", via=_finite) for layer in layers]
    ahead = [Ahead(batch, [read.site for read in reads])] if len(set(layouts)) == 1 else []
    run = yield from recorded(batch, reads, ahead=ahead)
    masks = to_host({layer: run.trace[read] for layer, read in zip(layers, reads, strict=True)})
    for layer, visible in masks.items():
        seen = visible & queries[:, :, None]  # [b q k]: keys that the queries in question see
        hit = seen & keys[:, None, :]  # those of them that are cut
        blind = hit.any(-1) & (seen.sum(-1) == (1 if "key" in cuts.by else hit.sum(-1)))  # [b q]
        if bool(blind.any()):
            raise ValueError(
                f"every query must keep a key, but query {int(blind.nonzero()[0, 1])} of layer {layer} sees none "
                f"besides those that are to be cut"
            )


def _finite(scores: Float[Tensor, "b h q k"]) -> Bool[Tensor, "b q k"]:
    """Mask of the keys that each query sees, read from the scores of head 0: it is the same for all heads."""
    return scores[:, 0].isfinite()


def _columns(choice: ColumnChoice, batch: Batch, what: str) -> list[tuple[int, ...]]:
    """Columns of the batch, in each prompt, that the argument `queries` or `keys` names."""
    if isinstance(choice, Tensor):
        mask = rows_of_mask(choice, batch, f"{what} columns")
        return [tuple(row.nonzero()[:, 0].tolist()) for row in mask]
    batch = batch.host()
    first, ends = batch.real.int().argmax(1), batch.prompt_tokens.sum(1)
    rows = zip(first.tolist(), batch.lengths.tolist(), ends.tolist(), strict=True)
    return [tuple(start + i for i in chosen(choice, length, what, end)) for start, length, end in rows]
