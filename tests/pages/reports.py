"""Reports of the small models on one prompt, and the pages of reports: made once and shared, so never write to them."""

import base64
import functools
import json
import re
import zlib

from interp.pages import About, Report, ReportQuestion, page, report_of
from tests.tiny import hooked

PROMPT, CORRUPTED = "The cat sat on the mat", "The dog sat on the mat"
ANSWER, WRONG = " the", " dog"
_PAGES: dict[int, tuple[Report, str]] = {}


@functools.cache
def report(name: str, corrupt: str | None = None, wrong: str | None = WRONG) -> Report:
    """The model of this name asked about the answer, and compared with a corrupted prompt if there is one."""
    return report_of(hooked(name), ReportQuestion(PROMPT, ANSWER, wrong, corrupt), About(name))


def compared(name: str) -> Report:
    """The same with the corrupted prompt."""
    return report(name, CORRUPTED)


def page_of(report: Report) -> str:
    """The page of a report that several tests look at."""
    if id(report) not in _PAGES:
        _PAGES[id(report)] = report, page(report)
    return _PAGES[id(report)][1]


def payload(text: str) -> dict[str, object]:
    """What the script of a page reads."""
    found = re.search(r'<script type="application/octet-stream" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(zlib.decompress(base64.b64decode(found[1])))
