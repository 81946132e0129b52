"""Where attention goes by layer, near, far or to the first token, and how many directions its patterns need.

Early and late layers of a trained model attend otherwise than those between, and the pattern of a head is nearly of
low rank (Wang et al. 2020). Both are numbers of one pattern, so each pattern is reduced where it arises. What a model
of the same config has before training stands beside them: its attention is nearly even, which is of low rank too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.attention.attention_rows import weights_of
from interp.attention.sentences import head_names
from interp.attention.shares import signed_shares
from interp.core.patterns import NEAR
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
)
from interp.core.transfers import to_host
from interp.data.batch import Batch
from interp.model.config import ModelConfig
from interp.model.sparsity import Sparsity, visible
from interp.model.tap import Read
from interp.model.transformer import Transformer
from interp.passes.needs import Steps, recorded
from interp.passes.observe import Studied, Subject
from interp.passes.question import Ask, ByRow, Question, Staged, Stages, Values
from interp.runs.functions import of_data

if TYPE_CHECKING:
    import xarray as xr

SHARES = ("first", "between", "recent")
"""Scores that are shares of a query's attention, in order; they sum to 1."""
SCORES = (*SHARES, "rank", "relative_rank")
"""Names of the numbers of `pattern_numbers`, in order."""
HEAD = ("layer", "head")
UNITS = {"rank": "singular values", "relative_rank": "singular values per token"}
"""Units of the scores; the others are attention mass."""
ENDS, RANGE = ("value", "low", "high"), ("mean", "least", "most")
"""What is said of a layer's mean over heads, and of the heads of untrained models."""
MOST_RANDOM = 1000
"""The most untrained models beside one; each is made and run on all rows."""


@dataclass(frozen=True)
class AttentionByDepth(Question):
    """Attention on the first token, on recent ones and between, and the rank of the pattern, by layer and head.

    Padding never counts, and rows of other lengths share a batch: every number is of one text's own pattern.

    Args:
        data: prompts, token ids, a batch, files or a stream of any size.
        recent: number of tokens that are recent: the query's own and those just before it (in an encoder also as many
            after it), the first token aside.
        energy: share of the squared singular values that those counted must carry, in (0, 1].
        random: how many models of the same config, as they are before training (normal weights of deviation 0.02,
            seeds 0, 1, ...), get the same numbers on the same rows. Each is made in the memory of one more model, and
            goes through the data once more.

    Returns:
        Dataset over `layer`, `head` and `score`, with the coordinate `unit`:

        - `value`: mean over texts, with the ends `low` and `high` of its 95 % interval (of `rank` from 64 texts on,
          since it is skewed), and `n`, the texts that count.
        - `null`: the same numbers of attention that is spread evenly over the tokens that the layer may see (up to the
          query, in its window or sparse pattern), in these texts.
        - `by_layer` [layer, score, end]: the mean over the heads of each layer (`value`), and the ends (`low`, `high`)
          of its 95 % interval over texts.
        - `untrained` [layer, score, range]: `mean`, `least` and `most` of the heads of the untrained models; NaN
          without `random`.

        Scores:

        - `first`, `recent`, `between`: shares of a query's attention on the first token of its text, on the `recent`
          ones, and on all others; they sum to 1. Means over the queries for which all three exist, in causal models
          those after the first `recent` + 1 tokens: texts without such a query do not count here.
        - `rank`: the fewest singular values of a text's pattern whose squares sum to `energy` of all squares. It grows
          with the length of the text: compare models on the same texts.
        - `relative_rank`: rank divided by the tokens of its text.

        Sinks that are no tokens are left out, and weights brought to sum 1. Where weights may be negative the pattern
        is a_ij / sum_j |a_ij|, whose sizes are the shares. The coordinate `weights` [layer] is that of
        `attention_entropy`; layers without a pattern are NaN.

    Raises:
        ValueError: packed rows, a model without any pattern, `recent` or `energy` out of range, no text of `recent` + 2
            tokens; with `random`, a model that is edited or a wrapped network.

    Caveats:
        The number of large singular values says how well a pattern is approximated by one of low rank, not that the
        head does little: even attention and attention to one token both have the lowest rank. A share says where heads
        look, not what they write.

    Cost:
        A singular value decomposition of every head's pattern: for 400 tokens 20 ms on a CPU core, a third more than
        the pass of a model of 135 million parameters takes.

    Source:
        Wang et al. 2020, arXiv:2006.04768, section 3 and figure 1, for the spectrum (they add up singular values, not
        their squares); Xiao et al. 2023, arXiv:2309.17453, section 3.1, for the first token.

    See Also:
        `dispersion`: how widely heads attend, by the number of keys. `interp.heads`: where each head looks, with its
        name.

    Example:
        >>> found = attention_by_depth(model, prompt, recent=2)
        >>> bool(abs(found.value.sel(score=["first", "between", "recent"]).sum("score") - 1).max() < 1e-6)
        True
    """

    _: KW_ONLY
    recent: int = NEAR
    energy: float = 0.9
    random: int = 0

    def bind(self, model: Subject) -> ByRow | Staged:
        """One pass over the rows, and one more for every untrained model."""
        network = model.transformer
        if self.recent < 1:
            raise ValueError(f"recent, a number of tokens, must be at least 1, got {self.recent}")
        if not 0 < self.energy <= 1:
            raise ValueError(f"energy, a share of the squares, must be in (0, 1], got {self.energy}")
        if not 0 <= self.random <= MOST_RANDOM:
            raise ValueError(f"random, a number of models, must be in [0, {MOST_RANDOM}], got {self.random}")
        if self.random and network.edits:
            raise ValueError(
                "untrained models stand beside a model without edits: leave random at 0, or the edits away"
            )
        if self.random and network.config.block.proven:
            raise ValueError(
                "untrained models are made of our own blocks, this is a wrapped network: leave random at 0"
            )
        if not _layers(network.config):
            raise ValueError(
                "attention by depth requires an attention pattern; this model mixes by "
                f"{network.config.mixers[0]}"
            )
        finish = partial(_table, config=network.config, question=self)
        asked = ByRow(self.name, partial(_rows, question=self), MaskedMeans, finish)
        if not self.random:
            return asked
        return Staged(self.name, partial(_stages, model, asked, self), again="random=0")


