"""Attribution patching: the first-order estimate of every activation patch, from two forward passes and one backward.

A patch changes the metric by metric(a_other) - metric(a_own): to first order (a_other - a_own) . d metric / d a, and
one backward pass has the gradient at every layer, head and position at once (Nanda 2023, "Attribution Patching").
Rows of a batch do not meet, so one pass serves all prompts. It misses what saturates: a softmax that is sure has no
gradient, however much a real patch would change (compare with `agreement`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from interp.causal.contrast import Contrast, Direction, Watched, paired, site_names
from interp.causal.effects import (
    COEFFICIENTS,
    Measured,
    Table,
    causal,
    dims_asked,
    fisher_z,
    site_coords,
    site_dims,
)
from interp.causal.patching import Cells
from interp.core.boundary import Count, public
from interp.core.stats import wide
from interp.data.batch import Batch, Prompts
from interp.data.sources import Data
from interp.model import sites
from interp.model.edits import Edit
from interp.model.sites import DIMS, final_stream
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer
from interp.passes.analysis import Analysis, Question
from interp.passes.metrics import LogitFunction, Metric, as_metric
from interp.passes.observe import Model, Subject, text_of
from interp.passes.rules import Rules, completeness, rules_attrs, under_rules
from interp.passes.sweep import Sweep
from interp.passes.variants import Variant
from interp.runs.run import answered

if TYPE_CHECKING:
    import xarray as xr


@dataclass(frozen=True, eq=False)
class AttributionPatch(Question):
    """The first-order estimate of patching each cell of a site; `attribution_patch` describes the result."""

    site: str = "z"
    """Any site before the final norm, full or short."""
    metric: Metric | LogitFunction | None = None
    """None = the logit difference of the answers that the data bring."""
    by: Sequence[str] | None = None
    """The dims to keep; None = all. The sum over a dim estimates the joint patch."""
    direction: Direction = "denoise"
    """denoise: clean values into the corrupted run; noise: the other way round."""
    each: bool = True
    """Whether every prompt's effects are kept."""
    rules: Rules = ()
    """Backward rules, or the name of a preset; none = the gradient as it is."""
    agreement: Count = 0
    """How many cells, drawn at random, are patched too, to say how well the estimates agree with that."""

    def asked(self, model: Subject) -> Analysis:
        """Two forward passes and one backward pass per batch of pairs."""
        config, metric = under_rules(model.transformer, self.rules).config, as_metric(self.metric)
        if self.agreement < 0 or self.agreement == 1:
            raise ValueError(f"agreement requires two cells or more, or 0 for none, got {self.agreement}")
        if self.direction == "noise" and metric.compares:
            raise ValueError(
                f"{metric.name} compares with the clean run, where its gradient is 0: use direction='denoise'"
            )
        names = site_names(self.site, config)
        possible = site_dims(names)
        dims = dims_asked(possible if self.by is None else self.by, possible, self.site)
        attrs = {"site": self.site, "direction": self.direction, "order": "first", **rules_attrs(self.rules)}
        coords = site_coords(names, dims, config)
        table = Table(self.name, dims, coords, metric, model.text, attrs, first_order=True)
        measure = partial(
            _measured, cells=Cells(names, dims), metric=metric, direction=self.direction, rules=self.rules,
            compared=self.agreement,
        )  # fmt: skip
        return causal(model, table, measure, each=self.each, pairs=True)


