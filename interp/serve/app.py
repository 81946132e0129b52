"""The live page on a port of 127.0.0.1: its routes (page, style, script, six questions), and who may use them.

Whatever goes wrong is JSON with the reason. Only this machine's own browser may ask, by the URL that was printed: a
page of another origin cannot reach it (its Origin is refused, a name that resolves to 127.0.0.1 fails on Host, DNS
rebinding, and none knows the token). Answers say that nothing of another origin may be loaded, framed or asked. One job
runs at a time; others wait their turn, and a page's newer question stops its older one.
"""

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from interp.serve import answers, asks, document
from interp.serve.asks import MAX_BODY
from interp.serve.session import Session, Stopped
from interp.serve.snippet import Origin, python

T = TypeVar("T")
MOST_WAITING = 16


class BusyError(RuntimeError):
    """Too many computations wait already."""


class JobQueue:
    """Runs computations one after the other in a thread of its own."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="interp-serve")
        self._flags: dict[str, Event] = {}
        self._waiting = 0

    async def run(self, tab: str, work: Callable[[Event], T]) -> T | None:
        """What `work` returns, or None where it was stopped; `work` looks at its flag and raises `Stopped`.

        Raises:
            BusyError: if too many wait; whatever `work` raises.
        """
        if self._waiting >= MOST_WAITING:
            raise BusyError(f"{MOST_WAITING} computations wait already: ask again when some have ended")
        self.stop(tab)
        flag = self._flags[tab] = Event()

        def turn() -> T | None:
            try:
                return None if flag.is_set() else work(flag)
            except Stopped:
                return None

        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, turn)
        finally:
            flag.set()  # also where nobody waits for the answer any more
            self._waiting -= 1
            if self._flags.get(tab) is flag:
                del self._flags[tab]

    def stop(self, tab: str) -> bool:
        """Stop what a page waits for; whether there was anything."""
        flag = self._flags.get(tab)
        if flag is not None:
            flag.set()
        return flag is not None

    def close(self) -> None:
        """Stop everything."""
        for flag in self._flags.values():
            flag.set()
        self._thread.shutdown(wait=False, cancel_futures=True)


ANSWERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


NO_TOKEN = (
    "<!doctype html><html lang=en><meta charset=utf-8><title>interp serve</title><h1>interp serve</h1><p>The page of "
    "this model has an address that nobody can guess. It stands in the terminal where <code>interp serve</code> was "
    "started: copy the whole line, the part after the last colon included."
)
"""What a browser shows at the address without its token."""


def new_token() -> str:
    """A fresh secret for the URL: 256 bits."""
    return secrets.token_urlsafe(32)


class Guard:
    """ASGI middleware: Host, Origin, token, kind and size are checked before anything else sees a request."""

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self._app = app
        self._token = token.encode()
        self._hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or refuse with the reason."""
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            return None  # no other protocol is spoken: the connection is dropped

        async def sealed(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(ANSWERS)
            await send(message)

        refusal = self._refusal(scope)
        if refusal is None:
            return await self._app(scope, receive, sealed)
        status, reason = refusal
        if scope["path"] == "/" and scope["method"] in ("GET", "HEAD") and status == 404:
            return await HTMLResponse(NO_TOKEN, status)(scope, receive, sealed)
        return await JSONResponse({"error": reason}, status)(scope, receive, sealed)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers = Headers(scope=scope)
        if headers.getlist("host") not in [[host] for host in self._hosts]:
            return 403, "this Host is not served"
        origins = headers.getlist("origin")
        if origins not in [[], *([f"http://{host}"] for host in self._hosts)]:
            return 403, "this Origin may not ask"
        given = scope["path"].removeprefix("/").partition("/")[0]
        if not secrets.compare_digest(given.encode("utf-8", "replace"), self._token):
            return (
                404,
                "not found: the address printed by `interp serve` holds the token that is missing here",
            )
        return _of_body(headers) if scope["method"] not in ("GET", "HEAD") else None


def _of_body(headers: Headers) -> tuple[int, str] | None:
    """The reason why a POST request is refused."""
    if "origin" not in headers:
        return 403, "an Origin is required"
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        return 415, "application/json is required"
    length = headers.get("content-length", "")
    if not (length.isascii() and length.isdigit()) or "transfer-encoding" in headers:
        return 411, "a Content-Length is required"
    if len(length) > 12 or int(length) > MAX_BODY:
        return 413, f"at most {MAX_BODY} bytes are read"
    return None


log = logging.getLogger("interp.serve")
PATIENCE = 30.0
"""Seconds that a connection may stay open without a request, or a request without its body."""
LATE = 408
"""Status of a request with a body that did not arrive in time."""
STOPPED = 409
"""Status of what was stopped by a newer question, or by the reader."""


@dataclass(frozen=True)
class ServedModel:
    """A served model: a session, how its model was opened, and what the page begins with."""

    session: Session
    origin: Origin
    opening: document.Opening


def build(subject: ServedModel, token: str, port: int) -> Guard:
    """The application, guarded; it answers under `/token/` on this port of the loopback interface."""
    jobs, routes = JobQueue(), _Routes(subject)

    def asking(
        at: str, kind: type[asks.EditedPrompt], work: Callable[[asks.EditedPrompt, Event], object]
    ) -> Route:
        async def endpoint(request: Request) -> Response:
            return await _answered(jobs, kind, work, request)

        return Route(at, endpoint, methods=["POST"])

    async def cancel(request: Request) -> Response:
        try:
            cancelled = asks.parsed(asks.Cancel, await _body(request))
        except _BrokenOffError:
            return Response(status_code=LATE)
        except ValueError as cause:
            return _error(400, cause)
        return JSONResponse({"stopped": jobs.stop(cancelled.tab)})

    @asynccontextmanager
    async def life(app: Starlette) -> AsyncIterator[None]:
        yield
        jobs.close()

    inner = [
        Route("/", routes.page),
        Route("/style.css", routes.style),
        Route("/script.js", routes.script),
        asking("/tokens", asks.AnsweredPrompt, routes.tokens),
        asking("/look", asks.Look, routes.look),
        asking("/random", asks.RandomDirections, routes.random),
        asking("/continue", asks.Continue, routes.go_on),
        asking("/source", asks.PythonSource, routes.source),
        Route("/cancel", cancel, methods=["POST"]),
    ]
    handlers = {HTTPException: _http_error}
    app = Starlette(routes=[Mount(f"/{token}", routes=inner)], exception_handlers=handlers, lifespan=life)
    return Guard(app, token, port)


class _Routes:
    """The answer of each address."""

    def __init__(self, subject: ServedModel) -> None:
        self.subject = subject

    async def page(self, request: Request) -> Response:
        s = self.subject
        return HTMLResponse(document.page(s.session, s.origin.source, s.opening))

    async def style(self, request: Request) -> Response:
        return Response(document.style(), media_type="text/css")

    async def script(self, request: Request) -> Response:
        return Response(document.code(), media_type="text/javascript")

    def look(self, ask: asks.EditedPrompt, stop: Event) -> object:
        assert isinstance(ask, asks.Look)
        session, start = self.subject.session, time.perf_counter()
        ask.check_within(session.config)
        found = answers.look(session, ask, session.pair(ask, stop), stop)
        return found | {"seconds": round(time.perf_counter() - start, 4)}

    def tokens(self, ask: asks.EditedPrompt, stop: Event) -> object:
        return answers.tokens(self.subject.session, ask)

    def random(self, ask: asks.EditedPrompt, stop: Event) -> object:
        assert isinstance(ask, asks.RandomDirections)
        if not ask.steered:
            raise ValueError("an edit that adds a direction is required, got none")
        session = self.subject.session
        pair = session.pair(ask, stop)
        return answers.steered(session, pair, session.random(pair, stop), stop)

    def go_on(self, ask: asks.EditedPrompt, stop: Event) -> object:
        assert isinstance(ask, asks.Continue)
        session = self.subject.session
        return answers.continuations(session, ask, session.continuations(ask, stop))

    def source(self, ask: asks.EditedPrompt, stop: Event) -> object:
        asked = self.subject.session.checked(ask)
        return {"python": python(ask, self.subject.origin, asked.position, asked.answer)}


async def _answered(
    jobs: JobQueue,
    kind: type[asks.EditedPrompt],
    work: Callable[[asks.EditedPrompt, Event], object],
    request: Request,
) -> Response:
    try:
        ask = asks.parsed(kind, await _body(request))
        found = await jobs.run(ask.tab, lambda stop: work(ask, stop))
    except _BrokenOffError:
        return Response(status_code=LATE)
    except BusyError as cause:
        return _error(503, cause)
    except (ValueError, KeyError, IndexError, ArithmeticError) as cause:
        return _error(400, cause)
    except Exception as cause:
        if isinstance(cause.__cause__, ValueError):  # an edit that did not fit the values it met
            return _error(400, cause.__cause__)
        log.exception("a question failed")
        return _error(500, cause)
    if found is None:
        return JSONResponse({"error": "stopped"}, STOPPED)
    return JSONResponse(found)


class _BrokenOffError(Exception):
    """A request with a body that did not arrive, or not in time."""


async def _body(request: Request) -> bytes:
    """The body of a request; a line in the log if it is broken off, or not there in time."""
    try:
        return await asyncio.wait_for(request.body(), PATIENCE)
    except (ClientDisconnect, TimeoutError) as cause:
        log.warning("a request was broken off before its body was there")
        raise _BrokenOffError from cause


class Impatient(H11Protocol):
    """HTTP on one connection, which is closed once no request has been at work on it for `PATIENCE` seconds."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to look whether anything happens."""
        super().connection_made(transport)
        self._look(was_idle=False)

    def _look(self, *, was_idle: bool) -> None:
        """Idle at two looks in a row, and the connection goes, also one on which a request comes in pieces for ever."""
        idle = self.cycle is None or self.cycle.response_complete
        if was_idle and idle:
            self.transport.close()
        elif not self.transport.is_closing():
            self.loop.call_later(PATIENCE / 2, partial(self._look, was_idle=idle))


def _error(status: int, cause: Exception) -> Response:
    """The message of an error; a KeyError's is its argument."""
    reason = cause.args[0] if isinstance(cause, KeyError) and cause.args else cause
    if status >= 500:
        reason = f"{type(cause).__name__}: {cause}"
    return JSONResponse({"error": " ".join(str(reason).split())}, status)


async def _http_error(request: Request, cause: Exception) -> Response:
    assert isinstance(cause, HTTPException)
    return JSONResponse({"error": cause.detail.lower()}, cause.status_code, cause.headers)


HOST = "127.0.0.1"


@dataclass(frozen=True, eq=False)
class Served:
    """A server that is about to answer: run it, or have it run in a thread and set `server.should_exit`."""

    server: uvicorn.Server
    socket: socket.socket
    address: str
    """The page's URL, token included."""

    def run(self) -> None:
        """Answer until interrupted, then close the port."""
        with self.socket:
            self.server.run(sockets=[self.socket])


def opened(subject: ServedModel, port: int = 0) -> Served:
    """The application on a port of the loopback interface (0: a free one) with a fresh token.

    Raises:
        OSError: a port that is taken.
    """
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((HOST, port))
        listening.listen(64)
    except OSError:
        listening.close()
        raise
    bound, token = listening.getsockname()[1], new_token()
    config = uvicorn.Config(
        build(subject, token, bound), log_level="error", access_log=False, server_header=False, ws="none",
        timeout_graceful_shutdown=2, http=Impatient,
    )  # fmt: skip
    return Served(uvicorn.Server(config), listening, f"http://{HOST}:{bound}/{token}/")


def serve(subject: ServedModel, port: int, ready: Callable[[str], None]) -> None:
    """Answer requests on 127.0.0.1 until Ctrl-C; `ready` gets the address once the port is open.

    Raises:
        OSError: as `opened`.
    """
    served = opened(subject, port)
    ready(served.address)
    try:
        served.run()
    except KeyboardInterrupt:
        return
