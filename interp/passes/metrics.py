"""Metrics of causal experiments: one number per row, read off the final residual stream of that row.

An answer of several tokens stands in the row but for its last token (teacher forcing, `Batch.forced`), so that all its
tokens are predicted in one pass: log p(answer) is the sum over the columns in which they are.

A metric sees the stream and not the logits, so that it can compute only those it needs: a logit difference at the last
token costs two columns of the unembedding instead of the vocabulary at every position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.core.axes import shape_text
from interp.core.boundary import public
from interp.core.hints import Required
from interp.core.kinds import PositiveCount
from interp.core.stats import FEWEST, FEWEST_LOSSES, FEWEST_PROBABILITIES, upcast
from interp.core.transfers import to_device
from interp.data.answers import AnswerTokens
from interp.data.batch import Answers, Batch, Choices
from interp.data.spellings import spelled
from interp.data.text import Text
from interp.model.attention import picked
from interp.model.layout import PerRow, one_position
from interp.model.transformer import Transformer


@dataclass(frozen=True, eq=False)
class Outcome:
    """The final stream of some rows with their batch: the input of a metric. Differentiable."""

    model: Transformer
    stream: Float[Tensor, "r n d"]
    """The final stream, before the final norm: at the metric's columns (n = 1 for an answer of one token)."""
    batch: Batch
    """The rows themselves, with their answers."""
    example: Int[Tensor, "r"]
    """Row of `reference` that each row belongs to; for data of your own by prompt take `prompt`."""
    reference: Float[Tensor, "b n d"] | None = None
    """The final stream of each example in the reference run, at the same columns."""
    reference_model: Transformer | None = None
    """The model that turns `reference` into logits; None = `model`."""

    @property
    def prompt(self) -> Int[Tensor, "r"]:
        """Number of the prompt that each row is a variant of, counted through all that the experiment was given."""
        return self.example if self.batch.row is None else self.batch.row.to(self.stream.device)

    def logits(self) -> Float[Tensor, "r n v"]:
        """All logits, soft cap included, in float32 at least."""
        return upcast(self.model.read_out(upcast(self.stream)))

    def reference_logits(self) -> Float[Tensor, "b n v"]:
        """All logits of the reference run. ValueError if there is none."""
        if self.reference is None:
            raise ValueError("a metric that compares requires a reference run, got none")
        reader = self.model if self.reference_model is None else self.reference_model
        return upcast(reader.read_out(upcast(self.reference)))

    def logits_of(self, tokens: Int[Tensor, "r *k"], *, capped: bool = True) -> Float[Tensor, "r n *k"]:
        """The logits of one token per row, or of several, in float32 at least; no others are computed.

        Args:
            capped: whether after the soft cap of a model that has one.
        """
        columns = tokens.reshape(len(tokens), 1, -1).expand(-1, self.stream.shape[1], -1)
        if capped:
            logits = upcast(self.model.read_out(upcast(self.stream), columns=columns))
        else:
            self.model.check_read_out()
            logits = upcast(self.model.uncapped(upcast(self.stream), columns=columns))
        return logits.reshape(*logits.shape[:2], *tokens.shape[1:])


MetricValue = Callable[[Outcome], Float[Tensor, "r"]]


