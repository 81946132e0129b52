"""Copying and matching scores of heads over the whole vocabulary, from the weights, without a `vocab x vocab` matrix.

Row convention: the full OV circuit is E W_V W_O U `[source, output]`, the full QK circuit E W_Q W_K^T E^T `[query,
key]`. Both have rank d_head, so eigenvalues come from d_head x d_head products, and ranks from tiles of the full
circuit. Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits"; Olsson et al. 2022.

`copying_scores` measures copying on tokens: when a head attends to a token, which share of the logits that it raises is
that token's own (Olsson et al. 2022, "Copying" among the head activation evaluators).
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Complex, Float, Int
from torch import Tensor
from tqdm import tqdm

from interp.core.axes import shape_text
from interp.core.boundary import public
from interp.core.factored import FactoredMatrix
from interp.core.haar import haar_frames
from interp.core.results import Score, numbers, scored
from interp.core.stats import Moments, two_sided_p, upcast
from interp.core.tiles import entry_ranks
from interp.core.transfers import to_device, to_host
from interp.model.config import ModelConfig
from interp.model.parts import Part
from interp.model.transformer import Transformer
from interp.model.weights import Weights
from interp.passes.frozen import final_norm
from interp.passes.observe import Model, Subject
from interp.passes.question import Question, WithoutData
from interp.runs.functions import of_weights
from interp.weights.head_circuits import (
    Embedding,
    HeadCircuits,
    as_circuits,
    by_layer,
    head_names,
    over_vocabulary,
)
from interp.weights.random_heads import random_heads

if TYPE_CHECKING:
    import xarray as xr


STEPS = 4096
"""Points of the integral in `chance_copying`, whose error is then below 1e-6."""
Back = Callable[[Tensor], Tensor]
"""Linear map from what a head writes `[... d]`, through W_U and W_E, back to the stream directions that heads read."""


def copying_scores(
    values: Sequence[Float[Tensor, "b s g e"]], tokens: Int[Tensor, "b s"], model: Transformer
) -> Float[Tensor, "b l h"]:
    """Copying score of each row and head, from -1 to 1: at 1 it raises the logit of the attended token only.

    For each sampled token the logits are ReLU(value W_O, through the final norm's linear part, W_U, minus the mean over
    the vocabulary). Let a be the logit of the attended token and S the sum over all tokens of the sample (a included).
    Then r = a / (a + S) lies in [0, 1/2], and the score is 4 r - 1, averaged over the sample's tokens. Its chance level
    is `chance_copying`, not 0. Tokens with S = 0 count as chance. The norm's scale, and every other positive factor on
    what a head writes, cancels.

    Args:
        values: for each layer, the value vectors at the sample's tokens, per key/value head.
        tokens: ids of the distinct tokens of each row's sample.
        model: the network that the values come from.
    """
    weights, circuits = Weights(model), HeadCircuits(model, folded=True)
    direction = unembedding_rows(model, tokens)
    chance = chance_copying(tokens.shape[1])
    layers = []
    for layer, value_bsge in enumerate(values):
        folded = einsum(upcast(circuits.writing(layer)), direction, "h e d, b t d -> b h e t")
        value_bshe = upcast(value_bsge[:, :, weights.kv_head()])
        logits = einsum(value_bshe, folded, "b s h e, b h e t -> b h s t")
        layers.append(raised_share(logits, chance).mean(-1))
    return torch.stack(layers, 1)


def unembedding_rows(model: Transformer, tokens: Int[Tensor, "*b"]) -> Float[Tensor, "*b d"]:
    """Direction of each token's logit in the final stream: its column of W_U minus the mean one, norm at scale 1."""
    weights = Weights(model)
    columns = upcast(weights.W_U.mT[tokens])
    columns = columns - weights.W_U.mean(1, dtype=columns.dtype)
    return upcast(final_norm(model).back(columns))


def raised_share(logits: Float[Tensor, "*b s s"], chance: float) -> Float[Tensor, "*b s"]:
    """4 a / (a + S) - 1 for every row of logits, a the ReLU of the diagonal entry, S the sum of ReLU over the row."""
    raised = logits.relu()
    diagonal, total = raised.diagonal(dim1=-2, dim2=-1), raised.sum(-1)
    return torch.where(total > 0, 4 * diagonal / (diagonal + total) - 1, chance)


