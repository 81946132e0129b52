"""What every analysis promises, run on every analysis: a new one is one line in `CASES`.

Splitting, reordering or padding the rows changes no number, neither does the dtype beyond rounding, a second run gives
the same bits, and the result has the dims its function declares.
"""

import functools
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import pytest
import torch
import xarray as xr
from torch import Tensor

import interp
from interp.core.stats import Partial
from interp.core.viewer import PICTURES
from interp.data.batch import Batch
from interp.model import Transformer
from interp.passes.question import ByRow, Questions, merged
from interp.plot import cards
from tests.configs import build
from tests.contract.case import agree, by_hand, discovered
from tests.contract.cases import CASES
from tests.contract.test_pictures import PNG, WITHOUT_PLOT
from tests.loops import over

OF_ROWS = [name for name, case in CASES.items() if not case.alone]


def models(case: str) -> list[str]:
    """The models that the question can be asked about."""
    return CASES[case].models


def on_every_model(test: Callable[..., None]) -> Callable[..., None]:
    """The test on every analysis of rows, in a loop over the models."""
    return pytest.mark.parametrize("case", OF_ROWS)(over("model", models)(test))


def on_one_model(test: Callable[..., None]) -> Callable[..., None]:
    """The test on every analysis of rows, each with one of its models: what no model decides."""
    pairs = [(case, models(case)[i % len(models(case))]) for i, case in enumerate(OF_ROWS)]
    return pytest.mark.parametrize(("case", "model"), pairs)(test)


@functools.cache
def plain_result(case: str, model: str) -> xr.Dataset:
    """That of all rows in one batch."""
    return CASES[case].result(model, *([] if CASES[case].alone else [CASES[case].batch(model)]))


@functools.cache
def result_of_parts(case: str, model: str) -> xr.Dataset:
    """That of batches of two rows."""
    return CASES[case].result(model, *CASES[case].batch(model).numbered().split(2))


@on_every_model
def test_splitting_the_rows_changes_no_number(case: str, model: str) -> None:
    plain, batch = plain_result(case, model), CASES[case].batch(model).numbered()
    agree(result_of_parts(case, model), plain)
    one_and_four = batch.rows(torch.tensor([0])), batch.rows(torch.arange(1, 5))
    agree(CASES[case].result(model, *one_and_four), plain)


@on_every_model
def test_reordering_the_rows_reorders_the_result_and_nothing_else(case: str, model: str) -> None:
    order = [3, 0, 4, 2, 1]
    moved, plain = picked(case, model, order), plain_result(case, model)
    if "row" in plain:  # a list that names rows
        place = torch.tensor(order).argsort().numpy()
        listed = plain.row.where(plain.row < 0, place[plain.row.values])  # -1 at an empty place
        plain = plain.assign(row=listed)
    row, fixed = CASES[case].row_dim, CASES[case].drawn_apart
    agree(fixed(moved), fixed(plain.isel({row: order}) if row else plain))


@on_every_model
def test_an_answer_belongs_to_its_row(case: str, model: str) -> None:
    """One row alone gives what it gives among others."""
    row, plain, fixed = CASES[case].row_dim, plain_result(case, model), CASES[case].drawn_apart
    if row is None:
        return
    kept = [name for name in plain.data_vars if row in plain[name].dims]
    agree(fixed(picked(case, model, [2])[kept]), fixed(plain[kept].isel({row: [2]})))


def picked(case: str, model: str, order: Sequence[int]) -> xr.Dataset:
    """The answer about these rows in this order."""
    batch = CASES[case].batch(model).rows(torch.tensor(order))
    return CASES[case].result(model, batch, order=order)


def padded(batch: Batch, side: str, by: int = 3) -> Batch:
    """The same rows between others' garbage: `by` columns that are not kept."""
    garbage = torch.full((len(batch), by), 17)

    def wide(rows: Tensor, more: Tensor) -> Tensor:
        return torch.cat((rows, more) if side == "right" else (more, rows), 1)

    keep = wide(torch.ones_like(batch.tokens).bool(), torch.zeros_like(garbage).bool())
    corrupt = None if batch.corrupt is None else wide(batch.corrupt, garbage)
    return replace(batch, tokens=wide(batch.tokens, garbage), keep=keep, corrupt=corrupt)


