"""Embedded demo models with cards, and hand-built models with known circuits."""

from interp.zoo import planted
from interp.zoo.catalog import DEMOS, Demo, card, load, revisions

__all__ = ["DEMOS", "Demo", "card", "load", "planted", "revisions"]