@public()
@dataclass(frozen=True)
class Metric:
    """A metric: one number per row, and what is needed to compute it.

    `value` must treat rows apart from each other: rows are packed as memory allows.
    """

    name: str
    unit: str
    value: MetricValue
    answer: Answers | None = None
    """The right next token of each example; None if the metric needs none, or the batch brings its own."""
    wrong: Answers | None = None
    everywhere: bool = False
    """Whether the metric looks at every column instead of one position of each row."""
    compares: bool = False
    """Whether the metric compares with a reference run."""
    of_answer: bool = False
    """Whether it looks at every column in which a token of the answer is predicted, so that answers may be of several
    tokens; otherwise at the last token of the prompt.
    """
    of_choices: bool = False
    """Whether an answer may have several spellings (`interp.data.Spellings`), and wrong answers be of any length."""
    fewest: PositiveCount = FEWEST
    """Rows below which its means get no interval: more for skewed numbers (`docs/intervals.md`)."""

    def answers(self, text: Text) -> AnswerTokens | None:
        """The answers that the metric brings, as tokens; None where the data must.

        Raises:
            ValueError: as `AnswerTokens.of`.
        """
        if self.of_choices:
            return AnswerTokens.of_choices(text, self.answer, self.wrong)
        return AnswerTokens.of(text, self.answer, self.wrong, several=self.of_answer)

    def columns(self, batch: Batch) -> Int[Tensor, "b n"] | None:
        """The columns of each row that the metric looks at; None = all."""
        if self.everywhere:
            return None
        return batch.answer_columns() if self.of_answer else batch.prompt_ends()[:, None]

    def sees(self, stream: Float[Tensor, "r p d"], batch: Batch) -> Float[Tensor, "r n d"]:
        """The final stream at the columns that the metric looks at."""
        columns = self.columns(batch)
        return stream if columns is None else picked(stream, to_device(columns, stream.device))

    def of(self, outcome: Outcome) -> Float[Tensor, "r"]:
        """The value of every row; ValueError if it is not one number per row."""
        values = self.value(outcome)
        rows = len(outcome.stream)
        if not isinstance(values, Tensor) or values.shape != (rows,) or values.is_complex():
            got = shape_text(values.shape) if isinstance(values, Tensor) else type(values).__name__
            got += " of complex numbers" if isinstance(values, Tensor) and values.is_complex() else ""
            raise ValueError(f"the metric {self.name!r} must return one number per row, [{rows}], got {got}")
        return values

    def at(self, pos: int | PerRow) -> Metric:
        """The metric at another token of every prompt than the last.

        For a classifier's first token, or a list's places. Padding does not count.

        Args:
            pos: 0 is the first token, negative from the end; or one position per prompt (`PerRow`).

        Returns:
            The moved metric; its value raises PositionError for a position that a row lacks.

        Raises:
            ValueError: a metric of every column.
        """
        one_position(pos)
        if self.everywhere:
            raise ValueError(f"the metric {self.name!r} looks at every position, not at one")
        moved = partial(_value_at, value=self.value, pos=pos)
        return replace(
            self,
            name=f"{self.name} at {pos}",
            value=moved,
            everywhere=True,
            of_answer=False,
            of_choices=False,
        )

    def negated(self) -> Metric:
        """Minus the metric."""
        return replace(self, name=f"-{self.name}", value=partial(_negated_value, value=self.value))


@public()
def logit_difference(answer: Answers | None = None, wrong: Answers | None = None) -> Metric:
    """logit(answer) - logit(wrong) at the last token, soft cap included; without a wrong answer, logit(answer).

    The metric of most analyses: how much more the model favours the answer than the wrong one.

    Answers of several tokens are compared at the first token in which they differ, after the tokens that they share;
    an answer of several tokens without a wrong one is measured by its log-probability instead
    (`answer_log_probability`), since a logit is of one token.

    Args:
        answer: right continuations as texts or ids, one for all prompts or one for each; None: those that the data
            bring.
        wrong: wrong continuations, given like `answer`; None: those that the data bring, or none.

    Returns:
        `Metric` in logits.

    See Also:
        `answer_log_probability`, `answer_probability`: of one answer. `kl_divergence`: of the whole distribution.

    Example:
        >>> interp.logit_difference(" Mary", " John").unit
        'logits'
    """
    name = "logit" if wrong is None and answer is not None else "logit difference"
    return Metric(name, "logits", _logit_difference, answer, wrong, of_answer=True)


def uncapped_difference(answer: Answers | None = None, wrong: Answers | None = None) -> Metric:
    """`logit_difference` before the soft cap of a model that has one: what direct attribution splits into parts."""
    return replace(logit_difference(answer, wrong), value=partial(_logit_difference, capped=False))


