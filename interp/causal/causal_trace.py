"""Causal tracing: indirect effects of restoring single states in a run whose subject is corrupted by noise.

Meng et al. 2022, "Locating and Editing Factual Associations in GPT" (arXiv:2202.05262), section 2. Clean run ->
corrupted run (noise on the subject's token embeddings) -> corrupted run with clean values put back at one token: a
block's output, or a window of MLP or attention outputs. The corrupted run is the base run of a `Sweep`.

Unlike the released code of the paper (ROME): its arrays named `scores` (and `differences`) hold the *restored*
probability, subtract its `low_score` for the indirect effect. It takes sigma from the subjects tokenised alone, gives
all prompts the same draws, and its averages over roles weigh tokens instead of prompts, count a subject of one token
as first and last, and one token after it as first after and last.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.causal.effects import SIGN, cells_along, check_first_column, moments_of
from interp.causal.spans import ROLES, SpanPlace, roles, spans, within
from interp.core.boundary import public
from interp.core.kinds import Count
from interp.core.memory import check_memory
from interp.core.results import labelled
from interp.core.stats import MaskedMeans, MaskedMoments, Partial, Rows, over, upcast
from interp.core.transfers import to_device, to_host
from interp.data.answers import AnswerTokens
from interp.data.batch import Answers, Batch
from interp.data.sources import Data
from interp.data.stream import DataSource
from interp.data.text import Text
from interp.model.attention import picked
from interp.model.config import ModelConfig
from interp.model.edits import Edit, Set
from interp.model.parts import Part
from interp.model.sites import find
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer
from interp.passes.metrics import LogitFunction, Metric, answer_probability, as_metric
from interp.passes.needs import Recorded, Steps, recorded, swept
from interp.passes.observe import Model, Subject, text_of
from interp.passes.question import Ask, ByRow, NotFiniteError, Question, Reading, Staged, Values
from interp.passes.sweep import Swept
from interp.passes.variants import Variant
from interp.runs.functions import of_data
from interp.runs.run import answered

if TYPE_CHECKING:
    import xarray as xr

TracedKind = Literal["state", "mlp", "attn"]
"""Restored outputs: those of a block, of its MLP (its MLPs), or of its attention (as added to the stream)."""
Severed = Literal["mlp", "attn"]
CELLS, TOKENS = ("layer", "role"), ("prompt", "layer", "pos")
ESTIMATE = ("value", "low", "high")
"""Coordinates of a number and the ends of its interval."""


@dataclass(frozen=True, eq=False)
class CausalTrace(Question):
    """Indirect effect of restoring one clean state in a run with a noised subject (causal tracing), by layer, role.

    Corrupted run: token embeddings of all subject tokens + noise * sigma * N(0, 1). Restored run: the same noise, and
    clean values at one token: where that brings the answer back, that state carries the fact. Total effect =
    metric(clean) - metric(corrupted); indirect effect = metric(restored) - metric(corrupted), the mean over the noise
    samples of a prompt, then over prompts.

    Args:
        data: prompts, token ids, a batch, files or a stream of any size, or facts of a file.
        subject: the words to corrupt: a word that the prompt holds once, `Mention(word, index)`, or a range of tokens
            (BOS counts); one for all prompts, or one for each. A token that holds any part of the word belongs to it.
            None: those of the facts that are the data (`interp.tasks.read_facts`).
        answer: answer of each prompt, of one or several tokens; None: that of the metric or of the data. Facts whose
            answer is not what the model says greedily are dropped; `attrs["dropped"]` counts them, and `prompt` numbers
            those that are left.
        kind: what is restored at one token: "state" the output of layer l, "mlp" or "attn" the outputs, as added to
            the stream, of a window of layers max(0, l - w/2) .. min(L, l + w/2) - 1.
        window: number w of MLPs or attentions restored at once; None: a fifth of the layers, at least one.
        noise: standard deviation of the noise, in units of `sigma`.
        samples: draws of the noise per prompt. Memory grows with them.
        seed: seed of the draws.
        sigma: standard deviation over all entries of the subjects' embeddings; None: taken from the data, which are
            then gone through twice.
        severed: "mlp" or "attn" keeps the later MLPs (attention) that are not restored at their corrupted outputs at
            that token; the part of the effect that is lost then went through them. None: nothing is kept.
        metric: a `Metric`, or a function of the logits [b, v] at the last token; None is the probability of the
            answer. A metric that compares, such as the KL divergence, compares with the clean run.
        each: False keeps no values of single prompts, which data of any size requires.

    Returns:
        Dataset over `layer` and `role`, in the metric's unit. Roles are `interp.causal.ROLES`; tokens of one role are
        averaged inside a prompt. The coordinate `part` names what was restored.

        - `value`: indirect effect, mean over prompts, with the ends `low` and `high` of its 95 % interval and `n`, the
          prompts that have the role.
        - `spread`: pooled standard deviation over noise samples.
        - `changed`: whether restoring changed anything that reaches the metric (False: the effect is 0 by
          construction).
        - `each`, `each_spread`, `each_changed` [prompt, layer, pos]: the same per prompt and token, NaN at padding.
        - `total` [estimate]: the total effect, its `low` and `high`.
        - `clean`, `corrupt` [prompt]: metric of the two runs, with `each`.
        - `subject` [prompt, pos]: which tokens are corrupted, with `each`.

    Raises:
        ValueError: a subject that is not found or ambiguous, prompts without answers, and data in which the model
            knows no fact.
        KeyError: a kind of part that the model has not.

    Caveats:
        Noise is unlike anything the model has seen. The files of ROME, the paper's code, hold restored values as
        `scores`: subtract its `low_score` for the indirect effect.

    Source:
        Meng et al. 2022, "Locating and Editing Factual Associations in GPT" (arXiv:2202.05262), section 2.

    See Also:
        `patch`: values of another prompt instead of noise. `subject_spread`: the default `sigma`.

    Example:
        >>> best = int(model.transformer(model.to_tokens(prompt))[0, -1].argmax())
        >>> causal_trace(model, prompt, "Mary", best, samples=2).value.dims
        ('layer', 'role')
    """

    rows_together: ClassVar[int] = 8

    subject: SpanPlace | Sequence[SpanPlace] | None = None
    answer: Answers | None = None
    _: KW_ONLY
    kind: TracedKind = "state"
    window: int | None = None
    noise: float = 3.0
    samples: Count = 10
    seed: int = 0
    sigma: float | None = None
    severed: Severed | None = None
    metric: Metric | LogitFunction | None = None
    each: bool = True

    def bind(self, model: Subject) -> ByRow | Staged:
        """The clean, the corrupted and all restored runs, batch by batch; before them sigma, unless it is given."""
        config, text, subject = model.transformer.config, model.text, self.subject
        if subject is None:
            raise ValueError(
                "causal tracing requires the subject of every prompt, such as 'France', or facts that name theirs "
                "(interp.tasks.read_facts), got None"
            )
        if not config.unembed:
            raise ValueError(
                "causal tracing requires a model with an unembedding, to tell which facts it knows"
            )
        if (
            (self.window is not None and self.window < 1)
            or self.samples < 1
            or not 0 < self.noise < float("inf")
        ):
            raise ValueError(
                f"a window and samples of at least 1 and finite noise above 0 are required, got window={self.window}, "
                f"samples={self.samples}, noise={self.noise}"
            )
        for layer in range(config.n_layers):
            for name in (*self.restored(layer, config), *self.frozen(layer, config)):
                find(name, config)
        if self.sigma is not None and not 0 < self.sigma < float("inf"):
            raise ValueError(
                "sigma, the standard deviation of the subjects' embeddings, must be above 0, or None for that of the "
                f"data; got {self.sigma}"
            )
        metric = answer_probability() if self.metric is None else as_metric(self.metric, model.text)
        answers = _answers(text, self.answer, metric)
        per_prompt = None if isinstance(subject, SpanPlace) else len(subject)
        counts = {n for n in (per_prompt, None if answers is None else answers.prompts) if n is not None}
        if len(counts) > 1:
            raise ValueError(
                f"subjects and answers of the same prompts are required, got {sorted(counts)} of them"
            )
        bound = partial(
            self._analysis, model=model, metric=metric, answers=answers, prompts=next(iter(counts), None)
        )
        if self.sigma is not None:
            return bound(self.sigma)
        spread = _spread_question(text, subject)
        return Staged.after(
            self.name, Ask(spread), lambda merged: bound(float(spread.result(merged).value)), again="sigma"
        )

    def _analysis(
        self,
        sigma: float,
        model: Subject,
        metric: Metric,
        answers: AnswerTokens | None,
        prompts: int | None,
    ) -> ByRow:
        """The analysis with all runs, given sigma, the standard deviation of the subjects' embeddings."""
        question, text = replace(self, sigma=sigma), model.text
        return ByRow(
            self.name,
            partial(_compute, question=question, text=text, metric=metric),
            Rows if self.each else MaskedMeans,
            partial(_finish, question=question, config=model.transformer.config, text=text, metric=metric),
            answers=answers,
            prompts=prompts,
        )

    def layers(self, layer: int, n_layers: int) -> range:
        """The layers restored together: max(0, l - w/2) .. min(L, l + w/2) - 1, the larger half below for even w."""
        if self.kind == "state":
            return range(layer, layer + 1)
        window = usual_window(n_layers) if self.window is None else self.window
        half = window // 2
        return range(max(0, layer - half), min(n_layers, layer + window - half))

    def restored(self, layer: int, config: ModelConfig) -> list[str]:
        """The sites put back to their clean values in the cell of this layer."""
        post = "hook_normalized_resid_post" if config.norms_sum else "hook_resid_post"
        names = [post] if self.kind == "state" else _output_names(config, self.kind)
        return [f"blocks.{i}.{name}" for i in self.layers(layer, config.n_layers) for name in names]

    def frozen(self, layer: int, config: ModelConfig) -> list[str]:
        """The sites (of `severed`) kept at corrupted values: from the first restored layer on, but those restored."""
        if self.severed is None:
            return []
        first = self.layers(layer, config.n_layers).start
        sites = _output_names(config, self.severed)
        names = [f"blocks.{i}.{name}" for i in range(first, config.n_layers) for name in sites]
        return [name for name in names if name not in self.restored(layer, config)]

    def cells(
        self, config: ModelConfig, clean: Mapping[str, Tensor], corrupt: Mapping[str, Tensor], batch: Batch
    ) -> list[Variant]:
        """One variant per layer and token, tokens fastest, with values from both runs."""
        put_corrupt = {name: Set(value) for name, value in corrupt.items()}
        put_clean = {name: Set(value) for name, value in clean.items()}
        return [
            Variant(
                [Edit(name, put_corrupt[name], {"pos": column}) for name in self.frozen(layer, config)]
                + [Edit(name, put_clean[name], {"pos": column}) for name in self.restored(layer, config)]
            )
            for layer in range(config.n_layers)
            for column in cells_along("pos", batch, batch.tokens.shape[1])
        ]


