"""The page in a real browser, of models some or all of whose layers have no attention."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import interp
from tests.pages.visits import needs_browser, numbers, visit
from tests.wrapped.wrapping import spoken

if TYPE_CHECKING:
    from playwright import sync_api

pytestmark = needs_browser
PROMPT = "When Mary and John went to the shop"


def test_a_head_without_attention_can_be_chosen_and_says_so(
    browser: "sync_api.Browser", tmp_path: Path
) -> None:
    found = interp.report(spoken("jamba"), PROMPT, " Mary", " John")
    found.save(tmp_path / "page")
    seen = visit(browser, tmp_path / "page")
    patterned = sorted(set(found.tables["attention"].layer))
    assert patterned and {*patterned} < set(range(4))
    assert seen.page.locator(".thumb").count() == 4 * len(patterned)
    for layer in (0, patterned[0]):
        seen.page.click(f"#attribution .map button[data-layer='{layer}'][data-head='1']")
        assert seen.texts("#head-name") == [f"L{layer}H1"]
        moved = found.tables["attribution_sources"].query(f"layer == {layer} and head == 1").value
        if layer in patterned:
            assert "looks most at" in seen.texts("#readout")[0]
            assert numbers(seen.texts("#moved small")) == pytest.approx(moved.tolist(), abs=6e-4)
        else:
            assert seen.texts("#readout") == [f"L{layer}H1 has no attention pattern"]
            assert "no attention pattern" in seen.texts("#head-profile")[0]
            assert seen.page.locator("#moved").is_hidden() and moved.isna().all()
    assert seen.complaints == []


def test_a_page_without_any_attention_still_follows_a_choice(
    browser: "sync_api.Browser", tmp_path: Path
) -> None:
    found = interp.report(spoken("mamba"), PROMPT, " Mary", " John")
    found.save(tmp_path / "page")
    seen = visit(browser, tmp_path / "page")
    seen.page.click("#attribution .map button[data-layer='2'][data-head='0']")
    assert seen.page.locator("#attribution .map .chosen").get_attribute("data-layer") == "2"
    seen.page.click("#losses .chip[data-pos='3']")
    assert seen.texts("#next-pos") == ["3"]
    assert seen.page.locator("#attention canvas").count() == 0
    assert seen.complaints == []
