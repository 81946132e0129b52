r"""Function vectors: which heads carry the task that an in-context list shows, and what their outputs do elsewhere.

A list of pairs ("Q: hot\nA: cold\n\nQ: big\nA:") names no task, and yet the model answers with the antonym. The average
indirect effect (AIE) of a head: its mean output over such lists, put into a list whose outputs are shuffled, brings
how much of the answer back? What the heads of the largest AIE add to the residual stream, summed, is the function
vector: added to a prompt without any example, it makes the model carry out the task (Todd et al. 2024).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.causal.ablation import chosen
from interp.causal.contrast import site_names
from interp.causal.effects import SIGN
from interp.causal.steering import RANDOM, band
from interp.core.kinds import PositiveCount, Seed
from interp.core.results import Score, labelled, scored
from interp.core.stats import FEWEST, Means, Moments, Partial, over, two_sided_p, upcast
from interp.core.transfers import check, to_device
from interp.data.answers import AnswerTokens
from interp.data.batch import Batch
from interp.data.stream import prompt_source
from interp.model.config import ModelConfig
from interp.model.edits import Add, Edit, Set
from interp.model.parts import Part, as_part
from interp.model.sites import full_name
from interp.model.tap import Read
from interp.model.transformer import Transformer
from interp.model.weights import Weights
from interp.passes.frozen import output_norm, output_scale
from interp.passes.metrics import (
    LogitFunction,
    Metric,
    Outcome,
    answer_probability,
    as_metric,
)
from interp.passes.needs import Steps, recorded, swept, swept_by
from interp.passes.observe import Subject
from interp.passes.question import Ask, ByRow, NotFiniteError, Question, Staged, Stages, Values
from interp.passes.variants import Variant
from interp.runs.functions import of_weights
from interp.tasks.pair_lists import AskedPairs, PairLists, WordPairs

if TYPE_CHECKING:
    from collections.abc import Callable

    import xarray as xr

    RowSteps = Callable[[Transformer, Batch], Steps[Values]]
    """The values of a batch's rows, step by step."""

ZERO_SHOT, SHUFFLED = "zero-shot", "shuffled labels"
NONE, FUNCTION, OTHER = "none", "function vector", "other tasks"
LISTS = PairLists()


# --- the heads --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class AverageIndirectEffect(Question):
    """Average indirect effect (AIE) of every head: how much of a task its mean output brings into shuffled lists.

    A list with right outputs shows a task, a list with shuffled outputs shows none. The output of each head at the
    last token, averaged over lists of the first kind, is put into each list of the second kind, at its last token;
    the effect is the change of what the model gives to the right answer.

    Args:
        tasks: by name, the pairs (input, output) of each task, of texts or of lists of token ids.
        metric: a `Metric` of the right answers, which the pairs bring, or a function of the logits [b, v] at the last
            token; None: p(answer), of several tokens the product. `interp.metrics.answer_log_probability()` and
            `interp.logit_difference()` (the answer's logit) are others.
        lists: how lists are written and drawn, and which pairs are set aside; their test is not looked at here.

    Returns:
        Dataset over `layer` and `head`:

        - `value`: mean effect over the lists of all tasks, with the ends `low` and `high` of its 95 % interval and the
          number of lists `n`.
        - `null`: the same with the head's mean over lists with shuffled outputs, which show no task: the effect of an
          average as such.
        - `beyond` [layer, head, end]: mean, lower and upper end of the effect minus that of the null, list by list.
        - `by_task` [task, layer, head]: the mean effect in each task.
        - `correct`, `shuffled` [task]: mean metric of lists with right and with shuffled outputs: what all heads
          together could bring back.

    Raises:
        ValueError: too few pairs of a task for its lists, lists that the context cannot hold, a metric that brings
            answers of its own or compares two runs, answers of several tokens for a logit.
        KeyError: a model without heads in some layer.

    Caveats:
        A head that acts through other heads of the same token counts for what they do with it. One task's answers are
        often of one kind (capitals), so that a head which carries the kind of answer has an effect without the task.

    Source:
        Todd et al. 2024, "Function Vectors in Large Language Models" (arXiv:2310.15213), section 2.3.

    See Also:
        `function_vectors`: what the outputs of these heads do, added to other prompts. `patch`: heads from one prompt
        into another.

    Example:
        >>> pairs = [([i], [i + 1]) for i in range(3, 12)]
        >>> lists = interp.tasks.PairLists(shots=3, rows=2)
        >>> average_indirect_effect(model, {"next": pairs}, lists=lists).value.dims
        ('layer', 'head')
    """

    tasks: Mapping[str, WordPairs]
    _: KW_ONLY
    metric: Metric | LogitFunction | None = None
    lists: PairLists = LISTS

    def bind(self, model: Subject) -> Staged:
        """A pass over the lists whose outputs are averaged, then one planned sweep per task and batch."""
        _check_tasks(self.tasks, self.lists)
        site_names("z", model.transformer.config)
        _metric_of(self.metric, model)
        return Staged(self.name, partial(_effect_stages, model, self), data="none")


