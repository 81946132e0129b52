"""The application on a port of 127.0.0.1, until it is interrupted."""

import socket
from collections.abc import Callable

import uvicorn

from interp.serve.app import Subject, build
from interp.serve.guard import new_token

HOST = "127.0.0.1"


def serve(subject: Subject, port: int, ready: Callable[[str], None]) -> None:
    """Answer on 127.0.0.1 until Ctrl-C; `ready` gets the address, token included, once the port is open.

    port: 0 takes a free one. Errors: OSError for a port that is taken.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((HOST, port))
        listening.listen(64)
        bound, token = listening.getsockname()[1], new_token()
        config = uvicorn.Config(
            build(subject, token, bound), log_level="error", access_log=False, server_header=False, ws="none",
            limit_concurrency=64, timeout_graceful_shutdown=2, timeout_keep_alive=30,
        )  # fmt: skip
        ready(f"http://{HOST}:{bound}/{token}/")
        try:
            uvicorn.Server(config).run(sockets=[listening])
        except KeyboardInterrupt:
            return
