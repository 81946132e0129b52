"""The passes of a `HookedTransformer`: one forward, the native model's, in which hook points and modules take part.

Hook points that have hooks are places of the pass (`hook_tap`). Where a module was replaced, has hooks of torch's or a
`forward` of its own, the native model calls that module in place of its own part (`Detour`); what is called and still
is of TransformerLens' form asks the native part in turn (`Part.computed`). So nothing is computed in two ways.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from interp.compat.transformer_lens.cache import (
    CachedPast,
    TransformerLensKeyValueCache,
    TransformerLensKeyValueCacheEntry,
)
from interp.compat.transformer_lens.changes import HOOKS, Changes, Noticing, note_writes
from interp.compat.transformer_lens.config import HookedTransformerConfig, refuse_changes
from interp.compat.transformer_lens.hook_points import HookPoint
from interp.compat.transformer_lens.hook_tap import HookTap, hooks_of, is_active, scope_of
from interp.compat.transformer_lens.native import (
    Elsewhere,
    LensNorm,
    blueprint,
    native_of,
    native_path,
    native_site,
    place_of,
    split_inputs,
)
from interp.compat.transformer_lens.weights import Shared, Viewed, as_entry, found, links_of
from interp.model.attention import Attention, PassState, picked
from interp.model.block import Block
from interp.model.config import ModelConfig
from interp.model.kv_cache import Past
from interp.model.norm import HeadNorm, Normalize
from interp.model.tap import Read, Scope, at

SHORT = 32
"""Tokens, of all rows together."""


@dataclass(frozen=True)
class Passage:
    """One pass: what goes in, which blocks it runs through, and what comes out."""

    x: Tensor
    """Tokens `[b p]`, or the stream entering block `first`, `[b p d]`."""
    first: int | None
    """None: begin with the embedding."""
    end: int | None
    """The block not run any more; None: go on to the logits."""
    mask: Tensor | None = None
    """1 at real tokens, those of the cache included; None = all."""
    past: TransformerLensKeyValueCache | Past | None = None
    logits: bool = True
    """Whether the logits are wanted; else the pass ends at the final norm."""
    last: bool = False
    """Whether only the last column's logits are wanted."""
    place: Tensor | None = None
    """Position vectors of a shortformer, for a pass that does not begin with the embedding."""

    @property
    def stepwise(self) -> bool:
        """Whether the pass must give the numbers of a watched pass to the last bit.

        So for a part of the model, after a cache of TransformerLens', or where it is so short that fused kernels save
        nothing that matters.
        """
        part = self.first is not None or self.end is not None
        if part or isinstance(self.past, TransformerLensKeyValueCache):
            return True
        return self.past is None and self.x.shape[0] * self.x.shape[1] <= SHORT


@dataclass(frozen=True)
class Caching:
    """Request to keep values of a pass: `keep(value, name)` of these points, in `into`."""

    names: tuple[str, ...]
    keep: Callable[[Tensor, str], Tensor]
    into: dict[str, Tensor]


@dataclass(frozen=True)
class Setting:
    """Arguments of modules besides the stream when a pass calls them."""

    past: TransformerLensKeyValueCache | Past | TransformerLensKeyValueCacheEntry | None = None
    mask: Tensor | None = None
    tokens: Tensor | None = None

    def entry(self, layer: int) -> TransformerLensKeyValueCacheEntry | None:
        """The keys and values that a layer kept."""
        if self.past is None or isinstance(self.past, TransformerLensKeyValueCacheEntry):
            return self.past
        assert isinstance(self.past, TransformerLensKeyValueCache), "modules take caches of TransformerLens'"
        return self.past[layer]


@dataclass(frozen=True)
class Slot:
    """A module, and where the native model keeps the part in its place."""

    path: str
    owner: nn.Module
    name: str
    module: nn.Module
    around: tuple[str, ...]
    """The modules that it is in which have slots, outermost first."""
    held: dict[str, nn.Module | None] = field(default_factory=dict, repr=False)
    native_name: str = ""
    native: nn.Module | None = None

    @property
    def replaced(self) -> bool:
        """Whether another module stands there now."""
        return self.owner._modules.get(self.name) is not self.module

    @property
    def own(self) -> nn.Module | None:
        """The native part that the module itself computes with."""
        return self.native.norm if isinstance(self.native, HeadNorm) else self.native


