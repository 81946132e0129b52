"""Conversion of text to token ids and back, for one model.

One rule for the beginning-of-sequence token: once, or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from interp.core.boundary import public
from interp.core.notes import note
from interp.core.wording import odd_value
from interp.data.batch import Answers, Batch, Prompts, Side, encoded, is_prompts
from interp.data.chats import Chat, as_chats, encoded_chats, is_chats
from interp.data.ids import OneTokenError, check_contrast, check_count, described, is_id, is_row, sorted_out
from interp.data.spellings import check_one_spelling
from interp.data.tokenizers import (
    BatchTokenizer,
    ChatTokenizer,
    EndingTokenizer,
    SpecialTokenizer,
    Tokenizer,
    UnreadTokenizer,
)

if TYPE_CHECKING:
    import xarray as xr


class Text:
    """Tokenisation for one model: prompts in, batches out.

    Args:
        tokenizer: the tokenizer; an `UnreadTokenizer` reads its files when it is first needed.
        special: whether texts get all special tokens that the tokenizer itself adds (encoders), instead of BOS alone.
        d_vocab_out: number of the model's outputs, where they are not its tokens; answers are then output indices.
        ends: ids at which the model's own generation ends; none: the tokenizer's end of text.
        prepend_bos: whether texts begin with BOS by default, where there is one.
    """

    _why: str | None = None  # why the tokenizer cannot be read
    _bos_said = False

    def __init__(
        self,
        tokenizer: Tokenizer | UnreadTokenizer | None,
        n_ctx: int,
        d_vocab: int,
        *,
        special: bool = False,
        d_vocab_out: int | None = None,
        ends: Sequence[int] = (),
        prepend_bos: bool = True,
    ) -> None:
        self._given = tokenizer
        self.prepend_bos = prepend_bos
        self._ends = tuple(ends)
        self.n_ctx = n_ctx
        self.d_vocab = d_vocab
        self._d_vocab_out = d_vocab_out
        self._wants_special = special

    def __getstate__(self) -> dict[str, object]:
        """State for another process, without caches; a tokenizer in files is read first, since they may be absent."""
        given = {"_given": self._tokenizer, "_why": self._why, "_wants_special": self._wants_special}
        sizes = {"n_ctx": self.n_ctx, "d_vocab": self.d_vocab, "_d_vocab_out": self._d_vocab_out}
        return given | sizes | {"_ends": self._ends, "prepend_bos": self.prepend_bos}

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        """The tokenizer, read from its files if need be; None if there is none, or it cannot be read."""
        if not isinstance(self._given, UnreadTokenizer):
            return self._given
        try:
            return self._given.opened()
        except ValueError as cause:
            self._why = str(cause)
            return None

    @cached_property
    def _special(self) -> bool:
        """Whether texts get all special tokens that the tokenizer itself adds."""
        return self._wants_special and isinstance(self._tokenizer, SpecialTokenizer)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; ValueError if the model came without one, or with one that cannot be read."""
        if self._tokenizer is None:
            raise ValueError(self.refused)
        return self._tokenizer

    @property
    def has_tokenizer(self) -> bool:
        """Whether the model came with a tokenizer that can be read."""
        return self._tokenizer is not None

    @property
    def refused(self) -> str | None:
        """Reason why texts are refused, and what to do; None for a model with a tokenizer."""
        if self._tokenizer is not None:
            return None
        what = f"texts are refused, {self._why}" if self._why else "this model has no tokenizer"
        return f"{what}: pass token ids, or give a tokenizer: from_pretrained(source, tokenizer=tokenizer)"

    @property
    def settings(self) -> tuple[int, int, int | None, bool, bool]:
        """All settings besides the tokenizer that decide which ids a text becomes and which ids are accepted."""
        return self.n_ctx, self.d_vocab, self._d_vocab_out, self._special, self.prepend_bos

    @property
    def bos_id(self) -> int | None:
        """The id that begins a sequence; None if there is none, or the model has no row for it."""
        return None if self._tokenizer is None else self._within(self._tokenizer.bos_id)

    @property
    def eos_id(self) -> int | None:
        """The id that ends a text; None if there is none, or the model has no row for it."""
        return None if self._tokenizer is None else self._within(self._tokenizer.eos_id)

    @property
    def end_ids(self) -> frozenset[int]:
        """The ids at which generation ends: those of the model's config, or else those of the tokenizer."""
        tokenizer = self._tokenizer
        end_tokens = () if tokenizer is None else (tokenizer.eos_id,)
        end_tokens = (*end_tokens, *tokenizer.ends) if isinstance(tokenizer, EndingTokenizer) else end_tokens
        stated = {i for i in map(self._within, self._ends) if i is not None}
        return frozenset(stated or {i for i in map(self._within, end_tokens) if i is not None})

    @property
    def turn_end(self) -> int | None:
        """The id with which the chat template ends an assistant's turn; None where there is none."""
        tokenizer = self._tokenizer
        return self._within(tokenizer.turn_end) if isinstance(tokenizer, ChatTokenizer) else None

    @property
    def pad_id(self) -> int:
        """The id at padding: the tokenizer's, or EOS, BOS or 0; no result depends on it."""
        tokenizer_pad = None if self._tokenizer is None else self._within(self._tokenizer.pad_id)
        return next((i for i in (tokenizer_pad, self.eos_id, self.bos_id) if i is not None), 0)

    def _within(self, token: int | None) -> int | None:
        """The id, or None if the model has no row for it."""
        return token if token is not None and 0 <= token < self.d_vocab else None

    @public(unchecked=("prompts",))
    def batch(self, prompts: Prompts, *, prepend_bos: bool | None = None, side: Side = "right") -> Batch:
        """Any prompts as one batch; BOS is prepended to texts unless they already begin with it, never to ids.

        Args:
            prompts: texts, token ids, chats, or a batch.
            prepend_bos: whether texts begin with BOS; None: as the model's own default says
                (`from_pretrained(..., default_prepend_bos=)`). A `Note` says it, once, where the model's own tokenizer
                would not prepend BOS, or would add other special tokens.
            side: where shorter prompts are padded.

        Raises:
            ValueError: an empty prompt, an over-long one, or ids outside the vocabulary.
        """
        if isinstance(prompts, Batch):
            return self._checked_batch(prompts)
        if isinstance(prompts, Tensor | np.ndarray):
            ids = torch.as_tensor(prompts)
            return self._checked_batch(Batch(ids[None] if ids.ndim == 1 else ids))
        if isinstance(prompts, Mapping):
            batch = encoded(prompts, side=side)
            hidden = ~batch.real & (
                batch.tokens >= self.d_vocab
            )  # padding that was added to a tokenizer later
            return self._checked_batch(replace(batch, tokens=batch.tokens.masked_fill(hidden, self.pad_id)))
        if not is_prompts(prompts):
            raise ValueError(
                "prompts are required: a text, texts, token ids [pos] or [batch, pos], what a tokenizer returns, a "
                f"chat, or a Batch, got {described(prompts)}"
            )
        if is_chats(prompts):
            return self._chat_batch(as_chats(prompts), side)
        texts, numbers = sorted_out(prompts)
        if not texts:
            return self._checked_batch(Batch.of(numbers, side=side))
        rows = [self.ids(text, prepend_bos=prepend_bos) for text in texts]
        bos = self._prepends_bos(prepend_bos) and self.bos_id is not None and not self._special
        return self._checked_batch(Batch.of(rows, pad_id=self.pad_id, side=side, bos=bos))

    def _chat_batch(self, chats: Sequence[Chat], side: Side) -> Batch:
        """The chats in the tokenizer's chat template, which writes the special tokens too."""
        rows, codes = encoded_chats(self.tokenizer, chats)
        batch = Batch.of(rows, pad_id=self.pad_id, side=side)
        return self._checked_batch(replace(batch, turns=Batch.of(codes, side=side).tokens))

    def ids(self, text: str, *, prepend_bos: bool | None = None) -> list[int]:
        """Ids of one text, with BOS exactly once if `prepend_bos` says so and the tokenizer has one.

        For encoders: with all special tokens, or with none for `prepend_bos=False`.

        Raises:
            ValueError: an empty text, which may be a mistake; give BOS alone as a list of ids.
        """
        if not text:
            alone = "" if self.bos_id is None else f"; BOS alone is a prompt as ids, [[{self.bos_id}]]"
            raise ValueError(f"the prompt is empty: at least one character is required{alone}")
        if self._special:
            assert isinstance(self._tokenizer, SpecialTokenizer)
            special = self._prepends_bos(prepend_bos)
            return self._tokenizer.with_special(text) if special else self._tokenizer.encode(text)
        return self._ids_with_bos(self.tokenizer.encode(text), prepend_bos)

    def many(self, texts: Sequence[str], *, prepend_bos: bool | None = None) -> list[list[int]]:
        """The ids of each of these texts, as from `ids`, encoded together where the tokenizer can."""
        tokenizer = self.tokenizer
        if self._special or not all(texts) or not isinstance(tokenizer, BatchTokenizer):
            return [self.ids(text, prepend_bos=prepend_bos) for text in texts]
        return [self._ids_with_bos(ids, prepend_bos) for ids in tokenizer.encode_batch(texts)]

    def _prepends_bos(self, prepend_bos: bool | None) -> bool:
        """Whether texts begin with BOS: the argument, or where it is None the model's default."""
        return self.prepend_bos if prepend_bos is None else prepend_bos

    def _ids_with_bos(self, ids: list[int], prepend_bos: bool | None) -> list[int]:
        """The ids with BOS before them, if that is asked for and they do not begin with it."""
        if not self._prepends_bos(prepend_bos):
            return ids
        if not self._bos_said:
            self._note_bos()
        bos = self.bos_id
        return ids if bos is None or ids[:1] == [bos] else [bos, *ids]

    def _note_bos(self) -> None:
        """Give a note where texts begin here with other tokens than the tokenizer itself would give them."""
        self._bos_said = True
        tokenizer, bos = self.tokenizer, self.bos_id
        if bos is None and tokenizer.bos_id is not None:
            note(f"texts begin without BOS here: {self.outside(tokenizer.bos_id)}")
            return
        if not isinstance(tokenizer, SpecialTokenizer):
            return
        alone, theirs = tokenizer.encode("a"), tokenizer.with_special("a")
        ours = alone if bos is None else [bos, *alone]
        if theirs == alone and bos is not None:
            note(
                f"texts begin with {tokenizer.piece(bos)} (BOS) here; this model's own tokenizer would not prepend it; "
                "prepend_bos=False (--prepend-bos False) leaves it out"
            )
        elif theirs != ours:
            our_pieces, their_pieces = (" ".join(map(tokenizer.piece, ids)) for ids in (ours, theirs))
            note(
                f"the text 'a' is {our_pieces} here; this model's own tokenizer makes {their_pieces} of it, with "
                "special tokens that are not added to texts: give what the tokenizer returns as the prompt to have them"
            )

    def outside(self, token: int) -> str:
        """Message about an id without a row in the embedding: the bounds, the id, and its token if it has one."""
        message = f"token ids must be in [0, {self.d_vocab - 1}], got {token}"
        try:
            piece = self._tokenizer.piece(token) if self._tokenizer and self.d_vocab <= token < 2**31 else ""
        except IndexError:  # an id of no token
            piece = ""
        return f"{message}, the tokenizer's {piece!r}, which this model has no row for" if piece else message

    def single(self, text: str) -> int:
        """The id of a text that is one token; ValueError if it is several tokens, or if there is no tokenizer."""
        ids = self.tokenizer.encode(text)
        if len(ids) != 1:
            pieces = [self.tokenizer.piece(i) for i in ids]
            spaced = f" {text}"
            hint = f"; {spaced!r} is one" if len(self.tokenizer.encode(spaced)) == 1 else ""
            raise ValueError(f"{text!r} must be a single token, got {len(ids)}: {pieces}{hint}")
        return ids[0]

    def pieces(self, ids: Int[Tensor, "p"] | Sequence[int]) -> list[str]:
        """The text of each token; without a tokenizer the id in brackets, such as "<5>"."""
        values = [int(i) for i in ids]
        if self._tokenizer is None:
            return [f"<{i}>" for i in values]
        return [self._tokenizer.piece(i) for i in values]

    def token_words(self, ids: Int[Tensor, "b p"]) -> tuple[tuple[str, str], Shaped[np.ndarray, "b p"]]:
        """The coordinate `token` of a result as (dims, texts), from `Batch.token_ids`; "" at padding."""
        return ("prompt", "pos"), self.words(ids.cpu().numpy())

    def worded(self, result: xr.Dataset, **words: str) -> xr.Dataset:
        """The result with texts for its ids: `word="top_token"` adds `word`, the texts of the variable `top_token`."""
        texts = {name: (result[ids].dims, self.words(result[ids].to_numpy())) for name, ids in words.items()}
        return result.assign(texts)

    @property
    def of_outputs(self) -> Text:
        """The `Text` for output indices: itself, or one without tokenizer where the outputs are not the tokens."""
        return self if self._d_vocab_out is None else Text(None, self.n_ctx, self._d_vocab_out)

    def words(self, ids: Int[np.ndarray, "*n"]) -> Shaped[np.ndarray, "*n"]:
        """The text of each token id in an array, as Python strings; "" for -1.

        The dtype is object, since NumPy's string arrays drop NULs from the end of a text, and a token can be a NUL.
        """
        unique, inverse = np.unique(ids, return_inverse=True)
        texts = ["" if i < 0 else self.pieces([int(i)])[0] for i in unique]
        return np.array(texts, dtype=object)[inverse].reshape(ids.shape)

    def targets(self, answers: Answers, rows: int) -> Int[Tensor, "b"]:
        """One answer per row, from one for all rows or one for each; texts must be single tokens."""
        ids = self.outputs(answers)
        check_count(None if len(ids) == 1 else len(ids), rows)
        return ids.expand(rows)

    def outputs(self, answers: Answers) -> Int[Tensor, "n"]:
        """Answers as indices of the model's outputs: token ids, or where outputs are not tokens, the given numbers.

        Raises:
            ValueError: as `tokens`; a text where the outputs are not the tokens.
        """
        if self._d_vocab_out is None:
            return self.tokens(answers)
        items = answers if isinstance(answers, list | tuple) else [answers]
        check_one_spelling(answers)
        if any(isinstance(item, str) for item in items):
            raise ValueError(
                f"the outputs of this model are not its tokens: a number in [0, {self._d_vocab_out - 1}] is required, "
                f"got {answers!r}"
            )
        return self.of_outputs.tokens(answers)

    def continuations(self, answers: Answers) -> list[list[int]]:
        """The ids of each answer: one for a number, one or several for a text or a list of ids.

        Raises:
            ValueError: as `tokens`, except that several tokens are allowed; an empty answer.
        """
        listed = answers.tolist() if isinstance(answers, Tensor | np.ndarray) else answers
        items = listed if isinstance(listed, list | tuple) else [listed]
        check_one_spelling(items)
        plain = not any(isinstance(item, str) or is_row(item) for item in items)
        if plain or self._d_vocab_out is not None:  # outputs of its own: one for each answer
            return [[token] for token in self.outputs(answers).tolist()]
        token_lists = [self._continuation(item) for item in items]
        if not all(token_lists):
            raise ValueError(
                f"an answer of at least one token is required, got {described(answers)} with an empty one"
            )
        return [self.outputs(tokens).tolist() for tokens in token_lists]

    def _continuation(self, answer: object) -> list[int]:
        """The ids of one answer."""
        if isinstance(answer, str):
            return self.tokenizer.encode(answer)
        return [int(token) for token in answer] if is_row(answer) else [int(answer)]  # type: ignore[call-overload]

    def tokens(self, answers: Answers) -> Int[Tensor, "n"]:
        """Answers as token ids; texts must be single tokens.

        Raises:
            ValueError: a text of several tokens, an id outside the vocabulary, no answer, or anything else.
        """
        items = answers.tolist() if isinstance(answers, Tensor | np.ndarray) else answers
        every: list[object] = list(items) if isinstance(items, list | tuple) else [items]
        check_one_spelling(every)
        if (
            every
            and all(isinstance(a, str) or is_id(a) or is_row(a) for a in every)
            and any(map(is_row, every))
        ):
            raise OneTokenError(
                "this is about one next token: an answer is a text of a single token or an id, one for all prompts or "
                f"one for each, got {described(answers)}"
            )
        if not every or not all(isinstance(a, str) or is_id(a) for a in every):
            raise ValueError(
                "an answer is a text of a single token or an id, one for all prompts or one for each, got "
                f"{described(answers)}"
            )
        ids = [int(a) if is_id(a) else self.single(str(a)) for a in every]
        if bad := [i for i in ids if self._within(i) is None]:
            raise ValueError(f"answer tokens {self.outside(bad[0]).removeprefix('token ids ')}")
        return torch.tensor(ids, device="cpu")

    def _checked_batch(self, batch: Batch) -> Batch:
        """The batch with numbered rows; ValueError for prompts or answers that the model cannot take."""
        if odd := odd_value(batch.tokens):
            raise ValueError(f"token ids are required, got a batch of {odd}")
        n = batch.tokens.shape[1]
        if n > self.n_ctx:
            raise ValueError(
                f"the prompt has {n} tokens, the model's context holds {self.n_ctx}: cut it to as many"
            )
        low, high = int(batch.tokens.min()), int(batch.tokens.max())
        if low < 0 or high >= self.d_vocab:
            wrong = low if low < 0 else high
            row, at = (batch.tokens == wrong).nonzero()[0].tolist()
            raise ValueError(f"{self.outside(wrong)}; at position {at} of prompt {row}")
        n_outputs = self.of_outputs.d_vocab
        for name in ("answer", "wrong"):
            answers = getattr(batch, name)
            if answers is not None and (bad := [i for i in answers.tolist() if not 0 <= i < n_outputs]):
                raise ValueError(f"{name} must be in [0, {n_outputs - 1}], got {bad[0]}")
        if batch.answer is not None and batch.wrong is not None:
            check_contrast(batch.answer.cpu(), batch.wrong.cpu(), batch.row, self.of_outputs.pieces)
        return batch.numbered()
