"""Path patching: how much of a part's effect goes straight to given receivers, and onwards from there.

Activation patching of a head shows all that follows from it. Path patching lets the change out of a sender along the
direct paths to chosen receivers only: queries, keys or values of heads, MLPs, or the logits (Wang et al. 2022,
arXiv:2211.00593, section 3.1 and appendix B; Goldowsky-Dill et al. 2023, arXiv:2304.05969). Norms on the way are
computed anew; a norm of the heads' sum (sandwich, output, post) also changes what the other heads contribute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from interp.causal.contrast import Contrast, Direction
from interp.causal.effects import EffectTable, MeasuredEffects, causal, cells_along, dims_asked, listed
from interp.causal.graph import LOGITS, EdgeGraph, reads_by_qkv
from interp.core.wording import nearest
from interp.data.batch import Batch
from interp.model.config import ModelConfig
from interp.model.edits import Edit, PositionIndex, Set
from interp.model.parts import Part, PartName, as_part
from interp.model.tap import Read
from interp.model.transformer import Transformer
from interp.passes.metrics import LogitFunction, Metric, as_metric
from interp.passes.needs import Steps, recorded, swept, swept_reads
from interp.passes.observe import Subject
from interp.passes.question import ByRow, Question
from interp.passes.variants import Variant
from interp.runs.functions import of_pairs

if TYPE_CHECKING:
    pass

INTO_HEADS = ("query", "key", "value", "group_key", "group_value")
"""Kinds of the inputs of a head."""


@dataclass(frozen=True, eq=False)
class PathPatch(Question):
    """Effect of each sender on direct paths: how far the metric moves when only the receivers see its patched value.

    It tells by which way an effect travels: directly, or through the receivers that are named.

    For each sender:

    1. The sender takes its value of the other run, all other heads keep theirs, and the inputs of the receivers are
       computed: the change travels through the residual stream, its norms and (unless freeze_mlps) the MLPs.
    2. The receivers get those inputs in an untouched run, and everything after them is computed.

    For the receiver `logits` the first run is the result. All senders are two planned sweeps.

    Args:
        clean, corrupt: prompts; each pair has the same number of tokens, aligned one by one. Files and streams are
            paired row by row.
        receivers: inputs that see the patched value: of heads `L1H2.q`, `.k`, `.v` (the head's own query, ...) or
            `L1G0.k` (where heads share keys), of MLPs `L3.mlp` (the stream before its norm; `L3.mlp_before` for one
            before attention), or "logits" only. Several
            receivers get their inputs together, each of the first run: what one does to another is not passed on. A
            receiver MLP gets its patched input; MLPs on the way to it pass the change on.
        senders: parts whose value is patched: `L0.resid` (the stream that enters layer 0), heads `L0H1` (their z),
            MLPs `L2.mlp` (what they add); None: all that come before a receiver.
        metric: a `Metric`, or a function of the logits [b, v] at the last token; None is the logit difference of the
            answers that come with the clean prompts. A metric that compares, such as the KL divergence, compares with
            the clean run.
        direction: "denoise" patches clean values into the corrupted run, "noise" the other way round.
        by: dims of the result: ("part",), or ("part", "pos"), which patches the sender at one position at a time.
            Effects of positions do not sum.
        freeze_mlps: whether MLPs keep their values too: the effect of the sender's own vector in the receiver's input,
            nothing in between.
        each: False keeps no values of single prompts, which data of any size requires.

    Returns:
        Dataset over `part`, the senders (and `pos`), in the metric's unit. The coordinates `layer` and `kind` ("head",
        "mlp", "resid") tell senders apart.

        - `value`: metric of the patched run minus that of the untouched one, mean over prompts, with the ends `low`
          and `high` of its 95 % interval and the number of prompts `n`.
        - `normalised`: (patched - corrupt) / (clean - corrupt) of the mean metrics.
        - `each` [prompt, part]: effect in every prompt.
        - `changed`: whether the sender differs between the runs in any prompt, and the receivers with it. Where not,
          the effect is 0 because nothing was done.
        - `clean`, `corrupt` [prompt]: metric of the two runs.

    Raises:
        KeyError: a part that the model lacks, or that neither sends nor receives.
        IndexError: a layer or head that does not exist.
        ValueError: pairs that do not align, a sender after all receivers, `logits` together with other receivers,
            cross-attention, positions of prompts of several lengths, or a metric that is the same for both runs in
            every prompt.

    Memory:
        The receivers' sites (all heads of their layer) once per sender and prompt of a batch.

    Source:
        Wang et al. 2022, arXiv:2211.00593, section 3.1 and appendix B; Goldowsky-Dill et al. 2023, arXiv:2304.05969.

    See Also:
        `patch`: all that follows from a part's patched value. `interp.circuits.edge_effects`: the edges of a whole
        graph.

    Example:
        >>> pairs = torch.tensor([[5, 6, 7]]), torch.tensor([[5, 9, 7]])
        >>> found = path_patch(model, *pairs, ["L2H0.q", "L2H3.q"], metric=interp.logit_difference(3, 4))
        >>> found.part.values[:2].tolist()
        ['L0.resid', 'L0H0']
    """

    receivers: PartName | Sequence[PartName] = LOGITS
    _: KW_ONLY
    senders: Sequence[PartName] | None = None
    metric: Metric | LogitFunction | None = None
    direction: Direction = "denoise"
    by: Sequence[str] = ("part",)
    freeze_mlps: bool = False
    each: bool = True

    def bind(self, model: Subject) -> ByRow:
        """Two planned sweeps per batch of pairs."""
        ends, config = listed(self.receivers), model.transformer.config
        routes = Routes.of(config, ends, self.senders, freeze_mlps=self.freeze_mlps)
        metric, dims = (
            as_metric(self.metric, model.text),
            dims_asked(self.by, ("part", "pos"), "path patching"),
        )
        if "part" not in dims:
            raise KeyError("senders are told apart in every result: 'part' is required in `by`")
        coords = {
            "part": [str(part) for part in routes.senders],
            "layer": (("part",), [part.layer for part in routes.senders]),
            "kind": (("part",), [part.kind for part in routes.senders]),
        }
        attrs = {
            "receivers": ", ".join(map(str, routes.receivers)),
            "held": "other heads, MLPs" if self.freeze_mlps else "other heads",
            "direction": self.direction,
        }
        table = EffectTable(self.name, dims, coords, metric, model.text, attrs)
        measure = partial(
            _effects, routes=routes, metric=metric, direction=self.direction, by_pos="pos" in dims
        )
        return causal(model, table, measure, each=self.each, pairs=True)


path_patch = of_pairs(PathPatch)


@dataclass(frozen=True)
class Routes:
    """The senders that are patched into receivers, and the sites held fixed on the way."""

    graph: EdgeGraph
    receivers: tuple[Part, ...]
    senders: tuple[Part, ...]
    """The patched parts; each writes to the stream before a receiver reads it."""
    freeze_mlps: bool = False

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        receivers: Sequence[PartName],
        senders: Sequence[PartName] | None = None,
        *,
        freeze_mlps: bool = False,
    ) -> Routes:
        """The routes that the arguments of `path_patch` describe; raises the errors that it lists."""
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
        n_before = int(graph.visible[[graph.receivers.index(str(end)) for end in ends]].max())
        before = [Part.of(name) for name in graph.senders[:n_before]]
        if senders is None:
            return cls(graph, tuple(ends), tuple(before), freeze_mlps)
        nodes = [_node(sender, graph.senders, config, "sender") for sender in senders]
        if late := [node for node in nodes if node not in before]:
            raise ValueError(
                f"{late[0]} has no way to {', '.join(map(str, ends))}: it writes after all of them have read"
            )
        if not nodes or len(set(nodes)) < len(nodes):
            raise ValueError(f"at least one sender and none twice is required, got {[str(x) for x in nodes]}")
        return cls(graph, tuple(ends), tuple(nodes), freeze_mlps)

    @property
    def to_logits(self) -> bool:
        """Whether the changes go straight to the logits."""
        return [str(end) for end in self.receivers] == [LOGITS]

    @property
    def frozen_sites(self) -> tuple[str, ...]:
        """The sites that keep the values of the run that is patched, except at the sender."""
        mlps = self.graph.mlps if self.freeze_mlps else ()
        kinds = ("attn.hook_z", *(f"hook_{mlp}_out" for mlp in mlps))
        return tuple(f"blocks.{layer}.{kind}" for layer in range(self.graph.n_layers) for kind in kinds)


def _graph(config: ModelConfig) -> EdgeGraph:
    """The senders and receivers of a model, whatever its norms. ValueError for parts that have no name here."""
    if config.cross_attention:
        raise ValueError(
            "path patching holds the heads of self-attention; this model also has cross-attention"
        )
    return EdgeGraph.of_shape(config)


def _node(name: PartName, known: Sequence[str], config: ModelConfig, what: str) -> Part:
    """The part of that name among `known` senders or receivers; an MLP's input has the name of the MLP."""
    part = as_part(name, config)
    if part.kind in ("mlp_input", "mlp_before_input"):
        part = Part(part.kind.removesuffix("_input"), part.layer)
    if str(part) not in known:
        raise KeyError(f"{part} is no {what} of paths in this model; {nearest(str(part), known)}")
    return part


