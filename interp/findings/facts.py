"""Claims about facts: where they are looked up, and what a rank-one edit of one does."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from interp.core.stats import ranks
from interp.editing import EditCase, Rome, edit_table, key_moment, rome_edit
from interp.editing.weight_edit import WeightEdit
from interp.findings.claim import Claim, Measured, Region
from interp.findings.setting import SEEDS, Setting
from interp.model.edits import Edit, Set
from interp.model.layout import PerRow
from interp.model.tap import Read
from interp.passes.observe import Model, observe
from interp.tasks import HELD_OUT_PHRASINGS, FactPrompt, fact_prompts

NEIGHBOURS = 3
"""Facts of the same kind that an edit should leave alone."""
FEW_LAYERS = 8
"""Up to here the MLP of the first layer is one as any other."""
EDITS = 34
"""Edits of each seed at most."""
TEXTS = 4
"""Texts at most whose perplexity is compared."""


def looked_up(setting: Setting) -> Measured:
    """What early MLPs at the subject's last token bring back of a fact, minus what they bring back at the last token.

    Clean and corrupted prompt ask for the same of two countries of as many tokens; into the corrupted run go the clean
    outputs of the MLPs of the first half, at one token. Of more than `FEW_LAYERS` layers the first one's stays: it
    extends the embedding, so that it brings back whatever another subject changes.
    """
    count = setting.model.cfg.n_layers
    layers = range(int(count > FEW_LAYERS), max(1, count // 2))
    values, nulls = [], []
    for seed in SEEDS:
        clean, corrupt = _pairs(setting, seed)
        at_subject, at_end, whole = _brought_back(setting, clean, corrupt, layers)
        apart = whole > 1.0
        if int(apart.sum()) < 3:
            raise ValueError("few facts differ in it by a logit")
        values.append(at_subject[apart])
        nulls.append(at_end[apart])
    return Measured.mean(values, "facts", null=nulls)


def _pairs(setting: Setting, seed: int) -> tuple[list[FactPrompt], list[FactPrompt]]:
    """Known facts of a seed, and another known fact in the same phrasing, of as many tokens and another answer."""
    draw, encode = np.random.default_rng(seed), setting.tokenizer.encode
    length = {fact.prompt: len(encode(fact.prompt)) for fact in setting.known}
    clean, corrupt = [], []
    for fact in _third(setting, seed):
        others = [
            other
            for other in setting.known
            if other.phrasing == fact.phrasing and other.answer != fact.answer
            and length[other.prompt] == length[fact.prompt]
        ]  # fmt: skip
        if others:
            clean.append(fact)
            corrupt.append(others[int(draw.integers(len(others)))])
    if len(clean) < 3:
        raise ValueError("it knows too few facts about countries of as many tokens")
    return clean, corrupt


def _third(setting: Setting, seed: int) -> list[FactPrompt]:
    """The known facts of a seed."""
    return setting.known[SEEDS.index(seed) :: len(SEEDS)][: setting.prompts // len(SEEDS)]


def _brought_back(
    setting: Setting, clean: list[FactPrompt], corrupt: list[FactPrompt], layers: range
) -> tuple[Tensor, Tensor, Tensor]:
    """Share of the difference between two facts that some MLPs bring back, at the subject's end and at the last token.

    Args:
        setting: the model.
        clean, corrupt: facts of as many tokens.
        layers: of the MLPs.

    Returns:
        The share at the subject's last token, the share at the last token, and the difference itself in logits.
    """
    batch, other = (setting.model.text.batch([fact.prompt for fact in facts]) for facts in (clean, corrupt))
    answer, wrong = setting.answer_ids(clean), setting.answer_ids(corrupt)
    reads = [Read(f"blocks.{layer}.hook_mlp_out") for layer in layers]
    seen = observe(setting.model, batch, reads, answers_only=True)
    rows, last = torch.arange(len(batch)), batch.last()

    def gap(ends: Float[Tensor, "n v"]) -> Float[Tensor, "n"]:
        return ends[rows, answer] - ends[rows, wrong]

    base, whole = gap(setting.ends(other)), gap(setting.ends(batch))
    subject = torch.tensor([_last_of_subject(setting, fact) for fact in clean])
    found = []
    for columns in (subject, last.cpu()):
        edits = [
            Edit(read.site, Set(seen.trace[read]), at={"pos": PerRow(columns.tolist())}) for read in reads
        ]
        found.append((gap(setting.ends(other, edits)) - base) / (whole - base))
    return found[0], found[1], whole - base


def _last_of_subject(setting: Setting, fact: FactPrompt) -> int:
    """The column of the subject's last token."""
    before, _, _ = fact.prompt.partition(fact.fact.subject)
    text = setting.model.text
    ids = text.batch(fact.prompt).tokens[0].tolist()
    start = len(ids) - len(setting.tokenizer.encode(fact.prompt))
    return start + len(setting.tokenizer.encode(f"{before}{fact.fact.subject}")) - 1


