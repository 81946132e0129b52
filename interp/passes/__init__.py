"""One pass or a planned sweep of them: observe, edit, measure, generate; questions as data."""

from interp.passes.observe import HookPoint, observe
from interp.passes.question import Ask, ByRow, Question, Reading, Staged, WithoutData
from interp.passes.sampling import Sampling
from interp.passes.sweep import Sweep

__all__ = [
    "Ask",
    "ByRow",
    "HookPoint",
    "Question",
    "Reading",
    "Sampling",
    "Staged",
    "Sweep",
    "WithoutData",
    "observe",
]  # fmt: skip
