"""One plain word per head: a label counts when its scores stand clear of chance, and the most specific one is given."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import xarray as xr

NONE = "none"
"""The label of a head that no rule names."""


@dataclass(frozen=True)
class Evidence:
    """A score that must stand clear of its null: the near end of its 95 % interval by at least `margin`."""

    score: str
    margin: float
    """In the unit of the score; below the null if negative."""

    def holds(self, table: "xr.Dataset") -> "xr.DataArray":
        """Where `low - null >= margin`, or `high - null <= margin` for a negative margin; never without an interval."""
        mine = table.sel(score=self.score)
        away = mine["low" if self.margin >= 0 else "high"] - mine["null"]
        return away >= self.margin if self.margin >= 0 else away <= self.margin


@dataclass(frozen=True)
class Rule:
    """A label and all the evidence it requires."""

    label: str
    evidence: tuple[Evidence, ...]


RULES: tuple[Rule, ...] = (
    Rule("induction", (Evidence("induction", 0.25),)),
    Rule("previous token", (Evidence("previous_token", 0.25),)),
    Rule("duplicate token", (Evidence("duplicate_token", 0.25),)),
    Rule("current token", (Evidence("current_token", 0.25),)),
    Rule("name mover", (Evidence("name_mover", 0.25), Evidence("to_receiver", 0.05))),
    Rule("s-inhibition", (Evidence("s_inhibition", 0.15),)),
    Rule("successor", (Evidence("successor", 0.25),)),
    Rule("anti-copying", (Evidence("copying", -0.05), Evidence("copying_weights", -0.25))),
    Rule("copying", (Evidence("copying", 0.6), Evidence("copying_weights", 0.25))),
    Rule("first token", (Evidence("first_token", 0.45),)),
    Rule("local", (Evidence("local", 0.35),)),
)
"""By priority: where a head looks on repeats, what it does in sentences, what its weights do, where it rests."""


def labels(table: "xr.Dataset") -> "xr.DataArray":
    """The first label of `RULES` whose evidence all holds `[layer, head]`, "none" where that is none of them.

    Rules about scores that the table lacks are passed over. The margins are a quarter of the whole range for attention
    on repeats (more for what is common: resting on the first token, or near; less for the names of a sentence, whose
    nulls are paired), a quarter of a logit for names, and for copying a third of the way from chance to a perfect
    copier, or to a perfect anti-copier. A label says where a head stands out, not that it does nothing else.
    """
    found = np.full((table.sizes["layer"], table.sizes["head"]), NONE, dtype=object)
    for rule in reversed(RULES):
        if all(e.score in table["score"].values for e in rule.evidence):
            holds = [e.holds(table).transpose("layer", "head").to_numpy() for e in rule.evidence]
            found[np.logical_and.reduce(holds)] = rule.label
    first = table["value"].isel(score=0, drop=True).transpose("layer", "head")
    return first.copy(data=found.astype(str))
