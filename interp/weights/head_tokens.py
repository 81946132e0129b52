"""What every head writes when it attends to given tokens, and which of them it looks for: rows of its full circuits.

The entries are those of `copying.top_pairs`, for chosen tokens and all heads at once: OV rows end in the logits, QK
rows stay among the given tokens, which needs no product over the vocabulary. Elhage et al. 2021; Dar et al. 2022.
"""

from typing import TYPE_CHECKING

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from interp.core.precision import wide
from interp.core.results import labelled
from interp.core.tiles import row_tiles
from interp.data.text import Answers
from interp.passes.observe import Subject
from interp.weights.head_circuits import Circuits

if TYPE_CHECKING:
    import xarray as xr


@torch.no_grad()
def head_tokens(
    model: Subject, tokens: Answers, *, top: int = 5, circuits: Circuits | None = None
) -> "xr.Dataset":
    """For every head and token: the logits it raises and lowers most if it attends to it, and the tokens it looks for.

    Returns Dataset[layer, head, token]: `written` [.., end, rank], ids of the vocabulary, with `written_score`, the
    entry of the full OV circuit minus the mean of its row (logits, the final norm at scale 1); `end`: top, bottom.
    `sought` [.., match], places in `tokens`, with `sought_score`, the entry of the full QK circuit minus the mean over
    the given tokens (attention scores, the norms at scale 1): which of the given tokens the token, as a query, prefers.
    Rank 0 is the most extreme; as many matches as `top` and the tokens allow. The coordinate `token` holds the ids.
    tokens: single tokens, as text or ids. circuits: the conventions; None: folded, scaled, effective embedding, as in
    `top_pairs`; positions are ignored (rotary: offset 0).
    Caveats: heads behind layer 0 read what earlier layers wrote, not bare embeddings, and those of layer 0 read no
    MLP's work, which the effective embedding holds; scores of different queries have no common scale.
    Cost: 2 l h t d V FLOPs for t tokens, nearly all of it for `written`.
    Errors: ValueError for texts that are not one token, none at all, repeated ones, or more of `top` than the
    vocabulary has; ValueError and AttributeError where no circuit ends in the logits.

    Example:
        >>> found = head_tokens(model, torch.tensor([5, 6, 7]), top=3)
        >>> found.written.sel(layer=1, head=0, token=6, end="top").shape
        (3,)
    """
    config = model.transformer.config
    made = Circuits(model.transformer, folded=True, scaled=True, embedding="effective")
    circuits = made if circuits is None else circuits
    ids = _distinct(model, tokens)
    if not 1 <= top <= config.d_vocab:
        raise ValueError(f"1 to {config.d_vocab} tokens per list are available, got top={top}")
    rows, unembedding = wide(circuits.embedded_tokens(ids)), wide(circuits.bare_unembedding)
    centre = unembedding.mean(-1)
    found: dict[str, list[Tensor]] = {name: [] for name in _DIMS}
    for layer in range(config.n_layers):
        for name, value in _written(circuits, layer, rows, unembedding, centre, top).items():
            found[name].append(value)
        scores, places = _sought(circuits, layer, rows, min(top, len(ids)))
        found["sought"].append(places)
        found["sought_score"].append(scores)
    return labelled(
        "head_tokens",
        {name: (_DIMS[name], torch.stack(values)) for name, values in found.items()},
        coords={
            "layer": range(config.n_layers), "head": range(config.n_heads), "token": ids.tolist(),
            "end": ["top", "bottom"], "rank": range(top),
        },
        attrs={
            "unit_written": "logits, final norm at scale 1, centred over the vocabulary",
            "unit_sought": "attention scores, norms at scale 1, centred over the given tokens",
            "embedding": circuits.embedding, "folded": int(circuits.folded), "scaled": int(circuits.scaled),
        },
    )  # fmt: skip


_CELL = ("layer", "head", "token")
_DIMS = {
    "written": (*_CELL, "end", "rank"),
    "written_score": (*_CELL, "end", "rank"),
    "sought": (*_CELL, "match"),
    "sought_score": (*_CELL, "match"),
}


def _distinct(model: Subject, tokens: Answers) -> Int[Tensor, "n"]:
    """The ids of the tokens, each once."""
    many = 1 if isinstance(tokens, str | int) else len(tokens)
    if many == 0:
        raise ValueError("at least one token is required, got none")
    ids = model.text.targets(tokens, many)
    if len(ids.unique()) != len(ids):
        raise ValueError(f"different tokens are required, got {ids.tolist()}")
    return ids


def _written(
    circuits: Circuits,
    layer: int,
    rows: Float[Tensor, "n d"],
    unembedding: Float[Tensor, "d v"],
    centre: Float[Tensor, "d"],
    top: int,
) -> dict[str, Tensor]:
    """Ids and centred scores of both ends, `[head token end rank]`; `top` entries of all rows in one product."""
    ov = circuits.ov(layer).wide()
    moved = circuits.before_unembedding(rows @ ov.A @ ov.B)
    ends = []
    for _, tile in row_tiles(rearrange(moved, "h n d -> (h n) d"), unembedding):
        both = [tile.topk(top, largest=largest) for largest in (True, False)]
        ends.append([torch.stack(pair, 1) for pair in zip(*both, strict=True)])
    scores, ids = (
        rearrange(torch.cat(x), "(h n) end rank -> h n end rank", n=len(rows))
        for x in zip(*ends, strict=True)
    )
    return {"written": ids, "written_score": scores - (moved @ centre)[..., None, None]}


def _sought(
    circuits: Circuits, layer: int, rows: Float[Tensor, "n d"], top: int
) -> tuple[Float[Tensor, "h n k"], Int[Tensor, "h n k"]]:
    """The best keys of each query among the rows, and the scores minus the mean of their row."""
    qk = circuits.qk(layer).wide()
    scores = (rows @ qk.A) @ (qk.B @ rows.mT)
    best = (scores - scores.mean(-1, keepdim=True)).topk(top, -1)
    return best.values, best.indices
