"""A live page of the demo model on a free port, and a browser that reaches this machine only."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
import torch

from interp import HookedTransformer
from interp.causal import Subspace
from interp.cli.commands import CORRUPT, PROMPT
from interp.data.batch import Batch
from interp.model import MLP, ModelConfig, Transformer
from interp.model.config import Rotary
from tests.data.templates import CHATML
from tests.data.test_chats import TALK, model_of
from tests.pages.visits import ARGS, BROWSER, NARROW, WIDE

if TYPE_CHECKING:
    from playwright import sync_api

    from interp.serve.session import Session

ONLY_HERE = [f"{arg}, EXCLUDE 127.0.0.1" if "resolver" in arg else arg for arg in ARGS]


@dataclass
class Live:
    """A running server and its session."""

    address: str
    session: "Session"


@dataclass
class Tab:
    """An open page, what it asked for and what it complained about."""

    page: "sync_api.Page"
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    bodies: list[str] = field(default_factory=list)

    def sent(self) -> dict:
        """The last question, as the page sent it."""
        return json.loads(self.bodies[-1])

    def settled(self) -> None:
        """Wait until the page has shown an answer and computes nothing."""
        from playwright.sync_api import expect

        expect(self.page.locator("#cancel")).to_be_disabled()
        expect(self.page.locator("#status")).to_contain_text(" ms")

    def act(self, selector: str) -> None:
        """Click and wait for the answer."""
        self.page.locator("#status").evaluate("element => { element.textContent = '' }")
        self.page.click(selector)
        self.settled()

    def texts(self, selector: str) -> list[str]:
        return self.page.locator(selector).all_inner_texts()


def _running(session: "Session", prompt: str, second: str) -> Iterator[Live]:
    from interp.serve.app import ServedModel, opened
    from interp.serve.document import Opening
    from interp.serve.snippet import Origin

    served = opened(ServedModel(session, Origin("demo-4l"), Opening(prompt, second)))
    thread = threading.Thread(target=served.run)
    thread.start()
    yield Live(served.address, session)
    served.server.should_exit = True
    thread.join(30)
    assert not thread.is_alive()


def _session(model: HookedTransformer, layer: int = 2, chats: Sequence[Batch] = ()) -> "Session":
    pytest.importorskip("starlette", reason="no starlette: the extra `serve` is not installed")
    pytest.importorskip("uvicorn", reason="no uvicorn: the extra `serve` is not installed")
    from interp.serve.session import Session

    vector = torch.randn(1, model.cfg.d_model, generator=torch.Generator().manual_seed(1))
    return Session(
        model, [Subspace(f"blocks.{layer}.hook_resid_post", vector.to(model.transformer.dtype))], chats
    )


@pytest.fixture(scope="session")
def live() -> Iterator[Live]:
    yield from _running(_session(HookedTransformer.from_pretrained("demo-4l")), PROMPT, CORRUPT)


LONG = f"{PROMPT} " * 60


@pytest.fixture(scope="session")
def long_live() -> Iterator[Live]:
    """A server of a model with a long context, which opens on a prompt of more than 900 tokens."""
    torch.manual_seed(3)
    demo = HookedTransformer.from_pretrained("demo-4l")
    tokenizer = demo.text.tokenizer
    config = ModelConfig(3, 32, 2, n_ctx=1100, d_vocab=demo.cfg.d_vocab, mlp=MLP(48), position=Rotary())
    session = _session(HookedTransformer(Transformer(config), tokenizer))
    yield from _running(session, LONG, LONG.replace(" Mary", " John", 3))


@pytest.fixture(scope="session")
def chat_live() -> Iterator[Live]:
    """A server of a random model with a chat template, which opens on a chat whose last turn is the user's."""
    model = model_of(CHATML)
    model.text.prepend_bos = False  # so that the text of a chat is its tokens
    batch = model.to_batch(chat=TALK)
    yield from _running(_session(model, 1, [batch]), model.to_string(batch.tokens[0]), "")


@pytest.fixture(scope="session")
def browser(chromium: "sync_api.BrowserType") -> Iterator["sync_api.Browser"]:
    running = chromium.launch(executable_path=BROWSER, args=ONLY_HERE)
    yield running
    running.close()


Opener = Callable[..., Tab]


@pytest.fixture
def visit(browser: "sync_api.Browser", live: Live) -> Iterator[Opener]:
    yield from _visits(browser, live)


@pytest.fixture
def long_visit(browser: "sync_api.Browser", long_live: Live) -> Iterator[Opener]:
    yield from _visits(browser, long_live)


@pytest.fixture
def chat_visit(browser: "sync_api.Browser", chat_live: Live) -> Iterator[Opener]:
    yield from _visits(browser, chat_live)


def _visits(browser: "sync_api.Browser", live: Live) -> Iterator[Opener]:
    """Opens tabs; whatever a test does, nothing foreign is asked for, nothing logged, nothing wider than the window."""
    tabs: list[Tab] = []

    def opener(width: int = WIDE, **options: object) -> Tab:
        page = browser.new_page(viewport={"width": width, "height": 900}, **options)
        tab = Tab(page)
        page.on("request", lambda request: tab.requests.append(request.url))
        page.on("request", lambda request: request.post_data and tab.bodies.append(request.post_data))
        page.on("console", lambda message: tab.complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: tab.complaints.append(str(error)))
        page.goto(live.address)
        tab.settled()
        tabs.append(tab)
        return tab

    yield opener
    for tab in tabs:
        wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert tab.page.evaluate(wide) <= 0
        foreign = [url for url in tab.requests if not url.startswith((live.address, "data:,"))]
        assert foreign == []
        assert tab.complaints == []
        tab.page.close()


@pytest.fixture(params=[(NARROW, "dark"), (WIDE, "light")], ids=["narrow-dark", "wide-light"])
def tab(request: pytest.FixtureRequest, visit: Opener) -> Tab:
    width, scheme = request.param
    return visit(width, color_scheme=scheme)
