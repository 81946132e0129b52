"""The label of each attention head, and its confidence: rules on the head's scores, the most specific one first."""

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
    """Condition: the odds `share / (1 - share)` of a score are at least `times` the odds of its null.

    Odds make the requirement as strict for a null of 1 / 5 (short rows) as for a null of 1 / 100.
    """

    times: float

    def confidence(self, cells: Mapping[str, ScoreByHead]) -> NDArray[np.float64]:
        """Confidence that the score reaches the share whose odds are `times` those of the null."""
        score = cells[self.score]
        return sure_above(score, self.times * score.null / (1 + (self.times - 1) * score.null))


@dataclass(frozen=True)
class Beyond(Evidence):
    """Condition: the score exceeds its null by at least `margin`; a negative margin requires it that far below."""

    margin: float

    def confidence(self, cells: Mapping[str, ScoreByHead]) -> NDArray[np.float64]:
        """Confidence that the score reaches the null plus the margin."""
        score = cells[self.score]
        return sure_above(score, score.null + self.margin, below=self.margin < 0)


@dataclass(frozen=True)
class PartOf(Evidence):
    """Condition: the score is at least `share` times the score `whole` (times 1 if `whole` is None)."""

    share: float
    whole: str | None = None

    @property
    def scores(self) -> tuple[str, ...]:
        """The score, and `whole` if there is one."""
        return (self.score,) if self.whole is None else (self.score, self.whole)

    def confidence(self, cells: Mapping[str, ScoreByHead]) -> NDArray[np.float64]:
        """Confidence that the score reaches `share` of `whole`; the half-widths of both intervals are added."""
        if self.whole is None:
            return sure_above(cells[self.score], self.share)
        reference = cells[self.whole]
        width = self.share * (reference.high - reference.value)
        return sure_above(cells[self.score], self.share * reference.value, more=width)


@dataclass(frozen=True)
class Rare(Evidence):
    """Condition: few random heads have a score as far from the null (`p`), on the side that `sign` names (1 or -1)."""

    sign: int

    def confidence(self, cells: Mapping[str, ScoreByHead]) -> NDArray[np.float64]:
        """1 - p, the share of random heads that lie closer to the null; 0 for scores on the other side of it."""
        score = cells[self.score]
        beyond_null = (score.value - score.null) * self.sign > 0
        return np.where(beyond_null | np.isnan(score.value), 1 - score.p, 0.0)


def sure_above(
    score: ScoreByHead,
    least: NDArray[np.float64] | float,
    *,
    below: bool = False,
    more: NDArray[np.float64] | float = 0.0,
) -> NDArray[np.float64]:
    """Confidence `[layer, head]` that a score is at least `least` (at most, with `below`), by Student's t over rows.

    It equals `SURE` where the near end of the score's 95 % interval is `least`. more: half-width of the interval of
    `least` itself, added to that of the score.
    """
    from scipy.special import stdtr

    gap = (least - score.value) if below else (score.value - least)
    half = ((score.high - score.value) if below else (score.value - score.low)) + more
    rows = score.n.clip(min=2)
    widths = gap / np.where(half > 0, half, np.nan) * t95(torch.from_numpy(rows)).numpy()
    sure = np.where(half == 0, gap >= 0, stdtr(rows - 1, widths))
    return np.where(np.isnan(half) | np.isnan(gap), np.nan, sure)


@dataclass(frozen=True)
class LabelRule:
    """A label and all the evidence it requires."""

    label: str
    evidence: tuple[Evidence, ...]


CLEAR = 5.0
"""Factor on the odds of even attention from which a label counts a head's attention as clearly above chance."""
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
"""The rules by priority: attention on repeats, names in sentences, weights, and last first-token or local attention."""


def confidences(table: xr.Dataset) -> xr.DataArray:
    """Confidence of every label `[layer, head, called]`: the lowest of its conditions; NaN without an interval.

    Several labels may hold at once: an induction head may copy, too. A label whose scores the table lacks is NaN.
    """
    arrays = {
        name: table[name].transpose("layer", "head", "score").to_numpy() for name in ScoreByHead._fields
    }
    cells = {
        str(score): ScoreByHead(**{name: array[..., i] for name, array in arrays.items()})
        for i, score in enumerate(table["score"].values)
    }
    first = table["value"].isel(score=0, drop=True).transpose("layer", "head")
    by_rule = []
    for rule in RULES:
        known = all(name in cells for evidence in rule.evidence for name in evidence.scores)
        holds = [evidence.confidence(cells) for evidence in rule.evidence if known]
        by_rule.append(np.minimum.reduce(holds) if known else np.full(first.shape, np.nan))
    named = first.expand_dims(called=[rule.label for rule in RULES], axis=-1)
    return named.copy(data=np.stack(by_rule, -1)).drop_vars(("unit",), errors="ignore")


def labels(confidence: xr.DataArray) -> xr.DataArray:
    """The first label of `RULES` with a confidence of at least `SURE` `[layer, head]`; "none" where there is none.

    A head with a label may do other things as well: see the other labels' `confidence`. The labels require:

    - induction, duplicate token, successor: five times the odds of the null. previous token, current token: that, and
      half of the attention to the last five tokens.
    - name mover: 0.25 logits of direct effect, and 1.25 times the odds of the null in attention to the receiver;
      s-inhibition: three times the odds of the null.
    - copying: a third of the way from chance to a perfect copier; anti-copying: half of the way to a perfect
      anti-copier; both: an eigenvalue score that at most one random head in forty has.
    - first token, local: half of all attention (local: and twice the odds of the null).
    """
    holds = confidence.transpose("layer", "head", "called").to_numpy() >= SURE
    names = np.array([*(rule.label for rule in RULES), NONE])
    first = np.where(holds.any(-1), holds.argmax(-1), len(RULES))
    return confidence.isel(called=0, drop=True).copy(data=names[first])
