"""Faithfulness of a token attribution by erasure: change of the answer when only the top tokens, or all but them, stay.

Comprehensiveness: by how much the answer's probability (or logit) falls when the k % highest tokens are removed (high
is good). Sufficiency: by how much it falls when only they are kept (low is good). Both are AOPC, the mean over k
(DeYoung et al. 2020, "ERASER"; at 1, 5, 10, 20 and 50 % in Ferrando et al. 2022). A removed token has its embedding
replaced; its position stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Literal

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.core.boundary import public
from interp.core.kinds import Count
from interp.core.results import Score, check_finite, check_result, numbers, scored
from interp.core.stats import FEWEST, Moments, Partial, Rows, over, upcast
from interp.core.transfers import check, to_device, to_host
from interp.core.viewer import Brief
from interp.core.wording import nearest
from interp.data.answers import AnswerTokens
from interp.data.batch import Answers, Batch
from interp.data.ids import OneTokenError
from interp.data.text import Text
from interp.model.edits import Edit
from interp.model.tap import Trace
from interp.model.transformer import Transformer
from interp.passes.metrics import Outcome, answer_probability
from interp.passes.needs import Steps, recorded
from interp.passes.observe import Subject
from interp.passes.question import ByRow, Question, ReadingThen
from interp.runs.functions import of_data
from interp.tokens.input_gradients import Baseline, answer_logits, baseline_embedding
from interp.tokens.mixing import check_tokens
from interp.tokens.token_attribution import METHODS, TokenAttribution, TokenMethod, columns

if TYPE_CHECKING:
    import xarray as xr

RANDOM = "random"
"""Name of the attribution that ranks tokens at random, the chance level of the others."""
SCORES = ("comprehensiveness", "sufficiency")
"""The scores of an attribution by erasure, in the order of the last axis of `erased`."""
FEWEST_ERASED = 128
"""Number of prompts below which the mean fall of a probability gets no interval."""
SHARES = (0.01, 0.05, 0.1, 0.2, 0.5)
"""The shares of tokens of Ferrando et al. 2022."""
ErasureMeasure = Literal["probability", "logits"]


@public()
@dataclass(frozen=True)
class Removal:
    """How tokens are removed, and the measure of the answer."""

    shares: tuple[float, ...] = SHARES
    """Shares of a prompt's removable tokens (all but a prepended BOS), rounded up to whole ones."""
    replacement: Baseline = "mean"
    """Embedding that replaces a removed token's."""
    measure: ErasureMeasure = "probability"
    """What is measured: the answer's probability, or its logit (minus the wrong answer's, before a soft cap)."""

    @property
    def fewest(self) -> int:
        """Number of prompts below which a mean gets no interval."""
        return FEWEST_ERASED if self.measure == "probability" else FEWEST

    def __post_init__(self) -> None:
        if not self.shares or not all(0 < share <= 1 for share in self.shares):
            raise ValueError(f"shares in (0, 1] are required, at least one, got {self.shares}")

    def check(self, model: Transformer) -> None:
        """Raises a ValueError for a model without logits, and for a replacement that is not in its vocabulary."""
        check_tokens(model.config)
        if model.unembed is None:
            raise ValueError("erasing tokens requires an unembedding; this model ends in its residual stream")
        baseline_embedding(model, self.replacement)


