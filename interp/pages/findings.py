"""Findings of a report, at most five sentences made from its tables by rules; each names the section that proves it.

A rule looks at the tables of one report and says one sentence or nothing. The rules stand in the order of what a reader
asks: what the model answers, what writes it, what brings it about, where it travels, how few edges carry it. Where two
ways of measuring disagree the sentence comes with a word of doubt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from interp.core.boundary import public
from interp.model.parts import Part
from interp.pages.view_lens import depth_in_words
from interp.pages.wording import count, number, probability, visible

if TYPE_CHECKING:
    import pandas as pd

    from interp.pages.report import Report, TokenContrast

MOST = 5
"""Sentences of a page."""
ENOUGH = 0.9
"""Share of the difference between the prompts that a circuit has to carry, in `findings` and on the page."""
HALF = 0.5
"""From here on a share, or an attention weight, is called most of it."""
AMPLE = 0.8
"""A part that brings back this share, and without which this share is left, is enough and not needed."""
LITTLE = 0.2
"""Below this share no single part is named as what brings the answer about."""
MORE = 1.1
"""Above this share more than all of the difference came back."""
FEW_LAYERS = 8
"""Up to here the MLP of layer 0 is a layer as any other; of more layers it extends the embedding."""
NAMED = 3
"""Changed tokens of a corrupted prompt that a sentence names."""


@dataclass(frozen=True)
class Finding:
    """One sentence about what the analyses found."""

    words: str
    section: str
    """The section of the page that proves it: the name after `#` in its address."""
    doubt: str = ""
    """Evidence against the finding; empty where the ways of measuring agree."""

    def __str__(self) -> str:
        return f"{self.words} {self.doubt}".strip()


@public()
def findings(report: Report) -> tuple[Finding, ...]:
    """The findings of the report, the most important first; nothing for a model without logits."""
    if report.contrast is None:
        return ()
    found = (rule(report, report.contrast) for rule in RULES)
    return tuple(one for one in found if one is not None)[:MOST]


def in_words(part: str) -> str:
    """The name of a part in a sentence.

    Example:
        >>> in_words("L3H5"), in_words("L0.mlp"), in_words("embed")
        ('head L3H5', 'the MLP of layer 0', 'the token embedding')
    """
    outside = {
        "embed": "the token embedding", "pos_embed": "the position embedding", "type_embed": "the type embedding",
        "embed_bias": "the bias of the embeddings' norm", "final_bias": "the bias of norm and unembedding",
        "rounding": "what the pass rounded off",
        "L0.resid": "the embedding", "logits": "the logits",
    }  # fmt: skip
    if part in outside:
        return outside[part]
    one = Part.of(part)
    named = {
        "head": f"head {part}", "mlp": f"the MLP of layer {one.layer}", "attn": f"the attention of layer {one.layer}",
        "mlp_before": f"the first MLP of layer {one.layer}", "attn_bias": f"the attention's bias of layer {one.layer}",
    }  # fmt: skip
    return named.get(one.kind, part)


def _started(words: str) -> str:
    """The sentence with a capital letter."""
    return words[0].upper() + words[1:]


def _quoted(token: str) -> str:
    return f"“{visible(token)}”"


def _at(token: str, pos: int) -> str:
    """A token of the prompt and where it stands."""
    return f"{_quoted(token)} (position {pos})"


def _favoured(contrast: TokenContrast) -> tuple[str, float]:
    """The token of the two that the model prefers, and the sign that the total has for it."""
    if contrast.wrong is not None and contrast.total < 0:
        return contrast.wrong.token, -1.0
    return contrast.answer.token, 1.0


def _answer(report: Report, contrast: TokenContrast) -> Finding:
    """Whether the model gives the answer, and by how much."""
    answer, wrong = contrast.answer, contrast.wrong
    word = _quoted(answer.token)
    where = f"(probability {probability(answer.prob)}, rank {answer.rank + 1})"
    if wrong is not None and contrast.total < 0:
        preferred = f"it prefers {_quoted(wrong.token)}, {_by(-contrast.total)} ahead"
        words = f"The model does not answer {word} {where}: {preferred}."
        return Finding(words, "question", _unanswered(report, contrast))
    table = report.tables["next_tokens"]
    first = table[(table.pos == table.pos.max()) & (table["rank"] == 0)].iloc[0]
    ahead = "" if wrong is None else f", {_by(contrast.total)} ahead of {_quoted(wrong.token)}"
    if answer.rank == 0:
        return Finding(f"The model answers {word} {where}{ahead}.", "question")
    instead = f"It would say {_quoted(first.token)} ({probability(float(first.prob))}) instead."
    doubt = f"{instead} {_unanswered(report, contrast)}".strip()
    return Finding(f"The answer {word} is not the model's first choice {where}{ahead}.", "question", doubt)


def _unanswered(report: Report, contrast: TokenContrast) -> str:
    """The quantity in sentences about two prompts, where the model does not give the answer to the first."""
    if report.corrupted is None:
        return ""
    apart = number(contrast.total - report.corrupted.total, 2, sign=True)
    return f"What is said below of the difference between the prompts is about {apart} logits, not about an answer."


def _by(logits: float) -> str:
    return f"{number(logits, 2)} logits"


def _writer(report: Report, contrast: TokenContrast) -> Finding | None:
    """The part that adds most to the logits by itself; in doubt where the model does as well without it."""
    token, sign = _favoured(contrast)
    parts = report.tables.get("attribution")
    if parts is None:
        return None
    best = _largest(parts, sign * parts.value)
    direct = sign * float(best.value)
    if direct <= 0:
        return None
    without = _effects(report, best.part)
    lost = without.get("zero")
    added = f"{number(direct, 2, sign=True)} logits directly"
    cost = "" if lost is None else f", {number(sign * lost, 2, sign=True)} without it"
    copied = _copied(report, best.part, token, sign)
    does = (
        f"copies {_at(token, copied)} to the end"
        if copied is not None
        else f"adds most to {_quoted(token)} by itself"
    )
    words = f"{_started(in_words(best.part))} {does}: {added}{cost}."
    return Finding(words, "attribution", _stands_alone(direct, without, sign))


def _largest(table: pd.DataFrame, by: pd.Series[float]) -> pd.Series:
    """The row at which this is largest."""
    return table.iloc[int(by.to_numpy().argmax())]


def _effects(report: Report, part: str) -> dict[str, float]:
    """Total effects of replacing a part, by the kind of replacement."""
    table = report.tables.get("ablation")
    if table is None:
        return {}
    rows = table[(table.part == part) & table.changed]
    return dict(zip(rows.change, rows.value.astype(float), strict=True))


def _stands_alone(direct: float, without: dict[str, float], sign: float) -> str:
    """The doubt about a part that the answer does not need as much as it says it."""
    if "zero" not in without:
        return ""
    lost = -sign * without["zero"]
    if lost <= 0:
        return "But the answer does not suffer when it is silenced: other parts stand in for it, or undo it."
    if lost < HALF * direct:
        return "But less than half of that is lost when it is silenced: other parts stand in for it."
    other = -sign * without.get("resample", -sign * lost)
    if other < LITTLE * lost:
        return (
            f"But with its output for the corrupted prompt in its place the change is {number(-other, 2, sign=True)}: "
            "what it writes here it writes there too."
        )
    return ""


def _copied(report: Report, part: str, token: str, sign: float) -> int | None:
    """Where a head reads the token that it writes, if most of what it adds comes from that token; None if not."""
    table = report.tables.get("attribution_sources")
    if table is None:
        return None
    rows = table[table.part == part]
    same = rows[rows.source_token == token]
    if same.empty or not sign * same.value.sum() >= HALF * sign * rows.value.sum():
        return None
    return int(_largest(same, sign * same.value).source)


def _induction(report: Report, contrast: TokenContrast) -> Finding | None:
    """The induction head that looks at what followed the last token before, if there is one and it was there before."""
    heads, seen = report.tables.get("heads"), report.tables["tokens"]
    if heads is None or "attention" not in report.tables:
        return None
    named = set(heads.part[heads.is_induction_head])
    last = seen.iloc[-1]
    after = 1 + seen.pos[:-1][(seen.token_id[:-1] == last.token_id).to_numpy()]
    looks = report.tables["attention"]
    looks = looks[(looks["query"] == last.pos) & looks.key.isin(after) & looks.part.isin(named)]
    mass = looks.groupby("part").value.sum()
    if mass.empty or mass.max() < HALF:
        return None
    part = str(mass.idxmax())
    looks = looks[looks.part == part]
    key = int(_largest(looks, looks.value).key)
    word = str(seen.token.iloc[key])
    so = ", the answer" if word == contrast.answer.token else ""
    words = (
        f"Head {part} is an induction head: the last token {_quoted(last.token)} was there before, and the head looks "
        f"({number(float(mass.max()), 2)}) at what followed it, {_at(word, key)}{so}."
    )
    doubt = "" if so else "But that is not the answer."
    return Finding(words, "attention", doubt)


def _cause(report: Report, contrast: TokenContrast) -> Finding | None:
    """The head or MLP that brings most of the answer back by itself; in doubt where the answer survives its loss."""
    table = report.tables.get("patching")
    if table is None:
        return None
    parts = table[
        table.site.isin(("z", "mlp_out", "mlp_before_out")) & table.changed & ~_of_embedding(report)
    ]
    sides = {
        name: rows.set_index(["site", "part", "pos"], drop=False) for name, rows in parts.groupby("direction")
    }
    if "denoise" not in sides:
        return None
    back = sides["denoise"].sort_values("normalised", ascending=False, kind="stable")
    best, share = back.iloc[0], float(back.normalised.iloc[0])
    name = _cell_in_words(best)
    if share < LITTLE:
        words = (
            f"No single head or MLP brings the difference back: the most is {number(share, 2)}, by {name}."
        )
        return Finding(words, "patching", "Several have to act together.")
    brings = (
        f"brings {number(share, 2)} of the difference back when it alone is put into the corrupted prompt"
    )
    words = f"{_started(name)} {brings}."
    left = sides["noise"].normalised.reindex(back.index) if "noise" in sides else back.normalised * 0
    spare = back.index[(back.normalised >= AMPLE) & (left >= AMPLE)]
    if (site := _early_site(back, left, best)) is not None:
        early = f"{_started(_cell_in_words(site))} writes early what the answer needs: alone in the corrupted prompt it"
        back_early = number(float(site.normalised), 2)
        words = f"{early} brings {back_early} of the difference back, {name} later {number(share, 2)}."
    if not len(spare):
        return Finding(words, "patching", _more_than_all(share))
    names = [_cell_in_words(back.loc[index]) for index in spare]
    several = f"{_listed(names)} {'is' if len(names) == 1 else 'are each'} enough and"
    doubt = f"But {several} not needed: at least {number(float(left[spare].min()), 2)} is left without it."
    return Finding(words, "patching", doubt)


def _of_embedding(report: Report) -> pd.Series[bool]:
    """The patches of layer 0's MLP at the tokens that differ, in a deep model.

    There it is a part of the embedding ("effective embedding": McDougall et al. 2023, arXiv:2310.04625): to
    put it back is to put the token back, which brings the answer back and says nothing about the model.
    """
    table = report.tables["patching"]
    changed = [] if report.corrupted is None else [pos for pos, *_ in report.corrupted.changes]
    first = (table.layer == 0) & (table.site != "z") & table.pos.isin(changed)
    return first.fillna(False).astype(bool) & (report.config.n_layers > FEW_LAYERS)


def _early_site(back: pd.DataFrame, left: pd.Series[float], best: pd.Series) -> pd.Series | None:
    """The MLP before the last token that is enough and needed, in the first layer below that of the best part; or None.

    Args:
        back: every part put into the corrupted prompt.
        left: what is left of the answer without it. This is what causal tracing calls the early site (Meng et al.
            2022); the best part then reads what it wrote.
    """
    early = (back.site != "z") & (back.layer < best.layer) & (back.pos < back.pos.max())
    rows = back[early.fillna(False) & (back.normalised >= AMPLE) & (left <= LITTLE)]
    return None if rows.empty else rows.sort_values("layer", kind="stable").iloc[0]


def _cell_in_words(cell: pd.Series) -> str:
    """A patched head, or the MLP that writes a patched cell and where that is."""
    if cell.site == "z":
        return in_words(cell.part)
    mlp = Part("mlp" if cell.site == "mlp_out" else "mlp_before", Part.of(cell.part).layer)
    return f"{in_words(str(mlp))} at {_at(cell.token or '', int(cell.pos))}"


def _listed(names: Sequence[str]) -> str:
    """Names in a row, the last after "and"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _more_than_all(share: float) -> str:
    """The doubt about a share above 1."""
    return "That is more than all of it: what is left out holds the answer back." if share > MORE else ""


