"""Findings of a report, at most six sentences made from its tables by rules; each names the section that proves it.

A rule looks at the tables of one report and says one sentence or nothing. The rules stand in the order of what a reader
asks: what the model answers, what writes it, what brings it about, where it travels, how few edges carry it. Where two
ways of measuring disagree the sentence comes with a word of doubt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from interp.core.boundary import public
from interp.core.visible import visible
from interp.model.parts import Part
from interp.views.lenses import depth_labels
from interp.views.writing import count, number, probability

if TYPE_CHECKING:
    import pandas as pd

    from interp.pages.report import Report, TokenContrast

MOST = 6
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
class PageCell:
    """A cell of a map on the page."""

    view: str
    """The map's name on the page, such as "attribution" or "patching denoise z"."""
    row: int
    """The layer; on the map of the logit lens the depth, from 0."""
    column: int
    """The head, an MLP after all heads, or the token's position."""


@dataclass(frozen=True)
class Finding:
    """One sentence about what the analyses found."""

    words: str
    section: str
    """The section of the page that proves it: the name after `#` in its address."""
    doubt: str = ""
    """Evidence against the finding; empty where the ways of measuring agree."""
    places: tuple[PageCell, ...] = ()
    """The cells that the sentence speaks of, the first one first; none for sentences about no map."""

    def __str__(self) -> str:
        return f"{self.words} {self.doubt}".strip()


@public()
def findings(report: Report) -> tuple[Finding, ...]:
    """The findings of the report, the most important first; nothing for a model without logits."""
    if report.contrast is None:
        return ()
    evidence = _Evidence(report, report.contrast)
    found = (rule(evidence) for rule in RULES)
    return tuple(one for one in found if one is not None)[:MOST]


@dataclass(frozen=True, eq=False)
class _Evidence:
    """A report of a model with logits, and what several rules look up in it."""

    report: Report
    contrast: TokenContrast

    @property
    def sign(self) -> float:
        """The sign that the total has for the token which the model prefers."""
        return -1.0 if self.contrast.wrong is not None and self.contrast.total < 0 else 1.0

    @property
    def favoured(self) -> str:
        """The token of the two that the model prefers."""
        wrong = self.contrast.wrong
        return self.contrast.answer.token if wrong is None or self.sign > 0 else wrong.token

    @cached_property
    def writer(self) -> pd.Series | None:
        """The row of the part that adds most to the favoured token's logit; None if nothing adds to it."""
        parts = self.report.tables.get("attribution")
        if parts is None:
            return None
        best = _largest(parts, self.sign * parts.value)
        return best if self.sign * best.value > 0 else None

    @cached_property
    def restored(self) -> pd.DataFrame | None:
        """Heads and MLPs put into the corrupted prompt one by one, those that bring most back first; None without."""
        return self._patched("denoise")

    @cached_property
    def corrupted(self) -> pd.DataFrame | None:
        """Heads and MLPs of the corrupted prompt put into the prompt one by one; None without."""
        return self._patched("noise")

    def _patched(self, direction: str) -> pd.DataFrame | None:
        table = self.report.tables.get("patching")
        if table is None:
            return None
        of_parts = table.site.isin(("z", "mlp_out", "mlp_before_out")) & ~_of_embedding(self.report)
        rows = table[of_parts & table.changed & (table.direction == direction)]
        rows = rows.sort_values("normalised", ascending=False, kind="stable")
        return None if rows.empty else rows.set_index(["site", "part", "pos"], drop=False)


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


def _answer(evidence: _Evidence) -> Finding:
    """Whether the model gives the answer, and by how much."""
    report, contrast = evidence.report, evidence.contrast
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


