"""Embedded demo models with cards, hand-built models with known circuits, and a compiler that builds such models."""

from interp.zoo import planted, rasp
from interp.zoo.catalog import DEMOS, Demo, card, load, revisions
from interp.zoo.compile import Compiled, Exactness, compile
from interp.zoo.programs import PROGRAMS

__all__ = [
    "DEMOS",
    "PROGRAMS",
    "Compiled",
    "Demo",
    "Exactness",
    "card",
    "compile",
    "load",
    "planted",
    "rasp",
    "revisions",
]
