"""Influence of training rows on a model's predictions, estimated from gradients: no model is trained again.

Leaving row i out takes s_i / T from the mean loss L (s_i: the nats of its tokens, T: the tokens of all rows). To first
order the weights then move by H^-1 grad s_i / T, and the measure m_j of a query by grad m_j . H^-1 grad s_i / T (Koh,
Liang 2017). H is taken to be the Fisher matrix of the model's own predictions, matrix by matrix as a Kronecker product
(Grosse et al. 2023, arXiv:2308.03296), or the identity. What rows really did: `interp.lab.training.leave_out`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.core.boundary import public
from interp.core.kinds import Positive, PositiveCount
from interp.core.results import labelled
from interp.core.stats import Means, Reduction, Rows, uniforms, upcast
from interp.core.transfers import to_device
from interp.data.batch import Batch
from interp.data.stream import prompt_source
from interp.dynamics.kronecker import Kronecker, along, products
from interp.lenses.factors import GradientFactors, LensMatrix, check_differentiable, chosen, factor_steps
from interp.model.loss import next_token_loss
from interp.model.transformer import Transformer
from interp.passes.needs import Steps
from interp.passes.observe import Model, Objective, Subject, as_model
from interp.passes.question import ByRow, Values
from interp.runs.over_data import reduced_over
from interp.runs.provenance import with_origin
from interp.tasks.examples import Examples

if TYPE_CHECKING:
    import xarray as xr

AT_ONCE = 2**25
"""Most entries of the squared matrices that the rows of one pass hold together: 128 MiB in float32."""
InfluenceMethod = Literal["dot", "kfac", "ekfac"]
Solved = Mapping[str, Float[Tensor, "c i o"]]
"""(H + damping)^-1 grad m_j of every query j, by the name of the matrix."""


@public()
def influence(
    model: Model,
    rows: Examples,
    queries: Examples,
    *,
    method: InfluenceMethod = "ekfac",
    damping: Positive = 0.1,
    matrices: Sequence[LensMatrix] | None = None,
    layers: Sequence[int] | None = None,
    determined_only: bool = False,
    samples: PositiveCount = 1,
    seed: int = 0,
    batch_size: PositiveCount = 32,
) -> xr.Dataset:
    """Predicted change of each query's measure if a training row were left out, from gradients alone.

    With s_i the summed nats of row i, T the tokens of all rows and m_j the measure of query j, "kfac" and "ekfac" give
    grad m_j . (H + damping)^-1 grad s_i / T: first-order predictions for a model at the minimum of its mean loss. "dot"
    gives grad m_j . grad s_i / T, the prediction for one step of gradient descent of length 1: its sign and order mean
    something, its scale does not. H: the Fisher matrix of the mean loss, each matrix on its own, labels drawn from the
    model. "kfac": T_real / T * E[x^T x] (kron) E[delta^T delta] over real tokens; "ekfac": in its eigenbasis the mean
    squares of the rows' gradients.

    Args:
        rows: what the model was trained on.
        queries: what is measured, as in `interp.lab.training.leave_out` (`Examples.measured`).
        method: curvature: "ekfac", "kfac", or "dot" for none.
        damping: share of each matrix' mean eigenvalue that is added to all of them.
        matrices: which matrices of each layer, as in `interp.lenses.gradient_factors`; None: all.
        layers: which layers; None: all.
        determined_only: whether the loss that the model was trained on, and the queries' measure, count determined
            tokens alone.
        samples: labels drawn per token for H.
        seed: of the labels drawn for H.
        batch_size: the most rows of a pass.

    Returns:
        Dataset[row, query]:

        - `value`: the measure without the row minus with it, the sign of `leave_out`, in the unit of m_j; of "dot" per
          step of length 1.

    Raises:
        ValueError: packed or weighted rows, damping that is not above 0, fewer than one sample, and those of
            `interp.lenses.gradient_factors`.

    Caveats:
        Embeddings, unembedding, biases and gains are held fixed; no optimiser's statistics; a model in the middle of
        training is no minimum.

    Memory:
        The solved gradients of all queries, one matrix each, and under "ekfac" a few float64 copies of all matrices:
        name `layers` of a large model.

    Source:
        Koh, Liang 2017; Grosse et al. 2023, arXiv:2308.03296.

    See Also:
        `interp.lab.training.leave_out`: the exact change, by training again. `lds`: how well both agree.

    Example:
        >>> task = interp.tasks.RepeatedSequences(8, 12, 3, 4)
        >>> rows, queries = (task.batch(interp.tasks.Place(0, step), 4) for step in (0, 1))
        >>> influence(model, rows, queries, method="dot").value.dims
        ('row', 'query')
    """
    subject = as_model(model)
    check_differentiable(subject.transformer, chosen(subject.transformer.config, matrices, layers))
    setup = _Setup(subject, matrices, layers, determined_only, samples, seed, batch_size)
    multipliers = _multipliers(setup, rows, queries, method, damping)
    scores = setup.over(rows, partial(_scores, setup=setup, examples=rows, multipliers=multipliers), Rows)
    assert isinstance(scores, Rows)
    unit = queries.unit if method != "dot" else f"{queries.unit} per step of length 1"
    result = labelled(
        "influence",
        {"value": (("row", "query"), scores.rows["value"] / setup.tokens(rows))},
        units=unit,
        attrs={"unit": unit, "method": method, "damping": damping, "effect": "without the row - with it"},
    )
    return with_origin(result, subject.transformer)


@dataclass(frozen=True, eq=False)
class _Setup:
    """What every pass of `influence` needs: the model, the matrices, and which loss is differentiated."""

    subject: Subject
    matrices: Sequence[LensMatrix] | None
    layers: Sequence[int] | None
    determined_only: bool
    samples: int
    seed: int
    batch_size: int

    def over(
        self,
        examples: Examples,
        rows: Callable[[Transformer, Batch], Steps[Values]],
        reduction: Reduction,
        most: int | None = None,
    ) -> object:
        """The values that `rows` computes for each batch of the examples, reduced over all batches.

        Args:
            most: the most rows of a pass; None: the batch size.
        """
        examples.batch.require_one_text("influence")
        if examples.weight is not None:
            raise ValueError("influence is that of rows that count alike, got rows with weights")
        source = prompt_source(
            examples.batch,
            self.subject.text,
            prepend_bos=False,
            batch_size=min(self.batch_size, most or self.batch_size),
        )
        return reduced_over(ByRow("influence", rows, reduction), self.subject, source)

    def factors(self, model: Transformer, batch: Batch, loss: Objective) -> Steps[GradientFactors]:
        """The gradient factors of a loss that is a function of the logits at all positions."""
        return factor_steps(model, batch, self.matrices, self.layers, loss=loss, everywhere=True)

    def tokens(self, rows: Examples) -> int:
        """The number of tokens over which the mean loss is taken."""
        count = int(rows.predicted(determined_only=self.determined_only).sum())
        if not count:
            raise ValueError("rows with a token to predict are required, none is asked")
        return count


def here(examples: Examples, batch: Batch) -> Examples:
    """The rows of a batch as examples, with which of their tokens are determined.

    Args:
        examples: all rows.
        batch: some of them, by their numbers.

    Returns:
        The examples of the batch.
    """
    if examples.determined is None:
        return Examples(batch)
    assert batch.row is not None
    known = examples.determined[batch.row.to(examples.determined.device)]
    return Examples(batch, to_device(known[:, : batch.tokens.shape[1] - 1], batch.tokens.device))


def drawn(
    logits: Float[Tensor, "b p v"], row: Int[Tensor, "b"], sample: int, width: int, seed: int
) -> Int[Tensor, "b p"]:
    """A token for every position, drawn from the model's prediction there; the row's number decides the draw.

    Args:
        logits: [b p v], of the model.
        row: [b], the numbers of the rows.
        sample: number of the draw.
        width: how many positions the longest row has.
        seed: of the draws.

    Returns:
        [b p], token ids.
    """
    p = logits.shape[1]
    levels = to_device(uniforms(row, p, seed, start=sample * width).T, logits.device)
    tokens = []
    # a row at a time, because the cumulative probabilities are float64 over the vocabulary
    for row_logits, level in zip(logits.detach(), levels, strict=True):
        cumulative = row_logits.double().softmax(-1).cumsum(-1)
        tokens.append(torch.searchsorted(cumulative, level[:, None].contiguous(), right=True)[:, 0])
    return torch.stack(tokens).clamp_max(logits.shape[-1] - 1)


def nats(
    logits: Float[Tensor, "b p v"], labels: Int[Tensor, "b p"], predicted: Bool[Tensor, "b n"]
) -> Float[Tensor, ""]:
    """Summed loss of labels, position i predicting label i, at the positions that count.

    Args:
        logits: [b p v], of the model.
        labels: [b p], token ids.
        predicted: [b n], whether each position but the last counts.

    Returns:
        One number, in nats.
    """
    losses = F.cross_entropy(upcast(logits[:, :-1]).mT, labels[:, :-1], reduction="none")
    return (losses * predicted).sum()


def _multipliers(
    setup: _Setup, rows: Examples, queries: Examples, method: InfluenceMethod, damping: float
) -> Solved | Mapping[str, tuple[Tensor, Tensor]]:
    """What the rows' gradients are multiplied by: the factors of the queries' gradients ("dot"), or H^-1 times them."""
    factors = setup.over(queries, partial(_query_factors, setup=setup, examples=queries), Rows)
    assert isinstance(factors, Rows)
    device = setup.subject.transformer.device
    names = [name.removesuffix(" x") for name in factors.rows if name.endswith(" x")]
    pairs = {
        name: tuple(to_device(factors.rows[f"{name} {side}"], device) for side in ("x", "delta"))
        for name in names
    }
    if method == "dot":
        return {name: (x, delta) for name, (x, delta) in pairs.items()}
    widths = [(x.shape[-1], delta.shape[-1]) for x, delta in pairs.values()]
    numbers = sum(max(i * i + o * o, i * o) for i, o in widths)
    curvature = fisher(setup, rows, method, max(1, AT_ONCE // numbers))
    solved = {}
    for name, (x, delta) in pairs.items():
        matrix = curvature[name].to(x)
        # the mean is taken of the copy on the host, without waiting for the device
        eigenvalues = curvature[name].eigenvalues.to(matrix.eigenvalues.dtype)
        solved[name] = matrix.solved(x, delta, damping * float(eigenvalues.mean()))
    return solved


def fisher(
    setup: _Setup, rows: Examples, method: InfluenceMethod, most: int | None = None
) -> dict[str, Kronecker]:
    """Fisher matrix of the mean loss at every matrix, as a Kronecker product or corrected in its eigenbasis.

    Args:
        setup: the model, the matrices and the loss.
        rows: what the model was trained on.
        method: "kfac", or "ekfac" for the correction.
        most: the most rows of a pass, each of which has squared matrices of its own; None: the batch size.

    Returns:
        A `Kronecker` for each matrix, by name.
    """
    moments = setup.over(rows, partial(_factor_moments, setup=setup, examples=rows), Means, most)
    assert isinstance(moments, Means)
    mean = {name: matrix.mean for name, matrix in moments.moments.items()}
    count, real, tokens = len(rows.batch), int(rows.batch.real.sum()), setup.tokens(rows)
    names = [name.removesuffix(" x") for name in mean if name.endswith(" x")]
    curvature = {}
    # means over rows become sums (count on either side): sum x^T x (kron) sum delta^T delta / (real tokens)
    scale = count * count / (real * tokens)
    for name in names:
        curvature[name] = Kronecker.of(mean[f"{name} x"], mean[f"{name} delta"], scale)
    if method == "kfac":
        return curvature
    squares = setup.over(
        rows, partial(_squared_gradients, setup=setup, examples=rows, bases=curvature), Means, most
    )
    assert isinstance(squares, Means)
    return {
        name: matrix.corrected(squares.moments[name].mean.to(matrix.basis_in.device) * (count / tokens))
        for name, matrix in curvature.items()
    }


def _sampled_label_factors(
    setup: _Setup, model: Transformer, batch: Batch, examples: Examples, sample: int
) -> Steps[GradientFactors]:
    """Gradient factors of the loss against labels drawn from the model's own predictions (for the Fisher matrix)."""
    rows = here(examples, batch)
    assert batch.row is not None
    labels = partial(
        drawn, row=batch.row, sample=sample, width=examples.batch.tokens.shape[1], seed=setup.seed
    )
    counted = rows.predicted(determined_only=setup.determined_only)
    return setup.factors(model, batch, lambda logits: nats(logits, labels(logits), counted))


