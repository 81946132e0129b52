"""Facts of files: every layout becomes the same rows, malformed ones are refused by number, and functions take them."""

import csv
import functools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import interp
from interp.core.notes import Note, note
from interp.tasks import GivenFacts, read_facts
from tests.loops import over
from tests.tiny import hooked

PLAIN = [
    {"prompt": "The capital of France is", "answer": "Paris", "subject": "France", "wrong": "Rome"},
    {"prompt": "The capital of {} is", "answer": " Rome", "subject": "Italy", "relation": "capital"},
    {"prompt": "{}, a cat, sat on the", "answer": "mat", "subject": "Mary"},
    {"prompt": "The dog sat on the", "answer": "cat"},
]
KNOWN = [
    {
        "known_id": 7, "subject": "France", "attribute": "Paris", "template": "The capital of {} is",
        "prediction": " Paris, of course", "prompt": "The capital of France is", "relation_id": "P36",
    },
]  # fmt: skip
COUNTERFACT = [
    {
        "case_id": 0,
        "requested_rewrite": {
            "prompt": "The capital of {} is", "relation_id": "P36", "subject": "France",
            "target_new": {"str": "Rome", "id": "Q2"}, "target_true": {"str": "Paris", "id": "Q1"},
        },
        "paraphrase_prompts": ["A dog. The capital city of France is", "In France, the capital is"],
        "neighborhood_prompts": ["The capital of Paris is"],
        "attribute_prompts": [], "generation_prompts": [],
    },
]  # fmt: skip
RELATION = {
    "name": "country capital",
    "prompt_templates": ["The capital of {} is", "{}'s capital is "],
    "prompt_templates_zs": ["What is the capital of {}? It is"],
    "samples": [{"subject": "France", "object": "Paris"}, {"subject": "Italy", "object": "Rome"}],
    "properties": {"relation_type": "factual"},
}
INPUTS = [{"input": "France", "output": "Paris"}, {"input": "Italy", "output": "Rome"}]
LAYOUTS: dict[str, tuple[object, list[tuple[str, str, str | None, str | None]]]] = {
    "plain": (
        PLAIN,
        [
            ("The capital of France is", " Paris", "France", " Rome"),
            ("The capital of Italy is", " Rome", "Italy", None),
            ("Mary, a cat, sat on the", " mat", "Mary", None),
            ("The dog sat on the", " cat", None, None),
        ],
    ),
    "known": (KNOWN, [("The capital of France is", " Paris", "France", None)]),
    "counterfact": (COUNTERFACT, [("The capital of France is", " Paris", "France", " Rome")]),
    "relation": (
        RELATION,
        [
            ("The capital of France is", " Paris", "France", None),
            ("France's capital is", " Paris", "France", None),
            ("The capital of Italy is", " Rome", "Italy", None),
            ("Italy's capital is", " Rome", "Italy", None),
        ],
    ),
    "inputs": (
        INPUTS, [("Q: France\nA:", " Paris", "France", None), ("Q: Italy\nA:", " Rome", "Italy", None)]
    ),
}  # fmt: skip


def written(folder: Path, contents: object, name: str = "facts.json") -> Path:
    file = folder / name
    if name.endswith(".csv"):
        assert isinstance(contents, list)
        with file.open("w", newline="", encoding="utf-8") as handle:
            table = csv.DictWriter(handle, list(dict.fromkeys(key for row in contents for key in row)))
            table.writeheader()
            table.writerows(contents)
    elif name.endswith(".jsonl"):
        assert isinstance(contents, list)
        file.write_text("\n".join(map(json.dumps, contents)), encoding="utf-8")
    else:
        file.write_text(contents if isinstance(contents, str) else json.dumps(contents), encoding="utf-8")
    return file


