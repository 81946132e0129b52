"""The application as a client meets it: who is let in, what is refused, one computation at a time, and no end to it."""

import asyncio
import copy
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from urllib.parse import urlsplit

import pytest
import torch

pytest.importorskip("starlette", reason="no starlette: the extra `serve` is not installed")
pytest.importorskip("pydantic", reason="no pydantic: the extra `serve` is not installed")
pytest.importorskip("httpx", reason="no httpx, which the test client is made of")

import httpx
from starlette.testclient import TestClient

from interp.serve import app as app_module
from interp.serve.answers import tokens
from interp.serve.app import Guard, Served, ServedModel, build, new_token, opened
from interp.serve.asks import MAX_BODY, Look, parsed
from interp.serve.document import Opening
from interp.serve.session import Session, Stopped
from interp.serve.snippet import Origin
from tests.serve.asking import PROMPT, SECOND, asked, body, unpacked
from tests.tiny import hooked
from tests.tolerances import TOLERANCES

TOKEN, PORT = "t0ken-of_the-tests", 8000
HERE = f"http://127.0.0.1:{PORT}"
JSON = {"content-type": "application/json", "origin": HERE}
ZERO = [{"where": "L0H1", "change": "zero"}]
HOSTILE = "</textarea><script>alert(1)</script>\u202e"


@pytest.fixture
def session() -> Session:
    return Session(hooked("gpt2", torch.float32))


@pytest.fixture
def app(session: Session) -> Guard:
    return build(ServedModel(session, Origin("tiny"), Opening(PROMPT, HOSTILE)), TOKEN, PORT)


@pytest.fixture
def client(app: Guard) -> Iterator[TestClient]:
    with TestClient(app, base_url=HERE) as client:
        yield client


def post(client: TestClient, path: str, content: bytes, **headers: str) -> httpx.Response:
    return client.post(f"/{TOKEN}/{path}", content=content, headers=JSON | headers)


# --- who is let in ----------------------------------------------------------------------------------------------------


def test_the_page_and_what_it_loads_are_there_and_sealed(client: TestClient) -> None:
    for path, kind in {"": "text/html", "style.css": "text/css", "script.js": "text/javascript"}.items():
        answer = client.get(f"/{TOKEN}/{path}")
        assert answer.status_code == 200 and answer.headers["content-type"].startswith(kind)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["referrer-policy"] == "no-referrer"


def test_the_page_shows_text_as_text_and_runs_only_its_own_script(client: TestClient) -> None:
    page = client.get(f"/{TOKEN}/").text
    assert "alert(1)" in page and "<script>alert" not in page
    assert page.count("<script") == 2 and " style=" not in page and "onclick" not in page
    assert "http" not in page.replace("http-equiv", "")


NOWHERE = (
    "/look",
    "/wrong/",
    f"/{TOKEN[:-1]}/",
    f"/{TOKEN}x/",
    f"/x/{TOKEN}/",
    "/%00/",
)
FOREIGN_HOSTS = (
    "evil.example",
    f"evil.example:{PORT}",
    "127.0.0.1",
    "127.0.0.1:1",
    f"127.0.0.1:{PORT}.evil.example",
    "",
)
FOREIGN = (
    "http://evil.example",
    "null",
    f"https://127.0.0.1:{PORT}",
    "http://127.0.0.1",
    "http://127.0.0.1:1",
    f"127.0.0.1:{PORT}",
    f"localhost:{PORT}",
    "",
    "file://",
)