average_indirect_effect = of_weights(AverageIndirectEffect)


def _check_tasks(tasks: Mapping[str, WordPairs], lists: PairLists) -> None:
    """ValueError, with the name of the task, for no task or for pairs that do not suffice."""
    if not tasks:
        raise ValueError("tasks: at least one task is required, got none")
    for task, pairs in tasks.items():
        try:
            lists.split(pairs)
        except ValueError as cause:
            raise ValueError(f"tasks: {task!r}: {cause}") from cause


def _metric_of(given: Metric | LogitFunction | None, model: Subject) -> Metric:
    """The metric of an argument. ValueError for one that compares runs or brings answers: those of the pairs count."""
    metric = answer_probability() if given is None else as_metric(given, model.text)
    if metric.compares or metric.answer is not None or metric.wrong is not None:
        raise ValueError(
            f"metric: one of the answers that the pairs bring is required, such as "
            f"interp.metrics.answer_log_probability() without arguments, got {metric.name!r} that compares two runs or "
            "brings answers"
        )
    return metric


def _effect_stages(model: Subject, question: AverageIndirectEffect, has_data: bool) -> Stages[xr.Dataset]:
    """The mean outputs, then the effects that they have."""
    means = yield from HeadMeans.of(model, question.tasks, question.lists)
    found = yield from _effects_of(model, question, means)
    return _effect_table(found, question, model)


class HeadMeans(NamedTuple):
    """Mean outputs of all heads at the last token of lists with right (first) and with shuffled outputs (second)."""

    z: Float[Tensor, "t 2 l h e"]
    """Outputs of the heads before W_O."""
    added: Float[Tensor, "t 2 l h d"]
    """What the heads add to the residual stream."""

    @classmethod
    def of(cls, model: Subject, tasks: Mapping[str, WordPairs], lists: PairLists) -> Stages[HeadMeans]:
        """The means of every task, over the lists of the part "mean"."""
        kinds = (False, True)
        asked = [lists.lists(pairs, "mean", shuffled=kind) for pairs, kind in product(tasks.values(), kinds)]
        question = ByRow("mean outputs of heads", head_outputs, Means)
        merged = yield [Ask(question, prompt_source(each.prompts, model.text)) for each in asked]
        means = [{name: m.mean for name, m in _moments(each).items()} for each in merged]
        return cls(
            *(
                torch.stack([mean[name] for mean in means]).unflatten(0, (len(tasks), len(kinds)))
                for name in cls._fields
            )
        )


def _moments(merged: Partial) -> Mapping[str, Moments]:
    assert isinstance(merged, Means)
    return merged.moments


