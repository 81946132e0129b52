"""The blocks of a model with skip connections or MLPs switched off, alone or applied again and again.

The switches are edits at sites; no weight is touched. Skip off: the sum of stream and sublayer is replaced by what the
sublayer added (its norm, bias and factor included), so nothing is subtracted and nothing rounds. MLP off: it adds 0.
In blocks that norm the sum (post-norm) the norm stays. Parallel blocks: the sum is attention plus MLP.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from interp.data.batch import Batch
from interp.model.config import MLPS, ModelConfig
from interp.model.tap import Edit, Read, Tap
from interp.model.transformer import Transformer


@dataclass(frozen=True)
class Switches:
    """Which parts of every block are on, besides attention."""

    skip: bool = True
    """The skip connections of all sublayers."""
    mlp: bool = True


def entering(layer: int) -> str:
    """The site of the stream that enters a block."""
    return f"blocks.{layer}.hook_resid_pre"


def leaving(config: ModelConfig, layer: int) -> str:
    """The site of the stream that leaves a block, its last norm included."""
    post = config.norm_place == "post"
    return f"blocks.{layer}.hook_{'normalized_' if post else ''}resid_post"


def switch_edits(config: ModelConfig, layer: int, on: Switches) -> list[Edit]:
    """The edits that leave only these parts of a block; for a single pass, as they hold what it computed.

    A model without MLPs is the same with them on and off.
    """
    prefix = f"blocks.{layer}.hook_"
    edits, off = [], [name for name in config.sublayers if not on.mlp and name in MLPS]
    edits += [Edit(prefix + name, torch.zeros_like) for name in off]
    if on.skip:
        return edits
    adding = [name for name in config.sublayers if name not in off]
    groups = [adding] if config.parallel else [[name] for name in adding]
    for group in groups:
        held: list[Tensor] = []
        edits += [Edit(prefix + name, _keeping(held)) for name in group]
        edits.append(Edit(prefix + _sum_after(config, group[-1]), _sum_of(held)))
    return edits


@torch.no_grad()
def pass_through(
    model: Transformer,
    batch: Batch,
    layers: range,
    *,
    stream: Float[Tensor, "b p d"],
    on: Switches,
    via: Callable[[Tensor], Tensor],
) -> tuple[list[Tensor], Float[Tensor, "b p d"]]:
    """`via` of the stream after every one of these blocks, and the stream itself after the last.

    stream: what enters the first of them, in place of what the model would have there.
    """
    first, config = layers[0], model.config
    reads = [Read(leaving(config, layer), via) for layer in layers]
    last = Read(leaving(config, layers[-1]))
    edits = [edit for layer in layers for edit in switch_edits(config, layer, on)]
    begin = Edit(entering(first), lambda old: stream.to(old))
    tap = Tap([*reads, last], [begin, *edits], answers_only=True)
    model(
        stream if first else batch.tokens, tap, first, layers[-1] + 1,
        keep=batch.keep, types=batch.types if first == 0 else None, memory=batch.memory,
    )  # fmt: skip
    found = [tap.values[read] for read in reads], tap.values[last]
    tap.close()
    return found


def one_text_of_two_tokens(batch: Batch, what: str) -> None:
    """ValueError for packed rows, and for rows with fewer than two tokens to compare."""
    if batch.documents is not None:
        raise ValueError(f"{what} requires one text per row, got a packed batch")
    if int(batch.lengths.min()) < 2:
        raise ValueError(
            f"{what} compares tokens: rows of at least two are required, got one of a single token"
        )


def _sum_after(config: ModelConfig, sublayer: str) -> str:
    """The site of the stream after a sublayer was added, before any norm of the sum."""
    if sublayer == config.sublayers[-1] or config.parallel:
        return "resid_post"
    sums = {"mlp_before_out": "resid_pre_attn", "attn_out": "resid_mid", "cross_attn_out": "resid_mid_cross"}
    return sums[sublayer]


def _keeping(held: list[Tensor]) -> Callable[[Tensor], Tensor]:
    def keep(out: Tensor) -> Tensor:
        held.append(out)
        return out

    return keep


def _sum_of(held: list[Tensor]) -> Callable[[Tensor], Tensor]:
    def replaced(stream: Tensor) -> Tensor:
        total = torch.stack(held).sum(0) if len(held) > 1 else held[0]
        held.clear()
        return total

    return replaced
