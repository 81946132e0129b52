"""TransformerLens' activation patching: `generic_activation_patch`, its 15 ready sweeps and 3 combinations.

The six patch setters here, on our own `HookedTransformer` without hooks, are one planned sweep: shared positions and
layers are computed once and variants run in batches. Any other setter or model runs index by index through
`run_with_hooks`. The numbers are the same. Natively: `interp.patch` and `interp.causal.patch_preset`, which also give
per-prompt effects and intervals.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, Protocol, runtime_checkable

import einops
import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from interp.compat.transformer_lens.act_names import get_act_name
from interp.compat.transformer_lens.hooked_transformer import HookedTransformer
from interp.compat.transformer_lens.native import native_site
from interp.compat.transformer_lens.tokenization import get_attention_mask
from interp.data.batch import Batch
from interp.model import sites
from interp.model.edits import Edit, Set
from interp.model.tap import Read
from interp.model.transformer import Transformer
from interp.passes.sweep import Sweep
from interp.passes.variants import Variant

ReadOut = Callable[[Tensor], Tensor]
Column = Callable[[int], Tensor]
_METADATA = frozenset(
    {
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda")
    }
    | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.is_floating_point}
)


class LazyLogits(Tensor):
    """A tensor `[b p v]` equal to `read_out(stream)`, of which `logits[:, i]` computes only position i.

    Anything but indexing by integers or slices makes it whole first; so does writing into it, which lasts.
    """

    _stream: Tensor
    _read_out: ReadOut
    _column: Column | None
    _whole: Tensor | None
    _at: dict[int, Tensor]

    @staticmethod
    def __new__(
        cls, stream: Float[Tensor, "b p d"], read_out: ReadOut, d_vocab: int, column: Column | None = None
    ) -> "LazyLogits":
        """The logits of a final stream. column: another way to those of one position, `[b 1 v]`, not used elsewhere."""
        lazy: LazyLogits = Tensor._make_wrapper_subclass(
            cls, (*stream.shape[:2], d_vocab), dtype=stream.dtype, device=stream.device
        )
        lazy._stream, lazy._read_out, lazy._whole, lazy._at = stream, read_out, None, {}
        lazy._column = column
        return lazy

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Metadata as it is; indices by position; all else on the whole tensor."""
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is Tensor.__getitem__ and isinstance(args[0], cls):
            return args[0]._part(args[1])
        return func(*_whole(tuple(args)), **_whole(dict(kwargs or {})))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Calls from below Python, with the logits computed whole."""
        return func(*_whole(tuple(args)), **_whole(dict(kwargs or {})))

    def whole(self) -> Float[Tensor, "b p v"]:
        """All logits, as a plain tensor; what was written into single positions included."""
        if self._whole is None:
            self._whole = self._read_out(self._stream)
            for at, column in self._at.items():
                self._whole[:, at] = column[:, 0]
        return self._whole

    def _part(self, index: Any) -> Tensor:
        keys = _by_axis(index)
        if self._whole is not None or keys is None:
            return self.whole()[_whole(index)]
        at, columns = keys[1], self._stream.shape[1]
        if isinstance(at, int) and -columns <= at < columns:
            at %= columns
            if at not in self._at:
                column = self._column
                rows = self._read_out(self._stream[:, at : at + 1]) if column is None else column(at)
                self._at[at] = rows
            return self._at[at][(keys[0], 0, *keys[2:])]
        if isinstance(at, slice) and at != slice(None):
            return self._read_out(self._stream[:, at])[(keys[0], slice(None), *keys[2:])]
        if isinstance(at, Tensor) and not (at < -columns).any() and not (at >= columns).any():
            some, place = (at.to(self._stream.device) % columns).unique(return_inverse=True)
            return self._read_out(self._stream[:, some])[(keys[0], place, *keys[2:])]
        return self.whole()[_whole(index)]


def _by_axis(index: Any) -> tuple[Any, ...] | None:
    """One key per axis, as far as the index goes; None where it adds axes, masks, or says nothing about positions."""
    keys = list(index) if isinstance(index, tuple) else [index]
    if any(key is None or isinstance(key, bool) for key in keys):
        return None
    keys = [torch.as_tensor(key) if isinstance(key, list | range | np.ndarray) else key for key in keys]
    if any(isinstance(key, Tensor) and key.dtype in (torch.bool, torch.uint8) for key in keys):
        return None
    dots = [i for i, key in enumerate(keys) if key is Ellipsis]
    if len(dots) == 1:
        keys[dots[0] : dots[0] + 1] = [slice(None)] * (4 - len(keys))
    return tuple(keys) if 2 <= len(keys) <= 3 and len(dots) <= 1 else None


def _whole(value: Any) -> Any:
    """The arguments with every `LazyLogits` computed whole."""
    if isinstance(value, LazyLogits):
        return value.whole()
    if type(value) in (tuple, list):
        return type(value)(_whole(each) for each in value)
    return {key: _whole(each) for key, each in value.items()} if type(value) is dict else value


LogitMetric = Callable[[Tensor], Tensor]
"""From the logits `[b p v]` of a run to one number."""
STREAMS = 256 << 20
"""Bytes of final streams that are in memory at once."""


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
    """The network of a model that runs these tokens with nothing hooked, replaced or masked; else None."""
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
"""Number of rows whose logits of a position are one matrix product: for a single row it is as slow as reading W_U."""


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
    """The logits of some variants; those of a position are computed for all of them at the first access."""
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


Logits = Tensor
CorruptedActivation = Tensor
PatchedActivation = Tensor
AxisNames = Literal["layer", "pos", "head_index", "head", "src_pos", "dest_pos"]
PatchSetter = Callable[..., Tensor | None]
"""From the corrupted activation, the index and the clean activation to the patched one."""


@runtime_checkable
class Patchable(Protocol):
    """Protocol of a model with passes that can be hooked."""

    cfg: Any

    def run_with_hooks(self, *args: Any, **kwargs: Any) -> Any:
        """The output of one pass with hooks."""
        ...


def make_df_from_ranges(column_max_ranges: Sequence[int], column_names: Sequence[str]) -> pd.DataFrame:
    """Every combination of indices below these maxima, one row each; the last column runs fastest."""
    rows = list(itertools.product(*map(range, column_max_ranges)))
    return pd.DataFrame(rows, columns=list(column_names))


def layer_pos_patch_setter(
    corrupted_activation: Tensor, index: Sequence[int], clean_activation: Tensor
) -> Tensor:
    """Index [layer, pos], for activations `[batch, pos, ...]`."""
    return _put(corrupted_activation, index, clean_activation, (1,))


def layer_pos_head_vector_patch_setter(
    corrupted_activation: Tensor, index: Sequence[int], clean_activation: Tensor
) -> Tensor:
    """Index [layer, pos, head], for `[batch, pos, head, ...]`: q, k, v, z, result."""
    return _put(corrupted_activation, index, clean_activation, (1, 2))


def layer_head_vector_patch_setter(
    corrupted_activation: Tensor, index: Sequence[int], clean_activation: Tensor
) -> Tensor:
    """Index [layer, head], for `[batch, pos, head, ...]`: q, k, v, z, result."""
    return _put(corrupted_activation, index, clean_activation, (2,))


def layer_head_pattern_patch_setter(
    corrupted_activation: Tensor, index: Sequence[int], clean_activation: Tensor
) -> Tensor:
    """Index [layer, head], for `[batch, head, dest, src]`: scores and patterns."""
    return _put(corrupted_activation, index, clean_activation, (1,))


def layer_head_pos_pattern_patch_setter(
    corrupted_activation: Tensor, index: Sequence[int], clean_activation: Tensor
) -> Tensor:
    """Index [layer, head, dest], for `[batch, head, dest, src]`: scores and patterns."""
    return _put(corrupted_activation, index, clean_activation, (1, 2))


def layer_head_dest_src_pos_pattern_patch_setter(
    corrupted_activation: Tensor, index: Sequence[int], clean_activation: Tensor
) -> Tensor:
    """Index [layer, head, dest, src], for `[batch, head, dest, src]`: scores and patterns."""
    return _put(corrupted_activation, index, clean_activation, (1, 2, 3))


_SETTERS: Mapping[PatchSetter, tuple[int, ...]] = MappingProxyType(
    {
        layer_pos_patch_setter: (1,),
        layer_pos_head_vector_patch_setter: (1, 2),
        layer_head_vector_patch_setter: (2,),
        layer_head_pattern_patch_setter: (1,),
        layer_head_pos_pattern_patch_setter: (1, 2),
        layer_head_dest_src_pos_pattern_patch_setter: (1, 2, 3),
    }
)
"""The axes that a setter's index names after the layer."""


