"""Facts of a file as the data of questions: their prompts with answers, and their subjects where a question asks."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from interp.core.notes import note
from interp.data.ids import OneTokenError
from interp.passes.metrics import Metric, about
from interp.passes.observe import Subject
from interp.passes.question import Askable
from interp.tasks.fact_files import AskedFacts

Q = TypeVar("Q", bound=Askable)


def about_facts(question: Q, facts: AskedFacts, model: Subject) -> Q:
    """The question with the facts' subjects and whole answers, where it has fields for them that are not given.

    A question about one next token is about the first one of each answer, and a note says so.
    """
    if not dataclasses.is_dataclass(question):
        return question
    asked = _with_subjects(question, facts)
    if not facts.several:
        return asked
    whole = _with_answers(asked, facts)
    try:
        if whole is not asked:
            whole.bind(model)
            return whole
    except OneTokenError:
        pass
    if {"answer", "metric"} & {field.name for field in dataclasses.fields(question)}:
        note(facts.first_token_note(question.name))
    return asked


def _with_subjects(question: Q, facts: AskedFacts) -> Q:
    """The question with the facts' subjects, where it has a field for them that is not given; otherwise itself."""
    fields = {field.name for field in dataclasses.fields(question)}  # type: ignore[arg-type]
    if "subject" not in fields or getattr(question, "subject", None) is not None:
        return question
    return dataclasses.replace(question, **{"subject": facts.subjects})  # type: ignore[type-var]


def _with_answers(question: Q, facts: AskedFacts) -> Q:
    """The question, or its metric, with the facts' whole answers, where those of the data would count.

    An answer that is contrasted with a wrong one is compared at one token, their first, as the data say.
    """
    fields = {field.name for field in dataclasses.fields(question)}  # type: ignore[arg-type]
    metric = getattr(question, "metric", None)
    if isinstance(metric, Metric) and (whole := about(metric, facts.answers, facts.wrong)) is not metric:
        return dataclasses.replace(question, **{"metric": whole})  # type: ignore[type-var]
    if "answer" in fields and getattr(question, "answer", None) is None and facts.wrong is None:
        return dataclasses.replace(question, **{"answer": facts.answers})  # type: ignore[type-var]
    return question
