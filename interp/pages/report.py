"""One prompt through one model: every analysis of the page, assembled into tidy tables."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from interp.attention import heads
from interp.attention.score_parts import score_reads
from interp.attention.shares import with_pattern
from interp.circuits import EdgeAttribution
from interp.core.boundary import public
from interp.core.results import frame
from interp.core.stats import upcast
from interp.core.transfers import to_host
from interp.core.viewer import Brief
from interp.data.answers import AnswerTokens
from interp.data.batch import Batch, Prompts
from interp.data.pairs import Pairs, paired
from interp.data.stream import DataSource, prompt_source
from interp.data.text import Text
from interp.lenses import BackwardLens, FittedJacobianLens, LogitLens, TunedLens, logit_lens
from interp.lenses.factors import LensMatrix, present
from interp.model.config import Json, ModelConfig
from interp.model.records import require
from interp.model.sites import names as sites
from interp.model.tap import Read, Trace
from interp.pages import stages, tables
from interp.pages.ablated import ablation, ablations
from interp.pages.absent import FAILURES, Absences, why_absent, why_unsplit
from interp.pages.corrupted import METHOD, PromptPair, check_aligned, patches
from interp.pages.flow import about_flow, flow_reads
from interp.pages.reasons import TOO_LONG, Reasons, reasons, splitting
from interp.passes.metrics import logit_difference, uncapped_difference
from interp.passes.observe import Model, Subject, as_model, observe
from interp.passes.question import Askable
from interp.residual import Attribute, attribute
from interp.residual.attribution import Grain
from interp.residual.decomposition import not_linear
from interp.runs.kept import cached_for_model, unchanged
from interp.runs.provenance import model_hash, provenance
from interp.runs.run import run
from interp.tasks import RepeatedTokens
from interp.tokens import FlowRoutes
from interp.weights import composition, copying
from interp.weights.composition import CompositionKind

TOP = 10
"""Next tokens listed per position, and tokens per cell of the lens."""
FittedLens = TunedLens | FittedJacobianLens
"""Lenses that were fitted on texts."""
Sections = Mapping[str, Mapping[str, xr.Dataset]]
"""Answers to the questions of each section of the page."""
MOST_WEIGHTS = 1_300_000
"""Attention weights a page may hold: about 2 MB of the page, and a table that a spreadsheet still opens."""


@public()
@dataclass(frozen=True)
class ReportQuestion:
    """The prompt and the answers that a page is about."""

    prompt: str
    """The text; of a prompt given as ids what they are as text."""
    answer: str | None = None
    """The next token whose logit is explained, leading space included; None: the model's own most probable one.

    Of an answer of several tokens the first one; with a wrong answer, the first in which the two differ, after the
    tokens that they share.
    """
    wrong: str | None = None
    """The answer it is contrasted with; None = the runner-up if there is no answer either, else nothing."""
    corrupt: str | None = None
    """The corrupted prompt: the prompt, token for token, but for what changes the answer; None = no causal sections."""
    ids: tuple[int, ...] | None = None
    """The prompt's tokens, where it was given as ids, such as a conversation; None = those of the text."""
    corrupt_ids: tuple[int, ...] | None = None
    """Token ids of the corrupted prompt."""
    roles: tuple[str, ...] | None = None
    """The role that each of the prompt's tokens belongs to, "template" for the marks between; None: no chat."""

    @classmethod
    @public()
    def of(
        cls,
        text: Text,
        prompt: Prompts,
        answer: str | None = None,
        wrong: str | None = None,
        corrupt: Prompts | None = None,
    ) -> ReportQuestion:
        """The question about prompts in any form: text, a chat, or the ids of one prompt."""
        (clean, ids, roles), (other, other_ids, _) = (_as_text(text, each) for each in (prompt, corrupt))
        if clean is None:
            raise ValueError("a prompt is required, got None")
        return cls(clean, answer, wrong, other, ids, other_ids, roles)

    @property
    def tokens(self) -> str | Int[Tensor, "1 p"]:
        """The prompt as a model takes it."""
        return self.prompt if self.ids is None else torch.tensor([self.ids])

    @property
    def corrupt_tokens(self) -> str | Int[Tensor, "1 p"] | None:
        """The corrupted prompt as a model takes it."""
        return self.corrupt if self.corrupt_ids is None else torch.tensor([self.corrupt_ids])

    def followed_by(self, text: Text, tokens: Sequence[int]) -> ReportQuestion:
        """The question about the prompt, and the corrupted one, with these tokens after them."""
        (clean, ids, _), (other, other_ids, _) = (
            (None, None, None)
            if prompt is None
            else _as_text(text, [[*text.batch(prompt).tokens[0].tolist(), *tokens]])
            for prompt in (self.tokens, self.corrupt_tokens)
        )
        assert clean is not None
        roles = None if self.roles is None else (*self.roles, *["assistant"] * len(tokens))
        return replace(self, prompt=clean, ids=ids, corrupt=other, corrupt_ids=other_ids, roles=roles)

    def __post_init__(self) -> None:
        if self.wrong is not None and self.answer is None:
            raise ValueError(
                f"a wrong answer ({self.wrong!r}) requires an answer to be contrasted with, got none"
            )
        if self.wrong is not None and self.wrong == self.answer:
            raise ValueError(f"answer and wrong answer must differ, both are {self.answer!r}")