attention_by_depth = of_data(AttentionByDepth)


def pattern_numbers(
    pattern: Float[Tensor, "b *c h q k"],
    real: Bool[Tensor, "b q"],
    place: Int[Tensor, "b q"],
    recent: int = NEAR,
    energy: float = 0.9,
    *,
    causal: bool = True,
) -> Float[Tensor, "b h 5"]:
    """The numbers of `SCORES` of each row and head.

    Args:
        pattern: attention weights; with a further axis `c`, patterns of which the mean is taken.
        real: False at padding, whose queries and keys do not count.
        place: number of each token in its row.
        recent: number of recent tokens.
        energy: share of the squares that the singular values counted must carry.
        causal: whether queries see no later token.

    Returns:
        [b, h, 5]: three shares of attention, the rank, and the rank per token; NaN where a row has no query that they
        are about.

    Example:
        >>> eye = torch.eye(10)[None, None]
        >>> pattern_numbers(eye, torch.ones(1, 10, dtype=torch.bool), torch.arange(10)[None], recent=2)[0, 0].tolist()
        [0.0, 0.0, 1.0, 9.0, 0.8999999761581421]
    """
    rows = signed_shares(pattern)
    rows = rows.mean(1) if rows.ndim == 5 else rows
    rows = rows * (real[:, :, None] & real[:, None, :])[:, None]
    return torch.cat((_shares(rows, real, place, recent, causal=causal), _ranks(rows, real, energy)), -1)


def _shares(
    rows: Float[Tensor, "b h q k"],
    real: Bool[Tensor, "b q"],
    place: Int[Tensor, "b q"],
    recent: int,
    *,
    causal: bool,
) -> Float[Tensor, "b h 3"]:
    """Mean share of attention of `SHARES`, over the queries that see tokens of all three kinds."""
    back = place[:, :, None] - place[:, None, :]
    seen = (
        real[:, :, None]
        & real[:, None, :]
        & ((back >= 0) if causal else torch.ones_like(back, dtype=torch.bool))
    )
    first = (place == 0)[:, None, :] & seen
    near = (back.abs() < recent) & seen & ~first
    between = seen & ~first & ~near
    sizes = rows.abs()
    # the recent tokens of early queries would include the first one
    counts = (place >= recent) & between.any(-1)
    counted = counts[:, None] & (sizes.sum(-1) > 0)
    by_kind = [(sizes * kind[:, None]).sum(-1) for kind in (first, between, near)]
    total = (torch.stack(by_kind, -1) * counted[..., None]).sum(-2)
    # brought to sum 1 at the end, so that a long row's rounding does not add up
    mass = total.sum(-1, keepdim=True)
    return torch.where(mass > 0, total / mass, torch.nan)


