"""Sensitivity of a logit to token embeddings: gradient x input and integrated gradients.

Both differentiate the answer's logit (minus the wrong answer's, before a soft cap) at one position with respect to the
token embeddings, `hook_embed`; position embeddings do not change. The points of an integration line are rows of a pass.
Memory of the backward pass is bounded: a pass has as many rows as fit, and if one row is too long, its blocks are run
in groups (`passes/checkpointed.py`).

On real models the logit is not smooth along the line. On SmolLM2 most of its change happens within thousandths of the
line, where one token's stream becomes a massive activation, and not near the baseline. No fixed spacing finds that
point (with 128 Gauss nodes the error is .54 and 1.6 of the logit's change on two prompts). The logit itself is computed
at every point, so the integration error of every piece of the line is known exactly, and the pieces with the largest
errors are halved.
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
from interp.model.attention import picked
from interp.model.edits import Edit
from interp.model.sites import final_stream
from interp.model.tap import Read
from interp.model.transformer import Transformer
from interp.model.weights import Weights
from interp.passes.checkpointed import differentiated_each, rows_at_once
from interp.passes.metrics import Metric, Outcome
from interp.passes.needs import Recorded, Steps, TowardMetric, recorded
from interp.passes.question import Values
from interp.passes.rules import Rules, as_rules

_EMBEDDED, _SLOPE = Read("hook_embed"), Read("hook_embed", grad=True)
Baseline = Literal["zero", "mean"] | int
"""Embedding in place of an absent token's: zeros, the mean embedding of the vocabulary, or that of a token id."""
QuadratureRule = Literal["adaptive", "gauss", "midpoint"]
FIRST = 8
"""Number of equal pieces, of three points each, that the adaptive rule starts with."""
WORST = 4
"""Pieces whose error is at least the largest error divided by this are halved."""
TINY = 1e-300
"""Smallest divisor, for lines along which nothing changes."""


@public()
@dataclass(frozen=True)
class GradientTimesInput:
    """Embedding . gradient of the answer's logit: its derivative by the relative length of each embedding."""

    rules: Rules = ()
    """Backward rules under which the gradient is taken, or a preset of them; none: the gradient as it is."""

    def __post_init__(self) -> None:
        as_rules(self.rules)


@public()
@dataclass(frozen=True)
class IntegratedGradients:
    """Integrated gradients along the straight line from a baseline (Sundararajan et al. 2017)."""

    steps: Count = 256
    """Number of gradients per prompt (adaptive: at most); a logit that is smooth along the line needs 17."""
    baseline: Baseline = "mean"
    """Embedding of every token at the start of the line; at "zero" LayerNorm is singular."""
    rule: QuadratureRule = "adaptive"
    """Rule for the points on the line.

    "adaptive": denser where the logit is less smooth, until the error is below .05. "gauss" (Gauss-Legendre nodes) and
    "midpoint" (midpoints of equal parts) require a logit that is smooth along the line.
    """

    def __post_init__(self) -> None:
        least = 3 if self.rule == "adaptive" else 1
        if self.steps < least or self.rule not in ("adaptive", "gauss", "midpoint"):
            raise ValueError(
                "at least one step of the rule gauss or midpoint, or three of the rule adaptive, are required, got "
                f"{self.steps}, {self.rule!r}"
            )


def nodes(rule: QuadratureRule, steps: int) -> tuple[Float[Tensor, "m"], Float[Tensor, "m"]]:
    """Nodes in (0, 1) of the rule "gauss" or "midpoint", and their weights, which sum to 1; in float64."""
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

    With the adaptive rule, the larger of that error and the root of the summed squares of the pieces' errors, which
    cannot cancel.
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
    """The answer's logit (minus the wrong answer's) before a soft cap, from the final stream at the columns `at`."""
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
    """Embedding . gradient at every position `[b p]`, as `value`. Its sum has no meaning of its own.

    Under rules that make the model linear, `value` and `bias` (contributions of biases and other embeddings) sum to
    `total`, the logit (difference) before a soft cap, b_U included, up to `completeness_error`.

    Raises:
        ValueError: without answers or logits.

    Caveat:
        Where a norm follows the token embeddings at once (BLOOM) their length changes nothing, so this is 0.
    """
    end = Read(final_stream(model.config), grad=True)
    size, chunks = rows_at_once(model, batch, batch_size), []
    for rows, columns in zip(batch.split(size), at.split(size), strict=True):
        seen = yield from _differentiated_pass(rows, columns.tolist(), (_EMBEDDED, _SLOPE, end), rules=rules)
        value = (upcast(seen.trace[_EMBEDDED]) * upcast(seen.trace[_SLOPE])).sum(-1)
        chunk = {"value": value, **seen.completeness()}
        if "completeness_error" in chunk:
            logit = _logits_of_pass(seen, columns.tolist())
            chunk |= {"total": logit, "bias": logit - value.sum(1)}
        chunks.append(chunk)
    return {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}


