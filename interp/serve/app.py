"""The routes: the page, its style and script, and four questions. Whatever goes wrong is JSON with the reason."""

import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from threading import Event

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Mount, Route

from interp.serve import answers, asks, document
from interp.serve.guard import Guard
from interp.serve.jobs import BusyError, JobQueue
from interp.serve.session import Session
from interp.serve.snippet import Origin, python

log = logging.getLogger("interp.serve")
STOPPED = 409
"""Status of what was stopped by a newer question, or by the reader."""


@dataclass(frozen=True)
class Subject:
    """What is served: a session, how its model was opened, and the prompts that the page begins with."""

    session: Session
    origin: Origin
    prompt: str
    second: str = ""


def build(subject: Subject, token: str, port: int) -> Guard:
    """The application, guarded; it answers under `/token/` on this port of the loopback interface."""
    jobs, routes = JobQueue(), _Routes(subject)

    def asking(kind: type[asks.Ask], work: Callable[[asks.Ask, Event], object]) -> Route:
        async def endpoint(request: Request) -> Response:
            return await _answered(jobs, kind, work, request)

        return Route(f"/{kind.__name__.lower()}", endpoint, methods=["POST"])

    async def cancel(request: Request) -> Response:
        try:
            asked = asks.parsed(asks.Cancel, await request.body())
        except ValueError as cause:
            return _error(400, cause)
        return JSONResponse({"stopped": jobs.stop(asked.tab)})

    @asynccontextmanager
    async def life(app: Starlette) -> AsyncIterator[None]:
        yield
        jobs.close()

    inner = [
        Route("/", routes.page),
        Route("/style.css", routes.style),
        Route("/script.js", routes.script),
        asking(asks.Look, routes.look),
        asking(asks.Continue, routes.go_on),
        asking(asks.Source, routes.source),
        Route("/cancel", cancel, methods=["POST"]),
    ]
    handlers = {HTTPException: _http_error}
    app = Starlette(routes=[Mount(f"/{token}", routes=inner)], exception_handlers=handlers, lifespan=life)
    return Guard(app, token, port)


class _Routes:
    """What each address answers."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject

    async def page(self, request: Request) -> Response:
        s = self.subject
        return HTMLResponse(document.page(s.session, s.origin.source, s.prompt, s.second))

    async def style(self, request: Request) -> Response:
        return Response(document.style(), media_type="text/css")

    async def script(self, request: Request) -> Response:
        return Response(document.code(), media_type="text/javascript")

    def look(self, ask: asks.Ask, stop: Event) -> object:
        assert isinstance(ask, asks.Look)
        session, start = self.subject.session, time.perf_counter()
        found = answers.look(session, ask, session.pair(ask, stop))
        return found | {"seconds": round(time.perf_counter() - start, 4)}

    def go_on(self, ask: asks.Ask, stop: Event) -> object:
        assert isinstance(ask, asks.Continue)
        session = self.subject.session
        return answers.continuations(session, ask, session.continuations(ask, stop))

    def source(self, ask: asks.Ask, stop: Event) -> object:
        _, _, position = self.subject.session.checked(ask)
        return {"python": python(ask, self.subject.origin, position)}


async def _answered(
    jobs: JobQueue, kind: type[asks.Ask], work: Callable[[asks.Ask, Event], object], request: Request
) -> Response:
    try:
        ask = asks.parsed(kind, await request.body())
        found = await jobs.run(ask.tab, lambda stop: work(ask, stop))
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


def _error(status: int, cause: Exception) -> Response:
    """The message of an error; a KeyError's is its argument."""
    reason = cause.args[0] if isinstance(cause, KeyError) and cause.args else cause
    if status >= 500:
        reason = f"{type(cause).__name__}: {cause}"
    return JSONResponse({"error": " ".join(str(reason).split())}, status)


async def _http_error(request: Request, cause: Exception) -> Response:
    assert isinstance(cause, HTTPException)
    return JSONResponse({"error": cause.detail.lower()}, cause.status_code, cause.headers)
