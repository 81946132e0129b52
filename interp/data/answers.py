"""Answers as token ids, of one token or several, and notes about their spelling with and without a leading space."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import permutations

import torch
import torch.nn.functional as F
from jaxtyping import Int, Shaped
from torch import Tensor

from interp.data.batch import Answers, Batch, Choices
from interp.data.ids import check_contrast
from interp.data.spellings import Spellings, spelled
from interp.data.text import Text


@dataclass(frozen=True, eq=False)
class AnswerTokens:
    """The right next token `[n]` and the wrong next token `[n]`: one for all prompts (n = 1), or one per prompt.

    For an answer of several tokens, `answer` is its last token; the earlier ones are appended to the prompt
    (`Batch.forced`). An answer that is contrasted with a wrong one ends at the first token in which the two differ, so
    that both follow the same tokens.
    """

    answer: Int[Tensor, "n"]
    wrong: Int[Tensor, "n"] | None = None
    forced: Int[Tensor, "n f"] | None = None
    """The tokens of each answer before its last, padded on the right with -1; None: answers are of one token."""
    spacing: Spacing | None = field(default=None, compare=False, repr=False)
    """The answers given as texts that would be other tokens with, or without, a leading space."""
    keep_wrong: bool = False
    """Whether `Batch.wrong` of the data is kept where `wrong` is None."""
    follow: Batch | None = field(default=None, compare=False, repr=False)
    """The prompts that the answers follow, where these are not the prompts of the batch itself."""
    cut: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """A note for each pair of answers that goes on after the token in which the two differ."""
    choices: Choices | None = None
    """Several continuations of each prompt, whose tokens but for the last ones are `forced`; None: one."""
    branches: Int[Tensor, "n f"] | None = None
    """The continuation that each of the `forced` tokens belongs to, 0 for all; None: no prompt has several there."""

    @classmethod
    def of(
        cls, text: Text, answer: Answers | None, wrong: Answers | None = None, *, several: bool = False
    ) -> AnswerTokens | None:
        """The answers as token ids; None where `answer` is None, so that the data must bring answers.

        Args:
            several: whether an answer may be of several tokens.

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
        right = _token_lists(text, answer, several=several)
        false = None if wrong is None else _token_lists(text, wrong, several=several)
        if false is not None and len(right) != len(false) and 1 not in (len(right), len(false)):
            raise ValueError(
                f"as many wrong answers as answers are required, got {len(false)} for {len(right)}"
            )
        spacing = Spacing.of(text, answer, wrong)
        if max(map(len, [*right, *(false or [])])) == 1:
            first, second = (
                None if tokens is None else torch.tensor(tokens)[:, 0] for tokens in (right, false)
            )
            assert first is not None
            if second is not None:
                check_contrast(first, second, pieces=text.of_outputs.pieces)
            return cls(first, second, spacing=spacing)
        if false is None:
            return cls._of_ends([(tokens[:-1], tokens[-1:]) for tokens in right], spacing, ())
        count = max(len(right), len(false))
        pairs = list(zip(right * (count // len(right)), false * (count // len(false)), strict=True))
        ends = [_compared_tokens(text, *pair) for pair in pairs]
        cut = dict.fromkeys(sentence for pair in pairs if (sentence := _cut_note(text, *pair)))
        return cls._of_ends(ends, spacing, tuple(cut))

    @classmethod
    def of_choices(
        cls, text: Text, answer: Answers | None, wrong: Answers | None = None
    ) -> AnswerTokens | None:
        """The answers as token ids, of which each may have several spellings, and wrong ones of any length.

        One answer of one spelling is what `of` makes of it.

        Raises:
            ValueError: as `of`; a spelling that begins with another one, or an answer that is a wrong one too.
        """
        one_each = all(len(item.texts) == 1 for item in spelled(answer))
        if answer is None or (wrong is None and one_each):
            return cls.of(text, answer if answer is None else _first_spelling(answer), wrong, several=True)
        right = _spelling_lists(text, answer)
        false: list[list[list[int]]] = [[]] if wrong is None else _spelling_lists(text, wrong)
        if len(right) != len(false) and 1 not in (len(right), len(false)):
            raise ValueError(
                f"as many wrong answers as answers are required, got {len(false)} for {len(right)}"
            )
        count = max(len(right), len(false))
        pairs = list(zip(right * (count // len(right)), false * (count // len(false)), strict=True))
        for pair in pairs:
            _check_apart(text, *pair)
        trees = [_Tree.of(*pair) for pair in pairs]
        forced = _padded([tree.forced for tree in trees])
        branches = _padded([tree.branches for tree in trees], 0)
        choices = Choices(
            _padded([tree.continuations for tree in trees]),
            _padded([tree.steps for tree in trees], 0),
            _padded([tree.wrong for tree in trees], 0).bool(),
        )
        return cls(
            torch.tensor([tree.continuations[0][-1] for tree in trees]),
            forced=forced if forced.shape[1] else None,
            spacing=Spacing.of(text, answer, wrong),
            choices=choices,
            branches=branches if bool(branches.any()) else None,
        )

    @classmethod
    def _of_ends(
        cls, ends: Sequence[tuple[list[int], list[int]]], spacing: Spacing | None, cut: tuple[str, ...]
    ) -> AnswerTokens:
        """The answers from pairs (tokens before the last, [last token of the answer] or [answer's, wrong answer's])."""
        width = max(len(before) for before, _ in ends)
        forced = torch.tensor([[*before, *[-1] * (width - len(before))] for before, _ in ends])
        last = torch.tensor([compared for _, compared in ends])
        wrong = last[:, 1] if last.shape[1] == 2 else None
        return cls(last[:, 0], wrong, forced if width else None, spacing, cut=cut)

    @property
    def several(self) -> bool:
        """Whether some answer is of several tokens, each of which counts: none is contrasted with a wrong one."""
        return self.forced is not None and self.wrong is None

    def begins(self, other: AnswerTokens) -> bool:
        """Whether each answer, up to the token that is compared, is the beginning of the other's."""
        own, others = self._token_lists(), other._token_lists()
        if len(own) != len(others) and 1 not in (len(own), len(others)):
            return False
        count = max(len(own), len(others))
        pairs = zip(own * (count // len(own)), others * (count // len(others)), strict=True)
        return all(tokens == whole[: len(tokens)] for tokens, whole in pairs)

    def _token_lists(self) -> list[list[int]]:
        """The tokens of each answer, up to the one that is compared."""
        last = (
            self.answer[:, None] if self.forced is None else torch.cat((self.forced, self.answer[:, None]), 1)
        )
        return [[token for token in tokens if token >= 0] for tokens in last.tolist()]

    @property
    def prompts(self) -> int | None:
        """Number of prompts that the answers are for; None where one answer is for all."""
        count = max(len(self.answer), 1 if self.wrong is None else len(self.wrong))
        return None if count == 1 else count

    def before_others(self, count: int, others: int) -> AnswerTokens:
        """The answers of `count` prompts, before `others` more prompts, which no answer follows.

        Those have the last prompt's answer as their next token, of which nothing may be made.
        """
        answer = self.answer.expand(count)
        forced = None if self.forced is None else self.forced.expand(count, -1)
        if others:
            answer = torch.cat((answer, answer[-1:].expand(others)))
            forced = None if forced is None else F.pad(forced, (0, 0, 0, others), value=-1)
        return replace(self, answer=answer, forced=forced)

    def on(self, batch: Batch) -> Batch:
        """The batch with the answer of each row, which is found by the row's number (`Batch.row`).

        Raises:
            ValueError: a row without an answer; packed rows, where answers are of several tokens.
        """
        answer, wrong, forced, branches = (
            None if x is None else _of_rows(x, batch)
            for x in (self.answer, self.wrong, self.forced, self.branches)
        )
        assert answer is not None
        batch = batch if forced is None else batch.followed_by(forced, branches)
        if self.choices is not None:
            batch = replace(batch, choices=self.choices.each(partial(_of_rows, batch=batch)))
        return batch.with_answers(answer, batch.wrong if wrong is None and self.keep_wrong else wrong)

    def notes(self, batch: Batch) -> tuple[str, ...]:
        """Notes about answers that may be meant with, or without, a leading space after these prompts."""
        prompts = batch if self.follow is None else self.follow
        return (*self.cut, *(() if self.spacing is None else self.spacing.notes(prompts)))


def _token_lists(text: Text, answers: Answers, *, several: bool) -> list[list[int]]:
    """The token ids of each answer, exactly one each where `several` is False."""
    if several:
        return text.continuations(answers)
    return [[token] for token in text.outputs(answers).tolist()]


def _first_spelling(answers: Answers) -> Answers:
    """Answers of which each set has one spelling, as that spelling."""
    if isinstance(answers, Spellings):
        return answers.texts[0] if not isinstance(answers.texts[0], tuple) else [answers.texts[0]]
    if not isinstance(answers, list | tuple):
        return answers
    return [item.texts[0] if isinstance(item, Spellings) else item for item in answers]


def _spelling_lists(text: Text, answers: Answers) -> list[list[list[int]]]:
    """The token ids of every spelling of each answer."""
    if not any(True for _ in spelled(answers)):
        return [[tokens] for tokens in text.continuations(answers)]
    items = answers if isinstance(answers, list | tuple) else [answers]
    sets = (item.texts if isinstance(item, Spellings) else [item] for item in items)
    return [text.continuations(list(texts)) for texts in sets]  # type: ignore[arg-type]


def _check_apart(text: Text, right: list[list[int]], wrong: list[list[int]]) -> None:
    """ValueError where a spelling begins with another of its answer, or stands for the answer and the wrong one."""

    def written(tokens: list[int]) -> str:
        return repr("".join(text.of_outputs.pieces(tokens)))

    for group in (right, wrong):
        for one, other in permutations(group, 2):
            if other[: len(one)] == one:
                raise ValueError(
                    f"a spelling must not begin with another, whose probability contains its own: {written(other)} "
                    f"begins with {written(one)}"
                )
    if both := [tokens for tokens in right if tokens in wrong]:
        raise ValueError(f"the answer and the wrong answer must differ, got {written(both[0])} for both")


@dataclass(frozen=True)
class _Tree:
    """Several continuations of a prompt in one row: the tokens that all begin with, then the rest of each."""

    continuations: list[list[int]]
    wrong: list[int]
    """1 for continuations of the wrong answer, else 0."""
    forced: list[int]
    """The tokens that follow the prompt: every token after which one of a continuation is predicted."""
    branches: list[int]
    """The continuation that each of `forced` belongs to, 0 where only one or all follow it."""
    steps: list[list[int]]
    """Number of the `forced` tokens before the one that predicts each token of a continuation, 0 for the prompt's last.
    """

    @classmethod
    def of(cls, right: list[list[int]], wrong: list[list[int]]) -> _Tree:
        """The row of these spellings of an answer and of a wrong one."""
        every = [*right, *wrong]
        shared = min(_shared_length(every[0], tokens) for tokens in every)
        shared = min(shared, min(map(len, every)) - 1)
        forced, branches = every[0][:shared], [0] * shared
        starts: dict[
            tuple[int, ...], int
        ] = {}  # what follows the shared tokens -> number of tokens before it
        for own in sorted({tuple(tokens[shared:-1]) for tokens in every}, key=lambda own: (-len(own), own)):
            if not any(known[: len(own)] == own for known in starts):
                starts[own] = len(forced)
                forced, branches = [*forced, *own], [*branches, *[len(starts)] * len(own)]
        branches = branches if len(starts) > 1 else [0] * len(branches)
        steps = []
        for tokens in every:
            own = tuple(tokens[shared:-1])
            start = next(start for known, start in starts.items() if known[: len(own)] == own)
            steps.append([*range(shared + 1), *range(start + 1, start + 1 + len(own))])
        return cls(every, [0] * len(right) + [1] * len(wrong), forced, branches, steps)


def _padded(lists: Sequence[Sequence[object]], missing: int = -1) -> Int[Tensor, "n ..."]:
    """Nested lists of any lengths as one tensor, filled up with `missing` at the end of each list."""
    if not any(isinstance(item, list) for row in lists for item in row):
        width = max(map(len, lists))
        return torch.tensor([[*row, *[missing] * (width - len(row))] for row in lists], dtype=torch.long)
    count = max(map(len, lists))
    width = max(len(item) for row in lists for item in row)  # type: ignore[arg-type]
    whole = torch.full((len(lists), count, width), missing)
    for i, row in enumerate(lists):
        for j, item in enumerate(row):
            whole[i, j, : len(item)] = torch.tensor(item)  # type: ignore[arg-type]
    return whole


def _compared_tokens(text: Text, answer: list[int], wrong: list[int]) -> tuple[list[int], list[int]]:
    """The tokens with which both answers begin, and the pair of first tokens in which they differ.

    Raises:
        ValueError: answers that are equal, or one of which begins with the other.
    """
    shared = _shared_length(answer, wrong)
    if shared == min(len(answer), len(wrong)):
        texts = [repr("".join(text.of_outputs.pieces(tokens))) for tokens in (answer, wrong)]
        raise ValueError(
            f"the answer and the wrong answer must differ before one of them ends, got {texts[0]} and {texts[1]}: ask "
            "for the log-probability of each (interp.metrics.answer_log_probability)"
        )
    return answer[:shared], [answer[shared], wrong[shared]]


def _cut_note(text: Text, answer: list[int], wrong: list[int]) -> str:
    """Note that the answers have tokens after those that are compared; "" where they have none."""
    shared = _shared_length(answer, wrong)
    if max(len(answer), len(wrong)) <= shared + 1:
        return ""
    pieces = text.of_outputs.pieces
    texts = [repr("".join(pieces(tokens))) for tokens in (answer, wrong)]
    compared = [repr(pieces(tokens[shared : shared + 1])[0]) for tokens in (answer, wrong)]
    return (
        f"the answers {texts[0]} and {texts[1]} are compared at the first token in which they differ, {compared[0]} "
        f"and {compared[1]}: what comes after it does not count"
    )


def _shared_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Number of equal tokens at the beginning of two answers."""
    same = [a == b for a, b in zip(first, second, strict=False)]
    return [*same, False].index(False)


def _of_rows(tokens: Shaped[Tensor, "n *f"], batch: Batch) -> Shaped[Tensor, "b *f"]:
    """The entry of `tokens` for each row of a batch, by the row's number; a single entry is for all rows."""
    device = batch.tokens.device
    if len(tokens) == 1:
        return tokens.to(device).expand(len(batch), *tokens.shape[1:])
    rows = torch.arange(len(batch)) if batch.row is None else batch.row.cpu()
    if int(rows.max()) >= len(tokens):
        raise ValueError(f"one answer per prompt is required, got {len(tokens)} for prompt {int(rows.max())}")
    return tokens[rows].to(device)


@dataclass(frozen=True)
class Spacing:
    """Answers given as texts that are a token both with and without a leading space, so that either may be meant."""

    text: Text
    bare: tuple[str, ...]
    """The answers given without the space."""
    spaced: tuple[str, ...]
    """The answers given with the space."""

    @classmethod
    def of(cls, text: Text, answer: Answers, wrong: Answers | None = None) -> Spacing | None:
        """The answers that are texts with a second spelling; None where no text has one."""
        answers = [
            item
            for listed in (answer, wrong)
            for item in (listed if isinstance(listed, list | tuple) else [listed])
        ]
        words = dict.fromkeys(item for item in answers if isinstance(item, str) and item.strip())
        bare = [word for word in words if not word[0].isspace() and _is_spelling(text, f" {word}", word)]
        spaced = [word for word in words if word[0] == " " and _is_spelling(text, word[1:], word)]
        return cls(text, tuple(bare), tuple(spaced)) if bare or spaced else None

    def notes(self, batch: Batch) -> tuple[str, ...]:
        """Notes about answers without a space after a prompt that ends in a word, or with one after a space.

        The notes depend on the spelling alone, not on which of the two tokens is more probable.
        """
        columns = batch.last().to(batch.tokens.device)[:, None]
        last = batch.tokens.gather(1, columns)[:, 0].unique().tolist()
        ends = [piece[-1] for piece in self.text.pieces(last) if piece]
        sentences: list[str] = []
        if any(end.isalpha() or end in ",;" for end in ends):
            sentences += self._sentences(
                self.bare, "has no leading space, and the prompt ends in a word", " {}".format
            )
        if " " in ends:
            sentences += self._sentences(
                self.spaced, "has a leading space, and the prompt ends in one", "{}".format
            )
        return tuple(sentences)

    def _sentences(self, words: Sequence[str], how: str, respelled: Callable[[str], str]) -> Iterator[str]:
        for word in words:
            several = len(self.text.tokenizer.encode(word)) > 1
            says = "would be other tokens" if several else "is another token"
            yield f"the answer {word!r} {how}: it is taken as it is, and {respelled(word.strip())!r} {says}"


def _is_spelling(text: Text, other_word: str, word: str) -> bool:
    """Whether `other_word` is a second spelling of `word`: one token too, or any text if `word` is several tokens."""
    several = [len(text.tokenizer.encode(form)) > 1 for form in (word, other_word)]
    return several[0] or not several[1]
