"""The table of edits: equal to one prompt at a time on a model edited by hand, with honest intervals."""

import copy
import math
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
import torch

import interp
from interp import Batch, HookedTransformer
from interp.core.stats import t95
from interp.data.stream import prompt_source
from interp.editing import (
    Continuation,
    EditCase,
    WeightEdit,
    edit_table,
    gradient_edit,
    ngram_entropy,
    shift_edit,
)
from interp.editing.edit_scores import mean_loss
from tests.tiny import CORPUS, hooked

PROMPT = "The capital of France is"
MEASURES = ["efficacy", "paraphrase", "neighbourhood", "perplexity"]
CASES = [
    EditCase(PROMPT, " Rome", "France", {
        "paraphrase": (("France: The capital is", " Rome"), ("The capital of France", " Rome")),
        "neighbourhood": (("The capital of Italy is", " Paris"), ("The cat sat on", " the"), ("Mary and", " to")),
    }),
    EditCase("The cat sat on the", " dog", "cat", {
        "paraphrase": (("A cat sat on the", " dog"),), "neighbourhood": (("The capital of Italy is", " Paris"),),
    }),
    EditCase("When Mary and John went to the", " capital", "John", {
        "paraphrase": (("Mary and John went to the", " capital"),), "neighbourhood": (("Mary and", " John"),),
    }),
]  # fmt: skip


def shift(model: HookedTransformer, case: EditCase) -> WeightEdit:
    return shift_edit(model, case.prompt, answer=case.answer, layer=1, eta=0.5)  # type: ignore[arg-type]


def step(model: HookedTransformer, case: EditCase) -> WeightEdit:
    return gradient_edit(model, case.prompt, answer=case.answer, layer=0, eta=0.3)  # type: ignore[arg-type]


def answered(model: HookedTransformer) -> list[EditCase]:
    """The cases, neighbours asked for what the model itself answers, so that some shares are neither 0 nor 1."""
    known = []
    for case in CASES:
        near = tuple(
            (p, int(model.transformer(model.to_tokens(p))[0, -1].argmax()))
            for p, _ in case.checks["neighbourhood"]
        )
        known.append(replace(case, checks={**case.checks, "neighbourhood": near}))
    return known


def test_the_table_equals_single_prompts_on_a_copy_edited_by_hand() -> None:
    model = hooked()
    cases, editors = answered(model), {"shift": shift, "step": step}
    before = {n: p.clone() for n, p in model.transformer.named_parameters()}
    table = edit_table(model, cases, editors, text=list(CORPUS))
    assert table.editor.values.tolist() == ["original", "shift", "step"]
    assert table.score.values.tolist() == MEASURES
    for i, case in enumerate(cases):
        for name in table.editor.values:
            other = HookedTransformer(copy.deepcopy(model.transformer), model.text.tokenizer)
            if name != "original":
                edit = editors[name](model, case)
                layer = int(edit.name.split(".")[1])
                other.transformer.block(layer).mlp.out.weight += edit.dense.mT  # type: ignore[union-attr]
            cell = table.each.sel(editor=name, case=i)
            assert float(cell.sel(score="efficacy")) == share(other, ((case.prompt, case.answer),))
            for measure, asked in case.checks.items():
                assert float(cell.sel(score=measure)) == pytest.approx(share(other, asked), abs=1e-12)
            assert float(cell.sel(score="perplexity")) == pytest.approx(perplexity(other), rel=1e-9)
    assert all(torch.equal(p, before[n]) for n, p in model.transformer.named_parameters())
    values = table.each.sel(score=["efficacy", "neighbourhood"], editor=["shift", "step"]).values
    assert 0 < values.mean() < 1


def share(model: HookedTransformer, asked: tuple[tuple[str, str | int], ...]) -> float:
    best = [int(model.transformer(model.to_tokens(prompt))[0, -1].argmax()) for prompt, _ in asked]
    wanted = [t if isinstance(t, int) else model.text.single(t) for _, t in asked]
    return sum(a == b for a, b in zip(best, wanted, strict=True)) / len(asked)


def perplexity(model: HookedTransformer) -> float:
    losses = []
    for text in CORPUS:
        tokens = model.to_tokens(text)[0]
        logp = model.transformer(tokens[None])[0].log_softmax(-1)
        losses += [-float(logp[i, tokens[i + 1]]) for i in range(len(tokens) - 1)]
    return math.exp(sum(losses) / len(losses))


