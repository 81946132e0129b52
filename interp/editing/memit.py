"""MEMIT: many associations at once, stored by small changes of several MLPs that add up at the last of them.

Meng et al. 2022, "Mass-Editing Memory in a Transformer" (arXiv:2210.07229), section 4 and algorithm 1. For every fact,
gradient descent finds a state z of the stream after the last edited layer L that gives the answer. Then each layer, in
ascending order, adds an equal share of what the stream h still lacks: with keys K `[fact m]` at the subjects and
R = (z - h) / (number of layers left), W' = W + (weight C + K^T K)^-1 K^T R: least squares over these and the old keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from interp.core.axes import shape_text
from interp.core.boundary import public
from interp.core.factored import FactoredMatrix
from interp.core.kinds import Positive
from interp.data.batch import Batch
from interp.editing.edit_scores import EditCase
from interp.editing.editors import edit_batch
from interp.editing.rome import (
    DeltaSearch,
    Keys,
    Rome,
    at_mention,
    check_reaches_logits,
    find_delta,
    mention_mask,
)
from interp.editing.weight_edit import WeightEdit, changed, own_matrix_place
from interp.model.tap import Read
from interp.model.transformer import Transformer
from interp.passes.observe import Model, Subject, as_model, observe
from interp.weights.matrices import ends

SEARCH = Rome(reach=0.75)
"""The default search for the states, of the released code for GPT-2 XL."""
WEIGHT = 15_000.0
"""Weight of the old keys against one fact; the released code's for thousands of facts."""


@public()
def memit_edit(
    model: Model,
    facts: Sequence[EditCase],
    keys: Sequence[Keys],
    *,
    weight: Positive = WEIGHT,
    search: Rome | None = None,
    prepend_bos: bool | None = None,
) -> list[WeightEdit]:
    """MEMIT: changes of several MLPs' W_out that make many prompts give their answers, to be applied together.

    For each fact a delta is found as in `rome_edit` (there at the MLP's output; here |v| is the length of the stream
    after the last edited layer), so that z = h + delta. Then for each layer, in the model with the layers below already
    edited, W' = W + (weight C + K^T K)^-1 K^T R, R = (z - h) / layers left; C with the search's ridge. K and h are
    means over the prefixes. One layer, one fact and weight -> 0 is ROME.

    Args:
        facts: cases of `edit_table`; their checks are not used.
        keys: the C of every layer that is changed (`key_moment`), ascending; the stream is steered after the last of
            them.
        weight: how many tokens of C's text the old keys count as, against one token per fact. 15 000 is meant for
            thousands of facts, and with few of them changes next to nothing.
        search: how the states are sought; None: as `Rome(reach=0.75)`.
        prepend_bos: whether texts begin with BOS; None: as the model does by default.

    Returns:
        One `WeightEdit` per layer, ascending.

    Raises:
        ValueError: as `rome_edit`; no facts, layers that do not ascend, weight <= 0, and post-norm blocks.

    Source:
        Meng et al. 2022, "Mass-Editing Memory in a Transformer" (arXiv:2210.07229), section 4 and algorithm 1.

    See Also:
        `rome_edit`: one fact in one layer.

    Example:
        >>> keys = [interp.editing.key_moment(model, [prompt, "The cat sat on the mat"], layer=i) for i in (0, 1)]
        >>> facts = [EditCase(prompt, " cat", "John", {})]
        >>> edits = memit_edit(model, facts, keys, weight=0.1, search=Rome(ridge=0.1))
        >>> [edit.name for edit in edits]
        ['blocks.0.mlp.W_out', 'blocks.1.mlp.W_out']
    """
    editable, search = as_model(model), search or SEARCH
    network = editable.transformer
    names = _matrix_names(network, facts, keys, weight)
    last = keys[-1].layer
    factor = ends(network.config, names[-1]).factor
    fact_batches = [FactBatch.of(editable, fact, last, search, prepend_bos=prepend_bos) for fact in facts]
    before = torch.stack([fact.at(network, f"blocks.{last}.hook_resid_post", last) for fact in fact_batches])
    target = before + factor * torch.stack(
        [
            find_delta(
                network, fact.batch, fact.where, DeltaSearch(last, fact.prompts, h.norm() / factor, search)
            )
            for fact, h in zip(fact_batches, before, strict=True)
        ]
    ).to(before)
    edits: list[WeightEdit] = []
    for i, (name, layer_keys) in enumerate(zip(names, keys, strict=True)):
        changes = {edit.name: edit.dense for edit in edits}
        edited = network.with_parameters(changed(network, changes)) if edits else network
        key = torch.stack(
            [
                fact.at(edited, f"blocks.{layer_keys.layer}.mlp.hook_post", layer_keys.layer)
                for fact in fact_batches
            ]
        )
        state = torch.stack(
            [fact.at(edited, f"blocks.{last}.hook_resid_post", last) for fact in fact_batches]
        )
        residual = (target - state) / ((len(keys) - i) * ends(network.config, name).factor)
        edits.append(
            WeightEdit(name, FactoredMatrix(least_squares(layer_keys, key, weight, search.ridge), residual))
        )
    return edits


