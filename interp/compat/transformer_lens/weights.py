"""Parameters in TransformerLens' layout that are views of the native model's fused ones, so that there is one memory.

Writing into a parameter in place writes into the native weight, and counts as writing there: a backward pass that needs
the numbers from before raises, as in plain torch. A parameter that was put elsewhere (`p.data = ...`, assigned anew,
tied) is copied before each pass. Gradients of the fused weights are split into those of the parameters.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from interp.compat.transformer_lens.changes import Changes, note_writes
from interp.model.config import ModelConfig

Split = Callable[[Tensor], tuple[Tensor, ...]]


def whole(weight: Tensor) -> tuple[Tensor, ...]:
    """The weight itself."""
    return (weight,)


def turned(weight: Tensor) -> tuple[Tensor, ...]:
    """Its transpose."""
    return (weight.mT,)


def halves(weight: Tensor) -> tuple[Tensor, ...]:
    """The transposes of its upper and lower rows."""
    first, second = weight.chunk(2)
    return first.mT, second.mT


@dataclass(frozen=True)
class HeadsFirst:
    """Rows `(n e)` as heads `[n d e]` (a bias: `[n e]`), in groups."""

    groups: tuple[int, ...]
    d_head: int

    def __call__(self, weight: Tensor) -> tuple[Tensor, ...]:
        """The groups of heads."""
        pattern = "(n e) d -> n d e" if weight.ndim == 2 else "(n e) -> n e"
        return rearrange(weight, pattern, e=self.d_head).split(self.groups)


@dataclass(frozen=True)
class HeadsLast:
    """Columns `(h e)` as heads `[h e d]`."""

    d_head: int

    def __call__(self, weight: Tensor) -> tuple[Tensor, ...]:
        """The heads."""
        return (rearrange(weight, "d (h e) -> h e d", e=self.d_head),)


@dataclass(frozen=True)
class Link:
    """A native parameter, and the parameters that its parts are."""

    native: str
    split: Split
    owner: nn.Module
    names: tuple[str, ...]

    def leaves(self) -> tuple[Tensor, ...]:
        """The parameters as they now are."""
        return tuple(getattr(self.owner, name) for name in self.names)


@dataclass(frozen=True)
class Leaf:
    """Where a parameter is kept, and the part of a native weight that it should be."""

    kept: dict[str, nn.Parameter | None]
    name: str
    view: Tensor

    def parameter(self) -> Tensor:
        """The parameter as it now is, or what `functional_call` put in its place."""
        found = self.kept[self.name]
        assert found is not None
        return found


class Shared:
    """The native model's weights as views, and back."""

    def __init__(self, native: nn.Module, links: list[Link]) -> None:
        self._native, self.links = native, links
        self.share(fresh=True)

    @torch.no_grad()
    def share(self, *, fresh: bool = False) -> None:
        """Take the parameters' values over, and make the parameters views of the native weights.

        fresh: nothing has been computed with them, so that they may count writes together with the native weights.
        """
        self._leaves: list[Leaf] = []
        for link in self.links:
            note_writes(link.owner, ["_parameters"])
            weight = self._native.get_parameter(link.native)
            for view, name in zip(link.split(weight.detach()), link.names, strict=True):
                leaf = Leaf(link.owner._parameters, name, view)
                self._leaves.append(leaf)
                parameter = leaf.parameter()
                if same_memory(view, parameter):
                    continue
                view.copy_(parameter)
                if fresh:
                    torch.utils.swap_tensors(parameter, nn.Parameter(view, parameter.requires_grad))
                else:
                    parameter.data = view
        self._places = [leaf.view.data_ptr() for leaf in self._leaves]
        self._strides = [leaf.view.stride() for leaf in self._leaves if leaf.view.ndim > 1]
        self._slots = [_slot(self._native, link.native) for link in self.links]
        self._weights = [held[name] for held, name in self._slots]
        self._forget()

    def _forget(self) -> None:
        self._seen = -1
        self._parameters: list[Tensor] = []
        self._matrices: list[Tensor] = []
        self._fused: tuple[list[bool], list[Tensor]] | None = None

    def __getstate__(self) -> Mapping[str, Any]:
        """Without what follows from the rest; `share` comes next."""
        derived = (
            "_leaves",
            "_places",
            "_strides",
            "_slots",
            "_weights",
            "_parameters",
            "_matrices",
            "_fused",
        )
        return {name: value for name, value in self.__dict__.items() if name not in derived}

    def _current(self) -> list[Tensor]:
        """The parameters as they now are."""
        if self._seen != Changes.count:
            self._seen, self._fused = Changes.count, None
            self._parameters = [leaf.parameter() for leaf in self._leaves]
            self._matrices = [
                p for leaf, p in zip(self._leaves, self._parameters, strict=True) if leaf.view.ndim > 1
            ]
        return self._parameters

    @property
    def whole(self) -> bool:
        """Whether every parameter is its part of the native weights."""
        now = self._current()
        at, strides = [*map(Tensor.data_ptr, now)], [*map(Tensor.stride, self._matrices)]
        return at == self._places and strides == self._strides

    @property
    def trained(self) -> bool:
        """Whether any parameter wants a gradient."""
        return any(map(WANTED, self._current()))

    def update(self) -> None:
        """Copy the parameters that are elsewhere into the native weights."""
        if not self.whole:
            for leaf, parameter in zip(self._leaves, self._current(), strict=True):
                if not same_memory(leaf.view, parameter):
                    leaf.view.data.copy_(parameter.data)

    def run(self, args: Sequence[Any], options: Mapping[str, Any]) -> Tensor:
        """A pass of the native model whose weights are functions of the parameters."""
        weights = self.fused()
        before = [held[name] for held, name in self._slots]  # those of a pass that this one is in, in a hook
        try:
            for (held, name), weight in zip(self._slots, weights, strict=True):
                held[name] = weight  # type: ignore[assignment]
            output = self._native(*args, **options)
        finally:
            for (held, name), own in zip(self._slots, before, strict=True):
                held[name] = own
        assert isinstance(output, Tensor)
        return output

    def fused(self) -> list[Tensor]:
        """The native weights as functions of the parameters: the same ones again while these are their views."""
        whole, wanted = self.whole, [*map(WANTED, self._current())]
        if self._fused is not None and whole and self._fused[0] == wanted:
            return self._fused[1]
        fresh = [_joined(link, own) for link, own in zip(self.links, self._weights, strict=True)]
        self._fused = (wanted, fresh) if whole else None
        return fresh


