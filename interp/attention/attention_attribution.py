"""Why a head attends: its score for one query and one key as a sum over pairs of parts of the model.

score(i, j) = c sum over a, b of (a_i W_Q)^T R(i, j) (b_j W_K) + position. The vectors a_i and b_j are what the model's
parts wrote to the residual stream at query i and key j, R is the rotary rotation (if any), c the factor on the scores,
and norms have the scales that the pass computed. These are the QK circuits of Elhage et al. 2021, "A Mathematical
Framework for Transformer Circuits", on one prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from interp.attention.score_parts import (
    KEY,
    QUERY,
    QueryPosition,
    ScoreParts,
    ScoreSplit,
    as_head,
    rows_of,
    score_parts,
)
from interp.core.results import labelled
from interp.core.stats import WIDE, Partial, Rows
from interp.data.batch import Batch
from interp.data.text import Text
from interp.model.config import ModelConfig
from interp.model.parts import Part, PartName
from interp.model.transformer import Transformer
from interp.passes.needs import Steps
from interp.passes.observe import Subject
from interp.passes.question import ByRow, Question
from interp.residual.attribution import labels_before_attention
from interp.runs.functions import of_data

if TYPE_CHECKING:
    import xarray as xr


@dataclass(frozen=True)
class AttentionAttribution(Question):
    """One attention score of a head as a sum over pairs of parts: what was written at the query times at the key.

    Parts are those of `attribute`, as far as they were written before the head's layer reads the stream. Rotary
    positions, shared keys (grouped-query attention), norms of queries and keys and the factor on the scores are in the
    parts.

    Args:
        data: prompts, token ids, a batch, files or a stream of any size.
        head: the head whose score is split: "L1H2", or (1, 2).
        key: token of each prompt that is attended to: one number or one per prompt, negative from its end; BOS counts.
        query: token of each prompt that attends, given like `key`; the last by default.
        by: how finely the parts are split: "part" by sublayer (`embed`, `pos_embed`, `L0.attn`, `L0.mlp`), "head" into
            heads `L0H3` and their bias `L0.attn_bias`, "source" into heads and besides by the token that each head
            moved from.

    Returns:
        Dataset over `prompt`, `query_part` and `key_part`. The last parts are `L1.q_bias` and `L1.k_bias`: what
        queries and keys of the layer have whatever the stream is (b_Q, and beta of norms, carried on).

        - `value` [prompt, query_part, key_part]: what each pair adds, in units of the score (`attn.hook_attn_scores`,
          the input of the softmax). Marginals are sums: `value.sum("key_part")` is what each part at the query adds.
        - `total` [prompt]: the model's own score, under a soft cap the one before the cap.
        - `position` [prompt]: what ALiBi or relative buckets add to it, 0 under other positions.
        - `rounding` [prompt]: what the pass rounded off. `value` summed over the pairs, plus `position` and
          `rounding`, is `total`.
        - `by_query_source`, `by_key_source` [prompt, layer, head, source], with `by="source"`: what each earlier head
          moved from each token to the query (to the key), times the whole of the other side. Over `source` they sum to
          the head's marginal; tokens are numbered from the prompt's first. NaN in layers that move no tokens.

        `attrs["completeness_error"]` is the largest rounding, relative to the longest query part times the longest key
        part; every call checks (in float32 at least) that no more than rounding is missing.

    Raises:
        ValueError: a part that is no head, a key that the query does not see, and mixers whose scores are not one
            product of queries and keys.
        IndexError: a token that a prompt lacks.
        IncompleteSumError: the parts do not sum to the score, as under edits of the head's own queries, keys or
            scores.

    Caveat:
        The softmax compares keys. What all keys of a query have in common moves no attention: compare two keys.

    Source:
        After the QK circuits of Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits".

    See Also:
        `attention_paths`: the largest pairs, with the tokens that their heads had read.

    Example:
        >>> result = interp.attention.attention_attribution(model, prompt, "L1H2", query=-1, key=2, by="head")
        >>> result.value.sum("query_part").isel(prompt=0).idxmax("key_part").item() in result.key_part
        True
    """

    head: PartName
    _: KW_ONLY
    key: QueryPosition
    query: QueryPosition = -1
    by: ScoreSplit = "part"

    def bind(self, model: Subject) -> ByRow:
        """One pass that reads the stream at the query and the key."""
        config = model.transformer.config
        head = as_head(self.head, config)
        if self.by == "source" and not any(mixer.traits.additive for mixer in config.mixers[: head[0]]):
            raise ValueError(
                f"by='source' requires a head with heads before it that split by source; before {Part('head', *head)} "
                "there is none"
            )
        compute = partial(_compute, head=head, question=self)
        finish = partial(_finish, head=head, question=self, config=config, text=model.text)
        prompts = rows_of(self.query, self.key)
        return ByRow(self.name, compute, Rows, finish, prompts=prompts, held="query or key positions")


attention_attribution = of_data(AttentionAttribution)


def _compute(
    model: Transformer, batch: Batch, head: tuple[int, int], question: AttentionAttribution
) -> Steps[Mapping[str, Tensor]]:
    batch = batch.left_aligned()
    scores = yield from score_parts(model, batch, head, question.query, question.key, question.by)
    values = {"pairs": scores.pairs, "total": scores.total, "position": scores.position}
    values |= {"rounding": scores.rounding, "error": scores.error}
    values |= {} if model.dtype in WIDE else {"half": scores.rounding.abs()}
    for name, side in (("by_query_source", QUERY), ("by_key_source", KEY)):
        values |= {f"{name}_{layer}": x for layer, x in scores.of_sources(side).items()}
    return values | where(scores, batch)


def where(scores: ScoreParts, batch: Batch) -> dict[str, Tensor]:
    """Position in the prompt, and token id, of the query and the key of each row.

    Args:
        scores: one split score per row.
        batch: the rows, padded on the left.

    Returns:
        `places` (positions among real tokens) and `ids` (token ids), each [b, 2]: query, then key.
    """
    columns = scores.places + batch.tokens.shape[1] - batch.lengths[:, None]
    return {"places": scores.places, "ids": batch.tokens.gather(1, columns)}


def ends(rows: Mapping[str, Tensor], text: Text) -> dict[str, object]:
    """Coordinates `query`, `key` (positions) and `query_token`, `key_token` (texts) of a result.

    Args:
        rows: the tensors of `where`, over all rows.
        text: the tokenizer, which turns ids into texts.

    Returns:
        The coordinates over `prompt`, by name.
    """
    coords: dict[str, object] = {}
    for at, name in ((QUERY, "query"), (KEY, "key")):
        coords[name] = (("prompt",), rows["places"][:, at].tolist())
        coords[f"{name}_token"] = (("prompt",), text.words(rows["ids"][:, at].cpu().numpy()))
    return coords


def sides_of(config: ModelConfig, layer: int, *, heads: bool) -> dict[str, list[str]]:
    """Names of the parts at the query and at the key of a score, in the order of the arrays' axes.

    Args:
        config: the model's configuration.
        layer: layer of the head whose score it is.
        heads: whether attention is split into heads, or into sublayers.

    Returns:
        The names under `query_part` and `key_part`; the last is the bias of the queries or keys (`L1.q_bias`).
    """
    parts = labels_before_attention(config, layer, "head" if heads else "sublayer")
    return {f"{name}_part": [*parts, str(Part(f"{name[0]}_bias", layer))] for name in ("query", "key")}


def _finish(
    merged: Partial, head: tuple[int, int], question: AttentionAttribution, config: ModelConfig, text: Text
) -> xr.Dataset:
    assert isinstance(merged, Rows)
    rows, (layer, _) = merged.rows, head
    values: dict[str, tuple[Sequence[str], Tensor]] = {
        "value": (("prompt", "query_part", "key_part"), rows["pairs"]),
        "total": (("prompt",), rows["total"]),
        "position": (("prompt",), rows["position"]),
        "rounding": (("prompt",), rows["rounding"]),
    }
    for name in ("by_query_source", "by_key_source") if question.by == "source" else ():
        by_layer = [rows.get(f"{name}_{i}") for i in range(layer)]
        missing = torch.full_like(next(sources for sources in by_layer if sources is not None), torch.nan)
        all_layers = torch.stack([missing if sources is None else sources for sources in by_layer], 1)
        values[name] = (("prompt", "layer", "head", "source"), all_layers)
    cap = config.attn_softcap
    return labelled(
        question.name,
        values,
        coords={**sides_of(config, layer, heads=question.by != "part"), **ends(rows, text)},
        units="score",
        attrs={
            "part": str(Part("head", *head)),
            "by": question.by,
            "score": "as the softmax gets it" if cap is None else f"before the soft cap of {cap:g}",
            "completeness_error": float(rows["error"].max()),
        },
        notes=_half_precision_notes(rows),
    )


def _half_precision_notes(rows: Mapping[str, Tensor]) -> list[str]:
    """Note about the precision of the check under half precision; empty in float32."""
    if "half" not in rows:
        return []
    return [
        f"half precision: the pass rounded the score by up to {float(rows['half'].max()):.2g} (`rounding`); its parts "
        "were checked in float32, against the stream that they are written to"
    ]
