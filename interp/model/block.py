"""One block: attention and MLP, each reading the residual stream through a norm and adding to it."""

from jaxtyping import Float
from torch import Tensor, nn

from interp.model.attention import Attention, Pass
from interp.model.config import ModelConfig
from interp.model.mlp import FeedForward
from interp.model.norm import Normalize
from interp.model.tap import Scope, at


class Block(nn.Module):
    """A pre-norm block, sequential or parallel, with or without an MLP."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.parallel = config.parallel
        self.ln1 = Normalize(config.norm, config.d_model, "ln1")
        self.attn = Attention(config, layer)
        self.ln2 = Normalize(config.norm, config.d_model, "ln2") if config.mlp else None
        self.mlp = FeedForward(config.mlp, config.d_model) if config.mlp else None

    def forward(
        self, resid: Float[Tensor, "b p d"], shared: Pass, tap: Scope | None
    ) -> Float[Tensor, "b p d"]:
        """The residual stream after the block; without the MLP's part where the pass may end after attention."""
        resid = at(tap, "hook_resid_pre", resid)
        mid = resid + self.attn(resid, self.ln1, shared, tap)
        if tap is not None and tap.finished:
            return mid
        if self.mlp is None or self.ln2 is None:
            return at(tap, "hook_resid_post", mid)
        if self.parallel:
            mlp_in = at(tap, "hook_mlp_in", resid)
        else:
            mid = at(tap, "hook_resid_mid", mid)
            mlp_in = at(tap, "hook_mlp_in", mid)
        return at(tap, "hook_resid_post", mid + self.mlp(self.ln2(mlp_in, tap), tap))
