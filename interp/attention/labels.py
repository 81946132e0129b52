"""A plain word per head, and its confidence: rules on the head's scores, of which the most specific one counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from interp.core.stats import t95

if TYPE_CHECKING:
    import xarray as xr
    from numpy.typing import NDArray


NONE = "none"
"""The label of a head that no rule names."""
SURE = 0.975
"""The confidence from which a label is given: the near end of a 95 % interval lies past what the rule requires."""


class ScoreByHead(NamedTuple):
    """One score of every head `[layer, head]`, from the table of `heads`, without its coordinates."""

    value: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    null: NDArray[np.float64]
    p: NDArray[np.float64]
    n: NDArray[np.float64]


@dataclass(frozen=True)
class Evidence:
    """A condition that a label requires of a head, and the confidence that it holds."""

    score: str
    """The score that the condition is about."""

    @property
    def scores(self) -> tuple[str, ...]:
        """All scores that the condition reads."""
        return (self.score,)

    def confidence(self, cells: Mapping[str, ScoreByHead]) -> NDArray[np.float64]:
        """Probability that the condition holds `[layer, head]`, from its scores; NaN where they have no interval."""
        raise NotImplementedError


@dataclass(frozen=True)
class Odds(Evidence):
    """Condition: the odds `share / (1 - share)` of a score are at least so many times those of its null.

    So it requires as much of a score whose chance level is a fifth, on short rows, as of one whose is a hundredth.
    """

    times: float

    def confidence(self, cells: Mapping[str, ScoreByHead]) -> NDArray[np.float64]:
        """Confidence that the score reaches the share with these odds."""
        mine = cells[self.score]
        return sure_above(mine, self.times * mine.null / (1 + (self.times - 1) * mine.null))


@dataclass(frozen=True)
class Beyond(Evidence):
    """Condition: the score lies past its null by at least a margin in its own unit; below it if negative."""

    margin: float

    def confidence(self, cells: Mapping[str, ScoreByHead]) -> NDArray[np.float64]:
        """Confidence that the score reaches the null plus the margin."""
        mine = cells[self.score]
        return sure_above(mine, mine.null + self.margin, below=self.margin < 0)


@dataclass(frozen=True)
class PartOf(Evidence):
    """Condition: the score is at least such a share of another one (of 1, if there is no other)."""

    share: float
    whole: str | None = None

    @property
    def scores(self) -> tuple[str, ...]:
        """The score and the other one."""
        return (self.score,) if self.whole is None else (self.score, self.whole)

    def confidence(self, cells: Mapping[str, ScoreByHead]) -> NDArray[np.float64]:
        """Confidence that the score reaches its share of the other's value, whose error is added to this score's."""
        if self.whole is None:
            return sure_above(cells[self.score], self.share)
        whole = cells[self.whole]
        width = self.share * (whole.high - whole.value)
        return sure_above(cells[self.score], self.share * whole.value, more=width)


@dataclass(frozen=True)
class Rare(Evidence):
    """Condition: the score is far out among those of random heads: its `p`, on the side of the sign."""

    sign: int

    def confidence(self, cells: Mapping[str, ScoreByHead]) -> NDArray[np.float64]:
        """The share of random heads that are less far out, on either side; 0 on the wrong one."""
        mine = cells[self.score]
        beyond_null = (mine.value - mine.null) * self.sign > 0
        return np.where(beyond_null | np.isnan(mine.value), 1 - mine.p, 0.0)


def sure_above(
    mine: ScoreByHead,
    least: NDArray[np.float64] | float,
    *,
    below: bool = False,
    more: NDArray[np.float64] | float = 0.0,
) -> NDArray[np.float64]:
    """Confidence that a score is at least `least` (at most: `below`), by Student's t over its rows `[layer, head]`.

    At `SURE` the near end of the 95 % interval is exactly there. more: half-width that comes from `least` itself.
    """
    from scipy.special import stdtr

    gap = (least - mine.value) if below else (mine.value - least)
    half = ((mine.high - mine.value) if below else (mine.value - mine.low)) + more
    rows = mine.n.clip(min=2)
    widths = gap / np.where(half > 0, half, np.nan) * t95(torch.from_numpy(rows)).numpy()
    sure = np.where(half == 0, gap >= 0, stdtr(rows - 1, widths))
    return np.where(np.isnan(half) | np.isnan(gap), np.nan, sure)


@dataclass(frozen=True)
class LabelRule:
    """A label and all the evidence it requires."""

    label: str
    evidence: tuple[Evidence, ...]


CLEAR = 5.0
"""Factor on the odds of chance from which attention stands clear of it."""
RULES: tuple[LabelRule, ...] = (
    LabelRule("induction", (Odds("induction", CLEAR),)),
    LabelRule("previous token", (Odds("previous_token", CLEAR), PartOf("previous_token", 0.5, "local"))),
    LabelRule("duplicate token", (Odds("duplicate_token", CLEAR),)),
    LabelRule("current token", (Odds("current_token", CLEAR), PartOf("current_token", 0.5, "local"))),
    LabelRule("name mover", (Beyond("name_mover", 0.25), Odds("to_receiver", 1.25))),
    LabelRule("s-inhibition", (Odds("s_inhibition", 3.0),)),
    LabelRule("successor", (Odds("successor", CLEAR),)),
    LabelRule("anti-copying", (Beyond("copying", -0.07), Rare("copying_weights", -1))),
    LabelRule("copying", (Beyond("copying", 0.6), Rare("copying_weights", 1))),
    LabelRule("first token", (PartOf("first_token", 0.5),)),
    LabelRule("local", (PartOf("local", 0.5), Odds("local", 2.0))),
)
"""The rules by priority: about attention on repeats, then sentences, then weights, then where heads rest."""


def confidences(table: xr.Dataset) -> xr.DataArray:
    """Confidence of every label `[layer, head, called]`: the lowest of its conditions; NaN without an interval.

    Several may hold at once: an induction head that copies is both. Rules about scores that the table lacks are NaN.
    """
    arrays = {
        name: table[name].transpose("layer", "head", "score").to_numpy() for name in ScoreByHead._fields
    }
    cells = {
        str(score): ScoreByHead(**{name: array[..., i] for name, array in arrays.items()})
        for i, score in enumerate(table["score"].values)
    }
    first = table["value"].isel(score=0, drop=True).transpose("layer", "head")
    found = []
    for rule in RULES:
        known = all(name in cells for each in rule.evidence for name in each.scores)
        sure = [each.confidence(cells) for each in rule.evidence if known]
        found.append(np.minimum.reduce(sure) if known else np.full(first.shape, np.nan))
    named = first.expand_dims(called=[rule.label for rule in RULES], axis=-1)
    return named.copy(data=np.stack(found, -1)).drop_vars(("unit",), errors="ignore")


def labels(confidence: xr.DataArray) -> xr.DataArray:
    """The first label of `RULES` that is sure `[layer, head]`, "none" where that is none of them.

    A label says where a head stands out, not that it does nothing else: see `confidence` for what else holds. What they
    require: attention on repeats at five times the odds of even attention (a previous or current token: and half of
    what goes to the last five), on names at 1.25 times the odds of their paired nulls (three times for s-inhibition); a
    quarter of a logit for names; for copying a third of the way from chance to a perfect copier, or half of the way to
    a perfect anti-copier, and an eigenvalue score that one random head in forty has; to rest is to give half of all
    attention.
    """
    holds = confidence.transpose("layer", "head", "called").to_numpy() >= SURE
    names = np.array([*(rule.label for rule in RULES), NONE])
    first = np.where(holds.any(-1), holds.argmax(-1), len(RULES))
    return confidence.isel(called=0, drop=True).copy(data=names[first])
