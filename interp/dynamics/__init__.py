"""What depth, length and training do: checkpoints, in-context loss, rank collapse, consensus, influence, degeneracy."""

from interp.dynamics.checkpoints import over_checkpoints, per_token_loss_pca, phase_change
from interp.dynamics.consensus import Consensus, consensus
from interp.dynamics.in_context import InContext, OneTokenLosses, in_context, loss_map, one_token_losses
from interp.dynamics.influence import influence
from interp.dynamics.lds import lds
from interp.dynamics.learning_coefficient import Langevin, learning_coefficient, learning_coefficient_of
from interp.dynamics.particles import flow, trajectories
from interp.dynamics.rank_collapse import RankCollapse, rank_collapse
from interp.dynamics.refinement import Refinement, Splitting, refinement, splitting
from interp.dynamics.switched_blocks import switched_off

__all__ = [
    "Consensus",
    "InContext",
    "Langevin",
    "OneTokenLosses",
    "RankCollapse",
    "Refinement",
    "Splitting",
    "consensus",
    "flow",
    "in_context",
    "influence",
    "lds",
    "learning_coefficient",
    "learning_coefficient_of",
    "loss_map",
    "one_token_losses",
    "over_checkpoints",
    "per_token_loss_pca",
    "phase_change",
    "rank_collapse",
    "refinement",
    "splitting",
    "switched_off",
    "trajectories",
]
