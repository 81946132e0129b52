"""What every head does, in one table: where it looks on repeated tokens, what it copies, whom it names, and a label.

Olsson et al. 2022 for repeats and copying, Wang et al. 2022 for names, Gould et al. 2023 for successors. Every pattern
is reduced where it arises and dies with its layer.
"""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from interp.analyses.circuits import Circuits
from interp.analyses.copying import eigenvalue_scores
from interp.analyses.direct_copying import chance_copying, copying_scores
from interp.analyses.labels import labels
from interp.analyses.repeats import (
    SCORES,
    RepeatedTokens,
    distance_kernel,
    even_attention,
    pattern_scores,
    repeat_scores,
)
from interp.analyses.residual import not_linear
from interp.analyses.sentences import IndirectObjects, sentence_scores
from interp.analyses.shares import NO_SHARES, signed_shares, without_shares
from interp.analyses.successor import known_sequences, successor_hits
from interp.core.results import labelled
from interp.core.stats import Means, Moments, Partial
from interp.engine.analysis import Analysis, run_batches
from interp.engine.batch import Batch
from interp.engine.observe import Subject
from interp.engine.text import Text
from interp.model.config import ModelConfig
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["SCORES", "RepeatedTokens", "attention_kernel", "head_scores", "heads", "repeat_scores"]

Values = dict[str, tuple[Sequence[str], Tensor]]
REPEATS, SENTENCES = RepeatedTokens(), IndirectObjects()
"""What heads are asked about unless told otherwise."""
HEAD = ("layer", "head")
UNITS = {"name_mover": "logits", "copying": "copying score", "copying_weights": "copying score"}
"""Units of the scores that are no share of attention."""


def heads(
    model: Subject,
    data: RepeatedTokens = REPEATS,
    *,
    sentences: IndirectObjects | None = SENTENCES,
    batch_size: int = 16,
) -> "xr.Dataset":
    """A table of what every head does: scores with 95 % intervals and chance levels, and a plain-word `label`.

    Returns Dataset[layer, head]; each score has `_low` and `_high` (95 % over rows, draws of a sentence, or items) and
    `_null`, a scalar or per layer or head.
    On repeated random tokens, in [0, 1]: `previous_token`, `current_token`, `first_token` (mean attention there),
    `duplicate_token` and `induction` (sum over all earlier copies, or what followed them, over the queries that have
    one: the prefix-matching score), `local` (the last 5 tokens), `entropy` (H_i / log(i + 1)); null: attention spread
    evenly over what the layer may see. `peak_distance`: where `attention_kernel` is largest. Where weights may be
    negative or sum to anything (differential, lightning, pooling) they count as shares of all that a query weighs,
    a_ij / sum_j |a_ij|, scores lie in [-1, 1], `entropy` is NaN, and attrs `no_shares` names the layers.
    `copying`: of what a head raises when it attends to a token, the token's own part (Olsson et al. 2022, -1 to 1;
    chance is about -0.86). `copying_weights`: the same from the weights, by eigenvalues (exact: no interval; chance 0).
    `successor`: share of items (numbers, months, letters, ...) that the weights map to the next one.
    On indirect-object sentences: `to_receiver`, `to_giver`, `name_mover` (logits), `s_inhibition`.
    Scores that the model does not allow are absent, and attrs `no_copying`, `no_sentences`, `no_successor` say why.
    Caveat: attention says where a head looks, not what it does; direct effects leave out what goes through later parts.
    Errors: ValueError if the rows do not fit the context or the model is not causal.

    Example:
        >>> table = interp.heads(model)
        >>> table.label.sel(layer=1).values
        >>> table.induction.argmax(...)
    """
    config = model.transformer.config
    table = _on_repeats(model, data, batch_size).drop_dims("distance")
    parts = [_names(model, sentences, batch_size)]
    if _why_not_copied(config) is None:
        circuits = Circuits(model.transformer, folded=True, embedding="effective")
        parts += [_copying_weights(circuits), _successors(circuits, model.text)]
    for values, reasons in parts:
        table = table.merge(labelled("heads", values)).assign_attrs(reasons)
    for name in table.data_vars:
        score = re.sub("_(low|high|null|null_sd)$", "", str(name))
        table[name].attrs["unit"] = UNITS.get(score, table.attrs["unit"])
    return table.assign(label=labels(table))


