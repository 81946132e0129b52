"""Copies of models in which a part writes nothing, by their weights: what an edited model is held against."""

import copy
import functools

from interp import HookedTransformer
from interp.model.parts import Part
from tests.configs import build


@functools.cache
def without(name: str, part: str, values: bool = False) -> HookedTransformer:
    """A model of the table whose head (`L0H1`), attention or MLP adds nothing: its output weights and bias are 0.

    values: of a head, its values instead, so that it moves nothing either.
    """
    network, which = copy.deepcopy(build(name)), Part.of(part)
    assert which.layer is not None
    block = network.block(which.layer)
    if which.kind == "head":
        assert which.index is not None
        if values:
            for parameter in block.attn.part("v"):
                if parameter is not None:
                    parameter[which.index] = 0
        else:
            width = network.config.head_width
            block.attn.out.weight[:, which.index * width : (which.index + 1) * width] = 0
        return HookedTransformer(network)
    out = {"attn": block.attn, "mlp": block.mlp}[which.kind].out  # type: ignore[union-attr]
    for parameter in out.parameters():
        parameter.zero_()
    return HookedTransformer(network)
