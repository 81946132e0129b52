"""Scores of edits: does the answer come, also in other words, does the model still speak, and what else changes?

One table for all editors. It is a function and not a `Question`, whose passes other questions may share: here every
case and editor changes the weights, which are restored before the next. The layout is that of the table of Katz et al.
2024 (arXiv:2402.12865), section 6: accuracy is "the argmax is the expected token", not the comparison of two
probabilities of Meng et al. 2022. Its column "n-gram" is the "fluency" of ROME (arXiv:2202.05262, after Zhang et al.
2018): a model that an edit has broken repeats the same few words. Varied nonsense scores well there, but raises the
perplexity of a text.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from interp.core.boundary import public
from interp.core.kinds import PositiveCount
from interp.core.results import labelled
from interp.core.stats import POSITIVE, Moments, Rows, if_at_least, upcast
from interp.data.batch import Batch, Prompts
from interp.data.stream import DataSource, prompt_source
from interp.editing.editors import edit_batch
from interp.editing.weight_edit import WeightEdit
from interp.model.loss import next_token_loss
from interp.model.transformer import Transformer
from interp.passes.generate import generate
from interp.passes.needs import Steps, recorded
from interp.passes.observe import Model, Subject, as_model, as_network, text_of
from interp.passes.question import ByRow, Values
from interp.passes.sampling import Sampling
from interp.runs.over_data import reduced_over
from interp.runs.provenance import with_origin

if TYPE_CHECKING:
    import xarray as xr

Check = tuple[str, str | int]
"""A prompt, and the one token that should be its argmax."""
UNITS = {"n-gram": "bits", "perplexity": "exp(nats per token)"}
"""Units of the scores that are not shares of prompts."""
FEWEST_CASES = 1024
"""Fewest cases for an interval of perplexity (`docs/intervals.md`)."""
WEIGHTS = {2: 1 / 3, 3: 2 / 3}
"""Weights of the entropies of bigrams and trigrams: the mean of 2/3 and 4/3 of them, as in ROME's code."""
_WORD = re.compile(r"\w+|[^\w\s]")
ALWAYS = ("efficacy", *UNITS)
"""Scores that every case has; a case's checks have other names."""


@public()
@dataclass(frozen=True)
class Continuation:
    """How texts are generated from openings, for their n-gram entropy. The defaults are those of ROME's code."""

    length: PositiveCount = 100
    """Tokens of a text, its opening included."""
    top_k: PositiveCount = 5
    """Every token is drawn from the k most probable ones."""
    seed: int = 0
    """Seed of the generator of random numbers."""

    @public()
    def texts(self, model: Model, openings: Sequence[str], *, turn: int = 0) -> list[str]:
        """Every opening with the model's continuation, `length` tokens together.

        Tokens that begin or end a text do not stop it, and are left out of it.

        Args:
            openings: the beginnings of the texts.
            turn: added to the seed.

        Raises:
            ValueError: no openings, an opening that fills the length, or more than the context holds.

        Example:
            >>> (text,) = Continuation(length=20, top_k=1).texts(model, [prompt])
            >>> text.startswith(prompt)
            True
        """
        if not openings:
            raise ValueError("openings must be texts, one at least, got none")
        text = text_of(model)
        batch = text.batch(list(openings))
        if not int(batch.lengths.max()) < self.length:
            raise ValueError(
                f"openings shorter than {self.length} tokens are required, the longest has "
                f"{int(batch.lengths.max())}"
            )
        sampling = Sampling(top_k=self.top_k, seed=self.seed + turn)
        more = self.length - int(batch.lengths.min())
        generated = generate(as_network(model), batch, more, sampling=sampling)
        silent = (text.bos_id, text.eos_id)
        rows = (
            row[real][: self.length].tolist()
            for row, real in zip(generated.tokens, generated.real, strict=True)
        )
        return [text.tokenizer.decode([i for i in row if i not in silent]) for row in rows]


