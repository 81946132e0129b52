"""ALTI-Logit: how much of a logit each input token brought, through what attention moved at every layer.

Ferrando et al. 2023, "Explaining How Transformers Use Context to Build Predictions". Layer l adds Delta_l(j) to the
logit by moving from source j; what stood at j came from the tokens as ALTI's rollout M of the layers before says:
r_s = sum_l sum_j Delta_l(j) M_(l-1)[j, s], with M_0 = I.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from interp.core.results import labelled
from interp.core.stats import Partial, Rows
from interp.data.batch import Batch
from interp.model.config import ModelConfig
from interp.model.parts import Part
from interp.model.tap import Trace
from interp.model.transformer import Transformer
from interp.passes.analysis import Analysis
from interp.residual.attribution import attribution, labels
from interp.residual.decomposition import TOLERANCE, IncompleteSumError
from interp.tokens.mixing import contributions, layers_read

if TYPE_CHECKING:
    import xarray as xr

_KINDS = {
    **dict.fromkeys(("embed", "pos_embed", "type_embed", "embed_bias"), "initial"),
    **dict.fromkeys(("mlp", "mlp_before"), "mlp"),
    **dict.fromkeys(("head", "cross_head"), "moved"),
}
"""What each kind of part counts as; all others are biases."""


def alti_logit(config: ModelConfig) -> Analysis:
    """The analysis behind `token_attribution(method="alti_logit")`; rows carry answers and end in the last column.

    `score[prompt, pos]`, and what belongs to no token: `initial` (the stream that the last token starts with), `mlp`
    and `bias` (b_O, betas, b_U); all together they are `total`, the logit (difference) before a soft cap, which they
    miss by `error`, relative. Delta is the affine variant: b_V counts, spread over the sources by attention; it goes
    through the later norms at their frozen scales. Errors: IncompleteSumError if the parts do not sum.
    """
    by_source = attribution(config, "source")
    mixed = layers_read(config, "alti", range(config.n_layers - 1))
    return Analysis(
        name="alti_logit",
        reads=(*by_source.reads, *mixed),
        compute=partial(_compute, by_source=by_source),
        reduction=Rows,
        finish=partial(_finish, config=config),
        last_only=True,
    )


def rolled_back(
    moved: Sequence[Float[Tensor, "b k"]], mixing: Sequence[Float[Tensor, "b q k"]]
) -> Float[Tensor, "b k"]:
    """r = sum_l moved_l M_(l-1), M_l = mixing_l M_(l-1), M_0 = I: what each layer moved, credited to the tokens.

    mixing: one matrix for every layer but the last. Rows that sum to 1 preserve the sum.
    """
    credit = moved[-1]
    for step, matrix in zip(reversed(moved[:-1]), reversed(mixing), strict=True):
        credit = einsum(credit, matrix, "b q, b q k -> b k") + step
    return credit


def _compute(trace: Trace, batch: Batch, model: Transformer, by_source: Analysis) -> Mapping[str, Tensor]:
    found = by_source.compute(trace, batch, model)
    n = model.config.n_layers
    moved = [found[f"attn_out_{layer}"].sum(1) for layer in range(n)]
    mixing = [contributions(model, layer, trace, "alti")[0] for layer in range(n - 1)]
    columns = found["logits"]
    rest = {name: columns[:, mask.to(columns.device)].sum(1) for name, mask in _groups(model.config).items()}
    score, total = rolled_back(moved, mixing), found["total"]
    missed = (score.sum(1) + torch.stack(list(rest.values())).sum(0) - total).abs()
    error = missed / torch.maximum(columns.abs().amax(1), total.abs()) + found["error"]
    if not bool((error <= 2 * TOLERANCE[model.dtype]).all()):
        worst = float(error.max())
        raise IncompleteSumError(f"ALTI-Logit: the parts miss the logits by {worst:.2e} relative", worst)
    return {"score": score, **rest, "total": total, "error": error}


def _groups(config: ModelConfig) -> dict[str, Tensor]:
    """Which parts of the attribution by source belong to what is no token's."""
    groups = [_KINDS.get(Part.of(name).kind, "bias") for name in labels(config, "source")]
    return {kind: torch.tensor([each == kind for each in groups]) for kind in ("initial", "mlp", "bias")}


def _finish(merged: Partial, config: ModelConfig) -> "xr.Dataset":
    assert isinstance(merged, Rows)
    dims = {name: ("prompt", "pos") if name == "score" else ("prompt",) for name in merged.rows}
    unit = "logits" if config.logit_softcap is None else "logits before the soft cap"
    return labelled(
        "token_attribution",
        {name: (dims[name], value) for name, value in merged.rows.items()},
        attrs={
            "method": "alti_logit",
            "unit": unit,
            "sums_to": "what attention added to the logit (difference); with initial, mlp and bias: total",
            "completeness_error": float(merged.rows["error"].max()),
        },
    )
