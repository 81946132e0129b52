r"""Lists of pairs as prompts: "Q: hot\nA: cold\n\nQ: big\nA:", with right or with shuffled outputs.

The pairs of a task fall into three parts that share no pair: those whose activations are averaged, those in which an
effect is measured, and those set aside for the test. What is found on one part is judged on another.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Annotated, Literal, NamedTuple, get_args

import numpy as np

from interp.core.boundary import public
from interp.core.hints import Required
from interp.core.kinds import PositiveCount, Probability, Seed
from interp.data.batch import Answers, Prompts
from interp.tasks.examples import require

Words = str | Sequence[int]
"""A text, or token ids."""


def _no_pairs(value: object) -> str | None:
    """None for two or more pairs of texts, or of lists of token ids; else ""."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) < 2:
        return ""
    return None if all(map(_is_pair_of_texts, value)) or all(map(_is_pair_of_ids, value)) else ""


def _is_pair_of_texts(value: object) -> bool:
    return _is_two(value) and all(isinstance(item, str) and bool(item.strip()) for item in value)  # type: ignore[attr-defined]


def _is_pair_of_ids(value: object) -> bool:
    return _is_two(value) and all(map(_is_ids, value))  # type: ignore[call-overload]


def _is_two(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2


def _is_ids(value: object) -> bool:
    if not isinstance(value, list | tuple) or not value:
        return False
    return all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value)


WordPairs = Annotated[
    Sequence[Sequence[str]] | Sequence[Sequence[Sequence[int]]],
    Required("at least two pairs (input, output), of texts or of lists of token ids", _no_pairs),
]
"""The pairs (input, output) of a task."""
Part = Literal["mean", "effect", "test"]
"""The parts of a task's pairs: activations are averaged, effects are measured, or all is judged."""
TEMPLATE, SEPARATOR = "Q: {input}\nA: {output}", "\n\n"


class AskedPairs(NamedTuple):
    """Prompts that end where an output is due, with the outputs that are right."""

    prompts: Prompts
    answers: Answers


