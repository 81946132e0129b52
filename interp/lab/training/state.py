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

import json
import time
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
from interp.runs.state_file import optimiser_tensors, read_state, restore_optimiser, write_state

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
        if not (self.path / STATE).is_file():
            return
        tensors, told = read_state(self.path / STATE)
        with torch.no_grad():
            for name, parameter in state.model.named_parameters():
                parameter.copy_(tensors[f"model.{name}"])
        restore_optimiser(state.adam, tensors)
        state.step, state.log = told["step"], told["log"]

    def keep(self, state: TrainingState, *, last: bool) -> None:
        """Write the state and the log, unless that was done a moment ago."""
        if not last and time.monotonic() - self._written < self.keep_seconds:
            return
        weights = {f"model.{name}": each for name, each in state.model.named_parameters()}
        write_atomically(self.path / LOG, lambda path: log_table(state.log).to_csv(path, index=False))
        told: Json = {"step": state.step, "log": state.log}
        write_state(self.path / STATE, weights | optimiser_tensors(state.adam), told)
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


def log_table(log: list[LogRow]) -> "pd.DataFrame":
    """The log as a table, a row per measurement."""
    import pandas as pd

    return pd.DataFrame(log).astype({"step": int, "tokens": int})