@dataclass(frozen=True)
class Point:
    """Where a hook point is kept, and its site in the native model."""

    path: str
    owner: nn.Module
    name: str
    site: str | None
    around: tuple[str, ...]


Points = dict[str, nn.Module]
"""Active hook points by site."""


class Engine:
    """The native model of a `HookedTransformer` (or of a part that is in none), and where its modules stand in it."""

    def __init__(self, root: nn.Module, path: str, native: nn.Module, config: ModelConfig) -> None:
        """path: of the root in a `HookedTransformer`."""
        self.native, self.config = native, config
        self._root, self._path = root, path
        cfg = root.cfg
        assert isinstance(cfg, HookedTransformerConfig)
        self.cfg = cfg
        self._built = _fields_of(cfg)
        self.shared = Shared(native, list(links_of(root, path, native, config)), own=not path)
        self._seen = -1
        self._polled: list[nn.Module] = []
        self._slots: dict[str, Slot] = {}
        self._points: list[Point] = []
        self._standing: Mapping[str, Detour] = {}
        self._sites: dict[str, str] = {}
        self._find()
        self._always = {p for p, slot in self._slots.items() if isinstance(slot.native, Elsewhere)}
        self.adopt()

    def _find(self) -> None:
        """List every hook point with its site, and every other part, by owner: either may be replaced later."""
        top = native_path(self._path, self.config)
        for path, owner in self._root.named_modules(prefix=self._path):
            around = tuple(p for p in self._slots if path == p or path.startswith(f"{p}."))
            for name, child in owner._modules.items():
                if child is None:
                    continue
                full = f"{path}.{name}" if path else name
                if isinstance(child, HookPoint):
                    site = native_site(full, self.config)
                    self._points.append(Point(full, owner, name, site, around))
                    continue
                inner = native_path(full, self.config).removeprefix(top).removeprefix(".")
                part = found(self.native, inner)
                held: dict[str, nn.Module | None] = {}
                if part is not None:
                    held = self.native.get_submodule(inner.rpartition(".")[0])._modules
                self._slots[full] = Slot(
                    full, owner, name, child, around, held, inner.rpartition(".")[2], part
                )
        self._sites = {point.path: point.site for point in self._points if point.site is not None}

    def adopt(self) -> None:
        """Tell every module which native part it computes with."""
        for path, slot in self._slots.items():
            if isinstance(slot.module, Part) and slot.own is not None:
                slot.module.__dict__["_home"] = (self, path)
            if isinstance(slot.own, Attention) and hasattr(slot.module, "rotation_for"):
                slot.own.owner = (slot.module,)  # type: ignore[assignment]
        if self._path and isinstance(self.native, Attention):
            self.native.owner = (self._root,)  # type: ignore[assignment]
        self.cfg.used_by(self)
        self._take_attributes()

    # what users set after it was built

    def accepts(self, name: str, value: object) -> bool:
        """Whether the weights were cast to this dtype."""
        return name == "dtype" and any(value == weight.dtype for weight in self._root.parameters())

    def current(self) -> "Engine":
        """The engine with its native parts as the config and the modules now are.

        Raises:
            ValueError: a field of the config that the engine was built with and that has another value now.
        """
        if self.cfg.__dict__ != self._built:
            refuse_changes(self._built, self.cfg.__dict__, self)
            fresh, self.config = self._fresh()
            for path, part in fresh.named_modules():
                public = {name: value for name, value in vars(part).items() if not name.startswith("_")}
                vars(self.native.get_submodule(path)).update(public)
            self._points = [replace(at, site=native_site(at.path, self.config)) for at in self._points]
            self._sites = {point.path: point.site for point in self._points if point.site is not None}
            self._take_attributes()
            self._seen, self._built = -1, _fields_of(self.cfg)
        return self

    def _fresh(self) -> tuple[nn.Module, ModelConfig]:
        """A native model of the config as it now is, without numbers, and its config."""
        native, config = self._root._native(torch.device("meta"), torch.float32)  # type: ignore[operator]
        return native, config

    def _take_attributes(self) -> None:
        for path, slot in self._slots.items():
            if slot.own is not None:
                self.take(slot.module, path)
        if self._path:
            self.take(self._root, self._path)

    def take(self, module: nn.Module, path: str) -> None:
        """Compute from now on with what users may set on the module at `path`."""
        native = self.native if path == self._path else self._slots[path].own
        if isinstance(module, Part) and native is not None:
            vars(native).update(module.attributes(native))

    def __getstate__(self) -> Mapping[str, Any]:
        """A copy has to look for itself."""
        return self.__dict__ | {"_seen": -1}

    # what takes part

    def _survey(self, within: str) -> tuple[Points, set[str]]:
        """The points that do something, by site, and the modules that have to be called, of one part or ("") all."""
        called: set[str] = set()
        for path, slot in self._slots.items():
            if within and not path.startswith(f"{within}."):
                continue
            if slot.replaced and isinstance(slot.module, nn.ModuleList):
                called |= {p for p, s in self._slots.items() if s.owner is slot.module}
            elif slot.native is not None and (path in self._always or slot.replaced or _changed(slot.module)):
                called.add(path)
            elif self._is_missed(slot) and called.isdisjoint(slot.around):
                raise ValueError(f"{path} was replaced or has hooks, and no pass of this model calls it")
        points: list[tuple[Point, nn.Module]] = []
        for point in self._points:
            if within and within not in point.around and within != self._path:
                continue
            module = point.owner._modules.get(point.name)
            if module is None or not is_active(module) or not called.isdisjoint(point.around):
                continue
            if point.site is None:
                called |= set(self._innermost(point, within))
            points.append((point, module))
        live = {
            point.site: module
            for point, module in points
            if point.site is not None and called.isdisjoint(point.around)
        }
        outermost = {path for path in called if called.isdisjoint(self._slots[path].around)}
        return live, outermost

    def _is_missed(self, slot: Slot) -> bool:
        """Whether something should happen at a module that the native model has no place for."""
        if slot.path == "pos_embed":  # under ALiBi nobody calls it there either
            return False
        silent = isinstance(slot.module, nn.ModuleList) or not self._always.isdisjoint(slot.around)
        return slot.native is None and not silent and (slot.replaced or _changed(slot.module))

    def _innermost(self, point: Point, within: str) -> list[str]:
        """The module that has to be called for the sake of a point that is no site."""
        around = [path for path in point.around if self._slots[path].native is not None]
        return [path for path in around if not within or path.startswith(f"{within}.")][-1:]

    def _taking_part(self) -> tuple[Points, set[str]]:
        """`_survey` of everything; at once where nothing changed since one that found nothing."""
        if self._seen == Changes.count and not any(map(_changed, self._polled)):
            return {}, self._always
        points, called = self._survey("")
        if not points and called == self._always:
            self._watch()
        return points, called

    def _watch(self) -> None:
        """Note from now on what is replaced or hooked; at present nothing is."""
        parts = [slot.module for slot in self._slots.values()]
        for module in (self._root, *parts):
            note_writes(module, ["_modules"])
        points = [at for point in self._points if (at := point.owner._modules.get(point.name)) is not None]
        hooked = [
            p for p in parts if not any(hooks_of(p))
        ]  # what is inside a part that is always called may have some
        for module in (*hooked, *(p for p in points if not any(hooks_of(p)))):
            note_writes(module, HOOKS)
        self._polled = [part for part in parts if not isinstance(part, Noticing)]
        self._seen = Changes.count

    @contextmanager
    def _calling(self, paths: set[str], setting: Setting) -> Iterator[None]:
        """Let the native model call these modules, and no others."""
        before = self._standing
        now = {path: Detour.at(self._slots[path], self._current(path), setting) for path in paths}
        if "embed" in paths and self._has_native(
            "embed.ln"
        ):  # a part of the module, a part after it natively
            now["embed.ln"] = Detour.at(self._slots["embed.ln"], nn.Identity(), setting)
        if before or now:
            self._place(before, now)
        try:
            yield
        finally:
            if before or now:
                self._place(now, before)

    def _has_native(self, path: str) -> bool:
        return path in self._slots and self._slots[path].native is not None

    def _place(self, old: Mapping[str, "Detour"], new: Mapping[str, "Detour"]) -> None:
        for path in old.keys() | new.keys():
            slot = self._slots[path]
            slot.held[slot.native_name] = new.get(path, slot.native)
        self._standing = new

    def _current(self, path: str) -> nn.Module:
        """The module that stands there now."""
        try:
            return self._root.get_submodule(path.removeprefix(self._path).removeprefix("."))
        except AttributeError as cause:
            raise ValueError(
                f"{path} is gone, and the model was built with it: {WITHOUT_A_BLOCK}; a model with fewer blocks is "
                "built from a config of its own, and takes its weights by load_state_dict"
            ) from cause

    # one part

    def part(self, path: str, call: Callable[[Any, Scope], Tensor], setting: Setting) -> Tensor:
        """The output of a function of the native part at `path`, with the hook points and modules inside that part."""
        self.current()
        native = self.native if path == self._path else self._slots[path].own
        assert native is not None
        points, called = self._survey(path)
        if isinstance(native, LensNorm):  # whose points have the sites of no model
            owner = self._root if path == self._path else self._slots[path].module
            sites = zip(native.sites, (owner.hook_scale, owner.hook_normalized), strict=True)
            points = {site: point for site, point in sites if is_active(point)}  # type: ignore[misc, arg-type]
        scope = scope_of({_in_block(site): point for site, point in points.items()})
        top = "" if path == self._path else native_path(path, self.config)
        shared = self.shared.within(top) if top else self.shared
        with self._calling(called, setting):
            return shared.run(partial(call, native, scope))