def test_the_ngram_column_is_that_of_greedy_texts_of_a_copy_edited_by_hand() -> None:
    """Top 1, so that a loop without cache and draws writes the same; openings of the case, else the edited prompt."""
    model = hooked()
    cases = [replace(CASES[0], openings=("The capital of France is", "France")), *CASES[1:]]
    table = edit_table(
        model, cases, {"shift": shift}, text=list(CORPUS), continuation=Continuation(18, top_k=1)
    )
    assert table.score.values.tolist() == [*MEASURES[:3], "n-gram", "perplexity"]
    values = table.each.sel(score="n-gram")
    for i, case in enumerate(cases):
        edited = HookedTransformer(copy.deepcopy(model.transformer), model.text.tokenizer)
        edited.transformer.block(1).mlp.out.weight += shift(model, case).dense.mT  # type: ignore[union-attr]
        for name, one in (("original", model), ("shift", edited)):
            texts = [greedy(one, opening, 18) for opening in case.openings or (case.prompt,)]
            expected = np.mean([entropy_by_hand(text) for text in texts])
            assert float(values.sel(editor=name, case=i)) == pytest.approx(expected, rel=1e-12)
    assert len(set(values.values.ravel().tolist())) > 3, "texts that all say the same would compare nothing"
    np.testing.assert_allclose(table.value.sel(score="n-gram"), values.mean("case"))
    half = float(t95(3)) * values.std("case", ddof=1) / math.sqrt(3)
    np.testing.assert_allclose(table.high.sel(score="n-gram"), values.mean("case") + half)
    np.testing.assert_allclose(table.low.sel(score="n-gram"), values.mean("case") - half)
    without = edit_table(model, cases, {"shift": shift}, text=list(CORPUS))
    np.testing.assert_array_equal(table.each.drop_sel(score="n-gram"), without.each)


def greedy(model: HookedTransformer, opening: str, length: int) -> str:
    tokens = model.to_tokens(opening)
    while tokens.shape[1] < length:
        tokens = torch.cat((tokens, model.transformer(tokens)[:, -1:].argmax(-1)), 1)
    return model.text.tokenizer.decode([i for i in tokens[0].tolist() if i != model.text.bos_id])


def entropy_by_hand(text: str) -> float:
    """A third of the bigrams' entropy and two of the trigrams'; words are letters and digits, or another character."""
    marked = "".join(c if c.isalnum() or c == "_" or c.isspace() else f" {c} " for c in text)
    words, parts = marked.split(), []
    for n in (2, 3):
        grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
        shares = [grams.count(gram) / len(grams) for gram in set(grams)]
        parts.append(-sum(p * math.log2(p) for p in shares))
    return parts[0] / 3 + 2 * parts[1] / 3


def test_scores_and_intervals_are_those_of_the_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hooked()
    few = edit_table(model, answered(model), {"shift": shift}, text=list(CORPUS)).sel(score="perplexity")
    assert bool(few.low.isnull().all() and few.high.isnull().all() and few.value.notnull().all())
    monkeypatch.setattr("interp.editing.edit_scores.FEWEST_CASES", 3)
    table = edit_table(model, answered(model), {"shift": shift, "step": step}, text=list(CORPUS))
    shares = table.drop_sel(score="perplexity")
    np.testing.assert_allclose(shares.value, shares.each.mean("case"))
    for score, low, high in zip(*(shares[n].values.flat for n in ("value", "low", "high")), strict=True):
        assert 0 <= low <= score <= high <= 1 and high - low > 0.3  # three cases say little
    logs = np.log(table.each.sel(score="perplexity").transpose("editor", "case").values)
    half = float(t95(3)) * logs.std(1, ddof=1) / math.sqrt(3)
    found = table.sel(score="perplexity")
    np.testing.assert_allclose(found.value, np.exp(logs.mean(1)))
    np.testing.assert_allclose(found.low, np.exp(logs.mean(1) - half))
    np.testing.assert_allclose(found.high, np.exp(logs.mean(1) + half))
    assert found.value[0] == pytest.approx(perplexity(model), rel=1e-9)
    assert float(found.high[0]) == float(found.low[0])
    assert (table.null == table.value.sel(editor="original")).all() and set(table.n.values.ravel()) == {3}
    assert table.unit.values.tolist() == [*["share of prompts"] * 3, "exp(nats per token)"]
    assert table.prompt.values.tolist() == [case.prompt for case in CASES]
    assert list(interp.frame(table)) == ["editor", "score", "unit", "value", "low", "high", "null", "n"]