def _put(value: Tensor, index: Sequence[int], donor: Tensor, axes: Sequence[int]) -> Tensor:
    assert len(index) == 1 + len(axes)
    key: list[int | slice] = [slice(None)] * (1 + max(axes))
    for axis, i in zip(axes, index[1:], strict=True):
        key[axis] = i
    value[tuple(key)] = donor[tuple(key)]
    return value


def generic_activation_patch(
    model: Patchable,
    corrupted_tokens: Int[Tensor, "b p"],
    clean_cache: Cache,
    patching_metric: LogitMetric,
    patch_setter: PatchSetter,
    activation_name: str,
    index_axis_names: Sequence[AxisNames] | None = None,
    index_df: pd.DataFrame | None = None,
    return_index_df: bool = False,
) -> Tensor | tuple[Tensor, pd.DataFrame]:
    """The metric of the corrupted run with one piece of an activation taken from the clean run, for every index.

    index_axis_names: what to run over, layer first; the result has an axis for each (of k and v: key/value heads).
    index_df: the indices themselves, a row each, layer first; the result is flat. Exactly one of the two.
    patch_setter: what to do to an activation at an index, `(corrupted, index, clean) -> patched`; edits in place reach
    nobody else. activation_name: short, as for `get_act_name`.
    Returns the tensor, with `return_index_df` also the indices.
    """
    shape = None
    if index_df is None:
        assert index_axis_names is not None
        shape = _lengths(model, corrupted_tokens, activation_name, index_axis_names)
        index_df = make_df_from_ranges(shape, index_axis_names)
    else:
        assert index_axis_names is None
    indices = [row.to_list() for _, row in index_df.iterrows()]
    cells = Cells(activation_name, _SETTERS.get(patch_setter, ()), indices)
    native = plannable(model, corrupted_tokens) if patch_setter in _SETTERS else None
    if native is not None and cells.fit(native, corrupted_tokens, clean_cache):
        values = swept(native, corrupted_tokens, cells.variants(clean_cache), patching_metric)
    else:
        values = _one_by_one(model, corrupted_tokens, clean_cache, patching_metric, patch_setter, cells)
    found = torch.tensor(list(values), device=model.cfg.device, dtype=torch.get_default_dtype())
    found = found if shape is None else found.reshape(shape)
    return (found, index_df) if return_index_df else found


