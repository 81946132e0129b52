"""Output layers that cost less than a row of logits: adaptive softmax and a tree of binary decisions.

Both return log-probabilities `[*b v]` in the place of logits, whose log-softmax is themselves: losses, lenses and
metrics read them as they read logits. Their gain is in training, where a loss needs the target's probability alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from interp.core.kinds import Finite
from interp.model.config import ModelConfig
from interp.model.records import Output, OutputLayer, requires


@dataclass(frozen=True)
class AdaptiveSoftmax(Output):
    """Adaptive softmax: frequent tokens (small ids) first, rare ones in narrower clusters (Grave et al. 2017)."""

    cutoffs: tuple[int, ...]
    """The first id of each cluster, in order."""
    div_value: Finite = 4.0
    """Base of the clusters' widths: cluster i, counted from 1, has the width d_model / div_value^i."""

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
        """Operations of the head and every cluster; a loss computes only those of its targets."""
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
    """Hierarchical softmax: a binary tree of decisions over the tokens (Morin & Bengio 2005)."""

    counts: tuple[int, ...] | None = None
    """How often each token occurs: frequent ones then have short ways, by Huffman's tree (Mikolov et al. 2013).

    None = the complete tree over the tokens in the order of their ids.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.counts is not None and min(self.counts, default=-1) < 0:
            raise ValueError(
                f"HierarchicalSoftmax requires counts >= 0, got {min(self.counts, default='none')}"
            )

    def check(self, config: ModelConfig) -> None:
        """ValueError for options that only an unembedding has, and for another number of counts than of tokens."""
        _check_alone(self, config)
        found = config.d_vocab if self.counts is None else len(self.counts)
        requires(found == config.d_vocab, f"a count for each of {config.d_vocab} tokens, got {found}")

    def __str__(self) -> str:
        return "HierarchicalSoftmax" if self.counts is None else "HierarchicalSoftmax with Huffman's tree"

    def flops(self, config: ModelConfig, n: int) -> int:
        """Operations of every node; a loss computes only those on the way to its targets."""
        return 2 * n * config.d_model * (config.d_vocab - 1)

    def build(self, config: ModelConfig) -> OutputLayer:
        """The module."""
        return TreeOutput(config.d_model, config.d_vocab, bias=config.unembed_bias, counts=self.counts)


class TreeOutput(OutputLayer):
    """log p(w) = sum of log sigmoid(+-s_n) over the nodes n on the path to w, s = x W + b (Morin & Bengio 2005).

    Node 0 is the root, token w is node d_vocab - 1 + w. In the complete tree the children of node n are 2 n + 1 (+) and
    2 n + 2 (-); in Huffman's the two nodes of the smallest counts are joined until one is left, the rarer one is (-).
    Probabilities sum to 1 whatever the weights. Sums run in float32 at least.
    """

    def __init__(
        self, d_model: int, d_vocab: int, *, bias: bool, counts: Sequence[int] | None = None
    ) -> None:
        super().__init__()
        self.nodes = nn.Linear(d_model, d_vocab - 1, bias=bias)
        if bias:
            nn.init.zeros_(self.nodes.bias)
        self.children_of = _complete(d_vocab) if counts is None else _huffman(counts)
        self._made: dict[torch.device, _Tables] = {}

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b v"]:
        """Log-probabilities of all tokens, level by level from the root."""
        scores = self.nodes(x)
        scores = scores.to(torch.promote_types(x.dtype, torch.float32))
        level, found, tables = torch.zeros_like(scores[..., :1]), [], self._tables(x.device)
        for deciding, inner, leaves in tables.levels:
            decided = scores[..., deciding]
            both = torch.stack((level + F.logsigmoid(decided), level + F.logsigmoid(-decided)), -1).flatten(
                -2
            )
            found.append(both[..., leaves])
            level = both[..., inner]
        return torch.cat(found, -1)[..., tables.order].to(x.dtype)

    def loss(self, x: Float[Tensor, "n d"], target: Int[Tensor, "n"]) -> Float[Tensor, "n"]:
        """-log p(target) in nats, from the nodes on its path only, filled up to the longest path of the tree."""
        tables = self._tables(x.device)
        path, side = tables.path[target], tables.side[target]
        scores = (self.nodes.weight[path] @ x[..., None])[..., 0]
        if self.nodes.bias is not None:
            scores = scores + self.nodes.bias[path]
        scores = scores.to(torch.promote_types(x.dtype, torch.float32))
        return -(F.logsigmoid(scores * side) * side.abs()).sum(-1)

    def _tables(self, device: torch.device) -> _Tables:
        """The tree's tables where they are needed, made once; no buffers, which a file of weights would not fill."""
        if device not in self._made:
            self._made[device] = _Tables.of(self.children_of, device)
        return self._made[device]