def _as_text(
    text: Text, prompt: Prompts | None
) -> tuple[str | None, tuple[int, ...] | None, tuple[str, ...] | None]:
    """A prompt as text, its ids where it is none, and the roles of a chat; ValueError for several prompts."""
    if prompt is None or isinstance(prompt, str):
        return prompt, None, None
    batch = text.batch(prompt)
    if len(batch) != 1:
        raise ValueError(f"a report is about one prompt, got {len(batch)}")
    ids = tuple(batch.host().tokens[batch.host().real].tolist())
    written = text.tokenizer.decode(list(ids)) if text.tokenizer else " ".join(map(str, ids))
    roles = None if batch.roles is None else tuple(map(str, batch.roles[0][batch.host().real[0].numpy()]))
    return written, ids, roles


@dataclass(frozen=True)
class About:
    """Facts about the model beyond its weights."""

    name: str
    """The model's name, or the path that it was opened from."""
    summary: str = ""
    card: Json = field(default_factory=dict)
    """Numbers measured on held-out material, as `zoo.card` gives them."""

    @property
    def title(self) -> str:
        """The name that the page bears: of a path its last part."""
        return (
            Path(self.name).name
            if Path(self.name).is_absolute() or self.name.startswith((".", "~"))
            else self.name
        )


@dataclass(frozen=True)
class Candidate:
    """A possible next token, its probability and its rank (0 = most probable)."""

    token: str
    prob: float
    rank: int


@dataclass(frozen=True)
class TokenContrast:
    """The two tokens that attribution compares at the last position."""

    answer: Candidate
    wrong: Candidate | None
    chosen_by_model: bool
    """Whether the model's own first two tokens were taken because the question named none."""
    total: float
    """The answer's logit, minus the wrong answer's where there is one, as the model gives them."""
    explained: float
    """The same before the soft cap of a model that has one: the sum of what the parts add."""
    completeness_error: float
    """Rounding error of the pass in `explained`, relative to the largest part; not a number without an attribution."""


@dataclass(frozen=True)
class Corrupted:
    """The corrupted prompt and what the model makes of the prompt's answers there."""

    prompt: str
    answer: Candidate
    wrong: Candidate | None
    total: float
    """The answer's logit after the corrupted prompt, minus the wrong answer's where there is one."""
    changes: tuple[tuple[int, str, str], ...]
    """Where the two prompts differ: position, the prompt's token, the corrupted one's."""


