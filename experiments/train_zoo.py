"""Train one of the demo models from plain-text files and generated sentences, and measure its card.

Question: does a model of under two million parameters, trained for minutes on a CPU, grow a real induction head, learn
a table of facts and the indirect-object task, and when does the phase change come?

    python experiments/train_zoo.py --model demo-attn-2l --texts a.txt b.txt

Every row of 128 tokens starts with BOS and is prose, a repeated random sequence, indirect-object sentences or facts.
Writes `<out>/<model>/` (weights, config, tokenizer, card, log, a few checkpoints around the phase change) and
`<series>/<model>/` (an fp16 checkpoint at every evaluation). Same seed, machine and thread count: same bytes.

The shipped models were trained in two stages, the second from a checkpoint of the first (`--start`); `stages` in a
card lists every parameter of both.
"""

import csv
import io
import json
import math
import os
import re
import time
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import numpy as np
import torch
import tyro
from jaxtyping import Int
from safetensors.torch import load_file, save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from tqdm import tqdm

from interp import tasks
from interp.core.files import write_atomically
from interp.families import load, native
from interp.model import MLP, LayerNorm, Learned, ModelConfig, Rotary, Transformer, mean_next_token_loss
from interp.zoo import measure

WIDTH = 128
CONFIGS: Mapping[str, ModelConfig] = {
    "demo-attn-2l": ModelConfig(
        n_layers=2, d_model=128, n_heads=8, d_head=16, n_ctx=WIDTH, d_vocab=1024, position=Rotary(), norm=LayerNorm()
    ),
    "demo-4l": ModelConfig(
        n_layers=4, d_model=160, n_heads=8, d_head=20, n_ctx=WIDTH, d_vocab=1024,
        position=Learned(), norm=LayerNorm(), mlp=MLP(d_mlp=640, act="gelu_new"),
    ),
    "demo-mlp-2l": ModelConfig(
        n_layers=2, d_model=96, n_heads=6, d_head=16, n_ctx=WIDTH, d_vocab=1024,
        position=Rotary(), norm=LayerNorm(), mlp=MLP(d_mlp=384, act="gelu_new"),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class TrainZoo:
    """Train a demo model and write its folder."""

    texts: tuple[Path, ...]
    """Plain-text prose files; a Project Gutenberg header and licence are stripped."""
    model: str = "demo-attn-2l"
    """Which model of CONFIGS to train."""
    steps: int = 4000
    """Optimiser steps."""
    batch: int = 32
    """Rows of 128 tokens per step."""
    learning_rate: float = 2e-3
    """Peak of the cosine."""
    warm_up: int = 100
    """Steps of linear warm-up."""
    weight_decay: float = 0.05
    """AdamW's decay of all matrices."""
    mix: tuple[float, float, float, float] = (0.25, 0.40, 0.20, 0.15)
    """Shares of prose, repeated random tokens, indirect objects and facts."""
    seed: int = 0
    """Seed of weights and data."""
    threads: int = 1
    """CPU threads of torch."""
    device: str = "cpu"
    """Where the model is trained; everything is measured on the CPU."""
    evaluate_every: int = 50
    """Steps between evaluations; each is a row of the log and a checkpoint of the series."""
    held_out_prose: float = 0.05
    """Share of each text, at its end, that is never trained on."""
    licence: str = "public-domain prose; generated sentences and fact table made for this package"
    """What the card says about the data."""
    shipped: int = 4
    """Checkpoints around the phase change that go into the model's folder."""
    start: Path | None = None
    """A checkpoint of a series to continue from, with a fresh optimiser and schedule; its log is continued."""
    out: Path = Path("interp/zoo/weights")
    """Where the finished model goes."""
    series: Path = Path("out/zoo")
    """Where the whole checkpoint series goes."""


@dataclass(frozen=True)
class Text:
    """One prose file without its frame."""

    title: str
    train: str
    validation: str


@dataclass(frozen=True)
class Probe:
    """The small held-out sample that is measured at every evaluation."""

    prose_bp: Int[Tensor, "b p"]
    repeats_bp: Int[Tensor, "b p"]
    indirect_objects: tuple[tasks.IndirectObject, ...]
    facts: tuple[tasks.FactPrompt, ...]


# --- text -----------------------------------------------------------------------------------------------------------


def read_text(path: Path, held_out: float) -> Text:
    """The prose of a file: no Gutenberg frame, line ends as newlines, the last `held_out` share split off."""
    raw = path.read_text(encoding="utf-8-sig").replace("\r\n", "\n")
    body = re.sub(r"\A.*?\*\*\* ?START OF TH[^\n]*\n", "", raw, count=1, flags=re.DOTALL)
    body = re.sub(
        r"(End of (the )?Project Gutenberg|\*\*\* ?END OF TH).*\Z", "", body, count=1, flags=re.DOTALL
    ).strip()
    found = {key: re.search(rf"^{key}: (.+)$", raw[:3000], re.MULTILINE) for key in ("Title", "Author")}
    title = ", ".join(match[1].strip() for match in found.values() if match) or path.stem
    cut = int(len(body) * (1 - held_out))
    return Text(title, body[:cut], body[cut:])


def train_tokenizer(texts: Iterable[Text], facts: Iterable[tasks.FactPrompt], size: int) -> Tokenizer:
    """A byte-level BPE over the training mix; every name of the indirect-object task becomes one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[native.BOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    sentences = [s.text for s in tasks.IndirectObjects(40_000).sentences(np.random.default_rng(0))]
    sentences += [fact.text for fact in facts] * 5
    tokenizer.train_from_iterator([*(text.train for text in texts), *sentences], trainer)
    split = [name for name in tasks.NAMES if len(tokenizer.encode(f" {name}").ids) != 1]
    if split or tokenizer.token_to_id(native.BOS) != 0:
        raise ValueError(
            f"every name must be one token and {native.BOS} id 0; these names are several: {split}"
        )
    return tokenizer


class Mixture:
    """Training rows: prose, repeated random tokens, indirect-object sentences and facts in fixed shares."""

    def __init__(self, tokenizer: Tokenizer, prose: Tensor, facts: Iterable[tasks.FactPrompt]) -> None:
        self.tokenizer = tokenizer
        self.prose = prose.numpy()
        self.facts = [np.array(e.ids) for e in tokenizer.encode_batch([f"{fact.text}\n" for fact in facts])]
        self.size = tokenizer.get_vocab_size()

    def batch(self, rng: np.random.Generator, rows: int, shares: tuple[float, ...]) -> Int[Tensor, "b p"]:
        """Rows of `WIDTH` tokens, each of a kind drawn by `shares`; all start with BOS (id 0)."""
        makers = (self._prose, self._repeats, self._indirect_objects, self._facts)
        kinds = rng.choice(len(makers), size=rows, p=shares)
        return torch.from_numpy(np.stack([[0, *makers[kind](rng)[: WIDTH - 1]] for kind in kinds]))

    def _prose(self, rng: np.random.Generator) -> np.ndarray:
        start = rng.integers(0, len(self.prose) - WIDTH)
        return self.prose[start : start + WIDTH]

    def _repeats(self, rng: np.random.Generator) -> np.ndarray:
        """A random period per row, so that no fixed distance does the work of matching."""
        period = int(rng.integers(8, 61))
        vocab = range(1, self.size)
        return tasks.RepeatedTokens(period, WIDTH // period + 1, 1).tokens(vocab, generator=rng)[0].numpy()

    def _indirect_objects(self, rng: np.random.Generator) -> np.ndarray:
        sentences = [f"{s.text}\n" for s in tasks.IndirectObjects(12).sentences(rng)]
        return np.concatenate([e.ids for e in self.tokenizer.encode_batch(sentences)])

    def _facts(self, rng: np.random.Generator) -> np.ndarray:
        return np.concatenate([self.facts[i] for i in rng.integers(0, len(self.facts), size=24)])


# --- training -------------------------------------------------------------------------------------------------------


def optimiser(model: Transformer, plan: TrainZoo) -> torch.optim.AdamW:
    """AdamW; matrices decay, biases and norm gains do not."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": plan.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=plan.learning_rate, betas=(0.9, 0.98))


def rate(step: int, plan: TrainZoo) -> float:
    """Learning rate of a step: linear warm-up, then a cosine to zero."""
    warm = min(1.0, (step + 1) / plan.warm_up)
    return plan.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * step / plan.steps))