causal_trace = of_data(CausalTrace)


@public()
def subject_spread(
    model: Model,
    data: DataSource | Data,
    subject: SpanPlace | Sequence[SpanPlace],
) -> float:
    """Standard deviation over all entries of the subjects' token embeddings: the sigma of `causal_trace`.

    Args:
        data: prompts, token ids, a batch, files or a stream of any size.
        subject: the words: one that the prompt holds once, `Mention(word, index)`, or a range of tokens (BOS counts);
            one for all prompts, or one for each.

    Returns:
        The standard deviation, in the units of the embeddings.

    Raises:
        ValueError: a subject that is not found or ambiguous.

    Example:
        >>> subject_spread(model, prompt, "Mary") > 0
        True
    """
    spread = _spread_question(text_of(model), subject)
    result = answered(spread, model, data)
    return float(result.value)


def _spread_question(text: Text, subject: SpanPlace | Sequence[SpanPlace]) -> ByRow:
    """Question about the standard deviation over all entries of the subjects' embeddings."""
    rows = Reading([Read("hook_embed")], partial(_embedding_moments, text=text, subject=subject))
    per_prompt = None if isinstance(subject, SpanPlace) else len(subject)
    return ByRow("subject_spread", rows, Rows, _deviation, prompts=per_prompt)


