"""Claims about relations: vectors of a task, linear maps, directions that steer, and what a gradient would write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.causal import Subspace, function_vectors, linear_relation, steering
from interp.data.batch import Batch
from interp.findings.claim import Claim, Measured, Region
from interp.findings.setting import SEEDS, Setting
from interp.hooked import HookedTransformer
from interp.lenses import backward_lens
from interp.tasks import TRAINED_PHRASINGS, PairLists, fact_prompts, load_facts, load_word_pairs

TASKS = ("antonym", "present_past", "singular_plural")
"""Lists of word pairs on which function vectors are asked."""
RELATIONS = ("capital", "language", "currency")
"""Of which linear maps are made, one for each seed, and between which a direction steers."""
EXAMPLES = 6
"""Subjects from which a linear map is made."""
IMPRINTED = 0.99
"""The target is imprinted where its rank is beyond this share of the vocabulary."""
RANDOM = 5
"""Random directions of the same length beside each that steers."""


def does_the_task(setting: Setting) -> Measured:
    """Accuracy with a function vector on lists with shuffled outputs, minus that with vectors of random heads."""
    listed = load_word_pairs()
    hits, null, heads = [], [], ""
    for seed in SEEDS:
        found = function_vectors(
            setting.model, {task: listed[task] for task in TASKS}, random=9, lists=PairLists(seed=seed), seed=seed,
            top=max(1, min(10, setting.few)),
        )  # fmt: skip
        one = found.sel(setting="shuffled labels", vector="function vector", score="accuracy").isel(layer=0)
        counts = [
            (round(float(value * n)), int(n))
            for value, n in zip(one["value"].values, one.n.values, strict=True)
        ]
        hits.append(torch.cat([torch.arange(n) < right for right, n in counts]))
        null.append(float(one.null.mean()))
        heads = ", ".join(found["heads"].values[:3].tolist())
    return Measured.share(hits, over="pairs", null=float(np.mean(null)), about=heads)


def is_linear(setting: Setting) -> Measured:
    """Share of subjects for which a linear map gives the model's answer, minus that for another subject's answer."""
    hits, nulls = [], []
    for seed, relation in zip(SEEDS, RELATIONS, strict=True):
        pairs = [(fact.subject, f" {fact.object}") for fact in load_facts() if fact.relation == relation]
        template = TRAINED_PHRASINGS[relation][0].format(subject="{input}") + "{output}"
        found = linear_relation(setting.model, pairs, template, examples=EXAMPLES, seed=seed)
        known = found.known.values
        hits.append(torch.from_numpy((found.predicted.isel(layer=0) == found.answered).values[known].copy()))
        nulls.append(float(found.null.sel(score="faithfulness").isel(layer=0)))
    return Measured.share(hits, over="subjects", null=float(np.mean(nulls)))


def steers(setting: Setting) -> Measured:
    """How far a direction moves the answer from one relation to another, minus what random ones of its length do."""
    values, nulls = [], []
    for seed in SEEDS:
        towards, away = RELATIONS[seed], RELATIONS[(seed + 1) % len(RELATIONS)]
        value, null = _steered(setting, towards, away, seed)
        values.append(value)
        nulls.append(null)
    return Measured.mean(values, "countries", null=nulls)


def _steered(setting: Setting, towards: str, away: str, seed: int) -> tuple[Tensor, Tensor]:
    """Of countries that had no part in the direction: what it and random ones do to the difference of both answers."""
    by_subject = {
        relation: {fact.subject: fact.object for fact in load_facts() if fact.relation == relation}
        for relation in (towards, away)
    }
    countries = [name for name in by_subject[towards] if name in by_subject[away]]
    half = np.random.default_rng(seed).permutation(len(countries)) % 2
    network, layer = setting.model.transformer, setting.model.cfg.n_layers // 2
    values, nulls = [], []
    for side in (0, 1):
        finders = [name for name, other in zip(countries, half, strict=True) if other == side]
        asked = [name for name, other in zip(countries, half, strict=True) if other != side]
        prompts = {
            relation: [TRAINED_PHRASINGS[relation][0].format(subject=name) for name in finders]
            for relation in (towards, away)
        }
        site = f"blocks.{layer}.hook_resid_post"
        found = steering(setting.model, prompts[towards], prompts[away], site=site, test_share=0.0)
        direction = torch.from_numpy(found.directions.values.reshape(-1).copy()).to(network.dtype)
        questions = [TRAINED_PHRASINGS[away][0].format(subject=name) for name in asked]
        batch = setting.model.text.batch(questions)
        answers = [
            torch.tensor(
                [
                    setting.next_id(question, f" {by_subject[kind][name]}")
                    for question, name in zip(questions, asked, strict=True)
                ]
            )
            for kind in (towards, away)
        ]

        gap = partial(_gap, setting, batch, answers, site)
        base = gap(None)
        generator = torch.Generator().manual_seed(seed)
        others = torch.randn(RANDOM, len(direction), generator=generator).to(direction)
        others = others * (direction.norm() / others.norm(dim=1, keepdim=True))
        values.append(gap(direction) - base)
        nulls.append(torch.stack([gap(other) - base for other in others]).mean(0))
    return torch.cat(values), torch.cat(nulls)


def _gap(
    setting: Setting,
    batch: Batch,
    answers: Sequence[Int[Tensor, "n"]],
    site: str,
    vector: Float[Tensor, "d"] | None,
) -> Float[Tensor, "n"]:
    """The logit of the first answer minus that of the second, with a vector added at a site."""
    edits = [] if vector is None else [Subspace(site, vector[None]).add(1.0)]
    ends = setting.ends(batch, edits)
    first, second = (ends.gather(1, each[:, None])[:, 0] for each in answers)
    return first - second


def imprints(setting: Setting) -> Measured:
    """Share of layers where a step towards an answer would write it into W_out, minus that of an unrelated vector."""
    asked = fact_prompts()

    def share(model: HookedTransformer, rows: int, seed: int) -> Tensor:
        draw = np.random.default_rng(seed)
        chosen = [asked[i] for i in draw.choice(len(asked), rows, replace=False)]
        told = setting.answer_ids([asked[i] for i in draw.choice(len(asked), rows)])
        batch = setting.model.text.batch([fact.prompt for fact in chosen])
        found = backward_lens(model, batch, told.tolist(), matrices=["W_out"], top=1).isel(matrix=0)
        ranks = found.target_rank.transpose("prompt", "layer", "pos").values
        return _written(ranks, batch.last(), model.cfg.d_vocab)

    values = setting.by_seed(lambda rows, seed: share(setting.model, rows, seed))
    about = ""
    if setting.is_small:
        about = f"of the same weights in another order: {float(share(setting.scrambled, 12, SEEDS[0]).mean()):.2f}"
    return Measured.mean(values, "prompts", null=1 - IMPRINTED, about=about)


def _written(ranks: np.ndarray, last: Int[Tensor, "b"], vocabulary: int) -> Float[Tensor, "b"]:
    """Of each prompt the share of layers where the target is among the least probable hundredth at the last token."""
    ends = torch.from_numpy(ranks.copy())[torch.arange(len(ranks)), :, last.cpu()]
    return (ends >= IMPRINTED * vocabulary).double().mean(1)


CLAIMS: Mapping[str, Claim] = {
    "function-vectors": Claim(
        "A sum of a few heads' outputs carries a task of word pairs.", "Todd et al. 2024, Function Vectors",
        "accuracy on lists with shuffled outputs when it is added", "with as many random heads", Region(0.1),
        "share of pairs", does_the_task,
    ),
    "linear-relations": Claim(
        "A linear map from the subject's state gives the model's answer.",
        "Hernandez et al. 2024, Linearity of Relation Decoding",
        "share of subjects that it answers as the model does", "another subject's answer", Region(0.3),
        "share of subjects", is_linear,
    ),
    "directions-steer": Claim(
        "A difference of means, added to the stream, moves a question from one relation to another.",
        "Rimsky et al. 2023; Turner et al. 2023, Activation addition",
        "change of the logit of the one relation's answer minus that of the other's",
        "with random directions of the same length", Region(0.5), "logits", steers,
    ),
    "gradients-imprint": Claim(
        "A training step towards an answer writes it into the MLPs of most layers.", "Katz et al. 2024, Backward Lens",
        "share of layers in whose W_out the answer is among the hundredth that the step raises most",
        "of an unrelated vector", Region(0.5), "share of layers", imprints,
    ),
}  # fmt: skip