def chance_copying(n: int) -> float:
    """The expected copying score of a random head on samples of n tokens (about -0.86 for 25).

    Its logits are independent Gaussians. With a the ReLU of one and X the sum of ReLU over the n - 1 others,
    E[a / (2 a + X)] = integral over t >= 0 of E[a exp(-2 t a)] E[exp(-t X)]; erfcx gives both expectations.
    """
    u = (torch.arange(STEPS, dtype=torch.float64) + 0.5) / STEPS
    t = u / (1 - u)
    own = 1 / math.sqrt(2 * math.pi) - t * torch.special.erfcx(math.sqrt(2) * t)
    other = 0.5 + 0.5 * torch.special.erfcx(t / math.sqrt(2))
    ratio = (own * other ** (n - 1) / (1 - u).square()).mean()
    return float(4 * ratio / (1 - 0.5**n) - 1)


HEADS = (256, 1024)
"""The fewest and the most random heads of a null."""
Frames = tuple[Float[Tensor, "n d e"], Float[Tensor, "n d e"], Int[Tensor, "m"]]
"""Random frames that heads read, frames that they write, and the order in which heads take their singular values."""
PARTNERS = 4
"""Number of random heads that reuse one pair of random frames, since a frame costs more than a head's eigenvalues."""
KEPT = 2**22
"""The largest frames that are cached, in numbers, for the next model of the same shape."""
RANKING = 4e11
"""FLOPs that ranking takes at most with `sample=None`: some seconds of a processor core."""
FEWEST_RANKED = 128
SCREENED = 2048
"""Number of sampled output tokens against which the source tokens are ranked first."""
POSITIVITY = "sum of eigenvalues over sum of their moduli"


@dataclass(frozen=True, eq=False)
class Copying(Question):
    """How far every head copies the token it attends to, from the weights alone.

    A head copies if looking at a token makes that very token more probable as the next one.

    Args:
        folded: whether norms are part of the circuits, as in `HeadCircuits`.
        embedding: what a vocabulary entry puts on the stream: "token" or "effective", as in `HeadCircuits`.
        ranks: whether tokens are ranked, for `top1` and `mean_rank`: 2 V^2 d_head FLOPs per head, nearly all of the
            work.
        sample: how many tokens are ranked, drawn without replacement from a fixed seed, against the whole vocabulary,
            or "all". None ranks all where that takes at most 4e11 FLOPs, else as many as do, at least 128; a note says
            how many. Of a sample, `top1` is exact, and `mean_rank` is estimated without bias from 2 048 outputs.
        previous: weight of each head as a previous-token head, dims layer and head, such as the score `previous_token`
            of `interp.heads`. It adds the score `matching`.
        random: how many random heads per head `top1` and `mean_rank` are compared with, for their `p`
            (`interp.weights.random_heads`); each takes as much work as the head's own ranks. With 0 that `p` is NaN.
            Ranks of a random head are not uniform where the embeddings are trained or tied, so that no interval over
            tokens tells.

    Returns:
        Dataset[layer, head, score] with the coordinates `unit` of each score and `part`, the heads' names. NaN where
        the circuit is zero.

        - `value`: the score. `eigenvalue`: as `eigenvalue_scores`, -1 to 1. `top1`: share of tokens whose own logit no
          other exceeds in their row of the full OV circuit. `mean_rank`: how many exceed it, mean over tokens; 0
          copies. `matching`, if `previous` is given: as `matching_scores`.
        - `low`, `high`: 95 % interval over the vocabulary's tokens. `eigenvalue` and `matching` are exact: both ends
          are the value. `mean_rank` has none: a few tokens far down decide such a mean.
        - `null`: chance level.
        - `p`: two-sided, against random heads: of `top1` and `mean_rank` how often one of the same layer is as far out.
        - `n`: number of tokens; 0 of exact scores.

    Raises:
        ValueError: a sample that is not 2 to V tokens, weights that are not one per head, or `sample` and `random`
            without ranks.
        ValueError, AttributeError: a model in which no circuit ends in the logits (masked-LM head, no unembedding).

    Source:
        Elhage et al. 2021, "Summarizing OV/QK Matrices". Olsson et al. 2022.

    See Also:
        `eigenvalue_scores`: the first score alone, as a tensor. `interp.heads`: copying on prompts.

    Example:
        >>> previous = interp.heads(model).value.sel(score="previous_token")
        >>> table = copying(model, previous=previous)
        >>> table.value.dims
        ('layer', 'head', 'score')
    """

    _: KW_ONLY
    folded: bool = True
    embedding: Embedding = "effective"
    ranks: bool = True
    sample: int | Literal["all"] | None = None
    previous: xr.DataArray | None = None
    random: int = 0
    of_weights: ClassVar[bool] = True

    def bind(self, model: Subject) -> WithoutData:
        """Products of thin matrices, no pass."""
        model.transformer.config.require_tokens("how far heads copy tokens")
        if not self.ranks and (self.sample is not None or self.random):
            raise ValueError(
                f"sample and random are about ranks, which ranks=False leaves out: got sample={self.sample!r}, "
                f"random={self.random}"
            )
        circuits = HeadCircuits(model, folded=self.folded, embedding=self.embedding)
        d_vocab = circuits.config.d_vocab
        if isinstance(self.sample, int) and not 2 <= self.sample <= d_vocab:
            raise ValueError(f"a sample of 2 to {d_vocab} tokens is required, got {self.sample}")
        if self.previous is not None and {"layer", "head"} != set(self.previous.dims):
            raise ValueError(
                "one weight per head is required, dims layer and head such as heads(model).value.sel(score="
                f"'previous_token'), got dims {', '.join(map(str, self.previous.dims)) or 'none'}"
            )
        previous = None if self.previous is None else _weight_by_head(self.previous, circuits.config)
        random_heads(circuits.network, self.random)  # refuses what it cannot do
        return WithoutData(self.name, partial(_copying_table, circuits, self, previous))