@dataclass(frozen=True, eq=False, repr=False)
class Erasure(Brief, Question):
    """Comprehensiveness and sufficiency of an attribution: fall of the answer as the tokens it names are erased.

    Args:
        data: the prompts that were attributed: prompts, token ids, a batch, files or a stream.
        attribution: `value` [prompt, pos] of the same prompts, as `token_attribution` returns it; tokens are ranked
            from the highest, earlier ones first among equals.
        answer: continuation that is measured, of one or several tokens, one for all prompts or one for each; None: the
            answers of the data.
        wrong: continuation that the answer is contrasted with, with `measure="logits"`, at the first token in which the
            two differ; None: none, or without `answer` that of the data.
        shares: shares of a prompt's removable tokens that are removed, in (0, 1], rounded up to whole ones: all but a
            BOS that was prepended. Of bare ids every one is; a `Batch` with `bos=True` says that rows begin with BOS.
        replacement: embedding that replaces a removed token's: "mean", the vocabulary's mean embedding, "zero", or
            that of a token id.
        measure: measure of the answer: its "probability", of several tokens the product of theirs, or "logits", its
            logit (minus the wrong answer's).
        pos: token of each prompt at which the answer is predicted, negative from its end; -1 for several tokens.

    Returns:
        Dataset over `score`, in the unit of `measure`. Scores: `comprehensiveness`, the fall without the highest
        tokens, high where they matter; `sufficiency`, the fall with nothing but them, low where they suffice; both
        AOPC, means over `shares`.

        - `value`: mean over prompts, with the ends `low` and `high` of its 95 % interval (NaN for one prompt), and
          `n`.
        - `each` [prompt, score]: every prompt's scores.

    Raises:
        ValueError: values that do not fit the prompts' tokens, shares outside (0, 1], and the logit of an answer of
            several tokens.

    Caveat:
        A prompt with holes is unlike any the model was trained on.

    Source:
        DeYoung et al. 2020, "ERASER"; the shares of Ferrando et al. 2022.

    See Also:
        `compare_methods`: several methods on the same prompts, with random orders. `evidence`: known tokens instead.

    Example:
        >>> result = interp.token_attribution(model, prompt)
        >>> interp.tokens.erasure(model, prompt, result, " Mary").each.dims
        ('prompt', 'score')
    """

    attribution: xr.Dataset
    answer: Answers | None = None
    wrong: Answers | None = None
    _: KW_ONLY
    shares: Sequence[float] = SHARES
    replacement: Baseline = "mean"
    measure: ErasureMeasure = "probability"
    pos: int = -1

    def bind(self, model: Subject) -> ByRow:
        """Passes with the attribution's top tokens removed, and with all others removed, for every batch."""
        how = Removal(tuple(self.shares), self.replacement, self.measure)
        how.check(model.transformer)
        check_result("attribution", self.attribution, ("prompt", "pos", "value"), "token_attribution")
        check_finite(
            "value of attribution", self.attribution["value"], int(self.attribution["value"].count())
        )
        value = numbers("attribution", self.attribution["value"], dict.fromkeys(("prompt", "pos")))
        by_prompt = [row[~row.isnan()] for row in value]
        answers = _watched_answers(self, model.text)
        if answers is not None and answers.prompts not in (None, len(by_prompt)):
            raise ValueError(
                f"answer and wrong are for all {len(by_prompt)} prompts of the attribution, or one for each: "
                f"got {answers.prompts}"
            )
        return ByRow(
            self.name,
            partial(
                _attribution_scores, by_prompt=by_prompt, how=how, pos=self.pos, batch_size=self.rows_together
            ),
            Rows,
            partial(_finish, name=self.name, how=how, contrasted=self.wrong is not None),
            answers,
            prompts=len(by_prompt),
        )


