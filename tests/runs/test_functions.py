"""The functions of questions are made of their records, and read, fail and travel as if somebody had written them."""

import importlib
import inspect
import json
import pickle
import pydoc
import re
from operator import attrgetter
from pathlib import Path

import pytest
import torch

import interp
from interp.core.boundary import SETTINGS, place_of
from interp.passes.question import Question
from tests.configs import build, some_tokens
from tests.contract.case import discovered, face_of, function_of
from tests.loops import over

WRITTEN: dict[str, list[list[str]]] = json.loads(
    Path(__file__).with_name("signatures.json").read_text(encoding="utf-8")
)
"""The parameters of every question's function, so that none changes unnoticed, without the settings of a run: those
by position in their order, and those by keyword."""
EVERY = over("question", discovered())


def said(parameter: inspect.Parameter) -> str:
    """A parameter as `WRITTEN` has it."""
    default = re.sub(r" at 0x\w+", "", repr(parameter.default))
    return parameter.name if parameter.default is parameter.empty else f"{parameter.name}={default}"


@EVERY
def test_names_kinds_and_defaults_are_those_of_the_written_function(question: type[Question]) -> None:
    name = f"{face_of(question).removeprefix('interp.')}.{function_of(question).__name__}"
    every = inspect.signature(function_of(question)).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    positional, named = ([said(each) for each in every if each.kind is kind] for kind in kinds)
    today = [positional, sorted(named)]
    assert today == WRITTEN.get(name) and len(positional) + len(named) == len(every), (
        "tests/runs/signatures.json has another signature or none; where this one is meant, its line is "
        f"{json.dumps(name)}: {json.dumps(today)},"
    )


@EVERY
def test_help_shows_the_parameters_the_words_of_the_record_and_an_example(question: type[Question]) -> None:
    function = function_of(question)
    text = pydoc.plain(pydoc.render_doc(function))
    assert f"{function.__name__}(model: " in text and "Example:" in text and ">>> " in text
    assert function.__name__ not in ("patch", "logit_lens") or function.__doc__ == question.__doc__


@EVERY
def test_it_is_a_function_of_its_module_that_other_processes_find(question: type[Question]) -> None:
    function = function_of(question)
    assert inspect.isfunction(function) and function.__module__ == question.__module__
    assert getattr(importlib.import_module(function.__module__), function.__name__) is function
    assert pickle.loads(pickle.dumps(function)) is function


@pytest.mark.parametrize("setting", SETTINGS)
@EVERY
def test_a_setting_of_a_run_is_answered_with_where_it_is_said(question: type[Question], setting: str) -> None:
    function = function_of(question)
    asks_of_data = {"data", "clean", "positive"} & inspect.signature(function).parameters.keys()
    answer = SETTINGS[setting] if asks_of_data else ""
    with pytest.raises(
        TypeError, match=rf"^{function.__name__}\(\) has no argument '{setting}'.*{re.escape(answer)}"
    ):
        function(build("gpt2"), **{setting: 1})


@pytest.mark.kinds
def test_what_is_missing_or_too_much_is_said_in_the_functions_name() -> None:
    model = build("gpt2")
    missing = r"^attention_attribution\(\) missing 1 required keyword-only argument: 'key'"
    with pytest.raises(TypeError, match=missing):
        interp.attention.attention_attribution(model, some_tokens(), "L0H1")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^patch\(\) missing 1 required positional argument: 'corrupt'"):
        interp.patch(model, some_tokens())  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^copying\(\) takes 1 positional argument but 2 were given"):
        interp.weights.copying(model, True)  # type: ignore[call-arg]


def test_leading_names_may_be_given_by_name() -> None:
    metric, clean, corrupt = interp.logit_difference(3, 4), some_tokens(), some_tokens(seed=1)
    by_name = interp.patch(model=build("gpt2"), clean=clean, corrupt=corrupt, site="z", metric=metric)
    assert by_name.identical(interp.patch(build("gpt2"), clean, corrupt, "z", metric=metric))


def test_batches_of_pairs_are_counted_on() -> None:
    clean, corrupt = some_tokens(5), some_tokens(5, seed=1)
    pieces = ([interp.Batch(part) for part in tokens.split(2)] for tokens in (clean, corrupt))
    found = interp.patch(build("gpt2"), *pieces, "z", metric=interp.logit_difference(3, 4))
    whole = interp.patch(build("gpt2"), clean, corrupt, "z", metric=interp.logit_difference(3, 4))
    assert found.prompt.values.tolist() == list(range(5))
    torch.testing.assert_close(torch.tensor(found["each"].values), torch.tensor(whole["each"].values))
    with pytest.raises(
        ValueError, match="as many batches of clean as of corrupted prompts are required, got 1 and 2"
    ):
        interp.patch(build("gpt2"), [interp.Batch(clean)], [interp.Batch(corrupt[:2])] * 2, "z")


@pytest.mark.kinds
@pytest.mark.parametrize("name", ["causal.Patch", "lab.depth.Consensus"])
def test_function_in_place_of_a_question_is_answered_with_its_record(name: str) -> None:
    record = attrgetter(name)(interp)
    with pytest.raises(ValueError, match=rf"write interp\.{name}\(\.\.\.\)"):
        interp.run(
            [function_of(record)], interp.HookedTransformer.from_pretrained("demo-attn-2l"), ["The cat"]
        )


def test_a_class_of_ones_own_has_its_place_in_the_module_that_defines_it() -> None:
    own = type("Own", (), {"__module__": "__main__"})
    assert place_of(own) == "__main__.Own" and place_of(interp.edits.Zero) == "interp.edits.Zero"
