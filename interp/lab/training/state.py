"""The files of a training run in its folder, and how a killed run finds where it was.

    run/
        training.json            config, data and parameters: what a resumed run must agree with
        log.csv                  a row per measurement
        step0/ step1/ ...        checkpoints: config, weights, tokenizer; `from_pretrained(run, revision="step1")`
        config.json model.safetensors tokenizer.json     the finished model
        state/state.safetensors  weights, the optimiser's moments, the log: all that the next update depends on

The state is one file, replaced in one rename. Data and what dropout drops are functions of (seed, step), so
nothing else has to be kept.
"""

import hashlib
import json
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from interp.core.files import write_atomically
from interp.families.convert import AnyModel
from interp.families.load import save
from interp.model.config import Json
from interp.runs.folder import FolderKind, clear
from interp.runs.provenance import bytes_of

if TYPE_CHECKING:
    import pandas as pd

TRAINING = FolderKind("training run", "training.json", "interp training run, 1")
STATE, LOG = Path("state") / "state.safetensors", "log.csv"
LogRow = dict[str, int | float]


@dataclass
class TrainingState:
    """Where a run stands: the model and its optimiser after some updates, and what was measured so far."""

    model: AnyModel
    adam: torch.optim.AdamW
    step: int = 0
    log: list[LogRow] = field(default_factory=list)


class TrainingFolder:
    """The folder of one run."""

    def __init__(self, path: Path, tokenizer: str | None, keep_seconds: float, held: ExitStack) -> None:
        self.path, self.tokenizer, self.keep_seconds, self._held = path, tokenizer, keep_seconds, held
        self._written = time.monotonic()

    @classmethod
    def opened(
        cls, path: Path, question: Json, *, resume: bool, tokenizer: str | None, keep_seconds: float
    ) -> "TrainingFolder":
        """The folder for a run of this question, made if need be, and locked until `close`.

        Raises:
            ValueError: a folder that holds a run already unless `resume`, for one of another question, saying what
                differs, for one with other files, and while another process trains there.
        """
        asked = json.loads(json.dumps(question))
        there, held = TRAINING.locked(path, asked, resume=resume)
        try:
            TRAINING.agree(path, there, asked)
            (path / STATE).parent.mkdir(exist_ok=True)
            for place in (path, *(each for each in path.iterdir() if each.is_dir())):
                clear(place)
        except BaseException:
            held.close()
            raise
        return cls(path, tokenizer, keep_seconds, held)

    def close(self) -> None:
        """Let another process have the folder."""
        self._held.close()

    def restore(self, state: TrainingState) -> None:
        """Put what was kept last into a fresh state, bit for bit; nothing if nothing was kept yet.

        Raises:
            ValueError: a file whose bytes are not those that were written.
        """
        from safetensors import SafetensorError, safe_open

        if not (self.path / STATE).is_file():
            return
        damaged = f"{self.path / STATE} is damaged, its bytes are not those that were written: train in a new folder"
        try:
            with safe_open(self.path / STATE, framework="pt") as file:
                told = json.loads(file.metadata()["run"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as cause:
            raise ValueError(damaged) from cause
        if told.pop("sha256", None) != _checksum(tensors, told):
            raise ValueError(damaged)
        moments: dict[int, dict[str, torch.Tensor]] = {}
        with torch.no_grad():
            for name, parameter in state.model.named_parameters():
                parameter.copy_(tensors[f"model.{name}"])
        for name, value in tensors.items():
            kind, _, rest = name.partition(".")
            if kind == "adam":
                number, _, moment = rest.partition(".")
                moments.setdefault(int(number), {})[moment] = value.clone()
        groups = state.adam.state_dict()["param_groups"]
        state.adam.load_state_dict({"state": moments, "param_groups": groups})
        state.step, state.log = told["step"], told["log"]

    def keep(self, state: TrainingState, *, last: bool) -> None:
        """Write the state and the log, unless that was done a moment ago."""
        if not last and time.monotonic() - self._written < self.keep_seconds:
            return
        from safetensors.torch import save_file

        tensors = {f"model.{name}": each.detach() for name, each in state.model.named_parameters()}
        for number, moments in state.adam.state_dict()["state"].items():
            tensors |= {f"adam.{number}.{name}": each for name, each in moments.items()}
        whole = {name: each.cpu().contiguous() for name, each in tensors.items()}
        told: Json = {"step": state.step, "log": state.log}
        run = json.dumps({**told, "sha256": _checksum(whole, told)})
        write_atomically(self.path / LOG, lambda path: log_table(state.log).to_csv(path, index=False))
        write_atomically(self.path / STATE, lambda path: save_file(whole, path, metadata={"run": run}))
        self._written = time.monotonic()

    def checkpoint(self, model: AnyModel, step: int) -> None:
        """Keep the model after this many updates as a folder of its own."""
        self._save(model, self.path / f"step{step}")

    def finish(self, model: AnyModel) -> None:
        """Keep the finished model in the folder itself."""
        self._save(model, self.path)

    def _save(self, model: AnyModel, folder: Path) -> None:
        save(model, folder)
        if self.tokenizer is not None:
            text = self.tokenizer
            write_atomically(folder / "tokenizer.json", lambda path: path.write_text(text, encoding="utf-8"))


def _checksum(tensors: Mapping[str, torch.Tensor], told: Json) -> str:
    """SHA-256 of the tensors, by name, and of the entries stored with them."""
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode())
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        digest.update(bytes_of(value))
    return digest.hexdigest()


def log_table(log: list[LogRow]) -> "pd.DataFrame":
    """The log as a table, a row per measurement."""
    import pandas as pd

    return pd.DataFrame(log).astype({"step": int, "tokens": int})
