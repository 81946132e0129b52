"""What are the paths of a two-layer attention-only model worth? Loss by order of V-composition, and strongest terms.

Elhage et al. 2021 on a trained and on a hand-built model: the direct path knows little, single heads do nearly all the
work, and virtual heads (one head reading what another wrote, as values) add little.

Run: `interp run experiments/framework_one_two_layers.py -p model=demo-attn-2l -p rows=128`
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import matplotlib.pyplot as plt
import numpy as np
import torch
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from interp import Batch, HookedTransformer, plot, tasks
from interp.opening import OfModel
from interp.residual import paths, term_importance
from interp.runs.record import Record


@dataclass(frozen=True)
class Framework(OfModel):
    """Which models, and how much data."""

    model: str = "demo-attn-2l"
    """A trained attention-only model, on sentences with indirect objects and on repeated random tokens."""
    planted: str = "groundtruth-induction"
    """A model whose circuit is known, on repeated random tokens."""
    rows: int = 128
    """Texts of each kind."""
    top: int = 9
    """Terms to name."""
    seed: int = 0
    """Seed of the texts."""


@dataclass(frozen=True)
class Data:
    """Texts to measure a loss on, and questions for the terms: prompts with an answer and a wrong answer."""

    title: str
    texts: Batch
    questions: Batch


@dataclass(frozen=True, eq=False)
class Found:
    """What the paths of one model are worth on one kind of text."""

    model: str
    texts: str
    worth: xr.Dataset
    terms: xr.Dataset


def main(job: Framework, record: Record) -> None:
    """Take both models apart on their texts, and keep the figure and the numbers in words."""
    trained, planted = (each.opened() for each in (job, replace(job, model=job.planted)))
    record.model(trained)
    record.model(planted)
    cases = {
        "sentences": (trained, sentences(trained, job.rows, job.seed)),
        "repeats": (trained, repeats(trained, job.rows, job.seed)),
        "planted": (planted, repeats(planted, job.rows, job.seed)),
    }
    every = [
        Found(
            model.name,
            data.title,
            record.step(f"{name}-worth", partial(term_importance, model, data.texts)),
            record.step(f"{name}-terms", partial(strongest, model, data)),
        )
        for name, (model, data) in cases.items()
    ]
    record.figure("framework_one_two_layers", figure(every, job.top))
    for found in every:
        for line in in_words(found):
            record.say(line)


def sentences(model: HookedTransformer, rows: int, seed: int) -> Data:
    """Indirect-object sentences over name pairs never trained on; names that differ in their first token."""
    drawn = tasks.IndirectObjects(2 * rows, held_out=True).sentences(np.random.default_rng(seed))
    encoded = [[model.text.tokenizer.encode(name)[0] for name in (s.answer, s.wrong)] for s in drawn]
    kept = [(s, pair) for s, pair in zip(drawn, encoded, strict=True) if pair[0] != pair[1]][:rows]
    answer, wrong = torch.tensor([pair for _, pair in kept]).T
    prompts = model.text.batch([s.prompt for s, _ in kept]).left_aligned()
    texts = model.text.batch([s.text for s, _ in kept])
    return Data("sentences with two names", texts, prompts.with_answers(answer, wrong))


def repeats(model: HookedTransformer, rows: int, seed: int) -> Data:
    """BOS and 25 random tokens four times; asked in the last copy, the wrong answer is the one after the right."""
    drawn = tasks.RepeatedTokens(rows=rows, seed=seed)
    tokens = drawn.tokens(model.cfg.d_vocab, model.text.bos_id or 0)
    ask = drawn.length - drawn.period // 2
    questions = Batch(tokens[:, :ask], bos=True).with_answers(tokens[:, ask], tokens[:, ask + 1])
    return Data("repeated random tokens", Batch(tokens, bos=True), questions)


def strongest(model: HookedTransformer, data: Data) -> xr.Dataset:
    """The terms of the answer's logit minus the wrong one's, averaged over the questions."""
    asked = data.questions
    assert asked.answer is not None
    found = paths(model, asked, asked.answer, asked.wrong)
    return found.mean("prompt", keep_attrs=True).expand_dims("prompt")


def in_words(found: Found) -> Iterator[str]:
    """The numbers of one model on one kind of text."""
    worth, terms = found.worth, found.terms
    yield f"{found.model}, {found.texts} ({worth.attrs['rows']} rows), nats per token"
    for term in worth.term.values.tolist():
        scores = worth.sel(term=term).value.to_series()
        saved = worth.sel(term=term, score="reduction")
        if term.startswith("order"):
            half = float(saved.high - saved.value)
            yield (
                f"  up to {term} ({int(saved.terms)} more): loss {scores['loss']:.3f}, "
                f"lowered by {scores['reduction']:+.3f} +- {half:.3f}"
            )
        else:
            alone = f"{scores['reduction']:+.3f} alone, {scores['given_others']:+.3f} given the others"
            yield f"  heads of {term}: {alone}"
    for name, order in (("single", 1), ("virtual", 2)):
        of_order = terms.value[0].where(terms.order == order, drop=True).to_series()
        best = of_order.sort_values(key=np.abs, ascending=False).head(4)
        listed = ", ".join(f"{path} {value:+.2f}" for path, value in best.items())
        yield f"  strongest {name} terms (logits): {listed}"


def draw(found: Found, left: Axes, right: Axes, top: int) -> None:
    """The loss by order on the left, the strongest terms on the right."""
    plot.loss_by_order(found.worth, ax=left)
    plot.attribution(found.terms, top=top, ax=right)
    left.set_title(f"{found.model}: {found.texts}")
    right.use_sticky_edges = False
    right.margins(x=0.04)
    right.set_title(f"strongest paths to the answer, total {float(found.terms.total[0]):+.2f} logits")


def figure(cases: Sequence[Found], top: int) -> Figure:
    """A row of panels per model and kind of text."""
    spaced = ConstrainedLayoutEngine(h_pad=0.12)
    picture, axes = plt.subplots(len(cases), 2, figsize=(12, 4 * len(cases)), layout=spaced)
    for found, (left, right) in zip(cases, axes, strict=True):
        draw(found, left, right, top)
    return picture