def _embedding_moments(
    trace: Trace, batch: Batch, model: Transformer, text: Text, subject: SpanPlace | Sequence[SpanPlace]
) -> Mapping[str, Tensor]:
    """Number, mean and summed squared deviations of the entries of each subject's embeddings."""
    value = trace[Read("hook_embed")].double()
    where = (
        within(batch, spans(text, batch, _subjects_of(subject, batch)))
        .to(value.device)[..., None]
        .expand(value.shape)
    )
    count = where.sum((1, 2))
    mean = (value * where).sum((1, 2)) / count
    if not bool((mean.isfinite() | (count == 0)).all()):
        raise NotFiniteError("the subjects' embeddings of some prompt are NaN or infinite")
    spread = ((value - mean[:, None, None]).square() * where).sum((1, 2))
    return {"count": count.double(), "mean": mean, "spread": spread}


def _deviation(merged: Partial) -> xr.Dataset:
    assert isinstance(merged, Rows)
    count, mean, spread = (merged.rows[name] for name in ("count", "mean", "spread"))
    centre = (count * mean).sum() / count.sum()
    total = spread.sum() + (count * (mean - centre).square()).sum()
    return labelled("subject_spread", {"value": ((), (total / (count.sum() - 1)).sqrt())})


def _subjects_of(subject: SpanPlace | Sequence[SpanPlace], batch: Batch) -> SpanPlace | Sequence[SpanPlace]:
    """The subject of each row of a batch, or the one of all prompts."""
    if isinstance(subject, SpanPlace):
        return subject
    rows = range(len(batch)) if batch.row is None else batch.row.tolist()
    if max(rows) >= len(subject):
        raise ValueError(f"one subject per prompt is required, got {len(subject)} for prompt {max(rows)}")
    return [subject[row] for row in rows]


