"""Claim: the training loop has at least 90 % of the tokens/s of a bare torch loop on the same model and data.

The bare loop is what one would write in a notebook: forward, `F.cross_entropy`, backward, clip, AdamW, with one
learning rate and no log. Both loops draw the same rows and start from the same weights; ours also has a schedule and
three measurements on 8 held-out rows (3 % of the work; 1 % as the defaults have it), and "on disk" everything else.
"""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
import tyro
from measure import cpu_seconds, report, timing

from interp.lab.training import (
    Training,
    TrainingData,
    attention_only,
    config_for,
    train,
)
from interp.model import ModelConfig, Transformer
from interp.tasks import Place, RepeatedSequences

ROWS = 8
CLAIM = 1 / 0.9


def main(rounds: int = 7, steps: int = 32) -> None:
    """Measure two models.

    Args:
        rounds: timed rounds per system.
        steps: updates in a round.
    """
    torch.set_num_threads(1)
    data = RepeatedSequences(d_vocab=1024, width=128, low=8, high=60)
    for name, config in {
        "2 layers of attention, 64 wide": attention_only(2, data.d_vocab, data.width),
        "GPT shape, 4 layers, 128 wide": config_for("gpt-4l", data),
    }.items():
        assert isinstance(config, ModelConfig)
        training = Training(steps=steps, rows=ROWS, warm_up=0, log_every=steps // 2, evaluation_rows=ROWS)
        calls: dict[str, Callable[[], object]] = {
            "bare": partial(bare, config, data, steps, fused=False),
            "bare, fused AdamW": partial(bare, config, data, steps, fused=True),
            "interp": partial(train, config, data, training),
            "interp, on disk": partial(on_disk, config, data, training),
        }
        seconds = cpu_seconds(calls, rounds)
        tokens = steps * ROWS * data.width
        for system in calls:
            median = sorted(seconds[system])[rounds // 2]
            report(
                "training", system, f"{steps} updates of {ROWS} x {data.width} tokens, {name}",
                timing(seconds, system, "bare, fused AdamW"), tokens_per_s=round(tokens / median),
                claim=round(CLAIM, 3),
            )  # fmt: skip


def bare(
    config: ModelConfig, data: TrainingData, steps: int, *, fused: bool, rows: int = ROWS, device: str = "cpu"
) -> Transformer:
    """The loop without anything around it."""
    torch.manual_seed(0)
    model = Transformer(config).to(device)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05, fused=fused)
    for step in range(steps):
        tokens = data.batch(Place(0, step), rows).batch.tokens.to(device)
        logits = model(tokens)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
    return model


def on_disk(config: ModelConfig, data: TrainingData, training: Training) -> None:
    """Our loop with its folder: two checkpoints, the state and the finished model."""
    kept = Training(**{**vars(training), "checkpoints": 2})
    with tempfile.TemporaryDirectory() as folder:
        train(config, data, kept, out=Path(folder) / "run")


if __name__ == "__main__":
    tyro.cli(main)
