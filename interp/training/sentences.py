"""Generated English with a known answer as training data: indirect objects and facts (`interp.zoo.tasks`).

One sentence per row, its beginning token first, padded on the right. Determined: the answer's tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from interp.data.batch import Batch
from interp.model.config import Json
from interp.training.examples import Examples, Place
from interp.training.vocabulary import Vocabulary
from interp.zoo import tasks


@dataclass(frozen=True)
class IndirectObjects:
    """Sentences in which the name that came once is the answer (Wang et al. 2022).

    Held out: pairs of names that no training row has.
    """

    vocabulary: Vocabulary
    width: int = 40
    """Tokens of the longest row; ValueError from `batch` for a longer one."""

    @property
    def d_vocab(self) -> int:
        """How many token ids there are."""
        return self.vocabulary.size

    @property
    def description(self) -> Json:
        """What decides the rows."""
        return {
            "type": "IndirectObjects",
            "vocabulary": self.vocabulary.fingerprint,
            "width": self.width,
        }

    def batch(self, place: Place, rows: int) -> Examples:
        """Rows of this place."""
        found = tasks.indirect_objects(place.generator, rows, held_out=place.step is None)
        return answered(((each.prompt, each.answer) for each in found), self.vocabulary, self.width)


@dataclass(frozen=True)
class Facts:
    """The facts of the package in their trained phrasings; held out: the same facts in a phrasing no row has."""

    vocabulary: Vocabulary
    width: int = 40
    """Tokens of the longest row; ValueError from `batch` for a longer one."""

    @property
    def d_vocab(self) -> int:
        """How many token ids there are."""
        return self.vocabulary.size

    @property
    def description(self) -> Json:
        """What decides the rows."""
        return {"type": "Facts", "vocabulary": self.vocabulary.fingerprint, "width": self.width}

    def batch(self, place: Place, rows: int) -> Examples:
        """Rows of this place."""
        held_out = place.step is None
        prompts = (tasks.held_out_fact_prompts if held_out else tasks.trained_fact_prompts)(
            tasks.load_facts()
        )
        found = [prompts[i] for i in place.generator.integers(0, len(prompts), size=rows)]
        return answered(((each.prompt, each.answer) for each in found), self.vocabulary, self.width)


def answered(pairs: Iterable[tuple[str, str]], vocabulary: Vocabulary, width: int) -> Examples:
    """A row for each prompt and answer, a full stop after them; the tokens of the answer are determined.

    Errors: ValueError for a row of more than `width` tokens.
    """
    encode, bos = vocabulary.tokenizer.encode, vocabulary.tokenizer.bos_id
    assert bos is not None
    rows: list[list[int]] = []
    answers: list[range] = []
    for prompt, answer in pairs:
        before, said = [bos, *encode(prompt)], encode(answer)
        rows.append([*before, *said, *encode(".")])
        answers.append(range(len(before) - 1, len(before) - 1 + len(said)))
        if len(rows[-1]) > width:
            raise ValueError(
                f"rows of at most {width} tokens are required, {prompt + answer!r} has {len(rows[-1])}"
            )
    batch = Batch.of(rows, pad_id=vocabulary.tokenizer.pad_id, bos=True)
    determined = torch.zeros_like(batch.tokens[:, 1:], dtype=torch.bool)
    for row, columns in enumerate(answers):
        determined[row, columns.start : columns.stop] = True
    return Examples(batch, determined)
