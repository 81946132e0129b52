"""Generated tasks with a known answer: facts, indirect objects, repeated random tokens.

The demo models are trained on these sentences, their cards are measured on the held-out part of them, and causal
analyses use them as prompts with a right and a wrong answer. Everything is text (or token ids) and a pure function of
a `numpy.random.Generator`, so it works with any tokenizer and gives the same rows on every machine.

What is held out, whatever the seed: two phrasings per relation (`HELD_OUT_PHRASING`, `DISTANT_PHRASING`) and about
15 % of the unordered name pairs (`is_held_out`). The fact table was typed for this package from general knowledge.
"""

import csv
import itertools
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from types import MappingProxyType

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

TRAINED_PHRASINGS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "capital": (
            "The capital of {subject} is",
            "{subject}'s capital is",
            "In {subject}, the capital is",
            "The name of the capital of {subject} is",
        ),
        "currency": (
            "The currency of {subject} is the",
            "{subject}'s currency is the",
            "In {subject}, the currency is the",
            "The name of the currency of {subject} is the",
        ),
        "language": (
            "The language of {subject} is",
            "{subject}'s language is",
            "In {subject}, the language is",
            "The name of the language of {subject} is",
        ),
        "continent": (
            "The continent of {subject} is",
            "{subject}'s continent is",
            "In {subject}, the continent is",
            "The name of the continent of {subject} is",
        ),
    }
)
"""Relation -> the prompts of its facts that training text contains; the object follows, then a full stop."""

HELD_OUT_PHRASING: Mapping[str, str] = MappingProxyType(
    {
        "capital": "The name of {subject}'s capital is",
        "currency": "The name of {subject}'s currency is the",
        "language": "The name of {subject}'s language is",
        "continent": "The name of {subject}'s continent is",
    }
)
"""Relation -> one more prompt, a recombination of trained words that no training text contains for any fact."""

DISTANT_PHRASING: Mapping[str, str] = MappingProxyType(
    {
        "capital": "In {subject}, the name of the capital is",
        "currency": "In {subject}, the name of the currency is the",
        "language": "In {subject}, the name of the language is",
        "continent": "In {subject}, the name of the continent is",
    }
)
"""Relation -> a second unseen prompt, harder: the subject stands further from its object than in any training text."""

NAMES: tuple[str, ...] = (
    *("Mary", "John", "Tom", "James", "Dan", "Martin", "Amy", "Paul", "Kate", "Mark"),
    *("Laura", "Peter", "Sarah", "David", "Emma", "Jack", "Alice", "Henry", "Jane", "Simon"),
    *("Rose", "George", "Anna", "Robert", "Lucy", "William", "Helen", "Frank", "Clara", "Oscar"),
    *("Julia", "Victor", "Ruth", "Adam", "Grace", "Philip", "Susan", "Kevin", "Linda", "Brian"),
)
"""First names of the indirect-object sentences; one token each, with the leading space, in the demo tokenizer."""

PLACES: tuple[str, ...] = (
    *("store", "school", "garden", "station", "park", "market", "library", "office", "house", "river"),
    *("church", "farm", "beach", "theatre"),
)
"""Places of the indirect-object sentences."""

GIFTS: tuple[str, ...] = (
    *("drink", "book", "ring", "letter", "basket", "ball", "coat", "key", "flower", "map"),
    *("lamp", "picture", "kite", "cup"),
)
"""Things that are given in the indirect-object sentences."""

INDIRECT_OBJECT_TEMPLATES: tuple[str, ...] = (
    "When {first} and {second} went to the {place}, {subject} gave a {gift} to",
    "After {first} and {second} left the {place}, {subject} gave a {gift} to",
    "While {first} and {second} were at the {place}, {subject} handed a {gift} to",
    "Then {first} and {second} had a long talk in the {place}, and {subject} offered a {gift} to",
    "Today {first} and {second} met near the {place}. Later {subject} showed a {gift} to",
    "Once {first} and {second} were alone in the {place}, {subject} passed a {gift} to",
)
"""Sentence frames; the giver's name comes a second time and the other name is the answer."""

HELD_OUT_PER_CENT = 15
"""Share of the unordered name pairs that never occur in training sentences, in either role."""


@dataclass(frozen=True)
class Fact:
    """One row of the fact table: `object` is what `relation` gives for `subject`."""

    relation: str
    """Key of `TRAINED_PHRASINGS`."""
    subject: str
    """A country."""
    object: str
    """The one right answer."""


@dataclass(frozen=True)
class FactPrompt:
    """A fact put into words up to its object."""

    fact: Fact
    """The fact asked for."""
    phrasing: str
    """The template, with `{subject}` open."""

    @property
    def prompt(self) -> str:
        """The words before the object, without a space at the end.

        >>> FactPrompt(Fact("capital", "France", "Paris"), "The capital of {subject} is").prompt
        'The capital of France is'
        """
        return self.phrasing.format(subject=self.fact.subject)

    @property
    def answer(self) -> str:
        """The object with its leading space, as the text continues."""
        return f" {self.fact.object}"

    @property
    def text(self) -> str:
        """The whole sentence."""
        return f"{self.prompt}{self.answer}."