def gradients_of_answers(model: Transformer, batch: Batch, *, batch_size: int = 32) -> Values:
    """Embedding . gradient of the logit of each token of each row's answer, as `value` `[b k p]`.

    One forward pass over the prompt and its whole answer, and a backward pass for each token: what follows a token does
    not change its logit. Positions from each token on, and padding, hold NaN, and -1 among the ids `token`.

    Args:
        batch: prompts followed by their answers (`Batch.forced`).
        batch_size: the most rows of a pass.
    """
    size = rows_at_once(model, batch, batch_size)
    parts = [_answer_products(model, rows.to(model.device)) for rows in batch.split(size)]
    width = max(part.shape[1] for part in parts)
    value = torch.cat([F.pad(part, (0, 0, 0, width - part.shape[1])) for part in parts])
    before = torch.arange(width, device=value.device)[None, :, None]
    ends = to_device(batch.lengths - (0 if batch.forced is None else batch.forced), value.device)[
        :, None, None
    ]
    seen = to_device(batch.real, value.device)[:, None] & (
        to_device(batch.places, value.device)[:, None] < ends + before
    )
    ids = to_device(batch.tokens, value.device)[:, None].expand_as(seen)
    return {"value": value.masked_fill(~seen, torch.nan), "token": ids.masked_fill(~seen, -1)}


def _answer_products(model: Transformer, rows: Batch) -> Float[Tensor, "b k p"]:
    """Embedding . gradient for the rows of one pass."""
    columns, (tokens, present) = rows.answer_columns(), rows.answer_tokens()

    def logits(stream: Float[Tensor, "b p d"]) -> Float[Tensor, "k"]:
        states = picked(stream, columns)
        own = model.uncapped(upcast(states), columns=tokens[..., None])[..., 0]
        return (own * present).sum(0)  # rows are independent of each other

    trace = differentiated_each(model, rows, [_EMBEDDED, _SLOPE], logits)
    return (upcast(trace[_EMBEDDED]) * upcast(trace[_SLOPE])).sum(-1).transpose(0, 1)


def integrated_gradients(
    model: Transformer, batch: Batch, at: Int[Tensor, "b"], how: IntegratedGradients, *, batch_size: int = 32
) -> Steps[Integral]:
    """(embedding - baseline) . mean gradient on the line between them; the scores sum to the logit's change.

    Prompts are run one after the other, so that the points of a prompt's line depend on that prompt only; up to
    `batch_size` points are rows of one pass. Where a mixture of experts changes its experts the logit jumps, which no
    gradient shows: there the error stays large.

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
            _adaptive_weights(line, how.steps) if how.rule == "adaptive" else _fixed_weights(line, how)
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
    """The line from the baseline embeddings (0) to a prompt's (1), with the logits and gradients at its points."""

    model: Transformer
    prompt: Batch
    at: int
    base: Float[Tensor, "d"]
    change: Float[Tensor, "1 p d"]
    """The prompt's embeddings minus the baseline."""
    rows: int
    """Number of points in one pass."""
    count: Callable[[int], object]
    """Function that is called with the number of new gradients."""
    products: dict[float, Float[Tensor, "p"]] = field(default_factory=dict)
    """By point on the line, (embedding - baseline) . gradient at every position."""
    slope: dict[float, float] = field(default_factory=dict)
    """By point on the line, the sum of `products`: the derivative of the logit along the line."""
    logit: dict[float, float] = field(default_factory=dict)

    def look(self, points: Iterable[float]) -> Steps[None]:
        """Computes logit and gradient at those of the points where they are not known yet."""
        new = sorted(set(points) - self.products.keys())
        for chunk in (new[i : i + self.rows] for i in range(0, len(new), self.rows)):
            share = to_device(torch.tensor(chunk, dtype=torch.float64), self.base.device)
            edit = Edit(_EMBEDDED.site, partial(_interpolated_embeddings, base=self.base, share=share))
            rows = self.prompt.rows(torch.zeros(len(chunk), dtype=torch.long))
            columns = [self.at] * len(chunk)
            seen = yield from _differentiated_pass(rows, columns, (_SLOPE,), [edit])
            self.count(len(chunk))
            products = (self.change * upcast(seen.trace[_SLOPE])).sum(-1)
            logits, slopes = _logits_of_pass(seen, columns).tolist(), products.double().sum(1).tolist()
            for point, product, slope, logit in zip(chunk, products, slopes, logits, strict=True):
                self.products[point], self.slope[point], self.logit[point] = product, slope, logit

    @property
    def total(self) -> float:
        """The logit's change over the line."""
        return self.logit[1.0] - self.logit[0.0]

    @property
    def scale(self) -> float:
        """Size that errors are relative to: the logit's change, but at least the rounding of the two logits."""
        rounding = torch.finfo(self.model.dtype).eps ** 0.5
        return max(abs(self.total), rounding * max(abs(self.logit[0.0]), abs(self.logit[1.0])), TINY)

    def missed(self, piece: tuple[float, float]) -> float:
        """Error of Simpson's rule on a piece of the line: its integral of the slope minus the logit's change."""
        start, end = piece
        sum_ = sum(weight * self.slope[point] for point, weight in _simpson_weights(piece).items())
        return sum_ - (self.logit[end] - self.logit[start])

    def summed(self, weights: Mapping[float, float]) -> Float[Tensor, "p"]:
        """Integrated gradients of every position: the sum of `products` over points, times their weights."""
        products = torch.stack([self.products[point] for point in weights])
        return torch.einsum("mp, m -> p", products, products.new_tensor(list(weights.values())))


