"""What every head does on repeated random tokens: previous-token, duplicate-token and induction scores in one pass.

Random tokens have no meaning, so only copying from the earlier repeat can explain attention there (Olsson et al.
2022). The scores are sums of diagonals of the pattern; each pattern is reduced where it arises and dies with its layer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.core.results import labelled
from interp.core.stats import Means, Rows
from interp.engine.analysis import Analysis, run
from interp.engine.batch import Batch
from interp.engine.observe import Subject
from interp.model.config import ModelConfig
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer

if TYPE_CHECKING:
    import xarray as xr

SCORES = ("previous_token", "duplicate_token", "induction")


@dataclass(frozen=True)
class RepeatedTokens:
    """Rows of BOS, then `period` distinct random tokens repeated `repeats` times (Olsson et al.: 25 x 4)."""

    period: int = 25
    repeats: int = 4
    rows: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        if self.period < 2 or self.repeats < 2 or self.rows < 1:
            raise ValueError(f"period and repeats of at least 2 and one row are required, got {self}")

    @property
    def length(self) -> int:
        """Tokens per row, BOS included."""
        return 1 + self.period * self.repeats

    def tokens(self, d_vocab: int, bos: int) -> Int[Tensor, "b p"]:
        """The rows; BOS never occurs inside. ValueError if the vocabulary is smaller than the period."""
        if d_vocab - 1 < self.period:
            raise ValueError(
                f"{self.period} distinct tokens besides BOS are required, the vocabulary has {d_vocab - 1}"
            )
        dice = torch.Generator().manual_seed(self.seed)
        order = torch.stack(
            [torch.randperm(d_vocab - 1, generator=dice)[: self.period] for _ in range(self.rows)]
        )
        chosen = order + (order >= bos)
        return torch.cat((torch.full((self.rows, 1), bos), chosen.repeat(1, self.repeats)), 1)


def heads(
    model: Subject,
    data: RepeatedTokens = RepeatedTokens(),
    *,
    batch_size: int = 16,
) -> "xr.Dataset":
    """Scores of every head on repeated random tokens, with intervals over rows and a chance level.

    Returns Dataset[layer, head]: `previous_token`, `duplicate_token`, `induction` in [0, 1] (attention mass), each
    with `_low` and `_high` (95 % over rows) and the scalar `_null`, the score of uniform causal attention.
    induction is the prefix-matching score with the sum rule: attention to all tokens that followed an earlier copy of
    the current token, averaged over the queries that have one. Caveat: it says where a head looks, not what it does.
    Errors: ValueError if the rows do not fit the context or the model is not causal.

    Example:
        >>> table = interp.heads(model)
        >>> table.induction.argmax(...)
    """
    config = model.transformer.config
    if data.length > config.n_ctx:
        raise ValueError(f"rows of {data.length} tokens do not fit the context of {config.n_ctx}")
    tokens = data.tokens(config.d_vocab, model.text.bos_id or 0)
    batch = Batch(tokens, bos=True)
    analysis = head_scores(config, data)
    return run([analysis], model.transformer, batch.split(batch_size))["heads"]


def head_scores(config: ModelConfig, data: RepeatedTokens) -> Analysis:
    """The analysis behind `heads`, for batches that `data` made."""
    if not config.causal:
        raise ValueError("head scores on repeats require a causal model")
    via = partial(repeat_scores, period=data.period)
    return Analysis(
        name="heads",
        reads=partial(_reads, via=via),
        compute=partial(_compute, via=via),
        reduction=Means,
        finish=partial(_finish, data=data),
    )


def repeat_scores(pattern_bhqk: Float[Tensor, "b h q k"], period: int) -> Float[Tensor, "b h 3"]:
    """The three scores of each row and head, in the order of `SCORES`.

    Column 0 is BOS; token i (from 1) equals token i - period where that is at least 1. previous_token: A[i, i-1] over
    i >= 1. The others sum over all earlier copies and average over the queries that have one (i > period).
    """
    n = pattern_bhqk.shape[-1]
    queries = n - 1 - period
    if queries < 1:
        raise ValueError(f"at least two repeats of {period} tokens after BOS are required, got {n} columns")
    previous = pattern_bhqk.diagonal(-1, -2, -1).float().mean(-1)
    duplicate = _attention_back(pattern_bhqk, period, 0) / queries
    induction = _attention_back(pattern_bhqk, period, 1) / queries
    return torch.stack((previous, duplicate, induction), -1)


def _attention_back(pattern_bhqk: Float[Tensor, "b h q k"], period: int, shift: int) -> Float[Tensor, "b h"]:
    """Attention to the earlier copies of each token (shift 0) or to what followed them (shift 1), summed over queries.

    One diagonal per distance; on each, the first key that follows or is a real copy is 1 + shift (column 0 is BOS).
    """
    total = pattern_bhqk.new_zeros(pattern_bhqk.shape[:2], dtype=torch.float32)
    for copies in range(1, (pattern_bhqk.shape[-1] - 2) // period + 1):
        diagonal = pattern_bhqk.diagonal(shift - copies * period, -2, -1)
        total = total + diagonal[..., 1 + shift :].float().sum(-1)
    return total


def _reads(config: ModelConfig, via: Callable[[Tensor], Tensor]) -> tuple[Read, ...]:
    return tuple(Read(f"blocks.{layer}.attn.hook_pattern", via) for layer in range(config.n_layers))


def _compute(
    trace: Trace, batch: Batch, model: Transformer, via: Callable[[Tensor], Tensor]
) -> Mapping[str, Tensor]:
    if batch.keep is not None or batch.documents is not None:
        raise ValueError("head scores require the plain rows of RepeatedTokens, got a padded or packed batch")
    layers = torch.stack([trace[read] for read in _reads(model.config, via)], 1)
    return dict(zip(SCORES, layers.unbind(-1), strict=True))


def _finish(merged: Means | Rows, data: RepeatedTokens) -> "xr.Dataset":
    assert isinstance(merged, Means)
    n = data.length
    uniform = torch.ones(n, n).tril() / torch.arange(1, n + 1)[:, None]
    null = repeat_scores(uniform[None, None], data.period)[0, 0]
    values: dict[str, tuple[Sequence[str], Tensor]] = {}
    for i, name in enumerate(SCORES):
        moments = merged.moments[name]
        low, high = moments.interval()
        cells = {"": moments.mean, "_low": low, "_high": high}
        values |= {f"{name}{suffix}": (("layer", "head"), v) for suffix, v in cells.items()}
        values[f"{name}_null"] = ((), null[i])
    rows = next(iter(merged.moments.values())).n
    n_layers, n_heads = values["induction"][1].shape
    return labelled(
        values,
        coords={"layer": range(n_layers), "head": range(n_heads)},
        attrs={
            "rows": rows, "period": data.period, "repeats": data.repeats, "seed": data.seed, "unit": "attention mass",
            "interval": "95 % over rows", "null": "uniform causal attention",
        },
    )  # fmt: skip