@dataclass(frozen=True, eq=False)
class CompareMethods(Question):
    """Comprehensiveness and sufficiency of several attribution methods, with random orders as the chance level.

    Args:
        data: prompts, token ids, a batch, files or a stream of any size.
        answer: what is attributed and measured, of one or several tokens, one for all prompts or one for each; None:
            the answers of the data.
        wrong: token that the answer is contrasted with, given like `answer`; None: none, or without `answer` that of
            the data.
        methods: names of `METHODS`, or records under names of your own.
        shares: shares of a prompt's removable tokens that are removed, in (0, 1], rounded up to whole ones: all but a
            BOS that was prepended. Of bare ids every one is; a `Batch` with `bos=True` says that rows begin with BOS.
        replacement: embedding that replaces a removed token's: "mean", the vocabulary's mean embedding, "zero", or
            that of a token id.
        measure: measure of the answer: its "probability", or "logits", its logit (minus the wrong answer's).
        pos: token of each prompt at which the answer is predicted, negative from its end.
        draws: number of random orders of each prompt's tokens, the chance level.
        seed: seed of the random orders; a prompt's follow from it and the prompt's number.

    Returns:
        Dataset over `attribution` and `score`, in the unit of `measure`. The last attribution is `random`: the mean
        over `draws` random orders. (A dim called `method` could not be selected from: xarray's `sel` has an option of
        that name.)

        - `value`: mean over prompts, with the ends `low` and `high` of its 95 % interval (NaN for one prompt), and
          `n`. Scores are those of `erasure`: `comprehensiveness` (high is good) and `sufficiency` (low is good).
        - `null`: the value of random orders.
        - `each` [prompt, attribution, score]: every prompt's scores, for paired comparisons.

        Of an answer of several tokens the probability is that of the whole, and a method's values are summed over its
        tokens, each predicted after those before it.

    Raises:
        OneTokenError: answers of several tokens, of which `logits` are asked for.
        ValueError: an unknown method, no draws, shares outside (0, 1], and as in `token_attribution`.
        IndexError: a position that does not exist.
        IncompleteSumError: ALTI-Logit does not sum.

    Caveats:
        A prompt with holes is unlike any the model was trained on, and all methods meet the same holes; a score for
        the state at a position (ALTI) is compared here by its effect on the answer.

    Source:
        DeYoung et al. 2020, "ERASER"; Ferrando et al. 2022.

    See Also:
        `erasure`: one attribution, whatever made it.

    Example:
        >>> result = compare_methods(model, prompt, " Mary", methods=["attention", "alti"])
        >>> list(result.attribution.values)
        ['attention', 'alti', 'random']
    """

    answer: Answers | None = None
    wrong: Answers | None = None
    _: KW_ONLY
    methods: Sequence[str] | Mapping[str, TokenMethod] = tuple(METHODS)
    shares: Sequence[float] = SHARES
    replacement: Baseline = "mean"
    measure: ErasureMeasure = "probability"
    pos: int = -1
    draws: Count = 5
    seed: int = 0

    def bind(self, model: Subject) -> ByRow:
        """Every method's own reads and passes, and passes with tokens removed."""
        if self.draws < 1:
            raise ValueError(f"at least one random order is required, got draws={self.draws}")
        how = Removal(tuple(self.shares), self.replacement, self.measure)
        how.check(model.transformer)
        readings = {
            name: TokenAttribution(method=method, pos=self.pos).reading(model.transformer)[0]
            for name, method in _methods_by_name(self.methods).items()
        }
        reads = dict.fromkeys(read for method in readings.values() for read in method.reads)
        attrs = {**_attrs(how), "draws": self.draws, "seed": self.seed}
        return ByRow(
            self.name,
            ReadingThen(list(reads), partial(_method_scores, readings=readings, how=how, question=self)),
            Rows,
            partial(
                _finish_comparison,
                name=self.name,
                methods=[*readings, RANDOM],
                attrs=attrs,
                fewest=how.fewest,
            ),
            _watched_answers(self, model.text),
        )


def _watched_answers(question: Erasure | CompareMethods, text: Text) -> AnswerTokens | None:
    """The answers whose measure is watched, of several tokens where they are predicted after the whole prompt.

    Raises:
        OneTokenError: answers of several tokens, whose logit is asked for.
        ValueError: as `AnswerTokens.of`.
    """
    several = question.pos == -1
    answers = AnswerTokens.of(text, question.answer, question.wrong, several=several)
    if question.measure == "probability" and answers is not None and answers.forced is not None:
        answers = AnswerTokens.of(text, question.answer, several=several)  # wrong would end it early
    if answers is not None and answers.several and question.measure == "logits":
        raise OneTokenError(
            "a logit is of one token, the answers are of several: measure='probability' is that of the whole"
        )
    return answers


erasure = of_data(Erasure)


compare_methods = of_data(CompareMethods, renamed={"erasure": "shares, replacement and measure"})


NO_SCORE = "a score for every removable token is required, got NaN"


