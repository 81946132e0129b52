"""How sharp attention is: entropy per head, and how it and the largest weight change with the number of keys.

With scores in [m, M] and n visible keys every weight lies in [exp(-(M - m)) / n, exp(M - m) / n], so bounded scores
mean attention that spreads with length (Veličković et al. 2024, "softmax is not enough"). Scores here are what enters
the softmax, scale, bias and soft cap included; what a mixer does to the weights behind its softmax is not in the
numbers. Each query is reduced to four numbers where its scores arise.
"""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from interp.attention.repeats import entropy
from interp.core.precision import wide
from interp.core.results import labelled
from interp.core.stats import MaskedMeans, MaskedMoments, Partial
from interp.core.temperature import log_n_factor
from interp.data.batch import Batch
from interp.data.text import Prompts
from interp.model.config import ModelConfig
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer
from interp.passes.analysis import Analysis, run_batches
from interp.passes.observe import Subject

if TYPE_CHECKING:
    import xarray as xr

ROW = ("max_weight", "entropy", "gap", "keys")
"""What `row_numbers` gives, in order."""
HEAD = ("layer", "head")
UNITS = {"entropy": "nats", "gap": "score", "max_weight": "attention mass", "relative": "share of log n"}


def attention_entropy(
    model: Subject,
    prompts: Prompts,
    *,
    train_length: int | None = None,
    prepend_bos: bool = True,
    batch_size: int = 32,
) -> "xr.Dataset":
    """The entropy of every head's attention, in nats and as a share of what even attention would have.

    Returns Dataset[layer, head], each with `_low` and `_high` (95 % over texts): `entropy`, H_i = -sum_j a_ij log a_ij
    in nats, the mean over queries (0 log 0 = 0; the first causal row counts, with 0); `relative`, the mean of H_i /
    log n_i over the queries that see n_i >= 2 keys (i + 1 in causal rows without a window), 1 for even attention;
    `max_weight`, the mean of the largest weight.
    train_length: m; the scores of every query are multiplied by log(n_i) / log(m) before the softmax, to show what
    log-n scaling would make of them. The passes themselves are not scaled.
    Padding never counts. Attention sinks are left out: the weights are those among tokens, brought to sum 1. Attention
    to an encoder's memory is not looked at. Errors: ValueError for packed rows, texts of a single token, train_length
    below 2.

    Example:
        >>> attention_entropy(model, prompt).relative.sel(layer=0, head=1)
    """
    batch = model.text.batch(prompts, prepend_bos=prepend_bos)
    analysis = head_entropy(model.transformer.config, train_length=train_length)
    return run_batches([analysis], model.transformer, batch.split(batch_size))[analysis.name]


def dispersion(
    model: Subject,
    prompts: Prompts,
    *,
    train_length: int | None = None,
    prepend_bos: bool = True,
    batch_size: int = 32,
) -> "xr.Dataset":
    """How every head's attention spreads with the number of visible keys n.

    Returns Dataset[layer, head, n_keys], means over texts of means over the queries that see n keys, each with `_low`
    and `_high` (95 % over texts; NaN for fewer than two): `max_weight`; `entropy` in nats; `gap`, delta = largest minus
    smallest score of the query; `upper`, min(1, exp(delta) / n), and `lower`, exp(-delta) / n, between which every
    weight lies; `count`[n_keys], the texts with such a query. Source: Veličković et al. 2024, the lemma on bounded
    logits (temperature 1 here: it is in the scores); log n - H <= delta follows from it.
    train_length, padding, sinks: as in `attention_entropy`.
    Caveat: in causal models n is also the position; what changes with it may be the text. Encoders see their whole
    text, so there n is its length. Errors: as in `attention_entropy`.

    Example:
        >>> dispersion(model, prompt).max_weight.sel(layer=0, head=0, n_keys=1)
    """
    batch = model.text.batch(prompts, prepend_bos=prepend_bos)
    analysis = weights_by_keys(model.transformer.config, train_length=train_length)
    return run_batches([analysis], model.transformer, batch.split(batch_size))[analysis.name]


def head_entropy(config: ModelConfig, *, train_length: int | None = None) -> Analysis:
    """The analysis behind `attention_entropy`."""
    reads = _reads(config, train_length)
    return Analysis(
        name=_name("attention_entropy", train_length),
        reads=reads,
        compute=partial(_by_head, reads=reads),
        reduction=MaskedMeans,
        finish=partial(_finish_heads, config=config, train_length=train_length),
    )


def weights_by_keys(config: ModelConfig, *, train_length: int | None = None) -> Analysis:
    """The analysis behind `dispersion`."""
    reads = _reads(config, train_length)
    return Analysis(
        name=_name("dispersion", train_length),
        reads=reads,
        compute=partial(_by_keys, reads=reads),
        reduction=MaskedMeans,
        finish=partial(_finish_keys, config=config, train_length=train_length),
    )


def row_numbers(
    scores_bhqk: Float[Tensor, "b h q k"], train_length: int | None = None
) -> Float[Tensor, "b h q 4"]:
    """Largest weight, entropy in nats, largest minus smallest score, and number of visible keys, of every query.

    Hidden keys have the score -inf. NaN, and 0 keys, for a query that sees nothing.

    Example:
        >>> row_numbers(torch.tensor([[[[0.0, 0.0, -torch.inf]]]]))[0, 0, 0].tolist()
        [0.5, 0.6931471824645996, 0.0, 2.0]
    """
    scores = wide(scores_bhqk)
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