@public()
def attribution_patch(
    model: Model,
    clean: Prompts | Data,
    corrupt: Prompts | Data,
    site: str = "z",
    *,
    metric: Metric | LogitFunction | None = None,
    by: Sequence[str] | None = None,
    direction: Direction = "denoise",
    each: bool = True,
    rules: Rules = (),
    agreement: Count = 0,
    edits: Sequence[Edit] = (),
    prepend_bos: bool = True,
    batch_size: int = 32,
) -> xr.Dataset:
    """The estimated change of the metric when a site's activations are patched, for every layer, position, head, ...

    A quick guess at `patch`: two forward passes and one backward one instead of a pass for every cell.

    denoise: (a_clean - a_corrupt) . d metric / d a at the corrupted run; noise: (a_corrupt - a_clean) . d metric / d a
    at the clean run (Nanda 2023). It estimates `patch`, and its result has the same variables: `value` with `low`,
    `high` and `n`, `normalised`, `each`, `changed` (where the estimate is not 0), `clean` and `corrupt`. Dims follow
    the site's axes: `layer`, `pos`, `head` (`kv_head` for keys and values), `query`, `key`, `neuron`, `expert`,
    `source`; vectors (d_model, d_head) are summed over. Sites outside the blocks have no `layer`.
    site: any site before the final norm, full or short: "z", "resid_pre", "attn_out", "pattern", "mlp.hook_post".
    metric: a `Metric` or a function of the logits at the last token; None is the logit difference of the answers that
    the clean prompts bring; the reference of one that compares (KL divergence) is the clean run.
    by: the dims to keep; None keeps all. The sum over a dim estimates the joint patch.
    each=False keeps only the moments over prompts, for data of any size.
    rules: backward rules under which the gradient is taken (docs/analyses/backward_rules.md says which), or
    a preset of them: "relp" is relevance patching (Jafari et al. 2025). Under norm, activation, gate and pattern the
    relevances (value . gradient) of embeddings and biases sum to that of the final stream; `completeness_error` in
    attrs says how nearly, relative to the sum of their sizes. Rules are no improvement as such: compare with `patch`.
    agreement: so many cells, drawn at random, are patched as well, and the result says how well the estimates agree:
    `agreement` over `coefficient` (pearson, spearman), the correlation of estimates and effects over these cells in a
    prompt, averaged over prompts as Fisher's z, with the ends `agreement_low` and `agreement_high` of its 95 % interval
    (NaN for fewer than 16 prompts). Cells that are alike in both runs of a prompt do not count there.
    Memory: three times the site's values in the layers, plus what a backward pass keeps.
    Caveats: exact only where the metric is linear in the site; an estimate says nothing about saturated softmaxes.
    Positions are each prompt's own tokens; beyond a prompt's end `each` is NaN, and `n` counts the prompts of a cell.
    Errors: ValueError for pairs that do not align, a metric that compares with
    the very run it is differentiated at, one without any gradient, rules that a model has no use for, and an agreement
    over cells of which fewer than two differ in some prompt; KeyError for an unknown site or dim.

    Example:
        >>> pairs = torch.tensor([[5, 6, 7]]), torch.tensor([[5, 9, 7]])
        >>> attribution_patch(model, *pairs, "z", metric=interp.logit_difference(3, 4)).value.dims
        ('layer', 'pos', 'head')
    """
    data = paired(text_of(model), clean, corrupt, prepend_bos=prepend_bos)
    question = AttributionPatch(site, metric, by, direction, each, rules, agreement)
    return answered(question, model, data, edits=edits, prepend_bos=prepend_bos, batch_size=batch_size)


def _measured(
    model: Transformer,
    batch: Batch,
    cells: Cells,
    metric: Metric,
    direction: Direction,
    rules: Rules,
    compared: int,
) -> Measured:
    """The estimates for some pairs, by layer, and the metric of their clean and corrupted runs."""
    model, names, dims = under_rules(model, rules), cells.names, cells.dims
    pair, watched = Contrast.of(batch, direction), Watched(model, metric)
    reads, end = [Read(name) for name in names], Read(final_stream(model.config), grad=True)
    ends = [end] if model.rules else []  # for the check; and rules may leave no gradient at any other site
    given = watched.recorded(pair.other, reads)
    watched = watched.beside(given.output, pair.other)  # a metric that compares has its clean run there
    run = watched.differentiated(pair.own, [*reads, *(Read(name, grad=True) for name in names), *ends])
    inner = tuple(dim for dim in dims if dim != "layer")
    products = torch.stack([_product(name, run.trace, given.trace, inner) for name in names], 1)
    effect = products if "layer" in dims else products.sum(1)
    with torch.no_grad():
        here, there = watched.value(run.output, pair.own), watched.value(given.output, pair.other)
        beside = completeness(model, pair.own, run.output, run.trace[end]) if ends else {}
        if compared:
            values = {name: given.trace[Read(name)] for name in names}
            beside |= _agreement(watched, pair.own, cells.variants(values, pair.own)[0], effect, compared)
    return Measured(effect, effect != 0, {**pair.runs(here, there), **beside})


def _agreement(
    watched: Watched, own: Batch, variants: Sequence[Variant], estimate: Float[Tensor, "b ..."], n: int
) -> dict[str, Float[Tensor, "b"]]:
    """Fisher's z of each prompt's correlations of estimates and effects, over patches that are alike in every batch."""
    drawn = torch.randperm(len(variants), generator=torch.Generator().manual_seed(0))[:n].tolist()
    found = Sweep(watched.model, own, [variants[i] for i in drawn]).run(watched.metric, watched.reference)
    exact, changed = (found.values - found.base).mT, found.changed.mT
    ours = estimate.flatten(1)[:, drawn].to(exact)
    rows = [fisher_z(x[there], y[there]) for x, y, there in zip(ours, exact, changed, strict=True)]
    values = torch.tensor(rows, dtype=torch.float64, device=exact.device)
    if bool(values.isnan().any()):
        raise ValueError(
            f"agreement={n} requires two cells that differ, and effects that do, in every prompt; in some the cells "
            "drawn have fewer: ask for more of them"
        )
    return dict(zip(COEFFICIENTS, values.unbind(1), strict=True))


def _product(name: str, own: Trace, other: Trace, kept: tuple[str, ...]) -> Float[Tensor, "b ..."]:
    """(a_other - a_own) . gradient, summed over all axes but the kept ones; masked scores (-inf) are no difference."""
    here, there = wide(own[Read(name)]), wide(other[Read(name)])
    change = torch.where(here == there, 0.0, there - here)
    product = change * own[Read(name, grad=True)].to(change)
    axes = sites.axes_of(name).split()
    summed = [i for i, axis in enumerate(axes) if i and DIMS.get(axis) not in kept]
    return product.sum(summed) if summed else product
