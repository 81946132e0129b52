"""What a pair of rows says, ready to be shown: next tokens, direct attribution, how patterns moved, one head from near.

Everything is a list, number or string; tokens are written so that nothing in them hides or reorders.
"""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.data.batch import Batch
from interp.model import sites
from interp.model.config import ModelConfig
from interp.model.edits import Edit, Resample
from interp.model.parts import Part
from interp.model.tap import Read, Trace
from interp.pages.wording import harmless, visible
from interp.passes.analysis import Analysis
from interp.residual.attribution import Folded, labels
from interp.residual.decomposition import IncompleteSumError, logit_direction
from interp.serve import directions
from interp.serve.asks import Continue, Look, Token
from interp.serve.changes import part_of, positions, said
from interp.serve.session import Pair, Seen, Session

TOP = 10
"""Next tokens and neurons listed."""


def look(session: Session, ask: Look, pair: Pair) -> dict[str, object]:
    """Everything that the page shows of one question."""
    rows = [pair.clean, pair.edited]
    logits = torch.stack([row.logits for row in rows]).cpu().double()
    probabilities = logits.softmax(-1)
    answer = _token(session, ask.answer, int(logits[0].argmax()))
    wrong = None if ask.wrong is None else _token(session, ask.wrong, 0)
    split = _attributed(session, pair, ask.edits, answer, wrong)
    if "cells" not in split:
        split["total"] = _rounded(logits[:, answer] - (0.0 if wrong is None else logits[:, wrong]))
    log = probabilities.clamp_min(torch.finfo(torch.float64).tiny).log()
    return {
        "tokens": names(session, pair.tokens),
        "second": None if pair.second is None else names(session, pair.second),
        "position": pair.position,
        "edits": [said(edit) for edit in ask.edits],
        "answer": {"id": answer, "token": name(session, answer)},
        "wrong": None if wrong is None else {"id": wrong, "token": name(session, wrong)},
        "next": _next(session, logits, probabilities),
        "kl": round(float((probabilities[0] * (log[0] - log[1])).sum()), 6),
        "steered": _steered(pair.random, log, answer),
        "attribution": split,
        "moved": _moved(session, *rows),
        "pattern": _pattern(session, ask, *rows),
        "neurons": _neurons(session, pair, ask, answer, wrong),
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


def _token(session: Session, token: Token | None, default: int) -> int:
    """The id that was asked for; ValueError for one outside the vocabulary, or text that is not one token."""
    return default if token is None else int(session.model.text.targets(token, 1)[0])


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


def _steered(
    random: Float[Tensor, "r v"] | None, log: Float[Tensor, "2 v"], answer: int
) -> dict[str, object] | None:
    """What the added directions do beside random ones of their length: the answer's probability, and KL from clean.

    For each measure: what it is clean, with the edits, and the least and the most with random directions.
    """
    if random is None:
        return None
    others = random.cpu().double().softmax(-1).clamp_min(torch.finfo(torch.float64).tiny).log()
    kl = (log[0].exp() * (log[0] - torch.cat((log, others)))).sum(-1)
    probability = torch.cat((log, others))[:, answer].exp()
    return {"random": len(random)} | {
        name: _rounded(torch.stack((value[0], value[1], value[2:].min(), value[2:].max())))
        for name, value in (("probability", probability), ("kl", kl))
    }


# --- direct attribution -----------------------------------------------------------------------------------------------


def _attributed(
    session: Session, pair: Pair, edits: Sequence[Edit], answer: int, wrong: int | None
) -> dict[str, object]:
    """Logits that each head and MLP adds at the position, `cells[run][layer]` (the MLP last); or why there are none."""
    analysis = session.attribution
    if isinstance(analysis, str):
        return {"why": analysis}
    last = _last(pair, edits)
    try:
        found = _sums(session, analysis, last, pair, answer, wrong)
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
        "total": _rounded(found["total"]),
    }


def _row(config: ModelConfig, layer: int) -> list[Part]:
    """The parts of a layer that the maps show."""
    heads = [Part("head", layer, head) for head in range(config.n_heads)]
    return heads if config.mlp is None else [*heads, Part("mlp", layer)]


