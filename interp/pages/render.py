"""A `Report` as one HTML page with its style, script and data inside; it fetches nothing and opens from disk."""

from __future__ import annotations

import json
import math
from dataclasses import astuple
from typing import TYPE_CHECKING

from interp.attention.shares import with_pattern
from interp.core.boundary import public
from interp.core.visible import visible
from interp.lenses.backward_lens import NO_UPDATE
from interp.model.config import ModelConfig
from interp.pages import (
    absent,
    view_ablation,
    view_attribution,
    view_circuit,
    view_faithfulness,
    view_lattice,
    view_lens,
    view_patching,
    views,
)
from interp.pages.findings import findings
from interp.pages.report import Corrupted, Report, TokenContrast
from interp.pages.stages import STEPS_IN_WORDS
from interp.pages.tables import INDUCTION_THRESHOLD
from interp.pages.templates import environment, script, style
from interp.views import writing
from interp.views.lenses import MOST_DEPTHS
from interp.views.maps import MOST_ON_PAGE, UNCHANGED

if TYPE_CHECKING:
    import pandas as pd

STYLES = ("report", "lattice", "causal")
SECTIONS = {
    "question": "Question", "attribution": "Attribution", "ablation": "Ablation", "patching": "Patching",
    "tokens": "Tokens", "attention": "Attention", "lattice": "Lattice", "circuit": "Answer circuit",
    "lens": "Logit lens", "backward": "Backward lens", "heads": "Head scores", "circuits": "Weights",
    "card": "Model card", "provenance": "Provenance",
}  # fmt: skip
"""The sections of the page in its order: the answer, its parts, where in the prompt, the circuit, lenses, the model."""
GLOSSARY = {
    "token": "a piece of text, the unit that the model reads and writes",
    "logit": "the model's score of a possible next token; a difference of 1 is a factor of 2.7 in probability",
    "residual stream": "the vector of each token that every part reads from and adds to",
    "head": "a part of attention, L3H5 in layer 3: it carries something from the tokens it looks at",
    "MLP": "the part of a layer that works on each token by itself",
    "direct effect": "what a part adds to the logits itself",
    "total effect": "what becomes of the logits when a part is replaced and all later parts run anew",
    "corrupted prompt": "the same prompt, changed just so that the answer changes",
    "lens": "a stream state, read as if it were the last",
    "edge": "one part's output as another part's input",
}
"""The words that a stranger needs."""
SCRIPTS = (
    "state", "cells", "attention", "lattice", "reading", "parts", "painted", "circuit", "why", "stages", "staged",
    "choosing", "keyboard", "causal", "start", "fade", "walk",
)  # fmt: skip
"""The styles and scripts of the page in the order in which they apply."""
OWN_CODE = "its own code"
"""Text of the page for what a wrapped network computes in code of its own."""
COARSE = 250_000
"""Above this many attention weights each is stored in one byte instead of two, and shown with two digits."""


@public()
def page(report: Report) -> str:
    """The whole page as HTML."""
    # Ours, not the reader's text: the only two strings that are not escaped.
    ours = {"css": style(STYLES), "js": script(SCRIPTS)}
    return environment().get_template("report.html").render(own=ours, report=report, **_ready(report))


def _ready(report: Report) -> dict[str, object]:
    """Variables of the template besides the report itself."""
    tables = report.tables
    names = [visible(token) for token in tables["tokens"].token.tolist()]
    heads = tables.get("heads")
    looked = _looked(report, heads, tables.get("attribution"))
    shown, linked = ({}, {"first": [0, 0]}) if report.contrast is None else _answered(report, report.contrast)
    return {
        "facts": _facts(report),
        "card": (card := views.measured(report.about.card.get("measured"))),
        "sections": {name: title for name, title in SECTIONS.items() if card or name != "card"},
        "findings": (found := findings(report)),
        "glossary": GLOSSARY,
        "steps": STEPS_IN_WORDS,
        "tokens": tables["tokens"].to_dict("records"),
        "names": names,
        "scores": views.SCORES,
        "threshold": INDUCTION_THRESHOLD,
        "absent": report.absent,
        "patterned": with_pattern(report.config),
        "painted_heads": many_heads(report.config),
        "kinds": views.KINDS,
        "links": views.strongest(tables["composition"]) if "composition" in tables else {},
        **looked,
        "no_logits": absent.NO_LOGITS,
        "no_corrupted": absent.NO_CORRUPTED,
        "corrupted": report.corrupted,
        **_compared(report),
        "run_json": json.dumps(report.provenance, indent=2, ensure_ascii=False),
        **shown,
        "payload": {
            "names": names,
            "heads": report.config.n_heads,
            "findings": [{"section": one.section, "places": [*map(astuple, one.places)]} for one in found],
            "attention": _packed(tables.get("attention"), report.config),
            **({"profiles": looked["profiles"]} if many_heads(report.config) else {}),
            **({"reasons": {why.part: why.payload() for why in report.reasons}} if report.reasons else {}),
            **({"stages": report.stages} if report.stages else {}),
            **linked,
        },
    }


def many_heads(config: ModelConfig) -> bool:
    """Whether there are too many heads for an element each."""
    return config.n_layers * config.n_heads > MOST_ON_PAGE


def _looked(report: Report, heads: pd.DataFrame | None, parts: pd.DataFrame | None) -> dict[str, object]:
    """Variables of the template about where heads look."""
    if heads is None:
        return {"profiles": [[""] * report.config.n_heads] * report.config.n_layers}
    return {
        "head_maps": {score: views.head_map(heads, score) for score in views.SCORES},
        "best": {score: views.best(heads, score) for score in views.SCORES},
        "found": [head for head in views.scored(heads, "induction") if head.is_induction_head],
        "profiles": views.profiles(heads, parts),
    }


