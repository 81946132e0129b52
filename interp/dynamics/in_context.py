"""Does context help? The loss by token index, and the in-context-learning score (Olsson et al. 2022).

A model that learns from its context predicts the 500th token of a text better than the 50th. The loss is computed from
the last residual stream, some rows of logits at a time, and dies with its batch: only its moments per index remain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from interp.core.boundary import public
from interp.core.kinds import Positive
from interp.core.results import Score, labelled, scored
from interp.core.stats import (
    ANYWHERE,
    FEWEST,
    POSITIVE,
    MaskedMeans,
    MaskedMoments,
    Partial,
    Replicates,
    Rows,
    if_at_least,
    over,
)
from interp.data.batch import Batch
from interp.data.sources import Data
from interp.data.stream import DataSource
from interp.dynamics.checkpoints import over_checkpoints
from interp.lenses.lens import CHUNK
from interp.model.config import ModelConfig
from interp.model.sites import final_stream
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer
from interp.passes.observe import Model, Subject
from interp.passes.question import ByRow, NotFiniteError, Question, Reading
from interp.runs.functions import of_data

if TYPE_CHECKING:
    import xarray as xr

FEWEST_TEXTS = 1024
"""Fewest texts for an interval of the mean loss at one index: where tokens repeat, few texts make up the whole loss."""
INDEX = "tokens before it in its text: 1 for the first after BOS"
SHORTEST = 3
"""Fewest tokens of a text that has two indices to compare."""


@dataclass(frozen=True)
class InContext(Question):
    """Loss at every token index, and how far context lowers it: loss(index) - loss(early).

    The index of a token is how many tokens stand before it in its text: with BOS in front it is the k-th token of the
    text, and BOS is index 0, which has no loss. Padded and packed rows count where they have a token; every packed text
    is one.

    Args:
        data: prompts, token ids, a batch, files or a stream of any size.
        early: index that losses are compared with; None: n / 8, at least 1. Here n is the model's context or its half,
            quarter, eighth, ..., the longest whose late index at least half of the texts reach. If one of `early` and
            `late` is given, the other follows in the same way. attrs["early"] and attrs["late"] say which they are.
        late: index of the in-context-learning score; None: n - n / 8, as for `early`.

    Returns:
        Dataset[index, score]. Scores: `loss`, the mean over the texts that reach the index; `in_context`, the mean of
        loss(index) - loss(early) over the texts that have both indices, negative where context helps. Its value at
        index `late` is the in-context-learning score: `found.value.sel(score="in_context", index=found.attrs["late"])`.

        - `value`: in nats.
        - `low`, `high`: 95 % interval over texts; NaN for fewer than three, and of `loss` for fewer than 1 024.
        - `null`: of `in_context` 0, no use of context.
        - `n`: number of texts.

    Raises:
        ValueError: data in which no text reaches `late`, a model that is not causal or has no unembedding, NaN losses.

    Caveats:
        What makes late tokens easier counts, be it induction, topic or layout; compare the same texts only, at the same
        indices.

    Source:
        Olsson et al. 2022, there of the indices 500 and 50 of 512.

    See Also:
        `loss_map`: over the checkpoints of a training run.

    Example:
        >>> rows = interp.tasks.RepeatedTokens(period=10, repeats=3).tokens(model.cfg.d_vocab, bos=0)
        >>> found = in_context(model, rows)
        >>> found.attrs["early"], found.attrs["late"], found.value.dims
        (4, 28, ('index', 'score'))
    """

    of_layers: ClassVar[bool] = False

    _: KW_ONLY
    early: int | None = None
    late: int | None = None

    def bind(self, model: Subject) -> ByRow:
        """The losses of every text by index, read off the final stream."""
        config = model.transformer.config
        _check_config(config)
        compared = compared_indices(config.n_ctx, self.early, self.late)
        return ByRow(
            self.name,
            Reading(_reads(config), partial(_curves, early=[early for early, _ in compared])),
            MaskedMeans,
            partial(_finish, name=self.name, compared=compared),
        )


@dataclass(frozen=True)
class OneTokenLosses(Question):
    """Loss of one token of every text, the same token at every checkpoint: coordinates of a snapshot of training.

    Which token depends on the text and the seed alone. The values of several checkpoints (`over_checkpoints`) are what
    `per_token_loss_pca` takes.

    Args:
        data: prompts, token ids, a batch, files or a stream of any size; one text per row.
        seed: of the choice of tokens.

    Returns:
        Dataset[prompt]:

        - `value`: the loss, in nats.
        - `index`: of the token, how many tokens stand before it.

    Raises:
        ValueError: packed rows and texts of a single token, and as in `in_context`.

    Source:
        Olsson et al. 2022.

    See Also:
        `in_context`: the loss at every index, mean over texts.

    Example:
        >>> one_token_losses(model, [prompt, "The cat sat on"]).value.dims
        ('prompt',)
    """

    of_layers: ClassVar[bool] = False

    _: KW_ONLY
    seed: int = 0

    def bind(self, model: Subject) -> ByRow:
        """The loss of one token of every text, read off the final stream."""
        config = model.transformer.config
        _check_config(config)
        generator = torch.Generator().manual_seed(self.seed)
        keys = torch.randint(1, 2**31, (config.n_ctx,), generator=generator)
        return ByRow(
            self.name,
            Reading(_reads(config), partial(_chosen_losses, keys=keys)),
            Rows,
            partial(_finish_chosen, name=self.name, seed=self.seed),
        )


in_context = of_data(InContext)


@public()
def loss_map(
    load: Callable[[str], Model],
    revisions: Sequence[str],
    data: DataSource | Data,
    *,
    early: int | None = None,
    late: int | None = None,
    span: Positive = 2.0,
) -> xr.Dataset:
    """Loss by token index and training step, and how fast it falls with the logarithm of the index.

    Args:
        load: function from a revision ("step2850") to its model.
        revisions: names of the checkpoints, as in `over_checkpoints`.
        data: prompts, token ids, a batch, files or a stream of any size.
        early, late: indices that are compared, as in `in_context`.
        span: factor between an index and the ends of the window that its slope is taken over; a wider span smooths
            more.

    Returns:
        Dataset[step, index, score]: all of `in_context` at each checkpoint, and

        - `slope` [step, index]: d loss / d log(index) in nats per e-fold, the least-squares slope over the indices from
          index / span to index * span.

    Raises:
        ValueError: as `over_checkpoints` and `in_context`; a span of at most 1.

    Source:
        Olsson et al. 2022.

    Example:
        >>> rows = interp.tasks.RepeatedTokens(period=10, repeats=3).tokens(model.cfg.d_vocab, bos=0)
        >>> loss_map({"step10": model}.__getitem__, ["step10"], rows).slope.dims
        ('step', 'index')
    """
    if isinstance(data, Iterator):
        data = list(data)  # it must last for every checkpoint
    result = over_checkpoints(
        load,
        revisions,
        InContext(early=early, late=late),
        data,
    )
    loss = torch.tensor(result.value.sel(score="loss").transpose("step", "index").to_numpy())
    slope = log_index_slope(loss, torch.tensor(result.index.to_numpy()), span=span)
    attrs = {"unit": "nats per e-fold of the index"}
    return result.assign(slope=(("step", "index"), slope.numpy(), attrs)).assign_attrs(
        interp_analysis="loss_map", span=span
    )


one_token_losses = of_data(OneTokenLosses)


def compared_indices(n_ctx: int, early: int | None, late: int | None) -> list[tuple[int, int]]:
    """Pairs of an early and a late index that may be compared, in order of falling late index.

    Args:
        n_ctx: the model's context.
        early, late: given indices; None: chosen from the context. One pair if both are given.

    Returns:
        The pairs (early, late).

    Raises:
        ValueError: indices that no text of the context has.

    Example:
        >>> compared_indices(32, None, None)
        [(4, 28), (2, 14), (1, 7), (1, 3)]
    """
    if early is not None and late is not None:
        pairs = [(early, late)]
    elif late is not None:
        pairs = [(max(1, late // 7), late)]
    else:
        halves = [n_ctx >> i for i in range(n_ctx.bit_length()) if n_ctx >> i >= SHORTEST]
        first = [max(1, n // 8) for n in halves]
        pairs = [
            (e if early is None else early, n - e)
            for n, e in zip(halves, first, strict=True)
            if early is None or early < n - e
        ]
    if not pairs or not all(1 <= first < second < n_ctx for first, second in pairs):
        raise ValueError(
            f"1 <= early < late < {n_ctx}, the model's context, is required, got early={early}, late={late}"
        )
    return pairs


def log_index_slope(
    loss: Float[Tensor, "*s n"], index: Int[Tensor, "n"], *, span: float
) -> Float[Tensor, "*s n"]:
    """Slope d loss / d log(index): least squares over the indices in [index / span, index * span], in float64.

    Both neighbours of an index always belong to its window. Sums over windows are differences of running sums.

    Args:
        loss: [*s n], NaN where there is none.
        index: [n], ascending.
        span: factor between an index and the ends of its window, above 1.

    Returns:
        [*s n], per e-fold of the index; NaN where fewer than two losses are known.

    Raises:
        ValueError: a span of at most 1.
    """
    if not span > 1:
        raise ValueError(f"span must be greater than 1, got {span}")
    n, place = len(index), torch.arange(len(index))
    first = torch.minimum(torch.searchsorted(index.double(), index / span), (place - 1).clamp_min(0))
    last = torch.maximum(
        torch.searchsorted(index.double(), index * span, right=True), (place + 2).clamp_max(n)
    )
    known = ~loss.isnan()
    x = index.double().log().expand_as(loss)
    y = torch.where(known, loss.double(), 0.0)
    y = y - y.sum(-1, keepdim=True) / known.sum(-1, keepdim=True).clamp_min(1)

    def window(values: Float[Tensor, "*s n"]) -> Float[Tensor, "*s n"]:
        running = F.pad(values.masked_fill(~known, 0.0).cumsum(-1), (1, 0))
        return running[..., last] - running[..., first]

    count, sum_x, sum_y = window(torch.ones_like(x)), window(x), window(y)
    covariance = count * window(x * y) - sum_x * sum_y
    variance = count * window(x * x) - sum_x.square()
    return (covariance / variance).masked_fill(count < 2, torch.nan)


def _check_config(config: ModelConfig) -> None:
    if not config.causal:
        raise ValueError("the loss by token index requires a causal model; this one sees what it predicts")
    if not config.unembed:
        raise ValueError("a loss requires an unembedding; this model ends in its residual stream")


def _reads(config: ModelConfig) -> tuple[Read, ...]:
    return (Read(final_stream(config)),)


@torch.no_grad()
def _losses(trace: Trace, batch: Batch, model: Transformer) -> Float[Tensor, "t n"]:
    """Cross-entropy in nats of every token of every text; NaN where nothing predicts it. Column i is index i + 1."""
    model.config.require_tokens("a next-token loss")
    stream, target = trace[_reads(model.config)[0]][:, :-1], batch.tokens[:, 1:]
    counted = batch.predicted
    known = torch.ones_like(target, dtype=torch.bool) if counted is None else counted
    dtype = torch.promote_types(stream.dtype, torch.float32)
    parts = zip(stream[known].split(CHUNK), target[known].split(CHUNK), strict=True)
    losses = [F.cross_entropy(model.read_out(x.to(dtype)), t, reduction="none") for x, t in parts]
    padded = torch.full(target.shape, torch.nan, dtype=dtype, device=stream.device)
    padded[known] = torch.cat(losses)
    if not bool(padded[known].isfinite().all()):
        raise NotFiniteError("finite losses are required; the model's are NaN or infinite on this batch")
    return batch.by_text(F.pad(padded, (1, 0), value=torch.nan), batch.real, torch.nan)[:, 1:]


def _curves(trace: Trace, batch: Batch, model: Transformer, early: Sequence[int]) -> Mapping[str, Tensor]:
    """The losses of every text `[t n]`, and their differences from the loss at every early index `[t e n]`."""
    loss = _losses(trace, batch, model)
    nans = loss.new_full((len(loss),), torch.nan)
    first = torch.stack([loss[:, i - 1] if i <= loss.shape[1] else nans for i in early], 1)
    return {"loss": loss, "in_context": loss[:, None] - first[..., None]}


def _finish(merged: Partial, name: str, compared: Sequence[tuple[int, int]]) -> xr.Dataset:
    """The Dataset[index, score]; raises ValueError if no text reaches the late index."""
    assert isinstance(merged, MaskedMeans)
    loss, changes = merged.moments["loss"], merged.moments["in_context"]
    assert isinstance(loss, MaskedMoments) and isinstance(changes, MaskedMoments)
    seen = loss.counts > 0
    n = int((torch.arange(1, len(seen) + 1, device=seen.device) * seen).amax()) if len(seen) else 0
    reach = [int(changes.counts[i, late - 1]) if late <= n else 0 for i, (_, late) in enumerate(compared)]
    enough = next((i for i, texts in enumerate(reach) if texts and 2 * texts >= loss.n), None)
    which = enough if enough is not None else max(range(len(reach)), key=reach.__getitem__)
    early, late = compared[which]
    if not reach[which]:
        raise ValueError(
            f"texts with token index {late} are required (late={late}), the longest ends at index {n}"
        )
    return scored(
        name,
        {
            "loss": _score(loss, n, fewest=FEWEST_TEXTS, within=POSITIVE),
            "in_context": _score(_moments_of_index(changes, which), n, 0.0),
        },
        ("index",),
        coords={"index": range(1, n + 1)},
        attrs={
            "early": early, "late": late, "rows": reach[which], "unit": "nats", "token_index": INDEX,
            "contrast": "in_context is loss(index) - loss(early) within a text; negative = context helps",
            "null": "0: no use of context", "interval": f"{over('texts')}; of the loss {if_at_least(FEWEST_TEXTS)}",
        },
    )  # fmt: skip


def _moments_of_index(moments: MaskedMoments, which: int) -> MaskedMoments:
    """The moments of one early index: row `which` of the cells `[early index]`."""
    drawn = moments.replicates
    if drawn is not None:
        drawn = Replicates(drawn.per_cell()[:, which], drawn.total[:, which])
    mean, spread, counts = (x[which] for x in (moments.mean, moments.spread, moments.counts))
    return MaskedMoments(moments.n, mean, spread, drawn, counts=counts)


def _score(
    moments: MaskedMoments,
    n: int,
    null: float = torch.nan,
    fewest: int = FEWEST,
    within: tuple[float, float] = ANYWHERE,
) -> Score:
    """The score at the first `n` token indices, from moments over texts; NaN where no text reaches the index."""
    score, absent = Score.of(moments, "nats", null, fewest=fewest, within=within), moments.counts == 0
    value, low, high = (x.masked_fill(absent, torch.nan)[:n] for x in (score.value, score.low, score.high))
    return Score(value, low, high, score.n[:n], score.null[:n], "nats")


def _chosen_losses(
    trace: Trace, batch: Batch, model: Transformer, keys: Int[Tensor, "c"]
) -> Mapping[str, Tensor]:
    """The loss of one token per row; its index is a hash of the row's tokens, so it does not depend on the batch."""
    batch.require_one_text("one token per example")
    lengths = batch.lengths
    if int(lengths.min()) < 2:
        raise ValueError("texts of at least two tokens are required, got one of a single token")
    mixed = (batch.tokens + 1) * keys.to(batch.tokens.device)[batch.places]
    if batch.keep is not None:
        mixed = mixed * batch.keep
    index = 1 + mixed.sum(1) % (lengths - 1)
    loss = _losses(trace, batch, model)
    return {"value": loss.gather(1, index[:, None] - 1)[:, 0], "index": index}


def _finish_chosen(merged: Partial, name: str, seed: int) -> xr.Dataset:
    assert isinstance(merged, Rows)
    return labelled(
        name,
        {variable: (("prompt",), value) for variable, value in merged.rows.items()},
        units="nats",
        attrs={"unit": "nats", "token_index": INDEX, "seed": seed},
    )
