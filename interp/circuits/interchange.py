"""Running a model with the edges of some circuits only: the metric of every pair under every circuit.

The result depends on what the edges outside a circuit carry: values of the corrupted run, means, or zero.
The input of a head, an MLP or the logits is a sum over earlier senders. In a circuit it is the sum of the kept
senders' outputs in THIS run, in which they themselves read the circuit only, and of the dropped ones' outputs in the
run that replaces them (the evaluation of EAP-IG, Hanna et al. 2024, and of the MIB benchmark, Mueller et al. 2025,
arXiv:2504.13151). That is the ordinary pass with sum over dropped u of (replaced_u - current_u) added to each input
(`DroppedEdges`); all circuits of one question are rows of common passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from interp.causal.graph import EdgeGraph
from interp.causal.stand_ins import StandIn, StandIns
from interp.circuits.edge_circuit import Circuit
from interp.circuits.edge_scores import START, SenderChange, check_edits
from interp.core.axes import shape_text
from interp.core.results import labelled
from interp.core.stats import Moments, Partial, Rows, over, upcast
from interp.core.transfers import check, to_device
from interp.core.viewer import Brief
from interp.data.batch import Batch, Prompts
from interp.data.pairs import Pairs
from interp.data.sources import Data
from interp.data.stream import DataSource
from interp.model.edits import ANSWERS, Edit, Function, Mean, Resample, Zero
from interp.model.sites import final_stream
from interp.model.tap import Read
from interp.model.transformer import Transformer
from interp.model.weights import Weights
from interp.passes.frozen import output_norm
from interp.passes.memory import room, that_fit
from interp.passes.metrics import LogitFunction, Metric, as_metric, followed
from interp.passes.needs import Steps, TowardMetric, recorded
from interp.passes.observe import Model, Subject, observe, text_of
from interp.passes.question import ByRow, NotFiniteError, Question
from interp.passes.sweep import MetricOfVariants
from interp.runs.functions import of_pairs

if TYPE_CHECKING:
    import xarray as xr


ReadValues = Mapping[Read, Tensor]
"""Values of the reads of `edge_scores.SenderChange.reads`."""


def run_sender_outputs(model: Transformer, batch: Batch) -> dict[str, Float[Tensor, "b p ..."]]:
    """Addition of every sender to the stream on some prompts, by the site where it is read; heads as z, d_head wide.

    After a norm of the sum of a layer's heads (sandwich and output norms), z is divided by the norm's scale in its own
    run, so that W_O and the linear part of the norm make a head's share of it; the bias b_O is then one head more,
    whose z is 1 / scale.

    Args:
        batch: the prompts.

    Returns:
        By site: [b, p, d], or [b, p, h, e] for heads.
    """
    return sender_outputs(model, observe(model, batch, SenderChange.reads(model), answers_only=True).trace)


def sender_outputs(model: Transformer, values: ReadValues) -> dict[str, Float[Tensor, "b p ..."]]:
    """Addition of every sender to the stream in a pass that was recorded.

    Args:
        values: the pass's answers to `SenderChange.reads`.

    Returns:
        By site, as from `run_sender_outputs`.
    """
    outputs = {START: upcast(values[Read(START)])}
    for layer in range(model.config.n_layers):
        outputs[f"blocks.{layer}.attn.hook_z"] = head_outputs(model, values, layer)
        for mlp in model.config.mlps:
            outputs[f"blocks.{layer}.hook_{mlp}_out"] = mlp_output(values, layer, mlp)
    return outputs


def zero_outputs(model: Transformer) -> dict[str, Float[Tensor, "1 1 ..."]]:
    """Zero outputs of all senders, the replacement "zero", for all examples and positions.

    A bias b_O before a norm of the heads' sum belongs to no head and is not replaced.

    Returns:
        By site: zeros [1, 1, 1], or [1, 1, h, 1] for heads.
    """
    stream = upcast(model.embed.weight[:0]).new_zeros(1, 1, 1)
    z = stream.expand(1, 1, model.config.n_heads)[..., None]
    sites = [read.site for read in SenderChange.reads(model)]
    return {site: z if site.endswith("hook_z") else stream for site in sites}


def head_outputs(model: Transformer, values: ReadValues, layer: int) -> Float[Tensor, "n p h e"]:
    """Outputs of the heads of a layer in a recorded pass, d_head wide, as in `run_sender_outputs`.

    Args:
        values: the pass's answers to `SenderChange.reads`.
        layer: the layer.

    Returns:
        [n, p, h, e]; with an output norm and a bias b_O, that is one head more.
    """
    z, post = upcast(values[Read(f"blocks.{layer}.attn.hook_z")]), Read(f"blocks.{layer}.ln1_post.hook_scale")
    if post not in values:
        return z
    scale = upcast(values[post])[..., None]
    if model.block(layer).attn.out.bias is None:
        return z / scale
    bias_head = torch.zeros_like(z[:, :, :1])
    bias_head[..., 0] = 1
    return torch.cat((z, bias_head), 2) / scale


def head_matrices(model: Transformer, layer: int) -> Float[Tensor, "h e d"]:
    """Matrices that carry the `head_outputs` of a layer to the stream.

    Args:
        layer: the layer.

    Returns:
        [h, e, d].
    """
    out, norm = upcast(Weights(model).layer(layer).W_O), output_norm(model, layer, "attn_out")
    bias = model.block(layer).attn.out.bias
    if norm.sites and bias is not None:
        extra = torch.zeros_like(out[:1])
        extra[0, 0] = upcast(bias)
        out = torch.cat((out, extra))
    return norm.through(out)


def mlp_output(values: ReadValues, layer: int, mlp: str = "mlp") -> Float[Tensor, "n p d"]:
    """Addition of an MLP of a layer to the stream in a recorded pass.

    Args:
        values: the pass's answers to `SenderChange.reads`.
        layer: the layer.
        mlp: which of the layer's MLPs, of `EdgeGraph.mlps`.

    Returns:
        [n, p, d].
    """
    return upcast(values[Read(f"blocks.{layer}.hook_{mlp}_out")])


Replacement = Literal["resample", "mean", "zero"]
"""Value of a dropped edge: its sender's value in the corrupted run of the same pair; its mean over reference prompts,
position by position; nothing.
"""
STAND_INS: Mapping[Replacement, StandIn] = MappingProxyType(
    {"resample": Resample(), "mean": Mean(), "zero": Zero()}
)
Chosen = Circuit | Sequence[Circuit] | Bool[Tensor, "c sender receiver"]
"""One circuit, several, or masks over the edge graph, True at the edges that are kept."""


LEAST_ROOM = 128 << 20
"""Bytes of a pass below which products of few rows cost more than they need to: GPT-2's shape with 16 tokens takes 1.26
s with 8 rows in this room, 1.67 with 2 in a quarter of it (`experiments/bench/circuit_passes.py`)."""
_HELD = "corrections of a layer"
"""Key in the memory of a pass: corrections of a layer's queries, keys and values, until the last is visited."""
_LIVE = "what senders say, for gradients"
"""Key in the memory of a pass with gradients: the outputs of its senders."""
_PARTS = "changes of senders, for gradients"
"""Key in the memory of a pass with gradients: changes carried to the stream, sender by sender, once a pass."""
_CHANGES, _KNOWN = "changes of senders", "how many are known"
"""Keys in the memory of a pass: replaced - current of every sender so far, d_model wide, and the number of them."""


