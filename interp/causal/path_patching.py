"""Path patching: how much of a part's effect goes straight to given receivers, and onwards from there.

Activation patching of a head shows all that follows from it. Path patching lets the change out of a sender along the
direct paths to chosen receivers only: queries, keys or values of heads, MLPs, or the logits (Wang et al. 2022,
arXiv:2211.00593, section 3.1 and appendix B; Goldowsky-Dill et al. 2023, arXiv:2304.05969). Norms on the way are
computed anew; one after the heads' sum (sandwich, output, post) makes a sender move the shares of its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from interp.causal.contrast import Direction, Watched, paired
from interp.causal.effects import Measured, Table, causal, dims_asked, listed
from interp.causal.graph import LOGITS
from interp.causal.path_runs import PathRuns, Routes
from interp.core.boundary import public
from interp.data.batch import Batch
from interp.data.sources import Data
from interp.data.text import Prompts
from interp.model.edits import Edit
from interp.model.parts import Named
from interp.model.transformer import Transformer
from interp.passes.analysis import Analysis, Question
from interp.passes.metrics import LogitFunction, Metric, as_metric
from interp.passes.observe import Model, Subject, text_of
from interp.runs.run import answered

if TYPE_CHECKING:
    import xarray as xr


@dataclass(frozen=True, eq=False)
class PathPatch(Question):
    """What each sender does to a metric through given receivers alone; `path_patch` describes the result. Asked of
    pairs of prompts.
    """

    receivers: Named | Sequence[Named] = LOGITS
    """Inputs of heads and MLPs, or the logits."""
    senders: Sequence[Named] | None = None
    """Heads, MLPs and the stream that enters layer 0; None = all that come before a receiver."""
    metric: Metric | LogitFunction | None = None
    """None = the logit difference of the answers that the data bring."""
    direction: Direction = "denoise"
    """denoise: clean values into the corrupted run; noise: the other way round."""
    by: Sequence[str] = ("part",)
    """Which cells: `part`, or `part` and `pos` for one position at a time."""
    freeze_mlps: bool = False
    """Whether MLPs are held as well."""
    each: bool = True
    """Whether every prompt's effects are kept."""

    def asked(self, model: Subject) -> Analysis:
        """Two planned sweeps per batch of pairs."""
        ends, config = listed(self.receivers), model.transformer.config
        routes = Routes.of(config, ends, self.senders, freeze_mlps=self.freeze_mlps)
        metric, dims = as_metric(self.metric), dims_asked(self.by, ("part", "pos"), "path patching")
        if "part" not in dims:
            raise KeyError("senders are told apart in every result: 'part' is required in `by`")
        coords = {
            "part": [str(part) for part in routes.senders],
            "layer": (("part",), [part.layer for part in routes.senders]),
            "kind": (("part",), [part.kind for part in routes.senders]),
        }
        attrs: dict[str, str | int | float] = {
            "receivers": ", ".join(map(str, routes.receivers)),
            "held": "other heads, MLPs" if self.freeze_mlps else "other heads",
            "direction": self.direction,
        }
        table = Table(self.name, dims, coords, metric, model.text, attrs)
        measure = partial(_measured, routes=routes, metric=metric, direction=self.direction, dims=dims)
        return causal(model, table, measure, each=self.each, pairs=True)


