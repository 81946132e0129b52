"""Does context help? The loss by token index, and the in-context-learning score (Olsson et al. 2022).

A model that learns from its context predicts the 500th token of a text better than the 50th. The loss is computed from
the last residual stream, some rows of logits at a time, and dies with its batch: only its moments per index remain.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from interp.core.results import labelled
from interp.core.stats import MaskedMeans, MaskedMoments, Means, Partial, Rows
from interp.data.batch import Batch
from interp.data.text import Prompts
from interp.dynamics.checkpoints import over_checkpoints
from interp.lenses.lens import CHUNK
from interp.model.config import ModelConfig
from interp.model.loss import predicted
from interp.model.mask import Layout
from interp.model.sites import final_stream
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer
from interp.passes.analysis import Analysis, NotFiniteError, run_batches
from interp.passes.observe import Subject

if TYPE_CHECKING:
    import xarray as xr

Data = Prompts | Iterable[Batch]
"""Texts, token ids, a batch, or a stream of batches."""
INDEX = "tokens before it in its text: 1 for the first after BOS"


def in_context(
    model: Subject,
    data: Data,
    *,
    early: int = 50,
    late: int = 500,
    prepend_bos: bool = True,
    batch_size: int = 32,
) -> "xr.Dataset":
    """The loss at every token index, and the in-context-learning score loss(late) - loss(early).

    Returns Dataset[index]: `loss` in nats, mean over the texts that reach the index, with `loss_low` and `loss_high`
    (95 % over texts; NaN for fewer than two) and `count`, how many they are; and `score` (Olsson et al. 2022, there
    500 and 50 of 512), the mean of the difference in each text that has both indices, with `score_low`, `score_high`.
    Negative = context helps; a model that uses none scores 0 where both indices see the same kind of token.
    index = how many tokens stand before it: with BOS in front it is the k-th token of the text, and BOS is index 0,
    which has no loss. Padded and packed rows count where they have a token; every packed text is one.
    Caveats: what makes late tokens easier counts, be it induction, topic or layout; compare the same texts only.
    Errors: ValueError if no text reaches `late`, for a model that is not causal or has no unembedding, NaN losses.

    Example:
        >>> rows = interp.RepeatedTokens(period=10, repeats=3).tokens(model.cfg.d_vocab, bos=0)
        >>> interp.dynamics.in_context.in_context(model, rows, early=5, late=25).score
    """
    analysis = position_losses(model.transformer.config, early=early, late=late)
    batches = _batches(model, data, prepend_bos, batch_size)
    return run_batches([analysis], model.transformer, batches)[analysis.name]


def position_losses(config: ModelConfig, *, early: int = 50, late: int = 500) -> Analysis:
    """The analysis behind `in_context`."""
    _check(config)
    if not 1 <= early < late < config.n_ctx:
        raise ValueError(
            f"1 <= early < late < {config.n_ctx}, the model's context, is required, got early={early}, late={late}"
        )
    return Analysis(
        name="in_context",
        reads=_reads(config),
        compute=partial(_curves, early=early, late=late),
        reduction=MaskedMeans,
        finish=partial(_finish, early=early, late=late),
    )


def loss_map(
    load: Callable[[str], Subject],
    revisions: Sequence[str],
    data: Data,
    *,
    early: int = 50,
    late: int = 500,
    span: float = 2.0,
) -> "xr.Dataset":
    """The loss by token index and training step, and how fast it falls with the logarithm of the index.

    Returns Dataset[step, index]: all of `in_context` at each checkpoint, and `slope` = d loss / d log(index) in nats
    per e-fold (Olsson et al. 2022), the least-squares slope over the indices from index / span to index * span; a wider
    span smooths more. load, revisions: as in `over_checkpoints`.

    Example:
        >>> rows = interp.RepeatedTokens(period=10, repeats=3).tokens(model.cfg.d_vocab, bos=0)
        >>> loss_map({"step10": model}.__getitem__, ["step10"], rows, early=5, late=25).slope
    """
    if isinstance(data, Iterator):
        data = list(data)  # it must last for every checkpoint
    found = over_checkpoints(load, revisions, partial(in_context, data=data, early=early, late=late))
    loss = torch.tensor(found.loss.transpose("step", "index").to_numpy())
    slope = log_index_slope(loss, torch.tensor(found.index.to_numpy()), span=span)
    return found.assign(slope=(("step", "index"), slope.numpy())).assign_attrs(
        interp_analysis="loss_map", span=span
    )


def one_token_losses(
    model: Subject, data: Data, *, seed: int = 0, prepend_bos: bool = True, batch_size: int = 32
) -> "xr.Dataset":
    """The loss of one token of every text, always the same one: the coordinates of a snapshot of training.

    Returns Dataset[example]: `loss` in nats and `index` of the token. Which token depends on the text and the seed
    alone, so that all checkpoints are asked about the same ones. Feed the results of several checkpoints
    (`over_checkpoints`) to `per_token_loss_pca`. Errors: ValueError for packed rows and texts of a single token.

    Example:
        >>> interp.dynamics.in_context.one_token_losses(model, ["When Mary went", "The cat sat on"]).loss
    """
    analysis = chosen_losses(model.transformer.config, seed=seed)
    batches = _batches(model, data, prepend_bos, batch_size)
    return run_batches([analysis], model.transformer, batches)[analysis.name]


def chosen_losses(config: ModelConfig, *, seed: int = 0) -> Analysis:
    """The analysis behind `one_token_losses`."""
    _check(config)
    dice = torch.Generator().manual_seed(seed)
    keys = torch.randint(1, 2**31, (config.n_ctx,), generator=dice)
    return Analysis(
        name="one_token_losses",
        reads=_reads(config),
        compute=partial(_chosen, keys=keys),
        reduction=Rows,
        finish=partial(_finish_chosen, seed=seed),
    )


def by_text(losses: Float[Tensor, "b n"], batch: Batch) -> Float[Tensor, "t n"]:
    """The losses of every text of a batch by token index; NaN where it has none. Column i is index i + 1."""
    if batch.keep is None and batch.documents is None:
        return losses
    n = batch.tokens.shape[1]
    starts = torch.zeros_like(batch.tokens, dtype=torch.bool)
    starts[:, 0] = True
    if batch.documents is not None:
        starts[:, 1:] = batch.documents[:, 1:] != batch.documents[:, :-1]
        starts &= batch.documents >= 0
    text = starts.flatten().cumsum(0).view_as(batch.tokens) - 1
    index = Layout(batch.keep, batch.documents).positions(n, 0, losses.device)
    known = ~losses.isnan()
    found = losses.new_full((int(text[-1, -1]) + 1, n - 1), torch.nan)
    found[text[:, 1:][known], index[:, 1:][known] - 1] = losses[known]
    return found


def log_index_slope(
    loss: Float[Tensor, "*s n"], index: Int[Tensor, "n"], *, span: float
) -> Float[Tensor, "*s n"]:
    """d loss / d log(index): the least-squares slope over the indices in [index / span, index * span], in float64.

    The two neighbours always count. NaN where fewer than two losses are known. Every sum over a window is a
    difference of running sums.
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


