"""Exact effects of training rows on a model: the run again without them, bit for bit equal in all else.

A row that is left out keeps its place in every batch, and its loss is multiplied by 0 there: first weights, the order
of the rows, the divisor of the mean loss and the learning rates stay as they were. So the difference between two runs
is what these rows did and nothing else, the truth that estimates of influence are measured against.
"""

from __future__ import annotations

import hashlib
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from interp.core.boundary import public
from interp.core.files import json_object
from interp.core.kinds import MOST_NUMBER
from interp.core.results import labelled
from interp.data.batch import Batch
from interp.families.convert import AnyModel
from interp.lab.training.loop import train
from interp.lab.training.losses import logits
from interp.lab.training.schedule import Training
from interp.model.config import AnyConfig, Json
from interp.runs.folder import FolderKind, write_json
from interp.runs.provenance import bytes_of
from interp.tasks.examples import Examples, Place

if TYPE_CHECKING:
    import xarray as xr

LEFT_OUT = FolderKind("leave-out study", "leave_out.json", "interp leave-out study, 1")
ALL = "all rows"


@public()
@dataclass(frozen=True, eq=False)
class FixedRows:
    """Rows to train on again and again: each once per epoch, in an order that the seed and the epoch decide.

    It is data for `interp.lab.training.train`; what stands in a batch does not depend on which rows are left out.

    Raises:
        ValueError: packed rows, and for rows to leave out that do not exist.

    Example:
        >>> rows = interp.tasks.RepeatedSequences(8, 12, 3, 4).batch(interp.tasks.Place(0, 0), 6)
        >>> data = FixedRows(rows, held_out=rows, without=(2,))
        >>> float(data.batch(interp.tasks.Place(0, 0), 6).weight.sum())
        5.0
    """

    rows: Examples
    """Rows that are trained on."""
    held_out: Examples
    """Rows on which the log measures the loss."""
    without: tuple[int, ...] = ()
    """Rows with a loss that counts nothing: they stay in their batches, with weight 0."""

    def __post_init__(self) -> None:
        self.rows.batch.require_one_text("training on the same rows again and again")
        if bad := [row for row in self.without if not 0 <= row < len(self.rows.batch)]:
            raise ValueError(f"rows to leave out are 0 to {len(self.rows.batch) - 1}, got {bad[0]}")

    @property
    def d_vocab(self) -> int:
        """How many token ids it uses."""
        return 1 + max(int(batch.tokens.max()) for batch in self._batches)

    @property
    def width(self) -> int:
        """Tokens of the longest row."""
        return max(batch.tokens.shape[1] for batch in self._batches)

    @cached_property
    def description(self) -> Json:
        """Hashes of the rows, and which are left out."""
        hashes = {name: _hash(getattr(self, name)) for name in ("rows", "held_out")}
        return {"type": "FixedRows", **hashes, "without": list(self.without)}

    @public()
    def batch(self, place: Place, rows: int) -> Examples:
        """The rows of a place, each with its weight; of the held-out place the first held-out ones."""
        if place.step is None:
            return self.held_out.rows(torch.arange(min(rows, len(self.held_out.batch))))
        count = len(self.rows.batch)
        epoch, at = np.divmod(place.step * rows + np.arange(rows), count)
        orders = {e: Place(place.seed, e).generator.permutation(count) for e in np.unique(epoch).tolist()}
        chosen = [orders[e][i] for e, i in zip(epoch.tolist(), at.tolist(), strict=True)]
        index = torch.from_numpy(np.array(chosen))
        weight = torch.ones(count) if self.rows.weight is None else self.rows.weight.clone()
        weight[list(self.without)] = 0.0
        return replace(self.rows.rows(index), weight=weight[index])

    @property
    def _batches(self) -> list[Batch]:
        sides = [side for each in (self.rows, self.held_out) for side in (each.batch, each.source)]
        return [side for side in sides if side is not None]