def _factor_moments(model: Transformer, batch: Batch, setup: _Setup, examples: Examples) -> Steps[Values]:
    """x^T x `[b i i]` and delta^T delta `[b o o]` of every matrix, summed over the tokens of each row."""
    values: dict[str, Tensor] = {}
    for sample in range(setup.samples):
        factors = yield from _sampled_label_factors(setup, model, batch, examples, sample)
        for name, (x, delta) in factors.items():
            real_x, delta = upcast(x) * batch.real[..., None], upcast(delta)
            values[f"{name} x"] = real_x.mT @ real_x
            delta_moment = delta.mT @ delta / setup.samples
            values[f"{name} delta"] = (
                values.get(f"{name} delta", torch.zeros_like(delta_moment)) + delta_moment
            )
    return values


def _squared_gradients(
    model: Transformer,
    batch: Batch,
    setup: _Setup,
    examples: Examples,
    bases: Mapping[str, Kronecker],
) -> Steps[Values]:
    """The squared entries of each row's gradient in the eigenbasis of every matrix, `[b i o]`."""
    values: dict[str, Tensor] = {}
    for sample in range(setup.samples):
        factors = yield from _sampled_label_factors(setup, model, batch, examples, sample)
        for name, (x, delta) in factors.items():
            squares = bases[name].to(x).in_basis(x, delta).square() / setup.samples
            values[name] = values.get(name, torch.zeros_like(squares)) + squares
    return values


