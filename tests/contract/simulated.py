"""An accelerator that is not there: its tensors compute on the host, and what is asked of it is counted.

A tensor of `OnDevice` holds a tensor of the host and does with it what a device would do with its own, so numbers are
real and code that depends on them runs; fake tensors of torch end at the first `.item()`. `Simulated` counts, while it
is active,

- `kernels`: operators on such tensors that compute something (views and what only asks for a shape are none, explicit
  attention counts in full: no fused kernel is assumed);
- `waits`: how often the host waits for the device: `.item()`, `bool()`, `.tolist()`, `.cpu()`, operators whose result
  has a size that depends on numbers (`nonzero`, an index by a mask, ...), and copies from the host that are not queued
  (`.to(device)` and `torch.tensor(..., device=...)` wait, `.to(device, non_blocking=True)` does not; an index by a list
  or by a tensor of the host is such a copy);
- `sent`: copies from the host that are queued, and cost the host no time.

Operators on tensors of both devices are refused, as a device refuses them. The device is torch's place for one that is
added (`privateuse1`), of which a process has one: use it in a process of its own (`tests.forking`).
"""

import collections
import copy
import traceback

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "card"
HOST = torch.device("cpu")
WAITS = {
    "nonzero", "masked_select", "unique_dim", "_unique2", "unique_consecutive", "unique_dim_consecutive", "equal",
    "is_nonzero", "_local_scalar_dense", "linalg_eigvals", "linalg_eig", "_linalg_svd", "_linalg_eigh",
}  # fmt: skip
"""Operators that the host waits for: their size depends on numbers, or they look whether they converged."""
FREE = {
    "detach",
    "alias",
    "_local_scalar_dense",
    "lift_fresh",
    "_unsafe_view",
    "is_same_size",
    "_reshape_alias",
}
"""What computes nothing, besides views."""
INDEXED = {"index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_"}


class _Module(_DummyBackendModule):
    """What torch asks of the module of a device."""

    def get_rng_state(self, device: object = None) -> Tensor:
        return torch.zeros(0, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: object = None) -> None:
        pass


def plugged_in() -> torch.device:
    """The device; once in a process."""
    _setup_privateuseone_for_python_backend(NAME, _Module())
    return torch.device(NAME, 0)


class OnDevice(Tensor):
    """A tensor of the device; `held` is the host's tensor with its numbers."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: Tensor):  # type: ignore[no-untyped-def]
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            device=torch.device(NAME, 0),
        )  # fmt: skip

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"OnDevice({self.held!r})"

    def tolist(self) -> list[object]:
        return self.cpu().tolist()  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return _computed(func, args, kwargs or {})


def on_device(network: nn.Module) -> nn.Module:
    """A copy of the network whose parameters and buffers are there."""
    network, made = copy.deepcopy(network), {}
    for module in network.modules():
        for table in (module._parameters, module._buffers):
            for name, value in table.items():
                if value is None:
                    continue
                if id(value) not in made:
                    there = OnDevice(value.data)
                    made[id(value)] = (
                        nn.Parameter(there, value.requires_grad) if isinstance(value, nn.Parameter) else there
                    )
                table[name] = made[id(value)]
    return network


class Simulated(TorchDispatchMode):
    """While it is active, what is asked of the device is counted; where: by the lines of ours that ask, too."""

    def __init__(self, *, where: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels = self.waits = self.sent = 0
        self.where, self.places = where, collections.Counter[str]()

    def __enter__(self):  # type: ignore[no-untyped-def]
        self._before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    def __exit__(self, *error):  # type: ignore[no-untyped-def]
        super().__exit__(*error)
        torch._C._set_only_lift_cpu_tensors(self._before)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self._count(func, args, kwargs or {})
        return _computed(func, args, kwargs or {})

    def _note(self, what: str, name: str) -> None:
        setattr(self, what, getattr(self, what) + 1)
        if self.where:
            lines = [f for f in traceback.extract_stack() if "/interp/" in f.filename][::-1]
            place = " < ".join(f"{f.filename.split('/interp/')[-1]}:{f.lineno}" for f in lines[:4])
            self.places[f"{what} {name} {place}"] += 1

    def _count(self, func, args, kwargs) -> None:  # type: ignore[no-untyped-def]
        name, to = func.overloadpacket.__name__, kwargs.get("device")
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        there, here = ([x for x in tensors if isinstance(x, OnDevice) is wanted] for wanted in (True, False))
        if name == "_to_copy" and to is not None and bool(there) is not _is_there(to):
            self._note("sent" if not there and kwargs.get("non_blocking") else "waits", name)
            return
        if name == "copy_" and there and here:
            self._note("waits", name)
            return
        if not there and not (to is not None and _is_there(to)):
            return
        for index in filter(lambda x: x is not None, args[1] if name in INDEXED else ()):
            if not isinstance(index, OnDevice):
                self._note("waits", f"{name} by a list")
                here = [x for x in here if x is not index]
            elif index.dtype == torch.bool:
                self._note("waits", f"{name} by a mask")
        if there and any(x.ndim for x in here):
            raise RuntimeError(
                f"{func}: tensors of two devices, {[tuple(x.shape) for x in here]} on the host"
            )
        if name in WAITS or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            self._note("waits", name)
        if not func.is_view and name not in FREE:
            self._note("kernels", name)


def _is_there(device: torch.device | str) -> bool:
    return torch.device(device).type == NAME


def _inner(x: object) -> object:
    if isinstance(x, OnDevice):
        return x.held
    return HOST if isinstance(x, torch.device) and _is_there(x) else x


def _outer(x: object) -> object:
    return OnDevice(x) if isinstance(x, Tensor) and not isinstance(x, OnDevice) else x


def _computed(func, args, kwargs):  # type: ignore[no-untyped-def]
    """The operator done on the host's tensors; its result stands where the device would have put it."""
    name, to = func.overloadpacket.__name__, kwargs.get("device")
    made = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
    if name == "_to_copy":
        there = isinstance(args[0], OnDevice) if to is None else _is_there(to)
        return OnDevice(made) if there else made
    if name == "copy_" and not isinstance(args[0], OnDevice):
        return args[0]
    flat = tree_flatten((args, kwargs))[0]
    if not any(isinstance(x, OnDevice) for x in flat) and not (to is not None and _is_there(to)):
        return made
    return return_and_correct_aliasing(func, args, kwargs, tree_map(_outer, made))