def _check(config: ModelConfig) -> None:
    if not config.causal:
        raise ValueError("the loss by token index requires a causal model; this one sees what it predicts")
    if not config.unembed:
        raise ValueError("a loss requires an unembedding; this model ends in its residual stream")


def _batches(model: Subject, data: Data, prepend_bos: bool, batch_size: int) -> Iterator[Batch]:
    """Any data as batches of at most `batch_size` rows, checked against the model."""
    for prompts in _stream(data):
        yield from model.text.batch(prompts, prepend_bos=prepend_bos).split(batch_size)


def _stream(data: Data) -> Iterator[Prompts]:
    if isinstance(data, str | Tensor | Batch):
        yield data
        return
    if isinstance(data, Sequence):
        texts = [item for item in data if isinstance(item, str)]
        if len(texts) == len(data):
            yield texts
            return
    for item in data:
        if not isinstance(item, Batch):
            raise ValueError(
                f"texts, token ids or batches are required, got {type(item).__name__} in a stream"
            )
        yield item


def _reads(config: ModelConfig) -> tuple[Read, ...]:
    return (Read(final_stream(config)),)


@torch.no_grad()
def _losses(trace: Trace, batch: Batch, model: Transformer) -> Float[Tensor, "b n"]:
    """Cross-entropy in nats of every token after the first; NaN where nothing predicts it. Column i: token i + 1."""
    stream, target = trace[_reads(model.config)[0]][:, :-1], batch.tokens[:, 1:]
    counted = predicted(batch.keep, batch.documents)
    known = torch.ones_like(target, dtype=torch.bool) if counted is None else counted
    wide = torch.promote_types(stream.dtype, torch.float32)
    parts = zip(stream[known].split(CHUNK), target[known].split(CHUNK), strict=True)
    each = [F.cross_entropy(model.read_out(x).to(wide), t, reduction="none") for x, t in parts]
    found = torch.full(target.shape, torch.nan, dtype=wide, device=stream.device)
    found[known] = torch.cat(each)
    if not bool(found[known].isfinite().all()):
        raise NotFiniteError("finite losses are required; the model's are NaN or infinite on this batch")
    return found