class ModelEngine(Engine):
    """The engine of a whole `HookedTransformer`."""

    native: Any
    """A `LensTransformer`."""

    def __init__(self, model: nn.Module, cfg: HookedTransformerConfig) -> None:
        plan = blueprint(cfg)
        self.usual = plan.usual
        super().__init__(model, "", native_of(cfg, plan, cfg.device), plan.config)

    def _fresh(self) -> tuple[nn.Module, ModelConfig]:
        plan = blueprint(self.cfg)
        self.usual = plan.usual
        return native_of(self.cfg, plan, "meta"), plan.config

    def adopt(self) -> None:
        """Connect the modules with the native parts they compute with, and with the native model."""
        super().adopt()
        if self.cfg.positional_embedding_type == "rotary":
            parts = [slot.module for slot in self._slots.values() if hasattr(slot.module, "rotation_for")]
            first = {str(part.attn_type): part for part in reversed(parts)}
            self.native.tables = (first.get("global"), first.get("local", first.get("global")))

    def active(self) -> Points | None:
        """The points that do something, by site.

        None where modules are called, or passes are not as the native cache and planner expect them.
        """
        if not self.usual or split_inputs(self.cfg) or self.cfg.ungroup_grouped_query_attention:
            return None
        points, called = self._taking_part()
        return None if called else points

    def run(self, passage: Passage, caching: Caching | None = None) -> Tensor:
        """The output of a pass."""
        points, called = self._taking_part()
        names = () if caching is None else caching.names
        if caching is not None and not all(self._is_site(name, called) for name in names):
            with self._root.hooks([(name, _saving(caching)) for name in names]):  # type: ignore[operator]
                return self.run(passage)
        reads = {} if caching is None else {n: Read(self._sites[n], _via(caching.keep, n)) for n in names}
        mask = passage.mask if passage.mask is None or not bool(passage.mask.all()) else None
        tap = self._tap(points, reads, passage, mask, called > self._always)
        begins = passage.first is None
        setting = Setting(passage.past, mask, passage.x if begins else None)
        with self._calling(called, setting):
            output = self.shared.run(self._ready(passage, mask, tap, called))
        if caching is not None and tap is not None:
            names_of = {read: name for name, read in reads.items()}
            caching.into.update({names_of[read]: value for read, value in tap.values.items()})
            tap.close()
        return output

    def _is_site(self, name: str, called: set[str]) -> bool:
        return name in self._sites and not any(name.startswith(f"{path}.") for path in called)

    def _tap(
        self, points: Points, reads: Mapping[str, Read], passage: Passage, mask: Tensor | None, calls: bool
    ) -> HookTap | None:
        padded = (
            mask is not None
            and passage.first is None
            and self.cfg.positional_embedding_type in ("standard", "shortformer")
        )
        stepwise = bool(points or reads or calls) or passage.stepwise
        if not stepwise and not padded and passage.logits:
            return None
        tap = HookTap(points, reads.values(), logits=passage.logits, stepwise=stepwise)
        if padded and mask is not None:
            hidden = ~mask[:, -passage.x.shape[1] :, None].bool()
            tap.changes["hook_pos_embed"] = lambda place: place.masked_fill(hidden, 0)
        tap.stream = passage.x if passage.first == 0 else None
        tap.place = passage.place
        return tap

    def _ready(
        self, passage: Passage, mask: Tensor | None, tap: HookTap | None, called: set[str]
    ) -> Callable[[], Tensor]:
        """The pass, to be run."""
        x, past = passage.x, passage.past
        rows, n = x.shape[:2]
        if isinstance(past, TransformerLensKeyValueCache):
            past = CachedPast(past.__getitem__, None if mask is None else mask.bool())
        if passage.first == 0:  # the native model begins with tokens; `HookTap.stream` takes their place
            x = torch.zeros(rows, n, dtype=torch.long, device=x.device)
        keep = None if mask is None else mask[:, -n:].bool()
        options: dict[str, Any] = {"keep": keep, "cache": past}
        if passage.last and n > 1 and not called and (tap is None or not tap.watches_logits):
            options["logits_at"] = torch.full((rows, 1), n - 1, device=x.device)
        return partial(self.native, x, tap, passage.first or 0, passage.end, **options)