def least_squares(keys: Keys, key: Float[Tensor, "n m"], weight: float, ridge: float) -> Float[Tensor, "m n"]:
    """(weight C + K^T K)^-1 K^T, C with its ridge; ValueError where that is not positive definite.

    As C^-1 K^T (weight 1 + K C^-1 K^T)^-1, which stays exact however small the weight.
    """
    solved = torch.stack([keys.solved(row, ridge) for row in key], 1).to(key)
    inner = weight * torch.eye(len(key)).to(key) + key @ solved
    return torch.linalg.solve(inner.mT, solved.mT).mT


@dataclass(frozen=True, eq=False)
class FactBatch:
    """A fact as a batch: its prompt after every prefix, then the essence prompt, and where the subject ends in each."""

    batch: Batch
    where: Bool[Tensor, "b p"]
    prompts: int

    @classmethod
    def of(
        cls, model: Subject, fact: EditCase, layer: int, search: Rome, *, prepend_bos: bool | None
    ) -> FactBatch:
        """The batch of a fact that is to be stored in layers up to this one.

        Raises:
            ValueError: as `rome_edit`.
        """
        texts = [f"{prefix}{fact.prompt}" for prefix in search.prefixes]
        extra = [] if search.essence is None else [search.essence.format(subject=fact.subject)]
        batch = edit_batch(model, texts, fact.answer, others=extra, prepend_bos=prepend_bos)
        where = mention_mask(model.text, batch, fact.subject)
        check_reaches_logits(model.transformer, batch, where, layer)
        return cls(batch, where, len(texts))

    @torch.no_grad()
    def at(self, model: Transformer, site: str, layer: int) -> Float[Tensor, "_"]:
        """The activation of a site at the subject's last token, mean over the prompts; float64."""
        read = Read(site)
        values = observe(model, self.batch, [read], stop=layer + 1, answers_only=True).trace[read]
        return at_mention(values, self.where)[: self.prompts].double().mean(0)


def _matrix_names(
    model: Transformer, facts: Sequence[EditCase], keys: Sequence[Keys], weight: float
) -> list[str]:
    """The names of the matrices that are changed, `W_out` of each layer of the keys.

    Raises:
        ValueError: as `memit_edit`.
    """
    layers = [layer_keys.layer for layer_keys in keys]
    if not facts or not layers or layers != sorted(set(layers)):
        raise ValueError(
            "at least one fact, keys of ascending layers are required, got "
            f"{len(facts)} facts, layers {layers}"
        )
    if model.config.norms_sum:
        raise ValueError("MEMIT adds to the stream what is missing of it: post-norm blocks norm that sum")
    names = [f"blocks.{layer}.mlp.W_out" for layer in layers]
    for name, layer_keys in zip(names, keys, strict=True):
        rows = own_matrix_place(model, name).in_(model).shape[0]
        if len(layer_keys.moment) != rows:
            raise ValueError(
                f"keys of {rows} neurons are required, got C of {shape_text(layer_keys.moment.shape)}"
            )
        ends(model.config, name)
    return names
