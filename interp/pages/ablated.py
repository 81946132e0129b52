"""What each head and each MLP is worth to the answer of one prompt, directly and in all, as one table."""

from typing import TYPE_CHECKING

import pandas as pd

from interp.causal.ablation import Kind, ablate
from interp.causal.stand_ins import StandIn
from interp.core.results import frame
from interp.model.edits import Resample, Zero
from interp.pages import tables
from interp.passes.metrics import logit_difference
from interp.passes.observe import Subject
from interp.residual.attribution import attribute

if TYPE_CHECKING:
    import xarray as xr

COMPONENT: dict[Kind, str] = {
    "head": "L{layer}H{head}", "mlp_before": "{layer}_mlp_before_out", "mlp": "{layer}_mlp_out",
}  # fmt: skip
"""What attribution calls each kind of part."""


def ablation(
    model: Subject, prompt: str, corrupt: str | None, answer: int, wrong: int | None, attributed: "xr.Dataset"
) -> pd.DataFrame:
    """Every head and MLP replaced alone: one row per protocol and part, layer by layer, heads before the MLP.

    protocol: "zero", and with a twin "resample", the twin's value at every position. effect_logits = the answer's
    logits without the part minus those with it (`interp.ablate`); `changed` is false where nothing was changed that can
    reach the answer. direct_logits = what the part adds directly by itself (zero: `attributed`, of the prompt), or adds
    more than in the twin (resample; each run with its own norm scale).
    """
    direct = _direct(attributed)
    protocols: dict[str, tuple[StandIn, str | None, pd.Series]] = {"zero": (Zero(), None, direct)}
    if corrupt is not None:
        there = _direct(attribute(model, corrupt, answer, wrong, by="head"))
        protocols["resample"] = (Resample(), corrupt, direct - there)
    config = model.transformer.config
    there_are = {"head": True, "mlp_before": config.macaron, "mlp": config.mlp is not None}
    kinds = [kind for kind in COMPONENT if there_are[kind]]
    metric, every = logit_difference(answer, wrong), []
    for name, (change, reference, known) in protocols.items():
        parts = []
        for kind in kinds:
            found = ablate(model, prompt, kind, change=change, metric=metric, reference=reference)
            parts.append(_rows(found, kind, known))
        whole = pd.concat(parts).sort_values(["layer", "head"], kind="stable", na_position="last")
        whole.insert(0, "protocol", name)
        every.append(whole)
    return pd.concat(every, ignore_index=True)


def _direct(attributed: "xr.Dataset") -> pd.Series:
    """Logits by component."""
    return tables.attribution(attributed).set_index("component").logits


def _rows(found: "xr.Dataset", kind: Kind, direct: pd.Series) -> pd.DataFrame:
    """One row per part of a kind."""
    table = frame(found[["effect", "changed"]]).rename(columns={"effect": "effect_logits"})
    head = table.get("head", pd.Series(pd.NA, index=table.index))
    names = [COMPONENT[kind].format(layer=layer, head=h) for layer, h in zip(table.layer, head, strict=True)]
    return pd.DataFrame(
        {
            "component": names,
            "kind": kind,
            "layer": table.layer,
            "head": head.astype("Int64"),
            "direct_logits": direct[names].to_numpy(),
            "effect_logits": table.effect_logits,
            "changed": table.changed,
        }
    )