def _ranks(
    rows: Float[Tensor, "b h q k"], real: Bool[Tensor, "b q"], energy: float
) -> Float[Tensor, "b h 2"]:
    """Rank that carries the share `energy` of the squares, and the same divided by the row's tokens.

    Zeros in place of padding add singular values that are 0.
    """
    known = rows.isfinite().all((-2, -1))
    squares = torch.linalg.svdvals(rows.masked_fill(~known[..., None, None], 0.0)).square()
    total = squares.sum(-1, keepdim=True)
    # a sum that meets the share but for rounding has met it
    rounding = squares.shape[-1] * torch.finfo(squares.dtype).eps
    short = squares.cumsum(-1) < total * energy * (1 - rounding)
    rank = (short.sum(-1) + 1).to(squares).masked_fill(~known | (total[..., 0] == 0), torch.nan)
    return torch.stack((rank, rank / real.sum(1)[:, None]), -1)


def _rows(model: Transformer, batch: Batch, question: AttentionByDepth) -> Steps[Values]:
    """The numbers of every head `[b l h]` of each row, their mean over heads `[b l]`, and those of even attention."""
    batch.require_one_text("attention by depth")
    config, real, place = model.config, batch.real, batch.places
    via = partial(pattern_numbers, recent=question.recent, energy=question.energy, causal=config.causal)
    reads = [Read(_site(config, layer), via, by_row=(real, place)) for layer in _layers(config)]
    seen = (yield from recorded(batch, reads)).trace
    found = torch.stack([seen[read] for read in reads], 1)
    numbers = found.new_full((len(found), config.n_layers, *found.shape[2:]), torch.nan)
    numbers[:, list(_layers(config))] = found
    views = [
        (config.window if config.is_local(layer) else None, getattr(config.mixers[layer], "sparsity", None))
        for layer in range(config.n_layers)
    ]
    even = {
        view: via(_even(real, place, *view, causal=config.causal), real, place)[:, 0] for view in set(views)
    }
    nulls = torch.stack([even[view] for view in views], 1)
    without = numbers[..., SCORES.index("rank")].isnan().flatten(1).all(1)
    nulls = nulls.masked_fill(without[:, None, None], torch.nan)  # a text without any number counts nowhere
    named = zip(SCORES, numbers.unbind(-1), nulls.unbind(-1), strict=True)
    return {
        name: values
        for score, value, null in named
        for name, values in ((score, value), (f"{score}_mean", value.nanmean(-1)), (f"{score}_null", null))
    }


def _layers(config: ModelConfig) -> tuple[int, ...]:
    """The layers whose attention has weights of tokens."""
    return tuple(layer for layer, kind in enumerate(weights_of(config)) if kind != "none")


def _site(config: ModelConfig, layer: int) -> str:
    """Site of a layer's weights: the pattern, or the two patterns of polar attention."""
    return f"blocks.{layer}.{config.mixers[layer].traits.halves or 'attn.hook_pattern'}"


def _even(
    real: Bool[Tensor, "b q"],
    place: Int[Tensor, "b q"],
    window: int | None,
    sparsity: Sparsity | None,
    *,
    causal: bool,
) -> Float[Tensor, "b 1 q k"]:
    """The pattern of attention that is spread evenly over what a query may see, in float64."""
    back = place[:, :, None] - place[:, None, :]
    seen = real[:, :, None] & real[:, None, :]
    seen = seen & (back >= 0) if causal else seen
    seen = seen if window is None else seen & (back.abs() < window)
    seen = seen if sparsity is None else seen & visible(sparsity, place, place)
    return seen[:, None].double()