@dataclass(frozen=True, eq=False, repr=False)
class Report(Brief):
    """Everything on the page, as data."""

    about: About
    config: ModelConfig
    question: ReportQuestion
    contrast: TokenContrast | None
    """None for a model without logits: it has no answers."""
    corrupted: Corrupted | None
    """None where the question has no corrupted prompt."""
    data: RepeatedTokens
    """Data on which the head scores were measured."""
    tables: Mapping[str, pd.DataFrame]
    absent: Mapping[str, str]
    """Why there is no such table, by the table's name: what the model lacks, or how it failed."""
    provenance: Json
    reasons: Sequence[Reasons] = ()
    """Parts of heads' scores on the prompt; only on the page, which has no room for all of it."""
    unsplit: str | None = None
    """Why no scores are split."""
    stages: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Stages of the heads, from q . k to their weighted values, as the script of the page reads them."""
    notes: tuple[str, ...] = ()
    """A sentence for each section that failed and is left out; each was given as an `interp.Note` too."""


@dataclass(frozen=True, eq=False)
class _Answered:
    """The logits of the only row, and the tokens that the page is about."""

    logits_pv: Float[Tensor, "p v"]
    answer: int
    wrong: int | None

    def asked_of(self, logits: Float[Tensor, "v"]) -> float:
        """The answer's logit, minus that of the wrong answer if there is one, of any logits."""
        last = upcast(logits)
        return float(last[self.answer] - (0.0 if self.wrong is None else last[self.wrong]))


@public()
def report_of(
    model: Model,
    question: ReportQuestion,
    about: About,
    *,
    seed: int = 0,
    lenses: Mapping[str, FittedLens] = MappingProxyType({}),
) -> Report:
    """Every table of the page for one prompt; the seed draws the repeated tokens of the head scores.

    Args:
        lenses: fitted lenses of this model by name, which the page shows beside the logit lens. A model without
            logits has tables of attention, head scores and composition, and no `contrast`; a question without a
            corrupted prompt has no tables of patching and edges. `absent` says of every other table that this model
            lacks why: a wrapped network has no circuits, layers that keep a state have no attention. Heads whose
            scores do not come from q . k have no composition into queries and keys. A table that fails (ValueError,
            ArithmeticError such as parts that miss their sum, MemoryError) is left out too: `absent` has the reason,
            and `notes` a sentence, which is given as an `interp.Note`. The pass itself, the tokens and the next
            tokens are no section: without them there is no page.

    Raises:
        ValueError: what is no model, for a prompt or an answer the model cannot take, for a prompt too long for the
            page, for a corrupted prompt that does not align with the prompt or that the model answers alike, for a
            model that is not causal, whose heads do not write, whose patterns are no shares, or whose logits are not
            linear in the stream.
    """
    model = as_model(model)
    question, compared, notes = _compared(model, question)
    batch = model.text.batch(question.tokens)
    check_aligned(model, question.tokens, question.corrupt_tokens)
    config = model.transformer.config
    _check_model(config, question)
    _check_size(config, batch.tokens.shape[1])
    for lens in lenses.values():
        lens.check(model.transformer, lens.sites)
    with unchanged(model.transformer):
        absent = Absences(why_absent(config))
        absent.say(*notes)
        return _made(model, question, compared, about, batch, fitting_repeats(config, seed), lenses, absent)


def _compared(
    model: Subject, question: ReportQuestion
) -> tuple[ReportQuestion, tuple[int, int | None] | None, tuple[str, ...]]:
    """The question with the prompt up to the token that is compared, the ids of answer and wrong answer, and notes.

    None for the ids where the question names none.
    """
    text = model.text
    if question.answer is None or not model.transformer.config.unembed:
        return question, None, ()
    if question.wrong is None:
        first, *more = text.continuations(question.answer)[0]
        said = f"the answer {question.answer!r} is of {1 + len(more)} tokens: the page is about its first one"
        notes = (f"{said}, {text.of_outputs.pieces([first])[0]!r}",) if more else ()
        return question, (first, None), notes
    answers = AnswerTokens.of(text, question.answer, question.wrong, several=True)
    assert answers is not None and answers.wrong is not None
    if answers.forced is not None:
        question = question.followed_by(text, answers.forced[0].tolist())
    return question, (int(answers.answer[0]), int(answers.wrong[0])), answers.cut


