"""Entropy of attention per head, and the change of it and of the largest weight with the number of keys.

With scores in [m, M] and n visible keys every weight lies in [exp(-(M - m)) / n, exp(M - m) / n], so bounded scores
mean attention that spreads with length (Veličković et al. 2024, "softmax is not enough"). Scores here are what enters
the softmax, scale, bias and soft cap included; what a mixer does to the weights after its softmax is not in the
numbers. Each query is reduced to four numbers where its scores arise.

For mixers without a softmax of scores the numbers come from their effective pattern. Its rows are shares (linear
attention), the mean of two patterns of shares (polar), or weights of either sign with any sum. Such signed weights are
replaced by |a_ij| / sum_j |a_ij|, which measures how widely a head weighs, not what is left where weights cancel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.attention.sentences import head_names
from interp.core.patterns import entropy
from interp.core.results import Score, scored
from interp.core.stats import (
    FEWEST,
    FEWEST_MASSES,
    POSITIVE,
    MaskedMeans,
    Moments,
    Partial,
    if_at_least,
    over,
    upcast,
)
from interp.core.temperature import log_n_factor
from interp.data.batch import Batch
from interp.model.config import ModelConfig
from interp.model.records import Traits
from interp.model.sites import find
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer
from interp.passes.observe import Subject
from interp.passes.question import ByRow, Question, Reading
from interp.runs.functions import of_data

if TYPE_CHECKING:
    import xarray as xr

ROW = ("max_weight", "entropy", "gap", "keys")
"""Names of the numbers in `row_numbers`, in order."""
KEYS = ROW.index("keys")
HEAD = ("layer", "head")
HALVES = ("entropy_same", "entropy_opposite", "entropy_halves")
"""Scores of polar layers alone: entropy of either pattern, and the mean of the two."""
UNITS = {"entropy": "nats", "gap": "score", "relative": "share of log n", **dict.fromkeys(HALVES, "nats")}
"""Units of the scores; the others are attention mass."""
BOUNDS = ("upper", "lower")
"""Scores that are exponentials of a query's gap: a few texts cannot give an interval of their mean."""
AFTER_SCORES = ("attn.hook_first_pattern", "attn.hook_pattern")
"""Sites of the attention weights, which come after the scores that the numbers are computed from."""


@dataclass(frozen=True)
class AttentionEntropy(Question):
    """Entropy of every head's attention, in nats and as a share of the entropy of even attention.

    Attention is the softmax of the scores among tokens: sinks are left out and the weights brought to sum 1, padding
    never counts, and attention to an encoder's memory is not included. Layers without such scores are read off their
    weights: see the coordinate `weights`.

    Args:
        data: prompts, token ids, a batch, files or a stream of any size.
        train_length: length m of log-n scaling: each query's scores times log(n_i) / log(m) before the softmax; None:
            as they are. It shows what log-n scaling would make of them; the passes themselves are not scaled.

    Returns:
        Dataset over `layer`, `head` and `score`:

        - `value`: mean over texts, with the ends `low` and `high` of its 95 % interval, and `n`. The coordinate `unit`
          names the unit of each score: `entropy`, H_i = -sum_j a_ij log a_ij in nats, mean over queries (0 log 0 = 0;
          the first causal row counts, with 0); `relative`, mean of H_i / log n_i over the queries that see n_i >= 2
          keys (i + 1 in causal rows without a window); `max_weight`, mean of the largest weight. With a polar layer
          three more, in nats: `entropy_same` and `entropy_opposite`, the entropy of the pattern of same signs and of
          that of opposite signs, each over the queries where it weighs anything, and `entropy_halves`, the mean of
          the two; NaN in other layers. `entropy` is that of the mean of both patterns: where every query has both,
          between `entropy_halves` and `entropy_halves` + log 2, the more the further apart the halves look.
        - `null`: 1, even attention, for `relative`; NaN for the others.

        The coordinate `weights` [layer] says what the numbers of a layer are of: `softmax` of scores; `shares` of
        linear attention, and `halves`, the mean of polar attention's two patterns, which both compare with it (each
        pattern alone has the scores `entropy_same` and `entropy_opposite`);
        `signed` weights (differential, Linformer, lightning, pooling, spatial gating), whose sizes are brought to sum
        1: they compare with each other only, since weights that cancel count as wide attention here; `none`, where the
        numbers are NaN.

    Raises:
        ValueError: packed rows, texts of a single token, a model without any pattern, a `train_length` below 2 or
            where a layer has no scores, and edits of patterns that come after the scores.

    See Also:
        `dispersion`: the same numbers by the number of visible keys.

    Example:
        >>> attention_entropy(model, prompt).value.sel(layer=0, head=1, score="relative").dims
        ()
    """

    _: KW_ONLY
    train_length: int | None = None

    def bind(self, model: Subject) -> ByRow:
        """Four numbers of every query, and their means by head."""
        reads = _reads(model.transformer, self.train_length)
        finish = partial(_finish_heads, config=model.transformer.config, question=self)
        needed = tuple(read for read in reads if read is not None)
        return ByRow(self.name, Reading(needed, partial(_by_head, reads=reads)), MaskedMeans, finish)


