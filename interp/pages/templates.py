"""The templates of the pages, all with one set of rules: what is shown is escaped, what is missing is an error."""

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
    """The text of a file beside this one: ours, not the reader's, so it is not escaped."""
    return Markup((files("interp.pages") / name).read_text(encoding="utf-8"))