def _input_site(receiver: Part) -> tuple[str, dict[str, int]]:
    """The site of a receiver's input, and the index of its head there, such as `{"head": 3}`."""
    if receiver.kind in ("mlp", "mlp_before"):
        return f"blocks.{receiver.layer}.hook_{receiver.kind}_in", {}
    letter = receiver.kind.removeprefix("group_")[0]
    assert receiver.index is not None
    dim = "head" if letter == "q" else "kv_head"
    return f"blocks.{receiver.layer}.attn.hook_{letter}", {dim: receiver.index}


@torch.no_grad()
def _effects(
    network: Transformer, batch: Batch, routes: Routes, metric: Metric, direction: Direction, by_pos: bool
) -> Steps[MeasuredEffects]:
    return (yield from PathRuns(Contrast.of(batch, direction), routes, by_pos).measured(metric))


@dataclass(frozen=True, eq=False)
class PathRuns:
    """Path patching of some pairs in two planned sweeps: senders to receivers, and from there onwards.

    First sweep: a variant per sender, which takes its value of the other run; every other head keeps its value of the
    own run, so that the change travels through the residual stream (and MLPs) only; the inputs of the receivers are
    recorded. Second sweep: the same number of variants, each with the recorded inputs put, and nothing else held.
    """

    pair: Contrast
    routes: Routes
    by_pos: bool = False

    @property
    def reads(self) -> list[Read]:
        """The sites that are read in both runs."""
        return [
            Read(site)
            for site in sorted({part.site for part in self.routes.senders} | set(self.routes.frozen_sites))
        ]

    def measured(self, metric: Metric) -> Steps[MeasuredEffects]:
        """The effect of every sender (sender x position, if by position)."""
        pair, routes = self.pair, self.routes
        own_run = yield from recorded(pair.own, self.reads, final=True, exact=True)
        other_run = yield from recorded(pair.other, self.reads, final=True, exact=True)
        reference = pair.runs(own_run, other_run)["clean"].reference(metric)
        values = {read.site: (own_run.trace[read], other_run.trace[read]) for read in self.reads}
        variants, frozen = self._sender_variants(values)
        if not routes.to_logits:
            sites = dict.fromkeys(_input_site(receiver)[0] for receiver in routes.receivers)
            inputs = yield from swept_reads(pair.own, variants, list(map(Read, sites)), common=frozen)
            variants, frozen = self._receiver_variants(inputs), Variant()
        sweep = yield from swept(pair.own, variants, metric, common=frozen, reference=reference)
        changed = sweep.changed & self._changed_senders(values).to(sweep.changed.device)
        sweep = replace(sweep, values=torch.where(changed, sweep.values, sweep.base), changed=changed)
        shape = (len(routes.senders), *[-1] * self.by_pos)
        return MeasuredEffects.of(sweep, shape, pair.runs(sweep.base, other_run.value(metric, reference)))

    def _sender_variants(self, values: Mapping[str, tuple[Tensor, Tensor]]) -> tuple[list[Variant], Variant]:
        """First sweep: a variant per sender (and position), and the edits common to all that freeze the other parts."""
        frozen = Variant([Edit(site, Set(values[site][0])) for site in self.routes.frozen_sites])
        put = {site: Set(other_value) for site, (_, other_value) in values.items()}
        variants = [
            Variant([Edit(part, put[part.site], at)])
            for part in self.routes.senders
            for at in self._positions
        ]
        return variants, frozen

    def _receiver_variants(self, recorded_inputs: Mapping[Read, Float[Tensor, "v b ..."]]) -> list[Variant]:
        """Second sweep: for each variant v of the first, one that puts the inputs recorded in it at the receivers."""
        targets = [_input_site(receiver) for receiver in self.routes.receivers]
        inputs = {
            read.site: value.flatten(0, 1) for read, value in recorded_inputs.items()
        }  # [v b ...] -> [(v b) ...]
        n, count = len(self.pair.own), len(next(iter(recorded_inputs.values())))
        return [
            Variant([Edit(site, Set(inputs[site], first=i * n), at) for site, at in targets])
            for i in range(count)
        ]

    @property
    def _positions(self) -> list[dict[str, PositionIndex]]:
        batch = self.pair.own
        return (
            [{"pos": pos} for pos in cells_along("pos", batch, batch.tokens.shape[1])]
            if self.by_pos
            else [{}]
        )

    def _changed_senders(self, values: Mapping[str, tuple[Tensor, Tensor]]) -> Bool[Tensor, "v b"]:
        """Mask of the variants whose sender differs between the two recorded runs: later rounding is no change."""
        differs_at = {}
        for site in {part.site for part in self.routes.senders}:
            own_value, other_value = values[site]
            differs = (own_value != other_value).any(-1)
            differs_at[site] = differs if self.by_pos else differs.any(1)
        masks = [_at_part(part, differs_at[part.site]) for part in self.routes.senders]
        return torch.cat([cell.mT for cell in masks]) if self.by_pos else torch.stack(masks)


def _at_part(part: Part, cells: Bool[Tensor, "b ..."]) -> Bool[Tensor, "b *p"]:
    """The mask of one part, from the mask of its site: that of its head, or all of it."""
    return cells if part.index is None else cells[..., part.index]
