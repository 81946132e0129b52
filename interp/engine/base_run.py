"""The run that all variants of a sweep depart from, and where each of them leaves it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.engine.batch import Batch
from interp.engine.variants import POSITION_AXES, Put, Variant, changes, layer_of
from interp.model import sites
from interp.model.config import ModelConfig, Rotary
from interp.model.kv_cache import KVCache
from interp.model.position import depends_on_length
from interp.model.tap import Read, Tap
from interp.model.transformer import Transformer

Axes = tuple[str, ...]
_BEHIND_KEYS = (
    "attn.hook_q", "attn.q_norm", "attn.hook_rot_q", "attn.hook_attn_scores", "attn.hook_pattern", "attn.hook_z",
    "attn.hook_result", "ln1_post.", "hook_attn_out", "hook_resid_mid", "hook_mlp_in", "ln2", "mlp.", "hook_mlp_out",
    "hook_resid_post", "hook_normalized_resid_post",
)  # fmt: skip
"""Sites of a block that do not enter the keys and values of its attention."""


@dataclass(frozen=True, eq=False)
class Base:
    """What a sweep keeps of its base run."""

    final: Float[Tensor, "b p d"]
    """The stream that leaves the last block."""
    entering: Mapping[int, Float[Tensor, "b p d"]]
    """The stream entering each block, but for the first, where a variant may start."""
    values: Mapping[str, Tensor]
    """Every site that is put to or read."""
    cache: KVCache | None
    """Keys and values of every block; None where a column's value depends on later ones, or rows are packed."""


@torch.no_grad()
def base_run(
    model: Transformer, batch: Batch, variants: Sequence[Variant], common: Variant, reads: Sequence[Read] = ()
) -> Base:
    """One pass under the common edits, recorded where variants put and where they may start."""
    config, puts = model.config, [put for variant in variants for put in variant.puts]
    touched = [put.site for put in puts] + [edit.site for variant in variants for edit in variant.edits]
    layers = sorted({layer_of(site, config) for site in touched} - {0})
    entering = {layer: Read(f"blocks.{layer}.hook_resid_pre") for layer in layers}
    seen = {
        site: Read(site) for site in dict.fromkeys([put.site for put in puts] + [read.site for read in reads])
    }
    edits = [*changes([(0, put) for put in common.puts], 1, len(batch), 0), *common.edits]
    tap = Tap([*entering.values(), *seen.values()], edits)
    n, cache = batch.tokens.shape[1], None
    if config.causal and not config.stateful and batch.documents is None and not _turns_by_length(config, n):
        where = model.device if model.devices is None else model.devices
        cache = KVCache(config, len(batch), n, device=where, dtype=model.dtype)
    final = model(
        batch.tokens, tap, stop=config.n_layers, keep=batch.keep, cache=cache, documents=batch.documents,
        types=batch.types, memory=batch.memory,
    )  # fmt: skip
    found = dict(tap.values)
    tap.close()
    return Base(
        final,
        {layer: found[r] for layer, r in entering.items()},
        {site: found[r] for site, r in seen.items()},
        cache,
    )


def _turns_by_length(config: ModelConfig, columns: int) -> bool:
    """Whether the keys of a prefix are rotated by the length of the whole, so that they cannot be continued."""
    rotations = (r for r in (config.position, config.local_position) if isinstance(r, Rotary))
    return any((depends_on_length(r) or columns) < columns for r in rotations)


@dataclass(frozen=True, eq=False)
class Footing:
    """Where variants leave the base run."""

    layers: Sequence[int]
    """The block where each starts."""
    first: Int[Tensor, "v b"]
    """The first column that each changes in each example."""
    reaches: Bool[Tensor, "v b"]
    """Whether it changes anything that can reach what is watched; elsewhere `first` has no meaning."""


def footing(
    config: ModelConfig,
    base: Base,
    variants: Sequence[Variant],
    batch: Batch,
    watched: Int[Tensor, "b"] | None,
) -> Footing:
    """Where each variant leaves the base run; watched: the one column of each example that counts, None = all do.

    A put that finds its donor's values already there changes nothing. Free edits may change everything.
    """
    n = batch.tokens.shape[1]
    where = _Differences(base, config, len(batch), n, None if watched is None else watched.cpu().numpy())
    first = np.full((len(variants), len(batch)), n)
    layers = []
    for i, variant in enumerate(variants):
        touched = [layer_of(edit.site, config) for edit in variant.edits]
        if touched:
            first[i] = 0
        for put in variant.puts:
            columns = where.first(put)
            if columns.min() < n:
                touched.append(layer_of(put.site, config))
                first[i] = np.minimum(first[i], columns)
        layers.append(min(touched, default=0))
    found = torch.from_numpy(first).to(base.final.device)
    causal = base.cache is not None
    limit = n - 1 if watched is None or not causal else watched.to(found.device)
    return Footing(layers, found, found <= limit)


class _Differences:
    """Where donors differ from the base run, each compared once."""

    def __init__(
        self, base: Base, config: ModelConfig, examples: int, columns: int, watched: "np.ndarray | None"
    ) -> None:
        self._base, self._examples, self._columns, self._watched = base, examples, columns, watched
        self._last, self._stateful = f"blocks.{config.n_layers - 1}.", config.stateful
        self._known: dict[tuple[str, int], tuple[Axes, np.ndarray]] = {}

    def first(self, put: Put) -> "np.ndarray":
        """The first column of each example that the put changes; the number of columns where it changes none."""
        axes, differs = self._compared(put)
        rows = differs if len(differs) == self._examples else differs[put.first : put.first + self._examples]
        index = tuple(put.at[axis] if axis in put.at else slice(None) for axis in axes)
        mine = rows[(slice(None), *index)]
        left = [axis for axis in axes if axis not in put.at]
        place = next((i for i, axis in enumerate(left) if axis in POSITION_AXES), None)
        by_column = mine[:, None] if place is None else np.moveaxis(mine, place + 1, 1)
        hit = np.any(by_column.reshape(*by_column.shape[:2], -1), axis=2)
        places = np.arange(self._columns) if place is not None else np.array([self._named_column(put)])
        if self._watched is not None and self._stays(put):
            hit = hit & (places == self._watched[:, None])
        column = np.where(hit.any(1), places[hit.argmax(1)], self._columns)
        return column if self._base.cache is not None else np.where(column < self._columns, 0, self._columns)

    def _stays(self, put: Put) -> bool:
        """Whether what is put at one column can reach no other: behind the keys and values of the last block."""
        if self._stateful:  # a convolution or rows of patterns carry it on
            return False
        name = put.site.removeprefix(self._last)
        return name != put.site and name.startswith(_BEHIND_KEYS)

    def _compared(self, put: Put) -> tuple[Axes, "np.ndarray"]:
        """Which cells of a donor differ; a vector along the last axis counts as one cell unless it is indexed."""
        key = (put.site, id(put.donor))
        if key not in self._known:
            base = self._base.values[put.site]
            donor = put.donor.to(base.device)
            base = (
                base
                if len(donor) in (1, len(base))
                else base.repeat(len(donor) // len(base), *[1] * (base.ndim - 1))
            )
            differs = donor.to(base.dtype) != base
            axes = tuple(sites.axes_of(put.site).split()[1:])
            if axes[-1] in "de":
                differs, axes = differs.any(-1), axes[:-1]
            self._known[key] = axes, differs.cpu().numpy()
        return self._known[key]

    @staticmethod
    def _named_column(put: Put) -> int:
        """The column that a put names; 0 for a site without columns of its own."""
        return next((put.at[axis] for axis in POSITION_AXES if axis in put.at), 0)
