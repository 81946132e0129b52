"""Recall of memorised text: given continuations, token by token, by the whole and the short-circuited model.

Memorised is what greedy decoding writes exactly (Carlini et al. 2023, arXiv:2202.07646). Under an intervention the
share of continuations that survive, and of their tokens, says how much of the memory needs what was taken away. Menta
et al. 2025 (arXiv:2501.05078) measure the same: exact match, token accuracy, entropy of the completion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.causal.effects import SIGN, moments_of
from interp.causal.short_circuit import INTERVENTION, Layers, layer_groups, variants
from interp.causal.spans import rows_of_mask
from interp.core.boundary import public
from interp.core.results import Score, scored
from interp.core.stats import ANYWHERE, POSITIVE, SIGNED, Means, Partial, Rows
from interp.core.transfers import check, to_device
from interp.data.batch import Batch
from interp.model.transformer import Transformer
from interp.passes.metrics import Metric, Outcome
from interp.passes.needs import Steps, swept_by
from interp.passes.observe import Model, Subject, text_of
from interp.passes.question import ByRow, NotFiniteError, Question, Values
from interp.runs.functions import of_data

if TYPE_CHECKING:
    import xarray as xr

WHOLE = "none"
"""The label of the whole model, in which no part is short-circuited."""
NOT_FINITE = "the whole model predicts some prompt with NaN or infinity"


@dataclass(frozen=True, eq=False)
class Recall(Question):
    """Recall of given continuations, token by token, by the whole model and with attention short-circuited.

    The model reads the true continuation (teacher forcing); greedy decoding writes it exactly if `exact_match` is 1.

    Args:
        data: prompts with their continuations.
        span: mask [prompt, pos], True at the continuation; `continuations` makes both.
        layers: one entry per variant, a layer or a range of layers short-circuited together; None: each layer alone.
        each: False keeps no values of single prompts, which data of any size requires.

    Returns:
        Dataset over `part`, the whole model as "none" and the variants, and `score`:

        - `value`: mean over prompts, with the ends `low` and `high` of its 95 % interval, `n`, and the coordinate
          `unit`. For each score there is its change, such as `loss_change`: the number minus that of the whole model,
          with the interval of that difference over prompts.
        - `each` [prompt, part, score]: score of every prompt.

        Scores:

            exact_match     1 where every token of the continuation is the most probable one, else 0
            token_accuracy  the share of its tokens that are
            loss            the mean of -log p over its tokens, nats
            entropy         the mean entropy of the distributions that predict its tokens, nats

    Raises:
        ValueError: a span of another shape, without a token in some prompt, in the first column or at padding; an
            empty range of layers, or a variant given twice.
        IndexError: a layer that does not exist.

    Source:
        Memorisation as greedy decoding that is exact: Carlini et al. 2023, arXiv:2202.07646; the measures under short
        circuits: Menta et al. 2025, arXiv:2501.05078.

    See Also:
        `short_circuit`: the same interventions with any metric.

    Example:
        >>> found = recall(model, *continuations(model, [("The cat sat", " on the mat")]), layers=[0, range(1, 3)])
        >>> found.part.values.tolist()
        ['none', 'L0.attn', 'L1.attn+L2.attn']
    """

    span: Bool[Tensor, "prompt p"]
    layers: Layers | None = None
    _: KW_ONLY
    each: bool = True

    def bind(self, model: Subject) -> ByRow:
        """One planned sweep per batch and measure."""
        groups = layer_groups(self.layers, model.transformer.config.n_layers)
        return ByRow(
            self.name,
            partial(_rows, span=self.span, groups=groups),
            Rows if self.each else Means,
            partial(_finish, name=self.name, parts=[WHOLE, *groups]),
            prompts=len(self.span),
        )


recall = of_data(Recall)


@torch.no_grad()
def _rows(
    model: Transformer,
    batch: Batch,
    span: Bool[Tensor, "prompt p"],
    groups: Mapping[str, list[int]],
) -> Steps[Values]:
    """Each measure [prompt, part] in the unedited run and under every variant, and its change from the unedited run."""
    inside = rows_of_mask(span, batch, "span")
    real = batch.host().real
    before = real.roll(1, 1) & real
    before[:, 0] = False
    if not bool(inside.any(1).all()) or bool((inside & ~before).any()):
        raise ValueError(
            "a span of at least one token in every prompt is required, none of them the first or padding"
        )
    all_variants = variants(groups, model.config.n_heads, batch.tokens.shape[1])
    measured = yield from swept_by(
        batch, all_variants, [measure.metric(inside) for measure in MEASURES.values()]
    )
    values, changes = {}, {}
    for name, sweep in zip(MEASURES, measured, strict=True):
        check(sweep.base.isfinite().all(), partial(NotFiniteError, NOT_FINITE))
        changes[f"{name}_change"] = torch.cat(
            (torch.zeros_like(sweep.base)[None], sweep.values - sweep.base)
        ).mT
        values[name] = sweep.base[:, None] + changes[f"{name}_change"]
    return values | changes


def _finish(merged: Partial, name: str, parts: Sequence[str]) -> xr.Dataset:
    units = {score: measure.unit for score, measure in MEASURES.items()}
    units |= {f"{score}_change": unit for score, unit in units.items()}
    moments = moments_of(merged)
    shares = {score for score, measure in MEASURES.items() if measure.score is hits}
    within = {"loss": POSITIVE, "entropy": POSITIVE, **{f"{share}_change": SIGNED for share in shares}}
    scores = {
        score: Score.of(moments[score], unit, share=score in shares, within=within.get(score, ANYWHERE))
        for score, unit in units.items()
    }
    attrs = {"intervention": INTERVENTION, "effect": SIGN, "interval": "95 % over prompts"}
    others: dict[str, tuple[Sequence[str], Tensor]] = {}
    if isinstance(merged, Rows):
        values = torch.stack([merged.rows[score] for score in scores], -1)
        others["each"] = (("prompt", "part", "score"), values)
    return scored(name, scores, ("part",), coords={"part": list(parts)}, attrs=attrs, others=others)


@public()
def continuations(model: Model, pairs: Sequence[tuple[str, str]]) -> tuple[Batch, Bool[Tensor, "b p"]]:
    """Prompts with their continuations as one batch (BOS first), and the mask of the continuations.

    Prompt and continuation are tokenised apart, as if the model had been given the prompt alone.

    Args:
        pairs: texts (prompt, continuation).

    Returns:
        The batch, and the mask [b, p], True at the continuations.

    Raises:
        ValueError: no pair, or an empty continuation.

    Example:
        >>> batch, span = continuations(model, [("The cat sat", " on the mat")])
        >>> model.to_string(batch.tokens[0, span[0]])
        ' on the mat'
    """
    if not pairs or not all(text for _, text in pairs):
        raise ValueError("at least one prompt with a continuation is required, got none")
    text = text_of(model)
    rows = [(text.ids(prompt), text.tokenizer.encode(more)) for prompt, more in pairs]
    batch = text.batch(Batch.of([[*start, *more] for start, more in rows]))
    column = torch.arange(batch.tokens.shape[1])
    starts = torch.tensor([len(start) for start, _ in rows])[:, None]
    return batch, (column >= starts) & batch.real


@dataclass(frozen=True)
class RecallMeasure:
    """How well the tokens of a span are predicted: a score per token, and its reduction over a prompt."""

    unit: str
    score: Callable[[Float[Tensor, "r n v"], Int[Tensor, "r n"]], Float[Tensor, "r n"]]
    """Function of logits and the tokens that they should predict."""
    whole: bool = False
    """Whether the worst token counts instead of the mean over tokens."""

    def metric(self, span: Bool[Tensor, "b p"]) -> Metric:
        """The measure as a metric of prompts with these spans."""

        def value(outcome: Outcome) -> Float[Tensor, "r"]:
            outcome.model.config.require_next_token("recall of a text")
            tokens = outcome.batch.tokens[:, 1:]
            inside = to_device(span, tokens.device)[outcome.example, 1:]
            scores = self.score(outcome.logits()[:, :-1], tokens)
            if self.whole:
                return scores.masked_fill(~inside, torch.inf).amin(1)
            return scores.masked_fill(~inside, 0.0).sum(1) / inside.sum(1)

        return Metric("recall", self.unit, value, everywhere=True)


def hits(logits: Float[Tensor, "r n v"], tokens: Int[Tensor, "r n"]) -> Float[Tensor, "r n"]:
    """1 where the token is the most probable one, else 0.

    Args:
        logits: [r, n, v], each at the position that predicts a token.
        tokens: the tokens to predict, [r, n].

    Returns:
        [r, n].
    """
    return (logits.argmax(-1) == tokens).to(logits)


def losses(logits: Float[Tensor, "r n v"], tokens: Int[Tensor, "r n"]) -> Float[Tensor, "r n"]:
    """Loss of every token: -log p, in nats.

    Args:
        logits: [r, n, v], each at the position that predicts a token.
        tokens: the tokens to predict, [r, n].

    Returns:
        [r, n], in nats.
    """
    return F.cross_entropy(logits.mT, tokens, reduction="none")


def entropies(logits: Float[Tensor, "r n v"], tokens: Int[Tensor, "r n"]) -> Float[Tensor, "r n"]:
    """Entropy of the predicted distribution over the vocabulary at every position, in nats.

    Args:
        logits: [r, n, v].
        tokens: not used; all scores have the same arguments.

    Returns:
        [r, n], in nats.
    """
    return torch.special.entr(logits.softmax(-1)).sum(-1)


MEASURES: Mapping[str, RecallMeasure] = MappingProxyType(
    {
        "exact_match": RecallMeasure("share of prompts", hits, whole=True),
        "token_accuracy": RecallMeasure("share of tokens", hits),
        "loss": RecallMeasure("nats per token", losses),
        "entropy": RecallMeasure("nats per token", entropies),
    }
)
"""The scores of `recall`, by name."""
