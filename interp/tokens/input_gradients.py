"""Sensitivity of a logit to token embeddings: gradient x input and integrated gradients.

Both differentiate the answer's logit (minus the wrong answer's, before a soft cap) at one position with respect to the
token embeddings, `hook_embed`; positions keep their own. Steps of a line are rows of a pass. What a backward pass
keeps is bounded, not by the length of a prompt: a pass has as many rows as fit, and one that is too long by itself is
done in runs of blocks (`passes/checkpointed.py`).

On real models the logit is no smooth function of the way along the line. On SmolLM2 most of it changes within
thousandths of the line, where one token's stream becomes a massive activation, and nowhere near the baseline: no
spacing that is fixed beforehand finds that (128 Gauss nodes miss the change by .54 and 1.6 of it on two prompts). The
logit itself is known wherever the gradient is, so the miss of every piece of the line is known exactly: the pieces
that miss most are halved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import fsum, hypot
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from interp.core.boundary import public
from interp.core.kinds import Count
from interp.core.stats import ACCEPTED_MISS, upcast
from interp.core.transfers import to_device
from interp.data.batch import Batch
from interp.model.edits import Edit
from interp.model.sites import final_stream
from interp.model.tap import Read
from interp.model.transformer import Transformer
from interp.model.weights import Weights
from interp.passes.checkpointed import rows_at_once
from interp.passes.metrics import Metric, Outcome
from interp.passes.needs import Recorded, Steps, TowardMetric, recorded
from interp.passes.rules import Rules, as_rules

_EMBEDDED, _SLOPE = Read("hook_embed"), Read("hook_embed", grad=True)
Baseline = Literal["zero", "mean"] | int
"""Embedding of an absent token: the zero embedding, the vocabulary's mean embedding, or that of a token id."""
QuadratureRule = Literal["adaptive", "gauss", "midpoint"]
FIRST = 8
"""Number of equal pieces in which an adaptive line begins, three points each."""
WORST = 4
"""Divisor of the largest miss: pieces that miss at least that much are halved."""
TINY = 1e-300
"""Smallest divisor, for lines along which nothing changes."""


@dataclass(frozen=True)
class GradientTimesInput:
    """Embedding . gradient of the answer's logit: how it changes per relative length of each embedding."""

    rules: Rules = ()
    """Backward rules under which the gradient is taken, or a preset of them; none: the gradient as it is."""

    def __post_init__(self) -> None:
        as_rules(self.rules)


@public()
@dataclass(frozen=True)
class IntegratedGradients:
    """Integrated gradients along the straight line from a baseline (Sundararajan et al. 2017)."""

    steps: Count = 256
    """Most gradients per prompt, under the adaptive rule; a model that is smooth along the line needs 17."""
    baseline: Baseline = "mean"
    """Embedding at which the line begins, at every position; a zero embedding sits where LayerNorm is singular."""
    rule: QuadratureRule = "adaptive"
    """Rule for the points on the line.

    "adaptive": denser where the logit bends, until the error is below .05; or Gauss-Legendre nodes or the midpoints of
    equal parts, which a model has to be smooth for.
    """

    def __post_init__(self) -> None:
        least = 3 if self.rule == "adaptive" else 1
        if self.steps < least or self.rule not in ("adaptive", "gauss", "midpoint"):
            raise ValueError(
                "at least one step of the rule gauss or midpoint, or three of the rule adaptive, are required, got "
                f"{self.steps}, {self.rule!r}"
            )


def nodes(rule: QuadratureRule, steps: int) -> tuple[Float[Tensor, "m"], Float[Tensor, "m"]]:
    """Nodes in (0, 1) of a rule that is fixed beforehand, and their weights, which sum to 1; in float64."""
    if rule == "midpoint":
        weights = torch.full((steps,), 1 / steps, dtype=torch.float64)
        return (torch.arange(steps).double() + 0.5) / steps, weights
    if rule != "gauss":
        raise ValueError(f"the nodes of an {rule} rule depend on the function")
    place, weight = np.polynomial.legendre.leggauss(steps)
    return torch.tensor((place + 1) / 2), torch.tensor(weight / 2)


@dataclass(frozen=True, eq=False)
class Integral:
    """Integrated gradients of some rows, and the error of their sum."""

    score: Float[Tensor, "b p"]
    total: Float[Tensor, "b"]
    """The logit (difference) of the prompt minus that of the baseline."""
    error: Float[Tensor, "b"]
    """Error of the scores' sum, relative to `total`.

    Of an adaptive line the larger of that miss and the root of the summed squares of what its pieces miss, which do
    not cancel there.
    """


def baseline_embedding(model: Transformer, baseline: Baseline) -> Float[Tensor, "d"]:
    """The embedding that stands for an absent token, as `hook_embed` would hold it.

    Raises:
        ValueError: an unknown name, or a token outside the vocabulary.
    """
    table, scale = Weights(model).W_E, model.config.embed_scale
    if baseline == "zero":
        return torch.zeros_like(table[0])
    if baseline == "mean":
        return (upcast(table).mean(0) * scale).to(table.dtype)
    if isinstance(baseline, str) or not 0 <= baseline < len(table):
        raise ValueError(
            f"a baseline requires 'zero', 'mean' or a token in [0, {len(table) - 1}], got {baseline!r}"
        )
    return table[baseline] * scale