@torch.no_grad()
def head_outputs(model: Transformer, batch: Batch) -> Steps[Values]:
    """What every head puts out at the last token of each prompt: `z` [b, l, h, e], and `added` [b, l, h, d].

    `added` is what reaches the residual stream: z W_O, after the norm and the factor that the family puts there, at
    the scale of the pass. The bias of the sublayer belongs to no head.

    Args:
        batch: prompts, padded on any side.

    Returns:
        By name, one row per prompt, in float32 at least.
    """
    config, last = model.config, to_device(batch.host().prompt_ends(), model.device)
    sites = site_names("z", config)
    scales = [site for layer in range(config.n_layers) for site in output_scale(config, layer, "attn_out")]
    reads = {site: Read(site, partial(_at, column_b=last)) for site in (*sites, *scales)}
    trace = (yield from recorded(batch, list(reads.values()))).trace
    seen = {site: upcast(trace[read]) for site, read in reads.items()}
    weights, added = Weights(model), []
    for layer, site in enumerate(sites):
        out = torch.einsum("bhe, hed -> bhd", seen[site], upcast(weights.layer(layer).W_O))
        at_scale = {name: seen[name][:, None] for name in output_scale(config, layer, "attn_out")}
        added.append(output_norm(model, layer, "attn_out").recorded(at_scale).through(out))
    return {"z": torch.stack([seen[site] for site in sites], 1), "added": torch.stack(added, 1)}


def _at(value: Float[Tensor, "b p ..."], *, column_b: Int[Tensor, "b"]) -> Float[Tensor, "b ..."]:
    """The values at one column of every row."""
    return value[torch.arange(len(value), device=value.device), column_b.to(value.device)]


class TaskEffects(NamedTuple):
    """Effects of the heads in the lists of one task, and the metric of the lists."""

    effects: Mapping[str, Moments]
    """`effect`, `null` and `beyond`, each [l, h]; `base`."""
    correct: Moments
    """Metric of the lists with right outputs."""


def _effects_of(
    model: Subject, question: AverageIndirectEffect, means: HeadMeans
) -> Stages[list[TaskEffects]]:
    """The effects of all heads in the lists of the part "effect", task by task."""
    metric, asks = _metric_of(question.metric, model), []
    for pairs, z in zip(question.tasks.values(), means.z, strict=True):
        variants = [
            Variant([Edit(str(Part("head", layer, head)), Set(z[kind, layer, head]), {"pos": -1})])
            for kind, layer, head in product(*map(range, z.shape[:3]))
        ]
        rows = {
            True: partial(_effects, variants=variants, metric=metric, shape=z.shape[:3]),
            False: partial(_base, metric=metric),
        }
        for shuffled, steps in rows.items():
            asks.append(_ask(model, question.lists.lists(pairs, "effect", shuffled=shuffled), steps))
    found = [_moments(each) for each in (yield asks)]
    return [
        TaskEffects(effects, correct["base"])
        for effects, correct in zip(found[::2], found[1::2], strict=True)
    ]


def _ask(model: Subject, asked: AskedPairs, steps: RowSteps) -> Ask:
    """The need of a question about these prompts, each with its own answer of one token or several."""
    answers = AnswerTokens.of(model.text, asked.answers, several=True)
    return Ask(
        ByRow("lists of pairs", steps, Means, answers=answers), prompt_source(asked.prompts, model.text)
    )


@torch.no_grad()
def _effects(
    model: Transformer, batch: Batch, variants: Sequence[Variant], metric: Metric, shape: Sequence[int]
) -> Steps[Values]:
    """The effect of each head, with its mean over lists with right and with shuffled outputs, `[b l h]`."""
    sweep = yield from swept(batch, variants, metric)
    check(sweep.base.isfinite().all(), partial(NotFiniteError, f"{metric.name} of some list is not finite"))
    effect, null = (
        (sweep.values - sweep.base).mT.unflatten(1, tuple(shape)).unbind(1)
    )  # [(k l h) b] -> [b l h]
    return {"effect": effect, "null": null, "beyond": effect - null, "base": sweep.base}


def _base(model: Transformer, batch: Batch, metric: Metric) -> Steps[Values]:
    """The metric of each list."""
    run = yield from recorded(batch, [], final=True)
    return {"base": run.value(metric)}


