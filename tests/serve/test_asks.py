"""What a request may be: every refusal names the field or the edit, and what was required."""

from threading import Event

import pytest

pytest.importorskip("pydantic", reason="no pydantic: the extra `serve` is not installed")

from interp import Edit
from interp.edits import Mean, Resample, Scale, Set, Zero
from interp.passes.edit_text import edit_to_json
from interp.serve.asks import MAX_ANSWER, MAX_EDITS, MAX_NAME, MAX_TEXT, Continue, Look, parsed
from interp.serve.changes import edit_text
from interp.serve.session import Session
from tests.serve.asking import PROMPT, SECOND, body
from tests.tiny import hooked

ZERO = {"change": "zero"}
MLP = {"where": "L0.mlp"} | ZERO
CUT = {"where": "L0.pattern", "change": "set", "values": 0.0}
SCORE = {"where": "L0.attn_scores", "change": "set", "values": "-inf"}
CELL = {"head": 0, "query": 2, "key": 1}
START = b'{"tab":"t","prompt":"a",'
SCALED = b'"edits":[{"where":"L0.mlp","change":"scale","factor":%s}]}'
BYTES = {"dtype": "float32", "shape": [1], "bytes": "AAAAAA=="}


def test_request_becomes_a_frozen_record_with_the_packages_edits() -> None:
    held = {"where": "L1H0", "change": "scale", "factor": 2, "at": {"pos": [3, 1]}}
    ask = parsed(Look, body(edits=[held]))
    (edit,) = ask.edits
    assert type(edit) is Edit and edit.change == Scale(2.0) and edit.at == {"pos": (3, 1)}
    assert edit_to_json(edit) == held
    with pytest.raises(ValueError, match="frozen"):
        ask.prompt = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    "edit",
    [
        Edit("L3H5", Zero(), {"pos": (3, 4)}), Edit("L2.mlp", Scale(0.5)), Edit("L1N17", Set(2.0)),
        Edit("L2.resid", Resample(), {"pos": 5}), Edit("L3H5", Mean("reference")), Edit("L0.mlp", Resample()),
        Edit("L3.attn_scores", Set(float("-inf")), {"head": 2, "query": 5, "key": 1}),
        Edit("L3.pattern", Set(0.0), {"head": 2, "query": 5, "key": 1}),
    ],
    ids=edit_text,
)  # fmt: skip
def test_every_kind_of_edit_arrives_as_its_json(edit: Edit) -> None:
    (found,) = parsed(Look, body(second=SECOND, edits=[edit_to_json(edit)])).edits
    assert edit_to_json(found) == edit_to_json(edit)


