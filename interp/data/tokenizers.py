"""Protocols of tokenizers: the methods that all have, and those that only some have."""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable


@runtime_checkable
class Tokenizer(Protocol):
    """The methods that every tokenizer has; `families.tokenizer` adapts the two common libraries to them."""

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
    """A tokenizer whose files are not read yet; `Text` reads them when they are first needed."""

    def opened(self) -> Tokenizer:
        """The tokenizer; ValueError, in one sentence, where it cannot be read."""
        ...


@runtime_checkable
class SpecialTokenizer(Tokenizer, Protocol):
    """A tokenizer that adds special tokens around a text, such as BERT's [CLS] and [SEP]."""

    def with_special(self, text: str) -> list[int]:
        """Ids of the text with every special token that the tokenizer itself adds."""
        ...


@runtime_checkable
class BatchTokenizer(Tokenizer, Protocol):
    """A tokenizer that encodes many texts in one call, faster than one by one."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, as from `encode`."""
        ...


@runtime_checkable
class EndingTokenizer(Tokenizer, Protocol):
    """A tokenizer with more than one id that ends a text."""

    ends: tuple[int, ...]
    """Ids besides `eos_id` at which generation ends, such as the end of a chat turn."""


@runtime_checkable
class ChatTokenizer(Tokenizer, Protocol):
    """A tokenizer that may have a chat template."""

    def chat_text(self, messages: Sequence[Mapping[str, str]]) -> str:
        """A conversation as the model reads it, up to where the assistant speaks; ValueError without a template."""
        ...

    @property
    def turn_end(self) -> int | None:
        """Id with which the template ends an assistant's turn; None where there is none."""
        ...
