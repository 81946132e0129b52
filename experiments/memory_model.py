"""Train `demo-memory`: a model whose memorised strings go through late attention, and whose copying does not.

Where does a large model keep what it recites? With late attention short-circuited, memorised text is lost and other
tasks stay (Menta et al. 2025, arXiv:2501.05078); no other demo model shows that. Here it is made so by the order of
training: two layers learn to copy what repeats in the prompt and are frozen; two more layers, above them, learn
strings of random symbols by heart among such prompts. The last table asks the finished model layer by layer.

Run: `interp run experiments/memory_model.py`; the model is the folder `demo-memory` of the record, minutes on one core.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import tokenizers
import torch
from jaxtyping import Bool, Int
from matplotlib.figure import Figure
from torch import Tensor, nn

import interp
from interp import Batch
from interp.causal import recall
from interp.families import load, native
from interp.model import MLP, LayerNorm, ModelConfig, Rotary, Transformer, mean_next_token_loss
from interp.runs.record import Record
from interp.zoo.groundtruth import SYMBOLS

WIDTH = 40
"""Tokens of a row, the beginning of sequence with it."""
PREFIX = 12
"""Symbols of a memorised string that are given; the others are to be recited."""
PERIODS = (6, 20)
"""Lengths of what repeats in a prompt, the second excluded."""


@dataclass(frozen=True)
class MemoryModel:
    """How long to train, and how much to remember."""

    strings: int = 64
    """Strings to learn by heart."""
    copying_steps: int = 2000
    """Of the lower two layers, on repetitions alone."""
    memory_steps: int = 2500
    """Of the upper two, on as many repetitions as strings."""
    rows: int = 64
    """Of a step."""
    learning_rate: float = 3e-3
    """Peak of the cosine."""
    tested: int = 200
    """Repetitions that the finished model copies."""
    seed: int = 0
    """Of weights and data."""


def main(job: MemoryModel, record: Record) -> None:
    """Train twice, ask, and keep the model with its card."""
    trained = record.step("weights", lambda: weights(job))
    model = Transformer(config(4)).requires_grad_(False).eval()
    model.load_state_dict(trained)
    strings = memorised(job)
    hooked = interp.HookedTransformer(model, name="demo-memory")
    record.model(hooked)
    table = record.step("recall", lambda: asked(hooked, strings, job))
    record.table("recall", table)
    record.say(table.round(3).to_string(index=False))
    record.figure("recall", figure(table))
    keep(record.folder / "demo-memory", model, strings, table, job)


def config(n_layers: int) -> ModelConfig:
    """The lower half, or the whole."""
    return ModelConfig(
        n_layers=n_layers, d_model=64, n_heads=4, d_head=16, n_ctx=64, d_vocab=len(SYMBOLS), position=Rotary(),
        norm=LayerNorm(), mlp=MLP(d_mlp=256, act="gelu_new"),
    )  # fmt: skip


def memorised(job: MemoryModel) -> Int[Tensor, "n p"]:
    """The strings, each after a beginning of sequence."""
    symbols = np.random.default_rng([job.seed, 0]).integers(1, len(SYMBOLS), size=(job.strings, WIDTH - 1))
    return begun(symbols)


def begun(symbols: np.ndarray) -> Int[Tensor, "n p"]:
    """Rows that begin with the beginning of sequence."""
    return torch.from_numpy(np.concatenate((np.zeros((len(symbols), 1), dtype=np.int64), symbols), 1))


def repetitions(rng: np.random.Generator, rows: int) -> tuple[Int[Tensor, "n p"], Bool[Tensor, "n p"]]:
    """Different symbols over and over, and where what comes next has stood before."""
    periods = rng.integers(*PERIODS, size=rows)
    once = [rng.permutation(len(SYMBOLS) - 1)[:period] + 1 for period in periods]
    symbols = np.stack([np.resize(one, WIDTH - 1) for one in once])
    columns = torch.arange(WIDTH)
    return begun(symbols), columns > torch.from_numpy(periods)[:, None] + 1


def weights(job: MemoryModel) -> dict[str, Tensor]:
    """Two layers that copy, frozen; two above them that begin as nothing and learn the strings."""
    torch.manual_seed(job.seed)
    rng, strings = np.random.default_rng([job.seed, 1]), memorised(job)
    lower, whole = Transformer(config(2)), Transformer(config(4))
    fit(lower, list(lower.parameters()), lambda: repetitions(rng, job.rows)[0], job.copying_steps, job)
    whole.load_state_dict(whole.state_dict() | lower.state_dict())
    upper = dict(p for layer in (2, 3) for p in whole.block(layer).named_parameters(f"{layer}"))
    for name, value in upper.items():
        if ".out." in name:
            nn.init.zeros_(value)

    def mixed() -> Int[Tensor, "n p"]:
        known = strings[torch.from_numpy(rng.integers(len(strings), size=job.rows // 2))]
        return torch.cat((repetitions(rng, job.rows - len(known))[0], known))

    fit(whole.requires_grad_(False), list(upper.values()), mixed, job.memory_steps, job)
    return {name: value.detach() for name, value in whole.state_dict().items()}


def fit(
    model: Transformer,
    parameters: Sequence[nn.Parameter],
    rows: Callable[[], Int[Tensor, "n p"]],
    steps: int,
    job: MemoryModel,
) -> None:
    """AdamW with warm-up and a cosine, clipped, on these parameters alone."""
    adam = torch.optim.AdamW([p.requires_grad_() for p in parameters], weight_decay=0.01, betas=(0.9, 0.98))
    for step in range(steps):
        for group in adam.param_groups:
            group["lr"] = (
                job.learning_rate * min(1, (step + 1) / 100) * (1 + math.cos(math.pi * step / steps)) / 2
            )
        tokens = rows()
        loss = mean_next_token_loss(model(tokens), tokens)
        adam.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        adam.step()


def asked(model: interp.HookedTransformer, strings: Int[Tensor, "n p"], job: MemoryModel) -> pd.DataFrame:
    """Memorised strings and unseen repetitions, with every layer's attention short-circuited in turn."""
    span = (torch.arange(WIDTH) > PREFIX).expand(strings.shape)
    material = {
        "memorised strings": (strings, span),
        "unseen repetitions": repetitions(np.random.default_rng([job.seed, 2]), job.tested),
    }
    tables = []
    for name, (tokens, where) in material.items():
        found = recall(model, Batch(tokens), where, [0, 1, 2, 3, range(2, 4)], each=False)
        kept = interp.frame(found.sel(score=["exact_match", "token_accuracy", "loss"]))
        tables.append(kept.assign(material=name))
    return pd.concat(tables, ignore_index=True)