@dataclass(frozen=True)
class Dispersion(Question):
    """Spread of every head's attention as a function of the number n of keys that a query sees.

    Scores in [m, M] over n keys bound every weight between exp(-(M - m)) / n and exp(M - m) / n, so bounded scores
    mean attention that spreads with length. Padding and sinks: as in `attention_entropy`.

    Args:
        data: prompts, token ids, a batch, files or a stream of any size.
        train_length: length m of log-n scaling: each query's scores times log(n) / log(m) before the softmax; None: as
            they are.

    Returns:
        Dataset over `layer`, `head`, `n_keys` and `score`:

        - `value`: mean over texts of the mean over the queries that see n keys, with the ends `low` and `high` of its
          95 % interval (NaN for fewer than three texts), and `n`, the texts with such a query. The coordinate `unit`
          names the unit of each score: `max_weight`; `entropy` in nats; `gap`, delta = largest minus smallest score of
          the query; `upper`, min(1, exp(delta) / n), and `lower`, exp(-delta) / n, between which every weight lies,
          both without an interval (few texts decide such exponentials: Student's t held their mean 66 to 84 times in
          100).
        - `null`: even attention: log n for the entropy, 0 for the gap, 1 / n for the others.

        The coordinate `weights` [layer] is that of `attention_entropy`.

    Raises:
        ValueError: as in `attention_entropy`.

    Caveat:
        In causal models n is also the position; what changes with it may be the text. Encoders see their whole text,
        so there n is its length.

    Source:
        Veličković et al. 2024, "softmax is not enough", the lemma on bounded logits (temperature 1 here: it is in the
        scores); log n - H <= delta follows from it.

    Example:
        >>> dispersion(model, prompt).value.sel(layer=0, head=0, n_keys=1, score="max_weight").item()
        1.0
    """

    _: KW_ONLY
    train_length: int | None = None

    def bind(self, model: Subject) -> ByRow:
        """Four numbers of every query, and their means by head and number of keys."""
        reads = _reads(model.transformer, self.train_length)
        finish = partial(_finish_keys, config=model.transformer.config, question=self)
        needed = tuple(read for read in reads if read is not None)
        return ByRow(self.name, Reading(needed, partial(_by_keys, reads=reads)), MaskedMeans, finish)


attention_entropy = of_data(AttentionEntropy)


dispersion = of_data(Dispersion)


