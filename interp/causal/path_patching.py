"""Path patching: how much of a part's effect goes straight to given receivers, and onwards from there.

Activation patching of a head shows all that follows from it. Path patching lets the change out of a sender along the
direct paths to chosen receivers only: queries, keys or values of heads, MLPs, or the logits (Wang et al. 2022,
arXiv:2211.00593, section 3.1 and appendix B; Goldowsky-Dill et al. 2023, arXiv:2304.05969). Norms on the way are
computed anew; one behind the heads' sum (sandwich, output, post) makes a sender move the shares of its neighbours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.causal.contrast import Contrast, Direction, Watched, check_direction
from interp.causal.effects import check_one_length
from interp.causal.graph import INPUT, LOGITS, EdgeGraph
from interp.causal.path_runs import PathRuns, Routes, head_places
from interp.core.results import labelled
from interp.core.stats import Moments
from interp.data.text import Prompts
from interp.model.transformer import Transformer
from interp.passes.metrics import Metric, logit_difference
from interp.passes.observe import Subject

if TYPE_CHECKING:
    import xarray as xr


def path_patch(
    model: Subject,
    clean: Prompts,
    corrupt: Prompts,
    receivers: str | Sequence[str] = LOGITS,
    *,
    senders: Sequence[str] | None = None,
    metric: Metric | None = None,
    direction: Direction = "noise",
    freeze_mlps: bool = False,
    by_pos: bool = False,
    prepend_bos: bool = True,
    batch_size: int = 32,
) -> "xr.Dataset":
    """What each sender's value of the other run does to the metric if it reaches only the receivers directly.

    noise: into the clean run, from the corrupted one (Wang et al. 2022); denoise: the other way round. For each sender
    1. the sender takes its value of the other run, all other heads keep theirs, and the inputs of the receivers are
       computed: the change travels through the residual stream, its norms and (unless freeze_mlps) the MLPs;
    2. the receivers get those inputs in an untouched run, and everything behind them is computed.
    For `logits` the first run is the result. All senders are two planned sweeps.

    Names are those of `EdgeGraph`. Senders: `input` (the stream entering block 0), `a0.h1` (z of a head), `m2` (what an
    MLP adds); None = all that come before a receiver. Receivers: `a1.h2<q>`, `<k>`, `<v>` (the head's own query, ... ;
    `a1.g0<k>` where heads share keys), `m3` (the stream that the MLP reads, before its norm), or `logits` alone.
    Several receivers get their inputs together, each of the first run: what one does to another is not passed on.
    A receiver MLP gets its patched input; MLPs on the way to it pass the change on.

    Returns Dataset with `effect` [layer, head], the metric of the patched run minus that of the untouched one, mean
    over prompts with the ends `_low` and `_high` of its 95 % interval; `normalised`, (patched - corrupt) / (clean -
    corrupt) of the mean metrics, 0 = like the corrupted run, 1 = like the clean one; `each` [prompt, ...]; `changed`,
    whether the sender differs between the runs in any prompt, and the receivers with it (where not, the effect is 0
    because nothing was done). The same with the ending `_mlp` [layer] and `_input` for the other senders; `clean` and
    `corrupt` [prompt], the metric of both runs. NaN: not asked for, or no way to a receiver.
    freeze_mlps: hold MLPs too: the effect of the sender's own vector in the receiver's input, nothing in between.
    by_pos: replace the sender at one position at a time; adds the dim `pos`. Effects of positions do not sum.
    metric: None is the logit difference of the answers that the clean batch carries; one that compares (KL divergence)
    compares with the clean run.
    Memory: the receivers' sites (all heads of their layer) once per sender and prompt of a batch.
    Errors: KeyError for an unknown name; ValueError for pairs that do not align, a sender behind all receivers,
    `logits` beside other receivers, cross-attention, `by_pos` with prompts of several lengths, or a metric that is the
    same for both runs in every prompt.

    Example:
        >>> pairs = torch.tensor([[5, 6, 7]]), torch.tensor([[5, 9, 7]])
        >>> path_patch(model, *pairs, ["a2.h0<q>", "a2.h3<q>"], metric=logit_difference(3, 4)).effect.dims
        ('layer', 'head')
    """
    metric = logit_difference() if metric is None else metric
    check_direction(direction)
    ends = [receivers] if isinstance(receivers, str) else receivers
    network = model.transformer
    routes = Routes.of(network.config, ends, senders, freeze_mlps=freeze_mlps)
    pair = Contrast.of(model, clean, corrupt, metric, prepend_bos=prepend_bos)
    if by_pos:
        check_one_length(pair.clean, "effects by position")
    parts = [_effects(network, some, routes, metric, direction, by_pos) for some in pair.split(batch_size)]
    return _table(PathEffects.joined(parts), routes, metric, direction)


@dataclass(frozen=True, eq=False)
class PathEffects:
    """Every sender's effect in some prompts, and the metric of their two runs."""

    effect: Float[Tensor, "b v ..."]
    changed: Bool[Tensor, "b v ..."]
    clean: Float[Tensor, "b"]
    corrupt: Float[Tensor, "b"]

    @classmethod
    def joined(cls, parts: Sequence["PathEffects"]) -> "PathEffects":
        """Several as one."""
        rows = zip(*((x.effect, x.changed, x.clean, x.corrupt) for x in parts), strict=True)
        return cls(*(torch.cat(row) for row in rows))


