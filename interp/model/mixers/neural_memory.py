"""A network that learns by gradient descent while it is read from: the memory of Titans, one for each head.

Behrouz et al. 2024, "Titans: Learning to Memorize at Test Time", equations 9 to 17. Nothing here knows of attention.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True)
class Held:
    """What a memory keeps between passes; a network is its `l` matrices, silu between them, no bias."""

    base: Float[Tensor, "r l h e f"]
    """The network at the start of the present chunk, where gradients are taken."""
    now: Float[Tensor, "r l h e f"]
    """The network itself, M."""
    speed: Float[Tensor, "r l h e f"]
    """The momentum, S."""


@dataclass(frozen=True)
class Lesson:
    """Columns that a memory learns in order: value `v` under key `k`; each asks `q` once its own step is taken."""

    q: Float[Tensor, "r h t e"]
    k: Float[Tensor, "r h t e"]
    v: Float[Tensor, "r h t e"]
    momentum: Float[Tensor, "r h t"]
    """eta, the share of the last step that is taken again."""
    step: Float[Tensor, "r h t"]
    """theta, the factor on the gradient."""
    forget: Float[Tensor, "r h t"]
    """alpha, the share of the network that is lost."""
    present: Bool[Tensor, "r t"]
    """Columns that are not change nothing."""
    surprise: Float[Tensor, "r h t"] | None = None
    """The norms that gradients are given; None = their own."""

    def columns(self, start: int, stop: int) -> "Lesson":
        """Some of the columns."""
        vectors = {name: getattr(self, name)[:, :, start:stop] for name in ("q", "k", "v", *_RATES)}
        surprise = None if self.surprise is None else self.surprise[:, :, start:stop]
        return replace(self, **vectors, present=self.present[:, start:stop], surprise=surprise)


@dataclass(frozen=True)
class Learned:
    """What comes of a lesson."""

    reading: Float[Tensor, "r h t e"]
    surprise: Float[Tensor, "r h t"]
    """Norm of each column's gradient, all matrices together."""
    after: Held


_RATES = ("momentum", "step", "forget")


def read(network: Float[Tensor, "r l h e f"], q: Float[Tensor, "r h t e"]) -> Float[Tensor, "r h t e"]:
    """M(q) for a network that is not changed."""
    return _through(list(network.unbind(1)), q)[1][-1]


def learn(lesson: Lesson, held: Held, chunk: int, span: tuple[int, int] | None = None) -> Learned:
    """M_t(q_t) of every column, where M_t is the network after the column's own step.

        g_t = gradient of |M(k_t) - v_t|^2 at M = base           equation 12; base: M at the start of the chunk, 16
        S_t = eta_t S_{t-1} - theta_t g_t                        equation 14
        M_t = (1 - alpha_t) M_{t-1} + S_t                        equation 13

    With `chunk` 1 the gradient is that of M_{t-1}, as in equation 10. Chunks begin at multiples of `chunk`; the
    columns of one are computed at once and exactly, whatever the depth: given the gradients, which are outer
    products, both recurrences are linear. span: the columns outside it are known to be absent.
    """
    n = lesson.present.shape[1]
    start, stop = (0, n) if span is None else (span[0] // chunk * chunk, min(n, -(-span[1] // chunk) * chunk))
    readings, surprises = [], []
    for first in range(start, stop, chunk):
        found = _chunk(lesson.columns(first, min(first + chunk, stop)), held)
        readings.append(found.reading)
        surprises.append(found.surprise)
        held = found.after
    reading = F.pad(torch.cat(readings, 2), (0, 0, start, n - stop))
    return Learned(reading, F.pad(torch.cat(surprises, 2), (start, n - stop)), held)


def _chunk(lesson: Lesson, held: Held) -> Learned:
    """`learn` within one chunk; one that begins with an absent column goes on from where an earlier pass left it."""
    begins = lesson.present[:, 0, None, None, None, None]
    base = torch.where(begins, held.now, held.base)
    layers = list(base.unbind(1))
    inputs, outputs = _through(layers, lesson.k)
    errors = _errors(layers, outputs, lesson.v)
    surprise = (
        sum(
            (x.square().sum(-1) * error.square().sum(-1) for x, error in zip(inputs, errors, strict=True)),
            torch.zeros_like(lesson.step),
        )
        .clamp_min(torch.finfo(lesson.step.dtype).tiny)
        .sqrt()
    )
    factor = lesson.step.masked_fill(~lesson.present[:, None], 0)
    if lesson.surprise is not None:
        factor = factor * lesson.surprise / surprise
    kept, since, steps = _shares(lesson)
    moved = [-factor[..., None] * error for error in errors]
    x = lesson.q
    now, speed, after, fast = held.now.unbind(1), held.speed.unbind(1), [], []
    for layer, (seen, move) in enumerate(zip(inputs, moved, strict=True)):
        x = F.silu(x) if layer else x
        x = (
            kept * (x @ now[layer])
            + since[..., :1] * (x @ speed[layer])
            + (since[..., 1:] * (x @ seen.mT)) @ move
        )
        last, momentum = since[..., -1, :, None], steps[..., -1, :, None]
        after.append(
            kept[..., -1:, :] * now[layer]
            + last[..., :1, :] * speed[layer]
            + seen.mT @ (last[..., 1:, :] * move)
        )
        fast.append(momentum[..., :1, :] * speed[layer] + seen.mT @ (momentum[..., 1:, :] * move))
    return Learned(x, surprise, Held(base, torch.stack(after, 1), torch.stack(fast, 1)))


def _shares(lesson: Lesson) -> tuple[Tensor, Tensor, Tensor]:
    """How much of the chunk's start is left in M_t `[r h t 1]`; how much of S before (0) and of each step is in M_t,
    and in S_t `[r h t 1+t]`.
    """
    here = lesson.present[:, None]
    lost = _products((1 - lesson.forget).masked_fill(~here, 1))
    again = _products(lesson.momentum.masked_fill(~here, 1))
    return lost[..., :1], lost[..., 1:] @ (again * here[..., None]), again


def _products(x: Float[Tensor, "r h t"]) -> Float[Tensor, "r h t s"]:
    """x_{s+1} ... x_t for s = 0 to t, 0 beyond; exact also where a factor is 0."""
    n = x.shape[-1]
    seen = torch.ones(n, n + 1, dtype=torch.bool, device=x.device)
    factors = x[..., None].masked_fill(seen.triu(1), 1)
    return factors.cumprod(-2) * seen.tril(1)


def _through(layers: list[Tensor], x: Float[Tensor, "r h t e"]) -> tuple[list[Tensor], list[Tensor]]:
    """What enters each matrix, and what leaves it."""
    inputs, outputs = [x], [x @ layers[0]]
    for layer in layers[1:]:
        inputs.append(F.silu(outputs[-1]))
        outputs.append(inputs[-1] @ layer)
    return inputs, outputs


def _errors(layers: list[Tensor], outputs: list[Tensor], v: Float[Tensor, "r h t e"]) -> list[Tensor]:
    """The gradient of |M(k) - v|^2 at the output of each matrix: the gradient of a matrix is inputs^T errors."""
    errors = [2 * (outputs[-1] - v)]
    for layer, output in zip(layers[:0:-1], outputs[-2::-1], strict=True):
        s = output.sigmoid()
        errors.append((errors[-1] @ layer.mT) * s * (1 + output * (1 - s)))
    return errors[::-1]
