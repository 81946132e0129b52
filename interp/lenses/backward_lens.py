"""The backward lens: what one training step towards a target would write into each matrix, token by token, in words.

The gradient of a matrix is sum_i x_i^T delta_i over tokens. One side of each outer product lives in the residual
stream: x for matrices that read it (W_in, W_gate, W_Q, W_K, W_V), delta for those that write it (W_out, W_O). That
vector is projected on the vocabulary: read the MOST probable tokens of x, and the LEAST probable of delta, because the
step subtracts it (Katz, Belinkov, Geva, Wolf 2024, "Backward Lens", EMNLP, arXiv:2402.12865).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.core.factored import FactoredMatrix
from interp.core.precision import wide
from interp.core.results import frame, labelled
from interp.core.tiles import row_tiles
from interp.core.viewer import Viewable, fitted
from interp.data.batch import Batch
from interp.data.text import Answers, Prompts, Text
from interp.lenses.factors import WRITERS, Factors, Matrix, answer_loss, factors, full_name
from interp.model.transformer import Transformer
from interp.model.weights import Weights
from interp.passes.observe import Subject

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

Projection = Literal["normalised", "final_norm", "raw"]
NO_UPDATE = "no update"
THRESHOLD = 1e-6
"""Share of a prompt's largest update, over layers and tokens of a matrix, below which a cell counts as not updated."""
SHOWN = 5
"""Targets that the text of a lens names."""
_CELL = ("prompt", "layer", "pos")


def backward_lens(
    model: Subject,
    prompts: Prompts,
    targets: Answers,
    *,
    wrong: Answers | None = None,
    layers: Sequence[int] | None = None,
    matrices: Sequence[Matrix] | None = None,
    prepend_bos: bool = True,
    batch_size: int = 32,
) -> "BackwardLens":
    """The factors x and delta of each weight gradient of -log p(target) at the last token, and their readings.

    delta_i = d loss / d (x_i W), each prompt's loss its own; one forward and one backward pass per batch, no weight
    gradient. With `wrong` the loss is logit(wrong) - logit(target). None for `layers` or `matrices`: all that the model
    has (of a mixture of experts: attention only).
    Caveats: a first-order picture of one SGD step, no optimiser's statistics; it shows where the loss would change the
    weights, not where the model keeps what it knows.
    Errors: ValueError for targets that are not one token of the vocabulary, matrices the model does not have,
    cross-attention, no logits; IndexError for a layer that does not exist.

    Example:
        >>> lens = backward_lens(model, prompt, " Mary", matrices=["W_in", "W_out"])
        >>> x, delta = lens.factors["blocks.1.mlp.W_out"]
        >>> int(lens.gradient_rank("W_out").gradient_rank[0, -1])
        1
    """
    batch = model.text.batch(prompts, prepend_bos=prepend_bos).to(model.transformer.device)
    answer = model.text.targets(targets, len(batch)).to(batch.tokens.device)
    foils = None if wrong is None else model.text.targets(wrong, len(batch)).to(batch.tokens.device)
    batch = batch.with_answers(answer, foils)
    parts = [factors(model.transformer, part, matrices, layers) for part in batch.split(batch_size)]
    return BackwardLens(_joined(model.transformer, batch, parts), model.text)


def _joined(model: Transformer, batch: Batch, parts: Sequence[Factors]) -> Factors:
    """The factors of consecutive parts of a batch."""
    if len(parts) == 1:
        return parts[0]
    pairs = {name: (_rows(parts, name, 0), _rows(parts, name, 1)) for name in parts[0]}
    return Factors(model, batch, pairs, answer_loss(batch))


def _rows(parts: Sequence[Factors], name: str, side: int) -> Float[Tensor, "rows p _"]:
    return torch.cat([part[name][side] for part in parts])


