"""An answer that is its own wrong answer is refused wherever answers enter: their difference is 0 by construction."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import interp
from interp.causal.contrast import batches
from interp.data.batch import Batch
from interp.data.ids import check_contrast
from interp.data.pairs import Pairs
from interp.pages.report import ReportQuestion
from tests.tiny import hooked

TEXTS, OTHERS = ["The cat sat on", "The dog sat on"], ["The dog sat on", "The cat sat on"]
ANSWER, WRONG = torch.tensor([5, 7]), torch.tensor([6, 7])
MIXED = r"token 7\) for both for prompt 1: "
"""What is said where the second prompt alone has one token for both."""


def metric() -> interp.metrics.Metric:
    return interp.logit_difference(ANSWER, WRONG)


def brought() -> Batch:
    return replace(hooked().text.batch(TEXTS), answer=ANSWER, wrong=WRONG)


WAYS: dict[str, Callable[[], object]] = {
    "attribute": lambda: interp.attribute(hooked(), TEXTS, ANSWER, WRONG),
    "patch": lambda: interp.patch(hooked(), TEXTS, OTHERS, metric=metric()),
    "attribution_patch": lambda: interp.attribution_patch(hooked(), TEXTS, OTHERS, metric=metric()),
    "ablate": lambda: interp.ablate(hooked(), TEXTS, ["L0H1"], change=interp.edits.Zero(), metric=metric()),
    "token_attribution": lambda: interp.token_attribution(hooked(), TEXTS, ANSWER, WRONG, method="relp"),
    "backward_lens": lambda: interp.backward_lens(hooked(), TEXTS, answer=ANSWER, wrong=WRONG),
    "edge_attribution": lambda: interp.circuits.edge_attribution(hooked(), TEXTS, OTHERS, metric=metric()),
    "answers of the data": lambda: interp.attribute(hooked(), brought()),
}


@pytest.mark.parametrize("way", WAYS)
def test_no_analysis_takes_one_token_as_answer_and_wrong_answer(way: str) -> None:
    with pytest.raises(ValueError, match=MIXED):
        WAYS[way]()


def test_two_spellings_of_one_token_and_one_answer_for_all_are_refused_too() -> None:
    model = hooked()
    token = model.to_single_token(" cat")
    with pytest.raises(ValueError, match=rf"got ' cat' \(token {token}\) for both: their difference is 0"):
        interp.attribute(model, TEXTS, " cat", token)
    with pytest.raises(ValueError, match=r"for both for prompt 0, and for 1 more of 2 prompts"):
        interp.attribute(model, TEXTS, ANSWER, ANSWER)
    with pytest.raises(ValueError, match=r"for both for prompt 1: "):
        interp.attribute(model, TEXTS, 7, [6, 7])


def test_answers_that_differ_everywhere_are_taken() -> None:
    others = WRONG + torch.tensor([0, 1])
    check_contrast(ANSWER, others)
    assert bool((interp.attribute(hooked(), TEXTS, ANSWER, others).total != 0).all())


def test_pairs_with_one_token_for_both_are_set_aside_with_the_reason() -> None:
    data = Pairs(TEXTS, OTHERS, answer=[[5], [7]], wrong=[[6], [7]])
    source = interp.data.Stream(data.source(), hooked().text, tokens_per_batch=64)
    window = source.window(0)
    (rejected,) = window.rejected
    assert rejected.row == 1 and "the answer and the wrong answer are one token" in rejected.reason
    (batch,) = window.batches
    assert batch.row is not None and batch.row.tolist() == [0]


@pytest.mark.kinds  # asked whether they are a source of data, the batches are read, and what that raises is lost
def test_batches_as_they_are_are_looked_at_too() -> None:
    with pytest.raises(ValueError, match="token 7 for both for prompt 1"):
        interp.run([interp.residual.Attribute()], hooked(), [brought()])
    with pytest.raises(ValueError, match="token 7 for both for prompt 1"):
        hooked().text.batch(TEXTS).with_answers(ANSWER, WRONG)


def test_task_pairs_a_report_and_a_cache_refuse_it() -> None:
    model = hooked()
    clean, corrupt = (model.text.batch(texts).tokens for texts in (TEXTS, OTHERS))

    class Given:
        clean_tokens, corrupt_tokens, keep, answer, wrong = clean, corrupt, None, ANSWER, WRONG

    with pytest.raises(ValueError, match="token 7 for both"):
        batches(model, Given())
    with pytest.raises(ValueError, match="must differ"):
        interp.report(model, ReportQuestion(TEXTS[0], " cat", " cat"))
    cache = model.run_with_cache(TEXTS)[1]
    with pytest.raises(ValueError, match="token 7 for both for prompt 1"):
        cache.logit_attrs(cache.decompose_resid(), ANSWER, WRONG)


@pytest.mark.parametrize(("answer", "wrong"), [(" the", " the dog sat"), (" the dog sat", " the")])
def test_an_answer_that_goes_on_from_the_wrong_one_is_refused_however_long_it_is(
    answer: str, wrong: str
) -> None:
    with pytest.raises(
        ValueError, match=f"must differ before one of them ends, got {answer!r} and {wrong!r}"
    ):
        interp.attribute(hooked(), TEXTS[0], answer, wrong)