def _route(report: Report, contrast: TokenContrast) -> Finding | None:
    """The finding about the first layer from which on the last token has the difference between the prompts."""
    table = report.tables.get("patching")
    if table is None or report.corrupted is None:
        return None
    tokens = report.tables["tokens"].token.tolist()
    stream = table[(table.site == "resid_pre") & (table.direction == "denoise")].sort_values(["layer", "pos"])
    share = stream.normalised.fillna(0.0).to_numpy().reshape(-1, len(tokens))
    places = [(pos, token) for pos, token, _ in report.corrupted.changes]
    if places[-1][0] == len(tokens) - 1:
        return None
    more = [f"{len(places) - NAMED} more tokens"] if len(places) > NAMED + 1 else []
    start = _listed([_at(token, pos) for pos, token in (places[:NAMED] if more else places)] + more)
    above_half = [layer for layer in range(len(share)) if (share[layer:, -1] >= HALF).all()]
    words = f"What differs starts at {start}"
    if not above_half:
        return Finding(f"{words}; only the last layer brings most of it to the last token.", "patching")
    words += f" and is at the last token from layer {above_half[0]} on"
    elsewhere = np.ones(len(tokens), dtype=bool)
    elsewhere[[-1, *(pos for pos, _ in places)]] = False
    between = np.where(elsewhere, share[: above_half[0]], 0.0)
    if between.size and between.max() >= HALF:
        layer, pos = divmod(int(between.argmax()), len(tokens))
        words += f", by way of {_at(tokens[pos], pos)} in layer {layer}"
    return Finding(f"{words} (at least half of the effect, patching one state at a time).", "patching")