def attention_kernel(model: Subject, data: RepeatedTokens = REPEATS, *, batch_size: int = 16) -> "xr.Dataset":
    """How each head's attention falls off with distance on random tokens, before anything repeats at that distance.

    Returns Dataset[layer, head, distance]: `kernel`, the mean attention to the token `distance` before the query, over
    the queries that have one besides BOS, with `kernel_low` and `kernel_high` (95 % over rows) and `kernel_null[layer,
    distance]`, that of attention spread evenly over what the layer may see. Distances end 2 short of the period.
    Errors: as in `heads`.

    Example:
        >>> interp.analyses.heads.attention_kernel(model).kernel.sel(layer=0, head=1, distance=1)
    """
    table = _on_repeats(model, data, batch_size)
    names = [name for name, values in table.items() if "distance" in values.dims]
    return table[names].assign_attrs(interp_analysis="attention_kernel")


def head_scores(config: ModelConfig, data: RepeatedTokens) -> Analysis:
    """The analysis behind `heads` and `attention_kernel`, for batches that `data` made."""
    if not config.causal:
        raise ValueError("head scores on repeats require a causal model")
    layers, first = range(config.n_layers), partial(_sample, n=data.sample)
    plain, signed = (partial(_reduced, data=data, signed=signed) for signed in (False, True))
    vias = [signed if layer in without_shares(config) else plain for layer in layers]
    patterns = [Read(f"blocks.{i}.attn.hook_pattern", via) for i, via in enumerate(vias)]
    values = [
        Read(f"blocks.{layer}.attn.hook_v", first) for layer in layers if _why_not_copied(config) is None
    ]
    return Analysis(
        name="heads",
        reads=(*patterns, *values),
        compute=partial(_compute, patterns=patterns, values=values, data=data),
        reduction=Means,
        finish=partial(_finish, config=config, data=data),
    )


def _on_repeats(model: Subject, data: RepeatedTokens, batch_size: int) -> "xr.Dataset":
    config = model.transformer.config
    if data.length > config.n_ctx:
        raise ValueError(f"rows of {data.length} tokens do not fit the context of {config.n_ctx}")
    batch = Batch(data.tokens(config.d_vocab, model.text.bos_id or 0), bos=True)
    analysis = head_scores(config, data)
    return run_batches([analysis], model.transformer, batch.split(batch_size))["heads"]


def _why_not_copied(config: ModelConfig) -> str | None:
    """Why heads have no copying scores: no OV circuit, or no unembedding behind it; None if they have."""
    if what := not_linear(config):
        return f"this model {what}"
    splits = all(mixer.traits.additive for mixer in config.mixers)
    return None if splits else "a mixer of this model makes no pattern of the values"


def _reduced(
    pattern_bhqk: Float[Tensor, "b h q k"], data: RepeatedTokens, *, signed: bool = False
) -> Float[Tensor, "b h s"]:
    """Every score of a pattern (of its `signed_shares`) and, behind them, its kernel."""
    pattern_bhqk = signed_shares(pattern_bhqk) if signed else pattern_bhqk
    kernel = distance_kernel(pattern_bhqk, data.farthest)
    return torch.cat((pattern_scores(pattern_bhqk, data.period, kernel), kernel), -1)


def _sample(v: Float[Tensor, "b p g e"], n: int) -> Float[Tensor, "b s g e"]:
    """The values of the first tokens behind BOS."""
    return v[:, 1 : 1 + n]


def _compute(
    trace: Trace,
    batch: Batch,
    model: Transformer,
    patterns: Sequence[Read],
    values: Sequence[Read],
    data: RepeatedTokens,
) -> Mapping[str, Tensor]:
    if batch.keep is not None or batch.documents is not None:
        raise ValueError("head scores require the plain rows of RepeatedTokens, got a padded or packed batch")
    numbers = torch.stack([trace[read] for read in patterns], 1)
    scores, kernel = numbers[..., : len(SCORES)], numbers[..., len(SCORES) :]
    scores[:, list(without_shares(model.config)), :, SCORES.index("entropy")] = torch.nan
    found = dict(zip(SCORES, scores.unbind(-1), strict=True)) | {"kernel": kernel}
    if values:
        first = batch.tokens[:, 1 : 1 + data.sample]
        found["copying"] = copying_scores([trace[read] for read in values], first, model)
    return found


