"""Embedded demo models with cards, hand-built models with known circuits, and the tasks they are measured on."""

from interp.zoo import pairs, planted
from interp.zoo.catalog import DEMOS, Demo, card, load, revisions

__all__ = ["DEMOS", "Demo", "card", "load", "pairs", "planted", "revisions"]
