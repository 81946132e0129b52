"""The answers of a question as tokens, of one token or several, and their other spellings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Int
from torch import Tensor

from interp.data.batch import Answers, Batch
from interp.data.ids import check_contrast
from interp.data.text import Text


@dataclass(frozen=True, eq=False)
class AnswerTokens:
    """The right next token of each prompt and its wrong one: one for all, or one per prompt.

    Of an answer of several tokens it is the last one; the others follow the prompt (`Batch.forced`). Contrasted with a
    wrong answer it ends at the first token in which the two differ, so that both follow the same tokens.
    """

    answer: Int[Tensor, "n"]
    wrong: Int[Tensor, "n"] | None = None
    forced: Int[Tensor, "n f"] | None = None
    """The tokens of each answer before `answer`, -1 after the end of shorter ones; None: answers are of one token."""
    spellings: Spellings | None = field(default=None, compare=False, repr=False)
    """The answers, given as texts, that have another spelling with or without a leading space."""
    keep_wrong: bool = False
    """Whether wrong answers that the data bring stay where none are given here."""
    follow: Batch | None = field(default=None, compare=False, repr=False)
    """The prompts that the answers follow, where those are not the rows' own."""
    cut: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """A sentence for each pair of answers of which later tokens are not compared."""

    @classmethod
    def of(
        cls, text: Text, answer: Answers | None, wrong: Answers | None = None, *, several: bool = False
    ) -> AnswerTokens | None:
        """The answers as ids; None where a question brings none, so that the data must.

        Args:
            several: whether they may be of several tokens.

        Raises:
            ValueError: texts of several tokens where one is required, ids outside the vocabulary, answers and wrong
                ones of different numbers, or two of which one is the other's beginning.
        """
        if answer is None:
            if wrong is not None:
                raise ValueError(
                    "a wrong answer is contrasted with a right one: `answer` is required, got none"
                )
            return None
        right = _tokens_of_each(text, answer, several=several)
        false = None if wrong is None else _tokens_of_each(text, wrong, several=several)
        if false is not None and len(right) != len(false) and 1 not in (len(right), len(false)):
            raise ValueError(
                f"as many wrong answers as answers are required, got {len(false)} for {len(right)}"
            )
        spellings = Spellings.of(text, answer, wrong)
        if max(map(len, [*right, *(false or [])])) == 1:
            first, second = (None if each is None else torch.tensor(each)[:, 0] for each in (right, false))
            assert first is not None
            if second is not None:
                check_contrast(first, second, pieces=text.of_outputs.pieces)
            return cls(first, second, spellings=spellings)
        if false is None:
            return cls._ending([(each[:-1], each[-1:]) for each in right], spellings, ())
        count = max(len(right), len(false))
        pairs = list(zip(right * (count // len(right)), false * (count // len(false)), strict=True))
        cut = dict.fromkeys(sentence for pair in pairs if (sentence := _cut(text, *pair)))
        return cls._ending([_apart(text, *pair) for pair in pairs], spellings, tuple(cut))

    @classmethod
    def _ending(
        cls, ends: Sequence[tuple[list[int], list[int]]], spellings: Spellings | None, cut: tuple[str, ...]
    ) -> AnswerTokens:
        """The answers, from the tokens before the last one of each, and the last one or the two compared."""
        width = max(len(before) for before, _ in ends)
        forced = torch.tensor([[*before, *[-1] * (width - len(before))] for before, _ in ends])
        last = torch.tensor([both for _, both in ends])
        wrong = last[:, 1] if last.shape[1] == 2 else None
        return cls(last[:, 0], wrong, forced if width else None, spellings, cut=cut)

    @property
    def prompts(self) -> int | None:
        """Number of prompts that the answers are for; None for any number."""
        count = max(len(self.answer), 1 if self.wrong is None else len(self.wrong))
        return None if count == 1 else count

    def on(self, batch: Batch) -> Batch:
        """The batch with the answers of its rows, which are found by their numbers.

        Raises:
            ValueError: a row that has none; for packed rows, where answers are of several tokens.
        """
        answer, wrong, forced = (
            None if x is None else _of_rows(x, batch) for x in (self.answer, self.wrong, self.forced)
        )
        assert answer is not None
        batch = batch if forced is None else batch.followed_by(forced)
        return batch.with_answers(answer, batch.wrong if wrong is None and self.keep_wrong else wrong)

    def notes(self, batch: Batch) -> tuple[str, ...]:
        """Notes about answers whose other spelling may be meant after these prompts."""
        prompts = batch if self.follow is None else self.follow
        return (*self.cut, *(() if self.spellings is None else self.spellings.notes(prompts)))


def _tokens_of_each(text: Text, answers: Answers, *, several: bool) -> list[list[int]]:
    """The tokens of every answer, of which each must be a single one where `several` is False."""
    if several:
        return text.continuations(answers)
    return [[token] for token in text.outputs(answers).tolist()]


def _apart(text: Text, answer: list[int], wrong: list[int]) -> tuple[list[int], list[int]]:
    """The tokens that two answers share, and the first of each after them.

    Raises:
        ValueError: where one is the other, or its beginning.
    """
    shared = _shared(answer, wrong)
    if shared == min(len(answer), len(wrong)):
        texts = [repr("".join(text.of_outputs.pieces(each))) for each in (answer, wrong)]
        raise ValueError(
            f"the answer and the wrong answer must differ before one of them ends, got {texts[0]} and {texts[1]}: ask "
            "for the log-probability of each (interp.metrics.answer_log_probability)"
        )
    return answer[:shared], [answer[shared], wrong[shared]]


def _cut(text: Text, answer: list[int], wrong: list[int]) -> str:
    """Note about tokens of the answers after those that are compared; "" where there are none."""
    shared = _shared(answer, wrong)
    if max(len(answer), len(wrong)) <= shared + 1:
        return ""
    pieces = text.of_outputs.pieces
    whole = [repr("".join(pieces(each))) for each in (answer, wrong)]
    compared = [repr(pieces(each[shared : shared + 1])[0]) for each in (answer, wrong)]
    return (
        f"the answers {whole[0]} and {whole[1]} are compared at the first token in which they differ, {compared[0]} "
        f"and {compared[1]}: what comes after it does not count"
    )


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Number of equal tokens at the beginning of two answers."""
    same = [a == b for a, b in zip(one, other, strict=False)]
    return [*same, False].index(False)


def _of_rows(tokens: Int[Tensor, "n *f"], batch: Batch) -> Int[Tensor, "b *f"]:
    """The token, or the tokens, of each row of a batch."""
    device = batch.tokens.device
    if len(tokens) == 1:
        return tokens.to(device).expand(len(batch), *tokens.shape[1:])
    rows = torch.arange(len(batch)) if batch.row is None else batch.row.cpu()
    if int(rows.max()) >= len(tokens):
        raise ValueError(f"one answer per prompt is required, got {len(tokens)} for prompt {int(rows.max())}")
    return tokens[rows].to(device)


@dataclass(frozen=True)
class Spellings:
    """Answers given as texts that are other tokens with a leading space than without it: one of the two is meant."""

    text: Text
    bare: tuple[str, ...]
    """The answers given without the space."""
    spaced: tuple[str, ...]
    """The answers given with the space."""

    @classmethod
    def of(cls, text: Text, answer: Answers, wrong: Answers | None = None) -> Spellings | None:
        """The spellings of the answers that are texts; None where no text has two."""
        given = [
            each for some in (answer, wrong) for each in (some if isinstance(some, list | tuple) else [some])
        ]
        words = dict.fromkeys(each for each in given if isinstance(each, str) and each.strip())
        bare = [word for word in words if not word[0].isspace() and _is_spelling(text, f" {word}", word)]
        spaced = [word for word in words if word[0] == " " and _is_spelling(text, word[1:], word)]
        return cls(text, tuple(bare), tuple(spaced)) if bare or spaced else None

    def notes(self, batch: Batch) -> tuple[str, ...]:
        """Notes about answers without a space after a prompt that ends in a word, or with one after a space.

        By the spelling alone: which of the two is the more probable is not looked at.
        """
        columns = batch.last().to(batch.tokens.device)[:, None]
        last = batch.tokens.gather(1, columns)[:, 0].unique().tolist()
        ends = [piece[-1] for piece in self.text.pieces(last) if piece]
        found: list[str] = []
        if any(end.isalpha() or end in ",;" for end in ends):
            found += self._sentences(
                self.bare, "has no leading space, and the prompt ends in a word", " {}".format
            )
        if " " in ends:
            found += self._sentences(
                self.spaced, "has a leading space, and the prompt ends in one", "{}".format
            )
        return tuple(found)

    def _sentences(self, words: Sequence[str], how: str, other: Callable[[str], str]) -> Iterator[str]:
        for word in words:
            several = len(self.text.tokenizer.encode(word)) > 1
            says = "would be other tokens" if several else "is another token"
            yield f"the answer {word!r} {how}: it is taken as it is, and {other(word.strip())!r} {says}"


def _is_spelling(text: Text, other: str, word: str) -> bool:
    """Whether a text is another spelling: one token too, or any if the answer is of several tokens."""
    several = [len(text.tokenizer.encode(each)) > 1 for each in (word, other)]
    return several[0] or not several[1]