def _finish(merged: Partial, config: ModelConfig, data: RepeatedTokens) -> "xr.Dataset":
    assert isinstance(merged, Means)
    moments = dict(merged.moments)
    windows = [config.window if config.is_local(layer) else None for layer in range(config.n_layers)]
    even = {window: _reduced(even_attention(data.length, window), data)[0, 0] for window in set(windows)}
    null = torch.stack([even[window] for window in windows])
    kernel = moments.pop("kernel")
    values: Values = {"peak_distance": (HEAD, kernel.mean.argmax(-1))}
    values |= _cells("kernel", kernel, (*HEAD, "distance"), ("layer", "distance"), null[:, len(SCORES) :])
    for i, name in enumerate(SCORES):
        values |= _cells(name, moments[name], HEAD, ("layer",), null[:, i])
    if "copying" in moments:
        chance = torch.tensor(chance_copying(data.sample))
        values |= _cells("copying", moments["copying"], HEAD, (), chance)
    why, other = _why_not_copied(config), without_shares(config)
    return labelled(
        "heads",
        values,
        coords={
            "layer": range(config.n_layers), "head": range(config.n_heads), "distance": range(data.farthest + 1),
        },
        attrs={
            "rows": kernel.n, "period": data.period, "repeats": data.repeats, "seed": data.seed,
            "unit": "attention mass", "interval": "95 % over rows",
            "null": "attention spread evenly over what the layer may see; copying: Gaussian logits",
            **({"no_copying": why, "no_successor": why} if why else {}),
            **({"no_shares": f"layers {', '.join(map(str, other))}: {NO_SHARES}"} if other else {}),
        },
    )  # fmt: skip


def _cells(
    name: str, moments: Moments, dims: Sequence[str], null_dims: Sequence[str], null: Tensor
) -> Values:
    """A score with the ends of its interval and its null, as variables."""
    return moments.cells(name, dims) | {f"{name}_null": (null_dims, null)}


def _names(
    model: Subject, sentences: IndirectObjects | None, batch_size: int
) -> tuple[Values, dict[str, str | int]]:
    """The scores on indirect-object sentences, and how many those are; or why there are none."""
    if sentences is None:
        return {}, {"no_sentences": "not asked for"}
    try:
        batches = sentences.batches(model.text)
    except ValueError as cause:
        return {}, {"no_sentences": str(cause)}
    values: Values = {}
    for name, (moments, null) in sentence_scores(model.transformer, batches, batch_size).items():
        values |= _cells(name, moments, HEAD, HEAD, null)
    return values, {"sentences": len(batches[0])}


def _successors(circuits: Circuits, text: Text) -> tuple[Values, dict[str, str | int]]:
    """The successor score over the items of all sequences, and which those are; or why there is none.

    Its null is that of a random order of the items: 1 / (n - 1) for a head that maps no item to itself, else less.
    """
    try:
        sequences = known_sequences(text)
    except ValueError as cause:
        return {}, {"no_successor": str(cause)}
    hits = [successor_hits(circuits, ids).cpu() for ids in sequences.values()]
    chance = torch.cat([torch.full((len(each),), 1 / len(each)) for each in hits]).mean()
    values = _cells("successor", Moments.of(torch.cat(hits).double()), HEAD, (), chance)
    return values, {"successor_items": ", ".join(f"{len(ids)} {name}" for name, ids in sequences.items())}


def _copying_weights(circuits: Circuits) -> tuple[Values, dict[str, str | int]]:
    """Eigenvalue positivity of every head's full OV circuit: exact, so without an interval of its own.

    The null is 0; 1.5 / d_head is the standard deviation of a random head's score, if d_model is much larger: the
    eigenvalues of a Gaussian matrix fill a disc of radius R, so that their sizes sum to 2/3 R d_head, and they
    themselves to a number of deviation R.
    """
    score = eigenvalue_scores(circuits)
    null, spread = torch.zeros(()), torch.tensor(1.5 / circuits.model.config.head_width)
    values: Values = {f"copying_weights{end}": (HEAD, score) for end in ("", "_low", "_high")}
    return values | {"copying_weights_null": ((), null), "copying_weights_null_sd": ((), spread)}, {}
