"""Exact differences between two models of one kind: each part's weights or writes, put from one into the other.

A fine-tuned model differs from its base a little everywhere. Which part's change matters? Put one part's weights of the
tuned model into the base: how much of the whole change of the metric does that alone cause? Each effect is exact, from
a pass with the exchanged weights that starts at the block that holds them; a part with equal weights needs no pass.
Exchanging a part's activations is patching from the other model's run: they carry all changes of earlier parts, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from interp.core.results import Score, scored
from interp.core.stats import Means, Moments, Partial, Rows, if_at_least, over, ratio
from interp.core.transfers import check, to_device
from interp.data.batch import Batch
from interp.editing.exchange import (
    WITHIN_ATTENTION,
    ExchangeGrain,
    Other,
    ParameterPiece,
    PieceChange,
    changes,
    exchanged,
    first_block,
    moved,
    named_part,
    pieces_of,
    written_at,
)
from interp.model import sites
from interp.model.config import ModelConfig
from interp.model.edits import Edit, Set
from interp.model.parts import Part, PartName, is_part
from interp.model.tap import Read
from interp.model.transformer import Transformer
from interp.passes.metrics import LogitFunction, Metric, as_metric, kl_divergence
from interp.passes.needs import Recorded, Steps, recorded, swept
from interp.passes.observe import Model, Subject
from interp.passes.question import ByRow, NotFiniteError, Question
from interp.passes.sweep import MetricOfVariants
from interp.passes.variants import Variant
from interp.runs.functions import of_data

if TYPE_CHECKING:
    import xarray as xr

What = Literal["weights", "activations"]
"""Which side of a part is exchanged."""
ExchangeDirection = Literal["denoise", "noise"]
"""denoise: parts of the tuned model are put into the base; noise: parts of the base into the tuned model."""
FEWEST_SHARES = 64
"""Fewest prompts for an interval of a share of the change (`docs/intervals.md`)."""
SIGN = "metric with the exchanged part minus metric of the same model without it"


@dataclass(frozen=True, eq=False)
class Diff(Question):
    """Share of the change from a base model to a tuned one that each part brings about by itself, exactly.

    One part's weights, or its activations, are taken from the tuned model and put into the base: how far does that
    alone move the metric? No estimate: each effect is a pass of the model with the part exchanged, from its block on.

    Args:
        data: prompts, token ids, a batch, files or a stream of any size.
        tuned: the other model, of the same config and tokenizer; taken in the dtype of this one.
        metric: a `Metric`, or a function of the logits [b, v] at the last token; None: the logit difference of the
            answers. By default KL(tuned || exchanged) of the next-token distributions at the last token. One that
            compares always compares with the tuned model.
        parts: which parts are exchanged: "sublayer", "head", or parts by name. "sublayer": embeddings, attention, MLPs,
            norms, unembedding: together every parameter, each once. "head": attention cut into heads, and under
            grouped-query attention their keys and values `L0G1.k`, with `L0.attn_rest` for what they share. Parts of an
            inner list are exchanged together.
        what: what of a part is exchanged: "weights", "activations", or both. "weights": the part's parameters in the
            other's place. "activations": what the part writes in the run of the other model, which carries all that
            changed before it; NaN for parts that write nothing of their own (norms, the unembedding, what the heads of
            a layer share).
        direction: "denoise" puts the tuned model's parts into the base, "noise" the base's into the tuned model: what
            is undone when this part alone goes back.
        each: whether the effects in every prompt are kept; False: only the moments over prompts, for data of any size.

    Returns:
        Dataset[what, part, score]. Scores: `effect`, metric(with the part exchanged) - metric(without), mean over
        prompts, in the metric's unit; `share`, the sum of the effects by that of the whole change, metric(other model)
        - metric(this one): 1 = this part alone does it all. Shares need not sum to 1: parts act together
        (`diff_interactions`), and may overshoot.

        - `value`, `low`, `high`, `n`: with 95 % intervals over prompts, of shares from 64 on.
        - `changed` [what, part]: whether the part's weights differ in any number, or what it writes on any prompt;
          where not, the effect is exactly 0 and nothing was run.
        - `moved` [part]: length of the weights' change by their own.
        - `base`, `tuned`: metric of the two models; with `each` [prompt].
        - `each` [prompt, what, part], if kept: effect in every prompt.

    Raises:
        ValueError: models of another config or tokenizer, which names what differs, two of the same weights or the same
            metric in every prompt, wrapped and edited models.
        KeyError: a part that owns no parameter.

    See Also:
        `diff_interactions`: what pairs of parts do together. `changed_tokens`, `activation_difference`: what differs,
        without parts.

    Example:
        >>> import copy
        >>> tuned = interp.HookedTransformer(copy.deepcopy(model.transformer), model.text.tokenizer)
        >>> with torch.no_grad():
        ...     _ = tuned.transformer.blocks[1].mlp.out.weight.mul_(1.5)
        >>> found = diff(model, [prompt], tuned)
        >>> round(float(found.value.sel(what="weights", part="L1.mlp", score="share")), 3)
        1.0
    """

    tuned: Model
    _: KW_ONLY
    metric: Metric | LogitFunction | None = field(default_factory=kl_divergence)
    parts: ExchangeGrain | Sequence[PartName | Sequence[PartName]] = "sublayer"
    what: Sequence[What] = ("weights", "activations")
    direction: ExchangeDirection = "denoise"
    each: bool = True

    def bind(self, model: Subject) -> ByRow:
        """A pass per part with exchanged weights, from its block on; one planned sweep for exchanged activations."""
        other, network = _other_model(self.tuned, model), model.transformer
        cells = ExchangedCells.of(self.parts, network, other.on_device_of(network).unedited)
        return _analysis(_Exchange(self.name, "part", cells, other, as_metric(self.metric, model.text),
                                   tuple(self.what), self.direction, self.each), model)  # fmt: skip


diff = of_data(Diff)


@dataclass(frozen=True, eq=False)
class DiffInteractions(Question):
    """Interaction of every pair of exchanged parts: effect(both) - effect(a) - effect(b).

    0: the two effects add up. Same sign as the effects: the parts need each other (each alone does little). Opposite
    sign: either part does some of what the other does. A part whose weights are the same has no interaction.

    Args:
        data: prompts, token ids, a batch, files or a stream of any size.
        tuned: the other model, of the same config and tokenizer; taken in the dtype of this one.
        parts: two parts or more by name, such as those of the largest shares in the result of `diff`.
        metric: a `Metric`, or a function of the logits [b, v] at the last token; None: the logit difference of the
            answers. By default KL(tuned || exchanged), as in `diff`.
        what: what of a part is exchanged: "weights", "activations", or both, as in `diff`.
        direction: "denoise" puts the tuned model's parts into the base, "noise" the base's into the tuned model.
        each: whether the interactions in every prompt are kept.

    Returns:
        Dataset[what, pair, score] with the variables of `diff` but `moved`, its `effect` being the interaction.

    Raises:
        ValueError: as `diff`; a single part, or one that is named twice.
        KeyError: a part that owns no parameter.

    See Also:
        `diff`: the effects of single parts.

    Example:
        >>> import copy
        >>> tuned = interp.HookedTransformer(copy.deepcopy(model.transformer), model.text.tokenizer)
        >>> with torch.no_grad():
        ...     for block in tuned.transformer.blocks:
        ...         _ = block.mlp.out.weight.mul_(1.5)
        >>> diff_interactions(model, [prompt], tuned, ["L0.mlp", "L1.mlp"]).pair.values.tolist()
        ['L0.mlp+L1.mlp']
    """

    tuned: Model
    parts: Sequence[PartName]
    _: KW_ONLY
    metric: Metric | LogitFunction | None = field(default_factory=kl_divergence)
    what: Sequence[What] = ("weights",)
    direction: ExchangeDirection = "denoise"
    each: bool = True

    def bind(self, model: Subject) -> ByRow:
        """A pass per part and per pair."""
        if len(self.parts) < 2:
            raise ValueError(
                f"an interaction is of two parts: at least two are required, got {list(self.parts)}"
            )
        other, network = _other_model(self.tuned, model), model.transformer
        pairs = [list(pair) for pair in combinations(self.parts, 2)]
        cells = ExchangedCells.of([*self.parts, *pairs], network, other.on_device_of(network).unedited)
        return _analysis(_Exchange(self.name, "pair", cells, other, as_metric(self.metric, model.text),
                                   tuple(self.what), self.direction, self.each), model)  # fmt: skip


diff_interactions = of_data(DiffInteractions)


# --- what is exchanged ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExchangedCell:
    """Parts that are exchanged together."""

    label: str
    parts: tuple[Part, ...]
    pieces: tuple[ParameterPiece, ...]
    """The pieces of parameters of those parts that differ between the two models."""
    start: int
    """Index of the first block that their weights change; passes with them start there."""
    changed: bool
    """Whether any of their weights differs."""
    moved: float
    """Norm of the change of their weights, divided by the norm of the weights."""
    written: tuple[tuple[str, Mapping[str, int]], ...]
    """The sites and indices that the parts write; empty unless every part writes one."""


@dataclass(frozen=True)
class ExchangedCells:
    """All cells of a question, each exchanged by itself."""

    every: tuple[ExchangedCell, ...]

    @classmethod
    def of(
        cls,
        parts: ExchangeGrain | Sequence[PartName | Sequence[PartName]],
        base: Transformer,
        tuned: Transformer,
    ) -> ExchangedCells:
        """The cells that the argument `parts` describes, with what differs in each.

        Raises:
            ValueError, KeyError: as `diff`.
        """
        if isinstance(parts, str):
            owned = pieces_of(base, parts)  # type: ignore[arg-type]  # the record has looked at it
            groups = [[part] for part in owned]
        else:
            owned = {
                part: pieces
                for grain in get_args(ExchangeGrain)
                for part, pieces in pieces_of(base, grain).items()
            }
            entries = [[entry] if is_part(entry) else list(entry) for entry in parts]  # type: ignore[arg-type]
            groups = [[named_part(name, list(owned)) for name in group] for group in entries]  # type: ignore[arg-type]
        labels = ["+".join(map(str, group)) for group in groups]
        if not labels or not all(labels) or len(set(labels)) < len(labels):
            raise ValueError(
                f"parts, or lists of at least one that go together, each once, are required, got {parts!r}"
            )
        for group in groups:
            _check_apart(group)
        parameters = {part: owned[part] for group in groups for part in group}
        changed = changes(base, tuned, _all_pieces(parameters))
        cells = cls(
            tuple(
                _cell(label, {part: owned[part] for part in group}, changed, base.config)
                for label, group in zip(labels, groups, strict=True)
            )
        )
        if not _any_differs(changed) and not _any_differs(
            changes(base, tuned, _all_pieces(pieces_of(base, "sublayer")))
        ):
            raise ValueError("the two models have the same weights: there is no change to look for")
        return cells

    def starts(self, n_layers: int) -> list[int]:
        """Indices of the blocks where passes with exchanged weights begin, without block 0."""
        return sorted({cell.start for cell in self.every if cell.changed and 0 < cell.start < n_layers})

    @property
    def sites(self) -> list[str]:
        """The sites that the parts write."""
        return list(dict.fromkeys(site for cell in self.every for site, _ in cell.written))


def _check_apart(group: Sequence[Part]) -> None:
    """ValueError for parts that go together and share parameters: one twice, or attention and a head of it."""
    inside = [part for part in group if Part("attn", part.layer) in group and part.kind in WITHIN_ATTENTION]
    if inside or len(set(group)) < len(group):
        raise ValueError(
            f"parts that go together must own different parameters, got {', '.join(map(str, group))}"
        )


def _any_differs(piece_changes: Mapping[ParameterPiece, PieceChange]) -> bool:
    return any(change.differs for change in piece_changes.values())


def _all_pieces(owned: Mapping[Part, Sequence[ParameterPiece]]) -> list[ParameterPiece]:
    return [piece for pieces in owned.values() for piece in pieces]


def _cell(
    label: str,
    owned: Mapping[Part, Sequence[ParameterPiece]],
    piece_changes: Mapping[ParameterPiece, PieceChange],
    config: ModelConfig,
) -> ExchangedCell:
    changed = [
        part for part, pieces in owned.items() if any(piece_changes[piece].differs for piece in pieces)
    ]
    written = [written_at(part, config) for part in owned]
    return ExchangedCell(
        label,
        tuple(owned),
        tuple(piece for part in changed for piece in owned[part]),
        min((first_block(part, config) for part in changed), default=config.n_layers),
        bool(changed),
        moved(piece_changes[piece] for piece in _all_pieces(owned)),
        tuple(place for place in written if place is not None) if None not in written else (),
    )


def _other_model(tuned: Model, model: Subject) -> Other:
    """The tuned model as `Other`.

    Raises:
        ValueError: as `diff`.
    """
    other = Other.of(tuned, model)
    if edits := (*model.transformer.edits, *other.edits):
        raise ValueError(
            f"weights are exchanged between models as they are, got one with an edit of {edits[0].name}: ask about the "
            "models without edits, or use `changed_tokens` and `activation_difference`, which take edited models"
        )
    return other


# --- passes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Exchange:
    """Settings of `diff` or `diff_interactions`: the tuned model, the exchanged cells, the metric and the direction."""

    name: str
    dim: Literal["part", "pair"]
    cells: ExchangedCells
    other: Other
    metric: Metric
    what: tuple[What, ...]
    direction: ExchangeDirection
    each: bool

    def __post_init__(self) -> None:
        if not self.what or len(set(self.what)) < len(self.what):
            raise ValueError(f"what must name weights, activations or both, each once, got {list(self.what)}")

    @property
    def shown_cells(self) -> Sequence[ExchangedCell]:
        """The cells of the result: for interactions the pairs, which come last."""
        every = self.cells.every
        return every if self.dim == "part" else [cell for cell in every if len(cell.parts) > 1]

    @property
    def combined(self) -> Float[Tensor, "cell shown"]:
        """Matrix from effects of cells to the shown numbers: the identity, or effect(both) - effect(a) - effect(b)."""
        every = self.cells.every
        if self.dim == "part":
            return torch.eye(len(every), dtype=torch.float64)
        place = {cell.label: i for i, cell in enumerate(every)}
        coefficients = torch.zeros(len(every), len(self.shown_cells), dtype=torch.float64)
        for column, pair in enumerate(self.shown_cells):
            coefficients[place[pair.label], column] = 1.0
            for part in pair.parts:
                coefficients[place[str(part)], column] = -1.0
        return coefficients


def _analysis(exchange: _Exchange, model: Subject) -> ByRow:
    if "weights" in exchange.what and model.transformer.config.shared_blocks:
        raise ValueError(
            "what=('activations',) is required where all layers share their weights (shared_blocks): one layer's "
            "cannot be exchanged alone"
        )
    return ByRow(
        exchange.name,
        partial(_compute, exchange=exchange),
        Rows if exchange.each else Means,
        partial(_finish, exchange=exchange),
        answers=exchange.metric.answers(model.text),
    )


@dataclass(frozen=True, eq=False)
class _Pair:
    """The runs of both models on a batch: `into`, the model that receives parts, and `source`, where they come from."""

    exchange: _Exchange
    batch: Batch
    into: Transformer
    source: Transformer
    into_run: Recorded
    source_run: Recorded

    @classmethod
    def of(cls, exchange: _Exchange, batch: Batch, model: Transformer) -> Steps[_Pair]:
        """One pass of each model, recorded at the blocks where later passes begin and at the sites that parts write."""
        tuned, config = exchange.other.on_device_of(model), model.config
        into, source = (model, tuned) if exchange.direction == "denoise" else (tuned, model)
        starts = exchange.cells.starts(config.n_layers) if "weights" in exchange.what else []
        written = exchange.cells.sites if "activations" in exchange.what else []
        reads = [_entering(config, start) for start in starts]
        into_run = yield from recorded(batch, reads, final=True, exact=True, model=into)
        reads = [Read(site) for site in written]
        source_run = yield from recorded(batch, reads, final=True, exact=True, model=source)
        return cls(exchange, batch, into, source, into_run, source_run)

    @property
    def columns(self) -> Tensor | None:
        """The columns that the metric needs; None = all."""
        return self.exchange.metric.columns(self.batch)

    @property
    def reference(self) -> tuple[Float[Tensor, "b n d"], Transformer]:
        """The reference of a metric that compares: the tuned model's final stream, and that model."""
        run = self.source_run if self.exchange.direction == "denoise" else self.into_run
        return run.final_at(self.exchange.metric), run.model

    def value(self, model: Transformer, stream: Float[Tensor, "b n d"]) -> Float[Tensor, "b"]:
        """The metric of a final stream that this model reads out."""
        return MetricOfVariants(self.exchange.metric, self.batch, model, *self.reference).value(stream, 1)[0]

    def with_weights(self, cell: ExchangedCell) -> Float[Tensor, "b"]:
        """The metric of the model with these weights exchanged."""
        model = exchanged(self.into, self.source, cell.pieces)
        n, batch = model.config.n_layers, self.batch
        if cell.start == n:
            return self.value(model, self.into_run.final_at(self.exchange.metric))
        begin = self.into_run.trace[_entering(model.config, cell.start)] if cell.start else batch.tokens
        stream = model(begin, None, cell.start, n, logits_at=self.columns, **batch.inputs)
        return self.value(model, stream)

    def by_weights(self, without: Float[Tensor, "b"]) -> tuple[Tensor, Tensor]:
        """The effect of every cell's weights, and whether they differ `[b c]`."""
        cells = self.exchange.cells.every
        effect = [self.with_weights(c) - without if c.changed else torch.zeros_like(without) for c in cells]
        changed = to_device(torch.tensor([cell.changed for cell in cells]), without.device)
        return torch.stack(effect, 1), changed.expand(len(without), -1)

    def by_activations(self) -> Steps[tuple[Tensor, Tensor]]:
        """The effect of the activations of every cell, and whether they differ `[b c]`; 0 if a cell writes nothing."""
        put = {site: Set(self.source_run.trace[Read(site)]) for site in self.exchange.cells.sites}
        variants = [
            Variant([Edit(site, put[site], at) for site, at in cell.written])
            for cell in self.exchange.cells.every
        ]
        reference, model = self.reference
        sweep = yield from swept(
            self.batch, variants, self.exchange.metric, reference=reference, reference_model=model, model=self.into
        )  # fmt: skip
        return (sweep.values - sweep.base).mT, sweep.changed.mT