def comprehensiveness(whole: Float[Tensor, "b"], without_top: Float[Tensor, "s b"]) -> Float[Tensor, "b"]:
    """AOPC of removal: the mean over shares of the fall of the answer's measure without the highest tokens.

    Args:
        whole: measure of the whole prompts [b].
        without_top: measure without the highest tokens [s, b], by share.

    Returns:
        [b], in the unit of the measure.
    """
    return (whole - without_top).mean(0)


def sufficiency(whole: Float[Tensor, "b"], only_top: Float[Tensor, "s b"]) -> Float[Tensor, "b"]:
    """AOPC of keeping: the mean over shares of the fall of the answer's measure with only the highest tokens.

    Args:
        whole: measure of the whole prompts [b].
        only_top: measure with nothing but the highest tokens [s, b], by share.

    Returns:
        [b], in the unit of the measure.
    """
    return (whole - only_top).mean(0)


def erased(
    model: Transformer,
    batch: Batch,
    values: Float[Tensor, "k b p"],
    at: Int[Tensor, "b"],
    how: Removal,
    *,
    batch_size: int = 32,
) -> Steps[Float[Tensor, "k b 2"]]:
    """Comprehensiveness and sufficiency for tokens ranked by each of k sets of values.

    All prompts with removed tokens are rows of the same passes; rows that occur more than once are computed once.

    Args:
        batch: prompts with answers.
        values: k values of every token, [k, b, p].
        at: column of each row at which the answer is predicted, [b].
        how: how tokens are removed, and the measure.
        batch_size: the most rows of a pass.

    Returns:
        [k, b, 2], in the order of `SCORES`.

    Raises:
        ValueError: a removable token without a score, or prompts without answers.
    """
    values = to_device(values, batch.tokens.device)
    removable_on_host = _removable_tokens(batch.host())
    removable = to_device(removable_on_host, values.device)
    sets = []
    for value in values:
        top = [top_share(value, removable_on_host, share) for share in how.shares]
        sets.append(torch.stack([*top, *(removable & ~is_top for is_top in top)]))
    # [1 + k * 2 * share, b, p]: nothing removed, then per set of values the top tokens, then all but them
    holes = torch.stack([torch.zeros_like(removable), *torch.cat(sets)])
    answers = yield from _answer_measures(model, batch, holes, at, how, batch_size)
    intact, erased_answers = answers[0], answers[1:].unflatten(0, (len(values), 2, len(how.shares)))
    scores = [
        torch.stack((comprehensiveness(intact, without), sufficiency(intact, only)), -1)
        for without, only in erased_answers
    ]
    return torch.stack(scores)


def top_share(
    score: Float[Tensor, "b p"], removable: Bool[Tensor, "b p"], share: float
) -> Bool[Tensor, "b p"]:
    """Mask of the highest `share` of each row's removable tokens, rounded up; earlier ones first among equals.

    Args:
        score: value of every token, [b, p].
        removable: mask of the tokens that may be removed, [b, p]; on the host, where the tokens are counted.
        share: share of them, in (0, 1].

    Returns:
        [b, p], True at the highest tokens.

    Raises:
        ValueError: a removable token without a score.
    """
    count = to_device([ceil(share * n - 1e-9) for n in removable.sum(1).tolist()], score.device)
    removable = to_device(removable, score.device)
    check(~(score.isnan() & removable).any(), partial(ValueError, NO_SCORE))
    order = score.masked_fill(~removable, -torch.inf).argsort(dim=1, descending=True, stable=True)
    rank = order.argsort(1)
    return (rank < count[:, None]) & removable


def _removable_tokens(batch: Batch) -> Bool[Tensor, "b p"]:
    """Mask of the tokens that may be removed: every token of the prompt but a prepended BOS."""
    real = batch.prompt_tokens
    return real & (real.cumsum(1) > 1) if batch.bos else real


