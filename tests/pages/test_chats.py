"""The pages of a chat: whose words each token is, where they are shown."""

import re
from threading import Event

from interp.pages import About, ReportQuestion, page, report_of
from interp.serve import answers
from interp.serve.asks import EditedPrompt, Look
from interp.serve.session import Session
from tests.data.templates import CHATML
from tests.data.test_chats import PARTIAL, model_of


def test_a_report_shows_the_role_of_every_token_of_a_chat() -> None:
    model = model_of(CHATML)
    batch = model.to_batch(chat=PARTIAL)
    assert batch.roles is not None
    roles = batch.roles[0].tolist()
    report = report_of(model, ReportQuestion.of(model.text, PARTIAL), About("chat"))
    assert report.tables["tokens"].role.tolist() == roles
    html = page(report)
    assert re.findall(r'<button[^>]* data-role="(\w+)"', html) == roles
    starts = [role for before, role in zip(["", *roles], roles, strict=False) if role != before]
    assert re.findall(r'<span class="speaker">(\w+)</span>', html) == starts


def test_a_report_of_a_text_shows_no_roles() -> None:
    model = model_of(CHATML)
    report = report_of(model, ReportQuestion("The cat sat"), About("text"))
    assert "role" not in report.tables["tokens"]
    assert '<span class="speaker">' not in page(report)


def test_an_answers_first_tokens_are_the_assistants() -> None:
    model = model_of(CHATML)
    asked = ReportQuestion.of(model.text, PARTIAL)
    assert asked.roles is not None
    longer = asked.followed_by(model.text, [3, 4])
    assert longer.roles == (*asked.roles, "assistant", "assistant")


def test_the_live_page_knows_the_roles_of_the_chat_it_begins_with() -> None:
    model = model_of(CHATML)
    model.text.prepend_bos = False  # so that the text of a chat is its tokens
    batch = model.to_batch(chat=PARTIAL)
    session, text = Session(model, chats=[batch]), model.to_string(batch.tokens[0])
    assert batch.roles is not None
    roles = batch.roles[0].tolist()
    ids = model.text.batch(text).tokens[0]
    assert session.roles(batch.tokens[0]) == roles
    assert session.roles(ids[2:]) is None
    assert ids.tolist() == batch.tokens[0].tolist()
    asked = EditedPrompt(prompt=text, tab="tab")
    assert answers.tokens(session, asked)["roles"] == roles
    look = Look(prompt=text, tab="tab")
    assert answers.look(session, look, session.pair(look, Event()), Event())["roles"] == roles
    more = [*batch.tokens[0].tolist(), 5]
    assert session.roles(ids.new_tensor(more)) == [*roles, "assistant"]
    assert Session(model).roles(batch.tokens[0]) is None