@pytest.mark.parametrize("name", ["3.5", "a3.h5", "L3H5"])
def test_other_spellings_of_a_part_are_read_and_never_written(name: str) -> None:
    (edit,) = parsed(Look, body(edits=[{"where": name} | ZERO])).edits
    assert edit.name == "L3H5"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt": ""}, "^the prompt is empty: at least 1 character is required$"),
        ({"prompt": "a" * (MAX_TEXT + 1)}, f"^the prompt is too long: at most {MAX_TEXT} characters are read$"),
        ({"prompt": 3}, "^the prompt must be text$"),
        ({"prompt": None}, "^the prompt must be text$"),
        ({"tab": "../x"}, "the page's own name must be letters"),
        ({"code": "1"}, "^'code' is not known here$"),
        ({"position": -1}, "^the position must be at least 0$"),
        ({"position": 1.5}, "^the position must be a whole number$"),
        ({"position": True}, "^the position must be a whole number$"),
        ({"answer": [1.5]}, "^the answer must be text$"),
        ({"wrong": {"id": 1}}, "^the answer against it must be text$"),
        ({"answer": "a" * (MAX_ANSWER + 1)}, f"^the answer is too long: at most {MAX_ANSWER} characters are read"),
        ({"edits": {}}, "^the edits must be a list$"),
        ({"edits": [3]}, "^edit 1 must be an object with named fields$"),
        ({"edits": [{"change": "zero"}]}, r"^edit 1 \(where\) is required, none was given"),
        ({"edits": [{"where": "L0.mlp"}]}, r"^edit 1 \(change\) is required, none was given$"),
        ({"edits": [{"where": "soul"} | ZERO]}, "^edit 1: no part 'soul'"),
        ({"edits": [{"where": 3} | ZERO]}, r"^edit 1 \(where\) must be text$"),
        ({"edits": [{"where": ""} | ZERO]}, r"^edit 1 \(where\) is empty"),
        ({"edits": [{"where": "L" + "9" * MAX_NAME + "H0"} | ZERO]}, rf"edit 1 .* is too long: at most {MAX_NAME}"),
        ({"edits": [{"where": "L-1H0"} | ZERO]}, "no part 'L-1H0'"),
        ({"edits": [{"where": "L0H1->L1H2.k"} | ZERO]}, "no part"),
        ({"edits": [MLP | {"head": 1}]}, r"^edit 1 \(head\) is not known here$"),
        ({"edits": [MLP | {"rows": [0]}]}, r"^edit 1 \(rows\) is not known here"),
        ({"edits": [MLP | {"change": "explode"}]}, r"edit 1 \(change\) must be .*'scale', 'set', 'resample' or 'add'$"),
        ({"edits": [MLP | {"change": {"to": "zero"}}]}, r"^edit 1 \(change\) must be "),
        ({"edits": [MLP | {"change": "detach"}]}, r"^edit 1 \(change\) must be "),
        ({"edits": [MLP | {"change": "add", "values": 1.0}]}, "'add' adds the direction .*: it takes no values"),
        ({"edits": [MLP | {"change": "add", "scale": 1e9}]}, r"^edit 1 \(scale\) must be at most 10000"),
        ({"edits": [MLP | {"change": "add", "scale": "2"}]}, r"^edit 1 \(scale\) must be a number$"),
        ({"edits": [MLP | {"change": "set", "values": 1.0}]}, "L0.mlp takes .* resample, not 'set'"),
        ({"edits": [{"part": "mlp", "layer": 0, "change": {"to": "zero"}}]}, r"edit 1 \(where\) is required"),
        ({"edits": [MLP | {"change": "scale"}]}, "requires the fields factor"),
        ({"edits": [MLP | {"factor": 1.0}]}, "'zero' has the fields none, not 'factor'"),
        ({"edits": [MLP | {"change": "scale", "factor": None}]}, r"^edit 1 \(factor\) must be a number$"),
        ({"edits": [MLP | {"change": "scale", "factor": "2"}]}, r"^edit 1 \(factor\) must be a number$"),
        ({"edits": [MLP | {"change": "scale", "factor": 1e9}]}, r"^edit 1 \(factor\) must be at most 10000"),
        ({"edits": [MLP | {"change": "scale", "factor": "-inf"}]}, r"^edit 1 \(factor\) must be a number$"),
        ({"edits": [MLP | {"change": "mean"}]}, "over must be 'reference'"),
        ({"edits": [MLP | {"change": "mean", "over": "position"}]}, r"^edit 1 \(over\) must be 'reference'$"),
        ({"edits": [MLP | {"change": "resample", "seed": 3}]}, r"^edit 1 \(seed\) is not known here$"),
        ({"edits": [{"where": "L0N1", "change": "set", "values": BYTES}]}, r"^edit 1 \(values\) must be "),
        ({"edits": [{"where": "L0N1", "change": "set", "values": [1.0]}]}, r"^edit 1 \(values\) must be "),
        ({"edits": [{"where": "L0N1", "change": "set", "values": -1e9}]}, r"edit 1 \(values\) must be at least -10000"),
        ({"edits": [{"where": "L0N1", "change": "set", "values": "-inf"}]}, "L0N1 takes finite values"),
        ({"edits": [{"where": "L0N1", "change": "set", "values": "inf"}]}, r"^edit 1 \(values\) must be "),
        ({"edits": [{"where": "L0N1", "change": "set", "values": "nan"}]}, r"^edit 1 \(values\) must be "),
        ({"edits": [{"where": "L0.attn_bias"} | ZERO]}, "edits act on heads .*, not on L0.attn_bias"),
        ({"edits": [{"where": "L0"} | ZERO]}, "edits act on heads .*, not on L0"),
        ({"edits": [{"where": "final_bias"} | ZERO]}, "edits act on heads .*, not on final_bias"),
        ({"edits": [{"where": "blocks.0.attn.hook_q"} | ZERO]}, "edits act on heads .*, not on L0.q"),
        ({"edits": [{"where": "blocks.0.attn.hook_z"} | ZERO]}, "edits act on heads .*, not on L0.z"),
        ({"edits": [{"where": "L0H1.k"} | ZERO]}, "edits act on heads .*, not on L0H1.k"),
        ({"edits": [{"where": "logits"} | ZERO]}, "edits act on heads .*, not on logits"),
        ({"edits": [{"where": "embed"} | ZERO]}, "edits act on heads .*, not on embed"),
        ({"edits": [{"where": "L0.resid"} | ZERO]}, "L0.resid takes the changes resample, not 'zero'"),
        ({"edits": [CUT | {"change": "zero"}]}, "L0.pattern takes the changes set, not 'zero'"),
        ({"edits": [CUT | {"at": CELL, "values": 0.5}]}, "an entry is cut by the values 0.0, got 0.5"),
        ({"edits": [CUT | {"at": CELL, "values": "-inf"}]}, "an entry is cut by the values 0.0, got -inf"),
        ({"edits": [SCORE | {"at": CELL, "values": 0.0}]}, "an entry is cut by the values -inf, got 0.0"),
        ({"edits": [SCORE]}, "`at` must name its head, query, key"),
        ({"edits": [SCORE | {"at": {"head": 0, "key": 1}}]}, "`at` must name its query"),
        ({"edits": [CUT | {"at": CELL | {"query": [1, 2]}}]}, r"^edit 1 \(at, query\) must be a whole number$"),
        ({"edits": [CUT | {"at": CELL | {"pos": 1}}]}, "L0.pattern has the dims head, query, key, not 'pos'"),
        ({"edits": [MLP | {"at": {"pos": []}}]}, r"^edit 1 \(at, pos\) must name at least 1$"),
        ({"edits": [MLP | {"at": {"pos": [1, 1]}}]}, "several that differ"),
        ({"edits": [MLP | {"at": {"pos": -1}}]}, r"^edit 1 \(at, pos\) must be at least 0$"),
        ({"edits": [MLP | {"at": {"pos": [2, -1]}}]}, r"^edit 1 \(at, pos\) must be at least 0$"),
        ({"edits": [MLP | {"at": {"pos": 10**7}}]}, r"^edit 1 \(at, pos\) must be less than 1000000$"),
        ({"edits": [MLP | {"at": {"pos": "3"}}]}, r"^edit 1 \(at, pos\) must be a whole number$"),
        ({"edits": [MLP | {"at": {"pos": True}}]}, r"^edit 1 \(at, pos\) must be a whole number$"),
        ({"edits": [MLP | {"at": {"pos": None}}]}, r"^edit 1 \(at, pos\) must be a whole number$"),
        ({"edits": [MLP | {"at": {"pos": list(range(1025))}}]}, r"^edit 1 \(at, pos\) may hold at most 1024$"),
        ({"edits": [MLP | {"at": {"d_model": 3}}]}, r"^edit 1 \(at, d_model\) is not known here$"),
        ({"edits": [MLP | {"at": {"head": 0}}]}, "L0.mlp has the dims pos, d_model, not 'head'"),
        ({"edits": [{"where": "L0H1", "at": {"head": 0}} | ZERO]}, "L0H1 has the dims pos, d_head, not 'head'"),
        ({"edits": [MLP | {"at": [3]}]}, r"^edit 1 \(at\) must be an object with named fields$"),
        ({"edits": [{"where": "L0.resid", "change": "resample", "at": {"pos": 1}}]}, "requires a second prompt"),
        ({"edits": [MLP | {"change": "resample"}]}, "requires a second prompt"),
        ({"edits": [MLP] * (MAX_EDITS + 1)}, f"^the edits may hold at most {MAX_EDITS}$"),
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
    with pytest.raises(
        ValueError, match=r"^(the request|the prompt|the position|edit 1 \(factor\)) (is|must be) "
    ):
        parsed(Look, text)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        (START + b'"prompt":"a"}', "the prompt"),
        (START + b'"position":1,"position":1}', "the position"),
        (START + b'"edits":[{"where":"L0.mlp","change":"mean","change":"zero"}]}', "'change'"),
        (START + b'"edits":[{"where":"L0.mlp","change":"zero","at":{"pos":[1],"pos":2}}]}', "'pos'"),
    ],
)
def test_a_field_given_twice_is_refused_at_any_depth(text: bytes, field: str) -> None:
    with pytest.raises(ValueError, match=rf"^{field} is given twice$"):
        parsed(Look, text)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "^the number of new tokens is required, none was given$"),
        ({"tokens": 65}, "^the number of new tokens must be at most 64$"),
        ({"tokens": 3, "temperature": -1}, "^the temperature must be at least 0"),
        ({"tokens": 3, "top_p": 0}, "^top p must be more than 0"),
        ({"tokens": 3, "top_k": 0}, "^top k must be at least 1$"),
        ({"tokens": 3, "seed": 2**40}, "^the seed must be less than"),
    ],
)
def test_sampling_outside_its_range_is_refused(settings: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parsed(Continue, body(**settings))


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        ({"where": "L9H0"} | ZERO, r"edit 1 \(L9H0 → 0\): .*layers are 0 to"),
        ({"where": "L0H99"} | ZERO, r"edit 1 \(L0H99 → 0\): .*the index of a head is 0 to"),
        ({"where": "L0N99999"} | ZERO, "the index of a neuron is 0 to"),
        (MLP | {"at": {"pos": 99}}, "positions of this prompt are 0 to"),
        (MLP | {"at": {"pos": [1, 99]}}, "positions of this prompt are 0 to"),
        (CUT | {"at": CELL | {"head": 99}}, "heads of this model are 0 to"),
        (CUT | {"at": CELL | {"key": 3}}, "stands after the query"),
        (CUT | {"at": CELL | {"query": 99}}, "positions of this prompt are 0 to"),
        (SCORE | {"at": {"head": 0, "query": 0, "key": 0}}, "looks at nothing else"),
        (SCORE | {"where": "L9.attn_scores", "at": CELL}, "layers are 0 to"),
        ({"where": "L0.resid", "change": "resample", "at": {"pos": 99}}, "positions of this prompt are 0 to"),
    ],
)
def test_what_this_model_or_prompt_has_not_is_refused(edit: dict[str, object], reason: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=reason):
        Session(hooked()).pair(parsed(Look, body(edits=[edit], second=SECOND)), Event())


