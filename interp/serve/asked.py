"""The tokens of a question: its rows, and which of their tokens are an answer's.

An answer of several tokens follows the prompt but for its last token (teacher forcing, `Batch.forced`), so that each of
its tokens is predicted in the row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxtyping import Int
from torch import Tensor

from interp.data.answers import AnswerTokens
from interp.data.batch import Batch
from interp.data.text import Text
from interp.serve.asks import AnsweredPrompt, AnswerField, EditedPrompt


class Compared(NamedTuple):
    """What is looked at: a token, and the one that it is contrasted with."""

    answer: int
    wrong: int | None
    notes: tuple[str, ...]
    """Sentences about how the answers are spelled, and where they are compared."""


@dataclass(frozen=True, eq=False)
class AskedTokens:
    """The rows of a question, its answers, and where it looks."""

    prompt: Batch
    """The prompt by itself."""
    batch: Batch
    """The prompt followed by its answer's tokens before the last one."""
    second: Int[Tensor, "p2"] | None
    """The second prompt, followed by the same tokens."""
    position: int
    """Where to look."""
    answers: AnswerTokens | None
    """The answer; None: the most probable token at the position, which is not known before a pass."""
    contrast: AnswerTokens | None
    """The answer and the wrong one, up to the first token in which they differ; None without either."""
    wrong: AnswerField | None
    """The wrong answer as it was given."""

    @property
    def row(self) -> Int[Tensor, "p"]:
        """The tokens of the clean and the edited row."""
        return self.batch.tokens[0]

    @property
    def end(self) -> int:
        """Position of the prompt's last token, where the first token of the answer is predicted."""
        return int(self.batch.prompt_ends()[0])

    @property
    def forced(self) -> tuple[int, ...]:
        """The tokens of the answer that follow the prompt."""
        return tuple(self.row[self.end + 1 :].tolist())

    @property
    def answer(self) -> tuple[int, ...]:
        """All tokens of the answer; none: the most probable token."""
        return () if self.batch.answer is None else (*self.forced, int(self.batch.answer[0]))

    def compared(self, text: Text, most_probable: int) -> Compared:
        """The token that is looked at, and the one that it is contrasted with.

        It is the token of the answer that is predicted at the position, before the prompt's end the first one. It is
        contrasted where the wrong answer differs from it first, and nowhere else.

        Args:
            most_probable: the token that is looked at without an answer.
        """
        if self.answers is None:
            if self.wrong is None:
                return Compared(most_probable, None, ())
            return _at_difference(answers_of(text, most_probable, self.wrong), self.prompt)
        step = max(0, self.position - self.end)
        if self.contrast is not None and step == shared(self.contrast):
            return _at_difference(self.contrast, self.prompt)
        notes = self.answers.notes(self.prompt)
        if self.contrast is not None:
            notes = (*notes, _elsewhere(text, self.contrast, self.end + shared(self.contrast)))
        return Compared(self.answer[step], None, notes)


def asked_tokens(ask: EditedPrompt, text: Text, most: int) -> AskedTokens:
    """The tokens of a question.

    Raises:
        ValueError: answers that the vocabulary lacks or that cannot be contrasted, a row of more than `most` tokens, a
            position outside it.
    """
    answer, wrong = (ask.answer, ask.wrong) if isinstance(ask, AnsweredPrompt) else (None, None)
    prompts = [text.batch(prompt) for prompt in (ask.prompt, ask.second) if prompt is not None]
    answers = None if answer is None else answers_of(text, answer)
    contrast = None if answer is None or wrong is None else answers_of(text, answer, wrong)
    batch, *second = prompts if answers is None else [answers.on(prompt) for prompt in prompts]
    _check_lengths([batch, *second], most)
    differs = 0 if contrast is None else shared(contrast)
    position = int(batch.prompt_ends()[0]) + differs if ask.position is None else ask.position
    if position >= (n := batch.tokens.shape[1]):
        raise ValueError(f"a position from 0 to {n - 1} is required, got {position}")
    other = second[0].tokens[0] if second else None
    return AskedTokens(prompts[0], batch, other, position, answers, contrast, wrong)


def answers_of(text: Text, answer: AnswerField, wrong: AnswerField | None = None) -> AnswerTokens:
    """One answer, and one that is contrasted with it, of one token or several each."""
    found = AnswerTokens.of(text, [answer], None if wrong is None else [wrong], several=True)
    assert found is not None
    return found


def shared(contrast: AnswerTokens) -> int:
    """Number of tokens with which an answer and a wrong one both begin."""
    return 0 if contrast.forced is None else contrast.forced.shape[1]


def _at_difference(contrast: AnswerTokens, prompt: Batch) -> Compared:
    assert contrast.wrong is not None
    return Compared(int(contrast.answer[0]), int(contrast.wrong[0]), contrast.notes(prompt))


def _elsewhere(text: Text, contrast: AnswerTokens, position: int) -> str:
    """Note that answers are contrasted at another position."""
    assert contrast.wrong is not None
    answer, wrong = (repr(text.of_outputs.pieces(ids)[0]) for ids in (contrast.answer, contrast.wrong))
    return (
        f"the answers differ first after position {position}: only there is {answer} contrasted with {wrong}"
    )


def _check_lengths(rows: Sequence[Batch], most: int) -> None:
    for row in rows:
        if (n := row.tokens.shape[1]) > most:
            what = (
                "a prompt" if row.forced is None else "a prompt followed by its answer but for the last token"
            )
            raise ValueError(f"{what} of at most {most} tokens is required, got {n}")
