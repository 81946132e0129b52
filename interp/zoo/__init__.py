"""Embedded demo models with cards, and hand-built models with known circuits."""

from typing import TYPE_CHECKING

from interp.core.late import names_of
from interp.zoo.demos import DEMOS, Demo

if TYPE_CHECKING:
    from interp.zoo import planted, shown
    from interp.zoo.catalog import card, load, revisions

__all__ = ["DEMOS", "Demo", "card", "load", "planted", "revisions", "shown"]

__getattr__ = names_of(
    "interp.zoo",
    {
        **dict.fromkeys(("card", "load", "revisions"), "catalog"),
        "planted": "planted",
        "shown": "shown",
    },
)
