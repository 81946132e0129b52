"""Answers of several tokens on the live page: each token by hand, edits that reach them, the script."""

from threading import Event

import pytest
import torch
from torch import Tensor

pytest.importorskip("pydantic", reason="no pydantic: the extra `serve` is not installed")

from interp import HookedTransformer
from interp.causal import ablate, patch
from interp.edits import Mean
from interp.metrics import answer_log_probability
from interp.serve import session as sessions
from interp.serve.answers import tokens
from interp.serve.asks import AnsweredPrompt, Continue, Look, parsed
from interp.serve.directions import RANDOM, at_random
from interp.serve.session import Session
from interp.serve.snippet import Origin, python
from tests.data.templates import CHATML
from tests.data.test_chats import PARTIAL, model_of
from tests.loops import over
from tests.serve.asking import PROMPT, SECOND, asked, beside_random, body, hooks_of, row_of
from tests.serve.test_numbers import EDITS, PLAIN, adding, session_of, steered
from tests.tiny import hooked
from tests.tolerances import assert_close

ANSWER = " the dog sat"
IDS = (262, 317, 285)
END = 9
"""Position of the prompt's last token."""
ON_ANSWER: dict[str, list[dict[str, object]]] = {
    "head at the answer's first token": [{"where": "L1H1", "change": "zero", "at": {"pos": END + 1}}],
    "stream patched at the answer": [{"where": "L1.resid", "change": "resample", "at": {"pos": END + 2}}],
    "edge within the answer": [
        {"where": "L0.pattern", "change": "set", "values": 0.0, "at": {"head": 1, "query": END + 2, "key": END + 1}}
    ],
}  # fmt: skip
EVERY = {"none": [], **EDITS, **ON_ANSWER}


def logits_of(model: HookedTransformer, edits: list[dict[str, object]]) -> tuple[Tensor, Tensor]:
    """Logits of the prompt followed by the answer, clean and under hooks that are loops."""
    row = row_of(model, PROMPT, IDS)
    assert row.shape[1] == END + 3
    edited = model.run_with_hooks(row, hooks_of(edits, model, SECOND, answer=IDS))
    return model(row)[0], edited[0]


def by_hand(logits: Tensor) -> list[float]:
    """log p of each token of the answer."""
    return [float(logits[END + i].log_softmax(-1)[token]) for i, token in enumerate(IDS)]


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "gemma2"])
@over("edits", EVERY.values())
def test_log_probability_of_an_answer_is_the_sum_over_its_tokens_in_both_runs(
    name: str, edits: list[dict[str, object]]
) -> None:
    model = hooked(name)
    assert tuple(model.text.tokenizer.encode(ANSWER)) == IDS
    found = asked(session_of(name), second=SECOND, edits=edits, answer=ANSWER)
    whole = found["whole"]
    expected = [by_hand(logits) for logits in logits_of(model, edits)]
    assert whole["ids"] == list(IDS) and whole["tokens"] == ["·the", "·dog", "·sat"]
    for run in (0, 1):
        assert whole["log_probs"][run] == pytest.approx(expected[run], abs=2e-6)  # as rounded
        assert whole["log_prob"][run] == pytest.approx(sum(expected[run]), abs=2e-6)
        product = torch.tensor(expected[run]).exp().prod()
        assert whole["probability"][run] == pytest.approx(float(product), rel=1e-5)


def test_some_edit_of_each_kind_moves_the_answer() -> None:
    for what, edits in ON_ANSWER.items():
        clean, edited = asked(session_of("gpt2"), second=SECOND, edits=edits, answer=ANSWER)["whole"][
            "log_probs"
        ]
        assert clean[0] == edited[0] and clean != edited, what