@pytest.mark.parametrize("path", NOWHERE)
def test_without_the_token_there_is_nothing(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404 and "token" in answer.json()["error"] and TOKEN not in answer.text
    assert client.post(path, content=body(), headers=JSON).status_code == 404


def test_the_address_without_its_token_says_where_the_whole_one_stands(client: TestClient) -> None:
    for path in ("", "/", f"//{TOKEN}/"):
        answer = client.get(path)
        assert answer.status_code == 404 and answer.headers["content-type"].startswith("text/html")
        assert "terminal" in answer.text and TOKEN not in answer.text
        assert answer.headers["content-security-policy"].startswith("default-src 'none'")
        assert client.post(path, content=body(), headers=JSON).status_code == 404


@pytest.mark.parametrize("host", FOREIGN_HOSTS)
def test_a_name_that_is_not_ours_is_refused_whatever_it_resolves_to(client: TestClient, host: str) -> None:
    assert client.get(f"/{TOKEN}/", headers={"host": host}).status_code == 403
    assert post(client, "look", body(), host=host).status_code == 403


def test_two_origins_are_refused_even_if_one_is_ours(client: TestClient) -> None:
    headers = [*JSON.items(), ("origin", JSON["origin"])]
    assert client.post(f"/{TOKEN}/look", content=body(), headers=headers).status_code == 403


@pytest.mark.parametrize("origin", FOREIGN)
def test_pages_of_another_origin_are_refused(client: TestClient, origin: str) -> None:
    answer = post(client, "look", body(), origin=origin)
    assert answer.status_code == 403 and "Origin" in answer.json()["error"]
    assert client.get(f"/{TOKEN}/", headers={"origin": origin}).status_code == 403


def test_a_question_requires_an_origin_the_kind_and_the_size(client: TestClient) -> None:
    def status(content: object, **headers: str) -> int:
        return client.post(f"/{TOKEN}/look", content=content, headers=headers).status_code  # type: ignore[arg-type]

    assert status(body(), **{"content-type": "application/json"}) == 403
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        assert status(body(), **JSON | {"content-type": kind}) == 415
    assert status(b" " * (MAX_BODY + 1), **JSON) == 413
    assert status(iter([body()]), **JSON) == 411
    assert status(body(), **JSON | {"content-length": "9" * 20}) == 413
    assert status(body(), **JSON) == 200


def test_tokens_are_long_and_never_the_same() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100 and min(map(len, tokens)) >= 43


# --- answers ----------------------------------------------------------------------------------------------------------


def test_a_question_is_answered_with_the_sessions_numbers(client: TestClient, session: Session) -> None:
    answer = post(client, "look", body(edits=ZERO, scores=True, moved=True)).json()
    assert answer.pop("seconds") > 0
    assert answer | {"pattern": unpacked(answer["pattern"])} == asked(session, edits=ZERO)
    assert answer["edits"] == ["L0H1 → 0"]


def test_the_tokens_of_both_prompts_are_answered_without_a_pass(client: TestClient, session: Session) -> None:
    answer = post(client, "tokens", body(second=SECOND)).json()
    fields = ("tokens", "prompt_length", "roles", "second")
    assert answer == {name: asked(session, second=SECOND)[name] for name in fields}
    assert post(client, "tokens", body()).json()["second"] is None
    fresh = Session(session.model)
    assert tokens(fresh, parsed(Look, body()))["tokens"] == answer["tokens"] and not fresh._rows


def test_scores_of_heads_are_answered_where_they_are_asked_for(client: TestClient) -> None:
    plain = post(client, "look", body(edits=ZERO)).json()
    assert plain["scores"] is None and plain["moved"] is None
    moved = post(client, "look", body(edits=ZERO, moved=True)).json()
    assert moved["moved"] is not None and moved["scores"] is None


def test_random_directions_stand_beside_those_that_are_added_and_nothing_else(client: TestClient) -> None:
    answer = post(client, "random", body(edits=ZERO))
    assert (
        answer.status_code == 400
        and answer.json()["error"] == "an edit that adds a direction is required, got none"
    )


def test_continuations_and_the_script_are_answered(client: TestClient) -> None:
    found = post(client, "continue", body(edits=ZERO, tokens=3, temperature=0)).json()
    assert found["tokens"] == [3, 3] and found["greedy"]
    script = post(client, "source", body(edits=ZERO)).json()["python"]
    compile(script, "script", "exec")
    assert "from_pretrained('tiny')" in script and "interp.Edit('L0H1', interp.edits.Zero())" in script


@pytest.mark.parametrize("name", ["layer", "head"])
def test_layers_and_heads_that_the_model_lacks_are_refused(
    client: TestClient, session: Session, name: str
) -> None:
    count = getattr(session.config, f"n_{name}s")
    answer = post(client, "look", body(**{name: count}))
    reason = f"the {name} must be less than {count}, the number that the model has, got {count}"
    assert (answer.status_code, answer.json()) == (400, {"error": reason})
    assert post(client, "look", body(**{"layer": 0, name: count - 1})).status_code == 200


def test_errors_are_json_with_the_reason(
    client: TestClient, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert post(client, "look", body(position=99)).json() == {
        "error": "a position from 0 to 9 is required, got 99"
    }
    alone = [
        {
            "where": "L0.attn_scores",
            "change": "set",
            "values": "-inf",
            "at": {"head": 0, "query": 0, "key": 0},
        }
    ]
    answer = post(client, "look", body(edits=alone))
    assert answer.status_code == 400 and answer.json()["error"].endswith("no weight can be renormalised")
    assert client.get(f"/{TOKEN}/nothing").json() == {"error": "not found"}
    assert client.get(f"/{TOKEN}/look").status_code == 405
    assert client.delete(f"/{TOKEN}/look", headers=JSON | {"content-length": "0"}).status_code == 405

    def broken(*given: object) -> None:
        raise TypeError("a defect of ours")

    monkeypatch.setattr(session, "pair", broken)
    answer = post(client, "look", body())
    assert answer.status_code == 500 and answer.json() == {"error": "TypeError: a defect of ours"}


# --- one at a time ----------------------------------------------------------------------------------------------------


class Slow:
    """In place of `Session.pair`: waits until it is stopped or released, and notes how many run at once."""

    def __init__(self, session: Session) -> None:
        self.real, self.released, self.started = session.pair, Event(), threading.Semaphore(0)
        self.now = self.most = 0

    def __call__(self, ask: Look, stop: Event) -> object:
        self.now += 1
        self.most = max(self.most, self.now)
        self.started.release()
        try:
            for _ in range(4000):
                if self.released.wait(0.005):
                    break
                if stop.is_set():
                    raise Stopped
            else:
                raise TimeoutError("neither stopped nor released")
            return self.real(ask, stop)
        finally:
            self.now -= 1


def together(app: Guard, play: object) -> object:
    """Run a coroutine that gets a client inside one event loop."""

    async def run() -> object:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url=HERE, headers=JSON
        ) as client:
            return await play(client)  # type: ignore[operator]

    with ThreadPoolExecutor(1) as own:  # a browser's fixture may keep a loop running in this thread
        return own.submit(lambda: asyncio.run(run())).result()


async def begun(slow: Slow) -> None:
    while not slow.started.acquire(blocking=False):
        await asyncio.sleep(0.002)


def test_a_newer_question_of_the_same_page_stops_the_older(
    app: Guard, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(session)
    monkeypatch.setattr(session, "pair", slow)

    async def play(client: httpx.AsyncClient) -> list[httpx.Response]:
        old = asyncio.ensure_future(client.post(f"/{TOKEN}/look", content=body(tab="one")))
        await begun(slow)
        new = asyncio.ensure_future(client.post(f"/{TOKEN}/look", content=body(tab="one", edits=ZERO)))
        first = await old
        slow.released.set()
        return [first, await new]

    old, new = together(app, play)
    assert (old.status_code, old.json()) == (409, {"error": "stopped"})
    assert new.status_code == 200 and new.json()["edits"] == ["L0H1 → 0"]
    assert slow.most == 1


def test_two_pages_take_turns_and_neither_stops_the_other(
    app: Guard, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(session)
    monkeypatch.setattr(session, "pair", slow)

    async def play(client: httpx.AsyncClient) -> list[httpx.Response]:
        asking = [
            asyncio.ensure_future(client.post(f"/{TOKEN}/look", content=body(tab=tab, edits=edits)))
            for tab, edits in (("one", ZERO), ("two", []))
        ]
        await begun(slow)
        slow.released.set()
        return await asyncio.gather(*asking)

    one, two = together(app, play)
    assert one.status_code == two.status_code == 200
    assert one.json()["edits"] == ["L0H1 → 0"] and two.json()["edits"] == []
    assert slow.most == 1


def test_cancel_stops_what_this_page_asked_and_nothing_else(
    app: Guard, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(session)
    monkeypatch.setattr(session, "pair", slow)

    async def play(client: httpx.AsyncClient) -> list[object]:
        asking = asyncio.ensure_future(client.post(f"/{TOKEN}/look", content=body(tab="one")))
        await begun(slow)
        other = await client.post(f"/{TOKEN}/cancel", content=json.dumps({"tab": "two"}))
        running = not asking.done()
        mine = await client.post(f"/{TOKEN}/cancel", content=json.dumps({"tab": "one"}))
        return [other.json(), running, mine.json(), (await asking).status_code]

    assert together(app, play) == [{"stopped": False}, True, {"stopped": True}, 409]
    slow.released.set()
    assert session.pair(parsed(Look, body()), Event())


def test_too_many_waiting_questions_are_refused(
    app: Guard, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(session)
    monkeypatch.setattr(session, "pair", slow)

    async def play(client: httpx.AsyncClient) -> list[int]:
        asking = [
            asyncio.ensure_future(client.post(f"/{TOKEN}/look", content=body(tab=f"tab{i}")))
            for i in range(20)
        ]
        done, _ = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        early = [task.result().status_code for task in done]
        slow.released.set()
        return early[:1] + sorted(answer.status_code for answer in await asyncio.gather(*asking))

    first, *statuses = together(app, play)
    assert first == 503 and statuses == [200] * 16 + [503] * 4


# --- 1 000 malformed requests -----------------------------------------------------------------------------------------

JUNK = [
    None,
    True,
    -1,
    0,
    3,
    10**30,
    1.5,
    -0.0,
    1e308,
    "",
    "x",
    "\x00",
    "é" * 50,
    [],
    {},
    [[]],
    {"to": "zero"},
    {"pos": [-1]},
    {"dtype": "float32", "shape": [1], "bytes": "AAAAAA=="},
    "-inf",
    "L0.attn_bias",
    "detach",
    "../..",
    HOSTILE,
]
KINDS = [
    *ZERO, {"where": "L1.mlp", "change": "mean", "over": "reference", "at": {"pos": [1, 2]}},
    {"where": "L0N3", "change": "set", "values": 2.0},
    {"where": "L1.attn_scores", "change": "set", "values": "-inf", "at": {"head": 0, "query": 3, "key": 1}},
    {"where": "L0.pattern", "change": "set", "values": 0.0, "at": {"head": 1, "query": 3, "key": 1}},
    {"where": "L1.resid", "change": "resample", "at": {"pos": 2}},
]  # fmt: skip


def _inside(edits: list[object]) -> list[dict[str, object]]:
    """Every object that edits are made of."""
    found = [edit for edit in edits if isinstance(edit, dict)]
    return found + [edit["at"] for edit in found if isinstance(edit.get("at"), dict)]


def malformed(generator: random.Random) -> tuple[str, str, dict[str, str], bytes]:
    """A request with something wrong in it, most of the time: method, path, headers, body."""
    ask: dict[str, object] = json.loads(
        body(
            second=SECOND,
            edits=[copy.deepcopy(generator.choice(KINDS)) for _ in range(generator.randint(0, 3))],
            **generator.choice([{}, {"answer": " the dog"}, {"answer": [262, 317], "wrong": " cat"}]),
        )
    )
    for _ in range(generator.randint(1, 3)):
        target = (
            generator.choice([ask, *_inside(ask["edits"])]) if isinstance(ask.get("edits"), list) else ask
        )
        key = generator.choice([*target, "extra", "__proto__", "__class__"])
        if generator.random() < 0.2:
            target.pop(key, None)
        else:
            target[key] = copy.deepcopy(generator.choice(JUNK))
    text = json.dumps(ask).encode()
    if generator.random() < 0.3:
        cut = generator.randrange(len(text) + 1)
        text = (
            text[:cut] + generator.randbytes(generator.randint(0, 8)) + text[cut + generator.randint(0, 8) :]
        )
    headers = dict(JSON)
    if generator.random() < 0.1:
        headers[generator.choice(["origin", "host", "content-type", "content-length"])] = generator.choice(
            ["null", "x", "1e9", "-1", "a/b"]
        )
    path = generator.choice(
        [f"/{TOKEN}/{name}" for name in ("look", "look", "continue", "source", "cancel")]
        + ["/", f"/{TOKEN}/../look"]
    )
    return generator.choice(["POST"] * 9 + ["PUT"]), path, headers, text


@pytest.mark.slow
def test_a_thousand_malformed_requests_leave_it_answering(client: TestClient) -> None:
    generator, statuses = random.Random(10), []
    before = {k: v for k, v in post(client, "look", body(edits=ZERO)).json().items() if k != "seconds"}
    for _ in range(1000):
        method, path, headers, text = malformed(generator)
        answer = client.request(method, path, content=text, headers=headers)
        found = answer.json()
        assert answer.status_code < 500, (method, path, headers, text, found)
        if answer.status_code != 200:
            assert list(found) == ["error"] and found["error"] and "Traceback" not in found["error"]
        statuses.append(answer.status_code)
    assert {400, 403, 404, 405, 415} <= set(statuses) and statuses.count(200) < 200
    after = post(client, "look", body(edits=ZERO)).json()
    assert_alike({k: v for k, v in after.items() if k != "seconds"}, before)


def assert_alike(found: object, expected: object) -> None:
    """Equal but for rounding: of float32 in a pass beside other rows, and of the answer to 4 or 6 digits."""
    assert type(found) is type(expected)
    if isinstance(found, dict) and isinstance(expected, dict):
        assert list(found) == list(expected)
        for name, value in found.items():
            assert_alike(value, expected[name])
    elif isinstance(found, list) and isinstance(expected, list):
        for ours, theirs in zip(found, expected, strict=True):
            assert_alike(ours, theirs)
    else:
        assert found == (within(found, expected) if isinstance(expected, float) else expected)


def within(found: object, expected: float) -> object:
    """As near as two float32 passes are, and one unit of the last digit that either is rounded to."""
    rtol, atol = TOLERANCES[torch.float32]
    last = 1e-4 if isinstance(found, float) and found == round(found, 4) else 1e-6
    return pytest.approx(expected, rel=None, abs=rtol * abs(expected) + atol + last)


def test_limits_that_a_dtype_rounds_to_0_are_answered(client: TestClient) -> None:
    for limits in ({"top_p": 1e-300}, {"temperature": 5e-324}, {"top_p": 5e-324, "temperature": 1e-45}):
        answer = post(client, "continue", body(tokens=2, **limits))
        assert answer.status_code == 200, (limits, answer.json())


# --- connections ------------------------------------------------------------------------------------------------------


@pytest.fixture
def served(session: Session, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A server on a port of its own that waits for nobody longer than half a second."""
    monkeypatch.setattr(app_module, "PATIENCE", 0.5)
    found = opened(ServedModel(session, Origin("tiny"), Opening(PROMPT, SECOND)))
    thread = threading.Thread(target=found.run)
    thread.start()
    while not found.server.started:
        time.sleep(0.01)
    yield found
    found.server.should_exit = True
    thread.join(30)
    assert not thread.is_alive()


def head(served: Served, length: int) -> bytes:
    _, _, here, token, _ = served.address.split("/")
    lines = [f"POST /{token}/look HTTP/1.1", f"Host: {here}", f"Origin: http://{here}",
             "Content-Type: application/json", f"Content-Length: {length}"]  # fmt: skip
    return "\r\n".join([*lines, "", ""]).encode()


def connected(served: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", urlsplit(served.address).port), timeout=20)


def read(connection: socket.socket) -> bytes:
    """Everything until the other side closes."""
    found = b""
    while piece := connection.recv(65_536):
        found += piece
    return found


def test_a_connection_that_asks_nothing_or_half_of_something_is_dropped(served: Served) -> None:
    asked = body()
    cases = {
        b"": b"", b"GET / HT": b"", head(served, 10)[:-2]: b"", head(served, 99) + b"{": b" 408 ",
        head(served, len(asked)) + asked: b" 200 ",
    }  # fmt: skip
    for sent, expected in cases.items():
        with connected(served) as connection:
            connection.sendall(sent)
            line = read(connection).split(b"\r\n")[0]
        assert (expected in line) if expected else line == b"", sent


def test_a_body_that_is_broken_off_is_one_line(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    for sent in (b"", b'{"tab": "t", "pro'):
        caplog.clear()
        with connected(served) as connection:
            connection.sendall(head(served, 500) + sent)
        while not caplog.records:
            time.sleep(0.01)
        time.sleep(0.2)
        said = [(record.getMessage(), record.exc_info) for record in caplog.records]
        assert said == [("a request was broken off before its body was there", None)]
