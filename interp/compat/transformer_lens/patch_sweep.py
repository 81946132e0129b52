"""TransformerLens' patching on our planner: index tuples become variants, and the metric sees their logits."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.compat.transformer_lens.act_names import get_act_name
from interp.compat.transformer_lens.hooked_transformer import HookedTransformer
from interp.compat.transformer_lens.lazy_logits import LazyLogits
from interp.compat.transformer_lens.native import native_site
from interp.compat.transformer_lens.tokenization import get_attention_mask
from interp.data.batch import Batch
from interp.model import sites
from interp.model.edits import Edit, Set
from interp.model.tap import Read
from interp.model.transformer import Transformer
from interp.passes.sweep import Sweep
from interp.passes.variants import Variant

LogitMetric = Callable[[Tensor], Tensor]
"""From the logits `[b p v]` of a run to one number."""
STREAMS = 256 << 20
"""Bytes of final streams that are held at once."""


@runtime_checkable
class Cache(Protocol):
    """Activations by hook name."""

    def __getitem__(self, name: str) -> Tensor:
        """One of them."""
        ...


@dataclass(frozen=True, eq=False)
class Cells:
    """Which cells of an activation are taken from the clean run, one variant for each index."""

    activation: str
    """Short name; the layer is the first number of every index."""
    axes: tuple[int, ...]
    """The axes of the activation that the other numbers index."""
    indices: Sequence[Sequence[int]]

    def names(self) -> list[str]:
        """The hook name of every index."""
        return [get_act_name(self.activation, layer=index[0]) for index in self.indices]

    def fit(self, model: Transformer, tokens: Int[Tensor, "b p"], cache: Cache) -> bool:
        """Whether the planner can run them: whole-number indices, sites it knows, donors of the run's shape."""
        known = [name for name in sites.names(model.config) if native_site(name, model.config) == name]
        integers = all(type(i) is int for index in self.indices for i in index)
        if not integers or any(len(index) != 1 + len(self.axes) for index in self.indices):
            return False
        return all(
            name in known and self._fits(cache[name], sites.axes_of(name).split(), tokens)
            for name in dict.fromkeys(self.names())
        )

    def _fits(self, donor: Tensor, letters: Sequence[str], tokens: Int[Tensor, "b p"]) -> bool:
        rows, columns = tokens.shape
        if donor.ndim != len(letters) or donor.shape[0] not in (1, rows) or max(self.axes) >= donor.ndim:
            return False
        return all(size == columns for axis, size in zip(letters, donor.shape, strict=True) if axis in "pqk")

    def variants(self, cache: Cache) -> list[Variant]:
        """One for each index."""
        found, put = [], {name: Set(cache[name]) for name in dict.fromkeys(self.names())}
        for name, index in zip(self.names(), self.indices, strict=True):
            letters = sites.axes_of(name).split()
            at = {sites.WORDS[letters[axis]]: i for axis, i in zip(self.axes, index[1:], strict=True)}
            found.append(Variant([Edit(name, put[name], at)]))
        return found


def plannable(model: object, tokens: Int[Tensor, "b p"]) -> Transformer | None:
    """The network of one of our models, if it runs these tokens with nothing hooked, replaced or masked; else None."""
    if not isinstance(model, HookedTransformer) or type(model).forward is not HookedTransformer.forward:
        return None
    engine, tokenizer = model.engine, model.tokenizer
    if tokens.ndim != 2 or engine.active() != {}:
        return None
    if tokenizer is not None and tokenizer.padding_side == "left":
        mask = get_attention_mask(tokenizer, tokens, model.cfg.default_prepend_bos)
        if not bool(mask.all()):
            return None
    engine.shared.update()
    return engine.native


TOGETHER = 64
"""Rows whose logits of a position are one matrix product: for a single row it is as slow as reading W_U."""


@torch.no_grad()
def swept(
    model: Transformer, tokens: Int[Tensor, "b p"], variants: Sequence[Variant], metric: LogitMetric
) -> Iterator[float]:
    """The metric of every variant, in order; it sees the logits of one variant at a time."""
    name = sites.final_stream(model.config)
    size = tokens.numel() * model.config.d_model * model.embed.weight.element_size()
    for some in _parts(variants, max(1, STREAMS // size)):
        final = Sweep(model, Batch(tokens), some).read([Read(name)])
        streams = next(iter(final.values()))
        for several in streams.split(max(1, TOGETHER // len(tokens))):
            for logits in _logits(model, several):
                yield metric(logits).item()


def _logits(model: Transformer, streams: Float[Tensor, "c b p d"]) -> Iterator[LazyLogits]:
    """The logits of some variants; those of a position are computed for all of them when the first is asked for it."""
    unembed = model.unembed
    assert unembed is not None, "a model that sweeps patch has logits"
    seen: dict[int, Tensor] = {}

    def column(variant: int, at: int) -> Tensor:
        if at not in seen:
            seen[at] = model.read_out(streams[:, :, at : at + 1].flatten(0, 1)).unflatten(
                0, streams.shape[:2]
            )
        return seen[at][variant]

    for variant, stream in enumerate(streams):
        yield LazyLogits(stream, model.read_out, unembed.out_features, partial(column, variant))


def _parts(variants: Sequence[Variant], size: int) -> Iterator[Sequence[Variant]]:
    for start in range(0, len(variants), size):
        yield variants[start : start + size]
