"""How numbers are written for people: one minus sign, no lost digits."""

import math

import numpy as np
from jaxtyping import Float


def number(value: float | None, digits: int = 2, *, sign: bool = False) -> str:
    """A number with a real minus sign and fixed digits; an en dash where there is none.

    Example:
        >>> number(-1.234), number(2.0, 1, sign=True), number(float("nan"))
        ('−1.23', '+2.0', '–')
    """
    if value is None or math.isnan(value):
        return "–"
    text = f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}"
    if not text.strip("+-0."):
        text = text.lstrip("+-")
    return text.replace("-", "−")


def short(value: float, digits: int = 3) -> str:
    """A number of so many digits that count, with a real minus sign; an en dash where there is none.

    Example:
        >>> short(-0.012345), short(float("nan"))
        ('−0.0123', '–')
    """
    return "–" if math.isnan(value) else f"{value:.{digits}g}".replace("-", "−")


def probability(value: float | None) -> str:
    """A probability with three digits, "<0.001" below that.

    Example:
        >>> probability(0.12345), probability(0.0001)
        ('0.123', '<0.001')
    """
    small = value is not None and 0 < value < 0.0005
    return "<0.001" if small else number(value, 3)


def count(value: int) -> str:
    """A whole number in groups of three, a narrow no-break space between them.

    Example:
        >>> count(50257).split()
        ['50', '257']
    """
    return f"{value:,}".replace(",", "\u202f")


def numbers(
    values: Float[np.ndarray, "rows columns"], digits: int = 2, *, sign: bool = False, wide: float = math.inf
) -> list[list[str]]:
    """The numbers of a map, empty where there is none; those of size `wide` and more without decimals."""
    return [
        ["" if math.isnan(x) else number(x, digits if abs(x) < wide else 0, sign=sign) for x in row]
        for row in values.tolist()
    ]