def figure(table: pd.DataFrame) -> Figure:
    """The share of tokens predicted, without attention in each layer."""
    picture, ax = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for shift, (name, rows) in zip(
        (-0.1, 0.1), table[table.score == "token_accuracy"].groupby("material"), strict=True
    ):
        at, value = np.arange(len(rows)) + shift, rows.value.astype(float)
        errors = np.maximum(0, [value - rows.low.astype(float), rows.high.astype(float) - value])
        ax.errorbar(at, value, yerr=errors, fmt="o", capsize=3, label=str(name))
    ax.set_xticks(range(len(rows)), ["nothing", *rows.part[1:]], rotation=20)
    ax.set(xlabel="attention that was short-circuited", ylabel="tokens predicted (share)", ylim=(-0.03, 1.03))
    ax.legend(loc="center left", bbox_to_anchor=(0.0, 0.6))
    return picture


def keep(
    folder: Path, model: Transformer, strings: Int[Tensor, "n p"], table: pd.DataFrame, job: MemoryModel
) -> None:
    """The folder that `interp.HookedTransformer.from_pretrained` reads: weights, tokenizer, card."""
    load.save(model, folder)
    alone = tokenizers.models.WordLevel({symbol: i for i, symbol in enumerate(SYMBOLS)}, unk_token=native.BOS)
    tokenizer = tokenizers.Tokenizer(alone)
    tokenizer.add_special_tokens([native.BOS])
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    shown = table[(table.score == "token_accuracy") & table.part.isin(["none", "L2.attn", "L3.attn"])]
    columns = (shown.material, shown.part, shown.value.astype(float).round(4), shown.n.astype(int))
    measured = {
        f"{material} {part}".replace(" ", "_"): {
            "value": value,
            "n": n,
            "definition": f"share of tokens predicted, {material}, attention short-circuited in: {part}",
        }
        for material, part, value, n in zip(*(column.tolist() for column in columns), strict=True)
    }
    card = {
        "model": "demo-memory",
        "measured": measured,
        "parameters": sum(p.numel() for p in model.parameters()),
        "memorised": ["".join(SYMBOLS[i] for i in row[1:]) for row in strings.tolist()],
        "prefix": PREFIX,
        "licence": "random symbols made for this package",
        "stages": [asdict(job)],
        "versions": {"torch": torch.__version__, "numpy": np.__version__},
        "date": date.today().isoformat(),
    }
    (folder / "card.json").write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
