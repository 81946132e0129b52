"""The tidy tables of the page: one row per observation, in the words of the results that they are made from.

What a table estimates is its column `value`; `part`, `layer`, `head`, `token` and `score` say of what. `UNITS` has the
unit of every column of real numbers.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd
import torch
import xarray as xr
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from interp.core.results import frame, strongest
from interp.model.loss import next_token_loss
from interp.model.parts import Part

Pieces = Callable[[Sequence[int]], list[str]]
"""Token ids to the text of each: `Text.pieces`."""

MOST_PAIRS = 20_000
"""Rows of a table of pairs of parts, which grow with the square of their number; the strongest are kept."""
INDUCTION_THRESHOLD = 0.4
"""Least induction score of a head that the page calls an induction head."""

_RATIO, _SIZES = "ratio of Frobenius norms", "see the column unit"
UNITS: Mapping[str, Mapping[str, str]] = {
    "tokens": {"loss_nats": "nats", "prob": "probability"},
    "next_tokens": {"prob": "probability", "logit": "logits"},
    "heads": {**dict.fromkeys(("value", "low", "high", "null"), _SIZES), "p": "probability"},
    "circuits": {**dict.fromkeys(("value", "low", "high", "null"), _SIZES), "p": "probability"},
    "composition": {
        **dict.fromkeys(("value", "null", "excess"), _RATIO), "relative": "times the medians of the two layers",
    },
    "attention": {"value": "attention mass"},
    "attribution": {"value": "logits", "share": "share of the total", "running_sum": "logits"},
    "attribution_sources": {"value": "logits"},
    "ablation": {"direct": "logits", "value": "logits"},
    "patching": {"value": "logits", "normalised": "share of the difference between the runs"},
    "edges": {"value": "logits"},
    "faithfulness": {"value": "share of the difference between the runs"},
    "logit_lens": {
        **dict.fromkeys(("top_prob", "next_prob", "answer_prob"), "probability"), "entropy": "nats", "kl": "nats",
    },
    "fitted_lenses": {
        **dict.fromkeys(("top_prob", "next_prob", "answer_prob"), "probability"), "entropy": "nats", "kl": "nats",
        **dict.fromkeys(("low", "high"), "rank"), "stays": "share of resamples",
    },
    "backward_lens": {"x": "norm", "delta": "norm", "relative_update": "share of the prompt's largest"},
    "flow_routes": {"value": "share of the sum", "attribution": "logits"},
    "flow_neurons": {"value": "share of the sum"},
    "value_norms": {"value": "norm"},
    "head_tokens": {"value": _SIZES, "factor": "times a value, in a typical pass"},
}  # fmt: skip
"""The unit of every column of real numbers, by table."""


def head_names(n_layers: int, n_heads: int) -> NDArray[np.object_]:
    """The name of every head, by layer and head."""
    return np.array(
        [[str(Part("head", layer, head)) for head in range(n_heads)] for layer in range(n_layers)],
        dtype=object,
    ).reshape(n_layers, n_heads)


def tokens(
    ids: Int[Tensor, "p"],
    logits: Float[Tensor, "p v"] | None,
    pieces: Pieces,
    roles: Sequence[str] | None = None,
) -> pd.DataFrame:
    """Each token of the prompt and how well the tokens before it predicted it: loss in nats, probability, rank from 0.

    The first token has none before it: NaN, and rank -1; so have all in a model without logits. With the roles of a
    chat's tokens also `role`.
    """
    loss, rank = torch.full((len(ids),), torch.nan), torch.full((len(ids),), -1)
    if logits is not None:
        loss[1:] = next_token_loss(logits[None], ids[None])[0]
        rank[1:] = (logits[:-1] > logits[:-1].gather(1, ids[1:, None])).sum(1)
    said = {} if roles is None else {"role": list(roles)}
    return pd.DataFrame(
        {
            "pos": np.arange(len(ids)),
            "token_id": ids.cpu().numpy(),
            "token": pieces(ids.tolist()),
            **said,
            "loss_nats": loss.numpy(),
            "prob": (-loss).exp().numpy(),
            "rank": rank.numpy(),
        }
    )


def next_tokens(logits: Float[Tensor, "p v"], pieces: Pieces, *, top: int) -> pd.DataFrame:
    """The `top` most probable next tokens after each position: rank from 0, probability, logit."""
    wide = logits.float()
    best = wide.topk(min(top, wide.shape[-1]))
    prob = wide.softmax(-1).gather(1, best.indices)
    n, ranks = best.indices.shape
    ids = best.indices.flatten()
    return pd.DataFrame(
        {
            "pos": np.repeat(np.arange(n), ranks),
            "rank": np.tile(np.arange(ranks), n),
            "token_id": ids.cpu().numpy(),
            "token": pieces(ids.tolist()),
            "prob": prob.flatten().cpu().numpy(),
            "logit": best.values.flatten().cpu().numpy(),
        }
    )


def attention(
    pattern_lhqk: Float[Tensor, "l h q k"], layers: Sequence[int], names: Sequence[str]
) -> pd.DataFrame:
    """Every head's attention from each query to each key it can see (key <= query), in this nesting order.

    Args:
        layers: those that have a pattern.
    """
    count, heads, n, _ = pattern_lhqk.shape
    query, key = np.tril_indices(n)
    place, head, cell = (index.ravel() for index in np.indices((count, heads, len(query))))
    layer = np.asarray(layers)[place]
    words = np.array(names, dtype=object)
    return pd.DataFrame(
        {
            "part": head_names(max(layers) + 1, heads)[layer, head],
            "layer": layer,
            "head": head,
            "query": query[cell],
            "query_token": words[query[cell]],
            "key": key[cell],
            "key_token": words[key[cell]],
            "value": pattern_lhqk[:, :, query, key].float().cpu().numpy().ravel(),
        }
    )


def heads(result: xr.Dataset) -> pd.DataFrame:
    """`interp.heads` as a table, one row per head and score, and whether the head counts as an induction head.

    It does if its induction score is at least `INDUCTION_THRESHOLD` and the lower end of the score's 95 % interval
    lies above the null.
    """
    table = frame(result)
    induction = table[table.score == "induction"].set_index("part")
    found = (induction.value >= INDUCTION_THRESHOLD) & (induction.low > induction.null)
    table["is_induction_head"] = table.part.map(found).astype(bool)
    return table


def composition(results: Mapping[str, xr.Dataset]) -> pd.DataFrame:
    """`interp.composition` by kind (Q, K, V): one row per pair of heads in different layers.

    Of each kind an equal share of `MOST_PAIRS`, those furthest from the null; the attribute `of` counts all pairs.
    """
    columns = ["kind", "src", "dst", "value", "null", "excess", "relative"]
    if not results:
        return pd.DataFrame(columns=columns)
    most = MOST_PAIRS // len(results)
    every = {kind: strongest(result, "excess", most) for kind, result in results.items()}
    table = pd.concat([one.assign(kind=kind) for kind, one in every.items()])[columns].reset_index(drop=True)
    table.attrs["of"] = sum(one.attrs["of"] for one in every.values())
    return table


def attribution(result: xr.Dataset) -> pd.DataFrame:
    """`interp.attribute` of one prompt by head: the logits that each part adds, its share of the total, its place.

    Rows follow the stream; running_sum = logits of this row and all above, the total at the end.
    share = value / total: signed, sums to 1, exceeds 1 where parts cancel; NaN for a total of 0.
    """
    one = result.isel(prompt=0)
    value, total = one.value.to_numpy(), float(one.total)
    parts = [Part.of(str(name)) for name in one.part.values]
    heads = [part.index if part.kind == "head" else None for part in parts]
    return pd.DataFrame(
        {
            "part": [str(part) for part in parts],
            "kind": [part.kind for part in parts],
            "layer": pd.array([part.layer for part in parts], dtype="Int64"),
            "head": pd.array(heads, dtype="Int64"),
            "value": value,
            "share": value / total if total else np.nan,
            "running_sum": value.cumsum(),
        }
    )


def attribution_sources(result: xr.Dataset, names: Sequence[str]) -> pd.DataFrame:
    """Each head's terms of the logits, split by the position it moved them from; sums over sources to the head."""
    table = frame(result.by_source.isel(prompt=0).reset_coords(drop=True).to_dataset(name="value"))
    table.insert(
        0, "part", head_names(result.sizes["layer"], result.sizes["head"])[table.layer, table["head"]]
    )
    table.insert(4, "source_token", np.array(names, dtype=object)[table.source])
    return table


