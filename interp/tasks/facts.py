"""Facts about countries: capital, currency, language, continent.

The demo models are trained on them in four phrasings per relation; two more phrasings (`HELD_OUT_PHRASINGS`,
`DISTANT_PHRASINGS`) occur in no training text. The table was typed for this package from general knowledge.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from types import MappingProxyType

import numpy as np

from interp.core.boundary import public
from interp.core.kinds import PositiveCount, Seed
from interp.core.wording import nearest
from interp.data.tokenizers import Tokenizer
from interp.tasks.pairs import (
    SHOWN,
    MergedTokensError,
    Pair,
    TaskPairs,
    WordRow,
    pairs_of,
    pieces,
    row_of,
    spells,
    tokens_after,
)

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

HELD_OUT_PHRASINGS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "capital": ("The name of {subject}'s capital is",),
        "currency": ("The name of {subject}'s currency is the",),
        "language": ("The name of {subject}'s language is",),
        "continent": ("The name of {subject}'s continent is",),
    }
)
"""Relation -> one more prompt, a recombination of trained words that no training text contains for any fact."""

DISTANT_PHRASINGS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "capital": ("In {subject}, the name of the capital is",),
        "currency": ("In {subject}, the name of the currency is the",),
        "language": ("In {subject}, the name of the language is",),
        "continent": ("In {subject}, the name of the continent is",),
    }
)
"""Relation -> a second unseen prompt, harder: the subject stands further from its object than in any training text."""


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
    """A fact in words, up to its object."""

    fact: Fact
    """The fact whose object is the answer."""
    phrasing: str
    """The template, with `{subject}` open."""

    @property
    def prompt(self) -> str:
        """The words before the object, without a space at the end.

        Example:
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


def load_facts() -> tuple[Fact, ...]:
    """The fact table of the package (`facts.csv`), in file order.

    Returns:
        The facts: relation, subject and object.
    """
    table = files(__package__).joinpath("facts.csv").read_text(encoding="utf-8")
    return tuple(
        Fact(row["relation"], row["subject"], row["object"]) for row in csv.DictReader(table.splitlines())
    )


@public()
def fact_prompts(
    phrasings: Mapping[str, Sequence[str]] = TRAINED_PHRASINGS, table: Sequence[Fact] | None = None
) -> tuple[FactPrompt, ...]:
    """Every fact in each of the phrasings of its relation, fact by fact.

    Args:
        phrasings: the phrasings of each relation; by default those in the training text of the demo models.
        table: the facts; None: those of the package.

    Returns:
        The prompts, one per fact and phrasing.

    Raises:
        ValueError: a relation without phrasings.

    Example:
        >>> len(interp.tasks.fact_prompts(interp.tasks.HELD_OUT_PHRASINGS)) == len(interp.tasks.load_facts())
        True
    """
    known = load_facts() if table is None else table
    if bare := next((fact.relation for fact in known if fact.relation not in phrasings), None):
        raise ValueError(
            f"phrasings are required for the relation {bare!r}, got those of {', '.join(map(str, phrasings))}"
        )
    return tuple(FactPrompt(fact, phrasing) for fact in known for phrasing in phrasings[fact.relation])


