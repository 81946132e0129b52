"""Running a model with some edges only: every other edge carries its sender's value of another run.

The input of a head, an MLP or the logits is a sum over earlier senders. In a circuit it is the sum of what the kept
senders say in THIS run, in which they themselves hear the circuit only, and of what the dropped ones said in the run
that replaces them (the evaluation of EAP-IG, Hanna et al. 2024, and of the MIB benchmark, Mueller et al. 2025,
arXiv:2504.13151). That is the ordinary pass with sum over dropped u of (replaced_u - current_u) added to each input.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal, get_args

import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from interp.causal.contrast import Contrast, Watched
from interp.causal.graph import EdgeGraph
from interp.circuits.edge_scores import START, Change
from interp.circuits.sender_outputs import Outputs, head_matrices, head_outputs, mlp_output
from interp.core.precision import wide
from interp.core.shapes import shape_text
from interp.data.batch import Batch
from interp.data.text import Prompts
from interp.model.sites import final_stream
from interp.model.tap import Edit, Read, Tap
from interp.model.transformer import Transformer
from interp.passes.metrics import Metric, logit_difference
from interp.passes.observe import Subject
from interp.passes.sweep import DEVICE_SHARE, HOST_MEMORY

Replacement = Literal["resample", "mean", "zero"]
"""What a dropped edge carries: its sender's value in the corrupted run of the same pair; its mean over reference
prompts, position by position; nothing."""


@dataclass(frozen=True, eq=False)
class Interchange:
    """Pairs of prompts, a metric, and what dropped edges carry: everything but the circuits.

    Example:
        >>> pairs = torch.tensor([[5, 6, 7]]), torch.tensor([[5, 9, 7]])
        >>> task = Interchange.of(model, *pairs, metric=logit_difference(3, 4))
        >>> whole = task.graph.exists
        >>> task.run(torch.stack([whole, whole & False])).shape
        torch.Size([2, 1])
    """

    model: Transformer
    pair: Contrast
    metric: Metric
    replacement: Replacement = "resample"
    reference: Batch | None = None
    """What a mean is taken over; None = the corrupted prompts."""
    memory: int | None = None
    """Bytes that one pass may hold; None = as suits the device."""

    def __post_init__(self) -> None:
        if self.replacement not in get_args(Replacement):
            raise ValueError(f"replacement must be one of {get_args(Replacement)}, got {self.replacement!r}")

    @classmethod
    def of(
        cls,
        model: Subject,
        clean: Prompts,
        corrupt: Prompts,
        *,
        metric: Metric | None = None,
        replacement: Replacement = "resample",
        reference: Prompts | None = None,
        prepend_bos: bool = True,
    ) -> "Interchange":
        """The pairs, checked. metric: None is the logit difference of the answers that the clean batch carries.

        Errors: ValueError for pairs that do not align, models whose stream is no sum (`EdgeGraph.of`), an unknown
        replacement, a reference without a mean, or one of another width or that lacks positions of the prompts.
        """
        metric = logit_difference() if metric is None else metric
        EdgeGraph.of(model.transformer.config)
        pair = Contrast.of(model, clean, corrupt, metric, prepend_bos=prepend_bos)
        if reference is None:
            return cls(model.transformer, pair, metric, replacement)
        if replacement != "mean":
            raise ValueError(f"reference prompts belong to replacement='mean', got {replacement!r}")
        other = model.text.batch(reference, prepend_bos=prepend_bos)
        ours, theirs = pair.clean.real.any(0), other.real.any(0)
        if ours.shape != theirs.shape or bool((ours & ~theirs).any()):
            raise ValueError(
                "a mean by position requires reference prompts as long as the clean ones, got "
                f"{int(theirs.sum())} positions for {int(ours.sum())}"
            )
        return cls(model.transformer, pair, metric, replacement, other)

    @cached_property
    def graph(self) -> EdgeGraph:
        """The graph of the model's edges."""
        return EdgeGraph.of(self.model.config)

    @torch.no_grad()
    def run(self, kept: Bool[Tensor, "c sender receiver"]) -> Float[Tensor, "c b"]:
        """The metric of every pair under every circuit (True = the edge is kept; cells that are no edge do not count).

        With all edges it is the clean run, with none, resampled, the corrupted one. Circuits and pairs are rows of
        common passes, packed to `memory`: a row holds, per position, about 8 [head, d_model] (the heads' own copies of
        the stream, and what one layer of senders says at a time) and every sender's output, heads d_head wide.
        """
        if kept.ndim != 3 or kept.shape[1:] != self.graph.exists.shape:
            wanted = shape_text(self.graph.exists.shape)
            raise ValueError(
                f"masks [circuit, sender, receiver] of {wanted} are required, got {shape_text(kept.shape)}"
            )
        rows = self._rows()
        common = self._common() if self.replacement != "resample" else None
        found = []
        for part in self.pair.split(rows):
            watched, replaced = self._replaced(part, common)
            packs = kept.split(max(1, rows // len(part.clean)))
            found.append(torch.cat([self._pack(watched, part, pack, replaced) for pack in packs]))
        return torch.cat(found, 1)

    def _pack(
        self, watched: Watched, part: Contrast, kept: Bool[Tensor, "c s r"], replaced: Outputs
    ) -> Float[Tensor, "c b"]:
        """Some circuits of some pairs, in one pass."""
        example = torch.arange(len(part.clean)).repeat(len(kept))
        rows = part.clean.rows(example).to(self.model.device)
        dropped = (self.graph.exists & ~kept.cpu()).to(replaced.start)
        final = Mixed(self.model, self.graph, dropped, replaced).final(rows)
        return wide(watched.value(final, rows, example)).unflatten(0, (len(kept), -1))

    def _replaced(self, part: Contrast, common: Outputs | None) -> tuple[Watched, Outputs]:
        """Who judges these pairs, and what their dropped edges carry."""
        watched = Watched(self.model, self.metric)
        if self.metric.compares:
            clean = watched.recorded(part.clean, ())
            watched = Watched(self.model, self.metric, watched.columns(clean.output, part.clean))
        if common is not None:
            return watched, common
        seen = watched.recorded(part.corrupt, Change.reads(self.model))
        return watched, Outputs.of(self.model, dict(seen.trace))

    def _common(self) -> Outputs:
        """The one value of every sender that replaces it in all pairs."""
        watched, reads = Watched(self.model, self.metric), Change.reads(self.model)
        reference = self.pair.corrupt if self.reference is None else self.reference
        if self.replacement == "zero":
            one = watched.recorded(self.pair.clean.rows(torch.arange(1)), reads)
            return Outputs.of(self.model, dict(one.trace)).zero(self.graph.n_heads)
        total, count = None, reference.real.sum(0).clamp_min(1)
        for some in reference.split(self._rows()):
            seen = Outputs.of(self.model, dict(watched.recorded(some, reads).trace))
            part = seen.summed(some.real.double() / count)
            total = part if total is None else total + part
        assert total is not None
        return total

    def _rows(self) -> int:
        """How many rows one pass may have."""
        config, columns = self.model.config, self.pair.clean.tokens.shape[1]
        inside = config.d_model * (8 * config.n_heads + 24)
        said = config.n_layers * (config.n_heads * config.head_width + config.d_model)
        logits = config.d_vocab * (columns if self.metric.everywhere else 1)
        return max(1, self._budget() // (4 * columns * (inside + said) + 8 * logits))

    def _budget(self) -> int:
        if self.memory is not None:
            return self.memory
        if self.model.device.type != "cuda":
            return HOST_MEMORY
        return torch.cuda.mem_get_info(self.model.device)[0] // DEVICE_SHARE


class Mixed:
    """One pass of several circuits; rows are `circuit, pair`. What the senders say is read off the pass as it runs."""

    def __init__(
        self,
        model: Transformer,
        graph: EdgeGraph,
        dropped: Float[Tensor, "c sender receiver"],
        replaced: Outputs,
    ) -> None:
        self._model, self._graph, self._replaced = model, graph, replaced
        self._dropped = dropped
        self._any = dropped.any(0)
        """Which edges any of the circuits drops."""
        self._held = dropped
        """The corrections of a layer's queries, keys and values, until the last of them is visited."""
        self._tap = Tap(Change.reads(model), list(self._edits()))

    def final(self, rows: Batch) -> Float[Tensor, "r p d"]:
        """The final stream of every row."""
        found: Tensor = self._model(
            rows.tokens, self._tap, stop=self._model.config.n_layers, keep=rows.keep, documents=rows.documents,
            types=rows.types, memory=rows.memory,
        )  # fmt: skip
        self._tap.close()
        return found

    def _edits(self) -> Iterator[Edit]:
        """One at every input of the layers and MLPs that some circuit drops an edge into."""
        for layer in range(self._graph.n_layers):
            yield from self._at(self._graph.inputs(layer))
            if self._graph.mlp:
                yield from self._at(
                    slice(self._graph.mlp_receiver(layer), self._graph.mlp_receiver(layer) + 1)
                )
        yield from self._at(slice(len(self._graph.receivers) - 1, len(self._graph.receivers)))

    def _at(self, block: slice) -> Iterator[Edit]:
        """The edits of inputs that see the same senders: their corrections are computed together, at the first."""
        if bool(self._any[:, block].any()):
            for site, receivers, heads in places(self._model, self._graph):
                if block.start <= receivers.start < block.stop:
                    yield Edit(site, partial(self._corrected, receivers=receivers, block=block, heads=heads))

    def _corrected(self, x: Tensor, receivers: slice, block: slice, heads: bool) -> Tensor:
        """What these inputs are in the circuits."""
        if receivers.start == block.start:
            self._held = self._correction(block)
        added = self._held[:, receivers.start - block.start : receivers.stop - block.start].to(x.device)
        return x + rearrange(added, "c v b p d -> (c b) p v d" if heads else "c 1 b p d -> (c b) p d")

    def _correction(self, receivers: slice) -> Float[Tensor, "c v b p d"]:
        """The sum over dropped senders of (replaced - current), one layer of senders at a time."""
        seen = int(self._graph.visible[receivers.start])
        start = self._change(wide(self._tap.values[Read(START)]), self._replaced.start)
        total = einsum(start, self._dropped[:, 0, receivers], "c b p d, c v -> c v b p d")
        for layer in range(self._graph.n_layers):
            heads = self._graph.heads(layer)
            if heads.start >= seen:
                break
            if bool(self._any[heads, receivers].any()):
                total += self._from_heads(layer, receivers)
            mlp = heads.stop
            if self._graph.mlp and mlp < seen and bool(self._any[mlp, receivers].any()):
                change = self._change(mlp_output(self._tap.values, layer), self._replaced.mlp[layer])
                total += einsum(change, self._dropped[:, mlp, receivers], "c b p d, c v -> c v b p d")
        return total

    def _from_heads(self, layer: int, receivers: slice) -> Float[Tensor, "c v b p d"]:
        """The part of the heads of one layer; a bias behind their norm is replaced where all of them are."""
        dropped, replaced = self._dropped[:, self._graph.heads(layer), receivers], self._replaced.heads[layer]
        count = replaced.shape[2]
        if count > dropped.shape[1]:
            dropped = torch.cat((dropped, dropped.amin(1, keepdim=True)), 1)
        change = self._change(head_outputs(self._model, self._tap.values, layer)[:, :, :count], replaced)
        out = head_matrices(self._model, layer)[:count].to(change)
        said = einsum(change, out, "c b p h e, h e d -> h c b p d")
        return einsum(dropped, said, "c h v, h c b p d -> c v b p d")

    def _change(self, current: Float[Tensor, "r p ..."], replaced: Float[Tensor, "n p ..."]) -> Tensor:
        """replaced - current, `[c b p ...]`."""
        return replaced - current.unflatten(0, (len(self._dropped), -1))


def places(model: Transformer, graph: EdgeGraph) -> Iterator[tuple[str, slice, bool]]:
    """The site of every input, the receivers it holds, and whether they are heads; in the order of the pass."""
    for layer in range(graph.n_layers):
        first, letters = graph.inputs(layer).start, "qkv"
        for letter, count in zip(letters, (graph.n_heads, graph.n_kv_heads, graph.n_kv_heads), strict=True):
            yield f"blocks.{layer}.hook_{letter}_input", slice(first, first + count), True
            first += count
        if graph.mlp:
            yield f"blocks.{layer}.hook_mlp_in", slice(first, first + 1), False
    last = len(graph.receivers)
    yield final_stream(model.config), slice(last - 1, last), False