def _lengths(
    model: Patchable, tokens: Int[Tensor, "b p"], activation: str, axes: Sequence[AxisNames]
) -> list[int]:
    cfg, positions = model.cfg, tokens.shape[-1]
    heads = cfg.n_heads
    if activation in ("k", "v") and getattr(cfg, "n_key_value_heads", None) is not None:
        heads = cfg.n_key_value_heads
    sizes = {"layer": cfg.n_layers, "head_index": heads, "head": heads}
    sizes |= dict.fromkeys(("pos", "src_pos", "dest_pos"), positions)
    return [sizes[axis] for axis in axes]


def _one_by_one(
    model: Patchable,
    tokens: Int[Tensor, "b p"],
    cache: Cache,
    metric: LogitMetric,
    setter: PatchSetter,
    cells: Cells,
) -> Iterator[float]:
    def patched(value: Tensor, hook: object, *, index: Sequence[int], clean: Tensor) -> Tensor | None:
        return setter(value.clone() if value.requires_grad else value, index, clean)

    cases = list(zip(cells.names(), cells.indices, strict=True))
    for name, index in tqdm(cases, desc=cells.activation, delay=1, leave=False):
        hook = partial(patched, index=index, clean=cache[name])
        yield metric(model.run_with_hooks(tokens, fwd_hooks=[(name, hook)])).item()


def _ready(
    what: str, setter: PatchSetter, activation: str, axes: tuple[AxisNames, ...]
) -> "partial[Tensor | tuple[Tensor, pd.DataFrame]]":
    """`generic_activation_patch` with everything given but model, tokens, cache and metric."""
    made = partial(
        generic_activation_patch, patch_setter=setter, activation_name=activation, index_axis_names=axes
    )
    made.__doc__ = (
        f"The metric of the corrupted run with {what} taken from the clean run: `[{', '.join(axes)}]`. "
        "Arguments: model, corrupted_tokens, clean_cache, patching_metric; see `generic_activation_patch`."
    )
    return made


def _by_pos(what: str, activation: str) -> "partial[Tensor | tuple[Tensor, pd.DataFrame]]":
    return _ready(what, layer_pos_patch_setter, activation, ("layer", "pos"))


def _head_by_pos(what: str, activation: str) -> "partial[Tensor | tuple[Tensor, pd.DataFrame]]":
    what = f"each head's {what} at each position"
    return _ready(what, layer_pos_head_vector_patch_setter, activation, ("layer", "pos", "head"))


def _head(what: str, activation: str) -> "partial[Tensor | tuple[Tensor, pd.DataFrame]]":
    what = f"each head's {what} at all positions"
    return _ready(what, layer_head_vector_patch_setter, activation, ("layer", "head"))


