"""Numbers and tokens in words: no digit lost, nothing invisible."""

import math
import unicodedata

import pytest
from hypothesis import given, strategies as st

from interp.core.visible import harmless, visible
from interp.views import writing


@pytest.mark.parametrize(
    ("piece", "shown"),
    [
        (" Mary", "·Mary"), ("\n\n", "↵↵"), ("\t", "⇥"), ("\x00", "␀"), ("\x7f", "⟨U+007F⟩"), ("\u202e", "⟨U+202E⟩"),
        ("\xa0x", "⟨U+00A0⟩x"), ("\u3000", "⟨U+3000⟩"),
        ("\u3164", "⟨U+3164⟩"), ("", "∅"), ("\ufffd", "\ufffd"), ("שלום", "שלום"), ("🙂", "🙂"), ("<b>", "<b>"),
    ],
)  # fmt: skip
def test_what_is_invisible_in_a_token_is_shown(piece: str, shown: str) -> None:
    assert visible(piece) == shown


@given(st.text())
def test_no_shown_token_holds_a_character_that_hides(piece: str) -> None:
    shown = visible(piece)
    assert shown
    assert not any(unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp", "Zs") for c in shown)


def test_running_text_keeps_spaces_and_lines_and_shows_reordering_marks() -> None:
    assert harmless("a b\nc\u202ed\te\xa0f") == "a b\nc⟨U+202E⟩d⇥e\xa0f"


@pytest.mark.parametrize(
    ("value", "digits", "sign", "text"),
    [
        (1.234, 2, False, "1.23"), (-1.239, 2, False, "−1.24"), (2.0, 1, True, "+2.0"), (-0.001, 2, True, "0.00"),
        (0.0, 2, True, "0.00"), (math.nan, 2, True, "–"), (None, 2, False, "–"),
    ],
)  # fmt: skip
def test_numbers_have_one_minus_sign_and_no_signed_zero(
    value: float | None, digits: int, sign: bool, text: str
) -> None:
    assert writing.number(value, digits, sign=sign) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0.000"), (0.0004, "<0.001"), (0.0006, "0.001"), (1.0, "1.000"), (None, "–")]
)
def test_small_probabilities_are_not_shown_as_zero(value: float | None, text: str) -> None:
    assert writing.probability(value) == text


def test_counts_are_grouped() -> None:
    assert writing.count(50257) == "50\u202f257"


@pytest.mark.parametrize(
    ("piece", "shown"),
    [
        ("\ufe0f", "⟨U+FE0F⟩"),
        ("❤\ufe0f", "❤\ufe0f"),
        (" \ufe0f", "·⟨U+FE0F⟩"),
        ("❤\ufe0f\ufe0f", "❤\ufe0f⟨U+FE0F⟩"),
        ("a\u034fb", "a⟨U+034F⟩b"),
        ("\U000e0100", "⟨U+E0100⟩"),
    ],
)
def test_marks_without_ink_are_shown_and_emoji_stay(piece: str, shown: str) -> None:
    assert visible(piece) == shown
