"""What edits are worth: does the answer come, also in other words, and what else changes? One table for all editors.

It is a harness and no question: a question asks one model, in passes that others may share; here every case and editor
makes a model of its own, whose weights are put back before the next. The layout is that of the table of Katz et al.
2024 (arXiv:2402.12865), section 6: accuracy is "the argmax is the expected token", not the comparison of two
probabilities of Meng et al. 2022.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from interp.core.boundary import public
from interp.core.intervals import wilson
from interp.core.results import labelled
from interp.core.stats import Moments, Partial, Rows
from interp.data.batch import Batch
from interp.data.text import Prompts
from interp.data.windows import Feed, prompts_feed
from interp.editing.continuation import Continuation, ngram_entropy
from interp.editing.weight_edit import WeightEdit
from interp.model.loss import next_token_loss, predicted
from interp.model.tap import Trace
from interp.model.transformer import Transformer
from interp.passes.analysis import Analysis
from interp.passes.observe import Model, Subject, as_model, observe
from interp.runs.run import reduced_over

if TYPE_CHECKING:
    import xarray as xr

Check = tuple[str, str | int]
"""A prompt, and the one token that should be its argmax."""
UNITS = {"n-gram": "bits", "perplexity": "exp(nats per token)"}
"""The units of the scores that are no shares of prompts."""
ALWAYS = ("efficacy", *UNITS)
"""Scores that are more than a check; a case's checks have other names."""


@public(renamed={"target": "answer", "questions": "checks"})
@dataclass(frozen=True)
class EditCase:
    """One edit to make, and the checks that tell what it did."""

    prompt: str
    """The prompt to edit on."""
    answer: str | int
    """The token to make its argmax; text must be one token."""
    subject: str
    """What the prompt is about, for editors that need it."""
    checks: Mapping[str, tuple[Check, ...]]
    """Score -> prompts with the token that is right AFTER the edit: the answer for a paraphrase, the old one for a
    neighbour. Efficacy, n-gram entropy and perplexity are added by themselves."""
    openings: tuple[str, ...] = ()
    """Prompts about the subject that the model goes on from, for the n-gram entropy; none = the edited prompt."""

    def __post_init__(self) -> None:
        for score, each in self.checks.items():
            if score in ALWAYS or not each:
                raise ValueError(
                    f"a check requires a prompt, and another name than {', '.join(ALWAYS)}, which are scored by "
                    f"themselves; got {score!r} with {len(each)} prompts for {self.prompt!r}"
                )


Editor = Callable[[Model, EditCase], WeightEdit]
"""An editor with its layer and sizes chosen."""
Bound = Callable[[EditCase], WeightEdit]


@public()
def edit_table(
    model: Model,
    cases: Sequence[EditCase],
    editors: Mapping[str, Editor],
    *,
    text: Prompts | None = None,
    continuation: Continuation | None = None,
    batch_size: int = 64,
) -> xr.Dataset:
    """The worth of each editor over single edits, one case at a time, every edit undone before the next.

    Returns Dataset[editor, score] with `value`, `low`, `high`, `null`, `n` and the coordinate `unit`, and `each`[case,
    editor, score]; the first editor is `original`, no edit, whose value is the `null` of all. Scores: `efficacy`, the
    share of cases whose argmax is the answer; every key of `checks`: the share of prompts whose argmax is the expected
    token, mean over cases. With a `continuation`, `n-gram`: the `ngram_entropy` of the texts that it makes of a case's
    openings, in bits, mean over texts and cases; every editor gets the same random numbers, every case its own. With
    `text`, `perplexity`: exp of the mean loss per predicted token, geometric mean over cases (one ruined edit does not
    drown the others).
    Intervals, 95 % over cases: Wilson's for shares (conservative where a case asks several prompts), Student's t for
    n-gram and for the log of perplexity; `original` has the same text in every case, so its perplexity has no spread.
    Errors: ValueError for no cases, cases with different checks, an editor called `original`, and everything an
    editor or the continuation refuses.

    Example:
        >>> from interp.editing import EditCase, edit_table, shift_edit
        >>> case = EditCase(prompt, " cat", "John", {"paraphrase": (("John gave a drink to", " cat"),)})
        >>> shift = lambda model, case: shift_edit(model, case.prompt, answer=case.answer, layer=2, eta=1.0)
        >>> table = edit_table(model, [case], {"shift": shift}, text=prompt)
        >>> table.value.dims
        ('editor', 'score')
    """
    subject = as_model(model)
    posed = [_posed(subject, case) for case in cases]
    names = list(posed[0][1]) if posed else []
    if not posed or any(list(spans) != names for _, spans in posed) or "original" in editors:
        raise ValueError(
            "at least one case, the same checks in all, and no editor called 'original' are required; got "
            f"{len(posed)} cases, checks {sorted({tuple(spans) for _, spans in posed})}, editors {list(editors)}"
        )
    feed = None if text is None else prompts_feed(text, subject.text, prepend_bos=True, batch_size=batch_size)
    speech, pairs = _Speech(subject, feed, continuation), list(zip(cases, posed, strict=True))
    rows: dict[str, Bound | None] = {"original": None}
    rows |= {name: partial(editor, model) for name, editor in editors.items()}
    values = torch.stack([_by_case(speech, pairs, edit, name) for name, edit in rows.items()])
    return _labelled(values, list(rows), [*names, *speech.scores], [case.prompt for case in cases])


