"""Mean difference between the streams of two models, layer by layer, read as tokens.

The mean over prompts of (tuned - base) is what fine-tuning adds to the stream in every text. It is a direction, which
the unembedding turns into logits of tokens (`interp.weights.directions`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from interp.core.kinds import Count
from interp.core.results import Score, scored
from interp.core.stats import POSITIVE, Means, Moments, Partial, over, upcast
from interp.data.batch import Batch
from interp.editing.exchange import Other
from interp.model import sites
from interp.model.parts import Part
from interp.model.tap import Read
from interp.model.transformer import Transformer
from interp.passes.needs import Steps, recorded
from interp.passes.observe import Model, Subject
from interp.passes.question import ByRow, NotFiniteError, Question, Values
from interp.runs.functions import of_data
from interp.weights.directions import Directions

if TYPE_CHECKING:
    import xarray as xr

FEWEST_LENGTHS = 16
"""Fewest prompts for an interval of a mean length (`docs/intervals.md`)."""
TokenChoice = Literal["last", "all"]
"""The tokens at which the streams are compared."""


@dataclass(frozen=True, eq=False)
class ActivationDifference(Question):
    """Mean difference between the residual streams of two models, by depth and as tokens.

    The mean over prompts of (tuned - base) is what fine-tuning adds to the stream in every text. Both models run under
    their own edits, so that a model may be compared with an edited copy of itself.

    Args:
        data: prompts, token ids, a batch, files or a stream of any size.
        tuned: the other model, of the same config and tokenizer; taken in the dtype of this one.
        pos: tokens that are compared: "last", the last token of each prompt, or "all", the mean over its tokens, BOS
            included.
        top: how many tokens are listed at each end.

    Returns:
        Dataset; `end` is top or bottom, rank 0 the most extreme.

        - `logits` [depth, end, rank]: what the mean difference adds to a token's logit (the final norm at scale 1,
          centred over the vocabulary, with the unembedding of `model`).
        - `token`, `token_id` [depth, end, rank], coordinates: text and id of the token.
        - `value`, `low`, `high`, `null`, `n` [depth, score]: of `relative`, the length of the difference by that of the
          stream of `model`, mean over prompts, with its 95 % interval from 16 on; and of `common`, the length of the
          mean difference by the mean length: 1 = the same vector in every prompt. The null of `common` is what as many
          prompts would leave of vectors of these lengths in unrelated directions.

    Raises:
        ValueError: models of another config or tokenizer, which names what differs.

    Caveats:
        What is not common to the prompts averages out, so where `common` is small the listed tokens say little. At
        earlier depths later layers still transform the difference; only at the last depth is `logits` the change of
        the logits (but for the scale of the final norm).

    See Also:
        `changed_tokens`: where the predictions of both models differ. `diff`: which parts bring the change about.

    Example:
        >>> tuned = model.edited(interp.Edit("L1.mlp", interp.edits.Zero()))
        >>> found = activation_difference(model, [prompt], tuned, top=3)
        >>> found.token.dims, float(found.value.sel(depth="L1.resid", score="relative"))
        (('depth', 'end', 'rank'), 0.0)
    """

    of_layers: ClassVar[bool] = False

    tuned: Model
    _: KW_ONLY
    pos: TokenChoice = "last"
    top: Count = 10

    def bind(self, model: Subject) -> ByRow:
        """The difference of both streams at every depth, summed over prompts and read as tokens at the end."""
        other, config = Other.of(self.tuned, model), model.transformer.config
        blocks = [Read(f"blocks.{layer}.hook_resid_pre") for layer in range(config.n_layers)]
        reads = [*blocks, Read(sites.final_stream(config))]
        question = Directions(torch.ones(1, config.d_model), top=self.top)
        question.bind(model)  # refuses a model whose stream cannot be read as tokens, and too many of them
        return ByRow(
            self.name,
            partial(_rows, reads=reads, other=other, last=self.pos == "last"),
            Means,
            partial(_finish, name=self.name, model=model, reads=reads, question=self),
        )


activation_difference = of_data(ActivationDifference)


@torch.no_grad()
def _rows(model: Transformer, batch: Batch, reads: Sequence[Read], other: Other, last: bool) -> Steps[Values]:
    """For every prompt and depth: the mean difference of the two streams over tokens, and means of its lengths."""
    trace = (yield from recorded(batch, reads)).trace
    tuned_trace = (yield from recorded(batch, reads, model=other.on_device_of(model))).trace
    counted = batch.real
    if last:
        counted = torch.zeros_like(batch.real).scatter(1, batch.last()[:, None], value=True)
    by_name: dict[str, list[Tensor]] = {"difference": [], "length": [], "square": [], "relative": []}
    for read in reads:
        value = upcast(trace[read])
        difference = upcast(tuned_trace[read]) - value
        if not bool((difference.isfinite().all(-1) | ~batch.real).all()):
            raise NotFiniteError(f"the difference of the two models at {read.site} is NaN or infinite")
        length = difference.norm(dim=-1)
        relative = (length / value.norm(dim=-1)).masked_fill(length == 0, 0.0)
        by_name["difference"].append(_mean(difference.mT, batch, counted))
        by_name["length"].append(_mean(length, batch, counted))
        by_name["relative"].append(_mean(relative, batch, counted))
    by_name["square"] = [x.square().sum(-1) for x in by_name["difference"]]
    return {name: torch.stack(of_depths, 1) for name, of_depths in by_name.items()}


def _mean(value: Float[Tensor, "b *d p"], batch: Batch, counted: Tensor) -> Float[Tensor, "n *d"]:
    """Mean over the tokens at which the mask `counted` is True, for every row."""
    mask = counted if value.ndim == 2 else counted[:, None]
    return value.double().masked_fill(~mask, 0.0).sum(-1) / mask.sum(-1)


def _finish(
    merged: Partial, name: str, model: Subject, reads: Sequence[Read], question: ActivationDifference
) -> xr.Dataset:
    assert isinstance(merged, Means)
    moments = merged.moments
    lists = Directions(moments["difference"].mean, top=question.top).bind(model).answer()
    lists = lists.rename(direction="depth")
    relative = Score.of(
        moments["relative"], "share of the stream's length", fewest=FEWEST_LENGTHS, within=POSITIVE
    )
    result = scored(
        name,
        {"relative": relative, "common": _common(moments)},
        ("depth",),
        coords={"depth": [str(Part.of(read.site)) for read in reads]},
        attrs={
            "pos": "the last token" if question.pos == "last" else "mean over tokens",
            "written": lists.attrs["written"], "written_factor": lists.attrs["written_factor"],
            "interval": over("prompts", FEWEST_LENGTHS),
        },
    )  # fmt: skip
    logits = lists.value.drop_vars("depth").assign_attrs(unit=lists.attrs["unit"])
    return result.assign(logits=logits)


def _common(moments: Mapping[str, Moments]) -> Score:
    """Norm of the mean difference over the mean of its norms; null: the same for random directions of these norms."""
    length, n = moments["length"].mean, moments["length"].n
    unchanged = length == 0
    value = (moments["difference"].mean.norm(dim=-1) / length).masked_fill(unchanged, torch.nan)
    null = ((moments["square"].mean / n).sqrt() / length).masked_fill(unchanged, torch.nan)
    no_interval = torch.full_like(value, torch.nan)
    return Score(value, no_interval, no_interval, moments["length"].count(), null, "share of the mean length")
