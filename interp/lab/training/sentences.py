"""Generated English with a known answer as training data: indirect objects and facts (`interp.tasks`).

One sentence per row, its beginning token first, padded on the right. Determined: the answer's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch

from interp.core.boundary import public
from interp.data.batch import Batch
from interp.lab.training.vocabulary import Vocabulary
from interp.model.config import Json
from interp.tasks.examples import Examples, Place
from interp.tasks.facts import Facts
from interp.tasks.indirect_objects import IndirectObjects


@public()
@dataclass(frozen=True)
class Sentences:
    """The sentences of a task with answers, a full stop after them; a place says how many and which, not the task.

    Held out: those of the task's `held_out`, pairs of names or a phrasing that no training row has.
    """

    task: IndirectObjects | Facts
    vocabulary: Vocabulary
    width: int = 40
    """Tokens of the longest row; ValueError from `batch` for a longer one."""

    @property
    def d_vocab(self) -> int:
        """How many token ids there are."""
        return self.vocabulary.size

    @property
    def description(self) -> Json:
        """The fields that decide the rows."""
        kind = type(self.task)
        own = replace(self.task, rows=1, seed=0, held_out=False)
        described: Json = {
            "type": kind.__name__,
            "vocabulary": self.vocabulary.fingerprint,
            "width": self.width,
        }
        if own == kind(rows=1):
            return described
        values = ", ".join(f"{each.name}={getattr(own, each.name)!r}" for each in fields(own))
        return {**described, "task": f"{kind.__name__}({values})"}

    @public()
    def batch(self, place: Place, rows: int) -> Examples:
        """Rows of this place; the tokens of the answer are determined."""
        encode, bos = self.vocabulary.tokenizer.encode, self.vocabulary.tokenizer.bos_id
        assert bos is not None
        filled: list[list[int]] = []
        answers: list[range] = []
        for each in replace(self.task, rows=rows, held_out=place.step is None).sentences(place.generator):
            before, said = [bos, *encode(each.prompt)], encode(each.answer)
            filled.append([*before, *said, *encode(".")])
            answers.append(range(len(before) - 1, len(before) - 1 + len(said)))
            if len(filled[-1]) > self.width:
                raise ValueError(
                    f"rows of at most {self.width} tokens are required, {each.prompt + each.answer!r} has "
                    f"{len(filled[-1])}"
                )
        batch = Batch.of(filled, pad_id=self.vocabulary.tokenizer.pad_id, bos=True)
        determined = torch.zeros_like(batch.tokens[:, 1:], dtype=torch.bool)
        for row, columns in enumerate(answers):
            determined[row, columns.start : columns.stop] = True
        return Examples(batch, determined)
