"""Text with every character in sight: how pages and pictures write tokens and prompts."""

import re
import unicodedata

NAMED = {" ": "·", "\n": "↵", "\t": "⇥", "\r": "␍"}
"""Signs for the white space that matters in tokens."""
BLANK = "\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0"
"""Letters, marks and signs that have no ink."""
SELECTORS = re.compile("[\u180b-\u180d\u180f\ufe00-\ufe0f\U000e0100-\U000e01ef]")
"""Marks that choose the form of the sign before them (text or emoji, a kind of glyph)."""


def visible(piece: str) -> str:
    r"""A token's text with everything invisible shown: `·` for a space, `↵`, control pictures, `⟨U+202E⟩` for others.

    Example:
        >>> visible(" Mary"), visible("\x07"), visible("\xa0")
        ('·Mary', '␇', '⟨U+00A0⟩')
    """
    shown = [_sign(c) for c in piece]
    for i, c in enumerate(piece):
        bare = i == 0 or shown[i - 1] != piece[i - 1] or SELECTORS.match(piece[i - 1])
        if SELECTORS.match(c) and bare:
            shown[i] = f"⟨U+{ord(c):04X}⟩"
    return "".join(shown) or "∅"


def harmless(text: str) -> str:
    """Running text in which spaces and line ends stay, and what could reorder or hide other text is shown."""
    return "".join(c if c == "\n" or unicodedata.category(c) == "Zs" else _sign(c) for c in text)


def _sign(c: str) -> str:
    if c in NAMED:
        return NAMED[c]
    kind = unicodedata.category(c)
    if kind == "Cc" and ord(c) < 0x20:
        return chr(0x2400 + ord(c))
    hidden = kind in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs") or c in BLANK
    return f"⟨U+{ord(c):04X}⟩" if hidden else c