def _made(
    model: Subject,
    question: ReportQuestion,
    compared: tuple[int, int | None] | None,
    about: About,
    batch: Batch,
    data: RepeatedTokens,
    lenses: Mapping[str, FittedLens],
    absent: Absences,
) -> Report:
    """The report of a question that was checked; data: what the head scores are measured on."""
    config = model.transformer.config
    output_p, pattern_lhqk, trace = _pass(model, batch, absent.why)
    answered = _answered(model, question, compared, output_p)
    other = None if answered is None else _corrupted(model, question, answered, batch)
    scored = None if "heads" in absent.why else absent.tried("heads", lambda: heads(model, repeats=data))
    ids = batch.tokens[0].to(output_p.device)
    names = model.text.pieces(ids.tolist())
    work = _about_model(
        model, (ids, None if answered is None else answered.logits_pv), scored, pattern_lhqk, question.roles
    )
    of_prompt: Sections = {}
    if answered is not None:
        of_prompt = _of_prompt(model, question, answered, absent)
        work |= _about_logits(model, batch, trace, answered, of_prompt, names)
        if lenses:
            work["fitted_lenses"] = lambda: _fitted(model, batch, answered.answer, lenses)
        previous = None if scored is None else scored.value.sel(score="previous_token")
        work["circuits"] = lambda: frame(copying(model, ranks=False, previous=previous))
        work |= _about_interventions(model, question, answered, of_prompt, names)
        work |= _about_corrupted(model, question, answered, of_prompt)
    found = absent.tables(_announced(work))
    written = of_prompt.get("attribution", {}).get("attribution")
    contrast = None if answered is None else _contrast(model, question, answered, written)
    contrasted, corrupted = (None if each is None else asdict(each) for each in (contrast, other))
    parameters: Json = {
        **asdict(question), "contrast": contrasted, "corrupted": corrupted, "head_scores": asdict(data),
    }  # fmt: skip
    digest = cached_for_model(model, "SHA-256 of the weights", partial(model_hash, model.transformer))
    record = provenance(model.transformer, about.name, seed=data.seed, parameters=parameters, digest=digest)
    record["units"] = {name: dict(tables.UNITS[name]) for name in found}
    record["absent"] = absent.why
    why, unsplit = _reasons(model, batch, written, trace, absent)
    named = [each.part for each in why]
    steps = absent.tried("stages", lambda: stages.payload(model.transformer, named, trace)) or {}
    record["notes"] = absent.notes
    return Report(
        about, config, question, contrast, other, data, found, absent.why, record, why, unsplit, steps,
        tuple(absent.notes),
    )  # fmt: skip


def _reasons(
    model: Subject, batch: Batch, written: xr.Dataset | None, trace: Trace, absent: Absences
) -> tuple[list[Reasons], str | None]:
    """The parts of heads' scores, and the reason where there are none."""
    if why := why_unsplit(model.transformer.config):
        return [], why
    found = absent.tried("reasons", lambda: reasons(model.transformer, batch, written, trace))
    return found or [], absent.why.get("reasons") or (None if found else TOO_LONG)


def _announced(
    work: Mapping[str, Callable[[], pd.DataFrame]],
) -> dict[str, Callable[[], pd.DataFrame]]:
    """The tables one by one, under one bar that moves with every table."""
    bar = tqdm(total=len(work), desc="report", delay=1, leave=False)

    def moved(make: Callable[[], pd.DataFrame]) -> pd.DataFrame:
        try:
            return make()
        finally:
            bar.update()

    return {name: partial(moved, make) for name, make in work.items()}


def _about_model(
    model: Subject,
    prompt: tuple[Tensor, Tensor | None],
    scored: xr.Dataset | None,
    pattern: Tensor | None,
    roles: Sequence[str] | None,
) -> dict[str, Callable[[], pd.DataFrame]]:
    """How to make the tables that every model has: of the prompt's ids and logits, its heads and its patterns."""
    (ids, logits_pv), config = prompt, model.transformer.config
    names = model.text.pieces(ids.tolist())
    work: dict[str, Callable[[], pd.DataFrame]] = {
        "tokens": lambda: tables.tokens(ids, logits_pv, model.text.pieces, roles),
        "composition": lambda: tables.composition(
            {kind: composition(model, kind) for kind in _kinds(config)}
        ),
    }
    if scored is not None:
        work["heads"] = lambda: tables.heads(scored)
    if pattern is not None:
        work["attention"] = lambda: tables.attention(pattern, with_pattern(config), names)
    return work


