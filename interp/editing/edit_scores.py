"""What edits are worth: does the target come, also in other words, and what else changes? One table for all editors.

The layout of the table of Katz et al. 2024 (arXiv:2402.12865), section 6: accuracy is "the argmax is the expected
token", not the comparison of two probabilities of Meng et al. 2022.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from interp.core.results import labelled
from interp.core.stats import Z95, Moments
from interp.data.batch import Batch
from interp.data.text import Prompts
from interp.editing.continuation import Continuation, ngram_entropy
from interp.editing.weight_edit import WeightEdit
from interp.model.loss import next_token_loss, predicted
from interp.model.transformer import Transformer
from interp.passes.observe import Subject

if TYPE_CHECKING:
    import xarray as xr

Question = tuple[str, str | int]
"""A prompt, and the one token that should be its argmax."""
ALWAYS = ("efficacy", "n-gram", "perplexity")
"""Measures that are more than a question; a case's questions have other names."""


@dataclass(frozen=True)
class EditCase:
    """One edit to make, and the questions that tell what it did."""

    prompt: str
    """The prompt to edit on."""
    target: str | int
    """The token to make its argmax; text must be one token."""
    subject: str
    """What the prompt is about, for editors that need it."""
    questions: Mapping[str, tuple[Question, ...]]
    """Measure -> prompts with the token that is right AFTER the edit: the target for a paraphrase, the old answer for a
    neighbour. Efficacy, n-gram entropy and perplexity are added by themselves."""
    openings: tuple[str, ...] = ()
    """Prompts about the subject that the model goes on from, for the n-gram entropy; none = the edited prompt."""

    def __post_init__(self) -> None:
        for measure, each in self.questions.items():
            if measure in ALWAYS or not each:
                raise ValueError(
                    f"a measure requires a prompt, and another name than {', '.join(ALWAYS)}, which are measured by "
                    f"themselves; got {measure!r} with {len(each)} prompts for {self.prompt!r}"
                )


Editor = Callable[[Subject, EditCase], WeightEdit]
"""An editor with its layer and sizes chosen."""


def edit_table(
    model: Subject,
    cases: Sequence[EditCase],
    editors: Mapping[str, Editor],
    *,
    text: Prompts | None = None,
    continuation: Continuation | None = None,
    batch_size: int = 64,
) -> "xr.Dataset":
    """The worth of each editor over single edits, one case at a time, every edit undone before the next.

    Returns Dataset[editor, measure] with `score`, `low`, `high`, and `by_case` [editor, measure, case]; the first
    editor is `original`, no edit. `efficacy`: share of cases whose argmax is the target; every key of `questions`:
    share of prompts whose argmax is the expected token, mean over cases. With a `continuation`, `n-gram`: the
    `ngram_entropy` of the texts that it makes of a case's openings, in bits, mean over texts and cases; every editor
    gets the same dice, every case its own. With `text`, `perplexity`: exp of the mean loss per predicted token,
    geometric mean over cases (one ruined edit does not drown the others).
    Intervals, 95 % over cases: Wilson's for shares (conservative where a case asks several prompts), normal for n-gram
    and for the log of perplexity; `original` has the same text in every case, so its perplexity has no spread.
    Errors: ValueError for no cases, cases that ask different measures, an editor called `original`, and everything an
    editor or the continuation refuses.

    Example:
        >>> from interp.editing.editors import shift_edit
        >>> case = EditCase(prompt, " cat", "John", {"paraphrase": (("John gave a drink to", " cat"),)})
        >>> shift = lambda model, case: shift_edit(model, case.prompt, target=case.target, layer=2, eta=1.0)
        >>> table = edit_table(model, [case], {"shift": shift}, text=prompt)
        >>> table.score.dims
        ('editor', 'measure')
    """
    asked = [_asked(model, case) for case in cases]
    measures = list(asked[0][1]) if asked else []
    if not asked or any(list(spans) != measures for _, spans in asked) or "original" in editors:
        raise ValueError(
            "at least one case, the same measures in all, and no editor called 'original' are required; got "
            f"{len(asked)} cases, measures {sorted({tuple(spans) for _, spans in asked})}, editors {list(editors)}"
        )
    rows = [] if text is None else list(model.text.batch(text).split(batch_size))
    rows_of: dict[str, Editor | None] = {"original": None, **editors}
    pairs = list(zip(cases, asked, strict=True))
    speech = _Speech(model, rows, continuation)
    values = torch.stack([_by_case(speech, pairs, edit, name) for name, edit in rows_of.items()])
    return _labelled(values, list(rows_of), [*measures, *speech.measures])