def _weight_by_head(previous: xr.DataArray, config: ModelConfig) -> Float[Tensor, "l h"]:
    """The weight of each head, by its labels if it has some. ValueError unless they are the model's."""
    heads = {"layer": range(config.n_layers), "head": range(config.n_heads)}
    bare = {dim for dim in heads if dim not in previous.indexes}
    if any(previous.sizes[dim] != len(heads[dim]) for dim in bare):
        raise ValueError(
            f"previous: one weight per head is required, {config.n_layers} layers of {config.n_heads} heads, got "
            f"{dict(previous.sizes)}"
        )
    return numbers(
        "previous", previous, {dim: None if dim in bare else every for dim, every in heads.items()}
    )


copying = of_weights(Copying)


@public()
@torch.no_grad()
def eigenvalue_scores(circuits: Model | HeadCircuits) -> Float[Tensor, "l h"]:
    """Eigenvalue positivity of every head's full OV circuit: 1 copies, -1 does the opposite, 0 is chance.

    sum(lambda) / sum(|lambda|) over the eigenvalues of E W_V W_O U, which are those of the small W_O (U E) W_V; U E is
    one product over the vocabulary for all heads. W_V M and M^-1 W_O give the same score.

    Args:
        circuits: a model (norms folded in, effective embedding), or circuits under other conventions.

    Returns:
        [l h], between -1 and 1; NaN for a circuit that is zero.

    Raises:
        ValueError: circuits with biases, which have no square form.

    Caveat:
        Eigenvectors need not be orthogonal, so a positive score is no proof of copying.

    Source:
        Elhage et al. 2021, "Summarizing OV/QK Matrices".

    See Also:
        `copying`: the same scores with their chance level, and ranks. `matching_scores`: the QK circuit of induction
        heads.

    Example:
        >>> eigenvalue_scores(model).shape
        torch.Size([3, 8])
    """
    circuits = as_circuits(circuits)
    _check_square(circuits)
    layers = range(circuits.config.n_layers)
    small = to_host({layer: _cyclic_products(circuits, circuits.ov(Part("attn", layer))) for layer in layers})
    return to_device(_positivities(small.values(), circuits.config), circuits.network.device)


def _check_square(circuits: HeadCircuits) -> None:
    _refuse_biases(circuits)
    circuits.config.require_tokens("an eigenvalue score")