def mean_loss(model: Subject, feed: Feed) -> Float[Tensor, ""]:
    """Nats per predicted token over all prompts, float64."""
    found = reduced_over(Analysis("mean_loss", _losses, Rows, _unlabelled), model, feed)
    assert isinstance(found, Rows)
    return (found.rows["loss"].sum() / found.rows["count"].sum()).cpu()


def _losses(trace: Trace, batch: Batch, model: Transformer) -> Mapping[str, Tensor]:
    """The summed loss of every text, NaN and all, and over how many tokens."""
    loss = next_token_loss(observe(model, batch).output, batch.tokens, batch.keep, batch.documents)
    counted = predicted(batch.keep, batch.documents)
    counted = torch.ones_like(loss, dtype=torch.bool) if counted is None else counted
    loss, real = (torch.nn.functional.pad(x, (1, 0)) for x in (loss.double(), counted))
    return {
        name: batch.by_text(x, real, 0.0).sum(1) for name, x in (("loss", loss), ("count", real.double()))
    }


def _unlabelled(merged: Partial) -> xr.Dataset:
    raise AssertionError("edit_table goes on computing with the sums")


Posed = tuple[Batch, dict[str, slice]]
"""All prompts of a case as one batch with their expected tokens, and the rows of each score."""


def _posed(model: Subject, case: EditCase) -> Posed:
    checks = {"efficacy": ((case.prompt, case.answer),), **case.checks}
    flat = [check for each in checks.values() for check in each]
    batch = model.text.batch([prompt for prompt, _ in flat])
    expected = model.text.targets([token for _, token in flat], len(flat))
    spans, start = {}, 0
    for name, each in checks.items():
        spans[name] = slice(start, start + len(each))
        start += len(each)
    return batch.with_answers(expected, None).to(model.transformer.device), spans


@dataclass(frozen=True, eq=False)
class _Speech:
    """What is measured on whole texts."""

    model: Subject
    text: Feed | None
    continuation: Continuation | None

    @property
    def scores(self) -> list[str]:
        """Names, in the order of the numbers."""
        return ["n-gram"] * (self.continuation is not None) + ["perplexity"] * (self.text is not None)

    def entropy(self, case: EditCase, turn: int) -> list[Float[Tensor, ""]]:
        """Mean n-gram entropy of the continuations, if there is a rule for them."""
        if self.continuation is None:
            return []
        texts = self.continuation.texts(self.model, case.openings or (case.prompt,), turn=turn)
        return [torch.tensor([ngram_entropy(text) for text in texts], dtype=torch.float64).mean()]

    def loss(self) -> list[Float[Tensor, ""]]:
        """Mean loss on the text, if there is one."""
        return [] if self.text is None else [mean_loss(self.model, self.text)]


def _by_case(
    speech: _Speech, pairs: Sequence[tuple[EditCase, Posed]], editor: Bound | None, name: str
) -> Float[Tensor, "score case"]:
    """Shares, n-gram entropy and last the mean loss on the text, of every case."""
    model, columns, unedited = speech.model, [], speech.loss() if editor is None else []
    for turn, (case, (batch, spans)) in enumerate(tqdm(pairs, desc=name, delay=1, leave=False)):
        with nullcontext() if editor is None else editor(case).applied(model):
            shares, entropy = _shares(model.transformer, batch, spans), speech.entropy(case, turn)
            loss = unedited if editor is None else speech.loss()
        columns.append(torch.stack([*shares, *entropy, *loss]))
    return torch.stack(columns, 1)


@torch.no_grad()
def _shares(model: Transformer, batch: Batch, spans: Mapping[str, slice]) -> list[Float[Tensor, ""]]:
    """The share of each score's prompts whose argmax is the expected token."""
    logits = model(batch.tokens, keep=batch.keep, logits_at=batch.last()[:, None])[:, 0]
    hit = (logits.argmax(-1) == batch.answer).double().cpu()
    return [hit[rows].mean() for rows in spans.values()]


def _labelled(
    values: Float[Tensor, "editor score case"], editors: list[str], names: list[str], prompts: list[str]
) -> xr.Dataset:
    cases, mean = values.shape[-1], values.mean(-1)
    low, high = wilson(mean * cases, cases)
    normal = [i for i, name in enumerate(names) if name in UNITS]
    low[:, normal], high[:, normal] = Moments.of(values[:, normal].movedim(-1, 0)).interval()
    if names[-1] == "perplexity":
        for of_loss in (mean, low, high, values):
            of_loss[:, -1] = of_loss[:, -1].exp()
    dims, chance = ("editor", "score"), mean[:1].expand_as(mean)
    units = [UNITS.get(name, "share of prompts") for name in names]
    found = {"value": mean, "low": low, "high": high, "null": chance, "n": torch.full(mean.shape, cases)}
    return labelled(
        "edit_table",
        {**{name: (dims, x) for name, x in found.items()}, "each": (("case", *dims), values.movedim(-1, 0))},
        coords={
            "editor": editors, "score": names, "unit": ("score", units), "case": range(cases),
            "prompt": ("case", prompts),
        },
        units="see the coordinate unit",
        attrs={
            "interval": "95 % over cases: Wilson; n-gram: Student's t; perplexity: Student's t in the log",
            "null": "the row `original`: no edit",
            "accuracy": "argmax is the expected token",
        },
    )  # fmt: skip
