"""What heads copy and whom they match, over the whole vocabulary, read off the weights and never `vocab x vocab`.

Row convention: the full OV circuit is E W_V W_O U `[source, output]`, the full QK circuit E W_Q W_K^T E^T `[query,
key]`. Both have rank d_head: spectra come from d_head x d_head products, entries and ranks from tiles. Elhage et al.
2021, "A Mathematical Framework for Transformer Circuits"; Olsson et al. 2022; Dar et al. 2022 (entries of both forms).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from einops import einsum, rearrange
from jaxtyping import Complex, Float, Int
from torch import Tensor
from tqdm import tqdm

from interp.core.factored import FactoredMatrix
from interp.core.precision import wide
from interp.core.results import labelled
from interp.core.shapes import shape_text
from interp.core.stats import Moments
from interp.passes.observe import Subject
from interp.weights.head_circuits import Circuits, Embedding

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

Kind = Literal["OV", "QK"]
SIDES = {"OV": ("source", "output"), "QK": ("query", "key")}
"""What the rows and the columns of a full circuit stand for."""
UNITS = {
    "eigenvalue": "sum / sum of moduli, -1 to 1", "matching": "sum / sum of moduli, -1 to 1",
    "top1": "share of the tokens", "mean_rank": "outputs ahead of the token",
}  # fmt: skip
CHUNK = 8192
"""Vocabulary entries widened at once."""


@torch.no_grad()
def copying(
    model: Subject,
    *,
    folded: bool = True,
    embedding: Embedding = "effective",
    ranks: bool = True,
    sample: int | None = None,
    previous: "xr.DataArray | None" = None,
) -> "xr.Dataset":
    """How far every head copies the token it attends to, from the weights alone.

    Returns Dataset[layer, head]: `eigenvalue` (see `eigenvalue_scores`, -1 to 1), `top1`, the share of tokens whose own
    logit none exceeds in their row of the full OV circuit, and `mean_rank`, how many exceed it (0 = copies); with
    `_low` and `_high` (95 % over the vocabulary's tokens) and the scalar `_null`, chance. `previous` (the
    `previous_token` of `interp.heads`) adds `matching` (see `matching_scores`). NaN: the circuit is zero.
    folded, embedding: as in `Circuits`. ranks: 2 V^2 d_head FLOPs per head, nearly all of the work; False = without.
    sample: rank only so many tokens, drawn without replacement from a fixed seed, against the whole vocabulary.
    Errors: ValueError for a sample that is not 2 to V tokens; ValueError and AttributeError where no circuit ends in
    the logits (masked-LM head, no unembedding).

    Example:
        >>> table = copying(model, previous=interp.heads(model).previous_token)
        >>> sorted(table.dims)
        ['head', 'layer']
    """
    circuits = Circuits(model.transformer, folded=folded, embedding=embedding)
    scores = {"eigenvalue": eigenvalue_scores(circuits)}
    nulls = {"eigenvalue": 0.0}
    if previous is not None:
        weight = torch.tensor(previous.transpose("layer", "head").to_numpy())
        scores["matching"], nulls["matching"] = matching_scores(circuits, weight), 0.0
    if ranks:
        d_vocab = model.transformer.config.d_vocab
        scores |= _rank_scores(circuits, _sampled(d_vocab, sample))
        nulls |= {"top1": 1 / d_vocab, "mean_rank": (d_vocab - 1) / 2}
    n_layers, n_heads = scores["eigenvalue"].shape
    found = labelled(
        "copying",
        {name: (("layer", "head"), value) for name, value in scores.items()}
        | {f"{name}_null": ((), torch.tensor(value)) for name, value in nulls.items()},
        coords={"layer": range(n_layers), "head": range(n_heads)},
        attrs={
            "folded": int(folded), "embedding": embedding, "interval": "95 % over tokens of the vocabulary",
            "null": "a random circuit: eigenvalues around 0, ranks uniform",
            "mean_rank_unit": "outputs ahead of the token, 0 = none",
        },
    )  # fmt: skip
    for name in scores:
        found[name].attrs["unit"] = UNITS[name.removesuffix("_low").removesuffix("_high")]
    return found


@torch.no_grad()
def eigenvalue_scores(circuits: Circuits) -> Float[Tensor, "l h"]:
    """Eigenvalue positivity of every head's full OV circuit: 1 copies, -1 does the opposite, 0 is chance.

    sum(lambda) / sum(|lambda|) over the eigenvalues of E W_V W_O U (Elhage et al. 2021, "Summarizing OV/QK
    Matrices"), which are those of the small W_O (U E) W_V; U E is one product over the vocabulary for all heads. The
    same for W_V M and M^-1 W_O. NaN for a circuit that is zero. Caveat: eigenvectors need not be orthogonal, so a
    positive score is no proof of copying.
    Errors: ValueError for circuits with biases, which have no square form.

    Example:
        >>> eigenvalue_scores(interp.Circuits(model.transformer, folded=True)).shape
        torch.Size([3, 8])
    """
    _refuse_biases(circuits)
    through = _over_vocabulary(circuits.bare_unembedding, circuits.embedded)
    scores = []
    for layer in range(circuits.model.config.n_layers):
        ov = circuits.ov(layer)
        cycled = FactoredMatrix(wide(ov.A), circuits.before_unembedding(wide(ov.B)) @ through)
        scores.append(positivity(cycled.eigenvalues()))
    return torch.stack(scores)


@torch.no_grad()
def matching_scores(circuits: Circuits, previous: Float[Tensor, "l h"]) -> Float[Tensor, "l h"]:
    """Eigenvalue positivity of "attend where the token before was mine": near 1 for induction heads.

    NaN in layer 0, which reads no head, and in layers whose scores do not come from q . k: they have no QK circuit.

    A head of layer l scores query token a against a key whose predecessor was b by E_a W_QK (E_b P)^T, P = the sum over
    the heads i of layers below l of previous[i] W_OV_i: what they wrote about b, as far as they attend to the previous
    token. Row form of Elhage et al. 2021, "induction heads" (W_E^T W_QK W_OV W_E), summed over heads as in Olsson et
    al. 2022 (QK eigenvalue trace). The eigenvalues are those of W_K^T P^T (E^T E) W_Q, d_head x d_head.

    previous: the weight of each head, such as its previous-token score. Under rotary positions QK is the content term
    at offset 0. Norms between the two heads are at scale 1, if folded at all.
    Errors: ValueError for circuits with biases, or weights of another shape or that are not finite.
    """
    _refuse_biases(circuits)
    config = circuits.model.config
    if previous.shape != (config.n_layers, config.n_heads) or not bool(previous.isfinite().all()):
        raise ValueError(
            f"one finite weight per head is required, {shape_text((config.n_layers, config.n_heads))}, got "
            f"{shape_text(previous.shape)}{'' if previous.isfinite().all() else ' with NaN or infinity'}"
        )
    gram = _over_vocabulary(circuits.embedded.mT, circuits.embedded)
    weight, written, scores = previous.to(gram), torch.zeros_like(gram), []
    for layer in range(config.n_layers):
        ov = circuits.ov(layer)
        if config.mixers[layer].traits.bilinear:
            qk = circuits.qk(layer)
            cycled = FactoredMatrix(wide(qk.A), wide(qk.B) @ (written.mT @ gram))
            scores.append(positivity(cycled.eigenvalues()))
        else:
            scores.append(torch.full_like(gram[0, : config.n_heads], torch.nan))
        values = einsum(weight[layer], wide(ov.A), "h, h d e -> d h e")
        written = written + values.flatten(1) @ rearrange(wide(ov.B), "h e d -> (h e) d")
    return torch.stack(scores)


def positivity(eigenvalues: Complex[Tensor, "*h e"]) -> Float[Tensor, "*h"]:
    """sum(lambda) / sum(|lambda|) in [-1, 1]; complex ones come in conjugate pairs, so the sum is real. 0 / 0 = NaN."""
    return eigenvalues.real.sum(-1) / eigenvalues.abs().sum(-1)


@torch.no_grad()
def copying_ranks(circuits: Circuits, layer: int, head: int) -> Int[Tensor, "v"]:
    """How many outputs each source token's row of the full OV circuit puts above the token itself; tile by tile.

    0 = the head, attending to the token, raises no logit more; equal logits share the better rank.
    Errors: IndexError for a layer or head that does not exist.
    """
    return circuits.full_ov(layer, head).diagonal_ranks()


@torch.no_grad()
def top_pairs(
    model: Subject,
    layer: int,
    head: int,
    kind: Kind = "OV",
    *,
    k: int = 20,
    largest: bool = True,
    circuits: Circuits | None = None,
) -> "pd.DataFrame":
    """The k largest (or smallest) entries of a head's full circuit: source -> output (OV) or query -> key (QK).

    Columns `source`, `output` (or `query`, `key`), each also as `_id`, and `value`: the entry minus the mean of its
    row, since a softmax over the columns does not see a constant (logits; attention scores up to the norms' scale).
    Dar et al. 2022 read the uncentred forms. Caveat: QK entries of different queries have no common scale.
    circuits: the conventions; None: folded, scaled, effective embedding. Pass one to reuse its embedding.
    Errors: IndexError for a head that does not exist, ValueError for another kind or more than V^2 entries.

    Example:
        >>> list(top_pairs(model, 1, 0, k=3).columns)
        ['source', 'source_id', 'output', 'output_id', 'value']
    """
    import pandas as pd

    full = _centred(_full(_conventions(model, circuits), kind, layer, head))
    values, rows, columns = full.top_entries(k, largest=largest)
    sides = zip(SIDES[kind], (rows, columns), strict=True)
    named = [_worded(model, side, ids) for side, ids in sides]
    return pd.DataFrame(named[0] | named[1] | {"value": values.cpu().numpy()})


@torch.no_grad()
def skip_trigrams(
    model: Subject,
    layer: int,
    head: int,
    *,
    sources: str | int | Sequence[str | int] | None = None,
    k: int = 10,
    outputs: int = 5,
    circuits: Circuits | None = None,
) -> "pd.DataFrame":
    """Skip-trigrams of one head, "source ... destination -> output", one row each.

    Which destination attends to a source is read off QK, what the source then makes likely off OV (Elhage et al. 2021,
    "Interpretation as Skip-Trigrams"): the (destination, source) pairs with the k largest QK entries, and for
    each its source's `outputs` largest OV entries, in that order. With `sources` (single tokens) the k destinations of
    each of them instead. `qk` and `ov`: entries minus their row's mean, as in `top_pairs`, whose caveat holds here
    too. Every pair of a source is combined with all its outputs: the form cannot do otherwise (their "bugs").

    Example:
        >>> len(skip_trigrams(model, 0, 1, k=4, outputs=2))
        8
    """
    import pandas as pd

    conventions = _conventions(model, circuits)
    qk, ov = (_centred(_full(conventions, kind, layer, head)) for kind in ("QK", "OV"))
    if sources is None:
        scores, destination, source = qk.top_entries(k)
    else:
        listed = [sources] if isinstance(sources, str | int) else list(sources)
        given = model.text.targets(listed, max(1, len(listed))).to(qk.A.device)
        found, columns = qk.columns(given).T.row_top(k)
        scores, destination, source = found.flatten(), columns.flatten(), given.repeat_interleave(k)
    rises, output = ov.rows(source).row_top(outputs)
    each = {"source": source, "destination": destination}
    words = [_worded(model, side, ids.repeat_interleave(outputs)) for side, ids in each.items()]
    numbers = {"qk": scores.repeat_interleave(outputs), "ov": rises.flatten()}
    return pd.DataFrame(
        words[0] | words[1] | _worded(model, "output", output.flatten())
        | {name: value.cpu().numpy() for name, value in numbers.items()}
    )  # fmt: skip


# pieces


def _sampled(d_vocab: int, sample: int | None) -> Int[Tensor, "n"] | None:
    """The tokens to rank; None = all."""
    if sample is None:
        return None
    if not 2 <= sample <= d_vocab:
        raise ValueError(f"a sample of 2 to {d_vocab} tokens is required, got {sample}")
    return torch.randperm(d_vocab, generator=torch.Generator().manual_seed(0))[:sample]


def _rank_scores(circuits: Circuits, sources: Int[Tensor, "n"] | None) -> dict[str, Float[Tensor, "l h"]]:
    """top1 and mean_rank of every head with their intervals over tokens; NaN where the circuit is zero."""
    config = circuits.model.config
    cells: list[Tensor] = []
    heads = [(layer, head) for layer in range(config.n_layers) for head in range(config.n_heads)]
    for layer, head in tqdm(heads, desc="copying ranks", delay=1, leave=False):
        full = circuits.full_ov(layer, head)
        ranks = (full if sources is None else _own_first(full, sources)).diagonal_ranks()
        moments = Moments.of(torch.stack((ranks == 0, ranks), 1).double())
        found = torch.stack((moments.mean, *moments.interval()))
        cells.append(found.masked_fill(full.norm() == 0, torch.nan))
    table = rearrange(torch.stack(cells), "(l h) part score -> score part l h", h=config.n_heads)
    names = [f"{score}{part}" for score in ("top1", "mean_rank") for part in ("", "_low", "_high")]
    return dict(zip(names, table.flatten(0, 1), strict=True))


def _own_first(full: FactoredMatrix, sources: Int[Tensor, "n"]) -> FactoredMatrix:
    """Some rows, their own columns first, so that the tokens stay on the diagonal."""
    ours = torch.zeros(full.shape[1], dtype=torch.bool)
    ours[sources] = True
    order = torch.cat((sources, (~ours).nonzero()[:, 0])).to(full.A.device)
    return full.rows(sources.to(full.A.device)).columns(order)


def _full(circuits: Circuits, kind: Kind, layer: int, head: int) -> FactoredMatrix:
    if kind not in SIDES:
        raise ValueError(f"kind must be OV or QK, got {kind!r}")
    if kind == "OV":
        return circuits.full_ov(layer, head)
    qk, embedded = circuits.qk(layer, head).wide(), wide(circuits.embedded)
    return FactoredMatrix(embedded @ qk.A, qk.B @ embedded.mT)


def _over_vocabulary(left: Float[Tensor, "c v"], right: Float[Tensor, "v d"]) -> Float[Tensor, "c d"]:
    """The product over the vocabulary, summed in float32 at least without widening all of it at once."""
    total = wide(left.new_zeros(len(left), right.shape[1]))
    for columns, rows in zip(left.split(CHUNK, 1), right.split(CHUNK), strict=True):
        total = torch.addmm(total, wide(columns), wide(rows))
    return total


def _centred(matrix: FactoredMatrix) -> FactoredMatrix:
    """Every row minus its mean."""
    return FactoredMatrix(matrix.A, matrix.B - matrix.B.mean(-1, keepdim=True))


def _worded(model: Subject, side: str, ids: Int[Tensor, "n"]) -> dict[str, Sequence[str] | Sequence[int]]:
    """Two columns of a table: the tokens' text and their ids."""
    listed: list[int] = ids.tolist()
    return {side: model.text.pieces(listed), f"{side}_id": listed}


def _conventions(model: Subject, circuits: Circuits | None) -> Circuits:
    if circuits is None:
        return Circuits(model.transformer, folded=True, scaled=True, embedding="effective")
    if circuits.model is not model.transformer:
        raise ValueError("the circuits must be those of the model, got another model's")
    return circuits


def _refuse_biases(circuits: Circuits) -> None:
    if circuits.biases:
        raise ValueError("eigenvalues require a square circuit: Circuits(biases=False), got biases=True")