@dataclass(frozen=True, eq=False)
class BackwardLens(Viewable):
    """The factors of every weight gradient of a batch of prompts, and what can be read off them.

    Results have the dims prompt, layer (those recorded) and pos (columns of the batch); padding holds NaN or -1. Token
    ids and ranks are -1, words "no update", where the update of a token is no larger than `threshold` times the
    largest of its prompt and matrix: even zero projects to some tokens, those of the final norm's beta. The size of an
    update is ||x_i|| ||delta_i||, the norm of the outer product.
    """

    factors: Factors
    text: Text

    def __repr__(self) -> str:
        return f"BackwardLens({self.factors})"

    def __str__(self) -> str:
        rows, n = self.batch.tokens.shape
        targets = ", ".join(map(repr, self.text.pieces(self._answers().tolist()[:SHOWN])))
        matrices = ", ".join(dict.fromkeys(name.split(".")[-1] for name in self.factors))
        lines = [
            "BackwardLens: one training step towards a target, read through the vocabulary",
            f"  prompts: {rows}, of up to {n} tokens",
            f"  targets: {targets}{', ...' if rows > SHOWN else ''}",
            f"  matrices: {matrices} ({len(self.factors)} in all)",
        ]
        return fitted(lines)

    @property
    def batch(self) -> Batch:
        """The prompts, with their targets."""
        return self.factors.batch

    def norms(self, matrix: Matrix = "W_out") -> "xr.Dataset":
        """Lengths of `x` and `delta` of every token, and of their outer product: `relative_update`.

        `relative_update` is 1 at the prompt's largest of this matrix, over all layers and tokens. Dataset[prompt,
        layer, pos]; `last[prompt]` is the column of the last token.
        """
        values: dict[str, tuple[Sequence[str], Tensor]]
        values = {name: (_CELL, value) for name, value in self._norms(matrix).items()}
        values["last"] = ("prompt",), self.batch.last()
        return self._labelled("backward_lens_norms", matrix, values, unit="norm")

    def project(
        self,
        matrix: Matrix = "W_out",
        *,
        k: int = 5,
        projection: Projection = "normalised",
        threshold: float = THRESHOLD,
    ) -> "xr.Dataset":
        """Every token's vector on the vocabulary: `top_token`, `bottom_token` [.., rank], `target_rank`, and `norms`.

        `top_word`, `bottom_word` are their texts.

        Logits of x (of W_out, W_O: of delta) as the model would read it out: "final_norm" N_f(v) W_U + b_U with gamma
        and beta; "normalised" the same of v / ||v||, so that neither eps nor beta decides; "raw" v W_U alone. Rank 0 of
        `top_token` is the most probable, of `bottom_token` the least. `target_rank` counts the tokens above the target:
        0 = most probable, V - 1 = least; a random vector gives (V - 1) / 2 on average over all targets, less or more
        for one that beta favours or not ("normalised", "final_norm"). Vocabulary logits are streamed.
        Errors: ValueError for k outside the vocabulary, a threshold or projection that is none, KeyError for a matrix
        that was not recorded.
        """
        rows, n_vocab = self._readout(projection), self.factors.model.config.d_vocab
        if not 1 <= k <= n_vocab:
            raise ValueError(f"k must be in [1, {n_vocab}], got {k}")
        if not 0 <= threshold < 1:
            raise ValueError(f"threshold, a share of the largest update, must be in [0, 1), got {threshold}")
        norms = self._norms(matrix)
        updated = norms["relative_update"] > threshold
        vectors = torch.stack([self._side(layer, matrix) for layer in self.layers(matrix)], 1)
        answers = self._answers()[:, None, None].expand(updated.shape)[updated]
        found = _read_off(self.factors.model, rows(vectors[updated]), answers, k, biased=projection != "raw")
        values: dict[str, tuple[Sequence[str], Tensor]] = {name: (_CELL, v) for name, v in norms.items()}
        for name, ids in found.items():
            grid = torch.full((*updated.shape, *ids.shape[1:]), -1, device=ids.device)
            grid[updated] = ids
            values[name] = ((*_CELL, "rank")[: grid.ndim], grid)
        values["last"] = (("prompt",), self.batch.last())
        attrs = {
            "projection": projection,
            "threshold": threshold,
            "rank": f"0 = most probable, {n_vocab - 1} = least",
        }
        result = self._labelled(
            "backward_lens", matrix, values, **attrs, null=f"target_rank: {(n_vocab - 1) / 2}"
        )
        for side in ("top", "bottom"):
            tokens = result[f"{side}_token"]
            result[f"{side}_word"] = tokens.dims, self.text.words(tokens.values).astype(str)
        return result.assign_coords(token=self.text.token_words(self.batch))

    def ranks(
        self,
        matrix: Matrix = "W_out",
        *,
        projection: Projection = "normalised",
        threshold: float = THRESHOLD,
    ) -> "xr.Dataset":
        """`target_rank` alone, as in `project`: 0 = most probable, V - 1 = least, -1 = no update."""
        return self.project(matrix, k=1, projection=projection, threshold=threshold)[["target_rank", "last"]]

    def table(
        self,
        matrix: Matrix = "W_out",
        *,
        k: int = 5,
        projection: Projection = "normalised",
        threshold: float = THRESHOLD,
    ) -> "pd.DataFrame":
        """The tidy table: one row per prompt, layer and token, with norms, `top`, `bottom` (words) and `target_rank`.

        Words are joined by " | ", the extreme one first; both say "no update" where there is none. Padding has no rows.
        """
        found = self.project(matrix, k=k, projection=projection, threshold=threshold)
        table = frame(found[["delta", "x", "relative_update", "target_rank"]].drop_vars("token"))
        for side in ("top", "bottom"):
            ids = found[f"{side}_token"].values.reshape(-1, k).tolist()
            table[side] = [NO_UPDATE if row[0] < 0 else " | ".join(self.text.pieces(row)) for row in ids]
        pieces = [self.text.pieces(row) for row in self.batch.tokens.tolist()]
        places = zip(table["prompt"], table["pos"], strict=True)
        table.insert(3, "token", [pieces[row][pos] for row, pos in places])
        table.insert(2, "matrix", matrix)
        return table[table["delta"].notna()].reset_index(drop=True)

    def cosines(self, matrix: Matrix = "W_out") -> "xr.Dataset":
        """`cosine[prompt, layer, other_layer]` between the last token's vectors of two layers.

        Of delta for W_out and W_O, of x for the others: both live in the stream, where layers can be compared. NaN
        where a vector is zero. Null: 0, with a standard deviation of 1 / sqrt(d_model).
        """
        last = self.batch.last()
        here = torch.arange(len(last), device=last.device)
        vectors = torch.stack(
            [wide(self._side(layer, matrix)[here, last]) for layer in self.layers(matrix)], 1
        )
        unit = vectors / vectors.norm(dim=-1, keepdim=True)
        null = f"0 +- {self.factors.model.config.d_model**-0.5:.3f}"
        values = {"cosine": (("prompt", "layer", "other_layer"), unit @ unit.mT)}
        found = self._labelled("backward_lens_cosines", matrix, values, unit="cosine", null=null)
        return found.assign_coords(other_layer=found["layer"].values)

    def gradient_rank(self, matrix: Matrix = "W_out", *, tolerance: float | None = None) -> "xr.Dataset":
        """`gradient_rank[prompt, layer]` of each prompt's gradient X^T Delta, and `tokens[prompt]`, its upper bound.

        The number of singular values above `tolerance` times the largest, from the factors alone in float64. None:
        max(rows, columns) times the epsilon of the model's dtype, as `torch.linalg.matrix_rank` of the gradient takes
        it. In the last block only the last token reaches the loss, so that the gradient of all but W_K and W_V has
        rank 1 there.
        """
        ranks = []
        for layer in self.layers(matrix):
            x, delta = self.factors[full_name(layer, matrix)]
            cut = (
                max(x.shape[-1], delta.shape[-1]) * torch.finfo(x.dtype).eps
                if tolerance is None
                else tolerance
            )
            _, s, _ = FactoredMatrix(x.double().mT, delta.double()).svd()
            ranks.append((s > cut * s[:, :1]).sum(-1))
        values = {
            "gradient_rank": (("prompt", "layer"), torch.stack(ranks, 1)),
            "tokens": (("prompt",), self.batch.lengths),
        }
        return self._labelled("gradient_rank", matrix, values, unit="singular values above the tolerance")

    def layers(self, matrix: Matrix) -> list[int]:
        """The layers in which a matrix was recorded; KeyError naming what was, if it is none."""
        names = [name.split(".") for name in self.factors]
        found = [int(name[1]) for name in names if name[-1] == matrix]
        if not found:
            known = ", ".join(dict.fromkeys(name[-1] for name in names))
            raise KeyError(f"no factors of {matrix!r} were recorded; recorded: {known}")
        return found

    def _side(self, layer: int, matrix: Matrix) -> Float[Tensor, "b p d"]:
        """The factor that lives in the residual stream."""
        return self.factors[full_name(layer, matrix)][1 if matrix in WRITERS else 0]

    def _norms(self, matrix: Matrix) -> dict[str, Float[Tensor, "b l p"]]:
        """NaN at padding, which has no update."""
        pairs = [self.factors[full_name(layer, matrix)] for layer in self.layers(matrix)]
        x, delta = (
            torch.stack([wide(pair[side]).norm(dim=-1) for pair in pairs], 1).masked_fill(
                self._padding(), torch.nan
            )
            for side in (0, 1)
        )
        size = x * delta
        largest = size.nan_to_num(0.0).amax((1, 2), keepdim=True)
        tiny = torch.finfo(size.dtype).tiny
        return {"x": x, "delta": delta, "relative_update": size / largest.clamp_min(tiny)}

    def _padding(self) -> Bool[Tensor, "b 1 p"]:
        keep = self.batch.keep
        return (
            torch.zeros_like(self.batch.tokens[:, None], dtype=torch.bool) if keep is None else ~keep[:, None]
        )

    def _answers(self) -> Int[Tensor, "b"]:
        assert self.batch.answer is not None
        return self.batch.answer

    def _readout(self, projection: Projection) -> "_Readout":
        if projection not in ("normalised", "final_norm", "raw"):
            raise ValueError(f"projection must be normalised, final_norm or raw, got {projection!r}")
        return _Readout(self.factors.model, projection)

    def _labelled(
        self,
        analysis: str,
        matrix: Matrix,
        values: Mapping[str, tuple[Sequence[str], Tensor]],
        **attrs: str | float,
    ) -> "xr.Dataset":
        projected = {"side": "delta", "read": "bottom"} if matrix in WRITERS else {"side": "x", "read": "top"}
        return labelled(
            analysis,
            values,
            coords={"layer": self.layers(matrix)},
            attrs={"matrix": matrix, **projected, **attrs},
        )


