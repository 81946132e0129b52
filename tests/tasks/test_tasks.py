"""The generated tasks keep their promises: reproducible, disjoint splits, answers that follow from the prompt."""

from collections import Counter

import numpy as np
import pytest
import torch

from interp import tasks
from interp.tasks.indirect_objects import name_pairs

FACTS = tasks.load_facts()


def sentences(*, held_out: bool, count: int = 3000) -> tuple[tasks.IndirectObject, ...]:
    return tasks.IndirectObjects(count, held_out=held_out).sentences()


def test_fact_table_has_over_200_facts_of_four_relations_with_one_object() -> None:
    assert len(FACTS) >= 240
    assert {fact.relation for fact in FACTS} == set(tasks.TRAINED_PHRASINGS) == set(tasks.HELD_OUT_PHRASINGS)
    assert max(Counter((fact.relation, fact.subject) for fact in FACTS).values()) == 1
    assert len({fact.subject for fact in FACTS}) >= 62


def test_fact_table_has_no_stray_space_or_empty_cell() -> None:
    for fact in FACTS:
        for cell in (fact.subject, fact.object):
            assert cell and cell == cell.strip() and cell.isascii()


def test_a_capital_belongs_to_one_country() -> None:
    capitals = [fact.object for fact in FACTS if fact.relation == "capital"]
    assert len(capitals) == len(set(capitals))


@pytest.mark.parametrize("relation", tasks.TRAINED_PHRASINGS)
def test_held_out_phrasing_never_occurs_in_training_text(relation: str) -> None:
    trained = "\n".join(prompt.text for prompt in tasks.fact_prompts())
    both = tasks.fact_prompts(tasks.HELD_OUT_PHRASINGS) + tasks.fact_prompts(tasks.DISTANT_PHRASINGS)
    unseen = [prompt for prompt in both if prompt.fact.relation == relation]
    assert unseen
    assert not [p.prompt for p in unseen if p.prompt in trained]


@pytest.mark.parametrize("relation", tasks.TRAINED_PHRASINGS)
def test_held_out_phrasing_recombines_trained_words(relation: str) -> None:
    words = {word for phrasing in tasks.TRAINED_PHRASINGS[relation] for word in phrasing.split()}
    assert set(tasks.HELD_OUT_PHRASINGS[relation][0].split()) <= words
    assert set(tasks.DISTANT_PHRASINGS[relation][0].split()) <= words


def test_every_fact_has_four_trained_prompts_and_one_held_out() -> None:
    assert len(tasks.fact_prompts()) == 4 * len(FACTS)
    assert len(tasks.fact_prompts(tasks.HELD_OUT_PHRASINGS)) == len(FACTS)


def test_fact_text_is_prompt_then_answer_then_full_stop() -> None:
    prompt = tasks.FactPrompt(tasks.Fact("capital", "France", "Paris"), "In {subject}, the capital is")
    assert (prompt.prompt, prompt.answer) == ("In France, the capital is", " Paris")
    assert prompt.text == "In France, the capital is Paris."


def test_held_out_pairs_are_about_15_per_cent_and_disjoint_from_trained() -> None:
    unseen, trained = set(name_pairs(held_out=True)), set(name_pairs(held_out=False))
    n = len(tasks.NAMES)
    assert not unseen & trained
    assert len(unseen | trained) == n * (n - 1) // 2
    assert 0.10 < len(unseen) / len(unseen | trained) < 0.20


def test_held_out_pairs_never_occur_in_training_sentences_in_either_role() -> None:
    seen = {frozenset((s.receiver, s.giver)) for s in sentences(held_out=False)}
    assert not seen & {frozenset(pair) for pair in name_pairs(held_out=True)}
    assert {frozenset((s.receiver, s.giver)) for s in sentences(held_out=True)} <= {
        frozenset(pair) for pair in name_pairs(held_out=True)
    }


def test_every_name_is_trained_with_many_others() -> None:
    partners = Counter(name for pair in name_pairs(held_out=False) for name in pair)
    assert min(partners[name] for name in tasks.NAMES) >= 20


@pytest.mark.parametrize("held_out", [False, True])
def test_the_answer_occurs_once_in_the_prompt_and_the_wrong_name_twice(held_out: bool) -> None:
    for s in sentences(held_out=held_out, count=300):
        words = s.prompt.replace(",", " ").replace(".", " ").split()
        assert words.count(s.receiver) == 1 and words.count(s.giver) == 2
        assert s.text == f"{s.prompt}{s.answer}."


def test_both_orders_and_all_templates_are_drawn() -> None:
    drawn = sentences(held_out=False)
    assert {s.template for s in drawn} == set(tasks.TEMPLATES)
    assert 0.4 < np.mean([s.receiver_first for s in drawn]) < 0.6
    for s in drawn[:200]:
        first = s.prompt.index(f" {s.receiver}") < s.prompt.index(f" {s.giver}")
        assert first == s.receiver_first


def test_every_name_stands_after_a_space_so_that_it_is_one_token() -> None:
    for s in sentences(held_out=False, count=300):
        for name in (s.receiver, s.giver):
            assert s.prompt.count(name) == s.prompt.count(f" {name}")


def test_swapping_changes_the_repeated_name_alone_and_exchanges_answers() -> None:
    for s in sentences(held_out=False, count=100):
        other = s.swapped()
        differing = [(a, b) for a, b in zip(s.prompt.split(), other.prompt.split(), strict=True) if a != b]
        assert differing == [(s.giver, s.receiver)]
        assert (other.answer, other.wrong) == (s.wrong, s.answer)
        assert other.swapped() == s


def test_the_same_seed_gives_the_same_sentences_and_another_seed_others() -> None:
    draws = [tasks.IndirectObjects(20, seed).sentences() for seed in (3, 3, 4)]
    assert draws[0] == draws[1] != draws[2]
    assert tasks.IndirectObjects(20, seed=9).sentences(np.random.default_rng(3)) == draws[0]


def repeats(seed: int = 0, period: int = 25, bos: int | None = 7) -> torch.Tensor:
    asked = tasks.RepeatedTokens(period, rows=6, seed=99)  # the generator counts, not the seed
    return asked.tokens(50, bos, np.random.default_rng(seed))


def test_repeated_tokens_really_repeat_after_bos() -> None:
    tokens = repeats()
    assert tokens.shape == (6, 101) and tokens.dtype == torch.int64
    assert (tokens[:, 0] == 7).all()
    assert torch.equal(tokens[:, 1:-25], tokens[:, 26:])


def test_tokens_within_a_period_are_distinct_and_never_bos() -> None:
    for row in repeats()[:, 1:26].tolist():
        assert len(set(row)) == 25 and 7 not in row


def test_rows_of_repeats_differ_and_follow_the_seed() -> None:
    assert torch.equal(repeats(1), repeats(1))
    assert not torch.equal(repeats(1), repeats(2))
    assert len({tuple(row) for row in repeats().tolist()}) == 6


def test_repeats_without_bos_start_with_the_first_period() -> None:
    assert repeats(bos=None).shape == (6, 100)


def test_repeats_draw_only_from_the_given_ids() -> None:
    for generator in (None, np.random.default_rng(0)):
        tokens = tasks.RepeatedTokens(3, 2, 4).tokens([5, 11, 13, 17], generator=generator)
        assert tokens.shape == (4, 6) and set(tokens.unique().tolist()) <= {5, 11, 13, 17}


def test_a_period_longer_than_the_vocabulary_is_refused_with_the_limit() -> None:
    with pytest.raises(ValueError, match="vocab must hold 50 distinct tokens besides BOS, got 49"):
        repeats(period=50)
