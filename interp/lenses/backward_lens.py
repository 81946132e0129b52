"""The backward lens: one training step towards an answer, read as tokens at each matrix and each token of the prompt.

The gradient of a matrix is sum_i x_i^T delta_i over tokens. One side of each outer product lives in the residual
stream: x for matrices that read it (W_in, W_gate, W_Q, W_K, W_V), delta for those that write it (W_out, W_O). That
vector is projected on the vocabulary: read the MOST probable tokens of x, and the LEAST probable of delta, because the
step subtracts it (Katz, Belinkov, Geva, Wolf 2024, "Backward Lens", EMNLP, arXiv:2402.12865). How many directions a
gradient has, and how alike those of two layers are, comes from the same factors (section 4 there).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from jaxtyping import Float, Int, Real
from torch import Tensor

from interp.core.factored import FactoredMatrix
from interp.core.kinds import listed
from interp.core.results import labelled
from interp.core.stats import Partial, Rows, upcast
from interp.core.tiles import row_tiles
from interp.data.answers import AnswerTokens
from interp.data.batch import Answers, Batch
from interp.data.text import Text
from interp.lenses.factors import (
    WRITERS,
    GradientFactors,
    LensMatrix,
    check_differentiable,
    chosen,
    factor_steps,
    full_name,
    part_of,
    present,
)
from interp.model.config import ModelConfig
from interp.model.transformer import Transformer
from interp.model.weights import Weights
from interp.passes.answer_tokens import by_answer_token
from interp.passes.duration import announce_logits
from interp.passes.needs import Steps
from interp.passes.observe import Subject
from interp.passes.question import ByRow, Question
from interp.passes.rules import Rules, under_rules
from interp.runs.functions import of_data

if TYPE_CHECKING:
    import xarray as xr

Projection = Literal["normalised", "final_norm", "raw"]
NO_UPDATE = "no update"
ELSEWHERE: tuple[LensMatrix, ...] = ("cross_attn.W_K", "cross_attn.W_V")
"""Matrices that read the encoder's stream, at the tokens of the source."""
THRESHOLD = 1e-6
"""Share of a prompt's largest update, over layers and tokens of a matrix, below which a cell counts as not updated."""
_CELL = ("prompt", "matrix", "layer", "pos")


@dataclass(frozen=True, eq=False)
class _OfGradients(Question):
    """Base of the questions about factors of weight gradients: its fields choose the loss, the matrices and the layers.

    Args:
        answer: what is trained towards, as text or id, one for all prompts or one for each; None: that of the data.
            Each token of an answer of several is a training step of its own, along the dim `answer_token`.
        wrong: token trained away from; None: none. With it the loss is the difference of both logits.
        matrices: which matrices of each layer, of `interp.lenses.factors.MATRICES`; None: all that have factors.
        layers: which layers; None: all.
        rules: backward rules under which the gradient is taken, or the name of a preset; none: the gradient as it is.
    """

    answer: Answers | None = None
    wrong: Answers | None = None
    _: KW_ONLY
    matrices: Sequence[LensMatrix] | None = None
    layers: Sequence[int] | None = None
    rules: Rules = field(default=(), kw_only=True)

    def bind(self, model: Subject) -> ByRow:
        """A forward and a backward pass per batch, reduced to numbers of the factors of each matrix."""
        config = under_rules(model.transformer, self.rules).config
        check_differentiable(model.transformer, chosen(config, self.wanted(config), self.layers))
        question = ByRow(
            self.name,
            partial(_compute, question=self),
            Rows,
            partial(_finish, question=self, config=config, text=model.text),
            answers=AnswerTokens.of(model.text, self.answer, self.wrong, several=True),
        )
        return by_answer_token(question, model.text)

    def wanted(self, config: ModelConfig) -> Sequence[LensMatrix] | None:
        """Matrices whose gradients the question takes; None: all that have factors.

        Raises ValueError for W_K and W_V of cross-attention, which read the encoder's stream at source positions.
        """
        if not config.cross_attention:
            return self.matrices
        if elsewhere := [matrix for matrix in self.matrices or () if matrix in ELSEWHERE]:
            raise ValueError(
                f"{elsewhere[0]} reads the encoder's stream, which the unembedding does not read; `gradient_factors` "
                "has its vectors, `gradient_rank` its rank"
            )
        if self.matrices is not None:
            return self.matrices
        return [matrix for matrix in present(config, self.layers) if matrix not in ELSEWHERE]

    def of_matrix(
        self, factors: GradientFactors, matrix: LensMatrix, layers: Sequence[int]
    ) -> Mapping[str, Real[Tensor, "b l ..."]]:
        """Result values of one matrix in the given layers, computed from its gradient factors, by name."""
        raise NotImplementedError

    def labelled(
        self, rows: Mapping[str, Tensor], coords: Mapping[str, object], config: ModelConfig, text: Text
    ) -> xr.Dataset:
        """The Dataset of all prompts: the values of `of_matrix`, and the text of each prompt's tokens as `token`."""
        raise NotImplementedError


