"""Questions about one next token, asked of an answer of several tokens: once for each of its tokens.

Token j of an answer is the next token of the prompt followed by the tokens before it (teacher forcing). So every number
means what it means for an answer of one token, and the log-probabilities of the tokens sum to that of the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import TYPE_CHECKING

from interp.core.stats import Partial, Rows
from interp.data.batch import Batch
from interp.data.text import Text
from interp.model.transformer import Transformer
from interp.passes.needs import Steps
from interp.passes.question import ByRow, Values

if TYPE_CHECKING:
    import xarray as xr

TOKEN = "answer_token"
"""The dimension over the tokens of an answer."""


def by_answer_token(
    question: ByRow, text: Text, together: Callable[[Transformer, Batch], Steps[Values] | None] | None = None
) -> ByRow:
    """The question with the dimension `answer_token` in its result, if answers are of several tokens.

    Prompts with fewer tokens in their answer have NaN (integers -1, texts "") after them. The coordinate `answer` has
    the text of every token. An answer that is contrasted with a wrong one is compared at one token, and gets no
    such dimension.

    Args:
        question: a bound question whose values are of the answer's last token, and which keeps every row.
        text: the model's vocabulary.
        together: a quicker way to the values `[b k ...]` for all tokens of the answers, from rows followed by their
            answers; None from it, or in its place, where a row is computed for each token.
    """
    if question.answers is None or not question.answers.several:
        return question
    rows = partial(_token_by_token, rows=question.rows, together=together)
    return replace(question, rows=rows, result=partial(_joined, result=question.result, text=text))


def _token_by_token(
    model: Transformer,
    batch: Batch,
    rows: Callable[[Transformer, Batch], Steps[Values]],
    together: Callable[[Transformer, Batch], Steps[Values] | None] | None,
) -> Steps[Values]:
    """The values for each token of the answers, `[b k ...]`, with the tokens' ids, -1 after an answer's last."""
    tokens, present = batch.answer_tokens()
    at_once = None if together is None else together(model, batch)
    if at_once is not None:
        by_token = dict((yield from at_once))
        return {**by_token, TOKEN: tokens.masked_fill(~present, -1)}
    values = yield from rows(model, batch.by_answer_token())
    by_token = {name: x.unflatten(0, tuple(tokens.shape)) for name, x in values.items()}
    return {**by_token, TOKEN: tokens.masked_fill(~present, -1)}


def _joined(kept: Partial, result: Callable[[Partial], xr.Dataset], text: Text) -> xr.Dataset:
    """The results of the answers' first tokens, of their second ones, ..., along `answer_token`."""
    import xarray as xr

    assert isinstance(kept, Rows)
    values = dict(kept.rows)
    tokens = values.pop(TOKEN)
    numbers = range(len(tokens)) if kept.ids is None else kept.ids.tolist()
    parts = []
    for j in range(tokens.shape[1]):
        there = (tokens[:, j] >= 0).nonzero()[:, 0]
        rows = Rows({name: x[there, j] for name, x in values.items()})
        parts.append(result(rows).assign_coords(prompt=[numbers[i] for i in there.tolist()]))
    missing = {name: _missing(x) for part in parts for name, x in part.variables.items()}
    joined = xr.concat(
        [part.drop_vars("token", errors="ignore") for part in parts], TOKEN, join="outer", fill_value=missing,
        combine_attrs=_combined, data_vars="all", coords="minimal", compat="override",
    )  # fmt: skip
    joined = joined.reindex(prompt=list(numbers), fill_value=missing).transpose("prompt", TOKEN, ...)
    longest = [part["token"] for part in parts if "token" in part.coords]
    if longest:  # the longest row of a prompt begins with all others of it
        joined = joined.assign_coords(token=reduce(_last_of_each_prompt, longest))
    words = text.of_outputs.words(tokens.numpy())
    return joined.assign_coords(answer=(("prompt", TOKEN), words), answer_token=range(tokens.shape[1]))


def _last_of_each_prompt(earlier: xr.DataArray, later: xr.DataArray) -> xr.DataArray:
    """The rows of `later`, and those of `earlier` for prompts that it does not have."""
    return later.reindex(prompt=earlier.prompt).where(earlier.prompt.isin(later.prompt), earlier)


def _missing(values: xr.Variable) -> object:
    """What stands for a value that is missing: NaN, -1 of integers, "" of texts."""
    return {"i": -1, "u": 0, "b": False, "f": float("nan"), "c": float("nan")}.get(values.dtype.kind, "")


def _combined(every: Sequence[Mapping[str, object]], context: object = None) -> dict[str, object]:
    """The attributes of several results as those of one: of numbers that differ the largest, of notes all."""
    combined: dict[str, object] = {}
    for name in dict.fromkeys(name for attrs in every for name in attrs):
        values = list(dict.fromkeys(_hashable(attrs[name]) for attrs in every if name in attrs))
        if len(values) == 1:
            combined[name] = next(attrs[name] for attrs in every if name in attrs)
        elif all(isinstance(value, int | float) for value in values):
            combined[name] = max(values)  # type: ignore[type-var]
        elif all(isinstance(value, tuple) for value in values):
            combined[name] = list(dict.fromkeys(item for value in values for item in value))  # type: ignore[attr-defined]
    return combined


def _hashable(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value