def _stages(model: Subject, asked: ByRow, question: AttentionByDepth, has_data: bool) -> Stages[xr.Dataset]:
    """The numbers of the model's heads, then those of untrained models, and the table of both."""
    (own,) = yield [Ask(asked)]
    chance = []
    for seed in range(question.random):
        (other,) = yield [Ask(asked, model=Studied(_untrained(model.transformer, seed), model.text))]
        chance.append(_stacked({name: moments.mean for name, moments in _moments(other).items()}))
    return _table(own, model.transformer.config, question, chance)


def _table(
    merged: Partial,
    config: ModelConfig,
    question: AttentionByDepth,
    chance: Sequence[Float[Tensor, "l h s"]] = (),
) -> xr.Dataset:
    """The table of the model's numbers, and of those of untrained models."""
    moments = _moments(merged)
    if int(moments["first"].count().max()) == 0:
        raise ValueError(
            f"shares by recent={question.recent} require a text of {question.recent + 2} tokens, with a query "
            "that sees first, recent and other tokens; no text has one: make recent smaller"
        )
    share = "signed" not in weights_of(config)
    scores = {
        name: _score(moments[name], name, moments[f"{name}_null"].mean[:, None], share=share)
        for name in SCORES
    }
    attrs: dict[str, str | float | int] = {
        "rows": moments["rank"].n, "recent": question.recent, "energy": question.energy, "random": question.random,
        "interval": f"{over('texts')}; of rank {if_at_least(FEWEST_MASSES)}",
        "null": "attention spread evenly over what the layer may see",
    }  # fmt: skip
    return scored(
        question.name,
        scores,
        HEAD,
        coords={**_coords(config), "end": list(ENDS), "range": list(RANGE)},
        others={
            "by_layer": (("layer", "score", "end"), _layer_means(moments)),
            "untrained": (("layer", "score", "range"), _range(chance, config)),
        },
        attrs=attrs,
    )


def _moments(merged: Partial) -> Mapping[str, Moments]:
    assert isinstance(merged, MaskedMeans)
    return merged.moments


def _score(moments: Moments, name: str, null: Tensor | float, *, share: bool) -> Score:
    """A score with its interval, as a share's where it is between 0 and 1; NaN where no text counts."""
    unit = UNITS.get(name, "attention mass")
    # ranks of texts are skewed: Student's t held their mean 78 times in 100 with four texts, 93 with 32
    is_rank = name == "rank"
    fewest = FEWEST_MASSES if is_rank else FEWEST
    score = Score.of(moments, unit, null, share=share and not is_rank, fewest=fewest, within=POSITIVE)
    empty = score.n == 0
    value, low, high = (
        x.masked_fill(empty.to(x.device), torch.nan) for x in (score.value, score.low, score.high)
    )
    return score._replace(value=value, low=low, high=high)


def _layer_means(moments: Mapping[str, Moments]) -> Float[Tensor, "l s 3"]:
    """Means over the heads of each layer, with the ends of their intervals over texts."""
    means = {name: _score(moments[f"{name}_mean"], name, torch.nan, share=True) for name in SCORES}
    ends = [{name: getattr(mean, end) for name, mean in means.items()} for end in ENDS]
    return torch.stack([_stacked(each) for each in ends], -1)


def _stacked(by_score: Mapping[str, Tensor]) -> Tensor:
    """The numbers of `SCORES` along a last axis, on the host."""
    on_host = to_host({name: by_score[name] for name in SCORES})
    return torch.stack([on_host[name].double() for name in SCORES], -1)


def _range(chance: Sequence[Float[Tensor, "l h s"]], config: ModelConfig) -> Float[Tensor, "l s 3"]:
    """Mean, smallest and largest number of the heads of the untrained models; NaN without any."""
    missing = torch.full((config.n_layers, 1, len(SCORES)), torch.nan, dtype=torch.float64)
    values = torch.cat(tuple(chance) or (missing,), 1)
    return torch.stack((values.mean(1), values.amin(1), values.amax(1)), -1)


def _untrained(network: Transformer, seed: int) -> Transformer:
    """A model of the same config, dtype and device, with the weights that training begins with."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fresh = Transformer(network.config)
    return fresh.requires_grad_(False).eval().to(network.device, network.dtype)


def _coords(config: ModelConfig) -> dict[str, object]:
    kinds = (("layer",), list(weights_of(config)))
    layers, heads = range(config.n_layers), range(config.n_heads)
    return {"layer": layers, "head": heads, "part": (HEAD, head_names(config)), "weights": kinds}
