"""Token consensus: the angles between the tokens of a text by depth, and as blocks are applied again and again.

Rodríguez Abella et al. 2024/25 read depth as time: tokens on a sphere meet, under a causal mask at the first token. The
theory (`particles.py`) has no MLPs and no residual growth; `consensus` measures what a model does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from interp.core.kinds import Count
from interp.core.results import Score, scored
from interp.core.stats import POSITIVE, SIGNED, Means, Partial, upcast
from interp.data.batch import Batch
from interp.lab.depth.switched_blocks import Switch, entering, one_text_of_two_tokens, pass_through
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer
from interp.passes.observe import Subject
from interp.passes.question import ByRow, Question, Reading
from interp.runs.functions import of_data

if TYPE_CHECKING:
    import xarray as xr

ANGLES = ("min_cosine", "mean_cosine", "to_first", "to_first_start", "distance_to_first", "norm")
"""Names of the scores of `angles`, in order."""
UNITS = dict(zip(ANGLES, ("cosine",) * 4 + ("units of the stream",) * 2, strict=True))


@dataclass(frozen=True)
class Consensus(Question):
    """How much the tokens of a text point in one direction in the residual stream, by depth.

    Args:
        data: prompts, token ids, a batch, files or a stream of any size.
        layer: number of one block to apply; None: the whole stack in order.
        repeats: how often it is applied; what leaves it enters it again, with the same positions and mask.
        mlp: False leaves the MLPs out (they add 0).

    Returns:
        Dataset[depth, score]. Depth 0 is the stream that enters the model's first block (or block `layer`), one more
        for every block applied. Over texts, `value` is a mean with `low` and `high` (95 %), `n` and the coordinate
        `unit`, of the scores

        - `min_cosine`, `mean_cosine`: over all pairs of tokens; 1 is consensus.
        - `to_first`: mean cosine of the other tokens with the first token at the same depth.
        - `to_first_start`: mean cosine of the other tokens with the first token at depth 0.
        - `distance_to_first`: mean Euclidean distance of the other tokens to the first, in units of the stream.
        - `norm`: mean length of all tokens, in units of the stream.

    Raises:
        IndexError: a layer that does not exist.
        ValueError: repeats < 1, mlp=False without MLPs, packed rows, or rows of a single token.

    Caveats:
        In blocks without a norm of the sum the stream grows, and high cosines may come from one common direction; it
        is not subtracted. An edit of the stream that enters the first block acts once, at depth 0.

    Source:
        Rodríguez Abella et al. 2024/25, who iterate trained blocks.

    See Also:
        `rank_collapse`: one number for all tokens, with skips and MLPs switched off.

    Example:
        >>> consensus(model, prompt, repeats=3).value.sizes["depth"]
        10
    """

    _: KW_ONLY
    layer: int | None = None
    repeats: Count = 1
    mlp: bool = True

    def bind(self, model: Subject) -> ByRow:
        """One pass per repeat, each from the stream that the one before left."""
        config, layer, repeats = model.transformer.config, self.layer, self.repeats
        if layer is not None and not 0 <= layer < config.n_layers:
            raise IndexError(f"layers are 0 to {config.n_layers - 1} in this model, got {layer}")
        if repeats < 1:
            raise ValueError(f"repeats >= 1 is required, got {repeats}")
        if not self.mlp and config.mlp is None:
            raise ValueError("mlp=False requires MLPs to leave out; this model is attention-only")
        layers = range(config.n_layers) if layer is None else range(layer, layer + 1)
        off: tuple[Switch, ...] = () if self.mlp else ("mlp",)
        return ByRow(
            self.name,
            Reading([Read(entering(layers[0]))], partial(_compute, layers=layers, repeats=repeats, off=off)),
            Means,
            partial(_finish, name=self.name, depths=len(layers) * repeats + 1),
        )


consensus = of_data(Consensus)


def angles(
    x: Float[Tensor, "b p d"], real: Bool[Tensor, "b p"], start: Float[Tensor, "b d"]
) -> Float[Tensor, "b s"]:
    """The scores of `ANGLES` for every row: cosines and distances between its tokens.

    Args:
        x: [b, p, d], the residual stream.
        real: [b, p], True at real tokens.
        start: [b, d], the vector of each row's first token at depth 0.

    Returns:
        [b, s], in the order of `ANGLES`.

    Example:
        >>> x = torch.tensor([[[1.0, 0.0], [0.0, 2.0]]])
        >>> angles(x, torch.ones(1, 2).bool(), x[:, 0])[0, :3].tolist()
        [0.0, 0.0, 0.0]
    """
    x, start = upcast(x), upcast(start)
    unit = F.normalize(x, dim=-1).masked_fill(~real[..., None], 0.0)
    cosine = unit @ unit.mT
    pair = (real[:, :, None] & real[:, None, :]).triu(1)
    column = _first(real)
    rows = torch.arange(len(x), device=x.device)
    others = real.clone()
    others[rows, column] = False

    def mean(values: Float[Tensor, "b p"], over: Bool[Tensor, "b p"]) -> Float[Tensor, "b"]:
        return values.masked_fill(~over, 0.0).sum(1) / over.sum(1)

    found = (
        cosine.masked_fill(~pair, torch.inf).amin((1, 2)),
        cosine.masked_fill(~pair, 0.0).sum((1, 2)) / pair.sum((1, 2)),
        mean(cosine[rows, column], others),
        mean((unit @ F.normalize(start, dim=-1)[..., None])[..., 0], others),
        mean((x - x[rows, column][:, None]).norm(dim=-1), others),
        mean(x.norm(dim=-1), real),
    )
    return torch.stack(found, -1)


def _first(real: Bool[Tensor, "b p"]) -> Tensor:
    """The column of each row's first real token."""
    return real.int().argmax(1)


def _compute(
    trace: Trace, batch: Batch, model: Transformer, layers: range, repeats: int, off: tuple[Switch, ...]
) -> Mapping[str, Tensor]:
    one_text_of_two_tokens(batch, "token consensus")
    stream = trace[entering(layers[0])]
    real = batch.real.to(stream.device)
    start = stream[torch.arange(len(stream), device=stream.device), _first(real)]
    via = partial(angles, real=real, start=start)
    found = [via(stream)]
    for _ in range(repeats):
        by_depth, stream = pass_through(model, batch, layers, stream=stream, off=off, via=via)
        found += by_depth
    return dict(zip(ANGLES, torch.stack(found, 1).unbind(-1), strict=True))


def _finish(merged: Partial, name: str, depths: int) -> xr.Dataset:
    assert isinstance(merged, Means)
    return scored(
        name,
        {
            angle: Score.of(merged.moments[angle], unit, within=SIGNED if unit == "cosine" else POSITIVE)
            for angle, unit in UNITS.items()
        },
        ("depth",),
        coords={"depth": range(depths)},
        attrs={
            "rows": merged.moments["norm"].n, "interval": "95 % over texts",
            "null": "min_cosine = 1: all tokens in one direction",
        },
    )  # fmt: skip
