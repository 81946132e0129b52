"""Backward rules: which functions the gradient treats as constant or linear; the forward pass does not change.

A rule changes the derivative of one kind of non-linearity and nothing else: the value of every site is the same to the
bit. A network under rules is another one of the same parameters (`Transformer.ruled`); its modules ask `self.rules`.
"""

from collections.abc import Callable, Collection
from typing import Literal

import torch
from torch import Tensor

Rule = Literal["norm", "activation", "gate", "pattern", "half"]
"""norm: what a norm divides by is a constant (the LN-rule of Ali et al. 2022).
activation: f(x) is x times the constant f(x) / x (the identity rule of AttnLRP, Achtibat et al. 2024, equation 9); soft
caps of logits, and values that a model cuts at a limit, are too.
gate: each factor of a product of neurons gets half of the gradient (the uniform rule, equation 7); a router's weights,
and the sigmoids that multiply a shared expert or what attention writes, are constants.
pattern: attention patterns are constants, so that queries and keys get no gradient (the AH-rule of Ali et al. 2022).
half: in their place, q . k and pattern . v are products as under `gate`, and the softmax keeps its derivative.
"""

NO_RULES: frozenset[Rule] = frozenset()


def kept(value: Tensor, linear: Tensor) -> Tensor:
    """The value with the derivative of `linear`."""
    if not linear.requires_grad:
        return value
    return value.detach() + (linear - linear.detach())


def halved(value: Tensor) -> Tensor:
    """The value with half of its derivative."""
    return kept(value, 0.5 * value)


def secant(
    f: Callable[[Tensor], Tensor], x: Tensor, rules: Collection[str], value: Tensor | None = None
) -> Tensor:
    """f(x); under the activation rule its derivative is f(x) / x, at x = 0 that of a tiny x > 0.

    Args:
        value: f(x), where it is already known.
    """
    value = f(x) if value is None else value
    if "activation" not in rules or not x.requires_grad:
        return value
    with torch.no_grad():
        away = x.masked_fill(x == 0, torch.finfo(x.dtype).tiny ** 0.5)
        slope = f(away) / away
    return kept(value, x * slope)


def product(a: Tensor, b: Tensor, rules: Collection[str]) -> Tensor:
    """a b, under the gate rule with half of the derivative for each."""
    return halved(a * b) if "gate" in rules else a * b


def constant(value: Tensor, rules: Collection[str]) -> Tensor:
    """A factor (a router's weight, or the sigmoid of a gate) that is a constant under the gate rule."""
    return value.detach() if "gate" in rules else value


def constant_pattern(value: Tensor, rules: Collection[str]) -> Tensor:
    """An attention pattern, which is a constant under its rule."""
    return value.detach() if "pattern" in rules else value


def halves(value: Tensor, rules: Collection[str]) -> Tensor:
    """A product of queries and keys, or of a pattern and values, under the rule that halves its gradient."""
    return halved(value) if "half" in rules else value