def _compute(model: Transformer, batch: Batch, question: _OfGradients) -> Steps[Mapping[str, Tensor]]:
    """Values of `question.of_matrix` for every matrix, `[b matrix layer ...]`, and the token ids `[b p]`."""
    matrices = question.wanted(model.config)
    factors = yield from factor_steps(model, batch, matrices, question.layers, rules=question.rules)
    by_matrix = [question.of_matrix(factors, matrix, layers) for matrix, layers in factors.recorded().items()]
    values = {name: torch.stack([numbers[name] for numbers in by_matrix], 1) for name in by_matrix[0]}
    return values | {"token": batch.token_ids}


def _finish(merged: Partial, question: _OfGradients, config: ModelConfig, text: Text) -> xr.Dataset:
    """The Dataset of all prompts, with the matrices, layers and sublayers as coordinates."""
    assert isinstance(merged, Rows)
    layers_and_matrices = chosen(config, question.wanted(config), question.layers)
    layers, matrices = (list(dict.fromkeys(names)) for names in zip(*layers_and_matrices, strict=True))
    parts = [[str(part_of(layer, matrix)) for layer in layers] for matrix in matrices]
    coords = {"matrix": matrices, "layer": layers, "part": (("matrix", "layer"), parts)}
    return question.labelled(merged.rows, coords, config, text)