@on_every_model
@over("side", ["left", "right"])
def test_padding_changes_no_number_or_is_refused(case: str, model: str, side: str) -> None:
    batch = padded(CASES[case].batch(model), side)
    if side not in CASES[case].padding:
        with pytest.raises(ValueError, match=r"require|must"):
            CASES[case].result(model, batch)
        return
    plain, found = plain_result(case, model), CASES[case].result(model, batch)
    for axis in ("pos", "source", "query", "key"):
        if axis in found.dims:
            found = found.isel(
                {axis: slice(plain.sizes[axis])}
            )  # whatever the side: positions are a prompt's own
    agree(found, plain)


@on_one_model
def test_pickled_questions_and_partial_results_give_the_same_bits(case: str, model: str) -> None:
    """What a copy of it gives, merged from copies of its partial results, is also a second run with the same bits."""

    def travelled(asked: ByRow, network: Transformer, batches: Iterable[Batch]) -> Partial:
        copy = pickle.loads(pickle.dumps(asked))
        questions, total = Questions.of([copy], build(model).config), None
        for batch in batches:
            part = questions.reduced(questions.values(network, batch), batch.identities())
            tensors = part[asked.name].tensors()
            back = copy.keep.load(tensors)
            again = back.tensors()
            assert again.keys() == tensors.keys()
            assert all(
                torch.equal(again[name].nan_to_num(7.5), x.nan_to_num(7.5)) for name, x in tensors.items()
            )
            total = merged(total, {asked.name: back})
        assert total is not None
        return total[asked.name]

    rows = CASES[case].batch(model).numbered().split(2)
    found = by_hand(CASES[case].question_for(model), build(model), rows, travelled)
    xr.testing.assert_identical(found, result_of_parts(case, model))


@on_one_model
def test_a_run_gives_what_the_plain_loop_gives(case: str, model: str) -> None:
    asked, batches = CASES[case].question_for(model), list(CASES[case].batch(model).numbered().split(2))
    found, plain = interp.run([asked], build(model), batches)[asked.name], result_of_parts(case, model)
    assert set(plain.data_vars) <= set(found.data_vars)
    agree(found[list(plain.data_vars)], plain)


@on_one_model
def test_float32_agrees_with_float64_to_rounding(case: str, model: str) -> None:
    network = build(model, torch.float32)
    narrow, wide = (
        CASES[case].result(model, CASES[case].batch(model), network=network),
        plain_result(case, model),
    )
    ids = ["top_token", "bottom_token", "word", "top_word", "bottom_word"]
    agree(narrow.drop_vars(ids, errors="ignore"), wide.drop_vars(ids, errors="ignore"), 3e-4)


@pytest.mark.slow
@over("case", CASES)
@over("model", models)
def test_the_result_has_the_dims_that_the_table_declares(case: str, model: str) -> None:
    found = plain_result(case, model)
    assert {name: found[name].dims for name in found.data_vars} == CASES[case].dims


@over("case", CASES)
@pytest.mark.slow
def test_the_result_names_what_gave_it(case: str) -> None:
    for model in models(case):
        assert plain_result(case, model).attrs["interp_analysis"] in {*PICTURES.draws, *WITHOUT_PLOT}


def pictured() -> list[str]:
    """One case of every question and dims: a plot sees no more of a result."""
    kinds = {
        (type(case.question_for(case.models[0])), tuple(case.dims.items())): name
        for name, case in CASES.items()
    }
    return list(kinds.values())


@pytest.mark.parametrize("case", pictured())
def test_its_picture_can_be_drawn(case: str) -> None:
    """That of one model, for its dims are those of all."""
    found = plain_result(case, models(case)[0])
    if (message := CASES[case].undrawn) is not None:
        with pytest.raises(ValueError, match=message):
            interp.plot.drawn(found)
    elif PICTURES.of(found) is not None:
        assert cards.png(lambda ax: interp.plot.drawn(found, ax=ax))[0].startswith(PNG)


@pytest.mark.parametrize("case", CASES)
def test_it_leaves_the_model_alone(case: str) -> None:
    model = models(case)[0]
    network: Transformer = build(model)
    state = {name: value.clone() for name, value in network.state_dict().items()}
    CASES[case].result(model, *([] if CASES[case].alone else [CASES[case].batch(model)]))
    assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())
    assert all(p.grad is None for p in network.parameters())


def test_every_question_of_the_package_is_in_the_table() -> None:
    """A question that is not listed would go untested."""
    asked = {type(case.question_for(case.models[0])) for case in CASES.values()}
    assert len(discovered()) > 45
    left = [question.__name__ for question in discovered() if question not in asked]
    assert not left, (
        "tests/contract/cases.py lacks a Case, the record with small fields and the dims of its variables, of each of "
        f"these: {', '.join(left)}"
    )
