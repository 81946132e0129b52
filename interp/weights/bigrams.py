"""The direct path, embedding to unembedding, as a bigram table, compared with that of a corpus."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.core.results import labelled
from interp.core.stats import Partial, upcast
from interp.core.tiles import row_tiles
from interp.data.batch import Batch
from interp.data.text import Text
from interp.model.tap import Trace
from interp.model.transformer import Transformer
from interp.passes.frozen import final_norm
from interp.passes.observe import Subject
from interp.passes.question import ByRow, Question, Reading
from interp.runs.functions import of_data
from interp.weights.head_circuits import Embedding, HeadCircuits
from interp.weights.token_pairs import worded

if TYPE_CHECKING:
    import xarray as xr


@dataclass(frozen=True)
class BigramTable(Question):
    """How well the direct path E W_U predicts the next token of a corpus, for every token.

    For a token a, p(. | a) are the corpus' frequencies of what follows it, and softmax(E_a W_U) is the prediction of a
    model without layers.

    Args:
        data: texts or ids, of any size; prompts and packed texts are not joined.
        folded: whether the final norm is part of the path, at each row's own scale (a softmax has a temperature). beta
            and b_U are left out.
        embedding: what a vocabulary entry puts on the stream: "token" or "effective", as in `HeadCircuits`.

    Returns:
        Dataset[token, score] over every token a that something follows; coordinates `token` and `token_id`, its text
        and id, and `unit` of each score. Scores are `kl`, KL(p(. | a) || softmax(E_a W_U)) in nats, at best 0, and
        `correlation`, Pearson's of both over the vocabulary (NaN where one of them is uniform).

        - `value`: the score of the direct path.
        - `null`: the same score of the corpus' unigram frequencies.
        - `n`: how often a is followed by a token.
        - `overall`, `null_overall` [score]: means weighted by `n`. That of `kl` under the null is the mutual
          information of neighbours.

    Raises:
        ValueError: data without two neighbouring tokens, or a model whose logits are not linear in the stream.

    Caveat:
        Rare tokens make the corpus' own frequencies too sharp, so that kl has a floor above 0.

    Source:
        Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits", section "Zero-Layer Transformers".

    See Also:
        `HeadCircuits.direct`: the table itself, as a product of thin matrices.

    Example:
        >>> result = bigram_table(model, torch.tensor([[3, 1, 3, 1, 2]]))
        >>> result.sizes["token"], result.score.values.tolist()
        (2, ['kl', 'correlation'])
    """

    of_layers: ClassVar[bool] = False

    _: KW_ONLY
    folded: bool = True
    embedding: Embedding = "token"
    of_weights: ClassVar[bool] = True

    def bind(self, model: Subject) -> ByRow:
        """Counts of neighbours per batch, no pass; the direct path at the end."""
        circuits = HeadCircuits(model, self.folded, embedding=self.embedding)
        circuits.config.require_tokens("a bigram table")
        _ = circuits.bare_unembedding  # refuses a model whose direct path is not linear
        return ByRow(
            self.name,
            Reading((), partial(_neighbour_pairs, d_vocab=circuits.config.d_vocab)),
            PairCounts,
            partial(_finish, name=self.name, circuits=circuits, text=model.text),
        )


bigram_table = of_data(BigramTable, renamed={"circuits": "model", "tokens": "data"})


@dataclass(frozen=True, eq=False)
class PairCounts:
    """Counts of pairs of neighbouring tokens, each coded as first * d_vocab + second; a reduction of `pair` values."""

    codes: Int[Tensor, "n"]
    """The pairs, sorted."""
    counts: Int[Tensor, "n"]
    """How often each pair occurred."""

    @classmethod
    def of(cls, values: Mapping[str, Tensor], rows: Int[Tensor, "n"] | None = None) -> PairCounts:
        """The counts of one batch, whose `pair` is -1 where a token has no next one."""
        codes = values["pair"]
        return cls(*codes[codes >= 0].unique(return_counts=True))

    def merge(self, other: PairCounts) -> PairCounts:
        """The counts of both together."""
        codes, place = torch.cat((self.codes, other.codes)).unique(return_inverse=True)
        counts = torch.zeros_like(codes).index_add(0, place, torch.cat((self.counts, other.counts)))
        return PairCounts(codes, counts)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors, by name."""
        return {"codes": self.codes, "counts": self.counts}

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor]) -> PairCounts:
        """The counts from what `tensors` returned."""
        return cls(**tensors)


