"""Rank collapse: do tokens become one another with depth, and what stops it, skip connections or MLPs?

Dong et al. 2021 (arXiv:2103.03404): without skips and MLPs, softmax attention drives the rows of the stream together,
in encoders doubly exponentially in depth. Under a causal mask rows differ by construction, so the decay is geometric
at most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from interp.core.results import labelled
from interp.core.stats import Means, Partial, upcast
from interp.core.wording import nearest
from interp.data.batch import Batch
from interp.lab.depth.switched_blocks import Switch, entering, one_text_of_two_tokens, pass_through
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer
from interp.passes.observe import Subject
from interp.passes.question import ByRow, Question, Reading
from interp.runs.functions import of_data

if TYPE_CHECKING:
    import xarray as xr

LINES: Mapping[str, tuple[Switch, ...]] = MappingProxyType(
    {"SAN": ("skip", "mlp"), "SAN+MLP": ("skip",), "SAN+skip": ("mlp",), "transformer": ()}
)
"""Parts that are switched off in every block, under the paper's names of what is left (SAN: self-attention network).
"""
ROUNDINGS = 10
"""Below this many roundings of the model's dtype a residual is noise."""


@dataclass(frozen=True)
class RankCollapse(Question):
    """How far the tokens of a text are from being all alike, by depth, with skips and MLPs on and off.

    Args:
        data: prompts, token ids, a batch, files or a stream of any size.
        lines: any of "SAN", "SAN+MLP", "SAN+skip", "transformer"; None: all, or those without MLPs in attention-only
            models. A switched-off MLP adds 0; a switched-off skip leaves what the sublayer adds. Norms stay where the
            family has them.

    Returns:
        Dataset[line, depth]; depth 0 is the stream entering the first block, l the stream after l blocks:

        - `value`: the relative residual |X - 1 x^T| / |X| with x the mean of the tokens and the composite norm
          sqrt(|.|_1 |.|_inf), mean over texts, with `low` and `high` (95 %) and `n`.
        - `null`: 0, all tokens alike.

    Raises:
        KeyError: an unknown line.
        ValueError: MLPs switched in a model without them, packed rows, or rows of a single token.

    Caveats:
        Numbers at or below `attrs["floor"]` (10 roundings of the model's dtype) are rounding, not a residual: use a
        float64 model to look deeper. The composite norm is no true norm; a mean of ratios that span decades is ruled
        by the largest. The stream of a causal model never collapses doubly exponentially.

    Source:
        Dong et al. 2021, section 4 (relative residual of a SAN, with MLPs, with skips, and of the transformer).

    See Also:
        `consensus`: directions of the tokens in the unchanged stack.

    Example:
        >>> rank_collapse(model, prompt, lines=["SAN", "transformer"]).value.sizes["depth"]
        4
    """

    _: KW_ONLY
    lines: Sequence[str] | None = None

    def bind(self, model: Subject) -> ByRow:
        """One pass per line, each from the stream that enters the first block."""
        network = model.transformer
        config = network.config
        every = [name for name, off in LINES.items() if config.mlp is not None or "mlp" in off]
        names = every if self.lines is None else list(self.lines)
        if not names or len(set(names)) != len(names):
            raise ValueError(f"distinct lines are required, got {names}")
        for name in names:
            if name not in LINES:
                raise KeyError(f"unknown line {name!r}; {nearest(name, LINES)}")
            if name not in every:
                raise ValueError(f"the line {name!r} requires MLPs; this attention-only model has {every}")
        floor = ROUNDINGS * torch.finfo(network.dtype).eps
        return ByRow(
            self.name,
            Reading([Read(entering(0))], partial(_compute, lines=names)),
            Means,
            partial(_finish, name=self.name, lines=names, depths=config.n_layers + 1, floor=floor),
        )


rank_collapse = of_data(RankCollapse)


def composite_norm(x: Float[Tensor, "*b p d"]) -> Float[Tensor, "*b"]:
    """sqrt(|X|_1 |X|_inf): the largest column sum of |X| times the largest row sum, under a root. Not a norm.

    Args:
        x: [*b, p, d], matrices of tokens.

    Returns:
        [*b], >= 0.

    Source:
        Dong et al. 2021.

    Example:
        >>> composite_norm(torch.tensor([[3.0, -1.0], [1.0, 2.0]]))
        tensor(4.)
    """
    size = x.abs()
    return (size.sum(-2).amax(-1) * size.sum(-1).amax(-1)).sqrt()


def relative_residual(x: Float[Tensor, "b p d"], real: Bool[Tensor, "b p"]) -> Float[Tensor, "b"]:
    """|X - 1 x^T| / |X| in the composite norm, where x is the mean of the real tokens.

    Args:
        x: [b, p, d], the residual stream.
        real: [b, p], True at real tokens.

    Returns:
        [b]; NaN for a stream of zeros.

    Example:
        >>> x = torch.tensor([[[1.0, 0.0], [-1.0, 0.0]]])
        >>> relative_residual(x, torch.ones(1, 2).bool())
        tensor([1.])
    """
    kept = upcast(x).masked_fill(~real[..., None], 0.0)
    mean = kept.sum(1, keepdim=True) / real.sum(1)[:, None, None]
    rest = (kept - mean).masked_fill(~real[..., None], 0.0)
    return composite_norm(rest) / composite_norm(kept)


def _compute(trace: Trace, batch: Batch, model: Transformer, lines: Sequence[str]) -> Mapping[str, Tensor]:
    one_text_of_two_tokens(batch, "rank collapse")
    stream = trace[entering(0)]
    via = partial(relative_residual, real=batch.real)
    first, layers, found = via(stream), range(model.config.n_layers), []
    for name in lines:
        by_depth, _ = pass_through(model, batch, layers, stream=stream, off=LINES[name], via=via)
        found.append(torch.stack([first, *by_depth], 1))
    return {"residual": torch.stack(found, 1)}


def _finish(merged: Partial, name: str, lines: Sequence[str], depths: int, floor: float) -> xr.Dataset:
    assert isinstance(merged, Means)
    residual = merged.moments["residual"]
    return labelled(
        name,
        residual.estimate(("line", "depth"), null=0.0),
        coords={"line": lines, "depth": range(depths)},
        units="relative residual",
        attrs={
            "rows": residual.n, "floor": floor, "unit": "relative residual",
            "interval": "95 % over texts", "null": "0: all tokens alike",
        },
    )  # fmt: skip
