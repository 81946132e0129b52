"""How numbers become colours."""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from jaxtyping import Float

Kind = Literal["mass", "signed", "removal", "plain"]
"""Shades of one colour; red below and blue above the neutral number; blue below and red above; a rainbow of its own."""


@dataclass(frozen=True)
class ColourScale:
    """How numbers become colours: from one end to the other, and what the colour bar says."""

    kind: Kind
    low: float
    high: float
    label: str
    """Name of the number, with its unit."""

    @classmethod
    def mass(cls, label: str, high: float = 1.0) -> "ColourScale":
        """The scale of numbers in [0, high]: attention, probabilities, norms."""
        return cls("mass", 0.0, high, label)

    @classmethod
    def signed(cls, values: Float[np.ndarray, "..."] | float, label: str) -> "ColourScale":
        """The scale of signed numbers, which reaches as far below 0 as above: to the largest, or to a number given."""
        reach = float(np.nanmax(np.abs(values), initial=0.0)) or 1.0
        return cls("signed", -reach, reach, label)

    @classmethod
    def removal(
        cls, values: Float[np.ndarray, "..."] | float, label: str, intact: float = 0.0
    ) -> "ColourScale":
        """The scale of a metric with something taken away: blue where it falls, so where that speaks for the metric.

        Args:
            intact: the number where nothing is taken away, the neutral colour.
        """
        signed = cls.signed(values - intact, label)
        return replace(signed, kind="removal", low=intact + signed.low, high=intact + signed.high)

    @classmethod
    def around(cls, chance: float, values: Float[np.ndarray, "..."], label: str) -> "ColourScale":
        """The scale of scores on both sides of chance, the neutral colour; of 0 where no chance level is known."""
        chance = 0.0 if np.isnan(chance) else chance
        signed = cls.signed(values - chance, label if chance == 0 else f"{label} (neutral: chance)")
        return replace(signed, low=chance + signed.low, high=chance + signed.high)

    @property
    def neutral(self) -> float:
        """The number without a colour."""
        return (self.low + self.high) / 2 if self.kind in ("signed", "removal") else self.low

    @property
    def ends(self) -> tuple[float, float]:
        """The numbers at the full colours, red (of signed scales) before blue."""
        return (self.high, self.low) if self.kind == "removal" else (self.low, self.high)

    def levels(self, values: Float[np.ndarray, "*n"]) -> Float[np.ndarray, "*n"]:
        """The strength of each number's colour, from -1 (full red) over 0 (none) to 1 (full blue); 0 for NaN."""
        reach = (self.high - self.neutral) or 1.0
        level = np.clip((np.asarray(values, dtype=float) - self.neutral) / reach, -1.0, 1.0)
        return np.nan_to_num(-level if self.kind == "removal" else level)
