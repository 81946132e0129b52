"""`HookPoint`: the identity as a module, so that torch's own hooks can see and replace what passes through it.

It works inside any module. In a `HookedTransformer` the points that have hooks become places of the native pass.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from interp.compat.transformer_lens.changes import Noticing

Direction = Literal["fwd", "bwd"]
Directions = Literal["fwd", "bwd", "both"]
NamesFilter = Callable[[str], bool] | Sequence[str] | str | None
"""Selection of hook points: a name, several, a predicate; None: all."""
HookFunction = Callable[..., Any]
"""`fn(tensor, hook) -> tensor | None`; `hook` is passed by keyword and is the `HookPoint`."""
DeviceType = torch.device | str | int | None


@runtime_checkable
class TensorConversion(Protocol):
    """Conversion of a hook point's value for hooks, and back."""

    def convert(self, value: Tensor) -> Tensor:
        """The value that hooks see."""
        ...

    def revert(self, value: Tensor) -> Tensor:
        """The value that the model goes on with."""
        ...


@dataclass
class LensHandle:
    """A hook that was added: torch's handle, and under which terms it stays."""

    hook: RemovableHandle
    is_permanent: bool = False
    context_level: int | None = None
    user_hook: Callable[..., Any] | None = None
    """The function as the user gave it."""


class HookPoint(Noticing):
    """A place where an activation can be seen and replaced; `name` is set by the root module's `setup()`."""

    def __init__(self) -> None:
        super().__init__()
        self.fwd_hooks: list[LensHandle] = []
        self.bwd_hooks: list[LensHandle] = []
        self.ctx: dict[Any, Any] = {}
        self.name: str | None = None
        self.hook_conversion: TensorConversion | None = None

    def __repr__(self) -> str:
        said = [] if self.name is None else [f"name={self.name!r}"]
        counts = {"fwd": len(self.fwd_hooks), "bwd": len(self.bwd_hooks)}
        said += [f"{count} {kind}" for kind, count in counts.items() if count]
        return f"HookPoint({', '.join(said)})"

    def forward(self, x: Any) -> Any:
        """The value itself."""
        return x

    def add_perma_hook(self, hook: HookFunction, dir: Direction = "fwd") -> None:
        """A hook that `remove_hooks` leaves in place unless it includes permanent ones."""
        self.add_hook(hook, dir=dir, is_permanent=True)

    def add_hook(
        self,
        hook: HookFunction,
        dir: str = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
        alias_names: list[str] | None = None,
    ) -> None:
        """Call `hook(value, hook=self)` at every pass ("bwd": with the gradient); what it returns replaces the value.

        level: that of the `hooks` context it belongs to. prepend: before the hooks that are there. alias_names: call it
        once under each of these names instead of the point's own. ValueError for another `dir`.
        """
        if dir not in ("fwd", "bwd"):
            raise ValueError(f"Invalid direction {dir}")
        called = self._called(hook, alias_names)
        if dir == "fwd":
            handle = self.register_forward_hook(_named(_forward_hook(called), hook), prepend=prepend)
        else:
            handle = self.register_full_backward_hook(_named(_backward_hook(called), hook), prepend=prepend)
        kept = self.fwd_hooks if dir == "fwd" else self.bwd_hooks
        kept.insert(0 if prepend else len(kept), LensHandle(handle, is_permanent, level, hook))

    def _called(self, hook: HookFunction, alias_names: list[str] | None) -> Callable[[Tensor], Any]:
        """The hook as a function of the value only."""

        def called(value: Tensor) -> Any:
            conversion = self.hook_conversion
            seen, new = value if conversion is None else conversion.convert(value), None
            for at in [self] if alias_names is None else [_Alias(name, self) for name in alias_names]:
                answer = hook(seen, hook=at)
                if answer is not None:
                    seen = new = answer
            return new if new is None or conversion is None else conversion.revert(new)

        return called

    def has_hooks(
        self, dir: str = "both", including_permanent: bool = True, level: int | None = None
    ) -> bool:
        """Whether a hook of this direction (and level) is there."""
        return any(
            (including_permanent or not handle.is_permanent) and level in (None, handle.context_level)
            for handle in self._handles(dir)
        )

    def remove_hooks(
        self, dir: str = "fwd", including_permanent: bool = False, level: int | None = None
    ) -> None:
        """Remove hooks of this direction: all with `including_permanent`, else passing ones of `level` (None: any)."""
        for handle in self._handles(dir):
            passing = not handle.is_permanent and level in (None, handle.context_level)
            if including_permanent or passing:
                handle.hook.remove()
                for kept in (self.fwd_hooks, self.bwd_hooks):
                    kept[:] = [other for other in kept if other is not handle]

    def _handles(self, dir: str) -> list[LensHandle]:
        if dir not in ("fwd", "bwd", "both"):
            raise ValueError(f"Invalid direction {dir}")
        return [*(self.fwd_hooks if dir != "bwd" else ()), *(self.bwd_hooks if dir != "fwd" else ())]

    def clear_context(self) -> None:
        """A fresh, empty `ctx`."""
        self.ctx = {}

    def enable_reshape(self, hook_conversion: TensorConversion | None = None) -> None:
        """Show hooks `convert(value)`, and go on with `revert` of what they return."""
        self.hook_conversion = hook_conversion

    def layer(self) -> int:
        """The layer in a name like `blocks.3.attn.hook_q`; ValueError for other names."""
        return _layer(self.name)


