"""Attribution patching: the first-order estimate of every activation patch, from two forward passes and one backward.

A patch changes the metric by metric(a_other) - metric(a_own): to first order (a_other - a_own) . d metric / d a, and
one backward pass has the gradient at every layer, head and position at once (Nanda 2023, "Attribution Patching").
Rows of a batch do not meet, so one pass serves all prompts. It misses what saturates: a softmax that is sure has no
gradient, however much a real patch would change (compare with `agreement`).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from interp.analyses.contrast import (
    COLUMN_DIMS,
    DIMS,
    Contrast,
    Direction,
    Watched,
    check_direction,
    check_one_length,
    site_names,
)
from interp.core.precision import wide
from interp.core.results import labelled
from interp.core.shapes import nearest
from interp.core.stats import Moments
from interp.engine.batch import Batch
from interp.engine.metrics import Metric, logit_difference
from interp.engine.observe import Subject
from interp.engine.text import Prompts
from interp.model import sites
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer

if TYPE_CHECKING:
    import xarray as xr


def attribution_patch(
    model: Subject,
    clean: Prompts,
    corrupt: Prompts,
    site: str = "z",
    *,
    metric: Metric | None = None,
    direction: Direction = "denoise",
    by: Sequence[str] | None = None,
    prepend_bos: bool = True,
    batch_size: int = 32,
) -> "xr.Dataset":
    """The estimated change of the metric when a site's activations are patched, for every layer, position, head, ...

    denoise: (a_clean - a_corrupt) . d metric / d a at the corrupted run; noise: (a_corrupt - a_clean) . d metric / d a
    at the clean run (Nanda 2023). Positive = the patch raises the metric.
    Returns Dataset with `effect` [layer, ...] (the mean over prompts, `_low` and `_high` its 95 % interval), `each`
    [prompt, layer, ...], and the metric of both runs, `clean` and `corrupt` [prompt], in the metric's unit. Dims follow
    the site's axes: `pos`, `head` (`kv_head` for keys and values), `query`, `key`, `neuron`, `expert`, `source`;
    vectors (d_model, d_head) are summed over. Sites outside the blocks have no `layer`.
    site: any site before the final norm, full or short: "z", "resid_pre", "attn_out", "pattern", "mlp.hook_post".
    metric: None is the logit difference of the answers that the clean batch carries; the reference of one that compares
    (KL divergence) is the clean run.
    by: the dims to keep (the layer always stays); None keeps all. The sum over a dim estimates the joint patch.
    Memory: three times the site's values in the layers, plus what a backward pass keeps.
    Caveats: exact only where the metric is linear in the site; an estimate says nothing about saturated softmaxes.
    Errors: ValueError for pairs that do not align, positions kept although lengths differ, a metric that compares with
    the very run it is differentiated at, and one without any gradient; KeyError for an unknown site or dim.

    Example:
        >>> pairs = torch.tensor([[5, 6, 7]]), torch.tensor([[5, 9, 7]])
        >>> attribution_patch(model, *pairs, "z", metric=logit_difference(3, 4)).effect.dims
        ('layer', 'pos', 'head')
    """
    metric = logit_difference() if metric is None else metric
    names = site_names(site, model.transformer.config)
    pair = Contrast.of(model, clean, corrupt, metric, prepend_bos=prepend_bos)
    axes = sites.find(names[0], model.transformer.config)[0].axes.split()[1:]
    kept = _kept(axes, by, pair.clean, site)
    check_direction(direction)
    if direction == "noise" and metric.compares:
        raise ValueError(
            f"{metric.name} compares with the clean run, where its gradient is 0: use direction='denoise'"
        )
    parts = [
        _effects(model.transformer, some, names, metric, direction, kept) for some in pair.split(batch_size)
    ]
    each, *values = (torch.cat(x) for x in zip(*parts, strict=True))
    if not bool(each.any()):
        raise ValueError(
            f"{metric.name}: its gradient at {site} is zero in every prompt; the metric is constant or saturated there"
        )
    return _table(each, values, axes, kept, names, {"site": site, "direction": direction}, metric)


def _kept(axes: Sequence[str], by: Sequence[str] | None, batch: Batch, site: str) -> tuple[str, ...]:
    """The dims of the result, in the order of the site's axes."""
    possible = [DIMS[a] for a in axes if a in DIMS]
    for dim in by or ():
        if dim not in (*possible, "layer"):
            raise KeyError(
                f"{site} has the dims {', '.join(possible)}, not {dim!r}; {nearest(dim, possible)}"
            )
    kept = tuple(dim for dim in possible if by is None or dim in by)
    columns = sorted(COLUMN_DIMS & set(kept))
    if columns:
        check_one_length(batch, f"effects by {', '.join(columns)}", ": name the dims to keep in `by`")
    return kept


def _effects(
    model: Transformer,
    pair: Contrast,
    names: Sequence[str],
    metric: Metric,
    direction: Direction,
    kept: tuple[str, ...],
) -> tuple[Float[Tensor, "b l ..."], Float[Tensor, "b"], Float[Tensor, "b"]]:
    """The effects of some pairs by layer, and the metric of their clean and corrupted runs."""
    own, other = (pair.corrupt, pair.clean) if direction == "denoise" else (pair.clean, pair.corrupt)
    watched, reads = Watched(model, metric), [Read(name) for name in names]
    given = watched.recorded(other, reads)
    if metric.compares:
        watched = Watched(model, metric, watched.columns(given.output, other))
    run = watched.differentiated(own, [*reads, *(Read(name, grad=True) for name in names)])
    products = [_product(name, run.trace, given.trace, kept) for name in names]
    with torch.no_grad():
        here, there = watched.value(run.output, own), watched.value(given.output, other)
    clean, corrupt = (there, here) if direction == "denoise" else (here, there)
    return torch.stack(products, 1), clean, corrupt


def _product(name: str, own: Trace, other: Trace, kept: tuple[str, ...]) -> Float[Tensor, "b ..."]:
    """(a_other - a_own) . gradient, summed over all axes but the kept ones; masked scores (-inf) are no difference."""
    here, there = wide(own[Read(name)]), wide(other[Read(name)])
    change = torch.where(here == there, 0.0, there - here)
    product = change * own[Read(name, grad=True)].to(change)
    axes = sites.axes_of(name).split()
    summed = [i for i, axis in enumerate(axes) if i and DIMS.get(axis) not in kept]
    return product.sum(summed) if summed else product


def _table(
    each: Float[Tensor, "b l ..."],
    values: Sequence[Float[Tensor, "b"]],
    axes: Sequence[str],
    kept: tuple[str, ...],
    names: Sequence[str],
    how: dict[str, str],
    metric: Metric,
) -> "xr.Dataset":
    layers = [int(name.split(".")[1]) for name in names if name.startswith("blocks.")]
    dims = ("layer", *kept) if layers else kept
    each = each if layers else each[:, 0]
    clean, corrupt = values
    return labelled(
        "attribution_patch",
        {
            **Moments.of(each).cells("effect", dims),
            "each": (("prompt", *dims), each),
            "clean": (("prompt",), clean),
            "corrupt": (("prompt",), corrupt),
        },
        coords={"layer": layers} if layers else None,
        attrs={**how, "metric": metric.name, "unit": metric.unit, "order": "first"},
    )