WANTED = attrgetter("requires_grad")


def _slot(native: nn.Module, path: str) -> tuple[dict[str, nn.Parameter | None], str]:
    """Where a native parameter is kept, and its name there."""
    owner, _, name = path.rpartition(".")
    return native.get_submodule(owner)._parameters, name


def _joined(link: Link, weight: nn.Parameter | None) -> Tensor:
    assert weight is not None
    joined = _Joined.apply(link.split, weight.detach(), *link.leaves())  # type: ignore[no-untyped-call]
    assert isinstance(joined, Tensor)
    return joined


class _Joined(torch.autograd.Function):
    """The fused weight of some parts; no copy where they are its views. It saves nothing: any pass may use it again."""

    @staticmethod
    def forward(ctx: Any, split: Split, weight: Tensor, *leaves: Tensor) -> Tensor:
        ctx.split = split
        views = split(weight)
        if all(same_memory(view, leaf) for view, leaf in zip(views, leaves, strict=True)):
            return weight.detach()
        fresh = torch.empty_like(weight)
        for view, leaf in zip(split(fresh), leaves, strict=True):
            view.copy_(leaf)
        return fresh

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        parts = ctx.split(grads[0])
        wanted = ctx.needs_input_grad[2:]
        return None, None, *(part if want else None for part, want in zip(parts, wanted, strict=True))


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same numbers at the same place."""
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.shape == b.shape


def links_of(model: nn.Module, config: ModelConfig) -> Iterator[Link]:
    """The links of a `HookedTransformer` to its native model."""
    modules = dict(model.named_modules())
    yield Link("embed.weight", whole, modules["embed"], ("W_E",))
    if config.position_embedded:
        yield Link("pos_embed.weight", whole, modules["pos_embed"], ("W_pos",))
    yield Link("unembed.weight", turned, modules["unembed"], ("W_U",))
    yield Link("unembed.bias", whole, modules["unembed"], ("b_U",))
    ours = {"embed.ln": "ln_embed", "ln_final": "ln_final"}
    after = "_post" if config.norm_place == "output" else ""
    for layer in range(config.n_layers):
        at = f"blocks.{layer}."
        ours |= {f"{at}{n}": f"{at}{n}{after}" for n in ("ln1", "ln2")}
        ours |= {f"{at}{n}_post": f"{at}{n}_post" for n in ("ln1", "ln2")}
        ours |= {f"{at}attn.{n}": f"{at}attn.{n}.norm" for n in ("q_norm", "k_norm")}
        yield from _attention_links(f"{at}attn", modules[f"{at}attn"], config)
        if config.mlp is not None:
            yield from _mlp_links(f"{at}mlp", modules[f"{at}mlp"])
    for name, native in ours.items():
        owner = modules.get(name)
        for mine, theirs in (("weight", "w"), ("bias", "b")):
            if isinstance(getattr(owner, theirs, None), nn.Parameter):
                assert owner is not None
                yield Link(f"{native}.{mine}", whole, owner, (theirs,))


def _attention_links(at: str, owner: nn.Module, config: ModelConfig) -> Iterator[Link]:
    grouped = "_" if hasattr(owner, "_W_K") else ""
    heads = HeadsFirst((config.n_heads, config.kv_heads, config.kv_heads), config.head_width)
    for kind, mine in (("W", "weight"), ("b", "bias")):
        names = (f"{kind}_Q", f"{grouped}{kind}_K", f"{grouped}{kind}_V")
        yield Link(f"{at}.qkv.{mine}", heads, owner, names)
    yield Link(f"{at}.out.weight", HeadsLast(config.head_width), owner, ("W_O",))
    yield Link(f"{at}.out.bias", whole, owner, ("b_O",))
    if config.sinks:
        yield Link(f"{at}.sinks", whole, owner, ("sinks",))


def _mlp_links(at: str, owner: nn.Module) -> Iterator[Link]:
    if hasattr(owner, "W_gate"):
        yield Link(f"{at}.into.weight", halves, owner, ("W_gate", "W_in"))
        yield Link(f"{at}.inner_bias", whole, owner, ("b_in",))
    else:
        yield Link(f"{at}.into.weight", turned, owner, ("W_in",))
        yield Link(f"{at}.into.bias", whole, owner, ("b_in",))
    yield Link(f"{at}.out.weight", turned, owner, ("W_out",))
    yield Link(f"{at}.out.bias", whole, owner, ("b_out",))
