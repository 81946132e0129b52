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
from interp.core.kinds import PositiveCount, Seed
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
"""Nouns, (singular, plural)."""
PEOPLE = 12
"""Number of nouns, from the first on, that are people and can be subjects of verbs."""
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
"""Past-tense verbs, equal in singular and plural."""
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
    rows: PositiveCount = 32
    """Number of pairs."""
    seed: Seed = 0
    """Seed of the draws."""

    def __post_init__(self) -> None:
        if self.phenomenon not in get_args(Phenomenon):
            raise ValueError(
                f"phenomenon must be one of {', '.join(get_args(Phenomenon))}, got {self.phenomenon!r}"
            )

    @staticmethod
    def texts() -> list[str]:
        """Texts that have all words of all phenomena, from which a vocabulary can be learned."""
        words = [*(word for forms in NOUNS for word in forms), *WOMEN, *MEN, *DID, *TO_ONESELF, *TO_THINGS]
        words += ["who", "near", "the", "this", "these", "was", "were", "himself", "herself"]
        return [f"The {word}. Then {word}" for word in words]

    @public()
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
    """Selects the words that are single tokens of this tokenizer."""

    tokenizer: Tokenizer

    def of(self, listed: tuple[str, ...], kind: str) -> list[str]:
        """The words of a list that are single tokens."""
        return [*required_single_tokens(self.tokenizer, listed, task="agreement", kind=kind, at_least=2)]

    def nouns(self, listed: tuple[tuple[str, str], ...]) -> list[tuple[str, str]]:
        """Nouns of a list whose singular and plural are both single tokens."""
        flat = tuple(word for forms in listed for word in forms)
        known = set(self.of(flat, "nouns"))
        nouns = [forms for forms in listed if known.issuperset(forms)]
        if len(nouns) < 2:
            raise ValueError(
                f"agreement requires two nouns that are single tokens in both numbers, got {nouns}"
            )
        return nouns


DrawnSentence = tuple[str, dict[str, str], str, tuple[str, str]]
"""A template, its words, the deciding word of the corrupted sentence, and the right and the wrong ending."""


def _draw_index(generator: np.random.Generator, count: int) -> int:
    """A random integer in [0, count)."""
    return int(generator.integers(count))


def _subject_verb(words: _Words, generator: np.random.Generator) -> DrawnSentence:
    people, did = words.nouns(NOUNS[:PEOPLE]), words.of(DID, "verbs")
    forms, number = people[_draw_index(generator, len(people))], _draw_index(generator, 2)
    named = {"evidence": forms[number], "verb": did[_draw_index(generator, len(did))]}
    return "The {evidence} who {verb}", named, forms[1 - number], _verbs(number)


def _distractor(words: _Words, generator: np.random.Generator) -> DrawnSentence:
    nouns = words.nouns(NOUNS)
    first, second = generator.choice(len(nouns), 2, replace=False).tolist()
    number = _draw_index(generator, 2)
    named = {"evidence": nouns[first][number], "distractor": nouns[second][1 - number]}
    return "The {evidence} near the {distractor}", named, nouns[first][1 - number], _verbs(number)


def _anaphor(words: _Words, generator: np.random.Generator) -> DrawnSentence:
    names = words.of(WOMEN, "names"), words.of(MEN, "names")
    saw, gender = words.of(TO_ONESELF, "verbs"), _draw_index(generator, 2)
    evidence, other_evidence = (names[g][_draw_index(generator, len(names[g]))] for g in (gender, 1 - gender))
    ends = (" herself", " himself")
    named = {"evidence": evidence, "verb": saw[_draw_index(generator, len(saw))]}
    return "Then {evidence} {verb}", named, other_evidence, (ends[gender], ends[1 - gender])


def _determiner(words: _Words, generator: np.random.Generator) -> DrawnSentence:
    nouns, names = words.nouns(NOUNS[PEOPLE:]), words.of((*WOMEN, *MEN), "names")
    sold, number = words.of(TO_THINGS, "verbs"), _draw_index(generator, 2)
    forms, this = nouns[_draw_index(generator, len(nouns))], ("this", "these")
    named = {
        "name": names[_draw_index(generator, len(names))],
        "verb": sold[_draw_index(generator, len(sold))],
        "evidence": this[number],
    }
    ends = f" {forms[number]}", f" {forms[1 - number]}"
    return "Then {name} {verb} {evidence}", named, this[1 - number], ends


def _verbs(number: int) -> tuple[str, str]:
    """The endings right and wrong for a subject of this number (0: singular, 1: plural)."""
    return (" was", " were") if number == 0 else (" were", " was")


def _pair(
    tokenizer: Tokenizer,
    template: str,
    words: Mapping[str, str],
    corrupt_evidence: str,
    ends: tuple[str, str],
    group: str,
) -> Pair:
    clean = row_of(tokenizer, template, words)
    roles = {role: clean.columns[role] for role in ("evidence", "distractor") if role in words}
    return Pair(
        clean=clean,
        corrupt=row_of(tokenizer, template, {**words, "evidence": corrupt_evidence}),
        answer=next_token(tokenizer, clean.text, ends[0]),
        wrong=next_token(tokenizer, clean.text, ends[1]),
        roles=roles,
        group=group,
    )