@public()
def path_patch(
    model: Model,
    clean: Prompts | Data,
    corrupt: Prompts | Data,
    receivers: Named | Sequence[Named] = LOGITS,
    *,
    senders: Sequence[Named] | None = None,
    metric: Metric | LogitFunction | None = None,
    direction: Direction = "denoise",
    by: Sequence[str] = ("part",),
    freeze_mlps: bool = False,
    each: bool = True,
    edits: Sequence[Edit] = (),
    prepend_bos: bool = True,
    batch_size: int = 32,
) -> xr.Dataset:
    """What each sender's value of the other run does to the metric if it reaches only the receivers directly.

    denoise: into the corrupted run, from the clean one; noise: the other way round (Wang et al. 2022). For each sender
    1. the sender takes its value of the other run, all other heads keep theirs, and the inputs of the receivers are
       computed: the change travels through the residual stream, its norms and (unless freeze_mlps) the MLPs;
    2. the receivers get those inputs in an untouched run, and everything after them is computed.
    For `logits` the first run is the result. All senders are two planned sweeps.

    Senders: `L0.resid` (the stream entering layer 0), heads `L0H1` (their z), MLPs `L2.mlp` (what they add); None = all
    that come before a receiver. Receivers: `L1H2.q`, `.k`, `.v` (the head's own query, ... ; `L1G0.k` where heads share
    keys), `L3.mlp` (the stream that the MLP reads, before its norm), or `logits` alone. Several receivers get their
    inputs together, each of the first run: what one does to another is not passed on. A receiver MLP gets its patched
    input; MLPs on the way to it pass the change on.

    Returns Dataset[part], over the senders, with the variables of `patch`: `value`, the metric of the patched run minus
    that of the untouched one, mean over prompts with the ends `low` and `high` of its 95 % interval and `n`;
    `normalised`; `each` [prompt, part]; `changed`, whether the sender differs between the runs in any prompt, and the
    receivers with it (where not, the effect is 0 because nothing was done); `clean` and `corrupt` [prompt]. The
    coordinates `layer` and `kind` ("head", "mlp", "resid") tell senders apart.
    by: ("part", "pos") replaces the sender at one position at a time. Effects of positions do not sum.
    freeze_mlps: hold MLPs too: the effect of the sender's own vector in the receiver's input, nothing in between.
    metric: a `Metric` or a function of the logits at the last token; None is the logit difference of the answers that
    the clean prompts bring; one that compares (KL divergence) compares with the clean run.
    each=False keeps only the moments over prompts, for data of any size.
    Memory: the receivers' sites (all heads of their layer) once per sender and prompt of a batch.
    Errors: KeyError or IndexError for a part that the model lacks, or that neither sends nor receives; ValueError for
    pairs that do not align, a sender after all receivers, `logits` beside other receivers, cross-attention, positions
    of prompts of several lengths, or a metric that is the same for both runs in every prompt.

    Example:
        >>> pairs = torch.tensor([[5, 6, 7]]), torch.tensor([[5, 9, 7]])
        >>> found = path_patch(model, *pairs, ["L2H0.q", "L2H3.q"], metric=interp.logit_difference(3, 4))
        >>> found.part.values[:2].tolist()
        ['L0.resid', 'L0H0']
    """
    data = paired(text_of(model), clean, corrupt, prepend_bos=prepend_bos)
    question = PathPatch(receivers, senders, metric, direction, by, freeze_mlps, each)
    return answered(question, model, data, edits=edits, prepend_bos=prepend_bos, batch_size=batch_size)


def _measured(
    model: Transformer,
    batch: Batch,
    routes: Routes,
    metric: Metric,
    direction: Direction,
    dims: tuple[str, ...],
) -> Measured:
    """The effect of every sender in every pair."""
    clean, corrupt = batch.pair()
    own, other = (corrupt, clean) if direction == "denoise" else (clean, corrupt)
    watched, reference = Watched(model, metric), None
    if metric.compares:
        reference = watched.columns(watched.recorded(clean, []).output, clean)
    by_pos = "pos" in dims
    found, source = PathRuns(model, own, other, routes, by_pos).run(metric, reference)
    shape = (len(routes.senders), -1) if by_pos else (len(routes.senders),)
    effect, changed = (x.mT.unflatten(1, shape) for x in (found.values - found.base, found.changed))
    runs = (source, found.base) if direction == "denoise" else (found.base, source)
    return Measured(effect, changed, dict(zip(("clean", "corrupt"), runs, strict=True)))
