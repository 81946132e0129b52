"""TransformerLens' activation patching: `generic_activation_patch`, its 15 ready sweeps and 3 combinations.

The six patch setters here, on our own `HookedTransformer` without hooks, are one planned sweep: shared positions and
layers are computed once and variants run in batches. Any other setter or model runs index by index through
`run_with_hooks`. The numbers are the same. Natively: `interp.patch` and `interp.causal.patch_preset`, which also give
per-prompt effects and intervals.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, Protocol, runtime_checkable

import einops
import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from interp.compat.transformer_lens.patch_sweep import Cache, Cells, LogitMetric, plannable, swept

Logits = Tensor
CorruptedActivation = Tensor
PatchedActivation = Tensor
AxisNames = Literal["layer", "pos", "head_index", "head", "src_pos", "dest_pos"]
PatchSetter = Callable[..., Tensor | None]
"""From the corrupted activation, the index and the clean activation to the patched one."""


@runtime_checkable
class Patchable(Protocol):
    """A model whose passes can be hooked."""

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
