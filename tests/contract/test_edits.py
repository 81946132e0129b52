"""Every question is asked of the edited model: a zeroed head is a head whose rows of W_O are zero, or is refused."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import xarray as xr

import interp
from interp import Edit, HookedTransformer
from interp.circuits import Circuit
from interp.edits import Zero
from interp.lenses import FittedJacobianLens
from interp.model import Transformer
from interp.passes.question import Askable, Question
from tests.configs import build
from tests.contract.case import Case, agree, by_hand, called
from tests.contract.cases import CASES, as_scored
from tests.tolerances import assert_close

Answer = xr.Dataset | Circuit | FittedJacobianLens
HEADS = ("L0H1", "L1H1")
OF_WEIGHTS = [
    name for name, case in CASES.items() if getattr(case.question_for(case.models[0]), "of_weights", False)
]
OF_ACTIVATIONS = [name for name in CASES if name not in OF_WEIGHTS]


def answer(
    case: Case, question: Askable, network: Transformer, model: str, batch_of: Transformer
) -> xr.Dataset:
    """What the plain loop gives about the rows of one model."""
    return by_hand(question, network, [] if case.alone else [case.batch(model, batch_of).numbered()])


def ways(case: Case, model: str, head: str, rows_of: Transformer) -> Iterator[Answer]:
    """The question about the model without a head, in both spellings of that."""
    edits, hooked, question = [Edit(head, Zero())], HookedTransformer(build(model)), case.question_for(model)
    batch = None if case.alone else case.batch(model, rows_of)
    if not isinstance(question, Question):
        yield answer(case, question, build(model).edited(edits), model, rows_of)
        return
    with hooked.hooks(edits=edits):
        yield called(question, hooked, batch)
    yield called(question, hooked.edited(edits), batch)


@pytest.mark.parametrize("case", OF_ACTIVATIONS)
def test_a_zeroed_head_is_a_head_that_writes_nothing_or_is_refused(case: str) -> None:
    its, model = CASES[case], CASES[case].models[0]
    question, told = its.question_for(model), False
    for head in HEADS:
        other = its.silent(model, *map(int, head[1:].split("H")))
        if its.refuses is not None:
            for i in range(2):
                with pytest.raises(ValueError, match=its.refuses.format(head=head)):
                    next(way for j, way in enumerate(ways(its, model, head, other)) if j == i)
            continue
        plain, expected = (answer(its, question, each, model, other) for each in (build(model), other))
        spelled = ways(its, model, head, other)
        first, *others = spelled if head == HEADS[0] else [next(spelled)]
        if isinstance(first, Circuit):
            assert as_scored(first) == as_scored(Circuit.of_result(expected, model=first.model))
            assert all(each == first for each in others)
            told |= as_scored(first) != as_scored(Circuit.of_result(plain, model=first.model))
            continue
        if isinstance(first, FittedJacobianLens):
            found, before = (FittedJacobianLens.of_result(x, first.model).jacobian for x in (expected, plain))
            assert_close(first.jacobian, found)
            told |= not torch.allclose(found, before)
            continue
        assert isinstance(first, xr.Dataset)
        agree(its.of_others(first, head), its.of_others(expected, head))
        for way in others:
            xr.testing.assert_identical(way, first)
        told |= not same(first, plain)
    assert told or its.refuses is not None, "an edit that nobody honours would go unseen"


def same(one: xr.Dataset, other: xr.Dataset) -> bool:
    """Whether all numbers are those of the other."""
    numbers = [name for name, x in one.data_vars.items() if x.dtype.kind in "fiub"]
    return all(np.allclose(one[n], other[n], rtol=1e-6, atol=1e-9, equal_nan=True) for n in numbers)


@pytest.mark.parametrize("case", OF_WEIGHTS)
def test_weights_are_what_they_are_under_edits_of_activations(case: str) -> None:
    model = CASES[case].models[0]
    question, hooked, edits = (
        CASES[case].record(model),
        HookedTransformer(build(model)),
        [Edit("L0H1", Zero())],
    )
    batch = None if CASES[case].alone else CASES[case].batch(model)
    plain = called(question, hooked, batch)
    with hooked.hooks(edits=edits):
        xr.testing.assert_identical(called(question, hooked, batch), plain)
    xr.testing.assert_identical(called(question, hooked.edited(edits), batch), plain)
    with pytest.raises(ValueError, match="which edits of activations leave as they are"):
        interp.run([question], hooked, None if batch is None else [batch], edits=edits)


def test_planted_induction_head_without_its_previous_token_head_is_at_null() -> None:
    """L0H1 carries every token's predecessor to it, by which L1H2 finds what followed the token before."""
    model = HookedTransformer.from_pretrained("groundtruth-induction")
    asked = interp.attention.Heads(repeats=interp.tasks.RepeatedTokens(rows=8), sentences=None)
    whole, without = (
        interp.run([asked], model, edits=edits)["heads"] for edits in ([], [Edit("L0H1", Zero())])
    )
    planted, left = (found.sel(layer=1, head=2, score="induction") for found in (whole, without))
    assert float(planted.value) == pytest.approx(1, abs=1e-3) and str(planted.label.values) == "induction"
    assert float(left.value) == pytest.approx(float(left.null), abs=0.003)
    assert "induction" not in without.label.values
    attended = without.value.sel(layer=0, head=1, score="previous_token")
    assert float(attended) == pytest.approx(1, abs=1e-3), "it attends as before, and says nothing"
