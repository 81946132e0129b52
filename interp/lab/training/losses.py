"""Training data, a model's loss on it, and its accuracy on what the context determines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from interp.core.boundary import public
from interp.core.kinds import Positive, PositiveCount, Probability
from interp.core.stats import upcast
from interp.families.convert import AnyModel
from interp.lab.training.segments import logits_by_segment
from interp.model.edits import Edit
from interp.model.encoder_decoder import EncoderDecoder
from interp.model.loss import next_token_loss, next_token_loss_of
from interp.model.tap import Tap
from interp.tasks.examples import Examples, Place


@runtime_checkable
class TrainingData(Protocol):
    """Protocol of training data: rows by their place only, so that a run can go on anywhere.

    A frozen dataclass of numbers and texts is described by its fields; anything else needs a `description`.
    """

    @property
    def d_vocab(self) -> int:
        """How many token ids it uses."""
        ...

    @property
    def width(self) -> int:
        """Tokens of the longest row."""
        ...

    def batch(self, place: Place, rows: int) -> Examples:
        """The rows of a place; of the held-out place, rows that no step has."""
        ...


def logits(
    model: AnyModel, examples: Examples, edits: Sequence[Edit] = (), segment: int | None = None
) -> Float[Tensor, "b p v"]:
    """Logits of every token; packed texts see themselves only. ValueError for rows of the other kind of model.

    With `segment` gradients stop where every so many columns begin (`logits_by_segment`).
    """
    tap = Tap(edits=edits) if edits else None
    batch, source = examples.batch, examples.source
    pair = isinstance(model, EncoderDecoder)
    if pair != (source is not None):
        kind = "an encoder-decoder requires sources" if pair else "one stack of layers has no sources to read"
        raise ValueError(f"{kind}; the data has {'none' if source is None else 'them'}")
    if isinstance(model, EncoderDecoder):
        assert source is not None
        if segment is not None:
            raise ValueError("segments require one causal stack of layers, not an encoder-decoder")
        return model(source.tokens, batch.tokens, tap, source_keep=source.keep, target_keep=batch.keep)
    if segment is not None:
        return logits_by_segment(model, batch, segment, tap)
    return model(batch.tokens, tap, **batch.inputs)


@public()
@dataclass(frozen=True, eq=False, repr=False)
class Distillation:
    """A teacher, and how much of each target its predictions are.

    A token's loss is (1 - share) of its own, from the token that comes, plus share T^2 KL(teacher || model), T the
    temperature that divides the logits of both; T^2 keeps the size of the gradient.

    Args:
        teacher: a network with the same vocabulary; it gets no gradient.
        temperature: T; the higher, the more the order of the improbable tokens counts.
        share: 1: the teacher alone.

    Raises:
        ValueError: numbers out of range.

    Source:
        Hinton et al. 2015, "Distilling the Knowledge in a Neural Network", section 2.

    Example:
        >>> interp.lab.training.Distillation(model.transformer, temperature=3.0).share
        0.5
    """

    teacher: AnyModel
    temperature: Positive = 2.0
    share: Probability = 0.5

    def __repr__(self) -> str:
        size = sum(p.numel() for p in self.teacher.parameters())
        return f"Distillation(a teacher of {size} parameters, temperature={self.temperature}, share={self.share})"

    def mixed(
        self, hard: Float[Tensor, "b p1"], found: Float[Tensor, "b p v"], examples: Examples
    ) -> Float[Tensor, "b p1"]:
        """The losses of each predicted token with the teacher's share.

        Args:
            hard: [b, p - 1], the losses from the tokens alone, 0 where nothing is predicted.
            found: [b, p, v], the model's logits.
            examples: the rows.

        Returns:
            [b, p - 1], in nats.

        Raises:
            ValueError: a teacher of another vocabulary.
        """
        with torch.no_grad():
            given = logits(self.teacher, examples.to(self.teacher.device)).to(found.device)
        if given.shape != found.shape:
            raise ValueError(
                f"a teacher of the same vocabulary is required, it has {given.shape[-1]} tokens for {found.shape[-1]}"
            )
        said, told = (upcast(x[:, :-1] / self.temperature).log_softmax(-1) for x in (found, given))
        apart = (told.exp() * (told - said)).sum(-1) * self.temperature**2
        return (1 - self.share) * hard + self.share * apart * examples.counted


@public()
def mean_loss(
    model: AnyModel,
    examples: Examples,
    *,
    determined_only: bool = False,
    label_smoothing: float = 0.0,
    edits: Sequence[Edit] = (),
    segment: PositiveCount | None = None,
    distillation: Distillation | None = None,
) -> Float[Tensor, ""]:
    """Mean cross-entropy in nats per token that is predicted, or per token that the context determines.

    Args:
        model: the network.
        examples: the rows. Rows with a weight have their losses multiplied by it; the divisor is the number of tokens
            all the same.
        determined_only: count only the tokens that the context determines.
        label_smoothing: the share s of each target that is spread evenly over all tokens, so that a loss is (1 - s)
            (-log p(target)) + s mean(-log p) (Szegedy et al. 2016, section 7).
        edits: interventions of the pass (`Dropout.edits`).
        segment: number of columns after which gradients stop: keys, values and states of earlier ones are constants,
            and the loss stays what it is (Transformer-XL, Dai et al. 2019, with `interp.lab.Segments`). None: nowhere.
        distillation: a teacher, whose predictions take the place of a share of each target.

    Returns:
        One number, in nats; NaN if the context determines no token of these rows.

    Raises:
        ValueError: `determined_only` with data that do not say which tokens are determined; `segment` with packed rows,
            an encoder-decoder or a model that is not causal; a teacher of another vocabulary.
    """
    batch = examples.batch
    losses = _losses(model, examples, label_smoothing, edits, segment, distillation)
    losses = losses.contiguous()  # sums of views have other bits
    if examples.weight is not None:
        losses = losses * examples.weight[:, None]
    if determined_only:
        asked = examples.predicted(determined_only=True)
        return (losses * asked).sum() / asked.sum()
    if batch.keep is None and batch.documents is None:
        return losses.mean()
    return losses.sum() / examples.counted.sum()


def _losses(
    model: AnyModel,
    examples: Examples,
    smoothing: float,
    edits: Sequence[Edit],
    segment: int | None,
    distillation: Distillation | None,
) -> Float[Tensor, "b _"]:
    """Nats per predicted token.

    Under adaptive and hierarchical output layers without a row of the vocabulary, unless labels are smoothed or taught.
    """
    batch = examples.batch
    whole = smoothing or segment is not None or distillation is not None
    if isinstance(model, EncoderDecoder) or examples.source is not None or model.output is None or whole:
        found = logits(model, examples, edits, segment)
        hard = next_token_loss(found, batch.tokens, batch.keep, batch.documents, label_smoothing=smoothing)
        return hard if distillation is None else distillation.mixed(hard, found, examples)
    tap = Tap(edits=edits) if edits else None
    n_layers = model.config.n_layers
    stream = model(batch.tokens, tap, stop=n_layers, **batch.inputs)
    return next_token_loss_of(model, stream, batch.tokens, batch.keep, batch.documents)


@public()
@torch.no_grad()
def scores(model: AnyModel, examples: Examples, *, rows_at_once: int = 32) -> dict[str, float]:
    """Held-out loss and accuracy of a model on some rows.

    Args:
        model: the network.
        examples: the rows.
        rows_at_once: rows of a pass.

    Returns:
        `held_out_loss`, nats per predicted token, and `accuracy`, of the tokens that the context determines (of all
        predicted ones, where the data does not say) the share whose logit is the largest, given all tokens before
        (teacher forcing).

    Raises:
        ValueError: no token that is predicted, none determined, or rows_at_once < 1.
    """
    if rows_at_once < 1:
        raise ValueError(f"rows_at_once must be at least 1, got {rows_at_once}")
    sums = torch.zeros(4, dtype=torch.float64, device=model.device)
    for part in (each.to(model.device) for each in examples.split(rows_at_once)):
        batch, counted = part.batch, part.counted
        found = logits(model, part)
        losses = next_token_loss(found, batch.tokens, batch.keep, batch.documents)
        asked = counted if part.determined is None else part.determined
        right = (found[:, :-1].argmax(-1) == batch.tokens[:, 1:]) & asked
        sums += torch.stack([each.sum(dtype=torch.float64) for each in (losses, counted, right, asked)])
    loss, count, right, asked = sums.tolist()
    if not (count and asked):
        raise ValueError(f"held-out rows require tokens to predict, got {count:.0f}, {asked:.0f} determined")
    return {"held_out_loss": loss / count, "accuracy": right / asked}