@public()
def leave_out(
    config: AnyConfig,
    rows: Examples,
    queries: Examples,
    groups: Sequence[Sequence[int]] | None = None,
    training: Training | None = None,
    *,
    out: Path | str | None = None,
    processes: int = 1,
) -> xr.Dataset:
    """Effect of each group of training rows on each query, by training again without the group.

    The effect is what is measured without the group minus what is measured with all rows. A model is trained on all
    rows and then once more without each group. Left out means: the row's loss is multiplied by 0 in every batch in
    which it stands. The batch stays and the divisor of its mean is kept, so that first weights, the order of all rows
    and the learning rates are the same bits; an empty group changes nothing.

    Args:
        config: config of the model that is trained.
        rows: what is trained on (`FixedRows` draws them).
        queries: what is measured in the end, one number per row (`Examples.measured`): mean nats per token that
            counts, -log p of the answers that the queries bring, or with wrong answers logit(answer) - logit(wrong).
        groups: indices of rows; None: each row is a group. `training.determined_only` holds for rows and queries.
        training: how long and how fast it trains; None: the defaults of `Training`.
        out: a folder that keeps one file per finished run, and goes on where it stopped; None: nothing is kept.
        processes: worker processes; every run uses one thread, so their number changes no bit (a script needs `if
            __name__ == "__main__":`).

    Returns:
        Dataset[group, query] of exact numbers of one seed, without an interval; another seed has others.

        - `value` [group, query]: the effect (in nats: positive where the group had made the query easier).
        - `full` [query]: what was measured with all rows.
        - `left_out` [group, row]: which rows each group has.

    Raises:
        ValueError: as `train`; no or empty queries, rows that do not exist, or a folder of another study.

    Caveat:
        AdamW divides by running sizes of the gradient, so what a row does is what it does under this optimiser.

    See Also:
        `interp.dynamics.influence`: an estimate of the same effects without training again.

    Example:
        >>> task = interp.tasks.RepeatedSequences(8, 12, 3, 4)
        >>> rows, queries = (task.batch(interp.tasks.Place(0, step), 4) for step in (0, 1))
        >>> config = interp.lab.training.attention_only(1, 8, 12)
        >>> plan = interp.lab.training.Training(steps=2, rows=2)
        >>> leave_out(config, rows, queries, [[0], [1, 2]], plan).value.dims
        ('group', 'query')
    """
    if processes < 1:
        raise ValueError(f"processes must be at least 1, got {processes}")
    plan = replace(training or Training(), checkpoints=0)
    plan = replace(plan, log_every=plan.steps, evaluation_rows=1)
    chosen = (
        [(row,) for row in range(len(rows.batch))] if groups is None else [tuple(each) for each in groups]
    )
    data = FixedRows(rows, held_out=rows)
    jobs = {ALL: data} | {_label(i, each): replace(data, without=each) for i, each in enumerate(chosen)}
    question = _question(config, data, queries, plan, chosen)
    run = partial(_outcome, config, plan, queries)
    with _Kept.opened(out, question) as kept:
        found = {name: kept.read(name, len(queries.batch)) for name in jobs}
        missing = {name: job for name, job in jobs.items() if found[name] is None}
        for name, value in tqdm(
            _outcomes(run, missing, processes), "leaving out", len(missing), delay=1, leave=False
        ):
            kept.write(name, value)
            found[name] = value
    measured = torch.tensor([found[name] for name in jobs], dtype=torch.float64)
    return _labelled(measured, chosen, list(jobs)[1:], queries.unit, len(rows.batch))


def _question(
    config: AnyConfig,
    data: FixedRows,
    queries: Examples,
    training: Training,
    groups: Sequence[tuple[int, ...]],
) -> Json:
    """All that decides the numbers of a study, as JSON."""
    return {
        "config": config.to_dict(),
        "data": data.description,
        "queries": _hash(queries),
        "training": asdict(training),
        "groups": [list(group) for group in groups],
    }