@over("layout", LAYOUTS)
def test_each_layout_becomes_prompts_answers_and_subjects(layout: str, tmp_path: Path) -> None:
    contents, wanted = LAYOUTS[layout]
    facts = read_facts(written(tmp_path, contents, f"{layout}.json"))
    assert [(f.prompt, f.answer, f.subject, f.wrong) for f in facts] == wanted
    for fact in facts:
        if fact.subject is not None and fact.start is not None:
            assert fact.prompt[fact.start :].startswith(fact.subject)
            assert fact.phrasing.format(subject=fact.subject) == fact.prompt


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_a_table_is_the_same_in_every_format(suffix: str, tmp_path: Path) -> None:
    as_json = read_facts(written(tmp_path, PLAIN))
    assert read_facts(written(tmp_path, PLAIN, f"facts.{suffix}")).facts == as_json.facts
    marked = tmp_path / "marked.csv"
    marked.write_bytes(b"\xef\xbb\xbf" + written(tmp_path, PLAIN, "facts.csv").read_bytes())
    assert read_facts(marked).facts == as_json.facts


def test_other_prompts_of_a_file_are_read_by_name(tmp_path: Path) -> None:
    file = written(tmp_path, COUNTERFACT)
    paraphrases = read_facts(file, prompts="paraphrase_prompts")
    assert [(f.prompt, f.start) for f in paraphrases] == [
        ("A dog. The capital city of France is", 27),
        ("In France, the capital is", 3),
    ]
    neighbours = read_facts(file, prompts="neighborhood_prompts")
    assert [(f.prompt, f.answer, f.subject) for f in neighbours] == [
        ("The capital of Paris is", " Paris", None)
    ]
    relation = read_facts(written(tmp_path, RELATION), prompts="prompt_templates_zs")
    assert relation.prompts == ["What is the capital of France? It is", "What is the capital of Italy? It is"]
    assert (
        relation[0].relation == "country capital"
        and isinstance(relation[1:], GivenFacts)
        and len(relation[1:]) == 1
    )
    asked = read_facts(written(tmp_path, INPUTS), template="{} ->", space=False)
    assert [(f.prompt, f.answer) for f in asked] == [("France ->", "Paris"), ("Italy ->", "Rome")]


REFUSED: dict[str, tuple[object, str]] = {
    "no answer": ([PLAIN[0], {"prompt": "a"}], r"row 1 \(a table\): 'answer' must be a text, it has prompt"),
    "a number": ([{**PLAIN[0], "answer": 3}], r"row 0 \(a table\): 'answer' must be a text, got 3"),
    "no object": ([PLAIN[0], "a"], r"row 1 \(a table\): 'prompt' must be a text, it has str"),
    "no subject": ([{"prompt": "The {} is", "answer": "a"}], "row 0 .* a subject is required for the {}"),
    "two holes": ([{"prompt": "{} {}", "answer": "a", "subject": "b"}], "a template has one {}, got 2"),
    "elsewhere": ([{**PLAIN[0], "subject": "Spain"}], "row 0 .* does not hold the subject 'Spain'"),
    "twice": (
        [{"prompt": "Paris or Paris is", "answer": "a", "subject": "Paris"}],
        r"holds 2 times the subject 'Paris': once is required, or \{\} in its place",
    ),
    "mid-word": ([{"prompt": "Franceland is", "answer": "a", "subject": "France"}], "stands in the middle of a word"),
    "end of a word": ([{"prompt": "In AFrance is", "answer": "a", "subject": "France"}], "in the middle of a word"),
    "same answers": ([{**PLAIN[0], "wrong": "Paris"}], "row 0 .* answer and the wrong answer must differ, both are"),
    "same prompts": (
        [{**PLAIN[0], "corrupt": "The capital of France is"}], "the corrupted prompt must differ from the prompt"
    ),
    "no wrong": (
        [{"prompt": "a b", "corrupt": "a c", "answer": "d"}], "row 0 .* a corrupted prompt requires a wrong answer"
    ),
    "another prompt": ([{**KNOWN[0], "prompt": "x"}], r"row 0 \(known-1000\): its prompt 'x' is not its template"),
    "no rewrite": ([{"requested_rewrite": 3}], r"row 0 \(CounterFact\): 'requested_rewrite' must be an object"),
    "no target": (
        [{"requested_rewrite": {**COUNTERFACT[0]["requested_rewrite"], "target_true": {}}}],  # type: ignore[dict-item]
        r"row 0 \(CounterFact\): 'str' must be a text",
    ),
    "no templates": ({**RELATION, "prompt_templates": []}, "'prompt_templates' must be a list of templates"),
    "no hole": ({**RELATION, "prompt_templates": ["a"]}, "a template has one {} for the subject, got 'a'"),
    "a bad sample": (
        {**RELATION, "samples": [RELATION["samples"][0], {"subject": "a"}]},  # type: ignore[index]
        r"row 1 \(a relation\): 'object' must be a text, it has subject",
    ),
    "no samples": ({**RELATION, "samples": []}, "at least one fact is required, got none"),
    "no list": ({"a": 1}, "facts.json: a list of facts as objects, or a relation with 'samples', is required"),
    "other rows": ([{"a": 1}], "facts.json: rows with one of 'requested_rewrite', .* are required, row 0 has a"),
    "nothing": ([], "facts.json: at least one fact is required, got none"),
    "no JSON": ("[{", "facts.json is not readable JSON"),
    "nested": ("[" * 200_000, "facts.json is nested too deeply|is not readable JSON"),
}  # fmt: skip