@public()
def answer_probability(answer: Answers | None = None) -> Metric:
    """p(answer) after the prompt; of several tokens the product of their probabilities.

    Each token of an answer is predicted from the prompt and the answer's tokens before it. Of several spellings
    (`interp.data.Spellings`) it is the sum.

    Args:
        answer: right continuations as texts or ids, one for all prompts or one for each; None: those that the data
            bring.

    Returns:
        `Metric` in [0, 1].
    """
    return Metric(
        "probability", "probability", _probability, answer, of_answer=True, of_choices=True,
        fewest=FEWEST_PROBABILITIES,
    )  # fmt: skip


@public()
def answer_log_probability(answer: Answers | None = None, *, per_token: bool = False) -> Metric:
    """log p(answer) after the prompt; of several tokens the sum of their log-probabilities.

    Each token of an answer is predicted from the prompt and the answer's tokens before it. Of several spellings
    (`interp.data.Spellings`) it is the log of the sum of their probabilities.

    Args:
        answer: right continuations as texts or ids, one for all prompts or one for each; None: those that the data
            bring.
        per_token: True: the mean over the answer's tokens, by which answers of other lengths can be compared.

    Returns:
        `Metric` in nats, <= 0.

    Raises:
        ValueError: the mean over tokens of several spellings, which may have other numbers of them.

    See Also:
        `log_prob_difference`: of an answer and a wrong one.

    Example:
        >>> interp.metrics.answer_log_probability(" Mary and John").unit
        'nats'
    """
    return _of_log_probability(
        "log probability", _over_tokens(_log_probability, per_token), answer, per_token
    )


@public()
def answer_loss(answer: Answers | None = None, *, per_token: bool = False) -> Metric:
    """-log p(answer) after the prompt; of several tokens the sum of their losses.

    Each token of an answer is predicted from the prompt and the answer's tokens before it. Of several spellings
    (`interp.data.Spellings`) it is minus the log of the sum of their probabilities.

    Args:
        answer: right continuations as texts or ids, one for all prompts or one for each; None: those that the data
            bring.
        per_token: True: the mean over the answer's tokens, by which answers of other lengths can be compared.

    Returns:
        `Metric` in nats, >= 0.

    Raises:
        ValueError: the mean over tokens of several spellings, which may have other numbers of them.
    """
    return _of_log_probability("loss", _over_tokens(_loss, per_token), answer, per_token)


@public()
def log_prob_difference(
    answer: Answers | None = None, wrong: Answers | None = None, *, per_token: bool = False
) -> Metric:
    """log p(answer) - log p(wrong) after the prompt, each summed over all tokens of the answer.

    How much more probable the model makes the whole answer than the whole wrong one, whatever the lengths of the two:
    each token is predicted from the prompt and the tokens of its own answer before it. Of several spellings
    (`interp.data.Spellings`) each is the log of the sum of their probabilities. In one pass: both continuations follow
    the prompt in one row and see nothing of each other. For answers of one token it is their logit difference.

    Args:
        answer: right continuations as texts or ids, one for all prompts or one for each; None: those that the data
            bring, of one token.
        wrong: wrong continuations, given like `answer`.
        per_token: True: the mean over the tokens of each; a sum favours the answer of fewer tokens.

    Returns:
        `Metric` in nats.

    Raises:
        ValueError: the mean over tokens of several spellings, which may have other numbers of them; an answer without
            a wrong one.

    Source:
        The sum of log-probabilities by which lm-evaluation-harness compares choices (`acc`), here as a difference.

    See Also:
        `logit_difference`: at the first token in which the two differ. `answer_log_probability`: of one answer.

    Example:
        >>> interp.metrics.log_prob_difference(" Mary and John", " John").unit
        'nats'
    """
    if (answer is None) is not (wrong is None):
        raise ValueError(
            "log_prob_difference compares two: an answer and a wrong answer are required, got one"
        )
    value = partial(_log_prob_difference, per_token=per_token)
    return _of_log_probability("log probability difference", value, answer, per_token, wrong)


def _over_tokens(value: MetricValue, per_token: bool) -> MetricValue:
    """The sum over an answer's tokens that `value` is, or their mean."""
    return partial(_mean_over_tokens, value=value) if per_token else value


