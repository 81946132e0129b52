"""The assets of the pages (templates, styles, scripts): what is shown is escaped, what is missing is an error."""

import base64
import json
import zlib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files

import jinja2
from markupsafe import Markup

from interp.core.visible import harmless, visible
from interp.pages import views
from interp.views import writing

PAGES = "interp.pages"


@cache
def environment(package: str = PAGES) -> jinja2.Environment:
    """A jinja environment for the templates among a package's assets, with filters for tokens and numbers.

    One for each package: what it has compiled of a template (a third of the time of a page) serves all pages.
    """
    made = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: own(name, package)),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for write in (visible, harmless, writing.number, writing.probability, writing.count):
        made.filters[write.__name__] = write
    made.filters["painted"], made.tests["painted"] = views.painted, views.is_painted
    made.filters["deflated"] = deflated
    made.policies["json.dumps_kwargs"] = {"ensure_ascii": False}  # the page is UTF-8: a third less for words
    return made


def deflated(values: object) -> str:
    """JSON of some values, compressed (zlib), as base64: what the script of a page reads."""
    text = json.dumps(values, ensure_ascii=False, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


@cache
def own(name: str, package: str = PAGES) -> Markup:
    """The text of one of the package's assets: not the reader's, so it is not escaped."""
    return Markup((files(package) / "assets" / name).read_text(encoding="utf-8"))


def style(names: Sequence[str]) -> Markup:
    """Our styles of these names, in this order."""
    return Markup("\n").join(own(f"{name}.css") for name in names)


def script(names: Sequence[str]) -> Markup:
    """Our scripts of these names as one function, in this order; nothing of it is visible outside."""
    return joined([own(f"{name}.js") for name in names])


def joined(parts: Sequence[Markup]) -> Markup:
    """Scripts as one function."""
    return Markup("\n").join([Markup('"use strict";\n(async () => {'), *parts, Markup("})();")])
