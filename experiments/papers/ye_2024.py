"""Ye et al. 2024 (arXiv:2410.05258), Differential Transformer: the difference of two patterns.

Their models are pretrained and retrieve needles from 4 000 tokens and more. Here two layers learn to recall values by
their keys; the queried pair is the needle, the other seven pairs are the noise. Both have four heads of 16 and as many
parameters; the article halves the heads and doubles their width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from experiments.papers.claim import Claim, Measured, above, below, near, untestable
from experiments.papers.effort import Effort
from interp.lab import Differential
from interp.lab.differential import DifferentialAttention, lambda_init
from interp.lab.training import Training, train
from interp.model import MLP, ModelConfig, Rotary, Softmax, Transformer
from interp.model.tap import Read
from interp.passes import observe
from interp.tasks import AssociativeRecall, Place

TASK = AssociativeRecall(d_vocab=48, pairs=8, queries=4)
PUBLISHED = (0.2, 0.3555, 0.4707)
"""lambda_init of the first three layers, to four places."""


def ye_2024(effort: Effort) -> Iterator[Claim]:
    """The constants, the sums of the rows, and recall beside softmax attention of the same size."""
    apart = [abs(lambda_init(layer) - known) for layer, known in enumerate(PUBLISHED)]
    yield Claim(
        "lambda_init of layers 0, 1, 2: largest distance from 0.2, 0.3555, 0.4707",
        "closed form: 0.8 - 0.6 exp(-0.3 l)",
        Measured.exact(max(apart)),
        near(0.0, 5e-5),
    )
    trained = [_trained(seed, effort) for seed in range(effort.of(4))]
    yield Claim(
        "rows of a trained pattern: largest distance of their sum from 1 - lambda",
        "closed form: 0",
        Measured.exact(max(_off(ours.model) for ours, _ in trained)),
        near(0.0, 1e-5),
    )
    yield Claim(
        "recall of values by their keys, 8 pairs: accuracy minus that of softmax attention of the same size",
        "better retrieval among many distractors (0.85 and 0.55)",
        Measured.mean([ours.accuracy - plain.accuracy for ours, plain in trained], "seeds"),
        above(0.0),
        note="two layers of width 64, equal in parameters, updates and rows; accuracy "
        + " and ".join(f"{sum(each) / len(each):.2f}" for each in _accuracies(trained)),
    )
    yield from _allocated(trained)
    yield untestable(
        "equal loss with two thirds of the parameters or tokens",
        "65 % of parameters, 64 % of tokens",
        "a law of scale, from 0.8 to 13 billion parameters",
    )


def _allocated(trained: Sequence[tuple[Recalling, Recalling]]) -> Iterator[Claim]:
    """The attention of queries on the pair that answers, and on the others."""
    text = "attention of the queried keys on {}, minus that of softmax attention (mean over heads)"
    note = "shares of the sizes of all weights of a query"
    both = [[_attention(each.model) for each in pair] for pair in trained]
    for i, (what, published, region) in enumerate((
        ("the pair that answers", "more attention on answer spans", above(0.0)),
        ("the other seven pairs", "less attention on noise", below(0.0)),
    )):  # fmt: skip
        apart = [ours[i] - plain[i] for ours, plain in both]
        yield Claim(text.format(what), published, Measured.mean(apart, "seeds"), region, note=note)


@dataclass(frozen=True)
class Recalling:
    """A trained model, and its accuracy on rows held out."""

    model: Transformer
    accuracy: float


def _trained(seed: int, effort: Effort) -> tuple[Recalling, Recalling]:
    """A differential model, and one of softmax attention."""
    found = []
    steps = effort.of(700, least=30)
    plan = Training(steps=steps, rows=32, learning_rate=3e-3, warm_up=30, log_every=steps, seed=seed)
    for mixer in (Differential(), Softmax()):
        config = ModelConfig(2, 64, 4, TASK.width, TASK.d_vocab, mlp=MLP(128), position=Rotary(), mixer=mixer)
        done = train(config, TASK, plan)
        assert isinstance(done.model, Transformer)
        found.append(Recalling(done.model, float(done.log.accuracy.iloc[-1])))
    return found[0], found[1]


def _accuracies(trained: Sequence[tuple[Recalling, Recalling]]) -> list[list[float]]:
    return [[pair[i].accuracy for pair in trained] for i in range(2)]


def _attention(model: Transformer) -> tuple[float, float]:
    """Mean share of a queried key's attention on its pair in the row, and on the other pairs."""
    tokens = TASK.batch(Place(0, None), 64).batch.tokens
    end = 1 + 2 * TASK.pairs
    columns = list(range(end, TASK.width, 2))  # the queried keys, each before its value
    same = tokens[:, columns, None] == tokens[:, None, 1:end:2]  # [b q pair]
    reads = [Read(f"blocks.{layer}.attn.hook_pattern") for layer in range(model.config.n_layers)]
    trace = observe(model, tokens, reads).trace
    pattern = torch.cat([trace[read][:, :, columns] for read in reads], 1).abs()  # [b (layer head) q k]
    sizes = pattern / pattern.sum(-1, keepdim=True)
    pairs = sizes[..., 1:end].unflatten(-1, (TASK.pairs, 2)).sum(-1)  # key and value of a pair
    answer = (pairs * same[:, None]).sum(-1)
    return float(answer.mean()), float((pairs.sum(-1) - answer).mean())


def _off(model: Transformer) -> float:
    """The largest distance of a row's sum from 1 - lambda."""
    rows = torch.randint(1, TASK.d_vocab, (4, TASK.width), generator=torch.Generator().manual_seed(0))
    apart = []
    for layer in range(model.config.n_layers):
        attention, read = model.block(layer).attn, Read(f"blocks.{layer}.attn.hook_pattern")
        assert isinstance(attention, DifferentialAttention)
        sums = observe(model, rows, [read]).trace[read].sum(-1)
        apart.append(float((sums - (1 - attention.share().detach())).detach().abs().max()))
    return max(apart)