def patching(results: Mapping[str, xr.Dataset], names: Sequence[str]) -> pd.DataFrame:
    """`interp.patch` by direction and site: one row per cell, `pos` (and its token) or `head` empty by the site's dims.

    value = metric of the patched run - metric of the run patched into; normalised = 0 as after the corrupted prompt, 1
    as after the prompt; where `changed` is false the two runs agree in the cell, or it cannot reach the answer.
    """
    every = [frame(each).assign(direction=each.direction, site=each.site) for each in results.values()]
    whole = pd.concat(every, ignore_index=True)
    for column in ("pos", "head"):
        whole[column] = whole[column].astype("Int64")
    words = dict(enumerate(names))
    whole["token"] = [words.get(-1 if pd.isna(pos) else pos) for pos in whole.pos]
    columns = ["part", "layer", "pos", "token", "head", "value", "normalised", "changed"]
    return whole[["direction", "site", *columns]]


def edges(result: xr.Dataset) -> pd.DataFrame:
    """The edges of `interp.circuits.edge_attribution` with their scores in logits, the largest first.

    Positive: bringing the edge back (it alone carries the prompt's value in the corrupted run) raises the metric. The
    largest `MOST_PAIRS` are kept; the attribute `of` counts all edges.
    """
    table = strongest(result, "value", MOST_PAIRS)[["edge", "sender", "receiver", "value"]]
    order = (-table.value.abs()).argsort(kind="stable")
    return table.iloc[order].reset_index(drop=True)


