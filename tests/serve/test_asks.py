"""What a request may be: every refusal names the field or the edit, and what was required."""

from threading import Event

import pytest

pytest.importorskip("pydantic", reason="no pydantic: the extra `serve` is not installed")

from interp.serve.asks import MAX_EDITS, MAX_TEXT, Continue, Edge, Head, Look, Scale, Stream, parsed
from interp.serve.changes import said
from interp.serve.session import Session
from tests.serve.asking import PROMPT, SECOND, body
from tests.tiny import hooked

ZERO = {"to": "zero"}
MLP = {"part": "mlp", "layer": 0}
START = b'{"tab":"t","prompt":"a",'
SCALED = b'"edits":[{"part":"mlp","layer":0,"change":{"to":"scale","factor":%s}}]}'


def test_a_request_becomes_frozen_records() -> None:
    ask = parsed(
        Look, body(edits=[{"part": "head", "layer": 1, "head": 0, "change": {"to": "scale", "factor": 2}}])
    )
    assert ask.edits == (Head(layer=1, head=0, change=Scale(factor=2.0)),)
    assert hash(ask.edits) == hash(tuple(ask.edits))
    with pytest.raises(ValueError, match="frozen"):
        ask.prompt = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt": ""}, "prompt: .*at least 1 character"),
        ({"prompt": "a" * (MAX_TEXT + 1)}, f"prompt: .*at most {MAX_TEXT}"),
        ({"prompt": 3}, "prompt: .*valid string"),
        ({"prompt": None}, "prompt"),
        ({"tab": "../x"}, "tab: .*match pattern"),
        ({"code": "1"}, "code: Extra inputs are not permitted"),
        ({"position": -1}, "position: .*greater than or equal to 0"),
        ({"position": 1.5}, "position: .*valid integer"),
        ({"position": True}, "position: .*valid integer"),
        ({"answer": [1]}, "answer"),
        ({"edits": {}}, "edits: .*valid array"),
        ({"edits": [3]}, "edits.0"),
        ({"edits": [{"part": "soul"}]}, "edits.0: .*'head', 'mlp', 'neuron', 'edge', 'stream'"),
        ({"edits": [{"part": "head", "layer": 0, "change": ZERO}]}, "edits.0.head.head: Field required"),
        ({"edits": [{"part": "mlp", "layer": 0, "change": ZERO, "head": 1}]}, "edits.0.mlp.head: Extra"),
        ({"edits": [{"part": "mlp", "layer": "0", "change": ZERO}]}, "edits.0.mlp.layer: .*valid integer"),
        ({"edits": [MLP | {"change": {"to": "value", "value": 1}}]}, "expected tags: 'zero', 'mean'"),
        ({"edits": [MLP | {"change": {"to": "scale", "factor": 1e9}}]}, "less than or equal to 10000"),
        ({"edits": [{"part": "mlp", "layer": 0, "change": ZERO, "positions": []}]}, "at least 1 item"),
        ({"edits": [{"part": "stream", "layer": 0, "position": 1}]}, "requires a second prompt"),
        ({"edits": [MLP | {"change": {"to": "second"}}]}, "requires a second prompt"),
        ({"edits": [{"part": "mlp", "layer": 0, "change": ZERO}] * (MAX_EDITS + 1)}, f"at most {MAX_EDITS} items"),
    ],
)  # fmt: skip
def test_what_no_model_could_do_is_refused_by_name(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parsed(Look, body(**changes))


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{", b"null", b"[]", b"1", b'"x"', b"\xff\xfe", b"[" * 60_000,
        START + b'"position":' + b"9" * 5000 + b"}", START + SCALED % b"NaN", START + SCALED % b"1e999",
        b'{"tab":"t","prompt":"\\ud800"}',
    ],
)  # fmt: skip
def test_what_is_no_request_is_a_value_error(text: bytes) -> None:
    with pytest.raises(ValueError, match=": "):
        parsed(Look, text)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "tokens: Field required"),
        ({"tokens": 65}, "tokens: .*less than or equal to 64"),
        ({"tokens": 3, "temperature": -1}, "temperature: .*greater than or equal to 0"),
        ({"tokens": 3, "top_p": 0}, "top_p: .*greater than 0"),
        ({"tokens": 3, "top_k": 0}, "top_k: .*greater than or equal to 1"),
        ({"tokens": 3, "seed": 2**40}, "seed: .*less than"),
    ],
)
def test_sampling_outside_its_range_is_refused(settings: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parsed(Continue, body(**settings))


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (
            {"part": "head", "layer": 9, "head": 0, "change": ZERO},
            r"edit 1 \(head 9.0 → 0\): .*layers are 0 to",
        ),
        ({"part": "head", "layer": 0, "head": 99, "change": ZERO}, "heads are 0 to"),
        ({"part": "neuron", "layer": 0, "neuron": 99_999, "change": ZERO}, "neurons are 0 to"),
        ({"part": "mlp", "layer": 0, "change": ZERO, "positions": [99]}, "positions of this prompt are 0 to"),
        ({"part": "mlp", "layer": 0, "change": ZERO, "positions": [1, 1]}, "named once"),
        ({"part": "edge", "layer": 0, "head": 0, "query": 1, "key": 2}, "stands behind the query"),
        ({"part": "edge", "layer": 0, "head": 0, "query": 99, "key": 2}, "positions of this prompt are 0 to"),
        (
            {"part": "edge", "layer": 0, "head": 0, "query": 0, "key": 0, "renormalise": True},
            "looks at nothing else",
        ),
        ({"part": "stream", "layer": 0, "position": 99}, "positions of this prompt are 0 to"),
    ],
)
def test_what_this_model_or_prompt_has_not_is_refused(edit: dict[str, object], reason: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=reason):
        Session(hooked()).pair(parsed(Look, body(edits=[edit], second=SECOND)), Event())


