"""The assets of the pages (templates, styles, scripts): what is shown is escaped, what is missing is an error."""

from collections.abc import Sequence
from importlib.resources import files

import jinja2
from markupsafe import Markup


def environment() -> jinja2.Environment:
    """A jinja environment for the templates beside this file."""
    return jinja2.Environment(
        loader=jinja2.FunctionLoader(own),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def own(name: str) -> Markup:
    """The text of one of our assets: not the reader's, so it is not escaped."""
    return Markup((files("interp.pages") / "assets" / name).read_text(encoding="utf-8"))


def script(names: Sequence[str]) -> Markup:
    """Our scripts of these names as one function, in this order; nothing of it is visible outside."""
    parts = [own(f"{name}.js") for name in names]
    return Markup("\n").join([Markup('"use strict";\n(() => {'), *parts, Markup("})();")])


def styles(names: Sequence[str]) -> Markup:
    """Our styles of these names, one after the other."""
    return Markup("\n").join(own(f"{name}.css") for name in names)