class _Alias:
    """A hook point under another name."""

    def __init__(self, name: str, target: HookPoint) -> None:
        self.name, self._target = name, target

    @property
    def ctx(self) -> dict[Any, Any]:
        return self._target.ctx

    def layer(self) -> int:
        return _layer(self.name)


class HookIntrospectionMixin:
    """`list_hooks` for whatever has a `hook_dict`."""

    hook_dict: dict[str, HookPoint]

    def list_hooks(
        self, name_filter: NamesFilter = None, dir: Directions = "both", including_permanent: bool = True
    ) -> dict[str, list[LensHandle]]:
        """The hooks that are there, by the name of their point; points without any are left out."""
        wanted = as_predicate(name_filter)
        found = {}
        for name, point in self.hook_dict.items():
            handles = [h for h in point._handles(dir) if including_permanent or not h.is_permanent]
            if handles and wanted(name):
                found[name] = handles
        return found


def as_predicate(names: NamesFilter) -> Callable[[str], bool]:
    """A filter of names as a predicate; ValueError for what is none."""
    if names is None:
        return lambda name: True
    if isinstance(names, str):
        return lambda name: name == names
    if callable(names):
        return names
    if isinstance(names, Sequence | set | frozenset):
        chosen = set(names)
        return lambda name: name in chosen
    raise ValueError("names_filter must be a string, list of strings, or function")


def _forward_hook(called: Callable[[Tensor], Any]) -> Callable[..., Any]:
    return lambda module, inputs, output: called(output)


def _backward_hook(called: Callable[[Tensor], Any]) -> Callable[..., Any]:
    """Torch wants a tuple; users return a tensor, a tuple of one, or nothing."""

    def hook(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        new = called(grad_output[0])
        return new if new is None or isinstance(new, tuple) else (new,)

    return hook


def _named(hook: Callable[..., Any], user_hook: HookFunction) -> Callable[..., Any]:
    """The hook named after the user's function; the repr of a partial would print its tensors."""
    inner = user_hook.func if isinstance(user_hook, partial) else user_hook
    hook.__name__ = f"partial({inner!r},...)" if isinstance(user_hook, partial) else repr(user_hook)
    return hook


def _layer(name: str | None) -> int:
    if name is None:
        raise ValueError("Name cannot be None")
    return int(name.split(".")[1])


def __getattr__(name: str) -> Any:
    if name != "HookedRootModule":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        "hook_points.HookedRootModule is deprecated and will be removed in TransformerLens 4.0: it is "
        "interp.compat.transformer_lens.HookedRootModule",
        DeprecationWarning,
        stacklevel=2,
    )
    return import_module("interp.compat.transformer_lens.root_module").HookedRootModule