@pytest.mark.parametrize("name", ["gpt2", "macaron", "gemma2"])
@over("edits", EVERY.values())
def test_attribution_sums_to_the_logit_of_the_token_predicted_at_each_position(
    name: str, edits: list[dict[str, object]]
) -> None:
    model = hooked(name)
    runs = logits_of(model, edits)
    for position in (None, 3, END, END + 1, END + 2):
        found = asked(session_of(name), second=SECOND, edits=edits, answer=ANSWER, position=position, **PLAIN)
        at = END if position is None else position
        token = IDS[max(0, at - END)]
        assert found["position"] == at and found["answer"]["id"] == token
        for run, logits in enumerate(runs):
            split = found["attribution"]
            assert split["total"][run] == pytest.approx(float(logits[at, token]), abs=2e-6)
            parts = sum(sum(row) for row in split["cells"][run]) + split["rest"][run]
            cap = model.cfg.logit_softcap
            before = logits[at, token] if cap is None else cap * torch.atanh(logits[at, token] / cap)
            assert parts == pytest.approx(float(before), abs=1e-4)


def test_an_answer_is_a_text_or_ids_and_follows_both_prompts() -> None:
    session = session_of("gpt2")
    found = asked(session, second=SECOND, answer=ANSWER)
    assert found == asked(session, second=SECOND, answer=list(IDS))
    assert found["prompt_length"] == END + 1
    assert found["tokens"][END + 1 :] == found["second"][END + 1 :] == ["·the", "·dog"]
    early = tokens(session, parsed(AnsweredPrompt, body(second=SECOND, answer=ANSWER)))
    assert early == {name: found[name] for name in early}


def test_one_token_as_text_id_or_list_has_no_whole_and_the_prompt_as_its_row() -> None:
    session = session_of("gpt2")
    found = asked(session, answer=" dog")
    assert found["whole"] is None and len(found["tokens"]) == found["prompt_length"] == END + 1
    assert found == asked(session, answer=317) == asked(session, answer=[317])


