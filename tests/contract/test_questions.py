"""What every question promises beside its numbers: one record, one function, one shape of result."""

import dataclasses
import functools
import importlib
import inspect
import json
import pickle
import re
from dataclasses import fields

import pandas as pd
import pytest
import torch
import xarray as xr

import interp
from interp import HookedTransformer
from interp.circuits import Circuit
from interp.features import Dictionary
from interp.lenses import FittedJacobianLens
from interp.model import Transformer
from interp.passes.observe import as_model
from interp.passes.question import ByRow, Question, Reading
from interp.runs.experiment import field_docs
from interp.runs.fingerprint import fingerprint, incomparable
from tests.configs import build
from tests.contract.case import MODELS, called, discovered, face_of, function_of, snake
from tests.contract.cases import CASES, as_scored
from tests.loops import over

RECORDS = [name for name, case in CASES.items() if isinstance(case.question_for(case.models[0]), Question)]
SETTINGS = {"edits", "prepend_bos", "batch_size"}
"""What no function of a question takes: the model and the data say it."""
MORE = {"reference", "faithfulness"}
"""What a function takes for those of its ways that are no single question: the iterative search for circuits."""
EVERY = over("question", discovered())


@EVERY
def test_it_is_public_beside_its_function(question: type[Question]) -> None:
    face = importlib.import_module(face_of(question))
    assert question.__name__ in face.__all__ and snake(question.__name__) in face.__all__
    assert getattr(face, question.__name__) is question


@EVERY
def test_it_is_a_frozen_record_with_a_sentence_under_every_field(question: type[Question]) -> None:
    assert dataclasses.is_dataclass(question) and question.__dataclass_params__.frozen  # type: ignore[attr-defined]
    docs = field_docs(question)
    assert [field.name for field in fields(question) if not docs.get(field.name)] == []


@EVERY
def test_the_function_takes_the_fields_of_the_record(question: type[Question]) -> None:
    """With the same defaults, after the model and the data."""
    taken = inspect.signature(function_of(question)).parameters
    names, own = list(taken), {field.name: field for field in fields(question)}
    assert names[0] == "model"
    data = (
        ["clean", "corrupt"]
        if "clean" in taken
        else ["data"]
        if "data" in taken and "data" not in own
        else []
    )
    assert names[1 : 1 + len(data)] == data
    assert not SETTINGS & {*taken}
    middle = names[1 + len(data) :]
    assert (
        set(middle) - (MORE if snake(question.__name__) == "find_circuit" else set()) == set(own) - SETTINGS
    )
    for name in {*middle} & {*own}:
        default = own[name].default
        assert taken[name].default is inspect.Parameter.empty or taken[name].default == default or (
            default is dataclasses.MISSING
        ), name  # fmt: skip


@functools.cache
def answer(case: str) -> xr.Dataset:
    """What a run gives for the question, with two rows in a batch."""
    model = CASES[case].models[0]
    question = CASES[case].record(model)
    data = () if CASES[case].alone else (list(CASES[case].batch(model).numbered().split(2)),)
    return interp.run([question], HookedTransformer(build(model)), *data)[question.name]


@pytest.mark.parametrize("case", RECORDS)
def test_the_function_is_the_record_applied_bit_for_bit(case: str) -> None:
    model, its = CASES[case].models[0], CASES[case]
    question, network = its.record(model), HookedTransformer(build(model))
    found = called(question, network, None if its.alone else its.batch(model), 2)
    if isinstance(found, Circuit):
        assert as_scored(found) == as_scored(Circuit.of_result(answer(case), model=network.name))
        return
    if isinstance(found, FittedJacobianLens):
        assert equal(found, FittedJacobianLens.of_result(answer(case), found.model))
        return
    xr.testing.assert_identical(found, answer(case))
    assert found.attrs["interp_analysis"] == question.name


@pytest.mark.parametrize("case", RECORDS)
def test_result_is_a_narrow_table_with_units_and_labels(
    case: str,
) -> None:
    found = answer(case)
    assert not [str(x) for x in found.data_vars if str(x).endswith(("_low", "_high", "_se"))]
    assert [
        str(name) for name, x in found.data_vars.items() if x.dtype.kind == "f" and not x.attrs.get("unit")
    ] == []
    assert [str(dim) for dim in found.dims if dim not in found.coords] == []
    if "score" in found.dims:
        assert found.unit.dims == ("score",) and all(found.unit.values)
    table = interp.frame(found)
    beside = table.columns.drop(["layer", "head", "kind"], errors="ignore")  # what the part's name says
    assert len(table) and len(beside) <= 12, list(table)


