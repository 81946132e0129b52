"""Where the top examples of features come from, and what they are for: sources in attention, and effects on the loss.

The model runs once more, on the listed texts alone. What is found stands at the places of the lists that were made
before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.core.contexts import ContextExamples, TopInContext
from interp.core.extremes import Extremes, TopRows
from interp.core.stats import Partial, upcast
from interp.core.transfers import to_device
from interp.data.batch import Batch
from interp.features.dictionary_metrics import one_text_per_row
from interp.features.feature_cells import FeatureCells
from interp.model.config import ModelConfig
from interp.model.edits import Edit
from interp.model.loss import next_token_loss
from interp.model.records import require
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer
from interp.model.weights import Weights
from interp.passes.needs import Steps, recorded
from interp.passes.question import Values

Z = ".attn.hook_z"
TOKENS_AT_ONCE = 2048
"""Tokens whose logits are held at once."""
PARTS = ("dfa", "dfa_outside", "dfa_bias", "dfa_rest", "loss_change", "loss_effect")


def check_sources(config: ModelConfig, reads: str) -> None:
    """ValueError unless what stands at a site are the heads' z, each a pattern times values."""
    if not reads.endswith(Z):
        raise ValueError(f"dfa=True requires a dictionary that reads attn.hook_z, got one of {reads}")
    layer = int(reads.split(".")[1])
    require("additive", config.mixers[layer : layer + 1], "dfa=True")


class Entries(NamedTuple):
    """Entries of the lists whose texts are in a batch: cell, rank, row of the batch and column of each."""

    cell: Int[Tensor, "n"]
    rank: Int[Tensor, "n"]
    text: Int[Tensor, "n"]
    column: Int[Tensor, "n"]