def _of_log_probability(
    name: str, value: MetricValue, answer: Answers | None, per_token: bool, wrong: Answers | None = None
) -> Metric:
    """The metric of an answer's log-probability or loss, as a sum over its tokens or as their mean."""
    several = [found for given in (answer, wrong) for found in spelled(given) if len(found.texts) > 1]
    if per_token and several:
        raise ValueError(
            f"the mean over tokens (per_token) is of one spelling, got {several[0]}: its spellings may have other "
            "numbers of tokens"
        )
    name, unit = (f"{name} per token", "nats per token") if per_token else (name, "nats")
    return Metric(name, unit, value, answer, wrong, of_answer=True, of_choices=True, fewest=FEWEST_LOSSES)


@public()
def kl_divergence() -> Metric:
    """KL(reference || row) of the next-token distributions at the last token.

    Returns:
        `Metric` in nats, >= 0. The reference is the run that the experiment starts from; every function says which
        one that is.
    """
    return Metric("KL divergence", "nats", _kl, compares=True, fewest=FEWEST_LOSSES)


@public()
def next_token_loss() -> Metric:
    """Mean of -log p(next token) over the real tokens of each row.

    Returns:
        `Metric` in nats, read at every position.
    """
    return Metric("next-token loss", "nats", _next_token_loss, everywhere=True)


@public()
def choice_difference(options: Int[Tensor, "c"], right: Bool[Tensor, "b c"]) -> Metric:
    """Summed p(right options) minus summed p(wrong options) at the last token.

    Args:
        options: [c], the ids of the tokens that count.
        right: [b, c], which of them are right for each prompt.

    Returns:
        `Metric` in [-1, 1].

    Source:
        Hanna et al. 2023, section 2: the probability difference of the greater-than task, where the right options are
        the years above the start.
    """
    return Metric(
        "probability difference",
        "probability",
        partial(_choice_difference, options=options, right=right),
        fewest=FEWEST_PROBABILITIES,
    )


@public()
def of_logits(
    function: Callable[[Float[Tensor, "r n v"]], Float[Tensor, "r"]],
    *,
    name: str = "metric",
    unit: str = "",
    everywhere: bool = False,
) -> Metric:
    """A metric from a function of the logits.

    Args:
        function: takes the logits at the last token [r, 1, v], or with `everywhere` at every position [r, p, v], and
            returns one number per row [r].
        name: the metric's name in results.
        unit: the metric's unit in results.
        everywhere: True: the function takes every position.

    Returns:
        `Metric` in `unit`.
    """
    value = partial(_of_logits, function=function, name=name)
    return Metric(name, unit, value, everywhere=everywhere)


def _no_logit_function(given: object) -> str | None:
    """None for a value that may be a function of the logits; else how to write what was meant."""
    if isinstance(given, type) or not callable(given):
        return ""
    if getattr(given, "__module__", "") == __name__:
        return f": {getattr(given, '__name__', 'it')} makes a metric: call it, {getattr(given, '__name__', '')}(...)"
    return None


LogitFunction = Annotated[
    Callable[[Float[Tensor, "r n v"]], Float[Tensor, "r"]],
    Required("a function of the logits at the last token", _no_logit_function),
]
"""A function of the logits at the last token, `[r, 1, v]`, that returns one number per row."""


def as_metric(given: Metric | LogitFunction | None, text: Text) -> Metric:
    """The metric that an argument `metric` means.

    A metric is itself; a function of the logits at the last token becomes one; None is the logit difference of the
    answers that the data bring. The logit of an answer of several tokens is its log-probability.
    """
    if given is None:
        return logit_difference()
    if not isinstance(given, Metric):
        return of_logits(given, name=getattr(given, "__name__", "metric").strip("<>"))
    if given.value is _logit_difference and given.wrong is None and given.answer is not None:
        several = any(len(tokens) > 1 for tokens in text.continuations(given.answer))
        return answer_log_probability(given.answer) if several else given
    return given


