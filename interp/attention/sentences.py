"""What heads do at the end of indirect-object sentences: look at the names, and write one of them.

"When Mary and John went to the store, John gave a drink to" is followed by the name that occurs once. Wang et al. 2022
(arXiv:2211.00593): name movers look at the receiver and write it, S-inhibition heads at the giver's second mention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from einops import reduce
from jaxtyping import Bool, Float
from torch import Tensor

from interp.attention.shares import last_attention
from interp.core.results import labelled
from interp.core.stats import Moments, Partial, Rows
from interp.data.batch import Batch
from interp.data.stream import prompt_source
from interp.model.config import ModelConfig
from interp.model.parts import Part
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer
from interp.passes.analysis import Analysis, Askable
from interp.passes.observe import Subject
from interp.residual.attribution import Attribute
from interp.residual.decomposition import not_linear
from interp.runs.run import run
from interp.tasks.indirect_objects import A_DRAW

if TYPE_CHECKING:
    import xarray as xr

MENTIONS = ("receiver", "first_giver", "giver")
"""The names of a sentence: the one that occurs once, and the first and second mention of the other."""


def name_attention(config: ModelConfig) -> Analysis:
    """Attention from the last position to each name; batches end in the last column, and name them as their answers."""
    return Analysis(
        name="name_attention",
        reads=_reads(config),
        compute=_compute,
        reduction=Rows,
        finish=partial(_finish, config=config),
    )


def mention_masks(batch: Batch) -> Bool[Tensor, "b 3 p"]:
    """Where each row of a batch mentions the names, in the order of `MENTIONS`.

    Errors: ValueError for rows that do not end in the last column, or do not contain both names.
    """
    if batch.answer is None or batch.wrong is None or batch.documents is not None:
        raise ValueError("name scores require batches of one text per row with both names as answers")
    keep = batch.real
    receiver, giver = (keep & (batch.tokens == name[:, None]) for name in (batch.answer, batch.wrong))
    if not bool((receiver.any(1) & giver.any(1) & keep[:, -1]).all()):
        raise ValueError("name scores require rows that contain both names and end in the last column")
    count = giver.cumsum(1)
    return torch.stack((receiver, giver & (count == 1), giver & (count == count[:, -1:])), 1)


def sentence_scores(
    model: Subject, sentences: tuple[Batch, Batch], batch_size: int, *, direct: bool = True
) -> dict[str, tuple[Moments, Tensor]]:
    """Of each head `[layer, head]`: the moments over draws (means of their four sentences) of each score, and its null.

    to_receiver and to_giver are attention from the last token, to the receiver and to the giver's second mention. Null
    of the first: attention to the giver's first mention, which stands in the same places as often. Null of the second:
    attention to the same place where it holds a name not mentioned before.
    name_mover is the direct effect on logit(receiver) - logit(giver) at frozen final norm, in logits; null 0, for roles
    and names are balanced. s_inhibition = to_giver * (1 - |direct effect| / the largest of any head), per sentence; its
    null is that of to_giver. Both are left out where logits are not linear in the stream, and with `direct=False`.
    Weights that are no shares (differential attention) count as `signed_shares`.
    """
    said, unsaid = sentences
    config = model.transformer.config
    names = name_attention(config)
    direct = direct and not_linear(config) is None
    asked: list[Askable] = [replace(names, last_only=True), Attribute(parts="head")] if direct else [names]
    sources = [
        prompt_source(batch, model.text, prepend_bos=True, batch_size=batch_size) for batch in (said, unsaid)
    ]
    found = run(asked, model, sources[0])
    other = run([names], model, sources[1])["name_attention"]
    receiver, first, giver = (torch.from_numpy(found["name_attention"][name].values) for name in MENTIONS)
    unmentioned = torch.from_numpy(other["giver"].values).mean(0)
    scores = {
        "to_receiver": (_over_draws(receiver), first.mean(0)),
        "to_giver": (_over_draws(giver), unmentioned),
    }
    if direct:
        effect = _direct_effects(found["attribute"], config)
        largest = effect.abs().amax((1, 2), keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
        share = effect.abs() / largest
        scores["name_mover"] = (_over_draws(effect), torch.zeros_like(unmentioned))
        scores["s_inhibition"] = (_over_draws(giver * (1 - share)), unmentioned)
    return scores


def _over_draws(rows: Float[Tensor, "b l h"]) -> Moments:
    """The moments over draws: their sentences share names and frame, so that they are no independent examples."""
    return Moments.of(reduce(rows, "(draw four) l h -> draw l h", "mean", four=A_DRAW))


def _reads(config: ModelConfig) -> tuple[Read, ...]:
    return tuple(last_attention(config, layer) for layer in range(config.n_layers))


def _compute(trace: Trace, batch: Batch, model: Transformer) -> Mapping[str, Tensor]:
    """Attention of the last query `[b l h]` to each name."""
    masks = mention_masks(batch)
    rows = torch.stack([trace[read] for read in _reads(model.config)], 1).to(torch.float64)
    return {name: (rows * masks[:, i, None, None]).sum(-1) for i, name in enumerate(MENTIONS)}


def _finish(merged: Partial, config: ModelConfig) -> xr.Dataset:
    assert isinstance(merged, Rows)
    return labelled(
        "name_attention",
        {name: (("prompt", "layer", "head"), value) for name, value in merged.rows.items()},
        coords={"layer": range(config.n_layers), "head": range(config.n_heads)},
        units="attention mass from the last position",
    )


def _direct_effects(result: xr.Dataset, config: ModelConfig) -> Float[Tensor, "b l h"]:
    """What each head adds to the logit difference of each sentence."""
    names = [str(Part("head", layer, h)) for layer in range(config.n_layers) for h in range(config.n_heads)]
    values = torch.from_numpy(result.value.sel(part=names).values).double()
    return values.unflatten(1, (config.n_layers, config.n_heads))
