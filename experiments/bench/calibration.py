"""Claim: a random head is called nothing, a real one the same on any rows, and p is below 0.05 for one in twenty.

Three tables. `p`: heads with the spectra of a model's own, between Haar frames of another seed, put beside the null of
`copying`; the share whose p is at most 0.05. `labels`: the label of every head over six layouts of the repeated rows.
`random`: the share of heads that get a label in models nobody trained, fifty of each architecture. One JSON line each.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import tyro

import interp
from interp.core.stats import wilson
from interp.model.transformer import Transformer
from interp.tasks import RepeatedTokens
from interp.weights.copying import random_copying
from interp.weights.head_circuits import HeadCircuits

MODELS = (("demo-4l", None), ("demo-attn-2l", "step1200"), ("demo-attn-2l", None))
"""Trained ones, and a checkpoint of the training of one."""
LAYOUTS = ((25, 4), (25, 2), (12, 2), (12, 8), (50, 2), (8, 3))
"""Period and repeats."""
DIMS: Mapping[str, Any] = {
    "n_layers": 2,
    "d_model": 64,
    "n_heads": 8,
    "d_head": 8,
    "d_vocab": 96,
    "n_ctx": 128,
    "mlp": interp.model.MLP(128),
}
TINY: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {},
    "attention-only": {"mlp": None},
    "rotary": {"position": interp.model.Rotary()},
    "no positions": {"position": interp.model.NoPosition()},
    "alibi": {"position": interp.model.Alibi()},
    "rms": {"norm": interp.model.RMSNorm()},
    "parallel": {"parallel": True},
    "grouped": {"n_kv_heads": 2},
    "tied": {"tied": True},
}
"""What differs from the first one."""


def calibrated(seed: int) -> Iterator[dict[str, object]]:
    """How often p is at most 0.05 for heads that are random."""
    for name, revision in MODELS:
        model = interp.HookedTransformer.from_pretrained(name, revision=revision)
        circuits = HeadCircuits(model, folded=True, embedding="effective")
        null, others = random_copying(circuits), random_copying(circuits, 96, seed)
        hits = (null.p(others.scores) <= 0.05).double()
        low, high = wilson(hits.mean(), len(hits))
        yield {
            "table": "p",
            "model": f"{name} {revision or ''}".strip(),
            "heads": len(hits),
            "null_sd": round(float(null.scores.std()), 3),
            "gaussian_sd": round(1.5 / model.cfg.head_width, 3),
            "share": round(float(hits.mean()), 4),
            "low": round(float(low), 4),
            "high": round(float(high), 4),
        }


def stable() -> Iterator[dict[str, object]]:
    """The labels of every head over the layouts that fit the context."""
    for name in ("demo-4l", "demo-attn-2l", "groundtruth-induction"):
        model = interp.HookedTransformer.from_pretrained(name)
        fit = [each for each in LAYOUTS if 1 + each[0] * each[1] <= model.cfg.n_ctx]
        found = [interp.heads(model, RepeatedTokens(*each)).label for each in fit]
        for part, *words in zip(
            found[0].part.values.ravel(), *(x.values.ravel() for x in found), strict=True
        ):
            if set(words) != {"none"}:
                yield {
                    "table": "labels",
                    "model": name,
                    "part": str(part),
                    "layouts": dict(Counter(map(str, words))),
                }


def random(models: int) -> Iterator[dict[str, object]]:
    """The share of heads with a label in models that were not trained."""
    plain = interp.model.ModelConfig(**DIMS)
    for name, changes in TINY.items():
        labels: list[str] = []
        for seed in range(models):
            torch.manual_seed(seed)
            model = interp.HookedTransformer(Transformer(replace(plain, **changes)))
            labels += (
                interp.heads(model, RepeatedTokens(seed=seed), sentences=None).label.values.ravel().tolist()
            )
        named = [label for label in labels if label != "none"]
        low, high = wilson(torch.tensor(len(named) / len(labels)).double(), len(labels))
        yield {
            "table": "random", "architecture": name, "heads": len(labels), "labels": dict(Counter(named)),
            "low": round(float(low), 4), "high": round(float(high), 4),
        }  # fmt: skip


def main(
    tables: Sequence[Literal["p", "labels", "random"]] = ("p", "labels", "random"),
    models: int = 50,
    seed: int = 1,
) -> None:
    """Compute and print.

    Args:
        tables: which of the three.
        models: untrained ones of every architecture.
        seed: of the random heads; the null's own is 0.
    """
    torch.set_num_threads(1)
    made: Mapping[str, Callable[[], Iterator[dict[str, object]]]] = {
        "p": lambda: calibrated(seed),
        "labels": stable,
        "random": lambda: random(models),
    }
    for name in tables:
        for line in made[name]():
            print(json.dumps({"bench": "calibration", **line}), flush=True)


if __name__ == "__main__":
    tyro.cli(main)
