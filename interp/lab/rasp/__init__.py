"""Programs over sequences, compiled to Transformers whose circuit is known: a language after RASP, and its compiler.

Source: Weiss et al. 2021 (arXiv:2106.06981), the language; Lindner et al. 2023 (arXiv:2301.05062), compiling it.
"""

from interp.lab.rasp.compiled import Compiled, Exactness
from interp.lab.rasp.compiler import compile
from interp.lab.rasp.interchange_training import (
    InterchangeTraining,
    interchange_accuracy,
    interchange_trained,
)
from interp.lab.rasp.language import (
    Aggregate,
    Constant,
    Map,
    Positions,
    Program,
    Selector,
    Sum,
    Tokens,
    everything,
    select,
    selector_width,
)
from interp.lab.rasp.programs import PROGRAMS
from interp.lab.rasp.variants import rotated, superposed, with_noise_heads

__all__ = [
    "PROGRAMS", "Aggregate", "Compiled", "Constant", "Exactness", "InterchangeTraining", "Map", "Positions", "Program",
    "Selector", "Sum", "Tokens", "compile", "everything", "interchange_accuracy", "interchange_trained", "rotated",
    "select", "selector_width", "superposed", "with_noise_heads",
]  # fmt: skip
