"""The shape of weight gradients: how many directions a prompt's gradient has, and how alike layers' gradients are.

Both come from the thin factors of each prompt's gradient (`factors`); no weight gradient is formed. Katz et al. 2024,
"Backward Lens", section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from interp.core.boundary import public
from interp.core.factored import FactoredMatrix
from interp.core.precision import wide
from interp.core.results import labelled
from interp.core.stats import Partial, Rows
from interp.data.batch import Batch
from interp.data.sources import Data
from interp.data.stream import DataSource
from interp.data.text import Answers
from interp.lenses.factors import Matrix, check_differentiable, chosen, factors, full_name, part_of
from interp.model.config import ModelConfig
from interp.model.edits import Edit
from interp.model.tap import Trace
from interp.model.transformer import Transformer
from interp.passes.analysis import Analysis, Question
from interp.passes.answers import Posed
from interp.passes.observe import Model, Subject
from interp.runs.run import answered

if TYPE_CHECKING:
    import xarray as xr


@dataclass(frozen=True, eq=False)
class GradientRank(Question):
    """How many directions the gradient of each matrix has, prompt by prompt; `gradient_rank` describes the result."""

    answer: Answers | None = None
    """The token trained towards, as text or id, one for all prompts or one for each; None = that of the data."""
    wrong: Answers | None = None
    """The token trained away from; with it the loss is the difference of both logits."""
    matrices: Sequence[Matrix] | None = None
    """Which matrices of each layer; None = all that have factors."""
    layers: Sequence[int] | None = None
    """Which layers; None = all."""
    tolerance: float | None = None
    """Share of the largest singular value above which one counts; None = by the dtype of the model."""

    def asked(self, model: Subject) -> Analysis:
        """A forward and a backward pass per batch, and the singular values of the factors."""
        if self.tolerance is not None and not 0 <= self.tolerance <= 1:
            raise ValueError(
                f"tolerance, a share of the largest singular value, must be in [0, 1], got {self.tolerance}"
            )
        config = model.transformer.config
        return _analysis(
            model, self, partial(_ranks, asked=self), partial(_finish_ranks, asked=self, config=config)
        )


@dataclass(frozen=True, eq=False)
class GradientCosines(Question):
    """How alike the gradients of two layers are at the last token; `gradient_cosines` describes the result."""

    answer: Answers | None = None
    """The token trained towards, as text or id, one for all prompts or one for each; None = that of the data."""
    wrong: Answers | None = None
    """The token trained away from; with it the loss is the difference of both logits."""
    matrices: Sequence[Matrix] | None = None
    """Which matrices of each layer; None = all that have factors."""
    layers: Sequence[int] | None = None
    """Which layers; None = all."""

    def asked(self, model: Subject) -> Analysis:
        """A forward and a backward pass per batch, and the factors at the last token."""
        config = model.transformer.config
        return _analysis(
            model, self, partial(_cosines, asked=self), partial(_finish_cosines, asked=self, config=config)
        )


@public()
def gradient_rank(
    model: Model,
    data: DataSource | Data,
    answer: Answers | None = None,
    wrong: Answers | None = None,
    *,
    matrices: Sequence[Matrix] | None = None,
    layers: Sequence[int] | None = None,
    tolerance: float | None = None,
    edits: Sequence[Edit] = (),
    prepend_bos: bool = True,
    batch_size: int = 32,
) -> xr.Dataset:
    """How many singular values of each prompt's gradient X^T Delta are above the tolerance.

    Returns Dataset[prompt, matrix, layer] with `value`, from the factors alone in float64, and `tokens`[prompt], its
    upper bound. In the last block only the last token reaches the loss, so that the gradient of all but W_K and W_V has
    rank 1 there.
    answer, wrong, matrices, layers: as in `backward_lens`.
    tolerance: as a share of the largest; None = max(rows, columns) times the epsilon of the model's dtype, as
    `torch.linalg.matrix_rank` of the gradient takes it.
    Errors: those of `backward_lens`, and ValueError for a tolerance outside [0, 1].

    Example:
        >>> int(gradient_rank(model, prompt, " Mary", matrices=["W_out"]).value[0, 0, -1])
        1
    """
    question = GradientRank(answer, wrong, matrices, layers, tolerance)
    return answered(question, model, data, edits=edits, prepend_bos=prepend_bos, batch_size=batch_size)


@public()
def gradient_cosines(
    model: Model,
    data: DataSource | Data,
    answer: Answers | None = None,
    wrong: Answers | None = None,
    *,
    matrices: Sequence[Matrix] | None = None,
    layers: Sequence[int] | None = None,
    edits: Sequence[Edit] = (),
    prepend_bos: bool = True,
    batch_size: int = 32,
) -> xr.Dataset:
    """How alike what two layers' gradients hold at the last token is, as a cosine.

    Returns Dataset[prompt, matrix, layer, other_layer] with `value`: of delta for W_out and W_O, of x for the others;
    both live in the stream, where layers can be compared. NaN where a vector is zero. Null: 0, with a standard
    deviation of 1 / sqrt(d_model).
    answer, wrong, matrices, layers: as in `backward_lens`.
    Errors: those of `backward_lens`.

    Example:
        >>> found = gradient_cosines(model, prompt, " Mary", matrices=["W_out"])
        >>> found.value.sel(matrix="W_out", layer=0, other_layer=1)
    """
    question = GradientCosines(answer, wrong, matrices, layers)
    return answered(question, model, data, edits=edits, prepend_bos=prepend_bos, batch_size=batch_size)


Asked = GradientRank | GradientCosines


def _analysis(
    model: Subject,
    asked: Asked,
    compute: Callable[[Trace, Batch, Transformer], Mapping[str, Tensor]],
    finish: Callable[[Partial], xr.Dataset],
) -> Analysis:
    """The analysis of either question."""
    network = model.transformer
    check_differentiable(network, chosen(network.config, asked.matrices, asked.layers))
    posed = Posed.of(model.text, asked.answer, asked.wrong)
    return Analysis(
        asked.name,
        compute,
        Rows,
        finish,
        pose=posed,
    )


def _ranks(trace: Trace, batch: Batch, model: Transformer, asked: GradientRank) -> Mapping[str, Tensor]:
    found, by_matrix = factors(model, batch, asked.matrices, asked.layers), []
    for matrix, layers in found.recorded().items():
        ranks = []
        for layer in layers:
            x, delta = found[full_name(layer, matrix)]
            cut = asked.tolerance
            cut = max(x.shape[-1], delta.shape[-1]) * torch.finfo(x.dtype).eps if cut is None else cut
            _, s, _ = FactoredMatrix(x.double().mT, delta.double()).svd()
            ranks.append((s > cut * s[:, :1]).sum(-1))
        by_matrix.append(torch.stack(ranks, 1))
    return {"value": torch.stack(by_matrix, 1), "tokens": batch.lengths}


def _cosines(trace: Trace, batch: Batch, model: Transformer, asked: GradientCosines) -> Mapping[str, Tensor]:
    found, last, by_matrix = factors(model, batch, asked.matrices, asked.layers), batch.last(), []
    here = torch.arange(len(last), device=last.device)
    for matrix, layers in found.recorded().items():
        vectors = torch.stack([wide(found.in_stream(layer, matrix)[here, last]) for layer in layers], 1)
        unit = vectors / vectors.norm(dim=-1, keepdim=True)
        by_matrix.append(unit @ unit.mT)
    return {"value": torch.stack(by_matrix, 1)}


def _coords(asked: Asked, config: ModelConfig) -> dict[str, object]:
    every = chosen(config, asked.matrices, asked.layers)
    matrices = list(dict.fromkeys(matrix for _, matrix in every))
    layers = list(dict.fromkeys(layer for layer, _ in every))
    parts = [[str(part_of(layer, matrix)) for layer in layers] for matrix in matrices]
    return {"matrix": matrices, "layer": layers, "part": (("matrix", "layer"), parts)}


def _finish_ranks(merged: Partial, asked: GradientRank, config: ModelConfig) -> xr.Dataset:
    assert isinstance(merged, Rows)
    rows = merged.rows
    return labelled(
        asked.name,
        {"value": (("prompt", "matrix", "layer"), rows["value"]), "tokens": (("prompt",), rows["tokens"])},
        coords=_coords(asked, config),
        attrs={"unit": "singular values above the tolerance"},
    )


def _finish_cosines(merged: Partial, asked: GradientCosines, config: ModelConfig) -> xr.Dataset:
    assert isinstance(merged, Rows)
    coords = _coords(asked, config)
    return labelled(
        asked.name,
        {"value": (("prompt", "matrix", "layer", "other_layer"), merged.rows["value"])},
        coords={**coords, "other_layer": coords["layer"]},
        units="cosine",
        attrs={"null": f"0 +- {config.d_model**-0.5:.3f}"},
    )
