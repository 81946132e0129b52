"""Lists of pairs against a reader that finds pairs, examples and outputs in the prompts themselves."""

import pytest

import interp
from interp.tasks import PairLists, load_word_pairs

PAIRS = [(f"in{i}", f"out{i}") for i in range(20)]
IDS = [([i], [i + 40, i + 60]) for i in range(20)]
LISTS = PairLists(shots=4, rows=6, seed=3)


def read(prompt: str) -> tuple[list[tuple[str, str]], str]:
    """The examples of a list, and its last input."""
    *shown, last = [block.split("\nA:") for block in prompt.split("\n\n")]
    assert last[1] == "" and all(block[0].startswith("Q: ") for block in [*shown, last])
    return [(block[0][3:], block[1].strip()) for block in shown], last[0][3:]


def test_parts_hold_every_pair_once() -> None:
    parts = LISTS.split(PAIRS)
    assert sorted(pair for part in parts.values() for pair in part) == sorted(PAIRS)
    assert {name: len(part) for name, part in parts.items()} == {"test": 6, "mean": 7, "effect": 7}


@pytest.mark.parametrize("part", ["mean", "effect", "test"])
def test_a_list_asks_its_own_part_and_shows_training_pairs(part: str) -> None:
    parts, outputs = LISTS.split(PAIRS), dict(PAIRS)
    asked = LISTS.lists(PAIRS, part)  # type: ignore[arg-type]
    assert len(asked.prompts) == 6
    for prompt, answer in zip(asked.prompts, asked.answers, strict=True):
        examples, last = read(prompt)
        assert (last, answer) == (last, f" {outputs[last]}") and last in dict(parts[part])  # type: ignore[index]
        assert len(set(examples)) == 4 and all(outputs[x] == y for x, y in examples)
        assert not {x for x, _ in examples} & {last, *dict(parts["test"])}


def test_shuffled_lists_differ_in_their_outputs_alone() -> None:
    right, shuffled = (LISTS.lists(PAIRS, "effect", shuffled=kind) for kind in (False, True))
    assert right.answers == shuffled.answers
    for one, other in zip(right.prompts, shuffled.prompts, strict=True):
        (examples, last), (turned, same) = read(one), read(other)
        assert last == same and [x for x, _ in examples] == [x for x, _ in turned]
        assert sorted(y for _, y in examples) == sorted(y for _, y in turned)
        assert all(y != z for (_, y), (_, z) in zip(examples, turned, strict=True))


def test_the_test_lists_every_pair_set_aside_once() -> None:
    for asked in (LISTS.lists(PAIRS, "test"), LISTS.zero_shot(PAIRS)):
        assert sorted(read(prompt)[1] for prompt in asked.prompts) == sorted(
            x for x, _ in LISTS.split(PAIRS)["test"]
        )
    assert LISTS.zero_shot(PAIRS).prompts[0].startswith("Q: in")


def test_ids_are_listed_without_words() -> None:
    parts = LISTS.split(IDS)
    for prompt, answer in zip(*LISTS.lists(IDS, "mean"), strict=True):
        assert len(prompt) == 4 * 3 + 1 and answer == [prompt[-1] + 40, prompt[-1] + 60]
        assert ([prompt[-1]], answer) in parts["mean"]
        assert all(prompt[i : i + 3] == [prompt[i], prompt[i] + 40, prompt[i] + 60] for i in range(0, 12, 3))


def test_a_template_of_ones_own_ends_where_the_output_is_due() -> None:
    asked = LISTS.zero_shot(PAIRS, "The word for {input} is ")
    last = LISTS.split(PAIRS)["test"][0]
    assert (asked.prompts[0], asked.answers[0]) == (f"The word for {last[0]} is", f" {last[1]}")
    own = PairLists(shots=2, rows=1, template="{input}->{output}", separator=";")
    assert (
        own.lists(PAIRS, "mean").prompts[0].endswith("->")
        and own.lists(PAIRS, "mean").answers[0][:3] == "out"
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shots": 1}, "at least 2 shots"),
        ({"template": "Q: {input}"}, "ends in {output}"),
        ({"template": "{output} {input}"}, "ends in {output}"),
        ({"shots": 0}, "from 1 to"),
    ],
)
def test_settings_that_make_no_lists_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PairLists(**settings)  # type: ignore[arg-type]


def test_too_few_pairs_are_refused_with_their_number() -> None:
    with pytest.raises(ValueError, match=r"more than 10 pairs for the lists .* got 4 and 2 of 6"):
        PairLists().split(PAIRS[:6])
    with pytest.raises(ValueError, match=r"with \{input\}"):
        LISTS.zero_shot(PAIRS, "The answer is")
    with pytest.raises(ValueError, match="pairs of texts"):
        LISTS.zero_shot(IDS, "The {input} is")


def test_own_word_pairs_are_unique_and_enough_for_default_lists() -> None:
    found = load_word_pairs()
    assert list(found) == ["antonym", "country_capital", "present_past", "singular_plural"]
    for pairs in found.values():
        assert len({x for x, _ in pairs}) == len(pairs) >= 30
        assert all(word == word.strip() and word for pair in pairs for word in pair)
        assert len(interp.tasks.PairLists().lists(pairs, "test").prompts) == round(0.3 * len(pairs))


def test_a_pair_that_is_given_twice_counts_once() -> None:
    for pairs in (PAIRS, IDS):
        twice = [*pairs[:15], *pairs[3:9], *pairs[15:], *pairs[:2]]
        assert LISTS.lists(twice, "test") == LISTS.lists(pairs, "test")  # type: ignore[arg-type]
        assert LISTS.split(twice) == LISTS.split(pairs)  # type: ignore[arg-type]
