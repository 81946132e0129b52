"""A batch of token rows with an explicit padding mask; padding is never inferred from token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from operator import itemgetter
from typing import Annotated, Literal, TypedDict, TypeGuard

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from interp.core.axes import shape_text
from interp.core.boundary import public
from interp.core.fitting import MOST
from interp.core.hints import Required
from interp.core.kinds import PositiveCount
from interp.core.transfers import to_device, to_host
from interp.core.viewer import Brief
from interp.core.wording import odd_value, value_text
from interp.data.chats import Chat, is_chats, role_positions, role_words
from interp.data.ids import IDS, Encoding, check_contrast, is_id, is_row, no_ids
from interp.data.spellings import Spellings
from interp.model.attention import Memory
from interp.model.layout import ByRole, Layout, PerRow, Places, TextTokens, several
from interp.model.loss import predicted

Side = Literal["left", "right"]


@dataclass(frozen=True, eq=False)
class Choices:
    """Several continuations of each row whose probabilities are summed or compared: spellings, and wrong answers."""

    tokens: Int[Tensor, "b a k"]
    """The tokens of each continuation, -1 after its last one and where a row has fewer continuations."""
    steps: Int[Tensor, "b a k"]
    """Columns from the prompt's last one to that whose logits predict each token; 0 where there is no token."""
    wrong: Bool[Tensor, "b a"]
    """True at continuations of the wrong answer."""

    def each(self, change: Callable[[Tensor], Tensor]) -> Choices:
        """The choices with `change` applied to every tensor."""
        return Choices(change(self.tokens), change(self.steps), change(self.wrong))


class PassInputs(TypedDict):
    """The arguments of a pass that say how its tokens are to be read; each None where there is nothing to say."""

    keep: Tensor | None
    documents: Tensor | None
    types: Tensor | None
    memory: Memory | None
    branches: Tensor | None