def _entering(config: ModelConfig, layer: int) -> Read:
    """The read of the stream that enters a block after the first."""
    return Read(sites.stream_after(config, layer - 1))


@torch.no_grad()
def _compute(model: Transformer, batch: Batch, exchange: _Exchange) -> Steps[Mapping[str, Tensor]]:
    """Effect of every cell in every prompt, and the whole change of the metric from one model to the other."""
    pair = yield from _Pair.of(exchange, batch, model)
    own_value, other_value = (
        pair.value(run.model, run.final_at(exchange.metric)) for run in (pair.into_run, pair.source_run)
    )
    base, tuned = (own_value, other_value) if exchange.direction == "denoise" else (other_value, own_value)
    for name, value in (("base", base), ("tuned", tuned)):
        message = f"{exchange.metric.name} is NaN or infinite in the {name} model on some prompt"
        check(value.isfinite().all(), partial(NotFiniteError, message))
    measured = []
    for what in exchange.what:
        measured.append(
            pair.by_weights(own_value) if what == "weights" else (yield from pair.by_activations())
        )
    combined = to_device(exchange.combined, own_value.device)
    effect = (
        torch.stack([effects.double() for effects, _ in measured], 1) @ combined
    )  # [b what cell] -> [b what shown]
    changed = torch.stack([changes.double() for _, changes in measured], 1) @ combined.abs()
    total = (other_value - own_value).double()
    return {
        "effect": effect,
        "whole": total[:, None, None],
        "both": effect + total[:, None, None],
        "changed": changed,
        "base": base,
        "tuned": tuned,
    }


