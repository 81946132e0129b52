"""What every question asks of an accelerator, counted on one that is simulated (`tests/contract/simulated.py`).

An accelerator starves where the host waits for it, or sends it many small operators. The counts of every question stand
in `device.csv`; one that grows by more than 15 % fails here.
"""

import shlex

import pytest

from interp.passes.question import Question
from tests.contract.case import discovered
from tests.contract.cases import CASES
from tests.contract.device import FUNCTIONS, QUESTIONS, Counts, known, measured, page_waits

GROWTH = 1.15
MOST_WAITS = 8
"""Waits of one question or function, whatever it runs on one batch of data."""


@pytest.fixture(scope="module")
def today() -> dict[str, Counts]:
    """Of every name; each ran on tensors of one device alone, or it had failed."""
    return measured()


def test_every_question_and_function_is_in_the_table() -> None:
    counted, every = list(known()), [*QUESTIONS, *FUNCTIONS]
    left = [name for name in every if name not in counted]
    assert not left, (
        "tests/contract/device.csv lacks lines, which this adds: python -m tests.contract.device "
        f"{' '.join(map(shlex.quote, left))}"
    )
    assert counted == every, (
        "what is gone, or in another order: `python -m tests.contract.device` renews the table"
    )
    asked = {
        type(question)
        for case in CASES.values()
        if isinstance(question := case.question_for(case.models[0]), Question)
    }
    assert asked <= set(discovered())


@pytest.mark.slow
def test_no_question_asks_more_of_a_device_than_before(today: dict[str, Counts]) -> None:
    grown = {
        f"{name}: {kind} {was} -> {now}"
        for name, counts in known().items()
        for kind, was, now in zip(Counts._fields, counts, today[name], strict=True)
        if now > GROWTH * was
    }
    assert not grown, (
        f"{len(grown)} counts grew by more than 15 %: {'; '.join(sorted(grown))}. "
        "`python -m tests.contract.device places NAME` says which lines ask; "
        "where it is worth it, `python -m tests.contract.device` renews the table"
    )


@pytest.mark.slow
def test_a_page_with_a_corrupted_prompt_waits_at_most_42_times() -> None:
    first, again = page_waits()
    assert first <= 42 and again <= 27  # again: what is made of weights alone is kept


@pytest.mark.slow
def test_no_question_waits_often_on_one_batch(today: dict[str, Counts]) -> None:
    allowed = {
        "TokenAttribution integrated_gradients": 40,  # each round of gradients decides on the next
        **dict.fromkeys(
            ("AttributionPatch", "AttributionPatch heads"), 12
        ),  # a sweep for each of four prompts
        "AverageIndirectEffect": 12,  # eight sets of lists: two tasks, four kinds of lists
        "FunctionVectors": 20,  # four sets of prompts more, of two tasks and two settings
        "LinearRelation": 12,  # a prompt of each example alone
        "FittingSites": 12,  # whether the weights are finite, of each dictionary with another norm's gain in it
        "FeatureCards": 20,  # two passes, and at the end the tables of each kind, once
        "FeatureCards effects": 30,  # a third pass, in which the listed entries are looked up
    }
    often = {
        name: counts.waits for name, counts in today.items() if counts.waits > allowed.get(name, MOST_WAITS)
    }
    assert not often, "`python -m tests.contract.device places NAME` says which lines ask"
