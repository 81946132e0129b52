"""The command that serves the live page."""

import webbrowser
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated

import tyro

from interp.cli.commands import CORRUPT, PROMPT
from interp.cli.common import available

NEEDED = ("starlette", "uvicorn", "pydantic")


@dataclass(frozen=True)
class Serve:
    """Serve the live page of a model on this machine: type, edit by a click, and watch. Ctrl-C ends it."""

    model: Annotated[str, tyro.conf.Positional] = "demo-4l"
    """Demo name (see `interp models`), local folder, safetensors file or hub name."""
    prompt: str = PROMPT
    """Text that the page begins with."""
    second: str | None = None
    """Text that patches come from, to begin with; without it and `--prompt` the built-in corrupted prompt."""
    port: int = 0
    """Port of 127.0.0.1; 0 takes a free one."""
    open: bool = False
    """Open the page in the browser."""
    device: str = "cpu"
    """Where to compute: cpu, cuda, cuda:1, ..."""
    debug: bool = False
    """Show where an error was raised."""

    def run(self) -> None:
        """Load the model, print the address, and answer until Ctrl-C."""
        if missing := [name for name in NEEDED if find_spec(name) is None]:
            raise ValueError(
                f"interp serve requires {', '.join(missing)}: pip install 'interp[serve]' "
                "(in a clone: .venv/bin/pip install -e '.[serve]')"
            )
        if not 0 <= self.port < 65536:
            raise ValueError(f"--port requires a number from 0 to 65535, got {self.port}")
        from interp import HookedTransformer
        from interp.serve.app import Subject
        from interp.serve.server import serve
        from interp.serve.session import Session
        from interp.serve.snippet import Origin

        model = HookedTransformer.from_pretrained(self.model, device=available(self.device))
        second = self.second or (CORRUPT if self.prompt == PROMPT else "")
        subject = Subject(Session(model), Origin(self.model, self.device), self.prompt, second)
        serve(subject, self.port, self._ready)

    def _ready(self, address: str) -> None:
        print(
            f"{address}\nOnly this machine can open it, and only with this address. Ctrl-C ends it.",
            flush=True,
        )
        if self.open:
            webbrowser.open(address)