def _cyclic_products(circuits: HeadCircuits, ov: FactoredMatrix) -> Float[Tensor, "h e e"]:
    """Small matrices (W_O (U E)) W_V, which have the nonzero eigenvalues of each head's full OV circuit."""
    return FactoredMatrix(upcast(ov.A), circuits.around(ov.B)).wide().BA


def _positivities(small: Iterable[Float[Tensor, "h e e"]], config: ModelConfig) -> Float[Tensor, "l h"]:
    """Eigenvalue positivity of each layer's small matrices, on the host, where it is as fast as on a GPU."""
    scores = [positivity(torch.linalg.eigvals(layer_heads)) for layer_heads in small]
    return torch.stack(scores) if scores else torch.empty(0, config.n_heads)


def _singular_values(cores: Iterable[Float[Tensor, "h e e"]]) -> Float[Tensor, "n e"]:
    """Singular values of every head, with the layers concatenated, on the host."""
    return torch.cat([torch.linalg.svd(core, full_matrices=False)[1] for core in cores])


@public()
@torch.no_grad()
def matching_scores(circuits: Model | HeadCircuits, previous: Float[Tensor, "l h"]) -> Float[Tensor, "l h"]:
    """Eigenvalue positivity of "attend where the previous token was this token": near 1 for induction heads.

    A head of layer l scores query token a against a key whose previous token was b by E_a W_QK (E_b P)^T. P is the sum
    of previous[i] W_OV_i over the heads i of layers below l: what they write about b, weighted by how much they attend
    to the previous token. The eigenvalues are those of W_K^T P^T (E^T E) W_Q, d_head x d_head. Under rotary positions
    QK is the content term at offset 0. Norms between the two heads are at scale 1 (`folded`), or left out.

    Args:
        circuits: a model (norms folded in, effective embedding), or circuits under other conventions.
        previous: [l h], the weight of each head, such as its previous-token score.

    Returns:
        [l h], between -1 and 1. NaN in layer 0, which reads no head, where all heads below have the weight 0, and in
        layers whose scores do not come from q . k: they have no QK circuit.

    Raises:
        ValueError: circuits with biases, or weights of another shape, that are not finite, or all 0.

    Source:
        Elhage et al. 2021, "induction heads" (W_E^T W_QK W_OV W_E, in row form), summed over heads as in Olsson et al.
        2022 (QK eigenvalue trace).

    See Also:
        `copying`: with `previous=`, the same scores with their chance level.
    """
    circuits = as_circuits(circuits)
    layers = torch.stack([scores for scores, _ in _matching_with_random(circuits, previous)])
    return to_device(layers, circuits.network.device)


def _matching_with_random(
    circuits: HeadCircuits, previous: Float[Tensor, "l h"], draws: int | None = 0
) -> list[tuple[Float[Tensor, "h"], RandomHeads]]:
    """Matching scores of each layer's heads, and those of random heads in its place, on the host."""
    _refuse_biases(circuits)
    config = circuits.config
    if previous.shape != (config.n_layers, config.n_heads) or not bool(previous.isfinite().all()):
        raise ValueError(
            f"one finite weight per head is required, {shape_text((config.n_layers, config.n_heads))}, got "
            f"{shape_text(previous.shape)}{'' if previous.isfinite().all() else ' with NaN or infinity'}"
        )
    if not bool(previous[:-1].any()) and config.n_layers > 1:
        raise ValueError("previous must weigh a head below the last layer, got 0 for each")
    gram = over_vocabulary(circuits.embedded.mT, circuits.embedded)
    weight, written = to_device(previous.to(gram.dtype), gram.device), torch.zeros_like(gram)
    small: dict[tuple[str, int], Tensor] = {}
    through: dict[int, Back] = {}
    for layer in range(config.n_layers):
        heads = Part("attn", layer)
        ov = circuits.ov(heads)
        if config.mixers[layer].traits.bilinear:
            qk, carried = circuits.qk(heads), written.mT @ gram
            through[layer] = partial(torch.matmul, other=carried)
            small["cycled", layer] = FactoredMatrix(upcast(qk.A), upcast(qk.B) @ carried).wide().BA
            small["core", layer] = qk.core()
        values = einsum(weight[layer], upcast(ov.A), "h, h d e -> d h e")
        # P of the docstring of `matching_scores`: the weighted sum of the heads' W_V W_O [d d]
        written = written + values.flatten(1) @ rearrange(upcast(ov.B), "h e d -> (h e) d")
    on_host = to_host(small)
    random = RandomHeads.several(
        {layer: (back, _singular_values([on_host["core", layer]])) for layer, back in through.items()},
        circuits,
        draws,
    )
    missing = torch.full((config.n_heads,), torch.nan, dtype=gram.dtype)
    return [
        (positivity(torch.linalg.eigvals(on_host["cycled", layer])), random[layer])
        if layer in random
        else (missing, RandomHeads(torch.empty(0, dtype=gram.dtype)))
        for layer in range(config.n_layers)
    ]


