"""The tables of the residual lattice and the large head: shares of sums, lengths of values, tokens of heads."""

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import pandas as pd
import torch
import xarray as xr
from einops import rearrange
from jaxtyping import Float, Real
from torch import Tensor

from interp.core.results import frame
from interp.core.stats import upcast
from interp.core.transfers import to_host
from interp.data.batch import Batch
from interp.model.config import ModelConfig
from interp.model.parts import Part
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer
from interp.model.weights import Weights
from interp.pages.tables import head_names
from interp.passes.frozen import output_norm, output_scale
from interp.passes.observe import Subject
from interp.tokens.flow_routes import CHUNK
from interp.tokens.mixing import SourceSplit, closer_, split_reads
from interp.weights import head_tokens

FLOOR = 0.01
"""Least share of a head's move that the page contains; smaller ones appear as a sum."""
OWN = ("resid", "attn_bias", "mlp", "resid_mid")
"""The parts that stay at their position, as `interp.tokens.flow_routes` calls them."""
NEURONS = 5
"""Neurons listed of every sum that an MLP takes part in."""
LISTS = ("raises", "lowers", "seeks")
"""The lists of a head in the order of the page."""
LISTED = 5
"""Tokens per list of a head, where the page has room."""
MOST_LISTED = 30_000
"""Tokens of such lists in all: 300 to 400 kB of the page."""


def about_flow(
    model: Subject, batch: Batch, trace: Trace, found: Mapping[str, xr.Dataset], names: Sequence[str]
) -> dict[str, Callable[[], pd.DataFrame]]:
    """How to make the tables of this file.

    Args:
        trace: a pass over the prompt that read `flow_reads`;
        found: the prompt's `attribution` and its `flow_routes`, unless they are absent.
    """
    network = model.transformer
    return {
        "value_norms": lambda: value_norms(network, trace, names),
        "head_tokens": lambda: words_of_heads(model, batch),
        "flow_routes": lambda: shares(found["flow_routes"], found["attribution"], names),
        "flow_neurons": lambda: neurons(network, trace, found["flow_routes"], names),
    }


def flow_reads(model: Transformer, absent: Collection[str]) -> list[Read]:
    """Reads of the prompt's pass for the tables of this file, but for those that are absent."""
    layers, found = range(model.config.n_layers), list[Read]()
    if "value_norms" not in absent:
        found += [read for layer in layers for read in split_reads(model, layer, "attn")]
    if "flow_neurons" not in absent:
        found += [read for layer in layers for read in _neuron_reads(model.config, layer)]
    return found


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


def neurons(model: Transformer, trace: Trace, result: xr.Dataset, names: Sequence[str]) -> pd.DataFrame:
    """The neurons with the largest shares of each sum that an MLP takes part in: one row per layer, position and rank.

    The MLP's share is split among its neurons as the sum is split among its parts: by how much closer to the sum each
    brings it, p_n = max(0, ||y||_1 - ||y - a_n w_n||_1), y the stream after the MLP, over all p_n and that of its bias.
    """
    columns: dict[str, list[object]] = {name: [] for name in ("layer", "query", "rank", "neuron", "value")}
    whole_share, best = result.mlp.isel(prompt=0).to_numpy(), dict[tuple[int, str], Tensor]()
    layers = range(model.config.n_layers)
    for layer in layers:
        seen = {read.site: upcast(trace[read]) for read in _neuron_reads(model.config, layer)}
        proximity = _neuron_proximity(model, layer, seen)
        of_all = (proximity / proximity.sum(-1, keepdim=True).clamp_min(1e-30))[:, :-1]
        top = of_all.topk(min(NEURONS, of_all.shape[1]))
        best |= {(layer, "values"): top.values, (layer, "indices"): top.indices}
    on_host = to_host(best)
    for layer in layers:
        value = on_host[layer, "values"].float().numpy() * whole_share[layer][:, None]
        query, rank = np.nonzero(value > 0)
        chosen = on_host[layer, "indices"].numpy()[query, rank]
        for name, column in zip(
            columns, (np.full(len(query), layer), query, rank, chosen, value[query, rank]), strict=True
        ):
            columns[name] += column.tolist()
    table = pd.DataFrame(columns).astype(
        {"layer": int, "query": int, "rank": int, "neuron": int, "value": float}
    )
    parts = [str(Part("neuron", *where)) for where in zip(table.layer, table.neuron, strict=True)]
    table.insert(0, "part", pd.Series(parts, dtype=object))
    table.insert(3, "query_token", np.array(names, dtype=object)[table["query"]])
    return table


def _neuron_reads(config: ModelConfig, layer: int) -> list[Read]:
    """Reads of the neurons, of the stream after them, and of the scale of their output's norm."""
    site_names = (f"blocks.{layer}.{name}" for name in ("mlp.hook_post", "hook_resid_post"))
    return [Read(site) for site in (*site_names, *output_scale(config, layer, "mlp_out"))]


def _neuron_proximity(model: Transformer, layer: int, seen: Mapping[str, Tensor]) -> Float[Tensor, "q n"]:
    """ALTI proximity max(0, |y|_1 - |y - z|_1) of each neuron's write z to y, the stream after the MLP.

    z has gone through the norm of the output, if there is one. The columns are the neurons, then b_out, which also
    carries that norm's bias. Ferrando & Voita 2024.
    """
    weights = Weights(model).layer(layer)
    assert weights.W_out is not None and weights.b_out is not None
    active, whole = seen[f"blocks.{layer}.mlp.hook_post"][0], seen[f"blocks.{layer}.hook_resid_post"][0]
    out = torch.cat((weights.W_out, weights.b_out[None])).to(whole)
    active = torch.cat((active, active.new_ones(len(active), 1)), 1)
    norm = output_norm(model, layer, "mlp_out").recorded(seen)
    found = torch.zeros_like(active)
    step = max(1, CHUNK // (len(active) * whole.shape[-1]))
    for first in range(0, len(out), step):
        block = slice(first, first + step)
        written = rearrange(active[:, block, None] * out[block], "q n d -> n 1 q d")
        last = first + step >= len(out)
        arrived = norm.split(written, with_beta=-1) if last else norm.through(written)
        found[:, block] = closer_(rearrange(arrived, "n 1 q d -> q n d").contiguous(), whole[:, None])
    return found


def value_norms(model: Transformer, trace: Trace, names: Sequence[str]) -> pd.DataFrame:
    """How long v_j W_O of every head and position is (b_V included): its move at full attention.

    Kobayashi et al. 2020. After the linear part of the norm of attention's output, where a family has one, before its
    division.
    """
    config = model.config
    lengths = [SourceSplit.of(model, i, trace, "attn").lengths()[0] for i in range(config.n_layers)]
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
    return table[[*first, "value", "factor", "unit"]]


def listed(config: ModelConfig, n_tokens: int) -> int:
    """How many tokens each list has: fewer where heads and tokens are many."""
    lists = 2 * config.n_layers * config.n_heads * n_tokens
    return min(config.d_vocab, max(1, min(LISTED, MOST_LISTED // lists)))


def _as_array(x: Real[Tensor, "*n"]) -> Float[np.ndarray, "*n"]:
    return x.float().cpu().numpy()
