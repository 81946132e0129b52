"""Comparisons of a clean and an edited row, ready to be shown.

Next tokens, direct attribution, changes of patterns, and one head in detail.

Everything is a list, number or string; tokens are written so that nothing in them hides or reorders.
"""

import math
from collections.abc import Mapping, Sequence
from threading import Event
from typing import TypedDict

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.core.patterns import SCORES
from interp.core.stats import upcast
from interp.core.visible import harmless, visible
from interp.data.batch import Batch
from interp.model import sites
from interp.model.config import ModelConfig
from interp.model.edits import Edit, Resample
from interp.model.parts import Part
from interp.model.tap import Read, Trace
from interp.pages import views
from interp.pages.stages import HeadStages, factor_of
from interp.passes.question import Reading
from interp.residual.attribution import Folded, labels
from interp.residual.decomposition import IncompleteSumError, logit_direction
from interp.serve import directions
from interp.serve.asked import AskedTokens
from interp.serve.asks import PATTERN, Continue, EditedPrompt, Look
from interp.serve.changes import edit_text, part_of, positions
from interp.serve.session import LayerSeen, RandomRuns, RowPair, Seen, Session
from interp.views.lenses import depth_labels

TOP = 10
"""Next tokens and neurons listed."""
SHOWN = tuple(views.SCORES)
"""Scores of heads that the maps may show."""
RUNS = ("clean", "edited")
STAGES = ("products", "scaled", "scores", "pattern", "weighted")


class Near(TypedDict):
    """A part looked at from near: a head, or a layer's MLP."""

    part: str
    layer: int
    head: int


def tokens(session: Session, ask: EditedPrompt) -> dict[str, object]:
    """The tokens of both rows, before any pass."""
    return _rows(session, session.checked(ask))


def _rows(session: Session, asked: AskedTokens) -> dict[str, object]:
    """The tokens of both prompts with those of the answer after them, how many are the prompt's, and who says them."""
    return {
        "tokens": names(session, asked.row),
        "prompt_length": asked.end + 1,
        "roles": session.roles(asked.row),
        "second": None if asked.second is None else names(session, asked.second),
    }


def look(session: Session, ask: Look, pair: RowPair, stop: Event) -> dict[str, object]:
    """Everything that the page shows of one question."""
    rows = [pair.clean, pair.edited]
    logits = torch.stack([row.logits for row in rows]).cpu().double()
    probabilities = logits.softmax(-1)
    answer, wrong, notes = pair.asked.compared(session.model.text, int(logits[0].argmax()))
    split = _attributed(session, pair, ask.edits, answer, wrong)
    split["total"] = _rounded(logits[:, answer] - (0.0 if wrong is None else logits[:, wrong]))
    log = probabilities.clamp_min(torch.finfo(torch.float64).tiny).log()
    near = _near(session, ask, split)
    layers = [session.layer(row, near["layer"], stop) for row in pair.rows] if session.config.n_layers else []
    return {
        **_rows(session, pair.asked),
        "position": pair.position,
        "edits": [edit_text(edit) for edit in ask.edits],
        "answer": {"id": answer, "token": name(session, answer)},
        "wrong": None if wrong is None else {"id": wrong, "token": name(session, wrong)},
        "notes": list(notes),
        "whole": _whole(session, pair, stop),
        "next": _next(session, logits, probabilities),
        "kl": round(float((probabilities[0] * (log[0] - log[1])).sum()), 6),
        "attribution": split,
        "moved": _moved(session, session.moved(pair, stop)) if ask.moved else None,
        "scores": _scores(session, session.scores(pair, stop)) if ask.scores else None,
        "lens": _lens(session, rows, answer),
        "near": near,
        "pattern": _pattern(session, near, layers),
        "stages": _stages(session, near, layers, pair.position),
        "neurons": _neurons(session, pair, ask.edits, near["layer"], (answer, wrong), stop),
    }  # fmt: skip


def continuations(
    session: Session, ask: Continue, new: tuple[Sequence[int], Sequence[int]]
) -> dict[str, object]:
    """Both continuations as text, and how many of their first tokens agree."""
    decode = session.model.text.tokenizer.decode
    same = next((i for i, (a, b) in enumerate(zip(*new, strict=False)) if a != b), min(map(len, new)))
    return {
        "clean": harmless(decode(new[0])),
        "edited": harmless(decode(new[1])),
        "same": same,
        "tokens": [len(new[0]), len(new[1])],
        "greedy": ask.temperature == 0,
    }


def name(session: Session, token: int) -> str:
    """One token as the page writes it."""
    return visible(session.model.text.pieces([token])[0])


def names(session: Session, tokens: Int[Tensor, "p"]) -> list[str]:
    """Tokens as the page writes them."""
    return [visible(piece) for piece in session.model.text.pieces(tokens)]