def about(metric: Metric, answer: Answers, wrong: Answers | None) -> Metric:
    """The metric with these answers and wrong ones, if it takes answers of several tokens and those of the data.

    Answers and wrong answers are compared at one token by `logit_difference`, which the data's tell as well.
    """
    difference = isinstance(metric.value, partial) and metric.value.func is _log_prob_difference
    if metric.answer is not None or not metric.of_choices or (difference and wrong is None):
        return metric
    return replace(metric, answer=answer, wrong=wrong if difference else None)


def followed(batch: Batch, metric: Metric | LogitFunction | None, text: Text) -> Batch:
    """Prompts as a metric about answers of several tokens sees them: followed by the first tokens of their answers."""
    answers = as_metric(metric, text).answers(text)
    return batch if answers is None or answers.forced is None else answers.on(batch)


def _value_at(outcome: Outcome, value: MetricValue, pos: int | PerRow) -> Float[Tensor, "r"]:
    """A metric's value on an outcome that has only the column of position `pos` of each row."""
    column = to_device(outcome.batch.tokens_at(pos).columns[:, 0], outcome.stream.device)
    rows = torch.arange(len(column), device=column.device)
    reference = outcome.reference
    if reference is not None:
        of_example = column.new_zeros(len(reference)).scatter(0, outcome.example.to(column.device), column)
        reference = reference[torch.arange(len(reference), device=column.device), of_example][:, None]
    return value(replace(outcome, stream=outcome.stream[rows, column][:, None], reference=reference))


def _answers(outcome: Outcome) -> Int[Tensor, "r"]:
    """The answer of every row, of those of several tokens the last token."""
    if outcome.batch.answer is None:
        raise ValueError(
            "the metric requires an answer for every prompt, got none: metric=interp.logit_difference(answer, wrong), "
            "which is watched where no metric is given, or answers that come with the data"
        )
    return outcome.batch.answer.to(outcome.stream.device)


def _logit_difference(outcome: Outcome, *, capped: bool = True) -> Float[Tensor, "r"]:
    right, wrong = _answers(outcome), outcome.batch.wrong
    if wrong is None:
        if outcome.batch.forced is not None:
            raise ValueError(
                "a logit is of one token, the answers are of several: metric=interp.metrics.answer_log_probability()"
            )
        return outcome.logits_of(right, capped=capped)[:, -1]
    logits = outcome.logits_of(torch.stack((right, wrong.to(right.device)), 1), capped=capped)[:, -1]
    return logits[:, 0] - logits[:, 1]


def _probability(outcome: Outcome) -> Float[Tensor, "r"]:
    return _log_probability(outcome).exp()


def _loss(outcome: Outcome) -> Float[Tensor, "r"]:
    return -_log_probability(outcome)


def _mean_over_tokens(outcome: Outcome, value: MetricValue) -> Float[Tensor, "r"]:
    """A sum over the tokens of each row's answer, divided by their number."""
    summed, forced = value(outcome), outcome.batch.forced
    return summed if forced is None else summed / (1 + forced.to(summed))


def _negated_value(outcome: Outcome, value: MetricValue) -> Float[Tensor, "r"]:
    return -value(outcome)


def _of_logits(
    outcome: Outcome, function: Callable[[Float[Tensor, "r n v"]], Float[Tensor, "r"]], name: str
) -> Float[Tensor, "r"]:
    logits = outcome.logits()
    try:
        return function(logits)
    except Exception as cause:
        raise ValueError(
            f"the metric {name!r} fails on logits of shape {shape_text(logits.shape)}: {cause}"
        ) from cause


def _choice_difference(
    outcome: Outcome, options: Int[Tensor, "c"], right: Bool[Tensor, "b c"]
) -> Float[Tensor, "r"]:
    device = outcome.stream.device
    share = outcome.logits()[:, -1].softmax(-1)[:, options.to(device)]  # [r n v] -> [r v] -> [r c]
    signs = torch.where(right.to(device), 1.0, -1.0)[outcome.prompt]
    return (share * signs.to(share)).sum(1)


