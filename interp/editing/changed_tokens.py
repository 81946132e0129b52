"""Divergence of two models' next-token distributions, token by token.

Over any amount of text: the mean divergence, the losses of both models, and the tokens where the divergence is largest,
with their context.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from interp.core.contexts import ContextExamples, TopInContext, absent
from interp.core.extremes import TopRows, without_empty_ranks
from interp.core.kinds import Count
from interp.core.named import Only, Parts, Several
from interp.core.results import Score, scored
from interp.core.stats import ANYWHERE, FEWEST_LOSSES, POSITIVE, Means, Partial, over, ratio, upcast
from interp.data.batch import Batch
from interp.data.text import Text
from interp.editing.exchange import Other
from interp.model.loss import next_token_loss
from interp.model.transformer import Transformer
from interp.passes.memory import that_fit
from interp.passes.needs import Steps, recorded
from interp.passes.observe import Model, Subject
from interp.passes.question import ByRow, NotFiniteError, Question, Values
from interp.runs.functions import of_data

if TYPE_CHECKING:
    import xarray as xr

ALONG = ("tokens", "kl", "loss", "tuned_loss")
"""Variables that are kept along the context of every place."""
SCORES = {"kl": "tokens", "loss": "predicted", "tuned_loss": "predicted", "loss_change": "predicted"}
"""The scores, and the tokens that each is a mean over: all tokens, or those that have a loss."""
_BOTH = " + number"


@dataclass(frozen=True, eq=False)
class ChangedTokens(Question):
    """Divergence between two models' next-token distributions over a corpus, and the tokens where it is largest.

    Both models run under their own edits, so that a model may be compared with an edited copy of itself.

    Args:
        data: prompts, token ids, a batch, files or a stream of any size.
        tuned: the other model, of the same config and tokenizer; taken in the dtype of this one.
        top: how many places are listed.
        context: how many tokens before and after each one are kept.
        once_per_row: whether a row is listed at its most changed token only. Ties go to the smaller row, then to the
            smaller position.

    Returns:
        Dataset:

        - `value`, `low`, `high`, `n` [score]: means per token, 95 % over texts (NaN below 256), of `kl`, KL(tuned ||
          model) in nats after every token, and of `loss`, `tuned_loss` and `loss_change` (tuned minus model) of every
          predicted token.
        - `peak` [rank]: the divergence there, in nats.
        - `row`, `pos` [rank]: row of the data and position of the token after which the models differ, counted in its
          text with BOS as 0; -1 where there are fewer than `top`.
        - `tokens`, `piece` [rank, offset]: ids and texts of the context; -1 beyond the ends of the text.
        - `kl`, `loss`, `tuned_loss` [rank, offset]: the divergence after each token, and both losses of the token that
          follows it (NaN where there is none).

    Raises:
        ValueError: models of another config or tokenizer, which names what differs, and a model without logits.

    See Also:
        `activation_difference`: what differs inside. `diff`: which parts bring the change about.

    Example:
        >>> tuned = model.edited(interp.Edit("L1.mlp", interp.edits.Zero()))
        >>> changed_tokens(model, [prompt], tuned, top=2).peak.sizes["rank"]
        2
    """

    of_layers: ClassVar[bool] = False

    tuned: Model
    _: KW_ONLY
    top: Count = 10
    context: Sequence[int] = (10, 3)
    once_per_row: bool = True

    def bind(self, model: Subject) -> ByRow:
        """The final streams of both models, reduced batch by batch to the largest divergences and to sums."""
        other, config = Other.of(self.tuned, model), model.transformer.config
        if not config.unembed:
            raise ValueError("next-token distributions are compared; this model ends in its residual stream")
        config.require_tokens("the divergence of next-token distributions, beside their losses,")
        if self.top < 1 or len(self.context) != 2 or min(self.context) < 0:
            raise ValueError(
                f"at least one place and how many tokens before and after it are required, got top={self.top} and "
                f"context={list(self.context)}"
            )
        before, after = self.context
        rule = TopRows(self.top, "kl", 1, once_per_row=self.once_per_row, before=before, after=after)
        sums = [f"{name}{end}" for name in SCORES for end in (" sum", _BOTH)]
        return ByRow(
            self.name,
            partial(_rows, other=other),
            Several(
                {
                    "examples": TopInContext(rule, ALONG),
                    "sums": Only((*sums, "tokens number", "predicted number"), Means),
                }
            ),
            partial(_finish, name=self.name, text=model.text),
        )


changed_tokens = of_data(ChangedTokens)


@torch.no_grad()
def _rows(model: Transformer, batch: Batch, other: Other) -> Steps[Values]:
    """Divergence and losses at every token of each text, and their sums."""
    tuned, config = other.on_device_of(model), model.config
    base_end = (yield from recorded(batch, [], final=True)).end
    streams = base_end, (yield from recorded(batch, [], final=True, model=tuned)).end
    size = that_fit(model, 32 * config.n_outputs * batch.tokens.shape[1])
    parts = [
        _kl_and_losses(batch.rows(rows), (model, streams[0][rows]), (tuned, streams[1][rows]))
        for rows in torch.arange(len(batch), device=batch.tokens.device).split(size)
    ]
    kl, loss, tuned_loss = (torch.cat(chunks) for chunks in zip(*parts, strict=True))
    if not bool((kl.isfinite() | ~batch.real).all()):
        raise NotFiniteError("the divergence of the two models is NaN or infinite after some token")
    counted = batch.predicted
    counted_places = torch.zeros_like(batch.real)
    counted_places[:, :-1] = True if counted is None else counted
    by_row = {"tokens": batch.tokens, "kl": kl.masked_fill(~batch.real, torch.nan)}
    by_row |= {
        name: x.masked_fill(~counted_places, torch.nan)
        for name, x in (("loss", loss), ("tuned_loss", tuned_loss))
    }
    by_text = {name: batch.by_text(x, batch.real, absent(x)) for name, x in by_row.items()}
    return by_text | _sums(by_text) | {"kl": by_text["kl"][..., None]}  # one cell


def _sums(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sums over the tokens of every text, the number of tokens in each sum, and both added up (for the ratio)."""
    terms = {**values, "loss_change": values["tuned_loss"] - values["loss"]}
    number = {
        "tokens": (~values["kl"].isnan()).sum(1).double(), "predicted": (~values["loss"].isnan()).sum(1).double()
    }  # fmt: skip
    sums = {f"{name} number": x for name, x in number.items()}
    for name, of in SCORES.items():
        total = terms[name].nansum(1, dtype=torch.float64)
        sums |= {f"{name} sum": total, f"{name}{_BOTH}": total + number[of]}
    return sums


