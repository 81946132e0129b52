"""Attention of heads to names, and their direct effects on the names' logits, in sentences about two people.

At the end of indirect-object sentences ("When Mary and John went to the store, John gave a drink to", which the name
that occurs once completes) name movers attend to the receiver and raise its logit, S-inhibition heads attend to the
giver's second mention (Wang et al. 2022).
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
    """Read of the last query's attention `[b h k]` in a layer, as `signed_shares` in layers of `without_shares`."""
    via = _last_shares if layer in without_shares(config) else _last_query
    return Read(f"blocks.{layer}.attn.hook_pattern", via, by_row=())


def _last_query(pattern_bhqk: Tensor) -> Tensor:
    return pattern_bhqk[:, :, -1]


def _last_shares(pattern_bhqk: Tensor) -> Tensor:
    return signed_shares(pattern_bhqk[:, :, -1])


MENTIONS = ("receiver", "first_giver", "giver")
"""The names in a sentence: the receiver, who occurs once, and the giver's first and second mention."""


def name_attention(config: ModelConfig, *, last_only: bool = False) -> ByRow:
    """Question about attention from the last position to each name, on batches that end in the last column.

    Receivers are the batches' answers, givers their wrong answers.
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

    - `to_receiver`: attention from the last token to the receiver. Null: attention to the giver's first mention, which
      stands at the same positions equally often.
    - `to_giver`: attention from the last token to the giver's second mention. Null: attention to the same position in
      the second batch of `sentences`, where it holds a name not mentioned before.
    - `name_mover`: direct effect on logit(receiver) - logit(giver) with the final norm's scale frozen, in logits. Null:
      0, since roles and names are balanced.
    - `s_inhibition`: to_giver * (1 - |direct effect| / the largest of any head), per sentence. Null: that of to_giver.

    The last two are left out where logits are not linear in the stream, and with `direct=False`.

    Args:
        rows: number of sentences in one pass.
        summed: whether to check that the heads and all other parts sum to the logits, which `random_heads` do not.
    """
    balanced, controls = sentences
    config = model.transformer.config
    direct = direct and not_linear(config) is None and config.d_vocab_out is None
    effects = [ByRow("effects", attribution(config, "head", summed=summed), Rows)] if direct else []
    distinct, row_index = _distinct_rows(controls)
    first, second = (prompt_source(batch, model.text, batch_size=rows) for batch in (balanced, distinct))
    first_asks = [
        Ask(question, first, model) for question in (name_attention(config, last_only=direct), *effects)
    ]
    merged = yield [*first_asks, Ask(name_attention(config), second, model)]
    names, *of_effects, control = (_rows_of(question) for question in merged)
    receiver, mentioned, giver = (names[name] for name in MENTIONS)
    unmentioned = control["giver"][row_index.to(control["giver"].device)].mean(0)
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


def _rows_of(merged: Partial) -> Mapping[str, Tensor]:
    """The tensors that a question collected, by name, with one row per sentence in the order of the data."""
    assert isinstance(merged, Rows)
    return merged.rows


def _distinct_rows(batch: Batch) -> tuple[Batch, Int[Tensor, "b"]]:
    """The batch without rows that repeat tokens, padding and wrong answer, and each old row's index in it."""
    assert batch.wrong is not None
    rows = torch.cat((batch.tokens.where(batch.real, -1), batch.wrong[:, None]), 1).tolist()
    first: dict[tuple[int, ...], int] = {}
    for i, row in enumerate(rows):
        first.setdefault(tuple(row), i)
    number = {row: i for i, row in enumerate(first)}
    row_index = torch.tensor([number[tuple(row)] for row in rows])
    return batch.rows(torch.tensor(list(first.values()))), row_index


def _over_draws(rows: Float[Tensor, "b l h"]) -> Moments:
    """Moments over draws: the four sentences of one draw share names and frame, so they are not independent."""
    return Moments.of(reduce(rows, "(draw four) l h -> draw l h", "mean", four=A_DRAW))


def _last_rows(config: ModelConfig) -> tuple[Read, ...]:
    return tuple(last_attention(config, layer) for layer in with_pattern(config))


def _name_masses(trace: Trace, batch: Batch, model: Transformer) -> Mapping[str, Tensor]:
    """Attention `[b l h]` from the last query to each name of `MENTIONS`."""
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
    """Direct effect of each head on each sentence's logit difference, out of the columns of `attribution`."""
    column = {part: i for i, part in enumerate(part_names(config, "head"))}
    of_heads = torch.tensor([[column[name] for name in layer] for layer in head_names(config)])
    return values[:, of_heads.to(values.device)].double()