def _name(name: str, train_length: int | None) -> str:
    return name if train_length is None else f"{name}_log_n_{train_length}"


def _reads(config: ModelConfig, train_length: int | None) -> tuple[Read, ...]:
    log_n_factor(torch.ones(1), 2 if train_length is None else train_length)  # refuses what has no logarithm
    via = partial(row_numbers, train_length=train_length)
    return tuple(Read(f"blocks.{layer}.attn.hook_attn_scores", via) for layer in range(config.n_layers))


def _rows(trace: Trace, batch: Batch, reads: tuple[Read, ...]) -> tuple[Tensor, Tensor]:
    """The four numbers of every query `[4 b l h q]`, NaN at padding, and the number of its keys `[b l h q]`."""
    if batch.documents is not None:
        raise ValueError("attention entropy and dispersion require one text per row, got a packed batch")
    if int(batch.lengths.min()) < 2:
        raise ValueError(
            "attention over keys requires rows of at least two tokens, got one of a single token"
        )
    found = torch.stack([trace[read] for read in reads], 1)
    found = found.masked_fill(~batch.real.to(found.device)[:, None, None, :, None], torch.nan)
    return found.movedim(-1, 0), found[..., -1].nan_to_num(0.0).long()


def _by_head(trace: Trace, batch: Batch, model: Transformer, reads: tuple[Read, ...]) -> Mapping[str, Tensor]:
    (weight, spread, _, _), keys = _rows(trace, batch, reads)
    several = keys > 1
    relative = torch.where(several, spread / keys.clamp_min(2).to(spread).log(), torch.nan)
    return {
        "entropy": spread.nanmean(-1), "relative": relative.nanmean(-1), "max_weight": weight.nanmean(-1)
    }  # fmt: skip


def _by_keys(trace: Trace, batch: Batch, model: Transformer, reads: tuple[Read, ...]) -> Mapping[str, Tensor]:
    (weight, spread, gap, n), keys = _rows(trace, batch, reads)
    upper, lower = (gap.exp() / n).clamp_max(1.0), (-gap).exp() / n
    values = {"max_weight": weight, "entropy": spread, "gap": gap, "upper": upper, "lower": lower}
    counts = torch.zeros(*keys.shape[:-1], keys.shape[-1] + 1, dtype=torch.double, device=keys.device)
    counts = counts.scatter_add(-1, keys, (keys > 0).double())

    def mean(each: Float[Tensor, "b l h q"]) -> Float[Tensor, "b l h n"]:
        known = each.masked_fill(keys == 0, 0.0).double()
        return (torch.zeros_like(counts).scatter_add(-1, keys, known) / counts)[..., 1:]

    return {name: mean(each) for name, each in values.items()}


def _finish_heads(merged: Partial, config: ModelConfig, train_length: int | None) -> "xr.Dataset":
    assert isinstance(merged, MaskedMeans)
    cells = {k: v for name, m in merged.moments.items() for k, v in m.cells(name, HEAD).items()}
    found = labelled(
        "attention_entropy",
        cells,
        coords={"layer": range(config.n_layers), "head": range(config.n_heads)},
        attrs=_attrs(merged, train_length) | {"null": "relative: 1 for even attention"},
    )
    return _with_units(found)


def _finish_keys(merged: Partial, config: ModelConfig, train_length: int | None) -> "xr.Dataset":
    assert isinstance(merged, MaskedMeans)
    cells, count = {}, torch.zeros(0)
    for name, moments in merged.moments.items():
        assert isinstance(moments, MaskedMoments)
        count, absent = moments.counts.amax((0, 1)), moments.counts == 0
        for key, (dims, value) in moments.cells(name, (*HEAD, "n_keys")).items():
            cells[key] = dims, value.masked_fill(absent, torch.nan)
    longest = int(count.nonzero()[-1]) + 1
    found = labelled(
        "dispersion",
        {key: (dims, value[..., :longest]) for key, (dims, value) in cells.items()}
        | {"count": (("n_keys",), count[:longest].long())},
        coords={
            "layer": range(config.n_layers), "head": range(config.n_heads), "n_keys": range(1, longest + 1),
        },
        attrs=_attrs(merged, train_length) | {"null": "1 / n_keys and log(n_keys): even attention"},
    )  # fmt: skip
    return _with_units(found)


def _attrs(merged: MaskedMeans, train_length: int | None) -> dict[str, str | int]:
    scaled = "none" if train_length is None else f"log(n) / log({train_length})"
    rows = next(iter(merged.moments.values())).n
    return {
        "rows": rows,
        "factor": scaled,
        "interval": "95 % over texts",
        "softmax": "among tokens, sinks left out",
    }


def _with_units(found: "xr.Dataset") -> "xr.Dataset":
    for name in found.data_vars:
        base = str(name).removesuffix("_low").removesuffix("_high")
        found[name].attrs["unit"] = UNITS.get(base, "attention mass")
    return found
