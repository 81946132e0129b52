"""A batch of token rows with an explicit mask of padding, which nothing else derives from the tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from operator import itemgetter
from typing import Annotated, Literal, TypeGuard

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from interp.core.axes import shape_text
from interp.core.boundary import public
from interp.core.fitting import MOST
from interp.core.hints import Required
from interp.core.transfers import to_device, to_host
from interp.core.viewer import Brief
from interp.core.wording import value_text
from interp.data.ids import IDS, Encoding, check_contrast, is_id, is_row, no_ids
from interp.model.attention import Memory
from interp.model.layout import Layout, PerRow, Places, TextTokens, several
from interp.model.transformer import ID_TYPES

Side = Literal["left", "right"]


@public(unchecked=("tokens",))
@dataclass(frozen=True, eq=False, repr=False)
class Batch(Brief):
    """Token rows `[b p]` and the mask of the real ones: the form of prompts that a model runs on.

    Every function takes texts too and makes the batch itself.
    """

    tokens: Int[Tensor, "b p"]
    keep: Bool[Tensor, "b p"] | None = None
    """True at real tokens; None: no padding anywhere."""
    bos: bool = False
    """Whether a beginning-of-sequence token was prepended to every row."""
    answer: Int[Tensor, "b"] | None = None
    """The token that each row should be followed by, where a question has one."""
    wrong: Int[Tensor, "b"] | None = None
    """The token that the answer is contrasted with."""
    documents: Int[Tensor, "b p"] | None = None
    """The text that each column belongs to, in packed rows (-1 at padding); None: one text per row."""
    types: Int[Tensor, "b p"] | None = None
    """Token types, for models that have them; None: 0 everywhere."""
    memory: Memory | None = None
    """States that cross-attention reads, for the decoder of an encoder-decoder."""
    row: Int[Tensor, "n"] | None = None
    """Number of the prompt of each row, however often rows were split, repeated or reordered; None: not numbered.

    In packed rows one entry per text: `documents` holds places in `row`.
    """
    corrupt: Int[Tensor, "b p"] | None = None
    """The corrupted prompt of each row, aligned with it token for token, where a question compares two."""
    forced: Int[Tensor, "b"] | None = None
    """Number of each row's last tokens that belong to its answer already (teacher forcing).

    An answer of several tokens is these and `answer`. None: answers are of one token.
    """

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, Tensor):
            raise ValueError(
                f"tokens must be ids in a Tensor, shape [batch, pos], got {value_text(self.tokens)}"
            )
        if self.tokens.ndim != 2 or self.tokens.is_floating_point() or self.tokens.numel() == 0:
            raise ValueError(
                "a batch requires at least one token id, shape [batch, pos], "
                f"got {self.tokens.dtype} of shape {shape_text(self.tokens.shape)}"
            )
        if self.tokens.dtype == torch.bool:
            raise ValueError("token ids are required, got a mask of booleans")
        if self.tokens.dtype not in ID_TYPES:  # no embedding takes other whole numbers
            object.__setattr__(self, "tokens", self.tokens.long())
        for name in ("keep", "documents", "types", "corrupt"):
            given, wanted = getattr(self, name), self.tokens.shape
            if given is not None and given.shape != wanted:
                raise ValueError(
                    f"{name} must have the tokens' shape {shape_text(wanted)}, got {shape_text(given.shape)}"
                )

    @classmethod
    @public(unchecked=("rows",))
    def of(
        cls, rows: Sequence[Sequence[int]], *, pad_id: int = 0, side: Side = "right", bos: bool = False
    ) -> Batch:
        """Rows of any lengths, padded to the longest; `keep` is None when they are all equally long."""
        lengths = [len(row) for row in rows]
        if not rows or min(lengths) == 0:
            raise ValueError(f"every prompt requires at least one token, got lengths {lengths}")
        width, row_lengths = max(lengths), np.array(lengths)[:, None]
        places = np.arange(width)
        real = places < row_lengths if side == "right" else places >= width - row_lengths
        tokens = np.full((len(rows), width), pad_id, np.int64)
        tokens[real] = np.fromiter(chain.from_iterable(rows), np.int64, sum(lengths))
        keep = None if min(lengths) == width else torch.from_numpy(real)
        return cls(torch.from_numpy(tokens), keep, bos)

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

        Longest first, each into the first row with room (first fit decreasing). Every number of a packed text equals
        that of the text alone.

        Args:
            row: number of each text; None: counted.

        Raises:
            ValueError: an empty text, or one longer than `width`.
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
        is_real, text, place = self.real, self.text_numbers, self.places
        found = values.new_full(
            (int(text.max()) + 1, int(place[is_real].max()) + 1, *values.shape[2:]), nothing
        )
        found[text[is_real], place[is_real]] = kept[is_real]
        return found

    @property
    def text_numbers(self) -> Int[Tensor, "b p"]:
        """The number of the text that each column belongs to, in the order of `identities`; -1 at padding."""
        return self.layout.texts(self.real)

    @property
    def places(self) -> Int[Tensor, "b p"]:
        """Number of tokens before each one in its text."""
        return self.layout.positions(self.tokens.shape[1], 0, self.tokens.device).expand_as(self.tokens)

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def lengths(self) -> Int[Tensor, "b"]:
        """Number of real tokens of each row."""
        if self.keep is None:
            return torch.full((len(self),), self.tokens.shape[1], device=self.tokens.device)
        return self.keep.sum(1)

    @property
    def real(self) -> Bool[Tensor, "b p"]:
        """True at every real token: `keep`, written out where there is no padding."""
        return torch.ones_like(self.tokens, dtype=torch.bool) if self.keep is None else self.keep

    @property
    def token_ids(self) -> Int[Tensor, "b p"]:
        """The tokens, -1 at padding, for the coordinate of results about positions (`Text.token_words`)."""
        return self.tokens if self.keep is None else self.tokens.masked_fill(~self.keep, -1)

    def last(self) -> Int[Tensor, "b"]:
        """Column of the last real token of each row; ValueError for packed rows, which have several."""
        self._one_text_per_row("the last token")
        n = self.tokens.shape[1]
        if self.keep is None:
            return torch.full((len(self),), n - 1, device=self.tokens.device)
        return n - 1 - self.keep.flip(1).int().argmax(1)

    def prompt_ends(self) -> Int[Tensor, "b"]:
        """Column of the last token of each row that is not forced, where its answer begins to be predicted."""
        return self.last() if self.forced is None else self.last() - self.forced

    def answer_columns(self) -> Int[Tensor, "b k"]:
        """The columns in which the tokens of each row's answer are predicted, from the prompt's end to the row's last.

        The last one stands for those that a shorter answer lacks (`answer_tokens` says which).
        """
        if self.forced is None:
            return self.last()[:, None]
        forced = self.host().forced  # on the host, which is asked for sizes
        longest = 0 if forced is None else int(forced.max())
        last, steps = self.last(), torch.arange(longest + 1, device=self.tokens.device)
        return (self.prompt_ends()[:, None] + steps).minimum(last[:, None])

    def answer_tokens(self) -> tuple[Int[Tensor, "b k"], Bool[Tensor, "b k"]]:
        """The tokens of each row's answer, one for each of `answer_columns`, and which of them there are.

        Raises:
            ValueError: rows without answers.
        """
        if self.answer is None:
            raise ValueError("answers are required, got rows without")
        answer = self.answer.to(self.tokens.device)
        if self.forced is None:
            return answer[:, None], torch.ones_like(answer, dtype=torch.bool)[:, None]
        columns = self.answer_columns()
        steps = torch.arange(columns.shape[1], device=columns.device)
        present, final = steps <= self.forced[:, None], steps == self.forced[:, None]
        following = self.tokens.gather(1, (columns + 1).clamp_max(self.tokens.shape[1] - 1))
        return torch.where(final, answer[:, None], following).where(present, answer[:, None]), present

    def followed_by(self, tokens: Int[Tensor, "b f"]) -> Batch:
        """The batch with each row followed by the first tokens of its answer; padding on the right.

        Corrupted prompts are followed by the same tokens.

        Args:
            tokens: the tokens of each row's answer, -1 where a row has fewer.

        Raises:
            ValueError: packed rows.
        """
        self._one_text_per_row("an answer of several tokens")
        batch, counts = self.right_aligned(), (tokens >= 0).sum(1)
        width = int((batch.lengths + counts).max())
        steps = torch.arange(width, device=tokens.device)
        place = steps - batch.lengths[:, None]
        mine = (place >= 0) & (place < counts[:, None])
        new_tokens = tokens.gather(1, place.clamp(0, tokens.shape[1] - 1))
        grown = batch._columns(lambda x: F.pad(x, (0, max(0, width - x.shape[1])))[:, :width])
        keep = mine | (grown.real & (steps < batch.lengths[:, None]))
        return replace(
            grown,
            tokens=new_tokens.where(mine, grown.tokens),
            corrupt=None if grown.corrupt is None else new_tokens.where(mine, grown.corrupt),
            keep=None if bool(keep.all()) else keep,
            forced=counts,
        )

    @property
    def prompt_tokens(self) -> Bool[Tensor, "b p"]:
        """True at every real token that is not forced."""
        if self.forced is None:
            return self.real
        return self.real & (self.places < (self.lengths - self.forced)[:, None])

    def to(self, device: torch.device) -> Batch:
        """The batch on another device; the numbers of its rows stay on the host, where they are used."""
        if self.tokens.device == device:
            return self
        found = self._each(lambda x: to_device(x, device), lambda row: row)
        known: Batch | None = self if self.tokens.is_cpu else vars(self).get("_host")
        return found if known is None or found.tokens.is_cpu else found._with_host(known)

    def host(self) -> Batch:
        """The batch on the host: the one that it was made of, or fetched in one copy.

        Decisions by tokens, lengths or padding are made there, so that nothing waits for a device.
        """
        known: Batch | None = vars(self).get("_host")
        if known is not None or self.tokens.is_cpu:
            return self if known is None else known
        names = ("tokens", "keep", "answer", "wrong", "forced", "documents", "types", "corrupt")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        memory = self.memory and Memory(
            self.memory.states.cpu(), None if self.memory.keep is None else self.memory.keep.cpu()
        )
        on_host = to_host(given)
        tokens, keep, answer, wrong, forced, documents, types, corrupt = (on_host.get(name) for name in names)
        assert tokens is not None
        found = Batch(
            tokens, keep, self.bos, answer, wrong, documents, types, memory, self.row, corrupt, forced,
        )  # fmt: skip
        self._with_host(found)
        return found

    def _with_host(self, host: Batch) -> Batch:
        """The batch with its known copy on the host."""
        object.__setattr__(self, "_host", host)
        return self

    def pinned(self) -> Batch:
        """The batch in pinned memory, from which it can be copied to a GPU while that computes; itself on a device.

        Raises:
            RuntimeError: without an accelerator.
        """
        pinned = partial(self._each, lambda x: x.pin_memory() if x.is_cpu else x, lambda row: row)
        return pinned() if self.tokens.is_cpu else self

    def split(self, size: int) -> Iterator[Batch]:
        """Consecutive parts of at most `size` rows, of the same width: itself if one will do. ValueError for none."""
        if size < 1:
            raise ValueError(f"parts of at least one row are required, got {size}")
        starts = range(0, len(self), size)
        for start in starts:
            yield self if len(starts) == 1 else self._each(itemgetter(slice(start, start + size)))

    def rows(self, index: Int[Tensor, "n"]) -> Batch:
        """The batch of some rows in this order, one several times if need be; of the same width."""
        on_device = to_device(index, self.tokens.device)
        found = self._each(lambda x: x[on_device.to(x.device)], lambda row: row[index.to(row.device)])
        known: Batch | None = vars(self).get("_host")
        return found if known is None or not index.is_cpu else found._with_host(known.rows(index))

    def trimmed(self) -> Batch:
        """The batch without the last columns that are padding in all rows."""
        if self.keep is None:
            return self
        width = int(self.keep.any(0).nonzero()[-1]) + 1
        found = self._columns(itemgetter((slice(None), slice(width))))
        return replace(found, keep=None) if bool(found.real.all()) else found

    def numbered(self) -> Batch:
        """The batch with its rows (the texts of packed rows) numbered, if they are not."""
        if self.row is not None:
            return self
        count = len(self) if self.documents is None else int(self.documents.max()) + 1
        return replace(self, row=torch.arange(count))

    def identities(self) -> Int[Tensor, "n"] | None:
        """Number of the prompt of each row; in packed rows of each text, in the order in which they stand there."""
        if self.row is None or self.documents is None:
            return self.row
        flat = self.documents.flatten()
        starts = torch.ones_like(flat, dtype=torch.bool)
        starts[1:] = flat[1:] != flat[:-1]
        starts[:: self.documents.shape[1]] = True
        return self.row.to(flat.device)[flat[starts & (flat >= 0)]]

    def pair(self) -> tuple[Batch, Batch]:
        """The rows and their corrupted prompts, each as a batch of its own, both with the answers.

        Raises:
            ValueError: a batch without corrupted prompts.
        """
        if self.corrupt is None:
            raise ValueError("this question compares two prompts: corrupted prompts are required, got none")
        own, other = replace(self, corrupt=None), replace(self, tokens=self.corrupt, corrupt=None)
        known: Batch | None = vars(self).get("_host")
        if known is None:
            return own, other
        return tuple(each._with_host(host) for each, host in zip((own, other), known.pair(), strict=True))  # type: ignore[return-value]

    def with_answers(self, answer: Int[Tensor, "b"], wrong: Int[Tensor, "b"] | None) -> Batch:
        """The batch with answers and wrong answers; on the host, ValueError where both of a row are one token."""
        if wrong is not None and answer.is_cpu and wrong.is_cpu:  # others were checked on the host
            check_contrast(answer, wrong, self.row)
        return replace(self, answer=answer, wrong=wrong)

    def left_aligned(self) -> Batch:
        """The batch with all padding moved to the left, so that every row ends in the last column."""
        self._one_text_per_row("alignment")
        if self.keep is None:
            return self
        if (host := vars(self).get("_host")) is not None:
            aligned: Batch = host.left_aligned().to(self.tokens.device)
            return aligned
        order = self.keep.int().argsort(dim=1, stable=True)
        return self._columns(lambda x: x.gather(1, order))

    def right_aligned(self) -> Batch:
        """The batch with all padding moved to the right, so that the column of every token is its position.

        Packed rows stay as they are.
        """
        if (
            self.keep is None
            or self.documents is not None
            or bool((self.keep[:, 1:] <= self.keep[:, :-1]).all())
        ):
            return self
        order = (~self.keep).int().argsort(dim=1, stable=True)
        return self._columns(lambda x: x.gather(1, order))

    @property
    def layout(self) -> Layout:
        """Layout of the rows, in the form that a pass takes."""
        numbers = self.row if self.documents is None else None
        return Layout(self.keep, self.documents, numbers=numbers, forced=self.forced)

    def tokens_at(self, pos: Places) -> TextTokens:
        """The tokens of every row (in packed rows: of every text) at one position, at several, or at one of its own.

        One for each row (`PerRow`) is one for each prompt, by the numbers of the rows. What is returned is on the host.

        Raises:
            PositionError: (an IndexError and ValueError) for a row that is too short, naming it.
        """
        on_host, positions = self.host(), several(pos)
        numbers = on_host.identities()
        if isinstance(positions, PerRow) and numbers is not None:
            positions = positions.of(numbers.tolist())
        rows, columns = on_host.tokens.shape
        return on_host.layout.find(positions, (rows, columns))

    def _one_text_per_row(self, what: str) -> None:
        if self.documents is not None:
            raise ValueError(f"{what} requires one text per row, this batch is packed")

    def _columns(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """The batch with everything that has a value per position changed."""
        keep, documents, types, corrupt = (
            None if x is None else change(x) for x in (self.keep, self.documents, self.types, self.corrupt)
        )
        tokens = change(self.tokens)
        return replace(self, tokens=tokens, keep=keep, documents=documents, types=types, corrupt=corrupt)

    def _each(
        self, change: Callable[[Tensor], Tensor], numbers: Callable[[Tensor], Tensor] | None = None
    ) -> Batch:
        """The batch with everything changed; numbers: the change of its rows' numbers, if it is another one."""

        def changed(x: Tensor | None) -> Tensor | None:
            return None if x is None else change(x)

        memory = self.memory
        if memory is not None:
            memory = Memory(change(memory.states), changed(memory.keep))
        row = self.row
        if row is not None and self.documents is None:
            row = (numbers or change)(row)
        return Batch(
            change(self.tokens), changed(self.keep), self.bos, changed(self.answer), changed(self.wrong),
            changed(self.documents), changed(self.types), memory, row, changed(self.corrupt), changed(self.forced),
        )  # fmt: skip


