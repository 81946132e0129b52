"""Effects of each head and each MLP on the answer of one prompt, direct and total, as one table."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pandas as pd

from interp.causal import Ablate
from interp.core.results import frame
from interp.model.config import ModelConfig
from interp.model.edits import Resample, Zero
from interp.passes.metrics import Metric

if TYPE_CHECKING:
    import xarray as xr

    from interp.causal.ablation import AblatedKind
    from interp.causal.stand_ins import StandIn


def ablations(config: ModelConfig, metric: Metric, *, corrupt: bool) -> dict[str, Ablate]:
    """The questions of the table: every head and MLP replaced by zero, or by its value in the corrupted prompt."""
    changes: dict[str, StandIn] = {"zero": Zero(), **({"resample": Resample()} if corrupt else {})}
    kinds: tuple[AblatedKind, ...] = (
        "head",
        *(kind for kind in ("mlp_before", "mlp") if kind in config.mlps),
    )
    return {
        f"{name} {kind}": Ablate(kind, change=change, metric=metric)
        for name, change in changes.items()
        for kind in kinds
    }


def ablation(
    found: Mapping[str, "xr.Dataset"], after_prompt: "xr.Dataset", after_corrupted: "xr.Dataset | None"
) -> pd.DataFrame:
    """One row per change and part, layer by layer, heads before the MLP: the answers to `ablations`.

    Args:
        here, there: what each part adds to the answer's logits (`interp.residual.attribute`) after the prompt and
            after the corrupted one. change: "zero", and with a corrupted prompt "resample", the part's value there at
            every position. value = the answer's logits with the part replaced - those of the same run without that
            (`interp.ablate`), before the soft cap of a model that has one; `changed` is false where nothing was
            changed that can reach the answer. direct = what of it goes straight to the logits, the final norm held:
            minus what the part adds by itself (zero), or what it adds after the corrupted prompt minus what it adds
            after the prompt (resample; each run with its own norm scale).
    """
    added, every = _added(after_prompt), []
    direct = {"zero": -added} | (
        {} if after_corrupted is None else {"resample": _added(after_corrupted) - added}
    )
    for change, straight in direct.items():
        rows = [_rows(each, straight) for name, each in found.items() if name.split()[0] == change]
        whole = pd.concat(rows).sort_values(["layer", "head"], kind="stable", na_position="last")
        every.append(whole.assign(change=change))
    table = pd.concat(every, ignore_index=True)
    return table[["change", "part", "kind", "layer", "head", "direct", "value", "changed"]]


def _added(attributed: "xr.Dataset") -> pd.Series:
    """The logits that each part adds, by its name."""
    return attributed.value.isel(prompt=0).to_series()


def _rows(found: "xr.Dataset", direct: pd.Series) -> pd.DataFrame:
    """One row per part of a kind."""
    table = frame(found)
    return table.assign(head=table["head"].astype("Int64"), direct=direct[table.part].to_numpy())