def test_perplexity_does_not_depend_on_the_batches_and_requires_a_text() -> None:
    model = hooked()
    one, all_ = (edit_table(model, CASES, {"s": shift}, text=list(CORPUS), batch_size=n) for n in (1, 9))
    np.testing.assert_allclose(one.value, all_.value, rtol=1e-9)
    assert edit_table(model, CASES, {"s": shift}).score.values.tolist() == MEASURES[:3]
    short = [model.text.ids(text)[:n] for text, n in zip(CORPUS, (12, 9, 7), strict=True)]
    found = []
    for text, rows in ((list(CORPUS), 1), (short, 2), (Batch.packed(short, 24), 2)):
        source = prompt_source(text, model.text, batch_size=rows)
        found.append(math.exp(mean_loss(model, source)))
    assert found[0] == pytest.approx(perplexity(model), rel=1e-9)
    assert found[2] == pytest.approx(found[1], rel=1e-9)


def test_an_edit_that_ruins_the_model_is_a_number_of_the_table() -> None:
    """Weights beyond what a pass can hold: its perplexity is not a number, the others' are."""
    model = hooked("gpt2", torch.float32)

    def ruin(model: HookedTransformer, case: EditCase) -> WeightEdit:
        return WeightEdit("blocks.1.mlp.W_out", torch.full((40, 24), 3e38))

    table = edit_table(model, CASES, {"ruin": ruin, "shift": shift}, text=list(CORPUS))  # type: ignore[dict-item]
    found = table.value.sel(score="perplexity")
    assert (
        not np.isfinite(found.sel(editor="ruin"))
        and np.isfinite(found.sel(editor=["original", "shift"])).all()
    )


def test_what_has_no_table_is_refused() -> None:
    model = hooked()
    with pytest.raises(ValueError, match="at least one case"):
        edit_table(model, [], {"shift": shift})
    with pytest.raises(ValueError, match="batch_size must be a whole number from 1 to 10000000, got -64"):
        edit_table(model, CASES, {"shift": shift}, batch_size=-64)
    with pytest.raises(ValueError, match="the same checks in all"):
        edit_table(model, [CASES[0], replace(CASES[1], checks={})], {"shift": shift})
    with pytest.raises(ValueError, match="no editor called 'original'"):
        edit_table(model, CASES, {"original": shift})
    taken = [(name, ((PROMPT, 1),)) for name in ("efficacy", "n-gram", "perplexity")]
    for name, asked in (("paraphrase", ()), *taken):
        with pytest.raises(
            ValueError, match=f"a check requires a prompt.*got '{name}' with {len(asked)} prompts"
        ):
            replace(CASES[0], checks={name: asked})
    with pytest.raises(ValueError, match="an answer of at least one token is required"):
        edit_table(model, [replace(CASES[0], answer="")], {"shift": shift})
    with pytest.raises(ValueError, match="openings shorter than 3 tokens"):
        edit_table(model, CASES, {"shift": shift}, continuation=Continuation(length=3))


def test_a_model_is_whole_again_after_an_editor_fails_halfway() -> None:
    model = hooked()
    before = {n: p.clone() for n, p in model.transformer.named_parameters()}

    def failing(model: HookedTransformer, case: EditCase) -> WeightEdit:
        if case is CASES[1]:
            raise RuntimeError("no edit")
        return shift(model, case)

    with pytest.raises(RuntimeError, match="no edit"):
        edit_table(model, CASES, {"failing": failing})  # type: ignore[dict-item]
    assert all(torch.equal(p, before[n]) for n, p in model.transformer.named_parameters())


# -- continuations: against a loop that feeds one text at a time, the n-gram entropy against counting by hand

OPENINGS = ["The capital of France is", "The cat"]


def slow_ngram_entropy(words: list[str]) -> float:
    """As in the code of ROME: weights 2/3 and 4/3, then the mean."""
    entropies = []
    for n, weight in ((2, 2 / 3), (3, 4 / 3)):
        grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
        shares = np.array([grams.count(gram) for gram in sorted(set(grams))]) / len(grams)
        entropies.append(weight * np.sum(-shares * np.log(shares) / np.log(2)))
    return float(np.mean(entropies))


