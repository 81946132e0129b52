"""Depth as time: whether tokens meet or collapse as blocks are applied one after another, in theory and in models."""

from interp.lab.depth.consensus import Consensus, consensus
from interp.lab.depth.integral import Solver, integrated
from interp.lab.depth.particles import flow, trajectories
from interp.lab.depth.rank_collapse import RankCollapse, rank_collapse
from interp.lab.depth.refinement import Refinement, Splitting, refinement, splitting
from interp.lab.depth.switched_blocks import switched_off

__all__ = [
    "Consensus", "RankCollapse", "Refinement", "Solver", "Splitting", "consensus", "flow", "integrated",
    "rank_collapse", "refinement", "splitting", "switched_off", "trajectories",
]  # fmt: skip
