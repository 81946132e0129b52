"""Information-flow routes: the share of each part in every sum of the residual stream, and the routes to an answer.

In every residual sum y = sum_j z_j part j has the proximity p_j = max(0, ||y||_1 - ||y - z_j||_1), how much closer to y
it brings the sum, and the share p_j / sum_k p_k. After attention the parts are the stream before the block, what every
head moved from every source position, and the biases; after the MLP they are the stream before the MLP and the MLP's
output. Ferrando & Voita 2024, "Information Flow Routes: Automatically Interpreting Language Models at Scale"
(2403.00824); the proximity is that of ALTI (Ferrando et al. 2022).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from interp.core.boundary import public
from interp.core.results import check_finite, check_result, in_order, labelled
from interp.core.stats import Partial, Rows, upcast
from interp.data.batch import Batch
from interp.data.text import Text
from interp.model.config import ModelConfig
from interp.model.parts import Part
from interp.model.records import require
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer
from interp.passes.observe import Subject
from interp.passes.question import ByRow, Question, Reading
from interp.runs.functions import of_data
from interp.tokens.mixing import SourceSplit, announce_pairs, check_stream, closer_, split_reads

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

CHUNK = 2**20
"""Numbers of z_j in memory at a time: 4 MiB in float32, which fit into the processor's cache."""
_NODE, _PAIR = ("prompt", "layer", "query"), ("prompt", "layer", "head", "query", "key")
OWN = ("mlp", "resid_mid", "resid", "attn_bias")
"""Parts that move nothing between positions (`L3.mlp`, `L3.resid`), those of the sum after the MLP first."""


@dataclass(frozen=True)
class FlowRoutes(Question):
    """Share of each part in every sum of the residual stream, block by block and position by position.

    A sum y = sum_j z_j is split by how much closer each part brings it, p_j = max(0, ||y||_1 - ||y - z_j||_1), as
    shares p_j / sum_k p_k.

    Args:
        data: prompts, token ids, a batch, files or a stream of any size.

    Returns:
        Dataset of shares in [0, 1]. Padding is NaN, `token` the text of every position. The first three sum to 1 over
        the parts of the stream after attention, the last two for the stream after the MLP.

        - `value` [prompt, layer, head, query, key]: what heads move (coordinate `part`: `L0H3`).
        - `resid` [prompt, layer, query]: the stream before the block (`L0.resid`).
        - `attn_bias` [prompt, layer, query]: b_O, and the beta of a norm of attention's output.
        - `mlp` [prompt, layer, query]: the MLP. Its share goes to its own position; one with a convolution has also
          read the positions before.
        - `resid_mid` [prompt, layer, query]: the stream after attention.

        Parallel blocks have one sum: `mlp` belongs to the first and there is no `resid_mid`; attention-only models
        have neither. Where no part brings the sum closer the stream before keeps all of it: our convention.

    Raises:
        ValueError: post-norm and Macaron blocks, cross-attention, mixers that do not move single sources, and edits
            that put something else than a multiple of its parts into the stream.

    Caveats:
        Shares say what the sum is made of, not what the answer needs: parts that cancel get none, and a large part may
        be one that nothing reads. They do not depend on an answer; attribution and patching do.

    Cost:
        B h q k d products per block (half in causal models), `CHUNK` of them in memory at a time (`[b h q d]`, one
        source's, at the least).

    Source:
        Ferrando & Voita 2024, "Information Flow Routes: Automatically Interpreting Language Models at Scale"
        (arXiv:2403.00824); the proximity is that of ALTI (Ferrando et al. 2022).

    See Also:
        `routes`: the edges that lead to one position.

    Example:
        >>> result = flow_routes(model, prompt)
        >>> result.value.dims
        ('prompt', 'layer', 'head', 'query', 'key')
    """

    def bind(self, model: Subject) -> ByRow:
        """One pass that reads what heads move at every layer, and what its MLP adds."""
        network = model.transformer
        if (problem := why_no_routes(network.config)) is not None:
            raise ValueError(
                f"flow routes require blocks that are plain sums of what attention and one MLP add; {problem}"
            )
        check_stream(network, "a split of the stream into routes")
        reads = [read for layer in range(network.config.n_layers) for read in _reads(network, layer)]
        finish = partial(_finish, name=self.name, config=network.config, text=model.text)
        return ByRow(self.name, Reading(reads, _compute), Rows, finish)


flow_routes = of_data(FlowRoutes)


def why_no_routes(config: ModelConfig) -> str | None:
    """Why a model has no flow routes, in words; None if it has them.

    Args:
        config: the model's configuration.

    Returns:
        The reason; None if it has routes.
    """
    if config.norms_sum:
        return "this model norms the sum itself (post-norm blocks)"
    if config.cross_attention:
        return "this model also attends to the memory of an encoder"
    if config.block.unusual is not None:
        return f"this model {config.block.unusual}, and a block here is at most two sums"
    try:
        require("additive", config.mixers, "splitting a block by source")
    except ValueError as refusal:
        return str(refusal)
    return None


