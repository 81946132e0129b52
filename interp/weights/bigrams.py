"""What the direct path, embedding to unembedding, knows of a corpus: a bigram table against the corpus' own."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.core.precision import wide
from interp.core.results import labelled
from interp.core.shapes import shape_text
from interp.core.tiles import row_tiles
from interp.weights.head_circuits import Circuits

if TYPE_CHECKING:
    import xarray as xr


@torch.no_grad()
def bigram_table(circuits: Circuits, tokens: Int[Tensor, "*b p"]) -> "xr.Dataset":
    """How well the direct path E W_U tells the next token of a corpus, token by token.

    tokens: ids `[pos]`, or rows `[batch, pos]` that are not joined. For every token a that something follows: `count`,
    how often; `kl` = KL(p(. | a) || softmax(E_a W_U)) in nats, p the corpus' frequencies; their Pearson `correlation`
    over the vocabulary (NaN for uniform ones); the same of the corpus' unigram frequencies (`_unigram`). Scalars
    `<name>_mean`, weighted by `count`; that of `kl_unigram` is the mutual information of neighbours. Elhage et al.
    2021, "Zero-Layer Transformers": kl = 0 is the best one can do.
    folded: the final norm is at each row's own scale (a softmax has a temperature); beta and b_U are left out.
    Caveat: rare tokens make the corpus' own frequencies too sharp, so that kl has a floor above 0.
    Errors: ValueError for ids outside the vocabulary or no two neighbours.

    Example:
        >>> bigram_table(interp.Circuits(model.transformer), torch.tensor([3, 1, 3, 1, 2])).kl.sizes["token"]
        2
    """
    d_vocab = circuits.model.config.d_vocab
    pairs, counts = _bigrams(tokens, d_vocab)
    first, index = pairs[0].unique(return_inverse=True)
    total = torch.zeros(len(first), dtype=torch.float64).index_add(0, index, counts)
    rows = wide(circuits.embedded[first.to(circuits.model.device), : circuits.model.config.d_model])
    if circuits.folded:
        norm = circuits.model.ln_final
        rows = norm.frozen(rows, norm.scale(rows)) * circuits.model.config.logit_scale
    unembedding = wide(circuits.bare_unembedding)
    log_q, spread = _log_softmax_at(rows, unembedding, index, pairs[1])
    unigram = torch.zeros(d_vocab, dtype=torch.float64).index_add(0, pairs[1], counts) / counts.sum()
    p, u = counts / total[index], unigram[pairs[1]].log()
    direct = _agreement(p, log_q, spread, index, d_vocab)
    base = _agreement(p, u, _spread(unigram[None].clone()).expand(len(first)), index, d_vocab)
    names = ("kl", "correlation", "kl_unigram", "correlation_unigram")
    found = dict(zip(names, (*direct, *base), strict=True))
    values: dict[str, tuple[Sequence[str], Tensor]] = {"count": (("token",), total.long())}
    for name, value in found.items():
        values |= {name: (("token",), value), f"{name}_mean": ((), (value * total).sum() / total.sum())}
    return labelled(
        "bigram_table",
        values,
        coords={"token": first.tolist()},
        attrs={"kl_unit": "nats", "kl": "KL(corpus || softmax)", "null": "the corpus' unigram frequencies"},
    )


def _bigrams(tokens: Int[Tensor, "*b p"], d_vocab: int) -> tuple[Int[Tensor, "2 n"], Float[Tensor, "n"]]:
    """The distinct pairs of neighbours, sorted by the first, and how often each occurs."""
    tokens = tokens.cpu()
    if tokens.shape[-1] < 2 or tokens.numel() == 0:
        raise ValueError(f"rows of at least two tokens are required, got {shape_text(tokens.shape)}")
    if int(tokens.min()) < 0 or int(tokens.max()) >= d_vocab:
        raise ValueError(
            f"token ids must be in [0, {d_vocab - 1}], got {int(tokens.min())} to {int(tokens.max())}"
        )
    codes = tokens[..., :-1].long() * d_vocab + tokens[..., 1:]
    pairs, counts = codes.unique(return_counts=True)
    return torch.stack((pairs // d_vocab, pairs % d_vocab)), counts.double()


def _log_softmax_at(
    a: Float[Tensor, "n d"], b: Float[Tensor, "d v"], index: Int[Tensor, "c"], column: Int[Tensor, "c"]
) -> tuple[Float[Tensor, "c"], Float[Tensor, "n"]]:
    """log softmax of the rows of `a @ b` at some entries (sorted by row), and each row's spread; by tiles."""
    chosen, spreads = [], []
    for start, tile in row_tiles(a, b):
        here = (index >= start) & (index < start + len(tile))
        tile.sub_(tile.logsumexp(-1, keepdim=True))
        chosen.append(tile[(index[here] - start).to(tile.device), column[here].to(tile.device)])
        spreads.append(_spread(tile.exp_()))
    return torch.cat(chosen).double().cpu(), torch.cat(spreads).double().cpu()


def _spread(q: Float[Tensor, "n v"]) -> Float[Tensor, "n"]:
    """Summed squared deviation of each row of probabilities from 1 / v, in place; NaN where that is rounding alone."""
    v = q.shape[-1]
    found = torch.linalg.vector_norm(q.sub_(1 / v), dim=-1)
    rounding = 8 * torch.finfo(q.dtype).eps / v**0.5
    return found.masked_fill(found < rounding, torch.nan).square()


def _agreement(
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
