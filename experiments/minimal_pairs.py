"""Which token attribution points at the word that decides? Minimal pairs of grammar, and a model that learned them.

A two-layer model learns number agreement past a noun of the other number ("The man near the doors" -> " was") and
without one. It is asked sentences of words it knows; every attribution of the right verb against the wrong one is
scored by the place that it gives to the noun that decides (Yin and Neubig 2022), against a random order.

Run: `interp run experiments/minimal_pairs.py`
"""

from dataclasses import dataclass, field
from functools import cached_property

import matplotlib.pyplot as plt
import pandas as pd
import torch
import xarray as xr
from matplotlib.figure import Figure

import interp
from interp import Batch
from interp.data.tokenizers import Tokenizer
from interp.lab.training import Training, Vocabulary, train
from interp.model import MLP, ModelConfig, Rotary
from interp.runs.record import Record
from interp.tasks import Agreement, Examples, Place, TaskPairs
from interp.tokens import METHODS, evidence, token_attribution


@dataclass(frozen=True)
class MinimalPairs:
    """How it is trained, and on how many sentences it is asked."""

    rows: int = 256
    """Sentences of the question."""
    training: Training = field(
        default_factory=lambda: Training(steps=400, rows=64, learning_rate=3e-3, log_every=200)
    )
    """How the model is trained."""
    seed: int = 1
    """Of the sentences of the question."""


@dataclass(frozen=True)
class Sentences:
    """Sentences with their verb, half of them with a noun between."""

    vocabulary: Vocabulary

    width = 8

    @property
    def d_vocab(self) -> int:
        """How many token ids there are."""
        return self.vocabulary.size

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Of the vocabulary."""
        return self.vocabulary.tokenizer

    def batch(self, place: Place, rows: int) -> Examples:
        """Rows of this place; the verb is determined."""
        generator = place.generator
        filled = []
        for phenomenon, count in (("distractor_agreement", rows - rows // 2), ("subject_verb", rows // 2)):
            pairs = Agreement(phenomenon, count).pairs(self.tokenizer, generator=generator)  # type: ignore[arg-type]
            filled += [
                [*row.tolist(), int(answer)]
                for row, answer in zip(pairs.clean_tokens, pairs.answer, strict=True)
            ]
        batch = Batch.of(filled, pad_id=self.vocabulary.tokenizer.pad_id, bos=True)
        lengths = torch.tensor([len(row) for row in filled])
        determined = torch.arange(batch.tokens.shape[1] - 1) == lengths[:, None] - 2
        return Examples(batch, determined)


def main(job: MinimalPairs, record: Record) -> None:
    """Train, attribute every way, score by the evidence; a table and a figure."""
    vocabulary = Vocabulary.learned(Agreement.texts(), 800)
    data = Sentences(vocabulary)
    config = ModelConfig(2, 64, 4, data.width, data.d_vocab, mlp=MLP(128), position=Rotary())
    trained = train(config, data, job.training)
    model = interp.HookedTransformer(trained.model, vocabulary.tokenizer)  # type: ignore[arg-type]
    record.model(model)
    pairs = Agreement("distractor_agreement", job.rows, job.seed).pairs(data.tokenizer)
    table = record.step("evidence", lambda: scores(model, pairs))
    record.table("evidence", table)
    record.figure("evidence", figure(table))
    record.say(f"verbs right on held-out sentences: {trained.log.accuracy.iloc[-1]:.3f}")
    record.say(table.round(3).to_string(index=False))


def scores(model: interp.HookedTransformer, pairs: TaskPairs) -> pd.DataFrame:
    """Every method's scores, a row each; of methods that name no answer, those of the model's reading as such."""
    batch = Batch(pairs.clean_tokens, bos=True).with_answers(pairs.answer, pairs.wrong)
    among = torch.arange(pairs.clean_tokens.shape[1]).expand(pairs.clean_tokens.shape) > 0
    found = []
    for name in METHODS:
        result: xr.Dataset = token_attribution(model, batch, method=name)
        each = interp.frame(evidence(result, pairs.spans["evidence"], among=among))
        found.append(each.assign(method=name))
    return pd.concat(found, ignore_index=True)


def figure(table: pd.DataFrame) -> Figure:
    """Share and reciprocal rank of the evidence as bars with intervals, a row per method; a line: random orders."""
    names = {
        "share": "share on the noun that decides",
        "reciprocal_rank": "mean reciprocal rank of that noun",
    }
    picture, axes = plt.subplots(1, 2, sharey=True, figsize=(9, 4.0), layout="constrained")
    order = table[table.score == "reciprocal_rank"].sort_values("value").method
    for ax, (score, label) in zip(axes, names.items(), strict=True):
        one = table[table.score == score].set_index("method").loc[order]
        ends = [(one.value - one.low).clip(lower=0), (one.high - one.value).clip(lower=0)]
        ax.barh(one.index, one.value, xerr=ends, color="#4393c3", capsize=2)
        ax.axvline(
            float(one.null.iloc[0]), color="black", linewidth=0.8, linestyle="--", label="random order"
        )
        ax.set_xlabel(label)
    axes[0].legend(fontsize="small")
    return picture