def refuse_setting(module: nn.Module, name: str, value: object) -> None:
    """ValueError for setting an attribute that a module was built with to another value.

    Modules with a `forward` of the user's own may have anything.
    """
    if isinstance(module.__dict__.get(name), Tensor):  # a weight that pruning computes
        return
    own = "forward" in module.__dict__ or not _of_ours(type(module))
    held = module.__dict__.get(name, value)
    if not (own or held is value or (isinstance(held, int | float | str) and held == value)):
        raise ValueError(
            f"{name} is what this {type(module).__name__} was built with, and no pass would follow another: build one "
            "from another config and put it in its place"
        )


def refuse_method(kind: type, name: str) -> None:
    """The ValueError for a method that is another one now, and that no pass calls."""
    raise ValueError(
        f"no pass calls {kind.__name__}.{name}, so another one would do nothing: change the numbers by a hook, or give "
        "the module a forward of its own"
    )


def _of_ours(kind: type) -> bool:
    """Whether modules of this class compute with a native part."""
    return str(kind.forward.__module__).startswith(__name__.rpartition(".")[0])  # type: ignore[attr-defined]


class Part(Noticing):
    """A module of TransformerLens' form: parameters, hook points and other parts; a native part does its arithmetic.

    In a `HookedTransformer` that is the one of the native model; by itself it has one of its own. What users may set
    on a module, every pass follows; what it was built with is refused.
    """

    settable: ClassVar[Mapping[str, Callable[[str, object], None]]] = {}
    """Attributes that passes follow, and what raises for a value that they cannot."""
    uncalled: ClassVar[frozenset[str]] = frozenset()
    """Methods that passes of TransformerLens call and native passes do not."""

    def attributes(self, native: nn.Module) -> Mapping[str, object]:
        """The attributes of the native part that follow from what users may set on this module."""
        return {}

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Also what pruning makes of a parameter, `W_in_orig`, which has memory of its own: its masks are flat."""
        if name.endswith("_orig") and isinstance(param, Viewed):
            param.flatten_memory()
        super().register_parameter(name, param)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """The entries of a `state_dict`, which writers of files may ask for flat."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, parameter in self._parameters.items():
            if parameter is not None:
                as_entry(destination[prefix + name])

    def __setattr__(self, name: str, value: Any) -> None:
        if check := self.settable.get(name):
            check(name, value)
        elif name in self.uncalled and _of_ours(type(self)):
            refuse_method(type(self), name)
        elif not name.startswith("_") and name not in ("forward", "training", "name"):
            refuse_setting(self, name, value)
        super().__setattr__(name, value)
        if check:
            home = self.__dict__.get("_home") or self.__dict__.get("_own", (None, None))[1:]
            if home[0] is not None:
                home[0].take(self, home[1])

    def computed(
        self, call: Callable[[Any, Scope], Tensor], like: Tensor, setting: Setting | None = None
    ) -> Tensor:
        """The output of a function of the native part and of the scope of this module's hook points."""
        for name in self.uncalled:
            if name in self.__dict__ or _defined(type(self), name):
                refuse_method(type(self), name)
        home = self.__dict__.get("_home")
        if home is None:
            home = (self._alone(like), self._own_path())
        engine, path = home
        assert isinstance(engine, Engine)
        return engine.part(path, call, Setting() if setting is None else setting)

    def _alone(self, like: Tensor) -> Engine:
        """An engine of this module's own, for the device and dtype of these numbers."""
        like = next(self.parameters(), like)
        kind = (like.device, like.dtype)
        if self.__dict__.get("_own", (None,))[0] != kind:
            native, config = self._native(*kind)
            path = self._own_path()
            self.__dict__["_own"] = (kind, Engine(self, path, native, config), path)
        engine = self.__dict__["_own"][1]
        assert isinstance(engine, Engine)
        return engine

    def _own_path(self) -> str:
        """Where a `HookedTransformer` has such a module."""
        raise NotImplementedError(f"{type(self).__name__} computes by itself")

    def _native(self, device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, ModelConfig]:
        """A native part of its own, and the config that it is of."""
        raise NotImplementedError(f"{type(self).__name__} computes by itself")

    def __getstate__(self) -> Mapping[str, Any]:
        """Without engines: that of a copied model tells its modules, and a copied module makes one."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_home", "_own")}


WITHOUT_A_BLOCK = (
    "to leave a block out, set what it adds to 0 by hooks on its hook_attn_out and hook_mlp_out, or end before it "
    "(stop_at_layer)"
)
"""Advice to who puts something that is no block in the place of one, or removes one."""


def _takes(module: nn.Module, *inputs: Tensor, **given: object) -> bool:
    """Whether the module's forward has these arguments."""
    try:
        inspect.signature(module.forward).bind(*inputs, **given)
    except TypeError:
        return False
    return True


