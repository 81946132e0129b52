"""Several lenses on the same states: how far each is from the model's answer at every depth, and how much is chance.

One pass per batch for all of them. A lens is what states go through before the final norm reads them: nothing (the
logit lens), a `TunedLens`, a `FittedJacobianLens`. Stability is asked of two fits of one kind, on halves of a corpus.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from interp.core.results import Score, scored
from interp.core.stats import FEWEST, POSITIVE, MaskedMeans, Means, Moments, Partial, if_at_least, over
from interp.data.batch import Batch
from interp.lenses.lens import LogitLens, Translators
from interp.model.parts import Part
from interp.model.tap import Trace
from interp.model.transformer import Transformer
from interp.passes.observe import Subject
from interp.passes.question import ByRow, Question, Reading
from interp.runs.functions import of_data

if TYPE_CHECKING:
    import xarray as xr

UNITS = {
    "kl": "nats",
    "cross_entropy": "nats",
    "top_agreement": "share of tokens",
    "stability": "share of tokens",
}
FEWEST_DIVERGENCES = 16
"""Fewest prompts for an interval of the mean of a divergence, which is skewed."""


@dataclass(frozen=True, eq=False)
class CompareLenses(Question):
    """How far several lenses are from the model's own answer at every depth, on the same prompts.

    Args:
        data: prompts, token ids, a batch, files or a stream of any size.
        lenses: by name, the lenses to compare: None (the logit lens), a `TunedLens`, a `FittedJacobianLens`.
        others: by the same names, another fit of some of these lenses, on other prompts, for `stability`; None: no
            other fits.
        sites: states to read, as in `logit_lens`. A Jacobian lens reads `resid_post`, a tuned lens the sites that it
            was trained for.

    Returns:
        Dataset[lens, depth, score]. The scores are `kl`, KL(final || lens) in nats; `cross_entropy`, that plus the
        entropy of the final distribution; `top_agreement`, the share of tokens whose most probable next token is the
        model's; `stability`, the share where it is that of the lens' other fit (NaN where there is none).

        - `value`: mean over each prompt's tokens, then over prompts.
        - `low`, `high`: 95 % interval over prompts; of `kl` from 16 prompts on.
        - `n`: number of prompts.

    Raises:
        ValueError: as `logit_lens`; no lens.
        KeyError: another fit of a lens that is not there; a site that the model or a lens lacks.

    See Also:
        `logit_lens`: what one lens says of each prompt.

    Example:
        >>> fit = interp.lenses.jacobian_lens(model, [prompt], skip=1)
        >>> compare_lenses(model, prompt, {"logit lens": None, "Jacobian lens": fit}).value.dims
        ('lens', 'depth', 'score')
    """

    of_layers: ClassVar[bool] = False

    lenses: Mapping[str, Translators | None]
    _: KW_ONLY
    others: Mapping[str, Translators] | None = None
    sites: str | Sequence[str] = "resid_post"

    def bind(self, model: Subject) -> ByRow:
        """The states, read by every lens."""
        if not self.lenses:
            raise ValueError("lenses requires at least one, by name, got none")
        other_lenses = self.others or {}
        if unknown := [name for name in other_lenses if name not in self.lenses]:
            raise KeyError(
                f"another fit of {unknown[0]!r} requires that lens; there are {', '.join(self.lenses)}"
            )
        fits, others = (
            {
                name: LogitLens(top=1, sites=self.sites, translators=lens).reading(model)
                for name, lens in named_lenses.items()
            }
            for named_lenses in (self.lenses, other_lenses)
        )
        reads = next(iter(fits.values())).reads
        return ByRow(
            self.name,
            Reading(reads, partial(_compute, fits=fits, others=others)),
            MaskedMeans,
            partial(_finish, name=self.name, names=tuple(self.lenses), sites=[read.site for read in reads]),
        )


compare_lenses = of_data(CompareLenses)


@torch.no_grad()
def _compute(
    trace: Trace,
    batch: Batch,
    model: Transformer,
    fits: Mapping[str, Reading],
    others: Mapping[str, Reading],
) -> Mapping[str, Tensor]:
    """Each score of every text, the mean over its tokens: `[b lens depth]`."""
    outputs = [lens.compute(trace, batch, model) for lens in fits.values()]
    kl = torch.stack([output["kl"] for output in outputs], 1).double()  # [b lens depth p]
    entropy = outputs[0]["entropy"][:, -1:].double()
    top = torch.stack([output["top_token"][..., 0] for output in outputs], 1)
    real = top[:, :1, -1:] >= 0
    other_top = torch.full_like(top, -1)
    for i, name in enumerate(fits):
        if name in others:
            other_top[:, i] = others[name].compute(trace, batch, model)["top_token"][..., 0]
    known = real & (other_top >= 0)
    return {
        "kl": _mean(kl, real),
        "cross_entropy": _mean(kl + entropy[:, None], real),
        "top_agreement": _mean((top == top[:, :, -1:]).double(), real),
        "stability": _mean((top == other_top).double(), known),
    }


def _mean(value_blop: Float[Tensor, "b l o p"], counted: Tensor) -> Float[Tensor, "b l o"]:
    """The mean over the tokens that count, the last axis; NaN for a text without such a token."""
    counted = counted.expand_as(value_blop)
    return value_blop.masked_fill(~counted, 0.0).sum(-1) / counted.sum(-1)


def _finish(merged: Partial, name: str, names: Sequence[str], sites: Sequence[str]) -> xr.Dataset:
    """The Dataset[lens, depth, score] from the moments over prompts."""
    assert isinstance(merged, Means)
    scores = {key: _score(merged.moments[key], key) for key in UNITS}
    depths = [str(Part.of(site)) for site in sites]
    interval = f"{over('prompts')}; of kl {if_at_least(FEWEST_DIVERGENCES)}"
    return scored(
        name,
        scores,
        ("lens", "depth"),
        coords={"lens": list(names), "depth": depths},
        attrs={"interval": interval},
    )


def _score(moments: Moments, name: str) -> Score:
    fewest, share = FEWEST_DIVERGENCES if name == "kl" else FEWEST, UNITS[name] == "share of tokens"
    score = Score.of(moments, UNITS[name], share=share, fewest=fewest, within=POSITIVE)
    return score._replace(value=score.value.masked_fill(score.n == 0, torch.nan))
