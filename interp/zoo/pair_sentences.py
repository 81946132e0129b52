"""Aligned pairs of sentences: indirect objects and greater-than."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Literal

import numpy as np
import torch

from interp.zoo import tasks
from interp.zoo.pair_rows import Pair, TaskPairs, pairs_of
from interp.zoo.pair_tokens import (
    Tokenizer,
    next_token,
    pieces,
    required_single_tokens,
    row_of,
    spells,
    tokens_after,
)

NameCorruption = Literal["swap_giver", "abc"]
NAMES_CHANGED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"swap_giver": ("S2",), "abc": ("IO", "S1", "S2")}
)
"""Corruption of the indirect-object sentences -> the roles it changes."""

NOUNS: tuple[str, ...] = (
    *("war", "trial", "siege", "voyage", "reign", "strike", "campaign", "conflict", "journey", "famine"),
    *("drought", "dynasty", "expedition", "rebellion", "revolt", "project", "debate", "alliance", "empire"),
    *("feud", "peace", "crisis", "plague", "occupation", "partnership", "marriage", "friendship", "exile"),
    *("tour", "quest", "operation", "program", "study", "work", "revolution", "rule", "truce", "strife"),
)
"""Things that last for years."""
CENTURIES: tuple[str, ...] = ("11", "12", "13", "14", "15", "16", "17")
"""First two digits of the years."""
YEARS: tuple[str, ...] = tuple(f"{year:02}" for year in range(100))
"""Last two digits of the years."""
SPAN_OF_YEARS = "The {noun} lasted from the year {XX}{YY} to the year {last}"
"""The greater-than prompt of Hanna et al. 2023 (arXiv:2305.00586), section 2."""


def indirect_objects(
    tokenizer: Tokenizer,
    n: int,
    *,
    seed: int = 0,
    corruption: NameCorruption = "swap_giver",
    held_out: bool = False,
) -> TaskPairs:
    """Sentences in which one of two people gives the other something: who receives it?

    "When Mary and John went to the store, John gave a drink to" -> " Mary", not " John" (Wang et al. 2022,
    arXiv:2211.00593, section 2), in the order ABBA or BABA, from the tables of `zoo.tasks`. `wrong` is the giver.

    corruption: "swap_giver" exchanges the second clause's name (role S2), so that the answers change places; "abc" puts
        three other unrelated names at IO, S1 and S2 (the paper's p_ABC), so that there is no answer.
    held_out: name pairs that the demo models never saw in training instead of those they did.

    Roles: IO, S1, S1+1 (the token after S1), S2, end; they name the clean sentence's words. A group is a template in
    one order. Single tokens: names, places, gifts. Errors: ValueError naming the words where too few of them are.

    Example:
        >>> tokenizer = interp.zoo.load("demo-4l")[1]
        >>> indirect_objects(tokenizer, 3, corruption="abc").changes
        ('IO', 'S1', 'S2')
    """
    if corruption not in NAMES_CHANGED:
        raise ValueError(f"corruption must be one of {', '.join(NAMES_CHANGED)}, got {corruption!r}")
    least = 5 if corruption == "abc" else 2
    names, places, gifts = (
        [*required_single_tokens(tokenizer, words, task="indirect_objects", kind=kind, at_least=count)]
        for words, kind, count in (
            (tasks.NAMES, "names", least), (tasks.PLACES, "places", 1), (tasks.GIFTS, "gifts", 1)
        )
    )  # fmt: skip
    known = [pair for pair in tasks.name_pairs(held_out=held_out) if set(pair) <= set(names)]
    if not known:
        raise ValueError(
            f"indirect_objects requires a pair with held_out={held_out} among the names, got {names}"
        )
    generator = np.random.default_rng(seed)
    pairs = []
    for sentence in _sentences(generator, n, known, places, gifts):
        others = [name for name in names if name not in (sentence.receiver, sentence.giver)]
        corrupt = (
            _words(sentence.swapped())
            if corruption == "swap_giver"
            else _unrelated(generator, sentence, others)
        )
        pairs.append(_giving(tokenizer, sentence, corrupt))
    return pairs_of("indirect_objects", pairs, changes=NAMES_CHANGED[corruption])


def _sentences(
    generator: np.random.Generator,
    n: int,
    known: Sequence[tuple[str, str]],
    places: Sequence[str],
    gifts: Sequence[str],
) -> list[tasks.IndirectObject]:
    """As `tasks.indirect_objects`, from the words that are single tokens."""
    sizes = (len(known), 2, len(places), len(gifts), len(tasks.INDIRECT_OBJECT_TEMPLATES), 2)
    return [
        tasks.IndirectObject(
            receiver=known[pair][role],
            giver=known[pair][1 - role],
            place=places[place],
            gift=gifts[gift],
            template=tasks.INDIRECT_OBJECT_TEMPLATES[template],
            receiver_first=bool(first),
        )
        for pair, role, place, gift, template, first in generator.integers(
            0, sizes, size=(n, len(sizes))
        ).tolist()
    ]


def _words(sentence: tasks.IndirectObject) -> dict[str, str]:
    """What fills the fields of the sentence's template."""
    names = (sentence.receiver, sentence.giver)
    first, second = names if sentence.receiver_first else names[::-1]
    return {
        "first": first, "second": second, "subject": sentence.giver, "place": sentence.place, "gift": sentence.gift
    }  # fmt: skip


def _unrelated(
    generator: np.random.Generator, sentence: tasks.IndirectObject, others: Sequence[str]
) -> dict[str, str]:
    """The sentence about three different people, neither of whom is in it (p_ABC)."""
    first, second, subject = (others[i] for i in generator.choice(len(others), 3, replace=False).tolist())
    return _words(sentence) | {"first": first, "second": second, "subject": subject}


def _giving(tokenizer: Tokenizer, sentence: tasks.IndirectObject, corrupt: Mapping[str, str]) -> Pair:
    """One pair, with the columns of the names by the part they play."""
    clean = row_of(tokenizer, sentence.template, _words(sentence))
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
            "S2": clean.columns["subject"],
        },
        group=f"{'ABBA' if sentence.receiver_first else 'BABA'}: {sentence.template}",
    )


