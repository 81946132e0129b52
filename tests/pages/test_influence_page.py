"""The page of influence: the rows at both ends of each query, in order, as texts that break out of nothing."""

import re
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import xarray as xr

from interp.data.batch import Batch
from interp.hooked import HookedTransformer
from interp.pages import influence_page
from interp.tasks.examples import Examples
from tests.pages.looks import faults
from tests.pages.visits import needs_browser, visit

if TYPE_CHECKING:
    from playwright import sync_api

EVIL = " <b>x</b>&\u202e"


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo-attn-2l")


@pytest.fixture(scope="module")
def rows(model: HookedTransformer) -> Examples:
    return Examples(
        model.to_batch([f"{word} came home." for word in ("Mary", "John", "The old man", "He", EVIL)])
    )


def result(values: list[list[float]], **attrs: str) -> xr.Dataset:
    return xr.Dataset({"value": (("row", "query"), np.array(values))}, attrs={"unit": "nats", **attrs})


VALUES = [[0.3, 0.0], [-0.2, 0.0], [0.5, 0.0], [0.0, 0.0], [0.1, -1.0]]


def test_each_query_has_the_rows_that_helped_and_harmed_it_most_in_order(
    model: HookedTransformer, rows: Examples
) -> None:
    page = influence_page(result(VALUES, method="ekfac"), model, rows, rows.rows(torch.tensor([0, 1])), top=2)
    first, second = page.split('<section id="query-')[1:]
    sides = [part.partition("</section>")[0].split('<ol class="rows ')[1:] for part in (first, second)]
    found = [
        [re.findall(r">(\S+)</span><span class=\"place\">row (\d)", side) for side in each] for each in sides
    ]
    assert found == [
        [[("0.5", "2"), ("0.3", "0")], [("−0.2", "1")]],
        [[("−1", "4")]],
    ]
    assert [side.partition('"')[0] for side in sides[0]] == ["helped", "harmed"]
    assert [side.partition('"')[0] for side in sides[1]] == ["harmed"]
    assert "Mary came home." in unescape(page) and "No row did." in second
    assert "Predicted from gradients" in page and "0.60 of the rows helped" in first
    assert "was trained again" in influence_page(result(VALUES), model, rows, rows.rows(torch.tensor([0, 1])))


def test_texts_stay_texts_and_padding_is_left_out(model: HookedTransformer, rows: Examples) -> None:
    values = [*VALUES[:3], [0.1, 0.1], VALUES[4]]
    page = influence_page(result(values), model, rows, rows.rows(torch.tensor([4, 0])))
    assert "<b>" not in page and "\u202e" not in page
    assert "&lt;b&gt;x&lt;/b&gt;&amp;⟨U+202E⟩ came home." in page
    text = next(line for line in re.findall(r'class="text">(.*?)</span>', page) if "He came" in line)
    assert unescape(text) == "<|bos|>He came home."


def test_other_results_and_other_rows_are_refused(model: HookedTransformer, rows: Examples) -> None:
    with pytest.raises(ValueError, match="result must have values over row and query, got "):
        influence_page(xr.Dataset({"value": 1.0}), model, rows, rows)
    with pytest.raises(ValueError, match=r"values of \(5, 5\) rows and queries are required"):
        influence_page(result(VALUES), model, rows, rows)
    for listed in ({"top": -1}, {"most": -99}, {"most": 0}):
        with pytest.raises(ValueError, match="must be a whole number from 1 to"):
            influence_page(result(VALUES), model, rows, rows, **listed)


def test_ids_stand_for_tokens_where_there_is_no_tokenizer(model: HookedTransformer) -> None:
    plain = Examples(Batch(torch.tensor([[1, 2, 3], [4, 5, 6]])))
    page = influence_page(result([[0.1, 0.2], [0.3, 0.4]]), model.transformer, plain, plain, most=1)
    assert "&lt;4&gt;&lt;5&gt;&lt;6&gt;" in page and "1 more query is not drawn." in page


@needs_browser
@pytest.mark.parametrize("width", [400, 1400])
def test_it_fits_its_window_and_fetches_nothing(
    width: int, model: HookedTransformer, rows: Examples, tmp_path: Path, browser: "sync_api.Browser"
) -> None:
    page = influence_page(result(VALUES), model, rows, rows.rows(torch.tensor([0, 4])))
    (tmp_path / "index.html").write_text(page, encoding="utf-8")
    seen = visit(browser, tmp_path, width)
    wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    overflow = seen.page.evaluate(wide)
    assert faults(seen.page) == []
    seen.page.close()
    assert overflow <= 0 and seen.complaints == []
    assert all(url.startswith(("file://", "data:")) for url in seen.requests)