@dataclass(frozen=True, eq=False)
class RandomHeads:
    """Eigenvalue scores of random heads with this model's embeddings: the null distribution of its heads' scores.

    A random head has the singular values of one of the model's nonzero heads, and uniformly random singular directions
    in the stream (Haar frames, drawn with a fixed seed). Trained embeddings share large directions, so these scores
    have a far larger spread than the 1.5 / d_head of Gaussian embeddings.
    """

    scores: Float[Tensor, "n"]

    @classmethod
    def several(
        cls,
        by_key: Mapping[int, tuple[Back, Float[Tensor, "h e"]]],
        circuits: HeadCircuits,
        draws: int | None = None,
        seed: int = 0,
    ) -> dict[int, RandomHeads]:
        """Scores of random circuits A B, by key, from one transfer of their small products to the host.

        Args:
            by_key: by key (such as a layer), the map `back` from the rows `[... d]` of B to the directions that are
                read, so that the small product is `back(B) A`, and the singular values of the model's own circuits.
            circuits: circuits of the model whose embeddings are used.
            draws: number of random circuits; None: 1 024 for heads of up to 48 dimensions, fewer for wider ones, whose
                eigenvalues take longer, down to 256. With n of them p = 0.05 has a standard error of 0.22 / sqrt(n):
                0.007 to 0.014.
            seed: seed of the draws.
        """
        model = circuits.network
        frames = (
            functools.cache(  # drawn once per call for all heads of one width; small frames also stay cached
                lambda n, width, dtype: _frames(n, model.config.d_model, width, dtype, seed)
            )
        )
        small = {
            key: _random_products(back, spectra, frames, model.device, draws)
            for key, (back, spectra) in by_key.items()
        }
        return {key: cls.of(products) for key, products in to_host(small).items()}

    @classmethod
    def of(cls, small: Float[Tensor, "n e e"]) -> RandomHeads:
        """The scores from the small products of random circuits, on the host, where it is as fast as on a GPU."""
        if not len(small):
            return cls(torch.empty(0, dtype=torch.float64))
        scores = _known_positivity(small)
        return cls(scores[scores.isfinite()].double())

    @property
    def mean(self) -> float:
        """The mean of the scores, which is the chance level. NaN where there are none."""
        return float(self.scores.mean()) if len(self.scores) else math.nan

    def p(self, scores: Float[Tensor, "*h"]) -> Float[Tensor, "*h"]:
        """Two-sided p of each score: twice the share of random heads as extreme on its side, >= 2 / (n + 1)."""
        return two_sided_p(scores.cpu(), self.scores)


