"""How an attention score came about: the pairs of parts that make most of it, and the tokens that their heads read.

An induction circuit reads off as a path: head B attends from i to j because head A moved token j - 1 to j, and what it
wrote there meets the embedding at i.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from interp.attention.attention_attribution import sides_of
from interp.attention.score_parts import KEY, QUERY, QueryPosition, ScoreParts, as_head, rows_of, score_parts
from interp.core.results import labelled
from interp.core.stats import Partial, Rows
from interp.data.batch import Batch
from interp.model.config import ModelConfig
from interp.model.parts import Part, PartName
from interp.model.transformer import Transformer
from interp.passes.needs import Steps
from interp.passes.observe import Subject
from interp.passes.question import ByRow, Question
from interp.runs.functions import of_data

if TYPE_CHECKING:
    import xarray as xr

NONE = -1
"""The source token of a part that is not a head, and so moved nothing from any token."""


@dataclass(frozen=True)
class AttentionPaths(Question):
    """The pairs of parts that make most of a head's attention score, with the tokens that their heads had read.

    Parts, positions and soft caps are those of `attention_attribution` with `by="head"`; all pairs are summed and
    checked, whatever `top` is. A path goes two steps back: why the earlier heads attended to their source is a
    question about their own scores, which the same call answers.

    Args:
        data: prompts, token ids, a batch, files or a stream of any size.
        head: the head whose score is followed back: "L1H2", or (1, 2).
        key: token of each prompt that is attended to: one number or one per prompt, negative from its end; BOS counts.
        query: token of each prompt that attends, given like `key`; the last by default.
        top: how many pairs are listed.

    Returns:
        Dataset over `prompt` and `rank`, the pairs of the largest absolute value first. Tokens are numbered from the
        prompt's first.

        - `value` [prompt, rank]: what the pair adds, in units of the score.
        - `share` [prompt, rank]: `value` over the prompt's score. Shares of all pairs sum to 1, or to less with
          positions that add to scores; they may be negative, or above 1.
        - `query_part`, `key_part` [prompt, rank]: names of the two parts.
        - `query_source`, `key_source` [prompt, rank]: for parts that are heads, the token from which they moved most
          of what the pair adds; -1 for parts that are no heads, and for heads that move no tokens.
        - `query_moved`, `key_moved` [prompt, rank]: that token's part of the pair's value; NaN where there is none.
        - `path` [prompt, rank]: all of it as text. `embed@12 x L0H1@6<5` is the embedding at the query, token 12,
          times what L0H1 had moved to the key, token 6, from token 5: the head attends from 12 to 6 because L0H1 moved
          token 5 to 6.
        - `total` [prompt]: the score.

    Raises:
        ValueError: a `top` below 1, a part that is no head, a key that the query does not see, and mixers whose scores
            are not one product of queries and keys.
        IndexError: a token that a prompt lacks.
        IncompleteSumError: the parts do not sum to the score, as under edits of the head's own queries, keys or
            scores.

    See Also:
        `attention_attribution`: all pairs of parts, and all sources.

    Example:
        >>> result = interp.attention.attention_paths(model, prompt, "L1H2", query=-1, key=2, top=3)
        >>> result.share.dims
        ('prompt', 'rank')
    """

    head: PartName
    _: KW_ONLY
    key: QueryPosition
    query: QueryPosition = -1
    top: int = 10

    def bind(self, model: Subject) -> ByRow:
        """One pass that reads the stream at the query and the key, and earlier heads by source."""
        config = model.transformer.config
        head = as_head(self.head, config)
        names = sides_of(config, head[0], heads=True)
        most = len(names["query_part"]) * len(names["key_part"])
        if isinstance(self.top, bool) or self.top < 1:
            raise ValueError(f"top must be at least one pair of parts, got {self.top!r}")
        compute = partial(_compute, head=head, question=self, top=min(self.top, most))
        finish = partial(_finish, head=head, name=self.name, config=config)
        prompts = rows_of(self.query, self.key)
        return ByRow(self.name, compute, Rows, finish, prompts=prompts, held="query or key positions")


attention_paths = of_data(AttentionPaths)


def _compute(
    model: Transformer, batch: Batch, head: tuple[int, int], question: AttentionPaths, top: int
) -> Steps[Mapping[str, Tensor]]:
    """The `top` pairs of parts of each row's score, with the source tokens of their heads."""
    scores = yield from score_parts(model, batch.left_aligned(), head, question.query, question.key, "source")
    pairs = scores.pairs  # [b query_part key_part]
    largest = pairs.abs().flatten(1).topk(top).indices
    # index of a pair [b n] -> indices of its query part and key part [b 2 n]
    part_ids = torch.stack((largest // pairs.shape[2], largest % pairs.shape[2]), 1)
    values: dict[str, Tensor] = {"value": pairs.flatten(1).gather(1, largest), "parts": part_ids}
    for name, side in (("query", QUERY), ("key", KEY)):
        values[f"{name}_source"], values[f"{name}_moved"] = _largest_sources(scores, part_ids, side)
    return values | {"total": scores.total, "error": scores.error, "places": scores.places}


def _largest_sources(
    scores: ScoreParts, part_ids: Int[Tensor, "b two n"], side: int
) -> tuple[Int[Tensor, "b n"], Float[Tensor, "b n"]]:
    """Token from which each pair's head on one side moved most of the pair's value, and that token's addition.

    Parts that are not heads get the token -1 and NaN. `part_ids` are indices into `scores.parts`, the query's first.
    """
    other_side = (scores.key, scores.query)[side]
    rows = torch.arange(len(other_side), device=other_side.device)[:, None]
    other_vectors = other_side[rows, part_ids[:, 1 - side]]
    source = torch.full_like(part_ids[:, side], NONE)
    moved = torch.full_like(other_vectors[..., 0], torch.nan)
    for layer, vectors in scores.sources.items():
        first = scores.parts.index(str(Part("head", layer, 0)))
        head = part_ids[:, side] - first
        in_layer = (head >= 0) & (head < vectors.shape[2])
        # [b n e] per source token k, times the vector of the pair's other part -> [b n k]
        terms = einsum(
            vectors[side][rows, head.clamp(0, vectors.shape[2] - 1)], other_vectors, "b n k e, b n e -> b n k"
        )
        largest = terms.abs().argmax(-1)
        source = torch.where(in_layer, largest, source)
        moved = torch.where(in_layer, terms.gather(-1, largest[..., None])[..., 0], moved)
    return source, moved


def _finish(merged: Partial, head: tuple[int, int], name: str, config: ModelConfig) -> xr.Dataset:
    assert isinstance(merged, Rows)
    rows, cells = merged.rows, ("prompt", "rank")
    names = {
        dim: np.array(parts, dtype=object) for dim, parts in sides_of(config, head[0], heads=True).items()
    }
    parts = {dim: names[dim][rows["parts"][:, at].cpu().numpy()] for at, dim in enumerate(names)}
    table = labelled(
        name,
        {
            "value": (cells, rows["value"]),
            "share": (cells, rows["value"] / rows["total"][:, None]),
            **{
                field: (cells, rows[field])
                for field in ("query_source", "query_moved", "key_source", "key_moved")
            },
            "total": (("prompt",), rows["total"]),
        },
        units={"value": "score", "query_moved": "score", "key_moved": "score", "total": "score"},
        attrs={"part": str(Part("head", *head)), "completeness_error": float(rows["error"].max())},
    )
    texts = {dim: (cells, part_names) for dim, part_names in parts.items()}
    return table.assign(texts | {"path": (cells, _path_texts(rows, parts))})


def _path_texts(rows: Mapping[str, Tensor], parts: Mapping[str, np.ndarray]) -> np.ndarray:
    """Text of every pair `[prompt, rank]`, such as `embed@12 x L0H1@6<5`: part@token, and <source for heads."""
    ends = []
    for at, side in enumerate(("query", "key")):
        places, sources = rows["places"][:, at].tolist(), rows[f"{side}_source"].tolist()
        ends.append(
            [
                [
                    f"{part}@{place}" + (f"<{source}" if source != NONE else "")
                    for part, source in zip(*row, strict=True)
                ]
                for place, *row in zip(places, parts[f"{side}_part"], sources, strict=True)
            ]
        )
    pairs = [[f"{query} x {key}" for query, key in zip(*row, strict=True)] for row in zip(*ends, strict=True)]
    return np.array(pairs, dtype=object)