def _answers(text: Text, answer: Answers | None, metric: Metric) -> AnswerTokens | None:
    """Answers of the question, else of its metric; wrong answers are those of the metric, else of the data.

    Raises:
        ValueError: the two differ.
    """
    of_metric = AnswerTokens.of(text, metric.answer, metric.wrong, several=True)
    of_question = AnswerTokens.of(text, answer, several=True)
    if of_metric is None or of_question is None:
        answers = of_metric if of_question is None else of_question
        return None if answers is None else replace(answers, keep_wrong=True)
    if not of_metric.begins(of_question):
        raise ValueError(f"the metric {metric.name!r} brings other answers than those asked about")
    return replace(of_metric, spacing=of_question.spacing, keep_wrong=True)


def usual_window(n_layers: int) -> int:
    """A fifth of the layers, at least one: 10 of 48, as Meng et al. 2022 restore at once in GPT-2 XL."""
    return max(1, round(n_layers / 5))


def _output_names(config: ModelConfig, kind: Severed) -> list[str]:
    """Names, within a block, of the sites of the output of its attention, or of each of its MLPs."""
    return [f"hook_{name}_out" for name in (config.mlps if kind == "mlp" and config.mlps else (kind,))]


@dataclass(frozen=True, eq=False)
class Noised:
    """Prompts repeated once per noise sample, with noise for the token embeddings of their subjects."""

    model: Transformer
    batch: Batch
    """Prompts x samples rows, the samples of a prompt next to each other, on the model's device."""
    noise: Float[Tensor, "r p d"]

    @classmethod
    def of(
        cls, model: Transformer, batch: Batch, where: Bool[Tensor, "b p"], scale: float, tracing: CausalTrace
    ) -> Noised:
        """The prompts, each repeated `samples` times, with noise of standard deviation `scale` at the subject's tokens.

        What a prompt gets depends on its own tokens and the seed alone, so that neither the order of the prompts nor
        the split into batches changes a number.
        """
        check_memory(
            f"{tracing.samples} draws of the noise for {len(batch)} prompts (causal_trace: samples)",
            8 * len(batch) * tracing.samples * where.shape[1] * model.config.d_model, torch.device("cpu"),
            "fewer samples take less",
        )  # fmt: skip
        noise = torch.zeros(len(batch), tracing.samples, *where.shape[1:], model.config.d_model)
        for row, tokens, of_prompt, in_subject in zip(
            noise, batch.tokens, batch.prompt_tokens, where, strict=True
        ):
            seed = zlib.crc32(tokens[of_prompt].numpy().tobytes(), tracing.seed % 2**32)
            generator = torch.Generator().manual_seed(seed)
            row[:, in_subject] = scale * torch.randn(
                tracing.samples, int(in_subject.sum()), row.shape[-1], generator=generator
            )
        rows = batch.rows(torch.arange(len(batch)).repeat_interleave(tracing.samples))
        return cls(model, rows.to(model.device), to_device(noise.flatten(0, 1), model.device))

    def corrupted(self, embedding: Float[Tensor, "r p d"]) -> Variant:
        """The variant that corrupts these clean token embeddings."""
        return Variant([Edit("embed", Set(upcast(embedding) + self.noise))])


