"""One pass or a planned sweep of them: observe, edit, measure, generate; questions as data."""

from interp.passes.analysis import Alone, Analysis, Question
from interp.passes.observe import HookPoint, observe
from interp.passes.sampling import Sampling
from interp.passes.sweep import Sweep

__all__ = ["Alone", "Analysis", "HookPoint", "Question", "Sampling", "Sweep", "observe"]
