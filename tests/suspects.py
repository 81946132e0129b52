"""Defective models and references for the tests of the numerical contract, and the names of its lines."""

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from interp.families.reference import HuggingFaceReference, exported
from interp.model import Transformer
from interp.verify import (
    Contract,
    ContractLine,
)
from tests.configs import build

LOGITS, GRADIENTS = "logits = Hugging Face", "gradients = autograd on Hugging Face"
DRIFT = "drift in bfloat16"
PARTS, VALUES, HEADS = "residual parts sum", "attn pattern @ v = z", "heads + bias = attn_out"
FUSED = "fused pass = observed pass"
LEFT, RIGHT = "padded on the left = unpadded", "padded on the right = unpadded"
PACKED, ROWS = "packed texts = each alone", "batch row = single row"
STEPS = "steps with a cache = one pass"
CLAIMS = (LOGITS, GRADIENTS, DRIFT, PARTS, VALUES, HEADS, FUSED, LEFT, RIGHT, PACKED, ROWS, STEPS)
NAN, INF = math.nan, math.inf
When = Callable[[Tensor, object, dict[str, object]], bool]
"""From the tokens, the tap and the other arguments of a pass to whether something happens in it."""


# --- models and references, true and defective ----------------------------------------------------------------------


@functools.cache
def truth() -> HuggingFaceReference:
    """Hugging Face's GPT-2 with the weights of `build("gpt2")`."""
    found = exported(build("gpt2"))
    assert isinstance(found, HuggingFaceReference)
    return found


def same(value: Tensor) -> Tensor:
    return value


def off(value: Tensor) -> Tensor:
    """Wrong by a thousandth of the largest value."""
    return value + 1e-3 * value.abs().max()


def with_one(bad: float) -> Callable[[Tensor], Tensor]:
    """The last number of a tensor replaced."""

    def change(value: Tensor) -> Tensor:
        new = value.clone()
        new.view(-1)[-1] = bad
        return new

    return change


def with_row(bad: float, row: int) -> Callable[[Tensor], Tensor]:
    """One row of a batch replaced."""

    def change(value: Tensor) -> Tensor:
        new = value.clone()
        new[row] = bad
        return new

    return change


def full_of(bad: float) -> Callable[[Tensor], Tensor]:
    """Every number replaced."""
    return lambda value: torch.full_like(value, bad)


@dataclass(frozen=True)
class Twisted:
    """The true reference with answers changed on their way."""

    logits_by: Callable[[Tensor], Tensor] = same
    gradient_by: Callable[[Tensor], Tensor] = same
    half_by: Callable[[Tensor], Tensor] = same
    name: str = "Hugging Face"
    rounded: bool = False

    def logits(self, tokens: Tensor) -> Tensor:
        return self.logits_by(truth().logits(tokens))

    def gradient(self, tokens: Tensor, probe: Tensor) -> Tensor:
        return self.gradient_by(truth().gradient(tokens, probe))

    def half_logits(self, tokens: Tensor) -> Tensor:
        return self.half_by(truth().half_logits(tokens))


@dataclass(frozen=True)
class Exact(Twisted):
    """A reference that loses nothing in bfloat16."""

    def half_logits(self, tokens: Tensor) -> Tensor:
        return truth().logits(tokens)


class Suspect(Transformer):
    """Gives `twist(logits)` in those passes that `when` picks; `left_out` are the arguments it ignores."""

    left_out: tuple[str, ...] = ()

    @staticmethod
    def when(tokens: Tensor, tap: object, options: dict[str, object]) -> bool:
        return False

    @staticmethod
    def twist(logits: Tensor) -> Tensor:
        return logits * (1 + 1e-7)

    def forward(self, tokens: Tensor, tap: object = None, **options: object) -> Tensor:  # type: ignore[override]
        given = {name: None if name in self.left_out else value for name, value in options.items()}
        logits = super().forward(tokens, tap, **given)  # type: ignore[arg-type]
        return self.twist(logits) if self.when(tokens, tap, options) else logits


def suspect(kind: type[Suspect], config: str = "gpt2") -> Suspect:
    """A model of one of the `CONFIGS` that behaves as `kind` does."""
    model = copy.deepcopy(build(config))
    model.__class__ = kind
    assert isinstance(model, Suspect)
    return model


def picking(when: When, twist: Callable[[Tensor], Tensor] = Suspect.twist) -> type[Suspect]:
    """The kind whose logits are off in the passes that `when` picks, by a part in ten million unless told otherwise."""
    return type("Picked", (Suspect,), {"when": staticmethod(when), "twist": staticmethod(twist)})


def red(found: Contract) -> set[str]:
    """The claims that do not hold."""
    return {line.claim for line in found.lines if line.passed is False}


def line(found: Contract, claim: str) -> ContractLine:
    return next(x for x in found.lines if x.claim == claim)


def unpadded(keep: object, column: int) -> bool:
    """Whether there is no padding in a column."""
    return not isinstance(keep, Tensor) or bool(keep[:, column].all())
