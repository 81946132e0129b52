"""How numbers and tokens are written on the page: one minus sign, no lost digits, no character that hides."""

import math
import unicodedata

NAMED = {" ": "·", "\n": "↵", "\t": "⇥", "\r": "␍"}
"""Signs for the white space that matters in tokens."""
NO_LOGITS = "Left out: this model has no unembedding. It ends in its residual stream, so it names no tokens."
"""Instead of every section about logits."""

NO_CORRUPTED = (
    "Left out: this compares the prompt with a corrupted one, the same tokens but for those that change the answer, "
    "and none was given; interp report --prompt … --corrupt … takes one."
)
"""Instead of the sections that compare two prompts."""


def visible(piece: str) -> str:
    r"""A token's text with everything invisible shown: `·` for a space, `↵`, control pictures, `⟨U+202E⟩` for others.

    Example:
        >>> visible(" Mary"), visible("\x07"), visible("\u202e")
        ('·Mary', '␇', '⟨U+202E⟩')
    """
    return "".join(_sign(c) for c in piece) or "∅"


def harmless(text: str) -> str:
    """Running text in which spaces and line ends stay, and what could reorder or hide other text is shown."""
    return "".join(c if c in " \n" else _sign(c) for c in text)


def _sign(c: str) -> str:
    if c in NAMED:
        return NAMED[c]
    kind = unicodedata.category(c)
    if kind == "Cc" and ord(c) < 0x20:
        return chr(0x2400 + ord(c))
    return f"⟨U+{ord(c):04X}⟩" if kind in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp") else c


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