def _needed(report: Report, contrast: TokenContrast) -> Finding | None:
    """The finding without a corrupted prompt: the part that costs the answer most when it is silenced."""
    table = report.tables.get("ablation")
    if report.corrupted is not None or table is None:
        return None
    token, sign = _favoured(contrast)
    table = table[(table.change == "zero") & table.changed]
    if table.empty or (sign * table.value).min() >= 0:
        return None
    worst, parts = _largest(table, -sign * table.value), report.tables["attribution"]
    if worst.part == _largest(parts, sign * parts.value).part:
        return None  # said of the writer already
    words = (
        f"{_quoted(token)} suffers most without {in_words(worst.part)}: "
        f"{number(sign * float(worst.value), 2, sign=True)} logits when its output is set to zero."
    )
    return Finding(
        words, "ablation", "Zero is a state the model never saw; a corrupted prompt gives a fairer test."
    )


def _circuit(report: Report, contrast: TokenContrast) -> Finding | None:
    """How few of the strongest edges carry the difference between the prompts."""
    table = report.tables.get("faithfulness")
    if table is None:
        return None
    size = enough(table)
    share = float(table.value[table.edges == size].iloc[0])
    total = int(table.edges.max())
    words = f"The strongest {count(size)} of {count(total)} edges carry {number(share, 2)} of the difference."
    doubt = "No smaller selection of the strongest does." if size == total else _more_than_all(share)
    return Finding(words, "circuit", doubt)


