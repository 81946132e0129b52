"""Output layers that cost less than a row of logits: adaptive softmax and a tree of binary decisions.

Both return log-probabilities `[*b v]` in the place of logits, whose log-softmax is themselves: losses, lenses and
metrics read them as they read logits. Their gain is in training, where a loss needs the target's probability alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from interp.model.config import ModelConfig
from interp.model.records import Output, OutputLayer, requires


@dataclass(frozen=True)
class AdaptiveSoftmax(Output):
    """Frequent tokens (those of small ids) first, rare ones in clusters of narrower matrices (Grave et al. 2017)."""

    cutoffs: tuple[int, ...]
    """The first id of each cluster, in order."""
    div_value: float = 4.0
    """Cluster i, counted from 1, has the width d_model / div_value^i."""

    def __post_init__(self) -> None:
        super().__post_init__()
        rising = all(a < b for a, b in zip((0, *self.cutoffs), self.cutoffs, strict=False))
        if not self.cutoffs or not rising:
            raise ValueError(
                f"AdaptiveSoftmax requires rising cutoffs >= 1, at least one, got {self.cutoffs}"
            )
        if self.div_value < 1:
            raise ValueError(f"AdaptiveSoftmax requires div_value >= 1, got {self.div_value}")

    def check(self, config: ModelConfig) -> None:
        """ValueError for clusters without tokens or without width."""
        _check_alone(self, config)
        last = self.cutoffs[-1]
        requires(last < config.d_vocab, f"cutoffs below d_vocab, got {last} and {config.d_vocab}")
        narrowest = config.d_model // self.div_value ** len(self.cutoffs)
        requires(narrowest >= 1, f"d_model >= div_value^{len(self.cutoffs)} under {self}")

    def flops(self, config: ModelConfig, n: int) -> int:
        """The head and every cluster; a loss computes those of its targets alone."""
        widths = [int(config.d_model // self.div_value ** (i + 1)) for i in range(len(self.cutoffs))]
        ends = (*self.cutoffs, config.d_vocab)
        tails = sum(w * (config.d_model + ends[i + 1] - ends[i]) for i, w in enumerate(widths))
        return 2 * n * (config.d_model * (self.cutoffs[0] + len(widths)) + tails)

    def build(self, config: ModelConfig) -> OutputLayer:
        """The module."""
        return AdaptiveOutput(self, config.d_model, config.d_vocab, bias=config.unembed_bias)


class AdaptiveOutput(OutputLayer):
    """Frequent tokens and a few clusters of rare ones, of a width that falls (Grave et al. 2017), by torch's module.

    Tokens count as the more frequent the smaller their id.
    """

    def __init__(self, kind: AdaptiveSoftmax, d_model: int, d_vocab: int, *, bias: bool) -> None:
        super().__init__()
        self.layer = nn.AdaptiveLogSoftmaxWithLoss(
            d_model, d_vocab, list(kind.cutoffs), div_value=kind.div_value, head_bias=bias
        )
        if bias:
            nn.init.zeros_(self.layer.head.bias)

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b v"]:
        """Log-probabilities of all tokens."""
        return self.layer.log_prob(x.reshape(-1, x.shape[-1])).unflatten(0, x.shape[:-1])

    def loss(self, x: Float[Tensor, "n d"], target: Int[Tensor, "n"]) -> Float[Tensor, "n"]:
        """-log p(target) in nats; only the clusters that targets are in are computed."""
        return -self.layer(x, target).output


@dataclass(frozen=True)
class HierarchicalSoftmax(Output):
    """A binary tree of decisions over the tokens in the order of their ids (Morin & Bengio 2005)."""

    def check(self, config: ModelConfig) -> None:
        """ValueError for what only an unembedding has."""
        _check_alone(self, config)

    def flops(self, config: ModelConfig, n: int) -> int:
        """Every node; a loss computes those on the way to its targets alone."""
        return 2 * n * config.d_model * (config.d_vocab - 1)

    def build(self, config: ModelConfig) -> OutputLayer:
        """The module."""
        return TreeOutput(config.d_model, config.d_vocab, bias=config.unembed_bias)


class TreeOutput(OutputLayer):
    """log p(w) = sum of log sigmoid(+-s_n) over the nodes n on the path to w, s = x W + b (Morin & Bengio 2005).

    The tree is a complete binary one over the tokens in the order of their ids; the children of node n are 2 n + 1 (+)
    and 2 n + 2 (-), token w is node d_vocab - 1 + w. Probabilities sum to 1 whatever the weights. Sums run in float32
    at least.
    """

    def __init__(self, d_model: int, d_vocab: int, *, bias: bool) -> None:
        super().__init__()
        self.nodes = nn.Linear(d_model, d_vocab - 1, bias=bias)
        if bias:
            nn.init.zeros_(self.nodes.bias)

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


def _path(token: Int[Tensor, "n"], d_vocab: int) -> tuple[Int[Tensor, "n s"], Int[Tensor, "n s"]]:
    """The nodes on the way to each token, and +1 or -1 for the side it is on; short ways end in node 0 and side 0."""
    node, nodes, sides = token + d_vocab - 1, [], []
    for _ in range((d_vocab - 1).bit_length()):
        sides.append(torch.where(node % 2 == 1, 1, -1) * (node > 0))
        node = (node - 1).clamp_min(0) // 2
        nodes.append(node)
    return torch.stack(nodes, 1), torch.stack(sides, 1)


def _check_alone(kind: Output, config: ModelConfig) -> None:
    linear = config.tied or config.mlm_head or config.logit_softcap or config.logit_scale != 1
    fits = config.unembed and not linear
    requires(fits, f"unembed, no tied, mlm_head, logit_softcap and logit_scale under {kind}")
    requires(config.d_vocab > 1, f"d_vocab >= 2 under {kind}")