@dataclass(frozen=True)
class _Readout:
    """What stands between a vector of the stream and the unembedding."""

    model: Transformer
    projection: Projection

    def __call__(self, vectors: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        v = wide(vectors)
        if self.projection == "raw":
            return v
        if self.projection == "normalised":
            v = v / v.norm(dim=-1, keepdim=True)
        norm, head = self.model.ln_final, self.model.mlm_head
        v = norm.linear(v, norm.scale(v))
        return v if head is None else wide(head(v.to(self.model.dtype)))


def _read_off(
    model: Transformer, rows: Float[Tensor, "n d"], answers: Int[Tensor, "n"], k: int, *, biased: bool
) -> dict[str, Tensor]:
    """The k most and least probable tokens of each row, in order, and the rank of its answer; a tile at a time."""
    weights = Weights(model)
    bias = weights.b_U if biased and model.config.unembed_bias else None
    top, bottom = (torch.empty(len(rows), k, dtype=torch.int64, device=rows.device) for _ in range(2))
    rank = torch.empty(len(rows), dtype=torch.int64, device=rows.device)
    for first, logits in row_tiles(rows, weights.W_U):
        if bias is not None:
            logits += bias
        here = slice(first, first + len(logits))
        top[here], bottom[here] = logits.topk(k).indices, logits.topk(k, largest=False).indices
        own = logits.gather(1, answers[here, None])
        rank[here] = (logits > own).sum(-1)
    return {"top_token": top, "bottom_token": bottom, "target_rank": rank}
