"""Embedded demo models with cards, hand-built models with known circuits, and a compiler that builds such models."""

from interp.zoo import planted, rasp
from interp.zoo.catalog import DEMOS, Demo, card, load, revisions
from interp.zoo.compile import compile
from interp.zoo.compiled import Compiled, Exactness
from interp.zoo.programs import PROGRAMS
from interp.zoo.variants import rotated, superposed, with_noise_heads

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
    "rotated",
    "superposed",
    "with_noise_heads",
]
