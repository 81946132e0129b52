"""What the bench scripts measure with: interleaved CPU seconds, exact counts of work, and the memory of one call.

A time ratio between 0.8 and 1.25 can be noise on a shared machine. Operators, FLOPs and allocated bytes are exact and
repeat: where they say the same as the time, believe the time. Linux only (resident memory comes from /proc).
"""

import contextlib
import ctypes
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

Calls = Mapping[str, Callable[[], object]]
MIB = 2**20
NARROW = bool(os.environ.get("BENCH_NARROW"))
"""Whether little time is to be spent: GPT-2 has half its width, and the others a vocabulary of 10 000 like it; the same
operators in a quarter of the time (`subjects.py`)."""
MMAP_THRESHOLD = -3  # the number of this parameter in mallopt(3)
CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True)
class Work:
    """What one call dispatches."""

    operators: int
    gflop: float
    """Matrix products and attention, 2 FLOPs per multiply-add; causal attention counts in full."""


@dataclass(frozen=True)
class Memory:
    """What one call takes above the state before it, in MiB."""

    resident_mib: float | None
    """High-water mark of the process's resident memory, every large tensor mapped on its own; None at the narrow shape,
    where a call is not made again for it."""
    allocated_mib: float
    """High-water mark of the tensors alive, operators' own buffers included: exact."""
    kept_mib: float
    """Tensors still alive when the call has returned."""


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """PyTorch's switch: with True, its default, every operator goes through the compiler's own bookkeeping."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += 1
        return func(*args, **(kwargs or {}))


class _NoModules(contextlib.nullcontext[None]):
    """Instead of the counter's tracker of modules, whose hooks refuse gradients at what enters one."""

    parents = frozenset({"Global"})


def cpu_seconds(calls: Calls, repeats: int) -> dict[str, list[float]]:
    """Process CPU seconds of every call in every round, after one untimed round; rounds run A B, B A, A B, ...

    Freeing what a call returned is not timed.
    """
    return _interleaved(calls, repeats, time.process_time)


def device_seconds(calls: Calls, repeats: int, device: torch.device) -> dict[str, list[float]]:
    """The same by the clock, between points where the device has done all it was given; of the host CPU seconds."""
    if device.type == "cpu":
        return cpu_seconds(calls, repeats)

    def idle() -> float:
        torch.accelerator.synchronize(device)
        return time.perf_counter()

    return _interleaved(calls, repeats, idle)


def _interleaved(calls: Calls, repeats: int, now: Callable[[], float]) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    gc.freeze()  # what was imported and built need not be looked through before every call
    for turn in range(repeats + 1):
        for name in list(calls) if turn % 2 else reversed(list(calls)):
            gc.collect()
            start = now()
            result = calls[name]()
            spent = now() - start
            del result
            if turn:
                seconds[name].append(spent)
    return seconds


def work(call: Callable[[], object]) -> Work:
    """Operators and FLOPs that one call dispatches."""
    counter = FlopCounterMode(display=False, custom_mapping={CPU_ATTENTION: _attention_flop})
    counter.mod_tracker = _NoModules()  # type: ignore[assignment]
    with counter as flops, _Operators() as operators:
        call()
    return Work(operators.count, float(f"{flops.get_total_flops() / 1e9:.5g}"))


def memory(call: Callable[[], object]) -> Memory:
    """Peaks of one call (made twice: once watched by the system, once by the allocator).

    Measure times first: from here on the process maps every tensor of a mebibyte separately, which makes resident
    memory exact, and allocation slower.
    """
    resident = None if NARROW else round(_resident_peak(call), 1)
    with profile(profile_memory=True) as profiler:  # torch.profiler's makes a Python object of every event
        result = call()
    events = profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    alive = peak = 0
    for _, change in changes:
        alive += change
        peak = max(peak, alive)
    del result
    return Memory(resident, round(peak / MIB, 1), round(alive / MIB, 1))


def device_memory(call: Callable[[], object], device: torch.device) -> Memory:
    """Peaks of one call on a device, as its allocator counts them."""
    if device.type == "cpu":
        return memory(call)
    accelerator = torch.accelerator
    gc.collect()
    before = accelerator.memory_allocated(device)
    accelerator.reset_peak_memory_stats(device)
    result = call()
    peak, after = accelerator.max_memory_allocated(device), accelerator.memory_allocated(device)
    del result
    return Memory(None, round((peak - before) / MIB, 1), round((after - before) / MIB, 1))


def hardware(device: torch.device) -> str:
    """The name of a device."""
    if device.type == "cpu":
        return "host"
    return str(torch.get_device_module(device).get_device_name(device))


def distinct_mib(tensors: Iterable[Tensor]) -> float:
    """Size of the storages behind some tensors, shared ones counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return round(sum(storages.values()) / MIB, 1)


def resident_mib() -> float:
    """The process's resident memory at present."""
    return _status("VmRSS")


def timing(seconds: Mapping[str, Sequence[float]], name: str, reference: str) -> dict[str, object]:
    """Medians, their ratio, and the spread of the ratio over the rounds."""
    rounds = [a / b for a, b in zip(seconds[name], seconds[reference], strict=True)]
    median, theirs = statistics.median(seconds[name]), statistics.median(seconds[reference])
    return {
        "ratio": round(median / theirs, 3),
        "ratio_of_rounds": [
            round(min(rounds), 3),
            round(statistics.median(rounds), 3),
            round(max(rounds), 3),
        ],
        "median_s": round(median, 4),
        "reference_s": round(theirs, 4),
        "rounds": len(rounds),
    }


def report(
    bench: str, system: str, what: str, *parts: Work | Memory | Mapping[str, object], **more: object
) -> None:
    """Print one JSON line: the claim, its figures, and where they were taken."""
    line: dict[str, object] = {"bench": bench, "system": system, "what": what}
    for part in parts:
        line |= part if isinstance(part, Mapping) else asdict(part)
    print(json.dumps(line | more | machine()), flush=True)


def machine() -> dict[str, object]:
    """Where figures are taken."""
    cpus = [
        line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")
    ]
    return {
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": f"{cpus[0] if cpus else platform.processor()} x {len(cpus)}",
    }


def _resident_peak(call: Callable[[], object]) -> float:
    gc.collect()
    libc = ctypes.CDLL(
        None
    )  # else the heap keeps what earlier calls freed, which hides some of what this one takes
    libc.mallopt(MMAP_THRESHOLD, MIB)
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # sets the high-water mark to the present
    before = _status("VmRSS")
    result = call()
    peak = _status("VmHWM")
    del result
    return peak - before


def _status(field: str) -> float:
    value = next(line for line in _lines("/proc/self/status") if line.startswith(field))
    return int(value.split()[1]) / 1024


def _lines(path: str) -> list[str]:
    return Path(path).read_text(encoding="utf-8").splitlines()


def _attention_flop(  # type: ignore[no-untyped-def]
    query: Sequence[int], key: Sequence[int], value: Sequence[int], *args, **kwargs
) -> int:
    """The counter knows the GPU kernels only; the two products of attention, from the shapes `[b h q e]`."""
    rows, heads, queries, width = query
    return 2 * rows * heads * queries * key[2] * (width + value[3])
