"""One pass or a planned sweep of them: observe, edit, measure, generate; questions as data."""

from interp.passes.beam import Beams
from interp.passes.observe import HookPoint, observe
from interp.passes.question import Alone, ByRow, Question, Reading
from interp.passes.sampling import Sampling
from interp.passes.speculative import Speculated, speculate
from interp.passes.sweep import Sweep

__all__ = [
    "Alone", "Beams", "ByRow", "HookPoint", "Question", "Reading", "Sampling", "Speculated", "Sweep", "observe",
    "speculate",
]  # fmt: skip
