"""The sentences on top of the page: right where the circuit is known, in doubt where it hides, open where it fails."""

import dataclasses
import functools
import re
from html import unescape

import pandas as pd
import pytest

import interp
from interp.pages import About, Finding, PageCell, Report, ReportPage, ReportQuestion, findings, report_of
from interp.pages.findings import MOST, enough, in_words
from interp.views.writing import count
from interp.zoo.groundtruth import Alphabet
from interp.zoo.planted import PLANTED
from interp.zoo.shown import SHOWN
from tests.pages.prose import Prose
from tests.pages.reports import compared, page_of
from tests.pages.test_sections import section

SHOP, SWAPPED = (f"When Mary and John went to the shop, {who} gave a book to" for who in ("John", "Mary"))


@functools.cache
def hand_built(name: str) -> Report:
    """The report of one planted model on the first pair of its prompts."""
    made = (PLANTED | SHOWN)[name](n=4)
    model = interp.HookedTransformer(made.model, Alphabet(), name=name)

    def text(ids: list[int]) -> str:
        return "".join(model.text.pieces(ids))

    prompt, corrupt = (text(rows[0, 1:].tolist()) for rows in (made.clean, made.corrupt))
    answer, wrong = (text([int(ids[0])]) for ids in (made.answer, made.wrong))
    return report_of(model, ReportQuestion(prompt, answer, wrong, corrupt), About(name))


@functools.cache
def asked(*question: str | None) -> Report:
    """The report of demo-4l."""
    return report_of(
        interp.HookedTransformer.from_pretrained("demo-4l"), ReportQuestion(*question), About("demo-4l")
    )


def said(found: Report, section: str) -> list[Finding]:
    """What was found that this section proves."""
    return [one for one in findings(found) if one.section == section]


# --- models whose circuit is known ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLANTED)
def test_named_part_writes_to_the_logits_in_the_planted_circuit(name: str) -> None:
    found = hand_built(name)
    first, writer = findings(found)[:2]
    assert first.words.startswith(f"The model answers “{found.question.answer}” (probability ")
    (named,) = re.findall(r"^(?:Head (L\d+H\d+)|The MLP of layer (\d+))", writer.words)
    part = named[0] or f"L{named[1]}.mlp"
    assert f"{part}->logits" in PLANTED[name](n=4).edges


def test_an_induction_head_is_said_to_copy_and_to_look_at_what_followed(planted: Report) -> None:
    words = [one.words for one in findings(planted)]
    assert words[1].startswith("Head L1H2 copies “d” (position 10) to the end: +19.91 logits directly")
    assert words[2].startswith("The same head brings 1.00 of the difference back")
    assert words[3] == (
        "Head L1H2 is an induction head: the last token “c” was there before, and the head looks (1.00) at what "
        "followed it, “d” (position 10), the answer."
    )
    assert not any(one.doubt for one in findings(planted))


def test_a_fact_is_found_in_the_mlp_that_keeps_it_at_the_token_that_asks() -> None:
    found = hand_built("fact_memory")
    last = len(found.tables["tokens"]) - 1
    (cause, *_) = said(found, "patching")
    (writer,) = said(found, "attribution")
    assert writer.words.startswith("The MLP of layer 1 adds most")
    assert cause.words.startswith("The same MLP brings 1.00 of the difference")
    assert cause.places == (PageCell("patching denoise mlp_out", 1, last),)
    assert cause.doubt == ""


def test_fact_of_an_early_site_is_found_where_it_is_written_and_read() -> None:
    found = hand_built("early_site")
    tokens = found.tables["tokens"].token.tolist()
    subject = max(pos for pos, token in enumerate(tokens) if token in tuple("efgh"))
    (cause, *_) = said(found, "patching")
    restored = found.tables["patching"].query(
        "direction == 'denoise' and site == 'mlp_out' and layer == 0 and pos == @subject"
    )
    share = float(restored.normalised.iloc[0])
    assert share > 0.9
    assert cause.words.startswith(
        f"The MLP of layer 0 at “{tokens[subject]}” (position {subject}) writes early what the answer needs: alone in "
        f"the corrupted prompt it brings {share:.2f} of the difference back, head L1H2 later"
    )
    assert cause.doubt == ""


