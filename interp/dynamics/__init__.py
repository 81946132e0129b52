"""What depth, length and training do: checkpoints, in-context loss, rank collapse, consensus."""

from interp.dynamics.checkpoints import over_checkpoints, per_token_loss_pca, phase_change
from interp.dynamics.consensus import consensus
from interp.dynamics.in_context import in_context, loss_map, one_token_losses
from interp.dynamics.rank_collapse import rank_collapse

__all__ = [
    "consensus",
    "in_context",
    "loss_map",
    "one_token_losses",
    "over_checkpoints",
    "per_token_loss_pca",
    "phase_change",
    "rank_collapse",
]
