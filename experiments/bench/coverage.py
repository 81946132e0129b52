"""Claim: a 95 % interval holds the truth 93 to 97 times in 100, from four rows on, in every analysis that prints one.

The rows of a pool (prompts of demo-4l, pairs of them, rows of random tokens) are taken for the whole world: their mean
is the truth. From them n rows are drawn with replacement, a thousand times; every draw is reduced and labelled as the
analysis itself does it, and it is counted in how many cells `low` and `high` hold the truth. Cells in which the pool
does not vary are left out. One JSON line per analysis
and score; null where the analysis prints no interval of so few rows. The mean of a few rows of a very skewed number is
covered less often by any interval that knows nothing else: such scores have none below as many rows as hold it, which
`--unbound --rows 32 64 128 256 512 1024` shows.
"""

import copy
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import tyro
import xarray as xr
from scipy.stats import binom
from torch import Tensor

import interp
from interp.attention.heads import head_scores
from interp.causal.alignment import estimates, metrics_of
from interp.core import stats
from interp.core.named import Several
from interp.core.results import Score, scored
from interp.core.stats import FEWEST_MASSES, Means, Moments, Partial, Rows
from interp.data.batch import Batch
from interp.data.pairs import Pairs
from interp.data.stream import prompt_source, windows_of
from interp.editing.edit_scores import labelled_scores
from interp.features import dictionary_metrics
from interp.features.probing import intervals
from interp.features.top_examples import per_token
from interp.model.transformer import Transformer
from interp.passes.metrics import Metric
from interp.passes.observe import Model, as_model
from interp.passes.question import ByRow, Question, Questions, Unshared
from interp.passes.rules import PRESETS

MODEL = "demo-4l"
ROWS = (4, 8, 16, 32)
"""How many rows are drawn."""
PLENTY = 1024
"""Rows from which every score has its interval."""


@dataclass(frozen=True)
class World:
    """What an analysis computes of every row of the pool."""

    analysis: ByRow
    values: Mapping[str, Tensor]

    @classmethod
    def of(
        cls,
        question: Question | ByRow,
        model: interp.HookedTransformer,
        data: Batch | Pairs | Sequence[str],
    ) -> "World":
        """One pass over the pool. ValueError for a question about no rows."""
        subject = as_model(model)
        analysis = question.bind(subject)
        if not isinstance(analysis, ByRow):
            raise ValueError(f"{analysis.name} has no rows")
        asked = Questions.of([analysis], subject.transformer.config)
        feed = prompt_source(data, subject.text, batch_size=32)
        parts = [
            asked.values(subject.transformer, batch)[analysis.name]
            for _, window in windows_of(feed)
            for batch in window.batches
        ]
        return cls(analysis, {name: torch.cat([part[name].cpu() for part in parts]) for name in parts[0]})

    def answer(self, rows: Tensor) -> xr.Dataset:
        """The labelled result of some rows."""
        drawn = {name: value[rows] for name, value in self.values.items()}
        return self.analysis.result(self.analysis.keep.of(drawn, torch.arange(len(rows))))

    @property
    def rows(self) -> int:
        """How many there are."""
        return len(next(iter(self.values.values())))


