"""Less clean models of a circuit: in another basis, squeezed into fewer dimensions, or with noise heads.

In a compiled model every variable has dimensions of its own, so methods that only work in a privileged basis look
better on it than they are. Each function here gives another `Compiled` of the same program, whose directions are those
of the new stream. `Compiled.check` says what became of its answers.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import torch
from jaxtyping import Float
from torch import Tensor

from interp.core.boundary import public
from interp.core.kinds import NotNegative
from interp.lab.rasp.compiled import Compiled
from interp.model.parts import Part
from interp.model.tap import Read, Tap
from interp.model.transformer import Transformer
from interp.zoo.planted import generator_of

WRITERS = ("attn.out.weight", "mlp.out.weight")
"""Parameters with rows that are dimensions of the stream."""
ALONG = ("embed.weight", "attn.qkv.weight", "mlp.into.weight", "mlp.out.bias", "unembed.weight")
"""Parameters with the stream as their last axis."""
IDLE = 8
"""Dimensions that only noise heads write and read."""
MOST_HEADS = 1000
"""Noise heads of a layer: more are taken for a mistake."""


@public()
def rotated(compiled: Compiled, seed: int = 0) -> Compiled:
    """The model in a random orthogonal basis of its stream: every logit is the same up to rounding.

    Args:
        compiled: the compiled program.
        seed: seed of the basis.

    Returns:
        `Compiled` with the rotated model.

    Raises:
        ValueError: a model with norms.
    """
    return _through(compiled, _orthogonal(compiled.model.config.d_model, seed))


@public()
def superposed(compiled: Compiled, width: int, seed: int = 0) -> Compiled:
    """The model with a stream of only `width` dimensions, in which the directions of variables are not orthogonal.

    What was written is multiplied by E [d_model, width], the largest principal directions of the stream over the
    program's inputs in a random orthogonal basis, and what is read by its transpose: of all linear compressions the
    one that loses least of the stream. It is exact as long as `width` is no less than the stream's rank; below,
    `check()` says how many outputs are wrong.

    Args:
        compiled: the compiled program.
        width: dimensions of the new stream, 1 to d_model.
        seed: seed of the basis.

    Returns:
        `Compiled` with the compressed model; its directions are rows of E.

    Raises:
        ValueError: a width that is none of 1 to d_model, or a model with norms.
    """
    d = compiled.model.config.d_model
    if not 1 <= width <= d:
        raise ValueError(f"width must be in [1, {d}], the dimensions that there are, got {width}")
    write = _principal(compiled)[:, :width] @ _orthogonal(width, seed)
    return _through(compiled, write)


@public()
def with_noise_heads(
    compiled: Compiled, heads: int = 2, *, spill: NotNegative = 0.0, seed: int = 0
) -> Compiled:
    """The model with random heads added to every layer, which read the whole stream.

    They write numbers of about 1 to some dimensions that no part of the circuit reads, and of about `spill` to those
    of the variables: with 0 the answers are the same, with more `check()` says how far the margin fell.

    Args:
        compiled: the compiled program.
        heads: random heads per layer, 1 to 1000.
        spill: size of what they write to the variables' dimensions, >= 0.
        seed: seed of the weights.

    Returns:
        `Compiled` with the larger model.

    Raises:
        ValueError: no heads or more than 1000, a negative spill, or a model with norms.
    """
    if not 1 <= heads <= MOST_HEADS:
        raise ValueError(f"1 to {MOST_HEADS} heads are required, got {heads}")
    old, generator = compiled.model, generator_of(seed, 1)
    d, wide = old.config.d_model, old.config.d_model + IDLE
    widened = _through(compiled, torch.eye(d, wide))
    count = old.config.n_heads + heads
    config = replace(widened.model.config, n_heads=count, n_kv_heads=count)
    model = Transformer(config).requires_grad_(False).eval()
    for name, parameter in widened.model.named_parameters():
        if ".attn." not in name:
            model.get_parameter(name).copy_(parameter)
    for layer in range(config.n_layers):
        ours, theirs = model.block(layer).attn, widened.model.block(layer).attn
        for name in "qkv":
            (weight, bias), (given, shift) = ours.part(name), theirs.part(name)
            assert bias is not None and shift is not None
            weight.copy_(torch.randn(weight.shape, generator=generator))
            bias.zero_()
            weight.div_(wide**0.5 if name == "v" else 1)
            weight[: old.config.n_heads], bias[: old.config.n_heads] = given, shift
        out = torch.randn(ours.out.weight.shape, generator=generator) / (heads * config.head_width) ** 0.5
        out[:d] *= spill
        out[:, : theirs.out.weight.shape[1]] = theirs.out.weight
        ours.out.weight.copy_(out)
    return replace(widened, model=model)


def _orthogonal(d: int, seed: int) -> Float[Tensor, "d d"]:
    draw = torch.randn(d, d, generator=generator_of(seed, 1), dtype=torch.float64)
    return torch.linalg.qr(draw).Q


def _principal(compiled: Compiled) -> Float[Tensor, "d d"]:
    """The principal directions of the stream over all sites and inputs, the largest first, as columns."""
    found = []
    for tokens in compiled.inputs():
        tap = Tap(reads=[Read(Part.of(site).site) for site in compiled.stream])
        compiled.model(tokens, tap)
        found += [tap.values[read].flatten(0, -2).double() for read in tap.reads]
    return torch.linalg.svd(torch.cat(found), full_matrices=False).Vh.mT


def _through(compiled: Compiled, turn: Float[Tensor, "d d2"]) -> Compiled:
    """The model with its stream multiplied by `turn`, and by its transpose where it is read."""
    old = compiled.model
    if old.config.normed:
        raise ValueError(f"a model without norms is required, got one with {old.config.norm}")
    model = Transformer(replace(old.config, d_model=turn.shape[1])).requires_grad_(False).eval()
    for name, parameter in old.named_parameters():
        weight = parameter.double()
        if name.endswith(WRITERS):
            weight = turn.mT.double() @ weight
        elif name.endswith(ALONG):
            weight = weight @ turn.double()
        model.get_parameter(name).copy_(weight)
    directions = {name: (rows.double() @ turn.double()).float() for name, rows in compiled.directions.items()}
    return replace(compiled, model=model, directions=MappingProxyType(directions))