@public()
@dataclass(frozen=True)
class Facts:
    """Facts as prompts whose next token is the object: "The capital of France is" -> " Paris".

    Raises:
        ValueError: a relation without facts, or a phrasing without a subject.
    """

    rows: PositiveCount = 32
    """Number of prompts."""
    seed: Seed = 0
    """Seed of the draws."""
    held_out: bool = False
    """Whether the default phrasing is the one that no training text of the demo models has, instead of the trained
    ones.
    """
    phrasings: Mapping[str, Sequence[str]] | None = None
    """Relation -> prompts with `{subject}` open; None: every relation of the table."""
    table: tuple[Fact, ...] | None = None
    """The facts; None: those of the package."""

    def __post_init__(self) -> None:
        relations = list(dict.fromkeys(fact.relation for fact in self.all_facts))
        for relation, prompts in (self.phrasings or {}).items():
            if relation not in relations:
                raise ValueError(
                    f"there is no fact of the relation {relation!r}; {nearest(relation, relations)}"
                )
            if open_ended := [prompt for prompt in prompts if "{subject}" not in prompt]:
                raise ValueError(f"a phrasing requires {{subject}}, got {open_ended[0]!r}")

    @property
    def all_facts(self) -> tuple[Fact, ...]:
        """The facts of `table`, or of the package."""
        return load_facts() if self.table is None else self.table

    @property
    def prompts(self) -> tuple[FactPrompt, ...]:
        """Every fact in every phrasing, fact by fact."""
        if self.phrasings is None:
            return fact_prompts(HELD_OUT_PHRASINGS if self.held_out else TRAINED_PHRASINGS, self.all_facts)
        return fact_prompts(
            self.phrasings, [fact for fact in self.all_facts if fact.relation in self.phrasings]
        )

    @public()
    def sentences(self, generator: np.random.Generator | None = None) -> tuple[FactPrompt, ...]:
        """Random prompts of the table.

        Args:
            generator: source of the random numbers; None: the seed's.

        Returns:
            The prompts, `rows` of them.
        """
        generator = np.random.default_rng(self.seed) if generator is None else generator
        prompts = self.prompts
        return tuple(prompts[i] for i in generator.integers(0, len(prompts), size=self.rows))

    @public()
    def pairs(self, tokenizer: Tokenizer) -> TaskPairs:
        """Prompts and their corruptions about another subject of as many tokens, so that the answers change places.

        `answer` and `wrong` are the first tokens of the objects, which need not be single, only different. Facts that
        no other fact fits are left out, and those with words that the tokenizer does not know. Roles: subject (all
        its tokens), subject_last, end. A group is a phrasing with subjects of one length.

        Args:
            tokenizer: the tokenizer of the model.

        Returns:
            `TaskPairs`.

        Raises:
            ValueError: no two facts that fit; the message names subjects, objects and their tokens.

        Example:
            >>> asked = interp.tasks.Facts(3, phrasings={"capital": ["The capital of {subject} is"]})
            >>> capitals = asked.pairs(interp.zoo.load("demo-4l")[1])
            >>> len(capitals), capitals.changes
            (3, ('subject',))
        """
        pools: dict[tuple[str, str], list[SpelledFact]] = defaultdict(list)
        for prompt in self.prompts:
            if spelled := _spelled_fact(tokenizer, prompt):
                pools[prompt.fact.relation, spelled.group].append(spelled)
        fitting = [
            (spelled, others)
            for pool in pools.values()
            for spelled in pool
            if (others := [other for other in pool if other.answer != spelled.answer])
        ]
        if not fitting:
            raise ValueError(_no_two_fit(tokenizer, self.all_facts))
        generator = np.random.default_rng(self.seed)
        pairs = []
        for index in generator.integers(0, len(fitting), size=self.rows).tolist():
            spelled, others = fitting[index]
            pairs.append(swapped_pair(spelled, others[int(generator.integers(0, len(others)))]))
        return pairs_of("facts", pairs, changes=("subject",))


@dataclass(frozen=True)
class SpelledFact:
    """A prompt of a fact in tokens."""

    row: WordRow
    answer: int
    """First token of the object."""
    group: str
    whole: tuple[int, ...]
    """All tokens of the object."""


def _spelled_fact(tokenizer: Tokenizer, prompt: FactPrompt) -> SpelledFact | None:
    """The tokens of a prompt; None if its subject or object is not spelled by whole tokens of its own."""
    fact = prompt.fact
    try:
        row = row_of(tokenizer, prompt.phrasing, {"subject": fact.subject})
        answer = tokens_after(tokenizer, row.text, prompt.answer)
    except MergedTokensError:
        return None
    subject = row.columns["subject"]
    if not (
        spells(tokenizer, row.ids[subject.start : subject.stop], fact.subject)
        and spells(tokenizer, answer, fact.object)
    ):
        return None
    group = f"{prompt.phrasing} (subject of {len(subject)}, {len(row.ids)} tokens)"
    return SpelledFact(row, answer[0], group, tuple(answer))


def swapped_pair(fact: SpelledFact, other: SpelledFact) -> Pair:
    """A pair whose corrupted prompt is that of the other fact."""
    subject = fact.row.columns["subject"]
    roles = {"subject": subject, "subject_last": subject[-1:]}
    return Pair(fact.row, other.row, fact.answer, other.answer, roles, fact.group)


def _no_two_fit(tokenizer: Tokenizer, known: Sequence[Fact]) -> str:
    shown = "; ".join(
        f"{fact.subject!r} is {pieces(tokenizer, tokens_after(tokenizer, 'the', f' {fact.subject}'))}, "
        f"{fact.object!r} is {pieces(tokenizer, tokens_after(tokenizer, 'the', f' {fact.object}'))}"
        for fact in known[:SHOWN]
    )
    return (
        "facts requires two facts of one relation whose subjects have as many tokens and whose objects begin with "
        f"different tokens, got none among {len(known)}: {shown}"
    )