@public()
def routes(shares: xr.Dataset, *, threshold: float = 0.02, prompt: int = 0, pos: int = -1) -> pd.DataFrame:
    """Routes into the final stream at one position: every edge of at least `threshold` on the way back from it.

    Each head is an edge of its own; the tool of Tufanov et al. 2024 sums heads before it applies its threshold.

    Args:
        shares: the result of `flow_routes`.
        threshold: least share of an edge, in (0, 1].
        prompt: number of the prompt.
        pos: position of the prompt where the routes end, negative from its end.

    Returns:
        A table with one row per edge, from the last layer to the first: `part` (`L1H2`, `L1.resid`, `L1.mlp`,
        `L1.resid_mid`), `layer`, `query` and `key` (where it comes from; the query itself but for heads) with their
        tokens, `share`. An MLP leads on to what it read.

    Raises:
        ValueError: a threshold that is not in (0, 1].
        IndexError: a prompt, or a position of it, that does not exist.

    Example:
        >>> list(routes(flow_routes(model, prompt), threshold=0.1).columns)
        ['part', 'layer', 'query', 'query_token', 'key', 'key_token', 'share']
    """
    import pandas as pd

    check_result(
        "shares", shares, ("prompt", "layer", "head", "query", "key", "pos", "value", "resid"), "flow_routes"
    )
    if shares.sizes["query"] != shares.sizes["key"]:
        raise ValueError(
            f"shares must have every token as query and as key, got {shares.sizes['query']} queries and "
            f"{shares.sizes['key']} keys"
        )
    if not -shares.sizes["prompt"] <= prompt < shares.sizes["prompt"]:
        raise IndexError(f"prompt must be in [0, {shares.sizes['prompt'] - 1}], got {prompt}")
    if not 0 < threshold <= 1:
        raise ValueError(f"a threshold in (0, 1] is required, got {threshold}")
    inner = {dim: range(shares.sizes[dim]) for dim in ("layer", "head", "query", "key", "pos")}
    ordered = in_order("shares", shares, {"prompt": None, **inner})
    result = ordered.isel(prompt=prompt)
    real = result.resid.notnull().values[0].nonzero()[0]
    if not -len(real) <= pos < len(real):
        raise IndexError(f"positions of a prompt of {len(real)} tokens are required, got {pos}")
    for name in {"value", *OWN} & set(result.data_vars):
        check_finite(f"{name} of shares", result[name].isel(query=real, key=real, missing_dims="ignore"))
    rows: list[tuple[str, int, int, int, float]] = []
    above = torch.zeros(result.sizes["query"], dtype=torch.bool)
    above[int(real[pos])] = True
    for layer in reversed(range(result.sizes["layer"])):
        block = {
            name: torch.tensor(result[name].isel(layer=layer).values)
            for name in ("value", *OWN)
            if name in result
        }
        edges, above = _step_back(block, above, threshold)
        rows += [(str(Part(kind, layer, head)), layer, *where) for kind, head, where in edges]
    table = pd.DataFrame(rows, columns=["part", "layer", "query", "key", "share"])
    token = result.token.values
    table.insert(3, "query_token", token[table["query"]])
    table.insert(5, "key_token", token[table["key"]])
    return table


@dataclass(frozen=True, eq=False)
class BlockShares:
    """Shares of the parts of one block; see `flow_routes`."""

    value: Float[Tensor, "b h q k"]
    attn_bias: Float[Tensor, "b q"]
    resid: Float[Tensor, "b q"]
    mlp: Float[Tensor, "b q"] | None = None
    resid_mid: Float[Tensor, "b q"] | None = None

    @classmethod
    def of(
        cls, split: SourceSplit, mlp: Float[Tensor, "b q d"] | None, *, parallel: bool, causal: bool
    ) -> BlockShares:
        """The shares of a block, from the split of its attention (`upto="res"`) and its MLP's output."""
        middle = split.output
        output = middle + mlp if parallel and mlp is not None else middle
        heads = head_proximity(split, output, causal=causal)
        bias, stream = closer_(torch.stack((split.constant, split.stream)), output)
        mlp_closeness = closer_(mlp.clone(), output) if parallel and mlp is not None else None
        total = heads.sum((1, 3)) + bias + stream + (0 if mlp_closeness is None else mlp_closeness)
        none_closer = total == 0
        total = total.masked_fill(none_closer, 1)
        moved = heads / rearrange(total, "b q -> b 1 q 1")
        bias, resid = bias / total, (stream / total).masked_fill(none_closer, 1)
        if mlp is None:
            return cls(moved, bias, resid)
        if mlp_closeness is not None:
            return cls(moved, bias, resid, mlp_closeness / total)
        middle_closeness, mlp_after = closer_(torch.stack((middle, mlp)), middle + mlp)
        total = middle_closeness + mlp_after
        share = (middle_closeness / total).masked_fill(total == 0, 1)
        return cls(moved, bias, resid, 1 - share, share)


