"""How a template becomes tokens with named columns, and which words a tokenizer keeps whole.

The columns of a word are found with the tokenizer itself: the tokens of the text up to the word are counted. So any
tokenizer will do, offsets or not.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Protocol, runtime_checkable

SHOWN = 12
"""How many unfit words an error message spells out."""


class MergedTokensError(ValueError):
    """A token reaches over the end of a word, so that the word has no columns of its own."""


@runtime_checkable
class Tokenizer(Protocol):
    """What the tasks need of a tokenizer; `data.text.Tokenizer` and every loaded model's tokenizer are such."""

    bos_id: int | None

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone, no special token added."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids."""
        ...


@dataclass(frozen=True)
class Row:
    """A text as token ids, and which of them each of its words is."""

    text: str
    """The prompt, without BOS."""
    ids: tuple[int, ...]
    """Its tokens, BOS first if the tokenizer has one."""
    columns: Mapping[str, range]
    """Field of the template -> the columns of its word."""


def filled(template: str, words: Mapping[str, str]) -> tuple[str, dict[str, tuple[int, int]]]:
    """A template with its fields filled in, and the characters of each word; a word owns the space before it.

    >>> filled("the {noun} of", {"noun": "war"})
    ('the war of', {'noun': (3, 7)})
    """
    text, spans = "", {}
    for literal, field, _, _ in Formatter().parse(template):
        text += literal
        if field is not None:
            start = len(text.rstrip(" "))
            text += words[field]
            spans[field] = (start, len(text))
    return text, spans


def row_of(tokenizer: Tokenizer, template: str, words: Mapping[str, str]) -> Row:
    """The tokens of a filled template, with the columns of every word.

    Errors: MergedTokensError where a word has no tokens of its own because they reach into its neighbours.
    """
    text, spans = filled(template, words)
    ids = tokenizer.encode(text)
    bos = [] if tokenizer.bos_id is None or ids[:1] == [tokenizer.bos_id] else [tokenizer.bos_id]
    columns = {
        field: range(*(len(bos) + _tokens_before(tokenizer, text, ids, end) for end in span))
        for field, span in spans.items()
    }
    return Row(text, (*bos, *ids), columns)


def _tokens_before(tokenizer: Tokenizer, text: str, ids: Sequence[int], end: int) -> int:
    """How many of the ids of a text are those of its first `end` characters."""
    before = tokenizer.encode(text[:end]) if end else []
    if list(ids[: len(before)]) != before:
        raise MergedTokensError(
            f"a token boundary is required after {text[:end]!r} in {text!r}, got {pieces(tokenizer, ids)}"
        )
    return len(before)


def tokens_after(tokenizer: Tokenizer, text: str, continuation: str) -> list[int]:
    """The tokens that a continuation adds to a text; MergedTokensError if it changes those of the text."""
    ids = tokenizer.encode(text + continuation)
    return ids[_tokens_before(tokenizer, text + continuation, ids, len(text)) :]


def next_token(tokenizer: Tokenizer, text: str, continuation: str) -> int:
    """The one token that a continuation adds to a text; ValueError if it adds several."""
    ids = tokens_after(tokenizer, text, continuation)
    if len(ids) != 1:
        raise ValueError(
            f"{continuation!r} must be a single token after {text!r}, got {pieces(tokenizer, ids)}"
        )
    return ids[0]


def single_tokens(tokenizer: Tokenizer, words: Iterable[str]) -> dict[str, int]:
    """Those of the words that are one token of their own after a space, with their ids; no unknown-word token."""
    found = {word: _after_space(tokenizer, word) for word in words}
    return {word: ids[0] for word, ids in found.items() if len(ids) == 1 and spells(tokenizer, ids, word)}


def spells(tokenizer: Tokenizer, ids: Sequence[int], word: str) -> bool:
    """Whether these tokens are the word and nothing else but spaces, as an unknown-word token never is."""
    return tokenizer.decode(ids).strip().casefold() == word.casefold()


def _after_space(tokenizer: Tokenizer, word: str) -> list[int]:
    return tokens_after(tokenizer, "the", f" {word}")


def required_single_tokens(
    tokenizer: Tokenizer, words: Sequence[str], *, task: str, kind: str, at_least: int
) -> dict[str, int]:
    """`single_tokens`; ValueError naming the words that are not, and their tokens, if fewer than needed remain."""
    found = single_tokens(tokenizer, words)
    if len(found) < at_least:
        unfit = [word for word in words if word not in found]
        shown = ", ".join(
            f"{word!r} is {pieces(tokenizer, _after_space(tokenizer, word))}" for word in unfit[:SHOWN]
        )
        more = f" and {len(unfit) - SHOWN} more" if len(unfit) > SHOWN else ""
        raise ValueError(
            f"{task} requires at least {at_least} {kind} that are single tokens after a space, "
            f"got {len(found)} {list(found)}: {shown}{more}"
        )
    return found


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text of each token."""
    return [tokenizer.decode([i]) for i in ids]
