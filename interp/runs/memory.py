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
"""Share of a device's memory that is used besides the weights: allocators round up, and libraries take workspaces."""
ON_HOST = 2**31
"""Bytes that a pass may take on the host, where others live too. What is free at the moment decides nothing, there or
on a device: else the same call could make other batches, and other last digits, on a busy machine."""
MOST_ON_HOST, MOST_ON_DEVICE = 2**12, 2**17
"""Tokens per pass beyond which nothing gets faster (`experiments/bench/stream.py`); where no block runs, the second."""


@dataclass(frozen=True)
class MemoryPlan:
    """The bytes of one more row of a pass, by prediction and by measurement, and the batch size that follows."""

    width: int
    """Tokens per row."""
    predicted: float
    """Bytes per row of the tensors that the pass holds at its worst moment, answers included; NaN if not predicted."""
    measured: float
    """Bytes per row, measured on real rows; NaN where nothing was measured."""
    room: int
    """Bytes that all rows of a pass may take together."""
    most: int
    """Tokens beyond which a pass gets no faster."""

    @property
    def tokens_per_batch(self) -> int:
        """Tokens that fit, at least one row."""
        row = max(x for x in (self.predicted, self.measured) if x == x)
        fit = int(self.room / row) if row else self.most
        return self.width * max(1, min(fit, self.most // self.width))

    def explain(self) -> str:
        """The plan in one line."""
        mib = 2**20
        taken = {"predicted": self.predicted, "measured": self.measured}
        row = " and ".join(f"{each / mib:.2f} MiB {how}" for how, each in taken.items() if each == each)
        return (
            f"{self.tokens_per_batch} tokens per pass: {row} per row of {self.width}, "
            f"{self.room / mib:.0f} MiB may be used"
        )


def memory_plan(
    questions: Questions, model: Transformer, width: int, sample: Batch | None = None
) -> MemoryPlan:
    """How many tokens one pass may have, for rows of `width` tokens.

    Args:
        sample: some real rows, which are run and measured. Without them it is predicted; where that is not possible,
            a row of all kinds of tokens is run. (A prediction beside a measurement says no more, and its pass on the
            meta device imports PyTorch's compiler: a second of a first run.)
    """
    measured = float("nan")
    predicted = measured if sample is not None else predicted_row_bytes(questions, model, width)
    if sample is None and predicted != predicted:
        sample = Batch(torch.arange(width)[None] % model.config.d_vocab)
    if sample is not None:
        measured = measured_row_bytes(questions, model, sample) * width / sample.tokens.shape[1]
        measured = -float(smallest_over_processes(model, -math.ceil(measured)))
    lookups = _looks_up(questions, model.config)
    most = MOST_ON_HOST if model.device.type == "cpu" and not lookups else MOST_ON_DEVICE
    return MemoryPlan(width, predicted, measured, smallest_over_processes(model, _room(model)), most)


def predicted_row_bytes(questions: Questions, model: Transformer, width: int) -> float:
    """Bytes that one more row of `width` tokens adds to the pass's worst moment, from shapes alone.

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
    """Bytes per row that the analyses take on these rows, everything they compute included."""
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(model.device)
        before = torch.cuda.memory_allocated(model.device)
        questions.values(model, sample)
        return (torch.cuda.max_memory_allocated(model.device) - before) / len(sample)
    with LiveBytes() as live:
        questions.values(model, sample)
    return live.peak / len(sample)


class LiveBytes(TorchDispatchMode):
    """High-water mark of the memory of all tensors made while it is active; works without a device, too."""

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
        given = {storage._cdata for storage in _storages((args, kwargs))}  # views of weights take nothing
        out = func(*args, **(kwargs or {}))
        for storage in _storages(out):
            if storage._cdata not in given:
                self._note(storage)
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
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


def _looks_up(questions: Questions, config: ModelConfig) -> bool:
    """Whether no block runs: every question reads embeddings alone."""
    readings = questions.readings
    reads = [read.site for each in readings for read in each.reads]
    return len(readings) == len(questions.every) and bool(reads) and deepest(reads, config) == 0


def _ghost_peak(questions: Questions, ghost: Transformer, batch: Batch) -> int:
    """Peak of the pass that all readings share, without numbers; reductions that need numbers are left out."""
    needed = []
    for each in questions.readings:
        reads = [Read(read.site, _shape_only(read), by_row=read.by_row) for read in each.reads]
        needed.append(Pass(batch, reads, each.last_only))
    with LiveBytes() as live, _FusedAttention():
        answers = one_pass(ghost, needed) if needed else None
        del answers
    return live.peak


class _FusedAttention(TorchFunctionMode):
    """Attention that takes what the fused kernels take, its output: on the meta device there are none of these."""

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
    """The read's reduction, or all of the site where that cannot run without numbers."""

    def via(value: Tensor, *more: Tensor) -> Tensor:
        if read.via is None:
            return value.clone()
        try:
            return read.via(value, *more)
        except (RuntimeError, NotImplementedError, ValueError):
            return value.clone()

    return via


def _room(model: Transformer) -> int:
    """Bytes that all rows of a run's pass may take together."""
    device = model.device
    if device.type != "cuda":
        return ON_HOST
    weights = sum(x.nbytes for x in model.parameters() if x.device == device)
    return int((torch.cuda.get_device_properties(device).total_memory - weights) * SHARE)
