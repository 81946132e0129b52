"""Names that a package imports at their first use, so that importing `interp` does not load torch.

The standard library alone.
"""

from collections.abc import Callable, Mapping
from importlib import import_module

MODULES: dict[str, tuple[str, ...]] = {}
"""Modules that fill a table of `core` or `model`, by the table; these may not import them."""


def fill(table: str) -> None:
    """Import what fills a table, if anything was named."""
    for module in MODULES.get(table, ()):
        import_module(module)


def names_of(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """The `__getattr__` of a package with names in modules of it; a module may be a name itself."""

    def found(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = import_module(f"{package}.{homes[name]}")
        return home if name == homes[name] else getattr(home, name)

    return found
