"""Indirect objects: sentences in which one of two people gives the other something, and the receiver is the answer.

Wang et al. 2022 (arXiv:2211.00593). The demo models are trained on these sentences, their cards are measured on the
held-out part of them, causal analyses patch pairs of them, and heads are named by them. About 15 % of the unordered
name pairs (`is_held_out`) never occur in training text, whatever the seed.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import numpy as np
import torch

from interp.core.boundary import public
from interp.core.kinds import PositiveCount, Seed
from interp.core.viewer import Brief
from interp.data.batch import Batch
from interp.data.text import Text
from interp.data.tokenizers import Tokenizer
from interp.data.words import single_token
from interp.tasks.pairs import Pair, TaskPairs, next_token, pairs_of, required_single_tokens, row_of

NameCorruption = Literal["swap_giver", "abc"]
NAMES_CHANGED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"swap_giver": ("S2",), "abc": ("IO", "S1", "S2")}
)
"""Corruption -> the roles it changes."""
A_DRAW = 4
"""Sentences of one draw of `IndirectObjects.balanced`: both orders of the names times both roles."""

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

TEMPLATES: tuple[str, ...] = (
    "When {first} and {second} went to the {place}, {giver} gave a {gift} to",
    "After {first} and {second} left the {place}, {giver} gave a {gift} to",
    "While {first} and {second} were at the {place}, {giver} handed a {gift} to",
    "Then {first} and {second} had a long talk in the {place}, and {giver} offered a {gift} to",
    "Today {first} and {second} met near the {place}. Later {giver} showed a {gift} to",
    "Once {first} and {second} were alone in the {place}, {giver} passed a {gift} to",
)
"""Sentence frames; the giver's name comes a second time and the other name is the answer."""

HELD_OUT_PER_CENT = 15
"""Share of the unordered name pairs that never occur in training sentences, in either role."""


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
    """The thing that is given."""
    template: str
    """One of `TEMPLATES`."""
    receiver_first: bool
    """Whether the receiver is the first name of the sentence (ABBA) or the second (BABA)."""

    @property
    def prompt(self) -> str:
        """The words before the answer, without a space at the end.

        Example:
            >>> IndirectObject("Mary", "John", "store", "drink", TEMPLATES[0], True).prompt
            'When Mary and John went to the store, John gave a drink to'
        """
        return self.template.format(**self.words)

    @property
    def words(self) -> dict[str, str]:
        """Words by field of the template."""
        names = (self.receiver, self.giver)
        first, second = names if self.receiver_first else names[::-1]
        return {"first": first, "second": second, "giver": self.giver, "place": self.place, "gift": self.gift}

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

    def swapped(self) -> IndirectObject:
        """The sentence with the other name as giver: one word differs and the answers change places.

        It is the usual corrupted prompt of activation patching, equally long and equally likely.
        """
        return replace(self, receiver=self.giver, giver=self.receiver, receiver_first=not self.receiver_first)