@over("edits", EVERY.values())
def test_the_script_gives_the_same_numbers_for_an_answer_of_several_tokens(
    edits: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, session = hooked(), session_of("gpt2")
    ask = parsed(Look, body(second=SECOND, edits=edits, answer=ANSWER, position=END + 1))
    pair = session.pair(ask, Event())
    monkeypatch.setattr("interp.HookedTransformer.from_pretrained", lambda *given, **more: model)
    names: dict[str, object] = {}
    exec(python(ask, Origin("m"), pair.position, pair.asked.answer), names)
    assert_close(names["clean"], pair.clean.logits.softmax(-1))
    assert_close(names["edited"], pair.edited.logits.softmax(-1))
    expected = session.answer_log_probs(pair, Event()).sum(-1)
    assert_close(torch.tensor([names["clean_answer"], names["edited_answer"]], dtype=torch.float64), expected)


# --- beside the package's own questions -------------------------------------------------------------------------------


def effect(found: dict[str, object]) -> float:
    clean, edited = found["whole"]["log_prob"]
    return edited - clean


def test_a_head_at_its_mean_does_what_ablate_says_it_does() -> None:
    """The mean is over the prompt's tokens and is put at the answer's too."""
    model = hooked()
    expected = ablate(
        model,
        PROMPT,
        ["L0H1"],
        change=Mean("reference"),
        reference=PROMPT,
        metric=answer_log_probability(ANSWER),
    )
    edits = [{"where": "L0H1", "change": "mean", "over": "reference"}]
    found = asked(session_of("gpt2"), edits=edits, answer=ANSWER)
    assert effect(found) == pytest.approx(expected.value.item(), abs=3e-6)


@pytest.mark.parametrize("layer", [0, 1])
def test_patching_all_positions_reaches_the_answer_as_in_patch(layer: int) -> None:
    model = hooked()
    expected = patch(model, SECOND, PROMPT, "z", by=("layer", "head"), metric=answer_log_probability(ANSWER))
    edits = [{"where": f"L{layer}H1", "change": "resample"}]
    found = asked(session_of("gpt2"), second=SECOND, edits=edits, answer=ANSWER)
    assert effect(found) == pytest.approx(float(expected.value.sel(layer=layer, head=1)), abs=3e-6)


# --- contrasts --------------------------------------------------------------------------------------------------------


def test_answers_that_begin_alike_are_contrasted_where_they_differ_first() -> None:
    model, session = hooked(), session_of("gpt2")
    edits = EDITS["head to 0"]
    cat = model.text.tokenizer.encode(" the cat sat")
    assert cat[0] == IDS[0] and len(cat) == 3
    found = asked(session, second=SECOND, edits=edits, answer=ANSWER, wrong=" the cat sat")
    assert found["position"] == END + 1
    assert (found["answer"]["id"], found["wrong"]["id"]) == (IDS[1], cat[1])
    assert (
        len(found["notes"]) == 1 and "compared at the first token in which they differ" in found["notes"][0]
    )
    for run, logits in enumerate(logits_of(model, edits)):
        expected = float(logits[END + 1, IDS[1]] - logits[END + 1, cat[1]])
        split = found["attribution"]
        assert split["total"][run] == pytest.approx(expected, abs=2e-6)
        assert sum(sum(row) for row in split["cells"][run]) + split["rest"][run] == pytest.approx(
            expected, abs=1e-4
        )
    # The rows and the whole answer are those without a wrong one.
    assert found["whole"] == asked(session, second=SECOND, edits=edits, answer=ANSWER)["whole"]


def test_elsewhere_the_answer_stands_alone_and_the_page_says_where_it_is_contrasted() -> None:
    for position in (3, END, END + 2):
        found = asked(session_of("gpt2"), answer=ANSWER, wrong=" the cat", position=position)
        assert found["wrong"] is None and found["answer"]["id"] == IDS[max(0, position - END)]
        said = (
            f"the answers differ first after position {END + 1}: only there is ' dog' contrasted with ' cat'"
        )
        assert found["notes"] == [said]


def test_answers_that_differ_from_the_first_token_are_contrasted_before_the_prompts_end_too() -> None:
    model = hooked()
    for position in (None, 3):
        found = asked(session_of("gpt2"), answer=ANSWER, wrong=" cat", position=position)
        at = END if position is None else position
        logits = model(PROMPT)[0, at]
        assert found["position"] == at
        assert found["attribution"]["total"][0] == pytest.approx(
            float(logits[IDS[0]] - logits[281]), abs=2e-6
        )


def test_the_most_probable_token_is_contrasted_with_a_wrong_answers_first() -> None:
    session = session_of("gpt2")
    best = asked(session)["answer"]["id"]
    found = asked(session, wrong=" the cat")
    assert (found["answer"]["id"], found["wrong"]["id"]) == (best, IDS[0]) and best != IDS[0]
    assert found["whole"] is None and "compared at the first token" in found["notes"][0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"answer": " the dog", "wrong": " the dog sat"}, "must differ before one of them ends, got ' the dog' and"),
        ({"answer": " the dog sat", "wrong": " the"}, "must differ before one of them ends"),
        ({"answer": " dog", "wrong": " dog"}, "must be two tokens, got ' dog'"),
        ({"answer": [262, 10**5]}, "answer tokens must be in"),
        ({"answer": ANSWER, "position": END + 3}, f"a position from 0 to {END + 2} is required, got {END + 3}"),
        ({"answer": " cat" * 60}, "a prompt followed by its answer but for the last token of at most 24 tokens"),
        ({"answer": ANSWER, "edits": [{"where": "L1H0", "change": "zero", "at": {"pos": END + 3}}]},
         f"positions of this prompt, with its answer's tokens but the last, are 0 to {END + 2}"),
        ({"edits": [{"where": "L1H0", "change": "zero", "at": {"pos": END + 1}}]}, f"of this prompt are 0 to {END}"),
        ({"answer": ANSWER, "second": "The cat sat", "edits": [{"where": "L1H0", "change": "resample"}]},
         "prompts of one length, got 10 and 4 tokens"),
    ],
)  # fmt: skip
def test_answers_that_do_not_fit_are_refused_in_words(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        asked(session_of("gpt2"), **changes)


def test_an_answer_that_may_be_meant_with_a_space_is_taken_as_it_is_and_said() -> None:
    found = asked(session_of("gpt2"), answer="the dog sat")
    assert "has no leading space, and the prompt ends in a word" in found["notes"][0]
    assert found["whole"]["tokens"][0] != "·the"


# --- what else is asked -----------------------------------------------------------------------------------------------


def test_another_last_token_or_wrong_answer_costs_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[str] = []
    real = Session._pass
    monkeypatch.setattr(Session, "_pass", lambda *given: passes.append("pass") or real(*given))
    session, edits = Session(hooked()), EDITS["head to 0"]
    asked(session, edits=edits, answer=ANSWER, **PLAIN)
    assert len(passes) == 2
    asked(session, edits=edits, answer=[*IDS[:2], 281], wrong=" cat", position=END + 2, **PLAIN)
    assert len(passes) == 2
    asked(session, edits=edits, **PLAIN)
    assert len(passes) == 4


@pytest.mark.parametrize("at_once", [1, 100])
def test_random_directions_measure_the_whole_answer(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    session, vector = steered("gpt2", "resid_post")
    model, row = hooked(), row_of(hooked(), PROMPT, IDS)
    edits = [{"where": "L1.resid_post", "change": "add", "scale": -2.0}]
    pair = session.pair(parsed(Look, body(edits=edits, answer=ANSWER, position=4)), Event())
    drawn = at_random(pair.edits, len(pair.tokens), range(RANDOM))[0].change.values
    site = "blocks.1.hook_resid_post"
    logits = [model(row)[0], model.run_with_hooks(row, [(site, adding(vector, -2.0))])[0]]
    logits += [model.run_with_hooks(row, [(site, adding(each, -2.0))])[0] for each in drawn[:, 0]]
    p = [float(torch.tensor(by_hand(each)).sum().exp()) for each in logits]
    clean = logits[0][4].log_softmax(-1)
    kl = [float((clean.exp() * (clean - each[4].log_softmax(-1))).sum()) for each in logits]
    monkeypatch.setattr(sessions, "COLUMNS", at_once * len(pair.tokens))
    said = beside_random(session, edits=edits, answer=ANSWER, position=4)
    assert said["probability"] == pytest.approx([p[0], p[1], min(p[2:]), max(p[2:])], abs=1e-6)
    assert said["kl"] == pytest.approx([0.0, kl[1], min(kl[2:]), max(kl[2:])], abs=2e-6)


def test_what_is_generated_follows_the_prompt_and_no_answer() -> None:
    session, model = session_of("gpt2"), hooked()
    with pytest.raises(ValueError, match=r"^the answer is not known here$"):
        parsed(Continue, body(tokens=3, answer=ANSWER))
    asked(session, answer=ANSWER)
    clean, _ = session.continuations(parsed(Continue, body(tokens=3, temperature=0)), Event())
    assert clean == model.generate(PROMPT, 3).tokens[0, END + 1 :].tolist()


def test_the_tokens_of_an_answer_to_a_chat_are_the_assistants() -> None:
    model = model_of(CHATML)
    model.text.prepend_bos = False  # so that the text of a chat is its tokens
    batch = model.to_batch(chat=PARTIAL)
    session, text = Session(model, chats=[batch]), model.to_string(batch.tokens[0])
    found = asked(session, prompt=text, answer=[3, 4, 5])
    assert found["roles"] == [*batch.roles[0], "assistant", "assistant"]
    assert found["prompt_length"] == len(batch.roles[0])


def test_networks_that_take_no_later_start_give_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = asked(Session(hooked()), edits=EDITS["head to 0"], answer=ANSWER)
    monkeypatch.setattr(type(hooked().transformer), "restarts", property(lambda self: False))
    found = asked(Session(hooked()), edits=EDITS["head to 0"], answer=ANSWER)
    assert found["whole"]["log_probs"][1] == pytest.approx(expected["whole"]["log_probs"][1], abs=2e-6)