def evaluate(model: Transformer, encode: measure.Encode, sample: Probe) -> dict[str, float]:
    """The columns of the log that are measured on held-out material, in float32 on the CPU."""
    model = deepcopy(model).cpu()
    losses = measure.token_losses(model, sample.prose_bp)
    margins = measure.answer_margins(model, encode, 0, sample.indirect_objects)
    return {
        "validation_loss": float(losses.mean()),
        "in_context_learning_score": measure.in_context_learning_score(losses, late=120, early=20),
        "best_induction_score": float(measure.induction_scores(model, sample.repeats_bp, period=25).max()),
        "facts_held_out_phrasing": float(measure.states(model, encode, 0, sample.facts).float().mean()),
        "indirect_object_unseen_pairs": float((margins > 0).float().mean()),
    }


def probe(validation: Int[Tensor, "n"], d_vocab: int) -> Probe:
    """A fixed sample: blocks of neighbouring prose windows, repeats, unseen name pairs, unseen phrasings."""
    windows = measure.prose_windows(validation, width=WIDTH, stride=100, bos=0)
    return Probe(
        windows[torch.arange(len(windows)) % 24 < 3],
        tasks.RepeatedTokens(25, 4, 10).tokens(d_vocab, bos=0, generator=np.random.default_rng(1)),
        tasks.IndirectObjects(192, held_out=True).sentences(np.random.default_rng(2)),
        tasks.fact_prompts(tasks.HELD_OUT_PHRASINGS)[::2],
    )