def _answered(
    model: Subject, question: ReportQuestion, compared: tuple[int, int | None] | None, output_p: Tensor
) -> _Answered | None:
    """The answer of the model; None if it ends in its residual stream.

    ValueError if an answer was given for such a model.
    """
    if not model.transformer.config.unembed:
        if question.answer is None:
            return None
        raise ValueError(
            f"an answer ({question.answer!r}) requires a model with logits, this one ends in its residual stream"
        )
    if compared is None:  # the model's own first two
        first, second = output_p[-1].topk(2).indices.tolist()
        return _Answered(output_p, first, second)
    return _Answered(output_p, *compared)


def _of_prompt(model: Subject, question: ReportQuestion, answered: _Answered, absent: Absences) -> Sections:
    """The answers to all that sections ask about the prompt and its corrupted one, from one run.

    If that fails, each section is answered by itself, to know which fails; those that do are absent.
    """
    questions, corrupt = (
        _questions_of_sections(model.transformer.config, question, answered),
        question.corrupt_tokens,
    )
    questions = {section: some for section, some in questions.items() if section not in absent.why and some}
    batch = model.text.batch(question.tokens)
    data = _source(model, batch if corrupt is None else paired(model.text, question.tokens, corrupt))

    def found(sections: Collection[str]) -> Sections:
        every = {
            (section, name): questions[section][name] for section in sections for name in questions[section]
        }
        results = run({": ".join(key): each for key, each in every.items()}, model, data)
        return {
            section: {name: results[f"{section}: {name}"] for name in questions[section]}
            for section in sections
        }

    try:
        return found(questions)
    except FAILURES:
        each = {section: absent.tried(section, partial(found, [section])) for section in questions}
    return {section: one[section] for section, one in each.items() if one is not None}


def _questions_of_sections(
    config: ModelConfig, question: ReportQuestion, answered: _Answered
) -> dict[str, dict[str, Askable]]:
    """The questions of every section about the prompt, by their names: about edges only with a corrupted prompt."""
    answer, wrong = answered.answer, answered.wrong
    metric, compares = logit_difference(answer, wrong), question.corrupt is not None
    split = metric if config.logit_softcap is None else uncapped_difference(answer, wrong)
    parts: Grain = "source" if any(mixer.traits.additive for mixer in config.mixers) else "head"
    sections: dict[str, dict[str, Askable]] = {
        "attribution": {"attribution": Attribute(answer, wrong, parts=parts)},
        "logit_lens": {"next": LogitLens(), "answer": LogitLens(answer=answer)},
        "flow_routes": {"flow_routes": FlowRoutes()},
        "backward_lens": {"backward_lens": BackwardLens(answer, matrices=_lens_matrices(config))},
        "ablation": {**ablations(config, split, corrupt=compares)} if config.n_layers else {},
    }
    if compares:
        sections["patching"] = {**patches(config, metric)}
        sections["edges"] = {"edges": EdgeAttribution(metric=metric, method=METHOD)}
    return sections


def _lens_matrices(config: ModelConfig) -> tuple[LensMatrix, ...]:
    """The matrices of the backward lens: one that writes to the stream and one that reads it, of MLPs if possible."""
    has = present(config)
    of_mlps: tuple[LensMatrix, ...] = ("mlp_before.W_out", "mlp_before.W_in", "W_out", "W_in")
    shown: tuple[LensMatrix, ...] = of_mlps if "W_out" in has else ("W_O", "W_V")
    return tuple(matrix for matrix in shown if matrix in has)


def _about_logits(
    model: Subject, batch: Batch, trace: Trace, answered: _Answered, found: Sections, names: list[str]
) -> dict[str, Callable[[], pd.DataFrame]]:
    """How to make the tables that only a model with logits has."""
    pieces, flat = model.text.pieces, {name: each for some in found.values() for name, each in some.items()}
    return {
        "next_tokens": lambda: tables.next_tokens(answered.logits_pv, pieces, top=TOP),
        "attribution": lambda: tables.attribution(flat["attribution"]),
        "attribution_sources": lambda: tables.attribution_sources(flat["attribution"], names),
        "logit_lens": lambda: tables.logit_lens(flat["next"], flat["answer"]),
        "backward_lens": lambda: tables.backward_lens(flat["backward_lens"]),
        **about_flow(model, batch, trace, flat, names),
    }


