"""Attention to attention: the pattern refined by attention between its own rows."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from interp.model.attend import hidden_scores, row_softmax
from interp.model.attention import Pass
from interp.model.config import ModelConfig
from interp.model.mask import Mask
from interp.model.mixer_variants import Refinement


class RowAttention(nn.Module):
    """The refined pattern (after Liu et al. 2024, "Pay Attention to Attention for Sequential Recommendation").

    Row i of the pattern A, weights of the keys' positions, becomes two vectors of width d_head: a_i = A_i U and
    b_i = A_i W, with U and W trained, `query` and `key` `[head, position, d_head]`. Then, over the rows j that i sees,
        B_ij = softmax_j(a_i . b_j / sqrt(d_head));
    simple: B; value: B A, the mean of rows; additive: (A + B) / 2.
    Rows of each sum to 1, and nothing after i enters row i. This is our reading for causal models: the paper's refined
    weights come from trained matrices and are used in these three ways; its formulas we have not seen.

    The rows b_j of the past are kept in the cache, and with `value` those of A.
    """

    def __init__(self, config: ModelConfig, layer: int, kind: Refinement) -> None:
        super().__init__()
        self.kind, self.state = kind, (layer, "refinement")
        shape = (config.n_heads, config.n_ctx, config.head_width)
        self.query, self.key = (nn.Parameter(torch.randn(shape)) for _ in range(2))

    def forward(
        self, pattern: Float[Tensor, "b h q k"], mask: Mask, shared: Pass, only: Int[Tensor, "b n"] | None
    ) -> Float[Tensor, "b h n k"]:
        """The refined rows of the wanted columns (None: all), from the first pattern of all columns of this pass."""
        n, total = pattern.shape[2:]
        places = shared.once("key positions", lambda: shared.layout.positions(total, 0, pattern.device))
        left, right = (pattern @ table[:, places].movedim(1, 0) for table in (self.query, self.key))
        mask = Mask(mask.causal, mask.allowed)
        right, rows = self._with_past(right, pattern, shared)
        if only is not None:
            mask, columns = mask.queries(only, n, total), only[:, None, :, None]
            left, pattern = left.take_along_dim(columns, 2), pattern.take_along_dim(columns, 2)
        scores = (left * left.shape[-1] ** -0.5) @ right.mT
        higher = row_softmax(hidden_scores(scores, mask), mask).to(pattern.dtype)
        if self.kind == "value":
            return higher @ rows
        return higher if self.kind == "simple" else (pattern + higher) / 2

    def _with_past(
        self, right: Float[Tensor, "b h q r"], pattern: Float[Tensor, "b h q k"], shared: Pass
    ) -> tuple[Float[Tensor, "b h k r"], Float[Tensor, "b h _ k"]]:
        """The rows b_j of all columns, and those of A where they are values."""
        if shared.cache is None:
            return right, pattern
        if past := shared.cache.states.get(self.state):
            right = torch.cat((past[0], right), 2)
            if self.kind == "value":
                pattern = torch.cat((F.pad(past[1], (0, pattern.shape[3] - past[1].shape[3])), pattern), 2)
        shared.left[self.state] = (right, pattern) if self.kind == "value" else (right,)
        return right, pattern
