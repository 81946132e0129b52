"""Plausibility of a token attribution: whether it points at the tokens that are known to decide the answer.

Yin and Neubig 2022 (arXiv:2202.10419), section 4: in grammatical minimal pairs one word decides which ending is right.
A plausible attribution gives that word a large share and a high rank. The model may still use other words, which
`erasure` tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from interp.core.axes import shape_text
from interp.core.boundary import public
from interp.core.results import Score, check_finite, check_result, in_order, numbers, origin, scored
from interp.core.stats import FEWEST_PROBABILITIES, POSITIVE, Moments, if_at_least, over

if TYPE_CHECKING:
    import xarray as xr

UNITS = {
    "share": "share of the positive attribution",
    "reciprocal_rank": "1 / rank",
    "probes_needed": "tokens",
}
"""Units of the scores of `evidence`."""
SHARES = ("share", "reciprocal_rank")
"""Scores between 0 and 1.

`probes_needed`, 0 in most prompts and many in a few, has an interval from many prompts on.
"""


@public()
def evidence(
    attribution: xr.Dataset, known: Bool[Tensor, "n p"], *, among: Bool[Tensor, "n p"] | None = None
) -> xr.Dataset:
    """Scores of an attribution by how well it points at the tokens that are known to decide the answer.

    Args:
        attribution: `value` [prompt, pos], as `token_attribution` returns it.
        known: mask [n, p] of the evidence, one row per prompt, such as `pairs.spans["evidence"]` of a task.
        among: mask [n, p] of the tokens that count; None: all of the attribution.

    Returns:
        Dataset over `score`:

        - `value`: mean over prompts, with the ends `low` and `high` of its 95 % interval (from 64 prompts on, of
          `probes_needed` from 512 on; simulated in `docs/intervals.md`), and `n`. Scores: `share`, the part of the
          positive attribution that is on the evidence (0 where nothing is positive); `reciprocal_rank`, 1 / the place
          of the first token of the evidence in the order of the attribution, equal ones in the least favourable order;
          `probes_needed`, the number of other tokens before it.
        - `null`: the value of a random order; for `share` the evidence's share of the tokens.
        - `each` [prompt, score]: every prompt's scores.

    Raises:
        ValueError: other shapes, and prompts without evidence among the tokens.

    Caveat:
        That a word decides by the rules of grammar does not prove that the model uses it.

    Source:
        Yin and Neubig 2022, arXiv:2202.10419, section 4.

    See Also:
        `erasure`: whether the tokens matter to the model.

    Example:
        >>> result = interp.token_attribution(model, prompt, " John", method="gradient_x_input")
        >>> known = torch.arange(result.sizes["pos"])[None] == 2
        >>> interp.tokens.evidence(result, known).each.dims
        ('prompt', 'score')
    """
    check_result("attribution", attribution, ("prompt", "pos", "value"), "token_attribution")
    attribution = in_order("attribution", attribution, dict.fromkeys(("prompt", "pos")))
    real = attribution["token"] != "" if "token" in attribution.coords else attribution["value"].notnull()
    check_finite("value of attribution", attribution["value"].where(real, 0.0))
    value = numbers("attribution", attribution["value"], ("prompt", "pos")).double()
    for name, mask in (("known", known), ("among", among)):
        if mask is not None and mask.shape != value.shape:
            raise ValueError(
                f"{name} must have a place for every token, {shape_text(value.shape)}, got {shape_text(mask.shape)}"
            )
    counted = ~value.isnan() if among is None else ~value.isnan() & among.cpu()
    decides = known.cpu() & counted
    if not bool(decides.any(1).all()):
        raise ValueError("every prompt requires evidence among its tokens, some prompt has none")
    by_prompt, chance = (
        _prompt_scores(value, decides, counted),
        _chance_scores(decides.sum(1), counted.sum(1)),
    )
    scores = {
        name: Score.of(
            Moments.of(x),
            UNITS[name],
            chance[name],
            share=name in SHARES,
            fewest=FEWEST_PROBABILITIES,
            within=POSITIVE,
        )
        for name, x in by_prompt.items()
    }
    interval = f"{over('prompts')}; of probes_needed {if_at_least(FEWEST_PROBABILITIES)}"
    return scored(
        "evidence",
        scores,
        (),
        others={"each": (("prompt", "score"), torch.stack(list(by_prompt.values()), 1))},
        units={"each": "see the coordinate unit"},
        attrs={"interval": interval, "null": "a random order of the tokens", **origin(attribution)},
    )


def _prompt_scores(
    value: Float[Tensor, "n p"], decides: Bool[Tensor, "n p"], counted: Bool[Tensor, "n p"]
) -> dict[str, Float[Tensor, "n"]]:
    """Every score of `evidence` for every prompt, from masks of the evidence (`decides`) and of tokens that count."""
    positive = value.masked_fill(~counted, 0.0).clamp_min(0.0)
    total = positive.sum(1)
    best = value.masked_fill(~decides, -torch.inf).amax(1, keepdim=True)
    before = ((value >= best) & counted & ~decides).sum(1).double()
    share = positive.masked_fill(~decides, 0.0).sum(1) / total.where(total > 0, 1.0)
    return {"share": share, "reciprocal_rank": 1 / (1 + before), "probes_needed": before}


def _chance_scores(m: Tensor, n: Tensor) -> dict[str, float]:
    """Mean of every score over random orders of the tokens, for prompts with m tokens of evidence among n."""
    sizes = list(zip(m.tolist(), n.tolist(), strict=True))
    return {
        "share": float((m.double() / n).mean()),
        "reciprocal_rank": float(np.mean([_chance_reciprocal_rank(*size) for size in sizes])),
        "probes_needed": float(((n - m).double() / (m + 1)).mean()),
    }


def _chance_reciprocal_rank(m: int, n: int) -> float:
    """sum_k 1/k C(n - k, m - 1) / C(n, m): mean reciprocal rank of the first of m tokens among n in random order."""
    from scipy.special import comb

    places = np.arange(1, n - m + 2)
    return float((comb(n - places, m - 1) / comb(n, m) / places).sum())