def _effect_table(
    found: Sequence[TaskEffects], question: AverageIndirectEffect, model: Subject
) -> xr.Dataset:
    """Dataset of `average_indirect_effect`."""
    config, metric, dims = model.transformer.config, _metric_of(question.metric, model), ("layer", "head")
    total = {name: _merged([task.effects[name] for task in found]) for name in ("effect", "null", "beyond")}
    bounded = metric.unit == answer_probability().unit
    interval = change_interval if bounded else partial(Moments.interval, fewest=metric.fewest)
    beyond, (low, high) = total["beyond"], interval(total["effect"])
    ends = (beyond.mean, *interval(beyond))
    values: dict[str, tuple[Sequence[str], Tensor]] = {
        **total["effect"].estimate(dims, null=total["null"].mean),
        **{"low": (dims, low), "high": (dims, high)},
        "beyond": ((*dims, "estimate"), torch.stack(ends, -1)),
        "by_task": (("task", *dims), torch.stack([task.effects["effect"].mean for task in found])),
        "correct": (("task",), torch.stack([task.correct.mean for task in found])),
        "shuffled": (("task",), torch.stack([task.effects["base"].mean for task in found])),
    }
    heads = [[str(Part("head", layer, h)) for h in range(config.n_heads)] for layer in range(config.n_layers)]
    attrs: dict[str, str | int | float] = {
        "metric": metric.name, "unit": metric.unit, "effect": SIGN,
        "interval": over("lists", FEWEST if bounded else metric.fewest),
        "null": "the head's mean over lists with shuffled outputs", **_list_attrs(question.lists),
    }  # fmt: skip
    coords = {"task": list(question.tasks), "part": (dims, heads), "estimate": ["value", "low", "high"]}
    return labelled(question.name, values, coords=coords, units=metric.unit, attrs=attrs)


def change_interval(moments: Moments) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."]]:
    """A 95 % interval of the mean of rows between -1 and 1, changes of a share, that is valid for skewed rows as well.

    (1 + change) / 2 is a share, and so has the interval of one (`interp.core.stats.share_interval`), from one row on.

    Args:
        moments: of the changes, [...].

    Returns:
        The lower and the upper end, [...] each, between -1 and 1.
    """
    shares = Moments(moments.n, (1 + moments.mean) / 2, moments.spread / 4)
    low, high = shares.interval(share=True)
    return 2 * low - 1, 2 * high - 1


def _merged(parts: Sequence[Moments]) -> Moments:
    """The moments over all parts together."""
    total, *others = parts
    for part in others:
        total = total.merge(part)
    return total


def _list_attrs(lists: PairLists) -> dict[str, str | int | float]:
    return {
        "shots": lists.shots,
        "rows": lists.rows,
        "template": lists.template,
        "test_share": lists.test_share,
        "seed": lists.seed,
    }