def _query_factors(model: Transformer, batch: Batch, setup: _Setup, examples: Examples) -> Steps[Values]:
    """Both factors of the gradient of each query's measure m_j, under the names `<matrix> x` and `<matrix> delta`."""
    queries = here(examples, batch)
    factors = yield from setup.factors(
        model, batch, lambda logits: queries.measured(logits, determined_only=setup.determined_only).sum()
    )
    return {
        f"{name} {side}": factor
        for name, pair in factors.items()
        for side, factor in zip(("x", "delta"), pair, strict=True)
    }


def _scores(
    model: Transformer,
    batch: Batch,
    setup: _Setup,
    examples: Examples,
    multipliers: Mapping[str, Tensor | tuple[Tensor, Tensor]],
) -> Steps[Values]:
    """Inner products `[b query]` of each row's loss gradient with each query's multiplier, summed over all matrices."""
    counted = here(examples, batch).predicted(determined_only=setup.determined_only)

    def loss(logits: Tensor) -> Tensor:
        return (next_token_loss(logits, batch.tokens, batch.keep) * counted).sum()

    total: Tensor | None = None
    factors = yield from setup.factors(model, batch, loss)
    for name, (x, delta) in factors.items():
        multiplier = multipliers[name]
        inner = (
            along(x, delta, multiplier) if isinstance(multiplier, Tensor) else products(x, delta, *multiplier)
        )
        total = inner if total is None else total + inner
    assert total is not None
    return {"value": total}
