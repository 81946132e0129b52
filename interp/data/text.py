"""From text to token ids and back, with one rule for the beginning-of-sequence token: once, or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Protocol, TypeGuard, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from interp.core.boundary import MOST, Required
from interp.data.batch import Batch, Side

if TYPE_CHECKING:
    import xarray as xr


def _no_ids(value: Tensor | np.ndarray, axes: Sequence[int]) -> str | None:
    """None for an array of whole numbers of so many axes; else how to write what was meant."""
    whole = (
        np.issubdtype(value.dtype, np.integer)
        if isinstance(value, np.ndarray)
        else not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
    )
    return None if whole and value.ndim in axes else ""


def no_prompts(value: object) -> str | None:
    """None for prompts in memory; else how to write what was meant, "" where nothing is close."""
    if isinstance(value, str | Batch):
        return None
    if isinstance(value, Tensor | np.ndarray):
        return _no_ids(value, (1, 2))
    if isinstance(value, bytes | bytearray):
        return ": a text is a str, .decode() makes one"
    if hasattr(value, "iloc"):
        return ": of a table one column is required, as a list"
    if not isinstance(value, list | tuple):
        return ""
    items = value[:MOST]
    return None if is_prompts(items) or not items else ""


def _no_answers(value: object) -> str | None:
    """None for what may be answers; else how to write what was meant, "" where nothing is close."""
    if isinstance(value, Tensor):
        return _no_ids(value, (0, 1))
    if isinstance(value, np.ndarray):
        return None if value.dtype.kind in "US" and value.ndim == 1 else _no_ids(value, (0, 1))
    every = list(islice(value, MOST)) if isinstance(value, list | tuple) else [value]
    good = all(isinstance(each, str | int) and not isinstance(each, bool) for each in every)
    return None if good else ""


Prompts = Annotated[
    str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]] | np.ndarray | Tensor | Batch,
    Required("a text, texts, token ids [pos] or [prompt, pos], or a Batch", no_prompts),
]
"""What every analysis accepts: a text, texts, token ids `[pos]` or `[batch, pos]` (or lists of any length), a batch."""
Answers = Annotated[
    str | int | Sequence[str | int] | np.ndarray | Tensor,
    Required("a text of one token or an id, one for all prompts or one for each", _no_answers),
]
"""The token that should follow: one for all prompts or one for each, as texts of a single token or as ids."""


@runtime_checkable
class Tokenizer(Protocol):
    """What we need of a tokenizer; `families.tokenizer` adapts the two common libraries to it."""

    bos_id: int | None
    eos_id: int | None
    pad_id: int

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone, no special token added."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids, special tokens included."""
        ...

    def piece(self, token: int) -> str:
        """The text of one token, leading space included."""
        ...


@runtime_checkable
class SpecialTokenizer(Tokenizer, Protocol):
    """A tokenizer that knows what its model expects around a text, such as BERT's [CLS] and [SEP]."""

    def with_special(self, text: str) -> list[int]:
        """Ids of the text with every special token that the tokenizer itself adds."""
        ...


