"""The backward lens: what one training step towards an answer would write into each matrix, token by token, in words.

The gradient of a matrix is sum_i x_i^T delta_i over tokens. One side of each outer product lives in the residual
stream: x for matrices that read it (W_in, W_gate, W_Q, W_K, W_V), delta for those that write it (W_out, W_O). That
vector is projected on the vocabulary: read the MOST probable tokens of x, and the LEAST probable of delta, because the
step subtracts it (Katz, Belinkov, Geva, Wolf 2024, "Backward Lens", EMNLP, arXiv:2402.12865).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.core.boundary import public
from interp.core.precision import wide
from interp.core.results import labelled
from interp.core.stats import Partial, Rows
from interp.core.tiles import row_tiles
from interp.data.batch import Batch
from interp.data.sources import Data
from interp.data.stream import DataSource
from interp.data.text import Answers, Text
from interp.lenses.factors import (
    WRITERS,
    GradientFactors,
    Matrix,
    check_differentiable,
    chosen,
    factors,
    full_name,
    part_of,
)
from interp.model.config import ModelConfig
from interp.model.edits import Edit
from interp.model.tap import Trace
from interp.model.transformer import Transformer
from interp.model.weights import Weights
from interp.passes.analysis import Analysis, Question
from interp.passes.answers import Posed
from interp.passes.observe import Model, Subject
from interp.runs.run import answered

if TYPE_CHECKING:
    import xarray as xr

Projection = Literal["normalised", "final_norm", "raw"]
NO_UPDATE = "no update"
THRESHOLD = 1e-6
"""Share of a prompt's largest update, over layers and tokens of a matrix, below which a cell counts as not updated."""
_CELL = ("prompt", "matrix", "layer", "pos")


@dataclass(frozen=True, eq=False)
class BackwardLens(Question):
    """What one training step towards the answer would write, in words; `backward_lens` describes the result."""

    answer: Answers | None = None
    """The token trained towards, as text or id, one for all prompts or one for each; None = that of the data."""
    wrong: Answers | None = None
    """The token trained away from; with it the loss is the difference of both logits."""
    matrices: Sequence[Matrix] | None = None
    """Which matrices of each layer, of `interp.lenses.factors.MATRICES`; None = all that have factors."""
    layers: Sequence[int] | None = None
    """Which layers; None = all."""
    top: int = 5
    """How many of the most and of the least probable tokens are listed."""
    projection: Projection = "normalised"
    """What stands between a vector and the unembedding."""
    threshold: float = THRESHOLD
    """Share of a prompt's largest update of a matrix up to which a token counts as not updated."""

    def asked(self, model: Subject) -> Analysis:
        """A forward and a backward pass per batch, and what the unembedding says of the factors."""
        network, n_vocab = model.transformer, model.transformer.config.d_vocab
        if not 1 <= self.top <= n_vocab:
            raise ValueError(f"top must be in [1, {n_vocab}], got {self.top!r}")
        if not 0 <= self.threshold < 1:
            raise ValueError(
                f"threshold, a share of the largest update, must be in [0, 1), got {self.threshold}"
            )
        check_differentiable(network, chosen(network.config, self.matrices, self.layers))
        posed = Posed.of(model.text, self.answer, self.wrong)
        return Analysis(
            self.name,
            partial(_compute, asked=self),
            Rows,
            partial(_finish, asked=self, config=network.config, text=model.text),
            pose=posed,
        )


