"""The table of claims, and what each of them comes to in a model."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from interp.core.boundary import public
from interp.core.kinds import PositiveCount
from interp.core.results import labelled
from interp.core.stats import all_finite
from interp.core.wording import nearest
from interp.findings import facts, heads, relations, sentences, texts
from interp.findings.claim import Claim, Measured, Verdict, verdict
from interp.findings.setting import FEWEST_PROMPTS, SEEDS, Setting, paragraphs
from interp.hooked import HookedTransformer
from interp.passes.question import NotFiniteError
from interp.runs.provenance import with_origin

if TYPE_CHECKING:
    import xarray as xr

CLAIMS: Mapping[str, Claim] = MappingProxyType(
    {**heads.CLAIMS, **sentences.CLAIMS, **texts.CLAIMS, **facts.CLAIMS, **relations.CLAIMS}
)
"""Every claim by its name."""


@dataclass(frozen=True)
class Row:
    """A line of the table: a claim, what was measured of it, or why it could not be, and how long that took."""

    name: str
    claim: Claim
    measured: Measured | None
    why: str
    """Why it could not be measured; else empty."""
    seconds: float

    @property
    def verdict(self) -> Verdict:
        """What the rule says."""
        return verdict(self.measured, self.claim.region)


def rows(setting: Setting, names: Sequence[str]) -> Iterator[Row]:
    """The lines of some claims, each as soon as it is measured."""
    for name in names:
        begun, measured, why = time.perf_counter(), None, ""
        try:
            measured = CLAIMS[name].measure(setting)
        except (ValueError, KeyError, AttributeError) as cause:  # what public analyses refuse, in words
            why = str(cause.args[0]) if cause.args else type(cause).__name__
        yield Row(name, CLAIMS[name], measured, why, time.perf_counter() - begun)


@public()
def findings(
    model: HookedTransformer,
    claims: Sequence[str] | None = None,
    *,
    prompts: PositiveCount = 102,
    texts: Sequence[str] | None = None,
) -> xr.Dataset:
    """What the field reports of language models, asked of this one: a number, a null and a verdict for each claim.

    Heads and layers are chosen on other rows than those that count. The rule of verdicts is that of
    `interp.findings.verdict`; regions and nulls stand in `interp.findings.CLAIMS`.

    Args:
        model: a decoder with its tokenizer; claims that it lacks something for cannot be told.
        claims: names of `interp.findings.CLAIMS`; None: all, which takes some minutes.
        prompts: rows of each claim, a third with each of three seeds.
        texts: ordinary prose, 8 paragraphs or more; None: 126 of a novel.

    Returns:
        Dataset over `claim`:

        - `value`: what was measured minus its null, with the ends `low` and `high` of its 95 % interval, `null` and
          `n`; NaN where it could not be measured. `each_seed` [claim, seed]: the same with each seed.
        - `lowest`, `highest`: the region in which the whole interval and each seed have to lie. `seconds`.
        - Coordinates `text`, `source`, `measured`, `null_of`, `unit`, `over` (what the interval is over), `verdict`,
          `about` (what was found, or why it could not be measured).

    Raises:
        KeyError: a claim that is not in the table.
        ValueError: no claims, fewer than 12 prompts, or fewer than 8 texts.
        NotFiniteError: weights that are NaN or infinite.

    Caveats:
        A claim that holds was not refuted by these prompts. One that does not hold may hold for others: a region is an
        effect size that somebody chose. Each claim is a test of its own, and of twenty some err.

    Cost:
        SmolLM2 (135M) takes some minutes on two cores. Printed claim by claim by `interp findings MODEL`.

    See Also:
        `interp.report`: one prompt. `interp.heads`: every head.

    Example:
        >>> demo = interp.HookedTransformer.from_pretrained("demo-attn-2l")
        >>> found = findings(demo, ["induction-heads"], prompts=12)
        >>> found.verdict.item()
        'holds'
    """
    names = list(CLAIMS) if claims is None else list(claims)
    return as_result(list(rows(setting_of(model, names, prompts, texts), names)), model)


def check_names(names: Sequence[str]) -> None:
    """ValueError for no claims, KeyError for one that is not in the table."""
    if not names:
        raise ValueError("claims must be one at least, got none")
    for name in names:
        if name not in CLAIMS:
            raise KeyError(f"unknown claim {name!r}; {nearest(name, CLAIMS)}; there are {', '.join(CLAIMS)}")


def setting_of(
    model: HookedTransformer, names: Sequence[str], prompts: int = 102, texts: Sequence[str] | None = None
) -> Setting:
    """The setting of checked arguments, errors as in `findings`."""
    check_names(names)
    if prompts < FEWEST_PROMPTS:
        raise ValueError(f"prompts must be {FEWEST_PROMPTS} or more, got {prompts}")
    if not all_finite(model.transformer.parameters()):
        raise NotFiniteError(f"the weights of {model.name} are not all finite: nothing can be told of it")
    return Setting(model, prompts, paragraphs() if texts is None else tuple(texts))


def as_result(found: Sequence[Row], model: HookedTransformer) -> xr.Dataset:
    """Lines of the table as the labelled result that `findings` describes."""
    given = [row.measured for row in found]
    numbers = {
        name: [math.nan if one is None else float(getattr(one, name)) for one in given]
        for name in ("value", "low", "high", "null")
    }
    numbers |= {
        "lowest": [row.claim.region.lowest for row in found],
        "highest": [row.claim.region.highest for row in found],
        "seconds": [row.seconds for row in found],
    }
    seeds = [(math.nan,) * len(SEEDS) if one is None or not one.seeds else one.seeds for one in given]
    words = {
        "text": [row.claim.text for row in found],
        "source": [row.claim.source for row in found],
        "measured": [row.claim.measured for row in found],
        "null_of": [row.claim.null for row in found],
        "unit": [row.claim.unit for row in found],
        "over": ["" if one is None else one.over for one in given],
        "verdict": [row.verdict for row in found],
        "about": [row.why if one is None else one.about for row, one in zip(found, given, strict=True)],
    }
    result = labelled(
        "findings",
        {
            **{name: (("claim",), torch.tensor(each, dtype=torch.float64)) for name, each in numbers.items()},
            "n": (("claim",), torch.tensor([0 if one is None else one.n for one in given])),
            "each_seed": (("claim", "seed"), torch.tensor(seeds, dtype=torch.float64)),
        },
        coords={
            "claim": [row.name for row in found], "seed": list(SEEDS),
            **{name: (("claim",), each) for name, each in words.items()},
        },
        units={"seconds": "s"},
        attrs={
            "interval": "95 %, over what `over` says",
            "rule": "holds: the whole interval and every seed lie between lowest and highest; does not hold: the whole "
            "interval lies outside",
        },
    )  # fmt: skip
    return with_origin(result, model.transformer)
