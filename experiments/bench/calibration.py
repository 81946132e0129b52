"""Claim: a random head is called nothing, a real one the same on any rows, and p is below 0.05 for one in twenty.

Four tables. `scores`: every score that has a p, in models that nobody trained, of nine architectures: the share whose p
is at most 0.05, with Wilson's interval. `p`: heads with the spectra of a model's own, between Haar frames of another
seed, put beside the null of `copying`; the share whose p is at most 0.05. `labels`: the label of every head over six
layouts of the repeated rows. `random`: the share of heads that get a label in models nobody trained, fifty of each
architecture. One JSON line each.
"""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import tyro
import xarray as xr

import interp
from interp.core.stats import wilson
from interp.model.transformer import Transformer
from interp.tasks import SHORT_SENTENCES, RepeatedTokens
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


ROWS = RepeatedTokens(period=8, repeats=3, rows=4)
MANY: Mapping[str, int] = {"n_heads": 32, "d_head": 4}
"""The heads of the models of `scores`: as many as a model of some size has."""
RANDOM = 5
"""Random heads beside each of 32: of 161 ranks, both ends of four each are a share of .0497."""
SENTENCES = replace(SHORT_SENTENCES, rows=16)
"""Few draws: the scores need not be precise, only alike."""


def of_heads(model: interp.HookedTransformer, seed: int) -> xr.Dataset:
    """On repeats, in sentences and by the weights."""
    return interp.heads(
        model, repeats=replace(ROWS, seed=seed), sentences=replace(SENTENCES, seed=seed), random=RANDOM
    )


def of_copying(model: interp.HookedTransformer, seed: int) -> xr.Dataset:
    """Eigenvalues and ranks; of what previous-token heads there are, at random."""
    generator = torch.Generator().manual_seed(seed)
    previous = torch.rand(model.cfg.n_layers, model.cfg.n_heads, generator=generator)
    return interp.copying(
        model, previous=xr.DataArray(previous.numpy(), dims=("layer", "head")), random=RANDOM, sample=64
    )


def of_late_layers(model: interp.HookedTransformer, seed: int) -> xr.Dataset:
    """The cosine with the average token, under frequencies of a power law."""
    generator = torch.Generator().manual_seed(seed)
    d_vocab = model.cfg.d_vocab
    tokens = torch.randint(d_vocab, (8, 12), generator=generator)
    frequencies = torch.rand(d_vocab, generator=generator).pow(-0.7)
    found = interp.lenses.late_layers(model, tokens, 0, frequencies=frequencies)
    return found[["p"]].sel(score=["cosine"])


def of_probes(model: interp.HookedTransformer, seed: int) -> xr.Dataset:
    """Probes for labels that nobody knows, one and four neurons."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(model.cfg.d_vocab, (150, 8), generator=generator)
    labels = torch.rand(150, generator=generator) < 0.5
    found = interp.features.probe_neurons(
        model, tokens, labels, site="resid_post", sizes=(1, 4), shuffles=19, seed=seed
    )
    return found[["p"]]


def of_recovery(model: interp.HookedTransformer, seed: int) -> xr.Dataset:
    """Edges drawn at random, said to be planted, sixty times."""
    generator = torch.Generator().manual_seed(seed)
    clean, corrupt = torch.randint(model.cfg.d_vocab, (2, 4, 8), generator=generator)
    scores = interp.circuits.edge_attribution(model, clean, corrupt, metric=interp.logit_difference(0, 1))
    edges = np.array(list(interp.causal.EdgeGraph.of(model.cfg).names()))
    drawn = [edges[torch.randperm(len(edges), generator=generator)[:40].numpy()] for _ in range(60)]
    return xr.concat([interp.circuits.recovery([scores], list(each))[["p"]] for each in drawn], "draw")


def of_steering(model: interp.HookedTransformer, seed: int) -> xr.Dataset:
    """Differences of prompts of one kind, beside random directions, and beside differences of the same prompts."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(model.cfg.d_vocab, (44, 8), generator=generator)
    found = interp.causal.steering(model, tokens[:20], tokens[20:40], test_share=0.0, shuffles=39, seed=seed)
    layers = range(model.cfg.n_layers)
    each = [interp.causal.Subspace.of_result(found, layer=layer) for layer in layers]
    random = torch.randn(len(each), 1, model.cfg.d_model, generator=generator)
    draws = [
        replace(a, directions=row * a.directions.norm() / row.norm())
        for a, row in zip(each, random, strict=True)
    ]
    shuffled = [torch.from_numpy(found.shuffled.sel(layer=layer).values) for layer in layers]
    asked = partial(
        interp.causal.steering_curve,
        model,
        tokens[40:],
        strengths=[1.0],
        metric=interp.logit_difference(0, 1),
        seed=seed,
    )
    curves = {
        "random beside random": asked(draws), "shuffled beside shuffled": asked(each, beside=shuffled),
        "shuffled beside random": asked(each),
    }  # fmt: skip
    parts = [
        p.p.assign_coords(score=[f"{name}: {score}" for score in p.score.values])
        for name, p in curves.items()
    ]
    return xr.concat(parts, "score").to_dataset(name="p")