def _edited(setting: Setting) -> xr.Dataset:
    """What a rank-one edit (ROME) of a known fact to another answer of its kind does, in one layer a fifth up."""
    keys = key_moment(setting.model, setting.prose, layer=_edit_layer(setting))
    cases = [case for seed in SEEDS for case in _cases(setting, seed)]

    def rome(_: Model, case: EditCase) -> WeightEdit:
        return rome_edit(
            setting.model, case.prompt, answer=case.answer, subject=case.subject or "", keys=keys, rome=Rome(),
        )  # fmt: skip

    texts = setting.choosing_texts
    some = texts.rows(torch.arange(min(TEXTS, len(texts))))
    return edit_table(setting.model, cases, {"rome": rome}, text=some)


def _cases(setting: Setting, seed: int) -> list[EditCase]:
    draw, found = np.random.default_rng(seed), []
    held = {prompt.fact: prompt for prompt in fact_prompts(HELD_OUT_PHRASINGS)}
    for fact in _third(setting, seed)[:EDITS]:
        same = [other for other in setting.known if other.fact.relation == fact.fact.relation]
        answers = sorted({other.answer for other in same} - {fact.answer})
        neighbours = [
            other for other in same if other.fact.subject != fact.fact.subject and other.answer != fact.answer
        ]
        if not answers or len(neighbours) < NEIGHBOURS:
            continue
        near = [neighbours[i] for i in draw.choice(len(neighbours), NEIGHBOURS, replace=False)]
        new = answers[int(draw.integers(len(answers)))]
        found.append(
            EditCase(
                fact.prompt, new, fact.fact.subject,
                {
                    "paraphrase": ((held[fact.fact].prompt, new),),
                    "neighbourhood": tuple((other.prompt, other.answer) for other in near),
                },
            )
        )  # fmt: skip
    return found