@dataclass(frozen=True, eq=False, repr=False)
class Interchange(Brief, Question):
    """The metric of a model that has the edges of a circuit only, for one circuit or many.

    With all edges it is the metric of the clean run, with none, resampled, that of the corrupted one.

    Args:
        clean, corrupt: prompts; each pair has the same number of tokens, aligned one by one. Files and streams are
            paired row by row.
        circuits: a circuit, several, or masks [circuit, sender, receiver] over the edge graph, True at the edges kept.
            Cells of a mask that are no edge do not count.
        metric: a `Metric`, or a function of the logits [b, v] at the last token; None is the logit difference of the
            answers that come with the clean prompts. A metric that compares, such as the KL divergence, compares with
            the clean run.
        replacement: values of the edges outside a circuit: "resample", of the corrupted run, "mean", over the
            `reference` prompts, or "zero". Resampled is the sender's value in the corrupted run of the same pair;
            means are taken position by position.
        reference: prompts that means are taken over; None: the corrupted ones, for pairs in memory.

    Returns:
        Dataset over `circuit`, in the metric's unit:

        - `value`: mean over prompts, with the ends `low` and `high` of its 95 % interval, and `n`.
        - `each` [prompt, circuit]: metric of every prompt.

    Raises:
        ValueError: pairs that do not align, models (or edits) whose stream is no sum, an unknown replacement, circuits
            of another graph, a reference without a mean, or one that lacks positions of the prompts.

    Memory:
        Circuits and pairs are rows of common passes, as many as memory allows. A row holds, per position, about 8
        [head, d_model] (the heads' own copies of the stream) and every sender's change [sender, d_model], projected
        once a pass.

    Source:
        The evaluation of EAP-IG, Hanna et al. 2024, and of the MIB benchmark, Mueller et al. 2025, arXiv:2504.13151.

    See Also:
        `evaluate_circuit`: faithfulness, completeness and minimality of one circuit.

    Example:
        >>> pairs = torch.tensor([[5, 6, 7]]), torch.tensor([[5, 9, 7]])
        >>> whole = EdgeGraph.of(model.cfg).exists
        >>> found = interchange(model, *pairs, torch.stack([whole, ~whole]), metric=interp.logit_difference(3, 4))
        >>> found["each"].shape
        (1, 2)
    """

    circuits: Chosen
    _: KW_ONLY
    metric: Metric | LogitFunction | None = None
    replacement: Replacement = "resample"
    reference: Prompts | None = None

    def with_data(
        self, model: Model, data: DataSource | Data | Pairs
    ) -> tuple[Question, DataSource | Data | Pairs]:
        """The question with its reference prompts (for means by default the corrupted ones in memory), and the data."""
        return replace(
            self, reference=reference_of(model, self.replacement, self.reference, data, self.metric)
        ), data

    def bind(self, model: Subject) -> ByRow:
        """Passes over rows `circuit, pair`."""
        passes = CircuitPasses.of(model, as_metric(self.metric, model.text), self.replacement, self.reference)
        kept = masks_of(self.circuits, passes.graph)
        return passes.analysis(model, self.name, kept, partial(_finish, name=self.name, passes=passes))