# --- the result -----------------------------------------------------------------------------------------------------


def _finish(merged: Partial, exchange: _Exchange) -> xr.Dataset:
    metric, shown = exchange.metric, exchange.shown_cells
    moments = merged.moments if isinstance(merged, Means) else _moments(merged)
    total = moments["whole"]
    if not bool(total.mean) and not bool(total.spread):
        raise ValueError(
            f"{metric.name} is the same for both models in every prompt: there is no change whose parts could be told"
        )
    effect = Score.of(moments["effect"], metric.unit, fewest=metric.fewest)
    share = _share(moments, effect)
    known = torch.tensor(
        [[what == "weights" or bool(cell.written) for cell in shown] for what in exchange.what]
    )
    scores = {name: _masked_score(score, known) for name, score in {"effect": effect, "share": share}.items()}
    dims = ("what", exchange.dim)
    variables: dict[str, tuple[Sequence[str], Tensor]] = {"changed": (dims, moments["changed"].mean > 0)}
    if exchange.dim == "part":
        variables["moved"] = (("part",), torch.tensor([cell.moved for cell in shown], dtype=torch.float64))
    if isinstance(merged, Rows):
        effects = merged.rows["effect"]
        variables["each"] = (("prompt", *dims), effects.masked_fill(~known.to(effects.device), torch.nan))
        variables |= {name: (("prompt",), merged.rows[name]) for name in ("base", "tuned")}
    else:
        variables |= {name: ((), moments[name].mean) for name in ("base", "tuned")}
    interval = f"{over('prompts', metric.fewest)}; of shares {if_at_least(FEWEST_SHARES)}"
    return scored(
        exchange.name,
        scores,
        dims,
        coords={"what": list(exchange.what), exchange.dim: [cell.label for cell in shown]},
        others=variables,
        units={**dict.fromkeys(("each", "base", "tuned"), metric.unit), "moved": "share of the weights' length"},
        attrs={
            "metric": metric.name, "unit": metric.unit, "direction": exchange.direction, "effect": SIGN,
            "share": "of the change of the whole model", "interval": interval,
        },
    )  # fmt: skip


def _moments(merged: Partial) -> dict[str, Moments]:
    """The moments over prompts of values that were kept prompt by prompt."""
    assert isinstance(merged, Rows)
    return {name: Moments.of(rows) for name, rows in merged.rows.items()}


def _share(moments: Mapping[str, Moments], effect: Score) -> Score:
    """The sum of the effects divided by the sum of the whole change over prompts, with its interval."""
    value, low, high = ratio(moments["effect"], moments["whole"], moments["both"], FEWEST_SHARES)
    value, low, high = (x + 0.0 for x in (value, low, high))  # 0 by a negative change is -0
    return Score(value, low, high, effect.n, torch.full_like(value, torch.nan), "share of the change")


def _masked_score(score: Score, known: Tensor) -> Score:
    """The score with NaN where `known` is False: activations of parts that write nothing."""
    known = known.to(score.value.device)
    ends = (score.value, score.low, score.high)
    value, low, high = (x.masked_fill(~known, torch.nan) for x in ends)
    return Score(value, low, high, score.n.masked_fill(~known, 0), score.null, score.unit)