def faithfulness(sizes: Sequence[int], result: xr.Dataset) -> pd.DataFrame:
    """The faithfulness of the strongest edges of one prompt (`interp.circuits.circuit_curve`), by how many.

    edges = how many were kept, `connected` how many of them lie on a path from the input to the logits, value =
    (metric of the circuit - metric of the corrupted prompt) / (metric of the prompt - that of the corrupted one): 0
    without edges, 1 with all. One prompt: no interval.
    """
    found = result.sel(circuit="found", score="faithfulness")
    return pd.DataFrame({"edges": list(sizes), "connected": found.edges.values, "value": found.value.values})


def logit_lens(of_next: xr.Dataset, of_answer: xr.Dataset) -> pd.DataFrame:
    """The lens at every depth and position, one row per rank of its top tokens.

    `token` is what is read there, `top_token` and `word` the id and text of what the lens says. `next_rank` and
    `next_prob` are about the token that follows in the prompt (rank -1 and NaN at the end), `answer_*` about the
    answer, `entropy` and `kl` = KL(final || depth) about the whole distribution; ranks from 0.
    """
    of_next = of_next.rename(target_rank="next_rank", target_prob="next_prob")
    about = of_answer[["target_rank", "target_prob"]].drop_vars("token")
    merged = of_next.merge(about.rename(target_rank="answer_rank", target_prob="answer_prob"))
    table = frame(merged.isel(prompt=0).reset_coords("prompt", drop=True))
    first = ["depth", "pos", "token", "rank", "top_token", "word", "top_prob", "entropy", "kl"]
    sure = [name for name in ("low", "high", "stays") if name in table]
    return table[[*first, "next_rank", "next_prob", "answer_rank", "answer_prob", *sure]]


def fitted_lenses(found: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Several lenses as `logit_lens` has them, the column `lens` first.

    `low` and `high` are the ends of a word's rank in 95 % of lenses that the same texts could have given, `stays` the
    share of these that list it; NaN for lenses that are not resampled.
    """
    sure = ("low", "high", "stays")
    each = [table.assign(lens=name) for name, table in found.items()]
    every = dict.fromkeys(("lens", *each[0], *sure))
    return pd.concat([table.reindex(columns=list(every)) for table in each], ignore_index=True)


def backward_lens(result: xr.Dataset) -> pd.DataFrame:
    """`interp.backward_lens` of one prompt: per matrix, layer and position the most and least probable tokens.

    One row per rank, the extreme token first. `x` and `delta` are norms of what the matrix read and of the gradient at
    its output, `relative_update` their product over the largest of the matrix; `answer_rank` counts from 0, the most
    probable. Where nothing would be written: ids and ranks -1, and no words.
    """
    cells = result.isel(prompt=0).reset_coords("prompt", drop=True).drop_vars(["word", "side"])
    table = cells.to_dataframe(dim_order=["matrix", "layer", "pos", "rank"]).reset_index()
    table = table.rename(columns={"target_rank": "answer_rank"})
    for end in ("top", "bottom"):
        ids, words = table[f"{end}_token"], table[f"{end}_word"]
        table[f"{end}_word"] = [word if i >= 0 else None for i, word in zip(ids, words, strict=True)]
    first = [
        "matrix",
        "part",
        "layer",
        "pos",
        "token",
        "x",
        "delta",
        "relative_update",
        "answer_rank",
        "rank",
    ]
    return table[[*first, "top_token", "top_word", "bottom_token", "bottom_word"]]
