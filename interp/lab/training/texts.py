"""Texts as training rows without padding: shuffled each epoch, joined, cut into rows; no text sees another."""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

from interp.core.boundary import check, public
from interp.data.batch import Batch
from interp.data.sources import Data, open_source
from interp.data.stream import Stream
from interp.data.text import Text
from interp.lab.training.vocabulary import Vocabulary
from interp.model.config import Json
from interp.tasks.examples import Examples, Place

IdRow = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
TOKENS_PER_BATCH = 1 << 16


class PackedTexts:
    """Rows of `width` tokens, each filled with texts side by side; `documents` keeps them apart.

    In every epoch the texts come in another order. Where a row ends within a text, the next row begins with the rest,
    as a text of its own: nothing is padded, and the tokens after such a cut do not see those before it. What fills
    no whole row at the end of an epoch waits for another one. All tokens are held in memory, 4 bytes each.
    Held out: the last texts, in their order.
    """

    def __init__(
        self,
        texts: Sequence[Sequence[int]],
        vocabulary: Vocabulary,
        *,
        width: int,
        held_out: float = 0.05,
    ) -> None:
        """Texts as ids, each of two tokens or more; held_out: the share of texts at the end that is never trained on.

        Raises:
            ValueError: if one part does not fill a row, or for ids outside the vocabulary.
        """
        check("PackedTexts: texts", texts, Sequence[Sequence[int]])
        self.vocabulary, self.width, self.share = vocabulary, width, held_out
        if width < 2 or not 0 < held_out < 1:
            raise ValueError(f"width >= 2 and held_out in (0, 1) are required, got {width} and {held_out}")
        cut = len(texts) - round(len(texts) * held_out)
        self._trained, self._kept = _Joined(texts[:cut], width), _Joined(texts[cut:], width)
        largest = max(int(part.flat.max(initial=0)) for part in (self._trained, self._kept))
        if largest >= self.d_vocab:
            raise ValueError(f"token ids below {self.d_vocab} are required, got {largest}")
        self._epoch: tuple[Place, IdRow] | None = None

    @classmethod
    @public()
    def of(
        cls, data: Data, vocabulary: Vocabulary, *, width: int, held_out: float = 0.05, field: str = "text"
    ) -> "PackedTexts":
        """The texts of anything that `open_source` reads, as training data.

        Each begins with BOS; one over `width` is split, with BOS.

        Args:
            data: files, a folder, a data set or texts.
            vocabulary: the tokenizer.
            width: tokens of a row.
            held_out: share of the texts that is held out.
            field: name of the column of texts, in tables.

        Raises:
            ValueError: a row that cannot be used (an empty one, say), which the message names, or as the class.
        """
        text = Text(vocabulary.tokenizer, width, vocabulary.size)
        stream = Stream(
            open_source(data, field=field),
            text,
            tokens_per_batch=TOKENS_PER_BATCH,
            too_long="split",
            rows_per_window=4096,
        )
        texts: list[list[int]] = []
        for w in range(stream.windows or 0):
            window = stream.window(w)
            if window.rejected:
                bad = window.rejected[0]
                raise ValueError(f"row {bad.row} cannot be trained on: {bad.reason} ({bad.excerpt!r})")
            texts += _in_order(window.batches)
        return cls([each for each in texts if len(each) > 1], vocabulary, width=width, held_out=held_out)

    @property
    def d_vocab(self) -> int:
        """How many token ids there are."""
        return self.vocabulary.size

    @property
    def rows(self) -> int:
        """Rows of one epoch."""
        return self._trained.rows

    @property
    def tokens(self) -> int:
        """Tokens of all texts that are trained on."""
        return len(self._trained.flat)

    @property
    def description(self) -> Json:
        """The fields that decide the rows."""
        digest = hashlib.sha256()
        for part in (self._trained, self._kept):
            digest.update(part.flat.tobytes() + part.lengths.tobytes())
        return {
            "type": "PackedTexts",
            "texts": digest.hexdigest(),
            "vocabulary": self.vocabulary.fingerprint,
            "width": self.width,
            "held_out": self.share,
        }

    @public()
    def batch(self, place: Place, rows: int) -> Examples:
        """The rows of a place; of the held-out texts no more than there are."""
        if place.step is None:
            kept = self._kept
            return _examples([kept.cut(np.arange(len(kept.lengths)), np.arange(min(rows, kept.rows)))])
        numbers = place.step * rows + np.arange(rows)
        parts = []
        for epoch in np.unique(numbers // self.rows).tolist():
            here = numbers[numbers // self.rows == epoch] % self.rows
            parts.append(self._trained.cut(self._order(Place(place.seed, epoch)), here))
        return _examples(parts)

    def _order(self, epoch: Place) -> IdRow:
        """The texts of an epoch, in its order; the last one is remembered."""
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = epoch, epoch.generator.permutation(len(self._trained.lengths))
        return self._epoch[1]


class _Joined:
    """Texts end to end."""

    def __init__(self, texts: Sequence[Sequence[int]], width: int) -> None:
        self.lengths: IdRow = np.array([len(text) for text in texts], dtype=np.int64)
        if self.lengths.sum() < width or self.lengths.min() < 2:
            raise ValueError(
                f"texts of two tokens or more that fill a row of {width} are required, to train on and to hold out "
                f"(held_out), got {len(texts)} of together {self.lengths.sum()} tokens"
            )
        self.flat = np.concatenate([np.asarray(text, dtype=np.int32) for text in texts])
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.width = width

    @property
    def rows(self) -> int:
        """How many rows they fill."""
        return len(self.flat) // self.width

    def cut(self, order: IdRow, numbers: IdRow) -> tuple[IdRow, IdRow]:
        """Tokens and texts of these rows, [n, width] each, where the texts stand in this order."""
        ends = np.cumsum(self.lengths[order])
        places = numbers[:, None] * self.width + np.arange(self.width)
        which = np.searchsorted(ends, places, side="right")
        text = order[which]
        within = places - (ends[which] - self.lengths[text])
        return self.flat[self.starts[text] + within].astype(np.int64), which


def _in_order(batches: Sequence[Batch]) -> list[list[int]]:
    """The texts of the batches of a window as they stood in the source; the pieces of one text stay in order."""
    numbered: list[tuple[int, list[int]]] = []
    for batch in batches:
        assert batch.row is not None
        ids = [tokens[real].tolist() for tokens, real in zip(batch.tokens, batch.real, strict=True)]
        numbered += zip(batch.row.tolist(), ids, strict=True)
    return [ids for _, ids in sorted(numbered, key=lambda each: each[0])]


def _examples(parts: Sequence[tuple[IdRow, IdRow]]) -> Examples:
    tokens, documents = (torch.from_numpy(np.concatenate(each)) for each in zip(*parts, strict=True))
    return Examples(Batch(tokens, documents=documents))