def row_numbers(
    scores_bhqk: Float[Tensor, "b h q k"], train_length: int | None = None
) -> Float[Tensor, "b h q 4"]:
    """Largest weight, entropy in nats, largest minus smallest score, and number of visible keys, of every query.

    Hidden keys have the score -inf. NaN, and 0 keys, for a query that sees nothing.

    Example:
        >>> row_numbers(torch.tensor([[[[0.0, 0.0, -torch.inf]]]]))[0, 0, 0].tolist()
        [0.5, 0.6931471824645996, 0.0, 2.0]
    """
    scores = upcast(scores_bhqk)
    seen = scores > -torch.inf
    keys = seen.sum(-1, keepdim=True).to(scores.dtype)
    if train_length is not None:
        scores = torch.where(seen, scores * log_n_factor(keys, train_length), scores)
    weights = scores.softmax(-1)
    gap = scores.amax(-1) - scores.masked_fill(~seen, torch.inf).amin(-1)
    keys = keys[..., 0]
    numbers = torch.stack((weights.amax(-1), entropy(weights), gap, keys), -1)
    blind = (keys == 0)[..., None] & torch.tensor([True, True, True, False], device=keys.device)
    return numbers.masked_fill(blind, torch.nan)


def weight_numbers(weights: Float[Tensor, "b *c h q k"], *, halves: bool = False) -> Float[Tensor, "b h q 4"]:
    """The numbers of `row_numbers` for weights that do not come from scores: of |a_ij|, divided by their sum.

    There is no gap (NaN), and the number of keys is 1 where a query weighs anything, else 0: the weights do not show
    which keys are visible.

    Args:
        halves: whether the weights are two patterns, one for either half of the values; the result is their mean.

    Example:
        >>> weight_numbers(torch.tensor([[[[0.5, -0.5, 0.0]]]]))[0, 0, 0, :2].tolist()
        [0.5, 0.6931471824645996]
    """
    sizes = upcast(weights).abs()
    total = sizes.sum(-1, keepdim=True)
    shares = sizes / total.masked_fill(total == 0, 1)
    if halves:
        shares, total = shares.mean(1), total.sum(1)
    blind = total[..., 0] == 0
    numbers = torch.stack((shares.amax(-1), entropy(shares)), -1).masked_fill(blind[..., None], torch.nan)
    gap = torch.full_like(numbers[..., :1], torch.nan)
    return torch.cat((numbers, gap, (~blind)[..., None].to(numbers)), -1)


def half_numbers(weights: Float[Tensor, "b 2 h q k"]) -> Float[Tensor, "b h q 6"]:
    """The numbers of `weight_numbers` for the mean of two patterns, then the entropy of either, in nats.

    NaN for a pattern that weighs nothing at a query.
    """
    each = torch.stack([weight_numbers(half)[..., 1] for half in weights.unbind(1)], -1)
    return torch.cat((weight_numbers(weights, halves=True), each), -1)


def weights_of(config: ModelConfig) -> tuple[str, ...]:
    """Kind of weights of each layer: `softmax` of scores, `shares`, `halves`, `signed`, or `none`.

    `halves` is the mean of two patterns of shares; `none` is a layer without a pattern of the tokens.
    """

    def kind(traits: Traits) -> str:
        if traits.scored:
            return "softmax"
        if traits.halves:
            return "halves"
        return "none" if not traits.patterned else "shares" if traits.distribution else "signed"

    return tuple(kind(mixer.traits) for mixer in config.mixers)


def _reads(model: Transformer, train_length: int | None) -> tuple[Read | None, ...]:
    """One read for each layer, whose value is the four numbers of every query; None for layers without a pattern."""
    log_n_factor(torch.ones(1), 2 if train_length is None else train_length)  # refuses what has no logarithm
    for edit in model.edits:
        layer = find(edit.site, model.config)[1]
        scored = layer is not None and model.config.mixers[layer].traits.scored
        if scored and edit.site.endswith(AFTER_SCORES):
            raise ValueError(
                f"attention here is the softmax of the scores, which the edit of {edit.name} comes after: "
                "edit the scores, queries or keys"
            )
    kinds = weights_of(model.config)
    if set(kinds) == {"none"}:
        raise ValueError(
            f"attention rows require an attention pattern; this model mixes by {model.config.mixers[0]}"
        )
    if train_length is not None and (bare := [kind for kind in kinds if kind != "softmax"]):
        raise ValueError(
            f"train_length multiplies scores before a softmax; this model has layers of {bare[0]} weights"
        )
    vias: Mapping[str, tuple[str, Callable[[Tensor], Tensor]]] = {
        "softmax": ("attn.hook_attn_scores", partial(row_numbers, train_length=train_length)),
        "shares": ("attn.hook_pattern", weight_numbers),
        "signed": ("attn.hook_pattern", weight_numbers),
    }

    def read(layer: int, kind: str) -> Read | None:
        if kind == "none":
            return None
        halves = (model.config.mixers[layer].traits.halves, half_numbers)
        site, via = halves if kind == "halves" else vias[kind]
        return Read(f"blocks.{layer}.{site}", via, by_row=())

    return tuple(read(layer, kind) for layer, kind in enumerate(kinds))