class Detour(nn.Module):
    """A replacement of a part of the native model for one pass: a call of the module that users see there."""

    def __init__(self, slot: Slot, module: nn.Module, setting: Setting) -> None:
        nn.Module.__init__(self)
        self._slot, self._module, self._setting = slot, (module,), setting
        self.name = getattr(slot.native, "name", slot.name)
        if isinstance(slot.native, Attention):
            self.layer, self.heads = slot.native.layer, slot.native.heads

    @classmethod
    def at(cls, slot: Slot, module: nn.Module, setting: Setting) -> "Detour":
        """The detour of a place; that of a norm is a norm."""
        return (NormDetour if isinstance(slot.native, Normalize) else cls)(slot, module, setting)

    def forward(self, x: Any, *given: Any) -> Tensor:
        """The module's output for the input of the native part."""
        native, module = self._slot.native, self._module[0]
        if isinstance(native, Block):
            return self._block(module, x, *given)
        if isinstance(native, Attention):
            return self._attention(module, x, *given)
        if isinstance(native, HeadNorm):
            rows = x.flatten(2) if native.whole else x.flatten(0, 2)
            return _tensor(module(rows).view(x.shape))
        if self._slot.path == "pos_embed":
            return self._places(module, x)
        out = _tensor(module(x))
        after = native.after if isinstance(native, LensNorm) else None
        return out if after is None else at(given[0] if given else None, after, out)

    def _block(
        self, module: nn.Module, x: Tensor, shared: PassState, tap: Scope | None, only: Tensor | None = None
    ) -> Tensor:
        layer = int(self._slot.name)
        given = {
            "shortformer_pos_embed": place_of(shared), "past_kv_cache_entry": self._setting.entry(layer),
            "attention_mask": self._setting.mask,
        }  # fmt: skip
        out = self._answer(module, x, **given)
        return _tensor(out if only is None else picked(out, only))

    def _answer(self, module: nn.Module, *inputs: Tensor, **given: object) -> Tensor:
        """The output of the module. TypeError, with what to do instead, for one that does not take what it is given."""
        try:
            return _tensor(module(*inputs, **given))
        except TypeError as cause:
            if _takes(module, *inputs, **given):
                raise
            is_block = isinstance(self._slot.native, Block)
            names = [*given] if is_block else ["query, key and value inputs", *given]
            instead = WITHOUT_A_BLOCK if is_block else "to leave it out, set its output to 0 by a hook"
            raise TypeError(
                f"{self._slot.path} is now {type(module).__name__}, whose forward does not take what a pass gives to "
                f"{'a block' if is_block else 'attention'} ({', '.join(names)}): {instead}; any other module there "
                "needs a forward with these arguments too (**kwargs)"
            ) from cause

    def _attention(
        self,
        module: nn.Module,
        x: Tensor,
        source: tuple[Tensor, Normalize],
        shared: PassState,
        tap: Scope | None,
        only: Tensor | None = None,
    ) -> Tensor:
        native = self._slot.native
        inputs = native.inputs(x, (*source, place_of(shared)), tap)  # type: ignore[union-attr, operator]
        assert isinstance(native, Attention)
        out = self._answer(
            module,
            *inputs,
            past_kv_cache_entry=self._setting.entry(native.layer),
            attention_mask=self._setting.mask,
        )
        return _tensor(out if only is None else picked(out, only))

    def _places(self, module: nn.Module, positions: Tensor) -> Tensor:
        tokens, past = self._setting.tokens, self._setting.past
        assert tokens is not None
        before = 0 if past is None else self._setting.entry(0).past_keys.shape[1]  # type: ignore[union-attr]
        return _tensor(module(tokens, before, self._setting.mask))