@public()
def backward_lens(
    model: Model,
    data: DataSource | Data,
    answer: Answers | None = None,
    wrong: Answers | None = None,
    *,
    matrices: Sequence[Matrix] | None = None,
    layers: Sequence[int] | None = None,
    top: int = 5,
    projection: Projection = "normalised",
    threshold: float = THRESHOLD,
    edits: Sequence[Edit] = (),
    prepend_bos: bool = True,
    batch_size: int = 32,
) -> xr.Dataset:
    """What a training step towards the answer at the last token would write into each matrix, in words.

    The gradient of -log p(answer) (with `wrong`: of logit(wrong) - logit(answer)) at a matrix is sum_i x_i^T delta_i
    over tokens i, x_i what it reads and delta_i = d loss / d (x_i W); each prompt's loss is its own. One forward and
    one backward pass per batch, no weight gradient (`gradient_factors` keeps the factors themselves).
    Returns Dataset[prompt, matrix, layer, pos]: `x` and `delta`, the lengths of both; `relative_update`, that of their
    outer product, 1 at the prompt's largest of this matrix over all layers and tokens; `target_rank` of the answer, 0 =
    most probable, V - 1 = least (a random vector gives (V - 1) / 2 on average over all answers); `word`, how the cell
    is read: the most probable token of x, or the least probable of delta, by the coordinate `side`; and [.., rank]
    `top_token`, `bottom_token`, the most and the least probable in order, with the texts `top_word`, `bottom_word`.
    `part`[matrix, layer] names the sublayer of each matrix, `token` is the text of every token. Padding holds NaN, -1
    and "". Where the update of a token is no larger than `threshold` times the largest of its prompt and matrix, ids
    and ranks are -1 and the word is "no update": even zero projects to some tokens, those of the final norm's beta.
    matrices: of W_in, W_gate, W_out, W_Q, W_K, W_V, W_O; None = all that the model has (of a mixture of experts:
    attention only).
    projection: the vector v as the model would read it out, "final_norm" N_f(v) W_U + b_U with gamma and beta;
    "normalised" the same of v / ||v||, so that neither eps nor beta decides; "raw" v W_U alone. Vocabulary logits are
    streamed.
    Caveats: a first-order picture of one SGD step, no optimiser's statistics; it shows where the loss would change the
    weights, not where the model keeps what it knows.
    Errors: ValueError for answers that are not one token of the vocabulary, matrices the model does not have, cross-
    attention, no logits, and edits of what a matrix gives; IndexError for a layer that does not exist.

    Example:
        >>> found = backward_lens(model, prompt, " Mary", matrices=["W_in", "W_out"])
        >>> found.word.sel(matrix="W_out", layer=1).values[0, -1]
        >>> interp.frame(found).query("matrix == 'W_out'").nlargest(3, "relative_update")
    """
    question = BackwardLens(answer, wrong, matrices, layers, top, projection, threshold)
    return answered(question, model, data, edits=edits, prepend_bos=prepend_bos, batch_size=batch_size)


def _compute(trace: Trace, batch: Batch, model: Transformer, asked: BackwardLens) -> Mapping[str, Tensor]:
    """Every reading of every matrix `[b matrix layer p ...]`."""
    found = factors(model, batch, asked.matrices, asked.layers)
    read_out = ReadOut(model, asked.projection)
    by_matrix = [
        _of_matrix(found, matrix, layers, read_out, asked) for matrix, layers in found.recorded().items()
    ]
    values = {name: torch.stack([each[name] for each in by_matrix], 1) for name in by_matrix[0]}
    return values | {"token": batch.token_ids}


@torch.no_grad()
def _of_matrix(
    found: GradientFactors, matrix: Matrix, layers: Sequence[int], read_out: ReadOut, asked: BackwardLens
) -> dict[str, Tensor]:
    """The readings of one matrix, `[b layer p ...]`."""
    values = norms(found, matrix, layers)
    updated = values["relative_update"] > asked.threshold
    vectors = torch.stack([found.in_stream(layer, matrix) for layer in layers], 1)
    assert found.batch.answer is not None
    answers = found.batch.answer[:, None, None].expand(updated.shape)[updated]
    said = _read_off(
        found.model, read_out(vectors[updated]), answers, asked.top, biased=asked.projection != "raw"
    )
    for name, ids in said.items():
        values[name] = torch.full((*updated.shape, *ids.shape[1:]), -1, device=ids.device)
        values[name][updated] = ids
    return values