@public(renamed={"target": "answer", "questions": "checks"})
@dataclass(frozen=True)
class EditCase:
    """One edit to make, and the checks of what it did."""

    prompt: str
    """The prompt to edit on."""
    answer: str | int
    """What it should give: the token to make its argmax, of several tokens each after those before it."""
    subject: str
    """The entity that the prompt is about, for editors that need it."""
    checks: Mapping[str, tuple[Check, ...]]
    """Score -> prompts with the token that is right AFTER the edit: the answer for a paraphrase, the old one for a
    neighbour. Efficacy, n-gram entropy and perplexity are added by themselves."""
    openings: tuple[str, ...] = ()
    """Prompts about the subject that the model continues, for the n-gram entropy; none = the edited prompt."""

    def __post_init__(self) -> None:
        for score, prompts in self.checks.items():
            if score in ALWAYS or not prompts:
                raise ValueError(
                    f"a check requires a prompt, and another name than {', '.join(ALWAYS)}, which are scored by "
                    f"themselves; got {score!r} with {len(prompts)} prompts for {self.prompt!r}"
                )


Editor = Callable[[Model, EditCase], WeightEdit | Sequence[WeightEdit]]
"""A function from a model and a case to the change, or several that belong together; layers and sizes are chosen."""


@public()
def edit_table(
    model: Model,
    cases: Sequence[EditCase],
    editors: Mapping[str, Editor],
    *,
    text: Prompts | None = None,
    continuation: Continuation | None = None,
    batch_size: PositiveCount = 64,
) -> xr.Dataset:
    """Compare editors over single edits: does the answer come, also in other words, and what else changes?

    One case at a time, every edit undone before the next.

    Args:
        cases: edits to make, with their checks; all cases have the same names of checks.
        editors: by name, functions from a model and a case to the change, or several that belong together.
        text: prompts for `perplexity`; None: without it.
        continuation: how texts are generated for `n-gram`; None: without it.
        batch_size: the most rows of a pass over `text`.

    Returns:
        Dataset[editor, score] with the coordinate `unit`; the first editor is `original`, no edit.

        - `value`: the score. `efficacy`: share of cases whose argmax is the answer. Every key of `checks`: share of
          prompts whose argmax is the expected token, mean over cases. `n-gram`, with a `continuation`: `ngram_entropy`
          of the texts made of a case's openings, in bits, mean over texts and cases; every editor gets the same random
          numbers, every case its own. `perplexity`, with `text`: exp of the mean loss per predicted token, geometric
          mean over cases (one ruined edit does not drown the others).
        - `low`, `high`: 95 % over cases: Gaffke's for shares, Student's t for n-gram, and for the log of perplexity
          from 1 024 cases on: where few edits ruin the model no interval of fewer cases holds the mean, so it is NaN.
          `original` has the same text in every case, so its perplexity has no spread.
        - `null`: the value of `original`.
        - `n`: number of cases.
        - `each` [case, editor, score]: the score of every case.

    Raises:
        ValueError: no cases, cases with different checks, an editor called `original`, and everything an editor or the
            continuation refuses.

    Source:
        Katz et al. 2024 (arXiv:2402.12865), section 6: accuracy is "the argmax is the expected token". The n-gram
        entropy is the fluency of ROME (arXiv:2202.05262).

    See Also:
        `shift_edit`, `gradient_edit`, `finetune_edit`, `rome_edit`, `memit_edit`, `mend_edit`: editors.

    Example:
        >>> from interp.editing import EditCase, edit_table, shift_edit
        >>> case = EditCase(prompt, " cat", "John", {"paraphrase": (("John gave a drink to", " cat"),)})
        >>> shift = lambda model, case: shift_edit(model, case.prompt, answer=case.answer, layer=2, eta=1.0)
        >>> table = edit_table(model, [case], {"shift": shift}, text=prompt)
        >>> table.value.dims
        ('editor', 'score')
    """
    subject = as_model(model)
    case_batches = [_CaseBatch.of(subject, case) for case in cases]
    names = list(case_batches[0].spans) if case_batches else []
    if (
        not case_batches
        or any(list(case_batch.spans) != names for case_batch in case_batches)
        or "original" in editors
    ):
        raise ValueError(
            "at least one case, the same checks in all, and no editor called 'original' are required; got "
            f"{len(case_batches)} cases, checks {sorted({tuple(case_batch.spans) for case_batch in case_batches})}, "
            f"editors {list(editors)}"
        )
    source = None if text is None else prompt_source(text, subject.text, batch_size=batch_size)
    names += ["n-gram"] * (continuation is not None) + ["perplexity"] * (text is not None)
    before = [] if source is None else [mean_loss(subject, source)]

    def by_case(name: str, editor: Editor | None) -> Float[Tensor, "score case"]:
        columns = []
        for turn, case_batch in enumerate(tqdm(case_batches, desc=name, delay=1, leave=False)):
            with _with_edits([] if editor is None else editor(model, case_batch.case), subject):
                numbers = case_batch.shares(subject.transformer)
                if continuation is not None:
                    numbers.append(case_batch.entropy(subject, continuation, turn))
                numbers += before if editor is None or source is None else [mean_loss(subject, source)]
            columns.append(torch.stack(numbers))
        return torch.stack(columns, 1)

    rows = [by_case("original", None), *(by_case(name, editor) for name, editor in editors.items())]
    prompts = [case.prompt for case in cases]
    table = labelled_scores(torch.stack(rows), ["original", *editors], names, prompts)
    return with_origin(table, subject.transformer)


