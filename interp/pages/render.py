"""A `Report` as one HTML page with its style, script and data inside: what the template shows, made ready for it."""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

import jinja2
import numpy as np
import pandas as pd
from markupsafe import Markup

from interp.model.config import Json, ModelConfig
from interp.pages import wording
from interp.pages.report import Report
from interp.pages.tables import INDUCTION_THRESHOLD

SCORES = {
    "induction": "attention to the tokens that followed earlier copies of the current one",
    "previous_token": "attention to the token just before the current one",
    "duplicate_token": "attention to earlier copies of the current token",
}
"""The head scores of the page and what each measures."""
BEST = 8
"""Heads listed with their intervals."""
COARSE = 600_000
"""Above this many attention weights each is stored in one byte instead of two."""


@dataclass(frozen=True)
class Cell:
    """One coloured cell of a map."""

    text: str
    level: float
    """Strength of the colour, in [-1, 1]; negative = the colour of negative numbers."""
    tip: str
    """What it explains when pointed at."""
    marked: bool = False


def page(report: Report) -> str:
    """The whole page as HTML; it fetches nothing and opens from disk."""
    folder = files("interp.pages")
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: (folder / name).read_text(encoding="utf-8")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "visible": wording.visible,
        "harmless": wording.harmless,
        "number": wording.number,
        "probability": wording.probability,
        "count": wording.count,
    }
    # Ours, not the reader's text: the only two strings that are not escaped.
    own = {name: Markup((folder / f"report.{name}").read_text(encoding="utf-8")) for name in ("css", "js")}
    return environment.get_template("report.html").render(own=own, **_context(report))


def _context(report: Report) -> dict[str, object]:
    tables, config = report.tables, ModelConfig.from_dict(_mapping(report.provenance["config"]))
    attribution = _attribution(tables["attribution"])
    tokens = [wording.visible(token) for token in tables["tokens"].token]
    return {
        "report": report,
        "config": config,
        "facts": _facts(config, report),
        "card": _card(report.about.card),
        "tokens": list(tables["tokens"].itertuples(index=False)),
        "names": tokens,
        "loss_scale": float(np.log(config.d_vocab)),
        "nexts": _next_rows(tables["next_tokens"]),
        "scores": SCORES,
        "threshold": INDUCTION_THRESHOLD,
        "head_maps": {score: _head_map(tables["heads"], score) for score in SCORES},
        "best": {score: _best(tables["heads"], score) for score in SCORES},
        "nulls": {score: float(tables["heads"][f"{score}_null"].iloc[0]) for score in SCORES},
        "found": list(tables["heads"][tables["heads"].is_induction_head].itertuples()),
        "profiles": _profiles(report),
        "attribution": attribution,
        "lens": _lens(tables["logit_lens"], report),
        "run_json": json.dumps(report.provenance, indent=2, ensure_ascii=False),
        "payload": {
            "names": tokens,
            "layers": config.n_layers,
            "heads": config.n_heads,
            "nexts": _next_rows(tables["next_tokens"]),
            "reach": attribution.reach,
            "moved": _moved(tables["attribution_sources"]),
            "attention": _packed(tables["attention"].attention.to_numpy()),
        },
    }


def _mapping(value: object) -> Json:
    assert isinstance(value, dict)
    return value


def _facts(config: ModelConfig, report: Report) -> list[tuple[str, str]]:
    """The model in numbers, for the head of the page."""
    position, norm = type(config.position).__name__, type(config.norm).__name__
    mlp = "none (attention-only)" if config.mlp is None else f"{wording.count(config.mlp.d_mlp)} neurons a layer"
    return [
        ("layers", str(config.n_layers)),
        ("heads a layer", str(config.n_heads)),
        ("d_model", wording.count(config.d_model)),
        ("MLP", mlp),
        ("vocabulary", f"{wording.count(config.d_vocab)} tokens"),
        ("context", f"{wording.count(config.n_ctx)} tokens"),
        ("positions", {"NoPosition": "none"}.get(position, position.lower())),
        ("norm", {"NoNorm": "none"}.get(norm, norm)),
        ("dtype", str(report.provenance["dtype"]).removeprefix("torch.")),
    ]