@pytest.mark.slow
@over("case", RECORDS)
def test_a_table_by_parts_has_their_layer_head_and_kind_as_columns(case: str) -> None:
    """Nobody has to take a name apart: what stands beside it says the same."""
    table = interp.frame(answer(case))
    if "part" not in table:
        return
    assert {"layer", "head", "kind"} <= {*table}
    assert {table.layer.dtype.kind, table["head"].dtype.kind} == {"i"}
    own = {*answer(case).coords}  # what the result says itself of what is in no layer
    for name, layer, head, kind in zip(table.part, table.layer, table["head"], table["kind"], strict=True):
        pieces = [re.fullmatch(r"L(\d+)(?:H(\d+))?(\W.*|N\d+)?", each) for each in str(name).split("+")]
        layers = {int(piece[1]) for piece in pieces if piece}
        if len(pieces) == 1 and pieces[0]:
            assert layer == int(pieces[0][1])
            if pieces[0][2] is not None:
                assert head == int(pieces[0][2]) and (kind == "head" or "kind" in own), name
        elif len(layers) != 1:
            assert ("layer" in own or pd.isna(layer)) and ("head" in own or pd.isna(head)), name


@pytest.mark.kinds  # a function whose shapes are checked holds the counts of all checks
@over("case", RECORDS)
def test_a_run_that_asks_it_can_be_gone_on_with(case: str) -> None:
    """Everything in it can be compared with what it was in the run's first process."""
    model = CASES[case].models[0]
    asked = CASES[case].record(model).bind(as_model(HookedTransformer(build(model))))
    assert not [*incomparable(fingerprint(asked))]


def equal(one: object, other: object) -> bool:
    """Whether two fields are the same, of tensors and results every number."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, xr.Dataset):
        return isinstance(other, xr.Dataset) and one.identical(other)
    if isinstance(one, Dictionary) and isinstance(other, Dictionary):
        return repr(one) == repr(other) and equal(dict(one.state_dict()), dict(other.state_dict()))
    if dataclasses.is_dataclass(one) and one != other:
        return type(one) is type(other) and all(
            equal(getattr(one, f.name), getattr(other, f.name)) for f in fields(one)
        )
    if isinstance(one, Transformer) and isinstance(other, Transformer):
        return one.config == other.config and equal(dict(one.state_dict()), dict(other.state_dict()))
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return one == other


@over("case", RECORDS)
def test_the_record_survives_copies_and_other_processes(case: str) -> None:
    question = CASES[case].record(CASES[case].models[0])
    for again in (dataclasses.replace(question), pickle.loads(pickle.dumps(question))):
        assert type(again) is type(question) and again.name == question.name
        for field in fields(question):
            assert equal(getattr(again, field.name), getattr(question, field.name)), field.name


@over("case", RECORDS)
def test_what_is_closed_of_a_record_survives_json(case: str) -> None:
    """Words, numbers and lists of them: the record made of them asks the same."""
    model = CASES[case].models[0]
    question = CASES[case].record(model)
    closed = {f.name: getattr(question, f.name) for f in fields(question)}
    closed = {name: value for name, value in closed.items() if _is_closed(value)}
    again = dataclasses.replace(question, **json.loads(json.dumps(closed)))
    made, first = again.bind(_subject(model)), question.bind(_subject(model))
    assert made.name == first.name and type(made) is type(first)
    if isinstance(made, ByRow) and isinstance(made.rows, Reading):
        assert isinstance(first, ByRow) and isinstance(first.rows, Reading)
        assert len(made.rows.reads) == len(first.rows.reads)
    if CASES[case].alone:
        xr.testing.assert_identical(interp.run([again], build(model))[question.name], answer(case))


def _is_closed(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_closed(each) for each in value)
    return value is None or isinstance(value, str | int | float)


def _subject(model: str) -> HookedTransformer:
    return HookedTransformer(build(model))


def test_the_models_of_the_table_differ_in_what_matters() -> None:
    configs = [build(name).config for name in MODELS]
    assert {config.mlp is None for config in configs} == {True, False}
    assert {config.kv_heads == config.n_heads for config in configs} == {True, False}
    assert len({type(config.norm) for config in configs}) == 2
