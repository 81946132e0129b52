"""What each head and each MLP is worth to the answer of one prompt, directly and in all, as one table."""

from typing import TYPE_CHECKING

import pandas as pd

from interp.causal import ablate
from interp.core.results import frame
from interp.model.edits import Resample, Zero
from interp.passes.metrics import logit_difference
from interp.passes.observe import Model, as_network
from interp.residual import attribute

if TYPE_CHECKING:
    import xarray as xr

    from interp.causal.ablation import Kind
    from interp.causal.stand_ins import StandIn


def ablation(
    model: Model, prompt: str, corrupt: str | None, answer: int, wrong: int | None, attributed: "xr.Dataset"
) -> pd.DataFrame:
    """Every head and MLP replaced alone: one row per change and part, layer by layer, heads before the MLP.

    change: "zero", and with a corrupted prompt "resample", the part's value there at every position. value = the
    answer's logits with the part replaced - those of the same run without that (`interp.ablate`); `changed` is false
    where nothing was changed that can reach the answer. direct = what of it goes straight to the logits, the final norm
    held: minus what the part adds by itself (zero: `attributed`, of the prompt), or what it adds after the corrupted
    prompt minus what it adds after the prompt (resample; each run with its own norm scale).
    """
    here = _added(attributed)
    changes: dict[str, tuple[StandIn, str | None, pd.Series]] = {"zero": (Zero(), None, -here)}
    if corrupt is not None:
        there = _added(attribute(model, corrupt, answer, wrong, parts="head"))
        changes["resample"] = (Resample(), corrupt, there - here)
    config = as_network(model).config
    kinds: tuple[Kind, ...] = ("head", *(kind for kind in ("mlp_before", "mlp") if kind in config.mlps))
    metric, every = logit_difference(answer, wrong), []
    for name, (change, reference, direct) in changes.items():
        found = [
            _rows(ablate(model, prompt, kind, change=change, metric=metric, reference=reference), direct)
            for kind in kinds
        ]
        whole = pd.concat(found).sort_values(["layer", "head"], kind="stable", na_position="last")
        every.append(whole.assign(change=name))
    table = pd.concat(every, ignore_index=True)
    return table[["change", "part", "kind", "layer", "head", "direct", "value", "changed"]]


def _added(attributed: "xr.Dataset") -> pd.Series:
    """The logits that each part adds, by its name."""
    return attributed.value.isel(prompt=0).to_series()


def _rows(found: "xr.Dataset", direct: pd.Series) -> pd.DataFrame:
    """One row per part of a kind."""
    table = frame(found)
    return table.assign(head=table["head"].astype("Int64"), direct=direct[table.part].to_numpy())