def answer_logits(
    model: Transformer, stream: Float[Tensor, "b p d"], batch: Batch, at: Int[Tensor, "b"]
) -> Float[Tensor, "b"]:
    """The answer's logit (minus the wrong answer's) before a soft cap, read off the final stream at these columns."""
    if batch.answer is None or model.unembed is None:
        raise ValueError(
            "gradients of an answer's logit require batches with answers and a model with logits"
        )
    place = torch.arange(len(stream), device=stream.device)
    answers = batch.answer[:, None] if batch.wrong is None else torch.stack((batch.answer, batch.wrong), 1)
    logits = model.uncapped(upcast(stream[place, at]), columns=answers)
    return logits[:, 0] if batch.wrong is None else logits[:, 0] - logits[:, 1]


def gradient_x_input(
    model: Transformer, batch: Batch, at: Int[Tensor, "b"], *, rules: Rules = (), batch_size: int = 32
) -> Steps[dict[str, Tensor]]:
    """Embedding . gradient at every position `[b p]`, as `value`. It sums to nothing in particular.

    Under rules that make the model linear it sums, with `bias` (what biases and other embeddings are due), to `total`,
    the logit (difference) before a soft cap, bias of the unembedding included; `completeness_error` says how nearly.

    Raises:
        ValueError: without answers or logits.

    Caveat:
        Where a norm follows the token embeddings at once (BLOOM) their length changes nothing, so this is 0.
    """
    end = Read(final_stream(model.config), grad=True)
    size, found = rows_at_once(model, batch, batch_size), []
    for some, columns in zip(batch.split(size), at.split(size), strict=True):
        seen = yield from _toward_answers(some, columns.tolist(), (_EMBEDDED, _SLOPE, end), rules=rules)
        value = (upcast(seen.trace[_EMBEDDED]) * upcast(seen.trace[_SLOPE])).sum(-1)
        chunk = {"value": value, **seen.completeness()}
        if "completeness_error" in chunk:
            logit = _logits(seen, columns.tolist())
            chunk |= {"total": logit, "bias": logit - value.sum(1)}
        found.append(chunk)
    return {name: torch.cat([chunk[name] for chunk in found]) for name in found[0]}


def integrated_gradients(
    model: Transformer, batch: Batch, at: Int[Tensor, "b"], how: IntegratedGradients, *, batch_size: int = 32
) -> Steps[Integral]:
    """(embedding - baseline) . mean gradient on the line between them; the scores sum to the logit's change.

    Prompts are done one after the other, so that which points of its line are looked at follows from a prompt alone;
    the points are rows of a pass, `batch_size` at most. Where a router changes its experts the logit jumps, and no
    gradient sees that: the error stays, and says so.

    Raises:
        ValueError: without answers or logits.
    """
    base, width = baseline_embedding(model, how.baseline), batch.tokens.shape[1]
    scores, totals, errors = [], [], []
    bar = tqdm(total=how.steps * len(batch), desc="gradients, at most", delay=10, leave=False)
    for i, column in enumerate(at.tolist()):
        prompt = batch.rows(torch.tensor([i])).trimmed()
        seen = yield from recorded(prompt, [_EMBEDDED])
        change = upcast(seen.trace[_EMBEDDED]) - upcast(base)
        line = _Line(model, prompt, column, base, change, rows_at_once(model, prompt, batch_size), bar.update)
        weights, error = yield from (
            _adapted(line, how.steps) if how.rule == "adaptive" else _fixed(line, how)
        )
        score = line.summed(weights)
        scores.append(F.pad(score, (0, width - len(score))))
        totals.append(line.total)
        errors.append(error)
    bar.close()
    like = scores[0]
    return Integral(torch.stack(scores), like.new_tensor(totals), like.new_tensor(errors))


