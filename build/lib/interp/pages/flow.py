"""The tables of the residual lattice and the large head: shares of sums, lengths of values, tokens of heads."""

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from interp.core.results import frame
from interp.data.batch import Batch
from interp.model.config import ModelConfig
from interp.model.parts import Part
from interp.pages.tables import head_names
from interp.passes.observe import Subject, observe
from interp.tokens import flow_routes
from interp.tokens.mixing import SourceSplit, split_reads
from interp.weights import head_tokens

FLOOR = 0.01
"""Least share of a head's move that the page holds; smaller ones are told as a sum."""
OWN = ("resid", "attn_bias", "mlp", "resid_mid")
"""The parts that stay at their position, as `interp.tokens.flow_routes` calls them."""
LISTS = ("raises", "lowers", "seeks")
"""The lists of a head in the order of the page."""
LISTED = 5
"""Tokens per list of a head, where the page has room."""
MOST_LISTED = 30_000
"""Tokens of such lists in all: 300 to 400 kB of the page."""


def about_flow(
    model: Subject, batch: Batch, attributed: xr.Dataset, names: Sequence[str]
) -> dict[str, Callable[[], pd.DataFrame]]:
    """How to make the tables of this file."""
    return {
        "value_norms": lambda: value_norms(model, batch, names),
        "head_tokens": lambda: words_of_heads(model, batch),
        "flow_routes": lambda: shares(flow_routes(model, batch), attributed, names),
    }


def shares(result: xr.Dataset, attributed: xr.Dataset, names: Sequence[str]) -> pd.DataFrame:
    """`interp.tokens.flow_routes` of one prompt: one row per part of a sum, heads' moves from `FLOOR` on.

    kind: "head", or one of `OWN`. attribution: the logits that the part adds to the answer by itself (minus the wrong
    one's): heads' moves and MLPs at the last position; NaN elsewhere, where nothing is added to the answer but through
    later parts, and for the stream itself.
    """
    one, last = result.isel(prompt=0), len(names) - 1
    moved = frame(one[["value"]].reset_coords(drop=True)).query("value >= @FLOOR")
    by_source = attributed.by_source.isel(prompt=0).to_numpy()
    added = by_source[moved.layer, moved["head"], moved.key]
    every = [moved.assign(kind="head", attribution=np.where(moved["query"] == last, added, np.nan))]
    by_part = attributed.value.isel(prompt=0).to_series()
    for kind in OWN:
        if kind in one:
            part = frame(one[[kind]].reset_coords(drop=True)).rename(columns={kind: "value"})
            part = part.assign(kind=kind, key=part["query"], attribution=np.nan)
            if kind == "mlp":
                ends = part["query"] == last
                part.loc[ends, "attribution"] = [
                    by_part[str(Part("mlp", layer))] for layer in part.layer[ends]
                ]
            every.append(part)
    table = pd.concat(every, ignore_index=True)
    words = np.array(names, dtype=object)
    table["head"] = table["head"].astype("Int64")
    where = zip(table.kind, table.layer, table["head"], strict=True)
    table["part"] = [
        str(Part(kind, layer, None if head is pd.NA else int(head))) for kind, layer, head in where
    ]
    table["query_token"], table["key_token"] = words[table["query"]], words[table.key]
    columns = ["kind", "part", "layer", "head", "query", "query_token", "key", "key_token", "value"]
    return table[[*columns, "attribution"]]


def value_norms(model: Subject, batch: Batch, names: Sequence[str]) -> pd.DataFrame:
    """How long v_j W_O of every head and position is (b_V included): its move at full attention.

    Kobayashi et al. 2020. After the linear part of the norm of attention's output, where a family has one, before its
    division.
    """
    config = model.transformer.config
    network = model.transformer
    reads = [read for layer in range(config.n_layers) for read in split_reads(network, layer, "attn")]
    trace = observe(network, batch, reads).trace
    lengths = [SourceSplit.of(network, i, trace, "attn").lengths()[0] for i in range(config.n_layers)]
    norms = _as_array(torch.stack(lengths).transpose(1, 2))
    layer, head, key = (index.ravel() for index in np.indices(norms.shape))
    words = np.array(names, dtype=object)
    return pd.DataFrame(
        {
            "part": head_names(config.n_layers, config.n_heads)[layer, head],
            "layer": layer,
            "head": head,
            "key": key,
            "key_token": words[key],
            "value": norms.ravel(),
        }
    )


def words_of_heads(model: Subject, batch: Batch) -> pd.DataFrame:
    """`interp.weights.head_tokens` of the prompt's different tokens: one row per list and rank.

    `list`: raises and lowers (the next tokens that the head makes more and less probable where it attends to the
    token), seeks (the keys that the token prefers, among the prompt's).
    """
    ids = torch.unique(batch.tokens[0])
    found = head_tokens(model, ids, top=listed(model.transformer.config, len(ids)))
    table = frame(found).query("word_id >= 0")
    order = table["list"].map({name: i for i, name in enumerate(LISTS)})
    table = table.iloc[np.argsort(order, kind="stable")].reset_index(drop=True)
    first = ["list", "part", "layer", "head", "token", "token_id", "rank", "word", "word_id"]
    return table[[*first, "value", "unit"]]


def listed(config: ModelConfig, n_tokens: int) -> int:
    """How many tokens each list has: fewer where heads and tokens are many."""
    lists = 2 * config.n_layers * config.n_heads * n_tokens
    return min(config.d_vocab, max(1, min(LISTED, MOST_LISTED // lists)))


def _as_array(x: Float[Tensor, "*n"]) -> Float[np.ndarray, "*n"]:
    return x.float().cpu().numpy()