def _about_interventions(
    model: Subject, question: ReportQuestion, answered: _Answered, found: Sections, names: list[str]
) -> dict[str, Callable[[], pd.DataFrame]]:
    """How to make the tables of what changes the answer: patching only with a corrupted prompt."""
    corrupt = question.corrupt_tokens

    def ablated() -> pd.DataFrame:
        corrupted = (
            None
            if corrupt is None
            else attribute(model, corrupt, answered.answer, answered.wrong, parts="head")
        )
        return ablation(found["ablation"], found["attribution"]["attribution"], corrupted)

    work = {"ablation": ablated}
    if corrupt is not None:
        work["patching"] = lambda: tables.patching(found["patching"], names)
    return work


def _about_corrupted(
    model: Subject, question: ReportQuestion, answered: _Answered, found: Sections
) -> dict[str, Callable[[], pd.DataFrame]]:
    """How to make the tables of edges between the prompt and its corrupted one; none without that."""
    corrupt = question.corrupt_tokens
    if corrupt is None:
        return {}
    pair = PromptPair(question.tokens, corrupt, logit_difference(answered.answer, answered.wrong))
    return {
        "edges": lambda: tables.edges(found["edges"]["edges"]),
        "faithfulness": lambda: tables.faithfulness(*pair.curve(model, found["edges"]["edges"])),
    }


def _corrupted(
    model: Subject, question: ReportQuestion, answered: _Answered, batch: Batch
) -> Corrupted | None:
    """The answer of the model to the corrupted prompt; None if there is none."""
    corrupt = question.corrupt_tokens
    if corrupt is None or question.corrupt is None:
        return None
    other = model.text.batch(corrupt)
    last = to_host({"last": observe(model.transformer, other, []).output[0, -1]})["last"]
    answer, wrong = _candidates(answered, last, model)
    total = answered.asked_of(last)
    if total == answered.asked_of(answered.logits_pv[-1]):
        raise ValueError(
            f"a corrupted prompt that changes the answer is required: the logits asked about are {total:.4g} for clean "
            f"and corrupted runs alike, after {question.prompt!r} and {question.corrupt!r}"
        )
    places = (batch.tokens[0] != other.tokens[0]).nonzero().flatten().tolist()
    ours, theirs = (model.text.pieces(each.tokens[0, places].tolist()) for each in (batch, other))
    changes = tuple(zip(places, ours, theirs, strict=True))
    return Corrupted(question.corrupt, answer, wrong, total, changes)


def _contrast(
    model: Subject, question: ReportQuestion, answered: _Answered, attributed: xr.Dataset | None
) -> TokenContrast:
    """The two tokens, and their logits after the soft cap of a model that has one and, if attributed, before it."""
    answer, wrong = _candidates(answered, answered.logits_pv[-1], model)
    total = answered.asked_of(answered.logits_pv[-1])
    return TokenContrast(
        answer=answer,
        wrong=wrong,
        chosen_by_model=question.answer is None,
        total=total,
        explained=total if attributed is None else float(attributed.total[0]),
        completeness_error=float("nan" if attributed is None else attributed.attrs["completeness_error"]),
    )


