"""The prompt against its corrupted one: the same tokens but for those that change the answer."""

from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, get_args

from interp.causal import EdgeGraph, Patch
from interp.causal.contrast import Direction
from interp.circuits import circuit_curve
from interp.circuits.edge_attribution import EdgeMethod
from interp.data.batch import Prompts
from interp.data.pairs import paired
from interp.model.config import MLPS, ModelConfig
from interp.passes.metrics import Metric
from interp.passes.observe import Subject

if TYPE_CHECKING:
    import xarray as xr

SITES = ("resid_pre", "mlp_before_out", "attn_out", "mlp_out", "z")
"""Sites that are patched: three streams by layer and token, and every head's output by layer and head."""
METHOD: EdgeMethod = "eap-ig-inputs"
"""How edges are scored."""
SIZES = (1, 2, 5, 10, 25, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)
"""How many edges the circuits of the faithfulness curve are given; the last one has all."""


def patches(config: ModelConfig, metric: Metric) -> dict[str, Patch]:
    """The questions of patching, by direction and site; what blocks do not add to the stream is left out."""
    absent = {*MLPS}.difference(config.sublayers)
    sites = [site for site in SITES if site not in absent]
    return {
        f"{direction} {site}": Patch(site, metric=metric, direction=direction)
        for direction, site in product(get_args(Direction), sites)
    }


@dataclass(frozen=True)
class PromptPair:
    """Two aligned prompts and what is watched in both."""

    prompt: Prompts
    corrupt: Prompts
    metric: Metric

    def curve(self, model: Subject, scores: "xr.Dataset") -> tuple[list[int], "xr.Dataset"]:
        """Faithfulness of circuits by size, of as many of the strongest edges; without random circuits."""
        count = scores.attrs["edges"]
        sizes = [*(size for size in SIZES if size < count), count]
        # The curve takes shares and rounds down: half an edge more lands on each size.
        shares = [min(1.0, (size + 0.5) / count) for size in sizes]
        curve_of = partial(circuit_curve, model, self.prompt, self.corrupt, scores, metric=self.metric)
        return sizes, curve_of(fractions=shares, draws=0)


def check_aligned(model: Subject, prompt: Prompts, corrupt: Prompts | None) -> None:
    """ValueError for a corrupted prompt that is none: as many tokens, not the same ones, and a model with logits."""
    if corrupt is None:
        return
    if not model.transformer.config.unembed:
        raise ValueError(
            f"a corrupted prompt ({corrupt!r}) requires a model with logits, this one ends in its residual stream"
        )
    paired(model.text, prompt, corrupt)


def why_no_edges(config: ModelConfig) -> str | None:
    """Why this shape of model has no edge graph, in the graph's own words; None if it has one."""
    try:
        EdgeGraph.of(config)
    except ValueError as refused:
        return str(refused)
    return None
