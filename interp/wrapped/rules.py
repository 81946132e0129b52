"""Backward rules in a wrapped network's own code: by the operators that it calls, whatever module they stand in.

Which tensors depend on what is differentiated is read off `requires_grad`. An operator that is not known here keeps its
derivative; whether the network is linear all the same is measured, not assumed (`interp.passes.rules.completeness`).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from interp.model.rules import Rule, halved, kept, secant
from interp.wrapped.seams import ModuleValue

PRODUCTS = frozenset({"mul", "multiply", "__mul__", "__rmul__"})
QUOTIENTS = frozenset({"div", "divide", "true_divide", "__truediv__", "__div__"})
INVERSES = frozenset({"rsqrt", "reciprocal"})
POWERS = frozenset({"pow", "__pow__", "square"})
ACTIVATIONS = frozenset(
    {
        "silu",
        "gelu",
        "relu",
        "relu6",
        "tanh",
        "elu",
        "leaky_relu",
        "hardswish",
        "mish",
        "softplus",
        "clamp",
        "clip",
    }
)
"""Elementwise functions, by their names in torch."""


class RuleMode(TorchFunctionMode):
    """Replaces the derivatives of operators in a forward pass by those of the four rules that make a model linear."""

    def __torch_function__(
        self,
        func: Callable[..., ModuleValue],
        types: Sequence[type],
        args: tuple[ModuleValue, ...] = (),
        kwargs: Mapping[str, ModuleValue] | None = None,
    ) -> ModuleValue:
        named, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            q, k, *rest = (*args, *(named.pop(n) for n in ("query", "key", "value")[len(args) :]))
            assert isinstance(q, Tensor) and isinstance(k, Tensor)
            return func(q.detach(), k.detach(), *rest, **named)
        x = args[0] if args else named.get("input")
        if not isinstance(x, Tensor):
            return func(*args, **named)
        by = (
            args[1] if len(args) > 1 else named.get("other", named.get("exponent"))
        )  # second factor, divisor, power
        if name in QUOTIENTS and isinstance(by, Tensor) and by.requires_grad:
            return func(x, by.detach(), *args[2:], **{n: v for n, v in named.items() if n != "other"})
        value = func(*args, **named)
        if not isinstance(value, Tensor) or not x.requires_grad:
            return value
        if name in ("softmax", "sigmoid", "__rtruediv__") or name in INVERSES:
            return value.detach()
        if name in PRODUCTS and isinstance(by, Tensor) and by.requires_grad:
            return halved(value)
        if name in POWERS and isinstance(by, int | float) and by < 0:
            return value.detach()
        if name in ACTIVATIONS or name in POWERS:
            f = partial(_value_of_first, func, args[1:], {n: v for n, v in named.items() if n != "input"})
            return secant(f, x, {"activation"}, value.detach())
        return _norm_with_constant_divisor(name, x, args[1:], named, value)


def _value_of_first(
    func: Callable[..., ModuleValue],
    arguments: Sequence[ModuleValue],
    named: Mapping[str, ModuleValue],
    x: Tensor,
) -> Tensor:
    value = func(x, *arguments, **named)
    assert isinstance(value, Tensor)
    return value


def _norm_with_constant_divisor(
    name: str, x: Tensor, arguments: Sequence[ModuleValue], named: Mapping[str, ModuleValue], value: Tensor
) -> Tensor:
    """The output of a fused norm, with its divisor a constant in the gradient; `value` for any other operator."""
    if name not in ("layer_norm", "rms_norm"):
        return value
    by_name = dict(zip(("normalized_shape", "weight", "bias", "eps"), arguments, strict=False)) | dict(named)
    if name == "rms_norm":
        by_name = dict(zip(("normalized_shape", "weight", "eps"), arguments, strict=False)) | dict(named)
    shape, weight, bias, eps = (by_name.get(n) for n in ("normalized_shape", "weight", "bias", "eps"))
    assert isinstance(shape, tuple | list)
    dims = tuple(range(-len(shape), 0))
    small = eps if isinstance(eps, float) else 1e-5 if name == "layer_norm" else torch.finfo(x.dtype).eps
    centred = x - x.mean(dims, keepdim=True) if name == "layer_norm" else x
    linear = centred * (centred.detach().square().mean(dims, keepdim=True) + small).rsqrt()
    linear = linear * weight if isinstance(weight, Tensor) else linear
    return kept(value, linear + bias if isinstance(bias, Tensor) else linear)


class SecantSeam:
    """The forward of an activation module under the activation rule."""

    def __init__(self, inner: Callable[[Tensor], Tensor]) -> None:
        self.inner = inner

    def __call__(self, x: Tensor) -> Tensor:
        """f(x) with the derivative f(x) / x."""
        return secant(self.inner, x, {"activation"}, self.inner(x.detach()))


def lay(rules: Collection[Rule], tree: nn.Module) -> None:
    """Put the activation rule into every elementwise module of a network."""
    if "activation" in rules:
        for module in tree.modules():
            if _is_elementwise(module):
                module.forward = SecantSeam(module.forward)


def _is_elementwise(module: nn.Module) -> bool:
    """Whether a module is elementwise: no parameters, no submodules, each output a function of one input number."""
    if any(True for _ in (*module.children(), *module.parameters(), *module.buffers())):
        return False
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(5))
    try:
        full, corner, flipped = module(x), module(x[1:3, 2:5].contiguous()), module(x.flip(0, 1))
    except Exception:
        return False
    if not isinstance(full, Tensor) or full.shape != x.shape:
        return False
    return torch.allclose(full[1:3, 2:5], corner) and torch.allclose(full.flip(0, 1), flipped)