def counted(batches: Iterable[Batch]) -> Iterator[Batch]:
    """The batches, with rows without numbers numbered on from the batches before."""
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
        if batch.answer is not None and batch.wrong is not None:
            check_contrast(batch.answer.cpu(), batch.wrong.cpu(), batch.row)
        yield batch


def no_prompts(value: object) -> str | None:
    """None for prompts in memory; else advice on how to write what was meant, "" where nothing is close."""
    if isinstance(value, str | Batch):
        return None
    if isinstance(value, Tensor | np.ndarray):
        return no_ids(value, (1, 2))
    if isinstance(value, Mapping):
        return None if IDS in value else f": a mapping requires {IDS!r}, as a tokenizer returns it"
    if isinstance(value, bytes | bytearray):
        return ": a text is a str, .decode() makes one"
    if hasattr(value, "iloc"):
        return ": of a table one column is required, as a list"
    if not isinstance(value, list | tuple):
        return ""
    items = value[:MOST]
    return None if is_prompts(items) or not items else ""


def _no_answers(value: object) -> str | None:
    """None for possible answers; else advice on how to write what was meant, "" where nothing is close."""
    if isinstance(value, Tensor):
        return no_ids(value, (0, 1, 2))
    if isinstance(value, np.ndarray):
        return None if value.dtype.kind in "US" and value.ndim == 1 else no_ids(value, (0, 1, 2))
    every = list(islice(value, MOST)) if isinstance(value, list | tuple) else [value]
    return None if all(isinstance(each, str) or is_id(each) or is_row(each) for each in every) else ""


