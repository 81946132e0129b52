"""Visits to a page in a real browser."""

import shutil
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import pytest

if TYPE_CHECKING:
    from playwright import sync_api

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(
    BROWSER is None or find_spec("playwright") is None,
    reason="no Chromium, or no Python package of Playwright",
)

ARGS = [
    "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync",
    "--disable-component-update", "--disable-default-apps", "--host-resolver-rules=MAP * ~NOTFOUND",
]  # fmt: skip
NARROW, WIDE = 400, 1400


@dataclass
class Visit:
    """An open page, what it asked for and what it complained about."""

    page: "sync_api.Page"
    folder: Path
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def table(self, name: str) -> pd.DataFrame:
        return pd.read_parquet(self.folder / f"{name}.parquet")

    def texts(self, selector: str) -> list[str]:
        return self.page.locator(selector).all_inner_texts()


def visit(browser: "sync_api.Browser", folder: Path, width: int = WIDE, **options: object) -> Visit:
    # Without smooth scrolling, which would go on, and hide explanations, while a test looks at them.
    page = browser.new_page(viewport={"width": width, "height": 900}, reduced_motion="reduce", **options)
    seen = Visit(page, folder)
    page.on("request", lambda request: seen.requests.append(request.url))
    page.on("console", lambda message: seen.complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: seen.complaints.append(str(error)))
    page.goto((folder / "index.html").as_uri())
    if options.get("java_script_enabled", True):
        page.locator("html[data-ready], html:not(:has(#data))").wait_for(state="attached")
    return seen


def numbers(texts: list[str]) -> list[float]:
    return [float(text.replace("−", "-")) for text in texts if text != "–"]