@dataclass(frozen=True, eq=False)
class BackwardLens(_OfGradients):
    """Tokens that a training step towards an answer would write into each matrix, read off its gradient's factors.

    A step adds to each matrix a sum of pairs of vectors, one per token; each vector can be read as tokens.

    The gradient of -log p(answer) at a matrix is sum_i x_i^T delta_i over tokens i, x_i what it reads and delta_i = d
    loss / d (x_i W). One side of each product lives in the residual stream: x for matrices that read it, delta for
    those that write it. That vector is projected on the vocabulary: read the most probable tokens of x, and the least
    probable of delta, because the step subtracts it. Each prompt's loss is its own. One forward and one backward pass
    per batch, no weight gradient.

    Args:
        data: prompts, token ids, a batch, files or a stream of any size.
        answer: what is trained towards, as text or id, one for all prompts or one for each; None: that of the data.
            Each token of an answer of several is a step of its own along the dim `answer_token`, NaN beyond its end.
        wrong: token trained away from; None: none. With it the loss is logit(wrong) - logit(answer).
        matrices: which matrices, of W_in, W_gate, W_out, W_Q, W_K, W_V, W_O; None: all that the model has (of a mixture
            of experts: attention only). In Macaron blocks also those of the MLP before attention, "mlp_before.W_in" and
            so on; in the decoder of an encoder-decoder, on `model.given(source, target)`, also "cross_attn.W_Q" and
            "cross_attn.W_O".
        layers: which layers; None: all.
        rules: backward rules under which gradients are taken, or a preset of them, as in `interp.attribution_patch`;
            none: the gradient as it is. With rules they are no gradients of a loss, but what relevance propagation
            would send back.
        top: how many of the most and of the least probable tokens are listed; None: 5, or all of fewer.
        projection: how a vector v is read in the vocabulary: "normalised", "final_norm" or "raw". "final_norm": as the
            model would read it out, N_f(v) W_U + b_U with gamma and beta; "normalised": that of v / ||v||, so that
            neither eps nor beta decides; "raw": v W_U alone.
        threshold: share of a prompt's largest update of a matrix up to which a token counts as not updated; in half
            precision at least a quarter of eps, the rounding of a pass.

    Returns:
        Dataset[prompt, matrix, layer, pos]. Coordinates: `part` [matrix, layer], the sublayer of each matrix; `side`
        [matrix], x or delta; `token`, the text of every token. Padding holds NaN, -1 and "". Where a token counts as
        not updated, ids and ranks are -1 and the word is "no update": even zero projects to some tokens, those of the
        final norm's beta.

        - `x`, `delta`: lengths of both vectors.
        - `relative_update`: length of their outer product, 1 at the prompt's largest of this matrix over all layers and
          tokens.
        - `target_rank`: rank of the answer, 0 = most probable, V - 1 = least. An unrelated vector gives (V - 1) / 2 on
          average over all answers, which is a level and not chance: the answer is the least probable of the delta of
          W_out and W_O in a model that nobody trained too.
        - `word`: how the cell is read: the most probable token of x, or the least probable of delta.
        - `top_token`, `bottom_token` [prompt, matrix, layer, pos, rank]: the most and the least probable tokens in
          order, with the texts `top_word`, `bottom_word`.

    Raises:
        ValueError: answers outside the vocabulary, matrices the model does not have, W_K and W_V of
            cross-attention (which read the encoder's stream, and that the unembedding does not), no logits, edits of
            what a matrix gives, and a threshold outside [0, 1).
        IndexError: a layer that does not exist.

    Caveats:
        A first-order picture of one SGD step, without an optimiser's statistics; it shows where the loss would change
        the weights, not where the model keeps what it knows.

    Memory:
        Logits over the vocabulary are computed tile by tile.

    Source:
        Katz, Belinkov, Geva, Wolf 2024, "Backward Lens", EMNLP, arXiv:2402.12865.

    See Also:
        `gradient_factors`: the factors themselves. `gradient_rank`, `gradient_cosines`: the shape of the gradients.

    Example:
        >>> found = backward_lens(model, prompt, " Mary", matrices=["W_in", "W_out"])
        >>> found.word.sel(matrix="W_out", layer=1).values[0, -1]
        >>> interp.frame(found).query("matrix == 'W_out'").nlargest(3, "relative_update")
    """

    _: KW_ONLY
    top: int | None = None
    projection: Projection = "normalised"
    threshold: float = THRESHOLD

    def bind(self, model: Subject) -> ByRow:
        """A forward and a backward pass per batch, and the factors projected on the vocabulary."""
        listed(self.top, 5, model.transformer.config.n_outputs)
        if not 0 <= self.threshold < 1:
            raise ValueError(
                f"threshold, a share of the largest update, must be in [0, 1), got {self.threshold}"
            )
        return super().bind(model)

    @torch.no_grad()
    def of_matrix(
        self, factors: GradientFactors, matrix: LensMatrix, layers: Sequence[int]
    ) -> Mapping[str, Real[Tensor, "b l ..."]]:
        """Lengths of x and delta, the answer's rank, and the most and least probable tokens, `[b layer p ...]`."""
        read = len(factors.recorded()) * len(layers) * factors.batch.tokens.numel()
        announce_logits(self.name, read, factors.model.config, factors.model.device)
        values = norms(factors, matrix, layers)
        rounding = torch.finfo(factors.model.dtype).eps / 4  # above the default threshold in half precision
        updated = values["relative_update"] > max(self.threshold, rounding)
        vectors = torch.stack([factors.in_stream(layer, matrix) for layer in layers], 1)
        assert factors.batch.answer is not None
        cells = updated.nonzero().unbind(1)  # one GPU synchronisation for all uses of the indices
        for name, ids in _ranked_tokens(
            factors.model, vectors[cells], factors.batch.answer[cells[0]], self
        ).items():
            values[name] = torch.full((*updated.shape, *ids.shape[1:]), -1, device=ids.device)
            values[name][cells] = ids
        return values

    def labelled(
        self, rows: Mapping[str, Tensor], coords: Mapping[str, object], config: ModelConfig, text: Text
    ) -> xr.Dataset:
        """The words of every cell."""
        matrices = coords["matrix"]
        assert isinstance(matrices, list)
        sides = ["delta" if matrix in WRITERS else "x" for matrix in matrices]
        result = labelled(
            self.name,
            {name: ((*_CELL, "rank")[: value.ndim], value) for name, value in rows.items() if name != "token"},
            coords={"side": (("matrix",), sides), **coords, "token": text.token_words(rows["token"])},
            units={"x": "norm", "delta": "norm", "relative_update": "share of the prompt's largest"},
            attrs={
                "projection": self.projection, "threshold": self.threshold,
                "rank": f"0 = most probable, {config.n_outputs - 1} = least",
                "null": f"target_rank: {(config.n_outputs - 1) / 2}", "n_vocab": config.n_outputs,
            },
        )  # fmt: skip
        result = text.of_outputs.worded(result, top_word="top_token", bottom_word="bottom_token")
        writes = (result.side == "delta").values[:, None, None]
        extreme = np.where(writes, result.bottom_word.values[..., 0], result.top_word.values[..., 0])
        silent = np.where(result.x.isnull(), "", NO_UPDATE)
        return result.assign(word=(_CELL, np.where(result.target_rank < 0, silent, extreme)))