def _attribution_scores(
    model: Transformer,
    batch: Batch,
    by_prompt: Sequence[Float[Tensor, "_"]],
    how: Removal,
    pos: int,
    batch_size: int,
) -> Steps[Mapping[str, Tensor]]:
    """Scores `[b score]` of a given attribution, which has one value per real token of each prompt (`by_prompt`)."""
    at, rows = columns(batch, pos), range(len(batch)) if batch.row is None else batch.row.tolist()
    own_values = [by_prompt[row] for row in rows]
    prompt_tokens = batch.host().prompt_tokens
    for row, values, n in zip(rows, own_values, prompt_tokens.sum(1).tolist(), strict=True):
        if len(values) != n:
            raise ValueError(
                f"one score per token is required, {n} for prompt {row}, got {len(values)} (an attribution of other "
                "prompts?)"
            )
    value = torch.full(batch.tokens.shape, torch.nan, dtype=own_values[0].dtype)
    value[prompt_tokens] = torch.cat(own_values)
    scores = yield from erased(model, batch, value[None], at, how, batch_size=batch_size)
    return {"each": scores[0]}


def _method_scores(
    trace: Trace,
    batch: Batch,
    model: Transformer,
    readings: Mapping[str, ReadingThen],
    how: Removal,
    question: CompareMethods,
) -> Steps[Mapping[str, Tensor]]:
    """Scores `[b attribution score]` of every method, and last the mean over random rankings."""
    at, device = columns(batch, question.pos), batch.tokens.device
    values = []
    for method in readings.values():
        if batch.forced is None:
            value = (yield from method.steps(trace, batch, model))["value"]
        else:
            value = yield from _summed_over_answer(model, batch, method)
        values.append(to_device(value, device))
    chance = random_values(batch, question.draws, question.seed)
    ranked = torch.stack([*(value.double() for value in values), *to_device(chance.double(), device)])
    scores = yield from erased(model, batch, ranked, at, how, batch_size=question.rows_together)
    return {"each": torch.cat((scores[: len(values)], scores[len(values) :].mean(0)[None])).transpose(0, 1)}


def _summed_over_answer(model: Transformer, batch: Batch, method: ReadingThen) -> Steps[Float[Tensor, "b p"]]:
    """The values of each token, summed over the tokens of each row's answer, each predicted after those before it."""
    tokens, present = batch.answer_tokens()
    found = (yield from method(model, batch.by_answer_token()))["value"].unflatten(0, tuple(tokens.shape))
    summed = found.masked_fill(~to_device(present, found.device)[..., None], 0.0).nansum(1)
    return summed.masked_fill(~to_device(batch.prompt_tokens, summed.device), torch.nan)


def random_values(batch: Batch, draws: int, seed: int) -> Float[Tensor, "n b p"]:
    """A random number for every real token, independent of how prompts are batched; NaN at padding.

    Args:
        batch: the prompts; their numbers decide the values.
        draws: number of values for each token.
        seed: seed of the values.

    Returns:
        [draws, b, p], in [0, 1).
    """
    values = torch.full((draws, *batch.tokens.shape), torch.nan)
    rows = range(len(batch)) if batch.row is None else batch.row.tolist()
    for i, (row, real) in enumerate(zip(rows, batch.host().real, strict=True)):
        generator = torch.Generator().manual_seed((seed * 1_000_003 + row) % 2**63)
        values[:, i, real] = torch.rand(draws, int(real.sum()), generator=generator)
    return values


def _answer_measures(
    model: Transformer,
    batch: Batch,
    holes: Bool[Tensor, "n b p"],
    at: Int[Tensor, "b"],
    how: Removal,
    batch_size: int,
) -> Steps[Float[Tensor, "n b"]]:
    """The answer's probability or logit `[n b]` for every prompt with each of n sets of removed tokens, `holes`."""
    if batch.answer is None:
        raise ValueError("erasing tokens requires an answer to watch: name it, or bring it with the data")
    base = baseline_embedding(model, how.replacement)
    prompts = torch.arange(len(batch), device=holes.device).expand(len(holes), -1)
    all_rows = torch.cat(
        (rearrange(prompts, "n b -> (n b) 1"), rearrange(holes, "n b p -> (n b) p").long()), 1
    )
    # the number of distinct rows depends on the data, so they are counted on the host
    rows, place = to_host({"rows": all_rows})["rows"].unique(dim=0, return_inverse=True)
    at, batch = to_device(at, model.device), batch.to(model.device)
    measures = []
    for chunk in rows.split(batch_size):
        prompt, chunk_holes = chunk[:, 0], to_device(chunk[:, 1:].bool(), model.device)
        edit = Edit("hook_embed", partial(_with_replaced_tokens, base=base, holes=chunk_holes))
        own_rows = batch.rows(prompt)
        run = yield from recorded(own_rows, (), final=True, edits=[edit])
        measures.append(
            _answer_measure(model, run.end, own_rows, at[to_device(prompt, at.device)], how.measure)
        )
    return torch.cat(measures)[to_device(place, model.device)].unflatten(0, holes.shape[:2])