@contextmanager
def _with_edits(edits: WeightEdit | Sequence[WeightEdit], model: Subject) -> Iterator[None]:
    """Context in which all given edits are applied to the model."""
    with ExitStack() as stack:
        for edit in [edits] if isinstance(edits, WeightEdit) else edits:
            stack.enter_context(edit.applied(model))
        yield


def mean_loss(model: Subject, source: DataSource) -> Float[Tensor, ""]:
    """Nats per predicted token over all prompts, float64."""
    merged = reduced_over(ByRow("mean_loss", _losses, Rows), model, source)
    assert isinstance(merged, Rows)
    return (merged.rows["loss"].sum() / merged.rows["count"].sum()).cpu()


@torch.no_grad()
def _losses(model: Transformer, batch: Batch) -> Steps[Values]:
    """The summed next-token loss of every text (NaN is kept) and its number of predicted tokens."""
    stream = (yield from recorded(batch, [], final=True)).end
    logits = model.read_out(upcast(stream))
    loss = next_token_loss(logits, batch.tokens, batch.keep, batch.documents)
    counted = batch.predicted
    counted = torch.ones_like(loss, dtype=torch.bool) if counted is None else counted
    loss, real = (torch.nn.functional.pad(x, (1, 0)) for x in (loss.double(), counted))
    return {
        name: batch.by_text(x, real, 0.0).sum(1) for name, x in (("loss", loss), ("count", real.double()))
    }


@dataclass(frozen=True, eq=False)
class _CaseBatch:
    """A case as one batch of all its prompts with their expected answers, and the rows of the batch for each score."""

    case: EditCase
    batch: Batch
    spans: Mapping[str, slice]

    @classmethod
    def of(cls, model: Subject, case: EditCase) -> _CaseBatch:
        """The edited prompt, then every check."""
        checks = {"efficacy": ((case.prompt, case.answer),), **case.checks}
        flat = [check for group in checks.values() for check in group]
        batch = edit_batch(model, [prompt for prompt, _ in flat], [answer for _, answer in flat])
        ends = list(accumulate(map(len, checks.values())))
        spans = map(slice, [0, *ends], ends)
        return cls(case, batch, dict(zip(checks, spans, strict=True)))

    @torch.no_grad()
    def shares(self, model: Transformer) -> list[Float[Tensor, ""]]:
        """The share of each score's prompts whose argmax is the expected token, for every token of the answer."""
        batch = self.batch
        logits = model(batch.tokens, logits_at=batch.answer_columns(), **batch.inputs)
        hit = batch.is_answer(logits.argmax(-1)).all(1).double().cpu()
        return [hit[rows].mean() for rows in self.spans.values()]

    def entropy(self, model: Subject, continuation: Continuation, turn: int) -> Float[Tensor, ""]:
        """Mean n-gram entropy of the continuations."""
        texts = continuation.texts(model, self.case.openings or (self.case.prompt,), turn=turn)
        return torch.tensor([ngram_entropy(text) for text in texts], dtype=torch.float64).mean()


