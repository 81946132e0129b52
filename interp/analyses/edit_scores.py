"""What edits are worth: does the target come, also in other words, and what else changes? One table for all editors.

The layout of the table of Katz et al. 2024 (arXiv:2402.12865), section 6: accuracy is "the argmax is the expected
token", not the comparison of two probabilities of Meng et al. 2022.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from interp.analyses.weight_edit import WeightEdit
from interp.core.results import labelled
from interp.core.stats import Z95, Moments
from interp.engine.batch import Batch
from interp.engine.observe import Subject
from interp.engine.text import Prompts
from interp.model.loss import next_token_loss, predicted
from interp.model.transformer import Transformer

if TYPE_CHECKING:
    import xarray as xr

Question = tuple[str, str | int]
"""A prompt, and the one token that should be its argmax."""


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
    neighbour. The measures `efficacy` and `perplexity` are added by themselves."""

    def __post_init__(self) -> None:
        for measure, each in self.questions.items():
            if measure in ("efficacy", "perplexity") or not each:
                raise ValueError(
                    "a measure requires a prompt, and another name than efficacy and perplexity, which are always "
                    f"measured; got {measure!r} with {len(each)} prompts for {self.prompt!r}"
                )


Editor = Callable[[Subject, EditCase], WeightEdit]
"""An editor with its layer and sizes chosen."""


def edit_table(
    model: Subject,
    cases: Sequence[EditCase],
    editors: Mapping[str, Editor],
    *,
    text: Prompts | None = None,
    batch_size: int = 64,
) -> "xr.Dataset":
    """The worth of each editor over single edits, one case at a time, every edit undone before the next.

    Returns Dataset[editor, measure] with `score`, `low`, `high`, and `by_case` [editor, measure, case]; the first
    editor is `original`, no edit. `efficacy`: share of cases whose argmax is the target; every key of `questions`:
    share of prompts whose argmax is the expected token, mean over cases. With `text`, `perplexity`: exp of the mean
    loss per predicted token, geometric mean over cases (one ruined edit does not drown the others).
    Intervals, 95 % over cases: Wilson's for shares (conservative where a case asks several prompts), normal in the log
    for perplexity; `original` has the same text in every case, so its perplexity has no spread.
    Errors: ValueError for no cases, cases that ask different measures, an editor called `original`, and everything an
    editor refuses.

    Example:
        >>> from interp.analyses.editing import shift_edit
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
    values = torch.stack([_by_case(model, pairs, rows, edit, name) for name, edit in rows_of.items()])
    return _labelled(values, list(rows_of), [*measures, *(["perplexity"] if rows else [])])


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


def _by_case(
    model: Subject,
    pairs: Sequence[tuple[EditCase, Asked]],
    text: Sequence[Batch],
    editor: Editor | None,
    name: str,
) -> Float[Tensor, "measure case"]:
    """Shares and, if there is a text, last its mean loss, of every case."""
    network, columns = model.transformer, []
    unedited = [mean_loss(network, text)] if text else []
    for case, (batch, spans) in tqdm(pairs, desc=name, delay=1, leave=False):
        if editor is None:
            columns.append(torch.stack([*_shares(network, batch, spans), *unedited]))
            continue
        with editor(model, case).applied(model):
            after = [mean_loss(network, text)] if text else []
            columns.append(torch.stack([*_shares(network, batch, spans), *after]))
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
    cases = values.shape[-1]
    score = values.mean(-1)
    low, high = wilson(score, cases)
    if measures[-1] == "perplexity":
        moments = Moments.of(values[:, -1].mT)
        ends = (score, low, high)
        for end, of_loss in zip(ends, (moments.mean, *moments.interval()), strict=True):
            end[:, -1] = of_loss.exp()
        values = torch.cat((values[:, :-1], values[:, -1:].exp()), 1)
    dims = ("editor", "measure")
    return labelled(
        {
            "score": (dims, score),
            "low": (dims, low),
            "high": (dims, high),
            "by_case": ((*dims, "case"), values),
        },
        coords={"editor": editors, "measure": measures, "case": list(range(cases))},
        attrs={
            "unit": "share of cases; perplexity: exp(nats per token)",
            "interval": "95 % over cases: Wilson; perplexity: normal in the log",
            "null": "the row `original`: no edit",
            "accuracy": "argmax is the expected token",
        },
    )
