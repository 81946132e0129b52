"""What does a small Transformer learn from one kind of data, and when? Train one, with checkpoints on the way.

Run: `interp run experiments/train.py -p task=recall -p model=attention-2l -p training.steps=4000`

Tasks: `repeats` (random sequences that repeat), `recall` (keys and values, then some keys), `regression` (which
coordinate is copied), `names` (indirect objects), `facts`, `texts` (your files). The run folder has the model in
`streams/training`: `HookedTransformer.from_pretrained(folder, revision="step100")` is a checkpoint of it.
`--resume` goes on with a run that was killed, to the same bits.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

import interp
from interp.data.sources import open_source
from interp.lab.training import (
    PackedTexts,
    Sentences,
    Training,
    TrainingData,
    Vocabulary,
    config_for,
    train,
)
from interp.lab.training.loop import WithVocabulary
from interp.model import Transformer
from interp.runs.record import Record
from interp.tasks import AssociativeRecall, Facts, InContextRegression, IndirectObjects, RepeatedSequences
from interp.zoo.demos import WEIGHTS

Task = Literal["repeats", "recall", "regression", "names", "facts", "texts"]
TRAINING = Training(checkpoints=12)


@dataclass(frozen=True)
class Train:
    """Which model learns what."""

    task: Task = "repeats"
    """What the rows are."""
    model: str = "attention-2l"
    """A preset (attention-1l, attention-2l, gpt-4l, llama-4l), or a .json or .toml file of a config."""
    texts: tuple[Path, ...] = ()
    """Files for the task `texts`: .txt (a row per line), .jsonl or .parquet."""
    tokenizer: Path | None = None
    """For words: a tokenizer.json with <|bos|>; else that of the demo models, or for `texts` one learned from them."""
    d_vocab: int = 64
    """Token ids of generated sequences; of a learned tokenizer at least 257."""
    width: int = 128
    """Tokens of a row of texts, and the most of a sentence."""
    training: Training = TRAINING
    """How it is trained."""


def main(job: Train, record: Record) -> None:
    """Train; keep the log and a figure."""
    data = data_of(job)
    config = config_for(job.model, data)
    folder = record.stream_folder("training")
    trained = train(config, data, job.training, out=folder, resume=True)
    if not isinstance(trained.model, Transformer):
        raise ValueError("one stack of layers is required; for an encoder-decoder see copy_reverse.py")
    tokenizer = data.vocabulary.tokenizer if isinstance(data, WithVocabulary) else None
    record.model(interp.HookedTransformer(trained.model, tokenizer, name=f"{job.model}-{job.task}"))
    record.table("log", trained.log)
    record.figure("training", figure(f"{job.model} on {job.task}", trained.log))
    record.say(trained.log.iloc[[0, -1]].to_string(index=False))


def data_of(job: Train) -> TrainingData:
    """The rows that are asked for."""
    match job.task:
        case "repeats":
            return RepeatedSequences(d_vocab=job.d_vocab)
        case "recall":
            return AssociativeRecall(d_vocab=job.d_vocab)
        case "regression":
            return InContextRegression(d_vocab=job.d_vocab)
        case "names":
            return Sentences(IndirectObjects(), vocabulary_of(job), job.width)
        case "facts":
            return Sentences(Facts(), vocabulary_of(job), job.width)
        case "texts":
            if not job.texts:
                raise ValueError("the task texts requires files: -p texts=PATH, once per file")
            return PackedTexts.of(job.texts, vocabulary_of(job), width=job.width)


def vocabulary_of(job: Train) -> Vocabulary:
    """The tokenizer that is given, learned from the texts, or that of the demo models."""
    if job.tokenizer is not None:
        return Vocabulary.read(job.tokenizer)
    if job.task != "texts":
        return Vocabulary.read(WEIGHTS / "demo-4l" / "tokenizer.json")
    source = open_source(list(job.texts))
    rows = source.rows(0, source.count or 0)
    return Vocabulary.learned((row for row in rows if isinstance(row, str)), job.d_vocab)


def figure(title: str, log: pd.DataFrame) -> Figure:
    """Losses and the share that is right, against tokens."""
    picture, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(7, 5), layout="constrained")
    millions = log.tokens / 1e6
    above.plot(millions, log.loss, label="training, mean since the last row", color="C1")
    above.plot(millions, log.held_out_loss, label="held out", color="C0", marker=".")
    above.set(ylabel="loss (nats/token)", title=title)
    above.legend()
    below.plot(millions, log.accuracy, color="C0", marker=".")
    below.set(ylabel="share right of the\ndetermined tokens", xlabel="training tokens (millions)")
    below.set_ylim(-0.02, 1.02)
    return picture
