"""What a training run keeps in its folder, and how a killed one finds where it was.

    run/
        training.json            config, data and parameters: what a resumed run must agree with
        log.csv                  a row per measurement
        step0/ step1/ ...        checkpoints: config, weights, tokenizer; `from_pretrained(run, revision="step1")`
        config.json model.safetensors tokenizer.json     the finished model
        state/state.safetensors  weights, the optimiser's moments, the log: all that the next update depends on

The state is one file, replaced in one rename. Data is a function of (seed, step) and models draw no random numbers, so
nothing else has to be kept.
"""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from interp.core.results import write_atomically
from interp.families.convert import AnyModel
from interp.families.load import save
from interp.model.config import Json
from interp.runs.folder import FolderKind, clear

if TYPE_CHECKING:
    import pandas as pd

TRAINING = FolderKind("training run", "training.json", "interp training run, 1")
STATE, LOG = Path("state") / "state.safetensors", "log.csv"
Row = dict[str, int | float]


@dataclass
class TrainingState:
    """Where a run stands: the model and its optimiser after some updates, and what was measured so far."""

    model: AnyModel
    adam: torch.optim.AdamW
    step: int = 0
    log: list[Row] = field(default_factory=list)


class TrainingFolder:
    """The folder of one run."""

    def __init__(self, path: Path, tokenizer: str | None, keep_seconds: float) -> None:
        self.path, self.tokenizer, self.keep_seconds = path, tokenizer, keep_seconds
        self._written = time.monotonic()

    @classmethod
    def opened(
        cls, path: Path, question: Json, *, resume: bool, tokenizer: str | None, keep_seconds: float
    ) -> "TrainingFolder":
        """The folder for a run of this question, made if need be.

        Errors: ValueError for a folder that holds a run already unless `resume`, for one of another question, saying
        what differs, and for one with other files.
        """
        asked = json.loads(json.dumps(question))
        TRAINING.begun(path, resume=resume)
        TRAINING.agree(path, TRAINING.claim(path, asked), asked)
        for place in (path, (path / STATE).parent):
            place.mkdir(exist_ok=True)
            clear(place)
        return cls(path, tokenizer, keep_seconds)

    def restore(self, state: TrainingState) -> None:
        """Put what was kept last into a fresh state, bit for bit; nothing if nothing was kept yet."""
        from safetensors import safe_open

        if not (self.path / STATE).is_file():
            return
        moments: dict[int, dict[str, torch.Tensor]] = {}
        with safe_open(self.path / STATE, framework="pt") as file, torch.no_grad():
            told = json.loads(file.metadata()["run"])
            for name, parameter in state.model.named_parameters():
                parameter.copy_(file.get_tensor(f"model.{name}"))
            for name in file.keys():  # noqa: SIM118 - it is no dict
                kind, _, rest = name.partition(".")
                if kind == "adam":
                    number, _, moment = rest.partition(".")
                    moments.setdefault(int(number), {})[moment] = file.get_tensor(name).clone()
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
        told = {
            "run": json.dumps({"step": state.step, "log": state.log})
        }  # one entry: the order of several varies
        write_atomically(self.path / LOG, lambda path: log_table(state.log).to_csv(path, index=False))
        write_atomically(self.path / STATE, lambda path: save_file(whole, path, metadata=told))
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


def log_table(log: list[Row]) -> "pd.DataFrame":
    """The log as a table, a row per measurement."""
    import pandas as pd

    return pd.DataFrame(log).astype({"step": int, "tokens": int})