def _card(card: Json) -> list[tuple[str, str, str]]:
    """Name, value and definition of each number of a model's card."""
    measured = card.get("measured", {})
    entries = []
    for name, entry in _mapping(measured).items():
        values = _mapping(entry)
        head = f" (head {values['head']})" if "head" in values else ""
        text = f"{values['value']:.3g}{head}".replace("-", "−")
        tip = f"{values.get('definition', '')} (n = {wording.count(int(str(values.get('n', 0))))})"
        entries.append((name.replace("_", " "), text, tip))
    return entries


def _next_rows(table: pd.DataFrame) -> list[list[tuple[str, float, float]]]:
    """For each position its most probable next tokens: text, probability, logit."""
    return [
        [(wording.visible(t), round(float(p), 6), round(float(x), 4)) for t, p, x in zip(g.token, g.prob, g.logit)]
        for _, g in table.groupby("pos", sort=True)
    ]


def _head_map(table: pd.DataFrame, score: str) -> list[list[Cell]]:
    """Rows of cells, layer by head, of one score."""
    rows: list[list[Cell]] = []
    for _, layer in table.sort_values(["layer", "head"]).groupby("layer"):
        rows.append([])
        for row in layer.to_dict("records"):
            value, low, high = (float(row[f"{score}{end}"]) for end in ("", "_low", "_high"))
            words = score.replace("_", " ")
            tip = (
                f"layer {row['layer']}, head {row['head']}\n{words} score {value:.3f}\n"
                f"95 % interval [{low:.3f}, {high:.3f}]\nnull {row[f'{score}_null']:.3f}"
            )
            marked = score == "induction" and bool(row["is_induction_head"])
            rows[-1].append(Cell(wording.number(value), value, tip, marked))
    return rows


@dataclass(frozen=True)
class Scored:
    """One head's score with its interval."""

    layer: int
    head: int
    value: float
    low: float
    high: float
    marked: bool


def _best(table: pd.DataFrame, score: str) -> list[Scored]:
    """The heads that score highest, best first."""
    order = table.sort_values(score, ascending=False, kind="stable").head(BEST)
    columns = (order[name] for name in ("layer", "head", score, f"{score}_low", f"{score}_high", "is_induction_head"))
    return [Scored(*map(int, row[:2]), *map(float, row[2:5]), bool(row[5])) for row in zip(*columns, strict=True)]


def _profiles(report: Report) -> list[list[str]]:
    """One line about each head: its scores and what it adds directly in this prompt."""
    parts = report.tables["attribution"]
    direct = {(r.layer, r.head): r.logits for r in parts[parts.kind == "head"].itertuples()}
    lines: dict[int, list[str]] = {}
    for row in report.tables["heads"].to_dict("records"):
        scores = " · ".join(f"{name.replace('_', ' ')} {row[name]:.2f}" for name in SCORES)
        added = wording.number(float(direct[row["layer"], row["head"]]), 2, sign=True)
        lines.setdefault(row["layer"], []).append(f"{scores} · direct effect {added} logits")
    return list(lines.values())


@dataclass(frozen=True)
class Bar:
    """One row of the attribution table and its step in the waterfall, in percent of the drawing's width."""

    name: str
    kind: str
    layer: int | None
    head: int | None
    logits: float
    share: float
    order: int
    """Place in the forward pass."""
    left: float
    width: float


@dataclass(frozen=True)
class Attribution:
    """Attribution made ready: bars by size, the map of heads and MLPs, and where 0 and the total stand."""

    bars: list[Bar]
    cells: list[list[Cell]]
    reach: float
    """Largest absolute cell of the map, where the colour is full."""
    unplaced: float
    """Sum of the components that are not in the map: embeddings and biases."""
    zero: float
    goal: float


