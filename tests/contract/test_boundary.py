"""The public names and their arguments: valid calls work, and what is gone, misspelled or meant otherwise is answered.

What arrives with a wrong kind or a bad value in any argument is fuzzed: `tests/fuzz`.
"""

import dataclasses
import inspect
import pickle
import pydoc
import re
import time
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

import interp
import interp.families
import interp.model
import interp.plot
import interp.zoo
from interp.core.fitting import fits
from interp.core.hints import hints_of
from interp.passes.question import Question
from tests.contract.calls import (
    CALLS,
    NOT_RUN,
    OTHERS,
    REFUSES,
    TOKENS,
    called,
    model,
    signature,
)
from tests.contract.case import discovered
from tests.contract.cases import CASES
from tests.fuzz.functions import FUNCTIONS, valid_of
from tests.fuzz.values import WRONG
from tests.loops import every, over


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_line_of_the_table_is_a_public_name() -> None:
    assert set(CALLS) - set(FUNCTIONS) == set()
    assert len(FUNCTIONS) > 200


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in {*NOT_RUN, *REFUSES}])
def test_the_valid_call_is_valid(name: str) -> None:
    check_short(called(name, FUNCTIONS[name], valid_of(name)))


def check_short(value: object) -> None:
    """What a user holds says what it is in fewer than 15 lines; labelled results do so by `view`."""
    for each in (value, *(value if isinstance(value, (tuple, list)) else ())):
        if isinstance(each, xr.Dataset) and "interp_analysis" in each.attrs:
            assert len(str(each.view).splitlines()) < 15, str(each.view)
        elif type(each).__module__.startswith("interp.") and not isinstance(each, torch.nn.Module):
            assert len(repr(each).splitlines()) < 15 and len(repr(each)) < 2000, repr(each)[:3000]


@pytest.mark.parametrize("name", ["float64", "float32", "bfloat16", "float16"])
def test_a_dtype_may_be_given_by_its_name_wherever_one_is_asked_for(name: str) -> None:
    kind = getattr(torch, name)
    assert interp.zoo.load("groundtruth-induction", dtype=name)[0].dtype == kind
    assert (
        interp.HookedTransformer.from_pretrained("groundtruth-induction", dtype=name).transformer.dtype
        == kind
    )
    config = interp.model.ModelConfig(n_layers=1, d_model=8, n_heads=2, n_ctx=4, d_vocab=5)
    state = interp.model.Transformer(config).state_dict()
    assert interp.families.load_state(config, state, dtype=name).dtype == kind
    with pytest.raises(ValueError, match=r"dtype must be a torch dtype or None, got 'bf16' \(str\)"):
        interp.zoo.load("groundtruth-induction", dtype="bf16")


def test_a_signature_in_help_is_short() -> None:
    for name in interp.HOMES:
        value = getattr(interp, name)
        if inspect.isfunction(value):
            for parameter in inspect.signature(value).parameters.values():
                assert len(repr(parameter.default)) < 120, f"{name}({parameter})"
            first, second, *_ = (inspect.getdoc(value) or "").split("\n\n")
            assert first.endswith(".") and not second.startswith("Args:"), (
                f"{name} is explained in one sentence"
            )
            said = re.split(r"(?<=[.?])\s", second)[0]
            assert said.endswith((".", "?")), f"{name}: {said}"
            assert not set(said) & set("[]=|"), f"{name}: its second sentence is for a stranger: {said}"


@over("name", FUNCTIONS)
def test_a_function_with_arguments_checks_them(name: str) -> None:
    """It is decorated, and no other function stands between the decorator and it."""
    function = FUNCTIONS[name]
    if inspect.isfunction(function) and inspect.signature(function).parameters:
        assert vars(function).get("public"), f"{name} lacks @public()"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_argument_that_is_not_there_is_refused_by_name(name: str) -> None:
    function = FUNCTIONS[name]
    kinds = {each.kind for each in signature(function).parameters.values()}
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        with pytest.raises(TypeError, match="nonsense"):
            function(**valid_of(name), nonsense=1)