def enough(table: pd.DataFrame) -> int:
    """The smallest number of edges of the faithfulness table from which on, up to all, at least `ENOUGH` is carried."""
    short = table.edges[table.value < ENOUGH]
    return int(table.edges[table.edges > (short.max() if len(short) else 0)].min())


def _lens(report: Report, contrast: TokenContrast) -> Finding | None:
    """From which depth on the logit lens reads the answer at the last token."""
    table = report.tables.get("logit_lens")
    if table is None:
        return None
    rows = table[(table.pos == table.pos.max()) & (table["rank"] == 0)]
    ranks: Sequence[int] = rows.answer_rank.tolist()
    if ranks[-1] != 0:
        return None
    first = max((i + 1 for i, rank in enumerate(ranks) if rank != 0), default=0)
    word = _quoted(contrast.answer.token)
    if first == len(ranks) - 1:
        return Finding(f"The logit lens reads {word} at the last token only at the end.", "lens")
    depth = depth_in_words(str(rows.depth.iloc[first]))
    since = depth if depth == "embedding" else f"end of {depth.removeprefix('after ')}"
    return Finding(f"The logit lens reads {word} at the last token from the {since} on.", "lens")


RULES: Sequence[Callable[[Report, TokenContrast], Finding | None]] = (
    _answer, _writer, _induction, _cause, _route, _needed, _circuit, _lens,
)  # fmt: skip
"""In the order of the page."""