def _whole(session: Session, pair: RowPair, stop: Event) -> dict[str, object] | None:
    """log p of an answer of several tokens in both runs, by token and summed, in nats; None for one token."""
    if not pair.asked.forced:
        return None
    log_probs = session.answer_log_probs(pair, stop)
    return {
        "ids": list(pair.asked.answer),
        "tokens": [name(session, token) for token in pair.asked.answer],
        "log_probs": _rounded(log_probs),
        "log_prob": _rounded(log_probs.sum(-1)),
        "probability": log_probs.sum(-1).exp().tolist(),
    }


def _next(
    session: Session, logits: Float[Tensor, "2 v"], probabilities: Float[Tensor, "2 v"]
) -> list[dict[str, object]]:
    """The most probable tokens of either run, most probable first."""
    count = min(TOP, logits.shape[1])
    both = probabilities.topk(count).indices.flatten().unique()
    order = both[probabilities[:, both].amax(0).argsort(descending=True, stable=True)]
    return [
        {
            "id": token,
            "token": name(session, token),
            "clean": round(float(probabilities[0, token]), 6),
            "edited": round(float(probabilities[1, token]), 6),
            "logits": _rounded(logits[:, token]),
        }
        for token in order[:TOP].tolist()
    ]


def steered(session: Session, pair: RowPair, random: RandomRuns, stop: Event) -> dict[str, object]:
    """Effects of the added directions next to random ones: the answer's probability, and KL from clean.

    For each measure: what it is clean, with the edits, and the least and the most with random directions. The
    probability of an answer of several tokens is that of all of them, KL that of the token after the position.
    """
    logits = torch.stack([pair.clean.logits, pair.edited.logits, *random.logits]).cpu().double()
    log = logits.softmax(-1).clamp_min(torch.finfo(torch.float64).tiny).log()
    kl = (log[0].exp() * (log[0] - log)).sum(-1)
    if random.log_prob is None:
        answer = pair.asked.compared(session.model.text, int(logits[0].argmax())).answer
        probability = _rounded(_beside(log[:, answer].exp()))
    else:  # as it is: it is often small
        whole = torch.cat((session.answer_log_probs(pair, stop).sum(-1), random.log_prob))
        probability = _beside(whole.exp()).tolist()
    return {"random": len(random.logits), "probability": probability, "kl": _rounded(_beside(kl))}


def _beside(values: Float[Tensor, "r"]) -> Float[Tensor, "4"]:
    """Values clean and edited, and the least and the most of the random ones after them."""
    return torch.stack((values[0], values[1], values[2:].min(), values[2:].max()))


# --- direct attribution -----------------------------------------------------------------------------------------------


def _attributed(
    session: Session, pair: RowPair, edits: Sequence[Edit], answer: int, wrong: int | None
) -> dict[str, object]:
    """Logits that each head and MLP adds at the position, `cells[run][layer]` (the MLP last); or why there are none."""
    reading = session.attribution
    if isinstance(reading, str):
        return {"why": reading}
    last = _last(_at_position(pair), pair, edits)
    try:
        found = _sums(session, reading, last, pair, answer, wrong)
    except IncompleteSumError as cause:
        return {"why": str(cause)}
    config = session.config
    index = {label: i for i, label in enumerate(labels(config, "head"))}
    rows = [[index[str(part)] for part in _row(config, layer)] for layer in range(config.n_layers)]
    values = found["logits"]
    placed = [column for row in rows for column in row]
    return {
        "cells": [[_rounded(run[row]) for row in rows] for run in values],
        "rest": _rounded(values.sum(1) - values[:, placed].sum(1)),
        "uncapped": None if config.logit_softcap is None else _rounded(found["total"]),
    }


def _row(config: ModelConfig, layer: int) -> list[Part]:
    """The parts of a layer that the maps show."""
    heads = [Part("head", layer, head) for head in range(config.n_heads)]
    return heads if config.mlp is None else [*heads, Part("mlp", layer)]


def _sums(
    session: Session,
    reading: Reading,
    last: Mapping[str, Tensor],
    pair: RowPair,
    answer: int,
    wrong: int | None,
) -> Mapping[str, Tensor]:
    """The components of both runs; IncompleteSumError if they do not sum to the logit."""
    model = session.model.transformer

    def answering(read: Read) -> Tensor:
        value = last[read.site]
        return value if read.via is None else read.via(value[:, None])

    prompt = pair.tokens[: pair.position + 1].expand(2, -1).to(model.device)
    foils = None if wrong is None else torch.tensor([wrong] * 2, device=model.device)
    batch = Batch(prompt.clone()).with_answers(torch.tensor([answer] * 2, device=model.device), foils)
    return reading.compute(Trace({read: answering(read) for read in reading.reads}), batch, model)