interchange = of_pairs(Interchange)


def reference_of(
    model: Model,
    replacement: Replacement,
    reference: Prompts | None,
    pairs: DataSource | Data | Pairs,
    metric: Metric | LogitFunction | None,
) -> Batch | None:
    """The prompts that means are taken over: the reference, or the corrupted prompts of a batch of pairs.

    Args:
        replacement: what dropped edges carry; only "mean" has reference prompts.
        reference: the prompts that were named, if any.
        pairs: the data of the question.
        metric: the metric, whose answers the prompts must bring.

    Returns:
        The batch; None where there are no means, or where pairs are not in memory.

    Raises:
        ValueError: reference prompts without means.
    """
    check_reference(replacement, reference)
    if reference is not None:
        return text_of(model).batch(reference)
    if replacement != "mean" or not isinstance(pairs, Batch):
        return None
    return followed(pairs.pair()[1], metric, text_of(model))


def check_reference(replacement: str, reference: Prompts | None) -> None:
    """ValueError for reference prompts where nothing takes means.

    Args:
        replacement: what dropped edges carry.
        reference: the prompts that were named, if any.
    """
    if reference is not None and replacement != "mean":
        raise ValueError(f"reference prompts belong to replacement='mean', got {replacement!r}")


def masks_of(circuits: Chosen, graph: EdgeGraph) -> Bool[Tensor, "c sender receiver"]:
    """Masks of the edges that each circuit keeps.

    Args:
        circuits: a circuit, several, or the masks themselves.
        graph: the model's edge graph.

    Returns:
        [c, sender, receiver], True at the edges kept.

    Raises:
        ValueError: masks of another shape, no circuit, or circuits of another graph.
    """
    if isinstance(circuits, Tensor):
        if circuits.shape[1:] != graph.exists.shape:
            raise ValueError(
                f"masks [circuit, sender, receiver] of {shape_text(graph.exists.shape)} booleans are required, got "
                f"{shape_text(circuits.shape)}"
            )
        return circuits
    several = [circuits] if isinstance(circuits, Circuit) else list(circuits)
    if not several:
        raise ValueError("at least one circuit is required, got none")
    for circuit in several:
        if circuit.graph != graph:
            raise ValueError(f"a circuit of {graph} is required, got one of {circuit.graph}")
    return torch.stack([circuit.mask() for circuit in several])