@dataclass(frozen=True, eq=False)
class ExampleEffects:
    """Rows of a question: the sources of every entry of the lists, and what the feature does to the loss there.

    By text `entry` `[t p w]`, at place 0 the listed value, NaN of cells that do not list the text, and `effects`
    `[t p w]`, the numbers of that entry one after the other; `listed` `[t]`, how many entries a text has.
    """

    cells: FeatureCells
    lists: Extremes
    """The lists of every cell, on the host."""
    before: int
    """Tokens of context before an entry."""
    after: int
    """Tokens of context after an entry."""
    heads: int
    """The number of heads, where sources are wanted; otherwise 0."""
    loss: bool
    """Whether effects on the loss are wanted."""

    @property
    def sizes(self) -> dict[str, int]:
        """How many numbers of each kind an entry has, in their order."""
        offsets = self.before + self.after + 1
        of_sources = (offsets * self.heads, self.heads, *[int(self.heads > 0)] * 2)
        of_loss = (offsets, 1) if self.loss else (0, 0)
        return dict(zip(PARTS, (*of_sources, *of_loss), strict=True))

    @property
    def reduction(self) -> TopInContext:
        """The lists again, in the order that they have, with what is found of each entry."""
        length = sum(self.sizes.values())
        return TopInContext(TopRows(self.lists.rule.k, "entry", before=0, after=length - 1), ("effects",))

    def found(self, lists: Partial) -> dict[str, Float[Tensor, "w k ..."]]:
        """What the reduction kept, by name: `dfa` over offsets and heads, `dfa_outside` over heads, and so on."""
        assert isinstance(lists, ContextExamples)
        parts = lists.along["effects"].split(list(self.sizes.values()), -1)
        found = {name: part for name, part in zip(PARTS, parts, strict=True) if part.shape[-1]}
        for name in ("dfa_bias", "dfa_rest", "loss_effect"):
            if name in found:
                found[name] = found[name][..., 0]
        if "dfa" in found:
            found["dfa"] = found["dfa"].unflatten(-1, (-1, self.heads))
        return found

    def __call__(self, model: Transformer, batch: Batch) -> Steps[Values]:
        """The entries of a batch's texts."""
        texts = one_text_per_row(batch)
        cells, device = len(self.lists.rows), texts.tokens.device
        shape = (len(texts), sum(self.sizes.values()), cells)
        entry, effects = (torch.full(shape, torch.nan, dtype=torch.float64, device=device) for _ in range(2))
        entries = self._entries(texts)
        # a row without any number would be set aside
        count = entries.text.bincount(minlength=len(texts)).double()
        if not len(entries.cell):
            return {"entry": entry, "effects": effects, "listed": count}
        listed, text = entries.text.unique(return_inverse=True)
        found = yield from self._effects(
            model, texts.host().rows(listed).trimmed().to(device), entries._replace(text=text)
        )
        place, cell = (to_device(x, device) for x in (entries.text, entries.cell))
        entry[place, 0, cell] = to_device(self.lists.values[entries.cell, entries.rank], device)
        effects[place, :, cell] = found.to(device)
        return {"entry": entry, "effects": effects, "listed": to_device(count, device)}

    def _entries(self, texts: Batch) -> Entries:
        """The entries whose texts are in the batch, on the host."""
        ids = texts.row
        if ids is None:
            raise ValueError("a list of rows requires rows with identities: number the batch (`Batch.row`)")
        real, (ordered, order) = texts.host().real, ids.cpu().sort()
        place = torch.searchsorted(ordered, self.lists.rows).clamp_max(len(ordered) - 1)
        cell, rank = ((ordered[place] == self.lists.rows) & (self.lists.rows >= 0)).nonzero(as_tuple=True)
        text = order[place[cell, rank]]
        return Entries(cell, rank, text, real.int().argmax(1)[text] + self.lists.positions[cell, rank])

    def _effects(self, model: Transformer, batch: Batch, entries: Entries) -> Steps[Float[Tensor, "n p"]]:
        """All numbers of every entry of a batch whose texts are listed."""
        reads, found = Read(self.cells.tokens.site), []
        entries = Entries(*(to_device(x, batch.tokens.device) for x in entries))
        if self.heads:
            layer = reads.site.removesuffix(Z)
            needed = [reads, *(Read(f"{layer}.attn.hook_{name}") for name in ("pattern", "v"))]
            seen = yield from recorded(batch, needed)
            found.append(self._sources(model, batch, seen.trace, entries))
        if self.loss:
            # reads of patterns would round this pass and those that it is compared with unlike
            seen = yield from recorded(batch, [reads], final=True, exact=True)
            clean = _losses(seen.model, seen.end, batch)
            found.append((yield from self._loss_changes(batch, seen.trace, entries, clean)))
        return torch.cat(found, -1)

    def _offsets(
        self, batch: Batch, entries: Entries
    ) -> tuple[Int[Tensor, "n o"], Bool[Tensor, "n o"], Int[Tensor, "n p"]]:
        """The columns of every entry's context, which are tokens, and how far each column of its row is from it."""
        columns = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        offset = torch.arange(-self.before, self.after + 1, device=columns.device)
        place = entries.column[:, None] + offset
        inside = (place >= 0) & (place < len(columns))
        place = place.clamp(0, len(columns) - 1)
        inside = inside & batch.real[entries.text].gather(1, place)
        return place, inside, columns - entries.column[:, None]

    def _sources(
        self, model: Transformer, batch: Batch, trace: Trace, entries: Entries
    ) -> Float[Tensor, "n p"]:
        """What each head brings from each token to an entry's pre-activation, by context; the rest of it after that."""
        layer, cell, text = self.cells.tokens.site.removesuffix(Z), entries.cell, entries.text
        x = self.cells.dictionary.vectors(trace[Read(self.cells.tokens.site)])[text, entries.column]
        v = trace[Read(f"{layer}.attn.hook_v")][:, :, Weights(model).kv_head()].double()
        pattern = trace[Read(f"{layer}.attn.hook_pattern")][text, :, entries.column].double()
        directions, factor, constant = self.cells.linear(x, cell)
        by_head = rearrange(directions, "w (h e) -> w h e", h=self.heads)
        moved = einsum(v, by_head, "b k h e, w h e -> b w k h")[text, cell]
        term = moved * rearrange(pattern, "n h k -> n k h") * factor[:, None, None]
        term = torch.where(batch.real[text][..., None], term, 0.0)
        place, inside, distance = self._offsets(batch, entries)
        near = term.gather(1, place[..., None].expand(-1, -1, self.heads))
        beyond = ((distance < -self.before) | (distance > self.after))[..., None]
        whole = factor * einsum(directions[cell], x.double(), "n d, n d -> n")
        rest = whole - term.sum((1, 2))
        return torch.cat((
            near.masked_fill(~inside[..., None], torch.nan).flatten(1), (term * beyond).sum(1),
            constant[:, None], rest[:, None],
        ), 1)  # fmt: skip

    def _loss_changes(
        self, batch: Batch, trace: Trace, entries: Entries, clean: Float[Tensor, "b p"]
    ) -> Steps[Float[Tensor, "n p"]]:
        """The change in the loss around each entry, and its mean from the entry on, when the feature is set to 0.

        The passes have as many rows as the one without a change, so that both are rounded alike.
        """
        removed = self._removed(trace, batch)
        changes = []
        for part in torch.arange(len(entries.cell), device=clean.device).split(len(batch)):
            chosen = F.pad(part, (0, len(batch) - len(part)), value=int(part[0]))
            text, cell = entries.text[chosen], entries.cell[chosen]
            rows = batch.rows(text.cpu())
            edit = Edit(self.cells.dictionary.writes or "", partial(_less, removed(text, cell)))
            seen = yield from recorded(rows, [], final=True, exact=True, edits=[edit])
            changes.append((_losses(seen.model, seen.end, rows) - clean[text])[: len(part)])
        change = torch.cat(changes)
        place, inside, distance = self._offsets(batch, entries)
        from_entry = change.masked_fill(distance < 0, torch.nan).nanmean(1, keepdim=True)
        return torch.cat((change.gather(1, place).masked_fill(~inside, torch.nan), from_entry), 1)

    def _removed(self, trace: Trace, batch: Batch) -> _Removed:
        """What every cell writes into the texts of the batch, at the tokens that count."""
        texts, dictionary = self.cells.tokens(trace, batch), self.cells.dictionary
        with torch.no_grad():
            activation = self.cells.activations(dictionary.encode(texts.x), texts.x)
            size = dictionary.scaling(texts.x).scale[..., 0].double()
        activation = activation.masked_fill(~texts.counted[..., None], 0.0)
        activation[..., : len(self.cells.chosen)] *= size[..., None]
        # by text, each moved to column 0 -> by column
        place = batch.places.clamp(0, activation.shape[1] - 1)
        by_column = activation.gather(1, place[..., None].expand(-1, -1, activation.shape[-1]))
        return _Removed(by_column * batch.real[..., None], to_device(self.cells.rows(), batch.tokens.device))