@over("question", discovered())
def test_a_field_of_the_wrong_kind_is_refused_by_its_name(question: type[Question]) -> None:
    """By the field of the contract's own record."""
    asked = (case.question_for(case.models[0]) for case in CASES.values())
    record = next((each for each in asked if type(each) is question), None)
    assert record is not None, f"tests/contract/cases.py lacks a Case of {question.__name__}"
    for field in dataclasses.fields(question):
        with pytest.raises(ValueError, match=rf"{question.__name__}: {field.name} must be"):
            dataclasses.replace(record, **{field.name: object()})


MAYBE_DRAWN = {"another result", "a mapping", "an array", "ids of one axis", "fractions of three axes"}
"""What some pictures are of: a tensor, results by name."""
PICTURES = [
    name for name in interp.plot.__all__ if inspect.isfunction(getattr(interp.plot, name)) and name != "drawn"
]


@over("name", PICTURES)
def test_a_picture_of_another_kind_of_thing_is_refused_by_name(name: str) -> None:
    draw = getattr(interp.plot, name)
    argument = next(iter(inspect.signature(draw).parameters))
    with every() as case:
        for wrong in WRONG.keys() - MAYBE_DRAWN:
            value = WRONG[wrong]()
            with case(wrong), pytest.raises(ValueError, match=rf"{name}: {argument} must be"):
                draw(value)


GONE = {
    "BackwardLens": "interp.lenses.GradientFactors", "Circuits": "interp.weights.HeadCircuits",
    "Erasure": "interp.tokens.Erasure", "Interchange": "interp.circuits.Interchange", "Mixed": "interp.tokens.Mixing",
    "Parts": "interp.residual.Decomposition", "Put": "interp.Edit", "faithfulness": "interp.tokens.erasure",
    "faithfulness_curve": "interp.circuits.circuit_curve",
}  # fmt: skip
"""The names of the first edition's 146 that are gone, and what they are called now."""
RENAMED = [
    ("ablate", "prompts", "data"), ("ablate", "protocol", "change"), ("ablate", "what", "parts"),
    ("attention.attention_entropy", "prompts", "data"), ("attribute", "prompts", "data"), ("attribute", "by", "parts"),
    ("backward_lens", "targets", "answer"), ("weights.bigram_table", "circuits", "model"),
    ("weights.bigram_table", "tokens", "data"),
    ("causal_trace", "prompts", "data"), ("tokens.compare_methods", "erasure", "shares, replacement and measure"),
    ("weights.composition_directions", "k", "top"), ("causal.agreement", "k", "top"),
    ("lab.depth.consensus", "block", "layer"),
    ("circuits.edge_stability", "edges", "top"), ("evaluate_circuit", "task", "model, clean, corrupt and metric"),
    ("editing.finetune_edit", "prompt", "data"), ("editing.finetune_edit", "target", "answer"),
    ("editing.gradient_edit", "target", "answer"),
    ("weights.head_tokens", "circuits", "folded, scaled and embedding"), ("causal.knock_out", "prompts", "data"),
    ("lenses.late_layers", "answers", "answer"), ("logit_lens", "prompts", "data"), ("logit_lens", "positions", "pos"),
    ("weights.neurons", "layer", "parts"), ("weights.neurons", "index", "parts"),
    ("dynamics.over_checkpoints", "analysis", "question"),
    ("path_patch", "by_pos", "by"), ("features.probe", "k", "sizes"), ("features.probe_neurons", "positions", "pos"),
    ("features.probe_neurons", "k", "sizes"), ("causal.recall", "blocks", "layers"),
    ("editing.rome_edit", "target", "answer"),
    ("run", "analyses", "questions"), ("features.dictionary_quality", "prompts", "data"),
    ("editing.shift_edit", "target", "answer"),
    ("causal.short_circuit", "blocks", "layers"), ("weights.singular_directions", "layer", "part"),
    ("weights.singular_directions", "head", "part"), ("weights.singular_directions", "k", "count"),
    ("weights.skip_trigrams", "k", "top"),
    ("weights.skip_trigrams", "layer", "head"), ("token_attribution", "prompts", "data"),
    ("features.top_examples", "k", "top"),
    ("weights.top_pairs", "k", "top"), ("weights.top_pairs", "layer", "head"), ("editing.train_z", "prompts", "data"),
    ("Edit", "site", "where"), ("editing.EditCase", "target", "answer"), ("editing.EditCase", "questions", "checks"),
    ("edits.Variant", "puts", "edits"), ("edits.Mean", "freeze_patterns", "freeze_patterns, an argument of ablate"),
]  # fmt: skip
"""What arguments were called in the first edition."""


