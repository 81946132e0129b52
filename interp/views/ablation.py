"""Ablation: the change of the metric where a part is replaced."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float

from interp.views.maps import CellMap
from interp.views.scale import ColourScale


def ablation_map(
    values: Float[np.ndarray, "rows columns"],
    changed: Bool[np.ndarray, "rows columns"] | None,
    label: str,
    *,
    reach: float | None = None,
    rows: Sequence[str] = (),
    columns: Sequence[str] = (),
    axes: tuple[str, str] = ("layer", "head"),
) -> CellMap:
    """Metric with the part replaced minus without: blue where it falls, so where the part speaks for the metric.

    Args:
        changed: where anything was changed that can reach the metric; None: everywhere.
        label: name of the number, with its unit.
        reach: size of an effect that has the full colour; None: the largest.
    """
    shown = values if changed is None else np.where(changed, values, np.nan)
    scale = ColourScale.removal(shown if reach is None else reach, label)
    idle = None if changed is None else ~changed
    return CellMap(values, scale, "", rows, columns, axes, sign=True, idle=idle)