def _compute(
    model: Transformer,
    batch: Batch,
    question: CausalTrace,
    text: Text,
    metric: Metric,
) -> Steps[Values]:
    """Metrics and effects of the prompts whose answer is the model's most probable one; NaN for other prompts."""
    if batch.answer is None:
        raise ValueError(
            "causal tracing requires the answer of every prompt, got none: name it, or bring it with the data"
        )
    check_first_column(batch, "effects by token")
    host_batch = batch.host()
    assert host_batch.answer is not None
    assert question.subject is not None
    span = spans(text, host_batch, _subjects_of(question.subject, host_batch))
    run = yield from recorded(batch, (), final=True)
    with torch.no_grad():
        ends = picked(run.end, to_device(host_batch.answer_columns(), run.end.device))
        logits = model.read_out(upcast(ends))  # [b k v], where each token of the answer is predicted
    top = to_host({"best": logits.argmax(-1), "nan": logits.isnan().any()})
    if bool(top["nan"]):
        raise NotFiniteError("a logit at the last token of some prompt is NaN")
    (answer, _), best = host_batch.answer_tokens(), top["best"]
    said = host_batch.is_answer(best)
    known, differs = said.all(1), (~said).int().argmax(1, keepdim=True)
    rows, columns = known.nonzero()[:, 0], batch.tokens.shape[1]
    known_values: dict[str, Tensor] = {}
    if len(rows):
        known_values = yield from _traced_values(model, batch.rows(rows), span[rows], question, metric)
    layers, values = model.config.n_layers, {}
    shapes: dict[str, tuple[int, ...]] = {
        "clean": (), "corrupt": (),
        **dict.fromkeys(("by_role", "role_variance", "role_changed"), (layers, len(ROLES))),
        **dict.fromkeys(("each", "each_spread", "each_changed") if question.each else (), (layers, columns)),
    }  # fmt: skip
    dtype = torch.promote_types(model.dtype, torch.float32)
    for name, shape in shapes.items():
        values[name] = torch.full((len(batch), *shape), torch.nan, dtype=dtype)
        if known_values:
            values[name][rows] = known_values[name].to(dtype)
    values["total"] = values["clean"] - values["corrupt"]
    values["known"] = known.double()
    if question.each:
        values |= {
            "best": best.gather(1, differs)[:, 0],  # of the first token in which the two differ
            "answer": answer.gather(1, differs)[:, 0],
            "token": host_batch.token_ids,
        }
        values["subject"] = within(host_batch, span).double()
    return values