def test_patching_prompts_of_unlike_lengths_requires_positions_that_both_have() -> None:
    session, short = Session(hooked()), "The cat sat"
    everywhere = {"part": "mlp", "layer": 0, "change": {"to": "second"}}
    with pytest.raises(ValueError, match=r"requires prompts of one length, got .* name positions"):
        session.pair(parsed(Look, body(second=short, edits=[everywhere])), Event())
    with pytest.raises(ValueError, match="the second prompt has positions 0 to"):
        session.pair(parsed(Look, body(second=short, edits=[everywhere | {"positions": [6]}])), Event())
    assert session.pair(parsed(Look, body(second=short, edits=[everywhere | {"positions": [1]}])), Event())


def test_a_model_without_mlps_refuses_their_edits() -> None:
    ask = parsed(Look, body(edits=[{"part": "mlp", "layer": 0, "change": ZERO}]))
    with pytest.raises(ValueError, match=r"edit 1 \(MLP 0 → 0\): this model has no"):
        Session(hooked("attention-only")).pair(ask, Event())


def test_prompts_and_positions_beyond_the_model_are_refused() -> None:
    session = Session(hooked())
    with pytest.raises(ValueError, match=r"the prompt has .* tokens|at most .* tokens"):
        session.pair(parsed(Look, body(prompt=PROMPT * 40)), Event())
    with pytest.raises(ValueError, match="a position from 0 to"):
        session.pair(parsed(Look, body(position=99)), Event())


def test_numbers_beyond_all_measure_are_an_error_and_not_a_page_of_nan() -> None:
    edits = [
        {"part": "mlp", "layer": layer, "change": {"to": "scale", "factor": 1e4}} for layer in (0, 1)
    ] * 30
    blown = [{"part": "head", "layer": 0, "head": 0, "change": {"to": "scale", "factor": 1e4}}] * 64
    import torch

    with pytest.raises(ArithmeticError, match="not finite"):
        Session(hooked("no-norm", torch.float32)).pair(parsed(Look, body(edits=edits)), Event())
    with pytest.raises(ArithmeticError, match="not finite"):
        Session(hooked("gpt2", torch.float32)).pair(parsed(Look, body(edits=blown)), Event())


def test_edits_are_said_in_words() -> None:
    assert said(Head(layer=1, head=5, change=Scale(factor=0.5), positions=(3, 4))) == "head 1.5 × 0.5 at 3, 4"
    assert said(Edge(layer=0, head=2, query=5, key=1)) == "head 0.2: 5 cut off from 1, not renormalised"
    assert said(Stream(layer=2, position=7)) == "stream into layer 2 ← second prompt at 7"