get_act_patch_resid_pre = _by_pos("the stream entering each block", "resid_pre")
get_act_patch_resid_mid = _by_pos("the stream between attention and MLP", "resid_mid")
get_act_patch_attn_out = _by_pos("each attention layer's output", "attn_out")
get_act_patch_mlp_out = _by_pos("each MLP's output", "mlp_out")
get_act_patch_attn_head_out_by_pos = _head_by_pos("output (z)", "z")
get_act_patch_attn_head_q_by_pos = _head_by_pos("queries", "q")
get_act_patch_attn_head_k_by_pos = _head_by_pos("keys", "k")
get_act_patch_attn_head_v_by_pos = _head_by_pos("values", "v")
get_act_patch_attn_head_pattern_by_pos = _ready(
    "each head's attention from each position",
    layer_head_pos_pattern_patch_setter,
    "pattern",
    ("layer", "head_index", "dest_pos"),
)
get_act_patch_attn_head_pattern_dest_src_pos = _ready(
    "each head's attention from each position to each",
    layer_head_dest_src_pos_pattern_patch_setter,
    "pattern",
    ("layer", "head_index", "dest_pos", "src_pos"),
)
get_act_patch_attn_head_out_all_pos = _head("output (z)", "z")
get_act_patch_attn_head_q_all_pos = _head("queries", "q")
get_act_patch_attn_head_k_all_pos = _head("keys", "k")
get_act_patch_attn_head_v_all_pos = _head("values", "v")
get_act_patch_attn_head_pattern_all_pos = _ready(
    "each head's attention pattern", layer_head_pattern_patch_setter, "pattern", ("layer", "head_index")
)


def get_act_patch_attn_head_all_pos_every(
    model: Patchable, corrupted_tokens: Int[Tensor, "b p"], clean_cache: Cache, metric: LogitMetric
) -> Float[Tensor, "five layer head"]:
    """Every head's output, query, key, value and pattern at all positions, stacked in this order.

    Where keys and values have fewer heads, the rest of their rows is 0.
    """
    given = (model, corrupted_tokens, clean_cache, metric)
    inside = (
        get_act_patch_attn_head_out_all_pos, get_act_patch_attn_head_q_all_pos,
        get_act_patch_attn_head_k_all_pos, get_act_patch_attn_head_v_all_pos,
        get_act_patch_attn_head_pattern_all_pos,
    )  # fmt: skip
    return _stacked([_table(sweep, given) for sweep in inside])


def get_act_patch_attn_head_by_pos_every(
    model: Patchable, corrupted_tokens: Int[Tensor, "b p"], clean_cache: Cache, metric: LogitMetric
) -> Float[Tensor, "five layer pos head"]:
    """Every head's output, query, key, value and pattern by position (patterns: by query), stacked in this order.

    Where keys and values have fewer heads, the rest of their rows is 0.
    """
    given = (model, corrupted_tokens, clean_cache, metric)
    inside = (
        get_act_patch_attn_head_out_by_pos, get_act_patch_attn_head_q_by_pos,
        get_act_patch_attn_head_k_by_pos, get_act_patch_attn_head_v_by_pos,
    )  # fmt: skip
    pattern = _table(get_act_patch_attn_head_pattern_by_pos, given)
    tables = [_table(sweep, given) for sweep in inside]
    return _stacked([*tables, einops.rearrange(pattern, "layer head pos -> layer pos head")])


def get_act_patch_block_every(
    model: Patchable, corrupted_tokens: Int[Tensor, "b p"], clean_cache: Cache, metric: LogitMetric
) -> Float[Tensor, "three layer pos"]:
    """The stream entering each block, attention's output and the MLP's by position, stacked in this order."""
    given = (model, corrupted_tokens, clean_cache, metric)
    parts = (get_act_patch_resid_pre, get_act_patch_attn_out, get_act_patch_mlp_out)
    return torch.stack([_table(sweep, given) for sweep in parts])


def _table(
    sweep: "partial[Tensor | tuple[Tensor, pd.DataFrame]]",
    given: tuple[Patchable, Tensor, Cache, LogitMetric],
) -> Tensor:
    found = sweep(*given)
    assert isinstance(found, Tensor)
    return found


def _stacked(tables: Sequence[Tensor]) -> Tensor:
    """Tables of heads, the shorter ones filled up with 0."""
    heads = max(table.shape[-1] for table in tables)
    return torch.stack([F.pad(table, (0, heads - table.shape[-1])) for table in tables])