@runtime_checkable
class BatchTokenizer(Tokenizer, Protocol):
    """A tokenizer that is faster on many texts together than on one after the other."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """What `encode` gives for each text."""
        ...


def is_prompts(data: object) -> TypeGuard[Prompts]:
    """Whether these are prompts in memory: texts, token ids or a batch, and not files or an iterator."""
    if isinstance(data, str | Tensor | np.ndarray | Batch):
        return True
    if not isinstance(data, list | tuple):
        return False
    kinds = {type(each) for each in data}
    rows = kinds <= {list, tuple} and all({type(i) for i in each} == {int} for each in data)
    return kinds in ({str}, {int}) or rows


def _sorted_out(prompts: object) -> tuple[list[str], list[list[int]]]:
    """Texts, or rows of ids; ValueError for neither."""
    given = [prompts] if isinstance(prompts, str) else prompts
    assert isinstance(given, list | tuple)
    if not given:
        raise ValueError("at least one prompt is required, got none")
    if isinstance(given[0], str):
        return [str(each) for each in given], []
    rows = [given] if isinstance(given[0], int) else given
    return [], [list(row) for row in rows]


def _described(value: object) -> str:
    """A value that was not expected, in short."""
    kind = type(value).__name__
    if isinstance(value, list | tuple):
        kinds = sorted({type(each).__name__ for each in value})
        return f"a {kind} of {', '.join(kinds)}" if kinds else f"an empty {kind}"
    return kind


class Text:
    """Tokenisation for one model: prompts in, batches out.

    special: texts get all special tokens that their tokenizer adds itself (encoders), instead of BOS alone.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, n_ctx: int, d_vocab: int, *, special: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self.n_ctx = n_ctx
        self.d_vocab = d_vocab
        self._special = special and isinstance(tokenizer, SpecialTokenizer)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; ValueError if the model came without one."""
        if self._tokenizer is None:
            raise ValueError("this model has no tokenizer: pass token ids, or give a tokenizer when loading")
        return self._tokenizer

    @property
    def bos_id(self) -> int | None:
        """The id that begins a sequence; None without a tokenizer, or if the tokenizer has none."""
        return None if self._tokenizer is None else self._tokenizer.bos_id

    @property
    def eos_id(self) -> int | None:
        """The id that ends a text; None without a tokenizer, or if the tokenizer has none."""
        return None if self._tokenizer is None else self._tokenizer.eos_id

    def batch(self, prompts: Prompts, *, prepend_bos: bool = True, side: Side = "right") -> Batch:
        """Any prompts as one batch; BOS is prepended to texts unless they already begin with it, never to ids.

        Errors: ValueError for an empty prompt, an over-long one, or ids outside the vocabulary.
        """
        if isinstance(prompts, Batch):
            return self._checked(prompts)
        if isinstance(prompts, Tensor | np.ndarray):
            ids = torch.as_tensor(prompts)
            if ids.dtype == torch.bool:
                raise ValueError("token ids are required, got a mask of booleans")
            return self._checked(Batch(ids[None] if ids.ndim == 1 else ids))
        if not is_prompts(prompts):
            raise ValueError(
                "prompts are required: a text, texts, token ids [pos] or [batch, pos], or a Batch, got "
                f"{_described(prompts)}"
            )
        texts, numbers = _sorted_out(prompts)
        if not texts:
            return self._checked(Batch.of(numbers, side=side))
        rows = [self.ids(text, prepend_bos=prepend_bos) for text in texts]
        bos = prepend_bos and self.tokenizer.bos_id is not None and not self._special
        return self._checked(Batch.of(rows, pad_id=self.tokenizer.pad_id, side=side, bos=bos))

    def ids(self, text: str, *, prepend_bos: bool = True) -> list[int]:
        """Ids of one text, with BOS exactly once if asked for and if the tokenizer has one.

        For encoders: with all special tokens, or none with `prepend_bos=False`.
        """
        if not text:
            raise ValueError("the prompt is empty: at least one character is required")
        if self._special:
            assert isinstance(self._tokenizer, SpecialTokenizer)
            return self._tokenizer.with_special(text) if prepend_bos else self._tokenizer.encode(text)
        return self._begun(self.tokenizer.encode(text), prepend_bos)

    def many(self, texts: Sequence[str], *, prepend_bos: bool = True) -> list[list[int]]:
        """What `ids` gives for each of these texts, encoded together where the tokenizer can."""
        tokenizer = self.tokenizer
        if self._special or not all(texts) or not isinstance(tokenizer, BatchTokenizer):
            return [self.ids(text, prepend_bos=prepend_bos) for text in texts]
        return [self._begun(ids, prepend_bos) for ids in tokenizer.encode_batch(texts)]

    def _begun(self, ids: list[int], prepend_bos: bool) -> list[int]:
        bos = self.tokenizer.bos_id
        return [bos, *ids] if prepend_bos and bos is not None and ids[:1] != [bos] else ids

    def single(self, text: str) -> int:
        """The one token that `text` is; ValueError naming the tokens if it is several."""
        ids = self.tokenizer.encode(text)
        if len(ids) != 1:
            pieces = [self.tokenizer.piece(i) for i in ids]
            spaced = f" {text}"
            hint = f"; {spaced!r} is one" if len(self.tokenizer.encode(spaced)) == 1 else ""
            raise ValueError(f"{text!r} must be a single token, got {len(ids)}: {pieces}{hint}")
        return ids[0]

    def pieces(self, ids: Int[Tensor, "p"] | Sequence[int]) -> list[str]:
        """The text of each token; ids in brackets where the model has no tokenizer."""
        values = [int(i) for i in ids]
        if self._tokenizer is None:
            return [f"<{i}>" for i in values]
        return [self._tokenizer.piece(i) for i in values]

    def token_words(self, ids: Int[Tensor, "b p"]) -> tuple[tuple[str, str], Shaped[np.ndarray, "b p"]]:
        """The dims and the texts of a result's coordinate `token`, from `Batch.token_ids`; "" at padding."""
        return ("prompt", "pos"), self.words(ids.cpu().numpy())

    def worded(self, result: xr.Dataset, **words: str) -> xr.Dataset:
        """The result with the texts of its token ids: with `word="top_token"` those of `top_token` as `word`."""
        texts = {name: (result[ids].dims, self.words(result[ids].to_numpy())) for name, ids in words.items()}
        return result.assign(texts)

    def words(self, ids: Int[np.ndarray, "*n"]) -> Shaped[np.ndarray, "*n"]:
        """The text of each token of an array, as Python strings; "" for -1, which stands for none.

        Python's own, since NumPy's arrays of characters drop NULs from the end of a text, and a token can be a NUL.
        """
        unique, inverse = np.unique(ids, return_inverse=True)
        texts = ["" if i < 0 else self.pieces([int(i)])[0] for i in unique]
        return np.array(texts, dtype=object)[inverse].reshape(ids.shape)

    def targets(self, answers: Answers, rows: int) -> Int[Tensor, "b"]:
        """One answer token per row, from one answer for all rows or one for each; texts must be single tokens."""
        ids = self.tokens(answers)
        if len(ids) == 1:
            return ids.expand(rows)
        if len(ids) != rows:
            raise ValueError(f"one answer per prompt is required, got {len(ids)} answers for {rows} prompts")
        return ids

    def tokens(self, answers: Answers) -> Int[Tensor, "n"]:
        """Answers as token ids; texts must be single tokens.

        Errors: ValueError for a text of several tokens, an id outside the vocabulary, no answer, or anything else.
        """
        given = answers.tolist() if isinstance(answers, Tensor | np.ndarray) else answers
        every = list(given) if isinstance(given, list | tuple) else [given]
        if not every or not all(isinstance(a, str | int) and not isinstance(a, bool) for a in every):
            raise ValueError(
                "an answer is a text of a single token or an id, one for all prompts or one for each, got "
                f"{_described(answers)}"
            )
        ids = [a if isinstance(a, int) else self.single(str(a)) for a in every]
        if bad := [i for i in ids if not 0 <= i < self.d_vocab]:
            raise ValueError(f"answer tokens must be in [0, {self.d_vocab - 1}], got {bad[0]}")
        return torch.tensor(ids)

    def _checked(self, batch: Batch) -> Batch:
        n = batch.tokens.shape[1]
        if n > self.n_ctx:
            raise ValueError(f"the prompt has {n} tokens, the model's context holds {self.n_ctx}")
        low, high = int(batch.tokens.min()), int(batch.tokens.max())
        if low < 0 or high >= self.d_vocab:
            raise ValueError(f"token ids must be in [0, {self.d_vocab - 1}], got {low if low < 0 else high}")
        return batch.numbered()


def single_token(text: Text, word: str) -> int | None:
    """The one token that a word is in running text, with or without a leading space; None if several or unknown.

    Errors: ValueError without a tokenizer.
    """
    tokenizer = text.tokenizer
    for form in (f" {word}", word):
        try:
            token = text.single(form)
        except ValueError:  # several tokens, or none that can write it
            continue
        if tokenizer.piece(token).strip().casefold() == word.casefold():
            return token
    return None
