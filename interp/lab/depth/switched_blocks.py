"""Passes through blocks of a model with skip connections or MLPs switched off, once or repeatedly.

A switch is a list of edits; no weight is touched. Skip off: the sum of stream and sublayer is replaced by what the
sublayer added (its norm, bias and factor included), so nothing is subtracted and nothing rounds. MLP off: it adds 0.
In blocks that norm the sum (post-norm) the norm stays. Parallel blocks: the sum is attention plus MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from interp.core.boundary import public
from interp.data.batch import Batch
from interp.model.config import MLPS, ModelConfig
from interp.model.edits import Edit, Function, Scale, Set, Zero
from interp.model.parts import Part
from interp.model.tap import Read, Tap
from interp.model.transformer import Transformer

Switch = Literal["skip", "mlp"]
"""Parts of a block besides attention that can be switched off: the skip connections of all sublayers, or the MLPs."""


@dataclass(frozen=True)
class KeptValue:
    """A change that leaves a value and keeps it for the rest of the pass."""

    def at_site(self, site: str, memory: dict[str, object]) -> Function:
        """The function for this site in this pass."""

        def keep(value: Tensor) -> Tensor:
            memory[site] = value
            return value

        return keep


@dataclass(frozen=True)
class SumOf:
    """A change that puts the sum of values that the pass has kept in place of another."""

    sites: tuple[str, ...]
    """Where they were kept, earlier in the pass."""

    def at_site(self, site: str, memory: dict[str, object]) -> Function:
        """The function for this site in this pass."""

        def replaced(stream: Tensor) -> Tensor:
            held = [memory.pop(name) for name in self.sites]
            values = [value for value in held if isinstance(value, Tensor)]
            return torch.stack(values).sum(0) if len(values) > 1 else values[0]

        return replaced


def entering(layer: int) -> str:
    """The site of the stream that enters a block."""
    return f"blocks.{layer}.hook_resid_pre"


def leaving(config: ModelConfig, layer: int) -> str:
    """The site of the stream that leaves a block, its last norm included."""
    post = config.norms_sum
    return f"blocks.{layer}.hook_{'normalized_' if post else ''}resid_post"


@public()
def switched_off(config: ModelConfig, layer: int, off: Collection[Switch]) -> list[Edit]:
    """Edits that switch off the skips or the MLPs of one block, in any pass that begins before it.

    A model without MLPs is the same with them on and off.

    Args:
        config: the model's config.
        layer: number of the block.
        off: what is switched off, "skip" (every sublayer's) and "mlp".

    Returns:
        The edits.

    Raises:
        IndexError: a layer that does not exist.

    Example:
        >>> [edit.name for edit in switched_off(model.cfg, 1, ("mlp",))]
        ['L1.mlp']
        >>> without = [edit for layer in range(3) for edit in switched_off(model.cfg, layer, ("skip", "mlp"))]
        >>> interp.logit_lens(model.edited(without), prompt).sizes["depth"]
        4
    """
    if not 0 <= layer < config.n_layers:
        raise IndexError(f"layer must be in [0, {config.n_layers - 1}], got {layer}")
    parts = {name: Part.of(f"blocks.{layer}.hook_{name}") for name in config.sublayers}
    silent = [name for name in config.sublayers if "mlp" in off and name in MLPS]
    edits = [Edit(parts[name], Zero()) for name in silent]
    if "skip" not in off:
        return edits
    adding = [name for name in config.sublayers if name not in silent]
    for group in [adding] if config.parallel else [[name] for name in adding]:
        edits += [Edit(parts[name], KeptValue()) for name in group]
        total = f"blocks.{layer}.{config.stream_after(group[-1])}"
        edits.append(Edit(Part.of(total), SumOf(tuple(parts[name].site for name in group))))
    return edits


def shortened(config: ModelConfig, layer: int, step: float) -> list[Edit]:
    """The edits that multiply what every sublayer of a block adds: the block as a shorter step."""
    return [Edit(Part.of(f"blocks.{layer}.hook_{name}"), Scale(step)) for name in config.sublayers]


@torch.no_grad()
def pass_through(
    model: Transformer,
    batch: Batch,
    layers: range,
    *,
    stream: Float[Tensor, "b p d"],
    off: Collection[Switch] = (),
    via: Callable[[Tensor], Tensor] | None = None,
    step: float = 1.0,
) -> tuple[list[Tensor], Float[Tensor, "b p d"]]:
    """`via` of the stream after every one of these blocks, and the stream itself after the last.

    The model's own forward pass, with what is off switched off. A model's own edits hold, and come before the switches
    where they act on the same value, but where a sum is replaced: there they come after. An edit of the stream that
    enters the first of the blocks has been applied to `stream`.

    Args:
        stream: what enters the first of them, in place of what the model would have there.
        via: None: nothing is kept.
        step: a factor on what every sublayer adds, after all edits of it: the step of Euler's scheme.
    """
    first, config = layers[0], model.config
    reads = [] if via is None else [Read(leaving(config, layer), via) for layer in layers]
    last = Read(leaving(config, layers[-1]))
    switches = [edit for layer in layers for edit in switched_off(config, layer, off)]
    sums = [edit for edit in switches if isinstance(edit.change, SumOf)]
    switches += [] if step == 1 else [scaled for layer in layers for scaled in shortened(config, layer, step)]
    switched = model.unedited.edited([*sums, *model.edits, *(edit for edit in switches if edit not in sums)])
    tap = Tap([*reads, last], [Edit(entering(first), Set(stream))], answers_only=True)
    switched(
        stream if first else batch.tokens,
        tap,
        first,
        layers[-1] + 1,
        **batch.inputs,
    )
    found = [tap.values[read] for read in reads], tap.values[last]
    tap.close()
    return found


def one_text_of_two_tokens(batch: Batch, what: str) -> None:
    """ValueError for packed rows, and for rows with fewer than two tokens to compare."""
    batch.require_one_text(what)
    if int(batch.lengths.min()) < 2:
        raise ValueError(
            f"{what} compares tokens: rows of at least two are required, got one of a single token"
        )