Prompts = Annotated[
    str
    | Sequence[str]
    | Sequence[int]
    | Sequence[Sequence[int]]
    | Sequence[np.ndarray | Tensor]
    | np.ndarray
    | Tensor
    | Mapping[str, object]
    | Batch,
    Required(
        "a text, texts, token ids [pos] or [prompt, pos], what a tokenizer returns, or a Batch", no_prompts
    ),
]
"""Prompts that every analysis accepts.

A text, texts, token ids `[pos]` or `[batch, pos]` (or lists of any length), the result of a tokenizer of transformers
(`encoded`), a batch.
"""
Answers = Annotated[
    str | int | np.integer | Sequence[str | int | np.integer | Tensor | Sequence[int]] | np.ndarray | Tensor,
    Required("a text or an id, one for all prompts or one for each", _no_answers),
]
"""Next tokens: one answer for all prompts or one for each, as texts or as ids.

Metrics take answers of several tokens too, texts or `[(3, 4)]`; where one token is required, an error says so.
"""


def is_prompts(data: object) -> TypeGuard[Prompts]:
    """Whether data are prompts in memory: texts, token ids or a batch, and not files or an iterator."""
    if isinstance(data, str | Tensor | np.ndarray | Batch):
        return True
    if isinstance(data, Mapping):
        return IDS in data
    if not isinstance(data, list | tuple):
        return False
    return all(isinstance(each, str) for each in data) or is_row(data) or all(map(is_row, data))


