"""Facts of a file as the data of questions: their prompts with answers, and their subjects where a question asks."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from interp.passes.question import Askable
from interp.tasks.fact_files import AskedFacts

Q = TypeVar("Q", bound=Askable)


def with_subjects(question: Q, facts: AskedFacts) -> Q:
    """The question with the facts' subjects, where it has a field for them that is not given; otherwise itself."""
    if not dataclasses.is_dataclass(question):
        return question
    fields = {field.name for field in dataclasses.fields(question)}
    if "subject" not in fields or getattr(question, "subject", None) is not None:
        return question
    return dataclasses.replace(question, **{"subject": facts.subjects})
