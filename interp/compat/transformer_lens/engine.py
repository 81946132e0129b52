"""Which passes of a `HookedTransformer` the native model computes, and how its hook points take part."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from interp.compat.transformer_lens.cache import CachedPast, TransformerLensKeyValueCache
from interp.compat.transformer_lens.changes import HOOKS, Changes, Noticing, note_writes
from interp.compat.transformer_lens.config import HookedTransformerConfig
from interp.compat.transformer_lens.hook_points import HookPoint
from interp.compat.transformer_lens.hook_tap import HookTap, hooks_of, is_active, layer_of
from interp.compat.transformer_lens.native import native_of, native_site, outgrown
from interp.compat.transformer_lens.weights import Shared, links_of
from interp.model.kv_cache import Past
from interp.model.tap import Read
from interp.model.transformer import Transformer

SPLIT_INPUTS = ("hook_q_input", "hook_k_input", "hook_v_input")

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

    @property
    def stepwise(self) -> bool:
        """Whether it has to give the numbers of a watched pass to the last bit: those of a part of the model, after a
        cache of TransformerLens', or so short that fused kernels save nothing that matters.
        """
        part = self.first is not None or self.end is not None
        if part or isinstance(self.past, TransformerLensKeyValueCache):
            return True
        return self.past is None and self.x.shape[0] * self.x.shape[1] <= SHORT


@dataclass(frozen=True)
class Caching:
    """What a pass is to keep: `keep(value, name)` of these points, in `into`."""

    names: tuple[str, ...]
    keep: Callable[[Tensor, str], Tensor]
    into: dict[str, Tensor]


class Engine:
    """The native model of a `HookedTransformer`, and where its hook points stand in it."""

    def __init__(self, model: nn.Module, cfg: HookedTransformerConfig) -> None:
        self.cfg = cfg
        self._model = model
        self.native = native_of(model, cfg)
        self.shared: Shared | None = None
        self._seen = -1
        self._polled: list[nn.Module] = []
        self._parts: list[tuple[nn.Module, str, nn.Module]] = []
        self._points: list[tuple[nn.Module, str, str | None]] = []
        self._sites: dict[str, str] = {}
        if self.native is not None:
            self.shared = Shared(self.native, list(links_of(model, self.native.config)))
            self._find(model)

    def _find(self, model: nn.Module) -> None:
        """List every hook point with its site, and every other part, by owner: either may be replaced later."""
        assert self.native is not None
        for path, owner in model.named_modules():
            for attr, child in owner._modules.items():
                if child is None:
                    continue
                name = f"{path}.{attr}" if path else attr
                if not isinstance(child, HookPoint):
                    self._parts.append((owner, attr, child))
                    continue
                site = native_site(name, self.native.config)
                self._points.append((owner, attr, site))
                if site is not None:
                    self._sites[name] = site

    def knows(self, name: str) -> bool:
        """Whether a hook point is a site of the native model."""
        return name in self._sites

    def active(self) -> dict[str, nn.Module] | None:
        """The points that do something, by site; None where only the modules themselves can run."""
        cfg = self.cfg
        if self.native is None or cfg.use_attn_in or cfg.ungroup_grouped_query_attention:
            return None
        if self._quiet():
            return {}
        found = self._active()
        if found == {}:
            self._watch()
        return found

    def _quiet(self) -> bool:
        """Whether nothing was replaced or hooked since a pass that found nothing active."""
        return self._seen == Changes.count and not any(map(_changed, self._polled))

    def _watch(self) -> None:
        """Note from now on what is replaced or hooked; at present nothing is."""
        parts = [part for _, _, part in self._parts]
        for module in (self._model, *parts):
            note_writes(module, ["_modules"])
        points = [point for owner, attr, _ in self._points if (point := owner._modules.get(attr)) is not None]
        for module in (*parts, *points):
            note_writes(module, HOOKS)
        self._polled = [part for part in parts if not isinstance(part, Noticing)]
        self._seen = Changes.count

    def __getstate__(self) -> Mapping[str, Any]:
        """A copy has to look for itself."""
        return self.__dict__ | {"_seen": -1}

    def _active(self) -> dict[str, nn.Module] | None:
        for owner, attr, part in self._parts:
            if owner._modules.get(attr) is not part or _changed(part):
                return None
        found: dict[str, nn.Module] = {}
        for owner, attr, site in self._points:
            point = owner._modules.get(attr)
            if point is None or not is_active(point):
                continue
            if site is None:
                return None
            found[site] = point
        return None if _in_each_others_way(found) else found

    def run(self, passage: Passage, caching: Caching | None = None) -> Tensor | None:
        """The output of a native pass; None where the modules have to run instead."""
        native = self.native
        points = None if passage.first == 0 else self.active()
        if native is None or points is None:
            return None
        if caching is not None and not all(self.knows(name) for name in caching.names):
            return None
        reads = {} if caching is None else self._reads(caching, passage)
        mask = passage.mask if passage.mask is None or not bool(passage.mask.all()) else None
        tap = self._tap(points, reads, passage, mask)
        output = self._computed(native, passage, mask, tap)
        if caching is not None and tap is not None:
            names = {read: name for name, read in reads.items()}
            caching.into.update({names[read]: value for read, value in tap.values.items()})
            tap.close()
        return output

    def _reads(self, caching: Caching, passage: Passage) -> dict[str, Read]:
        return {name: Read(self._sites[name], _via(caching.keep, name)) for name in caching.names}

    def _tap(
        self,
        points: Mapping[str, nn.Module],
        reads: Mapping[str, Read],
        passage: Passage,
        mask: Tensor | None,
    ) -> HookTap | None:
        padded = (
            mask is not None and passage.first is None and self.cfg.positional_embedding_type == "standard"
        )
        stepwise = bool(points or reads) or passage.stepwise
        if not stepwise and not padded and passage.logits:
            return None
        tap = HookTap(points, reads.values(), logits=passage.logits, stepwise=stepwise)
        if padded and mask is not None:
            hidden = ~mask[:, -passage.x.shape[1] :, None].bool()
            tap.changes["hook_pos_embed"] = lambda place: place.masked_fill(hidden, 0)
        return tap

    def _computed(
        self, native: Transformer, passage: Passage, mask: Tensor | None, tap: HookTap | None
    ) -> Tensor:
        n, past = passage.x.shape[1], passage.past
        if isinstance(past, TransformerLensKeyValueCache):
            past = CachedPast(past, None if mask is None else mask.bool())
        if self.cfg.positional_embedding_type == "rotary":
            blocks = cast(nn.ModuleList, self._model.blocks)
            outgrown(self.cfg, blocks, n + (0 if past is None else past.length))
        args = (passage.x, tap, passage.first or 0, passage.end)
        keep = None if mask is None else mask[:, -n:].bool()
        options = {"keep": keep, "cache": past}
        if passage.last and n > 1 and (tap is None or not tap.watches_logits):
            options["logits_at"] = torch.full((len(passage.x), 1), n - 1, device=passage.x.device)
        assert self.shared is not None
        if torch.is_grad_enabled() and self.shared.trained:
            return self.shared.run(args, options)
        self.shared.update()
        return native(*args, **options)


def _via(keep: Callable[[Tensor, str], Tensor], name: str) -> Callable[[Tensor], Tensor]:
    return lambda value: keep(value, name)


def _changed(module: nn.Module) -> bool:
    """Whether calling it does more than its class says: it has hooks, or a `forward` of its own (SAELens does that)."""
    return "forward" in module.__dict__ or any(hooks_of(module))


def _in_each_others_way(points: Mapping[str, Any]) -> bool:
    """Whether a layer has hooks on both its split inputs and the norm that they go through."""
    split = {layer_of(site) for site in points if site.endswith(SPLIT_INPUTS)}
    return any(layer_of(site) in split and ".ln1" in site for site in points) if split else False
