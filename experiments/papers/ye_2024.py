"""Ye et al. 2024 (arXiv:2410.05258), Differential Transformer: the difference of two patterns."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from experiments.papers.claim import Claim, Measured, above, near, untestable
from experiments.papers.effort import Effort
from interp.lab import Differential
from interp.lab.differential import DifferentialAttention, lambda_init
from interp.lab.training import Training, train
from interp.model import MLP, ModelConfig, Rotary, Softmax, Transformer
from interp.model.tap import Read
from interp.passes import observe
from interp.tasks import AssociativeRecall

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
        Measured.exact(max(_off(model) for model, _, _ in trained)),
        near(0.0, 1e-5),
    )
    yield Claim(
        "recall of values by their keys, 8 pairs: accuracy minus that of softmax attention of the same size",
        "better retrieval among many distractors (0.85 and 0.55)",
        Measured.mean([ours - plain for _, ours, plain in trained], "seeds"),
        above(0.0),
        note="two layers of width 64, equal in parameters, updates and rows",
    )
    yield untestable(
        "equal loss with two thirds of the parameters or tokens",
        "65 % of parameters, 64 % of tokens",
        "a law of scale, from 0.8 to 13 billion parameters",
    )


def _trained(seed: int, effort: Effort) -> tuple[Transformer, float, float]:
    """A differential model, its accuracy, and that of softmax attention."""
    found = []
    steps = effort.of(700, least=30)
    plan = Training(steps=steps, rows=32, learning_rate=3e-3, warm_up=30, log_every=steps, seed=seed)
    for mixer in (Differential(), Softmax()):
        config = ModelConfig(2, 64, 4, TASK.width, TASK.d_vocab, mlp=MLP(128), position=Rotary(), mixer=mixer)
        found.append(train(config, TASK, plan))
    model = found[0].model
    assert isinstance(model, Transformer)
    ours, plain = (float(each.log.accuracy.iloc[-1]) for each in found)
    return model, ours, plain


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