@public(unchecked=("tokens",))
@dataclass(frozen=True, eq=False, repr=False)
class Batch(Brief):
    """Token ids `[b p]` and the mask of real tokens (not padding): the form of prompts that a model runs on.

    Every function takes texts too and makes the batch itself.
    """

    tokens: Int[Tensor, "b p"]
    keep: Bool[Tensor, "b p"] | None = None
    """True at real tokens; None: no padding anywhere."""
    bos: bool = False
    """Whether a beginning-of-sequence token was prepended to every row."""
    answer: Int[Tensor, "b"] | None = None
    """The right next token of each row; None where there are no answers."""
    wrong: Int[Tensor, "b"] | None = None
    """The token that the answer is contrasted with."""
    documents: Int[Tensor, "b p"] | None = None
    """In packed rows: index of the text that each column belongs to (-1 at padding); None: one text per row."""
    types: Int[Tensor, "b p"] | None = None
    """Token types, for models that have them; None: 0 everywhere."""
    memory: Memory | None = None
    """Encoder states that cross-attention reads, in an encoder-decoder."""
    row: Int[Tensor, "n"] | None = None
    """Index of each row's prompt in the data, unchanged when rows are split, repeated or reordered; None: not numbered.

    In packed rows it has one entry per text, and `documents` holds indices into `row`.
    """
    corrupt: Int[Tensor, "b p"] | None = None
    """The corrupted prompt of each row, aligned with it token for token; None where there are none."""
    forced: Int[Tensor, "b"] | None = None
    """Number of tokens at the end of each row that are the beginning of its answer (teacher forcing).

    The answer is these tokens and then `answer`. None: answers are of one token.
    """
    turns: Int[Tensor, "b p"] | None = None
    """In chats: the message and role that each token belongs to, as a code (`data.chats.code_of`), 0 for the marks of
    the chat template, and -1 in a whole row where it is unknown. `positions` and `roles` read it. None: not chats.
    """
    choices: Choices | None = None
    """The continuations of each row that a metric compares or takes together (`answer` is the last token of the first);
    None: one answer.
    """
    branches: Int[Tensor, "b p"] | None = None
    """The continuation (1, 2, ...) that each column of a row belongs to, which sees itself and the columns of 0 alone.
    None: no row holds several.
    """

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, Tensor) or self.tokens.layout is not torch.strided:
            raise ValueError(
                f"tokens must be ids in a Tensor, shape [batch, pos], got {value_text(self.tokens)}"
            )
        whole = not self.tokens.is_floating_point() and not self.tokens.is_complex()
        if self.tokens.ndim != 2 or not whole or self.tokens.numel() == 0:
            raise ValueError(
                "a batch requires at least one token id, shape [batch, pos], "
                f"got {self.tokens.dtype} of shape {shape_text(self.tokens.shape)}"
            )
        if self.tokens.dtype == torch.bool:
            raise ValueError("token ids are required, got a mask of booleans")
        for name in (
            "tokens", "answer", "wrong", "documents", "types", "row", "corrupt", "forced", "turns", "branches",
        ):  # fmt: skip
            values = getattr(self, name)
            if (
                values is not None and values.dtype != torch.int64
            ):  # the one kind that embeddings and losses take
                object.__setattr__(self, name, values.long())
        for name in ("keep", "documents", "types", "corrupt", "turns", "branches"):
            values, shape = getattr(self, name), self.tokens.shape
            if values is not None and values.shape != shape:
                raise ValueError(
                    f"{name} must have the tokens' shape {shape_text(shape)}, got {shape_text(values.shape)}"
                )

    @property
    def inputs(self) -> PassInputs:
        """What goes with the tokens into a pass, as keyword arguments of `Transformer.forward`."""
        return {
            "keep": self.keep, "documents": self.documents, "types": self.types, "memory": self.memory,
            "branches": self.branches,
        }  # fmt: skip

    @property
    def predicted(self) -> Bool[Tensor, "b n"] | None:
        """Which of the tokens from the second on are predicted by the tokens of their text before them; None: all.

        Raises:
            ValueError: rows of several continuations, whose first tokens all follow the same column.
        """
        self.require_one_continuation("a next-token loss")
        return predicted(self.keep, self.documents)

    def require_one_continuation(self, what: str) -> None:
        """ValueError for `what` where rows hold several continuations of their prompt (`branches`)."""
        if self.branches is not None:
            raise ValueError(
                f"{what} requires rows of one continuation, got rows with several (branches): give each continuation a "
                "row of its own"
            )

    def require_one_text(self, what: str) -> None:
        """ValueError for `what` where rows hold several texts one after the other (`documents`)."""
        if self.documents is not None:
            raise ValueError(
                f"{what} requires one text per row, this batch is packed: give each text a row of its own"
            )

    @classmethod
    @public(unchecked=("rows",))
    def of(
        cls, rows: Sequence[Sequence[int]], *, pad_id: int = 0, side: Side = "right", bos: bool = False
    ) -> Batch:
        """Rows of any lengths, padded to the longest; `keep` is None when they are all equally long."""
        lengths = _lengths_of(rows)
        if not rows or min(lengths) == 0:
            raise ValueError(f"every prompt requires at least one token, got lengths {lengths}")
        width, row_lengths = max(lengths), np.array(lengths)[:, None]
        places = np.arange(width)
        real = places < row_lengths if side == "right" else places >= width - row_lengths
        tokens = np.full((len(rows), width), pad_id, np.int64)
        tokens[real] = _flat_ids(rows, sum(lengths))
        keep = None if min(lengths) == width else torch.from_numpy(real)
        return cls(torch.from_numpy(tokens), keep, bos)

    @classmethod
    @public(unchecked=("texts",))
    def packed(
        cls,
        texts: Sequence[Sequence[int]],
        width: PositiveCount,
        *,
        pad_id: int = 0,
        row: Int[Tensor, "n"] | None = None,
    ) -> Batch:
        """Several texts per row of `width` columns, each attending only to itself; `documents` says which is where.

        Longest first, each into the first row with room (first fit decreasing). Every value computed for a packed text
        equals that for the text alone.

        Args:
            row: number of each text; None: counted.

        Raises:
            ValueError: an empty text, or one longer than `width`.
        """
        lengths = _lengths_of(texts)
        if not texts or min(lengths) == 0 or max(lengths) > width:
            raise ValueError(f"texts of 1 to {width} tokens are required, got lengths {lengths}")
        rows: list[list[int]] = []
        for i in sorted(range(len(texts)), key=lambda i: -lengths[i]):
            fitting = (members for members in rows if sum(lengths[j] for j in members) + lengths[i] <= width)
            place = next(fitting, None)
            rows.append([i]) if place is None else place.append(i)
        ids = torch.from_numpy(_flat_ids(texts, sum(lengths))).split(lengths)
        tokens = torch.full((len(rows), width), pad_id, device="cpu")
        documents = torch.full((len(rows), width), -1, device="cpu")
        for r, members in enumerate(rows):
            joined = torch.cat([ids[i] for i in members])
            tokens[r, : len(joined)] = joined
            documents[r, : len(joined)] = torch.tensor([i for i in members for _ in texts[i]], device="cpu")
        keep = documents >= 0
        return cls(tokens, None if bool(keep.all()) else keep, documents=documents, row=row)

    @public(unchecked=("values",))
    def unpack(self, values: Shaped[Tensor, "b p ..."]) -> list[Shaped[Tensor, "n ..."]]:
        """Per-position values `[b p ...]` of a packed batch as one tensor `[n ...]` per text, in the texts' order."""
        if self.documents is None:
            raise ValueError("this batch is not packed: it has one text per row")
        self._check_places("values", values)
        count = int(self.documents.max()) + 1
        return [values[self.documents == i] for i in range(count)]

    def _check_places(self, what: str, values: Tensor) -> None:
        """ValueError for values that are not per position of this batch."""
        if not isinstance(values, Tensor) or odd_value(values) or values.shape[:2] != self.tokens.shape:
            raise ValueError(
                f"{what} must be a tensor that begins with the tokens' shape {shape_text(self.tokens.shape)}, got "
                f"{value_text(values)}"
            )

    @public(unchecked=("values", "real"))
    def by_text(
        self, values: Shaped[Tensor, "b p ..."], real: Bool[Tensor, "b p"], nothing: float | int | bool
    ) -> Shaped[Tensor, "n q ..."]:
        """Per-position values with one row per text, each moved to column 0, in the order of `identities`.

        The value is `nothing` where `real` is False, and after the end of a text.
        """
        self._check_places("values", values)
        self._check_places("real", real)
        if real.dtype is not torch.bool:
            raise ValueError(f"real must be truths, got {value_text(real)}")
        masked = torch.where(real.view(*real.shape, *[1] * (values.ndim - 2)), values, nothing)
        if self.keep is None and self.documents is None:
            return masked
        is_real, text, place = self.real, self.text_numbers, self.places
        by_row = masked.new_full(
            (int(text.max()) + 1, int(place[is_real].max()) + 1, *values.shape[2:]), nothing
        )
        by_row[text[is_real], place[is_real]] = masked[is_real]
        return by_row

    @property
    def text_numbers(self) -> Int[Tensor, "b p"]:
        """Index of the text that each column belongs to, in the order of `identities`; -1 at padding."""
        return self.layout.texts(self.real)

    @property
    def places(self) -> Int[Tensor, "b p"]:
        """Position of each token in its own text, from 0; continuations follow each other."""
        layout = replace(self.layout, branches=None)
        return layout.positions(self.tokens.shape[1], 0, self.tokens.device).expand_as(self.tokens)

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
        """True at every real token: `keep`, or a mask of True where there is no padding."""
        return torch.ones_like(self.tokens, dtype=torch.bool) if self.keep is None else self.keep

    @property
    def token_ids(self) -> Int[Tensor, "b p"]:
        """The token ids with -1 at padding, for the `token` coordinate of results by position (`Text.token_words`)."""
        return self.tokens if self.keep is None else self.tokens.masked_fill(~self.keep, -1)

    def last(self) -> Int[Tensor, "b"]:
        """Column of the last real token of each row; ValueError for packed rows, which have several."""
        self.require_one_text("the last token")
        n = self.tokens.shape[1]
        if self.keep is None:
            return torch.full((len(self),), n - 1, device=self.tokens.device)
        return n - 1 - self.keep.flip(1).int().argmax(1)

    def prompt_ends(self) -> Int[Tensor, "b"]:
        """Column of the last prompt token of each row, whose logits predict the first token of the answer."""
        return self.last() if self.forced is None else self.last() - self.forced

    def answer_columns(self) -> Int[Tensor, "b k"]:
        """The columns whose logits predict the tokens of each row's answer, from the prompt's end to the row's last.

        Rows with shorter answers repeat their last column (`answer_tokens` says which entries are real).
        """
        if self.forced is None:
            return self.last()[:, None]
        forced = self.host().forced  # on the host, which is asked for sizes
        longest = 0 if forced is None else int(forced.max())
        last, steps = self.last(), torch.arange(longest + 1, device=self.tokens.device)
        return (self.prompt_ends()[:, None] + steps).minimum(last[:, None])

    def answer_tokens(self) -> tuple[Int[Tensor, "b k"], Bool[Tensor, "b k"]]:
        """The tokens of each row's answer, one for each of `answer_columns`, and a mask of the real entries.

        Raises:
            ValueError: rows without answers.
        """
        if self.answer is None:
            raise ValueError("answers are required, got rows without")
        if self.choices is not None:
            raise ValueError(
                "one answer per prompt is required here, got several spellings, or answers to compare"
            )
        answer = self.answer.to(self.tokens.device)
        if self.forced is None:
            return answer[:, None], torch.ones_like(answer, dtype=torch.bool)[:, None]
        columns = self.answer_columns()
        steps = torch.arange(columns.shape[1], device=columns.device)
        present, final = steps <= self.forced[:, None], steps == self.forced[:, None]
        following = self.tokens.gather(1, (columns + 1).clamp_max(self.tokens.shape[1] - 1))
        return torch.where(final, answer[:, None], following).where(present, answer[:, None]), present

    def is_answer(self, said: Int[Tensor, "b k"]) -> Bool[Tensor, "b k"]:
        """Whether tokens said at `answer_columns` are those of each row's answer; True after an answer's last one."""
        tokens, present = self.answer_tokens()
        return (said == tokens) | ~present

    def by_answer_token(self) -> Batch:
        """One row for each token of each row's answer: the prompt and the answer's tokens before it, which it answers.

        The rows of a prompt follow each other. Where its answer has fewer tokens than others, the last one is repeated.
        """
        tokens, _ = self.answer_tokens()
        device, count = tokens.device, tokens.shape[1]
        rows = self.rows(torch.arange(len(self), device="cpu").repeat_interleave(count))
        steps = torch.arange(count, device=device).repeat(len(self))
        before = steps if rows.forced is None else steps.minimum(rows.forced)
        asked = 0 if rows.forced is None else rows.forced
        keep = rows.real & (rows.places < (rows.lengths - asked + before)[:, None])
        answer = tokens.gather(1, before.view_as(tokens)).flatten()
        return replace(rows, keep=None if bool(keep.all()) else keep, forced=before, answer=answer)

    def followed_by(self, tokens: Int[Tensor, "b f"], branches: Int[Tensor, "b f"] | None = None) -> Batch:
        """The batch with the first tokens of its answer appended to each row (`forced`); padding on the right.

        The same tokens are appended to corrupted prompts.

        Args:
            tokens: the tokens to append to each row, -1 where a row has fewer.
            branches: the continuation that each of them belongs to, 0 for all (`Batch.branches`); None: one.

        Raises:
            ValueError: packed rows.
        """
        self.require_one_text("an answer of several tokens")
        batch, counts = self.right_aligned(), (tokens >= 0).sum(1)
        width = int((batch.lengths + counts).max())
        steps = torch.arange(width, device=tokens.device)
        place = steps - batch.lengths[:, None]
        mine = (place >= 0) & (place < counts[:, None])
        new_tokens = tokens.gather(1, place.clamp(0, tokens.shape[1] - 1))
        grown = batch._columns(lambda x: F.pad(x, (0, max(0, width - x.shape[1])))[:, :width])
        keep = mine | (grown.real & (steps < batch.lengths[:, None]))
        if branches is not None:
            branches = branches.gather(1, place.clamp(0, tokens.shape[1] - 1)) * mine
        return replace(
            grown,
            branches=branches,
            tokens=new_tokens.where(mine, grown.tokens),
            corrupt=None if grown.corrupt is None else new_tokens.where(mine, grown.corrupt),
            keep=None if bool(keep.all()) else keep,
            forced=counts,
        )

    @property
    def prompt_tokens(self) -> Bool[Tensor, "b p"]:
        """True at every token of the prompt: real, and not one of the answer's (`forced`)."""
        if self.forced is None:
            return self.real
        return self.real & (self.places < (self.lengths - self.forced)[:, None])

    def to(self, device: torch.device) -> Batch:
        """The batch on another device; `row` stays on the CPU, where it is used."""
        if self.tokens.device == device:
            return self
        moved = self._each(lambda x: to_device(x, device), lambda row: row)
        known: Batch | None = self if self.tokens.is_cpu else vars(self).get("_host")
        return moved if known is None or moved.tokens.is_cpu else moved._with_host(known)

    def host(self) -> Batch:
        """The batch on the CPU: the batch that `to` moved to the device, or else one copy from the device.

        Code that branches on tokens, lengths or padding reads this batch, so that it does not wait for the device.
        """
        known: Batch | None = vars(self).get("_host")
        if known is not None or self.tokens.is_cpu:
            return self if known is None else known
        names = (
            "tokens", "keep", "answer", "wrong", "forced", "documents", "types", "corrupt", "turns", "branches",
        )  # fmt: skip
        tensors = {name: value for name in names if (value := getattr(self, name)) is not None}
        memory = self.memory and Memory(
            self.memory.states.cpu(), None if self.memory.keep is None else self.memory.keep.cpu()
        )
        on_host = to_host(tensors)
        tokens, keep, answer, wrong, forced, documents, types, corrupt, turns, branches = map(
            on_host.get, names
        )
        choices = self.choices and self.choices.each(Tensor.cpu)
        assert tokens is not None
        host_batch = Batch(
            tokens, keep, self.bos, answer, wrong, documents, types, memory, self.row, corrupt, forced, turns,
            choices, branches,
        )  # fmt: skip
        self._with_host(host_batch)
        return host_batch

    def _with_host(self, host: Batch) -> Batch:
        """The batch, which now holds `host` as its copy on the CPU."""
        object.__setattr__(self, "_host", host)
        return self

    def pinned(self) -> Batch:
        """The batch in pinned memory, from which it is copied to a GPU that is computing; itself if it is on a device.

        Raises:
            RuntimeError: without an accelerator.
        """
        pinned = partial(self._each, lambda x: x.pin_memory() if x.is_cpu else x, lambda row: row)
        return pinned() if self.tokens.is_cpu else self

    @public()
    def split(self, size: int) -> Iterator[Batch]:
        """Consecutive parts of at most `size` rows, all of the batch's width; ValueError for a size below 1."""
        if size < 1:
            raise ValueError(f"parts of at least one row are required, got {size}")
        starts = range(0, len(self), size)
        for start in starts:
            yield self if len(starts) == 1 else self._each(itemgetter(slice(start, start + size)))

    @public(unchecked=("index",))
    def rows(self, index: Int[Tensor, "n"]) -> Batch:
        """The batch of the rows `index`, in this order and with repetitions, of the same width.

        Raises:
            IndexError: on the CPU, a row that does not exist.
        """
        n = len(self)
        odd = not isinstance(index, Tensor) or bool(odd_value(index)) or index.ndim != 1
        if odd or index.is_floating_point() or index.is_complex():
            raise ValueError(f"index must be numbers of rows, in a tensor [n], got {value_text(index)}")
        if index.is_cpu and index.numel() and not -n <= int(index.min()) <= int(index.max()) < n:
            raise IndexError(f"index must be rows from 0 to {n - 1}, got {index.tolist()[:20]}")
        on_device = to_device(index, self.tokens.device)
        selected = self._each(lambda x: x[on_device.to(x.device)], lambda row: row[index.to(row.device)])
        known: Batch | None = vars(self).get("_host")
        return selected if known is None or not index.is_cpu else selected._with_host(known.rows(index))

    def trimmed(self) -> Batch:
        """The batch without the last columns that are padding in all rows."""
        if self.keep is None:
            return self
        width = int(self.keep.any(0).nonzero()[-1]) + 1
        cut = self._columns(itemgetter((slice(None), slice(width))))
        return replace(cut, keep=None) if bool(cut.real.all()) else cut

    def numbered(self) -> Batch:
        """The batch with its rows (the texts of packed rows) numbered, if they are not."""
        if self.row is not None:
            return self
        count = len(self) if self.documents is None else int(self.documents.max()) + 1
        return replace(self, row=torch.arange(count, device="cpu"))

    def identities(self) -> Int[Tensor, "n"] | None:
        """Index of the prompt of each row; in packed rows, of each text, row by row from left to right."""
        if self.row is None or self.documents is None:
            return self.row
        flat = self.documents.flatten()
        starts = torch.ones_like(flat, dtype=torch.bool)
        starts[1:] = flat[1:] != flat[:-1]
        starts[:: self.documents.shape[1]] = True
        return self.row.to(flat.device)[flat[starts & (flat >= 0)]]

    def pair(self) -> tuple[Batch, Batch]:
        """The batch of clean prompts and the batch of corrupted prompts, both with the answers.

        Raises:
            ValueError: a batch without corrupted prompts.
        """
        if self.corrupt is None:
            raise ValueError("this question compares two prompts: corrupted prompts are required, got none")
        clean = replace(self, corrupt=None)
        corrupt = replace(self, tokens=self.corrupt, corrupt=None, turns=None)
        known: Batch | None = vars(self).get("_host")
        if known is None:
            return clean, corrupt
        return tuple(
            batch._with_host(host) for batch, host in zip((clean, corrupt), known.pair(), strict=True)
        )  # type: ignore[return-value]

    @public(unchecked=("answer", "wrong"))
    def with_answers(self, answer: Int[Tensor, "b"], wrong: Int[Tensor, "b"] | None) -> Batch:
        """The batch with answers and wrong answers; on the CPU, ValueError where the two of a row are equal."""
        for name, ids in (("answer", answer), ("wrong", wrong)):
            odd = not isinstance(ids, Tensor) and (ids is not None or name == "answer")
            if odd or (isinstance(ids, Tensor) and ids.layout is not torch.strided):
                raise ValueError(
                    f"{name} must be token ids, in a tensor, one for each row, got {value_text(ids)}"
                )
        if wrong is not None and answer.is_cpu and wrong.is_cpu:  # others were checked on the host
            check_contrast(answer, wrong, self.row)
        return replace(self, answer=answer, wrong=wrong)

    def left_aligned(self) -> Batch:
        """The batch with all padding moved to the left, so that every row ends in the last column."""
        self.require_one_text("alignment")
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
        """The layout of the rows (padding, packed texts) in the form that a forward pass takes."""
        numbers = self.row if self.documents is None else None
        return Layout(self.keep, self.documents, numbers=numbers, forced=self.forced, branches=self.branches)

    @public()
    def tokens_at(self, pos: Places) -> TextTokens:
        """The columns of every row (in packed rows: of every text) at the position or positions `pos`.

        `PerRow` gives one position for each prompt, found by the number of the row. The result is on the CPU.

        Raises:
            PositionError: (an IndexError and ValueError) for a row that is too short, naming it.
        """
        on_host, positions = self.host(), several(pos)
        numbers = on_host.identities()
        if isinstance(positions, ByRole):
            positions = self.positions_of(positions)
        elif isinstance(positions, PerRow) and numbers is not None:
            positions = positions.of(numbers.tolist())
        rows, columns = on_host.tokens.shape
        return on_host.layout.find(positions, (rows, columns))

    @public()
    def positions(self, role: str, turn: int | None = None) -> PerRow:
        """The positions of the tokens of a role in chats, as `pos` and `at` take them.

        These are the tokens of the contents of the role's messages, without the marks that the chat template writes
        around them. A token that holds any character of a content belongs to it.

        Args:
            role: "user", "assistant", "system", "developer" or "tool"; "template" for the template's own tokens.
            turn: which of the role's messages, from 0 (of those with tokens), negative from the last; None: all.

        Returns:
            Several positions of each row.

        Raises:
            ValueError: a batch that was not made of chats (`model.to_batch(chat=...)`), an unknown role, a row without
                this role or turn, or one whose template changes what the messages say.

        Example:
            >>> batch = model.to_batch(chat=[{"role": "user", "content": "The cat"}])
            >>> batch.positions("user")
            PerRow([(2, 3)])
            >>> edit = interp.Edit("L1.mlp", interp.edits.Zero(), at={"pos": batch.positions("user", turn=-1)})
        """
        return self.positions_of(ByRole(role, turn))

    def positions_of(self, by: ByRole, rows: Iterable[int] | None = None) -> PerRow:
        """The positions of the tokens of a role in these rows, or in all: `positions` of a role that an edit names."""
        chosen = range(len(self)) if rows is None else rows
        return role_positions([self._codes(row) for row in chosen], by.role, by.turn)

    @property
    def roles(self) -> Shaped[np.ndarray, "b p"] | None:
        """The role of each token in chats: "template" for the marks of the template, "" at padding; None: not chats."""
        on_host = self.host()
        return None if on_host.turns is None else role_words(on_host.turns, on_host.real)

    def _codes(self, row: int) -> list[int]:
        """The codes of the real tokens of a row."""
        on_host = self.host()
        self.require_one_text("a position by role")
        if on_host.turns is None:
            raise ValueError(
                "a role is required of chats, and these prompts are none: model.to_batch(chat=[{'role': 'user', "
                "'content': '...'}]) makes the batch"
            )
        return on_host.turns[row][on_host.real[row]].tolist()

    def _columns(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """The batch with `change` applied to every tensor `[b p]`, such as tokens, keep and documents."""
        keep, documents, types, corrupt, turns, branches = (
            None if x is None else change(x)
            for x in (self.keep, self.documents, self.types, self.corrupt, self.turns, self.branches)
        )
        return replace(
            self, tokens=change(self.tokens), keep=keep, documents=documents, types=types, corrupt=corrupt,
            turns=turns, branches=branches,
        )  # fmt: skip

    def _each(
        self, change: Callable[[Tensor], Tensor], numbers: Callable[[Tensor], Tensor] | None = None
    ) -> Batch:
        """The batch with `change` applied to every tensor; `numbers`, if given, is applied to `row` instead."""

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
            changed(self.turns), self.choices and self.choices.each(change), changed(self.branches),
        )  # fmt: skip