def earlier_log(start: Path | None) -> list[dict[str, float]]:
    """The log up to the checkpoint that training continues from; empty for a fresh start."""
    if start is None:
        return []
    reached = int(start.stem.removeprefix("step"))
    with start.with_name("training_log.csv").open(encoding="utf-8", newline="") as stream:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(stream)]
    return [row for row in rows if row["step"] <= reached]


def train(plan: TrainZoo, model: Transformer, data: Mixture, sample: Probe) -> list[dict[str, float]]:
    """Train in place; returns the log and writes it, with a checkpoint, at every evaluation."""
    log = earlier_log(plan.start)
    before = int(log[-1]["step"]) if log else 0
    rng = np.random.default_rng([plan.seed, before])
    adam = optimiser(model, plan)
    recent: list[float] = []
    for step in tqdm(range(plan.steps + 1), desc=plan.model, mininterval=10):
        if is_evaluated(step, plan):
            done = before + step
            record = {
                "step": done,
                "tokens": done * plan.batch * WIDTH,
                "train_loss": float(np.mean(recent or [np.nan])),
            }
            log.append(record | evaluate(model, encoder(data.tokenizer), sample))
            recent.clear()
            keep_progress(plan, model, log)
        if step < plan.steps:
            tokens = data.batch(rng, plan.batch, plan.mix).to(plan.device)
            recent.append(train_step(model, adam, tokens, rate(step, plan)))
    return log


def is_evaluated(step: int, plan: TrainZoo) -> bool:
    """Whether the model is measured before this step: regularly, at the end, and often in the first steps of all."""
    regular = step % plan.evaluate_every == 0 and (step > 0 or plan.start is None)
    return regular or step == plan.steps or (plan.start is None and step in (1, 4, 16))


def train_step(
    model: Transformer, adam: torch.optim.AdamW, tokens_bp: Int[Tensor, "b p"], lr: float
) -> float:
    """One update with clipped gradients; returns the loss before it, in nats per token."""
    for group in adam.param_groups:
        group["lr"] = lr
    loss = mean_next_token_loss(model(tokens_bp), tokens_bp)
    adam.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    adam.step()
    return float(loss.detach())


def keep_progress(plan: TrainZoo, model: Transformer, log: list[dict[str, float]]) -> None:
    """Write the log so far and an fp16 checkpoint into the series folder, and show the last line."""
    folder = plan.series / plan.model
    half = {name: value.half().cpu() for name, value in model.state_dict().items()}
    write(folder / f"step{log[-1]['step']:05.0f}.safetensors", save(half))
    write(folder / "training_log.csv", log_csv(log))
    tqdm.write("  ".join(f"{name} {value:.4g}" for name, value in log[-1].items()))


