"""Places of a question's words in its tokens, and the role of each token relative to them.

Words are sought in the decoded text, so that any tokenizer will do: a token belongs to a word if it holds any of its
characters, or a part of one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from interp.core.axes import shape_text
from interp.core.boundary import public
from interp.core.transfers import to_device
from interp.data.batch import Batch
from interp.data.text import Text
from interp.data.tokenizers import Tokenizer

ROLES = ("first subject", "middle subject", "last subject", "first after", "further", "last token")
"""Roles of a prompt's tokens, over which Meng et al. 2022 average; a token that fits two roles has the later one.

A subject of one token is "last subject", a single token after it "last token". Tokens before it have no role.
"""
_PART = "\N{REPLACEMENT CHARACTER}"
"""Character to which an unfinished UTF-8 sequence at the end of a text is decoded."""


@public()
@dataclass(frozen=True)
class Mention:
    """One of several mentions of a word in a prompt."""

    word: str
    """The word as the prompt spells it."""
    which: int
    """Number of the mention, from 0; negative ones count from the end."""


SpanPlace = str | Mention | range
"""A word that the prompt holds once, one of several mentions, or a range of the prompt's own tokens, BOS included."""


def spans(text: Text, batch: Batch, where: SpanPlace | Sequence[SpanPlace]) -> Int[Tensor, "b 2"]:
    """The columns of each row's words: the first, and one past the last.

    Words are found anywhere in the text, inside longer words too.

    Args:
        where: the words, one for all rows, or one for each.

    Raises:
        ValueError: a word that the text does not hold, or holds several times, and another number of words than rows.
        IndexError: a mention or a token that a row does not have.

    Example:
        >>> spans(model.text, model.text.batch(prompt), "Mary").tolist()
        [[2, 3]]
    """
    places = [where] * len(batch) if isinstance(where, SpanPlace) else list(where)
    if len(places) != len(batch):
        raise ValueError(f"one subject per prompt is required, got {len(places)} for {len(batch)} prompts")
    device, batch = batch.tokens.device, batch.host()
    columns = [
        _columns(text, row[of_prompt].tolist(), place)
        for row, of_prompt, place in zip(batch.tokens, batch.prompt_tokens, places, strict=True)
    ]
    return to_device(torch.tensor(columns) + batch.real.int().argmax(1)[:, None], device)


def within(batch: Batch, span: Int[Tensor, "b 2"]) -> Bool[Tensor, "b p"]:
    """True at the columns of each row's span."""
    column = torch.arange(batch.tokens.shape[1], device=span.device)
    return (column >= span[:, :1]) & (column < span[:, 1:])


def rows_of_mask(mask: Bool[Tensor, "prompt n"], batch: Batch, what: str) -> Bool[Tensor, "b p"]:
    """The rows of a mask over all prompts that belong to a batch of them, on the CPU.

    Raises:
        ValueError: a prompt that the mask has no row for, too few columns, or padding in the mask.
    """
    rows = torch.arange(len(batch)) if batch.row is None else batch.row.cpu()
    columns = batch.tokens.shape[1]
    width = columns if batch.forced is None else int(batch.host().prompt_tokens.any(0).sum())
    if int(rows.max()) >= len(mask) or mask.shape[1] < width:
        raise ValueError(
            f"a mask of the {what} must be boolean of shape {shape_text((int(rows.max()) + 1, width))} at least, got "
            f"{shape_text(mask.shape)}"
        )
    row_masks = F.pad(mask.cpu()[rows], (0, max(0, columns - mask.shape[1])))
    if bool((row_masks[:, :columns] & ~batch.host().real).any()) or bool(row_masks[:, columns:].any()):
        raise ValueError(f"{what} must be tokens of every prompt, got padding")
    return row_masks[:, :columns]


def roles(batch: Batch, span: Int[Tensor, "b 2"]) -> Bool[Tensor, "b r p"]:
    """Mask of the columns of each of the `ROLES`, given the subjects' spans."""
    column = torch.arange(batch.tokens.shape[1], device=span.device)
    begin, end, last = span[:, :1], span[:, 1:], batch.prompt_ends().to(span.device)[:, None]
    earlier = (
        (column == begin) & (column < end - 1),
        (column > begin) & (column < end - 1),
        column == end - 1,
        column == end,
        column > end,
    )
    return torch.stack((*(role & (column < last) for role in earlier), column == last), 1)


def _columns(text: Text, ids: list[int], where: SpanPlace) -> tuple[int, int]:
    """First column of the word among the row's own tokens, and one past the last."""
    if isinstance(where, range):
        if where.step != 1 or not 0 <= where.start < where.stop <= len(ids):
            raise IndexError(f"a range of the prompt's {len(ids)} tokens is required, got {where}")
        return where.start, where.stop
    written = text.tokenizer.decode(ids)
    start, end = _characters(written, where)
    spans = _token_spans(text.tokenizer, ids)
    of_word = [i for i, (first, stop) in enumerate(spans) if first < end and stop > start]
    return of_word[0], of_word[-1] + 1


def _characters(written: str, where: str | Mention) -> tuple[int, int]:
    """Characters of the word in the decoded text: the index of the first, and one past the last."""
    word = where if isinstance(where, str) else where.word
    starts = [match.start() for match in re.finditer(re.escape(word), written)] if word else []
    if not starts:
        raise ValueError(f"the prompt must mention the subject {word!r}, got {written!r}")
    if isinstance(where, str) and len(starts) > 1:
        raise ValueError(
            f"the subject {word!r} occurs {len(starts)} times in {written!r}: say which with Mention({word!r}, index)"
        )
    which = 0 if isinstance(where, str) else where.which
    if not -len(starts) <= which < len(starts):
        raise IndexError(f"{word!r} occurs {len(starts)} times in {written!r}, got mention {which}")
    return starts[which], starts[which] + len(word)


def _token_spans(tokenizer: Tokenizer, ids: list[int]) -> list[tuple[int, int]]:
    """Range of the characters that each token holds a part of: the first, and one past the last."""
    prefixes = [tokenizer.decode(ids[:n]) if n else "" for n in range(len(ids) + 1)]
    complete = [len(prefix.rstrip(_PART)) for prefix in prefixes]
    partial = [n + prefix.endswith(_PART) for n, prefix in zip(complete, prefixes, strict=True)]
    return list(zip(complete[:-1], partial[1:], strict=True))