@public()
@dataclass(frozen=True)
class PairLists:
    """In-context lists of the pairs of a task, as prompts: some pairs with their outputs, then an input alone.

    The pairs are split at random, by the seed, into three parts without a pair in common. "mean" and "effect", of
    about equal size, are for training, "test" is set aside. A list takes its last input from one part, and its
    examples always from the training pairs. A pair that is given twice counts once. Pairs of token ids are listed
    without the words of the template.

    Args:
        shots: number of examples before the last input.
        rows: number of lists of the parts "mean" and "effect"; of the test there is one for each pair.
        template: how a pair is written, with `{input}` and `{output}`, which ends it.
        separator: what stands between two pairs.
        test_share: share of the pairs that is set aside for the test.
        seed: seed of the split and of the examples.

    Example:
        >>> pairs = [("hot", "cold"), ("big", "small"), ("up", "down"), ("wet", "dry"), ("old", "new"), ("in", "out")]
        >>> asked = PairLists(shots=2, rows=1).lists(pairs, "effect")
        >>> asked.prompts[0].count("Q:"), asked.prompts[0][-2:], asked.answers[0][0]
        (3, 'A:', ' ')
    """

    shots: PositiveCount = 10
    rows: PositiveCount = 25
    template: str = TEMPLATE
    separator: str = SEPARATOR
    test_share: Probability = 0.3
    seed: Seed = 0

    def __post_init__(self) -> None:
        require(self.shots > 1, "at least 2 shots, so that outputs can change places", self.shots)
        require(_is_template(self.template), "a template with {input}, that ends in {output}", self.template)

    @public()
    def split(self, pairs: WordPairs) -> dict[Part, list[tuple[Words, Words]]]:
        """The pairs of each part.

        Raises:
            ValueError: too few pairs for lists of `shots` examples and one pair in every part.
        """
        given = distinct(pairs)
        order = np.random.default_rng([self.seed, 0]).permutation(len(given))
        drawn = [given[i] for i in order.tolist()]
        test = round(self.test_share * len(given))
        training = len(given) - test
        if training <= self.shots or not test:
            raise ValueError(
                f"more than {self.shots} pairs for the lists and at least one for the test are required, got "
                f"{training} and {test} of {len(given)} pairs with test_share={self.test_share}"
            )
        middle = test + training // 2
        return {"test": drawn[:test], "mean": drawn[test:middle], "effect": drawn[middle:]}

    @public()
    def lists(self, pairs: WordPairs, part: Part, *, shuffled: bool = False) -> AskedPairs:
        """Lists that end in an input of one part.

        Args:
            pairs: the pairs of the task.
            part: the part of the last input; its pair is never among the examples.
            shuffled: whether every example has the output of another example, so that the list does not show the task.

        Returns:
            `rows` lists, of the test one for each pair, and their outputs. With and without `shuffled` they have the
            same inputs in the same order.

        Raises:
            ValueError: as `split`.
        """
        parts = self.split(pairs)
        training = [*parts["mean"], *parts["effect"]]
        first = {"mean": 0, "effect": len(parts["mean"]), "test": len(training)}[part]
        generator = np.random.default_rng([self.seed, 1 + get_args(Part).index(part)])
        own, listed = parts[part], []
        for row in range(len(own) if part == "test" else self.rows):
            query = first + row % len(own)
            numbers = [i for i in generator.permutation(len(training)).tolist() if i != query][: self.shots]
            turned = [*numbers[1:], numbers[0]] if shuffled else numbers
            examples = [(training[i][0], training[j][1]) for i, j in zip(numbers, turned, strict=True)]
            listed.append(self._list([*examples, own[row % len(own)]]))
        return _asked(listed)

    @public()
    def zero_shot(self, pairs: WordPairs, template: str | None = None) -> AskedPairs:
        """The inputs of the test in a template, without examples.

        Args:
            pairs: the pairs of the task.
            template: a text with `{input}`, which the output should follow after a space; None: that of the lists.

        Raises:
            ValueError: as `split`; a template without `{input}`, or one for token ids.
        """
        test = self.split(pairs)["test"]
        if template is None:
            return _asked([self._list([pair]) for pair in test])
        if "{input}" not in template or "{output}" in template or not isinstance(test[0][0], str):
            raise ValueError(
                f"a template with {{input}} and without {{output}}, for pairs of texts, is required, got {template!r}"
            )
        return _asked([(template.rstrip().replace("{input}", str(x)), f" {y}") for x, y in test])

    def _list(self, pairs: Sequence[tuple[Words, Words]]) -> tuple[Words, Words]:
        """The prompt that lists these pairs but for the last output, and that output."""
        *examples, (last, answer) = pairs
        if not isinstance(last, str):
            ids = [int(token) for pair in examples for words in pair for token in words]
            return [*ids, *map(int, last)], [int(token) for token in answer]
        before = self.template.removesuffix("{output}")
        end = before.rstrip(" ")
        shown = [before.replace("{input}", str(x)) + str(y) for x, y in examples]
        return self.separator.join([*shown, end.replace("{input}", last)]), f"{before[len(end) :]}{answer}"


def distinct(pairs: WordPairs) -> list[tuple[Words, Words]]:
    """The pairs in their order, each once: one that came twice would be an example of its own answer."""
    kept: dict[tuple[object, ...], tuple[Words, Words]] = {}
    for first, second in pairs:
        kept.setdefault(
            tuple(it if isinstance(it, str) else (*it,) for it in (first, second)), (first, second)
        )
    return list(kept.values())


def _is_template(template: str) -> bool:
    return (
        template.count("{input}") == template.count("{output}") == 1
        and template.endswith("{output}")
        and "{input}" in template
    )


def _asked(listed: Sequence[tuple[Words, Words]]) -> AskedPairs:
    prompts, answers = zip(*listed, strict=True)
    return AskedPairs(list(prompts), list(answers))


def load_word_pairs() -> Mapping[str, tuple[tuple[str, str], ...]]:
    """The word pairs of the package (`word_pairs.csv`) by task, in file order.

    Returns:
        The pairs (input, output) of "antonym", "country_capital", "present_past" and "singular_plural".

    Example:
        >>> load_word_pairs()["antonym"][0]
        ('hot', 'cold')
    """
    table = files(__package__).joinpath("word_pairs.csv").read_text(encoding="utf-8")
    found: dict[str, list[tuple[str, str]]] = {}
    for row in csv.DictReader(table.splitlines()):
        found.setdefault(row["task"], []).append((row["input"], row["output"]))
    return {task: tuple(pairs) for task, pairs in found.items()}
