"""`HookedRootModule`: a module that finds its hook points, adds and removes hooks, and caches what passes through."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from interp.compat.transformer_lens.hook_points import (
    DeviceType,
    HookFunction,
    HookIntrospectionMixin,
    HookPoint,
    NamesFilter,
    as_predicate,
)

Place = str | Callable[[str], bool]
"""Where a hook goes: the name of a point, or a predicate of names."""
Hooks = Sequence[tuple[Place, HookFunction]]
POSITION_BEFORE_HEADS = ("hook_q", "hook_k", "hook_v", "hook_z", "hook_result", "hook_rot_q", "hook_rot_k")
"""Points with their position in the third axis from the end; elsewhere it is the second."""


class HookedRootModule(HookIntrospectionMixin, nn.Module):
    """A module with `HookPoint`s that are known by name after `setup()`, to be called at the end of `__init__`.

    Hooks are state: what `add_hook` adds stays until `reset_hooks`. `hooks`, `run_with_hooks` and `run_with_cache`
    remove theirs themselves, also after an error.
    """

    name: str | None
    mod_dict: dict[str, nn.Module]
    hook_dict: dict[str, HookPoint]

    def __init__(self, *args: object) -> None:
        super().__init__()
        self.is_caching = False
        self.context_level = 0

    def setup(self) -> None:
        """Name every submodule after its place, and list them in `mod_dict`, hook points in `hook_dict` too."""
        self.mod_dict, self.hook_dict = {}, {}
        for name, module in self.named_modules():
            if name:
                module.name = name
                self.mod_dict[name] = module
                if isinstance(module, HookPoint):
                    self.hook_dict[name] = module

    def hook_points(self) -> Any:
        """All hook points."""
        return self.hook_dict.values()

    # adding and removing

    def add_hook(
        self,
        name: Place,
        hook: HookFunction,
        dir: str = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
    ) -> None:
        """Add a hook at the point of this name, or at every point whose name the predicate accepts.

        Raises:
            KeyError: a name that no module has.
            AssertionError: the name of a module that is no hook point.
        """
        if isinstance(name, str):
            point = self.mod_dict[name]
            assert isinstance(point, HookPoint), f"{name} is {type(point).__name__}, not a HookPoint"
            points = {name: point}
        else:
            points = {at: point for at, point in self.hook_dict.items() if name(at)}
        for at, point in points.items():
            self.check_and_add_hook(point, at, hook, dir, is_permanent, level, prepend)

    def add_perma_hook(self, name: Place, hook: HookFunction, dir: str = "fwd") -> None:
        """A hook that stays until `reset_hooks(including_permanent=True)`."""
        self.add_hook(name, hook, dir=dir, is_permanent=True)

    def check_and_add_hook(
        self,
        hook_point: HookPoint,
        hook_point_name: str,
        hook: HookFunction,
        dir: str = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
    ) -> None:
        """Add the hook unless `check_hooks_to_add` refuses it."""
        self.check_hooks_to_add(
            hook_point, hook_point_name, hook, dir=dir, is_permanent=is_permanent, prepend=prepend
        )
        hook_point.add_hook(hook, dir=dir, is_permanent=is_permanent, level=level, prepend=prepend)

    def check_hooks_to_add(
        self,
        hook_point: HookPoint,
        hook_point_name: str,
        hook: HookFunction,
        dir: str = "fwd",
        is_permanent: bool = False,
        prepend: bool = False,
    ) -> None:
        """Raise if this hook must not be added; for subclasses."""

    def remove_all_hook_fns(
        self, direction: str = "both", including_permanent: bool = False, level: int | None = None
    ) -> None:
        """`remove_hooks` at every point."""
        for point in self.hook_points():
            point.remove_hooks(direction, including_permanent=including_permanent, level=level)

    def clear_contexts(self) -> None:
        """Empty the `ctx` of every point."""
        for point in self.hook_points():
            point.clear_context()

    def reset_hooks(
        self,
        clear_contexts: bool = True,
        direction: str = "both",
        including_permanent: bool = False,
        level: int | None = None,
    ) -> None:
        """Remove all hooks that are not permanent (of one level, if it is given), and empty the contexts."""
        if clear_contexts:
            self.clear_contexts()
        self.remove_all_hook_fns(direction, including_permanent, level=level)
        self.is_caching = False

    # running

    @contextmanager
    def hooks(
        self,
        fwd_hooks: Hooks = (),
        bwd_hooks: Hooks = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ) -> Iterator[Any]:
        """Hooks for every pass inside the `with`; nests. Permanent hooks and those of outer contexts stay.

        reset_hooks_end: False leaves them. clear_contexts: empty every point's `ctx` at the end as well.
        """
        self.context_level += 1
        try:
            for place, hook in fwd_hooks:
                self._enable_hook(place, hook, "fwd")
            for place, hook in bwd_hooks:
                self._enable_hook(place, hook, "bwd")
            yield self
        finally:
            if reset_hooks_end:
                self.reset_hooks(clear_contexts, including_permanent=False, level=self.context_level)
            self.context_level -= 1

    def _enable_hook(self, name: Place, hook: HookFunction, dir: str) -> None:
        if isinstance(name, str):
            self._enable_hook_with_name(name, hook, dir)
        else:
            self._enable_hooks_for_points(self.hook_dict.items(), as_predicate(name), hook, dir)

    def _enable_hook_with_name(self, name: str, hook: HookFunction, dir: str) -> None:
        point = self.mod_dict[name]
        if not hasattr(point, "add_hook"):
            raise TypeError(f"Expected a module with add_hook, got {type(point)}")
        cast(HookPoint, point).add_hook(hook, dir=dir, level=self.context_level)

    def _enable_hooks_for_points(
        self,
        hook_points: Iterable[tuple[str, HookPoint]],
        enabled: Callable[[str], bool],
        hook: HookFunction,
        dir: str,
    ) -> None:
        for name, point in hook_points:
            if enabled(name):
                point.add_hook(hook, dir=dir, level=self.context_level)

    def _chosen(self, names: NamesFilter) -> list[str]:
        """The points that a filter selects."""
        accept = as_predicate(names)
        return [name for name in self.hook_dict if accept(name)]

    def run_with_hooks(
        self,
        *model_args: Any,
        fwd_hooks: Hooks = (),
        bwd_hooks: Hooks = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        **model_kwargs: Any,
    ) -> Any:
        """One pass with these hooks. Backward hooks need `reset_hooks_end=False`, or `hooks` around both passes."""
        if len(bwd_hooks) > 0 and reset_hooks_end:
            logging.warning(
                "the hooks are removed at the end of run_with_hooks, so the backward hooks will not see a backward pass"
            )
        with self.hooks(fwd_hooks, bwd_hooks, reset_hooks_end, clear_contexts) as model:
            return model.forward(*model_args, **model_kwargs)

    # caching

    def run_with_cache(
        self,
        *model_args: Any,
        names_filter: NamesFilter = None,
        device: DeviceType = None,
        remove_batch_dim: bool = False,
        incl_bwd: bool = False,
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        pos_slice: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """The output, and a dict of what passed through the points; with `incl_bwd` gradients too, as `<name>_grad`.

        incl_bwd: calls `backward()` on the output, which must be one number. remove_batch_dim: keep the first row only.
        pos_slice: the positions to keep, what `utils.Slice` takes.
        """
        cache, fwd, bwd = self.get_caching_hooks(
            names_filter, incl_bwd, device, remove_batch_dim=remove_batch_dim, pos_slice=pos_slice
        )
        with self.hooks(fwd, bwd, reset_hooks_end=reset_hooks_end, clear_contexts=clear_contexts):
            output = self(*model_args, **model_kwargs)
            if incl_bwd:
                output.backward()
        return output, cache

    def get_caching_hooks(
        self,
        names_filter: NamesFilter = None,
        incl_bwd: bool = False,
        device: DeviceType = None,
        remove_batch_dim: bool = False,
        cache: dict[Any, Any] | None = None,
        pos_slice: Any = None,
    ) -> tuple[dict[Any, Any], list[Any], list[Any]]:
        """A dict, and the forward and backward hooks that would fill it; nothing is added to the model."""
        cache = {} if cache is None else cache
        self.is_caching = True
        keep = kept(device, remove_batch_dim, pos_slice)
        names = self._chosen(names_filter)
        fwd = [(name, partial(save_into, cache=cache, keep=keep)) for name in names]
        bwd = [
            (name, partial(save_into, cache=cache, keep=keep, suffix="_grad")) for name in names if incl_bwd
        ]
        return cache, fwd, bwd

    def add_caching_hooks(
        self,
        names_filter: NamesFilter = None,
        incl_bwd: bool = False,
        device: DeviceType = None,
        remove_batch_dim: bool = False,
        cache: dict[Any, Any] | None = None,
    ) -> dict[Any, Any]:
        """Add hooks that fill the returned dict at every pass, until `reset_hooks`."""
        cache, fwd, bwd = self.get_caching_hooks(names_filter, incl_bwd, device, remove_batch_dim, cache)
        for dir, hooks in (("fwd", fwd), ("bwd", bwd)):
            for name, hook in hooks:
                self.hook_dict[name].add_hook(hook, dir=dir)
        return cache

    def cache_all(
        self,
        cache: dict[Any, Any] | None,
        incl_bwd: bool = False,
        device: DeviceType = None,
        remove_batch_dim: bool = False,
    ) -> None:
        """`add_caching_hooks` for every point; deprecated in favour of it."""
        logging.warning("cache_all is deprecated, use add_caching_hooks or run_with_cache")
        self.add_caching_hooks(None, incl_bwd, device, remove_batch_dim, cache)

    def cache_some(
        self,
        cache: dict[Any, Any] | None,
        names: Callable[[str], bool],
        incl_bwd: bool = False,
        device: DeviceType = None,
        remove_batch_dim: bool = False,
    ) -> None:
        """`add_caching_hooks` for the points that `names` accepts; deprecated in favour of it."""
        logging.warning("cache_some is deprecated, use add_caching_hooks or run_with_cache")
        self.add_caching_hooks(names, incl_bwd, device, remove_batch_dim, cache)


def kept(device: DeviceType, remove_batch_dim: bool, pos_slice: Any) -> Callable[[Tensor, str], Tensor]:
    """The cached form of a point's value: its position slice, without the batch axis if wanted, on a device."""
    if pos_slice is not None:
        from interp.compat.transformer_lens.utils import Slice

        pos_slice = Slice.unwrap(pos_slice)
        if pos_slice.mode == "identity":
            pos_slice = None

    def keep(value: Tensor, name: str) -> Tensor:
        rank = value.dim()
        value = value.detach()
        if device is not None:
            value = value.to(device)
        if remove_batch_dim:
            value = value[0]
        axis = -3 if name.endswith(POSITION_BEFORE_HEADS) else -2
        return value if pos_slice is None or rank < -axis else pos_slice.apply(value, dim=axis)

    return keep


def save_into(
    tensor: Any,
    hook: HookPoint,
    cache: dict[Any, Any],
    keep: Callable[[Tensor, str], Tensor],
    suffix: str = "",
) -> None:
    """A hook that keeps the value under the point's name; RuntimeError before `setup()` has named it."""
    if hook.name is None:
        raise RuntimeError("a hook point has no name before its root module's setup()")
    cache[hook.name + suffix] = keep(tensor, hook.name)
