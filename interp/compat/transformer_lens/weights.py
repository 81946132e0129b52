"""Parameters in TransformerLens' layout that are views of the native model's fused ones, so that there is one memory.

Writing into a parameter in place writes into the native weight, and counts as writing there: a backward pass that needs
the numbers from before raises, as in plain torch. A parameter that was put elsewhere (`p.data = ...`, assigned anew,
tied) is copied before each pass. Gradients of the fused weights are split into those of the parameters.
"""

from collections.abc import Callable, Iterator, Mapping
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack

from interp.compat.transformer_lens.changes import Changes, note_writes
from interp.compat.transformer_lens.native import Elsewhere, native_path
from interp.model.attention import Attention
from interp.model.block import FeedForward
from interp.model.config import ModelConfig
from interp.model.norm import HeadNorm

Split = Callable[[Tensor], tuple[Tensor, ...]]


def whole(weight: Tensor) -> tuple[Tensor, ...]:
    """The weight itself."""
    return (weight,)


def turned(weight: Tensor) -> tuple[Tensor, ...]:
    """The transpose."""
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

    owner: nn.Module
    name: str
    view: Tensor

    def parameter(self) -> Tensor:
        """The parameter as it now is, or what `functional_call`, pruning or a parametrization put in its place."""
        found = self.owner._parameters.get(self.name)
        if found is None:
            found = getattr(self.owner, self.name)
        assert isinstance(found, Tensor)
        return found

    @property
    def computed(self) -> bool:
        """Whether it is no parameter, but computed from some at every pass."""
        return self.owner._parameters.get(self.name) is None


GRADIENT: Any = Tensor.grad
"""Where torch keeps the gradient of a tensor."""


