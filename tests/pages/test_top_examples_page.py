"""The page of top examples: every number and token of the result, nothing that breaks out, nothing fetched."""

import re
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import xarray as xr

from interp.features.top_examples import QUANTILES
from interp.pages.top_examples import top_examples_page
from tests.pages.looks import faults
from tests.pages.visits import needs_browser, visit

if TYPE_CHECKING:
    from playwright import sync_api

EVIL = "<script>alert(1)</script>\u202e\n"
PIECES = [["", "<b>", " cat"], ["The", EVIL, ""]]
RUNS = [[np.nan, -1.0, 4.0], [np.nan, 2.0, np.nan]]


def result(low: float = -1.0, cells: int = 1) -> xr.Dataset:
    """One neuron 17 (or several) with two entries of three tokens and an empty place; `low` is one activation."""
    entry, at = ("neuron", "rank"), ("neuron", "rank", "offset")
    run = np.array([*RUNS, [np.nan] * 3])
    run[0, 1] = low
    one = xr.Dataset(
        {
            "peak": (entry, [[4.0, 2.0, np.nan]]), "row": (entry, [[8, 5, -1]]), "pos": (entry, [[6, 1, -1]]),
            "piece": (at, [[*PIECES, [""] * 3]]), "tokens": (at, [[[-1, 3, 4], [0, 5, -1], [-1] * 3]]),
            "activation": (at, run[None]), "value": (("neuron", "score"), [[0.125, -0.5, 4.0]]),
            "quantiles": (("neuron", "q"), [[0.25, 1.5, 3.0, 3.5]]),
        },
        coords={
            "neuron": [17], "offset": [-1, 0, 1], "q": list(QUANTILES), "score": ["density", "mean", "max"],
        },
        attrs={"site": f"site {EVIL}", "texts": 1234, "tokens_counted": 5, "bos": "counts",
               "order": "the largest first"},
    )  # fmt: skip
    return one.isel(neuron=[0] * cells).assign_coords(neuron=range(17, 17 + cells))


def shades(page: str) -> list[tuple[float, bool, str, str]]:
    """Of every token: size of its shade, whether it is negative, what pointing says, and its text."""
    found = re.findall(r'<span class="([^"]*)" style="--v:([^"]*)" title="([^"]*)">([^<]*)</span>', page)
    return [(float(v), "neg" in kind.split(), tip, unescape(text)) for kind, v, tip, text in found]


def test_every_token_is_there_with_its_shade_and_number() -> None:
    page = top_examples_page(result())
    assert [(v, negative, tip) for v, negative, tip, _ in shades(page)] == [
        (0.25, True, "−1"), (1.0, False, "4"), (0.0, False, "does not count"), (0.5, False, "2"),
    ]  # fmt: skip
    assert [text for *_, text in shades(page)][:3] == ["<b>", " cat", "The"]
    assert re.findall(r'class="at[^"]*"[^>]*>([^<]*)<', page)[0] == "&lt;b&gt;", (
        "the entry is the token at offset 0"
    )
    assert page.count("<li>") == 2, "an empty place is no line"
    for words in ("<b>4</b>", "row 8, pos 6", "row 5, pos 1"):
        assert words in page


def test_a_cell_says_what_the_list_is_the_end_of() -> None:
    found = dict(re.findall(r"<div><dt>([^<]*)</dt><dd>([^<]*)</dd></div>", top_examples_page(result())))
    assert found["active on"] == "12.5 % of tokens"
    assert (found["mean"], found["max"], found["50 % up to"], found["99.9 % up to"]) == (
        "−0.5",
        "4",
        "0.25",
        "3.5",
    )
    assert (found["neurons"], found["texts"], found["tokens"]) == ("1", "1\u202f234", "5")


def test_the_scale_has_two_sides_only_where_something_is_negative() -> None:
    signed, plain = top_examples_page(result()), top_examples_page(result(low=1.0))
    assert 'class="scale div"><span>−4</span>' in signed and "red below" in signed
    assert 'class="scale seq"><span>0</span>' in plain and "red below" not in plain
    assert not any(negative for _, negative, *_ in shades(plain))


def test_nothing_that_a_text_says_becomes_markup() -> None:
    page = top_examples_page(result())
    assert "<script" not in page and "\u202e" not in page and "<b> " not in page
    assert page.count("&lt;script&gt;alert(1)") == 3, "title, heading, token"
    assert "⟨U+202E⟩↵" in page


def test_of_many_cells_the_first_are_drawn_and_the_page_says_so() -> None:
    page = top_examples_page(result(cells=7), most=3)
    assert page.count("<h2>") == 3 and "Drawn are the first 3 of 7." in page
    assert "Drawn are" not in top_examples_page(result(cells=7))
    for most in (0, -1):
        with pytest.raises(ValueError, match="most must be a whole number from 1 to"):
            top_examples_page(result(cells=7), most=most)


def test_a_key_is_shown_with_its_entry() -> None:
    keyed = result().assign(
        key=(("neuron", "rank"), [[2, 0, -1]]), key_piece=(("neuron", "rank"), [[" <i>", "x", ""]])
    )
    page = top_examples_page(keyed)
    assert "attends to ·&lt;i&gt; at 2; row 8, pos 6" in page and "attends to x at 0; row 5, pos 1" in page


def test_a_result_without_words_is_refused() -> None:
    with pytest.raises(ValueError, match="the result of top_examples is required, got one without `piece`"):
        top_examples_page(result().drop_vars("piece"))


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
def test_the_page_fits_its_window_and_fetches_nothing(
    width: int, scheme: str, tmp_path: Path, browser: "sync_api.Browser"
) -> None:
    long = result(cells=30)
    long["piece"] = long.piece.str.cat("x" * 60)
    (tmp_path / "index.html").write_text(top_examples_page(long), encoding="utf-8")
    seen = visit(browser, tmp_path, width, color_scheme=scheme)
    overflow = seen.page.evaluate(
        "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    )
    colours = seen.page.locator(".run span").evaluate_all(
        "spans => spans.slice(0, 3).map(span => getComputedStyle(span).backgroundColor)"
    )
    assert faults(seen.page) == []
    seen.page.close()
    assert overflow <= 0
    assert len(set(colours)) == 3, "negative, positive and absent are told apart"
    assert seen.complaints == [] and len(seen.requests) == 1
