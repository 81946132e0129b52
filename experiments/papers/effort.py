"""How much of a measurement is done: all of it for the table, little of it for trying."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Effort:
    """The share of rows, seeds and updates that are spent. ValueError outside (0, 1]."""

    share: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"effort must be above 0 and at most 1, got {self.share}")

    def of(self, count: int, least: int = 3) -> int:
        """This share of a count, but not less than a few.

        >>> Effort(0.1).of(200), Effort(0.1).of(10)
        (20, 3)
        """
        return min(count, max(least, round(self.share * count)))
