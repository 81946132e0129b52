"""Which method finds circuits? Every method on models whose circuits are known by construction."""

from experiments.board.benchmark import as_result, benchmark, measured
from experiments.board.cases import PROGRAMS, TRAINED, Case, cases
from experiments.board.judge import METHODS, MODES, SCORES, Method, judged
from experiments.board.page import board_page

__all__ = [
    "METHODS", "MODES", "PROGRAMS", "SCORES", "TRAINED", "Case", "Method", "as_result", "benchmark", "board_page",
    "cases", "judged", "measured",
]  # fmt: skip
