"""Tokens as TransformerLens prepares them: BOS put in front or taken off, masks of padding, texts cut into rows."""

import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, TypeVar, cast

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from interp.compat.transformer_lens.config import HookedTransformerConfig
from interp.compat.transformer_lens.defaults import USE_DEFAULT_VALUE, LocallyOverridenDefaults
from interp.compat.transformer_lens.tensors import get_cumsum_along_dim

Dataset = Any
"""A Hugging Face `Dataset` or `IterableDataset`; `datasets` is not a dependency of this package."""
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


WITHOUT_BOS = ("OlmoForCausalLM", "OlmoeForCausalLM", "Olmo2ForCausalLM")
"""Architectures with tokenizers that are left as they are."""
TokenRows = Int[Tensor, "..."] | np.ndarray | list[Any]


class Tokenization(nn.Module):
    """The text side of a model. `prepend_bos` and `padding_side` override the model's defaults for one call."""

    cfg: HookedTransformerConfig
    tokenizer: Any
    W_U: Any

    def set_tokenizer(self, tokenizer: Any, default_padding_side: str | None = None) -> None:
        """Use this tokenizer; one that can be told to prepend BOS is. Missing special tokens become EOS.

        Raises:
            AssertionError: what is no tokenizer of transformers, or another side than right, left or None.
        """
        kinds = {kind.__name__ for kind in type(tokenizer).__mro__}
        assert "PreTrainedTokenizerBase" in kinds, (
            f"{type(tokenizer)} is not a supported tokenizer, please use PreTrainedTokenizer or PreTrainedTokenizerFast"
        )
        assert default_padding_side in ("right", "left", None), (
            f"padding_side must be 'right', 'left' or 'None', got {default_padding_side}"
        )
        if self.cfg.original_architecture not in WITHOUT_BOS:
            tokenizer = get_tokenizer_with_bos(tokenizer)
        self.tokenizer = tokenizer
        tokenizer.padding_side = default_padding_side or tokenizer.padding_side or "right"
        self.cfg.tokenizer_prepends_bos = len(tokenizer.encode("")) > 0
        if tokenizer.eos_token is None:
            tokenizer.eos_token = "<|endoftext|>"
        for name in ("pad_token", "bos_token"):
            if getattr(tokenizer, name) is None:
                setattr(tokenizer, name, tokenizer.eos_token)
        if self.cfg.d_vocab == -1:
            self.cfg.d_vocab = max(tokenizer.get_vocab().values()) + 1
        if self.cfg.d_vocab_out == -1:
            self.cfg.d_vocab_out = self.cfg.d_vocab

    def to_tokens(
        self,
        input: str | list[str],
        prepend_bos: bool | None = USE_DEFAULT_VALUE,
        padding_side: str | None = USE_DEFAULT_VALUE,
        move_to_device: bool = True,
        truncate: bool = True,
    ) -> Int[Tensor, "b p"]:
        """Token ids of one or several texts, padded; cut at the context length if `truncate`."""
        with LocallyOverridenDefaults(self, prepend_bos=prepend_bos, padding_side=padding_side):
            assert self.tokenizer is not None, "Cannot use to_tokens without a tokenizer"
            assert self.cfg.tokenizer_prepends_bos is not None, (
                "Set the tokenizer for the model by calling set_tokenizer"
            )
            wanted, automatic = self.cfg.default_prepend_bos, self.cfg.tokenizer_prepends_bos
            if wanted and not automatic:
                bos = self.tokenizer.bos_token
                input = get_input_with_manually_prepended_bos(bos, input)  # type: ignore[type-var]
            limit = self.cfg.n_ctx if truncate else None
            pads = (
                self.tokenizer.pad_token_id is not None
            )  # one text needs no padding, and some tokenizers have none
            tokens = self.tokenizer(
                input, return_tensors="pt", padding=pads, truncation=truncate, max_length=limit
            )["input_ids"]
            if automatic and not wanted:
                tokens = get_tokens_with_bos_removed(self.tokenizer, tokens)
            return tokens.to(self.cfg.device) if move_to_device else tokens

    def to_string(self, tokens: int | TokenRows) -> str | list[str]:
        """The text of a row of ids, or a list of texts for several rows; ValueError for more axes."""
        assert self.tokenizer is not None, "Cannot use to_string without a tokenizer"
        ids = tokens if isinstance(tokens, Tensor) else torch.tensor(tokens)
        if ids.ndim > 2:
            raise ValueError(f"Invalid shape passed in: {ids.shape}")
        decode = self.tokenizer.batch_decode if ids.ndim == 2 else self.tokenizer.decode
        return cast("str | list[str]", decode(ids, clean_up_tokenization_spaces=False))

    def to_str_tokens(
        self,
        input: str | TokenRows,
        prepend_bos: bool | None = USE_DEFAULT_VALUE,
        padding_side: str | None = USE_DEFAULT_VALUE,
    ) -> list[Any]:
        """The text of each token of one text or row of ids; a list of lists for a list.

        Raises:
            ValueError: another type.
            AssertionError: several rows.
        """
        assert self.tokenizer is not None, "Cannot use to_str_tokens without a tokenizer"
        if isinstance(input, list):
            return [self.to_str_tokens(each, prepend_bos, padding_side) for each in input]
        if isinstance(input, str):
            ids: Any = self.to_tokens(input, prepend_bos=prepend_bos, padding_side=padding_side)[0]
        elif isinstance(input, Tensor | np.ndarray):
            ids = input.squeeze()
            ids = ids[None] if ids.ndim == 0 else ids
            assert ids.ndim == 1, f"Invalid tokens input to to_str_tokens, has shape: {ids.shape}"
        else:
            raise ValueError(f"Invalid input type to to_str_tokens: {type(input)}")
        rows = [[int(token)] for token in ids]
        return list(self.tokenizer.batch_decode(rows, clean_up_tokenization_spaces=False))

    def to_single_token(self, string: str) -> int:
        """The id of a text that is one token; AssertionError if it is several."""
        token = self.to_tokens(string, prepend_bos=False).squeeze()
        assert not token.shape, f"Input string: {string} is not a single token!"
        return int(token)

    def to_single_str_token(self, int_token: int) -> str:
        """The text of one token."""
        assert isinstance(int_token, int), f"an int is required, got {type(int_token).__name__}"
        (text,) = self.to_str_tokens(torch.tensor([int_token]))
        return str(text)

    def get_token_position(
        self,
        single_token: str | int | Tensor,
        input: str | Shaped[Tensor, "p"] | Shaped[Tensor, "1 p"],
        mode: str = "first",
        prepend_bos: bool | None = USE_DEFAULT_VALUE,
        padding_side: str | None = USE_DEFAULT_VALUE,
    ) -> int:
        """The "first" or "last" position of a token; AssertionError if it does not occur."""
        if isinstance(input, str):
            input = self.to_tokens(input, prepend_bos=prepend_bos, padding_side=padding_side)
        if input.ndim == 2:
            assert len(input) == 1, (
                f"If tokens are rank two, they must have shape [1, seq_len], not {input.shape}"
            )
            input = input[0]
        token = self.to_single_token(single_token) if isinstance(single_token, str) else int(single_token)
        places = (input == token).nonzero()[:, 0]
        assert len(places) > 0, "The token does not occur in the prompt"
        if mode not in ("first", "last"):
            raise ValueError(f"mode must be 'first' or 'last', not {mode}")
        return int(places[0 if mode == "first" else -1])

    def tokens_to_residual_directions(self, tokens: str | int | Int[Tensor, "..."]) -> Float[Tensor, "... d"]:
        """The column of W_U of each token: `[d]` for one token, `[... d]` for a tensor of several.

        With a final norm that was not folded in, the stream is scaled by gamma before it meets them.
        """
        if isinstance(tokens, Tensor) and tokens.numel() > 1:
            return rearrange(self.W_U[:, tokens], "d ... -> ... d")
        if not isinstance(tokens, str | int | Tensor):
            raise ValueError(f"Invalid token type: {type(tokens)}")
        token = self.to_single_token(tokens) if isinstance(tokens, str) else int(tokens)
        return cast(Tensor, self.W_U[:, token])
