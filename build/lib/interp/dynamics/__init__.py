"""What depth, length and training do: checkpoints, in-context loss, rank collapse, consensus."""

from interp.dynamics.checkpoints import over_checkpoints, per_token_loss_pca, phase_change
from interp.dynamics.consensus import Consensus, consensus, flow
from interp.dynamics.in_context import InContext, OneTokenLosses, in_context, loss_map, one_token_losses
from interp.dynamics.rank_collapse import RankCollapse, rank_collapse
from interp.dynamics.switched_blocks import switched_off

__all__ = [
    "Consensus",
    "InContext",
    "OneTokenLosses",
    "RankCollapse",
    "consensus",
    "flow",
    "in_context",
    "loss_map",
    "one_token_losses",
    "over_checkpoints",
    "per_token_loss_pca",
    "phase_change",
    "rank_collapse",
    "switched_off",
]
