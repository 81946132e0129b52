"""The logit lens: what the model would answer if it stopped at each depth.

logits_l = LN_f(x_l) W_U, the final norm RECOMPUTED on the state (nostalgebraist 2020); at the last depth these are the
model's own logits, their factor and soft cap included. It shows what a linear read-out finds, not what later layers
use.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from interp.analyses.vocabulary import LogitTiles, Reference, statistics
from interp.core.results import labelled
from interp.core.stats import Moments, Partial, Rows
from interp.engine.analysis import Analysis, run_batches
from interp.engine.batch import Batch
from interp.engine.observe import Subject
from interp.engine.text import Prompts, Text
from interp.model.config import ModelConfig
from interp.model.loss import predicted
from interp.model.sites import final_stream, find, full_name, names
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer

if TYPE_CHECKING:
    import xarray as xr

CHUNK = 128
"""Rows of logits held at a time: 25 MiB at a vocabulary of 50 257."""
STATES = (
    "resid_pre", "resid_pre_attn", "resid_mid", "resid_mid_cross", "resid_post", "normalized_resid_post",
)  # fmt: skip
"""The sites that hold the whole residual stream."""


@runtime_checkable
class Translators(Protocol):
    """What a state goes through before the final norm reads it; a `TunedLens` is one."""

    def __call__(self, site: str, state: Float[Tensor, "r d"]) -> Float[Tensor, "r d"]:
        """The state of a site in the terms of the last one."""
        ...

    def check(self, model: Transformer, sites: Sequence[str]) -> None:
        """ValueError unless it was made for this model, KeyError unless for all these sites."""
        ...


def logit_lens(
    model: Subject,
    prompts: Prompts,
    *,
    answer: str | int | Sequence[str | int] | None = None,
    top: int = 10,
    sites: str | Sequence[str] = "resid_pre",
    positions: int | Sequence[int] | None = None,
    translators: Translators | None = None,
    prepend_bos: bool = True,
    batch_size: int = 32,
) -> "xr.Dataset":
    """The lens at every depth (`0_pre` ... `final_post`) and position.

    Returns Dataset[prompt, depth, pos]: `top_token`, its text `word` and `top_prob` [.., rank], `entropy` and `kl` =
    KL(final || depth) in nats, `target_rank` (0 = most probable) and `target_prob`. The target is `answer` at every
    position if given, else the next token of the prompt; rank -1 and probability NaN where there is none. Padded
    positions hold NaN.
    sites: states to read in every block, of `STATES` (a post-norm block's `resid_mid` and `resid_post` are sums before
    their norm), or full names such as `blocks.3.hook_resid_mid`. The last depth is always the model's own answer.
    positions: which of each prompt's tokens, negative from its end; None = all. Their numbers become the coordinate.
    translators: a `TunedLens`, and the result is that of the tuned lens.
    No more than 128 rows of logits, and as many of the last depth's, exist at a time. Caveat: in float32 `kl` is exact
    to about 1e-6 nats.
    Errors: ValueError for a site that does not hold the stream, translators of another model, or a model without an
    unembedding; KeyError for a site that the model lacks; IndexError for a position that a prompt lacks.

    Example:
        >>> interp.logit_lens(model, "The capital of France is", answer=" Paris")
        >>> interp.logit_lens(model, prompt, sites=("resid_pre", "resid_mid"), positions=-1).depth.values[1]
        '0_mid'
    """
    batch = model.text.batch(prompts, prepend_bos=prepend_bos)
    if answer is not None:
        batch = batch.with_answers(model.text.targets(answer, len(batch)), None)
    config = model.transformer.config
    if translators is not None:
        translators.check(model.transformer, lens_sites(config, sites)[:-1])
    analysis = lens(config, top=top, sites=sites, positions=positions, translators=translators)
    found = run_batches([analysis], model.transformer, batch.split(batch_size))["logit_lens"]
    found = found.assign(word=(found.top_token.dims, model.text.words(found.top_token.values).astype(str)))
    return found if positions is not None else found.assign_coords(token=batch_words(batch, model.text))


def batch_words(batch: Batch, text: Text) -> tuple[tuple[str, str], Shaped[np.ndarray, "b p"]]:
    """The dims and the texts of a batch's tokens, "" at padding: a coordinate."""
    ids = batch.tokens.masked_fill(~batch.real, -1)
    return ("prompt", "pos"), text.words(ids.cpu().numpy()).astype(str)


