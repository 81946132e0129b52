"""The tidy tables behind the page: one row per observation, units in the column names, tokens as text and as ids."""

import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from interp.core.results import frame
from interp.model.loss import next_token_loss
from interp.model.parts import Part

Pieces = Callable[[Sequence[int]], list[str]]
"""Token ids to the text of each: `Text.pieces`."""

INDUCTION_THRESHOLD = 0.4
"""Least induction score of a head that the page calls an induction head."""


def tokens(ids: Int[Tensor, "p"], logits: Float[Tensor, "p v"] | None, pieces: Pieces) -> pd.DataFrame:
    """Each token of the prompt and how well the tokens before it predicted it: loss in nats, probability, rank from 0.

    The first token has none before it: NaN, and rank -1; so have all in a model without logits.
    """
    loss, rank = torch.full((len(ids),), torch.nan), torch.full((len(ids),), -1)
    if logits is not None:
        loss[1:] = next_token_loss(logits[None], ids[None])[0]
        rank[1:] = (logits[:-1] > logits[:-1].gather(1, ids[1:, None])).sum(1)
    return pd.DataFrame(
        {
            "pos": np.arange(len(ids)),
            "token_id": ids.cpu().numpy(),
            "token": pieces(ids.tolist()),
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


def attention(pattern_lhqk: Float[Tensor, "l h q k"], names: Sequence[str]) -> pd.DataFrame:
    """Every head's attention from each query to each key it can see (key <= query), in this nesting order."""
    layers, heads, n, _ = pattern_lhqk.shape
    query, key = np.tril_indices(n)
    layer, head, cell = (index.ravel() for index in np.indices((layers, heads, len(query))))
    words = np.array(names, dtype=object)
    return pd.DataFrame(
        {
            "layer": layer,
            "head": head,
            "query": query[cell],
            "query_token": words[query[cell]],
            "key": key[cell],
            "key_token": words[key[cell]],
            "attention": pattern_lhqk[:, :, query, key].float().cpu().numpy().ravel(),
        }
    )


def heads(result: xr.Dataset) -> pd.DataFrame:
    """`interp.heads` as a table, and whether each head counts as an induction head.

    It does if its induction score is at least `INDUCTION_THRESHOLD` and the lower end of the score's 95 % interval
    lies above the null.
    """
    table = frame(result)
    above = table.induction_low > table.induction_null
    table["is_induction_head"] = (table.induction >= INDUCTION_THRESHOLD) & above
    return table


def circuits(result: xr.Dataset) -> pd.DataFrame:
    """`interp.copying` without ranks: each head's copying and matching score, -1 to 1; NaN where there is none."""
    values = {"copying": "eigenvalue", "matching": "matching"}
    found = {name: result.value.sel(score=score).reset_coords(drop=True) for name, score in values.items()}
    return frame(xr.Dataset(found))


def composition(results: Mapping[str, xr.Dataset]) -> pd.DataFrame:
    """`interp.composition` by kind (Q, K, V): one row per pair of heads in different layers."""
    every = [_pairs(result).assign(kind=kind) for kind, result in results.items()]
    columns = ["kind", "src_layer", "src_head", "dst_layer", "dst_head", "raw", "null", "excess", "z", "p"]
    if not every:
        return pd.DataFrame(columns=columns)
    return pd.concat(every)[columns].dropna(subset="raw").reset_index(drop=True)


def _pairs(result: xr.Dataset) -> pd.DataFrame:
    """One row per pair of heads, by layer and head."""
    table = frame(result).rename(columns={"value": "raw"})
    for side in ("src", "dst"):
        table[f"{side}_head"] = [Part.of(name).index for name in table[side]]
    return table


def attribution(result: xr.Dataset) -> pd.DataFrame:
    """`interp.attribute` of one prompt by head: each component's logits, its share of the total, and its place.

    Rows follow the stream; running_sum = logits of this row and all above, the total at the end.
    share = logits / total: signed, sums to 1, exceeds 1 where parts cancel; NaN for a total of 0.
    """
    one = frame(result[["logits", "total"]].isel(prompt=0))
    places = [_place(str(name)) for name in one.component]
    total = float(result.total[0])
    return pd.DataFrame(
        {
            "component": one.component.astype(str),
            "kind": [kind for kind, _, _ in places],
            "layer": pd.array([layer for _, layer, _ in places], dtype="Int64"),
            "head": pd.array([head for _, _, head in places], dtype="Int64"),
            "logits": one.logits,
            "share": one.logits / total if total else np.nan,
            "running_sum": one.logits.cumsum(),
        }
    )


def attribution_sources(result: xr.Dataset, names: Sequence[str]) -> pd.DataFrame:
    """What each head adds to the logits, split by the position it moved it from; sums over sources to the head."""
    table = frame(result.by_source.isel(prompt=0).to_dataset(name="logits"))
    table.insert(3, "source_token", np.array(names, dtype=object)[table.source])
    return table


def _place(component: str) -> tuple[str, int | None, int | None]:
    """Kind, layer and head of a component's label."""
    if found := re.fullmatch(r"L(\d+)H(\d+)", component):
        return "head", int(found[1]), int(found[2])
    if found := re.fullmatch(r"(\d+)_(attn_bias|mlp_out|mlp_before_out|ln\d_bias)", component):
        kinds = {"mlp_out": "mlp", "mlp_before_out": "first mlp", "attn_bias": "attention bias"}
        return kinds.get(found[2], "norm bias"), int(found[1]), None
    return ("embedding" if component.endswith("embed") else "bias"), None, None


def patching(results: Mapping[tuple[str, str], xr.Dataset], names: Sequence[str]) -> pd.DataFrame:
    """`interp.patch` by direction and site: one row per cell, `pos` (and its token) or `head` empty by the site's dims.

    effect_logits = the patched run minus the run patched into; normalised = 0 like the twin, 1 like the prompt; where
    `changed` is false the two runs agree in the cell, or it cannot reach the answer.
    """
    every = []
    for (direction, site), result in results.items():
        table = frame(result[["effect", "normalised", "changed"]])
        table.insert(0, "direction", direction)
        table.insert(1, "site", site)
        every.append(table)
    whole = pd.concat(every, ignore_index=True).rename(columns={"effect": "effect_logits"})
    for column in ("pos", "head"):
        whole[column] = whole[column].astype("Int64")
    words = dict(enumerate(names))
    whole["token"] = [words.get(-1 if pd.isna(pos) else pos) for pos in whole.pos]
    columns = ["layer", "pos", "token", "head", "effect_logits", "normalised", "changed"]
    return whole[["direction", "site", *columns]]


def edges(result: xr.Dataset) -> pd.DataFrame:
    """Every edge of `interp.edge_attribution` with its score in logits, the largest first.

    Positive: corrupting the edge (it alone carries the twin's value) raises the logit difference.
    """
    columns = ["sender", "receiver", "value"]
    table = frame(result, "value")[columns].rename(columns={"value": "score_logits"})
    order = (-table.score_logits.abs()).argsort(kind="stable")
    return table.iloc[order].reset_index(drop=True)


def faithfulness(sizes: Sequence[int], result: xr.Dataset) -> pd.DataFrame:
    """`interp.circuit_curve` of the strongest edges of one prompt, by how many.

    edges = how many were kept, `connected` how many of them lie on a path from the input to the logits, faithfulness =
    (metric of the circuit - metric of the twin) / (metric of the prompt - metric of the twin): 0 without edges, 1 with
    all. One prompt: no interval.
    """
    found = result.sel(circuit="found", score="faithfulness")
    return pd.DataFrame(
        {"edges": list(sizes), "connected": found.edges.values, "faithfulness": found.value.values}
    )


def logit_lens(
    of_next: xr.Dataset, of_answer: xr.Dataset, names: Sequence[str], pieces: Pieces
) -> pd.DataFrame:
    """The lens at every depth and position, one row per rank of its top tokens.

    `next_rank` and `next_prob` are about the token that follows in the prompt (rank -1 and NaN at the end), `answer_*`
    about the answer, `entropy_nats` and `kl_nats` = KL(final || depth) about the whole distribution; ranks from 0.
    """
    known = ["target_rank", "target_prob"]
    of_next, of_answer = of_next.drop_vars(["word", "token"]), of_answer.drop_vars("token")
    merged = of_next.rename(target_rank="next_rank", target_prob="next_prob").merge(
        of_answer[known].rename(target_rank="answer_rank", target_prob="answer_prob")
    )
    table = frame(merged.isel(prompt=0))
    table = table.rename(
        columns={"top_token": "token_id", "top_prob": "prob", "entropy": "entropy_nats", "kl": "kl_nats"}
    )
    table.insert(2, "read_token", np.array(names, dtype=object)[table.pos])
    table.insert(5, "token", pieces(table.token_id.tolist()))
    return table


def backward_lens(found: xr.Dataset, names: Sequence[str], pieces: Pieces) -> pd.DataFrame:
    """`interp.backward_lens` of one prompt: per matrix, layer and position the most and least probable tokens.

    One row per rank, the extreme token first. `x` and `delta` are norms of what the matrix read and of the gradient at
    its output, `relative_update` their product over the largest of the matrix; `answer_rank` counts from 0, the most
    probable. Where nothing would be written: ids and ranks -1, and no tokens.
    """
    shown = ["x", "delta", "relative_update", "target_rank", "top_token", "bottom_token"]
    cells = found[shown].isel(prompt=0, drop=True).drop_vars(["part", "side", "token"])
    table = cells.to_dataframe(dim_order=["matrix", "layer", "pos", "rank"]).reset_index()
    table = table.rename(columns={"target_rank": "answer_rank"})
    columns = ["matrix", "layer", "pos", "x", "delta", "relative_update", "answer_rank", "rank"]
    out = table[columns].copy()
    out.insert(3, "read_token", np.array(names, dtype=object)[table.pos])
    for end in ("top", "bottom"):
        ids = table[f"{end}_token"]
        texts = pieces(ids.clip(lower=0).tolist())
        out[f"{end}_token_id"] = ids
        out[f"{end}_token"] = [text if i >= 0 else None for i, text in zip(ids, texts, strict=True)]
    return out