def _sums(
    session: Session,
    analysis: Analysis,
    last: Mapping[str, Tensor],
    pair: Pair,
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
    return analysis.compute(Trace({read: answering(read) for read in analysis.reads}), batch, model)


def _last(pair: Pair, edits: Sequence[Edit]) -> dict[str, Tensor]:
    """What both runs held at the position, by site.

    A stream taken from the second prompt there is the sum of what that prompt's parts wrote up to its layer: theirs
    stand in. A direction that is added to the stream counts with the embeddings, as a part that is in no map.
    """
    found = {site: torch.cat((value, pair.edited.at[site])) for site, value in pair.clean.at.items()}
    patched = [edit for edit in edits if isinstance(edit.change, Resample)]
    here = [part_of(edit).layer or 0 for edit in patched if _covers(edit, "resid", pair)]
    since = max(here, default=0)
    if here and pair.donor is not None:
        for site in found:
            if _before(site, since):
                found[site] = torch.cat((pair.clean.at[site], pair.donor.at[site]))
    steering = directions.added(pair.edits, pair.position, len(pair.tokens), since)
    if steering is not None:
        site = next(site for site in found if site in sites.EMBEDDING_SITES)
        found[site] = found[site].clone()
        found[site][1] += steering.to(found[site])
    return found


def _covers(edit: Edit, kind: str, pair: Pair) -> bool:
    """Whether an edit of a part of this kind acts at the position looked at."""
    return part_of(edit).kind == kind and pair.position in positions(edit, len(pair.tokens))


def _before(site: str, layer: int) -> bool:
    """Whether a site is visited before this layer: in an earlier one, or among the embeddings."""
    if site.startswith("blocks."):
        return int(site.split(".")[1]) < layer
    return site in sites.EMBEDDING_SITES


# --- patterns and neurons ---------------------------------------------------------------------------------------------


def _moved(session: Session, clean: Seen, edited: Seen) -> list[list[float] | None]:
    """How much of each head's attention moved: half the L1 distance of its rows, mean over queries; None without."""
    found: list[list[float] | None] = [None] * session.config.n_layers
    for layer, before in clean.patterns.items():
        found[layer] = _rounded((edited.patterns[layer] - before).abs().sum(-1).mean(-1) / 2)
    return found


def _pattern(session: Session, ask: Look, clean: Seen, edited: Seen) -> dict[str, object] | None:
    """Both patterns of the head looked at: a row for each query, up to the query itself."""
    if ask.layer not in clean.patterns or ask.head >= session.config.n_heads:
        return None

    def rows(seen: Seen) -> list[list[float]]:
        pattern = _rounded(seen.patterns[ask.layer][ask.head], 4)
        return [row[: query + 1] for query, row in enumerate(pattern)]

    scored = ask.layer in session.renormalised
    return {
        "layer": ask.layer,
        "head": ask.head,
        "scored": scored,
        "clean": rows(clean),
        "edited": rows(edited),
    }


def _neurons(
    session: Session, pair: Pair, ask: Look, answer: int, wrong: int | None
) -> dict[str, object] | None:
    """The neurons of the layer looked at that add most to the answer in either run (or are most active).

    `edited` contributions are None where the MLP's whole output is edited at the position: it is not their sum then.
    """
    if not session.neurons or ask.layer >= session.config.n_layers:
        return None
    last = _last(pair, ask.edits)
    active = last[f"blocks.{ask.layer}.mlp.hook_post"].cpu().double()
    added = _added(session, last, ask.layer, answer, wrong)
    size = (active if added is None else added).abs().amax(0)
    chosen = size.topk(min(TOP, len(size))).indices.tolist()
    covered = any(part_of(edit).layer == ask.layer and _covers(edit, "mlp", pair) for edit in ask.edits)
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
    return {"layer": ask.layer, "rows": rows}


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
    wide = {site: value.to(torch.promote_types(value.dtype, torch.float32)) for site, value in last.items()}
    end = wide[sites.final_stream(model.config)]
    columns, _ = Folded(model, wide, direction.to(end)).block(layer, "neuron")
    return [column for column in columns if column.shape[1] == session.neurons][-1].cpu().double()


def _rounded(values: Tensor, digits: int = 6) -> list:  # type: ignore[type-arg]
    """Nested lists of numbers."""
    return values.cpu().double().round(decimals=digits).tolist()