def wilson(share: Float[Tensor, "*n"], count: int) -> tuple[Float[Tensor, "*n"], Float[Tensor, "*n"]]:
    """A 95 % interval of a share of `count` independent cases (Wilson 1927), inside [0, 1] also at its ends.

    >>> low, high = wilson(torch.tensor([1.0]), 200)
    >>> 0.98 < float(low) < 0.982 and float(high) == 1
    True
    """
    z2 = Z95**2 / count

    def low(share: Tensor) -> Tensor:  # the ends' product is share^2 / (1 + z2): exactly 0 at 0
        root = Z95 * (share * (1 - share) / count + z2 / (4 * count)).sqrt()
        return share.square() / (share + z2 / 2 + root)

    return low(share), 1 - low(1 - share)


@torch.no_grad()
def mean_loss(model: Transformer, batches: Sequence[Batch]) -> Float[Tensor, ""]:
    """Nats per predicted token over all batches, float64."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for batch in batches:
        batch = batch.to(model.device)
        loss = next_token_loss(model(batch.tokens, keep=batch.keep), batch.tokens, batch.keep)
        counted = predicted(batch.keep)
        total += loss.double().sum().cpu()
        count += loss.numel() if counted is None else int(counted.sum())
    return total / count


Asked = tuple[Batch, dict[str, slice]]
"""All prompts of a case as one batch with their expected tokens, and the rows of each measure."""


def _asked(model: Subject, case: EditCase) -> Asked:
    questions = {"efficacy": ((case.prompt, case.target),), **case.questions}
    flat = [question for each in questions.values() for question in each]
    batch = model.text.batch([prompt for prompt, _ in flat])
    expected = model.text.targets([token for _, token in flat], len(flat))
    spans, start = {}, 0
    for name, each in questions.items():
        spans[name] = slice(start, start + len(each))
        start += len(each)
    return batch.with_answers(expected, None).to(model.transformer.device), spans


@dataclass(frozen=True, eq=False)
class _Speech:
    """What is measured on whole texts."""

    model: Subject
    text: Sequence[Batch]
    continuation: Continuation | None

    @property
    def measures(self) -> list[str]:
        """Names, in the order of the numbers."""
        return ["n-gram"] * (self.continuation is not None) + ["perplexity"] * bool(self.text)

    def entropy(self, case: EditCase, turn: int) -> list[Float[Tensor, ""]]:
        """Mean n-gram entropy of the continuations, if there is a rule for them."""
        if self.continuation is None:
            return []
        texts = self.continuation.texts(self.model, case.openings or (case.prompt,), turn=turn)
        return [torch.tensor([ngram_entropy(text) for text in texts], dtype=torch.float64).mean()]

    def loss(self) -> list[Float[Tensor, ""]]:
        """Mean loss on the text, if there is one."""
        return [mean_loss(self.model.transformer, self.text)] if self.text else []


def _by_case(
    speech: _Speech, pairs: Sequence[tuple[EditCase, Asked]], editor: Editor | None, name: str
) -> Float[Tensor, "measure case"]:
    """Shares, n-gram entropy and last the mean loss on the text, of every case."""
    model, columns, unedited = speech.model, [], speech.loss() if editor is None else []
    for turn, (case, (batch, spans)) in enumerate(tqdm(pairs, desc=name, delay=1, leave=False)):
        with nullcontext() if editor is None else editor(model, case).applied(model):
            shares, entropy = _shares(model.transformer, batch, spans), speech.entropy(case, turn)
            loss = unedited if editor is None else speech.loss()
        columns.append(torch.stack([*shares, *entropy, *loss]))
    return torch.stack(columns, 1)


@torch.no_grad()
def _shares(model: Transformer, batch: Batch, spans: Mapping[str, slice]) -> list[Float[Tensor, ""]]:
    """The share of each measure's prompts whose argmax is the expected token."""
    logits = model(batch.tokens, keep=batch.keep, logits_at=batch.last()[:, None])[:, 0]
    hit = (logits.argmax(-1) == batch.answer).double().cpu()
    return [hit[rows].mean() for rows in spans.values()]


def _labelled(
    values: Float[Tensor, "editor measure case"], editors: list[str], measures: list[str]
) -> "xr.Dataset":
    cases, score = values.shape[-1], values.mean(-1)
    low, high = wilson(score, cases)
    normal = [i for i, name in enumerate(measures) if name in ALWAYS[1:]]
    moments = Moments.of(values[:, normal].movedim(-1, 0))
    low[:, normal], high[:, normal] = moments.interval()
    if measures[-1] == "perplexity":
        for of_loss in (score, low, high, values):
            of_loss[:, -1] = of_loss[:, -1].exp()
    dims = ("editor", "measure")
    return labelled(
        "edit_table",
        {
            "score": (dims, score),
            "low": (dims, low),
            "high": (dims, high),
            "by_case": ((*dims, "case"), values),
        },
        coords={"editor": editors, "measure": measures, "case": list(range(cases))},
        attrs={
            "unit": "share of cases; n-gram: bits; perplexity: exp(nats per token)",
            "interval": "95 % over cases: Wilson; n-gram: normal; perplexity: normal in the log",
            "null": "the row `original`: no edit",
            "accuracy": "argmax is the expected token",
        },
    )