def counted(batches: Iterable[Batch]) -> Iterator[Batch]:
    """The batches with every row numbered; those made separately, each from 0 on, are counted on from batch to batch.

    A batch that holds other numbers, such as a part of a larger one, keeps them.
    """
    following, begun = 0, False
    for batch in batches:
        if not isinstance(batch, Batch):
            raise ValueError(
                f"batches are required, such as model.text.batch(texts).split(32), got {batch!r:.60}"
            )
        unnumbered, batch = batch.row is None, batch.numbered()
        row = batch.row
        assert row is not None
        if begun and (unnumbered or _is_of_its_own(batch)):
            row = row + following
            batch = replace(batch, row=row)
        begun = begun or bool((row == 0).any())
        following = max(following, int(row.max()) + 1)
        if batch.answer is not None and batch.wrong is not None:
            check_contrast(batch.answer.cpu(), batch.wrong.cpu(), batch.row)
        yield batch


def _is_of_its_own(batch: Batch) -> bool:
    """Whether the rows are numbered 0, 1, ... as those of a batch that was made by itself."""
    row = batch.row
    return batch.documents is None and row is not None and row.tolist() == list(range(len(row)))


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
    answers = list(islice(value, MOST)) if isinstance(value, list | tuple) else [value]
    fine = (isinstance(answer, str | Spellings) or is_id(answer) or is_row(answer) for answer in answers)
    return None if all(fine) else ""


