"""A training that is interrupted goes on bit for bit, and a folder is for one training."""

import os
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
import xarray as xr
from torch import Tensor

from interp.features import (
    BatchTopK,
    Dictionary,
    JumpReLU,
    Matryoshka,
    ReLU,
    TopK,
    train_dictionary,
    training,
    training_state,
)
from interp.features.objectives import TrainedKind
from interp.features.training_state import STATE
from tests.features.test_dictionary_training import noise
from tests.forking import attempt

KINDS: dict[str, TrainedKind] = {
    "ReLU": ReLU(),
    "TopK": TopK(3),
    "JumpReLU": JumpReLU(0.5),
    "BatchTopK": BatchTopK(3),
    "Matryoshka": Matryoshka(3, (4, 12)),
}
EVERY = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
READS, WRITES = "blocks.1.ln2.hook_normalized", "blocks.1.hook_mlp_out"
STEPS = 24


def trained(
    kind: TrainedKind, data: object, out: Path | None = None, *, resume: bool = False, **more: object
) -> tuple[Dictionary, xr.Dataset]:
    settings = {"steps": STEPS, "batch_size": 100, "dtype": torch.float64, "dead_after": 3, "lr": 1e-2}
    settings |= {"sparsity": 0.5} if isinstance(kind, ReLU | JumpReLU) else {}
    return train_dictionary(data, kind, 12, out=out, resume=resume, **(settings | more))  # type: ignore[arg-type]


def stopped_at(patch: pytest.MonkeyPatch, step: int, stop: object = None) -> None:
    """Raise KeyboardInterrupt, or do `stop`, in the middle of a step: its gradient is there, its update half done."""
    original, done = training._drop_radial_gradient, []

    def interrupted(dictionary: Dictionary) -> None:
        original(dictionary)
        done.append(dictionary)
        if len(done) == step:
            dictionary.W_dec.data += 1.0
            if callable(stop):
                stop()
            raise KeyboardInterrupt

    patch.setattr(training, "_drop_radial_gradient", interrupted)


def same(one: tuple[Dictionary, xr.Dataset], other: tuple[Dictionary, xr.Dataset]) -> None:
    weights, others = (dict(each[0].named_parameters()) for each in (one, other))
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, others[name]), name
    assert one[1].equals(other[1])
    assert one[0].metadata == other[0].metadata


def pair() -> tuple[Tensor, Tensor]:
    x = noise()
    return x, (x @ torch.randn(8, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64)).relu()


DATA = {
    "tensor": (noise(), {}),
    "chunks": (list(noise().split(170)), {}),
    "pair": (pair(), {"reads": READS, "writes": WRITES, "skip": True}),
}


@pytest.mark.parametrize(("data", "step"), [("tensor", 2), ("chunks", 11), ("pair", STEPS)])
@EVERY
def test_an_interrupted_training_goes_on_bit_for_bit(
    kind: TrainedKind, data: str, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, more = DATA[data]
    whole = trained(kind, given, **more)  # type: ignore[arg-type]
    monkeypatch.setattr(training_state, "KEEP_SECONDS", 0.0)
    with monkeypatch.context() as patch:
        stopped_at(patch, step)
        with pytest.raises(KeyboardInterrupt):
            trained(kind, given, tmp_path, **more)  # type: ignore[arg-type]
    taken = []
    update = training._update
    monkeypatch.setattr(training, "_update", lambda *given: (taken.append(1), update(*given)))
    same(trained(kind, given, tmp_path, resume=True, **more), whole)  # type: ignore[arg-type]
    assert len(taken) == STEPS - step + 1
    same(trained(kind, given, tmp_path, resume=True, **more), whole)  # type: ignore[arg-type]
    assert len(taken) == STEPS - step + 1, "a finished training takes no step"


def killed_training(folder: Path) -> None:
    training_state.KEEP_SECONDS = 0.0
    stopped_at(pytest.MonkeyPatch(), 11, lambda: os.kill(os.getpid(), signal.SIGTERM))
    trained(JumpReLU(0.5), noise(), folder)


@pytest.mark.slow
def test_a_training_that_sigterm_ends_goes_on_bit_for_bit(tmp_path: Path) -> None:
    assert attempt(partial(killed_training, tmp_path)) == -signal.SIGTERM
    same(trained(JumpReLU(0.5), noise(), tmp_path, resume=True), trained(JumpReLU(0.5), noise()))


def test_without_a_kept_state_it_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        stopped_at(patch, 4)
        with pytest.raises(KeyboardInterrupt):
            trained(TopK(3), noise(), tmp_path)
    assert not (tmp_path / STATE).exists()
    (half := tmp_path / f".{STATE}.1a2b3c4d.safetensors").write_bytes(b"half")
    same(trained(TopK(3), noise(), tmp_path, resume=True), trained(TopK(3), noise()))
    assert not half.exists()


def test_a_folder_is_for_one_training(tmp_path: Path) -> None:
    trained(TopK(3), noise(), tmp_path)
    with pytest.raises(ValueError, match="holds a training of a dictionary already: resume=True goes on"):
        trained(TopK(3), noise(), tmp_path)
    with pytest.raises(ValueError, match=r"holds another training of a dictionary: lr: was 0\.01, is 0\.1"):
        trained(TopK(3), noise(), tmp_path, resume=True, lr=0.1)
    with pytest.raises(ValueError, match="holds another training of a dictionary: activations: was"):
        trained(TopK(3), noise() + 1, tmp_path, resume=True)
    (tmp_path / STATE).write_bytes((tmp_path / STATE).read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"state\.safetensors is damaged"):
        trained(TopK(3), noise(), tmp_path, resume=True)


def test_a_stream_that_is_read_once_cannot_be_gone_through_again(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="activations that can be read again are required"):
        trained(TopK(3), iter(noise().split(170)), tmp_path)
    assert not list(tmp_path.iterdir())