def slow_greedy(model: HookedTransformer, opening: str, length: int) -> str:
    """The most probable token again and again, the whole text anew for each."""
    tokens = model.to_tokens(opening)
    while tokens.shape[1] < length:
        best = model.transformer(tokens)[0, -1].argmax()
        tokens = torch.cat((tokens, best[None, None]), 1)
    bos = model.text.bos_id
    return model.text.tokenizer.decode([i for i in tokens[0].tolist() if i != bos])


@pytest.mark.parametrize("seed", range(3))
def test_the_entropy_is_that_of_counted_ngrams(seed: int) -> None:
    words = np.random.default_rng(seed).choice(["a", "b", "c1", ".", ","], 40).tolist()
    assert ngram_entropy(" ".join(words)) == pytest.approx(slow_ngram_entropy(words), rel=1e-12)


def test_words_are_letters_and_digits_together_and_other_visible_marks() -> None:
    text = "In Zürich, 2 cats\nsat: 'Well_done!'"
    words = ["In", "Zürich", ",", "2", "cats", "sat", ":", "'", "Well_done", "!", "'"]
    assert ngram_entropy(text) == pytest.approx(slow_ngram_entropy(words), rel=1e-12)


def test_the_entropy_has_its_closed_forms() -> None:
    """n words that never repeat: log2(n - 1) / 3 + 2 log2(n - 2) / 3; two words in turn: about one bit."""
    every = " ".join(f"w{i}" for i in range(50))
    assert ngram_entropy(every) == pytest.approx(math.log2(49) / 3 + 2 * math.log2(48) / 3)
    assert ngram_entropy("a b " * 500) == pytest.approx(1, abs=1e-3)
    assert ngram_entropy("no " * 30) == ngram_entropy("one") == ngram_entropy("") == 0


def test_greedy_texts_are_those_of_a_loop_and_equally_long() -> None:
    model = hooked()
    found = Continuation(length=20, top_k=1).texts(model, OPENINGS)
    assert found == [slow_greedy(model, opening, 20) for opening in OPENINGS]
    assert len({len(model.text.batch(o).tokens[0]) for o in OPENINGS}) == 2, "the openings differ in length"


def slow_sampled(model: HookedTransformer, openings: list[str], how: Continuation, turn: int) -> list[str]:
    """Every text on its own, all of it anew for each token, with a generator of its own."""
    found = []
    for place, opening in enumerate(openings):
        ids, draw = (
            model.to_tokens(opening)[0].tolist(),
            np.random.default_rng([how.seed + turn, 0, place, 0]),
        )
        while len(ids) < how.length:
            best, order = model.transformer(torch.tensor([ids]))[0, -1].topk(how.top_k)
            order, by_id = order.sort()
            upto, number = accumulate(best.softmax(-1)[by_id].tolist()), draw.random()
            ids.append(next(token for token, end in zip(order.tolist(), upto, strict=True) if number < end))
        found.append(model.text.tokenizer.decode([i for i in ids if i != model.text.bos_id]))
    return found


@pytest.mark.parametrize("turn", [0, 3])
def test_sampled_texts_are_those_of_a_loop_over_texts(turn: int) -> None:
    model, how = hooked(), Continuation(length=20, top_k=3, seed=5)
    found = how.texts(model, OPENINGS, turn=turn)
    assert found == slow_sampled(model, OPENINGS, how, turn)
    assert found == how.texts(model, OPENINGS, turn=turn) != how.texts(model, OPENINGS, turn=turn + 1)
    assert found != Continuation(length=20, top_k=1).texts(model, OPENINGS)


def test_what_leaves_no_room_is_refused() -> None:
    model = hooked()
    with pytest.raises(ValueError, match="openings shorter than 5 tokens are required, the longest has"):
        Continuation(length=5).texts(model, [CORPUS[1]])
    with pytest.raises(ValueError, match="do not fit the context"):
        Continuation(length=model.cfg.n_ctx + 1).texts(model, OPENINGS)
    with pytest.raises(ValueError, match="top_k must be a whole number from 1"):
        Continuation(top_k=0, length=20).texts(model, OPENINGS)