def _traced_values(
    model: Transformer, batch: Batch, span: Int[Tensor, "b 2"], question: CausalTrace, metric: Metric
) -> Steps[dict[str, Tensor]]:
    """Metrics and effects of restoring of prompts that the model knows, by name, one row per prompt, on the CPU."""
    assert question.sigma is not None
    host_batch = batch.host()
    noised = Noised.of(model, host_batch, within(host_batch, span), question.noise * question.sigma, question)
    rows, config, layers = noised.batch, model.config, range(model.config.n_layers)
    restored = {name for layer in layers for name in question.restored(layer, config)}
    frozen = {name for layer in layers for name in question.frozen(layer, config)}
    clean = yield from recorded(
        rows, [Read("hook_embed"), *map(Read, sorted(restored))], final=True, exact=True
    )
    common = noised.corrupted(clean.trace[Read("hook_embed")])
    clean_values = {name: clean.trace[Read(name)] for name in restored}
    corrupt_values: dict[str, Tensor] = {}
    if frozen:
        corrupt = yield from recorded(rows, list(map(Read, sorted(frozen))), exact=True, edits=common.edits)
        corrupt_values = {name: corrupt.trace[Read(name)] for name in frozen}
    cells = question.cells(config, clean_values, corrupt_values, rows)
    sweep = yield from swept(rows, cells, metric, common=common, reference=clean.final_at(metric))
    return to_host(_restoring_effects(sweep, clean, noised, host_batch, span, metric, question))


@torch.no_grad()
def _restoring_effects(
    sweep: Swept,
    clean: Recorded,
    noised: Noised,
    host_batch: Batch,
    span: Int[Tensor, "b 2"],
    metric: Metric,
    question: CausalTrace,
) -> dict[str, Tensor]:
    """Effects of restoring in each prompt, by token and by role, and the metric of its clean and corrupted runs."""
    sweep, device = _unchanged_before_subject(sweep, noised), sweep.base.device
    value = upcast(clean.value(metric, clean.final_at(metric)))
    clean_fine, noised_fine = torch.stack([x.isfinite().all() for x in (value, sweep.base)]).tolist()
    if not clean_fine:
        raise NotFiniteError(f"{metric.name} is NaN or infinite in the clean run of some prompt")
    if not noised_fine:
        raise NotFiniteError(
            f"{metric.name} is NaN or infinite in a corrupted run: noise={question.noise:g} times "
            f"sigma={question.sigma:g} is too large"
        )
    n, p = question.samples, host_batch.tokens.shape[1]
    effect = rearrange(sweep.values - sweep.base, "(l p) (b n) -> b n l p", p=p, n=n)
    changed = rearrange(sweep.changed, "(l p) (b n) -> b n l p", p=p, n=n).any(1)
    return {
        **_by_token(effect, changed, to_device(host_batch.real, device)),
        **_by_role(effect, changed, to_device(roles(host_batch, span), device)),
        "clean": value[::n],
        "corrupt": sweep.base.unflatten(0, (-1, n)).mean(1),
    }


