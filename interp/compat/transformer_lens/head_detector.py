"""TransformerLens' head detector: how well heads' attention patterns match that of a known kind of head.

Natively `interp.heads` scores every head on repeated random tokens with a baseline; this is the one prompt's version.
"""

import logging
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, Protocol, cast, get_args, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.compat.transformer_lens.tensors import is_lower_triangular, is_square

HeadName = Literal["previous_token_head", "duplicate_token_head", "induction_head"]
HEAD_NAMES = cast(list[HeadName], get_args(HeadName))
ErrorMeasure = Literal["abs", "mul"]
LayerHeadTuple = tuple[int, int]
LayerToHead = dict[int, list[int]]

INVALID_HEAD_NAME_ERR = f"detection_pattern must be a Tensor or one of head names: {HEAD_NAMES}; got %s"
CACHE_WITH_SEQ_LIST_ERR = (
    "`cache` cannot be reused across multiple prompts: it holds the activations of one. Give one prompt at a time, or "
    "no cache."
)
SEQ_LEN_ERR = "The sequence must be non-empty and must fit within the model's context window."
DET_PAT_NOT_SQUARE_ERR = (
    "The detection pattern must be a lower triangular matrix of shape (sequence_length, sequence_length); "
    "sequence_length=%d; got detection pattern of shape %s"
)


@runtime_checkable
class PatternCache(Protocol):
    """Attention patterns by `("pattern", layer, "attn")`, `[head, query, key]`."""

    def __getitem__(self, name: Any) -> Tensor:
        """One layer's."""
        ...


def detect_head(
    model: Any,
    seq: str | list[str],
    detection_pattern: Tensor | str,
    heads: Sequence[LayerHeadTuple] | Mapping[int, Sequence[int]] | None = None,
    cache: PatternCache | None = None,
    *,
    exclude_bos: bool = False,
    exclude_current_token: bool = False,
    error_measure: ErrorMeasure = "mul",
) -> Float[Tensor, "layer head"]:
    """The match of each head's attention on a prompt with a pattern; -1 for heads that are not in `heads`.

    Args:
        detection_pattern: a lower triangular matrix, or the name of a kind of head (`HEAD_NAMES`). With several
            prompts and a name the scores are the mean over prompts, each run by itself.
        heads: (layer, head) pairs, or heads by layer; None: all.
        cache: patterns without batch axis of this one prompt; it is not changed.
        exclude_bos: leave out attention to the first token.
        exclude_current_token: leave out the diagonal.
        error_measure: "mul" is the share of attention that falls on the pattern, "abs" one minus the mean over
            queries of |attention - pattern| summed over keys, to three digits, in [-1, 1].

    Raises:
        AssertionError: an unknown measure, kind or shape, or a prompt that is too short or too long.
        ValueError: a cache with several prompts.
    """
    cfg = model.cfg
    tokens = model.to_tokens(seq).to(cfg.device)
    valid = get_args(ErrorMeasure)
    assert error_measure in valid, f"Invalid error_measure={error_measure}; valid values are {valid}"
    if isinstance(detection_pattern, str):
        assert detection_pattern in HEAD_NAMES, INVALID_HEAD_NAME_ERR % detection_pattern
        if isinstance(seq, list):
            if cache is not None:
                raise ValueError(CACHE_WITH_SEQ_LIST_ERR)
            scores = [
                detect_head(
                    model, text, detection_pattern, heads, exclude_bos=exclude_bos,
                    exclude_current_token=exclude_current_token, error_measure=error_measure,
                )
                for text in seq
            ]  # fmt: skip
            return torch.stack(scores).mean(0)
        detection_pattern = _PATTERNS[detection_pattern](tokens.cpu()).to(cfg.device)
    _check(detection_pattern, tokens, cfg.n_ctx, error_measure)
    if cache is None:
        _, cache = model.run_with_cache(tokens, remove_batch_dim=True)
    matches = -torch.ones(cfg.n_layers, cfg.n_heads, dtype=cfg.dtype)
    for layer, layer_heads in _by_layer(heads, cfg.n_layers, cfg.n_heads).items():
        patterns = cache["pattern", layer, "attn"]
        for head in layer_heads:
            matches[layer, head] = compute_head_attention_similarity_score(
                patterns[head], detection_pattern, exclude_bos=exclude_bos,
                exclude_current_token=exclude_current_token, error_measure=error_measure,
            )  # fmt: skip
    return matches


