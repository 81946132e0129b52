"""The answers a question asks for, as tokens, handed to every batch by the number of its rows."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from interp.data.batch import Batch
from interp.data.text import Answers, Text


@dataclass(frozen=True, eq=False)
class Posed:
    """The right next token of each prompt, and the one it is contrasted with: one for all, or one per prompt."""

    answer: Int[Tensor, "n"]
    wrong: Int[Tensor, "n"] | None = None

    @classmethod
    def of(cls, text: Text, answer: Answers | None, wrong: Answers | None = None) -> "Posed | None":
        """The answers as ids; None where a question brings none, so that the data must.

        Errors: ValueError for texts of several tokens, ids outside the vocabulary, or answers and wrong ones of
        different numbers.
        """
        if answer is None:
            if wrong is not None:
                raise ValueError(
                    "a wrong answer is contrasted with a right one: `answer` is required, got none"
                )
            return None
        first = text.tokens(answer)
        second = None if wrong is None else text.tokens(wrong)
        if second is not None and len(first) != len(second) and 1 not in (len(first), len(second)):
            raise ValueError(
                f"as many wrong answers as answers are required, got {len(second)} for {len(first)}"
            )
        return cls(first, second)

    @property
    def rows(self) -> int | None:
        """How many prompts the answers are for; None for any number."""
        count = max(len(self.answer), 1 if self.wrong is None else len(self.wrong))
        return None if count == 1 else count

    def __call__(self, batch: Batch) -> Batch:
        """The batch with the answers of its rows. ValueError for a row that has none."""
        answer, wrong = (None if x is None else _of_rows(x, batch) for x in (self.answer, self.wrong))
        assert answer is not None
        return batch.with_answers(answer, wrong)


def _of_rows(tokens: Int[Tensor, "n"], batch: Batch) -> Int[Tensor, "b"]:
    """The token of each row of a batch."""
    device = batch.tokens.device
    if len(tokens) == 1:
        return tokens.to(device).expand(len(batch))
    rows = torch.arange(len(batch)) if batch.row is None else batch.row.cpu()
    if int(rows.max()) >= len(tokens):
        raise ValueError(f"one answer per prompt is required, got {len(tokens)} for prompt {int(rows.max())}")
    return tokens[rows].to(device)