def _random_products(
    back: Back,
    spectra: Float[Tensor, "h e"],
    frames: Callable[[int, int, torch.dtype], Frames],
    device: torch.device,
    draws: int | None,
) -> Float[Tensor, "n e e"]:
    """Small products `back(B) A` of random circuits A B with these singular values; none if all of them are zero."""
    spectra = spectra[(spectra > 0).any(1)]
    width = spectra.shape[1]
    if not len(spectra):
        return torch.empty(0, width, width)
    if draws is None:
        draws = min(max(HEADS[0], HEADS[1] * 48**2 // width**2), HEADS[1])
    read, written, order = frames(-(-draws // PARTNERS), width, spectra.dtype)
    read, written = (to_device(side, device).to(spectra.dtype) for side in (read, written))
    written = back(written.mT)
    values = to_device(spectra[order % len(spectra)][:, None], device)  # singular values [(partner n) 1 e]
    return torch.cat([written @ read.roll(-i, 0) for i in range(PARTNERS)]) * values


def _frames(n: int, d_model: int, width: int, dtype: torch.dtype, seed: int) -> Frames:
    """`_random_frames`, from the cache unless the frames are too large for it."""
    drawn = _random_frames if 2 * n * d_model * width <= KEPT else _random_frames.__wrapped__
    return drawn(n, d_model, width, dtype, seed)


@functools.lru_cache(maxsize=4)
def _random_frames(n: int, d_model: int, width: int, dtype: torch.dtype, seed: int) -> Frames:
    """Random frames that n heads read and write, and the order in which `PARTNERS * n` heads take their spectra."""
    generator = torch.Generator().manual_seed(seed)
    drawn = haar_frames(2 * n, d_model, width, generator, dtype)
    return drawn[:n], drawn[n:], torch.randperm(PARTNERS * n, generator=generator)


def _known_positivity(small: Float[Tensor, "n e e"]) -> Float[Tensor, "n"]:
    """`positivity` of the eigenvalues, cached by a hash of `small`, so that a second analysis of a model is fast."""
    slot = _cache_entry(hashlib.blake2b(small.numpy().tobytes(), digest_size=16).digest())
    if not slot:
        slot.append(positivity(torch.linalg.eigvals(small)))
    return slot[0]


@functools.lru_cache(maxsize=64)
def _cache_entry(content: bytes) -> list[Float[Tensor, "n"]]:
    """The list that caches the scores for this hash: empty at first, then with one element."""
    return []


@torch.no_grad()
def random_copying(
    circuits: HeadCircuits,
    draws: int | None = None,
    seed: int = 0,
    *,
    without: Bool[Tensor, "l h"] | None = None,
) -> RandomHeads:
    """`eigenvalue_scores` of random heads with the singular values of the model's OV circuits, from all layers.

    Args:
        circuits: the model's circuits.
        draws: number of random heads; None: as in `RandomHeads.several`.
        seed: seed of the draws.
        without: mask of the heads whose singular values are not used.
    """
    layers = range(circuits.config.n_layers)
    cores = to_host({layer: circuits.ov(Part("attn", layer)).core() for layer in layers})
    return _random_heads_of(circuits, cores.values(), draws, seed, without)


@torch.no_grad()
def against_random(
    circuits: HeadCircuits,
    *,
    without: Bool[Tensor, "l h"] | None = None,
    extra: Mapping[str, Tensor] = MappingProxyType({}),
) -> tuple[Float[Tensor, "l h"], RandomHeads, dict[str, Tensor]]:
    """`eigenvalue_scores`, `random_copying`, and the tensors of `extra`, on the host, from one transfer.

    Args:
        circuits: the model's circuits.
        without: mask of the heads whose singular values are not used for random heads.
        extra: further tensors to copy to the host in the same transfer.
    """
    _check_square(circuits)
    layers = range(circuits.config.n_layers)
    ovs = {layer: circuits.ov(Part("attn", layer)) for layer in layers}
    on_host = to_host(
        {("cycled", layer): _cyclic_products(circuits, ov) for layer, ov in ovs.items()}
        | {("core", layer): ov.core() for layer, ov in ovs.items()}
        | {("extra", name): tensor for name, tensor in extra.items()}
    )
    random = _random_heads_of(circuits, [on_host["core", layer] for layer in layers], None, 0, without)
    scores = _positivities([on_host["cycled", layer] for layer in layers], circuits.config)
    return scores, random, {name: on_host["extra", name] for name in extra}


def _random_heads_of(
    circuits: HeadCircuits,
    cores: Iterable[Float[Tensor, "h e e"]],
    draws: int | None,
    seed: int,
    without: Bool[Tensor, "l h"] | None,
) -> RandomHeads:
    spectra = _singular_values(cores)
    if without is not None:
        spectra = spectra[(~without).flatten()]
    return RandomHeads.several({0: (circuits.around, spectra)}, circuits, draws, seed)[0]


def positivity(eigenvalues: Complex[Tensor, "*h e"]) -> Float[Tensor, "*h"]:
    """sum(lambda) / sum(|lambda|) in [-1, 1]: conjugate pairs make the sum real; NaN if all eigenvalues are 0."""
    return eigenvalues.real.sum(-1) / eigenvalues.abs().sum(-1)


@torch.no_grad()
def _copying_table(
    circuits: HeadCircuits, question: Copying, previous: Float[Tensor, "l h"] | None
) -> xr.Dataset:
    config = circuits.config
    notes: list[str] = []
    score, random, _ = against_random(circuits)
    scores = {"eigenvalue": Score.exact(score, POSITIVITY, random.mean)}
    p = {"eigenvalue": random.p(score)}
    if previous is not None:
        layers = _matching_with_random(circuits, previous, None)
        matching = torch.stack([score for score, _ in layers])
        chance = matching.new_tensor([null.mean for _, null in layers])[:, None]
        scores["matching"] = Score.exact(matching, POSITIVITY, chance)
        p["matching"] = torch.stack([null.p(score) for score, null in layers])
    if question.ranks:
        count = _ranked_count(config, question.sample)
        sources = _sampled_tokens(config.d_vocab, count)
        if question.sample is None and count is not None:
            notes.append(
                f"top1 and mean_rank are of {count} of {config.d_vocab} tokens, drawn from a fixed seed, mean_rank by "
                f"{min(SCREENED, config.d_vocab)} outputs (sample='all': of all, which takes "
                f"{2 * config.d_vocab**2 * config.head_width * config.n_heads * config.n_layers:.0e} FLOPs)"
            )
        ranked = _rank_scores(circuits, sources)
        scores |= ranked
        others = [
            _rank_scores(
                HeadCircuits(random_model, folded=question.folded, embedding=question.embedding), sources
            )
            for random_model in random_heads(circuits.network, question.random)
        ]
        for name in ranked if others else ():
            chance = torch.stack([random_scores[name].value for random_scores in others], 1)
            chance = chance.flatten(1)[:, None]  # [l model h] -> [l 1 (model h)]
            p[name] = two_sided_p(ranked[name].value, chance)
    missing = torch.full_like(p["eigenvalue"], torch.nan)
    return scored(
        question.name,
        scores,
        ("layer", "head"),
        coords={
            "layer": range(config.n_layers), "head": range(config.n_heads), "part": by_layer(config),
        },
        others={"p": (("layer", "head", "score"), torch.stack([p.get(name, missing) for name in scores], -1))},
        attrs={
            "folded": int(question.folded), "embedding": question.embedding,
            "interval": "95 % over tokens of the vocabulary",
            "null": f"eigenvalues: the mean of {len(random.scores)} random heads in these embeddings; ranks: uniform",
            "p": "two-sided; eigenvalues: against the same random heads; ranks: against those of the same layer",
        },
        notes=notes,
    )  # fmt: skip


def _ranked_count(config: ModelConfig, sample: int | Literal["all"] | None) -> int | None:
    """Number of tokens that are ranked: `sample`, or as many as `RANKING` allows; None: all."""
    if isinstance(sample, int):
        return sample
    of_token = 2 * config.d_vocab * config.head_width * config.n_heads * max(1, config.n_layers)
    count = max(FEWEST_RANKED, int(RANKING // of_token))
    return None if sample == "all" or count >= config.d_vocab else count


def _sampled_tokens(d_vocab: int, sample: int | None) -> Int[Tensor, "n"] | None:
    """Ids of the tokens to rank, drawn from a fixed seed; None: all."""
    if sample is None:
        return None
    return torch.randperm(d_vocab, generator=torch.Generator().manual_seed(0))[:sample]


def _rank_scores(circuits: HeadCircuits, sources: Int[Tensor, "n"] | None) -> dict[str, Score]:
    """The scores `top1`, with its interval over tokens, and `mean_rank` of every head; NaN for a zero circuit."""
    config = circuits.config
    # of each head: whether each token's own logit is the largest, the mean rank, whether the circuit is zero
    is_first, mean_ranks, is_zero = list[Tensor](), list[Tensor](), list[Tensor]()
    screen = None if sources is None else _Screen.of(circuits, sources)
    for head in tqdm(head_names(config), desc="copying ranks", delay=1, leave=False):
        if screen is None:
            full = circuits.full_ov(head)
            ranks = full.diagonal_ranks()
            first, zero = ranks == 0, full.norm() == 0
        else:
            first, ranks, zero = screen.ranks(circuits.ov(head).wide())
        is_first.append(first)
        mean_ranks.append(ranks.double().mean())
        is_zero.append(zero)
    zero_circuits, top1 = torch.stack(is_zero), Moments.of(torch.stack(is_first, 1).double())

    def by_head(values: Float[Tensor, "n"]) -> Float[Tensor, "l h"]:
        known = values.masked_fill(zero_circuits, torch.nan)
        return known.unflatten(0, (config.n_layers, config.n_heads))

    share, mean_rank = by_head(top1.mean), by_head(torch.stack(mean_ranks))
    low, high = (by_head(end) for end in top1.interval(share=True))
    count = top1.count().masked_fill(zero_circuits, 0).unflatten(0, (config.n_layers, config.n_heads))
    no_interval, chance = (
        torch.full_like(mean_rank, torch.nan),
        (1 / config.d_vocab, (config.d_vocab - 1) / 2),
    )
    null_share, null_rank = (torch.full_like(share, level) for level in chance)
    return {
        "top1": Score(share, low, high, count, null_share, "share of the tokens"),
        "mean_rank": Score(
            mean_rank, no_interval, no_interval, count, null_rank, "outputs ahead of the token"
        ),
    }


@dataclass(frozen=True, eq=False)
class _Screen:
    """Ranks of source tokens' own logits among all outputs, mostly from a sample of the outputs.

    A token is not first if a sampled output exceeds it; only the other tokens are compared with every output. The rank
    is estimated without bias from the share of sampled outputs that exceed the token.
    """

    circuits: HeadCircuits
    sources: Int[Tensor, "n"]
    rows: Float[Tensor, "n d"]
    """Embeddings of the tokens."""
    token_outputs: Float[Tensor, "d n"]
    """W_U of the tokens themselves."""
    others: Float[Tensor, "d m"]
    """W_U of the sampled outputs."""
    itself: Bool[Tensor, "n m"]
    """True where a sampled output is the source token itself."""
    longest: Float[Tensor, ""]
    """The largest norm of a column of W_U, which bounds the rounding of logits."""

    @classmethod
    def of(cls, circuits: HeadCircuits, sources: Int[Tensor, "n"]) -> _Screen:
        unembedding = circuits.bare_unembedding
        sources, count = to_device(sources, unembedding.device), circuits.config.d_vocab
        drawn = torch.randperm(count, generator=torch.Generator().manual_seed(1))[:SCREENED]
        outputs = to_device(drawn, unembedding.device)
        return cls(
            circuits,
            sources,
            upcast(circuits.embedded[sources]),
            upcast(unembedding[:, sources]),
            upcast(unembedding[:, outputs]),
            sources[:, None] == outputs,
            upcast(unembedding.norm(dim=0).max()),
        )

    def ranks(self, ov: FactoredMatrix) -> tuple[Bool[Tensor, "n"], Float[Tensor, "n"], Bool[Tensor, ""]]:
        """Whether each token's own logit is the largest, its rank, and whether the circuit is zero on all tokens."""
        written = self.rows @ ov.A  # [n e]
        carried = self.circuits.before_unembedding(ov.B)  # [e d]
        own_logit = torch.einsum("ne,en->n", written, carried @ self.token_outputs)
        logits = (written @ (carried @ self.others)).masked_fill(self.itself, -torch.inf)
        above = (logits > own_logit[:, None]).sum(1)
        size = (~self.itself).sum(1)
        ranks = above.double() * (self.circuits.config.d_vocab - 1) / size
        slack = 16 * torch.finfo(own_logit.dtype).eps * (written @ carried).norm(dim=-1) * self.longest
        candidates = (logits <= (own_logit + slack)[:, None]).all(1).nonzero()[:, 0]
        top = torch.zeros_like(above, dtype=torch.bool)
        if len(candidates):
            columns = upcast(self.circuits.bare_unembedding)
            few = len(candidates) < ov.A.shape[-1]
            a, b = (
                (written[candidates] @ carried, columns) if few else (written[candidates], carried @ columns)
            )
            top[candidates] = entry_ranks(a, b, self.sources[candidates]) == 0
        return top, ranks, (written @ carried).norm() == 0


def _refuse_biases(circuits: HeadCircuits) -> None:
    if circuits.biases:
        raise ValueError("eigenvalues require a square circuit: HeadCircuits(biases=False), got biases=True")
