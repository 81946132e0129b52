"""The two runs of path patching as planned sweeps: senders to receivers with the other heads held, then onwards.

First sweep: a variant per sender, which takes its value of the other run; every other head keeps its value of the own
run, so that the change travels through the residual stream (and MLPs) only; the inputs of the receivers are recorded.
Second sweep: the same number of variants, each with the recorded inputs put, and nothing else held.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.causal.contrast import Watched
from interp.causal.graph import INPUT, LOGITS, EdgeGraph, reads_by_qkv
from interp.core.shapes import nearest
from interp.data.batch import Batch
from interp.model.config import ModelConfig
from interp.model.edits import Edit, Set
from interp.model.sites import DIMS
from interp.model.tap import Read
from interp.model.transformer import Transformer
from interp.passes.metrics import Metric
from interp.passes.sweep import Sweep, Swept
from interp.passes.variants import Variant

START = "blocks.0.hook_resid_pre"
_NODE = re.compile(r"m(?P<mlp>\d+)|a(?P<layer>\d+)\.[hg](?P<head>\d+)(?:<(?P<part>[qkv])>)?")


@dataclass(frozen=True)
class Place:
    """Where a sender writes, or what a receiver reads: a site, and the head of it."""

    site: str
    axis: str | None = None
    """The axis of the heads; None for the whole site."""
    head: int = 0

    @classmethod
    def of(cls, name: str, *, reading: bool) -> "Place":
        """The place of a node: its output (`input`, `a1.h2`, `m3`), or what it reads (`a1.h2<q>`, `a1.g0<k>`, `m3`)."""
        if name == INPUT:
            return cls(START)
        found = _NODE.fullmatch(name)
        assert found is not None
        if found["mlp"]:
            return cls(f"blocks.{found['mlp']}.hook_mlp_{'in' if reading else 'out'}")
        part = found["part"] if reading else "z"
        return cls(
            f"blocks.{found['layer']}.attn.hook_{part}", "g" if part in "kv" else "h", int(found["head"])
        )

    def put(self, values: Set, *, pos: int | None = None) -> Edit:
        """The values of the site here, at one position or at all."""
        at = {} if self.axis is None else {DIMS[self.axis]: self.head}
        return Edit(self.site, values, at if pos is None else {**at, "pos": pos})

    def differs(self, one: Tensor, other: Tensor) -> Bool[Tensor, "b p"]:
        """Where two values of the site differ here."""
        unlike = (one != other).any(-1)
        return unlike if self.axis is None else unlike[..., self.head]


@dataclass(frozen=True)
class Routes:
    """Which senders are patched into which receivers, and what is held on the way."""

    graph: EdgeGraph
    receivers: tuple[str, ...]
    senders: tuple[int, ...]
    """Places in `graph.senders`; each has a way to a receiver."""
    freeze_mlps: bool = False

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        receivers: Sequence[str],
        senders: Sequence[str] | None = None,
        *,
        freeze_mlps: bool = False,
    ) -> "Routes":
        """The routes that `path_patch` was asked for, see there."""
        if config.cross_attention:
            raise ValueError(
                "path patching holds the heads of self-attention; this model also has cross-attention"
            )
        if config.macaron:
            raise ValueError(
                "path patching has one name for the MLP of a block; the blocks of this model have two (Macaron)"
            )
        into_heads = any("<" in end for end in receivers)
        if into_heads and not reads_by_qkv(config):
            raise ValueError(
                "path patching into a head requires that it reads the stream as queries, keys and values alone; "
                f"this model mixes positions by {config.mixer}"
            )
        graph = EdgeGraph(
            config.n_layers, config.n_heads, config.kv_heads, config.mlp is not None, config.parallel
        )
        ends = tuple(dict.fromkeys(receivers))
        if not ends or (LOGITS in ends and len(ends) > 1):
            raise ValueError(
                f"receivers are inputs of heads and MLPs, at least one, or '{LOGITS}' alone, got {list(ends)}"
            )
        seen = int(graph.visible[[_index(end, graph.receivers, "receiver") for end in ends]].max())
        if senders is None:
            return cls(graph, ends, tuple(range(seen)), freeze_mlps)
        asked = {name: _index(name, graph.senders, "sender") for name in senders}
        if late := [name for name, i in asked.items() if i >= seen]:
            raise ValueError(f"{late[0]} has no way to {', '.join(ends)}: it writes behind all of them")
        if not asked:
            raise ValueError("at least one sender is required, got none")
        return cls(graph, ends, tuple(sorted(asked.values())), freeze_mlps)

    @property
    def to_logits(self) -> bool:
        """Whether the changes go straight to the logits."""
        return self.receivers == (LOGITS,)

    @cached_property
    def sources(self) -> tuple[Place, ...]:
        """What each sender writes."""
        return tuple(Place.of(self.graph.senders[i], reading=False) for i in self.senders)

    @cached_property
    def targets(self) -> tuple[Place, ...]:
        """What each receiver reads."""
        return tuple(Place.of(end, reading=True) for end in self.receivers)

    @property
    def held(self) -> tuple[str, ...]:
        """The sites that keep the own run's values, but for the sender."""
        kinds = ("attn.hook_z", *["hook_mlp_out"] * (self.freeze_mlps and self.graph.mlp))
        return tuple(f"blocks.{layer}.{kind}" for layer in range(self.graph.n_layers) for kind in kinds)