@pytest.mark.parametrize("name", GONE)
def test_a_name_that_is_gone_is_answered_with_the_one_that_is_there(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"no attribute '{name}': it is called {GONE[name]}"):
        getattr(interp, name)
    assert not hasattr(interp, name)


def test_a_name_that_lives_in_a_wing_is_answered_with_its_place() -> None:
    """Some hundred of these stood at the top in the first edition."""
    for wing in interp.ROOMS:
        for name in import_module(f"interp.{wing}").__all__:
            if name not in {*interp.HOMES, *interp.WINGS, *GONE, "encoder_decoder"}:  # a module too
                with pytest.raises(
                    AttributeError, match=rf"no attribute '{name}': it is called .*interp.{wing}.{name}"
                ):
                    getattr(interp, name)


def test_help_of_the_package_is_one_screen_or_two() -> None:
    lines = pydoc.render_doc(interp, renderer=pydoc.plaintext).splitlines()
    assert len(lines) < 200 and any("interp.causal" in line for line in lines)


def test_names_that_are_there_are_found_and_listed() -> None:
    assert len(dir(interp)) < 60, "a screen of a terminal"
    assert set(interp.HOMES) <= set(dir(interp))
    assert all(hasattr(interp, name) for name in interp.HOMES)
    with pytest.raises(AttributeError, match="no attribute 'logit_lense'; nearest: logit_lens"):
        interp.logit_lense  # noqa: B018


@over("name, earlier, now", RENAMED)
def test_an_earlier_word_for_an_argument_is_answered_with_todays(name: str, earlier: str, now: str) -> None:
    with pytest.raises(
        TypeError, match=rf"^{name.rpartition('.')[2]}\(\) has no argument '{earlier}': it is called {now}"
    ):
        FUNCTIONS[name](**{earlier: 1})


def test_every_way_to_bring_a_model_works_where_a_network_was_required() -> None:
    batch, variants = (
        model().text.batch(TOKENS),
        [interp.edits.Variant([interp.Edit("L0.mlp", interp.edits.Zero())])],
    )
    metric, read = interp.logit_difference(3, 4), interp.Read("blocks.0.hook_resid_post")
    batch = batch.with_answers(torch.full((len(batch),), 3), torch.full((len(batch),), 4))
    mine, theirs = (
        interp.passes.Sweep(each, batch, variants).run(metric) for each in (model(), model().transformer)
    )
    assert torch.equal(mine.values, theirs.values)
    mine_, theirs_ = (
        interp.observe(each, TOKENS, [read]).trace[read] for each in (model(), model().transformer)
    )
    assert torch.equal(mine_, theirs_)
    assert torch.equal(
        interp.weights.eigenvalue_scores(model()), interp.weights.eigenvalue_scores(model().transformer)
    )


def test_a_plain_function_of_the_logits_is_a_metric_and_a_stream_is_data() -> None:
    found = interp.patch(model(), TOKENS, OTHERS, metric=lambda logits: logits[:, -1, 3] - logits[:, -1, 4])
    asked = interp.patch(model(), TOKENS, OTHERS, metric=interp.logit_difference(3, 4))
    np.testing.assert_allclose(found.value, asked.value, rtol=1e-12, atol=1e-12)
    rows = interp.Stream(interp.data.open_source(TOKENS), model().text, tokens_per_batch=64)
    xr.testing.assert_allclose(interp.logit_lens(model(), rows).kl, interp.logit_lens(model(), TOKENS).kl)


def test_signatures_names_and_pickles_are_those_of_the_function() -> None:
    assert inspect.signature(interp.logit_lens).parameters["top"].default is None
    assert pickle.loads(pickle.dumps(interp.logit_lens)) is interp.logit_lens
    assert list(inspect.signature(interp.passes.Sampling).parameters) == [
        "temperature",
        "top_k",
        "top_p",
        "seed",
    ]


def test_long_data_are_let_in_at_once() -> None:
    """A million ids, one by one, took a second."""
    ids = list(range(30)) * 33_334
    start = time.process_time()
    for _ in range(100):
        assert fits(ids, hints_of(interp.logit_lens)["data"])
    assert time.process_time() - start < 0.5