Prompts = Annotated[
    str
    | Sequence[str]
    | Sequence[int]
    | Sequence[Sequence[int]]
    | Sequence[np.ndarray | Tensor]
    | np.ndarray
    | Tensor
    | Mapping[str, object]
    | Chat
    | Sequence[Chat]
    | Batch,
    Required(
        "a text, texts, token ids [pos] or [prompt, pos], what a tokenizer returns, a chat, or a Batch",
        no_prompts,
    ),
]
"""Prompts that every analysis accepts.

A text, texts, token ids `[pos]` or `[batch, pos]` (or lists of any length), the result of a tokenizer of transformers
(`encoded`), a chat (`[{"role": "user", "content": "..."}]`) or several, a batch.
"""
Answers = Annotated[
    str
    | int
    | np.integer
    | Spellings
    | Sequence[str | int | np.integer | Tensor | Sequence[int] | Spellings]
    | np.ndarray
    | Tensor,
    Required("a text or an id, one for all prompts or one for each", _no_answers),
]
"""Next tokens: one answer for all prompts or one for each, as texts or as ids.

Metrics take answers of several tokens too, texts or `[(3, 4)]`, and several spellings of an answer (`Spellings`); where
one token or one spelling is required, an error says so.
"""


def _lengths_of(rows: Sequence[Sequence[int]]) -> list[int]:
    """The number of token ids in each row; ValueError for rows of anything else, such as fractions, truths or texts."""
    if not isinstance(rows, Sequence) or not all(map(_are_ids, rows)):
        raise ValueError(f"rows must be a sequence of sequences of token ids, got {value_text(rows)}")
    return [len(row) for row in rows]


