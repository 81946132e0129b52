"""Greater-than: spans of years that must end after they begin (Hanna et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from interp.core.boundary import public
from interp.core.kinds import PositiveCount, Seed
from interp.data.tokenizers import Tokenizer
from interp.tasks.pairs import (
    Pair,
    TaskPairs,
    pairs_of,
    pieces,
    required_single_tokens,
    row_of,
    spells,
    tokens_after,
)

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


@public()
@dataclass(frozen=True)
class GreaterThan:
    """Sentences about a span of years, of which any year after the first one is a right end.

    "The war lasted from the year 1743 to the year 17" -> any of "44" .. "99" (Hanna et al. 2023, arXiv:2305.00586).
    """

    rows: PositiveCount = 32
    """Number of pairs."""
    seed: Seed = 0
    """Seed of the draws."""

    @public()
    def pairs(self, tokenizer: Tokenizer) -> TaskPairs:
        """Sentences and their corruptions with a first year that ends in 01, so that nearly every ending is right.

        The answer is a set: `options` are the tokens of "00" .. "99" in order, so the token of a year YY has index
        YY, and `right` marks those above the clean YY. Probability difference of the paper: p(options[right]) -
        p(options[~right]), both summed; its cutoff sharpness: p(`answer`) - p(`wrong`), the years YY + 1 and YY - 1.

        YY runs over 02 .. 98 where the tokenizer has the year as two tokens of two digits, the century over 11 .. 17.
        Roles: noun, XX, YY, end (the second XX). Single tokens: nouns, centuries after a space, two digits of years.

        Args:
            tokenizer: the tokenizer of the model.

        Returns:
            `TaskPairs`.

        Raises:
            ValueError: too few words or years that are single tokens; the message names them.
        """
        nouns = [*required_single_tokens(tokenizer, NOUNS, task="greater_than", kind="nouns", at_least=1)]
        endings = _year_tokens(tokenizer)
        known = [(century, year) for century in CENTURIES for year in _years(tokenizer, century, endings)]
        if not known or len(endings) < len(YEARS):
            example = tokens_after(tokenizer, "the", " 1743")
            raise ValueError(
                "greater_than requires years of two tokens, [' 17', '43'], and '00' to '99' as single tokens; "
                f"here ' 1743' is {pieces(tokenizer, example)} and single tokens are {list(endings)}"
            )
        generator = np.random.default_rng(self.seed)
        drawn = generator.integers(0, (len(nouns), len(known)), size=(self.rows, 2)).tolist()
        pairs = [_span_pair(tokenizer, nouns[noun], known[year], endings) for noun, year in drawn]
        cut = torch.tensor([int(known[year][1]) for _, year in drawn])
        return replace(
            pairs_of("greater_than", pairs, changes=("YY",)),
            options=torch.tensor([endings[year] for year in YEARS]),
            right=torch.arange(len(YEARS)) > cut[:, None],
        )


def _year_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Last two digits of a year -> their token id, for those that are one token without a space before."""
    encoded = {year: tokenizer.encode(year) for year in YEARS}
    return {year: ids[0] for year, ids in encoded.items() if len(ids) == 1 and tokenizer.decode(ids) == year}


def _years(tokenizer: Tokenizer, century: str, endings: Mapping[str, int]) -> list[str]:
    """Last two digits, "02" to "98", of years that are the two tokens century, digits; none if year 01 is not."""
    prefix = tokens_after(tokenizer, "the year", f" {century}")
    if len(prefix) != 1 or not spells(tokenizer, prefix, century):
        return []
    split = [
        year
        for year, ending in endings.items()
        if tokens_after(tokenizer, "the year", f" {century}{year}") == [*prefix, ending]
    ]
    return [year for year in split if year in YEARS[2:99]] if "01" in split else []


def _span_pair(tokenizer: Tokenizer, noun: str, date: tuple[str, str], endings: Mapping[str, int]) -> Pair:
    """The pair of one noun and one year, (century, last two digits)."""
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