def _writer(evidence: _Evidence) -> Finding | None:
    """The part that adds most to the logits by itself; in doubt where the model does as well without it."""
    report, token, sign, best = evidence.report, evidence.favoured, evidence.sign, evidence.writer
    if best is None:
        return None
    direct = sign * float(best.value)
    without = _effects(report, best.part)
    lost = without.get("zero")
    added = f"{number(direct, 2, sign=True)} logits directly"
    cost = "" if lost is None else f", {number(sign * lost, 2, sign=True)} without it"
    read = _read_from(report, best.part, sign)
    does = f"adds most to {_quoted(token)} by itself"
    if read is not None and read[0] == token:
        does = f"copies {_at(*read)} to the end"
    elif read is not None:
        does += f", by what it reads at {_at(*read)}"
    words = f"{_started(in_words(best.part))} {does}: {added}{cost}."
    places = _of_part(report, "attribution", best.part)
    return Finding(words, "attribution", _stands_alone(direct, without, sign), places)


def _of_part(report: Report, view: str, part: str) -> tuple[PageCell, ...]:
    """The cell of a head or an MLP on a map of these; none for the parts outside the layers."""
    one, config = Part.of(part), report.config
    if one.kind == "head" and one.layer is not None and one.index is not None:
        return (PageCell(view, one.layer, one.index),)
    if one.kind in config.mlps and one.layer is not None:
        return (PageCell(view, one.layer, config.n_heads + config.mlps.index(one.kind)),)
    return ()


def _of_patch(cell: pd.Series) -> PageCell:
    """The cell of a patched head, or of a token's stream."""
    at = cell["head"] if cell.site == "z" else cell.pos
    return PageCell(f"patching {cell.direction} {cell.site}", int(cell.layer), int(at))


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


def _read_from(report: Report, part: str, sign: float) -> tuple[str, int] | None:
    """The token, and its position, from which a head takes at least half of what it adds; None if from no one token.

    Copies of the token count together; the position is that of the copy which gives most. The first token of all is
    none: heads rest there.
    """
    table = report.tables.get("attribution_sources")
    if table is None:
        return None
    rows = table[table.part == part]
    by_token = (sign * rows.value).groupby(rows.source_token).sum()
    if by_token.empty or not by_token.max() >= HALF * sign * rows.value.sum():
        return None
    same = rows[rows.source_token == by_token.idxmax()]
    source = int(_largest(same, sign * same.value).source)
    return (str(by_token.idxmax()), source) if source else None


def _induction(evidence: _Evidence) -> Finding | None:
    """The induction head that looks at what followed the last token before, if there is one and it was there before."""
    report, contrast = evidence.report, evidence.contrast
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
    return Finding(words, "attention", doubt, _of_part(report, "attention", part))


def _cause(evidence: _Evidence) -> Finding | None:
    """The head or MLP that brings most of the answer back by itself; in doubt where the answer survives its loss."""
    back = evidence.restored
    if back is None:
        return None
    best, share = back.iloc[0], float(back.normalised.iloc[0])
    name = _cell_in_words(best)
    if share < LITTLE:
        words = (
            f"No single head or MLP brings the difference back: the most is {number(share, 2)}, by {name}."
        )
        return Finding(words, "patching", "Several have to act together.", (_of_patch(best),))
    words, beside = _brought_back(evidence, back)
    places = (_of_patch(best), *map(_of_patch, beside))
    corrupted = evidence.corrupted
    left = back.normalised * 0 if corrupted is None else corrupted.normalised.reindex(back.index)
    spare = back.index[(back.normalised >= AMPLE) & (left >= AMPLE)]
    if (site := _early_site(back, left, best)) is not None:
        early = f"{_started(_cell_in_words(site))} writes early what the answer needs: alone in the corrupted prompt it"
        back_early = number(float(site.normalised), 2)
        words = f"{early} brings {back_early} of the difference back, {name} later {number(share, 2)}."
        places = (_of_patch(site), *places)
    if not len(spare):
        return Finding(words, "patching", _more_than_all(share), places)
    names = [_cell_in_words(back.loc[index]) for index in spare]
    several = f"{_listed(names)} {'is' if len(names) == 1 else 'are each'} enough and"
    doubt = f"But {several} not needed: at least {number(float(left[spare].min()), 2)} is left without it."
    return Finding(words, "patching", doubt, (*places, *(_of_patch(back.loc[index]) for index in spare)))