@dataclass(frozen=True, eq=False)
class GradientRank(_OfGradients):
    """Rank of each prompt's weight gradients X^T Delta: how many singular values are above the tolerance.

    Args:
        data: prompts, token ids, a batch, files or a stream of any size.
        answer: what is trained towards, as text or id, one for all prompts or one for each; None: that of the data.
            Each token of an answer of several is a training step of its own, along the dim `answer_token`.
        wrong: token trained away from; None: none. With it the loss is logit(wrong) - logit(answer).
        matrices: which matrices of each layer, as in `backward_lens`, and "cross_attn.W_K" and "cross_attn.W_V"; None:
            all that have factors.
        layers: which layers; None: all.
        rules: backward rules under which gradients are taken, or the name of a preset; none: the gradient as it is.
        tolerance: share of the largest singular value above which a singular value counts; None: max(rows, columns)
            times the epsilon of the model's dtype, as `torch.linalg.matrix_rank` of the gradient takes it.

    Returns:
        Dataset[prompt, matrix, layer]:

        - `value`: the rank, from the factors alone in float64. In the last block only the last token reaches the loss,
          so that the gradient of all but W_K and W_V has rank 1 there.
        - `tokens` [prompt]: number of tokens, its upper bound. Of cross-attention's W_K and W_V the tokens of the
          source bound it.

    Raises:
        ValueError: as `backward_lens`; a tolerance outside [0, 1].
        IndexError: a layer that does not exist.

    Source:
        Katz et al. 2024, "Backward Lens", section 4.

    See Also:
        `backward_lens`: the same gradients as tokens. `gradient_cosines`: how alike those of two layers are.

    Example:
        >>> int(gradient_rank(model, prompt, " Mary", matrices=["W_out"]).value[0, 0, -1])
        1
    """

    _: KW_ONLY
    tolerance: float | None = None

    def bind(self, model: Subject) -> ByRow:
        """A forward and a backward pass per batch, and the singular values of the factors."""
        if self.tolerance is not None and not 0 <= self.tolerance <= 1:
            raise ValueError(
                f"tolerance, a share of the largest singular value, must be in [0, 1], got {self.tolerance}"
            )
        return super().bind(model)

    def wanted(self, config: ModelConfig) -> Sequence[LensMatrix] | None:
        """The named matrices, also W_K and W_V of cross-attention: a rank is not projected on the vocabulary."""
        return self.matrices

    def of_matrix(
        self, factors: GradientFactors, matrix: LensMatrix, layers: Sequence[int]
    ) -> Mapping[str, Int[Tensor, "b l"]]:
        """The rank in every layer."""
        ranks = []
        for layer in layers:
            x, delta = factors[full_name(layer, matrix)]
            cut = self.tolerance
            cut = max(x.shape[-1], delta.shape[-1]) * torch.finfo(x.dtype).eps if cut is None else cut
            _, s, _ = FactoredMatrix(x.double().mT, delta.double()).svd()
            ranks.append((s > cut * s[:, :1]).sum(-1))
        return {"value": torch.stack(ranks, 1)}

    def labelled(
        self, rows: Mapping[str, Tensor], coords: Mapping[str, object], config: ModelConfig, text: Text
    ) -> xr.Dataset:
        """The ranks, and the numbers of tokens that bound them."""
        tokens = (rows["token"] >= 0).sum(1)
        return labelled(
            self.name,
            {"value": (("prompt", "matrix", "layer"), rows["value"]), "tokens": (("prompt",), tokens)},
            coords=coords,
            attrs={"unit": "singular values above the tolerance"},
        )


