"""Text with every character in sight: how pages and pictures write tokens and prompts."""

import unicodedata

NAMED = {" ": "·", "\n": "↵", "\t": "⇥", "\r": "␍"}
"""Signs for the white space that matters in tokens."""
BLANK = "\u115f\u1160\u2800\u3164\uffa0"
"""Letters and signs that have no ink."""


def visible(piece: str) -> str:
    r"""A token's text with everything invisible shown: `·` for a space, `↵`, control pictures, `⟨U+202E⟩` for others.

    Example:
        >>> visible(" Mary"), visible("\x07"), visible("\xa0")
        ('·Mary', '␇', '⟨U+00A0⟩')
    """
    return "".join(_sign(c) for c in piece) or "∅"


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