def log_csv(log: list[dict[str, float]]) -> bytes:
    """The log as CSV text, one row per evaluation."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(log[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: f"{value:.6g}" for name, value in row.items()} for row in log)
    return text.getvalue().encode()


# --- the finished model ---------------------------------------------------------------------------------------------


def phase_change_steps(log: list[dict[str, float]], count: int) -> list[int]:
    """The first steps at which the induction score passes 5 % .. 95 % of its last value, `count` levels."""
    levels = np.linspace(0.05, 0.95, count) * log[-1]["best_induction_score"]
    return sorted(
        {next(int(r["step"]) for r in log if r["best_induction_score"] >= level) for level in levels}
    )


def stages(plan: TrainZoo) -> list[dict[str, object]]:
    """The plans that led here, first to last; written into the series folder so that a later stage can add its own."""
    earlier = json.loads(plan.start.with_name("stages.json").read_text()) if plan.start else []
    own = {
        key: value for key, value in asdict(plan).items() if key not in ("texts", "out", "series", "licence")
    }
    own["start"] = plan.start.name if plan.start else None
    history = [*earlier, own]
    write(plan.series / plan.model / "stages.json", as_json(history))
    return history


def write_model(
    plan: TrainZoo,
    model: Transformer,
    tokenizer: Tokenizer,
    log: list[dict[str, float]],
    card: dict[str, object],
) -> None:
    """The model's folder, every file under a temporary name first."""
    folder = plan.out / plan.model
    for step in phase_change_steps(log, plan.shipped) if plan.shipped else []:
        source = plan.series / plan.model / f"step{step:05}.safetensors"
        write(folder / "checkpoints" / f"step{step}.safetensors", source.read_bytes())
    write(folder / "tokenizer.json", tokenizer.to_str(pretty=False).encode())
    write(folder / "training_log.csv", log_csv(log))
    write(folder / "card.json", as_json(card))
    load.save(model, folder)


def write(path: Path, content: bytes) -> None:
    """Write a file whole or not at all; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda part: part.write_bytes(content))


def as_json(value: object) -> bytes:
    """Readable JSON with a final line end."""
    return (json.dumps(value, indent=2, default=str) + "\n").encode()


def encoder(tokenizer: Tokenizer) -> measure.Encode:
    """Words -> ids without BOS."""
    return lambda text: tokenizer.encode(text).ids


def run(plan: TrainZoo) -> None:
    """Read the texts, train the tokenizer and the model, measure it, write everything."""
    torch.set_num_threads(plan.threads)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic matrix products on a GPU
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(plan.seed)
    texts = [read_text(path, plan.held_out_prose) for path in plan.texts]
    facts = tasks.fact_prompts()
    model = Transformer(CONFIGS[plan.model]).to(plan.device)
    if plan.start is not None:
        model.load_state_dict(load_file(plan.start))
    tokenizer = train_tokenizer(texts, facts, model.config.d_vocab)
    encode = encoder(tokenizer)
    prose = torch.tensor([token for text in texts for token in encode(text.train)])
    validation = torch.tensor([token for text in texts for token in encode(text.validation)])
    start = time.monotonic()
    history = stages(plan)
    log = train(plan, model, Mixture(tokenizer, prose, facts), probe(validation, model.config.d_vocab))
    history[-1]["training_minutes"] = round((time.monotonic() - start) / 60, 1)
    card = {
        "model": plan.model,
        "measured": measure.card_numbers(model.cpu(), encode, validation),
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": int(log[-1]["step"]),
        "tokens_trained": int(log[-1]["tokens"]),
        "prose": [text.title for text in texts],
        "prose_tokens": {"train": len(prose), "held_out": len(validation)},
        "licence": plan.licence,
        "stages": history,
        "versions": {"torch": torch.__version__, "numpy": np.__version__},
        "date": date.today().isoformat(),
    }
    write_model(plan, model, tokenizer, log, card)
    tqdm.write(as_json(card).decode())


if __name__ == "__main__":
    run(tyro.cli(TrainZoo))
