"""Answers with and without their leading space: " Mary" and "Mary" can be two tokens, and one of them is meant."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from interp.data.batch import Answers, Batch, Text
from interp.data.ids import check_contrast


@dataclass(frozen=True)
class Spellings:
    """Answers given as texts that are one token with a leading space and another without it."""

    text: Text
    bare: tuple[str, ...]
    """Those given without the space."""
    spaced: tuple[str, ...]
    """Those given with it."""

    @classmethod
    def of(cls, text: Text, answer: Answers | None, wrong: Answers | None = None) -> Spellings | None:
        """Of the answers that are texts; None where no text has two spellings.

        Errors: ValueError where the answer and the wrong answer of a prompt are one token, however they are spelled.
        """
        if answer is not None and wrong is not None:
            check_contrast(text.outputs(answer), text.outputs(wrong), pieces=text.of_outputs.pieces)
        both = (answer, wrong)
        given = [each for some in both for each in (some if isinstance(some, list | tuple) else [some])]
        words = dict.fromkeys(each for each in given if isinstance(each, str) and each.strip())
        bare = [word for word in words if not word[0].isspace() and _is_token(text, f" {word}")]
        spaced = [word for word in words if word[0] == " " and _is_token(text, word[1:])]
        return cls(text, tuple(bare), tuple(spaced)) if bare or spaced else None

    def notes(self, batch: Batch) -> tuple[str, ...]:
        """A sentence for each answer without space after a prompt that ends in a word, or with one after a space.

        By the spelling alone: which of the two tokens is the more probable is not looked at.
        """
        columns = batch.last().to(batch.tokens.device)[:, None]
        last = batch.tokens.gather(1, columns)[:, 0].unique().tolist()
        ends = [piece[-1] for piece in self.text.pieces(last) if piece]
        found: list[str] = []
        if any(end.isalpha() or end in ",;" for end in ends):
            found += _sentences(
                self.bare, "has no leading space, and the prompt ends in a word", " {}".format
            )
        if " " in ends:
            found += _sentences(self.spaced, "has a leading space, and the prompt ends in one", "{}".format)
        return tuple(found)


def _sentences(words: Sequence[str], how: str, other: Callable[[str], str]) -> Iterator[str]:
    for word in words:
        yield f"the answer {word!r} {how}: it is taken as it is, and {other(word.strip())!r} is another token"


def _is_token(text: Text, word: str) -> bool:
    try:
        text.single(word)
    except ValueError:
        return False
    return True