def _curves(trace: Trace, batch: Batch, model: Transformer, early: int, late: int) -> Mapping[str, Tensor]:
    loss = by_text(_losses(trace, batch, model), batch)
    none = loss.new_full((len(loss),), torch.nan)
    return {"loss": loss, "score": none if loss.shape[1] < late else loss[:, late - 1] - loss[:, early - 1]}


def _finish(merged: Partial, early: int, late: int) -> "xr.Dataset":
    assert isinstance(merged, Means)
    loss, score = merged.moments["loss"], merged.moments["score"]
    assert isinstance(loss, MaskedMoments) and isinstance(score, MaskedMoments)
    seen = loss.counts > 0
    n = int((torch.arange(1, len(seen) + 1, device=seen.device) * seen).amax()) if len(seen) else 0
    rows = int(score.counts)
    if rows == 0:
        raise ValueError(
            f"texts with token index {late} are required (late={late}), the longest ends at index {n}"
        )
    low, high = loss.interval()
    least, most = score.interval()
    curves = {
        "loss": loss.mean.masked_fill(~seen, torch.nan), "loss_low": low, "loss_high": high,
        "count": loss.counts.long(),
    }  # fmt: skip
    return labelled(
        "in_context",
        {name: (("index",), value[:n]) for name, value in curves.items()}
        | {"score": ((), score.mean), "score_low": ((), least), "score_high": ((), most)},
        coords={"index": range(1, n + 1)},
        attrs={
            "early": early, "late": late, "rows": rows, "unit": "nats", "token_index": INDEX,
            "contrast": "loss(late) - loss(early) within a text; negative = context helps",
            "null": "0: no use of context", "interval": "95 % over texts",
        },
    )  # fmt: skip


def _chosen(trace: Trace, batch: Batch, model: Transformer, keys: Int[Tensor, "c"]) -> Mapping[str, Tensor]:
    """One token per row: its index is a hash of the row's tokens, whatever batch and padding they come in."""
    if batch.documents is not None:
        raise ValueError("one token per example requires one text per row, got a packed batch")
    lengths = batch.lengths
    if int(lengths.min()) < 2:
        raise ValueError("texts of at least two tokens are required, got one of a single token")
    position = Layout(batch.keep).positions(batch.tokens.shape[1], 0, batch.tokens.device)
    mixed = (batch.tokens + 1) * keys.to(batch.tokens.device)[position]
    if batch.keep is not None:
        mixed = mixed * batch.keep
    index = 1 + mixed.sum(1) % (lengths - 1)
    loss = by_text(_losses(trace, batch, model), batch)
    return {"loss": loss.gather(1, index[:, None] - 1)[:, 0], "index": index}


def _finish_chosen(merged: Partial, seed: int) -> "xr.Dataset":
    assert isinstance(merged, Rows)
    loss = merged.rows["loss"]
    return labelled(
        "one_token_losses",
        {name: (("example",), value) for name, value in merged.rows.items()},
        coords={"example": range(len(loss))},
        attrs={"unit": "nats", "token_index": INDEX, "seed": seed},
    )
