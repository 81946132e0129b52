"""Attention short-circuit: in some layers every token attends to itself only, and everything else stays.

Menta et al. 2025 (arXiv:2501.05078): the pattern after the softmax becomes the identity, so a layer's attention adds
x_i W_V W_O (with its norms and biases) and moves nothing between positions. That is not the removal of attention,
which adds nothing. Done to the last layers of large models it costs memorised continuations more than benchmarks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from interp.causal.ablation import chosen_layers
from interp.causal.effects import EffectTable, MeasuredEffects, causal, swept
from interp.core.boundary import public
from interp.data.batch import Batch
from interp.model.edits import Edit, Set
from interp.model.parts import Part
from interp.model.transformer import Transformer
from interp.passes.metrics import LogitFunction, Metric, as_metric
from interp.passes.needs import Steps
from interp.passes.observe import Subject
from interp.passes.question import ByRow, Question
from interp.passes.variants import Variant
from interp.runs.functions import of_data

if TYPE_CHECKING:
    pass

Layers = Sequence[int | Sequence[int]]
"""The layers that each variant short-circuits: one, or several at once, such as a range."""
INTERVENTION = "attention pattern = identity"


@public()
def identity(pattern: Float[Tensor, "b h q k"]) -> Float[Tensor, "b h q k"]:
    """The attention pattern in which every query attends to itself only: 1 at its own column, 0 elsewhere.

    As a change it short-circuits a layer in any pass; attention to the memory of an encoder stays as it is. With a
    key/value cache the queries are the last of the keys, so a single query attends to the last key.

    Args:
        pattern: attention probabilities; only shape, dtype and device count.

    Returns:
        [b, h, q, k], a view that shares memory between rows and heads.

    Example:
        >>> identity(torch.rand(1, 1, 1, 3)).flatten().tolist()
        [0.0, 0.0, 1.0]
        >>> model.generate("The cat sat", 3, edits=[interp.Edit("L2.pattern", identity)]).tokens.shape[0]
        1
    """
    n_query, n_key = pattern.shape[-2:]
    diagonal = torch.eye(n_key, dtype=pattern.dtype, device=pattern.device)[n_key - n_query :]
    return diagonal.expand(pattern.shape)


@dataclass(frozen=True, eq=False)
class ShortCircuit(Question):
    """Effect of short-circuiting attention: how far the metric moves when every token attends to itself only.

    The pattern after the softmax becomes the identity, so a layer's attention adds x_i W_V W_O (with its norms and
    biases) and moves nothing between positions. With all layers short-circuited the logits at a position depend on its
    token and place alone; the first token of a causal model never changes. In a pass of your own, a layer is
    short-circuited by `Edit("L2.pattern", identity)`.

    Args:
        data: prompts, token ids, a batch, files or a stream of any size.
        layers: one entry per variant, a layer or a range of layers short-circuited together; None: each layer alone.
        metric: a `Metric`, or a function of the logits [b, v] at the last token; None is the logit difference of the
            data's answers. A metric that compares, such as the KL divergence, compares with the whole model.
        each: False keeps no values of single prompts, which data of any size requires.

    Returns:
        Dataset over `part`, the attention of the layers of each variant (`L2.attn`, or `L2.attn+L3.attn` together),
        with the variables of `ablate`, in the metric's unit:

        - `value`: metric(short-circuited) - metric(base), mean over prompts, with the ends `low` and `high` of its 95
          % interval and the number of prompts `n`.
        - `each` [prompt, part]: effect in every prompt. `base` [prompt]: metric of the whole model.
        - `changed`: whether a pattern changes in any prompt and can reach the metric.

    Raises:
        IndexError: a layer that does not exist.
        ValueError: an empty range, or a variant given twice.

    Caveats:
        A model with attention sinks loses what the sink took, at the first token too.

    Source:
        Menta et al. 2025, arXiv:2501.05078.

    See Also:
        `recall`: the same interventions on memorised continuations. `ablate`: attention that adds nothing at all.

    Example:
        >>> short_circuit(model, prompt, [0, range(1, 3)], metric=interp.metrics.kl_divergence()).part.values.tolist()
        ['L0.attn', 'L1.attn+L2.attn']
    """

    layers: Layers | None = None
    _: KW_ONLY
    metric: Metric | LogitFunction | None = None
    each: bool = True

    def bind(self, model: Subject) -> ByRow:
        """One planned sweep per batch."""
        groups, metric = (
            layer_groups(self.layers, model.transformer.config.n_layers),
            as_metric(self.metric, model.text),
        )
        attrs, coords = {"intervention": INTERVENTION}, {"part": list(groups)}
        table = EffectTable(self.name, ("part",), coords, metric, model.text, attrs)
        return causal(model, table, partial(_effects, groups=groups, metric=metric), each=self.each)


def _effects(
    network: Transformer, batch: Batch, groups: Mapping[str, list[int]], metric: Metric
) -> Steps[MeasuredEffects]:
    columns = batch.tokens.shape[1]
    return (yield from swept(batch, metric, variants(groups, network.config.n_heads, columns)))


short_circuit = of_data(ShortCircuit)


def variants(groups: Mapping[str, list[int]], n_heads: int, columns: int) -> list[Variant]:
    """One variant per group of layers, whose patterns become the identity.

    Args:
        groups: the layers of each variant, by label.
        n_heads: heads of a layer.
        columns: width of the batch, in tokens.

    Returns:
        The variants, labelled, in the order of the groups.
    """
    attend_self = Set(identity(torch.empty(()).expand(1, n_heads, columns, columns)))
    return [
        Variant([Edit(f"blocks.{layer}.attn.hook_pattern", attend_self) for layer in layers], label)
        for label, layers in groups.items()
    ]


def layer_groups(entries: Layers | None, n_layers: int) -> dict[str, list[int]]:
    """The layers of every variant by label, such as `L1.attn+L2.attn`.

    Args:
        entries: layers, or ranges of layers that go together; None: each layer alone.
        n_layers: layers of the model.

    Returns:
        Label -> layers, ascending.

    Raises:
        IndexError: a layer that does not exist.
        ValueError: none, or a variant given twice.
    """
    groups: dict[str, list[int]] = {}
    for entry in range(n_layers) if entries is None else entries:
        layers = sorted(chosen_layers([entry] if isinstance(entry, int) else list(entry), n_layers))
        label = "+".join(str(Part("attn", layer)) for layer in layers)
        if label in groups:
            raise ValueError(f"every variant is required once, got {label} twice")
        groups[label] = layers
    if not groups:
        raise ValueError("at least one layer is required, got none")
    return groups
