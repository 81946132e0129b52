"""The residual lattice and the words of heads made ready: small arrays for the script, the strongest edges in words."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from interp.core.visible import visible
from interp.model.config import ModelConfig
from interp.pages.flow import FLOOR
from interp.pages.views import fractions, packed

STEPS = (0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5)
"""The thresholds of the slider."""
OPENS = 0.02
"""Where the slider stands at first, where that leaves few enough edges."""
MOST_DRAWN = 400
"""Heads' moves and MLPs that are drawn at first."""
STRONGEST = 40
"""Edges in the table that stands there without a script."""


@dataclass(frozen=True)
class EdgeRow:
    """One edge in words."""

    part: str
    source: str
    target: str
    share: float
    attribution: float


def template_values(table: pd.DataFrame) -> dict[str, object]:
    """Variables of the template."""
    return {
        "flows": strongest(table),
        "flow_floor": FLOOR,
        "flow_steps": STEPS,
        "flow_opens": opens(table),
    }


def opens(table: pd.DataFrame) -> float:
    """The least share of an edge at which the lattice opens: the first step that leaves few enough to tell apart."""
    parts = table.value[table.kind.isin(("head", "mlp"))].to_numpy()
    return next((step for step in STEPS if step >= OPENS and (parts >= step).sum() <= MOST_DRAWN), STEPS[-1])


def strongest(table: pd.DataFrame) -> list[EdgeRow]:
    """The largest shares that heads move and MLPs add, largest first."""
    parts = table[table.kind.isin(("head", "mlp"))].sort_values("value", ascending=False, kind="stable")
    best = parts.head(STRONGEST)
    source, target = (
        [f"{visible(token)} ({at})" for token, at in zip(best[f"{end}_token"], best[end], strict=True)]
        for end in ("key", "query")
    )
    numbers = best.value.tolist(), best.attribution.tolist()
    return [EdgeRow(*row) for row in zip(best.part.tolist(), source, target, *numbers, strict=True)]


def lattice(
    flows: pd.DataFrame, neurons: pd.DataFrame | None, lens: pd.DataFrame, config: ModelConfig
) -> dict[str, object]:
    """The data of the lattice for the script: shares as 16-bit fractions, one entry per part above `FLOOR`."""
    moved = flows[flows.kind == "head"]
    own = {
        kind: packed(fractions(part.sort_values(["layer", "query"]).value))
        for kind, part in flows[flows.kind != "head"].groupby("kind")
    }
    first = lens[lens["rank"] == 0]
    mlps = flows[(flows.kind == "mlp") & flows.attribution.notna()].sort_values("layer")
    columns = [moved.layer, moved["head"], moved["query"], moved.key, fractions(moved.value)]
    found = (
        [] if neurons is None else [neurons.layer, neurons["query"], neurons.neuron, fractions(neurons.value)]
    )
    return {
        "layers": config.n_layers,
        "floor": FLOOR,
        "steps": STEPS,
        "own": own,
        "edges": packed(np.stack([np.asarray(x, dtype="<u2") for x in columns], 1)),
        "neurons": packed(np.stack([np.asarray(x, dtype="<u2") for x in found], 1)) if found else "",
        "answer": packed(fractions(first.answer_prob)),
        "mlps": mlps.attribution.round(6).tolist(),
    }


def values(table: pd.DataFrame) -> dict[str, object]:
    """Lengths of values `[layer head key]` as 16-bit fractions of the longest."""
    most = float(table.value.max()) or 1.0
    ordered = table.sort_values(["layer", "head", "key"])
    return {"most": most, "cells": packed(fractions(ordered.value / most))}


def words(table: pd.DataFrame, ids: Sequence[int], config: ModelConfig) -> dict[str, object]:
    """What each head raises, lowers and prefers for each token of the prompt, for the page's script.

    Args:
        table: one row per list, layer, head, token of the prompt (`token_id`) and rank: the listed word (`word_id`,
            `word`) and its score (`value`).
        ids: token ids of the prompt.
        config: of the model.

    Returns:
        - `tokens`: of each position, the place of its token among the `count` distinct ones.
        - `texts`: the distinct words.
        - by list: `each`, the words per head and token; `ids`, their places in `texts`, and `scores`, both
          `[layer head token rank]`; a score is int16, times `most` of its head, over 32 767.
    """
    known = np.unique(table.token_id)
    texts, where = np.unique(table.word_id, return_index=True)
    pieces = [visible(word) for word in table.word.iloc[where]]
    made: dict[str, object] = {
        "tokens": np.searchsorted(known, ids).tolist(),
        "count": len(known),
        "texts": pieces,
    }
    for name, part in table.groupby("list"):
        ordered = part.sort_values(["layer", "head", "token_id", "rank"])
        scores = ordered.value.to_numpy(dtype=float).reshape(config.n_layers * config.n_heads, -1)
        most = np.abs(scores).max(1, keepdims=True)
        stored = np.rint(scores / np.where(most == 0, 1, most) * 32767).astype("<i2")
        made[str(name)] = {
            "each": int(ordered["rank"].max()) + 1,
            "ids": packed(np.searchsorted(texts, ordered.word_id).astype("<u2")),
            "scores": packed(stored),
            "most": [float(f"{x:.6g}") for x in most[:, 0]],
        }
    return made