@dataclass(frozen=True, eq=False)
class _Removed:
    """What is subtracted from a site so that a feature is 0 there, and what the dictionary leaves unexplained stays."""

    activation: Float[Tensor, "b p w"]
    rows: Float[Tensor, "w o"]

    def __call__(self, text: Int[Tensor, "n"], cell: Int[Tensor, "n"]) -> Float[Tensor, "n p o"]:
        """Of the chosen cell of each of some rows."""
        return self.activation[text, :, cell][..., None] * self.rows[cell][:, None]


def _less(removed: Float[Tensor, "b p o"], value: Float[Tensor, "b p ..."]) -> Float[Tensor, "b p ..."]:
    """The value of a site without what is removed, in its dtype."""
    wide = upcast(value)
    return (wide - removed.to(wide).view_as(value)).to(value.dtype)


@torch.no_grad()
def _losses(model: Transformer, stream: Float[Tensor, "b p d"], batch: Batch) -> Float[Tensor, "b p"]:
    """The loss in nats of the token after each column; NaN where no token is predicted."""
    width = batch.tokens.shape[1]
    nothing = torch.full(batch.tokens.shape, torch.nan, dtype=torch.float64, device=stream.device)
    if width < 2:
        return nothing
    known = batch.predicted
    for start in range(0, len(batch), step := max(1, TOKENS_AT_ONCE // width)):
        rows = slice(start, start + step)
        keep = None if batch.keep is None else batch.keep[rows]
        logits = model.read_out(upcast(stream[rows]))
        nothing[rows, :-1] = next_token_loss(logits, batch.tokens[rows], keep).double()
    return nothing if known is None else nothing.masked_fill(~F.pad(known, (0, 1)), torch.nan)


def effects_of(merged: Mapping[str, Float[Tensor, "w k ..."]]) -> dict[str, tuple[str, ...]]:
    """The dims of every variable, after those of cells; `dfa_rest` is none of them, but a check."""
    dims = {
        "dfa": ("rank", "offset", "head"), "dfa_outside": ("rank", "head"), "loss_change": ("rank", "offset"),
    }  # fmt: skip
    return {name: dims.get(name, ("rank",)) for name in merged if name != "dfa_rest"}


def rest_words(merged: Mapping[str, Float[Tensor, "w k ..."]]) -> dict[str, str]:
    """What the terms of the pre-activations leave of them, in words, as an attribute."""
    if "dfa_rest" not in merged:
        return {}
    size = merged["dfa"].abs().nansum((-1, -2)) + merged["dfa_outside"].abs().sum(-1)
    worst = (merged["dfa_rest"].abs() / size).nan_to_num(nan=0.0).max()
    return {"dfa": f"sums with its bias to the pre-activation, to {float(worst):.0e} of the terms' sizes"}
