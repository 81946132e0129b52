"""Embedded demo models with cards, hand-built models with known circuits, and a compiler that builds such models."""

from typing import TYPE_CHECKING

from interp.core.late import names_of
from interp.zoo.demos import DEMOS, Demo

if TYPE_CHECKING:
    from interp.zoo import planted, rasp, shown
    from interp.zoo.catalog import card, load, revisions
    from interp.zoo.compiled import Compiled, Exactness
    from interp.zoo.compiler import compile
    from interp.zoo.interchange_training import (
        InterchangeTraining,
        interchange_accuracy,
        interchange_trained,
    )
    from interp.zoo.programs import PROGRAMS
    from interp.zoo.variants import rotated, superposed, with_noise_heads

__all__ = [
    "DEMOS",
    "PROGRAMS",
    "Compiled",
    "Demo",
    "Exactness",
    "InterchangeTraining",
    "card",
    "compile",
    "interchange_accuracy",
    "interchange_trained",
    "load",
    "planted",
    "rasp",
    "revisions",
    "rotated",
    "shown",
    "superposed",
    "with_noise_heads",
]

__getattr__ = names_of(
    "interp.zoo",
    {
        **dict.fromkeys(("card", "load", "revisions"), "catalog"),
        **dict.fromkeys(("Compiled", "Exactness"), "compiled"),
        "compile": "compiler",
        "PROGRAMS": "programs",
        **dict.fromkeys(("rotated", "superposed", "with_noise_heads"), "variants"),
        **dict.fromkeys(
            ("InterchangeTraining", "interchange_accuracy", "interchange_trained"), "interchange_training"
        ),
        "planted": "planted",
        "rasp": "rasp",
        "shown": "shown",
    },
)