def _edit_layer(setting: Setting) -> int:
    return max(1, setting.model.cfg.n_layers // 5)


def _scores(setting: Setting, score: str, editor: str = "rome") -> list[Tensor]:
    """A score of every edit by seed, after it or (`original`) before."""
    table = setting.shared("edits", _edited)
    counts = [len(_cases(setting, seed)) for seed in SEEDS]
    if min(counts) < 3:
        raise ValueError("it knows too few facts of one kind")
    values = table["each"].sel(editor=editor, score=score).values.copy()
    return list(torch.from_numpy(values).double().split(counts))


def edited(setting: Setting, score: str) -> Measured:
    """A score of the edits, minus the same before them."""
    about = f"layer {_edit_layer(setting)}"
    before = _scores(setting, score, "original")
    return Measured.share(_scores(setting, score), over="edits", null=before, about=about)


def keeps_language(setting: Setting) -> Measured:
    """Share of edits after which the perplexity of other texts is less than a tenth above what it was."""
    pairs = zip(_scores(setting, "perplexity"), _scores(setting, "perplexity", "original"), strict=True)
    return Measured.share([after < 1.1 * before for after, before in pairs], over="edits")


def tracing_tells(setting: Setting) -> Measured:
    """Rank correlation, over facts, of what MLPs around the edited layer bring back with how well its edit works."""
    layer = _edit_layer(setting)
    traced, works = [], []
    for seed in SEEDS:
        facts = {case.prompt: i for i, case in enumerate(_cases(setting, seed))}
        scores = [_scores(setting, name)[SEEDS.index(seed)] for name in ("efficacy", "paraphrase")]
        clean, corrupt = _pairs(setting, seed)
        kept = [i for i, fact in enumerate(clean) if fact.prompt in facts]
        near = range(max(0, layer - 1), min(layer + 2, setting.model.cfg.n_layers))
        at_subject, _, _ = _brought_back(setting, [clean[i] for i in kept], [corrupt[i] for i in kept], near)
        traced.append(at_subject)
        works.append(torch.stack(scores).mean(0)[[facts[clean[i].prompt] for i in kept]])
    return correlation(traced, works, "edits")


def correlation(one: list[Tensor], other: list[Tensor], over: str) -> Measured:
    """Spearman's rank correlation of two numbers of each case, with Fisher's interval (Bonett and Wright 2000)."""

    def rho(x: Tensor, y: Tensor) -> float:
        return float(torch.corrcoef(torch.stack([ranks(x), ranks(y)]))[0, 1])

    value, n = rho(torch.cat(one), torch.cat(other)), sum(map(len, one))
    if math.isnan(value):
        raise ValueError(f"all {over} are alike in one of the two numbers")
    half = 1.959964 * ((1 + value**2 / 2) / max(n - 3, 1)) ** 0.5
    low, high = (math.tanh(math.atanh(min(max(value, -0.9999), 0.9999)) + sign * half) for sign in (-1, 1))
    return Measured(value, low, high, n, over, 0.0, tuple(rho(x, y) for x, y in zip(one, other, strict=True)))


MENG = "Meng et al. 2022, Locating and Editing Factual Associations"
CLAIMS: Mapping[str, Claim] = {
    "facts-in-early-mlps": Claim(
        "A fact is looked up by MLPs of the first half, after the first layer's, at the subject's last token.", MENG,
        "share of the answer that their clean outputs bring back at the subject's last token", "at the last token",
        Region(0.2), "share of the logit difference", looked_up,
    ),
    "edits-work": Claim(
        "A rank-one change of one MLP makes a model give another answer.", MENG,
        "share of edits after which the new answer is the most probable", "before the edit", Region(0.5),
        "share of edits", partial(edited, score="efficacy"),
    ),
    "edits-generalise": Claim(
        "The edited answer is given to other words too.", MENG,
        "share of edits after which a paraphrase gets the new answer", "before the edit", Region(0.3),
        "share of edits", partial(edited, score="paraphrase"),
    ),
    "edits-keep-language": Claim(
        "An edit leaves other texts as predictable as they were.", MENG,
        "share of edits after which the perplexity of four paragraphs rises by less than a tenth", "0", Region(0.8),
        "share of edits", keeps_language,
    ),
    "tracing-tells-where-to-edit": Claim(
        "Facts that the MLPs around a layer bring back are those that an edit of this layer changes best.",
        "Meng et al. 2022; Hase et al. 2023, Does Localization Inform Editing?, find that they are not",
        "rank correlation over facts of the share brought back with how well the edit works", "0", Region(0.3),
        "rank correlation", tracing_tells,
    ),
    "edits-are-specific": Claim(
        "An edit leaves the same question about other subjects alone.", MENG,
        "share of other subjects that keep their answer", "before the edit", Region(-0.2), "share of subjects",
        partial(edited, score="neighbourhood"),
    ),
}  # fmt: skip
