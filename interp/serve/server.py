"""The application on a port of 127.0.0.1, until it is interrupted."""

import socket
from collections.abc import Callable
from dataclasses import dataclass

import uvicorn

from interp.serve.app import Subject, build
from interp.serve.guard import new_token

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


def opened(subject: Subject, port: int = 0) -> Served:
    """The application on a port of the loopback interface (0: a free one) with a fresh token.

    Errors: OSError for a port that is taken.
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
        timeout_graceful_shutdown=2,
    )  # fmt: skip
    return Served(uvicorn.Server(config), listening, f"http://{HOST}:{bound}/{token}/")


def serve(subject: Subject, port: int, ready: Callable[[str], None]) -> None:
    """Answer on 127.0.0.1 until Ctrl-C; `ready` gets the address once the port is open. Errors: see `opened`."""
    served = opened(subject, port)
    ready(served.address)
    try:
        served.run()
    except KeyboardInterrupt:
        return
