"""The state of a dictionary's training and the folder in which it is kept, from which a killed training goes on.

    folder/
        training.json        what is trained, on what: a training that goes on must agree with it
        state.safetensors    weights, the optimiser's moments, silent steps, generator, history

The learning rate is a function of the step, and the order of the activations one of the seed: they are gone through
again.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.features.dictionary import Dictionary
from interp.model.config import Json
from interp.runs.folder import FolderKind, clear
from interp.runs.state_file import optimiser_tensors, read_state, restore_optimiser, write_state

TRAINING = FolderKind("training of a dictionary", "training.json", "interp dictionary training, 1")
STATE = "state.safetensors"
KEEP_SECONDS = 30.0
"""The state is written when so long has passed since it was written last, and at the end."""


@dataclass
class DictionaryState:
    """Where a training stands: all that its next step depends on."""

    dictionary: Dictionary
    optimiser: torch.optim.Optimizer
    generator: torch.Generator
    """Draws at which vectors dead features restart."""
    idle: Int[Tensor, "s"]
    """Number of steps since each feature was active."""
    history: list[Float[Tensor, "c"]] = field(default_factory=list)
    """A row for every step that is done."""

    def tensors(self) -> dict[str, Tensor]:
        """All that is in it, by name."""
        return {
            **{f"weight.{name}": each for name, each in self.dictionary.named_parameters()},
            **optimiser_tensors(self.optimiser),
            "generator": self.generator.get_state(),
            "idle": self.idle,
            "history": torch.stack(self.history),
        }

    @torch.no_grad()
    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Put what `tensors` gave into a fresh state, bit for bit."""
        for name, parameter in self.dictionary.named_parameters():
            parameter.copy_(tensors[f"weight.{name}"])
        restore_optimiser(self.optimiser, tensors)
        self.generator.set_state(tensors["generator"])
        self.idle = tensors["idle"].to(self.idle.device)
        self.history = list(tensors["history"].to(self.dictionary.W_enc.device))


@contextmanager
def kept(
    folder: Path | str | None, question: Json, state: DictionaryState, *, resume: bool
) -> Iterator[Callable[[bool], None]]:
    """A function to call after each step with whether it was the last; `state` is as a killed training left it.

    The folder is locked meanwhile. None keeps nothing.

    Raises:
        ValueError: a folder that holds a training already unless `resume`, or one of something else, a damaged state,
            and while another process trains there.
    """
    if folder is None:
        yield lambda last: None
        return
    path, asked = Path(folder), json.loads(json.dumps(question))
    there, lock = TRAINING.locked(path, asked, resume=resume)
    written = time.monotonic()

    def keep(last: bool) -> None:
        nonlocal written
        if last or time.monotonic() - written >= KEEP_SECONDS:
            write_state(path / STATE, state.tensors(), {})
            written = time.monotonic()

    with lock:
        TRAINING.agree(path, there, asked)
        clear(path)
        if (path / STATE).is_file():
            state.restore(read_state(path / STATE)[0])
        yield keep
