"""Draws `docs/pictures/page.png` anew: the top of the page that `interp report` writes, to the end of the waterfall.

Run: `interp report --model demo-4l --out report && python docs/page_picture.py report`; it takes Chromium, Playwright
and Pillow.
"""

import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import FloatRect, Page, sync_playwright

PICTURE = Path(__file__).parent / "pictures" / "page.png"
WIDTH, SHARP, MARGIN = 1400, 1.25, 16
"""Of the window in pixels, pixels of the picture for each of these, and the room around."""


def shot(page: Page) -> bytes:
    """The page from its question to the sum of what the parts add, as PNG."""
    page.add_style_tag(content="nav { position: static !important }")
    top, bottom = (page.locator(at).bounding_box() for at in (".question", "#complete"))
    if top is None or bottom is None:
        raise RuntimeError("this page has no attribution")
    end = bottom["y"] + bottom["height"] + MARGIN
    clip: FloatRect = {
        "x": 0.0,
        "y": top["y"] + MARGIN,
        "width": float(WIDTH),
        "height": end - top["y"] - MARGIN,
    }
    return page.screenshot(full_page=True, clip=clip)


def main(folder: Path) -> None:
    """Draw the picture from the page in this folder."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": 900}, device_scale_factor=SHARP)
        page.goto((folder / "index.html").resolve().as_uri())
        picture = Image.open(io.BytesIO(shot(page))).convert("RGB")
        browser.close()
    few = picture.quantize(256, kmeans=4, dither=Image.Dither.NONE)
    few.save(PICTURE, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
