"""Several processes give the bits of one, also when one of them is killed; what goes wrong in them is said."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import interp
from interp.families import fill
from interp.runs import workers
from tests.configs import build, some_tokens
from tests.forking import PROCESSES
from tests.runs.killing import TEXTS, Deadly, Failing, Trapped, model, stream, whole
from tests.runs.opened import opened_from, rows
from tests.runs.running import ByPosition, Kept, Norms, agree


@pytest.fixture(autouse=True)
def _one_thread_each() -> None:
    """Matrix products round differently on another number of threads, and two workers have one each."""
    torch.set_num_threads(1)


@pytest.fixture
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers without the seconds of a fresh interpreter, where a test is not about starting them."""
    monkeypatch.setattr(workers.multiprocessing, "get_context", lambda method: PROCESSES)


@pytest.mark.usefixtures("_forked")
def test_two_workers_give_the_bits_of_one_process_though_one_is_killed(tmp_path: Path) -> None:
    middle = stream().window(3).batches[1].row
    assert middle is not None
    flag = tmp_path / "died"
    asked = [Deadly(int(middle[0]), str(flag)), Kept(), ByPosition()]
    found = interp.run(asked, model(), stream(), bootstrap=30, devices=["cpu", "cpu"])
    assert flag.exists(), "nobody was killed"
    agree(found, whole())


@pytest.mark.usefixtures("_forked")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_model_of_a_file_is_sent_as_its_path_with_the_same_bits(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fill, "MAPPED_FROM", 0)
    network = opened_from(tmp_path, "llama", dtype)
    assert network.files, "parameters are views of the file"
    name = next(iter(network.files[0].places))
    for _ in range(2):
        asked = [Norms(), Kept()]
        found = interp.run(asked, network, rows(), devices=["cpu", "cpu"])
        agree(found, interp.run(asked, network, rows()))
        assert not network.get_parameter(name).is_shared(), "what the file holds is copied nowhere"
        network.get_parameter(name).data.mul_(1.5)  # no longer what the file holds: sent as it is
        name = list(network.files[0].places)[1]


@pytest.mark.usefixtures("_forked")
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("raises", r"could not start:\n(.|\n)*the trap sprang"),
        ("exits", r"could not start \(exit code 3\).*__main__"),
    ],
)
def test_a_worker_that_cannot_start_says_why(how: str, says: str) -> None:
    with pytest.raises(RuntimeError, match=f"a worker process {says}"):
        interp.run([Trapped(how)], model(), stream(), devices=["cpu"])


@pytest.mark.slow
def test_a_worker_is_a_fresh_interpreter() -> None:
    """Everything that it is sent finds what it needs there; the other tests fork theirs."""
    rows = [interp.Batch(some_tokens(rows=2, n=9, seed=i)) for i in range(3)]
    found = interp.run([Norms(), Kept()], build("gpt2"), rows, devices=["cpu"])
    agree(found, interp.run([Norms(), Kept()], build("gpt2"), rows))


@pytest.mark.usefixtures("_forked")
def test_what_a_worker_raises_comes_with_its_traceback() -> None:
    with pytest.raises(RuntimeError, match="failed in a worker process") as caught:
        interp.run([Failing(9)], model(), stream(), devices=["cpu"])
    assert "window 1 failed" in str(caught.value)
    assert "ArithmeticError: row 9 cannot be done" in str(caught.value)
    assert "in _failing" in str(caught.value), "the place in the worker's code"


@pytest.mark.usefixtures("_forked")
def test_a_window_at_which_workers_die_again_and_again_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "DEATHS", 2)
    with pytest.raises(RuntimeError, match="2 worker processes died at window 0"):
        interp.run([Deadly(0)], model(), stream(), devices=["cpu"])


def test_what_cannot_be_sent_to_other_processes_is_refused() -> None:
    unnamed = replace(Norms().bind(model()), rows=lambda model, batch: {})
    with pytest.raises(ValueError, match="must be picklable, functions by their names"):
        interp.run([unnamed], model(), stream(), devices=["cpu"])
    with pytest.raises(ValueError, match="several processes require data that can be read again"):
        interp.run([Norms()], model(), iter(TEXTS), devices=["cpu"])


def test_a_host_without_gpu_has_a_worker_per_core() -> None:
    if torch.cuda.is_available():
        pytest.skip("this host has GPUs")
    assert workers.all_devices() == [torch.device("cpu")] * len(os.sched_getaffinity(0))
