"""A tap with hook points as its places: at each site of a native pass the module that stands there is called."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType

import torch
from torch import Tensor, nn

from interp.compat.transformer_lens.changes import HOOKS
from interp.compat.transformer_lens.hook_points import HookPoint
from interp.model.cells import Span
from interp.model.config import ModelConfig
from interp.model.edits import Edit
from interp.model.mounted import Mountable
from interp.model.tap import Read, Scope, Tap


def layer_of(site: str) -> int | None:
    """The block that a full site name is in; None outside the blocks."""
    parts = site.split(".")
    return int(parts[1]) if parts[0] == "blocks" else None


def is_active(module: nn.Module) -> bool:
    """Whether calling it could do anything: it has hooks or a `forward` of its own, or is no mere hook point."""
    return type(module) is not HookPoint or "forward" in module.__dict__ or any(hooks_of(module))


hooks_of: Callable[[nn.Module], tuple[Mapping[int, object], ...]] = attrgetter(*HOOKS)
"""The four kinds of torch hooks that a module has."""


class HookScope(Scope):
    """The hook points of one layer. Hooks may return another shape, and their errors are their own."""

    def __init__(self, tap: Tap, prefix: str, points: Mapping[str, nn.Module]) -> None:
        super().__init__(tap, prefix)
        self._points = dict(points)
        self.changes: dict[str, Callable[[Tensor], Tensor]] = {}
        """What the pass itself does to a site before its hooks."""
        self.logits = True
        """Whether the logits are wanted; else the pass ends at the final norm."""
        self.stream: Tensor | None = None
        """The stream that enters the first block, if that is given instead of tokens."""
        self.stepwise = False
        """Whether attention and norms go step by step even where they are not watched."""

    def wants(self, *names: str) -> bool:
        """Whether any of these sites has hooks or is read, or is the pattern of a pass that goes step by step."""
        if self.stepwise and "attn.hook_pattern" in names:
            return True
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
            value = point(value.clone() if point._forward_hooks or point._forward_pre_hooks else value)
        return super().visit(name, value)


class HookTap(Tap):
    """The active hook points and the reads of one native pass, by site name. Sites that do not run stay silent.

    stepwise: no fused kernels, so that the numbers do not depend, to the last bit, on what is watched.
    """

    def __init__(
        self,
        points: Mapping[str, nn.Module],
        reads: Iterable[Read] = (),
        *,
        logits: bool = True,
        stepwise: bool = False,
    ) -> None:
        super().__init__(reads)
        self._logits, self._stepwise = logits, stepwise
        self.stream: Tensor | None = None
        """The stream that enters the first block, if that is given instead of tokens."""
        self.place: Tensor | None = None
        """Position vectors of a shortformer, for a pass that does not begin with the embedding."""
        self.changes: dict[str, Callable[[Tensor], Tensor]] = {}
        self._hooked: dict[int | None, dict[str, nn.Module]] = {}
        for site, point in points.items():
            layer = layer_of(site)
            inner = site if layer is None else site.split(".", 2)[2]
            self._hooked.setdefault(layer, {})[inner] = point

    @property
    def watches_logits(self) -> bool:
        """Whether there are hooks after the last block."""
        sites = [*self._hooked.get(None, ()), *(read.site for read in self.reads)]
        return any(site.startswith(("ln_final", "unembed")) for site in sites)

    def open(
        self,
        config: ModelConfig,
        start: int,
        stop: int | None,
        home: torch.device | None = None,
        *,
        standing: Sequence[Edit] = (),
        dictionaries: Mapping[int, Mountable] = MappingProxyType({}),
        span: Span | None = None,
    ) -> None:
        """Sort points and reads by layer."""
        assert not standing and not dictionaries, (
            "the engine runs models without edits and dictionaries of their own"
        )
        self._home = home
        self._scopes, self.values, self.live = {}, {}, {}
        layers = {None, *self._hooked, *(layer_of(read.site) for read in self.reads)}
        if self._stepwise:
            layers.update(range(start, config.n_layers if stop is None else stop))
        for layer in layers:
            prefix = "" if layer is None else f"blocks.{layer}."
            scope = self._scopes[layer] = HookScope(self, prefix, self._hooked.get(layer, {}))
            scope.stepwise = self._stepwise
        for read in self.reads:
            self._scopes[layer_of(read.site)].add(read)
        outside = self._scopes[None]
        assert isinstance(outside, HookScope)
        outside.changes, outside.logits, outside.stream = self.changes, self._logits, self.stream


def scope_of(points: Mapping[str, nn.Module]) -> HookScope:
    """A scope for a part that runs by itself, step by step like every watched pass."""
    scope = HookScope(Tap(), "", points)
    scope.stepwise = True
    return scope