def labelled_scores(
    values: Float[Tensor, "editor score case"], editors: list[str], names: list[str], prompts: list[str]
) -> xr.Dataset:
    """The table of `edit_table` from the scores of every case; of perplexity, its logarithm."""
    cases, mean = values.shape[-1], values.mean(-1)
    low, high = torch.empty_like(mean), torch.empty_like(mean)
    for i, name in enumerate(names):
        moments = Moments.of(values[:, i].mT)
        low[:, i], high[:, i] = moments.interval(share=name not in UNITS, within=POSITIVE)
    if names[-1] == "perplexity" and cases < FEWEST_CASES:
        low[:, -1] = high[:, -1] = torch.nan
    if names[-1] == "perplexity":
        for of_loss in (mean, low, high, values):
            of_loss[:, -1] = of_loss[:, -1].exp()
    dims, chance = ("editor", "score"), mean[:1].expand_as(mean)
    units = [UNITS.get(name, "share of prompts") for name in names]
    variables = {"value": mean, "low": low, "high": high, "null": chance, "n": torch.full(mean.shape, cases)}
    return labelled(
        "edit_table",
        {**{name: (dims, x) for name, x in variables.items()}, "each": (("case", *dims), values.movedim(-1, 0))},
        coords={
            "editor": editors, "score": names, "unit": ("score", units), "case": range(cases),
            "prompt": ("case", prompts),
        },
        units="see the coordinate unit",
        attrs={
            "interval": "95 % over cases: Gaffke; n-gram: Student's t; perplexity: Student's t in the log, "
            f"{if_at_least(FEWEST_CASES)}",
            "null": "the row `original`: no edit",
            "accuracy": "argmax is the expected token",
        },
    )  # fmt: skip


@public()
def ngram_entropy(text: str) -> float:
    """N-gram entropy of a text, which says how varied it is: H_2 / 3 + 2 H_3 / 3.

    H_n = -sum_w f(w) log2 f(w) over its n-grams w of words, f(w) the share of w among the text's n-grams. Words are
    runs of letters and digits; every other visible character is one too (ROME: NLTK's, which differ in contractions).

    Args:
        text: the text.

    Returns:
        Bits. 0 for a text of one word over and over, or too short for n-grams; log2 of the number of words, nearly,
        where nothing repeats. Papers print it times 100: GPT-2 XL has 6.27 bits.

    Caveat:
        Comparable between texts of one length only.

    Source:
        Meng et al. 2022, ROME (arXiv:2202.05262), there "fluency", after Zhang et al. 2018.

    Example:
        >>> ngram_entropy("no no no no")
        0.0
        >>> round(ngram_entropy("so be it."), 3)  # four words, three bigrams, two trigrams: log2(3) / 3 + 2 log2(2) / 3
        1.195
    """
    words = _WORD.findall(text)
    return sum(
        weight * _entropy(Counter(zip(*(words[i:] for i in range(n)), strict=False)))
        for n, weight in WEIGHTS.items()
    )


def _entropy(counts: Counter[tuple[str, ...]]) -> float:
    total = counts.total()
    return math.fsum(-c / total * math.log2(c / total) for c in counts.values())
