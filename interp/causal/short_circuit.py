"""Attention short-circuit: every token attends to itself alone, in some blocks, and everything else stays.

Menta et al. 2025 (arXiv:2501.05078): the pattern after the softmax becomes the identity, so a block's attention adds
x_i W_V W_O (with its norms and biases) and moves nothing between positions. That is not the removal of attention, which
adds nothing. Done to the last blocks of large models it costs memorised continuations more than benchmarks.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from interp.causal.ablation_effects import alike, chosen_layers, effects
from interp.data.text import Prompts
from interp.model.edits import Edit, Set
from interp.passes.metrics import Metric, logit_difference
from interp.passes.observe import Subject
from interp.passes.variants import Variant

if TYPE_CHECKING:
    import xarray as xr

Blocks = Sequence[int | range]
"""Which blocks are short-circuited in each variant: one, or several at once."""
INTERVENTION = "attention pattern = identity"


def identity(pattern: Float[Tensor, "b h q k"]) -> Float[Tensor, "b h q k"]:
    """Every query attends to itself alone: 1 at its own column, 0 elsewhere.

    With a key/value cache the queries are the last of the keys, so a single query attends to the last key.

    Example:
        >>> identity(torch.rand(1, 1, 1, 3)).flatten().tolist()
        [0.0, 0.0, 1.0]
    """
    n_query, n_key = pattern.shape[-2:]
    own = torch.eye(n_key, dtype=pattern.dtype, device=pattern.device)[n_key - n_query :]
    return own.expand(pattern.shape)


def short_circuit_edits(layers: Sequence[int]) -> list[Edit]:
    """The intervention for `observe` or `generate`: the pattern of these blocks replaced by the identity.

    Attention to the memory of an encoder stays as it is.

    Example:
        >>> batch = model.to_batch("The cat sat")
        >>> interp.passes.generate.generate(model.transformer, batch, 3, edits=short_circuit_edits([2])).tokens.shape[0]
        1
    """
    return [Edit(f"blocks.{layer}.attn.hook_pattern", identity) for layer in layers]


def short_circuit(
    model: Subject,
    prompts: Prompts,
    blocks: Blocks | None = None,
    *,
    metric: Metric | None = None,
    prepend_bos: bool = True,
    batch_size: int = 32,
) -> "xr.Dataset":
    """How far the metric moves when attention is short-circuited: Dataset[block], in the metric's unit.

    Variables as in `ablate`: `effect`, metric(short-circuited) - metric(base), with its interval, `each`
    [prompt, block], `base` and `changed`. With all blocks short-circuited the logits at a position depend on its token
    and place alone; the first token of a causal model never changes.
    blocks: one entry per variant, a block or a range of blocks short-circuited together; None: each block alone. Labels
    are "2" and "2-3".
    metric: None is the logit difference of the answers that the prompts carry. One that compares compares with the
    whole model. For memorised continuations see `recall`.
    Caveats: a model with attention sinks loses what the sink took, at the first token too.
    Errors: IndexError for a block that does not exist; ValueError for an empty range, or a variant given twice.

    Example:
        >>> short_circuit(model, prompt, [0, range(1, 3)], metric=interp.kl_divergence()).block.values.tolist()
        ['0', '1-2']
    """
    metric = logit_difference() if metric is None else metric
    network = model.transformer
    batch = metric.posed(model.text.batch(prompts, prepend_bos=prepend_bos), model.text)
    n = network.config.n_layers
    groups = block_groups(range(n) if blocks is None else blocks, n)
    variants = block_variants(groups, network.config.n_heads, batch.tokens.shape[1])
    found = effects(network, batch, metric, alike(variants), batch_size=batch_size)
    return found.table("short_circuit", {"block": list(groups)}, metric, {"intervention": INTERVENTION})


def block_variants(groups: Mapping[str, list[int]], n_heads: int, columns: int) -> list[Variant]:
    """One variant per group of blocks."""
    own = Set(identity(torch.empty(()).expand(1, n_heads, columns, columns)))
    return [
        Variant([Edit(f"blocks.{layer}.attn.hook_pattern", own) for layer in layers])
        for layers in groups.values()
    ]


def block_groups(blocks: Blocks, n_layers: int) -> dict[str, list[int]]:
    """Label -> layers of every entry. IndexError for a block that does not exist, ValueError for none or one twice."""
    found: dict[str, list[int]] = {}
    for entry in blocks:
        layers = chosen_layers([entry] if isinstance(entry, int) else list(entry), n_layers)
        steps = range(min(layers), max(layers) + 1)
        ends = f"{steps[0]}-{steps[-1]}" if len(steps) > 1 else str(steps[0])
        label = ends if len(steps) == len(layers) else "+".join(map(str, layers))
        if label in found:
            raise ValueError(f"every variant is required once, got {label} twice")
        found[label] = layers
    if not found:
        raise ValueError("at least one block is required, got none")
    return found