def _query_numbers(
    trace: Trace, batch: Batch, model: Transformer, reads: tuple[Read | None, ...]
) -> tuple[Tensor, Tensor]:
    """The numbers of every query `[4 b l h q]`, NaN at padding, and the number of its keys `[b l h q]`.

    Six with a layer of halves: the last two are the entropies of either (`half_numbers`), NaN in other layers.
    """
    batch.require_one_text("attention entropy and dispersion")
    if int(batch.lengths.min()) < 2:
        raise ValueError(
            "attention over keys requires rows of at least two tokens, got one of a single token"
        )
    real = batch.real.to(model.device)
    visible = real.cumsum(1) if model.config.causal else real.sum(1, keepdim=True).expand(real.shape)
    like = max((trace[read] for read in reads if read is not None), key=lambda numbers: numbers.shape[-1])
    numbers = torch.full_like(like, torch.nan).unsqueeze(1).repeat(1, len(reads), *[1] * (like.ndim - 1))
    for layer, read in enumerate(reads):
        if read is None:
            continue
        found = trace[read]
        numbers[:, layer, ..., : found.shape[-1]] = found
        if not read.site.endswith("attn_scores"):  # weights do not show which keys are visible
            numbers[:, layer, ..., KEYS] *= visible[:, None].to(found)
    numbers = numbers.masked_fill(~real[:, None, None, :, None], torch.nan)
    return numbers.movedim(-1, 0), numbers[..., KEYS].nan_to_num(0.0).long()


def _by_head(
    trace: Trace, batch: Batch, model: Transformer, reads: tuple[Read | None, ...]
) -> Mapping[str, Tensor]:
    """The scores of `attention_entropy` for every head of every row, `[b l h]`: means over queries."""
    numbers, keys = _query_numbers(trace, batch, model, reads)
    weight, spread, _, _, *halves = numbers
    several_keys = keys > 1
    relative = torch.where(several_keys, spread / keys.clamp_min(2).to(spread).log(), torch.nan)
    scores = {
        "entropy": spread.nanmean(-1), "relative": relative.nanmean(-1), "max_weight": weight.nanmean(-1)
    }  # fmt: skip
    if halves:
        same, opposite = (half.nanmean(-1) for half in halves)
        scores |= dict(zip(HALVES, (same, opposite, (same + opposite) / 2), strict=True))
    return scores


def _by_keys(
    trace: Trace, batch: Batch, model: Transformer, reads: tuple[Read | None, ...]
) -> Mapping[str, Tensor]:
    """The scores of `dispersion` by number of visible keys, `[b l h n_keys]`: means over queries with that number."""
    (weight, spread, gap, n, *_), keys = _query_numbers(trace, batch, model, reads)
    upper, lower = (gap.exp() / n).clamp_max(1.0), (-gap).exp() / n
    values = {"max_weight": weight, "entropy": spread, "gap": gap, "upper": upper, "lower": lower}
    counts = torch.zeros(*keys.shape[:-1], keys.shape[-1] + 1, dtype=torch.double, device=keys.device)
    counts = counts.scatter_add(-1, keys, (keys > 0).double())

    def mean(score: Float[Tensor, "b l h q"]) -> Float[Tensor, "b l h n"]:
        known = score.masked_fill(keys == 0, 0.0).double()
        return (torch.zeros_like(counts).scatter_add(-1, keys, known) / counts)[..., 1:]

    return {name: mean(score) for name, score in values.items()}


