"""Rows of every head's full OV and QK circuits at given tokens: logits that it changes, keys that it prefers.

The entries are those of `top_pairs`, for chosen tokens and all heads at once. OV rows have one entry per output token,
QK rows only one per given token, which needs no product over the vocabulary. Elhage et al. 2021; Dar et al. 2022.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from interp.core.kinds import listed
from interp.core.results import labelled
from interp.core.stats import upcast
from interp.core.tiles import row_tiles
from interp.core.transfers import to_device, to_host
from interp.data.batch import Answers
from interp.data.text import Text
from interp.model.parts import Part
from interp.passes.observe import Subject
from interp.passes.question import Question, WithoutData
from interp.runs.functions import of_weights
from interp.weights.head_circuits import Embedding, HeadCircuits, by_layer
from interp.weights.token_pairs import worded
from interp.weights.typical_scales import ABOUT, typical_factors, units

if TYPE_CHECKING:
    import xarray as xr

LISTS = ("raises", "lowers", "seeks")
"""The lists: outputs that a head raises and lowers most, and keys that the token prefers as a query."""
_CELL = ("layer", "head", "token", "list", "rank")


@dataclass(frozen=True, eq=False)
class HeadTokens(Question):
    """Logits that each head raises and lowers most when it attends to given tokens, and the keys those tokens look for.

    Rows of the full circuits of all heads: OV rows end in the logits, QK rows stay among the given tokens. All norms
    have the scale 1 here, so that entries of a real model are hundreds; `factor` says what a typical pass multiplies
    them by.

    Args:
        tokens: single tokens, as text or ids, each once.
        top: how many tokens each list has; None: 5.
        folded: whether norms are part of the circuits, as in `HeadCircuits`.
        scaled: whether QK carries the factor between q . k and the attention score.
        embedding: what a vocabulary entry puts on the stream: "token" or "effective", as in `HeadCircuits`. Positions
            are ignored (rotary: offset 0).

    Returns:
        Dataset[layer, head, token, list, rank]; rank 0 is the most extreme. Coordinates: `token` and `token_id`, the
        given tokens; `part`, the heads' names; `unit` of each list; `factor` [layer, list], what an entry is multiplied
        by in a typical pass, where norms divide by their scale.

        - `value`: the entry. In the lists `raises` and `lowers`, the largest and smallest of the token's row of the
          full OV circuit minus the row's mean, in logits before the final norm. In `seeks`, the largest of its row of
          the full QK circuit among the given tokens minus their mean, in attention scores before the norms: which of
          them the token, as a query, prefers. NaN where there are fewer tokens to seek than `top`.
        - `word`, `word_id`: text and id of the token listed; -1 where `value` is NaN for that reason.

    Raises:
        ValueError: texts that are not one token, none at all, repeated ones, or a `top` beyond the vocabulary.
        ValueError, AttributeError: a model in which no circuit ends in the logits.

    Caveats:
        Heads after layer 0 read what earlier layers wrote, not bare embeddings, and those of layer 0 read no MLP's
        work, which the effective embedding holds; scores of different queries have no common scale.

    Cost:
        2 l h t d V FLOPs for t tokens, nearly all of it for the outputs.

    Source:
        Elhage et al. 2021; Dar et al. 2022.

    See Also:
        `top_pairs`: the largest entries over the whole vocabulary, of single heads.

    Example:
        >>> result = head_tokens(model, torch.tensor([5, 6, 7]), top=3)
        >>> result.word.isel(token=1).sel(layer=1, head=0, list="raises").shape
        (3,)
    """

    tokens: Answers
    _: KW_ONLY
    top: int | None = None
    folded: bool = True
    scaled: bool = True
    embedding: Embedding = "effective"
    of_weights: ClassVar[bool] = True

    def bind(self, model: Subject) -> WithoutData:
        """Products with some rows of the embedding, and one pass over a few random tokens for the scales of norms."""
        circuits = HeadCircuits(model, self.folded, scaled=self.scaled, embedding=self.embedding)
        ids = _distinct_ids(model.text, self.tokens)
        question = replace(self, top=listed(self.top, 5, circuits.config.n_outputs, " tokens per list"))
        return WithoutData(self.name, partial(_head_tokens, circuits, model.text, ids, question))


head_tokens = of_weights(HeadTokens, renamed={"circuits": "folded, scaled and embedding"})


@torch.no_grad()
def _head_tokens(
    circuits: HeadCircuits, text: Text, ids: Int[Tensor, "n"], question: HeadTokens
) -> xr.Dataset:
    config, device = circuits.config, circuits.network.device
    rows, unembedding = upcast(circuits.embedded_tokens(ids)), upcast(circuits.bare_unembedding)
    centre, known = unembedding.mean(-1), to_device(ids, device)
    assert question.top is not None
    values, words = [], []
    for layer in range(config.n_layers):
        heads = Part("attn", layer)
        written, outputs = _logit_ends(circuits, heads, rows, unembedding, centre, question.top)
        scores, places = _best_keys(circuits, heads, rows, min(question.top, len(ids)))
        more = (0, question.top - scores.shape[-1])
        sought = torch.nn.functional.pad(scores, more, value=torch.nan)
        keys = torch.nn.functional.pad(known[places], more, value=-1)
        values.append(torch.cat((written, sought[:, :, None]), 2))
        words.append(torch.cat((outputs, keys[:, :, None]), 2))
    lists = to_host({"value": torch.stack(values), "word_id": torch.stack(words)})
    factors, unit = typical_factors(circuits), units(config)
    factor = torch.stack((factors.moved, factors.moved, factors.sought), 1)
    table = labelled(
        question.name,
        {name: (_CELL, tensor) for name, tensor in lists.items()},
        coords={
            "layer": range(config.n_layers), "head": range(config.n_heads), "part": by_layer(config),
            **worded(text, "token", ids, ("token",)), "list": LISTS,
            "unit": ("list", [unit["OV"], unit["OV"], unit["QK"]]), "factor": (("layer", "list"), factor),
            "rank": range(question.top),
        },
        units="see the coordinate unit",
        attrs={
            "raises, lowers": "norms at scale 1, centred over the vocabulary", "factor": ABOUT,
            "seeks": "attention scores, norms at scale 1, centred over the given tokens",
            "embedding": circuits.embedding, "folded": int(circuits.folded), "scaled": int(circuits.scaled),
        },
    )  # fmt: skip
    ids_of = lists["word_id"].numpy()
    texts = [text.of_outputs.words(ids_of[:, :, :, :2]), text.words(ids_of[:, :, :, 2:])]
    return table.assign(word=(_CELL, np.concatenate(texts, 3)))


def _distinct_ids(text: Text, tokens: Answers) -> Int[Tensor, "n"]:
    """The ids of the tokens; ValueError for none, or for one that occurs twice."""
    alone = isinstance(tokens, str | int | np.integer) or getattr(tokens, "shape", None) == ()
    if not alone and len(tokens) == 0:  # type: ignore[arg-type]
        raise ValueError("at least one token is required, got none")
    ids = text.tokens(tokens)
    if len(ids.unique()) != len(ids):
        raise ValueError(f"different tokens are required, got {ids.tolist()}")
    return ids


def _logit_ends(
    circuits: HeadCircuits,
    heads: Part,
    rows: Float[Tensor, "n d"],
    unembedding: Float[Tensor, "d v"],
    centre: Float[Tensor, "d"],
    top: int,
) -> tuple[Float[Tensor, "h n end rank"], Int[Tensor, "h n end rank"]]:
    """For each head and row, the `top` largest and smallest centred logits of the OV circuit, and their token ids."""
    ov = circuits.ov(heads).wide()
    moved = circuits.before_unembedding(rows @ ov.A @ ov.B)  # [h n d]
    ends = []
    for _, tile in row_tiles(rearrange(moved, "h n d -> (h n) d"), unembedding):
        largest_and_smallest = [tile.topk(top, largest=largest) for largest in (True, False)]
        ends.append([torch.stack(pair, 1) for pair in zip(*largest_and_smallest, strict=True)])
    scores, ids = (
        rearrange(torch.cat(x), "(h n) end rank -> h n end rank", n=len(rows))
        for x in zip(*ends, strict=True)
    )
    return scores - (moved @ centre)[..., None, None], ids


def _best_keys(
    circuits: HeadCircuits, heads: Part, rows: Float[Tensor, "n d"], top: int
) -> tuple[Float[Tensor, "h n k"], Int[Tensor, "h n k"]]:
    """Scores of each query's `top` keys among the given tokens, minus the mean over these, and the keys' indices."""
    qk = circuits.qk(heads).wide()
    scores = (rows @ qk.A) @ (qk.B @ rows.mT)
    best = (scores - scores.mean(-1, keepdim=True)).topk(top, -1)
    return best.values, best.indices
