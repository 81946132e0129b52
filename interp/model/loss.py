"""The language-model loss, in nats, with padding and packed texts left out."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.core.axes import shape_text
from interp.core.boundary import public
from interp.model.transformer import Transformer

IGNORED = -100
"""A target that counts for nothing in `F.cross_entropy`."""


@public(plain_pass=True)
def next_token_loss(
    logits: Float[Tensor, "b p v"],
    tokens: Int[Tensor, "b p"],
    keep: Bool[Tensor, "b p"] | None = None,
    documents: Int[Tensor, "b p"] | None = None,
    *,
    label_smoothing: float = 0.0,
) -> Float[Tensor, "b p-1"]:
    """Cross-entropy in nats of each token given the tokens before it.

    Args:
        logits: [b, p, v].
        tokens: [b, p], the ids of the same rows.
        keep: [b, p], True at real tokens; None: all are real.
        documents: [b, p], the number of each token's text in packed rows; None: one text a row. The first token of a
            text is not predicted from the text before it.
        label_smoothing: share of each target that is spread evenly over all tokens, in [0, 1).

    Returns:
        [b, p-1] in nats, in float32 at least. Column i is the loss of token i + 1; it is 0 where nothing predicts
        that token (see `predicted`). For a mean divide the sum by `predicted(keep, documents).sum()`.

    Raises:
        ValueError: rows of a single token, which predict nothing, tensors whose shapes do not fit, or a label
            smoothing outside [0, 1).

    See Also:
        `mean_next_token_loss`: one number. `next_token_loss_of`: from the final stream, without all logits.
    """
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing in [0, 1) is required, got {label_smoothing}")
    if tokens.shape[1] < 2:
        raise ValueError(f"a loss requires at least two tokens, got shape {shape_text(tokens.shape)}")
    if logits.shape[:2] != tokens.shape:
        raise ValueError(
            f"logits of every token, {shape_text(tokens.shape)}, are required, got {shape_text(logits.shape)}"
        )
    for name, mask in {"keep": keep, "documents": documents}.items():
        if mask is not None and mask.shape != tokens.shape:
            raise ValueError(
                f"{name} must have the shape {shape_text(tokens.shape)}, got {shape_text(mask.shape)}"
            )
    wide = torch.promote_types(logits.dtype, torch.float32)
    targets = _targets(tokens, logits.shape[-1])
    target = F.pad(targets, (0, 1), value=IGNORED)  # the last column predicts nothing: no logits are copied
    flat = F.cross_entropy(
        logits.to(wide).flatten(0, 1), target.flatten(), ignore_index=IGNORED, reduction="none",
        label_smoothing=label_smoothing,
    )  # fmt: skip
    loss = flat.view(tokens.shape)[:, :-1]
    counted = predicted(keep, documents)
    return loss if counted is None else loss * counted


def _targets(tokens: Int[Tensor, "b p"], logits: int) -> Int[Tensor, "b p-1"]:
    """The tokens that are predicted, as int64; on a CPU a ValueError for one that has no logit."""
    targets = tokens[:, 1:].long()
    if tokens.device.type == "cpu":
        low, high = map(int, targets.aminmax())
        if low < 0 or high >= logits:
            wrong = low if low < 0 else high
            raise ValueError(
                f"a next-token loss requires a logit for each token, got {logits} and the token {wrong}"
            )
    return targets


@public(plain_pass=True)
def next_token_loss_of(
    model: Transformer,
    stream: Float[Tensor, "b p d"],
    tokens: Int[Tensor, "b p"],
    keep: Bool[Tensor, "b p"] | None = None,
    documents: Int[Tensor, "b p"] | None = None,
) -> Float[Tensor, "b p-1"]:
    """Cross-entropy in nats of each token, from the final residual stream instead of the logits.

    Adaptive and hierarchical output layers compute the targets' probabilities alone, never a row of the vocabulary.

    Args:
        model: the network that the stream is of.
        stream: [b, p, d] before the final norm, `model(tokens, stop=n_layers)`, in the model's dtype.
        tokens: [b, p], the ids of the same rows.
        keep: [b, p], True at real tokens; None: all are real.
        documents: [b, p], the number of each token's text in packed rows; None: one text a row.

    Returns:
        [b, p-1] in nats, as `next_token_loss`.

    Raises:
        ValueError: as `next_token_loss`, a stream of another shape or dtype, or a model that ends in its residual
            stream.
    """
    if not model.config.unembed:
        raise ValueError("a loss requires logits; this model ends in its residual stream")
    model.config.require_tokens("a next-token loss")
    shape = (*tokens.shape, model.config.d_model)
    if stream.shape != shape:
        raise ValueError(f"stream must have the shape {shape_text(shape)}, got {shape_text(stream.shape)}")
    if stream.dtype != model.dtype:
        raise ValueError(f"stream must be of the model's dtype {model.dtype}, got {stream.dtype}")
    if model.output is None:
        return next_token_loss(model.read_out(stream), tokens, keep, documents)
    if tokens.shape[1] < 2:
        raise ValueError(f"a loss requires at least two tokens, got shape {shape_text(tokens.shape)}")
    x = model.ln_final(stream[:, :-1])
    targets = _targets(tokens, model.config.d_vocab)
    loss = model.output.loss(x.flatten(0, 1), targets.flatten()).unflatten(0, x.shape[:2])
    counted = predicted(keep, documents)
    return loss if counted is None else loss * counted


@public(plain_pass=True)
def mean_next_token_loss(
    logits: Float[Tensor, "b p v"],
    tokens: Int[Tensor, "b p"],
    keep: Bool[Tensor, "b p"] | None = None,
    documents: Int[Tensor, "b p"] | None = None,
) -> Float[Tensor, ""]:
    """Mean cross-entropy in nats over all tokens that are predicted.

    Args:
        logits: [b, p, v].
        tokens: [b, p], the ids of the same rows.
        keep: [b, p], True at real tokens; None: all are real.
        documents: [b, p], the number of each token's text in packed rows; None: one text a row.

    Returns:
        One number, in nats.

    Raises:
        ValueError: as `next_token_loss`, or no token that is predicted.
    """
    loss, counted = next_token_loss(logits, tokens, keep, documents), predicted(keep, documents)
    if counted is None:
        return loss.mean()
    if not bool(counted.any()):
        raise ValueError("a loss requires two neighbouring real tokens; the keep-mask leaves none")
    return loss.sum() / counted.sum()


def predicted(
    keep: Bool[Tensor, "b p"] | None, documents: Int[Tensor, "b p"] | None = None
) -> Bool[Tensor, "b p-1"] | None:
    """Which of the tokens from the second on are predicted: both they and their predecessor are real and of one text.

    None: all of them.
    """
    counted = None if keep is None else keep[:, 1:] & keep[:, :-1]
    if documents is None:
        return counted
    same = documents[:, 1:] == documents[:, :-1]
    return same if counted is None else counted & same
