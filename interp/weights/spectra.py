"""The singular values of every weight matrix, and of every head's OV and QK circuits.

A spectrum says how many directions a matrix uses, and how evenly. It does not say which of these directions carry a
signal in a pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, ClassVar

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from interp.core.factored import FactoredMatrix
from interp.core.results import labelled
from interp.core.stats import upcast
from interp.core.transfers import to_host
from interp.model.experts import Experts
from interp.model.parts import Part
from interp.model.transformer import Transformer
from interp.model.weights import LayerWeights, Weights
from interp.passes.observe import Subject
from interp.passes.question import Question, WithoutData
from interp.runs.functions import of_weights

if TYPE_CHECKING:
    import xarray as xr

AT_ONCE = 2**24
"""Numbers of the matrices that are decomposed together: 64 MiB in float32, and as much again in the decomposition."""


@dataclass(frozen=True, eq=False)
class _NamedMatrix:
    """A matrix, or a stack of them (heads, experts), with its kind and place in the model."""

    kind: str
    matrix: Float[Tensor, "*n i o"] | FactoredMatrix
    layer: int | None = None
    inside: str = ""
    """The sublayer that has the matrix (`attn`), or outside the blocks the part (`embed`)."""

    def part(self, index: int | None) -> Part:
        """The part of the model that has the matrix; `index`: number of the head or expert, or None."""
        if index is None:
            return Part(self.inside, self.layer)
        heads = {"attn": "head", "cross_attn": "cross_head"}
        return Part(heads.get(self.inside, "expert"), self.layer, index)


@dataclass(frozen=True)
class Spectra(Question):
    """Singular values of every weight matrix of a model, and of what each head computes with two of them (OV, QK).

    W_Q, W_K, W_V, W_O are taken over all heads, as the parameter stands (`[d, h e]`); OV = W_V W_O and QK = W_Q W_K^T
    by head, through their thin factors, of the layers that have these circuits. Raw weights: no norm is folded in, in
    float32 at least.

    Args:
        top: how many of the largest singular values `top_share` counts.

    Returns:
        Dataset[matrix, index], `index` counted from 1. Coordinates of `matrix`: its name, `kind` ("W_Q", "OV", ...),
        `part` (`L0H3` for OV and QK, `L0.attn`, `L0.mlp`, `L0E2` for an expert, `embed`, `logits` for W_U) and `layer`
        (-1 where it has none). The expert that every token passes has matrices of its own (`blocks.0.mlp.shared.W_in`),
        of part `L0.mlp`. With p_i = sigma_i / sum sigma:

        - `singular` [matrix, index]: sigma_1 >= sigma_2 >= ..., NaN after the last.
        - `norm`: Frobenius norm.
        - `stable_rank`: sum sigma^2 / sigma_1^2; 0 of a matrix of zeros.
        - `effective_rank`: exp(-sum p log p); 0 of a matrix of zeros.
        - `top_share`: share of sum sigma^2 in the first `top`.
        - `size`: how many singular values there are.

    Raises:
        ValueError: `top` below 1.

    Caveats:
        A spectrum says which directions a matrix has, not which of them ever carry a signal. With rotary positions QK
        is the circuit at offset 0; the score's scale and biases are not in it. W_U of a tied model is W_E and listed
        once.

    Source:
        Roy and Vetterli 2007 (effective rank).

    See Also:
        `singular_directions`: the directions of one matrix, as tokens.

    Example:
        >>> table = spectra(model)
        >>> float(table.stable_rank.sel(matrix="blocks.0.mlp.W_out")) >= 1
        True
        >>> interp.frame(table).groupby("kind").stable_rank.mean()
    """

    of_layers: ClassVar[bool] = False

    _: KW_ONLY
    top: int = 10
    of_weights: ClassVar[bool] = True

    def bind(self, model: Subject) -> WithoutData:
        """Decompositions, no pass."""
        if self.top < 1:
            raise ValueError(f"top >= 1 is required, got {self.top}")
        return WithoutData(self.name, partial(_spectra_table, model.transformer.unedited, self))


spectra = of_weights(Spectra)


@torch.no_grad()
def _spectra_table(network: Transformer, question: Spectra) -> xr.Dataset:
    """The result of `spectra`: one row per matrix, or per head or expert of a stack of matrices."""
    names, kinds, parts, layers, values = [], [], [], [], []
    matrices = list(_matrices(network))
    spectra = all_singular_values([named.matrix for named in matrices])
    for named, singular_of in zip(matrices, spectra, strict=True):
        rows = singular_of.reshape(-1, singular_of.shape[-1])
        prefix = named.kind if named.layer is None else f"blocks.{named.layer}.{named.inside}.{named.kind}"
        for i, row in enumerate(rows):
            names.append(prefix if singular_of.ndim == 1 else f"{prefix}.{i}")
            kinds.append(named.kind.rpartition(".")[2])
            parts.append(str(named.part(None if singular_of.ndim == 1 else i)))
            layers.append(-1 if named.layer is None else named.layer)
            values.append(row)
    singular = torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=torch.nan)
    return labelled(
        question.name,
        {
            **{name: (("matrix",), value) for name, value in summary(singular, question.top).items()},
            "singular": (("matrix", "index"), singular),
        },
        coords={
            "matrix": names, "kind": ("matrix", kinds), "part": ("matrix", parts), "layer": ("matrix", layers),
            "index": range(1, singular.shape[1] + 1),
        },
        units={
            "norm": "Frobenius norm", "stable_rank": "directions", "effective_rank": "directions",
            "top_share": "share of the squared norm", "singular": "singular value",
        },
        attrs={"top": question.top, "unit": "singular value", "weights": "raw, no norm folded in"},
    )  # fmt: skip


def singular_values(matrix: Float[Tensor, "*n i o"] | FactoredMatrix) -> Float[Tensor, "*n r"]:
    """Singular values of a matrix, descending; of a product from its factors, without forming the product.

    A B = Q_A (R_A R_B^T) Q_B^T with thin QR factors, so only the small middle is decomposed.

    Args:
        matrix: [*n i o], matrices or products of thin ones.

    Returns:
        [*n r], descending, in float32 at least.

    Example:
        >>> singular_values(FactoredMatrix(torch.tensor([[3.0], [4.0]]), torch.tensor([[2.0, 0.0]])))
        tensor([10.])
    """
    return torch.linalg.svdvals(_tall_matrix(matrix))


def all_singular_values(
    matrices: Sequence[Float[Tensor, "..."] | FactoredMatrix], at_once: int = AT_ONCE
) -> list[Float[Tensor, "..."]]:
    """Singular values of each of several matrices, on the host.

    Matrices of one shape, a wide one transposed, are decomposed together: a device checks after each decomposition
    whether it converged.

    Args:
        matrices: [*n i o] each, matrices or products of thin ones.
        at_once: how many numbers the matrices of one decomposition may have.

    Returns:
        [*n r] for each, descending, in float32 at least.
    """
    same_shape: dict[tuple[tuple[int, ...], torch.dtype], list[int]] = {}
    for i, matrix in enumerate(matrices):
        same_shape.setdefault((_tall_shape(matrix), _left_factor(matrix).dtype), []).append(i)
    by_index: dict[int, Tensor] = {}
    for (shape, _), indices in same_shape.items():
        leads = {i: matrices[i].shape[:-2] for i in indices}
        size = max(1, at_once // (max(lead.numel() for lead in leads.values()) * prod(shape)))
        for first in range(0, len(indices), size):
            chunk = indices[first : first + size]
            stack = torch.cat([_tall_matrix(matrices[i]).reshape(-1, *shape) for i in chunk])
            values = torch.linalg.svdvals(stack).split([leads[i].numel() for i in chunk])
            by_index |= {i: value.reshape(*leads[i], -1) for i, value in zip(chunk, values, strict=True)}
    return [value for _, value in sorted(to_host(by_index).items())]


def _left_factor(matrix: Float[Tensor, "*n i o"] | FactoredMatrix) -> Float[Tensor, "*n _ _"]:
    return matrix.A if isinstance(matrix, FactoredMatrix) else matrix


def _tall_shape(matrix: Float[Tensor, "*n i o"] | FactoredMatrix) -> tuple[int, ...]:
    """The shape of `_tall_matrix(matrix)`, without its leading axes."""
    middle = _left_factor(matrix).shape[-1] if isinstance(matrix, FactoredMatrix) else max(matrix.shape[-2:])
    return tuple(sorted((min(side, middle) for side in matrix.shape[-2:]), reverse=True))


def _tall_matrix(matrix: Float[Tensor, "*n i o"] | FactoredMatrix) -> Float[Tensor, "*n _ _"]:
    """A matrix with the same singular values and no more columns than rows, in float32 at least."""
    if isinstance(matrix, FactoredMatrix):
        left, right = upcast(matrix.A.detach()), upcast(matrix.B.detach()).mT
        small = torch.linalg.qr(left, mode="r").R @ torch.linalg.qr(right, mode="r").R.mT
    else:
        small = upcast(matrix.detach())
    return small.mT if small.shape[-2] < small.shape[-1] else small


def summary(singular: Float[Tensor, "n r"], top: int) -> dict[str, Float[Tensor, "n"] | Tensor]:
    """Norm, ranks, share of the largest and number of singular values, for several spectra.

    Args:
        singular: [n r], spectra in descending order, NaN after the last value.
        top: how many of the largest `top_share` counts.

    Returns:
        [n] each: `norm`, `stable_rank`, `effective_rank`, `top_share` and `size`, as in `spectra`.

    Example:
        >>> {k: float(v) for k, v in summary(torch.tensor([[2.0, 2.0, torch.nan]]), 1).items()}["effective_rank"]
        2.0
    """
    values = singular.nan_to_num(0.0)
    square, total = values.square(), values.sum(-1, keepdim=True)
    tiny = torch.finfo(values.dtype).tiny
    energy = square.sum(-1)
    share = values / total.clamp_min(tiny)
    return {
        "norm": energy.sqrt(),
        "stable_rank": energy / square[..., 0].clamp_min(tiny),
        "effective_rank": torch.special.entr(share).sum(-1).exp() * (total[..., 0] > 0),
        "top_share": square[..., :top].sum(-1) / energy.clamp_min(tiny),
        "size": (~singular.isnan()).sum(-1),
    }


def _matrices(model: Transformer) -> Iterator[_NamedMatrix]:
    """Yields every matrix of the model, layer by layer."""
    weights, config = Weights(model), model.config
    yield _NamedMatrix("embed.W_E", model.embed.weight, inside="embed")
    if model.pos_embed is not None:
        yield _NamedMatrix("pos_embed.W_pos", weights.W_pos, inside="pos_embed")
    if model.type_embed is not None:
        yield _NamedMatrix("type_embed.W_type", model.type_embed.weight, inside="type_embed")
    for layer in range(config.n_layers):
        yield from _attention_matrices(weights.layer(layer), weights, layer, "attn")
        if config.cross_attention:
            yield from _attention_matrices(weights.layer(layer, cross=True), weights, layer, "cross_attn")
        for part in config.mlps:
            yield from _mlp_matrices(weights.layer(layer, before=part == "mlp_before"), model, layer, part)
    if model.mlm_head is not None:
        yield _NamedMatrix("mlm_head.W", model.mlm_head.dense.weight.mT, inside="logits")
    if model.unembed is not None and not config.tied:
        yield _NamedMatrix("unembed.W_U", weights.W_U, inside="logits")


def _attention_matrices(
    views: LayerWeights, weights: Weights, layer: int, part: str
) -> Iterator[_NamedMatrix]:
    for name in ("W_Q", "W_K", "W_V"):
        if (matrix := getattr(views, name)) is not None:
            yield _NamedMatrix(name, rearrange(matrix, "h d e -> d (h e)"), layer, part)
    yield _NamedMatrix("W_O", rearrange(views.W_O, "h e d -> (h e) d"), layer, part)
    group = weights.kv_head().to(views.W_O.device)
    traits, cross = weights.config.mixers[layer].traits, part == "cross_attn"
    if views.W_V is not None and (cross or traits.moves):
        yield _NamedMatrix("OV", FactoredMatrix(views.W_V[group], views.W_O), layer, part)
    if views.W_Q is not None and views.W_K is not None and (cross or traits.bilinear):
        yield _NamedMatrix("QK", FactoredMatrix(views.W_Q, views.W_K[group].mT), layer, part)


def _mlp_matrices(views: LayerWeights, model: Transformer, layer: int, part: str) -> Iterator[_NamedMatrix]:
    for name in ("W_gate", "W_in", "W_out"):
        if (matrix := getattr(views, name)) is not None:
            yield _NamedMatrix(name, matrix, layer, part)
    experts = model.block(layer).mlps()[part]
    if isinstance(experts, Experts):
        gate, linear = experts.into.chunk(2, 1)
        yield _NamedMatrix("W_router", experts.router.weight.mT, layer, part)
        for name, stack in (("W_gate", gate), ("W_in", linear), ("W_out", experts.out)):
            yield _NamedMatrix(name, stack, layer, part)
        if experts.shared is not None:
            gate, linear = experts.shared.into.weight.chunk(2)
            stored = {"W_gate": gate, "W_in": linear, "W_out": experts.shared.out.weight}
            for name, matrix in stored.items():
                yield _NamedMatrix(f"shared.{name}", matrix.mT, layer, part)
        if experts.shared_gate is not None:
            yield _NamedMatrix("W_shared_gate", experts.shared_gate.weight.mT, layer, part)
