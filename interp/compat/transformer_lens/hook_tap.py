"""A tap whose places are hook points: at each site of a native pass the module that stands there is called."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from interp.compat.transformer_lens.hook_points import HookPoint
from interp.model.config import ModelConfig
from interp.model.tap import Read, Scope, Tap


def layer_of(site: str) -> int | None:
    """The block that a full site name is in; None outside the blocks."""
    parts = site.split(".")
    return int(parts[1]) if parts[0] == "blocks" else None


def is_active(module: nn.Module) -> bool:
    """Whether calling it could do anything: it has hooks, or is no mere hook point."""
    return bool(module._forward_hooks or module._backward_hooks) or type(module) is not HookPoint


class HookScope(Scope):
    """The hook points of one layer. Hooks may return another shape, and their errors are their own."""

    def __init__(self, tap: Tap, prefix: str, points: Mapping[str, nn.Module]) -> None:
        super().__init__(tap, prefix)
        self._points = dict(points)
        self.changes: dict[str, Callable[[Tensor], Tensor]] = {}
        """What the pass itself does to a site before its hooks."""
        self.logits = True
        """Whether the logits are wanted; else the pass ends at the final norm."""

    def wants(self, *names: str) -> bool:
        """Whether any of these sites has hooks or is read."""
        return any(name in self._points for name in names) or super().wants(*names)

    def alters(self, *names: str) -> bool:
        """Whether any of these sites has hooks."""
        return any(name in self._points for name in names)

    def visit(self, name: str, value: Tensor) -> Tensor:
        """Call the point on a copy of its own, so that writing in place changes nothing that was cached before."""
        change = self.changes.get(name)
        value = value if change is None else change(value)
        point = self._points.get(name)
        if point is not None:
            value = point(value.clone() if point._forward_hooks else value)
        return super().visit(name, value)


class HookTap(Tap):
    """The active hook points and the reads of one native pass, by site name. Sites that do not run stay silent."""

    def __init__(
        self, points: Mapping[str, nn.Module], reads: Iterable[Read] = (), *, logits: bool = True
    ) -> None:
        super().__init__(reads)
        self._logits = logits
        self.changes: dict[str, Callable[[Tensor], Tensor]] = {}
        self._hooked: dict[int | None, dict[str, nn.Module]] = {}
        for site, point in points.items():
            layer = layer_of(site)
            inner = site if layer is None else site.split(".", 2)[2]
            self._hooked.setdefault(layer, {})[inner] = point

    @property
    def watches_logits(self) -> bool:
        """Whether anybody listens behind the last block."""
        sites = [*self._hooked.get(None, ()), *(read.site for read in self.reads)]
        return any(site.startswith(("ln_final", "unembed")) for site in sites)

    def open(
        self, config: ModelConfig, start: int, stop: int | None, home: torch.device | None = None
    ) -> None:
        """Sort points and reads by layer."""
        self._home = home
        self._scopes, self.values, self.live = {}, {}, {}
        for layer in {None, *self._hooked, *(layer_of(read.site) for read in self.reads)}:
            prefix = "" if layer is None else f"blocks.{layer}."
            self._scopes[layer] = HookScope(self, prefix, self._hooked.get(layer, {}))
        for read in self.reads:
            self._scopes[layer_of(read.site)].add(read)
        outside = self._scopes[None]
        assert isinstance(outside, HookScope)
        outside.changes, outside.logits = self.changes, self._logits


def scope_of(points: Mapping[str, nn.Module]) -> Any:
    """A scope for a module that runs by itself, or None where none of its points does anything."""
    active = {name: point for name, point in points.items() if is_active(point)}
    return HookScope(Tap(), "", active) if active else None