def coverage(world: World, n: int, repetitions: int, seed: int) -> dict[str, tuple[float, int]]:
    """How often the interval of n rows holds the pool's mean, by score, and in how many cells that was asked."""
    generator = torch.Generator().manual_seed(seed)
    truth = world.answer(torch.arange(world.rows).repeat(-(-PLENTY // world.rows)))
    varies = ((truth.high - truth.low) > 1e-9).to_numpy() & truth.value.notnull().to_numpy()
    held, printed = np.zeros(truth.value.shape), np.zeros(truth.value.shape, dtype=bool)
    for _ in range(repetitions):
        found = world.answer(torch.randint(world.rows, (n,), generator=generator))
        held += ((found.low <= truth.value) & (truth.value <= found.high)).to_numpy()
        printed |= found.low.notnull().to_numpy()
    share = xr.DataArray(held / repetitions, dims=truth.value.dims, coords=truth.value.coords).where(
        xr.DataArray(varies & printed, dims=truth.value.dims)  # where() by position
    )
    scores = share.groupby("score") if "score" in share.coords else [("value", share)]
    out = {}
    for score, cells in scores:
        known = cells.to_numpy()[~np.isnan(cells.to_numpy())]
        if len(known):
            out[str(score)] = round(float(known.mean()), 3), len(known)
    return out


def unbind() -> None:
    """Print every interval from three rows on, as if no number were skewed."""
    bound = stats.t95
    for module in (stats, dictionary_metrics):
        module.t95 = lambda n, fewest=stats.FEWEST: bound(n)  # type: ignore[attr-defined]


def plain(merged: Partial) -> xr.Dataset:
    """The moments of every score of heads, all shares but copying, which an analysis labels elsewhere."""
    assert isinstance(merged, Means)
    found = {
        name: torch.stack((m.mean, *m.interval(share=name != "copying", within=stats.SIGNED))).flatten(1)
        for name, m in merged.moments.items()
    }
    value, low, high = torch.cat(list(found.values()), 1)
    score = [name for name, each in found.items() for _ in range(each.shape[1])]
    cells = {name: ("cell", x.numpy()) for name, x in (("value", value), ("low", low), ("high", high))}
    return xr.Dataset(cells, {"score": ("cell", score)})


Worlds = dict[str, Callable[[], World]]


def worlds(model: interp.HookedTransformer, pool: int) -> Worlds:
    """Every analysis with its pool."""
    task = interp.tasks.IndirectObjects(pool, held_out=True)
    drawn = interp.causal.batches(model, task.pairs(model.text.tokenizer))
    pairs = interp.data.Pairs.of(*drawn)
    texts = [sentence.text for sentence in task.sentences()]
    random = interp.tasks.RepeatedTokens(period=20, repeats=2, rows=pool)
    return (
        _of_pairs(model, pairs)
        | _of_rows(model, random)
        | _of_facts(model, pool)
        | _of_texts(model, texts)
        | _of_models(model, pairs, texts)
        | {
            "consensus": lambda: World.of(interp.lab.depth.Consensus(), model, texts),
            "rank_collapse": lambda: World.of(interp.lab.depth.RankCollapse(), model, texts),
        }
    )


def _of_pairs(model: interp.HookedTransformer, pairs: Batch | Pairs) -> Worlds:
    """What asks for a clean and a corrupt prompt, or for an answer."""
    metric, other = interp.logit_difference(), interp.metrics
    answers = paired_answers(pairs)
    options = answers.unique()
    by_metric = {"": metric, " probability": other.answer_probability(), " loss": other.answer_loss(),
                 " divergence": other.kl_divergence(),
                 " choice": other.choice_difference(options, options == answers[:, None])}  # fmt: skip
    compared = partial(interp.tokens.CompareMethods, methods=("values", "gradient_x_input"), shares=(0.3,))
    frequencies = torch.arange(1.0, model.cfg.d_vocab + 1).reciprocal()
    asked: dict[str, Callable[[], Question]] = {
        **{
            f"patch{name}": partial(interp.causal.Patch, "z", metric=m, by=("layer", "head"))
            for name, m in by_metric.items()
        },
        **{
            f"ablate{name}": partial(interp.causal.Ablate, "head", change=interp.edits.Zero(), metric=m)
            for name, m in by_metric.items()
        },
        "attribution_patch": lambda: interp.causal.AttributionPatch(
            "z", metric=metric, by=("layer", "head"), agreement=0
        ),
        "edge_attribution": lambda: interp.circuits.EdgeAttribution(metric=metric),
        "circuit_curve": lambda: interp.circuits.CircuitCurve(_edges(model, metric), metric=metric, draws=1),
        "evaluate_circuit": lambda: _judged(model, metric),
        "path_patch": lambda: interp.causal.PathPatch(metric=metric),
        "knock_out": lambda: interp.causal.KnockOut([-1], [3, 4, 5], metric=metric),
        "short_circuit": lambda: interp.causal.ShortCircuit(metric=metric),
        "compare_methods": compared,
        "compare_methods logits": partial(compared, measure="logits"),
        "late_layers": lambda: interp.lenses.LateLayers(frequencies=frequencies),
        "steering_curve": lambda: _steered(model, metric),
    }
    found: Worlds = {name: lambda make=make: World.of(make(), model, pairs) for name, make in asked.items()}  # type: ignore[misc]
    found["evidence"] = partial(_pointing, model, pairs)
    for rules in ("", *PRESETS):
        found[f"agreement {rules}".strip()] = partial(_agreeing, model, pairs, metric, rules)
    return found


def _steered(model: interp.HookedTransformer, metric: Metric) -> Question:
    """By random directions after every layer, half as long as the stream."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(model.cfg.n_layers, 1, model.cfg.d_model, generator=draw)
    each = [
        interp.causal.Subspace(f"blocks.{layer}.hook_resid_post", 7 * row / row.norm())
        for layer, row in enumerate(rows)
    ]
    return interp.causal.SteeringCurve(each, strengths=(-1.0, 0.5, 1.0, 2.0), metric=metric, random=0)


def _pointing(model: interp.HookedTransformer, pairs: Batch | Pairs) -> World:
    """How well gradient times input points at the name that is the answer."""
    assert isinstance(pairs, Batch) and pairs.answer is not None
    batch = replace(pairs, corrupt=None)
    attribution = interp.token_attribution(model, batch, method="gradient_x_input")
    found = interp.tokens.evidence(attribution, batch.tokens == pairs.answer[:, None])
    names = found.score.values.tolist()

    def finish(merged: Partial) -> xr.Dataset:
        assert isinstance(merged, Rows)
        each = merged.rows["each"].unbind(1)
        scores = {
            name: Score.of(Moments.of(x), "", fewest=FEWEST_MASSES)
            for name, x in zip(names, each, strict=True)
        }
        return scored("evidence", scores, ())

    return World(
        ByRow("evidence", Unshared(nothing), Rows, finish),
        {"each": torch.from_numpy(found.each.values.copy())},
    )


def _agreeing(model: interp.HookedTransformer, pairs: Batch | Pairs, metric: Metric, rules: str) -> World:
    """How well estimates by a gradient agree with patching, over half of the heads."""
    question = interp.causal.AttributionPatch(
        "z",
        metric=metric,
        by=("layer", "head"),
        each=False,
        rules=rules or (),
        agreement=16,
        agreement_prompts=None,
    )
    world = World.of(question, model, pairs)
    label = world.analysis.result

    def finish(merged: Partial) -> xr.Dataset:
        return label(merged).agreement.to_dataset("estimate").rename(coefficient="score")

    return replace(world, analysis=replace(world.analysis, result=finish))


def paired_answers(pairs: Batch | Pairs) -> Tensor:
    """The answer of every pair."""
    assert isinstance(pairs, Batch) and pairs.answer is not None
    return pairs.answer


def _of_rows(model: interp.HookedTransformer, random: interp.tasks.RepeatedTokens) -> Worlds:
    """What asks for rows of tokens alone."""
    batch = interp.Batch(random.tokens(model.cfg.d_vocab, 0), bos=True)
    attention_only = interp.HookedTransformer.from_pretrained("demo-attn-2l")
    other = interp.Batch(random.tokens(attention_only.cfg.d_vocab, 0), bos=True)
    return {
        "heads": lambda: World.of(replace(head_scores(model.cfg, random), result=plain), model, batch),
        "attention_entropy": lambda: World.of(interp.attention.AttentionEntropy(), model, batch),
        "dispersion": lambda: World.of(interp.attention.Dispersion(), model, batch),
        "logit_lens": lambda: _by_depth(World.of(interp.lenses.LogitLens(), model, batch)),
        "dictionary_quality": lambda: World.of(_dictionary(model, batch), model, batch),
        "in_context": lambda: World.of(interp.dynamics.InContext(early=2, late=8), model, batch),
        "term_importance": lambda: World.of(interp.residual.TermImportance(), attention_only, other),
    }


def _of_facts(model: interp.HookedTransformer, pool: int) -> Worlds:
    """What asks for a subject and its object."""
    facts, tokenizer = interp.tasks.fact_prompts()[:pool], model.text.tokenizer
    assert tokenizer is not None
    subjects = [question.fact.subject for question in facts]
    answers = [tokenizer.encode(question.answer)[0] for question in facts]
    trace = partial(interp.causal.CausalTrace, subjects, answers, sigma=0.5, samples=2)
    return {
        "causal_trace": lambda: World.of(trace(), model, [question.prompt for question in facts]),
        "edit_table": lambda: _edited(model, pool),
        "align": lambda: _aligned(model, pool),
    }


def _of_texts(model: interp.HookedTransformer, texts: Sequence[str]) -> Worlds:
    """What asks for texts of several lengths, or for the ends of texts."""
    halves = [(text[: len(text) // 2], text[len(text) // 2 :]) for text in texts]
    batch, span = interp.causal.continuations(model, halves)
    ids = [model.text.ids(text) for text in texts]
    lengths = np.random.default_rng(0).integers(6, 1 + min(map(len, ids)), len(texts))
    rows = interp.Batch.of([each[:n] for each, n in zip(ids, lengths.tolist(), strict=True)])
    return {
        "attention_by_depth": lambda: World.of(interp.attention.AttentionByDepth(recent=2), model, rows),
        "steering_curve loss": lambda: World.of(
            _steered(model, interp.metrics.next_token_loss()), model, texts
        ),
        "recall": lambda: World.of(interp.causal.Recall(span, [0, 1, 2, 3]), model, batch),
        "compare_lenses": lambda: World.of(
            interp.lenses.CompareLenses({"logit lens": None}, others={"logit lens": _Doubled()}), model, texts
        ),
        "top_examples": lambda: _by_token(interp.features.TopExamples("L1.post"), model, rows),
    }


def _of_models(model: interp.HookedTransformer, pairs: Batch | Pairs, texts: Sequence[str]) -> Worlds:
    """What compares two models: this one, and the same after a few steps on sentences with the names exchanged."""
    tuned, batch = _fine_tuned(model, [text.replace(" to ", " from ") for text in texts[:32]]), pairs
    if isinstance(batch, Batch):
        batch = replace(batch, corrupt=None)
    metric, parts = interp.logit_difference(), ["L0H1", "L1.attn", "L2.mlp", "unembed"]
    asked: dict[str, Question] = {
        "diff": interp.editing.Diff(tuned, parts="head"),
        "diff logits": interp.editing.Diff(tuned, metric=metric, parts="head"),
        "diff_interactions": interp.editing.DiffInteractions(tuned, parts),
        "activation_difference": interp.editing.ActivationDifference(tuned),
    }
    found: Worlds = {name: partial(World.of, question, model, batch) for name, question in asked.items()}
    return found | {"changed_tokens": partial(World.of, interp.editing.ChangedTokens(tuned), model, texts)}


@torch.enable_grad()
def _fine_tuned(model: interp.HookedTransformer, texts: Sequence[str]) -> Transformer:
    """The model after ten steps on these texts."""
    network = copy.deepcopy(model.transformer).requires_grad_(True)
    network.tie()
    batch = model.text.batch(list(texts))
    optimiser = torch.optim.AdamW(network.parameters(), lr=3e-4)
    for _ in range(10):
        logits = network(batch.tokens, keep=batch.keep)
        loss = interp.model.mean_next_token_loss(logits, batch.tokens, batch.keep)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return network.requires_grad_(False)


class _Doubled:
    """Another lens: every state and its numbers turned by one place."""

    def __call__(self, site: str, state: Tensor) -> Tensor:
        return state + state.roll(1, -1)

    def check(self, model: Transformer, sites: Sequence[str]) -> None:
        return


def _by_token(question: interp.features.TopExamples, model: interp.HookedTransformer, batch: Batch) -> World:
    """The shares and means per token of a site's cells, without the lists of their largest places."""
    world = World.of(question, model, batch)
    reduction = world.analysis.keep
    assert isinstance(reduction, Several)
    sums = reduction.reductions["sums"]

    def finish(merged: Partial) -> xr.Dataset:
        assert isinstance(merged, Means)
        found = {
            name: per_token(merged, part, "") for name, part in (("density", "active"), ("mean", "total"))
        }
        cells = {
            key: (("score", "cell"), torch.stack([getattr(one, key) for one in found.values()]).numpy())
            for key in ("value", "low", "high")
        }
        return xr.Dataset(cells, {"score": list(found)})

    return replace(world, analysis=replace(world.analysis, keep=sums, result=finish))


def _edited(model: interp.HookedTransformer, pool: int) -> World:
    """The scores of one editor over single edits of facts."""
    facts, tokenizer = interp.tasks.fact_prompts()[:pool], model.text.tokenizer
    assert tokenizer is not None
    answers = [tokenizer.encode(question.answer)[0] for question in facts]
    cases = [
        interp.editing.EditCase(
            question.prompt, answers[(i + 1) % len(answers)], question.fact.subject,
            {"neighbour": ((facts[(i + 7) % len(facts)].prompt, answers[(i + 7) % len(facts)]),)},
        )
        for i, question in enumerate(facts)
    ]  # fmt: skip

    def shift(model: Model, case: interp.editing.EditCase) -> interp.editing.WeightEdit:
        return interp.editing.shift_edit(model, case.prompt, answer=case.answer, layer=2, eta=0.5)

    table = interp.editing.edit_table(
        model, cases, {"shift": shift}, text=[question.prompt for question in facts[:8]],
        continuation=interp.editing.Continuation(length=24),
    )  # fmt: skip
    editors, names = (table[dim].values.tolist() for dim in ("editor", "score"))
    each = torch.from_numpy(table.each.transpose("case", "editor", "score").values.copy())
    each[..., -1] = each[..., -1].log()  # perplexity: the loss

    def finish(merged: Partial) -> xr.Dataset:
        assert isinstance(merged, Rows)
        values = merged.rows["each"].movedim(0, -1)
        return labelled_scores(values, editors, names, [""] * values.shape[-1])

    analysis = ByRow("edit_table", Unshared(nothing), Rows, finish)
    return World(analysis, {"each": each})


def _aligned(model: interp.HookedTransformer, pool: int) -> World:
    """The scores of directions for capitals, and of their nulls, at the last token; the pool is the held-out pairs."""
    task = interp.tasks.Facts(8 * pool, phrasings={"capital": ["The capital of {subject} is"]})
    clean, corrupt = interp.causal.batches(model, task.pairs(model.text.tokenizer))
    alike = (clean.lengths == clean.lengths.mode().values).nonzero()[:, 0][: pool + 100]
    source, base = (batch.rows(alike).trimmed() for batch in (clean, corrupt))
    held = [i < pool for i in range(len(alike))]
    result = interp.causal.align(model, base, source, pos=[-1], rank=8, held_out=held)
    metrics = metrics_of(source)

    def finish(merged: Partial) -> xr.Dataset:
        assert isinstance(merged, Rows)
        each = merged.rows["each"]
        dims = tuple(str(dim) for dim in result.value.dims[:-1])
        return scored("align", estimates(each, torch.zeros(each.shape[1:]), metrics), dims)

    return World(
        ByRow("align", Unshared(nothing), Rows, finish), {"each": torch.from_numpy(result.each.values.copy())}
    )


def nothing(model: Transformer, batch: Batch) -> Mapping[str, Tensor]:
    """A world that was computed elsewhere asks for no pass."""
    raise NotImplementedError


def separation(shares: Sequence[float] = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)) -> dict[int, float]:
    """How often Newcombe's interval of a balanced accuracy holds the mean of both shares, by the prompts of both kinds.

    Exact: over all counts of right ones among half of the prompts each, and the mean over all pairs of these shares.
    """
    found = {}
    for n in ROWS:
        half = n // 2
        right = torch.arange(half + 1)
        one, other = (each.flatten() for each in torch.meshgrid(right, right, indexing="ij"))
        low, high = intervals(torch.stack((one, half - other, half - one, other), -1), draws=1)
        law = torch.stack([torch.from_numpy(binom.pmf(right.numpy(), half, share)) for share in shares])
        held = []
        for (i, first), (j, second) in itertools.product(enumerate(shares), repeat=2):
            truth = (first + second) / 2
            inside = (low["balanced_accuracy"] <= truth) & (truth <= high["balanced_accuracy"])
            held.append(float((law[i][one] * law[j][other])[inside].sum()))
        found[n] = float(np.mean(held))
    return found


def _dictionary(model: interp.HookedTransformer, batch: Batch) -> interp.features.DictionaryQuality:
    """The question what a small autoencoder of the stream is worth."""
    site = "blocks.1.hook_resid_post"
    vectors = model.run_with_cache(batch.tokens, site)[1][site].flatten(0, 1)
    sae, _ = interp.features.train_dictionary(
        vectors, interp.features.TopK(8), 2 * model.cfg.d_model, steps=300
    )
    return interp.features.DictionaryQuality(sae, site)


def _by_depth(world: World) -> World:
    """The curves over depth of a lens of many prompts."""
    finish = world.analysis.result
    return replace(
        world, analysis=replace(world.analysis, result=lambda found: interp.lenses.by_depth(finish(found)))
    )


def _edges(model: interp.HookedTransformer, metric: Metric) -> xr.Dataset:
    """Scores of the edges on prompts outside the pool."""
    found = interp.causal.batches(model, interp.tasks.IndirectObjects(32).pairs(model.text.tokenizer))
    return interp.circuits.edge_attribution(model, *found, metric=metric)


def _judged(model: interp.HookedTransformer, metric: Metric) -> interp.circuits.EvaluateCircuit:
    """The question how good the circuit of the best hundred edges is."""
    scores = _edges(model, metric)
    values = abs(scores.value)
    kept = torch.from_numpy((values >= np.sort(values.values[~np.isnan(values.values)])[-100]).values)
    graph = interp.causal.EdgeGraph.of(model.cfg)
    circuit = interp.circuits.Circuit.of(graph, kept, torch.from_numpy(scores.value.values)).pruned()
    return interp.circuits.EvaluateCircuit(circuit, metric=metric, subsets=4, draws=2)


def main(
    names: Sequence[str] = (),
    repetitions: int = 1000,
    pool: int = 200,
    seed: int = 0,
    rows: Sequence[int] = ROWS,
    unbound: bool = False,
) -> None:
    """Simulate and print.

    Args:
        names: analyses; all of them without it.
        repetitions: draws of each number of rows.
        pool: rows of the world.
        seed: of the draws.
        rows: how many are drawn.
        unbound: intervals from three rows on of every score.
    """
    if unbound:
        unbind()
    torch.set_num_threads(1)
    model = interp.HookedTransformer.from_pretrained(MODEL)
    for name, make in worlds(model, pool).items():
        if names and name not in names:
            continue
        world = make()
        found = {n: coverage(world, n, repetitions, seed) for n in rows}
        for score in dict.fromkeys(score for each in found.values() for score in each):
            line = {str(n): found[n].get(score, (None, 0))[0] for n in rows}
            cells = max(found[n].get(score, (None, 0))[1] for n in rows)
            print(json.dumps({"bench": "coverage", "analysis": name, "score": score, "cells": cells,
                              "repetitions": repetitions, "coverage": line}), flush=True)  # fmt: skip
    if not names or "steering" in names:
        law = {str(n): round(share, 3) for n, share in separation().items()}
        print(json.dumps({"bench": "coverage", "analysis": "steering", "score": "value", "cells": 49,
                          "coverage": law}), flush=True)  # fmt: skip


if __name__ == "__main__":
    tyro.cli(main)
