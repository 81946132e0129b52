"""Output layers that cost less than a row of logits: adaptive softmax and a tree of binary decisions.

Both return log-probabilities `[*b v]` in the place of logits, whose log-softmax is themselves: losses, lenses and
metrics read them as they read logits. Their gain is in training, where a loss needs the target's probability alone.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from interp.model.config import ModelConfig
from interp.model.variants import AdaptiveSoftmax, HierarchicalSoftmax


class AdaptiveOutput(nn.Module):
    """Frequent tokens and a few clusters of rare ones, of a width that falls (Grave et al. 2017), by torch's module.

    Tokens count as the more frequent the smaller their id.
    """

    def __init__(self, kind: AdaptiveSoftmax, d_model: int, d_vocab: int, *, bias: bool) -> None:
        super().__init__()
        self.layer = nn.AdaptiveLogSoftmaxWithLoss(
            d_model, d_vocab, list(kind.cutoffs), div_value=kind.div_value, head_bias=bias
        )

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b v"]:
        """Log-probabilities of all tokens."""
        return self.layer.log_prob(x.reshape(-1, x.shape[-1])).unflatten(0, x.shape[:-1])

    def loss(self, x: Float[Tensor, "n d"], target: Int[Tensor, "n"]) -> Float[Tensor, "n"]:
        """-log p(target) in nats; only the clusters that targets are in are computed."""
        return -self.layer(x, target).output


class TreeOutput(nn.Module):
    """log p(w) = sum of log sigmoid(+-s_n) over the nodes n on the path to w, s = x W + b (Morin & Bengio 2005).

    The tree is a complete binary one over the tokens in the order of their ids; the children of node n are 2 n + 1 (+)
    and 2 n + 2 (-), token w is node d_vocab - 1 + w. Probabilities sum to 1 whatever the weights. Sums run in float32
    at least.
    """

    def __init__(self, d_model: int, d_vocab: int, *, bias: bool) -> None:
        super().__init__()
        self.nodes = nn.Linear(d_model, d_vocab - 1, bias=bias)

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b v"]:
        """Log-probabilities of all tokens, level by level from the root."""
        scores = self.nodes(x)
        scores = scores.to(torch.promote_types(x.dtype, torch.float32))
        level, first, levels = torch.zeros_like(scores[..., :1]), 0, []
        n_nodes = scores.shape[-1]
        while first < n_nodes:
            decided = scores[..., first : min(2 * first + 1, n_nodes)]
            leaves, parent = level[..., decided.shape[-1] :], level[..., : decided.shape[-1]]
            levels.append(leaves)
            level = torch.stack(
                (parent + F.logsigmoid(decided), parent + F.logsigmoid(-decided)), -1
            ).flatten(-2)
            first = 2 * first + 1
        return torch.cat((*levels, level), -1).to(x.dtype)

    def loss(self, x: Float[Tensor, "n d"], target: Int[Tensor, "n"]) -> Float[Tensor, "n"]:
        """-log p(target) in nats; log2(d_vocab) nodes for each."""
        path, side = _path(target, self.nodes.out_features + 1)
        scores = (self.nodes.weight[path] @ x[..., None])[..., 0]
        if self.nodes.bias is not None:
            scores = scores + self.nodes.bias[path]
        scores = scores.to(torch.promote_types(x.dtype, torch.float32))
        return -(F.logsigmoid(scores * side) * side.abs()).sum(-1)


def build_output(config: ModelConfig) -> AdaptiveOutput | TreeOutput | None:
    """The output layer of a model that has another one than an unembedding."""
    kind, d, v = config.output, config.d_model, config.d_vocab
    if isinstance(kind, AdaptiveSoftmax):
        return AdaptiveOutput(kind, d, v, bias=config.unembed_bias)
    return TreeOutput(d, v, bias=config.unembed_bias) if isinstance(kind, HierarchicalSoftmax) else None


def _path(token: Int[Tensor, "n"], d_vocab: int) -> tuple[Int[Tensor, "n s"], Int[Tensor, "n s"]]:
    """The nodes on the way to each token, and +1 or -1 for the side it is on; short ways end in node 0 and side 0."""
    node, nodes, sides = token + d_vocab - 1, [], []
    for _ in range((d_vocab - 1).bit_length()):
        sides.append(torch.where(node % 2 == 1, 1, -1) * (node > 0))
        node = (node - 1).clamp_min(0) // 2
        nodes.append(node)
    return torch.stack(nodes, 1), torch.stack(sides, 1)