def _index(name: str, known: tuple[str, ...], what: str) -> int:
    if name not in known:
        raise KeyError(f"no {what} {name!r} in this model; {nearest(name, known)}")
    return known.index(name)


@dataclass(frozen=True, eq=False)
class PathRuns:
    """Path patching of some pairs: `own` rows, into which values of `other` rows are put."""

    model: Transformer
    own: Batch
    other: Batch
    routes: Routes
    by_pos: bool = False

    @torch.no_grad()
    def run(
        self, metric: Metric, reference: Float[Tensor, "b n d"] | None
    ) -> tuple[Swept, Float[Tensor, "b"]]:
        """The metric of every sender (sender x position, if by position), and of the other run.

        reference: what a metric that compares compares with.
        """
        watched = Watched(self.model, metric, reference)
        sites = {place.site for place in self.routes.sources} | set(self.routes.held)
        reads = [Read(site) for site in sorted(sites)]
        here, there = (watched.recorded(batch, reads) for batch in (self.own, self.other))
        values = {read.site: (here.trace[read], there.trace[read]) for read in reads}
        direct = self._direct(values)
        last = direct if self.routes.to_logits else self._onwards(direct)
        found = last.run(metric, reference)
        changed = found.changed & self._differing(values).to(found.changed.device)
        return Swept(torch.where(changed, found.values, found.base), found.base, changed), watched.value(
            there.output, self.other
        )

    def _direct(self, values: Mapping[str, tuple[Tensor, Tensor]]) -> Sweep:
        """Senders to receivers: what is held is put in every run, each sender on top of it."""
        held = Variant([Edit(site, Set(values[site][0])) for site in self.routes.held])
        other = {site: Set(there) for site, (_, there) in values.items()}
        variants = [
            Variant([place.put(other[place.site], pos=pos)])
            for place in self.routes.sources
            for pos in self._positions
        ]
        return Sweep(self.model, self.own, variants, held)

    def _onwards(self, direct: Sweep) -> Sweep:
        """Receivers to the end: each variant puts what its receivers read on the way from the sender."""
        targets = self.routes.targets
        seen = direct.read([Read(site) for site in dict.fromkeys(place.site for place in targets)])
        donors = {read.site: value.flatten(0, 1) for read, value in seen.items()}
        variants = [
            Variant([place.put(Set(donors[place.site], first=i * len(self.own))) for place in targets])
            for i in range(len(direct.variants))
        ]
        return Sweep(self.model, self.own, variants)

    @property
    def _positions(self) -> list[int | None]:
        return [*range(self.own.tokens.shape[1])] if self.by_pos else [None]

    def _differing(self, values: Mapping[str, tuple[Tensor, Tensor]]) -> Bool[Tensor, "v b"]:
        """Whether each variant puts anything new; rounding in later runs must not look like a change."""
        cells = [place.differs(*values[place.site]) for place in self.routes.sources]
        if self.by_pos:
            return torch.cat([cell.mT for cell in cells])
        return torch.stack([cell.any(1) for cell in cells])


def head_places(graph: EdgeGraph) -> Int[Tensor, "layer head"]:
    """Every head's place among the senders."""
    return torch.tensor([[*range(graph.heads(i).start, graph.heads(i).stop)] for i in range(graph.n_layers)])