SUBJECTS: Mapping[str, Callable[[interp.HookedTransformer, int], xr.Dataset]] = {
    "heads": of_heads, "copying": of_copying, "late_layers": of_late_layers,
    "probe_neurons": of_probes, "recovery": of_recovery,
    "steering_curve": of_steering,
}  # fmt: skip


def scores(
    models: int, subjects: Sequence[str] = (), architectures: Sequence[str] = ()
) -> Iterator[dict[str, object]]:
    """How often p is at most 0.05 in models that were not trained, with a tokenizer that knows names and numbers."""
    demo = interp.HookedTransformer.from_pretrained("demo-4l")
    plain = interp.model.ModelConfig(**{**DIMS, **MANY, "d_vocab": demo.cfg.d_vocab})
    for subject, name in itertools.product(subjects or SUBJECTS, architectures or TINY):
        changes = TINY[name]
        if "n_kv_heads" in changes:
            changes = {**changes, "n_kv_heads": MANY["n_heads"] // 4}  # of four, as there
        found: dict[str, list[float]] = {}
        for seed in range(models):
            torch.manual_seed(seed)
            model = interp.HookedTransformer(Transformer(replace(plain, **changes)), demo.text.tokenizer)
            for score, p in SUBJECTS[subject](model, seed).p.groupby("score"):
                found.setdefault(str(score), []).extend(p.values[~np.isnan(p.values)].tolist())
        for score, each in found.items():
            hits = torch.tensor(each) <= 0.05
            if len(hits):
                low, high = wilson(hits.double().mean(), len(hits))
                yield {
                    "table": "scores", "question": subject, "score": score, "architecture": name, "n": len(hits),
                    "share": round(float(hits.double().mean()), 4),
                    "low": round(float(low), 4), "high": round(float(high), 4),
                }  # fmt: skip


def calibrated(seed: int) -> Iterator[dict[str, object]]:
    """How often p is at most 0.05 for heads that are random."""
    for name, revision in MODELS:
        model = interp.HookedTransformer.from_pretrained(name, revision=revision)
        circuits = HeadCircuits(model, folded=True, embedding="effective")
        null, others = random_copying(circuits), random_copying(circuits, 9216, seed)
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
        found = [interp.heads(model, repeats=RepeatedTokens(*each)).label for each in fit]
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
                interp.heads(model, repeats=RepeatedTokens(seed=seed), sentences=None)
                .label.values.ravel()
                .tolist()
            )
        named = [label for label in labels if label != "none"]
        low, high = wilson(torch.tensor(len(named) / len(labels)).double(), len(labels))
        yield {
            "table": "random", "architecture": name, "heads": len(labels), "labels": dict(Counter(named)),
            "low": round(float(low), 4), "high": round(float(high), 4),
        }  # fmt: skip


def main(
    tables: Sequence[Literal["scores", "p", "labels", "random"]] = ("scores", "p", "labels", "random"),
    models: int = 50,
    seed: int = 1,
    subjects: Sequence[str] = (),
    architectures: Sequence[str] = (),
) -> None:
    """Compute and print.

    Args:
        tables: which of the four.
        models: untrained ones of every architecture.
        seed: of the random heads of `p`; the null's own is 0.
        subjects: questions whose scores are asked for; all of them without it.
        architectures: of `scores`; all of them without it.
    """
    torch.set_num_threads(1)
    made: Mapping[str, Callable[[], Iterator[dict[str, object]]]] = {
        "scores": lambda: scores(models, subjects, architectures),
        "p": lambda: calibrated(seed),
        "labels": stable,
        "random": lambda: random(models),
    }
    for name in tables:
        for line in made[name]():
            print(json.dumps({"bench": "calibration", **line}), flush=True)


if __name__ == "__main__":
    tyro.cli(main)