class NormDetour(Detour, Normalize):  # type: ignore[misc]  # `heads` is of the place, whatever is there
    """A detour in the place of a norm, with nothing of a norm but its type."""


def _defined(kind: type, name: str) -> bool:
    """Whether a class of the user defines a method."""
    found = getattr(kind, name, None)
    return found is not None and not str(found.__module__).startswith(__name__.rpartition(".")[0])


def _fields_of(cfg: HookedTransformerConfig) -> dict[str, Any]:
    """The fields, of lists a copy."""
    return {name: [*value] if isinstance(value, list) else value for name, value in cfg.__dict__.items()}


def _tensor(value: object) -> Tensor:
    assert isinstance(value, Tensor)
    return value


def _in_block(site: str) -> str:
    return site.split(".", 2)[2] if site.startswith("blocks.") else site


def _saving(caching: Caching) -> Callable[..., None]:
    def save(value: Tensor, hook: HookPoint) -> None:
        assert hook.name is not None
        caching.into[hook.name] = caching.keep(value, hook.name)

    return save


def _via(keep: Callable[[Tensor, str], Tensor], name: str) -> Callable[[Tensor], Tensor]:
    return lambda value: keep(value, name)


def _changed(module: nn.Module) -> bool:
    """Whether calling it does more than its class says: it has hooks, or a `forward` of its own (SAELens does that)."""
    return "forward" in module.__dict__ or any(hooks_of(module))
