"""Protocols of tokenizers: what every text needs, and what some can do besides."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable


@runtime_checkable
class Tokenizer(Protocol):
    """The methods that every tokenizer needs; `families.tokenizer` adapts the two common libraries to it."""

    bos_id: int | None
    eos_id: int | None
    pad_id: int

    def encode(self, text: str) -> list[int]:
        """Ids of the text without any special token."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids, special tokens included."""
        ...

    def piece(self, token: int) -> str:
        """The text of one token, leading space included."""
        ...


@runtime_checkable
class UnreadTokenizer(Protocol):
    """A tokenizer that is still in its files; `Text` reads it when it is first needed."""

    def opened(self) -> Tokenizer:
        """The tokenizer; ValueError, in one sentence, where it cannot be read."""
        ...


@runtime_checkable
class SpecialTokenizer(Tokenizer, Protocol):
    """A tokenizer that knows what its model expects around a text, such as BERT's [CLS] and [SEP]."""

    def with_special(self, text: str) -> list[int]:
        """Ids of the text with every special token that the tokenizer itself adds."""
        ...


@runtime_checkable
class BatchTokenizer(Tokenizer, Protocol):
    """A tokenizer that is faster on many texts together than on one after the other."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, as from `encode`."""
        ...


@runtime_checkable
class EndingTokenizer(Tokenizer, Protocol):
    """A tokenizer whose texts end in several ways."""

    ends: tuple[int, ...]
    """Ids at which generation ends besides `eos_id`: of a turn, of a message."""
