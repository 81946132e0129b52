"""Attribution patching: the first-order estimate of every activation patch, from two forward passes and one backward.

A patch changes the metric by metric(a_other) - metric(a_own): to first order (a_other - a_own) . d metric / d a, and
one backward pass has the gradient at every layer, head and position at once (Nanda 2023, "Attribution Patching").
Prompts of a batch do not interact, so one pass serves all of them. The estimate misses saturation: a softmax near 0 or
1 has no gradient, however much a real patch would change. So some cells are patched as well, and the result says how
well the estimates agree with these patches. The two repairs of AtP* are in `patch_estimates`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.causal.contrast import Contrast, Direction, site_names
from interp.causal.effects import (
    COEFFICIENTS,
    Compared,
    EffectTable,
    MeasuredEffects,
    causal,
    dims_asked,
    fisher_z,
    site_coords,
    site_dims,
)
from interp.causal.patch_estimates import (
    Estimate,
    check_dropped,
    check_recomputed,
    dropped_sizes,
    on_the_same_path,
    reads_of_softmax,
    recomputed,
    slope_of,
    streams_for_dropping,
)
from interp.causal.patching import PatchedCells
from interp.core.kinds import Count
from interp.core.stats import upcast
from interp.core.transfers import to_device, to_host
from interp.data.batch import Batch
from interp.model import sites
from interp.model.sites import DIMS, final_stream
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer
from interp.passes.metrics import LogitFunction, Metric, as_metric
from interp.passes.needs import Recorded, Steps, TowardMetric, recorded, swept
from interp.passes.observe import Subject
from interp.passes.question import ByRow, Question
from interp.passes.rules import Rules, as_rules, rules_attrs, under_rules
from interp.runs.functions import of_pairs

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, eq=False)
class AttributionPatch(Question):
    """First-order estimate of the effect of patching each cell of a site: change of the values times the gradient.

    Two forward passes and one backward pass instead of a pass for every cell. Denoising is (a_clean - a_corrupt) . d
    metric / d a at the corrupted run, noising (a_corrupt - a_clean) . d metric / d a at the clean run. Vectors
    (d_model, d_head) are summed over.

    Args:
        clean, corrupt: prompts; each pair has the same number of tokens, aligned one by one. Files and streams are
            paired row by row.
        site: which activation: any site before the final norm, full or short: "z", "resid_pre", "attn_out", "pattern",
            "mlp.hook_post".
        metric: a `Metric`, or a function of the logits [b, v] at the last token; None is the logit difference of the
            answers that come with the clean prompts. A metric that compares, such as the KL divergence, compares with
            the clean run.
        by: dims to keep, of `layer` (none for sites outside the blocks) and the site's own (`pos`, `head`, `kv_head`
            for keys and values, `query`, `key`, `neuron`, `expert`, `source`); None keeps all. The sum over a dim
            estimates the joint patch.
        direction: "denoise" estimates patching clean values into the corrupted run, "noise" the other way round.
        each: False keeps no values of single prompts, which data of any size requires.
        qk_fix: for queries and keys (site q, k, rot_q, rot_k), whether the softmax is computed again: the estimate is
            the exact change of the pattern times the pattern's gradient, linear only in what follows (AtP*'s QK fix). A
            saturated softmax is no blind spot then. A key at one position is patched alone; without `pos` in `by`, the
            keys of all positions together.
        grad_drop: whether `size` is estimated as well: the mean size of the estimates of L - 1 further passes, in each
            of which the contribution of one other layer to the stream passes no gradient (AtP*'s GradDrop). It finds
            cells whose direct effect a later layer cancels. It requires a site inside attention or an MLP, `layer` in
            `by`, and two layers or more.
        rules: backward rules under which the gradient is taken (docs/analyses/backward_rules.md says which), or a
            preset of them: "relp" is relevance patching (Jafari et al. 2025). Under norm, activation, gate and pattern
            the relevances (value . gradient) of embeddings and biases sum to that of the final stream;
            `attrs["completeness_error"]` says how nearly, relative to the sum of their sizes. Rules are no improvement
            as such: compare with `patch`.
        agreement: number of cells of a prompt that are patched as well, to say how well the estimates agree with the
            effects; 0 leaves it out. Half of them are those of the largest estimates, the others are drawn at random
            from what differs between the two runs. It costs about half a forward pass a cell and prompt.
        agreement_prompts: number of prompts, the first ones, in which cells are patched as well; None: all.

    Returns:
        Dataset over the dims `by`, with the variables of `patch`: `value` with `low`, `high` and `n`, `normalised`,
        `each`, `changed` (where the estimate is not 0), `clean` and `corrupt`; and

        - `agreement` [coefficient, estimate]: correlation (pearson, spearman) of estimates and effects over the
          patched cells of a prompt, averaged over prompts as Fisher's z, with the ends low and high of its 95 %
          interval (NaN for fewer than 16 prompts). All of it is NaN, with a note, where no prompt has two cells that
          differ in estimate and effect; a correlation below .5 has a note too.
        - `size`, with `grad_drop`: the estimated size of a cell's effect, never negative: mean over prompts (absolute
          values come before the mean) of 1 / (L - 1) times the sum over the other layers of the size of the estimate
          with that layer dropped. It ranks cells; `value` has the sign. `size_ends` [..., end] are the ends low and
          high of its 95 % interval (NaN for fewer than 16 prompts).

    Raises:
        ValueError: pairs that do not align, a metric that compares with the very run it is differentiated at, one
            without any gradient, and rules that a model has no use for.
        KeyError: an unknown site or dim.

    Caveats:
        Exact only where the metric is linear in the site; without `qk_fix` an estimate says nothing about saturated
        softmaxes. With it, values, norms and all later layers are still linear.
        Positions are each prompt's own tokens; beyond a prompt's end `each` is NaN, and `n` counts the prompts of a
        cell.

    Memory:
        Three times the site's values in the layers, plus what a backward pass keeps. `qk_fix` keeps two scores and a
        gradient for every pair of query and key of every head and layer.

    Cost:
        Two forward passes and one backward pass; with `qk_fix` three and one, whatever the number of queries or keys,
        and attention is not fused. `grad_drop` adds the work of (L + 1) / 2 - 1 / L forward and backward passes, as
        the pass that drops layer l ends with it (the paper counts L backward passes). The agreement costs patches
        beside them.

    Source:
        Nanda 2023, "Attribution Patching". Jafari et al. 2025 for the rules "relp". Kramár et al. 2024, "AtP*: An
        efficient and scalable method for localizing LLM behaviour to components", arXiv:2403.00745, for `qk_fix`
        (equations 7 to 10) and `grad_drop` (equation 11).

    See Also:
        `patch`: the effects that this estimates. `missed_effects`: a bound on those that it missed.

    Example:
        >>> pairs = torch.tensor([[5, 6, 7]]), torch.tensor([[5, 9, 7]])
        >>> attribution_patch(model, *pairs, "z", metric=interp.logit_difference(3, 4)).value.dims
        ('layer', 'pos', 'head')
    """

    site: str = "z"
    _: KW_ONLY
    metric: Metric | LogitFunction | None = None
    by: Sequence[str] | None = None
    direction: Direction = "denoise"
    each: bool = True
    qk_fix: bool = False
    grad_drop: bool = False
    rules: Rules = ()
    agreement: Count = 16
    agreement_prompts: Count | None = 4

    def bind(self, model: Subject) -> ByRow:
        """Two forward passes and one backward pass per batch of pairs."""
        config, metric = under_rules(model.transformer, self.rules).config, as_metric(self.metric, model.text)
        if self.agreement < 0 or self.agreement == 1:
            raise ValueError(f"agreement requires two cells or more, or 0 for none, got {self.agreement}")
        if self.agreement_prompts is not None and self.agreement_prompts < 1:
            raise ValueError(f"agreement_prompts requires one or more, or None, got {self.agreement_prompts}")
        if self.direction == "noise" and metric.compares:
            raise ValueError(
                f"{metric.name} compares with the clean run, where its gradient is 0: use direction='denoise'"
            )
        names = site_names(self.site, config)
        possible = site_dims(names)
        dims = dims_asked(possible if self.by is None else self.by, possible, self.site)
        if self.qk_fix:
            check_recomputed(names, dims, config)
        if self.grad_drop:
            check_dropped(names, dims, config)
        attrs = {"site": self.site, "direction": self.direction, "order": "first", **rules_attrs(self.rules)}
        attrs |= {"softmax": "recomputed (QK fix)"} if self.qk_fix else {}
        attrs |= {"size": f"GradDrop over {config.n_layers - 1} other layers"} if self.grad_drop else {}
        coords = site_coords(names, dims, config)
        compared = Compared(self.agreement, self.agreement_prompts) if self.agreement else None
        table = EffectTable(
            self.name, dims, coords, metric, model.text, attrs, first_order=True, compared=compared
        )
        measure = partial(_effects, table=table, cells=PatchedCells(names, dims), asked=self)
        return causal(model, table, measure, each=self.each, pairs=True)


attribution_patch = of_pairs(AttributionPatch)


@torch.no_grad()
def _effects(
    model: Transformer, batch: Batch, table: EffectTable, cells: PatchedCells, asked: AttributionPatch
) -> Steps[MeasuredEffects]:
    """Estimated effect of every cell in a batch of pairs, and the metric of their clean and corrupted runs."""
    names, dims, metric, rules = cells.names, cells.dims, table.metric, asked.rules
    pair, config = Contrast.of(batch, asked.direction), model.config
    reads, end = [Read(name) for name in names], Read(final_stream(config), grad=True)
    ends = (
        [end] if as_rules(rules) else []
    )  # read for the completeness check; rules may stop the gradient at every other site
    path = on_the_same_path(names) if asked.qk_fix else []
    other_run = yield from recorded(pair.other, [*reads, *path], final=True, exact=True, rules=rules)
    toward = TowardMetric(metric, other_run.reference(metric))  # a metric that compares: with the clean run
    slopes = [slope_of(name, qk_fix=asked.qk_fix) for name in names]
    more = reads_of_softmax(names, config) if asked.qk_fix else []
    more += streams_for_dropping(config) if asked.grad_drop else []
    own_run = yield from recorded(
        pair.own, [*reads, *slopes, *more, *ends], final=True, exact=True, toward=toward, rules=rules
    )
    inner = tuple(dim for dim in dims if dim != "layer")
    estimate: Estimate = partial(
        _first_order, own_trace=own_run.trace, other_trace=other_run.trace, dims=inner
    )
    if asked.qk_fix:
        estimate = yield from recomputed(own_run, other_run.trace, names, inner, rules)
    effects = [estimate(name, own_run.trace[slope]) for name, slope in zip(names, slopes, strict=True)]
    effect = torch.stack(effects, 1)
    effect, size = effect if "layer" in dims else effect.sum(1), None
    if asked.grad_drop:
        size = yield from dropped_sizes(own_run, names, effects, estimate, slopes, rules)
    runs = pair.runs(*(run.value(metric, toward.reference) for run in (own_run, other_run)))
    quality = own_run.completeness() if ends else {}
    if table.compared is not None:
        known = table.within_rows(effect, batch)
        quality |= yield from _agreement(own_run, other_run, toward, cells, known, table.compared)
    return MeasuredEffects(effect, effect != 0, runs, quality, size)


def _agreement(
    own_run: Recorded,
    other_run: Recorded,
    toward: TowardMetric,
    cells: PatchedCells,
    estimate: Float[Tensor, "b ..."],
    compared: Compared,
) -> Steps[dict[str, Float[Tensor, "b"]]]:
    """Fisher's z of the correlations, over cells, of estimates and patching effects; NaN for prompts not patched.

    Which cells of a prompt are patched depends on the prompt and its number alone, not on the split into batches.
    """
    batch = own_run.batch
    numbers = range(len(batch)) if batch.row is None else batch.row.tolist()
    rows = [i for i, n in enumerate(numbers) if compared.prompts is None or n < compared.prompts]
    z = torch.full((len(batch), len(COEFFICIENTS)), torch.nan, dtype=torch.float64)
    if rows:
        index = to_device(rows, estimate.device)
        own_values, other_values = (
            {name: run.trace[Read(name)][index] for name in cells.names} for run in (own_run, other_run)
        )
        known = {"estimate": estimate[index], "unlike": _differing_cells(cells, own_values, other_values)}
        host = to_host({name: x.reshape(len(rows), -1) for name, x in known.items()})
        estimates = dict(zip(rows, host["estimate"], strict=True))
        drawn = {
            i: _cells_to_patch(estimates[i], unlike, compared.cells, numbers[i])
            for i, unlike in zip(rows, host["unlike"], strict=True)
        }
        drawn = {i: chosen for i, chosen in drawn.items() if len(chosen) > 1}
        effects = yield from _patching_effects(own_run, other_run.trace, toward, cells, drawn)
        for i, chosen in drawn.items():
            exact, changed = effects[i, "exact"], effects[i, "changed"]
            chosen_estimates = estimates[i][chosen].to(exact)
            reaching = changed & ((exact != 0) | (chosen_estimates != 0))  # elsewhere both are exactly 0
            z[i] = torch.tensor(fisher_z(chosen_estimates[reaching], exact[reaching]), dtype=torch.float64)
    return dict(zip(COEFFICIENTS, to_device(z, estimate.device).unbind(1), strict=True))


def _patching_effects(
    own_run: Recorded,
    other_trace: Trace,
    toward: TowardMetric,
    cells: PatchedCells,
    drawn: Mapping[int, Int[Tensor, "some"]],
) -> Steps[dict[tuple[int, str], Tensor]]:
    """Effects of patching the drawn cells of each row i, at [i, "exact"]; whether they changed, at [i, "changed"]."""
    effects: dict[tuple[int, str], Tensor] = {}
    for i, numbers in drawn.items():
        row, other_values = (
            own_run.batch.rows(torch.tensor([i])),
            {n: other_trace[Read(n)][i : i + 1] for n in cells.names},
        )
        variants = cells.variants_of(other_values, row, numbers.tolist())
        reference = None if toward.reference is None else toward.reference[i : i + 1]
        sweep = yield from swept(row, variants, toward.metric, reference=reference, model=own_run.model)
        effects[i, "exact"], effects[i, "changed"] = (sweep.values - sweep.base)[:, 0], sweep.changed[:, 0]
    return to_host(effects)


def _cells_to_patch(
    estimate: Float[Tensor, "n"], unlike: Bool[Tensor, "n"], size: int, seed: int
) -> Int[Tensor, "some"]:
    """Indices of `size` cells to patch in a prompt, half of them those of the largest estimates, the others random.

    Only cells count whose values differ between the runs (`unlike`) and whose estimate is not NaN.
    """
    possible = (unlike & ~estimate.isnan()).nonzero()[:, 0]
    if len(possible) <= size:
        return possible
    largest = estimate[possible].abs().topk(size - size // 2).indices
    shuffled = np.random.default_rng(seed).choice(len(possible), size, replace=False)
    in_largest = set(largest.tolist())
    random_cells = [cell for cell in shuffled.tolist() if cell not in in_largest][: size // 2]
    return possible[torch.cat((largest, torch.tensor(random_cells, dtype=torch.int64)))]


ROUNDED = 8
"""Most that rounding may change a cell, in units of eps times the largest absolute value in the cell."""


def _differing_cells(
    cells: PatchedCells, own_values: Mapping[str, Tensor], other_values: Mapping[str, Tensor]
) -> Bool[Tensor, "b ..."]:
    """Whether each cell's values differ between two runs, by more than rounding."""
    differs = []
    for name in cells.names:
        summed, own_value, other_value = (
            _summed_axes(name, cells.dims),
            upcast(own_values[name]),
            upcast(other_values[name]),
        )
        size = torch.maximum(own_value.abs(), other_value.abs()).nan_to_num(posinf=0.0)
        change = _change(own_value, other_value).abs()
        change, size = (x.amax(summed) if summed else x for x in (change, size))
        differs.append(change > ROUNDED * torch.finfo(own_values[name].dtype).eps * size)
    layers = torch.stack(differs, 1)
    return layers if "layer" in cells.dims else layers.any(1)


def _change(before: Float[Tensor, "*n"], after: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """after - before; 0 where the two are equal, as attention scores that are masked (-inf) in both runs are."""
    return torch.where(before == after, 0.0, after - before)


def _first_order(
    name: str,
    gradient: Tensor,
    own_trace: Trace,
    other_trace: Trace,
    dims: tuple[str, ...],
) -> Float[Tensor, "b ..."]:
    """(a_other - a_own) . gradient at a site, summed over all axes but the batch and `dims`."""
    change = _change(upcast(own_trace[Read(name)]), upcast(other_trace[Read(name)]))
    product, summed = change * gradient.to(change), _summed_axes(name, dims)
    return product.sum(summed) if summed else product


def _summed_axes(name: str, dims: tuple[str, ...]) -> list[int]:
    """Axes of a site's values to sum over: all but the batch and those in `dims`."""
    return [i for i, axis in enumerate(sites.axes_of(name).split()) if i and DIMS.get(axis) not in dims]