def _brought_back(evidence: _Evidence, back: pd.DataFrame) -> tuple[str, list[pd.Series]]:
    """The sentence about the part that brings most of the difference back, told after the one that adds most by itself.

    With it come the patches of the other parts that the sentence names: the best head where an MLP is best, and the
    part that adds most by itself.
    """
    best = back.iloc[0]
    brings = f"brings {_share_of(best)} of the difference back when it alone is put into the corrupted prompt"
    writer, last = evidence.writer, len(evidence.report.tables["tokens"]) - 1
    by_part = {_patched(cell, last): cell for _, cell in back.iterrows()}
    if writer is not None and writer.part == _patched(best, last):
        return f"The same {'head' if best.site == 'z' else 'MLP'} {brings}.", []
    heads = back[(back.site == "z") & (back.normalised >= HALF)].part.tolist() if best.site != "z" else []
    others = [*heads[:1], *([] if writer is None or writer.part not in by_part else [writer.part])]
    beside = {part: by_part[part] for part in others}
    also = _listed([f"{in_words(part)} brings {_share_of(cell)}" for part, cell in beside.items()])
    words = f"{_started(_cell_in_words(best))} {brings}{'; ' if also else ''}{also}."
    return words, list(beside.values())


def _share_of(cell: pd.Series) -> str:
    """The share of the difference between the prompts that a patch brings back."""
    return number(float(cell.normalised), 2)


def _patched(cell: pd.Series, last: int) -> str | None:
    """The name of the head, or of the MLP at the last position, whose output a cell carries over; None elsewhere."""
    if cell.site == "z":
        return str(cell.part)
    return _mlp_of(cell) if cell.pos == last else None


def _mlp_of(cell: pd.Series) -> str:
    """The MLP that writes a patched cell."""
    return str(Part("mlp" if cell.site == "mlp_out" else "mlp_before", int(cell.layer)))


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
    return f"{in_words(_mlp_of(cell))} at {_at(cell.token or '', int(cell.pos))}"


def _listed(names: Sequence[str]) -> str:
    """Names in a row, the last after "and"; "" for none."""
    return " and ".join([", ".join(names[:-1]), *names[-1:]]) if len(names) > 1 else "".join(names)


def _more_than_all(share: float) -> str:
    """The doubt about a share above 1."""
    return "That is more than all of it: what is left out holds the answer back." if share > MORE else ""


def _route(evidence: _Evidence) -> Finding | None:
    """The finding about the first layer from which on the last token has the difference between the prompts."""
    report, back = evidence.report, evidence.restored
    table = report.tables.get("patching")
    if table is None or report.corrupted is None:
        return None
    tokens = report.tables["tokens"].token.tolist()
    stream = table[(table.site == "resid_pre") & (table.direction == "denoise")].sort_values(["layer", "pos"])
    share = stream.normalised.fillna(0.0).to_numpy().reshape(-1, len(tokens))
    changed = [(pos, token) for pos, token, _ in report.corrupted.changes]
    if changed[-1][0] == len(tokens) - 1:
        return None
    more = [f"{len(changed) - NAMED} more tokens"] if len(changed) > NAMED + 1 else []
    named = changed[:NAMED] if more else changed
    start = _listed([_at(token, pos) for pos, token in named] + more)
    above_half = [layer for layer in range(len(share)) if (share[layer:, -1] >= HALF).all()]
    words = f"What differs starts at {start}"
    if not above_half:
        return Finding(f"{words}; only the last layer brings most of it to the last token.", "patching")
    words += f" and is at the last token from layer {above_half[0]} on"
    best = None if back is None else back.iloc[0]
    if (
        best is not None
        and best.site == "z"
        and best.layer == above_half[0] - 1
        and best.normalised >= LITTLE
    ):
        words += f", right after {in_words(best.part)}"
    view = "patching denoise resid_pre"
    places = [PageCell(view, above_half[0], len(tokens) - 1)]
    elsewhere = np.ones(len(tokens), dtype=bool)
    elsewhere[[-1, *(pos for pos, _ in changed)]] = False
    between = np.where(elsewhere, share[: above_half[0]], 0.0)
    if between.size and between.max() >= HALF:
        layer, pos = divmod(int(between.argmax()), len(tokens))
        words += f", by way of {_at(tokens[pos], pos)} in layer {layer}"
        places.append(PageCell(view, layer, pos))
    words = f"{words} (half of the effect, one state patched at a time)."
    return Finding(words, "patching", places=(*places, *(PageCell(view, 0, pos) for pos, _ in changed)))


