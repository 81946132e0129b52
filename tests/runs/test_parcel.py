"""A run's work arrives in other processes bit for bit, and what lies in files is sent as a place in them."""

import copy
import os
import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from interp import Batch, HookedTransformer
from interp.data.stream import GivenBatches
from interp.families import fill
from interp.model import Trace, Transformer
from interp.passes.observe import Studied
from interp.passes.question import Questions, Reading
from interp.runs import parcel as parcel_module
from interp.runs.parcel import FilePlace, Parcel, Work, as_bytes, in_shared_memory, packed
from tests.configs import build
from tests.runs.opened import opened_from
from tests.runs.running import Norms


@pytest.fixture(autouse=True)
def _nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters that lie in the file as they are needed are views of it, and no tensor is a part of the pickle."""
    monkeypatch.setattr(fill, "MAPPED_FROM", 0)
    monkeypatch.setattr(parcel_module, "SMALL", 0)


def work(model: Transformer) -> Work:
    asked = Norms().bind(Studied(model, HookedTransformer(model).text))
    return Questions.of([asked], model.config), model, GivenBatches([])


def in_files(parcel: Parcel) -> list[FilePlace]:
    return [piece.numbers for piece in parcel.pieces if isinstance(piece.numbers, FilePlace)]


def _kept(trace: Trace, batch: Batch, model: Transformer, row: Tensor) -> Mapping[str, Tensor]:
    return {"row": row.expand(len(batch), -1)}


def same_bits(one: Transformer, other: Transformer) -> None:
    ours, theirs = dict(one.named_parameters()), dict(other.named_parameters())
    assert ours.keys() == theirs.keys(), "tied parameters are one"
    for name, value in ours.items():
        other_value = theirs[name]
        assert value.dtype == other_value.dtype and value.requires_grad == other_value.requires_grad
        assert torch.equal(value.detach().view(torch.uint8), other_value.detach().view(torch.uint8)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gpt2"])  # the latter is tied
@pytest.mark.parametrize("held", [in_shared_memory, as_bytes])
def test_what_is_opened_is_what_was_packed(
    name: str, dtype: torch.dtype, held: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    model = opened_from(tmp_path, name, dtype)
    for by_path in (True, False):
        parcel = packed(work(model), held, by_path=by_path)
        assert bool(in_files(parcel)) == by_path and parcel.is_here
        _, opened, _ = parcel.opened()
        same_bits(model, opened)
        assert len(parcel.pieces) >= len(list(model.parameters()))


def test_what_was_changed_in_memory_is_not_read_from_the_file(tmp_path: Path) -> None:
    """A change of the bits counts, be it one that `==` does not see: a NaN, the sign of a zero."""
    model = opened_from(tmp_path, "llama")
    before = len(in_files(packed(work(model), as_bytes)))
    assert before > 3
    first, second, third = (model.get_parameter(name) for name in list(model.files[0].places)[:3])
    first.data.flatten()[1] += 1  # which no version counter of the parameter sees
    second.detach().view(-1).numpy()[0] = np.nan
    third.data.flatten()[0] = 0.0
    parcel = packed(work(model), as_bytes)
    assert len(in_files(parcel)) == before - 3
    same_bits(model, parcel.opened()[1])
    assert (
        first.data.flatten()[1]
        == parcel.opened()[1].get_parameter(next(iter(model.files[0].places))).flatten()[1]
    )


def test_the_sign_of_a_zero_is_a_change(tmp_path: Path) -> None:
    def zero_first(model: torch.nn.Module) -> None:
        for parameter in model.parameters():
            parameter.data.flatten()[0] = 0.0

    model = opened_from(tmp_path, "llama", prepared=zero_first)
    before = len(in_files(packed(work(model), as_bytes)))
    name = next(iter(model.files[0].places))
    model.get_parameter(name).data.flatten()[0] = -0.0
    parcel = packed(work(model), as_bytes)
    assert len(in_files(parcel)) == before - 1
    same_bits(model, parcel.opened()[1])


@pytest.mark.parametrize("how", ["replaced", "deleted"])
def test_a_file_that_is_another_now_is_not_sent(how: str, tmp_path: Path) -> None:
    model = opened_from(tmp_path, "llama")
    expected = {name: value.clone() for name, value in model.named_parameters()}
    path = tmp_path / "model.safetensors"
    if how == "replaced":
        (tmp_path / "new").write_bytes(bytes(path.stat().st_size))
        (tmp_path / "new").replace(path)
    else:
        path.unlink()
    parcel = packed(work(model), as_bytes)
    assert not in_files(parcel)
    opened = dict(parcel.opened()[1].named_parameters())
    assert all(torch.equal(opened[name], value) for name, value in expected.items())


def test_host_without_the_file_says_so_and_others_check_it_every_pass(
    tmp_path: Path,
) -> None:
    model = opened_from(tmp_path, "llama")
    parcel, path = packed(work(model), as_bytes), tmp_path / "model.safetensors"
    _, opened, _ = parcel.opened()
    opened.check_files()
    os.utime(path, ns=(0, 0))
    with pytest.raises(ValueError, match="was overwritten in place after the model was loaded"):
        opened.check_files()
    assert not parcel.is_here
    with pytest.raises(ValueError, match=r"model\.safetensors, of which .* is not here, or not as it was"):
        parcel.opened()


def test_shared_memory_is_one_copy_and_the_parameters_own_where_it_can_be(tmp_path: Path) -> None:
    model = opened_from(tmp_path, "llama", mapped=False)
    parcel = packed(work(model), in_shared_memory)
    places = {value.data_ptr() for value in model.parameters()}
    for opened in (parcel.opened()[1], parcel.opened()[1]):
        assert places == {value.data_ptr() for value in opened.parameters()}
        assert all(value.is_shared() for value in opened.parameters())


def test_a_view_of_a_large_tensor_is_sent_alone() -> None:
    """However small: a pickle of its own would hold all of the memory that it is a part of."""
    large = torch.arange(1_000_000.0)
    model = build("gpt2")
    questions, _, source = work(model)
    asked = replace(questions.every[0], rows=Reading([], partial(_kept, row=large[7:9])))
    parcel = packed((replace(questions, every=(asked,)), model, source), in_shared_memory)
    row = parcel.opened()[0].every[0].rows.compute.keywords["row"]  # type: ignore[attr-defined]
    assert row.tolist() == [7, 8] and row.untyped_storage().nbytes() == row.nbytes
    assert len(parcel.pickled) < large.nbytes / 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pickling_and_copying_a_model_of_a_file_costs_its_weights_once(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    model = opened_from(tmp_path, "llama", dtype)
    assert len(model.files[0].places) > 3
    weights = sum(value.nbytes for value in model.parameters())
    sent = pickle.dumps(model)
    structure = pickle.dumps(copy.deepcopy(model).to("meta"))
    assert len(sent) < weights + len(structure) + 1000 * len(list(model.parameters()))
    same_bits(model, pickle.loads(sent))
    copied = copy.deepcopy(model)
    same_bits(model, copied)
    for value in (*model.parameters(), *copied.parameters()):
        assert value.untyped_storage().nbytes() == value.nbytes, "a parameter's memory is its own"
    name = next(iter(model.files[0].places))
    copied.get_parameter(name).data.zero_()
    assert model.get_parameter(name).abs().sum() > 0