@pytest.mark.kinds
@over("case", REFUSED)
def test_malformed_files_are_refused_with_their_name_and_row(case: str, tmp_path: Path) -> None:
    contents, message = REFUSED[case]
    with pytest.raises(ValueError, match=message) as caught:
        read_facts(written(tmp_path, contents))
    assert "facts.json" in str(caught.value) and "\n" not in str(caught.value)


def test_other_files_and_options_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "wide.csv").write_text("prompt,answer\na,b,c\n")
    (tmp_path / "latin.csv").write_bytes(b"prompt,answer\n\xe9,b\n")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{')
    for name, message in (
        ("a.txt", "a.txt: a file of facts ends in .csv, .json, .jsonl, got .txt"),
        ("wide.csv", "wide.csv: row 0 has more values than the first line has columns, 2"),
        ("latin.csv", "latin.csv must be UTF-8"),
        ("bad.jsonl", "bad.jsonl: row 1 is not readable JSON"),
    ):
        with pytest.raises(ValueError, match=message):
            read_facts(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        read_facts(tmp_path / "none.json")
    with pytest.raises(
        ValueError, match="prompts must be one of prompt_templates, prompt_templates_zs of a relation"
    ):
        read_facts(written(tmp_path, RELATION), prompts="templates")
    with pytest.raises(ValueError, match=r"a template has one \{\} for the input"):
        read_facts(written(tmp_path, INPUTS), template="a")


def test_the_tokens_of_a_subject_spell_it_wherever_it_stands(tmp_path: Path) -> None:
    model = hooked()
    rows = [
        {"prompt": "{} is", "answer": "a", "subject": "France"},
        {"prompt": "The {} is", "answer": "a", "subject": "日本 and Paris"},
        {"prompt": "Is it {}", "answer": "a", "subject": "Mary Johnson-Zoë"},
        {"prompt": "({}) is", "answer": "a", "subject": "Mary"},
    ]
    asked = read_facts(written(tmp_path, rows)).asked(model.text)
    assert asked.subjects is not None
    for ids, real, place, row in zip(asked.batch.tokens, asked.batch.real, asked.subjects, rows, strict=True):
        spelled = model.to_string(ids[real][place.start : place.stop])
        assert spelled.removeprefix(" ") == row["subject"]
    assert asked.batch.tokens.equal(model.to_batch(read_facts(written(tmp_path, rows)).prompts).tokens)


def test_facts_whose_words_share_tokens_are_left_out_with_a_note(tmp_path: Path) -> None:
    model = hooked()
    whole = model.text.tokenizer.encode(" capital")
    assert len(whole) == 1  # so that nothing inside of it has tokens of its own
    rows = [{"prompt": "The capital of {} is", "subject": "France", "answer": "Paris"}, {**PLAIN[3]}]
    bad = {"prompt": "A {}ital is", "subject": "cap", "answer": "a"}
    note.cache_clear()
    with pytest.warns(
        Note, match=r"facts.json: left out row 1, the subject 'cap' shares a token with its neighbour"
    ):
        asked = read_facts(written(tmp_path, [rows[0], bad])).asked(model.text)
    assert len(asked.batch) == 1
    with pytest.raises(
        ValueError, match=r"facts.json: a fact that the tokenizer can spell is required, got none"
    ):
        read_facts(written(tmp_path, [bad])).asked(model.text)
    alike = {"prompt": "The cat", "answer": "Paris", "wrong": "Paris."}
    with pytest.raises(ValueError, match="begin with the same token"):
        read_facts(written(tmp_path, [alike])).asked(model.text)


same_numbers = functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12)
"""Of passes in float64, whose batches may round otherwise."""


def test_facts_with_answers_of_several_tokens_are_about_the_whole(tmp_path: Path) -> None:
    model = hooked()
    rows = [
        {"prompt": "The capital of {} is", "subject": "France", "answer": "Paris and John"},
        {"prompt": "{}, a cat, sat on the", "subject": "Mary", "answer": "shop"},
    ]
    facts = read_facts(written(tmp_path, rows))
    prompts, answers = facts.prompts, [tuple(model.text.tokenizer.encode(answer)) for answer in facts.answers]
    assert max(map(len, answers)) > 1
    found, wanted = interp.attribute(model, facts), interp.attribute(model, prompts, answers)
    assert found.sizes["answer_token"] > 1
    same_numbers(found.value.values, wanted.value.values)
    lens = interp.logit_lens(model, facts)
    same_numbers(
        lens.answer_log_prob.values, interp.logit_lens(model, prompts, answer=answers).answer_log_prob.values
    )
    metric = interp.metrics.answer_log_probability
    asked = interp.causal.ablate(model, facts, ["L0.mlp"], change=interp.edits.Zero(), metric=metric())
    given = interp.causal.ablate(
        model, prompts, ["L0.mlp"], change=interp.edits.Zero(), metric=metric(answers)
    )
    same_numbers(asked["each"].values, given["each"].values)
    ran = interp.run([interp.lenses.LogitLens()], model, facts)["logit_lens"]
    same_numbers(ran.answer_log_prob.values, lens.answer_log_prob.values)


def test_facts_compare_whole_answers_with_whole_wrong_ones(tmp_path: Path) -> None:
    model = hooked()
    rows = [{"prompt": "The capital of France is", "answer": "Paris and John", "wrong": "Mary"}]
    facts = read_facts(written(tmp_path, rows))
    difference = interp.metrics.log_prob_difference
    found, wanted = (
        interp.causal.ablate(model, data, ["L0.mlp"], change=interp.edits.Zero(), metric=metric).base.values
        for data, metric in ((facts, difference()), (facts.prompts, difference(" Paris and John", " Mary")))
    )
    same_numbers(found, wanted)


def test_a_question_about_one_token_is_about_the_first_of_each_fact(tmp_path: Path) -> None:
    model = hooked()
    rows = [{"prompt": "The capital of France is", "answer": "Paris and John"}]
    facts = read_facts(written(tmp_path, rows))
    first = model.text.tokenizer.encode(" Paris and John")[0]
    with pytest.warns(
        Note, match="1 of 1 facts have answers of several tokens; compare_methods is about the first"
    ):
        found = interp.tokens.compare_methods(model, facts, methods=["attention"], measure="logits")
    same_numbers(
        found.value.values,
        interp.tokens.compare_methods(
            model, facts.prompts, first, methods=["attention"], measure="logits"
        ).value,
    )


def test_causal_tracing_of_facts_is_that_of_their_prompts_subjects_and_answers(tmp_path: Path) -> None:
    model = hooked()
    prompts = ["The capital of France is", "Mary, a cat, sat on the"]
    best = [int(model(prompt)[0, -1].argmax()) for prompt in prompts]
    answers = [model.to_string(token) for token in best]
    rows = [
        {"prompt": prompt, "subject": subject, "answer": answer}
        for prompt, subject, answer in zip(prompts, ("France", "Mary"), answers, strict=True)
    ]
    facts = read_facts(written(tmp_path, rows), space=False)
    assert facts.asked(model.text).batch.answer.tolist() == best  # type: ignore[union-attr]
    found = interp.causal_trace(model, facts, samples=2)
    wanted = interp.causal_trace(model, prompts, ["France", "Mary"], best, samples=2)
    same_numbers(found.value.values, wanted.value.values)
    same_numbers(found["each"].values, wanted["each"].values)
    ran = interp.run([interp.causal.CausalTrace(samples=2), interp.lenses.LogitLens()], model, facts)
    same_numbers(ran["causal_trace"].value.values, wanted.value.values)
    assert ran["logit_lens"].sizes["prompt"] == 2
    with pytest.raises(ValueError, match="causal tracing requires the subject of every prompt"):
        interp.causal_trace(model, prompts)
    with pytest.raises(ValueError, match="causal tracing requires the subject of every prompt"):
        interp.causal_trace(model, read_facts(written(tmp_path, [PLAIN[3]])))


def test_functions_of_data_take_the_answers_of_facts(tmp_path: Path) -> None:
    model = hooked()
    rows = [PLAIN[0], {**PLAIN[1], "wrong": "Paris"}]
    facts = read_facts(written(tmp_path, rows))
    tokenizer = model.text.tokenizer
    ids = {word: tokenizer.encode(f"is {word}")[len(tokenizer.encode("is"))] for word in ("Paris", "Rome")}
    found = interp.attribute(model, facts)
    wanted = interp.attribute(model, facts.prompts, [ids["Paris"], ids["Rome"]], [ids["Rome"], ids["Paris"]])
    np.testing.assert_array_equal(found.total.values, wanted.total.values)
    assert interp.logit_lens(model, facts).sizes["prompt"] == 2


def test_pairs_exchange_subjects_of_one_phrasing_with_as_many_tokens(tmp_path: Path) -> None:
    model = hooked()
    facts = read_facts(written(tmp_path, RELATION))
    tokenizer = model.text.tokenizer
    lengths = {name: len(tokenizer.encode(f" {name}")) for name in ("France", "Italy")}
    assert lengths["France"] == lengths["Italy"]
    pairs = facts.pairs(tokenizer)
    assert pairs.task == "facts.json" and pairs.changes == ("subject",)
    for clean, corrupt, answer in zip(pairs.clean, pairs.corrupt, pairs.answer.tolist(), strict=True):
        other = {"France": "Italy", "Italy": "France"}
        mine = next(name for name in other if name in clean)
        assert corrupt == clean.replace(mine, other[mine])
        assert (
            answer
            == tokenizer.encode(f"is {'Paris' if mine == 'France' else 'Rome'}")[len(tokenizer.encode("is"))]
        )
    drawn = facts.pairs(tokenizer, rows=9, seed=3)
    assert len(drawn) == 9 and torch.equal(drawn.answer, facts.pairs(tokenizer, rows=9, seed=3).answer)
    result = interp.patch(model, *interp.causal.batches(model, pairs), "resid_pre")
    assert np.isfinite(result.value.values).any()


BEGIN_ALIKE = {
    "name": "what sat", "prompt_templates": ["In {} the cat"],
    "samples": [{"subject": "France", "object": "sat on the mat"}, {"subject": "Italy", "object": "sat on the dog"}],
}  # fmt: skip


def log_prob(model: interp.HookedTransformer, prompt: str, answer: tuple[int, ...]) -> float:
    """log p of all tokens of an answer, each after those before it."""
    ids = model.to_tokens(prompt)[0].tolist()
    logits = model([[*ids, *answer]])[0, len(ids) - 1 :].log_softmax(-1)
    return sum(float(logits[i, token]) for i, token in enumerate(answer))


def test_answers_that_begin_alike_are_paired_as_wholes_and_compared_as_such(tmp_path: Path) -> None:
    model = hooked()
    facts = read_facts(written(tmp_path, BEGIN_ALIKE))
    with pytest.raises(ValueError, match="got none: row 0"):
        facts.pairs(model.text.tokenizer)
    pairs = facts.pairs(model.text.tokenizer, whole=True)
    mat, dog = (tuple(model.text.tokenizer.encode(f" sat on the {word}")) for word in ("mat", "dog"))
    assert pairs.answers == (mat, dog) and pairs.wrongs == (dog, mat) and mat[0] == dog[0]
    metric = interp.metrics.log_prob_difference(pairs.answers, pairs.wrongs)
    clean, corrupt = interp.causal.batches(model, pairs)
    found = interp.patch(model, clean, corrupt, "resid_pre", by=("layer",), metric=metric)
    for side in ("clean", "corrupt"):
        wanted = [
            log_prob(model, prompt, right) - log_prob(model, prompt, false)
            for prompt, right, false in zip(getattr(pairs, side), pairs.answers, pairs.wrongs, strict=True)
        ]
        np.testing.assert_allclose(found[side].values, wanted, atol=1e-9)
    np.testing.assert_allclose(found.each.sel(layer=0), found.clean - found.corrupt, atol=1e-9)
    with pytest.raises(ValueError, match="requires an answer for every prompt, got none"):
        interp.patch(model, clean, corrupt, "resid_pre")


def test_an_answer_that_begins_with_another_is_no_whole_beside_it(tmp_path: Path) -> None:
    samples = [{"subject": "France", "object": "sat"}, {"subject": "Italy", "object": "sat on"}]
    facts = read_facts(written(tmp_path, {**BEGIN_ALIKE, "samples": samples}))
    with pytest.raises(ValueError, match="got none: row 0"):
        facts.pairs(hooked().text.tokenizer, whole=True)


def test_pairs_of_one_token_are_the_same_as_wholes(tmp_path: Path) -> None:
    samples = [{"subject": "France", "object": "cat"}, {"subject": "Italy", "object": "dog"}]
    facts = read_facts(written(tmp_path, {**BEGIN_ALIKE, "samples": samples}))
    first, whole = (facts.pairs(hooked().text.tokenizer, whole=whole) for whole in (False, True))
    assert whole.answers is None and whole.wrongs is None
    assert torch.equal(first.answer, whole.answer) and torch.equal(first.wrong, whole.wrong)


def test_corrupted_prompts_of_a_file_are_paired_by_whole_answers_too(tmp_path: Path) -> None:
    tokenizer = hooked().text.tokenizer
    row = {"prompt": "The cat sat", "corrupt": "The dog sat", "answer": "on the mat", "wrong": "on the dog"}
    facts = read_facts(written(tmp_path, [row]))
    with pytest.raises(ValueError, match="or two answers, are the same in tokens"):
        facts.pairs(tokenizer)
    pairs = facts.pairs(tokenizer, whole=True)
    assert pairs.answers == (tuple(tokenizer.encode(" on the mat")),)


def test_corrupted_prompts_of_a_file_are_its_pairs(tmp_path: Path) -> None:
    model = hooked()
    row = {"prompt": "The cat sat on the", "corrupt": "The dog sat on the", "answer": "mat", "wrong": "cat"}
    pairs = read_facts(written(tmp_path, [row])).pairs(model.text.tokenizer)
    assert (
        pairs.clean == (row["prompt"],)
        and pairs.corrupt == (row["corrupt"],)
        and pairs.changes == ("changed",)
    )
    assert pairs.changed.equal(pairs.spans["changed"])
    short = {**row, "corrupt": "The dog sat"}
    note.cache_clear()
    with pytest.warns(Note, match="left out row 1, whose corrupted prompt has"):
        assert len(read_facts(written(tmp_path, [row, short])).pairs(model.text.tokenizer)) == 1
    with pytest.raises(ValueError, match="row 1 has no corrupted prompt, others have"):
        read_facts(written(tmp_path, [row, PLAIN[3]])).pairs(model.text.tokenizer)
    with pytest.raises(ValueError, match="got none: row 0, whose subject or answer has no tokens of its own"):
        read_facts(written(tmp_path, [PLAIN[3]])).pairs(model.text.tokenizer)