AtPosition = Sequence[Mapping[str, Float[Tensor, "1 ..."]] | None]
"""Values at the position looked at, by site: of the clean run, the edited one, and the second prompt's if any."""


def _at_position(pair: RowPair) -> AtPosition:
    return [pair.clean.at, pair.edited.at, None if pair.donor is None else pair.donor.at]


def _last(at: AtPosition, pair: RowPair, edits: Sequence[Edit]) -> dict[str, Tensor]:
    """The values of both runs at the position, by site.

    A stream taken from the second prompt there is the sum of what that prompt's parts wrote up to its layer: theirs
    stand in. A direction that is added to the stream counts with the embeddings, as a part that is in no map.
    """
    clean, edited, donor = at
    assert clean is not None and edited is not None
    found = {site: torch.cat((value, edited[site])) for site, value in clean.items()}
    patched = [edit for edit in edits if isinstance(edit.change, Resample)]
    patched_layers = [part_of(edit).layer or 0 for edit in patched if _covers(edit, "resid", pair)]
    since = max(patched_layers, default=0)
    if patched_layers and donor is not None:
        for site in found:
            if _before(site, since):
                found[site] = torch.cat((clean[site], donor[site]))
    steering = directions.added(pair.edits, pair.position, len(pair.tokens), since)
    for site, vector in steering.items():
        _move(found, next(each for each in found if each in sites.EMBEDDING_SITES), vector)
        if site.endswith("_out"):  # which then is what its heads or neurons wrote
            _move(found, site, -vector)
    return found


def _move(found: dict[str, Tensor], site: str, by: Float[Tensor, "d"]) -> None:
    """Add to the edited run's value at a site."""
    if site in found:
        found[site] = found[site].clone()
        found[site][1] += by.to(found[site])


def _covers(edit: Edit, kind: str, pair: RowPair) -> bool:
    """Whether an edit of a part of this kind acts at the position looked at."""
    return part_of(edit).kind == kind and pair.position in positions(edit, len(pair.tokens))


def _before(site: str, layer: int) -> bool:
    """Whether a site is visited before this layer: in an earlier one, or among the embeddings."""
    if site.startswith("blocks."):
        return int(site.split(".")[1]) < layer
    return site in sites.EMBEDDING_SITES


# --- patterns and neurons ---------------------------------------------------------------------------------------------


def _moved(session: Session, moved: Mapping[int, Float[Tensor, "h"]]) -> list[list[float] | None]:
    """How much of each head's attention moved, as a list for each layer; None where there is none."""
    layers = range(session.config.n_layers)
    return [_rounded(moved[layer]) if layer in moved else None for layer in layers]


def _near(session: Session, ask: Look, split: Mapping[str, object]) -> Near:
    """The part shown in detail: the one requested, else the head or MLP with the largest logits in the clean run.

    A model without attribution begins at the first head.
    """
    if ask.layer is not None:
        return {"part": "head", "layer": ask.layer, "head": ask.head}
    cells = split.get("cells")
    if not isinstance(cells, list):
        return {"part": "head", "layer": 0, "head": 0}
    parts = [(abs(value), layer, i) for layer, row in enumerate(cells[0]) for i, value in enumerate(row)]
    _, layer, column = max(parts, key=lambda part: part[0], default=(0.0, 0, 0))
    head = column < session.config.n_heads
    return {"part": "head" if head else "mlp", "layer": layer, "head": column if head else 0}


def _scores(
    session: Session, scores: Mapping[int, Float[Tensor, "2 h s"]]
) -> dict[str, list[list[list[float | None]] | None]]:
    """Scores of each head on this prompt: by score, both runs' values of every layer that has patterns.

    The scores of `interp.heads`, on the prompt itself: null where no token says anything (no token that repeats).
    """
    found: dict[str, list[list[list[float | None]] | None]] = {name: [] for name in SHOWN}
    for layer in range(session.config.n_layers):
        runs = _rounded(scores[layer], 4) if layer in scores else None
        for i, name in enumerate(SCORES):
            if name in found:
                of_heads = (
                    None if runs is None else [_none_for_nan([head[i] for head in run]) for run in runs]
                )
                found[name].append(of_heads)
    return found


def _none_for_nan(values: Sequence[float]) -> list[float | None]:
    return [None if math.isnan(x) else x for x in values]


