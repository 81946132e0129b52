"""Minimal pairs of grammar: sentences that one word decides, paired with sentences in which that word is exchanged.

After BLiMP (Warstadt et al. 2020, arXiv:1912.00582): a model that knows the rule prefers the right ending. Which word
decides is known, so the pairs also test token attributions (Yin and Neubig 2022, arXiv:2202.10419). The models of the
package have never learned such words as single tokens: they are for GPT-2 and the like, or for a model trained on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from interp.core.boundary import public
from interp.data.tokenizers import Tokenizer
from interp.tasks.pairs import Pair, TaskPairs, next_token, pairs_of, required_single_tokens, row_of

Phenomenon = Literal["subject_verb", "distractor_agreement", "anaphor_gender", "determiner_noun"]
NOUNS: tuple[tuple[str, str], ...] = (
    ("man", "men"), ("woman", "women"), ("boy", "boys"), ("girl", "girls"), ("friend", "friends"),
    ("teacher", "teachers"), ("doctor", "doctors"), ("child", "children"), ("student", "students"),
    ("king", "kings"), ("writer", "writers"), ("driver", "drivers"), ("book", "books"), ("letter", "letters"),
    ("door", "doors"), ("hand", "hands"), ("house", "houses"), ("tree", "trees"), ("horse", "horses"),
    ("dog", "dogs"), ("ship", "ships"), ("word", "words"), ("room", "rooms"), ("window", "windows"),
)  # fmt: skip
"""Nouns, one and several."""
PEOPLE = 12
"""How many of them, from the first, can do what people do."""
WOMEN: tuple[str, ...] = ("Mary", "Anna", "Sarah", "Emma", "Laura", "Alice", "Julia", "Lucy", "Jane", "Kate")
MEN: tuple[str, ...] = (
    "John",
    "Peter",
    "Paul",
    "David",
    "Michael",
    "Robert",
    "James",
    "Mark",
    "George",
    "Henry",
)
DID: tuple[str, ...] = (
    "smiled",
    "left",
    "slept",
    "laughed",
    "spoke",
    "fell",
    "waited",
    "came",
    "wrote",
    "ran",
)
"""Verbs of what a person did, equal for one and several."""
TO_ONESELF: tuple[str, ...] = ("saw", "hurt", "asked", "found", "helped", "blamed", "hid", "taught")
TO_THINGS: tuple[str, ...] = ("saw", "sold", "found", "left", "knew", "liked", "lost", "took")


@public()
@dataclass(frozen=True)
class Agreement:
    """Minimal pairs of a phenomenon of grammar, of which the model prefers the right ending if it knows the rule.

    subject_verb: "The man who smiled" -> " was", not " were". distractor_agreement: "The man near the doors" -> " was":
    a noun of the other number stands between. anaphor_gender: "Mary hurt" -> " herself". determiner_noun: "Mary sold
    these" -> " books". BLiMP has the same phenomena, with sentences of its own.
    """

    phenomenon: Phenomenon = "distractor_agreement"
    """The rule of grammar that decides."""
    rows: int = 32
    """Number of pairs."""
    seed: int = 0
    """Seed of the draws."""

    def __post_init__(self) -> None:
        if self.phenomenon not in get_args(Phenomenon):
            raise ValueError(
                f"phenomenon must be one of {', '.join(get_args(Phenomenon))}, got {self.phenomenon!r}"
            )

    @staticmethod
    def texts() -> list[str]:
        """Texts that have all words of all phenomena, from which a vocabulary can be learned."""
        words = [*(word for both in NOUNS for word in both), *WOMEN, *MEN, *DID, *TO_ONESELF, *TO_THINGS]
        words += ["who", "near", "the", "this", "these", "was", "were", "himself", "herself"]
        return [f"The {word}. Then {word}" for word in words]

    def pairs(self, tokenizer: Tokenizer, *, generator: np.random.Generator | None = None) -> TaskPairs:
        """Sentences and their corruptions with the deciding word exchanged, so that the answers change places.

        Roles: evidence (the word that decides), end; distractor, where there is one. One group. Single tokens: all
        words that are drawn, and both endings.

        Args:
            tokenizer: the tokenizer of the model.
            generator: source of the random numbers; None: the seed's.

        Returns:
            `TaskPairs`.

        Raises:
            ValueError: too few words that are single tokens; the message names them.

        Example:
            >>> tokenizer = interp.lab.training.Vocabulary.learned(interp.tasks.Agreement.texts(), 800).tokenizer
            >>> pairs = interp.tasks.Agreement("subject_verb", 2).pairs(tokenizer)
            >>> pairs.changes, sorted(pairs.spans)
            (('evidence',), ['end', 'evidence'])
        """
        generator = np.random.default_rng(self.seed) if generator is None else generator
        words = _Words(tokenizer)
        draw = {
            "subject_verb": _subject_verb, "distractor_agreement": _distractor,
            "anaphor_gender": _anaphor, "determiner_noun": _determiner,
        }[self.phenomenon]  # fmt: skip
        pairs = [_pair(tokenizer, *draw(words, generator), self.phenomenon) for _ in range(self.rows)]
        return pairs_of("agreement", pairs, changes=("evidence",))


@dataclass(frozen=True)
class _Words:
    """The words of the lists that are single tokens."""

    tokenizer: Tokenizer

    def of(self, listed: tuple[str, ...], kind: str) -> list[str]:
        """The words of a list."""
        return [*required_single_tokens(self.tokenizer, listed, task="agreement", kind=kind, at_least=2)]

    def nouns(self, listed: tuple[tuple[str, str], ...]) -> list[tuple[str, str]]:
        """Nouns that are so in both numbers."""
        flat = tuple(word for both in listed for word in both)
        known = set(self.of(flat, "nouns"))
        found = [both for both in listed if known.issuperset(both)]
        if len(found) < 2:
            raise ValueError(
                f"agreement requires two nouns that are single tokens in both numbers, got {found}"
            )
        return found


DrawnSentence = tuple[str, dict[str, str], str, tuple[str, str]]
"""A template, its words, the evidence of the other sentence, and the right and the wrong ending."""


def _one(generator: np.random.Generator, count: int) -> int:
    return int(generator.integers(count))


def _subject_verb(words: _Words, generator: np.random.Generator) -> DrawnSentence:
    people, did = words.nouns(NOUNS[:PEOPLE]), words.of(DID, "verbs")
    both, number = people[_one(generator, len(people))], _one(generator, 2)
    named = {"evidence": both[number], "verb": did[_one(generator, len(did))]}
    return "The {evidence} who {verb}", named, both[1 - number], _verbs(number)


def _distractor(words: _Words, generator: np.random.Generator) -> DrawnSentence:
    nouns = words.nouns(NOUNS)
    first, second = generator.choice(len(nouns), 2, replace=False).tolist()
    number = _one(generator, 2)
    named = {"evidence": nouns[first][number], "distractor": nouns[second][1 - number]}
    return "The {evidence} near the {distractor}", named, nouns[first][1 - number], _verbs(number)


def _anaphor(words: _Words, generator: np.random.Generator) -> DrawnSentence:
    names = words.of(WOMEN, "names"), words.of(MEN, "names")
    saw, gender = words.of(TO_ONESELF, "verbs"), _one(generator, 2)
    mine, other = (names[g][_one(generator, len(names[g]))] for g in (gender, 1 - gender))
    ends = (" herself", " himself")
    return "Then {evidence} {verb}", {"evidence": mine, "verb": saw[_one(generator, len(saw))]}, other, (
        ends[gender], ends[1 - gender],
    )  # fmt: skip


def _determiner(words: _Words, generator: np.random.Generator) -> DrawnSentence:
    nouns, names = words.nouns(NOUNS[PEOPLE:]), words.of((*WOMEN, *MEN), "names")
    sold, number = words.of(TO_THINGS, "verbs"), _one(generator, 2)
    both, this = nouns[_one(generator, len(nouns))], ("this", "these")
    named = {
        "name": names[_one(generator, len(names))], "verb": sold[_one(generator, len(sold))], "evidence": this[number]
    }  # fmt: skip
    ends = f" {both[number]}", f" {both[1 - number]}"
    return "Then {name} {verb} {evidence}", named, this[1 - number], ends


def _verbs(number: int) -> tuple[str, str]:
    """The verb of this number, and the other one."""
    return (" was", " were") if number == 0 else (" were", " was")


def _pair(
    tokenizer: Tokenizer,
    template: str,
    words: Mapping[str, str],
    other: str,
    ends: tuple[str, str],
    group: str,
) -> Pair:
    clean = row_of(tokenizer, template, words)
    roles = {role: clean.columns[role] for role in ("evidence", "distractor") if role in words}
    return Pair(
        clean=clean,
        corrupt=row_of(tokenizer, template, {**words, "evidence": other}),
        answer=next_token(tokenizer, clean.text, ends[0]),
        wrong=next_token(tokenizer, clean.text, ends[1]),
        roles=roles,
        group=group,
    )
