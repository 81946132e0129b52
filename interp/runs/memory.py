"""How many tokens one pass of a run may have: measured on a few rows, or predicted without running anything."""

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from interp.data.batch import Batch
from interp.model.config import ModelConfig
from interp.model.tap import Read
from interp.model.transformer import Transformer
from interp.passes.needs import Pass
from interp.passes.observe import deepest
from interp.passes.question import Questions
from interp.passes.schedule import one_pass
from interp.passes.together import smallest_over_processes

SHARE = 0.6
"""Share of the device memory beside the weights that a pass may take; allocators and libraries need the rest."""
ON_HOST = 2**31
"""Bytes that a pass may take on a CPU. The free memory is not asked for, on a CPU or a GPU: otherwise the same call
could choose other batches on a busy machine, and round differently."""
MOST_ON_HOST, MOST_ON_DEVICE = 2**12, 2**17
"""Tokens per pass beyond which nothing gets faster, on a CPU and on a GPU (`experiments/bench/stream.py`); the second
number also holds on a CPU for passes that read embeddings only."""


@dataclass(frozen=True)
class MemoryPlan:
    """The bytes of one more row of a pass, by prediction and by measurement, and the batch size that follows."""

    width: int
    """Tokens per row."""
    predicted: float
    """Predicted peak bytes per row of all tensors that a pass holds, results included; NaN if not predicted."""
    measured: float
    """Peak bytes per row, measured on real rows; NaN if not measured."""
    room: int
    """Bytes that all rows of a pass may take together."""
    most: int
    """Tokens beyond which a pass gets no faster."""

    @property
    def tokens_per_batch(self) -> int:
        """The number of tokens that fit into a pass, at least those of one row."""
        row = max(x for x in (self.predicted, self.measured) if x == x)
        fit = int(self.room / row) if row else self.most
        return self.width * max(1, min(fit, self.most // self.width))

    def explain(self) -> str:
        """The plan in one line."""
        mib = 2**20
        taken = {"predicted": self.predicted, "measured": self.measured}
        row = " and ".join(f"{size / mib:.2f} MiB {how}" for how, size in taken.items() if size == size)
        return (
            f"{self.tokens_per_batch} tokens per pass: {row} per row of {self.width}, "
            f"{self.room / mib:.0f} MiB may be used"
        )


def memory_plan(
    questions: Questions, model: Transformer, width: int, sample: Batch | None = None
) -> MemoryPlan:
    """The plan of how many tokens one pass may have, for rows of `width` tokens.

    Args:
        sample: some real rows, which are run to measure their memory. None: it is predicted, or where that is not
            possible, measured on a row of arbitrary tokens. (With a sample nothing is predicted: the pass on the meta
            device imports PyTorch's compiler, which takes a second in a first run.)
    """
    measured = float("nan")
    predicted = measured if sample is not None else predicted_row_bytes(questions, model, width)
    if sample is None and predicted != predicted:
        sample = Batch(torch.arange(width)[None] % model.config.d_vocab)
    if sample is not None:
        measured = measured_row_bytes(questions, model, sample) * width / sample.tokens.shape[1]
        measured = -float(smallest_over_processes(model, -math.ceil(measured)))
    lookups = _reads_only_embeddings(questions, model.config)
    most = MOST_ON_HOST if model.device.type == "cpu" and not lookups else MOST_ON_DEVICE
    return MemoryPlan(width, predicted, measured, smallest_over_processes(model, _room_bytes(model)), most)


def predicted_row_bytes(questions: Questions, model: Transformer, width: int) -> float:
    """Bytes that one more row of `width` tokens adds to the peak memory of a pass, from shapes alone.

    The pass runs on the meta device, where tensors have shapes and no memory, with one row and with two; a read whose
    `via` needs numbers counts as its whole site. NaN for a model that needs numbers itself: a mixture of experts.
    """
    try:
        with torch.device("meta"):
            ghost = Transformer(model.config).to(model.dtype)
    except NotImplementedError:  # a network that is not built from its config
        return float("nan")
    peaks = []
    for rows in (1, 2):
        batch = Batch(torch.zeros(rows, width, dtype=torch.long)).to(torch.device("meta"))
        try:
            peaks.append(_ghost_peak(questions, ghost, batch))
        except NotImplementedError:
            return float("nan")
    return float(peaks[1] - peaks[0])


def measured_row_bytes(questions: Questions, model: Transformer, sample: Batch) -> float:
    """Peak bytes per row while the questions run on these rows, with everything that they compute."""
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(model.device)
        before = torch.cuda.memory_allocated(model.device)
        questions.values(model, sample)
        return (torch.cuda.max_memory_allocated(model.device) - before) / len(sample)
    with LiveBytes() as live:
        questions.values(model, sample)
    return live.peak / len(sample)


class LiveBytes(TorchDispatchMode):
    """A context that measures the peak memory of all tensors created inside it, also on the meta device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = 0
        self.peak = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """PyTorch's switch: True, its default, imports the compiler at the first operator, which takes a second."""
        return False

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        # views of the inputs take no memory
        inputs = {storage._cdata for storage in _storages((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for storage in _storages(out):
            if storage._cdata not in inputs:
                self._note(storage)
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        """Count a new storage, and subtract it when it is freed."""
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def gone(_: object) -> None:
            self.alive -= size
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, gone)
        self.alive += size
        self.peak = max(self.peak, self.alive)


def _storages(values: object) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _reads_only_embeddings(questions: Questions, config: ModelConfig) -> bool:
    """Whether every question reads embeddings only, so that no block runs."""
    readings = questions.readings
    reads = [read.site for reading in readings for read in reading.reads]
    return len(readings) == len(questions.every) and bool(reads) and deepest(reads, config) == 0


def _ghost_peak(questions: Questions, ghost: Transformer, batch: Batch) -> int:
    """Peak bytes of the readings' shared pass on the meta device; a read's `via` that needs numbers is left out."""
    passes = []
    for reading in questions.readings:
        reads = [Read(read.site, _shape_only(read), by_row=read.by_row) for read in reading.reads]
        passes.append(Pass(batch, reads, reading.last_only))
    with LiveBytes() as live, _FusedAttention():
        answers = one_pass(ghost, passes) if passes else None
        del answers
    return live.peak


class _FusedAttention(TorchFunctionMode):
    """A context in which attention on the meta device takes only the memory of its output, as the fused kernels do."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        query, _, value = args[:3]
        assert isinstance(query, Tensor) and isinstance(value, Tensor)
        b, h, q, _ = query.shape
        return query.new_empty(b, q, h, value.shape[-1]).transpose(1, 2)


def _shape_only(read: Read) -> Callable[..., Tensor]:
    """The read's `via`, replaced by a copy of the whole site where it cannot run on tensors without numbers."""

    def via(value: Tensor, *more: Tensor) -> Tensor:
        if read.via is None:
            return value.clone()
        try:
            return read.via(value, *more)
        except (RuntimeError, NotImplementedError, ValueError):
            return value.clone()

    return via


def _room_bytes(model: Transformer) -> int:
    """Bytes that all rows of a run's pass may take together."""
    device = model.device
    if device.type != "cuda":
        return ON_HOST
    weights = sum(x.nbytes for x in model.parameters() if x.device == device)
    return int((torch.cuda.get_device_properties(device).total_memory - weights) * SHARE)