def _needed(evidence: _Evidence) -> Finding | None:
    """The finding without a corrupted prompt: the part that costs the answer most when it is silenced."""
    report, token, sign = evidence.report, evidence.favoured, evidence.sign
    table = report.tables.get("ablation")
    if report.corrupted is not None or table is None:
        return None
    extends_embedding = table.part.isin(["L0.mlp"]) & (report.config.n_layers > FEW_LAYERS)
    table = table[(table.change == "zero") & table.changed & ~extends_embedding]
    if table.empty or (sign * table.value).min() >= 0:
        return None
    worst = _largest(table, -sign * table.value)
    if evidence.writer is not None and worst.part == evidence.writer.part:
        return None  # said of the writer already
    words = (
        f"{_quoted(token)} suffers most without {in_words(worst.part)}: "
        f"{number(sign * float(worst.value), 2, sign=True)} logits when its output is set to zero."
    )
    doubt = "Zero is a state the model never saw; a corrupted prompt gives a fairer test."
    return Finding(words, "ablation", doubt, _of_part(report, "ablation zero", worst.part))


def _circuit(evidence: _Evidence) -> Finding | None:
    """How few of the strongest edges carry the difference between the prompts."""
    table = evidence.report.tables.get("faithfulness")
    if table is None:
        return None
    size = enough(table)
    share = float(table.value[table.edges == size].iloc[0])
    total = int(table.edges.max())
    if size == total:
        words = (
            f"No small circuit was found: fewer than all {count(total)} edges, taken by strength, carry less than "
            f"{number(ENOUGH, 2)} of the difference or do not keep it."
        )
        return Finding(words, "circuit", "Another choice of edges may do better.")
    words = f"The strongest {count(size)} of {count(total)} edges carry {number(share, 2)} of the difference."
    return Finding(words, "circuit", _more_than_all(share))


def enough(table: pd.DataFrame) -> int:
    """The smallest number of edges of the faithfulness table from which on, up to all, at least `ENOUGH` is carried."""
    short = table.edges[table.value < ENOUGH]
    return int(table.edges[table.edges > (short.max() if len(short) else 0)].min())


def _lens(evidence: _Evidence) -> Finding | None:
    """From which depth on the logit lens reads the answer at the last token."""
    table = evidence.report.tables.get("logit_lens")
    if table is None:
        return None
    last_pos = int(table.pos.max())
    rows = table[(table.pos == last_pos) & (table["rank"] == 0)]
    ranks: Sequence[int] = rows.answer_rank.tolist()
    if ranks[-1] != 0:
        return None
    first = max((i + 1 for i, rank in enumerate(ranks) if rank != 0), default=0)
    word = _quoted(evidence.contrast.answer.token)
    if first == len(ranks) - 1:
        words = f"The logit lens reads {word} at the last token only at the end."
        return Finding(words, "lens", places=(PageCell("lens", first, last_pos),))
    depth = depth_labels([str(name) for name in rows.depth])[first]
    since = depth if depth == "embedding" else f"end of {depth.removeprefix('after ')}"
    words = f"The logit lens reads {word} at the last token from the {since} on."
    return Finding(words, "lens", places=(PageCell("lens", first, last_pos),))


RULES: Sequence[Callable[[_Evidence], Finding | None]] = (
    _answer, _writer, _cause, _induction, _route, _needed, _circuit, _lens,
)  # fmt: skip
"""In the order of the page."""
