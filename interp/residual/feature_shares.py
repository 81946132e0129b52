"""Direct logit attribution by feature: what the blocks' dictionaries split, and the features that a result keeps.

A dictionary that writes what a sublayer adds splits it into features, a bias, a skip and an error. One that writes the
residual stream rebuilds a sum: its terms stand in place of all that was added up to there. Of thousands of features few
are active at one token, so each row keeps the largest ones by number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.core.memory import check_memory
from interp.core.stats import Partial, Rows
from interp.data.text import Text
from interp.model.config import MLP, ModelConfig
from interp.model.mounted import FEATURES, BlockDictionary, Shares, of_one_block
from interp.model.parts import Part
from interp.model.transformer import Transformer
from interp.passes.answer_tokens import by_answer_token
from interp.passes.edited import edits_at
from interp.passes.question import ByRow

if TYPE_CHECKING:
    import xarray as xr

ACTIVE = 512
"""Most active features of one dictionary that a row keeps by number; those beyond are summed."""


@dataclass(frozen=True)
class Stand:
    """A dictionary and the place where it writes."""

    dictionary: BlockDictionary
    layer: int
    """The block by which its features are called."""
    inner: str
    """The site of the block that it writes."""
    edited: bool
    """Whether edits of the model change its features."""

    @property
    def writes(self) -> str:
        """Full name of the site that it writes."""
        return f"blocks.{self.layer}.{self.inner}"

    @property
    def sites(self) -> tuple[str, ...]:
        """Full names of the sites that its split needs."""
        assert self.dictionary.reads is not None
        edited = (f"blocks.{self.layer}.{FEATURES}",) if self.edited else ()
        return (self.dictionary.reads, self.writes, *edited)

    @property
    def parts(self) -> list[Part]:
        """The parts that it splits off, but for the features themselves."""
        skip = [] if self.dictionary.skip is None else ["feature_skip"]
        return [Part(kind, self.layer) for kind in ("feature_rest", "feature_bias", *skip, "error")]

    def shares(self, direction: Float[Tensor, "b o"], seen: Mapping[str, Tensor]) -> Shares:
        """What each of its terms adds along a direction at the site that it writes."""
        read, written, *edited = (seen[site] for site in self.sites)
        return self.dictionary.shares(direction, read, written, edited[0] if edited else None)


@dataclass(frozen=True)
class Stands:
    """Where the dictionaries of a model stand among what is added to its stream."""

    sublayers: Mapping[tuple[int, str], Stand]
    """Those that write what a sublayer adds, or its heads or neurons."""
    stream: Stand | None
    """The last one that writes the stream, if any: what was added before it has no part of its own."""
    start: tuple[int, str | None]
    """The sublayer after which that one stands, in its block; None: before the first."""
    order: tuple[str, ...]
    """The sublayers of a block."""

    @classmethod
    def of(cls, model: Transformer) -> Stands:
        """The dictionaries of a model.

        Raises:
            ValueError: no dictionary, one that writes a site that is no summand of the stream, or a cross-layer
                transcoder.
        """
        if not model.dictionaries:
            raise ValueError(
                "parts='feature' requires dictionaries in the model's blocks: model.with_dictionaries([dictionary])"
            )
        sublayers: dict[tuple[int, str], Stand] = {}
        found = cls(sublayers, None, (0, None), model.config.sublayers)
        for layer, dictionary in sorted(of_one_block(model.dictionaries, "parts='feature'").items()):
            assert dictionary.writes is not None
            inner = dictionary.writes.removeprefix(f"blocks.{layer}.")
            stand = Stand(dictionary, layer, inner, bool(edits_at(model, layer, (FEATURES,))))
            sublayer = _sublayer_of(inner, model.config)
            if sublayer is not None:
                sublayers[layer, sublayer] = stand
            else:
                found = replace(found, stream=stand, start=_stream_place(layer, inner, model.config))
        return found

    def counts(self, layer: int, sublayer: str) -> bool:
        """Whether a sublayer has parts of its own: whether it adds to the stream after the dictionary of it, if any."""
        start, after = self.start
        return (layer, self.order.index(sublayer)) > (start, -1 if after is None else self.order.index(after))

    @property
    def splitting(self) -> list[Stand]:
        """The dictionaries that split something, in the order of their parts."""
        later = [stand for place, stand in self.sublayers.items() if self.counts(*place)]
        return later if self.stream is None else [self.stream, *later]

    @property
    def sites(self) -> list[str]:
        """Full names of the sites that the splits need."""
        return list(dict.fromkeys(site for stand in self.splitting for site in stand.sites))

    def left_out(self, model: Transformer) -> list[str]:
        """A note where a dictionary has no part, because a later one of the stream stands in its place."""
        layers = sorted(set(model.dictionaries) - {stand.layer for stand in self.splitting})
        if not layers or self.stream is None:
            return []
        listed = ", ".join(map(str, layers))
        return [
            f"the dictionaries of blocks {listed} have no part: that of {self.stream.writes} stands in place of all "
            "that was added before it"
        ]


def _sublayer_of(inner: str, config: ModelConfig) -> str | None:
    """The sublayer whose output, heads or neurons a site of a block holds; None for any other."""
    for sublayer in config.sublayers:
        mixer = sublayer.removesuffix("_out")
        neurons = [f"{mixer}.hook_post"] if mixer.startswith("mlp") and isinstance(config.mlp, MLP) else []
        heads = [f"{mixer}.hook_z"] if mixer in ("attn", "cross_attn") else []
        if inner in (f"hook_{sublayer}", *heads, *neurons):
            return sublayer
    return None


def _stream_place(layer: int, inner: str, config: ModelConfig) -> tuple[int, str | None]:
    """The place of a site of the stream among the sublayers. ValueError for a site that is none."""
    sums = {site: sublayer for sublayer, site in config.block.sublayers(config).items()}
    entering = {"hook_resid_pre": layer, "hook_normalized_resid_post": layer + 1}
    if inner in entering:
        return entering[inner], None
    if inner not in sums:
        raise ValueError(
            "parts='feature' requires dictionaries that write the stream or what a sublayer adds to it, got one that "
            f"writes blocks.{layer}.{inner}: leave it out of with_dictionaries"
        )
    return layer, sums[inner]


class Kept(NamedTuple):
    """The largest features of each row."""

    values: Float[Tensor, "b k"]
    """What they add; 0 where fewer are active."""
    ids: Int[Tensor, "b k"]
    """Their numbers; -1 where fewer are active."""
    rest: Float[Tensor, "b 1"]
    """What all others add together."""
    beyond: Int[Tensor, "b"]
    """How many active ones are among these."""


def largest(shares: Shares, keep: int) -> Kept:
    """The active features of each row that add most in absolute value, at most `keep`, and the sum of the others."""
    size = shares.features.abs().masked_fill(~shares.active, -1.0)
    sizes, places = size.topk(min(keep, size.shape[1]), -1)
    there = sizes >= 0
    values = shares.features.gather(1, places).masked_fill(~there, 0.0)
    rest = shares.features.scatter(1, places, 0.0).sum(1, keepdim=True)
    return Kept(
        values, places.masked_fill(~there, -1), rest, shares.active.sum(1).sub(there.sum(1)).clamp_min(0)
    )


def rows_of(kept: Mapping[int, Kept], stands: Stands) -> dict[str, Tensor]:
    """The features of every row, numbered through all dictionaries, as a question keeps them."""
    ids, offset = [], 0
    for stand in stands.splitting:
        own = kept[stand.layer].ids
        ids.append(torch.where(own < 0, own, own + offset))
        offset += stand.dictionary.d_sae
    each = [kept[stand.layer] for stand in stands.splitting]
    return {
        "features": torch.cat([one.values for one in each], 1),
        "feature_ids": torch.cat(ids, 1),
        "beyond": torch.stack([one.beyond for one in each], 1).amax(1),
    }


class Counted(NamedTuple):
    """A dictionary as the rows of a result number its features."""

    layer: int
    features: int


def dense_result(
    merged: Partial,
    question: ByRow,
    finish: Callable[..., xr.Dataset],
    text: Text,
    counted: tuple[Counted, ...],
    names: tuple[str, ...],
    top: int | None,
    notes: Sequence[str],
) -> xr.Dataset:
    """The result by feature: those that are active on some row, or the `top` of them, have columns of their own.

    Args:
        question: the question for one answer token, without a result.
        finish: the function that labels rows with `names` and `notes`.
        counted: the dictionaries, in the order in which the rows number features.
        names: the parts but for the features, in the order of the rows' columns.
    """
    assert isinstance(merged, Rows)
    rows = dict(merged.rows)
    ids, values, beyond = (rows.pop(name) for name in ("feature_ids", "features", "beyond"))
    chosen = _chosen(ids, values, top)
    n = ids[..., 0].numel()
    check_memory(
        f"{len(chosen)} active features of {n} prompts (attribute: parts='feature')",
        3 * values.element_size() * len(chosen) * n, values.device, "top= keeps fewer",
    )  # fmt: skip
    more = max(0, int(beyond.max())) if beyond.numel() else 0
    rows["logits"], names = _with_features(rows["logits"], _Sparse(ids, values), chosen, counted, names)
    if not more and top is None:
        rows["logits"], names = _without_rest(rows["logits"], names)
    if more:
        notes = [
            *notes,
            f"up to {more} further active features of one dictionary are in feature_rest: each prompt keeps the "
            f"{ACTIVE} largest by number",
        ]
    labelled = replace(question, result=partial(finish, names=names, notes=tuple(notes)))
    return by_answer_token(labelled, text).result(Rows(rows, merged.ids))


class _Sparse(NamedTuple):
    """The features of every row by number, -1 where there are fewer, and what each adds."""

    ids: Int[Tensor, "*n k"]
    values: Float[Tensor, "*n k"]


def _chosen(ids: Int[Tensor, "*n k"], values: Float[Tensor, "*n k"], top: int | None) -> Int[Tensor, "u"]:
    """Ascending numbers of the features that are active on some row, at most `top`, largest mean absolute value."""
    there = ids >= 0
    every, which = ids[there].unique(return_inverse=True)
    if top is None or len(every) <= top:
        return every
    sums = values.new_zeros(len(every)).index_add(0, which, values[there].abs())
    return every[sums.topk(top).indices].sort().values


def _with_features(
    columns: Float[Tensor, "*n c"],
    sparse: _Sparse,
    chosen: Int[Tensor, "u"],
    counted: Sequence[Counted],
    names: Sequence[str],
) -> tuple[Float[Tensor, "*n c2"], tuple[str, ...]]:
    """The columns and their names with the chosen features before the rest of each dictionary, which has the others."""
    ids, values = sparse
    place = torch.searchsorted(chosen, ids.clamp_min(0)).clamp_max(max(len(chosen) - 1, 0))
    found = (ids >= 0) & (chosen[place] == ids if len(chosen) else torch.zeros_like(ids, dtype=torch.bool))
    dense = values.new_zeros(*ids.shape[:-1], len(chosen) + 1)
    dense = dense.scatter_add(-1, place.where(found, len(chosen)), values.where(found, 0.0))
    pieces, labels, end, first = [], list[str](), 0, 0
    for layer, features in counted:
        column = names.index(str(Part("feature_rest", layer)))
        of_layer = (chosen >= first) & (chosen < first + features)
        others = (ids >= first) & (ids < first + features) & ~found
        rest = columns[..., column : column + 1] + values.where(others, 0.0).sum(-1, keepdim=True)
        pieces += [columns[..., end:column], dense[..., :-1][..., of_layer], rest]
        numbers = (chosen[of_layer] - first).tolist()
        labels += [*names[end:column], *(str(Part("feature", layer, i)) for i in numbers), names[column]]
        end, first = column + 1, first + features
    return torch.cat((*pieces, columns[..., end:]), -1), (*labels, *names[end:])


def _without_rest(
    columns: Float[Tensor, "*n c"], names: Sequence[str]
) -> tuple[Float[Tensor, "*n c2"], tuple[str, ...]]:
    """The columns without those of features that are summed, where none is."""
    kept = [i for i, name in enumerate(names) if not name.endswith(".feature_rest")]
    return columns[..., kept], tuple(names[i] for i in kept)
