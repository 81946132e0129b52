"""Names that a package imports at their first use, so that importing `interp` does not load torch.

This file imports the standard library only.
"""

from collections.abc import Callable, Mapping
from importlib import import_module

MODULES: dict[str, tuple[str, ...]] = {}
"""By name of a table in `core` or `model`, the modules that fill it, which these two may not import directly."""


def fill(table: str) -> None:
    """Imports the modules that fill a table, if `MODULES` has any."""
    for module in MODULES.get(table, ()):
        import_module(module)


def names_of(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """The `__getattr__` of a package, from names to the modules (`homes`) that define them, or to a module itself."""

    def found(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = import_module(f"{package}.{homes[name]}")
        return home if name == homes[name] else getattr(home, name)

    return found
