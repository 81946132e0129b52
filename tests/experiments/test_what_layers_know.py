"""What layers know: probes find a planted direction at its depth, and controls tell a rule from words by heart."""

from collections import Counter

import numpy as np
import pandas as pd
import pytest
import torch

import interp
from experiments.what_layers_know import (
    PROPERTIES,
    THIRDS,
    Examples,
    WhatLayersKnow,
    accuracies,
    by_depth,
    judged,
    leads,
    noun_class,
    phrase,
    states,
)
from interp import Edit
from interp.edits import Add

JOB = WhatLayersKnow(seed=3)


@pytest.fixture(scope="module")
def demo() -> interp.HookedTransformer:
    return interp.HookedTransformer.from_pretrained("demo-mlp-2l")


def test_a_planted_direction_is_found_from_its_depth_on_and_in_no_control(
    demo: interp.HookedTransformer,
) -> None:
    nouns = [text for text, noun in zip(*_columns(phrase(40)), strict=True) if noun]
    words = [text.split()[-1] for text in nouns]
    direction = torch.randn(demo.cfg.d_model, generator=torch.Generator().manual_seed(0))
    planted = demo.edited(Edit("blocks.1.hook_resid_pre", Add(9 * direction)))
    x = np.concatenate((states(planted, nouns), states(demo, nouns)), 1)
    rows = Examples(
        nouns * 2,
        [True] * len(nouns) + [False] * len(nouns),
        words * 2,
        [i % 4 for i in range(len(nouns))] * 2,
    )
    found = {depth: accuracies(one, rows, JOB, depth) for depth, one in enumerate(x)}
    assert set(found[0].accuracy) == {0.5}, "before, both labels have the same states"
    for depth in (1, 2):
        assert float(found[depth].accuracy.min()) == 1.0
    control = np.mean([each.control.mean() for each in found.values()])
    # of 40 words and three tosses each the mean is .5 +- .05 (one standard deviation)
    assert abs(control - 0.5) < 4 * 0.5 / np.sqrt(3 * 40)
    assert float(found[0].by_heart.mean()) > 0.95, "the embeddings say which word it is"


def _columns(examples: Examples) -> tuple[list[str], list[bool]]:
    return list(examples.sentences), list(examples.labels)


def test_words_by_heart_help_for_no_word_that_was_held_out() -> None:
    rows = noun_class(40)
    words = sorted(set(rows.words))
    x = np.eye(len(words))[[words.index(word) for word in rows.words]]
    found = accuracies(x, rows, JOB, 0)
    assert len(found) == 40 and float(found.accuracy.mean()) <= 0.5 and float(found.by_heart.mean()) == 1.0


@pytest.mark.parametrize("name", PROPERTIES)
def test_labels_cannot_be_told_by_length_or_template_or_by_the_word_but_for_its_class(name: str) -> None:
    rows = PROPERTIES[name](20)
    lengths, templates, words = (
        Counter(zip(key, rows.labels, strict=True))
        for key in (map(len, map(str.split, rows.sentences)), rows.contexts, rows.words)
    )
    for counts in (lengths, templates, *([words] if name != "class" else [])):
        assert all(counts[key, True] == counts[key, False] for key, _ in counts)
    assert len(set(rows.sentences)) == len(rows.sentences) and len(set(rows.words)) == 20
    for sentence, word in zip(rows.sentences, rows.words, strict=True):
        assert word in sentence.split() or word + "s" in sentence.split()


def test_the_states_are_the_stream_at_the_last_word_of_each_sentence_alone(
    demo: interp.HookedTransformer,
) -> None:
    sentences = ["They liked the walk", "In summer we would always dance", "It was their first dream"]
    found = states(demo, sentences, rows=2)
    for i, sentence in enumerate(sentences):
        _, cache = demo.run_with_cache(sentence)
        sites = ["blocks.0.hook_resid_pre", "blocks.1.hook_resid_pre", "blocks.1.hook_resid_post"]
        expected = torch.stack([cache[site][0, -1] for site in sites])
        np.testing.assert_allclose(found[:, i], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("third", range(3))
def test_the_third_in_which_a_property_was_planted_leads(third: int) -> None:
    random = np.random.default_rng(0)
    table = np.full((30, 7), 0.6) + 0.02 * random.standard_normal((30, 7))
    table[:, 1 + 2 * third : 3 + 2 * third] += 0.2
    verdicts = {name: leads(table, name)[1] for name in THIRDS}
    assert verdicts == {name: "holds" if name == THIRDS[third] else "does not hold" for name in THIRDS}
    assert {leads(table[:, :1].repeat(7, 1), name)[1] for name in THIRDS} == {"cannot be told"}


def test_verdicts_and_means_are_of_the_words() -> None:
    names = {"phrase": (1, 1, 1), "syntax": (0, 1, 1), "class": (1, 1, 1), "polarity": (0, 0, 1)}
    found = pd.DataFrame([
        {"property": name, "depth": depth, "word": str(word), "accuracy": 0.5 + 0.5 * known,
         "control": 0.5, "by_heart": 1.0}
        for name, at in names.items() for depth, known in enumerate((0 if name != "class" else 1, *at))
        for word in range(8)
    ])  # fmt: skip
    table = by_depth(found).set_index(["property", "depth", "score"]).value
    assert (table["syntax", 1, "accuracy"], table["syntax", 2, "accuracy"]) == (0.5, 1.0)
    verdicts = judged(found).set_index("expected")
    assert verdicts.loc["order: phrase, syntax, polarity"].tolist() == ["1 2 3", "holds"]
    assert verdicts.loc["class: the embedding has .9 of the gain"].tolist() == ["0", "holds"]
    assert verdicts.loc["control: chance at 9 of 10 depths"].tolist() == ["1.00", "holds"]
    assert verdicts.loc["polarity: the last third leads", "verdict"] == "holds"
    assert verdicts.loc["phrase: the first third leads", "verdict"] == "cannot be told"