def _with_replaced_tokens(
    value: Float[Tensor, "b p d"], base: Float[Tensor, "d"], holes: Bool[Tensor, "b p"]
) -> Float[Tensor, "b p d"]:
    return torch.where(holes[..., None], base.to(value), value)


@torch.no_grad()
def _answer_measure(
    model: Transformer,
    stream: Float[Tensor, "b p d"],
    batch: Batch,
    at: Int[Tensor, "b"],
    measure: ErasureMeasure,
) -> Float[Tensor, "b"]:
    """The answer's logit (difference) or probability, from the final stream at the columns `at`."""
    if measure == "logits":
        return answer_logits(model, stream, batch, at)
    assert batch.answer is not None
    if batch.forced is not None:
        metric = answer_probability()
        return metric.of(Outcome(model, metric.sees(stream, batch), batch, torch.arange(len(batch))))
    place = torch.arange(len(stream), device=stream.device)
    return model.read_out(upcast(stream[place, at])).softmax(-1)[place, batch.answer]


def _methods_by_name(methods: Sequence[str] | Mapping[str, TokenMethod]) -> Mapping[str, TokenMethod]:
    if isinstance(methods, Mapping):
        return methods
    if unknown := [name for name in methods if name not in METHODS]:
        raise ValueError(f"unknown method {unknown[0]!r}; {nearest(unknown[0], METHODS)}")
    return {name: METHODS[name] for name in methods}


def _attrs(how: Removal) -> dict[str, str | float | int]:
    return {
        "unit": how.measure,
        "replacement": str(how.replacement),
        "shares": ", ".join(f"{share:g}" for share in how.shares),
        "removable": "every token but a prepended BOS",
        "interval": over("prompts", how.fewest),
    }


def _finish(merged: Partial, name: str, how: Removal, contrasted: bool) -> xr.Dataset:
    """The result of `erasure`; contrasted: whether a wrong answer is given."""
    assert isinstance(merged, Rows)
    by_prompt = merged.rows["each"]
    scores = {
        score: Score.of(Moments.of(by_prompt[:, i]), how.measure, fewest=how.fewest)
        for i, score in enumerate(SCORES)
    }
    unused = contrasted and how.measure == "probability"
    notes = (
        f"measure={how.measure!r} is of the answer alone: wrong changed nothing; 'logits' contrasts the two",
    )
    others = {"each": (("prompt", "score"), by_prompt)}
    return scored(name, scores, (), attrs=_attrs(how), others=others, notes=notes if unused else ())


def _finish_comparison(
    merged: Partial, name: str, methods: Sequence[str], attrs: Mapping[str, str | float | int], fewest: int
) -> xr.Dataset:
    assert isinstance(merged, Rows)
    by_prompt, unit = merged.rows["each"], str(attrs["unit"])
    moments = [Moments.of(by_prompt[..., i]) for i in range(len(SCORES))]
    scores = {
        score: Score.of(m, unit, m.mean[-1], fewest=fewest) for score, m in zip(SCORES, moments, strict=True)
    }
    return scored(
        name,
        scores,
        ("attribution",),
        coords={"attribution": list(methods)},
        attrs={**attrs, "null": "random orders of the tokens"},
        others={"each": (("prompt", "attribution", "score"), by_prompt)},
    )