def _adaptive_weights(line: _Line, steps: int) -> Steps[tuple[dict[float, float], float]]:
    """Weights of at most `steps` points, denser where the logit is less smooth, and the relative error."""
    first = max(1, min(FIRST, (steps - 1) // 2))
    pieces = [(i / first, (i + 1) / first) for i in range(first)]
    while True:
        yield from line.look(point for piece in pieces for point in _simpson_weights(piece))
        missed = {piece: line.missed(piece) for piece in pieces}
        error = max(abs(fsum(missed.values())), hypot(*missed.values())) / line.scale
        room = (steps - len(line.products)) // 2
        if error <= ACCEPTED_MISS or not room:
            break
        bound = max(map(abs, missed.values())) / WORST
        worst = sorted(
            (piece for piece in pieces if abs(missed[piece]) >= bound), key=lambda p: -abs(missed[p])
        )[:room]
        halves = [half for a, b in worst for half in ((a, (a + b) / 2), ((a + b) / 2, b))]
        pieces = [piece for piece in pieces if piece not in set(worst)] + halves
    weights = dict.fromkeys(sorted(line.products), 0.0)
    for piece in pieces:
        for point, weight in _simpson_weights(piece).items():
            weights[point] += weight
    return weights, error


def _simpson_weights(piece: tuple[float, float]) -> dict[float, float]:
    """Weights of the three points of Simpson's rule on a piece (start, end) of the line."""
    start, end = piece
    sixth = (end - start) / 6
    return {start: sixth, (start + end) / 2: 4 * sixth, end: sixth}


def _fixed_weights(line: _Line, how: IntegratedGradients) -> Steps[tuple[dict[float, float], float]]:
    """Weights of the nodes of the rule "gauss" or "midpoint", and the relative error."""
    points, weights = (tensor.tolist() for tensor in nodes(how.rule, how.steps))
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


def _differentiated_pass(
    batch: Batch, at: Sequence[int], reads: Sequence[Read], edits: Sequence[Edit] = (), rules: Rules = ()
) -> Steps[Recorded]:
    """A pass with gradients of the answers' logits; rows are independent, so the sum over rows is differentiated."""
    metric = Metric("logit", "logits before the soft cap", _AnswerLogit(tuple(at)), everywhere=True)
    toward = TowardMetric(metric, in_runs=True)
    return (yield from recorded(batch, reads, edits=edits, toward=toward, rules=rules))


@torch.no_grad()
def _logits_of_pass(seen: Recorded, at: Sequence[int]) -> Float[Tensor, "b"]:
    """The answers' logits of a recorded pass, at the columns `at`."""
    device = seen.end.device
    return answer_logits(seen.model, seen.end, seen.batch.to(device), to_device(torch.tensor(at), device))


def _interpolated_embeddings(
    value: Float[Tensor, "b p d"], base: Float[Tensor, "d"], share: Float[Tensor, "b"]
) -> Float[Tensor, "b p d"]:
    start = upcast(base)
    return (start + (upcast(value) - start) * share[:, None, None].to(start)).to(value.dtype)