def lens(
    config: ModelConfig,
    *,
    top: int = 10,
    sites: str | Sequence[str] = "resid_pre",
    positions: int | Sequence[int] | None = None,
    translators: Translators | None = None,
) -> Analysis:
    """The analysis behind `logit_lens`."""
    if not 1 <= top <= config.d_vocab:
        raise ValueError(f"top must be in [1, {config.d_vocab}], got {top}")
    if not config.unembed:
        raise ValueError("a lens requires an unembedding; this model ends in its residual stream")
    states = lens_sites(config, sites)
    chosen = [positions] if isinstance(positions, int) else positions
    if chosen is not None and len(chosen) == 0:
        raise ValueError("at least one position is required, got none")
    return Analysis(
        name="logit_lens",
        reads=tuple(Read(site) for site in states),
        compute=partial(_compute, sites=states, positions=chosen, translators=translators, top=top),
        reduction=Rows,
        finish=partial(_finish, config=config, sites=states, positions=chosen),
    )


def lens_sites(config: ModelConfig, sites: str | Sequence[str]) -> tuple[str, ...]:
    """Full names of the states that a lens reads, in the order of the pass; the last is the model's final stream.

    Errors: ValueError for a site that does not hold the stream, KeyError for one the model lacks.
    """
    asked: set[str] = set()
    for name in [sites] if isinstance(sites, str) else sites:
        if name.rpartition("hook_")[2] not in STATES:
            raise ValueError(
                f"a lens reads the whole residual stream: {', '.join(STATES)} or a full name of one is required, "
                f"got {name!r} (what a head or an MLP writes: output_lens)"
            )
        layers = range(config.n_layers)
        asked |= {name} if "hook_" in name else {full_name(name, layer) for layer in layers}
    for name in asked:
        find(name, config)
    final = final_stream(config)
    return (*(name for name in names(config) if name in asked and name != final), final)


def depth_label(site: str, config: ModelConfig) -> str:
    """The name of a state as a depth: `0_pre`, `3_mid`, `final_post`."""
    if site == final_stream(config):
        return "final_post"
    _, layer, name = site.split(".", 2)
    return f"{layer}_{name.removeprefix('hook_').replace('resid_', '')}"


def by_depth(result: "xr.Dataset") -> "xr.Dataset":
    """The lens of many prompts as curves over depth: the mean over each prompt's positions, then over prompts.

    Returns Dataset[depth]: `kl`, `entropy` (nats) and `target_prob`, each with `_low` and `_high`, 95 % over prompts.
    Positions without the number (padding, no target) and prompts that have none are left out.

    Example:
        >>> by_depth(interp.logit_lens(model, ["The cat sat on", "The dog sat on the"])).kl
    """
    values: dict[str, tuple[Sequence[str], Tensor]] = {}
    for name in ("kl", "entropy", "target_prob"):
        rows = torch.from_numpy(result[name].transpose("prompt", "depth", "pos").values).nanmean(-1)
        values |= Moments.of(rows[~rows.isnan().any(1)]).cells(name, ("depth",))
    attrs = {**result.attrs, "interval": "95 % over prompts", "prompts": result.sizes["prompt"]}
    return labelled(
        "lens_by_depth", values, coords={"depth": [str(d) for d in result.depth.values]}, attrs=attrs
    )


