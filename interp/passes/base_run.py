"""The run that all variants of a sweep depart from, and where each of them leaves it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.data.batch import Batch
from interp.model import sites
from interp.model.config import ModelConfig, Rotary
from interp.model.edits import COLUMNS, Set, Span, Zero, edited
from interp.model.kv_cache import KVCache
from interp.model.position import depends_on_length
from interp.model.tap import Read, Tap
from interp.model.transformer import Transformer
from interp.passes.variants import Placed, changes, layer_of

Axes = tuple[str, ...]
_AFTER_KEYS = (
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
    """Every site that is edited or read."""
    cache: KVCache | None
    """Keys and values of every block; None where a column's value depends on later ones, or rows are packed."""


@torch.no_grad()
def base_run(
    model: Transformer,
    batch: Batch,
    variants: Sequence[Sequence[Placed]],
    common: Sequence[Placed],
    reads: Sequence[Read] = (),
) -> Base:
    """One pass under the common edits, recorded where variants edit and where they may start."""
    config, touched = model.config, dict.fromkeys(edit.site for edits in variants for edit in edits)
    layers = sorted({layer_of(site, config) for site in touched} - {0})
    leaves = "hook_normalized_resid_post" if config.norm_place == "post" else "hook_resid_post"
    entering = {
        layer: Read(f"blocks.{layer - 1}.{leaves}") for layer in layers
    }  # before the block's own edits
    planned = dict.fromkeys(edit.site for edits in variants for edit in edits if edit.planned)
    seen = {site: Read(site) for site in dict.fromkeys([*planned, *(read.site for read in reads)])}
    tap = Tap([*entering.values(), *seen.values()], changes([(0, edit) for edit in common], 1, len(batch), 0))
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
class Departures:
    """Where variants leave the base run."""

    layers: Sequence[int]
    """The block where each starts."""
    first: Int[Tensor, "v b"]
    """The first column that each changes in each example."""
    reaches: Bool[Tensor, "v b"]
    """Whether it changes anything that can reach what is watched; elsewhere `first` has no meaning."""


def departures(
    config: ModelConfig,
    base: Base,
    variants: Sequence[Sequence[Placed]],
    batch: Batch,
    watched: Int[Tensor, "b"] | None,
) -> Departures:
    """Where each variant leaves the base run; watched: the one column of each example that counts, None = all do.

    An edit that finds its values already there changes nothing. A function may change all the cells that it names.
    """
    n = batch.tokens.shape[1]
    where = _Differences(base, config, len(batch), n, None if watched is None else watched.cpu().numpy())
    first = np.full((len(variants), len(batch)), n)
    layers = []
    for i, edits in enumerate(variants):
        touched = []
        for edit in edits:
            columns = where.first(edit)
            if columns.min() < n:
                touched.append(layer_of(edit.site, config))
                first[i] = np.minimum(first[i], columns)
        layers.append(min(touched, default=0))
    found = torch.from_numpy(first).to(base.final.device)
    causal = base.cache is not None
    limit = n - 1 if watched is None or not causal else watched.to(found.device)
    return Departures(layers, found, found <= limit)


class _Differences:
    """Where edits differ from the base run; values that many of them share are compared once."""

    def __init__(
        self, base: Base, config: ModelConfig, examples: int, columns: int, watched: "np.ndarray | None"
    ) -> None:
        self._base, self._examples, self._columns, self._watched = base, examples, columns, watched
        self._last, self._stateful = f"blocks.{config.n_layers - 1}.", config.stateful
        self._known: dict[tuple[str, object], tuple[Axes, np.ndarray]] = {}

    def first(self, edit: Placed) -> "np.ndarray":
        """The first column of each example that the edit changes; the number of columns where it changes none."""
        if not edit.planned:
            return np.full(self._examples, self._named_column(edit) if self._base.cache is not None else 0)
        axes, differs = self._compared(edit)
        first = edit.change.first if isinstance(edit.change, Set) else 0
        rows = differs if len(differs) == self._examples else differs[first : first + self._examples]
        index = tuple(edit.at[axis] if axis in edit.at else slice(None) for axis in axes)
        mine = rows[(slice(None), *index)]
        left = [axis for axis in axes if axis not in edit.at]
        place = next((i for i, axis in enumerate(left) if axis in COLUMNS), None)
        by_column = mine[:, None] if place is None else np.moveaxis(mine, place + 1, 1)
        hit = np.any(by_column.reshape(*by_column.shape[:2], -1), axis=2)
        places = np.arange(self._columns) if place is not None else np.array([self._named_column(edit)])
        if self._watched is not None and self._stays(edit):
            hit = hit & (places == self._watched[:, None])
        column = np.where(hit.any(1), places[hit.argmax(1)], self._columns)
        return column if self._base.cache is not None else np.where(column < self._columns, 0, self._columns)

    def _stays(self, edit: Placed) -> bool:
        """Whether what is changed at one column can reach no other: after the keys and values of the last block."""
        if self._stateful:  # a convolution or rows of patterns carry it on
            return False
        name = edit.site.removeprefix(self._last)
        return name != edit.site and name.startswith(_AFTER_KEYS)

    def _compared(self, edit: Placed) -> tuple[Axes, "np.ndarray"]:
        """Which cells an edit of the whole site would change; a vector along the last axis counts as one cell."""
        change = edit.change
        whole = isinstance(change, Zero) or (
            isinstance(change, Set)
            and (
                not isinstance(change.values, Tensor)
                or change.values.ndim == self._base.values[edit.site].ndim
            )
        )
        if not whole:
            return self._vectors(edit.site, self._changed(edit))
        key = (edit.site, id(change.values) if isinstance(change, Set) else None)
        if key not in self._known:
            self._known[key] = self._vectors(edit.site, self._unlike(edit))
        return self._known[key]

    def _unlike(self, edit: Placed) -> Tensor:
        """Where the values to be put differ from the base run's."""
        base = self._base.values[edit.site]
        values = edit.change.values if isinstance(edit.change, Set) else 0.0
        if not isinstance(values, Tensor):
            return base != values
        values = values.to(base)
        if len(values) not in (1, len(base)):
            base = base.repeat(len(values) // len(base), *[1] * (base.ndim - 1))
        return values != base

    def _changed(self, edit: Placed) -> Tensor:
        """What the edit does to the base run's value, cell by cell."""
        base = self._base.values[edit.site]
        return edited(edit.as_edit(), base, Span()) != base

    @staticmethod
    def _vectors(site: str, differs: Tensor) -> tuple[Axes, "np.ndarray"]:
        axes = tuple(sites.axes_of(site).split()[1:])
        if axes[-1] in "de":
            differs, axes = differs.any(-1), axes[:-1]
        return axes, differs.cpu().numpy()

    @staticmethod
    def _named_column(edit: Placed) -> int:
        """The column that an edit names; 0 where it names none."""
        return next((edit.at[axis] for axis in COLUMNS if axis in edit.at), 0)