Children = list[tuple[int, int]]
"""The two children, + and -, of every inner node; those of d_vocab - 1 or more are tokens."""


def _complete(d_vocab: int) -> Children:
    return [(2 * node + 1, 2 * node + 2) for node in range(d_vocab - 1)]


def _huffman(counts: Sequence[int]) -> Children:
    """The tree of the shortest mean path (Huffman 1952): the two rarest are joined, again and again."""
    n_inner = len(counts) - 1
    heap = [(count, i, n_inner + i) for i, count in enumerate(counts)]
    heapq.heapify(heap)
    children: Children = [(0, 0)] * n_inner
    for node in range(n_inner - 1, -1, -1):  # the last one made is the root
        rare, other = heapq.heappop(heap), heapq.heappop(heap)
        children[node] = (other[2], rare[2])
        heapq.heappush(heap, (rare[0] + other[0], 2 * n_inner - node + 1, node))
    return children


@dataclass(frozen=True)
class _Tables:
    """Tables of a tree: the way to each token, and its levels."""

    path: Int[Tensor, "v s"]
    """Nodes on the way to each token, the last one first; short ways end in node 0."""
    side: Int[Tensor, "v s"]
    """Side 0 after the end of a way; else +1 or -1 for the side that the way takes."""
    levels: list[tuple[Tensor, Tensor, Tensor]]
    """The nodes that decide; which of their children, + - + - ..., decide again, and which are tokens."""
    order: Int[Tensor, "v"]
    """Where each token stands among those of all levels, one after another."""

    @classmethod
    def of(cls, children: Children, device: torch.device) -> _Tables:
        """The tables of a tree in which children have higher numbers than their parents."""
        n_inner = len(children)
        ways: dict[int, list[tuple[int, int]]] = {0: []}
        for node, pair in enumerate(children):
            for child, side in zip(pair, (1, -1), strict=True):
                ways[child] = [(node, side), *ways[node]]
        to_tokens = [ways[n_inner + token] for token in range(n_inner + 1)]
        longest = max(map(len, to_tokens))
        filled = torch.tensor([way + [(0, 0)] * (longest - len(way)) for way in to_tokens], device=device)
        level, levels, tokens = [0], [], []
        while level:
            below = [child for node in level for child in children[node]]
            inner, leaves = (
                [i for i, c in enumerate(below) if (c >= n_inner) == leaf] for leaf in (False, True)
            )
            levels.append((level, inner, leaves))
            tokens += [below[i] - n_inner for i in leaves]
            level = [below[i] for i in inner]

        def there(index: list[int]) -> Tensor:
            return torch.tensor(index, dtype=torch.long, device=device)

        at_levels = [(there(a), there(b), there(c)) for a, b, c in levels]
        return cls(filled[..., 0], filled[..., 1], at_levels, there(tokens).argsort())


def _check_alone(kind: Output, config: ModelConfig) -> None:
    linear = config.tied or config.mlm_head or config.logit_softcap or config.logit_scale != 1
    fits = config.unembed and not linear
    requires(fits, f"unembed, no tied, mlm_head, logit_softcap and logit_scale under {kind}")
    requires(config.d_vocab > 1, f"d_vocab >= 2 under {kind}")