@dataclass(frozen=True, eq=False)
class CircuitPasses:
    """Settings of passes with some edges only: everything but the circuits and the pairs."""

    graph: EdgeGraph
    metric: Metric
    replacement: Replacement
    fill: StandIns
    """Values that replace those of the senders of the edges outside."""

    @classmethod
    def of(
        cls, model: Subject, metric: Metric, replacement: Replacement, reference: Prompts | None
    ) -> CircuitPasses:
        """The settings, checked against the model, with the means over the reference prompts.

        Raises:
            ValueError: models or edits whose stream is no sum, a mean without reference prompts, or reference prompts
                without a mean.
        """
        network = model.transformer
        graph = EdgeGraph.of(network.config)
        check_edits(network)
        check_reference(replacement, reference)
        batch = None if reference is None else model.text.batch(reference)
        rows = 1 if batch is None else rows_of_a_pass(network, batch.tokens.shape[1], everywhere=False)
        fill = StandIns.of(STAND_INS[replacement], network, run_sender_outputs, batch, batch_size=rows)
        return cls(graph, metric, replacement, fill)

    def analysis(
        self,
        model: Subject,
        name: str,
        kept: Bool[Tensor, "c sender receiver"],
        finish: Callable[[Partial], xr.Dataset],
        estimated: tuple[Bool[Tensor, "sender receiver"], Sequence[int]] | None = None,
    ) -> ByRow:
        """The question about every pair's metric under every circuit, as rows `value` [circuit].

        Args:
            estimated: a circuit and some senders of it, for rows `estimate` [sender]: the change of the metric when
                each is taken out of the circuit, to first order.
        """
        return ByRow(
            name,
            partial(_compute, passes=self, kept=kept, estimated=estimated),
            Rows,
            finish,
            self.metric.answers(model.text),
            pairs=True,
        )

    @property
    def attrs(self) -> dict[str, str | float | int]:
        """Attrs of a result of the passes."""
        return {"metric": self.metric.name, "unit": self.metric.unit, "replacement": self.replacement}

    def values(
        self, model: Transformer, batch: Batch, kept: Bool[Tensor, "c sender receiver"]
    ) -> Steps[Float[Tensor, "b c"]]:
        """The metric of some pairs under every circuit."""
        rows = rows_of_a_pass(model, batch.tokens.shape[1], everywhere=self.metric.everywhere)
        values, kept = [], kept.cpu()
        for pairs in batch.split(rows):
            clean, reference = pairs.pair()[0], (yield from self._reference(pairs))
            replaced = yield from self._replacement_values(model, pairs)
            metric_of, parts = MetricOfVariants(self.metric, clean, model, reference), []
            for masks in kept.split(max(1, rows // len(pairs))):
                change = DroppedEdges(model, self.graph, self.graph.exists & ~masks, replaced)
                copies = clean.rows(torch.arange(len(clean)).repeat(len(masks))).to(model.device)
                run = yield from recorded(copies, change.reads, final=True, edits=change.edits)
                end = run.final_at(self.metric)
                del run  # frees the senders' outputs before the logits are computed
                parts.append(metric_of.value(end, len(masks)))
            values.append(torch.cat(parts))
        return torch.cat(values, 1).mT

    def _reference(self, batch: Batch) -> Steps[Float[Tensor, "b n d"] | None]:
        """The clean run's final stream, for a metric that compares with it."""
        if not self.metric.compares:
            return None
        run = yield from recorded(batch.pair()[0], (), final=True)
        return run.reference(self.metric)

    def _replacement_values(self, model: Transformer, batch: Batch) -> Steps[Mapping[str, Tensor]]:
        """Values of dropped edges on some pairs, by the site where their senders are read."""
        if self.replacement == "resample":
            run = yield from recorded(batch.pair()[1], SenderChange.reads(model), exact=True)
            return sender_outputs(model, run.trace)
        values = self.fill.values(batch)
        return zero_outputs(model) if values is None else values

    def first_order(
        self, model: Transformer, batch: Batch, kept: Bool[Tensor, "sender receiver"]
    ) -> Steps[Float[Tensor, "b sender receiver"]]:
        """Change of the metric when each edge of one circuit is dropped, to first order, in each of some pairs.

        It is (replaced - current) of the sender times the gradient at the receiver's input, in the run of the circuit,
        and 0 where the circuit has no edge. Edges that the circuit drops do not enter that run.
        """
        rows = max(1, rows_of_a_pass(model, batch.tokens.shape[1], everywhere=self.metric.everywhere) // 4)
        slopes = []
        for pairs in batch.split(rows):
            slopes.append((yield from self._edge_slopes(model, pairs, kept.cpu())))
        return torch.cat(slopes)

    def _edge_slopes(
        self, model: Transformer, batch: Batch, kept: Bool[Tensor, "s r"]
    ) -> Steps[Float[Tensor, "b s r"]]:
        """The changes of `first_order` for pairs that fit one differentiated pass."""
        toward = TowardMetric(self.metric, (yield from self._reference(batch)))
        replaced = yield from self._replacement_values(model, batch)
        change = DroppedEdges(model, self.graph, (self.graph.exists & ~kept)[None], replaced, True)
        receiver_inputs = tuple(inputs(model, self.graph))
        reads = (*change.reads, *(Read(receiver_input.site, grad=True) for receiver_input in receiver_inputs))
        run = yield from recorded(batch.pair()[0], reads, edits=change.edits, toward=toward)
        trace = run.trace
        writes = torch.cat([change._sender_changes(group, trace) for group in change._known_senders])[:, 0]
        senders = [
            group.rows.start + i
            for group in change._known_senders
            for i in range(group.senders.stop - group.senders.start)
        ]
        slopes = writes.new_zeros(len(batch), *self.graph.exists.shape)
        for receiver_input in receiver_inputs:
            grad = upcast(trace[Read(receiver_input.site, grad=True)])
            grad = grad if receiver_input.heads else grad[:, :, None]
            slopes[:, :, receiver_input.receivers] = torch.einsum("sbpd,bpvd->bsv", writes[senders], grad)
        return slopes.mul_(to_device(kept, slopes.device))


@torch.no_grad()
def _compute(
    model: Transformer,
    batch: Batch,
    passes: CircuitPasses,
    kept: Bool[Tensor, "c sender receiver"],
    estimated: tuple[Bool[Tensor, "sender receiver"], Sequence[int]] | None,
) -> Steps[Mapping[str, Tensor]]:
    values = yield from passes.values(model, batch, kept)
    message = f"{passes.metric.name} is NaN or infinite under some circuit for some prompt"
    check(values.isfinite().all(), lambda: NotFiniteError(message))
    if estimated is None:
        return {"value": values}
    circuit, senders = estimated
    edges = yield from passes.first_order(model, batch, circuit)
    return {"value": values, "estimate": edges.sum(-1)[:, list(senders)].to(values)}


def _finish(merged: Partial, name: str, passes: CircuitPasses) -> xr.Dataset:
    assert isinstance(merged, Rows)
    values = merged.rows["value"]
    return labelled(
        name,
        {
            **Moments.of(values).estimate(("circuit",), fewest=passes.metric.fewest),
            "each": (("prompt", "circuit"), values),
        },
        coords={"circuit": range(values.shape[1])},
        units=passes.metric.unit,
        attrs={**passes.attrs, "interval": over("prompts", passes.metric.fewest)},
    )


def rows_of_a_pass(model: Transformer, columns: int, *, everywhere: bool) -> int:
    """Number of rows `circuit, pair` that one pass may have in the memory that is left.

    Args:
        columns: width of the batch, in tokens.
        everywhere: whether the metric looks at every column.

    Returns:
        At least one row.
    """
    config, graph = model.config, EdgeGraph.of(model.config)
    inside = config.d_model * (8 * config.n_heads + 8 + len(graph.senders))
    numbers = config.n_layers * (config.n_heads * config.head_width + config.d_model)
    logits = config.n_outputs * (columns if everywhere else 1)
    return that_fit(model, 4 * columns * (inside + numbers) + 8 * logits, max(LEAST_ROOM, room(model)))


# --- the change of a pass


def _remember(value: Tensor, site: str, memory: dict[str, object]) -> Tensor:
    """The unchanged output of a sender, after it was stored (with its graph) for the corrections of later inputs."""
    live = memory.setdefault(_LIVE, {})
    assert isinstance(live, dict)
    live[Read(site)] = value
    return value


class ReceiverInput(NamedTuple):
    """One input site and its receivers."""

    site: str
    receivers: slice
    heads: bool
    """Whether the site has an axis of heads."""
    block: slice
    """All receivers that read the same senders; their corrections are computed together, at the first of the sites."""


def inputs(model: Transformer, graph: EdgeGraph) -> Iterator[ReceiverInput]:
    """Every input site of a graph's receivers, in the order of the pass.

    Args:
        graph: the model's edge graph.

    Returns:
        The sites with their receivers.
    """
    for layer in range(graph.n_layers):
        block, first = graph.inputs(layer), graph.inputs(layer).start
        if graph.mlp_before:
            before = slice(first - 1, first)
            yield ReceiverInput(f"blocks.{layer}.hook_mlp_before_in", before, False, before)
        for letter, count in zip("qkv", (graph.n_heads, graph.n_kv_heads, graph.n_kv_heads), strict=True):
            yield ReceiverInput(
                f"blocks.{layer}.hook_{letter}_input", slice(first, first + count), True, block
            )
            first += count
        if graph.mlp:
            mlp = slice(first, first + 1)
            yield ReceiverInput(f"blocks.{layer}.hook_mlp_in", mlp, False, mlp)
    end = slice(len(graph.receivers) - 1, len(graph.receivers))
    yield ReceiverInput(final_stream(model.config), end, False, end)


class KnownSenders(NamedTuple):
    """Senders whose outputs a pass computes at one site: the embeddings, the heads of a layer, or its MLP."""

    site: str
    layer: int | None
    senders: slice
    rows: slice
    """Their rows in the tensor of all changes; heads have one more, for a bias b_O before a norm of their sum."""


@dataclass(frozen=True, eq=False)
class DroppedEdges:
    """Change of one pass over rows `circuit, pair`: corrections at inputs that some circuit drops an edge into.

    The pass must answer `DroppedEdges.reads`: the outputs of its senders are its answers so far.
    """

    model: Transformer
    graph: EdgeGraph
    dropped: Bool[Tensor, "c sender receiver"]
    """The edges that each circuit drops; on the host, which decides by them what is computed."""
    replaced: Mapping[str, Tensor]
    """The values that dropped edges carry instead, of every pair, or of all alike."""
    differentiable: bool = False
    """Whether gradients go through the senders' outputs in this pass; answers to reads have none."""

    @property
    def reads(self) -> tuple[Read, ...]:
        """The reads that the pass has to answer."""
        return SenderChange.reads(self.model)

    @property
    def edits(self) -> tuple[Edit, ...]:
        """The interventions of the pass."""
        heard = [read.site for read in self.reads] if self.differentiable else []
        return tuple(Edit(site, self) for site in (*heard, *self._inputs))

    def at_site(self, site: str, memory: dict[str, object]) -> Function:
        """The function that corrects one input in this pass, or, with gradients, keeps a sender's value."""
        if site not in self._inputs:
            return partial(_remember, site=site, memory=memory)
        written = memory.setdefault(_LIVE, {}) if self.differentiable else memory[ANSWERS]
        assert isinstance(written, Mapping)
        return partial(self._corrected_input, where=self._inputs[site], written=written, memory=memory)

    @cached_property
    def _inputs(self) -> Mapping[str, ReceiverInput]:
        """The inputs, by site, of which some circuit drops an edge: those that need a correction."""
        every = inputs(self.model, self.graph)
        return MappingProxyType({at.site: at for at in every if any(self._drops_into[at.block])})

    @cached_property
    def _drops_into(self) -> list[bool]:
        """Whether some circuit drops an edge into each receiver."""
        return self.dropped.any(0).any(0).tolist()

    @cached_property
    def _drops_out_of(self) -> list[bool]:
        """Whether some circuit drops an edge out of each sender."""
        return self.dropped.any(0).any(1).tolist()

    @cached_property
    def _known_senders(self) -> tuple[KnownSenders, ...]:
        """Groups of senders that write together, in the order of the pass."""
        groups = [KnownSenders(START, None, slice(0, 1), slice(0, 1))]

        def add(name: str, layer: int, senders: slice, rows: int) -> None:
            first = groups[-1].rows.stop
            groups.append(KnownSenders(f"blocks.{layer}.{name}", layer, senders, slice(first, first + rows)))

        for layer in range(self.graph.n_layers):
            mlps = {mlp: self.graph.mlp_sender(layer, mlp) for mlp in self.graph.mlps}
            if "mlp_before" in mlps:
                before = mlps["mlp_before"]
                add("hook_mlp_before_out", layer, slice(before, before + 1), 1)
            rows = self.replaced[f"blocks.{layer}.attn.hook_z"].shape[2]
            add("attn.hook_z", layer, self.graph.heads(layer), rows)
            if "mlp" in mlps:
                add("hook_mlp_out", layer, slice(mlps["mlp"], mlps["mlp"] + 1), 1)
        return tuple(groups)

    @cached_property
    def _dropped_by_row(self) -> Float[Tensor, "c row receiver"]:
        """`dropped` as 0 or 1, by row of the changes; the row of a bias b_O is 1 where all heads of its layer are."""
        columns = []
        for group in self._known_senders:
            columns.append(self.dropped[:, group.senders])
            if group.rows.stop - group.rows.start > group.senders.stop - group.senders.start:
                columns.append(columns[-1].all(1, keepdim=True))
        like = self.replaced[START]
        return to_device(torch.cat(columns, 1).to(like.dtype), like.device)

    def _corrected_input(
        self, x: Tensor, where: ReceiverInput, written: ReadValues, memory: dict[str, object]
    ) -> Tensor:
        """An input's values x plus its corrections, which are computed at the first input of its block and kept."""
        if where.receivers.start == where.block.start:
            memory[_HELD] = self._correction(where.block, written, memory)
        states, first = memory[_HELD], where.block.start
        assert isinstance(states, Tensor)
        added = states[:, where.receivers.start - first : where.receivers.stop - first].to(x.device)
        return x + rearrange(added, "c v b p d -> (c b) p v d" if where.heads else "c 1 b p d -> (c b) p d")

    def _correction(
        self, receivers: slice, written: ReadValues, memory: dict[str, object]
    ) -> Float[Tensor, "c v b p d"]:
        """Correction of each of these receivers' inputs: sum of (replaced - current) over the senders it drops."""
        visible = int(self.graph.visible[receivers.start])
        visible_groups = [group for group in self._known_senders if group.senders.stop <= visible]
        if self.differentiable:  # nothing is written in place
            parts = memory.setdefault(_PARTS, [])
            assert isinstance(parts, list)
            parts += [self._sender_changes(group, written) for group in visible_groups[len(parts) :]]
            return self._sum_of_dropped(torch.cat(parts), receivers)
        if _CHANGES not in memory:
            start = self._change(START, written[Read(START)])
            memory[_CHANGES] = start.new_empty(self._known_senders[-1].rows.stop, *start.shape)
            memory[_KNOWN] = 0
        changes, known = memory[_CHANGES], memory[_KNOWN]
        assert isinstance(changes, Tensor) and isinstance(known, int)
        for group in visible_groups[known:]:
            self._write_changes(group, written, changes[group.rows])
        memory[_KNOWN] = len(visible_groups)
        return self._sum_of_dropped(changes[: visible_groups[-1].rows.stop], receivers)

    def _sum_of_dropped(
        self, changes: Float[Tensor, "s c b p d"], receivers: slice
    ) -> Float[Tensor, "c v b p d"]:
        """Sum of the senders' changes over the edges that each circuit drops into each of these receivers."""
        of_circuit = rearrange(changes, "s c b p d -> c s (b p d)")
        return (self._dropped_by_row[:, : len(changes), receivers].mT @ of_circuit).unflatten(
            -1, changes.shape[2:]
        )

    def _write_changes(
        self, group: KnownSenders, written: ReadValues, out: Float[Tensor, "s c b p d"]
    ) -> None:
        """Write the change of these senders' additions to the stream into `out`; called once per group and pass."""
        if not any(self._drops_out_of[group.senders]):
            out.zero_()
        elif group.layer is None or not group.site.endswith("hook_z"):
            out[0] = self._change(group.site, written[Read(group.site)])
        else:
            change, matrices = self._heads(group, written)
            torch.bmm(rearrange(change, "c b p h e -> h (c b p) e"), matrices, out=out.flatten(1, 3))

    def _sender_changes(self, group: KnownSenders, written: ReadValues) -> Float[Tensor, "s c b p d"]:
        """Change of these senders' additions to the stream as a new tensor, through which gradients flow."""
        if group.layer is None or not group.site.endswith("hook_z"):
            return self._change(group.site, written[Read(group.site)])[None]
        change, matrices = self._heads(group, written)
        return torch.einsum("cbphe,hed->hcbpd", change, matrices)

    def _heads(
        self, group: KnownSenders, written: ReadValues
    ) -> tuple[Float[Tensor, "c b p h e"], Float[Tensor, "h e d"]]:
        """Change of the outputs of a layer's heads, and the matrices that carry it to the stream."""
        assert group.layer is not None
        width = group.rows.stop - group.rows.start
        change = self._change(group.site, head_outputs(self.model, written, group.layer)[:, :, :width])
        return change, head_matrices(self.model, group.layer)[:width].to(change)

    def _change(self, site: str, current: Float[Tensor, "r p ..."]) -> Tensor:
        """replaced - current at one site of senders, [(c b) p ...] -> [c b p ...]."""
        return self.replaced[site] - upcast(current).unflatten(0, (len(self.dropped), -1))