class Flattened(Tensor):
    """A tensor that is moved into contiguous memory of its own when a view of it is asked for that needs that."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def flatten_memory(self) -> None:
        """Move the numbers into contiguous memory of their own."""
        self.data = self.data.contiguous()

    def view(self, *shape: Any) -> Tensor:
        """As torch's, of any shape: a tensor whose memory does not allow it gets another one first."""
        if self.is_contiguous():
            return super().view(*shape)
        try:
            return super().view(*shape)
        except RuntimeError:
            self.data.contiguous().view(*shape)  # refuses what no memory would allow
        self.flatten_memory()
        return super().view(*shape)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return deepcopy(self.detach(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As a tensor of torch's own class, which any program can read."""
        return self.detach().__reduce_ex__(protocol)


class Entry(Flattened):
    """A tensor of a `state_dict`: also what looks at its storage, as safetensors does first, sees memory of its own."""

    def untyped_storage(self) -> torch.UntypedStorage:
        """The storage of these numbers and of no others."""
        if not _is_alone(self):
            self.data = self.data.clone(memory_format=torch.contiguous_format)
        return super().untyped_storage()


def _is_alone(tensor: Tensor) -> bool:
    """Whether a tensor is contiguous, and all of its storage."""
    return tensor.is_contiguous() and Tensor.untyped_storage(tensor).nbytes() == tensor.nbytes


def as_entry(tensor: Tensor) -> Tensor:
    """The tensor of a `state_dict` itself, as an `Entry` on the host where it is a part of another's memory."""
    if type(tensor) is Tensor and tensor.is_cpu and not _is_alone(tensor):
        tensor.__class__ = Entry
    return tensor


class Viewed(nn.Parameter, Flattened):
    """A parameter that is a view of a native weight, and leaves it when a flat view of it is asked for.

    So do `parameters_to_vector` and others; it is then copied before each pass. Its gradients are laid out as it is,
    and become flat in the same way (`torch.optim.LBFGS`). Only of parameters on the host: on an accelerator an
    optimiser takes all parameters at once (`foreach`) if they are of torch's own class.
    """

    @property
    def grad(self) -> Tensor | None:
        """The gradient."""
        found: Tensor | None = GRADIENT.__get__(self)
        if type(found) is Tensor and not found.is_contiguous():
            found.__class__ = Flattened
        return found

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        """Keep another gradient."""
        GRADIENT.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        """Forget the gradient."""
        GRADIENT.__delete__(self)


class Shared:
    """The native model's weights as views, and back."""

    def __init__(self, native: nn.Module, links: list[Link], *, own: bool = True) -> None:
        """own: whether the parameters move into the native weights; else their values are copied at every pass."""
        self._native, self.links = native, links
        if own:
            self.share(fresh=True)
        else:
            self._look()

    @torch.no_grad()
    def share(self, *, fresh: bool = False) -> None:
        """Take the parameters' values over, and make the parameters views of the native weights.

        fresh: nothing has been computed with them, so that they may count writes together with the native weights.
        """
        self._look()
        for leaf in self._leaves:
            parameter = leaf.parameter()
            if leaf.computed or same_memory(leaf.view, parameter):
                continue
            leaf.view.copy_(parameter)
            kind = Viewed if leaf.view.is_cpu else nn.Parameter
            if fresh:
                torch.utils.swap_tensors(parameter, kind(leaf.view, parameter.requires_grad))
            else:
                parameter.data = leaf.view
                if isinstance(parameter, nn.Parameter):
                    parameter.__class__ = kind
        self._forget()

    def _look(self) -> None:
        """Find the parameters and the weights that they are parts of."""
        self._slots = [_slot(self._native, link.native) for link in self.links]
        self._weights = [held[name] for held, name in self._slots]
        self._groups: list[list[Leaf]] = []
        for link, weight in zip(self.links, self._weights, strict=True):
            assert weight is not None
            note_writes(link.owner, ["_parameters"])
            views = zip(link.split(weight.detach()), link.names, strict=True)
            self._groups.append([Leaf(link.owner, name, view) for view, name in views])
        self._within: dict[str, Shared] = {}
        self._forget()

    def within(self, path: str) -> "Shared":
        """The sharing of one part of the native model."""
        if path not in self._within:
            chosen = [i for i, link in enumerate(self.links) if link.native.startswith(f"{path}.")]
            part = self._within[path] = copy(self)
            for field in ("links", "_slots", "_weights", "_groups"):
                setattr(part, field, [getattr(self, field)[i] for i in chosen])
            part._forget()
        return self._within[path]

    def _forget(self) -> None:
        self._leaves = [leaf for group in self._groups for leaf in group]
        self._places = [leaf.view.data_ptr() for leaf in self._leaves]
        self._strides = [leaf.view.stride() for leaf in self._leaves if leaf.view.ndim > 1]
        self._seen = -1
        self._parameters: list[Tensor] = []
        self._matrices: list[Tensor] = []
        self._fused: tuple[list[bool], list[Tensor]] | None = None

    def __getstate__(self) -> Mapping[str, Any]:
        """Without what follows from the rest; `share` comes next."""
        return {"_native": self._native, "links": self.links}

    def _current(self) -> list[Tensor]:
        """The parameters as they now are."""
        if self._seen != Changes.count:
            odd = any(leaf.computed for leaf in self._leaves)
            self._seen, self._fused = -1 if odd else Changes.count, None
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

    def run(self, call: Callable[[], Tensor]) -> Tensor:
        """The output of a function of the native model with weights that are functions of the parameters."""
        transformed = peek_interpreter_stack() is not None
        if not transformed and not (torch.is_grad_enabled() and self.trained):
            self.update()
            return call()
        weights = [joined(link.split, link.leaves()) for link in self.links] if transformed else self.fused()
        before = [held[name] for held, name in self._slots]  # those of a pass that this one is in, in a hook
        try:
            for (held, name), weight in zip(self._slots, weights, strict=True):
                held[name] = weight  # type: ignore[assignment]
            return call()
        finally:
            for (held, name), own in zip(self._slots, before, strict=True):
                held[name] = own

    def fused(self) -> list[Tensor]:
        """The native weights as functions of the parameters: the same ones again while these are their views."""
        whole, wanted = self.whole, [*map(WANTED, self._current())]
        if self._fused is not None and whole and self._fused[0] == wanted:
            return self._fused[1]
        fresh = [_joined(link, own) for link, own in zip(self.links, self._weights, strict=True)]
        self._fused = (wanted, fresh) if whole else None
        return fresh


WANTED = attrgetter("requires_grad")


def joined(split: Split, parts: tuple[Tensor, ...]) -> Tensor:
    """The weight of these parts, by functions that `torch.func` can transform."""
    if isinstance(split, HeadsFirst):
        heads = torch.cat(parts)
        return rearrange(heads, "n d e -> (n e) d" if heads.ndim == 3 else "n e -> (n e)")
    if isinstance(split, HeadsLast):
        return rearrange(parts[0], "h e d -> d (h e)")
    return parts[0] if split is whole else torch.cat([part.mT for part in parts])


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


def links_of(root: nn.Module, at: str, native: nn.Module, config: ModelConfig) -> Iterator[Link]:
    """The links of a `HookedTransformer`, or of its part at `at`, to the native module of it."""
    top = native_path(at, config)
    for path, owner in root.named_modules(prefix=at):
        slot = native_path(path, config)
        inner = slot.removeprefix(top).removeprefix(".")
        part = found(native, inner)
        if part is None or isinstance(part, Elsewhere):
            continue
        if isinstance(part, HeadNorm):
            part, inner = part.norm, f"{inner}.norm"
        dot = f"{inner}." if inner else ""
        for link in _links(owner, part):
            yield replace(link, native=f"{dot}{link.native}")


def found(native: nn.Module, path: str) -> nn.Module | None:
    """A part of a module, or None where there is none."""
    try:
        return native.get_submodule(path)
    except AttributeError:
        return None


def _links(owner: nn.Module, part: nn.Module) -> Iterator[Link]:
    """The links of one module's own parameters to the native part in its place."""
    own = owner._parameters
    if isinstance(part, Attention) and "W_Q" in own:
        grouped = "_" if "_W_K" in own else ""
        heads = HeadsFirst(tuple(part.heads), part.d_head)
        for kind, mine in (("W", "weight"), ("b", "bias")):
            names = (f"{kind}_Q", f"{grouped}{kind}_K", f"{grouped}{kind}_V")
            yield Link(f"qkv.{mine}", heads, owner, names)
        yield Link("out.weight", HeadsLast(part.d_head), owner, ("W_O",))
        yield Link("out.bias", whole, owner, ("b_O",))
        if part.sinks is not None:
            yield Link("sinks", whole, owner, ("sinks",))
    elif isinstance(part, FeedForward) and "W_in" in own:
        gated = "W_gate" in own
        into = ("W_gate", "W_in") if gated else ("W_in",)
        yield Link("into.weight", halves if gated else turned, owner, into)
        yield Link("inner_bias" if gated else "into.bias", whole, owner, ("b_in",))
        yield Link("out.weight", turned, owner, ("W_out",))
        yield Link("out.bias", whole, owner, ("b_out",))
    else:
        kept = {
            "W_E": "weight",
            "W_pos": "weight",
            "W_U": "weight",
            "b_U": "bias",
            "w": "weight",
            "b": "bias",
        }
        for name in [name for name in own if name in kept]:
            yield Link(kept[name], turned if name == "W_U" else whole, owner, (name,))