def test_the_last_entry_of_a_row_cannot_be_cut_with_the_rest_renormalised() -> None:
    session = Session(hooked())
    row = [SCORE | {"at": {"head": 0, "query": 2, "key": key}} for key in range(3)]
    assert session.pair(parsed(Look, body(edits=row[:2])), Event())
    with pytest.raises(ValueError, match=r"edit 3 .*looks at nothing else, so no weight can be renormalised"):
        session.pair(parsed(Look, body(edits=row)), Event())


def test_patching_prompts_of_unlike_lengths_requires_shared_positions() -> None:
    session, short = Session(hooked()), "The cat sat"
    everywhere = MLP | {"change": "resample"}
    with pytest.raises(ValueError, match=r"requires prompts of one length, got .* name positions"):
        session.pair(parsed(Look, body(second=short, edits=[everywhere])), Event())
    with pytest.raises(ValueError, match="the second prompt has positions 0 to"):
        session.pair(parsed(Look, body(second=short, edits=[everywhere | {"at": {"pos": 6}}])), Event())
    assert session.pair(parsed(Look, body(second=short, edits=[everywhere | {"at": {"pos": 1}}])), Event())


def test_a_model_without_mlps_refuses_their_edits() -> None:
    ask = parsed(Look, body(edits=[MLP]))
    with pytest.raises(ValueError, match=r"edit 1 \(L0.mlp → 0\): this model has no"):
        Session(hooked("attention-only")).pair(ask, Event())