def _check(pattern: Tensor, tokens: Int[Tensor, "b p"], n_ctx: int, measure: ErrorMeasure) -> None:
    if measure == "mul" and not bool(((pattern == 0) | (pattern == 1)).all()):
        logging.warning("Using detection pattern with values other than 0 or 1 with error_measure 'mul'")
    columns = tokens.shape[-1]
    assert 1 < columns < n_ctx, SEQ_LEN_ERR
    assert is_lower_triangular(pattern) and pattern.shape[0] == columns, DET_PAT_NOT_SQUARE_ERR % (
        columns,
        pattern.shape,
    )


def _by_layer(
    heads: Sequence[LayerHeadTuple] | Mapping[int, Sequence[int]] | None, n_layers: int, n_heads: int
) -> Mapping[int, Sequence[int]]:
    if heads is None:
        return {layer: range(n_heads) for layer in range(n_layers)}
    if isinstance(heads, Mapping):
        return heads
    found: dict[int, list[int]] = {}
    for layer, head in heads:
        found.setdefault(layer, []).append(head)
    return found


def get_previous_token_head_detection_pattern(tokens: Int[Tensor, "one p"]) -> Float[Tensor, "p p"]:
    """1 where the key is the token before the query."""
    return torch.ones(tokens.shape[-1] - 1).diag(-1)


def get_duplicate_token_head_detection_pattern(tokens: Int[Tensor, "one p"]) -> Float[Tensor, "p p"]:
    """1 where the key is an earlier copy of the query's token."""
    row = tokens.reshape(-1)
    return (row[:, None] == row).float().tril(-1)


def get_induction_head_detection_pattern(tokens: Int[Tensor, "one p"]) -> Float[Tensor, "p p"]:
    """1 where the key follows an earlier copy of the query's token."""
    shifted = get_duplicate_token_head_detection_pattern(tokens).roll(1, 1)
    shifted[:, 0] = 0
    return shifted.tril()


_PATTERNS = MappingProxyType(
    {
        "previous_token_head": get_previous_token_head_detection_pattern,
        "duplicate_token_head": get_duplicate_token_head_detection_pattern,
        "induction_head": get_induction_head_detection_pattern,
    }
)


def get_supported_heads() -> None:
    """Write the names of the known kinds of heads to stdout."""
    sys.stdout.write(f"Supported heads: {HEAD_NAMES}\n")


def compute_head_attention_similarity_score(
    attention_pattern: Float[Tensor, "..."],
    detection_pattern: Float[Tensor, "..."] | Int[Tensor, "..."],
    *,
    exclude_bos: bool,
    exclude_current_token: bool,
    error_measure: ErrorMeasure,
) -> float:
    """The match of one pattern `[query, key]` with another, see `detect_head`; neither is changed.

    Raises:
        AssertionError: a pattern that is not square, or for "abs" not lower triangular.
    """
    assert is_square(attention_pattern), (
        f"Attention pattern is not square; got shape {attention_pattern.shape}"
    )
    counted = torch.ones_like(attention_pattern, dtype=torch.bool)
    if exclude_bos:
        counted[:, 0] = False
    if exclude_current_token:
        counted.fill_diagonal_(False)
    if error_measure == "mul":
        attention = attention_pattern.where(counted, 0)
        return float((attention * detection_pattern).sum() / attention.sum())
    distance = (attention_pattern - detection_pattern).abs()
    assert is_lower_triangular(distance)
    return 1 - round(float(distance.where(counted, 0).mean() * len(distance)), 3)
