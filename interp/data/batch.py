"""A batch of token rows with its padding said explicitly; nothing downstream guesses it from the tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Literal

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from interp.core.boundary import public, shown
from interp.core.shapes import shape_text
from interp.model.attention import Memory
from interp.model.mask import Layout

Side = Literal["left", "right"]


@public(unchecked=("tokens",))
@dataclass(frozen=True, eq=False)
class Batch:
    """Token rows `[b p]` and which of them are real."""

    tokens: Int[Tensor, "b p"]
    keep: Bool[Tensor, "b p"] | None = None
    """True at real tokens; None = no padding anywhere."""
    bos: bool = False
    """Whether a beginning-of-sequence token was prepended to every row."""
    answer: Int[Tensor, "b"] | None = None
    """The token each row should be followed by, where a question has one."""
    wrong: Int[Tensor, "b"] | None = None
    """The token the answer is contrasted with."""
    documents: Int[Tensor, "b p"] | None = None
    """The text that each column belongs to, in packed rows (-1 at padding); None = one text per row."""
    types: Int[Tensor, "b p"] | None = None
    """Token types, for models that have them; None = 0 everywhere."""
    memory: Memory | None = None
    """What cross-attention reads, for the decoder of an encoder-decoder."""
    row: Int[Tensor, "n"] | None = None
    """Which of the prompts each row is, however often they were split, repeated or reordered; None = not numbered.

    In packed rows one entry per text: `documents` holds places in `row`.
    """
    corrupt: Int[Tensor, "b p"] | None = None
    """The corrupted prompt of each row, aligned with it token for token, where a question compares two."""

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, Tensor):
            raise ValueError(f"tokens must be ids in a Tensor, shape [batch, pos], got {shown(self.tokens)}")
        if self.tokens.ndim != 2 or self.tokens.is_floating_point() or self.tokens.numel() == 0:
            raise ValueError(
                "a batch requires at least one token id, shape [batch, pos], "
                f"got {self.tokens.dtype} of shape {shape_text(self.tokens.shape)}"
            )
        for name in ("keep", "documents", "types", "corrupt"):
            given, wanted = getattr(self, name), self.tokens.shape
            if given is not None and given.shape != wanted:
                raise ValueError(
                    f"{name} must have the tokens' shape {shape_text(wanted)}, got {shape_text(given.shape)}"
                )

    @classmethod
    def of(
        cls, rows: Sequence[Sequence[int]], *, pad_id: int = 0, side: Side = "right", bos: bool = False
    ) -> Batch:
        """Rows of any lengths, padded to the longest; `keep` is None when they are all equally long."""
        lengths = [len(row) for row in rows]
        if not rows or min(lengths) == 0:
            raise ValueError(f"every prompt requires at least one token, got lengths {lengths}")
        width = max(lengths)
        tokens = torch.full((len(rows), width), pad_id)
        keep = torch.zeros(len(rows), width, dtype=torch.bool)
        for i, row in enumerate(rows):
            span = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
            tokens[i, span] = torch.tensor(list(row))
            keep[i, span] = True
        return cls(tokens, None if min(lengths) == width else keep, bos)

    @classmethod
    def packed(
        cls,
        texts: Sequence[Sequence[int]],
        width: int,
        *,
        pad_id: int = 0,
        row: Int[Tensor, "n"] | None = None,
    ) -> Batch:
        """Texts side by side in rows of `width` columns, each seeing only itself; `documents` holds their numbers.

        row: the identity of each text.
        Longest first, each into the first row with room (first fit decreasing). Every number of a packed text equals
        that of the text alone. Errors: ValueError for an empty text, or one longer than `width`.
        """
        lengths = [len(text) for text in texts]
        if not texts or min(lengths) == 0 or max(lengths) > width:
            raise ValueError(f"texts of 1 to {width} tokens are required, got lengths {lengths}")
        rows: list[list[int]] = []
        for i in sorted(range(len(texts)), key=lambda i: -lengths[i]):
            fitting = (some for some in rows if sum(lengths[j] for j in some) + lengths[i] <= width)
            place = next(fitting, None)
            rows.append([i]) if place is None else place.append(i)
        tokens = torch.full((len(rows), width), pad_id)
        documents = torch.full((len(rows), width), -1)
        for r, some in enumerate(rows):
            joined = [token for i in some for token in texts[i]]
            tokens[r, : len(joined)] = torch.tensor(joined)
            documents[r, : len(joined)] = torch.tensor([i for i in some for _ in texts[i]])
        keep = documents >= 0
        return cls(tokens, None if bool(keep.all()) else keep, documents=documents, row=row)

    def unpack(self, values: Shaped[Tensor, "b p ..."]) -> list[Shaped[Tensor, "n ..."]]:
        """Per-position values of a packed batch as one tensor per text, in the order the texts were given."""
        if self.documents is None:
            raise ValueError("this batch is not packed: it has one text per row")
        count = int(self.documents.max()) + 1
        return [values[self.documents == i] for i in range(count)]

    def by_text(
        self, values: Shaped[Tensor, "b p ..."], real: Bool[Tensor, "b p"], nothing: float | int
    ) -> Shaped[Tensor, "n q ..."]:
        """Per-position values with one row per text, each from column 0 on, in the order of `identities`.

        `nothing` stands where `real` is False, and after the end of a text.
        """
        kept = torch.where(real.view(*real.shape, *[1] * (values.ndim - 2)), values, nothing)
        if self.keep is None and self.documents is None:
            return kept
        there, text, place = self.real, self.text_numbers, self.places
        found = values.new_full(
            (int(text.max()) + 1, int(place[there].max()) + 1, *values.shape[2:]), nothing
        )
        found[text[there], place[there]] = kept[there]
        return found

    @property
    def text_numbers(self) -> Int[Tensor, "b p"]:
        """The number of the text that each column belongs to, in the order of `identities`; -1 at padding."""
        if self.documents is None:
            number = torch.arange(len(self), device=self.tokens.device)[:, None].expand_as(self.tokens)
        else:
            starts = torch.ones_like(self.real)
            starts[:, 1:] = self.documents[:, 1:] != self.documents[:, :-1]
            number = (starts & self.real).flatten().cumsum(0).view_as(self.tokens) - 1
        return number.masked_fill(~self.real, -1)

    @property
    def places(self) -> Int[Tensor, "b p"]:
        """How many tokens stand before each in its text."""
        layout = Layout(self.keep, self.documents)
        return layout.positions(self.tokens.shape[1], 0, self.tokens.device).expand_as(self.tokens)

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def lengths(self) -> Int[Tensor, "b"]:
        """How many real tokens each row has."""
        if self.keep is None:
            return torch.full((len(self),), self.tokens.shape[1], device=self.tokens.device)
        return self.keep.sum(1)

    @property
    def real(self) -> Bool[Tensor, "b p"]:
        """True at every real token: `keep`, written out where there is no padding."""
        return torch.ones_like(self.tokens, dtype=torch.bool) if self.keep is None else self.keep

    @property
    def token_ids(self) -> Int[Tensor, "b p"]:
        """The tokens, -1 at padding: what a result says of its positions (`Text.token_words`)."""
        return self.tokens if self.keep is None else self.tokens.masked_fill(~self.keep, -1)

    def last(self) -> Int[Tensor, "b"]:
        """Column of the last real token of each row; ValueError for packed rows, which have several."""
        self._one_text_per_row("the last token")
        n = self.tokens.shape[1]
        if self.keep is None:
            return torch.full((len(self),), n - 1, device=self.tokens.device)
        return n - 1 - self.keep.flip(1).int().argmax(1)

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        return self._each(lambda x: x.to(device))

    def pinned(self) -> Batch:
        """The same in pinned memory, from which it can be copied to a GPU while that computes; itself on a device.

        Errors: RuntimeError without an accelerator.
        """
        return self._each(lambda x: x.pin_memory() if x.is_cpu else x) if self.tokens.is_cpu else self

    def split(self, size: int) -> Iterator[Batch]:
        """Consecutive parts of at most `size` rows, of the same width."""
        for start in range(0, len(self), size):
            yield self._each(itemgetter(slice(start, start + size)))

    def rows(self, index: Int[Tensor, "n"]) -> Batch:
        """These rows in this order, one several times if need be; of the same width."""
        return self._each(lambda x: x[index.to(x.device)])

    def trimmed(self) -> Batch:
        """The same rows without the last columns that are padding in all of them."""
        if self.keep is None:
            return self
        width = int(self.keep.any(0).nonzero()[-1]) + 1
        found = self._columns(itemgetter((slice(None), slice(width))))
        return replace(found, keep=None) if bool(found.real.all()) else found

    def numbered(self) -> Batch:
        """The same with its rows (the texts of packed rows) numbered, if they are not."""
        if self.row is not None:
            return self
        count = len(self) if self.documents is None else int(self.documents.max()) + 1
        return replace(self, row=torch.arange(count))

    def identities(self) -> Int[Tensor, "n"] | None:
        """Which prompt each row is; in packed rows each text, in the order in which they stand there."""
        if self.row is None or self.documents is None:
            return self.row
        flat = self.documents.flatten()
        starts = torch.ones_like(flat, dtype=torch.bool)
        starts[1:] = flat[1:] != flat[:-1]
        starts[:: self.documents.shape[1]] = True
        return self.row.to(flat.device)[flat[starts & (flat >= 0)]]

    def pair(self) -> tuple[Batch, Batch]:
        """The rows and their corrupted prompts, each as a batch of its own, both with the answers.

        Errors: ValueError for a batch without corrupted prompts.
        """
        if self.corrupt is None:
            raise ValueError("this question compares two prompts: corrupted prompts are required, got none")
        return replace(self, corrupt=None), replace(self, tokens=self.corrupt, corrupt=None)

    def with_answers(self, answer: Int[Tensor, "b"], wrong: Int[Tensor, "b"] | None) -> Batch:
        """The same rows with the tokens a question is about."""
        return replace(self, answer=answer, wrong=wrong)

    def left_aligned(self) -> Batch:
        """The same rows with all padding moved to the left, so that every row ends in the last column."""
        self._one_text_per_row("alignment")
        if self.keep is None:
            return self
        order = self.keep.int().argsort(dim=1, stable=True)
        return self._columns(lambda x: x.gather(1, order))

    def _one_text_per_row(self, what: str) -> None:
        if self.documents is not None:
            raise ValueError(f"{what} requires one text per row, this batch is packed")

    def _columns(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """The same with everything that has a value per position changed."""
        keep, documents, types, corrupt = (
            None if x is None else change(x) for x in (self.keep, self.documents, self.types, self.corrupt)
        )
        tokens = change(self.tokens)
        return replace(self, tokens=tokens, keep=keep, documents=documents, types=types, corrupt=corrupt)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        def changed(x: Tensor | None) -> Tensor | None:
            return None if x is None else change(x)

        memory = self.memory
        if memory is not None:
            memory = Memory(change(memory.states), changed(memory.keep))
        row = changed(self.row) if self.documents is None else self.row
        return Batch(
            change(self.tokens), changed(self.keep), self.bos, changed(self.answer), changed(self.wrong),
            changed(self.documents), changed(self.types), memory, row, changed(self.corrupt),
        )  # fmt: skip


def counted(batches: Iterable[Batch]) -> Iterator[Batch]:
    """The batches, those without row numbers numbered on from the ones before."""
    seen = 0
    for batch in batches:
        if not isinstance(batch, Batch):
            raise ValueError(
                f"batches are required, such as model.text.batch(texts).split(32), got {batch!r:.60}"
            )
        if batch.row is None:
            fresh = batch.numbered().row
            assert fresh is not None
            batch = replace(batch, row=fresh + seen)
            seen += len(fresh)
        yield batch