@dataclass(frozen=True, eq=False)
class GradientCosines(_OfGradients):
    """Cosine between two layers' gradient vectors in the residual stream, at the last token.

    Args:
        data: prompts, token ids, a batch, files or a stream of any size.
        answer: what is trained towards, as text or id, one for all prompts or one for each; None: that of the data.
            Each token of an answer of several is a step of its own along the dim `answer_token`, NaN beyond its end.
        wrong: token trained away from; None: none. With it the loss is logit(wrong) - logit(answer).
        matrices: which matrices of each layer, as in `backward_lens`; None: all that have factors.
        layers: which layers; None: all.
        rules: backward rules under which gradients are taken, or the name of a preset; none: the gradient as it is.

    Returns:
        Dataset[prompt, matrix, layer, other_layer]:

        - `value`: cosine between -1 and 1, of delta for W_out and W_O, of x for the others: both live in the stream,
          where layers can be compared. NaN where a vector is zero.

    Raises:
        ValueError: as `backward_lens`.
        IndexError: a layer that does not exist.

    Caveat:
        There is no null: unrelated directions have 0 +- 1 / sqrt(d_model), but the stream carries a gradient past the
        layers, so that neighbours have about .9 in a model that nobody trained.

    Source:
        Katz et al. 2024, "Backward Lens", section 4.

    See Also:
        `backward_lens`: the same vectors as tokens. `gradient_rank`: how many directions a gradient has.

    Example:
        >>> found = gradient_cosines(model, prompt, " Mary", matrices=["W_out"])
        >>> found.value.sel(matrix="W_out", layer=0, other_layer=1)
    """

    def of_matrix(
        self, factors: GradientFactors, matrix: LensMatrix, layers: Sequence[int]
    ) -> Mapping[str, Float[Tensor, "b l ..."]]:
        """The cosines of all pairs of layers at the last token."""
        last = factors.batch.last()
        rows = torch.arange(len(last), device=last.device)
        vectors = torch.stack([upcast(factors.in_stream(layer, matrix)[rows, last]) for layer in layers], 1)
        unit = vectors / vectors.norm(dim=-1, keepdim=True)
        return {"value": unit @ unit.mT}

    def labelled(
        self, rows: Mapping[str, Tensor], coords: Mapping[str, object], config: ModelConfig, text: Text
    ) -> xr.Dataset:
        """The cosines, layer by layer."""
        return labelled(
            self.name,
            {"value": (("prompt", "matrix", "layer", "other_layer"), rows["value"])},
            coords={**coords, "other_layer": coords["layer"]},
            units="cosine",
        )


backward_lens = of_data(BackwardLens)


gradient_rank = of_data(GradientRank)


gradient_cosines = of_data(GradientCosines)


def norms(
    factors: GradientFactors, matrix: LensMatrix, layers: Sequence[int]
) -> dict[str, Float[Tensor, "b l p"]]:
    """Lengths of `x` and `delta`, and of their outer product relative to the prompt's largest; NaN at padding."""
    pairs, padding = [factors[full_name(layer, matrix)] for layer in layers], ~factors.batch.real[:, None]
    x, delta = (
        torch.stack([upcast(pair[side]).norm(dim=-1) for pair in pairs], 1).masked_fill(padding, torch.nan)
        for side in (0, 1)
    )
    size = x * delta
    largest = size.nan_to_num(0.0).amax((1, 2), keepdim=True)
    tiny = torch.finfo(size.dtype).tiny
    return {"x": x, "delta": delta, "relative_update": size / largest.clamp_min(tiny)}


def _ranked_tokens(
    model: Transformer, vectors: Float[Tensor, "n d"], answers: Int[Tensor, "n"], question: BackwardLens
) -> dict[str, Tensor]:
    """Most and least probable tokens of each vector `[n top]` and rank of its answer `[n]`, in tiles of rows."""
    weights, top = Weights(model), listed(question.top, 5, model.config.n_outputs)
    bias = weights.b_U if question.projection != "raw" and model.config.unembed_bias else None
    rank = torch.empty(len(vectors), dtype=torch.int64, device=vectors.device)
    best, worst = (rank.new_empty(len(vectors), top) for _ in range(2))
    for first, logits in row_tiles(_unembedding_inputs(vectors, model, question.projection), weights.W_U):
        if bias is not None:
            logits += bias
        block = slice(first, first + len(logits))
        best[block], worst[block] = logits.topk(top).indices, logits.topk(top, largest=False).indices
        rank[block] = (logits > logits.gather(1, answers[block, None])).sum(-1)
    return {"target_rank": rank, "top_token": best, "bottom_token": worst}


def _unembedding_inputs(
    vectors: Float[Tensor, "n d"], model: Transformer, projection: Projection
) -> Float[Tensor, "n d"]:
    """The input of the unembedding for stream vectors: they pass the final norm as `projection` says."""
    v = upcast(vectors)
    if projection == "raw":
        return v
    if projection == "normalised":
        v = v / v.norm(dim=-1, keepdim=True)
    norm, head = model.ln_final, model.mlm_head
    v = norm.linear(v, norm.scale(v))
    return v if head is None else upcast(head(v.to(model.dtype)))