def _are_ids(row: object) -> bool:
    if is_row(row):
        return True
    if not isinstance(row, Iterable) or not isinstance(row, Sized) or isinstance(row, str | bytes | Mapping):
        return False
    return all(map(is_id, row))


def _flat_ids(rows: Sequence[Sequence[int]], count: int) -> np.ndarray:
    """The token ids of all rows, one after the other; ValueError for one of more than 63 bits."""
    try:
        return np.fromiter(chain.from_iterable(rows), np.int64, count)
    except OverflowError as cause:
        wrong = next(token for token in chain.from_iterable(rows) if not -(2**63) <= token < 2**63)
        raise ValueError(f"token ids must be in [0, {2**63 - 1}], got {wrong}") from cause


def is_prompts(data: object) -> TypeGuard[Prompts]:
    """Whether data are prompts in memory: texts, token ids or a batch, and not files or an iterator."""
    if isinstance(data, str | Tensor | np.ndarray | Batch):
        return True
    if isinstance(data, Mapping):
        return IDS in data
    if not isinstance(data, list | tuple):
        return False
    return (
        all(isinstance(item, str) for item in data)
        or is_row(data)
        or all(map(is_row, data))
        or is_chats(data)
    )


def encoded(given: Mapping[str, object], *, side: Side = "right") -> Batch:
    """The batch of a result of a transformers tokenizer: `attention_mask` becomes `keep`, nothing is prepended.

    Rows that are padded to one length stay as they are; rows of several lengths are padded on `side`.

    Args:
        given: `input_ids`, and where there are such `attention_mask` and `token_type_ids`; tensors, arrays or lists,
            `[pos]` or `[prompt, pos]`.
        side: where rows of several lengths are padded.

    Raises:
        ValueError: other keys; a mask of another shape, of other numbers than 0 and 1, without a real token, or with
            padding between real tokens, which transformers would count as a position and a batch does not.

    Example:
        >>> encoded({"input_ids": [[5, 6], [7, 0]], "attention_mask": [[1, 1], [1, 0]]}).keep.tolist()
        [[True, True], [True, False]]
    """
    encoding = Encoding.read(given)
    padded = len(set(map(len, encoding.ids))) == 1
    if not padded:
        encoding = encoding.real()
    batch = Batch.of(encoding.ids, side=side)
    if padded and not all(map(all, encoding.mask)):
        batch = replace(batch, keep=torch.tensor(encoding.mask, device="cpu") == 1)
    if encoding.types is not None:
        batch = replace(batch, types=Batch.of(encoding.types, side=side).tokens)
    return batch
