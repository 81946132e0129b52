"""Tokens as TransformerLens prepares them: BOS put in front or taken off, masks of padding, texts cut into rows."""

import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from interp.compat.transformer_lens.tensors import get_cumsum_along_dim

Dataset = Any
"""A Hugging Face `Dataset` or `IterableDataset`; `datasets` is not a dependency of ours."""
Tokenizer = Any
"""A transformers tokenizer, or what has the attributes that a function names."""
Texts = TypeVar("Texts", str, list[str])


def keep_single_column(dataset: Dataset, col_name: str) -> Dataset:
    """The dataset without its other columns."""
    for key in dataset.features:
        if key != col_name:
            dataset = dataset.remove_columns(key)
    return dataset


def tokenize_and_concatenate(
    dataset: Dataset,
    tokenizer: Tokenizer,
    streaming: bool = False,
    max_length: int = 1024,
    column_name: str = "text",
    add_bos_token: bool = True,
    num_proc: int | None = 10,
    set_format: bool = True,
) -> Dataset:
    """A dataset of one column "tokens": the texts end to end, EOS between them, cut into rows of `max_length`.

    Each row begins with BOS unless `add_bos_token` is off; what does not fill the last row is dropped. Texts are joined
    within the groups that `dataset.map` hands out; a group that fills no row makes one, padded at its end (with EOS
    where the tokenizer has no padding token: no id is used that the model does not know).
    num_proc: processes, unless streaming. set_format: rows as tensors; off for an `IterableDataset`.
    """
    dataset = keep_single_column(dataset, column_name)
    width = max_length - add_bos_token
    padding = tokenizer.eos_token_id if tokenizer.pad_token is None else tokenizer.pad_token_id
    if tokenizer.pad_token is None:
        tokenizer.add_special_tokens({"pad_token": "<PAD>"})

    def rows(examples: Mapping[str, Sequence[str]]) -> dict[str, np.ndarray]:
        assert tokenizer.eos_token is not None, "Tokenizer must have an EOS token."
        texts = examples[column_name]
        encoded = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        joined = [np.asarray([*row, tokenizer.eos_token_id], dtype=np.int64) for row in encoded]
        if not joined:
            return {"tokens": np.array([], dtype=np.int64)}
        found = np.concatenate(joined)[:-1]
        missing = max(0, width - len(found))
        found = np.pad(found, (0, missing), constant_values=padding)
        found = found[: len(found) // width * width].reshape(-1, width)
        if add_bos_token:
            found = np.pad(found, ((0, 0), (1, 0)), constant_values=tokenizer.bos_token_id)
        return {"tokens": found}

    # A long text is meant to be longer than the model's context: transformers' warning about it is switched off.
    warned = getattr(tokenizer, "deprecation_warnings", {})
    before = dict(warned)
    warned["sequence-length-is-longer-than-the-specified-maximum"] = False
    try:
        workers = {} if streaming else {"num_proc": num_proc}
        tokens = dataset.map(rows, batched=True, remove_columns=[column_name], **workers)
    finally:
        warned.clear()
        warned.update(before)
    if set_format:
        tokens.set_format(type="torch", columns=["tokens"])
    return tokens


def get_tokenizer_with_bos(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer, or where it does not prepend BOS by itself one read anew from where it came that does.

    A tokenizer without BOS stays as it is, and so does one that cannot be told to prepend it.
    """
    if tokenizer.bos_token is None:
        return tokenizer
    settings = deepcopy(tokenizer.init_kwargs)
    source = settings.pop("name_or_path")
    prepends = settings.pop("add_bos_token", None)
    if getattr(tokenizer, "add_bos_token", False) if prepends is None else prepends:
        return tokenizer
    token = os.environ.get("HF_TOKEN") or None
    try:
        found = type(tokenizer).from_pretrained(source, add_bos_token=True, token=token, **settings)
    except ValueError:
        return tokenizer
    found.padding_side = tokenizer.padding_side
    return found


def get_input_with_manually_prepended_bos(bos_token: str | None, input: Texts) -> Texts:
    """The texts with the BOS token's text in front; as they are where there is none."""
    if bos_token is None:
        return input
    return bos_token + input if isinstance(input, str) else [bos_token + text for text in input]


def get_tokens_with_bos_removed(
    tokenizer: Tokenizer, tokens: Int[Tensor, "... p"], padding_side: str | None = None
) -> Int[Tensor, "... q"]:
    """The rows without their BOS: the first column, or under left padding the first real one.

    padding_side: None = the tokenizer's.
    """
    if tokenizer.bos_token_id is None:
        return tokens
    if (padding_side or tokenizer.padding_side) == "right":
        return tokens[..., 1:]
    if tokenizer.bos_token_id == tokenizer.pad_token_id:
        column = _leading_padding(tokenizer, tokens).sum(-1) - 1
    else:
        column = (tokens == tokenizer.bos_token_id).int().argmax(-1)
    kept = torch.ones_like(tokens, dtype=torch.bool).scatter(-1, column[..., None], value=False)
    return tokens[kept].reshape(*tokens.shape[:-1], -1)


def get_attention_mask(
    tokenizer: Tokenizer, tokens: Int[Tensor, "b p"], prepend_bos: bool, padding_side: str | None = None
) -> Int[Tensor, "b p"]:
    """1 at real tokens, 0 at padding: the padding ids at that end of each row.

    Where BOS and padding are the same id, the last of them on the left is taken for BOS if `prepend_bos`.
    padding_side: None = the tokenizer's. Without a tokenizer everything is real.
    """
    mask = torch.ones_like(tokens)
    if tokenizer is None:
        return mask
    if (padding_side or tokenizer.padding_side) == "right":
        real = tokens != tokenizer.pad_token_id
        mask[get_cumsum_along_dim(real, -1, reverse=True) == 0] = 0
        return mask
    leading = _leading_padding(tokenizer, tokens)
    mask[leading] = 0
    if prepend_bos and tokenizer.bos_token_id == tokenizer.pad_token_id:
        mask[torch.arange(len(mask)), leading.sum(-1) - 1] = 1
    return mask


def _leading_padding(tokenizer: Tokenizer, tokens: Tensor) -> Tensor:
    return get_cumsum_along_dim(tokens != tokenizer.pad_token_id, -1) == 0