@public()
def fitting_repeats(config: ModelConfig, seed: int) -> RepeatedTokens:
    """25 tokens four times, as Olsson et al. 2022; fewer, or less often, where context or vocabulary are too small."""
    usual = RepeatedTokens(seed=seed)
    repeats = min(usual.repeats, (config.n_ctx - 1) // 2)
    if repeats < 2 or config.d_vocab < 3:
        raise ValueError(
            "head scores require a context of at least 5 tokens and a vocabulary of at least 3, "
            f"got {config.n_ctx} and {config.d_vocab}"
        )
    period = min(usual.period, (config.n_ctx - 1) // repeats, config.d_vocab - 1)
    return RepeatedTokens(period=period, repeats=repeats, seed=seed)


def _check_model(config: ModelConfig, question: ReportQuestion) -> None:
    """ValueError before any pass for a model that half the page could say nothing about."""
    config.require_tokens("a page")
    if question.corrupt is not None and not config.n_layers:
        raise ValueError("a corrupted prompt is for a model with layers, this one has none: leave it out")
    for layer in range(config.n_layers):
        if (site := f"blocks.{layer}.attn.hook_z") not in sites(config):
            why = config.block.why_not(site) or f"there is no {site}"
            raise ValueError(f"a page shows what each head writes: {why}")
    require("distribution", [config.mixers[layer] for layer in with_pattern(config)], "a page about heads")
    if config.unembed and (what := not_linear(config)):
        raise ValueError(f"a page requires logits that are linear in the normed stream; this model {what}")


def _kinds(config: ModelConfig) -> tuple[CompositionKind, ...]:
    """The kinds of composition that the heads have: into queries and keys only where scores come from q . k."""
    bilinear = all(mixer.traits.bilinear for mixer in config.mixers)
    kinds: tuple[CompositionKind, ...] = ("Q", "K", "V") if bilinear else ("V",)
    return kinds if config.n_layers > 1 else ()


def _check_size(config: ModelConfig, n: int) -> None:
    heads_in_all = len(with_pattern(config)) * config.n_heads
    if heads_in_all * n * (n + 1) // 2 > MOST_WEIGHTS:
        fits = int(((1 + 8 * MOST_WEIGHTS / heads_in_all) ** 0.5 - 1) / 2)
        raise ValueError(
            f"the page shows the attention of all {heads_in_all} heads of this model for up to {fits} tokens, "
            f"the prompt has {n}"
        )


def _pass(
    model: Subject, batch: Batch, absent: Collection[str]
) -> tuple[Float[Tensor, "p _"], Float[Tensor, "l h q k"] | None, Trace]:
    """The results of the prompt's one pass, on the host.

    Its logits (or the final stream, of a model without), every pattern of the only row, if any, and all that the page
    reads of it.
    """
    network = model.transformer
    patterns = [Read(f"blocks.{i}.attn.hook_pattern") for i in with_pattern(network.config)]
    scores = score_reads(network, splitting(network.config))
    steps = stages.stage_reads(network, stages.staged(network))
    seen = observe(network, batch, [*patterns, *scores, *steps, *flow_reads(network, absent)])
    every = {"pattern": torch.stack([seen.trace[read][0] for read in patterns])} if patterns else {}
    on_host = to_host({"output": seen.output[0], **every})
    return on_host["output"], on_host.get("pattern"), seen.trace


def _source(model: Subject, data: Batch | list[Batch] | Pairs) -> DataSource:
    """The prompt, or it and its corrupted one, as data of a run."""
    return prompt_source(data, model.text, batch_size=1)


def _fitted(model: Subject, batch: Batch, answer: int, lenses: Mapping[str, FittedLens]) -> pd.DataFrame:
    """The words of each lens; of a Jacobian lens also how sure they are."""
    found = {}
    for name, lens in lenses.items():
        how: dict[str, Any] = {"sites": lens.sites, "translators": lens}
        of_answer = logit_lens(model, batch, answer=answer, **how)
        read = lens.read(batch) if isinstance(lens, FittedJacobianLens) else logit_lens(model, batch, **how)
        found[name] = tables.logit_lens(read, of_answer)
    return tables.fitted_lenses(found)


def _candidates(
    answered: _Answered, logits: Float[Tensor, "v"], model: Subject
) -> tuple[Candidate, Candidate | None]:
    """The text, probability and rank of the answer, and of the wrong answer if there is one."""
    tokens = [token for token in (answered.answer, answered.wrong) if token is not None]
    probs = logits.float().softmax(-1)[tokens].tolist()
    ranks = (logits > logits[tokens][:, None]).sum(-1).tolist()
    found = [Candidate(*each) for each in zip(model.text.pieces(tokens), probs, ranks, strict=True)]
    return found[0], found[1] if len(found) > 1 else None