def test_an_early_mlp_that_the_answer_does_not_need_is_not_called_its_site() -> None:
    found = hand_built("early_site")
    table = found.tables["patching"].copy()
    table.loc[(table.direction == "noise") & (table.site == "mlp_out"), "normalised"] = 0.9
    changed = dataclasses.replace(found, tables={**found.tables, "patching": table})
    assert said(changed, "patching")[0].words.startswith("The same head brings 1.00")


def test_in_a_deep_model_the_first_mlp_at_a_changed_token_is_no_finding() -> None:
    found = hand_built("early_site")
    deep = dataclasses.replace(found, config=dataclasses.replace(found.config, n_layers=30))
    (cause, *_) = said(deep, "patching")
    assert cause.words.startswith("The same head brings 1.00 of the difference back")


def test_loss_of_a_head_with_a_backup_is_doubted_by_both_measures() -> None:
    found = hand_built("backup")
    (writer,) = said(found, "attribution")
    assert writer.words.startswith("Head L0H3 copies")
    assert (
        writer.doubt == "But less than half of that is lost when it is silenced: other parts stand in for it."
    )
    cause = said(found, "patching")[0]
    assert cause.doubt.startswith("But head L0H3 is enough and not needed")


def test_of_two_heads_of_which_one_suffices_both_are_named() -> None:
    cause = said(hand_built("either"), "patching")[0]
    assert re.search(r"head L(0H1|1H3) and head L(0H1|1H3) are each enough and not needed", cause.doubt)


# --- a trained model, and a question that it gets wrong -----------------------------------------------------------


def test_the_sentences_of_the_demo_say_its_numbers() -> None:
    found = asked(SHOP, " Mary", " John", SWAPPED)
    sentences = findings(found)
    assert [one.section for one in sentences] == [
        "question",
        "attribution",
        "patching",
        "patching",
        "circuit",
        "lens",
    ]
    attribution = found.tables["attribution"].set_index("part").value
    ablated = found.tables["ablation"].set_index(["change", "part"]).value
    best = attribution.idxmax()
    said_of_best = f"{attribution[best]:+.2f} logits directly, {ablated['zero', best]:+.2f} without it"
    assert sentences[1].words == (
        f"Head {best} copies “·Mary” (position 2) to the end: {said_of_best.replace('-', '−')}."
    )
    curve = found.tables["faithfulness"].set_index("edges").value
    size = enough(found.tables["faithfulness"])
    assert f"The strongest {size} of" in sentences[4].words and f"{curve[size]:.2f} of" in sentences[4].words
    assert "is at the last token from layer 1 on" in sentences[3].words


@pytest.mark.slow
def test_question_that_the_model_gets_wrong_is_said_to_be_wrong() -> None:
    found = asked(SHOP, " John", " Mary")
    first, writer = findings(found)[:2]
    assert re.fullmatch(
        r"The model does not answer “·John” \(probability [\d.<]+, rank \d+\): "
        r"it prefers “·Mary”, [\d.]+ logits ahead\.",
        first.words,
    )
    right = findings(asked(SHOP, " Mary", " John"))[1]
    assert writer == right


@pytest.mark.slow
def test_first_sentence_on_a_wrong_answer_of_a_trained_model_says_so() -> None:
    """Found among 200 generated sentences: the one of them that demo-4l gets wrong."""
    wrong, other = (
        f"Once Adam and John were alone in the station, {who} passed a drink to" for who in ("John", "Adam")
    )
    found = asked(wrong, " Adam", " John", other)
    assert found.contrast is not None and found.corrupted is not None
    assert found.contrast.total < 0
    first, writer, *rest = findings(found)
    answer = found.contrast.answer
    assert first.words == (
        f"The model does not answer “·Adam” (probability {answer.prob:.3f}, rank {answer.rank + 1}): it prefers "
        f"“·John”, {-found.contrast.total:.2f} logits ahead."
    )
    apart = found.contrast.total - found.corrupted.total
    assert first.doubt == (
        f"What is said below of the difference between the prompts is about {apart:+.2f} logits, not about an answer."
    )
    assert "“·John”" in writer.words and "“·Adam”" not in writer.words
    assert rest and not any("answer back" in one.words or "needs" in one.words for one in rest)
    alone = findings(asked(wrong, " Adam", None, other))[0]
    assert alone.words.startswith("The answer “·Adam” is not the model's first choice (probability 0.")
    assert alone.doubt.startswith("It would say “·John” (0.") and "not about an answer" in alone.doubt