def _answered(report: Report, contrast: TokenContrast) -> tuple[dict[str, object], dict[str, object]]:
    """Variables of the template, and data of the script, for a model with logits."""
    tables, token = report.tables, contrast.answer.token
    parts = tables.get("attribution")
    attribution = None if parts is None else view_attribution.attribution(parts)
    nexts = views.next_tokens(tables["next_tokens"])
    shown = {
        "mean_loss": float(tables["tokens"].loss_nats.mean()),
        "loss_scale": math.log(report.config.d_vocab),
        "nexts": nexts,
        "circuit_scores": views.CIRCUITS,
        "circuit_maps": {score: views.circuit_map(tables["circuits"], score) for score in views.CIRCUITS}
        if "circuits" in tables
        else {},
        "attribution": attribution,
        "grains": view_attribution.GRAINS,
        "ablation": view_ablation.ablation(tables["ablation"]) if "ablation" in tables else {},
        "ablation_unchanged": UNCHANGED,
        "ablation_side": view_ablation.SIDE,
        "ablation_room": view_ablation.ROOM,
        "lenses": {
            **({"Logit lens": view_lens.lens(tables["logit_lens"], token)} if "logit_lens" in tables else {}),
            **(view_lens.fitted(tables["fitted_lenses"], token) if "fitted_lenses" in tables else {}),
        },
        "panels": view_lens.backward_lens(tables["backward_lens"], token, report.config.d_vocab)
        if "backward_lens" in tables
        else [],
        "no_update": NO_UPDATE,
        "idle": view_lens.IDLE,
        "most_depths": MOST_DEPTHS,
        "few_layers": view_lens.FEW_LAYERS,
        "why_these": view_lens.why_these(report.config),
        "word_count": None,
        "flows": None,
    }
    linked = {
        "nexts": nexts,
        "answer": visible(token),
        "ranks": [*tables["tokens"]["rank"].tolist()[1:], contrast.answer.rank],
        "first": [0, 0] if parts is None else view_attribution.speaker(parts),
        "reach": 0.0 if attribution is None else attribution.reach,
    }
    if "attribution_sources" in tables:
        linked["moved"] = view_attribution.moved(tables["attribution_sources"])
    if "value_norms" in tables:
        linked["values"] = view_lattice.values(tables["value_norms"])
    if "head_tokens" in tables:
        words, ids = tables["head_tokens"], tables["tokens"].token_id.tolist()
        shown["word_count"] = words.token_id.nunique()
        linked["words"] = view_lattice.words(words, ids, report.config)
    if "flow_routes" in tables:
        shown |= view_lattice.template_values(tables["flow_routes"])
        linked["lattice"] = view_lattice.lattice(
            tables["flow_routes"], tables.get("flow_neurons"), tables["logit_lens"], report.config
        )
    return shown, linked


def _compared(report: Report) -> dict[str, object]:
    """Variables of the template for a prompt with a corrupted one; no circuit for a model without an edge graph."""
    tables = report.tables
    if report.corrupted is None:
        return {}
    edges, faithfulness, patching = (tables.get(name) for name in ("edges", "faithfulness", "patching"))
    return {
        "directions": view_patching.DIRECTIONS,
        "sites": view_patching.SITES,
        "unchanged": UNCHANGED,
        "patching": None if patching is None else view_patching.patching(patching),
        "circuit": None
        if edges is None or faithfulness is None
        else view_circuit.drawing(edges, faithfulness, report.config),
        "together": view_circuit.TOGETHER,
        **_faithful(report, report.contrast, report.corrupted),
    }


def _faithful(report: Report, contrast: TokenContrast | None, corrupted: Corrupted) -> dict[str, object]:
    """The faithfulness curve; none for a model without an edge graph."""
    table = report.tables.get("faithfulness")
    if table is None or contrast is None:
        return {}
    return {
        "faithfulness": view_faithfulness.curve(table, contrast.total, corrupted.total),
        "curve_width": view_faithfulness.WIDTH,
        "curve_height": view_faithfulness.HEIGHT,
    }


def _facts(report: Report) -> list[tuple[str, str]]:
    """The model in numbers, for the head of the page."""
    config, count = report.config, writing.count
    position, norm = type(config.position).__name__, type(config.norm).__name__
    return [
        ("layers", str(config.n_layers)),
        ("heads a layer", str(config.n_heads)),
        ("d_model", count(config.d_model)),
        ("MLP", _mlp_in_words(config)),
        ("vocabulary", f"{count(config.d_vocab)} tokens"),
        ("context", f"{count(config.n_ctx)} tokens"),
        ("positions", OWN_CODE if config.block.proven else {"NoPosition": "none"}.get(position, position.lower())),
        ("norm", {"NoNorm": "none"}.get(norm, norm)),
        ("dtype", str(report.provenance["dtype"]).removeprefix("torch.")),
    ]  # fmt: skip


def _mlp_in_words(config: ModelConfig) -> str:
    if config.mlp is None:
        return "none (attention-only)"
    if not config.mlp.d_mlp:
        return OWN_CODE
    return f"{writing.count(config.mlp.d_mlp)} neurons {'in each of two ' if len(config.mlps) > 1 else ''}a layer"


def _packed(table: pd.DataFrame | None, config: ModelConfig) -> dict[str, object] | None:
    """Attention weights in [0, 1] as base64 of unsigned integers, little-endian, the largest standing for 1.

    `layers` are those that have weights, in their order. None for a model that has no pattern.
    """
    if table is None:
        return None
    weights = table.value.to_numpy()
    size = 2 if len(weights) <= COARSE else 1
    cells = views.packed(views.fractions(weights, size))
    return {"bytes": size, "cells": cells, "layers": list(with_pattern(config))}
