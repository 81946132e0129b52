"""Attention to names, and effects on them: scores of heads on sentences about two people.

At the end of indirect-object sentences ("When Mary and John went to the store, John gave a drink to", followed by the
name that occurs once) name movers look at the receiver and write it, S-inhibition heads at the giver's second mention
(Wang et al. 2022).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from einops import reduce
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.attention.shares import in_every_layer, signed_shares, with_pattern, without_shares
from interp.core.results import labelled
from interp.core.stats import Moments, Partial, Rows
from interp.core.transfers import to_device
from interp.data.batch import Batch
from interp.data.stream import prompt_source
from interp.model.config import ModelConfig
from interp.model.parts import Part
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer
from interp.passes.observe import Subject
from interp.passes.question import Ask, ByRow, Reading, Stages
from interp.residual.attribution import attribution, labels as part_names
from interp.residual.decomposition import not_linear
from interp.tasks.indirect_objects import A_DRAW

if TYPE_CHECKING:
    import xarray as xr


def head_names(config: ModelConfig) -> list[list[str]]:
    """The name of every head, `[layer, head]`."""
    return [[str(Part("head", layer, h)) for h in range(config.n_heads)] for layer in range(config.n_layers)]


def last_attention(config: ModelConfig, layer: int) -> Read:
    """Read of the last query's attention `[b h k]` in a layer, as signed shares where weights are no shares."""
    via = _last_shares if layer in without_shares(config) else _last
    return Read(f"blocks.{layer}.attn.hook_pattern", via, by_row=())


def _last(pattern_bhqk: Tensor) -> Tensor:
    return pattern_bhqk[:, :, -1]


def _last_shares(pattern_bhqk: Tensor) -> Tensor:
    return signed_shares(pattern_bhqk[:, :, -1])


MENTIONS = ("receiver", "first_giver", "giver")
"""The names of a sentence: the one that occurs once, and the first and second mention of the other."""


def name_attention(config: ModelConfig, *, last_only: bool = False) -> ByRow:
    """Question about attention from the last position to each name, on batches that end in the last column.

    The names are the batches' answers and wrong answers.
    """
    finish = partial(_name_table, config=config)
    rows = Reading(_last_rows(config), _name_masses, last_only, ends_aligned=True)
    return ByRow("name_attention", rows, Rows, finish)


def mention_masks(batch: Batch) -> Bool[Tensor, "b 3 p"]:
    """Masks of the names' mentions in each row of a batch, in the order of `MENTIONS`.

    Raises:
        ValueError: rows that do not end in the last column, or do not contain both names.
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
    model: Subject, sentences: tuple[Batch, Batch], rows: int, *, direct: bool = True, summed: bool = True
) -> Stages[dict[str, tuple[Moments, Tensor]]]:
    """Name scores of each head `[layer, head]`: moments over draws (means of their four sentences), and their nulls.

    to_receiver and to_giver are attention from the last token, to the receiver and to the giver's second mention. Null
    of the first: attention to the giver's first mention, which stands in the same places as often. Null of the second:
    attention to the same place where it holds a name not mentioned before.
    name_mover is the direct effect on logit(receiver) - logit(giver) at frozen final norm, in logits; null 0, for roles
    and names are balanced. s_inhibition = to_giver * (1 - |direct effect| / the largest of any head), per sentence; its
    null is that of to_giver. Both are left out where logits are not linear in the stream, and with `direct=False`.

    Args:
        rows: of one pass.
        summed: with all other parts, what heads write must sum to the logits; it does not for `random_heads`. Weights
            that are no shares (differential attention) count as `signed_shares`.
    """
    balanced, unsaid = sentences
    config = model.transformer.config
    direct = direct and not_linear(config) is None and config.d_vocab_out is None
    effects = [ByRow("effects", attribution(config, "head", summed=summed), Rows)] if direct else []
    distinct, again = _distinct(unsaid)
    first, second = (prompt_source(batch, model.text, batch_size=rows) for batch in (balanced, distinct))
    of_said = [Ask(each, first, model) for each in (name_attention(config, last_only=direct), *effects)]
    kept = yield [*of_said, Ask(name_attention(config), second, model)]
    names, *of_effects, other = (_rows_of(each) for each in kept)
    receiver, mentioned, giver = (names[name] for name in MENTIONS)
    unmentioned = other["giver"][again.to(other["giver"].device)].mean(0)
    scores = {
        "to_receiver": (_over_draws(receiver), mentioned.mean(0)),
        "to_giver": (_over_draws(giver), unmentioned),
    }
    if direct:
        effect = _direct_effects(of_effects[0]["logits"], config)
        largest = effect.abs().amax((1, 2), keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
        share = effect.abs() / largest
        scores["name_mover"] = (_over_draws(effect), torch.zeros_like(unmentioned))
        scores["s_inhibition"] = (_over_draws(giver * (1 - share)), unmentioned)
    return scores


def _rows_of(kept: Partial) -> Mapping[str, Tensor]:
    """Every row that was kept, in the order of the data."""
    assert isinstance(kept, Rows)
    return kept.rows


def _distinct(batch: Batch) -> tuple[Batch, Int[Tensor, "b"]]:
    """Rows of a batch that differ in tokens, padding or wrong answer, and the index of each row among them."""
    assert batch.wrong is not None
    rows = torch.cat((batch.tokens.where(batch.real, -1), batch.wrong[:, None]), 1).tolist()
    first: dict[tuple[int, ...], int] = {}
    for i, row in enumerate(rows):
        first.setdefault(tuple(row), i)
    number = {row: i for i, row in enumerate(first)}
    again = torch.tensor([number[tuple(row)] for row in rows])
    return batch.rows(torch.tensor(list(first.values()))), again


def _over_draws(rows: Float[Tensor, "b l h"]) -> Moments:
    """Moments over draws: sentences of one draw share names and frame, so that they are no independent examples."""
    return Moments.of(reduce(rows, "(draw four) l h -> draw l h", "mean", four=A_DRAW))


def _last_rows(config: ModelConfig) -> tuple[Read, ...]:
    return tuple(last_attention(config, layer) for layer in with_pattern(config))


def _name_masses(trace: Trace, batch: Batch, model: Transformer) -> Mapping[str, Tensor]:
    """Attention of the last query `[b l h]` to each name."""
    masks = to_device(mention_masks(batch.host()), batch.tokens.device)
    rows = torch.stack([trace[read] for read in _last_rows(model.config)], 1).to(torch.float64)
    rows = in_every_layer(rows, model.config)
    return {name: (rows * masks[:, i, None, None]).sum(-1) for i, name in enumerate(MENTIONS)}


def _name_table(merged: Partial, config: ModelConfig) -> xr.Dataset:
    assert isinstance(merged, Rows)
    return labelled(
        "name_attention",
        {name: (("prompt", "layer", "head"), value) for name, value in merged.rows.items()},
        coords={"layer": range(config.n_layers), "head": range(config.n_heads)},
        units="attention mass from the last position",
    )


def _direct_effects(values: Float[Tensor, "b c"], config: ModelConfig) -> Float[Tensor, "b l h"]:
    """Direct effect of each head on the logit difference of each sentence."""
    column = {part: i for i, part in enumerate(part_names(config, "head"))}
    of_heads = torch.tensor([[column[name] for name in layer] for layer in head_names(config)])
    return values[:, of_heads.to(values.device)].double()
