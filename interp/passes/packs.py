"""Which variants of a sweep run in one pass (a pack), so that the total cost is lowest.

A variant differs from the base run from some block and some column on. A pack is computed from the first column of any
of its variants: it computes some columns in vain, and saves passes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import torch

from interp.model.config import ModelConfig

HOST_FIXED = 32.0
"""Cost of reading a block's weights in a pass on a CPU, in tokens that it could have computed instead."""
DEVICE_FIXED = 10**10
"""Multiplications that an accelerator could have done while the host launches the operators of one more block."""
MOST_COLUMNS = 64
"""The most first columns that are distinguished; if there are more, neighbouring ones are put together."""


@dataclass(frozen=True)
class Start:
    """First block and column at which a variant differs from the base run; `idle` if it changes nothing watched."""

    layer: int
    column: int
    idle: bool = False


@dataclass(frozen=True)
class Pack:
    """Variants that go through the model together from one column on, those of lower layers first."""

    variants: tuple[int, ...]
    column: int


@dataclass(frozen=True)
class SweepPlan:
    """The packs of a sweep, and their cost against one full pass per variant."""

    starts: tuple[Start, ...]
    packs: tuple[Pack, ...]
    examples: int
    columns: int
    n_layers: int
    head: float
    """Cost of the unembedding of one column, in columns of one block."""
    everywhere: bool
    """Whether logits are needed at every column."""
    enters: bool = True
    """Whether the model can be entered at a later block than the first."""

    @property
    def cost(self) -> float:
        """Columns of one block that will be computed, the base run and the unembedding included."""
        columns = self.columns * self.n_layers + self._unembedding_cost
        for pack in self.packs:
            blocks = sum(self.n_layers - self.starts[i].layer for i in pack.variants)
            columns += blocks * (self.columns - pack.column) + len(pack.variants) * self._unembedding_cost
        return self.examples * columns

    @property
    def passes(self) -> float:
        """Number of full passes over these examples that the sweep costs, the unembedding apart."""
        return self.cost / (self.examples * self.columns * max(1, self.n_layers))

    @property
    def naive_cost(self) -> float:
        """The cost of a loop that runs the whole model and all logits for every variant, and once without."""
        per_run = self.columns * (self.n_layers + self.head)
        return self.examples * (1 + len(self.starts)) * per_run

    @property
    def _unembedding_cost(self) -> float:
        return self.head * (self.columns if self.everywhere else 1)

    def explain(self) -> str:
        """The passes that will run, and what they save, in words."""
        idle = sum(start.idle for start in self.starts)
        n, e = len(self.starts), self.examples
        layers = [start.layer for start in self.starts if not start.idle]
        firsts = sorted({pack.column for pack in self.packs})
        share = self.cost / self.naive_cost
        lines = [
            f"{n} variants of {e} examples: {self.columns} columns, {self.n_layers} blocks",
            f"{idle} change nothing that is watched: they get the base run's value",
        ]
        if layers:
            lines.append(
                f"{n - idle} run in {len(self.packs)} packs, entering at blocks {min(layers)} to {max(layers)}, "
                f"from columns {', '.join(map(str, firsts))}"
            )
        if not self.enters:
            lines.append("this network takes no later start: every pack runs through all of its blocks")
        where = "every column" if self.everywhere else "one column per row"
        lines.append(f"logits at {where}; {share:.1%} of the work of {n} full passes")
        return "\n".join(lines)


def planned(
    starts: Sequence[Start],
    config: ModelConfig,
    examples: int,
    columns: int,
    *,
    tokens: int,
    everywhere: bool,
    fixed: float = HOST_FIXED,
) -> SweepPlan:
    """The plan of a sweep: packs of at most `tokens` tokens each, at the least total cost.

    Args:
        fixed: cost of a block in a pass besides its tokens, in tokens (`fixed_cost`).
    """
    active = sorted((i for i, s in enumerate(starts) if not s.idle), key=lambda i: starts[i].column)
    packs = []
    for group in _column_groups(active, starts, config.n_layers, examples, columns, fixed):
        column = min(starts[i].column for i in group)
        size = max(1, tokens // (examples * (columns - column)))
        group = sorted(group, key=lambda i: starts[i].layer)
        packs += [Pack(tuple(group[i : i + size]), column) for i in range(0, len(group), size)]
    head = config.n_outputs * config.d_model / block_products(config) if config.unembed else 0.0
    return SweepPlan(tuple(starts), tuple(packs), examples, columns, config.n_layers, head, everywhere)


def _column_groups(
    active: Sequence[int], starts: Sequence[Start], n_layers: int, examples: int, columns: int, fixed: float
) -> list[list[int]]:
    """The variants in groups of neighbouring first columns, at the least total cost (dynamic programming).

    The cost of a group is (blocks of its variants) * (columns from its first on) * examples + fixed * deepest variant.
    """
    step = -(-columns // MOST_COLUMNS)
    by_column: dict[int, list[int]] = {}
    for i in active:
        by_column.setdefault(starts[i].column // step, []).append(i)
    members = [by_column[c] for c in sorted(by_column)]
    firsts = [min(starts[i].column for i in group) for group in members]
    blocks = [sum(n_layers - starts[i].layer for i in group) for group in members]
    depths = [max(n_layers - starts[i].layer for i in group) for group in members]
    best, cut = [0.0] + [inf] * len(members), [0] * (len(members) + 1)
    for end in range(1, len(members) + 1):
        total = deepest = 0
        for begin in range(end - 1, -1, -1):
            total, deepest = total + blocks[begin], max(deepest, depths[begin])
            cost = best[begin] + total * (columns - firsts[begin]) * examples + fixed * deepest
            if cost < best[end]:
                best[end], cut[end] = cost, begin
    groups, end = [], len(members)
    while end:
        groups.append([i for group in members[cut[end] : end] for i in group])
        end = cut[end]
    return groups[::-1]


def fixed_cost(config: ModelConfig, device: torch.device) -> float:
    """Fixed cost of one more block in a pass, in tokens that could have been computed meanwhile.

    On a CPU the reading of its weights; on an accelerator the launches, which cost the same for a block of any width.
    """
    return HOST_FIXED if device.type == "cpu" else HOST_FIXED + DEVICE_FIXED / block_products(config)


def block_products(config: ModelConfig) -> int:
    """Multiplications of one token in one block's matrices (attention scores apart)."""
    attention = config.d_model * config.head_width * 2 * (config.n_heads + config.kv_heads)
    return attention + config.d_model * config.mlp_width * len(config.mlps)


def halves(pack: Pack) -> list[Pack]:
    """A pack cut into two; MemoryError for a pack of one variant."""
    middle = len(pack.variants) // 2
    if not middle:
        raise MemoryError(
            "one variant of these examples does not fit into the device's memory: give the sweep fewer examples"
        )
    torch.cuda.empty_cache()
    return [Pack(pack.variants[middle:], pack.column), Pack(pack.variants[:middle], pack.column)]