def test_prompts_and_positions_beyond_the_model_are_refused() -> None:
    session = Session(hooked())
    with pytest.raises(ValueError, match=r"the prompt has .* tokens|at most .* tokens"):
        session.pair(parsed(Look, body(prompt=PROMPT * 40)), Event())
    with pytest.raises(ValueError, match="a position from 0 to"):
        session.pair(parsed(Look, body(position=99)), Event())


def test_numbers_beyond_all_measure_are_an_error_and_not_a_page_of_nan() -> None:
    edits = [{"where": f"L{layer}.mlp", "change": "scale", "factor": 1e4} for layer in (0, 1)] * 30
    blown = [{"where": "L0H0", "change": "scale", "factor": 1e4}] * 64
    import torch

    with pytest.raises(ArithmeticError, match="not finite"):
        Session(hooked("no-norm", torch.float32)).pair(parsed(Look, body(edits=edits)), Event())
    with pytest.raises(ArithmeticError, match="not finite"):
        Session(hooked("gpt2", torch.float32)).pair(parsed(Look, body(edits=blown)), Event())


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (Edit("L1H5", Zero(), {"pos": (3, 4)}), "L1H5 → 0 at 3, 4"),
        (Edit("L1H5", Scale(0.5), {"pos": 3}), "L1H5 × 0.5 at 3"),
        (Edit("L2.mlp", Mean("reference")), "L2.mlp → its clean mean"),
        (Edit("L1N17", Set(2.5)), "L1N17 = 2.5"),
        (Edit("L0H2", Resample()), "L0H2 ← second prompt"),
        (Edit("L2.resid", Resample(), {"pos": 5}), "L2.resid ← second prompt at 5"),
        (Edit("L3.attn_scores", Set(float("-inf")), CELL), "L3H0: 2 cut off from 1, renormalised"),
        (Edit("L0.pattern", Set(0.0), {"head": 2, "query": 5, "key": 1}), "L0H2: 5 cut off from 1, not renormalised"),
    ],
)  # fmt: skip
def test_edits_are_said_in_words(edit: Edit, words: str) -> None:
    assert edit_text(edit) == words