@torch.no_grad()
def _compute(
    trace: Trace,
    batch: Batch,
    model: Transformer,
    sites: tuple[str, ...],
    positions: Sequence[int] | None,
    translators: Translators | None,
    top: int,
) -> Mapping[str, Tensor]:
    columns, real = _columns(batch, positions)
    cells = real.flatten().nonzero()[:, 0]
    row, column = cells // columns.shape[1], columns.flatten()[cells]
    target = _targets(batch)[row, column]
    chunks: list[dict[str, Tensor]] = []
    tiles = LogitTiles(model, min(CHUNK, len(cells)))
    for part in torch.arange(len(cells), device=cells.device).split(CHUNK):
        states = {site: trace[Read(site)][row[part], column[part]] for site in sites}
        if translators is not None:
            states |= {site: translators(site, state) for site, state in states.items() if site != sites[-1]}
        chunks.append(_read_out(list(states.values()), target[part], tiles, top))
    out = {}
    for name in chunks[0]:
        value = torch.cat([chunk[name] for chunk in chunks], 1)
        nothing = torch.nan if value.is_floating_point() else -1
        every = value.new_full((len(sites), real.numel(), *value.shape[2:]), nothing)
        every[:, cells] = value
        out[name] = every.unflatten(1, tuple(real.shape)).movedim(0, 1)
    return out


def _read_out(
    states: Sequence[Float[Tensor, "r d"]], target: Int[Tensor, "r"], tiles: LogitTiles, top: int
) -> dict[str, Tensor]:
    """Every depth's statistics for some rows; the last state is the reference of the KL."""
    tiles.fill(states[-1])
    reference = Reference.like(tiles)
    found = [statistics(tiles, target, top, reference, is_reference=True)]
    for state in reversed(states[:-1]):
        tiles.fill(state)
        found.append(statistics(tiles, target, top, reference))
    return {name: torch.stack([each[name] for each in reversed(found)]) for name in found[0]}


def _columns(batch: Batch, positions: Sequence[int] | None) -> tuple[Int[Tensor, "b n"], Bool[Tensor, "b n"]]:
    """The column of every position asked for, and whether there is a token."""
    tokens = batch.tokens
    keep = batch.real
    if positions is None:
        return torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens), keep
    if batch.documents is not None:
        raise ValueError("chosen positions require one text per row, this batch is packed")
    lengths, wanted = batch.lengths, torch.tensor(list(positions), device=tokens.device)
    index = torch.where(wanted < 0, lengths[:, None] + wanted, wanted)
    if bool(((index < 0) | (index >= lengths[:, None])).any()):
        raise IndexError(
            f"positions that every prompt has are required, the shortest has {int(lengths.min())} tokens; "
            f"got {list(positions)}"
        )
    real_first = (~keep).int().argsort(dim=1, stable=True)
    return real_first.gather(1, index), torch.ones_like(index, dtype=torch.bool)


def _targets(batch: Batch) -> Int[Tensor, "b p"]:
    """The answer everywhere, or each position's next token; -1 where there is none."""
    if batch.answer is not None:
        return batch.answer[:, None].expand_as(batch.tokens)
    target = torch.full_like(batch.tokens, -1)
    target[:, :-1] = batch.tokens[:, 1:]
    known = predicted(batch.keep, batch.documents)
    if known is not None:
        target[:, :-1][~known] = -1
    return target


def _finish(
    merged: Partial, config: ModelConfig, sites: tuple[str, ...], positions: Sequence[int] | None
) -> "xr.Dataset":
    assert isinstance(merged, Rows)
    dims = ("prompt", "depth", "pos")
    depths = [depth_label(site, config) for site in sites]
    values = {name: ((*dims, "rank") if v.ndim == 4 else dims, v) for name, v in merged.rows.items()}
    chosen = {} if positions is None else {"pos": list(positions)}
    return labelled(
        "logit_lens",
        values,
        coords={"depth": depths, **chosen},
        attrs={"entropy_unit": "nats", "kl": "KL(final || depth), nats"},
    )