# --- the vectors ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class FunctionVectors(Question):
    """Function vector of every task, and what it does on pairs that had no part in it.

    The vector is the sum, over the `top` heads, of what each adds to the residual stream at the last token, averaged
    over lists that show the task. It is added to the stream after one block at the last token of prompts that do not
    show the task: the input alone (zero-shot), lists with shuffled outputs, and templates of one's own.

    Args:
        tasks: by name, the pairs (input, output) of each task, of texts or of lists of token ids.
        heads: names of the heads, `["L12H5", ...]`; None: those of the largest average indirect effect over the tasks,
            found on the pairs that are not set aside.
        top: number of heads where they are to be found; 10 in the paper for GPT-J, which has 448.
        layers: after which blocks the vector is added, one at a time; None: the one at a third of the depth.
        templates: further prompts, each a text with `{input}` after which the output is due.
        metric: by which heads are found, as in `average_indirect_effect`; None: p(answer).
        random: number of draws of as many other heads, whose vectors are scaled to the length of the function vector.
        lists: how lists are written and drawn, and which pairs are set aside to judge the vectors.
        seed: seed of the random heads.

    Returns:
        Dataset over `task`, `setting`, `layer`, `vector` and `score`:

        - `value`: mean over the pairs set aside, with the ends `low` and `high` of its 95 % interval and `n`.
          Settings: "zero-shot", "shuffled labels", and each template. Vectors: "none" (the prompt as it is), "function
          vector", "shuffled labels" (the same heads, averaged over lists with shuffled outputs), and with several tasks
          "other tasks" (mean over the vectors of the other tasks).
        - `null`: mean over the random heads, the same for every vector. `random` [task, setting, layer, score, draw]:
          each draw. `band` [..., end]: the middle 95 % of the draws. `p`: two-sided, how often random heads do as much
          as the function vector; at least 2 / (random + 1).
        - `directions` [task, layer, direction (one), d_model]: the function vector, the same in each layer;
          `Subspace.of_result(found.sel(task=...), layer=...)` adds it anywhere.
        - `heads` [rank]: names of the heads, those of the largest effect first.

        Scores:

            accuracy            1 where every token of the answer is the most probable one, else 0
            probability         p(answer), of several tokens the product
            accuracy_change     accuracy minus that without a vector
            probability_change  probability minus that without a vector

    Raises:
        ValueError: too few pairs of a task, fewer heads than twice as many as are summed, lists that the context
            cannot hold, a template without `{input}`.
        KeyError, IndexError: a head or a layer that the model lacks.

    Caveats:
        A vector can raise the answers' kind (any capital) without the right one: p(answer) then rises, accuracy does
        not. The best of many layers flatters, unless it is chosen on other pairs.

    Source:
        Todd et al. 2024, "Function Vectors in Large Language Models" (arXiv:2310.15213), sections 2 and 3.

    See Also:
        `average_indirect_effect`: the effects by which the heads are found. `steering_curve`: doses of one direction.

    Example:
        >>> pairs = [([i], [i + 1]) for i in range(3, 12)]
        >>> lists = interp.tasks.PairLists(shots=3, rows=2)
        >>> found = function_vectors(model, {"next": pairs}, top=2, random=3, lists=lists)
        >>> found.value.dims, found.sizes["setting"]
        (('task', 'setting', 'layer', 'vector', 'score'), 2)
    """

    tasks: Mapping[str, WordPairs]
    _: KW_ONLY
    heads: Sequence[str] | None = None
    top: PositiveCount = 10
    layers: Sequence[int] | None = None
    templates: Sequence[str] = ()
    metric: Metric | LogitFunction | None = None
    random: PositiveCount = RANDOM
    lists: PairLists = LISTS
    seed: Seed = 0

    def bind(self, model: Subject) -> Staged:
        """Passes and a sweep that find the heads, then one planned sweep for each task and setting."""
        config = model.transformer.config
        _check_tasks(self.tasks, self.lists)
        site_names("z", config)
        _metric_of(self.metric, model)
        layers = [config.n_layers // 3] if self.layers is None else list(self.layers)
        layers = chosen(layers, config.n_layers, "layer")
        given = None if self.heads is None else _head_numbers(self.heads, config)
        count = self.top if given is None else len(given)
        every = config.n_layers * config.n_heads
        if 2 * count > every:
            raise ValueError(
                f"top: at most half of the model's {every} heads are required, so that as many others can be drawn, "
                f"got {count}"
            )
        settings = [_settings(pairs, self.lists, self.templates) for pairs in self.tasks.values()]
        return Staged(self.name, partial(_vector_stages, model, self, layers, given, settings), data="none")


function_vectors = of_weights(FunctionVectors)


def _head_numbers(names: Sequence[str], config: ModelConfig) -> list[int]:
    """The number layer * n_heads + head of each head. ValueError for what is no head, for none, and for one twice."""
    numbers = []
    for name in names:
        part = as_part(name, config)
        if part.kind != "head" or part.layer is None or part.index is None:
            raise ValueError(f"heads: the name of a head is required, such as L3H2, got {name!r}")
        numbers.append(part.layer * config.n_heads + part.index)
    if not numbers or len(set(numbers)) < len(numbers):
        raise ValueError(f"heads: at least one head and none twice is required, got {list(names)}")
    return numbers


def _settings(pairs: WordPairs, lists: PairLists, templates: Sequence[str]) -> dict[str, AskedPairs]:
    """The prompts of every setting, about the pairs of the test."""
    if len({ZERO_SHOT, SHUFFLED, *templates}) < 2 + len(templates):
        raise ValueError(f"templates: texts that differ are required, got {list(templates)}")
    settings = {ZERO_SHOT: lists.zero_shot(pairs), SHUFFLED: lists.lists(pairs, "test", shuffled=True)}
    return settings | {template: lists.zero_shot(pairs, template) for template in templates}


def _vector_stages(
    model: Subject,
    question: FunctionVectors,
    layers: Sequence[int],
    given: Sequence[int] | None,
    settings: Sequence[Mapping[str, AskedPairs]],
    has_data: bool,
) -> Stages[xr.Dataset]:
    """The mean outputs, the heads unless they are given, then every setting of every task."""
    means = yield from HeadMeans.of(model, question.tasks, question.lists)
    if given is None:
        effects = AverageIndirectEffect(question.tasks, metric=question.metric, lists=question.lists)
        found = yield from _effects_of(model, effects, means)
        effect = _merged([task.effects["effect"] for task in found]).mean
        given = effect.flatten().argsort(descending=True, stable=True)[: question.top].tolist()
    vectors = [
        TaskVectors.of(means.added, task, given, question.random, question.seed)
        for task in range(len(question.tasks))
    ]
    asks = [
        _ask(model, asked, partial(_tested, variants=its.variants(layers), layers=len(layers), vectors=its))
        for its, prompts in zip(vectors, settings, strict=True)
        for asked in prompts.values()
    ]
    tested = [_moments(each) for each in (yield asks)]
    return _vector_table(tested, vectors, question, layers, given, model.transformer.config)


@dataclass(frozen=True, eq=False)
class TaskVectors:
    """The vectors that are added to the prompts of one task."""

    function: Float[Tensor, "d"]
    shuffled: Float[Tensor, "d"]
    """Of the same heads, averaged over lists with shuffled outputs."""
    others: Float[Tensor, "o d"]
    """The function vectors of the other tasks."""
    random: Float[Tensor, "r d"]
    """Of other heads, at the length of the function vector."""

    @classmethod
    def of(
        cls, added: Float[Tensor, "t 2 l h d"], task: int, heads: Sequence[int], draws: int, seed: int
    ) -> TaskVectors:
        """The vectors of one task, from what all heads add on average in each."""
        by_head = added.flatten(2, 3)  # [t 2 l h d] -> [t 2 (l h) d]
        summed = by_head[:, :, list(heads)].sum(2)
        function = summed[task, 0]
        left = np.setdiff1d(np.arange(by_head.shape[2]), heads)
        generator = np.random.default_rng(seed)
        drawn = [generator.choice(left, len(heads), replace=False).tolist() for _ in range(draws)]
        random = torch.stack([by_head[task, 0, one].sum(0) for one in drawn])
        length = random.norm(dim=-1, keepdim=True)
        random = random * function.norm() / length.where(length > 0, 1.0)
        others = torch.cat((summed[:task, 0], summed[task + 1 :, 0]))
        return cls(function, summed[task, 1], others, random)

    @property
    def named(self) -> dict[str, Float[Tensor, "n d"]]:
        """The vectors by name, but for the random ones; none of a name that has none."""
        found = {FUNCTION: self.function[None], SHUFFLED: self.shuffled[None], OTHER: self.others}
        return {name: vectors for name, vectors in found.items() if len(vectors)}

    def variants(self, layers: Sequence[int]) -> list[Variant]:
        """One variant per layer and vector, vectors fastest: those named, then the random ones."""
        every = torch.cat([*self.named.values(), self.random])
        return [
            Variant([Edit(full_name("resid_post", layer), Add(vector), {"pos": -1})])
            for layer in layers
            for vector in every
        ]


def _is_greedy(outcome: Outcome) -> Float[Tensor, "r"]:
    """1 for rows in which every token of the answer is the most probable one, else 0."""
    said = to_device(outcome.logits().argmax(-1), outcome.batch.tokens.device)
    return outcome.batch.is_answer(said).all(1).to(upcast(outcome.stream))


SCORES: Mapping[str, Metric] = MappingProxyType(
    {
        "accuracy": Metric("accuracy", "share of pairs", _is_greedy, of_answer=True),
        "probability": answer_probability(),
    }
)


@torch.no_grad()
def _tested(
    model: Transformer, batch: Batch, variants: Sequence[Variant], layers: int, vectors: TaskVectors
) -> Steps[Values]:
    """Every score of each row, `[b l v]` with no vector first, and under the random vectors, `[b l r]`."""
    sweeps = yield from swept_by(batch, variants, list(SCORES.values()))
    groups = [*map(len, vectors.named.values()), len(vectors.random)]
    values: dict[str, Tensor] = {}
    for name, sweep in zip(SCORES, sweeps, strict=True):
        check(sweep.base.isfinite().all(), partial(NotFiniteError, f"{name} of some prompt is not finite"))
        by_layer = sweep.values.mT.unflatten(1, (layers, -1))  # [(l v) b] -> [b l v]
        *named, random = by_layer.split(groups, -1)
        none = sweep.base[:, None].expand(-1, layers)
        scores = torch.stack([none, *(each.mean(-1) for each in named)], -1)
        values |= {name: scores, f"{name} random": random}
        values |= {f"{name}_change": scores - none[..., None]}
        values |= {f"{name}_change random": random - none[..., None]}
    return values


def _vector_table(
    tested: Sequence[Mapping[str, Moments]],
    vectors: Sequence[TaskVectors],
    question: FunctionVectors,
    layers: Sequence[int],
    heads: Sequence[int],
    config: ModelConfig,
) -> xr.Dataset:
    """Dataset of `function_vectors`."""
    shape = (len(question.tasks), len(tested) // len(question.tasks))
    where = ("task", "setting", "layer")
    names = [f"{name}{end}" for name in SCORES for end in ("", "_change")]
    random = torch.stack(
        [_stacked([each[f"{name} random"].mean for each in tested], shape) for name in names], 3
    )
    scores = {
        name: _score([each[name] for each in tested], name, shape, random[..., i, :].mean(-1))
        for i, name in enumerate(names)
    }
    function = torch.stack([scores[name].value[..., 1] for name in names], -1)
    others: dict[str, tuple[Sequence[str], Tensor]] = {
        "random": ((*where, "score", "draw"), random),
        "band": ((*where, "score", "end"), band(random)),
        "p": ((*where, "score"), two_sided_p(function, random)),
        "directions": (
            ("task", "layer", "direction", "d_model"),
            torch.stack([its.function.expand(len(layers), 1, -1) for its in vectors]),
        ),
    }
    coords: dict[str, object] = {
        "task": list(question.tasks),
        "setting": [ZERO_SHOT, SHUFFLED, *question.templates],
        "layer": list(layers),
        "vector": [NONE, *vectors[0].named],
        "end": ["low", "high"],
        "site": (("layer",), [full_name("resid_post", layer) for layer in layers]),
        "rank": range(len(heads)),
        "heads": (("rank",), [str(Part("head", *divmod(number, config.n_heads))) for number in heads]),
    }
    attrs: dict[str, str | int | float] = {
        "interval": over("pairs set aside"),
        "null": f"as many other heads, {question.random} draws, at the length of the function vector",
        **_list_attrs(question.lists),
    }
    return scored(question.name, scores, (*where, "vector"), coords=coords, attrs=attrs, others=others)


def _stacked(parts: Sequence[Tensor], shape: tuple[int, int]) -> Tensor:
    """The tensors of all tasks and settings as one, `[task setting ...]`."""
    return torch.stack([*parts]).unflatten(0, shape)


def _score(
    moments: Sequence[Moments], name: str, shape: tuple[int, int], null: Float[Tensor, "t s l"]
) -> Score:
    """One score over task, setting, layer and vector."""
    change, metric = name.endswith("_change"), SCORES[name.removesuffix("_change")]
    ends = [change_interval(each) if change else each.interval(share=True) for each in moments]
    value, n = (_stacked(part, shape) for part in ([m.mean for m in moments], [m.count() for m in moments]))
    low, high = (_stacked([pair[end] for pair in ends], shape) for end in (0, 1))
    return Score(value, low, high, n, null[..., None].expand_as(value), metric.unit)