@public()
@dataclass(frozen=True, repr=False)
class IndirectObjects(Brief):
    """Sentences in which one of two people gives the other something; the answer is the receiver (IOI).

    "When Mary and John went to the store, John gave a drink to" -> " Mary", not " John" (Wang et al. 2022, section 2),
    in the order ABBA or BABA. One task, drawn as `sentences` (to train on, or to ask), as clean and corrupted `pairs`,
    and `balanced`, as `interp.heads` asks it.

    Raises:
        ValueError: no rows or an empty table of words.
    """

    rows: PositiveCount = 32
    """Number of sentences."""
    seed: Seed = 0
    """Seed of the draws; equal rows on every machine."""
    held_out: bool = False
    """Only name pairs that the demo models never saw in training, instead of those that they did."""
    names: tuple[str, ...] = NAMES
    """First names; `pairs` and `balanced` leave out those that are not single tokens."""
    places: tuple[str, ...] = PLACES
    """Places; `pairs` leaves out those that are not single tokens."""
    gifts: tuple[str, ...] = GIFTS
    """Things; `pairs` leaves out those that are not single tokens."""
    templates: tuple[str, ...] = TEMPLATES
    """Frames with `{first}`, `{second}`, `{giver}` and, if they like, `{place}` and `{gift}` open, up to the answer."""

    def __post_init__(self) -> None:
        if self.rows < 1 or not (self.names and self.places and self.gifts and self.templates):
            raise ValueError(f"at least one row, and words for every field, are required, got {self}")

    @public()
    def sentences(self, generator: np.random.Generator | None = None) -> tuple[IndirectObject, ...]:
        """Random sentences; names, order, roles, place, gift and template are uniform.

        Args:
            generator: source of the random numbers; None: the seed's.

        Returns:
            The sentences, `rows` of them.

        Example:
            >>> interp.tasks.IndirectObjects(1).sentences()[0].text.count(".") >= 1
            True
        """
        generator = np.random.default_rng(self.seed) if generator is None else generator
        known = name_pairs(self.names, held_out=self.held_out)
        if not known:
            raise ValueError(
                f"indirect_objects requires a pair with held_out={self.held_out} among the names, got {[*self.names]}"
            )
        sizes = (len(known), 2, len(self.places), len(self.gifts), len(self.templates), 2)
        draws = generator.integers(0, sizes, size=(self.rows, len(sizes))).tolist()
        return tuple(
            IndirectObject(
                receiver=known[pair][role],
                giver=known[pair][1 - role],
                place=self.places[place],
                gift=self.gifts[gift],
                template=self.templates[template],
                receiver_first=bool(first),
            )
            for pair, role, place, gift, template, first in draws
        )

    @public()
    def pairs(self, tokenizer: Tokenizer, *, corruption: NameCorruption = "swap_giver") -> TaskPairs:
        """The sentences of the seed and their corruptions, for any tokenizer; `wrong` is the giver.

        Roles: IO, S1, S1+1 (the token after S1), S2, end; they name the clean sentence's words. A group is a template
        in one order.

        Args:
            tokenizer: the tokenizer of the model.
            corruption: "swap_giver" exchanges the second clause's name (role S2), so that the answers change places;
                "abc" puts three other unrelated names at IO, S1 and S2 (the paper's p_ABC), so that there is no
                answer.

        Returns:
            `TaskPairs`.

        Raises:
            ValueError: too few words that are single tokens; the message names them.

        Example:
            >>> tokenizer = interp.zoo.load("demo-4l")[1]
            >>> interp.tasks.IndirectObjects(3).pairs(tokenizer, corruption="abc").changes
            ('IO', 'S1', 'S2')
        """
        if corruption not in NAMES_CHANGED:
            raise ValueError(f"corruption must be one of {', '.join(NAMES_CHANGED)}, got {corruption!r}")
        least = 5 if corruption == "abc" else 2
        names, places, gifts = (
            tuple(required_single_tokens(tokenizer, words, task="indirect_objects", kind=kind, at_least=count))
            for words, kind, count in (
                (self.names, "names", least), (self.places, "places", 1), (self.gifts, "gifts", 1)
            )
        )  # fmt: skip
        generator = np.random.default_rng(self.seed)
        pairs = []
        for sentence in replace(self, names=names, places=places, gifts=gifts).sentences(generator):
            others = [name for name in names if name not in (sentence.receiver, sentence.giver)]
            if corruption == "swap_giver":
                corrupt = sentence.swapped().words
            else:
                drawn = (others[i] for i in generator.choice(len(others), 3, replace=False).tolist())
                corrupt = sentence.words | dict(zip(("first", "second", "giver"), drawn, strict=True))
            pairs.append(_giver_pair(tokenizer, sentence, corrupt))
        return pairs_of("indirect_objects", pairs, changes=NAMES_CHANGED[corruption])

    @public()
    def balanced(self, text: Text) -> tuple[Batch, Batch]:
        """Sentences in groups of four, and their corruptions with a third name at the second mention of the giver.

        Each draw of three names, with the template, place and gift whose turn it is, gives four sentences, both
        orders of the names times both roles, so that neither the place of a name nor the name itself can tell the
        roles apart.

        Args:
            text: the tokenisation of the model.

        Returns:
            The clean and the corrupted batch. Rows end in the last column; `answer` is the receiver, `wrong` the
            giver (the third name in the second batch).

        Raises:
            ValueError: rows that are not a multiple of 4, `held_out`, no tokenizer, fewer than three names that are
                single tokens, or a sentence that does not fit the context.
        """
        if self.rows % A_DRAW or self.held_out:
            raise ValueError(f"rows in fours, over all pairs of names, are required, got {self}")
        known = {name: single_token(text, name) for name in self.names}
        ids = {name: token for name, token in known.items() if token is not None}
        if len(ids) < 3:
            raise ValueError(
                f"three names that are single tokens of this model are required, got {len(ids)} of {len(known)}"
            )
        drawn = [
            four for draw in range(self.rows // A_DRAW) for four in self._four_sentences(draw, list(ids))
        ]
        named = [_Named(s.prompt, s.receiver, s.giver) for s, _ in drawn]
        unsaid = [
            _Named(s.template.format(**s.words | {"giver": third}), s.receiver, third) for s, third in drawn
        ]
        return _batch(text, named, ids), _batch(text, unsaid, ids)

    def _four_sentences(self, draw: int, names: Sequence[str]) -> list[tuple[IndirectObject, str]]:
        """The four sentences of one draw of names, each with the draw's third name."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + draw)
        a, b, third = (names[int(i)] for i in torch.randperm(len(names), generator=generator)[:3])
        place, gift, template = (
            table[draw % len(table)] for table in (self.places, self.gifts, self.templates)
        )
        return [
            (IndirectObject(receiver, giver, place, gift, template, (receiver == a) == in_order), third)
            for receiver, giver in ((a, b), (b, a))
            for in_order in (True, False)
        ]


SHORT_SENTENCES = IndirectObjects(
    rows=64,
    names=(
        *("Mary", "John", "Tom", "James", "Paul", "Mark", "Peter", "David", "Jack", "George"),
        *("Anna", "Robert", "William", "Frank", "Adam", "Kevin"),
    ),
    templates=(
        "When {first} and {second} went to the store, {giver} gave a drink to",
        "After {first} and {second} left the house, {giver} gave a book to",
        "While {first} and {second} were at the station, {giver} gave a letter to",
        "Then {first} and {second} came to the garden, and {giver} gave a flower to",
    ),
)
"""Sixteen draws of plain sentences of common words: the default sentences of `interp.heads`."""


def is_held_out(name: str, other: str) -> bool:
    """Whether the pair is kept for evaluation: a fixed hash of the sorted pair, about 15 % of all pairs.

    Example:
        >>> is_held_out("Mary", "John") == is_held_out("John", "Mary")
        True
    """
    return zlib.crc32(" ".join(sorted((name, other))).encode()) % 100 < HELD_OUT_PER_CENT


def name_pairs(names: Sequence[str] = NAMES, *, held_out: bool) -> tuple[tuple[str, str], ...]:
    """The unordered pairs of names on one side of the split, in the order of the table."""
    return tuple(pair for pair in itertools.combinations(names, 2) if is_held_out(*pair) == held_out)


def _giver_pair(tokenizer: Tokenizer, sentence: IndirectObject, corrupt: Mapping[str, str]) -> Pair:
    """One pair, with the columns of the roles IO, S1, S1+1 and S2 in the clean prompt."""
    clean = row_of(tokenizer, sentence.template, sentence.words)
    receiver, giver = ("first", "second") if sentence.receiver_first else ("second", "first")
    after = clean.columns[giver].stop
    return Pair(
        clean=clean,
        corrupt=row_of(tokenizer, sentence.template, corrupt),
        answer=next_token(tokenizer, clean.text, sentence.answer),
        wrong=next_token(tokenizer, clean.text, sentence.wrong),
        roles={
            "IO": clean.columns[receiver],
            "S1": clean.columns[giver],
            "S1+1": range(after, after + 1),
            "S2": clean.columns["giver"],
        },
        group=f"{'ABBA' if sentence.receiver_first else 'BABA'}: {sentence.template}",
    )


@dataclass(frozen=True)
class _Named:
    """A prompt with its right and its wrong answer, both names."""

    prompt: str
    answer: str
    wrong: str


def _batch(text: Text, rows: Sequence[_Named], ids: Mapping[str, int]) -> Batch:
    answer, wrong = (torch.tensor([ids[getattr(row, name)] for row in rows]) for name in ("answer", "wrong"))
    return text.batch([row.prompt for row in rows]).left_aligned().with_answers(answer, wrong)