def _attribution(table: pd.DataFrame) -> Attribution:
    table = table.assign(order=range(len(table)))
    table = table.iloc[np.argsort(-table.logits.abs().to_numpy(), kind="stable")]
    ends = table.logits.cumsum().to_numpy(dtype=float)
    starts = ends - table.logits.to_numpy(dtype=float)
    low, high = min(0.0, float(ends.min())), max(0.0, float(ends.max()))
    span = (high - low) or 1.0
    bars = [
        Bar(
            _component(row.component), row.kind, *(None if pd.isna(i) else int(i) for i in (row.layer, row.head)),
            float(row.logits), float(row.share), row.order,
            (min(start, end) - low) / span * 100, abs(end - start) / span * 100,
        )
        for row, start, end in zip(table.itertuples(), starts, ends, strict=True)
    ]  # fmt: skip
    placed = sorted((b for b in bars if b.kind in ("head", "mlp")), key=lambda bar: bar.order)
    reach = max((abs(bar.logits) for bar in placed), default=0.0) or 1.0
    cells: dict[int, list[Cell]] = {}
    for bar in placed:
        assert bar.layer is not None
        tip = f"{bar.name}\n{wording.number(bar.logits, 3, sign=True)} logits\n{_percent(bar.share)} of the total"
        cell = Cell(wording.number(bar.logits, 2, sign=True), bar.logits / reach, tip)
        cells.setdefault(bar.layer, []).append(cell)
    unplaced = sum(bar.logits for bar in bars if bar.kind not in ("head", "mlp"))
    return Attribution(bars, list(cells.values()), reach, unplaced, -low / span * 100, (ends[-1] - low) / span * 100)


def _moved(table: pd.DataFrame) -> list[list[list[float]]]:
    """Logits by layer, head and source position."""
    sizes = [1 + int(table[name].max()) for name in ("layer", "head", "source")]
    values: list[list[list[float]]] = table.logits.to_numpy(dtype=float).round(6).reshape(sizes).tolist()
    return values


def _component(label: str) -> str:
    """A component's label in words."""
    known = {"embed": "token embedding", "pos_embed": "position embedding", "final_bias": "final bias"}
    if label in known:
        return known[label]
    if label.startswith("L"):
        layer, head = label[1:].split("H")
        return f"head {layer}.{head}"
    layer, _, part = label.partition("_")
    return f"MLP {layer}" if part == "mlp_out" else f"attention bias {layer}"


def _percent(share: float) -> str:
    return f"{wording.number(100 * share, 1)} %"


def _lens(table: pd.DataFrame, report: Report) -> list[tuple[str, str, list[Cell]]]:
    """Name, site and cells of each depth, the embedding first."""
    depths = list(dict.fromkeys(table.depth))
    rows = []
    for i, depth in enumerate(depths):
        here = table[table.depth == depth]
        cells = [_lens_cell(group, report) for _, group in here.groupby("pos", sort=True)]
        name = "embedding" if i == 0 else f"after layer {i - 1}"
        rows.append(("output" if i == len(depths) - 1 else name, depth, cells))
    return rows


def _lens_cell(group: pd.DataFrame, report: Report) -> Cell:
    first = group.iloc[0]
    lines = [f"after {wording.visible(first.read_token)} (position {first.pos}), depth {first.depth}"]
    for row in group.head(5).itertuples():
        lines.append(f"{wording.probability(row.prob):>6}  {wording.visible(row.token)}")
    lines.append(f"entropy {first.entropy_nats:.2f} nats, KL(final ‖ depth) {first.kl_nats:.2f} nats")
    if first.next_rank >= 0:
        lines.append(f"the prompt's next token: rank {first.next_rank}, {wording.probability(first.next_prob)}")
    answer = wording.visible(report.contrast.answer)
    lines.append(f"the answer {answer}: rank {first.answer_rank}, {wording.probability(first.answer_prob)}")
    return Cell(wording.visible(first.token), float(first.prob), "\n".join(lines))


def _packed(weights: np.ndarray) -> Mapping[str, object]:
    """Attention weights in [0, 1] as base64 of unsigned integers, little-endian, the largest standing for 1."""
    kind = "<u2" if len(weights) <= COARSE else "u1"
    most = np.iinfo(kind).max
    stored = np.rint(np.clip(weights, 0, 1) * most).astype(kind)
    return {"bytes": stored.itemsize, "cells": base64.b64encode(stored.tobytes()).decode()}
