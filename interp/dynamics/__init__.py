"""Effects of length and of training: losses in context, questions over checkpoints, influence of rows, degeneracy."""

from interp.dynamics.checkpoints import over_checkpoints, per_token_loss_pca, phase_change
from interp.dynamics.in_context import InContext, OneTokenLosses, in_context, loss_map, one_token_losses
from interp.dynamics.influence import influence
from interp.dynamics.lds import lds
from interp.dynamics.learning_coefficient import Langevin, learning_coefficient, learning_coefficient_of

__all__ = [
    "InContext",
    "Langevin",
    "OneTokenLosses",
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
]
