"""Which method finds circuits? Every method on models whose circuits are known by construction."""

from interp.board.benchmark import as_result, benchmark, measured
from interp.board.cases import PROGRAMS, TRAINED, Case, cases
from interp.board.judge import METHODS, MODES, SCORES, Method, judged

__all__ = [
    "METHODS", "MODES", "PROGRAMS", "SCORES", "TRAINED", "Case", "Method", "as_result", "benchmark", "cases", "judged",
    "measured",
]  # fmt: skip