@dataclass(frozen=True)
class IndirectObject:
    """A sentence with two names in which the giver is named twice and the receiver is the answer.

    Wang et al. 2022 (arXiv:2211.00593), section 2: with `receiver_first` the order of the names is ABBA, else BABA.
    """

    receiver: str
    """The indirect object: the name that occurs once, the answer."""
    giver: str
    """The subject of the second clause: the name that occurs twice, the wrong answer."""
    place: str
    """Where the first clause happens."""
    gift: str
    """What is given."""
    template: str
    """One of `INDIRECT_OBJECT_TEMPLATES`."""
    receiver_first: bool
    """Whether the receiver is the first name of the sentence (ABBA) or the second (BABA)."""

    @property
    def prompt(self) -> str:
        """The words before the answer, without a space at the end.

        >>> IndirectObject("Mary", "John", "store", "drink", INDIRECT_OBJECT_TEMPLATES[0], True).prompt
        'When Mary and John went to the store, John gave a drink to'
        """
        names = (self.receiver, self.giver) if self.receiver_first else (self.giver, self.receiver)
        return self.template.format(
            first=names[0], second=names[1], subject=self.giver, place=self.place, gift=self.gift
        )

    @property
    def answer(self) -> str:
        """The receiver's name with its leading space."""
        return f" {self.receiver}"

    @property
    def wrong(self) -> str:
        """The giver's name with its leading space."""
        return f" {self.giver}"

    @property
    def text(self) -> str:
        """The whole sentence."""
        return f"{self.prompt}{self.answer}."

    def swapped(self) -> "IndirectObject":
        """The same sentence with the other name as giver: one word differs and the answers change places.

        It is the usual corrupted prompt of activation patching, equally long and equally likely.
        """
        return replace(self, receiver=self.giver, giver=self.receiver, receiver_first=not self.receiver_first)


def load_facts() -> tuple[Fact, ...]:
    """The fact table of the package (`facts.csv`), in file order."""
    table = files(__package__).joinpath("facts.csv").read_text(encoding="utf-8")
    return tuple(
        Fact(row["relation"], row["subject"], row["object"]) for row in csv.DictReader(table.splitlines())
    )


def trained_fact_prompts(facts: Iterable[Fact]) -> tuple[FactPrompt, ...]:
    """Every fact in each of its trained phrasings, fact by fact."""
    return tuple(
        FactPrompt(fact, phrasing) for fact in facts for phrasing in TRAINED_PHRASINGS[fact.relation]
    )


def held_out_fact_prompts(facts: Iterable[Fact]) -> tuple[FactPrompt, ...]:
    """Every fact once, in the phrasing that training text never contains."""
    return tuple(FactPrompt(fact, HELD_OUT_PHRASING[fact.relation]) for fact in facts)


def distant_fact_prompts(facts: Iterable[Fact]) -> tuple[FactPrompt, ...]:
    """Every fact once, in the harder one of the two unseen phrasings."""
    return tuple(FactPrompt(fact, DISTANT_PHRASING[fact.relation]) for fact in facts)


def is_held_out(name: str, other: str) -> bool:
    """Whether the pair is kept for evaluation: a fixed hash of the sorted pair, about 15 % of all pairs.

    >>> is_held_out("Mary", "John") == is_held_out("John", "Mary")
    True
    """
    return zlib.crc32(" ".join(sorted((name, other))).encode()) % 100 < HELD_OUT_PER_CENT


def name_pairs(*, held_out: bool) -> tuple[tuple[str, str], ...]:
    """The unordered pairs of `NAMES` on one side of the split, in the order of the table."""
    return tuple(pair for pair in itertools.combinations(NAMES, 2) if is_held_out(*pair) == held_out)


def indirect_objects(
    generator: np.random.Generator, sentences: int, *, held_out: bool = False
) -> tuple[IndirectObject, ...]:
    """Random sentences over trained (or held-out) name pairs; template, order, roles, place and gift are uniform.

    >>> indirect_objects(np.random.default_rng(0), 1)[0].text.count(".") >= 1
    True
    """
    pairs = name_pairs(held_out=held_out)
    sizes = (len(pairs), 2, len(PLACES), len(GIFTS), len(INDIRECT_OBJECT_TEMPLATES), 2)
    draws = generator.integers(0, sizes, size=(sentences, len(sizes))).tolist()
    return tuple(
        IndirectObject(
            receiver=pairs[pair][role],
            giver=pairs[pair][1 - role],
            place=PLACES[place],
            gift=GIFTS[gift],
            template=INDIRECT_OBJECT_TEMPLATES[template],
            receiver_first=bool(first),
        )
        for pair, role, place, gift, template, first in draws
    )


def repeated_tokens(
    generator: np.random.Generator,
    rows: int,
    *,
    period: int,
    repeats: int,
    vocab: int | Sequence[int],
    bos: int | None = None,
) -> Int[Tensor, "b p"]:
    """Token ids that repeat: per row `period` distinct random tokens, `repeats` times over, after `bos` if given.

    Row i is [bos, t_1 .. t_period, t_1 .. t_period, ...]. The layout of the prefix-matching evaluation of Olsson et
    al. 2022 is `period=25, repeats=4` with a BOS.

    `vocab` is the number of ids (0 .. vocab - 1) or the ids themselves; pass the ids to leave special tokens out.
    `bos` is never drawn. Raises ValueError when fewer than `period` different ids remain.

    >>> repeated_tokens(np.random.default_rng(0), 2, period=5, repeats=3, vocab=100, bos=0).shape
    torch.Size([2, 16])
    """
    ids = np.unique(np.arange(vocab) if isinstance(vocab, int) else np.asarray(vocab, dtype=np.int64))
    ids = ids[ids != bos] if bos is not None else ids
    if not 1 <= period <= len(ids):
        raise ValueError(f"period must be in [1, {len(ids)}], the number of ids to draw from, got {period}")
    if rows < 1 or repeats < 1:
        raise ValueError(f"rows and repeats must be at least 1, got rows={rows}, repeats={repeats}")
    once = generator.permuted(np.tile(ids, (rows, 1)), axis=1)[:, :period]
    tokens = np.tile(once, (1, repeats)).astype(np.int64)
    if bos is not None:
        tokens = np.concatenate([np.full((rows, 1), bos), tokens], axis=1)
    return torch.from_numpy(tokens)