def _log_probability(outcome: Outcome) -> Float[Tensor, "r"]:
    answers = _answers(outcome)
    if outcome.batch.choices is not None:
        return _of_either(*_log_probs_of_choices(outcome), wrong=False)
    tokens, present = (x.to(answers.device) for x in outcome.batch.answer_tokens())
    return summed_log_probs(outcome.logits()[:, -tokens.shape[1] :], tokens, present)


def summed_log_probs(
    logits: Float[Tensor, "b k v"], tokens: Int[Tensor, "b k"], present: Bool[Tensor, "b k"]
) -> Float[Tensor, "b"]:
    """log p(answer) of each row, in nats: the sum over its tokens, each predicted after those before it.

    Args:
        logits: where each token is predicted (`Batch.answer_columns`), in float32 at least.
        tokens: the answers, of up to k tokens.
        present: which of them are real (`Batch.answer_tokens` gives both).
    """
    # [b k v] -> [(b k) v] -> one loss per token of an answer, [b k]
    losses = F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none")
    return -(losses.view_as(tokens) * present).sum(1)


def _log_probs_of_choices(
    outcome: Outcome, *, per_token: bool = False
) -> tuple[Float[Tensor, "r a"], Choices]:
    """log p of every continuation of each row, summed over its tokens or their mean, and the continuations."""
    assert outcome.batch.choices is not None
    choices, logits = (
        outcome.batch.choices.each(partial(to_device, device=outcome.stream.device)),
        outcome.logits(),
    )
    present, steps = choices.tokens >= 0, choices.steps.flatten(1)
    # [r n v] -> the column of each token [r (a k) v] is not made: its logit, and the log of the sum of its column
    rows = torch.arange(len(logits), device=logits.device)[:, None]
    of_tokens = logits[rows, steps, choices.tokens.clamp_min(0).flatten(1)] - logits.logsumexp(-1).gather(
        1, steps
    )
    summed = (of_tokens.view_as(choices.tokens) * present).sum(2)
    return summed / present.sum(2).clamp_min(1) if per_token else summed, choices


def _of_either(log_probs: Float[Tensor, "r a"], choices: Choices, *, wrong: bool) -> Float[Tensor, "r"]:
    """log of the summed probabilities of the right continuations, or of the wrong ones."""
    counted = (choices.wrong == wrong) & (choices.tokens[:, :, 0] >= 0)
    return log_probs.masked_fill(~counted, -torch.inf).logsumexp(1)


def _log_prob_difference(outcome: Outcome, per_token: bool) -> Float[Tensor, "r"]:
    _answers(outcome)
    batch = outcome.batch
    if batch.choices is None:
        if batch.wrong is None or batch.forced is not None:
            raise ValueError(
                "a difference of log-probabilities requires an answer and a wrong answer of all their tokens: "
                "metric=interp.metrics.log_prob_difference(answer, wrong)"
            )
        return _logit_difference(outcome)
    found = _log_probs_of_choices(outcome, per_token=per_token)
    return _of_either(*found, wrong=False) - _of_either(*found, wrong=True)


def _kl(outcome: Outcome) -> Float[Tensor, "r"]:
    reference = outcome.reference_logits()[:, -1].log_softmax(-1)[outcome.example]
    log_probs = outcome.logits()[:, -1].log_softmax(-1)
    return F.kl_div(log_probs, reference, reduction="none", log_target=True).sum(-1)


def _next_token_loss(outcome: Outcome) -> Float[Tensor, "r"]:
    outcome.model.config.require_next_token("a next-token loss")
    if outcome.batch.forced is None:  # else these are the answer's, which no loss of the prompt counts
        outcome.batch.require_one_continuation("a next-token loss")
    host_real = outcome.batch.host().prompt_tokens
    if not bool((host_real[:, 1:] & host_real[:, :-1]).any(1).all()):
        raise ValueError("a next-token loss requires prompts of at least two tokens")
    tokens, real, logits = outcome.batch.tokens, outcome.batch.prompt_tokens, outcome.logits()
    counted = (real[:, 1:] & real[:, :-1]).to(logits)
    losses = F.cross_entropy(logits[:, :-1].mT, tokens[:, 1:], reduction="none")
    return (losses * counted).sum(1) / counted.sum(1)