def _finish_heads(merged: Partial, config: ModelConfig, question: AttentionEntropy) -> xr.Dataset:
    assert isinstance(merged, MaskedMeans)
    nulls = {"relative": 1.0}
    scores = {
        name: _nan_where_empty(
            Score.of(
                moments, UNITS.get(name, "attention mass"), nulls.get(name, torch.nan),
                share=UNITS.get(name) != "nats" and "signed" not in weights_of(config), within=POSITIVE,
            )
        )
        for name, moments in merged.moments.items()
    }  # fmt: skip
    attrs = _attrs(merged, question.train_length) | {"null": "relative: 1 for even attention"}
    return scored(question.name, scores, HEAD, coords=_coords(config), attrs=attrs)


def _nan_where_empty(score: Score) -> Score:
    """The means with NaN where there was nothing to average: a layer without a pattern."""
    is_empty = score.n == 0
    value, low, high = (x.masked_fill(is_empty, torch.nan) for x in (score.value, score.low, score.high))
    return score._replace(value=value, low=low, high=high)


def _finish_keys(merged: Partial, config: ModelConfig, question: Dispersion) -> xr.Dataset:
    assert isinstance(merged, MaskedMeans)
    longest = int(merged.moments["entropy"].count().amax((0, 1)).nonzero()[-1]) + 1
    n_keys = torch.arange(1, longest + 1)
    scores = {
        name: _score_by_keys(
            longest, name, moments, _even_value(name, n_keys), shares="signed" not in weights_of(config)
        )
        for name, moments in merged.moments.items()
    }
    coords = {**_coords(config), "n_keys": n_keys.tolist()}
    attrs = _attrs(merged, question.train_length) | {
        "null": "even attention: log n, no gap, 1 / n",
        "interval": f"{over('texts')}; of entropy {if_at_least(FEWEST_MASSES)}",
    }
    return scored(question.name, scores, (*HEAD, "n_keys"), coords=coords, attrs=attrs)


def _score_by_keys(
    longest: int, name: str, moments: Moments, null: Float[Tensor, "n"], *, shares: bool
) -> Score:
    """One score for 1 to `longest` visible keys; NaN where no text has a query that sees that number of keys."""
    fewest = FEWEST if name == "gap" else FEWEST_MASSES
    ends = moments.interval(share=name == "max_weight" and shares, fewest=fewest, within=POSITIVE)
    low, high = (end[..., :longest] for end in ends)
    if name == "entropy":
        high = high.clamp_max(null)
    if name in BOUNDS:
        low = high = torch.full_like(low, torch.nan)
    count = moments.count()[..., :longest]
    value = moments.mean[..., :longest].masked_fill(count == 0, torch.nan)
    unit = UNITS.get(name, "attention mass")
    return Score(value, low, high, count, null.to(value).expand_as(value), unit)


def _even_value(name: str, n_keys: Int[Tensor, "n"]) -> Float[Tensor, "n"]:
    """The value of a score under even attention over n keys."""
    n = n_keys.double()
    return {"entropy": n.log(), "gap": torch.zeros_like(n)}.get(name, 1 / n)


def _coords(config: ModelConfig) -> dict[str, object]:
    layers, heads = range(config.n_layers), range(config.n_heads)
    kinds = (("layer",), list(weights_of(config)))
    return {"layer": layers, "head": heads, "part": (HEAD, head_names(config)), "weights": kinds}


def _attrs(merged: MaskedMeans, train_length: int | None) -> dict[str, str | int]:
    scaled = "none" if train_length is None else f"log(n) / log({train_length})"
    rows = next(iter(merged.moments.values())).n
    return {
        "rows": rows,
        "factor": scaled,
        "interval": "95 % over texts",
        "softmax": "among tokens, sinks left out",
    }