def head_proximity(
    split: SourceSplit, whole: Float[Tensor, "b q d"], *, causal: bool
) -> Float[Tensor, "b h q k"]:
    """Proximity of every head's move from every source: max(0, ||y||_1 - ||y - a_ij f^h(x_j)||_1).

    Args:
        split: attention of one block as parts.
        whole: the sum y, [b, q, d].
        causal: whether queries see no later sources, so that these need no computation.

    Returns:
        [b, h, q, k]; exactly 0 where nothing is moved.
    """
    rows, n, heads = split.value.shape[:3]
    step = max(1, CHUNK // (rows * heads * n * whole.shape[-1]))
    weight = split.pattern / rearrange(split.scale, "b q 1 -> b 1 q 1")
    proximity = torch.zeros_like(weight)
    for first in range(0, n, step):
        block, since = slice(first, first + step), first if causal else 0
        moved = einsum(split.value[:, block], split.out, "b k h e, h e d -> b h k d")
        moved_pairs = weight[:, :, since:, block, None] * moved[:, :, None]
        proximity[:, :, since:, block] = closer_(moved_pairs, whole[:, None, since:, None])
    return proximity


# --- one batch ------------------------------------------------------------------------------------------------------


def _reads(model: Transformer, layer: int) -> tuple[Read, ...]:
    reads = split_reads(model, layer, "res")
    return reads if model.config.mlp is None else (*reads, _mlp_read(layer))


def _mlp_read(layer: int) -> Read:
    return Read(f"blocks.{layer}.hook_mlp_out")


@torch.no_grad()
def _compute(trace: Trace, batch: Batch, model: Transformer) -> Mapping[str, Tensor]:
    """The shares of every block, stacked over layers (`[b l ...]`), NaN at padding."""
    config, blocks = model.config, []
    for layer in range(config.n_layers):
        mlp = None if config.mlp is None else upcast(trace[_mlp_read(layer)])
        parts = SourceSplit.of(model, layer, trace, "res")
        announce_pairs("flow_routes", parts, model)
        blocks.append(BlockShares.of(parts, mlp, parallel=config.parallel, causal=config.causal))
    shares = {
        name: torch.stack([getattr(block, name) for block in blocks], 1)
        for name in BlockShares.__dataclass_fields__
        if getattr(blocks[0], name) is not None
    }
    if batch.keep is not None:
        keep = batch.keep.to(shares["resid"].device)
        pairs = keep[:, :, None] & keep[:, None, :]
        masks = {
            name: ~(pairs[:, None, None] if x.ndim == 5 else keep[:, None]) for name, x in shares.items()
        }
        shares = {name: x.masked_fill(masks[name], torch.nan) for name, x in shares.items()}
    return {**shares, "token": batch.token_ids}


def _finish(merged: Partial, name: str, config: ModelConfig, text: Text) -> xr.Dataset:
    assert isinstance(merged, Rows)
    rows = dict(merged.rows)
    token = rows.pop("token")
    layers, heads, n = range(config.n_layers), range(config.n_heads), token.shape[1]
    return labelled(
        name,
        {name: (_PAIR if value.ndim == 5 else _NODE, value) for name, value in rows.items()},
        coords={
            "layer": layers, "head": heads, "query": range(n), "key": range(n), "pos": range(n),
            "part": (("layer", "head"), [[str(Part("head", i, h)) for h in heads] for i in layers]),
            "token": text.token_words(token),
        },
        units="share of the sum",
        attrs={
            "unit": "share of the sum",
            "sums_to": "value, resid, attn_bias (parallel blocks: and mlp): 1; mlp, resid_mid: 1",
        },
    )  # fmt: skip


# --- back from one position ------------------------------------------------------------------------------------------

RouteEdge = tuple[str, int | None, tuple[int, int, float]]
"""Kind and head (None but for heads) of a part; its query, its key and its share."""


def _step_back(
    block: Mapping[str, Tensor], above: Tensor, threshold: float
) -> tuple[list[RouteEdge], Tensor]:
    """The edges of one block that lead to the positions `above` it (a mask), and the mask of those they come from."""
    mlp, resid_mid = block.get("mlp"), block.get("resid_mid")
    edges: list[RouteEdge] = []
    middle = above if resid_mid is None else torch.zeros_like(above)
    if mlp is not None:
        through = above & (mlp >= threshold)
        edges += _same_position_edges("mlp", mlp, through)
        if resid_mid is not None:
            stays = above & (resid_mid >= threshold)
            edges += _same_position_edges("hook_resid_mid", resid_mid, stays)
            middle = through | stays
    stays = middle & (block["resid"] >= threshold)
    edges += _same_position_edges("resid", block["resid"], stays)
    moved = middle[:, None] & (block["value"] >= threshold)
    for head, query, key in moved.nonzero().tolist():
        edges.append(("head", head, (query, key, float(block["value"][head, query, key]))))
    below = stays | moved.any(0).any(0)
    return edges, below if resid_mid is not None or mlp is None else below | through


def _same_position_edges(kind: str, share: Tensor, at: Tensor) -> Iterator[RouteEdge]:
    """The edges of a part that moves nothing between positions, at the positions of the mask `at`."""
    return ((kind, None, (pos, pos, float(share[pos]))) for pos in at.nonzero()[:, 0].tolist())