def _effects(
    model: Transformer, pair: Contrast, routes: Routes, metric: Metric, direction: Direction, by_pos: bool
) -> PathEffects:
    """The effect of every sender in some pairs."""
    own, other = (pair.corrupt, pair.clean) if direction == "denoise" else (pair.clean, pair.corrupt)
    watched, reference = Watched(model, metric), None
    if metric.compares:
        reference = watched.columns(watched.recorded(pair.clean, []).output, pair.clean)
    found, source = PathRuns(model, own, other, routes, by_pos).run(metric, reference)
    shape = (len(routes.senders), -1) if by_pos else (len(routes.senders),)
    effect, changed = (x.mT.unflatten(1, shape) for x in (found.values - found.base, found.changed))
    runs = (source, found.base) if direction == "denoise" else (found.base, source)
    return PathEffects(effect, changed, *runs)


def _table(found: PathEffects, routes: Routes, metric: Metric, direction: Direction) -> "xr.Dataset":
    total = found.clean - found.corrupt
    if not bool(total.any()):
        raise ValueError(
            f"{metric.name} is {float(found.clean[0]):.4g} for clean and corrupted runs alike in every prompt: "
            "there is nothing that a path could carry"
        )
    variables: dict[str, tuple[Sequence[str], Tensor]] = {}
    graph = routes.graph
    for kind in _kinds(graph):
        variables |= kind.variables(found, routes, direction)
    return labelled(
        "path_patch",
        {**variables, "clean": (("prompt",), found.clean), "corrupt": (("prompt",), found.corrupt)},
        coords={"layer": range(graph.n_layers), "head": range(graph.n_heads)},
        attrs={
            "receivers": ", ".join(routes.receivers),
            "held": "other heads, MLPs" if routes.freeze_mlps else "other heads",
            "direction": direction, "metric": metric.name, "unit": metric.unit, "n": len(total),
            "positive": "the sender's value of the other run raises the metric",
            "nan": "not asked for, or no way to a receiver",
        },
    )  # fmt: skip


def _kinds(graph: EdgeGraph) -> "list[_Kind]":
    """The kinds of senders that a model has."""
    mlps = [graph.mlp_sender(layer) for layer in range(graph.n_layers * graph.mlp)]
    return [
        _Kind("", ("layer", "head"), head_places(graph)),
        *[_Kind("_mlp", ("layer",), torch.tensor(mlps, dtype=torch.long))] * graph.mlp,
        _Kind("_input", (), torch.tensor(graph.senders.index(INPUT))),
    ]


@dataclass(frozen=True, eq=False)
class _Kind:
    """Senders of one kind: how their variables end, along which dims, and where each stands among all senders."""

    ending: str
    dims: tuple[str, ...]
    places: Int[Tensor, "..."]

    def variables(
        self, found: PathEffects, routes: Routes, direction: Direction
    ) -> dict[str, tuple[Sequence[str], Tensor]]:
        """The results of these senders."""
        each, changed = (self._spread(x, routes) for x in (found.effect, found.changed))
        start = found.corrupt if direction == "denoise" else found.clean
        offset, total = ((x - found.corrupt).double().mean() for x in (start, found.clean))
        dims = (*self.dims, *(("pos",) if found.effect.ndim == 3 else ()))
        return {
            **Moments.of(each).cells(f"effect{self.ending}", dims),
            f"normalised{self.ending}": (dims, (each.double().mean(0) + offset) / total),
            f"changed{self.ending}": (dims, changed.any(0)),
            f"each{self.ending}": (("prompt", *dims), each),
        }

    def _spread(self, x: Tensor, routes: Routes) -> Tensor:
        """Values of the senders that were run as values of this kind, `[b, *dims]`; NaN, or False, for the others."""
        missing = torch.nan if x.is_floating_point() else False
        every = x.new_full((x.shape[0], len(routes.graph.senders), *x.shape[2:]), missing)
        every[:, list(routes.senders)] = x
        return every[:, self.places.to(x.device)]
