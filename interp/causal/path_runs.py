"""The two runs of path patching as planned sweeps: senders to receivers with the other heads held, then onwards.

First sweep: a variant per sender, which takes its value of the other run; every other head keeps its value of the own
run, so that the change travels through the residual stream (and MLPs) only; the inputs of the receivers are recorded.
Second sweep: the same number of variants, each with the recorded inputs put, and nothing else held.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from interp.causal.contrast import Watched
from interp.causal.graph import LOGITS, EdgeGraph, reads_by_qkv
from interp.core.shapes import nearest
from interp.data.batch import Batch
from interp.model.config import ModelConfig
from interp.model.edits import Edit, Set
from interp.model.parts import Named, Part, as_part
from interp.model.tap import Read
from interp.model.transformer import Transformer
from interp.passes.metrics import Metric
from interp.passes.sweep import Sweep, Swept
from interp.passes.variants import Variant

INTO_HEADS = ("query", "key", "value", "group_key", "group_value")
"""The kinds of what a head reads."""


@dataclass(frozen=True)
class Routes:
    """Which senders are patched into which receivers, and what is held on the way."""

    graph: EdgeGraph
    receivers: tuple[Part, ...]
    senders: tuple[Part, ...]
    """Each has a way to a receiver."""
    freeze_mlps: bool = False

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        receivers: Sequence[Named],
        senders: Sequence[Named] | None = None,
        *,
        freeze_mlps: bool = False,
    ) -> "Routes":
        """The routes that `path_patch` was asked for, see there."""
        graph = _graph(config)
        if any(Part.of(end).kind in INTO_HEADS for end in receivers) and not reads_by_qkv(config):
            raise ValueError(
                "path patching into a head requires that it reads the stream as queries, keys and values alone; "
                f"this model mixes positions by {config.mixer}"
            )
        ends = list(dict.fromkeys(_node(end, graph.receivers, config, "receiver") for end in receivers))
        if not ends or (LOGITS in map(str, ends) and len(ends) > 1):
            raise ValueError(
                f"receivers are inputs of heads and MLPs, at least one, or '{LOGITS}' alone, got "
                f"{[str(end) for end in ends]}"
            )
        seen = int(graph.visible[[graph.receivers.index(str(end)) for end in ends]].max())
        before = [Part.of(name) for name in graph.senders[:seen]]
        if senders is None:
            return cls(graph, tuple(ends), tuple(before), freeze_mlps)
        asked = [_node(each, graph.senders, config, "sender") for each in senders]
        if late := [each for each in asked if each not in before]:
            raise ValueError(
                f"{late[0]} has no way to {', '.join(map(str, ends))}: it writes after all of them have read"
            )
        if not asked or len(set(asked)) < len(asked):
            raise ValueError(f"at least one sender and none twice is required, got {[str(x) for x in asked]}")
        return cls(graph, tuple(ends), tuple(asked), freeze_mlps)

    @property
    def to_logits(self) -> bool:
        """Whether the changes go straight to the logits."""
        return [str(end) for end in self.receivers] == [LOGITS]

    @property
    def held(self) -> tuple[str, ...]:
        """The sites that keep the own run's values, but for the sender."""
        kinds = ("attn.hook_z", *["hook_mlp_out"] * (self.freeze_mlps and self.graph.mlp))
        return tuple(f"blocks.{layer}.{kind}" for layer in range(self.graph.n_layers) for kind in kinds)


def _graph(config: ModelConfig) -> EdgeGraph:
    """The senders and receivers of a model, whatever its norms. ValueError for parts that have no name here."""
    if config.cross_attention:
        raise ValueError(
            "path patching holds the heads of self-attention; this model also has cross-attention"
        )
    if config.macaron:
        raise ValueError(
            "path patching has one name for the MLP of a block; the blocks of this model have two (Macaron)"
        )
    return EdgeGraph(
        config.n_layers, config.n_heads, config.kv_heads, config.mlp is not None, config.parallel
    )


def _node(given: Named, known: Sequence[str], config: ModelConfig, what: str) -> Part:
    """The part of that name among those that send or receive; what an MLP reads goes by the MLP's name."""
    part = as_part(given, config)
    part = Part("mlp", part.layer) if part.kind == "mlp_input" else part
    if str(part) not in known:
        raise KeyError(f"{part} is no {what} of paths in this model; {nearest(str(part), known)}")
    return part


def _read_by(receiver: Part) -> tuple[str, dict[str, int]]:
    """What a receiver reads: the site, and which head of it."""
    if receiver.kind == "mlp":
        return f"blocks.{receiver.layer}.hook_mlp_in", {}
    letter = receiver.kind.removeprefix("group_")[0]
    assert receiver.index is not None
    dim = "head" if letter == "q" else "kv_head"
    return f"blocks.{receiver.layer}.attn.hook_{letter}", {dim: receiver.index}


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
        sites = {part.site for part in self.routes.senders} | set(self.routes.held)
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
            Variant([Edit(part, other[part.site], at)])
            for part in self.routes.senders
            for at in self._positions
        ]
        return Sweep(self.model, self.own, variants, held)

    def _onwards(self, direct: Sweep) -> Sweep:
        """Receivers to the end: each variant puts what its receivers read on the way from the sender."""
        targets = [_read_by(receiver) for receiver in self.routes.receivers]
        seen = direct.read([Read(site) for site in dict.fromkeys(site for site, _ in targets)])
        inputs = {read.site: value.flatten(0, 1) for read, value in seen.items()}
        variants = [
            Variant([Edit(site, Set(inputs[site], first=i * len(self.own)), at) for site, at in targets])
            for i in range(len(direct.variants))
        ]
        return Sweep(self.model, self.own, variants)

    @property
    def _positions(self) -> list[dict[str, int]]:
        return [{"pos": pos} for pos in range(self.own.tokens.shape[1])] if self.by_pos else [{}]

    def _differing(self, values: Mapping[str, tuple[Tensor, Tensor]]) -> Bool[Tensor, "v b"]:
        """Whether each variant puts anything new; rounding in later runs must not look like a change."""
        cells = [_differs(part, *values[part.site]) for part in self.routes.senders]
        if self.by_pos:
            return torch.cat([cell.mT for cell in cells])
        return torch.stack([cell.any(1) for cell in cells])


def _differs(part: Part, one: Tensor, other: Tensor) -> Bool[Tensor, "b p"]:
    """Where two values of a part's site differ in this part."""
    unlike = (one != other).any(-1)
    return unlike if part.index is None else unlike[..., part.index]
