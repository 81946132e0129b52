"""Several spellings of one answer, any of which is right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from torch import Tensor

from interp.core.boundary import public
from interp.core.hints import Required
from interp.core.wording import odd_value, value_text
from interp.data.ids import is_id, is_row


def _entries(given: object) -> list[str | int | tuple[int, ...]]:
    """The spellings in plain texts, ids and tuples of ids; empty where one is something else."""
    if odd_value(given):
        return []
    listed = given.tolist() if isinstance(given, Tensor | np.ndarray) else given
    if not isinstance(listed, list | tuple):
        return []
    entries: list[str | int | tuple[int, ...]] = []
    for item in listed:
        if isinstance(item, str) and item:
            entries.append(item)
        elif is_id(item):
            entries.append(int(item))
        elif is_row(item) and (tokens := tuple(int(token) for token in item)):
            entries.append(tokens)
        else:
            return []
    return entries


@public()
@dataclass(frozen=True, repr=False)
class Spellings:
    """Several spellings of one answer, any of which is right: `Spellings([" Mary", "Mary"])`.

    Metrics of log-probabilities take it in the place of an answer: its probability is the sum of those of its
    spellings, each the product over its tokens after the prompt. A list of them is one for each prompt.

    Args:
        texts: the spellings, as texts, ids or lists of ids.

    Raises:
        ValueError: no spelling, one twice, or what is no text and no ids. Where one begins with another, token by
            token, the metric raises: the probability of the longer one is a part of that of the shorter one.

    See Also:
        `interp.metrics.answer_log_probability`, `interp.metrics.answer_probability`, `interp.metrics.answer_loss`,
        `interp.metrics.log_prob_difference`: the metrics that take it.

    Example:
        >>> Spellings([" Mary", "Mary"])
        Spellings([' Mary', 'Mary'])
        >>> interp.metrics.answer_log_probability(Spellings([" Mary", "Mary"])).unit
        'nats'
    """

    texts: Annotated[
        Sequence[str | int | Sequence[int]],
        Required("spellings as texts or ids", lambda value: None if _entries(value) else ""),
    ]

    def __post_init__(self) -> None:
        entries = tuple(_entries(self.texts))
        if not entries or len(set(entries)) < len(entries):
            raise ValueError(
                f"spellings that differ are required, as texts or ids, got {value_text(self.texts)}"
            )
        object.__setattr__(self, "texts", entries)

    def __repr__(self) -> str:
        return f"Spellings({list(self.texts)})"


def spelled(answers: object) -> Iterator[Spellings]:
    """The sets of spellings among answers."""
    for item in answers if isinstance(answers, list | tuple) else [answers]:
        if isinstance(item, Spellings):
            yield item


def check_one_spelling(answers: object) -> None:
    """ValueError for a set of spellings where one answer is required."""
    if found := next(spelled(answers), None):
        raise ValueError(
            f"one spelling of an answer is required here, got {found}: several are summed by the log-probability of "
            "the whole (interp.metrics.answer_log_probability, answer_probability, answer_loss, log_prob_difference)"
        )
