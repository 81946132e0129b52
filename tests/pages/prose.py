"""The prose of a page: what a reader is asked to read, without numbers, tokens and what a question mark hides."""

import re
from html.parser import HTMLParser

PROSE = {"p", "figcaption", "caption", "h1", "h2", "h3", "h4", "em", "label", "summary", "li", "dt", "nav"}
VOID = {"br", "meta", "input", "link", "rect", "path", "circle"}
APART = {"script", "style", "svg", "tbody", "tfoot", "bdi"}


class Prose(HTMLParser):
    """Counts the words of a page by section."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[tuple[str, str]] = []
        self.words: dict[str, list[str]] = {}
        self.section = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "section":
            self.section = given.get("id") or ""
        if tag not in VOID:
            self.open.append((tag, given.get("class") or ""))

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        tags = {tag for tag, _ in self.open}
        behind = "details" in tags and "summary" not in tags
        token = any("tok" in classes.split() or "prompt" in classes.split() for _, classes in self.open)
        if tags & PROSE and not tags & APART and not behind and not token:
            self.words.setdefault(self.section, []).extend(re.findall(r"[A-Za-z]{2,}", data))

    @property
    def count(self) -> int:
        """Words of the whole page."""
        return sum(map(len, self.words.values()))