def _lens(session: Session, rows: Sequence[Seen], answer: int) -> list[dict[str, object]]:
    """The lens at every state of the stream at the position: its first token and the answer, in both runs."""
    names, model = session.streams, session.model.transformer
    states = torch.cat([torch.cat([row.at[name] for name in names]) for row in rows])
    with torch.no_grad():
        probabilities = model.read_out(upcast(states)).double().softmax(-1).cpu()
    best = probabilities.max(-1)
    runs = [
        [
            {
                "token": name(session, int(best.indices[i])),
                "top": round(float(best.values[i]), 6),
                "answer": round(float(probabilities[i, answer]), 6),
            }
            for i in range(run * len(names), (run + 1) * len(names))
        ]
        for run in (0, 1)
    ]
    return [{"depth": depth, "runs": pair} for depth, *pair in zip(depth_labels(names), *runs, strict=True)]


def _stages(
    session: Session, near: Near, layers: Sequence[LayerSeen], position: int
) -> dict[str, object] | None:
    """The head looked at from q . k to its weighted values, at the position looked at, in both runs; None without."""
    layer, head = near["layer"], near["head"]
    if layer not in session.staged or head >= session.config.n_heads:
        return None
    found: dict[str, object] = {"layer": layer, "head": head, "query": position}
    one = slice(position, position + 1)
    for run, row in zip(RUNS, layers, strict=True):
        q, k, v, scores = (row.values[site] for site in session.staged[layer])
        q, scores = q[one], scores[:, one]
        pattern = row.values[f"blocks.{layer}.{PATTERN}"][:, one]
        factor = factor_of(session.model.transformer, layer, scores)
        stages = HeadStages.of((q, k, v), scores, pattern, factor)
        values = {name: _rounded(getattr(stages, name)[head, 0]) for name in STAGES}
        values["scores"] = [None if x == -math.inf else x for x in values["scores"]]
        found[run] = {"factor": float(factor[0]), **values}
    return found


def _pattern(session: Session, near: Near, layers: Sequence[LayerSeen]) -> dict[str, object] | None:
    """Both patterns of the head looked at: float32 as base64, row after row, each up to the query itself."""
    layer, head = near["layer"], near["head"]
    if layer not in session.with_patterns or head >= session.config.n_heads:
        return None
    found: dict[str, object] = {"layer": layer, "head": head, "scored": layer in session.renormalised}
    for run, row in zip(RUNS, layers, strict=True):
        pattern = row.values[f"blocks.{layer}.{PATTERN}"][head].float().cpu()
        found[run] = views.packed(pattern.numpy()[np.tril_indices(len(pattern))].astype("<f4"))
    return found


def _neurons(
    session: Session,
    pair: RowPair,
    edits: Sequence[Edit],
    layer: int,
    tokens: tuple[int, int | None],
    stop: Event,
) -> dict[str, object] | None:
    """The neurons of the layer looked at that add most to the answer in either run (or are most active).

    `edited` contributions are None where the MLP's whole output is edited at the position: it is not their sum then.
    """
    if not session.neurons or layer >= session.config.n_layers:
        return None
    three = [pair.clean, pair.edited, pair.donor]
    near = [
        None if seen is None else session.layer(seen.row, layer, stop).at(seen.position) for seen in three
    ]
    at = [
        None if more is None or seen is None else {**seen.at, **more}
        for seen, more in zip(three, near, strict=True)
    ]
    last = _last(at, pair, edits)
    active = last[f"blocks.{layer}.mlp.hook_post"].cpu().double()
    added = _added(session, last, layer, *tokens)
    size = (active if added is None else added).abs().amax(0)
    chosen = size.topk(min(TOP, len(size))).indices.tolist()
    covered = any(part_of(edit).layer == layer and _covers(edit, "mlp", pair) for edit in edits)
    rows: list[dict[str, object]] = []
    for neuron in chosen:
        direct: list[float | None] = [None, None] if added is None else [*_rounded(added[:, neuron])]
        rows.append(
            {
                "neuron": neuron,
                "active": _rounded(active[:, neuron]),
                "added": [direct[0], None if covered else direct[1]],
            }
        )
    return {"layer": layer, "rows": rows}


def _added(
    session: Session, last: Mapping[str, Tensor], layer: int, answer: int, wrong: int | None
) -> Float[Tensor, "2 m"] | None:
    """Logits that each neuron of a layer's (last) MLP adds directly; None where logits are not linear in the stream."""
    if isinstance(session.attribution, str):
        return None
    model = session.model.transformer
    ids = torch.tensor([answer] * 2, device=model.device)
    foils = None if wrong is None else torch.full_like(ids, wrong)
    direction, _ = logit_direction(model, ids, foils)
    widened = {site: upcast(value) for site, value in last.items()}
    end = widened[sites.final_stream(model.config)]
    columns, _ = Folded(model, widened, direction.to(end)).block(layer, "neuron")
    return [column for column in columns if column.shape[1] == session.neurons][-1].cpu().double()


def _rounded(values: Tensor, digits: int = 6) -> list:  # type: ignore[type-arg]
    """Nested lists of numbers."""
    return values.cpu().double().round(decimals=digits).tolist()