def test_answer_ahead_of_the_wrong_one_alone_is_not_called_the_answer() -> None:
    found = asked(SHOP, " John", " the")
    first = findings(found)[0]
    assert first.words.startswith("The answer “·John” is not the model's first choice")
    assert first.doubt.startswith("It would say “·Mary” (0.")


def test_without_a_corrupted_prompt_nothing_is_said_of_it() -> None:
    sections = [one.section for one in findings(asked(SHOP, " Mary", " John"))]
    assert "patching" not in sections and "circuit" not in sections and sections[-1] == "lens"


# --- rules on tables made for them ---------------------------------------------------------------------------------


def test_the_smallest_selection_that_is_enough_stays_enough() -> None:
    sizes, shares = [1, 5, 10, 25, 80], [0.0, 0.95, 0.6, 0.93, 1.0]
    assert enough(pd.DataFrame({"edges": sizes, "value": shares})) == 25
    assert enough(pd.DataFrame({"edges": sizes, "value": [0.9, 1.2, 0.9, 1.0, 1.0]})) == 1


def test_a_writer_whose_loss_helps_the_answer_is_doubted() -> None:
    found = asked(SHOP, " Mary", " John")
    table = found.tables["ablation"].assign(value=lambda rows: rows.value.abs())
    changed = dataclasses.replace(found, tables={**found.tables, "ablation": table})
    assert said(changed, "attribution")[0].doubt.startswith(
        "But the answer does not suffer when it is silenced"
    )


def test_no_part_is_named_as_the_cause_where_none_brings_enough_back() -> None:
    found = hand_built("two_hop")
    table = found.tables["patching"].assign(normalised=lambda rows: rows.normalised / 10)
    changed = dataclasses.replace(found, tables={**found.tables, "patching": table})
    assert said(changed, "patching")[0].words.startswith(
        "No single head or MLP brings the difference back: the most is 0.10"
    )


@pytest.mark.parametrize("name", ["gpt2", "parallel", "attention-only", "post-norm", "llama-gqa"])
def test_every_model_shape_gets_at_most_six_sentences_with_links(
    name: str,
) -> None:
    found = compared(name)
    page = page_of(found)
    assert 2 <= len(findings(found)) <= MOST
    for one in findings(found):
        assert f'<section id="{one.section}"' in page
        assert one.words.endswith(".") and one.words[0].isupper()


def test_places_of_a_sentence_are_the_cells_whose_numbers_it_says() -> None:
    found = asked(SHOP, " Mary", " John", SWAPPED)
    patched = found.tables["patching"].set_index(["direction", "site", "layer"]).sort_index()
    (cause, *_) = said(found, "patching")
    numbers = [float(text.replace("−", "-")) for text in re.findall(r"brings (−?\d+\.\d+)", cause.words)]
    assert len(numbers) == len(cause.places) == 3
    for value, place in zip(numbers, cause.places, strict=True):
        _, direction, site = place.view.split()
        cells = patched.loc[(direction, site, place.row)]
        one = cells[(cells["head"] if site == "z" else cells.pos) == place.column]
        assert one.normalised.tolist() == [pytest.approx(value, abs=0.005)]


def test_a_circuit_that_needs_all_edges_is_said_not_to_be_found() -> None:
    found = asked(SHOP, " Mary", " John", SWAPPED)
    table = found.tables["faithfulness"].assign(
        value=lambda rows: (rows.edges == rows.edges.max()).astype(float)
    )
    changed = dataclasses.replace(found, tables={**found.tables, "faithfulness": table})
    assert said(changed, "circuit")[0].words.startswith(
        f"No small circuit was found: fewer than all {count(1519)} edges"
    )


# --- on the page, in the notebook ----------------------------------------------------------------------------------


def test_the_page_begins_with_the_sentences_and_leads_to_their_proof(planted: Report) -> None:
    text = unescape(section(page_of(planted), "question"))
    for one in findings(planted):
        assert one.words in text
        assert one.section == "question" or f'<a href="#{one.section}">' in text
    assert str(ReportPage(planted)).splitlines()[1:] == [f"- {one}" for one in findings(planted)]


def test_a_page_asks_for_at_most_1200_words_of_reading() -> None:
    assert Prose(page_of(asked(SHOP, " Mary", " John", SWAPPED))).count <= 1200


def test_parts_are_called_by_words() -> None:
    assert in_words("L2.attn_bias") == "the attention's bias of layer 2"
    assert in_words("L2.mlp_before") == "the first MLP of layer 2"