def encoded(given: Mapping[str, object], *, side: Side = "right") -> Batch:
    """The batch of a result of a transformers tokenizer: `attention_mask` becomes `keep`, nothing is prepended.

    Rows that are padded stay as they are, on either side; rows of other lengths are padded on `side`.

    Args:
        given: `input_ids`, and where there are such `attention_mask` and `token_type_ids`; tensors, arrays or lists,
            `[pos]` or `[prompt, pos]`.
        side: where rows of other lengths are padded.

    Raises:
        ValueError: other keys; a mask of another shape, of other numbers than 0 and 1, without a real token, or with
            padding between real tokens, which transformers would count as a position and a batch does not.

    Example:
        >>> encoded({"input_ids": [[5, 6], [7, 0]], "attention_mask": [[1, 1], [1, 0]]}).keep.tolist()
        [[True, True], [True, False]]
    """
    found = Encoding.read(given)
    padded = len(set(map(len, found.ids))) == 1
    if not padded:
        found = found.real()
    batch = Batch.of(found.ids, side=side)
    if padded and not all(map(all, found.mask)):
        batch = replace(batch, keep=torch.tensor(found.mask) == 1)
    if found.types is not None:
        batch = replace(batch, types=Batch.of(found.types, side=side).tokens)
    return batch
