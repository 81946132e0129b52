"""Nothing on a page stands over something else, on any screen, and everybody can read and reach what is there.

The pages of other results are looked at by the tests of each.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.pages.looks import SCHEMES, WIDTHS, faults
from tests.pages.visits import needs_browser, visit

if TYPE_CHECKING:
    from playwright import sync_api

pytestmark = needs_browser


@pytest.mark.browser
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("which", ["asked", "planted_folder", "deep"])
def test_a_report_has_no_fault(
    which: str, width: int, scheme: str, browser: "sync_api.Browser", request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(which)
    seen = visit(browser, folder, width, color_scheme=scheme)
    assert faults(seen.page) == []
    seen.page.close()


AT = '<p style="position:absolute;top:{}px;left:20px">{}</p>'
OVER = AT.format(209, "here") + AT.format(212, "there")
PALE = '<p style="color:#bbb;background:#fff">pale</p>'
NAMELESS = "<button></button>"
FINE = "<p>this line</p><p>and that</p><div style='height:1rem;overflow:auto'><p>cut</p><p>off</p></div><p>below</p>"


@pytest.mark.browser
@pytest.mark.parametrize(
    ("body", "words"),
    [(OVER, "over"), (PALE, "color-contrast"), (NAMELESS, "button-name"), (FINE, "")],
    ids=["over", "pale", "nameless", "fine"],
)
def test_what_looks_for_faults_finds_them(body: str, words: str, browser: "sync_api.Browser") -> None:
    page = browser.new_page()
    page.set_content(f"<!doctype html><html lang=en><title>t</title><main><h1>t</h1>{body}</main>")
    found = [fault for fault in faults(page) if not fault.startswith("scrollable-region")]
    assert (words in found[0] and len(found) == 1) if words else found == []
    page.close()