def _unchanged_before_subject(sweep: Swept, noised: Noised) -> Swept:
    """The sweep with the base run's values at tokens before the subject, where only rounding can change a value."""
    columns = torch.arange(noised.batch.tokens.shape[1], device=sweep.base.device)[:, None]
    before = (columns < noised.noise.any(2).int().argmax(1)) & noised.model.config.causal
    same = before.repeat(len(sweep.values) // len(before), 1)
    return replace(sweep, values=torch.where(same, sweep.base, sweep.values), changed=sweep.changed & ~same)


def _by_token(
    effect: Float[Tensor, "b n l p"], changed: Bool[Tensor, "b l p"], real: Bool[Tensor, "b p"]
) -> dict[str, Tensor]:
    """Mean and standard deviation over the samples at every token; NaN at padding."""
    padding = ~real[:, None]
    return {
        "each": effect.mean(1).masked_fill(padding, torch.nan),
        "each_spread": _variance(effect).sqrt().masked_fill(padding, torch.nan),
        "each_changed": (changed & ~padding).double(),
    }


def _by_role(
    effect: Float[Tensor, "b n l p"], changed: Bool[Tensor, "b l p"], role: Bool[Tensor, "b r p"]
) -> dict[str, Tensor]:
    """Mean and variance over the samples of the mean over a role's tokens; NaN where a prompt has none."""
    share = role.to(effect) / role.sum(2, keepdim=True)
    by_role = einsum(effect, share, "b n l p, b r p -> b n l r")
    reached = einsum(changed.double(), role.double(), "b l p, b r p -> b l r") > 0
    return {"by_role": by_role.mean(1), "role_variance": _variance(by_role), "role_changed": reached.double()}


def _variance(samples: Float[Tensor, "b n *rest"]) -> Float[Tensor, "b *rest"]:
    """Variance over the samples; NaN for a single one."""
    return samples.var(1) if samples.shape[1] > 1 else torch.full_like(samples[:, 0], torch.nan)


def _finish(
    merged: Partial, question: CausalTrace, config: ModelConfig, text: Text, metric: Metric
) -> xr.Dataset:
    moments = moments_of(merged, MaskedMoments)
    known, prompts = float(moments["known"].mean), moments["known"].n
    if not known:
        raise ValueError(
            f"a fact that the model knows is required: of {prompts} none has its answer as the most probable next token"
            + _first_answers(merged)
        )
    per_prompt, coords = _per_prompt(merged, text) if isinstance(merged, Rows) else ({}, {})
    effect, variance, total = moments["by_role"], moments["role_variance"], moments["total"]
    layers = range(config.n_layers)
    restored = ["+".join(str(Part.of(site)) for site in question.restored(layer, config)) for layer in layers]
    return labelled(
        question.name,
        {
            **effect.estimate(CELLS, fewest=metric.fewest),
            "value": (CELLS, effect.mean.masked_fill(effect.count() == 0, torch.nan)),
            "spread": (CELLS, variance.mean.masked_fill(variance.count() == 0, torch.nan).sqrt()),
            "changed": (CELLS, moments["role_changed"].mean > 0),
            **per_prompt,
            "total": (("estimate",), torch.stack((total.mean, *total.interval(fewest=metric.fewest)))),
        },
        coords={
            "layer": layers, "part": (("layer",), restored), "role": list(ROLES), "estimate": list(ESTIMATE), **coords,
        },
        units=metric.unit,
        attrs={
            **_attrs(question, config, metric),
            "dropped": round(prompts * (1 - known)),
        },
    )  # fmt: skip


def _per_prompt(
    merged: Rows, text: Text
) -> tuple[dict[str, tuple[Sequence[str], Tensor]], dict[str, object]]:
    """Variables and coordinates of every known fact."""
    known = merged.rows["known"] > 0
    of_known = {name: value[known] for name, value in merged.rows.items()}
    values: dict[str, tuple[Sequence[str], Tensor]] = {
        "each": (TOKENS, of_known["each"]),
        "each_spread": (TOKENS, of_known["each_spread"]),
        "each_changed": (TOKENS, of_known["each_changed"] > 0),
        "subject": (("prompt", "pos"), of_known["subject"] > 0),
        **{name: (("prompt",), of_known[name]) for name in ("clean", "corrupt")},
    }
    numbers = known.nonzero()[:, 0] if merged.ids is None else merged.ids.cpu()[known]
    return values, {
        "prompt": numbers.tolist(), "pos": range(of_known["token"].shape[1]),
        "token": text.token_words(of_known["token"]),
    }  # fmt: skip


def _first_answers(merged: Partial) -> str:
    """Text about the first fact: its answer and the model's, as far as rows were kept."""
    if not isinstance(merged, Rows):
        return ""
    return (
        f"; the first answer is {int(merged.rows['answer'][0])}, the model says {int(merged.rows['best'][0])}"
    )


def _attrs(question: CausalTrace, config: ModelConfig, metric: Metric) -> dict[str, str | float | int]:
    """Attrs of the result: how the trace was made, and the conventions."""
    assert question.sigma is not None
    window = usual_window(config.n_layers) if question.window is None else question.window
    return {
        "kind": question.kind,
        "window": 1 if question.kind == "state" else window,
        "noise": question.noise,
        "samples": question.samples,
        "seed": question.seed,
        "severed": question.severed or "nothing",
        "sigma": question.sigma,
        "direction": "denoise",
        "effect": f"indirect effect, restored - corrupted: {SIGN}",
        "interval": f"{over('prompts', metric.fewest)}; of means over noise samples",
        "null": "0: what is restored brings nothing back",
        "metric": metric.name,
        "unit": metric.unit,
        "roles": "every token has one at most; tokens of a role averaged inside a prompt",
    }