def _kl_and_losses(
    batch: Batch, base: tuple[Transformer, Tensor], tuned: tuple[Transformer, Tensor]
) -> tuple[Float[Tensor, "b p"], Float[Tensor, "b p"], Float[Tensor, "b p"]]:
    """KL(tuned || base) after every token, and the loss of the next one in both."""
    logits = [model.read_out(upcast(stream)) for model, stream in (base, tuned)]
    base_logp, tuned_logp = (x.log_softmax(-1) for x in logits)
    kl = (tuned_logp.exp() * (tuned_logp - base_logp)).sum(-1)
    losses = [torch.zeros_like(kl) for _ in logits]
    if batch.tokens.shape[1] > 1:
        for into, x in zip(losses, logits, strict=True):
            into[:, :-1] = next_token_loss(x, batch.tokens, batch.keep, batch.documents)
    return kl, losses[0], losses[1]


def _finish(merged: Partial, name: str, text: Text) -> xr.Dataset:
    assert isinstance(merged, Parts)
    examples, sums = merged.parts["examples"], merged.parts["sums"]
    assert isinstance(examples, ContextExamples) and isinstance(sums, Means)
    top, entry = examples.top, ("rank",)
    rule = top.rule
    values: dict[str, tuple[Sequence[str], Tensor]] = {
        "peak": (entry, top.values[0]), "row": (entry, top.rows[0]), "pos": (entry, top.positions[0]),
        **{variable: ((*entry, "offset"), x[0]) for variable, x in examples.along.items()},
    }  # fmt: skip
    result = scored(
        name,
        {score: _mean(sums, score) for score in SCORES},
        (),
        coords={"rank": range(top.rows.shape[-1]), "offset": range(-rule.before, rule.after + 1)},
        others=values,
        units=dict.fromkeys(("peak", *ALONG[1:]), "nats"),
        attrs={
            "kl": "KL(tuned || model) of the next-token distributions after a token",
            "pos": "tokens before it in its text", "order": "the largest first; ties by row, then pos",
            "interval": over("texts", FEWEST_LOSSES),
        },
        notes=top.notes(),
    )  # fmt: skip
    return text.worded(without_empty_ranks(result, rule), piece="tokens")


def _mean(sums: Means, name: str) -> Score:
    """Mean per token of one score: its sums over texts divided by the numbers of tokens."""
    total, number, combined = (
        sums.moments[x] for x in (f"{name} sum", f"{SCORES[name]} number", f"{name}{_BOTH}")
    )
    value, low, high = ratio(
        total, number, combined, FEWEST_LOSSES, within=POSITIVE if name == "kl" else ANYWHERE
    )
    return Score(value, low, high, total.count(), torch.full_like(value, torch.nan), "nats per token")