def _neighbour_pairs(trace: Trace, batch: Batch, model: Transformer, d_vocab: int) -> Mapping[str, Tensor]:
    """Code of each token and the next one in the same text, first * d_vocab + second; -1 where there is no next."""
    codes = torch.full_like(batch.tokens, -1, dtype=torch.long)
    codes[:, :-1] = batch.tokens[:, :-1].long() * d_vocab + batch.tokens[:, 1:]
    known = torch.ones_like(batch.real)
    known[:, -1] = False
    if (counted := batch.predicted) is not None:
        known[:, :-1] &= counted
    return {"pair": batch.by_text(codes, known, -1)}


@torch.no_grad()
def _finish(merged: Partial, name: str, circuits: HeadCircuits, text: Text) -> xr.Dataset:
    """The result of `bigram_table`, from the counts of all pairs of neighbouring tokens."""
    assert isinstance(merged, PairCounts)
    if not len(merged.codes):
        raise ValueError("rows of at least two tokens are required, got no two neighbours")
    d_vocab = circuits.config.d_vocab
    codes, counts = merged.codes.cpu(), merged.counts.cpu().double()
    pairs = torch.stack((codes // d_vocab, codes % d_vocab))  # [2 pair]: token, next token
    first, index = pairs[0].unique(return_inverse=True)
    total = torch.zeros(len(first), dtype=torch.float64).index_add(0, index, counts)
    rows = upcast(circuits.embedded_tokens(first))
    if circuits.folded:
        rows = final_norm(circuits.network).of(rows).through(rows) * circuits.config.logit_scale
    log_q, spread = _log_softmax_at(rows, upcast(circuits.bare_unembedding), index, pairs[1])
    unigram = torch.zeros(d_vocab, dtype=torch.float64).index_add(0, pairs[1], counts) / counts.sum()
    p, u = counts / total[index], unigram[pairs[1]].log()
    direct = torch.stack(_kl_and_correlation(p, log_q, spread, index, d_vocab), -1)
    base = _squared_deviation(unigram[None].clone()).expand(len(first))
    null = torch.stack(_kl_and_correlation(p, u, base, index, d_vocab), -1)
    overall, null_overall = ((scores * total[:, None]).sum(0) / total.sum() for scores in (direct, null))
    cells = ("token", "score")
    return labelled(
        name,
        {
            "value": (cells, direct), "null": (cells, null), "n": (cells, total.long()[:, None].expand(-1, 2)),
            "overall": (("score",), overall), "null_overall": (("score",), null_overall),
        },
        coords={
            **worded(text, "token", first, ("token",)), "score": ["kl", "correlation"],
            "unit": ("score", ["nats", "Pearson's r"]),
        },
        units="see the coordinate unit",
        attrs={
            "kl": "KL(corpus || softmax)", "null": "the corpus' unigram frequencies",
            "folded": int(circuits.folded), "embedding": circuits.embedding,
        },
    )  # fmt: skip


def _log_softmax_at(
    a: Float[Tensor, "n d"], b: Float[Tensor, "d v"], index: Int[Tensor, "c"], column: Int[Tensor, "c"]
) -> tuple[Float[Tensor, "c"], Float[Tensor, "n"]]:
    """Log-softmax of `a @ b` at entries (index, column), sorted by row, and each row's `_squared_deviation`."""
    chosen, spreads = [], []
    for start, tile in row_tiles(a, b):
        in_tile = (index >= start) & (index < start + len(tile))
        tile.sub_(tile.logsumexp(-1, keepdim=True))
        chosen.append(tile[(index[in_tile] - start).to(tile.device), column[in_tile].to(tile.device)])
        spreads.append(_squared_deviation(tile.exp_()))
    return torch.cat(chosen).double().cpu(), torch.cat(spreads).double().cpu()


def _squared_deviation(q: Float[Tensor, "n v"]) -> Float[Tensor, "n"]:
    """Sum of squared deviations from 1 / v of each row of probabilities, overwritten; NaN if that is only rounding."""
    v = q.shape[-1]
    deviation = torch.linalg.vector_norm(q.sub_(1 / v), dim=-1)
    rounding = 8 * torch.finfo(q.dtype).eps / v**0.5
    return deviation.masked_fill(deviation < rounding, torch.nan).square()


def _kl_and_correlation(
    p: Float[Tensor, "c"],
    log_q: Float[Tensor, "c"],
    spread: Float[Tensor, "n"],
    index: Int[Tensor, "c"],
    v: int,
) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"]]:
    """KL(p || q) of each row, and Pearson's correlation over all v entries, from the entries where p > 0."""
    terms = torch.stack((p * (p.log() - log_q), p * (log_q.exp() - 1 / v), p.square()), 1)
    kl, shared, square = spread.new_zeros(len(spread), 3).index_add(0, index, terms).unbind(1)
    return kl, shared / ((square - 1 / v) * spread).sqrt()
