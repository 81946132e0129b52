"""Phrase, syntax and meaning: from which layer on can a linear probe read each of them?

Jawahar et al. 2019 and Tenney et al. 2019 report of BERT that early layers know phrases, middle layers syntax and late
layers meaning. Four properties of the last word of a sentence are asked of every depth of a model:

phrase     whether a word that can be noun or verb is one or the other ("They liked the walk", "They often walk")
syntax     whether the subject is plural, read at a noun of either number that stands after it ("The boys near the car")
class      whether a noun is a living being ("I saw the horse", "I saw the hammer")
polarity   whether the sentence praises, read at an adjective that may be negated ("The film was not dull")

Nobody can learn words by heart here: a probe is judged on words (nouns, adjectives) that it was not fitted on, and
every word of phrase, syntax and polarity has both labels. Two controls give every word a random label (Hewitt and Liang
2019): `control` asks for it of words held out, which must be chance, `by_heart` of known words in a sentence held out,
which says how much of this size a probe can learn by heart.

Expected, written down before the first run, for MiniLM (6 layers) and SmolLM2-135M (30). A third of the layers leads if
the mean accuracy over its layers is above that of both others, with both 95 % intervals over held-out words above 0;
it does not lead if another is above it in the same sense; else it cannot be told.

1. phrase: the first third leads.
2. syntax: the middle third leads.
3. polarity: the last third leads. class: the embedding alone has .9 of the best layer's gain over chance.
4. order: phrase reaches .9 of its gain over chance at no later depth than syntax, and syntax than polarity.
5. control: chance (.5) lies in the interval at 9 of 10 depths or more.

Run: `interp run experiments/what_layers_know.py -p model=/folder/of/a/model`
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import interp
from interp.core.stats import Moments
from interp.model.tap import Read
from interp.opening import OfModel
from interp.runs.record import Record

LEADER = {"phrase": "first", "syntax": "middle", "polarity": "last"}
"""The third of the layers that is expected to lead."""
THIRDS = ("first", "middle", "last")
GAIN = 0.9
"""Share of the best depth's gain over chance from which on a property counts as known."""
FOLDS = 5
"""Parts of the words, each held out once."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


VERBS_AND_NOUNS = _words(
    "walk dance play talk run drink dream plan fight smile sleep swim ride jump climb rest laugh cry shout whisper "
    "visit travel work study test search call answer vote guess kiss hope help attack escape return repair change "
    "move turn start promise reply"
)
PHRASE_CONTEXTS = {
    True: ("They liked the", "She spoke about a", "It was their first", "We were tired after the"),
    False: ("They wanted to", "She really had to", "It is hard to", "In summer we would always"),
}
"""Beginnings after which a word is a noun, and a verb; of the same lengths, so that positions tell nothing."""
SUBJECTS = _words(
    "boy girl king queen nurse doctor teacher lawyer farmer sailor soldier singer dancer painter writer banker driver "
    "guard student brother sister cousin father mother friend guest player leader worker manager pilot prince poet "
    "actor judge priest tailor hunter baker clerk"
)
BETWEEN = _words("car tree door wall table house river road")
"""Nouns between the subject and its verb."""
SYNTAX_CONTEXTS = (
    "The {} near the {}",
    "The {} behind the {}",
    "In those days the {} beside the {}",
    "I think the {} from the {}",
)
LIVING = _words(
    "horse dog cat lion tiger wolf bear fox rabbit mouse snake frog eagle duck goose chicken cow pig sheep goat monkey "
    "teacher doctor farmer sailor soldier singer driver student nurse lawyer king queen baby boy girl priest pilot "
    "hunter poet"
)
LIFELESS = _words(
    "hammer table chair lamp bottle knife spoon basket bucket ladder mirror carpet pillow blanket window door wall "
    "roof bridge tower road car truck train ship boat wheel engine rope chain coin stone brick book letter newspaper "
    "shirt jacket hat shoe"
)
CLASS_CONTEXTS = ("I saw the", "He wrote about the", "We looked at the", "She thought of the")
PRAISE = _words(
    "good great excellent wonderful beautiful lovely perfect brilliant pleasant delightful superb fantastic nice "
    "amazing charming fine happy enjoyable impressive remarkable splendid clever fresh bright"
)
BLAME = _words(
    "bad awful terrible horrible ugly dull boring poor dreadful nasty weak stupid sad disappointing annoying "
    "unpleasant tedious miserable mediocre pathetic silly dirty cruel painful"
)
POLARITY_CONTEXTS = (
    "The film was",
    "My day was",
    "Everyone said that the meal was",
    "In the end her speech was",
)


@dataclass(frozen=True)
class WhatLayersKnow(OfModel):
    """Whose layers, and how many words of each property."""

    words: int = 80
    """The most words of a property."""
    strength: float = 0.1
    """Inverse of the L2 penalty of the probes (scikit-learn's C), on standardised states."""
    seed: int = 0
    """Of the parts of the words and of the random labels."""


@dataclass(frozen=True)
class Examples:
    """Sentences that end in the word that is asked about, and what is asked."""

    sentences: Sequence[str]
    labels: Sequence[bool]
    words: Sequence[str]
    """The word of each sentence that is held out: for syntax the subject."""
    contexts: Sequence[int]
    """The number of each sentence's template."""

    @classmethod
    def of(cls, rows: Sequence[tuple[str, bool, str, int]]) -> "Examples":
        """From rows of these four."""
        return cls(*zip(*rows, strict=True))


def phrase(words: int) -> Examples:
    """Nouns and verbs of one form."""
    return Examples.of([
        (f"{context} {word}", is_noun, word, i)
        for word in VERBS_AND_NOUNS[:words]
        for is_noun, contexts in PHRASE_CONTEXTS.items()
        for i, context in enumerate(contexts)
    ])  # fmt: skip


def syntax(words: int) -> Examples:
    """Subjects of either number, before a noun of either number."""
    return Examples.of([
        (context.format(subject + "s" * plural, BETWEEN[(2 * n + i) % len(BETWEEN)] + "s" * other), plural, subject, i)
        for n, subject in enumerate(SUBJECTS[:words])
        for plural in (False, True)
        for other in (False, True)
        for i, context in enumerate(SYNTAX_CONTEXTS)
    ])  # fmt: skip


def noun_class(words: int) -> Examples:
    """Living beings and things."""
    return Examples.of([
        (f"{context} {word}", living, word, i)
        for living, listed in ((True, LIVING), (False, LIFELESS))
        for word in listed[: words // 2]
        for i, context in enumerate(CLASS_CONTEXTS)
    ])  # fmt: skip


def polarity(words: int) -> Examples:
    """Adjectives of praise and blame, negated or not."""
    return Examples.of([
        (f"{context} {'not ' * negated}{word}", praises != negated, word, i)
        for praises, listed in ((True, PRAISE), (False, BLAME))
        for word in listed[: words // 2]
        for negated in (False, True)
        for i, context in enumerate(POLARITY_CONTEXTS)
    ])  # fmt: skip


PROPERTIES = {"phrase": phrase, "syntax": syntax, "class": noun_class, "polarity": polarity}


def main(job: WhatLayersKnow, record: Record) -> None:
    """Probe every depth for every property; tables, a figure, and the verdicts."""
    model = job.opened()
    record.model(model)
    found = pd.concat(
        [
            record.step(name, partial(probed, model, make(job.words), job)).assign(property=name)
            for name, make in PROPERTIES.items()
        ],
        ignore_index=True,
    )
    table, verdicts = by_depth(found), judged(found)
    record.table("by_depth", table)
    record.table("verdicts", verdicts)
    record.figure("what_layers_know", figure(table))
    record.say(verdicts.round(3).to_string())


def states(model: interp.HookedTransformer, sentences: Sequence[str], rows: int = 64) -> np.ndarray:
    """The stream at the last word, at every depth: the embeddings, then after each block [depth, sentence, d].

    Where a tokenizer ends texts with a token of its own (BERT's) the word is the one before it.
    """
    pos, layers = -1 if model.cfg.causal else -2, range(model.cfg.n_layers)
    reads = [Read(f"blocks.{layer}.hook_resid_pre", pos=pos) for layer in layers]
    reads.append(Read(f"blocks.{layers[-1]}.hook_resid_post", pos=pos))
    parts = []
    for start in range(0, len(sentences), rows):
        seen = interp.observe(model, list(sentences[start : start + rows]), reads, answers_only=True).trace
        parts.append(torch.stack([seen[read][:, 0].float().cpu() for read in reads]))
    return torch.cat(parts, 1).numpy()


def probed(model: interp.HookedTransformer, examples: Examples, job: WhatLayersKnow) -> pd.DataFrame:
    """By depth and held-out word: accuracy for the property and for both controls."""
    return pd.concat(
        [
            accuracies(one, examples, job, depth).assign(depth=depth)
            for depth, one in enumerate(states(model, examples.sentences))
        ],
        ignore_index=True,
    )


def accuracies(x: np.ndarray, examples: Examples, job: WhatLayersKnow, depth: int) -> pd.DataFrame:
    """Accuracy of probes of these states [sentence, d] for each word, a row per word.

    `accuracy` and `control` are of words held out, `by_heart` of sentences held out. The parts of the words are those
    of every depth; random labels are tosses of a fair coin, others at every depth.
    """
    words, word = np.unique(examples.words, return_inverse=True)
    part = np.random.default_rng(job.seed).permutation(np.arange(len(words)) % FOLDS)[word]
    drawn = np.random.default_rng((job.seed, depth)).random(len(words))[word] < 0.5
    asked = {
        "accuracy": (np.asarray(examples.labels), part),
        "control": (drawn, part),
        "by_heart": (drawn, np.asarray(examples.contexts)),
    }
    right = {name: held_out(x, labels, parts, job.strength) for name, (labels, parts) in asked.items()}
    return pd.DataFrame(right).groupby(words[word]).mean().rename_axis("word").reset_index()


def held_out(x: np.ndarray, labels: np.ndarray, parts: np.ndarray, strength: float) -> np.ndarray:
    """Whether a probe that was fitted on the other parts is right, for every example.

    Where the others have one label alone (few words, tossed labels) that is what a probe says.
    """
    right = np.zeros(len(x))
    for part in np.unique(parts):
        test = parts == part
        probe = make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=500))
        known = labels[~test]
        guess = known[0] if len(set(known)) == 1 else probe.fit(x[~test], known).predict(x[test])
        right[test] = labels[test] == guess
    return right


def by_depth(found: pd.DataFrame) -> pd.DataFrame:
    """Means over words with their 95 % intervals, a row per property, depth and score."""
    rows = []
    for (name, depth), each in found.groupby(["property", "depth"], sort=False):
        for score in ("accuracy", "control", "by_heart"):
            moments = Moments.of(torch.tensor(each[score].to_numpy()))
            low, high = moments.interval(share=True)
            rows.append((name, depth, score, float(moments.mean), float(low), float(high), len(each)))
    return pd.DataFrame(rows, columns=["property", "depth", "score", "value", "low", "high", "words"])


def judged(found: pd.DataFrame) -> pd.DataFrame:
    """Each expectation with its numbers and its verdict: holds, does not hold, cannot be told."""
    rows, depths = [], {}
    for name in dict.fromkeys(found["property"]):
        each = found[found["property"] == name]
        table = each.pivot(index="word", columns="depth", values="accuracy").to_numpy()
        mean = table.mean(0)
        known = 0.5 + GAIN * (mean.max() - 0.5)
        depths[name] = int(np.argmax(mean >= known))
        if name in LEADER:
            rows.append((f"{name}: the {LEADER[name]} third leads", *leads(table, LEADER[name])))
    rows.append(("class: the embedding has .9 of the gain", str(depths["class"]), said(depths["class"] == 0)))
    order = [depths[name] for name in LEADER]
    rows.append(("order: phrase, syntax, polarity", " ".join(map(str, order)), said(order == sorted(order))))
    control = by_depth(found).query("score == 'control'")
    chance = float(((control.low <= 0.5) & (control.high >= 0.5)).mean())
    rows.append(("control: chance at 9 of 10 depths", f"{chance:.2f}", said(chance >= 0.9)))
    return pd.DataFrame(rows, columns=["expected", "found", "verdict"])


def leads(table: np.ndarray, third: str) -> tuple[str, str]:
    """How far a third of the blocks is above each other in accuracy [word, depth], and the verdict."""
    blocks = table[:, 1:] if table.shape[1] > len(THIRDS) else table
    means = dict(
        zip(THIRDS, (part.mean(1) for part in np.array_split(blocks, len(THIRDS), axis=1)), strict=True)
    )
    text, lows, highs = [], [], []
    for other in THIRDS:
        if other != third:
            moments = Moments.of(torch.tensor(means[third] - means[other]))
            low, high = (float(end) for end in moments.interval())
            text.append(f"{third} - {other} {float(moments.mean):+.3f} ({low:+.3f}, {high:+.3f})")
            lows.append(low)
            highs.append(high)
    verdict = "holds" if min(lows) > 0 else "does not hold" if min(highs) < 0 else "cannot be told"
    return "; ".join(text), verdict


def said(holds: bool) -> str:
    """The verdict on something that is so or not."""
    return "holds" if holds else "does not hold"


def figure(table: pd.DataFrame) -> Figure:
    """Accuracy by depth, a panel per property: the probe, and both controls."""
    names = list(dict.fromkeys(table.property))
    picture, axes = plt.subplots(1, len(names), figsize=(13, 3.5), sharey=True, layout="constrained")
    labels = {
        "accuracy": "words held out",
        "by_heart": "random labels, words known",
        "control": "random labels, words held out",
    }
    for ax, name in zip(axes, names, strict=True):
        for (score, label), colour in zip(labels.items(), ("C0", "C1", "#888888"), strict=True):
            one = table[(table.property == name) & (table.score == score)]
            ax.plot(one.depth, one.value, color=colour, label=label)
            ax.fill_between(one.depth, one.low, one.high, color=colour, alpha=0.2, linewidth=0)
        ax.axhline(0.5, color="black", linewidth=0.8, linestyle="--")
        ax.set(title=name, xlabel="blocks applied (0: embeddings)", ylim=(0.2, 1.02))
    axes[0].set_ylabel("accuracy of the probe (share)")
    handles, names_of_lines = axes[0].get_legend_handles_labels()
    picture.legend(handles, names_of_lines, fontsize="small", loc="outside lower center", ncols=len(labels))
    return picture