def greater_than(tokenizer: Tokenizer, n: int, *, seed: int = 0) -> TaskPairs:
    """Sentences about a span of years: in which year does it end?

    "The war lasted from the year 1743 to the year 17" -> any of "44" .. "99"; in the corrupted prompt the first year
    ends in 01, so that nearly every ending is right (Hanna et al. 2023, arXiv:2305.00586). The answer is a set:
    `options` are the tokens of "00" .. "99" in order, so the token of a year YY has index YY, and `right` marks those
    above the clean YY. Probability difference of the paper: p(options[right]) - p(options[~right]), both summed; its
    cutoff sharpness: p(`answer`) - p(`wrong`), the years YY + 1 and YY - 1.

    YY runs over 02 .. 98 where the tokenizer has the year as two tokens of two digits, the century over 11 .. 17.
    Roles: noun, XX, YY, end (the second XX). Single tokens: nouns, centuries after a space, the two digits of years.
    Errors: ValueError naming the words or years where too few of them are.
    """
    nouns = [*required_single_tokens(tokenizer, NOUNS, task="greater_than", kind="nouns", at_least=1)]
    endings = _endings(tokenizer)
    known = [(century, year) for century in CENTURIES for year in _years(tokenizer, century, endings)]
    if not known or len(endings) < len(YEARS):
        example = tokens_after(tokenizer, "the", " 1743")
        raise ValueError(
            "greater_than requires years of two tokens, [' 17', '43'], and '00' to '99' as single tokens; "
            f"here ' 1743' is {pieces(tokenizer, example)} and single tokens are {list(endings)}"
        )
    generator = np.random.default_rng(seed)
    drawn = generator.integers(0, (len(nouns), len(known)), size=(n, 2)).tolist()
    pairs = [_lasting(tokenizer, nouns[noun], known[year], endings) for noun, year in drawn]
    cut = torch.tensor([int(known[year][1]) for _, year in drawn])
    return replace(
        pairs_of("greater_than", pairs, changes=("YY",)),
        options=torch.tensor([endings[year] for year in YEARS]),
        right=torch.arange(len(YEARS)) > cut[:, None],
    )


def _endings(tokenizer: Tokenizer) -> dict[str, int]:
    """Last two digits of a year -> their token, where they are one without a space before them."""
    found = {year: tokenizer.encode(year) for year in YEARS}
    return {year: ids[0] for year, ids in found.items() if len(ids) == 1 and tokenizer.decode(ids) == year}


def _years(tokenizer: Tokenizer, century: str, endings: Mapping[str, int]) -> list[str]:
    """Last two digits, 02 to 98, of the years of a century that are two tokens of two digits; 01 must be one too."""
    begun = tokens_after(tokenizer, "the year", f" {century}")
    if len(begun) != 1 or not spells(tokenizer, begun, century):
        return []
    split = [
        year
        for year, ending in endings.items()
        if tokens_after(tokenizer, "the year", f" {century}{year}") == [*begun, ending]
    ]
    return [year for year in split if year in YEARS[2:99]] if "01" in split else []


def _lasting(tokenizer: Tokenizer, noun: str, date: tuple[str, str], endings: Mapping[str, int]) -> Pair:
    century, year = date
    words = {"noun": noun, "XX": century, "YY": year, "last": century}
    clean = row_of(tokenizer, SPAN_OF_YEARS, words)
    return Pair(
        clean=clean,
        corrupt=row_of(tokenizer, SPAN_OF_YEARS, words | {"YY": "01"}),
        answer=endings[YEARS[int(year) + 1]],
        wrong=endings[YEARS[int(year) - 1]],
        roles={role: clean.columns[role] for role in ("noun", "XX", "YY")},
        group=SPAN_OF_YEARS,
    )
