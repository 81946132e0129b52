"""A row of a source: a text, token ids, or the reason why it can be neither; and how rows are read from files."""

import hashlib
import json
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor

Plain = str | list[int]
"""A text, or token ids."""


@dataclass(frozen=True)
class Example:
    """A row that is a pair of prompts, with what they are asked for."""

    clean: Plain
    corrupt: Plain
    answer: Plain | None = None
    """The right next token of the clean prompt, if the data say it."""
    wrong: Plain | None = None
    """The token it is contrasted with."""


Row = Plain | Example
"""What a source gives for a good row: a text, token ids, or a pair of them."""
Unit = Literal["line", "paragraph", "file"]
"""What a row of a text file is."""
STRIDE = 256
"""How many rows are read together; of a text file, every how many the place is remembered."""
BLOCK = 1 << 18
"""How many bytes of a file are looked at together."""
EXCERPT = 80
"""How many characters of a rejected row are kept."""


@dataclass(frozen=True)
class Rejected:
    """A row that cannot be used, and why."""

    row: int
    """Its number in the source."""
    reason: str
    excerpt: str
    """How it begins."""

    @classmethod
    def of(cls, row: int, reason: str, content: object) -> "Rejected":
        """The record of a row with this content, of which only the beginning is kept."""
        excerpt = (content if isinstance(content, str) else repr(content))[:EXCERPT]
        return cls(row, reason, excerpt.encode("utf-8", "backslashreplace").decode())


@dataclass(frozen=True)
class Reading:
    """How files are read. Errors: ValueError for an unknown unit or encoding, or one with wide line ends."""

    field: str = "text"
    """Which field of a record is the row: a text, or a list of token ids."""
    rows: Unit = "line"
    """What a row of a text file is; blank lines separate paragraphs, and are no rows."""
    encoding: str = "utf-8"
    """Of text and JSON; it must write a line end as the one byte it is in ASCII."""

    def __post_init__(self) -> None:
        try:
            narrow = b"\n".decode(self.encoding) == "\n"
        except LookupError as cause:
            raise ValueError(f"unknown encoding {self.encoding!r}") from cause
        except UnicodeDecodeError:
            narrow = False
        if not narrow:
            raise ValueError(
                f"an encoding that writes a line end as one byte is required, such as utf-8 or latin-1, got "
                f"{self.encoding!r}; convert the file first (iconv -f {self.encoding} -t utf-8)"
            )


def usable(row: int, value: object, what: str) -> Row | Rejected:
    """The text or the token ids that a value is, or why it is neither; `what` names it in the reason."""
    if isinstance(value, Tensor | np.ndarray):
        value = value.tolist()
    if isinstance(value, str):
        if not value:
            return Rejected.of(row, f"{what} is empty", value)
        try:
            value.encode()  # JSON can spell what UTF-8 cannot
        except UnicodeEncodeError as cause:
            return Rejected.of(row, f"{what} has half of a surrogate pair at {cause.start}", value)
        return value
    if isinstance(value, list) and not value:
        return Rejected.of(row, f"{what} is empty", value)
    if isinstance(value, list) and set(map(type, value)) == {int}:
        return value
    found = "null" if value is None else f"{type(value).__name__}, neither a text nor a list of ids"
    return Rejected.of(row, f"{what} is {found}", value)


def digest_of(*parts: str) -> str:
    """One hash of several words."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
