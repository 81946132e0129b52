"""The windows of a run on a Ray cluster: the same work, mapped over a pool of actors with a model each.

Ray (`pip install 'ray[data]'`) runs on one machine as on many. `interp.run(..., engine="ray")` starts it here, or
joins the cluster that `ray.init(address=...)` or RAY_ADDRESS names. What an actor returns are partial results, and no
actor keeps a sum: a window whose actor was killed is done again, whole, and nothing is lost or counted twice.

The model is sent once. An actor whose host has the files that parameters are views of maps them; everything else lies
in Ray's object store, once a host, and the actors there share it.

On SLURM: one `ray start --head` on the first node, one `ray start --address` on each other node of the job, then the
script with RAY_ADDRESS set (`docs/scaling.md`). Job arrays need none of this: see `shard` of `interp.run`.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from interp.data.stream import DataSource
from interp.model.transformer import Transformer
from interp.passes.question import Questions
from interp.runs.journal import packed_done, unpacked_done
from interp.runs.parcel import Parcel, as_bytes, packed
from interp.runs.progress import BatchDone
from interp.runs.workers import Worker

READERS = 1.0
"""CPUs left to Ray's own tasks, which read the actors' input: with actors on every CPU they would never run."""


def done_by_ray(
    questions: Questions,
    model: Transformer,
    source: DataSource,
    windows: Iterable[int],
    due: Callable[[int], int | None],
    *,
    actors: int | None = None,
) -> Iterator[BatchDone]:
    """The contributions of all batches of the windows, window by window as the actors finish them.

    Args:
        actors: how many; without it one per GPU of the cluster, or as many as its CPUs allow with one left to Ray's
            readers (on two CPUs two actors that count as half a CPU each). Windows begun earlier go on at the batch
            due.

    Raises:
        ImportError: without Ray; what an analysis raises or an actor that cannot start, as Ray's task error.
    """
    try:
        import ray
        import ray.data
        from ray.cloudpickle import CloudPickler
    except ImportError as cause:
        raise ImportError("engine='ray' requires the package ray: pip install 'ray[data]'") from cause
    if not ray.is_initialized():
        ray.init(log_to_driver=False, include_dashboard=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    todo = [{"window": w, "first": due(w) or 0} for w in windows]
    if not todo:
        return
    pool = _pool_options(ray.cluster_resources(), len(todo), actors)
    parcel = partial(packed, (questions, model, source), as_bytes, pickler=CloudPickler)
    work = [ray.put(parcel())]  # references in a list: Ray does not fetch them before the actor does
    if _other_hosts():
        work.append(ray.put(parcel(by_path=False)))
    results = ray.data.from_items(todo, override_num_blocks=len(todo)).map_batches(
        _Actor, batch_size=1, fn_constructor_kwargs={"work": work}, **pool
    )
    reductions = {question.name: question.keep for question in questions.every}
    for row in results.iter_rows():
        yield unpacked_done(row["done"], reductions)


def _other_hosts() -> bool:
    """Whether the cluster has hosts other than this one, which may lack its files."""
    import ray
    import ray.util

    address = ray.util.get_node_ip_address()
    return any(node["Alive"] and node["NodeManagerAddress"] != address for node in ray.nodes())


def _pool_options(resources: dict[str, float], tasks: int, actors: int | None) -> dict[str, Any]:
    """Ray's options for the actor pool: the number of actors, and the share of CPUs and GPUs of each."""
    import ray.data

    gpus, cpus = int(resources.get("GPU", 0)), resources.get("CPU", 1.0)
    count = actors or (gpus if gpus else max(1, int(cpus) if cpus <= 2 else int(cpus - READERS)))
    count = min(count, tasks)
    share = min(1.0, max(cpus - READERS, cpus / 2) / count)
    strategy = ray.data.ActorPoolStrategy(size=count)
    return {"compute": strategy, "num_cpus": share, **({"num_gpus": 1} if gpus else {})}


class _Actor:
    """A process of the cluster with its own model: from window numbers to the bytes of every batch's result."""

    def __init__(self, work: list[Any]) -> None:
        import ray

        parcel = ray.get(work[0])
        assert isinstance(parcel, Parcel)
        if len(work) > 1 and not parcel.is_here:
            parcel = ray.get(work[1])
        questions, model, self._source = parcel.opened()
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._worker = Worker(questions, model.to(device))

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[bytes]]:
        parts = []
        for number, first in zip(batch["window"].tolist(), batch["first"].tolist(), strict=True):
            for done in self._worker.answers(number, self._source.window(number), first):
                parts.append(packed_done(done))
        return {"done": parts}