def _labelled(
    measured: Tensor, groups: Sequence[tuple[int, ...]], names: Sequence[str], unit: str, rows: int
) -> xr.Dataset:
    left_out = torch.zeros(len(groups), rows, dtype=torch.bool)
    for i, group in enumerate(groups):
        left_out[i, list(group)] = True
    return labelled(
        "leave_out",
        {
            "value": (("group", "query"), measured[1:] - measured[0]),
            "full": (("query",), measured[0]),
            "left_out": (("group", "row"), left_out),
        },
        coords={"group": list(names)},
        units=unit,
        attrs={"unit": unit, "effect": "without the group - with all rows"},
    )


def _label(number: int, group: tuple[int, ...]) -> str:
    return f"{number}: row {group[0]}" if len(group) == 1 else f"{number}: {len(group)} rows"


@torch.no_grad()
def _measured(model: AnyModel, queries: Examples, training: Training) -> list[float]:
    parts = [part.to(torch.device(training.device)) for part in queries.split(training.rows)]
    only = training.determined_only
    each = [part.measured(logits(model, part), determined_only=only) for part in parts]
    found: list[float] = torch.cat(each).double().tolist()
    return found


def _outcome(config: AnyConfig, training: Training, queries: Examples, data: FixedRows) -> list[float]:
    """The numbers of every query after one run, on one thread."""
    with _one_thread():
        return _measured(train(config, data, training).model, queries, training)


def _outcomes(
    run: partial[list[float]], jobs: Mapping[str, FixedRows], processes: int
) -> Iterator[tuple[str, list[float]]]:
    """The numbers of every run, in the order in which they finish."""
    if processes == 1 or len(jobs) < 2:
        yield from ((name, run(data)) for name, data in jobs.items())
        return
    pool = ProcessPoolExecutor(min(processes, len(jobs)), multiprocessing.get_context("spawn"))
    try:
        waiting = {pool.submit(run, data): name for name, data in jobs.items()}
        for done in as_completed(waiting):
            yield waiting[done], done.result()
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class _Kept:
    """The folder of a study, a file per finished run; None keeps nothing."""

    folder: Path | None

    @classmethod
    @contextmanager
    def opened(cls, out: Path | str | None, question: Json) -> Iterator[_Kept]:
        """The folder for this study, locked until it is left. ValueError for one of another study."""
        if out is None:
            yield cls(None)
            return
        with ExitStack() as stack:
            there, held = LEFT_OUT.locked(Path(out), question)
            stack.enter_context(held)
            LEFT_OUT.agree(Path(out), there, question)
            yield cls(Path(out))

    def read(self, name: str, queries: int) -> list[float] | None:
        """The numbers of a run, if they are kept. ValueError for a file without a number for every query."""
        path = self._path(name)
        if path is None or not path.is_file():
            return None
        held = json_object(path)
        found = held.get("measured")
        numbers = found if isinstance(found, list) and len(found) == queries else [None]
        if (
            not all(type(x) is float and abs(x) <= MOST_NUMBER for x in numbers)
            or held.get("without") != name
        ):
            raise ValueError(
                f"{path} must hold what {queries} queries measured without {name}: delete it to run again"
            )
        assert isinstance(found, list)
        return found

    def write(self, name: str, measured: list[float]) -> None:
        """Keep what a run measured; JSON keeps every bit of a double."""
        path = self._path(name)
        if path is not None:
            write_json(path, {"without": name, "measured": measured})

    def _path(self, name: str) -> Path | None:
        return (
            None if self.folder is None else self.folder / f"{name.partition(':')[0].replace(' ', '-')}.json"
        )


def _hash(examples: Examples) -> str:
    """SHA-256 of everything that the rows hold."""
    digest = hashlib.sha256()
    sides = {"batch": examples.batch, "source": examples.source}
    parts = {f"{side}.{each.name}": getattr(batch, each.name) for side, batch in sides.items() if batch
             for each in fields(batch)}  # fmt: skip
    parts |= {"determined": examples.determined, "weight": examples.weight}
    for name, value in parts.items():
        if isinstance(value, Tensor):
            digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
            digest.update(bytes_of(value))
    return digest.hexdigest()