@dataclass(eq=False)
class _Line:
    """The line from the baseline (0) to a prompt (1), with the logits and gradients at its points."""

    model: Transformer
    prompt: Batch
    at: int
    base: Float[Tensor, "d"]
    change: Float[Tensor, "1 p d"]
    """The prompt's embeddings minus the baseline."""
    rows: int
    """Points of one pass."""
    count: Callable[[int], object]
    """Function that is called with the number of new gradients."""
    products: dict[float, Float[Tensor, "p"]] = field(default_factory=dict)
    """(embedding - baseline) . gradient, by position."""
    slope: dict[float, float] = field(default_factory=dict)
    """Their sum: d logit / d point."""
    logit: dict[float, float] = field(default_factory=dict)

    def look(self, points: Iterable[float]) -> Steps[None]:
        """Differentiate at those of the points that are new."""
        new = sorted(set(points) - self.products.keys())
        for some in (new[i : i + self.rows] for i in range(0, len(new), self.rows)):
            share = to_device(torch.tensor(some, dtype=torch.float64), self.base.device)
            edit = Edit(_EMBEDDED.site, partial(_towards, base=self.base, share=share))
            rows = self.prompt.rows(torch.zeros(len(some), dtype=torch.long))
            columns = [self.at] * len(some)
            seen = yield from _toward_answers(rows, columns, (_SLOPE,), [edit])
            self.count(len(some))
            products = (self.change * upcast(seen.trace[_SLOPE])).sum(-1)
            logits, slopes = _logits(seen, columns).tolist(), products.double().sum(1).tolist()
            for point, product, slope, logit in zip(some, products, slopes, logits, strict=True):
                self.products[point], self.slope[point], self.logit[point] = product, slope, logit

    @property
    def total(self) -> float:
        """The logit's change over the line."""
        return self.logit[1.0] - self.logit[0.0]

    @property
    def scale(self) -> float:
        """Size that a miss is relative to: the logit's change, or what rounding makes of no change at all."""
        rounding = torch.finfo(self.model.dtype).eps ** 0.5
        return max(abs(self.total), rounding * max(abs(self.logit[0.0]), abs(self.logit[1.0])), TINY)

    def missed(self, part: tuple[float, float]) -> float:
        """Miss of Simpson's rule between two points against the logit's change."""
        start, end = part
        sum_ = sum(weight * self.slope[point] for point, weight in _simpson(part).items())
        return sum_ - (self.logit[end] - self.logit[start])

    def summed(self, weights: Mapping[float, float]) -> Float[Tensor, "p"]:
        """The weighted sum of the products."""
        products = torch.stack([self.products[point] for point in weights])
        return torch.einsum("mp, m -> p", products, products.new_tensor(list(weights.values())))


def _adapted(line: _Line, steps: int) -> Steps[tuple[dict[float, float], float]]:
    """Weights of points that lie denser where the logit bends, and the error; no more points than steps."""
    first = max(1, min(FIRST, (steps - 1) // 2))
    parts = [(i / first, (i + 1) / first) for i in range(first)]
    while True:
        yield from line.look(point for part in parts for point in _simpson(part))
        missed = {part: line.missed(part) for part in parts}
        error = max(abs(fsum(missed.values())), hypot(*missed.values())) / line.scale
        room = (steps - len(line.products)) // 2
        if error <= ACCEPTED_MISS or not room:
            break
        bound = max(map(abs, missed.values())) / WORST
        worst = sorted((part for part in parts if abs(missed[part]) >= bound), key=lambda p: -abs(missed[p]))[
            :room
        ]
        halves = [half for a, b in worst for half in ((a, (a + b) / 2), ((a + b) / 2, b))]
        parts = [part for part in parts if part not in set(worst)] + halves
    weights = dict.fromkeys(sorted(line.products), 0.0)
    for part in parts:
        for point, weight in _simpson(part).items():
            weights[point] += weight
    return weights, error


def _simpson(part: tuple[float, float]) -> dict[float, float]:
    """The points of Simpson's rule on a piece of the line, and their weights."""
    start, end = part
    sixth = (end - start) / 6
    return {start: sixth, (start + end) / 2: 4 * sixth, end: sixth}


def _fixed(line: _Line, how: IntegratedGradients) -> Steps[tuple[dict[float, float], float]]:
    """The weights of the nodes of a rule, and the error."""
    points, weights = (each.tolist() for each in nodes(how.rule, how.steps))
    yield from line.look([0.0, *points, 1.0])
    sum_ = fsum(weight * line.slope[point] for point, weight in zip(points, weights, strict=True))
    return dict(zip(points, weights, strict=True)), abs(sum_ - line.total) / line.scale


@dataclass(frozen=True)
class _AnswerLogit:
    """The answers' logits at one column of each example, as the value of a metric; equal for the same columns."""

    at: tuple[int, ...]

    def __call__(self, outcome: Outcome) -> Float[Tensor, "r"]:
        at = to_device(torch.tensor(self.at), outcome.stream.device)
        return answer_logits(outcome.model, outcome.stream, outcome.batch, at[outcome.example])


def _toward_answers(
    batch: Batch, at: Sequence[int], reads: Sequence[Read], edits: Sequence[Edit] = (), rules: Rules = ()
) -> Steps[Recorded]:
    """A pass that is differentiated towards the answers' logits; rows do not meet, so that their sum will do."""
    metric = Metric("logit", "logits before the soft cap", _AnswerLogit(tuple(at)), everywhere=True)
    toward = TowardMetric(metric, in_runs=True)
    return (yield from recorded(batch, reads, edits=edits, toward=toward, rules=rules))


@torch.no_grad()
def _logits(seen: Recorded, at: Sequence[int]) -> Float[Tensor, "b"]:
    """The answers' logits in a pass."""
    device = seen.end.device
    return answer_logits(seen.model, seen.end, seen.batch.to(device), to_device(torch.tensor(at), device))


def _towards(
    value: Float[Tensor, "b p d"], base: Float[Tensor, "d"], share: Float[Tensor, "b"]
) -> Float[Tensor, "b p d"]:
    start = upcast(base)
    return (start + (upcast(value) - start) * share[:, None, None].to(start)).to(value.dtype)
