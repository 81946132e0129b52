"""A run over a model spread over two processes: the bits of both agree, one writes, and a restart goes on."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import interp
from interp.passes.together import one_after_another, smallest_over_processes, writes
from tests.configs import CONFIGS, perturbed, some_tokens
from tests.forking import together
from tests.runs.running import Kept, Norms, agree

ROWS = [interp.Batch(some_tokens(rows=2, n=9, seed=i)) for i in range(6)]


class StopError(Exception):
    """What ends the first try in both processes."""


def whole() -> interp.model.Transformer:
    torch.manual_seed(0)
    return perturbed(CONFIGS["gpt2"])


def share(rank: int, folder: str) -> None:
    """One of the two processes: a run that stops after three batches, then the rest."""
    import interp.runs.work_folder as work_folder
    from interp.runs.tensor_parallel import tensor_parallel

    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    model = tensor_parallel(whole(), init_device_mesh("cpu", (2,)))
    order = Path(folder) / "order"
    with one_after_another(model), order.open("a") as file:
        file.write(str(rank))
    assert (smallest_over_processes(model, rank + 5), writes(model), order.read_text()) == (
        5,
        rank == 0,
        "01",
    )
    take, count = work_folder.WorkFolder.take, iter(range(3))

    def stopping(self: work_folder.WorkFolder, done: object) -> None:
        if next(count, None) is None:
            raise StopError
        take(self, done)  # type: ignore[arg-type]

    work_folder.WorkFolder.take = stopping  # type: ignore[method-assign]
    with pytest.raises(StopError):
        interp.run([Norms(), Kept()], model, ROWS, out=f"{folder}/run")
    work_folder.WorkFolder.take = take  # type: ignore[method-assign]
    found = interp.run([Norms(), Kept()], model, ROWS, out=f"{folder}/run", resume=True)
    torch.save({name: value.to_dict() for name, value in found.items()}, f"{folder}/found{rank}")
    assert found.rows == 12
    dist.destroy_process_group()


@pytest.mark.slow
def test_run_over_a_spread_model_is_written_once_and_resumes(tmp_path: Path) -> None:
    together(share, str(tmp_path), processes=2)
    one, two = (torch.load(tmp_path / f"found{rank}", weights_only=False) for rank in (0, 1))
    assert str(one) == str(two)
    plain = interp.run([Norms(), Kept()], whole(), ROWS)
    again = interp.run([Norms(), Kept()], whole(), ROWS, out=tmp_path / "run", resume=True)
    agree(again, plain, 1e-9)
    assert [path.name for path in (tmp_path / "run").glob("*.journal")] == ["main.0.journal"]


def test_a_model_in_one_process_has_nobody_to_agree_with() -> None:
    model = whole()
    with one_after_another(model):
        assert smallest_over_processes(model, 7) == 7 and writes(model)
