"""Who may talk to the page: only this machine's own browser, by the URL that was printed.

A page of another origin cannot reach it: its Origin is refused, a name that resolves to 127.0.0.1 fails on Host (DNS
rebinding), and none knows the token. Answers say that nothing of another origin may be loaded, framed or asked.
"""

import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from interp.serve.asks import MAX_BODY

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
        return await JSONResponse({"error": reason}, status)(scope, receive, sealed)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers = Headers(scope=scope)
        if headers.getlist("host") not in [[host] for host in self._hosts]:
            return 403, "this Host is not served"
        origin = headers.get("origin")
        if origin is not None and origin.removeprefix("http://") not in self._hosts:
            return 403, "this Origin may not ask"
        given = scope["path"].removeprefix("/").partition("/")[0]
        if not secrets.compare_digest(given.encode("utf-8", "replace"), self._token):
            return (
                404,
                "not found: the address printed by `interp serve` holds the token that is missing here",
            )
        return _of_body(headers, origin) if scope["method"] not in ("GET", "HEAD") else None


def _of_body(headers: Headers, origin: str | None) -> tuple[int, str] | None:
    """Why a request that asks for something is refused."""
    if origin is None:
        return 403, "an Origin is required"
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        return 415, "application/json is required"
    length = headers.get("content-length", "")
    if not (length.isascii() and length.isdigit()) or "transfer-encoding" in headers:
        return 411, "a Content-Length is required"
    if len(length) > 12 or int(length) > MAX_BODY:
        return 413, f"at most {MAX_BODY} bytes are read"
    return None