def norms(found: GradientFactors, matrix: Matrix, layers: Sequence[int]) -> dict[str, Float[Tensor, "b l p"]]:
    """Lengths of `x` and `delta`, and that of their outer product relative to the prompt's largest; NaN at padding."""
    pairs, hidden = [found[full_name(layer, matrix)] for layer in layers], ~found.batch.real[:, None]
    x, delta = (
        torch.stack([wide(pair[side]).norm(dim=-1) for pair in pairs], 1).masked_fill(hidden, torch.nan)
        for side in (0, 1)
    )
    size = x * delta
    largest = size.nan_to_num(0.0).amax((1, 2), keepdim=True)
    tiny = torch.finfo(size.dtype).tiny
    return {"x": x, "delta": delta, "relative_update": size / largest.clamp_min(tiny)}


@dataclass(frozen=True)
class ReadOut:
    """What stands between a vector of the stream and the unembedding."""

    model: Transformer
    projection: Projection

    def __call__(self, vectors: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """The vectors as the unembedding reads them."""
        v = wide(vectors)
        if self.projection == "raw":
            return v
        if self.projection == "normalised":
            v = v / v.norm(dim=-1, keepdim=True)
        norm, head = self.model.ln_final, self.model.mlm_head
        v = norm.linear(v, norm.scale(v))
        return v if head is None else wide(head(v.to(self.model.dtype)))


def _read_off(
    model: Transformer, rows: Float[Tensor, "n d"], answers: Int[Tensor, "n"], top: int, *, biased: bool
) -> dict[str, Tensor]:
    """The most and least probable tokens of each row, in order, and the rank of its answer; a tile at a time."""
    weights = Weights(model)
    bias = weights.b_U if biased and model.config.unembed_bias else None
    best, worst = (torch.empty(len(rows), top, dtype=torch.int64, device=rows.device) for _ in range(2))
    rank = torch.empty(len(rows), dtype=torch.int64, device=rows.device)
    for first, logits in row_tiles(rows, weights.W_U):
        if bias is not None:
            logits += bias
        here = slice(first, first + len(logits))
        best[here], worst[here] = logits.topk(top).indices, logits.topk(top, largest=False).indices
        own = logits.gather(1, answers[here, None])
        rank[here] = (logits > own).sum(-1)
    return {"target_rank": rank, "top_token": best, "bottom_token": worst}


def _finish(merged: Partial, asked: BackwardLens, config: ModelConfig, text: Text) -> xr.Dataset:
    assert isinstance(merged, Rows)
    rows = dict(merged.rows)
    token = text.token_words(rows.pop("token"))
    every = chosen(config, asked.matrices, asked.layers)
    matrices = list(dict.fromkeys(matrix for _, matrix in every))
    layers = list(dict.fromkeys(layer for layer, _ in every))
    sides = ["delta" if matrix in WRITERS else "x" for matrix in matrices]
    parts = [[str(part_of(layer, matrix)) for layer in layers] for matrix in matrices]
    found = labelled(
        asked.name,
        {name: ((*_CELL, "rank")[: value.ndim], value) for name, value in rows.items()},
        coords={
            "matrix": matrices, "layer": layers, "side": (("matrix",), sides), "part": (("matrix", "layer"), parts),
            "token": token,
        },
        units={"x": "norm", "delta": "norm", "relative_update": "share of the prompt's largest"},
        attrs={
            "projection": asked.projection, "threshold": asked.threshold,
            "rank": f"0 = most probable, {config.d_vocab - 1} = least",
            "null": f"target_rank: {(config.d_vocab - 1) / 2}",
        },
    )  # fmt: skip
    for end in ("top", "bottom"):
        tokens = found[f"{end}_token"]
        found[f"{end}_word"] = tokens.dims, text.words(tokens.values)
    extreme = np.where(
        (found.side == "delta").values[:, None, None],
        found.bottom_word.values[..., 0],
        found.top_word.values[..., 0],
    )
    silent = np.where(found.x.isnull(), "", NO_UPDATE)
    return found.assign(word=(_CELL, np.where(found.target_rank < 0, silent, extreme)))
